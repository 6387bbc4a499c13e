"""Pipeline schedules: the order in which each rank computes (slide "パイプライン並列").

The model is cut into stages, one on each rank, and the batch into micro-batches. A micro-batch runs forward from the
first stage to the last, then backward to the first. The bubble is the share of a step's time in which a rank waits. A
micro-batch is in flight from its forward to the end of its backward. Its activations fill memory then. A schedule
is a list of actions for each rank, made by one of the functions below. Schedules differ in bubble and memory. The
example is 1F1B with four ranks, eight micro-batches and a backward as long as two forwards. `python -m accounts.draw
1f1b` draws it (F forward, B backward, . idle):

    rank 0  F0 F1 F2 F3 ..................B0--- F4 B1--- F5 B2--- F6 B3--- F7 B4--- ...B5--- ...B6--- ...B7---
    rank 1  ...F0 F1 F2 ............B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5--- ...B6--- ...B7--- ......
    rank 2  ......F0 F1 ......B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6--- ...B7--- ............
    rank 3  .........F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7--- ..................

                   bubble                                        in flight on rank r   costs
    gpipe          (p-1) / (m+p-1)                               m
    1f1b           (p-1) / (m+p-1)                               p-r
    interleaved    (p-1) / (vm+p-1)                              p + (p-2r-1)/v        (vp-1)/(p-1) times the messages
    zb-h1          (p-1)(F+I-W) / (m(F+I+W) + (p-1)(F+I-W))      p                     keeps output gradients until W
    zb-h2          (p-1)(F+I-2W) / (m(F+I+W) + (p-1)(F+I-2W))    2p-1                  keeps output gradients until W
    zb-v           (p-1)(I-W) / (m(F+I+W) + (p-1)(I-W))          p                     as zb-h1, twice the messages
    chimera        (p-2) / (2m+p-2)  if F = B                    p/2+1 .. p            twice the parameters
    pipedream      (p-1) / (m+p-1)  m: of all updates together   p-r                   old weights, p-r versions of them
    pipedream-2bw  the same                                      p-r                   old weights, 2 versions of them

There are p stages and m micro-batches. The model is cut into parts, and a chunk is one part on one rank. A rank has v
chunks. F, I and W are the durations of forward, input gradient and weight gradient on a whole stage. B = I + W is the
duration of a backward. The column "in flight" is for large m. Its unit is the activations of one micro-batch on a whole
stage. The formulas of zb-h1 and zb-h2 need W <= F and W <= I. The formula of zb-v needs W <= F <= I. `FORMULAS` below
has the exact conditions. Each micro-batch sends bsh elements forward and bsh elements backward over every boundary
between ranks.

A schedule is data. The same lists are checked, simulated, drawn (`draw.py`) and executed (`pipeline.py`). The sections
of this file: schedules, checks, simulation, an order of messages that never deadlocks, formulas of the papers. The
schedules pipedream and pipedream-2bw are asynchronous: a rank updates its weights without waiting for the others.
`versions.py` counts the old weights that it keeps.
"""

from itertools import accumulate, product, zip_longest
from typing import NamedTuple

from errors import UserError

# --- the data of a schedule -------------------------------------------------------------------------------------------


class Action(NamedTuple):
    """One computation of a rank, for one micro-batch in one chunk of the model.

    The kinds are F (forward), B (backward) and U (update of the weights, only in PipeDream). A schedule may cut B into
    two halves: first I (gradient of the chunk's input), later W (gradients of the linears' weights). The other
    gradients are computed in I.
    """

    kind: str  # F, B, I, W or U
    microbatch: int  # 0 .. m-1
    chunk: int  # the number of the chunk; chunks are numbered over all ranks

    def __str__(self):
        return f"{self.kind} of micro-batch {self.microbatch}, chunk {self.chunk}"


class Schedule(NamedTuple):
    """The actions of all ranks, as plain data. Ranks, chunks and micro-batches count from 0."""

    name: str
    parts: list  # parts[chunk]: the part of the model in this chunk; a pipeline begins at part 0
    placement: list  # placement[chunk]: the rank that runs this chunk
    actions: list  # actions[rank]: the Actions of this rank, in their order
    versions: list | None = None  # [rank][j]: the number of updates in the weights of micro-batch j

    @property
    def microbatches(self):
        return 1 + max(action.microbatch for actions in self.actions for action in actions)


