"""PipeDream: asynchronous pipelines, which keep old versions of the weights (slide "パイプライン並列": 非同期).

A synchronous pipeline waits at each update until all micro-batches have left it. An asynchronous one does not: while a
rank updates its weights (action U), later micro-batches are between their forward and their backward. Narayanan et al.,
arXiv 1806.03377 (`pipedream`) and 2006.09503 (`pipedream-2bw`). A *call* runs the lists of such a schedule once, with
many updates. At the end of a call the pipeline is empty.

**Versions.** Version v of the parameters contains v updates of this call. A micro-batch needs the same version in its
backward as in its forward; otherwise its backward would not compute the gradient of any function. So U updates the
master weights, and keeps a copy of them as parameters for each version that micro-batches use:

    rank 1 of 3     F0 F1 .. B0 U F2 B1 U F3 B2 U F4 ...
    F uses version   0  0          1       2       3
    B uses version            0       0       1

    micro-batch j of rank r uses version                     versions that a rank keeps
    pipedream        max(j - (p-1-r), 0)                     min(p-r, max(1, M-(p-1-r)))  M: micro-batches of the call
    pipedream-2bw    max(j // m - 1, 0)                      2 at most                    m: micro-batches of an update

**The tied word table** is on the first and the last rank. Both use the version of the first rank, which is the older.
Each U starts to sum the table's gradient. A rank waits for this sum when a forward needs the new version (NOTES.md: why
this cannot deadlock).

**Impossible.** No rank knows the global gradient norm at its update, because other ranks update later. So there is no
clipping, no common decision to skip an update (fp16), and no norm of a cut tensor (LAMB, LARS). ZeRO-2 and 3 would free
the versions that this scheme keeps.

**Not on GPUs yet.** There the first call may deadlock (NOTES.md; `parallel/test_order.py` shows it).
"""

from collections import Counter, deque

import torch

from errors import UserError
from parallel.comm import all_reduce
from parallel.pipeline import METHODS, Executor
from parallel.versions import shared_versions

OLDER, SUMS = "older versions of parameters", "gradients that wait for holders"


class Versions:
    """One bucket on this rank: the versions of its parameters, and its updates in a call.

    flats: {version: flat buffer} of the versions that a micro-batch still needs; at the end of a call, of the last one.
    updated: the number of updates of this call in the master weights. version: that of the nn.Parameters.
    """

    def __init__(self, zero, bucket, holders, buffers):
        """buffers: `Executor.flats`, which receives every buffer that is made here."""
        self.zero, self.bucket, self.holders, self.buffers = zero, bucket, holders, buffers
        if bucket.master is bucket.param.shard:
            bucket.master = torch.zeros_like(bucket.param.shard)
        self.updated, self.flats = 0, {0: bucket.param.whole}
        buffers[OLDER].append(bucket.param.whole)  # older, when another buffer is the latest
        self.spare, self.spare_sums = [], []  # buffers that are free for a version, for a sum

    def _buffer(self, what, spare, like):
        if not spare:
            spare.append(torch.zeros_like(like))
            self.buffers[what].append(spare[-1])
        return spare.pop()

    def begin(self, schedule, scalars, squares):
        self.of_batch = shared_versions(schedule, self.holders)  # the version of each micro-batch
        # {version: number of micro-batches that still need it}. The next call needs the last version.
        self.users = Counter([*self.of_batch, len(scalars)])
        self.updated, self.flats, self.version = 0, {0: self.flats[self.updated]}, 0
        self.scalars, self.squares, self.sums = scalars, squares, deque()

    def show(self, version):
        """Let the nn.Parameters be views of a version."""
        self.catch_up(version)
        if version != self.version:
            self.version = version
            for p, piece in zip(self.bucket.params, self.bucket.layout.pieces(0, self.bucket.size), strict=True):
                p.data = piece.of(self.flats[version]).view(p.shape)

    def release(self, version):
        self.users[version] -= 1
        if not self.users[version]:
            self.spare.append(self.flats.pop(version))

    def start_sum(self):
        flat = self._buffer(SUMS, self.spare_sums, self.bucket.grad.shard)
        flat.copy_(self.bucket.grad.shard)
        self.sums.append(all_reduce(flat, self.bucket.holders, "twin gradients"))
        self.bucket.grad.clear()

    @torch.no_grad()
    def catch_up(self, version):
        """Make updates until the master weights contain `version` of them."""
        bucket, gradient = self.bucket, self.bucket.grad.shard
        for update in range(self.updated, version):
            if summed := bool(self.sums):
                bucket.grad.shard = self.sums.popleft().wait()
            self.squares[update] += self.zero.squared_norm([bucket])
            used = self.users[update + 1] > 0
            if used:  # `.data`: autograd's check for in-place changes must not see that a buffer is used again
                self.flats[update + 1] = self._buffer(OLDER, self.spare, bucket.param.whole)
                bucket.param.whole = self.flats[update + 1].data
            # If no forward uses this version, only the master weights have it.
            bucket.param.shard = bucket.param.whole[slice(*bucket.bounds)] if used else bucket.master
            self.zero.update_buckets([bucket], self.scalars[update])
            if used:
                bucket.publish()
            if summed:
                self.spare_sums.append(bucket.grad.shard)
                bucket.grad.shard = gradient
            else:
                bucket.grad.clear()
        self.updated = max(self.updated, version)


