"""Predicts who sends what in one step, and draws it. This needs no process and no tensor.

    python -m accounts.traffic configs/tiny.py --ranks=8 --tp=2 --pp=2 --zero=2 --svg=traffic.svg

prints the tables of `train.py --ledger` with predicted numbers, for each pipeline rank (dp rank 0, tp rank 0). --svg
also draws the ranks and who sends to whom (slide "3-D Parallelism"), above the table of bytes (slide "分散並列学習").
dtype=auto is predicted for a CPU (fp32). Any other dtype is predicted for a GPU.
"""

from typing import NamedTuple

import torch

import config as configuration
from accounts import figures, ledger, memory, report
from errors import Parser, UserError, exit_on_user_error
from model import parameter_table
from operations import DTYPES, resolved_dtype
from parallel import schedules
from parallel.layout import Layout


class Prediction(NamedTuple):
    """The prediction of one step of a configuration."""

    layout: Layout
    schedule: schedules.Schedule
    sizes: memory.Sizes
    sent: list  # sent[pipeline rank]: `ledger.predict` of data rank 0
    often: dict  # `ledger.how_often` of all pipeline ranks


def predict(config, ranks):
    """Return the Prediction of `config` on `ranks` ranks. Raises UserError."""
    if ranks < 1:
        raise UserError(f"--ranks={ranks}: should be positive")
    dp = configuration.check(config, ranks)
    m = configuration.micro_batches(config, config.global_batch_size, dp)
    schedule = schedules.build_for(config, dp, m * config.updates_per_call)
    layout = Layout(config, dp, parameter_table(config), schedule)
    item = DTYPES[resolved_dtype(config, torch.device("cpu"))].itemsize
    sizes = memory.sizes(config, item, max(item, 4), on_cpu=config.dtype == "auto")
    sent = [ledger.predict(layout, schedule, stage, 0, item, sizes.wide) for stage in range(config.pp)]
    often = {key: per for stage in range(config.pp) for key, per in ledger.how_often(layout, schedule, stage).items()}
    return Prediction(layout, schedule, sizes, sent, often)


def tables(p):
    """Return as text the tables of bytes sent and of bytes kept, for each pipeline rank."""
    texts = []
    for stage, sent in enumerate(p.sent):
        who = f"rank {stage * p.layout.config.tp}, predicted"
        kept = memory.predict(p.layout, p.schedule, stage, p.sizes)
        texts.append(report.sent_table(who, p.often, {"bytes": sent}))
        texts.append(report.kept_table(who, p.layout, stage, {"bytes": kept}))
    return "\n\n".join(texts)


def main(arguments=None):
    """Print the tables, and write the picture if the user asks for it."""
    usage = "%(prog)s [CONFIG.py] --ranks=N [--field=value ...] [--svg=FILE]"
    parser = Parser(prog="python -m accounts.traffic", usage=usage, allow_abbrev=False)
    parser.epilog = "python train.py --help lists the fields."
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="number of processes")
    parser.add_argument("--svg", metavar="FILE", help="draw who sends what to whom")
    options, fields = parser.parse_known_args(arguments)
    prediction = predict(configuration.load(fields), options.ranks)
    print(tables(prediction))
    if options.svg:
        figures.traffic(options.svg, prediction)


if __name__ == "__main__":
    exit_on_user_error(main)
