"""Tests that a run names copies that differ, and stops before its next save."""

import random
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import train
from accounts.metrics import read_metrics
from config import check
from errors import UserError
from parallel.mesh import Mesh
from parallel.optimizer import RULES
from parallel.zero import Bucket, Zero
from recovery import checkpoint, replicas
from testing.tiny import built, configured, fails, few, go, tiny_batches, tiny_config


def test_a_change_of_one_word_changes_the_fingerprint():
    dice, n = random.Random(2), replicas.WORDS_AT_ONCE
    words = torch.arange(2 * n + 5)
    whole = replicas.fingerprint(words)
    for place in (0, n - 1, n, len(words) - 1):
        for change in (1, 1 << 31, -(1 << 63), dice.randrange(1 << 62)):
            words[place] ^= change
            assert replicas.fingerprint(words) != whole
            words[place] ^= change


def copies_of(config):
    return replicas.differing_copies(built(config, Mesh.of(config)).zero)


def test_a_width_that_is_no_multiple_of_8_bytes(workers):
    """A shard has nothing of a parameter that ends before it, at an odd place."""
    config = tiny_config(3, hidden_size=18, num_attention_heads=3, dtype="bf16", zero=3)
    assert workers.run(3, copies_of, config) == [[]] * 3


def with_state(config):
    """Return (what a rank has of its state after a comparison, the names of its files in a checkpoint)."""
    with mock.patch.dict(RULES, sgd=RULES["sgd"]._replace(state=1)):
        run = built(config, Mesh.of(config))
        for bucket in run.zero.in_order:
            bucket.state[0].fill_(1.0 + run.mesh.rank)
        replicas.compare_copies(run.zero, 0)
        files = [path.name for b in run.zero.in_order for path, *_ in checkpoint.arrays(Path(), b, *b.bounds)]
        return {x for b in run.zero.in_order for x in b.state[0].tolist()}, files


@pytest.mark.parametrize("zero, means", [(0, [{1.5}, {1.5}]), (1, [{1.0}, {2.0}])])
def test_the_state_of_a_data_rank_becomes_the_mean_of_its_copies(workers, zero, means):
    ranks = workers.run(2, with_state, tiny_config(2, zero=zero, optimizer="sgd"))
    for (found, files), mean in zip(ranks, means, strict=True):
        assert found == mean and "word.weight.moment0" in files


def said_after_damage(config, rank, bucket, kind, place):
    """Return the message after one bit of one element has changed on one rank."""
    run = built(config, Mesh.of(config))
    batches = tiny_batches(run)
    for _ in range(2):
        train.train_step(run, batches)
    replicas.compare_copies(run.zero, 2)
    if run.mesh.rank == rank:
        b = run.zero.buckets[bucket]
        flat = {
            "parameter": b.param.shard if b.param.sharded else b.param.whole,
            "master": b.master,
            "moment": b.moments[-1],
        }
        flat[kind].view(torch.int16)[place] ^= 1
    try:
        replicas.compare_copies(run.zero, 2)
    except UserError as error:
        assert error.agreed, "every rank would print the line"
        return str(error)


@pytest.mark.parametrize(
    "ranks, layout, dtype, damage, named",
    few(
        [
            (3, {}, "fp64", (1, "block0", "parameter", 0), "block0.qkv.weight: ranks [0, 2] and ranks [1]"),
            (2, {}, "bf16", (1, "block1", "master", 4), "block1.qkv.weight (master weight): ranks [0] and ranks [1]"),
            (2, dict(zero=1), "bf16", (0, "word", "parameter", -1), "word.weight: ranks [0] and ranks [1]"),
            (
                2,
                dict(tp=2),
                "fp64",
                (1, "block0", "moment", -60),
                "block0.fc2.bias (moment 1): ranks [0] and ranks [1]",
            ),
            (4, dict(tp=2, zero=3), "fp64", (3, "block0", "moment", -100), "block0.fc2.bias (moment 1): ranks [2] and"),
            (
                4,
                dict(zero=3, zero_copies=2),
                "fp64",
                (2, "block0", "moment", 5),
                "block0.qkv.weight (moment 1): ranks [0]",
            ),
            (4, dict(pp=2, zero=3), "bf16", (2, "word", "parameter", 5), "word.weight: ranks [2] and ranks [3]"),
            (
                4,
                dict(pp=4, schedule="chimera", num_layers=4),
                "fp64",
                (2, "block1", "parameter", 0),
                "block1.qkv.weight",
            ),
        ],
        3,
    ),
    ids=str,
)
def test_one_bit_in_one_copy_is_named_on_every_rank(workers, ranks, layout, dtype, damage, named):
    config = tiny_config(1, **{"micro_batch_size": 2, "dtype": dtype, "optimizer": "adamw"} | layout)
    check(config, ranks)
    for said in workers.run(ranks, said_after_damage, config, *damage):
        assert said and said.startswith(f"after iteration 2 copies differ: {named}") and "\n" not in said, said


