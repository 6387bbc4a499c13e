"""A test mode for `parallel/comm.py`: results come late, and before that their buffers have wrong values (*poison*).

    ADVERSARY=1 pytest test_layouts.py        all processes of the tests communicate in this mode

From a communication's call until `wait`, its buffers belong to it. A program that reads, changes or frees one of them
earlier computes wrong numbers with NCCL. With Gloo on a CPU it mostly passes its tests: small communications are done
at once, and freed memory keeps its values. Gloo also matches messages by tags. NCCL ignores tags: two ranks must post
(start) the messages between them in one order.

The mode replaces torch's six functions that comm.py calls. Each runs its communication on private copies, and returns a
`Late` instead of torch's handle. The program's tensors get the result at `wait`:

    bug                              how it is found
    result read before `wait`        Until `wait` the result is nan. To send a nan is an error. A nan of float32 or
                                     float64 contains the number of its call, and arithmetic keeps this number.
    no `wait`                        The `Late` is destroyed before its `wait`. The next call is an error.
    buffer changed before `wait`     `wait` compares all bytes with those just after the call. Arithmetic in place makes
                                     the signalling nan a quiet nan, which has other bits.
    buffer freed before `wait`       `resize_` of a storage that belongs to an unfinished call is an error.
    memory read before it is         `resize_` fills memory with nan before it is freed, and after it is allocated.
      written
    messages in another order        A message gets another tag: its number among all messages between the two ranks,
                                     and its own tag. So it never meets another one, and PATIENCE ends.
    use of `done` as `wait`          `done` answers False at random. The result stays poison until `wait`.

Each error names the operation, the data, the axis, the rank, and the line of the program that made the call.
"""

import contextlib
import random
import sys
import weakref
from collections import Counter
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import irecv, isend

from parallel import comm, tensor
from parallel.mesh import Axis

all_gather = comm.torch_all_gather  # torch's own

