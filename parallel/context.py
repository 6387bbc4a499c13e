"""Context parallelism: the tokens of each sample are cut over n = cp ranks (DeepSpeed-Ulysses, arXiv 2309.14509).

Rank r has part r of n equal parts. Only attention connects the tokens of a sample: before it, an all_to_all exchanges
tokens for heads, and each rank gets all tokens of a/(n t) heads. So n t must divide the number a of heads. A second
all_to_all exchanges back. Another way is a ring (`ladder/rung21_ring_attention.py`).
"""

import torch

from parallel.comm import all_to_all


def attend(q, k, v, cp, ops, cache=None):
    """q, k, v [b, s/n, a/t, d] of this rank's tokens -> the same. k and v may have fewer heads (query groups).

    cp: the Axis, or None. cache: in generation, the past keys and values.
    """
    if cp is None or cp.size == 1:
        return ops.attention(q, k, v, cache)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))  # a copy for each head of q
    q, k, v = TokensForHeads.apply(torch.stack([q, k, v]), 3, 2, cp).unbind()  # each [b, s, a/(n t), d]
    return TokensForHeads.apply(ops.attention(q, k, v), 1, 2, cp)


class TokensForHeads(torch.autograd.Function):
    """Cut x along the dimension `cut`, send part i to rank i, and join the parts that arrive along `join`."""

    @staticmethod
    def forward(ctx, x, *arguments):
        ctx.arguments = arguments
        return TokensForHeads.exchanged(x, *arguments)

    @staticmethod
    def backward(ctx, dy):
        cut, join, cp = ctx.arguments
        return TokensForHeads.exchanged(dy, join, cut, cp), None, None, None  # in the other direction

    @staticmethod
    def exchanged(x, cut, join, cp):
        parts = torch.stack(x.chunk(cp.size, cut))
        return torch.cat(all_to_all(parts, cp, "tokens for heads").wait().unbind(), join)
