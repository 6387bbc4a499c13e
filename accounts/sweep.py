"""Run every layout that fits on this machine for a few steps, and compare the measured times with the predictions.

    python plan.py configs/tiny.py --sweep --gpus=4

The layouts are all combinations of tp, pp and the micro-batch size, with dp = gpus / (tp pp) and the configuration's
global batch size. A hackathon measured the same combinations. Its fastest layout trained more than 3 times as fast as
its slowest layout.

Each layout runs under its own torchrun, with one thread per process, on random tokens. The first WARMUP steps do not
count. The time of a layout is the median of the other steps. If a layout fails or takes too long, its row has the
error, and the sweep continues. Files of a sweep, in OUT_DIR_sweepN (N: number of processes):

    results.jsonl    one line per layout. A repeated sweep runs only layouts that have no line
    base.py          the configuration of all runs. A sweep of another configuration needs another folder
    sweep.svg        the times as bars, each with its prediction
    run.log          the output of the last run

The rank correlation (Spearman 1904) compares the orders of the layouts by prediction and by measurement. It is 1 if the
orders are equal, 0 if they are unrelated, and -1 if one order is the reverse of the other.
"""

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

import config as configuration
from accounts import memory
from accounts.curve import axis
from accounts.draw import GREY, svg_text
from accounts.report import aligned
from errors import UserError, explained, parse_json
from log import read_metrics
from model import parameter_table
from operations import DTYPES, resolved_dtype
from parallel import schedules
from parallel.layout import Layout

ROOT = Path(__file__).resolve().parent.parent
GRID = ("tp", "pp", "micro_batch_size")  # the fields that differ between the layouts
WARMUP = 2  # steps that do not count: the first ones allocate memory
GRACE = 60  # seconds from SIGTERM to SIGKILL for a torchrun, which kills its own processes after 30
TOKENS = 2**16  # random tokens to train on
MEASURED, PREDICTED = "#3a7fd0", "#cc6a1c"  # readable on white and on black
WIDTH, LEFT, RIGHT, TOP, ROW = 900, 210, 780, 96, 24  # pixels: width, ends of the axis, top, height of a row


def main(config, gpus, predict=None, fixed=(), steps=10, limit=300.0):
    """Run the sweep, print its table, and write sweep.svg.

    config: a `config.Config`; gpus: the number of processes; predict: a function (config, gpus) -> seconds of a step,
    or None. fixed: names of fields in GRID that keep the configuration's value. steps: measured steps of a run; limit:
    seconds that a run may take. Raises UserError.
    """
    if torch.cuda.is_available() and gpus > torch.cuda.device_count():
        raise UserError(f"--gpus={gpus}: a sweep runs on this machine, which has {torch.cuda.device_count()} GPUs")
    folder = Path(f"{config.out_dir}_sweep{gpus}").resolve()
    base = replace(
        config, train_iters=WARMUP + steps, train_epochs=0.0, rampup_batch_size="", log_interval=1, eval_iters=0,
        eval_interval=0, eval_only=False, save_interval=0, resume="none", ledger=False, trace="", tensorboard="",
        wandb="", data_dir=str(folder / "data"), out_dir=str(folder / "run"),
    )  # fmt: skip
    chosen = layouts(base, gpus, fixed)
    prepare(base, folder)
    rows = measure_all(chosen, gpus, folder, limit)
    predicted = {key_of(c): predict(c, gpus) for c in chosen} if predict else {}
    rows = [row | {"predicted": predicted.get(key_of(row))} for row in rows]
    print(table(rows, gpus, base.global_batch_size))
    with explained(folder / "sweep.svg"):
        (folder / "sweep.svg").write_text(svg(rows, gpus, Path(config.out_dir).name), encoding="utf-8")
    print(f"{folder / 'results.jsonl'}, {folder / 'sweep.svg'}")


# --- the layouts ------------------------------------------------------------------------------------------------------


def layouts(base, gpus, fixed=()):
    """Return the configurations of GRID that `config.check` accepts and whose memory fits. Raises UserError."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    sizes = [2**i for i in range(base.global_batch_size.bit_length())]
    choices = {"tp": divisors, "pp": divisors, "micro_batch_size": sizes}
    accepted, refusals = [], []
    for values in itertools.product(*([getattr(base, f)] if f in fixed else choices[f] for f in GRID)):
        c = replace(base, **dict(zip(GRID, values, strict=True)))
        try:
            configuration.check(c, gpus)
            accepted.append(c)
        except UserError as error:
            refusals.append(str(error))
    if not accepted:
        raise UserError(f"--gpus={gpus}: no layout suits this configuration; for example: {refusals[0]}")
    limit, fitting = memory_of_a_process(gpus), [(needed_memory(c, gpus), c) for c in accepted]
    if (least := min(need for need, _ in fitting)) > limit:
        raise UserError(f"--gpus={gpus}: no layout fits: {least / 1e9:.1f} GB of {limit / 1e9:.1f} GB for each process")
    if large := [c for need, c in fitting if need > limit]:
        print(f"{len(large)} of {len(accepted)} layouts do not fit in {limit / 1e9:.1f} GB for each process")
    return [c for need, c in fitting if need <= limit]


def memory_of_a_process(gpus):
    """Return the bytes of memory for each process: those of its GPU, or its share of this machine's memory."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // gpus


