"""ZeRO: shards three kinds of buffers over the data ranks (slides "データ並列 (DP)" and "ZeRO (FSDP)").

The first forms are `ladder/rung03` to `06`: `gather` and `free` there are `gather` and `release` here, the hook is
`reduce`. Rajbhandari et al. (arXiv 1910.02054), section 5. A *bucket* (`layout.py`) has three kinds of flat buffers:
optimizer state, gradients, parameters. The ZeRO stage selects the kinds that are sharded over the n data parallel
ranks. P: elements of a rank's buckets; m: micro-batches.

    stage   optimizer state   gradients   parameters     sent per step and rank, in units of P (n-1)/n elements
      0     whole             whole       whole          2       all_reduce of gradients
      1     1/n               whole       whole          2       reduce_scatter of gradients, all_gather of parameters
      2     1/n               1/n         whole          m + 1   as stage 1, but gradients after each micro-batch
      3     1/n               1/n         1/n            3m      as stage 2, but parameters before each F and each B

With m = 1 this is 2, 2, 2, 3 (section 7). The calls of a step, in the order of this file:

    call           when                    stage 0          1                 2                        3
    zero_grad      at the start            clear            clear             clear 1/n                clear 1/n
    gather         before a unit's F and B -                wait for publish  wait for publish         all_gather
    release        after each              -                -                 -                        free
    open_gradient  before its backward     -                -                 allocate                 allocate
    reduce         after its backward      -                -                 reduce_scatter           reduce_scatter
      ... in the last micro-batch          all_reduce       reduce_scatter    reduce_scatter           reduce_scatter
    settle         before the next use     wait             wait              wait, add, free          wait, add, free
    finish         after all backwards     settle all; sum over tp (if needed) and over holders (ranks with a copy)
    squared_norm   once                    each element is counted on one rank
    update         once                    everything       1/n               1/n                      1/n
    publish        once                    -                all_gather        all_gather               -

The all_gathers of `publish` run while the next step begins. In stages 2 and 3 at most two sums run while backward fills
a third buffer. In stage 3 the next unit's parameters are gathered while this unit computes.

With AdamW in bf16 each parameter needs 18 bytes: parameter 2, gradient 4, master weight 4 (the float32 copy that the
optimizer updates), two moments 8. Stages 1, 2, 3 divide 12, 16, 18 of these by n. In fp32 the parameters are the master
weights: 16 bytes. Gradients accumulate in the master dtype, float32 (in fp64 runs float64).
"""

import itertools

import torch
from torch import nn

import reference
from parallel import optimizer
from parallel.comm import all_gather, all_reduce, reduce_scatter
from parallel.layout import replica_sums
from parallel.optimizer import RULES
from parallel.tensor import ParamSpec


class Flat:
    """A flat buffer of a bucket. whole: [size]. own: the elements that this rank updates.

    Not sharded: `own` is a view into `whole`. Sharded: `own` is a buffer of its own, and `whole` has storage only from
    `open` to `close`.
    """

    def __init__(self, size, owned, sharded, dtype, device):
        self.whole, self.sharded = torch.zeros(size, dtype=dtype, device=device), sharded
        own = self.whole[slice(*owned)]
        self.own = torch.zeros_like(own) if sharded else own

    def open(self):
        """Give `whole` storage. Return True if it had none; then its values are undefined."""
        storage = self.whole.untyped_storage()
        closed = storage.size() == 0
        if closed:
            storage.resize_(self.whole.nbytes)
        return closed

    def close(self):
        if self.sharded:
            free(self.whole)

    def clear(self):
        (self.own if self.sharded else self.whole).zero_()


def free(x):
    x.untyped_storage().resize_(0)


