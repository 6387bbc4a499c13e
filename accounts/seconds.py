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

import functools
import math
from typing import NamedTuple

from parallel import schedules
from parallel.layout import rows_outside

# Passes over memory of a block's elementwise operations, counted in `kernels.py`. A pass reads or writes a tensor once.
OUTSIDE = {"F": 9, "I": 10}  # tensors of [rows, h]: LayerNorms, additions, gradients of two biases
INSIDE = {"F": 8, "I": 15}  # tensors of [n, h/t]: GELU 4 + 4, its backward 3 * 4, gradient of qkv's bias 3
GAPS = {"F": 5, "I": 9, "W": 0}  # operations of a block that are no matrix products
# Bytes for each element of the [s, s] matrix: product, mask with softmax, dropout (with a mask of 1 byte), product.
MATRIX = {"F": 2 + 4 + 5 + 2, "I": 2 + 2 + 5 + 6 + 4}
# FLOPs of fused attention, in forwards: backward has five products instead of two (Dao, arXiv 2307.08691).
FUSED = {"F": 1, "I": 2.5}

CODES = ("ours", "megatron-2021", "megatron-2022")

# Collectives of a block: how many run alone, beside dW, beside dx. `ledger.py` counts all three together.
COLLECTIVES = {  # (sequence parallel, operation): {phase: (alone, beside dW, beside dx)}
    (False, "all_reduce"): {"F": (2, 0, 0), "I": (0, 2, 0)},
    (True, "all_gather"): {"F": (2, 0, 0), "I": (2, 0, 2)},
    (True, "reduce_scatter"): {"F": (2, 0, 0), "I": (0, 2, 0)},
}


class Rates(NamedTuple):
    """Rates that a device reaches with its constants, in FLOP/s, bytes per second and seconds."""

    matrix: float
    memory: float
    attention: float
    gap: float
    wave: float
    code: str  # one of CODES


def rates(device, dtype, code):
    """Return the Rates of a Device. Raises UserError if it cannot compute in `dtype`."""
    peak = device.peak(dtype)
    reached = peak * device.matrix, device.memory_rate * device.memory, peak * device.attention
    return Rates(*reached, device.operation, device.wave, code)


# --- a block, the head ------------------------------------------------------------------------------------------------


def product(rate, M, N, K, item, result):
    """Return the seconds of a product [M, K] x [K, N]. item, result: bytes moved for an input's, a result's element."""
    moved = item * (M * K + K * N) + result * M * N
    return 2 * K * (M * N + rate.wave) / rate.matrix + moved / rate.memory + rate.gap


def linears(c):
    """Return the (inputs, outputs) of a rank's four linears of a block: qkv, proj, fc1, fc2."""
    h, t = c.hidden_size, c.tp
    return [(h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h)]


def block(c, rate, item, wide):
    """Return {"F", "I", "W", "attention": seconds} of a block for n = bs tokens, without tensor parallel communication.

    "attention" is the part of F that attention takes.
    """
    n, h, t = c.micro_batch_size * c.seq_length, c.hidden_size, c.tp
    core = attention(c, rate, item)
    result = {}
    for kind in "FI":
        passes = OUTSIDE[kind] * rows_outside(c) * h + INSIDE[kind] * n * h // t
        products = sum(product(rate, n, o, i, item, item) for i, o in linears(c))
        result[kind] = products + passes * item / rate.memory + GAPS[kind] * rate.gap + core[kind]
    added = 2 * wide + 2 * item * (rate.code == "megatron-2021")  # bytes of an element that is added to the gradient
    result["W"] = sum(product(rate, o, i, n, item, added) for i, o in linears(c))
    result["attention"] = core["F"]
    return result


def attention(c, rate, item):
    """Return {"F", "I": seconds} of a block's attention between qkv and proj."""
    n, s, h, t = c.micro_batch_size * c.seq_length, c.seq_length, c.hidden_size, c.tp
    flops, vectors = 4 * n * s * h / t, item * n * h / t / rate.memory
    if rate.code == "ours":
        half = flops / 2 / rate.attention  # the lower triangle
        return {"F": half + 4 * vectors, "I": FUSED["I"] * half + 8 * vectors}
    elements = n * s * c.num_attention_heads / t
    seconds = {
        kind: k * flops / rate.matrix + MATRIX[kind] * elements * item / 2 / rate.memory + k * 4 * vectors
        for kind, k in (("F", 1), ("I", 2))
    }
    if c.recompute == "none":  # selective recomputation
        seconds["I"] += seconds["F"]
    return seconds


