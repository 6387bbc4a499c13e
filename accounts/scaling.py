"""Prints how large a model should be for a budget of FLOPs, and how long a cluster trains it: `plan.py --flops=3e24`.

Letters: N parameters, D training tokens, C training FLOPs. Training costs C = 6ND (log.py explains the 6; the slide
"Transformerのスケール則" counts 5.7). The same budget can train a large model on few tokens or a small model on many.
Two answers exist for the best (compute-optimal) model:

    rule    D = 20 N, so N = sqrt(C / 120)       slide "Transformerのスケール則"
    fit     L(N, D) = E + A / N^a + B / D^b      loss in nats per token; Hoffmann et al. fitted it to over 400 runs

For a given C, the fit is lowest where its derivative along 6ND = C is zero. With x = C/6:

    N = G x^(b/(a+b)),  D = x / N,  G = (aA / bB)^(1/(a+b))
    L = E + K x^-k,  k = ab / (a+b),  K = A G^-a + B G^b

`enough_flops` solves the last line for C: the FLOPs that a compute-optimal model needs for a given loss. The fit was
published with two sets of constants. They disagree most at large budgets, so the tables show both:

    [1]  Hoffmann et al. 2022, arXiv 2203.15556, section 3.3 (approach 3)
    [2]  Besiroglu et al. 2024, arXiv 2404.10102: a replication with the data of [1]. Its minimum is close to the rule.

The exponents in [1] are rounded. Before rounding, they are 0.3392 and 0.2849 (see [2]). For Gopher's 5.76e23 FLOPs,
the exact exponents give the 40 billion parameters that [1] states, and the rounded exponents give 32 billion.

MACHINES are those of the slide "GPT-4をスパコンで学習するには?". Their peaks are those of dense bf16 or fp16
products in the makers' data sheets (A64FX: fp32 at 2.2 GHz). A MI250X has 2 dies. Frontier's 37,888 are modules
(9,472 nodes with 4). LUMI's 20,480 must be dies: its 2,978 nodes have only 11,912 modules.
"""

import math
from collections import namedtuple

from accounts.report import aligned
from errors import UserError
from log import peak_tflops

DAY = 86400  # seconds


