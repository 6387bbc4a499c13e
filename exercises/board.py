"""Compare this tree's schedules: `python -m exercises.board leaderboard`, or `delay` (exercise 10)."""

import sys

from accounts import bubbles, draw, report
from errors import UserError, exit_on_user_error
from parallel import schedules, simulation
from parallel.schedules import Action

P, M, COST, COMM = 4, 8, {"F": 1, "B": 2, "I": 1, "W": 1}, 0.5
PLAIN = "F and B only, one chunk"
BEST = [(4, 0.4), (5, 0.3514), (6, 0.3333)]  # (peak, a plain schedule's smallest bubble)


def leaderboard():
    """Print all synchronous schedules, in two classes, the smallest peak first."""
    rows = [(PLAIN, peak, bubble, bubble, "the best possible") for peak, bubble in BEST]
    for name in schedules.SCHEDULES:
        schedule = simulation.build(name, P, M, schedules.usual_chunks(name))
        kinds, v = {action.kind for actions in schedule.actions for action in actions}, draw.chunks_per_rank(schedule)
        plain = len(schedule.parts) == P and kinds == {"F", "B"}
        line = bubbles.simulate(schedule, {kind: duration / v for kind, duration in COST.items()}, COMM)
        peak = max(line.peak) / v  # in whole stages
        rows.append((PLAIN if plain else "others", peak, line.bubble, line.step_bubble, name))
    texts = [(what, name, f"{peak:g}", *(f"{x:.4f}" for x in bubbles)) for what, peak, *bubbles, name in sorted(rows)]
    print(f"{P} stages, {M} micro-batches, F = I = W = 1, B = 2, a message takes {COMM}")
    print(report.aligned([("class", "schedule", "peak", "bubble", "of the step"), *texts], 2))


def delay():
    """Print 1F1B whose W follow their I at once; this tree's zb-h1; the paper's."""
    at_once = []
    for actions in simulation.build("1f1b", P, M).actions:
        halves = [[Action(k, a.microbatch, a.chunk) for k in ("F" if a.kind == "F" else "IW")] for a in actions]
        at_once.append([action for part in halves for action in part])
    yours, formula = simulation.build("zb-h1", P, M), bubbles.FORMULAS["zb-h1"]
    rows = [("delay of W", "bubble", "in flight")]
    for name, schedule in [("0: W follows I", schedules.straight("", 1, at_once)), ("yours", yours)]:
        line = bubbles.simulate(schedule, COST)
        rows.append((name, f"{line.bubble:.4f}", " ".join(map(str, line.peak))))
    bubble, peak = (bubbles.by_formula(text, p=P, m=M, **COST) for text in (formula.bubble, formula.peak))
    print(report.aligned([*rows, ("the paper's", f"{bubble:.4f}", " ".join([str(peak)] * P))], 1))


def main():
    shown = {"leaderboard": leaderboard, "delay": delay}
    if sys.argv[1:] not in ([name] for name in shown):
        raise UserError(f"python -m exercises.board: should be followed by one of {', '.join(shown)}")
    shown[sys.argv[1]]()


if __name__ == "__main__":
    exit_on_user_error(main)