def train_with_damage(config, iteration):
    """Rank 1 changes one bit of a moment after `iteration`. Return the message or None."""
    step = train.train_step

    def damaging(run, *arguments):
        done = step(run, *arguments)
        if run.counters.iteration == iteration and run.mesh.rank == 1:
            run.zero.buckets["block0"].moments[0].view(torch.int64)[3] ^= 1 << 30  # no later rounding may hide it
        return done

    train.train_step = damaging
    try:
        return fails(config)
    finally:
        train.train_step = step


def said_after_other_rounding(config):
    """The second tp rank's sums over data ranks are rounded otherwise. Return the message or None."""
    run, settle = built(config, Mesh.of(config)), Bucket.settle
    batches = tiny_batches(run)

    def settle_otherwise(bucket):
        sums = bucket.summing
        settle(bucket)
        if sums and run.mesh.tp.rank == 1:
            bucket.grad.shard.mul_(1 + 2**-52)

    with mock.patch.object(Bucket, "settle", settle_otherwise):
        for _ in range(2):
            train.train_step(run, batches)
    assert run.mesh.tp.rank or not any(distance for _, distance in run.zero.unequal), "all take tp rank 0's"
    try:
        replicas.compare_copies(run.zero, 2)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("layout", few([dict(zero=0), dict(zero=1), dict(zero=2), dict(zero=3)]), ids=str)
def test_copies_stay_equal_if_tp_ranks_sum_over_dp_in_another_order(workers, layout):
    """NCCL may do so, because each tp rank has its own group of dp ranks."""
    config = tiny_config(3, **{"tp": 2, "dtype": "fp64", "optimizer": "adamw"} | layout)
    check(config, 6)
    assert workers.run(6, said_after_other_rounding, config) == [None] * 6


@pytest.mark.parametrize("every, save_interval, found, saved", few([(2, 4, 6, [4]), (5, 7, 7, []), (0, 4, 8, [4])]))
def test_a_run_stops_before_it_saves_different_copies(
    workers, tokens_dir, tmp_path, every, save_interval, found, saved
):
    fields = dict(check_replicas=every, save_interval=save_interval, dtype="fp64", log_interval=50)
    config = configured(tmp_path, tokens_dir, **fields)
    for said in workers.run(2, train_with_damage, config, 5 if every == 2 else 6):
        what = f"after iteration {found} copies differ: block0.qkv.weight"  # or only its moment
        where = r"( \(moment 0\))?: ranks \[0\] and ranks \[1\]; nothing is saved"
        assert re.fullmatch(what + where, said), said
    assert checkpoint.all_steps(tmp_path) == saved


def train_with_a_skip(config, iteration):
    """Rank 1 alone skips the update of an iteration. Return the message or None."""
    update = Zero.update

    def skipping(zero, scalars):
        skip = zero.updates == iteration - 1 and zero.mesh.rank == 1
        update(zero, scalars._replace(skip=scalars.skip | skip))

    with mock.patch.object(Zero, "update", skipping):
        return fails(config)


@pytest.mark.parametrize("iteration, zero, found", few([(5, 0, 6), (5, 1, 6), (7, 2, 8), (8, 1, 8), (10, 3, 10)]))
def test_a_run_stops_if_a_rank_decides_alone_about_an_update(workers, tokens_dir, tmp_path, iteration, zero, found):
    """The next step finds it, or the next save (iterations 4, 8 and 10). With zero=1 no copies could differ."""
    config = configured(tmp_path, tokens_dir, zero=zero, save_interval=4, dtype="fp64", log_interval=50)
    for said in workers.run(2, train_with_a_skip, config, iteration):
        assert said and said.startswith(f"up to iteration {found} the ranks have made different numbers of upd"), said
    assert checkpoint.all_steps(tmp_path) == ([4] if found < 10 else [4, 8])


@pytest.mark.slow
def test_a_run_compares_after_the_first_update_that_it_has_read_and_before_a_save(tokens_dir, tmp_path):
    """fp16's first steps are skipped, because its loss scale begins too large."""
    compared = []
    config = configured(tmp_path, tokens_dir, dtype="fp16", initial_loss_scale=2.0**26, hysteresis=1)
    with mock.patch.object(replicas, "compare_copies", lambda zero, iteration: compared.append(iteration)):
        go(config)
    skipped = [row["skipped_iterations"] for row in read_metrics(tmp_path / "metrics.jsonl").values()]
    assert skipped[0] and compared == [skipped.index(0) + 1, len(skipped)], (compared, skipped)
