"""The ledger: what every scheme sends, counted at the door and held against the lecture's formulas.

Slide "分散並列学習" says for each scheme what is sent, by which operation and how often; this file prints that table
from a run, with the bytes. Letters: b micro-batch, s sequence, h hidden, t = tp, n = dp, L layers (of this pipeline
rank), m micro-batches, P this rank's parameters as stored (padding included). Per step and rank:

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
and the scalars of the step.
"""

import math
from fractions import Fraction

from parallel.tensor import CHUNK

RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}  # times (n-1)/n of the whole tensor
SCALARS = 4  # float64s that a step ends with: loss, squared norm, and two reasons to stop


class Ledger:
    """Counts calls and bytes by (phase, axis, what, operation). `phase` is set by whoever runs the step."""

    def __init__(self):
        self.phase = "setup"
        self.rows = {}

    def count(self, operation, axis, ranks, what, whole_bytes):
        row = self.rows.setdefault((self.phase, axis, what, operation), [0, Fraction(0)])
        row[0] += 1
        row[1] += whole_bytes if operation == "send" else Fraction(RING[operation] * (ranks - 1) * whole_bytes, ranks)

    def per_step(self, steps):
        """{(axis, what, operation): (calls, bytes)} of a training step, the phases added up."""
        table = {}
        for (phase, *key), (calls, count) in self.rows.items():
            if phase not in ("setup", "evaluate"):
                before = table.get(tuple(key), (0, 0))
                table[tuple(key)] = before[0] + Fraction(calls, steps), before[1] + count / steps
        return table


def formulas(c, mesh, executor, zero, m):
    """The table above in numbers: {(axis, what, operation): (calls, bytes)} of a step of m micro-batches on this rank.

    c: configuration. What a rank has of the model and of the schedule it reads off `executor` and `zero`.
    """
    item, master_item = zero.dtype.itemsize, zero.master_dtype.itemsize
    table = {}

    def row(axis, what, operation, calls, elements, item):
        ranks = getattr(mesh, axis).size if isinstance(axis, str) else axis.size
        name = axis if isinstance(axis, str) else axis.name
        if ranks > 1 and calls:
            sent = elements * item
            if operation != "send":
                sent = Fraction(RING[operation] * (ranks - 1) * sent, ranks)
            before = table.get((name, what, operation), (0, 0))
            table[name, what, operation] = before[0] + calls, before[1] + sent

    blocks, embeddings, heads, sends = executor.work(m)
    _tensor_rows(row, c, blocks, embeddings, heads, item, master_item)
    rows = c.micro_batch_size * c.seq_length // (c.tp if c.sequence_parallel else 1)
    for what, count in sends.items():
        row("pp", what, "send", count, count * rows * c.hidden_size, item)
    passes = executor.passes_in_a_step(m)
    for unit in zero.units.values():
        _data_rows(row, unit, passes[unit.name], item, master_item)
        if c.sequence_parallel:
            for begin, end, cut, _ in unit.owned_ranges():
                if not cut:
                    row("tp", "partial gradients", "all_reduce", 1, end - begin, master_item)
        row(unit.holders, "twin gradients", "all_reduce", 1, unit.owned[1] - unit.owned[0], master_item)
    if zero.apply:  # layer-wise rates: two norms of every parameter, float64
        norms = 2 * sum(len(unit.params) for unit in zero.units.values())
        row("tp", "parameter norms", "all_reduce", 1, norms, 8)
        row("dp", "parameter norms", "all_reduce", int(c.zero >= 1), norms, 8)
        shared = [unit for unit in zero.units.values() if unit.holders.size > 1]
        if shared:
            norms = 2 * sum(len(unit.params) for unit in shared)
            row(shared[0].holders, "parameter norms", "all_reduce", 1, norms, 8)
    row("world", "scalars", "all_reduce", 1, SCALARS, 8)
    return table


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
        row("tp", "head", "all_gather", heads, heads * bsh, item)  # once: its weight gradient is made in forward
        row("tp", "head", "reduce_scatter", heads, heads * bsh, item)
    else:
        sums = blocks * (4 + 2 * recompute)
        row("tp", "activations", "all_reduce", sums, sums * bsh, item)
        row("tp", "embedding", "all_reduce", embeddings, embeddings * bsh, item)
        row("tp", "head", "all_reduce", heads, heads * bsh, item)
    row("tp", "cross-entropy rows", "all_reduce", 2 * heads * math.ceil(bs / CHUNK), 3 * heads * bs, master_item)


def _data_rows(row, unit, m, item, master_item):
    """m: how many micro-batches give this unit a gradient."""
    P = unit.size
    if unit.stage == 0:
        row("dp", "gradients", "all_reduce", 1, P, master_item)
        return
    reduces = 1 if unit.stage == 1 else m
    gathers = 2 * m if unit.stage == 3 else 1
    row("dp", "gradients", "reduce_scatter", reduces, reduces * P, master_item)
    row("dp", "parameters", "all_gather", gathers, gathers * P, item)


def lecture(measured, zero, m):
    """The lecture's 2, 2, 3 (slide "ZeRO (FSDP)") beside what was sent, as a line; m: micro-batches of a step."""
    n, stage = zero.mesh.dp.size, zero.config.zero
    if n == 1:
        return "data parallel: one rank, nothing is sent"
    bytes_of = {"gradients": zero.master_dtype.itemsize, "parameters": zero.dtype.itemsize}
    elements = sum(
        sent / bytes_of[what] for (axis, what, _), (_, sent) in measured.items() if axis == "dp" and what in bytes_of
    )
    unit = Fraction(sum(unit.size for unit in zero.units.values()) * (n - 1), n)
    formula, factor, at_one = [("2", 2, 2), ("2", 2, 2), ("m + 1", m + 1, 2), ("3m", 3 * m, 3)][stage]
    own = "" if elements == factor * unit else " (here each unit has its own m: how often the chunks that use it run)"
    return (
        f"data parallel, stage {stage}: {float(elements / unit):g} x P (n-1)/n elements; the formula says {formula}, "
        f"with m = {float(m):g} micro-batches{own}; the lecture's {at_one} is m = 1"
    )


def report(measured, expected, who="rank 0"):
    """The lecture's table as text: what one rank sent in a step, measured beside the formula."""
    rows = [("axis", "what is sent", "operation", "calls", "bytes", "formula")]
    for key in sorted(measured.keys() | expected.keys()):
        calls, count = measured.get(key, (0, 0))
        rows.append((*key, f"{float(calls):g}", f"{float(count):,.0f}", f"{float(expected.get(key, (0, 0))[1]):,.0f}"))
    return f"sent per step by {who}\n{aligned(rows, 3)}"


def aligned(rows, words):
    """Rows of strings, the first their heads, in columns: the first `words` of them flush left, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *lines = (
        " | ".join(x.ljust(w) if i < words else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return "\n".join([head, "-" * len(head), *lines])
