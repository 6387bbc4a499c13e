"""Tests that testing/sanitizer.py finds each kind of defect in a small kernel, and accepts correct kernels."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

try:
    from testing import sanitizer
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

sanitizer.install()

NAN, INF = float("nan"), float("inf")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a, b):
    """Require equal dtypes, shapes and values. NaN equals NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


# --- out of bounds ----------------------------------------------------------------------------------------------------


@triton.jit
def copy(x, y, n, offset, BLOCK: tl.constexpr):
    """y[i] = x[i + offset] for i < n"""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i + offset, mask=i < n), mask=i < n)


@triton.jit
def copy_unmasked(x, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i))


def test_what_is_within_bounds_is_computed():
    x, y = random(37), torch.full([40], -1.0)
    copy[3,](x, y, 37, 0, BLOCK=16)
    assert torch.equal(y, torch.cat([x, torch.full([3], -1.0)]))


@pytest.mark.parametrize("offset", [1, -1, 1 << 20, 1 << 40, -(1 << 30)])
def test_loads_out_of_bounds(offset):
    """Some offsets lead one element outside of the tensor. The others lead far away, where the process could crash."""
    x, y = random(37), torch.zeros(37)
    program, lane, element = (2, 4, 37) if offset == 1 else (0, 0, offset)
    said = rf"program \({program}, 0, 0\), lane {lane}, loads x\[{element}\]: x is float32 \[37\]"
    with pytest.raises(sanitizer.OutOfBounds, match=said):
        copy[3,](x, y, 37, offset, BLOCK=16)


def test_stores_out_of_bounds():
    x, y = random(32), torch.zeros(31)
    with pytest.raises(sanitizer.OutOfBounds, match=r"program \(1, 0, 0\), lane 15, stores y\[31\]"):
        copy_unmasked[2,](x, y, BLOCK=16)


def test_one_argument_does_not_lead_into_another():
    """Two halves of one buffer: the memory after the first half exists, but belongs to another argument."""
    both, y = random(64), torch.zeros(64)
    x, z = both[:32], both[32:]
    with pytest.raises(sanitizer.OutOfBounds, match=r"loads x\[32\]"):
        copy_unmasked[2,](x, y, BLOCK=32)
    copy_unmasked[1,](z, x, BLOCK=32)
    assert torch.equal(x, z)


@triton.jit
def copy_heads(q, y, s, h, row, D: tl.constexpr):
    """Copy one head's rows of q [s, *, heads, d] to y [s, d]. Rows of q are `row` elements apart."""
    i = tl.arange(0, D)
    for t in range(s):
        tl.store(y + t * D + i, tl.load(q + t * row + h * D + i))


def test_strided_views():
    """The argument qkv [s, 3, heads, d] allows reads of all its elements. Its view q allows only reads of q."""
    qkv, y = random(5, 3, 2, 4), torch.zeros(5, 4)
    for h in range(6):
        copy_heads[1,](qkv, y, 5, h, 24, D=4)
        assert torch.equal(y, qkv.flatten(1, 2)[:, h])
    q, k = qkv[:, 0], qkv[:, 1]
    for h in range(2):
        copy_heads[1,](q, y, 5, h, 24, D=4)
        assert torch.equal(y, q[:, h])
        copy_heads[1,](k, y, 5, h, 24, D=4)
        assert torch.equal(y, k[:, h])
    with pytest.raises(sanitizer.OutOfBounds, match=r"loads q\[8\]: q is float32 \[5, 2, 4\], strides \[24, 4, 1\]"):
        copy_heads[1,](q, y, 5, 2, 24, D=4)


@triton.jit
def copy_tiles(source, pair, rows, BLOCK: tl.constexpr):
    """Copy the tensor descriptor `source` to both tensors of `pair`."""
    at = tl.program_id(0) * BLOCK
    tile = source.load([at, 0])
    i, j = tl.arange(0, BLOCK), tl.arange(0, 8)
    for k in tl.static_range(2):
        tl.store(pair[k] + (at + i)[:, None] * 8 + j[None, :], tile, mask=(at + i)[:, None] < rows)


def test_descriptors_and_tuples():
    """A descriptor masks accesses outside of its bounds. Bounds larger than the tensor are an error."""
    x, y, z = random(5, 8), torch.zeros(5, 8), torch.zeros(4, 8)
    with sanitizer.traffic() as t:
        copy_tiles[3,](TensorDescriptor.from_tensor(x, [2, 8]), (y, y.clone()), 5, BLOCK=2)
    assert torch.equal(x, y)
    assert {name: (b.loaded, b.stored) for name, b in t.by_argument.items()} == {
        "source": (160, 0),
        "pair[0]": (0, 160),
        "pair[1]": (0, 160),
    }
    with pytest.raises(sanitizer.OutOfBounds, match=r"stores pair\[1\]\[32\]"):
        copy_tiles[3,](TensorDescriptor.from_tensor(x, [2, 8]), (y, z), 5, BLOCK=2)
    with pytest.raises(sanitizer.OutOfBounds, match=r"loads source\[40\]"):
        copy_tiles[3,](TensorDescriptor(x, [6, 8], [8, 1], [2, 8]), (y, z), 4, BLOCK=2)


