"""Measures every operation: its error, its time, and its rate compared with a memory copy or a matrix product.

    python -m bench kernels --only=gelu

The inputs are as in the model: the tokens of one micro-batch, and parameters with float32 gradients. Forward and
backward are timed separately. Each row compares our Triton kernel with `reference.py` (eager and under torch.compile)
and with PyTorch's own fused operation, if one exists.

The exact result is `reference.py` in float64 on the same inputs. The allowed error is the same as in the tests: twice
the error of `reference.py` in the inputs' own dtype, plus one rounding.

The times are GPU times. Before each measurement the GPU waits for two milliseconds. Meanwhile the host queues the work,
so no kernel waits for its launch. The variants take turns. Each variant processes several copies of its inputs, which
together do not fit into the L2 cache. So the inputs are not in the cache, as in a training step.

Each run also measures a plain copy (bytes read and written per second) and large matrix products (FLOP/s). The products
run for a whole second, because a busy GPU lowers its clock rate. An operation's *floor* is the least number of bytes
that it must move, or of FLOP that it must compute. The operation's rate is floor / time. If this rate is near the rate
of the copy or the product, a faster kernel gains little. The comments in kernels.py and flash_attention.py derive the
floors.

The rows "dW" measure `tensor.add_product`, which adds a weight's gradient to float32 with PyTorch's own product. Its
time stands in the column of our kernels. Each row is printed as soon as it is measured. All rows together may take more
than ten minutes, mainly for torch.compile. With --only=NAME a run should take one or two minutes.

Without a GPU the kernels run in Triton's interpreter at a small size. The measurement then checks the
errors and counts the moved bytes.
"""

import functools
import gc
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import reference
import train
from bench.machine import NO_GPU, VERSIONS, Gpu, copy_rate, product_rate, products, what_went_wrong
from bench.tables import print_row, print_table, spread
from config import Config
from errors import UserError
from operations import choose
from parallel.mesh import Mesh
from parallel.tensor import ROWS, LinearCrossEntropy, add_product
from reference import Drop

L2 = 200 << 20  # bytes of all copies of the inputs: more than the L2 cache, which has 50 MB on an H200
SMALL = dict(n=64, h=128, s=32, v=500)  # sizes without a GPU
ROW = "{:<30}{:<9}{:>13}{:>28}{:>17}{:>6}{:>28}{:>28}{:>7}  {}"


def measure(
    only: str = "",
    repeats: int = 20,
    dtype: str = "bf16",
    hidden: int = 1024,
    tokens: int = 32768,
    seq: int = 1024,
    vocab: int = 50257,
):
    """Check every operation. Compare its time with PyTorch's, and its rate with a memory copy or a matrix product.

    --only                      measure only the operation of this name, or operations whose name contains this text
    --repeats                   number of measurements of each variant; the variants take turns
    --dtype                     dtype of the activations: bf16, fp16, fp32
    --hidden, --tokens, --seq, --vocab   hidden size; tokens of a micro-batch; tokens of a sample; vocabulary
    """
    if dtype not in ("bf16", "fp16", "fp32"):
        raise UserError(f"--dtype={dtype}: should be bf16, fp16 or fp32")
    if hidden % 64 or tokens % seq:
        raise UserError(f"--hidden={hidden}: should be a multiple of 64 (a head), and --tokens={tokens} of --seq={seq}")
    names = [operation.name for operation in operations(torch.device("cpu"), torch.bfloat16, **SMALL)]
    if not any(only in name for name in names):
        raise UserError(f"--only={only}: no operation has this text in its name; the names are {', '.join(names)}")
    sizes = dict(n=tokens, h=hidden, s=seq, v=vocab)
    right = on_gpu(Gpu(), sizes, dtype, repeats, only) if torch.cuda.is_available() else interpreted(only)
    if not right:
        sys.exit(1)


# --- the operations ---------------------------------------------------------------------------------------------------


