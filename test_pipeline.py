"""Tests of the executor: its work between units. The speed of the ranks must not change a result.

Other tests of the pipeline: test_layouts.py (every schedule trains the same model), test_schedules.py (the schedules),
accounts/test_ledger.py (bytes sent).
"""

import itertools
import json
import math
import os
import random
import time
from dataclasses import replace

import pytest
import torch

import log
import train
from accounts import draw, meter, report
from config import Config
from model import parameter_table
from parallel import comm, pipedream, pipeline, processes, replicas, schedules, tensor, zero
from parallel.layout import Layout, split
from parallel.mesh import Mesh
from parallel.schedules import Action
from test_checkpoint import configured, go
from test_layouts import STEPS, assert_same_model, micro_batches, parameters, specs, tiny_config, train_tiny, trained
from test_train import validation_losses

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "layers, parts, expected",
    [
        *[(4, 1, [6]), (4, 2, [3, 3]), (5, 2, [4, 3]), (5, 3, [3, 2, 2]), (4, 3, [2, 2, 2])],
        *[(7, 4, [3, 2, 2, 2]), (2, 4, [1, 1, 1, 1]), (9, 4, [3, 3, 2, 3])],
    ],
)
def test_blocks_are_spread_evenly_and_the_ends_take_fewer(layers, parts, expected):
    """expected: units per part. The first part also has the embedding, the last part the head."""
    units = ["embedding", *range(layers), "head"]
    cut = split(units, parts)
    assert [unit for part in cut for unit in part] == units and [len(part) for part in cut] == expected
    blocks = [sum(isinstance(unit, int) for unit in part) for part in cut]
    assert max(blocks) - min(blocks) <= 1


def test_who_holds_what():
    config = tiny_config(1, num_layers=4)
    layout = Layout(config, 1, parameter_table(config), schedules.build("1f1b", 3, 4))
    assert [set(layout.buckets(rank)) for rank in range(3)] == [
        {"word", "embedding", "block0"}, {"block1", "block2"}, {"block3", "head", "word"}
    ]  # fmt: skip
    assert layout.holders("word") == [0, 2] and layout.holders("block2") == [1]
    layout = Layout(config, 1, parameter_table(config), schedules.build("chimera", 2, 4))
    everything = {"word", "embedding", "block0", "block1", "block2", "block3", "head"}
    assert set(layout.buckets(0)) == set(layout.buckets(1)) == everything


def sleepy(config, seed):
    """Run train_tiny. This rank sleeps for a random time before every action and every message."""
    dice = random.Random(seed + torch.distributed.get_rank())
    for owner, method in [
        (pipeline.Executor, "forward"),
        (pipeline.Executor, "_backward"),
        (pipeline.Executor, "weight_gradient"),
        (pipeline.Mailbox, "send"),
        (pipeline.Mailbox, "receive"),
    ]:
        original = getattr(owner, method)

        def slow(*arguments, original=original):
            time.sleep(dice.choice([0, 0, 0.001, 0.004, 0.01]))
            return original(*arguments)

        setattr(owner, method, slow)
    try:
        return train_tiny(config, 2)
    finally:
        for owner, method in [(pipeline.Executor, m) for m in ("forward", "_backward", "weight_gradient")]:
            setattr(owner, method, getattr(owner, method).__kwdefaults__["original"])
        for method in ("send", "receive"):
            setattr(pipeline.Mailbox, method, getattr(pipeline.Mailbox, method).__kwdefaults__["original"])


@pytest.mark.parametrize("schedule, zero", [("1f1b", 0), ("zb-h2", 3), ("chimera", 2), ("interleaved", 1), ("zb-v", 3)])
def test_random_sleeps_on_every_rank_change_no_bit(workers, schedule, zero):
    dp, pp = (1, 4) if schedule == "1f1b" else (2, 2)
    config = tiny_config(
        dp,
        pp=pp,
        schedule=schedule,
        zero=zero,
        num_layers=4,
        micro_batch_size=3,
        chunks=schedules.usual_chunks(schedule),
    )
    awake = workers.run(4, train_tiny, config, 2)
    for seed in (1, 2):
        for a, b in zip(awake, workers.run(4, sleepy, config, seed), strict=True):
            assert a[:2] == b[:2] and all(torch.equal(a[3][name], b[3][name]) for name in a[3])


