"""The simulated bubble and the activations in flight equal the papers' numbers and formulas."""

import pytest

from accounts.bubbles import FORMULAS, by_formula, simulate
from parallel import schedules
from parallel.schedules import Action, Schedule
from parallel.simulation import build
from testing.points import COST, all_of_them

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


def test_the_printed_formulas_are_the_simulations():
    """The papers' formulas give the simulated bubble and peak, in all sizes for which they hold. Each holds in some."""
    held = set()
    for name, p, m, v in all_of_them((1, 2, 3, 4, 6), range(1, 14)):
        if name not in FORMULAS:  # an added schedule may have no formula
            continue
        for costs in (COST, {"F": 1, "B": 2, "I": 1, "W": 1}, {"F": 2, "B": 2, "I": 1.2, "W": 0.8}):
            formula, letters = FORMULAS[name], dict(p=p, m=m, v=v, **costs)
            line = simulate(build(name, p, m, v), costs)
            where, peak = (
                f"{name}, p={p}, m={m}, v={v}",
                [by_formula(formula.peak, r=r, **letters) for r in range(p)],
            )
            assert line.peak == peak, (
                f"{where}: {line.peak} are in flight on the ranks; should be {formula.peak} = {peak}"
            )
            if by_formula(formula.where, **letters):
                bubble = by_formula(formula.bubble, **letters)
                why = f"{where}: the bubble is {line.bubble:.4f}; should be {formula.bubble} = {bubble:.4f}"
                assert line.bubble == pytest.approx(bubble, abs=1e-9), why
                held.add((name, line.bubble > 0))
    assert held >= {(name, True) for name in FORMULAS}


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
    line = simulate(build(name, 4, 8, schedules.usual_chunks(name)), cost)
    assert (line.bubble, line.step_bubble) == pytest.approx((1 - 24 / span, 1 - 24 / makespan))
