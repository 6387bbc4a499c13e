"""Measures every operation: its error, its time, and its rate compared with a memory copy or a matrix product.

    python -m bench kernels --only=gelu

The inputs are as in the model: the tokens of one micro-batch, and parameters with float32 gradients. Each row compares
our Triton kernel with `reference.py` (eager and compiled; its adamw_ is PyTorch's fused AdamW), and attention with
PyTorch's fused kernels.

The exact result is `reference.py` in float64. The allowed error is that of the tests: twice the error of `reference.py`
in the inputs' dtype, plus one rounding.

The times are GPU times. The host queues the work while the GPU waits, so no kernel waits for its launch. The variants
take turns, on several copies of the inputs that together do not fit into the L2 cache.

An operation's *floor* is the least number of bytes that it must move, or of FLOP that it must compute. Its rate is
floor / time. A plain copy (bytes read and written per second) and large matrix products (FLOP/s) are measured too. If
the operation's rate is near theirs, a faster kernel gains little.

The rows "dW" time `reference.add_product_`, PyTorch's product added to float32, as Triton's. All rows may take more
than ten minutes, mainly for torch.compile.

Without a GPU the kernels run in Triton's interpreter at a small size. Then only the errors mean something.
"""

import functools
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import reference
from bench.machine import NO_GPU, VERSIONS, Cpu, Gpu, copy_rate, product_rate, what_went_wrong
from bench.tables import chosen, spread
from errors import UserError
from parallel.mesh import Mesh
from parallel.tensor import ROWS, LinearCrossEntropy
from reference import Drop

LARGE = dict(n=32768, h=1024, s=1024, v=50257)  # tokens, hidden size, tokens of a sample, vocabulary
SMALL = dict(n=16, h=64, s=16, v=200)  # without a GPU
ROW = "{:<30}{:<9}{:>13}{:>17}{:>6}  {}"


def measure(only: str = "", repeats: int = 20):
    """Check every operation. Compare its time with PyTorch's, and its rate with a memory copy or a matrix product.

    --only     only the operation of this name, or operations whose name contains this text
    --repeats  measurements of each variant
    """
    if importlib.util.find_spec("triton") is None:
        raise UserError("bench kernels: needs Triton: pip install triton")
    names = chosen([operation.name for operation in operations(torch.device("cpu"), **SMALL)], only)
    names = [only] if only in names else names
    if torch.cuda.is_available():
        right = compare(Gpu(), LARGE, repeats, names)
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # before the import of Triton
        from testing import sanitizer

        sanitizer.install()
        print(NO_GPU + "a check in Triton's interpreter at a small size; its times mean nothing")
        right = compare(Cpu(), SMALL, 1, names)
    if not right:
        sys.exit(1)


# --- the operations ---------------------------------------------------------------------------------------------------


@dataclass
class Operation:
    """One operation: one row of the table (whole) or two (forward, backward).

    draw(seed): returns its inputs. run(module, *inputs): calls the function of `kernels` or `reference`. floor: bytes
    (with `flops`: FLOP) of forward and backward, or one number without backward. rivals: {name: PyTorch's kernel}.
    """

    name: str
    draw: Callable
    run: Callable
    floor: tuple
    flops: bool = False
    rivals: dict = field(default_factory=dict)

    def inputs(self, seed, wide=False):
        """Return inputs with requires_grad, vectors with a float32 gradient. wide: all in float64."""
        inputs = [x.double() if wide and x.is_floating_point() else x for x in self.draw(seed)]
        for x in inputs:
            if len(self.floor) == 2 and x.is_floating_point():
                x.requires_grad_()
                if x.ndim == 1:
                    x.grad_dtype = torch.promote_types(x.dtype, torch.float32)
        return inputs


