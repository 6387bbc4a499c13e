"""Predict the seconds of a step from the work in it and the rates of a device.

    an operation            work / rate + the gap to the next operation
    a matrix product        2 K (MN + wave) / (share * peak)  +  bytes of its three matrices / memory rate  +  gap
    an elementwise pass     bytes / memory rate
    a ring of n ranks       bytes that a rank sends / rate of the slowest wire  +  calls * log2(n) * latency

A GPU computes a product in waves of tiles, 128 x 256 elements on each multiprocessor. The start of the first wave and
the last wave, which is not full, cost about one wave, the constant `wave`.
"""

import itertools
import math
from fractions import Fraction
from functools import cache

import numpy as np

from accounts import ledger, memory
from accounts.bubbles import by_formula
from accounts.matrices import matrices_of
from accounts.memory import rank_states
from parallel import schedules, simulation
from parallel.comm import sent_bytes
from parallel.layout import rows_outside, tokens_of_rank
from parallel.optimizer import RULES
from parallel.zero import Window

COLUMNS = ("F", "I", "W", "recomputation", "collectives", "context")  # of `Step.stages`
# Gaps of the host, stragglers, clocks under load, multiprocessors that NCCL uses: measured (MEASURED.md).
REST = 0.18
# Expected errors on A100 and H100, up to so many tokens of a sample (test_plan.py).
ERRORS = {2047: None, 4096: 0.10, 65536: 0.15}


@cache
def schedule(name, p, m, chunks):
    return schedules.SCHEDULES[name](p, m, chunks)


