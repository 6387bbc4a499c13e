"""Causal attention in Triton: the masked softmax alone, and attention that never stores the [s, s] matrix.

Row i (a query) uses the keys j <= i only. The softmax kernel reads a row up to the diagonal, in groups of 8 columns.
Attention computes [s, s] in tiles and skips the tiles above the diagonal.

Both compute powers of 2 instead of e: exp(x) = 2^(x log2 e). `ex2` is one instruction, exp is five. The kernels
multiply log2 e into the softmax's scale: c = scale log2 e. In 2^(c x - m), m is the maximum of c x in the row. The
product and the subtraction are one `fma`, rounded once. A rounding error of m scales the whole row; the division by
the row's sum cancels this factor.
"""

import math

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))

# --- causal scaled softmax ------------------------------------------------------------------------------------------
#
#     p_ij = exp(scale x_ij - m_i) / sum_j' exp(scale x_ij' - m_i)   for j, j' <= i;   p_ij = 0 for j > i
#     m_i = max_j (scale x_ij)                                       for j <= i
#
#     forward     one row a program, held in registers: load, max, exp, sum, divide, store
#     backward    p is saved by forward: dx = scale p (dp - sum_j p_j dp_j), from d softmax / dx = diag(p) - p p^T
#
# This kernel is known from Megatron-LM (`scaled_upper_triang_masked_softmax`; Shoeybi et al., arXiv 1909.08053). It
# fuses scale, mask, softmax and two casts: five passes over memory in plain PyTorch, one here. Floor per element of
# [s, s] in bf16: forward 3 bytes (half of x read, all of p written), backward 4 (half of p and half of dp read, all of
# dx written). `_causal_row` reads groups of 8 columns, on average 4 more columns a row: 3 + 8/s and 4 + 16/s bytes, or
# 3.008 and 4.016 at s = 1024.


