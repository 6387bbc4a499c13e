"""Predict the seconds of a step from the work in it and the rates of a device.

    an operation            work / rate + the gap to the next operation
    a matrix product        2 K (MN + wave) / (share * peak)  +  bytes of its three matrices / memory rate  +  gap
    an elementwise pass     bytes / memory rate
    a ring of n ranks       bytes that a rank sends / rate of the slowest wire  +  calls * log2(n) * latency

A GPU computes the result of a product in tiles, one wave of tiles after another. It needs time to begin the first wave,
and the last wave is not full. Together this costs about one wave, the constant `wave`: one tile of 128 x 256 elements
on each multiprocessor. So a product with a small result is slow. A product with a short inner side is slow because its
matrices cost more than its multiplications. A small micro-batch is slow for the first reason.

`ledger.py` predicts the bytes sent, `memory.py` the bytes kept, `schedules.FORMULAS` and `schedules.simulate` the idle
time. A run's reports use the same predictions.

A step on the busiest pipeline rank is the sum of these parts:

    compute              m (F + I + W) of its units, without the next two parts
    recomputation        m F of its blocks, with recompute=full
    tensor parallel      its collectives, minus what runs beside a matrix product (`tensor.py`, "What can overlap")
    bubble               the rank waits; the formula of the schedule, for stages of mean duration
    pipeline messages    the rank waits for messages that are sent
    data parallel        what the backward of the last micro-batch does not hide (ZeRO-2: of each micro-batch; ZeRO-3:
                         also the gathers before each forward and backward), the all-gather of new parameters, sums
                         over holders and over tp
    update               the optimizer reads and writes its state; with offload in the host's memory
    everything else      REST of the sum of the parts above

The model predicts three programs. "ours" is this project: FlashAttention keeps no [s, s] matrix and computes only the
lower triangle; its backward computes the probabilities again. "megatron-2021" and "megatron-2022" are Megatron-LM as
Narayanan et al. (arXiv 2104.04473) and Korthikanti et al. (arXiv 2205.05198) ran it, to compare with their tables:

    attention     the [s, s] matrix is formed and passes through memory several times. With recompute=none, backward
                  computes it again: the selective recomputation of Korthikanti et al.
    messages      bsh/t elements, gathered again inside the node (Narayanan et al., section 4.1)
                  with several chunks, a rank waits for the messages of each action
    gradients     reduced after the backward
    2021 only     dx is summed before dW is computed; dW is written, and then added to the gradient
"""

import math
from functools import cache
from typing import NamedTuple

from parallel import schedules
from parallel.layout import rows_outside

# Passes over memory of a block's elementwise operations, counted in `kernels.py`. A pass reads or writes a tensor once.
OUTSIDE = {"F": 9, "I": 10}  # tensors of [rows, h]: LayerNorms, additions, gradients of two biases
INSIDE = {"F": 8, "I": 15}  # tensors of [n, h/t]: GELU 4 + 4, its backward 3 * 4, gradient of qkv's bias 3
GAPS = {"F": 5, "I": 9}  # operations of a block that are no matrix products
# Bytes for each element of the [s, s] matrix: product, mask with softmax, dropout (with a mask of 1 byte), product.
MATRIX = {"F": 2 + 4 + 5 + 2, "I": 2 + 2 + 5 + 6 + 4}
CODES = ("ours", "megatron-2021", "megatron-2022")
# Collectives of a block: how many run alone, beside dW, beside dx. `ledger.py` counts all three together.
COLLECTIVES = {  # (sequence parallel, operation): {phase: (alone, beside dW, beside dx)}
    (False, "all_reduce"): {"F": (2, 0, 0), "I": (0, 2, 0)},
    (True, "all_gather"): {"F": (2, 0, 0), "I": (2, 0, 2)},
    (True, "reduce_scatter"): {"F": (2, 0, 0), "I": (0, 2, 0)},
}
# What a step takes beyond the parts above: gaps of the host, stragglers, clocks under load, products slower than the
# best ones, multiprocessors that NCCL uses. This is the mean of 64 published runs of ZeRO-3 on 8 to 128 A100 and H100
# (MosaicML, LLM Foundry, scripts/train/benchmarking/README.md). The constants of the two Megatron codes are fitted to
# whole steps, so they contain it.
REST = {"ours": 0.18, "megatron-2021": 0.0, "megatron-2022": 0.0}
ERROR = 0.10  # nine of ten published runs are within it; `accounts/published.py` has their tables