class Bucket:
    """One bucket's flat buffers on this rank.

    owned: (begin, end) of the elements that this rank updates: with ZeRO stage 0 all, otherwise its shard. master
    (weights), moments and `gradient` have only these elements, on the device of the optimizer state. ranges, pieces:
    parts of `owned` with parameters of one kind, and one part for each parameter (`layout.py`).
    """

    def __init__(self, layout, zero, holders, training):
        self.layout, self.name, self.size = layout, layout.name, layout.size
        self.stage, self.dp, self.holders = zero.stage, zero.mesh.dp, holders
        self.shard, self.owned = layout.shard(self.dp.rank), layout.owned(self.dp.rank, self.stage)
        self.ranges, self.pieces = layout.ranges_in(*self.owned), list(layout.pieces(*self.owned))
        self.param = Flat(self.size, self.owned, self.stage == 3, zero.dtype, zero.device)
        self.grad = self.gradient = self.staging = None
        self.master, self.moments = self.param.own, []
        if training:
            self.grad = Flat(self.size, self.owned, self.stage >= 2, zero.master_dtype, zero.device)
            state = dict(dtype=zero.master_dtype, device=zero.state_device)
            offloaded = torch.device(zero.device) != zero.state_device
            if zero.dtype != zero.master_dtype or offloaded:
                self.master = torch.zeros_like(self.param.own, **state)
            self.moments = [torch.zeros_like(self.master) for _ in range(RULES[zero.config.optimizer].moments)]
            self.staging = pinned(len(self.master), zero.master_dtype) if offloaded else None
        self.params = [self._parameter(piece, zero.master_dtype) for piece in layout.pieces(0, self.size)]
        for flat in (self.param, self.grad)[: 1 + training]:
            flat.close()

    def _parameter(self, piece, master_dtype):
        """Return an nn.Parameter. It and its `.grad` are views into flat buffers, so backward adds to the buffer."""
        shape = piece.spec.local_shape(self.layout.tp)
        p = nn.Parameter(piece.of(self.param.whole).view(shape))
        p.spec, p.deferred = piece.spec, None
        if self.grad is not None:
            p.grad_dtype = master_dtype
            p.grad = piece.of(self.grad.whole).view(shape)
        return p

    def defer_to(self, products):
        """Let linears append their `WeightGradient`s to the list `products`. None: compute at once."""
        for p in self.params:
            p.deferred = products

    # With `offload` the CPU keeps the optimizer state and makes the update (Ren et al., ZeRO-Offload, arXiv
    # 2101.06840). Gradients and new weights go through `staging`, a pinned buffer: memory that a GPU copies directly.

    @property
    def cast(self):
        """`param.own`, to which the optimizer copies the master weights. None if it is `master`, or with offload."""
        return None if self.param.own is self.master or self.staging is not None else self.param.own

    def fetch_gradient(self):
        own = self.grad.own
        self.gradient = own if self.staging is None else self.staging.copy_(own, non_blocking=True)

    def return_weights(self):
        """Copy the new weights of an offloaded bucket to `param.own`."""
        if self.staging is not None and self.param.own is not self.master:
            weights = self.staging.view(self.param.own.dtype)[: len(self.master)].copy_(self.master)
            self.param.own.copy_(weights, non_blocking=True)


def pinned(size, dtype):
    return torch.zeros(size, dtype=dtype, pin_memory=True)


def wait_for(communications):
    for pending in communications:
        pending.wait()


