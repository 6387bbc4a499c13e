"""The memory account's formulas: the bytes that one rank keeps, from the configuration alone.

`ledger.py` predicts what is sent, this file what is kept; `meter.py` measures it in a run; `report.py` prints both.
Letters: P parameters of this rank as stored (padding included), n = dp, t = tp, b micro-batch, s sequence, h hidden, a
heads.

**Model states** (slide "ZeRO (FSDP)"; Rajbhandari et al., arXiv 1910.02054, section 5 and Table 1). Bytes per rank, at
rest between two steps. The paper keeps 2-byte gradients, we accumulate in float32; where the parameters are float32
themselves, they are their own master weights. With `offload` on a GPU, the last two numbers are of the CPU's memory,
and float32 has master weights there, too.

    stage    the paper (2 + 2 + 12)     bf16 (2 + 4 + 4 + 8)     fp32 (4 + 4 + 0 + 8)
      0      16P                        18P                      16P                     all whole
      1       4P + 12P/n                 6P + 12P/n               8P +  8P/n             master weights, moments 1/n
      2       2P + 14P/n                 2P + 16P/n               4P + 12P/n             gradients too
      3            16P/n                      18P/n                    16P/n             parameters too

**Activations** (Korthikanti et al., arXiv 2205.05198, section 4 and Table 2). What a block keeps of one micro-batch
from its forward to its backward. Ours in elements of bsh; theirs in bytes of it, with 2 bytes an element:

    kept for backward           ours         theirs
    LayerNorm 1's input x       1            2           with sequence parallelism 1/t
    qkv's input                 1            2           likewise
    q, k, v                     3/t          6/t
    softmax and its dropout     -            5as/ht      fused attention never forms an [s, s] matrix
    proj's input                1/t          2/t
    dropout's mask              -            1           computed again: a function of (seed, token, column)
    LayerNorm 2's input         1            2           with sequence parallelism 1/t
    fc1's input                 1            2           likewise
    gelu's input                4/t          8/t
    fc2's input                 4/t          8/t
    dropout's mask              -            1
    sum                         4 + 12/t     10 + 24/t + 5as/ht
    ... sequence parallel       16/t         34/t + 5as/ht
    ... full recomputation      1            2           and one block's whole sum while it runs again

In bf16 ours are thus 8 + 24/t bytes: theirs without masks and matrix. To these come what they drop as small (two
numbers per token and LayerNorm, one per token and head: the softmax's log-sum-exp), the embedding's ids, and the input
of the head's matrix, whose logits never exist whole (`tensor.LinearCrossEntropy`). All of it times the micro-batches in
flight (`schedules.py`).

I frees no memory. It replaces the tensors that a block saved by those that W needs, (dy, x) of four linears. The size
is the same, 4 + 12/t (x 2 + 5/t, dy 2 + 7/t). So a micro-batch takes its full size until W. With sequence parallelism
it takes more, because x and dy are then gathered: 4 + 12/t, where 16/t were saved.

**Not counted**, in the formulas and in the measurement: tensors that live only within an operation or between two
(logits, a gradient not yet used); in stages 2 and 3, the whole buffers in use: two of parameters, three of gradients,
and the tied table's. If I and W are apart, also the gradients of every chunk between its I and its W.
"""

import itertools
from collections import deque
from fractions import Fraction
from typing import NamedTuple

from parallel import schedules
from parallel.layout import rows_outside, split
from parallel.optimizer import RULES
from parallel.pipeline import IN_TRANSIT

PEAK = "activations at their peak"


class Sizes(NamedTuple):
    """What a number takes, in bytes, and how many rows there are."""

    item: int  # a parameter, or an element of an activation
    wide: int  # what is computed in float32 (in fp64 runs float64): gradients, master weights, moments, losses
    statistic: int  # LayerNorm's mean and 1/deviation: on a GPU `wide`, on a CPU as the activations
    tokens: int  # bs of a micro-batch: rows within a pair of linears
    rows: int  # rows outside: bs/t with sequence parallelism, else bs
    apart: bool  # the master weights are a buffer of their own


def sizes(c, item, wide, on_cpu):
    """The Sizes of configuration c with `item` and `wide` bytes a number."""
    apart = item != wide or (c.offload and not on_cpu)
    tokens = c.micro_batch_size * c.seq_length
    return Sizes(item, wide, item if on_cpu else wide, tokens, rows_outside(c), apart)


def predict(layout, schedule, rank, z):
    """{what: bytes} that pipeline rank `rank` keeps: its model states, and activations at their peak in a step.

    layout: a `layout.Layout`; schedule: the step's Schedule; z: Sizes. No process and no tensor is needed.
    """
    c = layout.config
    widths = z.item, z.wide, z.wide * z.apart, z.wide * RULES[c.optimizer].moments
    states = model_states(layout.stored(rank), layout.dp, c.zero, *widths)
    return states | {PEAK: peak_of_activations(c, schedule, rank, z)}


# --- model states -----------------------------------------------------------------------------------------------------


def model_states(elements, n, stage, parameters=2, gradients=4, master=4, moments=8):
    """{what: bytes}, as Fractions, for P = `elements` stored parameters and n data ranks: the first table above.

    parameters .. moments: bytes per element of each. The defaults are bf16 with AdamW; ZeRO's Table 1 has gradients=2.
    """
    table = {  # bytes per element, and the stage that begins to share them
        "parameters": (parameters, 3),
        "gradients": (gradients, 2),
        "master weights": (master, 1),
        "moments": (moments, 1),
    }
    return {what: Fraction(elements * width, n if stage >= begins else 1) for what, (width, begins) in table.items()}


