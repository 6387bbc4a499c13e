"""Hybrid sharding: ZeRO inside a group of data ranks, and copies of its shards in the other groups (`zero_copies`)."""

import pytest

import train
from parallel.mesh import Mesh
from testing.tiny import built, tiny_batches, tiny_config


def phases_of_sums(config):
    run = built(config, Mesh.of(config))
    train.train_step(run, tiny_batches(run))
    return {phase: calls for (phase, axis, *_), (calls, _) in run.mesh.watch.ledger.rows.items() if axis == "copies"}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sums_over_copies_start_during_backward(workers, zero):
    """When backward ends, two of the nine buckets are still in the window."""
    config = tiny_config(4, zero=zero, zero_copies=2, micro_batch_size=2, num_layers=6)
    assert workers.run(4, phases_of_sums, config) == [{"reduce": 7, "finish": 2}] * 4
