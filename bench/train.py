"""Measures a whole training step on one GPU: ours, plain PyTorch's and Hugging Face's, and a profile of ours.

    python -m bench train --configs=gpt2_345m_fast --micro_batch_sizes=32

All contestants train the same GPT on the same batches, without dropout and recomputation. (A line lists what this
changes in the configuration.)

    ours                         bf16 with float32 master weights and float32 gradients (parallel/zero.py); with each
                                 choice of --kernels: kernels.py (triton), reference.py (torch) or a mixture (auto)
    plain PyTorch, autocast      `Plain` of plain.py, trained in the usual way: float32 weights under
                                 torch.autocast(bf16), fused AdamW, clip_grad_norm_; eager, and under torch.compile
    plain PyTorch, bf16 weights  the same with our numerics: bf16 weights and residual stream, float32 gradients and
                                 master weights
    Hugging Face, autocast       transformers' GPT-2 with attn_implementation="sdpa", under torch.compile; only if
                                 transformers is installed

An update follows each micro-batch. It costs every contestant a few percent, which a real run with more micro-batches
does not pay; --micro_batches=8 measures that. Ids follow Zipf's law, as in text: id i has a probability proportional to
1 / (i + 1). With uniform ids the embedding's gradient would have few duplicates and be too fast. PyTorch chooses the
backend of plain PyTorch's attention, and a line names it; --attention=cudnn or flash forces one.

A run should take one configuration and one micro-batch size. On an H200 we expect (not measured) at most a minute for
each of three compilations and four minutes for the rest. --only=TEXT leaves contestants out. Each result is printed as
soon as it is known: losses, the time of each turn, tables. First, a check compares the losses of three steps: our
losses and plain PyTorch's must agree to 1%. (Plain PyTorch's softmax includes the vocabulary's padding, which changes a
loss by about 0.01%. Hugging Face's model is not checked, because it starts from other weights.) Then the contestants
take turns in one process. The first step of a turn is not timed, because it allocates memory from the device again. The
table shows that step's extra memory plus the weights, gradients and moments. All models stay in memory during the
measurement. A line above the table shows their size. A contestant that is "out of memory" may fit without the others.

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
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import config as configuration
import operations
import train
from bench.machine import NO_GPU, VERSIONS, Cpu, Gpu, copy_rate, product_rate, products, what_went_wrong
from bench.model import load, own_floors, per_update, print_model
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


def measure(
    configs: str = "gpt2_345m_fast",
    micro_batch_sizes: str = "32",
    micro_batches: int = 1,
    steps: int = 10,
    repeats: int = 3,
    attention: str = "own",
    only: str = "",
):
    """Compare tokens per second of our step, plain PyTorch's and Hugging Face's, and profile ours kernel by kernel.

    --configs             files of configs/, without .py
    --micro_batch_sizes   samples of a micro-batch
    --micro_batches       micro-batches between two updates
    --steps               steps of a turn
    --repeats             turns of each contestant
    --attention           of the others: own (PyTorch chooses), cudnn or flash
    --only                only contestants whose name contains one of these texts, such as kernels=auto+compiled; the
                          first one always takes part
    """
    try:
        sizes = [int(size) for size in micro_batch_sizes.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise UserError(f"--micro_batch_sizes={micro_batch_sizes}: should be like 8,16,32")
    if attention not in ("own", "cudnn", "flash"):
        raise UserError(f"--attention={attention}: should be own, cudnn or flash")
    loaded = {name: load(name, micro_batches) for name in configs.split(",")}
    if not torch.cuda.is_available():
        print(NO_GPU + "only the paper model of a step, and a comparison with plain PyTorch at a small size")
        for name, c in loaded.items():
            print_model(name, c, sizes[0], "h200")
        toy(steps, repeats, micro_batches, only)
        return
    machine = Gpu()
    copy = copy_rate(machine)
    rate = products(product_rate(machine, torch.bfloat16))
    print(f"{machine.name}, {VERSIONS}, bf16; copy {copy / 1e9:,.0f} GB/s, {rate}")
    forced = dict(cudnn=SDPBackend.CUDNN_ATTENTION, flash=SDPBackend.FLASH_ATTENTION).get(attention)
    failed = False
    for name, c in loaded.items():
        with sdpa_kernel(forced) if forced else contextlib.nullcontext():
            print(f"\n{name}: the others' attention is {backend(c, machine.device)}", flush=True)
            choices = "auto", "triton", "torch"
            failed = on_gpu(machine, c, sizes, steps, repeats, choices, copy, only) or failed
        machine.forget_compiled()
    if failed:
        sys.exit(1)


def backend(c, device):
    """Return the name of the backend that PyTorch chooses for attention, or a message if it has none."""
    shape, dtype = (1, c.num_attention_heads, c.seq_length, c.head_size), operations.DTYPES[c.dtype]
    q = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    try:
        return SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, True)).name
    except RuntimeError as error:
        return what_went_wrong(error)


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
        c, size = self.run.config, len(batches[0][0])
        c.global_batch_size, c.micro_batch_size = per_update(c) * size, size
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

    modes: some of "eager" and "compiled". torch.compile compiles the model together with its loss. dtype: of the
    weights. bf16 weights have float32 gradients and float32 master weights, which the optimizer updates. float32
    weights are their own master weights and run under autocast.
    """

    def __init__(self, c, machine, model, name, modes, logits=lambda output: output, dtype=torch.float32):
        def loss(ids, targets):
            return loss_of(logits(model(ids)).float(), targets)

        self.config, self.machine, self.name, self.model = c, machine, name, model.to(machine.device)
        self.modes = {mode: machine.compile(loss) if mode == "compiled" else loss for mode in modes}
        self.initial = [p.detach().clone() for p in self.model.parameters()]
        self.model.to(dtype)
        self.masters = self.weights = list(self.model.parameters())
        if dtype != torch.float32:
            self.masters = [nn.Parameter(p.clone()) for p in self.initial]
            for p in self.weights:
                p.grad_dtype = torch.float32
        self.restart()

    def contestants(self):
        for mode, loss_of_batch in self.modes.items():
            yield Contestant(f"{self.name}, {mode}", self, functools.partial(self.step, loss_of_batch))

    def take(self, batches):
        self.batches = itertools.cycle(batches)

    def step(self, loss_of_batch):
        mixed, m, losses = self.config.dtype == "bf16" and self.masters is self.weights, per_update(self.config), []
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
        for p, initial in zip(self.masters, self.initial, strict=True):
            p.copy_(initial)
        self.cast()
        self.optimizer = make_optimizer(nn.ParameterList(self.masters), self.config)

    def forget(self):
        for p in (*self.weights, *self.masters):
            p.grad = None

    def tensors(self):
        yield from {id(p): p for p in (*self.weights, *self.masters)}.values()
        for state in self.optimizer.state.values():
            yield from (x for x in state.values() if torch.is_tensor(x))


