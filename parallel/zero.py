"""ZeRO is where three buffers live (slides "データ並列 (DP)" and "ZeRO (FSDP)").

Rajbhandari et al. (arXiv 1910.02054), section 5. The parameters are stored in *buckets* (word table, position table,
each block, head; `layout.py`). A bucket has three kinds of flat buffers. The stage says which of them the n data
parallel ranks shard (each has 1/n); the others are replicated, a copy on each rank:

    stage   optimizer state   gradients   parameters     sent per step and rank, in units of P (n-1)/n elements
      0     replicated        replicated  replicated     2       all_reduce of gradients
      1     1/n               replicated  replicated     2       reduce_scatter of gradients, all_gather of parameters
      2     1/n               1/n         replicated     m + 1   the same, but gradients after each of m micro-batches
      3     1/n               1/n         1/n            3m      and parameters gathered for each forward and backward

With m = 1 these are the 2, 2, 2 and 3 of the paper's section 7. The calls of a step, in its order and in this file's:

    call           when                    stage 0          1                 2                        3
    zero_grad      at the start            clear            clear             clear 1/n                clear 1/n
    gather         before a unit's F and B -                -                 -                        all_gather
    release        after each              -                -                 -                        free
    open_gradient  before its backward     -                -                 allocate                 allocate
    reduce         after each micro-batch  -                -                 reduce_scatter           reduce_scatter
      ... the last of a step               all_reduce       reduce_scatter    reduce_scatter           reduce_scatter
    finish         after all backwards     wait             wait              wait, add, free          wait, add, free
                                           then the sums over the holders of a bucket and over tp
    squared_norm   once                    each element counts on one rank
    update         once                    everything       1/n               1/n                      1/n
    publish        once                    -                all_gather        all_gather               -

Stages 2 and 3 save memory because a bucket's whole buffer exists only while a unit computes with it or while it
travels; stage 3 gathers the next unit's parameters while this one computes. If a schedule splits B into I and W, a
chunk's whole gradients exist from I to W: I already adds the gradients of LayerNorms, biases, head and embedding to
them.

Bytes per parameter (bf16): parameters 2, gradients 4, master weights 4, moments 8: 18, of which stage 1 divides 12 by
n, stage 2 also 4, stage 3 all. In fp32, without offload, the parameters are their own master weights: 16. Gradients
accumulate over micro-batches in the master dtype, float32 (float64 in fp64 runs), whatever the parameters are in.

With `offload` the optimizer's state stays in the CPU's memory and the update happens there: gradients go down,
weights come back, once a step (Ren et al., ZeRO-Offload, arXiv 2101.06840).
"""

import itertools
from typing import NamedTuple

import torch
from torch import nn

import reference
from parallel import optimizer
from parallel.comm import all_gather, all_reduce, reduce_scatter
from parallel.optimizer import RULES
from parallel.tensor import ParamSpec


class Storage(NamedTuple):
    """How buffers are stored: the same for all buckets of a run."""

    dtype: torch.dtype  # of parameters
    master_dtype: torch.dtype  # of gradients, master weights and moments
    device: torch.device
    state_device: torch.device  # of master weights and moments
    moments: int  # buffers that the optimizer keeps
    training: bool  # False: parameters only


