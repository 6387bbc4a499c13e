"""The operations of kernels.py and reference.py with inputs, for test_kernels.py and `bench kernels`."""

import functools

import torch

import reference
from reference import Drop


def random(*shape, dtype=torch.float32, seed=0, size=1.0, device="cpu"):
    """Return normal random numbers of standard deviation `size`."""
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * size).to(dtype)


def word_ids(shape, vocabulary, seed=0):
    """Return random ids that follow Zipf's law, as in text: a few words are frequent.

    With uniform ids, the gradient of the word table has few rows to add up and is too fast.
    """
    law = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(law, torch.Size(shape).numel(), True, generator=generator).view(shape)


@functools.cache
def tokens(n, device):
    return torch.arange(n, device=device) * 3 + 2**40


def drop(x):
    return Drop(tokens(len(x), x.device), 0.3, 1234, 7)


# {name: (inputs, call, passes)}. An input x is [n, h], w is [n, 2h], v is [h]. passes: how often as
# many bytes as the first input has must be read or written at least, in forward and in backward.
# The most important ones come first.
CASES = {
    "add, layer norm": ("xxvvv", lambda ops, *inputs: ops.add_layer_norm_(*inputs), (4, 4)),
    "gelu": ("xv", lambda ops, y, bias: ops.gelu_(y, bias), (2, 3)),
    "add, rms norm": ("xxv", lambda ops, *inputs: ops.add_rms_norm_(*inputs, 1e-3), (4, 4)),
    "swiglu": ("w", lambda ops, y: ops.swiglu(y), (1.5, 2.5)),
    "add, dropout, layer norm": (
        "xxvvv", lambda ops, y, *rest: ops.add_layer_norm_(y, *rest, drop(y)), (4, 5),
    ),
    "add": ("xxv", lambda ops, y, x, bias: ops.add_(y, x, bias), (3, 1)),
    "add, dropout": ("xxv", lambda ops, y, x, bias: ops.add_(y, x, bias, drop(x)), (3, 2)),
    "layer norm": ("xvv", lambda ops, x, *norm: ops.add_layer_norm_(None, x, None, *norm), (2, 4)),
    "dropout": ("x", lambda ops, x: ops.dropout(x, drop(x)), (2, 2)),
    "rms norm": ("xv", lambda ops, x, weight: ops.add_rms_norm_(None, x, weight, 1e-3), (2, 4)),
    "add, dropout, rms norm": (
        "xxv", lambda ops, y, *rest: ops.add_rms_norm_(y, *rest, 1e-3, drop(y)), (4, 5),
    ),
    "relu": ("xv", lambda ops, y, bias: ops.relu_(y, bias), (2, 3)),
    "layer norm without bias": (
        "xv", lambda ops, x, weight: ops.add_layer_norm_(None, x, None, weight, None), (2, 4),
    ),
    "gelu without bias": ("x", lambda ops, y: ops.gelu_(y, None), (2, 3)),
    "relu without bias": ("x", lambda ops, y: ops.relu_(y, None), (2, 3)),
}  # fmt: skip


# --- AdamW ----------------------------------------------------------------------------------------


def buffers(size, device="cpu"):
    """Return flat buffers: weight, gradient, m, v."""
    weight, gradient, m, v = (random(size, seed=i, device=device) for i in range(4))
    return [weight, gradient, m, v**2]


def update_scalars(device="cpu", skip=False):
    """Return the UpdateScalars of the third update."""
    numbers = torch.tensor(1e-2).double(), torch.tensor(0.25).double(), torch.tensor(3), torch.tensor(skip)
    return reference.update_scalars(*(x.to(device) for x in numbers), 0.9, 0.99)


def adamw(ops, buffers, ranges, scalars):
    """Make an update of `buffers`."""
    weight, gradient, *moments = buffers
    ops.adamw_(weight, gradient, moments, scalars, ranges, decay=0.1, beta1=0.9, beta2=0.99, eps=1e-8)


# --- errors ---------------------------------------------------------------------------------------


def results(f, inputs, wanted=None, backward=True):
    """Return (outputs of f and gradients of its inputs, seeds).

    seeds: the gradients of the outputs, equal to `wanted`, or random if `wanted` is None.
    """
    inputs = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_(backward) for x in inputs]
    outputs = f(*(x.clone() for x in inputs))  # f may overwrite its inputs
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if not backward:
        return list(outputs), []
    seeds = wanted or [random(*y.shape, dtype=y.dtype, seed=90 + i, device=y.device) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, seeds)
    return [y.detach() for y in outputs] + [x.grad for x in inputs], seeds


def errors(fused, plain, inputs, more=0.0, backward=True):
    """Return (errors of the results of `fused`, the errors that are allowed).

    An error is relative to the largest value of the exact result: that of `plain` in float64. It may be
    2 e + eps of the dtype + 8 eps of float32 + more. e: the error of `plain` in the inputs' dtype.
    """
    ours, seeds = results(fused, inputs, None, backward)
    theirs, _ = results(plain, inputs, seeds, backward)
    wide, wide_seeds = ([x.double() if x.is_floating_point() else x for x in xs] for xs in (inputs, seeds))
    exact, _ = results(plain, wide, wide_seeds, backward)
    found, allowed = [], []
    for a, b, right in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype
        error, of_plain = ((x.double() - right).abs().max() / (right.abs().max() + 1e-30) for x in (a, b))
        found.append(error.item())
        rounding = torch.finfo(a.dtype).eps + 8 * torch.finfo(torch.float32).eps
        allowed.append(2 * of_plain.item() + rounding + more)
    return found, allowed
