"""Draw the losses of one or several runs, or their speeds.

    python -m accounts.curve out/tiny out/tiny_2x2 --svg=loss.svg
    python -m accounts.curve --speed out/tiny out/tiny_dp2 --svg=speed.svg

A line shows the training loss: the mean of each log line (`lm_loss`), at its last iteration. Circles show the
validation loss. A loss of nan or inf leaves a gap.
"""

import math
import statistics
from pathlib import Path
from typing import NamedTuple

from accounts import figures
from accounts.metrics import read_metrics
from errors import exit_on_user_error, reading
from options import Parser


class Curve(NamedTuple):
    """The losses of one run, as lists of (iteration, loss)."""

    name: str
    training: list
    validation: list


def file_of(run):
    return Path(run, "metrics.jsonl") if Path(run).is_dir() else Path(run)


def read_curve(path):
    """path: an out_dir, or a file like its metrics.jsonl."""
    with reading(file := file_of(path)):
        rows = read_metrics(file).values()
        training = [(row["iteration"], float(row["lm_loss"])) for row in rows]
        validation = [(row["iteration"], float(row["validation_loss"])) for row in rows if "validation_loss" in row]
        if not training:
            raise ValueError("has no loss to draw; train.py writes a loss every log_interval iterations")
    return Curve(Path(path).resolve().name.removesuffix(".jsonl"), training, validation)


def loss_differences(first, *others):
    """Return a line for each other Curve: its largest difference (nan: the first nan) from the first, and where."""
    losses, lines = dict(first.training), []
    for curve in others:
        common = [(abs(loss - losses[i]), i) for i, loss in curve.training if i in losses]
        if common:
            most, where = max(common, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
            lines.append(f"{curve.name} - {first.name}: at most {most:.3g}, at iteration {where}")
    return lines


def read_speeds(paths):
    """Return sorted [(processes, tokens/s)]. A run's speed is the median of its log lines except the first.

    After a resume with more or fewer processes, only the last lines count.
    """
    points = []
    for file in map(file_of, paths):
        with reading(file):
            rows = [*read_metrics(file).values()]
            last = [row for row in rows if row["processes"] == rows[-1]["processes"]]
            speeds = [row["tokens_per_second"] for row in last[1:] or last]
            points.append((last[-1]["processes"], statistics.median(speeds)))
    return sorted(points)


def main(arguments=None):
    """Run the command line. A speed is compared with the run on the fewest processes."""
    parser = Parser(prog="python -m accounts.curve", description="Draws the losses of training runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an out_dir, or a file like its metrics.jsonl")
    parser.add_argument("--svg", metavar="FILE", default="loss.svg", help="the picture (default: %(default)s)")
    parser.add_argument("--speed", action="store_true", help="draw tokens/s over the number of processes")
    options = parser.parse_args(arguments)
    if options.speed:
        points = read_speeds(options.runs)
        for n, speed in points:
            share = speed / n / (points[0][1] / points[0][0])
            print(f"{n:6} processes {speed:14,.0f} tokens/s {share:8.2f} of linear")
        figures.speeds(options.svg, points)
    else:
        curves = [read_curve(run) for run in options.runs]
        print("\n".join(loss_differences(*curves)))
        figures.curves(options.svg, curves)
    print(f"{options.svg}: written")


if __name__ == "__main__":
    exit_on_user_error(main)
