"""Tests of the executor. test_layouts.py tests that every schedule trains the same model."""

import itertools
import json
from dataclasses import replace
from unittest import mock

import pytest
import torch

import train
from accounts import draw, meter
from errors import UserError
from parallel import comm, pipeline, schedules, simulation, tensor, zero
from parallel.layout import Layout, split
from parallel.mesh import Mesh
from parallel.schedules import Action
from parallel.units import unit_specs
from parallel.zero import Bucket
from testing.record import check_model, one_process, parameters, record
from testing.tiny import (
    built,
    configured,
    few,
    go,
    storages,
    tiny_batches,
    tiny_config,
    waiting_in_block,
)


@pytest.mark.parametrize(
    "layers, parts, expected",
    [(4, 1, [6]), (5, 2, [4, 3]), (5, 3, [3, 2, 2]), (7, 4, [3, 2, 2, 2]), (2, 4, [1, 1, 1, 1]), (9, 4, [3, 3, 2, 3])],
)
def test_blocks_are_spread_evenly_and_the_ends_take_fewer(layers, parts, expected):
    """expected: units per part. The ends also have the embedding and the head."""
    units = ["embedding", *range(layers), "head"]
    cut = split(units, parts)
    assert [unit for part in cut for unit in part] == units and [len(part) for part in cut] == expected


def test_each_stage_knows_the_holders_of_each_bucket():
    config = tiny_config(1, num_layers=4)
    layout = Layout(config, 1, unit_specs(config), simulation.build("1f1b", 3, 4))
    assert [set(layout.buckets(rank)) for rank in range(3)] == [
        {"word", "embedding", "block0"}, {"block1", "block2"}, {"block3", "head", "word"}
    ]  # fmt: skip
    assert layout.holders("word") == [0, 2] and layout.holders("block2") == [1]
    layout = Layout(config, 1, unit_specs(config), simulation.build("chimera", 2, 4))
    everything = {"word", "embedding", "block0", "block1", "block2", "block3", "head"}
    assert set(layout.buckets(0)) == set(layout.buckets(1)) == everything


def test_stages_that_share_in_a_chain_are_refused():
    """Stages 0 and 1 share block0, 1 and 2 block1, 0 and 2 the word table: their groups would get several names."""
    config = tiny_config(1, num_layers=4, pp=3)
    first, block0, block1, *_, head = unit_specs(config)
    units = [first, block0, block0, block1, block1, head]
    with pytest.raises(UserError, match=r"^pp=3: pipeline ranks \[1, 2\] share block1, .* set pp=2$"):
        Layout(config, 1, units, simulation.build("1f1b", 3, 4)).check_holders()
    Layout(config, 1, units, simulation.build("1f1b", 2, 4)).check_holders()
    Layout(config, 1, unit_specs(config), simulation.build("1f1b", 3, 4)).check_holders()
    shared = [replace(spec, name=f"z.{spec.name}") for spec in block0]  # by all stages, which are a group anyway
    Layout(config, 1, [first, *[shared] * 4, head], simulation.build("1f1b", 3, 4)).check_holders()


# --- messages ---------------------------------------------------------------------------------------------------------


def posted(config):
    """Run a step. Return this rank's messages [(group, source, destination, tag)], before and in it, as posted.

    group: 0 for messages to higher ranks, 1 for messages to lower ranks.
    """
    here, calls, send, receive = torch.distributed.get_rank(), [], pipeline.send, pipeline.receive

    def sending(x, axis, to, what, tag=0):
        calls.append((axis.group, here, axis.ranks[to], tag))
        return send(x, axis, to, what, tag)

    def receiving(shape, like, axis, source, tag=0):
        calls.append((axis.group, axis.ranks[source], here, tag))
        return receive(shape, like, axis, source, tag)

    with mock.patch.multiple(pipeline, send=sending, receive=receiving):
        run = built(config)
        before = len(calls)
        train.train_step(run, tiny_batches(run))
    groups = [run.mesh.pp.group, run.mesh.pp_to_lower.group]
    calls = [(groups.index(group), *more) for group, *more in calls]
    return calls[:before], calls[before:]


@pytest.mark.parametrize("schedule", few(schedules.SCHEDULES, 2))
def test_a_group_has_one_sender_between_two_ranks_and_is_connected_before_the_step(workers, schedule):
    """NCCL runs a group's messages between two ranks in the order in which both post them."""
    fields = dict(schedule=schedule, chunks=schedules.usual_chunks(schedule), num_layers=7, micro_batch_size=1)
    ranks = workers.run(4, posted, tiny_config(1, pp=4, **fields))
    for before, during in ranks:
        assert all(group == (source > destination) for group, source, destination, _ in during)
        assert sorted(set(before)) == sorted({(*call[:3], 0) for call in during}) and len(set(before)) == len(before)
    for a, b in itertools.permutations(range(4), 2):
        ours, theirs = ([call for call in ranks[rank][1] if call[1:3] == (a, b)] for rank in (a, b))
        assert ours == theirs and len(ours) == len(set(ours))
    assert sum(len(during) for _, during in ranks) > 2 * 4 * 2