def unit_seconds(c, device, dtype, z, say):
    """Return the seconds of one micro-batch, without communication: (of a block, of the embedding, of the head).

    Of a block: F, I, W, and what recompute=elementwise adds to I.
    """
    h, t, n, rows, item = c.hidden_size, c.tp, tokens_of_rank(c), rows_outside(c), z.item
    peak, memory, gap = device.peak(dtype), device.memory_rate * device.memory, device.operation
    rate, V = peak * device.matrix, c.padded_vocab_size // t

    def product(M, N, K, result=item):
        """result: bytes moved for an element of the result."""
        moved = item * (M * K + K * N) + result * M * N
        seconds = 2 * K * (M * N + device.wave) / rate + moved / memory + gap
        say(f"product [{M}, {K}] x [{K}, {N}]", "2 K (M N + wave) / rate + bytes / rate + gap", seconds)
        return seconds

    matrices = matrices_of(c)
    linears = [m.local(t) for m in matrices.of_kind("column", "row")]
    products = sum(product(n, outputs, inputs) for inputs, outputs in linears)
    # Attention has the lower triangle. Its backward has five products instead of two.
    attention = device.attention * min(1.0, (2048 / c.seq_length) ** device.decline)
    triangle, vectors = 2 * n * c.seq_length * h / t / (peak * attention), item * n * h / t / memory
    passes = {
        kind: (outside * rows * h + inside * n * h // t) * item / memory + operations * gap
        for kind, (outside, inside, operations) in matrices.formulas.passes(c).items()
    }
    groups = 2 * c.query_groups / c.num_attention_heads  # keys and values, in widths of queries
    F = products + triangle + (2 + groups) * vectors + passes["F"]
    I = products + 2.5 * triangle + (4 + 2 * groups) * vectors + passes["I"]
    W = sum(product(outputs, inputs, n, 2 * z.wide) for inputs, outputs in linears)
    embedding = (6 * item + 3 * z.wide) * n * h / memory + 10 * gap
    head = product(n, V, h) + product(n, h, V) + product(V, h, n, 2 * z.wide)
    head += (4 * item * n * V + 8 * item * rows * h) / memory
    return (F, I, W, passes["elementwise"]), embedding, head


class Step:
    """A step: `seconds`, their `parts` as {part: seconds}, and `bubble`, its share of the pipeline's time.

    model: `search.Model`; layout: its `Layout` of c. m: micro-batches of a data rank. exact: simulate the schedule.
    say(name, formula, seconds): called for each number.
    """

    def __init__(self, c, model, layout, device, m, exact=True, say=lambda *line: None):
        self.c, self.layout, self.device, self.m = c, layout, device, m
        self.z, self.exact, self.say, self.peak = layout.sizes, exact, say, device.peak(model.config.dtype)
        world, ranks = ledger.axis_sizes(layout)["world"], c.tp * c.cp  # ranks: of a pipeline stage

        def in_node(stride, n):
            """Return how many of n ranks, `stride` apart, are in one node."""
            return min(n, max(1, device.per_node // stride))

        # The distance of a rank from its counterpart in the next data replica, and in the next stage.
        to_replica, to_stage = (ranks, c.tp * layout.data_ranks) if c.order == "pp-dp-tp" else (ranks * c.pp, ranks)
        group = layout.data_ranks // c.zero_copies  # data ranks that share one copy
        replicas = max(1, group // c.cp)
        data = in_node(c.tp, min(c.cp, group)) * in_node(to_replica, replicas), group
        pipeline = 2 if to_stage * c.pp <= device.per_node else 1, 2
        self.rings = {  # axis: (its ranks in one node, all its ranks)
            "tp": (in_node(1, c.tp), c.tp),
            "cp": (in_node(c.tp, c.cp), c.cp),
            "pp": pipeline,
            "data": data,
            "shards": data,
            "copies": (in_node(to_replica * replicas, c.zero_copies), c.zero_copies),
            "holders": pipeline,
            "world": (in_node(1, world), world),
        }
        self.sent = {rank: model.sent(layout, m, c.micro_batch_size, rank) for rank in {0, min(1, c.pp - 1), c.pp - 1}}
        self.add_parts(self.stages(*unit_seconds(c, device, model.config.dtype, self.z, say)))

    # --- wires --------------------------------------------------------------------------------------------------------

    def send(self, axis, calls, sent):
        """Return the seconds of `calls` communications that send `sent` bytes together."""
        together, n = self.rings[axis]
        return float(sent) / wire(self.device, together, n) + calls * math.ceil(math.log2(n)) * self.device.latency

    def transfer(self, rank, axis, *whats):
        """Return the seconds of what a rank sends over an axis: all, or these rows."""
        rows = (row for (a, what, _), row in self.sent[rank].items() if a == axis and (not whats or what in whats))
        return sum(self.send(axis, *row) for row in rows)

    def tensor_parallel(self, W):
        """Return the seconds, in F and in I, of a block's collectives that no product hides."""
        c, matrices = self.c, matrices_of(self.c)
        columns, rows = matrices.of_kind("column"), matrices.of_kind("row")
        operation = "all_gather" if c.sequence_parallel else "all_reduce"  # a reduce_scatter sends as much
        each = self.send("tp", 1, sent_bytes(operation, c.tp, self.z.item * tokens_of_rank(c) * c.hidden_size))
        in_F, alone, by_dw, by_dx = collectives(len(columns), len(rows), c.sequence_parallel)
        actions = itertools.chain(*schedule(c.schedule, c.pp, c.pp, c.chunks).actions)
        if any(action.kind == "W" for action in actions):  # dW runs later
            alone, by_dw = alone + by_dw, 0
        # dW of a mean column parallel linear, in GPT-2 3.5 of a block's 12 h^2 weights. dx takes as long
        share = Fraction(sum(m.elements for m in columns), len(columns) * sum(m.elements for m in columns + rows))
        product = W * share.numerator / share.denominator
        return in_F * each, alone * each + (by_dw + by_dx) * max(0.0, each - product)

    def context_parallel(self):
        """Return the seconds of a block's exchanges, in F. In I they take as long."""
        c = self.c
        elements = 4 * tokens_of_rank(c) * c.hidden_size // c.tp
        return self.send("cp", 2, sent_bytes("all_to_all", c.cp, elements * self.z.item))

    # --- the step -----------------------------------------------------------------------------------------------------

    def stages(self, block, embedding, head):
        """Return the seconds of one micro-batch as an array [pp, 6]: COLUMNS of each rank.

        F and I contain the recomputation and what nothing hides of tp and cp.
        """
        layout, (F, I, W, elementwise) = self.layout, block
        (in_F, in_I), over_cp = self.tensor_parallel(W), self.context_parallel()
        recomputation = {"none": 0.0, "elementwise": elementwise, "full": F + in_F + over_cp}[self.c.recompute]
        block = F + in_F + over_cp, I + in_I + over_cp + recomputation, W, recomputation, in_F + in_I, 2 * over_cp
        for name, seconds in zip(COLUMNS, block, strict=True):
            self.say(f"{name} of a block", "4 products; F, I: attention, passes over memory, collectives", seconds)
        counts, pipelines = [], sum(0 in units for units in layout.units)
        for rank in range(self.c.pp):
            units = [unit for chunk in layout.chunks(rank) for unit in layout.units[chunk]]
            first, last = units.count(0), units.count(len(layout.unit_specs) - 1)
            counts.append((len(units) - first - last, first, last))
        # Chimera has 2 pipelines, and each micro-batch uses one of them.
        return np.array(counts) @ [block, (embedding / 2, embedding / 2, 0, 0, 0, 0), (0, head, 0, 0, 0, 0)] / pipelines

    def add_parts(self, stages):
        """Set `parts` and their sum, from the result of `stages`: the busiest stage sets the pace."""
        c, m = self.c, self.m
        busiest, mean = stages[stages[:, :3].sum(1).argmax()], stages[:, :3].mean(0)
        F, I, W, recomputation, tensor, context = busiest
        arrival = self.send("pp", 0, self.z.item * rows_outside(c) * c.hidden_size) + self.device.latency
        bubble, formula, messages = idle(c.schedule, c.pp, m, c.chunks, *mean, arrival, self.exact)
        for name, seconds in zip([*COLUMNS, "F + I + W of a mean stage"], [*busiest, sum(mean)], strict=True):
            self.say(name, "a micro-batch on the busiest stage", seconds)
        work = m * (F + I + W)
        data = max(self.data_parallel(rank, *stages[rank, :3]) for rank in self.sent) + max(map(self.sums, self.sent))
        update = max(self.update(rank) + self.whole_matrices(rank) for rank in self.sent)
        rest = REST * (work + bubble + messages + data + update)
        compute = work - m * (recomputation + tensor + context)
        parts = [
            ("compute", "m (F + I + W - recomputation - collectives - context)", compute),
            ("recomputation", "m recomputation", m * recomputation),
            ("tensor parallel", "m collectives", m * tensor),
            ("context parallel", "m context", m * context),
            ("bubble", f"{formula}, mean stage", bubble),
            ("pipeline messages", "waits for messages on their way", messages),
            ("data parallel", "what no backward hides; sums", data),
            ("update", "bytes of the optimizer's state / rate of memory; Muon's products", update),
            ("everything else", f"{REST:.0%} of the sum", rest),
        ]
        self.parts = {name: seconds for name, _, seconds in parts}
        self.seconds, self.bubble = sum(self.parts.values()), bubble / (work + bubble + messages)
        for part in [*parts, ("step", "sum", self.seconds)]:
            self.say(*part)

    def data_parallel(self, rank, F, I, W):
        """Return the seconds of sums over data ranks and of ZeRO that no computation hides.

        Nothing hides the last bucket, nor the sums over copies of the last two.
        """
        layout, m, zero = self.layout, self.m, self.layout.zero_stage
        units = sum(len(layout.units[chunk]) for chunk in layout.chunks(rank))
        shards = "shards" if self.c.zero_copies > 1 else "data"
        reduced, gathered = self.transfer(rank, shards, "gradients"), self.transfer(rank, shards, "parameters")
        of_update = self.transfer(rank, shards, "parameter norms", "momentum")
        rounds = m if zero >= 2 else 1  # the gradients are reduced so often
        last = reduced / rounds / units
        B = I + W + last * (zero < 2)
        exposed = rounds * max(0.0, reduced / rounds - B) + gathered
        if zero == 3:  # beside a unit: the next unit's gather, reductions
            each = gathered / 2 / m
            exposed = m * (max(0.0, each - F) + max(0.0, each + reduced / m - B)) + each / units
        copies = self.transfer(rank, "copies")
        copies = max(copies * min(1, Window.MOST / units), copies - B)
        return exposed + last + of_update + copies

    def sums(self, rank):
        names = "partial gradients", "parameter norms", "replicated gradients", "momentum"
        return self.transfer(rank, "tp", *names) + self.transfer(rank, "holders") + self.transfer(rank, "world")

    def update(self, rank):
        """Return the seconds of the optimizer, which memory limits; with offload the CPU's memory and PCIe."""
        layout, device, z, memory_rate = self.layout, self.device, self.z, self.device.memory_rate * self.device.memory
        _, gradients, master, moments = map(float, rank_states(layout, rank, z).values())
        elements = memory.stored(layout, rank) / layout.shards
        state, read = 2 * (master + moments), 2 * z.wide * elements  # the norm and the update read the gradients
        if not self.c.offload:
            return (state + gradients + read + z.item * elements) / memory_rate
        moved = (z.wide + z.item) * elements  # gradients to the host, parameters to the device
        on_host = moved / device.host_rate + (state + moved) / device.host_memory_rate
        return on_host + (gradients + read / 2) / memory_rate

    def whole_matrices(self, rank):
        """Return the seconds of Muon's Newton-Schulz, 15 products of each matrix (`parallel/muon.py`)."""
        if not RULES[self.c.optimizer].whole:
            return 0.0
        device = self.device
        blocks = sum(name.startswith("block") for name in self.layout.buckets(rank))
        work = moved = elements = 0
        for m in matrices_of(self.c).of_kind("column", "row"):
            r, k = sorted((m.outputs, m.inputs))
            work += m.count * (20 * r * r * k + 10 * r**3 + 10 * (2 * r + k) * device.wave)
            moved += m.count * 5 * (4 * r * k + 5 * r * r)
            elements += m.elements
        products = work / (self.peak * device.matrix)
        elements = 2 * elements // self.c.tp // self.layout.shards  # u to the device, O back
        copies = self.c.offload * elements * self.z.wide / device.host_rate
        return blocks * (products + moved * self.z.item / (device.memory_rate * device.memory) + copies)


def collectives(columns, rows, sequence_parallel):
    """Return the numbers of a block's collectives: (in F, alone in I, in I beside dW, in I beside dx).

    columns, rows: numbers of linears. With sequence parallelism F also gathers x before a column parallel linear, and I
    gathers dy of a row parallel linear, and x for dW.
    """
    if sequence_parallel:
        return columns + rows, rows, columns, columns
    return rows, 0, columns, 0


def wire(device, together, n):
    """Return bytes per second of a ring of n ranks, of which `together` are in one node.

    Between nodes, each member in a node opens a ring through a network card (NVIDIA/nccl issue 601). The groups of one
    node share its cards.
    """
    inside = device.wire_rate * device.wire
    if together == n:
        return inside
    groups = max(1, device.per_node // together)
    cards = min(together, device.cards / groups)
    return min(cards * device.card_rate * device.network, inside)


# --- the pipeline -----------------------------------------------------------------------------------------------------
#
# Here the bubble is that of the whole step. `bubbles.FORMULAS` counts a rank's own time: ZB-H2 and ZB-V differ.

CLOSED = {  # (the condition; makespan minus m (F + I + W); time that short messages add, in units of one message)
    "gpipe": ("True", "(p-1) * (F+I+W)", "2*(p-1)"),
    "1f1b": ("True", "(p-1) * (F+I+W)", "2 * (p + m - 3 - (m-2)//p)"),
    "interleaved": ("True", "(p-1) * (F+I+W) / v", "2*(v*p-1)"),
    "zb-h1": ("m >= 2*p and W <= min(F, I)", "(p-1) * (F+I-W)", "4*(p-1)"),
    "zb-h2": ("m >= 2*p and W <= min(F, I)", "(p-1) * max(F, F+I-2*W)", "(p-1) * (1 + (I >= 2*W))"),
    "zb-v": ("m >= 2*p and W <= F <= I", "(p-1) * max(I/2, I-W)", "5*p-7 + (p-1) * (I >= 2*W)"),
}


@cache
def idle(name, p, m, chunks, F, I, W, message, exact=True):
    """Return (idle seconds of a rank if messages take no time, the formula, seconds that messages add).

    F, I, W: seconds of a whole stage. Without a closed form, exact=False returns 1F1B's result.
    """
    if p == 1:
        return 0.0, "one stage", 0.0
    letters = dict(p=p, m=m, v=chunks, F=F, I=I, W=W, max=max)
    has_form = name in CLOSED and by_formula(CLOSED[name][0], **letters)
    if has_form or not exact:
        _, waiting, messages = CLOSED[name if has_form else "1f1b"]
        return by_formula(waiting, **letters), waiting, by_formula(messages, **letters) * message
    first = min(m, 3 * p + m % p)  # two short steps predict a long step
    still, moving = ends = simulated(name, p, first, chunks, F, I, W, message)
    if m > first:
        longer = simulated(name, p, first + p, chunks, F, I, W, message)
        still, moving = ends + (m - first) // p * (longer - ends)
    return max(0.0, float(still) - m * (F + I + W)), "simulated: `bubbles.simulate`", float(moving - still)


def simulated(name, p, m, chunks, F, I, W, message):
    """Return the seconds of a step: if messages take no time, and with them."""
    order = schedule(name, p, m, chunks)
    v = len(schedules.pipelines(order)[0]) // p
    cost = {"F": F / v, "B": (I + W) / v, "I": I / v, "W": W / v}
    return np.array([max(e.end for e in simulation.run_in_order(order, cost, time)) for time in (0, message)])