def posted(config):
    """Run a step. Return this rank's messages [(group, source, destination, tag)] in posting order: before it, in it.

    group: 0 for messages to higher ranks, 1 for messages to lower ranks.
    """
    calls, send, receive = [], pipeline.send, pipeline.receive

    def sending(x, axis, to, what, tag=0):
        calls.append((axis.group, here, axis.ranks[to], tag))
        return send(x, axis, to, what, tag)

    def receiving(shape, like, axis, source, tag=0):
        calls.append((axis.group, axis.ranks[source], here, tag))
        return receive(shape, like, axis, source, tag)

    here, pipeline.send, pipeline.receive = torch.distributed.get_rank(), sending, receiving
    try:
        run = train.build(config, Mesh(config.tp, config.pp), CPU)
        run.zero.initialize(1)
        before = len(calls)
        (pipedream.train_call if run.schedule.versions else train.train_step)(run, micro_batches(run))
    finally:
        pipeline.send, pipeline.receive = send, receive
    groups = [run.mesh.pp.group, run.mesh.back.group]
    calls = [(groups.index(group), *more) for group, *more in calls]
    return calls[:before], calls[before:]


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_a_group_has_one_sender_between_two_ranks_and_is_connected_before_the_step(workers, schedule):
    """NCCL runs the messages of a group between two ranks in the order in which both ranks post them."""
    fields = dict(schedule=schedule, chunks=schedules.usual_chunks(schedule), num_layers=7, micro_batch_size=1)
    fields |= dict(global_batch_size=4, updates_per_call=6) if schedule in schedules.ASYNCHRONOUS else {}
    fields |= dict(global_batch_size=1) if schedule == "pipedream" else {}
    ranks = workers.run(4, posted, tiny_config(1, pp=4, **fields))
    for before, during in ranks:
        assert all(group == (source > destination) for group, source, destination, _ in during)
        assert sorted(set(before)) == sorted({(*call[:3], 0) for call in during}) and len(set(before)) == len(before)
    for a, b in itertools.permutations(range(4), 2):
        ours, theirs = ([call for call in ranks[rank][1] if call[1:3] == (a, b)] for rank in (a, b))
        assert ours == theirs and len(ours) == len(set(ours))
    assert sum(len(during) for _, during in ranks) > 2 * 4 * 2


def test_cuda_starts_with_enough_queues_for_a_pipeline(monkeypatch):
    found = []
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found.append(os.environ[name])))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for value in ("1", None):
        monkeypatch.setenv(name, "1")  # restored after the test
        if value is None:
            monkeypatch.delenv(name)
        processes.join()
    assert found == ["1", "32"]


