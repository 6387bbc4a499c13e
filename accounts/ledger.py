"""The ledger's formulas: bytes sent in a step, computed from the configuration alone.

Slide "分散並列学習" lists what each kind of parallelism sends (通信内容), the operation (通信形式) and how often
(通信頻度). This file predicts that table and its bytes for any number of ranks. `comm.Ledger` counts the same table in
a run, and `report.py` prints both side by side.

Letters: b samples of a micro-batch, s tokens of a sample, h hidden size, t = tp, n = dp, L layers of this pipeline
rank, m micro-batches, P elements of this rank's buckets (padding included). Each rank sends in a step:

    axis  what                     operation                        how often (per)          elements
    dp    gradients       stage 0  all_reduce                       bucket and step          2 P (n-1)/n
                          stage 1  reduce_scatter                   bucket and step          P (n-1)/n
                          2 and 3  reduce_scatter                   bucket and micro-batch   m P (n-1)/n
          parameters      1 and 2  all_gather                       bucket and step          P (n-1)/n
                          stage 3  2 all_gather (before F, B)       bucket and micro-batch   2m P (n-1)/n
    tp    activations              4 all_reduce (2 in F, 2 in B)    layer and micro-batch    8 Lm bsh (t-1)/t
          ... recomputation        6 all_reduce (F runs twice)      layer and micro-batch    12 Lm bsh (t-1)/t
          ... sequence parallel    6 all_gather, 4 reduce_scatter   layer and micro-batch    10 Lm bsh (t-1)/t
          ... both                 8 all_gather, 6 reduce_scatter   layer and micro-batch    14 Lm bsh (t-1)/t
    pp    activations              send to the next chunk           boundary and micro-batch m bsh for each boundary
          gradients of activations send to the previous chunk       boundary and micro-batch m bsh for each boundary
          ... sequence parallel    both sends                       boundary and micro-batch 1/t of these elements

A boundary lies between two consecutive chunks on different ranks. Sequence parallelism needs two more all_gathers in
backward, because a rank keeps only bsh/t elements of a linear's input. The small terms are:

    embedding, head       one all_reduce per micro-batch, the embedding's in forward, the head's in backward
    cross-entropy rows    max, sum, target logit
    partial gradients     under sequence parallelism, gradients of replicated parameters, summed over tp
    replicated gradients  the same gradients without sequence parallelism, if dp > 2 (`layout.replica_sums`)
    twin gradients        gradients of a bucket that several pipeline ranks keep, summed over its holders
    parameter norms       two norms of every parameter, for LAMB and LARS
    scalars               loss, squared gradient norm and FLAGS, summed over all ranks
"""

import math
from collections import Counter
from fractions import Fraction

from parallel import schedules
from parallel.comm import sent_bytes
from parallel.layout import replica_sums, rows_outside
from parallel.optimizer import RULES
from parallel.pipeline import SENT
from parallel.tensor import ROWS
from parallel.versions import published

FLAGS = 1  # float64 numbers besides loss and squared gradient norm at the end of a step: the flag to stop


def predict(layout, schedule, pp_rank, dp_rank, item, master_item):
    """Return the table above as {(axis, what, operation): (calls, bytes)} for a step on one rank.

    layout: a `layout.Layout`; schedule: the step's Schedule. item: bytes of an element of a parameter or an activation;
    master_item: bytes of an element of the gradients and of the cross-entropy rows.

    The prediction needs no process and no tensor.
    """
    table, n = rows(layout, schedule, pp_rank, dp_rank, item, master_item), schedules.updates(schedule)
    return {key: (Fraction(calls, n), Fraction(sent, n)) for key, (calls, sent, _) in table.items()}


def how_often(layout, schedule, pp_rank):
    """Return the column 通信頻度 (how often): {(axis, what, operation): "layer and micro-batch", ...}."""
    return {key: per for key, (_, _, per) in rows(layout, schedule, pp_rank, 0, 1, 1).items()}


