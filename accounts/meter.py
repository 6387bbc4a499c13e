"""Measure the bytes that one rank keeps in a run. `memory.py` predicts the same bytes.

After each action, `Activations` adds up the tensors that autograd has saved for backward, and those that the executor
keeps. A storage counts once. Parameters do not count.

On the CPU, without --delay, the measured bytes equal the formulas exactly. Otherwise there are two differences:

    - The formula counts the last two sent messages. NCCL, and --delay, may report sooner that they are sent.
    - On a GPU, fused attention keeps the state of its random generator, and padded copies if its kernel does not
      support the head size.
"""

import weakref
from contextlib import contextmanager

import torch

from accounts.memory import PEAK, RECOMPUTED, WHOLE
from accounts.meta import storage_id
from parallel.schedules import Action
from parallel.watch import Tool

STATES = ("parameters", "gradients", "master weights", "moments")


def flat_buffers(zero):
    """Yield (row of STATES, buffer). Two buffers may be one storage, as fp32's master weights."""
    for b in zero.buckets.values():
        grads = [b.grad.whole, b.grad.shard] if b.grad else []
        flats = [b.param.whole, b.param.shard], grads, [b.master], b.moments
        yield from ((what, x) for what, tensors in zip(STATES, flats, strict=True) for x in tensors)


def measured_states(zero):
    """Return {what: bytes} of a `Zero`'s buffers."""
    table, storages = dict.fromkeys(STATES, 0), set()
    for what, flat in flat_buffers(zero):
        table[what] += flat.untyped_storage().nbytes() * (storage_id(flat) not in storages)
        storages.add(storage_id(flat))
    return table


def kept_by(executor):
    """Yield the tensors that a `pipeline.Executor` keeps between two actions."""
    mail = executor.step.mail
    yield from (x for units in executor.activations.values() for pair in units for x in pair if x is not None)
    yield from (x for products in executor.deferred.values() for product in products for x in (product.dy, product.x))
    yield from executor.local.values()
    yield from (pending.result for pending in [*mail.arriving.values(), *(sent for sent, _ in mail.leaving)])


def unpack(packed):
    """Return a saved tensor. Raises RuntimeError if it was changed in place: with hooks, autograd does not check it."""
    alias, version = packed
    if alias._version != version:
        text = "one of the variables needed for gradient computation has been modified by an inplace operation"
        which = f"[{alias.type()} {list(alias.shape)}] is at version {alias._version}; expected version {version}"
        raise RuntimeError(f"{text}: {which} instead")
    return alias


class Activations(Tool):
    """Context: measures the activations that this rank keeps in a step."""

    def __init__(self, executor):
        self.executor = executor
        self.saved = {}  # {id of an alias: (storage, bytes, phase of the step that saved it)}
        self.current = self.peak = self.recomputed = self.whole = 0  # bytes

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)
        self.hooks.__enter__()
        self.executor.watch.tools.append(self)
        return self

    def __exit__(self, *error):
        self.executor.watch.tools.remove(self)
        self.hooks.__exit__(*error)

    def rows(self):
        """Return the rows of activations in `memory.predict_kept`."""
        table = {WHOLE: self.whole, PEAK: self.peak, RECOMPUTED: self.recomputed}
        return {what: count for what, count in table.items() if count or what == PEAK}

    @contextmanager
    def span(self, phase, subject):
        """Measure the whole gradients before a sum starts, when they are most, and the activations after an action."""
        if phase == "reduce":
            grads = [bucket.grad.whole for bucket in self.executor.zero.in_order if bucket.grad.sharded]
            self.whole = max(self.whole, sum(grad.untyped_storage().nbytes() for grad in grads))
        yield
        if isinstance(subject, Action):
            self.count()

    def pack(self, tensor):
        """Return an alias of `tensor` and its version, for `unpack`. The alias lives only as long as the graph.

        In a recomputation, also count the tensors that the block has saved so far.
        """
        alias, phase = tensor.detach(), self.executor.watch.phase
        self.saved[id(alias)] = storage_id(alias), alias.untyped_storage().nbytes(), phase
        weakref.finalize(alias, self.saved.pop, id(alias), None).atexit = False
        if phase == "recompute":
            sizes = {storage: size for storage, size, when in self.saved.values() if when == phase}
            self.recomputed = max(self.recomputed, self.bytes_of(sizes))
        return alias, alias._version

    def count(self):
        sizes = {storage: size for storage, size, _ in self.saved.values()}
        sizes |= {storage_id(x): x.untyped_storage().nbytes() for x in kept_by(self.executor)}
        self.current = self.bytes_of(sizes)
        self.peak = max(self.peak, self.current)

    def bytes_of(self, sizes):
        """Return the sum of {storage: bytes} without the flat buffers."""
        states = {storage_id(flat) for _, flat in flat_buffers(self.executor.zero)}
        return sum(size for storage, size in sizes.items() if storage not in states)
