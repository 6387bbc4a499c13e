"""Draws every picture file, as SVG. Only this file needs matplotlib.

timelines   schedules, one row of boxes per rank
zero_states ZeRO 0 to 3: bytes of the model states
traffic     who sends what to whom in a step
curves      the losses of runs
speeds      tokens/s over the number of processes
"""

import itertools
from collections import defaultdict
from contextlib import contextmanager

from accounts import ledger
from accounts.memory import model_states
from accounts.report import sent_table
from errors import UserError, reading
from parallel.mesh import grid as grid_of_ranks
from parallel.simulation import messages

KINDS = {  # of an action: its meaning, its colour in a rank's first chunk and in its other chunks
    "F": ("forward", "#0072b2", "#a3cae2"),  # Okabe and Ito's colours
    "B": ("backward", "#009e73", "#a8dccc"),
    "I": ("input gradient", "#cc79a7", "#edcfdf"),
    "W": ("weight gradient", "#e69f00", "#f7dca4"),
    "U": ("update", "black", "black"),
    "!": ("backward with other weights than its forward", "#b3303f", "#b3303f"),
}
AXES = {  # meaning, colour
    "tp": ("tensor", "#e69f00"),
    "cp": ("context", "#d55e00"),
    "pp": ("pipeline", "#0072b2"),
    "dp": ("data", "#009e73"),
    "copies": ("copies of shards", "#56b4e9"),
    "holders": ("stages that hold copies of the same parameters", "#cc79a7"),
}
STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": ""}  # equal pictures get equal bytes
ABOVE = dict(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)  # a legend's place


