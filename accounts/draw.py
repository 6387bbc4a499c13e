"""Draw schedules, simulated or recorded, in the terminal and as SVG.

python -m accounts.draw 1f1b zb-h1 --stages=4 --microbatches=8 --svg=pipelines.svg
python -m accounts.draw 1f1b pipedream --steps=2   two steps: 1F1B becomes empty between them, PipeDream does not
python -m accounts.draw --trace=trace.json         a step that `train.py --trace` recorded, below its simulation
"""

import json
import math
import shutil
from statistics import fmean
from typing import NamedTuple

from accounts import figures
from accounts.bubbles import FORMULAS, Timeline, by_formula, simulate, timeline
from accounts.figures import KINDS
from accounts.trace import HIDDEN
from errors import UserError, exit_on_user_error, reading
from options import Parser
from parallel import schedules, simulation
from parallel.schedules import Action, Schedule
from parallel.simulation import Event

BUBBLE = """\
bubble X of T: T = longest time from a rank's first action to its last; X = 1 - (mean busy time of a rank) / T
whole step: T = time from the first action of any rank to the last, because in train.py all ranks end a step together"""
WORK = 2**14  # limit: chunks of a drawing, squared or times the micro-batches
VERSIONS = "version: how many updates are in the weights that an action uses; !: other weights than in its forward"


class Picture(NamedTuple):
    """One timeline as a row of boxes per rank."""

    title: str
    schedule: Schedule
    timeline: Timeline
    notes: list  # lines below the picture in the terminal
    versions: dict  # PipeDream: {(rank, F or B): updates in the weights that it uses}; others: empty
    calls: tuple = ()  # recorded communications: (rank, "=" or "#", start, end)

    @property
    def ranks(self):
        return len(self.schedule.actions)

    @property
    def span(self):
        return max([self.timeline.makespan, *(start for *_, start, _ in self.calls)])

    @property
    def later(self):
        """The chunks that are not their rank's first."""
        placement = self.schedule.placement
        return {chunk for chunk, rank in enumerate(placement) if rank in placement[:chunk]}

    def other_weights(self, rank, action):
        forward = action._replace(kind="F")
        return action.kind == "B" and self.versions.get((rank, action)) != self.versions.get((rank, forward))


def terminal(pictures, columns):
    """Return the pictures as text with at most `columns` columns."""
    asynchronous = any(picture.versions for picture in pictures)
    label = max(len("version  ") * asynchronous, *(len(f"rank {p.ranks}  ") for p in pictures))
    scale = columns_per_time(pictures, columns - label)
    kinds = {event.action.kind for picture in pictures for event in picture.timeline.events}
    watched = any(picture.calls for picture in pictures)
    legend = [f"{'|' if kind == 'U' else kind} {meaning}" for kind, (meaning, *_) in KINDS.items() if kind in kinds]
    legend += ["= a communication runs, hidden", "# the rank waits for one"] * watched
    lines = ["   ".join([*legend, "small letter: not the rank's first chunk", ".. idle"])]
    for picture in pictures:
        lines += ["", picture.title]
        for rank in range(picture.ranks):
            boxes, versions = row_of_boxes(picture, rank, scale)
            lines.append(f"rank {rank}".ljust(label) + boxes)
            if picture.versions:
                lines.append("version".ljust(label) + versions)
            if picture.calls:
                lines.append("".ljust(label) + communications(picture, rank, scale))
        lines += picture.notes
    return "\n".join([*lines, "", BUBBLE, *[VERSIONS] * asynchronous])


def columns_per_time(pictures, columns):
    """Return the columns of a unit of time. If possible, the shortest action gets a whole number of columns."""
    events = [event for picture in pictures for event in picture.timeline.events if event.action.kind != "U"]
    most = columns / max(picture.span for picture in pictures)
    if not events or any(picture.calls for picture in pictures):
        return most
    shortest = min(event.end - event.start for event in events if event.end > event.start)
    room = most * shortest
    box = 2 + len(str(max(event.action.microbatch for event in events)))  # a letter, a number, a space
    return min(box, int(room + 1e-6) or room) / shortest


def row_of_boxes(picture, rank, scale):
    """Return two texts with `scale` columns a unit of time: the boxes and their versions."""
    boxes = versions = ""
    for _, action, start, end in (event for event in picture.timeline.events if event.rank == rank):
        begin, stop = max(len(boxes), round(start * scale)), round(end * scale)
        if action.kind == "U":
            versions = versions.ljust(stop - 1) + "|"
        elif stop > begin:
            letter = action.kind.lower() if action.chunk in picture.later else action.kind
            name, width = f"{letter}{action.microbatch}", stop - begin
            box = name.ljust(width - 1, "-") if len(name) <= width else letter
            boxes = boxes.ljust(begin, ".") + box.ljust(width)
            if picture.versions:
                mark = "!" if picture.other_weights(rank, action) else ""
                versions = versions.ljust(begin) + f"{picture.versions[rank, action]}{mark}"
    return boxes.ljust(round(picture.timeline.makespan * scale), "."), versions


