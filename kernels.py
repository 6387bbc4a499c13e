"""The operations of `reference.py` as fused Triton kernels, under the same names.

Between two matrix products, memory traffic takes nearly all the time: an H200 can do 200 operations of a matrix product
while it reads one byte. A fused kernel reads an element once, does all operations on it, and writes it once.

The *floor* of an operation is its least memory traffic: each input is read once, each result written once.

A `@triton.jit` function is the code of one *program*, and `kernel[grid](...)` starts many programs. A program computes
on small arrays, spread over its threads; 32 threads are a *warp*. Names in capitals are pointers or compile-time
constants. Row offsets are int64 because a tensor may have more than 2^31 elements.

All kernels compute in float32; a store rounds to its tensor's dtype. Unlike in `reference.py`, y is never overwritten,
and gradients of biases and norms are float32. No two programs add to one element, so equal inputs give equal bits.
A few *persistent* programs compute the sums over rows: each adds up many rows, and PyTorch adds their sums.
"""

import functools

import torch
import triton
import triton.language as tl

import reference
from flash_attention import LOG2E, attention  # noqa: F401
from reference import fmix64

WIDEST = 8192


@triton.jit
def _load(pointers, exists):
    return tl.load(pointers, mask=exists, other=0.0).to(tl.float32)


