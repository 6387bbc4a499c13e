"""Published runs, the fit of the A100's constants to some of them, and the predictions of all.

    python -m accounts.fit --svg=published.svg

The command prints the fitted constants and the error of each run. The fitted constants are `matrix`, `wire` and `wave`.
The others keep their starting values, because these runs do not determine them. A fitted `memory` would exceed the data
sheet's rate, and these steps wait little for the network. The fit minimises the sum of the squares of log(predicted /
published) (Gauss and Newton's method).

    NARAYANAN     Narayanan et al., arXiv 2104.04473, Table 1. The fit uses it
    KORTHIKANTI   Korthikanti et al., arXiv 2205.05198, Table 5. The fit uses the runs with full recomputation
    MOSAIC        MosaicML, LLM Foundry, scripts/train/benchmarking/README.md (MPT, ZeRO-3). No fit uses these 8 runs.
                  They are among the 64 runs whose mean is `seconds.REST`
    SMITH         Smith et al., arXiv 2201.11990, section 2.4 (MT-NLG, DeepSpeed). No fit uses it
    JIANG         Jiang et al., arXiv 2402.15627, Table 2 (Megatron-LM). No fit uses it

The GPUs are A100 with 80 GB, eight in a node, except where MOSAIC names the H100. These settings of `plan.py` predict
features of the programs of the first two:

    their program                                     setting
    attention's matrix, messages, reductions          code="megatron-2021", "megatron-2022" (`seconds.py`)
    selective recomputation                           recompute=none
    dropout on attention                              code="megatron-2021", "megatron-2022" count it
    gradients of 2 bytes (Narayanan et al.)           none: we count 4 bytes
    one network card for a ring (Table 2)             rings=1

Narayanan et al. do not publish the micro-batch size b and the number of chunks v. One rule chose them for all rows: the
fastest prediction that fits into memory, with 1 to 16 samples and 1 to 4 chunks that divide the layers.
"""

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

# (billions of parameters, L, h, heads, tp, pp, v, global batch, b, GPUs, TFLOP/s of a GPU with recomputation)
NARAYANAN = [
    (1.7, 24, 2304, 24, 1, 1, 1, 512, 16, 32, 137),
    (3.6, 30, 3072, 32, 2, 1, 1, 512, 16, 64, 138),
    (7.5, 36, 4096, 32, 4, 1, 1, 512, 16, 128, 142),
    (18.4, 40, 6144, 48, 8, 1, 1, 1024, 16, 256, 135),
    (39.1, 48, 8192, 64, 8, 2, 4, 1536, 8, 512, 138),
    (76.1, 60, 10240, 80, 8, 4, 3, 1792, 2, 1024, 140),
    (145.6, 80, 12288, 96, 8, 8, 2, 2304, 2, 1536, 148),
    (310.1, 96, 16384, 128, 8, 16, 3, 2160, 1, 1920, 155),
    (529.6, 105, 20480, 128, 8, 35, 3, 2520, 2, 2520, 163),
    (1008.0, 128, 25600, 160, 8, 64, 2, 3072, 1, 3072, 163),
]
# (model, L, h, heads, tp, pp, chunks, global batch, micro-batch, GPUs, seconds with full recomputation, seconds with
# selective recomputation and sequence parallelism)
KORTHIKANTI = [
    ("22B", 48, 6144, 64, 8, 1, 1, 4, 4, 8, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 8, 3, 64, 1, 64, 18.13, 13.75),
    ("530B", 105, 20480, 128, 8, 35, 3, 280, 1, 280, 49.05, 37.83),
    ("1T", 128, 25600, 160, 8, 64, 1, 512, 1, 512, 94.42, 71.49),
]
DATA_PARALLEL_530B = 8, 2240, 39.15  # dp, GPUs, seconds of the 530B model with dp times its batch


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


