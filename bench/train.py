"""Measures a whole training step on one GPU, ours and plain PyTorch's, and profiles ours.

    python -m bench train --config=gpt2_345m --micro_batch_size=32

All contestants train the same GPT on the same batches, without dropout and recomputation. (A line lists what this
changes in the configuration.)

    ours                         bf16 with float32 master weights and float32 gradients (parallel/zero.py); with each
                                 choice of --kernels: kernels.py (triton), reference.py (torch) or a mixture (auto)
    plain PyTorch, autocast      `Plain` of plain.py, trained in the usual way: float32 weights under
                                 torch.autocast(bf16), fused AdamW, clip_grad_norm_; eager, and under torch.compile
    plain PyTorch, bf16 weights  the same with our numerics: bf16 weights and residual stream, float32 gradients and
                                 master weights

An update follows each micro-batch. It costs every contestant a few percent, which a real run with more micro-batches
does not pay; --micro_batches=8 measures that. Ids follow Zipf's law, as in text: id i has a probability proportional to
1 / (i + 1). With uniform ids the embedding's gradient would have few duplicates and be too fast. PyTorch chooses the
backend of plain PyTorch's attention; --attention=cudnn or flash forces one.

On an H200 we expect (not measured) at most a minute for each of two compilations and four minutes for the rest.
--only=TEXT leaves contestants out. First, a check compares the losses of three steps: they must agree to 1%. (Plain
PyTorch's softmax includes the vocabulary's padding, which changes a loss by about 0.01%.) Then the contestants take
turns in one process. The first step of a turn is not timed, because it allocates memory from the device again. The
table shows that step's extra memory plus the weights, gradients and moments. All models stay in memory during the
measurement. A contestant that is "out of memory" may fit without the others.

The last table profiles our step, kernel by kernel; `python -m bench kernels` has the floor of each kernel. The last
line shows how long the GPU is idle. A CUDA graph or a faster host could save this time. One more step runs in a mode of
PyTorch in which waiting for the GPU raises an error. This checks that the host never waits within a step.

Without a GPU the same measurement runs on the CPU with a small model.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import config as configuration
import operations
import train
from bench.machine import NO_GPU, VERSIONS, Cpu, Gpu, copy_rate, product_rate, products, what_went_wrong
from bench.plain import STEADY, Plain, loss_of, make_optimizer, samples
from bench.tables import print_table, ratios, spread
from errors import UserError
from log import PendingStep, model_flops, peak_tflops
from parallel.mesh import Mesh

BATCHES = 4  # different batches, used in a cycle
CHECKED = 3  # steps with a comparison of the losses
PROFILED = 3  # steps
ROWS = 25  # rows of the profile
GIB = 2**30
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
    --only               only contestants whose name contains this text, such as eager; kernels=auto always takes part
    """
    if attention not in ("own", *BACKENDS):
        raise UserError(f"--attention={attention}: should be own, cudnn or flash")
    gpu = torch.cuda.is_available()
    machine, c = Gpu() if gpu else Cpu(), load(config, micro_batch_size, micro_batches)
    if not gpu:
        print(NO_GPU + "the same measurement on the CPU, with a small model")
        c = dataclasses.replace(c, **SMALL, micro_batch_size=4, global_batch_size=4 * micro_batches)
    rates = products(product_rate(machine, torch.bfloat16))
    print(f"{machine.name}, {VERSIONS}, bf16; copy {copy_rate(machine) / 1e9:,.0f} GB/s, {rates}", flush=True)
    with sdpa_kernel(BACKENDS[attention]) if attention in BACKENDS else contextlib.nullcontext():
        right = compare(machine, c, steps, repeats, only)
    if not right:
        sys.exit(1)