def operations(device, n, h, s, v):
    """Return all operations for n tokens, in samples of s."""
    drop = Drop(torch.arange(n, device=device), 0.1, 1234, 1)

    def simple(name, shapes, call, *passes):
        """passes: over a tensor of the first shape, in forward and in backward."""
        size = shapes[0][0] * shapes[0][1]
        draw = functools.partial(randoms, device, shapes=shapes)
        return Operation(name, draw, call, tuple(2 * count * size for count in passes))

    x, v1, wide = (n, h), (h,), [(n, 4 * h), (4 * h,)]
    norm = [x, x, v1, v1, v1]
    return [
        simple("add", [x, x, v1], lambda ops, *inputs: ops.add_(*inputs), 3, 1),
        simple(
            "add_layer_norm, nothing added", [x, v1, v1],
            lambda ops, x, *norm: ops.add_layer_norm_(None, x, None, *norm), 2, 4,
        ),
        simple("add_layer_norm", norm, lambda ops, *inputs: ops.add_layer_norm_(*inputs), 4, 4),
        simple("add_layer_norm, dropout", norm, lambda ops, *inputs: ops.add_layer_norm_(*inputs, drop), 4, 5),
        simple("add_rms_norm", [x, x, v1], lambda ops, *inputs: ops.add_rms_norm_(*inputs, 1e-5), 4, 4),
        simple("swiglu", [x, x], lambda ops, *inputs: ops.swiglu(*inputs), 3, 5),
        rotation(device, n, h, s),
        simple("dropout", [x], lambda ops, x: ops.dropout(x, drop), 2, 2),
        simple("gelu", wide, lambda ops, *inputs: ops.gelu_(*inputs), 2, 3),
        simple("relu", wide, lambda ops, *inputs: ops.relu_(*inputs), 2, 3),
        attention(device, n, h, s),
        simple("join", [x, x, x], lambda ops, *parts: ops.join(parts), 6),
        add_rows(device, n, h, v),
        loss_of_logits(device, min(n, ROWS), v),
        loss_of_head(device, n, h, v),
        weight_gradient(device, "proj", n, h, h),
        weight_gradient(device, "fc1", n, 4 * h, h),
        adamw(device, h),
    ]  # fmt: skip


