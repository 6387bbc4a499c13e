"""testing/sanitizer.py finds each kind of defect in a small kernel, and accepts correct ones."""

import pytest
import torch

import testing.interpreted  # noqa: F401  (first: it skips this file without Triton)

# isort: split

import triton
import triton.language as tl

from testing import sanitizer
from testing.cases import random
from testing.sanitizer import OutOfBounds, Race


@triton.jit
def copy(x, y, n, offset, BLOCK: tl.constexpr, WRAP_X: tl.constexpr = 1 << 30, WRAP_Y: tl.constexpr = 1 << 30):
    """y[i % WRAP_Y] = x[i % WRAP_X + offset] for i < n"""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i % WRAP_Y, tl.load(x + i % WRAP_X + offset, mask=i < n).to(y.dtype.element_ty), mask=i < n)


NUMBERS, QKV, ROW = random(37), random(4, 3, 8), torch.zeros(8)
DEFECTS = {  # name: (arguments of `copy`, its options, error, the error's words)
    "a load": ((NUMBERS, torch.zeros(37), 37, 1), {}, OutOfBounds, r"\(2, 0, 0\), lane 4, loads x\[37\]"),
    "a load before": ((NUMBERS, torch.zeros(37), 37, -1), {}, OutOfBounds, r"\(0, 0, 0\), lane 0, loads x\[-1\]"),
    "far away": ((NUMBERS, torch.zeros(37), 37, 1 << 40), {}, OutOfBounds, r"lane 0, loads x\[1099511627776\]"),
    "a store": ((NUMBERS, torch.zeros(31), 32, 0), {}, OutOfBounds, r"stores y\[31\]"),
    "another argument": ((NUMBERS[:16], NUMBERS[16:], 16, 1), {}, OutOfBounds, r"loads x\[16\]"),
    "between a view's rows": ((QKV[:, 0], ROW, 8, 8), dict(BLOCK=8), OutOfBounds, r"loads x\[8\].* \[4, 8\]"),
    "stores of two programs": (
        (NUMBERS, torch.zeros(8), 16, 0),
        dict(BLOCK=8, WRAP_Y=8),
        Race,
        r"y\[0\], .*program .*stored",
    ),
    "stores of two lanes": (
        (NUMBERS, torch.zeros(8), 16, 0),
        dict(WRAP_Y=8),
        Race,
        r"y\[0\], which another lane of this store",
    ),
    "a load after a store": ((NUMBERS, NUMBERS[1:], 16, 0), dict(BLOCK=4), Race, r"\(1, 0, 0\), .*x\[4\], .*stored"),
    "a store after a load": ((NUMBERS, NUMBERS, 16, 1), dict(BLOCK=4), Race, r"\(1, 0, 0\), .*y\[4\], .*loaded"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_named(name):
    arguments, options, error, words = DEFECTS[name]
    options = dict(BLOCK=16) | options
    with pytest.raises(error, match=words):
        copy[triton.cdiv(arguments[2], options["BLOCK"]),](*arguments, **options)


def test_a_right_kernel_is_accepted_and_its_bytes_are_counted():
    """Masked lanes move nothing, and four loads of one element count four times."""
    y = torch.zeros(37, dtype=torch.bfloat16)
    with sanitizer.traffic() as t:
        copy[3,](NUMBERS, y, 37, 0, BLOCK=16)
    assert torch.equal(NUMBERS.bfloat16(), y) and t.loaded == {"x": 4 * 37} and t.stored == {"y": 2 * 37}
    with sanitizer.traffic() as t:
        copy[1,](NUMBERS, y, 4, 0, BLOCK=4, WRAP_X=1)
    assert t.loaded["x"] == 4 * 4
    x = NUMBERS.clone()
    copy[4,](x, x, 16, 0, BLOCK=4)  # each program in its own place
    copy[1,](QKV[:, 1], ROW, 8, 24, BLOCK=8)
    assert torch.equal(x, NUMBERS) and torch.equal(ROW, QKV[1, 1])


# --- bfloat16 -------------------------------------------------------------------------------------


def converted(x, dtype):
    y = torch.zeros(x.shape, dtype=dtype)
    copy[1,](x, y, len(x), 0, BLOCK=triton.next_power_of_2(len(x)))
    return y


def test_conversions_of_bfloat16_are_those_of_torch():
    """Every bfloat16; midpoints of two, and the float32 beside them; extreme numbers; integers."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    below = torch.arange(0, 0x7F80, 3, dtype=torch.int32)[: 1 << 13] << 16
    near = torch.cat([below + 0x7FFF, below + 0x8000, below + 0x8001, below]).view(torch.float32)
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 3.3895e38, 1e-45, -0.0])
    integers = torch.arange(-(1 << 12), 1 << 12, dtype=torch.int32)
    for x in (every, every.float(), -near, ends, integers):
        dtype = torch.float32 if x is every else torch.bfloat16
        y, right = converted(x, dtype), x.to(dtype)
        assert torch.equal(y.isnan(), right.isnan()) and torch.equal(y.nan_to_num(0), right.nan_to_num(0))


@triton.jit
def add(x, y):
    tl.store(y, tl.load(x) + tl.load(y))


def test_other_arithmetic_on_bfloat16_is_refused():
    one = torch.ones(1)
    add[1,](one, one)
    assert one == 2
    with pytest.raises(TypeError, match="convert to float32 first"):
        add[1,](one.bfloat16(), one.bfloat16())
