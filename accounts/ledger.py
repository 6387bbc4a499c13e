"""The bytes that one rank sends in a step over rings, computed from the configuration alone (slide "分散並列学習").

The slide's columns are 通信内容 (what), 通信形式 (operation) and 通信頻度 (how often). `comm.Ledger` counts the same
table in a run.

Letters: b samples of a micro-batch, s tokens of a sample (in the rows of tp and pp: s/c), h hidden size, t = tp,
c = cp, n data ranks (dp cp), L layers of this pipeline rank, m micro-batches, P elements of this rank's buckets
(padding included), E experts, C places of an expert for a group of tokens.

    axis  what                     operation                        how often (per)          elements
    data  gradients       stage 0  all_reduce                       bucket and step          2 P (n-1)/n
                          stage 1  reduce_scatter                   bucket and step          P (n-1)/n
                          2 and 3  reduce_scatter                   bucket and micro-batch   m P (n-1)/n
          parameters      1 and 2  all_gather                       bucket and step          P (n-1)/n
                          stage 3  2 all_gather (before F, B)       bucket and micro-batch   2m P (n-1)/n
          ... zero_copies=k: the axis of stages 1 to 3 is shards, with n = dp cp / k, and there is one row more:
    copies gradients               all_reduce                       bucket and step          2 P/n (k-1)/k
    tp    activations              4 all_reduce (2 in F, 2 in B)    layer and micro-batch    8 Lm bsh (t-1)/t
          ... recomputation        6 all_reduce (F runs twice)      layer and micro-batch    12 Lm bsh (t-1)/t
          ... sequence parallel    6 all_gather, 4 reduce_scatter   layer and micro-batch    10 Lm bsh (t-1)/t
          ... both                 8 all_gather, 6 reduce_scatter   layer and micro-batch    14 Lm bsh (t-1)/t
          tokens for experts       4 all_to_all (2 in F, 2 in B)    layer and micro-batch    4 Lm E C h (t-1)/t a group
    cp    keys and values          c-1 sends (F), c-1 (B)           layer and micro-batch    4 Lm bsh/t (c-1)/c
          their gradients          c-1 sends (B)                    layer and micro-batch    2 Lm bsh/t (c-1)/c
          tokens for heads         4 all_to_all (2 in F, 2 in B)    layer and micro-batch    8 Lm bsh/t (c-1)/c^2
    pp    activations              send to the next chunk           boundary and micro-batch m bsh a boundary
          gradients of activations send to the previous chunk       boundary and micro-batch m bsh a boundary
          ... sequence parallel    both sends                       boundary and micro-batch 1/t of these elements

A boundary lies between two consecutive chunks on different ranks. The small terms are:

    embedding, head       one all_reduce per micro-batch, the embedding's in forward, the head's in backward
    cross-entropy rows    max, sum, target logit
    ... real losses       if the head computes with its losses: forward, too, with an all_gather (sequence parallel)
    partial gradients     under sequence parallelism, gradients of replicated parameters, over tp
    replicated gradients  the same gradients without sequence parallelism, if n > 2 (`layout.replica_sums`)
    twin gradients        gradients of a bucket that several pipeline ranks keep, over its holders
    parameter norms       two norms of every parameter, for LAMB and LARS
    momentum              for Muon: over data a block's P elements (stages 1 to 3), over tp its whole matrices
    scalars               loss, squared gradient norm and FLAGS, over all ranks
"""

import math
from collections import Counter
from fractions import Fraction

from accounts.matrices import matrices_of
from parallel import schedules
from parallel.comm import sent_bytes
from parallel.experts import places_of_expert
from parallel.layout import replica_sums, rows_outside, tokens_of_rank
from parallel.muon import is_cut
from parallel.optimizer import RULES
from parallel.pipeline import SENT
from parallel.tensor import ROWS
from parallel.versions import published

FLAGS = 1  # numbers of "scalars" besides loss and norm: the flag to stop

