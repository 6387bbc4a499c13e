"""Lamps that no other test shows alone.

PYTEST_DONT_REWRITE: the message of a failing `assert` is its sentence alone.
"""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from accounts.flops import hardware_flops, model_flops
from config import Config
from parallel import tensor
from parallel.mesh import Mesh
from parallel.tensor import Linear
from testing.record import check_model, first_step, one_process, record
from testing.tiny import AfterActions, built, drawn, storages, tiny_batches, tiny_config

pytestmark = pytest.mark.slow  # other tests show the same


TRAINED = {  # on two ranks
    "zero-1": dict(dp=2, zero=1),
    "zero-2": dict(dp=2, zero=2),
    "zero-3": dict(dp=2, zero=3),
    "lamb": dict(dp=2, zero=1, optimizer="lamb"),
    "pp": dict(dp=1, pp=2),
    "ulysses": dict(dp=1, cp=2),
}


@pytest.mark.parametrize("layout", TRAINED)
def test_two_ranks_train_the_same_model(workers, monkeypatch, layout):
    """In testing/adversary.py's mode, where a result is wrong until `wait`. An answer may keep fewer bytes."""
    monkeypatch.setattr(workers, "adversary", True)
    config = tiny_config(**TRAINED[layout])
    records, one = workers.run(2, record, config), one_process(workers, config)
    check_model(records, one, partial(first_step, workers, 2, config))


# --- 1: FLOPs ---------------------------------------------------------------------------------------------------------

L, H, S, V = 3, 64, 32, 128
PARTS = {
    "blocks": (6, "FLOPs for each weight of a block and each token: 2 in forward, 4 in backward"),
    "attention": (12, "L h s FLOPs for each token: q k^T and its product with v are 2 s h each in forward"),
    "head": (6, "FLOPs for each weight of the head and each token: 2 in forward, 4 in backward"),
    "recomputation": (1, "forward of the blocks"),
}


def flops(function, **fields):
    """Return the FLOPs of a token in a batch of 2."""
    sizes = dict(num_layers=L, hidden_size=H, num_attention_heads=4, seq_length=S, vocab_size=V) | fields
    return function(Config(**sizes), batch=2) / (2 * sizes["seq_length"])


@pytest.mark.parametrize("part", PARTS)
def test_flops_of_a_part_are_the_formulas(part):
    whole, found = flops(model_flops), {}
    found["attention"] = (flops(model_flops, seq_length=2 * S) - whole) / (L * H * S)
    found["head"] = (flops(model_flops, vocab_size=2 * V) - whole) / (V * H)
    found["blocks"] = (whole - found["attention"] * L * H * S - found["head"] * V * H) / (12 * L * H**2)
    more = flops(hardware_flops, recompute="full") - flops(hardware_flops)
    found["recomputation"] = more / (24 * L * H**2 + 4 * L * S * H)
    right, why = PARTS[part]
    assert found[part] == pytest.approx(right), f"{part}: {found[part]:.6g} instead of {right} {why}"


# --- 4, 5, 6: data parallelism, ZeRO ----------------------------------------------------------------------------------


def gradients_in_a_step(config):
    """Return the most buckets with a whole gradient {in a backward, after it}, and the most unfinished sums in one."""
    run, add = built(config), tensor.WeightGradient.add
    most = {"in a backward": 0, "between two micro-batches": 0, "unfinished": 0}

    def count(when):
        whole = sum(bucket.grad.whole.untyped_storage().size() > 0 for bucket in run.zero.in_order)
        most[when] = max(most[when], whole)

    def watching(product):
        count("in a backward")
        unfinished = sum(bucket.summing is not None and bucket.summing.work is not None for bucket in run.zero.in_order)
        most["unfinished"] = max(most["unfinished"], unfinished)
        add(product)

    run.mesh.watch.tools.append(AfterActions(lambda: count("between two micro-batches")))
    with mock.patch.object(tensor.WeightGradient, "add", watching):
        train.train_step(run, tiny_batches(run))
    return most


