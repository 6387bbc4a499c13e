"""The matrices of a model's block, read from its table of `ParamSpec`s: for FLOPs, collectives of tp, W and Muon."""

import math
from functools import cache
from typing import NamedTuple

from config import SECTIONS, Config
from parallel.units import unit_specs


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


def matrices_of(c, *kinds):
    """Return the Matrices of one block of the model of a Config. kinds: only these."""
    block, _ = shapes(c)
    return [m for m in block if not kinds or m.kind in kinds]


def shapes(c):
    """Return (Matrices of a block, elements of the head's matrices: in GPT-2 V h)."""
    return _shapes(**{name: getattr(c, name) for name in SECTIONS["model"]})


@cache
def _shapes(**fields):
    units = unit_specs(Config(**fields))
    block, head = ([matrix(spec) for spec in units[i] if spec.std and len(spec.shape) > 1] for i in (1, -1))
    return block, sum(m.elements for m in head)


def matrix(spec):
    *count, outputs, inputs = spec.shape
    cut = "row" if spec.tp_dim == len(spec.shape) - 1 else "column"  # experts [e, out, in] are cut like columns
    kind = "whole" if spec.tp_dim is None else cut
    return Matrix(kind, math.prod(count), outputs, inputs)
