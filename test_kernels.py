"""Tests the Triton kernels without a GPU: results compared with reference.py in float64, memory traffic, machine code.

The interpreter of testing/sanitizer.py turns every race and every access out of bounds into an error. An error is
relative to the result's largest value, and at most 2 e + eps of the dtype + 8 eps of float32. Here e is the error of
plain PyTorch in the same dtype on the same input.

Each of these defects was inserted once and turned a test red:

    LayerNorm: the variance includes elements beyond the row's end
    LayerNorm: backward lacks one of its two sums over the row
    LayerNorm: mean and variance are computed before the sum is rounded
    LayerNorm: the last row is not computed
    bias gradient: it includes one row only; one partial sum is missing
    dropout: backward omits 1 / (1 - rate); the hash has one shift less
    GELU: the derivative lacks its factor 2
    cross-entropy: the column mask is off by one; the row stride is the number of real columns
    cross-entropy: the sum is not scaled down to a new maximum
    cross-entropy: the gradient lacks its weight, or has another row's weight
    cross-entropy: the target is compared with the column's place in the block
    cross-entropy: loads are masked by the real columns (the compiler makes narrow loads)
    AdamW: the gradient is loaded twice (the traffic grows)
    AdamW: one of two ranges does not decay; v has no bias correction
    embedding: only the first TALL rows of an id are added; the rows of the next id are added, too
    embedding: the rows are not in the sorted order; an id's rows are added by every program
    embedding: ids of other ranks are not skipped; each stripe of columns begins at column 0
    attention: a mask is off by one; a scale is missing; delta is not subtracted, or is the sum of o o
    attention: l or o is not scaled down to a new maximum; L lacks m; the softmax subtracts no maximum
    attention: v is read with k's stride, do with q's
    attention: one tile is not computed or not read; loads have no bound; tiles above the diagonal are computed

    a step: a kernel gets a tensor of the CPU; a matrix product has factors of two dtypes

This defect is not found: row offsets in int32. They overflow from 2^31 elements on, which need too much memory here.
"""

import functools
import os
import subprocess
import sys

import pytest
import torch

from testing.interpreted import DTYPES, poisoned  # noqa: F401  (first: it skips this file without Triton)

# isort: split

import flash_attention
import kernels
import reference
import train
from operations import choose
from reference import Drop
from testing import sanitizer
from testing.cases import CASES, adamw, buffers, errors, random, results, update_scalars
from testing.tiny import built, few, refusal, slow, tiny_batches, tiny_config

DTYPE = pytest.mark.parametrize("dtype", [slow(dtype) if dtype == torch.float16 else dtype for dtype in DTYPES])


def compare(fused, plain, inputs, more=0.0):
    """Require that the errors of `fused` are allowed (testing/cases.py). Return them."""
    found, allowed = errors(fused, plain, inputs, more)
    assert all(error <= most for error, most in zip(found, allowed, strict=True)), (found, allowed)
    return found


# --- LayerNorm, bias, dropout, residual, GELU, ReLU -------------------------------------------------------------------


def check_operation(case, n, h, dtype=torch.float32, first=None):
    """Compare kernels.py and reference.py. first: the first input, instead of random numbers."""
    kinds, call, _ = CASES[case]
    shapes = {"x": (n, h), "w": (n, 2 * h), "v": (h,)}
    inputs = [random(*shapes[kind], dtype=dtype, size=2, seed=i) for i, kind in enumerate(kinds)]
    if first is not None:
        inputs[0] = first
    compare(functools.partial(call, kernels), functools.partial(call, reference), inputs)


@DTYPE
@pytest.mark.parametrize("n, h", [(1, 16), (17, 37), (2, 1024)])  # one row; odd width; the 345M model's width
@pytest.mark.parametrize("case", CASES)
def test_an_operation_and_its_gradients(case, n, h, dtype):
    check_operation(case, n, h, dtype)


# dropout has a mask for each token
OF_HEADS = [(reference, case) for case in CASES if "dropout" not in case]