class Bucket:
    """One bucket's flat buffers on this rank.

    param, grad: whole, [size]; a sharded one has storage only while it is in use. own_param, own_grad, master, moments:
    the elements `owned` = (begin, end) of each, which this rank reduces and updates; from stage 1 on these are its
    shard. ranges, pieces: the layout's Ranges and Pieces of these elements. params: the nn.Parameters, views into
    `param`, in the order of layout.specs.
    """

    def __init__(self, layout, stage, dp, holders, storage):
        self.layout, self.name, self.size = layout, layout.name, layout.size
        self.stage, self.dp, self.holders = stage, dp, holders
        self.shard = layout.shard(dp.rank)
        self.owned = begin, end = layout.owned(dp.rank, stage)
        self.ranges, self.pieces = layout.ranges_in(begin, end), list(layout.pieces(begin, end))
        dtype, master_dtype, device, state_device, moments, training = storage

        def flat(size, dtype, device=device):
            return torch.zeros(size, dtype=dtype, device=device)

        self.param = flat(self.size, dtype)
        self.own_param = flat(end - begin, dtype) if stage == 3 else self.param[begin:end]
        self.grad, self.own_grad, self.master, self.moments = None, None, self.own_param, []
        if training:
            self.grad = flat(self.size, master_dtype)
            self.own_grad = flat(end - begin, master_dtype) if stage >= 2 else self.grad[begin:end]
            if dtype != master_dtype or torch.device(device) != state_device:
                self.master = flat(end - begin, master_dtype, state_device)
            self.moments = [flat(end - begin, master_dtype, state_device) for _ in range(moments)]
        self.params = [self._parameter(piece, master_dtype) for piece in layout.pieces(0, self.size)]
        if stage == 3:
            free(self.param)
        if stage >= 2 and training:
            free(self.grad)

    def _parameter(self, piece, master_dtype):
        """An nn.Parameter for a ParamSpec: it and its gradient are views into the flat buffers."""
        shape = piece.spec.local_shape(self.layout.tp)
        p = nn.Parameter(piece.of(self.param).view(shape))
        p.spec, p.deferred = piece.spec, None
        if self.grad is not None:
            p.grad_dtype = master_dtype
            p.grad = piece.of(self.grad).view(shape)
        return p

    def defer_to(self, products):
        """Weight gradients of linears go to the list `products`, for W; None: they are added at once."""
        for p in self.params:
            p.deferred = products


