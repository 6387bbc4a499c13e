"""Predict and draw who sends what in one step, without processes and tensors.

    python -m accounts.traffic configs/tiny.py --ranks=8 --tp=2 --pp=2 --zero=2 --svg=traffic.svg

prints the predicted tables of `train.py --ledger` for each pipeline rank (dp rank 0, tp rank 0). --svg also draws who
sends to whom (slide "3-D Parallelism"), above the table (slide "分散並列学習"). dtype=auto is a CPU's fp32; any other
dtype is predicted for a GPU.
"""

import contextlib
import itertools
import os
from dataclasses import replace
from typing import NamedTuple

import torch

import config as configuration
from accounts import figures, ledger, memory, report
from errors import Parser, UserError, exit_on_user_error
from model import parameter_table
from operations import DTYPES, resolved_dtype
from parallel import schedules
from parallel.layout import Layout

CPU = torch.device("cpu")


class Prediction(NamedTuple):
    layout: Layout
    schedule: schedules.Schedule
    sizes: memory.Sizes
    sent: list  # sent[pipeline rank]: `ledger.predict_sent` of data rank 0
    kept: list  # kept[pipeline rank]: `memory.predict_kept`


def predict_step(config, ranks, device=CPU):
    """Return the Prediction of `config` on `ranks` ranks. Raises UserError."""
    if ranks < 1:
        raise UserError(f"--ranks={ranks}: should be positive")
    dp = configuration.check(config, ranks)
    m = schedules.micro_batches(config, config.global_batch_size, dp)
    schedule = schedules.build_for(config, dp, m * config.updates_per_call)
    layout = Layout(config, dp, parameter_table(config), schedule)
    item = DTYPES[resolved_dtype(config, device)].itemsize
    sizes = memory.sizes(config, item, max(item, 4), on_cpu=device.type == "cpu" and config.dtype == "auto")
    sent = [ledger.predict_sent(layout, schedule, stage, 0, item, sizes.wide) for stage in range(config.pp)]
    kept = [memory.predict_kept(layout, schedule, stage, sizes) for stage in range(config.pp)]
    return Prediction(layout, schedule, sizes, sent, kept)


def predicted_tables(p):
    texts, c = [], p.layout.config
    apart = c.tp * (p.layout.dp if c.order == "pp-dp-tp" else c.cp)  # ranks from a stage to the next one
    for stage, (sent, kept) in enumerate(zip(p.sent, p.kept, strict=True)):
        who = f"rank {stage * apart}, predicted"
        texts.append(report.sent_table(who, p.layout.stage, {"bytes": sent}))
        texts.append(report.kept_table(who, p.layout, stage, {"bytes": kept}))
    return "\n\n".join(texts)


def needed(c, ranks, device):
    """Return the bytes that the fullest rank needs at least on its device."""
    dp = configuration.check(c, ranks)
    if c.schedule not in ("gpipe", "chimera"):  # in the others more micro-batches need no more memory
        samples = min(c.global_batch_size, 5 * c.pp * c.micro_batch_size * dp // c.cp)
        c = replace(c, global_batch_size=samples, rampup_batch_size="")
    kept = predict_step(c, ranks, device).kept
    if c.eval_only:
        return max(table["parameters"] for table in kept)
    on_host = ("master weights", "moments") if c.offload and device.type == "cuda" else ()
    return max(sum(size for what, size in table.items() if what not in on_host) for table in kept)


def refuse_too_large(c, ranks, device):
    """Raise UserError if this rank has too little memory for the fullest rank."""
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory
    if (need := needed(c, ranks, device)) > have:
        what = f"num_layers={c.num_layers}, hidden_size={c.hidden_size}, micro_batch_size={c.micro_batch_size}"
        sizes = f"needs at least {need / 1e9:,.1f} GB of memory; this rank has {have / 1e9:,.1f} GB"
        raise UserError(f"{what}: {sizes}; {remedy(c, ranks, device, have)}; python plan.py lists what fits")


def remedy(c, ranks, device, have):
    """Return the smallest change that suffices, as text."""
    better = dict(zero=range(c.zero + 1, 4), recompute=["full"], tp=[2, 4, 8], offload=[True] * (device.type == "cuda"))
    for names in itertools.chain.from_iterable(itertools.combinations(better, n) for n in range(1, 5)):
        for values in itertools.product(*map(better.get, names)):
            fields = dict(zip(names, values, strict=True))
            with contextlib.suppress(UserError):  # this layout is impossible
                if needed(replace(c, **fields), ranks, device) <= 0.9 * have:  # the rest is for what is not predicted
                    return f"set {' '.join(f'--{name}={value}' for name, value in fields.items())}"
    return "--zero, --recompute, --tp and --offload do not suffice: use more or larger devices, or --pp"


def main(arguments=None):
    usage = "%(prog)s [CONFIG.py] --ranks=N [--field=value ...] [--svg=FILE]"
    parser = Parser(prog="python -m accounts.traffic", usage=usage, allow_abbrev=False)
    parser.epilog = "python train.py --help lists the fields."
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="number of processes")
    parser.add_argument("--svg", metavar="FILE", help="draw who sends what to whom")
    options, fields = parser.parse_known_args(arguments)
    prediction = predict_step(configuration.load(fields), options.ranks)
    print(predicted_tables(prediction))
    if options.svg:
        figures.traffic(options.svg, prediction)


if __name__ == "__main__":
    exit_on_user_error(main)
