"""4. データ並列 (DP), data parallelism: each rank has the whole model and 8/n samples.

データ:分散  モデル:冗長  通信:勾配, AllReduce, ステップ毎

    gradient of the batch = gradient of rank 0's samples + gradient of rank 1's samples

Sends   2P(n-1)/n numbers, after backward: 679,936 bytes (n=4: 1,019,904).
Memory  as rung 1: 2,719,744 bytes (n=4: 2,719,744). Activations of 8/n samples.
Bad     no rank computes during the AllReduce (-> 5). Each rank keeps 4P numbers (-> 6 to 8). On the slide the local
        batch fills the memory, so the global batch grows with n (ラージバッチ問題). Here the global batch is constant.
"""

import torch.distributed as dist
from gpt import GPT, Adam, batches, connect, cross_entropy, show

rank, n = connect(2, 4)
model = GPT()
adam = Adam(model.parameters())

for ids, targets in batches():
    ids, targets = ids.chunk(n)[rank], targets.chunk(n)[rank]  # [b/n, s]
    loss = cross_entropy(model(ids), targets)
    loss.backward()
    for w in model.parameters():
        dist.all_reduce(w.grad)  # replaces it by the sum over the ranks
    adam.step()
    show(loss)
