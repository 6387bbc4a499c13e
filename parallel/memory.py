"""The memory account: what one rank keeps, measured in bytes and held against the papers' formulas.

The sister of `ledger.py`: that one counts what is sent, this one what is kept. Letters: P parameters of this rank as
stored (padding included), n = dp, t = tp, b micro-batch, s sequence, h hidden, a heads, v vocabulary.

**Model states** (slide "ZeRO (FSDP)"; Rajbhandari et al., arXiv 1910.02054, section 5 and Table 1). Bytes per rank, at
rest between two steps. The paper keeps 2-byte gradients, we accumulate in float32; where the parameters are float32
themselves, they are their own master weights. (With `offload` the last two numbers are of the CPU's memory.)

    stage    the paper (2 + 2 + 12)     bf16 (2 + 4 + 4 + 8)     fp32 (4 + 4 + 0 + 8)
      0      16P                        18P                      16P                     all whole
      1       4P + 12P/n                 6P + 12P/n               8P +  8P/n             master weights, moments 1/n
      2       2P + 14P/n                 2P + 16P/n               4P + 12P/n             gradients too
      3            16P/n                      18P/n                    16P/n             parameters too

**Activations** (Korthikanti et al., arXiv 2205.05198, section 4 and Table 2). What a block keeps of one micro-batch
from its forward to its backward. Ours in elements of bsh; theirs in bytes of it, with 2 bytes an element:

    kept for backward           ours         theirs
    LayerNorm 1's input x       1            2           with sequence parallelism 1/t
    qkv's input                 1            2           likewise
    q, k, v                     3/t          6/t
    softmax and its dropout     -            5as/ht      fused attention never forms an [s, s] matrix
    proj's input                1/t          2/t
    dropout's mask              -            1           computed again: a function of (seed, token, column)
    LayerNorm 2's input         1            2           with sequence parallelism 1/t
    fc1's input                 1            2           likewise
    gelu's input                4/t          8/t
    fc2's input                 4/t          8/t
    dropout's mask              -            1
    sum                         4 + 12/t     10 + 24/t + 5as/ht
    ... sequence parallel       16/t         34/t + 5as/ht
    ... full recomputation      1            2           and one block's whole sum while it runs again

In bf16 ours are thus 8 + 24/t bytes: theirs without masks and matrix. To these come what they drop as small (two
numbers per token and LayerNorm, one per token and head: the softmax's log-sum-exp), the embedding's ids, and bsh of the
head, whose logits never exist whole (`tensor.LinearCrossEntropy`). All of it times the micro-batches in flight
(`schedules.py`).

The first half of a backward frees nothing: I turns what a block saved into what W needs, the (dy, x) of four linears,
and these come to the same 4 + 12/t (x 2 + 5/t, dy 2 + 7/t). So a micro-batch is in flight until W, at its full size;
with sequence parallelism at more than that, because the operands have been gathered: 4 + 12/t where 16/t were saved.

**What is measured.** `model_states` adds up the storages that the flat buffers really have. `Activations` sees every
tensor that autograd saves, and the executor tells it what that keeps besides: inputs and outputs of units, operands of
W, buffers of messages. A storage counts once, for as long as any such tensor lives; parameters do not count. On the
CPU both equal the formulas to the byte, but for this. A message that was sent counts, by formula, until IN_TRANSIT more
have been sent; NCCL may tell sooner that it is gone. Several chunks on a rank share the numbers that dropout masks are
made of: the formula counts them for each. An I that has gathered operands can be done with those numbers before its
peak. On a GPU, fused attention keeps a little more: its generator's state, and padded copies for head sizes that its
kernel lacks.

**What is in neither**: what lives only within an operation or between two of them (logits, a gradient not yet used),
and under stages 2 and 3 the whole buffers of the units that compute or travel just then: two of parameters, three of
gradients and the tied table's, but where I and W are apart the gradients of all chunks in between.
"""

import itertools
import weakref
from collections import deque
from fractions import Fraction
from typing import NamedTuple

import torch

from parallel import schedules
from parallel.ledger import aligned
from parallel.optimizer import RULES
from parallel.pipeline import IN_TRANSIT, split

# --- model states -----------------------------------------------------------------------------------------------------


