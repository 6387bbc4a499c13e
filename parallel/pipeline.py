"""Runs one step's forward and backward, unit by unit, on detached boundaries.

A step is a list of actions: F j runs micro-batch j forward, B j backward. With one stage it is F 0, B 0, F 1, B 1, ...:
one micro-batch's activations in memory at a time.

Between two units the graph is cut: each unit gets a detached input, and its backward is one `torch.autograd.backward`
with the gradient that the unit after it left at its input:

    forward     x0 -> [embedding] -> y0 | x1 = y0.detach() -> [block] -> y1 | ...  -> [head] -> losses
    backward    dL/dx1 = x1.grad  <-  [block].backward(x2.grad)  <-  ...

So everything that a scheme wants to do between two units is a plain line here, not a hook: with full recomputation a
block keeps only x and runs again just before its backward (one block's activations at a time; Chen et al., arXiv
1604.06174); a unit's gradients are reduced as soon as the last micro-batch has left it, while those below still
compute (slide "データ並列 (DP)"; overlap as in PyTorch's DDP, Li et al., arXiv 2006.15704).
"""

import torch


class Executor:
    """One process's part of forward and backward. `timers(name)` is a context manager that watches a phase."""

    def __init__(self, model, zero, config, mesh, timers):
        self.model, self.zero, self.mesh, self.timers = model, zero, mesh, timers
        self.recompute = config.recompute == "full"
        self.in_flight = {}  # micro-batch: (MicroBatch, what each unit kept)
        self.completes = self._last_users()

    def _last_users(self):
        """completes[i]: the stored units whose gradient is whole once backward has left unit i of the model.

        Backward runs from the last unit to the first, so that a tied table is whole after the *first* unit that uses
        it.
        """
        completes, seen = [], set()
        for unit in self.model.units:
            stored = dict.fromkeys(p.spec.unit for p in unit.parameters())
            completes.append([name for name in stored if name not in seen])
            seen.update(stored)
        return completes

    def run(self, micro_batches, count, loss_scale, data_ranks):
        """Forward and backward of `count` micro-batches, drawn from the iterator `micro_batches`.

        Gradients are left in the units' flat buffers, their reduction started. Returns this data rank's part of the
        mean loss over all micro-batches and data ranks, a float64 scalar on the device.

        The loss that is back-propagated is divided here, once: the mean over a micro-batch's tokens, over the step's
        micro-batches and over the data ranks (whose gradients are then summed), times the loss scale.
        """
        share = 1.0 / (count * data_ranks)
        total = 0.0
        for j in range(count):
            for kind in "FB":
                if kind == "F":
                    losses = self.forward(j, next(micro_batches))
                    total = total + losses.detach().mean(dtype=torch.float64) * share
                else:
                    self.backward(j, share * loss_scale, last=j == count - 1)
        return total

    def forward(self, j, batch):
        self.mesh.ledger.phase = "forward"
        with self.timers("forward-compute"):
            kept, x = [], None
            for unit in self.model.units:
                x = None if x is None else x.detach().requires_grad_()
                again = self.recompute and unit.recomputable
                with torch.set_grad_enabled(not again):
                    y = unit(x, batch)
                kept.append((x, None if again else y))
                x = y
            self.in_flight[j] = batch, kept
        return x  # losses [n]

    def backward(self, j, scale, last):
        with self.timers("backward-compute"):
            batch, kept = self.in_flight.pop(j)
            gradient = None
            for i in reversed(range(len(kept))):
                x, y = kept.pop()
                if y is None:
                    self.mesh.ledger.phase = "recompute"
                    y = self.model.units[i](x, batch)
                self.mesh.ledger.phase = "backward"
                if gradient is None:  # the losses: d(scale * mean)/d(loss of a token)
                    gradient = torch.full_like(y, scale / len(y))
                torch.autograd.backward(y, gradient)
                gradient = None if x is None else x.grad
                if last:
                    self.mesh.ledger.phase = "reduce"
                    for name in self.completes[i]:
                        self.zero.reduce(name)
