"""Prints the tables of the measurements.

Other users and changing clock rates disturb a measurement. So the compared variants take turns, several times. A table
shows the median, the smallest and the largest value of all turns.
"""

import statistics

from accounts.report import aligned
from errors import UserError


def chosen(names, only):
    """Return the names that contain the text `only`. Raises UserError if there are none."""
    if not any(only in name for name in names):
        raise UserError(f"--only={only}: no name contains this text; the names are {', '.join(names)}")
    return [name for name in names if only in name]


def print_table(head: list[str], rows: list[list]):
    """Print columns as wide as their cells. The first column is left-aligned."""
    print(aligned([[str(cell) for cell in row] for row in [head, *rows]], words=1), flush=True)


def spread(values, form="{:.2f}") -> str:
    """Return the median, the smallest and the largest value, as in '1.02 (0.97-1.05)'."""
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low}-{high})"


def ratios(values, others) -> list[float]:
    """Return the ratio of the two values of each turn."""
    return [a / b for a, b in zip(values, others, strict=True)]