# --- races ------------------------------------------------------------------------------------------------------------


@triton.jit
def store_at(x, stride, ATOMIC: tl.constexpr):
    at = x + tl.program_id(0) * stride + tl.program_id(1)
    if ATOMIC:
        tl.atomic_add(at, 1.0)
    else:
        tl.store(at, 1.0)


def test_two_programs_store_one_element():
    store_at[3, 2](torch.zeros(6), 2, ATOMIC=False)
    x = torch.zeros(4)
    with pytest.raises(sanitizer.Race, match=r"program \(1, 0, 0\) stores x\[1\], which program \(0, 1, 0\) stored"):
        store_at[3, 2](x, 1, ATOMIC=False)
    store_at[3, 2](x.zero_(), 1, ATOMIC=True)
    assert x.tolist() == [1, 2, 2, 1]


@triton.jit
def shift(x, y, BLOCK: tl.constexpr, BACK: tl.constexpr):
    """Store y[i] = x[i - 1], or x[i + 1]. With y = x, each program reads an element that its neighbour stores."""
    i = 1 + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i + (-1 if BACK else 1)))


def test_a_program_loads_what_another_stores():
    """In the interpreter, the order of the load and the store is fixed. On a GPU, this order is undefined."""
    x = random(18)
    for back in (True, False):
        shift[4,](x, torch.zeros(18), BLOCK=4, BACK=back)
    with pytest.raises(sanitizer.Race, match=r"\(1, 0, 0\) loads x\[4\], which program \(0, 0, 0\) stored"):
        shift[4,](x, x, BLOCK=4, BACK=True)
    with pytest.raises(sanitizer.Race, match=r"\(1, 0, 0\) stores y\[5\], which program \(0, 0, 0\) loaded"):
        shift[4,](x, x, BLOCK=4, BACK=False)
    with pytest.raises(sanitizer.Race, match=r"stores y\[5\]"):
        shift[4,](x, x[:], BLOCK=4, BACK=False)


@triton.jit
def read_by_all(x, y, writer):
    program = tl.program_id(0)
    tl.store(y + program, tl.load(x))
    if program == writer:
        tl.store(x, 0.0)


@pytest.mark.parametrize("writer, others", [(0, r"program \(0, 0, 0\) stored"), (2, "several other programs loaded")])
def test_one_program_stores_what_all_load(writer, others):
    read_by_all[3,](torch.ones(1), torch.zeros(3), 3)
    with pytest.raises(sanitizer.Race, match=others):
        read_by_all[3,](torch.ones(1), torch.zeros(3), writer)


@triton.jit
def count_and_look(x, y, LOADS: tl.constexpr, FIRST: tl.constexpr):
    """One program adds to x[0], the other one loads or stores x[0]."""
    if (tl.program_id(0) == 0) == FIRST:
        tl.atomic_add(x, 1.0)
    elif LOADS:
        tl.store(y, tl.load(x))
    else:
        tl.store(x, 0.0)


@pytest.mark.parametrize("loads, did", [(True, "load"), (False, "store")])
def test_an_atomic_does_not_order_what_is_beside_it(loads, did):
    with pytest.raises(sanitizer.Race, match=rf"\(1, 0, 0\) {did}s x\[0\], which .*\(0, 0, 0\) updated atomically"):
        count_and_look[2,](torch.zeros(1), torch.zeros(1), LOADS=loads, FIRST=True)
    with pytest.raises(sanitizer.Race, match=rf"\(1, 0, 0\) atomically updates x\[0\], which .*\(0, 0, 0\) {did}"):
        count_and_look[2,](torch.zeros(1), torch.zeros(1), LOADS=loads, FIRST=False)


@triton.jit
def scatter(x, where, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + tl.load(where + i, mask=i < n, other=0), i.to(tl.float32), mask=i < n)


def test_two_lanes_of_one_store():
    x = torch.zeros(8)
    scatter[1,](x, torch.tensor([3, 1, 2, 0]), 3, BLOCK=4)
    assert x.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    with pytest.raises(sanitizer.Race, match=r"lanes 0 and 3 of one store by program \(0, 0, 0\) hit x\[7\]"):
        scatter[1,](x, torch.tensor([7, 1, 2, 7]), 4, BLOCK=4)


@triton.jit
def reverse(x, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) + 1)
    if BARRIER:
        tl.debug_barrier()
    reversed = tl.load(x + BLOCK - 1 - i)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + i, reversed)


