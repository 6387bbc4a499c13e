"""What a run says and leaves behind: its speed, the terminal's lines, and metrics.jsonl.

What a training step costs is known before it runs. Only the matrices cost: a token meets each of their
numbers in one multiplication and one addition, 2 FLOPs. Forward, one token:

    weights of a block    qkv 3h^2, projection h^2, MLP 4h^2 + 4h^2      12h^2 numbers    24h^2 FLOPs
    attention of a block  q k^T, and its softmax times v: 2sh each       no numbers        4sh
    head                  h by V (the embedding's look-up is free)       Vh numbers        2Vh

together 24Lh^2 + 4Lsh + 2Vh. Backward takes every product twice, once for the gradient of its input and once
for that of its weight, so a step costs three forwards of all B sequences of s tokens:

    model FLOPs     72BsLh^2 (1 + s/6h + V/12Lh)  =  Bs (6N + 12Lhs)  with N = 12Lh^2 + Vh
    with recompute  96BsLh^2 (1 + s/6h + V/16Lh)     the blocks' forward, not the head's, runs a second time

(Narayanan et al., arXiv 2104.04473, appendix. As Megatron-LM does, we count all s by s products of
attention, though the causal mask needs half. The slide "Transformerのスケール則" counts 5.7 FLOPs per
parameter and token; we count 6.) Per second and device these are the two speeds in the log. `tflops` says
how fast the model learns, `hardware_tflops` how busy the devices are: recomputation raises only the second.
`mfu`, the model FLOPs utilization (Chowdhery et al., arXiv 2204.02311), is `tflops` over the device's peak:
0.5 is very good.

From one row of numbers come Megatron-LM's line on the terminal, a line of out_dir/metrics.jsonl and, where
asked for, a step in TensorBoard and Weights & Biases. So they cannot disagree.
"""

import importlib
import json
import math
import os
import re
import resource
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from errors import UserError, explained

# --- speed ------------------------------------------------------------------------------------------------------------


def model_flops(config, batch, block_forwards=3):
    """FLOPs that a step of `batch` sequences needs: 72BsLh^2(1 + s/6h + V/12Lh) = Bs(6N + 12Lhs).

    block_forwards: how many forwards of the blocks a step costs; of the head it costs three.
    """
    L, h, s, V = config.num_layers, config.hidden_size, config.seq_length, config.padded_vocab_size
    return batch * s * (block_forwards * (24 * L * h**2 + 4 * L * s * h) + 3 * 2 * V * h)


def hardware_flops(config, batch):
    """FLOPs that the devices run for it: with recompute=full, 96BsLh^2(1 + s/6h + V/16Lh)."""
    return model_flops(config, batch, block_forwards=4 if config.recompute == "full" else 3)


# TFLOP/s of dense matrix products, from the makers' data sheets: no sparsity; sums in float32 (at half of the
# rate that GeForce cards advertise); float32 without TF32; float64 on tensor cores where they have it.
PEAK_TFLOPS = {  # bf16, fp16, fp32, fp64; None where there is no such path, or we are not sure of it
    "V100 PCIE": (None, 112, 14, 7),
    "V100 SXM2": (None, 125, 15.7, 7.8),
    "T4": (None, 65, 8.1, None),
    "A10": (125, 125, 31.2, None),
    "A30": (165, 165, 10.3, 10.3),
    "A40": (149.7, 149.7, 37.4, None),
    "A100 PCIE": (312, 312, 19.5, 19.5),
    "A100 SXM4": (312, 312, 19.5, 19.5),
    "RTX 3090": (71, 71, 35.6, None),
    "RTX 4090": (165.2, 165.2, 82.6, None),
    "L4": (121, 121, 30.3, None),
    "L40S": (362, 362, 91.6, None),
    "H100": (989, 989, 67, 67),  # SXM
    "H100 PCIE": (756, 756, 51, 51),
    "H200": (989, 989, 67, 67),  # SXM
    "GH200": (989, 989, 67, 67),
    "B200": (2250, 2250, None, None),
}


def peak_tflops(device_name, dtype):
    """The device's peak in TFLOP/s for `dtype` (bf16, fp16, fp32, fp64); None where it is not known.

    `device_name` is CUDA's: "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3". Maker and memory are set aside;
    the rest is looked up whole, for "H200 NVL" is not an H200, nor "A100-SXM4-40GB MIG 1g.5gb" an A100.
    """
    name = re.sub(r"NVIDIA|Tesla|GeForce|\b\d+GB\b|\bHBM3e?\b|-", " ", device_name)
    peaks = PEAK_TFLOPS.get(" ".join(name.upper().split()), (None,) * 4)
    return dict(zip(("bf16", "fp16", "fp32", "fp64"), peaks, strict=True)).get(dtype)