class PipeDream(Executor):
    """Executes the asynchronous schedules. Raises UserError on GPUs with pp > 1."""

    def __init__(self, model, zero, config, mesh, layout, schedule):
        if zero.device.type == "cuda" and config.pp > 1:
            advice = "use another schedule, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
            raise UserError(f"schedule={config.schedule}: on GPUs its first call may deadlock; {advice}")
        super().__init__(model, zero, config, mesh, layout, schedule)
        self.methods = METHODS | {"U": ("update", "update")}
        self.flats = {OLDER: [], SUMS: []}
        buckets = zero.in_order  # the same order on all ranks
        self.versions = [Versions(zero, bucket, layout.holders(bucket.name), self.flats) for bucket in buckets]

    def call(self, batches, count, factor, scalars):
        """Run a call of `count` micro-batches. Return (losses, squares), float64 [updates].

        Arguments as in `Executor.run`, and scalars: [reference.UpdateScalars of each update]. losses: sums of mean
        losses, 0 on ranks without the head. squares: this rank's shares of the squared norms.
        """
        schedule, _, self.passes_of_update = self.prepared(count)
        self.update_losses, squares = [], torch.zeros(len(scalars), dtype=torch.float64, device=self.zero.device)
        for versions in self.versions:
            versions.begin(schedule, scalars, squares)
        self.forwards = count  # forwards that this rank has not begun
        self.run(batches, count, factor)
        for versions in self.versions:
            versions.show(len(scalars))
        self.zero.updates += len(scalars)
        return torch.stack(self.update_losses), squares

    def forward(self, j, c):
        if torch.is_grad_enabled():  # a validation runs between two calls, with the latest version
            self.forwards -= 1
            self._show(j)
        super().forward(j, c)

    def backward(self, j, c, deferred=None):
        self._show(j)
        super().backward(j, c, deferred)
        for versions in self.versions:
            versions.release(versions.of_batch[j])

    def _show(self, j):
        for versions in self.versions:
            versions.show(versions.of_batch[j])

    def update(self, j, c):
        """The action U."""
        self.update_losses.append(self.total)
        self.total, self.passes = torch.zeros_like(self.total), dict(self.passes_of_update)
        self.zero.sum_over_data()
        self.zero.sum_over_tp()
        for versions in self.versions:
            if len(versions.holders) > 1:
                versions.start_sum()
            if len(versions.holders) == 1 or not self.forwards:
                versions.catch_up(len(self.update_losses))
