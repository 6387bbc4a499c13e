"""Measures a whole training step on one GPU: ours, plain PyTorch's and Hugging Face's, and a profile of ours.

    python -m bench train --configs=gpt2_345m --micro_batch_sizes=8

All contestants train the same GPT on the same batches, with one update per micro-batch, no dropout, no recomputation:

    ours                bf16 with float32 master weights (parallel/zero.py); with each choice of --kernels:
                        kernels.py (triton), reference.py (torch) or a mixture of both (auto)
    plain PyTorch       `Plain` of plain.py, trained in the usual way: float32 weights under torch.autocast(bf16),
                        fused AdamW, clip_grad_norm_; eager, and under torch.compile
    Hugging Face        transformers' GPT-2 with attn_implementation="sdpa", trained the same way, under torch.compile;
                        only if transformers is installed

A run takes minutes, mainly for torch.compile. Each table is printed as soon as it is measured. First, a check compares
the losses of three steps: our losses and plain PyTorch's must agree to 1%. (Plain PyTorch's softmax includes the
vocabulary's padding, which changes a loss by about 0.01%. Hugging Face's model is not checked, because it starts from
other weights.) Then the contestants take turns in one process. The first step of a turn is not timed, because it
allocates memory from the device again. The table shows that step's extra memory plus the weights, gradients and
moments. All models stay in memory during the measurement. A line above the table shows their size. A contestant that
is "out of memory" may fit without the others.

The last table profiles our step, kernel by kernel. For each of our own kernels it shows the floor: the time of a plain
copy of the bytes that the kernel must move. Matrix products have no floor in this table. The last line shows how long
the GPU is idle. A CUDA graph or a faster host could save this time. One more step runs in a mode of PyTorch in which
waiting for the GPU raises an error. This checks that the host never waits within a step.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import config as configuration
import operations
import train
from bench.machine import NO_GPU, VERSIONS, Cpu, Gpu, copy_rate, what_went_wrong
from bench.plain import STEADY, Plain, loss_of, make_optimizer, samples
from bench.tables import print_table, ratios, spread
from errors import UserError
from log import PendingStep, model_flops, peak_tflops
from model import GPT
from parallel.mesh import Mesh

BATCHES = 4  # different batches, used in a cycle
CHECKED = 3  # steps with a comparison of the losses
PROFILED = 3  # steps
ROWS = 25  # rows of the profile
GIB = 2**30


def measure(
    configs: str = "gpt2_124m,gpt2_345m", micro_batch_sizes: str = "8,16,32", steps: int = 10, repeats: int = 3
):
    """Compare tokens per second of our step, plain PyTorch's and Hugging Face's, and profile ours kernel by kernel.

    --configs             files of configs/, without .py
    --micro_batch_sizes   samples of a step
    --steps               steps of a turn
    --repeats             turns of each contestant
    """
    try:
        sizes = [int(size) for size in micro_batch_sizes.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise UserError(f"--micro_batch_sizes={micro_batch_sizes}: should be like 8,16,32")
    loaded = {name: load(name) for name in configs.split(",")}
    if not torch.cuda.is_available():
        print(NO_GPU + "only a computed least time of a step, and a comparison with plain PyTorch at a small size")
        floors(loaded, sizes[0])
        toy(steps=5, repeats=repeats)
        return
    machine = Gpu()
    copy = copy_rate(machine)
    print(f"{machine.name}, {VERSIONS}, bf16; copy {copy / 1e9:,.0f} GB/s")
    for name, c in loaded.items():
        print(f"\n{name}")
        on_gpu(machine, c, sizes, steps, repeats, ("auto", "triton", "torch"), copy)
        machine.forget_compiled()


def load(name):
    """Return the configuration in bf16, without the features that plain PyTorch lacks."""
    c = configuration.load([str(Path(__file__).parents[1] / f"configs/{name}.py")])
    return dataclasses.replace(
        c, dtype="bf16", dropout=0.0, recompute="none", lr_warmup_fraction=0.0, rampup_batch_size="", **STEADY
    )


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

    def __init__(self, c, machine):
        self.run = train.build(c, Mesh(), machine.device)
        self.run.zero.initialize(c.seed)
        self.units = self.run.zero.buckets.values()
        self.initial = [unit.master.clone() for unit in self.units]

    def contestants(self, choices):
        for choice in choices:
            config = dataclasses.replace(self.run.config, kernels=choice)
            ops = operations.choose(config, self.run.device, self.run.dtype)
            yield Contestant(f"ours, kernels={choice}", self, self.step, functools.partial(self.use, ops))

    def use(self, ops):
        for part in (self.run.zero, *self.run.model.modules()):
            if hasattr(part, "ops"):
                part.ops = ops

    def take(self, batches):
        c = self.run.config
        c.micro_batch_size = c.global_batch_size = len(batches[0][0])
        self.batches = itertools.cycle([self.run.model.micro_batch(*batch) for batch in batches])

    def step(self):
        return train.train_step(self.run, self.batches)

    @torch.no_grad()
    def restart(self):
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
            yield from {x.data_ptr(): x for x in (unit.param, unit.grad, unit.master, *unit.moments)}.values()


class Theirs:
    """A model in plain PyTorch, ids [b, s] -> logits(model(ids)) [b, s, v], trained as in PyTorch's tutorials.

    modes: some of "eager" and "compiled". torch.compile compiles the model together with its loss.
    """

    def __init__(self, c, machine, model, name, modes, logits=lambda output: output):
        def loss(ids, targets):
            return loss_of(logits(model(ids)), targets)

        self.config, self.machine, self.name, self.model = c, machine, name, model.to(machine.device)
        self.modes = {mode: machine.compile(loss) if mode == "compiled" else loss for mode in modes}
        self.initial = [p.detach().clone() for p in self.model.parameters()]
        self.restart()

    def contestants(self):
        for mode, loss_of_batch in self.modes.items():
            yield Contestant(f"{self.name}, {mode}", self, functools.partial(self.step, loss_of_batch))

    def take(self, batches):
        self.batches = itertools.cycle(batches)

    def step(self, loss_of_batch):
        batch = next(self.batches)
        mixed = self.config.dtype == "bf16"
        with torch.autocast(self.machine.device.type, torch.bfloat16, enabled=mixed):
            loss = loss_of_batch(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(list(self.model.parameters()), self.config.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def restart(self):
        for p, initial in zip(self.model.parameters(), self.initial, strict=True):
            p.copy_(initial)
        self.optimizer = make_optimizer(self.model, self.config)

    def forget(self):
        self.optimizer.zero_grad()

    def tensors(self):
        yield from self.model.parameters()
        for state in self.optimizer.state.values():
            yield from (x for x in state.values() if torch.is_tensor(x))


def plain(c, machine):
    model = Plain(c, Mesh().tp)
    model.units[0].positions = model.units[0].positions.to(machine.device)
    return Theirs(c, machine, model, "plain PyTorch", ("eager", "compiled"))


def hugging_face(c, machine):
    from transformers import AutoModelForCausalLM, GPT2Config

    shape = GPT2Config(
        vocab_size=c.padded_vocab_size, n_positions=c.positions, n_embd=c.hidden_size, n_layer=c.num_layers,
        n_head=c.num_attention_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").float().train()
    return Theirs(c, machine, model, "Hugging Face", ("compiled",), lambda output: output.logits)


# --- the comparison ---------------------------------------------------------------------------------------------------


def on_gpu(machine, c, sizes, steps, repeats, choices, copy):
    """Print the check of one configuration, a table for each micro-batch size, and the profile."""
    ours = Ours(c, machine)
    contestants = [*ours.contestants(choices), *plain(dataclasses.replace(c), machine).contestants()]
    if importlib.util.find_spec("transformers"):
        try:
            contestants += hugging_face(dataclasses.replace(c), machine).contestants()
        except Exception as error:  # an unknown version of transformers may fail anywhere
            print(f"no comparison with Hugging Face: {what_went_wrong(error)}")
    else:
        print("no comparison with Hugging Face: transformers is not installed")
    check_same(machine, contestants, batches_of(c, sizes[0], machine))
    resident = {id(who.model): state_bytes(who.model) for who in contestants}
    print(f"the states of all models, which stay in memory: {sum(resident.values()) / GIB:.1f} GiB")
    for size in sizes:
        rounds(machine, contestants, batches_of(c, size, machine), steps, repeats)
        table(machine, c, contestants, size, steps, repeats)
    profiled(machine, c, contestants[0], sizes, copy)


def batches_of(c, size, machine):
    """Return BATCHES random micro-batches of `size` samples: [(ids [b, s], targets [b, s])]."""
    generator = torch.Generator().manual_seed(c.seed)
    tokens = torch.randint(c.vocab_size, (BATCHES, size, c.seq_length + 1), generator=generator).to(machine.device)
    return samples(tokens)


def check_same(machine, contestants, batches):
    """Print the losses of the first steps from the same weights. Raises UserError if they differ by more than 1%."""
    losses = {}
    for who in contestants:
        who.model.restart()
        who.model.take(batches)
        who.choose()
        seen = []
        with surviving(who):
            seen = [value(who.step()) for _ in range(CHECKED)]
        print(f"{who.name + ':':<24} losses " + (" ".join(f"{x:.4f}" for x in seen) or who.failure), flush=True)
        if seen and not who.name.startswith("Hugging Face"):
            losses[who.name] = seen
        machine.give_back()
    for model in {id(who.model): who.model for who in contestants}.values():
        model.initial = None  # the initial weights are not needed again
    if not losses:
        raise UserError(f"micro-batch {len(batches[0][0])}: all contestants failed; use a smaller micro-batch")
    first = next(iter(losses))
    for name, seen in losses.items():
        if any(not abs(a - b) <= 0.01 * abs(b) for a, b in zip(seen, losses[first], strict=True)):
            raise UserError(f"{name} and {first} do not train the same: losses {seen} and {losses[first]}")


def value(loss):
    return loss.read().loss if isinstance(loss, PendingStep) else loss.item()


@contextlib.contextmanager
def surviving(who):
    """Store an exception of one contestant for its cell of the table. The others continue."""
    try:
        yield
    except Exception as error:
        who.failure = what_went_wrong(error)
    if who.failure:
        who.model.forget()


def state_bytes(model):
    return sum(x.nbytes for x in model.tensors())


def rounds(machine, contestants, batches, steps, repeats):
    """Run the contestants in turns, and fill in their `seconds`, `bytes` and `failure`. The first turn warms up."""
    for who in contestants:
        who.seconds, who.bytes, who.failure = [], 0, ""
    for i in range(repeats + 1):
        for who in contestants if i % 2 else reversed(contestants):
            if not who.failure:
                with surviving(who):
                    who.model.take(batches)
                    turn(machine, who, steps if i else 1)
                machine.give_back()
        if i == 0:
            for who in contestants:
                who.seconds = []


def turn(machine, who, steps):
    """Run one turn of a contestant: one step to measure the peak memory, then `steps` timed steps."""
    who.choose()
    peak = machine.peak(who.step)
    who.bytes = state_bytes(who.model) + peak
    machine.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        who.step()
    machine.synchronize()
    who.seconds.append((time.perf_counter() - start) / steps)


def table(machine, c, contestants, size, steps, repeats):
    """Print a row for each contestant with the results of `rounds`, for micro-batches of `size` samples."""
    tokens, peak = size * c.seq_length, peak_tflops(machine.name, c.dtype)
    print(
        f"\nmicro-batch of {size} x {c.seq_length} tokens, {model_flops(c, 1) / c.seq_length / 1e9:.3f} GFLOP a token; "
        f"MFU relative to {peak or '?'} TFLOP/s; median (smallest-largest) of {repeats} turns of {steps} steps"
    )
    rows, first = [], contestants[0].seconds
    for who in contestants:
        if who.failure:
            rows.append([who.name, who.failure.partition(":")[0], "", "", "", ""])
            continue
        speed = [tokens / seconds for seconds in who.seconds]
        mfu = [model_flops(c, size) / seconds / (peak * 1e12) for seconds in who.seconds] if peak else None
        ratio = spread(ratios(first, who.seconds)) if first else ""
        milliseconds = spread([1000 * seconds for seconds in who.seconds], "{:.1f}")
        mfu = f"{statistics.median(mfu):.1%}" if mfu else "?"
        rows.append([who.name, milliseconds, spread(speed, "{:,.0f}"), mfu, f"{who.bytes / GIB:.1f}", ratio])
    print_table(["", "ms per step", "tokens/s", "MFU", "peak, GiB", f"speed / {contestants[0].name}"], rows)
    for who in contestants:
        if ":" in who.failure:
            print(f"{who.name} {who.failure}", flush=True)


# --- the profile ------------------------------------------------------------------------------------------------------


def profiled(machine, c, who, sizes, copy):
    """Print the profile, the idle time and the waits of one contestant, at the largest micro-batch that fits."""
    for size in sorted(sizes, reverse=True):
        who.failure = ""
        with surviving(who):
            who.model.take(batches_of(c, size, machine))
            who.seconds = []
            turn(machine, who, 2 * PROFILED)
            message = waits(machine, who)
            kernels = profile(machine, who)
        machine.give_back()
        if not who.failure:
            print(f"\na step of {who.name}, micro-batch {size}: {message}")
            print_profile(kernels, own_floors(c, size * c.seq_length), copy, who.seconds[0])
            return
        print(f"\nno profile of {who.name}, micro-batch {size}: {who.failure}")


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


def print_profile(kernels, floors, copy, seconds):
    """Print the table. kernels: from `profile`. floors: {kernel: bytes per step}. seconds: a step without profiler."""
    calls, total = defaultdict(int), defaultdict(float)
    for name, start, end in kernels:
        calls[name] += 1
        total[name] += (end - start) / 1000 / PROFILED
    busy, span = (x / 1000 / PROFILED for x in busy_and_span(kernels))
    whole, names = sum(total.values()), sorted(total, key=total.get, reverse=True)
    rows = []
    for name in names[:ROWS]:
        floor = floors.get(name, 0) / copy * 1000
        cells = f"{floor:.3f}" if floor else "", f"{floor / total[name]:.0%}" if floor else ""
        rows.append([short(name), *counted(calls[name]), f"{total[name]:.3f}", f"{total[name] / whole:.1%}", *cells])
    rest = names[ROWS:]
    if rest:
        time = sum(total[name] for name in rest)
        count = counted(sum(calls[name] for name in rest))
        rows.append([f"other ({len(rest)} names)", *count, f"{time:.3f}", f"{time / whole:.1%}", "", ""])
    print_table(["kernel", "calls", "ms", "share", "floor, ms", "floor / time"], rows)
    print(
        f"the GPU works {busy:.2f} ms per step: idle {max(0, 1 - busy / span):.1%} of {span:.2f} ms with the profiler, "
        f"{max(0, 1 - busy / (1000 * seconds)):.1%} of {1000 * seconds:.2f} ms without the profiler"
    )


def counted(calls):
    return [f"{calls / PROFILED:g}" if calls % PROFILED == 0 else f"{calls / PROFILED:.1f}"]


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


def own_floors(c, tokens):
    """Return {our kernel: bytes that it must move in a step}. kernels.py and flash_attention.py derive the numbers."""
    h, L, item = c.hidden_size, c.num_layers, train.DTYPES[c.dtype].itemsize
    x = tokens * h * item  # bytes of an activation [tokens, h]
    parameters = GPT(c, Mesh().tp).num_parameters()
    return {
        "residual_forward": x * (L * (2 + 4 + 3) + 2),  # passes over x: norm 2, add and norm 4, add 3; head: norm 2
        "residual_backward": x * (L * (4 + 4 + 1) + 3),
        "activation_forward": x * L * 4 * 2,
        "activation_backward": x * L * 4 * 3,
        "attention_forward": x * L * 4,
        "attention_delta": x * L * 2,
        "attention_backward_keys": x * L * 6,
        "attention_backward_queries": x * L * 6,
        "cross_entropy_whole": tokens * c.padded_vocab_size * 2 * item,
        "adamw_flat": parameters * (28 + (item if c.dtype != "fp32" else 0)),
        "squared_norm": parameters * 4,
    }


# --- without a GPU ----------------------------------------------------------------------------------------------------

DATA_SHEET = {"H100 SXM": (3.35, 989), "H200 SXM": (4.8, 989)}  # TB/s of memory, TFLOP/s in bf16


def floors(configs, size):
    """Print the least time of a step of `size` samples: matrix products at the peak rate, then our kernels' bytes."""
    rows = []
    for name, c in configs.items():
        moved = own_floors(c, size * c.seq_length)
        bytes = sum(moved[kernel] for kernel in moved if not kernel.startswith("attention"))
        update = moved["adamw_flat"] + moved["squared_norm"]
        for gpu, (bandwidth, peak) in DATA_SHEET.items():
            milliseconds = model_flops(c, size) / peak / 1e9, bytes / bandwidth / 1e9
            speed = size * c.seq_length / sum(milliseconds) * 1000
            rows.append(
                [f"{name}, {gpu}", f"{GPT(c, Mesh().tp).num_parameters():,}",
                 f"{model_flops(c, 1) / c.seq_length / 1e9:.3f}", f"{update / 1e9:.2f}", f"{bytes / 1e9:.1f}",
                 *(f"{x:.1f}" for x in milliseconds), f"{speed:,.0f}"]
            )  # fmt: skip
    head = ["", "parameters", "GFLOP/token", "update, GB", "kernels, GB", "products, ms", "kernels, ms", "tokens/s"]
    print(f"floors of a step of {size} samples, at the data sheet's peaks; no program reaches the last column")
    print_table(head, rows)


def toy(steps, repeats):
    """Run the comparison on a CPU, in float32 at a small size."""
    c = configuration.Config(
        num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=512, dtype="fp32", **STEADY
    )
    machine = Cpu()
    contestants = [*Ours(c, machine).contestants(["torch"]), *plain(dataclasses.replace(c), machine).contestants()]
    contestants = [who for who in contestants if not who.name.endswith("compiled")]
    batches = batches_of(c, 4, machine)
    print()
    check_same(machine, contestants, batches)
    rounds(machine, contestants, batches, steps, repeats)
    table(machine, c, contestants, 4, steps, repeats)