def buffers(unit):
    """The flat buffers of a `zero.Unit` by what they hold. Where two share a storage, it is the first one's."""
    table = {
        "parameters": [unit.param, unit.own_param],
        "gradients": [unit.grad, unit.own_grad],
        "master weights": [unit.master],
        "moments": unit.moments,
    }
    return {what: [flat for flat in flats if flat is not None] for what, flats in table.items()}


def identity(tensor):
    """Of a tensor's storage. Not its address: a storage that is resized to nothing has none."""
    return tensor.untyped_storage()._cdata


def model_states(zero):
    """{what: bytes} of the storages behind a `Zero`'s buffers, each once, as they are now: to be called at rest."""
    table, seen = {}, set()
    for unit in zero.units.values():
        for what, flats in buffers(unit).items():
            table.setdefault(what, 0)
            for flat in flats:
                if identity(flat) not in seen:
                    seen.add(identity(flat))
                    table[what] += flat.untyped_storage().nbytes()
    return table


def model_state_formulas(elements, n, stage, parameters=2, gradients=4, master=4, moments=8):
    """{what: bytes}, as Fractions, for P = `elements` stored parameters and n data ranks: the first table above.

    parameters .. moments: bytes per element of each. The defaults are bf16 with AdamW; ZeRO's Table 1 has gradients=2.
    """
    table = {  # bytes per element, and the stage that begins to share them
        "parameters": (parameters, 3),
        "gradients": (gradients, 2),
        "master weights": (master, 1),
        "moments": (moments, 1),
    }
    return {what: Fraction(elements * width, n if stage >= begins else 1) for what, (width, begins) in table.items()}


def expected_states(zero):
    """`model_state_formulas` of this rank: P from its units' sizes, the widths from its dtypes and its optimizer."""
    item, wide, c = zero.dtype.itemsize, zero.master_dtype.itemsize, zero.config
    apart = item != wide or (c.offload and zero.device.type != "cpu")  # master weights are not the parameters
    widths = item, wide, wide * apart, wide * RULES[c.optimizer][1]
    return model_state_formulas(stored(zero), zero.mesh.dp.size, c.zero, *widths)


def stored(zero):
    """P: elements of this rank's units, padding included."""
    return sum(unit.size for unit in zero.units.values())


def padding(zero):
    """Those of P that are no parameter's: they align parameters (`zero.ALIGN`) and let n divide every unit."""
    return stored(zero) - sum(p.numel() for unit in zero.units.values() for p in unit.params)


# --- activations, measured --------------------------------------------------------------------------------------------


class Activations:
    """A meter of what this rank keeps for backward; `current` and `peak` in bytes. After a step it is back at 0.

        with Activations(run.executor) as meter:
            train_step(run, batches)
        meter.peak

    Within `with`, autograd hands every tensor that it saves to `pack` (torch.autograd.graph.saved_tensors_hooks), and
    the executor calls `hold`, `forget` and `operands`. No number of the step changes, not by a bit. A tensor counts
    while it lives: nobody has to say when it is given back.
    """

    def __init__(self, executor):
        self.executor, units = executor, executor.zero.units.values()
        self.left_out = {identity(flat) for unit in units for flats in buffers(unit).values() for flat in flats}
        self.storages = {}  # identity: [tensors that count on it, bytes]
        self.current = self.peak = 0

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        self.executor.meter = self
        return self

    def __exit__(self, *error):
        self.executor.meter = None
        self.hooks.__exit__(*error)

    def pack(self, tensor):
        """What autograd keeps in `tensor`'s place: an alias, which dies when the graph lets go of it.

        Not the tensor itself, which may be wanted elsewhere for longer, and saved again in a later version.
        """
        alias = tensor.detach()
        alias.version = tensor._version
        self.hold(alias)
        return alias

    def unpack(self, alias):
        """The saved tensor. Where there are hooks, it is theirs to notice that it was changed in place meanwhile."""
        if alias._version != alias.version:
            raise RuntimeError(f"a tensor {list(alias.shape)} that backward needs was modified by an inplace operation")
        return alias

    def hold(self, *tensors):
        """Count each of these (None: nothing) until it is gone."""
        for tensor in tensors:
            if tensor is None or identity(tensor) in self.left_out:
                continue
            key = identity(tensor)
            if key not in self.storages:
                self.storages[key] = [0, tensor.untyped_storage().nbytes()]
                self.current += self.storages[key][1]
            self.storages[key][0] += 1
            weakref.finalize(tensor, self._gone, key).atexit = False
        self.peak = max(self.peak, self.current)

    def _gone(self, key):
        self.storages[key][0] -= 1
        if self.storages[key][0] == 0:
            self.current -= self.storages.pop(key)[1]

    def forget(self, tensor):
        """The storage of `tensor` was freed, though the tensor lives on."""
        if entry := self.storages.get(identity(tensor)):
            self.current -= entry[1]
            entry[1] = 0

    def operands(self):
        """A list for the weight gradients that W will make: it counts what they need."""
        return Operands(self)


