"""Pipeline schedules: which rank computes what, in which order (slide "パイプライン並列").

The model is cut into stages, one per rank, and the batch into micro-batches that follow one another through them.
While the first is on its way down and the last on its way up, ranks have nothing to do: the bubble. And what has gone
forward but not yet backward is in flight, and fills memory. A schedule trades the two. It is nothing but the order in
which each rank works, a list of actions per rank, made by one of the functions below. Four ranks, eight micro-batches,
and a backward as long as two forwards, as `python -m parallel.draw 1f1b` draws it (F forward, B backward, . idle):

    rank 0  F0 F1 F2 F3 ..................B0--- F4 B1--- F5 B2--- F6 B3--- F7 B4--- ...B5--- ...B6--- ...B7---
    rank 1  ...F0 F1 F2 ............B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5--- ...B6--- ...B7--- ......
    rank 2  ......F0 F1 ......B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6--- ...B7--- ............
    rank 3  .........F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7--- ..................

                   bubble                                        in flight on rank r      costs
    gpipe          (p-1) / (m+p-1)                               m
    1f1b           (p-1) / (m+p-1)                               p-r
    interleaved    (p-1) / (vm+p-1)                              p + (p-2r-1)/v           v times the messages, and more
    zb-h1          (p-1)(F+I-W) / (m(F+I+W) + (p-1)(F+I-W))      p                        gradients kept until W
    zb-h2          (p-1)(F+I-2W) / (m(F+I+W) + (p-1)(F+I-2W))    2p-1                     gradients kept until W
    zb-v           (p-1)(I-W) / (m(F+I+W) + (p-1)(I-W))          p                        twice the messages; as zb-h1
    chimera        (p-2) / (2m+p-2)  where F = B                 p/2+1 .. p               parameters twice

p stages, m micro-batches, v chunks per rank; F, I, W the durations of forward, input and weight gradient of a stage; in
flight counted in stages' activations, where m is large enough (and for zb-h1 and zb-h2 W <= F, I; for zb-v also
F <= I: FORMULAS, below, says it exactly). Each micro-batch sends bsh elements forward and bsh
backward over every boundary between ranks.

A schedule is data, so the same lists are checked, simulated, drawn (`draw.py`) and executed (`pipeline.py`). Below:
the schedules; what makes one right; how long it takes; who sends what when, without a deadlock; what the papers say.
"""

from itertools import zip_longest
from typing import NamedTuple

from errors import UserError, exit_on_user_error

# --- what a schedule is -----------------------------------------------------------------------------------------------


class Action(NamedTuple):
    """What a rank does next, with one micro-batch in one chunk of the model."""

    kind: str  # F forward; B backward; or in its place I, the gradient of the input, and later W, of the weights
    microbatch: int  # 0 .. m-1
    chunk: int  # of all chunks, over all ranks

    def __str__(self):
        return f"{self.kind} of micro-batch {self.microbatch}, chunk {self.chunk}"


class Schedule(NamedTuple):
    """Who does what in which order: plain data. Ranks, chunks and micro-batches count from 0."""

    name: str
    parts: list  # parts[chunk]: which consecutive part of the model a chunk holds; 0 begins a pipeline
    placement: list  # placement[chunk]: its rank
    actions: list  # actions[rank]: its Actions, in the order in which it runs them

    @property
    def microbatches(self):
        return 1 + max(action.microbatch for actions in self.actions for action in actions)


def pipelines(schedule):
    """The chunks of each pipeline, in the order of the model: [[0 .. p-1]], for Chimera [[0 .. p-1], [p .. 2p-1]]."""
    starts = [chunk for chunk, part in enumerate(schedule.parts) if part == 0]
    return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(schedule.parts)], strict=True)]


def upstream(schedule, chunk):
    """The chunk whose output `chunk` reads, and to which it sends its gradient; None where a pipeline begins."""
    return chunk - 1 if schedule.parts[chunk] > 0 else None


