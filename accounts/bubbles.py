"""Bubble and activations in flight of a schedule: simulated with given durations, and by the papers' formulas."""

import itertools
from typing import NamedTuple

from parallel.simulation import check_actions, run_in_order


class Timeline(NamedTuple):
    """One step, simulated or recorded."""

    events: list  # Events, sorted by start
    makespan: float  # the whole step
    span: float  # the longest of the ranks' own times
    bubble: float  # the mean share of `span` in which a rank is idle, 0 .. 1
    step_bubble: float  # the share of `makespan`
    peak: list  # peak[rank]: the most (micro-batch, chunk) pairs in flight


def simulate(schedule, cost, comm=0):
    """Return the Timeline of a schedule, as in Qi et al., arXiv 2401.10241, section 5.

    An action starts when its rank is free and its inputs have arrived: a time `comm` after their
    producers end, if those run on another rank. cost: {kind: duration of an action of one chunk}.
    """
    check_actions(schedule)
    return timeline(run_in_order(schedule, cost, comm), len(schedule.actions))


def timeline(events, ranks):
    """Return the Timeline of Events. ranks: their number."""
    events = sorted(events, key=lambda e: (e.start, e.end))
    spans, peak, busy = [], [], 0
    for rank in range(ranks):
        of_rank = [e for e in events if e.rank == rank]
        first = min((e.start for e in of_rank), default=0)
        spans.append(max((e.end for e in of_rank), default=0) - first)
        busy += sum(e.end - e.start for e in of_rank) / ranks
        in_flight = itertools.accumulate({"F": 1, "B": -1, "W": -1}.get(e.action.kind, 0) for e in of_rank)
        peak.append(max(in_flight, default=0))
    span = max(spans)
    makespan = max(e.end for e in events) - min(e.start for e in events)
    bubbles = [(time - busy) / time if time else 0.0 for time in (span, makespan)]
    return Timeline(events, makespan, span, *bubbles, peak)


# --- the papers' formulas ---------------------------------------------------------------------------------------------


class Formula(NamedTuple):
    """Formulas as Python text, with the letters of `schedules.py`."""

    bubble: str  # of a rank's own time, if messages take no time
    peak: str  # as in Timeline, on rank r
    where: str = "True"  # the condition of `bubble`


ONE_F_ONE_B = Formula("(p-1) / (m+p-1)", "min(p-r, m)")
FORMULAS = {
    "gpipe": ONE_F_ONE_B._replace(peak="m"),
    "1f1b": ONE_F_ONE_B,
    "interleaved": Formula("(p-1) / (v*m+p-1)", "min((v-1)*p + 2*(p-1-r) + 1, v*m)"),
    "zb-h1": Formula(
        "(p-1)*(F+I-W) / (m*(F+I+W) + (p-1)*(F+I-W))",
        "min(p, m)",
        "m >= p and W <= min(F, I)",
    ),
    "zb-h2": Formula(
        "(p-1)*(F+I-2*W) / (m*(F+I+W) + (p-1)*(F+I-2*W))",
        "min(2*p-1, m)",
        "m >= 2*p-1 and W <= min(F, I)",
    ),
    "zb-v": Formula(
        "(p-1)*(I-W) / (m*(F+I+W) + (p-1)*(I-W))",
        "min(m+1+r, 2*m, 2*p)",
        "m >= 2*p-1 and W <= F <= I",
    ),
    "chimera": Formula(
        "(p-2) / (2*m+p-2)",
        "min((p+1)//2, p-r, (m+1)//2) + min(p//2, r+1, m//2)",
        "p >= 2 and F == B and m % p == 0",
    ),
}


def by_formula(text, **letters):
    return eval(text, {"min": min}, letters)  # a user cannot set the text: it comes from FORMULAS
