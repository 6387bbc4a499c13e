"""Signs of life: a thread of rank 0 says how far a long step on a CPU is, and answers a signal."""

import os
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

FIRST_LINE = 15  # seconds until a long step's first line; each later line comes after twice the time


@contextmanager
def signs_of_life(run, say):
    """Context: run the thread. say: prints a text."""
    over = threading.Event()
    thread = threading.Thread(target=observe, args=(run, say, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def observe(run, say, over):
    """Look at the step every second, until `over`, and answer a signal."""
    dog, began = run.watchdog, None
    answered = False
    while not over.wait(1):
        if dog.since != began:
            began, due = dog.since, FIRST_LINE
            work = progress = 0  # progress: seconds until `work` changed last
        what, seconds = dog.what, time.monotonic() - began
        if run.executor.work != work:
            work, progress = run.executor.work, seconds
        training = what.startswith("iteration")
        if training:
            what += f": {how_far(run.executor, progress)}"
            if seconds - progress > FIRST_LINE:
                what += f"; no progress in the last {timedelta(seconds=int(seconds - progress))}"
        if run.signals.stop and not answered:
            answered = True
            limit = "a second Ctrl-C ends it now, unsaved"
            if "TORCHELASTIC_RUN_ID" in os.environ:
                limit = "torchrun ends it, unsaved, after --shutdown-timeout (default: 30 s)"
                if "SLURM_JOB_ID" in os.environ:
                    limit += ", Slurm (scancel, preemption) after KillWait (default: 30 s)"
            say(f"a signal: the run stops and saves after this step; {limit} ({what})")
        elif training and run.device.type == "cpu" and seconds >= due:
            due = 2 * seconds
            say(what)


def how_far(executor, seconds):
    """Return as text how far a step is after `seconds`, and how long it takes."""
    schedule, read = executor.step.schedule, len(executor.step.batches)
    work = executor.work - 1  # the last unit has only begun
    units = {c: len(chunk.units) for c, chunk in executor.chunks.items()}
    actions = schedule.actions[executor.mesh.pp.rank]
    whole = sum({"F": 1, "B": 2, "I": 2}.get(action.kind, 0) * units[action.chunk] for action in actions)
    text = f"micro-batch {read} of {schedule.microbatches} after {timedelta(seconds=int(seconds))}"
    if work > 0:
        text += f"; the step takes about {timedelta(seconds=int(seconds * whole / work))}"
    return text
