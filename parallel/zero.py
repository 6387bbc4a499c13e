"""ZeRO: shards three kinds of buffers over the data ranks (slides "データ並列 (DP)" and "ZeRO (FSDP)").

Rajbhandari et al. (arXiv 1910.02054), section 5. The parameters are stored in *buckets* (word table, position table,
each block, head; `layout.py`). A bucket has three kinds of flat buffers: optimizer state, gradients, parameters. The
stage selects the kinds that are sharded over the n data parallel ranks, 1/n on each. The others are replicated, with a
whole copy on each rank. P: elements of a rank's buckets; m: micro-batches.

    stage   optimizer state   gradients   parameters     sent per step and rank, in units of P (n-1)/n elements
      0     replicated        replicated  replicated     2       all_reduce of gradients
      1     1/n               replicated  replicated     2       reduce_scatter of gradients, all_gather of parameters
      2     1/n               1/n         replicated     m + 1   as stage 1, but gradients after each micro-batch
      3     1/n               1/n         1/n            3m      as stage 2, but parameters before each F and each B

With m = 1 this is 2, 2, 2 and 3, as in section 7 of the paper. The next table lists the calls of a step in their order.
This file has the methods in the same order.

    call           when                    stage 0          1                 2                        3
    zero_grad      at the start            clear            clear             clear 1/n                clear 1/n
    gather         before a unit's F and B -                wait for publish  wait for publish         all_gather
    release        after each              -                -                 -                        free
    open_gradient  before its backward     -                -                 allocate                 allocate
    reduce         after its backward      -                -                 reduce_scatter           reduce_scatter
      ... in the last micro-batch          all_reduce       reduce_scatter    reduce_scatter           reduce_scatter
    finish         after all backwards     wait             wait              wait, add, free          wait, add, free
                                           then sums over tp (if needed) and over holders (pipeline ranks with a copy)
    squared_norm   once                    each element is counted on one rank
    update         once                    everything       1/n               1/n                      1/n
    publish        once                    -                all_gather        all_gather               -

`publish` only starts the gathers. These all_gathers run while the next step begins. `gather` waits for the all_gather
of its bucket.

Stage 2 frees whole gradients, stage 3 also whole parameters. A rank always keeps its shard. It has the whole buffer
only while a unit uses the buffer or while the buffer is sent. This is the life of a bucket's whole gradient. It repeats
with each micro-batch:

    open_gradient      allocate it, filled with 0
    backward           adds to it: the `.grad` of each parameter is a view into it
    reduce             starts the reduce_scatter
    _end_oldest_sum    waits for it, adds the shard to `own_grad`, frees the whole gradient

At most two sums run while backward fills a third buffer. In stage 3 the parameters of the next unit are gathered while
this unit computes. If a schedule splits B, the whole gradients of a chunk (the units that one action runs) exist from I
to W. The action I also computes the gradients of LayerNorms, biases, head and embedding. The action W computes the
others.

In bf16 each parameter needs 18 bytes: parameter 2, gradient 4, master weight 4 (the float32 copy that the optimizer
updates), two moments 8. Stage 1 divides 12 of these by n, stage 2 divides 16, stage 3 divides 18. In fp32 the total is
16, because the parameters are also the master weights. Gradients accumulate over micro-batches in the master dtype,
float32 (float64 in fp64 runs), for every dtype of the parameters.

With `offload` the optimizer state stays in the CPU's memory, and the CPU makes the update. Once a step, gradients go to
the CPU and weights come back (Ren et al., ZeRO-Offload, arXiv 2101.06840). On a GPU, fp32 then has separate master
weights, too. Each bucket has one *pinned* buffer, through which the gradients go to the CPU, and later the new weights
come back. The operating system never moves pinned memory, so the GPU copies it directly.
"""

import itertools
from typing import NamedTuple

import torch
from torch import nn

import reference
from parallel import optimizer
from parallel.comm import all_gather, all_reduce, reduce_scatter
from parallel.layout import replica_sums
from parallel.optimizer import RULES
from parallel.tensor import ParamSpec


class Storage(NamedTuple):
    """Dtypes and devices of the buffers, the same for all buckets of a run."""

    dtype: torch.dtype  # of parameters
    master_dtype: torch.dtype  # of gradients, master weights and moments
    device: torch.device
    state_device: torch.device  # of master weights and moments
    moments: int  # number of moment buffers of the optimizer
    training: bool  # False: parameters only


