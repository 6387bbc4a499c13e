"""testing/sanitizer.py finds each kind of defect in a small kernel, and accepts correct ones."""

import numpy as np
import pytest
import torch

import testing.interpreted  # noqa: F401  (first: it skips this file without Triton)

# isort: split

import triton
import triton.language as tl

from testing import sanitizer
from testing.cases import random


def same(a, b):
    """Require equal dtypes, shapes and values, with NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


# --- out of bounds ----------------------------------------------------------------------------------------------------


@triton.jit
def copy(x, y, n, offset, BLOCK: tl.constexpr, STRIDE: tl.constexpr = 1):
    """y[i] = x[i STRIDE + offset] for i < n"""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i * STRIDE + offset, mask=i < n), mask=i < n)


@pytest.mark.parametrize("offset", [1, -1, 1 << 20, 1 << 40, -(1 << 30)])
def test_a_load_out_of_bounds_is_named(offset):
    """One element outside, or far away, where the process could crash."""
    x, y = random(37), torch.zeros(37)
    copy[3,](x, y, 37, 0, BLOCK=16)
    assert torch.equal(x, y)
    program, lane, element = (2, 4, 37) if offset == 1 else (0, 0, offset)
    with pytest.raises(sanitizer.OutOfBounds, match=rf"\({program}, 0, 0\), lane {lane}, loads x\[{element}\]"):
        copy[3,](x, y, 37, offset, BLOCK=16)


def test_a_store_out_of_bounds_is_named():
    with pytest.raises(sanitizer.OutOfBounds, match=r"stores y\[31\]"):
        copy[2,](random(32), torch.zeros(31), 32, 0, BLOCK=16)


def test_one_argument_does_not_lead_into_another():
    """Memory after half a buffer, and between a view's rows, belongs to another argument."""
    both = random(64)
    with pytest.raises(sanitizer.OutOfBounds, match=r"loads x\[32\]"):
        copy[1,](both[:32], both[32:], 32, 1, BLOCK=32)
    copy[1,](both[32:], both[:32], 32, 0, BLOCK=32)
    assert torch.equal(both[:32], both[32:])
    qkv, y = random(4, 3, 8), torch.zeros(8)
    for i in range(3):
        copy[1,](qkv[:, i], y, 8, 24, BLOCK=8)
        assert torch.equal(y, qkv[1, i])
    with pytest.raises(sanitizer.OutOfBounds, match=r"loads x\[8\].* \[4, 8\]"):
        copy[1,](qkv[:, 0], y, 8, 8, BLOCK=8)


# --- races ------------------------------------------------------------------------------------------------------------


@triton.jit
def store_at(x, stride):
    tl.store(x + tl.program_id(0) * stride + tl.program_id(1), 1.0)


def test_two_programs_that_store_one_element_are_a_race():
    store_at[3, 2](torch.zeros(6), 2)
    with pytest.raises(sanitizer.Race, match=r"program \(1, 0, 0\), .* stores x\[1\], which another program .* stored"):
        store_at[3, 2](torch.zeros(4), 1)


def test_a_load_of_what_another_program_stores_is_a_race():
    """On a GPU, their order is undefined."""
    x = random(18)
    with pytest.raises(sanitizer.Race, match=r"\(1, 0, 0\), lane 0, loads x\[4\], .* stored"):
        copy[4,](x, x[1:], 16, 0, BLOCK=4)
    with pytest.raises(sanitizer.Race, match=r"\(1, 0, 0\), lane 0, stores y\[4\], .* loaded"):
        copy[4,](x, x, 16, 1, BLOCK=4)
    copy[4,](x, x, 16, 0, BLOCK=4)


@triton.jit
def scatter(x, where, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + tl.load(where + i), i.to(tl.float32))


def test_two_lanes_that_store_one_element_are_a_race():
    x = torch.zeros(4)
    scatter[1,](x, torch.tensor([3, 1, 2, 0]), BLOCK=4)
    assert x.tolist() == [3, 1, 2, 0]
    with pytest.raises(sanitizer.Race, match=r"lane 0, stores x\[3\], which another lane of this store"):
        scatter[1,](x, torch.tensor([3, 1, 2, 3]), BLOCK=4)


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


@triton.jit
def convert(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


def converted(x, dtype):
    y = torch.zeros(x.shape, dtype=dtype)
    convert[1,](x, y, BLOCK=x.numel())
    return y


def test_conversions_of_bfloat16_are_those_of_torch():
    """Every bfloat16; midpoints of two, and the float32 beside them; extreme numbers."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    same(converted(x, torch.float32), x.float())
    same(converted(x.float(), torch.bfloat16), x)
    below = torch.arange(0, 0x7F80, 3, dtype=torch.int32)[: 1 << 13] << 16
    x = torch.cat([below + 0x7FFF, below + 0x8000, below + 0x8001, below]).view(torch.float32)
    same(converted(-x, torch.bfloat16), -x.bfloat16())
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 3.3895e38, 1e-45, -0.0])
    same(converted(ends, torch.bfloat16), ends.bfloat16())
    integers = torch.arange(-(1 << 12), 1 << 12, dtype=torch.int32)
    same(converted(integers, torch.bfloat16), integers.bfloat16())


@triton.jit
def multiply(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_adds_in_float32(dtype):
    a, b, c = random(32, 32, dtype=dtype), random(32, 32, dtype=dtype, seed=1), torch.zeros(32, 32)
    with sanitizer.traffic() as t:
        multiply[1,](a, b, c, N=32)
    assert t.flops == 2 * 32**3
    assert (c - a.double() @ b.double()).abs().max() < 1e-5  # bfloat16 sums: 0.1


@triton.jit
def add(x, y):
    tl.store(y, tl.load(x) + tl.load(y))


def test_other_arithmetic_on_bfloat16_is_refused():
    one = torch.ones(1)
    add[1,](one, one)
    assert one == 2
    with pytest.raises(TypeError, match="convert to float32 first"):
        add[1,](one.bfloat16(), one.bfloat16())


# --- traffic ----------------------------------------------------------------------------------------------------------


def test_traffic_counts_loaded_and_stored_bytes():
    """Masked lanes move nothing. Four reads count four times."""
    x, y = random(100), torch.zeros(100, dtype=torch.bfloat16)
    with sanitizer.traffic() as t:
        copy[7,](x, y, 100, 0, BLOCK=16)
    assert t.loaded == {"x": 400} and t.stored == {"y": 200}
    with sanitizer.traffic() as t:
        copy[1,](x[:1].expand(4), y, 4, 0, BLOCK=4, STRIDE=0)
    assert t.loaded["x"] == 4 * 4


# --- the process ------------------------------------------------------------------------------------------------------


@triton.jit
def overflow(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.exp(tl.load(x + i)) - tl.log(tl.load(x + i)))


def test_what_a_gpu_does_silently_does_not_warn():
    x = torch.tensor([300.0, -1.0, 0.0, torch.inf])
    y = torch.zeros(4)
    overflow[1,](x, y, BLOCK=4)
    same(y, x.exp() - x.log())
    with pytest.warns(RuntimeWarning, match="overflow"):  # as before, outside of a launch
        np.float32(1e38) * np.float32(1e38)
