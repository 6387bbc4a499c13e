"""Draws the losses of one or several runs, in the terminal or as SVG.

    python -m accounts.curve out/tiny out/tiny_2x2 --svg=loss.svg

A line shows the training loss. Each of its points is the mean over the iterations of one log line (`lm_loss`), drawn at
the last of these iterations. Circles show the validation loss. A loss of nan or inf leaves a gap. In the SVG each run
after the first has a dashed line and larger circles, so that equal curves stay visible.
"""

import html
import math
import shutil
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from errors import Parser, UserError, exit_on_user_error, explained, regular, writable
from log import read_metrics

UNITS = {"iterations": ("iteration", 1), "million tokens": ("consumed_tokens", 10**6)}  # {unit of x: (field, divisor)}
GREY, COLOURS = "#7a7a7a", ("#3a7fd0", "#cc6a1c", "#1f9655", "#9a5fd0")  # readable on white and on black
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 700, 380, 50, 670, 40, 330  # the SVG's size and its axes, in pixels


class Curve(NamedTuple):
    """The losses of one run, as lists of (x, loss)."""

    name: str
    training: list
    validation: list


def read_curve(path, unit):
    """Return the `Curve` of a run's out_dir or of one file like metrics.jsonl. unit: the unit of x, a key of UNITS."""
    with explained(path):
        file = Path(path, "metrics.jsonl") if Path(path).is_dir() else Path(path)
    field, size = UNITS[unit]
    try:
        with explained(file):
            rows = read_metrics(regular(file)).values()
        training = [(row[field] / size, float(row["lm_loss"])) for row in rows]
        validation = [(row[field] / size, float(row["validation_loss"])) for row in rows if "validation_loss" in row]
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        raise UserError(f"{file}: a line is not a row of metrics.jsonl with {field} and lm_loss") from None
    if not any(map(drawable, training)):
        raise UserError(f"{file}: has no loss to draw; train.py writes a loss every log_interval iterations")
    name = Path(path).resolve().name.removesuffix(".jsonl").encode(errors="replace").decode()
    return Curve(name, training, list(filter(drawable, validation)))


def drawable(point):
    return all(map(math.isfinite, point))


def axes(curves, left, right, bottom, top):
    """Return the `axis` of x, which begins at 0, and the `axis` of the loss."""
    points = [point for curve in curves for point in curve.training + curve.validation if drawable(point)]
    xs, losses = zip(*points, strict=True)
    return axis((0, *xs), 6, left, right), axis(losses, 8, bottom, top)


def axis(values, most, begin, end):
    """Return the ticks of an axis, and the function that maps values linearly to positions from begin to end.

    The ticks are multiples of 1, 2 or 5 times a power of ten. They enclose the values in at most `most` steps.
    """
    low, high = min(values), max(values)
    power = 10.0 ** math.floor(math.log10((high - low or abs(high) or 1) / most))
    steps = [(n * power, math.floor(low / n / power), math.ceil(high / n / power)) for n in (1, 2, 5, 10, 20)]
    step, first, last = next(found for found in steps if found[2] - found[1] <= most)
    ticks = [i * step for i in range(first, max(last, first + 1) + 1)]
    return ticks, lambda value: begin + (end - begin) * (value - ticks[0]) / (ticks[-1] - ticks[0])


def terminal(curves, unit, columns, rows=16):
    """Return a picture as text. The first run has the letters a (training) and A (validation), the next b and B."""
    columns = max(columns, 60)
    (xs, x), (ys, y) = axes(curves, 8, columns - 8, rows - 1, 0)
    ticks, bottom, legend = {round(y(loss)): f"{loss:g}" for loss in ys}, "", [f"x: {unit}"]
    cells = [list(f"{ticks.get(row, ''):>6} |".ljust(columns)) for row in range(rows)]
    for i, curve in enumerate(curves):
        letter = chr(ord("a") + i % 26)
        legend.append(f"{letter}: {curve.name}, training   {letter.upper()}: validation")
        for mark, points in ((letter, curve.training), (letter.upper(), curve.validation)):
            for at, loss in filter(drawable, points):
                row, column = cells[round(y(loss))], round(x(at))
                row[column] = mark if row[column].lower() in (" ", letter) else "*"
    for at in xs:
        bottom = bottom.ljust(round(x(at))) + f"{at:g}"
    legend += ["*: several runs"] if len(curves) > 1 else []
    lines = ["".join(row).rstrip() for row in cells]
    return "\n".join([*lines, "+".rjust(8) + "-" * (columns - 15), bottom, "   ".join(legend)])


