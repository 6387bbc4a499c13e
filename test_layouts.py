"""Every layout must train the model that one process trains.

Each test trains in float64 and compares a layout with one process that has one micro-batch a step:

    losses, gradient norms, parameters after the run    equal to ten digits
    initial parameters, copies of one parameter         equal bit for bit

Every step is clipped. A layout of LAYOUTS has at least three micro-batches. It runs under SGD (whose update shows a
wrong gradient scale at once), and under AdamW with dropout and recomputation. The grid adds pipelines, ZeRO and the
other optimizers. After a failure `testing/compare.py` names the first difference and its usual cause.
"""

import functools
import itertools
import math
import random
import zlib
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

import train
from config import CHOICES, Config
from data import training_samples
from errors import UserError
from model import GPT
from parallel import schedules
from parallel.mesh import Mesh
from parallel.optimizer import RULES, Rule
from recovery import replicas
from testing.compare import FirstStep, differences

STEPS = 8
FEW = 2  # steps of most runs
TINY = dict(
    num_layers=2, hidden_size=16, num_attention_heads=8, seq_length=8, vocab_size=50, train_iters=STEPS,
    global_batch_size=24, lr=3e-2, min_lr=1e-3, lr_warmup_iters=2, weight_decay=0.1, adam_eps=1e-6, clip_grad=0.1,
    dtype="fp64",
)  # fmt: skip

# (dp, tp, sequence parallel): dp * tp = 2, 4 or 8; with dp=3 shards need padding
LAYOUTS = [
    (dp, tp, sp)
    for dp, tp in [(2, 1), (1, 2), (3, 1), (4, 1), (2, 2), (1, 4), (3, 2), (8, 1), (4, 2), (2, 4), (1, 8)]
    for sp in (False, True)
    if tp > 1 or not sp
]
ALL_MODES = list(itertools.product(["sgd", "adamw"], [0.0, 0.1], ["none", "full"]))
MODES = ALL_MODES[0], ALL_MODES[-1]  # every value, but not every pair
CURVES = {}  # of one process
SAME = (
    "optimizer dropout activation num_layers hidden_size num_attention_heads seq_length global_batch_size lr "
    "experts top_k expert_group balance capacity_factor"
).split()  # fields that one process shares


def tiny_config(dp, tp=1, **fields):
    fields = {"micro_batch_size": 8 // dp, "tp": tp} | fields  # m = 3 (with dp=3: 4)
    return Config(**TINY | fields)


def micro_batches(run, vocab_size=50, reader=None):
    """Yield this rank's micro-batches. Sample g depends on g alone. Most of its ids are the last one plus 1."""
    c = run.config
    dice = torch.randint(0, vocab_size, (1000, c.seq_length + 1), generator=torch.Generator().manual_seed(5))
    table = (dice // 10 - 1).clamp(1).cumsum(1).add(dice[:, :1]) % vocab_size
    for numbers in training_samples(0, *(reader or run.mesh.reader), c.micro_batch_size):
        numbers = torch.from_numpy(numbers)
        tokens = table[numbers % len(table)]
        yield run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], numbers)


def parameters(run):
    """Return copies, {parameter: this rank's tp slice}."""
    parts = {}
    for name, bucket in run.zero.buckets.items():
        run.zero.gather(name)
        parts |= {p.spec.name: p.detach().clone() for p in bucket.params}
        run.zero.release(name)
    return parts


def gradients(run):
    """Return copies, {parameter: (begin, end, values)}, of the elements that this rank updates."""
    pieces = [(bucket, piece) for bucket in run.zero.buckets.values() for piece in bucket.pieces]
    return {p.spec.name: (p.begin, p.end, p.of(bucket.grad.own).clone()) for bucket, p in pieces}


def built(config, mesh=None):
    run = train.build(config, mesh or Mesh.of(config), torch.device("cpu"))
    run.zero.initialize(config.seed)
    return run


def train_tiny(config, steps=STEPS, mesh=None):
    """Train on this rank. Return (losses, gradient norms, parameters before, parameters after)."""
    return trained(config, steps, mesh)[:4]


def trained(config, steps=STEPS, mesh=None):
    """Return what `train_tiny` returns, then the copies that differ (`replicas.differing_copies`)."""
    run = built(config, mesh)
    before, batches = parameters(run), micro_batches(run)
    done = [train.train_step(run, batches).read() for _ in range(steps)]
    copies = replicas.differing_copies(run.zero)
    return [s.loss for s in done], [s.grad_norm for s in done], before, parameters(run), copies


