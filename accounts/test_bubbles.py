"""The simulated bubble and the activations in flight equal the papers' numbers and formulas."""

import itertools
import operator

import pytest

from accounts.bubbles import FORMULAS, by_formula, simulate
from parallel.schedules import Action, Schedule, usual_chunks
from parallel.simulation import build
from testing.points import COST

# Qi et al., arXiv 2401.10241, tables 5, 6: p, m; milliseconds of F, I (the paper's B), W, a message; bubble rates
ZERO_BUBBLE = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}),
    (8, 32, 18.513, 18.086, 9.331, 0.626, {"1f1b": 0.1985, "zb-h1": 0.1242, "zb-h2": 0.0837}),
    (8, 64, 18.546, 18.097, 9.321, 0.762, {"1f1b": 0.1240, "zb-h1": 0.0674, "zb-h2": 0.0444}),
    (16, 48, 11.347, 11.248, 8.132, 0.377, {"1f1b": 0.2552, "zb-h1": 0.1397, "zb-h2": 0.0672}),
    (16, 64, 11.307, 11.254, 8.101, 0.379, {"1f1b": 0.2082, "zb-h1": 0.1088, "zb-h2": 0.0516}),
    (16, 128, 11.325, 11.308, 8.109, 0.378, {"1f1b": 0.1251, "zb-h1": 0.0576, "zb-h2": 0.0266}),
]


@pytest.mark.parametrize("p, m, F, I, W, comm, published", ZERO_BUBBLE)
def test_the_zero_bubble_papers_rates_to_all_four_decimals(p, m, F, I, W, comm, published):
    cost = {"F": F, "B": I + W, "I": I, "W": W}
    for name, rate in published.items():
        bubble = round(simulate(build(name, p, m), cost, comm).bubble, 4)
        assert bubble == rate, f"{name}, {p} stages, {m} micro-batches: the bubble is {bubble}; the paper has {rate}"


SIZES = [(4, 8), *((p, m) for p in (3, 2, 6, 1) for m in (7, 4, 12, 2, 1)), (4, 3), (4, 1)]  # p = 4, m = 8 comes first
COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}, COST, {"F": 2, "B": 2, "I": 1.2, "W": 0.8}


def timelines(name):
    """Yield (a text, {letter: value} of a formula, the Timeline) for each size that the schedule accepts, and cost."""
    for v, (p, m) in itertools.product({"interleaved": (2, 3), "zb-v": [2]}.get(name, [1]), SIZES):
        where = f"{name}, p = {p} stages, m = {m} micro-batches"
        try:
            schedule = build(name, p, m, v)
        except Exception as error:
            if str(error).startswith(("stages=", "microbatches=")):
                continue
            raise pytest.fail.Exception(f"{where}: {type(error).__name__}: {error}", pytrace=False) from None
        for costs in COSTS:
            yield where, dict(p=p, m=m, v=v, **costs), simulate(schedule, costs)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_can_run_in_every_size(name):
    assert [*timelines(name)]


LIMITS = {"at most": operator.le, "at least": operator.ge}
SAID = {"bubble": "the bubble is {:.4f}", "peak": "{} are in flight on rank {}"}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize("limit", LIMITS)
def test_a_schedule_is_its_formulas(name, what, limit):
    """In all sizes for which they hold; each holds in some. No lamp is `at least`: an answer may have less."""
    formula, held = FORMULAS[name], False
    for where, letters, line in timelines(name):
        found = line.peak if what == "peak" else [line.bubble] * by_formula(formula.where, **letters)
        for r, number in enumerate(found):
            right = by_formula(getattr(formula, what), r=r, **letters)
            held |= right > 0
            if not LIMITS[limit](round(number, 9), round(right, 9)):
                said = f"{where}: {SAID[what].format(number, r)}; should be {limit} {getattr(formula, what)}"
                pytest.fail(said, pytrace=False)  # without the formula's number: a question asks for it
    assert held, f"the formula of {name} holds in no size"


def test_the_bubble_of_uneven_ranks_is_their_mean_idle_time():
    """Rank 0 has one part and is busy for 3.1, rank 1 has two parts and is busy for 6.2. The whole run takes 9.3."""
    F, B = [Action("F", 0, c) for c in range(3)], [Action("B", 0, c) for c in range(3)]
    line = simulate(Schedule("uneven", [0, 1, 2], [0, 1, 1], [[F[0], B[0]], [F[1], F[2], B[2], B[1]]]), COST)
    assert line.makespan == line.span == pytest.approx(9.3) and line.bubble == pytest.approx(1 - (3.1 + 6.2) / 2 / 9.3)
    assert line.peak == [1, 2]


@pytest.mark.parametrize("name, span, makespan", [("1f1b", 33, 33), ("zb-h2", 24, 27), ("zb-v", 24, 25.5)])
def test_the_bubble_of_a_rank_and_of_the_whole_step(name, span, makespan):
    """By hand: p = 4, m = 8, F = I = W = 1. Each rank computes for 24. zb-v has two chunks, each half as long."""
    cost = {"F": 1, "B": 2, "I": 1, "W": 1} if name != "zb-v" else {"F": 0.5, "I": 0.5, "W": 0.5}
    line = simulate(build(name, 4, 8, usual_chunks(name)), cost)
    assert (line.bubble, line.step_bubble) == pytest.approx((1 - 24 / span, 1 - 24 / makespan))
