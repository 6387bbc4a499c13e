"""Predict who sends what in one step, without processes and tensors.

    python -m accounts.traffic configs/tiny.py --ranks=8 --tp=2 --pp=2 --zero=2

prints who sends to whom (slide "3-D Parallelism"), and the predicted tables of `train.py --ledger` (slide
"分散並列学習") for each pipeline rank (dp rank 0, tp rank 0). dtype=auto is a CPU's fp32; any other dtype is predicted
for a GPU.
"""

from typing import NamedTuple

import torch

import config as configuration
from accounts import ledger, memory, zero_states
from errors import UserError, exit_on_user_error
from operations import DTYPES, resolved_dtype
from options import Parser
from parallel.layout import Layout, build_for, number_of_micro_batches
from parallel.units import unit_specs


class Prediction(NamedTuple):
    """A step of one rank of each stage: data rank 0, tp rank 0."""

    layout: Layout
    sizes: zero_states.Sizes
    sent: list  # sent[pipeline rank]: `ledger.predict_sent` of data rank 0
    bytes_kept: list  # bytes_kept[pipeline rank]: `memory.predict_kept`


def predict_step(config, ranks, device=None):
    """Return the Prediction of `config` on `ranks` ranks. Raises UserError.

    device: if it is None, dtype decides, as said at the top.
    """
    device = device or torch.device("cpu" if config.dtype == "auto" else "cuda")
    dp = configuration.check(config, ranks)
    m = number_of_micro_batches(config, config.global_batch_size, dp)
    schedule = build_for(config, m)
    layout = Layout(config, dp, unit_specs(config), schedule)
    item = DTYPES[resolved_dtype(config, device)].itemsize
    sizes = zero_states.sizes(config, item, max(item, 4), on_cpu=device.type == "cpu")
    sent = [ledger.predict_sent(layout, schedule, stage, 0, item, sizes.wide) for stage in range(config.pp)]
    bytes_kept = [memory.predict_kept(layout, schedule, stage, sizes) for stage in range(config.pp)]
    return Prediction(layout, sizes, sent, bytes_kept)


def predicted_tables(p):
    """Return as text what the first rank of each stage sends and keeps."""
    from accounts import report  # a run needs only `predict_step`

    texts, ranks = [], ledger.ranks_of(p.layout)
    for stage, (sent, bytes_kept) in enumerate(zip(p.sent, p.bytes_kept, strict=True)):
        who = f"rank {ranks[0, stage, 0, 0]}, predicted"
        texts.append(report.sent_table(who, p.layout, {"bytes": sent}))
        texts.append(report.kept_table(who, p.layout, stage, {"bytes": bytes_kept}))
    return "\n\n".join(texts)


def groups(layout):
    """Return as text the ranks that send to each other, over each axis."""
    ranks, copies, shards = ledger.ranks_of(layout), layout.config.zero_copies, layout.shards
    axes = enumerate(("dp", "pp", "cp", "tp"))
    members = {axis: ranks.swapaxes(i, 3).reshape(-1, ranks.shape[i]) for i, axis in axes}
    data = ranks.transpose(1, 3, 0, 2)  # [pp, tp, dp, cp]
    if layout.config.cp > 1:
        members["data"] = data.reshape(-1, layout.data_ranks)
    if copies > 1:  # as `Mesh.cut_data`
        members["shards"] = data.reshape(-1, shards)
        members["copies"] = data.reshape(-1, copies, shards).swapaxes(1, 2).reshape(-1, copies)
    several = {axis: sorted(groups.tolist()) for axis, groups in members.items() if groups.shape[1] > 1}
    lines = {axis: " | ".join(" ".join(map(str, group)) for group in groups) for axis, groups in several.items()}
    return "\n".join(f"{axis}: ranks {line}" for axis, line in lines.items())


def parsed(program, arguments=None):
    """Return (Config, number of ranks) of a command line. A field of the configuration is a word, too."""
    usage = "%(prog)s [CONFIG.py] --ranks=N [--field=value ...]"
    parser = Parser(prog=f"python -m {program}", usage=usage, allow_abbrev=False)
    parser.epilog = "python train.py --help lists the fields."
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="number of processes")
    options, fields = parser.parse_known_args(arguments)
    if options.ranks < 1:
        raise UserError(f"--ranks={options.ranks}: should be positive")
    return configuration.load(fields), options.ranks


def main(arguments=None):
    """Print the groups and the tables of each stage."""
    prediction = predict_step(*parsed("accounts.traffic", arguments))
    print(groups(prediction.layout), predicted_tables(prediction), sep="\n\n")


if __name__ == "__main__":
    exit_on_user_error(main)
