"""GPT-2, written as if there were one GPU.

    ids [n] -> word + position embedding -> dropout -> L blocks -> LayerNorm -> logits (tied to the word table) -> loss

    block:   x + dropout(proj(attention(qkv(ln1(x)))))
             x + dropout(fc2(gelu(fc1(ln2(x)))))

x is [n, h]: n = b s tokens, sample after sample; n/t of them where sequence parallelism cuts the rows.
Radford et al. 2019: pre-LayerNorm, learned positions, tanh-GELU, biases everywhere, and the word table used twice.
Dropout acts on the embedding and on what each block adds; on attention probabilities there is none.

Parallelism is in the layers of `parallel/tensor.py` that this is built from. A model is a list of *units* (embedding,
blocks, head), each a function of (x, micro-batch), so that the executor can gather, free, recompute or reduce between
two of them. A layer declares its parameters as `ParamSpec`s: a model has no storage until `parallel/zero.py` puts views
into flat buffers in their place. Two units use the word table; it is a bucket of its own.

Parameters: V h + s h + L (12 h^2 + 13 h) + 2 h, with V the padded vocabulary: 354,871,296 at 24 x 1024.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import reference
from parallel.tensor import (
    ColumnParallelLinear,
    Linear,
    LinearCrossEntropy,
    ParamSpec,
    RowParallelLinear,
    VocabParallelEmbedding,
    next_token_losses,
    specs,
)
from reference import Drop


@dataclass
class MicroBatch:
    """b samples of s tokens, as the units of one rank need them."""

    shape: tuple  # (b, s)
    ids: torch.Tensor  # [n] int64
    targets: torch.Tensor | None  # [n] int64: the id after each; None when generating
    positions: torch.Tensor  # [n or n/t] of this rank's rows, in the sample
    rows: torch.Tensor  # [n or n/t] of this rank's rows, in the whole run: what dropout masks depend on
    dropout: float
    caches: list | None = None  # generating: one list of past keys and values per block

    def drop(self, seed, site):
        """The dropout of this micro-batch at one place in the model; None: there is none."""
        return Drop(self.rows, self.dropout, seed, site) if self.dropout else None


class Block(nn.Module):
    """One transformer layer: attention, then MLP, each added to the residual stream."""

    recomputable = True  # it keeps some 32 bytes per element of x (bf16), and x is all that it needs to run again

    def __init__(self, c, index, tp, ops):
        super().__init__()
        h, std, sp, name = c.hidden_size, c.init_method_std, c.sequence_parallel, f"block{index}"
        residual_std = std / math.sqrt(2 * c.num_layers)  # 2L terms are added up: keep the sum's size
        self.ln1 = LayerNorm(f"{name}.ln1", h)
        self.qkv = ColumnParallelLinear(f"{name}.qkv", (3, h, h), std, tp, sp)
        self.proj = RowParallelLinear(f"{name}.proj", (h, h), residual_std, tp, sp)
        self.ln2 = LayerNorm(f"{name}.ln2", h)
        self.fc1 = ColumnParallelLinear(f"{name}.fc1", (4 * h, h), std, tp, sp, adds_bias=False)
        self.fc2 = RowParallelLinear(f"{name}.fc2", (h, 4 * h), residual_std, tp, sp)
        self.index, self.seed, self.head_size, self.ops = index, c.seed, c.head_size, ops

    def forward(self, x, batch):
        x = ResidualStream(x, self.ops)
        x += self.attention(self.ln1(x), batch)
        x += self.mlp(self.ln2(x), batch)
        return x.tensor()

    def attention(self, x, batch):
        qkv = self.qkv(x).view(*batch.shape, 3, -1, self.head_size)  # [b, s, 3, heads/t, d]
        y = self.ops.attention(qkv, batch.caches and batch.caches[self.index])  # [b, s, heads/t, d]
        y = self.proj(y.reshape(len(batch.ids), -1))  # [n, h/t] -> [n, h]
        return Branch(y, self.proj.bias, batch.drop(self.seed, site=2 * self.index + 1))

    def mlp(self, x, batch):
        """Another activation: a function like `reference.gelu_`, beside it, called here. It needs no kernel."""
        y = self.fc2(self.ops.gelu_(self.fc1(x), self.fc1.bias))  # [n, h] -> [n, 4h/t] -> [n, h]
        return Branch(y, self.fc2.bias, batch.drop(self.seed, site=2 * self.index + 2))


class Branch(NamedTuple):
    """A layer's output that is to be added to the residual stream: dropout(y + bias), not yet computed."""

    y: torch.Tensor  # [n, h]
    bias: torch.Tensor  # [h]
    drop: Drop | None


