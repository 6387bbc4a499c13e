"""Prints the accounts of a run with --ledger: bytes sent and kept, measured beside predicted, and waits."""

import contextlib

from accounts import clock, ledger, memory, meter, profile, trace, zero_states
from errors import agreed
from parallel.comm import agree, gather_objects


@contextlib.contextmanager
def watching(run, say):
    """Context: watch a `train.Run` for --ledger, --trace, --profile and --delay, and report. Every rank must enter.

    say: prints a text on rank 0. Raises UserError if the trace can't be written.
    """
    c, mesh = run.config, run.mesh
    if c.delay and run.device.type != "cpu":
        raise agreed(f"delay={c.delay}: only on a CPU; a GPU's communications take time")
    if c.trace:
        agree(mesh.world, lambda: trace.check_file(c.trace) if mesh.rank == 0 else None)
    with contextlib.ExitStack() as stack:
        times = clock.Clock(run) if c.ledger or c.trace or c.delay else None
        if c.profile:
            stack.enter_context(profile.profiling(run, say))
        activations = stack.enter_context(meter.Activations(run.executor)) if c.ledger else None
        yield
    if c.ledger and run.steps:
        say(measured_tables(run, activations))
        if waits := times.table(mesh):
            say(f"\n{waited_table(mesh.watch.ledger, run.steps.total(), waits)}")
    if c.trace and run.steps:
        agree(mesh.world, lambda: trace.write_trace(c, mesh, times))


def measured(run, activations):
    """Return two {"bytes": table, "formula": table}: what this rank sends in a mean step, and what it keeps.

    activations: `meter.Activations` of these steps.
    """
    layout, mesh, zero, schedules = run.layout, run.mesh, run.zero, run.executor.schedules
    widths, rank, data_rank = (zero.dtype.itemsize, zero.master_dtype.itemsize), mesh.pp.rank, mesh.data.rank
    expected = []
    for m, count in run.steps.items():
        head = getattr(run.model.units[-1], "reads_losses", False)
        expected.append((ledger.predict_sent(layout, schedules[m][0], rank, data_rank, *widths, head), count))
    sent = {"bytes": mesh.watch.ledger.per_step(run.steps.total()), "formula": ledger.average(expected)}
    sizes = zero_states.sizes(run.config, *widths, zero.device.type == "cpu")
    formula = memory.predict_kept(layout, schedules[max(run.steps)][0], rank, sizes)  # the largest step
    return sent, {"bytes": meter.measured_states(zero) | activations.rows(), "formula": formula}


def measured_tables(run, activations):
    """Return `measured` as text, of each rank of rank 0's pipeline. Every rank must call this."""
    (sent, bytes_kept), mesh, who = measured(run, activations), run.mesh, f"rank {run.mesh.rank}"
    texts = sent_table(who, run.layout, sent), kept_table(who, run.layout, mesh.pp.rank, bytes_kept)
    return "\n\n".join(row for text in texts for row in gather_objects(text, mesh.pp))


def sent_table(who, layout, columns):
    """Return the table of slide "分散並列学習" as text, with the calls and bytes of one rank in a step.

    columns: {title: a table of `ledger.predict_sent`}.
    """
    (first, *_), per = columns.values(), ledger.how_often(layout)
    rows = [("axis", "what is sent", "operation", "how often (per)", "calls", *columns)]
    for key in sorted({key for table in columns.values() for key in table}):
        calls, sizes = first.get(key, (0, 0))[0], [number(table.get(key, (0, 0))[1]) for table in columns.values()]
        rows.append((*key, ", ".join(per.get(key, ["no formula"])), f"{float(calls):g}", *sizes))
    return f"sent per step by {who}\n{aligned(rows, 4)}"


def waited_table(sent, steps, times):
    """Return `clock.Clock.table` as text. sent: the `comm.Ledger` of `steps` steps."""
    rows = [("phase", "axis", "what is sent", "operation", "calls", "bytes", "waits, ms", "of it wire, ms")]
    for row, (calls, *waits) in times.items():
        size = number(sent.rows[row][1] / steps) if row in sent.rows else "-"
        rows.append((*row, f"{calls:g}", size, *(f"{wait:.1f}" for wait in waits)))
    return f"waited per step by rank 0\n{aligned(rows, 4)}"


def kept_table(who, layout, rank, columns):
    """Return as text the bytes that one pipeline rank keeps. columns: {title: a `memory.predict_kept`}."""
    first, *_ = columns.values()
    states = [what for what in first if what not in (memory.WHOLE, memory.PEAK, memory.RECOMPUTED)]
    parts = {what: [what] for what in states} | {"model states": states} | {what: [what] for what in first}
    rows, stored = [("what is kept", *columns, "bytes per parameter")], zero_states.stored(layout, rank)
    for what, names in parts.items():
        sums = [sum_of([table.get(name) for name in names]) for table in columns.values()]
        rows.append((what, *map(number, sums), "-" if sums[0] is None else f"{float(sums[0]) / stored:.2f}"))
    return f"kept by {who}\n{aligned(rows, 1)}\nP = {stored:,} parameters as stored, with padding"


def sum_of(sizes):
    return None if None in sizes else sum(sizes)


def number(count):
    return "not known" if count is None or count != count else f"{float(count):,.0f}"


def aligned(rows, words):
    """Return rows of strings, titles first, as text in columns: the first `words` left-aligned, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{{:{'<' if i < words else '>'}{width}}}" for i, width in enumerate(widths)]
    head, *lines = (" | ".join(formats).format(*row) for row in rows)
    return "\n".join([head, "-" * len(head), *lines])