def rows(layout, schedule, pp_rank, dp_rank, item, master_item):
    """Return {(axis, what, operation): (calls, bytes, how often)} on one rank.

    They are those of all actions in the Schedule: a step, or a call of an asynchronous schedule with several updates.
    """
    c, table, updates = layout.config, {}, schedules.updates(schedule)
    sizes = {"dp": layout.dp, "tp": c.tp, "pp": c.pp, "world": layout.dp * c.tp * c.pp}

    def row(axis, what, operation, per, calls, elements, item):
        """Add calls and bytes to a row. axis: a name in `sizes`, or a tuple of holders. per: how often, in words."""
        ranks, name = (sizes[axis], axis) if axis in sizes else (len(axis), "holders")
        if ranks > 1 and calls:
            before = table.get((name, what, operation), (0, 0))
            sent = sent_bytes(operation, ranks, elements * item)
            table[name, what, operation] = before[0] + calls, before[1] + sent, per

    _tensor_rows(row, c, *unit_passes(layout, schedule, pp_rank), item, master_item)
    message = rows_outside(c) * c.hidden_size
    for what, count in sends(schedule, pp_rank).items():
        row("pp", what, "send", "boundary and micro-batch", count, count * message, item)
    norms, passes, partial = Counter(), layout.passes(schedule, pp_rank), replica_sums(c, layout.dp)
    for name, bucket in layout.buckets(pp_rank).items():
        holders, step = tuple(layout.holders(name)), "bucket and step"
        versions = published(schedule, holders)
        _data_rows(row, bucket.size, layout.stage, passes[name], updates, versions, item, master_item)
        begin, end = bucket.owned(dp_rank, layout.stage)
        uncut = [r.end - r.begin for r in bucket.ranges_in(begin, end) if not r.cut] if partial else []
        row("tp", partial, "all_reduce", step, updates * len(uncut), updates * sum(uncut), master_item)
        row(holders, "twin gradients", "all_reduce", step, updates, updates * (end - begin), master_item)
        norms[holders] += 2 * len(bucket.specs)
    if RULES[c.optimizer].layerwise:  # two norms of every parameter, in float64
        whole = norms.total()
        for axis, calls, count in [
            ("tp", 1, whole),
            ("dp", int(c.zero >= 1), whole),
            *((h, 1, norms[h]) for h in norms),
        ]:
            row(axis, "parameter norms", "all_reduce", "step", calls, count, 8)
    row("world", "scalars", "all_reduce", "step", 1, 2 * updates + FLAGS, 8)
    return table


def unit_passes(layout, schedule, rank):
    """Return the numbers of forwards in a step on pipeline rank `rank`: (all its blocks, the embedding, the head)."""
    last = len(layout.table) - 1
    passed = Counter(u for kind, _, c in schedule.actions[rank] if kind == "F" for u in layout.units[c])
    return passed.total() - passed[0] - passed[last], passed[0], passed[last]


def sends(schedule, rank):
    """Return {what: number of messages} that pipeline rank `rank` sends in a step."""
    count = Counter()
    for kind, _, chunk in schedule.actions[rank]:
        to = (schedules.downstream if kind == "F" else schedules.upstream)(schedule, chunk)
        if kind in "FBI" and to is not None and schedule.placement[to] != rank:
            count[SENT["activation" if kind == "F" else "gradient"]] += 1
    return count


def average(tables):
    """Return the mean of [(table, number of steps with this table)]. The tables differ if the global batch grows."""
    steps, keys = sum(count for _, count in tables), {key for table, _ in tables for key in table}

    def mean(key, i):
        return sum(Fraction(table[key][i] * count, steps) for table, count in tables if key in table)

    return {key: (mean(key, 0), mean(key, 1)) for key in keys}


def _tensor_rows(row, c, blocks, embeddings, heads, item, master_item):
    """Add the rows of tp, except norms and gradients. blocks, embeddings, heads: from `unit_passes`."""
    bs, again = c.micro_batch_size * c.seq_length, 2 * (c.recompute == "full")
    gathered = {"all_gather": 6 + again, "reduce_scatter": 4 + again}
    for operation, calls in (gathered if c.sequence_parallel else {"all_reduce": 4 + again}).items():
        parts = [("activations", "layer and micro-batch", calls * blocks)]
        parts += [("embedding", "micro-batch", embeddings), ("head", "micro-batch", heads)]
        for what, per, count in parts:
            row("tp", what, operation, per, count, count * bs * c.hidden_size, item)
    calls = 2 * heads * math.ceil(bs / ROWS)
    row("tp", "cross-entropy rows", "all_reduce", "micro-batch", calls, 3 * heads * bs, master_item)


def _data_rows(row, P, stage, m, updates, versions, item, master_item):
    """Add a bucket's rows of dp. P: elements of the bucket; m: backwards of a step that use it (`Layout.passes`).

    updates, versions: how many the Schedule has, 1 and 1 if it is not asynchronous.
    """
    per = ["bucket and step", "bucket and micro-batch"]
    reduces, gathers = m if stage >= 2 else updates * min(m, 1), [0, versions, versions, 2 * m][stage]
    operation = "reduce_scatter" if stage else "all_reduce"
    row("dp", "gradients", operation, per[stage >= 2], reduces, reduces * P, master_item)
    row("dp", "parameters", "all_gather", per[stage == 3], gathers, gathers * P, item)
