"""The asynchronous schedules train the model of a sequential program with old weights.

`oracle` is this program: one process keeps all versions of each stage's weights, and computes a micro-batch's gradient
with the versions that the papers state.
"""

import functools
import itertools
import math
import re
from dataclasses import replace

import pytest
import torch

import data
import train
from accounts import draw, ledger, memory, meter
from config import Config, check
from errors import UserError
from parallel.layout import split
from parallel.mesh import Mesh
from parallel.optimizer import RULES, learning_rate
from parallel.schedules import ASYNCHRONOUS
from parallel.simulation import build
from parallel.test_muon import papers
from parallel.versions import kept_versions
from recovery import replicas
from testing.compare import same_rows
from testing.tiny import (
    assert_same_model,
    built,
    configured,
    covering,
    curve,
    fails,
    go,
    parameters,
    specs,
    tensor_files,
    tiny_batches,
    tiny_config,
)
from train import train_call

# --- the schedules ----------------------------------------------------------------------------------------------------


def same_versions(schedule, rank, theory):
    where = f"{schedule.name}: micro-batches 0, 1 .. on rank {rank} of {len(schedule.actions)} use the versions"
    assert schedule.versions[rank] == theory, f"{where} {schedule.versions[rank]}; should be {theory}"


def test_pipedream_keeps_the_versions_of_the_theory():
    """Stage i keeps min(p-i, max(1, M-(p-1-i))) versions."""
    for p, M in itertools.product(range(1, 9), range(1, 25)):
        schedule = build("pipedream", p, M)
        for i in range(p):
            same_versions(schedule, i, [max(k - 1 - (p - 1 - i), 0) for k in range(1, M + 1)])
            kept, _ = kept_versions(schedule, i, [i])
            theory = min(p - i, max(1, M - (p - 1 - i)))  # p - i from M = 2p - 1 on
            assert kept == theory, f"rank {i} of {p} keeps {kept} versions of {M} micro-batches; should be {theory}"
            for j, action in ((action.microbatch, action) for action in schedule.actions[i] if action.kind == "F"):
                before = schedule.actions[i][: schedule.actions[i].index(action)]
                made = sum(a.kind == "U" for a in before)
                assert made == schedule.versions[i][j], f"rank {i} of {p}: {made} U before F of micro-batch {j}"
        if p > 1:
            tied = [kept_versions(schedule, rank, [0, p - 1]) for rank in (0, p - 1)]
            assert tied == [(min(p, max(1, M - p + 1)), 1), (1, min(p, M))]