Fit = namedtuple("Fit", "E A B a b")  # constants of L(N, D) = E + A / N^a + B / D^b
Machine = namedtuple("Machine", "name devices days")  # devices: [(count, name, peak in TFLOP/s)]; days: on the slide
HOFFMANN = Fit(1.69, 406.4, 410.7, 0.34, 0.28)
BESIROGLU = Fit(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
FITS = (HOFFMANN, BESIROGLU)  # [1] and [2]

MODELS = {  # (parameters, training tokens), slide "Transformerのスケール則"
    "LaMDA": (137e9, 168e9),
    "GPT-3": (175e9, 300e9),
    "Jurassic": (178e9, 300e9),
    "Gopher": (280e9, 300e9),
    "MT-NLG 530B": (530e9, 270e9),
    "Chinchilla": (70e9, 1.4e12),
}


SLIDE_FLOPS = 3e24  # slide "GPT-4をスパコンで学習するには?", like the counts and days of MACHINES
A100, V100 = peak_tflops("A100 SXM4", "bf16"), peak_tflops("V100 SXM2", "fp16")
MACHINES = [
    Machine("OpenAI", [(25000, "A100", A100)], 90),
    Machine("Frontier", [(37888, "MI250X", 383)], 75),
    Machine("LUMI", [(20480, "MI250X die", 191.5)], 140),
    Machine("Aurora", [(63744, "PVC", 839)], 30),
    Machine("Fugaku", [(158976, "A64FX", 6.758)], 2100),
    Machine("ABCI", [(960, "A100", A100), (4352, "V100", V100)], 770),
]


# --- the law ----------------------------------------------------------------------------------------------------------


def by_rule(flops):
    """Return (N, D) of the rule D = 20 N, for a budget C = 6ND."""
    parameters = math.sqrt(flops / 120)
    return parameters, 20 * parameters


def loss(fit, parameters, tokens):
    """Return L(N, D) in nats per token."""
    return fit.E + fit.A / parameters**fit.a + fit.B / tokens**fit.b


def optimum(fit, flops):
    """Return (N, D) with the lowest L(N, D) among all with 6ND = C (Hoffmann et al., equation 4)."""
    ratio = (fit.a * fit.A / (fit.b * fit.B)) ** (1 / (fit.a + fit.b))  # G
    parameters = ratio * (flops / 6) ** (fit.b / (fit.a + fit.b))
    return parameters, flops / 6 / parameters


def enough_flops(fit, target):
    """Return the FLOPs with which a compute-optimal model reaches the loss `target` (above E), in nats per token."""
    parameters, tokens = optimum(fit, 6)  # at C/6 = 1: N = G, D = 1/G
    k = fit.a * fit.b / (fit.a + fit.b)
    return 6 * ((loss(fit, parameters, tokens) - fit.E) / (target - fit.E)) ** (1 / k)


def peak(machine):
    """Return FLOP/s of all devices of a Machine together."""
    return sum(count * teraflops for count, _, teraflops in machine.devices) * 1e12


def used(machine):
    """Return the part of a Machine's peak that it uses if SLIDE_FLOPS take the days on the slide."""
    return SLIDE_FLOPS / (peak(machine) * machine.days * DAY)


# --- the tables -------------------------------------------------------------------------------------------------------


def optimum_table(flops):
    """Return the compute-optimal sizes for C = `flops` by the rule and by both fits, as text."""
    rows = [("", "N", "D", "D/N", "loss [1]", "loss [2]")]
    sizes = {"20 tokens per parameter": by_rule(flops)}
    sizes |= {f"minimum of fit [{i}]": optimum(fit, flops) for i, fit in enumerate(FITS, 1)}
    for name, (n, d) in sizes.items():
        rows.append((name, big(n), big(d), f"{d / n:.1f}", *(f"{loss(fit, n, d):.3f}" for fit in FITS)))
    return f"""Compute-optimal model for C = {power(flops)} FLOPs
{aligned(rows, 1)}
N: parameters. D: training tokens. C = 6ND. Losses are in nats per token.
[1]: Hoffmann et al. 2022, arXiv 2203.15556. [2]: its replication, Besiroglu et al. 2024, arXiv 2404.10102."""


def models_table():
    """Return the models of slide "Transformerのスケール則" with their FLOPs and losses, as text."""
    rows = [("model", "N", "D", "D/N", "6ND", "5.7ND", "loss [1]", "enough [1]", "loss [2]", "enough [2]")]
    for name, (n, d) in MODELS.items():
        cells = []
        for fit in FITS:
            reached = loss(fit, n, d)
            cells += [f"{reached:.3f}", f"{enough_flops(fit, reached) / (6 * n * d):.0%}"]
        rows.append((name, big(n), big(d), f"{d / n:.1f}", power(6 * n * d), power(5.7 * n * d), *cells))
    return f"""Models of the slide "Transformerのスケール則" (the slide counts 5.7ND FLOPs)
{aligned(rows, 1)}
enough: a compute-optimal model reaches the same loss with this part of the FLOPs. 100% is compute-optimal."""


def machines_table(flops, cluster, mfu):
    """Return the machines of slide "GPT-4をスパコンで学習するには?" and the user's `cluster` (or None), as text."""
    rows = [("machine", "device", "devices", "peak TFLOP/s", "slide's days", "used", f"FLOPs at {mfu:.3g}", "days")]
    for machine in [*MACHINES, *([cluster] if cluster else [])]:
        counts, names, peaks = zip(*machine.devices, strict=True)
        devices = [" + ".join(texts) for texts in (names, (f"{n:,}" for n in counts), (f"{x:g}" for x in peaks))]
        per_day, on_slide = peak(machine) * DAY, ["-"] * 3
        if machine.days:
            on_slide = f"{machine.days:,}", f"{used(machine):.1%}", power(mfu * per_day * machine.days)
        rows.append((machine.name, *devices, *on_slide, f"{flops / (mfu * per_day):,.1f}"))
    return f"""Machines of the slide "GPT-4をスパコンで学習するには?"
{aligned(rows, 2)}
used: part of the peak that the machine uses if {power(SLIDE_FLOPS)} FLOPs take the slide's days.
FLOPs: in the slide's days, at {mfu:.3g} of the peak. days: for {power(flops)} FLOPs, at {mfu:.3g} of the peak.
Large runs use 30% to 50% of the peak. Public estimates for GPT-4 are near 2e25 FLOPs."""


def big(number):
    """Return a count with three digits: "158 B" for 158 billion."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if number >= 0.9995 * size:
            return f"{number / size:,.{max(0, 2 - int(math.log10(number / size * 1.0005)))}f}{unit}"
    return f"{number:.3g}"


def power(number):
    """Return a number of FLOPs as text: "3.00e24"."""
    return f"{number:.2e}".replace("e+", "e")


def main(flops, cluster=None, mfu=0.4):
    """Print the three tables for a budget of `flops` FLOPs. cluster: (number, Device) of the user. Raises UserError."""
    for name, value, most in ("flops", flops, 1e300), ("mfu", mfu, 1):
        if not 0 < value <= most:
            raise UserError(f"--{name}={value}: should be above 0 and at most {most}")
    if cluster:
        gpus, device = cluster
        cluster = Machine("your cluster", [(gpus, device.name, device.peak(device.dtype) / 1e12)], None)
    print(optimum_table(flops), models_table(), machines_table(flops, cluster, mfu), sep="\n\n")