class Bucket:
    """One bucket's flat buffers on this rank.

    param, grad: whole, [size]. If the stage shards them, they have storage only while they are in use. owned: (begin,
    end) of the elements that this rank updates: its shard with stage 1 or higher, else everything. own_param, own_grad,
    master (master weights), moments: each has only the elements `owned`. staging: a pinned buffer, only with offload
    from a GPU. It carries the gradient to the CPU, then the new weights back. ranges: `owned`, cut into ranges of
    consecutive elements. A range has elements of one kind: all cut over tp or all replicated, all with weight decay or
    all without. pieces: for each parameter, its elements in `owned` (`layout.py`). params: the nn.Parameters, views
    into `param`, in the order of layout.specs.
    """

    def __init__(self, layout, stage, dp, holders, storage):
        self.layout, self.name, self.size = layout, layout.name, layout.size
        self.stage, self.dp, self.holders = stage, dp, holders
        self.shard = layout.shard(dp.rank)
        self.owned = begin, end = layout.owned(dp.rank, stage)
        self.ranges, self.pieces = layout.ranges_in(begin, end), list(layout.pieces(begin, end))
        dtype, master_dtype, device, state_device, moments, training = storage
        offloaded = torch.device(device) != state_device

        def flat(size, dtype, device=device):
            return torch.zeros(size, dtype=dtype, device=device)

        self.param = flat(self.size, dtype)
        self.own_param = flat(end - begin, dtype) if stage == 3 else self.param[begin:end]
        self.grad = self.own_grad = self.staging = None
        self.master, self.moments = self.own_param, []
        if training:
            self.grad = flat(self.size, master_dtype)
            self.own_grad = flat(end - begin, master_dtype) if stage >= 2 else self.grad[begin:end]
            if dtype != master_dtype or offloaded:
                self.master = flat(end - begin, master_dtype, state_device)
            self.moments = [flat(end - begin, master_dtype, state_device) for _ in range(moments)]
            self.staging = pinned(end - begin, master_dtype) if offloaded else None
        self.params = [self._parameter(piece, master_dtype) for piece in layout.pieces(0, self.size)]
        if stage == 3:
            free(self.param)
        if stage >= 2 and training:
            free(self.grad)

    def _parameter(self, piece, master_dtype):
        """Return an nn.Parameter for a Piece. The parameter and its gradient are views into the flat buffers."""
        shape = piece.spec.local_shape(self.layout.tp)
        p = nn.Parameter(piece.of(self.param).view(shape))
        p.spec, p.deferred = piece.spec, None
        if self.grad is not None:
            p.grad_dtype = master_dtype
            p.grad = piece.of(self.grad).view(shape)
        return p

    @property
    def cast(self):
        """`own_param`, to which an update copies the new master weights. None if it is the same buffer as `master`."""
        return None if self.own_param is self.master else self.own_param

    def defer_to(self, products):
        """Let linears append the operands of their weight gradients to the list `products`, for W. None: compute at
        once.
        """
        for p in self.params:
            p.deferred = products


def pinned(size, dtype):
    """Return zeros in pinned memory of the CPU, [size]."""
    return torch.zeros(size, dtype=dtype, pin_memory=True)