def test_a_program_waits_for_its_own_lanes():
    x = torch.arange(8.0)
    reverse[1,](x, BLOCK=8, BARRIER=True)
    assert x.tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    with pytest.raises(sanitizer.Race, match=r"lane 0, loads x\[7\], which its lane 7 stored: tl.debug_barrier"):
        reverse[1,](x, BLOCK=8, BARRIER=False)


@triton.jit
def add_in_place(x, scale, bias, y, n, BLOCK: tl.constexpr):
    """Store y = x scale (+ bias). scale: one element."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n) * tl.load(scale)
    if bias is not None:
        value += tl.load(bias + i, mask=i < n)
    tl.store(y + i, value, mask=i < n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_is_no_race(dtype):
    """First, x and y are the same tensor and bias is None. In the second launch, all four are the same tensor."""
    x, scale = random(50, dtype=dtype), torch.tensor(3.0, dtype=dtype)
    expected = x * 3
    with sanitizer.traffic() as t:
        add_in_place[4,](x, scale, None, x, 50, BLOCK=16)
    same(x, expected)
    assert set(t.by_argument) == {"x", "scale", "y"}
    one = torch.tensor([2.0], dtype=dtype)
    add_in_place[1,](one, one, one, one, 1, BLOCK=16)
    assert one.item() == 6


# --- device_assert ----------------------------------------------------------------------------------------------------


@triton.jit
def checked(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.device_assert(value >= 0, "negative")


def test_device_assert_asserts():
    x = torch.tensor([1.0, 2.0, -3.0])
    checked[1,](x, 2, BLOCK=4)
    with pytest.raises(AssertionError, match="negative"):
        checked[1,](x, 3, BLOCK=4)


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


@triton.jit
def convert(x, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


def converted(x, dtype):
    y = torch.zeros(x.shape, dtype=dtype)
    convert[1,](x, y, BLOCK=x.numel())
    return y


def test_every_bfloat16_is_what_torch_has_it_be():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    same(converted(x, torch.float32), x.float())
    same(converted(x.float(), torch.bfloat16), x)
    finite = x[x.abs() < 1e9]
    finite = torch.cat([finite, torch.zeros((1 << 16) - len(finite), dtype=x.dtype)])
    same(converted(finite, torch.int32), finite.int())


def test_rounding_is_to_nearest_even():
    """Midpoints of two bfloat16, and the float32 beside them, also subnormal; then extreme numbers."""
    below = torch.arange(0, 0x7F80, 3, dtype=torch.int32)[: 1 << 13] << 16
    x = torch.cat([below + 0x7FFF, below + 0x8000, below + 0x8001, below]).view(torch.float32)
    x = torch.cat([x, -x])
    same(converted(x, torch.bfloat16), x.bfloat16())
    ends = torch.tensor([INF, -INF, NAN, 3.4e38, -3.4e38, 3.3895e38, 1e-45, -0.0])
    same(converted(ends, torch.bfloat16), ends.bfloat16())
    payloads = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)  # all NaN
    assert converted(payloads, torch.bfloat16).isnan().all()
    integers = torch.arange(-(1 << 12), 1 << 12, dtype=torch.int32)
    same(converted(integers, torch.bfloat16), integers.bfloat16())


@triton.jit
def arithmetic(x, y, sums, differences, products, quotients, larger, smaller, negative, plus, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(sums + i, a + b)
    tl.store(differences + i, a - b)
    tl.store(products + i, a * b)
    tl.store(quotients + i, a / b)
    tl.store(larger + i, tl.maximum(a, b))
    tl.store(smaller + i, tl.where(a < b, a, b))
    tl.store(negative + i, -a)
    tl.store(plus + i, a + 0.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic(dtype):
    a, b = random(512, dtype=dtype), random(512, dtype=dtype, seed=1)
    out = [torch.zeros_like(a) for _ in range(8)]
    arithmetic[1,](a, b, *out, BLOCK=512)
    third = torch.tensor(0.3, dtype=dtype)
    expected = a + b, a - b, a * b, (a.float() / b.float()).to(dtype), a.maximum(b), a.minimum(b), -a, a + third
    for ours, theirs in zip(out, expected, strict=True):
        same(ours, theirs)


@triton.jit
def multiply(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    product = tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee")
    tl.store(c + at, product)
    tl.device_assert(tl.max(product, 1) <= 1e6, "max")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot(dtype):
    a, b, c = random(32, 32, dtype=dtype), random(32, 32, dtype=dtype, seed=1), torch.zeros(32, 32)
    multiply[1,](a, b, c, N=32)
    exact = a.double() @ b.double()
    assert (c - exact).abs().max() < 1e-5 and (c - exact).abs().max() > 0  # with bfloat16 sums, the error is 0.1
    a, b = a.mul(4).round(), b.mul(4).round()  # small integers: no rounding
    multiply[1,](a, b, c, N=32)
    assert torch.equal(c, (a.double() @ b.double()).float())


@triton.jit
def total(x, y, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    values = tl.load(x + tl.arange(0, BLOCK))
    tl.store(y, tl.max(values, 0))
    if WIDE:
        values = values.to(tl.float32)
    tl.store(y + 1, tl.sum(values, 0))


def test_sums_along_an_axis_are_float32s():
    x, y = random(64, dtype=torch.bfloat16), torch.zeros(2)
    total[1,](x, y, BLOCK=64, WIDE=True)
    assert y[0] == x.max() and abs(y[1] - x.double().sum()) < 1e-5
    with pytest.raises(TypeError, match="use float32"):
        total[1,](x, y, BLOCK=64, WIDE=False)


# --- traffic ----------------------------------------------------------------------------------------------------------


def test_traffic_of_a_copy():
    x, y = random(100), torch.zeros(100, dtype=torch.bfloat16)
    with sanitizer.traffic() as t:
        copy[7,](x, y, 100, 0, BLOCK=16)
    assert t.launches == 1 and t.programs == 7
    assert t.loaded == t.loaded_unique == 400 and t.stored == t.stored_unique == 200
    assert t.by_argument == {"x": sanitizer.Bytes(400, 0, 400, 0), "y": sanitizer.Bytes(0, 200, 0, 200)}


@triton.jit
def softmax_of_a_row(x, y, n, BLOCK: tl.constexpr):
    """Read the row twice: for the sum and for the quotient."""
    row = tl.program_id(0) * n
    s = 0.0
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        s += tl.sum(tl.exp(tl.load(x + row + i, mask=i < n, other=float("-inf"))), 0)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(y + row + i, tl.exp(tl.load(x + row + i, mask=i < n)) / s, mask=i < n)


def test_traffic_of_what_is_read_twice():
    x, y = random(3, 20), torch.zeros(3, 20)
    with sanitizer.traffic() as both:
        for _ in range(2):
            with sanitizer.traffic() as t:
                softmax_of_a_row[3,](x, y, 20, BLOCK=16)
            assert t.loaded == 2 * 240 and t.loaded_unique == t.stored == 240
            assert sanitizer.last == t
    assert torch.allclose(y, x.softmax(1))
    assert both.launches == 2 and both.loaded == 2 * t.loaded and both.by_argument["y"].stored == 480


def test_atomics_load_and_store():
    with sanitizer.traffic() as t:
        store_at[3, 2](torch.zeros(4), 1, ATOMIC=True)
    assert t.loaded == t.stored == 24 and t.loaded_unique == t.stored_unique == 16


# --- the process ------------------------------------------------------------------------------------------------------


@triton.jit
def careless(x, y, INTEGER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    if INTEGER:
        tl.store(y + i, value * 0x7FEB352D + 0x7FFFFFFF)
    else:
        tl.store(y + i, tl.exp(value * 1e38) - tl.log(value))


def test_what_a_gpu_does_silently_does_not_warn():
    x = torch.tensor([3.0, -1.0, 0.0, INF])
    y = torch.zeros(4)
    careless[1,](x, y, INTEGER=False, BLOCK=4)
    same(y, (x * 1e38).exp() - x.log())
    x, y = torch.tensor([1, -1, 1 << 30, -(1 << 31)], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    careless[1,](x, y, INTEGER=True, BLOCK=4)
    assert torch.equal(y, x * 0x7FEB352D + 0x7FFFFFFF)
    with pytest.warns(RuntimeWarning, match="overflow"):  # outside of a launch, numpy warns as before
        np.float32(1e38) * np.float32(1e38)


def test_after_an_error_all_is_as_before():
    x, y = random(32), torch.zeros(31)
    with pytest.raises(sanitizer.OutOfBounds):
        copy_unmasked[2,](x, y, BLOCK=16)
    sanitizer.install()  # a second call does nothing
    with sanitizer.traffic() as t:
        copy[2,](x, y, 31, 0, BLOCK=16)
    assert torch.equal(y, x[:31]) and t.loaded == 31 * 4


def check_in_a_worker():
    sanitizer.install()
    x, y = random(32), torch.zeros(31)
    copy[2,](x, y, 31, 0, BLOCK=16)
    assert torch.equal(y, x[:31])
    with pytest.raises(sanitizer.OutOfBounds):
        copy_unmasked[2,](x, y, BLOCK=16)


def test_workers_interpret_too(workers):
    workers.check(2, check_in_a_worker)


def test_too_late_is_an_error():
    """Triton reads TRITON_INTERPRET during its import."""
    code = "import triton, os; os.environ['TRITON_INTERPRET'] = '1'; from testing import sanitizer"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode and "before the first `import triton`" in done.stderr