def test_2bw_keeps_two_versions():
    for p, m, n in itertools.product((1, 2, 4), (4, 5), range(1, 6)):
        schedule = build("pipedream-2bw", p, m * n, 1, m)
        for i in range(p):
            same_versions(schedule, i, [max((k - 1) // m - 1, 0) for k in range(1, m * n + 1)])
            (kept, _), most = kept_versions(schedule, i, [i]), min(2, max(1, n - 1))
            assert kept == most, f"2BW: rank {i} of {p} keeps {kept} versions of {n} updates; should be {most}"


def test_the_drawing_shows_updates_and_versions(capsys):
    draw.main(["pipedream", "--stages=2", "--microbatches=4", "--without_stashing"])
    lines = capsys.readouterr().out.splitlines()
    rows = [lines[i : i + 2] for i, line in enumerate(lines) if line.startswith("rank 0")]
    assert [row[0] for row in rows] == ["rank 0   F0 F1 ......B0--- F2 B1--- F3 B2--- ...B3--- "] * 2
    assert rows[0][1] == "version  0  0        0    |1  0    |2  1    |   2    |"
    assert rows[1][1] == "version  0  0        0    |1  1!   |2  2!   |   3!   |"


# --- the sequential program -------------------------------------------------------------------------------------------


def version(config, stage, k, m):
    """Return the version of a stage's weights in micro-batch k of a call. k counts from 1, stages from 0."""
    if config.schedule == "pipedream":
        return max(k - 1 - (config.pp - 1 - stage), 0)
    return max((k - 1) // m - 1, 0)


def oracle(config, dp, calls):
    """Train on one process. Return (losses, norms, before, after). calls: the updates of each call."""
    m, samples = config.global_batch_size // (config.micro_batch_size * dp), config.micro_batch_size * dp
    alone = dict(tp=1, pp=1, schedule="1f1b", sequence_parallel=False, zero=0, recompute="none", updates_per_call=1)
    run = built(replace(config, **alone, micro_batch_size=samples, global_batch_size=samples))
    weights = {p.spec.name: p for bucket in run.zero.buckets.values() for p in bucket.params}
    stages = {}  # a tied parameter: the first stage, the oldest
    for stage, units in enumerate(split(run.layout.unit_specs, config.pp)):
        stages = {spec.name: stage for unit in units for spec in unit} | stages
    batches, before, losses, norms = tiny_batches(run), parameters(run), [], []
    history, moments = {name: [w] for name, w in before.items()}, {name: [0, 0] for name in before}
    for count in calls:
        history = {name: versions[-1:] for name, versions in history.items()}
        for update in range(count):
            run.zero.zero_grad()
            losses.append(0.0)
            for k in range(update * m + 1, update * m + m + 1):
                for name, w in weights.items():
                    w.data.copy_(history[name][version(config, stages[name], k, m)])
                losses[-1] += run.executor.run(batches, 1, 1 / m).item() / m
            norms.append(sum(w.grad.square().sum() for w in weights.values()).sqrt().item())
            for name, w in weights.items():
                new = updated(config, w.spec, history[name][-1], w.grad.clone(), moments, len(losses))
                history[name].append(new)
    return losses, norms, before, {name: versions[-1] for name, versions in history.items()}


def updated(c, spec, w, gradient, state, t):
    rate, decay, moments = learning_rate(c, t), c.weight_decay * spec.decay, state[spec.name]
    if c.optimizer == "muon":
        return papers(spec, w, gradient, state, c, float(rate))
    if c.optimizer == "sgd":
        return w - rate * (gradient + decay * w)
    moments[0] = c.adam_beta1 * moments[0] + (1 - c.adam_beta1) * gradient
    moments[1] = c.adam_beta2 * moments[1] + (1 - c.adam_beta2) * gradient**2
    root = (moments[1] / (1 - c.adam_beta2**t)).sqrt()
    return w - rate * (decay * w + moments[0] / (1 - c.adam_beta1**t) / (root + c.adam_eps))


def train_asynchronously(config, calls, mesh=None):
    """Train. Return (losses, norms, before, after, copies that differ). calls: updates of each call."""
    run = built(config, mesh)
    before, batches, done = parameters(run), tiny_batches(run), []
    run.counters.iteration = -calls[0] % config.updates_per_call  # the first call may be shorter
    for count in calls:
        steps = train_call(run, batches)
        assert len(steps) == count
        done += [step.read() for step in steps]
    copies = replicas.differing_copies(run.zero)
    return [s.loss for s in done], [s.grad_norm for s in done], before, parameters(run), copies


def asynchronous(schedule, pp, per_update=1, updates=12, dp=1, tp=1, **fields):
    fields = dict(num_layers=max(2, pp - 1), clip_grad=0.0, lr=5e-3, micro_batch_size=2) | fields
    batch = fields["micro_batch_size"] * dp * per_update
    return tiny_config(
        dp, tp, pp=pp, schedule=schedule, updates_per_call=updates, global_batch_size=batch, train_iters=24, **fields
    )


def check_same(results, reference, config):
    """Fail unless each rank's losses, norms and parameters are those of `oracle`."""
    for rank, (losses, norms, *_) in enumerate(results):
        for k, (x, y, loss, norm) in enumerate(zip(losses, norms, *reference[:2], strict=True), 1):
            right = math.isclose(x, loss, rel_tol=1e-10), math.isclose(y, norm, rel_tol=1e-10)
            if not all(right):
                place = f"{config.schedule} pp={config.pp}: first difference in update {k} on rank {rank}"
                values = f"loss {x!r}, norm {y!r} instead of {loss!r}, {norm!r}"
                pytest.fail(f"{place}: {values}. {BACKWARD if right[0] else FORWARD}", False)
    assert_same_model(results, reference, config, specs(config))


FORWARD = "The loss differs: a forward uses a wrong version of the weights, or an update before was wrong."
BACKWARD = "The loss is right: a backward does not use the weights of its forward, or a sum of gradients is wrong."


@pytest.mark.parametrize(
    "p", [1, 2, 4, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_losses_and_parameters_are_those_of_the_sequential_program(workers, schedule, p):
    for optimizer, calls in [("sgd", (12,)), ("adamw", (5, 7))] + [("adamw", (16,))] * (p == 8):
        config = asynchronous(schedule, p, p if "2bw" in schedule else 1, calls[-1], optimizer=optimizer)
        results = workers.run(p, train_asynchronously, config, calls)
        check_same(results, oracle(config, 1, calls), config)


# --- the grid ---------------------------------------------------------------------------------------------------------

AXES = {
    "schedule": list(ASYNCHRONOUS),
    "dp": [1, 2, 3, 4],
    "tp": [1, 2, 4],
    "pp": [2, 4],
    "zero": [0, 1],
    "sequence_parallel": [False, True],
    "recompute": ["none", "full"],
    "dropout": [0.0, 0.1],
    "calls": ["12", "5+7", "2+2+2", "1+1"],
    "optimizer": [optimizer for optimizer, rule in RULES.items() if not rule.layerwise],
}


def fitted(schedule, dp, tp, pp, calls, **fields):
    """Return (configuration, processes, updates of each call), or None if a simpler point is the same layout."""
    if dp * tp * pp > 8 or (dp == 1 and fields["zero"]) or (tp == 1 and fields["sequence_parallel"]):
        return None
    calls = [int(n) for n in calls.split("+")]
    # 2BW has as many micro-batches in an update as stages; with two stages it has three
    m = pp + (pp == 2) if schedule == "pipedream-2bw" else 1
    config = asynchronous(schedule, pp, m, calls[-1], dp, tp, **fields)
    return config, dp * tp * pp, calls


@functools.cache
def points():
    every = (dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values()))
    return [point for point in every if fitted(**point)]


def pytest_generate_tests(metafunc):
    if "point" in metafunc.fixturenames:
        found = [point for point in points() if point["optimizer"] == AXES["optimizer"][0]]
        if metafunc.function is test_the_grid_covered:
            few = covering([point for point in points() if point["dp"] * point["tp"] * point["pp"] <= 4])
            found = few + [pytest.param(point, marks=pytest.mark.slow) for point in covering(points(), few)]
        metafunc.parametrize("point", found, ids=lambda point: "-".join(map(str, point.values())))


def train_with_each(configs, calls):
    mesh = Mesh.of(configs[0])
    return [train_asynchronously(config, calls, mesh) for config in configs]


def check_point(workers, point, optimizers):
    config, ranks, calls = fitted(**point)
    check(replace(config, train_iters=24 // calls[-1] * calls[-1]), ranks)
    configs = [replace(config, optimizer=optimizer) for optimizer in optimizers]
    by_rank = workers.run(ranks, train_with_each, configs, calls)
    for this, results in zip(configs, zip(*by_rank, strict=True), strict=True):
        check_same(results, oracle(this, ranks // (this.tp * this.pp), calls), this)


def test_the_grid_covered(workers, point):
    check_point(workers, point, [point["optimizer"]])


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_copies_of_shards(workers, schedule):
    point = dict(schedule=schedule, dp=4, tp=1, pp=2, zero=1, zero_copies=2, recompute="none", dropout=0.1, calls="5+7")
    check_point(workers, point | dict(sequence_parallel=False), ["adamw"])


@pytest.mark.grid
def test_the_whole_grid(workers, point):
    check_point(workers, point, AXES["optimizer"])


# --- a run: logs, validation, checkpoints -----------------------------------------------------------------------------


def at_rest(out_dir, tokens_dir, schedule, pp, **fields):
    """Return a configuration of the whole program."""
    m = pp if schedule == "pipedream-2bw" else 1
    fields = dict(clip_grad=0.0, updates_per_call=4, train_iters=12, lr_decay_iters=12, num_layers=3) | fields
    return configured(out_dir, tokens_dir, schedule=schedule, pp=pp, global_batch_size=2 * m, **fields)


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_logs_validation_and_checkpoints_change_no_bit(workers, tokens_dir, tmp_path, schedule):
    """Neither does a stop and a resume at a multiple of updates_per_call."""
    plain, busy, parts = (tmp_path / name for name in ("plain", "busy", "parts"))
    often = dict(log_interval=1, eval_interval=1, save_interval=1, keep=0)
    workers.run(2, go, at_rest(plain, tokens_dir, schedule, 2, log_interval=4))
    workers.run(2, go, at_rest(busy, tokens_dir, schedule, 2, **often))
    for stop in (4, 12):
        workers.run(2, go, at_rest(parts, tokens_dir, schedule, 2, log_interval=4, train_iters=stop))
    assert sorted(path.name for path in busy.glob("step_*")) == ["step_12", "step_4", "step_8"]
    assert len(curve(plain)) == 3 and repr(curve(plain)) == repr(curve(busy)) == repr(curve(parts))
    assert tensor_files(plain / "step_12") == tensor_files(busy / "step_12") == tensor_files(parts / "step_12")


@pytest.mark.slow
def test_checkpoints_load_in_any_layout(workers, tokens_dir, tmp_path):
    """Loaded and saved again without a step, the files are equal."""
    common = dict(train_iters=4, global_batch_size=8, eval_iters=0, clip_grad=0.0, num_layers=3)
    first = configured(
        tmp_path / "0", tokens_dir, **common, schedule="pipedream-2bw", pp=2, micro_batch_size=4, updates_per_call=4
    )
    workers.run(2, go, first)
    layouts = [dict(tp=2, zero=3), dict(schedule="pipedream", pp=2, zero=1, updates_per_call=4)]
    for i, layout in enumerate(layouts, 1):
        config = configured(tmp_path / f"{i}", tokens_dir, **common, **layout, micro_batch_size=4)
        (tmp_path / f"{i}").mkdir()
        workers.run(4, load_and_save, config, tmp_path / f"{i - 1}/step_4")
        assert tensor_files(tmp_path / f"{i}/step_4") == tensor_files(tmp_path / "0/step_4")


def load_and_save(config, path):
    run = train.build(config, Mesh.of(config), torch.device("cpu"))
    train.restore(run, path)
    train.save(run, data.Mixture(config.data_dir, "train", config.seq_length, config.vocab_size), config.keep)


def test_a_signal_stops_the_run_at_the_end_of_a_call():
    config = asynchronous("pipedream", 1, updates=3)
    run = built(config)
    run.signals.stop = True
    assert [step.read().stop for step in train_call(run, tiny_batches(run))] == [True] * 3


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_next_save(workers, monkeypatch, tokens_dir, tmp_path):
    monkeypatch.setattr(workers, "adversary", False)  # it refuses to send a nan
    fields = dict(save_interval=4, keep=0, optimizer="sgd", train_iters=16)
    workers.run(2, go, at_rest(tmp_path, tokens_dir, "pipedream", 2, **fields | dict(train_iters=4)))
    config = at_rest(tmp_path, tokens_dir, "pipedream", 2, **fields, lr=9e12, min_lr=9e12, weight_decay=9e12)
    for message in workers.run(2, fails, config):
        assert re.match(r"iteration [5-9]: the gradient norm is (nan|inf): pipedream can't skip an update", message)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_4"]


MISTAKES = [  # fields; the first is named
    *(dict(clip_grad=1.0), dict(dtype="fp16"), dict(optimizer="lamb"), dict(optimizer="lars"), dict(zero=2)),
    *(dict(rampup_batch_size="2,2,8"), dict(global_batch_size=8), dict(train_iters=10), dict(updates_per_call=0)),
    *(dict(chunks=2), dict(updates_per_call=4, schedule="1f1b")),
    dict(global_batch_size=4, schedule="pipedream-2bw"),
]


@pytest.mark.parametrize("fields", MISTAKES, ids=str)
def test_what_needs_all_ranks_at_each_update_is_refused_by_name(fields):
    good = dict(schedule="pipedream", pp=2, updates_per_call=4, micro_batch_size=2, global_batch_size=4, train_iters=8)
    assert check(Config(**good, clip_grad=0.0), 4) == 2
    name, value = next(iter(fields.items()))
    with pytest.raises(UserError, match=f"^{name}={value}: "):
        check(Config(**good | dict(clip_grad=0.0) | fields), 4)


# --- the accounts -----------------------------------------------------------------------------------------------------


def accounts(config):
    """Return a call's bytes sent and bytes kept, each (measured, predicted)."""
    run = built(config)
    rank, widths = run.mesh.pp.rank, (run.zero.dtype.itemsize, run.zero.master_dtype.itemsize)
    with meter.Activations(run.executor) as activations:
        updates = len(train_call(run, tiny_batches(run)))
    expected = ledger.predict_sent(run.layout, run.schedule, rank, run.mesh.data.rank, *widths)
    sent = run.mesh.watch.ledger.per_step(updates), expected
    sizes = memory.sizes(config, *widths, on_cpu=True)
    kept = meter.measured_states(run.zero, run.executor.flats) | activations.rows()
    return sent, (kept, memory.predict_kept(run.layout, run.schedule, rank, sizes))


@pytest.mark.parametrize(
    "schedule, pp, updates", [("pipedream", 4, 12), ("pipedream-2bw", 2, 1), ("pipedream-2bw", 4, 3)]
)
def test_bytes_sent_and_kept_equal_the_formulas(workers, monkeypatch, schedule, pp, updates):
    monkeypatch.setattr(workers, "adversary", False)  # it sends at random times
    for fields in [dict(dp=2, zero=1, dtype="bf16"), dict(tp=2, sequence_parallel=True, dropout=0.1, recompute="full")]:
        config = asynchronous(schedule, pp, pp if schedule == "pipedream-2bw" else 1, updates, **fields)
        for found in workers.run(2 * pp, accounts, config):
            for measured, predicted in found:
                same_rows(fields, measured, predicted)