def published():
    """Return (runs of the fit, other runs): [(name, Config, GPUs, code or device, seconds of a step)] each."""
    fitted, runs = [], []
    for billions, *sizes, gpus, tflops in NARAYANAN:
        c = config(*sizes, recompute="full")
        seconds = hardware_flops(c, c.global_batch_size) / (tflops * 1e12 * gpus)
        fitted.append((f"{billions}B, 2021", c, gpus, "megatron-2021", seconds))
    for name, *sizes, gpus, full, selective in KORTHIKANTI:
        c = config(*sizes, sequence_parallel=True)
        fitted.append((f"{name}, 2022", config(*sizes, recompute="full"), gpus, "megatron-2022", full))
        runs.append((f"{name}, selective", c, gpus, "megatron-2022", selective))
    dp, gpus, seconds = DATA_PARALLEL_530B
    c = replace(runs[2][1], global_batch_size=dp * runs[2][1].global_batch_size)
    runs.append((f"530B, selective, dp={dp}", c, gpus, "megatron-2022", seconds))
    for name, device, gpus, *sizes, b, m, recompute, speed in MOSAIC:
        c = config(*sizes, 1, 1, 1, m * b * gpus, b, recompute=recompute, zero=3, dropout=0.0)
        runs.append((name, c, gpus, device, m * b * TOKENS / speed))
    for batch, gpus, seconds in SMITH:
        c = config(105, 20480, 128, 8, 35, 1, batch, 1, recompute="full")
        runs.append(("MT-NLG 530B", c, gpus, "a100-80g", seconds))
    for batch, gpus, seconds in JIANG:
        c = config(96, 12288, 128, 8, 8, 6, batch, 1, sequence_parallel=True, zero=1)
        runs.append(("175B, Jiang", c, gpus, "a100-80g", seconds))
    return fitted, runs


def predicted(run, device=DEVICE):
    """Return the predicted seconds of a step. device: for the programs of the two papers."""
    _, c, gpus, code, _ = run
    if code in DEVICES:
        device, code = DEVICES[code], "ours"
    return layouts.judge(c, gpus, device, code, exact=False)["step_seconds"]


def fit(runs, device=DEVICE, rounds=8):
    """Return the device with the values of FITTED that predict the runs best."""

    def with_logs(x):
        return device._replace(**dict(zip(FITTED, map(float, np.exp(x)), strict=True)))

    def errors(x):
        return np.array([math.log(predicted(run, with_logs(x)) / run[-1]) for run in runs])

    x, step = np.log([getattr(device, name) for name in FITTED]), 1e-3
    for _ in range(rounds):
        now = errors(x)
        slopes = np.array([(errors(x + step * unit) - now) / step for unit in np.eye(len(x))]).T
        x = x + np.clip(np.linalg.lstsq(slopes, -now, rcond=None)[0], -0.3, 0.3)
    return with_logs(x)


def main(arguments=None):
    """Print the constants and the table of all runs; --svg draws them. arguments: by default the command line's."""
    parser = Parser(prog="python -m accounts.fit", description="Fit the A100's constants to published runs.")
    parser.add_argument("--svg", metavar="FILE", help="draw predicted beside published times")
    options, points = parser.parse_args(arguments), []
    fitted, others = published()
    best = fit(fitted)
    print("fitted: " + ", ".join(f"{name} {getattr(best, name):.4g}" for name in FITTED))
    print(f"{'run':<25} {'GPUs':>5} {'published':>10} {'predicted':>10} {'error':>7}")
    for group, runs in ("fitted", fitted), ("not fitted", others):
        for run in runs:
            (name, _, gpus, _, seconds), now = run, predicted(run, best)
            print(f"{name:<25} {gpus:>5} {seconds:>10.2f} {now:>10.2f} {now / seconds - 1:>+7.1%} {group}")
            points.append((name, group, seconds, now))
    if options.svg:
        figures.scatter(options.svg, points)


if __name__ == "__main__":
    exit_on_user_error(main)