def train_each(configs, steps=FEW):
    """Call `trained` with each configuration, on one mesh."""
    mesh = Mesh.of(configs[0])
    return [trained(config, steps, mesh) for config in configs]


def one_process_config(config):
    """Return the same training on one process, with one micro-batch a step."""
    fields = {name: getattr(config, name) for name in SAME}
    return tiny_config(1, micro_batch_size=config.global_batch_size, **fields)


def one_process(config, steps=FEW):
    """Return `train_tiny` of `one_process_config`."""
    key = steps, *(getattr(config, name) for name in SAME)
    if key not in CURVES:
        CURVES[key] = train_tiny(one_process_config(config), steps)
    return CURVES[key]


def assert_same_model(results, reference, config, specs, first_step=None):
    """Fail unless every rank's run is that of one process. Arguments: `testing.compare.differences`."""
    assert all(norm > config.clip_grad for norm in reference[1]), "clipping must change every step"
    message = differences(results, reference, config, specs, first_step)
    if message:
        pytest.fail(message, pytrace=False)
    assert not any(result[4:] != ([],) for result in results), (
        f"copies differ, a sum or its `wait` is missing: {[result[4:] for result in results]}"
    )


def check_layout(configs, on_ranks, steps=FEW):
    """Train with each configuration, on one mesh. Compare each run with one process.

    on_ranks(function, *arguments) returns the function's results of all ranks.
    """
    by_rank = on_ranks(train_each, configs, steps)
    for config, results in zip(configs, zip(*by_rank, strict=True), strict=True):
        again = functools.partial(first_steps, on_ranks, config)
        assert_same_model(results, one_process(config, steps), config, specs(config), again)


def specs(config):
    return GPT(config, Mesh().tp).specs()


# --- after a failure: the first step, with its gradients --------------------------------------------------------------


def first_step(config):
    """Run the first step on this rank, and copy its gradients before the update."""
    run, found = built(config), {}
    update = run.zero.update

    def keep_gradients(scalars):
        found.update(gradients(run))
        update(scalars)

    run.zero.update = keep_gradients
    step = train.train_step(run, micro_batches(run)).read()
    return FirstStep(step.loss, step.grad_norm, found, parameters(run))


def gradient_of_each_micro_batch(one, config, dp):
    """Return {(data rank, micro-batch): {parameter: gradient}}, whose sum is the step's gradient."""
    m, size = config.global_batch_size // (config.micro_batch_size * dp), config.micro_batch_size
    run, shares = built(replace(one, micro_batch_size=size, global_batch_size=size)), {}
    for d in range(dp):
        batches = micro_batches(run, reader=(d, dp))
        for j in range(m):
            run.zero.zero_grad()
            run.executor.run(batches, 1, 1 / (m * dp))
            shares[d, j] = {name: values for name, (_, _, values) in gradients(run).items()}
    return shares


def first_steps(on_ranks, config):
    """Run the first step again: on the ranks, on one process, each micro-batch alone, and without dropout."""
    steps, one = on_ranks(first_step, config), one_process_config(config)
    dp, whole = len(steps) // (config.tp * config.cp * config.pp), replace(config, dropout=0.0)
    losses = [step.loss for step in on_ranks(first_step, whole)] if config.dropout else [math.nan]
    dropout_only = losses == pytest.approx([first_step(one_process_config(whole)).loss] * len(losses), rel=1e-10)
    return steps, first_step(one), gradient_of_each_micro_batch(one, config, dp), dropout_only


# --- every layout of dp and tp ----------------------------------------------------------------------------------------


def slow_with_eight(values):
    """Mark a layout as slow if an axis has eight ranks, or eight ranks have no sequence parallelism."""
    dp, tp, sp = values
    return pytest.param(*values, marks=[pytest.mark.slow] * (8 in values or (dp * tp == 8 and not sp)))


@pytest.mark.parametrize("dp, tp, sp", [slow_with_eight(layout) for layout in LAYOUTS], ids=str)
def test_every_layout_trains_the_same_model(workers, dp, tp, sp):
    modes = [dict(zip(("optimizer", "dropout", "recompute"), mode, strict=True)) for mode in MODES]
    configs = [tiny_config(dp, tp, sequence_parallel=sp, **mode) for mode in modes]
    check_layout(configs, functools.partial(workers.run, dp * tp))


