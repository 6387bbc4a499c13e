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
    --flops=3e24        print the best size and number of tokens for a budget (scaling law), and the days of a cluster
    --code=NAME         predict another program, to compare with its paper: megatron-2021 or megatron-2022

`python -m bench sweep` runs each layout for a few steps on this machine and compares their times.
"""

import json
import sys
import textwrap
from dataclasses import replace

import config as configuration
from accounts import figures, layouts, scaling, seconds
from accounts.devices import DEVICES
from errors import Parser, UserError, exit_on_user_error

GB = 1e9
ROW = "{:>2} {:>3} {:>4} {:<11} {:>2} {:>1} {:>2} {:<4} {:>2} {:>8} {:>5} {:>5} {:>6} {:>6} {:>14} {:>10} {:>8}"
TITLES = ROW.format(*"tp pp dp schedule v Z sp reco b step,s MFU HFU GB bubble waits_for,% tokens/s days".split())
LEGEND = f"""
v: chunks of a rank. Z: ZeRO stage. b: samples of a micro-batch. GB: memory of the fullest rank.
waits_for: percent of the step for communication of tp / pp / dp that no computation hides.
Expected error of a step: {seconds.ERROR:.0%} for A100 and H100 (nine of ten published runs), unknown for V100."""


OPTIONS = {
    "gpus": (int, "N", "number of GPUs"),
    "device": (str, "D", f"one of {', '.join(DEVICES)}"),
    "gpus_per_node": (int, "N", "GPUs of a node (as usual for the device)"),
    "rings": (int, "N", "network cards of one collective (one for each of its GPUs in a node)"),
    "tokens": (float, "T", "tokens of the whole run (20 for each parameter)"),
    "top": (int, "N", "layouts to list (10)"),
    "svg": (str, "FILE", "draw memory and time of the best layouts"),
    "rank": (int, "R", "the rank of --dry_run (0)"),
    "flops": (float, "C", "size and tokens of the best model for C FLOPs"),
}
FLAGS = {
    "explain": "print the arithmetic of the given or the best layout",
    "json": "print JSON",
    "dry_run": "run a step of one rank without a GPU and without data",
    "as_is": "judge the layout of the configuration",
}


def entry(facts):
    """Return the lines of a layout: a row of `table`, the memory of the fullest rank by part, and what binds."""
    c, step, kept = facts["layout"], facts["step_seconds"], facts["memory_bytes"]
    exposed = "/".join(f"{facts['exposed_seconds'][axis] / step:.1%}"[:-1] for axis in ("tp", "pp", "dp"))
    row = ROW.format(
        c["tp"], c["pp"], c["dp"], c["schedule"], c["chunks"], c["zero"], "sp" if c["sequence_parallel"] else "-",
        c["recompute"], c["micro_batch_size"], f"{step:.4g}", f"{facts['mfu']:.1%}", f"{facts['hfu']:.1%}",
        f"{sum(kept.values()) / GB:.1f}", f"{facts['bubble']:.1%}", exposed,
        f"{facts['tokens_per_second']:,.0f}", f"{facts['days']:,.1f}",
    )  # fmt: skip
    parts = ", ".join(f"{what} {size / GB:.1f}" for what, size in kept.items() if size >= 0.05 * GB)
    text = f"stage {facts['fullest_rank']}: {parts} GB"
    indent = dict(initial_indent=" " * 8, subsequent_indent=" " * 17, width=120)
    return f"{row}\n{textwrap.fill(text, **indent)}\n        {facts['binds']}"


def table(found, judged):
    """Return as text how many layouts were found, those of them that fit, and a few that nearly fit."""
    fit, rest = [f for f in judged if f["fits"]], [f for f in judged if not f["fits"]]
    count = [f"{len(found):,} layouts, {sum(f['fits'] for f in found):,} fit"] * (len(found) > 1)
    nearly = ["\nnearly fit:"] * bool(rest)
    return "\n".join([*count, TITLES, *map(entry, fit), *nearly, *map(entry, rest), LEGEND])


def explain(name, formula, value, unit):
    """Print a line of --explain."""
    print(f"{name:<37} {formula:<51} {value:>15,.5g} {unit}")


def parse(arguments):
    """Return (options, Config, names of the given fields)."""
    usage = "%(prog)s [CONFIG.py] --gpus=N --device=D [--field=value ...] [options]"
    parser = Parser(prog="python plan.py", usage=usage, allow_abbrev=False)
    parser.epilog = "python train.py --help lists the fields."
    for name, (kind, metavar, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    for name, text in FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--code", default="ours", choices=seconds.CODES, help="the program to predict (ours)")
    options, rest = parser.parse_known_args(arguments)
    for name, most in dict(gpus=1e6, gpus_per_node=1e6, rings=1e6, top=1e6, tokens=1e18).items():
        value = getattr(options, name)
        missing = value is None and name == "gpus" and (options.flops is None or options.device)
        if missing or (value is not None and not 0 < value <= most):
            raise UserError(f"--{name}={value}: should be between 1 and {most:,.0f}")
    given = {word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")}
    return options, configuration.load(rest), given


def device_of(options):
    """Return the Device of the options. Raises UserError."""
    if options.device not in DEVICES:
        raise UserError(f"--device={options.device}: should be one of {', '.join(DEVICES)}")
    given = {"per_node": options.gpus_per_node, "rings": options.rings}
    return DEVICES[options.device]._replace(**{name: value for name, value in given.items() if value})


def find(options, config, device, given, **choose):
    """Return the facts of all layouts in their order. Raises UserError if there is no layout."""
    if options.as_is or ({"tp", "pp"} <= given and not options.top):
        configuration.check(config, options.gpus)
        return [{"config": config, "fits": True}]
    if found := layouts.rank_all(config, options.gpus, device, given, **choose):
        return found
    simplest = {"tp": 1, "pp": 1, "micro_batch_size": 1, "schedule": "1f1b", "chunks": 1}
    simplest = {name: value for name, value in simplest.items() if name not in given}
    configuration.check(replace(config, **simplest), options.gpus)  # names the mistake, if there is one
    raise UserError(f"--gpus={options.gpus}: no layout suits the batch, the heads and this number of GPUs")


def plan(options, config, given):
    """Print the layouts that suit the options, or the given one."""
    device, choose, top = device_of(options), dict(code=options.code, tokens=options.tokens), options.top or 10
    found = find(options, config, device, given, **choose)
    fit, rest = [f["config"] for f in found if f["fits"]], [f["config"] for f in found if not f["fits"]]
    chosen = [*fit[:top], *rest[: max(1, top // 3)]]
    judged = [(layouts.judge(c, options.gpus, device, **choose), c) for c in chosen]
    judged.sort(key=lambda pair: layouts.order(pair[0]))
    shown = [facts for facts, _ in judged]
    if options.svg:
        figures.ranking(options.svg, [facts for facts in shown if facts["fits"]])
    if options.json:
        print(json.dumps(shown if len(found) > 1 else shown[0], indent=1))
    elif options.explain:
        layouts.judge(judged[0][1], options.gpus, device, **choose, say=explain)
        print(f"\n{TITLES}\n{entry(shown[0])}")
    else:
        print(table(found, shown))


def main(arguments=None):
    """Run the command line. Raises UserError for a mistake of the user."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
    options, config, given = parse(arguments)
    if options.flops is not None:
        scaling.main(options.flops, options.device and (options.gpus, device_of(options)))
    elif options.dry_run:
        from accounts import dry_run  # loads the whole program

        dry_run.main(config, options.gpus, options.rank or 0)
    else:
        plan(options, config, given)


if __name__ == "__main__":
    exit_on_user_error(main)
