"""Write the record of `clock.py` in Chrome's trace format: each rank's actions and communications.

    torchrun ... train.py configs/tiny.py --pp=2 --schedule=zb-h1 --trace=trace.json

Perfetto (ui.perfetto.dev) and chrome://tracing open the file. A "process" there is one pipeline (one dp and tp rank),
and its "threads" are the pp ranks. On a GPU the times are those of the stream: nothing waits for them.
"""

import itertools
import json

from accounts.clock import Span
from errors import reading
from parallel.comm import gather_objects
from parallel.schedules import Action

HIDDEN, WAIT, MESSAGE = "hidden", "wait", "message"  # categories of communications


def events_of(clock, place):
    """Yield the events of a rank. place: its fields there."""
    calls = clock.ended()
    for step, found in clock.steps.items():
        for span in (span for span in found if isinstance(span, Span)):
            began, ended = (1000 * clock.at(mark) for mark in (span.began, span.ended))
            event = place | {"ph": "X", "ts": began, "dur": ended - began}
            kind, j, chunk = span.subject
            about = {"kind": kind, "microbatch": j, "chunk": chunk, "step": step + 1}
            names = (f"{kind}{j}", kind) if isinstance(span.subject, Action) else (f"wait for {kind} {j}", MESSAGE)
            yield event | {"name": names[0], "cat": names[1], "args": about}
    for call in (call for call in calls if call.row[3] != "receive"):  # those are spans
        _, axis, what, operation = call.row
        started, began, ended = (1000 * time for time in call.times())
        about = {"name": f"{operation} of {what} over {axis}", "args": {"step": call.key[2] + 1}}
        event = place | about
        yield event | {"cat": WAIT, "ph": "X", "ts": began, "dur": ended - began}
        event |= {"cat": HIDDEN, "id": f"{place['pid']} {place['tid']} {started}"}
        yield event | {"ph": "b", "ts": started, "dur": began - started}  # asynchronous: several overlap
        yield event | {"ph": "e", "ts": began}


def check_file(path):
    """Raise UserError if the file can't be written."""
    with reading(f"trace={path}"), open(path, "a"):
        pass


def write_trace(c, mesh, clock):
    """Collect the records in one file. Every rank calls this, and rank 0 writes or raises UserError."""
    place = {"pid": mesh.data.rank * mesh.tp.size + mesh.tp.rank, "tid": mesh.pp.rank}
    events = [*itertools.chain(*gather_objects([*events_of(clock, place)], mesh.world))]
    m = clock.schedule.microbatches
    about = {"schedule": c.schedule, "stages": c.pp, "microbatches": m, "chunks": c.chunks}
    if mesh.rank == 0:
        with reading(f"trace={c.trace}"), open(c.trace, "w") as file:
            json.dump({"traceEvents": events, "otherData": about}, file)
