"""Executes a schedule: this rank's forwards and backwards, unit by unit, and the messages between ranks.

Slide "パイプライン並列". The model's units (embedding, blocks, head) are cut into consecutive *parts*, one for each
chunk of the schedule (`schedules.py`); a rank holds the chunks that the schedule places on it, and runs its list of
actions:

    F j     receive x, run the chunk's units, send y (the embedding's chunk reads ids, the head's gives losses)
    B j     receive dL/dy, run the units backwards, send dL/dx
    I, W    B in two halves: I finds dL/dx and keeps (dy, x) of every linear; W makes dW = dy^T x of them, later
            (but of the head's: that one is made in F, together with the loss; `tensor.LinearCrossEntropy`)

The executor knows actions, not schedules: it does what the list says, in its order. Per boundary and direction, one
micro-batch sends bsh elements (bsh/t with sequence parallelism).

Between two units the graph is cut: each unit gets a detached input, and its backward is one `torch.autograd.backward`
with the gradient that the unit after it left at its input:

    forward     x0 -> [embedding] -> y0 | x1 = y0.detach() -> [block] -> y1 | ...  -> [head] -> losses
    backward    dL/dx1 = x1.grad  <-  [block].backward(x2.grad)  <-  ...

So everything that a scheme wants to do between two units is a plain line here, not a hook: with full recomputation a
block keeps only x and runs again just before its backward (one block's activations at a time; Chen et al., arXiv
1604.06174); ZeRO-3 gathers a unit's parameters before and frees them after; a unit's gradients are reduced as soon as
they are whole, while those below still compute (as in PyTorch's DDP, Li et al., arXiv 2006.15704).

Sends do not block, receives are posted as far ahead as the agreed order of messages allows (`schedules.messages`), a
buffer lives until its message is gone, and what was sent is freed then: backward needs y's place in the graph, not
its values. (A rank that is more than IN_TRANSIT messages ahead of its neighbour does wait for it.)
"""

import contextlib
from collections import Counter, deque

import torch

from parallel import schedules
from parallel.comm import receive, send
from parallel.zero import free

SENT = {"activation": "activations", "gradient": "gradients of activations"}  # the ledger's names
IN_TRANSIT = 2  # messages that may be on their way before we wait for the oldest (Gloo does not tell what has arrived)


