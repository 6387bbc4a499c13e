"""FLOPs, timers, the lines on the terminal, and metrics.jsonl. (curve.py draws the losses of metrics.jsonl.)

The FLOPs of a training step follow from the model's shape. The letters are those of Narayanan et al. (arXiv
2104.04473, appendix): L layers, hidden size h, padded vocabulary V, and B sequences of s tokens in a step.
Only matrix products are counted. For each token, each element of a weight costs one multiplication and one
addition, 2 FLOPs. The forward of one token costs:

    weights of a block    qkv 3h^2, projection h^2, MLP 4h^2 + 4h^2      12h^2 elements   24h^2 FLOPs
    attention of a block  q k^T, and its softmax times v: 2sh each       no elements       4sh
    head                  h by V (the embedding's look-up is free)       Vh elements       2Vh

The sum is 24Lh^2 + 4Lsh + 2Vh. Backward computes two products for each product of forward: the gradient of the
input and the gradient of the weight. So a step costs as much as three forwards of all B sequences:

    model FLOPs     72BsLh^2 (1 + s/6h + V/12Lh)  =  Bs (6N + 12Lhs)  with N = 12Lh^2 + Vh
    with recompute  96BsLh^2 (1 + s/6h + V/16Lh)     a second forward of the blocks, but not of the head

Like Megatron-LM we count all s by s products of attention, although the causal mask needs half of them. (The
slide "Transformerのスケール則" counts 5.7 FLOPs per parameter and token; we count 6.)

The log has two speeds of one device, in TFLOP/s. `tflops` counts the model FLOPs: it measures how fast training
proceeds. `hardware_tflops` also counts recomputation: it measures how busy the devices are. `mfu`, the model
FLOPs utilization (Chowdhery et al., arXiv 2204.02311), is `tflops` divided by the device's peak. 0.5 is very good.

`Logger.log` makes one row of numbers and writes it everywhere: as Megatron-LM's line to the terminal, as a line to
out_dir/metrics.jsonl and, if configured, to TensorBoard and Weights & Biases (W&B). So all outputs show equal numbers.
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

from errors import UserError, explained, parse_json

# --- speed ------------------------------------------------------------------------------------------------------------


def model_flops(config, batch, block_forwards=3):
    """Return the FLOPs of a step of `batch` sequences: 72BsLh^2(1 + s/6h + V/12Lh) = Bs(6N + 12Lhs).

    block_forwards: the cost of the blocks in a step, in forwards. The head always costs three forwards.
    """
    L, h, s, V = config.num_layers, config.hidden_size, config.seq_length, config.padded_vocab_size
    return batch * s * (block_forwards * (24 * L * h**2 + 4 * L * s * h) + 3 * 2 * V * h)


def hardware_flops(config, batch):
    """Return `model_flops` plus the recomputation: with recompute=full, 96BsLh^2(1 + s/6h + V/16Lh)."""
    return model_flops(config, batch, block_forwards=4 if config.recompute == "full" else 3)


# TFLOP/s of dense matrix products, from the makers' data sheets. bf16 and fp16 products are summed in float32;
# GeForce cards do this at half of the advertised rate. fp32 is without TF32. fp64 uses tensor cores where possible.
PEAK_TFLOPS = {  # bf16, fp16, fp32, fp64; None: the device cannot do it, or the rate is not certain
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
    """Return the device's peak in TFLOP/s for `dtype` (bf16, fp16, fp32, fp64), or None if it is unknown.

    `device_name` is CUDA's name, such as "NVIDIA A100-SXM4-40GB" or "NVIDIA H100 80GB HBM3". The maker and the memory
    are removed. The rest must match exactly: "H200 NVL" is not an H200, and "A100-SXM4-40GB MIG 1g.5gb" is only a part
    of an A100.
    """
    name = re.sub(r"NVIDIA|Tesla|GeForce|\b\d+GB\b|\bHBM3e?\b|-", " ", device_name)
    peaks = PEAK_TFLOPS.get(" ".join(name.upper().split()), (None,) * 4)
    return dict(zip(("bf16", "fp16", "fp32", "fp64"), peaks, strict=True)).get(dtype)


# --- where a step's time goes -----------------------------------------------------------------------------------------

PHASES = ("forward-compute", "backward-compute", "grad-reduce", "optimizer", "batch-generator")


class Timers:
    """Time spent in each of PHASES: `with timers("forward-compute"): ...`, any number of times in a step.

    The time of batch-generator is also a part of forward-compute. The wait for a message is a part of the phase that
    waits. On a GPU the host runs ahead: a host clock would time only the launch of the work. So we record a CUDA event
    in the current stream before a phase and another one after it. The GPU measures the time between the two events.
    This includes the time in which the GPU has no work because the host is slow. At the end of each phase we test,
    without waiting, if the oldest pending phase has finished on the GPU. If so, its time is added and its events are
    used again. So the number of events stays close to the number of phases in the GPU's queue. Only `take` waits for
    the GPU.
    """

    def __init__(self, device, clock=time.perf_counter):
        self.on_gpu = torch.device(device).type == "cuda"
        self.clock = clock
        self.milliseconds = dict.fromkeys(PHASES, 0.0)
        self.pending = deque()  # (phase, start, stop) that the GPU may not have finished yet
        self.spare = []  # finished events, to be used again

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
        """Return {phase: milliseconds per iteration} since the last `take`, in PHASES' order, without unused phases.

        iterations: the number of iterations since the last `take`. `take` waits for the GPU: call it once a log line.
        """
        if self.pending:
            torch.cuda.synchronize()
        while self.pending:
            self.book_oldest()
        totals, self.milliseconds = self.milliseconds, dict.fromkeys(PHASES, 0.0)
        return {phase: total / iterations for phase, total in totals.items() if total}


# --- from steps to a row of numbers -----------------------------------------------------------------------------------


class Step(NamedTuple):
    """The numbers of one update, on the host."""

    loss: float  # mean over all micro-batches and data ranks
    grad_norm: float  # of all ranks, before clipping; nan or inf if the update was skipped
    lr: float  # learning rate of this update
    skipped: bool  # a gradient overflowed on some rank
    stop: bool  # some rank received a stop signal: all ranks save and stop
    orphaned: bool  # torchrun died on some node: all ranks stop without saving
    loss_scale: float
    samples: int  # global batch size


def steps_to_json(steps):
    """Return `Step`s as lists for a JSON file. As in `to_json`, nan and infinity are strings."""
    return [[x if math.isfinite(x) else repr(x) for x in step] for step in steps]


def steps_from_json(rows):
    return [Step(*(float(x) if isinstance(x, str) else x for x in row)) for row in rows]


class PendingStep:
    """An update that the device may still be computing. `read` waits for its numbers."""

    def __init__(self, numbers, loss_scale, samples):
        """numbers: the first six fields of `Step`, float64 [6] on the device. Start their copy to the host."""
        self.host_fields, self.step = (loss_scale, samples), None
        self.numbers = numbers.to("cpu", non_blocking=True)  # from a GPU: asynchronous, into pinned memory
        self.copied = torch.cuda.current_stream().record_event() if numbers.is_cuda else None

    def read(self):
        """Return the `Step`. The first call waits for the device; later calls return the same Step."""
        if self.step is None:
            if self.copied:
                self.copied.synchronize()
            loss, grad_norm, lr, *flags = self.numbers.tolist()
            self.step = Step(loss, grad_norm, lr, *(flag > 0 for flag in flags), *self.host_fields)
        return self.step


class Interval:
    """The steps between two log lines, and their time.

    earlier: the `Step`s of this interval that ran before the run was resumed.
    """

    def __init__(self, earlier=()):
        self.steps, self.earlier = [], list(earlier)  # steps: of PendingStep
        self.start = time.perf_counter()

    @contextmanager
    def paused(self):
        """Exclude the time of a `with` block from the interval, for example a save."""
        began = time.perf_counter()
        yield
        self.start += time.perf_counter() - began

    def read(self):
        """Return all `Step`s of the interval."""
        return [*self.earlier, *(step.read() for step in self.steps)]

    def row(self, iteration, consumed_samples, timers, data_wait_seconds):
        """Return the keyword arguments of `metrics_row`. data_wait_seconds: the wait for batches in the interval."""
        steps = [step.read() for step in self.steps]  # may wait for the device; `seconds` includes this wait
        return {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            "earlier": self.earlier,
            "steps": steps,
            "seconds": time.perf_counter() - self.start,
            "timers_ms": timers.take(len(steps)),
            "data_wait_ms": 1000 * data_wait_seconds / len(steps),
        }


def metrics_row(
    config, world, peak, *, iteration, consumed_samples, steps, seconds, timers_ms, data_wait_ms, earlier=(),
    validation_loss=None
):  # fmt: skip
    """Return the row of metrics.jsonl for one interval: a dict of numbers. mfu is "unknown" if `peak` is None.

    world: the number of devices. peak: TFLOP/s of one device, or None.
    iteration: the last iteration of the interval, counted from 1. consumed_samples: since training began.
    steps: the `Step`s of the interval. seconds: the duration of the interval. timers_ms: from `Timers.take`.
    data_wait_ms: the host's wait for its next batch, per iteration. earlier: steps of the interval before a resume.
    They count in lm_loss, skipped_iterations and nan_iterations, but not in times and speeds.
    """
    every, last = [*earlier, *steps], steps[-1]
    losses = [step.loss for step in every]
    samples = sum(step.samples for step in steps)
    per_device = 1 / seconds / world / 1e12
    tflops = model_flops(config, samples) * per_device
    row = {
        "iteration": iteration,
        "train_iters": config.train_iters,
        "consumed_samples": consumed_samples,
        "consumed_tokens": consumed_samples * config.seq_length,
        "lm_loss": sum(losses) / len(losses),
        "grad_norm": last.grad_norm,
        "lr": last.lr,
        "loss_scale": last.loss_scale,
        "global_batch_size": last.samples,
        "seq_length": config.seq_length,
        "skipped_iterations": sum(step.skipped for step in every),
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
    """Return Megatron-LM's line, with the same fields. Its TFLOPs include recomputation."""
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