PER = {  # how often
    "copies": "bucket and step",
    "pp": "boundary and micro-batch",
    "cp": "layer and micro-batch",
    "tokens for experts": "layer and micro-batch",
    "activations": "layer and micro-batch",
    "embedding": "micro-batch",
    "head": "micro-batch",
    "cross-entropy rows": "micro-batch",
    "parameter norms": "step",
    "scalars": "step",
}
EACH_MICRO_BATCH = {"gradients": 2, "parameters": 3}  # the first such ZeRO stage


def how_often(key, zero):
    """Return the column 通信頻度 of a row (axis, what, operation) in a ZeRO stage."""
    axis, what, _ = key
    usual = "bucket and micro-batch" if zero >= EACH_MICRO_BATCH.get(what, 4) else "bucket and step"
    return PER.get(axis) or PER.get(what, usual)


def predict_sent(layout, schedule, pp_rank, data_rank, item, master_item, real_losses=False):
    """Return the table above as {(axis, what, operation): (calls, bytes)} for a step on one rank.

    item: bytes of an element of a parameter or an activation; master_item: of a gradient or a cross-entropy row.
    real_losses: of the Executor.
    """
    c, table, updates = layout.config, {}, schedules.updates(schedule)  # PipeDream has several
    sizes = layout.axis_sizes()

    def row(axis, what, operation, calls, elements, item):
        """Add to a row. axis: a name in `sizes`, or a tuple of holders."""
        ranks, name = (sizes[axis], axis) if axis in sizes else (len(axis), "holders")
        if ranks > 1 and calls:
            before = table.get((name, what, operation), (0, 0))
            table[name, what, operation] = before[0] + calls, before[1] + sent_bytes(operation, ranks, elements * item)

    (blocks, embeddings, heads), tokens = unit_passes(layout, schedule, pp_rank), tokens_of_rank(c)
    for operation, widths in widths_over_tp(c).items():
        row("tp", "activations", operation, len(widths) * blocks, sum(widths) * blocks * tokens, item)
        for what, count in [("embedding", embeddings), ("head", heads)]:
            row("tp", what, operation, count, count * tokens * c.hidden_size, item)
    if real_losses and c.sequence_parallel:
        row("tp", "head", "all_gather", heads, heads * tokens * c.hidden_size, item)
    heads *= 1 + real_losses  # times that a loss is computed
    calls = 2 * heads * math.ceil(tokens / ROWS)
    row("tp", "cross-entropy rows", "all_reduce", calls, 3 * heads * tokens, master_item)
    _context_rows(row, c, blocks, item, master_item)
    if c.experts:
        calls, places = blocks * (6 if c.recompute == "full" else 4), c.experts * places_of_expert(c, c.tokens_of_group)
        elements = rows_outside(c) // c.tokens_of_group * places * c.hidden_size
        row("tp", "tokens for experts", "all_to_all", calls, calls * elements, item)
    for what, count in sends(schedule, pp_rank).items():
        row("pp", what, "send", count, count * rows_outside(c) * c.hidden_size, item)
    _bucket_rows(row, layout, schedule, pp_rank, data_rank, item, master_item)
    row("world", "scalars", "all_reduce", 1, 2 * updates + FLAGS, 8)
    return {key: (Fraction(calls, updates), Fraction(sent, updates)) for key, (calls, sent) in table.items()}


def widths_over_tp(c):
    """Return {operation: widths of the activations that a block communicates over tp}: of x [n, in] or y [n, out]."""
    matrices = matrices_of(c)
    inputs, outputs = [m.inputs for m in matrices.of_kind("column")], [m.outputs for m in matrices.of_kind("row")]
    forward, backward = {"all_reduce": outputs}, {"all_reduce": inputs}
    if c.sequence_parallel:
        forward = {"all_gather": inputs, "reduce_scatter": outputs}
        backward = {"all_gather": inputs + outputs, "reduce_scatter": inputs}
    runs = 2 if c.recompute == "full" else 1
    return {operation: runs * forward[operation] + backward[operation] for operation in forward}


