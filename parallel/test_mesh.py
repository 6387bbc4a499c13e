"""Tests of mesh.py and comm.py: collectives return and count what they say, and ranks make their groups alike."""

from collections import defaultdict
from datetime import timedelta
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel import comm
from parallel.mesh import Mesh
from testing import dry_run
from testing.tiny import tiny_config


def check_collectives():
    mesh = Mesh()
    n, rank = mesh.data.size, mesh.data.rank
    x = torch.arange(6.0) + 10 * rank
    assert comm.all_reduce(x.clone(), mesh.data, "t").wait().tolist() == [n * i + 10 * sum(range(n)) for i in range(6)]
    assert comm.all_reduce(x.clone(), mesh.data, "t", op="max").wait().tolist() == [i + 10 * (n - 1) for i in range(6)]
    gathered = comm.all_gather(x.view(3, 2), mesh.data, "t").wait()
    assert gathered.shape == (3 * n, 2)
    assert gathered.flatten().tolist() == [i + 10 * r for r in range(n) for i in range(6)]
    part = comm.reduce_scatter(torch.arange(2.0 * n) + rank, mesh.data, "t").wait()
    assert part.tolist() == [n * i + sum(range(n)) for i in (2 * rank, 2 * rank + 1)]
    exchanged = comm.all_to_all(torch.arange(1.0 * n) + n * rank, mesh.data, "t").wait()
    assert exchanged.tolist() == [rank + n * r for r in range(n)]
    assert mesh.data.waited == f"rank {rank} waited for ranks {[r for r in range(n) if r != rank]}"
    assert mesh.watch.ledger.rows == {
        ("setup", "data", "t", "all_to_all"): [1, 4 * (n - 1)],
        ("setup", "data", "t", "all_reduce"): [2, 2 * Fraction(2 * (n - 1) * 24, n)],
        ("setup", "data", "t", "all_gather"): [1, Fraction((n - 1) * 24 * n, n)],
        ("setup", "data", "t", "reduce_scatter"): [1, Fraction((n - 1) * 8 * n, n)],
    }


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_return_and_count_what_comm_says(workers, ranks):
    workers.check(ranks, check_collectives)


LAYOUTS_AND_GROUPS = [  # layout on 8 ranks, number of process groups of each rank
    (dict(), [1] * 8),
    (dict(zero=3), [2] * 8),
    (dict(tp=8), [1] * 8),
    (dict(cp=8), [2] * 8),
    (dict(cp=4, zero=3, zero_copies=2), [5] * 8),
    (dict(pp=8, num_layers=6), [3, 2, 2, 2, 2, 2, 2, 3]),  # the first and the last stage have the word table
    (dict(tp=2, pp=2, zero=3), [6] * 8),
    (dict(pp=4, schedule="chimera", zero=1, num_layers=4), [5] * 8),
]


@pytest.mark.parametrize("layout, expected", LAYOUTS_AND_GROUPS, ids=str)
def test_all_members_of_a_group_give_it_one_name(monkeypatch, layout, expected):
    """torch names a group by its ranks and the number of groups that the process has made before."""
    config, made, new_group = tiny_config(1, micro_batch_size=1, dtype="fp32", **layout), {}, dist.new_group

    def counting(ranks, **more):
        before[tuple(ranks)].append(len(dist.distributed_c10d._world.pg_names))
        return new_group(ranks, **more)

    monkeypatch.setattr(dist, "new_group", counting)
    for rank in range(8):
        made[rank] = before = defaultdict(list)
        with dry_run.started(config, 8, rank):
            assert len(dist.distributed_c10d._world.pg_names) == expected[rank]
    for rank, groups in made.items():
        for ranks, before in groups.items():
            assert rank in ranks and all(made[member][ranks] == before for member in ranks)


def test_on_nccl_groups_have_priority_and_are_connected_at_once(monkeypatch):
    """On a "pp" axis NCCL connects pairs of ranks, in `pipeline.connect`."""
    calls, groups, new_group = [], [], dist.new_group

    class Options:
        def __init__(self, is_high_priority_stream):
            self.priority = is_high_priority_stream

    def making(ranks, pg_options, timeout, **more):
        assert pg_options.priority and pg_options._timeout == timeout == timedelta(seconds=5)
        groups.append(new_group(ranks, timeout=timeout, **more))
        return groups[-1]

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
    try:
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
        monkeypatch.setattr(dist, "new_group", making)
        monkeypatch.setattr(dist, "barrier", lambda group, device_ids: calls.append((group, device_ids)))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
        monkeypatch.setattr("parallel.mesh._set_pg_timeout", lambda *arguments: calls.append(arguments))
        world = dist.group.WORLD
        mesh = Mesh(tp=2, pp=2, timeout=5.0)
        dp, forward, backward, tp = groups
        assert (mesh.world.group, mesh.data.group, mesh.pp.group, mesh.pp_to_lower.group, mesh.tp.group) == (
            world,
            *groups,
        )
        assert calls == [(timedelta(seconds=5), world), (world, [7]), (dp, [7]), (tp, [7])]
        assert mesh.holders([0, 1]).group is forward and calls[4:] == [(forward, [7])]
        assert mesh.second(mesh.data).group is groups[-1] not in (dp, tp, backward) and calls[5:] == [(groups[-1], [7])]
    finally:
        dist.destroy_process_group()
