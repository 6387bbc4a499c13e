"""Prints how large a model should be for a budget of FLOPs, and how long a cluster trains it: `plan.py --flops=3e24`.

Letters: N parameters, D training tokens, C training FLOPs. Training costs C = 6ND (`flops.py` explains the 6). Two
answers exist for the best (compute-optimal) model:

    rule    D = 20 N, so N = sqrt(C / 120)       slide "Transformerのスケール則"
    fit     L(N, D) = E + A / N^a + B / D^b      loss in nats per token; Hoffmann et al. fitted it

For a given C, the fit is lowest at (NOTES.md derives it)

    N = G x^(b/(a+b)),  D = x / N,  with x = C/6 and G = (aA / bB)^(1/(a+b))
"""

import math
from collections import namedtuple

from accounts.report import aligned

Fit = namedtuple("Fit", "E A B a b")
HOFFMANN = Fit(1.69, 406.4, 410.7, 0.34, 0.28)  # [1] arXiv 2203.15556, section 3.3
BESIROGLU = Fit(1.8172, 482.01, 2085.43, 0.3478, 0.3658)  # [2] arXiv 2404.10102
FITS = (HOFFMANN, BESIROGLU)
MODELS = {  # (parameters, training tokens), slide "Transformerのスケール則"
    "LaMDA": (137e9, 168e9),
    "GPT-3": (175e9, 300e9),
    "Jurassic": (178e9, 300e9),
    "Gopher": (280e9, 300e9),
    "MT-NLG 530B": (530e9, 270e9),
    "Chinchilla": (70e9, 1.4e12),
}
SLIDE_FLOPS = 3e24  # slide "GPT-4をスパコンで学習するには?", like the counts and days of MACHINES
MACHINES = {  # name: ([(number of devices, device, peak in TFLOP/s)], days)
    "OpenAI": ([(25000, "A100", 312)], 90),
    "Frontier": ([(37888, "MI250X", 383)], 75),
    "LUMI": ([(20480, "MI250X die", 191.5)], 140),
    "Aurora": ([(63744, "PVC", 839)], 30),
    "Fugaku": ([(158976, "A64FX", 6.758)], 2100),
    "ABCI": ([(960, "A100", 312), (4352, "V100", 125)], 770),
}
MFU = 0.4  # share of the peak; large runs use 0.3 to 0.5


# --- the law ----------------------------------------------------------------------------------------------------------


def by_rule(flops):
    parameters = math.sqrt(flops / 120)
    return parameters, 20 * parameters


def loss(fit, parameters, tokens):
    return fit.E + fit.A / parameters**fit.a + fit.B / tokens**fit.b


def optimum(fit, flops):
    """Return (N, D) with the lowest L(N, D) (Hoffmann et al., equation 4)."""
    ratio = (fit.a * fit.A / (fit.b * fit.B)) ** (1 / (fit.a + fit.b))  # G
    parameters = ratio * (flops / 6) ** (fit.b / (fit.a + fit.b))
    return parameters, flops / 6 / parameters


# --- the tables -------------------------------------------------------------------------------------------------------


def models_table(flops):
    """Return the compute-optimal models for C = `flops`, and then MODELS, as text."""
    rows = [("model", "N / 10^9", "D / 10^9", "D/N", "6ND", "loss [1]", "loss [2]")]
    models = {"20 tokens per parameter": by_rule(flops)}
    models |= {f"minimum of fit [{i}]": optimum(fit, flops) for i, fit in enumerate(FITS, 1)}
    for name, (n, d) in (models | MODELS).items():
        row = [name, f"{n / 1e9:,.4g}", f"{d / 1e9:,.4g}", f"{d / n:.1f}", f"{6 * n * d:.3g}"]
        rows.append([*row, *(f"{loss(fit, n, d):.3f}" for fit in FITS)])
    return aligned(rows, 1)


def main(flops, gpus, device):
    """Print two tables: models for so many FLOPs, and machines, with their days at MFU."""
    yours = {"your cluster": ([(gpus, device.name, device.peak(device.dtype) / 1e12)], None)}
    rows = [("machine", "devices", "slide's days", "used", "days")]
    for name, (devices, days) in (MACHINES | yours).items():
        names = " + ".join(f"{count:,} {device}" for count, device, _ in devices)
        peak = sum(count * peak for count, _, peak in devices) * 1e12 * 86400  # FLOPs of a day
        on_slide = (f"{days:,}", f"{SLIDE_FLOPS / (peak * days):.1%}") if days else ("-", "-")
        rows.append((name, names, *on_slide, f"{flops / (MFU * peak):,.1f}"))
    print(f"""Compute-optimal models for C = {flops:.3g} FLOPs, and the models of the slide "Transformerのスケール則"
{models_table(flops)}
N: parameters. D: training tokens. C = 6ND (the slide counts 5.7ND). Losses are in nats per token.
[1]: Hoffmann et al. 2022, arXiv 2203.15556. [2]: its replication, Besiroglu et al. 2024, arXiv 2404.10102.
D/N above 20 costs more training, but the smaller model makes each later token cheaper: inference is paid for longer.

Machines of the slide "GPT-4をスパコンで学習するには?"
{aligned(rows, 2)}
used: share of the peak that the machine uses if {SLIDE_FLOPS:.3g} FLOPs take the slide's days.
days: for {flops:.3g} FLOPs, at {MFU} of the peak. Public estimates for GPT-4 are near 2e25 FLOPs.""")