def downstream(schedule, chunk):
    """The chunk that reads the output of `chunk`; None where a pipeline ends, in the loss."""
    return chunk + 1 if chunk + 1 < len(schedule.parts) and schedule.parts[chunk + 1] > 0 else None


def forward_only(schedule):
    """A validation as a Schedule: one micro-batch forward through the first pipeline of `schedule`."""
    actions = [[] for _ in schedule.actions]
    for chunk in pipelines(schedule)[0]:
        actions[schedule.placement[chunk]].append(Action("F", 0, chunk))
    return schedule._replace(name=f"{schedule.name}, forward only", actions=actions)


def routes(schedule):
    """Which pipeline each micro-batch takes, {micro-batch: its chunks}: that in which its actions are.

    Raises UserError for a micro-batch that has actions in two.
    """
    pipeline_of = {chunk: pipeline for pipeline in pipelines(schedule) for chunk in pipeline}
    taken = {}
    for actions in schedule.actions:
        for _, j, chunk in actions:
            if chunk not in taken.setdefault(j, pipeline_of[chunk]):
                raise UserError(
                    f"{schedule.name}: micro-batch {j} has actions in chunk {taken[j][0]}'s pipeline and in chunk "
                    f"{pipeline_of[chunk][0]}'s; each micro-batch takes one"
                )
    return taken


# --- the schedules ----------------------------------------------------------------------------------------------------


def gpipe(stages, microbatches, chunks=1):
    """GPipe: all forwards, then all backwards, with all m in flight in between. Huang et al., arXiv 1811.06965."""
    return straight("gpipe", chunks, [each("F", microbatches, r) + each("B", microbatches, r) for r in range(stages)])


def one_f_one_b(stages, microbatches, chunks=1):
    """1F1B, also PipeDream-flush: a backward as soon as there is one, so that at most p - rank are in flight.

    Narayanan et al., arXiv 2006.09503 (PipeDream-Flush), and 2104.04473, section 2.2.1. (The slide's PipeDream, arXiv
    1806.03377, is asynchronous: it does not wait for the step's end, and so needs several versions of the weights.)
    """
    actions = []
    for rank in range(stages):
        F, B = each("F", microbatches, rank), each("B", microbatches, rank)
        warmup = stages - 1 - rank  # the first backward has to come back from as many ranks
        actions.append(F[:warmup] + alternate(F[warmup:], B))
    return straight("1f1b", chunks, actions)


def interleaved(stages, microbatches, chunks=2):
    """Interleaved 1F1B: each rank holds `chunks` slices of the model, and the bubble shrinks by that factor.

    Rank r holds chunks r, p + r, 2p + r ... (the slide has two of them): a micro-batch goes round all ranks `chunks`
    times. Each rank takes p micro-batches through one chunk, then the same p through its next. Narayanan et al., arXiv
    2104.04473, section 2.2.2. Raises UserError where m is not a multiple of p, or several ranks have one chunk each
    (that is 1f1b).
    """
    p, v = stages, chunks
    if v < 2 and p > 1:
        raise UserError(f"chunks={v}: interleaved wants 2 or more chunks per rank (with one it would be 1f1b)")
    if over := microbatches % p:
        near = " or ".join(str(m) for m in (microbatches - over, microbatches - over + p) if m)
        raise UserError(f"microbatches={microbatches}: interleaved wants a multiple of stages={p}, such as {near}")
    actions = []
    for rank in range(p):
        F, B = [], []
        for first in range(0, microbatches, p):
            group = range(first, first + p)
            F += [Action("F", j, c * p + rank) for c in range(v) for j in group]
            B += [Action("B", j, c * p + rank) for c in reversed(range(v)) for j in group]
        # The first group through all chunks but the last; then what the last chunk's way down and up again takes.
        warmup = (v - 1) * p + 2 * (p - 1 - rank)
        actions.append(F[:warmup] + alternate(F[warmup:], B))
    return Schedule("interleaved", list(range(v * p)), [c % p for c in range(v * p)], actions)


