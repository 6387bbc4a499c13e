"""The bytes of a ring for a run's calls equal ledger.py's prediction exactly, in every row. It needs no run."""

import contextlib
import re
from collections import defaultdict
from datetime import timedelta
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import config as configuration
from accounts import ledger, memory, meta, traffic
from config import CHOICES, Config
from errors import UserError
from exercises.show import meshes
from model import unit_specs
from parallel import comm, simulation, tensor
from parallel.layout import Layout
from parallel.mesh import Axis, Mesh
from parallel.watch import Watch
from testing import dry_run
from testing.record import check_bytes, record
from testing.tiny import tiny_config


@pytest.mark.parametrize("order", CHOICES["order"])
def test_a_predicted_table_names_the_stages_first_rank(order):
    config = tiny_config(2, pp=2, tp=2, micro_batch_size=2, order=order)
    tables = traffic.predicted_tables(traffic.predict_step(config, 8))
    said = re.findall(r"sent per step by rank (\d+), predicted", tables)
    first = [mesh.rank for mesh in meshes(8, 2, 2, order=order) if mesh.data.rank == mesh.tp.rank == 0]
    assert [int(rank) for rank in said] == first


def test_the_formulas_are_the_lectures(workers):
    """The factors 8, 12 and 10 of ledger.py's table, and 2P (n-1)/n: computed by hand for 2 layers, h = 32, s = 8."""
    unit = Fraction(1, 2) * 4 * (4 * 8 * 32) * 3 * 2  # (t-1)/t, bytes of a number, bsh, m and L
    configs = [
        tiny_config(2, 2, dtype="fp32", **more) for more in ({}, {"recompute": "full"}, {"sequence_parallel": True})
    ]
    records = [workers.run(4, record, config)[0] for config in configs]
    plain, full, parts = (measured for measured, _ in (record.sent for record in records))
    assert plain["tp", "activations", "all_reduce"][1] == 8 * unit
    assert full["tp", "activations", "all_reduce"][1] == 12 * unit
    assert sum(parts["tp", "activations", name][1] for name in ("all_gather", "reduce_scatter")) == 10 * unit
    assert plain["data", "gradients", "all_reduce"] == (5, 2 * records[0].kept[0]["gradients"] * Fraction(1, 2))


@pytest.mark.parametrize("m, factors", [(1, (2, 2, 2, 3)), (3, (2, 2, 4, 9))])
def test_the_papers_2_2_2_3(workers, m, factors):
    """Section 7 of the ZeRO paper, in units of P (n-1)/n: 2, 2, 2, 3 for m = 1. For any m: 2, 2, m + 1, 3m."""
    configs = [tiny_config(2, zero=stage, dtype="fp32", micro_batch_size=12 // m) for stage in range(4)]
    records = [workers.run(2, record, config)[0] for config in configs]
    for stage, (measured, _) in enumerate(one.sent for one in records):
        sent = sum(count for (axis, *_), (_, count) in measured.items() if axis == "data")
        sent = float(sent / (records[0].kept[0]["gradients"] * Fraction(1, 2)))
        assert sent == factors[stage], f"stage {stage}, m={m}: {sent:g} P (n-1)/n are sent; should be {factors[stage]}"


@contextlib.contextmanager
def chunks_of_20():
    """The head works on 20, 20, 20 and 4 of the 64 tokens."""
    with mock.patch.object(tensor, "ROWS", 20), mock.patch.object(ledger, "ROWS", 20):
        yield


def test_the_ledger_of_a_head_in_chunks(workers):
    records = workers.run(2, record, tiny_config(1, 2), 2, chunks_of_20)
    check_bytes(records)
    assert records[0].sent[0]["tp", "cross-entropy rows", "all_reduce"][0] == 2 * 4 * 3


def test_the_columns_of_how_often_are_the_slides():
    """The slide's column 通信頻度, which for dp depends on the ZeRO stage."""
    step, each = ("bucket", "step"), ("bucket", "micro-batch")
    found = []
    for zero in range(4):
        layout = traffic.predict_step(tiny_config(2, zero=zero), 2).layout
        found.append({what: per for (axis, what, _), per in ledger.how_often(layout).items() if axis == "data"})
    assert [row["gradients"] for row in found] == [step, step, each, each]
    assert [row.get("parameters") for row in found] == [None, step, step, each]


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("used*[P]  ", "used*[P / 4]  "),
        ("zero == 0", "zeros == 0"),
        ("      zero == 0", " zero == 0"),
        ("bucket, step", "bucket, epoch"),
    ],
)
def test_an_error_in_the_table_names_its_row(right, wrong, monkeypatch):
    with pytest.raises(UserError, match=r"^ledger.py's TABLE, row 'shards +gradients +all_reduce .* wide': \w+Error: "):
        monkeypatch.setattr(ledger, "EVERY_ROW", ledger.read(ledger.TABLE.replace(right, wrong)))
        traffic.predict_step(tiny_config(2), 2)


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
    assert mesh.watch.ledger.rows == {
        ("setup", "data", "t", "all_reduce"): [2, 2 * Fraction(2 * (n - 1) * 24, n)],
        ("setup", "data", "t", "all_gather"): [1, Fraction((n - 1) * 24 * n, n)],
        ("setup", "data", "t", "reduce_scatter"): [1, Fraction((n - 1) * 8 * n, n)],
    }


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_return_and_count_what_comm_says(workers, ranks):
    workers.check(ranks, check_collectives)


