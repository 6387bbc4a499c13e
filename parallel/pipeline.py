"""Execute a schedule: this rank's forwards and backwards, unit by unit, and the messages between ranks.

The first forms are `ladder/rung09` and `10`: `recv` there is `_take` here, `isend` is `_give`.
For micro-batch j and a chunk of units:

    F j     receive x, run the chunk's units, send y (the embedding reads ids instead, the head returns losses)
    B j     receive dL/dy, run the units backwards, send dL/dx
    I, W    the two halves of B. I computes dL/dx, and stores in `Executor.deferred` a WeightGradient (w, dy, x) for
            every linear of the blocks. Later W adds each dW = dy^T x to its bucket, and frees dy and x.

Over each boundary between ranks a micro-batch sends bsh elements in each direction (bsh/t with
sequence parallelism). A unit gets a detached input, and its backward is one
`torch.autograd.backward`:

    forward     x0 -> [embedding] -> y0 | x1 = y0.detach() -> [block] -> y1 | ...  -> [head] -> losses
    backward    dL/dx1 = x1.grad  <-  [block].backward(x2.grad)  <-  ...

So ZeRO and recomputation are plain code between units, not hooks. With full recomputation a block
keeps only x and runs again just before its backward (Chen et al., arXiv 1604.06174). A bucket's
gradient is reduced as soon as it is complete, while backward continues (as in PyTorch's DDP, Li et
al., arXiv 2006.15704).
"""

import itertools
from collections import deque
from dataclasses import dataclass, field

import torch

from parallel import schedules, simulation
from parallel.comm import receive, send
from parallel.layout import build_for, rows_outside
from parallel.units import check_losses
from parallel.zero import free

# names in the ledger
SENT = {"activation": "activations", "gradient": "gradients of activations"}
METHODS = {  # (method of Executor, phase of the watch)
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "I": ("input_gradient", "backward"),
    "W": ("weight_gradient", "backward"),
}
IN_TRANSIT = 2  # the most unfinished sends of a rank


class Chunk:
    """Consecutive units on this rank. buckets[i]: those that unit i uses.

    reduce_after[i]: the buckets whose gradient is complete after the backward of unit i.
    release_after[i]: those that forward does not need after unit i.
    """

    def __init__(self, units, buckets):
        self.units, self.buckets = units, buckets
        self.reduce_after = first_uses(buckets)  # backward ends with the first unit
        self.release_after = first_uses(buckets[::-1])[::-1]


def first_uses(buckets):
    """Return, for each list of `buckets`, the buckets that no list before it contains."""
    used, firsts = set(), []
    for of_unit in buckets:
        firsts.append([bucket for bucket in of_unit if bucket not in used])
        used.update(of_unit)
    return firsts


@dataclass
class PipelineStep:
    """A step, or a validation, on this rank."""

    schedule: schedules.Schedule
    mail: object = None  # Mailbox
    unread: object = None  # an iterator of the MicroBatches that are not in `batches` yet
    factor: float = 0.0  # of each micro-batch's mean loss in backward
    passes: dict = field(default_factory=dict)  # {bucket's name: backwards that still add to its gradient}
    batches: dict = field(default_factory=dict)  # {number: MicroBatch}
    losses: dict = field(default_factory=dict)  # {number of a micro-batch: its losses [n]; in training their mean}


