"""Operations around the matrix products in plain PyTorch: the specification of `kernels.py`.

If an operation overwrites an argument, its name ends in `_`. If an argument is *used up*, the operation may overwrite
it, and the caller must not read it again. The operation after a matrix product also adds the product's bias, if any.

Letters: n tokens, h hidden, a heads, d head size, s sequence, b samples, v vocabulary, t tensor parallel ranks.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw as torch_adamw

# Add your own: write a function in this file, and call it in model.py as `self.ops.NAME`. On a GPU, the names in this
# list are kernels.py's functions: add a new kernel, and take out a function that you change.
OPERATIONS = "add_ add_layer_norm_ add_rms_norm_ gelu_ relu_ swiglu rotate attention add_rows_".split()
OPERATIONS += "cross_entropy_ dropout adamw_".split()
EPS = 1e-5  # LayerNorm's epsilon in GPT-2


def wide_dtype(x):
    """Return float32, or float64 if x has it."""
    return torch.promote_types(x.dtype, torch.float32)


# --- LayerNorm, and the residual stream around it ---------------------------------------------------------------------


def layer_norm(x, weight, bias):
    """Return (x - mean) / sqrt(var + 1e-5) * weight + bias, x [n, h]. Ba et al. (arXiv 1607.06450)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps=EPS)


def plus_(y, x):
    """Return y + x, in place of y unless autograd forbids it. x may be None."""
    if x is None:
        return y
    return y + x if y.is_leaf and y.requires_grad else y.add_(x)


def add_(y, x, bias, drop=None):
    """Return x + dropout(y + bias): residual stream x [n, h], a linear's output y [n, h], used up."""
    y = plus_(y, bias)
    return plus_(y, x) if drop is None else x + dropout(y, drop)


def add_layer_norm_(y, x, bias, weight, norm_bias, drop=None):
    """Return (z, layer_norm(z)), both [n, h], with z = add_(y, x, bias, drop). y is used up. If y is None, z is x."""
    z = x if y is None else add_(y, x, bias, drop)
    return z, layer_norm(z, weight, norm_bias)


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + epsilon) * weight, x [..., h]. Zhang and Sennrich (arXiv 1910.07467)."""

    @staticmethod
    def forward(ctx, x, weight, epsilon):
        wide = x.to(wide_dtype(x))
        factor = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()  # [..., 1]
        ctx.save_for_backward(x, factor, weight)
        return (wide * factor).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, dy):
        x, factor, weight = ctx.saved_tensors
        n, dy = x * factor, dy.to(factor.dtype)
        g = dy * weight
        d_weight = (dy * n).flatten(0, -2).sum(0)
        return ((g - n * (g * n).mean(-1, keepdim=True)) * factor).to(x.dtype), d_weight, None


def add_rms_norm_(y, x, weight, epsilon, drop=None):
    """Return (z, RMSNorm of z), both [n, h], with z = add_(y, x, None, drop). y is used up. If y is None, z is x."""
    z = x if y is None else add_(y, x, None, drop)
    return z, RMSNorm.apply(z, weight, epsilon)


# --- between two linears ----------------------------------------------------------------------------------------------


# Add your own: write a function `mine_`, and add `"mine": ()` here. `train.py --activation=mine` uses it.
ACTIVATIONS = {"gelu": ("gelu_new", "gelu_pytorch_tanh"), "relu": ("relu",)}  # Hugging Face's names; we write the first


def gelu_(y, bias):
    """Return x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), x = y + bias. y [n, 4h] is used up. arXiv 1606.08415."""
    return F.gelu(plus_(y, bias), approximate="tanh")


def relu_(y, bias):
    """Return max(0, y + bias). y [n, 4h] is used up."""
    return F.relu(plus_(y, bias), inplace=True)


class SwiGLU(torch.autograd.Function):
    """[gate, up] [..., 2f] -> silu(gate) * up. Shazeer (arXiv 2002.05202). Backward computes silu again."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, dout):
        (y,) = ctx.saved_tensors
        dy = torch.empty_like(y)
        (gate, up), (dgate, dup) = y.chunk(2, -1), dy.chunk(2, -1)
        sigmoid = gate.sigmoid()
        torch.mul(dout * up * sigmoid, 1 + gate * (1 - sigmoid), out=dgate)
        torch.mul(dout * gate, sigmoid, out=dup)
        return dy


