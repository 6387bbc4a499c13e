"""Execute a schedule: this rank's forwards and backwards, unit by unit, and the messages between ranks.

The first forms are `ladder/rung07` and `08`: `recv` there is `_take` here, `isend` is `_give`.
A rank runs its list of actions (`schedules.py`). For micro-batch j and a chunk of units:

    F j     receive x, run the chunk's units, send y (the embedding reads ids instead, the head returns losses)
    B j     receive dL/dy, run the units backwards, send dL/dx
    I, W    the two halves of B. I computes dL/dx, and stores in `Executor.deferred` a WeightGradient (w, dy, x) for
            every linear of the blocks. Later W adds each dW = dy^T x to its bucket, and frees dy and x.

Over each boundary between ranks a micro-batch sends bsh elements in each direction (bsh/t with sequence parallelism).
A unit gets a detached input, and its backward is one `torch.autograd.backward`:

    forward     x0 -> [embedding] -> y0 | x1 = y0.detach() -> [block] -> y1 | ...  -> [head] -> losses
    backward    dL/dx1 = x1.grad  <-  [block].backward(x2.grad)  <-  ...

So ZeRO and recomputation are plain code between units, not hooks. With full recomputation a block keeps only x and runs
again just before its backward (Chen et al., arXiv 1604.06174). A bucket's gradient is reduced as soon as it is
complete, while backward continues (as in PyTorch's DDP, Li et al., arXiv 2006.15704).

All ranks post their messages in one common order, which prevents a deadlock (`schedules.messages`).
"""

import contextlib
import itertools
from collections import deque

import torch

from parallel import schedules
from parallel.comm import receive, send
from parallel.layout import rows_outside
from parallel.zero import free

SENT = {"activation": "activations", "gradient": "gradients of activations"}  # comm.py counts bytes by these names
METHODS = {  # {kind of an action: (method of Executor, timer)}
    "F": ("forward", "forward-compute"),
    "B": ("backward", "backward-compute"),
    "I": ("input_gradient", "backward-compute"),
    "W": ("weight_gradient", "backward-compute"),
}
IN_TRANSIT = 2  # the most unfinished sends of a rank; with more it waits for the oldest


class Unwatched:
    """Replaces timers, a trace or a meter (`accounts/trace.py`, `meter.py`), and does nothing."""

    def __call__(self, *_):
        return contextlib.nullcontext()

    begin_step = action = wait = __call__


class Chunk:
    """Consecutive units on this rank. buckets[i]: the names of the buckets that unit i uses.

    reduce_after[i]: the buckets whose gradient is complete after the backward of unit i. release_after[i]: those that
    forward does not need after unit i.
    """

    def __init__(self, units, buckets):
        self.units, self.buckets = units, buckets
        self.reduce_after, self.release_after, seen, left = [], [], set(), set()
        for names in buckets:
            self.reduce_after.append([name for name in names if name not in seen])
            seen.update(names)
        for names in reversed(buckets):
            self.release_after.insert(0, [name for name in names if name not in left])
            left.update(names)


