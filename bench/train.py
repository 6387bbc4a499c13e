"""Measures a whole training step on one GPU, ours and plain PyTorch's, and profiles ours.

    python -m bench train --config=gpt2_345m --micro_batch_size=32

All contestants train the same GPT on the same batches, without dropout and recomputation:

    ours           bf16 with float32 master weights and gradients; with each choice of --kernels: kernels.py (triton),
                   reference.py (torch) or a mixture (auto)
    plain PyTorch  `Plain` of plain.py: float32 weights under torch.autocast(bf16), fused AdamW, clip_grad_norm_; eager,
                   and under torch.compile

An update follows each micro-batch; --micro_batches=8 changes that. Ids follow Zipf's law, as in text: with uniform ids
the embedding's gradient would have few duplicates and be too fast.

First, the losses of three steps must agree to 1%. (Plain PyTorch's softmax includes the vocabulary's padding, which
changes a loss by about 0.01%.) Then the contestants take turns. A turn's first step, which allocates memory, is not
timed. All models stay in memory: a contestant that is "out of memory" may fit without the others (--only=TEXT).

The last table is PyTorch's profile of our step, and the last line shows how long the GPU is idle. One more step runs in
a mode of PyTorch in which waiting for the GPU raises an error: the host must not wait within a step.

Without a GPU the same measurement runs on the CPU with a small model.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import config as configuration
import operations
import train
from accounts.devices import peak_tflops
from accounts.flops import model_flops
from bench.machine import NO_GPU, VERSIONS, Cpu, Gpu, what_went_wrong
from bench.plain import STEADY, Plain, loss_of, make_optimizer, samples
from bench.tables import print_table, ratios, spread
from errors import UserError
from log import PendingStep
from parallel.mesh import Mesh

BATCHES = 4  # different batches, used in a cycle
CHECKED = 3  # steps whose losses are compared
PROFILED = 3  # steps
SMALL = dict(  # the model without a GPU
    num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=512,
    max_position_embeddings=64,
)  # fmt: skip
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def measure(
    config: str = "gpt2_345m",
    micro_batch_size: int = 32,
    micro_batches: int = 1,
    steps: int = 10,
    repeats: int = 3,
    attention: str = "own",
    only: str = "",
):
    """Compare tokens per second of our step and plain PyTorch's, and profile ours kernel by kernel.

    --config             a file of configs/, without .py
    --micro_batch_size   samples of a micro-batch
    --micro_batches      micro-batches between two updates
    --steps              steps of a turn
    --repeats            turns of each contestant
    --attention          of plain PyTorch: own (PyTorch chooses), cudnn or flash
    --only               kernels=auto, and contestants whose name contains this text, such as eager
    """
    if attention not in ("own", *BACKENDS):
        raise UserError(f"--attention={attention}: should be own, cudnn or flash")
    gpu = torch.cuda.is_available()
    machine, c = Gpu() if gpu else Cpu(), load(config, micro_batch_size, micro_batches)
    if not gpu:
        print(NO_GPU + "the same measurement on the CPU, with a small model")
        c = dataclasses.replace(c, **SMALL, micro_batch_size=4, global_batch_size=4 * micro_batches)
    print(f"{machine.name}, {VERSIONS}, bf16", flush=True)
    with sdpa_kernel(BACKENDS[attention]) if attention in BACKENDS else contextlib.nullcontext():
        if not compare(machine, c, steps, repeats, only):
            sys.exit(1)


def load(name, size, micro_batches):
    """Return configs/NAME.py in bf16, without what bench/plain.py lacks. Print the changes."""
    c = configuration.load([str(Path(__file__).parents[1] / f"configs/{name}.py")])
    changes = dict(dtype="bf16", dropout=0.0, recompute="none", rampup_batch_size="")
    changed = [f", {k}={getattr(c, k)} -> {v}" for k, v in changes.items() if getattr(c, k) != v]
    print(f"configs/{name}.py, changed: a constant learning rate{''.join(changed)}")
    sizes = dict(micro_batch_size=size, global_batch_size=size * micro_batches)
    return dataclasses.replace(c, **changes, **sizes, **STEADY, lr_warmup_fraction=0.0)


def per_update(c):
    return c.global_batch_size // c.micro_batch_size


# --- the contestants --------------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """One way to train a model. step() returns the loss (a tensor or a PendingStep)."""

    name: str
    model: object  # OurModel or PlainModel; several contestants may share a model
    step: Callable
    choose: Callable = lambda: None  # sets the model's operations
    seconds: list = field(default_factory=list)  # per step
    failure: str = ""


class OurModel:
    def __init__(self, c, machine, batches):
        self.run = train.build_run(c, Mesh(), machine.device)
        self.run.zero.initialize(c.seed)
        self.units = self.run.zero.in_order
        self.initial = [unit.master.clone() for unit in self.units]
        self.micro_batches = [self.run.model.micro_batch(*batch) for batch in batches]

    def contestants(self, choices):
        for choice in choices:
            config = dataclasses.replace(self.run.config, kernels=choice)
            ops = operations.choose(config, self.run.device, self.run.dtype)
            yield Contestant(f"ours, kernels={choice}", self, self.step, functools.partial(self.use, ops))

    def use(self, ops):
        for part in (self.run.zero, *self.run.model.modules()):
            if hasattr(part, "ops"):
                part.ops = ops

    def step(self):
        return train.train_step(self.run, self.batches)

    @torch.no_grad()
    def restart(self):
        self.run.executor.activations.clear()
        self.run.executor.local.clear()
        self.batches = itertools.cycle(self.micro_batches)
        for unit, initial in zip(self.units, self.initial, strict=True):
            unit.master.copy_(initial)
            for moment in unit.moments:
                moment.zero_()
        self.run.zero.updates.zero_()
        self.run.zero.parameters_from_master()


class PlainModel:
    """`Plain`, trained as in PyTorch's tutorials. torch.compile gets the model with its loss."""

    def __init__(self, c, machine, batches):
        self.config, self.machine, self.micro_batches = c, machine, batches
        self.model = Plain(c, Mesh().tp).to(machine.device)
        self.model.units[0].positions = self.model.units[0].positions.to(machine.device)
        self.initial = [p.detach().clone() for p in self.model.parameters()]
        self.restart()

    def loss(self, ids, targets):
        return loss_of(self.model(ids).float(), targets)

    def contestants(self):
        for mode, loss in (("eager", self.loss), ("compiled", self.machine.compile(self.loss))):
            yield Contestant(f"plain PyTorch, {mode}", self, functools.partial(self.step, loss))

    def step(self, loss_of_batch):
        m, total = per_update(self.config), 0.0
        for _ in range(m):
            with torch.autocast(self.machine.device.type, torch.bfloat16):
                loss = loss_of_batch(*next(self.batches)) / m
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    @torch.no_grad()
    def restart(self):
        self.batches = itertools.cycle(self.micro_batches)
        for p, initial in zip(self.model.parameters(), self.initial, strict=True):
            p.copy_(initial)
            p.grad = None
        self.optimizer = make_optimizer(self.model, self.config)


