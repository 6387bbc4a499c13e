"""How the measurements print.

Machines are shared and their clocks move. So the things that are compared run in turns, several times, and a table
shows the median of the ratios with the smallest and the largest.
"""

import statistics

from parallel.report import aligned


def print_table(head: list[str], rows: list[list]):
    """Columns as wide as they need to be; the first one left-aligned."""
    print(aligned([[str(cell) for cell in row] for row in [head, *rows]], words=1), flush=True)


def print_row(form: str, *cells):
    """One row of a table whose rows come as they are ready: `form` has the width of each column."""
    print(form.format(*cells), flush=True)


def spread(values, form="{:.2f}") -> str:
    """'1.02 (0.97-1.05)': the median, the smallest and the largest."""
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low}-{high})"


def ratios(values, others) -> list[float]:
    """Turn by turn, each value over the other's of the same turn."""
    return [a / b for a, b in zip(values, others, strict=True)]