class Stage(NamedTuple):
    """Seconds of one micro-batch on a pipeline rank. F and I contain `again` and `tensor`."""

    F: float
    I: float
    W: float
    again: float  # recomputation
    tensor: float  # tensor parallel collectives that nothing hides, without those of the recomputation
    units: int

    @property
    def busy(self):
        return self.F + self.I + self.W


class Step:
    """The prediction of one step: `parts` is {part: seconds}, or None if there is no closed form.

    c: Config; layout: its `layout.Layout`; item, wide: bytes as in `memory.Sizes`; m: micro-batches of a data rank;
    sent, states: {pipeline rank: the tables of `ledger.predict` and `memory.rank_states`} of the ranks 0, 1 and p-1.
    exact: simulate a pipeline without a closed form. say: as in `layouts.judge`.
    """

    def __init__(self, c, layout, device, dtype, item, wide, m, sent, states, code, exact, say):
        self.c, self.layout, self.device, self.m, self.say = c, layout, device, m, say
        self.item, self.wide, self.code, self.exact = item, wide, code, exact
        self.sent, self.states = sent, states
        self.n, self.rows = c.micro_batch_size * c.seq_length, rows_outside(c)
        peak, stride = device.peak(dtype), c.tp * c.pp
        self.matrix, self.fused = peak * device.matrix, peak * device.attention
        self.memory = device.memory_rate * device.memory
        say("Rates: data sheet * share that is reached (accounts/devices.py)")
        say(("matrix products", f"{peak / 1e12:.4g} TFLOP/s * {device.matrix}", self.matrix / 1e12, "TFLOP/s"))
        say(("memory", f"{device.memory_rate / 1e9:.4g} GB/s * {device.memory}", self.memory / 1e9, "GB/s"))
        say(("gap between operations", "", device.operation * 1e6, "us"))
        places = {"tp": (1, c.tp), "dp": (stride, layout.dp), "world": (1, stride * layout.dp)}
        places["holders"] = c.tp * max(1, c.pp - 1), 2
        self.rings = {axis: self.ring(axis, *place) for axis, place in places.items()}
        self.stages = self.stages_of(self.block(), *self.ends())
        self.parts = self.parts_of(max(self.stages, key=lambda stage: stage.busy))

    # --- a block, the head --------------------------------------------------------------------------------------------

    def product(self, M, N, K, result):
        """Return the seconds of a product [M, K] x [K, N]. result: bytes moved for an element of the result."""
        moved = self.item * (M * K + K * N) + result * M * N
        return 2 * K * (M * N + self.device.wave) / self.matrix + moved / self.memory + self.device.operation

    def block(self):
        """Return {"F", "I", "W": seconds} of a block for n = bs tokens, without tensor parallel communication."""
        h, t, n, result = self.c.hidden_size, self.c.tp, self.n, {}
        self.say(f"A block, one micro-batch of n = b s = {n:,} tokens")
        linears = [(h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h)]  # inputs, outputs
        forward = [self.product(n, o, i, self.item) for i, o in linears]
        for (i, o), seconds in zip(linears, forward, strict=True):
            formula = "2 K (M N + wave) / rate + bytes / memory rate + gap"
            self.say((f"product [{n}, {i}] x [{i}, {o}]", formula, seconds * 1e3, "ms"))
        for kind, core in zip("FI", self.attention(), strict=True):
            passes = OUTSIDE[kind] * self.rows * h + INSIDE[kind] * n * h // t
            seconds = sum(forward) + passes * self.item / self.memory + GAPS[kind] * self.device.operation
            result[kind] = seconds + core
        added = 2 * self.wide + 2 * self.item * (self.code == "megatron-2021")  # bytes of an element of the gradient
        result["W"] = sum(self.product(o, i, n, added) for i, o in linears)
        for kind, seconds in result.items():
            self.say((f"{kind} of a block", "4 products, attention, passes over memory", seconds * 1e3, "ms"))
        return result

    def attention(self):
        """Return the seconds of a block's attention between qkv and proj, in F and in I."""
        c, n, t = self.c, self.n, self.c.tp
        flops = 4 * n * c.seq_length * c.hidden_size / t
        vectors = self.item * n * c.hidden_size / t / self.memory
        if self.code == "ours":  # the lower triangle; backward has five products instead of two (arXiv 2307.08691)
            half = flops / 2 / self.fused
            return half + 4 * vectors, 2.5 * half + 8 * vectors
        square = n * c.seq_length * c.num_attention_heads / t * self.item / 2 / self.memory
        F = flops / self.matrix + MATRIX["F"] * square + 4 * vectors
        I = 2 * flops / self.matrix + MATRIX["I"] * square + 8 * vectors
        return F, I + F * (c.recompute == "none")  # selective recomputation

    def ends(self):
        """Return the seconds of the embedding and of the head, forward and backward of one micro-batch together."""
        n, h, V, item = self.n, self.c.hidden_size, self.c.padded_vocab_size // self.c.tp, self.item
        embedding = (6 * item + 3 * self.wide) * n * h / self.memory + 10 * self.device.operation
        shapes = (n, V, h, item), (n, h, V, item), (V, h, n, 2 * self.wide)
        products = sum(self.product(*shape) for shape in shapes)
        return embedding, products + (4 * item * n * V + 8 * item * self.rows * h) / self.memory

    # --- wires --------------------------------------------------------------------------------------------------------

    def ring(self, axis, stride, n):
        """Return (bytes per second, hops) of a ring of n ranks, each `stride` ranks after the one before."""
        rate = wire(self.device, stride, n)
        if axis in ("tp", "dp") and n > 1:
            self.say((f"ring of {axis}", f"{n} ranks, each {stride} after the one before", rate / 1e9, "GB/s"))
        return rate, math.ceil(math.log2(n))

    def transfer(self, rank, axis, whats=None):
        """Return the seconds to send a rank's rows of an axis, one after another. whats: only these rows."""
        (rate, hops), latency = self.rings[axis], self.device.latency
        rows = (row for (a, what, _), row in self.sent[rank].items() if a == axis and (not whats or what in whats))
        return sum(float(sent) / rate + calls * hops * latency for calls, sent in rows)

    def message_rate(self):
        """Return bytes per second of a message to the next stage. A node's ranks send at once and share its cards."""
        d = self.device
        if self.c.tp * self.c.pp <= d.per_node:
            return d.wire_rate * d.wire
        return min(d.card_rate, d.cards * d.card_rate / d.per_node) * d.network

    def tensor_parallel(self, W, apart):
        """Return the seconds, in F and in I, of a block's collectives that no product hides.

        W: seconds of a block's dW. apart: True if nothing runs beside the sum of dx.
        """
        c, alone = self.c, {"F": 0.0, "I": 0.0}
        beside = W * 7 / 24  # of qkv or fc1: 3 or 4 of a block's 12 h^2 weights
        rate, hops = self.rings["tp"]
        for (sequence_parallel, operation), phases in COLLECTIVES.items():
            if c.tp == 1 or sequence_parallel != c.sequence_parallel:
                continue
            calls, sent = self.sent[min(1, c.pp - 1)]["tp", "activations", operation]
            each = float(sent) / calls / rate + hops * self.device.latency
            for kind, (plain, by_dw, by_dx) in phases.items():
                hidden = (0 if apart else by_dw) + by_dx
                alone[kind] += (plain + by_dw + by_dx - hidden) * each + hidden * max(0.0, each - beside)
        return alone["F"], alone["I"]

    # --- the step -----------------------------------------------------------------------------------------------------

    def stages_of(self, parts, embedding, head):
        """Return the Stage of each pipeline rank. parts, embedding, head: seconds from `block` and `ends`."""
        c, last, result = self.c, len(self.layout.table) - 1, []
        split, directions = kinds(c.schedule, c.pp, c.chunks)
        F, I = self.tensor_parallel(parts["W"], split or self.code == "megatron-2021")
        again = (parts["F"] + F) * (c.recompute == "full")
        for rank in range(c.pp):
            units = [unit for chunk in self.layout.chunks(rank) for unit in self.layout.units[chunk]]
            first, end = units.count(0) / directions, units.count(last) / directions
            blocks = len(units) / directions - first - end
            forward = blocks * (parts["F"] + F) + first * embedding / 2
            backward = blocks * (parts["I"] + I + again) + first * embedding / 2 + end * head
            stage = Stage(forward, backward, blocks * parts["W"], blocks * again, blocks * (F + I), len(units))
            result.append(stage)
        return result

    def parts_of(self, busiest):
        """Return {part: seconds}, or None. busiest: the Stage with the most work."""
        c, m = self.c, self.m
        work, name = busiest.busy - busiest.again - busiest.tensor, f"stage {self.stages.index(busiest)}"
        self.say(f"The busiest stage, {busiest.units} units, one micro-batch")
        for what, seconds in (("F + I + W", work), ("recomputation", busiest.again), ("collectives", busiest.tensor)):
            self.say((f"{name}: {what}", "sum over its units", seconds * 1e3, "ms"))
        mean = [sum(times) / c.pp for times in zip(*(stage[:3] for stage in self.stages), strict=True)]
        message = self.item * (self.rows if self.code == "ours" else self.n / c.tp) * c.hidden_size
        message /= self.message_rate()
        waits = idle(c.schedule, c.pp, m, c.chunks, *mean, message + self.device.latency, self.exact)
        if not waits:
            return None
        waited = 2 * m * c.chunks * message * (self.code != "ours" and c.chunks > 1)
        parts = [
            ("compute", f"m (F + I + W) of {name}", m * work),
            ("recomputation", f"m times the recomputation of {name}", m * busiest.again),
            ("tensor parallel", f"m times the collectives of {name}", m * busiest.tensor),
            ("bubble", "schedules.FORMULAS, IDLE, or simulated", waits[0]),
            ("pipeline messages", "waits for messages on their way", waits[1] + waited),
            ("data parallel", "what no backward hides; sums", max(map(self.data_parallel, self.sent)) + self.sums()),
            ("update", "bytes of the optimizer's state / memory rate", max(map(self.update, self.sent))),
        ]
        rest, known = REST[self.code], sum(seconds for *_, seconds in parts)
        parts.append(("everything else", f"{rest:.0%} of the sum", rest * known))
        self.seconds, self.bubble = (1 + rest) * known, waits[0] / sum(seconds for *_, seconds in parts[:5])
        self.say("A step (accounts/seconds.py)")
        for part in [*parts, ("step", f"sum; expected error {ERROR:.0%}", self.seconds)]:
            self.say((*part, "s"))
        return {name: seconds for name, _, seconds in parts}

    def data_parallel(self, rank):
        """Return the seconds of dp that no computation hides. Nothing hides the bucket that backward completes last."""
        stage, layout, m = self.stages[rank], self.layout, self.m
        F, B = stage.F, stage.I + stage.W
        if self.code != "ours" and layout.stage < 2:
            B = 0.0  # they reduce after the backward
        whats = ("gradients",), ("parameters",), ("parameter norms",)
        reduced, gathered, norms = (self.transfer(rank, "dp", what) for what in whats)
        last = reduced / (m if layout.stage >= 2 else 1) / stage.units
        if layout.stage == 3:  # beside a unit: the next unit's gather, reductions
            each = gathered / 2 / m
            exposed = m * (max(0.0, each - F) + max(0.0, each + reduced / m - B)) + each / stage.units
        elif layout.stage == 2:
            exposed = m * max(0.0, reduced / m - B) + gathered
        else:
            exposed = max(0.0, reduced - last - B) + gathered
        return exposed + last + norms

    def sums(self):
        """Return the seconds of the sums at the end of a step: over holders, over tp, and of scalars over all ranks."""
        names = ("partial gradients", "parameter norms") + ("replicated gradients",) * (self.code == "ours")
        return max(
            self.transfer(rank, "tp", names) + self.transfer(rank, "holders") + self.transfer(rank, "world")
            for rank in self.sent
        )

    def update(self, rank):
        """Return the seconds of the optimizer on the elements that a rank updates."""
        layout, d, states = self.layout, self.device, self.states[rank]
        owned = layout.stored(rank) / (layout.dp if layout.stage else 1)
        state = 2 * float(states["master weights"] + states["moments"])  # read and written
        zeroed, read = float(states["gradients"]), 2 * self.wide * owned  # the norm and the update read the gradients
        if not self.c.offload:
            return (zeroed + state + read + self.item * owned) / self.memory
        both = (self.wide + self.item) * owned
        return both / d.host_rate + (state + both) / d.host_memory_rate + (zeroed + read / 2) / self.memory


