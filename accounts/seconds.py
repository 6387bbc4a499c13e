"""Predict the seconds of a step from the work in it and the rates of a device.

    an operation            work / rate + the gap to the next operation
    a matrix product        2 K (MN + wave) / (share * peak)  +  bytes of its three matrices / memory rate  +  gap
    an elementwise pass     bytes / memory rate
    a collective            bytes that a rank sends / rate of the slowest wire  +  calls * latency of its hops

A GPU computes a product in waves of tiles, 128 x 256 elements on each multiprocessor. The start of the first wave and
the last wave, which is not full, cost about one wave, the constant `wave`.

No model has a formula: the products and bytes of a unit are measured on tensors without values (`meta.py`), and the
bytes sent are `ledger.py`'s. Left out: tensor parallelism outside of the blocks (1% of a step).

Over n ranks, a number travels n - 1 hops in an AllGather or a ReduceScatter (a ring), most of them within nodes, and
log2(n) in an AllReduce (a tree; NVIDIA/nccl, src/graph/tuning.cc).
"""

import math
from functools import cache

import numpy as np

from accounts import meta, zero_states
from accounts.bubbles import FORMULAS
from accounts.ledger import ranks_of
from accounts.zero_states import rank_states
from parallel import schedules, simulation
from parallel.comm import sent_bytes
from parallel.layout import rows_outside, tokens_of_rank
from parallel.zero import Window

KINDS = ("F", "I", "W", "recomputation", "tensor parallel", "context parallel")  # columns of `Step.stages`
# Gaps of the host, stragglers, clocks under load, multiprocessors that NCCL uses: measured (MEASURED.md).
REST = 0.18
# Bytes of the backward of the operations between products, in units of forward. GELU: 12 for 8; LayerNorm: 4 for 3.
BACKWARD = 1.4
# Expected errors on A100 and H100, of samples with 2,048 tokens and with more than 4,096 (test_plan.py).
ERROR, LONG_ERROR = 0.10, 0.15


@cache
def schedule(name, p, m, chunks):
    return schedules.SCHEDULES[name](p, m, chunks)