class Executor:
    """This rank's part of every step. schedule: a Schedule with any number of micro-batches; timers: a `log.Timers`.

    Tools can set `trace`, which gets each action and each wait, and `after_action`, which is called after each action.
    """

    def __init__(self, model, zero, config, mesh, layout, schedule, timers):
        self.zero, self.config, self.mesh, self.layout = zero, config, mesh, layout
        self.timers, self.schedules = timers, {}  # number of micro-batches: (Schedule, Messages, passes: see `run`)
        self.usual, self.validations = schedule, {}  # number of micro-batches: (Schedule, Messages)
        self.chunks = {}
        for chunk in layout.chunks(mesh.pp.rank):
            numbers = layout.units[chunk]
            self.chunks[chunk] = Chunk([model.units[i] for i in numbers], [layout.names([i]) for i in numbers])
        self.kept = {}  # (micro-batch, chunk): [(input, output) of each unit], from F to B
        self.deferred = {}  # (micro-batch, chunk): [tensor.WeightGradient], from I to W
        self.local = {}  # (kind, micro-batch, chunk): a tensor for another chunk on this rank
        self.mail = None
        self.trace = self.after_action = Unwatched()
        self.schedule, self.batches, self.work = schedule, {}, 0  # work: 1 for a unit's forward, 2 for its backward
        self.methods, self.flats = METHODS, {}  # flats: empty here; PipeDream keeps old weights in it
        connect(mesh, schedule, zero.device)

    def run(self, micro_batches, count, weight):
        """Run forward and backward of `count` micro-batches from the iterator `micro_batches`.

        weight: the factor of each micro-batch's mean loss in backward. Return the sum of the mean losses, without
        `weight`: float64 [] on the device, 0 on ranks without the head.
        """
        schedule, messages, passes = self.prepared(count)
        self.trace.begin_step(schedule)
        self.mesh.ledger.phase = "forward"
        self.weight, self.passes = weight, dict(passes)  # passes[bucket]: backwards that still add to it
        self.total = torch.zeros((), dtype=torch.float64, device=self.zero.device)
        self._execute(schedule, messages, micro_batches, [rows_outside(self.config)] * count)
        self.batch(count - 1)  # read all micro-batches, also those without an action on this rank
        return self.total

    def prepared(self, count):
        if count not in self.schedules:
            schedule = schedules.build_for(self.config, self.mesh.dp.size, count)
            passes = self.layout.passes(schedule, self.mesh.pp.rank)
            self.schedules[count] = schedule, schedules.messages(schedule), passes
        return self.schedules[count]

    @torch.no_grad()
    def evaluate(self, batches):
        """Run the forwards of MicroBatches. Return {number: its losses [n]}, empty on a rank without the last chunk."""
        watchers, self.losses = (self.timers, self.trace, self.after_action), {}
        self.timers = self.trace = self.after_action = Unwatched()
        if (count := len(batches)) not in self.validations:
            validation = schedules.forward_only(self.usual, count)
            self.validations[count] = validation, schedules.messages(validation)
        self._execute(*self.validations[count], iter(batches), [len(batch.positions) for batch in batches])
        self.timers, self.trace, self.after_action = watchers
        return self.losses

    def _execute(self, schedule, messages, micro_batches, rows):
        """Run this rank's actions. rows[j]: the rows of x in micro-batch j; in a validation they differ."""
        self.schedule, self.batches, self.work, self.micro_batches = schedule, {}, 0, micro_batches
        self.mail = Mailbox(messages, self.mesh, rows, self.config.hidden_size, self.zero)
        for action in schedule.actions[self.mesh.pp.rank]:
            method, timer = self.methods[action.kind]
            self.mail.post()
            with self.timers(timer), self.trace.action(action):
                getattr(self, method)(action.microbatch, action.chunk)
            self.after_action()
        self.mail.close()

    def batch(self, j):
        """Return micro-batch j. All up to j are kept, because a rank of Chimera may run micro-batch 1 before 0."""
        while j not in self.batches:
            self.batches[len(self.batches)] = next(self.micro_batches)
        return self.batches[j]

    # --- the actions --------------------------------------------------------------------------------------------------

    def forward(self, j, c):
        chunk, batch, training = self.chunks[c], self.batch(j), torch.is_grad_enabled()
        y = None if self.schedule.parts[c] == 0 else self._take("activation", j, c)
        self.mesh.ledger.phase = "forward" if training else "evaluate"
        kept = []
        for i, unit in enumerate(chunk.units):
            self._gather(chunk, i, +1)
            x = None if y is None else y.detach().requires_grad_(training)
            again = self.config.recompute == "full" and unit.recomputable
            with torch.set_grad_enabled(training and not again):
                y = unit(x, batch)
            if training:
                kept.append((x, None if again else y))
            for name in chunk.release_after[i]:
                self.zero.release(name)
        if training:
            self.kept[j, c] = kept
        after = schedules.downstream(self.schedule, c)
        if after is not None:
            self._give("activation", j, after, y)
        elif not training:
            self.losses[j] = y

    def backward(self, j, c):
        self._backward(j, c, None)

    def input_gradient(self, j, c):
        self.deferred[j, c] = []
        self._backward(j, c, self.deferred[j, c])

    def _backward(self, j, c, deferred):
        """Run backward of a chunk. deferred: a list to which linears append their weight gradients, or None."""
        chunk, batch = self.chunks[c], self.batch(j)
        kept = self.kept.pop((j, c))
        before, after = schedules.upstream(self.schedule, c), schedules.downstream(self.schedule, c)
        gradient = None if after is None else self._take("gradient", j, c)
        for i in reversed(range(len(chunk.units))):
            self.mesh.ledger.phase = "backward"
            self._gather(chunk, i, -1)
            for name in chunk.buckets[i]:
                self.zero.open_gradient(name)
                self.zero.buckets[name].defer_to(deferred)
            x, y = kept.pop()
            if y is None:
                self.mesh.ledger.phase = "recompute"
                y = chunk.units[i](x, batch)
                self.mesh.ledger.phase = "backward"
            is_loss = gradient is None
            if is_loss:  # y [n] is still nan: the head's backward fills it
                gradient = torch.full_like(y, self.weight / len(y))  # d(weight * mean) / dy
            batch.weight = self.weight
            torch.autograd.backward(y, gradient)
            if is_loss:
                self.total += y.detach().mean(dtype=torch.float64)
            for name in chunk.buckets[i]:
                self.zero.buckets[name].defer_to(None)  # else the parameters would keep the list alive
            gradient = None if x is None else x.grad
            for name in chunk.reduce_after[i]:
                self.zero.release(name)
                if deferred is None:
                    self._reduce(name)
        if before is not None:
            self.mesh.ledger.phase = "backward"
            self._give("gradient", j, before, gradient)

    @torch.no_grad()
    def weight_gradient(self, j, c):
        """W: add each deferred dW = dy^T x to its bucket, and reduce the bucket."""
        chunk, products = self.chunks[c], deque(self.deferred.pop((j, c)))
        for name in itertools.chain(*chunk.reduce_after):
            self.zero.open_gradient(name)
        # in the order of backward, which is also the order of the products
        for used, complete in zip(chunk.buckets[::-1], chunk.reduce_after[::-1], strict=True):
            while products and products[0].w.spec.bucket in used:
                products.popleft().add()  # frees dy and x after each product
            for name in complete:
                self._reduce(name)
        assert not products, "a weight gradient of a bucket that this chunk does not use"

    # --- around them --------------------------------------------------------------------------------------------------

    def _gather(self, chunk, i, step):
        """Make the parameters of unit i whole. Start to gather those of unit i + step, which runs next."""
        self.work += 1 if step > 0 else 2
        soon = [*chunk.buckets[i], *(chunk.buckets[i + step] if 0 <= i + step < len(chunk.units) else [])]
        for name in soon:
            self.zero.start_gather(name)
        for name in chunk.buckets[i]:
            self.zero.gather(name)

    def _reduce(self, name):
        self.mesh.ledger.phase = "reduce"
        self.passes[name] -= 1
        self.zero.reduce(name, last=self.passes[name] == 0)

    def _give(self, kind, j, c, x):
        """Pass x [rows, h] to chunk c."""
        if c in self.chunks:
            self.local[kind, j, c] = x.detach()
        else:
            self.mail.send((kind, j, c), x)

    def _take(self, kind, j, c):
        """Return the tensor that chunk c needs: from this rank, or by a message."""
        if (kind, j, c) in self.local:
            return self.local.pop((kind, j, c))
        with self.trace.wait(kind, j, c):
            return self.mail.receive((kind, j, c))


