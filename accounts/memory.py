"""The formulas of memory: bytes that one rank keeps, computed from the configuration alone.

`meter.py` measures these bytes in a run, and `report.py` prints them beside the formulas. Letters: P elements of this
rank's buckets (padding included), n = dp, t = tp, b samples of a micro-batch, s tokens of a sample, h hidden size, a
heads.

**Model states** (slide "ZeRO (FSDP)"; Rajbhandari et al., arXiv 1910.02054, section 5 and Table 1). The table shows
the bytes of a rank between two steps. A title such as (2 + 4 + 4 + 8) lists bytes per element: parameters, gradients,
master weights, moments. The paper sums the last two. It has 2-byte gradients; our gradients are float32. In fp32 the
parameters are also the master weights. With `offload` on a GPU, master weights and moments lie in the CPU's memory,
and fp32 also has separate master weights.

    stage    the paper (2 + 2 + 12)     bf16 (2 + 4 + 4 + 8)     fp32 (4 + 4 + 0 + 8)
      0      16P                        18P                      16P                     nothing is sharded
      1       4P + 12P/n                 6P + 12P/n               8P +  8P/n             master weights, moments 1/n
      2       2P + 14P/n                 2P + 16P/n               4P + 12P/n             gradients too
      3            16P/n                      18P/n                    16P/n             parameters too

**Activations** (Korthikanti et al., arXiv 2205.05198, section 4 and Table 2). A block keeps these tensors of one
micro-batch from its forward to its backward. Our column counts elements in units of bsh. The paper's column counts
bytes in units of bsh, with 2 bytes per element:

    kept for backward           ours         the paper
    LayerNorm 1's input x       1            2           with sequence parallelism 1/t
    qkv's input                 1            2           the same
    q, k, v                     3/t          6/t
    softmax and its dropout     -            5as/ht      fused attention never forms an [s, s] matrix
    proj's input                1/t          2/t
    dropout's mask              -            1           computed again from (seed, token, column)
    LayerNorm 2's input         1            2           with sequence parallelism 1/t
    fc1's input                 1            2           the same
    gelu's input                4/t          8/t         with ReLU nothing: its result is fc2's input
    fc2's input                 4/t          8/t
    dropout's mask              -            1
    sum                         4 + 12/t     10 + 24/t + 5as/ht
    ... sequence parallel       16/t         34/t + 5as/ht
    ... full recomputation      1            2           plus one block's sum during its recomputation and backward

In bf16 our sum is 8 + 24/t bytes: the paper's sum without the dropout masks and the [s, s] matrix. The formulas add
small terms: for each token two numbers in each LayerNorm and one in each attention head (log-sum-exp),
the ids of the embedding, and the output of the last LayerNorm. The logits never exist whole
(`tensor.LinearCrossEntropy`). The table and the small terms count once per micro-batch in flight (`schedules.py`).

The action I frees a block's saved tensors, but keeps the operands of W: for each of four linears the input x and the
gradient dy of its output. The operands are as large as the freed tensors, 4 + 12/t (x: 2 + 5/t, dy: 2 + 7/t). So this
memory is free only after W. With sequence parallelism the size even grows in I, from 16/t to 4 + 12/t, because x and
dy are gathered.

**Not counted**, by the formulas and by the meter:

    - tensors that live only within an operation or between two operations (logits, a gradient before its use)
    - in ZeRO stages 2 and 3, whole gradients in use: at most three buckets and the tied word table
    - in ZeRO stages 2 and 3, if a schedule splits B: the whole gradients of each chunk from its I to its W
    - in ZeRO stage 3, whole parameters in use: at most two buckets and the tied word table
    - with offload on a GPU, in the CPU's memory: a buffer for the gradients that the rank updates (`Bucket.staging`)
"""

import itertools
from collections import deque
from fractions import Fraction
from typing import NamedTuple

from parallel import schedules
from parallel.layout import rows_outside, split
from parallel.optimizer import RULES
from parallel.pipeline import IN_TRANSIT
from reference import ACTIVATIONS

PEAK = "activations at their peak"
OLDER, SUMS = "older versions of parameters", "gradients that wait for holders"  # only of asynchronous schedules


class Sizes(NamedTuple):
    """Bytes of one number of each kind, and rows of a micro-batch. A row is a token's vector."""

    item: int  # a parameter, or an element of an activation
    wide: int  # a float32 number (float64 in fp64 runs): gradients, master weights, moments, losses
    statistic: int  # LayerNorm's mean and 1/deviation: `wide` on a GPU, `item` on a CPU
    tokens: int  # bs: rows between a column parallel linear and the next row parallel linear
    rows: int  # rows elsewhere: bs/t with sequence parallelism, otherwise bs
    apart: bool  # True if master weights have their own buffer


