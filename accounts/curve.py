"""Draws the losses of one or several runs, in the terminal or as SVG.

    python -m accounts.curve out/tiny out/tiny_2x2 --svg=loss.svg

A line shows the training loss. Each of its points is the mean over the iterations of one log line (`lm_loss`), drawn at
the last of these iterations. Circles show the validation loss. A loss of nan or inf leaves a gap.
"""

import math
import shutil
from pathlib import Path
from typing import NamedTuple

from errors import Parser, UserError, exit_on_user_error, reading
from log import read_metrics

UNITS = {"iterations": ("iteration", 1), "million tokens": ("consumed_tokens", 10**6)}  # {unit of x: (field, divisor)}


class Curve(NamedTuple):
    """The losses of one run, as lists of (x, loss)."""

    name: str
    training: list
    validation: list


def read_curve(path, unit):
    """Return the `Curve` of a run's out_dir or of one file like metrics.jsonl. unit: the unit of x, a key of UNITS."""
    file, (field, size) = Path(path, "metrics.jsonl") if Path(path).is_dir() else Path(path), UNITS[unit]
    with reading(file):
        rows = read_metrics(file).values()
        training = [(row[field] / size, float(row["lm_loss"])) for row in rows]
        validation = [(row[field] / size, float(row["validation_loss"])) for row in rows if "validation_loss" in row]
    if not any(math.isfinite(loss) for _, loss in training):
        raise UserError(f"{file}: has no loss to draw; train.py writes a loss every log_interval iterations")
    return Curve(Path(path).resolve().name.removesuffix(".jsonl"), training, validation)


def terminal(curves, unit, columns, rows=16):
    """Return a picture as text. The first run has the letters a (training) and A (validation), the next b and B."""
    marked = []  # (mark, x, loss)
    for letter, (_, *both) in zip("abcdefghijklmnopqrstuvwxyz", curves, strict=False):
        for mark, points in zip((letter, letter.upper()), both, strict=True):
            marked += [(mark, x, loss) for x, loss in points if math.isfinite(loss)]
    _, xs, losses = zip(*marked, strict=True)
    low, high, last = min(losses), max(losses), max(xs) or 1
    cells = [[" "] * columns for _ in range(rows)]
    for mark, x, loss in marked:
        row, column = round((rows - 1) * (high - loss) / (high - low or 1)), round((columns - 1) * x / last)
        cells[row][column] = mark if cells[row][column].lower() in (" ", mark.lower()) else "*"
    lines = [f"{high - i * (high - low) / (rows - 1):8.3f} |{''.join(row).rstrip()}" for i, row in enumerate(cells)]
    names = [f"{chr(97 + i)}: {name}, training   {chr(65 + i)}: validation" for i, (name, *_) in enumerate(curves)]
    legend = [f"x: {unit}", *names, *["*: several runs"] * (len(curves) > 1)]
    return "\n".join([*lines, f"{0:>10}{last:>{columns}g}", "   ".join(legend)])


def main(arguments=None):
    """Draw the runs of the command line. Raises UserError."""
    about = "Draws the losses of training runs."
    parser = Parser(prog="python -m accounts.curve", description=about, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an out_dir, or a file like its metrics.jsonl")
    parser.add_argument("--tokens", action="store_true", help="draw over consumed tokens (default: over iterations)")
    parser.add_argument("--svg", metavar="FILE", help="write an SVG (default: print a picture as text)")
    options = parser.parse_args(arguments)
    unit = "million tokens" if options.tokens else "iterations"
    curves = [read_curve(run, unit) for run in options.runs]
    if options.svg:
        from accounts import figures

        figures.curves(options.svg, curves, unit)
        print(f"{options.svg}: written")
    else:
        print(terminal(curves, unit, min(max(shutil.get_terminal_size((80, 0)).columns, 40), 1000) - 12))


if __name__ == "__main__":
    exit_on_user_error(main)