def zb_h1(stages, microbatches, chunks=1):
    """ZB-H1: 1F1B with the backward in two, the weight gradients put where ranks would be idle, in 1F1B's memory.

    The rank above waits for I only, so W can come when there is nothing better to do: on rank r, r micro-batches later.
    Then every rank has p in flight, as 1F1B's rank 0 has. Qi et al., arXiv 2401.10241, section 2.1, figure 3.
    """
    return straight("zb-h1", chunks, zero_bubble(stages, microbatches, 1))


def zb_h2(stages, microbatches, chunks=1):
    """ZB-H2: with twice the warm-up and twice the delay no bubble is left where F, I and W take the same time.

    From m = 2p-1 on, and for 2p-1 in flight. The ranks still begin and end one after the other: that is no bubble if
    nothing makes them wait for one another between steps. Qi et al., arXiv 2401.10241, section 2.2, figure 3.
    """
    return straight("zb-h2", chunks, zero_bubble(stages, microbatches, 2))


def zero_bubble(stages, microbatches, factor):
    """The lists of both: `factor` times 1F1B's warm-up, W `factor` * rank micro-batches after its I."""
    actions = []
    for rank in range(stages):
        F, I, W = (each(kind, microbatches, rank) for kind in "FIW")
        warmup, delay = factor * (stages - 1 - rank), factor * rank
        actions.append(F[:warmup] + alternate(F[warmup:], I, [None] * delay + W))
    return actions


def zb_v(stages, microbatches, chunks=2):
    """ZB-V: no larger bubble than ZB-H2's in the memory of ZB-H1, for twice the messages.

    Rank r holds a slice of the model on the way down (chunk r) and one on the way up (chunk 2p-1-r): a V. Rank 0 thus
    has both ends, its first backward follows its forward at once, and all ranks come to hold the same. They work in
    turns. In turn k, of those micro-batches that there are, the way up has F of k, I and W of k-r; the way down F of
    p-r+k, I and W of k-p+1. At first the way down goes ahead with F, while a rank would wait for the first to come up;
    at the end I goes before W, because others wait for it. No bubble is left where F, I and W take the same time and
    m >= 2p-1 (fewer than p micro-batches are the first of p). Qi et al., arXiv 2401.10241 (but not in the conference's
    version of it) and 2405.15362 (V-ZB). Raises UserError for another number of chunks.
    """
    p, m = stages, max(stages, microbatches)
    if p == chunks == 1:  # nowhere to turn
        return straight("zb-v", chunks, zero_bubble(p, microbatches, 1))
    if chunks != 2:
        raise UserError(f"chunks={chunks}: zb-v wants 2 per rank, one on the way down and one on the way up")
    actions = []
    for rank in range(p):
        F, I, W = (each(kind, m, rank) for kind in "FIW")  # on the way down
        f, i, w = (each(kind, m, 2 * p - 1 - rank) for kind in "FIW")  # on the way up
        ahead, pause = 2 * (p - rank) - 1, [None]
        turns = alternate(
            f,
            pause * rank + i,
            pause * rank + w[: m - rank],
            F[ahead : ahead + rank] + pause * (p - 1 - rank) + F[ahead + rank :],
            pause * (p - 1) + I,
            pause * (p - 1) + W[: m - p] + pause * rank + w[m - rank :] + W[m - p :],
        )
        actions.append([action for action in F[:ahead] + turns if action.microbatch < microbatches])
    return Schedule("zb-v", list(range(2 * p)), [*range(p), *reversed(range(p))], actions)


