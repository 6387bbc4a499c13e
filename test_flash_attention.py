"""Tests fused attention: results (against float64) and traffic in Triton's interpreter, machine code for two GPUs.

Errors are relative to the result's largest value. The allowed error is 2 e + eps of the dtype + 4 eps of float32. Here
e is the error of plain PyTorch in the same dtype on the same input; e may be 0.

Each of these defects was inserted once and turned a test red (names as in flash_attention.py):

    causal softmax: the mask is off by one
    causal softmax: backward has no scale
    causal softmax: scores above the diagonal are not masked
    causal softmax: gradients above the diagonal are used
    causal softmax: zeros above the diagonal are not written
    forward: the mask is off by one
    dk and dv: the mask is off by one
    dq: the mask is off by one
    dk: no scale
    dq: no scale
    v is read with k's stride
    do is read with q's stride
    the strides of the heads are ignored
    one tile of the grid is not computed
    one tile of queries is not read
    loads have no bound on rows
    loads have no bound on columns
    delta is the sum of o o
    delta is not subtracted
    the sum l is not scaled down to a new maximum
    the result o is not scaled down to a new maximum
    L lacks the row's maximum m
    the softmax does not subtract a maximum
    tiles above the diagonal are computed
    a last stride of more than 1 is ignored
"""

import pytest
import torch

from testing.interpreted import DTYPES, poisoned, random  # noqa: F401  (first: it skips this file without Triton)

# isort: split

import flash_attention
from flash_attention import causal_softmax
from reference import causal_softmax as plain_softmax
from testing import compiled, sanitizer


def attention(qkv):
    return flash_attention.attention(*qkv.unbind(2))


def plain_attention(qkv):
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # [b, a, s, d]
    q = q * qkv.shape[-1] ** -0.5  # before the product, because large scores overflow float16
    return (plain_softmax(q @ k.mT, 1) @ v).transpose(1, 2)


def with_gradient(f, x, dy):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = f(x)
    y.backward(dy)
    return y.detach(), x.grad


def check(fused, plain, x, dy, more=0.0):
    """Compare the result and the gradient of `fused` and `plain` with float64 on the same numbers.

    more: an additional allowed error of `fused`. Returns relative errors [(fused, plain)] of result and gradient.
    """
    exact = with_gradient(plain, x.double(), dy.double())
    errors = []
    for ours, theirs, right in zip(with_gradient(fused, x, dy), with_gradient(plain, x, dy), exact, strict=True):
        assert ours.dtype == x.dtype
        size = right.abs().max() + 1e-30
        error, of_plain = ((y.double() - right).abs().max() / size for y in (ours, theirs))
        errors.append((error.item(), of_plain.item()))
        assert error <= 2 * of_plain + torch.finfo(x.dtype).eps + 4 * torch.finfo(torch.float32).eps + more, errors
    return errors


# --- causal softmax -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s", [1, 7, 40, 128, 131])
def test_causal_softmax(s, dtype):
    x, dy = random(2, s, s, dtype=dtype, size=3), random(2, s, s, dtype=dtype, seed=1)
    check(lambda x: causal_softmax(x, 0.3), lambda x: plain_softmax(x, 0.3), x, dy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_softmax_of_large_scores(dtype):
    x, dy = random(1, 33, 33, dtype=dtype).sign() * 1e4, random(1, 33, 33, dtype=dtype, seed=1)
    x[0, :, 5] += 16
    check(lambda x: causal_softmax(x, 0.125), lambda x: plain_softmax(x, 0.125), x, dy)


def test_causal_softmax_ignores_what_is_above_the_diagonal():
    x, dy = random(2, 20, 20, dtype=torch.float32), random(2, 20, 20, dtype=torch.float32, seed=1)
    above = torch.ones(20, 20, dtype=torch.bool).triu(1)
    clean = with_gradient(lambda x: causal_softmax(x, 1), x, dy)
    x, dy = x.masked_fill(above, torch.nan), dy.masked_fill(above, torch.nan)
    dirty = with_gradient(lambda x: causal_softmax(x, 1), x, dy)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b) and not b[:, above].any()


