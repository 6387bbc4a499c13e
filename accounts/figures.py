"""Draws every picture file, as SVG. Only this file needs matplotlib (pip install matplotlib).

    timelines   schedules, one row of boxes per rank     python -m accounts.draw ... --svg=FILE
    traffic     who sends what to whom in a step         python -m accounts.traffic ... --svg=FILE
    curves      the losses of runs                       python -m accounts.curve ... --svg=FILE
    ranking     memory and time of the best layouts      python plan.py ... --svg=FILE
    scatter     errors of predicted times                python -m accounts.fit --svg=FILE

The background is transparent. Texts and axes are grey, so they are readable on a white page and on a dark one.
"""

import itertools
from contextlib import contextmanager

from errors import UserError, reading
from parallel.schedules import messages

GREY = "#7a7a7a"
COLOURS = ["#2f6fb7", "#1b8049", "#c07a14", "#9a5fc0", "#c0504d", "#0f8f8c", "#8a8a2e", "#b0568f", "#7a5230", "#5560c8"]
KINDS = {"F": "#2f6fb7", "B": "#1b8049", "I": "#0f7c7a", "W": "#a86a0c", "U": "#b3303f"}  # of actions
AXES = {"tp": "#c07a14", "pp": "#2f6fb7", "dp": "#1b8049", "holders": "#9a5fc0", "world": GREY}
STYLE = dict.fromkeys(["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], GREY)
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "axes.titlesize": 9}
STYLE |= {
    "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "svg.hashsalt": "",
}  # texts stay texts; the same picture gives the same bytes
GiB, MOST = 2**30, 6  # MOST: the largest number of layouts in a ranking


@contextmanager
def figure(path, height):
    """Context: yield an empty matplotlib Figure, and write it to the file `path` at the end. Raises UserError.

    height: in inches; the width is 9 inches.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--svg={path}: a picture needs matplotlib: pip install matplotlib") from None
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(9, height), layout="constrained")
        yield picture
        with reading(f"--svg={path}"):
            picture.savefig(path, format="svg", transparent=True, metadata={"Date": None})


# --- layouts and times ------------------------------------------------------------------------------------------------


def ranking(path, judged):
    """Draw the memory of each pipeline rank and the time of a step, for at most MOST layouts. Raises UserError.

    judged: dicts as `plan.py --json` prints them, the best first.
    """
    if not judged:
        raise UserError(f"--svg={path}: there is no layout to draw")
    judged = judged[:MOST]
    with figure(path, 4.2 + 0.5 * len(judged)) as picture:
        upper, lower = picture.subfigures(2, 1, height_ratios=(3, 1 + 0.5 * len(judged)))
        panels = upper.subplots(1, len(judged), sharey=True, squeeze=False)[0]
        for i, (axes, facts) in enumerate(zip(panels, judged, strict=True), start=1):
            kept = [{what: float(size) / GiB for what, size in rank.items()} for rank in facts["memory_by_rank"]]
            stack(axes.bar, "bottom", kept, names(rank for one in judged for rank in one["memory_by_rank"]))
            axes.axhline(facts["capacity_bytes"] / GiB, color=GREY, linestyle="--")
            axes.set(title=f"layout {i}", xlabel="pipeline rank", xticks=sorted({0, len(kept) - 1}))
        panels[0].set_ylabel("GiB (dashed: capacity)")
        upper.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=4, frameon=False)
        axes, times = lower.subplots(), [facts["step_parts"] for facts in judged]
        bars = stack(axes.barh, "left", times, names(times))
        axes.bar_label(bars, [speed(facts) for facts in judged], padding=4)
        labels = [f"{i}: {name_of(facts['layout'])}" for i, facts in enumerate(judged, start=1)]
        axes.set_yticks(range(len(judged)), labels, fontsize=7)
        axes.set(xlabel="predicted seconds of a step")
        axes.margins(x=0.2)
        axes.invert_yaxis()
        lower.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=6, frameon=False)


def names(stacks):
    """Return the names of all parts, in the order in which they first appear."""
    return dict.fromkeys(part for parts in stacks for part in parts)


def stack(draw, begin, stacks, parts):
    """Draw a bar for each dict {part: size}, in the order and colours of `parts`. Return the bars of the last part.

    draw, begin: axes.bar and "bottom", or axes.barh and "left".
    """
    ends = [0.0] * len(stacks)
    for part, colour in zip(parts, COLOURS, strict=False):
        sizes = [float(sizes.get(part, 0)) for sizes in stacks]
        bars = draw(range(len(stacks)), sizes, **{begin: ends}, color=colour, label=part)
        ends = [a + b for a, b in zip(ends, sizes, strict=True)]
    return bars


def name_of(layout):
    """Return a layout as two lines. Fields that are off are left out."""
    off = {"chunks": 1, "recompute": "none", "sequence_parallel": False, "offload": False}
    shown = [f"{name}={value}" for name, value in layout.items() if name not in off or value != off[name]]
    return " ".join(shown[:4]) + "\n" + " ".join(shown[4:])


def speed(facts):
    return f"{facts['step_seconds']:.4g} s" + (f", MFU {facts['mfu']:.1%}" if facts["mfu"] else "")


def scatter(path, points):
    """Draw the error of each predicted time. points: (name, group, published seconds, predicted seconds)."""
    with figure(path, 0.8 + 0.17 * len(points)) as picture:
        axes, groups = picture.subplots(), list(dict.fromkeys(group for _, group, *_ in points))
        points = sorted(points, key=lambda point: groups.index(point[1]))
        for group, colour in zip(groups, COLOURS, strict=False):
            rows = [(100 * (b / a - 1), i) for i, (_, of, a, b) in enumerate(points) if of == group]
            axes.plot(*zip(*rows, strict=True), "o", color=colour, label=group)
        for error, style in ((0, "-"), (-10, "--"), (10, "--")):
            axes.axvline(error, color=GREY, linestyle=style, linewidth=1)
        axes.set_yticks(range(len(points)), [f"{name}: {a:.4g} s, predicted {b:.4g} s" for name, _, a, b in points])
        axes.set_xlabel("error of the predicted time in percent (dashed: 10)")
        axes.grid(axis="y", alpha=0.3)
        axes.invert_yaxis()
        picture.legend(loc="outside upper right", ncols=4, frameon=False)


def curves(path, runs, unit):
    """Draw the losses of runs. runs: [`curve.Curve`]; unit: of x. A loss of nan or inf leaves a gap."""
    with figure(path, 4) as picture:
        axes = picture.subplots()
        for i, (name, training, validation) in enumerate(runs):  # a later line is dashed, so that equal lines show
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(*zip(*training, strict=True), ".-", color=colour, label=name, dashes=(8 / i, 8) if i else ())
            axes.plot(*zip(*validation or [((), ())], strict=True), "o", color=colour, mfc="none", ms=6 + 4 * i)
        axes.set(xlabel=unit, title="loss: training (line), validation (circles)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)


# --- schedules --------------------------------------------------------------------------------------------------------


def timelines(path, pictures, unit, legend, notes):
    """Draw `draw.Picture`s below one another on one time axis. unit: of time.

    legend: {kind of action: its meaning}; notes: lines below the pictures.
    """
    heights = [len(picture.timeline.peak) * (1.7 if picture.versions else 1) for picture in pictures]
    with figure(path, 0.9 + sum(0.2 * height + 0.35 for height in heights)) as drawing:
        panels = drawing.subplots(len(pictures), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, picture in zip(panels, pictures, strict=True):
            timeline(axes, picture, unit, 500 / max(p.timeline.makespan for p in pictures))
        bars = [panels[0].barh(0, 0, color=KINDS[kind]) for kind in legend]
        drawing.legend(bars, legend.values(), loc="outside upper left", ncols=6, frameon=False)
        drawing.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=8)


def timeline(axes, picture, unit, points):
    """Draw one `draw.Picture`. points: of a unit of time, 1/72 inch each."""
    line, pitch, at = picture.timeline, 1.7 if picture.versions else 1, axes.get_yaxis_transform()
    for rank, peak in enumerate(picture.in_flight):
        axes.barh(rank * pitch, line.makespan, color=GREY, alpha=0.18, height=0.9)
        axes.text(1.02, rank * pitch, f"{peak:g}", va="center", transform=at)
    for rank, action, start, end in line.events:
        y, centre = rank * pitch, dict(x=(start + end) / 2, ha="center", va="center_baseline")
        if action.kind == "U":
            axes.plot((end, end), (y - 0.5, y + 0.5), color=KINDS["U"])
            continue
        ink = box(axes, y, start, end, KINDS[action.kind], picture.shades[action.chunk])
        size = min(8, points * (end - start) / len(str(action.microbatch)) / 0.7)
        if size >= 4:
            axes.text(y=y, s=action.microbatch, color=ink, fontsize=size, **centre)
        if picture.versions:
            version = picture.version(rank, action)
            axes.text(y=y + 0.8, s=version, color=KINDS["U"] if "!" in version else GREY, fontsize=7, **centre)
    axes.set_title(f"{picture.title}: bubble {line.bubble:.4f} of {line.span:.4g} {unit}", loc="left")
    axes.set_title("in flight", loc="right")
    axes.set_yticks([rank * pitch for rank in range(len(line.peak))], [f"rank {r}" for r in range(len(line.peak))])
    axes.set(xlim=(0, None), ylim=(len(line.peak) * pitch - 0.5, -0.5))


def box(axes, y, start, end, colour, shade):
    """Draw the box of an action, lighter for each later chunk of its rank. Return the colour of its number."""
    from matplotlib.colors import to_rgb

    ground = [1 - (1 - part) * 0.55**shade for part in to_rgb(colour)]
    axes.barh(y, end - start, left=start, height=0.9, color=ground, edgecolor="white", linewidth=0.5, clip_on=False)
    return "black" if shade else "white"


# --- traffic ----------------------------------------------------------------------------------------------------------


def traffic(path, p):
    """Draw who sends what in one step, above a table of the bytes. p: `traffic.Prediction`.

    A box is a rank. The boxes of a group are its tp ranks; a row is a data replica, and a column is a pipeline stage.
    At most 4 ranks of an axis are drawn.
    """
    c, keys = p.layout.config, sorted(p.often, key=lambda key: (list(AXES).index(key[0]), key))
    with figure(path, 1 + min(4, p.layout.dp) + 0.22 * len(keys)) as picture:
        grid, axes = picture.subplots(2, 1, height_ratios=(5 * min(4, p.layout.dp), 2 + len(keys)))
        ranks(grid, p)
        layout = f"dp={p.layout.dp} pp={c.pp} tp={c.tp} schedule={c.schedule} zero={c.zero}"
        grid.set_title(f"Who sends what in one step (box: rank; row: dp; column: pp): {layout}", pad=12)
        titles = ["axis", "what", "operation", "how often (per)", *(f"bytes, stage {i}" for i in range(min(4, c.pp)))]
        rows = [[*key, p.often[key], *(bytes_of(table, key) for table in p.sent[:4])] for key in keys]
        table = axes.table([titles, *rows], loc="center", edges="open", cellLoc="left")
        table.auto_set_column_width(range(len(titles)))
        table.auto_set_font_size(False)
        table.set_fontsize(7)
        for i, (axis, *_) in enumerate(keys, start=1):
            table[i, 0].get_text().set_color(AXES[axis])
        for panel in (grid, axes):
            panel.axis("off")


def bytes_of(table, key):
    return f"{float(table[key][1]):,.0f}" if key in table else "-"


def ranks(grid, p):
    """Draw the ranks of a `traffic.Prediction` and arrows between those that send to each other."""
    c, (dp, pp, tp) = p.layout.config, (min(4, size) for size in (p.layout.dp, p.layout.config.pp, p.layout.config.tp))
    holders = [p.layout.holders(name) for name in p.layout.all_buckets]
    links = {("holders", *pair) for group in holders for pair in itertools.pairwise(group)}
    links |= {("pp", m.source, m.destination) for m in messages(p.schedule)}
    pitch = tp + 0.6  # from one stage to the next

    def arrow(axis, a, b, style="<|-|>", bend=0.0):
        ends = dict(shrinkA=13, shrinkB=13, arrowstyle=style, connectionstyle=f"arc3,rad={bend}")
        grid.annotate("", b, a, arrowprops=ends | {"color": AXES[axis]})

    for d, stage, t in itertools.product(range(dp), range(pp), range(tp)):
        x, rank = stage * pitch + t, (d * c.pp + stage) * c.tp + t
        frame = dict(facecolor="none", edgecolor=GREY, boxstyle="round,pad=0.5")
        grid.text(x, -d, rank, ha="center", va="center", bbox=frame)
        if t:
            arrow("tp", (x - 1, -d), (x, -d))
        if d:
            arrow("dp", (x, 1 - d), (x, -d))
    for d, (axis, a, b) in itertools.product(range(dp), sorted(links)):
        if max(a, b) < pp and axis == "pp" and abs(a - b) == 1:  # from the last box of a group to the first of the next
            y, (left, right) = -d + 0.07 * (b - a), ((min(a, b) + 1) * pitch - 1.6, max(a, b) * pitch)
            arrow(axis, *(((left, y), (right, y)) if a < b else ((right, y), (left, y))), "-|>")
        elif max(a, b) < pp:
            ends = ((stage * pitch + (tp - 1) / 2, -d - 0.1) for stage in (a, b))
            arrow(axis, *ends, *(("-|>", -0.13) if axis == "pp" else ("<|-|>", 0.13)))
    grid.set(xlim=(-0.6, pp * pitch - 1), ylim=(0.3 - dp, 0.5))