@pytest.mark.parametrize("ops, case", [*OF_HEADS, (kernels, "layer norm"), (kernels, "rms norm")])
def test_each_head_of_each_token_alone(ops, case):
    """x [b, s, heads, d], as for a norm of q: the last dimension is that of the mean, so no token sees another one."""
    kinds, call, _ = CASES[case]
    shapes = {"x": (6, 8), "w": (6, 16), "v": (8,)}
    inputs = [random(*shapes[kind], size=2 if kind != "v" else 1, seed=i) for i, kind in enumerate(kinds)]
    heads = [x.view(1, 3, 2, -1) if x.dim() == 2 else x for x in inputs]
    plain, seeds = results(functools.partial(call, ops), inputs)
    ours, _ = results(functools.partial(call, ops), heads, [seed.view(1, 3, 2, 8) for seed in seeds])
    for a, b in zip(ours, plain, strict=True):
        assert torch.allclose(a, b.view(a.shape), rtol=1e-5, atol=1e-6)


def test_extreme_inputs():
    """Rows far from 0, where mean(x^2) - mean(x)^2 loses all digits; all equal; all but one equal. Large numbers."""
    x = random(3, 64)
    x[0] += 1e4
    x[1] = 7.0
    x[2] = 0.0
    x[2, 9] = 1e4
    for case in ("layer norm", "rms norm"):
        check_operation(case, 3, 64, first=x)
    large = torch.tensor([[-1e4, -60.0, -10.0, -5.0, 0.0, 5.0, 10.0, 60.0, 1e4]])
    for case in ("gelu", "relu"):
        check_operation(case, 1, 9, first=large)
    check_operation("swiglu", 1, 9, first=torch.cat([large, random(1, 9, size=2, seed=1)], 1))


def test_the_norm_is_that_of_the_rounded_sum():
    """Forward must normalize the rounded sum, as backward does. Above 256, bfloat16 has even integers only."""
    x, y = random(4, 64, dtype=torch.bfloat16) + 256, random(4, 64, dtype=torch.bfloat16, seed=1)
    z, out = kernels.add_layer_norm_(y, x, y[0] * 0, torch.ones(64).bfloat16(), torch.zeros(64).bfloat16())
    exact = torch.nn.functional.layer_norm(z.double(), [64], eps=1e-5)
    assert torch.allclose(out.double(), exact, rtol=0.01, atol=0.01)


def test_rows_wider_than_the_norms_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "WIDEST", 36)
    check_operation("add, dropout, layer norm", 5, 37)
    check_operation("add, dropout, rms norm", 5, 37)
    x = random(5, 37).requires_grad_()
    assert kernels.add_layer_norm_(None, x, None, x[0], x[1])[1].grad_fn.name() == "NativeLayerNormBackward0"


@DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 3, 3, 16), (2, 5, 1, 24)], ids=str)
def test_rotation(shape, dtype):
    """Heads that lie beside each other; queries of groups, as a view of all; keys, as a view of all."""
    b, s, g, d = shape
    positions, whole = torch.arange(s) + 1000, (b, s, g, 4, d)
    calls = [(shape, lambda x: x), (whole, lambda x: x[..., :2, :]), (whole, lambda x: x[..., 2:3, :])]
    calls.append(((b, s, 2 * g * d), lambda x: x[..., : g * d].view(shape)))
    for size, part in calls:
        fused, plain = (
            lambda x, ops=ops, part=part: ops.rotate(part(x), positions, 50.0) for ops in (kernels, reference)
        )
        compare(fused, plain, [random(*size, dtype=dtype)])
        assert fused(random(*size)).is_contiguous()


def test_dropout_masks_are_the_references_bit_for_bit():
    rows = torch.cat([torch.arange(5), torch.arange(3) + 2**31 - 1, torch.arange(3) + 10**12])
    for rate, seed, site in [(0.1, 1234, 0), (0.5, 0, 3), (0.9, 2**31, 47), (0.001, 7, 1)]:
        mask = Drop(rows, rate, seed, site)
        assert torch.equal(kernels.dropout(torch.ones(11, 300), mask) > 0, reference.dropout_mask(300, mask))


def test_relu_does_not_hide_a_nan():
    """Training skips an update whose gradient has an inf or nan. So nan must pass through, as in PyTorch."""
    y = torch.tensor([[torch.nan, -torch.inf, torch.inf, -0.0]]).requires_grad_()
    out = kernels.relu_(y, torch.zeros(4))
    (dy,) = torch.autograd.grad(out, y, torch.tensor([[1.0, 1.0, torch.nan, 1.0]]))
    assert out[0, 0].isnan() and out[0, 1:].tolist() == [0, torch.inf, 0]
    assert dy[0, 2].isnan() and dy[0, [0, 1, 3]].tolist() == [1, 0, 0]