def chimera(stages, microbatches, chunks=1):
    """Chimera: two pipelines through the same ranks, one down and one up, each filling the other's bubble.

    Rank r holds stage r of the down pipeline (chunk r) and stage p-1-r of the up pipeline (chunk 2p-1-r): twice the
    parameters, whose gradients are summed at the end. Even micro-batches go down, odd ones up. Let F and B take a slot
    of time each: then, of p micro-batches, the k-th of a direction has F in slot stage + 2k and B in 2p-1 - stage + 2k.
    As p is even, the two directions never want the same slot. The next p micro-batches follow 2p slots later, and fit
    in between as well ("direct concatenation"). Li and Hoefler, arXiv 2107.06925, section 3, figure 3. Any number of
    micro-batches will do, a multiple of p is best. Raises UserError where p is odd.
    """
    p = stages
    if p == 1:  # nobody to meet
        return straight("chimera", chunks, one_f_one_b(1, microbatches).actions)
    if p % 2:
        raise UserError(f"stages={p}: chimera wants an even number, such as {p - 1} or {p + 1} (and any microbatches)")
    one_chunk("chimera", chunks)
    slots = [{} for _ in range(p)]  # slots[rank][time] = action
    for j in range(microbatches):
        k, up = divmod(j % p, 2)
        start = j // p * 2 * p + 2 * k
        for stage in range(p):
            rank, chunk = (p - 1 - stage, p + stage) if up else (stage, stage)
            slots[rank][start + stage] = Action("F", j, chunk)
            slots[rank][start + 2 * p - 1 - stage] = Action("B", j, chunk)
    actions = [[times[t] for t in sorted(times)] for times in slots]
    return Schedule("chimera", [*range(p)] * 2, [*range(p), *reversed(range(p))], actions)


def each(kind, microbatches, chunk):
    return [Action(kind, j, chunk) for j in range(microbatches)]


def alternate(*lists):
    """One of each list in turn, for as long as there are any: a0 b0 a1 b1 ... A None is left out."""
    return [action for turn in zip_longest(*lists) for action in turn if action]


def straight(name, chunks, actions):
    """The usual pipeline: one chunk per rank, from the first rank to the last."""
    one_chunk(name, chunks)
    return Schedule(name, list(range(len(actions))), list(range(len(actions))), actions)


def one_chunk(name, chunks):
    if chunks != 1:
        raise UserError(f"chunks={chunks}: {name} does not cut a rank's share into chunks; interleaved and zb-v do")


# Add your own: write a function like those above (say, 1F1B with half the warm-up), give it a name here, and
# `python -m parallel.draw mine` draws it, or says what is wrong with it; `train.py --schedule=mine` runs it.
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "chimera": chimera,
}


def usual_chunks(name):
    """Chunks per rank where nobody says how many: the default of the schedule's function."""
    return (SCHEDULES[name].__defaults__ or (1,))[-1]


def build(name, stages, microbatches, chunks=1):
    """The checked Schedule by that name. Raises UserError: no such schedule, numbers that do not fit, wrong lists."""
    if name not in SCHEDULES:
        raise UserError(f"schedule={name}: should be one of {', '.join(SCHEDULES)}")
    for field, value in [("stages", stages), ("microbatches", microbatches), ("chunks", chunks)]:
        if value < 1:
            raise UserError(f"{field}={value}: should be 1 or more")
    schedule = SCHEDULES[name](stages, microbatches, chunks)
    check(schedule, microbatches)
    return schedule


# --- what is right ----------------------------------------------------------------------------------------------------

NOMINAL = {"F": 1, "B": 2, "I": 1, "W": 1}  # durations, for want of measured ones: a product forward, two backward


def check(schedule, microbatches=None):
    """Refuse a schedule that skips an action, runs one twice or in the wrong place, or comes to a standstill.

    `microbatches`: how many there should be (default: as many as the highest number in the lists says). Raises
    UserError, which names the action, and for a standstill the circle of ranks that wait for one another. Ranks,
    chunks, micro-batches and a rank's actions are counted from 0.
    """
    check_places(schedule)
    check_complete(schedule, microbatches or schedule.microbatches)
    run_in_order(schedule, NOMINAL, 0)


