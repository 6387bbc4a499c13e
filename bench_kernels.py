"""Every operation on its own: is it right, how many microseconds, how near to what the GPU can do at all.

    python bench.py kernels --only=gelu

An operation is drawn, checked and timed as the model has it: as many tokens, parameters whose gradients are float32,
forward and backward apart. Beside ours in Triton stand `reference.py` as it is and under torch.compile, and the one
fused operation that PyTorch itself has for the purpose, if it has one.

What is right is `reference.py` in float64 on the same inputs. The error allowed is what the tests allow, and no number
that happened to pass: twice the error that `reference.py` makes in the inputs' own dtype, and a rounding.

What is timed is the GPU, not Python. Before each measurement the GPU is kept spinning for two milliseconds, in which
the host queues what is to come, so that no kernel waits to be launched. The variants take turns, and each goes over
several copies of its inputs in a row, which together do not fit into the L2 cache: nothing is found there that a
training step would not find there.

The yardsticks are measured in the same run: bytes per second of a plain copy, read and write; FLOP/s of a large matrix
product. An operation's *floor* is what it must at least move, each byte once, or multiply; its share of the yardstick
says what is left to gain. The floors are derived in kernels.py and flash_attention.py, operation by operation.

Without a GPU the kernels run in Triton's interpreter, small: the same check, and the bytes that they move, counted.
"""

import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import reference
import train
from bench import print_table, spread
from config import Config
from errors import UserError
from parallel.mesh import Mesh
from parallel.tensor import CHUNK, LinearCrossEntropy
from reference import Drop

NO_GPU = "no GPU here: "
VERSIONS = f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


def compare(only, repeats, dtype, hidden, tokens, seq, vocab):
    """What `python bench.py kernels` does; the options are explained there."""
    if dtype not in ("bf16", "fp16", "fp32"):
        raise UserError(f"--dtype={dtype}: should be bf16, fp16 or fp32")
    if hidden % 64 or tokens % seq:
        raise UserError(f"--hidden={hidden} --tokens={tokens}: should be multiples of a head, 64, and of --seq={seq}")
    sizes = dict(n=tokens, h=hidden, s=seq, v=vocab)
    right = on_gpu(Gpu(), sizes, dtype, repeats, only) if torch.cuda.is_available() else interpreted(only)
    if not right:
        sys.exit(1)


# --- the machine ------------------------------------------------------------------------------------------------------

HEAD_START = 4_000_000  # clock cycles, about 2 ms: longer than the host takes to queue a measurement
L2 = 200 << 20  # bytes that are not in the cache any more when they are used again: 50 MB fit into an H200's