@pytest.mark.parametrize("optimizer, dropout, recompute", ALL_MODES)
def test_micro_batches_and_recomputation_on_one_process(optimizer, dropout, recompute):
    """m micro-batches give the gradient of one big batch. Recomputation changes nothing."""
    modes = dict(optimizer=optimizer, dropout=dropout, recompute=recompute)
    configs = [tiny_config(1, micro_batch_size=size, **modes) for size in (1, 8)]
    check_layout(configs, lambda function, *arguments: [function(*arguments)])


def test_relu_trains_the_same_model(workers):
    gelu = tiny_config(2, 2, sequence_parallel=True, zero=3, optimizer="adamw", dropout=0.1)
    relu = replace(gelu, activation="relu")
    assert one_process(relu)[0] != one_process(gelu)[0], "equal losses: GELU was used"
    check_layout([relu], functools.partial(workers.run, 4))


def lion(weight, gradient, moments, *, lr, decay, scale, beta1, beta2, **_):
    """Lion (Chen et al., arXiv 2302.06675): w -= lr (sign(b1 m + (1 - b1) g) + decay w);  m = b2 m + (1 - b2) g."""
    (m,), g = moments, gradient * scale
    weight.mul_(1 - lr * decay).add_((beta1 * m + (1 - beta1) * g).sign(), alpha=-lr)
    m.mul_(beta2).add_(g, alpha=1 - beta2)


def with_lion(function, *arguments):
    with mock.patch.dict(RULES, lion=Rule(lion, 1)):
        return function(*arguments)


def test_a_rule_with_a_sign_trains_the_same_model(workers):
    """The key bias is not compared: its gradient is rounding noise."""
    config = tiny_config(2, 2, sequence_parallel=True, zero=2, optimizer="lion")
    with_lion(check_layout, [config], lambda *call: workers.run(4, with_lion, *call))


# --- the grid -------------------------------------------------------------------------------------------------------

SIZES = {"dp": [1, 2, 4, 8], "tp": [1, 2, 4, 8], "pp": [1, 2, 4, 8], "cp": [1, 2, 4]}
OTHERS = {
    "schedule": [name for name in schedules.SCHEDULES if name not in schedules.ASYNCHRONOUS],
    "zero": [0, 1, 2, 3],
    "sequence_parallel": [False, True],
    "recompute": ["none", "full"],
    "optimizer": list(RULES),
    "micro_batches": ["one", "fewer than stages", "stages", "not a multiple", "twice"],
    "context": CHOICES["context"],
}
# A new axis comes here, with its usual value first: then the ids of old layouts stay (`name`, `with_optimizer`).
LATER = {"experts": [0, 4], "order": CHOICES["order"]}


MIXTURE = dict(
    top_k=2, capacity_factor=1.0, balance=0.3
)  # an expert of 4 has 1 place in a group of 2: some are dropped


def number_of_micro_batches(word, pp):
    return {"one": 1, "fewer than stages": pp - 1, "stages": pp, "not a multiple": pp + 1, "twice": 2 * pp}[word]


@functools.cache
def can_run(schedule, stages, m):
    try:
        return bool(schedules.build(schedule, stages, m, schedules.usual_chunks(schedule)))
    except UserError as error:  # "stages=3: ...": the schedule needs another number
        return "=" not in str(error).partition(":")[0]
    except Exception:
        return True


def fits(dp, tp, pp, cp, context, experts, schedule, zero, sequence_parallel, micro_batches, order, **_):
    """Return False if the values do not go together, or a simpler point is the same layout."""
    redundant = (
        (cp == 1 and context != "ulysses")
        or (pp == 1 and (schedule != "1f1b" or micro_batches in ("fewer than stages", "stages")))
        or (pp == 2 and micro_batches == "fewer than stages")
        or (dp * cp == 1 and zero)
        or (tp == 1 and sequence_parallel)
        or (1 in (dp, pp) and order != "dp-pp-tp")
        or (experts and (tp > 4 or (tp > 1 and not sequence_parallel) or not group_of_tokens(tp, cp, context)))
    )
    return not redundant and can_run(schedule, pp, number_of_micro_batches(micro_batches, pp))