def contestants_of(c, machine, batches, only=""):
    choices = ("auto", "triton", "torch") if machine.device.type == "cuda" else ("auto",)
    first_contestant, *others = OurModel(c, machine, batches).contestants(choices)
    others += PlainModel(c, machine, batches).contestants()
    return [first_contestant, *(who for who in others if only in who.name)]


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(machine, c, steps, repeats, only=""):
    """Return whether none of ours failed."""
    batches = batches_of(c, machine)
    contestants = contestants_of(c, machine, batches, only)
    check_same(machine, contestants)
    rounds(machine, contestants, steps, repeats)
    table(machine, c, contestants, steps, repeats)
    profile(machine, contestants[0])
    return not any(who.failure for who in contestants if isinstance(who.model, OurModel))


def batches_of(c, machine):
    """Return BATCHES micro-batches, [(ids [b, s], targets [b, s])]."""
    generator = torch.Generator().manual_seed(c.seed)
    shape = BATCHES, c.micro_batch_size, c.seq_length + 1
    law = 1 / torch.arange(1, c.vocab_size + 1, dtype=torch.float64)
    tokens = torch.multinomial(law, math.prod(shape), replacement=True, generator=generator)
    return samples(tokens.view(shape).to(machine.device))


def check_same(machine, contestants):
    """Print the first losses from the same weights. Raises UserError if they differ by more than 1%."""
    losses = {}
    for who in contestants:
        who.model.restart()
        who.choose()
        start = time.perf_counter()
        with surviving(machine, who):
            values = [value(who.step())]
            first = time.perf_counter() - start  # with all compilations
            values += [value(who.step()) for _ in range(CHECKED - 1)]
            losses[who.name] = values
            text = " ".join(f"{x:.4f}" for x in values)
            print(f"{who.name:<40} losses {text} (first step {first:.1f} s)", flush=True)
    first = next(iter(losses), None)
    for name, values in losses.items():
        if any(not abs(a - b) <= 0.01 * abs(b) for a, b in zip(values, losses[first], strict=True)):
            raise UserError(f"{name} and {first} do not train the same: losses {values} and {losses[first]}")


