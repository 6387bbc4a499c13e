"""16. パイプライン並列 (PP), ZeroBubble: B = I + W, "BackwardのW微分とx微分を分ける". ZB-H1: W fills the bubble.

    y = x w^T     I: dx = dy w (the stage before waits for it)      W: dw = dy^T x (no rank waits)
    rank 0    F0F1..I0W0F2I1W1F3I2W2I3W3      13 slots (rung 10: 15)
    rank 1    ..F0I0F1I1W0F2I2W1F3I3W2W3      rank r delays W by r micro-batches

Sends   as rung 9: 32,768 bytes (n=4: 32,768).
Memory  as rung 9: 1,367,040 bytes (n=4: 553,984). Activations of n micro-batches: x and dy stay until W.
Bad     a bubble remains. `zb_h2` and `zb_v` (parallel/schedules.py) have a smaller one.
"""

import torch
from gpt import MICRO_BATCHES, Adam, batches, connect, show
from rung09_gpipe import backward, forward, place, sends
from rung10_1f1b import alternate, each

work = []  # for each I, what its W must do: a list of (w, dy, x)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias):
        ctx.save_for_backward(x, w)
        return x @ w.T + bias

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        work[-1].append((w, dy, x))  # W computes dw
        return dy @ w, None, dy.sum((0, 1))


def run(actions, stage, ids, targets, before, after):
    """Run the actions F, I and W in this order. Return the loss; 0 except on the last stage."""
    saved, loss = {}, torch.zeros(())
    for kind, j in actions:
        if kind == "F":
            saved[j] = forward(stage, ids[j], targets[j], before, after)
        elif kind == "I":
            work.append([])
            x, y = saved.pop(j)
            backward(x, y, before, after)
            loss += y.detach() if after is None else 0
        else:
            for w, dy, x in work.pop(0):
                dw = dy.flatten(0, 1).T @ x.flatten(0, 1)
                w.grad = dw if w.grad is None else w.grad + dw
    while sends:
        sends.pop().wait()
    return loss


rank, n = connect(2, 4)
stage, before, after = place(rank, n)
adam = Adam(stage.parameters())
for linear in stage.modules():
    if isinstance(linear, torch.nn.Linear) and linear.bias is not None:  # all but the head's
        linear.forward = lambda x, linear=linear: Linear.apply(x, linear.weight, linear.bias)

F, I, W, warmup = each("F"), each("I"), each("W"), n - 1 - rank
actions = F[:warmup] + alternate(F[warmup:], I, [None] * rank + W)

for ids, targets in batches():
    ids, targets = ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)  # lists of [b/m, s]
    loss = run(actions, stage, ids, targets, before, after)
    adam.step()
    show(loss)