class Step:
    """A step: `seconds`, their `parts` as {part: seconds}, and `bubble`, its share of the pipeline's time.

    layout, z: with b = 1; sent: {rank: table of `ledger.predict_sent`} of c's step; m: micro-batches of a
    data rank. exact: simulate the schedule. lines: (name, formula, seconds) of each part; block: of what the
    units do, each kind once.
    """

    def __init__(self, c, layout, z, sent, device, m, exact=True):
        self.c, self.layout, self.sent, self.device, self.m, self.lines = c, layout, sent, device, m, []
        self.block = []
        self.z, self.memory, self.peak = z, device.memory_rate * device.memory, device.peak(c.dtype)
        self.rings = rings(c, layout, device)
        work = {rank: m * stage for rank, stage in enumerate(self.stages())}
        busiest = max(work.values(), key=lambda stage: stage[:3].sum())
        F, I, W = sum(work.values())[:3] / c.pp / m
        arrival = self.send("pp", 0, self.z.item * rows_outside(c) * c.hidden_size) + device.latency
        bubble, messages = idle(c.schedule, c.pp, m, c.chunks, F, I, W, arrival, exact)
        parts = dict(zip(KINDS[3:], busiest[3:], strict=True))
        compute = busiest[:3].sum() - sum(parts.values())
        self.add("compute", "m (F + I + W) of the busiest stage, without the next three", compute)
        for name, seconds in parts.items():
            self.add(name, "m times; of communication, what nothing hides", seconds)
        self.add("bubble", "simulated, with the mean stage" if exact else "1F1B's", bubble)
        self.add("pipeline messages", "waits for messages on their way", messages)
        data = max(self.data_parallel(rank, *work[rank][:3] / m) for rank in sent)
        self.add("data parallel", "what no backward hides; sums", data + max(map(self.sums, sent)))
        update = max(self.update(rank) + self.whole_matrices(rank) for rank in sent)
        self.add("update", "bytes of the optimizer's state / rate of memory; Muon's products", update)
        self.add("everything else", f"{REST:.0%} of the sum", REST * sum(seconds for *_, seconds in self.lines))
        self.parts = {name: seconds for name, _, seconds in self.lines}
        self.seconds = sum(self.parts.values())
        self.bubble = bubble / (busiest[:3].sum() + bubble + messages)

    def add(self, name, formula, seconds):
        self.lines.append((name, formula, float(seconds)))

    # --- computation --------------------------------------------------------------------------------------------------

    def unit(self, work):
        """Return the seconds (F, I, W) of a unit, without communication. work: of one sample."""
        device, z, b = self.device, self.z, self.c.micro_batch_size

        def product(M, K, N, result=z.item):
            """result: bytes moved for an element of the result."""
            moved = z.item * (M * K + K * N) + result * M * N
            flops = 2 * K * (M * N + device.wave)
            seconds = flops / (self.peak * device.matrix) + moved / self.memory + device.operation
            line = f"product [{M}, {K}] x [{K}, {N}]", "2 K (M N + wave) / rate + bytes / rate + gap", seconds
            self.block.append(line)
            return seconds

        # Attention has the lower triangle. Its backward has five products instead of two.
        share = device.attention * min(1.0, (2048 / self.c.seq_length) ** device.decline)
        triangle = 2 * b * work.attention / (self.peak * share)
        passes = b * work.moved / self.memory + work.operations * device.operation
        F = sum(product(b * M, K, N) for M, K, N in work.products)
        I = sum(product(b * M, N, K) for M, K, N in work.products)
        W = sum(product(K, b * M, N, 2 * z.wide) for M, K, N in work.products)
        return F + triangle + passes, I + 2.5 * triangle + BACKWARD * passes, W

    def stages(self):
        """Return the seconds of one micro-batch as an array [pp, 6]: KINDS of each rank.

        F and I contain the recomputation and what nothing hides of tp and cp.
        """
        c, layout, z = self.c, self.layout, self.z
        works, counts = meta.work_of(layout.config, z.item), []
        firsts = sorted({work.first for work in works})
        seconds = [self.of_unit(i, works[i], works[i] is works[-1]) for i in firsts]
        for rank in range(c.pp):
            of_rank = [works[unit].first for chunk in layout.chunks(rank) for unit in layout.units[chunk]]
            counts.append([of_rank.count(i) for i in firsts])
        # Chimera has 2 pipelines, and each micro-batch uses one of them.
        return np.array(counts) @ seconds / sum(0 in of_chunk for of_chunk in layout.units)

    def of_unit(self, i, work, is_head):
        """Return the seconds of unit i, as `stages` does. The head does all in its backward."""
        c, z = self.c, self.z
        if i == 0:  # the look-ups are no operations between products
            table = (6 * z.item + 3 * z.wide) * tokens_of_rank(c) * c.hidden_size / self.memory
            F, I, W = self.unit(work._replace(moved=0, operations=0))
            return F + table / 2, I + table / 2, W, 0, 0, 0
        F, I, W = self.unit(work)
        formula = "products; F, I: attention, bytes of the other operations / rate"
        if is_head:
            self.block.append(("F, I and W of the head", formula, F + I + W))
            return 0, F + I + W, 0, 0, 0, 0
        self.block += [(f"{kind} of unit {i}", formula, x) for kind, x in {"F": F, "I": I, "W": W}.items()]
        in_F, in_I = self.tensor_parallel(work, W)
        elements = c.micro_batch_size * sum(work.exchanged)
        over_cp = self.send("cp", len(work.exchanged), sent_bytes("all_to_all", c.cp, elements * z.item))
        again = (F + in_F + over_cp) * (work.runs - 1)
        return F + in_F + over_cp, I + in_I + over_cp + again, W, again, in_F + in_I, 2 * over_cp

    def tensor_parallel(self, work, W):
        """Return the seconds, in F and in I, of a unit's collectives that no product hides.

        With sequence parallelism F also gathers x before a column parallel linear, and I gathers dy of a row parallel
        linear, and x for dW. A product dW or dx hides one collective. I has no dW if W runs later.
        """
        c, sp = self.c, self.c.sequence_parallel
        columns, rows = len(work.columns), len(work.rows)
        whole = self.z.item * tokens_of_rank(c) * c.hidden_size
        operation = "all_gather" if sp else "all_reduce"
        each = self.send("tp", 1, sent_bytes(operation, c.tp, whole), operation)
        later = any(action.kind == "W" for action in schedule(c.schedule, c.pp, 2 * c.pp, c.chunks).actions[0])
        beside = columns * (1 + sp - later)
        hidden = min(each, W / max(1, columns + rows))
        return (rows + columns * sp) * each, (rows * sp + columns * later + beside) * each - beside * hidden

    # --- communication ------------------------------------------------------------------------------------------------

    def send(self, axis, calls, sent, operation=""):
        """Return the seconds of `calls` communications that send `sent` bytes together."""
        (together, n), device = self.rings[axis], self.device
        between = n // together - 1  # hops between nodes
        hops = (n - 1 - between) * device.hop + between * device.latency
        if operation not in ("all_gather", "reduce_scatter"):
            hops = math.ceil(math.log2(n)) * device.latency
        return float(sent) / wire(device, together, n) + calls * hops

    def transfer(self, rank, axis, *whats):
        """Return the seconds of what a rank sends over an axis: all, or these rows."""
        rows = ((what, how, row) for (a, what, how), row in self.sent[rank].items() if a == axis)
        return sum(self.send(axis, *row, how) for what, how, row in rows if not whats or what in whats)

    def data_parallel(self, rank, F, I, W):
        """Return the seconds of sums over data ranks and of ZeRO that no computation hides.

        Nothing hides the last bucket, nor the sums over copies of the last two.
        """
        layout, m, zero = self.layout, self.m, self.layout.zero_stage
        units = sum(len(layout.units[chunk]) for chunk in layout.chunks(rank))
        shards = "shards" if self.c.zero_copies > 1 else "data"
        reduced, gathered = self.transfer(rank, shards, "gradients"), self.transfer(rank, shards, "parameters")
        rounds = m if zero >= 2 else 1  # the gradients are reduced so often
        last = reduced / rounds / units
        B = I + W + last * (zero < 2)
        exposed = rounds * max(0.0, reduced / rounds - B) + gathered
        if zero == 3:  # beside a unit: the next unit's gather, reductions
            each = gathered / 2 / m
            exposed = m * (max(0.0, each - F) + max(0.0, each + reduced / m - B)) + each / units
        rest = self.transfer(rank, shards, "parameter norms", "momentum")
        copies = self.transfer(rank, "copies")
        return exposed + last + rest + max(copies * min(1, Window.MOST / units), copies - B)

    def sums(self, rank):
        names = "partial gradients", "parameter norms", "replicated gradients", "momentum"
        return self.transfer(rank, "tp", *names) + self.transfer(rank, "holders") + self.transfer(rank, "world")

    def update(self, rank):
        """Return the seconds of the optimizer, which memory limits; with offload the CPU's memory and PCIe."""
        layout, device, z = self.layout, self.device, self.z
        _, gradients, master, moments = map(float, rank_states(layout, rank, z).values())
        elements = zero_states.stored(layout, rank) / layout.shards
        state, read = 2 * (master + moments), 2 * z.wide * elements  # the norm and the update read the gradients
        if not self.c.offload:
            return (state + gradients + read + z.item * elements) / self.memory
        moved = (z.wide + z.item) * elements  # gradients to the host, parameters to the device
        on_host = moved / device.host_rate + (state + moved) / device.host_memory_rate
        return on_host + (gradients + read / 2) / self.memory

    def whole_matrices(self, rank):
        """Return the seconds of Muon's Newton-Schulz, 15 products of each matrix (`parallel/muon.py`)."""
        if self.c.optimizer != "muon":
            return 0.0
        device = self.device
        work = moved = elements = 0
        for spec in (spec for bucket in self.layout.buckets(rank).values() for spec in bucket.specs):
            if spec.matrix and not spec.frozen:
                *several, outputs, inputs = spec.shape
                count, (r, k) = math.prod(several), sorted((outputs, inputs))
                work += count * (20 * r * r * k + 10 * r**3 + 10 * (2 * r + k) * device.wave)
                moved += count * 5 * (4 * r * k + 5 * r * r)
                elements += count * outputs * inputs
        products = work / (self.peak * device.matrix)
        elements = 2 * elements // self.c.tp // self.layout.shards  # u to the device, O back
        copies = self.c.offload * elements * self.z.wide / device.host_rate
        return products + moved * self.z.item / self.memory + copies


