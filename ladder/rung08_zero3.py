"""8. ZeRO (FSDP), ZeRO-3: each rank has 1/n of everything. The weights of a unit are whole only while it computes.

データ:分散  モデル:一時的に分散  通信:勾配+重み, ReduceScatter+AllGather, 層毎

    forward (F):  gather F free | gather F free | ...     backward (B):  gather B free reduce_scatter | gather B ...

Sends   P(n-1)/n weights in forward, again in backward, P(n-1)/n gradients: 1,019,904 bytes (n=4: 1,529,856).
Memory  4P/n numbers: 1,359,872 bytes (n=4: 679,936). In F and B also one unit's weights, in B its gradients.
Bad     ranks wait for each gather. `Bucket.start_gather` (parallel/zero.py) gathers the next unit early. On the
        slide the global batch grows with n (ラージバッチ問題: rung 4).
"""

import torch
import torch.distributed as dist
from gpt import GPT, Adam, batches, connect, cross_entropy, show

rank, n = connect(2, 4)


def parts(x):  # as in rung 6
    return list(x.view(-1).chunk(n))


def gather(unit):
    """Allocate a unit's weights, and fill them with all shards."""
    for w in unit.parameters():
        w.untyped_storage().resize_(w.nbytes)
        dist.all_gather(parts(w.data), w.shard)


def free(unit):
    """Free a unit's weights. (`del w` would not: autograd keeps w for backward.)"""
    for w in unit.parameters():
        w.untyped_storage().resize_(0)


def reduce_scatter(unit):
    """Give each shard its gradient, and free the whole one."""
    for w in unit.parameters():
        w.shard.grad = torch.empty_like(w.shard)
        dist.reduce_scatter(w.shard.grad, parts(w.grad))
        w.grad = None


def forward(x):
    """Return the logits, and what backward needs: (unit, its input, its output) of each unit."""
    saved = []
    for unit in model:
        gather(unit)
        y = unit(x)
        free(unit)
        saved.append((unit, x, y))
        x = y.detach().requires_grad_()  # so autograd stops here, and backward goes unit by unit
    return x, saved


def backward(dy, saved):
    """Run the units' backwards, the last unit first. dy: gradient of the logits."""
    while saved:
        unit, x, y = saved.pop()
        gather(unit)
        y.backward(dy)
        free(unit)
        reduce_scatter(unit)
        dy = x.grad


model = GPT()
for w in model.parameters():
    w.shard = parts(w.data)[rank].clone()  # a copy, because w is freed
adam = Adam(w.shard for w in model.parameters())
free(model)

for ids, targets in batches():
    ids, targets = ids.chunk(n)[rank], targets.chunk(n)[rank]  # [b/n, s]
    logits, saved = forward(ids)
    loss = cross_entropy(logits, targets)
    loss.backward()  # gives logits.grad
    backward(logits.grad, saved)
    adam.step()
    show(loss)
