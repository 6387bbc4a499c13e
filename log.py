"""Timers, the lines on the terminal, and metrics.jsonl.

The log has two speeds of one device, in TFLOP/s (`accounts/flops.py`): `tflops` counts the model FLOPs,
`hardware_tflops` also recomputation. `mfu`, the model FLOPs utilization (Chowdhery et al., arXiv 2204.02311), is
`tflops` divided by the device's peak.
"""

import math
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from accounts.devices import peak_tflops
from accounts.flops import hardware_flops, model_flops
from accounts.metrics import keep_rows, max_resident, set_aside, to_json
from errors import agreed, check_locks, explained, reading
from parallel.comm import agree
from parallel.schedules import Action
from parallel.watch import Tool
from recovery import checkpoint
from recovery.replicas import APART

# --- where a step's time goes -----------------------------------------------------------------------------------------

TIMED = {  # {phase of the watch: its name in Megatron-LM's log}
    "forward": "forward-compute",
    "backward": "backward-compute",
    "finish": "grad-reduce",
    "update": "optimizer",
    "batch": "batch-generator",
}


class Timers(Tool):
    """Time spent in each phase of TIMED.

    The time of batch counts in forward, too. A wait for a message counts in the phase that waits. On a GPU the host
    runs ahead, so CUDA events measure a phase. Only `take` waits for the GPU.
    """

    def __init__(self, device):
        self.on_gpu = torch.device(device).type == "cuda"
        self.spans = []  # (phase, start, stop)

    @contextmanager
    def span(self, phase, subject=None):
        start = self.mark() if phase in TIMED else None
        yield
        if phase in TIMED:
            self.spans.append((phase, start, self.mark()))

    def mark(self):
        if not self.on_gpu:
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def take(self, iterations):
        """Return {name in Megatron-LM's log: milliseconds per iteration} since the last `take`."""
        if self.on_gpu:
            torch.cuda.synchronize()
        spans, self.spans = self.spans, []
        totals = dict.fromkeys(TIMED, 0.0)
        for phase, start, stop in spans:
            totals[phase] += start.elapsed_time(stop) if self.on_gpu else 1000 * (stop - start)
        return {TIMED[phase]: total / iterations for phase, total in totals.items() if total}


class InStep(Tool):
    """On rank 0: a bar of the actions of a step that takes LONG seconds, and the answer to a signal.

    say: prints a text.
    """

    LONG = 15

    def __init__(self, run, say):
        self.run, self.say, self.answered, self.bar = run, say, False, None

    @contextmanager
    def span(self, phase, subject):
        if phase == "pipeline":
            actions = len(subject.actions[self.run.mesh.pp.rank])
            looks = dict(desc="this step", unit=" actions", leave=False, dynamic_ncols=True, disable=None)
            with tqdm(total=actions, delay=self.LONG, **looks) as self.bar:
                yield
            return
        yield
        if isinstance(subject, Action):
            self.bar.update()
            self.answer()

    def answer(self):
        if self.run.signals.stop and not self.answered:
            self.answered, limit = True, "a second Ctrl-C ends it now, unsaved"
            if "TORCHELASTIC_RUN_ID" in os.environ:
                limit = "torchrun ends it, unsaved, after --shutdown-timeout (default: 30 s)"
                if "SLURM_JOB_ID" in os.environ:
                    limit += ", Slurm (scancel, preemption) after KillWait (default: 30 s)"
            self.say(f"a signal: the run stops and saves after this step; {limit}")


# --- from steps to a row of numbers -----------------------------------------------------------------------------------


PATIENCE = 20  # losses or gradients in a row that are not finite, until the run stops


class StepNumbers(NamedTuple):
    loss: float  # mean over all micro-batches and data ranks
    grad_norm: float  # of all ranks, before clipping; nan or inf after an overflow
    lr: float
    skipped: bool  # a gradient overflowed on some rank
    stop: bool  # some rank received a signal: all ranks save and stop
    apart: bool  # before this step the ranks had made different numbers of updates
    loss_scale: float
    samples: int  # global batch size


