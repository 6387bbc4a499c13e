"""Draw schedules, simulated or recorded, in the terminal and as SVG.

    python -m accounts.draw 1f1b zb-h1 --stages=4 --microbatches=8 --svg=pipelines.svg
    python -m accounts.draw --trace=trace.json         a step that `train.py --trace` recorded, below its simulation

A picture shows a timeline (`schedules.simulate`) as one row of boxes per rank. Several pictures share one time axis.
In the terminal, two lines below each picture give the bubble and the peak of activations in flight. Each line ends
with a published formula, if it applies.
"""

import html
import math
import os
import shutil
import sys
from statistics import fmean
from typing import NamedTuple

from errors import Parser, UserError, exit_on_user_error, explained, parse_json, regular, writable
from parallel import schedules
from parallel.schedules import Action, Event, Schedule, Timeline, simulate
from parallel.versions import kept_versions

COLOURS = {
    "F": "#2f6fb7",
    "B": "#1b8049",
    "I": "#0f7c7a",
    "W": "#a86a0c",
    "U": "#b3303f",
}  # legible below white numbers
GREY, IDLE = "#797979", "fill='#808080' opacity='.18'"  # equally visible on a white page and on GitHub's dark page
MEANINGS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "U": "update"}
WIDTH, LEFT, RIGHT, HEIGHT = 900, 50, 64, 18  # pixels of an SVG: smallest width, margins, height of a row
END = "text-anchor='end'"
BUBBLE = (
    "bubble X of T: T = longest time from a rank's first action to its last; X = 1 - (mean busy time of the ranks) / T"
)
LONGEST, MOST = 1e6, 5000  # the largest duration; the most forwards of a picture
LATER_CHUNK = "{}: not the rank's first chunk"
VERSIONS = "version: how many updates are in the weights that an action uses; !: other weights than in its forward"
IN_FLIGHT = "in flight: the most activations that a rank keeps at once; 1 = one micro-batch on a whole stage"


class Picture(NamedTuple):
    """One timeline as a row of boxes per rank."""

    title: str
    schedule: Schedule
    timeline: Timeline
    notes: list  # lines below the picture
    versions: dict  # {(rank, F or B): the version of the weights}; empty if the schedule has no updates

    @property
    def shades(self):
        """{chunk: its index among the chunks of its rank}. A higher index is drawn lighter."""
        placement = self.schedule.placement
        return {chunk: placement[:chunk].count(rank) for chunk, rank in enumerate(placement)}

    def wrong(self, rank, action):
        """Return True if a backward has another version than its forward."""
        return self.versions[rank, action] != self.versions[rank, action._replace(kind="F")]

    @property
    def by_rank(self):
        """The Events of each rank, as a list of lists."""
        rows = [[] for _ in self.schedule.actions]
        for event in self.timeline.events:
            rows[event.rank].append(event)
        return rows


def terminal(pictures, columns, colour):
    """Return the pictures under one another on one time axis, as text of at most `columns` columns a row.

    A box shows the number of its micro-batch if it is wide enough. With `colour`, the colour gives the kind.
    Otherwise a letter gives the kind, a small letter if the action is not in the first chunk of its rank.
    """
    label = len(f"rank {max(len(p.schedule.actions) for p in pictures) - 1}  ")
    label = max(label, len("version  ") if any(picture.versions for picture in pictures) else 0)
    scale, needed = columns_per_time(pictures, columns - label, colour)
    lines = [legend(pictures, colour)]
    for picture in pictures:
        lines += ["", picture.title]
        for rank, events in enumerate(picture.by_rank):
            lines.append(f"rank {rank}".ljust(label) + row(picture, events, scale, colour))
            if picture.versions:
                lines.append("version".ljust(label) + versions_row(picture, events, scale))
        lines += picture.notes
    lines += ["", BUBBLE, *([VERSIONS] if any(picture.versions for picture in pictures) else [])]
    if columns < label + needed:
        needed += label
        lines.append(f"some numbers are left out: use {needed} columns instead of {columns}, or --svg=FILE")
    return "\n".join(lines)