def communications(picture, rank, scale):
    """Return a text: where a communication of the rank runs (=), where the rank waits (#)."""
    marks = ["."] * round(picture.span * scale)
    for mark in "=#":
        for _, _, start, end in (call for call in picture.calls if call[:2] == (rank, mark)):
            columns = slice(round(start * scale), min(round(end * scale), len(marks)))
            marks[columns] = mark * len(marks[columns])
    return "".join(marks)


# --- the pictures -----------------------------------------------------------------------------------------------------


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
    return Picture(title, schedule, line, [bubble, peak], versions)


def updated(line, stages, stashing):
    """Return (Timeline, `Picture.versions`) of PipeDream: 1F1B's order without a pause, and an update after each B."""
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


def recorded_pictures(path, window=""):
    """Return Pictures of the last complete step in a trace (`trace.py`): simulated, and recorded.

    In the simulation, actions take the mean time of their kind and messages no time. window: of --window. It has only
    the recorded one.
    """
    with reading(f"--trace={path} --window={window}"):
        schedule, steps, calls = read_trace(path)
        actions = sorted((rank, action) for rank, order in enumerate(schedule.actions) for action in order)
        whole = [step for step in steps if sorted(event[:2] for event in steps[step]) == actions]
        if not whole:
            raise ValueError("no step has each action once")
        step = max(whole)
        begin = min(event.start for event in steps[step])
        events = [Event(*row) for row in cut(steps[step], begin)]
        kinds = sorted({event.action.kind for event in events})
        cost = {kind: fmean(e.end - e.start for e in events if e.action.kind == kind) for kind in kinds}
        simulated, recorded = simulate(schedule, cost), timeline(events, len(schedule.actions))
        calls = cut(calls, begin)
        if window:
            first, last = map(float, window.split(","))
            last = min(last, recorded.makespan)
            if not 0 <= first < last:
                raise ValueError(f"the window should be A,B with 0 <= A < B, in a step of {recorded.makespan:.0f} ms")
    means = ", ".join(f"{kind} {cost[kind]:.3g} ms" for kind in cost)
    title = f"{schedule.name}, ideal: {means}, messages no time"
    ideal = Picture(title, schedule, simulated, notes_of(simulated, "ms"), {})
    title = f"{schedule.name}, recorded: step {step}"
    picture = Picture(title, schedule, recorded, notes_of(recorded, "ms"), {}, calls)
    return [zoomed(picture, first, last)] if window else [ideal, picture]


def cut(rows, begin, end=math.inf):
    """Return the parts of rows (..., start, end) between two times, counted from `begin`."""
    moved = [(*head, max(a, begin) - begin, min(b, end) - begin) for *head, a, b in rows]
    return [row for row in moved if row[-2] < row[-1]]


def zoomed(picture, begin, end):
    """Return the part of a Picture between two times."""
    events = [Event(*row) for row in cut(picture.timeline.events, begin, end)]
    line = picture.timeline._replace(events=events, makespan=end - begin)
    title = f"{picture.title}, {begin:g} to {end:g} ms"
    return picture._replace(title=title, timeline=line, calls=cut(picture.calls, begin, end))


def read_trace(path):
    """Return (Schedule, {step: Events}, `Picture.calls`) of data rank 0 in a trace, in milliseconds."""
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    about, steps, calls = trace["otherData"], {}, []
    sizes = [about.get(name) for name in ("stages", "microbatches", "chunks")]
    for e in (e for e in trace["traceEvents"] if e["pid"] == 0 and "dur" in e):
        start, end = e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000
        if e["cat"] in KINDS:
            action = Action(e["cat"], e["args"]["microbatch"], e["args"]["chunk"])
            steps.setdefault(e["args"]["step"], []).append(Event(e["tid"], action, start, end))
        else:
            calls.append((e["tid"], "=" if e["cat"] == HIDDEN else "#", start, end))
    return simulation.build(about["schedule"], *sizes), steps, calls


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
    add("--steps", type=int, default=1, choices=range(1, 17), metavar="N", help="draw N steps (default: 1)")
    add("--chunks", type=int, default=2, metavar="V", help="chunks per rank of interleaved and zb-v (default: 2)")
    add("--cost", default="1,1,1", metavar="F,I,W", help="durations on a whole stage (default: 1,1,1); B takes I + W")
    add("--comm", type=float, default=0.0, metavar="T", help="time of a message, in the unit of --cost (default: 0)")
    add("--without_stashing", action="store_true", help="also draw pipedream with the latest weights in each backward")
    add("--trace", metavar="FILE", help="draw the last complete step that `train.py --trace=FILE` recorded")
    add("--window", default="", metavar="A,B", help="with --trace: draw only the milliseconds from A to B of the step")
    add("--svg", metavar="FILE", help="also write the pictures to a file")
    return parser.parse_args(arguments)


def pictures_of(options):
    """Return the Pictures that the options ask for. Raises UserError."""
    if options.trace:
        return recorded_pictures(options.trace, options.window)
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
        figures.timelines(options.svg, pictures)


if __name__ == "__main__":
    exit_on_user_error(main)