@dataclass
class Operation:
    """One operation, which is one row of the table (whole) or two (forward, backward).

    name: the row's name. ops: the function's name in reference.py. draw(seed): returns its inputs. run(module,
    *inputs): calls that function of `kernels` or `reference`. floor: the bytes that forward and backward must move, or
    with `flops` the FLOP; one number for an operation without backward. elements: moved bytes are printed divided by
    this number. own {name: function(*inputs)}: PyTorch's own variants. another: names in `own` that compute something
    else. compiled(compile): returns the compiled variant, if compiling `run` is not enough. remark: printed in its row.
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
    remark: str = ""

    @property
    def directions(self):
        return ("forward", "backward") if len(self.floor) == 2 else ("whole",)

    def inputs(self, seed):
        """Return inputs with requires_grad. A parameter (a vector) has a float32 gradient, as in training."""
        inputs = self.draw(seed)
        for x in inputs:
            if len(self.floor) == 2 and x.is_floating_point():
                x.requires_grad_()
                if x.ndim == 1:
                    x.grad_dtype = torch.float32
        return inputs


def operations(device, dtype, n, h, s, v):
    """Return all operations for n tokens, in samples of s tokens. Heads have size 64."""
    item = dtype.itemsize

    def draw(*shapes):
        return lambda seed: randoms(device, dtype, seed, *shapes)

    def plain(name, *rest):
        """Return a `run` that calls function `name` with the arguments (*inputs, *rest)."""
        return lambda ops, *inputs: getattr(ops, name)(*inputs, *rest)

    drop = Drop(torch.arange(n, device=device), 0.1, 1234, 1)
    x, wide, vector, mib = (n, h), (n, 4 * h), (h,), n * h * item
    own_dropout = {"F.dropout": lambda x: F.dropout(x, drop.rate)}
    return [
        Operation("layer_norm", "layer_norm", draw(x, vector, vector), plain("layer_norm"), (2 * mib, 3 * mib), n * h),
        Operation("add", "add_", draw(x, x, vector), plain("add_"), (3 * mib, mib), n * h),
        Operation(
            "add_layer_norm, nothing added", "add_layer_norm_", draw(x, vector, vector),
            lambda ops, x, *norm: ops.add_layer_norm_(None, x, None, *norm), (2 * mib, 4 * mib), n * h,
        ),
        Operation(
            "add_layer_norm", "add_layer_norm_", draw(x, x, vector, vector, vector), plain("add_layer_norm_"),
            (4 * mib, 4 * mib), n * h,
        ),
        Operation(
            "add_layer_norm, dropout", "add_layer_norm_", draw(x, x, vector, vector, vector),
            plain("add_layer_norm_", drop), (4 * mib, 5 * mib), n * h,
        ),
        Operation(
            "dropout", "dropout", draw(x), plain("dropout", drop), (2 * mib, 2 * mib), n * h,
            own=own_dropout, another=("F.dropout",),
        ),
        Operation("gelu", "gelu_", draw(wide, (4 * h,)), plain("gelu_"), (8 * mib, 12 * mib), 4 * n * h),
        Operation("relu", "relu_", draw(wide, (4 * h,)), plain("relu_"), (8 * mib, 12 * mib), 4 * n * h),
        *attentions(draw, plain, item, n, h, s),
        Operation("join", "join", draw(x, x, x), lambda ops, *parts: ops.join(parts), (6 * mib,), 3 * n * h),
        add_rows(device, dtype, n, h, v),
        *losses(device, dtype, n, h, v),
        *(weight_gradient(device, dtype, name, n, *shape) for name, shape in (("proj", (h, h)), ("fc1", (4 * h, h)))),
        *updates(device, dtype, h),
    ]  # fmt: skip


def selected(found, only):
    """Return the operation with the name `only`, or all whose name contains it."""
    return [op for op in found if op.name == only] or [op for op in found if only in op.name]


def randoms(device, dtype, seed, *shapes):
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def attentions(draw, plain, item, n, h, s):
    """Return two operations: the masked softmax of at most 4 samples, and attention.

    The scores have 2 a s bytes per token in bf16. A matrix product of causal attention has s^2 d FLOP per head.
    """
    b, a = n // s, h // 64
    scores = min(b, 4) * a * s * s
    products = b * a * s * s * 64

    def backend(which):
        def run(qkv):
            with sdpa_kernel(which):
                return reference.attention(*qkv.unbind(2))

        return run

    return [
        Operation(
            "causal_softmax", "causal_softmax", draw((min(b, 4), a, s, s)), plain("causal_softmax", 0.125),
            (1.5 * scores * item, 2 * scores * item), scores,
            own={"softmax alone": lambda x: x.softmax(-1)}, another=("softmax alone",),
        ),
        Operation(
            "attention", "attention", draw((b, s, 3, a, 64)),
            lambda ops, qkv: ops.attention(*qkv.unbind(2)), (2 * products, 5 * products),
            n * h, flops=True,
            own={"flash": backend(SDPBackend.FLASH_ATTENTION), "cudnn": backend(SDPBackend.CUDNN_ATTENTION)},
        ),
    ]  # fmt: skip


def losses(device, dtype, n, h, v):
    """Return two operations: the loss of some tokens' logits, and the head with the loss of all tokens.

    The second operation uses all columns, padding included. PyTorch's own variant cannot exclude columns. Without
    padding its matrix products would have an odd number of columns, such as 50257, which is slow.
    """
    width = -(-v // 128) * 128
    return [loss_of_logits(device, dtype, min(n, ROWS), v, width), loss_of_head(device, dtype, n, h, v, width)]


def draw_targets(device, seed, count, v):
    return torch.randint(v, (count,), generator=torch.Generator(device).manual_seed(seed), device=device)


def loss_of_logits(device, dtype, chunk, v, width):
    """Return the operation: the loss of logits [chunk, width]. Their gradient overwrites them."""

    def draw(seed):
        (z,) = randoms(device, dtype, seed, (chunk, width))
        z[:, v:] = -1e4  # PyTorch's loss cannot exclude columns; this padding adds 0 to the softmax
        return [z, draw_targets(device, seed, chunk, v)]

    def run(ops, z, targets):
        weights = torch.full((chunk,), 1 / chunk, dtype=torch.promote_types(z.dtype, torch.float32), device=device)
        return ops.cross_entropy_(z, targets, v, weights), z

    def own(z, targets):
        z = z.detach().requires_grad_()
        losses = F.cross_entropy(z, targets, reduction="none")
        return losses.detach(), *torch.autograd.grad(losses, z, torch.full_like(losses, 1 / chunk))

    return Operation(
        "cross_entropy_", "cross_entropy_", draw, run, (2 * chunk * width * dtype.itemsize,), chunk * width,
        own={"F.cross_entropy": own},
    )  # fmt: skip


def loss_of_head(device, dtype, n, h, v, width):
    """Return the operation: the loss of all tokens from x [n, h] and word table w [width, h], and both gradients."""

    def draw(seed):
        x, w = randoms(device, dtype, seed, (n, h), (width, h))
        return [x, w.mul_(0.02), draw_targets(device, seed, n, v)]

    def run(ops, x, w, targets):
        w = nn.Parameter(w)
        w.grad_dtype = torch.promote_types(w.dtype, torch.float32)
        w.grad, w.deferred = torch.zeros_like(w, dtype=w.grad_dtype), None
        x = x.detach().requires_grad_()
        losses = LinearCrossEntropy.apply(x, w, targets, width, "copy", Mesh().tp, ops)
        dx = torch.autograd.grad(losses, x, torch.full_like(losses, 1 / n))  # fills `losses`, too
        return losses.detach().mean(), *dx, w.grad

    def compiled(compile):
        return with_gradients(compile(lambda x, w, targets: F.cross_entropy((x @ w.T).float(), targets)))

    own = {}
    if hasattr(nn, "LinearCrossEntropyOptions"):  # PyTorch 2.13 or later
        options = dict(options=nn.LinearCrossEntropyOptions())
        own["F.linear_cross_entropy"] = with_gradients(functools.partial(F.linear_cross_entropy, **options))
    return Operation(
        "linear + cross_entropy_", "cross_entropy_", draw, run, (6 * n * h * width,), n * width,
        flops=True, own=own, compiled=compiled,
    )  # fmt: skip


def with_gradients(function):
    """Return a function that computes the mean loss with `function`, and its gradients with respect to x and w."""

    def run(x, w, targets):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = function(x, w, targets)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    return run


def add_rows(device, dtype, n, h, v):
    """Return the operation: the gradient of a word table [v, h], float32, from n rows. Ids follow Zipf's law."""

    def draw(seed):
        wide = torch.promote_types(dtype, torch.float32)
        law = 1 / torch.arange(1, v + 1, device=device, dtype=torch.float32)
        generator = torch.Generator(device).manual_seed(seed)
        ids = torch.multinomial(law, n, replacement=True, generator=generator)
        return [*randoms(device, wide, seed, (v, h)), ids, *randoms(device, dtype, seed + 1, (n, h))]

    def run(ops, table, ids, rows):
        ops.add_rows_(table, ids, rows)
        return table

    law = 1 / torch.arange(1, v + 1, dtype=torch.float64)
    changed = (1 - (1 - law / law.sum()) ** n).sum().item()  # expected number of rows of the table that change
    return Operation("add_rows_", "add_rows_", draw, run, (n * h * dtype.itemsize + 8 * changed * h,), n * h)


