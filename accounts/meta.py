"""Measure the work of a model's units by forwards on tensors without values. So no model needs a formula.

All units count. After two units of one class, with equal attributes and shapes, did the same, the next ones do not run.
A unit runs with two micro-batches: what it keeps of both is a constant. Rows that depend on values are those of ids 0.

Tensors of the device "meta" have a shape and a dtype, but no memory. Communication only gives a result of its shape.
For a run on a CPU, small models run with values: that is exact there (LayerNorm keeps its statistics in bf16), and the
first operation on meta tensors takes a second.
"""

import math
from collections import Counter, defaultdict
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from config import SECTIONS, Config
from parallel import comm
from parallel.mesh import Axis
from parallel.tensor import Linear, ParamSpec
from parallel.units import Model
from parallel.watch import Watch

META = torch.device("meta")
OUTSIDE = {"pp", "order", "zero", "zero_copies", "schedule", "chunks", "offload"}  # fields that change no unit
SMALL = 2**23  # elements
FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # {PyTorch's product: which argument is its first factor}


class Work(NamedTuple):
    """What a unit needs for one micro-batch on one rank."""

    first: int  # the first unit that needs the same
    runs: int  # forwards: 2 with full recomputation
    products: list  # (M, K, N) of each product [M, K] x [K, N] of forward. Backward has two for each
    attention: int  # elements of q times keys, for all pairs of tokens. Its two products have 2 FLOPs for each
    moved: int  # bytes that the operations between products read and write in forward, if each is fused
    operations: int  # their number
    columns: list  # elements of x of each column parallel linear
    rows: list  # elements of y of each row parallel linear
    exchanged: list  # elements that cp exchanges: of q, k and v of each attention, and of its result
    operands: int  # bytes of x and dy of all linears, which W needs
    saved: dict  # {tensor: bytes} that autograd keeps. The input of unit i is ("x", i), its output ("x", i + 1)
    constants: dict  # the same, of tensors that all micro-batches share


UNKNOWN = Work(0, 1, [], *[math.nan] * 3, *[[math.nan]] * 3, math.nan, {}, {})


def attention(q, k, v, cache=None):
    """`reference.attention` of meta tensors, for which PyTorch would choose the one that keeps [s, s] matrices."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)[0].transpose(1, 2)


OPS = SimpleNamespace(**vars(reference) | {"attention": attention})


class Counts(TorchDispatchMode):
    """Context: count the work of a forward. The unit uses the operations `ops`, and `linear` for `Linear.forward`."""

    def __init__(self, ops):
        super().__init__()
        self.forward, self.ops = Linear.forward, SimpleNamespace(**vars(ops))
        for name in reference.OPERATIONS:
            setattr(self.ops, name, self.counting(getattr(ops, name)))

    def begin(self):
        self.attention = self.moved = self.operations = 0
        self.products, self.columns, self.rows, self.exchanged, self.operands = [], [], [], [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        if name in FACTORS:
            a, b = args[FACTORS[name] :][:2]
            self.products.append((a.numel() // a.shape[-1], a.shape[-1], b.shape[-1]))
        elif name.startswith("_scaled_dot_product"):
            q, k, v = args[:3]
            self.attention += q.numel() * k.shape[2]
            self.exchanged += [q.numel() + k.numel() + v.numel(), result[0].numel()]
        return result

    def counting(self, function):
        """Return an operation that counts what it reads and writes: each argument and each result once."""

        def run(*args, **kwargs):
            results = function(*args, **kwargs)
            both = *args, *(results if isinstance(results, tuple) else [results])
            tensors = [x for x in both if isinstance(x, torch.Tensor) and x.dim() > 1]
            self.moved += sum(x.numel() * x.element_size() for x in tensors)
            self.operations += 1
            return results

        return run

    def linear(self, ctx, x, w, *rest):
        y = self.forward(ctx, x, w, *rest)
        (M, K, N), cut, item = self.products[-1], w.spec.tp_dim, x.element_size()
        if cut == w.dim() - 1:
            self.rows.append(M * N)
        elif cut is not None:
            self.columns.append(M * K)
        self.operands[storage_id(x) if M == len(x) else object()] = item * M * K  # x itself, or gathered
        self.operands[object()] = item * M * N  # dy
        return y


class Trial:
    """A forward y of a unit. saved: {storage: tensor} that autograd keeps."""

    def __init__(self, unit, x, batch, counts):
        self.unit, self.x, saved = unit, x, {}
        self.saved = saved  # a hook that knew self would keep the graph alive

        def pack(tensor):
            return saved.setdefault(storage_id(tensor), tensor.detach())

        counts.begin()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counts:
            self.y = unit(x, batch)


def work_of(c, item, on_cpu=False):
    """Return [the Work of each unit], or None if the units don't run without values. item: bytes of an element."""
    tokens = c.micro_batch_size * c.seq_length
    elements = c.hidden_size * (c.num_layers * (tokens + 3 * c.ffn_size) + c.padded_vocab_size)
    names = {*SECTIONS["model"], *SECTIONS["layout"], "micro_batch_size"} - OUTSIDE
    fields = {name: getattr(c, name) for name in sorted(names)}
    return cached_work(item, torch.device("cpu") if on_cpu and elements <= SMALL else META, **fields)


