"""Causal attention in Triton that never stores the [s, s] matrix.

Row i (a query) uses the keys j <= i only. Per sample and head, the matrices are [s, s] and [s, d]:

    S = q k^T / sqrt(d)      P = causal softmax of S      o = P v

FlashAttention-2 (Dao, arXiv 2307.08691) computes P tile by tile on the chip. The *online* softmax (Milakov and
Gimelshein, arXiv 1805.02867) keeps the maximum m and the sum l of the keys so far; when the maximum grows, l and o are
scaled down. In these formulas, S is multiplied by log2 e, because `exp2` is one instruction and `exp` is five:

    for every tile of keys:     m' = max(m, max_j S_j)      alpha = 2^(m - m')      P_j = 2^(S_j - m')
                                l = alpha l + sum_j P_j     o = alpha o + P v       m = m'
    at the end:                 o = o / l                   L = m + log2 l

L is log2 of the row's sum of exponentials. From L, backward computes any tile of P again: P = 2^(S - L).

    dv = P^T do      dP = do v^T      dS = P (dP - delta)      dq = dS k / sqrt(d)      dk = dS^T q / sqrt(d)

with delta_i = sum_j P_ij dP_ij = sum_d o_id do_id (FlashAttention-2, section 3.1). One kernel computes delta. One
computes dk and dv: a program has a tile of keys and loops over the queries that see them. One computes dq: a program
has a tile of queries. Each element has one writer, so two runs give the same bits, but S and dP are computed twice: 7
products instead of 5.

Indices of the tiles, with ROWS = 2 COLUMNS:

    keys       0   1   2   3   4   5
    queries 0  m   m                       m: on the diagonal, with a mask
            1  .   .   m   m               .: below the diagonal, without a mask
            2  .   .   .   .   m   m       empty: above the diagonal, skipped
"""

