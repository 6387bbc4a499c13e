"""Llama, from the parallel layers of GPT-2 (`model.py`): --model=llama.

    ids [n] -> word embedding -> dropout -> L blocks -> RMSNorm -> logits -> loss

    block:   x + dropout(proj(attention(rotated q, rotated k, v)))     q, k, v = qkv(norm1(x))
             x + dropout(fc2(silu(gate) * up))                         gate, up = fc1(norm2(x))

Positions have no parameters: attention rotates queries and keys by them. Linears have no biases.
The head has a word table of its own, or the embedding's. Touvron et al. (arXiv 2302.13971,
2307.09288).

**Query groups** (Ainslie et al., arXiv 2305.13245). The a heads of queries are g groups. The a/g
heads of a group share one head of keys and values. The rows of qkv lie group after group, as in
Megatron-LM: a/g heads of queries, one of keys, one of values. So each tp rank has whole groups, and
q, k, v are one product. To Muon they are one matrix.

Number of parameters: v h (untied: 2 v h) + L (2 h^2 + 2 h^2 g/a + 3 h f + 2 h) + h, where f is
ffn_hidden_size.
"""

import math

from torch import nn

from model import Head
from parallel.context import attend
from parallel.tensor import ColumnParallelLinear, ParamSpec, RowParallelLinear, VocabParallelEmbedding


class Block(nn.Module):
    """One transformer layer. x [n, h] is the residual stream."""

    recomputable = True

    def __init__(self, c, index, tp, ops, cp):
        super().__init__()
        h, f, a, g, d = c.hidden_size, c.ffn_size, c.num_attention_heads, c.query_groups, c.head_size
        std, name = c.init_method_std, f"block{index}"
        residual_std = std / math.sqrt(2 * c.num_layers)  # as in `model.Block`
        self.norm1 = RMSNorm(f"{name}.norm1", c, ops)
        self.qkv = ColumnParallelLinear(f"{name}.qkv", ((a + 2 * g) * d, h), std, c, tp, has_bias=False)
        self.proj = RowParallelLinear(f"{name}.proj", (h, h), residual_std, c, tp, has_bias=False)
        self.norm2 = RMSNorm(f"{name}.norm2", c, ops)
        self.fc1 = ColumnParallelLinear(f"{name}.fc1", (2, f, h), std, c, tp, has_bias=False)
        self.fc2 = RowParallelLinear(f"{name}.fc2", (h, f), residual_std, c, tp, has_bias=False)
        self.index, self.seed, self.rotary_base, self.ops = index, c.seed, c.rotary_base, ops
        self.group, self.cp = (a // g + 2, d), cp  # group: its heads, and their size

    def forward(self, x, batch):
        drop1, drop2 = (batch.drop(self.seed, site=2 * self.index + k) for k in (1, 2))
        x, y = self.norm1(x)  # x as it is, and its RMSNorm
        y = self.attention(y, batch)
        x, y = self.norm2(x, y, drop1)  # x + dropout(y), and the RMSNorm of this sum
        y = self.fc2(self.ops.swiglu(self.fc1(y)))  # [n, h] -> [n, 2f/t] -> [n, f/t] -> [n, h]
        return self.ops.add_(y, x, None, drop2)

    def attention(self, x, batch):
        groups = self.qkv(x).view(*batch.shape, -1, *self.group)  # [b, s, g/t, a/g + 2, d]
        q, k, v = groups.split([groups.shape[3] - 2, 1, 1], 3)
        q, k = (self.ops.rotate(y, batch.sample_positions, self.rotary_base) for y in (q, k))
        q, k, v = (y.flatten(2, 3).contiguous() for y in (q, k, v))  # q [b, s, a/t, d]; k, v [b, s, g/t, d]
        y = attend(q, k, v, self.cp, self.ops, batch.caches and batch.caches[self.index])
        return self.proj(y.reshape(len(batch.ids), -1))  # [n, h/t] -> [n, h]


class RMSNorm(nn.Module):
    """(x, y) -> (z, RMSNorm of z) with z = x + dropout(y). Without y, z is x."""

    def __init__(self, name, c, ops):
        super().__init__()
        self.weight = ParamSpec(f"{name}.weight", (c.hidden_size,), mean=1.0)
        self.epsilon, self.ops = c.norm_epsilon, ops

    def forward(self, x, y=None, drop=None):
        return self.ops.add_rms_norm_(y, x, self.weight, self.epsilon, drop)


class Embedding(nn.Module):
    recomputable = False

    def __init__(self, c, word, ops):
        super().__init__()
        self.word, self.seed, self.ops = word, c.seed, ops

    def forward(self, _, batch):
        return self.ops.dropout(self.word(batch.ids), batch.drop(self.seed, site=0))  # [n, h], or [n/t, h]


def units(c, tp, ops, cp):
    """Return the units of Llama."""
    head_table = word = VocabParallelEmbedding("word", c, tp, ops)
    if c.untie_embeddings_and_output_weights:
        head_table = VocabParallelEmbedding("head", c, tp, ops)
    blocks = [Block(c, i, tp, ops, cp) for i in range(c.num_layers)]
    return [Embedding(c, word, ops), *blocks, Head(c, RMSNorm("head.norm", c, ops), head_table, tp, ops)]