# --- gradients of the embedding's tables -------------------------------------------------------------------------


@DTYPE
@pytest.mark.parametrize("n, v, width", [(5, 3, 37), (130, 11, 300)])
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

REDUCE = pytest.mark.parametrize("reduce", [None, lambda x, op: x], ids=["one launch", "two launches"])


def check_cross_entropy(logits, targets, columns, reduce):
    """Compare losses and gradients. Each row has a different weight."""
    dtype, weights = logits.dtype, torch.tensor([0.5, 0.0, -0.25, 0.125, 0.0625])[: len(logits)]
    exact, plain, ours = logits.double(), logits.clone(), logits.clone()
    right = reference.cross_entropy_(exact, targets, columns, weights.double())
    reference.cross_entropy_(plain, targets, columns, weights)
    losses = kernels.cross_entropy_(ours, targets, columns, weights, reduce)
    assert losses.dtype == torch.float32 and torch.allclose(losses.double(), right, rtol=1e-6, atol=2e-6)
    error, of_plain = ((z.double() - exact).abs().max() for z in (ours, plain))
    assert error <= 2 * of_plain + torch.finfo(dtype).eps / 4 and not ours[:, columns:].any(), (error, of_plain)
    assert torch.equal(kernels.cross_entropy_(logits.clone(), targets, columns, None, reduce), losses)


@DTYPE
@REDUCE
@pytest.mark.parametrize("n, columns, width", [(1, 3, 128), (5, 130, 256), (2, 50257, 50304)])
def test_cross_entropy(n, columns, width, reduce, dtype):
    logits = random(n, width, dtype=dtype, size=4)
    logits[:, columns:] = 6e4  # padding must not change the result
    check_cross_entropy(logits, torch.tensor([0, columns - 1, 1, 2, 0][:n]), columns, reduce)


@REDUCE
def test_cross_entropy_of_extreme_logits(reduce):
    logits = random(4, 10240, size=3)  # two blocks, the second is not full
    logits[0], logits[1], logits[2, 9500] = -1e4, 1e4, 1e4
    logits[3] = -torch.inf  # all masked, except one
    logits[3, 17] = 0.5
    check_cross_entropy(logits, torch.tensor([0, 7, 5, 17]), 10000, reduce)


# --- AdamW ------------------------------------------------------------------------------------------------------------

RANGES = [(0, 512, True), (512, 640, False), (640, 1040, True), (1040, 1056, False)]


@pytest.mark.parametrize("ranges", [RANGES, [(0, 16, True)], [(0, 2000, False)]], ids=len)
def test_adamw(ranges):
    ours = buffers(ranges[-1][1])
    exact = [x.double() for x in ours]
    adamw(kernels, ours, ranges, update_scalars())
    adamw(reference, exact, ranges, update_scalars())
    for i in (0, 2, 3):
        assert torch.allclose(ours[i].double(), exact[i], rtol=2e-6, atol=3e-7)


def test_adamw_leaves_frozen_elements():
    """Their moments, of an earlier run, are not 0."""
    before, ours = buffers(96), buffers(96)
    adamw(kernels, ours, [(0, 32, True), (64, 96, False)], update_scalars())
    assert all(torch.equal(a[32:64], b[32:64]) for a, b in zip(before, ours, strict=True))
    assert not torch.isclose(before[0], ours[0])[[*range(32), *range(64, 96)]].any()


def test_a_skipped_adamw_touches_nothing():
    ours = buffers(1056)
    before = [x.clone() for x in ours]
    ours[1][5] = torch.nan
    adamw(kernels, ours, RANGES, update_scalars(skip=True))
    assert all(torch.equal(ours[i], before[i]) for i in (0, 2, 3))


# --- attention --------------------------------------------------------------------------------------------------------


def attention(qkv):
    return flash_attention.attention(*qkv.unbind(2))


def plain_attention(qkv):
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # [b, a, s, d]
    scores = q * qkv.shape[-1] ** -0.5 @ k.mT  # The scale comes first, because large scores overflow float16.
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@DTYPE
@pytest.mark.parametrize("b, s, a", [(2, 1, 3), (2, 33, 3), (1, 301, 1)])
def test_attention(b, s, a, dtype):
    compare(attention, plain_attention, [random(b, s, 3, a, 64, dtype=dtype)])