def wire(device, stride, n):
    """Return bytes per second of a ring of n ranks, each `stride` ranks after the one before.

    Ranks are numbered node by node. Between nodes, each member in a node opens a ring through a network card, at most
    `device.rings`. All ranks of a node run such rings at once, so the groups of one node share its cards.
    """
    together = min(n, max(1, device.per_node // stride))  # members in one node
    inside = device.wire_rate * device.wire
    if together == n:
        return inside
    groups = max(1, device.per_node // together)
    cards = min(min(device.rings, together), device.cards / groups)
    return min(cards * device.card_rate * device.network, inside)


# --- the pipeline -----------------------------------------------------------------------------------------------------
#
# A step of the pipeline lasts from the first start on any rank to the last end on any rank, because all ranks wait for
# the gradient norm. `schedules.FORMULAS` counts a rank's own span. For ZB-H2 and ZB-V the two differ.

# The makespan minus m (F + I + W), if the condition in FORMULAS is met. For other schedules it is m (F + I + W) x / (1-x)
# with the bubble x of FORMULAS.
IDLE = {"zb-h2": "(p-1) * max(F, F + I - 2*W)", "zb-v": "(p-1) * max(I/2, I - W)"}
MESSAGES = {  # (time that messages add, in units of one message, if messages are short beside actions; the condition)
    "gpipe": ("2*(p-1)", "True"),
    "1f1b": ("2 * (p + m - 3 - (m-2)//p)", "True"),
    "interleaved": ("2*(v*p-1)", "True"),
    "zb-h1": ("4*(p-1)", "m >= 2*p"),
    "zb-h2": ("(p-1) * (1 + (I >= 2*W))", "m >= 2*p"),
    "zb-v": ("5*p-7 + (p-1) * (I >= 2*W)", "m >= 2*p"),
}


@cache
def kinds(name, p, chunks):
    """Return (True if a schedule splits B, its number of pipelines: 2 for Chimera, where each micro-batch uses one)."""
    made = schedules.SCHEDULES[name](p, p, chunks)
    return any(action.kind == "W" for action in made.actions[0]), len(schedules.pipelines(made))


@cache
def idle(name, p, m, chunks, F, I, W, message, exact=True):
    """Return (idle seconds of a rank in a step, if messages take no time; seconds that messages add).

    F, I, W: seconds of a whole stage. message: seconds of a message. If these numbers have no closed form, `idle`
    simulates, or returns None with exact=False.
    """
    if p == 1:
        return 0.0, 0.0
    letters = dict(p=p, m=m, v=chunks, F=F, I=I, W=W, B=I + W, max=max)
    conditions = [schedules.FORMULAS[name].where, MESSAGES[name][1]] if name in MESSAGES else ["False"]
    if not all(schedules.by_formula(condition, **letters) for condition in conditions):
        return simulated(name, p, m, chunks, F, I, W, message) if exact else None
    bubble = schedules.by_formula(schedules.FORMULAS[name].bubble, **letters)
    idle = schedules.by_formula(IDLE[name], **letters) if name in IDLE else m * (F + I + W) * bubble / (1 - bubble)
    return max(0.0, idle), schedules.by_formula(MESSAGES[name][0], **letters) * message


def simulated(name, p, m, chunks, F, I, W, message):
    """Return the result of `idle` from `schedules.simulate`. Two short steps predict a long step."""

    def spans(m):
        made = schedules.SCHEDULES[name](p, m, chunks)
        v = len(schedules.pipelines(made)[0]) // p  # in Chimera, each of two pipelines runs half of the micro-batches
        cost = {"F": F / v, "B": (I + W) / v, "I": I / v, "W": W / v}
        return [schedules.simulate(made, cost, comm).makespan for comm in (0, message)]

    first = min(m, 3 * p + m % p)
    short, rounds = spans(first), (m - first) // p
    if rounds:
        short = [a + rounds * (b - a) for a, b in zip(short, spans(first + p), strict=True)]
    return max(0.0, short[0] - m * (F + I + W)), short[1] - short[0]
