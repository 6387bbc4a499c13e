"""Any model: a list of *units* (the embedding, blocks, the head), which are functions of (x, batch).

--model=NAME runs the file NAME.py. Its function `units(c, tp, ops, cp)` returns the list. c: the Config;
tp, cp: `mesh.Axis`, this rank's groups; ops: the operations of `reference`, or their fused forms.

    embedding   None, batch  -> x [n or n/t, h]
    block       x, batch     -> x
    head        x, batch     -> the loss of every token [n], or without targets (generation) logits

A unit has parameters as `tensor.ParamSpec`s, which `zero.py` replaces by views into flat buffers. It says
whether it is `recomputable`; the head, whether it computes with its losses (`reads_losses`). Between two
units the executor (`pipeline.py`) gathers or frees parameters, and reduces gradients. So a unit hands on x
and nothing else.
"""

import math
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn

import reference
from errors import UserError
from parallel.tensor import ParamSpec


@dataclass
class MicroBatch:
    """One micro-batch, b samples of s tokens. On one of cp ranks, n = b s/cp."""

    shape: tuple  # (b, s/cp)
    ids: torch.Tensor  # [n] int64
    # [n] int64: the next id. Below 0: no loss, but the mean counts it. None: generation.
    targets: torch.Tensor | None
    sample_positions: torch.Tensor  # [s/cp]: positions of this rank's tokens in a sample
    positions: torch.Tensor  # [n or n/t]: position of each row
    rows: torch.Tensor  # [n or n/t]: sample number * s + position of each row; for dropout masks
    dropout: float
    caches: list | None = None  # in generation: past keys and values of each block

    def __setattr__(self, name, value):
        if name not in self.__dataclass_fields__:
            why = "with pp the next unit is on another rank, and with recompute a unit runs twice"
            raise AttributeError(f"batch.{name}: a unit hands on only x: {why}")
        super().__setattr__(name, value)

    def drop(self, seed, site):
        return reference.Drop(self.rows, self.dropout, seed, site) if self.dropout else None


class Model(nn.Module):
    """The units that `c.model` names, on one rank."""

    def __init__(self, config, tp, ops=reference, cp=None):
        super().__init__()
        c = config
        self.config, self.tp, self.cp = c, tp, cp
        self.units = nn.ModuleList(import_module(c.model).units(c, tp, ops, cp))
        self.unit_specs = [specs(unit) for unit in self.units]
        named = self.specs()
        for spec in (spec for unit in self.unit_specs for spec in unit):
            if spec is not named[spec.name]:
                raise UserError(f"two parameters are named {spec.name}; give each its own (in block 0: block0.NAME)")
            if spec.tp_dim is not None and (size := spec.shape[spec.tp_dim]) % c.tp:
                raise UserError(f"{spec.name}: dimension {spec.tp_dim} = {size} is not a multiple of tp = {c.tp}")

    def forward(self, batch):
        """Run all units on one process, without gradients. Return logits, or with targets losses [n]."""
        if batch.targets is not None and torch.is_grad_enabled():
            right = "use torch.no_grad(), or Executor.run to train"
            raise UserError(f"Model.forward has no losses for gradients; {right}")
        x = None
        for unit in self.units:
            x = unit(x, batch)
        return x

    def specs(self):
        """Return {name: ParamSpec}. A tied parameter appears once."""
        return {spec.name: spec for unit in self.unit_specs for spec in unit}

    def num_parameters(self):
        """Return the number of parameters, with the padding."""
        return sum(math.prod(spec.shape) for spec in self.specs().values())

    def micro_batch(self, ids, targets=None, samples=None, start=0, caches=None):
        """Return a MicroBatch of this rank's tokens. ids, targets: [b, s], from position `start` on.

        samples: [b], each sample's index in the run, for dropout. None (validation): no dropout.
        """
        sample_positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        if self.config.cp > 1:
            ids, targets = (x.chunk(self.cp.size, 1)[self.cp.rank] for x in (ids, targets))
            sample_positions = sample_positions.chunk(self.cp.size)[self.cp.rank]
        b, s = ids.shape
        row = torch.arange(b * s, device=ids.device)
        if self.config.sequence_parallel:
            row = row.chunk(self.tp.size)[self.tp.rank]
        positions = sample_positions[row % s]
        rows, rate = positions, 0.0
        if samples is not None:
            rows = samples[row // s] * self.config.seq_length + positions
            rate = self.config.dropout
        ids, targets = ids.flatten(), None if targets is None else targets.flatten()
        return MicroBatch((b, s), ids, targets, sample_positions, positions, rows, rate, caches=caches)


def check_losses(head, y, batch):
    """Raise UserError unless y, the head's result in training, is the loss of each token, with a gradient."""
    if y.shape != batch.targets.shape:
        should = f"should be the loss of each token, {[*batch.targets.shape]}; `train_step` takes the mean"
        raise UserError(f"the head returns a tensor {[*y.shape]}; {should}")
    if not y.requires_grad:
        raise UserError("the head's losses have no gradient: does it use detach, .data or torch.no_grad?")
    losses = y if y._base is None else y._base  # backward fills the losses, and so their view
    if losses.grad_fn.name() != "LinearCrossEntropyBackward" and not getattr(head, "reads_losses", False):
        why = "the head returns other losses than LinearCrossEntropy's, which are nan until backward"
        raise UserError(f"{why}; set reads_losses = True in the head's class: then forward computes them")


def specs(unit):
    """Return the ParamSpecs of a unit. Raises UserError for torch's own parameters and buffers."""
    for name, _ in (*unit.named_parameters(), *unit.named_buffers()):
        why = "is torch's own, so no rank would train or save it"
        right = '`ParamSpec("block0.NAME", shape, std=0.02)`, or a constant that forward computes'
        raise UserError(f"{type(unit).__name__}.{name} {why}: should be a {right}")
    values = [value for module in unit.modules() for value in vars(module).values()]
    return [value for value in values if isinstance(value, ParamSpec)]


def freeze(unit):
    """Let a unit, or a part of it, keep its weights, also those that it shares. Call it in `units`."""
    for spec in specs(unit):
        spec.frozen = True


def unit_specs(config):
    return Model(config, tp=None).unit_specs
