"""7. ZeRO-2 (the slide has ZeRO-3, rung 8): as rung 6, but a gradient is whole only until the next one is computed.

データ:分散  モデル:冗長  通信:勾配+重み, ReduceScatter+AllGather, 勾配はマイクロバッチ毎

    backward of each micro-batch:  gradient of w --ReduceScatter--> its shard is added, the whole gradient is freed

Sends   P(n-1)/n gradients in each of m=2 micro-batches, P(n-1)/n weights: 1,019,904 bytes (n=4: 1,529,856).
Memory  as rung 6: 1,699,840 bytes (n=4: 1,189,888). During backward also one whole gradient, of one tensor.
Bad     it sends m+1 times P(n-1)/n numbers, rung 6 only 2 times. With m=1 they send as much, as the paper says; here m
        is 2. Weights are whole (-> 8).
"""

import torch
import torch.distributed as dist
from gpt import GPT, Adam, batches, connect, cross_entropy, show

rank, n = connect(2, 4)


def parts(x):  # as in rung 6
    return list(x.view(-1).chunk(n))


def reduce(w):
    """Backward calls this when w.grad is complete, in each micro-batch."""
    part = torch.empty_like(w.shard)
    dist.reduce_scatter(part, parts(w.grad))
    w.shard.grad = part if w.shard.grad is None else w.shard.grad + part
    w.grad = None


model = GPT()
for w in model.parameters():
    w.shard = parts(w.data)[rank]
    w.register_post_accumulate_grad_hook(reduce)
adam = Adam(w.shard for w in model.parameters())

for ids, targets in batches():
    ids, targets = ids.chunk(n)[rank], targets.chunk(n)[rank]  # [b/n, s]
    total = 0
    for x, y in zip(ids.chunk(2), targets.chunk(2), strict=True):  # each [b/2n, s]
        loss = cross_entropy(model(x), y)
        loss.backward()
        total += loss.detach()
    adam.step()
    for w in model.parameters():
        dist.all_gather(parts(w.data), w.shard)
    show(total)