def axis_to(mesh, source, destination):
    """Return the pp axis with the group of messages from `source` to `destination` (`schedules.messages`)."""
    return mesh.pp if source < destination else mesh.back


def connect(mesh, schedule, device):
    """Send one number over each connection between ranks in both directions.

    A pair's first message connects it on NCCL, and both programs stand still meanwhile.
    """
    mesh.ledger.phase = "setup"
    below = [(chunk, schedules.downstream(schedule, chunk)) for chunk in range(len(schedule.parts))]
    pairs = {(schedule.placement[a], schedule.placement[b]) for a, b in below if b is not None}
    for a, b in sorted(pairs | {(b, a) for a, b in pairs}):  # one order on all ranks: no circle of waiting ranks
        if mesh.pp.rank in (a, b) and a != b:
            axis, number = axis_to(mesh, a, b), torch.zeros(1, device=device)
            if mesh.pp.rank == a:
                send(number, axis, b, "connection").wait()
            else:
                receive(1, number, axis, a).wait()


class Mailbox:
    """This rank's messages of a step."""

    def __init__(self, order, mesh, rows, width, like):
        self.mesh, self.rows, self.width, self.like = mesh, rows, width, like
        self.rank = rank = mesh.pp.rank
        self.queue = deque((i, m) for i, m in enumerate(order) if rank in (m.source, m.destination))
        self.arriving = {}  # (kind, micro-batch, chunk): Pending
        self.leaving = deque()  # (Pending, tensor to free when it is sent, or None)

    def post(self):
        """Post receives up to this rank's next send. Free sent tensors."""
        while self.queue and self.queue[0][1].source != self.rank:
            tag, m = self.queue.popleft()
            axis = axis_to(self.mesh, m.source, m.destination)
            shape = self.rows[m.microbatch], self.width
            arriving = receive(shape, self.like, axis, m.source, tag)
            self.arriving[m.kind, m.microbatch, m.consumer.chunk] = arriving
        while len(self.leaving) > IN_TRANSIT or (self.leaving and self.leaving[0][0].done()):
            self._let_go()

    def _let_go(self):
        pending, x = self.leaving.popleft()
        pending.wait()
        if x is not None:
            free(x)

    def send(self, key, x):
        self.post()
        tag, m = self.queue.popleft()
        assert key == (m.kind, m.microbatch, m.consumer.chunk), f"{key} is sent, but the next message is {m}"
        values = x.detach()  # without the graph, which would keep the unit's input until the message is sent
        done = values if x.grad_fn is not None else None  # an output: backward needs its graph, not its values
        axis = axis_to(self.mesh, m.source, m.destination)
        self.leaving.append((send(values, axis, m.destination, SENT[m.kind], tag), done))

    def receive(self, key):
        self.post()
        return self.arriving.pop(key).wait()

    def close(self):
        self.post()
        while self.leaving:
            self._let_go()
        assert not self.queue and not self.arriving
