"""Plan a run before you pay for it: which layouts fit, how fast they are, and what limits them.

    python plan.py configs/gpt3_175b.py --gpus=1024 --device=a100-80g

This command prints the layouts (tp, pp, schedule, ZeRO stage ...) that fit, the fastest first, and those that nearly
fit. A field on the command line keeps its value. With --tp and --pp, plan.py judges only the configuration's layout.
With --top=N as well, it lists the layouts with this tp and pp. plan.py needs no GPU. `accounts/seconds.py` explains the
predicted time. `accounts/devices.py` has the devices.

    --explain           print the arithmetic of one layout, line by line
    --json              print a list of layouts, or one object if only one layout is judged
    --svg=FILE          draw memory and time of the best layouts
    --as_is             judge the configuration as it is (`python train.py CONFIG --plan --world=N --device=D`)
    --dry_run --rank=R  run the real program of one rank on tensors without data, beside the prediction
    --sweep             run a few steps of each layout on this machine, beside the prediction
    --calibrate         measure this machine for --device=cpu
    --flops=3e24        print the best size and number of tokens for a budget (scaling law), and the days of a cluster
    --code=NAME         predict another program, to compare with its paper: megatron-2021 or megatron-2022
"""

import functools
import json
import sys
import textwrap
from dataclasses import fields

import config as configuration
import flags
from accounts import devices, explain, figures, layouts, scaling, seconds
from errors import Parser, UserError, exit_on_user_error

GB = 1e9
ROW = "{:>2} {:>3} {:>4} {:<11} {:>2} {:>1} {:>2} {:<4} {:>2} {:>8} {:>5} {:>5} {:>6} {:>6} {:>14} {:>10} {:>8}"
TITLES = "tp pp dp schedule v Z sp reco b step,s MFU HFU GB bubble waits_for,% tokens/s days"


def row(facts):
    """Return a layout's line in the text of `table`."""
    c, step = facts["layout"], facts["step_seconds"]
    exposed = "/".join(f"{facts['exposed_seconds'][axis] / step:.1%}"[:-1] for axis in ("tp", "pp", "dp"))
    return ROW.format(
        c["tp"], c["pp"], c["dp"], c["schedule"], c["chunks"], c["zero"], "sp" if c["sequence_parallel"] else "-",
        c["recompute"], c["micro_batch_size"], f"{step:.4g}", f"{facts['mfu']:.1%}", f"{facts['hfu']:.1%}",
        f"{sum(facts['memory_bytes'].values()) / GB:.1f}", f"{facts['bubble']:.1%}", exposed,
        f"{facts['tokens_per_second']:,.0f}", f"{facts['days']:,.1f}",
    )  # fmt: skip


def memory_line(facts):
    """Return the memory of the fullest rank by part, and the sentence of `layouts.binds`."""
    parts = ", ".join(f"{what} {size / GB:.1f}" for what, size in facts["memory_bytes"].items() if size >= 0.05 * GB)
    text = f"stage {facts['fullest_rank']}: {parts} GB"
    indent = dict(initial_indent=" " * 8, subsequent_indent=" " * 17, width=120)
    return f"{textwrap.fill(text, **indent)}\n        {facts['binds']}"


