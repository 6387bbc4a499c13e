"""Predict the bytes that one rank keeps, from the configuration alone. `meter.py` measures them in a run.

Letters: those of `ledger.py`, and a heads.

**Model states**: `zero_states.py`.

**Activations** that a block of GPT-2 keeps of one micro-batch (Korthikanti et al., arXiv 2205.05198,
Table 2), in units of bsh. Our column counts elements, the paper's 2 bytes for each:

    kept for backward           ours         the paper
    LayerNorm 1's input x       1            2           with sequence parallelism 1/t
    qkv's input                 1            2           the same
    q, k, v                     3/t          6/t
    softmax and its dropout     -            5as/ht      fused attention forms no [s, s] matrix
    proj's input                1/t          2/t
    dropout's mask              -            1           computed again from (seed, token, column)
    LayerNorm 2's input         1            2           with sequence parallelism 1/t
    fc1's input                 1            2           the same
    gelu's input                4/t          8/t         with ReLU nothing: its result is fc2's input
    fc2's input                 4/t          8/t
    dropout's mask              -            1
    sum                         4 + 12/t     10 + 24/t + 5as/ht
    ... sequence parallel       16/t         34/t + 5as/ht
    ... full recomputation      1            2           plus one block's sum within a backward (`RECOMPUTED`)

No code has this table: `meta.py` measures each unit of any model, and a test compares. There are also the ids and,
for each token, two numbers of each LayerNorm, one of each attention head (log-sum-exp) and the last LayerNorm's
output. All of this counts once per micro-batch in flight, and a constant that units save counts once. The row `PEAK` is
the largest sum after an action. It is None if the units don't run on tensors without values.

The action I frees these tensors, but until W a rank keeps the operands of W: input x and output's gradient dy of all
linears. In GPT-2 they take as much as the freed tensors: 4 + 12/t (x: 2 + 5/t, dy: 2 + 7/t). Sequence parallelism
changes nothing here: it gathers them.

**Whole gradients** of ZeRO-2 and 3 (row `WHOLE`) exist only while they are in use: at most three buckets and the tied
word table. If a schedule splits B, a chunk has them from its I to its W.

`whole_gradients` and `after_actions` repeat, on purpose, what `Bucket` and `Mailbox` do: a formula that runs the
program's own code would repeat its mistakes. `test_memory.py` holds them to measured bytes.

**Not counted** (the log's line of memory contains them):

    - tensors that live only within one action (logits, gradients of activations)
    - in ZeRO stage 3, whole parameters in use: at most two buckets and the tied word table
    - with offload on a GPU, the CPU's buffers for gradients and weights (`Zero.update`)
    - with Muon, whole matrices of one block during the update
    - on GPUs, messages of a pipeline until the GPU has passed them: the host is ahead
    - on GPUs whose attention takes no query groups (`reference.takes_groups`), repeated keys and values
"""

from collections import Counter, defaultdict, deque
from typing import NamedTuple

from accounts import meta
from accounts.zero_states import rank_states, shards_of
from parallel import schedules, simulation
from parallel.layout import split
from parallel.pipeline import IN_TRANSIT, first_uses
from parallel.zero import Window

PEAK, RECOMPUTED = "activations at their peak", "activations of a recomputed block"
WHOLE = "whole gradients at their peak"


def predict_kept(layout, schedule, rank, z):
    """Return {what: bytes} that pipeline rank `rank` keeps. layout: a `layout.Layout`; z: Sizes."""
    states = rank_states(layout, rank, z)
    return states | whole_gradients(layout, schedule, rank, z) | activations(layout.config, schedule, rank, z)


# --- model states -----------------------------------------------------------------------------------------------------


def whole_gradients(layout, schedule, rank, z):
    """Return the row WHOLE as `Bucket.open_gradient` and `reduce` make it; {} if no gradients are sharded."""
    if layout.zero_stage < 2:
        return {}
    cut = {name: bucket for name, bucket in layout.buckets(rank).items() if shards_of(layout, bucket) > 1}
    size = Counter({name: z.wide * bucket.size for name, bucket in cut.items()})
    opened, sums, peak = set(), [], 0  # sums: those that still run
    for kind, _, chunk in schedule.actions[rank]:
        buckets = [layout.names_of[unit] for unit in layout.units[chunk] if kind != "F"]
        for names, complete in zip(buckets[::-1], first_uses(buckets)[::-1], strict=True):
            sums = [name for name in sums if name not in names]
            opened.update(names)
            peak = max(peak, sum(size[name] for name in opened.union(sums)))
            if kind != "I":
                opened.difference_update(complete)
                sums = [*sums, *complete][-Window.MOST :]  # one more ends the oldest
    return {WHOLE: peak} if peak else {}


