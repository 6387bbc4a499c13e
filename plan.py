"""Plan a run before you pay for it: which layouts fit, how fast they are, and what limits them.

    python plan.py configs/gpt3_175b.py --gpus=1024 --device=a100-80g

It prints the layouts (tp, pp, schedule, ZeRO stage ...) that fit, the fastest first, and the first that does not. It
needs no GPU. A field on the command line keeps its value. With --tp and --pp, only the configuration's layout is
judged; with --top=N as well, the layouts with this tp and pp. `accounts/seconds.py` explains the predicted time.
"""

from errors import exit_on_user_error  # isort: skip
from options import Parser, boolean, within  # isort: skip
from dataclasses import replace

import config as configuration
from accounts import scaling, search, seconds
from accounts.devices import DEVICES

GB = 1e9
TITLES = (
    "tp cp  pp   dp schedule    v Z sp    reco  b  step,s   MFU   HFU     GB bubble      waits_for,%   tokens/s    days"
)
ROW = (
    "{tp:>2} {cp:>2} {pp:>3} {dp:>4} {schedule:<11} {chunks} {zero} {sequence_parallel!s:<5} {recompute:.4} "
    "{micro_batch_size:>2} {step_seconds:>7.4g} {mfu:>5.1%} {hfu:>5.1%} {memory:>6.1f} {bubble:>6.1%} {waits:>16} "
    "{tokens_per_second:>10,.0f} {days:>7,.1f}\n        stage {fullest_rank}: {parts} GB\n        {binds}"
)
WAITS = ("tensor parallel", "context parallel", "pipeline messages", "data parallel")
LEGEND = f"""
v: chunks of a rank. Z: ZeRO stage. b: samples of a micro-batch. GB: memory of the fullest rank, in 10^9 bytes.
bubble: share of the pipeline's time (computation, bubble, messages). days: of train_iters whole batches, or --tokens.
waits_for: percent of the step for communication of tp / cp / pp / dp that no computation hides.
Expected error of a step of a GPT on A100 and H100: {seconds.ERROR:.0%} with samples of 2,048 tokens (17 of 19
published runs), {seconds.LONG_ERROR:.0%} with more than 4,096, up to 43% below 2,048. For V100 it is unknown; one run
of Llama: 2%."""


def whole(text):
    """Return a number such as 1024 or 3e11. Raises ValueError if it has a fraction."""
    if (number := float(text)) % 1:
        raise ValueError
    return int(number)


OPTIONS = {  # type, default, help
    "gpus": (within(1, 10**6, whole), 1, "number of GPUs (1)"),
    "gpus_per_node": (within(1, 10**6, whole), None, "GPUs of a node (as usual for the device)"),
    "tokens": (within(1, 10**18, whole), None, "tokens of the whole run (those of train_iters)"),
    "top": (within(1, 10**6, whole), None, "layouts to list (10)"),
    "flops": (within(1, 1e40, whole), None, "print size and tokens of the best model for so many FLOPs"),
    "explain": (boolean, False, "print the arithmetic of the given or the best layout"),
    "as_is": (boolean, False, "judge the layout of the configuration"),
}


def entry(facts):
    """Return a layout's lines: a row of the table, the fullest rank's memory, and what binds."""
    bytes_kept, step = facts["memory_bytes"], facts["step_seconds"]
    waits = "/".join(f"{100 * facts['step_parts'][part] / step:.1f}" for part in WAITS)
    parts = ", ".join(f"{what} {size / GB:.1f}" for what, size in bytes_kept.items() if size >= 0.05 * GB)
    memory = sum(bytes_kept.values()) / GB
    return ROW.format(**facts | facts["layout"] | dict(memory=memory, waits=waits, parts=parts))


def parse(arguments):
    """Return (options, Config, names of the fields on the command line)."""
    usage = "%(prog)s [CONFIG.py] --gpus=N --device=D [--field=value ...] [options]"
    parser = Parser(prog="python plan.py", usage=usage, allow_abbrev=False)
    parser.epilog = "python train.py --help lists the fields."
    for name, (kind, default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--device", default="a100-80g", choices=DEVICES, help="the GPU (a100-80g)")
    options, rest = parser.parse_known_args(arguments)
    fields = {word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")}
    return options, configuration.load(rest), fields


def plan(options, config, device, fields):
    """Print the layouts that suit the options, or the given one."""
    gpus, chosen, lines = options.gpus, [config], []
    search.check_search(config, options.tokens)
    if not options.as_is and (options.top or not {"tp", "pp"} <= fields):
        layouts = search.rank_all(config, gpus, device, fields)
        fit, rest = ([f["config"] for f in layouts if f["fits"] == fits] for fits in (True, False))
        # if no layout was found, the check of the simplest one names the mistake
        plain = {name: value for name, value in search.PLAIN.items() if name not in fields}
        chosen = [*fit[: options.top or 10], *rest[:1]] or [replace(config, **plain)]
        lines = [f"{len(layouts):,} layouts of {gpus:,} {device.name}, {len(fit):,} fit"]
    configuration.check(chosen[0], gpus)
    facts = [search.facts_of(c, gpus, device, options.tokens) for c in (chosen[:1] if options.explain else chosen)]
    facts.sort(key=search.sort_key)
    if options.explain:
        for name, formula, value in [*facts[0]["arithmetic"], ("step", "sum", facts[0]["step_seconds"])]:
            print(f"{name:<37} {formula:<63} {value:>12.5g}")
    print(*lines, TITLES, *map(entry, facts), LEGEND, sep="\n")


def main(arguments=None):
    """Run the command line."""
    options, config, fields = parse(arguments)
    device = DEVICES[options.device]
    device = device._replace(per_node=options.gpus_per_node or device.per_node)
    if options.flops:
        scaling.main(options.flops, options.gpus, device)
    else:
        plan(options, config, device, fields)


if __name__ == "__main__":
    exit_on_user_error(main)