def value(loss):
    return loss.read().loss if isinstance(loss, PendingStep) else loss.item()


@contextlib.contextmanager
def surviving(machine, who):
    """Store an exception of one contestant for the table. The others continue."""
    try:
        yield
    except Exception as error:
        who.failure = what_went_wrong(error)
        print(f"{who.name:<40} {who.failure}", flush=True)
        who.model.restart()
    machine.give_back()


def rounds(machine, contestants, steps, repeats):
    """Run the contestants in turns, for their `seconds` and `failure`. The first turn warms up."""
    for i in range(repeats + 1):
        for who in contestants if i % 2 else reversed(contestants):
            if not who.failure:
                with surviving(machine, who):
                    seconds = turn(machine, who, steps if i else 1)
                    who.seconds += [seconds] * (i > 0)


def turn(machine, who, steps):
    """Return the seconds of one of `steps` steps."""
    who.choose()
    who.step()
    machine.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        who.step()
    machine.synchronize()
    return (time.perf_counter() - start) / steps


def table(machine, c, contestants, steps, repeats):
    """Print a row for each contestant. Its speed is also divided by the first one's, turn by turn."""
    peak, flops = peak_tflops(machine.name, c.dtype), model_flops(c, c.global_batch_size)
    tokens = c.global_batch_size * c.seq_length
    relative = f"MFU relative to {peak} TFLOP/s" if peak else f"{flops:.3g} FLOPs in a step"
    print(
        f"\nmicro-batch of {c.micro_batch_size} x {c.seq_length} tokens, {per_update(c)} in an update; {relative}; "
        f"median (smallest-largest) of {repeats} turns of {steps} steps"
    )
    rows, first = [], contestants[0].seconds
    for who in contestants:
        if who.failure:
            rows.append([who.name, who.failure.partition(":")[0], "", "", ""])
            continue
        milliseconds = spread([1000 * seconds for seconds in who.seconds], "{:.1f}")
        speed = spread([tokens / seconds for seconds in who.seconds], "{:,.0f}")
        rate = flops / statistics.median(who.seconds)
        mfu = f"{rate / (peak * 1e12):.1%}" if peak else f"{rate / 1e9:,.2f}"
        ratio = spread(ratios(first, who.seconds)) if first else ""
        rows.append([who.name, milliseconds, speed, mfu, ratio])
    unit = "MFU" if peak else "GFLOP/s"
    print_table(["", "ms per step", "tokens/s", unit, f"speed / {contestants[0].name}"], rows)


# --- the profile ------------------------------------------------------------------------------------------------------


def profile(machine, who):
    """Print the profile of a step. The step's time comes from a turn without the profiler."""
    if who.failure:
        return
    with surviving(machine, who):
        milliseconds = 1000 * turn(machine, who, 2 * PROFILED)
        on_gpu = isinstance(machine, Gpu)
        print(f"\na step of {who.name}{f': {waits(machine, who)}' if on_gpu else ''}")
        activity, column = machine.profiled
        machine.synchronize()
        with torch.profiler.profile(activities=[activity], acc_events=True) as record:
            for _ in range(PROFILED):
                who.step()
            machine.synchronize()
        averages = record.key_averages()
        print(averages.table(sort_by=f"self_{column}_time_total", row_limit=25, max_name_column_width=90))
        time_field = "self_device_time_total" if column == "cuda" else "self_cpu_time_total"
        kernels = [event for event in averages if not event.is_user_annotation]
        busy = sum(getattr(event, time_field) for event in kernels) / 1000 / PROFILED
        idle = max(0, 1 - busy / milliseconds)
        if on_gpu:
            print(f"kernels take {busy:.2f} ms of a step's {milliseconds:.2f} ms: the GPU is idle for {idle:.1%}")


def waits(machine, who):
    """Return whether the host waits for the device within a step."""
    try:
        with machine.no_waiting():
            who.step()
    except RuntimeError as error:
        who.model.restart()
        return f"the host waits for the GPU: {str(error).splitlines()[0]}"
    machine.synchronize()
    return "the host never waits for the GPU (set_sync_debug_mode('error') raises no error)"
