"""22. データ並列 (DP), ラージバッチ問題: 勾配分散, a penalty on the variance of the gradient over the ranks.

    loss + λ/2 mean over ranks of |g_r - g|²      g_r: gradient of rank r's samples, g: the mean of all g_r

    its gradient     g + λ mean over ranks of H_r (g_r - g)      H_r: second derivatives of rank r's loss

H_r has P x P numbers, but H_r d is the gradient of the number g_r·d, if d is constant: one more backward. (The mean of
g_r - g is 0, so the derivative of g falls out.) Other losses than rung 1: those of one process with this penalty.

Sends   twice as much as rung 4: 1,359,872 bytes (n=4: 2,039,808).
Memory  as rung 4: 2,719,744 bytes (n=4: 2,719,744). Also the graph of the first backward, and the g_r.
Bad     three times the work, twice the sends. It needs this rank's own g_r, but in rung 5 and ZeRO the sum over the
        ranks has replaced it already.
"""

import torch
import torch.distributed as dist
from gpt import GPT, Adam, batches, connect, cross_entropy, show
from torch.nn.attention import SDPBackend, sdpa_kernel

PENALTY = 0.1  # λ

rank, n = connect(2, 4)
model = GPT()
weights = list(model.parameters())
adam = Adam(weights)

for ids, targets in batches():
    ids, targets = ids.chunk(n)[rank], targets.chunk(n)[rank]  # [b/n, s]
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
        loss = cross_entropy(model(ids), targets)  # the ranks' losses and gradients add up: this is g_r / n
        parts = torch.autograd.grad(loss, weights, create_graph=True)
    product = torch.zeros(())
    for w, part in zip(weights, parts, strict=True):
        w.grad = part.detach().clone()
        dist.all_reduce(w.grad)  # g
        product = product + (part * (n * part.detach() - w.grad)).sum()  # g_r / n times the constant g_r - g
    for w, change in zip(weights, torch.autograd.grad(product, weights), strict=True):
        change *= PENALTY
        dist.all_reduce(change)
        w.grad += change
    adam.step()
    show(loss)
