"""Fit the A100's constants to published runs with full recomputation, and predict the other runs.

    python -m accounts.fit --svg=published.svg

The command prints the fitted constants, the error of each row, and each row's prediction by a fit without this row. It
also predicts runs that no fit uses: selective recomputation with sequence parallelism. The fitted constants are
`matrix`, `wire` and `wave`. The others keep their starting values, because these runs do not determine them. A fitted
`memory` would exceed the data sheet's rate, and these steps wait little for the network.

The fit minimises the sum of the squares of log(predicted / published) (Gauss and Newton's method).

Narayanan et al. do not publish the micro-batch size and the number of chunks. One rule chooses them for all rows: the
fastest prediction that fits into memory, with 1 to 16 samples and 1 to 4 chunks that divide the layers.
"""

import math

import numpy as np

from accounts import figures, layouts
from accounts.devices import DEVICES
from accounts.published import DATA_PARALLEL_530B, KORTHIKANTI, NARAYANAN, TOKENS, VOCABULARY
from config import Config
from errors import Parser, exit_on_user_error
from log import hardware_flops

FITTED = ("matrix", "wire", "wave")
NAMES = ("num_layers", "hidden_size", "num_attention_heads", "tp", "pp", "chunks", "global_batch_size")


def config(*sizes, micro_batch_size, **more):
    """Return the Config of a published run. sizes: values of NAMES."""
    fields = dict(zip(NAMES, sizes, strict=True))
    name = "interleaved" if fields["chunks"] > 1 else "1f1b"
    common = dict(seq_length=TOKENS, vocab_size=VOCABULARY, dropout=0.1, train_iters=1, dtype="bf16")
    return Config(**common, **fields, schedule=name, micro_batch_size=micro_batch_size, **more)


def chosen(device, heads, hidden, layers, tp, pp, gpus, batch):
    """Return the Config of a row of NARAYANAN by the rule above."""
    best = None
    for b in (1, 2, 4, 8, 16):
        for chunks in (1, 2, 3, 4)[: 1 if pp == 1 else 4]:
            sizes = layers, hidden, heads, tp, pp, chunks, batch
            c = config(*sizes, micro_batch_size=b, recompute="full")
            if layers % (pp * chunks) or not layouts.accepts(c, gpus):
                continue
            facts = layouts.judge(c, gpus, device, code="megatron-2021", all_ranks=False)
            if facts["fits"] and (best is None or facts["step_seconds"] < best[0]):
                best = facts["step_seconds"], c
    return best[1]


def full(device):
    """Return the rows of the fit: [(name, Config, GPUs, code, published seconds)]."""
    rows = []
    for billions, heads, hidden, layers, tp, pp, gpus, batch, tflops, *_ in NARAYANAN:
        c = chosen(device, heads, hidden, layers, tp, pp, gpus, batch)
        seconds = hardware_flops(c, batch) / (tflops * 1e12 * gpus)
        rows.append((f"{billions}B, 2021", c, gpus, "megatron-2021", seconds))
    for name, layers, hidden, heads, tp, pp, chunks, batch, b, gpus, seconds, *_ in KORTHIKANTI:
        c = config(layers, hidden, heads, tp, pp, chunks, batch, micro_batch_size=b, recompute="full")
        rows.append((f"{name}, 2022", c, gpus, "megatron-2022", seconds))
    return rows


def selective():
    """Return the rows that the fit does not use, in the form of `full`. The last one is the 530B model with dp = 8."""
    rows = []
    for name, layers, hidden, heads, tp, pp, chunks, batch, b, gpus, _, seconds, *_ in KORTHIKANTI:
        c = config(layers, hidden, heads, tp, pp, chunks, batch, micro_batch_size=b, sequence_parallel=True)
        rows.append((f"{name}, selective", c, gpus, "megatron-2022", seconds))
        if name == "530B":
            dp, gpus, seconds, _ = DATA_PARALLEL_530B
            c = config(layers, hidden, heads, tp, pp, chunks, dp * batch, micro_batch_size=b, sequence_parallel=True)
            more = f"530B, selective, dp={dp}", c, gpus, "megatron-2022", seconds
    return [*rows, more]


def predicted(row, device):
    """Return the predicted seconds of a step of a row."""
    _, c, gpus, code, _ = row
    return layouts.judge(c, gpus, device, code=code, all_ranks=False)["step_seconds"]


def fit(rows, device, rounds=8):
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
    device = DEVICES["a100-80g"]
    rows = full(device)
    best = fit(rows, device)
    print("fitted: " + ", ".join(f"{name} {getattr(best, name):.4g}" for name in FITTED))
    print(f"{'row':<26} {'b':>2} {'v':>2} {'published':>10} {'predicted':>10} {'error':>7} {'fit without it':>15}")
    for row in [*rows, *selective()]:
        c, seconds, now = row[1], row[4], predicted(row, best)
        without = ""
        if row in rows:
            other = fit([r for r in rows if r is not row], best, rounds=3)
            without = f"{predicted(row, other) / seconds - 1:+.1%}"
        text = f"{row[0]:<26} {c.micro_batch_size:>2} {c.chunks:>2} {seconds:>10.2f} {now:>10.2f}"
        print(f"{text} {now / seconds - 1:>+7.1%} {without:>15}", flush=True)
        points.append((row[0], "fitted: full recomputation" if row in rows else "not fitted", seconds, now))
    if options.svg:
        figures.scatter(options.svg, points)


if __name__ == "__main__":
    exit_on_user_error(main)
