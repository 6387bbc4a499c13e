"""Names for the formulas of the exercises' predictions: the tests compare each with its derivation."""

from accounts import scaling, traffic, zero_states
from accounts.bubbles import FORMULAS, by_formula
from exercises.show import tiny

__all__ = ["FORMULAS", "by_formula", "scaling"]


def sent(ranks, axis, what=None, column=1, **fields):
    """Return the bytes (column=0: communications) that rank 0 sends over an axis in a step. what: only these."""
    rows = traffic.predict_step(tiny(**fields), ranks).sent[0].items()
    return sum(row[column] for (name, kind, _), row in rows if name == axis and what in (None, kind))


def kept(ranks, what=None, **fields):
    """Return the bytes of model states that rank 0 keeps in a step. what: only these."""
    p = traffic.predict_step(tiny(**fields), ranks)
    return sum(size for name, size in zero_states.rank_states(p.layout, 0, p.sizes).items() if what in (None, name))
