"""A test mode for `parallel/comm.py`: results come late, and before that their buffers have wrong values (*poison*).

    ADVERSARY=1 pytest test_layouts.py        all processes of the tests communicate in this mode

**Why a CPU hides these bugs.** A communication runs beside the computation, from its call until `wait`. During this
time its buffers belong to it. A program breaks this rule if it reads a result, or changes or frees a buffer, before
`wait`. With NCCL on GPUs it then computes with wrong numbers. With Gloo on a CPU it mostly passes its tests:

- The tensors of a test are small. A communication is often done before the next line of Python runs.
- Memory that is freed and allocated again often still has its old values.
- Gloo matches a send and a receive by their tags. NCCL ignores tags: two ranks must post (start) the messages between
  them in one order. Otherwise a message goes to the wrong receive, or both ranks wait for ever.

**How the mode shows them.** The program does not change. The mode replaces torch's six functions that comm.py calls.
Each runs its communication at once, in a thread, on private copies of the tensors, and returns a `Late` instead of
torch's handle. The program's own tensors stay without the result until `wait`:

    bug                              how it is found
    result read before `wait`        Until `wait` the result is poison: nan. A later call that would send a nan is an
                                     error. A nan of float32 or float64 contains the number of its call. Arithmetic
                                     keeps this number. So the error can name the call whose result was read.
    no `wait`                        The `Late` is destroyed before its `wait`. The next call is an error.
    buffer changed before `wait`     `wait` compares all bytes with those just after the call. The nan is a signalling
                                     nan: arithmetic in place makes it a quiet nan, which has other bits.
    buffer freed before `wait`       `resize_` of a storage that belongs to an unfinished call is an error.
    memory read before it is         `resize_` fills memory with nan before it is freed, and after it is allocated.
      written
    messages in another order        Each rank has one thread for each group and peer. It runs the messages one by one,
                                     in the order of posting. Before each message, both ranks exchange its direction,
                                     tag and size. If these do not match, it is an error.
    use of `done` as `wait`          `done` answers False at random (from a seed). Otherwise it waits up to a second and
                                     answers truly. The result stays poison until `wait`.

A call may use one buffer as input and as result. The buffer of all_reduce is a result. If the input of all_gather is a
slice of the result, this slice keeps its values. If the result of reduce_scatter is a slice of the input, only this
slice is poison.

Each error names the operation, the data, the axis, the rank, and the line of the program that made the call.
"""

import contextlib
import random
import sys
import weakref
from concurrent import futures
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import irecv, isend

from parallel import comm, tensor

all_gather = comm._all_gather  # like `irecv` and `isend`, the true function also within the mode