class Gpu:
    """What a measurement asks of the device. (Tests give it `Cpu`: the same path by the host's clock.)"""

    def __init__(self):
        self.device, self.name = torch.device("cuda"), torch.cuda.get_device_name()
        self.compile = functools.partial(torch.compile, dynamic=False)
        self.yardstick = 1 << 29, 8192  # bytes that are copied; rows and columns of the product

    def timed(self, call):
        """(microseconds that the GPU takes for what `call()` queues, what it returns)."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        start.record()
        result = call()
        stop.record()
        stop.synchronize()
        return 1000 * start.elapsed_time(stop), result

    def clean(self):
        """Give back what nobody holds any more: memory, and compiled code."""
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


class Cpu:
    def __init__(self):
        self.device, self.name = torch.device("cpu"), "CPU"
        self.compile = lambda function: function
        self.yardstick = 1 << 20, 64

    def timed(self, call):
        start = time.perf_counter()
        result = call()
        return 1e6 * (time.perf_counter() - start), result

    def clean(self):
        gc.collect()


def copy_rate(machine):
    """Bytes per second, read and written, of a plain copy."""
    size, _ = machine.yardstick
    pairs = [[torch.ones(size, dtype=torch.uint8, device=machine.device) for _ in range(2)] for _ in range(2)]
    runs = [machine.timed(lambda: [to.copy_(source) for to, source in pairs])[0] for _ in range(10)]
    return 2 * 2 * size / (statistics.median(runs) * 1e-6)


def product_rate(machine, dtype):
    """FLOP/s of a large matrix product."""
    _, n = machine.yardstick
    a, b = (torch.randn(n, n, device=machine.device).to(dtype) for _ in range(2))
    runs = [machine.timed(lambda: a @ b)[0] for _ in range(10)]
    return 2 * n**3 / (statistics.median(runs) * 1e-6)


# --- the operations ---------------------------------------------------------------------------------------------------


@dataclass
class Operation:
    """One row or two of the table.

    name: of the row; ops: of the function of reference.py that it is; draw(seed): its inputs; run(ops, *inputs): a
    call of it, with the functions of `kernels` or `reference`. floor: what forward and backward must move in bytes, or
    with `flops` multiply; one number if it is no function with a backward, but a step. elements: by which the bytes are
    counted. own {name: function(*inputs)}: PyTorch's; of these, `another` are not the same function, only near it.
    compiled(compile): `run` under torch.compile, where that is more than compiling `run`.
    """

    name: str
    ops: str
    draw: Callable
    run: Callable
    floor: tuple
    elements: int
    flops: bool = False
    own: dict = field(default_factory=dict)
    another: tuple = ()
    compiled: Callable | None = None

    @property
    def directions(self):
        return ("forward", "backward") if len(self.floor) == 2 else ("whole",)

    def inputs(self, seed):
        """Drawn; those that backward goes to want a gradient: of parameters (the vectors) in float32, as in training"""
        inputs = self.draw(seed)
        for x in inputs:
            if len(self.floor) == 2 and x.is_floating_point():
                x.requires_grad_()
                if x.ndim == 1:
                    x.grad_dtype = torch.float32
        return inputs


def operations(device, dtype, n, h, s, v):
    """All of them: n tokens in samples of s, h wide, heads of 64, v words."""
    item = dtype.itemsize

    def draw(*shapes):
        return lambda seed: randoms(device, dtype, seed, *shapes)

    def plain(name, *rest):
        """run of a function that takes its tensors, then `rest`"""
        return lambda ops, *inputs: getattr(ops, name)(*inputs, *rest)

    drop = Drop(torch.arange(n, device=device), 0.1, 1234, 1)
    x, wide, vector, mib = (n, h), (n, 4 * h), (h,), n * h * item
    own_dropout = {"F.dropout": lambda x: F.dropout(x, drop.rate)}
    return [
        Operation("layer_norm", "layer_norm", draw(x, vector, vector), plain("layer_norm"), (2 * mib, 3 * mib), n * h),
        Operation("add", "add", draw(x, x, vector), plain("add"), (3 * mib, mib), n * h),
        Operation(
            "add_layer_norm, nothing added", "add_layer_norm", draw(x, vector, vector),
            lambda ops, x, *norm: ops.add_layer_norm(x, None, None, *norm), (2 * mib, 4 * mib), n * h,
        ),
        Operation(
            "add_layer_norm", "add_layer_norm", draw(x, x, vector, vector, vector), plain("add_layer_norm"),
            (4 * mib, 4 * mib), n * h,
        ),
        Operation(
            "add_layer_norm, dropout", "add_layer_norm", draw(x, x, vector, vector, vector),
            plain("add_layer_norm", drop), (4 * mib, 5 * mib), n * h,
        ),
        Operation(
            "dropout", "dropout", draw(x), plain("dropout", drop), (2 * mib, 2 * mib), n * h,
            own=own_dropout, another=("F.dropout",),
        ),
        Operation("gelu", "gelu", draw(wide, (4 * h,)), plain("gelu"), (8 * mib, 12 * mib), 4 * n * h),
        *attentions(draw, plain, item, n, h, s),
        *losses(device, dtype, n, h, v),
        *updates(device, dtype, h),
    ]  # fmt: skip


def randoms(device, dtype, seed, *shapes):
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def attentions(draw, plain, item, n, h, s):
    """The masked softmax on its own (a few samples: 2 a s bytes a token), and attention: s^2 d a head and product."""
    b, a = n // s, h // 64
    scores = min(b, 4) * a * s * s
    products = b * a * s * s * 64

    def backend(which):
        def run(qkv):
            with sdpa_kernel(which):
                return reference.attention(qkv)

        return run

    return [
        Operation(
            "causal_softmax", "causal_softmax", draw((min(b, 4), a, s, s)), plain("causal_softmax", 0.125),
            (1.5 * scores * item, 2 * scores * item), scores,
            own={"softmax alone": lambda x: x.softmax(-1)}, another=("softmax alone",),
        ),
        Operation(
            "attention", "attention", draw((b, s, 3, a, 64)), plain("attention"), (2 * products, 5 * products),
            n * h, flops=True,
            own={"flash": backend(SDPBackend.FLASH_ATTENTION), "cudnn": backend(SDPBackend.CUDNN_ATTENTION)},
        ),
    ]  # fmt: skip


def losses(device, dtype, n, h, v):
    """The loss together with its gradient, of a chunk's logits; and with the products around it, of all tokens.

    The latter over all columns, padding included: PyTorch's own would have to cut a row to an odd length.
    """
    width, chunk, tp = -(-v // 128) * 128, min(n, CHUNK), Mesh().tp

    def draw_logits(seed):
        (z,) = randoms(device, dtype, seed, (chunk, width))
        z[:, v:] = -1e4  # so that it makes no difference whether padding takes part: PyTorch's knows of none
        return [z, draw_targets(seed, chunk)]

    def draw_targets(seed, count):
        return torch.randint(v, (count,), generator=torch.Generator(device).manual_seed(seed), device=device)

    def run(ops, z, targets):
        return ops.cross_entropy_(z, targets, v, 1 / chunk), z

    def own(z, targets):
        z = z.detach().requires_grad_()
        losses = F.cross_entropy(z, targets, reduction="none")
        return losses.detach(), *torch.autograd.grad(losses, z, torch.full_like(losses, 1 / chunk))

    def draw_head(seed):
        x, w = randoms(device, dtype, seed, (n, h), (width, h))
        return [x, w.mul_(0.02), draw_targets(seed, n)]

    def run_head(ops, x, w, targets):
        w = nn.Parameter(w)
        w.grad_dtype = torch.promote_types(w.dtype, torch.float32)
        w.grad, w.deferred = torch.zeros_like(w, dtype=w.grad_dtype), None
        x = x.detach().requires_grad_()
        loss = LinearCrossEntropy.apply(x, w, targets, width, 1 / n, "copy", tp, ops).mean()
        return loss.detach(), *torch.autograd.grad(loss, x), w.grad

    def whole(function):
        """Of a mean loss (x, w, targets): it and its gradients."""

        def run(x, w, targets):
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            loss = function(x, w, targets)
            return loss.detach(), *torch.autograd.grad(loss, (x, w))

        return run

    def compiled(compile):
        return whole(compile(lambda x, w, targets: F.cross_entropy((x @ w.T).float(), targets)))

    own_head = {}
    if hasattr(nn, "LinearCrossEntropyOptions"):  # from PyTorch 2.13 on
        options = dict(options=nn.LinearCrossEntropyOptions())
        own_head["F.linear_cross_entropy"] = whole(functools.partial(F.linear_cross_entropy, **options))
    item = dtype.itemsize
    return [
        Operation(
            "cross_entropy_", "cross_entropy_", draw_logits, run, (2 * chunk * width * item,), chunk * width,
            own={"F.cross_entropy": own},
        ),
        Operation(
            "linear + cross_entropy_", "cross_entropy_", draw_head, run_head, (6 * n * h * width,), n * width,
            flops=True, own=own_head, compiled=compiled,
        ),
    ]  # fmt: skip


def updates(device, dtype, h):
    """The end of a step, on a block's flat buffer: matrices, which decay, and after them vectors."""
    matrices, size = 12 * h * h, 12 * h * h + 13 * h
    ranges, options = [(0, matrices, True), (matrices, size, False)], dict(beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1)
    lr, scale = (torch.tensor(x, dtype=torch.float64, device=device) for x in (1e-3, 1.0))
    update, skip = torch.tensor(3, device=device), torch.tensor(False, device=device)
    numbers = reference.numbers(lr, scale, update, skip, options["beta1"], options["beta2"])
    cast = dtype != torch.float32  # else the weights are their own master weights

    def draw(seed):
        w, g, m, v = randoms(device, torch.float32, seed, *[(size,)] * 4)
        return [w, g, m, v.square_(), *([w.to(dtype)] if cast else [])]

    def run(ops, w, g, m, v, *out):
        ops.adamw(w, g, [m, v], numbers, ranges, out=out[0] if out else None, **options)
        return w, m, v, *out

    def draw_flats(seed):
        return randoms(device, torch.float32, seed, *[(size,)] * 4)

    return [
        Operation(
            "adamw", "adamw", draw, run, ((28 + cast * dtype.itemsize) * size,), size,
            own={"AdamW(fused=True)": OwnAdamW(ranges, lr.item(), options)},
        ),
        Operation(
            "squared_norms", "squared_norms", draw_flats, lambda ops, *flats: ops.squared_norms(flats),
            (4 * 4 * size,), 4 * size, own={"_foreach_norm": lambda *x: torch.stack(torch._foreach_norm(x)) ** 2},
        ),
    ]  # fmt: skip


