"""15. パイプライン並列 (PP), Chimera: two pipelines on the same ranks, one down, one up. Each fills the other's bubble.

    slot       0 1 2 3                 n=2, m=2. Micro-batch 0 goes down, 1 goes up. F and B drawn as equally long
    rank 0    F0F1B1B0                 rank 0 has stage 0 (down) and stage 1 (up)
    rank 1    F1F0B0B1                 rank 1 has stage 1 (down) and stage 0 (up)

The two copies of a stage are twins, on ranks r and n-1-r. Their gradients are added before the update.

Sends   messages as rung 9, AllReduce of the twins' gradients: 712,704 bytes (n=4: 306,176).
Memory  two stages: 2,719,744 bytes (n=4: 1,093,632). Activations of n/2+1 (rank 0) to n micro-batches.
Bad     twice the weights. The bubble is (n-2)/(2m+n-2) of the time if F takes as long as B, else more.
"""

import torch
import torch.distributed as dist
from gpt import MICRO_BATCHES, Adam, batches, connect, show
from rung09_gpipe import backward, forward, place, sends

rank, n = connect(2, 4)
down, before, after = place(rank, n)
up, _, _ = place(n - 1 - rank, n)
pipelines = [(down, before, after), (up, after, before)]
twins, _ = dist.new_subgroups_by_enumeration([[r, n - 1 - r] for r in range(n // 2)])
stages = (down, up) if rank < n // 2 else (up, down)  # both twins add the same stage first
weights = [w for stage in stages for w in stage.parameters()]
adam = Adam(weights)

slots = {}  # {slot: action}: F and B of the two directions never need the same slot
for j in range(MICRO_BATCHES):
    k, way = divmod(j % n, 2)  # k: number within a group of n and a way; way 0: down, 1: up
    part = n - 1 - rank if way else rank
    first = j // n * 2 * n + 2 * k
    slots[first + part] = "F", j, way
    slots[first + 2 * n - 1 - part] = "B", j, way

for ids, targets in batches():
    ids, targets = ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)  # lists of [b/m, s]
    saved, loss = {}, torch.zeros(())
    for kind, j, way in (slots[slot] for slot in sorted(slots)):
        stage, before, after = pipelines[way]
        if kind == "F":
            saved[j] = forward(stage, ids[j], targets[j], before, after, (way, way))
        else:
            x, y = saved.pop(j)
            backward(x, y, before, after, (way, way))
            loss += y.detach() if after is None else 0
    while sends:
        sends.pop().wait()
    for w in weights:
        dist.all_reduce(w.grad, group=twins)
    adam.step()
    show(loss)
