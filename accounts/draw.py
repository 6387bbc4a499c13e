"""Draw schedules, simulated or recorded, and the bars of ZeRO, in the terminal and as SVG.

python -m accounts.draw 1f1b zb-h1 --stages=4 --microbatches=8 --svg=pipelines.svg
python -m accounts.draw 1f1b pipedream --steps=2   two steps: 1F1B becomes empty between them, PipeDream does not
python -m accounts.draw --trace=trace.json         a step that `train.py --trace` recorded
python -m accounts.draw --zero=16                  the model states of GPT-3 13B on one of 16 data ranks

Everything drawn is a row of boxes: `painted` writes a row as text, `svg` as rectangles.
"""

import html
import json
import math
import shutil
from typing import NamedTuple

from accounts.bubbles import FORMULAS, by_formula, simulate, timeline
from accounts.trace import HIDDEN
from accounts.zero_states import model_states
from errors import UserError, exit_on_user_error, reading
from options import Parser, within
from parallel import schedules, simulation
from parallel.schedules import Action
from parallel.simulation import Event

BUBBLE = """\
bubble X of T: T = longest time from a rank's first action to its last; X = 1 - (mean busy time of a rank) / T
whole step: T = time from the first action of any rank to the last, because in train.py all ranks end a step together"""
WORK = 2**14  # limit: chunks of a drawing, squared or times the micro-batches
VERSIONS = "version: how many updates are in the weights that an action uses; !: other weights than in its forward"
KINDS = {  # of a box: its meaning, and its colour (Okabe and Ito's)
    "F": ("forward", "#56b4e9"),
    "B": ("backward", "#009e73"),
    "I": ("input gradient", "#cc79a7"),
    "W": ("weight gradient", "#e69f00"),
    "U": ("update", "black"),
    "!": ("backward with other weights than its forward", "#d55e00"),
    "=": ("a communication runs, hidden", "#bbbbbb"),
    "#": ("the rank waits for one", "#555555"),
    "parameters": ("parameters", "#56b4e9"),
    "gradients": ("gradients", "#009e73"),
    "master weights": ("master weights", "#cc79a7"),
    "moments": ("moments", "#e69f00"),
}
PARAMETERS = 12_853_626_880  # of configs/gpt3_13b.py


class Box(NamedTuple):
    start: float
    end: float
    text: str
    kind: str  # of KINDS
    pale: bool = False  # an action in a chunk that is not its rank's first


class Picture(NamedTuple):
    """Rows of boxes, for example one timeline."""

    title: str
    rows: list  # (label, Boxes, what is between them in the terminal)
    length: float  # of the axis
    notes: list  # lines below the rows
    recorded: bool = False


def terminal(pictures, columns):
    """Return the pictures as text with at most `columns` columns."""
    labels = [label for picture in pictures for label, *_ in picture.rows]
    width = 2 + max(map(len, labels))
    scale = columns_per_unit(pictures, columns - width)
    used, texts = [kind for kind in KINDS if kind in kinds_of(pictures)], []
    legend = [f"{'|' if kind == 'U' else kind} {KINDS[kind][0]}" for kind in used if len(kind) == 1 and kind != "!"]
    if legend:
        texts.append("   ".join([*legend, "small letter: not the rank's first chunk", ".. idle"]))
    for picture in pictures:
        texts += ["", picture.title]
        for label, boxes, between in picture.rows:
            texts.append(label.ljust(width) + painted(boxes, between, round(picture.length * scale), scale))
        texts += picture.notes
    return "\n".join([*texts, *["", BUBBLE] * bool(legend), *[VERSIONS] * ("version" in labels)])


def kinds_of(pictures):
    return {box.kind for picture in pictures for _, boxes, _ in picture.rows for box in boxes}


def columns_per_unit(pictures, columns):
    """Return the columns of a unit of time. If possible, the shortest action gets a whole number of columns."""
    boxes = [box for picture in pictures for _, row, _ in picture.rows for box in row if box.end > box.start]
    most = columns / max(picture.length for picture in pictures)
    if not boxes or any(picture.recorded for picture in pictures):
        return most
    shortest = min(box.end - box.start for box in boxes)
    room = most * shortest
    wanted = 1 + max(len(box.text) for box in boxes)
    return min(wanted, int(room + 1e-6) or room) / shortest


def painted(boxes, between, columns, scale):
    """Return a row of boxes as text, with `scale` columns a unit."""
    cells = [between] * columns
    for box in boxes:
        stop = min(round(box.end * scale), columns)
        begin = stop - 1 if box.kind == "U" else round(box.start * scale)
        width = max(0, stop - begin)
        text = box.text if len(box.text) <= width else box.text[:1]
        fill = box.kind if box.kind in "=#" else " " if between == " " else "-"
        last = fill if fill in "=#" else " "
        cells[begin : begin + width] = text.ljust(width - 1, fill).ljust(width, last)[:width]
    return "".join(cells).rstrip() if between == " " else "".join(cells)