class OwnAdamW:
    """torch.optim.AdamW on the same buffers: an optimizer for each copy of them, kept."""

    def __init__(self, ranges, lr, options):
        self.ranges, self.optimizers = ranges, {}
        self.options = dict(lr=lr, betas=(options["beta1"], options["beta2"]), eps=options["eps"], fused=True)
        self.decay = options["decay"]

    def __call__(self, w, g, m, v, *out):
        if w.data_ptr() not in self.optimizers:
            self.optimizers[w.data_ptr()] = self.make(w, g, m, v)
        self.optimizers[w.data_ptr()].step()
        for x in out:
            x.copy_(w)
        return w, m, v, *out

    def make(self, w, g, m, v):
        groups, states = [], {}
        for begin, end, decays in self.ranges:
            p = nn.Parameter(w[begin:end])
            p.grad = g[begin:end]
            step = torch.tensor(2.0, device=w.device)  # two updates were made
            states[p] = dict(step=step, exp_avg=m[begin:end], exp_avg_sq=v[begin:end])
            groups.append(dict(params=[p], weight_decay=self.decay * decays))
        optimizer = torch.optim.AdamW(groups, **self.options)
        optimizer.state.update(states)
        return optimizer


# --- right? -----------------------------------------------------------------------------------------------------------


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def passes(operation, function, inputs, seeds=None):
    """(function's outputs, their gradients' source `seeds`, and, in the same list, the gradients of its inputs)."""
    outputs = as_tuple(function(*inputs))
    if len(operation.floor) == 1:
        return [*outputs], None
    if seeds is None:
        seeds = [randoms(y.device, y.dtype, 90 + i, y.shape)[0] for i, y in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], seeds)
    return [*(y.detach() for y in outputs), *gradients], seeds


