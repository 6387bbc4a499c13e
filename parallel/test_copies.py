"""Hybrid sharding: ZeRO inside a group of data ranks, and copies of its shards in the other groups (`zero_copies`)."""

import functools

import pytest

from config import check
from errors import UserError
from testing.tiny import check_layout, tiny_config

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
    (2, dict(cp=2, context="ring"), 2, 2),
    (1, dict(cp=4), 3, 2),
    (4, dict(experts=4, top_k=2, expert_group=2, tp=2, sequence_parallel=True), 3, 2),
    (4, dict(offload=True), 2, 2),
]


@pytest.mark.parametrize("dp, fields, zero, copies", LAYOUTS, ids=str)
def test_hybrid_sharding_trains_the_same_model(workers, dp, fields, zero, copies):
    fields = dict(optimizer="adamw", dropout=0.1, micro_batch_size=1) | fields
    config = tiny_config(dp, zero=zero, zero_copies=copies, **fields)
    ranks = dp * config.tp * config.pp * config.cp
    check_layout([config], functools.partial(workers.run, ranks))


@pytest.mark.parametrize("zero, copies, ranks", [(0, 2, 4), (1, 4, 4), (3, 3, 4), (3, 0, 4)])
def test_a_layout_without_shards_is_refused(zero, copies, ranks):
    with pytest.raises(UserError, match=f"^zero_copies={copies}: "):
        check(tiny_config(ranks, zero=zero, zero_copies=copies), ranks)
