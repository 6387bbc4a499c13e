"""Prints the accounts of a run with --ledger: bytes sent and bytes kept, measured beside predicted.

`traffic.py` prints the same tables without a run, with predicted numbers only.
"""

import contextlib
from fractions import Fraction

from accounts import ledger, memory, meter, trace
from errors import UserError
from parallel import schedules
from parallel.comm import agree, gather_objects


@contextlib.contextmanager
def watching(run, say):
    """Context: watch the training of a `train.Run` as --ledger and --trace want it, and report at the end.

    say: a function that prints a text on rank 0. Every rank must enter. Raises UserError if the trace can't be written.
    """
    c, mesh = run.config, run.mesh
    agree(mesh.world, UserError, lambda: trace.check(c) if mesh.rank == 0 else None)
    if c.trace:
        run.executor.trace = trace.Trace(mesh, run.device, run.counters.iteration)
    with meter.Activations(run.executor) if c.ledger else contextlib.nullcontext() as activations:
        yield
    if c.ledger and run.steps:
        tables = sent_by_ranks(run), kept_by_ranks(run, activations.rows())  # every rank must call both
        say("\n\n".join(tables))
    if c.trace and run.steps:
        agree(mesh.world, UserError, lambda: trace.write(c, run.executor.trace, mesh))


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
    return f"sent per step by {who}\n{aligned([row[: 6 + (measured is not None)] for row in rows], 4)}"


def zeros_line(sent, layout, pp_rank, item, master_item, m):
    """Return one line that compares the elements sent over dp with section 7 of the ZeRO paper.

    The paper: 2P, 2P, 2P and 3P elements in stages 0 to 3. P: parameters. m: micro-batches of a step. In Chimera a
    bucket of one pipeline has fewer than m.
    """
    n, stage, widths = layout.dp, layout.config.zero, {"gradients": master_item, "parameters": item}
    if n == 1:
        return "data parallel: one rank, nothing is sent"
    elements = sum(sent[key][1] / widths[key[1]] for key in sent if key[0] == "dp" and key[1] in widths)
    factor = float(elements / (layout.stored(pp_rank) * Fraction(n - 1, n)))
    formula, at_one = [("2", 2), ("2", 2), ("m + 1", 2), ("3m", 3)][stage]
    return (
        f"data parallel, ZeRO stage {stage}: {factor:g} x P (n-1)/n elements. "
        f"Formula: {formula} with m = {float(m):g} micro-batches in every bucket. ZeRO paper: {at_one} with m = 1."
    )


def kept_table(who, expected, elements, padded, measured=None):
    """Return the bytes that one rank keeps, as text. elements: all elements of its buckets; padded: those of padding.

    expected: `memory.predict`; measured: the same table from a meter, or None.
    """
    found = expected if measured is None else measured
    states = [what for what in found if what not in (memory.PEAK, memory.RECOMPUTED)]
    parts = {what: [what] for what in states} | {"model states": states}
    parts |= {what: [what] for what in found if what not in states}
    rows = [("what is kept", "bytes", "formula", "bytes per parameter")]
    for what, names in parts.items():
        ours, formula = (sum(table[name] for name in names) for table in (found, expected))
        rows.append((what, number(ours), number(formula), f"{float(ours) / elements:.2f}"))
    rows = rows if measured else [(what, count, per_parameter) for what, count, _, per_parameter in rows]
    stored = f"P = {elements:,} parameters as stored, {padded:,} of them padding"
    return f"kept by {who}\n{aligned(rows, 1)}\n{stored}"


def number(count):
    return f"{float(count):,.0f}"


def aligned(rows, words):
    """Return rows of strings as text in columns: the first `words` left-aligned, the others right-aligned.

    The first row has the titles of the columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{{:{'<' if i < words else '>'}{width}}}" for i, width in enumerate(widths)]
    head, *lines = (" | ".join(formats).format(*row) for row in rows)
    return "\n".join([head, "-" * len(head), *lines])