@pytest.mark.parametrize("d, capability", [(16, 9), (24, 9), (80, 9), (128, 9), (64, 8), (128, 8)])
def test_attention_head_sizes_and_the_tiles_of_every_gpu(d, capability, monkeypatch):
    monkeypatch.setattr(flash_attention, "capability", lambda device: (capability, 0))
    compare(attention, plain_attention, [random(1, 150, 3, 1, d, dtype=torch.bfloat16)])


@DTYPE
def test_attention_of_large_scores(dtype):
    """Scores reach 1e4 and -1e4: the softmax is nearly one-hot, and no exp overflows.

    Backward computes the scores again, as k q^T. This product may add in another order than q k^T, depending on the
    library or GPU. Then a score S may differ by one rounding, S eps / 2 (eps of float32). This is the relative error of
    exp(S).
    """
    qkv = random(1, 150, 3, 2, 64, dtype=dtype)
    qkv[:, :, :2] *= 60
    q, k, _ = qkv.double().unbind(2)
    largest = torch.einsum("bsad, btad -> bast", q, k).div(8).abs().max()
    assert largest > 1e4
    errors = compare(attention, plain_attention, [qkv], more=largest * torch.finfo(torch.float32).eps / 2)
    assert max(errors) < 0.02  # a fixed bound, because plain PyTorch rounds scores to 16 bits


# --- traffic ----------------------------------------------------------------------------------------------------------


def moved(run, names, elements):
    """Return bytes (loaded, stored) per element by `run()`, through the arguments `names`."""
    with sanitizer.traffic() as t:
        run()
    return tuple(sum(kind[name] for name in names.split()) / elements for kind in (t.loaded, t.stored))


ROTATION = "x", lambda ops, x: ops.rotate(x.view(2, 4, 8, 32), torch.arange(4), 50.0), None
MOVES = {  # case: tensors of forward, bytes loaded and stored for an element; the same of backward
    "add, layer norm": ("X Y Z OUT", (4, 4), "DZ DOUT Z DX", (6, 2)),
    "add, dropout, layer norm": ("X Y Z OUT", (4, 4), "DZ DOUT Z DX DY", (6, 4)),
    "add, rms norm": ("X Y Z OUT MEAN", (4, 4), "DZ DOUT Z DX MEAN", (6, 2)),
    "swiglu": ("GATE UP OUT", (4, 2), "DOUT GATE UP DGATE DUP", (6, 4)),
    "rotation": ("X OUT", (2, 2), "X OUT", (2, 2)),
    "gelu": ("Y OUT", (2, 2), "DOUT SAVED DY", (4, 2)),
    "relu": ("Y OUT", (2, 2), "DOUT SAVED DY", (4, 2)),
}


@pytest.mark.parametrize("case", MOVES)
def test_bytes_of_an_operation(case):
    """Count the bytes of bf16 activations, without the small tensors (vectors of h or n, partial sums)."""
    n, h, outputs = 8, 256, []
    kinds, call, _ = (CASES | {"rotation": ROTATION})[case]
    shapes = {"x": (n, h), "w": (n, 2 * h), "v": (h,)}
    inputs = [random(*shapes[kind], dtype=torch.bfloat16, seed=i) for i, kind in enumerate(kinds)]
    inputs = [x.requires_grad_(x.dim() > 1) for x in inputs]
    names, forward, names_back, backward = MOVES[case]

    def run():
        y = call(kernels, *inputs)
        outputs.extend(y if isinstance(y, tuple) else [y])

    assert moved(run, names, n * h) == forward
    seeds = [random(*y.shape, dtype=y.dtype, seed=9) for y in outputs]
    assert moved(lambda: torch.autograd.backward(outputs, seeds), names_back, n * h) == backward


def test_bytes_of_adamw():
    ours = buffers(1056)
    assert moved(lambda: adamw(kernels, ours, RANGES, update_scalars()), "W G M V", 1056) == (16, 12)


@REDUCE
def test_bytes_per_logit(reduce):
    """4 bytes a logit: the second read of a row is from the cache. With tp, it may be from memory: 6 bytes."""
    logits, targets, weights = random(3, 8192, dtype=torch.bfloat16), torch.tensor([1, 2, 3]), torch.full((3,), 0.1)
    row = 2 * logits.numel()
    with sanitizer.traffic() as t:
        kernels.cross_entropy_(logits, targets, 8000, weights, reduce)
    assert t.loaded["Z"] == 2 * row + 3 * 2 and t.stored["Z"] == row  # plus the target's logit
    assert t.loaded["DLOSSES"] == 3 * 4 and (reduce or t.stored.total() == row + 3 * 4)


