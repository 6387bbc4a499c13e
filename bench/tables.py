"""Prints the tables of the measurements.

Other users and clock rates disturb a measurement, so the compared variants take turns.
"""

import statistics

from accounts.report import aligned
from errors import UserError


def chosen(names, only):
    """Return the names that contain `only`. Raises UserError if there are none."""
    if not any(only in name for name in names):
        raise UserError(f"--only={only}: no name contains this text; the names are {', '.join(names)}")
    return [name for name in names if only in name]


def print_table(head: list[str], rows: list[list]):
    """Print columns; the first is left-aligned."""
    print(aligned([[str(cell) for cell in row] for row in [head, *rows]], words=1), flush=True)


def spread(values, form="{:.2f}") -> str:
    """Return the median, smallest and largest value: '1.02 (0.97-1.05)'."""
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low}-{high})"


def ratios(values, others) -> list[float]:
    """Return the ratio of the two values of each turn."""
    return [a / b for a, b in zip(values, others, strict=True)]
