"""Find an edit of the model that is wrong for tp > 1, with its line, in a forward of one rank.

Each tensor gets a letter, R, I or V (the table in `parallel/tensor.py`), and each operation passes letters on. Refused
are I with V, gradients of I with those of R, and losses that differ between the ranks. Letters do not say which
dimension is cut. So numbers are compared, too: what rank 1 of two has must be among the numbers that one process has
after the same operation. Random numbers have another seed there. Nothing is sent: a sum over tp is taken from the one
process.

Taken as true: the autograd Functions (RULES).
"""

import re
import traceback
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import model
import reference
from config import Config, divides, layout_of
from errors import UserError
from parallel import comm, tensor
from parallel.mesh import Axis

APPLY = Function.apply.__func__
ROOT = Path(__file__).parents[1]
# files that the reader did not write; .venv may lie in the project's folder
OTHERS = r"/site-packages/|/testing/(adversary|letters|record|tiny|workers)\.py|/check\.py|/errors\.py"
CUT = dict(seq_length=8, micro_batch_size=2, vocab_size=100, max_position_embeddings=0, dropout=0.1)
PART = "each rank has only its part of the gradient of I, and nobody sums the parts"
TWICE = "the gradient of R is equal on all ranks here, and they sum it"
UNKNOWN = "numbers that one process does not have: this rank's own heads, columns or tokens are mixed, or it is random"


class WrongStep(Exception):
    """An operation that is wrong for tp > 1."""


def letter(x):
    return getattr(x, "letter", "R")  # without a letter: a constant


def tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def named(letter, values):
    for x in tensors(values):
        x.letter = letter
    return values


def joined(letters):
    return max(letters, key="RIV".index, default="R")


def described(name, inputs):
    return f"{name} of " + " and ".join(f"{letter(x)} {list(x.shape)}" for x in inputs)


# --- what the autograd Functions do -----------------------------------------------------------------------------------

LEAVE = {None: "V", "all_reduce": "I", "reduce_scatter": "V"}
RULES = {  # {Function: (its arguments) -> the letter of its results}
    tensor.Linear: lambda x, w, bias, enter, leave, *_: LEAVE[leave],
    tensor.EmbeddingLookup: lambda ids, w, leave, *_: LEAVE[leave] if leave else joined([letter(ids), letter(w)]),
    tensor.LinearCrossEntropy: lambda *_: "I",
    reference.Dropout: lambda x, *_: letter(x),
}


# --- one forward ------------------------------------------------------------------------------------------------------


class Letters(TorchFunctionMode):
    """Gives each result its letter, and compares it with `whole`, the operations of one process. Raises WrongStep."""

    own = ()  # ids of the parameters of the unit that runs
    mixed = ()  # the stack of the first operation after a sum over tp that made V of V and R

    def __init__(self, whole):
        super().__init__()
        self.whole, self.operations = whole, []  # each operation: (name, first input, results)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        inputs = tensors((args, kwargs))
        if any(isinstance(x, nn.Parameter) and id(x) not in self.own for x in inputs):
            other = "a weight of another unit: with pp another rank has it, and ZeRO-3 frees it"
            raise WrongStep(f"{described(func.__name__, inputs)}: {other}")
        found, with_gradient = {letter(x) for x in inputs}, {letter(x) for x in inputs if x.requires_grad}
        if torch.is_grad_enabled() and "I" in with_gradient and {"V"} & found | {"R"} & with_gradient:
            raise WrongStep(f"{described(func.__name__, inputs)}: {PART if 'V' in found else TWICE}")
        if {"R", "V"} <= found:
            self.mixed = self.mixed or traceback.extract_stack()
        return self.compared(func.__name__, inputs, named(joined(found), func(*args, **kwargs or {})))

    def apply(self, function, *arguments):
        """Do what `function.apply` does. Its results get the letter of the rule."""
        if function not in RULES:  # the reader's own
            return APPLY(function, *arguments)
        with torch._C.DisableTorchFunction():  # what a Function computes is no operation of the model
            y = named(RULES[function](*arguments), APPLY(function, *arguments))
            return self.compared(function.__name__, tensors(arguments), y)

    def compared(self, name, inputs, y):
        """Return y. Raise WrongStep if a number of y is not among those of one process."""
        if torch.is_grad_enabled():
            first, results = ([x.detach().clone() for x in some] for some in (inputs[:1], tensors(y)))
            self.operations.append((name, first, results))
            if self.whole:
                (other, _, right), *self.whole = self.whole
                if other != name:
                    self.whole = []  # the model does something else for tp = 1
                elif not all(map(among, results, right)):
                    raise WrongStep(f"{described(name, inputs)}: the result has {UNKNOWN}")
        return y

    def collective(self, operation, axis, what, call, arguments, whole, result):
        """Do what `comm.collective` does, inside an autograd Function or in a forward for validation."""
        self.mixed = ()
        if self.whole:
            _, first, results = self.whole[0]
            (found, *_) = first if operation == "all_gather" else results
            result.copy_(found.chunk(axis.size)[axis.rank] if operation == "reduce_scatter" else found)
        return comm.Pending(named("R", result))