class PendingStep:
    """An update that the device may still be computing."""

    def __init__(self, numbers, loss_scale, samples):
        """numbers: the first six fields of `StepNumbers`, float64, on the device."""
        self.host_fields = loss_scale, samples
        self.numbers = numbers.to("cpu", non_blocking=True)  # from a GPU: asynchronous, into pinned memory
        self.copied = torch.cuda.current_stream().record_event() if numbers.is_cuda else None

    def read(self):
        """Wait for the device. Return the `StepNumbers`."""
        if self.copied:
            self.copied.synchronize()
        loss, grad_norm, lr, *flags = self.numbers.tolist()
        return StepNumbers(loss, grad_norm, lr, *(flag > 0 for flag in flags), *self.host_fields)


class Interval:
    """The steps since the last log line. unread: the newest `PendingStep`, or None.

    On a GPU the newest step is read one step later: then the device already works on the next one. All ranks have the
    same numbers, so they decide alike without communication.
    """

    def __init__(self, run, say):
        self.run, self.say = run, say
        if run.mesh.rank == 0:
            hardware_flops(run.config, 1)  # counts them now, not in a row's time
        self.steps, self.unread = [], None
        self.stop = False
        self.updated = False  # one of the steps that were read has changed the weights
        self.bad_losses = 0  # number of latest losses that are not finite
        self.bad_gradients = 0  # number of latest updates that were skipped, and that no smaller loss scale can cure
        self.start = time.perf_counter()
        self.first = None  # seconds of the run's first step; 0.0 after the first row

    def add(self, pending):
        """Read the step before `pending`: a GPU computes `pending` meanwhile, so it never waits for the host."""
        self.read()
        self.unread = pending
        if not pending.copied or self.first is None:
            self.read()
        if self.first is None:  # this step compiled kernels
            self.first = time.perf_counter() - self.start
            self.say(f"first step: {self.first:.1f} s, with compilation; no speed of several steps includes it")
            self.run.timers.take(1)

    def read(self, last=False):
        """Wait for the unread step, and move it to `steps`. last: no step follows.

        Raises UserError on all ranks after PATIENCE losses in a row that are not finite, after as many skipped updates,
        after one such loss in the last step, or if the ranks have made different numbers of updates.
        """
        c = self.run.config
        if self.unread:
            step = self.unread.read()
            if step.apart:
                raise agreed(f"up to iteration {self.run.counters.iteration} {APART}; nothing is saved")
            self.steps.append(step)
            self.stop |= step.stop
            self.updated |= not step.skipped
            self.bad_losses = 0 if math.isfinite(step.loss) else self.bad_losses + 1
            curable = self.run.dtype == "fp16" and step.loss_scale > c.min_loss_scale
            self.bad_gradients = self.bad_gradients + 1 if step.skipped and not curable else 0
        self.unread = None
        saved = "nothing was saved since then"
        remedy = f"resume from a checkpoint in {c.out_dir} with other values (--lr)"
        if self.bad_losses and (last or self.bad_losses >= PATIENCE):
            raise agreed(f"lm_loss: the last {self.bad_losses} are not finite, and {saved}; {remedy}")
        if self.bad_gradients >= PATIENCE:
            skipped = f"the last {self.bad_gradients} are not finite, so these updates were skipped"
            raise agreed(f"grad_norm: {skipped}, and {saved}; {remedy}")

    @contextmanager
    def paused(self):
        """Context: leave the time of a block out of the speeds."""
        began = time.perf_counter()
        yield
        self.start += time.perf_counter() - began

    def row(self):
        """Return the row of metrics.jsonl (on rank 0), and begin the next interval."""
        self.read()
        steps, now = self.steps, time.perf_counter()
        first = self.first if len(steps) > 1 else 0.0  # the speeds leave it out, unless the row has no other step
        timed = len(steps) - (first > 0)
        row = {}
        if self.run.mesh.rank == 0:  # no other rank needs it, and the FLOPs
            row = metrics_row(self.run, steps, timed, now - self.start - first)
        self.steps, self.start, self.first = [], now, 0.0
        return row | {"timers_ms": self.run.timers.take(timed)}