@contextmanager
def figure(path, height):
    """Context: yield the axes of a new picture, `height` inches high. Write its file at the end. Raises UserError."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--svg={path}: a picture needs matplotlib: pip install matplotlib") from None
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(9, height), layout="constrained")
        yield picture.subplots()
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
    with figure(path, 0.6 + sum(0.2 * (p.ranks + len(p.notes) + 2) for p in pictures)) as axes:
        for picture in pictures:
            axes.text(0, row, picture.title, va="center", weight="bold")
            for i, note in enumerate(picture.notes, 1):
                axes.text(0, row + i, " ".join(note.split()), va="center", fontsize=8)
            row += 1 + len(picture.notes)
            rows = range(row, row + picture.ranks)
            white = dict(color="#f0f0f0", hatch="////", edgecolor="#c4c4c4", linewidth=0, align="center")
            axes.barh(rows, picture.timeline.makespan, label=None if ranks else "idle", **white)
            for rank, action, start, end in picture.timeline.events:
                kind = "!" if picture.other_weights(rank, action) else action.kind
                box = row + rank, start, max(end - start - gap, gap), "" if kind == "U" else action.microbatch
                boxes[kind, action.chunk in picture.later].append(box)
            ranks |= {y: f"rank {rank}" for rank, y in enumerate(rows)}
            row = max(ranks) + 2
        for (kind, later), boxes_of_kind in boxes.items():
            rows, starts, widths, numbers = zip(*boxes_of_kind, strict=True)
            meaning, *colours = KINDS[kind]
            label = f"{meaning}, a later chunk of the rank" if later else meaning
            bars = axes.barh(rows, widths, left=starts, align="center", color=colours[later], label=label)
            ink = "white" if kind in "F!" and not later else "black"
            axes.bar_label(bars, numbers, label_type="center", color=ink, fontsize=6)
        axes.set_yticks(list(ranks), ranks.values())
        axes.set(ylim=(row - 1, -1), xlim=(0, None), xlabel="time, in the unit of --cost or of the trace")
        axes.tick_params(left=False)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.legend(**ABOVE, frameon=False)


def zero_states(path, elements, n):
    """Draw the bytes of ZeRO 0 to 3 on one of n ranks."""
    colours = dict(zip(model_states(1, 1, 0), ("#0072b2", "#56b4e9", "#cc79a7", "#e69f00"), strict=True))
    with figure(path, 2.6) as axes:
        for stage in range(4):
            total = 0
            for part, size in model_states(elements, n, stage).items():
                width = float(size) / 1e9
                label = None if stage else part
                bar = axes.barh(f"ZeRO-{stage}", width, left=total, color=colours[part], label=label)
                ink = "white" if part == "parameters" else "black"
                axes.bar_label(bar, [f"{width:.1f}" if width > 8 else ""], label_type="center", color=ink)
                total += width
            axes.text(total + 2, stage, f"{total:.1f} GB", va="center", weight="bold")
        axes.set(xlabel=f"GB of a rank: {elements:,} parameters, dp={n}, bf16, AdamW", ylim=(3.5, -0.5))
        axes.spines[["right", "top"]].set_visible(False)
        axes.legend(**ABOVE | {"ncols": 4}, frameon=False)


def traffic(path, p):
    """Draw who sends what, above a table of the bytes. p: `traffic.Prediction`.

    A box is a rank, a frame its tp group, a column a pipeline stage, and a row a data replica (with cp, one of its cp
    ranks). At most 4 ranks of an axis are drawn.
    """
    c, sizes = p.layout.config, [min(4, n) for n in (p.layout.data_ranks, p.layout.config.pp, p.layout.config.tp)]
    drawn, links = set(), {("pp", *sorted((m.source, m.destination))) for m in messages(p.schedule)}
    for name in p.layout.all_buckets:
        links |= {("holders", *pair) for pair in itertools.pairwise(p.layout.holders(name))}
    shards = p.layout.data_ranks // c.zero_copies  # consecutive data ranks that sum gradients; copies sum shards
    ranks = grid_of_ranks(ledger.axis_sizes(p.layout)["world"], c.tp, c.pp, c.cp, c.order)
    table = sent_table("each stage", p.layout, {f"stage {i}": sent for i, sent in enumerate(p.sent[:4])})

    def place(d, stage, t):
        return stage * (sizes[2] + 0.7) + t, -1.25 * d

    with figure(path, 0.8 + 1.1 * sizes[0] + 0.19 * table.count("\n")) as grid:
        for d, stage in itertools.product(*map(range, sizes[:2])):
            x, y = place(d, stage, 0)
            grid.fill_between([x - 0.46, x + sizes[2] - 0.54], y - 0.46, y + 0.46, color="#efefe9", zorder=0)
            if d == 0:
                grid.text(x + (sizes[2] - 1) / 2, 0.72, f"stage {stage}", ha="center", weight="bold")
        for d, stage, t in itertools.product(*map(range, sizes)):
            group, i = divmod(d, c.cp)
            others = [("tp", (d, stage, t + 1)), ("copies", (d + shards, stage, t))]
            if i + 1 < c.cp or (d + 1) % shards:
                others.append(("cp" if i + 1 < c.cp else "dp", (d + 1, stage, t)))
            others += [(axis, (d, b, t)) for axis, a, b in sorted(links) if a == stage]
            for axis, other in others:
                if all(i < size for i, size in zip(other, sizes, strict=True)):
                    bend = {"pp": -0.18, "holders": 0.18, "copies": 0.18}.get(axis, 0)
                    style = dict(arrowstyle="<|-|>", color=AXES[axis][1], shrinkA=19, shrinkB=19, linewidth=1.6)
                    style["connectionstyle"] = f"arc3,rad={bend}"
                    grid.annotate("", place(*other), place(d, stage, t), arrowprops=style)
                    drawn.add(axis)
            (x, y), frame = place(d, stage, t), dict(facecolor="white", boxstyle="round,pad=0.5")
            places = f"dp {group} pp {stage}\n" + (f"cp {i} " if c.cp > 1 else "") + f"tp {t}"
            grid.text(x, y, f"\u00a0\n{places}", ha="center", va="center", bbox=frame, fontsize=6, linespacing=1.3)
            grid.text(x, y + 0.11, ranks[group, stage, i, t], ha="center", va="center", weight="bold")
        for axis in (axis for axis in AXES if axis in drawn):
            grid.plot([], color=AXES[axis][1], linewidth=2, label=f"{axis}: {AXES[axis][0]}")
        if drawn:
            grid.legend(**ABOVE | {"ncols": 5}, frameon=False)
        right, bottom = place(sizes[0] - 1, sizes[1] - 1, sizes[2] - 1)
        grid.set(xlim=(-0.6, right + 0.6), ylim=(bottom - 0.6, 0.95), xticks=[], yticks=[])
        grid.spines[:].set_visible(False)
        table = table.replace(" ", "\u00a0")  # an SVG joins plain spaces
        grid.figure.supxlabel(table, x=0.01, ha="left", family="monospace", fontsize=7.5)
