"""Draws predictions as SVG: the memory of each rank, the parts of a step's time, and predicted beside published times.

`plan.py --svg=FILE` writes the first two pictures for the best layouts (`write`):

    memory    a panel for each layout, a bar for each pipeline rank, stacked by part; the dashed line is the capacity
    time      a bar for each layout, stacked by part; the parts sum to the predicted time of a step

`scatter` compares predictions with published times on logarithmic axes. A point on the solid line is exact. A point
between the dashed lines is wrong by at most 10%.
"""

import html
import math
from pathlib import Path

from accounts.curve import axis
from accounts.draw import GREY, svg_text
from errors import UserError, explained

COLOURS = ("#2f6fb7", "#1b8049", "#c07a14", "#9a5fc0", "#c0504d", "#0f8f8c", "#8a8a2e", "#b0568f", "#7a5230", "#5560c8")
WIDTH, MOST = 900, 6  # a picture's width in pixels, and its largest number of layouts
GiB = 2**30


# --- layouts ----------------------------------------------------------------------------------------------------------


def write(path, judged):
    """Write the pictures of at most MOST layouts to the file `path`. Raises UserError.

    judged: dicts as `plan.py --json` prints them, the best first. These fields are drawn: layout, step_seconds, mfu,
    memory_by_rank ([{part: bytes} for each pipeline rank]), capacity_bytes, step_parts ({part: seconds}).
    """
    if not judged:
        raise UserError(f"--svg={path}: there is no layout to draw")
    judged = judged[:MOST]
    parts, bottom = memory_bars(judged, 30)
    more, bottom = time_bars(judged, bottom + 40)
    with explained(f"--svg={path}"):
        Path(path).write_text(document([*parts, *more], bottom), encoding="utf-8")


def memory_bars(judged, y):
    """Return (SVG elements of the memory panels, y of their bottom). y: the title's baseline, in pixels."""
    colours = colours_of(kept for row in judged for kept in row["memory_by_rank"])
    capacity = judged[0]["capacity_bytes"]
    title = f"Memory of each pipeline rank in GiB (2^30 bytes); dashed: capacity, {capacity / GiB:.4g} GiB"
    shown, bottom = legend(colours, y + 20)
    parts = [text(10, y, title, 16, weight="bold"), *shown]
    highest = max(capacity, *(sum(kept.values()) for row in judged for kept in row["memory_by_rank"]))
    columns, height = min(3, len(judged)), 150
    width = (WIDTH - 20) / columns
    for i, row in enumerate(judged):
        left, top = 10 + i % columns * width, bottom + 10 + i // columns * (height + 72)
        ticks, scale = axis((0, float(highest) / GiB), 5, top + 44 + height, top + 44)
        first, second = name_of(row["layout"])
        parts.append(text(left, top + 10, f"{i + 1}: {first}", 11, weight="bold", room=width - 14))
        parts.append(text(left, top + 26, second, 11, room=width - 14))
        parts += panel(row, left + 34, left + width - 20, ticks, scale, colours)
    return parts, bottom + 10 + math.ceil(len(judged) / columns) * (height + 72)


def panel(row, left, right, ticks, scale, colours):
    """Yield the axis, the bars and the capacity of one layout. scale: GiB -> y in pixels."""
    for tick in ticks:
        yield line(left, scale(tick), right, scale(tick), "stroke-opacity='.3'")
        yield text(left - 5, scale(tick) + 4, f"{tick:g}", 10, "end")
    last = len(row["memory_by_rank"]) - 1
    step = (right - left) / (last + 1)
    width = min(0.85 * step, 40)
    for rank, kept in enumerate(row["memory_by_rank"]):
        x, y, below = left + step * (rank + 0.5) - width / 2, scale(0), 0.0
        for part, size in kept.items():
            size = float(size) / GiB
            bottom, y, below = y, scale(below + size), below + size
            yield box(x, y, width, bottom - y, colours[part], f"rank {rank}, {part}: {size:.3f} GiB")
        if rank in (0, last):
            yield text(x + width / 2, scale(0) + 14, f"rank {rank}", 10, "middle")
    capacity = scale(row["capacity_bytes"] / GiB)
    yield line(left, capacity, right, capacity, "stroke-width='2' stroke-dasharray='6 4'")