def check_places(schedule):
    """Chunks on ranks that exist, pipelines that are the whole model, and each action where its chunk is, once."""
    name, parts, placement, lists = schedule

    def refuse(rank, i, why):
        raise UserError(f"{name}: {where(schedule, rank, i)}: {why}")

    if len(parts) != len(placement) or not set(placement) <= set(range(len(lists))):
        raise UserError(f"{name}: placement={placement}: should have one of the {len(lists)} ranks for each of {parts}")
    length = max(parts, default=-1) + 1
    if not parts or list(parts) != list(range(length)) * (len(parts) // length):
        raise UserError(f"{name}: parts={parts}: should count 0, 1, 2 ..., and from 0 again for another pipeline")
    if not any(lists):
        raise UserError(f"{name}: no rank has anything to do")
    seen = {}
    for rank, actions in enumerate(lists):
        for i, action in enumerate(actions):
            if action.kind not in NOMINAL:
                refuse(rank, i, f"kind {action.kind!r} should be F, B, I or W")
            if action.microbatch < 0 or not 0 <= action.chunk < len(parts):
                refuse(rank, i, f"micro-batches count from 0, chunks from 0 to {len(parts) - 1}")
            if placement[action.chunk] != rank:
                refuse(rank, i, f"chunk {action.chunk} is placed on rank {placement[action.chunk]}, not here")
            if action in seen:
                refuse(rank, i, f"runs a second time; the first was action {seen[action]}")
            seen[action] = i


def check_complete(schedule, microbatches):
    """Every micro-batch takes one pipeline, and in each of its chunks has F and either B or both I and W."""
    name = schedule.name
    kinds = {}  # (micro-batch, chunk): the kinds of action there are
    for actions in schedule.actions:
        for kind, j, chunk in actions:
            kinds.setdefault((j, chunk), set()).add(kind)
    if (last := schedule.microbatches - 1) >= microbatches:
        raise UserError(f"{name}: has a micro-batch {last}; of {microbatches}, the last is {microbatches - 1}")
    taken, missing = routes(schedule), []
    usual = "IW" if any("I" in found for found in kinds.values()) else "B"
    for j in range(microbatches):
        if j not in taken:
            raise UserError(f"{name}: micro-batch {j} of {microbatches} is skipped: no rank has any action of it")
        for chunk in taken[j]:
            found = kinds.get((j, chunk), set())
            if "B" in found and found & set("IW"):
                both = " and ".join(sorted(found - {"F"}))
                raise UserError(f"{name}: micro-batch {j}, chunk {chunk} has {both}: should be B, or I and W")
            backward = "IW" if found & set("IW") else "B" if "B" in found else usual
            missing += [Action(kind, j, chunk) for kind in "F" + backward if kind not in found]
    if missing:
        rank, more = schedule.placement[missing[0].chunk], len(missing) - 1
        others = f" (and {more} more {'is' if more == 1 else 'are'} missing)" if more else ""
        raise UserError(f"{name}: rank {rank} skips {missing[0]}{others}")


def prerequisites(schedule):
    """What must have ended before an action can start: {action: [actions]}, on its own rank or another."""
    backward = {(a.microbatch, a.chunk): a for actions in schedule.actions for a in actions if a.kind in "BI"}
    needs = {}
    for actions in schedule.actions:
        for action in actions:
            kind, j, chunk = action
            if kind == "F":
                before = upstream(schedule, chunk)
                needs[action] = [] if before is None else [Action("F", j, before)]
            elif kind == "W":
                needs[action] = [Action("I", j, chunk)]
            else:
                after = downstream(schedule, chunk)
                needs[action] = [Action("F", j, chunk)] + ([] if after is None else [backward[j, after]])
    return needs


def where(schedule, rank, i):
    return f"rank {rank}, action {i} ({schedule.actions[rank][i]})"


def standstill(schedule, needs, position, done):
    """Why nobody can go on: the circle of ranks, each of which waits for what the next has yet to come to.

    position[rank]: the action at which it stands; done: the actions that have run.
    """
    place = {action: (rank, i) for rank, actions in enumerate(schedule.actions) for i, action in enumerate(actions)}

    def awaited(rank):
        return next(need for need in needs[schedule.actions[rank][position[rank]]] if need not in done)

    circle = [next(rank for rank, actions in enumerate(schedule.actions) if position[rank] < len(actions))]
    while (following := place[awaited(circle[-1])][0]) not in circle:
        circle.append(following)
    sentences = []
    for rank in circle[circle.index(following) :]:
        other, i = place[awaited(rank)]
        whose = "its own" if other == rank else f"rank {other}'s"
        stands = where(schedule, rank, position[rank])
        sentences.append(f"{stands} waits for {awaited(rank)}, which is {whose} action {i}")
    return f"{schedule.name}: deadlock: " + "; ".join(sentences)


# --- simulation -------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """An action on the time axis."""

    rank: int
    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """What a step looks like, simulated or recorded."""

    events: list  # of Event, by start
    makespan: float  # from the first start of all to the last end
    span: float  # the longest of the ranks' own, each from its first start to its last end
    bubble: float  # the fraction of it that a rank is idle, 0 .. 1, their mean
    peak: list  # peak[rank]: most activations in flight at once, each of one micro-batch in one chunk


def simulate(schedule, cost, comm=0):
    """The Timeline of a schedule. Raises UserError for lists that are not right (see `check`).

    Each rank runs its list in order. An action starts when its rank is free and what it needs has arrived: `comm` after
    the producer's end, at once if that was on the same rank. Sending occupies nobody. `cost`: {kind: duration of one
    chunk's action}, in any unit of time; `comm` in the same. As Qi et al. count, arXiv 2401.10241, section 5.
    """
    check_places(schedule)
    check_complete(schedule, schedule.microbatches)
    if unknown := {action.kind for actions in schedule.actions for action in actions} - set(cost):
        raise UserError(f"cost={cost}: {schedule.name} also has {' and '.join(sorted(unknown))}")
    return timeline(run_in_order(schedule, cost, comm), len(schedule.actions))


def run_in_order(schedule, cost, comm):
    """The Events of a schedule that is complete. Raises UserError where the ranks wait for one another for ever."""
    needs, ends, events = prerequisites(schedule), {}, []
    position, free = [0] * len(schedule.actions), [0] * len(schedule.actions)
    standing = False
    while not standing:
        standing = True
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if not all(need in ends for need in needs[action]):
                    break
                arrivals = [ends[n] + comm * (schedule.placement[n.chunk] != rank) for n in needs[action]]
                start = max(free[rank], *arrivals) if arrivals else free[rank]
                ends[action] = free[rank] = start + cost[action.kind]
                events.append(Event(rank, action, start, free[rank]))
                position[rank] += 1
                standing = False
    if len(events) < len(needs):
        raise UserError(standstill(schedule, needs, position, ends))
    return events


def timeline(events, ranks):
    """The Timeline of events, simulated or recorded.

    Bubble: (span - busy) / span with span the longest of the ranks' own, first start to last end (that is how the
    zero-bubble paper counts: at the end of a step no rank has to wait for another), busy their mean. An activation is
    in flight from F to W, or to B where the backward is whole.
    """
    events = sorted(events, key=lambda e: (e.start, e.end))
    spans, peak, busy = [], [], 0
    for rank in range(ranks):
        own = [e for e in events if e.rank == rank]
        spans.append(max((e.end for e in own), default=0) - min((e.start for e in own), default=0))
        busy += sum(e.end - e.start for e in own) / ranks
        in_flight, most = 0, 0
        for event in own:
            in_flight += {"F": 1, "B": -1, "I": 0, "W": -1}[event.action.kind]
            most = max(most, in_flight)
        peak.append(most)
    span = max(spans)
    makespan = max(e.end for e in events) - min(e.start for e in events)
    return Timeline(events, makespan, span, (span - busy) / span if span else 0.0, peak)


# --- messages ---------------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """What one rank sends another: its producer's output, or gradient, that its consumer waits for."""

    source: int  # rank
    destination: int  # rank
    kind: str  # activation, gradient
    microbatch: int
    producer: Action  # in chunk producer.chunk, on the source
    consumer: Action  # in chunk consumer.chunk, on the destination


def messages(schedule):
    """All messages of a checked schedule, in the one order in which every rank posts its own, sends and receives alike.

    NCCL carries out what two ranks send each other one by one, in the order in which each of them posts it, and a send
    waits for its receive: two ranks that both post a send first wait for ever. So all ranks must agree on an order, and
    here it is: by when the messages are ready in a simulation with nominal costs. What a rank has to do:

        its queue: the messages that it sends or receives, in this order
        before its first action and after each: post from the front of its queue, up to the first send not yet produced
        before an action: wait for the message that this action consumes

    Posting does not wait (isend, irecv; the buffer lives until done). `pipeline.Mailbox` waits for old sends of its
    own, whose receives were posted by the same order. Receives are thus posted ahead, as far as the order allows.
    **This never deadlocks**, not even if each rank carried out its whole queue strictly one by one. Suppose that it
    did, and of all actions that never run take that which starts first in the simulation. It waits for a message. The
    action that produces this message, and those that produce all earlier messages, end before this start in the
    simulation. So they start earlier still, and so they have run. Hence nothing holds up the posting of these messages,
    at either end; they take place, from the first on; and the action has its message. The order need only follow *some*
    timeline in which no action takes no time. How long actions really take does not matter.

    An alternative, not used here: if each pair of ranks has a queue of its own (a communicator per pair), a receive may
    be posted as late as before the action that consumes it, for fewer buffers. The proof is the same, with "earlier
    between these two ranks".
    Two chunks on one rank pass on what they have without a message.
    """
    consumers = {}  # producer: consumer, on another rank; no action has two
    for action, needs in prerequisites(schedule).items():
        for producer in needs:
            if schedule.placement[producer.chunk] != schedule.placement[action.chunk]:
                consumers[producer] = action
    ordered = []
    for event in sorted(run_in_order(schedule, NOMINAL, 0), key=lambda e: (e.end, e.rank)):
        producer, consumer = event.action, consumers.get(event.action)
        if consumer:
            kind = "activation" if producer.kind == "F" else "gradient"
            destination = schedule.placement[consumer.chunk]
            ordered.append(Message(event.rank, destination, kind, producer.microbatch, producer, consumer))
    return ordered


# --- what the papers say ----------------------------------------------------------------------------------------------


class Formula(NamedTuple):
    """In Python, so that what is printed is what is computed. p stages, m micro-batches, v chunks, r the rank."""

    bubble: str  # of F, B, I, W, the costs of a stage, with messages that take no time
    where: str  # what that asks for
    peak: str  # activations in flight on rank r, each of a chunk


FORMULAS = {
    "gpipe": Formula("(p-1) / (m+p-1)", "True", "m"),
    "1f1b": Formula("(p-1) / (m+p-1)", "True", "min(p-r, m)"),
    "interleaved": Formula("(p-1) / (v*m+p-1)", "True", "min((v-1)*p + 2*(p-1-r) + 1, v*m)"),
    "zb-h1": Formula("(p-1)*(F+I-W) / (m*(F+I+W) + (p-1)*(F+I-W))", "m >= p and W <= min(F, I)", "min(p, m)"),
    "zb-h2": Formula(
        "(p-1)*(F+I-2*W) / (m*(F+I+W) + (p-1)*(F+I-2*W))", "m >= 2*p-1 and W <= min(F, I)", "min(2*p-1, m)"
    ),
    "zb-v": Formula("(p-1)*(I-W) / (m*(F+I+W) + (p-1)*(I-W))", "m >= 2*p-1 and W <= F <= I", "min(m+1+r, 2*m, 2*p)"),
    "chimera": Formula("(p-2) / (2*m+p-2)", "F == B and m % p == 0", "min(p//2, p-r, (m+1)//2) + min(p//2, r+1, m//2)"),
}


def by_formula(text, **letters):
    return eval(text, {"min": min}, letters)  # one of FORMULAS, nothing that anybody typed


def moved():
    raise UserError("python -m parallel.schedules is now: python -m parallel.draw (with the same arguments)")


if __name__ == "__main__":
    exit_on_user_error(moved)
