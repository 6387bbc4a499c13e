"""The matrices of a model, read from its table of `ParamSpec`s, and the formulas that belong to it.

    matrices         of any model                    FLOPs, collectives of tp, operands of W, Muon, products of plan.py
    kept, passes     of gpt2.py and llama.py here    activations, elementwise operations in plan.py

A formula is not used if the model has another number of parameters than `parameters` there: then the model has been
changed. Activations are then measured (`meta.py`), and plan.py refuses.
"""

import math
from functools import cache
from typing import NamedTuple

from accounts import gpt2, llama
from config import SECTIONS, Config
from model import unit_specs

FORMULAS = {"model": gpt2, "llama": llama}


class Matrix(NamedTuple):
    """A parameter of `count` matrices of one shape."""

    kind: str  # column (cut over tp by its outputs), row (by its inputs), whole (not cut)
    count: int
    outputs: int  # of one matrix
    inputs: int

    @property
    def elements(self):
        return self.count * self.outputs * self.inputs

    def local(self, t):
        """Return (inputs, outputs) of a column or row parallel linear on one of t ranks."""
        outputs = self.count * self.outputs
        return (self.inputs, outputs // t) if self.kind == "column" else (self.inputs // t, outputs)


class Matrices(NamedTuple):
    """The matrices of one block, and what a rank computes beside them if `formulas` is not None."""

    block: list
    head: int  # elements
    formulas: object  # a module, or None

    def of_kind(self, *kinds):
        return [m for m in self.block if m.kind in kinds]


def matrices_of(c):
    """Return the Matrices of the model of a Config."""
    return _matrices(**{name: getattr(c, name) for name in SECTIONS["model"]})


@cache
def _matrices(**fields):
    c = Config(**fields)
    units, formulas = unit_specs(c), FORMULAS.get(c.model)
    shapes = {spec.name: spec.shape for unit in units for spec in unit}
    if formulas and formulas.parameters(c) != sum(map(math.prod, shapes.values())):
        formulas = None
    block, head = ([matrix(spec) for spec in units[i] if spec.std and len(spec.shape) > 1] for i in (1, -1))
    return Matrices(block, sum(m.elements for m in head), formulas)


def matrix(spec):
    *count, outputs, inputs = spec.shape
    kinds = ["column", "row"]
    kind = "whole" if spec.tp_dim is None else kinds[spec.tp_dim - len(spec.shape)]
    return Matrix(kind, math.prod(count), outputs, inputs)