class Judge:
    """Knows the exact results of an operation on inputs(0), and how far `reference.py` is from them in their dtype."""

    def __init__(self, operation):
        self.operation = operation
        plain = functools.partial(operation.run, reference)
        results, self.seeds = passes(operation, plain, operation.inputs(0))
        wide = [x.detach().double() if x.is_floating_point() else x for x in operation.draw(0)]
        if self.seeds is not None:
            wide = [x.requires_grad_(x.is_floating_point()) for x in wide]
        self.exact, _ = passes(operation, plain, wide, self.seeds and [x.double() for x in self.seeds])
        self.of_plain = [relative_error(x, right) for x, right in zip(results, self.exact, strict=True)]

    def worst(self, results):
        """The largest of the results' errors, in units of what is allowed: right is what is at most 1."""
        shares = []
        for x, right, of_plain in zip(results, self.exact, self.of_plain, strict=True):
            rounding = torch.finfo(x.dtype).eps + 8 * torch.finfo(torch.float32).eps
            shares.append(relative_error(x, right) / (2 * of_plain + rounding))
        return max(shares, key=lambda share: float("inf") if share != share else share)

    def of(self, function):
        return self.worst(passes(self.operation, function, self.operation.inputs(0), self.seeds)[0])


def relative_error(x, right):
    """The largest error of an element, relative to the largest element."""
    return ((x.double() - right).abs().max() / (right.abs().max() + 1e-30)).item()


def judged(share):
    return f"{share:.2f}" if share <= 1 else f"WRONG: {share:.3g}"


# --- how fast? --------------------------------------------------------------------------------------------------------


