"""3. Recomputation (not on the slides): forward keeps only each unit's input. Before its backward a unit runs again.

    forward: F F F ...      backward: FB FB FB ...

Sends   nothing.
Memory  as rung 1: 2,719,744 bytes. Activations: the inputs of all units, and all of one unit.
Bad     F runs twice. B takes as long as two F, so a step takes as long as 4 F, not 3.
        `Executor` (parallel/pipeline.py) recomputes blocks only.
"""

import torch
from gpt import GPT, Adam, batches, connect, cross_entropy, show

connect(1)
model = GPT()
adam = Adam(model.parameters())

for ids, targets in batches():
    x, saved = ids, []
    for unit in model:
        saved.append((unit, x))
        with torch.no_grad():  # keeps nothing for backward
            x = unit(x)
        x.requires_grad_()
    loss = cross_entropy(x, targets)
    loss.backward()  # gives the gradient of the logits x
    dy = x.grad
    while saved:
        unit, x = saved.pop()
        unit(x).backward(dy)
        dy = x.grad
    adam.step()
    show(loss)
