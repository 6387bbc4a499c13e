"""Profile three steps with torch.profiler (--profile=DIR): DIR/rank0.json ..., in Chrome's trace format.

Actions, other phases, and the starts and waits of communications have names there, beside PyTorch's operations. On a
GPU they are NVTX ranges, too, for `nsys profile`.
"""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity, record_function

from errors import explained
from parallel.comm import agree
from parallel.schedules import Action
from parallel.watch import Tool

WARM, STEPS = 2, 3  # steps before, and those in the file


class Names(Tool):
    """Gives a name to each span and communication. profile: torch's, told where a step begins."""

    def __init__(self, profile, on_gpu):
        self.profile, self.on_gpu = profile, on_gpu

    @contextlib.contextmanager
    def named(self, name):
        with record_function(name), torch.cuda.nvtx.range(name) if self.on_gpu else contextlib.nullcontext():
            yield

    def span(self, phase, subject):
        if phase == "pipeline":
            self.profile.step()
        if isinstance(subject, Action):
            return self.named(f"{subject.kind}{subject.microbatch} of chunk {subject.chunk}")
        return self.named(f"wait for {subject[0]} {subject[1]}" if phase == "wait" else phase)

    def started(self, pending, phase, axis, what, operation, peer):
        """Put a handle whose wait has a name in place of torch's."""
        name, work = f"{operation} of {what or 'a message'} over {axis.name}", pending.work

        def wait():
            with self.named(f"wait for {name}"):
                work.wait()

        with self.named(f"start {name}"):
            pending.work = SimpleNamespace(wait=wait, is_completed=work.is_completed)


@contextlib.contextmanager
def profiling(run, say):
    """Context: write the profile of a `train.Run`. Every rank must enter. Raises UserError without a folder."""
    folder, gpu = Path(run.config.profile), run.device.type == "cuda"
    agree(run.mesh.world, explained(f"profile={folder}")(lambda: folder.mkdir(parents=True, exist_ok=True)))
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    files = []
    schedule = torch.profiler.schedule(wait=0, skip_first=WARM, warmup=1, active=STEPS, repeat=1)

    def write(profile):
        files.append(folder / f"rank{run.mesh.rank}.json")
        profile.export_chrome_trace(str(files[-1]))

    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profile:
        run.mesh.watch.tools.append(Names(profile, gpu))
        yield
    if not files:
        say(f"profile={folder}: no file is written: the run ended before its step {WARM + 1} was complete")