def one_row(width):
    """Return launch options for programs with one row in registers."""
    block = triton.next_power_of_2(width)
    return dict(BLOCK=block, num_warps=min(max(block // 256, 1), 16))


def persistent(x, each):
    """Return the number of persistent programs, `each` per multiprocessor."""
    return each * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


# --- dropout --------------------------------------------------------------------------------------------------------
#
# The mask has the same bits as `reference.dropout_mask`.


@triton.jit
def _fmix64(x):
    """`reference.fmix64`, on uint64."""
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 33)


@triton.jit
def _dropped(x, ROWS, row, column, salt, threshold, factor):
    """ROWS, salt, threshold, factor: as from `_drop_arguments`."""
    key = _fmix64((tl.load(ROWS + row) + salt).to(tl.uint64))
    low, high = key.to(tl.int32), (key >> 32).to(tl.int32)
    bits = (column * -1640531527 + low) ^ high
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -0x7B935975
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    return tl.where(bits >= threshold, x * factor, 0.0)


@functools.cache
def _salt(seed, site):
    return fmix64(torch.tensor(seed * 1009 + site)).item()


def _drop_arguments(drop):
    if drop is None:
        return None, 0, 0, 1.0
    return drop.rows, _salt(drop.seed, drop.site), int(drop.rate * 2**32) - 2**31, 1 / (1 - drop.rate)


def dropout(x, drop=None):
    """Floor in bf16: 4 bytes an element, also in backward."""
    return x if drop is None else Residual.apply(None, x, None, None, None, 0.0, drop)[0]


# --- bias + dropout + residual + LayerNorm or RMSNorm ---------------------------------------------------------------
#
#     z = x + dropout(y + bias)        mean = sum_c z / h      r = 1 / sqrt(sum_c (z - mean)^2 / h + eps)
#     out = n weight + norm_bias       n = (z - mean) r
#
# Forward: a program has one row. It rounds z to the activations' dtype *before* mean and r, so backward computes the
# same n. Floor in bf16: 8 bytes an element (x, y read; z, out written). Backward, with g = weight dout:
#
#     dz = r (g - sum_c g / h - n sum_c (g n) / h) + (the residual stream's gradient, which bypasses the norm)
#     dx = dz      dy = dropout(dz)
#     dbias = sum_rows dy      dweight = sum_rows dout n      dnorm_bias = sum_rows dout
#
# Floor in bf16: 8 bytes an element (dout, z, the residual stream's gradient read; dx written; dy is dx). With dropout,
# dy is written: 10 bytes. Rows longer than WIDEST do not fit into one multiprocessor's registers, so PyTorch
# normalizes them; also if LayerNorm has no bias.
#
# RMSNorm has mean = 0 everywhere, and no norm_bias: the floors are the same.
#
# The same kernels serve `dropout` (no x, bias and norm) and `add_` (no norm).


@triton.jit(do_not_specialize=["salt"])
def residual_forward(
    X, Y, BIAS, Z, WEIGHT, NORM_BIAS, OUT, MEAN, R, ROWS, salt, threshold, factor, epsilon, width, BLOCK: tl.constexpr
):
    """X, Y, Z, OUT [rows, width]; BIAS, WEIGHT, NORM_BIAS [width]; MEAN (None: RMSNorm), R [rows] float32."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < width
    offsets = row * width + column
    if Y is None:
        z = _load(X + offsets, exists)
    else:
        z = _load(Y + offsets, exists)
        if BIAS is not None:
            z += _load(BIAS + column, exists)
        if ROWS is not None:
            z = _dropped(z, ROWS, row, column, salt, threshold, factor)
        if X is not None:
            z += _load(X + offsets, exists)
        rounded = z.to(Z.dtype.element_ty)
        tl.store(Z + offsets, rounded, mask=exists)
        z = rounded.to(tl.float32)
    if OUT is not None:
        if MEAN is not None:
            mean = tl.sum(z, 0) / width
            z = tl.where(exists, z - mean, 0.0)
            tl.store(MEAN + row, mean)
        r = 1.0 / tl.sqrt(tl.sum(z * z, 0) / width + epsilon)
        out = z * r * _load(WEIGHT + column, exists)
        if NORM_BIAS is not None:
            out += _load(NORM_BIAS + column, exists)
        tl.store(OUT + offsets, out, mask=exists)
        tl.store(R + row, r)


@triton.jit(do_not_specialize=["salt"])
def residual_backward(
    DZ, DOUT, Z, WEIGHT, MEAN, R, DX, DY, SUMS, ROWS, salt, threshold, factor, rows, width, BLOCK: tl.constexpr
):
    """DZ: the gradient that bypasses the norm. SUMS [programs, 3, width]: dweight, dnorm_bias, dbias."""
    column = tl.arange(0, BLOCK)
    exists = column < width
    d_weight = tl.zeros([BLOCK], tl.float32)
    d_norm_bias = tl.zeros([BLOCK], tl.float32)
    d_bias = tl.zeros([BLOCK], tl.float32)
    if DOUT is not None:
        weight = _load(WEIGHT + column, exists)
    # The loop loads the next rows into shared memory. Some GPUs have only 99 KB of it: wide rows get fewer stages.
    stages: tl.constexpr = 2 if DOUT is not None or BLOCK > 8192 else 6 if BLOCK <= 4096 else 3
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=stages):
        offsets = tl.cast(row, tl.int64) * width + column
        dz = tl.zeros([BLOCK], tl.float32)
        if DZ is not None:
            dz = _load(DZ + offsets, exists)
        if DOUT is not None:
            dout = _load(DOUT + offsets, exists)
            r = tl.load(R + row)
            n = _load(Z + offsets, exists) * r
            g = dout * weight
            if MEAN is None:
                dz += r * (g - n * (tl.sum(g * n, 0) / width))
            else:
                n -= tl.load(MEAN + row) * r  # beyond the row's end dout is 0
                sum_g, sum_gn = tl.split(tl.sum(tl.join(g, g * n), 0))  # one exchange for both sums
                dz += r * (g - sum_g / width - n * (sum_gn / width))
                d_norm_bias += dout
            d_weight += dout * n
            tl.store(DX + offsets, dz, mask=exists)
        if ROWS is not None:
            dz = _dropped(dz, ROWS, row, column, salt, threshold, factor)
            tl.store(DY + offsets, dz, mask=exists)
        d_bias += dz
    sums = SUMS + tl.program_id(0) * 3 * width + column
    tl.store(sums, d_weight, mask=exists)
    tl.store(sums + width, d_norm_bias, mask=exists)
    tl.store(sums + 2 * width, d_bias, mask=exists)


class Residual(torch.autograd.Function):
    """Compute (z, out). If y is None, z is x itself. If weight is None, out is None; if norm_bias is None, RMSNorm."""

    @staticmethod
    def forward(ctx, x, y, bias, weight, norm_bias, epsilon, drop):
        """Save z, not x and y: backward computes n from z, mean and r, and the mask again from `drop`."""
        x, y = (None if part is None else part.contiguous() for part in (x, y))
        z = x if y is None else torch.empty_like(y)
        n, width = z.shape[:-1].numel(), z.shape[-1]
        out = mean = r = None
        if weight is not None:
            out = torch.empty_like(z)
            mean, r = torch.empty(2, n, dtype=torch.float32, device=z.device)
            mean = None if norm_bias is None else mean
        arguments = x, y, bias, z, weight, norm_bias, out, mean, r, *_drop_arguments(drop), epsilon, width
        residual_forward[(n,)](*arguments, **one_row(width))
        ctx.drop = drop
        ctx.has_input = [part is not None for part in (x, y, bias, weight, norm_bias)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(None if out is None else z, weight, mean, r)
        return z, out  # z also where it is x: `backward` then gets the residual stream's gradient

    @staticmethod
    def backward(ctx, dz, dout):
        """dz: the gradient that bypasses the norm, or None. dout: None if forward had no norm."""
        dz, dout = (None if part is None else part.contiguous() for part in (dz, dout))
        like = dz if dout is None else dout
        n, width = like.shape[:-1].numel(), like.shape[-1]
        dx = dz if dout is None else torch.empty_like(like)
        dy = dx if ctx.drop is None else torch.empty_like(like)
        options = one_row(width)
        # A multiprocessor fits 24 warps with 80 registers a thread, 20 with 96: RMSNorm with dropout needs 90.
        *_, has_weight, has_norm_bias = ctx.has_input
        warps = 20 if has_weight and not has_norm_bias and ctx.drop is not None else 24
        programs = min(n, persistent(like, max(warps // options["num_warps"], 1)))
        sums = torch.empty(programs, 3, width, dtype=torch.float32, device=like.device)
        arguments = dz, dout, *ctx.saved_tensors, dx, dy, sums, *_drop_arguments(ctx.drop), n, width
        residual_backward[(programs,)](*arguments, **options)
        d_weight, d_norm_bias, d_bias = sums.sum(0)
        gradients = zip((dx, dy, d_bias, d_weight, d_norm_bias), ctx.has_input, strict=True)
        return *(gradient if has_input else None for gradient, has_input in gradients), None, None


def add_(y, x, bias, drop=None):
    if bias is None and drop is None:  # the kernel's backward would write sums that nobody reads
        return x + y
    return Residual.apply(x, y, bias, None, None, 0.0, drop)[0]


def add_layer_norm_(y, x, bias, weight, norm_bias, drop=None):
    if x.shape[-1] > WIDEST or norm_bias is None:
        z = x if y is None else add_(y, x, bias, drop)
        return z, reference.layer_norm(z, weight, norm_bias)
    return Residual.apply(x, y, bias, weight, norm_bias, reference.EPS, drop)


def add_rms_norm_(y, x, weight, epsilon, drop=None):
    if x.shape[-1] > WIDEST:
        z = x if y is None else add_(y, x, None, drop)
        return z, reference.RMSNorm.apply(z, weight, epsilon)
    return Residual.apply(x, y, None, weight, None, epsilon, drop)


# --- bias + GELU or ReLU --------------------------------------------------------------------------------------------
#
#     x = y + bias      u = sqrt(2/pi) (x + 0.044715 x^3)      gelu = x/2 (1 + tanh u) = x S      S = 1 / (1 + e^-2u)
#     gelu' = S + x S (1 - S) 2 u'                              u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2)
#
# The sigmoid S cannot overflow to nan. Floor in bf16: 4 bytes an element in forward, 6 in backward.


@triton.jit
def _tile(first, column, rows, width, TALL):
    """Return (offsets, mask) of the tile [TALL, columns] from row `first` of a matrix [rows, width]."""
    row = first + tl.arange(0, TALL)
    exists = (row < rows)[:, None] & (column < width)[None, :]
    return row.to(tl.int64)[:, None] * width + column[None, :], exists


@triton.jit
def _gelu(x):
    squared = x * x
    u = 0.7978845608028654 * x * tl.fma(squared, 0.044715, 1.0)
    sigmoid = 1.0 / (1.0 + tl.exp2(u * (-2 * LOG2E)))
    return sigmoid, 0.7978845608028654 * tl.fma(squared, 3 * 0.044715, 1.0)


@triton.jit
def activation_forward(Y, BIAS, OUT, rows, width, RELU: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Y, OUT [rows, width]."""
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    offsets, exists = _tile(tl.program_id(0) * TALL, column, rows, width, TALL)
    x = _load(Y + offsets, exists) + _load(BIAS + column, column < width)[None, :]
    if RELU:
        out = tl.where(x < 0, 0.0, x)  # unlike tl.maximum this keeps nan
    else:
        sigmoid, _ = _gelu(x)
        out = x * sigmoid
    tl.store(OUT + offsets, out, mask=exists)


@triton.jit
def activation_backward(
    DOUT, SAVED, BIAS, DY, SUMS, rows, width, RELU: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr
):
    """SAVED: y for GELU, the result for ReLU. SUMS [programs along the rows, width]: of dbias."""
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    bias = _load(BIAS + column, column < width)
    total = tl.zeros([TALL, WIDE], tl.float32)
    for first in range(tl.program_id(0) * TALL, rows, tl.num_programs(0) * TALL):
        offsets, exists = _tile(first, column, rows, width, TALL)
        saved = _load(SAVED + offsets, exists)
        dy = _load(DOUT + offsets, exists)
        if RELU:
            dy = tl.where(saved <= 0, 0.0, dy)
        else:
            x = saved + bias[None, :]
            sigmoid, slope = _gelu(x)
            dy = dy * sigmoid * tl.fma(x * (1.0 - sigmoid), 2.0 * slope, 1.0)
        tl.store(DY + offsets, dy, mask=exists)
        total += dy
    tl.store(SUMS + tl.program_id(0).to(tl.int64) * width + column, tl.sum(total, 0), mask=column < width)


TILE = dict(TALL=8, WIDE=256, num_warps=8)


def tiled(x):
    """Return the grid of tiles: (along the rows, stripes of columns)."""
    return triton.cdiv(len(x), TILE["TALL"]), triton.cdiv(x.shape[1], TILE["WIDE"])


def striped(x, each):
    """Return the grid for sums over the rows: (programs along the rows, stripes of columns)."""
    rows, stripes = tiled(x)
    return min(rows, max(persistent(x, each) // stripes, 1)), stripes


class BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, bias, relu):
        y = y.contiguous()
        out = torch.empty_like(y)
        activation_forward[tiled(y)](y, bias, out, *y.shape, relu, **TILE)
        ctx.relu = relu
        ctx.save_for_backward(out if relu else y, bias)
        return out

    @staticmethod
    def backward(ctx, dout):
        saved, bias = ctx.saved_tensors
        dy = torch.empty_like(saved)
        grid = striped(saved, each=5)
        sums = torch.empty(grid[0], saved.shape[1], dtype=torch.float32, device=saved.device)
        activation_backward[grid](dout.contiguous(), saved, bias, dy, sums, *saved.shape, ctx.relu, **TILE)
        return dy, sums.sum(0), None


def activation_(y, bias, relu):
    bias = y.new_zeros(y.shape[1]) if bias is None else bias
    return BiasActivation.apply(y, bias, relu)


gelu_ = functools.partial(activation_, relu=False)
relu_ = functools.partial(activation_, relu=True)


# --- SwiGLU ---------------------------------------------------------------------------------------------------------
#
#     out = gate S up      S = 1 / (1 + e^-gate)      dgate = dout up S (1 + gate (1 - S))      dup = dout gate S
#
# gate and up are the halves of Y, dgate and dup those of DY. Floor in bf16, per element of out: forward 6 bytes,
# backward 10.


@triton.jit
def swiglu_forward(GATE, UP, OUT, rows, width, TALL: tl.constexpr, WIDE: tl.constexpr):
    """OUT [rows, width]; GATE and UP are halves of [rows, 2 width]."""
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    offsets, exists = _tile(tl.program_id(0) * TALL, column, rows, width, TALL)
    of_half, _ = _tile(tl.program_id(0) * TALL, column, rows, 2 * width, TALL)
    gate = _load(GATE + of_half, exists)
    sigmoid = 1.0 / (1.0 + tl.exp2(gate * -LOG2E))
    tl.store(OUT + offsets, gate * sigmoid * _load(UP + of_half, exists), mask=exists)


@triton.jit
def swiglu_backward(DOUT, GATE, UP, DGATE, DUP, rows, width, TALL: tl.constexpr, WIDE: tl.constexpr):
    """DOUT [rows, width]; the others are halves of [rows, 2 width]."""
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    offsets, exists = _tile(tl.program_id(0) * TALL, column, rows, width, TALL)
    of_half, _ = _tile(tl.program_id(0) * TALL, column, rows, 2 * width, TALL)
    dout, gate = _load(DOUT + offsets, exists), _load(GATE + of_half, exists)
    sigmoid = 1.0 / (1.0 + tl.exp2(gate * -LOG2E))
    dgate = dout * _load(UP + of_half, exists) * sigmoid * tl.fma(gate, 1.0 - sigmoid, 1.0)
    tl.store(DGATE + of_half, dgate, mask=exists)
    tl.store(DUP + of_half, dout * gate * sigmoid, mask=exists)


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        y = y.contiguous()
        ctx.save_for_backward(y)
        gate, up = y.chunk(2, 1)
        out = torch.empty(gate.shape, dtype=y.dtype, device=y.device)
        swiglu_forward[tiled(out)](gate, up, out, *out.shape, **TILE)
        return out

    @staticmethod
    def backward(ctx, dout):
        (y,) = ctx.saved_tensors
        dy = torch.empty_like(y)
        swiglu_backward[tiled(dout)](dout.contiguous(), *y.chunk(2, 1), *dy.chunk(2, 1), *dout.shape, **TILE)
        return dy


swiglu = SwiGLU.apply


# --- positions of Llama ---------------------------------------------------------------------------------------------
#
# A program has one token, and all its heads: so it reads the angles, which are float32, once. Floor in bf16: 4 bytes an
# element, also in backward.


@triton.jit
def rotate_token(
    X, OUT, COS, SIN, s, of_token, of_group, share, heads, HALF: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """X: groups of `share` heads; OUT [tokens, heads, 2 HALF]; COS, SIN [s, HALF] float32."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    exists = (head < heads)[:, None] & (column < HALF)[None, :]
    start = head // share * of_group + head % share * (2 * HALF)
    pointers = X + token * of_token + start[:, None] + column[None, :]
    left, right = _load(pointers, exists), _load(pointers + HALF, exists)
    angle = token % s * HALF + column
    cos, sin = _load(COS + angle, column < HALF)[None, :], _load(SIN + angle, column < HALF)[None, :]
    pointers = OUT + token * heads * 2 * HALF + (head * (2 * HALF))[:, None] + column[None, :]
    tl.store(pointers, left * cos - right * sin, mask=exists)
    tl.store(pointers + HALF, right * cos + left * sin, mask=exists)


def turned(x, cos, sin):
    """x: [b, s, heads, d], or [b, s, groups, heads of a group, d], also a view of q, k and v together."""
    tokens = (x if x.dim() == 5 else x.unsqueeze(2)).flatten(0, 1)  # a view, if there is one
    n, groups, share, d = tokens.shape
    if tokens.stride()[2:] != (d, 1):
        tokens = tokens.contiguous()
    out, heads, (s, half) = torch.empty_like(x, memory_format=torch.contiguous_format), groups * share, cos.shape
    width = triton.next_power_of_2(half)
    size = max(triton.next_power_of_2(heads), 256 // width)  # of a tile; 256: each thread loads 16 bytes
    options = dict(HALF=half, HEADS=size, WIDTH=width, num_warps=min(size * width // 256, 16))
    rotate_token[(n,)](tokens, out, cos, sin, s, *tokens.stride()[:2], share, heads, **options)
    return out


def rotate(x, positions, base):
    return reference.rotate(x, positions, base, turned)


# --- gradients of the embedding's tables ---------------------------------------------------------------------------
#
# Floor in bf16: 2 bytes an element of the rows, and 8 an element of the table's rows that change.
#
# `add_rows_` sorts the ids. There is one program for each place in the sorted order and each stripe of columns. At the
# first place of an id it adds all rows of this id.


@triton.jit
def add_rows(TABLE, IDS, ORDER, ROWS, n, v, width, TALL: tl.constexpr, WIDE: tl.constexpr):
    """TABLE [v, width] float32; ROWS [n, width]; IDS [n]: sorted; ORDER [n]: IDS[i] is the id of ROWS[ORDER[i]]."""
    i = tl.program_id(0)
    id = tl.load(IDS + i)
    before = tl.load(IDS + i - 1, mask=i > 0, other=-1)
    if (id != before) & (id >= 0) & (id < v):
        column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        pointers = TABLE + id * width + column
        total = _load(pointers, column < width)
        while tl.load(IDS + i, mask=i < n, other=-1) == id:
            place = i + tl.arange(0, TALL)
            same = tl.load(IDS + place, mask=place < n, other=-1) == id
            row = tl.load(ORDER + place, mask=same, other=0)
            exists = same[:, None] & (column < width)[None, :]
            total += tl.sum(_load(ROWS + row[:, None] * width + column[None, :], exists), 0)
            i += TALL
        tl.store(pointers, total, mask=column < width)


ADD_ROWS = dict(TALL=32, WIDE=256, num_warps=4)


def add_rows_(table, ids, rows):
    (n, width), (ids, order) = rows.shape, ids.sort(stable=True)
    grid = n, triton.cdiv(width, ADD_ROWS["WIDE"])
    add_rows[grid](table, ids, order, rows.contiguous(), n, len(table), width, **ADD_ROWS)


# --- cross-entropy --------------------------------------------------------------------------------------------------
#
#     loss = log sum_j exp(z_j - top) - (z_target - top)        dz_j = weight (exp(z_j - top) / total - [j = target])
#
# A program has one row. Its first pass computes top = max z and total = sum exp(z - top) *online*, as
# flash_attention.py does. Its second pass reads the row of 100 KB from the cache and overwrites z with dz. Floor in
# bf16: 4 bytes a logit; with tp 6, if the cache has lost the row.
#
# Loads are masked by the padded width, a multiple of 128: with the real columns (50,257) each load would be split
# into loads of 2 bytes.


@triton.jit
def cross_entropy_row(Z, TARGETS, DLOSSES, LOSSES, TOP, TOTAL, TARGET_LOGIT, columns, width, BLOCK: tl.constexpr):
    """TARGETS .. TARGET_LOGIT [rows]. Arguments that a launch does not use are None:

        one rank             reads TARGETS and DLOSSES               writes LOSSES, dz
        tp, first pass       reads TARGETS                           writes TOP, TOTAL, TARGET_LOGIT
        tp, second pass      reads TARGETS, DLOSSES, TOP, TOTAL      writes dz

    TARGET_LOGIT is 0 if another rank has the target's column.
    """
    row = tl.program_id(0).to(tl.int64)
    Z += row * width
    target = tl.load(TARGETS + row)
    if LOSSES is None and TARGET_LOGIT is None:
        top, total = tl.load(TOP + row), tl.load(TOTAL + row)
    else:
        z_target = _load(Z + target, (target >= 0) & (target < columns))
        top, total = -1e38, 0.0  # with -inf, a rank with only padding would get nan
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            z = tl.where(column < columns, _load(Z + column, column < width), float("-inf"))
            higher = tl.maximum(top, tl.max(z, 0))
            total = total * tl.exp2((top - higher) * LOG2E) + tl.sum(tl.exp2((z - higher) * LOG2E), 0)
            top = higher
        if LOSSES is not None:
            tl.store(LOSSES + row, tl.log2(total) / LOG2E - (z_target - top))
        else:
            tl.store(TOP + row, top)
            tl.store(TOTAL + row, total)
            tl.store(TARGET_LOGIT + row, z_target)
    if DLOSSES is not None:
        weight = tl.load(DLOSSES + row)
        factor = weight / total
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            z = _load(Z + column, column < width)
            dz = tl.where(column < columns, tl.exp2((z - top) * LOG2E) * factor, 0.0)
            tl.store(Z + column, tl.where(column == target, dz - weight, dz), mask=column < width)


CROSS_ENTROPY = dict(BLOCK=8192, num_warps=32)


def cross_entropy_(logits, targets, columns, dlosses=None, reduce=None):
    """Do the same as `reference.cross_entropy_`, with contiguous logits. The losses [n] are float32."""
    assert logits.is_contiguous() and (dlosses is None or dlosses.dtype == torch.float32)
    n, width = logits.shape
    dlosses = None if dlosses is None else dlosses.contiguous()  # the gradient of losses.sum() has stride 0
    launch = functools.partial(cross_entropy_row[(n,)], columns=columns, width=width, **CROSS_ENTROPY)
    if reduce is None:
        losses = torch.empty(n, dtype=torch.float32, device=logits.device)
        launch(logits, targets, dlosses, losses, None, None, None)
        return losses
    local_top, total, target = torch.empty(3, n, dtype=torch.float32, device=logits.device)
    launch(logits, targets, None, None, local_top, total, target)
    top = reduce(local_top.clone(), "max")
    is_local = (targets >= 0) & (targets < columns)
    parts = [total * (local_top - top).exp(), (target - top).where(is_local, 0.0)]
    total, target = reduce(torch.stack(parts), "sum")
    if dlosses is not None:
        launch(logits, targets, dlosses, None, top, total, None)
    return total.log() - target


# --- the end of a step ----------------------------------------------------------------------------------------------
#
# Floor of AdamW: 28 bytes a parameter.


@triton.jit
def adamw_flat(
    W, G, M, V, LR, SCALE, UPDATE, SKIP, CORRECTION1, CORRECTION2, size, decay, beta1, beta2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """W, G, M, V [size] float32; LR .. CORRECTION2: `reference.UpdateScalars`. UPDATE is not used."""
    if tl.load(SKIP) == 0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        exists = offsets < size
        lr = tl.load(LR).to(tl.float32)
        g = _load(G + offsets, exists) * tl.load(SCALE).to(tl.float32)
        m, v, w = _load(M + offsets, exists), _load(V + offsets, exists), _load(W + offsets, exists)
        m = tl.fma(m, beta1, g * (1.0 - beta1))
        v = tl.fma(v, beta2, g * g * (1.0 - beta2))
        root = tl.sqrt(v * (1.0 / tl.load(CORRECTION2).to(tl.float32))) + eps
        w *= 1.0 - lr * decay
        w -= (lr / tl.load(CORRECTION1).to(tl.float32)) * (m / root)
        tl.store(M + offsets, m, mask=exists)
        tl.store(V + offsets, v, mask=exists)
        tl.store(W + offsets, w, mask=exists)


ADAMW = dict(BLOCK=1024, num_warps=4)


def adamw_(weight, gradient, moments, scalars, ranges, *, decay, beta1, beta2, eps):
    """Do the same as `reference.adamw_`, in one launch for each range."""
    for begin, end, decays in ranges:
        buffers = (x[begin:end] for x in (weight, gradient, *moments))
        arguments = *buffers, *scalars, end - begin, decay * decays, beta1, beta2, eps
        adamw_flat[(triton.cdiv(end - begin, ADAMW["BLOCK"]),)](*arguments, **ADAMW)