def weight_gradient(device, dtype, name, n, out, width):
    """Return the operation dW += dy^T x, with dW [out, width] in float32, dy [n, out] and x [n, width]."""

    def draw(seed):
        (gradient,) = randoms(device, torch.promote_types(dtype, torch.float32), seed, (out, width))
        return [gradient, *randoms(device, dtype, seed + 1, (n, out), (n, width))]

    def run(ops, gradient, dy, x):
        if ops is reference:
            return gradient.add_(dy.T @ x)
        w = nn.Parameter(torch.empty_like(gradient, dtype=dy.dtype))
        w.grad_dtype, w.grad = gradient.dtype, gradient
        add_product(w, dy, x)
        return gradient

    flops = 2 * n * out * width
    return Operation(f"dW of {name}", "add_product", draw, run, (flops,), n * width, flops=True)


def updates(device, dtype, h):
    """Return the operations at the end of a step, on a block's flat buffer: matrices (weight decay), then vectors."""
    matrices, size = 12 * h * h, 12 * h * h + 13 * h
    ranges, options = [(0, matrices, True), (matrices, size, False)], dict(beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1)
    lr, scale = (torch.tensor(x, dtype=torch.float64, device=device) for x in (1e-3, 1.0))
    update, skip = torch.tensor(3, device=device), torch.tensor(False, device=device)
    scalars = reference.update_scalars(lr, scale, update, skip, options["beta1"], options["beta2"])
    cast = dtype != torch.float32  # in float32 the weights are the master weights

    def draw(seed):
        w, g, m, v = randoms(device, torch.float32, seed, *[(size,)] * 4)
        return [w, g, m, v.square_(), *([w.to(dtype)] if cast else [])]

    def run(ops, w, g, m, v, *out):
        ops.adamw_(w, g, [m, v], scalars, ranges, out=out[0] if out else None, **options)
        return w, m, v, *out

    def draw_flats(seed):
        return randoms(device, torch.float32, seed, *[(size,)] * 4)

    return [
        Operation(
            "adamw", "adamw_", draw, run, ((28 + cast * dtype.itemsize) * size,), size,
            own={"AdamW(fused=True)": OwnAdamW(ranges, lr.item(), options)},
            remark="compiled: torch.compile does not change PyTorch's fused AdamW, so this is eager's time",
        ),
        Operation(
            "squared_norms", "squared_norms", draw_flats, lambda ops, *flats: ops.squared_norms(flats),
            (4 * 4 * size,), 4 * size, own={"_foreach_norm": lambda *x: torch.stack(torch._foreach_norm(x)) ** 2},
        ),
    ]  # fmt: skip


