"""Draws schedules, simulated or recorded: in the terminal, in colour where it can, and as SVG for a slide.

    python -m parallel.draw 1f1b zb-h1 --stages=4 --microbatches=8 --svg=pipelines.svg
    python -m parallel.draw --trace=trace.json         a real step under the ideal one (`train.py --trace` records)

A picture is a timeline (`schedules.simulate`) as one row of boxes per rank; several are drawn on one time axis. Below
each: its bubble and peak of activations in flight, beside what the papers' formulas say.
"""

import html
import json
import math
import os
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from errors import Parser, UserError, exit_on_user_error, explained
from parallel import schedules
from parallel.schedules import Action, Event, Schedule, Timeline, simulate

COLOURS = {"F": "#2f6fb7", "B": "#1f9655", "I": "#12908e", "W": "#d08a1e"}
GREY, IDLE = "#808080", "fill='#808080' opacity='.18'"  # to be seen on white and on black
MEANINGS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
WIDTH, LEFT, RIGHT, HEIGHT = 1600, 80, 60, 26  # of an SVG: the whole, its margins, a row


class Picture(NamedTuple):
    """One timeline as a row of boxes per rank."""

    title: str
    schedule: Schedule
    timeline: Timeline
    notes: list  # lines below it

    @property
    def shades(self):
        """{chunk: which of its rank's chunks it is, 0 ..}, drawn in lighter shades."""
        placement = self.schedule.placement
        return {chunk: placement[:chunk].count(rank) for chunk, rank in enumerate(placement)}


def terminal(pictures, columns, colour):
    """The pictures under one another on one time axis, as text of at most `columns` columns. colour: with escapes.

    A box shows its micro-batch where there is room. Without colour it shows its kind, in a small letter if it is not
    in its rank's first chunk.
    """
    label = len(f"rank {max(len(p.schedule.actions) for p in pictures) - 1}  ")
    scale = columns_per_time(pictures, columns - label)
    lines = [legend(pictures, colour)]
    for picture in pictures:
        lines += ["", picture.title]
        for rank in range(len(picture.schedule.actions)):
            lines.append(f"rank {rank}".ljust(label) + row(picture, rank, scale, colour))
        lines += picture.notes
    return "\n".join(lines)


def columns_per_time(pictures, columns):
    """The scale: where it fits, a whole number of columns for the shortest action, so that equal boxes look equal."""
    events = [event for picture in pictures for event in picture.timeline.events]
    durations = {event.end - event.start for event in events} - {0}
    shortest, total = min(durations), max(picture.timeline.makespan for picture in pictures)
    widest = len(str(max(event.action.microbatch for event in events))) + 2
    whole = min(widest, int(columns * shortest / total + 1e-6))
    even = all(abs(d / shortest - round(d / shortest)) < 1e-6 for d in durations)
    return whole / shortest if whole and even else min(columns / total, widest / shortest)


def row(picture, rank, scale, colour):
    """A rank's actions as text, `scale` columns a unit of time; without what has no column."""
    text, column, box = "", 0, colour_box if colour else plain_box
    for event in picture.timeline.events:
        if event.rank == rank:
            start, end = max(column, round(event.start * scale)), round(event.end * scale)
            if end > start:
                text += idle(start - column, colour)
                text += box(event.action, end - start, picture.shades[event.action.chunk])
                column = end
    return text + idle(round(picture.timeline.makespan * scale) - column, colour)


def idle(width, colour):
    return f"\x1b[90m{'.' * width}\x1b[0m" if colour and width > 0 else "." * width


def plain_box(action, width, shade):
    text = f"{action.kind.lower() if shade else action.kind}{action.microbatch}"
    text = text if len(text) <= width else text[0]
    return text if len(text) == width else text.ljust(width - 1, "-") + " "


