"""ZeRO: shards three kinds of buffers over the data ranks (slides "データ並列 (DP)" and "ZeRO (FSDP)").

The first forms are `ladder/rung04` to `08`: `free` there is `release` here, the hook is `reduce`.
Rajbhandari et al. (arXiv 1910.02054), section 5. A *bucket* (`layout.py`) has three kinds of flat
buffers. The ZeRO stage selects those that are sharded over the n data ranks. P: elements of a rank's
buckets; m: micro-batches.

    stage   optimizer state   gradients   parameters     sent per step and rank, in units of P (n-1)/n elements
      0     whole             whole       whole          2       all_reduce of gradients
      1     1/n               whole       whole          2       reduce_scatter of gradients, all_gather of parameters
      2     1/n               1/n         whole          m + 1   as stage 1, but gradients after each micro-batch
      3     1/n               1/n         1/n            3m      as stage 2, but parameters before each F and each B

With m = 1 this is 2, 2, 2, 3 (section 7). The calls of a step (of `Zero`; gather to settle:
`Bucket`):

    call           when                    stage 0          1                 2                        3
    zero_grad      at the start            clear            clear             clear 1/n                clear 1/n
    gather         before a unit's F and B -                wait for publish  wait for publish         all_gather
    release        after each              -                -                 -                        free
    open_gradient  before its backward     -                -                 allocate                 allocate
    reduce         after its backward      -                -                 reduce_scatter           reduce_scatter
      ... in the last micro-batch          all_reduce       reduce_scatter    reduce_scatter           reduce_scatter
    settle         before the next use     wait             wait              wait, add, free          wait, add, free
      ... complete, with copies            -                cross: all_reduce of the shard over the copies
    finish         after all backwards     settle all; sum over tp (if needed) and holders (pipeline ranks)
    squared_norm   once                    each element is counted on one rank
    update         once                    everything       1/n               1/n                      1/n
    publish        once                    -                all_gather        all_gather               -

**Hybrid sharding** (`zero_copies=k`; slide "3-D Parallelism": ラック間でデータ並列及びZeRO; Zhang et al., MiCS,
arXiv 2205.00119). ZeRO divides a bucket only over n = dp cp / k consecutive data ranks, such as a
node's. The k groups keep copies. Once in a step, a rank sums its P/n elements over them:
2 P/n (k-1)/k more.

With AdamW in bf16 each parameter needs 18 bytes: parameter 2, gradient 4, master weight 4 (the
float32 copy that the optimizer updates), two moments 8. Stages 1, 2, 3 divide 12, 16, 18 of these
by n. In fp32 the parameters are the master weights: 16 bytes. Gradients accumulate in the master
dtype, float32 (in fp64 runs float64).
"""

import itertools

import torch
from torch import nn

import reference
from errors import UserError
from parallel import optimizer
from parallel.comm import all_gather, all_reduce, reduce_scatter
from parallel.hidden import Views
from parallel.layout import REPLICATED, replica_sums
from parallel.optimizer import RULES
from parallel.tensor import ParamSpec


class Flat:
    """A flat buffer of a bucket. whole: [size]. shard: the elements that this rank updates.

    Not sharded: `shard` is a view into `whole`. Sharded: `shard` is a buffer of its own, and
    `whole` has storage only from `open` to `close`. views: the parameters or their gradients, in
    `whole`. To read hidden ones is an error (`hidden.py`).
    """

    def __init__(self, size, bounds, sharded, dtype, device):
        self.whole = torch.zeros(size, dtype=dtype, device=device)
        self.sharded = sharded
        view = self.whole[slice(*bounds)]
        self.shard = torch.zeros_like(view) if sharded else view
        self.views = Views()

    def open(self):
        """Give `whole` storage. Return True if it had none; then its values are undefined."""
        storage = self.whole.untyped_storage()
        closed = storage.size() == 0
        if closed:
            storage.resize_(self.whole.nbytes)
            self.views.set_hidden(False)
        return closed

    def close(self):
        if self.sharded:
            free(self.whole)
            self.views.set_hidden(True)

    def clear(self):
        (self.shard if self.sharded else self.whole).zero_()
        self.views.set_hidden(self.sharded)


def free(x):
    x.untyped_storage().resize_(0)


class Window:
    """The buckets whose gradients are being summed, the oldest first."""

    MOST = 2  # sums of whole gradients that run while backward fills a third one

    def __init__(self):
        self.buckets = []

    def make_room(self):
        """Wait for the oldest sums, until one more may start."""
        while len(self.buckets) >= self.MOST:
            self.buckets[0].settle()


