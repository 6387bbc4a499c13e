"""Pipeline schedules: the order in which each rank computes (slide "パイプライン並列").

The first forms are `ladder/rung09`, `10` and `13` to `16`. A micro-batch runs forward from the first
stage to the last, then backward to the first. It is *in flight* from its forward to the end of its
backward, and its activations fill memory. The *bubble* is the share of time in which a rank waits. A
schedule is a list of actions for each rank, made by a function of this file. The same lists are
checked, simulated, drawn and executed. `python -m accounts.draw 1f1b --stages=3 --microbatches=5`
(F forward, B backward, . idle):

    rank 0  F0 F1 F2 ............B0--- F3 B1--- F4 B2--- ...B3--- ...B4---
    rank 1  ...F0 F1 ......B0--- F2 B1--- F3 B2--- F4 B3--- ...B4--- ......
    rank 2  ......F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- ............

                   bubble                                        in flight on rank r   costs
    gpipe          (p-1) / (m+p-1)                               m
    1f1b           (p-1) / (m+p-1)                               p-r
    interleaved    (p-1) / (vm+p-1)                              p + (p-2r-1)/v        (vp-1)/(p-1) times the messages
    zb-h1          (p-1)(F+I-W) / (m(F+I+W) + (p-1)(F+I-W))      p                     keeps output gradients until W
    zb-h2          (p-1)(F+I-2W) / (m(F+I+W) + (p-1)(F+I-2W))    2p-1                  as zb-h1
    zb-v           (p-1)(I-W) / (m(F+I+W) + (p-1)(I-W))          p                     as zb-h1, twice the messages
    chimera        (p-2) / (2m+p-2)  if F = B                    p/2+1 .. p            twice the parameters

There are p stages and m micro-batches. A rank has v chunks, each a part of the model. F, I and
W are the durations of forward, input gradient and weight gradient on a whole stage, and B = I +
W. "In flight" counts activations of one micro-batch on a whole stage, for large m. The bubbles hold
under conditions: zb-h1 needs W <= min(F, I) and m >= p; zb-h2 needs W <= min(F, I) and m >= 2p-1;
zb-v needs W <= F <= I and m >= 2p-1; chimera needs p >= 2 and m a multiple of p.

The papers and this table count a rank's *own time*, from its first action to its last. In train.py
all ranks end a step together, because they wait for the gradient norm. So the *whole step* counts,
from the first action of any rank to the last. For zb-h2 this is 0.1111, not 0 (p = 4, m = 8, F = I = W).
"""

import inspect
from itertools import product, zip_longest
from typing import NamedTuple

from errors import UserError

# --- the data of a schedule -----------------------------------------------------------------------


class Action(NamedTuple):
    """One computation of a rank, for one micro-batch in one chunk of the model.

    W computes the weight gradients of the blocks' linears, I all others.
    """

    kind: str  # F forward, B backward, or I and W, the two halves of B
    microbatch: int  # 0 .. m-1
    chunk: int  # chunks are numbered over all ranks

    def __str__(self):
        return f"{self.kind} of micro-batch {self.microbatch}, chunk {self.chunk}"


class Schedule(NamedTuple):
    """The actions of all ranks."""

    name: str
    parts: list  # parts[chunk]: the part of the model in this chunk; a pipeline begins at part 0
    placement: list  # placement[chunk]: the rank that runs this chunk
    actions: list  # actions[rank]: its Actions in their order

    @property
    def microbatches(self):
        return 1 + max(action.microbatch for actions in self.actions for action in actions)


def pipelines(schedule):
    """Return the chunks of each pipeline: [[0 .. p-1]], for Chimera [[0 .. p-1], [p .. 2p-1]]."""
    starts = [chunk for chunk, part in enumerate(schedule.parts) if part == 0]
    return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(schedule.parts)], strict=True)]


def upstream(schedule, chunk):
    """Return the chunk whose output `chunk` reads, or None."""
    return chunk - 1 if schedule.parts[chunk] > 0 else None


def downstream(schedule, chunk):
    return chunk + 1 if chunk + 1 < len(schedule.parts) and schedule.parts[chunk + 1] > 0 else None


