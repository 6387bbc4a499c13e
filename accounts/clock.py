"""The time that a step waits for its communications (--ledger), and a slow wire for CPUs (--delay).

    started ---- the rank computes: hidden ---- began ---- the rank waits ---- ended

On a CPU, marks are times. On a GPU `wait` stops the stream, not the host: marks are events in the stream, which are
read after the run.

A rank also waits for a rank that starts late. Column "of it wire": of a collective the least wait of its ranks; of a
message the wait since both ranks have started it (by the clocks of their hosts). Column "phase": what the rank did when
the communication started (`parallel/watch.py`).
"""

import contextlib
import threading
import time
from collections import Counter, defaultdict
from statistics import median
from typing import NamedTuple

import torch

from parallel.comm import NOT_A_STEP, gather_objects
from parallel.schedules import Action
from parallel.watch import Tool

STEPS = 10  # latest steps whose calls are kept


class DelayedWork:
    """A communication whose result comes `seconds` later."""

    def __init__(self, work, seconds):
        self.work, self.seconds, self.error = work, seconds, None
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        """Note when the communication ends: the delay counts from then, whoever waits."""
        try:
            self.work.wait()
        except RuntimeError as error:
            self.error = error
        self.due = time.monotonic() + self.seconds

    def is_completed(self):
        return not self.thread.is_alive() and (self.error is not None or time.monotonic() >= self.due)

    def wait(self):
        self.thread.join()
        if self.error:
            raise self.error
        time.sleep(max(0.0, self.due - time.monotonic()))


class Call:
    """A communication, in place of torch's handle. row: (phase, axis, what, operation).

    key: equal on its ranks, and begins with them; for a message with (source, destination).
    """

    began = ended = None

    def __init__(self, clock, row, key, work):
        self.clock, self.row, self.key, self.work, self.started = clock, row, key, work, clock.mark()

    def wait(self):
        self.began = self.clock.mark()
        self.work.wait()
        self.ended, self.work = self.clock.mark(), None

    def is_completed(self):
        return self.work.is_completed()

    def times(self):
        """Return (started, began, ended) in milliseconds."""
        return [self.clock.at(mark) for mark in (self.started, self.began, self.ended)]


class Span(NamedTuple):
    """An action, or a wait for a message."""

    subject: tuple  # the Action, or the message's key
    began: object  # marks
    ended: object


class Clock(Tool):
    """Record the Calls and the Spans of the latest steps. steps: {iteration: [Call or Span]}."""

    def __init__(self, run):
        self.counters, self.delay = run.counters, run.config.delay / 1000
        self.on_gpu, self.steps, self.schedule = run.device.type == "cuda", {}, None
        run.mesh.watch.tools.append(self)

    def now(self):
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.time_ns() / 1e6

    def mark(self):
        """Return this moment, for `at`. On a GPU it is an event: nothing waits."""
        if not self.on_gpu:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def at(self, mark):
        """Return the time of a mark in milliseconds, after `ended`."""
        return self.last[0] - mark.elapsed_time(self.last[1]) if self.on_gpu else mark

    @contextlib.contextmanager
    def span(self, phase, subject):
        if phase == "pipeline":
            self.schedule = subject
        kept = phase == "wait" or isinstance(subject, Action)
        if kept:
            self.began = self.mark()
        yield  # a wait within an action moves `began` to its own end
        if kept:
            ended = self.mark()
            self.latest().append(Span(subject, self.began, ended))
            self.began = ended

    def latest(self):
        """Return the list of this step, and forget old ones."""
        step = self.counters.iteration
        if step not in self.steps:
            self.steps[step], self.numbers = [], Counter()
            self.steps = dict([*self.steps.items()][-STEPS:])
        return self.steps[step]

    def started(self, pending, phase, axis, what, operation, peer):
        """Put a Call in place of torch's handle. Its key ends in its number in the step: all ranks count alike."""
        step = self.counters.iteration
        if self.delay:
            pending.work = DelayedWork(pending.work, self.delay)
        if phase in NOT_A_STEP:
            return
        calls, ranks, name = self.latest(), axis.ranks, (axis.name, what, operation)
        if peer is not None:
            ranks, name = (axis.ranks[axis.rank], peer)[:: 1 if operation == "send" else -1], ()
        self.numbers[ranks, name] += 1
        key = ranks, name, step, self.numbers[ranks, name]
        pending.work = Call(self, (phase, axis.name, what, operation), key, pending.work)
        calls.append(pending.work)

    def ended(self):
        """Return the Calls that have ended."""
        mark = self.mark()  # the others count back from it: they are near, and a time between two events is float32
        self.last = self.now(), mark
        return [call for of_step in self.steps.values() for call in of_step if isinstance(call, Call) and call.ended]

    def table(self, mesh):
        """Return {row: (calls, ms of waits, ms of the wire)} of rank 0. Every rank must call this.

        They are medians over the kept steps, without the first and the last.
        """
        records = [(call.key, call.row, *call.times()) for call in self.ended() if 0 in call.key[0]]
        ranks = gather_objects(records, mesh.world)
        middle_steps = [*self.steps][1:-1] or [*self.steps]
        peers = defaultdict(list)
        sums = defaultdict(lambda: {step: [0, 0.0, 0.0] for step in middle_steps})
        for key, *call in (call for calls in ranks for call in calls):
            peers[key].append(call)
        for key, row, _, began, ended in (call for call in ranks[0] if call[0][2] in middle_steps):
            wire = min(end - begin for _, _, begin, end in peers[key])
            if key[1] == ():  # a message: only its sender knows the phase and the data
                wire = min(ended - began, ended - max(start for _, start, *_ in peers[key]))
                row = next((other for other, *_ in peers[key] if other[3] == "send"), row)[:3] + row[3:]
            for i, number in enumerate((1, ended - began, max(0.0, wire))):
                sums[row][key[2]][i] += number
        return {row: [*map(median, zip(*steps.values(), strict=True))] for row, steps in sums.items()}