def plain(c, machine, name, modes, dtype=torch.float32):
    model = Plain(c, Mesh().tp)
    model.units[0].positions = model.units[0].positions.to(machine.device)
    return Theirs(c, machine, model, name, modes, dtype=dtype)


def hugging_face(c, machine, name, modes):
    """Return GPT-2 of the transformers library with the shape of c, as a variant. Raises ImportError without it."""
    if not importlib.util.find_spec("transformers"):
        raise ImportError("transformers is not installed")
    from transformers import AutoModelForCausalLM, GPT2Config

    shape = GPT2Config(
        vocab_size=c.padded_vocab_size, n_positions=c.positions, n_embd=c.hidden_size, n_layer=c.num_layers,
        n_head=c.num_attention_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").float().train()
    return Theirs(c, machine, model, name, modes, lambda output: output.logits)


OTHERS = {  # name: (function that makes it, its modes)
    "plain PyTorch, autocast": (plain, ("eager", "compiled")),
    "plain PyTorch, bf16 weights": (functools.partial(plain, dtype=torch.bfloat16), ("eager", "compiled")),
    "Hugging Face, autocast": (hugging_face, ("compiled",)),
}


def contestants_of(c, machine, choices, only, modes=("eager", "compiled")):
    """Return the contestants: ours with each of `choices`, then the others in these modes. only: as in `measure`."""

    def chosen(name):
        return any(text in name for text in only.split("+"))

    ours = list(Ours(c, machine).contestants(choices))
    found = [ours[0], *(who for who in ours[1:] if chosen(who.name))]
    for name, (make, its_modes) in OTHERS.items():
        its_modes = [mode for mode in its_modes if mode in modes and chosen(f"{name}, {mode}")]
        if its_modes and (c.dtype == "bf16" or "bf16" not in name):
            try:
                found += make(dataclasses.replace(c), machine, name, its_modes).contestants()
            except ImportError as error:
                print(f"no comparison with {name}: {error}")
            except Exception as error:  # an unknown version of transformers may fail anywhere
                print(f"no comparison with {name}: {what_went_wrong(error)}")
    return found


# --- the comparison ---------------------------------------------------------------------------------------------------


def on_gpu(machine, c, sizes, steps, repeats, choices, copy, only=""):
    """Print the check of one configuration, a table for each micro-batch size, and the profile.

    Return True if a contestant of ours failed.
    """
    contestants, failed = contestants_of(c, machine, choices, only), False
    check_same(machine, contestants, batches_of(c, sizes[0], machine))
    resident = {id(who.model): state_bytes(who.model) for who in contestants}
    print(f"the states of all models, which stay in memory: {sum(resident.values()) / GIB:.1f} GiB")
    for size in sizes:
        rounds(machine, contestants, batches_of(c, size, machine), steps, repeats)
        table(machine, c, contestants, size, steps, repeats)
        failed |= any(who.failure for who in contestants if isinstance(who.model, Ours))
    profiled(machine, c, contestants[0], sizes, copy)
    return failed


def batches_of(c, size, machine):
    """Return BATCHES micro-batches of `size` samples, [(ids [b, s], targets [b, s])]. Ids follow Zipf's law."""
    generator = torch.Generator().manual_seed(c.seed)
    shape = BATCHES, size, c.seq_length + 1
    law = 1 / torch.arange(1, c.vocab_size + 1, dtype=torch.float64)
    tokens = torch.multinomial(law, math.prod(shape), replacement=True, generator=generator)
    return samples(tokens.view(shape).to(machine.device))


def check_same(machine, contestants, batches):
    """Print the losses of the first steps from the same weights. Raises UserError if they differ by more than 1%."""
    losses = {}
    for who in contestants:
        who.model.restart()
        who.model.take(batches)
        who.choose()
        seen, start = [], time.perf_counter()
        with surviving(who):
            seen = [value(who.step())]
            first = time.perf_counter() - start  # with all compilations
            seen += [value(who.step()) for _ in range(CHECKED - 1)]
        result = " ".join(f"{x:.4f}" for x in seen) + f" (first step {first:.1f} s)" if seen else who.failure
        print(f"{who.name + ':':<40} losses {result}", flush=True)
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
                    print(f"turn {i}: {who.name:<40} {1000 * who.seconds[-1]:.1f} ms", flush=True)
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
    m, peak = per_update(c), peak_tflops(machine.name, c.dtype)
    tokens = m * size * c.seq_length
    print(
        f"\nmicro-batch of {size} x {c.seq_length} tokens, {m} in an update, "
        f"{model_flops(c, 1) / c.seq_length / 1e9:.3f} GFLOP a token; "
        f"MFU relative to {peak or '?'} TFLOP/s; median (smallest-largest) of {repeats} turns of {steps} steps"
    )
    rows, first = [], contestants[0].seconds
    for who in contestants:
        if who.failure:
            rows.append([who.name, who.failure.partition(":")[0], "", "", "", ""])
            continue
        speed = [tokens / seconds for seconds in who.seconds]
        mfu = [model_flops(c, m * size) / seconds / (peak * 1e12) for seconds in who.seconds] if peak else None
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
            print_profile(kernels, own_floors(c, per_update(c) * size * c.seq_length), copy, who.seconds[0])
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


# --- without a GPU ----------------------------------------------------------------------------------------------------


def toy(steps, repeats, micro_batches, only):
    """Run the comparison on a CPU at a small size, without torch.compile."""
    sizes = dict(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=512)
    c = configuration.Config(**sizes, dtype="bf16", micro_batch_size=1, global_batch_size=micro_batches, **STEADY)
    machine = Cpu()
    contestants = contestants_of(c, machine, ["torch"], only, modes=["eager"])
    batches = batches_of(c, 4, machine)
    print()
    check_same(machine, contestants, batches)
    rounds(machine, contestants, batches, steps, repeats)
    table(machine, c, contestants, 4, steps, repeats)