class OwnAdamW:
    """torch.optim.AdamW on the same buffers. It keeps one optimizer for each copy of the buffers."""

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
            step = torch.tensor(2.0, device=w.device)  # as after two updates
            states[p] = dict(step=step, exp_avg=m[begin:end], exp_avg_sq=v[begin:end])
            groups.append(dict(params=[p], weight_decay=self.decay * decays))
        optimizer = torch.optim.AdamW(groups, **self.options)
        optimizer.state.update(states)
        return optimizer


# --- right? -----------------------------------------------------------------------------------------------------------


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def random_seeds(outputs):
    """Return a random gradient for each output, from which backward starts."""
    return [randoms(y.device, y.dtype, 90 + i, y.shape)[0] for i, y in enumerate(outputs)]


def passes(operation, function, inputs, seeds=None):
    """Return (results, seeds). Results: outputs, then input gradients. Seeds: output gradients, or None."""
    outputs = as_tuple(function(*inputs))
    if len(operation.floor) == 1:
        return [*outputs], None
    if seeds is None:
        seeds = random_seeds(outputs)
    gradients = torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], seeds)
    return [*(y.detach() for y in outputs), *gradients], seeds


class Judge:
    """The exact results of an operation on inputs(0), and the error of `reference.py` in the inputs' dtype."""

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
        """Return the largest error of the results, divided by the allowed error. At most 1 means right."""
        shares = []
        for x, right, of_plain in zip(results, self.exact, self.of_plain, strict=True):
            rounding = torch.finfo(x.dtype).eps + 8 * torch.finfo(torch.float32).eps
            shares.append(relative_error(x, right) / (2 * of_plain + rounding))
        return max(shares, key=lambda share: float("inf") if share != share else share)

    def of(self, function):
        return self.worst(passes(self.operation, function, self.operation.inputs(0), self.seeds)[0])