def on_gpu(machine, sizes, dtype, repeats, only):
    """Prints the table, a row as soon as it is there, and what it means for kernels=auto. False: ours was wrong."""
    import kernels

    dtype_name, dtype = dtype, train.DTYPES[dtype]
    rates = {False: copy_rate(machine), True: product_rate(machine, dtype)}
    print(
        f"{machine.name}, {VERSIONS}, {dtype_name}; copy {rates[False] / 1e9:,.0f} GB/s, "
        f"product {rates[True] / 1e12:,.1f} TFLOP/s; " + ", ".join(f"{k} = {v}" for k, v in sizes.items())
    )
    print(
        f"microseconds, median (smallest-largest) of {repeats}; error: the largest, 1 is what is allowed "
        "(twice reference.py's in this dtype, and a rounding)"
    )
    print_row("", "", "error", "Triton", "rate", "share", "reference.py", "compiled", "", "PyTorch's own")
    machine.clean()
    totals, right = [], True
    for operation in operations(machine.device, dtype, **sizes):
        if only in operation.name:
            variants = variants_of(operation, kernels, machine)
            found = examine(machine, operation, variants, repeats)
            right &= found["Triton"].right
            for i, direction in enumerate(operation.directions):
                print_row(*cells(operation, i, direction, found, rates[operation.flops]))
            totals.append((operation, *(found[which].total() for which in ("Triton", "reference.py"))))
            del variants, found
        machine.clean()
    print(verdict(train.operations(Config(kernels="auto"), machine.device, dtype_name), totals))
    return right


def print_row(*cells):
    form = "{:<30}{:<9}{:>13}{:>28}{:>17}{:>6}{:>28}{:>28}{:>7}  {}"
    print(form.format(*cells), flush=True)


def variants_of(operation, kernels, machine):
    """{name: function(*inputs)}."""
    plain = functools.partial(operation.run, reference)
    return {
        "Triton": functools.partial(operation.run, kernels),
        "reference.py": plain,
        "compiled": operation.compiled(machine.compile) if operation.compiled else machine.compile(plain),
        **operation.own,
    }


@dataclass
class Found:
    """What was found out about one variant: its error; microseconds of a copy in each direction; or why it failed."""

    error: float | None = None
    times: list = field(default_factory=list)  # of tuples, one number per direction
    failure: str = ""

    @property
    def right(self):
        return not self.failure and self.error <= 1

    def median(self, i):
        return statistics.median(times[i] for times in self.times) if self.times else float("inf")

    def total(self):
        return sum(map(self.median, range(len(self.times[0])))) if self.times else float("inf")

    def cell(self, i):
        return spread([times[i] for times in self.times], "{:,.1f}") if self.times else self.failure


def what_went_wrong(error):
    """In one line: what fails is a cell of the table, and the others go on."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"[:300]


def examine(machine, operation, variants, repeats):
    """{variant: Found}: each checked, then timed in turns."""
    found = {}
    try:
        judge = Judge(operation)
        for name, function in variants.items():
            found[name] = checked(judge, function)
        del judge
    except Exception as error:  # without an exact result nothing is known to be right
        return {name: Found(failure=what_went_wrong(error)) for name in variants}
    gc.collect()
    copies = [operation.inputs(seed) for seed in range(number_of_copies(operation.inputs(0)))]
    seeds = None
    if len(operation.floor) == 2:
        shapes = as_tuple(operation.run(reference, *copies[0]))
        seeds = [randoms(y.device, y.dtype, 90 + i, y.shape)[0] for i, y in enumerate(shapes)]
        del shapes
    for i in range(repeats + 1):  # the first time does not count
        names = [name for name, what in found.items() if not what.failure]
        for name in names[i % len(names) :] + names[: i % len(names)] if names else []:
            try:
                times = timed(machine, variants[name], copies, seeds)
            except Exception as error:
                found[name] = Found(failure=what_went_wrong(error))
                continue
            found[name].times += [times] * (i > 0)
    return found


def checked(judge, function):
    try:
        return Found(judge.of(function) if function not in another(judge.operation) else 0.0)
    except Exception as error:
        return Found(failure=what_went_wrong(error))


def another(operation):
    return [operation.own[name] for name in operation.another]


def number_of_copies(inputs):
    """So many that what the first one had in the cache is gone when it is its turn again; two at least."""
    return max(2, -(-L2 // sum(x.nbytes for x in inputs)))


def timed(machine, function, copies, seeds):
    """Microseconds of a copy, (forward, backward) or, without seeds, (whole,): the mean of all copies in a row."""
    forward, outputs = machine.timed(lambda: [as_tuple(function(*inputs)) for inputs in copies])
    if seeds is None:
        return (forward / len(copies),)
    leaves = [[x for x in inputs if x.requires_grad] for inputs in copies]

    def backward():
        return [torch.autograd.grad(ys, xs, seeds) for ys, xs in zip(outputs, leaves, strict=True)]

    return forward / len(copies), machine.timed(backward)[0] / len(copies)


def cells(operation, i, direction, found, rate):
    """A row of the table; the ratio is the fastest of the others over ours: above 1 ours is faster."""
    ours, others = found["Triton"], [name for name in found if name != "Triton"]
    achieved = operation.floor[i] / (ours.median(i) * 1e-6)
    unit = f"{achieved / 1e12:,.1f} TFLOP/s" if operation.flops else f"{achieved / 1e9:,.0f} GB/s"
    best = min(found[name].median(i) for name in others if name not in operation.another)
    error = judged(ours.error) if ours.error is not None else ""
    remarks = [f"{name} {found[name].cell(i)}{note(operation, name, found[name])}" for name in operation.own]
    for name in ("Triton", "reference.py", "compiled"):  # whose cells are narrow
        if not found[name].right:
            remarks.append(f"{name}: {found[name].failure or 'error ' + judged(found[name].error)}")
    plain, compiled = (found[name].cell(i)[:26] for name in ("reference.py", "compiled"))
    ratio = f"x{best / ours.median(i):.2f}" if ours.times and best < float("inf") else ""
    known = (unit, f"{achieved / rate:.0%}") if ours.times else ("", "")
    return operation.name, direction, error, ours.cell(i)[:26], *known, plain, compiled, ratio, "; ".join(remarks)


def note(operation, name, what):
    """What has to be said about one of PyTorch's own besides its time."""
    if name in operation.another:
        return " (another function)"
    return "" if what.right or what.failure else f" (error {judged(what.error)})"