def columns_per_time(pictures, columns, colour):
    """Return (columns per unit of time, columns at which every box has room for its number).

    If possible the shortest action gets a whole number of columns. Then actions of equal length look equal.
    """
    events = [event for picture in pictures for event in picture.timeline.events]
    durations = {event.end - event.start for event in events if event.action.kind != "U"} - {0}
    shortest, total = min(durations), max(picture.timeline.makespan for picture in pictures)
    number = len(str(max(event.action.microbatch for event in events)))
    whole = min(number + 2, int(columns * shortest / total + 1e-6))
    even = all(abs(d / shortest - round(d / shortest)) < 1e-6 for d in durations)
    box = number + (not colour) + (not even)  # a column for the letter, and a column that rounding may take
    scale = whole / shortest if whole and even else min(columns / total, (number + 2) / shortest)
    return scale, math.ceil(total / shortest * box - 1e-6)


def row(picture, events, scale, colour):
    """Return the Events of a rank as text, `scale` columns a unit of time. Actions of 0 columns are left out."""
    text, column, box = "", 0, colour_box if colour else plain_box
    shades = picture.shades
    for event in events:
        start, end = max(column, round(event.start * scale)), round(event.end * scale)
        if end > start:
            text += idle(start - column, colour)
            text += box(event.action, end - start, shades[event.action.chunk])
            column = end
    return text + idle(round(picture.timeline.makespan * scale) - column, colour)


