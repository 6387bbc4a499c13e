"""12. 3-D Parallelism: rungs 4, 10 and 11 together, n=8. TP and DP have groups of ranks (サブコミュニケータ).

               samples 0-3   samples 4-7      TP groups: [0 1], ... (in a node)
    stage 0    [0 1]         [4 5]            pipelines: 0 2, ... (in a rack)
    stage 1    [2 3]         [6 7]            DP groups: [0 4], ... (between racks)

Sends   TP 196,608 + PP 16,384 + DP 191,616: 404,608 bytes.
Memory  half of the units, half of their matrices: 766,464 bytes.
Bad     nothing overlaps: TP in F and B, DP after the pipeline. n = 2 x 2 x 2; `Mesh` (parallel/mesh.py) has any sizes.
        On the slide the third axis is DP and ZeRO (-> 19). More racks: a larger global batch (ラージバッチ問題).
"""

import torch.distributed as dist
from gpt import GPT, MICRO_BATCHES, Adam, batches, connect, show
from rung10_1f1b import one_f_one_b, run
from rung11_tp import tensor_parallel

rank, n = connect(8)
dp_rank, pp_rank = rank // 4, rank // 2 % 2
# new_subgroups_by_enumeration returns this rank's group, and all groups
tp_group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3], [4, 5], [6, 7]])
dp_group, _ = dist.new_subgroups_by_enumeration([[0, 4], [1, 5], [2, 6], [3, 7]])
before = rank - 2 if pp_rank == 1 else None
after = rank + 2 if pp_rank == 0 else None

stage = tensor_parallel(GPT()[4 * pp_rank : 4 * pp_rank + 4], tp_group)
adam = Adam(stage.parameters())

for ids, targets in batches():
    ids, targets = ids.chunk(2)[dp_rank], targets.chunk(2)[dp_rank]  # [4, s]
    ids, targets = ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)  # lists of [1, s]
    loss = run(one_f_one_b(1 - pp_rank), stage, ids, targets, before, after)
    for w in stage.parameters():
        dist.all_reduce(w.grad, group=dp_group)
    adam.step()
    show(loss / 2)  # `show` adds 2 equal losses
