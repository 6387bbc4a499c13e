"""Published runs, the fit of the A100's constants to some of them, and the predictions of all.

    python -m accounts.fit --svg=published.svg

The command prints the fitted constants, the error of each row, and each row's prediction by a fit without this row. The
fitted constants are `matrix`, `wire` and `wave`. The others keep their starting values, because these runs do not
determine them. A fitted `memory` would exceed the data sheet's rate, and these steps wait little for the network. The
fit minimises the sum of the squares of log(predicted / published) (Gauss and Newton's method).

    NARAYANAN     Narayanan et al., arXiv 2104.04473, Table 1. The fit uses it
    KORTHIKANTI   Korthikanti et al., arXiv 2205.05198, Table 5. The fit uses the runs with full recomputation
    OTHERS        no fit uses these: Smith et al., arXiv 2201.11990, section 2.4 (MT-NLG, DeepSpeed); Jiang et al., arXiv
                  2402.15627, Table 2 (Megatron-LM); MosaicML, LLM Foundry, scripts/train/benchmarking/README.md (MPT,
                  ZeRO-3): 8 of the 64 runs whose mean is `seconds.REST`

The GPUs are A100 with 80 GB, eight in a node, except where OTHERS names the H100. These settings of `plan.py` predict
features of the programs of the first two:

    their program                                     setting
    attention's matrix, messages, reductions          code="megatron-2021", "megatron-2022" (`seconds.py`)
    selective recomputation                           recompute=none
    dropout on attention                              code="megatron-2021", "megatron-2022" count it
    gradients of 2 bytes (Narayanan et al.)           none: we count 4 bytes
    one network card for a ring (Table 2)             rings=1

Narayanan et al. do not publish the micro-batch size and the number of chunks. One rule chooses them for all rows: the
fastest prediction that fits into memory, with 1 to 16 samples and 1 to 4 chunks that divide the layers.
"""

import itertools
import math
from dataclasses import replace

import numpy as np

from accounts import figures, layouts
from accounts.devices import DEVICES
from config import Config
from errors import Parser, exit_on_user_error
from log import hardware_flops

TOKENS = 2048  # of a sample
FITTED = ("matrix", "wire", "wave")
DEVICE = DEVICES["a100-80g"]._replace(rings=1)
GPT = Config(seq_length=TOKENS, vocab_size=51200, dropout=0.1, train_iters=1, dtype="bf16")

# (billions of parameters, heads, h, L, tp, pp, GPUs, global batch, TFLOP/s of a GPU with recomputation, % of the peak,
# PFLOP/s of all)
NARAYANAN = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 44, 4.4),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 44, 8.8),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 46, 18.2),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 43, 34.6),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 44, 70.8),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 45, 143.8),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 47, 227.1),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 50, 297.4),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 52, 410.2),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 52, 502.0),
]

# (model, L, h, heads, tp, pp, chunks, global batch, micro-batch, GPUs, seconds with full recomputation, seconds with
# selective recomputation and sequence parallelism, % MFU and % HFU with selective recomputation)
KORTHIKANTI = [
    ("22B", 48, 6144, 64, 8, 1, 1, 4, 4, 8, 1.42, 1.10, 41.5, 43.7),
    ("175B", 96, 12288, 96, 8, 8, 3, 64, 1, 64, 18.13, 13.75, 51.4, 52.8),
    ("530B", 105, 20480, 128, 8, 35, 3, 280, 1, 280, 49.05, 37.83, 56.0, 57.0),
    ("1T", 128, 25600, 160, 8, 64, 1, 512, 1, 512, 94.42, 71.49, 56.3, 57.0),
]
DATA_PARALLEL_530B = 8, 2240, 39.15, 54.2  # dp, GPUs, seconds, % MFU of the 530B model with dp times its batch


MOSAIC = [  # (model, device, GPUs, L, h, heads, micro-batch, micro-batches, recompute, tokens/s of a GPU)
    ("MPT 1B", "a100-80g", 8, 24, 2048, 16, 14, 4, "none", 20513),
    ("MPT 7B", "a100-80g", 8, 32, 4096, 32, 6, 2, "none", 4641),
    ("MPT 30B", "a100-80g", 8, 48, 7168, 56, 3, 21, "full", 916),
    ("MPT 70B", "a100-80g", 64, 80, 8192, 64, 8, 4, "full", 410),
    ("MPT 13B", "a100-40g", 32, 40, 5120, 40, 14, 1, "full", 1998),
    ("MPT 3B", "h100", 16, 32, 2560, 20, 10, 3, "none", 24142),
    ("MPT 30B", "h100", 8, 48, 7168, 56, 3, 21, "full", 2002),
    ("MPT 70B", "h100", 64, 80, 8192, 64, 8, 4, "full", 1039),
]
SMITH = [(1920, 2240, 60.1), (1920, 2800, 50.2), (1920, 3360, 44.4)]  # (samples, GPUs, seconds), as in JIANG
JIANG = [(768, 256, 40.0), (768, 1024, 11.9), (6144, 3072, 29.02), (6144, 6144, 14.78), (6144, 12288, 8.57)]


def config(layers, hidden, heads, tp, pp, chunks, batch, b, **more):
    """Return the Config of a published run."""
    sizes = dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, tp=tp, pp=pp, chunks=chunks)
    name = "interleaved" if chunks > 1 else "1f1b"
    return replace(GPT, **sizes, schedule=name, global_batch_size=batch, micro_batch_size=b, **more)


