"""Tensor parallelism: the matrices of a layer are cut over t ranks (slide "テンソル並列").

The first forms are `ladder/rung11`, `17` and `18` (n there is t here). Shoeybi et al., Megatron-LM
(arXiv 1909.08053), section 3; sequence parallelism: Korthikanti et al. (arXiv 2205.05198), section
4.2. A block has two pairs of linears: qkv and proj, fc1 and fc2. The first of a pair is cut by its
outputs (column parallel), the second by its inputs (row parallel). Inside a pair nothing is sent:

        x --f-->  Y_i = x A_i^T  -->  gelu / attention  -->  Z_i = Y_i B_i^T  --g-->  z = sum_i Z_i
              column parallel            all local                row parallel

    enter: communication of x before a linear          leave: communication of its output y

                           forward            backward
    enter   copy (f)       nothing            all_reduce of dx      x is whole on every rank
            all_gather     all_gather of x    reduce_scatter of dx  x is cut by tokens (sequence parallel)
    leave   all_reduce (g) all_reduce of y    nothing               y is whole on every rank
            reduce_scatter reduce_scatter y   all_gather of dy      y is cut by tokens (sequence parallel)

Each tensor has one of four types (names of meta-pytorch's spmd_types). x is I, Y is V, Z is P, z is I:

    R  equal on all ranks; a rank has part of its gradient      I --f--> R        I  equal, and so is its gradient
    V  each rank has its own heads, columns or tokens           P --g--> I        P  a part: the sum is the value

With sequence parallelism each rank has n/t consecutive rows of an activation [n = bs, h] outside of
the pairs, so LayerNorm, dropout and residual stream cost 1/t of the memory and the work. Forward
stores only the cut x, so backward gathers x again for dW. A replicated parameter (LayerNorm,
row-parallel bias, position table) sees part of the tokens: its gradient is summed over tp
(`zero.py`).

**What can overlap.** The slide says that this communication can't be hidden. In forward this is
true: the next operation needs g's sum. But `Linear.backward` starts the all_reduce of dx, computes
dW = dy^T x, then waits. With sequence parallelism, the all_gather of x for dW overlaps with dx = dy
W. Not hidden: the all_gather of dy; embedding and head; the sum of dx in the action I (no dW).

Per layer and micro-batch a rank sends 8 bsh (t-1)/t elements in 4 all_reduces; with sequence
parallelism 10 bsh (t-1)/t in 10 all_gathers and reduce_scatters (`accounts/ledger.py`).
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

import reference
from parallel.comm import Pending, all_gather, all_reduce, reduce_scatter

ROWS = 4096  # tokens whose logits exist at a time: 412 MB (bf16, v = 50,304)

# --- logical parameters ---------------------------------------------------------------------------


@dataclass(eq=False)
class ParamSpec:
    """One logical parameter, equal in every layout. Two modules that have the same object share it (are tied)."""

    name: str  # "block3.qkv.weight"; also the name of its file in a checkpoint
    shape: tuple  # whole
    tp_dim: int | None = None  # the dimension that is cut over tp. None: replicated
    decay: bool = False  # weight decay applies
    std: float = 0.0  # standard deviation of the initial values
    mean: float = 0.0
    partial: bool = False  # whole, but inside a pair (QK-norm): a rank has part of its gradient
    matrix: bool = False  # Muon updates it as a matrix, or as several
    padding: int = 0  # last rows that no token uses. They stay 0, so they add nothing to LAMB's norms
    frozen: bool = False  # it has no gradient, and keeps its value

    @property
    def bucket(self):
        return self.name.partition(".")[0]

    def local_shape(self, t):
        return tuple(n // t if d == self.tp_dim else n for d, n in enumerate(self.shape))

    def local_part(self, whole, axis):
        """Return this rank's slice of the whole tensor (a view)."""
        return whole if self.tp_dim is None else whole.chunk(axis.size, self.tp_dim)[axis.rank]

    def initial(self, seed):
        """Return the whole initial tensor, float32 on the CPU: a function of (seed, name) alone."""
        if not self.std:
            return torch.full(self.shape, self.mean)
        digest = hashlib.blake2b(f"{seed} {self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = torch.randn(self.shape, generator=generator).mul_(self.std).add_(self.mean)
        if self.padding:
            whole[-self.padding :] = 0
        return whole


# --- linear ---------------------------------------------------------------------------------------

CONJUGATE = {  # {communication of a tensor: communication of its gradient}
    None: None,
    "copy": "all_reduce",
    "all_gather": "reduce_scatter",
    "all_reduce": "copy",
    "reduce_scatter": "all_gather",
}
COLLECTIVES = {"all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter}


def start(communication, x, tp, what):
    """Start a communication of the table above."""
    if communication in (None, "copy"):
        return Pending(x)
    return COLLECTIVES[communication](x, tp, what)


def entering(c):
    """Return the communication of x before a column parallel linear."""
    return "all_gather" if c.sequence_parallel else "copy"


def leaving(c):
    """Return the communication of y after a row parallel linear."""
    return "reduce_scatter" if c.sequence_parallel else "all_reduce"


class Communicate(torch.autograd.Function):
    """A communication of the table above without a linear. Backward does its CONJUGATE."""

    @staticmethod
    def forward(ctx, x, communication, tp, what):
        ctx.arguments = communication, tp, what
        return start(communication, x.clone(), tp, what).wait()  # an all_reduce changes its argument

    @staticmethod
    def backward(ctx, dy):
        communication, tp, what = ctx.arguments
        return start(CONJUGATE[communication], dy.clone(), tp, what).wait(), None, None, None


def enter_pair(x, c, tp):
    """x [n or n/t, h] (type I) -> [n, h] (R): the start of a pair without a linear, such as experts or a gate."""
    return Communicate.apply(x, entering(c), tp, "activations")


def leave_pair(y, c, tp, what="activations"):
    """y [n, h], a part of a sum on each rank (P) -> the sum, [n or n/t, h] (I): the end of such a pair."""
    return Communicate.apply(y, leaving(c), tp, what) if tp.size > 1 else y


class Linear(torch.autograd.Function):
    """y = leave(enter(x) W^T + bias): every linear of a block; in generation also the head.

    x: [n or n/t, in]. w: this rank's [out, in], or [k, out, in] for k outputs (q, k, v). bias:
    [out] or [k, out], or None. y: [n, out] or [n, k out]; n/t rows with reduce_scatter.
    """

    @staticmethod
    def forward(ctx, x, w, bias, enter, leave, tp):
        ctx.save_for_backward(x)
        ctx.arguments = w, bias, enter, leave, tp
        matrix = w.flatten(0, -2)  # qkv is [3, h/t, h]
        x = start(enter, x, tp, "activations").wait()
        y = x @ matrix.T if bias is None else torch.addmm(bias.flatten(), x, matrix.T)
        return start(leave, y, tp, "activations").wait()

    @staticmethod
    def backward(ctx, dy):
        """Return dx = dy w. Add dW = dy^T x to `w.grad` while dx is sent, or action W does."""
        (x,), (w, bias, enter, leave, tp) = ctx.saved_tensors, ctx.arguments
        if bias is not None and bias.requires_grad:
            bias.grad.add_(dy.sum(0, dtype=bias.grad.dtype).view_as(bias))
        dy = start(CONJUGATE[leave], dy, tp, "activations").wait()
        gathering = start(enter, x, tp, "activations")
        dx = dy @ w.flatten(0, -2)
        sending = start(CONJUGATE[enter], dx, tp, "activations")
        # detach: the graph of x would keep the unit's input in memory until the action W
        product = WeightGradient(w, dy, gathering.wait().detach())
        if w.deferred is None:
            product.add()
        else:
            w.deferred.append(product)
        return sending.wait(), None, None, None, None, None


class WeightGradient(NamedTuple):
    """The factors of dW = dy^T x, kept from the action I to W (`Executor.weight_gradient`)."""

    w: nn.Parameter
    dy: torch.Tensor
    x: torch.Tensor

    def add(self):
        if self.w.requires_grad:
            reference.add_product_(self.w.grad.flatten(0, -2), self.dy.T, self.x)


class ColumnParallelLinear(nn.Module):
    """Linear cut by its outputs: x [n or n/t, in] -> [n, out/t].

    shape: of the whole weight, [out, in]. With [3, out, in], for q, k, v, the result is [n, 3 out/t].
    adds_bias=False: the next operation adds it.
    """

    def __init__(self, name, shape, std, c, tp, adds_bias=True, has_bias=True):
        super().__init__()
        cut = len(shape) - 2
        self.weight = ParamSpec(f"{name}.weight", shape, cut, True, std, matrix=True)
        self.bias = ParamSpec(f"{name}.bias", shape[:-1], cut) if has_bias else None
        self.tp, self.adds_bias, self.enter = tp, adds_bias, entering(c)

    def forward(self, x):
        bias = self.bias if self.adds_bias else None
        return Linear.apply(x, self.weight, bias, self.enter, None, self.tp)


class RowParallelLinear(nn.Module):
    """Linear cut by its inputs: x [n, in/t] -> [n or n/t, out].

    The next operation adds the bias, after the sum over tp.
    """

    def __init__(self, name, shape, std, c, tp, has_bias=True):
        super().__init__()
        self.weight = ParamSpec(f"{name}.weight", shape, 1, True, std, matrix=True)
        self.bias = ParamSpec(f"{name}.bias", shape[:1]) if has_bias else None
        self.tp, self.leave = tp, leaving(c)

    def forward(self, x):
        return Linear.apply(x, self.weight, None, None, self.leave, self.tp)


# --- vocabulary -----------------------------------------------------------------------------------


class EmbeddingLookup(torch.autograd.Function):
    """Look up ids [n] in a table w [v, h] (tp None), or in this rank's slice [v/t, h] of a table that is cut over tp.

    The rows of ids in other slices are 0, so the sum over tp has all rows.
    """

    @staticmethod
    def forward(ctx, ids, w, tp, ops):
        local = ids - tp.rank * len(w) if tp else ids
        ctx.save_for_backward(local)
        ctx.arguments = w, ops
        if not tp or tp.size == 1:
            return w.index_select(0, ids)
        in_slice = (local >= 0) & (local < len(w))
        return w.index_select(0, local.where(in_slice, 0)).mul_(in_slice[:, None])

    @staticmethod
    def backward(ctx, dy):
        (local,), (w, ops) = ctx.saved_tensors, ctx.arguments
        ops.add_rows_(w.grad, local, dy)
        return None, None, None, None


def padded(vocab_size):
    """Return the number of rows of a word table: a multiple of 128, fast on tensor cores."""
    return -(-vocab_size // 128) * 128


class VocabParallelEmbedding(nn.Module):
    """ids [n] -> [n or n/t, h]."""

    def __init__(self, name, c, tp, ops):
        super().__init__()
        rows = padded(c.vocab_size)
        shape, padding = (rows, c.hidden_size), rows - c.vocab_size
        self.weight = ParamSpec(f"{name}.weight", shape, 0, True, c.init_method_std, padding=padding)
        self.c, self.tp, self.ops = c, tp, ops

    def forward(self, ids):
        y = EmbeddingLookup.apply(ids, self.weight, self.tp, self.ops)
        return leave_pair(y, self.c, self.tp, "embedding")


class LinearCrossEntropy(torch.autograd.Function):
    """x [n or n/t, h], word table w [v/t, h] -> the loss of every token, [n]. **Backward computes it.**

    The logits, v numbers per token, would be the largest activation, so they never exist whole.
    Backward works on ROWS tokens at a time: logits z = x W^T, their losses and their gradient dz in
    the place of z, then dx = dz W and dW += dz^T x. in_forward: forward computes the losses, too.
    """

    @staticmethod
    def forward(ctx, x, w, targets, vocab_size, enter, tp, ops, in_forward=False):
        if in_forward:
            losses = next_token_losses(x, w, targets, vocab_size, enter, tp, ops)
        else:
            losses = x.new_full(targets.shape, torch.nan, dtype=reference.wide_dtype(x))
        ctx.save_for_backward(x)
        # A head may overwrite real losses. detach: else ctx and the graph would keep each other alive.
        ctx.losses = losses.clone() if in_forward else losses.detach()
        ctx.arguments = w, targets, vocab_size, enter, tp, ops
        return losses

    @staticmethod
    def backward(ctx, dlosses):
        (x,), (w, targets, vocab_size, enter, tp, ops) = ctx.saved_tensors, ctx.arguments
        x = start(enter, x, tp, "head").wait()
        dx, has_loss = torch.empty_like(x), targets >= 0
        dlosses = dlosses * has_loss
        for rows in slices(x):
            z = x[rows] @ w.T
            ctx.losses[rows] = cross_entropy_(z, w, targets[rows], vocab_size, dlosses[rows], tp, ops)
            torch.mm(z, w, out=dx[rows])
            WeightGradient(w, z, x[rows]).add()
        ctx.losses.mul_(has_loss)
        dx = start(CONJUGATE[enter], dx, tp, "head").wait()
        return dx, None, None, None, None, None, None, None


def next_token_losses(x, w, targets, vocab_size, enter, tp, ops, in_forward=True):
    """Return the losses of `LinearCrossEntropy` without a gradient. It takes the same arguments."""
    x = start(enter, x, tp, "head").wait()
    losses = []
    for rows in slices(x):
        losses.append(cross_entropy_(x[rows] @ w.T, w, targets[rows], vocab_size, None, tp, ops))
    return torch.cat(losses) * (targets >= 0)


def slices(x):
    return [slice(begin, begin + ROWS) for begin in range(0, len(x), ROWS)]


def cross_entropy_(z, w, targets, vocab_size, dlosses, tp, ops):
    """Return the losses [n] of logits z [n, v/t], and replace z by its gradient.

    dlosses [n]: the gradient of each loss, or None. The ranks combine three numbers per token:
    maximum, sum of exponentials, logit of the target.
    """
    first = tp.rank * len(w)
    columns = min(max(vocab_size - first, 0), len(w))  # this rank's columns without padding
    reduce = None if tp.size == 1 else lambda x, op: all_reduce(x, tp, "cross-entropy rows", op).wait()
    return ops.cross_entropy_(z, targets - first, columns, dlosses, reduce)