# --- activations ------------------------------------------------------------------------------------------------------


def block_activations(c, z):
    """{what: bytes} that one block saves of one micro-batch: the second table above, and the small terms."""
    outside, inside = z.item * z.rows * c.hidden_size, z.item * z.tokens * c.hidden_size // c.tp
    return {
        "LayerNorm 1's input": outside,
        "qkv's input": outside,
        "q, k, v": 3 * inside,
        "proj's input": inside,
        "LayerNorm 2's input": outside,
        "fc1's input": outside,
        "gelu's input": 4 * inside,
        "fc2's input": 4 * inside,
        "LayerNorms' statistics": 2 * 2 * z.statistic * z.rows,
        "log-sum-exp": z.wide * z.tokens * c.num_attention_heads // c.tp,
    }


class Kept(NamedTuple):
    """Bytes that a unit keeps of one micro-batch. Its input is counted as the output of the one before."""

    saved: int  # in its graph, from F (with recomputation: only while it runs backwards) to B or I
    output: int
    operands: int = 0  # from I to W
    turning: int = 0  # what I has at most above `saved`, while it turns that into `operands`
    again: bool = False  # recomputed


def kept(c, z):
    """{unit: Kept} for the embedding, a block and the head."""
    outside, whole = z.item * z.rows * c.hidden_size, z.item * z.tokens * c.hidden_size
    gathered = z.rows < z.tokens
    ids = (8 + 1) * z.tokens  # int64 and bool: which row of this rank's table, and whether it has it at all
    embedding = Kept(ids + 8 * z.rows, outside)  # and the positions

    block = block_activations(c, z)
    saved = sum(block.values()) - outside  # LayerNorm 1's input is the unit's
    turning = whole  # fc2's dy comes before anything goes; from then on as much goes as comes
    if gathered:  # the most is there after qkv's: all four linears' operands, attention and LayerNorm 2 gone
        turning = 4 * whole - 2 * outside - 2 * z.statistic * z.rows - block["log-sum-exp"]
    block = Kept(saved, outside, 4 * whole + 12 * whole // c.tp, turning, c.recompute == "full")

    # The head: its LayerNorm's statistics and the matrix product's input. I makes its weight gradient at once.
    head = Kept(outside + 2 * z.statistic * z.rows, z.wide * z.tokens)
    return {"embedding": embedding, "block": block, "head": head}


def kept_by_chunk(c, schedule, z):
    """For each chunk of the Schedule the Kept of its units, in order.

    With dropout, the numbers of a micro-batch's rows are kept too: once, whoever uses them. Here the chunk's first unit
    has them, or, where that runs again, each block that does.
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


def peak_of_activations(c, schedule, rank, z):
    """Peak bytes of activations on pipeline rank `rank`. c: configuration; schedule: a step's Schedule; z: Sizes."""
    return max(itertools.accumulate(changes(c, schedule, rank, z)))


def changes(c, schedule, rank, z):
    """Yield what a rank's account gains and loses in a step, one after the other: the executor, reduced to bytes."""
    message = z.item * z.rows * c.hidden_size
    chunks = kept_by_chunk(c, schedule, z)
    mail = deque(m.source == rank for m in schedules.messages(schedule) if rank in (m.source, m.destination))
    leaving = 0  # messages that were sent and may not be gone

    def crosses(chunk):
        return chunk is not None and schedule.placement[chunk] != rank

    for kind, _, chunk in schedule.actions[rank]:
        units, above, below = chunks[chunk], schedules.upstream(schedule, chunk), schedules.downstream(schedule, chunk)
        while mail and not mail[0]:  # receives are posted ahead, up to the next send
            mail.popleft()
            yield message
        yield -message * max(0, leaving - IN_TRANSIT)
        leaving = min(leaving, IN_TRANSIT)
        if kind == "F":
            for unit in units:
                yield unit.output + (0 if unit.again else unit.saved)
        elif kind == "W":
            yield -sum(unit.operands for unit in units)
        else:
            ends = Ends(
                dy=message * (below is not None),
                y_gone=message * (crosses(below) or (below is not None and units[-1].again)),
                dx=message * (above is not None),
                own_x=message * (crosses(above) or (above is not None and chunks[above][-1].again)),
            )
            # Without dropout and gathers, dL/dy itself is the dy of the last linear, and waits for W.
            handed_on = kind == "I" and not c.dropout and z.rows == z.tokens
            yield from backward_changes(units, ends, kind == "I", handed_on)
        if kind != "W" and crosses(below if kind == "F" else above):
            mail.popleft()
            leaving += 1


class Ends(NamedTuple):
    """Bytes at the two ends of a chunk in its backward; 0 for a tensor that does not exist."""

    dy: int  # the gradient that it gets
    y_gone: int  # its output, if that was freed: it was sent, or recomputation makes it again
    dx: int  # the gradient that it hands on
    own_x: int  # its input, if no other chunk keeps it


def backward_changes(units, ends, halved, handed_on):
    """Yield the change in bytes at each point of a B, or of an I (`halved`), through a chunk's units."""
    dy, y_gone = ends.dy, ends.y_gone
    for i, unit in reversed(list(enumerate(units))):
        if unit.again:
            yield unit.saved + y_gone  # otherwise y is still there, as the next unit's input
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
