"""Prints the accounts of a run with --ledger: bytes sent and bytes kept, measured beside predicted.

`traffic.py` prints the same tables without a run, with predicted numbers only.
"""

import contextlib

from accounts import ledger, memory, meter, trace
from errors import UserError
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
    layout, rank, often, tables = run.layout, run.mesh.pp.rank, {}, []
    for m, steps in run.steps.items():
        schedule, widths = run.executor.schedules[m][0], (run.zero.dtype.itemsize, run.zero.master_dtype.itemsize)
        tables.append((ledger.predict(layout, schedule, rank, run.mesh.dp.rank, *widths), steps))
        often |= ledger.how_often(layout, schedule, rank)
    measured = run.mesh.ledger.per_step(run.steps.total())
    both = {"bytes": measured, "formula": ledger.average(tables)}
    text = sent_table(f"rank {run.mesh.rank}", often, both)
    return "\n\n".join(gather_objects(text, run.mesh.pp))


def kept_by_ranks(run, activations):
    """Return as text the bytes that each rank of rank 0's pipeline keeps.

    activations: `meter.Activations.rows`. Every rank must call this function.
    """
    layout, rank, zero = run.layout, run.mesh.pp.rank, run.zero
    sizes = memory.sizes(run.config, zero.dtype.itemsize, zero.master_dtype.itemsize, zero.device.type == "cpu")
    schedule = run.executor.schedules[max(run.steps)][0]  # that of a step with the most micro-batches
    measured = meter.model_states(zero, run.executor.flats) | activations
    both = {"bytes": measured, "formula": memory.predict(layout, schedule, rank, sizes)}
    text = kept_table(f"rank {run.mesh.rank}", layout, rank, both)
    return "\n\n".join(gather_objects(text, run.mesh.pp))


def sent_table(who, often, tables):
    """Return the table of slide "分散並列学習" as text, with the calls and bytes of one rank in a step.

    who: the rank; often: `ledger.how_often`; tables: {title of a column of bytes: a table as `ledger.predict` makes}.
    """
    first, *_ = tables.values()
    rows = [("axis", "what is sent", "operation", "how often (per)", "calls", *tables)]
    for key in sorted({key for table in tables.values() for key in table}):
        sizes = [number(table[key][1] if key in table else 0) for table in tables.values()]
        calls, per = f"{float(first[key][0] if key in first else 0):g}", often.get(key, "").replace(" and ", ", ")
        rows.append((*key, per, calls, *sizes))
    return f"sent per step by {who}\n{aligned(rows, 4)}"


def kept_table(who, layout, rank, tables):
    """Return the bytes that one rank keeps, as text. who: its name; rank: its pipeline rank in a `layout.Layout`.

    tables: {title of a column: a table as `memory.predict` makes}.
    """
    first, *_ = tables.values()
    states = [what for what in first if what not in (memory.PEAK, memory.RECOMPUTED)]
    parts = {what: [what] for what in states} | {"model states": states} | {what: [what] for what in first}
    rows, stored = [("what is kept", *tables, "bytes per parameter")], layout.stored(rank)
    for what, names in parts.items():
        sums = [sum(table[name] for name in names) for table in tables.values()]
        rows.append((what, *map(number, sums), f"{float(sums[0]) / stored:.2f}"))
    end = f"P = {stored:,} parameters as stored, {layout.padding(rank):,} of them padding"
    return f"kept by {who}\n{aligned(rows, 1)}\n{end}"


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
