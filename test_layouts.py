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

import pytest
import torch

from config import CHOICES
from errors import UserError
from parallel import schedules, simulation
from parallel.optimizer import RULES, Rule
from testing.tiny import (
    FEW,
    LAYOUTS,
    check_layout,
    covering,
    one_process,
    stirred,
    tiny_config,
    train_tiny,
    wrong_gradients,
)

ALL_MODES = list(itertools.product(["sgd", "adamw"], [0.0, 0.1], ["none", "full"]))
MODES = ALL_MODES[0], ALL_MODES[-1]  # every value, but not every pair


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


SHARED = [{}, dict(activation="relu"), dict(model="llama"), dict(recompute="elementwise")]


@pytest.mark.parametrize("fields", SHARED, ids=str)
def test_gradients_are_finite_differences(fields):
    """Layouts can't see a mistake that all of them share."""
    config = tiny_config(1, init_method_std=0.2, dropout=0.1, **fields)
    assert wrong_gradients(stirred(config)) == ""


ELEMENTWISE = [
    (2, 1, 1, dict(zero=3)),
    (1, 2, 1, dict(sequence_parallel=True, activation="relu")),
    (1, 1, 2, dict(schedule="zb-h1", zero=2)),
    (1, 2, 1, dict(cp=2)),
]


@pytest.mark.parametrize("dp, tp, pp, fields", ELEMENTWISE, ids=str)
def test_elementwise_recomputation_trains_the_same_model(workers, dp, tp, pp, fields):
    modes = [dict(optimizer="sgd"), dict(optimizer="adamw", dropout=0.1)]
    configs = [tiny_config(dp, tp, pp=pp, recompute="elementwise", **mode, **fields) for mode in modes]
    check_layout(configs, functools.partial(workers.run, dp * tp * pp * configs[0].cp))


@pytest.mark.parametrize("activation", CHOICES["activation"])
def test_elementwise_recomputation_changes_no_bit(activation):
    """The second output of LayerNorm and of GELU is the first one, bit for bit."""
    modes = dict(dropout=0.1, activation=activation, dtype="fp32")
    ours, its = (train_tiny(tiny_config(1, recompute=recompute, **modes), FEW) for recompute in ("elementwise", "none"))
    assert ours[:2] == its[:2]
    assert all(torch.equal(tensor, its[3][name]) for name, tensor in ours[3].items())


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
    "schedule": list(schedules.SCHEDULES),
    "zero": [0, 1, 2, 3],
    "sequence_parallel": [False, True],
    "recompute": ["none", "full"],
    "optimizer": list(RULES),
    "micro_batches": ["one", "fewer than stages", "stages", "not a multiple", "twice"],
}
# A new axis comes here, with its usual value first: then the ids of old layouts stay (`name`, `with_optimizer`).
LATER = {"order": CHOICES["order"], "zero_copies": [1, 2]}


def number_of_micro_batches(word, pp):
    return {"one": 1, "fewer than stages": pp - 1, "stages": pp, "not a multiple": pp + 1, "twice": 2 * pp}[word]


@functools.cache
def can_run(schedule, stages, m):
    try:
        return bool(simulation.build(schedule, stages, m, schedules.usual_chunks(schedule)))
    except UserError as error:  # "stages=3: ...": the schedule needs another number
        return "=" not in str(error).partition(":")[0]
    except Exception:  # a defect, whatever it raises: the point stays, and its test fails
        return True


def fits(dp, tp, pp, cp, schedule, zero, zero_copies, sequence_parallel, micro_batches, order, **_):
    """Return False if the values do not go together, or a simpler point is the same layout."""
    redundant = (
        (pp == 1 and (schedule != "1f1b" or micro_batches in ("fewer than stages", "stages")))
        or (pp == 2 and micro_batches == "fewer than stages")
        or (dp * cp == 1 and zero)
        or (zero_copies > 1 and (not zero or dp * cp <= zero_copies or dp * cp % zero_copies))
        or (tp == 1 and sequence_parallel)
        or (1 in (dp, pp) and order != "dp-pp-tp")
    )
    return not redundant and can_run(schedule, pp, number_of_micro_batches(micro_batches, pp))


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


def fitted(dp, tp, pp, cp, schedule, micro_batches, **fields):
    """Return (configuration, number of processes) of a point of the grid."""
    chunks = schedules.usual_chunks(schedule)
    layers = max(3, pp * chunks - 1)  # 2 parts: 2 blocks and 1 block; more parts: one has no block
    config = tiny_config(
        dp, tp, pp=pp, cp=cp, schedule=schedule, chunks=chunks, num_layers=layers, micro_batch_size=2,
        global_batch_size=2 * dp * number_of_micro_batches(micro_batches, pp), lr=5e-3, dropout=0.1, **fields,
    )  # fmt: skip
    return config, dp * tp * pp * cp


def check_point(workers, point, steps=FEW):
    config, ranks = fitted(**point)
    check_layout([config], functools.partial(workers.run, ranks), steps)


def name(point):
    left_out = ["cp"] * (point["cp"] == 1)
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
