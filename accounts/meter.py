"""Measures the bytes that one rank really keeps in a run. `memory.py` predicts the same bytes.

`model_states` adds up the storages of the flat buffers. `Activations` counts every tensor that autograd saves. The
executor reports the tensors that autograd does not save: inputs and outputs of units, operands of W, buffers of
messages. A storage counts once, until the last reported or saved tensor on it is freed. Parameters do not count.

On the CPU the measured bytes equal the formulas exactly, with two exceptions:

    - Dropout needs the index of each row (`MicroBatch.rows`). Chunks on one rank share these indices, but the formula
      counts them for each chunk.
    - With sequence parallelism, the indices may be free before the peak of the action I.

On a GPU there are two more differences:

    - The formula counts the last two sent messages (`pipeline.IN_TRANSIT`). NCCL may report sooner that they are sent.
    - Fused attention keeps the state of its random generator, and padded copies if its kernel does not support the
      head size.
"""

import weakref

import torch

from parallel.pipeline import Unwatched


def buffers(bucket):
    """Return {what: flat buffers} of a `zero.Bucket`. If two names share a storage, it counts for the first."""
    table = {
        "parameters": [bucket.param, bucket.own_param],
        "gradients": [bucket.grad, bucket.own_grad],
        "master weights": [bucket.master],
        "moments": bucket.moments,
    }
    return {what: [flat for flat in flats if flat is not None] for what, flats in table.items()}


def identity(tensor):
    """Return a key for a tensor's storage. Its address cannot be the key: a storage of size 0 has no address."""
    return tensor.untyped_storage()._cdata


def model_states(zero, more=None):
    """Return {what: bytes} of a `Zero`'s buffers. Each storage counts once. Call this function between two steps.

    more: {what: other flat buffers}, as in `Executor.flats`.
    """
    table, seen = {}, set()
    for buffers_of in [*map(buffers, zero.buckets.values()), more or {}]:
        for what, flats in buffers_of.items():
            table.setdefault(what, 0)
            for flat in flats:
                if identity(flat) not in seen:
                    seen.add(identity(flat))
                    table[what] += flat.untyped_storage().nbytes()
    return table


class Activations:
    """Measures what this rank keeps for backward: `current` and `peak`, in bytes. After a step `current` is 0.

        with Activations(run.executor) as meter:
            train_step(run, batches)
        meter.peak

    Within `with`, autograd calls `pack` with every tensor that it saves (torch.autograd.graph.saved_tensors_hooks).
    The executor calls `hold` and `forget`. The meter changes no bit of the step's results. A tensor counts while it
    lives: a weak reference calls `_gone` when the tensor is freed.
    """

    def __init__(self, executor):
        self.executor = executor
        tables = [*map(buffers, executor.zero.buckets.values()), executor.flats]
        self.left_out = {identity(flat) for table in tables for flats in table.values() for flat in flats}
        self.storages = {}  # identity: [number of living tensors, bytes]
        self.current = self.peak = 0

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        self.executor.meter = self
        return self

    def __exit__(self, *error):
        self.executor.meter = Unwatched()
        self.hooks.__exit__(*error)

    def pack(self, tensor):
        """Return an alias that autograd keeps instead of `tensor`. The alias lives until the graph is freed.

        `tensor` itself may live longer, and may be saved again after an in-place change.
        """
        alias = tensor.detach()
        alias.version = tensor._version
        self.hold(alias)
        return alias

    def unpack(self, alias):
        """Return the saved tensor. With hooks, autograd does not check for in-place changes, so this function does."""
        if alias._version != alias.version:
            raise RuntimeError(f"a tensor {list(alias.shape)} that backward needs was modified by an inplace operation")
        return alias

    def hold(self, *tensors):
        """Count each of these tensors as long as it lives. None and the flat buffers are skipped."""
        for tensor in tensors:
            if tensor is None or identity(tensor) in self.left_out:
                continue
            key = identity(tensor)
            if key not in self.storages:
                self.storages[key] = [0, tensor.untyped_storage().nbytes()]
                self.current += self.storages[key][1]
            self.storages[key][0] += 1
            weakref.finalize(tensor, self._gone, key).atexit = False
        self.peak = max(self.peak, self.current)

    def _gone(self, key):
        self.storages[key][0] -= 1
        if self.storages[key][0] == 0:
            self.current -= self.storages.pop(key)[1]

    def forget(self, tensor):
        """Stop counting a storage that was freed although `tensor` still lives."""
        if entry := self.storages.get(identity(tensor)):
            self.current -= entry[1]
            entry[1] = 0