def pipelines(schedule):
    """Return the chunks of each pipeline in the model's order: [[0 .. p-1]], for Chimera [[0 .. p-1], [p .. 2p-1]]."""
    starts = [chunk for chunk, part in enumerate(schedule.parts) if part == 0]
    return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(schedule.parts)], strict=True)]


def upstream(schedule, chunk):
    """Return the chunk whose output `chunk` reads, or None for the first chunk of a pipeline."""
    return chunk - 1 if schedule.parts[chunk] > 0 else None


def downstream(schedule, chunk):
    """Return the chunk that reads the output of `chunk`, or None for the last chunk of a pipeline."""
    return chunk + 1 if chunk + 1 < len(schedule.parts) and schedule.parts[chunk + 1] > 0 else None


def forward_only(schedule, microbatches):
    """Return a Schedule for validation: forwards through the first pipeline of `schedule`.

    With v chunks on each rank, a rank runs v forwards for a micro-batch. So micro-batch j begins v j forwards after
    micro-batch 0, and each rank sorts its forwards by the time at which they can begin.
    """
    chunks, actions = pipelines(schedule)[0], [[] for _ in schedule.actions]
    v = len(chunks) // len(actions)
    for chunk, j in sorted(product(chunks, range(microbatches)), key=lambda place: place[0] + v * place[1]):
        actions[schedule.placement[chunk]].append(Action("F", j, chunk))
    return schedule._replace(name=f"{schedule.name}, forward only", actions=actions, versions=None)


def updates(schedule):
    """Return the number of weight updates that one run of the lists makes. Without U this is 1."""
    return sum(action.kind == "U" for action in schedule.actions[0]) or 1


def routes(schedule):
    """Return {micro-batch: the chunks of the pipeline through which it runs}.

    Raises UserError if a micro-batch has actions in two pipelines.
    """
    pipeline_of = {chunk: pipeline for pipeline in pipelines(schedule) for chunk in pipeline}
    taken = {}
    for actions in schedule.actions:
        for _, j, chunk in actions:
            if chunk not in taken.setdefault(j, pipeline_of[chunk]):
                both = f"has actions in chunk {taken[j][0]} and in chunk {chunk}, which are in two pipelines"
                raise UserError(f"{schedule.name}: micro-batch {j} {both}; should be in only one")
    return taken


# --- the schedules ----------------------------------------------------------------------------------------------------


def gpipe(stages, microbatches, chunks=1):
    """GPipe: all forwards, then all backwards. Between the two, all m micro-batches are in flight.

    Huang et al., arXiv 1811.06965.
    """
    return straight("gpipe", chunks, [each("F", microbatches, r) + each("B", microbatches, r) for r in range(stages)])


def one_f_one_b(stages, microbatches, chunks=1):
    """1F1B, also PipeDream-Flush: after the warm-up, a backward follows each forward.

    At most p - rank micro-batches are in flight. Narayanan et al., arXiv 2006.09503 (PipeDream-Flush), and 2104.04473,
    section 2.2.1. The slide's PipeDream (arXiv 1806.03377) is `pipedream` below.
    """
    actions = []
    for rank in range(stages):
        F, B = each("F", microbatches, rank), each("B", microbatches, rank)
        warmup = stages - 1 - rank  # the first backward passes through this many ranks before it reaches this rank
        actions.append(F[:warmup] + alternate(F[warmup:], B))
    return straight("1f1b", chunks, actions)


