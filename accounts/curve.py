"""Draws the losses of one or several runs.

    python -m accounts.curve out/tiny out/tiny_2x2 --svg=loss.svg

A line shows the training loss. Each of its points is the mean over the iterations of one log line (`lm_loss`), drawn at
the last of these iterations. Circles show the validation loss. A loss of nan or inf leaves a gap.
"""

from pathlib import Path
from typing import NamedTuple

from accounts import figures
from errors import Parser, exit_on_user_error, reading
from log import read_metrics


class Curve(NamedTuple):
    """The losses of one run, as lists of (iteration, loss)."""

    name: str
    training: list
    validation: list


def read_curve(path):
    """Return the `Curve` of a run's out_dir or of one file like metrics.jsonl."""
    file = Path(path, "metrics.jsonl") if Path(path).is_dir() else Path(path)
    with reading(file):
        rows = read_metrics(file).values()
        training = [(row["iteration"], float(row["lm_loss"])) for row in rows]
        validation = [(row["iteration"], float(row["validation_loss"])) for row in rows if "validation_loss" in row]
        if not training:
            raise ValueError("has no loss to draw; train.py writes a loss every log_interval iterations")
    return Curve(Path(path).resolve().name.removesuffix(".jsonl"), training, validation)


def main(arguments=None):
    """Draw the runs of the command line. Raises UserError."""
    parser = Parser(prog="python -m accounts.curve", description="Draws the losses of training runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an out_dir, or a file like its metrics.jsonl")
    parser.add_argument("--svg", metavar="FILE", default="loss.svg", help="the picture (default: %(default)s)")
    options = parser.parse_args(arguments)
    figures.curves(options.svg, [read_curve(run) for run in options.runs])
    print(f"{options.svg}: written")


if __name__ == "__main__":
    exit_on_user_error(main)
