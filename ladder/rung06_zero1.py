"""6. ZeRO-1 (the slide has ZeRO-3, rung 8): each rank updates 1/n of each weight tensor, its shard.

データ:分散  モデル:冗長  通信:勾配+重み, ReduceScatter+AllGather, ステップ毎

    a tensor w of 4 numbers       rank 0                 rank 1
    backward        w.grad        a0 a1 a2 a3            b0 b1 b2 b3         each rank: gradients of its own samples
    ReduceScatter   shard.grad    a0+b0 a1+b1            a2+b2 a3+b3         its part of the sum. w.grad is freed
    Adam            w             new new old old        old old new new     shard is a part of w's memory
    AllGather       w             new new new new        new new new new

Sends   P(n-1)/n gradients, P(n-1)/n weights: 679,936 bytes (n=4: 1,019,904).
Memory  P weights, 3P/n other numbers: 1,699,840 bytes (n=4: 1,189,888). During backward also P gradients.
Bad     weights and gradients are whole (-> 7, 8). `Zero.publish` (parallel/zero.py) overlaps the AllGather.
"""

import torch
import torch.distributed as dist
from gpt import GPT, Adam, batches, connect, cross_entropy, show

rank, n = connect(2, 4)


def parts(x):
    """Return n flat parts of x. They share the memory of x."""
    return list(x.view(-1).chunk(n))


model = GPT()
for w in model.parameters():
    w.shard = parts(w.data)[rank]  # .data: without autograd
adam = Adam(w.shard for w in model.parameters())

for ids, targets in batches():
    ids, targets = ids.chunk(n)[rank], targets.chunk(n)[rank]  # [b/n, s]
    loss = cross_entropy(model(ids), targets)
    loss.backward()
    for w in model.parameters():
        w.shard.grad = torch.empty_like(w.shard)
        dist.reduce_scatter(w.shard.grad, parts(w.grad))  # the result is in w.shard.grad
        w.grad = None
    adam.step()
    for w in model.parameters():
        dist.all_gather(parts(w.data), w.shard)  # the result is in w
    show(loss)