def ends(c, rate, item, wide):
    """Return (seconds of the embedding, seconds of the head), forward and backward of one micro-batch together."""
    n, h, V = c.micro_batch_size * c.seq_length, c.hidden_size, c.padded_vocab_size // c.tp
    embedding = (6 * item + 3 * wide) * n * h / rate.memory + 10 * rate.gap
    shapes = (n, V, h, item, item), (n, h, V, item, item), (V, h, n, item, 2 * wide)
    head = sum(product(rate, *shape) for shape in shapes) + 4 * item * n * V / rate.memory
    return embedding, head + 8 * item * rows_outside(c) * h / rate.memory


# --- wires ------------------------------------------------------------------------------------------------------------


def wire(device, stride, n):
    """Return (bytes per second, True inside a node) of a ring of n ranks, each `stride` ranks after the one before.

    Ranks are numbered node by node. Between nodes a ring uses `device.rings` network cards. All ranks of a node run
    such rings at once, so the rings of one node share its cards.
    """
    together = min(n, max(1, device.per_node // stride))  # members in one node
    if together == n:
        return device.wire_rate * device.wire, True
    rings = max(1, device.per_node // together)
    card = min(device.rings, together) * device.card_rate
    return min(card, device.cards * device.card_rate / rings) * device.network, False


def message_rate(device, beyond):
    """Return bytes per second of a message to the next stage. beyond: True if some stages lie in different nodes.

    All ranks of a node send at once, so they share its cards.
    """
    if not beyond:
        return device.wire_rate * device.wire
    return min(device.card_rate, device.cards * device.card_rate / device.per_node) * device.network


def transfer(device, table, axis, stride, n, what=None):
    """Return the seconds to send an axis's rows of the ledger, one after another. what: only these rows."""
    if n == 1:
        return 0.0
    rate, hops = wire(device, stride, n)[0], math.ceil(math.log2(n))
    rows = [row for (a, w, _), row in table.items() if a == axis and (what is None or w in what)]
    return sum(float(sent) / rate + calls * hops * device.latency for calls, sent in rows)


def tensor_parallel(c, device, table, parts, apart):
    """Return {"F", "I": seconds of a block's collectives of one micro-batch that no product hides}.

    table: the ledger's, of a rank with blocks. parts: from `block`. apart: True if nothing runs beside the sum of dx.
    """
    alone = {"F": 0.0, "I": 0.0}
    if c.tp == 1:
        return alone
    rate, hops = wire(device, 1, c.tp)[0], math.ceil(math.log2(c.tp))
    beside = parts["W"] * 7 / 24  # of qkv or fc1: 3 or 4 of a block's 12 h^2 weights
    for (sequence_parallel, operation), phases in COLLECTIVES.items():
        if sequence_parallel != c.sequence_parallel:
            continue
        calls, sent = table["tp", "activations", operation]
        each = float(sent) / calls / rate + hops * device.latency
        for kind, (plain, by_dw, by_dx) in phases.items():
            hidden = (0 if apart else by_dw) + by_dx
            alone[kind] += (plain + by_dw + by_dx - hidden) * each + hidden * max(0.0, each - beside)
    return alone


# --- the pipeline -----------------------------------------------------------------------------------------------------
#
# A step of the pipeline lasts from the first start on any rank to the last end on any rank, because all ranks wait for
# the gradient norm. `schedules.FORMULAS` counts a rank's own span. For ZB-H2 and ZB-V the two differ.

IDLE = {  # the makespan minus m (F + I + W), if the condition in FORMULAS is met. zb-h1: as in FORMULAS
    "zb-h1": "(p-1)*(F+I-W)",
    "zb-h2": "(p-1) * max(F, F + I - 2*W)",
    "zb-v": "(p-1) * max(I/2, I - W)",
}
MESSAGES = {  # (time that messages add, in units of one message, if messages are short beside actions; the condition)
    "gpipe": ("2*(p-1)", "True"),
    "1f1b": ("2 * (p + m - 3 - (m-2)//p)", "True"),
    "interleaved": ("2*(v*p-1)", "True"),
    "zb-h1": ("4*(p-1)", "m >= 2*p"),
    "zb-h2": ("(p-1) * (1 + (I >= 2*W))", "m >= 2*p"),
    "zb-v": ("5*p-7 + (p-1) * (I >= 2*W)", "m >= 2*p"),
}


@functools.cache
def idle(name, p, m, chunks, F, I, W, message, simulate=True):
    """Return (idle seconds of a rank in a step, if messages take no time; seconds that messages add).

    F, I, W: seconds of a whole stage. message: seconds of a message. If these numbers have no closed form, `idle`
    simulates, or returns None with simulate=False.
    """
    if p == 1:
        return 0.0, 0.0
    letters = dict(p=p, m=m, v=chunks, F=F, I=I, W=W, B=I + W, max=max)
    formula = schedules.FORMULAS.get(name)
    conditions = [formula.where, MESSAGES[name][1]] if formula and name in MESSAGES else ["False"]
    if not all(schedules.by_formula(condition, **letters) for condition in conditions):
        return simulated(name, p, m, chunks, F, I, W, message) if simulate else None
    if name in IDLE:
        waiting = schedules.by_formula(IDLE[name], **letters)
    else:
        bubble = schedules.by_formula(formula.bubble, **letters)
        waiting = m * (F + I + W) * bubble / (1 - bubble)
    return waiting, schedules.by_formula(MESSAGES[name][0], **letters) * message


@functools.cache
def simulated(name, p, m, chunks, F, I, W, message):
    """Return the result of `idle` from `schedules.simulate`. Two short steps predict a long step."""

    def spans(m):
        made = schedules.SCHEDULES[name](p, m, chunks)
        directions = len(schedules.pipelines(made))  # 2 in Chimera: each runs half of the micro-batches
        v = len(made.parts) // p // directions
        cost = {"F": F / v, "B": (I + W) / v, "I": I / v, "W": W / v}
        return [schedules.simulate(made, cost, comm).makespan for comm in (0, message)]

    first = min(m, 3 * p + m % p)
    short, rounds = spans(first), (m - first) // p
    if rounds:
        short = [a + rounds * (b - a) for a, b in zip(short, spans(first + p), strict=True)]
    return short[0] - m * (F + I + W), short[1] - short[0]


# --- data parallelism and the update ----------------------------------------------------------------------------------


def data_parallel(c, layout, device, table, m, F, B, units):
    """Return the seconds of dp that no computation hides. F, B: seconds of a micro-batch's forward and backward.

    units: units of this rank. The reduction of the bucket that backward completes last is never hidden. With B = 0,
    stages 0 and 1 reduce after the backward.
    """
    n, stride = layout.dp, c.tp * c.pp

    def seconds(what):
        return transfer(device, table, "dp", stride, n, what)

    reduced, gathered = seconds(("gradients",)), seconds(("parameters",))
    last = reduced / (m if layout.stage >= 2 else 1) / units
    if layout.stage == 3:  # beside a unit: the next unit's gather, reductions
        each = gathered / 2 / m
        exposed = m * (max(0.0, each - F) + max(0.0, each + reduced / m - B)) + each / units
    elif layout.stage == 2:
        exposed = m * max(0.0, reduced / m - B) + gathered
    else:
        exposed = max(0.0, reduced - last - B) + gathered
    return exposed + last + seconds(("parameter norms",))


def sums(c, layout, device, table, code):
    """Return the seconds of the sums at the end of a step: over holders, over tp, and of scalars over all ranks."""
    ranks = layout.dp * c.tp * c.pp
    names = ("partial gradients", "parameter norms") + ("replicated gradients",) * (code == "ours")
    partial = transfer(device, table, "tp", 1, c.tp, names)
    holders = transfer(device, table, "holders", c.tp * max(1, c.pp - 1), 2)
    return partial + holders + transfer(device, table, "world", 1, ranks)


def update(c, layout, device, rate, rank, states, item, wide):
    """Return the seconds of the optimizer on the elements that a rank updates. states: {what: bytes} that it keeps."""
    owned = layout.stored(rank) / (layout.dp if layout.stage else 1)
    zeroed = float(states["gradients"])  # written once as 0
    state = 2 * float(states["master weights"] + states["moments"])  # read and written
    if c.offload:
        host = (state + (wide + item) * owned) / device.host_memory_rate
        return (wide + item) * owned / device.host_rate + host + (zeroed + wide * owned) / rate.memory
    return (zeroed + state + (2 * wide + item) * owned) / rate.memory  # the norm and the update read the gradients


# --- a step -----------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """Seconds of one micro-batch on a pipeline rank. F and I contain `again` and `tensor`."""

    F: float
    I: float
    W: float
    again: float  # recomputation
    tensor: float  # tensor parallel collectives that nothing hides, without those of the recomputation
    units: int

    def backward(self, layout, code):
        """Return the seconds of backward that hide the reduction of gradients."""
        return 0.0 if code != "ours" and layout.stage < 2 else self.I + self.W


@functools.cache
def kinds(name, p, chunks):
    """Return (True if a schedule splits B, its number of pipelines: 2 for Chimera, where each micro-batch uses one)."""
    made = schedules.SCHEDULES[name](p, p, chunks)
    return any(action.kind == "W" for action in made.actions[0]), len(schedules.pipelines(made))


def stages(c, layout, device, rate, table, item, wide):
    """Return the Stage of each pipeline rank. table: the ledger's, of a rank with blocks."""
    parts, (embedding, head) = block(c, rate, item, wide), ends(c, rate, item, wide)
    split, directions = kinds(c.schedule, c.pp, c.chunks)
    comm = tensor_parallel(c, device, table, parts, split or rate.code == "megatron-2021")
    again, last, result = (parts["F"] + comm["F"]) * (c.recompute == "full"), len(layout.table) - 1, []
    for rank in range(c.pp):
        units = [unit for chunk in layout.chunks(rank) for unit in layout.units[chunk]]
        first = embedding * units.count(0) / directions
        end = head * units.count(last) / directions
        blocks = (len(units) - units.count(0) - units.count(last)) / directions
        result.append(
            Stage(
                F=blocks * (parts["F"] + comm["F"]) + first / 2,
                I=blocks * (parts["I"] + comm["I"] + again) + first / 2 + end,
                W=blocks * parts["W"],
                again=blocks * again,
                tensor=blocks * (comm["F"] + comm["I"]),
                units=len(units),
            )
        )
    return result


def step(c, layout, device, tables, m, item, wide, dtype, code="ours", simulate=True):
    """Return {part: seconds} of a step, with the parts and the order of the table at the top of this file.

    c: Config; layout: its `layout.Layout`; tables: {pipeline rank: (ledger's table, bytes kept)} of the ranks 0, 1 and
    p-1; m: micro-batches of a data rank; item, wide: bytes as in `memory.Sizes`; dtype: a name. simulate: if False,
    return None where `idle` returns None.
    """
    rate, p = rates(device, dtype, code), c.pp
    found = stages(c, layout, device, rate, tables[min(1, p - 1)][0], item, wide)
    busiest = max(found, key=lambda stage: stage.F + stage.I + stage.W)
    mean = [sum(times) / p for times in zip(*(stage[:3] for stage in found), strict=True)]
    rows = rows_outside(c) if code == "ours" else c.micro_batch_size * c.seq_length / c.tp
    message = item * rows * c.hidden_size / message_rate(device, c.tp * p > device.per_node)
    waits = idle(c.schedule, p, m, c.chunks, *mean, message + device.latency, simulate)
    if not waits:
        return None
    waited = 2 * m * c.chunks * message if code != "ours" and c.chunks > 1 else 0.0
    work = busiest.F + busiest.I + busiest.W - busiest.again - busiest.tensor
    # Processes on a CPU share its cores: while one of them waits, the others compute faster.
    whole = m * (busiest.F + busiest.I + busiest.W)
    bubble = max(0.0, (whole + waits[0]) * device.share - whole)
    return {
        "compute": m * work,
        "recomputation": m * busiest.again,
        "tensor parallel": m * busiest.tensor,
        "bubble": bubble,
        "pipeline messages": waits[1] + waited,
        "data parallel": max(
            data_parallel(
                c, layout, device, tables[r][0], m, found[r].F, found[r].backward(layout, code), found[r].units
            )
            for r in tables
        )
        + max(sums(c, layout, device, tables[r][0], code) for r in tables),
        "update": max(update(c, layout, device, rate, r, tables[r][1], item, wide) for r in tables),
    }


def sent_bytes(tables):
    """Return {axis: bytes} that one rank sends in a step: the largest over the ranks. tables: as in `step`."""
    sums = {}
    for table, _ in tables.values():
        own = {}
        for (axis, *_), (_, sent) in table.items():
            own[axis] = own.get(axis, 0.0) + float(sent)
        sums = {axis: max(sums.get(axis, 0.0), own.get(axis, 0.0)) for axis in sums | own}
    return sums


def wires(c, layout, device, tables, parts):
    """Return ({axis: seconds of its communication in a step}, {axis: the part that no computation hides})."""
    whole = {"tp": 0.0, "pp": 0.0, "dp": 0.0}
    beyond = c.tp * c.pp > device.per_node
    for table, _ in tables.values():
        whole["tp"] = max(whole["tp"], transfer(device, table, "tp", 1, c.tp))
        whole["dp"] = max(whole["dp"], transfer(device, table, "dp", c.tp * c.pp, layout.dp))
        messages = sum(float(sent) for (axis, *_), (_, sent) in table.items() if axis == "pp")
        whole["pp"] = max(whole["pp"], messages / message_rate(device, beyond))
    exposed = {"tp": parts["tensor parallel"], "pp": parts["pipeline messages"], "dp": parts["data parallel"]}
    return {axis: max(whole[axis], exposed[axis]) for axis in whole}, exposed
