"""Measure the activations of a model that has no formula: run its units on tensors without values.

A tensor of the device "meta" has a shape and a dtype, but no memory. Communication only gives a result of its shape.
"""

from functools import cache
from types import SimpleNamespace
from unittest import mock

import torch

import reference
from config import Config
from model import GPT
from operations import recomputable
from parallel import comm
from parallel.mesh import Axis
from parallel.tensor import ParamSpec
from parallel.watch import Watch

META = torch.device("meta")


def attention(q, k, v, cache=None):
    """`reference.attention` of meta tensors, for which PyTorch would choose the one that keeps [s, s] matrices."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)[0].transpose(1, 2)


OPS = SimpleNamespace(**vars(reference) | {"attention": attention})


def kept(c, item):
    """Return {unit: bytes} that a micro-batch keeps for backward, or None if the units don't run on meta tensors.

    item: bytes of an element. A block's input counts. Tensors that several units keep count once, in the first.
    """
    return _kept(item, **vars(c))


@cache
def _kept(item, **fields):
    try:
        return measured(Config(**fields), item)
    except Exception:  # the model is a user's, and runs; a meta tensor may lack what it does
        return None


@torch.enable_grad()
def measured(c, item):
    """Return `kept`. Raises any error of the model."""
    dtype = next(dtype for dtype in (torch.float64, torch.float32, torch.bfloat16) if dtype.itemsize == item)
    ops = recomputable(OPS) if c.recompute == "elementwise" else OPS
    model = GPT(c, axis("tp", c.tp), ops, axis("cp", c.cp))
    give_parameters(model, c.tp, dtype)
    ids = torch.empty(c.micro_batch_size, c.seq_length, dtype=torch.int64, device=META)
    batch, table, x = model.micro_batch(ids, ids, ids[:, 0]), {}, None
    counted = {storage_id(tensor): tensor for tensor in (*model.parameters(), batch.rows)}
    embedding, block, *_, head = model.units
    units = {"embedding": embedding, "first block": block, "block": block, "head": head}
    with mock.patch.object(comm, "_collective", lambda *_, result, **__: comm.Pending(result)):
        for name, unit in units.items():
            saved, x = {}, None if x is None else x.detach().requires_grad_()

            def pack(tensor, saved=saved):
                return saved.setdefault(storage_id(tensor), tensor.detach())

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = unit(x, batch)
            counted |= {storage_id(tensor): tensor for tensor in (x, y) if tensor is not None}
            new = [tensor for key, tensor in saved.items() if key not in counted]
            new += {"embedding": [], "head": [y]}.get(name, [x])
            table[name] = sum(tensor.untyped_storage().nbytes() for tensor in new)
            counted |= saved
            x = y
    del table["first block"]  # it keeps what all blocks share
    return table


def storage_id(tensor):
    return tensor.untyped_storage()._cdata  # storages without memory have no address


def axis(name, n):
    return Axis(name, tuple(range(n)), 0, Watch())


def give_parameters(model, t, dtype):
    """Replace each ParamSpec by a parameter without values."""
    params = {}
    for module in model.modules():
        for key, spec in list(vars(module).items()):
            if isinstance(spec, ParamSpec):
                empty = torch.empty(spec.local_shape(t), dtype=dtype, device=META)
                setattr(module, key, params.setdefault(spec, torch.nn.Parameter(empty)))