def interleaved(stages, microbatches, chunks=2):
    """Interleaved 1F1B: each rank has `chunks` chunks, and the bubble is about `chunks` times smaller.

    Rank r has the chunks r, p + r, 2p + r ... (the slide has two per rank). So a micro-batch runs through all ranks
    `chunks` times. Each rank runs p micro-batches through one chunk, then the same micro-batches through its next
    chunk. Narayanan et al., arXiv 2104.04473, section 2.2.2. Raises UserError if m is not a multiple of p, or if p > 1
    and chunks is 1 (this is 1f1b).
    """
    p, v = stages, chunks
    if v < 2 and p > 1:
        raise UserError(f"chunks={v}: interleaved needs 2 or more chunks per rank (with one it would be 1f1b)")
    if over := microbatches % p:
        near = " or ".join(str(m) for m in (microbatches - over, microbatches - over + p) if m)
        raise UserError(f"microbatches={microbatches}: interleaved needs a multiple of stages={p}, such as {near}")
    actions = []
    for rank in range(p):
        F, B = [], []
        for first in range(0, microbatches, p):
            group = range(first, first + p)
            F += [Action("F", j, c * p + rank) for c in range(v) for j in group]
            B += [Action("B", j, c * p + rank) for c in reversed(range(v)) for j in group]
        # In the first (v-1) p forwards, the first group runs through all of this rank's chunks except the last. Then
        # the first micro-batch needs a forward on each later rank (there are p - 1 - rank), and as many backwards on
        # its way back. During each of them this rank runs one more forward.
        warmup = (v - 1) * p + 2 * (p - 1 - rank)
        actions.append(F[:warmup] + alternate(F[warmup:], B))
    return Schedule("interleaved", list(range(v * p)), [c % p for c in range(v * p)], actions)


def zb_h1(stages, microbatches, chunks=1):
    """ZB-H1: 1F1B with B cut into I and W. W fills time in which a rank of 1F1B is idle.

    The previous rank waits only for I, so W can be late. Rank r delays each W by r micro-batches. Then every rank has p
    micro-batches in flight, as many as rank 0 of 1F1B. Qi et al., arXiv 2401.10241, section 2.1, figure 3.
    """
    return straight("zb-h1", chunks, zero_bubble(stages, microbatches, 1))


def zb_h2(stages, microbatches, chunks=1):
    """ZB-H2: no bubble if F, I and W take equal time and m >= 2p-1, with 2p-1 micro-batches in flight.

    The warm-up and the delay of W are twice those of ZB-H1. Each rank begins and ends its step later than the rank
    before it. If each rank starts its next step at once, no rank waits. In train.py all ranks wait for the gradient
    norm at the end of a step, so a bubble remains. Qi et al., arXiv 2401.10241, section 2.2, figure 3.
    """
    return straight("zb-h2", chunks, zero_bubble(stages, microbatches, 2))


def zero_bubble(stages, microbatches, factor):
    """Return the actions of ZB-H1 (factor 1) or ZB-H2 (factor 2). factor multiplies 1F1B's warm-up and W's delay."""
    actions = []
    for rank in range(stages):
        F, I, W = (each(kind, microbatches, rank) for kind in "FIW")
        warmup, delay = factor * (stages - 1 - rank), factor * rank
        actions.append(F[:warmup] + alternate(F[warmup:], I, [None] * delay + W))
    return actions


def zb_v(stages, microbatches, chunks=2):
    """ZB-V: a bubble no larger than ZB-H2's, as much memory as ZB-H1, and twice the messages.

    Rank r has chunk r on the way down (from rank 0 to rank p-1) and chunk 2p-1-r on the way up. Rank 0 has the first
    and the last part of the model. So it can start the backward of a micro-batch directly after the last forward of
    this micro-batch. The work of a rank is divided into turns. A turn has six places in this order: f, i, w (up), then
    F, I, W (down). A rank leaves out a place without an action. Below are p = 3 and rank 1:

        turn       -3 -2 -1   0         1            2               3                        4
        rank 1     F0 F1 F2   f0 F3     f1 i0 w0     f2 i1 w1 F4 I0 W0   f3 i2 w2 F5 I1 W1    f4 i3 w3 F6 I2 W2 ...

    Turn k+1 does for micro-batch j+1 what turn k does for micro-batch j. In turn k, rank r runs f of micro-batch k. The
    action i starts on rank 0 and moves to the next rank in each turn, so rank r runs i and w of micro-batch k-r. In the
    turn in which i runs on rank p-1, I runs on all ranks, from rank p-1 down to rank 0. So every rank runs I and W of
    micro-batch k-(p-1). Rank r runs its first 2p-1-r forwards F before turn r, one in each turn. F of a later
    micro-batch j runs in turn j+r-p. Near the end no forward is left to fill the time, and the next rank waits for i or
    I. So rank r runs these first, and delays weight gradients: each of its last r actions w moves r-1 turns later, to
    the place of W, and each of its last p actions W moves 2r turns later.

    The bubble is 0 if F, I and W take equal time and m >= 2p-1. If m < p, the lists are made for p micro-batches, and
    the actions of the last p-m are left out. Qi et al., arXiv 2401.10241 (not in the conference version) and 2405.15362
    (V-ZB). Raises UserError if chunks is not 2.
    """
    p, m = stages, max(stages, microbatches)
    if p == chunks == 1:  # one stage has no way down and up
        return straight("zb-v", chunks, zero_bubble(p, microbatches, 1))
    if chunks != 2:
        raise UserError(f"chunks={chunks}: zb-v needs 2 per rank, one on the way down and one on the way up")
    actions = []
    for r in range(p):
        places, down, up = {}, r, 2 * p - 1 - r  # places[turn, place] = action; the places are f i w F I W
        for j in range(m):
            places[j, 0] = Action("F", j, up)
            places[j + r - (up if j < up else p), 3] = Action("F", j, down)
            i, I = j + r, j + p - 1  # the turns of the input gradients
            places[i, 1] = Action("I", j, up)
            places[I, 4] = Action("I", j, down)
            w = (i, 2) if j < m - r else (i + r - 1, 5)
            W = (I, 5) if j < m - p else (I + 2 * r, 5)
            places[w], places[W] = Action("W", j, up), Action("W", j, down)
        actions.append([places[place] for place in sorted(places) if places[place].microbatch < microbatches])
    return Schedule("zb-v", list(range(2 * p)), [*range(p), *reversed(range(p))], actions)