def svg(path, pictures):
    """Write the pictures below one another, on one axis."""
    shapes, y, scale = [], 30, 880 / max(picture.length for picture in pictures)
    left = 10 + 6 * max(len(label) for picture in pictures for label, *_ in picture.rows)

    def write(x, text, look=""):
        if text:
            shapes.append(f'<text x="{x:.1f}" y="{y}" {look}>{html.escape(text)}</text>')

    def rectangle(x, width, look):
        shapes.append(f'<rect x="{x:.1f}" y="{y - 11}" width="{width:.1f}" height="14" {look}/>')

    for i, kind in enumerate(kind for kind in KINDS if kind in kinds_of(pictures)):
        meaning, colour = KINDS[kind]
        rectangle(150 * i, 12, f'fill="{colour}"')
        write(150 * i + 16, meaning)
    for picture in pictures:
        y += 26
        write(0, picture.title, 'font-weight="bold"')
        for note in picture.notes:
            y += 14
            write(0, note)
        for label, boxes, between in picture.rows:
            y += 17 * (between != " ")
            write(0, label * (between != " "))
            rectangle(left, picture.length * scale * (between != " "), 'fill="#eeeeee"')
            for box in (box for box in boxes if between != " " or box.kind == "U"):
                x, width = left + box.start * scale, max(1.0, (box.end - box.start) * scale - 1)
                rectangle(x, width, f'fill="{KINDS[box.kind][1]}" opacity="{0.5 if box.pale else 1}"')
                squeezed = f'textLength="{width - 3:.1f}" lengthAdjust="spacingAndGlyphs"'
                look = squeezed if width < 7 * len(box.text) + 3 else ""
                write(x + 2, box.text * (width > 5 * len(box.text)), look)
    size = f'width="{left + 900}" height="{y + 20}" font-family="sans-serif" font-size="10"'
    text = "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *shapes, "</svg>\n"])
    with reading(f"--svg={path}"), open(path, "w", encoding="utf-8") as file:
        file.write(text)


# --- the pictures -----------------------------------------------------------------------------------------------------


def picture(title, schedule, line, notes, versions=None, calls=None):
    """Return the Picture of a Timeline.

    versions: of PipeDream, {(rank, F or B): updates in the weights that it uses}. calls: recorded communications, as
    (rank, "=" or "#", start, end).
    """
    rows, versions, placement = [], versions or {}, schedule.placement
    later = {chunk for chunk, rank in enumerate(placement) if rank in placement[:chunk]}
    for rank in range(len(schedule.actions)):
        boxes, below = [], []
        for _, action, start, end in (event for event in line.events if event.rank == rank):
            kind, j, chunk = action
            version, first = (versions.get((rank, a)) for a in (action, action._replace(kind="F")))
            other = kind == "B" and version != first
            if kind == "U":
                below.append(Box(start, end, "|", "U"))
                continue
            letter = kind.lower() if chunk in later else kind
            boxes.append(Box(start, end, f"{letter}{j}", "!" if other else kind, chunk in later))
            below.append(Box(start, end, f"{version}!" if other else f"{version}", kind))
        rows.append((f"rank {rank}", boxes, "."))
        if versions:
            rows.append(("version", below, " "))
        if calls is not None:
            rows.append(("", [Box(a, b, "", mark) for who, mark, a, b in calls if who == rank], "."))
    length = max([line.makespan, *(start for *_, start, _ in calls or ())])
    return Picture(title, rows, length, notes, calls is not None)


def simulated_picture(name, chunks, stages, microbatches, cost, comm, steps=1, stashing=True):
    """Return the Picture of a schedule. cost: durations of a whole stage; each of v chunks takes 1/v of them.

    steps: all ranks end a step together, but PipeDream runs the micro-batches of all steps without a pause.
    stashing=False: in PipeDream each backward uses the latest weights.
    """
    asynchronous, versions = name == "pipedream", {}
    if asynchronous:
        microbatches, steps = microbatches * steps, 1
    schedule = simulation.build("1f1b" if asynchronous else name, stages, microbatches, chunks)
    v = chunks_per_rank(schedule)
    step = simulate(schedule, {kind: duration / v for kind, duration in cost.items()}, comm)
    line = repeated(step, microbatches, steps, stages)
    if asynchronous:
        line, versions = updated(line, stages, stashing)
    title = f"{name}: {stages} stages, {microbatches} micro-batches" + (f", {v} chunks per rank" if v > 1 else "")
    title += f", {steps} steps" if steps > 1 else ""
    bubble, peak = notes_of(line)
    peak += f", each 1/{v} of a stage's" if v > 1 else ""
    if stages > 1 and (formula := FORMULAS.get("1f1b" if asynchronous else name)):
        letters = dict(p=stages, m=microbatches, v=v, **cost)
        if comm == 0 and steps == 1 and by_formula(formula.where, **letters):  # a formula is of one step
            bubble += f" | {formula.bubble} = {by_formula(formula.bubble, **letters):.4f}"
        peaks = " ".join(str(by_formula(formula.peak, r=r, **letters)) for r in range(stages))
        peak += f" | {formula.peak} = {peaks}"
    if asynchronous:
        title += f", {microbatches} updates" + ("" if stashing else ", without weight stashing")
    return picture(title, schedule, line, [bubble, peak], versions)