def test_the_work_of_attention(monkeypatch):
    """No tile above the diagonal is computed."""
    s, a, d = 256, 1, 64
    seen, original = [], flash_attention.launch

    def launch(*arguments):
        with sanitizer.traffic() as t:
            original(*arguments)
        seen.append(t.flops)

    monkeypatch.setattr(flash_attention, "launch", launch)
    results(attention, [random(1, s, 3, a, d, dtype=torch.bfloat16)])
    options = flash_attention.attention_options(d, torch.bfloat16, (9, 0))
    forward, keys, queries = (max(o["ROWS"], o["COLUMNS"]) for o in map(options.get, ("forward", "keys", "queries")))
    product = s * d * a  # a causal half has s^2 d a FLOP
    assert seen == [2 * product * (s + forward), 0, 4 * product * (s + keys), 3 * product * (s + queries)]


# --- machine code -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arch", [75, 80, 90])
def test_each_kernel_compiles_for_a_gpu_and_spills_nothing(arch):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "testing.compiled", str(arch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = {name for name, kernel in {**vars(kernels), **vars(flash_attention)}.items() if hasattr(kernel, "fn")}
    assert {*done.stdout.split()} == {k for k in written if k[0] != "_" and (arch >= 80 or "attention" not in k)}


# --- the model --------------------------------------------------------------------------------------------------------


LLAMA = dict(model="llama", num_attention_heads=8, num_query_groups=4, ffn_hidden_size=48, rotary_base=77.0)


def trained(config):
    if config.kernels == "triton":
        sanitizer.install()
    run = built(config)
    batches = tiny_batches(run)
    done = [train.train_step(run, batches).read() for _ in range(2)]
    return [(step.loss, step.grad_norm) for step in done]


@pytest.mark.parametrize(
    "dp, tp, fields",
    few(
        [
            (1, 1, dict(dropout=0.1)),
            (1, 2, LLAMA | dict(sequence_parallel=True, dropout=0.1)),
            (1, 1, dict(dtype="bf16", recompute="full")),
            (1, 2, dict(sequence_parallel=True, activation="relu")),  # the second rank has padding only
            (2, 1, dict(zero=3, dropout=0.1)),
        ],
        2,
    ),
    ids=str,
)
def test_the_whole_model_on_the_kernels(workers, dp, tp, fields):
    """Train with all kernels, attention included, and compare with training on reference.py."""
    small = dict(num_layers=1, num_attention_heads=2, micro_batch_size=2, global_batch_size=2 * dp, dtype="fp32")
    configs = [tiny_config(dp, tp, **small | fields, kernels=kernels) for kernels in ("torch", "triton")]
    plain, fused = (workers.run(dp * tp, trained, config)[0] for config in configs)
    assert fused != plain, "equal bits: the kernels were not used"
    tolerance = 2e-2 if "dtype" in fields else 3e-5
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)


def operations(choice, device, dtype, **fields):
    return choose(tiny_config(1, kernels=choice, **fields), torch.device(device), dtype)


def test_without_triton_everything_runs_on_reference(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "kernels", None)
    assert operations("auto", "cuda", "bf16") is reference
    assert "kernels=triton: triton is not installed" in refusal(operations, "triton", "cuda", "bf16")


def test_which_operations_are_used(monkeypatch):
    assert operations("auto", "cpu", "fp32") is operations("torch", "cuda", "bf16") is reference
    assert operations("auto", "cuda", "fp64") is reference
    auto, all_of_them = (operations(choice, "cuda", "bf16") for choice in ("auto", "triton"))
    assert auto.attention is reference.attention and all_of_them.attention is kernels.attention
    assert auto.adamw_ is all_of_them.adamw_ is kernels.adamw_
    assert "float64" in refusal(operations, "triton", "cuda", "fp64")
    wide = functools.partial(operations, num_attention_heads=1, hidden_size=256)
    assert "heads of 256" in refusal(wide, "triton", "cuda", "bf16")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "no GPU here" in refusal(operations, "triton", "cpu", "fp32")