def test_stage_2_keeps_few_whole_gradients(workers):
    """In a backward: this block's, the tied table's, and two that are being summed. Then only the last two."""
    for most in workers.run(2, gradients_in_a_step, tiny_config(2, zero=2, num_layers=4)):
        for when, allowed in [("in a backward", 4), ("between two micro-batches", 2)]:
            whole = f"{most[when]} of 7 buckets have a whole gradient {when}; at most {allowed} should"
            assert most[when] <= allowed, whole


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_are_summed_during_backward(workers, zero):
    for most in workers.run(2, gradients_in_a_step, tiny_config(2, zero=zero, num_layers=4)):
        assert most["unfinished"], "backward waits for each sum before the next block computes: nothing overlaps"


def test_stage_3_frees_a_bucket_that_does_not_compute(workers):
    for (whole, _), (left, _) in workers.run(2, storages, tiny_config(2, zero=3, num_layers=4)):
        more = sorted(whole - {"block1", "block2", "word"})
        assert not more, f"{more} are whole while block1 computes; only block1, the next one and the table should be"
        assert not left, f"{sorted(left)} are whole after the step; none should be"


# --- 11: tensor parallelism -------------------------------------------------------------------------------------------


def test_a_linear_keeps_its_input_alone():
    x, w, saved = drawn(8, 6).requires_grad_(), torch.nn.Parameter(drawn(4, 6)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(kept) or kept, lambda kept: kept):
        Linear.apply(x, w, None, "copy", None, Mesh().tp)
    kept = sum(tensor.nbytes for tensor in saved)
    assert kept == x.nbytes, f"a linear keeps {kept} bytes; should be those of its input x alone, {x.nbytes}"


# --- 12: the mesh -----------------------------------------------------------------------------------------------------

MESHES = {  # of 8 ranks: (arguments of Mesh, how far apart two ranks with neighbouring dp ranks are)
    "": (dict(tp=2, pp=2), 4),
    "cp": (dict(tp=2, cp=2), 4),
    "order": (dict(tp=2, pp=2, order="pp-dp-tp"), 2),
}


def pairs(distance):
    return [(rank, rank + distance) for rank in range(8) if not rank & distance]


GROUPS = {  # (of MESHES, axis): its groups
    ("", "tp"): pairs(1),
    ("", "pp"): pairs(2),
    ("", "data"): pairs(4),
    ("", "world"): [tuple(range(8))],
    ("cp", "tp"): pairs(1),
    ("cp", "cp"): pairs(2),
    ("cp", "data"): [(0, 2, 4, 6), (1, 3, 5, 7)],
    ("order", "pp"): pairs(4),
    ("order", "data"): pairs(2),
}


def meshes(name):
    """Return the Mesh of each rank, in torch's fake process group: no process starts."""
    found = []
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            with mock.patch("parallel.mesh._set_pg_timeout"):
                found.append(mesh := Mesh(**MESHES[name][0]))
            mesh.new_world = mesh.world.group is not dist.group.WORLD
        finally:
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name, axis", GROUPS)
def test_an_axis_has_its_groups(name, axis):
    groups, fields = GROUPS[name, axis], MESHES[name][0]
    ours = meshes(name)
    found = sorted({getattr(mesh, axis).ranks for mesh in ours})
    assert found == groups, f"on 8 ranks with {fields}, the groups of {axis} are {found}, not {groups}"
    assert axis != "world" or not any(mesh.new_world for mesh in ours), "the world has a new group, not WORLD's"


@pytest.mark.parametrize("name", MESHES)
def test_each_rank_knows_its_place(name):
    """In each of its groups, and which samples it reads: all ranks with one dp rank read the same."""
    for rank, mesh in enumerate(meshes(name)):
        for axis in (mesh.world, mesh.data, mesh.pp, mesh.cp, mesh.tp, mesh.pp_to_lower):
            text = f"rank {rank}: its index on {axis.name} is {axis.rank}, and the ranks there are {axis.ranks}"
            assert mesh.rank == rank == axis.ranks[axis.rank], text
        reader = rank // MESHES[name][1] % 2, 2
        assert mesh.reader == reader, f"with {MESHES[name][0]}, rank {rank} reads {mesh.reader}, not {reader}"


def test_messages_to_lower_ranks_have_a_group_of_their_own():
    for mesh in meshes(""):
        assert mesh.pp_to_lower.ranks == mesh.pp.ranks and mesh.pp_to_lower.group is not mesh.pp.group, (
            "`pp_to_lower` needs the ranks of pp and a second group (`second`)"
        )