def chimera(stages, microbatches, chunks=1):
    """Chimera: two pipelines on the same ranks, one down and one up. Each fills the other's bubble.

    Rank r has part r of the down pipeline (chunk r) and part p-1-r of the up pipeline (chunk 2p-1-r). So it has twice
    the parameters, and the gradients of both copies are summed at the end. Even micro-batches go down (from rank 0 to
    rank p-1), odd micro-batches go up. The batch is cut into groups of p micro-batches. In a group, k = 0, 1 ...
    numbers the micro-batches of one direction. Suppose that F and B take one time slot each. On part i, micro-batch k
    then has its F in slot i + 2k and its B in slot 2p-1 - i + 2k. The two directions never need the same slot. On rank
    r they use the parts r and p-1-r. p is even, so one of these numbers is even and the other is odd. So their F are in
    slots of different parity, and so are their B. An F and a B do not meet either, because in a group the last F of one
    direction comes before the first B of the other. The next group begins 2p slots later and uses slots that are still
    free ("direct concatenation"). Any m is allowed; a multiple of p is best. Li and Hoefler, arXiv 2107.06925, section
    3, figure 3. Raises UserError if p is odd and not 1.
    """
    p = stages
    if p == 1:  # with one stage both directions are the same
        return straight("chimera", chunks, one_f_one_b(1, microbatches).actions)
    if p % 2:
        raise UserError(f"stages={p}: chimera needs an even number, such as {p - 1} or {p + 1} (any microbatches)")
    one_chunk("chimera", chunks)
    slots = [{} for _ in range(p)]  # slots[rank][slot] = action
    for j in range(microbatches):
        k, up = divmod(j % p, 2)
        start = j // p * 2 * p + 2 * k
        for part in range(p):
            rank, chunk = (p - 1 - part, p + part) if up else (part, part)
            slots[rank][start + part] = Action("F", j, chunk)
            slots[rank][start + 2 * p - 1 - part] = Action("B", j, chunk)
    actions = [[taken[slot] for slot in sorted(taken)] for taken in slots]
    return Schedule("chimera", [*range(p)] * 2, [*range(p), *reversed(range(p))], actions)


def pipedream(stages, microbatches, chunks=1, per_update=None):
    """PipeDream: 1F1B that does not wait for an empty pipeline (a flush) before an update. Each rank updates its
    weights after each of its backwards.

    The list has the micro-batches of many updates. A rank waits only at the beginning and at the end of the list. While
    micro-batch j is in flight, a rank updates its weights p-1-rank times. The backward of j needs the weights of its
    forward, so the rank keeps the old version (weight stashing). Narayanan et al., arXiv 1806.03377, sections 3.2 and
    3.3. Raises UserError if per_update, the number of micro-batches in an update, is not 1.
    """
    if per_update not in (None, 1):
        raise UserError(f"per_update={per_update}: pipedream updates after every micro-batch; should be 1")
    versions = [[max(j - (stages - 1 - rank), 0) for j in range(microbatches)] for rank in range(stages)]
    return asynchronous("pipedream", chunks, microbatches, 1, versions)


