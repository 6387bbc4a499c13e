"""No schedule deadlocks even if every communication blocks its rank until the other ranks reach it.

NCCL may block the host in the first step: a kernel's first launch may wait for all work of the GPU. A dry run of each
rank records its calls.
"""

import random
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from parallel import comm
from parallel.schedules import SCHEDULES, usual_chunks
from testing import dry_run
from testing.tiny import tiny_config


class Call(NamedTuple):
    """A call of a rank. All ranks of a communication make an equal Call. ranks of a message: (source, destination)."""

    operation: str
    group: str
    ranks: tuple
    elements: int
    dtype: torch.dtype


def recorded(monkeypatch, config, gpus, rank):
    """Return the Calls of `rank` while it builds its run and makes a step."""
    calls = []

    def record(place, name, operation, ranks_of):
        original = getattr(place, name)

        def call(x, *arguments, group, **more):
            ranks, size = ranks_of(group, *arguments), max(t.numel() for t in (x, *arguments) if torch.is_tensor(t))
            calls.append(Call(operation, group.group_name, tuple(ranks), size, x.dtype))
            return original(x, *arguments, group=group, **more)

        patch.setattr(place, name, call)

    with monkeypatch.context() as patch:
        record(dist, "all_reduce", "all_reduce", lambda group, *_: dist.get_process_group_ranks(group))
        record(comm, "_all_gather", "all_gather", lambda group, *_: dist.get_process_group_ranks(group))
        record(comm, "_reduce_scatter", "reduce_scatter", lambda group, *_: dist.get_process_group_ranks(group))
        record(dist, "all_to_all_single", "all_to_all", lambda group, *_: dist.get_process_group_ranks(group))
        record(dist, "isend", "message", lambda _, other: (rank, other))
        record(dist, "irecv", "message", lambda _, other: (other, rank))
        with dry_run.started(config, gpus, rank) as run:
            dry_run.step(run)
    return calls


def waiting(calls):
    """Let every rank run. Return {rank: the Call in which it waits for ever}."""
    position = [0] * len(calls)

    def now(rank):
        return calls[rank][position[rank]] if position[rank] < len(calls[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(calls)):
            while (call := now(rank)) and all(now(other) == call for other in call.ranks):
                for other in call.ranks:
                    position[other] += 1
                moved = True
    return {rank: now(rank) for rank in range(len(calls)) if now(rank)}


def layouts(schedule):
    """Return [(configuration, number of ranks)]: a long pipeline, and a short one with other axes."""
    i, fields = list(SCHEDULES).index(schedule), dict(schedule=schedule, chunks=usual_chunks(schedule), dtype="bf16")
    fields |= dict(micro_batch_size=1, num_layers=4 * fields["chunks"] - 2, zero=i % 4)
    dp, tp = (2, 1) if i % 2 else (1, 2)
    short = tiny_config(dp, tp, pp=2, global_batch_size=4 * dp, sequence_parallel=tp == 2, **fields)
    context = tiny_config(1, pp=2, cp=2, global_batch_size=4, **fields)
    return [(tiny_config(1, pp=4, global_batch_size=4, **fields), 4), (short, 4), (context, 4)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_order_of_calls_deadlocks(monkeypatch, schedule, short):
    config, gpus = layouts(schedule)[short]
    calls = [recorded(monkeypatch, config, gpus, rank) for rank in range(gpus)]
    assert min(map(len, calls)) > 10
    assert waiting(calls) == {}


def test_the_rule_finds_a_wrong_order(monkeypatch):
    """Swap two neighbouring calls of one rank: mostly the ranks then wait for ever."""
    config, dice = tiny_config(1, 2, pp=2, dtype="fp32"), random.Random(0)
    calls = [recorded(monkeypatch, config, 4, rank) for rank in range(4)]
    assert waiting(calls) == {}
    stuck = 0
    for _ in range(40):
        rank = dice.randrange(4)
        i, changed = dice.randrange(len(calls[rank]) - 1), [list(one) for one in calls]
        changed[rank][i : i + 2] = reversed(changed[rank][i : i + 2])
        stuck += bool(waiting(changed))
    assert stuck > 10
