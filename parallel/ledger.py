"""The ledger's formulas: what every scheme sends, from the configuration alone.

Slide "分散並列学習" says for each scheme what is sent, by which operation and how often. This file predicts that table,
with the bytes, for any number of ranks; `comm.Ledger` counts it in a run; `report.py` prints both.

Letters: b micro-batch, s sequence, h hidden, t = tp, n = dp, L layers (of this pipeline rank), m micro-batches, P this
rank's parameters as stored (padding included). Per step and rank:

    axis  what                         operation                               elements sent
    dp    gradients          stage 0   all_reduce                              2 P (n-1)/n
                             stage 1   reduce_scatter (1)                      P (n-1)/n
                             2 and 3   reduce_scatter (m)                      m P (n-1)/n
          parameters         1 and 2   all_gather (1)                          P (n-1)/n
                             stage 3   all_gather (m forward, m backward)      2m P (n-1)/n
    tp    activations                  2 forward + 2 backward                  8 bsh (t-1)/t per layer and micro-batch
          ... with recomputation       the 2 forward once more                 12
          ... sequence parallel        2 + 2 all_gather, 2 + 2 reduce_scatter, 10: two all_gathers more in backward,
                                       2 all_gather                            as only bsh/t of the input is kept
                                                                               (14 with recomputation)
    pp    activations, and             send                                    bsh per boundary, direction, micro-batch
          gradients of activations                                             (bsh/t with sequence parallelism)

and the small terms: embedding (one all_reduce forward), head (one backward), the cross-entropy's three row vectors,
the gradients that are partial under sequence parallelism, those of parameters that several pipeline ranks hold (twins),
the norms of every parameter (LAMB and LARS), and the scalars of the step.
"""

import math
from collections import Counter
from fractions import Fraction

from parallel import schedules
from parallel.comm import sent_bytes
from parallel.layout import rows_outside
from parallel.optimizer import RULES
from parallel.pipeline import SENT
from parallel.tensor import CHUNK

SCALARS = 4  # float64s that a step ends with: loss, squared norm, and two reasons to stop


def predict(layout, schedule, pp_rank, dp_rank, item, master_item):
    """The table above in numbers: {(axis, what, operation): (calls, bytes)} of a step on one rank.

    layout: a `layout.Layout`; schedule: the step's Schedule. item, master_item: bytes of a parameter or activation, and
    of a gradient. No process and no tensor is needed.
    """
    c, table = layout.config, {}
    sizes = {"dp": layout.dp, "tp": c.tp, "pp": c.pp, "world": layout.dp * c.tp * c.pp}

    def row(axis, what, operation, calls, elements, item):
        """axis: a name in `sizes`, or the pipeline ranks that hold the same parameters."""
        ranks, name = (sizes[axis], axis) if axis in sizes else (len(axis), "holders")
        if ranks > 1 and calls:
            before = table.get((name, what, operation), (0, 0))
            sent = sent_bytes(operation, ranks, elements * item)
            table[name, what, operation] = before[0] + calls, before[1] + sent

    _tensor_rows(row, c, *unit_passes(layout, schedule, pp_rank), item, master_item)
    message = rows_outside(c) * c.hidden_size
    for what, count in sends(schedule, pp_rank).items():
        row("pp", what, "send", count, count * message, item)
    buckets, micro_batches = layout.buckets(pp_rank), layout.passes(schedule, pp_rank)
    for name, bucket in buckets.items():
        _data_rows(row, bucket.size, layout.stage, micro_batches[name], item, master_item)
        begin, end = bucket.owned(dp_rank, layout.stage)
        if c.sequence_parallel:
            for r in bucket.ranges_in(begin, end):
                if not r.cut:
                    row("tp", "partial gradients", "all_reduce", 1, r.end - r.begin, master_item)
        row(tuple(layout.holders(name)), "twin gradients", "all_reduce", 1, end - begin, master_item)
    if RULES[c.optimizer].layerwise:  # two norms of every parameter, float64
        norms = {name: 2 * len(bucket.specs) for name, bucket in buckets.items()}
        row("tp", "parameter norms", "all_reduce", 1, sum(norms.values()), 8)
        row("dp", "parameter norms", "all_reduce", int(c.zero >= 1), sum(norms.values()), 8)
        groups = {tuple(layout.holders(name)) for name in norms}
        for group in groups:
            shared = sum(norms[name] for name in norms if tuple(layout.holders(name)) == group)
            row(group, "parameter norms", "all_reduce", 1, shared, 8)
    row("world", "scalars", "all_reduce", 1, SCALARS, 8)
    return table


def unit_passes(layout, schedule, rank):
    """How often a micro-batch passes a block, the embedding and the head in a step on pipeline rank `rank`."""
    last = len(layout.table) - 1
    passed = Counter(u for kind, _, c in schedule.actions[rank] if kind == "F" for u in layout.units[c])
    return passed.total() - passed[0] - passed[last], passed[0], passed[last]


def sends(schedule, rank):
    """{what: messages} that pipeline rank `rank` sends in a step."""
    count = Counter()
    for kind, _, chunk in schedule.actions[rank]:
        to = {"F": schedules.downstream, "W": lambda *_: None}.get(kind, schedules.upstream)(schedule, chunk)
        if to is not None and schedule.placement[to] != rank:
            count[SENT["activation" if kind == "F" else "gradient"]] += 1
    return count


def average(tables):
    """The mean of [(table, how many steps had it)]: a batch that grows has another m now and then."""
    steps, mean = sum(count for _, count in tables), {}
    for table, count in tables:
        for key, (calls, sent) in table.items():
            before = mean.get(key, (0, 0))
            mean[key] = before[0] + Fraction(calls * count, steps), before[1] + Fraction(sent * count, steps)
    return mean


def _tensor_rows(row, c, blocks, embeddings, heads, item, master_item):
    """blocks, embeddings, heads: how often a micro-batch passes a block, the embedding, the head here in a step."""
    bs, recompute = c.micro_batch_size * c.seq_length, c.recompute == "full"
    bsh = bs * c.hidden_size
    if c.sequence_parallel:
        gathers, scatters = blocks * (6 + 2 * recompute), blocks * (4 + 2 * recompute)
        row("tp", "activations", "all_gather", gathers, gathers * bsh, item)
        row("tp", "activations", "reduce_scatter", scatters, scatters * bsh, item)
        row("tp", "embedding", "reduce_scatter", embeddings, embeddings * bsh, item)
        row("tp", "embedding", "all_gather", embeddings, embeddings * bsh, item)
        row("tp", "head", "all_gather", heads, heads * bsh, item)  # once, in backward, where the loss is made
        row("tp", "head", "reduce_scatter", heads, heads * bsh, item)
    else:
        sums = blocks * (4 + 2 * recompute)
        row("tp", "activations", "all_reduce", sums, sums * bsh, item)
        row("tp", "embedding", "all_reduce", embeddings, embeddings * bsh, item)
        row("tp", "head", "all_reduce", heads, heads * bsh, item)
    row("tp", "cross-entropy rows", "all_reduce", 2 * heads * math.ceil(bs / CHUNK), 3 * heads * bs, master_item)


def _data_rows(row, P, stage, m, item, master_item):
    """P: elements of a bucket; m: how many micro-batches give it a gradient."""
    if stage == 0:
        row("dp", "gradients", "all_reduce", min(m, 1), P, master_item)
        return
    reduces = min(m, 1) if stage == 1 else m
    gathers = 2 * m if stage == 3 else 1
    row("dp", "gradients", "reduce_scatter", reduces, reduces * P, master_item)
    row("dp", "parameters", "all_gather", gathers, gathers * P, item)