def group_of_tokens(tp, cp, context):
    """Return the largest group of tokens that one rank has whole, at most 2."""
    return min(2, TINY["seq_length"] // (tp * cp * (2 if context == "ring" else 1)))


def ranks(dp, tp, pp, cp, **_):
    return dp * tp * pp * cp


@functools.cache
def points():
    """Return all points of the grid: each layout on 2 to 8 ranks, with one optimizer (`with_optimizer`)."""
    others = OTHERS | LATER | {"optimizer": list(RULES)[:1]}
    sizes = [values for values in itertools.product(*SIZES.values()) if 2 <= math.prod(values) <= 8]
    found = (dict(zip(SIZES | others, a + b, strict=True)) for a in sizes for b in itertools.product(*others.values()))
    return [with_optimizer(point) for point in found if fits(**point)]


def with_optimizer(point):
    """Choose a point's optimizer from its values that are not the first ones, so a new axis does not change it.

    An optimizer sees the mesh and the pieces of ZeRO, so it meets all of these. The other settings change gradients.
    """
    usual = {axis: values[0] for axis, values in (SIZES | OTHERS | LATER).items()}
    others = [f"{axis}{value}" for axis, value in point.items() if axis != "optimizer" and value != usual[axis]]
    number = sum(zlib.crc32(text.encode()) for text in others)
    return point | dict(optimizer=list(RULES)[number % len(RULES)])


def test_each_mesh_and_zero_stage_meets_every_optimizer():
    met = {}
    for point in points():
        met.setdefault(tuple(point[axis] for axis in [*SIZES, "zero", *LATER]), set()).add(point["optimizer"])
    assert {place: found for place, found in met.items() if found != set(RULES)} == {}


def test_a_new_axis_changes_no_id(monkeypatch):
    before = set(map(name, points()))
    monkeypatch.setitem(LATER, "copies", [1, 2])
    assert before < {name(with_optimizer(point | dict(copies=n))) for point in points() for n in (1, 2)}


def fitted(dp, tp, pp, cp, context, experts, schedule, micro_batches, **fields):
    """Return (configuration, number of processes) of a point of the grid."""
    chunks = schedules.usual_chunks(schedule)
    layers = max(3, pp * chunks - 1)  # 2 parts: 2 blocks and 1 block; more parts: one has no block
    if experts:
        fields |= MIXTURE | dict(experts=experts, expert_group=group_of_tokens(tp, cp, context))
    config = tiny_config(
        dp, tp, pp=pp, cp=cp, context=context, schedule=schedule, chunks=chunks, num_layers=layers, micro_batch_size=2,
        global_batch_size=2 * dp * number_of_micro_batches(micro_batches, pp), lr=5e-3, dropout=0.1, **fields,
    )  # fmt: skip
    return config, dp * tp * pp * cp


def covering(points, chosen=()):
    """Choose points until these and `chosen` contain every pair of values."""
    table = pairs_of([*chosen, *points])
    left, table, more = ~table[: len(chosen)].any(0), table[len(chosen) :], []
    while left.any():
        best = table[:, left].sum(1).argmax()
        left &= ~table[best]
        more.append(points[best])
    return more


def pairs_of(points):
    """Return which pairs of values the points contain, bool [points, pairs]."""
    codes = [np.unique([str(point[axis]) for point in points], return_inverse=True)[1] for axis in points[0]]
    numbers = [a * (b.max() + 1) + b for a, b in itertools.combinations(codes, 2)]
    return np.concatenate([number[:, None] == np.unique(number) for number in numbers], 1)


def check_point(workers, point, steps=FEW):
    config, ranks = fitted(**point)
    check_layout([config], functools.partial(workers.run, ranks), steps)


def name(point):
    left_out = ["cp", "context"] * (point["cp"] == 1)
    left_out += [axis for axis, (usual, *_) in LATER.items() if point[axis] == usual]
    values = [value for axis, value in point.items() if axis not in left_out]
    return "-".join(map(str, values)).replace(" ", "_")


def pytest_generate_tests(metafunc):
    """Compute the grid only here, because every worker imports this file."""
    name_of_test = f"::{metafunc.function.__name__}"
    others = all("::" in asked and name_of_test not in asked for asked in metafunc.config.args)
    if "point" not in metafunc.fixturenames or others:  # the command names other tests only
        return
    if metafunc.function is test_the_grid_covered:
        few = covering(
            [point for point in points() if ranks(**point) <= 4 or {*itertools.islice(point.values(), 3)} == {2}]
        )
        chosen = few + [pytest.param(point, marks=pytest.mark.slow) for point in covering(points(), few)]
    else:
        chosen = random.Random(1).sample(points(), len(points()))
    metafunc.parametrize("point", chosen, ids=name)


def test_the_grid_covered(workers, point):
    check_point(workers, point)


@pytest.mark.grid
def test_the_whole_grid(workers, point):
    """In random order, so a part of the run is a random sample."""
    check_point(workers, point)