class Rotation(torch.autograd.Function):
    """Backward turns the gradient back. So only cos and sin are kept, which all blocks share."""

    @staticmethod
    def forward(ctx, x, cos, sin, turned):
        ctx.arguments = cos, sin, turned
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin, turned = ctx.arguments
        return turned(dy, cos, -sin), None, None, None


def turned(x, cos, sin):
    """Turn each pair (x[i], x[i + d/2]) of a head. cos, sin: [s, d/2]."""
    cos, sin = (y.to(x.dtype).view(len(y), *[1] * (x.dim() - 3), -1) for y in (cos, sin))  # [s, 1, d/2]
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


@functools.lru_cache(1)  # the blocks of a micro-batch have the same positions
def cos_and_sin(positions, base, d, dtype):
    """Return cos and sin of the angles position * base^(-2i/d), each [s, d/2]."""
    angle = positions[:, None] * base ** (-torch.arange(0, d, 2, device=positions.device, dtype=dtype) / d)
    return angle.cos(), angle.sin()


def rotate(x, positions, base, turned=turned):
    """Turn each pair (x[i], x[i + d/2]) of a head by the angle position * base^(-2i/d). Su et al. (arXiv 2104.09864).

    x: [b, s, heads, d], or [b, s, groups, heads of a group, d]. positions: [s].
    """
    return Rotation.apply(x, *cos_and_sin(positions, base, x.shape[-1], wide_dtype(x)), turned)


swiglu = SwiGLU.apply


def visible(i, j):
    """Return which keys a query sees. i, j: positions of queries and keys in a sample. No query may see a later key.

    Change this function for another mask, for example a window: (j <= i) & (j > i - 128).
    """
    return j <= i


@functools.cache
def is_causal(s):
    """Return True if each query of s tokens sees all earlier keys. Then attention needs no mask.

    Above 256 tokens it asks 256 queries, evenly spaced, the last one among them: s^2 answers would fill the memory.
    """
    j = torch.arange(s, device="cpu")
    i = torch.linspace(0, s - 1, min(s, 256), dtype=torch.float64, device="cpu").round().long()[:, None]
    return bool((visible(i, j) == (j <= i)).numpy().all())


def attention(q, k, v, cache=None):
    """Return softmax(q k^T / sqrt(d)) v, per head, over the `visible` keys. q, k, v [b, s, a, d] -> [b, s, a, d].

    k and v may have g heads, a divisor of a: then a/g consecutive heads of q share one of them (arXiv 2305.13245).
    cache: a list with the keys and values of earlier tokens, [b, a, s', d], or an empty list. This call appends its
    own. If the cache is not empty, s must be 1.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, a, s, d]
    if cache is not None:
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
    s, keys, mask, grouped = q.shape[2], k.shape[2], None, q.shape[1] != k.shape[1]
    if not is_causal(1 << keys.bit_length()):
        j = torch.arange(keys, device=q.device)
        mask = visible(j[-s:, None], j)
    if grouped and not takes_groups(q.device, q.dtype):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    # One new token of a causal model sees all tokens and needs no mask.
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and s == keys, enable_gqa=grouped)
    return y.transpose(1, 2)


def takes_groups(device, dtype):
    """Return whether PyTorch's attention takes groups. On older GPUs, and in fp32, it would keep [s, s] matrices."""
    return device.type != "cuda" or (dtype.itemsize == 2 and torch.cuda.get_device_capability(device)[0] >= 8)