class Operands(list):
    """Of functools.partial(function, w, dy, x): their tensors count for as long as they wait here."""

    def __init__(self, meter):
        super().__init__()
        self.meter = meter

    def append(self, product):
        super().append(product)
        self.meter.hold(*product.args)


# --- activations, by formula ------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """What a number takes, in bytes, and how many rows there are."""

    item: int  # an element of an activation
    wide: int  # of what is computed in float32 (in fp64 runs float64)
    statistic: int  # LayerNorm's mean and 1/deviation: on a GPU `wide`, on a CPU as the activations
    tokens: int  # bs of a micro-batch: rows within a pair of linears
    rows: int  # rows outside: bs/t with sequence parallelism, else bs


def sizes(c, zero):
    """The Sizes of a run, from its configuration and its `Zero`."""
    item, wide = zero.dtype.itemsize, zero.master_dtype.itemsize
    tokens = c.micro_batch_size * c.seq_length
    rows = tokens // c.tp if c.sequence_parallel else tokens
    return Sizes(item, wide, item if zero.device.type == "cpu" else wide, tokens, rows)


def block_activations(c, z):
    """{what: bytes} that one block saves of one micro-batch: the second table above, and the small terms."""
    outside, inside = z.item * z.rows * c.hidden_size, z.item * z.tokens * c.hidden_size // c.tp
    return {
        "LayerNorm 1's input": outside,
        "qkv's input": outside,
        "q, k, v": 3 * inside,
        "proj's input": inside,
        "LayerNorm 2's input": outside,
        "fc1's input": outside,
        "gelu's input": 4 * inside,
        "fc2's input": 4 * inside,
        "LayerNorms' statistics": 2 * 2 * z.statistic * z.rows,
        "log-sum-exp": z.wide * z.tokens * c.num_attention_heads // c.tp,
    }


class Kept(NamedTuple):
    """Bytes that a unit keeps of one micro-batch. Its input is counted as the output of the one before."""

    saved: int  # in its graph, from F (with recomputation: only while it runs backwards) to B or I
    output: int
    operands: int = 0  # from I to W
    turning: int = 0  # what I has at most above `saved`, while it turns that into `operands`
    again: bool = False  # recomputed


