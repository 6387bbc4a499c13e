"""Checks the operations of kernels.py beside reference.py on a GPU, and measures their times.

    python -m bench kernels layer norm

The inputs are those of one micro-batch: n tokens in bf16. An error and the allowed error are those
of the tests (testing/cases.py). `triton.testing.do_bench` empties the L2 cache before each call and
measures it with events of the GPU. The turns of Triton, reference.py and reference.py under
torch.compile alternate; a ratio is Triton's time / the other's.

The rate counts the bytes that must move (`passes` of testing/cases.py). The goal is the rate of a
plain copy. Attention computes, and has no rate; that of add_rows_ lacks the rows of its table.

Without a GPU the kernels run in Triton's interpreter at a small size, and only errors are printed.
"""

import functools
import importlib.util
import os
import statistics
import sys
from functools import partial

import torch

import reference
from bench.compete import chosen, compete, ratios, spread
from errors import UserError
from parallel.tensor import ROWS, padded
from testing.cases import CASES, adamw, buffers, errors, random, update_scalars, word_ids

LARGE = dict(n=32768, h=1024, s=1024, v=50257)  # tokens, hidden size, tokens of a sample, vocabulary
SMALL = dict(n=16, h=64, s=16, v=200)  # without a GPU
ROUNDS = 5  # turns of each of the three
LINE = "{:<26}{:<10}{:>14}{:>10}  {}"


def measure(*words):
    """Check the operations whose names contain `words`. Compare times with PyTorch's. Exit code 1: one is wrong."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("bench kernels: needs Triton: pip install triton")
    gpu = torch.cuda.is_available()
    cases = operations(torch.device("cuda" if gpu else "cpu"), **(LARGE if gpu else SMALL))
    names = chosen(cases, words)
    if gpu:
        copy = f"a copy moves {copy_rate():,.0f} GB/s; {LARGE}; median (smallest-largest) of {ROUNDS} turns"
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; {copy}")
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # before the import of Triton
        from testing import sanitizer

        sanitizer.install()
        print(f"no GPU: a check in Triton's interpreter, without times; {SMALL}")
    print(LINE.format("", "", "error/allowed", "GB/s", "microseconds"), flush=True)
    right = compete({name: partial(check, name, *cases[name], ROUNDS if gpu else 0) for name in names}, 1)
    if any(right.get(name) != [True] for name in names):
        sys.exit(1)


def operations(device, n, h, s, v):
    """Return {name: (call, inputs, passes)}, the most important first.

    call(module, *inputs) calls a function of kernels.py or reference.py. passes: as in CASES; a single number: it has
    no backward.
    """
    new = partial(random, dtype=torch.bfloat16, device=device)
    sizes = {"x": (n, h), "w": (n, 2 * h), "v": (h,)}
    rows, ids = min(n, ROWS), word_ids((n,), v).to(device)  # rows: whose logits exist at a time
    weights, positions = torch.full((rows,), 1 / rows, device=device), torch.arange(s, device=device)
    matrices, flat, scalars = 12 * h * h, 12 * h * h + 13 * h, update_scalars(device)  # of a block
    ranges = [(0, matrices, True), (matrices, flat, False)]

    def cross_entropy(ops, logits, targets):
        return ops.cross_entropy_(logits, targets, v, weights.to(reference.wide_dtype(logits))), logits

    def add_rows(ops, rows, ids, table):
        ops.add_rows_(table, ids, rows)
        return table

    def update(ops, *inputs):
        adamw(ops, inputs, ranges, scalars)
        w, _, m, v = inputs  # the gradient is used up
        return w, m, v

    table = random(v, h, device=device)
    found = {
        "cross_entropy_": (cross_entropy, [new(rows, padded(v), size=4), ids[:rows]], (2,)),
        "adamw_": (update, buffers(flat, device), (7,)),
        "add_rows_": (add_rows, [new(n, h), ids, table], (1,)),  # and rows of the table
        "attention": (lambda ops, qkv: ops.attention(*qkv.unbind(2)), [new(n // s, s, 3, h // 64, 64)], (0, 0)),
        "rotate": (lambda ops, x: ops.rotate(x, positions, 1e4), [new(n // s, s, h // 64, 64)], (2, 2)),
    }
    for name, (kinds, call, passes) in CASES.items():
        if "without" not in name:  # kernels.py leaves some of these to reference.py
            inputs = [new(*sizes[kind], seed=i) for i, kind in enumerate(kinds)]
            found[name] = call, inputs, passes
    return found


def check(name, call, inputs, passes, rounds):
    """Print the rows of an operation. Return whether its errors are allowed. rounds=0: no times."""
    import kernels

    backward = len(passes) == 2
    triton, plain = partial(call, kernels), partial(call, reference)
    found, allowed = errors(triton, plain, inputs, backward=backward)
    shares = [error / most for error, most in zip(found, allowed, strict=True)]
    right = all(share <= 1 for share in shares)
    judged = f"{'' if right else 'WRONG: '}{max(shares):.3g}"
    if not rounds:
        print(LINE.format(name, "", judged, "", "").rstrip(), flush=True)
        return right
    torch._dynamo.reset()  # forgets the code of the operations before
    torch._functorch.config.donated_buffer = False  # a compiled backward may be called again
    variants = {"Triton": triton, "reference.py": plain, "compiled": torch.compile(plain, dynamic=False)}
    leaves = [x.clone().requires_grad_(backward) for x in inputs]
    for direction, count in zip(("forward", "backward"), passes, strict=False):
        calls = {name: partial(f, *leaves) for name, f in variants.items()}
        if direction == "backward":
            calls = {name: backward_of(f, leaves) for name, f in calls.items()}
        text = times(calls, count * inputs[0].nbytes, rounds)
        print(LINE.format(name, direction, judged, *text), flush=True)
    return right


def backward_of(forward, leaves):
    """Return a function that computes the gradients of the leaves. It calls `forward` once."""

    @functools.cache
    def graph():
        outputs = forward()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs, [torch.ones_like(y) for y in outputs]

    def backward():
        outputs, seeds = graph()
        return torch.autograd.grad(outputs, leaves, seeds, retain_graph=True)

    return backward


def times(calls, moved, rounds):
    """Return (GB/s of Triton, the times and the ratios as text). moved: bytes."""
    turns = compete({name: partial(microseconds, call) for name, call in calls.items()}, rounds + 1)
    turns = {name: values[1:] for name, values in turns.items()}  # the first turn compiles
    cells = [f"{name} {spread(values, '{:,.1f}')}" for name, values in turns.items()]
    ours, rate = turns.pop("Triton", None), ""
    if ours:
        rate = f"{moved / statistics.median(ours) / 1e3:,.0f}" if moved else ""
        cells += [f"Triton / {name} {spread(ratios(ours, others))}" for name, others in turns.items()]
    return rate, "; ".join(cells)


def microseconds(call):
    """Return the median of one turn."""
    from triton.testing import do_bench

    return 1000 * do_bench(call, warmup=5, rep=20, return_mode="median")


def copy_rate():
    """Return a plain copy's GB/s, bytes read and written."""
    x, y = torch.ones(2, 1 << 29, dtype=torch.uint8, device="cuda")
    return 2 * x.nbytes / microseconds(lambda: y.copy_(x)) / 1e3