def _context_rows(row, c, blocks, item, master_item):
    """Add the rows of cp. blocks: forwards of blocks in a step."""
    again, pair = c.recompute == "full", 2 * tokens_of_rank(c) * c.hidden_size // c.tp  # elements of keys and values
    if c.context == "ring":
        turns = blocks * (c.cp - 1)
        row("cp", "keys and values", "send", turns * (2 + again), turns * (2 + again) * pair, item)
        row("cp", "gradients of keys and values", "send", turns, turns * pair, master_item)
    else:  # q, k and v, then y: on average a pair
        calls = blocks * (4 + 2 * again)
        row("cp", "tokens for heads", "all_to_all", calls, calls * pair, item)


def _bucket_rows(row, layout, schedule, pp_rank, data_rank, item, master_item):
    """Add the rows of parameters, gradients and optimizer state."""
    c, zero, updates, norms = layout.config, layout.zero_stage, schedules.updates(schedule), Counter()
    passes = layout.passes(schedule, pp_rank)
    shards = "shards" if c.zero_copies > 1 else "data"
    for name, bucket in layout.buckets(pp_rank).items():
        holders, m = tuple(layout.holders(name)), passes[name]
        begin, end = bucket.part(data_rank % layout.shards, layout.shards)
        reduces = m if zero >= 2 else updates * min(m, 1) * (2 if c.penalty else 1)
        operation = "reduce_scatter" if zero else "all_reduce"
        row(shards, "gradients", operation, reduces, reduces * bucket.size, master_item)
        row("copies", "gradients", "all_reduce", updates, updates * (end - begin), master_item)
        versions = published(schedule, holders)
        gathers = [0, versions, versions, 2 * m][zero]
        row(shards, "parameters", "all_gather", gathers, gathers * bucket.size, item)
        for r in bucket.ranges_in(begin, end):
            if what := replica_sums(c, layout.data_ranks, r):
                row("tp", what, "all_reduce", updates, updates * (r.end - r.begin), master_item)
        row(holders, "twin gradients", "all_reduce", updates, updates * (end - begin), master_item)
        norms[holders] += 2 * len(bucket.specs)
        if RULES[c.optimizer].whole and (matrices := [spec for spec in bucket.specs if spec.matrix]):
            cut = [math.prod(spec.shape) for spec in matrices if is_cut(spec)]
            row(shards, "momentum", "all_gather", updates * (zero > 0), updates * bucket.size, master_item)
            row("tp", "momentum", "all_gather", updates * len(cut), updates * sum(cut), master_item)
    if RULES[c.optimizer].layerwise:  # in float64
        for axis in ["tp", *[shards] * (zero > 0), *norms]:
            row(axis, "parameter norms", "all_reduce", 1, norms.get(axis, norms.total()), 8)


def unit_passes(layout, schedule, rank):
    """Return the forwards in a step: (of all blocks of the rank, of the embedding, of the head)."""
    last = len(layout.unit_specs) - 1
    passed = Counter(u for kind, _, c in schedule.actions[rank] if kind == "F" for u in layout.units[c])
    return passed.total() - passed[0] - passed[last], passed[0], passed[last]


def sends(schedule, rank):
    """Return {what: messages that a pipeline rank sends in a step}."""
    count = Counter()
    for kind, _, chunk in schedule.actions[rank]:
        to = (schedules.downstream if kind == "F" else schedules.upstream)(schedule, chunk)
        if kind in "FBI" and to is not None and schedule.placement[to] != rank:
            count[SENT["activation" if kind == "F" else "gradient"]] += 1
    return count


def average(tables):
    """Return the mean of [(table, number of steps)]."""
    mean, steps = {}, sum(count for _, count in tables)
    for table, count in tables:
        for key, row in table.items():
            before = mean.get(key, (0, 0))
            mean[key] = tuple(x + Fraction(y * count, steps) for x, y in zip(before, row, strict=True))
    return mean
