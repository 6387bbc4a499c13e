"""14. パイプライン並列 (PP), PipeDream: 1F1B that is never empty. It updates after each B, so it has other losses.

    1F1B, 2 steps       F0F1....B0--F2B1--F3B2--..B3--| F4F5....B4--...     a bubble in each step
    PipeDream           F0F1....B0--F2B1--F3B2--F4B3--  F5B4--...           a bubble once in a run

While micro-batch j is on its way, this rank updates n-1-rank times. B must use the weights of its F (weight stashing):
each F makes a copy. Right losses are those of one process in which rank r's units use weights n-1-r updates old.

Sends   as rung 9: 32,768 bytes (n=4: 32,768).
Memory  as rung 9, and a copy of the weights for each micro-batch in flight: 2,050,560 bytes (n=4: 1,107,968).
Bad     old weights. It updates m times in a step, so already the first loss is not that of rung 1. The learning rate
        must often be smaller.
"""

from functools import partial

import torch
from gpt import MICRO_BATCHES, Adam, batches, connect, show
from rung09_gpipe import backward, forward, place, sends
from rung10_1f1b import alternate
from torch.func import functional_call

rank, n = connect(2, 4)
stage, before, after = place(rank, n)
adam = Adam(stage.parameters())
samples = []  # the micro-batches of all steps
for ids, targets in batches():
    samples += zip(ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)

F, B = ([(kind, j) for j in range(len(samples))] for kind in "FB")
warmup = n - 1 - rank
saved, losses = {}, [torch.zeros(()) for _ in samples[::MICRO_BATCHES]]
for kind, j in F[:warmup] + alternate(F[warmup:], B):
    if kind == "F":
        weights = stage.named_parameters()
        stash = {name: torch.nn.Parameter(w.detach().clone()) for name, w in weights}
        model = partial(functional_call, stage, stash)  # the stage with these weights
        saved[j] = stash, *forward(model, *samples[j], before, after)
    else:
        stash, x, y = saved.pop(j)
        backward(x, y, before, after)
        for name, w in stage.named_parameters():
            w.grad = stash[name].grad  # the gradient at the old weights changes the new ones
        adam.step()
        losses[j // MICRO_BATCHES] += y.detach() if after is None else 0
for send in sends:
    send.wait()
for loss in losses:
    show(loss)
