"""GPT-2, written as if there were one GPU. The parallelism is in the layers of `parallel/tensor.py`.

    ids [n] -> word + position embedding -> dropout -> L blocks -> LayerNorm -> logits -> loss

    block:   x + dropout(proj(attention(qkv(ln1(x)))))
             x + dropout(fc2(gelu(fc1(ln2(x)))))

x is [n, h]: n = b s tokens of b samples, sample after sample. With sequence parallelism each of the
t tensor parallel ranks has n/t of these rows. In GPT-2 (Radford et al. 2019) GELU has its tanh form,
linears have biases, positions are learned, and the word table is used twice. With ReLU it is OPT
(Zhang et al. 2022). Attention probabilities have no dropout.

The model is a list of *units*, functions of (x, batch): `parallel/units.py` says what a unit gets and returns.

Number of parameters: v h + s h + L (12 h^2 + 13 h) + 2 h. The vocabulary v is rounded up to a
multiple of 128.
"""

import math

import torch
from torch import nn

from parallel.context import attend
from parallel.tensor import (
    ColumnParallelLinear,
    EmbeddingLookup,
    Linear,
    LinearCrossEntropy,
    ParamSpec,
    RowParallelLinear,
    VocabParallelEmbedding,
    entering,
    next_token_losses,
)


class Block(nn.Module):
    """One transformer layer. x [n, h] is the residual stream."""

    recomputable = True  # a block keeps about 32 bytes per element of x (bf16)

    def __init__(self, c, index, tp, ops, cp):
        super().__init__()
        h, std, name = c.hidden_size, c.init_method_std, f"block{index}"
        # x is a sum of 2L outputs. Its variance shall not grow with L.
        residual_std = std / math.sqrt(2 * c.num_layers)
        self.ln1 = LayerNorm(f"{name}.ln1", h, ops)
        self.qkv = ColumnParallelLinear(f"{name}.qkv", (3, h, h), std, c, tp)
        self.proj = RowParallelLinear(f"{name}.proj", (h, h), residual_std, c, tp)
        self.ln2 = LayerNorm(f"{name}.ln2", h, ops)
        self.mlp = MLP(c, name, std, residual_std, tp, ops)
        self.index, self.seed, self.head_size, self.ops, self.cp = index, c.seed, c.head_size, ops, cp

    def forward(self, x, batch):
        drop1, drop2 = (batch.drop(self.seed, site=2 * self.index + k) for k in (1, 2))
        x, y = self.ln1(x)  # y: LayerNorm of x
        y = self.attention(y, batch)
        x, y = self.ln2(x, y, self.proj.bias, drop1)  # x + dropout(y + bias), and its LayerNorm
        y = self.mlp(y, batch)
        return self.ops.add_(y, x, self.mlp.bias, drop2)

    def attention(self, x, batch):
        q, k, v = self.qkv(x).view(*batch.shape, 3, -1, self.head_size).unbind(2)  # each [b, s, heads/t, d]
        y = attend(q, k, v, self.cp, self.ops, batch.caches and batch.caches[self.index])
        return self.proj(y.reshape(len(batch.ids), -1))  # [n, h/t] -> [n, h]


class MLP(nn.Module):
    """x [n, h] -> [n, h], without the bias of fc2. The activations: `reference.ACTIVATIONS`."""

    def __init__(self, c, name, std, residual_std, tp, ops):
        super().__init__()
        h = c.hidden_size
        self.fc1 = ColumnParallelLinear(f"{name}.fc1", (4 * h, h), std, c, tp, adds_bias=False)
        self.fc2 = RowParallelLinear(f"{name}.fc2", (h, 4 * h), residual_std, c, tp)
        self.activation_ = getattr(ops, f"{c.activation}_")

    @property
    def bias(self):
        return self.fc2.bias

    def forward(self, x, batch):
        y = self.activation_(self.fc1(x), self.fc1.bias)  # [n, 4h/t]
        return self.fc2(y)


class LayerNorm(nn.Module):
    """(x, y) -> (z, LayerNorm of z) with z = x + dropout(y + bias). Without y, z is x."""

    def __init__(self, name, width, ops):
        super().__init__()
        self.weight = ParamSpec(f"{name}.weight", (width,), mean=1.0)
        self.bias = ParamSpec(f"{name}.bias", (width,))
        self.ops = ops

    def forward(self, x, y=None, bias=None, drop=None):
        return self.ops.add_layer_norm_(y, x, bias, self.weight, self.bias, drop)


class Embedding(nn.Module):
    recomputable = False

    def __init__(self, c, word, ops):
        super().__init__()
        shape = c.positions, c.hidden_size
        self.position = ParamSpec("embedding.position", shape, None, True, c.init_method_std)
        self.word = word
        self.seed, self.ops = c.seed, ops

    def forward(self, _, batch):
        x = self.word(batch.ids)  # [n, h], or [n/t, h]
        x = x + EmbeddingLookup.apply(batch.positions, self.position, None, self.ops)
        return self.ops.dropout(x, batch.drop(self.seed, site=0))


class Head(nn.Module):
    """x -> the loss of every token, [n]. Without targets (generation) it returns logits.

    In training, forward returns nan, and backward writes the losses there (`LinearCrossEntropy`). A
    head that computes with its losses says so: then forward computes them, too.
    """

    recomputable = False  # the head keeps little: backward computes the logits
    reads_losses = False

    def __init__(self, c, norm, word, tp, ops):
        super().__init__()
        self.norm, self.word = norm, word
        self.vocab_size, self.enter, self.tp, self.ops = c.vocab_size, entering(c), tp, ops

    def forward(self, x, batch):
        _, x = self.norm(x)
        if batch.targets is None:
            logits = Linear.apply(x, self.word.weight, None, self.enter, None, self.tp)
            return logits[:, : self.vocab_size]
        losses = LinearCrossEntropy.apply if torch.is_grad_enabled() else next_token_losses
        words = self.word.weight, batch.targets, self.vocab_size
        return losses(x, *words, self.enter, self.tp, self.ops, self.reads_losses)


def units(c, tp, ops, cp):
    """Return the units of GPT-2. --model=NAME calls this function of NAME.py."""
    word = VocabParallelEmbedding("word", c, tp, ops)
    blocks = [Block(c, i, tp, ops, cp) for i in range(c.num_layers)]
    head = Head(c, LayerNorm("head.ln", c.hidden_size, ops), word, tp, ops)
    return [Embedding(c, word, ops), *blocks, head]
