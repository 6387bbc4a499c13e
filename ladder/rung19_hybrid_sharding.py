"""19. Hybrid sharding, HSDP (slide: ラック間でデータ並列及びZeRO): ZeRO in a group, copies between groups.

    group 0 (a node or a rack)    [0 1]     ZeRO-1 (rung 6) inside: a shard is 1/2 of a weight tensor
    group 1                       [2 3]     a shard has a copy in each group: ranks 0 and 2, ranks 1 and 3

    gradients --ReduceScatter, group--> shard --AllReduce, copies--> shard --Adam--> shard --AllGather, group--> weights

Sends   P/2 gradients and P/2 weights in the group, P/2 between groups: 1,019,904 bytes. Rung 6 sends as much, and each
        of its messages goes round all ranks. Here only a third crosses the slow network between groups.
Memory  as rung 6 with n=2: 1,699,840 bytes.
Bad     a rank keeps 1/2 of the optimizer state, not 1/4. `--zero_copies=2` (parallel/zero.py) does it for ZeRO 1 to 3.
"""

import torch
import torch.distributed as dist
from gpt import GPT, Adam, batches, connect, cross_entropy, show

rank, n = connect(4)
group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])  # this rank's group
copies, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])


def parts(x):
    return list(x.view(-1).chunk(2))


model = GPT()
for w in model.parameters():
    w.shard = parts(w.data)[rank % 2]
adam = Adam(w.shard for w in model.parameters())

for ids, targets in batches():
    ids, targets = ids.chunk(n)[rank], targets.chunk(n)[rank]  # [b/n, s]
    loss = cross_entropy(model(ids), targets)
    loss.backward()
    for w in model.parameters():
        w.shard.grad = torch.empty_like(w.shard)
        dist.reduce_scatter(w.shard.grad, parts(w.grad), group=group)
        dist.all_reduce(w.shard.grad, group=copies)
        w.grad = None
    adam.step()
    for w in model.parameters():
        dist.all_gather(parts(w.data), w.shard, group=group)
    show(loss)