def sizes(c, item, wide, on_cpu):
    """Return the Sizes of configuration c. item, wide: as in Sizes."""
    apart = item != wide or (c.offload and not on_cpu) or c.schedule in schedules.ASYNCHRONOUS
    tokens = c.micro_batch_size * c.seq_length
    return Sizes(item, wide, item if on_cpu else wide, tokens, rows_outside(c), apart)


def predict(layout, schedule, rank, z):
    """Return {what: bytes} that pipeline rank `rank` keeps: model states, and the peak of activations in a step.

    layout: a `layout.Layout`; schedule: the step's Schedule; z: Sizes. The prediction needs no process and no tensor.
    """
    states = rank_states(layout, rank, z)
    if schedule.versions:
        states |= versions_of_weights(layout, schedule, rank, z)
    return states | {PEAK: peak_of_activations(layout.config, schedule, rank, z)}


# --- model states -----------------------------------------------------------------------------------------------------


def rank_states(layout, rank, z):
    """Return the model states of pipeline rank `rank` as {what: bytes}. layout, z: as in `predict`."""
    c = layout.config
    widths = z.item, z.wide, z.wide * z.apart, z.wide * RULES[c.optimizer].moments
    return model_states(layout.stored(rank), layout.dp, c.zero, *widths)


def model_states(elements, n, stage, parameters=2, gradients=4, master=4, moments=8):
    """Return the first table above as {what: bytes}, in Fractions. elements: P; n: data ranks; stage: ZeRO stage.

    parameters, gradients, master, moments: bytes per element. The defaults are bf16 with AdamW. Table 1 of the paper
    has gradients=2.
    """
    table = {  # bytes per element, and the first ZeRO stage that shards them
        "parameters": (parameters, 3),
        "gradients": (gradients, 2),
        "master weights": (master, 1),
        "moments": (moments, 1),
    }
    return {what: Fraction(elements * width, n if stage >= begins else 1) for what, (width, begins) in table.items()}


def versions_of_weights(layout, schedule, rank, z):
    """Return {what: bytes} that an asynchronous schedule adds on pipeline rank `rank` (`pipedream.py`)."""
    older = sums = 0
    for name, bucket in layout.buckets(rank).items():
        begin, end = bucket.owned(0, layout.stage)
        versions, waiting = schedules.kept_versions(schedule, rank, layout.holders(name))
        older += z.item * bucket.size * (versions - 1)
        sums += z.wide * (end - begin) * waiting
    return {OLDER: older, SUMS: sums}


def least(c, dp, z):
    """Return a lower bound of the bytes that the fullest rank keeps, with configuration c on `dp` data ranks. z: Sizes.

    The bound counts the matrices of a stage's blocks, its share of the two tables, and the activations of one
    micro-batch. So it needs no layout and no schedule, and its time does not depend on c.
    """
    blocks, h = c.num_layers // (c.pp * c.chunks) * c.chunks, c.hidden_size
    elements = 12 * blocks * h * h // c.tp + (c.padded_vocab_size // c.tp + c.positions) * h // c.pp
    states = model_states(elements, dp, c.zero, z.item, z.wide, z.wide * z.apart, z.wide * RULES[c.optimizer].moments)
    block = block_activations(c, z)
    if c.eval_only:
        return states["parameters"] + block["qkv's input"]
    kept_on_device = [states[what] for what in ("parameters", "gradients") if c.offload] or states.values()
    return sum(kept_on_device) + blocks * (block["qkv's input"] if c.recompute == "full" else sum(block.values()))


# --- activations ------------------------------------------------------------------------------------------------------


def block_activations(c, z):
    """Return {what: bytes} that one block saves of one micro-batch: the second table above, plus small terms."""
    outside, inside = z.item * z.rows * c.hidden_size, z.item * z.tokens * c.hidden_size // c.tp
    return {
        "LayerNorm 1's input": outside,
        "qkv's input": outside,
        "q, k, v": 3 * inside,
        "proj's input": inside,
        "LayerNorm 2's input": outside,
        "fc1's input": outside,
        "gelu's input": 4 * inside * ACTIVATIONS[c.activation].keeps_input,
        "fc2's input": 4 * inside,
        "LayerNorms' statistics": 2 * 2 * z.statistic * z.rows,
        "log-sum-exp": z.wide * z.tokens * c.num_attention_heads // c.tp,
    }


class Kept(NamedTuple):
    """Bytes that a unit keeps of one micro-batch. Its input counts as the output of the unit before."""

    saved: int  # in its graph, from F to B or I (with recomputation, only during B or I)
    output: int
    operands: int = 0  # from I to W
    turning: int = 0  # extra bytes at the peak of the action I, while operands replace saved tensors
    again: bool = False  # True if recomputation runs this unit again