def needed_memory(c, gpus):
    """Return the predicted bytes of the fullest rank."""
    dp, device = gpus // (c.tp * c.pp), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    m = configuration.micro_batches(c, c.global_batch_size, dp)
    schedule = schedules.build_for(c, dp, m)
    layout = Layout(c, dp, parameter_table(c), schedule)
    item = DTYPES[resolved_dtype(c, device)].itemsize
    sizes = memory.sizes(c, item, max(item, 4), on_cpu=device.type == "cpu")
    return max(sum(memory.predict(layout, schedule, rank, sizes).values()) for rank in range(c.pp))


def key_of(row):
    """Return the values of GRID of a configuration or of a row."""
    values = row if isinstance(row, dict) else vars(row)
    return tuple(values[name] for name in GRID)


def name_of(row):
    """Return the name of a row of results, as printed."""
    return f"tp={row['tp']} pp={row['pp']} micro-batch {row['micro_batch_size']}"


# --- the runs ---------------------------------------------------------------------------------------------------------


def prepare(base, folder):
    """Write base.py and random tokens in `folder`. Raises UserError if the folder has a sweep of another configuration.

    The fields in GRID may differ from the earlier sweep's, because each run sets these fields.
    """
    default = configuration.Config()
    assignments = {k: v for k, v in asdict(base).items() if v != getattr(default, k) and k not in GRID}
    text = "".join(f"{name} = {value!r}\n" for name, value in assignments.items())
    with explained(folder):
        (folder / "data").mkdir(parents=True, exist_ok=True)
        path = folder / "base.py"
        if path.exists() and path.read_text() != text:
            raise UserError(f"{folder}: has a sweep of another configuration; remove it or set another --out_dir")
        path.write_text(text)
        count = max(TOKENS, base.seq_length + 1)
        ids = np.random.default_rng(0).integers(0, base.vocab_size, count)
        dtype = "uint16" if base.vocab_size <= 2**16 else "uint32"
        ids.astype(dtype).tofile(folder / "data" / "train.bin")
        meta = dict(tokenizer="random", vocab_size=base.vocab_size, eot_id=0, dtype=dtype)
        meta |= dict(tokens={"train": count}, documents={"train": 1})
        (folder / "data" / "meta.json").write_text(json.dumps(meta))


def measure_all(chosen, gpus, folder, limit):
    """Run the configurations that have no line in results.jsonl. Return the rows of all `chosen` configurations."""
    results = folder / "results.jsonl"
    done = read_results(results)
    for i, c in enumerate(chosen, start=1):
        if (key := key_of(c)) in done:
            continue
        row = dict(zip(GRID, key, strict=True))
        row |= measure(row, gpus, folder, c.train_iters, limit)
        with explained(results), open(results, "a") as file:
            file.write(json.dumps(row) + "\n")
        done[key] = row
        print(f"[{i}/{len(chosen)}] {name_of(row)}: {row['error'] or milliseconds(row['seconds'])}", flush=True)
    return [done[key_of(c)] for c in chosen]


def read_results(path):
    """Return {`key_of` a row: row} of results.jsonl. Raises UserError for a line that is no row."""
    rows = {}
    with explained(path):
        lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            rows[key_of(row)] = {name: row[name] for name in (*GRID, "seconds", "spread", "error")}
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}:{number}: not a row of a sweep; remove this line to run the layout again"
            ) from None
    return rows


