"""The operations around the matrix products, in plain PyTorch: the specification of `kernels.py`.

Each operation takes a few lines here. `kernels.py` has the same OPERATIONS under the same names and is tested against
this file. The model takes its operations from one of the two files. This one runs wherever nothing faster does.

A name that ends in `_`, as in PyTorch, says that the operation uses up its first argument: it may overwrite that
tensor, and the caller must not read it again. The operation that follows a matrix product also adds the product's
bias: an addition of its own would be one more pass over the whole activation.

Letters: n tokens, h hidden, a heads, d head size, s sequence, b samples, v vocabulary, t tensor parallel ranks.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw as torch_adamw

# Add your own: a function in this file, called in model.py as `self.ops.NAME`. It needs no kernel and no other place.
# A kernel of the same name in kernels.py replaces it once the name stands here, too.
OPERATIONS = "layer_norm add_ add_layer_norm_ gelu_ attention cross_entropy_ dropout adamw_ squared_norms".split()
EPS = 1e-5  # of LayerNorm, as in GPT-2


# --- LayerNorm, and the residual stream around it ---------------------------------------------------------------------


def layer_norm(x, weight, bias):
    """(x - mean) / sqrt(var + 1e-5) * weight + bias over the last dimension. x [n, h]; Ba et al. (arXiv 1607.06450)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps=EPS)


def add_bias_(y, bias):
    """y + bias, written over y: y is a matrix product that nobody else reads. A leaf of the graph is copied instead."""
    return y + bias if y.is_leaf else y.add_(bias)


def add_(y, x, bias, drop=None):
    """x + dropout(y + bias): adds a block's linear y [n, h] to the residual stream x [n, h]; y is used up.

    drop: a `Drop`; None: no dropout.
    """
    y = add_bias_(y, bias)
    return y.add_(x) if drop is None else x + dropout(y, drop)


def add_layer_norm_(y, x, bias, weight, norm_bias, drop=None):
    """(z, layer_norm(z)), both [n, h], with z = add_(y, x, bias, drop); y is used up. y and bias None: z is x.

    The residual stream z continues past the norm. One operation gives both results, so that a fused backward can add
    their two gradients.
    """
    z = x if y is None else add_(y, x, bias, drop)
    return z, layer_norm(z, weight, norm_bias)


# --- between two linears ----------------------------------------------------------------------------------------------


def gelu_(y, bias):
    """GPT-2's GELU of x = y + bias: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); y [n, 4h] is used up.

    Hendrycks and Gimpel (arXiv 1606.08415).
    """
    return F.gelu(add_bias_(y, bias), approximate="tanh")


def attention(qkv, cache=None):
    """Causal attention, softmax(q k^T / sqrt(d)) v, per head. qkv [b, s, 3, a, d] -> [b, s, a, d].

    There is no dropout on the probabilities: it would act on the [s, s] matrix, which no fused attention forms.
    cache: a list with the keys and values of the tokens before, [b, a, s', d]; it grows by these s tokens.
    """
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # [b, a, s, d]
    if cache is not None:
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
    # One new token sees all before it and needs no mask. PyTorch's causal mask is right for s = s' only.
    y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])
    return y.transpose(1, 2)


def causal_softmax(scores, scale):
    """softmax(scale * scores) over the last dimension, of the keys up to the query's own. scores [..., s, s]."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores * scale).masked_fill(hidden, -math.inf).softmax(-1)


# --- the loss ---------------------------------------------------------------------------------------------------------


def cross_entropy_(logits, targets, columns, weights=None, reduce=None):
    """-log softmax(logits)[target] of each token, [n]; then `logits` hold their own gradient, row by row.

    logits: [n, v/t], this rank's columns. The first `columns` of them are real; padding gets no probability.
    targets: [n] int64, counted from this rank's first column. Another rank has the targets outside of its range.
    weights: [n] float32 (float64 for float64 logits), the gradient that arrives at each token's loss. Row i of
        `logits` becomes weights[i] * d loss_i / d logits. None: no gradient is wanted, `logits` hold nothing useful.
    reduce(x, "max" or "sum"): combines three numbers a token over the tp ranks: max_j z_j, sum_j exp(z_j - max) and
        z_target - max. None: there is one rank.
    Computes in float32 (in float64 for float64 logits), whatever the dtype of the logits is.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))  # `logits` itself, if it is that wide
    z[:, columns:] = -math.inf
    top = z.amax(1)
    if reduce:
        top = reduce(top, "max")
    z -= top[:, None]
    mine = (targets >= 0) & (targets < columns)
    local = targets.where(mine, 0)[:, None]
    target = z.gather(1, local)[:, 0].where(mine, 0.0)
    p = z.exp_()
    total = p.sum(1)
    if reduce:
        total, target = reduce(torch.stack([total, target]), "sum")
    if weights is not None:  # weight (softmax - onehot)
        p *= (weights / total)[:, None]
        p.scatter_add_(1, local, -(weights * mine)[:, None])
        if p is not logits:
            logits.copy_(p)
    return total.log() - target