def kept(c, z):
    """Return {unit: Kept} for the embedding, a block and the head."""
    outside, whole = z.item * z.rows * c.hidden_size, z.item * z.tokens * c.hidden_size
    gathered = z.rows < z.tokens
    embedding = Kept(8 * z.tokens + 8 * z.rows, outside)  # ids and positions, int64

    block = block_activations(c, z)
    saved = sum(block.values()) - outside  # minus LayerNorm 1's input, which is the unit's input
    turning = whole  # fc2's dy comes first; each later operand replaces a saved tensor of equal size
    if gathered:  # operands + qkv's input + LayerNorm 1's statistics - `saved`, simplified
        turning = 4 * whole - 2 * outside - 2 * z.statistic * z.rows - block["log-sum-exp"]
    turning += 4 * whole // c.tp - block["gelu's input"]  # with ReLU, fc1's dy replaces no saved tensor
    block = Kept(saved, outside, 4 * whole + 12 * whole // c.tp, turning, c.recompute == "full")

    # The head saves the output and the statistics of its LayerNorm. Its weight gradient is computed in B or I.
    head = Kept(outside + 2 * z.statistic * z.rows, z.wide * z.tokens)
    return {"embedding": embedding, "block": block, "head": head}


def kept_by_chunk(c, schedule, z):
    """Return a list for each chunk of the Schedule: the Kept of its units, in order.

    Dropout also keeps the index of each row (`MicroBatch.rows`, int64), once for a chunk. The indices count for the
    chunk's first unit. If the first unit is recomputed, they exist only in B or I: once in each block's.
    """
    table, chunks = kept(c, z), []
    names = split(["embedding", *["block"] * c.num_layers, "head"], max(schedule.parts) + 1)
    for part in schedule.parts:
        units = [table[name] for name in names[part]]
        if c.dropout:
            for i, (name, unit) in enumerate(zip(names[part], units, strict=True)):
                if name != "head" and (i == 0 or units[0].again):
                    units[i] = unit._replace(saved=unit.saved + 8 * z.rows)
        chunks.append(units)
    return chunks


def peak_of_activations(c, schedule, rank, z, messages=None):
    """Return the peak bytes of activations on pipeline rank `rank`. c: configuration; schedule: Schedule; z: Sizes.

    messages: the messages of `rank` in `schedules.messages(schedule)`, or all of them, if the caller has them.
    """
    return max(itertools.accumulate(changes(c, schedule, rank, z, messages or schedules.messages(schedule))))


def changes(c, schedule, rank, z, messages):
    """Yield every change of a rank's kept bytes in a step, in the order of `pipeline.Executor`."""
    message = z.item * z.rows * c.hidden_size
    chunks = kept_by_chunk(c, schedule, z)
    mail = deque(m.source == rank for m in messages if rank in (m.source, m.destination))
    leaving = 0  # sent messages that may still be in transit

    def crosses(chunk):
        return chunk is not None and schedule.placement[chunk] != rank

    for kind, _, chunk in schedule.actions[rank]:
        units, above, below = chunks[chunk], schedules.upstream(schedule, chunk), schedules.downstream(schedule, chunk)
        while mail and not mail[0]:  # all receives before the rank's next send start now
            mail.popleft()
            yield message
        yield -message * max(0, leaving - IN_TRANSIT)
        leaving = min(leaving, IN_TRANSIT)
        if kind == "F":
            for unit in units:
                yield unit.output + (0 if unit.again else unit.saved)
        elif kind == "W":
            yield -sum(unit.operands for unit in units)
        elif kind != "U":
            ends = Ends(
                dy=message * (below is not None),
                y_gone=message * (crosses(below) or (below is not None and units[-1].again)),
                dx=message * (above is not None),
                own_x=message * (crosses(above) or (above is not None and chunks[above][-1].again)),
            )
            # Without dropout and gathers, the gradient of the chunk's output is also fc2's dy, which W needs.
            handed_on = kind == "I" and not c.dropout and z.rows == z.tokens
            yield from backward_changes(units, ends, kind == "I", handed_on)
        if kind not in "WU" and crosses(below if kind == "F" else above):
            mail.popleft()
            leaving += 1


class Ends(NamedTuple):
    """Bytes of a chunk's input x, its output y and their gradients in its backward. A missing tensor has 0 bytes."""

    dy: int  # the gradient of y
    y_gone: int  # y's bytes, if y is already freed: it was sent, or is recomputed
    dx: int  # the gradient of x
    own_x: int  # x, if no other chunk keeps it


def backward_changes(units, ends, halved, handed_on):
    """Yield the changes in bytes while B, or I (`halved`), runs through a chunk's units.

    handed_on: True if the gradient of the chunk's output is also an operand of W.
    """
    dy, y_gone = ends.dy, ends.y_gone
    for i, unit in reversed(list(enumerate(units))):
        if unit.again:
            yield unit.saved + y_gone  # y_gone is 0 if y still lives, as the input of a later unit
            y_gone = 0
        spent = unit.saved + dy
        if halved:
            new = unit.turning - dy * handed_on
            yield new
            spent += new - unit.operands
        yield -spent
        if i == 0:
            yield ends.dx
        yield y_gone - unit.output
        y_gone = dy = 0
    yield -ends.own_x