PATIENCE = 50  # seconds that one communication may take, also on a busy machine
MOMENT = 1  # seconds that `done` waits at most, if it does not answer False at once
NUMBER = 0x3FFFFF  # the bits of a float32 nan that can contain a number
NANS = {  # {dtype: (bits of a signalling nan, place of the number in it, or None)}
    torch.float64: (0x7FF << 52, 29),  # a conversion to float32 keeps the bits of the number
    torch.float32: (0x7F8 << 20, 0),
    torch.bfloat16: (0x7FBF, None),
    torch.float16: (0x7DFF, None),
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # {bytes of an element: dtype}


class Caught(AssertionError):
    """The program uses a buffer that belongs to a communication, or posts its messages in a wrong order."""


class Adversary:
    """The state of the mode on this rank. seed: for the random answers of `done`."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.names = [""]  # of all calls, by their numbers
        self.travelling = weakref.WeakSet()  # the `Late`s that were not waited for
        self.dropped = []  # names of calls whose `Late` was destroyed before its `wait`
        self.threads = {}  # {(process group, peer or None): its executor with one thread}
        self.failed = futures.Future()  # gets the first error of a thread

    def refuse_dropped(self):
        if self.dropped:
            raise Caught(f"without `wait`: {self.dropped[0]}. Its `Pending` was destroyed before `wait`")

    def refuse_poison(self, name, x):
        """Raise Caught if a call sends poison."""
        wrong = x[x.isnan()] if x.is_floating_point() else x[:0]
        if wrong.numel():
            number = wrong[:1].float().view(torch.int32).item() & NUMBER
            if 0 < number < len(self.names) and x.element_size() >= 4:
                raise Caught(f"read before `wait`: the result of {self.names[number]}. Its poison is sent by {name}")
            unfinished = "; ".join(late.name for late in self.travelling) or "none"
            cause = "a result was read before `wait`, or memory before it was written"
            raise Caught(f"nan is sent by {name}: {cause}. Calls without `wait` so far: {unfinished}")

    def submit(self, key, work, *arguments):
        """Run `work(*arguments)` in the thread `key`, after all earlier work of this thread. Return its Future."""
        thread = self.threads.setdefault(key, futures.ThreadPoolExecutor(1))
        return thread.submit(self._watched, work, *arguments)

    def _watched(self, work, *arguments):
        if self.failed.done():
            return self.failed.result()  # raises the first error again
        try:
            return work(*arguments)
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise


class Late:
    """Replaces torch's handle of a communication. The result appears at `wait`.

    call: torch's function. arguments: those of the call; the tensors among them come first.
    """

    waits = False  # True from the call until `wait`

    def __init__(self, here, call, arguments, group, tag):
        here.refuse_dropped()
        self.here, self.sends = here, call is isend
        self.name, number = name_of_call(), len(here.names) & NUMBER
        here.names.append(self.name)
        # The first tensor is the result, except in a send. The last tensor is the input, except in a receive.
        # Autograd does not see the writes of NCCL. `.data` hides ours from it, too.
        self.tensors = [x.data for x in arguments if isinstance(x, torch.Tensor)]
        self.private = [x.clone() for x in self.tensors]
        others = arguments[len(self.private) :]
        if call is not irecv:
            here.refuse_poison(self.name, self.private[-1])
        if not self.sends:
            poison(self.tensors[0], number)
        if call is all_gather:
            self.tensors[-1].copy_(self.private[-1])
        self.shown = [x.clone() for x in self.tensors]
        here.travelling.add(self)
        self.waits = True
        if call in (isend, irecv):
            peer = others[0]
            self.work = here.submit((group, peer), message, self.name, self.private[0], self.sends, peer, tag, group)
        else:
            self.work = here.submit((group, None), collective, call, [*self.private, *others], group)

    def wait(self):
        here = self.here
        for x, shown in zip(self.tensors, self.shown, strict=True):
            changed = (bits(x) != bits(shown)).sum().item()
            if changed:
                raise Caught(f"changed before `wait`: {changed} of {x.numel()} elements of a buffer of {self.name}")
        here.refuse_dropped()
        futures.wait([self.work, here.failed], PATIENCE, futures.FIRST_COMPLETED)
        ended = here.failed if here.failed.done() else self.work
        if not ended.done():
            raise Caught(f"not joined by all ranks after {PATIENCE} seconds: {self.name}")
        ended.result()  # raises the first error of any thread
        if not self.sends:
            self.tensors[0].copy_(self.private[0])
        self.waits = False
        here.travelling.discard(self)

    def is_completed(self):
        return self.here.dice.random() >= 0.5 and bool(futures.wait([self.work], MOMENT).done)

    def __del__(self):
        if self.waits:
            self.here.dropped.append(self.name)


# --- communication on private copies ----------------------------------------------------------------------------------


def collective(call, arguments, group):
    call(*arguments, group=group)


def message(name, x, sends, peer, tag, group):
    """Send x to rank `peer`, or receive it. Both ranks first tell each other which message they run."""
    ours = torch.tensor([sends, tag, x.numel()])
    theirs = torch.empty_like(ours)
    sending = isend(ours, peer, group=group)
    dist.recv(theirs, peer, group=group)
    sending.wait()
    if theirs.tolist() != [not sends, tag, x.numel()]:
        here, there = (
            f"{'send' if s else 'receive'} of {n} elements, tag {t}" for s, t, n in (ours.tolist(), theirs.tolist())
        )
        raise Caught(f"in another order: {name}. This rank runs its {here}, and rank {peer} runs its {there}")
    (dist.send if sends else dist.recv)(x, peer, group=group)


# --- poison -----------------------------------------------------------------------------------------------------------


def bits(x):
    return x.view(BITS[x.element_size()])


def poison(x, number):
    """Fill x with the poison of a call. Integers have none."""
    if x.dtype in NANS:
        nan, place = NANS[x.dtype]
        bits(x).fill_(nan if place is None else nan | number << place)


def resized(adversary):
    """Return a function that replaces `torch.UntypedStorage.resize_`."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage, size):
        for late in adversary.travelling:
            if any(x.untyped_storage()._cdata == storage._cdata for x in late.tensors):
                raise Caught(f"freed before `wait`: a buffer of {late.name}")
        storage.fill_(255)  # nan in all floating point dtypes
        resize(storage, size)
        return storage.fill_(255)

    return resize_


def name_of_call():
    """Return the name of the communication that is called: its function in comm.py, and the caller's line."""
    frame = sys._getframe(3)  # the caller of a replaced function
    while frame.f_code.co_filename == comm.__file__:
        call, frame = frame, frame.f_back
    if frame.f_code is tensor.start.__code__:
        frame = frame.f_back
    seen = call.f_locals
    what, axis = seen.get("what", "a message"), seen["axis"]
    place = f"rank {axis.ranks[axis.rank]}, {Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
    return f"{call.f_code.co_name} of {what} over {axis.name} ({place})"


# --- the mode ---------------------------------------------------------------------------------------------------------


CALLS = [(dist, name) for name in ("all_reduce", "all_to_all_single", "isend", "irecv")]
CALLS += [(comm, "_all_gather"), (comm, "_reduce_scatter")]


@contextlib.contextmanager
def adversary(seed=0):
    """Switch the mode on in this process."""
    here, ended = Adversary(seed), False

    def late(call):
        return lambda *arguments, group, tag=0, async_op=True: Late(here, call, arguments, group, tag)

    with contextlib.ExitStack() as stack:
        for module, name in CALLS:
            stack.enter_context(mock.patch.object(module, name, late(getattr(module, name))))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized(here)))
        try:
            yield here
            ended = True
        finally:
            for thread in here.threads.values():  # after an error a thread may wait for ever
                thread.shutdown(wait=ended, cancel_futures=not ended)


def run(function, *arguments):
    """Call a function in this mode. testing/workers.py does so if ADVERSARY is set."""
    with adversary(dist.get_rank() if dist.is_initialized() else 0) as here:
        try:
            return function(*arguments)
        except Caught:
            raise
        except Exception:
            here.refuse_dropped()  # a missing `wait` is the cause of the error, so report it instead
            raise
