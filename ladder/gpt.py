"""The parts that all rungs (the files rung*.py) share: a tiny GPT, its data, loss, Adam, the start of processes.

    ids [b, s] -> embedding -> x [b, s, h] -> 6 blocks -> head -> logits [b, s, v] -> loss

Batch b, sequence s, hidden size h, vocabulary v, a heads of size d = h/a. L+2 = 8 units: embedding, L blocks, head.
It has P = 2vh + sh + L(12h^2+13h) + 2h = 84,992 weights. A number takes 8 bytes.

`torchrun --nproc_per_node=2 FILE` starts n=2 processes. Each process runs the whole FILE. A process is called a rank,
and so is its number, 0 or 1. Ranks share no memory. They send tensors with five operations (AllToAll: rung 20):

                     before: rank 0|1     after: rank 0|1      each rank sends (N: numbers in the whole tensor)
    AllReduce                     1|2              3|3         2N(n-1)/n: a ReduceScatter, then an AllGather
    ReduceScatter               1,2|3,4            4|6          N(n-1)/n
    AllGather                     1|2            1,2|1,2        N(n-1)/n
    AllToAll                  1,2|3,4          1,3|2,4          N(n-1)/n
    SendRecv                      1|               1|1          N (only rank 0; it keeps its tensor)

Each rung begins with a card. Its bytes are those of rank 0 with n=2, in brackets with n=4.

    Sends   what the rank sends in a step, if the ranks send in a ring: each to the next one.
    Memory  weights, gradients, optimizer state just before Adam's update. Activations: what forward keeps for backward.
    Bad     what the scheme costs. (-> 5) means that rung 5 repairs this.
"""

import atexit
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

VOCAB, SEQ, HIDDEN, HEADS, LAYERS = 128, 16, 32, 4, 6  # v, s, h, a, L
BATCH, MICRO_BATCHES, STEPS = 8, 4, 5  # b: samples of all ranks; m: parts of b; steps
torch.set_default_dtype(torch.float64)  # all rungs print ten equal digits


def connect(*allowed):
    """Connect the processes. Return (rank, n). allowed: possible n."""
    rank = int(os.environ.get("RANK", 0))  # torchrun sets this and the next
    n = int(os.environ.get("WORLD_SIZE", 1))
    if n not in allowed:
        if rank == 0:
            right = " or ".join(map(str, allowed))
            print(f"error: nproc_per_node={n}: {sys.argv[0]} needs {right}", file=sys.stderr)
        sys.exit(0 if "RANK" in os.environ else 2)  # after a 2, torchrun would print 30 lines of its own
    if n > 1:  # Gloo sends between CPUs, NCCL between GPUs. A rank waits for a minute at most
        dist.init_process_group("gloo", timeout=timedelta(minutes=1))
        atexit.register(dist.destroy_process_group)
    return rank, n


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(VOCAB, HIDDEN)
        self.position = nn.Embedding(SEQ, HIDDEN)

    def forward(self, ids):  # [b, s] -> [b, s, h]
        return self.word(ids) + self.position.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)  # q, k, v of head 0, then of head 1, ... (for rung 11)
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.fc1 = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.fc2 = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):  # [b, s, h]
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))

    def attention(self, x):
        qkv = self.qkv(x).unflatten(2, (-1, 3, HIDDEN // HEADS))  # [b, s, a, 3, d]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [b, a, s, d]
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))  # [b, s, h]

    def mlp(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x), approximate="tanh"))


def GPT():
    """Return the model. All ranks have the same seed, so they have the same weights."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False))
    return nn.Sequential(Embedding(), *[Block() for _ in range(LAYERS)], head)


def batches():
    """Yield (ids, targets), each [b, s], the same on all ranks. A sample is like 7 8 9 10."""
    for step in range(STEPS):
        first = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(step))
        tokens = (first + torch.arange(SEQ + 1)) % VOCAB
        yield tokens[:, :-1], tokens[:, 1:]


def cross_entropy(logits, targets):
    """Return the sum of these tokens' losses, divided by the number of tokens in the GLOBAL batch.

    So losses and gradients of parts of the batch just add up.
    """
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (BATCH * SEQ)


class Adam:
    """Adam as in its paper. m1, m2: the slide's m and v, the optimizer state.

    Two errors of the slide: -(1-β) must be +, and epsilon must be outside of the root.
    """

    def __init__(self, weights):
        self.steps = 0
        self.state = [(w, torch.zeros_like(w), torch.zeros_like(w)) for w in weights]

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for w, m1, m2 in self.state:
            m1.mul_(0.9).add_(0.1 * w.grad)
            m2.mul_(0.999).add_(0.001 * w.grad**2)
            mean, square = m1 / (1 - 0.9**self.steps), m2 / (1 - 0.999**self.steps)
            w -= 0.01 * mean / (square.sqrt() + 1e-8)
            w.grad = None


def show(loss):
    """Print the sum of all ranks' losses."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss {total:.10f}")


if __name__ == "__main__":
    print("All rungs share the parts in this file. Begin with: python ladder/rung01_one_process.py")
