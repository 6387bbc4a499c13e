"""Measures a training step of every layout of this machine: all tp, pp and micro-batch sizes that train.py accepts.

    python -m bench sweep --config=configs/tiny.py --processes=4

Each layout runs under its own torchrun, with one thread per process, on random tokens. The first WARMUP steps do not
count. The folder OUT_DIR_sweepN (N: number of processes) has the data and the last run's output.

With --device the table shows plan.py's predictions. Their rank correlation (Spearman 1904) is 1 if the predicted order
is the measured one, 0 if the orders are unrelated, and -1 for the reverse order.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

import config as configuration
from accounts import search
from accounts.devices import DEVICES
from accounts.metrics import read_metrics
from bench import tables
from bench.tables import print_table, spread
from errors import UserError, explained

ROOT = Path(__file__).resolve().parent.parent
GRID = ("tp", "pp", "micro_batch_size")  # the fields of a layout
WARMUP, LIMIT = 2, 300  # steps that do not count; seconds of a run


def measure(config: str = "configs/tiny.py", processes: int = 4, steps: int = 10, only: str = "", device: str = ""):
    """Run every layout that train.py accepts for a few steps on this machine, and print the fastest first.

    --config     all fields except tp, pp and micro_batch_size
    --processes  of each run
    --steps      timed steps of each run
    --only       only layouts whose name contains this text, such as tp=2
    --device     a device of accounts/devices.py, for plan.py's predictions
    """
    if device and device not in DEVICES:
        raise UserError(f"--device={device}: should be one of {', '.join(DEVICES)}")
    c = configuration.load([config])
    folder = Path(f"{c.out_dir}_sweep{processes}").resolve()
    base = replace(
        c, train_iters=WARMUP + steps, rampup_batch_size="", log_interval=1, eval_iters=0,
        save_interval=0, resume="none", data_dir=str(folder / "data"), out_dir="",
    )  # fmt: skip
    if device:
        search.check_search(base, has_days=True)
    configs = {name_of(c): c for c in accepted(base, processes)}
    chosen = {name: configs[name] for name in tables.chosen(configs, only)}
    milliseconds = {}  # {name: those of each timed step}
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    batch = f"{c.global_batch_size} x {c.seq_length} tokens a step"
    print(f"{config}, {processes} processes, {batch}; {machine}, PyTorch {torch.__version__}", flush=True)
    with explained(folder):
        prepare(base, folder)
        for name in chosen:
            result = run(name, processes, folder)
            print(f"{name}: {result if isinstance(result, str) else spread(result) + ' ms'}", flush=True)
            milliseconds |= {} if isinstance(result, str) else {name: result}
    good = sorted(milliseconds, key=lambda name: statistics.median(milliseconds[name]))
    judged = {name: search.facts_of(chosen[name], processes, DEVICES[device]) for name in good} if device else {}
    predicted = [round(1000 * facts["step_seconds"], 2) for facts in judged.values()] or ["-"] * len(good)
    rows = [[name, spread(milliseconds[name]), ms] for name, ms in zip(good, predicted, strict=True)]
    print_table(["layout", "ms of a step", "predicted"], rows)
    if len(judged) > 2:
        places = np.argsort(np.argsort(predicted))
        print(f"rank correlation: {np.corrcoef(places, range(len(good)))[0, 1]:.2f}")


def name_of(c):
    """Return a layout's values of GRID."""
    return " ".join(f"{name}={getattr(c, name)}" for name in GRID)


def accepted(base, processes):
    """Return the configurations that `config.check` accepts. Raises UserError if there are none."""
    configs = []
    divisors = [n for n in range(1, processes + 1) if processes % n == 0]
    sizes = [2**i for i in range(base.global_batch_size.bit_length())]
    for values in itertools.product(divisors, divisors, sizes):
        c = replace(base, **dict(zip(GRID, values, strict=True)))
        try:
            configuration.check(c, processes)
            configs.append(c)
        except UserError as error:
            refusal = error
    if not configs:
        raise UserError(f"--processes={processes}: no layout suits this configuration; for example: {refusal}")
    return configs


def prepare(base, folder):
    """Write base.py and random tokens in `folder`."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    text = "".join(f"{name} = {value!r}\n" for name, value in asdict(base).items() if name not in GRID)
    (folder / "base.py").write_text(text)
    count, dtype = max(2**16, base.seq_length + 1), "uint16" if base.vocab_size <= 2**16 else "uint32"
    np.random.default_rng(0).integers(0, base.vocab_size, count).astype(dtype).tofile(folder / "data" / "train.bin")
    meta = dict(tokenizer="random", vocab_size=base.vocab_size, eot_id=0, dtype=dtype)
    meta |= dict(tokens={"train": count}, documents={"train": 1})
    (folder / "data" / "meta.json").write_text(json.dumps(meta))


def run(name, processes, folder):
    """Return the milliseconds of each timed step of a layout, or a failure as a line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [ROOT / "train.py", folder / "base.py", *(f"--{field}" for field in name.split())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PET_LOCAL_ADDR": "localhost"}
    with tempfile.TemporaryDirectory(dir=folder) as out, open(folder / "run.log", "w+") as log:
        try:
            process = subprocess.run(
                [*command, f"--out_dir={out}"], env=environment, stdout=log, stderr=log, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return f"failed: not finished after {LIMIT} s"
        if process.returncode == 0:
            return [row["iteration_ms"] for row in read_metrics(Path(out) / "metrics.jsonl").values()][WARMUP:]
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    reasons = [line for line in lines if "rror: " in line] or lines[-1:]
    return f"failed: {reasons[0][-160:]}"