class ResidualStream:
    """x, to which each layer adds. `x += branch` only notes the branch; the LayerNorm that reads x next adds it.

    So the sum and the norm are one operation, which a fused kernel makes in one pass over memory
    (`kernels.add_layer_norm_`).
    """

    def __init__(self, x, ops):
        self.x, self.ops, self.branch = x, ops, None

    def __iadd__(self, branch):
        self.tensor()
        self.branch = branch
        return self

    def norm(self, weight, bias):
        """Add the branch, and return the LayerNorm of the sum, [n, h]."""
        y, y_bias, drop = self.branch or (None, None, None)
        self.x, normed = self.ops.add_layer_norm_(y, self.x, y_bias, weight, bias, drop)
        self.branch = None
        return normed

    def tensor(self):
        """Add the branch, and return the sum, [n, h]."""
        if self.branch:
            self.x, self.branch = self.ops.add_(self.branch.y, self.x, *self.branch[1:]), None
        return self.x


class LayerNorm(nn.Module):
    """A ResidualStream -> its LayerNorm [n, h]."""

    def __init__(self, name, width):
        super().__init__()
        self.weight = ParamSpec(f"{name}.weight", (width,), mean=1.0)
        self.bias = ParamSpec(f"{name}.bias", (width,))

    def forward(self, stream):
        return stream.norm(self.weight, self.bias)


class Embedding(nn.Module):
    """The first unit: ids to vectors."""

    recomputable = False  # it keeps no activations

    def __init__(self, c, word, ops):
        super().__init__()
        self.position = ParamSpec("embedding.position", (c.positions, c.hidden_size), None, True, c.init_method_std)
        self.word = word
        self.seed, self.ops = c.seed, ops

    def forward(self, _, batch):
        x = self.word(batch.ids)  # [n, h], or [n/t, h]
        x = x + F.embedding(batch.positions, self.position)
        return self.ops.dropout(x, batch.drop(self.seed, site=0))


class Head(nn.Module):
    """The last unit: vectors to the loss of every token, [n]; without targets (generating, t = 1), to the logits.

    In training the losses are made in backward, together with their gradient: until then they are nan.
    """

    recomputable = False  # it keeps only the matrix product's input

    def __init__(self, c, word, tp, ops):
        super().__init__()
        self.ln = LayerNorm("head.ln", c.hidden_size)
        self.word = word
        self.vocab_size, self.tp, self.ops = c.vocab_size, tp, ops
        self.enter = "all_gather" if c.sequence_parallel else "copy"

    def forward(self, x, batch):
        x = self.ln(ResidualStream(x, self.ops))
        if batch.targets is None:
            logits = Linear.apply(x, self.word.weight, None, self.enter, None, self.tp)
            return logits[:, : self.vocab_size]
        losses = LinearCrossEntropy.apply if torch.is_grad_enabled() else next_token_losses
        return losses(x, self.word.weight, batch.targets, self.vocab_size, self.enter, self.tp, self.ops)


class GPT(nn.Module):
    """The units in order. `config` as in config.py; `tp` the tensor parallel axis; `ops` the operations to use."""

    def __init__(self, config, tp, ops=reference):
        super().__init__()
        c = config
        self.config, self.tp = c, tp
        word = VocabParallelEmbedding(
            "word", c.padded_vocab_size, c.hidden_size, c.init_method_std, tp, c.sequence_parallel
        )
        blocks = [Block(c, i, tp, ops) for i in range(c.num_layers)]
        self.units = nn.ModuleList([Embedding(c, word, ops), *blocks, Head(c, word, tp, ops)])
        self.table = [specs(unit) for unit in self.units]  # of each unit, the parameters that it uses

    def forward(self, batch):
        """The loss of every token, [n], or logits. All units in a row, on one process: for generation."""
        x = None
        for unit in self.units:
            x = unit(x, batch)
        return x

    def specs(self):
        """{name: ParamSpec}: every logical parameter once, tied ones too."""
        return {spec.name: spec for unit in self.table for spec in unit}

    def num_parameters(self):
        """Whole, over all tensor parallel ranks, the padded vocabulary included."""
        return sum(math.prod(spec.shape) for spec in self.specs().values())

    def micro_batch(self, ids, targets=None, samples=None, start=0, caches=None):
        """ids, targets [b, s]; samples [b]: their numbers in the run, None: no dropout; start: the first position."""
        b, s = ids.shape
        row = torch.arange(b * s, device=ids.device)
        if self.config.sequence_parallel:
            row = row.chunk(self.tp.size)[self.tp.rank]
        positions = start + row % s
        rows = positions if samples is None else samples[row // s] * self.config.seq_length + positions
        rate = 0.0 if samples is None else self.config.dropout
        targets = None if targets is None else targets.flatten()
        return MicroBatch((b, s), ids.flatten(), targets, positions, rows, rate, caches)


def parameter_table(config):
    """[ParamSpecs of each unit] of the model: no process and no tensor is needed."""
    return GPT(config, tp=None).table
