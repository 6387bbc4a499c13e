"""ZeRO is where three buffers live (slides "データ並列 (DP)" and "ZeRO (FSDP)").

Rajbhandari et al. (arXiv 1910.02054), section 5. The model's parameters are stored by *unit* (word table, position
embedding, each block, head). A unit has three kinds of flat buffers, and a ZeRO stage says which of them
the n data parallel ranks share out instead of each keeping a copy:

    stage   optimizer state (master weights, moments)   gradients    parameters    sent per step
      0     whole                                       whole        whole         all_reduce of gradients: 2P (n-1)/n
      1-3   the next chapters: shared out, from left to right

This file has stage 0, plain data parallelism, laid out for the others: everything is per unit; a buffer is padded so
that it divides into n equal shards; reduction, norm and update never look inside a buffer beyond its four ranges:

    | cut over tp, decays | cut over tp, no decay | replicated, decays | replicated, no decay | padding |
                                                   ^-- its norm counts once over tp; partial under sequence parallelism

so that the global norm and weight decay are arithmetic on ranges, wherever a shard begins or ends.

Bytes per parameter (bf16): parameters 2, gradients 4, master weights 4, moments 8: 18. In fp32 the parameters are
their own master weights: 16. Gradients accumulate over micro-batches in the master dtype, float32 (float64 in fp64
runs), whatever the parameters are in.
"""

import math

import torch
from torch import nn

from parallel.comm import all_reduce
from parallel.optimizer import RULES

ALIGN = 16  # elements: every parameter and every shard begins at a multiple of 32 bytes or more


class Unit:
    """The flat buffers of the parameters that are gathered, reduced and updated together.

    param, grad, master, moments: the buffers; params: this rank's parameters, in the buffers' order; offsets[i]:
    where params[i] begins; size: elements, padding included; ranges: [(begin, end, cut over tp, decays)] in order,
    without the padding at the end.
    """

    def __init__(self, name, params, dp, dtype, master_dtype, moments, device, training):
        self.name, self.dp = name, dp
        self.params = sorted(params, key=lambda p: (p.spec.tp_dim is None, not p.spec.decay))
        self.offsets, self.ranges, end = [], [], 0
        for p in self.params:
            self.offsets.append(end)
            begin, end = end, end + math.ceil(p.numel() / ALIGN) * ALIGN
            kind = (p.spec.tp_dim is not None, p.spec.decay)
            if self.ranges and self.ranges[-1][2:] == kind:
                begin = self.ranges.pop()[0]  # the range goes on
            self.ranges.append((begin, end, *kind))
        self.size = math.ceil(end / (ALIGN * dp.size)) * ALIGN * dp.size

        def flat(dtype):
            return torch.zeros(self.size, dtype=dtype, device=device)

        self.param = flat(dtype)
        self.master = flat(master_dtype) if training and dtype != master_dtype else self.param
        self.grad = flat(master_dtype) if training else None
        self.moments = [flat(master_dtype) for _ in range(moments)] if training else []

    def view(self, flat, i):
        """Parameter i's place in one of the flat buffers, in its shape."""
        shape = self.params[i].shape
        return flat[self.offsets[i] : self.offsets[i] + math.prod(shape)].view(shape)

    def shard(self):
        """(begin, end) of the piece that is this data parallel rank's to save, equal on all ranks."""
        length = self.size // self.dp.size
        return self.dp.rank * length, (self.dp.rank + 1) * length


