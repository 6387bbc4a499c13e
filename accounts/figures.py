"""Draws every picture file, as SVG. Only this file needs matplotlib.

timelines   schedules, one row of boxes per rank     python -m accounts.draw ... --svg=FILE
traffic     who sends what to whom in a step         python -m accounts.traffic ... --svg=FILE
curves      the losses of runs                       python -m accounts.curve ... --svg=FILE
speeds      tokens/s over the number of processes    python -m accounts.curve --speed ... --svg=FILE
"""

import itertools
from collections import defaultdict
from contextlib import contextmanager

from accounts.report import sent_table
from errors import UserError, reading
from parallel.schedules import messages

KINDS = {  # of an action: its meaning, its colour in a rank's first chunk and in its other chunks
    "F": ("forward", "#2f6fb7", "#a2c0e0"),
    "B": ("backward", "#1b8049", "#99ccae"),
    "I": ("input gradient", "#0f7c7a", "#92c8c7"),
    "W": ("weight gradient", "#a86a0c", "#dfbf8d"),
    "U": ("update", "black", "black"),
    "!": ("backward with other weights than its forward", "#b3303f", "#b3303f"),
}
AXES = {"tp": "orange", "cp": "red", "pp": "blue", "dp": "green", "holders": "purple"}
STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": ""}  # equal pictures get equal bytes
ABOVE = dict(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)  # a legend's place


@contextmanager
def figure(path, height, *grid, **more):
    """Context: yield a new picture's axes, and write its file at the end. Raises UserError.

    height: inches. grid, more: as in matplotlib's `subplots`.
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
            picture.savefig(path, format="svg", metadata={"Date": None})


def curves(path, runs):
    """runs: [`curve.Curve`]."""
    with figure(path, 4) as axes:
        for i, (name, training, validation) in enumerate(runs):  # dashes show equal lines
            (line,) = axes.plot(*zip(*training, strict=True), label=name, dashes=(8 / i, 8) if i else ())
            if validation:
                axes.plot(*zip(*validation, strict=True), "o", color=line.get_color(), mfc="none", ms=6 + 4 * i)
        axes.set(xlabel="iterations", ylabel="loss: training (line), validation (circles)")
        axes.legend()


def speeds(path, points):
    """points: [(processes, tokens/s)], ascending."""
    with figure(path, 4) as axes:
        (n, first), counts = points[0], [count for count, _ in points]
        axes.plot(*zip(*points, strict=True), "o-", label="measured")
        axes.plot(counts, [first / n * count for count in counts], "--", label="linear")
        axes.set(xlabel="processes", ylabel="tokens/s", xticks=counts)
        axes.legend()


def timelines(path, pictures):
    """Draw `draw.Picture`s below one another on one time axis."""
    row, ranks, boxes = 0, {}, defaultdict(list)  # ranks: {row: label}; boxes: {(kind, later): [(row, start, ...)]}
    gap = max(picture.timeline.makespan for picture in pictures) / 500
    with figure(path, sum(0.2 * (len(p.notes) + len(p.schedule.actions) + 2) for p in pictures)) as axes:
        for picture in pictures:
            for text in [picture.title, *picture.notes]:
                axes.text(0, row, text, va="center")
                row += 1
            for rank, action, start, end in picture.timeline.events:
                kind = "!" if picture.other_weights(rank, action) else action.kind
                box = row + rank, start, max(end - start - gap, gap), "" if kind == "U" else action.microbatch
                boxes[kind, action.chunk in picture.later].append(box)
            ranks |= {row + rank: f"rank {rank}" for rank in range(len(picture.schedule.actions))}
            row = max(ranks) + 2
        for (kind, later), found in boxes.items():
            rows, starts, widths, numbers = zip(*found, strict=True)
            meaning, *colours = KINDS[kind]
            label = None if later else meaning
            bars = axes.barh(rows, widths, left=starts, align="center", color=colours[later], label=label)
            axes.bar_label(bars, numbers, label_type="center", color="black" if later else "white", fontsize=6)
        axes.set_yticks(list(ranks), ranks.values())
        axes.set_ylim(row - 1, -1)
        axes.set_xlabel("time; pale: not the rank's first chunk; white: idle")
        axes.legend(**ABOVE)


def traffic(path, p):
    """Draw who sends what, above a table of the bytes. p: `traffic.Prediction`.

    A box is a rank. Boxes side by side are tp ranks, a column of such groups is a pipeline stage, and a row is a data
    replica (with cp, one of its cp ranks). At most 4 ranks of an axis are drawn.
    """
    c, sizes = p.layout.config, [min(4, n) for n in (p.layout.dp, p.layout.config.pp, p.layout.config.tp)]
    links = {("pp", *sorted((m.source, m.destination))) for m in messages(p.schedule)}
    for name in p.layout.all_buckets:
        links |= {("holders", *pair) for pair in itertools.pairwise(p.layout.holders(name))}
    table = sent_table("each stage", p.layout.stage, {f"stage {i}": sent for i, sent in enumerate(p.sent[:4])})

    def place(d, stage, t):
        return stage * (sizes[2] + 0.6) + t, -d

    with figure(path, 1 + sizes[0] + 0.17 * table.count("\n")) as grid:
        for d, stage, t in itertools.product(*map(range, sizes)):
            group, i = divmod(d, c.cp)
            others = [("tp", (d, stage, t + 1)), ("cp" if i + 1 < c.cp else "dp", (d + 1, stage, t))]
            others += [(axis, (d, b, t)) for axis, a, b in sorted(links) if a == stage]
            for axis, other in others:
                if all(i < size for i, size in zip(other, sizes, strict=True)):
                    bend = {"pp": -0.15, "holders": -0.25}.get(axis, 0)
                    style = dict(arrowstyle="<|-|>", color=AXES[axis], shrinkA=13, shrinkB=13)
                    style["connectionstyle"] = f"arc3,rad={bend}"
                    grid.annotate("", place(*other), place(d, stage, t), arrowprops=style)
            outer = stage * (p.layout.dp // c.cp) + group if c.order == "pp-dp-tp" else group * c.pp + stage
            number = (outer * c.cp + i) * c.tp + t
            frame = dict(facecolor="none", boxstyle="round,pad=0.5")
            grid.text(*place(d, stage, t), number, ha="center", va="center", bbox=frame)
        for axis, colour in AXES.items():
            grid.plot([], color=colour, label=axis)
        grid.legend(**ABOVE | {"ncols": 5})
        grid.set(xlim=(-0.6, place(0, sizes[1], 0)[0] - 1), ylim=(0.4 - sizes[0], 0.8), xticks=[], yticks=[])
        table = table.replace(" ", "\u00a0")  # an SVG joins plain spaces
        grid.figure.supxlabel(table, x=0.01, ha="left", family="monospace", fontsize=7)