def forward_only(schedule, microbatches):
    """Return a Schedule for validation: forwards through the first pipeline, as early as possible."""
    chunks, actions = pipelines(schedule)[0], [[] for _ in schedule.actions]
    v = len(chunks) // len(actions)
    forwards = product(chunks, range(microbatches))
    for chunk, j in sorted(forwards, key=lambda place: place[0] + v * place[1]):
        actions[schedule.placement[chunk]].append(Action("F", j, chunk))
    return schedule._replace(name=f"{schedule.name}, forward only", actions=actions)


# --- the schedules --------------------------------------------------------------------------------


def gpipe(stages, microbatches, chunks=1):
    """GPipe: all forwards, then all backwards. Huang et al., arXiv 1811.06965."""
    m = microbatches
    return straight("gpipe", chunks, [each("F", m, r) + each("B", m, r) for r in range(stages)])


def one_f_one_b(stages, microbatches, chunks=1):
    """1F1B: after the warm-up, a backward follows each forward.

    Narayanan et al., arXiv 2006.09503 (PipeDream-Flush), and 2104.04473, section 2.2.1.
    """
    actions = []
    for rank in range(stages):
        F, B = each("F", microbatches, rank), each("B", microbatches, rank)
        warmup = stages - 1 - rank  # the first backward passes this many ranks before this rank
        actions.append(F[:warmup] + alternate(F[warmup:], B))
    return straight("1f1b", chunks, actions)


def interleaved(stages, microbatches, chunks=2):
    """Interleaved 1F1B: rank r has the chunks r, p + r, 2p + r ...: the idle time is `chunks` times shorter.

    A rank runs p micro-batches through one chunk, then the same ones through its next chunk.
    Narayanan et al., arXiv 2104.04473, section 2.2.2. Raises UserError if m is not a multiple of p,
    or if p > 1 and chunks is 1.
    """
    p, v = stages, chunks
    if v < 2 and p > 1:
        raise UserError(f"chunks={v}: interleaved needs 2 or more (with one it would be 1f1b)")
    if over := microbatches % p:
        low = microbatches - over
        right = f"a multiple of stages={p}, such as {f'{low} or ' if low else ''}{low + p}"
        raise UserError(f"microbatches={microbatches}: interleaved needs {right}")
    actions = []
    for rank in range(p):
        F, B = [], []
        for first in range(0, microbatches, p):
            group = range(first, first + p)
            F += [Action("F", j, c * p + rank) for c in range(v) for j in group]
            B += [Action("B", j, c * p + rank) for c in reversed(range(v)) for j in group]
        # (v-1) p forwards of the first group, in all chunks except the last. Then the first
        # micro-batch runs through the p - 1 - rank later ranks, forward and backward.
        warmup = (v - 1) * p + 2 * (p - 1 - rank)
        actions.append(F[:warmup] + alternate(F[warmup:], B))
    return Schedule("interleaved", list(range(v * p)), [c % p for c in range(v * p)], actions)


def zb_h1(stages, microbatches, chunks=1):
    """ZB-H1: 1F1B with B cut into I and W. The previous rank waits only for I. W fills idle time.

    Each W of rank r is r micro-batches late. Qi et al., arXiv 2401.10241, section 2.1, figure 3.
    """
    return straight("zb-h1", chunks, zero_bubble(stages, microbatches, 1))


def zb_h2(stages, microbatches, chunks=1):
    """ZB-H2: twice the warm-up and the delay of ZB-H1. Qi et al., arXiv 2401.10241, section 2.2, figure 3."""
    return straight("zb-h2", chunks, zero_bubble(stages, microbatches, 2))


def zero_bubble(stages, microbatches, factor):
    actions = []
    for rank in range(stages):
        F, I, W = (each(kind, microbatches, rank) for kind in "FIW")
        warmup, delay = factor * (stages - 1 - rank), factor * rank
        actions.append(F[:warmup] + alternate(F[warmup:], I, [None] * delay + W))
    return actions


# First reading: skip zb_v and chimera.