def metrics_row(run, steps, timed, seconds):
    """Return a row of metrics.jsonl. steps: [StepNumbers] of the interval. The last `timed` of them took `seconds`."""
    c, last, world = run.config, steps[-1], run.mesh.world.size
    losses = [step.loss for step in steps]
    finite = [loss for loss in losses if math.isfinite(loss)] or losses  # also of skipped steps
    samples = sum(step.samples for step in steps[-timed:])
    consumed = run.counters.consumed_samples
    tflops = model_flops(c, samples) / seconds / world / 1e12
    device_name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "cpu"
    peak = peak_tflops(device_name, run.dtype)
    return {
        "iteration": run.counters.iteration,
        "train_iters": c.train_iters,
        "processes": world,
        "consumed_samples": consumed,
        "consumed_tokens": consumed * c.seq_length,
        "lm_loss": sum(finite) / len(finite),
        "grad_norm": last.grad_norm,
        "lr": last.lr,
        "loss_scale": last.loss_scale,
        "global_batch_size": last.samples,
        "seq_length": c.seq_length,
        "skipped_iterations": sum(step.skipped for step in steps),
        "nan_iterations": sum(not math.isfinite(loss) for loss in losses),
        "iteration_ms": 1000 * seconds / timed,
        "samples_per_second": samples / seconds,
        "tokens_per_second": samples * c.seq_length / seconds,
        "tflops": tflops,
        "hardware_tflops": hardware_flops(c, samples) / seconds / world / 1e12,
        "mfu": tflops / peak if peak and math.isfinite(tflops) else "unknown",
    }


# --- the lines made from a row ----------------------------------------------------------------------------------------


MEGATRONS_LINE = (  # with the fields of Megatron-LM's; its TFLOPs include recomputation
    " iteration {iteration:8d}/{train_iters:8d} | consumed samples: {consumed_samples:12d} |"
    " consumed tokens: {consumed_tokens:12d} | elapsed time per iteration (ms): {iteration_ms:.1f} |"
    " learning rate: {lr:.3E} | global batch size: {global_batch_size:5d} | lm loss: {lm_loss:.6E} |"
    " loss scale: {loss_scale:.1f} | grad norm: {grad_norm:.3f} | actual seqlen: {seq_length:5d} |"
    " number of skipped iterations: {skipped_iterations:3d} | number of nan iterations: {nan_iterations:3d} |"
    " samples per second: {samples_per_second:.3f} | TFLOPs: {hardware_tflops:.2f} |"
)


def timers_line(timers_ms):
    return "time (ms) | " + " | ".join(f"{phase}: {ms:.2f}" for phase, ms in timers_ms.items())


def validation_lines(iteration, losses, split="val"):
    """Return Megatron-LM's lines, with one for each of several data sets. losses: of `train.validate`."""
    name, lines = "validation" if split == "val" else split, []
    for key, loss in losses.items():
        of_set = key.replace("validation_loss", "").replace("/", " of ", 1)
        ppl = math.exp(min(loss, 20))  # Megatron-LM's bound: exp would overflow
        where = f"{name} loss{of_set} at iteration {iteration}"
        lines.append(f" {where} | lm loss value: {loss:.6E} | lm loss PPL: {ppl:.6E} | ")
    dashes = "-" * (max(map(len, lines)) + 1)
    return "\n".join([dashes, *lines, dashes])


