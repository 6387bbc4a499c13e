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

The peak is the largest number of bytes between two actions. With full recomputation, a backward saves the tensors of
one block at a time and frees them again. These bytes are a row of their own, `RECOMPUTED`. The sum of both rows is at
least the number of bytes within a backward.

**Not counted**, by the formulas and by the meter:

    - tensors that live only within one action (logits, gradients, the operands that I has added before it has freed the
      tensors of the same block)
    - in ZeRO stages 2 and 3, whole gradients in use: at most three buckets and the tied word table
    - in ZeRO stages 2 and 3, if a schedule splits B: the whole gradients of each chunk from its I to its W
    - in ZeRO stage 3, whole parameters in use: at most two buckets and the tied word table
    - with offload on a GPU, in the CPU's memory: a buffer for the gradients that the rank updates (`Bucket.staging`)
"""

import functools
import itertools
import os
from collections import Counter, deque
from fractions import Fraction
from typing import NamedTuple

import torch

from errors import UserError
from operations import DTYPES, resolved_dtype
from parallel import schedules
from parallel.layout import rows_outside, split
from parallel.optimizer import RULES
from parallel.pipedream import OLDER, SUMS
from parallel.pipeline import IN_TRANSIT
from parallel.versions import kept_versions
from reference import ACTIVATIONS

PEAK, RECOMPUTED = "activations at their peak", "activations of a recomputed block"


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
    """Return {what: bytes} that pipeline rank `rank` keeps: model states, and activations in a step.

    layout: a `layout.Layout`; schedule: the step's Schedule; z: Sizes. The prediction needs no process and no tensor.
    """
    states = rank_states(layout, rank, z)
    if schedule.versions:
        states |= versions_of_weights(layout, schedule, rank, z)
    return states | activations(layout.config, schedule, rank, z)


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
        versions, waiting = kept_versions(schedule, rank, layout.holders(name))
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


def refuse_too_large(c, dp, device):
    """Raise UserError if this rank has less memory than `least`, before the model is built. dp: data ranks."""
    item = DTYPES[resolved_dtype(c, device)].itemsize
    need = least(c, dp, sizes(c, item, max(item, 4), device.type == "cpu"))
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory
    if need > have:
        what = f"num_layers={c.num_layers}, hidden_size={c.hidden_size}, micro_batch_size={c.micro_batch_size}"
        raise UserError(f"{what}: needs at least {need / 1e9:,.1f} GB of memory; this rank has {have / 1e9:,.1f} GB")


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
    """Bytes that a unit keeps of one micro-batch between two actions. Its input is the output of another unit."""

    saved: int  # tensors in its graph, from F to B or I; 0 if recomputation makes them again
    output: int
    operands: int = 0  # tensors from I to W
    again: int = 0  # tensors that recomputation saves within B or I, and the input
    rows: bool = False  # True if the graph has the index of each row (`MicroBatch.rows`), from F to B or I


def kept_by_chunk(c, schedule, z):
    """Return a list for each chunk of the Schedule: the Kept of its units, in order."""
    outside, whole = z.item * z.rows * c.hidden_size, z.item * z.tokens * c.hidden_size
    full, dropout = c.recompute == "full", c.dropout > 0
    block = sum(block_activations(c, z).values())
    saved = 0 if full else block - outside  # LayerNorm 1's input is the block's input
    table = {
        "embedding": Kept(8 * z.tokens + 8 * z.rows, outside, rows=dropout),  # ids and positions, int64
        "block": Kept(saved, outside, 4 * whole + 12 * whole // c.tp, block * full, dropout and not full),
        "head": Kept(outside + 2 * z.statistic * z.rows, z.wide * z.tokens),  # its LayerNorm's output and statistics
    }
    names = split(["embedding", *["block"] * c.num_layers, "head"], max(schedule.parts) + 1)
    return [[table[name] for name in names[part]] for part in schedule.parts]


def activations(c, schedule, rank, z, messages=None):
    """Return {what: bytes} of the activations of pipeline rank `rank`: the peak in a step, and a recomputed block.

    messages: the messages of `rank` in `schedules.messages(schedule)`, or all of them, if the caller has them.
    """
    peak = max(itertools.accumulate(changes(c, schedule, rank, z, messages or schedules.messages(schedule))))
    again = recomputed(c, schedule, rank, z) if c.recompute == "full" else 0
    return {PEAK: peak} | ({RECOMPUTED: again} if again else {})


def recomputed(c, schedule, rank, z):
    """Return the bytes that recomputation of a block saves on pipeline rank `rank`, and frees in the same action."""
    chunks, found = kept_by_chunk(c, schedule, z), [0]
    for pipeline in schedules.pipelines(schedule):
        # The embedding has saved the index of each row already, if it is on this rank.
        rows = 8 * z.rows * (c.dropout > 0 and schedule.placement[pipeline[0]] != rank)
        own = [unit for chunk in pipeline if schedule.placement[chunk] == rank for unit in chunks[chunk]]
        found += [unit.again + rows for unit in own if unit.again]
    return max(found)


def changes(c, schedule, rank, z, messages):
    """Yield by how much each action of a rank changes the bytes that it keeps, in the order of `pipeline.Executor`."""
    message, chunks = z.item * z.rows * c.hidden_size, kept_by_chunk(c, schedule, z)
    mail = deque(m.source == rank for m in messages if rank in (m.source, m.destination))
    leaving = 0  # sent messages that may still be in transit
    sharing = Counter()  # {micro-batch: this rank's chunks in flight that share its index of rows}

    def crosses(before, after):
        return None not in (before, after) and schedule.placement[before] != schedule.placement[after]

    def handed_on(before, after):
        """Return the bytes of the tensor between two chunks if `after` alone keeps it at the end: 0 or `message`."""
        return message * (crosses(before, after) or (None not in (before, after) and chunks[before][-1].again > 0))

    @functools.cache
    def of(chunk):
        units, above, below = chunks[chunk], schedules.upstream(schedule, chunk), schedules.downstream(schedule, chunk)
        own, operands = sum(unit.saved + unit.output for unit in units), sum(unit.operands for unit in units)
        return own, operands, any(unit.rows for unit in units), above, below

    for kind, j, chunk in schedule.actions[rank]:
        own, operands, rows, above, below = of(chunk)
        change = -message * max(0, leaving - IN_TRANSIT)
        leaving = min(leaving, IN_TRANSIT)
        while mail and not mail[0]:  # all receives before the rank's next send start now
            mail.popleft()
            change += message
        if kind == "F":
            change += own + 8 * z.rows * (rows and not sharing[j])
            sharing[j] += rows
        elif kind in "BI":  # frees x, the chunk's own tensors and dy; makes dx
            sharing[j] -= rows
            change -= own + 8 * z.rows * (rows and not sharing[j])
            change += handed_on(chunk, below) - handed_on(above, chunk)
            change += message * (above is not None) - message * (below is not None)
        change += {"I": 1, "W": -1}.get(kind, 0) * operands
        if kind not in "WU" and crosses(*((chunk, below) if kind == "F" else (above, chunk))):
            mail.popleft()
            leaving += 1
        yield change