class Zero:
    """This rank's buckets, and the calls of a step in the table above. training: False for parameters only."""

    def __init__(self, model, layout, config, mesh, dtype, device, ops=reference, training=True):
        self.config, self.mesh, self.dtype, self.device, self.ops = config, mesh, dtype, device, ops
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.updates = torch.zeros((), dtype=torch.int64, device=device)  # steps that were not skipped
        self.stage, self.state_device = layout.stage, torch.device("cpu") if config.offload else device
        self.gathering = {}  # {bucket name: Pending} of parameters
        self.summing = {}  # {bucket name: Pending} of gradients, the oldest first
        # NCCL runs the calls of a group one after another. In a second group, a sum does not delay the next gather.
        self.sum_axis = mesh.second(mesh.dp) if layout.stage == 3 else mesh.dp
        self.counted = None
        places, self.buckets = layout.buckets(mesh.pp.rank), {}
        holders = {name: mesh.holders(layout.holders(name)) for name in sorted(places)}  # same order on all ranks
        for name, place in places.items():  # a Bucket frees its sharded buffers at once, so one is whole at a time
            self.buckets[name] = Bucket(place, self, holders[name], training)
        params = {p.spec: p for bucket in self.buckets.values() for p in bucket.params}
        units = [model.units[unit] for chunk in layout.chunks(mesh.pp.rank) for unit in layout.units[chunk]]
        for module in (module for unit in units for module in unit.modules()):
            for key, spec in list(vars(module).items()):
                if isinstance(spec, ParamSpec):
                    setattr(module, key, params[spec])

    @torch.no_grad()
    def initialize(self, seed):
        """Draw the initial weights whole, then cut them over tp, then over dp."""
        for bucket in self.buckets.values():
            for piece in bucket.pieces:
                if piece.begin < piece.end:
                    local = piece.spec.local_part(piece.spec.initial(seed), self.mesh.tp).flatten()
                    piece.of(bucket.master).copy_(local[piece.begin : piece.end])
        self.parameters_from_master()

    @torch.no_grad()
    def parameters_from_master(self):
        self.finish_gathers()
        for bucket in self.buckets.values():
            if bucket.param.own is not bucket.master:
                bucket.param.own.copy_(bucket.master)
        self.publish()

    # --- zero_grad; gather, release: parameters, before and after a unit computes ------------------------------------

    def zero_grad(self):
        for bucket in self.buckets.values():
            bucket.grad.clear()

    def start_gather(self, name):
        """Start the all-gather of a bucket's parameters (stage 3)."""
        bucket = self.buckets[name]
        if bucket.param.sharded and name not in self.gathering:
            bucket.param.open()
            # Autograd refuses saved tensors that change. `.data` hides the gather from it; the values stay the same.
            self.gathering[name] = all_gather(bucket.param.own, bucket.dp, "parameters", out=bucket.param.whole.data)

    def gather(self, name):
        """Wait until a bucket's parameters are whole."""
        self.start_gather(name)
        if name in self.gathering:
            self.gathering[name].wait()

    def release(self, name):
        """Free a bucket's whole parameters (stage 3)."""
        if self.buckets[name].param.sharded:
            del self.gathering[name]
            self.buckets[name].param.close()

    # --- open_gradient, reduce: gradients, before and after a unit's backward ----------------------------------------

    def open_gradient(self, name):
        self.settle(name)  # a buffer must not change while it is sent
        if self.buckets[name].grad.open():
            self.buckets[name].grad.whole.zero_()

    def reduce(self, name, last):
        """Start to sum a bucket's gradient over the data ranks. last: it is the bucket's last gradient of the step."""
        bucket = self.buckets[name]
        if bucket.grad.sharded:
            for older in [*self.summing][:-1]:
                self.settle(older)  # at most two sums run
        elif not last:
            return
        if bucket.stage == 0:
            self.summing[name] = all_reduce(bucket.grad.whole, bucket.dp, "gradients")
        else:
            part = bucket.grad.whole[slice(*bucket.shard)]
            self.summing[name] = reduce_scatter(bucket.grad.whole, self.sum_axis, "gradients", out=part)

    def settle(self, name):
        """Wait for a bucket's sum, if one runs. Stages 2 and 3: add this rank's shard to `grad.own`, free `whole`."""
        if name in self.summing:
            shard, grad = self.summing.pop(name).wait(), self.buckets[name].grad
            if grad.sharded:
                grad.own.add_(shard)
                grad.close()

    # --- finish: after all backwards ---------------------------------------------------------------------------------

    def finish(self):
        """Complete all gradients. The sum over dp comes first: after it, only shards need the other sums."""
        self.sum_over_dp()
        self.sum_over_tp()
        self.sum_over_holders()

    def sum_over_dp(self):
        for name in [*self.summing]:
            self.settle(name)

    def sum_over_tp(self):
        """Sum the gradients of replicated parameters over tp (`layout.replica_sums` says why).

        Without sequence parallelism all take the first tp rank's gradients: the others add 0 times theirs.
        """
        if what := replica_sums(self.config, self.mesh.dp.size):
            buckets = self.buckets.values()
            parts = [bucket.grad.own[r.begin : r.end] for bucket in buckets for r in bucket.ranges if not r.cut]
            if not self.config.sequence_parallel and self.mesh.tp.rank > 0:
                for part in parts:
                    part.mul_(0)  # 0 times inf or nan is nan, so all ranks skip the step
            wait_for([all_reduce(part, self.mesh.tp, what) for part in parts])

    def sum_over_holders(self):
        """Sum gradients over the pipeline ranks that keep a copy: of the tied word table, in Chimera of all buckets."""
        by_name = [self.buckets[name] for name in sorted(self.buckets)]  # all holders need the same order
        wait_for([all_reduce(bucket.grad.own, bucket.holders, "twin gradients") for bucket in by_name])

    # --- squared_norm ------------------------------------------------------------------------------------------------

    def counts(self, bucket, cut):
        """Return True on exactly one of the ranks that hold the same elements: the norm counts them once.

        A LayerNorm counts on its first holder, on tp rank 0, and there on dp rank 0 (stage 0) or on the element's
        owner.
        """
        first_of_dp = bucket.stage >= 1 or bucket.dp.rank == 0
        return first_of_dp and bucket.holders.rank == 0 and (cut or self.mesh.tp.rank == 0)

    def squared_norm(self):
        """Return this rank's share of the squared global gradient norm, float64 [].

        An inf or nan makes it inf or nan, even in a gradient that does not count (0 times inf is nan): all ranks skip
        the step. float64: a large loss scale must not overflow the sum.
        """
        pieces = self._counted_pieces()
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        if self.counted is None:  # built once: each copy to the GPU makes the CPU wait
            self.counted = torch.tensor([counts for _, counts in pieces], dtype=torch.float64, device=self.device)
        return (self.ops.squared_norms([piece for piece, _ in pieces]) * self.counted).sum()

    def _counted_pieces(self):
        """Return [(part of `grad.own`, True if the norm counts it on this rank)]."""
        pieces = []
        for bucket in self.buckets.values():
            for counts, group in itertools.groupby(bucket.ranges, lambda r, bucket=bucket: self.counts(bucket, r.cut)):
                ranges = list(group)
                pieces.append((bucket.grad.own[ranges[0].begin : ranges[-1].end], counts))
        return pieces

    # --- update, publish ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, scalars):
        """Update the elements that this rank owns, unless scalars.skip. scalars: `reference.UpdateScalars`."""
        self.finish_gathers()
        buckets = [bucket for _, bucket in sorted(self.buckets.items())]  # all holders need the same order
        for bucket in buckets:
            bucket.fetch_gradient()
        # With offload, the copy of the scalars to the CPU waits for the GPU. Then the gradients have arrived, too.
        there = reference.UpdateScalars(*(x.to(self.state_device) for x in scalars))
        ops = reference if self.config.offload else self.ops
        optimizer.update(self.config, buckets, there, ops, self.mesh, self.device)
        for bucket in buckets:
            bucket.return_weights()
        self.updates += ~scalars.skip

    def publish(self):
        """Start to all-gather the new parameters from their shards (stages 1 and 2)."""
        for name, bucket in self.buckets.items():
            if bucket.stage in (1, 2):
                self.gathering[name] = all_gather(bucket.param.own, bucket.dp, "parameters", out=bucket.param.whole)

    def finish_gathers(self):
        """Wait until all parameters are whole (stages 0 to 2)."""
        wait_for([self.gathering[name] for name in self.buckets if name in self.gathering])
