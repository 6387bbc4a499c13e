"""The memory account's meter: the bytes that one rank really keeps in a run, beside which `memory.py` has the formulas.

`model_states` adds up the storages that the flat buffers really have. `Activations` counts every tensor that autograd
saves. The executor tells it about the others: inputs and outputs of units, operands of W, buffers of messages. A
storage counts once, for as long as any such tensor lives; parameters do not count.

On the CPU both equal the formulas to the byte, except:

    - a sent message counts, by formula, until IN_TRANSIT more have been sent; NCCL may tell sooner that it has left
    - chunks on one rank share the row numbers that dropout masks are made of; the formula counts them for each chunk
    - with sequence parallelism an I may be done with these row numbers before its peak

On a GPU, fused attention keeps a little more: its generator's state, and padded copies for head sizes that its kernel
lacks.
"""

import weakref

import torch

from parallel.pipeline import Unwatched


def buffers(bucket):
    """The flat buffers of a `zero.Bucket` by what they hold. Where two share a storage, it is the first one's."""
    table = {
        "parameters": [bucket.param, bucket.own_param],
        "gradients": [bucket.grad, bucket.own_grad],
        "master weights": [bucket.master],
        "moments": bucket.moments,
    }
    return {what: [flat for flat in flats if flat is not None] for what, flats in table.items()}


def identity(tensor):
    """A key for a tensor's storage. (Its address will not do: a storage that is resized to 0 has none.)"""
    return tensor.untyped_storage()._cdata


def model_states(zero):
    """{what: bytes} of the storages behind a `Zero`'s buffers, each once, as they are now: to be called at rest."""
    table, seen = {}, set()
    for bucket in zero.buckets.values():
        for what, flats in buffers(bucket).items():
            table.setdefault(what, 0)
            for flat in flats:
                if identity(flat) not in seen:
                    seen.add(identity(flat))
                    table[what] += flat.untyped_storage().nbytes()
    return table


class Activations:
    """A meter of what this rank keeps for backward; `current` and `peak` in bytes. After a step it is back at 0.

        with Activations(run.executor) as meter:
            train_step(run, batches)
        meter.peak

    Within `with`, autograd hands every tensor that it saves to `pack` (torch.autograd.graph.saved_tensors_hooks), and
    the executor calls `hold` and `forget`. The step's numbers stay the same, to the bit. A tensor counts while it
    lives: a weak reference notices its end.
    """

    def __init__(self, executor):
        self.executor, all_buckets = executor, executor.zero.buckets.values()
        self.left_out = {
            identity(flat) for bucket in all_buckets for flats in buffers(bucket).values() for flat in flats
        }
        self.storages = {}  # identity: [tensors that count on it, bytes]
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
        """What autograd keeps in `tensor`'s place: an alias, which dies when the graph lets go of it.

        Not the tensor itself, which may be wanted elsewhere for longer, and saved again in a later version.
        """
        alias = tensor.detach()
        alias.version = tensor._version
        self.hold(alias)
        return alias

    def unpack(self, alias):
        """The saved tensor. Where there are hooks, it is theirs to notice that it was changed in place meanwhile."""
        if alias._version != alias.version:
            raise RuntimeError(f"a tensor {list(alias.shape)} that backward needs was modified by an inplace operation")
        return alias

    def hold(self, *tensors):
        """Count each of these (None: nothing) until it is gone."""
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
        """The storage of `tensor` was freed, though the tensor lives on."""
        if entry := self.storages.get(identity(tensor)):
            self.current -= entry[1]
            entry[1] = 0
