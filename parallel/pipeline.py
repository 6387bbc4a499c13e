"""Executes a schedule: this rank's forwards and backwards, unit by unit, and the messages between ranks.

Slide "パイプライン並列". The model's units (embedding, blocks, head) are cut into consecutive *parts*; a chunk of the
schedule holds one part (`layout.py`, `schedules.py`). A rank holds the chunks that the schedule places on it, and runs
its list of actions:

    F j     receive x, run the chunk's units, send y (the embedding's chunk reads ids, the head's gives losses)
    B j     receive dL/dy, run the units backwards, send dL/dx
    I, W    B in two halves. I finds dL/dx, and leaves a WeightGradient (w, dy, x) of every linear of the blocks in
            `Executor.deferred`. W, later, adds dW = dy^T x of each to its bucket and lets go of it.

The executor knows actions, not schedules: it does what the list says, in its order. Per boundary and direction, one
micro-batch sends bsh elements (bsh/t with sequence parallelism). A validation is a list of F alone.

Between two units the graph is cut: each unit gets a detached input, and its backward is one `torch.autograd.backward`
with the gradient that the unit after it left at its input:

    forward     x0 -> [embedding] -> y0 | x1 = y0.detach() -> [block] -> y1 | ...  -> [head] -> losses
    backward    dL/dx1 = x1.grad  <-  [block].backward(x2.grad)  <-  ...

So everything that a scheme wants to do between two units is a plain line here, not a hook: with full recomputation a
block keeps only x and runs again just before its backward (one block's activations at a time; Chen et al., arXiv
1604.06174); ZeRO-3 gathers a unit's parameters before and frees them after; a unit's gradients are reduced as soon as
they are whole, while those below still compute (as in PyTorch's DDP, Li et al., arXiv 2006.15704).

A send does not block. A receive is posted as early as the agreed order of messages allows; that order is also why two
ranks that both send do not deadlock (`schedules.messages` has the proof). A buffer lives until its message has left.
Then the values of a sent y are freed: backward needs y's graph, not its values. A rank that is more than IN_TRANSIT
messages ahead of its neighbours waits for them.
"""

import contextlib
from collections import deque

import torch

from parallel import schedules
from parallel.comm import receive, send
from parallel.layout import rows_outside
from parallel.zero import free

SENT = {"activation": "activations", "gradient": "gradients of activations"}  # the ledger's names
IN_TRANSIT = 2  # messages that may be on their way before we wait for the oldest (Gloo does not tell what has arrived)


class Unwatched:
    """Does nothing, in the place of a meter (`meter.py`), a trace (`trace.py`) or timers (`log.Timers`)."""

    def nothing(self, *_):
        pass

    def context(self, *_):
        return contextlib.nullcontext()

    hold = forget = begin_step = nothing
    __call__ = action = wait = context


class Deferred(list):
    """The `tensor.WeightGradient`s of one micro-batch in one chunk, from I to W. A meter counts their tensors."""

    def __init__(self, meter):
        super().__init__()
        self.meter = meter

    def append(self, product):
        super().append(product)
        self.meter.hold(product.dy, product.x)


