"""Tensor parallelism: a layer's matrices, cut over t ranks (slide "テンソル並列").

Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3; sequence parallelism: Korthikanti et al. (arXiv
2205.05198), section 4.2. A transformer block is two pairs of linears. The first of a pair is cut by columns (its
outputs), the second by rows (its inputs), so that between them every rank works on its own heads or its own part of
the MLP:

        x --f-->  Y_i = x A_i^T  -->  gelu / attention  -->  Z_i = Y_i B_i^T  --g-->  z = sum_i Z_i
              column parallel            all local                row parallel

                           forward            backward
    enter   copy (f)       nothing            all_reduce of dx      x is whole on every rank
            all_gather     all_gather of x    reduce_scatter of dx  x is cut by tokens (sequence parallel)
    leave   all_reduce (g) all_reduce of y    nothing               y is whole on every rank
            reduce_scatter reduce_scatter y   all_gather of dy      y is cut by tokens (sequence parallel)

Activations are [n, h], n = b s the tokens of the micro-batch, sample after sample. Sequence parallelism gives each
rank n/t consecutive rows of them wherever they are not inside a pair: LayerNorm, dropout and residual then cost 1/t
of the memory and the work, and all_reduce = reduce_scatter + all_gather, so the bytes stay the same (but for x, which
is stored cut and gathered again in backward). It makes one thing new: what is replicated (LayerNorm, row-parallel
bias, position embedding) now sees only part of the tokens on each rank, so that its gradient is a partial sum, which
`zero.py` adds up over tp at the end of the step.

**What can overlap.** The slide says that tensor parallel communication can't be hidden. In forward that is so: g's
sum is the very next thing that is needed. In backward it is not: dx needs its all_reduce, but the weight gradient dW
= dy^T x does not wait for it. `Linear.backward` starts the first, computes the second, then waits; with sequence
parallelism the gather of x for dW likewise travels while dx is computed. Computation cannot hide all of forward; in
backward, with sequence parallelism, the gather of dy; and the messages of the embedding and the head.

Costs per layer and micro-batch: 8 bsh (t-1)/t elements sent, 10 with sequence parallelism (`ledger.py`); memory and
work of the matrices 1/t.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from parallel.comm import all_gather, all_reduce, reduce_scatter

CHUNK = 4096  # tokens whose logits exist at a time: 412 MB in bf16 at 50,304 columns, and a matrix product's worth

# --- logical parameters ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamSpec:
    """One logical parameter: the same row in every layout. A rank holds it whole or cut along `tp_dim`.

    A layer declares a parameter with `self.weight = ParamSpec(...)`. `zero.py` puts an nn.Parameter, a view into a flat
    buffer, in its place.
    """

    name: str  # "block3.qkv.weight"; also the name of its file in a checkpoint
    shape: tuple  # whole
    tp_dim: int | None = None  # None: replicated over tp
    decay: bool = False  # weight decay applies
    std: float = 0.0  # initial values: normal, of this standard deviation ...
    mean: float = 0.0  # ... around this

    @property
    def bucket(self):
        """The bucket that it is stored in, the first word of its name: word, embedding, block3, head."""
        return self.name.partition(".")[0]

    def local_shape(self, t):
        return tuple(n // t if d == self.tp_dim else n for d, n in enumerate(self.shape))

    def local_part(self, whole, axis):
        """This rank's part of the whole tensor (a view)."""
        return whole if self.tp_dim is None else whole.chunk(axis.size, self.tp_dim)[axis.rank]

    def initial(self, seed):
        """The whole initial tensor, float32 on the CPU: a function of (seed, name) and nothing else.

        Drawn whole and then cut, so that no layout changes a number. Python's hash() differs between processes.
        """
        if not self.std:
            return torch.full(self.shape, self.mean)
        digest = hashlib.blake2b(f"{seed} {self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randn(self.shape, generator=generator).mul_(self.std).add_(self.mean)


def specs(unit):
    """The ParamSpecs that stand in a unit of the model and in the modules in it, in order."""
    return [spec for module in unit.modules() for spec in vars(module).values() if isinstance(spec, ParamSpec)]


# --- linear ---------------------------------------------------------------------------------------------------------


class Linear(torch.autograd.Function):
    """y = leave(enter(x) W^T + bias), the one linear that all layers are.

    x [n or n/t, in], w [..., out, in] of this rank, bias [..., out] or None; enter: copy, all_gather or None (x is
    this rank's own columns); leave: all_reduce, reduce_scatter or None. Gradients of w and bias are added to `.grad`,
    not returned.
    """

    @staticmethod
    def forward(ctx, x, w, bias, enter, leave, tp):
        ctx.save_for_backward(x)  # with sequence parallelism n/t rows only: gathered again in backward
        ctx.w, ctx.bias, ctx.enter, ctx.leave, ctx.tp = w, bias, enter, leave, tp
        matrix = w.flatten(0, -2)  # qkv is [3, h/t, h]
        if enter == "all_gather":
            x = all_gather(x, tp, "activations").wait()
        y = x @ matrix.T if bias is None else torch.addmm(bias.flatten(), x, matrix.T)
        if leave == "all_reduce":
            y = all_reduce(y, tp, "activations").wait()
        elif leave == "reduce_scatter":
            y = reduce_scatter(y, tp, "activations").wait()
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        w, bias, tp = ctx.w, ctx.bias, ctx.tp
        if bias is not None:
            bias.grad.add_(dy.sum(0).view_as(bias))
        if ctx.leave == "reduce_scatter":
            dy = all_gather(dy, tp, "activations").wait()
        gathering = all_gather(x, tp, "activations") if ctx.enter == "all_gather" else None
        dx = dy @ w.flatten(0, -2)
        if ctx.enter == "copy":
            sending = all_reduce(dx, tp, "activations")
        elif ctx.enter == "all_gather":
            sending = reduce_scatter(dx, tp, "activations")
        if gathering:
            x = gathering.wait()
        if w.deferred is None:
            add_product(w, dy, x)  # while dx travels
        else:  # Detached: x's graph would keep the unit's input, and its gradient, until W.
            w.deferred.append(WeightGradient(w, dy, x.detach()))
        return (sending.wait() if ctx.enter else dx), None, None, None, None, None


class WeightGradient(NamedTuple):
    """The product dW = dy^T x that I leaves for W."""

    w: nn.Parameter
    dy: torch.Tensor
    x: torch.Tensor

    def add(self):
        add_product(*self)


def add_product(w, dy, x):
    """dW += dy^T x, in the flat gradient buffer's dtype, without a temporary where the matrix product can add there."""
    gradient = w.grad.flatten(0, -2)
    if gradient.dtype == dy.dtype:
        gradient.addmm_(dy.T, x)
    elif dy.is_cuda:  # 16-bit factors, a float32 sum: no other pass over dW, and no rounding of a micro-batch's share
        torch.addmm(gradient, dy.T, x, out_dtype=gradient.dtype, out=gradient)
    else:
        gradient.add_(dy.T @ x)


class ColumnParallelLinear(nn.Module):
    """x [n, in] (n/t rows with sequence parallelism) -> [n, out/t]: this rank's outputs.

    `shape` is the whole weight, [out, in] or, packed, [3, out, in]: cut along out. Without `adds_bias`, and in a
    RowParallelLinear always, the bias is left to the operation that comes next, which has the output in its hands.
    """

    def __init__(self, name, shape, std, tp, sequence_parallel, adds_bias=True):
        super().__init__()
        cut = len(shape) - 2
        self.weight = ParamSpec(f"{name}.weight", shape, cut, True, std)
        self.bias = ParamSpec(f"{name}.bias", shape[:-1], cut)
        self.tp, self.enter, self.adds_bias = tp, "all_gather" if sequence_parallel else "copy", adds_bias

    def forward(self, x):
        return Linear.apply(x, self.weight, self.bias if self.adds_bias else None, self.enter, None, self.tp)


class RowParallelLinear(nn.Module):
    """x [n, in/t]: this rank's inputs -> [n, out] (n/t rows with sequence parallelism), without the bias.

    The bias is added once, to the sum over the ranks: on rows that each rank has, or has its part of.
    """

    def __init__(self, name, shape, std, tp, sequence_parallel):
        super().__init__()
        self.weight = ParamSpec(f"{name}.weight", shape, 1, True, std)
        self.bias = ParamSpec(f"{name}.bias", shape[:1])
        self.tp, self.leave = tp, "reduce_scatter" if sequence_parallel else "all_reduce"

    def forward(self, x):
        return Linear.apply(x, self.weight, None, None, self.leave, self.tp)


# --- vocabulary -----------------------------------------------------------------------------------------------------


class EmbeddingLookup(torch.autograd.Function):
    """Rows of the whole table from its shards: each rank looks up the ids that it has, and g adds up."""

    @staticmethod
    def forward(ctx, ids, w, leave, tp):
        local = ids - tp.rank * w.shape[0]
        mine = (local >= 0) & (local < w.shape[0])
        local = local.where(mine, 0)
        ctx.save_for_backward(local, mine)
        ctx.w, ctx.leave, ctx.tp = w, leave, tp
        y = w[local].mul_(mine[:, None])
        if leave == "reduce_scatter":
            return reduce_scatter(y, tp, "embedding").wait()
        return all_reduce(y, tp, "embedding").wait()

    @staticmethod
    def backward(ctx, dy):
        local, mine = ctx.saved_tensors
        if ctx.leave == "reduce_scatter":
            dy = all_gather(dy, ctx.tp, "embedding").wait()
        gradient = ctx.w.grad
        dy = (dy * mine[:, None]).to(gradient.dtype)
        if dy.is_cuda:  # sorts the ids: sums in one order every time, which index_add_'s atomics do not
            gradient.index_put_((local,), dy, accumulate=True)
        else:
            gradient.index_add_(0, local, dy)
        return None, None, None, None


class VocabParallelEmbedding(nn.Module):
    """ids [n] -> [n, h] (n/t rows with sequence parallelism). Each rank has v/t consecutive rows of the table."""

    def __init__(self, name, vocab_size, hidden_size, std, tp, sequence_parallel):
        super().__init__()
        self.weight = ParamSpec(f"{name}.weight", (vocab_size, hidden_size), 0, True, std)
        self.tp, self.leave = tp, "reduce_scatter" if sequence_parallel else "all_reduce"

    def forward(self, ids):
        return EmbeddingLookup.apply(ids, self.weight, self.leave, self.tp)


class LinearCrossEntropy(torch.autograd.Function):
    """The loss of every token, [n], from x [n or n/t, h] and the word table w [v/t, h]: **made in backward**.

    A token's logits are its largest activation by far (v numbers; a block keeps 16 h). So they never exist whole.
    Forward only reserves the losses (nan) and keeps x. Backward works on CHUNK tokens at a time: logits = x W^T become
    losses, then, in the same place, their gradient dz; dz gives dx = dz W and dW += dz^T x, and is freed. Each logit is
    thus computed once. `next_token_losses` is the same without a gradient.
    """

    @staticmethod
    def forward(ctx, x, w, targets, vocab_size, enter, tp, ops):
        losses = x.new_full(targets.shape, torch.nan, dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x)
        ctx.losses = losses.detach()  # the same memory without the graph, which would be a circle of references
        ctx.w, ctx.targets, ctx.vocab_size, ctx.enter, ctx.tp, ctx.ops = w, targets, vocab_size, enter, tp, ops
        return losses

    @staticmethod
    def backward(ctx, weights):
        (x,), w, tp = ctx.saved_tensors, ctx.w, ctx.tp
        if ctx.enter == "all_gather":
            x = all_gather(x, tp, "head").wait()
        dx = torch.empty_like(x)
        for rows in chunks(x):
            z = x[rows] @ w.T
            ctx.losses[rows] = cross_entropy_(z, w, ctx.targets[rows], ctx.vocab_size, weights[rows], tp, ctx.ops)
            torch.mm(z, w, out=dx[rows])
            add_product(w, z, x[rows])
        dx = (reduce_scatter if ctx.enter == "all_gather" else all_reduce)(dx, tp, "head").wait()
        return dx, None, None, None, None, None, None


def next_token_losses(x, w, targets, vocab_size, enter, tp, ops):
    """`LinearCrossEntropy` at once and without a gradient."""
    if enter == "all_gather":
        x = all_gather(x, tp, "head").wait()
    return torch.cat([cross_entropy_(x[rows] @ w.T, w, targets[rows], vocab_size, None, tp, ops) for rows in chunks(x)])


def chunks(x):
    """The rows of x [n, h], CHUNK at a time."""
    return [slice(begin, begin + CHUNK) for begin in range(0, len(x), CHUNK)]


def cross_entropy_(z, w, targets, vocab_size, weights, tp, ops):
    """The losses [n] of logits z [n, v/t], which become `weights` [n] times the gradient (None: none is wanted).

    Each token's row of logits is cut over tp. Its maximum, its sum and the target's logit are three numbers a token
    that are combined over tp; no rank sees a whole row.
    """
    start = tp.rank * len(w)
    columns = min(max(vocab_size - start, 0), len(w))  # of this rank that are not padding
    reduce = None if tp.size == 1 else lambda x, op: all_reduce(x, tp, "cross-entropy rows", op).wait()
    return ops.cross_entropy_(z, targets - start, columns, weights, reduce)
