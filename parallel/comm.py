"""Every tensor that a step sends goes through this file. The ledger counts these tensors.

                 before (ranks 0 | 1)      after                   bytes that each of n ranks sends
    all_reduce      a   |  b             a+b  | a+b                2 (n-1)/n N    N: the tensor
    reduce_scatter  a a'|  b b'          a+b  | a'+b'                (n-1)/n N    N: the input
    all_gather      a   |  b             a b  | a b                  (n-1)/n N    N: the output
    all_to_all      a a'|  b b'          a b  | a'b'                 (n-1)/n N    N: the input
    send            a   |  -              a   | a                    N

N is a size in bytes. The right column is the cost of the ring algorithm, which is optimal
(Patarasuk and Yuan 2009): its all_reduce is a reduce_scatter and then an all_gather. Tensors are
cut along their first dimension. A collective over an axis (a group of ranks, `mesh.Axis`) with one
rank sends and counts nothing.

Each call starts the communication and returns a `Pending`. What the caller computes before its
`.wait()` overlaps with the communication. `agree` and `gather_objects` send small Python objects
outside of a step, uncounted.
"""

import contextlib
import socket
from fractions import Fraction

import torch
import torch.distributed as dist

from errors import UserError, agreed

# PyTorch 2.13 warns about the older names.
torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

# The factor of (n-1)/n N.
RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
NOT_A_STEP = ("setup", "evaluate")


class Ledger:
    """Counts calls and bytes by (phase, axis, what, operation). what: for example "gradients"."""

    def __init__(self):
        self.rows = {}

    def count(self, operation, axis, what, whole):
        """Return the number of such calls so far. whole: the tensor of N bytes."""
        row = self.rows.setdefault((axis.watch.phase, axis.name, what, operation), [0, Fraction(0)])
        row[0] += 1
        row[1] += sent_bytes(operation, axis.size, whole.numel() * whole.element_size())
        return row[0]

    def per_step(self, steps):
        """Return {(axis, what, operation): (calls, bytes)} of the mean step."""
        table = {}
        for (phase, *key), (calls, count) in self.rows.items():
            if phase not in NOT_A_STEP:
                before = table.get(tuple(key), (0, 0))
                table[tuple(key)] = before[0] + Fraction(calls, steps), before[1] + count / steps
        return table


def sent_bytes(operation, ranks, whole_bytes):
    """Return the bytes that a rank sends. whole_bytes: N."""
    if operation == "send":
        return whole_bytes
    return Fraction(RING[operation] * (ranks - 1), ranks) * whole_bytes


def group_options(backend, timeout=None):
    """Return the options of a new group: with NCCL, a CUDA stream of high priority.

    With normal priority, a communication could wait for a matrix product that fills the whole GPU.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout:
        options._timeout = timeout  # torch warns if the options have another timeout than the group
    return options


class CommunicationError(RuntimeError):
    """A peer did not answer: it died, or it did not make the same call."""


class Pending:
    """A communication in progress. It keeps its buffers alive. work: torch's handle, or None."""

    waiting = None  # the Pending that this process waits for; `recovery/hang.py` reads it
    latest = None  # the name of the latest one

    def __init__(self, result, work=None, name=""):
        self.result, self.work, self.name = result, work, name

    def wait(self):
        """Return the result. On a GPU the host goes on; later operations wait."""
        if self.work:
            Pending.waiting = self
            with lost_peer(self.name):
                self.work.wait()
            self.work = Pending.waiting = None
        return self.result

    def done(self):
        return self.work is None or self.work.is_completed()


