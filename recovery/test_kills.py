"""Tests that a kill (SIGKILL) during a save loses no complete checkpoint and changes no bit of the curve.

`KILLS=100 pytest recovery/test_kills.py` makes 100 kills in each layout instead of 3.
"""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from errors import UserError
from parallel.comm import CommunicationError
from recovery import checkpoint
from testing.tiny import configured, curve, go, tensor_files

KILLS = int(os.environ.get("KILLS", "3"))
SPAN = 0.4  # seconds: a kill comes at a random moment of this span after the first save has begun


def rank_main(config, rank, ranks, rendezvous):
    """Train on one rank, without output. Exit with code 1 if another rank is lost."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        go(config)
        if ranks > 1:
            dist.destroy_process_group()
    except (CommunicationError, UserError) as error:
        Path(f"{rendezvous}.error{rank}").write_text(str(error))
        os._exit(1)
    os._exit(0)


def start(context, config, ranks, rendezvous):
    processes = [context.Process(target=rank_main, args=(config, r, ranks, rendezvous)) for r in range(ranks)]
    for process in processes:
        process.start()
    return processes


def wait_for_a_save(folder, processes):
    """Wait until this run has removed the killed run's unfinished save, has a checkpoint, and begins a save."""
    deadline = time.monotonic() + 60

    def begun():
        return any(folder.glob("*.writing"))

    for reached in (lambda: not begun(), lambda: checkpoint.all_steps(folder), begun):
        while not reached():
            assert time.monotonic() < deadline and all(p.is_alive() for p in processes), "no save begins"
            time.sleep(0.001)


def verify_whole(folder):
    index = checkpoint.read_index(folder)
    assert {*index["files"], "index.json"} == {p.name for p in folder.iterdir()}
    checkpoint.verify_files(folder, index["files"], index["files"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, layout", [(1, {}), (2, dict(tp=2, sequence_parallel=True)), (4, dict(zero=2, pp=2))], ids=str
)
def test_a_kill_during_a_save_loses_no_complete_checkpoint(tokens_dir, tmp_path, ranks, layout):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "train"])
    dice, out = random.Random(ranks), tmp_path / "killed"
    fields = dict(layout, save_interval=1, log_interval=1, eval_iters=0, lr_decay_iters=3000, keep=3, dtype="fp64")
    config = configured(out, tokens_dir, train_iters=3000, comm_timeout=20.0, **fields)
    out.mkdir()
    for kill in range(KILLS):
        processes = start(context, config, ranks, tmp_path / f"rendezvous{kill}")
        wait_for_a_save(out, processes)
        time.sleep(SPAN * dice.random())
        before = checkpoint.all_steps(out)
        for process in dice.sample(processes, ranks if kill % 2 else 1):  # all ranks, or one
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:  # the other ranks notice the loss
            process.join(60)
            assert process.exitcode in (1, -signal.SIGKILL)
        steps = checkpoint.all_steps(out)
        assert (steps[-1] if steps else 0) >= (before[-1] if before else 0)
        for step in steps[-2:]:
            verify_whole(checkpoint.step_path(out, step))
    end = checkpoint.all_steps(out)[-1] + 3
    fields |= dict(train_iters=end)
    for folder, name in ((out, "last"), (tmp_path / "straight", "straight")):
        fields["save_interval"] = 1 if folder == out else 0
        processes = start(context, configured(folder, tokens_dir, **fields), ranks, tmp_path / f"rendezvous-{name}")
        for process in processes:
            process.join(120)
            assert process.exitcode == 0, [p.read_text() for p in tmp_path.glob("*.error*")]
    assert sorted(p.name for p in out.glob("step_*")) == sorted(f"step_{end - i}" for i in range(3))
    assert curve(out) == curve(tmp_path / "straight")
    assert tensor_files(out / f"step_{end}") == tensor_files(tmp_path / "straight" / f"step_{end}")