class Chunk:
    """Some consecutive units on this rank; for each, the names of the buckets that it uses.

    reduce_after[i]: the buckets whose gradient is complete once backward has passed unit i, as no unit before i uses
    them. release_after[i]: the buckets that forward no longer needs after unit i, as no unit after i uses them.
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
    """One process's part of every step. schedule: a step's, of any number of micro-batches; timers: a `log.Timers`."""

    def __init__(self, model, zero, config, mesh, layout, schedule, timers):
        self.zero, self.config, self.mesh, self.layout = zero, config, mesh, layout
        self.timers, self.schedules = timers, {}  # number of micro-batches: (Schedule, Messages, passes of buckets)
        validation = schedules.forward_only(schedule)
        self.validation = validation, schedules.messages(validation)
        self.chunks = {}
        for chunk in layout.chunks(mesh.pp.rank):
            numbers = layout.units[chunk]
            self.chunks[chunk] = Chunk([model.units[i] for i in numbers], [layout.names([i]) for i in numbers])
        self.kept = {}  # (micro-batch, chunk): what forward left for backward
        self.deferred = {}  # (micro-batch, chunk): what I left for W
        self.local = {}  # outputs and gradients between two chunks on this rank
        self.trace = self.meter = Unwatched()

    def run(self, micro_batches, count, weight):
        """Forward and backward of `count` micro-batches, drawn from the iterator `micro_batches`.

        weight: what each micro-batch's mean loss is multiplied by before it is back-propagated. Leaves gradients in the
        buckets' flat buffers, their reduction started. Returns this rank's sum of the micro-batches' mean losses, not
        multiplied: a float64 scalar on the device, 0 on ranks without the head.
        """
        if count not in self.schedules:
            schedule = schedules.build(self.config.schedule, self.mesh.pp.size, count, self.config.chunks)
            passes = self.layout.passes(schedule, self.mesh.pp.rank)
            self.schedules[count] = schedule, schedules.messages(schedule), passes
        schedule, messages, passes = self.schedules[count]
        self.trace.begin_step(count)
        self.weight, self.passes = weight, dict(passes)  # passes: how often each bucket will still get a gradient
        self.total = torch.zeros((), dtype=torch.float64, device=self.zero.device)
        self._execute(schedule, messages, micro_batches, rows_outside(self.config))
        self.batch(count - 1)  # draw them all, also those that have no action on this rank
        return self.total

    @torch.no_grad()
    def evaluate(self, batch):
        """The losses [n] of one micro-batch, forward only, through the first pipeline; None if its end is elsewhere."""
        watchers, self.losses = (self.timers, self.meter, self.trace), None
        self.timers = self.meter = self.trace = Unwatched()
        self._execute(*self.validation, iter([batch]), len(batch.positions))  # the last batch may be short
        self.timers, self.meter, self.trace = watchers
        return self.losses

    def _execute(self, schedule, messages, micro_batches, rows):
        """This rank's actions, in order; before each, the messages that come first. rows: of a micro-batch."""
        self.schedule, self.batches, self.micro_batches = schedule, {}, micro_batches
        self.mail = Mailbox(messages, self.mesh, (rows, self.config.hidden_size), self.zero, self.meter)
        run = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}
        for action in schedule.actions[self.mesh.pp.rank]:
            self.mail.post()
            phase = "forward-compute" if action.kind == "F" else "backward-compute"
            with self.timers(phase), self.trace.action(action):
                run[action.kind](action.microbatch, action.chunk)
        self.mail.close()

    def batch(self, j):
        """Micro-batch j, kept for the whole step. Some schedules do not begin with 0: the earlier ones are kept too."""
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
                self.meter.hold(x, y)
            for name in chunk.release_after[i]:
                self.zero.release(name)
        if training:
            self.kept[j, c] = kept
        after = schedules.downstream(self.schedule, c)
        if after is not None:
            self._give("activation", j, after, y)
        elif not training:
            self.losses = y

    def backward(self, j, c):
        self._backward(j, c, None)

    def input_gradient(self, j, c):
        self.deferred[j, c] = Deferred(self.meter)
        self._backward(j, c, self.deferred[j, c])

    def _backward(self, j, c, deferred):
        """Backward of a chunk. With `deferred`, a list, the linears leave their weight gradients there."""
        chunk, batch, kept = self.chunks[c], self.batch(j), self.kept.pop((j, c))
        before, after = schedules.upstream(self.schedule, c), schedules.downstream(self.schedule, c)
        gradient = None if after is None else self._take("gradient", j, c)
        for i in reversed(range(len(chunk.units))):
            self._gather(chunk, i, -1)
            for name in chunk.buckets[i]:
                self.zero.open_gradient(name)
                self.zero.buckets[name].defer_to(deferred)
            x, y = kept.pop()
            if y is None:
                self.mesh.ledger.phase = "recompute"
                y = chunk.units[i](x, batch)
                self.meter.hold(y)
            self.mesh.ledger.phase = "backward"
            is_loss = gradient is None
            if is_loss:  # y [n] is still nan: the head fills it in backward, together with the gradient
                gradient = torch.full_like(y, self.weight / len(y))  # of their mean
            torch.autograd.backward(y, gradient)
            if is_loss:
                self.total += y.detach().mean(dtype=torch.float64)
            for name in chunk.buckets[i]:
                self.zero.buckets[name].defer_to(None)  # or the parameters would keep what they deferred
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
        names = [name for names in reversed(self.chunks[c].reduce_after) for name in names]
        for name in names:
            self.zero.open_gradient(name)
        products = deque(self.deferred.pop((j, c)))
        for name in names:  # backward's order, in which I has left its products
            while products and products[0].w.spec.bucket == name:
                products.popleft().add()  # and two operands less to keep
            self._reduce(name)
        assert not products, "a weight gradient of a bucket that is not this chunk's"

    # --- around them --------------------------------------------------------------------------------------------------

    def _gather(self, chunk, i, step):
        """Make unit i's parameters whole, and start to gather those of the unit that comes next."""
        for name in chunk.buckets[i]:
            self.zero.gather(name)
        if 0 <= i + step < len(chunk.units):
            for name in chunk.buckets[i + step]:
                self.zero.start_gather(name)

    def _reduce(self, name):
        """Bucket `name` has the whole gradient that one micro-batch gives it."""
        self.mesh.ledger.phase = "reduce"
        self.passes[name] -= 1
        self.zero.reduce(name, last=self.passes[name] == 0)

    def _give(self, kind, j, c, x):
        """Hand x, [rows, h], to chunk c, on whichever rank it is."""
        if c in self.chunks:
            self.local[kind, j, c] = x.detach()
            self.meter.hold(self.local[kind, j, c])
        else:
            self.mail.send((kind, j, c), x)

    def _take(self, kind, j, c):
        if (kind, j, c) in self.local:
            return self.local.pop((kind, j, c))
        with self.trace.wait(kind, j, c):
            return self.mail.receive((kind, j, c))