def test_causal_softmax_traffic():
    """Forward moves 3 and backward 4 bytes per element of [s, s] in bf16, plus the rest of a row's last group of 8."""
    s = 64
    x = random(1, s, s, dtype=torch.bfloat16).requires_grad_()
    read = sum(8 * (i // 8 + 1) for i in range(s))  # s^2/2 + 4s
    with sanitizer.traffic() as t:
        y = causal_softmax(x, 1)
    assert (t.loaded, t.stored) == (2 * read, 2 * s * s)
    with sanitizer.traffic() as t:
        y.backward(random(1, s, s, dtype=torch.bfloat16))
    assert (t.loaded, t.stored) == (4 * read, 2 * s * s)


# --- attention ------------------------------------------------------------------------------------------------------


def of_shape(b, s, a, d, dtype, size=1.0):
    return random(b, s, 3, a, d, dtype=dtype, size=size), random(b, s, a, d, dtype=dtype, seed=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b, s, a", [(2, 1, 3), (2, 33, 3), (1, 128, 2), (1, 301, 2)])
def test_attention(b, s, a, dtype):
    check(attention, plain_attention, *of_shape(b, s, a, 64, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [16, 24, 32, 80, 128])
def test_attention_head_sizes(d, dtype):
    check(attention, plain_attention, *of_shape(1, 150, 1, d, dtype))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_attention_tiles_of_every_gpu(capability, monkeypatch):
    monkeypatch.setattr(flash_attention, "capability", lambda device: capability)
    for d in (64, 128):
        check(attention, plain_attention, *of_shape(1, 200, 1, d, torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_large_scores(dtype):
    """Scores reach 1e4 and -1e4: the softmax is nearly one-hot, and no exp overflows.

    Backward computes the scores again, as k q^T. This product may add in another order than q k^T, depending on the
    library or GPU. Then a score S may differ by one rounding,
    S eps / 2 (eps of float32). This is the relative error of exp(S).
    """
    qkv, do = of_shape(1, 150, 2, 64, dtype)
    qkv[:, :, :2] *= 60
    q, k, _ = qkv.double().unbind(2)
    largest = torch.einsum("bsad, btad -> bast", q, k).div(8).abs().max()
    assert largest > 1e4
    errors = check(attention, plain_attention, qkv, do, more=largest * torch.finfo(torch.float32).eps / 2)
    assert max(ours for ours, _ in errors) < 0.02  # a fixed bound, because plain PyTorch rounds scores to 16 bits


def test_attention_of_views():
    """Attention accepts any strides. It copies q, k and v if the last stride is not 1 or their strides differ."""
    dtype = torch.float16
    whole, do = of_shape(2, 40, 2, 16, dtype)
    expected = with_gradient(attention, whole, do)
    wide = random(2, 40, 3, 2, 50, dtype=dtype)
    wide[..., 7:23] = whole
    turned = whole.permute(2, 3, 1, 0, 4).contiguous().permute(3, 2, 0, 1, 4)  # memory: [3, a, s, b, d]
    last = whole.transpose(1, 4).contiguous().transpose(1, 4)
    for view in (wide[..., 7:23], turned, last):
        assert not view.is_contiguous()
        x = view.detach().requires_grad_()
        y = attention(x)
        y.backward(do.transpose(0, 1).contiguous().transpose(0, 1))
        assert torch.equal(y, expected[0]) and torch.equal(x.grad, expected[1])


def test_attention_twice_is_equal_to_the_bit():
    x, do = of_shape(1, 150, 2, 32, torch.bfloat16)
    for a, b in zip(with_gradient(attention, x, do), with_gradient(attention, x, do), strict=True):
        assert torch.equal(a, b)


def test_attention_refuses_heads_it_has_no_tiles_for():
    with pytest.raises(ValueError, match="head size 160"):
        attention(torch.zeros(1, 4, 3, 1, 160))


def test_attention_looks_at_no_later_token():
    """Changes after token 100 change no bit of the results before."""
    x, _ = of_shape(1, 150, 1, 16, torch.float16)
    y = attention(x)[:, :100]
    x[:, 100:] = 7
    assert torch.equal(attention(x)[:, :100], y)


def test_attention_work_and_traffic():
    """No tile above the diagonal is computed. Each launch stores its results once and reads the expected tensors."""
    b, s, a, d = 1, 512, 2, 64
    x, do = of_shape(b, s, a, d, torch.bfloat16)
    options = flash_attention.attention_options(d, torch.bfloat16, flash_attention.capability(x.device))
    seen = []
    original = flash_attention.launch

    def launch(kernel, *arguments):
        original(kernel, *arguments)
        seen.append((sanitizer.last.flops, sanitizer.last.stored, sanitizer.last.loaded_unique))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention, "launch", launch)
        with_gradient(attention, x, do)
    product = 2 * s * s * d * a // 2  # FLOP of one product's causal half
    n = b * s * a * d  # elements of o
    rows = b * a * s * 4  # bytes of L, or of delta
    tile = {which: max(options[which]["ROWS"], options[which]["COLUMNS"]) for which in ("forward", "keys", "queries")}
    assert seen == [
        (2 * product * (s + tile["forward"]) // s, 2 * n + rows, 6 * n),
        (0, rows, 4 * n),
        (4 * product * (s + tile["keys"]) // s, 4 * n, 8 * n + 2 * rows),
        (3 * product * (s + tile["queries"]) // s, 2 * n, 8 * n + 2 * rows),
    ]


# --- machine code ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [80, 90])
def test_compiled(arch):
    """No spills; registers and shared memory within the limits; 16-byte loads, tensor cores, async copies."""
    if not compiled.tool("cuobjdump").exists():
        pytest.skip("this version of Triton has no disassemblers")
    table, jobs = flash_attention.configurations((arch // 10, 0)), []
    for _, kernel, types, options in table:
        launch = {key: options[key] for key in ("num_warps", "num_stages") if key in options}
        constants = {key: value for key, value in options.items() if key not in launch}
        jobs.append((f"flash_attention:{kernel.__name__}", types, constants, arch, launch))
    for (name, *_), r in zip(table, compiled.reports(jobs), strict=True):
        small = "softmax" in name or "delta" in name
        assert r.spills == r.stack == 0 and r.registers <= (64 if small else 255), (name, r)
        if small:
            assert r.loads == r.wide_loads > 0, (name, r)
        else:
            assert r.wide_loads > 0 and r.async_copies > 0 and (r.hgmma if arch == 90 else r.hmma) > 0, (name, r)
        assert r.shared <= (227 if arch == 90 else 99) * 1024, (name, r)
