"""18. Vocabulary parallelism (not on the slides): rung 11, but the v x h weights of embedding and head are cut along v.

    loss of a token = log(exp z_0 + ... + exp z_127) - z_target      z: logits, v/n on each rank

Sends   as rung 11, and AllReduces of bsh numbers in embed, bsh + 3bs in the loss: 855,040 bytes (n=4: 1,282,560).
Memory  as rung 11, but 1/n of both tables: 1,387,520 bytes (n=4: 721,408). 1/n of the logits.
Bad     the logits of all tokens exist together. `LinearCrossEntropy` (parallel/tensor.py) has those of 4,096 tokens.
"""

import torch.distributed as dist
import torch.nn.functional as F
from gpt import BATCH, GPT, SEQ, VOCAB, Adam, batches, connect, show
from rung11_tp import tensor_parallel
from tp_mlp import cut, f, g


def locate(ids):
    """Return the row of each id in this rank's table, and whether it is there."""
    row = ids - rank * VOCAB // n
    local = (row >= 0) & (row < VOCAB // n)
    return row * local, local


def embed(ids, table):
    """[b, s] -> [b, s, h]. A vector is 0 except on the rank that has it; g adds."""
    row, local = locate(ids)
    return g(F.embedding(row, table) * local[..., None])


def cross_entropy(x, table, targets):
    """Return the loss, from the output x of the last LayerNorm [b, s, h]."""
    z = f(x) @ table.T  # [b, s, v/n]
    largest = z.detach().amax(2)  # [b, s]
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    # log(sum of exp z) = largest + log(sum of exp(z - largest)), without overflow
    exp_sum = g((z - largest[..., None]).exp().sum(2))
    row, local = locate(targets)
    z_target = g(z.gather(2, row[..., None])[..., 0] * local)  # 0 except on one rank
    return (largest + exp_sum.log() - z_target).sum() / (BATCH * SEQ)


rank, n = connect(2, 4)
embedding, *blocks, (norm, linear) = GPT()
words_in, words_out = cut(embedding.word.weight, 0), cut(linear.weight, 0)
positions = embedding.position.weight
blocks = tensor_parallel(blocks)
adam = Adam([words_in, words_out, positions, *blocks.parameters(), *norm.parameters()])
del embedding, linear  # frees the whole tables

for ids, targets in batches():
    x = blocks(embed(ids, words_in) + positions)
    loss = cross_entropy(norm(x), words_out, targets)
    loss.backward()
    adam.step()
    show(loss / n)