def rank_algebra(tp):
    mesh = Mesh(tp)
    axes = mesh.world, mesh.data, mesh.pp, mesh.tp
    return [(axis.name, axis.ranks, axis.rank) for axis in axes]


def test_tensor_parallel_ranks_are_neighbours(workers):
    """rank = (data_rank * pp + pp_rank) * tp + tp_rank."""
    for rank, (world, dp, pp, tp) in enumerate(workers.run(6, rank_algebra, 2)):
        assert world == ("world", (0, 1, 2, 3, 4, 5), rank)
        assert dp == ("data", (rank % 2, rank % 2 + 2, rank % 2 + 4), rank // 2)
        assert pp == ("pp", (rank,), 0)
        assert tp == ("tp", (rank // 2 * 2, rank // 2 * 2 + 1), rank % 2)


LAYOUTS_AND_GROUPS = [  # layout on 8 ranks, number of process groups of each rank
    (dict(), [1] * 8),
    (dict(zero=3), [2] * 8),
    (dict(tp=8), [1] * 8),
    (dict(pp=8, num_layers=6), [3, 2, 2, 2, 2, 2, 2, 3]),  # the first and the last stage have the word table
    (dict(tp=2, pp=2, zero=3), [6] * 8),
    (dict(pp=4, schedule="chimera", zero=1, num_layers=4), [5] * 8),
]


@pytest.mark.parametrize("layout, expected", LAYOUTS_AND_GROUPS, ids=str)
def test_all_members_make_a_group_as_their_same_group(monkeypatch, layout, expected):
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


def agrees(bad_rank):
    axis = Mesh().world if torch.distributed.is_initialized() else Axis("world", (0,), 0, Watch())

    def action():
        if axis.rank == bad_rank:
            raise UserError(f"rank {axis.rank} has no file")
        return axis.rank

    try:
        return comm.agree(axis, action)
    except UserError as error:
        return str(error)


def test_what_one_rank_cannot_do_stops_all_with_its_message(workers):
    assert workers.run(3, agrees, None) == [0, 1, 2]
    assert workers.run(3, agrees, 1) == ["rank 1 has no file"] * 3


# --- predictions without a run ----------------------------------------------------------------------------------------


class NoTensors(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} makes a tensor")


@pytest.mark.parametrize(
    "pp, schedule, chunks, m", [(16, "1f1b", 1, 48), (16, "interleaved", 2, 48), (16, "zb-h1", 1, 48)]
)
def test_predictions_for_4096_ranks_need_no_process_and_no_tensor(pp, schedule, chunks, m):
    """Formulas written by hand give the same bytes, for GPT-3 with 175B parameters in bf16."""
    dp, t, L, h, s, b, v = 4096 // (8 * pp), 8, 96, 12288, 2048, 1, 51200
    config = Config(
        num_layers=L, hidden_size=h, num_attention_heads=96, seq_length=s, vocab_size=v, micro_batch_size=b, tp=t,
        pp=pp, schedule=schedule, chunks=chunks, zero=1, sequence_parallel=True, global_batch_size=b * dp * m,
        train_iters=1,
    )  # fmt: skip
    meta.work_of(config, 2)  # kept: it runs one block on tensors without values
    with NoTensors():
        assert configuration.check(config, 4096) == dp
        plan = simulation.build(schedule, pp, m, chunks)
        layout = Layout(config, dp, unit_specs(config), plan)
        sizes = memory.sizes(config, item=2, wide=4, on_cpu=False)
        for rank in (0, 1, pp - 1):
            sent = ledger.predict_sent(layout, plan, rank, 0, 2, 4)
            kept = memory.predict_kept(layout, plan, rank, sizes)
            blocks = sum(name.startswith("block") for name in layout.buckets(rank))
            P, bsh = memory.stored(layout, rank), b * s * h
            both = sum(sent["tp", "activations", operation][1] for operation in ("all_gather", "reduce_scatter"))
            assert both == 10 * bsh * blocks * m * Fraction(t - 1, t) * 2
            assert sent["data", "gradients", "reduce_scatter"] == (
                len(layout.buckets(rank)),
                P * Fraction(dp - 1, dp) * 4,
            )
            messages = sum(sent[key][0] for key in sent if key[0] == "pp")
            assert messages == m * (2 * chunks if 0 < rank < pp - 1 else 2 * chunks - 1)
            assert sum(sent[key][1] for key in sent if key[0] == "pp") == messages * bsh // t * 2
            assert sum(kept[what] for what in kept if what != memory.PEAK) == 6 * P + Fraction(12 * P, dp)
            in_flight = {"1f1b": pp - rank, "zb-h1": pp}.get(schedule, pp * chunks + pp - 2 * rank - 1)
            # memory.py's table: a block keeps 16 bsh/t elements, and small terms
            assert kept[memory.PEAK] > in_flight * blocks // chunks * 16 * bsh // t * 2
    assert not torch.distributed.is_initialized()