class Executor:
    """This rank's part of every step."""

    def __init__(self, model, zero, config, mesh, layout, schedule):
        """schedule: with any number of micro-batches. All ranks must call this at the same point of the program."""
        self.zero, self.config, self.layout = zero, config, layout
        self.mesh, self.watch = mesh, mesh.watch
        self.schedules = {}  # number of micro-batches: (Schedule, Messages, passes)
        self.validations = {}  # number of micro-batches: (Schedule, Messages)
        self.chunks = {}
        for chunk in layout.chunks(mesh.pp.rank):
            numbers = layout.units[chunk]
            buckets = [[zero.buckets[name] for name in layout.names([i])] for i in numbers]
            self.chunks[chunk] = Chunk([model.units[i] for i in numbers], buckets)
        self.activations = {}  # (micro-batch, chunk): [(input, output) of each unit], from F to B
        self.deferred = {}  # (micro-batch, chunk): [tensor.WeightGradient], from I to W
        self.local = {}  # (kind, micro-batch, chunk): a tensor for another chunk on this rank
        self.training_schedule = schedule
        connect(mesh, schedule, zero.device)

    def run(self, batches, count, factor):
        """Run forward and backward of `count` MicroBatches from the iterator `batches`.

        Return the sum of the mean losses, without the factor: float64 [] on the device, 0 on ranks
        without the head.
        """
        schedule, messages, passes = self.prepared(count)
        self.step = PipelineStep(schedule, unread=batches, factor=factor, passes=dict(passes))
        with self.watch("pipeline", schedule):
            self._execute(messages, [rows_outside(self.config)] * count)
            self.batch(count - 1)  # read all: some may have no action on this rank
        zero = torch.zeros((), dtype=torch.float64, device=self.zero.device)
        return sum(self.step.losses.values(), zero)

    def prepared(self, count):
        """Return (Schedule, Messages, passes) of a step of `count` micro-batches."""
        if count not in self.schedules:
            schedule = build_for(self.config, count)
            passes = self.layout.passes(schedule, self.mesh.pp.rank)
            self.schedules[count] = schedule, simulation.messages(schedule), passes
        return self.schedules[count]

    @torch.no_grad()
    def evaluate(self, batches):
        """Run the forwards of MicroBatches. Return {number: losses [n]} on the last chunk's rank."""
        if (count := len(batches)) not in self.validations:
            validation = schedules.forward_only(self.training_schedule, count)
            self.validations[count] = validation, simulation.messages(validation)
        schedule, messages = self.validations[count]
        self.step = PipelineStep(schedule, unread=iter(batches))
        with self.watch("evaluate"):
            self._execute(messages, [len(batch.positions) for batch in batches])
        return self.step.losses

    def _execute(self, messages, rows):
        """Run this rank's actions. rows[j]: of x in micro-batch j; in a validation they differ."""
        self.step.mail = mail = Mailbox(messages, self.mesh, rows, self.config.hidden_size, self.zero)
        for action in self.step.schedule.actions[self.mesh.pp.rank]:
            method, phase = METHODS[action.kind]
            mail.post()
            with self.watch(phase, action):
                getattr(self, method)(action.microbatch, action.chunk)
        mail.close()

    def batch(self, j):
        """Return micro-batch j. All up to j are kept: Chimera may run micro-batch 1 before 0."""
        batches = self.step.batches
        while j not in batches:
            batches[len(batches)] = next(self.step.unread)
        return batches[j]

    # --- the actions ------------------------------------------------------------------------------

    def forward(self, j, c):
        """F: run a chunk's units on micro-batch j."""
        chunk, batch, training = self.chunks[c], self.batch(j), torch.is_grad_enabled()
        y = None if self.step.schedule.parts[c] == 0 else self._take("activation", j, c)
        pairs = []
        for i, unit in enumerate(chunk.units):
            self._gather(chunk, i, +1)
            x = None if y is None else y.detach().requires_grad_(training)
            recomputed = self.config.recompute == "full" and unit.recomputable
            with torch.set_grad_enabled(training and not recomputed):
                y = unit(x, batch)
            if training:
                pairs.append((x, None if recomputed else y))
            for bucket in chunk.release_after[i]:
                bucket.release()
        if training:
            self.activations[j, c] = pairs
        after = schedules.downstream(self.step.schedule, c)
        if after is not None:
            self._give("activation", j, after, y)
        elif not training:
            self.step.losses[j] = y

    def backward(self, j, c, deferred=None):
        """B: run the units backwards. deferred: a list for the `WeightGradient`s of I, or None."""
        chunk, batch = self.chunks[c], self.batch(j)
        pairs = self.activations.pop((j, c))
        before, after = schedules.upstream(self.step.schedule, c), schedules.downstream(self.step.schedule, c)
        gradient = None if after is None else self._take("gradient", j, c)
        for i in reversed(range(len(chunk.units))):
            self._gather(chunk, i, -1)
            for bucket in chunk.buckets[i]:
                bucket.open_gradient()
                bucket.defer_to(deferred)
            x, y = pairs.pop()
            if y is None:
                with self.watch("recompute"):
                    y = chunk.units[i](x, batch)
            is_loss = gradient is None
            if is_loss:  # y [n] is usually still nan: the head's backward fills it
                check_losses(chunk.units[i], y, batch)
                gradient = torch.full_like(y, self.step.factor / len(y))  # d(factor * mean) / dy
            if y.requires_grad:  # False: the embedding is frozen
                torch.autograd.backward(y, gradient)
            if is_loss:
                self.step.losses[j] = y.detach().mean(dtype=torch.float64)
            for bucket in chunk.buckets[i]:
                bucket.defer_to(None)  # else the parameters would keep the list alive
            gradient = None if x is None else x.grad
            for bucket in chunk.reduce_after[i]:
                bucket.release()
                if deferred is None:
                    self._reduce(bucket)
        if before is not None:
            self._give("gradient", j, before, gradient)

    def input_gradient(self, j, c):
        self.deferred[j, c] = []
        self.backward(j, c, self.deferred[j, c])

    @torch.no_grad()
    def weight_gradient(self, j, c):
        """W: add the deferred products to their buckets, and reduce these."""
        chunk, products = self.chunks[c], deque(self.deferred.pop((j, c)))
        for bucket in itertools.chain(*chunk.reduce_after):
            bucket.open_gradient()
        # in the order of backward
        for of_unit, complete in zip(chunk.buckets[::-1], chunk.reduce_after[::-1], strict=True):
            names = [bucket.name for bucket in of_unit]
            while products and products[0].w.spec.bucket in names:
                products.popleft().add()  # frees dy and x after each product
            for bucket in complete:
                self._reduce(bucket)
        assert not products, "a weight gradient of a bucket that this chunk does not use"

    # --- around them ------------------------------------------------------------------------------

    def _gather(self, chunk, i, step):
        """Make the parameters of unit i whole. Start to gather those of the next, i + step."""
        following = chunk.buckets[i + step] if 0 <= i + step < len(chunk.units) else []
        for bucket in [*chunk.buckets[i], *following]:
            bucket.start_gather()
        for bucket in chunk.buckets[i]:
            bucket.gather()
            bucket.param.views.set_hidden(False)  # units read them from here on

    def _reduce(self, bucket):
        passes = self.step.passes
        passes[bucket.name] -= 1
        with self.watch("reduce"):
            bucket.reduce(last=passes[bucket.name] == 0)

    def _give(self, kind, j, c, x):
        """Pass x [rows, h] to chunk c."""
        if c in self.chunks:
            self.local[kind, j, c] = x.detach()
        else:
            self.step.mail.send((kind, j, c), x)

    def _take(self, kind, j, c):
        """Return the tensor that chunk c needs: from this rank, or by a message."""
        if (kind, j, c) in self.local:
            return self.local.pop((kind, j, c))
        with self.watch("wait", (kind, j, c)):
            return self.step.mail.receive((kind, j, c))