def pair(stages, microbatches, chunks=1):
    """Return a schedule of two pipelines. Each uses half of the ranks and every second micro-batch."""
    half = stages // 2
    actions = []
    for rank in range(stages):
        F, B = ([Action(kind, j, rank) for j in range(rank // half, microbatches, 2)] for kind in "FB")
        warmup = half - 1 - rank % half
        actions.append(F[:warmup] + schedules.alternate(F[warmup:], B))
    return schedules.Schedule("pair", [*range(half)] * 2, [*range(stages)], actions)


def trained_in_pairs(config):
    schedules.SCHEDULES["pair"] = pair
    try:
        return trained(config, 3)
    finally:
        del schedules.SCHEDULES["pair"]


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_a_schedule_whose_ranks_hold_different_buckets_with_different_ranks(workers, optimizer):
    """The word table is on four ranks, the other buckets on two. The last two ranks run only one of the 3
    micro-batches.
    """
    fields = dict(optimizer=optimizer, num_layers=2)
    config = tiny_config(1, pp=4, schedule="pair", **fields)
    reference = train_tiny(tiny_config(1, **fields), 3)
    assert_same_model(workers.run(4, trained_in_pairs, config), reference, config, specs())


def holdings(config):
    """Run a step. Return (most micro-batches kept at once, bytes of each kept output after the last F, tensors left at
    the end).
    """
    run = train.build(config, Mesh(config.tp, config.pp), CPU)
    run.zero.initialize(1)
    executor, most, sizes = run.executor, 0, []
    forward = executor.forward

    def watching(j, c):
        nonlocal most
        forward(j, c)
        most = max(most, len(executor.kept))
        sizes.append([kept[-1][1].untyped_storage().size() for kept in executor.kept.values()])

    executor.forward = watching
    train.train_step(run, micro_batches(run))
    left = len(executor.kept) + len(executor.deferred) + len(executor.local)
    return most, sizes[-1], left


@pytest.mark.parametrize(
    "schedule, expected", [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]), ("zb-h2", [7, 5, 3, 1])]
)
def test_activations_in_flight_are_the_schedules(workers, schedule, expected):
    """Backward needs no values of sent outputs, so all but the last few are freed."""
    config = tiny_config(1, pp=4, schedule=schedule, num_layers=4, micro_batch_size=3)
    assert [max(0, n) for n in in_flight_until_backward(schedules.build(schedule, 4, 8))] == expected
    results = workers.run(4, holdings, config)
    assert [most for most, _, _ in results] == expected
    assert all(left == 0 for *_, left in results)
    for _, sizes, _ in results[:-1]:
        assert sum(size > 0 for size in sizes) <= pipeline.IN_TRANSIT + 1


def in_flight_until_backward(schedule):
    """Return for each rank the largest number of forwards minus backwards (B or I)."""
    peaks = []
    for actions in schedule.actions:
        level = peak = 0
        for action in actions:
            level += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
            peak = max(peak, level)
        peaks.append(peak)
    return peaks


def storages(config):
    """Run a step with ZeRO-3. Return which (parameters, gradients) are whole in block1's F and after the step."""
    run = train.build(config, Mesh(config.tp, config.pp), CPU)
    run.zero.initialize(1)
    block, seen = run.model.units[2], []
    forward = block.forward

    def whole():
        sizes = {
            name: (b.param.untyped_storage().size(), b.grad.untyped_storage().size()) for name, b in buckets.items()
        }
        return {name for name, size in sizes.items() if size[0]}, {name for name, size in sizes.items() if size[1]}

    def watching(*arguments):
        seen.append(whole())
        return forward(*arguments)

    buckets, block.forward = run.zero.buckets, watching
    train.train_step(run, micro_batches(run))
    return seen[0], whole()


def test_stage_3_holds_a_bucket_only_while_it_computes(workers):
    """Whole in block1's F: block1, block2 (its gather has started), and the tied table, which the head will use."""
    config = tiny_config(2, zero=3, num_layers=4)
    for (whole, gradients), at_rest in workers.run(2, storages, config):
        assert whole == {"block1", "block2", "word"} and gradients == set()
        assert at_rest == (set(), set())


def whole_gradients_at_products(config):
    """Return {bucket: how many buckets have whole gradients when W last adds to this one}."""
    run = train.build(config, Mesh(config.tp, config.pp), CPU)
    run.zero.initialize(1)
    alive, product = {}, tensor.add_product

    def watching(w, dy, x):
        alive[w.spec.bucket] = sum(b.grad.untyped_storage().size() > 0 for b in run.zero.buckets.values())
        product(w, dy, x)

    tensor.add_product = watching
    try:
        train.train_step(run, micro_batches(run))
    finally:
        tensor.add_product = product
    return alive


def test_a_late_weight_gradient_lets_go_of_each_bucket_as_it_is_done(workers):
    """After the action I, seven gradients exist: head, four blocks, word table, embedding. W frees each when its sum
    over dp is done.
    """
    config = tiny_config(2, zero=2, schedule="zb-h1", num_layers=4)
    for alive in workers.run(2, whole_gradients_at_products, config):
        assert [alive[f"block{i}"] for i in (3, 2, 1, 0)] == [7, 7, 6, 5]


@pytest.mark.parametrize(
    "layout",
    [
        dict(pp=2, schedule="interleaved", chunks=2),
        dict(pp=2, schedule="zb-v", chunks=2, zero=2),
        dict(pp=4, schedule="chimera", zero=3),
        dict(pp=2, tp=2, sequence_parallel=True, zero=3),
        dict(zero=3),
    ],
    ids=str,
)
def test_validation_is_the_same_in_every_layout(workers, tokens_dir, tmp_path, layout):
    """2 and 6 data ranks do not divide the 87 validation samples. With ZeRO-3 all data ranks must gather equally
    often.
    """
    fields = dict(train_iters=1, eval_iters=100, dtype="fp64", global_batch_size=96, num_layers=4)
    expected = validation_losses(configured(tmp_path / "one", tokens_dir, micro_batch_size=24, **fields))
    config = configured(tmp_path / "many", tokens_dir, micro_batch_size=4, **fields, **layout)
    ranks = 8 if layout.get("pp") == 4 else 6 if layout == dict(zero=3) else 4
    assert workers.run(ranks, validation_losses, config) == pytest.approx([expected] * ranks, rel=1e-12)


def test_a_validation_is_not_watched_and_watching_goes_on_after_it():
    run = train.build(tiny_config(1), Mesh(), CPU)
    run.zero.initialize(1)
    batches = micro_batches(run)
    with meter.Activations(run.executor) as account:
        train.train_step(run, batches)
        peak, account.peak = account.peak, 0
        run.timers.take(1)
        run.executor.evaluate(next(batches))
        assert account.peak == 0 and run.timers.take(1) == {}
        train.train_step(run, batches)
        assert account.peak == peak and run.timers.take(1)["forward-compute"] > 0


def test_a_trace_holds_every_action_of_every_rank(workers, tokens_dir, tmp_path):
    """The file is a trace for Perfetto, and `python -m accounts.draw --trace` can read it."""
    trace = tmp_path / "trace.json"
    config = configured(
        tmp_path / "out", tokens_dir, pp=2, schedule="zb-h1", train_iters=12, micro_batch_size=3, num_layers=3,
        trace=str(trace), eval_iters=0,
    )  # fmt: skip
    workers.run(4, go, config)
    content = json.loads(trace.read_text())
    m = config.global_batch_size // (3 * 2)
    about = {"schedule": "zb-h1", "stages": 2, "microbatches": m, "chunks": 1, "per_update": m}
    assert content["otherData"] == about
    events = content["traceEvents"]
    assert {(e["pid"], e["tid"]) for e in events} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {e["args"]["step"] for e in events} == set(range(3, 13))  # the last ten steps
    schedule = schedules.build("zb-h1", 2, m)
    for replica in (0, 1):
        for rank in (0, 1):
            mine = [e for e in events if (e["pid"], e["tid"], e["args"]["step"]) == (replica, rank, 12)]
            done = [e for e in mine if e["cat"] != "message"]
            ran = [(e["cat"], e["args"]["microbatch"], e["args"]["chunk"]) for e in done]
            assert ran == [tuple(action) for action in schedule.actions[rank]]
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in itertools.pairwise(done))
            assert sum(e["cat"] == "message" for e in mine) == m
    ideal, recorded = draw.recorded(str(trace))
    assert "step 12" in recorded.title and ideal.schedule == schedule