def pipedream_2bw(stages, microbatches, chunks=1, per_update=None):
    """PipeDream-2BW: an update after every `per_update` micro-batches (default: stages), and two versions of weights.

    All micro-batches of an update use the same version on all ranks. It is one update older than the latest version.
    With w(t) for the weights: w(t+1) = w(t) - lr * gradient(w(t-1)). Narayanan et al., arXiv 2006.09503, section 3.1
    (double-buffered weight updates). Raises UserError if per_update < stages, because a rank would need a third
    version, or if the number of micro-batches is not a multiple of per_update.
    """
    m = stages if per_update is None else per_update
    if m < stages:
        raise UserError(f"per_update={m}: pipedream-2bw needs stages={stages} or more micro-batches in an update")
    if microbatches % m:
        raise UserError(f"microbatches={microbatches}: pipedream-2bw needs a multiple of per_update={m}")
    versions = [[max(j // m - 1, 0) for j in range(microbatches)]] * stages
    return asynchronous("pipedream-2bw", chunks, microbatches, m, versions)


def asynchronous(name, chunks, microbatches, per_update, versions):
    """Return the Schedule of 1F1B's order with an action U after every `per_update` backwards."""
    one_chunk(name, chunks)
    flushed = one_f_one_b(len(versions), microbatches)
    actions = [[] for _ in versions]
    for rank, action in ((rank, action) for rank, actions in enumerate(flushed.actions) for action in actions):
        actions[rank].append(action)
        if action.kind == "B" and (action.microbatch + 1) % per_update == 0:
            actions[rank].append(action._replace(kind="U"))
    return flushed._replace(name=name, actions=actions, versions=versions)


def each(kind, microbatches, chunk):
    return [Action(kind, j, chunk) for j in range(microbatches)]


def alternate(*lists):
    """Return one item of each list in turn, until all lists end: a0 b0 a1 b1 ... Each None is left out."""
    return [action for turn in zip_longest(*lists) for action in turn if action]


def straight(name, chunks, actions):
    """Return the Schedule of a pipeline with one chunk per rank, from the first rank to the last."""
    one_chunk(name, chunks)
    return Schedule(name, list(range(len(actions))), list(range(len(actions))), actions)


def one_chunk(name, chunks):
    if chunks != 1:
        raise UserError(f"chunks={chunks}: {name} does not cut a rank's share into chunks; interleaved and zb-v do")


# Add your own: write a function like those above and give it a name in this table, for example "mine".
# `python -m accounts.draw mine` draws it or prints the mistake in it. `train.py --schedule=mine` trains with it.
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "chimera": chimera,
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
}
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")  # the lists of these schedules have several updates (actions U)


def usual_chunks(name):
    """Return the default number of chunks per rank: the default argument of the schedule's function."""
    return (SCHEDULES[name].__defaults__ or (1,))[0]


def build(name, stages, microbatches, chunks=1, per_update=None):
    """Return the checked Schedule `name`. Raises UserError if the name, a number or a list of actions is wrong.

    per_update: micro-batches of an update. Only the schedules in ASYNCHRONOUS read it.
    """
    if name not in SCHEDULES:
        raise UserError(f"schedule={name}: should be one of {', '.join(SCHEDULES)}")
    for field, value in [("stages", stages), ("microbatches", microbatches), ("chunks", chunks)]:
        if value < 1:
            raise UserError(f"{field}={value}: should be 1 or more")
    more = (per_update,) if name in ASYNCHRONOUS else ()
    schedule = SCHEDULES[name](stages, microbatches, chunks, *more)
    if not isinstance(schedule, Schedule):
        raise UserError(f"schedule={name}: its function returns {schedule!r}; should return a Schedule")
    check(schedule, microbatches)
    return schedule


def build_for(c, dp, microbatches):
    """Return the checked Schedule of a configuration: `microbatches` micro-batches on each of `dp` data ranks."""
    return build(c.schedule, c.pp, microbatches, c.chunks, micro_batches(c, c.global_batch_size, dp))


def micro_batches(c, samples, dp):
    """Return m, the number of micro-batches on each of `dp` data ranks in a step of `samples` samples.

    dp contains the cp ranks, and cp ranks work on one micro-batch together (`mesh.py`).
    """
    return samples * c.cp // (c.micro_batch_size * dp)


# --- checks -----------------------------------------------------------------------------------------------------------

# Assumed durations. A linear layer has one matrix product in F and two in B. An update is short.
NOMINAL = {"F": 1, "B": 2, "I": 1, "W": 1, "U": 0.01}


def check(schedule, microbatches=None):
    """Refuse a schedule that skips an action, runs an action twice or in the wrong place, or deadlocks.

    microbatches: how many micro-batches the schedule must have (default: the highest index in the lists plus 1).
    Raises UserError, which names the action, or for a deadlock the ranks that wait for one another. Ranks, chunks,
    micro-batches and a rank's actions count from 0.
    """
    check_actions(schedule, microbatches)
    run_in_order(schedule, NOMINAL, 0)


def check_actions(schedule, microbatches=None):
    """Accept a schedule only if each chunk of a micro-batch's pipeline has F and B, or F, I, W, on the right rank."""
    name, parts, placement, lists, _ = schedule
    length = max(parts, default=-1) + 1
    if not parts or list(parts) != list(range(length)) * (len(parts) // length):
        raise UserError(f"{name}: parts={parts}: each pipeline should have the same parts 0, 1, 2 ...")
    if len(parts) != len(placement) or not set(placement) <= set(range(len(lists))) or not any(lists):
        raise UserError(f"{name}: placement={placement}: should have {len(parts)} of {len(lists)} ranks, with actions")
    m, seen = microbatches or schedule.microbatches, {}
    for rank, actions in enumerate(lists):
        for i, action in enumerate(actions):
            kind, j, chunk = action
            known = kind in NOMINAL and 0 <= j < m and 0 <= chunk < len(parts) and placement[chunk] == rank
            if not known or action in seen:
                kinds, chunks = ", ".join(NOMINAL), [c for c, place in enumerate(placement) if place == rank]
                why = f"should have a kind of {kinds}, a micro-batch below {m}, and a chunk of {chunks}"
                why = f"runs a second time; the first was action {seen[action]}" if known else why
                raise UserError(f"{name}: {where(schedule, rank, i)}: {why}")
            seen[action] = i
    taken, first = routes(schedule), pipelines(schedule)[0]
    for j in range(m):
        for chunk in taken.get(j, first):
            kinds = [kind for kind in "FBIW" if (kind, j, chunk) in seen]
            if kinds != ["F", "B"] and kinds != ["F", "I", "W"]:
                found = " and ".join(kinds) or "no action"
                place = f"rank {placement[chunk]} has {found} of micro-batch {j}, chunk {chunk}"
                raise UserError(f"{name}: {place}; should have F and B, or F, I and W")
    check_updates(schedule)


def check_updates(schedule):
    """Refuse updates that differ between ranks or do not end with the last micro-batch.

    Only the schedules in ASYNCHRONOUS have updates. `prerequisites` says which backwards must end before an update.
    """
    marks = [[action.microbatch for action in actions if action.kind == "U"] for actions in schedule.actions]
    last = [schedule.microbatches - 1] if schedule.versions else []
    if any(mark != marks[0] or mark[-1:] != last for mark in marks):
        should = f"should be equal lists that end with {last}" if last else "has no versions, so it has no updates"
        raise UserError(f"{schedule.name}: the ranks update after the micro-batches {marks}; {should}")


def prerequisites(schedule):
    """Return {action: [actions that must end before it can start]}, on the same rank or another."""
    backward = {(a.microbatch, a.chunk): a for actions in schedule.actions for a in actions if a.kind in "BI"}
    needs = {}
    for rank, actions in enumerate(schedule.actions):
        updated = [action for action in actions if action.kind == "U"]
        for action in actions:
            kind, j, chunk = action
            if kind == "F":
                before = upstream(schedule, chunk)
                needs[action] = [] if before is None else [Action("F", j, before)]
                if schedule.versions and (version := schedule.versions[rank][j]):
                    needs[action].append(updated[version - 1])
            elif kind == "W":
                needs[action] = [Action("I", j, chunk)]
            elif kind == "U":
                first = updated[updated.index(action) - 1].microbatch + 1 if action != updated[0] else 0
                needs[action] = [backward[i, chunk] for i in range(first, j + 1)]
            else:
                after = downstream(schedule, chunk)
                needs[action] = [Action("F", j, chunk)] + ([] if after is None else [backward[j, after]])
    return needs


def where(schedule, rank, i):
    return f"rank {rank}, action {i} ({schedule.actions[rank][i]})"


def deadlock(schedule, needs, position, done):
    """Return the error text of a deadlock: it names a circle of ranks. Each rank in it waits for an action that the
    next rank has not reached.

    position[rank]: the index of the action that waits; done: the actions that have run.
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
    """The events of one step, simulated or recorded, and numbers about them."""

    events: list  # Events, sorted by start
    makespan: float  # time from the first start on any rank to the last end on any rank
    span: float  # the longest time from one rank's first start to its last end
    bubble: float  # the share of `span` in which a rank is idle, 0 .. 1, as a mean over the ranks
    step_bubble: float  # the same of `makespan`: in training all ranks wait for the gradient norm at the end of a step
    peak: list  # peak[rank]: the most (micro-batch, chunk) pairs that are in flight at once


def simulate(schedule, cost, comm=0):
    """Return the Timeline of a schedule. Raises UserError for a schedule that `check` refuses.

    Each rank runs its list in order. An action starts when its rank is free and its inputs have arrived. An input from
    another rank arrives a time `comm` after the end of the action that produces it. A rank can compute while it sends.
    cost: {kind: duration of an action of one chunk}. All durations and `comm` use the same unit, for example seconds.
    If `cost` has no U, updates take no time. This is the model of Qi et al., arXiv 2401.10241, section 5.
    """
    check_actions(schedule)
    cost = {"U": 0} | cost
    if unknown := {action.kind for actions in schedule.actions for action in actions} - set(cost):
        raise UserError(f"cost={cost}: {schedule.name} also needs durations of {' and '.join(sorted(unknown))}")
    return timeline(run_in_order(schedule, cost, comm), len(schedule.actions))


def run_in_order(schedule, cost, comm):
    """Return the Events of a checked schedule. cost, comm: as in `simulate`. Raises UserError if the ranks deadlock."""
    needs, ends, events = prerequisites(schedule), {}, []
    position, free = [0] * len(schedule.actions), [0] * len(schedule.actions)
    progress = True
    while progress:
        progress = False
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
                progress = True
    if len(events) < len(needs):
        raise UserError(deadlock(schedule, needs, position, ends))
    return events


def timeline(events, ranks):
    """Return the Timeline of events, simulated or recorded.

    The bubble is (span - busy) / span. `span` is the longest time from one rank's first start to its last end, `busy`
    the mean time in which a rank computes. The zero-bubble paper counts like this, because there no rank waits for
    another at the end of a step. `step_bubble` has the makespan instead of the span. An activation
    is in flight from its F to its B, or to its W if B is cut into I and W.
    """
    events = sorted(events, key=lambda e: (e.start, e.end))
    spans, peak, busy = [], [], 0
    for rank in range(ranks):
        own = [e for e in events if e.rank == rank]
        spans.append(max((e.end for e in own), default=0) - min((e.start for e in own), default=0))
        busy += sum(e.end - e.start for e in own) / ranks
        in_flight = accumulate({"F": 1, "B": -1, "W": -1}.get(e.action.kind, 0) for e in own)
        peak.append(max(in_flight, default=0))
    span = max(spans)
    makespan = max(e.end for e in events) - min(e.start for e in events)
    bubbles = [(time - busy) / time if time else 0.0 for time in (span, makespan)]
    return Timeline(events, makespan, span, *bubbles, peak)


# --- messages ---------------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """An activation or a gradient that one rank sends to another."""

    source: int  # the rank that sends
    destination: int  # the rank that receives
    kind: str  # "activation" or "gradient"
    microbatch: int
    producer: Action  # the source's action that computes the tensor
    consumer: Action  # the destination's action that needs the tensor


def messages(schedule):
    """Return all messages of a checked schedule in one order. Every rank posts (starts) its sends and receives in this
    order.

    NCCL runs the messages of one process group between two ranks one by one, in the order in which each of the two
    ranks posts them. A send waits for its receive. So all ranks must agree on an order. Here the messages are in the
    order in which they become ready in a simulation with the durations NOMINAL. Each rank has a queue: the messages
    that it sends or receives, in this order. The rank does the following.

        before its first action and after each action: post from the front of the queue, up to the first send whose
            tensor is not yet computed
        before an action: wait for the message that this action consumes

    Posting does not wait (isend, irecv; the tensor is kept until the message is done). `Mailbox.post` (pipeline.py)
    posts the receives up to the next send; `Mailbox.send` posts this send. The Mailbox also waits for its oldest send
    if more than two sends are unfinished. This wait cannot cause a deadlock: it only makes the next action wait for one
    message more, an earlier send of this rank. In the simulation, this send is ready before that action starts. So the
    proof below covers it, too. A rank posts receives as early as the order allows.

    **This never deadlocks**, even if each rank runs the messages in its queue strictly one by one. Proof: suppose that
    some actions never run. Let A be the first of these in the simulation. All actions before A on its rank have run, so
    A lacks only a message M. In the simulation, M is ready before A starts, and the messages before M are ready no
    later than M. The actions that produce them end no later than A starts, and take some time. So they start before A.
    A is the first action that never runs, so these producers have run. Then both ends post M and all messages before M.
    These messages run one after another, and A gets M. This is a contradiction. The proof only needs a timeline in
    which every producer of a message takes some time. Real durations do not matter.

    **No tensor that is ready waits for one that is not.** Messages to a higher rank have one process group. Messages to
    a lower rank have another one (`pipeline.axis_to`). So between two ranks each group has only one sender. The
    messages of a group are in the order in which its sender computes them. With one group for both directions, a send
    would wait for each receive that its rank has posted before. The proof also holds with two groups: then each message
    waits for fewer earlier messages. Two chunks on one rank need no message.
    """
    consumers = {}  # {producer: its consumer on another rank}; a producer has at most one
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


# --- the papers' formulas ---------------------------------------------------------------------------------------------


class Formula(NamedTuple):
    """Formulas as Python text, which is both printed and evaluated.

    p stages, m micro-batches, v chunks per rank, r the rank. F, B, I and W are durations on a whole stage.
    """

    bubble: str  # the bubble if messages take no time
    where: str  # the condition under which `bubble` is correct
    peak: str  # the peak of (micro-batch, chunk) pairs in flight on rank r


FORMULAS = {
    "gpipe": Formula("(p-1) / (m+p-1)", "True", "m"),
    "1f1b": Formula("(p-1) / (m+p-1)", "True", "min(p-r, m)"),
    "interleaved": Formula("(p-1) / (v*m+p-1)", "True", "min((v-1)*p + 2*(p-1-r) + 1, v*m)"),
    "zb-h1": Formula("(p-1)*(F+I-W) / (m*(F+I+W) + (p-1)*(F+I-W))", "m >= p and W <= min(F, I)", "min(p, m)"),
    "zb-h2": Formula(
        "(p-1)*(F+I-2*W) / (m*(F+I+W) + (p-1)*(F+I-2*W))", "m >= 2*p-1 and W <= min(F, I)", "min(2*p-1, m)"
    ),
    "zb-v": Formula("(p-1)*(I-W) / (m*(F+I+W) + (p-1)*(I-W))", "m >= 2*p-1 and W <= F <= I", "min(m+1+r, 2*m, 2*p)"),
    "pipedream": Formula("(p-1) / (m+p-1)", "True", "min(p-r, m)"),
    "pipedream-2bw": Formula("(p-1) / (m+p-1)", "True", "min(p-r, m)"),
    "chimera": Formula("(p-2) / (2*m+p-2)", "F == B and m % p == 0", "min(p//2, p-r, (m+1)//2) + min(p//2, r+1, m//2)"),
}


def by_formula(text, **letters):
    return eval(text, {"min": min}, letters)  # a user cannot set the text: it comes from FORMULAS