def colour_box(action, width, shade):
    number = str(action.microbatch) if len(str(action.microbatch)) <= width else ""
    ground, ink = shaded(action.kind, shade)
    edge = "|" if width > len(number) else ""
    if not edge and action.microbatch % 2:  # what tells neighbours apart where there is no room for an edge
        ground = tuple(c * 4 // 5 for c in ground)
    dark = palette(tuple(c // 2 for c in ground))
    number = number.center(width - len(edge))
    return f"\x1b[48;5;{palette(ground)};38;5;{dark}m{edge}\x1b[38;5;{palette(ink)}m{number}\x1b[0m"


def shaded(kind, shade):
    """Colours of a box and of its number, (r, g, b): lighter for a rank's second chunk, and again for its third."""
    light = 1 - 0.55**shade
    ground = tuple(round(c + (255 - c) * light) for c in bytes.fromhex(COLOURS[kind][1:]))
    return ground, (0, 0, 0) if shade else (255, 255, 255)


def palette(rgb):
    """The nearest colour of the 256 that every terminal has: a cube of 6 levels."""
    levels = (0, 95, 135, 175, 215, 255)
    r, g, b = (min(range(6), key=lambda i: abs(levels[i] - c)) for c in rgb)
    return 16 + 36 * r + 6 * g + b


def legend(pictures, colour):
    items = []
    for kind in kinds_in(pictures):
        mark = f"\x1b[48;5;{palette(shaded(kind, 0)[0])}m  \x1b[0m" if colour else kind
        items.append(f"{mark} {MEANINGS[kind]}")
    if several(pictures):
        items.append("lighter: a rank's second chunk" if colour else "small letter: not a rank's first chunk")
    return "   ".join([*items, f"{idle(2, colour)} idle"])


def kinds_in(pictures):
    kinds = {event.action.kind for picture in pictures for event in picture.timeline.events}
    return [kind for kind in COLOURS if kind in kinds]


def several(pictures):
    """Whether there is a rank with more than one chunk."""
    return any(max(picture.shades.values()) > 0 for picture in pictures)


def svg(pictures, unit=""):
    """The same as SVG, transparent, for a slide of either brightness. unit: of time, for the axis."""
    total = max(picture.timeline.makespan for picture in pictures)
    scale = (WIDTH - LEFT - RIGHT) / total
    parts, y = svg_legend(pictures), 40
    for picture in pictures:
        line = picture.timeline
        parts.append(svg_text(LEFT, y + 24, picture.title, "start", 17, weight="bold"))
        parts.append(svg_text(WIDTH - RIGHT, y + 24, f"bubble {line.bubble:.4f}", "end", 17))
        parts.append(svg_text(WIDTH, y + 24, "peak", "end", 14))
        y += 36
        for rank, peak in enumerate(line.peak):
            parts.append(svg_text(LEFT - 10, y + 18, f"rank {rank}", "end", 14))
            parts.append(svg_text(WIDTH, y + 18, peak, "end", 14))
            parts.append(svg_rect(LEFT, y, line.makespan * scale, HEIGHT, IDLE))
            parts += [svg_box(event, y, scale, picture.shades) for event in line.events if event.rank == rank]
            y += HEIGHT + 4
        y += 14
    parts.append(svg_axis(y, scale, total, unit))
    box, font = f"0 0 {WIDTH} {y + 30}", "Helvetica, Arial, sans-serif"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='{box}' font-family='{font}'>"
    return "\n".join([head, *parts, "</svg>", ""])


def svg_box(event, y, scale, shades):
    _, (kind, j, chunk), start, end = event
    x, width = LEFT + start * scale, (end - start) * scale
    ground, ink = ("#{:02x}{:02x}{:02x}".format(*rgb) for rgb in shaded(kind, shades[chunk]))
    edge = min(0.6, width / 10)  # a hair of what is behind, between two boxes
    box = svg_rect(x + edge, y, width - 2 * edge, HEIGHT, f"fill='{ground}' rx='2'")
    hint = f"<title>{event.action}: {start:g} to {end:g}</title>"  # where the pointer rests on it
    size = min(14, (width - 3) / (0.6 * len(str(j))))
    text = svg_text(x + width / 2, y + HEIGHT / 2 + 0.36 * size, j, "middle", size, ink) if size >= 7 else ""
    return f"<g>{hint}{box}{text}</g>"


def svg_rect(x, y, width, height, style):
    return f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{height}' {style}/>"


def svg_text(x, y, text, anchor, size, colour=GREY, weight="normal"):
    style = f"text-anchor='{anchor}' font-size='{size:.1f}' font-weight='{weight}' fill='{colour}'"
    return f"<text x='{x:.2f}' y='{y:.2f}' {style}>{html.escape(str(text))}</text>"


def svg_legend(pictures):
    items = [(f"fill='{COLOURS[kind]}' rx='2'", MEANINGS[kind]) for kind in kinds_in(pictures)]
    parts, x = [], LEFT
    for style, meaning in [*items, (IDLE, "idle")]:
        parts += [svg_rect(x, 8, 22, 16, style), svg_text(x + 30, 21, meaning, "start", 14)]
        x += 60 + 7 * len(meaning)
    return [*parts, svg_text(x, 21, "lighter: a rank's second chunk", "start", 14)] if several(pictures) else parts


def svg_axis(y, scale, total, unit):
    """Ticks at 1, 2 or 5 times a power of ten, a dozen or fewer."""
    step = 10 ** math.floor(math.log10(total / 12))
    step *= next(n for n in (1, 2, 5, 10) if total / (step * n) <= 12)
    parts = [f"<path d='M{LEFT} {y} H{LEFT + total * scale:.2f}' stroke='{GREY}'/>"]
    for i in range(int(total / step + 1e-9) + 1):
        x, value = LEFT + i * step * scale, f"{i * step:g} {unit}".strip()
        parts.append(f"<path d='M{x:.2f} {y} v5' stroke='{GREY}'/>" + svg_text(x, y + 20, value, "middle", 13))
    return "\n".join(parts)


# --- what to draw -----------------------------------------------------------------------------------------------------


def simulated(name, chunks, stages, microbatches, cost, comm):
    """The Picture of a schedule. cost: of a whole stage, so that schedules with several chunks do the same work."""
    schedule = schedules.build(name, stages, microbatches, chunks)
    v = len(schedules.pipelines(schedule)[0]) // stages
    line = simulate(schedule, {kind: duration / v for kind, duration in cost.items()}, comm)
    title = f"{name}: {stages} stages, {microbatches} micro-batches" + (f", {v} chunks per rank" if v > 1 else "")
    formula = schedules.FORMULAS.get(name) if stages > 1 else None
    said = papers_say(formula, comm, p=stages, m=microbatches, v=v, **cost) if formula else ()
    return Picture(title, schedule, line, notes(line, "", *said))


def notes(line, unit="", bubble="", peak=""):
    """The two lines below a picture; each ends with what the papers say."""
    peaks = " ".join(str(n) for n in line.peak)
    return [f"bubble {line.bubble:.4f} of {line.span:.4g} {unit}".rstrip() + bubble, f"peak   {peaks} in flight{peak}"]


def papers_say(formula, comm, **letters):
    """What to print beside the simulation's bubble and peak."""
    bubble = f"   {formula.bubble}"
    if schedules.by_formula(formula.where, **letters):
        bubble += f" = {schedules.by_formula(formula.bubble, **letters):.4f}" + (" at --comm=0" if comm else "")
    else:
        bubble += f" where {formula.where}"
    peaks = [str(schedules.by_formula(formula.peak, r=r, **letters)) for r in range(letters["p"])]
    unit = f", each 1/{letters['v']} of a stage's" if letters["v"] > 1 else ""
    return [bubble, f"{unit}   {formula.peak} = {' '.join(peaks)}"]


def recorded(path):
    """Two Pictures of the last whole step in a trace that train.py wrote: how it should have been, and how it was.

    The trace is Chrome's JSON (chrome://tracing and Perfetto open it too): of its "traceEvents" those of a kind F, B, I
    or W, with "ts" and "dur" in microseconds, "tid" the rank, "args" microbatch, chunk and step; "otherData" says
    schedule, stages, microbatches, chunks. The first picture is the schedule simulated with each kind's mean duration
    and messages that take no time: as much work, so that what differs is due to messages and to stages or steps that
    are uneven. Raises UserError where the file is not such a trace, or has no step in which every action is.
    """
    try:
        trace = json.loads(Path(path).read_text(encoding="utf-8"))
        said, steps = trace["otherData"], {}
        for e in trace["traceEvents"]:
            if e["ph"] == "X" and e.get("cat") in MEANINGS and e["pid"] == 0:  # of all replicas, the first
                action = Action(e["cat"], e["args"]["microbatch"], e["args"]["chunk"])
                event = Event(e["tid"], action, e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000)
                steps.setdefault(e["args"]["step"], []).append(event)
        schedule = schedules.build(said["schedule"], said["stages"], said["microbatches"], said["chunks"])
    except OSError as error:
        raise UserError(f"--trace={path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--trace={path}: not a trace as train.py writes it ({error!r})") from None
    step, events = last_whole(path, schedule, steps)
    begin = min(event.start for event in events)
    events = [Event(e.rank, e.action, e.start - begin, e.end - begin) for e in events]
    kinds = {event.action.kind for event in events}
    cost = {k: fmean(e.end - e.start for e in events if e.action.kind == k) for k in COLOURS if k in kinds}
    if not all(cost.values()):
        raise UserError(f"--trace={path}: has actions that took no time")
    lines = simulate(schedule, cost), schedules.timeline(events, len(schedule.actions))
    means = ", ".join(f"{kind} {cost[kind]:.3g} ms" for kind in cost)
    titles = f"{schedule.name}, ideal: {means}, messages no time", f"{schedule.name}, recorded: step {step}"
    return [Picture(title, schedule, line, notes(line, "ms")) for title, line in zip(titles, lines, strict=True)]


def last_whole(path, schedule, steps):
    """The highest step whose events are the schedule's actions, each once on its rank: (step, events)."""
    wanted = sorted((rank, action) for rank, actions in enumerate(schedule.actions) for action in actions)
    for step in sorted(steps, reverse=True):
        if sorted((event.rank, event.action) for event in steps[step]) == wanted:
            return step, steps[step]
    if not steps:
        raise UserError(f"--trace={path}: has no actions")
    last = max(steps)
    found = {(event.rank, event.action) for event in steps[last]}
    lacks = next((f"lacks {action} on rank {rank}" for rank, action in wanted if (rank, action) not in found), None)
    why = lacks or f"has more than the {len(wanted)} actions of {schedule.name}"
    raise UserError(f"--trace={path}: no step in it is whole; the last, {last}, {why}")


# --- the command line -------------------------------------------------------------------------------------------------


def parse_arguments(arguments):
    """The options; None: what the command line says. Raises UserError."""
    parser = Parser(
        prog="python -m parallel.draw",
        description="Draw pipeline schedules, and count their bubble and the activations they hold.",
        epilog=f"Schedules: {', '.join(schedules.SCHEDULES)}. To add one, see SCHEDULES in parallel/schedules.py.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="SCHEDULE", help="drawn under one another on one time axis")
    add("--stages", type=int, default=4, metavar="P", help="pipeline ranks (default: 4)")
    add("--microbatches", type=int, default=8, metavar="M", help="micro-batches of a step (default: 8)")
    add("--chunks", type=int, metavar="V", help="chunks per rank, of schedules that have them (default: 2)")
    add("--cost", default="", metavar="F:1,B:2,I:1,W:1", help="durations of a stage's actions (these; B: I and W)")
    add("--comm", type=float, default=0.0, metavar="T", help="what a message takes, in the same unit (default: 0)")
    add("--trace", metavar="FILE", help="draw a recorded step instead, under the ideal one")
    add("--svg", metavar="FILE", help="write the drawing there too, for a slide")
    return parser.parse_args(arguments)


def parse_cost(text):
    """ "F:1,W:0.5" -> {kind: duration}; what is not said is 1, and B as much as I and W together."""
    cost = {"F": 1.0, "I": 1.0, "W": 1.0}
    for item in filter(None, text.split(",")):
        kind, _, duration = item.partition(":")
        try:
            cost[kind] = float(duration)
        except ValueError:
            cost[kind] = -1.0
        if kind not in MEANINGS or not 0 < cost[kind] < math.inf:
            raise UserError(f"--cost={text}: {item!r} should be one of F, B, I, W and a positive number, like F:1.5")
    return {"B": cost["I"] + cost["W"]} | cost


def pictures_of(options):
    """The Pictures that are asked for. --chunks is not for a schedule of one chunk beside others of more."""
    if options.trace:
        if options.names:
            raise UserError("--trace says itself which schedule it is of; leave out the name")
        return recorded(options.trace)
    if not options.names:
        raise UserError(f"which schedule? python -m parallel.draw NAME ..., of {', '.join(schedules.SCHEDULES)}")
    shared = options.stages, options.microbatches, parse_cost(options.cost), options.comm
    if not 0 <= options.comm < math.inf:
        raise UserError(f"--comm={options.comm}: should be zero or more")
    chunks = {name: schedules.usual_chunks(name) for name in options.names if name in schedules.SCHEDULES}
    if options.chunks is not None:
        most = max(chunks.values(), default=1)
        chunks = {name: options.chunks if usual > 1 or most == 1 else 1 for name, usual in chunks.items()}
    return [simulated(name, chunks.get(name, 1), *shared) for name in options.names]


def main(arguments=None):
    """Draws in the terminal; in colour if it is one and NO_COLOR is not set (no-color.org)."""
    options = parse_arguments(arguments)
    pictures = pictures_of(options)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(terminal(pictures, shutil.get_terminal_size((120, 0)).columns, colour))
    if options.svg:
        with explained(f"--svg={options.svg}"):
            Path(options.svg).write_text(svg(pictures, "ms" if options.trace else ""), encoding="utf-8")


if __name__ == "__main__":
    exit_on_user_error(main)