@cache
def cached_work(item, device, **fields):
    try:
        return measured(Config(**fields), item, device)
    except Exception:  # the model is a user's, and runs; a tensor without values may lack what it does
        return None


@torch.enable_grad()
def measured(c, item, device):
    """Return `work_of`. Raises any error of the model."""
    dtype = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}[item]
    counts = Counts(OPS if device == META else reference)
    model = Model(c, axis("tp", c.tp), counts.ops, axis("cp", c.cp))
    give_parameters(model, c.tp, dtype, device)
    batch, x, tried, trials = batch_of(model, device), None, defaultdict(list), []
    with (
        mock.patch.object(comm, "collective", lambda *_, result, **__: comm.Pending(result)),
        mock.patch.object(Linear, "forward", staticmethod(counts.linear)),
    ):
        for unit, unit_specs in zip(model.units, model.unit_specs, strict=True):
            several = tried[key_of(unit, unit_specs)]
            if len(several) < 2 or several[-2].work != several[-1].work:
                several.append(t := Trial(unit, x, batch, counts))
                runs = 1 + (c.recompute == "full" and unit.recomputable)
                sizes = [tensor.untyped_storage().nbytes() for tensor in t.saved.values()]
                computed = counts.products, counts.attention, counts.moved, counts.operations
                sends = counts.columns, counts.rows, counts.exchanged
                t.work = Work(0, runs, *computed, *sends, sum(counts.operands.values()), sizes, {})
                if unit is model.units[-1]:  # it computes its logits in backward
                    with torch.no_grad():
                        Trial(unit, x, batch, counts)
                    between = t.work.moved + counts.moved, t.work.operations + counts.operations
                    t.work = t.work._replace(products=counts.products, moved=between[0], operations=between[1])
                x = t.y.detach().requires_grad_()
            trials.append(several[-1])
        batch, tried = batch_of(model, device), [t for several in tried.values() for t in several]
        again = {t: Trial(t.unit, t.x, batch, counts).saved for t in tried}
    states, kinds, works = {storage_id(p) for p in model.parameters()}, [t.work for t in trials], []
    times = Counter(key for t in tried for key in t.saved)
    for i, t in enumerate(trials):
        ends = {storage_id(t.y): ("x", i + 1)} | {storage_id(t.x): ("x", i)}
        tables = saved, constants = {}, {}
        for key in t.saved.keys() - states:
            name = ends.get(key, key if times[key] > 1 else (i, key))
            tables[key in again[t] and key not in ends][name] = t.saved[key].untyped_storage().nbytes()
        works.append(t.work._replace(first=kinds.index(t.work), saved=saved, constants=constants))
    saved["x", len(works)] = t.y.untyped_storage().nbytes()  # the executor keeps the losses
    return works


def key_of(unit, unit_specs):
    """Return what is equal for units that do the same. Their `index` differs."""
    plain = {name: value for name, value in vars(unit).items() if type(value) in (bool, int, float, str)}
    return str((type(unit), plain | {"index": 0}, [(spec.shape, spec.tp_dim) for spec in unit_specs]))


def batch_of(model, device):
    """Return a MicroBatch without values."""
    shape = model.config.micro_batch_size, model.config.seq_length
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    return model.micro_batch(ids, ids, ids[:, 0])


def storage_id(tensor):
    # a storage without memory has no address; the embedding has no input
    return tensor is not None and tensor.untyped_storage()._cdata


def axis(name, n):
    return Axis(name, tuple(range(n)), 0, Watch())


def give_parameters(model, t, dtype, device):
    """Replace each ParamSpec by a parameter without values."""
    params = {}
    for module in model.modules():
        for key, spec in list(vars(module).items()):
            if isinstance(spec, ParamSpec):
                empty = torch.empty(spec.local_shape(t), dtype=dtype, device=device)
                p = params.setdefault(spec, torch.nn.Parameter(empty, requires_grad=not spec.frozen))
                p.spec = spec
                setattr(module, key, p)