def validation_lines(iteration, loss, split="val"):
    """Return three lines with the loss of a split (train, val, test) and its perplexity exp(loss).

    A model that always chooses among k equally likely tokens has perplexity k.
    """
    name = "validation" if split == "val" else split
    ppl = math.exp(min(loss, 20))  # Megatron-LM's bound: the exp of a diverged loss would overflow
    line = f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {ppl:.6E} | "
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def memory_line(iteration, megabytes):
    fields = " | ".join(f"{name}: {value}" for name, value in megabytes.items())
    return f"[Rank 0] (after {iteration} iterations) memory (MB) | {fields}"


def memory_in_use(device):
    """Return {name: MB of 2^20 bytes}: PyTorch's memory on a GPU, or the process's resident memory on a CPU."""
    if torch.device(device).type == "cuda":
        used = {
            "allocated": torch.cuda.memory_allocated(device),
            "max allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "max reserved": torch.cuda.max_memory_reserved(device),
        }
        return {name: count / 2**20 for name, count in used.items()}
    status = Path("/proc/self/status")
    if not status.exists():  # macOS has only the peak, in bytes
        return {"max resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    kilobytes = dict(re.findall(r"(Vm\w+):\s*(\d+) kB", status.read_text()))
    named = {"resident": "VmRSS", "max resident": "VmHWM"}
    return {name: int(kilobytes[key]) / 2**10 for name, key in named.items() if key in kilobytes}


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


def to_json(row):
    """Return a row as one line of JSON, with numbers at full precision.

    JSON has no nan or infinity. They become the strings "nan", "inf" and "-inf", which float() reads. We do not
    write null, because inf and nan would then look the same.
    """
    strange = {name: repr(v) for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps(row | strange, allow_nan=False)


def from_json(line):
    row = parse_json(line)
    return row | {name: float(v) for name, v in row.items() if v in ("nan", "inf", "-inf")}


def open_lines(path):
    """Return a file descriptor that appends to `path`. After a line that a crash cut off, begin a new line."""
    with explained(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
    return file


def write_line(file, line):
    """Append a line with one write: no reader sees half of the line, and a crash after the write does not lose it."""
    data = f"{line}\n".encode()
    try:
        while data:  # a write is partial if the disk is full: the next one raises the error
            data = data[os.write(file, data) :]
    except OSError as error:
        why = f"metrics.jsonl: {error.strerror}"
        raise UserError(f"{why}; the same command resumes from the latest checkpoint, if there is one") from None


def read_metrics(path):
    """Return {iteration: row} of a metrics.jsonl, in the order of iterations.

    A run that resumes from a checkpoint repeats iterations. A row of the resumed run replaces the earlier rows of
    the same iteration and of later iterations. A line that a crash cut off is skipped.
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
    """Prints and writes the log on rank 0. The other ranks only check that tensorboard and wandb are installed.

    device, dtype (bf16, fp16, fp32 or fp64): the device and the dtype of the computation.
    iteration: the last iteration of the checkpoint from which the run resumes, or 0.
    Lines go to stdout. A progress bar goes to stderr if it is a terminal.
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
        # purge_step: TensorBoard hides the points of an earlier run from this iteration on.
        self.board = tensorboard and tensorboard.SummaryWriter(config.tensorboard, purge_step=iteration + 1)
        self.run = wandb and wandb_run(wandb, config)
        # disable=None: no bar where stderr is not a terminal.
        self.bar = tqdm(total=config.train_iters, initial=iteration, dynamic_ncols=True, disable=None)

    def advance(self, iterations=1):
        """Move the bar by so many iterations."""
        if self.rank == 0:
            self.bar.update(iterations)

    def say(self, text):
        """Print `text` on rank 0, above the bar."""
        if self.rank == 0:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()  # if stdout is a file, it can be read during the run

    def log(self, **interval):
        """Write, print and return a row on rank 0, else None. interval: keyword arguments of `metrics_row`."""
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
    """Import `module` if the field has a value, otherwise return None. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(module) if value else None
    except ImportError:
        raise UserError(f"{field}={value}: {field} is not installed (pip install {field})") from None


def wandb_run(wandb, config):
    """Return the W&B run that receives the rows. After a crash, a restart continues this run. Raises UserError."""
    out = config.out_dir
    try:
        return wandb.init(project=config.wandb, name=Path(out).name, dir=out, config=asdict(config), resume="auto")
    except wandb.Error as error:  # not logged in, no network
        raise UserError(f"wandb={config.wandb}: {' '.join(str(error).split())}") from None


def scalars(row):
    """Return {name: number} of a row, for plots. Timers are named timers_ms/optimizer; an "unknown" mfu is left out."""
    timers = {f"timers_ms/{phase}": ms for phase, ms in row["timers_ms"].items()}
    return {name: value for name, value in row.items() if isinstance(value, int | float)} | timers