# --- gradients of parameters ------------------------------------------------------------------------------------------


def add_rows_(table, ids, rows):
    """Add rows[i] to table[ids[i]] in a fixed order. table [v, h]; ids [n] int64; rows [n, h].

    Ids outside of 0 .. v - 1 belong to other ranks and are skipped.
    """
    is_local = (ids >= 0) & (ids < len(table))
    ids, rows = ids.where(is_local, 0), (rows * is_local[:, None]).to(table.dtype)
    if rows.is_cuda:  # index_add_ on CUDA has no fixed order
        table.index_put_((ids,), rows, accumulate=True)
    else:
        table.index_add_(0, ids, rows)


def add_product_(gradient, a, b):
    """Add the product a b, unrounded, to `gradient` [i, o] in its dtype. a [i, n], b [n, o] of one dtype."""
    if gradient.dtype == a.dtype:
        gradient.addmm_(a, b)
    else:
        mixed_product(a.device.type, a.dtype)(gradient, a, b)


MIXED = (  # 16-bit factors and a float32 gradient, best first
    lambda gradient, a, b: torch.addmm(gradient, a, b, out_dtype=gradient.dtype, out=gradient),  # one pass over memory
    lambda gradient, a, b: gradient.add_(torch.mm(a, b, out_dtype=gradient.dtype)),  # a temporary matrix
    lambda gradient, a, b: gradient.addmm_(a.to(gradient.dtype), b.to(gradient.dtype)),  # runs everywhere, slow on CUDA
)


@functools.cache
def mixed_product(device, dtype):
    """Return the first of MIXED that is right on this device with factors of this dtype."""
    ones, parts = torch.ones(16, 16, dtype=dtype, device=device), torch.full((16, 16), 2.0**-12, device=device)
    parts[0] = 1  # a column's sum, 1 + 15 * 2^-12, has too many digits for 16 bits
    for add in MIXED[:-1]:
        gradient = torch.ones(16, 16, device=device)
        try:
            add(gradient, ones, parts.to(dtype))
            if torch.equal(gradient, 1 + parts.sum(0).expand(16, 16)):
                return add
        except (RuntimeError, TypeError):  # no such product on this device
            pass
    return MIXED[-1]


# --- the loss ---------------------------------------------------------------------------------------------------------


def cross_entropy_(logits, targets, columns, dlosses=None, reduce=None):
    """Return -log softmax(logits)[target] of each token, [n]. Overwrite `logits` with their gradient.

    logits: [n, v/t], this rank's columns; only the first `columns` are no padding. targets: [n] int64, counted
    from this rank's first column; those outside of 0 .. columns - 1 belong to other ranks. dlosses: [n], the gradient
    that arrives at each loss. None: no gradient. reduce(x, "max" or "sum"): combines x over the tp ranks.
    """
    z = logits.to(wide_dtype(logits))  # `logits` itself if it has this dtype
    z[:, columns:] = -math.inf
    top = z.amax(1)
    if reduce:
        top = reduce(top, "max")
    z -= top[:, None]
    is_local = (targets >= 0) & (targets < columns)
    local = targets.where(is_local, 0)[:, None]
    target = z.gather(1, local)[:, 0].where(is_local, 0.0)
    z[:, columns:] = 0.0  # a CPU needs three times as long for exp(-inf) as for exp(0)
    p = z.exp_()
    p[:, columns:] = 0.0
    total = p.sum(1)
    if reduce:
        total, target = reduce(torch.stack([total, target]), "sum")
    if dlosses is not None:  # dloss (softmax - onehot)
        p *= (dlosses / total)[:, None]
        p.scatter_add_(1, local, -(dlosses * is_local)[:, None])
        if p is not logits:
            logits.copy_(p)
    return total.log() - target


# --- dropout with a mask that needs no random state -------------------------------------------------------------------