def allocate(flat):
    """Give a freed flat buffer its storage back. Views into it can be used again; its content is lost."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def free(flat):
    flat.untyped_storage().resize_(0)


class Zero:
    """The training state of this rank's part of the model: its buckets, and a step's calls of the table above.

    Puts an nn.Parameter in the place of each ParamSpec in the units that this rank runs. Its `.grad` is a view into the
    flat gradient, so that whatever backward adds lands where it is reduced.

    layout: a `layout.Layout` of the model. training: False for parameters only.
    """

    def __init__(self, model, layout, config, mesh, dtype, device, ops=reference, training=True):
        self.config, self.mesh, self.dtype, self.device, self.ops = config, mesh, dtype, device, ops
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.updates = torch.zeros((), dtype=torch.int64, device=device)  # steps that were not skipped
        self.gathering, self.reducing = {}, {}  # bucket name: Pending
        self.counted = None
        state_device = torch.device("cpu") if config.offload else device
        storage = Storage(dtype, self.master_dtype, device, state_device, RULES[config.optimizer].moments, training)
        places, self.buckets = layout.buckets(mesh.pp.rank), {}
        holders = {name: mesh.holders(layout.holders(name)) for name in sorted(places)}  # in one order on all ranks
        for name, place in places.items():  # sharded buffers are freed one by one: two are never whole together
            self.buckets[name] = Bucket(place, layout.stage, mesh.dp, holders[name], storage)
        params = {p.spec: p for bucket in self.buckets.values() for p in bucket.params}
        units = [model.units[unit] for chunk in layout.chunks(mesh.pp.rank) for unit in layout.units[chunk]]
        for module in (module for unit in units for module in unit.modules()):
            for key, spec in list(vars(module).items()):
                if isinstance(spec, ParamSpec):
                    setattr(module, key, params[spec])

    @torch.no_grad()
    def initialize(self, seed):
        """Initial weights: drawn whole, then cut over tp, then over dp (`ParamSpec.initial`)."""
        for bucket in self.buckets.values():
            for piece in bucket.pieces:
                if piece.begin < piece.end:
                    local = piece.spec.local_part(piece.spec.initial(seed), self.mesh.tp).flatten()
                    piece.of(bucket.master).copy_(local[piece.begin : piece.end])
        self.parameters_from_master()

    @torch.no_grad()
    def parameters_from_master(self):
        """Make the parameters of new master weights: cast them where the two are separate buffers, then publish."""
        for bucket in self.buckets.values():
            if bucket.own_param is not bucket.master:
                bucket.own_param.copy_(bucket.master)
        self.publish()

    # --- zero_grad; gather, release: parameters, before and after a unit computes ------------------------------------

    def zero_grad(self):
        """Clear what the last step has left in the gradients."""
        for bucket in self.buckets.values():
            (bucket.grad if bucket.stage < 2 else bucket.own_grad).zero_()

    def start_gather(self, name):
        """Start the all-gather of a bucket's parameters. Only stage 3 needs it; otherwise this does nothing."""
        bucket = self.buckets[name]
        if bucket.stage == 3 and name not in self.gathering:
            allocate(bucket.param)
            # `.data`: autograd must not take the same values, back in the same place, for a change of the parameters.
            self.gathering[name] = all_gather(bucket.own_param, bucket.dp, "parameters", out=bucket.param.data)

    def gather(self, name):
        """Make a bucket's parameters whole, until `release`.

        In stage 3 a block is gathered 2m times a step: for the F and for the B (or I) of each micro-batch. After each
        of them the executor calls `release`, which frees it.
        """
        self.start_gather(name)
        if name in self.gathering:
            self.gathering[name].wait()

    def release(self, name):
        """Free a bucket's whole parameters (stage 3): they are not needed until the next `gather`."""
        if self.buckets[name].stage == 3:
            del self.gathering[name]
            free(self.buckets[name].param)

    # --- open_gradient, reduce: gradients, before and after a unit's backward ----------------------------------------

    def open_gradient(self, name):
        """Let backward add to a bucket's gradient: wait for its earlier sum, give it storage (stages 2 and 3)."""
        bucket = self.buckets[name]
        if name in self.reducing:  # a buffer must not change while it is sent
            self._settle(name)
        if bucket.stage >= 2 and not bucket.grad.untyped_storage().size():
            allocate(bucket.grad)
            bucket.grad.zero_()

    def reduce(self, name, last):
        """A bucket has one micro-batch's whole gradient (`last`: the last of the step): sum it over the data ranks.

        The executor calls it when B has passed the first unit that uses the bucket (`Chunk.reduce_after`), or in W. It
        starts the sum, which travels while the units below compute. Stages 0 and 1 wait for the last micro-batch.
        """
        bucket = self.buckets[name]
        low, high = bucket.shard
        if bucket.stage >= 2:
            for earlier in list(self.reducing)[:-1]:  # then two buffers travel while backward fills a third
                self._settle(earlier)
        if bucket.stage >= 2 or (bucket.stage == 1 and last):
            self.reducing[name] = reduce_scatter(bucket.grad, bucket.dp, "gradients", out=bucket.grad[low:high])
        elif last:
            self.reducing[name] = all_reduce(bucket.grad, bucket.dp, "gradients")

    def _settle(self, name):
        """Wait for a bucket's sum. In stages 2 and 3 add this rank's shard to `own_grad`, and free the whole."""
        bucket = self.buckets[name]
        shard = self.reducing.pop(name).wait()
        if bucket.stage >= 2:
            bucket.own_grad.add_(shard)
            free(bucket.grad)

    # --- finish: after all backwards ---------------------------------------------------------------------------------

    def finish(self):
        """Wait for all sums over dp. Then sum what is left of a buffer over the ranks that hold the same parameters.

        A tied table is held by several pipeline ranks: its gradient is summed over them. Under sequence parallelism
        each tp rank has seen only its own tokens. So the gradient of a parameter that is replicated over tp (6 h
        numbers a block) is partial, and is summed over tp. The order of sums does not matter: each is done where its
        buffer is smallest.
        """
        for name in list(self.reducing):
            self._settle(name)
        by_name = [self.buckets[name] for name in sorted(self.buckets)]  # in one order, whatever chunks a rank has
        sums = [all_reduce(bucket.own_grad, bucket.holders, "twin gradients") for bucket in by_name]
        for pending in sums:
            pending.wait()
        if self.config.sequence_parallel:
            sums = [
                all_reduce(bucket.own_grad[r.begin : r.end], self.mesh.tp, "partial gradients")
                for bucket in self.buckets.values()
                for r in bucket.ranges
                if not r.cut
            ]
            for pending in sums:
                pending.wait()

    # --- squared_norm ------------------------------------------------------------------------------------------------

    def counts(self, bucket, cut):
        """True on exactly one rank of those that hold a copy of a range, so that the norm counts each element once.

        For a LayerNorm: tp rank 0 of the first holder, there data rank 0 or, from stage 1 on, the owner of the shard.
        """
        first_of_dp = bucket.stage >= 1 or bucket.dp.rank == 0
        return first_of_dp and bucket.holders.rank == 0 and (cut or self.mesh.tp.rank == 0)

    def squared_norm(self):
        """This rank's share of the squared global gradient norm: each logical element counts on one rank. float64 [].

        Not finite if anything on this rank is not, counted or not (0 times infinity is nan): then all skip the step.
        The buckets' squares are added in float64, so that a large loss scale does not overflow their sum.
        """
        pieces = self._counted_pieces()
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        if self.counted is None:  # built once: a host-to-device copy synchronizes
            self.counted = torch.tensor([counts for _, counts in pieces], dtype=torch.float64, device=self.device)
        return (self.ops.squared_norms([piece for piece, _ in pieces]) * self.counted).sum()

    def _counted_pieces(self):
        """[(consecutive ranges of a gradient that this rank owns, whether they count here)]."""
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
        offload = self.config.offload
        shards = []
        for bucket in self.buckets.values():
            gradient = bucket.own_grad.to(bucket.master.device)  # a copy if offloaded
            cast = None if bucket.own_param is bucket.master else bucket.own_param
            buffers = bucket.master, gradient, bucket.moments
            shards.append(optimizer.Shard(*buffers, bucket.ranges, bucket.pieces, cast))
        there = reference.UpdateScalars(*(x.to("cpu" if offload else self.device) for x in scalars))
        optimizer.update(self.config, shards, there, reference if offload else self.ops, self.tensor_norms)
        self.updates += ~scalars.skip

    def publish(self):
        """Give every rank the new parameters: all-gather the shards (stages 1 and 2)."""
        gathers = [
            all_gather(bucket.own_param, bucket.dp, "parameters", out=bucket.param)
            for bucket in self.buckets.values()
            if bucket.stage in (1, 2)
        ]
        for pending in gathers:
            pending.wait()

    def tensor_norms(self, tensors):
        """|weight| and |gradient buffer| of whole parameter tensors, float64 [number of them, 2].

        tensors: [(Shard, Piece)], every parameter of this rank's buckets in order. A shard may cut a tensor in two, and
        tp cuts most: squares are added over both.
        """
        squares = torch.zeros(len(tensors), 2, dtype=torch.float64, device=tensors[0][0].weight.device)
        for i, (shard, piece) in enumerate(tensors):
            if piece.spec.tp_dim is not None or self.mesh.tp.rank == 0:
                for k, x in enumerate((shard.weight, shard.gradient)):
                    squares[i, k] = torch.linalg.vector_norm(piece.of(x)).double() ** 2
        squares = squares.to(self.device)
        if self.config.zero >= 1:
            squares = all_reduce(squares, self.mesh.dp, "parameter norms").wait()
        squares = all_reduce(squares, self.mesh.tp, "parameter norms").wait()
        self._agree_with_holders(squares, [piece.spec for _, piece in tensors])
        return squares.sqrt()

    def _agree_with_holders(self, squares, specs):
        """Give all pipeline ranks that hold a tensor the first holder's norms.

        All holders add the same squares, but perhaps in another order, so their sums may differ by a rounding. Then the
        copies of a weight would drift apart.
        """
        shared = {}  # Axis of holders: rows of `squares`
        for i in sorted(range(len(specs)), key=lambda i: specs[i].name):
            holders = self.buckets[specs[i].bucket].holders
            if holders.size > 1:
                shared.setdefault(holders, []).append(i)
        for holders, rows in sorted(shared.items(), key=lambda item: item[0].ranks):
            first = squares[rows] if holders.rank == 0 else torch.zeros_like(squares[rows])
            squares[rows] = all_reduce(first, holders, "parameter norms").wait()