def split(units, parts):
    """`units` (embedding, blocks, head) as `parts` consecutive lists, blocks spread evenly.

    What does not divide goes to the parts in the middle: the first and the last have the embedding and the head
    besides.
    """
    blocks = len(units) - 2
    counts = [blocks // parts] * parts
    middle_first = sorted(range(parts), key=lambda i: (i in (0, parts - 1), i))
    for i in middle_first[: blocks % parts]:
        counts[i] += 1
    ends = [1 + sum(counts[: i + 1]) for i in range(parts)]
    begins = [0, *ends[:-1]]
    ends[-1] += 1
    return [list(units[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def held_units(model, plan):
    """The units of the model that each pipeline rank runs: [rank][...], in the order of its chunks."""
    parts = split(model.units, max(plan.parts) + 1)
    held = [[] for _ in plan.actions]
    for part, rank in zip(plan.parts, plan.placement, strict=True):
        held[rank] += parts[part]
    return held


def stored(units):
    """The names of the stored units (of parameters) that some of the model's units use, each once."""
    return list(dict.fromkeys(p.spec.unit for unit in units for p in unit.parameters()))


class Chunk:
    """Some consecutive units on this rank: `units`, and for each the stored units (of parameters) that it uses."""

    def __init__(self, index, units):
        self.index, self.units = index, units
        self.stored = [stored([unit]) for unit in units]
        # first[i]: what no unit before i uses: backward, which comes the other way, leaves it whole after i.
        # last[i]: what no unit after i uses: forward is done with it after i.
        self.first, self.last, seen, left = [], [], set(), set()
        for names in self.stored:
            self.first.append([name for name in names if name not in seen])
            seen.update(names)
        for names in reversed(self.stored):
            self.last.insert(0, [name for name in names if name not in left])
            left.update(names)


class Executor:
    """One process's part of every step. `timers(name)` is a context manager that watches a phase."""

    def __init__(self, model, zero, config, mesh, plan, timers):
        self.model, self.zero, self.config, self.mesh, self.timers = model, zero, config, mesh, timers
        self.recompute = config.recompute == "full"
        self.plan, self.plans = plan, {}
        parts = split(model.units, max(plan.parts) + 1)
        mine = [c for c, rank in enumerate(plan.placement) if rank == mesh.pp.rank]
        self.chunks = {c: Chunk(c, parts[plan.parts[c]]) for c in mine}
        self.kept = {}  # (micro-batch, chunk): what forward left for backward
        self.deferred = {}  # (micro-batch, chunk): what I left for W
        self.local = {}  # outputs and gradients between two chunks on this rank
        self.trace = None  # a parallel.trace.Trace, where one is wanted
        self.meter = None  # a parallel.memory.Activations, where what is kept for backward is counted

    def run(self, micro_batches, count, loss_scale):
        """Forward and backward of `count` micro-batches, drawn from the iterator `micro_batches`.

        Gradients are left in the units' flat buffers, their reduction started. Returns this rank's part of the mean
        loss over all micro-batches and data ranks, a float64 scalar on the device: of the last pipeline rank's, or 0.

        The loss that is back-propagated is divided here, once: the mean over a micro-batch's tokens, over the step's
        micro-batches and over the data ranks (whose gradients are then summed), times the loss scale.
        """
        actions, order = self._schedule(count)
        if self.trace:
            self.trace.begin_step(count)
        self.share, self.scale = 1.0 / (count * self.mesh.dp.size), loss_scale
        self.total = torch.zeros((), dtype=torch.float64, device=self.zero.device)
        self.batches, self.micro_batches = {}, micro_batches
        self.passes = self.passes_in_a_step(count)
        self.mail = Mailbox(order, self.mesh, self._message_shape(), self.zero, self.meter)
        run = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}
        for action in actions:
            self.mail.post()
            with self.watched(action):
                run[action.kind](action.microbatch, action.chunk)
        self.mail.post()
        self.mail.close()
        return self.total

    def _schedule(self, count):
        """This rank's actions, and all messages in their order, for `count` micro-batches."""
        if count not in self.plans:
            c = self.config
            plan = schedules.build(c.schedule, self.mesh.pp.size, count, c.chunks)
            self.plans[count] = plan.actions[self.mesh.pp.rank], schedules.messages(plan)
        return self.plans[count]

    def passes_in_a_step(self, count):
        """{stored unit: how many of `count` micro-batches give it a gradient here}."""
        passes = dict.fromkeys(self.zero.units, 0)
        for kind, _, c in self._schedule(count)[0]:
            for name in stored(self.chunks[c].units) if kind == "F" else []:
                passes[name] += 1
        return passes

    def work(self, count):
        """What `count` micro-batches do here: passes of a block, of the embedding, of the head; {what: messages}."""
        actions, order = self._schedule(count)
        passed = [unit for kind, _, c in actions if kind == "F" for unit in self.chunks[c].units]
        ends = [sum(unit is end for unit in passed) for end in (self.model.units[0], self.model.units[-1])]
        sends = Counter(SENT[m.kind] for m in order if m.source == self.mesh.pp.rank)
        return len(passed) - sum(ends), *ends, sends

    def _message_shape(self):
        c = self.config
        rows = c.micro_batch_size * c.seq_length // (c.tp if c.sequence_parallel else 1)
        return rows, c.hidden_size

    def batch(self, j):
        """Micro-batch j, kept for the whole step. Some schedules do not begin with 0: what comes before waits."""
        while j not in self.batches:
            self.batches[len(self.batches)] = next(self.micro_batches)
        return self.batches[j]

    @contextlib.contextmanager
    def watched(self, action):
        """Around an action: the phase's timer, and a record where one is kept."""
        record = self.trace.action(action) if self.trace else contextlib.nullcontext()
        with self.timers("forward-compute" if action.kind == "F" else "backward-compute"), record:
            yield

    # --- the actions --------------------------------------------------------------------------------------------------

    def forward(self, j, c):
        plan, chunk, batch = self.plan, self.chunks[c], self.batch(j)
        x = None if plan.parts[c] == 0 else self._take("activation", j, c)
        self.mesh.ledger.phase = "forward"
        kept, y = [], x
        for i, unit in enumerate(chunk.units):
            self._gather(chunk, i, +1)
            x = None if y is None else y.detach().requires_grad_()
            if unit is self.model.units[-1]:
                self._prepare_loss(chunk.stored[i], batch)
            again = self.recompute and unit.recomputable
            with torch.set_grad_enabled(not again):
                y = unit(x, batch)
            kept.append((x, None if again else y))
            if self.meter:
                self.meter.hold(x, y)
            for name in chunk.last[i]:
                self.zero.release(name)
        self.kept[j, c] = kept
        if schedules.downstream(plan, c) is None:
            self.total += y.detach().mean(dtype=torch.float64) * self.share
        else:
            self._give("activation", j, schedules.downstream(plan, c), y)

    def _prepare_loss(self, names, batch):
        """The head makes its word table's gradient together with the loss (`tensor.LinearCrossEntropy`)."""
        for name in names:
            self.zero.ready_for_gradient(name)
        batch.weight = self.share * self.scale / len(batch.ids)  # d(scale * mean loss of the step) / d(a token's loss)

    def backward(self, j, c):
        self._backward(j, c, None)

    def input_gradient(self, j, c):
        self.deferred[j, c] = self.meter.operands() if self.meter else []
        self._backward(j, c, self.deferred[j, c])

    def _backward(self, j, c, deferred):
        """Backward of a chunk. With `deferred`, a list, the linears leave their weight gradients there."""
        plan, chunk, batch, kept = self.plan, self.chunks[c], self.batch(j), self.kept.pop((j, c))
        last = schedules.downstream(plan, c) is None
        gradient = None if last else self._take("gradient", j, c)
        for i in reversed(range(len(chunk.units))):
            self._gather(chunk, i, -1)
            for name in chunk.stored[i]:
                self.zero.ready_for_gradient(name)
                self.zero.units[name].defer_to(deferred)
            x, y = kept.pop()
            if y is None:
                self.mesh.ledger.phase = "recompute"
                y = chunk.units[i](x, batch)
                if self.meter:
                    self.meter.hold(y)
            self.mesh.ledger.phase = "backward"
            if gradient is None:  # y are the losses
                gradient = torch.full_like(y, batch.weight)
            torch.autograd.backward(y, gradient)
            for name in chunk.stored[i]:
                self.zero.units[name].defer_to(None)  # or the parameters would keep what they deferred
            gradient = None if x is None else x.grad
            for name in chunk.first[i]:
                self.zero.release(name)
                if deferred is None:
                    self._reduce(name)
        if gradient is not None:
            self._give("gradient", j, schedules.upstream(plan, c), gradient)

    @torch.no_grad()
    def weight_gradient(self, j, c):
        names = [name for names in reversed(self.chunks[c].first) for name in names]
        for name in names:
            self.zero.ready_for_gradient(name)
        products = self.deferred.pop((j, c))
        for name in names:  # backward's order, in which I has left its products
            while products and products[0].args[0].spec.unit == name:
                products.pop(0)()  # and two operands less to keep
            self._reduce(name)
        assert not products, "a weight gradient of a unit that is not this chunk's"

    # --- around them --------------------------------------------------------------------------------------------------

    def _gather(self, chunk, i, step):
        """Unit i's parameters are there, and those of the unit that comes next are on their way."""
        for name in chunk.stored[i]:
            self.zero.gather(name)
        if 0 <= i + step < len(chunk.units):
            for name in chunk.stored[i + step]:
                self.zero.start_gather(name)

    def _reduce(self, name):
        """Stored unit `name` has all that one micro-batch gives it."""
        self.mesh.ledger.phase = "reduce"
        self.passes[name] -= 1
        self.zero.reduce(name, last=self.passes[name] == 0)

    def _give(self, kind, j, c, x):
        """Hand x, [rows, h], to chunk c, on whichever rank it is."""
        self.mesh.ledger.phase = "forward" if kind == "activation" else "backward"
        if c in self.chunks:
            self.local[kind, j, c] = x.detach()
            if self.meter:
                self.meter.hold(self.local[kind, j, c])
        else:
            self.mail.send((kind, j, c), x)

    def _take(self, kind, j, c):
        if (kind, j, c) in self.local:
            return self.local.pop((kind, j, c))
        with self.trace.wait(kind, j, c) if self.trace else contextlib.nullcontext():
            return self.mail.receive((kind, j, c))

    @torch.no_grad()
    def evaluate(self, batch):
        """The losses [n] of one micro-batch, forward only, through the first pipeline; None if its end is elsewhere."""
        y, rank, sent = None, self.mesh.pp.rank, None
        rows = len(batch.ids) // (self.mesh.tp.size if self.config.sequence_parallel else 1)
        pipeline = schedules.pipelines(self.plan)[0]
        for c in pipeline:
            source, here = self.plan.placement[c - 1], self.plan.placement[c]
            if here != rank:
                continue
            if self.plan.parts[c] > 0 and source != rank:
                y = receive((rows, self.config.hidden_size), self.zero, self.mesh.pp, source).wait()
            chunk = self.chunks[c]
            for i, unit in enumerate(chunk.units):
                self._gather(chunk, i, +1)
                y = unit(y, batch)
                for name in chunk.last[i]:
                    self.zero.release(name)
            after = schedules.downstream(self.plan, c)
            if after is not None and self.plan.placement[after] != rank:
                sent = send(y, self.mesh.pp, self.plan.placement[after], "activations")
        if sent:
            sent.wait()
        return y if self.plan.placement[pipeline[-1]] == rank else None


class Mailbox:
    """This rank's messages of a step, in the order in which all ranks have agreed to post theirs."""

    def __init__(self, order, mesh, shape, like, meter=None):
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
            if self.meter:
                self.meter.hold(self.arriving[key].result)
        while len(self.leaving) > IN_TRANSIT or (self.leaving and self.leaving[0][0].done()):
            self._let_go()

    def _let_go(self):
        pending, x = self.leaving.popleft()
        pending.wait()
        if x is not None:
            free(x)
            if self.meter:
                self.meter.forget(x)

    def send(self, key, x):
        self.post()
        tag, m = self.queue.popleft()
        assert key == (m.kind, m.microbatch, m.consumer.chunk), f"{key} is sent where {m} should be"
        values = x.detach()  # without the graph, whose input would otherwise live as long as the message
        done = values if x.grad_fn is not None else None  # an output: backward begins at it, not at its values
        self.leaving.append((send(values, self.pp, m.destination, SENT[m.kind], tag), done))
        if self.meter:
            self.meter.hold(values)

    def receive(self, key):
        self.post()
        return self.arriving.pop(key).wait()

    def close(self):
        """The end of a step: everything has gone."""
        self.post()
        while self.leaving:
            self._let_go()
        assert not self.queue and not self.arriving
