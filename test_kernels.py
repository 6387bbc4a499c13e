"""Tests the Triton kernels without a GPU: results compared with reference.py in float64, memory traffic, machine code.

The interpreter of testing/sanitizer.py turns every race and every access out of bounds into an error. Errors are
relative to the result's largest value. The allowed error is 2 e + eps of the dtype + 8 eps of float32. Here e is the
error of plain PyTorch in the same dtype on the same input; e may be 0. test_flash_attention.py tests attention.

Each of these defects was inserted once and turned a test red:

    LayerNorm: the variance includes elements beyond the row's end
    LayerNorm: backward lacks one of its two sums over the row
    LayerNorm: mean and variance are computed before the sum is rounded
    LayerNorm: the last row is not computed
    bias gradient: it includes one row only
    bias gradient: one partial sum is missing
    dropout: backward omits 1 / (1 - rate)
    dropout: the hash has one shift less
    GELU: the derivative lacks its factor 2
    cross-entropy: the column mask is off by one
    cross-entropy: the sum is not scaled down to a new maximum
    cross-entropy: the gradient lacks its weight
    cross-entropy: the target is compared with the column's place in the block
    cross-entropy: the row stride is the number of real columns
    cross-entropy: a row uses another row's weight
    cross-entropy: loads are masked by the real columns (the compiler makes narrow loads)
    AdamW: the gradient is loaded twice (the traffic grows)
    AdamW: one of two ranges does not decay
    AdamW: v has no bias correction
    squared norm: the last block has no mask
    join: the rows' stride is ignored, or the stride of the columns
    join: one partial sum is missing
    embedding: only the first TALL rows of an id are added
    embedding: the rows are not in the sorted order
    embedding: the rows of the next id are added, too
    embedding: an id's rows are added by every program
    embedding: ids of other ranks are not skipped, below or above the table
    embedding: each stripe of columns begins at column 0
    launches: cross-entropy with 8 warps a row, squared norm with blocks of 1024, join with 4 programs
    launches: LayerNorm's backward starts too few programs, too many, or does not load rows ahead
    launches: GELU's backward starts more programs than fit
    attention: another order of PyTorch's forms, the order is not used, a wrong name
    the product of 16-bit factors is not chosen before the first step

This defect is not found: row offsets in int32. They overflow from 2^31 elements on, which need too much memory here.
"""

import functools

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from testing.interpreted import DTYPES, poisoned, random  # noqa: F401  (first: it skips this file without Triton)

# isort: split

import kernels
import reference
import train
from operations import attention_name, choose, trial
from parallel.mesh import Mesh, everyone
from parallel.tensor import LinearCrossEntropy
from reference import Drop
from test_layouts import micro_batches, tiny_config
from testing import compiled, sanitizer


def results(f, inputs, wanted=None):
    """Return (outputs of f and gradients of its inputs, seeds).

    seeds: the gradients of the outputs, equal to `wanted`, or random if `wanted` is None.
    """
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = f(*(x.clone() for x in inputs))  # f may overwrite its inputs
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    seeds = [random(*y.shape, dtype=y.dtype, seed=90 + i) for i, y in enumerate(outputs)] if wanted is None else wanted
    torch.autograd.backward(outputs, seeds)
    return [y.detach() for y in outputs] + [x.grad for x in inputs], seeds


def check(name, inputs, *rest):
    """Compare kernels.name and reference.name with reference.name in float64, all on the same inputs."""
    fused, plain = (lambda *x, ops=ops: getattr(ops, name)(*x, *rest) for ops in (kernels, reference))
    ours, seeds = results(fused, inputs)
    theirs, _ = results(plain, inputs, seeds)
    exact, _ = results(plain, [x.double() for x in inputs], [x.double() for x in seeds])
    dtype = inputs[0].dtype
    for i, (a, b, right) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert a.dtype == dtype
        size = right.abs().max() + 1e-30
        error, of_plain = ((x.double() - right).abs().max() / size for x in (a, b))
        assert error <= 2 * of_plain + torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps, (i, error, of_plain)


# --- LayerNorm, bias, dropout, residual -------------------------------------------------------------------------------

SIZES = [(1, 16), (5, 37), (3, 130), (2, 1024)]  # one row; odd width; no power of two; the 345M model's width