PATIENCE = timedelta(seconds=50)  # of one communication
TAGS = 1000  # more than the program's
NUMBER = 0x3FFFFF  # the bits of a float32 nan that can contain a number
NANS = {  # {dtype: (bits of a signalling nan, shift of the number in it, or None)}
    torch.float64: (0x7FF << 52, 29),  # a conversion to float32 keeps the number
    torch.float32: (0x7F8 << 20, 0),
    torch.bfloat16: (0x7FBF, None),
    torch.float16: (0x7DFF, None),
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # {bytes of an element: dtype}


class Caught(AssertionError):
    """A rule of the table was broken."""


class Adversary:
    """The state of the mode on this rank. seed: of the answers of `done`."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.names = [""]  # of all calls, by their numbers
        self.travelling = weakref.WeakSet()  # the `Late`s before their `wait`
        self.dropped = []  # (name, handle, buffers) of calls whose `Late` was destroyed before its `wait`
        self.messages = Counter()  # {(group, peer): messages so far}

    def refuse_dropped(self):
        if self.dropped:
            raise Caught(f"without `wait`: {self.dropped[0][0]}. Its `Pending` was destroyed before `wait`")

    def refuse_poison(self, name, x):
        wrong = x[x.isnan()] if x.is_floating_point() else x[:0]
        if wrong.numel():
            number = wrong[:1].float().view(torch.int32).item() & NUMBER
            if 0 < number < len(self.names) and x.element_size() >= 4:
                raise Caught(f"read before `wait`: the result of {self.names[number]}. Its poison is sent by {name}")
            unfinished = "; ".join(late.name for late in self.travelling) or "none"
            cause = "a result was read before `wait`, or memory before it was written"
            raise Caught(f"nan is sent by {name}: {cause}. Calls without `wait` so far: {unfinished}")


class Late:
    """Stands in for torch's handle of a communication. The result appears at `wait`. call: torch's function."""

    waits = False  # True from the call until `wait`

    def __init__(self, here, call, arguments, group, tag):
        """Start the communication on private copies, and poison the result."""
        here.refuse_dropped()
        self.here, self.sends = here, call is isend
        self.name, number = name_of_call(group), len(here.names) & NUMBER
        here.names.append(self.name)
        # The first tensor is the result (in a send: the input), the last one the input (in a receive: the result).
        self.tensors = [x.data for x in arguments if isinstance(x, torch.Tensor)]  # .data: autograd sees no write
        self.private = [x.clone() for x in self.tensors]
        others = arguments[len(self.private) :]
        if call is not irecv:
            here.refuse_poison(self.name, self.private[-1])
        if not self.sends:
            poison(self.tensors[0], number)
        if call is all_gather:  # its input may be a slice of the result
            self.tensors[-1].copy_(self.private[-1])
        self.shown, options = [x.clone() for x in self.tensors], {"async_op": True}
        if call in (isend, irecv):
            here.messages[group, others[0]] += 1
            options = {"tag": TAGS * here.messages[group, others[0]] + tag}
        here.travelling.add(self)
        self.work = call(*self.private, *others, group=group, **options)
        self.waits = True  # not if the call itself raises

    def wait(self):
        here = self.here
        for x, shown in zip(self.tensors, self.shown, strict=True):
            if changed := (bits(x) != bits(shown)).sum().item():
                raise Caught(f"changed before `wait`: {changed} of {x.numel()} elements of a buffer of {self.name}")
        here.refuse_dropped()
        self.finish()
        if not self.sends:
            self.tensors[0].copy_(self.private[0])
        self.waits = False
        here.travelling.discard(self)

    def finish(self):
        """Wait for torch's handle."""
        try:
            if not self.work.is_completed():
                self.work.wait(PATIENCE)
        except RuntimeError as error:
            why = "or messages in another order"
            raise Caught(f"not joined by all ranks, {why}: {self.name} ({error})") from None

    def is_completed(self):
        finished = self.here.dice.random() >= 0.5
        if finished:
            self.finish()
        return finished

    def __del__(self):
        if self.waits:
            self.here.dropped.append((self.name, self.work, self.private))


# --- poison -----------------------------------------------------------------------------------------------------------


def bits(x):
    return x.view(BITS[x.element_size()])


def poison(x, number):
    """Fill x with the poison of a call. Integers have none."""
    if x.dtype in NANS:
        nan, place = NANS[x.dtype]
        bits(x).fill_(nan if place is None else nan | number << place)


def resized(adversary):
    """Return the mode's `torch.UntypedStorage.resize_`."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage, size):
        for late in adversary.travelling:
            if any(x.untyped_storage()._cdata == storage._cdata for x in late.tensors):
                raise Caught(f"freed before `wait`: a buffer of {late.name}")
        storage.fill_(255)  # nan in all floating point dtypes
        resize(storage, size)
        return storage.fill_(255)

    return resize_


def name_of_call(group):
    """Return a communication's name: the outermost function in comm.py that knows its axis, and the caller's line."""
    frame = sys._getframe(3)  # the caller of a replaced function
    while frame.f_code.co_filename != comm.__file__:  # a test's mock stands between
        frame = frame.f_back
    call, over = frame, "a group"
    while frame.f_code.co_filename == comm.__file__:
        for x in frame.f_locals.values():
            if isinstance(x, Axis) and x.group is group:
                call, over = frame, x.name
        frame = frame.f_back
    if frame.f_code is tensor.start.__code__:
        frame = frame.f_back
    what = call.f_locals.get("what", "a message")
    place = f"rank {dist.get_rank()}, {Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
    return f"{call.f_code.co_name} of {what} over {over} ({place})"


# --- the mode ---------------------------------------------------------------------------------------------------------


CALLS = [(dist, name) for name in ("all_reduce", "all_to_all_single", "isend", "irecv")]
CALLS += [(comm, "torch_all_gather"), (comm, "torch_reduce_scatter")]


@contextlib.contextmanager
def adversary(seed=0):
    """Switch the mode on in this process."""
    here = Adversary(seed)

    def late(call):
        return lambda *arguments, group, tag=0, async_op=True: Late(here, call, arguments, group, tag)

    with contextlib.ExitStack() as stack:
        for module, name in CALLS:
            stack.enter_context(mock.patch.object(module, name, late(getattr(module, name))))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized(here)))
        yield here


def run(function, *arguments):
    """Call a function in this mode."""
    with adversary(dist.get_rank() if dist.is_initialized() else 0) as here:
        try:
            return function(*arguments)
        except Caught:
            raise
        except Exception:  # any error: a missing `wait` may have caused it
            here.refuse_dropped()
            raise