# --- where a step's time goes -----------------------------------------------------------------------------------------

PHASES = ("forward-compute", "backward-compute", "grad-reduce", "optimizer", "batch-generator")


class Timers:
    """Time spent in each of PHASES: `with timers("forward-compute"): ...`, as often in a step as needed.

    The batch generator's is part of the forward's, and waits for messages are part of what waits for them.
    On a GPU the host runs ahead: a clock would time the queueing, not the work. There two events in the
    current stream's queue bracket a phase, and the GPU says what time lay between them. Asking whether an
    event has passed does not wait for it: each phase that ends books the oldest one that has, whose events
    are used again, so there are never many more than the queue is deep. Nothing waits before `take`. A host
    that falls behind leaves the queue empty, and that, too, is time between two events.
    """

    def __init__(self, device, clock=time.perf_counter):
        self.on_gpu = torch.device(device).type == "cuda"
        self.clock = clock
        self.milliseconds = dict.fromkeys(PHASES, 0.0)
        self.pending = deque()  # (phase, start, stop) that the GPU may not have passed yet
        self.spare = []  # events to use again

    @contextmanager
    def __call__(self, phase):
        start = self.mark()
        yield
        stop = self.mark()
        if not self.on_gpu:
            self.milliseconds[phase] += 1000 * (stop - start)
            return
        self.pending.append((phase, start, stop))
        if self.pending[0][2].query():
            self.book_oldest()

    def mark(self):
        if not self.on_gpu:
            return self.clock()
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def book_oldest(self):
        phase, start, stop = self.pending.popleft()
        self.milliseconds[phase] += start.elapsed_time(stop)
        self.spare += [start, stop]

    def take(self, iterations):
        """{phase: milliseconds per iteration} since the last `take`, in PHASES' order, without idle phases.

        `iterations` is their number. Waits for the GPU: call it where a line is logged.
        """
        if self.pending:
            torch.cuda.synchronize()
        while self.pending:
            self.book_oldest()
        totals, self.milliseconds = self.milliseconds, dict.fromkeys(PHASES, 0.0)
        return {phase: total / iterations for phase, total in totals.items() if total}


# --- from steps to a row of numbers -----------------------------------------------------------------------------------


class Step(NamedTuple):
    """One update, as numbers on the host."""

    loss: float  # mean over all micro-batches and data ranks
    grad_norm: float  # global, before clipping; nan or inf where the update was skipped
    lr: float  # the one that this update used
    skipped: bool  # some gradient overflowed
    stop: bool  # some rank was asked to stop: all ranks save
    orphaned: bool  # some rank lost its launcher: no rank saves
    loss_scale: float
    samples: int  # the global batch


class PendingStep:
    """An update whose numbers the device may still have to compute: `read` waits for them."""

    def __init__(self, numbers, loss_scale, samples):
        """numbers: Step's first six fields, float64 [6] on the device. A GPU copies them once it has computed them."""
        self.host_fields, self.step = (loss_scale, samples), None
        self.numbers = numbers.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self.copied = torch.cuda.current_stream().record_event() if numbers.is_cuda else None

    def read(self):
        """The `Step`. The first call waits for the device; later calls return the same Step."""
        if self.step is None:
            if self.copied:
                self.copied.synchronize()
            loss, grad_norm, lr, *flags = self.numbers.tolist()
            self.step = Step(loss, grad_norm, lr, *(flag > 0 for flag in flags), *self.host_fields)
        return self.step


class Interval:
    """The steps between two log lines, and the time that they take."""

    def __init__(self):
        self.steps = []  # of PendingStep
        self.start = time.perf_counter()

    @contextmanager
    def paused(self):
        """Leave the block's time out of the interval: the block is no training."""
        began = time.perf_counter()
        yield
        self.start += time.perf_counter() - began

    def row(self, iteration, consumed_samples, timers, data_wait_seconds):
        """The keywords of `metrics_row`. data_wait_seconds: the wait for batches in the whole interval."""
        steps = [step.read() for step in self.steps]  # first: the clock below must count the wait for the last step
        return {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            "steps": steps,
            "seconds": time.perf_counter() - self.start,
            "timers_ms": timers.take(len(steps)),
            "data_wait_ms": 1000 * data_wait_seconds / len(steps),
        }