def relative_error(x, right):
    """Return the largest error of an element, divided by the largest exact element."""
    return ((x.double() - right).abs().max() / (right.abs().max() + 1e-30)).item()


def judged(share):
    return f"{share:.2f}" if share <= 1 else f"WRONG: {share:.3g}"


# --- how fast? --------------------------------------------------------------------------------------------------------


def on_gpu(machine, sizes, dtype, repeats, only):
    """Print the table, and where the program's choice (kernels=auto) is slower. Return whether ours are right."""
    import kernels

    dtype_name, dtype = dtype, train.DTYPES[dtype]
    burst_and_sustained = product_rate(machine, dtype)
    rates = {False: copy_rate(machine), True: burst_and_sustained[1]}
    print(
        f"{machine.name}, {VERSIONS}, {dtype_name}; copy {rates[False] / 1e9:,.0f} GB/s, "
        f"{products(burst_and_sustained)}; " + ", ".join(f"{k} = {v}" for k, v in sizes.items())
    )
    print(
        f"microseconds: median (smallest-largest) of {repeats}; error: the largest error / the allowed error "
        "(twice reference.py's in this dtype, plus a rounding)"
    )
    print_row(ROW, "", "", "error", "Triton", "rate", "share", "reference.py", "compiled", "", "PyTorch's own")
    machine.forget_compiled()
    totals, right = [], True
    for operation in selected(operations(machine.device, dtype, **sizes), only):
        variants = variants_of(operation, kernels, machine)
        found = examine(machine, operation, variants, repeats)
        right &= found["Triton"].right
        for i, direction in enumerate(operation.directions):
            print_row(ROW, *cells(operation, i, direction, found, rates[operation.flops]))
        totals.append((operation, *(found[which].total() for which in ("Triton", "reference.py"))))
        del variants, found
        machine.forget_compiled()
    print(verdict(choose(Config(kernels="auto"), machine.device, dtype_name), totals))
    return right


def variants_of(operation, kernels, machine):
    """Return {name: function(*inputs)}."""
    plain = functools.partial(operation.run, reference)
    return {
        "Triton": functools.partial(operation.run, kernels),
        "reference.py": plain,
        "compiled": operation.compiled(machine.compile) if operation.compiled else machine.compile(plain),
        **operation.own,
    }


@dataclass
class Found:
    """The results of one variant: its error, its times (microseconds for one copy of the inputs), or its failure."""

    error: float | None = None
    times: list = field(default_factory=list)  # one tuple per repeat, with one number per direction
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


