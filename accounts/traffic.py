"""Predicts who sends what in one step, and draws it. This needs no process and no tensor.

    python -m accounts.traffic configs/tiny.py --ranks=8 --tp=2 --pp=2 --zero=2 --svg=traffic.svg

prints the tables of `train.py --ledger` with predicted numbers, for each pipeline rank (dp rank 0, tp rank 0). With
--svg it also draws a picture with elements of two slides:

    grid      a row is a data replica, a column is a pipeline stage, a box is a rank; the boxes of a cell are its
              tensor parallel ranks (slide "3-D Parallelism")
    arrows    connect ranks that send to each other; the colour shows the axis
    table     what is sent, the operation, how often, and the bytes (slide "分散並列学習")

dtype=auto is predicted for a CPU (fp32). Any other dtype is predicted for a GPU.
"""

import itertools
from typing import NamedTuple

import torch

import config as configuration
from accounts import ledger, memory, report
from accounts.draw import GREY, svg_text
from errors import Parser, UserError, exit_on_user_error, explained, writable
from model import parameter_table
from operations import DTYPES, resolved_dtype
from parallel import schedules
from parallel.layout import Layout
from parallel.pipeline import SENT

COLOURS = {"tp": "#c07a14", "pp": "#2f6fb7", "dp": "#1f9655", "holders": "#9a5fc0", "world": GREY}
WIDTH, LEFT, TOP = 900, 90, 150  # the picture's width; x and y of the first cell's upper left corner
CELL, BESIDE, BELOW, BETWEEN = 46, 46, 64, 20  # height of a cell; gaps beside a cell, below a cell, between two boxes


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
        m = p.schedule.microbatches // schedules.updates(p.schedule)
        line = report.zeros_line(sent, p.layout, stage, p.sizes.item, p.sizes.wide, m)
        texts.append(f"{report.sent_table(who, sent, p.often)}\n{line}")
        kept = memory.predict(p.layout, p.schedule, stage, p.sizes)
        texts.append(report.kept_table(who, kept, p.layout.stored(stage), p.layout.padding(stage)))
    return "\n\n".join(texts)


# --- the picture ------------------------------------------------------------------------------------------------------


def svg(p):
    """Return the picture as SVG with a transparent background."""
    c, dp = p.layout.config, p.layout.dp
    title = f"Who sends what in one step: dp={dp} pp={c.pp} tp={c.tp}"
    fields = f"schedule={c.schedule} zero={c.zero} sequence_parallel={c.sequence_parallel} recompute={c.recompute}"
    m = p.schedule.microbatches // schedules.updates(p.schedule)
    numbers = f"{m} micro-batches on each data rank; {p.sizes.item} bytes per parameter"
    reading = "Box: rank. Row: data rank (dp). Column: pipeline stage (pp). Boxes of one cell: tensor ranks (tp)."
    arrows = "Green and orange arrows join ranks, blue and violet arrows join cells. The table below names their axes."
    parts = [text(10, 24, title, 18, weight="bold"), text(10, 48, f"{fields}; {numbers}")]
    parts += [text(10, 72, reading), text(10, 90, arrows)]
    stages, replicas, ranks = shown(c.pp), shown(dp), shown(c.tp)
    width = min(380, (WIDTH - LEFT - 10 + BESIDE) / len(stages) - BESIDE)
    lefts = [LEFT + i * (width + BESIDE) for i in range(len(stages))]
    for x, stage in zip(lefts, stages, strict=True):
        if stage is not None:
            parts.append(text(x, TOP - 26, f"pipeline stage {stage}", 14, weight="bold"))
            parts.append(text(x, TOP - 9, units(p.layout, stage), min(12, 1.8 * width / len(units(p.layout, stage)))))
    for row, replica in enumerate(replicas):
        y = TOP + row * (CELL + BELOW)
        parts.append(text(10, y + 28, "..." if replica is None else f"data rank {replica}"))
        for x, stage in zip(lefts, stages, strict=True):
            first = None if None in (stage, replica) else (replica * c.pp + stage) * c.tp
            parts += cell(x, y, width, first, ranks, row > 0)
        parts += between_stages(p, stages, lefts, width, y)
    listed, bottom = table(p, [stage for stage in stages if stage is not None], y + CELL + BELOW + 14)
    tip = "viewBox='0 0 8 8' refX='7' refY='4' markerWidth='4' markerHeight='4' orient='auto-start-reverse'"
    tips = [f"<marker id='{axis}' {tip}><path d='M0 0L8 4L0 8z' fill='{COLOURS[axis]}'/></marker>" for axis in COLOURS]
    view, font = f"0 0 {WIDTH} {bottom}", "Helvetica, Arial, sans-serif"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='{view}' font-family='{font}'><title>{title}</title>"
    return "\n".join([head, "<defs>", *tips, "</defs>", *parts, *listed, "</svg>", ""])


def shown(count):
    """Return the ranks of an axis that the picture shows. None means several ranks that it leaves out."""
    return list(range(count)) if count <= 4 else [0, 1, None, count - 1]


def units(layout, stage):
    """Return a stage's units as text: "embedding to block 1", or for several chunks "block 0, ..., block 8"."""
    names = ["embedding", *(f"block {i}" for i in range(layout.config.num_layers)), "head"]
    parts = [layout.units[chunk] for chunk in layout.chunks(stage)]
    texts = [" to ".join(dict.fromkeys([names[part[0]], names[part[-1]]])) for part in parts]
    return ", ".join(texts if len(texts) < 3 else [texts[0], "...", texts[-1]])