def load(name, size, micro_batches):
    """Return configs/NAME.py in bf16, without the features that bench/plain.py does not have. Print the changes."""
    asked = configuration.load([str(Path(__file__).parents[1] / f"configs/{name}.py")])
    changes = dict(dtype="bf16", dropout=0.0, recompute="none", rampup_batch_size="")
    changed = [f", {k}={getattr(asked, k)} -> {v}" for k, v in changes.items() if getattr(asked, k) != v]
    print(f"configs/{name}.py, changed: a constant learning rate{''.join(changed)}")
    sizes = dict(micro_batch_size=size, global_batch_size=size * micro_batches)
    return dataclasses.replace(asked, **changes, **sizes, **STEADY, lr_warmup_fraction=0.0)


def per_update(c):
    return c.global_batch_size // c.micro_batch_size


# --- the contestants --------------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """One way to train a model. step() returns the loss (a tensor or a PendingStep). choose() sets its operations."""

    name: str
    model: object  # Ours or Theirs; several contestants may share a model
    step: Callable
    choose: Callable = lambda: None
    seconds: list = field(default_factory=list)  # per step
    bytes: int = 0
    failure: str = ""


class Ours:
    """Our model and its training state. The contestants that share it differ in the operations."""

    def __init__(self, c, machine, batches):
        self.run = train.build(c, Mesh(), machine.device)
        self.run.zero.initialize(c.seed)
        self.units = self.run.zero.buckets.values()
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
        self.batches = itertools.cycle(self.micro_batches)
        for unit, initial in zip(self.units, self.initial, strict=True):
            unit.master.copy_(initial)
            for moment in unit.moments:
                moment.zero_()
        self.run.zero.updates.zero_()
        self.run.zero.parameters_from_master()

    def forget(self):
        """Delete the activations of a step that failed."""
        self.run.executor.kept.clear()
        self.run.executor.local.clear()

    def tensors(self):
        for unit in self.units:
            yield from (unit.param, unit.grad, unit.master, *unit.moments)