@triton.jit
def _causal_row(s, BLOCK: tl.constexpr):
    """Return this program's row: (offset of its first element, columns, three masks: to load, j <= i, inside the row).

    The load mask is constant in each group of 8 columns, and the last loaded group contains the diagonal. Such a mask
    allows 16-byte loads. The mask `column <= i` would split each of these loads into eight.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    i = row % s
    exists = column < s
    return row.to(tl.int64) * s, column, exists & (column // 8 <= i // 8), column <= i, exists


@triton.jit
def causal_softmax_forward(X, P, s, scale, BLOCK: tl.constexpr):
    row, column, load, seen, exists = _causal_row(s, BLOCK)
    x = tl.load(X + row + column, mask=load, other=0.0).to(tl.float32)
    x = tl.where(seen, x, float("-inf"))
    c = scale * LOG2E
    p = tl.exp2(tl.fma(x, c, -(tl.max(x, 0) * c)))  # 2^-inf = 0 above the diagonal
    tl.store(P + row + column, p * (1.0 / tl.sum(p, 0)), mask=exists)  # one division a row instead of s


@triton.jit
def causal_softmax_backward(P, DP, DX, s, scale, BLOCK: tl.constexpr):
    row, column, load, seen, exists = _causal_row(s, BLOCK)
    p = tl.load(P + row + column, mask=load, other=0.0).to(tl.float32)  # 0 above the diagonal
    dp = tl.load(DP + row + column, mask=load, other=0.0).to(tl.float32)
    dp = tl.where(seen, dp, 0.0)  # dp above the diagonal may be nan
    dx = p * scale * (dp - tl.sum(p * dp, 0))
    tl.store(DX + row + column, dx, mask=exists)


def one_row(width):
    """Return launch options for programs with one row in registers: 8 elements a thread, one 16-byte load of bf16."""
    block = triton.next_power_of_2(width)
    return dict(BLOCK=block, num_warps=min(max(block // 256, 1), 16))


class CausalSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, scale):
        scores = scores.contiguous()
        s = scores.shape[-1]
        p = torch.empty_like(scores)
        with torch.cuda.device_of(scores):
            causal_softmax_forward[(scores.numel() // s,)](scores, p, s, scale, **one_row(s))
        ctx.save_for_backward(p)
        ctx.scale = scale
        return p

    @staticmethod
    def backward(ctx, dp):
        (p,) = ctx.saved_tensors
        s = p.shape[-1]
        dx = torch.empty_like(p)
        with torch.cuda.device_of(p):
            causal_softmax_backward[(p.numel() // s,)](p, dp.contiguous(), dx, s, ctx.scale, **one_row(s))
        return dx, None


def causal_softmax(scores, scale):
    """Return softmax(scale * scores) over the columns up to the diagonal, 0 above it. [..., s, s] -> [..., s, s].

    scores: float32, float16 or bfloat16; scale > 0. Computes in float32. Except for rounding, the result equals
    `(scale * scores).masked_fill(torch.ones(s, s).triu(1).bool(), -inf).softmax(-1)`.
    """
    return CausalSoftmax.apply(scores, float(scale))


# --- attention ------------------------------------------------------------------------------------------------------
#
#     S = q k^T / sqrt(d)      P = causal softmax of S      o = P v         per sample and head: [s, s] and [s, d]
#
# FlashAttention-2 (Dao, arXiv 2307.08691) computes P tile by tile on the chip and never stores it. The softmax of a row
# needs the row's maximum m and sum l. The *online* softmax (Milakov and Gimelshein, arXiv 1805.02867) keeps m and l of
# the keys so far. When the maximum grows, l and o are scaled down. In these formulas, S is multiplied by log2 e:
#
#     for every tile of keys:     m' = max(m, max_j S_j)      alpha = 2^(m - m')      P_j = 2^(S_j - m')
#                                 l = alpha l + sum_j P_j     o = alpha o + P v       m = m'
#     at the end:                 o = o / l                   L = m + log2 l
#
# L is log2 of the row's sum of exponentials. From L, backward computes any tile of P again: P = 2^(S - L).
#
#     dv = P^T do      dP = do v^T      dS = P (dP - delta)      dq = dS k / sqrt(d)      dk = dS^T q / sqrt(d)
#
# with delta_i = sum_j P_ij dP_ij = sum_d o_id do_id (section 3.1 of the paper). So backward needs no whole row of P.
# Backward launches three kernels. The first computes delta. The second computes dk and dv: a program has one tile of
# keys and loops over the queries that see them. The third computes dq: a program has one tile of queries and loops
# over the keys that they see. Each element has one writer, so there are no atomics and two runs give the same bits.
# But S and dP are computed twice: 7 products instead of 5.
#
# Causality by tiles: a program of ROWS queries first loops over the key tiles below the diagonal without a mask, then
# over the ROWS / COLUMNS tiles on the diagonal with a mask. Indices of the tiles, with ROWS = 2 COLUMNS:
#
#     keys       0   1   2   3   4   5
#     queries 0  \   \                       \  on the diagonal: masked
#             1  .   .   \   \               .  below: not masked
#             2  .   .   .   .   \   \          above: skipped
#
# Operations per head: forward 2 products of 2 s^2 d each; the causal half is 2 s^2 d in total. The masked halves of
# the diagonal tiles add a share of ROWS/s. Backward: 7 s^2 d (floor 5). Memory traffic in bf16, per element of o:
# forward 8 bytes (q, k, v, o) + 4/d (L); backward 26 bytes (delta 4; dk, dv 12; dq 10) + 20/d (L, delta). If several
# programs of a launch read the same tile, the tile counts once, because the cache should serve the other reads. Kept
# for backward: qkv, o, and L with 4 bytes a row. Plain attention keeps s numbers of P a row.


@triton.jit
def _pointers(X, first, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to the tile [ROWS, WIDTH] of X at row `first`, in int64 because s * stride may exceed 2^31."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    return X + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])


@triton.jit
def _inside(first, s, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the mask of a tile's elements in rows < s and columns < D (WIDTH is D rounded up to a power of two)."""
    inside = (first + tl.arange(0, ROWS) < s)[:, None]
    if D < WIDTH:
        inside = inside & (tl.arange(0, WIDTH) < D)[None, :]
    return inside