class Bucket:
    """One bucket on this rank: its flat buffers, and what ZeRO does with them.

    Axes:       the data ranks are cut into `shards`, which divide the bucket, and `copies`, which
                keep the same shard. In stage 0 the whole bucket is the only shard. `holders`: as
                in `layout.py`.
    Buffers:    param and grad (Flat). master (weights), moments, state and master_grad have only
                the elements of this rank's shard, on the device of the optimizer state.
    Elements:   bounds: (begin, end) of this rank's shard. saved: the part of it that this rank
                writes into checkpoints. ranges, pieces: those of the shard (`layout.py`).
    """

    def __init__(self, layout, zero, holders, training):
        """layout: a BucketLayout."""
        self.layout, self.name, self.size = layout, layout.name, layout.size
        self.shards, self.copies, self.tp = zero.shards, zero.copies, zero.mesh.tp
        self.shards_for_sums, self.holders, self.window = zero.shards_for_sums, holders, zero.window
        self.bounds = layout.part(self.shards.rank, self.shards.size)
        part = self.shards.rank * self.copies.size + self.copies.rank
        self.saved = layout.part(part, self.shards.size * self.copies.size)
        self.ranges, self.pieces = layout.ranges_in(*self.bounds), list(layout.pieces(*self.bounds))
        self.gathering = None  # the Pending of the parameters
        self.summing = None  # the Pending of the gradient's sum over `shards`
        self.crossing = None  # the Pending of the shard's sum over `copies`
        self.complete = False  # the sum in progress is the step's last
        self.hybrid = self.shards.size > 1 and self.copies.size > 1
        stage = zero.layout.zero_stage
        self.param = Flat(self.size, self.bounds, stage == 3, zero.dtype, zero.device)
        self.grad, self.master, self.moments, self.state = None, self.param.shard, [], []
        if training:
            self.grad = Flat(self.size, self.bounds, stage >= 2, zero.master_dtype, zero.device)
            state = zero.master_dtype, zero.state_device
            if (zero.dtype, zero.device) != state:
                self.master = torch.zeros(len(self.param.shard), dtype=state[0], device=state[1])
            rule = RULES[zero.config.optimizer]
            self.moments = [torch.zeros_like(self.master) for _ in range(rule.moments)]
            self.state = [torch.zeros_like(self.master) for _ in range(rule.state)]
        self.params = [self._parameter(piece) for piece in layout.pieces(0, self.size)]
        self.param.close()
        if training:
            self.grad.close()

    def _parameter(self, piece):
        """Return an nn.Parameter. It and its `.grad` are views: backward adds to the flat buffer."""
        shape = piece.spec.local_shape(self.layout.tp)
        p = nn.Parameter(piece.of(self.param.whole).view(shape), requires_grad=not piece.spec.frozen)
        p.spec, p.deferred = piece.spec, None
        if self.grad is not None:
            p.grad_dtype = self.grad.whole.dtype
            p.grad = piece.of(self.grad.whole).view(shape)
            p.grad.spec = p.spec
            self.grad.views.append(p.grad)
        self.param.views.append(p)
        return p

    # --- parameters -------------------------------------------------------------------------------

    def start_gather(self):
        """Start the all-gather of the parameters (stage 3)."""
        if self.param.sharded and not self.gathering:
            self.param.open()
            # Autograd refuses saved tensors that change. `.data` hides the gather of equal values.
            out = self.param.whole.data
            self.gathering = all_gather(self.param.shard, self.shards, "parameters", out)

    def gather(self):
        """Wait until the parameters are whole."""
        self.start_gather()
        if self.gathering:
            self.gathering.wait()

    def release(self):
        """Free the whole parameters (stage 3)."""
        if self.param.sharded:
            self.gathering = None
            self.param.close()

    # --- the gradient -----------------------------------------------------------------------------

    def open_gradient(self):
        self.settle()  # a buffer must not change while it is sent
        if self.grad.open():
            self.grad.whole.zero_()

    def defer_to(self, products):
        """Let linears append their `WeightGradient`s to a list. None: compute at once."""
        for p in self.params:
            p.deferred = products

    def reduce(self, last):
        """Start to sum the gradient over the data ranks. last: it is complete for this step."""
        if not (self.grad.sharded or last):
            return
        if self.grad.sharded or self.hybrid:
            self.window.make_room()
        self.complete = last
        if self.shards.size == 1:
            self.summing = all_reduce(self.grad.whole, self.copies, "gradients")
        else:
            shard = self.grad.whole[slice(*self.bounds)]
            axis = self.shards_for_sums
            self.summing = reduce_scatter(self.grad.whole, axis, "gradients", out=shard)
        self.window.buckets.append(self)

    def settle(self):
        """Wait for the sum, if one runs. Stages 2, 3: add it to `grad.shard`, free `grad.whole`."""
        if not self.summing:
            return
        shard = self.summing.wait()
        self.summing = None
        self.window.buckets.remove(self)
        if self.grad.sharded:
            self.grad.shard.add_(shard)
            self.grad.close()
        if self.complete:
            self.cross()

    def cross(self):
        """Hybrid sharding: start to sum the shard over the copies, once in a step."""
        if self.hybrid and not self.crossing:
            self.crossing = all_reduce(self.grad.shard, self.copies, "gradients")

    # --- the update -------------------------------------------------------------------------------

    def counts(self, r):
        """Return True on the one rank that counts the elements of a Range in the norm."""
        return self.copies.rank == self.holders.rank == 0 and (r.cut or self.tp.rank == 0)

    @property
    def scaled_gradient(self):
        """The gradient of this rank's shard, after `Zero.finish`: times the loss scale, 1 except in fp16."""
        return self.grad.shard

    def publish(self):
        """Start to all-gather the new parameters (stages 1 and 2)."""
        if not self.param.sharded:
            out = self.param.whole
            self.gathering = all_gather(self.param.shard, self.shards, "parameters", out)


