"""Draw the losses of one or several runs.

    python -m accounts.curve out/tiny out/tiny_2x2 --svg=loss.svg

A line shows the training loss: the mean of each log line (`lm_loss`), at its last iteration. Circles show the
validation loss. A loss of nan or inf leaves a gap.
"""

from pathlib import Path
from typing import NamedTuple

from accounts.metrics import read_metrics
from errors import UserError, exit_on_user_error, reading
from options import Parser


class Curve(NamedTuple):
    """The losses of one run, as lists of (iteration, loss)."""

    name: str
    training: list
    validation: list


def read_curve(path):
    """Return a Curve. path: an out_dir, or a file like its metrics.jsonl. Raises UserError."""
    file = Path(path, "metrics.jsonl") if Path(path).is_dir() else Path(path)
    with reading(file):
        rows = read_metrics(file).values()
        training = [(row["iteration"], float(row["lm_loss"])) for row in rows]
        validation = [(row["iteration"], float(row["validation_loss"])) for row in rows if "validation_loss" in row]
        if not training:
            raise ValueError("has no loss to draw; train.py writes a loss every log_interval iterations")
    return Curve(Path(path).resolve().name.removesuffix(".jsonl"), training, validation)


def draw(path, runs):
    """Draw Curves as SVG. Raises UserError."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--svg={path}: a picture needs matplotlib: pip install matplotlib") from None
    picture = Figure(figsize=(9, 4), layout="constrained")
    axes = picture.subplots()
    for i, (name, training, validation) in enumerate(runs):  # dashes show equal lines
        (line,) = axes.plot(*zip(*training, strict=True), label=name, dashes=(8 / i, 8) if i else ())
        if validation:
            axes.plot(*zip(*validation, strict=True), "o", color=line.get_color(), mfc="none", ms=6 + 4 * i)
    axes.set(xlabel="iterations", ylabel="loss: training (line), validation (circles)")
    axes.legend()
    with reading(f"--svg={path}"), matplotlib.rc_context({"svg.fonttype": "none"}):
        picture.savefig(path, format="svg")


def main(arguments=None):
    """Run the command line."""
    parser = Parser(prog="python -m accounts.curve", description="Draws the losses of training runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an out_dir, or a file like its metrics.jsonl")
    parser.add_argument("--svg", metavar="FILE", default="loss.svg", help="the picture (default: %(default)s)")
    options = parser.parse_args(arguments)
    draw(options.svg, [read_curve(run) for run in options.runs])
    print(f"{options.svg}: written")


if __name__ == "__main__":
    exit_on_user_error(main)
