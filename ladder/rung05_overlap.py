"""5. データ並列 (DP) with overlap: the AllReduce of a gradient starts when backward has computed this gradient.

    backward    head | block 6 | block 5 | ...
    AllReduce        | head    | block 6 | ...

Sends   as rung 4, but during backward: 679,936 bytes (n=4: 1,019,904).
Memory  as rung 4: 2,719,744 bytes (n=4: 2,719,744).
        `torchrun --nproc_per_node=2 ladder/delay.py 5 ladder/rung05_overlap.py` prints what a step waits.
Bad     it sends many small messages. `Bucket.reduce` (parallel/zero.py) sends one per block.
"""

import torch.distributed as dist
from gpt import GPT, Adam, batches, connect, cross_entropy, show

rank, n = connect(2, 4)
model = GPT()
adam = Adam(model.parameters())
sums = []  # AllReduces that have started


def start(w):
    sums.append(dist.all_reduce(w.grad, async_op=True))  # returns at once


for w in model.parameters():
    w.register_post_accumulate_grad_hook(start)  # backward calls start(w) when w.grad is complete

for ids, targets in batches():
    ids, targets = ids.chunk(n)[rank], targets.chunk(n)[rank]  # [b/n, s]
    loss = cross_entropy(model(ids), targets)
    loss.backward()
    while sums:
        sums.pop().wait()
    adam.step()
    show(loss)