def svg(curves, unit):
    """Return the picture as SVG with a transparent background."""
    (xs, x), (ys, y) = axes(curves, LEFT, RIGHT, BOTTOM, TOP)
    parts = [text(LEFT, TOP - 18, "start", "loss: training (line), validation (circles)")]
    for loss in ys:
        parts.append(f"<path d='M{LEFT} {y(loss):.2f} H{RIGHT}' stroke='{GREY}' stroke-opacity='.35'/>")
        parts.append(text(LEFT - 8, y(loss) + 5, "end", f"{loss:g}"))
    for at in xs:
        parts.append(f"<path d='M{x(at):.2f} {BOTTOM} v6' stroke='{GREY}'/>")
        parts.append(text(x(at), BOTTOM + 22, "middle", f"{at:g}"))
    parts.append(text(RIGHT, HEIGHT - 8, "end", unit))
    left = RIGHT - 60 - 8 * max(len(curve.name) for curve in curves)  # x of the legend
    for i, curve in enumerate(curves):
        height = TOP + 20 + 24 * i
        sample = Curve("", [(left, height), (left + 40, height)], [(left + 20, height)])
        parts += [*marks(i, curve, x, y), *marks(i, sample, float, float)]
        parts.append(text(left + 50, height + 5, "start", curve.name))
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}'"
    return "\n".join([f"{head} font-family='Helvetica, Arial, sans-serif' font-size='14'>", *parts, "</svg>", ""])


def marks(i, curve, x, y):
    """Yield the line and the circles of run i. The line is interrupted at a loss of nan or inf."""
    style = f"fill='none' stroke='{COLOURS[i % len(COLOURS)]}' stroke-width='2'"
    dash = f" stroke-dasharray='{8 / i:.3g} 8'" if i else ""
    pieces = [[f"{x(at):.2f},{y(loss):.2f}" for at, loss in p] for ok, p in groupby(curve.training, drawable) if ok]
    path = " ".join(f"M{' L'.join(piece)}h0" for piece in pieces)  # h0: a single point becomes a dot
    yield f"<path d='{path}' {style} stroke-linecap='round'{dash}/>"
    for at, loss in curve.validation:
        yield f"<circle cx='{x(at):.2f}' cy='{y(loss):.2f}' r='{4 + 3 * i}' {style}/>"


def text(x, y, anchor, words):
    return f"<text x='{x:.2f}' y='{y:.2f}' text-anchor='{anchor}' fill='{GREY}'>{html.escape(words)}</text>"


def main(arguments=None):
    """Draw the runs of the command line. Raises UserError."""
    parser = Parser(
        prog="python -m accounts.curve", description="Draws the losses of training runs.", allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an out_dir, or a file like its metrics.jsonl")
    parser.add_argument("--tokens", action="store_true", help="draw over consumed tokens (default: over iterations)")
    parser.add_argument("--svg", metavar="FILE", help="write an SVG (default: print a picture as text)")
    options = parser.parse_args(arguments)
    unit = "million tokens" if options.tokens else "iterations"
    curves = [read_curve(run, unit) for run in options.runs]
    if not options.svg:
        print(terminal(curves, unit, min(shutil.get_terminal_size((80, 0)).columns, 1000)))
        return
    with explained(f"--svg={options.svg}"):
        writable(options.svg).write_text(svg(curves, unit), encoding="utf-8")
    print(f"{options.svg}: written")


if __name__ == "__main__":
    exit_on_user_error(main)
