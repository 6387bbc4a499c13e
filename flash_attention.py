"""Causal attention in Triton that never stores the [s, s] matrix.

Row i (a query) uses the keys j <= i only. Per sample and head, the matrices are [s, s] and [s, d]:

    S = q k^T / sqrt(d)      P = causal softmax of S      o = P v

FlashAttention-2 (Dao, arXiv 2307.08691) computes P tile by tile on the chip and never stores it. The softmax of a row
needs the row's maximum m and sum l. The *online* softmax (Milakov and Gimelshein, arXiv 1805.02867) keeps m and l of
the keys so far. When the maximum grows, l and o are scaled down. In these formulas, S is multiplied by log2 e:

    for every tile of keys:     m' = max(m, max_j S_j)      alpha = 2^(m - m')      P_j = 2^(S_j - m')
                                l = alpha l + sum_j P_j     o = alpha o + P v       m = m'
    at the end:                 o = o / l                   L = m + log2 l

L is log2 of the row's sum of exponentials. From L, backward computes any tile of P again: P = 2^(S - L).

    dv = P^T do      dP = do v^T      dS = P (dP - delta)      dq = dS k / sqrt(d)      dk = dS^T q / sqrt(d)

with delta_i = sum_j P_ij dP_ij = sum_d o_id do_id (section 3.1 of the paper). So backward needs no whole row of P.
Backward launches three kernels. The first computes delta. The second computes dk and dv: a program has one tile of
keys and loops over the queries that see them. The third computes dq: a program has one tile of queries and loops
over the keys that they see. Each element has one writer, so there are no atomics and two runs give the same bits.
But S and dP are computed twice: 7 products instead of 5.

Causality by tiles: a program of ROWS queries first loops over the key tiles below the diagonal without a mask, then
over the ROWS / COLUMNS tiles on the diagonal with a mask. Indices of the tiles, with ROWS = 2 COLUMNS:

    keys       0   1   2   3   4   5
    queries 0  m   m                       m: on the diagonal, with a mask
            1  .   .   m   m               .: below the diagonal, without a mask
            2  .   .   .   .   m   m       empty: above the diagonal, skipped

Operations per head: forward 2 products of 2 s^2 d each; the causal half is 2 s^2 d in total. The masked halves of
the diagonal tiles add a share of ROWS/s. Backward: 7 s^2 d (floor 5). Memory traffic in bf16, per element of o:
forward 8 bytes (q, k, v, o) + 4/d (L); backward 26 bytes (delta 4; dk, dv 12; dq 10) + 20/d (L, delta). If several
programs of a launch read the same tile, the tile counts once, because the cache should serve the other reads. Kept
for backward: qkv, o, and L with 4 bytes a row. Plain attention keeps s numbers of P a row.

The kernels compute powers of 2 instead of e: exp(x) = 2^(x log2 e), because `exp2` is one instruction and exp is five.
They multiply log2 e into the softmax's scale: c = scale log2 e. In 2^(c x - m), m is the maximum of c x in the row. The
product and the subtraction are one `fma`, rounded once. A rounding error of m scales the whole row; the division by
the row's sum cancels this factor.
"""

import math

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


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


# (ROWS, COLUMNS, warps, stages) of each kernel, for each (kind of GPU or float32, width). No time on a GPU is measured:
# the tiles were chosen by the compiler's report.
#
#     ROWS, COLUMNS   In `forward` and `queries` ROWS is a multiple of COLUMNS, in `keys` COLUMNS is a multiple of ROWS.
#                     So the masked and the unmasked loop cover whole tiles. Small tiles waste less work on the
#                     diagonal, large tiles read k and v less often.
#     warps           An accumulator [ROWS, WIDTH] needs ROWS WIDTH / (32 warps) of a thread's 255 registers. Values
#                     that do not fit *spill* to memory. Nothing spills, except two registers with "float32" in one
#                     version of Triton. Two or three programs share a multiprocessor: one computes products while
#                     another computes its softmax.
#     stages          The number of tiles of k and v in shared memory. A product reads one while the next are loaded.
#     "hopper"        sm_90 and sm_100: tensor cores read shared memory directly.
#     "ampere"        All other GPUs: the tiles need at most 99 KB of shared memory, which every GPU since Ampere has.
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