def rings(c, layout, device):
    """Return {axis: (its ranks in one node, all its ranks)}, of rank 0's groups."""
    ranks = ranks_of(layout)  # [dp, pp, cp, tp]
    data, stages, shards = ranks[:, 0, :, 0].flatten(), ranks[0, :, 0, 0], layout.data_ranks // c.zero_copies
    groups = {
        "tp": ranks[0, 0, 0],
        "cp": ranks[0, 0, :, 0],
        "data": data,
        "shards": data[:shards],
        "copies": data[::shards],
        "world": ranks.flatten(),
    }
    pipeline = 1 + int(max(stages) < device.per_node), 2  # a message may leave the node
    inside = {axis: (int(sum(group < device.per_node)), len(group)) for axis, group in groups.items()}
    return inside | {"pp": pipeline, "holders": pipeline}


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


@cache
def idle(name, p, m, chunks, F, I, W, message, exact=True):
    """Return the idle seconds of a rank in the whole step: (if messages take no time, more that messages add).

    F, I, W: seconds of a whole stage. exact=False is a fast guess.
    """
    if p == 1:
        return 0.0, 0.0
    if not exact and not (name in ("zb-h1", "zb-v") and m < 2 * p - 1):  # there the guess is too short
        each = {"interleaved": (F + I + W) / chunks, "zb-h1": F + I - W, "zb-v": max(I / 2, I - W)}
        hops = 2 * (p + m - 3 - (m - 2) // p) if name == "1f1b" else 2 * p * chunks  # a round trip has no slack in 1F1B
        return (p - 1) * each.get(name, F + I + W), hops * message
    first = min(m, 3 * p + m % p) if name in FORMULAS else m  # two short steps predict a long step of our schedules
    still, moving = ends = simulated(name, p, first, chunks, F, I, W, message)
    if m > first:
        longer = simulated(name, p, first + p, chunks, F, I, W, message)
        still, moving = ends + (m - first) // p * (longer - ends)
    return max(0.0, float(still) - m * (F + I + W)), float(moving - still)


def simulated(name, p, m, chunks, F, I, W, message):
    """Return the seconds of a step: if messages take no time, and with them."""
    order = schedule(name, p, m, chunks)
    v = len(schedules.pipelines(order)[0]) // p
    cost = {"F": F / v, "B": (I + W) / v, "I": I / v, "W": W / v}
    return np.array([max(e.end for e in simulation.run_in_order(order, cost, time)) for time in (0, message)])
