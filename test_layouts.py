"""Every layout must train the model that one process trains.

Each test trains in float64 and compares a layout with one process that has one micro-batch a step:

    losses, gradient norms, parameters after the run    equal to ten digits
    initial parameters, copies of one parameter         equal bit for bit
    bytes sent and kept                                 equal to the formulas of accounts/, here and in bf16
    the order of communications                         cannot deadlock, even if each blocks its rank

Every step is clipped. A layout of LAYOUTS has at least three micro-batches. It runs under SGD (whose update shows a
wrong gradient scale at once), and under AdamW with dropout and recomputation. The grid adds pipelines, ZeRO, the other
optimizers and models. After a failure `testing/compare.py` names the first difference and its usual cause.
"""

import itertools
import random
from pathlib import Path
from unittest import mock

import pytest

from parallel.optimizer import RULES, Rule
from testing import points
from testing.record import check_layout
from testing.tiny import few, stirred, tiny_config, wrong_gradients

ALL_MODES = list(itertools.product(["sgd", "adamw"], [0.0, 0.1], ["none", "full"]))
MODES = ALL_MODES[0], ALL_MODES[-1]  # every value, but not every pair


# --- every layout of dp and tp ----------------------------------------------------------------------------------------


LAYOUTS = [  # (dp, tp, sequence parallel); with dp=3 shards need padding
    (2, 1, False), (1, 2, False), (1, 2, True), (4, 1, False), (2, 2, True), (3, 2, False),
]  # fmt: skip


@pytest.mark.parametrize("dp, tp, sp", few(LAYOUTS, 4))
def test_every_layout_trains_the_same_model(workers, dp, tp, sp):
    modes = [dict(zip(("optimizer", "dropout", "recompute"), mode, strict=True)) for mode in MODES]
    check_layout(workers, dp * tp, *(tiny_config(dp, tp, sequence_parallel=sp, **mode) for mode in modes))


@pytest.mark.parametrize("optimizer, dropout, recompute", few([*MODES, *ALL_MODES[1:-1]], 2))
def test_micro_batches_and_recomputation_on_one_process(workers, optimizer, dropout, recompute):
    """m micro-batches give the gradient of one big batch. Recomputation changes nothing."""
    modes = dict(optimizer=optimizer, dropout=dropout, recompute=recompute)
    check_layout(workers, 1, *(tiny_config(1, micro_batch_size=size, **modes) for size in (1, 8)))


GROUPS = points.LLAMA | dict(num_query_groups=2, untie_embeddings_and_output_weights=True, rotary_base=77.0)
SHARED = [{}, dict(activation="relu"), dict(model="llama"), GROUPS]


@pytest.mark.parametrize("fields", SHARED, ids=str)
def test_gradients_are_finite_differences(fields):
    """Layouts can't see a mistake that all of them share."""
    config = tiny_config(1, init_method_std=0.2, dropout=0.1, **fields)
    assert wrong_gradients(stirred(config)) == ""


def lion(weight, gradient, moments, *, lr, decay, scale, beta1, beta2, **_):
    """Lion (Chen et al., arXiv 2302.06675): w -= lr (sign(b1 m + (1 - b1) g) + decay w);  m = b2 m + (1 - b2) g."""
    (m,), g = moments, gradient * scale
    weight.mul_(1 - lr * decay).add_((beta1 * m + (1 - beta1) * g).sign(), alpha=-lr)
    m.mul_(beta2).add_(g, alpha=1 - beta2)


def with_lion():
    return mock.patch.dict(RULES, lion=Rule(lion, 1))


def test_a_rule_with_a_sign_trains_the_same_model(workers):
    """The key bias is not compared: its gradient is rounding noise."""
    check_layout(workers, 4, tiny_config(2, 2, sequence_parallel=True, zero=2, optimizer="lion"), change=with_lion)


# --- the grid -------------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc):
    """Leave out points whose mark is left out: to choose or name them takes seconds."""
    marks = metafunc.config.option.markexpr
    if metafunc.function is test_the_grid_covered:
        quick, slow = points.listed("not slow" not in marks)
        chosen = quick + [pytest.param(point, marks=pytest.mark.slow) for point in slow]
    elif metafunc.function is test_the_whole_grid:
        chosen = [] if "not grid" in marks else random.Random(1).sample(points.points(), len(points.points()))
    else:
        return
    metafunc.parametrize("point", chosen, ids=points.name)


def test_the_grid_covered(workers, point):
    """Points that stand for the others."""
    check_layout(workers, *points.fitted(**point))


@pytest.mark.grid
def test_the_whole_grid(workers, point):
    """In random order, so a part of the run is a random sample."""
    check_layout(workers, *points.fitted(**point))


@pytest.mark.slow
def test_the_points_of_a_slow_run_contain_every_pair_of_values():
    quick, slow = points.listed(slow=True)
    ours, all_pairs = (
        {pair for point in some for pair in itertools.combinations(point.items(), 2)}
        for some in (quick + slow, points.points())
    )
    assert ours == all_pairs


@pytest.mark.slow
def test_the_pages_say_how_many_layouts_the_grid_has():
    known = dict(schedule=points.SCHEDULES, optimizer=points.OPTIMIZERS)  # without yours
    count = sum(all(point[axis] in values for axis, values in known.items()) for point in points.points())
    for page in ("README.md", "MEASURED.md"):
        assert f"{count:,}" in Path(__file__).with_name(page).read_text("utf-8"), page
