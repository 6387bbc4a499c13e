"""Measures saving and loading of a checkpoint, beside torch.save and torch.distributed.checkpoint (DCP).

    python -m bench checkpoint --layers=6

Each of them saves the same state: the weights of a GPT and AdamW's two moments, in float32, on one process. A load is
complete when the values are in tensors that existed before (of nanoparallel: the run's buffers). nanoparallel and DCP
flush the files to disk. torch.save does not, so the table also has torch.save with a flush. "unverified" is
nanoparallel without checksums.
"""

import contextlib
import os
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import train
from bench.tables import print_table, ratios, spread
from config import Config, check
from errors import UserError
from parallel import checkpoint, checksum
from parallel.mesh import Mesh


def measure(layers: int = 6, hidden: int = 768, repeats: int = 5):
    """Save and load a checkpoint in GB/s, beside torch.save and torch.distributed.checkpoint.

    --layers   transformer blocks
    --hidden   hidden size; a head has 64 columns
    --repeats  turns; in each turn every variant saves once and loads twice: from the page cache and from the disk
    """
    if hidden % 64:
        raise UserError(f"--hidden={hidden}: should be a multiple of 64")
    config = Config(num_layers=layers, hidden_size=hidden, num_attention_heads=hidden // 64, train_iters=1)
    check(config, 1)
    train.refuse_too_large(config, 1, torch.device("cpu"))
    run = train.build(config, Mesh(), torch.device("cpu"))
    run.zero.initialize(1)
    state = whole_state(run)
    gigabytes = sum(x.nbytes for x in state.values()) / 1e9
    seconds = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        kinds = variants(run, state, Path(folder))
        for turn in range(-1, repeats):  # turn -1 warms up
            names = list(kinds)
            # Each turn has another order, because a variant's time depends on the variant before it.
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                save, load = kinds[name]
                times = one_turn(Path(folder), save, load)
                if turn >= 0:
                    seconds.setdefault(name, []).append(times)
                for path in sorted(Path(folder).rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
    print(f"{gigabytes:.2f} GB in {len(state)} tensors; GB/s: median (smallest-largest) of {repeats} turns")
    columns = {name: list(zip(*times, strict=True)) for name, times in seconds.items()}
    rows = [[name, *(spread([gigabytes / s for s in c]) for c in times[:3])] for name, times in columns.items()]
    pairs = zip(columns["nanoparallel"], columns["nanoparallel, unverified"], strict=True)
    by_time = [spread(ratios(ours, plain)) for ours, plain in pairs]
    rows += [["time with sums / without", *by_time[:3]], ["CPU time with sums / without", *by_time[3:]]]
    print_table(["", "save", "load, page cache", "load, disk"], rows)


def whole_state(run):
    """Return {name: tensor} of all weights and moments. Each has its own storage: torch.save writes whole storages."""
    buckets = run.zero.buckets.values()
    return {name: flat.clone() for b in buckets for name, _, flat in checkpoint.files(b, *b.owned)}


def variants(run, state, folder):
    """Return {name: (save, load)}: functions without arguments."""
    shapes = {name: list(spec.shape) for name, spec in run.model.specs().items()}
    scale = run.loss_scale.state()
    counters = {"iteration": 1, "consumed_samples": 1, "updates": 1}
    entries = {"shapes": shapes, "config": {}, "tokenizer": "bytes", "counters": counters, "loss_scale": scale}

    def save():
        checkpoint.save(folder, 1, run.zero, entries)

    def load():
        checkpoint.load(folder / "step_1", run.zero)

    def plain(action):
        def without_sums():
            with unverified():
                action()

        return without_sums

    def torch_load():
        for name, x in torch.load(folder / "state.pt").items():
            state[name].copy_(x)

    def torch_save():
        torch.save(state, folder / "state.pt")

    def torch_save_and_flush():
        torch_save()
        flush(folder / "state.pt")

    def dcp_save():
        dcp.save(state, checkpoint_id=folder / "dcp")

    def dcp_load():
        dcp.load(state, checkpoint_id=folder / "dcp")

    warnings.filterwarnings("ignore", module="torch.distributed")  # DCP warns that there is one process
    return {
        "nanoparallel": (save, load),
        "nanoparallel, unverified": (plain(save), plain(load)),
        "torch.save": (torch_save, torch_load),
        "torch.save and flush": (torch_save_and_flush, torch_load),
        "DCP": (dcp_save, dcp_load),
    }


@contextlib.contextmanager
def unverified():
    """Context: the program computes and compares no checksum."""
    before = checksum.of_rows, checkpoint._compare
    checksum.of_rows, checkpoint._compare = (lambda *_: 0), (lambda *_: None)
    try:
        yield
    finally:
        checksum.of_rows, checkpoint._compare = before


def one_turn(folder, save, load):
    """Return the seconds of a save, of a load from the page cache, and of a load from the disk, then the CPU seconds.

    The CPU seconds of all threads do not depend on how busy the cores are with other work.
    """
    times = [timed(save)]
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:  # otherwise the system flushes torch.save's file during the next measurement
        flush(path)
    times.append(timed(load))
    for path in files:
        flush(path, os.POSIX_FADV_DONTNEED)
    times.append(timed(load))
    return [seconds for seconds, _ in times] + [cpu for _, cpu in times]


def timed(action):
    """Return (seconds, CPU seconds) of `action()`."""
    start, start_cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - start_cpu


def flush(path, advice=None):
    """Flush a file to disk. advice: an os.POSIX_FADV constant; DONTNEED drops the file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    if advice is not None:
        os.posix_fadvise(fd, 0, 0, advice)
    os.close(fd)