class Mailbox:
    """This rank's messages of a step, in the order in which all ranks have agreed to post theirs."""

    def __init__(self, order, mesh, shape, like, meter):
        self.pp, self.shape, self.like, self.meter = mesh.pp, shape, like, meter
        rank = mesh.pp.rank
        self.queue = deque((i, m) for i, m in enumerate(order) if rank in (m.source, m.destination))
        self.arriving = {}  # (kind, micro-batch, chunk): Pending
        self.leaving = deque()  # (Pending, what to free when it is gone, or None)

    def post(self):
        """Post receives up to the next message that is ours to send; free what is gone."""
        while self.queue and self.queue[0][1].source != self.pp.rank:
            tag, m = self.queue.popleft()
            key = m.kind, m.microbatch, m.consumer.chunk
            self.arriving[key] = receive(self.shape, self.like, self.pp, m.source, tag)
            self.meter.hold(self.arriving[key].result)
        while len(self.leaving) > IN_TRANSIT or (self.leaving and self.leaving[0][0].done()):
            self._let_go()

    def _let_go(self):
        pending, x = self.leaving.popleft()
        pending.wait()
        if x is not None:
            free(x)
            self.meter.forget(x)

    def send(self, key, x):
        """Send x, the output of a unit or a gradient, without waiting."""
        self.post()
        tag, m = self.queue.popleft()
        assert key == (m.kind, m.microbatch, m.consumer.chunk), f"{key} is sent where {m} should be"
        values = x.detach()  # without the graph, whose input would otherwise live as long as the message
        done = values if x.grad_fn is not None else None  # an output: backward begins at it, not at its values
        self.leaving.append((send(values, self.pp, m.destination, SENT[m.kind], tag), done))
        self.meter.hold(values)

    def receive(self, key):
        """Wait for a message: the tensor."""
        self.post()
        return self.arriving.pop(key).wait()

    def close(self):
        """The end of a step: everything has gone."""
        self.post()
        while self.leaving:
            self._let_go()
        assert not self.queue and not self.arriving