def chosen(heads, hidden, layers, tp, pp, gpus, batch):
    """Return the Config of a row of NARAYANAN by the rule above."""
    best = {}
    for b, chunks in itertools.product((1, 2, 4, 8, 16), (1, 2, 3, 4) if pp > 1 else (1,)):
        c = config(layers, hidden, heads, tp, pp, chunks, batch, b, recompute="full")
        if layers % (pp * chunks) or not layouts.fields_fit(c, gpus) or not layouts.schedule_fits(c, gpus // (tp * pp)):
            continue
        facts = layouts.judge(c, gpus, DEVICE, "megatron-2021")
        if facts["fits"]:
            best[facts["step_seconds"]] = c
    return best[min(best)]


def full():
    """Return the rows of the fit: [(name, Config, GPUs, code, published seconds)]."""
    rows = []
    for billions, *sizes, gpus, batch, tflops, _, _ in NARAYANAN:
        c = chosen(*sizes, gpus, batch)
        rows.append((f"{billions}B, 2021", c, gpus, "megatron-2021", hardware_flops(c, batch) / (tflops * 1e12 * gpus)))
    for name, *sizes, gpus, seconds, _, _, _ in KORTHIKANTI:
        rows.append((f"{name}, 2022", config(*sizes, recompute="full"), gpus, "megatron-2022", seconds))
    return rows


def selective():
    """Return the rows with selective recomputation, in the form of `full`. The last one is the 530B model with dp = 8."""
    rows, (dp, more, slower, _) = [], DATA_PARALLEL_530B
    for name, *sizes, gpus, _, seconds, _, _ in KORTHIKANTI:
        rows.append((f"{name}, selective", config(*sizes, sequence_parallel=True), gpus, "megatron-2022", seconds))
    c = replace(rows[2][1], global_batch_size=dp * rows[2][1].global_batch_size)
    return [*rows, (f"530B, selective, dp={dp}", c, more, "megatron-2022", slower)]


def others():
    """Return the rows of OTHERS, in the form of `full`, but with a Device in place of the code: the code is ours."""
    rows = []
    for name, device, gpus, *sizes, b, m, recompute, speed in MOSAIC:
        c = config(*sizes, 1, 1, 1, m * b * gpus, b, recompute=recompute, zero=3)
        rows.append((name, replace(c, dropout=0.0), gpus, device, m * b * TOKENS / speed))
    for batch, gpus, seconds in SMITH:
        c = config(105, 20480, 128, 8, 35, 1, batch, 1, recompute="full")
        rows.append(("MT-NLG 530B", c, gpus, "a100-80g", seconds))
    for batch, gpus, seconds in JIANG:
        c = config(96, 12288, 128, 8, 8, 6, batch, 1, sequence_parallel=True, zero=1)
        rows.append(("175B, Jiang", c, gpus, "a100-80g", seconds))
    return rows


def predicted(row, device=DEVICE):
    """Return the predicted seconds of a step of a row."""
    _, c, gpus, code, _ = row
    if code in DEVICES:
        device, code = DEVICES[code], "ours"
    return layouts.judge(c, gpus, device, code)["step_seconds"]


def fit(rows, device=DEVICE, rounds=8):
    """Return the device with the values of FITTED that predict the rows best."""

    def with_logs(x):
        return device._replace(**dict(zip(FITTED, map(float, np.exp(x)), strict=True)))

    def errors(x):
        return np.array([math.log(predicted(row, with_logs(x)) / row[4]) for row in rows])

    x, step = np.log([getattr(device, name) for name in FITTED]), 1e-3
    for _ in range(rounds):
        now = errors(x)
        slopes = np.array([(errors(x + step * unit) - now) / step for unit in np.eye(len(x))]).T
        x = x + np.clip(np.linalg.lstsq(slopes, -now, rcond=None)[0], -0.3, 0.3)
    return with_logs(x)


def main(arguments=None):
    """Print the constants and the table of all rows; --svg draws the rows. arguments: by default the command line's."""
    parser = Parser(prog="python -m accounts.fit", description="Fit the A100's constants to published runs.")
    parser.add_argument("--svg", metavar="FILE", help="draw predicted beside published times")
    options, points = parser.parse_args(arguments), []
    rows = full()
    best = fit(rows)
    print("fitted: " + ", ".join(f"{name} {getattr(best, name):.4g}" for name in FITTED))
    print(
        f"{'row':<26} {'GPUs':>5} {'b':>2} {'v':>2} {'published':>10} {'predicted':>10} {'error':>7} {'fit without it':>15}"
    )
    for row in [*rows, *selective(), *others()]:
        (name, c, gpus, _, seconds), now, without = row, predicted(row, best), ""
        if row in rows:
            other = fit([r for r in rows if r is not row], best, rounds=3)
            without = f"{predicted(row, other) / seconds - 1:+.1%}"
        text = f"{name:<26} {gpus:>5} {c.micro_batch_size:>2} {c.chunks:>2} {seconds:>10.2f} {now:>10.2f}"
        print(f"{text} {now / seconds - 1:>+7.1%} {without:>15}", flush=True)
        points.append((name, "fitted" if row in rows else "not fitted", seconds, now))
    if options.svg:
        figures.scatter(options.svg, points)


if __name__ == "__main__":
    exit_on_user_error(main)
