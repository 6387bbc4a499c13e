"""The tables at the end of a run with --ledger: what was sent and what was kept, measured beside predicted."""

from fractions import Fraction

from parallel import ledger, memory, meter
from parallel.comm import gather_objects


def sent_by_ranks(run):
    """What rank 0, and the other pipeline ranks beside it, sent in a step, as text. Every rank calls it."""
    widths = run.zero.dtype.itemsize, run.zero.master_dtype.itemsize
    ranks, done = (run.mesh.pp.rank, run.mesh.dp.rank), run.executor.schedules
    tables = [(ledger.predict(run.layout, done[m][0], *ranks, *widths), steps) for m, steps in run.steps.items()]
    measured = run.mesh.ledger.per_step(run.steps.total())
    m = Fraction(sum(m * steps for m, steps in run.steps.items()), run.steps.total())
    text = sent_table(measured, ledger.average(tables), f"rank {run.mesh.rank}")
    text += "\n" + zeros_line(measured, run.layout, run.mesh.pp.rank, *widths, m)
    return "\n\n".join(gather_objects(text, run.mesh.pp))


def kept_by_ranks(run, peak):
    """What the same ranks keep, as text. peak: bytes of activations that a meter found. Every rank calls it."""
    layout, rank, zero = run.layout, run.mesh.pp.rank, run.zero
    sizes = memory.sizes(run.config, zero.dtype.itemsize, zero.master_dtype.itemsize, zero.device.type == "cpu")
    schedule = run.executor.schedules[max(run.steps)][0]  # of the largest batch so far
    expected = memory.predict(layout, schedule, rank, sizes)
    measured = meter.model_states(zero) | {memory.PEAK: peak}
    text = kept_table(measured, expected, layout.stored(rank), layout.padding(rank), f"rank {run.mesh.rank}")
    return "\n\n".join(gather_objects(text, run.mesh.pp))


def sent_table(measured, expected, who):
    """The slide's table as text: what one rank sent in a step, measured beside predicted (`ledger.predict`)."""
    rows = [("axis", "what is sent", "operation", "calls", "bytes", "formula")]
    for key in sorted(measured.keys() | expected.keys()):
        calls, count = measured.get(key, (0, 0))
        rows.append((*key, f"{float(calls):g}", f"{float(count):,.0f}", f"{float(expected.get(key, (0, 0))[1]):,.0f}"))
    return f"sent per step by {who}\n{aligned(rows, 3)}"


def zeros_line(measured, layout, pp_rank, item, master_item, m):
    """The 2, 2, 2, 3 of the ZeRO paper (section 7) beside what was sent, as a line. m: micro-batches of a step."""
    n, stage = layout.dp, layout.config.zero
    if n == 1:
        return "data parallel: one rank, nothing is sent"
    bytes_of = {"gradients": master_item, "parameters": item}
    elements = sum(
        sent / bytes_of[what] for (axis, what, _), (_, sent) in measured.items() if axis == "dp" and what in bytes_of
    )
    unit = Fraction(layout.stored(pp_rank) * (n - 1), n)
    formula, factor, at_one = [("2", 2, 2), ("2", 2, 2), ("m + 1", m + 1, 2), ("3m", 3 * m, 3)][stage]
    own = "" if elements == factor * unit else " (each bucket has its own m here: how often the chunks that use it run)"
    return (
        f"data parallel, stage {stage}: {float(elements / unit):g} x P (n-1)/n elements; the formula says {formula}, "
        f"with m = {float(m):g} micro-batches{own}; ZeRO's paper says {at_one}, with m = 1"
    )


def kept_table(measured, expected, elements, padded, who):
    """The account as text, measured beside predicted. elements: P; padded: those of them that are padding."""
    rows = [("what is kept", "bytes", "formula", "bytes per parameter")]
    states = [what for what in measured if what != memory.PEAK]
    for what, parts in [*((what, [what]) for what in states), ("model states", states), (memory.PEAK, [memory.PEAK])]:
        ours, theirs = (sum(table[part] for part in parts) for table in (measured, expected))
        rows.append((what, f"{float(ours):,.0f}", f"{float(theirs):,.0f}", f"{float(ours) / elements:.2f}"))
    stored = f"P = {elements:,} parameters as stored, {padded:,} of them padding"
    return f"kept by {who}\n{aligned(rows, 1)}\n{stored}"


def aligned(rows, words):
    """Rows of strings, the first their heads, in columns: the first `words` of them flush left, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *lines = (
        " | ".join(x.ljust(w) if i < words else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return "\n".join([head, "-" * len(head), *lines])
