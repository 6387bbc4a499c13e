"""Record each rank's actions and communications in Chrome's trace format.

    torchrun ... train.py configs/tiny.py --pp=2 --schedule=zb-h1 --trace=trace.json

Perfetto (ui.perfetto.dev) and chrome://tracing open the file. A "process" there is one pipeline (one dp and tp rank),
and its "threads" are the pp ranks. On a GPU every recorded action waits for the device, which costs some speed.
"""

import itertools
import json
import time
from collections import deque
from contextlib import contextmanager, nullcontext

import torch

from accounts.clock import STEPS
from errors import reading
from parallel.comm import gather_objects
from parallel.schedules import Action
from parallel.watch import Tool

HIDDEN, WAIT, MESSAGE = "hidden", "wait", "message"  # categories of communications


class Trace(Tool):
    """The record of one rank, in microseconds. The first step is iteration + 1."""

    def __init__(self, mesh, device, iteration):
        self.replica, self.rank = mesh.data.rank * mesh.tp.size + mesh.tp.rank, mesh.pp.rank
        self.device, self.step, self.schedule = device, iteration, None
        self.steps = deque(maxlen=STEPS)

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # on NCCL's streams a receive may still wait
        return time.time_ns() / 1000

    def span(self, phase, subject):
        """Record a wait for a message, and an action from the end of its wait."""
        if phase == "pipeline":
            self.schedule = subject
            self.step += 1
            self.steps.append([])
        if isinstance(subject, Action):
            return self._record(f"{subject.kind}{subject.microbatch}", subject.kind, subject._asdict())
        if phase == "wait":
            what = dict(zip(("kind", "microbatch", "chunk"), subject, strict=True))
            return self._record(f"wait for {what['kind']} {what['microbatch']}", MESSAGE, what)
        return nullcontext()

    @contextmanager
    def _record(self, name, category, what):
        self.began = self.now()
        yield  # a wait within an action moves `began` to its own end
        now = self.now()
        event = {"name": name, "cat": category, "ph": "X", "ts": self.began, "dur": now - self.began}
        self.steps[-1].append(event | {"pid": self.replica, "tid": self.rank, "args": what | {"step": self.step}})
        self.began = now


def communication(call, trace):
    """Yield the events of a `clock.Call`: HIDDEN until WAIT."""
    _, axis, what, operation = call.row
    if operation == "receive":  # the span `wait` records it
        return
    started, began, ended = (1000 * time for time in call.times())
    name, step = f"{operation} of {what} over {axis}", call.key[2] + 1
    place = {"name": name, "pid": trace.replica, "tid": trace.rank, "args": {"step": step}}
    yield place | {"cat": WAIT, "ph": "X", "ts": began, "dur": ended - began}
    place |= {"cat": HIDDEN, "id": f"{trace.replica} {trace.rank} {started}"}
    yield place | {"ph": "b", "ts": started, "dur": began - started}  # asynchronous: several overlap
    yield place | {"ph": "e", "ts": began}


def check_file(path):
    """Raise UserError if the file can't be written."""
    with reading(f"trace={path}"), open(path, "a"):
        pass


def write_trace(c, trace, mesh, clock):
    """Collect the records in one file. Every rank calls this, and rank 0 writes or raises UserError."""
    events = [*itertools.chain(*trace.steps, *(communication(call, trace) for call in clock.ended()))]
    events = [*itertools.chain(*gather_objects(events, mesh.world))]
    m = trace.schedule.microbatches
    about = {"schedule": c.schedule, "stages": c.pp, "microbatches": m, "chunks": c.chunks}
    if mesh.rank == 0:
        with reading(f"trace={c.trace}"), open(c.trace, "w") as file:
            json.dump({"traceEvents": events, "otherData": about}, file)