def metrics_row(
    config, world, peak, *, iteration, consumed_samples, steps, seconds, timers_ms, data_wait_ms, validation_loss=None
):
    """A logged interval as metrics.jsonl keeps it: a dict of numbers; mfu is "unknown" without a peak.

    world: the number of devices that share the work. peak: TFLOP/s of one of them, or None.
    iteration: the interval's last, counted from 1. consumed_samples: since training began.
    steps: the interval's, each a Step. seconds: that they took. timers_ms: from `Timers.take`.
    data_wait_ms: per iteration, the host's wait for its next batch.
    """
    losses, last = [step.loss for step in steps], steps[-1]
    samples = sum(step.samples for step in steps)
    per_device = 1 / seconds / world / 1e12
    tflops = model_flops(config, samples) * per_device
    row = {
        "iteration": iteration,
        "train_iters": config.train_iters,
        "consumed_samples": consumed_samples,
        "consumed_tokens": consumed_samples * config.seq_length,
        "lm_loss": sum(losses) / len(steps),
        "grad_norm": last.grad_norm,
        "lr": last.lr,
        "loss_scale": last.loss_scale,
        "global_batch_size": last.samples,
        "seq_length": config.seq_length,
        "skipped_iterations": sum(step.skipped for step in steps),
        "nan_iterations": sum(not math.isfinite(loss) for loss in losses),
        "iteration_ms": 1000 * seconds / len(steps),
        "samples_per_second": samples / seconds,
        "tokens_per_second": samples * config.seq_length / seconds,
        "tflops": tflops,
        "hardware_tflops": hardware_flops(config, samples) * per_device,
        "mfu": tflops / peak if peak else "unknown",
        "data_wait_ms": data_wait_ms,
        "timers_ms": timers_ms,
    }
    return row if validation_loss is None else row | {"validation_loss": validation_loss}


# --- the lines made from a row ----------------------------------------------------------------------------------------


def iteration_line(row):
    """Megatron-LM's line, field for field. Its TFLOPs count recomputation."""
    return (
        f" iteration {row['iteration']:8d}/{row['train_iters']:8d} |"
        f" consumed samples: {row['consumed_samples']:12d} |"
        f" consumed tokens: {row['consumed_tokens']:12d} |"
        f" elapsed time per iteration (ms): {row['iteration_ms']:.1f} |"
        f" learning rate: {row['lr']:.3E} |"
        f" global batch size: {row['global_batch_size']:5d} |"
        f" lm loss: {row['lm_loss']:.6E} |"
        f" loss scale: {row['loss_scale']:.1f} |"
        f" grad norm: {row['grad_norm']:.3f} |"
        f" actual seqlen: {row['seq_length']:5d} |"
        f" number of skipped iterations: {row['skipped_iterations']:3d} |"
        f" number of nan iterations: {row['nan_iterations']:3d} |"
        f" samples per second: {row['samples_per_second']:.3f} |"
        f" TFLOPs: {row['hardware_tflops']:.2f} |"
    )


def timers_line(timers_ms):
    return "time (ms) | " + " | ".join(f"{phase}: {ms:.2f}" for phase, ms in timers_ms.items())


def validation_lines(iteration, loss):
    """Three lines. The perplexity, exp(loss), is the number of equally likely tokens with that loss."""
    ppl = math.exp(min(loss, 20))  # Megatron's bound: a diverged loss must still print
    line = f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {ppl:.6E} | "
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def memory_line(iteration, megabytes):
    fields = " | ".join(f"{name}: {value}" for name, value in megabytes.items())
    return f"[Rank 0] (after {iteration} iterations) memory (MB) | {fields}"