def time_bars(judged, y):
    """Return (SVG elements of the bars of time, y of their bottom). y: the title's baseline, in pixels."""
    colours = colours_of(row["step_parts"] for row in judged)
    shown, bottom = legend(colours, y + 20)
    parts = [text(10, y, "Predicted time of a step, in seconds", 16, weight="bold"), *shown]
    end = bottom + 6 + 44 * len(judged)
    ticks, scale = axis((0, *(row["step_seconds"] for row in judged)), 8, 10, WIDTH - 180)
    parts.append(line(scale(0), end, scale(ticks[-1]), end))
    for tick in ticks:
        parts.append(line(scale(tick), end, scale(tick), end + 6))
        parts.append(text(scale(tick), end + 18, f"{tick:g}", 11, "middle"))
    for i, row in enumerate(judged):
        top, x = bottom + 10 + 44 * i, scale(0)
        parts.append(text(12, top + 10, f"{i + 1}: {', '.join(name_of(row['layout']))}", 12, room=WIDTH - 20))
        for part, seconds in row["step_parts"].items():
            begin, x = x, x + scale(seconds) - scale(0)
            parts.append(box(begin, top + 16, x - begin, 18, colours[part], f"{part}: {digits(seconds)} s"))
        mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
        parts.append(text(x + 6, top + 30, f"{digits(row['step_seconds'])} s, MFU {mfu}", 12))
    return parts, end + 30


def name_of(layout):
    """Return a layout as two lines: its axes and schedule, and its other fields. Fields that are off are left out."""
    chunks = f", {layout['chunks']} chunks" if layout["chunks"] > 1 else ""
    flags = [name.replace("_", " ") for name in ("sequence_parallel", "offload") if layout.get(name)]
    recompute = [f"recompute {layout['recompute']}"] if layout["recompute"] != "none" else []
    first = f"dp={layout['dp']} tp={layout['tp']} pp={layout['pp']} {layout['schedule']}{chunks}"
    return first, ", ".join([f"micro-batch {layout['micro_batch_size']}", f"ZeRO {layout['zero']}", *flags, *recompute])


def colours_of(stacks):
    """Return {part: colour} of all parts of the stacks ({part: size}), in the order in which they first appear."""
    names = dict.fromkeys(part for stack in stacks for part in stack)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def legend(colours, y):
    """Return (SVG elements that name the colours, y of their bottom). A full line continues on the next one."""
    parts, x = [], 10
    for name, colour in colours.items():
        width = 34 + 7 * len(name)
        if x + width > WIDTH:
            x, y = 10, y + 18
        parts += [box(x, y - 10, 14, 12, colour), text(x + 19, y, name, 12)]
        x += width
    return parts, y + 8


# --- predicted beside published ---------------------------------------------------------------------------------------


def scatter(path, points):
    """Write the picture of predicted against published times to the file `path`. Raises UserError.

    points: (name, group, published seconds, predicted seconds), all times positive. A group has a colour. A number
    beside a point is its row in the list on the right.
    """
    groups = {group: COLOURS[i % len(COLOURS)] for i, group in enumerate(dict.fromkeys(p[1] for p in points))}
    points = [point for group in groups for point in points if point[1] == group]
    times = [seconds for point in points for seconds in point[2:]]
    low, high, left, top, side = min(times) / 1.25, max(times) * 1.25, 60, 40, 400

    def at(seconds):
        return side * math.log(seconds / low) / math.log(high / low)

    parts = [text(10, 22, "Predicted and published time of a step, in seconds", 16, weight="bold")]
    parts += log_axes(low, high, at, left, top, side)
    spots = [(left + at(published), top + side - at(predicted)) for _, _, published, predicted in points]
    frame = left, top, left + side, top + side
    for i, (spot, label) in enumerate(zip(spots, labels(spots, frame), strict=True)):
        name, group, published, predicted = points[i]
        words = f"{i + 1}: {name}: published {digits(published)} s, predicted {digits(predicted)} s"
        rest = max(0, 1 - 9 / max(math.dist(spot, label), 1))  # share of the line: it ends 9 pixels from the number
        end = (a + (b - a) * rest for a, b in zip(spot, label, strict=True))
        parts.append(line(*spot, *end, "stroke-width='.7'"))
        circle = f"<circle cx='{spot[0]:.2f}' cy='{spot[1]:.2f}' r='4' fill='{groups[group]}'>"
        parts.append(f"{circle}<title>{html.escape(words)}</title></circle>")
        parts.append(text(label[0], label[1] + 4, f"{i + 1}", 11, "middle"))
    listed, bottom = table(points, groups, left + side + 30, top + 10)
    with explained(path):
        Path(path).write_text(document([*parts, *listed], max(bottom, top + side + 50)), encoding="utf-8")


