"""The ledger: what every scheme sends, counted at the door and held against the lecture's formulas.

Slides "データ並列 (DP)" and "テンソル並列 (TP)" say for each scheme what is sent, by which operation and how often;
this file prints that table from a run, with the bytes. Letters: b micro-batch, s sequence, h hidden, t = tp,
n = dp, L layers, m micro-batches, P this rank's parameters as stored (padding included). Per step and rank:

    axis  what                     operation                      elements sent
    dp    gradients                all_reduce                     2 P (n-1)/n
    tp    activations              2 forward + 2 backward         8 bsh (t-1)/t    per layer and micro-batch
          ... with recomputation   the 2 forward once more        12
          ... sequence parallel    2 + 2 all_gather, 2 + 2        10: two all_gathers more in backward,
                                   reduce_scatter, 2 all_gather   because only bsh/t of the input is kept
                                                                  (14 with recomputation)

and the small terms: embedding (one all_reduce forward), head (one backward), the cross-entropy's three row vectors,
the gradients that are partial under sequence parallelism, and the scalars of the step.
"""

from fractions import Fraction

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
        row[1] += Fraction(RING[operation] * (ranks - 1) * whole_bytes, ranks)

    def per_step(self, steps):
        """{(axis, what, operation): (calls, bytes)} of a training step, the phases added up."""
        table = {}
        for (phase, *key), (calls, count) in self.rows.items():
            if phase not in ("setup", "evaluate"):
                before = table.get(tuple(key), (0, 0))
                table[tuple(key)] = before[0] + Fraction(calls, steps), before[1] + count / steps
        return table


def formulas(c, mesh, item, master_item, units):
    """The table above in numbers: {(axis, what, operation): (calls, bytes)} per step and rank.

    c: configuration; item: bytes of an activation's element, master_item: of a gradient's; units: the stored units,
    for P and the part of it that is replicated over tp.
    """
    n = mesh.dp.size
    m = c.global_batch_size // (c.micro_batch_size * n)
    bs, L, recompute = c.micro_batch_size * c.seq_length, c.num_layers, c.recompute == "full"
    stored = sum(unit.size for unit in units)
    replicated = [end - begin for unit in units for begin, end, cut, _ in unit.ranges if not cut]
    table = {}

    def row(axis, what, operation, calls, elements, item):
        ranks = getattr(mesh, axis).size
        if ranks > 1:
            table[axis, what, operation] = (
                calls,
                Fraction(RING[operation] * (ranks - 1) * elements * item, ranks),
            )

    bsh = bs * c.hidden_size
    if c.sequence_parallel:
        gathers, scatters = m * L * (6 + 2 * recompute), m * L * (4 + 2 * recompute)
        row("tp", "activations", "all_gather", gathers, gathers * bsh, item)
        row("tp", "activations", "reduce_scatter", scatters, scatters * bsh, item)
        row("tp", "embedding", "reduce_scatter", m, m * bsh, item)
        row("tp", "embedding", "all_gather", m, m * bsh, item)
        row("tp", "head", "all_gather", 2 * m, 2 * m * bsh, item)
        row("tp", "head", "reduce_scatter", m, m * bsh, item)
        row("tp", "partial gradients", "all_reduce", len(replicated), sum(replicated), master_item)
    else:
        sums = m * L * (4 + 2 * recompute)
        row("tp", "activations", "all_reduce", sums, sums * bsh, item)
        row("tp", "embedding", "all_reduce", m, m * bsh, item)
        row("tp", "head", "all_reduce", m, m * bsh, item)
    row("tp", "cross-entropy rows", "all_reduce", 2 * m, 3 * m * bs, master_item)
    row("dp", "gradients", "all_reduce", len(units), stored, master_item)
    row("world", "scalars", "all_reduce", 1, SCALARS, 8)
    return table


def report(measured, expected):
    """The lecture's table as text: what one rank sent in a step, measured beside the formula."""
    head = ("axis", "what is sent", "operation", "calls", "bytes", "formula")
    rows = [head]
    for key in sorted(measured.keys() | expected.keys()):
        calls, count = measured.get(key, (0, 0))
        rows.append((*key, f"{float(calls):g}", f"{float(count):,.0f}", f"{float(expected.get(key, (0, 0))[1]):,.0f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        " | ".join(x.ljust(w) if i < 3 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join(["sent per step by rank 0", lines[0], "-" * len(lines[0]), *lines[1:]])