def measure(fields, gpus, folder, iterations, limit):
    """Run one layout. Return {"seconds": median, "spread": [smallest, largest], "error": None}, or only an error."""
    flags = [f"--{name}={value}" for name, value in fields.items()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    shutil.rmtree(folder / "run", ignore_errors=True)
    error = run([*launch, str(ROOT / "train.py"), str(folder / "base.py"), *flags], folder / "run.log", limit)
    path = folder / "run" / "metrics.jsonl"
    times = [row["iteration_ms"] / 1000 for row in read_metrics(path).values()] if path.exists() else []
    shutil.rmtree(folder / "run", ignore_errors=True)  # its checkpoint may be large
    if error is None and len(times) != iterations:
        error = f"{len(times)} of {iterations} steps are logged"
    if error:
        return {"seconds": None, "spread": None, "error": error}
    times = times[WARMUP:]
    return {"seconds": statistics.median(times), "spread": [min(times), max(times)], "error": None}


def run(command, log, limit):
    """Run `command` for at most `limit` seconds with its output in the file `log`. Return its error, or None."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with explained(log), open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not finished after {limit:g} s"
        finally:  # also after Ctrl-C
            stop(process)
    return None if code == 0 else reason(log.read_text(errors="replace"))


def stop(process):
    """End a torchrun if it still runs. torchrun passes SIGTERM on to its processes."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def reason(output):
    """Return one line that explains why a run failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for sign in ("error: ", "OutOfMemoryError", "Signal 9", "Error:"):
        for line in lines:
            if sign in line:
                return line[line.index(sign) :].removeprefix("error: ")[:160]
    return lines[-1][:160] if lines else "failed without a message"


# --- the table and the picture ----------------------------------------------------------------------------------------


def ranks_of(values):
    """Return the rank of each value, from 1 for the smallest. Equal values have the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def rank_correlation(a, b):
    """Return Spearman's rank correlation of two lists of numbers, or None if all numbers of one list are equal."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return statistics.correlation(ranks_of(a), ranks_of(b))


def milliseconds(seconds):
    """Return seconds (or None) as text: "12.3 ms"."""
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"


def table(rows, gpus, samples):
    """Return the rows, the fastest first, and the quality of the predictions, as text. samples: of a step."""
    good = sorted((row for row in rows if row["seconds"]), key=lambda row: row["seconds"])
    lines = [("layout", "dp", "m", "step", "smallest", "largest", "predicted", "predicted / measured")]
    for row in good:
        dp = gpus // (row["tp"] * row["pp"])
        ratio = f"{row['predicted'] / row['seconds']:.2f}" if row["predicted"] else "-"
        times = [milliseconds(t) for t in (row["seconds"], *row["spread"], row["predicted"])]
        lines.append((name_of(row), str(dp), str(samples // dp // row["micro_batch_size"]), *times, ratio))
    texts = [f"{gpus} processes, {samples} samples a step; m: micro-batches of a data rank", aligned(lines, 1)]
    texts += [f"{name_of(row)}: failed: {row['error']}" for row in rows if row["error"]]
    if len(good) > 1:
        texts.append(
            f"The slowest layout takes {good[-1]['seconds'] / good[0]['seconds']:.2f} times as long as the fastest."
        )
    if known := [row for row in good if row["predicted"]]:
        texts.append(judgement(known))
    return "\n".join(texts)


def judgement(rows):
    """Return the quality of the predictions as text. rows: those with a prediction, the fastest first."""
    seconds, predicted = zip(*((row["seconds"], row["predicted"]) for row in rows), strict=True)
    errors = [abs(p / s - 1) for s, p in zip(seconds, predicted, strict=True)]
    best = min(rows, key=lambda row: row["predicted"])
    correlation = rank_correlation(seconds, predicted)
    return (
        f"Prediction: mean error {statistics.fmean(errors):.1%}, largest {max(errors):.1%}; "
        f"rank correlation {'unknown' if correlation is None else f'{correlation:.2f}'} over {len(rows)} layouts.\n"
        f"The layout predicted to be the fastest takes {best['seconds'] / seconds[0]:.2f} times as long as the fastest."
    )


def svg(rows, gpus, name):
    """Return the times as horizontal bars with a mark at each prediction, as SVG with a transparent background."""
    rows = sorted(rows, key=lambda row: row["seconds"] or float("inf"))
    times = [1000 * t for row in rows for t in (row["seconds"], row["predicted"]) if t]
    ticks, x = axis([0, *times, 1e-3], 8, LEFT, RIGHT)
    bottom = TOP + ROW * len(rows)
    font = "font-family='Helvetica, Arial, sans-serif' font-size='14'"
    title = f"Time of a training step by layout: {name} on {gpus} processes"
    parts = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {bottom + 50}' {font}>"]
    parts += [f"<title>{title}</title>", svg_text(10, 24, title, f"font-size='18' font-weight='bold' fill='{GREY}'")]
    parts += [f"<rect x='10' y='42' width='22' height='14' fill='{MEASURED}'/>", words(40, 54, "measured")]
    parts += [f"<path d='M142 40v18' stroke='{PREDICTED}' stroke-width='4'/>", words(152, 54, "predicted")]
    for tick in ticks:
        parts.append(f"<path d='M{x(tick):.1f} {TOP - 6}V{bottom}' stroke='{GREY}' stroke-opacity='.35'/>")
        parts.append(words(x(tick), bottom + 18, f"{tick:g}", "middle"))
    parts.append(words(RIGHT, bottom + 40, "milliseconds", "end"))
    for i, row in enumerate(rows):
        y = TOP + ROW * i
        parts.append(words(LEFT - 10, y + 15, name_of(row), "end"))
        if row["seconds"]:
            width = x(1000 * row["seconds"]) - LEFT
            parts.append(f"<rect x='{LEFT}' y='{y + 3}' width='{width:.1f}' height='{ROW - 6}' fill='{MEASURED}'/>")
        else:
            parts.append(words(LEFT + 8, y + 15, f"failed: {row['error'][:70]}"))
        if row["predicted"]:
            at = x(1000 * row["predicted"])
            parts.append(f"<path d='M{at:.1f} {y + 1}v{ROW - 2}' stroke='{PREDICTED}' stroke-width='4'/>")
    return "\n".join([*parts, "</svg>", ""])


def words(x, y, text, anchor="start"):
    """Return a text of the picture."""
    return svg_text(x, y, text, f"text-anchor='{anchor}' fill='{GREY}'")