def memory_in_use(device):
    """{name: MB of 2^20 bytes}: what PyTorch holds of a GPU; else the process's resident memory."""
    if torch.device(device).type == "cuda":
        used = {
            "allocated": torch.cuda.memory_allocated(device),
            "max allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "max reserved": torch.cuda.max_memory_reserved(device),
        }
        return {name: count / 2**20 for name, count in used.items()}
    status = Path("/proc/self/status")
    if not status.exists():  # macOS tells only the peak, in bytes
        return {"max resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    kilobytes = dict(re.findall(r"(Vm\w+):\s*(\d+) kB", status.read_text()))
    named = {"resident": "VmRSS", "max resident": "VmHWM"}
    return {name: int(kilobytes[key]) / 2**10 for name, key in named.items() if key in kilobytes}


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


def to_json(row):
    """A row as one line of JSON, numbers at full precision.

    JSON has no nan or infinity; they become the strings "nan", "inf" and "-inf", which float() reads. null
    would do for a plot, but an infinite gradient norm (an overflow, skipped) and a nan (a defect) must not
    look alike.
    """
    strange = {name: repr(v) for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps(row | strange, allow_nan=False)


def from_json(line):
    row = json.loads(line)
    return row | {name: float(v) for name, v in row.items() if v in ("nan", "inf", "-inf")}


def open_lines(path):
    """A descriptor that appends to `path`. If a crash cut its last line short, the next one starts afresh."""
    with explained(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file


def write_line(file, line):
    """One write: nobody reads half a line, and a process that dies right after has not lost it."""
    data = f"{line}\n".encode()
    try:
        while data:  # a second write only where the disk is full, for the system to say so
            data = data[os.write(file, data) :]
    except OSError as error:
        raise UserError(f"metrics.jsonl: {error.strerror}; the run can go on from its checkpoint") from None


def read_metrics(path):
    """{iteration: row} of a metrics.jsonl, in order, as the latest run tells it.

    A run that goes on from a checkpoint repeats iterations: its row replaces the one that stood for that
    iteration, and those after it. A line that a crash cut short is passed over.
    """
    rows = {}
    for line in Path(path).read_bytes().splitlines():
        with suppress(ValueError):
            row = from_json(line)
            while rows and next(reversed(rows)) >= row["iteration"]:
                rows.popitem()
            rows[row["iteration"]] = row
    return rows


# --- the writer -------------------------------------------------------------------------------------------------------


class Logger:
    """The voice of rank 0. Made on every rank: a missing package stops them all; the others are silent.

    `device` and `dtype` (bf16, fp16, fp32, fp64) are what the run computes on and in, `iteration` where it
    goes on from (0: afresh). Lines go to stdout; on a stderr that is a terminal, a bar makes way for them.
    """

    def __init__(self, config, device, world, *, rank, dtype, iteration=0):
        self.config, self.device, self.world, self.rank = config, torch.device(device), world, rank
        tensorboard = imported("tensorboard", config.tensorboard, "torch.utils.tensorboard")
        wandb = imported("wandb", config.wandb, "wandb")
        if rank != 0:
            return
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self.peak = peak_tflops(name, dtype)
        self.memory_said = False
        self.file = open_lines(Path(config.out_dir) / "metrics.jsonl")
        # purge_step: from here on, what an earlier run wrote is hidden.
        self.board = tensorboard and tensorboard.SummaryWriter(config.tensorboard, purge_step=iteration + 1)
        self.run = wandb and wandb_run(wandb, config)
        # disable=None: no bar where stderr is not a terminal.
        self.bar = tqdm(total=config.train_iters, initial=iteration, dynamic_ncols=True, disable=None)

    def advance(self):
        """One more iteration is done: the bar moves."""
        if self.rank == 0:
            self.bar.update()

    def say(self, text):
        """Print `text`, on rank 0, past the bar."""
        if self.rank == 0:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()  # so that a log in a file can be read while the run goes on

    def log(self, **interval):
        """Write, print and (on rank 0) return a row. Takes metrics_row's keywords."""
        if self.rank != 0:
            return None
        row = metrics_row(self.config, self.world, self.peak, **interval)
        write_line(self.file, to_json(row))
        self.say(iteration_line(row))
        if not self.memory_said:
            self.say(memory_line(row["iteration"], memory_in_use(self.device)))
            self.memory_said = True
        if row["timers_ms"]:
            self.say(timers_line(row["timers_ms"]))
        if "validation_loss" in row:
            self.say(validation_lines(row["iteration"], row["validation_loss"]))
        if self.board:
            for name, value in scalars(row).items():
                self.board.add_scalar(name, value, row["iteration"])
        if self.run:
            self.run.log(scalars(row), step=row["iteration"])
        self.bar.set_postfix_str(f"loss {row['lm_loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s")
        return row

    def close(self):
        if self.rank != 0:
            return
        self.bar.close()
        os.close(self.file)
        if self.board:
            self.board.close()
        if self.run:
            self.run.finish()


def imported(field, value, module):
    """`module` where the field has a value, else None. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(module) if value else None
    except ImportError:
        raise UserError(f"{field}={value}: {field} is not installed (pip install {field})") from None


def wandb_run(wandb, config):
    """The run that rows are sent to; after a crash, the same one (resume="auto"). Raises UserError."""
    out = config.out_dir
    try:
        return wandb.init(project=config.wandb, name=Path(out).name, dir=out, config=asdict(config), resume="auto")
    except wandb.Error as error:  # not logged in, no network
        raise UserError(f"wandb={config.wandb}: {' '.join(str(error).split())}") from None


def scalars(row):
    """The row's numbers by name, as a plot wants them: lm_loss, timers_ms/optimizer; no "unknown"."""
    timers = {f"timers_ms/{phase}": ms for phase, ms in row["timers_ms"].items()}
    return {name: value for name, value in row.items() if isinstance(value, int | float)} | timers
