"""Hybrid sharding: ZeRO inside a group of data ranks, and copies of its shards in the other groups (`zero_copies`)."""

import functools

import pytest

import train
from config import check
from errors import UserError
from parallel.mesh import Mesh
from testing.tiny import built, check_layout, tiny_batches, tiny_config

LAYOUTS = [  # (dp, fields, zero, zero_copies)
    (4, {}, 1, 2),
    (4, {}, 2, 2),
    (4, {}, 3, 2),
    (6, {}, 2, 3),
    (6, dict(micro_batch_size=2), 3, 2),
    (8, {}, 3, 4),
    (4, dict(tp=2, sequence_parallel=True), 3, 2),
    (4, dict(tp=2), 2, 2),
    (4, dict(pp=2, schedule="zb-h1", micro_batch_size=2), 2, 2),
    (4, dict(pp=2, schedule="chimera", micro_batch_size=3, order="pp-dp-tp"), 3, 2),
    (4, dict(pp=2, optimizer="lamb"), 1, 2),
    (4, dict(optimizer="muon"), 2, 2),
    (4, dict(optimizer="lars"), 3, 2),
    (2, dict(cp=2), 3, 2),
    (1, dict(cp=4), 3, 2),
    (4, dict(offload=True), 2, 2),
]


@pytest.mark.parametrize("dp, fields, zero, copies", LAYOUTS, ids=str)
def test_hybrid_sharding_trains_the_same_model(workers, dp, fields, zero, copies):
    fields = dict(optimizer="adamw", dropout=0.1, micro_batch_size=1) | fields
    config = tiny_config(dp, zero=zero, zero_copies=copies, **fields)
    ranks = dp * config.tp * config.pp * config.cp
    check_layout([config], functools.partial(workers.run, ranks))


def phases_of_sums(config):
    run = built(config, Mesh.of(config))
    train.train_step(run, tiny_batches(run))
    return {phase: calls for (phase, axis, *_), (calls, _) in run.mesh.watch.ledger.rows.items() if axis == "copies"}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sums_over_copies_start_during_backward(workers, zero):
    """When backward ends, two of the nine buckets are still in the window."""
    config = tiny_config(4, zero=zero, zero_copies=2, micro_batch_size=2, num_layers=6)
    assert workers.run(4, phases_of_sums, config) == [{"reduce": 7, "finish": 2}] * 4


@pytest.mark.parametrize("zero, copies, ranks", [(0, 2, 4), (1, 4, 4), (3, 3, 4), (3, 0, 4)])
def test_a_layout_without_shards_is_refused(zero, copies, ranks):
    with pytest.raises(UserError, match=f"^zero_copies={copies}: "):
        check(tiny_config(ranks, zero=zero, zero_copies=copies), ranks)