def versions_row(picture, events, scale):
    """Return the versions of a rank's F and B, each below the begin of its box, and a | below each update."""
    text = ""
    for rank, action, start, end in events:
        if action.kind == "U":
            text = text.ljust(round(end * scale) - 1) + "|"
        else:
            text = text.ljust(round(start * scale)) + str(picture.versions[rank, action])
            text += "!" * picture.wrong(rank, action)
    return text


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
    if not edge and action.microbatch % 2:  # no room for an edge: every second box is darker
        ground = tuple(c * 4 // 5 for c in ground)
    dark = palette(tuple(c // 2 for c in ground))
    number = number.center(width - len(edge))
    return f"\x1b[48;5;{palette(ground)};38;5;{dark}m{edge}\x1b[38;5;{palette(ink)}m{number}\x1b[0m"


def shaded(kind, shade):
    """Return the colours (r, g, b) of a box and of its number. Each later chunk of a rank is lighter."""
    light = 1 - 0.55**shade
    ground = tuple(round(c + (255 - c) * light) for c in bytes.fromhex(COLOURS[kind][1:]))
    return ground, (0, 0, 0) if shade else (255, 255, 255)


def palette(rgb):
    """Return the index of the nearest of 216 colours that terminals have: a cube with 6 levels of r, g and b."""
    levels = (0, 95, 135, 175, 215, 255)
    r, g, b = (min(range(6), key=lambda i: abs(levels[i] - c)) for c in rgb)
    return 16 + 36 * r + 6 * g + b


def legend(pictures, colour):
    items = []
    for kind in kinds_in(pictures):
        mark = f"\x1b[48;5;{palette(shaded(kind, 0)[0])}m  \x1b[0m" if colour else kind
        items.append(f"{'|' if kind == 'U' else mark} {MEANINGS[kind]}")
    if several(pictures):
        items.append(LATER_CHUNK.format("lighter" if colour else "small letter"))
    return "   ".join([*items, f"{idle(2, colour)} idle"])


def kinds_in(pictures):
    kinds = {event.action.kind for picture in pictures for event in picture.timeline.events}
    return [kind for kind in COLOURS if kind in kinds]


def several(pictures):
    """Return True if a rank has more than one chunk."""
    return any(max(picture.shades.values()) > 0 for picture in pictures)


def svg(pictures, unit=""):
    """Return the pictures as SVG with a transparent background. unit: the unit of time.

    The width is 900 pixels, which GitHub shows unscaled, or up to 3600 pixels if the numbers need them.
    """
    events = [event for picture in pictures for event in picture.timeline.events]
    shortest = min(e.end - e.start for e in events if e.end > e.start and e.action.kind != "U")
    total = max(picture.timeline.makespan for picture in pictures)
    number = 3 + 5 * len(str(max(event.action.microbatch for event in events)))  # pixels that a number needs
    scale = min(max(WIDTH, LEFT + RIGHT + number * total / shortest), 4 * WIDTH) - LEFT - RIGHT
    width, scale = scale + LEFT + RIGHT, scale / total
    parts, y = svg_legend(pictures), 26
    for picture in pictures:
        line, v = picture.timeline, chunks_per_rank(picture.schedule)
        parts.append(svg_text(LEFT, y + 18, picture.title, "font-weight='bold'"))
        parts.append(svg_text(width - RIGHT, y + 18, f"bubble {line.bubble:.4f} of {line.span:.4g} {unit}", END))
        parts.append(svg_text(width, y + 18, "in flight", END))
        y += 24
        shades = picture.shades
        for rank, (peak, events) in enumerate(zip(line.peak, picture.by_rank, strict=True)):
            parts.append(svg_text(LEFT - 8, y + 13, f"rank {rank}", END))
            parts.append(svg_text(width, y + 13, f"{peak / v:g}", END))
            parts.append(svg_rect(LEFT, y, line.makespan * scale, IDLE) + "<g text-anchor='middle' fill='#ffffff'>")
            parts += [svg_box(event, y, scale, shades) for event in events]
            parts.append("</g>")
            y += HEIGHT + 2
            if picture.versions:
                parts += svg_versions(picture, events, y, scale)
                y += 16
        y += 8
    parts.append(svg_axis(y, scale, total, unit))
    texts = [BUBBLE, IN_FLIGHT, *([VERSIONS] if any(picture.versions for picture in pictures) else [])]
    parts += [svg_text(LEFT, y + 40 + 18 * i, text) for i, text in enumerate(texts)]
    height = y + 32 + 18 * len(texts)
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.6g} {height}' font-size='12' fill='{GREY}'"
    return "\n".join([f"{head} font-family='Helvetica, Arial, sans-serif'>", *parts, "</svg>", ""])


def svg_box(event, y, scale, shades):
    """Return the SVG text of one action: a box at height y, and the number of its micro-batch if there is room."""
    _, (kind, j, chunk), start, end = event
    x, width = LEFT + start * scale, (end - start) * scale
    ground, ink = ("#{:02x}{:02x}{:02x}".format(*rgb) for rgb in shaded(kind, shades[chunk]))
    edge = min(0.6, width / 10)  # leaves a thin line between two boxes
    box = svg_rect(x + edge, y, width - 2 * edge, f"fill='{ground}' rx='2'")
    hint = f"<title>{event.action}: {start:g} to {end:g}</title>"  # a browser shows it under the pointer
    size = min(12, int((width - 3) / (0.6 * len(str(j)))))
    style = f"font-size='{size}'" * (size < 12) + f" fill='{ink}'" * (ink != "#ffffff")
    text = svg_text(x + width / 2, y + HEIGHT / 2 + 4, j, style) if size >= 8 else ""
    return f"<g>{hint}{box}{text}</g>"


def svg_versions(picture, events, y, scale):
    """Return the versions of a rank's F and B below their boxes, and a line for each update.

    A backward's version is red if it is not the version of the forward.
    """
    parts = [svg_text(LEFT - 8, y + 9, "version", f"{END} font-size='11'")]
    for rank, action, start, end in events:
        if action.kind == "U":
            parts.append(svg_rect(LEFT + end * scale - 1.5, y - HEIGHT - 2, 3, f"fill='{COLOURS['U']}'"))
        else:
            style = "text-anchor='middle'" + f" fill='{COLOURS['U']}' font-weight='bold'" * picture.wrong(rank, action)
            text = str(picture.versions[rank, action]) + "!" * picture.wrong(rank, action)
            parts.append(svg_text(LEFT + (start + end) / 2 * scale, y + 9, text, style))
    return parts


def svg_rect(x, y, width, style):
    return f"<rect x='{x:.5g}' y='{y}' width='{width:.5g}' height='{HEIGHT}' {style}/>"


def svg_text(x, y, text, style=""):
    return f"<text x='{x:.5g}' y='{y:g}' {style}".rstrip() + f">{html.escape(str(text).strip())}</text>"


def svg_legend(pictures):
    items = [(f"fill='{COLOURS[kind]}' rx='2'", f"{kind} {MEANINGS[kind]}") for kind in kinds_in(pictures)]
    parts, x = [], LEFT
    for style, meaning in [*items, (IDLE, "idle")]:
        parts += [svg_rect(x, 4, 22, style), svg_text(x + 28, 17, meaning)]
        x += 48 + 6.5 * len(meaning)
    return [*parts, svg_text(x, 17, LATER_CHUNK.format("lighter"))] if several(pictures) else parts


def svg_axis(y, scale, total, unit):
    """Return an axis with at most 13 ticks, at multiples of 1, 2 or 5 times a power of ten."""
    step = 10 ** math.floor(math.log10(total / 12))
    step *= next(n for n in (1, 2, 5, 10) if total / (step * n) <= 12)
    parts = [f"<path d='M{LEFT} {y} h{total * scale:.6g}' stroke='{GREY}'/>"]
    for i in range(int(total / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        parts.append(f"<path d='M{x:.6g} {y} v5' stroke='{GREY}'/>")
        parts.append(svg_text(x, y + 18, f"{i * step:g} {unit}", "text-anchor='middle'"))
    return "\n".join(parts)


# --- the pictures -----------------------------------------------------------------------------------------------------


def simulated(name, chunks, stages, microbatches, cost, comm, per_update=None, stashing=True):
    """Return the Picture of a schedule. cost: durations of a whole stage; each of v chunks takes 1/v of them.

    stashing: False shows PipeDream without old weights: each backward uses the latest weights.
    """
    schedule = schedules.build(name, stages, microbatches, chunks, per_update)
    v = chunks_per_rank(schedule)
    line = simulate(schedule, {kind: duration / v for kind, duration in cost.items()}, comm)
    title = f"{name}: {stages} stages, {microbatches} micro-batches" + (f", {v} chunks per rank" if v > 1 else "")
    formula = schedules.FORMULAS.get(name) if stages > 1 else None
    more = formula_notes(formula, comm, p=stages, m=microbatches, v=v, **cost) if formula else ()
    below = notes(line, "", *more)
    if schedule.versions:
        title += f", {schedules.updates(schedule)} updates"
    if schedule.versions and stashing:
        kept = [kept_versions(schedule, r, [r])[0] for r in range(stages)]
        below.append(f"kept   {' '.join(map(str, kept))} versions of the weights")
    elif schedule.versions:
        title += ", without weight stashing"
    return Picture(title, schedule, line, below, versions_of(schedule, stashing))


def versions_of(schedule, stashing):
    """Return {(rank, action): version of the weights} of all F and B; empty if the schedule has no updates."""
    table = {}
    for rank, versions in enumerate(schedule.versions or ()):
        made = 0
        for action in schedule.actions[rank]:
            made += action.kind == "U"
            table[rank, action] = versions[action.microbatch] if stashing or action.kind == "F" else made
    return table


def chunks_per_rank(schedule):
    """Return how many chunks of one pipeline a rank has (1 for Chimera, whose two chunks are of two pipelines)."""
    return len(schedules.pipelines(schedule)[0]) // len(schedule.actions)


def notes(line, unit="", bubble="", peak=""):
    """Return the two lines below a picture. They end with `bubble` and `peak`, the texts of `formula_notes`."""
    peaks = " ".join(str(n) for n in line.peak)
    return [f"bubble {line.bubble:.4f} of {line.span:.4g} {unit}".rstrip() + bubble, f"peak   {peaks} in flight{peak}"]


def formula_notes(formula, comm, **letters):
    """Return the texts to print after the bubble (empty if its formula does not apply) and after the peak."""
    bubble = ""
    if schedules.by_formula(formula.where, **letters):
        value = schedules.by_formula(formula.bubble, **letters)
        bubble = f"   {formula.bubble} = {value:.4f}" + (" at --comm=0" if comm else "")
    peaks = [str(schedules.by_formula(formula.peak, r=r, **letters)) for r in range(letters["p"])]
    unit = f", each 1/{letters['v']} of a stage's" if letters["v"] > 1 else ""
    return bubble, f"{unit}   {formula.peak} = {' '.join(peaks)}"


def recorded(path):
    """Return two Pictures of the last complete step in a trace that train.py wrote: simulated and recorded.

    The trace is Chrome's JSON, as `trace.py` writes it. "otherData" has schedule, stages, microbatches and chunks. Of
    "traceEvents", only events of category F, B, I, W or U are read. An event has "ts" and "dur" in microseconds, the
    pipeline rank as "tid", and microbatch, chunk and step in "args". The simulation uses the mean duration of each
    kind, and messages take no time. So the pictures differ only where messages take time or actions of one kind take
    different times. Raises UserError if the file is not such a trace, or if no step is complete.
    """
    try:
        schedule, steps = read_trace(path)
        step, events = last_whole(path, schedule, steps)
    except OSError as error:
        raise UserError(f"--trace={path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(f"--trace={path}: not a trace as train.py writes it ({error!r})") from None
    begin = min(event.start for event in events)
    events = [Event(e.rank, e.action, e.start - begin, e.end - begin) for e in events]
    kinds = {event.action.kind for event in events}
    cost = {k: fmean(e.end - e.start for e in events if e.action.kind == k) for k in COLOURS if k in kinds}
    if not all(cost.values()):
        raise UserError(f"--trace={path}: has actions that took no time")
    lines = simulate(schedule, cost), schedules.timeline(events, len(schedule.actions))
    means = ", ".join(f"{kind} {cost[kind]:.3g} ms" for kind in cost)
    titles = f"{schedule.name}, ideal: {means}, messages no time", f"{schedule.name}, recorded: step {step}"
    versions = versions_of(schedule, True)
    return [Picture(title, schedule, x, notes(x, "ms"), versions) for title, x in zip(titles, lines, strict=True)]


def read_trace(path):
    """Return (Schedule, {step: Events}) of a trace. Its Events are those of data rank 0."""
    trace = parse_json(regular(path).read_text(encoding="utf-8"))
    about, steps = trace["otherData"], {}
    for e in trace["traceEvents"]:
        if e["ph"] == "X" and e.get("cat") in MEANINGS and e["pid"] == 0:
            begin, end, step = e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000, e["args"]["step"]
            if type(step) is not int or not 0 <= begin <= end < 1e15:  # 1e15 ms are 30,000 years
                raise ValueError(f"a step or a time that no run has: {e}")
            action = Action(e["cat"], e["args"]["microbatch"], e["args"]["chunk"])
            steps.setdefault(step, []).append(Event(e["tid"], action, begin, end))
    sizes = [about[name] for name in ("stages", "microbatches", "chunks")]
    if not all(type(size) is int for size in sizes) or math.prod(sizes) > MOST:
        raise TypeError(f"sizes that no run has: {about}")
    return schedules.build(about["schedule"], *sizes, about.get("per_update")), steps


def last_whole(path, schedule, steps):
    """Return (step, events) of the last step that has each action of the schedule once, on its rank."""
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
    raise UserError(f"--trace={path}: no step is complete; the last step, {last}, {why}")


# --- the command line -------------------------------------------------------------------------------------------------


def parse_arguments(arguments):
    """Return the options in `arguments`, by default those of the command line. Raises UserError."""
    parser = Parser(
        prog="python -m accounts.draw",
        description="Draw pipeline schedules. Below each, print its bubble and its peak of activations in flight.",
        epilog=f"Schedules: {', '.join(schedules.SCHEDULES)}. To add one, see SCHEDULES in parallel/schedules.py.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="SCHEDULE", help="schedules to draw under one another; example: 1f1b zb-h1")
    stages = "pipeline stages, one on each rank; example: --stages=8 (default: 4)"
    add("--stages", type=int, default=4, metavar="P", help=stages)
    microbatches = "micro-batches in a step; example: --microbatches=16 (default: 8)"
    add("--microbatches", type=int, default=8, metavar="M", help=microbatches)
    chunks = "chunks per rank, for schedules with several; example: interleaved --chunks=4 (default: 2)"
    add("--chunks", type=int, metavar="V", help=chunks)
    cost = "durations of a stage's forward, backward, input gradient and weight gradient, in any unit of time"
    cost += "; example: --cost=F:1,I:1.5,W:0.5 (default: F, I and W take 1, and B takes I + W)"
    add("--cost", default="", metavar="F:1,B:2,I:1,W:1", help=cost)
    comm = "time that a message takes, in the unit of --cost; example: --comm=0.1 (default: 0)"
    add("--comm", type=float, default=0.0, metavar="T", help=comm)
    per_update = "micro-batches of an update, for pipedream-2bw; example: --per_update=8 (default: the stages)"
    add("--per_update", type=int, metavar="M", help=per_update)
    without = "draw pipedream as it would be without old weights: each backward uses the latest weights"
    add("--without_stashing", action="store_true", help=without)
    trace = "draw the last complete step that `train.py --trace=FILE` recorded, below its simulation"
    add("--trace", metavar="FILE", help=f"{trace}; example: --trace=trace.json")
    add("--svg", metavar="FILE", help="also write the pictures to a file, as SVG; example: --svg=pipelines.svg")
    return parser.parse_args(arguments)


def parse_cost(text):
    """Return {kind: duration} of a text such as "F:1,W:0.5". The default is 1 for F, I and W, and I + W for B."""
    cost = {"F": 1.0, "I": 1.0, "W": 1.0}
    for item in filter(None, text.split(",")):
        kind, _, duration = item.partition(":")
        try:
            cost[kind] = float(duration)
        except ValueError:
            cost[kind] = -1.0
        if kind not in MEANINGS or not 1 / LONGEST <= cost[kind] <= LONGEST:
            should = f"one of F, B, I, W and a positive number, like F:1.5 (from {1 / LONGEST:g} to {LONGEST:g})"
            raise UserError(f"--cost={text}: {item!r} should be {should}")
    return {"B": cost["I"] + cost["W"]} | cost


def pictures_of(options):
    """Return the Pictures that the options ask for. Raises UserError.

    If some of the schedules have several chunks per rank, --chunks applies only to these.
    """
    if options.trace:
        if options.names:
            raise UserError("--trace: the file names its schedule; leave out the name")
        return recorded(options.trace)
    if not options.names:
        raise UserError(
            f"which schedule? python -m accounts.draw NAME ...; a NAME is one of {', '.join(schedules.SCHEDULES)}"
        )
    shared = options.stages, options.microbatches, parse_cost(options.cost), options.comm
    if not 0 <= options.comm <= LONGEST:
        raise UserError(f"--comm={options.comm}: should be zero or more, at most {LONGEST:g}")
    chunks = {name: schedules.usual_chunks(name) for name in options.names if name in schedules.SCHEDULES}
    if options.chunks is not None:
        most = max(chunks.values(), default=1)
        chunks = {name: options.chunks if usual > 1 or most == 1 else 1 for name, usual in chunks.items()}
    for name in options.names:
        boxes = options.stages * options.microbatches * chunks.get(name, 1)
        if boxes > MOST:
            sizes = f"--stages={options.stages} --microbatches={options.microbatches}"
            raise UserError(f"{sizes}: {name} has {boxes:,} forwards, but a picture has at most {MOST:,}")
    if options.without_stashing and (other := set(options.names) - {"pipedream"}):
        raise UserError(f"--without_stashing: only pipedream has stashed weights to leave out, not {min(other)}")
    if options.per_update is not None and "pipedream-2bw" not in options.names:
        raise UserError(f"--per_update={options.per_update}: only pipedream-2bw has it")
    sizes = {"pipedream-2bw": options.per_update}
    drawn = [simulated(name, chunks.get(name, 1), *shared, sizes.get(name)) for name in options.names]
    if options.without_stashing:
        drawn.append(simulated("pipedream", 1, *shared, stashing=False))
    return drawn


def main(arguments=None):
    """Print the pictures, in colour on a terminal if NO_COLOR is not set (no-color.org), and write the SVG."""
    options = parse_arguments(arguments)
    pictures = pictures_of(options)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(terminal(pictures, min(shutil.get_terminal_size((120, 0)).columns, 10_000), colour))
    if options.svg:
        with explained(f"--svg={options.svg}"):
            writable(options.svg).write_text(svg(pictures, "ms" if options.trace else ""), encoding="utf-8")


if __name__ == "__main__":
    exit_on_user_error(main)