def log_axes(low, high, at, left, top, side):
    """Yield the axes, the line of exact predictions and the lines of an error of 10%. at: seconds -> pixels."""
    right, bottom, faint = left + side, top + side, "stroke-opacity='.25'"
    yield f"<rect x='{left}' y='{top}' width='{side}' height='{side}' fill='none' stroke='{GREY}'/>"
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    for tick in (n * 10.0**power for power in powers for n in (1, 2, 5)):
        if low <= tick <= high:
            x, y = left + at(tick), bottom - at(tick)
            yield from (line(x, top, x, bottom, faint), text(x, bottom + 16, f"{tick:g}", 11, "middle"))
            yield from (line(left, y, right, y, faint), text(left - 6, y + 4, f"{tick:g}", 11, "end"))
    for factor in (1, 1.1, 0.9):
        begin, end = max(low, low / factor), min(high, high / factor)  # the line is in the frame between these times
        style = "stroke-width='1.5'" + " stroke-dasharray='5 4'" * (factor != 1)
        yield line(left + at(begin), bottom - at(begin * factor), left + at(end), bottom - at(end * factor), style)
    below = "published (solid: exact; dashed: the prediction is 10% higher or lower)"
    yield text(left + side / 2, bottom + 36, below, 12, "middle")
    yield f"<g transform='translate(16 {top + side / 2}) rotate(-90)'>{text(0, 0, 'predicted', 12, 'middle')}</g>"


# Directions from a spot to its number, the preferred ones first: up left, down right, ... (y grows downwards).
DIRECTIONS = [(math.cos(i * math.pi / 8), math.sin(i * math.pi / 8)) for i in (10, 2, 11, 3, 9, 1, 12, 4, 8, 0, 13, 15)]


def labels(spots, frame):
    """Return the centre of each spot's number: a free place near the spot, inside the frame (left, top, right, bottom).

    A number needs 16 by 13 pixels. It covers no other number and no spot. If no place is free, it covers its own spot.
    """
    places = []
    for x, y in spots:
        around = ((x + r * dx, y + r * dy) for r in range(14, 300, 4) for dx, dy in DIRECTIONS)
        free = (place for place in around if inside(place, frame) and is_clear(place, places, spots))
        places.append(next(free, (x, y)))
    return places


def inside(place, frame):
    """Return True if a number at `place` lies inside the frame."""
    left, top, right, bottom = frame
    return left + 9 <= place[0] <= right - 9 and top + 8 <= place[1] <= bottom - 8


def is_clear(place, places, spots):
    """Return True if a number at `place` covers none of the numbers at `places` and none of the spots."""
    x, y = place
    apart = all(abs(x - a) >= 16 or abs(y - b) >= 13 for a, b in places)
    return apart and all(abs(x - a) >= 13 or abs(y - b) >= 11 for a, b in spots)


def table(points, groups, x, y):
    """Return (SVG elements of the list of points, y of its bottom). x, y: its top left corner, in pixels."""
    columns = (WIDTH - 118, WIDTH - 60, WIDTH - 8)  # right ends of the numbers
    titles = ("published", "predicted", "error")
    parts = [text(right, y, title, 11, "end") for right, title in zip(columns, titles, strict=True)]
    last, room = None, columns[0] - 40 - x - 26
    for i, (name, group, published, predicted) in enumerate(points):
        if group != last:
            y, last = y + 22, group
            parts += [box(x + 4, y - 10, 12, 12, groups[group]), text(x + 22, y, group, 12, weight="bold")]
        y += 16
        numbers = (digits(published), digits(predicted), f"{predicted / published - 1:+.1%}")
        parts += [text(right, y, number, 11, "end") for right, number in zip(columns, numbers, strict=True)]
        parts += [text(x + 16, y, f"{i + 1}", 11, "end"), text(x + 22, y, name, 11, room=room)]
    return parts, y + 10


# --- SVG --------------------------------------------------------------------------------------------------------------


def document(parts, bottom):
    """Return an SVG with a transparent background. bottom: its height in pixels."""
    view = f"viewBox='0 0 {WIDTH} {bottom:g}' font-family='Helvetica, Arial, sans-serif'"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {view}>", *parts, "</svg>", ""])


def digits(seconds):
    """Return a time with four digits: "1.420"."""
    return f"{float(seconds):#.4g}".rstrip(".")


def text(x, y, words, size=13, anchor="start", weight="normal", room=WIDTH):
    """Return a text. room: pixels that it may take; a longer text gets a smaller font."""
    size = min(size, 1.8 * room / max(1, len(words)))
    style = f"text-anchor='{anchor}' font-size='{size:.3g}' font-weight='{weight}' fill='{GREY}'"
    return svg_text(x, y, words, style)


def line(x1, y1, x2, y2, style=""):
    """Return a straight line. style: more attributes."""
    return f"<path d='M{x1:.2f} {y1:.2f}L{x2:.2f} {y2:.2f}' stroke='{GREY}' {style}/>"


def box(x, y, width, height, colour, hint=""):
    """Return a filled rectangle. hint: text that a browser shows under the pointer."""
    rect = f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}' fill='{colour}'>"
    return f"{rect}<title>{html.escape(hint)}</title></rect>" if hint else f"{rect[:-1]}/>"
