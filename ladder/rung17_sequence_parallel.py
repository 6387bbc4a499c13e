"""17. Sequence parallelism (not on the slides): rung 11, but from g to the next f each rank has s/n tokens of a sample.

    rung 11    g: AllReduce     --> [b, s, h]   --> LayerNorm --> f: copy
    here      g: ReduceScatter --> [b, s/n, h] --> LayerNorm --> f: AllGather

Sends   as rung 11, and gradients of LayerNorms, embedding and head: 862,720 bytes (n=4: 1,294,080).
Memory  as rung 11: 1,518,592 bytes (n=4: 918,016). 1/n of the activations also between g and f.
Bad     the gathered x is kept for backward. `Linear` (parallel/tensor.py) keeps 1/n of it, and gathers again.
"""

import torch
import torch.distributed as dist
from gpt import GPT, Adam, batches, connect, cross_entropy, show
from rung11_tp import TensorParallelBlock
from torch import nn


def all_gather(x):
    """[b, s/n, h] -> [b, s, h]"""
    parts = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(parts, x)
    return torch.cat(parts, 1)


def reduce_scatter(x):
    """[b, s, h] -> [b, s/n, h]"""
    parts = [part.contiguous() for part in x.chunk(n, 1)]
    y = torch.empty_like(parts[0])
    dist.reduce_scatter(y, parts)
    return y


class AllGather(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: all_gather(x))
    backward = staticmethod(lambda ctx, dy: reduce_scatter(dy))


class ReduceScatter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, y: reduce_scatter(y))
    backward = staticmethod(lambda ctx, dx: all_gather(dx))


class SequenceParallelBlock(TensorParallelBlock):
    def forward(self, x):  # [b, s/n, h]
        x = x + ReduceScatter.apply(self.block.attention(AllGather.apply(self.block.ln1(x))))
        return x + ReduceScatter.apply(self.block.mlp(AllGather.apply(self.block.ln2(x))))


rank, n = connect(2, 4)
embedding, *blocks, head = GPT()
blocks = nn.Sequential(*[SequenceParallelBlock(block) for block in blocks])
adam = Adam([*embedding.parameters(), *blocks.parameters(), *head.parameters()])
norms = [module for module in blocks.modules() if isinstance(module, nn.LayerNorm)]
replicated = nn.ModuleList([embedding, head, *norms])

for ids, targets in batches():
    x = embedding(ids).chunk(n, 1)[rank].clone()  # [b, s/n, h]; the other parts are freed
    loss = cross_entropy(head(blocks(x)), targets.chunk(n, 1)[rank])
    loss.backward()
    for w in replicated.parameters():
        dist.all_reduce(w.grad)  # before, it was only of this rank's tokens
    adam.step()
    show(loss)
