"""9. パイプライン並列 (PP), GPipe: each rank has a pipeline stage, 8/n units. All F (forward), then all B (backward).

データ:冗長  モデル:分散  通信:活性, SendRecv, 層毎 (here: ステージ毎)

    rank 0    F0F1F2F3......B0--B1--B2--B3--     F2: F of micro-batch 2. B takes twice as long.
    rank 1    ..F0F1F2F3B0--B1--B2--B3--....     . : idle (the bubble), (n-1)/(m+n-1) of the time

Sends   bsh numbers after F, and bsh after B. Rank 0 sends only after F: 32,768 bytes (n=4: 32,768).
Memory  4 numbers for each weight of the stage: 1,367,040 bytes (n=4: 553,984). Activations of all m micro-batches.
Bad     the activations of m micro-batches (-> 10). The bubble (-> 13 to 16).
"""

import torch
import torch.distributed as dist
from gpt import GPT, HIDDEN, MICRO_BATCHES, Adam, batches, connect, cross_entropy, show

sends = []  # messages on their way


def forward(stage, ids, targets, before, after, tags=(0, 0)):
    """F of a micro-batch. Return the stage's input and output (on the last stage: the loss).

    tags: a number for the messages from and to the rank before, and one for those of the rank after (for rung 13).
    """
    if before is None:
        x = ids  # [b/m, s]
    else:
        x = torch.empty(*ids.shape, HIDDEN)  # [b/m, s, h]
        dist.recv(x, before, tag=tags[0])  # the result is in x
        x.requires_grad_()  # so backward computes x.grad
    y = stage(x)
    if after is None:
        y = cross_entropy(y, targets)
    else:
        sends.append(dist.isend(y.detach(), after, tag=tags[1]))  # returns at once; send would wait
    return x, y


def backward(x, y, before, after, tags=(0, 0)):
    """B of a micro-batch. x, y: what its F returned."""
    if after is None:
        y.backward()
    else:
        dy = torch.empty_like(y)
        dist.recv(dy, after, tag=tags[1])
        y.backward(dy)
    if before is not None:
        sends.append(dist.isend(x.grad, before, tag=tags[0]))


def gpipe(stage, ids, targets, before, after):
    """ids, targets: lists of micro-batches. Return the loss; 0 except on the last stage."""
    saved = [forward(stage, ids[j], targets[j], before, after) for j in range(MICRO_BATCHES)]
    for x, y in saved:
        backward(x, y, before, after)
    while sends:
        sends.pop().wait()
    return sum(y for x, y in saved) if after is None else torch.zeros(())


def place(rank, n):
    """Return this rank's stage, and the ranks of its neighbours (or None)."""
    stage = GPT()[rank * 8 // n : (rank + 1) * 8 // n]  # the other units are freed
    before = rank - 1 if rank > 0 else None
    after = rank + 1 if rank < n - 1 else None
    return stage, before, after


if __name__ == "__main__":
    rank, n = connect(2, 4)
    stage, before, after = place(rank, n)
    adam = Adam(stage.parameters())

    for ids, targets in batches():  # all ranks have all samples
        loss = gpipe(stage, ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), before, after)
        adam.step()
        show(loss)
