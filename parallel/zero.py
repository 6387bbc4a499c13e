"""ZeRO is where three buffers live (slides "データ並列 (DP)" and "ZeRO (FSDP)").

Rajbhandari et al. (arXiv 1910.02054), section 5. The model's parameters are stored by *unit* (word table, position
embedding, each block, head). A unit has three kinds of flat buffers, and the stage says which of them the n data
parallel ranks share out (each owns 1/n) instead of each keeping a copy:

    stage   optimizer state   gradients   parameters     sent per step and rank, in units of P (n-1)/n elements
      0     whole             whole       whole          2       all_reduce of gradients
      1     1/n               whole       whole          2       reduce_scatter of gradients, all_gather of parameters
      2     1/n               1/n         whole          m + 1   the same, but gradients after each of m micro-batches
      3     1/n               1/n         1/n            3m      and parameters gathered for each forward and backward

With m = 1 these are the slide's 2, 2, 2 and 3. Stages 2 and 3 save memory because a unit's whole buffer then exists
only while the unit computes; stage 3 gathers the next unit's parameters while this one computes. (Where a schedule
splits the backward, a chunk's whole gradients exist from I, which makes those of LayerNorms and biases, to W.)

Bytes per parameter (bf16): parameters 2, gradients 4, master weights 4, moments 8: 18, of which stage 1 divides 12 by
n, stage 2 also 4, stage 3 all. In fp32 the parameters are their own master weights: 16. Gradients accumulate over
micro-batches in the master dtype, float32 (float64 in fp64 runs), whatever the parameters are in.

With `offload` the optimizer's state stays in the CPU's memory and the update happens there: gradients go down,
weights come back, once a step (Ren et al., ZeRO-Offload, arXiv 2101.06840).

Nothing here looks inside a buffer beyond its four ranges:

    | cut over tp, decays | cut over tp, no decay | replicated, decays | replicated, no decay | padding |
                                                  ^-- its norm counts once over tp; partial under sequence parallelism

so that the global norm and weight decay are arithmetic on ranges, wherever a shard begins or ends.
"""

import itertools
import math

import torch
from torch import nn

import reference
from parallel.comm import all_gather, all_reduce, reduce_scatter
from parallel.optimizer import RULES
from reference import Numbers

ALIGN = 16  # elements: every parameter and every shard begins at a multiple of 32 bytes or more


class Unit:
    """The flat buffers of the parameters that are gathered, reduced and updated together.

    param, grad: the whole buffers, [size], of which a sharded one has storage only while it is in use; own_param,
    own_grad, master, moments: this rank's piece of each, elements `owned` = (begin, end). params: this rank's
    parameters in the buffers' order, params[i] from offsets[i] on; ranges: [(begin, end, cut over tp, decays)] in
    order, without the padding at the end; size: elements, padding included.
    """

    def __init__(self, name, params, holders, dp, stage, dtype, master_dtype, moments, device, state_device, training):
        self.name, self.holders, self.dp = name, holders, dp
        self.stage = stage if dp.size > 1 else 0  # one rank has nobody to share with
        self.lay_out(params)
        length = self.size // dp.size
        self.shard = dp.rank * length, (dp.rank + 1) * length
        self.owned = begin, end = self.shard if self.stage >= 1 else (0, self.size)

        def flat(size, dtype, device=device):
            return torch.zeros(size, dtype=dtype, device=device)

        self.param = flat(self.size, dtype)
        self.own_param = flat(length, dtype) if self.stage == 3 else self.param[begin:end]
        if training:
            self.grad = flat(self.size, master_dtype)
            self.own_grad = flat(length, master_dtype) if self.stage >= 2 else self.grad[begin:end]
            same = dtype == master_dtype and torch.device(device) == state_device
            self.master = self.own_param if same else flat(end - begin, master_dtype, state_device)
            self.moments = [flat(end - begin, master_dtype, state_device) for _ in range(moments)]
        else:
            self.grad, self.own_grad, self.master, self.moments = None, None, self.own_param, []

    def lay_out(self, params):
        """Order, offsets, ranges and size."""
        self.params = sorted(params, key=lambda p: (p.spec.tp_dim is None, not p.spec.decay))
        self.offsets, self.ranges, end = [], [], 0
        for p in self.params:
            self.offsets.append(end)
            begin, end = end, end + math.ceil(p.numel() / ALIGN) * ALIGN
            kind = (p.spec.tp_dim is not None, p.spec.decay)
            if self.ranges and self.ranges[-1][2:] == kind:
                begin = self.ranges.pop()[0]  # the range goes on
            self.ranges.append((begin, end, *kind))
        self.size = math.ceil(end / (ALIGN * self.dp.size)) * ALIGN * self.dp.size

    def view(self, flat, i):
        """Parameter i's place in a whole flat buffer, in its shape."""
        shape = self.params[i].shape
        return flat[self.offsets[i] : self.offsets[i] + math.prod(shape)].view(shape)

    def defer_to(self, products):
        """Weight gradients of linears go to the list `products` as calls for later; None: they are added at once."""
        for p in self.params:
            p.deferred = products

    def owned_ranges(self):
        """The ranges as far as this rank owns them, in elements of its own piece."""
        low, high = self.owned
        for begin, end, cut, decays in self.ranges:
            if max(begin, low) < min(end, high):
                yield max(begin, low) - low, min(end, high) - low, cut, decays


