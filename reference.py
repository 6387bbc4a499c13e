"""The operations around the matrices, in plain PyTorch: what they mean, and what runs where nothing faster does.

A few lines each: the specification and the oracle of `kernels.py`, which has the OPERATIONS by the same names. The
model asks for these, from whichever of the two it is given.

What comes right after a matrix product takes the product's bias with it: a bias of its own would be one more pass over
the whole activation. Letters: n tokens, h hidden, a heads, d head size, s sequence, b samples, v vocabulary.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw as torch_adamw

OPERATIONS = "layer_norm add add_layer_norm gelu attention cross_entropy_ dropout adamw squared_norms".split()
EPS = 1e-5  # LayerNorm's, as GPT-2 has it


# --- LayerNorm, and the residual stream around it ---------------------------------------------------------------------


def layer_norm(x, weight, bias):
    """(x - mean) / sqrt(var + 1e-5) * weight + bias over the last dimension. x [n, h]; Ba et al. (arXiv 1607.06450)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps=EPS)


def biased(y, bias):
    """y + bias in the place of y, a matrix product that nobody else wants; but a leaf of the graph is left alone."""
    return y + bias if y.is_leaf else y.add_(bias)


def add(x, y, bias, drop=None):
    """x + dropout(y + bias): what a block's linear y [n, h] adds to the residual stream x. drop: a `Drop`, or None.

    y is used up, see `biased`.
    """
    y = biased(y, bias)
    return y.add_(x) if drop is None else x + dropout(y, drop)


def add_layer_norm(x, y, bias, weight, norm_bias, drop=None):
    """(z, layer_norm(z)), both [n, h], with z = add(x, y, bias, drop), or x where y is None.

    z goes on past the norm; that both come from one operation lets a fused backward add their two gradients.
    """
    z = x if y is None else add(x, y, bias, drop)
    return z, layer_norm(z, weight, norm_bias)


# --- between two linears ----------------------------------------------------------------------------------------------


def gelu(y, bias):
    """GPT-2's GELU of x = y + bias: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); Hendrycks, Gimpel (1606.08415).

    y is used up, see `biased`.
    """
    return F.gelu(biased(y, bias), approximate="tanh")


def attention(qkv, cache=None):
    """Causal attention, softmax(q k^T / sqrt(d)) v, per head. qkv [b, s, 3, a, d] -> [b, s, a, d].

    No dropout on the probabilities: the [s, s] matrix that it would act on is never formed, here or in any fused
    attention. `cache`, a list of the keys and values of the tokens before, [b, a, s', d], grows by these s.
    """
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # [b, a, s, d]
    if cache is not None:
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
    # One new token sees all before it: no mask. PyTorch's causal mask is right for s = s' only.
    y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])
    return y.transpose(1, 2)


def causal_softmax(scores, scale):
    """softmax(scale * scores) over the last dimension, of the keys up to the query's own. scores [..., s, s]."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores * scale).masked_fill(hidden, -math.inf).softmax(-1)


# --- the loss ---------------------------------------------------------------------------------------------------------


def cross_entropy_(logits, targets, columns, weight=None, reduce=None):
    """-log softmax(logits)[target] of each token, [n]; `logits` then hold the gradient of weight * their sum.

    logits [n, v/t]: this rank's columns, of which the first `columns` are real: padding gets no probability.
    targets [n] int64, counted from this rank's first column: one that is not among them is another rank's. weight: None
    where no gradient is wanted (what is left in `logits` is then nothing). reduce(x, "max" or "sum") combines what the
    tp ranks have, three numbers a token: max_j z_j, sum_j exp(z_j - max) and z_target - max; None: there is one rank.
    Computed in float32 (float64 from float64), whatever the logits are.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))  # itself, if it is that wide
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
    if weight is not None:  # weight (softmax - onehot)
        p *= (weight / total)[:, None]
        p.scatter_add_(1, local, -weight * mine[:, None].to(p.dtype))
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
    """x * mask / (1 - rate). Backward computes the mask again: nothing of x's size is kept."""

    @staticmethod
    def forward(ctx, x, rows, *rest):
        ctx.save_for_backward(rows)
        ctx.rest = rest
        return Dropout.masked(x, Drop(rows, *rest))

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return Dropout.masked(dy, Drop(rows, *ctx.rest)), None, None, None, None

    @staticmethod
    def masked(x, drop):
        return x * dropout_mask(x.shape[1], drop) * (1 / (1 - drop.rate))


def dropout(x, drop=None):
    """x [n, h] with each element dropped with probability `drop.rate`, the others scaled; None: x."""
    return x if drop is None else Dropout.apply(x, *drop)


# --- the end of a step, on flat buffers -------------------------------------------------------------------------------


def squared_norms(flats):
    """The squared norm of each of these tensors, float64 [number of them]. Squares are added in their own dtype."""
    return torch.stack([torch.linalg.vector_norm(flat) for flat in flats]).double() ** 2


class Numbers(NamedTuple):
    """What an update depends on besides its buffers: 0-dimensional tensors, on the buffers' device.

    They were computed there: nobody waits until the host has seen them.
    """

    lr: torch.Tensor  # float64
    scale: torch.Tensor  # float64; multiplies the gradient: clipping, 1 / loss scale
    update: torch.Tensor  # int64, counted from 1
    skip: torch.Tensor  # bool: leave all as it is
    correction1: torch.Tensor  # float64: 1 - beta1^update
    correction2: torch.Tensor  # float64: 1 - beta2^update


def numbers(lr, scale, update, skip, beta1, beta2):
    """Numbers of the first four and of AdamW's two constants."""
    update64 = update.double()
    return Numbers(lr, scale, update, skip, 1 - beta1**update64, 1 - beta2**update64)


def adamw(weight, gradient, moments, numbers, ranges, *, decay, beta1, beta2, eps, out=None):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), in place on flat buffers; `gradient` is used up.

        m = b1 m + (1 - b1) g      w -= lr (decay w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
        v = b2 v + (1 - b2) g^2

    g is numbers.scale * gradient; ranges: [(begin, end, decays)], which cover the buffers; out: another buffer for the
    new weights, in its own dtype. The two formulas are PyTorch's kernel, which reads and writes everything once.
    """
    before, skip, divisor = (numbers.update - 1).float(), numbers.skip.float(), (1 / numbers.scale).float()
    if weight.dtype == torch.float64:  # for which a float32 divisor is too coarse
        gradient *= numbers.scale
        divisor = None
    # On a GPU that kernel reads a rate that is a tensor as float32; as float64 it would refuse it.
    lr = numbers.lr.float() if weight.is_cuda else numbers.lr
    for begin, end, decays in ranges:
        w, g, m, v = ([x[begin:end]] for x in (weight, gradient, *moments))
        torch_adamw(
            w, g, m, v, [], [before.clone()], fused=True, grad_scale=divisor, found_inf=skip, lr=lr, beta1=beta1,
            beta2=beta2, eps=eps, weight_decay=decay * decays, amsgrad=False, maximize=False,
        )  # fmt: skip
    if out is not None:
        out.copy_(weight)