@contextlib.contextmanager
def lost_peer(name):
    """Raise a CommunicationError if the communication `name` fails."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) or "out of memory" in str(error):
            raise  # an error of this GPU, perhaps of an earlier operation
        raise CommunicationError(f"{name}: {error}") from error


def all_reduce(x, axis, what, op="sum"):
    """Combine `x` elementwise over the axis, in place."""
    if axis.size == 1:
        return Pending(x)
    return collective("all_reduce", axis, what, dist.all_reduce, (x, OPS[op]), whole=x, result=x)


def all_gather(x, axis, what, out=None):
    """Gather [k, ...] of each rank into [n k, ...]. x may lie inside `out`."""
    if axis.size == 1:
        return Pending(x)
    whole = x.new_empty(axis.size * x.shape[0], *x.shape[1:]) if out is None else out
    return collective("all_gather", axis, what, torch_all_gather, (whole, x.contiguous()), whole=whole, result=whole)


def reduce_scatter(x, axis, what, out=None):
    """Return this rank's [k, ...] of the sum of [n k, ...]. `out` may be this rank's rows of x."""
    if axis.size == 1:
        return Pending(x)
    part = x.new_empty(x.shape[0] // axis.size, *x.shape[1:]) if out is None else out
    return collective("reduce_scatter", axis, what, torch_reduce_scatter, (part, x.contiguous()), whole=x, result=part)


def all_to_all(x, axis, what):
    """Send x[i] to rank i of the axis. Return the rows that arrive from the ranks, [n, ...]."""
    if axis.size == 1:
        return Pending(x)
    arrived = torch.empty_like(x)
    return collective("all_to_all", axis, what, dist.all_to_all_single, (arrived, x), whole=x, result=arrived)


def collective(operation, axis, what, call, arguments, whole, result):
    """Count and start a collective. whole: as in `Ledger.count`."""
    number = axis.watch.ledger.count(operation, axis, what, whole)
    name = Pending.latest = f"{axis.waited} in {operation} {number} of {what} over {axis.name}"
    with lost_peer(name):
        work = call(*arguments, group=axis.group, async_op=True)
        return axis.watch.started(Pending(result, work, name), axis, what, operation)


def send(x, axis, to, what, tag=0):
    """Send x to rank `to` of the axis. x must not change or be freed until it is sent."""
    x = x.contiguous()
    axis.watch.ledger.count("send", axis, what, x)
    return _message("send", x, axis, to, what, tag)


def receive(shape, like, axis, source, tag=0):
    """Start to receive a tensor from rank `source`. like: an object with its dtype and device.

    Both ranks of a pair must start a group's messages in one order (`simulation.messages`). Gloo
    matches them by tag.
    """
    x = torch.empty(shape, dtype=like.dtype, device=like.device)
    return _message("receive", x, axis, source, "", tag)


def _message(operation, x, axis, peer, what, tag):
    call, does = dist.irecv, "to send"
    if operation == "send":
        call, does = dist.isend, f"to receive {what}"
    name = Pending.latest = f"rank {axis.ranks[axis.rank]} waited for rank {axis.ranks[peer]} {does}"
    with lost_peer(name):
        work = call(x, axis.ranks[peer], group=axis.group, tag=tag)
        return axis.watch.started(Pending(x, work, name), axis, what, operation, axis.ranks[peer])


def agree(axis, action):
    """Run `action` on every rank. Raise the first rank's UserError, if any, on all ranks.

    So no rank waits for a rank that has stopped. The error names the host if another host has no
    such error.
    """
    error = result = None
    try:
        result = action()
    except UserError as raised:
        error = raised
    errors = gather_objects((error and str(error), f"(on {socket.gethostname()})"), axis)
    several = len({host for _, host in errors}) > 1 and len({message for message, _ in errors}) > 1
    for message, host in errors:
        if message is not None:
            with_host = several and host not in message
            raise agreed(f"{message} {host}" if with_host else message) from error
    return result


def gather_objects(x, axis):
    """Return [x of each rank]."""
    gathered = [x] * axis.size
    if axis.size > 1:
        with lost_peer(f"{axis.waited} to send objects"):
            dist.all_gather_object(gathered, x, group=axis.group)
    return gathered