def updated(line, stages, stashing):
    """Return (Timeline, `versions` of `picture`) of PipeDream: 1F1B's order without a pause, an update after each B."""
    events, versions = [], {}
    for event in line.events:
        rank, (kind, j, chunk), _, end = event
        versions[rank, event.action] = max(j - (stages - 1 - rank), 0) if stashing or kind == "F" else j
        events += [event, Event(rank, Action("U", j, chunk), end, end)] if kind == "B" else [event]
    return line._replace(events=events), versions


def repeated(line, microbatches, steps, ranks):
    """Return the Timeline of several steps, one after another. line: that of one step."""
    events = []
    for i in range(steps):
        for rank, action, start, end in line.events:
            action = action._replace(microbatch=action.microbatch + i * microbatches)
            events.append(Event(rank, action, start + i * line.makespan, end + i * line.makespan))
    return timeline(events, ranks)


def chunks_per_rank(schedule):
    """Return how many chunks a rank has in one pipeline: 1 for Chimera, which has two."""
    return len(schedules.pipelines(schedule)[0]) // len(schedule.actions)


def notes_of(line, unit=""):
    """Return the lines of the bubble and of the peak. The whole step's bubble stands only if it is larger."""
    peaks = " ".join(map(str, line.peak))
    bubble = f"bubble {line.bubble:.4f} of {line.span:.4g} {unit}".rstrip()
    if line.step_bubble - line.bubble > 1e-4:
        bubble += f" | whole step: {line.step_bubble:.4f} of {line.makespan:.4g} {unit}".rstrip()
    return [bubble, f"peak   {peaks} in flight"]


def recorded_picture(path, window=""):
    """Return the Picture of the last complete step in a trace (`trace.py`), or of a window of it."""
    with reading(f"--trace={path} --window={window}"):
        schedule, steps, calls = read_trace(path)
        actions = sorted((rank, action) for rank, order in enumerate(schedule.actions) for action in order)
        whole = [step for step in steps if sorted(event[:2] for event in steps[step]) == actions]
        if not whole:
            raise ValueError("no step has each action once")
        events, ranks = steps[max(whole)], len(schedule.actions)
        begin, end = min(event.start for event in events), max(event.end for event in events)
        recorded = timeline(cut(events, begin), ranks)
        title, notes = f"{schedule.name}, recorded: step {max(whole)}", notes_of(recorded, "ms")
        if not window:
            return picture(title, schedule, recorded, notes, calls=cut(calls, begin))
        first, last = map(float, window.split(","))
        last = min(last, end - begin)
        if not 0 <= first < last:
            raise ValueError(f"the window should be A,B with 0 <= A < B, in a step of {end - begin:.0f} ms")
    events, calls = (cut(rows, begin + first, begin + last) for rows in (events, calls))
    part = recorded._replace(events=events, makespan=last - first)
    return picture(f"{title}, {first:g} to {last:g} ms", schedule, part, notes, calls=calls)


def cut(rows, begin, end=math.inf):
    """Return the parts of rows (..., start, end) between two times, counted from `begin`."""
    moved = [(*head, max(a, begin) - begin, min(b, end) - begin) for *head, a, b in rows]
    return [Event(*row) for row in moved if row[-2] < row[-1]]


def read_trace(path):
    """Return (Schedule, {step: Events}, `calls` of `picture`) of data rank 0 in a trace, in milliseconds."""
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    about, steps, calls = trace["otherData"], {}, []
    sizes = [about.get(name) for name in ("stages", "microbatches", "chunks")]
    for e in (e for e in trace["traceEvents"] if e["pid"] == 0 and "dur" in e):
        start, end = e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000
        if e["cat"] in "FBIW":
            action = Action(e["cat"], e["args"]["microbatch"], e["args"]["chunk"])
            steps.setdefault(e["args"]["step"], []).append(Event(e["tid"], action, start, end))
        else:
            calls.append((e["tid"], "=" if e["cat"] == HIDDEN else "#", start, end))
    return simulation.build(about["schedule"], *sizes), steps, sorted(calls, key=lambda call: call[1] == "#")