def verdict(auto, totals):
    """What kernels=auto takes of the two that it has the choice of, and where the measurement says otherwise."""
    chosen = {op.ops: "torch" if getattr(auto, op.ops, None) is getattr(reference, op.ops) else "triton"
              for op, *_ in totals if op.ops in reference.OPERATIONS}  # fmt: skip
    taken = {which: [name for name in chosen if chosen[name] == which] for which in ("triton", "torch")}
    lines = "; ".join(f"{which}: {', '.join(names) or 'nothing'}" for which, names in taken.items())
    otherwise = [
        f"{op.name} (Triton {ours:,.1f}, reference.py {plain:,.1f} us, forward and backward)"
        for op, ours, plain in totals
        if op.ops in chosen and (ours < plain) != (chosen[op.ops] == "triton")
    ]
    return f"\nkernels=auto takes {lines}\nmeasured otherwise: {'; '.join(otherwise) or 'nowhere'}"


# --- without a GPU ----------------------------------------------------------------------------------------------------


def interpreted(only):
    """The check under Triton's interpreter, and the bytes that kernels moved beside the floor. False: wrong."""
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks once, when it is imported
    try:
        import kernels
        import sanitizer
    except ImportError as error:
        print(f"{NO_GPU}and no interpreter of Triton either ({error}): nothing to check")
        return True
    sanitizer.install()
    print(NO_GPU + "checked under Triton's interpreter, in bf16, small; microseconds need one")
    rows, right = [], True
    for operation in operations(torch.device("cpu"), torch.bfloat16, n=64, h=128, s=32, v=500):
        if only not in operation.name:
            continue
        judge, inputs = Judge(operation), operation.inputs(0)
        moved = []
        with sanitizer.traffic() as forward:
            outputs = as_tuple(operation.run(kernels, *inputs))
        moved.append(forward)
        results = [y.detach() for y in outputs]
        if judge.seeds is not None:
            with sanitizer.traffic() as backward:
                results += torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], judge.seeds)
            moved.append(backward)
        share = judge.worst(results)
        right &= share <= 1
        for direction, floor, traffic in zip(operation.directions, operation.floor, moved, strict=True):
            measured = (traffic.loaded_unique + traffic.stored_unique) / operation.elements
            floor = "products" if operation.flops else f"{floor / operation.elements:.2f}"
            rows.append([operation.name, direction, floor, f"{measured:.2f}", judged(share)])
    print_table(["bytes per element", "", "floor", "moved", "error (1: allowed)"], rows)
    print("moved: each byte of a launch once, with vectors and partial sums, which count only at so small a size")
    return right