def dropping(n, rate=0.3):
    return Drop(torch.arange(n) * 3 + 2**40, rate, 1234, 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, h", SIZES)
def test_layer_norm(n, h, dtype):
    check("layer_norm", [random(n, h, dtype=dtype), *(random(h, dtype=dtype, seed=i) for i in (1, 2))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("n, h", SIZES)
def test_add_and_add_layer_norm(n, h, dropped, dtype):
    x, y = (random(n, h, dtype=dtype, seed=i) for i in (1, 2))
    vectors = [random(h, dtype=dtype, seed=i) for i in (3, 4, 5)]
    drop = dropping(n) if dropped else None
    check("add_", [y, x, vectors[0]], drop)
    check("add_layer_norm_", [y, x, *vectors], drop)


def test_the_norm_is_that_of_the_rounded_sum():
    """Forward must normalize the rounded sum, as backward does. Above 256, bfloat16 has even integers only."""
    x, y = random(4, 64, dtype=torch.bfloat16) + 256, random(4, 64, dtype=torch.bfloat16, seed=1)
    z, out = kernels.add_layer_norm_(y, x, y[0] * 0, torch.ones(64).bfloat16(), torch.zeros(64).bfloat16())
    exact = torch.nn.functional.layer_norm(z.double(), [64], eps=1e-5)
    assert torch.allclose(out.double(), exact, rtol=0.01, atol=0.01)


def with_nothing_added(ops):
    return lambda x, *vectors: ops.add_layer_norm_(None, x, None, *vectors)


@pytest.mark.parametrize("n, h", SIZES)
def test_the_gradient_past_a_norm(n, h):
    inputs = [random(n, h), *(random(h, seed=i) for i in (1, 2))]
    ours, seeds = results(with_nothing_added(kernels), inputs)
    exact, _ = results(with_nothing_added(reference), [x.double() for x in inputs], [x.double() for x in seeds])
    for a, b in zip(ours, exact, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm_"])
def test_layer_norm_of_extreme_rows(name):
    """Three rows: far from 0, where mean(x^2) - mean(x)^2 loses all digits; all equal; all but one equal."""
    x = random(3, 64)
    x[0] += 1e4
    x[1] = 7.0
    x[2] = 0.0
    x[2, 9] = 1e4
    vectors = [random(64, seed=i) for i in (3, 4)]
    check(name, [x, *vectors] if name == "layer_norm" else [x * 0, x, vectors[0] * 0, *vectors])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropped", [False, True])
def test_rows_wider_than_the_norms_kernels(dropped, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "WIDEST", 36)
    x, y = (random(5, 37, dtype=dtype, seed=i) for i in (1, 2))
    vectors = [random(37, dtype=dtype, seed=i) for i in (3, 4, 5)]
    drop = dropping(5) if dropped else None
    check("layer_norm", [x, *vectors[1:]])
    check("add_layer_norm_", [y, x, *vectors], drop)
    out = kernels.add_layer_norm_(y.requires_grad_(), x, *vectors, drop)[1]
    assert out.grad_fn.name() == "NativeLayerNormBackward0"


def test_only_one_of_two_results_is_used():
    inputs = [random(4, 32, seed=1), random(4, 32, seed=2), *(random(32, seed=i) for i in (3, 4, 5))]
    for which in (0, 1):
        got, _ = results(lambda *x, which=which: kernels.add_layer_norm_(*x)[which], inputs)
        right, _ = results(lambda *x, which=which: reference.add_layer_norm_(*x)[which], inputs)
        for a, b in zip(got, right, strict=True):
            assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-5, atol=1e-5)


# --- GELU and ReLU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, h", [(1, 8), (5, 37), (17, 300), (8, 4096)])
@pytest.mark.parametrize("name", ["gelu_", "relu_"])
def test_activations(name, n, h, dtype):
    check(name, [random(n, h, dtype=dtype, size=2), random(h, dtype=dtype, seed=1)])


@pytest.mark.parametrize("name", ["gelu_", "relu_"])
def test_activations_of_large_numbers(name):
    check(name, [torch.tensor([[-1e4, -60.0, -10.0, -5.0, 0.0, 5.0, 10.0, 60.0, 1e4]]), torch.zeros(9)])


def test_relu_does_not_hide_a_nan():
    """Training skips an update whose gradient has an inf or nan. So nan must pass through, as in PyTorch."""
    y = torch.tensor([[torch.nan, -torch.inf, torch.inf, -0.0]]).requires_grad_()
    out = kernels.relu_(y, torch.zeros(4))
    (dy,) = torch.autograd.grad(out, y, torch.tensor([[1.0, 1.0, torch.nan, 1.0]]))
    assert out.isnan().tolist() == [[True, False, False, False]] and out[0, 1:].tolist() == [0, torch.inf, 0]
    assert dy.isnan().tolist() == [[False, False, True, False]] and dy[0, [0, 1, 3]].tolist() == [1, 0, 0]


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_masks_are_the_references_bit_for_bit():
    for rate, seed, site in [(0.1, 1234, 0), (0.5, 0, 3), (0.9, 2**31, 47), (0.001, 7, 1)]:
        rows = torch.cat([torch.arange(5), torch.arange(3) + 2**31 - 1, torch.arange(3) + 10**12])
        drop = Drop(rows, rate, seed, site)
        assert torch.equal(kernels.dropout_mask(300, drop), reference.dropout_mask(300, drop)), drop[1:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout(dtype):
    check("dropout", [random(4, 130, dtype=dtype)], dropping(4))
    x = random(2, 2)
    assert kernels.dropout(x) is x


# --- gradients of qkv and of the embedding's tables -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, widths, count", [(1, (8,), 1), (37, (300,), 3), (40, (2, 64), 3)])
def test_join(n, widths, count, dtype):
    """The parts are columns of one tensor, as from flash_attention.py, or contiguous, as from PyTorch's attention."""
    whole = random(n, count, *widths, dtype=dtype)
    views = [x.flatten(1) for x in whole.unbind(1)]
    for parts in (views, [x.clone() for x in views], [x.T.contiguous().T for x in views]):
        joined, sums = kernels.join(parts)
        right, exact = reference.join([x.double() for x in parts])
        assert joined.dtype == dtype and sums.dtype == torch.float32 and torch.equal(joined.double(), right)
        assert torch.allclose(sums.double(), exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, v, width", [(1, 3, 8), (5, 3, 37), (130, 11, 300), (70, 1, 256)])
def test_add_rows(n, v, width, dtype):
    """Some ids are outside of the table, because other ranks have their rows. Two runs give the same bits."""
    ids = torch.randint(-2, v + 2, (n,), generator=torch.Generator().manual_seed(n))
    ids[: n // 2] = v - 1  # a frequent word, more rows than a program adds at a time
    rows, tables = random(n, width, dtype=dtype), [random(v, width, seed=1) for _ in range(2)]
    exact = tables[0].double()
    reference.add_rows_(exact, ids, rows.double())
    for table in tables:
        kernels.add_rows_(table, ids, rows)
        assert torch.allclose(table.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(*tables)


# --- cross-entropy ----------------------------------------------------------------------------------------------------


def check_cross_entropy(logits, targets, columns, reduce=None):
    """Compare losses and gradients. Each row has a different weight."""
    dtype, weights = logits.dtype, torch.tensor([0.5, 0.0, -0.25, 0.125, 0.0625])[: len(logits)]
    exact, plain, ours = logits.double(), logits.clone(), logits.clone()
    right = reference.cross_entropy_(exact, targets, columns, weights.double())
    reference.cross_entropy_(plain, targets, columns, weights)
    losses = kernels.cross_entropy_(ours, targets, columns, weights, reduce)
    assert losses.dtype == torch.float32 and torch.allclose(losses.double(), right, rtol=1e-6, atol=2e-6)
    error, of_plain = ((z.double() - exact).abs().max() for z in (ours, plain))
    assert error <= 2 * of_plain + torch.finfo(dtype).eps / 4 and not ours[:, columns:].any(), (error, of_plain)
    unchanged = logits.clone()
    assert torch.equal(kernels.cross_entropy_(unchanged, targets, columns, None, reduce), losses)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", [None, lambda x, op: x], ids=["one pass", "two passes"])
@pytest.mark.parametrize("n, columns, width", [(1, 3, 128), (5, 130, 256), (3, 4097, 4224), (2, 50257, 50304)])
def test_cross_entropy(n, columns, width, reduce, dtype):
    logits = random(n, width, dtype=dtype, size=4)
    logits[:, columns:] = 6e4  # padding must not change the result
    check_cross_entropy(logits, torch.tensor([0, columns - 1, 1, 2, 0][:n]), columns, reduce)


@pytest.mark.parametrize("reduce", [None, lambda x, op: x], ids=["one pass", "two passes"])
def test_cross_entropy_of_extreme_logits(reduce):
    logits = random(4, 5120, size=3)  # two blocks, the second is not full
    logits[0], logits[1], logits[2, 4500] = -1e4, 1e4, 1e4
    logits[3] = -torch.inf  # all masked, except one
    logits[3, 17] = 0.5
    check_cross_entropy(logits, torch.tensor([0, 7, 5, 17]), 5000, reduce)


@pytest.mark.parametrize("reduce", [None, lambda x, op: x], ids=["one pass", "two passes"])
def test_cross_entropy_of_weights_that_are_one_number(reduce):
    """The gradient of losses.sum() is one expanded number with stride 0, so the weights are not contiguous."""
    logits, targets = random(3, 128), torch.tensor([5, 6, 7])
    expanded, written = logits.clone(), logits.clone()
    kernels.cross_entropy_(expanded, targets, 100, torch.tensor(0.3).expand(3), reduce)
    kernels.cross_entropy_(written, targets, 100, torch.full((3,), 0.3), reduce)
    assert torch.equal(expanded, written) and expanded.any(1).all()


def check_linear_cross_entropy(columns, n):
    """Cut the word table over tp as the model does. A rank may have padding columns only."""
    sanitizer.install()
    tp = Mesh(tp=everyone().size).tp
    x, table = random(n, 24), random(256, 24, seed=1, size=0.5)
    shard = 256 // tp.size
    targets = torch.tensor([0, shard - 1, shard, columns - 1, *range(n - 4)]).clamp(max=columns - 1)
    whole, w = x.double().requires_grad_(), table[:columns].double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(whole @ w.T, targets, reduction="none")
    losses.backward(torch.full_like(losses, 0.3))
    x.requires_grad_()
    ours = torch.nn.Parameter(table.chunk(tp.size)[tp.rank].clone())
    ours.grad = torch.zeros_like(ours)
    out = LinearCrossEntropy.apply(x, ours, targets, columns, "copy", tp, kernels)
    out.backward(torch.full_like(out, 0.3))
    right = torch.nn.functional.pad(w.grad, (0, 0, 0, 256 - columns)).chunk(tp.size)[tp.rank]
    for a, b in [(out, losses), (x.grad, whole.grad), (ours.grad, right)]:
        assert torch.allclose(a.double(), b, rtol=1e-5, atol=1e-6), (a - b).abs().max()


@pytest.mark.parametrize("tp, columns", [(1, 250), (2, 200), (4, 180)])
def test_linear_cross_entropy_cut_over_ranks(workers, tp, columns):
    workers.check(tp, check_linear_cross_entropy, columns, 6)


# --- the end of a step ------------------------------------------------------------------------------------------------

RANGES = [(0, 512, True), (512, 640, False), (640, 1040, True), (1040, 1056, False)]


def scalars(skip=False):
    lr, scale = (torch.tensor(x, dtype=torch.float64) for x in (1e-2, 0.25))
    return reference.update_scalars(lr, scale, torch.tensor(3), torch.tensor(skip), 0.9, 0.99)


def buffers(size):
    return [random(size, seed=i) for i in range(3)] + [random(size, seed=3) ** 2]  # weight, gradient, m, v


@pytest.mark.parametrize("out", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranges", [RANGES, [(0, 16, True)], [(0, 2000, False)]], ids=len)
def test_adamw(ranges, out):
    options = dict(decay=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
    ours = buffers(ranges[-1][1])
    exact = [x.double() for x in ours]
    cast = None if out is None else torch.full_like(ours[0], torch.nan, dtype=out)
    kernels.adamw_(ours[0], ours[1], ours[2:], scalars(), ranges, out=cast, **options)
    reference.adamw_(exact[0], exact[1], exact[2:], scalars(), ranges, **options)
    for i in (0, 2, 3):
        assert torch.allclose(ours[i].double(), exact[i], rtol=2e-6, atol=3e-7)
    assert out is None or torch.equal(cast, ours[0].to(out))


def test_a_skipped_adamw_touches_nothing():
    ours = buffers(1056)
    before = [x.clone() for x in ours]
    ours[1][5], cast = torch.nan, torch.ones(1056, dtype=torch.bfloat16)
    kernels.adamw_(
        ours[0], ours[1], ours[2:], scalars(skip=True), RANGES, decay=0.1, beta1=0.9, beta2=0.99, eps=1e-8, out=cast
    )
    assert all(torch.equal(ours[i], before[i]) for i in (0, 2, 3)) and (cast == 1).all()


def test_squared_norms():
    flats = [random(size, seed=size) for size in (1, 16, 1024, 5003)]
    exact = reference.squared_norms([flat.double() for flat in flats])
    assert torch.allclose(kernels.squared_norms(flats), exact, rtol=1e-6)
    for bad in (torch.inf, torch.nan):
        flats[3][4999] = bad
        assert kernels.squared_norms(flats).isfinite().tolist() == [True, True, True, False]


# --- traffic ----------------------------------------------------------------------------------------------------------


def test_bytes_per_element_are_the_floors():
    """Count the bytes of bf16 activations, without the small tensors (vectors of h or n, partial sums)."""
    n, h = 8, 256
    x, y, dy, dz = (random(n, h, dtype=torch.bfloat16, seed=i) for i in range(4))
    bias, weight, norm_bias = (random(h, dtype=torch.bfloat16, seed=i) for i in range(4, 7))

    def per_element(t, *names, elements=n * h):
        """Return bytes (loaded, stored) per element of the named arguments. Each element must move only once."""
        moved = [t.by_argument[name] for name in names]
        assert t.launches == 1 and all(m.loaded == m.loaded_unique and m.stored == m.stored_unique for m in moved)
        return sum(m.loaded for m in moved) / elements, sum(m.stored for m in moved) / elements

    for drop, dropped in ((None, 0), (dropping(n), 2)):
        inputs = [t.clone().requires_grad_() for t in (y, x, bias, weight, norm_bias)]
        with sanitizer.traffic() as t:
            z, out = kernels.add_layer_norm_(*inputs, drop)
        assert per_element(t, "X", "Y", "Z", "OUT") == (4, 4)
        with sanitizer.traffic() as t:
            torch.autograd.backward([z, out], [dz, dy])
        assert per_element(t, *["DZ", "DOUT", "Z", "DX"] + ["DY"] * bool(drop)) == (6, 2 + dropped)
        with sanitizer.traffic() as t:
            z = kernels.add_(*inputs[:3], drop)
        assert per_element(t, "X", "Y", "Z") == (4, 2)
        with sanitizer.traffic() as t:
            z.backward(dz)
        assert per_element(t, *["DZ"] + ["DY"] * bool(drop)) == (2, dropped)
    for activation in (kernels.gelu_, kernels.relu_):
        inputs = [t.clone().requires_grad_() for t in (x, bias)]
        with sanitizer.traffic() as t:
            out = activation(*inputs)
        assert per_element(t, "Y", "OUT") == (2, 2)
        with sanitizer.traffic() as t:
            out.backward(dy)
        assert per_element(t, "DOUT", "KEPT", "DY") == (4, 2)
    with sanitizer.traffic() as t:
        kernels.join([x])
    assert per_element(t, "X", "WHOLE") == (2, 2)
    with sanitizer.traffic() as t:
        kernels.add_rows_(torch.zeros(2, h), torch.tensor([0] * (n - 1) + [5]), x)  # one row of `x` is another rank's
    assert per_element(t, "ROWS", elements=(n - 1) * h) == (2, 0) and per_element(t, "TABLE", elements=h) == (4, 4)


def test_bytes_per_logit_are_the_floors():
    """4 bytes a logit: the second read of a row is from the cache. With tp, it may be from memory: 6 bytes."""
    logits, targets, weights = random(3, 8192, dtype=torch.bfloat16), torch.tensor([1, 2, 3]), torch.full((3,), 0.1)
    with sanitizer.traffic() as t:
        kernels.cross_entropy_(logits, targets, 8000, weights)
    row = 2 * logits.numel()
    z = t.by_argument["Z"]
    assert (z.loaded_unique, z.stored, z.loaded) == (row, row, 2 * row + 3 * 2)  # plus the target's logit
    assert t.loaded == z.loaded + 3 * (8 + 4) and t.stored == z.stored + 3 * 4  # target and weight; loss
    with sanitizer.traffic() as t:
        kernels.cross_entropy_(logits, targets, 8000, weights, lambda x, op: x)
    z = t.by_argument["Z"]
    assert (z.loaded, z.stored) == (2 * row + 3 * 2, row) and t.by_argument["WEIGHTS"].loaded == 3 * 4
    with sanitizer.traffic() as t:
        kernels.cross_entropy_(logits, targets, 8000)
    assert (t.loaded, t.stored) == (row + 3 * (2 + 8), 3 * 4)  # no gradient: one pass writes only losses


def test_bytes_per_parameter_are_the_floors():
    ours, out = buffers(2048), torch.zeros(2048, dtype=torch.bfloat16)
    with sanitizer.traffic() as t:
        kernels.adamw_(
            *ours[:2], ours[2:], scalars(), [(0, 2048, True)], decay=0.1, beta1=0.9, beta2=0.99, eps=1e-8, out=out
        )
    flat = [t.by_argument[name] for name in ("W", "G", "M", "V", "OUT")]
    assert sum(b.loaded for b in flat) == 16 * 2048 and sum(b.stored for b in flat) == 14 * 2048
    with sanitizer.traffic() as t:
        kernels.squared_norms(ours[:1])
    assert t.by_argument["X"].loaded == 4 * 2048 and t.stored == 4 * 2  # plus one float32 of each program


# --- machine code -----------------------------------------------------------------------------------------------------


def configurations(widths=(768, 1024), b="*bf16"):
    """Return {name: (kernel, types of non-constant arguments, constants, options, maximum of registers)}.

    widths: of the rows; b: type of a pointer to them.
    """
    table = {}

    def add(name, kernel, types, most, options, **constants):
        options = dict(options)
        launch = {key: options.pop(key) for key in ("num_warps",)}
        table[name] = f"kernels:{kernel}", types, constants | options, launch, most

    for h in widths:
        row, rest = kernels.one_row(h), "i32 i64 i32 fp32"
        both = dict(ADD=True, NORM=True)
        forward, backward = f"{b} {b} {b} {b} {b} {b} {b} *fp32 *fp32", f"{b} {b} {b} {b} *fp32 *fp32 {b} {b} *fp32"
        add(f"add_layer_norm {h}", "residual_forward", f"{forward} {rest}", 40, row, ROWS=None, DROP=False, **both)
        add(f"... dropped {h}", "residual_forward", f"{forward} *i64 {rest}", 40, row, DROP=True, **both)
        both |= dict(PAST=True)
        add(f"its backward {h}", "residual_backward", f"{backward} i32 {rest}", 80, row, ROWS=None, DROP=False, **both)
        add(f"its dropped {h}", "residual_backward", f"{backward} *i64 i32 {rest}", 80, row, DROP=True, **both)
        none = dict.fromkeys(["DOUT", "Z", "WEIGHT", "MEAN", "R", "DX", "ROWS"])
        parts = dict(PAST=True, ADD=True, NORM=False, DROP=False)
        add(f"add backward {h}", "residual_backward", f"{b} {b} *fp32 i32 {rest}", 40, row, **none, **parts)
    for name in ("gelu", "relu"):
        tile, relu = kernels.TILE, dict(RELU=name == "relu")
        add(name, "activation_forward", f"{b} {b} {b} i32 i32", 40, tile, **relu)
        add(f"{name} backward", "activation_backward", f"{b} {b} {b} {b} *fp32 i32 i32", 80, tile, **relu)
    options = kernels.CROSS_ENTROPY  # i32:1: 50257 real columns, not divisible by 16
    add("cross-entropy", "cross_entropy_whole", f"{b} *i64 *fp32 *fp32 i32:1 i32", 32, options, GRADIENT=True)
    add("statistics", "cross_entropy_statistics", f"{b} *i64 *fp32 *fp32 *fp32 i32:1 i32", 32, options)
    add("gradient", "cross_entropy_gradient", f"{b} *i64 *fp32 *fp32 *fp32 i32:1 i32", 32, options)
    types = "*fp32 *fp32 *fp32 *fp32 *bf16 *fp64 *fp64 *fp64 *fp64 *i1 i32 i32 i32 i32 i32 fp32 fp32 fp32 fp32"
    add("adamw", "adamw_flat", types, 64, kernels.ADAMW, CAST=True)
    add("squared norm", "squared_norm", "*fp32 *fp32 i32", 40, kernels.SQUARED_NORM)
    add("join", "join_part", f"{b} {b} *fp32 i32 i32 i32 i32", 32, kernels.TILE)
    add("add_rows", "add_rows", f"*fp32 *i64 *i64 {b} i32 i32 i32", 128, kernels.ADD_ROWS)
    return table


WIDE = {  # a thread needs at least these (loads, stores) of 16 bytes: each moves 8 bf16 or 4 float32
    "add_layer_norm": (2, 2), "... dropped": (2, 2), "its backward": (7, 7), "its dropped": (7, 8),
    "add backward": (2, 2), "gelu": (1, 1), "gelu backward": (2, 1), "relu": (1, 1), "relu backward": (2, 1),
    "cross-entropy": (2, 1), "statistics": (1, 0), "gradient": (1, 1), "adamw": (8, 7), "squared norm": (4, 0),
    "join": (1, 1), "add_rows": (8, 0),
}  # fmt: skip
# Little's law: to read B bytes a second from a memory that answers after T seconds, B T bytes must be requested at any
# time. B / multiprocessors of an A100 (2.0 TB/s, 108) and an H200 (4.8 TB/s, 132), T = 0.7 microseconds (assumed).
ENOUGH = {80: 13_000, 90: 25_500}
AT_ONCE = {  # bytes that a program requests at once. The rows of 1024 bf16 have 2 KB, and a tile has 4 KB.
    "add_layer_norm 1024": 2 * 2048, "its backward 1024": 3 * 2048, "its dropped 1024": 3 * 2048,
    "add backward 1024": 5 * 2048, "gelu": 4096, "relu": 4096, "gelu backward": 2 * 4096, "relu backward": 2 * 4096,
    "cross-entropy": 2 * 8192, "statistics": 2 * 8192, "gradient": 2 * 8192, "adamw": 4 * 4096,
    "squared norm": 4 * 4096, "join": 4096, "add_rows": 32 * 512,
}  # fmt: skip
L2 = {80: (108, 40e6), 90: (132, 50e6)}  # multiprocessors, bytes of the L2 cache


def started():
    """Return {name: the number of programs that a persistent kernel starts on each multiprocessor}, for h = 1024."""
    x, vector = random(2, 1024).requires_grad_(), random(1024)
    runs = {
        "its backward 1024": lambda: kernels.add_layer_norm_(x, x, *[vector] * 3)[1].sum().backward(),
        "add backward 1024": lambda: kernels.add_(x, x, vector).sum().backward(),
        "gelu backward": lambda: kernels.gelu_(x, vector).sum().backward(),
        "relu backward": lambda: kernels.relu_(x, vector).sum().backward(),
        "squared norm": lambda: kernels.squared_norms([x]),
        "join": lambda: kernels.join([x]),
    }
    table = {}
    for name, run in runs.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "persistent", lambda x, each=4, name=name: table.setdefault(name, each) and 2)
            run()
    return table | {"its dropped 1024": table["its backward 1024"]}


@pytest.mark.parametrize("arch", [80, 90])
def test_compiled(arch):
    """No kernel spills or exceeds its maximum of registers. Activations are loaded and stored 16 bytes at a time.

    All programs of a persistent kernel run at once, and enough bytes are requested for the full bandwidth.
    """
    if not compiled.tool("cuobjdump").exists():
        pytest.skip("this version of Triton has no disassemblers")
    table, starts = configurations(), started()
    jobs = [(kernel, types, constants, arch, options) for kernel, types, constants, options, _ in table.values()]
    for (name, (*_, options, most)), r in zip(table.items(), compiled.reports(jobs), strict=True):
        loads, stores = WIDE[name.rstrip("0123456789 ")]
        assert r.spills == 0 and r.stack == 0 and r.registers <= most, (name, r)
        assert r.wide_loads + r.wide_async_copies >= loads and r.wide_stores >= stores, (name, r)
        assert r.narrow_stores == 0 and r.narrow_loads <= 1, (name, r)
        fit = r.programs(options["num_warps"], arch)
        assert fit >= starts.get(name, 1), (name, "programs wait for others", r)
        if name in AT_ONCE:
            assert starts.get(name, fit) * AT_ONCE[name] >= ENOUGH[arch], (name, "too few bytes are requested", r)
        if name == "cross-entropy":  # its second pass shall find the rows in the cache
            multiprocessors, cache = L2[arch]
            assert fit * multiprocessors * 2 * 50304 < 0.6 * cache, (name, "too many rows for the cache", r)


def test_wide_rows_fit_into_shared_memory():
    """A program has at most 163 KB on an A100, 227 KB on an H200, and 99 KB on many other GPUs.

    LayerNorm's kernels get no wider rows than WIDEST.
    """
    if not compiled.tool("cuobjdump").exists():
        pytest.skip("this version of Triton has no disassemblers")
    widths, table = (4096, kernels.WIDEST, 16384), {}
    for b in ("*bf16", "*fp32"):
        for name, (kernel, types, constants, options, _) in configurations(widths, b).items():
            width = name.split()[-1]
            if width.isdigit() and (name.startswith("add backward") or int(width) <= kernels.WIDEST):
                table[name, b] = kernel, types, constants, 90, options
    for name, r in zip(table, compiled.reports(list(table.values())), strict=True):
        assert r.shared <= 99 << 10, (name, r)


# --- the model --------------------------------------------------------------------------------------------------------


def trained(config, steps=3):
    run = train.build(config, Mesh(config.tp, config.pp), torch.device("cpu"))
    run.zero.initialize(config.seed)
    batches = micro_batches(run)
    done = [train.train_step(run, batches).read() for _ in range(steps)]
    return [(step.loss, step.grad_norm) for step in done]


def trained_by_kernels(config):
    sanitizer.install()
    return trained(config)


@pytest.mark.parametrize(
    "dp, fields",
    [
        (1, dict(dtype="fp32", dropout=0.1)),
        (1, dict(dtype="bf16", recompute="full")),
        (1, dict(dtype="fp32", tp=2, sequence_parallel=True)),
        (2, dict(dtype="fp32", zero=3, dropout=0.1)),
        (1, dict(dtype="fp32", activation="relu")),
    ],
    ids=str,
)
def test_the_whole_model_on_the_kernels(workers, dp, fields):
    """Train with all kernels, attention included, and compare with training on reference.py."""
    fields = dict(micro_batch_size=2, global_batch_size=4) | fields
    config = tiny_config(dp, fields.pop("tp", 1), **fields, kernels="torch")
    ranks = dp * config.tp
    plain = workers.run(ranks, trained, config)[0]
    config.kernels = "triton"
    fused = workers.run(ranks, trained_by_kernels, config)[0]
    assert fused != plain, "equal bits: the kernels were not used"
    tolerance = 3e-5 if config.dtype == "fp32" else 2e-2
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)


def operations(choice, device, dtype, **fields):
    return choose(tiny_config(1, kernels=choice, **fields), torch.device(device), dtype)


def test_without_triton_everything_runs_on_reference(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "kernels", None)
    assert operations("auto", "cuda", "bf16") is reference
    with pytest.raises(train.UserError, match="kernels=triton: triton is not installed"):
        operations("triton", "cuda", "bf16")


def test_which_operations_are_used(monkeypatch):
    assert operations("auto", "cpu", "fp32") is operations("torch", "cuda", "bf16") is reference
    assert operations("auto", "cuda", "fp64") is reference
    auto, all_of_them = (operations(choice, "cuda", "bf16") for choice in ("auto", "triton"))
    assert auto.attention is reference.attention and all_of_them.attention is kernels.attention
    assert auto.adamw_ is all_of_them.adamw_ is kernels.adamw_
    with pytest.raises(train.UserError, match="kernels=triton: the kernels compute in float32"):
        operations("triton", "cuda", "fp64")
    with pytest.raises(train.UserError, match="kernels=triton: heads of 256 are too wide"):
        operations("triton", "cuda", "bf16", num_attention_heads=1, hidden_size=256)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(train.UserError, match="kernels=triton: there is no GPU here"):
        operations("triton", "cpu", "fp32")


def order():
    return [backend.name for backend in _cur_sdpa_kernel_backends(with_priority=True)]


def test_a_run_prefers_cudnns_attention_then_flash_attention(monkeypatch):
    seen, before = [], order()
    monkeypatch.setattr(train, "open_files", lambda *_: seen.extend(order()) or refuse())
    with pytest.raises(train.UserError, match="enough"):
        train.run_training(tiny_config(1), Mesh(), torch.device("cpu"))
    assert seen == ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"] and order() == before


def refuse():
    raise train.UserError("enough")


def test_a_run_on_a_gpu_names_its_attention(monkeypatch, capsys):
    config, cpu = tiny_config(1), torch.device("cpu")
    name = functools.partial(attention_name, config, cpu, "fp32")
    with sdpa_kernel(SDPBackend.MATH):
        assert (name(reference), name(kernels)) == ("MATH", "flash_attention.py")
    assert name(reference) == "FLASH_ATTENTION"  # the one for CPUs
    monkeypatch.setattr(train.operations, "attention_name", lambda c, device, *_: f"that of {device.type}")
    run = train.build(config, Mesh(), cpu)
    train.describe(run, None)
    assert "attention" not in capsys.readouterr().out
    run.device = torch.device("cuda")
    train.describe(run, None)
    assert "attention: that of cuda\n" in capsys.readouterr().out


def test_the_trial_chooses_the_product_of_16_bit_factors():
    for dtype, checked in (("fp32", 0), ("bf16", 1)):
        reference.mixed_product.cache_clear()
        trial(tiny_config(1, dtype=dtype), torch.device("cpu"))
        assert reference.mixed_product.cache_info().currsize == checked