@triton.jit
def _load(X, first, stride, s, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows first .. first + ROWS of X, [ROWS, WIDTH], with 0 for elements outside of X."""
    inside = _inside(first, s, D, ROWS, WIDTH)
    return tl.load(_pointers(X, first, stride, ROWS, WIDTH), mask=inside, other=0.0)


@triton.jit
def _store(X, x, first, stride, s, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    inside = _inside(first, s, D, ROWS, WIDTH)
    tl.store(_pointers(X, first, stride, ROWS, WIDTH), x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def _scores(
    q, K, j, first, stride, s,
    MASKED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return (k [COLUMNS, WIDTH], q k^T [ROWS, COLUMNS]) of the keys from j on. MASKED: -inf above the diagonal."""
    k = _load(K, j, stride, s, D, COLUMNS, WIDTH)
    x = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        seen = (j + tl.arange(0, COLUMNS))[None, :] <= (first + tl.arange(0, ROWS))[:, None]
        x = tl.where(seen, x, float("-inf"))
    return k, x


@triton.jit
def _over_keys(
    o, l, m, q, K, V, first, start, stop, stride, s, c,
    MASKED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Update o, l and m of one tile of queries with the keys start .. stop (the online softmax above)."""
    for j in range(start, stop, COLUMNS):
        _, x = _scores(q, K, j, first, stride, s, MASKED, D, ROWS, COLUMNS, WIDTH)
        above = tl.maximum(m, tl.max(x, 1) * c)  # finite: every query sees the first key
        p = tl.exp2(tl.fma(x, c, -above[:, None]))
        alpha = tl.exp2(m - above)
        l = tl.fma(l, alpha, tl.sum(p, 1))
        m = above
        v = _load(V, j, stride, s, D, COLUMNS, WIDTH)
        o = tl.dot(p.to(v.dtype), v, o * alpha[:, None], input_precision="ieee")
    return o, l, m


@triton.jit
def attention_forward(
    Q, K, V, O, L, s, a, stride_b, stride_s, stride_a, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute o [b, s, a, d] and L [b, a, s] float32 of one query tile. Grid: b a heads times cdiv(s, ROWS) tiles."""
    tiles = tl.cdiv(s, ROWS)
    tile = tiles - 1 - tl.program_id(0) % tiles  # longest first: the last queries have the most keys
    head = tl.program_id(0) // tiles
    sample = (head // a).to(tl.int64)
    offset = sample * stride_b + (head % a) * stride_a
    Q, K, V = Q + offset, K + offset, V + offset
    first = tile * ROWS
    stop = tl.minimum(first + ROWS, s)
    c = scale * LOG2E
    q = _load(Q, first, stride_s, s, D, ROWS, WIDTH)
    o = tl.zeros([ROWS, WIDTH], tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    o, l, m = _over_keys(o, l, m, q, K, V, first, 0, first, stride_s, s, c, False, D, ROWS, COLUMNS, WIDTH)
    o, l, m = _over_keys(o, l, m, q, K, V, first, first, stop, stride_s, s, c, True, D, ROWS, COLUMNS, WIDTH)
    row = first + tl.arange(0, ROWS)
    tl.store(L + head.to(tl.int64) * s + row, m + tl.log2(l), mask=row < s)
    O += sample * s * a * D + (head % a) * D
    _store(O, o * (1.0 / l)[:, None], first, a * D, s, D, ROWS, WIDTH)


@triton.jit
def attention_delta(O, DO, DELTA, s, a, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Compute delta = sum over d of o do, [b, a, s] float32. It reads 4 bytes per element of o in bf16."""
    tiles = tl.cdiv(s, ROWS)
    first = tl.program_id(0) % tiles * ROWS
    head = tl.program_id(0) // tiles
    offset = (head // a).to(tl.int64) * s * a * D + (head % a) * D
    o = _load(O + offset, first, a * D, s, D, ROWS, WIDTH).to(tl.float32)
    do = _load(DO + offset, first, a * D, s, D, ROWS, WIDTH).to(tl.float32)
    row = first + tl.arange(0, ROWS)
    tl.store(DELTA + head.to(tl.int64) * s + row, tl.sum(o * do, 1), mask=row < s)


@triton.jit
def _over_queries(
    dk, dv, k, v, Q, DO, L, DELTA, first, start, stop, stride, stride_o, s, c,
    MASKED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the share of the queries start .. stop to dk and dv of one tile of keys.

    P and dS are computed transposed, with keys as rows. Then each is the left operand of the next product, and tensor
    cores can read left operands from registers. Queries with an index >= s need no mask: their q, do, L and delta are
    read as 0. Then P = 1 and dP = dS = 0, and these queries add 0 to dv and dk.
    """
    for i in range(start, stop, ROWS):
        row = i + tl.arange(0, ROWS)
        q = _load(Q, i, stride, s, D, ROWS, WIDTH)
        x = tl.dot(k, tl.trans(q), input_precision="ieee")  # [COLUMNS, ROWS]
        if MASKED:
            x = tl.where((first + tl.arange(0, COLUMNS))[:, None] <= row[None, :], x, float("-inf"))
        p = tl.exp2(tl.fma(x, c, -tl.load(L + row, mask=row < s, other=0.0)[None, :]))
        do = _load(DO, i, stride_o, s, D, ROWS, WIDTH)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - tl.load(DELTA + row, mask=row < s, other=0.0)[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def attention_backward_keys(
    Q, K, V, DO, L, DELTA, DQKV, s, a, stride_b, stride_s, stride_a, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of one tile of COLUMNS keys to dqkv [b, s, 3, a, d]. Grid: b a heads times cdiv(s, COLUMNS)."""
    tiles = tl.cdiv(s, COLUMNS)
    first = tl.program_id(0) % tiles * COLUMNS  # longest first: the first keys have the most queries
    head = tl.program_id(0) // tiles
    sample = (head // a).to(tl.int64)
    offset = sample * stride_b + (head % a) * stride_a
    Q, K, V = Q + offset, K + offset, V + offset
    DO += sample * s * a * D + (head % a) * D
    L += head.to(tl.int64) * s
    DELTA += head.to(tl.int64) * s
    stop = tl.minimum(first + COLUMNS, s)
    c = scale * LOG2E
    k = _load(K, first, stride_s, s, D, COLUMNS, WIDTH)
    v = _load(V, first, stride_s, s, D, COLUMNS, WIDTH)
    dk = tl.zeros([COLUMNS, WIDTH], tl.float32)
    dv = tl.zeros([COLUMNS, WIDTH], tl.float32)
    dk, dv = _over_queries(
        dk, dv, k, v, Q, DO, L, DELTA, first, first, stop, stride_s, a * D, s, c, True, D, ROWS, COLUMNS, WIDTH
    )
    dk, dv = _over_queries(
        dk, dv, k, v, Q, DO, L, DELTA, first, stop, s, stride_s, a * D, s, c, False, D, ROWS, COLUMNS, WIDTH
    )
    DK = DQKV + sample * s * 3 * a * D + (a + head % a) * D
    _store(DK, dk * scale, first, 3 * a * D, s, D, COLUMNS, WIDTH)
    _store(DK + a * D, dv, first, 3 * a * D, s, D, COLUMNS, WIDTH)


@triton.jit
def _over_keys_backward(
    dq, q, do, log, delta, K, V, first, start, stop, stride, s, c,
    MASKED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the share of the keys start .. stop to dq of one tile of queries."""
    for j in range(start, stop, COLUMNS):
        k, x = _scores(q, K, j, first, stride, s, MASKED, D, ROWS, COLUMNS, WIDTH)
        p = tl.exp2(tl.fma(x, c, -log[:, None]))
        v = _load(V, j, stride, s, D, COLUMNS, WIDTH)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def attention_backward_queries(
    Q, K, V, DO, L, DELTA, DQKV, s, a, stride_b, stride_s, stride_a, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dq of one tile of ROWS queries to dqkv [b, s, 3, a, d]. Grid: b a heads times cdiv(s, ROWS) tiles."""
    tiles = tl.cdiv(s, ROWS)
    first = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    head = tl.program_id(0) // tiles
    sample = (head // a).to(tl.int64)
    offset = sample * stride_b + (head % a) * stride_a
    Q, K, V = Q + offset, K + offset, V + offset
    stop = tl.minimum(first + ROWS, s)
    c = scale * LOG2E
    q = _load(Q, first, stride_s, s, D, ROWS, WIDTH)
    do = _load(DO + sample * s * a * D + (head % a) * D, first, a * D, s, D, ROWS, WIDTH)
    row = first + tl.arange(0, ROWS)
    log = tl.load(L + head.to(tl.int64) * s + row, mask=row < s, other=0.0)
    delta = tl.load(DELTA + head.to(tl.int64) * s + row, mask=row < s, other=0.0)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    dq = _over_keys_backward(
        dq, q, do, log, delta, K, V, first, 0, first, stride_s, s, c, False, D, ROWS, COLUMNS, WIDTH
    )
    dq = _over_keys_backward(
        dq, q, do, log, delta, K, V, first, first, stop, stride_s, s, c, True, D, ROWS, COLUMNS, WIDTH
    )
    DQ = DQKV + sample * s * 3 * a * D + (head % a) * D
    _store(DQ, dq * scale, first, 3 * a * D, s, D, ROWS, WIDTH)


# (ROWS, COLUMNS, warps, stages) of each kernel, for each (kind of GPU or float32, width). In `forward` and `queries`
# ROWS is a multiple of COLUMNS, in `keys` COLUMNS is a multiple of ROWS, so the masked loop and the unmasked loop
# cover whole tiles. The tiles must fit into the 255 registers of a thread: an accumulator [ROWS, WIDTH] needs ROWS
# WIDTH / (32 warps) of them. Values that do not fit *spill* to memory. Two or three programs share a multiprocessor:
# one computes products while another computes its softmax. Small tiles waste less work on the diagonal, large tiles
# read k and v less often. "hopper" (sm_90, sm_100): tensor cores read shared memory directly. "ampere" (all other
# GPUs): the tiles need at most 99 KB of shared memory, which every GPU since Ampere has. "float32": no tensor cores.
# Nothing spills, except two registers with "float32" in one version of Triton. The tiles were chosen by the compiler's
# report, not by measured time.
TILES = {
    ("hopper", 64): dict(forward=(128, 64, 8, 3), keys=(64, 64, 4, 3), queries=(64, 64, 4, 3)),
    ("hopper", 128): dict(forward=(128, 64, 8, 3), keys=(32, 64, 4, 2), queries=(64, 64, 4, 2)),
    ("ampere", 64): dict(forward=(128, 64, 8, 3), keys=(32, 128, 8, 2), queries=(64, 32, 4, 3)),
    ("ampere", 128): dict(forward=(128, 32, 8, 3), keys=(32, 64, 8, 2), queries=(128, 32, 8, 2)),
    ("float32", 64): dict(forward=(32, 32, 8, 1), keys=(16, 32, 8, 1), queries=(32, 32, 8, 1)),
    ("float32", 128): dict(forward=(16, 16, 8, 1), keys=(16, 16, 8, 1), queries=(16, 16, 8, 1)),
}


def attention_options(d, dtype, capability):
    """Return constants and launch options of each kernel. capability: the GPU's compute capability, such as (9, 0)."""
    if d > 128:
        raise ValueError(f"attention: head size {d} is too large, at most 128")
    products = "float32" if dtype == torch.float32 else "hopper" if capability[0] in (9, 10) else "ampere"
    width = max(triton.next_power_of_2(d), 16)  # tensor cores need at least 16
    options = {
        which: dict(D=d, WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages)
        for which, (rows, columns, warps, stages) in TILES[products, max(width, 64)].items()
    }
    return options | {"delta": dict(D=d, WIDTH=width, ROWS=64, num_warps=4)}


def capability(device):
    """Return the GPU's compute capability, or (9, 0) under the interpreter, which has none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        b, s, a, d = q.shape
        if q.stride(-1) != 1 or len({x.stride() for x in (q, k, v)}) > 1:
            q, k, v = (x.contiguous() for x in (q, k, v))
        ctx.options = attention_options(d, q.dtype, capability(q.device))
        o = q.new_empty(b, s, a, d)
        log = q.new_empty(b, a, s, dtype=torch.float32)
        ctx.sizes = s, a, *q.stride()[:3], d**-0.5
        launch(attention_forward, ctx.options["forward"], b * a, s, "ROWS", q, k, v, o, log, *ctx.sizes)
        ctx.save_for_backward(q, k, v, o, log)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, log = ctx.saved_tensors
        b, s, a, d = q.shape
        do = do.contiguous()
        delta = torch.empty_like(log)
        dqkv = q.new_empty(b, s, 3, a, d)
        launch(attention_delta, ctx.options["delta"], b * a, s, "ROWS", o, do, delta, s, a)
        shared = q, k, v, do, log, delta, dqkv, *ctx.sizes
        launch(attention_backward_keys, ctx.options["keys"], b * a, s, "COLUMNS", *shared)
        launch(attention_backward_queries, ctx.options["queries"], b * a, s, "ROWS", *shared)
        return dqkv.unbind(2)


def launch(kernel, options, heads, s, along, *arguments):
    """Run one program for each head and each tile of tokens, on the tensors' device."""
    with torch.cuda.device_of(arguments[0]):
        kernel[(heads * triton.cdiv(s, options[along]),)](*arguments, **options)


def attention(q, k, v, cache=None):
    """Return softmax(q k^T / sqrt(d)) v per head, causal: q, k, v [b, s, a, d] -> [b, s, a, d] of the same dtype.

    q, k, v: float32, float16 or bfloat16. Products are in this dtype, sums in float32. d is at most 128, best a power
    of two. The three are copied if their strides differ or their last stride is not 1. Two runs give the same bits.
    `reference.attention` is the plain form. Only the plain form supports a `cache`, for generation.
    """
    assert cache is None
    return Attention.apply(q, k, v)


# --- the model's launches, for compiling without a GPU ---------------------------------------------------------------


def configurations(capability, dtypes=("bf16", "fp16"), sizes=(64, 128), s=1024):
    """Return [(name, kernel, types of the non-constant arguments, constants and options)] of the model's launches.

    types: the types in order, in the notation of Triton's compiler, such as "*bf16 *fp32 i32 fp32".
    """
    found = []
    for t in dtypes:
        dtype = dict(bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32)[t]
        softmax, types = one_row(s), f"*{t} *{t} i32 fp32"
        found.append((f"causal_softmax_forward {t} s={s}", causal_softmax_forward, types, softmax))
        found.append((f"causal_softmax_backward {t} s={s}", causal_softmax_backward, f"*{t} {types}", softmax))
        for d in sizes:
            options = attention_options(d, dtype, capability)
            backward = f"*{t} *{t} *{t} *{t} *fp32 *fp32 *{t} i32 i32 i32 i32 i32 fp32"
            for which, kernel, types in (
                ("forward", attention_forward, f"*{t} *{t} *{t} *{t} *fp32 i32 i32 i32 i32 i32 fp32"),
                ("delta", attention_delta, f"*{t} *{t} *fp32 i32 i32"),
                ("keys", attention_backward_keys, backward),
                ("queries", attention_backward_queries, backward),
            ):
                found.append((f"{kernel.__name__} {t} d={d}", kernel, types, options[which]))
    return found