class Theirs:
    """`Plain`, trained as in PyTorch's tutorials. torch.compile compiles the model together with its loss.

    dtype: of the weights. bf16 weights have float32 gradients and float32 master weights, which the optimizer updates.
    float32 weights are their own master weights and run under autocast.
    """

    def __init__(self, c, machine, batches, name, dtype):
        self.config, self.machine, self.name, self.model = c, machine, name, Plain(c, Mesh().tp).to(machine.device)
        self.model.units[0].positions = self.model.units[0].positions.to(machine.device)
        self.micro_batches = batches
        self.initial = [p.detach().clone() for p in self.model.parameters()]
        self.model.to(dtype)
        self.masters = self.weights = list(self.model.parameters())
        if dtype != torch.float32:
            self.masters = [nn.Parameter(p.clone()) for p in self.initial]
            for p in self.weights:
                p.grad_dtype = torch.float32
        self.restart()

    def loss(self, ids, targets):
        return loss_of(self.model(ids).float(), targets)

    def contestants(self):
        for mode, loss in (("eager", self.loss), ("compiled", self.machine.compile(self.loss))):
            yield Contestant(f"{self.name}, {mode}", self, functools.partial(self.step, loss))

    def step(self, loss_of_batch):
        mixed, m, losses = self.masters is self.weights, per_update(self.config), []
        for _ in range(m):
            with torch.autocast(self.machine.device.type, torch.bfloat16, enabled=mixed):
                losses.append(loss_of_batch(*next(self.batches)) / m)
            losses[-1].backward()
        if self.masters is not self.weights:
            for p, master in zip(self.weights, self.masters, strict=True):
                master.grad, p.grad = p.grad, None
        nn.utils.clip_grad_norm_(self.masters, self.config.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.cast()
        return sum(loss.detach() for loss in losses)

    @torch.no_grad()
    def cast(self):
        if self.masters is not self.weights:
            torch._foreach_copy_(self.weights, self.masters)

    @torch.no_grad()
    def restart(self):
        self.batches = itertools.cycle(self.micro_batches)
        for p, initial in zip(self.masters, self.initial, strict=True):
            p.copy_(initial)
        self.cast()
        self.optimizer = make_optimizer(nn.ParameterList(self.masters), self.config)

    def forget(self):
        for p in (*self.weights, *self.masters):
            p.grad = None

    def tensors(self):
        yield from (*self.weights, *self.masters)
        for state in self.optimizer.state.values():
            yield from (x for x in state.values() if torch.is_tensor(x))


def contestants_of(c, machine, batches, only=""):
    """Return the contestants: ours with kernels=auto, and those whose name contains `only`."""
    choices = ("auto", "triton", "torch") if machine.device.type == "cuda" else ("auto",)
    ours, *others = Ours(c, machine, batches).contestants(choices)
    for name, dtype in (("autocast", torch.float32), ("bf16 weights", torch.bfloat16)):
        others += Theirs(c, machine, batches, f"plain PyTorch, {name}", dtype).contestants()
    return [ours, *(who for who in others if only in who.name)]


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(machine, c, steps, repeats, only=""):
    """Print the check, the table and the profile. Return whether no contestant of ours failed."""
    batches = batches_of(c, machine)
    contestants = contestants_of(c, machine, batches, only)
    check_same(machine, contestants)
    rounds(machine, contestants, steps, repeats)
    table(machine, c, contestants, steps, repeats)
    profiled(machine, contestants[0])
    return not any(who.failure for who in contestants if isinstance(who.model, Ours))


def batches_of(c, machine):
    """Return BATCHES micro-batches, [(ids [b, s], targets [b, s])]. Ids follow Zipf's law."""
    generator = torch.Generator().manual_seed(c.seed)
    shape = BATCHES, c.micro_batch_size, c.seq_length + 1
    law = 1 / torch.arange(1, c.vocab_size + 1, dtype=torch.float64)
    tokens = torch.multinomial(law, math.prod(shape), replacement=True, generator=generator)
    return samples(tokens.view(shape).to(machine.device))


def check_same(machine, contestants):
    """Print the losses of the first steps from the same weights. Raises UserError if they differ by more than 1%."""
    losses = {}
    for who in contestants:
        who.model.restart()
        who.choose()
        start = time.perf_counter()
        with surviving(machine, who):
            seen = [value(who.step())]
            first = time.perf_counter() - start  # with all compilations
            seen += [value(who.step()) for _ in range(CHECKED - 1)]
            losses[who.name] = seen
            print(f"{who.name:<40} losses {' '.join(f'{x:.4f}' for x in seen)} (first step {first:.1f} s)", flush=True)
    first = next(iter(losses), None)
    for name, seen in losses.items():
        if any(not abs(a - b) <= 0.01 * abs(b) for a, b in zip(seen, losses[first], strict=True)):
            raise UserError(f"{name} and {first} do not train the same: losses {seen} and {losses[first]}")


def value(loss):
    return loss.read().loss if isinstance(loss, PendingStep) else loss.item()


@contextlib.contextmanager
def surviving(machine, who):
    """Store an exception of one contestant for its cell of the table. The others continue."""
    try:
        yield
    except Exception as error:
        who.failure = what_went_wrong(error)
        print(f"{who.name:<40} {who.failure}", flush=True)
        who.model.forget()
    machine.give_back()


def rounds(machine, contestants, steps, repeats):
    """Run the contestants in turns, and fill in their `seconds`, `bytes` and `failure`. The first turn warms up."""
    for i in range(repeats + 1):
        for who in contestants if i % 2 else reversed(contestants):
            if not who.failure:
                with surviving(machine, who):
                    seconds = turn(machine, who, steps if i else 1)
                    who.seconds += [seconds] * (i > 0)


def turn(machine, who, steps):
    """Run one step to measure the peak memory, then `steps` timed steps. Return the seconds of one."""
    who.choose()
    states = {x.data_ptr(): x.nbytes for x in who.model.tensors()}
    who.bytes = sum(states.values()) + machine.peak(who.step)
    machine.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        who.step()
    machine.synchronize()
    return (time.perf_counter() - start) / steps


def table(machine, c, contestants, steps, repeats):
    """Print a row for each contestant with the results of `rounds`."""
    peak, flops = peak_tflops(machine.name, c.dtype), model_flops(c, c.global_batch_size)
    tokens = c.global_batch_size * c.seq_length
    print(
        f"\nmicro-batch of {c.micro_batch_size} x {c.seq_length} tokens, {per_update(c)} in an update; MFU relative to "
        f"{peak or '?'} TFLOP/s; median (smallest-largest) of {repeats} turns of {steps} steps"
    )
    rows, first = [], contestants[0].seconds
    for who in contestants:
        if who.failure:
            rows.append([who.name, who.failure.partition(":")[0], "", "", "", ""])
            continue
        milliseconds = spread([1000 * seconds for seconds in who.seconds], "{:.1f}")
        speed = spread([tokens / seconds for seconds in who.seconds], "{:,.0f}")
        mfu = f"{flops / statistics.median(who.seconds) / (peak * 1e12):.1%}" if peak else "?"
        ratio = spread(ratios(first, who.seconds)) if first else ""
        rows.append([who.name, milliseconds, speed, mfu, f"{who.bytes / GIB:.1f}", ratio])
    print_table(["", "ms per step", "tokens/s", "MFU", "peak, GiB", f"speed / {contestants[0].name}"], rows)


# --- the profile ------------------------------------------------------------------------------------------------------


def profiled(machine, who):
    """Print the profile, the idle time and the waits of one contestant."""
    if not who.failure:
        with surviving(machine, who):
            seconds = turn(machine, who, 2 * PROFILED)
            print(f"\na step of {who.name}: {waits(machine, who)}")
            print_profile(profile(machine, who), seconds)


def waits(machine, who):
    """Return a message: whether the host waits for the device within a step."""
    try:
        with machine.no_waiting():
            who.step()
    except RuntimeError as error:
        who.model.forget()
        return f"the host waits for the GPU: {str(error).splitlines()[0]}"
    machine.synchronize()
    return "the host never waits for the GPU (set_sync_debug_mode('error') raises no error)"


def profile(machine, who):
    """Return [(name, start, end)] of all kernels of PROFILED steps, in microseconds."""
    activity, kind = machine.profiled
    machine.synchronize()
    with torch.profiler.profile(activities=[activity], acc_events=True) as record:
        for _ in range(PROFILED):
            who.step()
        machine.synchronize()
    events = [e for e in record.events() if e.device_type == kind and not e.is_user_annotation]
    return [(e.name, e.time_range.start, e.time_range.end) for e in events]


def print_profile(kernels, seconds):
    """Print the table. kernels: from `profile`. seconds: a step without profiler."""
    calls, total = defaultdict(int), defaultdict(float)
    for name, start, end in kernels:
        calls[name] += 1
        total[name] += (end - start) / 1000 / PROFILED
    whole, names = sum(total.values()), sorted(total, key=total.get, reverse=True)
    rows = [
        [short(name), f"{calls[name] / PROFILED:g}", f"{total[name]:.3f}", f"{total[name] / whole:.1%}"]
        for name in names[:ROWS]
    ]
    rest = sum(total[name] for name in names[ROWS:])
    rows.append([f"other ({len(names[ROWS:])} names)", "", f"{rest:.3f}", f"{rest / whole:.1%}"])
    print_table(["kernel", "calls", "ms", "share"], rows)
    busy, span = (x / 1000 / PROFILED for x in busy_and_span(kernels))
    print(
        f"the GPU works {busy:.2f} ms per step: idle {max(0, 1 - busy / span):.1%} of {span:.2f} ms with the profiler, "
        f"{max(0, 1 - busy / (1000 * seconds)):.1%} of {1000 * seconds:.2f} ms without the profiler"
    )


def busy_and_span(kernels):
    """Return microseconds with at least one running kernel, and microseconds from the first start to the last end."""
    busy, reached = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy, reached - min((start for _, start, _ in kernels), default=reached)


def short(name):
    """Return a C++ function's name without its common namespaces, at most 90 characters."""
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::|c10::|std::", "", name)
    return name if len(name) <= 90 else name[:87] + "..."
