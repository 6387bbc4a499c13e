"""Read this before rung 11: テンソル並列 (TP), tensor parallelism, of the MLP alone. f and g join the ranks' parts.

    x --f--> x A_i --> gelu: Y_i --> Y_i B_i --g--> sum of Y_i B_i

    n=2                     rank 0             rank 1
    x    [b, s, h]          whole              whole, the same numbers
    A_i  [h, 4h/2]          left columns       right columns of A (fc1)
    Y_i  [b, s, 4h/2]       left columns       right columns of Y. gelu needs no other rank: it takes each number alone
    B_i  [4h/2, h]          upper rows         lower rows of B (fc2)
    Y_i B_i  [b, s, h]      one term           the other term: Y B = Y_0 B_0 + Y_1 B_1

    f    forward: x stays          backward: AllReduce, because dx = dx of rank 0 + dx of rank 1
    g    forward: AllReduce        backward: dy stays, because each term has this gradient

Sends   2 AllReduces per block, 4Lbsh(n-1)/n numbers: 393,216 bytes (n=4: 589,824).
Memory  1/n of A (with its bias), of B and of Y: 1,921,024 bytes (n=4: 1,521,664).
Bad     each rank repeats attention (-> 11).
"""

import torch
import torch.distributed as dist
from gpt import GPT, Adam, Block, batches, connect, cross_entropy, show
from torch import nn


class CopyToRanks(torch.autograd.Function):  # has its own backward
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, dx):
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group):
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def f(x, group=None):  # group=None: all ranks
    return CopyToRanks.apply(x, group)


def g(y, group=None):
    return SumOverRanks.apply(y, group)


def cut(weight, dim, group=None):
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    return nn.Parameter(weight.data.chunk(n, dim)[rank].clone())


def cut_pair(a, b, group=None):
    """Cut linear a by its outputs, linear b by its inputs. nn.Linear's weight is [outputs, inputs]."""
    a.weight, a.bias = cut(a.weight, 0, group), cut(a.bias, 0, group)
    b.weight = cut(b.weight, 1, group)
    if dist.get_rank(group) > 0:
        b.bias = None  # g adds n outputs; one has the bias


class MLPParallelBlock(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block
        cut_pair(block.fc1, block.fc2)

    def forward(self, x):  # [b, s, h]
        x = x + self.block.attention(self.block.ln1(x))
        return x + g(self.block.mlp(f(self.block.ln2(x))))


if __name__ == "__main__":
    rank, n = connect(2, 4)
    model = nn.Sequential(*[MLPParallelBlock(unit) if isinstance(unit, Block) else unit for unit in GPT()])
    adam = Adam(model.parameters())

    for ids, targets in batches():  # all ranks have all samples
        loss = cross_entropy(model(ids), targets)
        loss.backward()
        adam.step()
        show(loss / n)  # `show` adds n equal losses