def test_a_trace_of_a_growing_batch_is_of_the_last_step(tokens_dir, tmp_path):
    """Batches of 2, 2, 2, 2, 4, 4 samples; a next one would have 6. The log's row covers all sixteen samples."""
    trace = tmp_path / "trace.json"
    config = configured(
        tmp_path / "out", tokens_dir, train_iters=6, micro_batch_size=1, global_batch_size=8, eval_iters=0,
        rampup_batch_size="2,2,24", trace=str(trace), log_interval=6,
    )  # fmt: skip
    go(config)
    (row,) = log.read_metrics(tmp_path / "out" / "metrics.jsonl").values()
    assert row["samples_per_second"] * 6 * row["iteration_ms"] / 1000 == pytest.approx(16)
    assert json.loads(trace.read_text())["otherData"]["microbatches"] == row["global_batch_size"] == 4
    assert "step 6" in draw.recorded(str(trace))[1].title


def grown(config):
    run = train.build(config, Mesh(config.tp, config.pp), CPU)
    run.zero.initialize(1)
    batches = micro_batches(run)
    steps = [train.train_step(run, batches).read() for _ in range(STEPS)]
    return [s.samples for s in steps], [s.loss for s in steps], report.sent_by_ranks(run)


@pytest.mark.parametrize("layout", [dict(pp=2, schedule="zb-h2", zero=2), dict(zero=3), dict(pp=4, zero=0)], ids=str)
def test_the_batch_grows_alike_in_every_layout(workers, layout):
    """A step has 8 samples, then 16 once 24 samples are seen, then 24 once 48 are seen. The bytes sent equal the
    formulas of ledger.py.
    """
    fields = dict(rampup_batch_size="8,8,48", micro_batch_size=2)
    samples, losses, _ = grown(tiny_config(1, num_layers=4, **fields))
    assert samples == [8, 8, 8, 16, 16, 24, 24, 24]
    for got, ours, tables in workers.run(4, grown, tiny_config(1, num_layers=4, **fields, **layout)):
        assert got == samples and ours == pytest.approx(losses, rel=1e-10)
        rows = [[cell.strip() for cell in line.split("|")] for line in tables.splitlines() if line.count("|") == 6]
        assert len(rows) > 2 and all(sent == formula for *_, sent, formula in rows if sent != "bytes")


