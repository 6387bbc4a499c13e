"""Prints the accounts of a run with --ledger: bytes sent and bytes kept, measured beside predicted.

`traffic.py` prints the same tables without a run, with predicted numbers only.
"""

from fractions import Fraction

from accounts import ledger, memory, meter
from parallel import schedules
from parallel.comm import gather_objects


def sent_by_ranks(run):
    """Return as text the bytes that each rank of rank 0's pipeline sent in a step.

    The text holds one table for each pipeline rank. Every rank must call this function.
    """
    layout, rank, done = run.layout, run.mesh.pp.rank, run.executor.schedules
    widths = run.zero.dtype.itemsize, run.zero.master_dtype.itemsize
    tables, often = [], {}
    for m, steps in run.steps.items():
        tables.append((ledger.predict(layout, done[m][0], rank, run.mesh.dp.rank, *widths), steps))
        often |= ledger.how_often(layout, done[m][0], rank)
    measured = run.mesh.ledger.per_step(run.steps.total())
    in_calls = sum(Fraction(m, schedules.updates(done[m][0])) * steps for m, steps in run.steps.items())
    m = Fraction(in_calls, run.steps.total())
    text = sent_table(f"rank {run.mesh.rank}", ledger.average(tables), often, measured)
    text += "\n" + zeros_line(measured, layout, rank, *widths, m)
    return "\n\n".join(gather_objects(text, run.mesh.pp))


def kept_by_ranks(run, activations):
    """Return as text the bytes that each rank of rank 0's pipeline keeps.

    activations: `meter.Activations.rows`. Every rank must call this function.
    """
    layout, rank, zero = run.layout, run.mesh.pp.rank, run.zero
    sizes = memory.sizes(run.config, zero.dtype.itemsize, zero.master_dtype.itemsize, zero.device.type == "cpu")
    schedule = run.executor.schedules[max(run.steps)][0]  # that of a step with the most micro-batches
    expected = memory.predict(layout, schedule, rank, sizes)
    measured = meter.model_states(zero, run.executor.flats) | activations
    text = kept_table(f"rank {run.mesh.rank}", expected, layout.stored(rank), layout.padding(rank), measured)
    return "\n\n".join(gather_objects(text, run.mesh.pp))


def sent_table(who, expected, often, measured=None):
    """Return the table of slide "分散並列学習" as text, with the calls and bytes of one rank in a step.

    who: the rank; expected: `ledger.predict`; often: `ledger.how_often`; measured: None if no run measured the bytes.
    """
    found = expected if measured is None else measured
    rows = [("axis", "what is sent", "operation", "how often (per)", "calls", "bytes", "formula")]
    for key in sorted(found.keys() | expected.keys()):
        calls, count = found.get(key, (0, 0))
        per = often.get(key, "").replace(" and ", ", ")
        rows.append((*key, per, f"{float(calls):g}", number(count), number(expected.get(key, (0, 0))[1])))
    if measured is None:
        rows = [row[:-1] for row in rows]
    return f"sent per step by {who}\n{aligned(rows, 4)}"


def zeros_line(sent, layout, pp_rank, item, master_item, m):
    """Return one line that compares the elements sent over dp with section 7 of the ZeRO paper.

    The paper: 2P, 2P, 2P and 3P elements in stages 0 to 3. P: parameters. m: micro-batches of a step.
    """
    n, stage = layout.dp, layout.config.zero
    if n == 1:
        return "data parallel: one rank, nothing is sent"
    bytes_of = {"gradients": master_item, "parameters": item}
    elements = sum(
        count / bytes_of[what] for (axis, what, _), (_, count) in sent.items() if axis == "dp" and what in bytes_of
    )
    unit = Fraction(layout.stored(pp_rank) * (n - 1), n)
    formula, factor, at_one = [("2", 2, 2), ("2", 2, 2), ("m + 1", m + 1, 2), ("3m", 3 * m, 3)][stage]
    own = "" if elements == factor * unit else " (here m differs from bucket to bucket)"
    if own and layout.config.schedule in schedules.ASYNCHRONOUS:
        own = " (parameters that no forward uses are not gathered)"
    return (
        f"data parallel, ZeRO stage {stage}: {float(elements / unit):g} x P (n-1)/n elements. "
        f"Formula: {formula} with m = {float(m):g} micro-batches{own}. ZeRO paper: {at_one} with m = 1."
    )


def kept_table(who, expected, elements, padded, measured=None):
    """Return the bytes that one rank keeps, as text. elements: all elements of its buckets; padded: those that are
    padding.

    expected: `memory.predict`; measured: the same table from a meter, or None.
    """
    found = expected if measured is None else measured
    rows = [("what is kept", "bytes", "formula", "bytes per parameter")]
    activations = [what for what in (memory.PEAK, memory.RECOMPUTED) if what in found]
    states = [what for what in found if what not in activations]
    single = [(what, [what]) for what in (*states, *activations)]
    for what, parts in [*single[: len(states)], ("model states", states), *single[len(states) :]]:
        ours, formula = (sum(table[part] for part in parts) for table in (found, expected))
        rows.append((what, number(ours), number(formula), f"{float(ours) / elements:.2f}"))
    if measured is None:
        rows = [(what, count, per_parameter) for what, count, _, per_parameter in rows]
    stored = f"P = {elements:,} parameters as stored, {padded:,} of them padding"
    return f"kept by {who}\n{aligned(rows, 1)}\n{stored}"


def number(count):
    return f"{float(count):,.0f}"


def aligned(rows, words):
    """Return rows of strings as text in columns: the first `words` left-aligned, the others right-aligned.

    The first row has the titles of the columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *lines = (
        " | ".join(x.ljust(w) if i < words else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return "\n".join([head, "-" * len(head), *lines])
