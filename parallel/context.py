"""Context parallelism: the tokens of each sample are cut over n = cp ranks.

Only attention connects the tokens of a sample. The cp ranks have equal parameters: for ZeRO, gradient norm and
checkpoints they are data ranks. Two ways to compute attention:

    ring      keys and values travel from rank to rank         Liu et al., Ring Attention (arXiv 2310.01889)
    ulysses   each rank gets all tokens of 1/n of the heads    Jacobs et al., DeepSpeed-Ulysses (arXiv 2309.14509)

**Ring** (refused on a GPU: no kernel computes attention to a part of the keys). A late token sees more keys than an
early one. So a sample is cut into 2n equal parts, and rank r has the parts r and 2n-1-r, a zigzag. In turn i, rank r
has the keys and values of rank r-i (mod n), and all ranks have equal work. The turns of rank 1 of n = 4, which has the
parts 1 and 6:

    turn  keys of parts   of                who sees them
    0     1 6             itself            each token sees the tokens before it, as on one rank
    1     0 7             an earlier rank   both parts see all of part 0; no token sees part 7
    2     3 4             a later rank      part 6 sees both; part 1 sees neither
    3     2 5             a later rank      the same

While a rank computes with keys and values, it sends them to the next rank. Each turn gives y, attention to its keys
alone, and L = log sum_j exp(q k_j / sqrt(d)). Attention to the keys of two turns is y1 exp(L1 - L) + y2 exp(L2 - L)
with L = log(exp(L1) + exp(L2)). In backward, keys and values travel again, and their gradients one turn later. Each
rank adds its share, and after the last turn they are at the rank of their keys. The probabilities of a turn are
exp(q k / sqrt(d) - L).

**Ulysses.** Rank r has part r of n equal parts. Before attention an all_to_all exchanges tokens for heads: each rank
gets all tokens of a/(n t) heads, so n t must divide the number a of heads. A second all_to_all exchanges back.
"""

import math

import torch

from parallel.comm import all_to_all, rotate


def own_positions(s, cp, way):
    """Return this rank's positions in a sample of s tokens, ascending, [s/n]."""
    if way == "ulysses":
        return torch.arange(s).chunk(cp.size)[cp.rank]
    return ring_positions(s, cp.size, cp.rank)


def ring_positions(s, n, rank):
    parts = torch.arange(s).chunk(2 * n)
    return torch.cat([parts[rank], parts[-1 - rank]])


# --- ring -------------------------------------------------------------------------------------------------------------


class RingAttention(torch.autograd.Function):
    """q, k, v [b, s/n, a/t, d] of this rank's tokens -> the same."""

    @staticmethod
    def forward(ctx, q, k, v, cp, ops):
        wide = torch.promote_types(q.dtype, torch.float32)
        y, L = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], -math.inf, dtype=wide)
        for (keys, values), rows, seen, *positions in turns(torch.stack([k, v]), cp):
            part, part_L = ops.attention_part(q[:, rows], keys[:, seen], values[:, seen], *positions)
            total = torch.logaddexp(L[:, rows], part_L)
            y[:, rows] *= (L[:, rows] - total).exp()[..., None]
            y[:, rows] += (part_L - total).exp()[..., None] * part
            L[:, rows] = total
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, L)
        ctx.cp, ctx.ops = cp, ops
        return y

    @staticmethod
    def backward(ctx, dy):
        """Turn keys and values once more. Their gradient follows them, one turn behind, to the rank that owns them."""
        q, k, v, y, L = ctx.saved_tensors
        dq, local, travelling = torch.zeros_like(q, dtype=L.dtype), None, None
        for (keys, values), rows, seen, *positions in turns(torch.stack([k, v]), ctx.cp):
            pieces = dy[:, rows], q[:, rows], keys[:, seen], values[:, seen], y[:, rows], L[:, rows]
            part, *parts = ctx.ops.attention_part_backward(*pieces, *positions)
            dq[:, rows] += part
            gradient = L.new_zeros(2, *k.shape)
            gradient[:, :, seen] = torch.stack(parts).to(L.dtype)
            if local is None:  # this rank's own keys
                local = gradient
                continue
            if travelling:
                gradient += travelling.wait()
            travelling = rotate(gradient, ctx.cp, "gradients of keys and values")
        dk, dv = (local + travelling.wait()).to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def turns(kv, cp):
    """Yield (keys and values [2, b, s/n, a/t, d], the rows that may see them, the rows of them that may be seen,
    positions of both kinds of rows).
    """
    s = kv.shape[2]
    positions = [ring_positions(s * cp.size, cp.size, rank).to(kv.device) for rank in range(cp.size)]
    whole, first, second = slice(s), slice(s // 2), slice(s // 2, s)
    for turn in range(cp.size):
        last = turn == cp.size - 1
        arriving = None if last else rotate(kv, cp, "keys and values")
        rows = whole if turn <= cp.rank else second  # else: the keys of a later rank
        seen = first if 0 < turn <= cp.rank else whole  # first: those of an earlier rank
        yield kv, rows, seen, positions[cp.rank][rows], positions[cp.rank - turn][seen]
        kv = None if last else arriving.wait()


# --- Ulysses ----------------------------------------------------------------------------------------------------------


def ulysses(q, k, v, cp, ops):
    """q, k, v [b, s/n, a/t, d] of this rank's tokens -> the same."""
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


WAYS = {"ring": RingAttention.apply, "ulysses": ulysses}