def examine(machine, operation, variants, repeats):
    """Check each variant, then time them in turns. Return {variant: Found}."""
    found = {}
    try:
        judge = Judge(operation)
        for name, function in variants.items():
            found[name] = checked(judge, function)
        del judge
    except Exception as error:  # without an exact result, no variant can be checked
        return {name: Found(failure=what_went_wrong(error)) for name in variants}
    gc.collect()
    copies = [operation.inputs(seed) for seed in range(number_of_copies(operation.inputs(0)))]
    seeds = None
    if len(operation.floor) == 2:
        seeds = random_seeds(as_tuple(operation.run(reference, *copies[0])))
    for i in range(repeats + 1):  # the first turn is a warm-up and does not count
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
    """Return the number of copies, at least two, that together exceed the L2 cache."""
    return max(2, -(-L2 // sum(x.nbytes for x in inputs)))


def timed(machine, function, copies, seeds):
    """Return mean microseconds per copy: (forward, backward), or (whole,) without seeds."""
    forward, outputs = machine.timed(lambda: [as_tuple(function(*inputs)) for inputs in copies])
    if seeds is None:
        return (forward / len(copies),)
    leaves = [[x for x in inputs if x.requires_grad] for inputs in copies]

    def backward():
        return [torch.autograd.grad(ys, xs, seeds) for ys, xs in zip(outputs, leaves, strict=True)]

    return forward / len(copies), machine.timed(backward)[0] / len(copies)


def cells(operation, i, direction, found, rate):
    """Return a row of the table. Its ratio is the fastest other variant's time / our time: above 1 ours is faster."""
    ours, others = found["Triton"], [name for name in found if name != "Triton"]
    achieved = operation.floor[i] / (ours.median(i) * 1e-6)
    unit = f"{achieved / 1e12:,.1f} TFLOP/s" if operation.flops else f"{achieved / 1e9:,.0f} GB/s"
    best = min(found[name].median(i) for name in others if name not in operation.another)
    error = judged(ours.error) if ours.error is not None else ""
    remarks = [f"{name} {found[name].cell(i)}{note(operation, name, found[name])}" for name in operation.own]
    for name in ("Triton", "reference.py", "compiled"):  # their cells are too narrow for a message
        if not found[name].right:
            remarks.append(f"{name}: {found[name].failure or 'error ' + judged(found[name].error)}")
    plain, compiled = (found[name].cell(i)[:26] for name in ("reference.py", "compiled"))
    remarks += [operation.remark] * bool(operation.remark)
    ratio = f"x{best / ours.median(i):.2f}" if ours.times and best < float("inf") else ""
    known = (unit, f"{achieved / rate:.0%}") if ours.times else ("", "")
    return operation.name, direction, error, ours.cell(i)[:26], *known, plain, compiled, ratio, "; ".join(remarks)


def note(operation, name, what):
    """Return a remark that is printed after the time of one of PyTorch's own variants."""
    if name in operation.another:
        return " (another function)"
    return "" if what.right or what.failure else f" (error {judged(what.error)})"


def verdict(auto, totals):
    """Return lines: the choice of kernels=auto for each operation, and the operations where this choice is slower."""
    chosen = {op.ops: "torch" if getattr(auto, op.ops, None) is getattr(reference, op.ops) else "triton"
              for op, *_ in totals if op.ops in reference.OPERATIONS}  # fmt: skip
    taken = {which: [name for name in chosen if chosen[name] == which] for which in ("triton", "torch")}
    lines = "; ".join(f"{which}: {', '.join(names) or 'nothing'}" for which, names in taken.items())
    otherwise = [
        f"{op.name} (Triton {ours:,.1f}, reference.py {plain:,.1f} us, forward and backward)"
        for op, ours, plain in totals
        if op.ops in chosen and (ours < plain) != (chosen[op.ops] == "triton")
    ]
    return f"\nkernels=auto uses {lines}\nthe other choice is faster for: {'; '.join(otherwise) or 'nothing'}"


# --- without a GPU ----------------------------------------------------------------------------------------------------


def interpreted(only):
    """Check the kernels in Triton's interpreter. Print errors, moved bytes and floors. Return whether all is right."""
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, during its import
    try:
        import kernels
        from testing import sanitizer
    except ImportError as error:
        print(f"{NO_GPU}Triton's interpreter does not run either ({error}), so nothing is checked")
        return True
    sanitizer.install()
    print(NO_GPU + "a check in Triton's interpreter, in bf16, at a small size; times need a GPU")
    rows, right = [], True
    for operation in selected(operations(torch.device("cpu"), torch.bfloat16, **SMALL), only):
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
    print_table(["bytes per element", "", "floor", "moved", "error / allowed"], rows)
    print('"moved": each byte counts once per launch, also those of vectors and partial sums (much at a small size)')
    return right