def axis_to(mesh, source, destination):
    """Return the pp axis for messages from `source` to `destination` (`simulation.messages`)."""
    return mesh.pp if source < destination else mesh.pp_to_lower


def connect(mesh, schedule, device):
    """Send one number between the ranks of each pair.

    On NCCL, the first message between two ranks stops each program until the other has come to it, too.
    """
    below = [(chunk, schedules.downstream(schedule, chunk)) for chunk in range(len(schedule.parts))]
    pairs = {(schedule.placement[a], schedule.placement[b]) for a, b in below if b is not None}
    # sorted: with one order on all ranks, they wait in no circle
    for a, b in sorted(pairs | {(b, a) for a, b in pairs}):
        if mesh.pp.rank in (a, b) and a != b:
            axis, number = axis_to(mesh, a, b), torch.zeros(1, device=device)
            if mesh.pp.rank == a:
                send(number, axis, b, "connection").wait()
            else:
                receive(1, number, axis, a).wait()


class Mailbox:
    """This rank's messages of a step. order: all messages, in the common order (`simulation.messages`)."""

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
            self._free_oldest()

    def _free_oldest(self):
        pending, x = self.leaving.popleft()
        pending.wait()
        if x is not None:
            # x loses its values. An operation that needs them in backward (tanh) keeps them.
            x.data = x.new_empty(1).expand_as(x)
            free(x)

    def send(self, key, x):
        self.post()
        tag, m = self.queue.popleft()
        assert key == (m.kind, m.microbatch, m.consumer.chunk), f"{key} is sent, but {m} is next"
        values = x.detach()  # without the graph, which would keep the unit's input meanwhile
        # an output: backward needs its graph, not its values
        freed = x if x.grad_fn is not None else None
        axis = axis_to(self.mesh, m.source, m.destination)
        self.leaving.append((send(values, axis, m.destination, SENT[m.kind], tag), freed))

    def receive(self, key):
        self.post()
        return self.arriving.pop(key).wait()

    def close(self):
        self.post()
        while self.leaving:
            self._free_oldest()
        assert not self.queue and not self.arriving
