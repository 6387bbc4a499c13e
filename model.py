"""GPT-2, written as if there were one GPU.

    ids [n] -> word + position embedding -> dropout -> L blocks -> LayerNorm -> logits (tied to the word table) -> loss

    block:   x + dropout(proj(attention(qkv(ln1(x)))))          x is [n, h]: n = b s tokens, sample after sample
             x + dropout(fc2(gelu(fc1(ln2(x)))))                (n/t of them, where sequence parallelism cuts them)

Radford et al. 2019: pre-LayerNorm, learned positions, tanh-GELU, biases everywhere, and the word table used twice.
Dropout acts on the embedding and on what each block adds; on attention probabilities there is none.

All parallelism is in the four layers of `parallel/tensor.py` that this is built from. A model is a list of *units*
(embedding, blocks, head), each a function of (x, micro-batch), so that whoever runs them can gather, free, recompute
or reduce between two of them. Parameters have no storage of their own: `parallel/zero.py` gives every unit's
parameters one flat buffer. The tied word table is used by two units and is therefore stored as one of its own.

Parameters: V h + s h + L (12 h^2 + 13 h) + 2 h, with V the padded vocabulary: 354,871,296 at 24 x 1024.
"""

import math
from dataclasses import dataclass

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
    parameter,
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
    weight: float | None = None  # training: what each token's loss is multiplied by on the way back

    def drop(self, seed, site):
        """The dropout of this micro-batch at one place in the model; None: there is none."""
        return Drop(self.rows, self.dropout, seed, site) if self.dropout else None


class LayerNorm(nn.Module):
    """A LayerNorm's two parameters; what is done with them is fused with what comes before."""

    def __init__(self, unit, name, width, tp):
        super().__init__()
        self.weight = parameter(ParamSpec(unit, f"{unit}.{name}.weight", (width,), mean=1.0), tp)
        self.bias = parameter(ParamSpec(unit, f"{unit}.{name}.bias", (width,)), tp)


class Embedding(nn.Module):
    """The first unit: ids to vectors."""

    recomputable = False  # it keeps no activations

    def __init__(self, c, word, tp, ops):
        super().__init__()
        self.word = word
        spec = ParamSpec("embedding", "embedding.position", (c.positions, c.hidden_size), None, True, c.init_method_std)
        self.position = parameter(spec, tp)
        self.seed, self.ops = c.seed, ops

    def forward(self, _, batch):
        x = self.word(batch.ids)  # [n, h], or [n/t, h]
        x = x + F.embedding(batch.positions, self.position)
        return self.ops.dropout(x, batch.drop(self.seed, site=0))


class Block(nn.Module):
    """One transformer layer: attention, then MLP, each added to the residual stream."""

    recomputable = True  # it keeps some 32 bytes per element of x (bf16), and x is all that it needs to run again

    def __init__(self, c, index, tp, ops):
        super().__init__()
        h, std = c.hidden_size, c.init_method_std
        residual_std = std / math.sqrt(2 * c.num_layers)  # 2L terms are added up: keep the sum's size
        unit, cut = f"block{index}", (tp, c.sequence_parallel)
        self.ln1 = LayerNorm(unit, "ln1", h, tp)
        self.qkv = ColumnParallelLinear(unit, "qkv", (3, h, h), std, *cut)
        self.proj = RowParallelLinear(unit, "proj", (h, h), residual_std, *cut)
        self.ln2 = LayerNorm(unit, "ln2", h, tp)
        self.fc1 = ColumnParallelLinear(unit, "fc1", (4 * h, h), std, *cut, adds_bias=False)
        self.fc2 = RowParallelLinear(unit, "fc2", (h, 4 * h), residual_std, *cut)
        self.index, self.seed, self.head_size, self.ops = index, c.seed, c.head_size, ops

    def forward(self, x, batch):
        drops = [batch.drop(self.seed, site=2 * self.index + which) for which in (1, 2)]
        x, y = self.ops.add_layer_norm(x, None, None, self.ln1.weight, self.ln1.bias)
        y = self.proj(self.attention(self.qkv(y), batch))
        x, y = self.ops.add_layer_norm(x, y, self.proj.bias, self.ln2.weight, self.ln2.bias, drops[0])
        y = self.fc2(self.ops.gelu(self.fc1(y), self.fc1.bias))
        return self.ops.add(x, y, self.fc2.bias, drops[1])

    def attention(self, qkv, batch):
        qkv = qkv.view(*batch.shape, 3, -1, self.head_size)  # [b, s, 3, heads/t, d]
        y = self.ops.attention(qkv, batch.caches and batch.caches[self.index])
        return y.reshape(len(batch.ids), -1)  # [n, h/t]


class Head(nn.Module):
    """The last unit: vectors to the loss of every token, [n]; without targets, to the logits."""

    recomputable = False  # its gradient is made together with the loss

    def __init__(self, c, word, tp, ops):
        super().__init__()
        self.ln = LayerNorm("head", "ln", c.hidden_size, tp)
        self.word = word
        self.vocab_size, self.tp, self.ops = c.vocab_size, tp, ops
        self.enter = "all_gather" if c.sequence_parallel else "copy"

    def forward(self, x, batch):
        x = self.ops.layer_norm(x, self.ln.weight, self.ln.bias)
        if batch.targets is None:
            logits = Linear.apply(x, self.word.weight, None, self.enter, None, self.tp)  # [n, v/t]
            return logits[:, : self.vocab_size]
        rest = self.vocab_size, batch.weight, self.enter, self.tp, self.ops
        return LinearCrossEntropy.apply(x, self.word.weight, batch.targets, *rest)


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
        self.units = nn.ModuleList([Embedding(c, word, tp, ops), *blocks, Head(c, word, tp, ops)])

    def forward(self, batch):
        """The loss of every token, [n], or logits. The plain way, on one process: for generation."""
        x = None
        for unit in self.units:
            x = unit(x, batch)
        return x

    def specs(self):
        """The table of names: every logical parameter once, tied ones too."""
        return {p.spec.name: p.spec for p in self.parameters()}

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
