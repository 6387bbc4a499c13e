"""What really happened in a pipeline: every action and every wait for a message, in Chrome's trace format.

    torchrun ... train.py configs/tiny.py --pp=2 --schedule=zb-h1 --trace=trace.json
    python -m parallel.draw --trace=trace.json         the last step, drawn under the ideal one

Perfetto (ui.perfetto.dev) and chrome://tracing open the file: a process is one replica of the pipeline (a data
parallel and a tensor parallel rank), its threads are the pipeline's ranks. On a GPU every action then waits for the
device, which costs some speed; without `--trace` nothing is recorded.
"""

import json
import time
from collections import deque
from contextlib import contextmanager

import torch

from errors import explained
from parallel.comm import gather_objects

STEPS = 10  # the latest, which are kept: a week of training leaves a small file


class Trace:
    """This rank's record. Times are the system's clock in microseconds, so that ranks can be laid side by side."""

    def __init__(self, mesh, device, iteration):
        self.replica, self.rank = mesh.dp.rank * mesh.tp.size + mesh.tp.rank, mesh.pp.rank
        self.device, self.step, self.microbatches = device, iteration, None
        self.steps = deque(maxlen=STEPS)

    def begin_step(self, microbatches):
        self.step, self.microbatches = self.step + 1, microbatches
        self.steps.append([])

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # not what is still to be received
        return time.time_ns() / 1000

    @contextmanager
    def action(self, action):
        """Around an action. What it begins with waiting for is no part of it (`waited`)."""
        self.began = self.now()
        yield
        self._record(f"{action.kind}{action.microbatch}", action.kind, self.began, action._asdict())

    @contextmanager
    def wait(self, kind, microbatch, chunk):
        """Around the wait for a message, which comes first in an action."""
        began = self.now()
        yield
        asked_for = {"kind": kind, "microbatch": microbatch, "chunk": chunk}
        self._record(f"wait for {kind} {microbatch}", "message", began, asked_for)
        self.began = self.now()

    def _record(self, name, category, began, what):
        event = {"name": name, "cat": category, "ph": "X", "ts": began, "dur": self.now() - began}
        self.steps[-1].append(event | {"pid": self.replica, "tid": self.rank, "args": what | {"step": self.step}})


def write(c, trace, mesh):
    """Collect the ranks' records in one file. Every rank calls it; rank 0 writes. Raises UserError on rank 0.

    c: the configuration. The number of micro-batches is the last step's.
    """
    mine = [event for step in trace.steps for event in step]
    events = [event for events in gather_objects(mine, mesh.world) for event in events]
    about = {"schedule": c.schedule, "stages": c.pp, "microbatches": trace.microbatches, "chunks": c.chunks}
    if mesh.rank == 0:
        with explained(f"trace={c.trace}"), open(c.trace, "w") as file:
            json.dump({"traceEvents": events, "otherData": about}, file)
