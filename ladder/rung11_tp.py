"""11. テンソル並列 (TP), tensor parallelism: the matrices of a block are cut. Each rank has a/n heads.

データ:冗長  モデル:分散  通信:活性, AllReduce, 層毎

    x --f--> x A_i --> gelu or attention: Y_i --> Y_i B_i --g--> sum of Y_i B_i
    A_i: columns of A (qkv, fc1); B_i: rows of B (proj, fc2). f: AllReduce in backward; g: AllReduce in forward.

Sends   4 AllReduces per block, 8Lbsh(n-1)/n numbers: 786,432 bytes (n=4: 1,179,648).
Memory  1/n of A (with biases), of B, and of activations between f and g: 1,518,592 bytes (n=4: 918,016).
Bad     オーバーラップ不可 in forward (`Linear.backward` overlaps). Each rank repeats LayerNorms and head (-> 17, 18).
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
        dist.all_reduce(dx, group=ctx.group)  # each rank's dx is one term of the sum
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
    return nn.Parameter(weight.data.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone())


class TensorParallelBlock(nn.Module):
    def __init__(self, block, group=None):
        super().__init__()
        self.block, self.group = block, group
        for linear in (block.qkv, block.fc1):  # A is cut by outputs; weight [outputs, inputs]
            linear.weight, linear.bias = cut(linear.weight, 0, group), cut(linear.bias, 0, group)
        for linear in (block.proj, block.fc2):  # B is cut by inputs
            linear.weight = cut(linear.weight, 1, group)
            if dist.get_rank(group) > 0:
                linear.bias = None  # g adds n outputs; one has the bias

    def forward(self, x):  # [b, s, h]
        x = x + g(self.block.attention(f(self.block.ln1(x), self.group)), self.group)
        return x + g(self.block.mlp(f(self.block.ln2(x), self.group)), self.group)


def tensor_parallel(units, group=None):
    return nn.Sequential(*[TensorParallelBlock(u, group) if isinstance(u, Block) else u for u in units])


if __name__ == "__main__":
    rank, n = connect(2, 4)
    model = tensor_parallel(GPT())
    adam = Adam(model.parameters())

    for ids, targets in batches():  # all ranks have all samples
        loss = cross_entropy(model(ids), targets)
        loss.backward()
        adam.step()
        show(loss / n)  # `show` adds n equal losses