def zb_v(stages, microbatches, chunks=2):
    """ZB-V: rank r has chunk r on the way down (rank 0 to p-1), chunk 2p-1-r on the way up (to rank 0).

    A rank works in turns; below, turn k = 4 for p = 3. Small letters: the chunk on the way up.

        rank 0   f4 i4 w4 F7 I2 W2      f    micro-batch k
        rank 1   f4 i3 w3 F6 I2 W2      i w  reach the next rank one turn later: micro-batch k-r
        rank 2   f4 i2 w2 F5 I2 W2      F    reaches the next rank one turn later: micro-batch k-r+p
                                        I W  run on all ranks, in the turn of i on rank p-1: micro-batch k-(p-1)

    Rank r runs its first 2p-1-r forwards F before turn r, and no F from turn r to turn p-2. Near
    the end i and I come first, because the next rank waits for them. So the last r actions w move
    r-1 turns later, to the place of W. The last p actions W move 2r turns later. If m < p, the
    actions of micro-batches m .. p-1 are left out.

    Qi et al., arXiv 2401.10241 and 2405.15362 (V-ZB).
    """
    p, m = stages, max(stages, microbatches)
    if p == chunks == 1:
        return straight("zb-v", chunks, zero_bubble(p, microbatches, 1))
    if chunks != 2:
        raise UserError(f"chunks={chunks}: zb-v needs 2 per rank, one for each way")
    actions = []
    for r in range(p):
        down, up, of_rank = r, 2 * p - 1 - r, []
        for k in range(r - up, m + p + 2 * r):  # turn k
            # the micro-batches of i and w, of I and W, of F
            i, I, F = k - r, k - (p - 1), k - r + (up if k < r else p)
            late_w, late_W = i - (r - 1), I - 2 * r  # delayed to this turn
            turn = [
                ("F", k, up, True),
                ("I", i, up, True),
                ("W", i, up, i < m - r),
                ("F", F, down, k < r or k >= p - 1),
                ("I", I, down, True),
                ("W", I, down, I < m - p),
                ("W", late_w, up, late_w >= m - r),
                ("W", late_W, down, late_W >= m - p),
            ]
            for kind, j, chunk, runs in turn:
                if runs and 0 <= j < microbatches:
                    of_rank.append(Action(kind, j, chunk))
        actions.append(of_rank)
    return Schedule("zb-v", list(range(2 * p)), [*range(p), *reversed(range(p))], actions)


def chimera(stages, microbatches, chunks=1):
    """Chimera: two pipelines on the same ranks, one down and one up. Each fills the other's bubble.

    Rank r has part r of the down pipeline (chunk r) and part p-1-r of the up pipeline (chunk
    2p-1-r). Even micro-batches go down, odd ones go up, in groups of p. In a group, k numbers the
    micro-batches of one direction. On part i, micro-batch k has its F in slot i + 2k and its B in
    slot 2p-1 - i + 2k. With even p the directions never need the same slot: F and F, B and B differ
    in parity, F and the other direction's B by 2 or more. The next group begins 2p slots later.
    Li and Hoefler, arXiv 2107.06925, section 3. Raises UserError if p is odd and not 1.
    """
    p = stages
    if p == 1:
        return straight("chimera", chunks, one_f_one_b(1, microbatches).actions)
    if p % 2:
        right = f"an even number, such as {p - 1} or {p + 1} (any microbatches)"
        raise UserError(f"stages={p}: chimera needs {right}")
    one_chunk("chimera", chunks)
    slots = [{} for _ in range(p)]  # slots[rank][slot] = action
    for j in range(microbatches):
        k, up = divmod(j % p, 2)
        start = j // p * 2 * p + 2 * k
        for part in range(p):
            rank, chunk = (p - 1 - part, p + part) if up else (part, part)
            slots[rank][start + part] = Action("F", j, chunk)
            slots[rank][start + 2 * p - 1 - part] = Action("B", j, chunk)
    actions = [[of_rank[slot] for slot in sorted(of_rank)] for of_rank in slots]
    return Schedule("chimera", [*range(p)] * 2, [*range(p), *reversed(range(p))], actions)


def each(kind, microbatches, chunk):
    return [Action(kind, j, chunk) for j in range(microbatches)]


def alternate(*lists):
    """Return a0 b0 a1 b1 ..., without each None."""
    return [action for turn in zip_longest(*lists) for action in turn if action]


def straight(name, chunks, actions):
    one_chunk(name, chunks)
    return Schedule(name, list(range(len(actions))), list(range(len(actions))), actions)


def one_chunk(name, chunks):
    if chunks != 1:
        raise UserError(f"chunks={chunks}: {name} has one per rank; interleaved and zb-v have more")


# Add your own: write a function like those above, and name it in this table (GUIDE.md).
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
    chunks = inspect.signature(SCHEDULES[name]).parameters.get("chunks")
    if chunks is None or chunks.default is chunks.empty:
        raise UserError(f"schedule={name}: its function should take (stages, microbatches, chunks=1)")
    return chunks.default