def kept(c, z):
    """{unit: Kept} for the embedding, a block and the head."""
    outside, whole = z.item * z.rows * c.hidden_size, z.item * z.tokens * c.hidden_size
    gathered = z.rows < z.tokens
    ids = (8 + 1) * z.tokens  # int64 and bool: which row of this rank's table, and whether it has it at all
    embedding = Kept(ids + 8 * z.rows, outside)  # and the positions

    block = block_activations(c, z)
    saved = sum(block.values()) - outside  # LayerNorm 1's input is the unit's
    turning = whole  # fc2's dy comes before anything goes; from then on as much goes as comes
    if gathered:  # the most is there after qkv's: all four linears' operands, attention and LayerNorm 2 gone
        turning = 4 * whole - 2 * outside - 2 * z.statistic * z.rows - block["log-sum-exp"]
    block = Kept(saved, outside, 4 * whole + 12 * whole // c.tp, turning, c.recompute == "full")

    # The head: of its LayerNorm the statistics, and dL/dx of the matrix, which was made together with the loss.
    head = Kept(whole + 2 * z.statistic * z.rows, z.wide * z.tokens)
    return {"embedding": embedding, "block": block, "head": head}


def kept_by_chunk(c, plan, z):
    """For each chunk of the Schedule `plan` the Kept of its units, in order.

    With dropout, the numbers of a micro-batch's rows are kept too: once, whoever uses them. Here the chunk's first unit
    has them, or, where that runs again, each block that does.
    """
    table, chunks = kept(c, z), []
    names = split(["embedding", *["block"] * c.num_layers, "head"], max(plan.parts) + 1)
    for part in plan.parts:
        units = [table[name] for name in names[part]]
        if c.dropout:
            for i, (name, unit) in enumerate(zip(names[part], units, strict=True)):
                if name != "head" and (i == 0 or units[0].again):
                    units[i] = unit._replace(saved=unit.saved + 8 * z.rows)
        chunks.append(units)
    return chunks


def activation_formula(c, plan, rank, z):
    """Peak bytes of activations on pipeline rank `rank`. c: configuration; plan: a step's Schedule; z: Sizes."""
    return max(itertools.accumulate(changes(c, plan, rank, z)))


def changes(c, plan, rank, z):
    """What a rank's account gains and loses in a step, one after the other: the executor, reduced to bytes."""
    message = z.item * z.rows * c.hidden_size
    chunks = kept_by_chunk(c, plan, z)
    mail = deque(m.source == rank for m in schedules.messages(plan) if rank in (m.source, m.destination))
    leaving = 0  # messages that were sent and may not be gone

    def crosses(chunk):
        return chunk is not None and plan.placement[chunk] != rank

    for kind, _, chunk in plan.actions[rank]:
        units, above, below = chunks[chunk], schedules.upstream(plan, chunk), schedules.downstream(plan, chunk)
        while mail and not mail[0]:  # receives are posted ahead, up to the next send
            mail.popleft()
            yield message
        yield -message * max(0, leaving - IN_TRANSIT)
        leaving = min(leaving, IN_TRANSIT)
        if kind == "F":
            for unit in units:
                yield unit.output + (0 if unit.again else unit.saved)
        elif kind == "W":
            yield -sum(unit.operands for unit in units)
        else:
            handed_on = not c.dropout and z.rows == z.tokens  # dL/dy is the dy of the last linear, and waits for W
            # A y that was sent is gone. One that went to a chunk on this rank is its x; with recomputation only that.
            y_gone = crosses(below) or (below is not None and units[-1].again)
            own_x = crosses(above) or (above is not None and chunks[above][-1].again)
            ends = [message * there for there in (below is not None, y_gone, above is not None, own_x)]
            yield from backward_changes(units, *ends, kind == "I", handed_on)
        if kind != "W" and crosses(below if kind == "F" else above):
            mail.popleft()
            leaving += 1


def backward_changes(units, dy, y_gone, dx, own_x, halved, handed_on):
    """Of a B, or an I (`halved`), through a chunk.

    In bytes, or 0 where there is none: the gradient that it gets, an output that is no longer here (recomputation makes
    it again), the gradient that it hands on, an input that nothing else keeps.
    """
    for i, unit in reversed(list(enumerate(units))):
        if unit.again:
            yield unit.saved + y_gone  # another y is still there, as the next unit's input
            y_gone = 0
        spent = unit.saved + dy
        if halved:
            new = unit.turning - dy * handed_on
            yield new
            spent += new - unit.operands
        yield -spent
        if i == 0:
            yield dx
        yield y_gone - unit.output
        y_gone = dy = 0
    yield -own_x


# --- side by side -----------------------------------------------------------------------------------------------------


PEAK = "activations at their peak"


def measured(executor, peak):
    """{what: bytes} of this rank: its model states now, and `peak`, which a meter found during a step."""
    return model_states(executor.zero) | {PEAK: peak}


def formulas(executor):
    """The same by the formulas, for a step of the whole global batch."""
    c, plan, rank = executor.config, executor.plan, executor.mesh.pp.rank
    return expected_states(executor.zero) | {PEAK: activation_formula(c, plan, rank, sizes(c, executor.zero))}


def report(measured, expected, elements, padded, who="rank 0"):
    """The account as text, measured beside the formula. elements: P; padded: those of them that are padding."""
    rows = [("what is kept", "bytes", "formula", "bytes per parameter")]
    states = [what for what in measured if what != PEAK]
    for what, parts in [*((what, [what]) for what in states), ("model states", states), (PEAK, [PEAK])]:
        ours, theirs = (sum(table[part] for part in parts) for table in (measured, expected))
        rows.append((what, f"{float(ours):,.0f}", f"{float(theirs):,.0f}", f"{float(ours) / elements:.2f}"))
    stored = f"P = {elements:,} parameters as stored, {padded:,} of them padding"
    return f"kept by {who}\n{aligned(rows, 1)}\n{stored}"