import math

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _place(s, a, stride_b, stride_a, SIZE, D):
    """Return (index of a program's tile of SIZE tokens, number of tiles, offset of its head in L, in q, and in o)."""
    tiles = tl.cdiv(s, SIZE)
    head = tl.program_id(0) // tiles
    sample = (head // a).to(tl.int64)
    of_q, of_o = sample * stride_b + (head % a) * stride_a, sample * s * a * D + (head % a) * D
    return tl.program_id(0) % tiles, tiles, head.to(tl.int64) * s, of_q, of_o


@triton.jit
def _tile(X, first, stride, s, D, ROWS, WIDTH):
    """Return (pointers to rows first .. first + ROWS of X, mask of the elements inside of X), both [ROWS, WIDTH]."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (first + row < s)[:, None]
    if D < WIDTH:
        inside = inside & (column < D)[None, :]
    return X + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :]), inside


@triton.jit
def _load(X, first, stride, s, D, ROWS, WIDTH):
    pointers, inside = _tile(X, first, stride, s, D, ROWS, WIDTH)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _store(X, x, first, stride, s, D):
    pointers, inside = _tile(X, first, stride, s, D, x.shape[0], x.shape[1])
    tl.store(pointers, x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def _scores(q, k, first, j, MASKED):
    x = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        row, column = first + tl.arange(0, q.shape[0]), j + tl.arange(0, k.shape[0])
        x = tl.where(column[None, :] <= row[:, None], x, float("-inf"))
    return x


@triton.jit
def attention_forward(
    Q, K, V, O, L, s, a, stride_b, stride_s, stride_a, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute o [b, s, a, d] and L [b, a, s] float32 of one tile of ROWS queries."""
    tile, tiles, of_l, of_q, of_o = _place(s, a, stride_b, stride_a, ROWS, D)
    first = (tiles - 1 - tile) * ROWS  # longest first
    stop = tl.minimum(first + ROWS, s)
    c = scale * LOG2E
    q = _load(Q + of_q, first, stride_s, s, D, ROWS, WIDTH)
    o = tl.zeros([ROWS, WIDTH], tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    for MASKED in tl.static_range(2):  # the tiles below the diagonal, then those on it
        for j in range(first if MASKED else 0, stop if MASKED else first, COLUMNS):
            k = _load(K + of_q, j, stride_s, s, D, COLUMNS, WIDTH)
            x = _scores(q, k, first, j, MASKED)
            above = tl.maximum(m, tl.max(x, 1) * c)  # finite: every query sees the first key
            p = tl.exp2(tl.fma(x, c, -above[:, None]))
            alpha = tl.exp2(m - above)
            l = tl.fma(l, alpha, tl.sum(p, 1))
            m = above
            v = _load(V + of_q, j, stride_s, s, D, COLUMNS, WIDTH)
            o = tl.dot(p.to(v.dtype), v, o * alpha[:, None], input_precision="ieee")
    row = first + tl.arange(0, ROWS)
    tl.store(L + of_l + row, m + tl.log2(l), mask=row < s)
    _store(O + of_o, o * (1.0 / l)[:, None], first, a * D, s, D)


@triton.jit
def attention_delta(O, DO, DELTA, s, a, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """DELTA: [b, a, s] float32."""
    tile, _, of_l, _, of_o = _place(s, a, 0, 0, ROWS, D)
    o = _load(O + of_o, tile * ROWS, a * D, s, D, ROWS, WIDTH).to(tl.float32)
    do = _load(DO + of_o, tile * ROWS, a * D, s, D, ROWS, WIDTH).to(tl.float32)
    row = tile * ROWS + tl.arange(0, ROWS)
    tl.store(DELTA + of_l + row, tl.sum(o * do, 1), mask=row < s)


@triton.jit
def attention_backward_keys(
    Q, K, V, DO, L, DELTA, DK, DV, s, a, stride_b, stride_s, stride_a, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dk and dv [b, s, a, d] of one tile of COLUMNS keys.

    P and dS are transposed: tensor cores read the left operand of the next product from registers. Queries beyond s
    need no mask: they are read as 0 and add 0.
    """
    tile, _, of_l, of_q, of_o = _place(s, a, stride_b, stride_a, COLUMNS, D)
    first = tile * COLUMNS  # longest first
    Q, DO, L, DELTA = Q + of_q, DO + of_o, L + of_l, DELTA + of_l  # in the loop they would need more registers
    stop = tl.minimum(first + COLUMNS, s)
    c = scale * LOG2E
    k = _load(K + of_q, first, stride_s, s, D, COLUMNS, WIDTH)
    v = _load(V + of_q, first, stride_s, s, D, COLUMNS, WIDTH)
    dk = tl.zeros([COLUMNS, WIDTH], tl.float32)
    dv = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for BELOW in tl.static_range(2):  # the tiles on the diagonal, then those below it
        for i in range(stop if BELOW else first, s if BELOW else stop, ROWS):
            row = i + tl.arange(0, ROWS)
            q = _load(Q, i, stride_s, s, D, ROWS, WIDTH)
            x = tl.dot(k, tl.trans(q), input_precision="ieee")  # [COLUMNS, ROWS]
            if not BELOW:
                x = tl.where((first + tl.arange(0, COLUMNS))[:, None] <= row[None, :], x, float("-inf"))
            p = tl.exp2(tl.fma(x, c, -tl.load(L + row, mask=row < s, other=0.0)[None, :]))
            do = _load(DO, i, a * D, s, D, ROWS, WIDTH)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            ds = p * (dp - tl.load(DELTA + row, mask=row < s, other=0.0)[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    _store(DK + of_o, dk * scale, first, a * D, s, D)
    _store(DV + of_o, dv, first, a * D, s, D)


@triton.jit
def attention_backward_queries(
    Q, K, V, DO, L, DELTA, DQ, s, a, stride_b, stride_s, stride_a, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dq [b, s, a, d] of one tile of ROWS queries."""
    tile, tiles, of_l, of_q, of_o = _place(s, a, stride_b, stride_a, ROWS, D)
    first = (tiles - 1 - tile) * ROWS
    stop = tl.minimum(first + ROWS, s)
    c = scale * LOG2E
    q = _load(Q + of_q, first, stride_s, s, D, ROWS, WIDTH)
    do = _load(DO + of_o, first, a * D, s, D, ROWS, WIDTH)
    row = first + tl.arange(0, ROWS)
    log = tl.load(L + of_l + row, mask=row < s, other=0.0)
    delta = tl.load(DELTA + of_l + row, mask=row < s, other=0.0)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    for MASKED in tl.static_range(2):
        for j in range(first if MASKED else 0, stop if MASKED else first, COLUMNS):
            k = _load(K + of_q, j, stride_s, s, D, COLUMNS, WIDTH)
            p = tl.exp2(tl.fma(_scores(q, k, first, j, MASKED), c, -log[:, None]))
            v = _load(V + of_q, j, stride_s, s, D, COLUMNS, WIDTH)
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    _store(DQ + of_o, dq * scale, first, a * D, s, D)


# (ROWS, COLUMNS, warps, stages) of each kernel, for each (kind of GPU or float32, width). The tiles were chosen by the
# compiler's report (NOTES.md).
#
#     ROWS, COLUMNS   In `forward` and `queries` ROWS is a multiple of COLUMNS, in `keys` COLUMNS is a multiple of ROWS.
#     stages          The number of tiles of k and v in shared memory.
#     "hopper"        sm_90 and sm_100: tensor cores read shared memory directly.
#     "ampere"        All other GPUs: the tiles need at most 99 KB of shared memory.
#     "float32"       The products do not use tensor cores.
TILES = {
    ("hopper", 64): dict(forward=(128, 64, 8, 3), keys=(64, 64, 4, 3), queries=(64, 64, 4, 3)),
    ("hopper", 128): dict(forward=(128, 64, 8, 3), keys=(32, 64, 4, 2), queries=(64, 64, 4, 2)),
    ("ampere", 64): dict(forward=(128, 64, 8, 3), keys=(32, 128, 8, 2), queries=(64, 32, 4, 3)),
    ("ampere", 128): dict(forward=(128, 32, 8, 3), keys=(32, 64, 8, 2), queries=(128, 32, 8, 2)),
    ("float32", 64): dict(forward=(32, 32, 8, 1), keys=(16, 32, 8, 1), queries=(32, 32, 8, 1)),
    ("float32", 128): dict(forward=(16, 16, 8, 1), keys=(16, 16, 8, 1), queries=(16, 16, 8, 1)),
}


def attention_options(d, dtype, capability):
    """Return {kernel, as in TILES, or "delta": its launch options}. capability: the GPU's, such as (9, 0)."""
    products = "float32" if dtype == torch.float32 else "hopper" if capability[0] in (9, 10) else "ampere"
    width = max(triton.next_power_of_2(d), 16)  # tensor cores need at least 16
    options = {
        which: dict(D=d, WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages)
        for which, (rows, columns, warps, stages) in TILES[products, max(width, 64)].items()
    }
    return options | {"delta": dict(D=d, WIDTH=width, ROWS=64, num_warps=4)}


def capability(device):
    """Return the GPU's compute capability, or (9, 0) under the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        b, s, a, d = q.shape
        if q.stride(-1) != 1 or len({x.stride() for x in (q, k, v)}) > 1:
            q, k, v = (x.contiguous() for x in (q, k, v))
        ctx.options = attention_options(d, q.dtype, capability(q.device))
        o, log = q.new_empty(b, s, a, d), q.new_empty(b, a, s, dtype=torch.float32)
        ctx.sizes = s, a, *q.stride()[:3], d**-0.5
        launch(attention_forward, ctx.options["forward"], b * a, s, "ROWS", q, k, v, o, log, *ctx.sizes)
        ctx.save_for_backward(q, k, v, o, log)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, log = ctx.saved_tensors
        b, s, a, _ = q.shape
        do, delta = do.contiguous(), torch.empty_like(log)
        launch(attention_delta, ctx.options["delta"], b * a, s, "ROWS", o, do, delta, s, a)
        dq, dk, dv = q.new_empty(3, *q.shape)
        inputs = q, k, v, do, log, delta
        keys, queries = ctx.options["keys"], ctx.options["queries"]
        launch(attention_backward_keys, keys, b * a, s, "COLUMNS", *inputs, dk, dv, *ctx.sizes)
        launch(attention_backward_queries, queries, b * a, s, "ROWS", *inputs, dq, *ctx.sizes)
        return dq, dk, dv


def launch(kernel, options, heads, s, along, *arguments):
    kernel[(heads * triton.cdiv(s, options[along]),)](*arguments, **options)


def attention(q, k, v, cache=None):
    """q, k, v: float32, float16 or bfloat16; d at most 128. Products are in this dtype, sums in float32."""
    assert cache is None
    if q.shape[2] != k.shape[2]:  # the kernels have as many heads of keys as of queries
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    return Attention.apply(q, k, v)