def table(found, top):
    """Return the best `top` layouts that fit, and a few that nearly fit, as text."""
    fit, rest = [f for f in found if f["fits"]], [f for f in found if not f["fits"]]
    lines = [f"{len(found):,} layouts, {len(fit):,} fit", ROW.format(*TITLES.split())]
    for facts in fit[:top]:
        lines += [row(facts), memory_line(facts)]
    if rest:
        lines += ["", "nearly fit:"]
    for facts in rest[: max(1, top // 3)]:
        lines += [row(facts), memory_line(facts)]
    lines.append("\nv: chunks of a rank. Z: ZeRO stage. b: samples of a micro-batch. GB: memory of the fullest rank.")
    lines.append("waits_for: percent of the step for communication of tp / pp / dp that no computation hides.")
    return "\n".join(lines)


def public(facts):
    """Return a layout's facts without its Config, which JSON cannot have."""
    return {name: value for name, value in facts.items() if name != "config"}


def parse(arguments):
    """Return (options, Config, names of the given fields)."""
    parser = Parser(
        prog="python plan.py",
        usage="%(prog)s [CONFIG.py] --gpus=N --device=D [--field=value ...] [options]",
        epilog="python train.py --help lists the fields.",
        allow_abbrev=False,
    )
    known = ", ".join([*devices.DEVICES, "cpu"])
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs")
    parser.add_argument("--device", metavar="D", help=f"one of {known}")
    parser.add_argument("--gpus_per_node", type=int, metavar="N", help="GPUs of a node (as usual for the device)")
    parser.add_argument("--rings", type=int, metavar="N", help="network cards that one collective uses at once (1)")
    parser.add_argument("--tokens", type=float, metavar="T", help="tokens of the whole run (20 for each parameter)")
    parser.add_argument("--top", type=int, metavar="N", help="layouts to list (10)")
    parser.add_argument("--code", default="ours", choices=seconds.CODES, help="the program to predict (ours)")
    parser.add_argument("--explain", action="store_true", help="print the arithmetic of the given or the best layout")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", metavar="FILE", help="draw memory and time of the best layouts")
    parser.add_argument("--dry_run", action="store_true", help="run a step of one rank without a GPU and without data")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank of --dry_run (0)")
    parser.add_argument("--sweep", action="store_true", help="run the layouts on this machine and compare")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="measured steps of a layout in --sweep (10)")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine for --device=cpu")
    parser.add_argument("--flops", type=float, metavar="C", help="size and tokens of the best model for C FLOPs")
    parser.add_argument("--mfu", type=float, default=0.4, metavar="X", help="share of the peak in --flops (0.4)")
    parser.add_argument("--as_is", action="store_true", help="judge the layout of the configuration")
    options, rest = parser.parse_known_args(arguments)
    _, pairs = flags.split(rest, {f.name for f in fields(configuration.Config) if f.type is bool})
    return options, configuration.load(rest), {flags.plain(name) for name, _ in pairs}


def check(options):
    """Return the Device of the options. Raises UserError if an option is wrong."""
    if not options.device:
        raise UserError(f"--device: is missing; should be one of {', '.join([*devices.DEVICES, 'cpu'])}")
    if not options.gpus:
        raise UserError("--gpus: the number of GPUs is missing, such as --gpus=64")
    for name in ("gpus", "gpus_per_node", "rings", "top", "tokens", "steps"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e18:
            raise UserError(f"--{name}={value}: should be positive")
    if options.gpus > 10**6:
        raise UserError(f"--gpus={options.gpus}: should be at most 1,000,000")
    device = devices.device(options.device, options.gpus)
    given = {"per_node": options.gpus_per_node, "rings": options.rings}
    return device._replace(**{name: value for name, value in given.items() if value})


def scaling_law(options):
    """Print the tables of --flops, with the user's cluster if --gpus and --device are given."""
    cluster = None
    if options.gpus or options.device:
        device = check(options)
        peak = device.peak(device.dtype) / 1e12
        cluster = scaling.Machine("your cluster", ((options.gpus, device.name, peak),))
    scaling.main(options.flops, cluster, options.mfu)


def run_here(options, config, given):
    """Run --calibrate, --dry_run or --sweep. The imports are inside because they load the whole program."""
    from accounts import calibration, dry_run, sweep

    if options.calibrate:
        calibration.main()
        return
    if not options.device and (options.dry_run or not devices.CALIBRATION.exists()):
        options.device = "a100-80g"  # only for `check`: nothing is predicted
        predict = None
    else:
        options.device = options.device or "cpu"
        predict = functools.partial(predicted, options)
    check(options)
    if options.dry_run:
        dry_run.main(config, options.gpus, options.rank)
        return
    if not predict:
        print("without predictions: python plan.py --calibrate measures this machine")
    sweep.main(config, options.gpus, predict, given, options.steps)


def predicted(options, config, gpus):
    """Return the predicted seconds of a step of a Config."""
    return layouts.judge(config, gpus, check(options), all_ranks=False)["step_seconds"]


def main(arguments=None):
    """Run the command line. Raises UserError for a mistake of the user."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
    options, config, given = parse(arguments)
    if options.flops is not None:
        scaling_law(options)
        return
    if options.calibrate or options.dry_run or options.sweep:
        run_here(options, config, given)
        return
    device = check(options)
    choose = {"code": options.code, "tokens": options.tokens}
    if options.as_is or ({"tp", "pp"} <= given and not options.top):
        configuration.check(config, options.gpus)
        found, best = None, layouts.judge(config, options.gpus, device, **choose) | {"config": config}
    else:
        found = layouts.rank_all(config, options.gpus, device, given, **choose)
        if not found:
            configuration.check(config, options.gpus)  # names the mistake, if there is one
            raise UserError(f"--gpus={options.gpus}: no layout suits the batch, the heads and this number of GPUs")
        shown = [f for f in found if f["fits"]][: options.top or 10] + [f for f in found if not f["fits"]][:3]
        for facts in shown:
            facts |= layouts.judge(facts["config"], options.gpus, device, **choose)
        best = found[0]
    if options.svg:
        figures.write(options.svg, [public(facts) for facts in (shown if found else [best]) if facts["fits"]])
    if options.json:
        print(json.dumps(public(best) if found is None else [public(facts) for facts in shown], indent=1))
    elif options.explain:
        print(explain.text(best["config"], options.gpus, device, best, options.code))
    elif found is None:
        print("\n".join([ROW.format(*TITLES.split()), row(best), memory_line(best)]))
    else:
        print(table(found, options.top or 10))


if __name__ == "__main__":
    exit_on_user_error(main)