def zero_picture(n):
    """Return the Picture of ZeRO 0 to 3: GB of the model states on one of n ranks."""
    rows = []
    for stage in range(4):
        boxes, at = [], 0.0
        for part, size in model_states(PARAMETERS, n, stage).items():
            end = at + float(size) / 1e9
            boxes.append(Box(at, end, f"{part} {end - at:.1f}", part))
            at = end
        rows.append((f"ZeRO-{stage} {at:6.1f} GB", boxes, "."))
    title = f"GB of a rank: {PARAMETERS:,} parameters, dp={n}, bf16, AdamW (parameters, gradients, masters, moments)"
    return Picture(title, rows, max(boxes[-1].end for _, boxes, _ in rows), [])


# --- the command line -------------------------------------------------------------------------------------------------


def parse_arguments(arguments):
    """--cost stays text: `pictures_of` reads it, and checks it together with --comm."""
    parser = Parser(prog="python -m accounts.draw", allow_abbrev=False)
    parser.description = "Draw pipeline schedules. Below each, print its bubble and its peak of activations in flight."
    parser.epilog = (
        f"Schedules: {', '.join(schedules.SCHEDULES)}, pipedream. To add one: SCHEDULES in parallel/schedules.py."
    )
    add = parser.add_argument
    add("names", nargs="*", default=["1f1b"], metavar="SCHEDULE", help="drawn under one another (default: 1f1b)")
    add("--stages", type=int, default=4, metavar="P", help="pipeline stages, one on each rank (default: 4)")
    add("--microbatches", type=int, default=8, metavar="M", help="micro-batches in a step (default: 8)")
    add("--steps", type=within(1, 16), default=1, metavar="N", help="draw N steps (default: 1)")
    add("--chunks", type=int, default=2, metavar="V", help="chunks per rank of interleaved and zb-v (default: 2)")
    add("--cost", default="1,1,1", metavar="F,I,W", help="durations on a whole stage (default: 1,1,1); B takes I + W")
    add("--comm", type=float, default=0.0, metavar="T", help="time of a message, in the unit of --cost (default: 0)")
    add("--without_stashing", action="store_true", help="also draw pipedream with the latest weights in each backward")
    add("--zero", type=within(1, 4096), metavar="N", help="draw only ZeRO 0 to 3 on N data ranks")
    add("--trace", metavar="FILE", help="draw the last complete step that `train.py --trace=FILE` recorded")
    add("--window", default="", metavar="A,B", help="with --trace: draw only the milliseconds from A to B of the step")
    add("--svg", metavar="FILE", help="also write the pictures to a file")
    return parser.parse_args(arguments)


def pictures_of(options):
    """Return the Pictures that the options ask for. Raises UserError."""
    if options.zero:
        return [zero_picture(options.zero)]
    if options.window and not options.trace:
        raise UserError(f"--window={options.window}: needs --trace")
    if options.trace:
        return [recorded_picture(options.trace, options.window)]
    if (parts := options.stages * options.chunks) * max(parts, options.microbatches * options.steps) > WORK:
        sizes = "stages", "microbatches", "steps", "chunks"
        raise UserError(f"{' '.join(f'--{name}={getattr(options, name)}' for name in sizes)}: too many")
    with reading(f"--cost={options.cost} --comm={options.comm}: should be like 1,1.5,0.5 and 0.2"):
        F, I, W = map(float, options.cost.split(","))
        if not (min(F, I, W) > 0 <= options.comm and F + I + W + options.comm < 1e9 * min(F, I, W)):
            raise ValueError("a duration is not positive, or 1e9 times another")
    cost = {"F": F, "B": I + W, "I": I, "W": W}
    shared = options.stages, options.microbatches, cost, options.comm, options.steps
    pictures = []
    for name in options.names:
        several = name in schedules.SCHEDULES and schedules.usual_chunks(name) > 1
        pictures.append(simulated_picture(name, options.chunks if several else 1, *shared))
    if options.without_stashing:
        pictures.append(simulated_picture("pipedream", 1, *shared, stashing=False))
    return pictures


def main(arguments=None):
    """Print the pictures, as wide as the terminal (120 columns in a pipe)."""
    options = parse_arguments(arguments)
    pictures = pictures_of(options)
    print(terminal(pictures, shutil.get_terminal_size((120, 0)).columns))
    if options.svg:
        svg(options.svg, pictures)


if __name__ == "__main__":
    exit_on_user_error(main)