def randoms(device, seed, shapes, dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def attention(device, n, h, s):
    """q, k and v are views of one tensor, as in the model, so their rows are not contiguous."""

    def backend(which):
        def run(qkv):
            with sdpa_kernel(which):
                return reference.attention(*qkv.unbind(2))

        return run

    product = n * s * h
    rivals = {"flash": backend(SDPBackend.FLASH_ATTENTION), "cudnn": backend(SDPBackend.CUDNN_ATTENTION)}
    draw = functools.partial(randoms, device, shapes=[(n // s, s, 3, h // 64, 64)])
    floor = 2 * product, 5 * product
    return Operation("attention", draw, lambda ops, qkv: ops.attention(*qkv.unbind(2)), floor, True, rivals)


def rotation(device, n, h, s):
    """Of queries that are a view of queries, keys and values: groups of 2 heads have one of each."""
    positions, d = torch.arange(s, device=device), min(64, h // 2)
    draw = functools.partial(randoms, device, shapes=[(n // s, s, h // (2 * d), 4, d)])
    floor = (4 * n * h,) * 2
    return Operation("rotate", draw, lambda ops, x: ops.rotate(x[..., :2, :], positions, 1e4), floor)


def padded(v):
    return -(-v // 128) * 128


def draw_targets(device, seed, count, v):
    return torch.randint(v, (count,), generator=torch.Generator(device).manual_seed(seed), device=device)


def loss_of_logits(device, n, v):
    """The loss of logits [n, width]. Their gradient overwrites them."""

    def draw(seed):
        return [*randoms(device, seed, [(n, padded(v))]), draw_targets(device, seed, n, v)]

    def run(ops, z, targets):
        weights = torch.full((n,), 1 / n, dtype=torch.promote_types(z.dtype, torch.float32), device=device)
        return ops.cross_entropy_(z, targets, v, weights), z

    return Operation("cross_entropy_", draw, run, (4 * n * padded(v),))


def loss_of_head(device, n, h, v):
    """The loss of all tokens from x [n, h] and word table w [width, h], and both gradients."""
    width = padded(v)

    def draw(seed):
        x, w = randoms(device, seed, [(n, h), (width, h)])
        return [x, w.mul_(0.02), draw_targets(device, seed, n, v)]

    def run(ops, x, w, targets):
        w, x = nn.Parameter(w), x.detach().requires_grad_()
        w.grad_dtype = torch.promote_types(w.dtype, torch.float32)
        w.grad = torch.zeros_like(w, dtype=w.grad_dtype)
        losses = LinearCrossEntropy.apply(x, w, targets, width, "copy", Mesh().tp, ops)
        dx = torch.autograd.grad(losses, x, torch.full_like(losses, 1 / n))  # fills `losses`, too
        return losses.detach().mean(), *dx, w.grad

    return Operation("linear + cross_entropy_", draw, run, (6 * n * h * width,), True)


def add_rows(device, n, h, v):
    """The gradient of a word table [v, h], float32, from n rows. Ids follow Zipf's law."""
    law = 1 / torch.arange(1, v + 1, dtype=torch.float64)
    law /= law.sum()

    def draw(seed):
        ids = torch.multinomial(law, n, replacement=True, generator=torch.Generator().manual_seed(seed))
        (table,) = randoms(device, seed, [(v, h)], torch.float32)
        return [table, ids.to(device), *randoms(device, seed + 1, [(n, h)])]

    def run(ops, table, ids, rows):
        ops.add_rows_(table, ids, rows)
        return table

    changed = (1 - (1 - law) ** n).sum().item()  # expected rows of the table that change
    return Operation("add_rows_", draw, run, (2 * n * h + 8 * changed * h,))


def weight_gradient(device, name, n, out, width):
    """dW [out, width] in float32 += dy^T [out, n] x [n, width]."""

    def draw(seed):
        gradient = randoms(device, seed, [(out, width)], torch.float32)
        return gradient + randoms(device, seed + 1, [(n, out), (n, width)])

    def run(ops, gradient, dy, x):
        if ops is reference:
            return gradient.add_(dy.T @ x)
        reference.add_product_(gradient, dy.T, x)
        return gradient

    return Operation(f"dW of {name}", draw, run, (2 * n * out * width,), True)


def adamw(device, h):
    """The update of a block's flat buffer, matrices (with weight decay) before vectors."""
    matrices, size = 12 * h * h, 12 * h * h + 13 * h
    ranges, betas = [(0, matrices, True), (matrices, size, False)], dict(beta1=0.9, beta2=0.95)
    numbers = (torch.tensor(x, device=device) for x in (1e-3, 1.0, 3, False))
    scalars = reference.update_scalars(*(x.double() if x.is_floating_point() else x for x in numbers), **betas)

    def draw(seed):
        w, g, m, v = randoms(device, seed, [(size,)] * 4, torch.float32)
        return [w, g, m, v.square_(), w.bfloat16()]

    def run(ops, w, g, m, v, out):
        ops.adamw_(w, g, [m, v], scalars, ranges, decay=0.1, eps=1e-8, out=out, **betas)
        return w, m, v, out

    return Operation("adamw", draw, run, (30 * size,))


# --- right? -----------------------------------------------------------------------------------------------------------


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def gradients_of(outputs):
    """Return a random gradient of each output, in numbers of bf16."""
    return [randoms(y.device, 90 + i, [y.shape])[0].to(y.dtype) for i, y in enumerate(outputs)]


def results(operation, function, inputs):
    outputs = as_tuple(function(*inputs))
    if len(operation.floor) == 1:
        return outputs
    leaves = [x for x in inputs if x.requires_grad]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, gradients_of(outputs))]


class Judge:
    """The exact results of an operation, and the errors of `reference.py` in the inputs' dtype."""

    def __init__(self, operation):
        self.operation, plain = operation, functools.partial(operation.run, reference)
        self.exact = results(operation, plain, operation.inputs(0, wide=True))
        self.of_plain = self.errors(results(operation, plain, operation.inputs(0)))

    def errors(self, outputs):
        """Return the largest error of each result, relative to the largest exact element."""
        pairs = zip(outputs, self.exact, strict=True)
        errors = [(x.double() - right).abs().max() / (right.abs().max() + 1e-30) for x, right in pairs]
        return torch.stack(errors).cpu()

    def worst(self, function):
        """Return the largest error / the allowed error."""
        outputs = results(self.operation, function, self.operation.inputs(0))
        sums = 8 * torch.finfo(torch.float32).eps
        rounding = torch.tensor([torch.finfo(x.dtype).eps + sums for x in outputs])
        return (self.errors(outputs) / (2 * self.of_plain + rounding)).max().item()


def judged(share):
    return f"{share:.2f}" if share <= 1 else f"WRONG: {share:.3g}"


# --- how fast? --------------------------------------------------------------------------------------------------------


def compare(machine, sizes, repeats, names):
    """Print the rows of the operations `names`. Return whether every Triton kernel is right."""
    import kernels

    rates = {False: copy_rate(machine), True: product_rate(machine, torch.bfloat16)}
    print(
        f"{machine.name}, {VERSIONS}, bf16; copy {rates[False] / 1e9:,.0f} GB/s, product {rates[True] / 1e12:,.1f} "
        f"TFLOP/s; {', '.join(f'{k} = {v}' for k, v in sizes.items())}\n"
        f"microseconds: median (smallest-largest) of {repeats}; error: the largest error / the allowed error"
    )
    print(ROW.format("", "", "error", "rate", "share", "microseconds"))
    right = True
    for operation in operations(machine.device, **sizes):
        if operation.name not in names:
            continue
        torch._dynamo.reset()  # deletes compiled code
        machine.give_back()
        plain = functools.partial(operation.run, reference)
        variants = {"Triton": functools.partial(operation.run, kernels), "reference.py": plain}
        variants |= {"compiled": machine.compile(plain)} | operation.rivals
        measurements = examine(machine, operation, variants, repeats)
        for i in range(len(operation.floor)):
            print(ROW.format(*cells(operation, i, measurements, rates[operation.flops])), flush=True)
        right &= measurements["Triton"].right
    return right


@dataclass
class Measurement:
    """A variant's error, times (microseconds for one copy of the inputs), or failure."""

    error: float = float("nan")
    times: list = field(default_factory=list)  # per repeat, a tuple of one number per direction
    failure: str = ""

    @property
    def right(self):
        return not self.failure and self.error <= 1

    def median(self, i):
        return statistics.median(times[i] for times in self.times) if self.times else float("inf")

    def cell(self, i):
        times = self.failure or spread([times[i] for times in self.times], "{:,.1f}")
        return times if self.failure or self.right else f"{times} (error {judged(self.error)})"


def examine(machine, operation, variants, repeats):
    """Check each variant, then time them in turns."""
    measurements = {name: Measurement() for name in variants}

    def try_each(measure_one):
        for name, what in measurements.items():
            if not what.failure:
                try:
                    measure_one(variants[name], what)
                except Exception as error:  # the others go on
                    what.failure, what.times = what_went_wrong(error), []

    judge = Judge(operation)
    try_each(lambda function, what: setattr(what, "error", judge.worst(function)))
    count = max(2, -(-machine.cache // sum(x.nbytes for x in operation.inputs(0))))
    copies = [operation.inputs(seed) for seed in range(count)]
    try_each(lambda function, what: timed(machine, operation, function, copies))  # a warm-up
    for _ in range(repeats):
        try_each(lambda function, what: what.times.append(timed(machine, operation, function, copies)))
    return measurements


def timed(machine, operation, function, copies):
    """Return mean microseconds per copy: (forward, backward), or (whole,)."""
    forward, outputs = machine.timed(lambda: [as_tuple(function(*inputs)) for inputs in copies])
    if len(operation.floor) == 1:
        return (forward / len(copies),)
    leaves = [[x for x in inputs if x.requires_grad] for inputs in copies]
    gradients = gradients_of(outputs[0])

    def backward():
        return [torch.autograd.grad(ys, xs, gradients) for ys, xs in zip(outputs, leaves, strict=True)]

    return forward / len(copies), machine.timed(backward)[0] / len(copies)


def cells(operation, i, measurements, rate):
    triton = measurements["Triton"]
    achieved = operation.floor[i] / (triton.median(i) * 1e-6)
    unit = f"{achieved / 1e12:,.1f} TFLOP/s" if operation.flops else f"{achieved / 1e9:,.0f} GB/s"
    direction = ("forward", "backward")[i] if len(operation.floor) == 2 else "whole"
    times = "; ".join(f"{name} {what.cell(i)}" for name, what in measurements.items())
    return operation.name, direction, judged(triton.error), unit, f"{achieved / rate:.0%}", times
