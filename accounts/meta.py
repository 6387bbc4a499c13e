"""Measure the work of a model's units by one forward on tensors without values. So no model needs a formula.

Tensors of the device "meta" have a shape and a dtype, but no memory. Communication only gives a result of its shape.
For a run on a CPU, small units run with values: that is exact there (LayerNorm keeps its statistics in bf16), and the
first operation on meta tensors takes a second.
"""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

import reference
from config import SECTIONS, Config
from parallel import comm
from parallel.mesh import Axis
from parallel.tensor import ParamSpec
from parallel.units import Model
from parallel.watch import Watch

META = torch.device("meta")
# fields of a Config that change a unit's work, beside those of the model
LAYOUT = ("tp", "cp", "sequence_parallel", "recompute", "dropout")
SMALL = 2**25  # elements


class Work(NamedTuple):
    """What a unit needs for one micro-batch on one rank."""

    saved: int  # bytes that it keeps for backward. A block's input counts
    products: list  # (M, K, N) of each product [M, K] x [K, N] of forward. Backward has two for each
    moved: int  # bytes that the operations between products read and write in forward, if each is fused
    operations: int  # their number
    attention: int  # FLOPs of attention's two products, for all pairs of tokens

    def times(self, b):
        """Return the Work of b samples."""
        products = [(b * M, K, N) for M, K, N in self.products]
        return Work(b * self.saved, products, b * self.moved, self.operations, b * self.attention)


def attention(q, k, v, cache=None):
    """`reference.attention` of meta tensors, for which PyTorch would choose the one that keeps [s, s] matrices."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)[0].transpose(1, 2)


OPS = SimpleNamespace(**vars(reference) | {"attention": attention})


class Products(TorchFunctionMode):
    """Context: list the matrix products, as in `Work.products`."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **(kwargs or {})), function.__name__.strip("_")
        if name in ("mm", "matmul", "linear", "addmm"):
            a = args[name == "addmm"]
            self.found.append((math.prod(a.shape[:-1]), a.shape[-1], result.shape[-1]))
        return result


class Counted:
    """Operations (`reference.OPERATIONS`) that count what they read and write: each argument and each result once."""

    def __init__(self, ops):
        self.moved = self.operations = self.attention = 0
        self.ops = SimpleNamespace(**vars(ops))
        for name in reference.OPERATIONS:
            setattr(self.ops, name, self.counting(name, getattr(ops, name)))

    def counting(self, name, function):
        def run(*args, **kwargs):
            results = function(*args, **kwargs)
            both = *args, *(results if isinstance(results, tuple) else [results])
            tensors = [x for x in both if isinstance(x, torch.Tensor) and x.dim() > 1]
            self.moved += sum(x.numel() * x.element_size() for x in tensors)
            self.operations += 1
            if name == "attention":
                q, keys = args[0], args[1].shape[1]
                self.attention += 4 * q.numel() * keys
            return results

        return run


def work_of(c, item, on_cpu=False):
    """Return {unit: Work} of a micro-batch, or None if the units don't run without values. item: bytes of an element.

    Tensors that several units keep count once, in the first.
    """
    small = on_cpu and c.hidden_size * (c.seq_length + c.padded_vocab_size + 3 * c.ffn_size) <= SMALL
    fields = {name: getattr(c, name) for name in (*SECTIONS["model"], *LAYOUT)} | {"num_layers": min(2, c.num_layers)}
    one = cached_work(item, torch.device("cpu") if small else META, **fields)
    return one and {unit: work.times(c.micro_batch_size) for unit, work in one.items()}


@cache
def cached_work(item, device, **fields):
    try:
        return measured(Config(**fields), item, device)
    except Exception:  # the model is a user's, and runs; a tensor without values may lack what it does
        return None


@torch.enable_grad()
def measured(c, item, device):
    """Return `work_of` for one sample. Raises any error of the model."""
    dtype = next(dtype for dtype in (torch.float64, torch.float32, torch.bfloat16) if dtype.itemsize == item)
    counts = Counted(OPS if device == META else reference)
    model = Model(c, axis("tp", c.tp), counts.ops, axis("cp", c.cp))
    ids = torch.zeros(1, c.seq_length, dtype=torch.int64)
    give_parameters(model, c.tp, dtype, device)
    batch, table, x = model.micro_batch(ids, ids, ids[:, 0]), {}, None
    of_batch = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    batch = replace(batch, **of_batch)
    with mock.patch.object(comm, "collective", lambda *_, result, **__: comm.Pending(result)):
        known = {storage_id(tensor): tensor for tensor in (*model.parameters(), batch.rows)}
        embedding, block, *_, head = model.units
        # the first block keeps what all blocks share
        for name, unit in {"embedding": embedding, "first block": block, "block": block, "head": head}.items():
            saved, x = {}, None if x is None else x.detach().requires_grad_()
            before = counts.moved, counts.operations, counts.attention

            def pack(tensor, saved=saved):
                return saved.setdefault(storage_id(tensor), tensor.detach())

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Products() as products:
                y = unit(x, batch)
                if name == "head":  # it computes its logits in backward
                    with torch.no_grad():
                        unit(x, batch)
            known |= {storage_id(tensor): tensor for tensor in (x, y) if tensor is not None}
            new = [tensor for key, tensor in saved.items() if key not in known]
            new += {"embedding": [], "head": [y]}.get(name, [x])
            after = counts.moved, counts.operations, counts.attention
            size = sum(tensor.untyped_storage().nbytes() for tensor in new)
            table[name] = Work(size, products.found, *(b - a for a, b in zip(before, after, strict=True)))
            known |= saved
            x = y
    del table["first block"]
    return table


def storage_id(tensor):
    return tensor.untyped_storage()._cdata  # storages without memory have no address


def axis(name, n):
    return Axis(name, tuple(range(n)), 0, Watch())


def give_parameters(model, t, dtype, device):
    """Replace each ParamSpec by a parameter without values."""
    params = {}
    for module in model.modules():
        for key, spec in list(vars(module).items()):
            if isinstance(spec, ParamSpec):
                empty = torch.empty(spec.local_shape(t), dtype=dtype, device=device)
                setattr(module, key, params.setdefault(spec, torch.nn.Parameter(empty)))
