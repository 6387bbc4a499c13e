"""Draws every picture file, as SVG. Only this file needs matplotlib (pip install matplotlib).

    timelines   schedules, one row of boxes per rank     python -m accounts.draw ... --svg=FILE
    traffic     who sends what to whom in a step         python -m accounts.traffic ... --svg=FILE
    curves      the losses of runs                       python -m accounts.curve ... --svg=FILE
    ranking     memory and time of the best layouts      python plan.py ... --svg=FILE
    scatter     errors of predicted times                python -m accounts.fit --svg=FILE

The background is transparent. Texts and axes are grey, so they are readable on a white page and on a dark one.
"""

import itertools
import textwrap
from collections import defaultdict
from contextlib import contextmanager
from math import nan

from accounts.ledger import how_often
from accounts.report import aligned, number
from errors import UserError, reading
from parallel.schedules import messages

GREY = "#7a7a7a"
COLOURS = ["#2f6fb7", "#1b8049", "#c07a14", "#9a5fc0", "#c0504d", "#0f8f8c", "#8a8a2e", "#b0568f", "#7a5230", "#5560c8"]
MEANINGS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "U": "update"}
FIRST = {"F": "#2f6fb7", "B": "#1b8049", "I": "#0f7c7a", "W": "#a86a0c", "U": "#b3303f"}  # on a rank's first chunk
LATER = {"F": "#a2c0e0", "B": "#99ccae", "I": "#92c8c7", "W": "#dfbf8d"}
AXES = {"tp": "#c07a14", "pp": "#2f6fb7", "dp": "#1b8049", "holders": "#9a5fc0", "world": GREY}
STYLE = dict.fromkeys(["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], GREY)
STYLE |= dict.fromkeys(["axes.spines.top", "axes.spines.right", "ytick.left", "legend.frameon", "path.simplify"], False)
STYLE |= {"font.size": 9, "axes.titlesize": 9, "axes.prop_cycle": f"cycler('color', {COLOURS})"}
# Texts stay texts, and the same picture gives the same bytes.
STYLE |= {"font.sans-serif": "DejaVu Sans", "svg.fonttype": "none", "svg.hashsalt": ""}
GiB, MOST = 2**30, 6  # MOST: the largest number of layouts in a ranking
ABOVE = dict(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)  # the place of a legend


@contextmanager
def figure(path, height, *grid, **more):
    """Context: yield a new picture's axes, and write the picture to the file `path` at the end. Raises UserError.

    height: in inches; the width is 9 inches. grid, more: as in matplotlib's `subplots`.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--svg={path}: a picture needs matplotlib: pip install matplotlib") from None
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(9, height), layout="constrained")
        yield picture.subplots(*grid, **more)
        with reading(f"--svg={path}"):
            picture.savefig(path, format="svg", transparent=True, metadata={"Date": None})


# --- layouts, times, losses -------------------------------------------------------------------------------------------


def ranking(path, judged):
    """Draw the memory of the fullest rank and the time of a step, for at most MOST layouts. Raises UserError.

    judged: dicts as `plan.py --json` prints them, the best first.
    """
    if not judged:
        raise UserError(f"--svg={path}: there is no layout to draw")
    judged = judged[:MOST]
    layouts = [" ".join(f"{name}={value}" for name, value in facts["layout"].items()) for facts in judged]
    with figure(path, 1.8 + 0.6 * len(judged), 1, 2, sharey=True) as (memory, time):
        stack(memory, [{what: size / GiB for what, size in facts["memory_bytes"].items()} for facts in judged])
        memory.axvline(judged[0]["capacity_bytes"] / GiB, color=GREY, linestyle="--")
        bars = stack(time, [facts["step_parts"] for facts in judged])
        time.bar_label(bars, [f"{facts['step_seconds']:.4g} s" for facts in judged], padding=4)
        memory.set_yticks(range(len(judged)), [textwrap.fill(layout, 45) for layout in layouts], fontsize=7)
        memory.set_xlabel("GiB on the fullest rank (dashed: capacity)")
        time.set_xlabel("predicted seconds of a step")
        time.margins(x=0.2)
        memory.invert_yaxis()


def stack(axes, stacks):
    """Draw a bar for each dict {part: size}. A part has one colour. Return the bars of the last part."""
    ends = [0.0] * len(stacks)
    for part in dict.fromkeys(part for parts in stacks for part in parts):
        sizes = [float(parts.get(part, 0)) for parts in stacks]
        bars = axes.barh(range(len(stacks)), sizes, left=ends, label=part)
        ends = [a + b for a, b in zip(ends, sizes, strict=True)]
    axes.legend(**ABOVE)
    return bars


def scatter(path, points):
    """Draw the error of each predicted time. points: (name, group, published seconds, predicted seconds)."""
    with figure(path, 0.8 + 0.17 * len(points)) as axes:
        for group in dict.fromkeys(group for _, group, *_ in points):
            rows = [(100 * (b / a - 1), i) for i, (_, of, a, b) in enumerate(points) if of == group]
            axes.plot(*zip(*rows, strict=True), "o", label=group)
        axes.axvspan(-10, 10, color=GREY, alpha=0.15)
        axes.set_yticks(range(len(points)), [f"{name}: {a:.4g} s, predicted {b:.4g} s" for name, _, a, b in points])
        axes.set_xlabel("error of the predicted time in percent (grey: at most 10)")
        axes.grid(alpha=0.3)
        axes.invert_yaxis()
        axes.legend(**ABOVE)


def curves(path, runs):
    """Draw the losses of runs. runs: [`curve.Curve`]. A loss of nan or inf leaves a gap."""
    with figure(path, 4) as axes:
        for i, (name, training, validation) in enumerate(runs):  # a later line is dashed, so that equal lines show
            dashes = (8 / i, 8) if i else ()
            (line,) = axes.plot(*zip(*training, strict=True), ".-", label=name, dashes=dashes)
            places = zip(*validation or [(nan, nan)], strict=True)
            axes.plot(*places, "o", color=line.get_color(), mfc="none", ms=6 + 4 * i)
        axes.set(xlabel="iterations", ylabel="loss: training (line), validation (circles)")
        axes.grid(alpha=0.3)
        axes.legend()


# --- schedules --------------------------------------------------------------------------------------------------------


def timelines(path, pictures, unit, notes):
    """Draw `draw.Picture`s below one another on one time axis. unit: of time; notes: lines below the pictures."""
    heights = [len(picture.timeline.peak) * (1.7 if picture.versions else 1) for picture in pictures]
    longest = max(picture.timeline.makespan for picture in pictures)
    height = 0.9 + sum(0.2 * rows + 0.35 for rows in heights)
    with figure(path, height, len(pictures), 1, sharex=True, squeeze=False, height_ratios=heights) as panels:
        legend = {}
        for axes, picture in zip(panels[:, 0], pictures, strict=True):
            timeline(axes, picture, unit, longest)
            handles, labels = axes.get_legend_handles_labels()
            legend |= dict(zip(labels, handles, strict=True))
        axes.figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=5)
        axes.figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=8)


def timeline(axes, picture, unit, longest):
    """Draw one `draw.Picture`. Boxes are thick lines: one artist for all boxes of a colour keeps the file small."""
    line, pitch, gap = picture.timeline, 1.7 if picture.versions else 1, longest / 1000
    ranks, boxes, numbers = range(len(line.peak)), defaultdict(list), defaultdict(list)
    for rank, action, start, end in line.events:
        y, centre, later = rank * pitch, (start + end) / 2, action.chunk in picture.later
        if action.kind == "U":
            boxes["U", False] += [(end, y - 0.5), (end, y + 0.5), (nan, nan)]
            continue
        boxes[action.kind, later] += [(start + gap, y), (end - gap, y), (nan, nan)]
        numbers[action.microbatch, later].append((centre, y))
        if picture.versions:
            version = picture.version(rank, action)
            colour = FIRST["U"] if "!" in version else GREY
            axes.text(centre, y + 0.8, version, color=colour, fontsize=7, ha="center", va="center")
    axes.hlines([rank * pitch for rank in ranks], 0, line.makespan, GREY, linewidth=11, alpha=0.18)
    for (kind, later), points in boxes.items():
        style = dict(color=LATER[kind]) if later else dict(color=FIRST[kind], label=MEANINGS[kind])
        axes.plot(*zip(*points, strict=True), linewidth=1.5 if kind == "U" else 11, solid_capstyle="butt", **style)
    size = min(6, 500 / longest * line.makespan * len(ranks) / len(line.events))
    for (microbatch, later), points in numbers.items():
        style = dict(linestyle="", marker=f"${microbatch}$", color="black" if later else "white", mew=0, ms=size)
        axes.plot(*zip(*points, strict=True), **style)
    axes.set_title(f"{picture.title}: bubble {line.bubble:.4f} of {line.span:.4g} {unit}", loc="left")
    labels = [f"rank {rank}, {picture.in_flight[rank]:g} in flight" for rank in ranks]
    axes.set_yticks([rank * pitch for rank in ranks], labels)
    axes.set(xlim=(0, longest), ylim=(len(ranks) * pitch - 0.5, -0.5))


# --- traffic ----------------------------------------------------------------------------------------------------------


def traffic(path, p):
    """Draw who sends what in one step, above a table of the bytes. p: `traffic.Prediction`.

    A box is a rank. The boxes of a group are its tp ranks; a row is a data replica, and a column is a pipeline stage.
    At most 4 ranks of an axis are drawn.
    """
    c, keys = (
        p.layout.config,
        sorted({key for table in p.sent for key in table}, key=lambda key: (list(AXES).index(key[0]), key)),
    )
    rows = [("axis", "what", "operation", "how often (per)", *(f"bytes, stage {i}" for i in range(min(4, c.pp))))]
    for key in keys:
        rows.append(
            (*key, how_often(key, p.layout.stage), *(number(table.get(key, (0, 0))[1]) for table in p.sent[:4]))
        )
    heights = min(4, p.layout.dp), 0.15 * len(rows)
    with figure(path, 1 + sum(heights), 2, 1, height_ratios=heights) as (grid, table):
        ranks(grid, p)
        layout = f"dp={p.layout.dp} pp={c.pp} tp={c.tp} schedule={c.schedule} zero={c.zero}"
        grid.set_title(f"Who sends what in one step (box: rank; row: dp; column: pp): {layout}", pad=12)
        head, _, *lines = aligned(rows, 4).replace(" ", "\u00a0").splitlines()  # an SVG joins plain spaces
        colours = [GREY, *(AXES[axis] for axis, *_ in keys)]
        for i, (text, colour) in enumerate(zip([head, *lines], colours, strict=True)):
            table.text(0, -i, text, color=colour, fontsize=7, family="monospace")
        table.set(ylim=(-len(rows), 1))
        for axes in (grid, table):
            axes.axis("off")


def ranks(grid, p):
    """Draw the ranks of a `traffic.Prediction` and arrows between those that send to each other."""
    c, (dp, pp, tp) = p.layout.config, (min(4, size) for size in (p.layout.dp, p.layout.config.pp, p.layout.config.tp))
    holders = [p.layout.holders(name) for name in p.layout.all_buckets]
    links = {("holders", *pair) for group in holders for pair in itertools.pairwise(group)}
    links |= {("pp", m.source, m.destination) for m in messages(p.schedule)}

    def place(d, stage, t):
        return stage * (tp + 0.6) + t, -d

    def arrow(axis, a, b, style="<|-|>", bend=0.0):
        ends = dict(shrinkA=13, shrinkB=13, arrowstyle=style, connectionstyle=f"arc3,rad={bend}")
        grid.annotate("", place(*b), place(*a), arrowprops=ends | {"color": AXES[axis]})

    for d, stage, t in itertools.product(range(dp), range(pp), range(tp)):
        frame = dict(facecolor="none", edgecolor=GREY, boxstyle="round,pad=0.5")
        grid.text(*place(d, stage, t), (d * c.pp + stage) * c.tp + t, ha="center", va="center", bbox=frame)
        if t:
            arrow("tp", (d, stage, t - 1), (d, stage, t))
        if d:
            arrow("dp", (d - 1, stage, t), (d, stage, t))
        for axis, a, b in sorted(links):
            if a == stage and b < pp:
                arrow(axis, (d, a, t), (d, b, t), *(("-|>", -0.15) if axis == "pp" else ("<|-|>", -0.25)))
    grid.set(xlim=(-0.6, pp * (tp + 0.6) - 1), ylim=(0.4 - dp, 0.8))