def cell(x, y, width, first, ranks, arrows_up):
    """Return a cell with a box for each of `ranks`, and the arrows of tp and dp. first: the rank of its first box."""
    parts = [box(x, y, width, CELL, f"fill='none' stroke='{GREY}' rx='6'")]
    step = (width - 12 + BETWEEN) / len(ranks)
    for i, rank in enumerate(ranks):
        left, centre = x + 6 + i * step, x + 6 + i * step + (step - BETWEEN) / 2
        parts.append(box(left, y + 7, step - BETWEEN, CELL - 14, f"fill='{GREY}' opacity='.2' rx='4'"))
        number = "..." if None in (first, rank) else str(first + rank)
        parts.append(text(centre, y + 28, number, min(13, 1.4 * (step - BETWEEN) / len(number)), "middle"))
        if i:
            parts.append(arrow("tp", f"M{left - BETWEEN + 1:.1f} {y + CELL / 2}h{BETWEEN - 2}"))
        if arrows_up:
            parts.append(arrow("dp", f"M{centre:.1f} {y - BELOW + 1}V{y - 1}"))
    return parts


def between_stages(p, stages, lefts, width, y):
    """Return the arrows between the cells of one row: messages of the pipeline and sums over holders."""
    holders = [p.layout.holders(name) for name in p.layout.all_buckets]
    links = [("pp", m.source, m.destination, SENT[m.kind]) for m in schedules.messages(p.schedule)]
    links += [("holders", a, b, "") for group in holders for a, b in itertools.pairwise(group)]
    at = [stages.index(stage if stage in stages else None) for stage in range(len(p.sent))]  # column of each stage
    parts, depth = [], 4
    for axis, a, b, what in dict.fromkeys((axis, at[a], at[b], what) for axis, a, b, what in links if at[a] != at[b]):
        if axis == "pp" and abs(a - b) == 1:
            lane = y + (15 if what == SENT["activation"] else 31)
            path = f"M{lefts[a] + (width if a < b else 0):.1f} {lane}H{lefts[b] + (width if a > b else 0):.1f}"
        else:
            depth += 8
            begin, end = (lefts[i] + width * (0.42 if axis == "pp" else 0.58) for i in (a, b))
            path = f"M{begin:.1f} {y + CELL + 1}v{depth}H{end:.1f}v{-depth}"
        parts.append(arrow(axis, path, what))
    return parts


def table(p, stages, y):
    """Return (SVG elements of the table, y of its bottom). y: the titles' y; each of `stages` is a column."""
    room = (WIDTH - 555) / len(stages)
    rights = [WIDTH - 10 - room * i for i in reversed(range(len(stages)))]

    def line(y, words, numbers=(), weight="normal"):
        parts = [text(x, y, word, 12, weight=weight) for x, word in zip((54, 106, 256, 354), words, strict=True)]
        for x, number in zip(rights, numbers, strict=False):
            parts.append(text(x, y, number, min(12, 1.5 * room / len(number)), "end", weight))
        return parts

    parts = line(y - 18, ["", "通信内容", "通信形式", "通信頻度"], weight="bold")
    parts.append(text(WIDTH - 10, y - 18, "bytes that a rank with dp = 0 sends in a step", 12, "end", "bold"))
    parts += line(y, ["axis", "what", "operation", "how often"], [f"stage {stage}" for stage in stages], "bold")
    for key in sorted(p.often, key=lambda key: (list(COLOURS).index(key[0]), key)):
        y += 22
        numbers = [report.number(p.sent[stage][key][1]) if key in p.sent[stage] else "-" for stage in stages]
        parts += line(y, [*key, f"per {p.often[key]}"], numbers)
        if key[0] != "world":
            parts.append(arrow(key[0], f"M12 {y - 4}h32", key[1]))
    note = "Bucket: parameters of one block, the head, the word table or the position table. World: all ranks."
    holders = "Holders: pipeline ranks that keep the same bucket. They sum its gradients (twin gradients)."
    parts.append(text(10, y + 28, note if p.often else "Nothing is sent.", 12))
    return [*parts, text(10, y + 46, holders if p.often else "", 12)], y + 58


def arrow(axis, path, what=""):
    """Return an arrow along `path`: with one tip for a message, otherwise with two. Gradients are dashed."""
    start = "" if axis == "pp" else f"marker-start='url(#{axis})'"
    dashes = "stroke-dasharray='5 3'" if what == SENT["gradient"] else ""
    stroke = f"stroke='{COLOURS[axis]}' stroke-width='2' {dashes}"
    return f"<path d='{path}' fill='none' {stroke} {start} marker-end='url(#{axis})'/>"


def text(x, y, words, size=13, anchor="start", weight="normal"):
    style = f"text-anchor='{anchor}' font-size='{size:.1f}' font-weight='{weight}' fill='{GREY}'"
    return svg_text(x, y, words, style)


def box(x, y, width, height, style):
    return f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{height}' {style}/>"


# --- the command line -------------------------------------------------------------------------------------------------


def main(arguments=None):
    """Print the tables, and write the picture if the user asks for it."""
    parser = Parser(
        prog="python -m accounts.traffic",
        usage="%(prog)s [CONFIG.py] --ranks=N [--field=value ...] [--svg=FILE]",
        epilog="python train.py --help lists the fields.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="number of processes")
    parser.add_argument("--svg", metavar="FILE", help="draw who sends what to whom")
    options, fields = parser.parse_known_args(arguments)
    prediction = predict(configuration.load(fields), options.ranks)
    print(tables(prediction))
    if options.svg:
        with explained(f"--svg={options.svg}"):
            writable(options.svg).write_text(svg(prediction), encoding="utf-8")


if __name__ == "__main__":
    exit_on_user_error(main)