# --- activations ------------------------------------------------------------------------------------------------------


class ChunkBytes(NamedTuple):
    """Bytes of a chunk and a micro-batch."""

    saved: int  # from F to B or I: saved by autograd, or an output
    output: int  # an output that only the next chunk keeps
    after_send: int  # what autograd keeps of it, when it is sent
    operands: int  # from I to W
    constants: dict  # {tensor: bytes} kept as long as `saved`, but once for all micro-batches and chunks
    recomputed: int  # most of a unit that is computed again


FREED = {"B": ("saved", "activation", "gradient"), "I": ("saved", "activation", "gradient"), "W": ("operands",)}


def kept_by_chunk(schedule, works, message):
    """Return the ChunkBytes of each chunk. works: `meta.work_of`; message: bytes of a unit's output."""
    chunks, shared = [], defaultdict(set)  # shared: {(pipeline, rank): tensors that its chunks keep}
    parts = split(range(len(works)), max(schedule.parts) + 1)
    for chunk, part in enumerate(schedule.parts):
        rank, below, output = schedule.placement[chunk], schedules.downstream(schedule, chunk), message
        first, *inner = parts[part]
        units, kept, constants, recomputed = works[first : first + len(parts[part])], {}, {}, 0
        for work in units:
            if work.runs > 1:
                recomputed = max(recomputed, sum(work.saved.values()) + sum(work.constants.values()))
            else:
                kept |= work.saved
                constants |= work.constants
        end = "x", first + len(units)
        after_send = kept.pop(end, 0)
        kept = {key: kept[key] for key in kept.keys() - shared[chunk - part, rank] - {("x", first)}}
        shared[chunk - part, rank].update(kept)
        kept |= {("x", i): message for i in inner}
        if below is None:
            kept[end] = after_send  # the losses
        elif schedule.placement[below] == rank and units[-1].runs == 1:  # this chunk keeps it longer than the next
            kept[end], output = message, 0
        operands = sum(work.operands for work in units)
        chunks.append(ChunkBytes(sum(kept.values()), output, after_send, operands, constants, recomputed))
    return chunks


def activations(c, schedule, rank, z, messages=None):
    """Return the rows PEAK and RECOMPUTED. messages: `simulation.messages` of the schedule, if known."""
    if (works := meta.work_of(c, z.item, z.on_cpu)) is None:
        return {PEAK: None} | ({RECOMPUTED: None} if c.recompute == "full" else {})
    message = z.item * z.rows * c.hidden_size
    chunks, messages = kept_by_chunk(schedule, works, message), messages or simulation.messages(schedule)
    table = {PEAK: max(after_actions(schedule, rank, chunks, message, messages))}
    recomputed = max(chunks[action.chunk].recomputed for action in schedule.actions[rank])
    return table | ({RECOMPUTED: recomputed} if recomputed else {})


def after_actions(schedule, rank, chunks, message, messages):
    """Yield the bytes that a rank keeps after each action. message: bytes of one message."""
    bytes_kept = {}  # {(what, micro-batch, chunk that needs it): bytes}
    sent = deque()  # (key in transit, key of what autograd keeps)
    mail = deque(m for m in messages if rank in (m.source, m.destination))
    has_constants = any(chunk.constants for chunk in chunks)
    for kind, j, chunk in schedule.actions[rank]:
        while len(sent) > IN_TRANSIT:
            key, saved = sent.popleft()
            del bytes_kept[key]
            if saved in bytes_kept:
                bytes_kept[saved] += chunks[saved[2]].after_send
        while mail and mail[0].source != rank:  # receives before the next send start now
            m = mail.popleft()
            bytes_kept[m.kind, m.microbatch, m.consumer.chunk] = message
        for what in FREED.get(kind, ()):
            bytes_kept.pop((what, j, chunk), None)
        if kind == "F":
            bytes_kept["saved", j, chunk] = chunks[chunk].saved
            what, size, to = "activation", chunks[chunk].output, schedules.downstream(schedule, chunk)
        else:
            what, size, to = "gradient", message, schedules.upstream(schedule, chunk)
        if kind == "I":
            bytes_kept["operands", j, chunk] = chunks[chunk].operands
        if kind in "FBI" and to is not None:
            bytes_kept[what, j, to] = size
            if schedule.placement[to] != rank:
                mail.popleft()
                sent.append(((what, j, to), ("saved", j, chunk)))
        constants = {}
        for what, _, at in bytes_kept if has_constants else ():
            constants |= chunks[at].constants if what == "saved" else {}
        yield sum(bytes_kept.values()) + sum(constants.values())