def pinned(x):
    """Return x in memory that a GPU copies directly."""
    return x.pin_memory()


def wait_for(communications):
    """Wait for Pendings, except None."""
    for pending in filter(None, communications):
        pending.wait()


class Zero:
    """This rank's buckets, and the calls of a step for all of them.

    training: False for parameters only.
    """

    def __init__(self, model, layout, config, mesh, dtype, device, ops=reference, training=True):
        """Make the buckets, and replace each ParamSpec of this rank's units by its nn.Parameter."""
        self.layout, self.config, self.mesh, self.ops = layout, config, mesh, ops
        self.dtype, self.device = dtype, torch.device(device)
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        # offload (Ren et al., ZeRO-Offload, arXiv 2101.06840): the optimizer's buffers are on the CPU
        self.state_device = torch.device("cpu") if config.offload else self.device
        self.updates = torch.zeros((), dtype=torch.int64, device=device)  # without skipped steps
        self.window, self.unequal = Window(), []
        self.shards, self.copies = mesh.cut_data(layout.shards)
        # a group of its own: a sum must not delay the next gather
        self.shards_for_sums = mesh.second(self.shards) if layout.zero_stage == 3 else self.shards
        layout.check_holders()
        layouts = layout.buckets(mesh.pp.rank)
        # sorted: all holders of a bucket need the same order of calls
        holders = {name: mesh.holders(layout.holders(name)) for name in sorted(layouts)}
        self.buckets = {  # each frees its whole buffers before the next
            name: Bucket(bucket, self, holders[name], training) for name, bucket in layouts.items()
        }
        self.in_order = [self.buckets[name] for name in sorted(layouts)]
        params = {p.spec: p for bucket in self.in_order for p in bucket.params}
        numbers = [unit for chunk in layout.chunks(mesh.pp.rank) for unit in layout.units[chunk]]
        for module in (module for unit in numbers for module in model.units[unit].modules()):
            for key, spec in list(vars(module).items()):
                if isinstance(spec, ParamSpec):
                    setattr(module, key, params[spec])

    @torch.no_grad()
    def initialize(self, seed):
        """Draw the initial weights whole, then cut them over tp, then into shards."""
        for bucket in self.in_order:
            for piece in bucket.pieces:
                if piece.begin < piece.end:
                    local = piece.spec.local_part(piece.spec.initial(seed), bucket.tp).flatten()
                    piece.of(bucket.master).copy_(local[piece.begin : piece.end])
        self.parameters_from_master()

    @torch.no_grad()
    def parameters_from_master(self):
        self.finish_gathers()
        self.copy_masters()
        self.publish()

    def copy_masters(self):
        """Copy each bucket's `master` to `param.shard`, where they are two tensors."""
        for bucket in self.in_order:
            if bucket.param.shard is not bucket.master:
                offloaded = self.state_device != self.device
                weights = pinned(bucket.master.to(self.dtype)) if offloaded else bucket.master
                bucket.param.shard.copy_(weights, non_blocking=True)

    def zero_grad(self):
        for bucket in self.in_order:
            bucket.grad.clear()
            for p in bucket.params:
                if p.requires_grad == p.spec.frozen:  # the optimizer would not see it
                    raise UserError(f"{p.spec.name}: freeze it in `units`, by `units.freeze`, not by requires_grad_")

    # --- finish: after all backwards --------------------------------------------------------------

    def finish(self):
        """Complete all gradients, first over the data ranks. Then other sums need only shards."""
        self.sum_over_data()
        self.sum_over_tp()
        self.sum_over_holders()
        for bucket in self.in_order:
            bucket.grad.views.set_hidden(bucket.shards.size > 1)  # only the shard is summed

    def sum_over_data(self):
        for bucket in [*self.window.buckets]:
            bucket.settle()
        for bucket in self.in_order:
            bucket.cross()  # a bucket without a backward on this rank
        wait_for([bucket.crossing for bucket in self.in_order])
        for bucket in self.in_order:
            bucket.crossing = None

    def sum_over_tp(self):
        """Sum the gradients of replicated parameters over tp (`layout.replica_sums` says why).

        REPLICATED ones: all take tp rank 0's, the others add 0 times theirs. unequal: how far these
        were from it (`replicas.py` refuses more than rounding).
        """
        tp, started, equal = self.mesh.tp, [], []
        for bucket in self.in_order:
            for r in bucket.ranges:
                if what := replica_sums(self.config, self.mesh.data.size, r):
                    part = bucket.grad.shard[r.begin : r.end]
                    if what == REPLICATED:
                        equal.append((bucket.name, part, part.clone()))
                        if tp.rank > 0:
                            part.mul_(0)  # 0 times inf or nan is nan: all ranks skip the step
                    started.append(all_reduce(part, tp, what))
        wait_for(started)
        self.unequal = [(name, (x - before).norm() / x.norm()) for name, x, before in equal]

    def sum_over_holders(self):
        """Sum over a bucket's pipeline ranks: of the tied word table, in Chimera of all."""
        wait_for([all_reduce(b.grad.shard, b.holders, "twin gradients") for b in self.in_order])

    def squared_norm(self):
        """Return this rank's share of the squared gradient norm, float64 [].

        An inf or nan makes it inf or nan, even in a gradient that does not count. float64: a large
        loss scale must not overflow the sum.
        """
        counted, others = [], []  # slices of gradients
        for bucket in self.in_order:
            for counts, group in itertools.groupby(bucket.ranges, bucket.counts):
                ranges = list(group)
                slices = counted if counts else others
                slices.append(bucket.scaled_gradient[ranges[0].begin : ranges[-1].end])
        if counted:
            total = self.ops.squared_norms(counted).sum()
        else:
            total = torch.zeros((), dtype=torch.float64, device=self.device)
        if others:
            total = total + 0 * self.ops.squared_norms(others).sum()
        return total

    @torch.no_grad()
    def update(self, scalars):
        """Update this rank's shards, unless scalars.skip (`reference.UpdateScalars`)."""
        self.finish_gathers()
        for bucket in self.in_order:  # from a GPU to the CPU: into pinned memory
            bucket.master_grad = bucket.scaled_gradient.to(self.state_device, non_blocking=True)
        # With offload, this copy waits for the GPU. Then gradients have arrived, too.
        scalars = reference.UpdateScalars(*(x.to(self.state_device) for x in scalars))
        ops = reference if self.config.offload else self.ops
        optimizer.update(self.config, self.in_order, scalars, ops, self.device)
        self.copy_masters()
        self.updates += ~scalars.skip

    def publish(self):
        for bucket in self.buckets.values():  # in the order of forward
            bucket.publish()
            bucket.param.views.set_hidden(bucket.shards.size > 1)  # until they are gathered

    def whole_parameters(self):
        """Yield this rank's new parameters, whole (with tp its slice). All data ranks must call it."""
        for bucket in self.buckets.values():
            bucket.gather()
            bucket.param.views.set_hidden(False)
            try:
                yield from bucket.params
            finally:
                bucket.release()

    def finish_gathers(self):
        """Wait until all parameters are whole (stages 0 to 2)."""
        wait_for([bucket.gathering for bucket in self.in_order])