# --- buckets and activations ------------------------------------------------------------------------------------------


def pair(stages, microbatches, chunks=1):
    """Return a schedule of two pipelines, each with half of the ranks and every second micro-batch."""
    half = stages // 2
    actions = []
    for rank in range(stages):
        F, B = ([Action(kind, j, rank) for j in range(rank // half, microbatches, 2)] for kind in "FB")
        warmup = half - 1 - rank % half
        actions.append(F[:warmup] + schedules.alternate(F[warmup:], B))
    return schedules.Schedule("pair", [*range(half)] * 2, [*range(stages)], actions)


def in_pairs():
    return mock.patch.dict(schedules.SCHEDULES, pair=pair)


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_a_schedule_whose_ranks_hold_different_buckets_with_different_ranks(workers, optimizer):
    """The word table is on four ranks, the others on two. The last two ranks run one of 3 micro-batches."""
    config = tiny_config(1, pp=4, schedule="pair", optimizer=optimizer, num_layers=2)
    check_model(workers.run(4, record, config, 3, in_pairs), one_process(workers, config, 3))


def test_stage_3_holds_a_bucket_only_while_it_computes(workers):
    """Whole in block1's F: block1, block2 (its gather has started), and the tied table."""
    config = tiny_config(2, zero=3, num_layers=4)
    for computing, at_rest in workers.run(2, storages, config):
        whole = f"whole in block1's F: {computing}; whole after the step: {at_rest}"
        assert computing == ({"block1", "block2", "word"}, set()) and at_rest == (set(), set()), whole


def started_before_waits(config):
    """Return [(bucket, gathers that have started when the rank first waits for it)] of a forward and a backward."""
    run, seen, gather = built(config), [], Bucket.gather

    def watching(bucket):
        seen.append((bucket.name, [other.name for other in run.zero.in_order if other.gathering]))
        gather(bucket)

    with mock.patch.object(Bucket, "gather", watching):
        train.train_step(run, tiny_batches(run))
    return seen


def test_in_stage_3_all_gathers_start_before_the_first_wait(workers):
    """The first and the last unit have two buckets each. The next unit's gather does not wait for them."""
    for seen in workers.run(2, started_before_waits, tiny_config(2, zero=3, micro_batch_size=12)):
        forward, backward = ["block0", "embedding", "word"], ["block1", "head", "word"]
        assert dict(seen[:2]) == {"embedding": forward, "word": forward}, seen
        assert dict(seen[6:8]) == {"head": backward, "word": backward}, seen


def whole_gradients_at_products(config):
    """Return {bucket: number of buckets with whole gradients when W last adds to this one}."""
    run, alive, add = built(config), {}, tensor.WeightGradient.add

    def watching(product):
        alive[product.w.spec.bucket] = sum(b.grad.whole.untyped_storage().size() > 0 for b in run.zero.buckets.values())
        add(product)

    with mock.patch.object(tensor.WeightGradient, "add", watching):
        train.train_step(run, tiny_batches(run))
    assert not any(p.deferred for p in run.model.parameters())
    return alive


def test_a_late_weight_gradient_lets_go_of_each_bucket_as_it_is_done(workers):
    """After I, seven gradients exist. W frees each when it is summed."""
    config = tiny_config(2, zero=2, schedule="zb-h1", num_layers=4)
    for alive in workers.run(2, whole_gradients_at_products, config):
        assert [alive[f"block{i}"] for i in (3, 2, 1, 0)] == [7, 7, 6, 5]


def buckets_of_fc1(name):
    """The matrices `fc1` are in buckets of their own. name(spec): of its bucket."""

    def bucket(spec):
        return name(spec) if spec.name.endswith(".fc1.weight") else spec.name.partition(".")[0]

    return mock.patch.object(tensor.ParamSpec, "bucket", property(bucket))


def a_bucket_of_several_blocks():
    return buckets_of_fc1(lambda spec: "fc1")


def two_buckets_in_a_block():
    return buckets_of_fc1(lambda spec: spec.name)


@pytest.mark.parametrize("change", [two_buckets_in_a_block, a_bucket_of_several_blocks])
def test_weight_gradients_of_several_buckets_may_alternate(workers, change):
    config = tiny_config(2, pp=2, zero=2, schedule="zb-h1", num_layers=4)
    check_model(workers.run(4, record, config, 2, change), one_process(workers, config))


def test_a_step_begins_while_later_parameters_are_gathered(workers):
    for at_rest, in_block1 in workers.run(2, waiting_in_block, tiny_config(2, zero=1, num_layers=4)):
        everything = ["block0", "block1", "block2", "block3", "embedding", "head", "word"]
        assert at_rest == everything, f"after a step the gathers of {at_rest} are unfinished; should be all"
        assert in_block1 == ["block2", "block3", "head"], f"in block1's F the unfinished gathers are {in_block1}"


def groups(config):
    """Return the number of groups of a step's gathers, of its sums, and of both together."""
    gathers, sums = mock.Mock(wraps=comm.torch_all_gather), mock.Mock(wraps=comm.torch_reduce_scatter)
    with mock.patch.multiple(comm, torch_all_gather=gathers, torch_reduce_scatter=sums):
        run = built(config)
        train.train_step(run, tiny_batches(run))
    of_gathers, of_sums = ({call.kwargs["group"] for call in calls.call_args_list} for calls in (gathers, sums))
    return len(of_gathers), len(of_sums), len(of_gathers | of_sums)


def test_in_stage_3_a_sum_does_not_delay_a_gather(workers):
    assert workers.run(2, groups, tiny_config(2, zero=3)) == [(1, 1, 2)] * 2
    assert workers.run(2, groups, tiny_config(2, zero=2)) == [(1, 1, 1)] * 2


def staged(config):
    """Train with the state on another device than the model (`cpu`, not `cpu:0`)."""
    with mock.patch.object(zero, "pinned", torch.clone):
        run = train.build_run(config, Mesh.of(config), torch.device("cpu", 0))
        assert all(bucket.master is not bucket.param.shard for bucket in run.zero.in_order) or not config.offload
        run.zero.initialize(1)
        batches = tiny_batches(run)
        steps = [train.train_step(run, batches).read() for _ in "123"]
        numbers = [(step.loss, step.grad_norm) for step in steps]
        masters = [bucket.master.clone() for bucket in run.zero.buckets.values()]
        return numbers, masters + list(parameters(run).values())


@pytest.mark.parametrize(
    "fields",
    [
        dict(dtype="bf16", zero=1),
        dict(dtype="fp32", zero=3, optimizer="lamb"),
        dict(dtype="bf16", zero=2, optimizer="muon"),
    ],
    ids=str,
)
def test_offload_changes_no_bit(workers, fields):
    config = tiny_config(1, micro_batch_size=4, **fields)
    plain, offloaded = (workers.run(2, staged, replace(config, offload=on)) for on in (False, True))
    for a, b in zip(plain, offloaded, strict=True):
        assert a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


# --- around the steps -------------------------------------------------------------------------------------------------


def test_a_validation_is_not_watched_and_watching_goes_on_after_it():
    run = built(tiny_config(1))
    batches = tiny_batches(run)
    with meter.Activations(run.executor) as account:
        train.train_step(run, batches)
        peak, account.peak = account.peak, 0
        run.timers.take(1)
        run.executor.evaluate([next(batches)])
        assert account.peak == 0 and run.timers.take(1) == {}
        train.train_step(run, batches)
        assert account.peak == peak and run.timers.take(1)["forward-compute"] > 0


def test_a_trace_holds_every_action_of_every_rank(workers, tokens_dir, tmp_path):
    """`python -m accounts.draw --trace` can read the file."""
    trace = tmp_path / "trace.json"
    fields = dict(train_iters=12, micro_batch_size=3, num_layers=3, trace=str(trace), eval_iters=0)
    config = configured(tmp_path / "out", tokens_dir, pp=2, schedule="zb-h1", **fields)
    workers.run(4, go, config)
    content, m = json.loads(trace.read_text()), config.global_batch_size // (3 * 2)
    about = {"schedule": "zb-h1", "stages": 2, "microbatches": m, "chunks": 1}
    assert content["otherData"] == about
    assert {e["args"]["step"] for e in content["traceEvents"]} == set(range(3, 13))  # the last ten steps
    schedule = simulation.build("zb-h1", 2, m)
    for replica, rank in itertools.product((0, 1), (0, 1)):
        place = replica, rank, 12
        mine = [e for e in content["traceEvents"] if (e["pid"], e["tid"], e["args"]["step"]) == place]
        done, waits = ([e for e in mine if e["cat"] in cats] for cats in (draw.KINDS, ("message", "wait")))
        ran = [(e["cat"], e["args"]["microbatch"], e["args"]["chunk"]) for e in done]
        assert ran == [tuple(action) for action in schedule.actions[rank]] and len(waits) > m + 2
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in itertools.pairwise(done))
    recorded, part = draw.recorded_picture(str(trace)), draw.recorded_picture(str(trace), "0,inf")
    assert "step 12" in recorded.title
    assert {box.kind for box in part.rows[1][1]} == {box.kind for box in part.rows[3][1]} == {"=", "#"}
    assert part.rows[::2] == recorded.rows[::2]
    assert {"=", "#"} & {*draw.terminal([part], 500).splitlines()[4]}  # of a short wait no letter is left
    assert draw.terminal([part._replace(rows=[("", row, ".") for _, row, _ in part.rows[1::2]])], 500)  # all ranks wait
