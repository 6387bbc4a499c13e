"""The operations between the matrices, in plain PyTorch: what they mean, and what runs where nothing faster does.

A few lines each: the specification and the oracle of anything that computes the same faster.
"""

import torch
import torch.nn.functional as F


def layer_norm(x, weight, bias):
    """(x - mean) / sqrt(var + 1e-5) * weight + bias over the last dimension. x [n, h]; Ba et al. (arXiv 1607.06450)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps=1e-5)


def gelu(x):
    """GPT-2's GELU: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); Hendrycks and Gimpel (arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def attention(qkv, cache=None):
    """Causal attention, softmax(q k^T / sqrt(d)) v, per head. qkv [b, s, 3, heads, d] -> [b, s, heads, d].

    No dropout on the probabilities: the [s, s] matrix that it would act on is never formed, here or in any fused
    attention. `cache`, a list of the keys and values of the tokens before, [b, heads, s', d], grows by these s.
    """
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # [b, heads, s, d]
    if cache is not None:
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
    # One new token sees all before it: no mask. PyTorch's causal mask is right for s = s' only.
    y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])
    return y.transpose(1, 2)


# --- dropout whose mask is a function, not a state ------------------------------------------------------------------


def mix(x):
    """A bijection of int64 that scatters its bits (the finalizer of MurmurHash3, 64 bits)."""

    def shifted(x, bits):  # logical, not arithmetic
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = (x ^ shifted(x, 33)) * -0x00AE502812AA7333  # 0xff51afd7ed558ccd
    x = (x ^ shifted(x, 33)) * -0x3B314601E57A13AD  # 0xc4ceb9fe1a85ec53
    return x ^ shifted(x, 33)


def dropout_mask(rows, columns, rate, seed, site):
    """Which elements stay: bool [n, columns]. A function of (seed, site, row, column) and nothing else.

    rows [n] int64: the token's place in the whole run (sample number * s + position), so that a mask depends
    neither on the layout nor on how often it is computed. site: which dropout of the model. The hash is two rounds of
    32-bit multiply and xor-shift over the columns, from a 64-bit key per row.
    """
    key = mix(rows + mix(torch.full_like(rows, seed * 1009 + site)))  # [n]
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    x = torch.arange(columns, dtype=torch.int32, device=rows.device) * -1640531527  # 2^32 / golden ratio
    x = (x[None] + low[:, None]) ^ high[:, None]  # [n, columns]; int32 wraps
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846ca68b
    x = x ^ ((x >> 16) & 0xFFFF)
    return x >= int(rate * 2**32) - 2**31


class Dropout(torch.autograd.Function):
    """x * mask / (1 - rate). Backward computes the mask again: nothing of x's size is kept."""

    @staticmethod
    def forward(ctx, x, rows, rate, seed, site):
        ctx.save_for_backward(rows)
        ctx.rate, ctx.seed, ctx.site = rate, seed, site
        return Dropout.masked(x, rows, rate, seed, site)

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return Dropout.masked(dy, rows, ctx.rate, ctx.seed, ctx.site), None, None, None, None

    @staticmethod
    def masked(x, rows, rate, seed, site):
        return x * dropout_mask(rows, x.shape[1], rate, seed, site) * (1 / (1 - rate))


def dropout(x, rows, rate, seed, site):
    """x [n, h] with each element dropped with probability `rate`, the others scaled; see `dropout_mask`."""
    return Dropout.apply(x, rows, rate, seed, site) if rate else x