def sets_line(row):
    """Return the tokens and epochs of each of several data sets, or ""."""
    names = [key.removeprefix("epochs/") for key in row if key.startswith("epochs/")]
    counts = [(name, row[f"consumed_tokens/{name}"], row[f"epochs/{name}"]) for name in names]
    return " | ".join(f"{name}: {tokens:,} tokens, {epochs:.3f} epochs" for name, tokens, epochs in counts)


def memory_line(iteration, device):
    """Return Megatron-LM's line with the most memory so far, in MB."""
    sizes = {"max resident": max_resident()}
    if device.type == "cuda":
        sizes = {
            "allocated": torch.cuda.memory_allocated(device),
            "max allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "max reserved": torch.cuda.max_memory_reserved(device),
        }
    fields = " | ".join(f"{name}: {size / 2**20}" for name, size in sizes.items())
    return f"[Rank 0] (after {iteration} iterations) memory (MB) | {fields}"


# --- the writer -------------------------------------------------------------------------------------------------------


class Logger:
    """Writes the log on rank 0. Raises UserError if a file can't be written. path: the run's checkpoint, or None."""

    def __init__(self, run, path):
        self.run, self.first = run, run.mesh.rank == 0
        self.has_memory_line = False
        if not self.first:
            return
        c, iteration = run.config, run.counters.iteration
        self.plots = plot_writers(c, iteration)
        self.path = Path(c.out_dir, "metrics.jsonl")
        goes_on = path and iteration > 0 and Path(path).parent.resolve() == self.path.parent.resolve()
        with explained(self.path):
            kept = None if goes_on or checkpoint.restarted() else set_aside(self.path)
            keep_rows(self.path, iteration)
        # disable=None: no bar where stderr is not a terminal.
        self.bar = tqdm(total=c.train_iters, initial=iteration, dynamic_ncols=True, disable=None)
        if kept:
            self.say(f"the rows of the run before are in {kept}")

    def say(self, text):
        if self.first:
            tqdm.write(text, file=sys.stdout)

    def log(self, row):
        """Write an `Interval.row`. Every rank calls this. Raises UserError on all ranks if out_dir was removed."""
        agree(self.run.mesh.world, check_locks)
        if not self.first:
            return
        # Open the file for each line, to notice that out_dir was removed. Without a buffer no reader sees half a line.
        with explained(self.path), open(self.path, "ab", buffering=0) as file:
            file.write(f"{to_json(row)}\n".encode())
        self.say(MEGATRONS_LINE.format(**row))
        if not self.has_memory_line:
            self.say(memory_line(row["iteration"], self.run.device))
            self.has_memory_line = True
        if row["timers_ms"]:
            self.say(timers_line(row["timers_ms"]))
        if line := sets_line(row):
            self.say(line)
        if losses := {key: row[key] for key in row if key.startswith("validation_loss")}:
            self.say(validation_lines(row["iteration"], losses))
        for write in self.plots:
            numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}  # mfu may be a word
            write(numbers, row["iteration"])
        self.bar.update(row["iteration"] - self.bar.n)

    def close(self):
        if self.first:
            self.bar.close()


def plot_writers(c, iteration):
    """Return functions (numbers, iteration) that write for TensorBoard and W&B."""
    writers = []
    if c.tensorboard:
        with reading(f"tensorboard={c.tensorboard}", ImportError):
            from torch.utils.tensorboard import SummaryWriter

            board = SummaryWriter(c.tensorboard, purge_step=iteration + 1)  # hides an earlier run's later points

        def write(numbers, iteration):
            for name, value in numbers.items():
                board.add_scalar(name, value, iteration)
            board.flush()

        writers.append(write)
    if c.wandb:
        with reading(f"wandb={c.wandb}", Exception):  # not installed, not logged in, no network
            import wandb

            name = Path(c.out_dir).name  # resume: after a crash, a restart continues the W&B run
            run = wandb.init(project=c.wandb, name=name, dir=c.out_dir, config=asdict(c), resume="auto")
        writers.append(lambda numbers, iteration: run.log(numbers, step=iteration))
    return writers