WAITING = set()  # addresses of the outputs of all gathers that nobody has waited for


class Late:
    """A gather that happens in `wait`. Before, elements of other ranks are nan, and this rank's must not change."""

    def __init__(self, x, axis, what, out):
        self.arguments, self.x, self.before, self.result = (axis, what, out), x, x.clone(), out
        assert out.data_ptr() not in WAITING, "a gather of the same bucket is in progress"
        WAITING.add(out.data_ptr())
        out.fill_(math.nan)
        x.copy_(self.before)

    def wait(self):
        if self.result.data_ptr() in WAITING:
            WAITING.remove(self.result.data_ptr())
            assert torch.equal(self.x, self.before), "the input of a gather has changed"
            comm.all_gather(self.x, *self.arguments).wait()
        return self.result


def trained_with_late_gathers(config, late):
    """Train three steps or calls, and validate after two. Return losses of both, parameters, copies that differ."""
    all_gather, losses = zero.all_gather, []
    if late:
        WAITING.clear()
        zero.all_gather = Late
    try:
        run = train.build(config, Mesh(config.tp, config.pp), CPU)
        run.zero.initialize(1)
        batches = micro_batches(run)
        for validate in (True, True, False):
            steps = pipedream.train_call(run, batches) if run.schedule.versions else [train.train_step(run, batches)]
            losses += [(step.read().loss, step.read().grad_norm) for step in steps]
            assert not late or WAITING, "publish waits"
            if validate:
                losses.append(run.executor.evaluate(next(batches)))
        copies = replicas.differences(run.zero)
        assert not WAITING
        return losses, parameters(run), copies
    finally:
        zero.all_gather = all_gather