# --- dropout whose mask is a function, not a state --------------------------------------------------------------------


class Drop(NamedTuple):
    """One dropout of the model on some rows of the run."""

    rows: torch.Tensor  # [n] int64: the token's place in the whole run, sample number * s + position
    rate: float
    seed: int
    site: int  # which dropout of the model


def mix(x):
    """A bijection of int64 that scatters its bits (the finalizer of MurmurHash3, 64 bits)."""

    def shifted(x, bits):  # logical, not arithmetic
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = (x ^ shifted(x, 33)) * -0x00AE502812AA7333  # 0xff51afd7ed558ccd
    x = (x ^ shifted(x, 33)) * -0x3B314601E57A13AD  # 0xc4ceb9fe1a85ec53
    return x ^ shifted(x, 33)


def dropout_mask(columns, drop):
    """Which elements stay: bool [n, columns]. A function of (seed, site, row, column) and nothing else.

    So a mask depends neither on the layout nor on how often it is computed. The hash is two rounds of 32-bit multiply
    and xor-shift over the columns, from a 64-bit key per row.
    """
    key = mix(drop.rows + mix(torch.full_like(drop.rows, drop.seed * 1009 + drop.site)))  # [n]
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    x = torch.arange(columns, dtype=torch.int32, device=key.device) * -1640531527  # 2^32 / golden ratio
    x = (x[None] + low[:, None]) ^ high[:, None]  # [n, columns]; int32 wraps
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846ca68b
    x = x ^ ((x >> 16) & 0xFFFF)
    return x >= int(drop.rate * 2**32) - 2**31


class Dropout(torch.autograd.Function):
    """x * mask / (1 - rate). Backward computes the mask again: it keeps nothing of x's size."""

    @staticmethod
    def forward(ctx, x, rows, rate, seed, site):
        ctx.save_for_backward(rows)
        ctx.rate, ctx.seed, ctx.site = rate, seed, site
        return Dropout.masked(x, Drop(rows, rate, seed, site))

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return Dropout.masked(dy, Drop(rows, ctx.rate, ctx.seed, ctx.site)), None, None, None, None

    @staticmethod
    def masked(x, drop):
        return x * dropout_mask(x.shape[1], drop) * (1 / (1 - drop.rate))


def dropout(x, drop=None):
    """Drops each element of x [n, h] with probability `drop.rate` and scales the others up; drop None: gives x."""
    return x if drop is None else Dropout.apply(x, *drop)


# --- the end of a step, on flat buffers -------------------------------------------------------------------------------


def squared_norms(flats):
    """The squared norm of each of these tensors, float64 [number of them]. Squares are added in their own dtype."""
    return torch.stack([torch.linalg.vector_norm(flat) for flat in flats]).double() ** 2


class UpdateScalars(NamedTuple):
    """The scalars of one update: 0-dimensional tensors on the buffers' device.

    The device computes them, so that the host need not wait for their values.
    """

    lr: torch.Tensor  # float64
    scale: torch.Tensor  # float64; multiplies the gradient: clipping, 1 / loss scale
    update: torch.Tensor  # int64, counted from 1
    skip: torch.Tensor  # bool: leave all as it is
    correction1: torch.Tensor  # float64: 1 - beta1^update
    correction2: torch.Tensor  # float64: 1 - beta2^update


def update_scalars(lr, scale, update, skip, beta1, beta2):
    """UpdateScalars from the first four of them and AdamW's two constants."""
    update64 = update.double()
    return UpdateScalars(lr, scale, update, skip, 1 - beta1**update64, 1 - beta2**update64)


def adamw_(weight, gradient, moments, scalars, ranges, *, decay, beta1, beta2, eps, out=None):
    """AdamW on flat buffers, in place: changes `weight` and `moments`, uses up `gradient`.

    The same formula as `parallel/optimizer.py`'s `adamw`, which is the specification, done in one pass by PyTorch's
    fused kernel. Its gradient g is scalars.scale * gradient.

    scalars: an `UpdateScalars`; ranges: [(begin, end, decays)], which cover the buffers; out: another buffer for the
    new weights, in its own dtype.
    """
    before, skip, divisor = (scalars.update - 1).float(), scalars.skip.float(), (1 / scalars.scale).float()
    if weight.dtype == torch.float64:  # for which a float32 divisor is too coarse
        gradient *= scalars.scale
        divisor = None
    # On a GPU that kernel reads a rate that is a tensor as float32; as float64 it would refuse it.
    lr = scalars.lr.float() if weight.is_cuda else scalars.lr
    for begin, end, decays in ranges:
        w, g, m, v = ([x[begin:end]] for x in (weight, gradient, *moments))
        torch_adamw(
            w, g, m, v, [], [before.clone()], fused=True, grad_scale=divisor, found_inf=skip, lr=lr, beta1=beta1,
            beta2=beta2, eps=eps, weight_decay=decay * decays, amsgrad=False, maximize=False,
        )  # fmt: skip
    if out is not None:
        out.copy_(weight)
