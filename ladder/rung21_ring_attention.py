"""21. Ring attention (not on the slides): each rank has s/n tokens of a sample. Keys and values travel around.

    turn     rank 0        rank 1        rank 2        (n=3; a token sees itself and the tokens before it)
    0        k0 v0         k1 v1         k2 v2         half of these pairs of tokens see each other
    1        k2 v2: none   k0 v0: all    k1 v1: all    then each rank sends k, v to the next rank
    2        k1 v1: none   k2 v2: none   k0 v0: all

A turn gives y, attention to its keys alone, and L = log(sum of exp scores). Of two turns, attention to the keys of both
is y1 exp(L1 - L) + y2 exp(L2 - L) with L = log(exp L1 + exp L2) (Liu et al., arXiv 2310.01889). In backward the
gradients of k and v travel back.
Only attention needs other tokens. The rest is rung 4 with parts of samples instead of samples.

Sends   per block 2bsh/n numbers in each of n-1 turns, in forward and in backward; gradients:
        1,073,152 bytes (n=4: 1,609,728).
Memory  as rung 4: 2,719,744 bytes (n=4: 2,719,744). Activations of s/n tokens, but k and v of all turns stay.
Bad     all ranks compute all turns, also those where no token sees a key. If rank 0 skips its turns, it waits. With the
        parts r and 2n-1-r of 2n on rank r (a zigzag) all have equal work. Here keys and values travel after a turn, and
        all ranks wait; in the paper they travel while the turn computes. Or exchange tokens for heads: `attend`
        (parallel/context.py).
"""

import torch
import torch.distributed as dist
from gpt import GPT, HEADS, HIDDEN, SEQ, Adam, Block, batches, connect, cross_entropy, show


def turn(x, step):
    """Send x to the next rank (step=1) or to the rank before (-1). Return what arrives."""
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    send = dist.isend(x, (rank + step) % n)
    dist.recv(y, (rank - step) % n)
    send.wait()
    return y


class Turn(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: turn(x, 1))
    backward = staticmethod(lambda ctx, dx: turn(dx, -1))


def attention(block, x):
    """[b, s/n, h] -> [b, s/n, h]: queries of this rank, keys and values of all ranks."""
    qkv = block.qkv(x).unflatten(2, (-1, 3, HIDDEN // HEADS)).permute(3, 0, 2, 1, 4)
    q, kv = qkv[0], qkv[1:]  # q [b, a, s/n, d], kv [2, b, a, s/n, d]
    positions = torch.arange(SEQ).chunk(n)
    for i in range(n):
        k, v = kv  # those of rank - i
        future = positions[(rank - i) % n] > positions[rank][:, None]  # [s/n queries, s/n keys]
        scores = (q @ k.mT / k.shape[3] ** 0.5).masked_fill(future, -1e9)  # exp makes it 0; -inf would give nan
        part, part_L = scores.softmax(3) @ v, scores.logsumexp(3, keepdim=True)
        if i == 0:
            y, L = part, part_L
        else:
            total = torch.logaddexp(L, part_L)
            y, L = y * (L - total).exp() + part * (part_L - total).exp(), total
        if i < n - 1:
            kv = Turn.apply(kv)
    return block.proj(y.transpose(1, 2).flatten(2))


rank, n = connect(2, 4)
model = GPT()
for unit in model:
    if isinstance(unit, Block):
        unit.attention = lambda x, block=unit: attention(block, x)
embedding, *blocks = model
adam = Adam(model.parameters())

for ids, targets in batches():
    x = embedding(ids).chunk(n, 1)[rank]  # [b, s/n, h]
    for block in blocks:
        x = block(x)
    loss = cross_entropy(x, targets.chunk(n, 1)[rank])
    loss.backward()
    for w in model.parameters():
        dist.all_reduce(w.grad)
    adam.step()
    show(loss)
