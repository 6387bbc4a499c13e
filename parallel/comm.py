"""The one door: everything that one process sends another goes through this file, and a step's tensors are counted.

                 before (ranks 0 | 1)      after                   what one rank sends, of a tensor of N bytes
    all_reduce      a   |  b             a+b  | a+b                2 (n-1)/n N    (a reduce_scatter, an all_gather)
    reduce_scatter  a a'|  b b'          a+b  | a'+b'                (n-1)/n N    N: the whole, before
    all_gather      a   |  b             a b  | a b                  (n-1)/n N    N: the whole, after

    send            a   |  -              a   | a                    N

The right column is the ring algorithm's cost, which is optimal (Patarasuk and Yuan 2009), and what the ledger
counts. Tensors are cut along their first dimension, so that nothing is ever rearranged to be sent.

Each call starts the communication and returns `Pending`; `.wait()` gives the tensor. Between the two the
caller may compute: that is all that "overlap" means here. On NCCL `wait` only orders the GPU's streams, and a peer
that does not answer within the timeout is found by NCCL's watchdog, which ends the process with a message of its own;
on Gloo it blocks, and says who waited for whom. On an axis of one rank nothing happens and nothing is counted.
"""

import functools
from fractions import Fraction

import torch
import torch.distributed as dist

# PyTorch 2.13 renamed these two, and warns at the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}  # times (n-1)/n of the whole tensor
NOT_A_STEP = ("setup", "evaluate")  # phases that `Ledger.per_step` leaves out


class Ledger:
    """Counts calls and bytes by (phase, axis, what, operation). The code that runs a step sets `phase`."""

    def __init__(self):
        self.phase = "setup"
        self.rows = {}

    def count(self, operation, axis, ranks, what, whole_bytes):
        row = self.rows.setdefault((self.phase, axis, what, operation), [0, Fraction(0)])
        row[0] += 1
        row[1] += sent_bytes(operation, ranks, whole_bytes)

    def per_step(self, steps):
        """{(axis, what, operation): (calls, bytes)} of one training step: the sum over phases, divided by `steps`."""
        table = {}
        for (phase, *key), (calls, count) in self.rows.items():
            if phase not in NOT_A_STEP:
                before = table.get(tuple(key), (0, 0))
                table[tuple(key)] = before[0] + Fraction(calls, steps), before[1] + count / steps
        return table


def sent_bytes(operation, ranks, whole_bytes):
    """Bytes that one of `ranks` ranks sends in an operation on a tensor of `whole_bytes`: the table above."""
    return whole_bytes if operation == "send" else Fraction(RING[operation] * (ranks - 1) * whole_bytes, ranks)


class CommunicationError(RuntimeError):
    """A peer did not answer: it died, or takes another path through the program."""


class Pending:
    """A communication on its way. Holds the buffers until it is done."""

    def __init__(self, result, start=None, describe=None):
        self.result, self.describe, self.work = result, describe, None
        if start:
            self.work = self._watched(start)

    def wait(self):
        """The result; on a GPU, ready for what is enqueued from here on."""
        if self.work:
            self._watched(self.work.wait)
            self.work = None
        return self.result

    def done(self):
        return self.work is None or self.work.is_completed()

    def _watched(self, call):
        try:
            return call()
        except RuntimeError as error:
            raise CommunicationError(f"{self.describe()}: {error}") from error


def all_reduce(x, axis, what, op="sum"):
    """Combine `x` elementwise over the axis, in place, on every rank."""
    if axis.size == 1:
        return Pending(x)
    return _collective("all_reduce", axis, what, x, x, functools.partial(dist.all_reduce, x, OPS[op]))


def all_gather(x, axis, what, out=None):
    """[k, ...] on each rank -> [n k, ...], the ranks' parts in order; into `out`, of which x may be a part."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    whole = x.new_empty(axis.size * x.shape[0], *x.shape[1:]) if out is None else out
    return _collective("all_gather", axis, what, whole, whole, functools.partial(_all_gather, whole, x))


def reduce_scatter(x, axis, what, out=None):
    """[n k, ...] on each rank -> [k, ...]: this rank's part of the sum; into `out`, which may be that part of x."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    part = x.new_empty(x.shape[0] // axis.size, *x.shape[1:]) if out is None else out
    return _collective("reduce_scatter", axis, what, x, part, functools.partial(_reduce_scatter, part, x))


def send(x, axis, to, what, tag=0):
    """Send x to the axis's rank `to`. The buffer must live, unchanged, until it is gone: `Pending` holds it."""
    x = x.contiguous()
    axis.ledger.count("send", axis.name, axis.size, what, x.numel() * x.element_size())
    call = functools.partial(dist.isend, x, axis.ranks[to], group=axis.group, tag=tag)
    return Pending(x, call, lambda: f"rank {axis.ranks[axis.rank]} waited for rank {axis.ranks[to]} to take {what}")


def receive(shape, like, axis, source, tag=0):
    """Post the receipt of a tensor of `shape`, and of `like`'s dtype and device, from the axis's rank `source`.

    What two ranks send each other must be posted by both in one order; a tag helps Gloo to tell messages apart.
    """
    x = torch.empty(shape, dtype=like.dtype, device=like.device)
    call = functools.partial(dist.irecv, x, axis.ranks[source], group=axis.group, tag=tag)
    return Pending(x, call, lambda: f"rank {axis.ranks[axis.rank]} waited for rank {axis.ranks[source]} to send")


def _collective(operation, axis, what, whole, result, call):
    axis.ledger.count(operation, axis.name, axis.size, what, whole.numel() * whole.element_size())

    call = functools.partial(call, group=axis.group, async_op=True)
    return Pending(result, call, lambda: f"{_waited(axis)} in {operation} of {what} over {axis.name}")


def _waited(axis):
    others = [rank for i, rank in enumerate(axis.ranks) if i != axis.rank]
    return f"rank {axis.ranks[axis.rank]} waited for ranks {others}"


def agree(axis, error_type, action):
    """Run `action` on every rank; if it raises `error_type` on any, raise the first rank's error on all.

    For what only some ranks can see (a file that one node lacks): nobody is left waiting for a rank that gave up.
    Not counted by the ledger: it is not part of a step.
    """
    error = result = None
    try:
        result = action()
    except error_type as raised:
        error = raised
    for message in gather_objects(None if error is None else str(error), axis):
        if message is not None:
            agreed = error_type(message)
            agreed.agreed = True  # every rank raises it: one of them is enough to tell
            raise agreed from error
    return result


def gather_objects(x, axis):
    """[x of each rank], in order. For small Python objects outside of a step: not counted by the ledger."""
    gathered = [x] * axis.size
    if axis.size > 1:
        try:
            dist.all_gather_object(gathered, x, group=axis.group)
        except RuntimeError as error:
            raise CommunicationError(f"{_waited(axis)} to agree with it: {error}") from error
    return gathered
