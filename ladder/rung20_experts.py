"""20. Mixture of experts (not on the slides): each MLP becomes E=4 experts. A router sends each token to one of them.

    tokens of rank 0   x0 x1 x2 --AllToAll--> experts 0, 1 are here --AllToAll--> y0 y1 y2     (n=2)
    tokens of rank 1   x3 x4 x5 --AllToAll--> experts 2, 3 are here --AllToAll--> y3 y4 y5

    y = p_e expert_e(x)   p = softmax of the router's E numbers for x, e: the largest (Switch, arXiv 2101.03961)

The rest is rung 4. A token costs as much as with one MLP, but there are E times as many MLP weights, E/n on each rank.
Only the router knows how many tokens an expert gets, so the ranks first send these counts. No token is dropped. Right
losses are those of one process with the same experts: python ladder/rung20_experts.py

Sends   per block 4 AllToAlls (a rank sends about bsh(n-1)/n^2 numbers), 1 of counts; gradients of the rest:
        477,792 bytes (n=4: 571,621). (The mean of the first 3 steps.)
Memory  as rung 4, but E/n MLPs per block: 4,347,904 bytes (n=4: 2,744,320). Activations of the tokens that came.
Bad     if all tokens choose one expert, its rank works and the others wait. Large programs add a term to the loss
        that balances, or drop tokens that are too many. Nothing overlaps: an expert waits for its tokens.
"""

import torch
import torch.distributed as dist
from gpt import GPT, HIDDEN, Adam, Block, batches, connect, cross_entropy, show
from torch import nn

EXPERTS = 4


class AllToAll(torch.autograd.Function):
    """Send to[r] rows of x to rank r, and get of[r] rows from it. Backward returns the rows' gradients."""

    @staticmethod
    def forward(ctx, x, to, of):
        ctx.sizes = of, to
        if n == 1:
            return x.clone()
        y = x.new_empty(sum(of), *x.shape[1:])
        dist.all_to_all_single(y, x, of, to)
        return y

    @staticmethod
    def backward(ctx, dy):
        return AllToAll.apply(dy.contiguous(), *ctx.sizes), None, None


def MLP():
    return nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU("tanh"), nn.Linear(4 * HIDDEN, HIDDEN))


class ExpertBlock(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block, self.router = block, nn.Linear(HIDDEN, EXPERTS, bias=False)
        experts = [MLP() for _ in range(EXPERTS)]  # all ranks draw all of them
        self.mine = nn.ModuleList(experts[rank * EXPERTS // n : (rank + 1) * EXPERTS // n])
        del block.fc1, block.fc2

    def forward(self, x):  # [b/n, s, h]
        x = x + self.block.attention(self.block.ln1(x))
        return x + self.mlp(self.block.ln2(x).flatten(0, 1)).view_as(x)

    def mlp(self, x):
        """[tokens, h] -> [tokens, h]: each token through its expert, on whichever rank this is."""
        p, expert = self.router(x).softmax(1).max(1)
        to = expert.bincount(minlength=EXPERTS)  # to[e]: my tokens for expert e
        equal = [EXPERTS // n] * n
        of = AllToAll.apply(to, equal, equal).view(n, -1)  # of[r, e]: rank r's tokens for my expert e
        to, from_ranks = to.view(n, -1).sum(1).tolist(), of.sum(1).tolist()
        order = expert.argsort(stable=True)  # tokens for expert 0, then for expert 1 ...
        rows = AllToAll.apply(x[order], to, from_ranks)  # from rank 0: for my first expert, for my second ...; from 1
        owner = torch.arange(EXPERTS // n).repeat(n).repeat_interleave(of.flatten())  # my expert of each row
        y = torch.zeros_like(rows)
        for e, mlp in enumerate(self.mine):
            y[owner == e] = mlp(rows[owner == e])
        back = torch.zeros_like(x)
        back[order] = AllToAll.apply(y, from_ranks, to)
        return back * p[:, None]


rank, n = connect(1, 2, 4)
model = nn.Sequential(*[ExpertBlock(unit) if isinstance(unit, Block) else unit for unit in GPT()])
adam = Adam(model.parameters())
experts = {id(w) for unit in model if isinstance(unit, ExpertBlock) for w in unit.mine.parameters()}

for ids, targets in batches():
    ids, targets = ids.chunk(n)[rank], targets.chunk(n)[rank]  # [b/n, s]
    loss = cross_entropy(model(ids), targets)
    loss.backward()
    for w in model.parameters():
        if n > 1 and id(w) not in experts:  # an expert has met the tokens of all ranks
            dist.all_reduce(w.grad)
    adam.step()
    show(loss)