def allocate(flat):
    """Give a flat buffer its storage (back): views into it, the parameters, are good again. Its content is not."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def free(flat):
    flat.untyped_storage().resize_(0)


class Zero:
    """The training state of this rank's part of the model: its units' buffers, and what a step does with them.

    Takes over the modules' parameters: each becomes a view into its unit's flat buffer, its `.grad` a view into the
    flat gradient, so that whatever backward adds lands where it is reduced. Without `training` there are parameters
    only.

    modules: those of the model's units that this rank runs; holders(name): the axis of pipeline ranks that hold a unit.
    """

    def __init__(self, modules, holders, config, mesh, dtype, device, ops=reference, training=True):
        self.config, self.mesh, self.dtype, self.device, self.ops = config, mesh, dtype, device, ops
        self.rule, moments, self.apply = RULES[config.optimizer]
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.updates = torch.zeros((), dtype=torch.int64, device=device)  # steps that were not skipped
        self.gathering, self.reducing = {}, {}  # unit name: Pending
        self.counted = None

        members = {}  # unit name: {parameter name: parameter}, a tied one once
        for module in modules:
            for p in module.parameters():
                members.setdefault(p.spec.unit, {})[p.spec.name] = p
        state_device = torch.device("cpu") if config.offload else device
        shape = mesh.dp, config.zero, dtype, self.master_dtype, moments, device, state_device, training
        self.units, placed = {}, {}
        for name, ps in members.items():  # of the buffers that are shared out, one unit's at a time is whole
            self.units[name] = unit = Unit(name, ps.values(), holders(name), *shape)
            placed |= self._placed(unit)
        for module in modules:
            for child in module.modules():
                for key, p in child._parameters.items():
                    if p is not None:
                        child._parameters[key] = placed[p.spec.name]

    def _placed(self, unit):
        """{name: parameter} of a unit: views into its flat buffers, in the place of those without storage."""
        for i, p in enumerate(unit.params):
            view = nn.Parameter(unit.view(unit.param, i))
            view.spec, view.deferred = p.spec, None
            if unit.grad is not None:
                view.grad_dtype = self.master_dtype
                view.grad = unit.view(unit.grad, i)
            unit.params[i] = view
        if unit.stage == 3:
            free(unit.param)
        if unit.stage >= 2 and unit.grad is not None:
            free(unit.grad)
        return {p.spec.name: p for p in unit.params}

    @torch.no_grad()
    def initialize(self, seed):
        """Initial weights: drawn whole, then cut over tp, then over dp (`ParamSpec.initial`)."""
        for unit in self.units.values():
            low, high = unit.owned
            for i, p in enumerate(unit.params):
                begin, end = max(unit.offsets[i], low), min(unit.offsets[i] + p.numel(), high)
                if begin < end:
                    local = p.spec.local_part(p.spec.initial(seed), self.mesh.tp).flatten()
                    unit.master[begin - low : end - low] = local[begin - unit.offsets[i] : end - unit.offsets[i]]
        self.parameters_from_master()

    @torch.no_grad()
    def parameters_from_master(self, cast=True):
        """After the master weights have changed: cast them where they are two, and give each other the pieces."""
        gathers = []
        for unit in self.units.values():
            if cast and unit.own_param is not unit.master:
                unit.own_param.copy_(unit.master)
            if unit.stage in (1, 2):
                gathers.append(all_gather(unit.own_param, unit.dp, "parameters", out=unit.param))
        for pending in gathers:
            pending.wait()

    # --- parameters, before and after a unit computes ----------------------------------------------------------------

    def start_gather(self, name):
        """Stage 3: begin to bring unit `name`'s parameters together. Elsewhere they are there."""
        unit = self.units[name]
        if unit.stage == 3 and name not in self.gathering:
            allocate(unit.param)
            # `.data`: autograd must not take the same values, back in the same place, for a change of the parameters.
            self.gathering[name] = all_gather(unit.own_param, unit.dp, "parameters", out=unit.param.data)

    def gather(self, name):
        """Unit `name`'s parameters are there, until `release`."""
        self.start_gather(name)
        if name in self.gathering:
            self.gathering[name].wait()

    def release(self, name):
        """Unit `name`'s parameters are not needed until the next `gather`."""
        if self.units[name].stage == 3:
            del self.gathering[name]
            free(self.units[name].param)

    # --- gradients, before and after a unit's backward ---------------------------------------------------------------

    def zero_grad(self):
        for unit in self.units.values():
            (unit.grad if unit.stage < 2 else unit.own_grad).zero_()

    def ready_for_gradient(self, name):
        """Backward may add to unit `name`'s gradient."""
        unit = self.units[name]
        if name in self.reducing:  # what is on its way must not change
            self._settle(name)
        if unit.stage >= 2 and not unit.grad.untyped_storage().size():
            allocate(unit.grad)
            unit.grad.zero_()

    def reduce(self, name, last):
        """Unit `name` has a micro-batch's whole gradient, of the `last` one or not: add it up over the data ranks.

        Starts the sum and goes on: it travels while the units below compute. One unit is one bucket: large enough for
        the wire, and complete at one known moment. Stages 0 and 1 have room to wait for the last micro-batch.
        """
        unit = self.units[name]
        low, high = unit.shard
        if unit.stage >= 2:
            for earlier in list(self.reducing)[:-1]:  # three whole buffers at a time: two travel, one is filled
                self._settle(earlier)
            self.reducing[name] = reduce_scatter(unit.grad, unit.dp, "gradients", out=unit.grad[low:high])
        elif last and unit.stage == 1:
            self.reducing[name] = reduce_scatter(unit.grad, unit.dp, "gradients", out=unit.grad[low:high])
        elif last:
            self.reducing[name] = all_reduce(unit.grad, unit.dp, "gradients")

    def _settle(self, name):
        """Wait for unit `name`'s sum; in stages 2 and 3 add this rank's piece to what it has, and free the whole."""
        unit = self.units[name]
        piece = self.reducing.pop(name).wait()
        if unit.stage >= 2:
            unit.own_grad.add_(piece)
            free(unit.grad)

    # --- the end of a step: finish_reduction, local_squared_norm, update ----------------------------------------------

    def finish_reduction(self):
        """All sums over dp; then, on what is left of a buffer, the sums over those who hold the same parameter.

        Over the pipeline ranks that hold the same unit (a tied table); and, under sequence parallelism, over tp for
        what is replicated there, of which each tp rank saw only its own tokens (13 h numbers a block). Sums commute:
        each is done once, where the buffer is smallest.
        """
        for name in list(self.reducing):
            self._settle(name)
        by_name = (self.units[name] for name in sorted(self.units))  # holders may have met them in another order
        sums = [all_reduce(unit.own_grad, unit.holders, "twin gradients") for unit in by_name]
        for pending in sums:
            pending.wait()
        if self.config.sequence_parallel:
            sums = [
                all_reduce(unit.own_grad[begin:end], self.mesh.tp, "partial gradients")
                for unit in self.units.values()
                for begin, end, cut, _ in unit.owned_ranges()
                if not cut
            ]
            for pending in sums:
                pending.wait()

    def counts(self, unit, cut):
        """Whether this rank is the one that speaks for its piece of a range of `unit`, of all that have a copy."""
        first_of_dp = unit.stage >= 1 or unit.dp.rank == 0
        return first_of_dp and unit.holders.rank == 0 and (cut or self.mesh.tp.rank == 0)

    def local_squared_norm(self):
        """This rank's share of the squared global gradient norm: each logical element counts on one rank. float64 [].

        Not finite if anything on this rank is not, counted or not (0 times infinity is nan): then all skip the step.
        Squares are added in float64, so that a large loss scale does not overflow the sum of the units.
        """
        pieces = self._counted_pieces()
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        if self.counted is None:  # made once: to bring numbers to a GPU is to wait for it
            self.counted = torch.tensor([count for _, count in pieces], dtype=torch.float64, device=self.device)
        return (self.ops.squared_norms([piece for piece, _ in pieces]) * self.counted).sum()

    def _counted_pieces(self):
        """[(consecutive ranges of a gradient that this rank owns, whether it speaks for them)]."""
        pieces = []
        for unit in self.units.values():
            parts = ((begin, end, self.counts(unit, cut)) for begin, end, cut, _ in unit.owned_ranges())
            for count, group in itertools.groupby(parts, key=lambda part: part[2]):
                group = list(group)
                pieces.append((unit.own_grad[group[0][0] : group[-1][1]], count))
        return pieces

    @torch.no_grad()
    def update(self, numbers):
        """One update of what this rank owns, or none; then everybody has the parameters. numbers: `reference.Numbers`.

        With AdamW the host learns nothing, not even whether the step was skipped: it only enqueues. Other rules ask.
        """
        c = self.config
        gradients = {unit: unit.own_grad.to(unit.master.device) for unit in self.units.values()}  # a copy if offloaded
        constants = dict(beta1=c.adam_beta1, beta2=c.adam_beta2, eps=c.adam_eps)
        if self.rule is None:
            rule = reference.adamw if c.offload else self.ops.adamw
            there = Numbers(*(x.to("cpu" if c.offload else self.device) for x in numbers))
            for unit, gradient in gradients.items():
                ranges = [(begin, end, decays) for begin, end, _, decays in unit.owned_ranges()]
                out = None if unit.own_param is unit.master else unit.own_param
                rule(unit.master, gradient, unit.moments, there, ranges, decay=c.weight_decay, out=out, **constants)
        elif not numbers.skip:
            constants |= dict(lr=numbers.lr.item(), scale=numbers.scale.item(), update=numbers.update.item())
            self._update_plainly(gradients, constants)
        self.updates += ~numbers.skip
        self.parameters_from_master(cast=self.rule is not None)

    def _update_plainly(self, gradients, constants):
        """A rule of `optimizer.py`, and its second half where it is layer-wise. gradients: {unit: own piece}."""
        c = self.config
        for unit, gradient in gradients.items():
            for begin, end, _, decays in unit.owned_ranges():
                w, g, *moments = (x[begin:end] for x in (unit.master, gradient, *unit.moments))
                self.rule(w, g, moments, decay=c.weight_decay * decays, **constants)
        if self.apply:
            norms = self.parameter_norms(gradients)
            for (unit, begin, end, spec), (weight_norm, norm) in zip(self._tensors(), norms.tolist(), strict=True):
                w, g, *moments = (x[begin:end] for x in (unit.master, gradients[unit], *unit.moments))
                constants |= dict(decay=c.weight_decay * spec.decay, layerwise=spec.decay)
                self.apply(w, g, moments, weight_norm, norm, lars_coefficient=c.lars_coefficient, **constants)

    def _tensors(self):
        """(unit, begin, end, spec) of every parameter that this rank has a part of, as far as it owns it."""
        for unit in self.units.values():
            low, high = unit.owned
            for i, p in enumerate(unit.params):
                begin, end = max(unit.offsets[i], low), min(unit.offsets[i] + p.numel(), high)
                yield unit, begin - low, max(begin, end) - low, p.spec

    def parameter_norms(self, gradients):
        """|weight| and |gradient buffer| of every whole parameter tensor, float64 [number of them, 2].

        A shard may cut a tensor in two, and tp cuts most: squares are added over both. gradients: {unit: own piece}.
        """
        tensors, device = list(self._tensors()), next(iter(gradients.values())).device
        squares = torch.zeros(len(tensors), 2, dtype=torch.float64, device=device)
        for i, (unit, begin, end, spec) in enumerate(tensors):
            if spec.tp_dim is not None or self.mesh.tp.rank == 0:
                for k, x in enumerate((unit.master, gradients[unit])):
                    squares[i, k] = torch.linalg.vector_norm(x[begin:end]).double() ** 2
        squares = squares.to(self.device)
        if self.config.zero >= 1:
            squares = all_reduce(squares, self.mesh.dp, "parameter norms").wait()
        squares = all_reduce(squares, self.mesh.tp, "parameter norms").wait()
        self._agree_with_holders(squares, tensors)
        return squares.sqrt()

    def _agree_with_holders(self, squares, tensors):
        """Of a tensor that several pipeline ranks hold, all take the first one's norms.

        Theirs are sums of the same squares, but over another tp group and at another place of a buffer, so perhaps in
        another order: the copies would drift apart by a rounding.
        """
        shared = sorted((spec.name, i) for i, (unit, _, _, spec) in enumerate(tensors) if unit.holders.size > 1)
        if shared:
            rows = [i for _, i in shared]
            holders = tensors[rows[0]][0].holders
            first = squares[rows] if holders.rank == 0 else torch.zeros_like(squares[rows])
            squares[rows] = all_reduce(first, holders, "parameter norms").wait()