class Drop(NamedTuple):
    rows: torch.Tensor  # [n] int64: index of each token in the run, sample index * s + position
    rate: float
    seed: int
    site: int  # index in the model, from 0


def fmix64(x):
    """Return fmix64 of MurmurHash3, a bijection of int64."""
    # The 31 bits make the shift a logical one.
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -0x00AE502812AA7333
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * -0x3B314601E57A13AD
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def dropout_mask(columns, drop):
    """Return bool [n, columns], True for elements that stay. It depends on (seed, site, row, column) only.

    So the layout does not change a mask, and backward can compute it again.
    """
    key = fmix64(drop.rows + fmix64(torch.full_like(drop.rows, drop.seed * 1009 + drop.site)))  # [n]
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    x = torch.arange(columns, dtype=torch.int32, device=key.device) * -1640531527  # 2^32 / golden ratio
    x = (x[None] + low[:, None]) ^ high[:, None]  # [n, columns]; int32 wraps
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846ca68b as int32
    x = x ^ ((x >> 16) & 0xFFFF)
    return x >= int(drop.rate * 2**32) - 2**31


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, *rest):
        ctx.save_for_backward(rows)
        ctx.rest = rest
        return Dropout.masked(x, Drop(rows, *rest))

    @staticmethod
    def backward(ctx, dy):
        return Dropout.masked(dy, Drop(*ctx.saved_tensors, *ctx.rest)), None, None, None, None

    @staticmethod
    def masked(x, drop):
        return x * dropout_mask(x.shape[1], drop) * (1 / (1 - drop.rate))


def dropout(x, drop=None):
    return x if drop is None else Dropout.apply(x, *drop)


# --- the end of a step, on flat buffers -------------------------------------------------------------------------------


def squared_norms(flats):
    """Return the sums of squares of k parts, float64 [k]. The norm of a part is computed in the buffers' dtype.

    On a CPU, one sum of 67 million float32 squares has an error of 1%. So the sums are short there.
    """
    parts = [part for flat in flats for part in flat.split(len(flat) if flat.is_cuda else 1 << 16)]
    return torch.stack([torch.linalg.vector_norm(part) for part in parts]).double() ** 2


class UpdateScalars(NamedTuple):
    """0-dimensional tensors of one update. The device computes them, so the host does not wait."""

    lr: torch.Tensor  # float64
    scale: torch.Tensor  # float64; multiplies the gradient: clipping, 1 / loss scale
    update: torch.Tensor  # int64, counted from 1
    skip: torch.Tensor  # bool: change nothing
    correction1: torch.Tensor  # float64
    correction2: torch.Tensor  # float64


def update_scalars(lr, scale, update, skip, beta1, beta2):
    update64 = update.double()
    return UpdateScalars(lr, scale, update, skip, 1 - beta1**update64, 1 - beta2**update64)


def adamw_(weight, gradient, moments, scalars, ranges, *, decay, beta1, beta2, eps):
    """Update flat buffers as `adamw` in `parallel/optimizer.py` does, by PyTorch's fused kernel. `gradient` is used up.

    ranges: [(begin, end, decays)]. Elements outside of them (frozen parameters) stay.
    """
    before, skip, divisor = (scalars.update - 1).float(), scalars.skip.float(), (1 / scalars.scale).float()
    if weight.dtype == torch.float64:  # a float32 divisor is not exact enough
        gradient *= scalars.scale
        divisor = None
    # On a GPU the fused kernel accepts only a float32 tensor.
    lr = scalars.lr.float() if weight.is_cuda else scalars.lr
    for begin, end, decays in ranges:
        w, g, m, v = ([x[begin:end]] for x in (weight, gradient, *moments))
        torch_adamw(
            w, g, m, v, [], [before.clone()], fused=True, grad_scale=divisor, found_inf=skip, lr=lr, beta1=beta1,
            beta2=beta2, eps=eps, weight_decay=decay * decays, amsgrad=False, maximize=False,
        )  # fmt: skip
