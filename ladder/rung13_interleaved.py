"""13. パイプライン並列 (PP), Interleaved 1F1B: each rank has two chunks of 4/n units. A micro-batch passes it twice.

    chunk     0       1       2       3           n=2, F and B of half the length; a: first chunk, b: second
    rank      0       1       0       1

    rank 0    F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a     (idle times are not drawn)

Sends   rank 0 sends bsh numbers after both F, and after the B of its second chunk: 98,304 bytes (n=4: 98,304).
Memory  as rung 9: 1,367,040 bytes (n=4: 553,984). Rank 0 keeps the activations of
        5 chunks (n=4: 8). In rung 10 it keeps those of as many units as 4 chunks have (n=4: 8).
Bad     twice as many messages, for a bubble of about half: (n-1)/(2m+n-1) of the time. m must be a multiple of n.
"""

import torch
from gpt import GPT, MICRO_BATCHES, Adam, batches, connect, show
from rung09_gpipe import backward, forward, sends
from rung10_1f1b import alternate
from torch import nn

rank, n = connect(2, 4)
model, chunks = GPT(), {}
for c in (rank, rank + n):  # chunk c of 2n: (units, the rank before, the rank after, tags)
    units = model[c * 4 // n : (c + 1) * 4 // n]
    before = (rank - 1) % n if c > 0 else None
    after = (rank + 1) % n if c < 2 * n - 1 else None
    chunks[c] = units, before, after, (c, c + 1)  # a tag tells apart the messages of two boundaries
del model
adam = Adam(nn.ModuleList(chunk[0] for chunk in chunks.values()).parameters())


def in_groups(kind, order):
    """Return the order: n micro-batches through one chunk, the same n through the other, then the next n."""
    groups = [range(first, first + n) for first in range(0, MICRO_BATCHES, n)]
    return [(kind, j, c) for group in groups for c in order for j in group]


F, B = in_groups("F", [rank, rank + n]), in_groups("B", [rank + n, rank])
# n micro-batches through the first chunk. Then micro-batch 0 goes to the last rank and back.
warmup = n + 2 * (n - 1 - rank)
actions = F[:warmup] + alternate(F[warmup:], B)

for ids, targets in batches():
    ids, targets = ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)  # lists of [b/m, s]
    saved, loss = {}, torch.zeros(())
    for kind, j, c in actions:
        units, before, after, tags = chunks[c]
        if kind == "F":
            saved[j, c] = forward(units, ids[j], targets[j], before, after, tags)
        else:
            x, y = saved.pop((j, c))
            backward(x, y, before, after, tags)
            loss += y.detach() if after is None else 0
    while sends:
        sends.pop().wait()
    adam.step()
    show(loss)