def allocate(flat):
    """Give a freed flat buffer its storage again. Views into the buffer are valid again; its old values are lost."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def free(flat):
    """Give the storage of a flat buffer back. The tensor and its views stay, but have no values."""
    flat.untyped_storage().resize_(0)


def is_free(flat):
    return flat.untyped_storage().size() == 0


def wait_for(communications):
    for pending in communications:
        pending.wait()


class Zero:
    """Training state of this rank's part of the model: its buckets, and the calls of a step in the table above.

    Replaces each ParamSpec in this rank's units by an nn.Parameter. The parameter's `.grad` is a view into the flat
    gradient buffer, so backward adds directly to the buffer that is reduced.

    layout: a `layout.Layout` of the model. training: False for parameters only.
    """

    def __init__(self, model, layout, config, mesh, dtype, device, ops=reference, training=True):
        self.config, self.mesh, self.dtype, self.device, self.ops = config, mesh, dtype, device, ops
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.updates = torch.zeros((), dtype=torch.int64, device=device)  # steps that were not skipped
        self.gathering = {}  # {bucket name: Pending} of parameters
        self.summing = {}  # {Bucket: Pending} of gradients, the oldest first
        # NCCL runs the calls of one group one after another. In a second group a sum does not delay the next gather.
        self.sum_axis = mesh.second(mesh.dp) if layout.stage == 3 else mesh.dp
        self.counted = None
        state_device = torch.device("cpu") if config.offload else device
        storage = Storage(dtype, self.master_dtype, device, state_device, RULES[config.optimizer].moments, training)
        places, self.buckets = layout.buckets(mesh.pp.rank), {}
        holders = {name: mesh.holders(layout.holders(name)) for name in sorted(places)}  # same order on all ranks
        for name, place in places.items():  # whole buffers of a sharded bucket are freed before the next one is made
            self.buckets[name] = Bucket(place, layout.stage, mesh.dp, holders[name], storage)
        params = {p.spec: p for bucket in self.buckets.values() for p in bucket.params}
        units = [model.units[unit] for chunk in layout.chunks(mesh.pp.rank) for unit in layout.units[chunk]]
        for module in (module for unit in units for module in unit.modules()):
            for key, spec in list(vars(module).items()):
                if isinstance(spec, ParamSpec):
                    setattr(module, key, params[spec])

    @torch.no_grad()
    def initialize(self, seed):
        """Set the initial weights. They are drawn whole, then cut over tp, then over dp (`ParamSpec.initial`)."""
        for bucket in self.buckets.values():
            for piece in bucket.pieces:
                if piece.begin < piece.end:
                    local = piece.spec.local_part(piece.spec.initial(seed), self.mesh.tp).flatten()
                    piece.of(bucket.master).copy_(local[piece.begin : piece.end])
        self.parameters_from_master()

    @torch.no_grad()
    def parameters_from_master(self):
        """Copy the master weights to the parameters if these are separate buffers, and publish the parameters."""
        self.finish_gathers()
        for bucket in self.buckets.values():
            if bucket.cast is not None:
                bucket.cast.copy_(bucket.master)
        self.publish()

    # --- zero_grad; gather, release: parameters, before and after a unit computes ------------------------------------

    def zero_grad(self):
        """Set the gradients of the last step to 0."""
        for bucket in self.buckets.values():
            (bucket.grad if bucket.stage < 2 else bucket.own_grad).zero_()

    def start_gather(self, name):
        """Start the all-gather of a bucket's parameters in stage 3. In stages 1 and 2 `publish` has started it."""
        bucket = self.buckets[name]
        if bucket.stage == 3 and name not in self.gathering:
            allocate(bucket.param)
            # Autograd refuses a saved tensor that has changed. This gather writes the old values again, so it is safe.
            # `.data` hides it from autograd.
            self.gathering[name] = all_gather(bucket.own_param, bucket.dp, "parameters", out=bucket.param.data)

    def gather(self, name):
        """Wait until a bucket's parameters are whole. They stay whole until `release`.

        In stage 3 a block is gathered 2m times a step: for the F and for the B (or I) of each micro-batch. The executor
        calls `release` after each F and each B.
        """
        self.start_gather(name)
        if name in self.gathering:
            self.gathering[name].wait()

    def release(self, name):
        """Free a bucket's whole parameters (stage 3) until the next `gather`."""
        if self.buckets[name].stage == 3:
            del self.gathering[name]
            free(self.buckets[name].param)

    # --- open_gradient, reduce: gradients, before and after a unit's backward ----------------------------------------

    def open_gradient(self, name):
        """Prepare a bucket's gradient for backward, which adds to it. Stages 2 and 3: allocate it, filled with 0."""
        bucket = self.buckets[name]
        while bucket in self.summing:  # a buffer must not change while it is sent
            self._end_oldest_sum()
        if is_free(bucket.grad):
            allocate(bucket.grad)
            bucket.grad.zero_()

    def reduce(self, name, last):
        """Start to sum a bucket's gradient over the data ranks. last: True if this is its last gradient of the step.

        The executor calls this after the bucket's last use in B (`Chunk.reduce_after`), or in W. The sum runs while
        backward continues with the unit below. Stages 2 and 3 sum after each micro-batch. Stages 0 and 1 sum only once,
        after the last micro-batch.
        """
        bucket = self.buckets[name]
        if bucket.stage >= 2:
            while len(self.summing) > 1:
                self._end_oldest_sum()
        elif not last:
            return
        if bucket.stage == 0:
            self.summing[bucket] = all_reduce(bucket.grad, bucket.dp, "gradients")
        else:
            begin, end = bucket.shard
            self.summing[bucket] = reduce_scatter(bucket.grad, self.sum_axis, "gradients", out=bucket.grad[begin:end])

    def _end_oldest_sum(self):
        """Wait for the oldest sum. Stages 2 and 3: add this rank's shard to `own_grad`, and free the whole buffer."""
        bucket = next(iter(self.summing))
        shard = self.summing.pop(bucket).wait()
        if bucket.stage >= 2:
            bucket.own_grad.add_(shard)
            free(bucket.grad)

    # --- finish: after all backwards ---------------------------------------------------------------------------------

    def finish(self):
        """Call `sum_replicas`: it waits for all sums over dp, then sums over tp. Then sum over the holders of each
        bucket.

        Several pipeline ranks hold a tied table, so its gradient is summed over its holders. The sum over dp comes
        first: after it, only shards need to be summed.
        """
        self.sum_replicas()
        by_name = [self.buckets[name] for name in sorted(self.buckets)]  # all holders need the same order
        wait_for([all_reduce(bucket.own_grad, bucket.holders, "twin gradients") for bucket in by_name])

    def sum_replicas(self):
        """Wait for all sums over dp. Then sum the gradients of replicated parameters over tp (`layout.replica_sums`).

        These are LayerNorms, the biases of row-parallel linears and the position table. With sequence parallelism their
        gradient is partial: each tp rank has summed its own tokens. Without it the tp ranks compute equal gradients.
        But each tp rank has its own dp group, which may add in another order. So with more than two data ranks the last
        digits may differ. Then all take the gradient of the first tp rank: the others add 0.
        """
        while self.summing:
            self._end_oldest_sum()
        if what := replica_sums(self.config, self.mesh.dp.size):
            buckets = self.buckets.values()
            parts = [bucket.own_grad[r.begin : r.end] for bucket in buckets for r in bucket.ranges if not r.cut]
            if not self.config.sequence_parallel and self.mesh.tp.rank > 0:
                for part in parts:
                    part.mul_(0)  # 0 times inf or nan is nan, so all ranks skip the step
            wait_for([all_reduce(part, self.mesh.tp, what) for part in parts])

    # --- squared_norm ------------------------------------------------------------------------------------------------

    def counts(self, bucket, cut):
        """Return True on exactly one of the ranks that hold the same elements: the norm counts them once.

        An element of a LayerNorm counts on the rank that is the first of its holders, has tp rank 0, and has dp rank 0
        (stage 0) or owns the element (stages 1 to 3).
        """
        first_of_dp = bucket.stage >= 1 or bucket.dp.rank == 0
        return first_of_dp and bucket.holders.rank == 0 and (cut or self.mesh.tp.rank == 0)

    def squared_norm(self):
        """Return this rank's share of the squared global gradient norm, float64 []. Each element counts on one rank.

        An inf or nan in any gradient of this rank makes the share inf or nan, even where a gradient does not count (0
        times inf is nan). Then all ranks skip the step. The buckets' squares are added in float64, so that a large loss
        scale does not overflow their sum.
        """
        pieces = self._counted_pieces()
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        if self.counted is None:  # built once, because the CPU waits for a copy to the GPU
            self.counted = torch.tensor([counts for _, counts in pieces], dtype=torch.float64, device=self.device)
        return (self.ops.squared_norms([piece for piece, _ in pieces]) * self.counted).sum()

    def _counted_pieces(self):
        """Return [(part of `own_grad`, True if the norm counts it on this rank)]."""
        pieces = []
        for bucket in self.buckets.values():
            for counts, group in itertools.groupby(bucket.ranges, lambda r, bucket=bucket: self.counts(bucket, r.cut)):
                ranges = list(group)
                pieces.append((bucket.own_grad[ranges[0].begin : ranges[-1].end], counts))
        return pieces

    # --- update, publish ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, scalars):
        """Update the elements that this rank owns, unless scalars.skip. scalars: `reference.UpdateScalars`."""
        self.finish_gathers()
        offload, shards = self.config.offload, []
        for _, bucket in sorted(self.buckets.items()):  # all holders need the same order
            gradient, cast = bucket.own_grad, bucket.cast
            if bucket.staging is not None:
                gradient, cast = bucket.staging.copy_(gradient, non_blocking=True), None
            buffers = bucket.master, gradient, bucket.moments
            shards.append(optimizer.Shard(*buffers, bucket.ranges, bucket.pieces, cast, bucket.holders))
        # With offload, the copy of the scalars to the CPU waits for the GPU. Then the gradients have arrived in
        # `staging`, too.
        there = reference.UpdateScalars(*(x.to("cpu" if offload else self.device) for x in scalars))
        optimizer.update(self.config, shards, there, reference if offload else self.ops, self.mesh, self.device)
        for bucket in self.buckets.values():
            if bucket.staging is not None and bucket.cast is not None:
                weights = bucket.staging.view(self.dtype)[: len(bucket.master)].copy_(bucket.master)
                bucket.cast.copy_(weights, non_blocking=True)
        self.updates += ~scalars.skip

    def publish(self):
        """Start to all-gather the new parameters from their shards (stages 1 and 2)."""
        for name, bucket in self.buckets.items():
            if bucket.stage in (1, 2):
                self.gathering[name] = all_gather(bucket.own_param, bucket.dp, "parameters", out=bucket.param)

    def finish_gathers(self):
        """Wait until all parameters are whole (stages 0 to 2), before they change or are read outside of a unit."""
        wait_for([self.gathering[name] for name in self.buckets if name in self.gathering])