class Zero:
    """The training state of a model: its units' buffers, and the end of a step on them.

    Takes over the model's parameters: each becomes a view into its unit's flat buffer, its `.grad` a view into the flat
    gradient, so that whatever backward adds lands where it is reduced. Without `training` there are parameters only.
    """

    def __init__(self, model, config, mesh, dtype, device, training=True):
        self.config, self.mesh = config, mesh
        self.rule, moments = RULES[config.optimizer]
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.updates = 0  # steps that were not skipped
        self.pending = []

        members = {}
        for p in model.parameters():
            members.setdefault(p.spec.unit, []).append(p)
        self.units = {
            name: Unit(name, params, mesh.dp, dtype, self.master_dtype, moments, device, training)
            for name, params in members.items()
        }
        self._place(model)

    def _place(self, model):
        """Replace the storage-less parameters of the modules by views into the flat buffers."""
        placed = {}
        for unit in self.units.values():
            for i, p in enumerate(unit.params):
                view = nn.Parameter(unit.view(unit.param, i))
                view.spec = p.spec
                if unit.grad is not None:
                    view.grad_dtype = self.master_dtype
                    view.grad = unit.view(unit.grad, i)
                unit.params[i] = placed[p.spec.name] = view
        for module in model.modules():
            for key, p in module._parameters.items():
                if p is not None:
                    module._parameters[key] = placed[p.spec.name]

    @torch.no_grad()
    def initialize(self, seed):
        """Initial weights: drawn whole, then cut (`ParamSpec.initial`)."""
        for unit in self.units.values():
            for i, p in enumerate(unit.params):
                whole = p.spec.initial(seed)
                unit.view(unit.master, i).copy_(p.spec.local_part(whole, self.mesh.tp))
        self.cast_parameters()

    def cast_parameters(self):
        """Parameters from master weights, where these are two."""
        for unit in self.units.values():
            if unit.param is not unit.master:
                unit.param.copy_(unit.master)

    # --- the step: zero_grad, (backward, reduce) per unit, finish_reduction, total_norm, update ----------------------

    def zero_grad(self):
        for unit in self.units.values():
            unit.grad.zero_()

    def reduce(self, name):
        """Unit `name` has its whole gradient: start adding it up over the data parallel ranks, and go on.

        One unit is one bucket: large enough for the wire, and complete at one known moment.
        """
        self.pending.append(all_reduce(self.units[name].grad, self.mesh.dp, "gradients"))

    def finish_reduction(self):
        """Wait for all sums over dp; then, under sequence parallelism, over tp for what is replicated there.

        Each tp rank saw only its own tokens of a replicated parameter's input. Sums commute: this one comes last and
        is small (13 h numbers a block).
        """
        for pending in self.pending:
            pending.wait()
        self.pending.clear()
        if self.config.sequence_parallel:
            sums = [
                all_reduce(unit.grad[begin:end], self.mesh.tp, "partial gradients")
                for unit in self.units.values()
                for begin, end, cut, _ in unit.ranges
                if not cut
            ]
            for pending in sums:
                pending.wait()

    def local_squared_norm(self):
        """This rank's share of the squared global gradient norm: each logical element counts on one rank. float64 [].

        Data parallel replicas hold the same gradient: the first counts. What is replicated over tp: likewise.
        Squares are added in float64, so that a large loss scale does not overflow the sum of the units.
        """
        total = torch.zeros((), dtype=torch.float64, device=next(iter(self.units.values())).grad.device)
        if self.mesh.dp.rank == 0:
            for unit in self.units.values():
                for begin, end, cut, _ in unit.ranges:
                    if cut or self.mesh.tp.rank == 0:
                        total += torch.linalg.vector_norm(unit.grad[begin:end]).double() ** 2
        return total

    @torch.no_grad()
    def update(self, lr, scale):
        """One update with the gradients times `scale`."""
        c = self.config
        self.updates += 1
        for unit in self.units.values():
            for begin, end, _, decays in unit.ranges:
                self.rule(
                    unit.master[begin:end],
                    unit.grad[begin:end],
                    [m[begin:end] for m in unit.moments],
                    lr=lr,
                    decay=c.weight_decay if decays else 0.0,
                    scale=scale,
                    update=self.updates,
                    beta1=c.adam_beta1,
                    beta2=c.adam_beta2,
                    eps=c.adam_eps,
                )
        self.cast_parameters()
