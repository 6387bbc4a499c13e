"""10. パイプライン並列 (PP), 1F1B (one F, one B): rung 9 in another order. An order is a list of actions.

    rank 0    F0F1....B0--F2B1--F3B2--..B3--     warm-up: F0. Then in turn: F1 B0 F2 B1 F3 B2 B3
    rank 1    ..F0B0--F1B1--F2B2--F3B3--....

Sends   as rung 9, after F and after B: 32,768 bytes (n=4: 32,768).
Memory  as rung 9: 1,367,040 bytes (n=4: 553,984). Activations of (n - rank) micro-batches.
Bad     the bubble of rung 9. `Executor` (parallel/pipeline.py) runs any list; parallel/schedules.py has more.
"""

from itertools import zip_longest

import torch
from gpt import MICRO_BATCHES, Adam, batches, connect, show
from rung09_gpipe import backward, forward, place, sends


def each(kind):
    return [(kind, j) for j in range(MICRO_BATCHES)]


def alternate(*lists):
    """Return a0 b0 a1 b1 ..., without each None."""
    return [action for turn in zip_longest(*lists) for action in turn if action]


def one_f_one_b(warmup):
    """Return the order of 1F1B. (GPipe's is F + B.) warmup: the number of stages after this one."""
    F, B = each("F"), each("B")
    return F[:warmup] + alternate(F[warmup:], B)


def run(actions, stage, ids, targets, before, after):
    """Run the actions in this order. Return the loss; 0 except on the last stage."""
    saved, loss = {}, torch.zeros(())
    for kind, j in actions:
        if kind == "F":
            saved[j] = forward(stage, ids[j], targets[j], before, after)
        else:
            x, y = saved.pop(j)
            backward(x, y, before, after)
            loss += y.detach() if after is None else 0
    while sends:
        sends.pop().wait()
    return loss


if __name__ == "__main__":
    rank, n = connect(2, 4)
    stage, before, after = place(rank, n)
    adam = Adam(stage.parameters())

    for ids, targets in batches():
        ids, targets = ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)  # lists of [b/m, s]
        loss = run(one_f_one_b(n - 1 - rank), stage, ids, targets, before, after)
        adam.step()
        show(loss)