def among(part, whole):
    """Return whether all numbers of `part` are numbers of `whole`, wherever they stand."""
    part, whole = (x.detach().double().flatten().nan_to_num() for x in (part, whole))
    whole = whole.sort().values
    error = 1e-9 * whole.abs().max()
    first = torch.searchsorted(whole, part - error).clamp(max=len(whole) - 1)
    return bool(((whole[first] - part).abs() <= error).all())


def forward(c, whole=(), training=True):
    """Run a forward of the last tp rank, with letters. Return its operations."""
    tp = Axis("tp", tuple(range(c.tp)), c.tp - 1, None)
    gpt, parameters = model.GPT(c, tp), {}
    for module in gpt.modules():
        for key, spec in [(k, v) for k, v in vars(module).items() if isinstance(v, tensor.ParamSpec)]:
            if spec not in parameters:
                weight = replace(spec, std=spec.std or 0.5).initial(c.seed).double()
                p = parameters[spec] = nn.Parameter(spec.local_part(weight, tp).contiguous())
                summed = spec.partial or c.sequence_parallel
                p.letter = "V" if spec.tp_dim is not None else "R" if summed else "I"
            setattr(module, key, parameters[spec])
    ids = torch.arange(c.micro_batch_size * c.seq_length).view(c.micro_batch_size, -1)
    batch = gpt.micro_batch(ids, ids + 1, ids[:, 0])
    named("V" if c.sequence_parallel else "R", (batch.positions, batch.rows))
    letters, x = Letters(whole), None
    with (
        mock.patch.object(Function, "apply", classmethod(letters.apply)),
        mock.patch.object(comm, "collective", letters.collective),
        torch.random.fork_rng([]),
        torch.set_grad_enabled(training),
        letters,
    ):
        torch.manual_seed(c.tp)
        for unit in gpt.units:
            letters.own = {id(p) for p in unit.parameters()}
            x = unit(x, batch)
    if letter(x) == "V":
        raise WrongStep(f"the losses differ between the tp ranks after {places(letters.mixed)}")
    return letters.operations


def findings(config):
    """Return a line for each mistake that two tp ranks would make, none if all is right. It needs no other rank.

    Raises UserError if two ranks can't have whole heads and groups.
    """
    divides("tp", 2, "num_attention_heads", config.num_attention_heads)
    divides("tp", 2, "num_query_groups", config.query_groups)
    c, found = replace(config, **layout_of(Config()) | CUT, num_layers=min(2, config.num_layers)), {}
    for sequence_parallel in (False, True):
        one = replace(c, sequence_parallel=sequence_parallel)
        two = replace(one, tp=2)
        try:
            forward(two, training=False)  # first: what functools.cache keeps is no operation of the next forwards
            whole = forward(one)
            forward(two, whole)
        except UserError:
            raise
        except Exception as error:  # the reader's code may raise anything
            place = places(traceback.extract_tb(error.__traceback__))
            found.setdefault(place, ": ".join(filter(None, [place, type(error).__name__, str(error)])))
    return [*found.values()]


def places(stack):
    """Return the lines of a stack that are in this project, outermost first, and the code of the last one."""
    frames = [f for f in stack if Path(f.filename).is_relative_to(ROOT) and not re.search(OTHERS, f.filename)]
    lines = [f"{Path(f.filename).relative_to(ROOT)}:{f.lineno}" for f in frames]
    return f"{' > '.join(lines[-4:])}: {frames[-1].line}" if frames else ""