@pytest.mark.parametrize(
    "layout",
    [
        dict(zero=1, optimizer="lamb"),
        dict(zero=2, dtype="bf16", pp=2, schedule="zb-v", chunks=2),
        dict(zero=1, pp=2, schedule="chimera", global_batch_size=2),  # one micro-batch: the second pipeline has none
        dict(zero=1, pp=2, schedule="pipedream", updates_per_call=5, global_batch_size=2, clip_grad=0.0),
    ],
    ids=str,
)
def test_every_reader_waits_for_the_new_parameters(workers, layout):
    """They are nan before. The next update waits, too, even if no unit has used a bucket."""
    config = tiny_config(1, **dict(num_layers=4, micro_batch_size=1, dropout=0.1, train_iters=30) | layout)
    ranks = 2 * config.pp
    for plain, late in zip(
        workers.run(ranks, trained_with_late_gathers, config, False),
        workers.run(ranks, trained_with_late_gathers, config, True),
        strict=True,
    ):
        for a, b in zip(plain[0], late[0], strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert all(torch.equal(p, late[1][name]) for name, p in plain[1].items()) and plain[2] == late[2] == []


def waiting_in_block(config):
    """Return the buckets whose gathers nobody has waited for, after a step and in the next step's F of block1."""
    run = train.build(config, Mesh(config.tp, config.pp), CPU)
    run.zero.initialize(1)
    batches, block, seen = micro_batches(run), run.model.units[2], []
    train.train_step(run, batches)

    def waiting():
        return [name for name, pending in run.zero.gathering.items() if pending.work is not None]

    def watching(*arguments, forward=block.forward):
        seen.append(waiting())
        return forward(*arguments)

    at_rest, block.forward = waiting(), watching
    train.train_step(run, batches)
    return at_rest, seen[0]


def test_a_step_begins_while_later_parameters_are_gathered(workers):
    for at_rest, in_block1 in workers.run(2, waiting_in_block, tiny_config(2, zero=1, num_layers=4)):
        assert sorted(at_rest) == ["block0", "block1", "block2", "block3", "embedding", "head", "word"]
        assert sorted(in_block1) == ["block2", "block3", "head"]


def groups_of_stage_3(config):
    """Run a step with ZeRO-3. Return the number of groups of gathers, of sums, and of both together."""
    gather, reduce_scatter, groups = comm._all_gather, comm._reduce_scatter, ({}, {})
    comm._all_gather = lambda *x, group, **more: groups[0].setdefault(group) or gather(*x, group=group, **more)
    comm._reduce_scatter = lambda *x, group, **more: (
        groups[1].setdefault(group) or reduce_scatter(*x, group=group, **more)
    )
    try:
        train_tiny(config, 1)
    finally:
        comm._all_gather, comm._reduce_scatter = gather, reduce_scatter
    return len(groups[0]), len(groups[1]), len(groups[0] | groups[1])


def test_in_stage_3_a_sum_does_not_delay_a_gather(workers):
    assert workers.run(2, groups_of_stage_3, tiny_config(2, zero=3)) == [(1, 1, 2)] * 2
    assert workers.run(2, groups_of_stage_3, tiny_config(2, zero=2)) == [(1, 1, 1)] * 2


def staged(config, asynchronous):
    """Train as with offload from a GPU: the state has another device than the model (`cpu`, not `cpu:0`)."""
    pinned, zero.pinned = zero.pinned, lambda size, dtype: torch.zeros(size, dtype=dtype)
    try:
        run = train.build(config, Mesh(config.tp, config.pp), torch.device("cpu", 0))
        assert all((bucket.staging is not None) == config.offload for bucket in run.zero.buckets.values())
        run.zero.initialize(1)
        batches = micro_batches(run)
        steps = [
            pipedream.train_call(run, batches) if asynchronous else [train.train_step(run, batches)] for _ in "123"
        ]
        steps = [step.read() for call in steps for step in call]
        masters = [bucket.master.clone() for bucket in run.zero.buckets.values()]
        return [(step.loss, step.grad_norm) for step in steps], masters, parameters(run)
    finally:
        zero.pinned = pinned


@pytest.mark.parametrize(
    "fields",
    [
        dict(dtype="bf16", zero=1),
        dict(dtype="fp32", zero=3, optimizer="lamb"),
        dict(dtype="bf16", pp=2, schedule="pipedream", updates_per_call=6, global_batch_size=4, clip_grad=0.0),
    ],
    ids=str,
)
def test_offload_through_a_staging_buffer_changes_no_bit(workers, fields):
    """PipeDream: a version that no forward uses has only master weights, which must not be rounded to bf16."""
    config, asynchronous = tiny_config(1, micro_batch_size=4, **fields), "updates_per_call" in fields
    plain, offloaded = (workers.run(2, staged, replace(config, offload=x), asynchronous) for x in (False, True))
    for a, b in zip(plain, offloaded, strict=True):
        assert a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))
        assert all(torch.equal(x, b[2][name]) for name, x in a[2].items())


def test_offload_changes_no_bit(workers):
    config = tiny_config(2, zero=1)
    for a, b in zip(
        workers.run(2, train_tiny, config),
        workers.run(2, train_tiny, Config(**vars(config) | {"offload": True})),
        strict=True,
    ):
        assert a[:2] == b[:2] and all(torch.equal(a[3][name], b[3][name]) for name in a[3])
