"""Judge layouts: which fit, how long a step takes, and what limits its speed.

`candidates` lists the layouts of a model on a cluster. `judge` returns the facts of one layout as a dict, which
`plan.py` prints, ranks and writes as JSON. The memory is that of the fullest pipeline rank. It has the parts of
`memory.py` and three parts that `memory.py` does not count:

    whole buckets        ZeRO-2 and 3: gradients of three buckets and the word table; ZeRO-3: parameters of two buckets
                         and the word table (`memory.py`, "Not counted")
    logits               of `tensor.ROWS` tokens at a time
    context              CUDA's and NCCL's own memory, RESERVED bytes

The list leaves out layouts if another listed layout is better. Set their fields on the command line to judge them:

    gpipe, chimera, zb-h2    1f1b has gpipe's bubble with less memory; chimera has all parameters twice; zb-h2 keeps
                             twice the activations of zb-h1 and saves nothing if all ranks wait for the gradient norm
    ZeRO-2 and 3 with pp > 1 they reduce gradients, or gather parameters, with every micro-batch
    tp without sp            tp > 1 without sequence parallelism needs more memory and time
"""

import gc
import math
from collections import defaultdict
from copy import copy
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product

import config as configuration
from accounts import ledger, memory
from accounts.seconds import ERROR, Step, schedule
from errors import UserError
from log import hardware_flops, model_flops
from model import parameter_table
from operations import DTYPES
from parallel import schedules
from parallel.layout import Layout, all_buckets
from parallel.tensor import ROWS

FIELDS = ("tp", "pp", "schedule", "chunks", "zero", "sequence_parallel", "recompute", "micro_batch_size")
LISTED = ("1f1b", "interleaved", "zb-h1", "zb-v")
RESERVED = 2 * 2**30  # bytes of a GPU that PyTorch cannot use
GB = 1e9


# --- bytes of a long step from a short step ---------------------------------------------------------------------------
#
# A step with hundreds of micro-batches repeats itself, so a short step is enough. A row of the ledger either does not
# depend on the micro-batches, or is proportional to their number. The peak of the bytes kept stays the same after some
# rounds of pp micro-batches. Bytes of activations are proportional to b, the samples of a micro-batch, so b = 1 is
# enough. A thousand layouts have few different schedules and tables, so caches keep each of them.

# {schedule: (rounds, more)}: the peak is reached after rounds * pp + more micro-batches. Other schedules run whole.
SHORT = {"1f1b": (1, 2), "interleaved": (2, 0), "zb-h1": (2, 2), "zb-h2": (3, 2), "zb-v": (3, 2)}


def short(c, m):
    """Return the micro-batches of a short step, for a step with m of them."""
    rounds, more = SHORT.get(c.schedule, (m, 0))
    return min(m, rounds * c.pp + more)


@cache
def messages(*numbers):
    """Return {rank: its messages} of the Schedule with these numbers: (name, p, m, chunks)."""
    of = defaultdict(list)
    for message in schedules.messages(schedule(*numbers)):
        of[message.source].append(message)
        of[message.destination].append(message)
    return of


class Model:
    """The bytes of any layout of one model, whose parameters have the dtype `dtype`."""

    def __init__(self, config, dtype):
        self.config, self.dtype, self.item = config, dtype, DTYPES[dtype].itemsize
        self.wide, self.table = max(4, self.item), parameter_table(config)
        shapes = {spec.name: spec.shape for unit in self.table for spec in unit}
        self.parameters = sum(math.prod(shape) for shape in shapes.values())
        self.buckets = cache(lambda tp, dp: all_buckets(self.table, tp, dp))
        for name in ("layout", "states", "rows", "activations"):
            setattr(self, name, cache(getattr(self, name)))

    def config_of(self, *fields):
        """Return the Config with these values of the first FIELDS, and one sample in a micro-batch."""
        return replace(self.config, **dict(zip(FIELDS, fields, strict=False)), micro_batch_size=1)

    def layout(self, dp, *fields):
        """Return the `layout.Layout` of `config_of(*fields)`."""
        c = self.config_of(*fields)
        if len(fields) > 4:  # the placement of units does not depend on these fields
            made = copy(self.layout(dp, *fields[:4]))
            made.config, made.stage = c, c.zero if dp > 1 else 0
            return made
        made = Layout(c, dp, self.table, schedule(c.schedule, c.pp, c.pp, c.chunks), self.buckets(c.tp, dp))
        made.holders, made.stored = cache(made.holders), cache(made.stored)
        return made

    def sizes(self, c):
        return memory.sizes(c, self.item, self.wide, on_cpu=False)

    def states(self, layout, rank):
        """Return {what: bytes} of the model states that a pipeline rank keeps (`memory.rank_states`)."""
        return memory.rank_states(layout, rank, self.sizes(layout.config))

    def rows(self, layout, m, rank):
        """Return `ledger.rows` of a step with m micro-batches of one sample, on data rank 0."""
        c = layout.config
        return ledger.rows(layout, schedule(c.schedule, c.pp, m, c.chunks), rank, 0, self.item, self.wide)

    def sent(self, layout, m, b, rank):
        """Return {(axis, what, operation): (calls, bytes)} of a pipeline rank: the table of `ledger.predict`.

        The calls of the cross-entropy rows are those of b = 1.
        """
        c, result = layout.config, {}
        few = math.gcd(m, c.pp) if c.schedule in SHORT else m  # interleaved needs a multiple of pp
        for (axis, *names), (calls, sent, per) in self.rows(layout, few, rank).items():
            times, samples = (Fraction(m, few), b if axis != "dp" else 1) if "micro-batch" in per else (1, 1)
            result[axis, *names] = calls * times, sent * times * samples
        return result

    def activations(self, m, rank, *fields):
        """Return `memory.activations` of a step with m micro-batches of `config_of(*fields)`."""
        c = self.config_of(*fields)
        numbers = c.schedule, c.pp, m, c.chunks
        return memory.activations(c, schedule(*numbers), rank, self.sizes(c), messages(*numbers)[rank])

    def kept(self, layout, m, b, rank):
        """Return {what: bytes} that a pipeline rank keeps: the table of `memory.predict`."""
        c = layout.config
        fields = c.tp, c.pp, c.schedule, c.chunks, 0, c.sequence_parallel, c.recompute  # ZeRO shards no activations
        activations = self.activations(short(c, m), rank, *fields)
        return self.states(layout, rank) | {what: b * size for what, size in activations.items()}

    def on_gpu(self, c, layout, m, rank):
        """Return {part: bytes} on the GPU of a pipeline rank: `kept`, and what `memory.py` does not count."""
        kept = self.kept(layout, m, c.micro_batch_size, rank)
        if c.offload:
            del kept["master weights"], kept["moments"]
        parts = {what.removesuffix(" at their peak"): int(size) for what, size in kept.items()}
        sizes = {name: bucket.size for name, bucket in layout.buckets(rank).items()}
        word, largest = sizes.pop("word", 0), sorted(sizes.values(), reverse=True)
        gradients = self.wide * (sum(largest[:3]) + word) if layout.stage >= 2 else 0
        parameters = self.item * (sum(largest[:2]) + word) if layout.stage == 3 else 0
        tokens = min(ROWS, c.micro_batch_size * c.seq_length) if word and rank == layout.placement[-1] else 0
        logits = tokens * c.padded_vocab_size // c.tp * self.item
        return parts | {"whole buckets": gradients + parameters, "logits": logits, "context": RESERVED}


@cache
def model(fields, dtype):
    return Model(configuration.Config(**dict(fields)), dtype)


def model_of(config, dtype):
    """Return the Model of a Config, the same for all its layouts."""
    plain = {name: getattr(configuration.Config(), name) for name in FIELDS}
    return model(tuple(sorted((vars(config) | plain).items())), dtype)


# --- which layouts ----------------------------------------------------------------------------------------------------


def candidates(config, gpus, device, fixed):
    """Yield the Configs of all layouts that `config.check` accepts. fixed: names of fields that keep their values."""

    def choices(name, values):
        return [getattr(config, name)] if name in fixed else values

    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    tps = choices("tp", [n for n in divisors if n & (n - 1) == 0 and n <= 2 * device.per_node])  # also beyond the node
    pps = choices("pp", [n for n in divisors if n <= config.num_layers])
    for tp, pp, b in product(tps, pps, choices("micro_batch_size", [1, 2, 4, 8])):
        (sequence_parallel,) = choices("sequence_parallel", [tp > 1])
        c = replace(config, tp=tp, pp=pp, micro_batch_size=b, sequence_parallel=sequence_parallel)
        if not fields_fit(c, gpus):
            continue
        dp = gpus // (tp * pp)
        zeros = choices("zero", [0] if dp == 1 else [0, 1] if pp > 1 else [0, 1, 2, 3])
        usual = {"interleaved": [v for v in (2, 3, 4) if config.num_layers % (pp * v) == 0], "zb-v": [2]}
        for name in choices("schedule", LISTED if pp > 1 else LISTED[:1]):
            for chunks in choices("chunks", usual.get(name, [1])):
                made = replace(c, schedule=name, chunks=chunks)
                if schedule_fits(made, dp):
                    for zero, recompute in product(zeros, choices("recompute", ["none", "full"])):
                        yield replace(made, zero=zero, recompute=recompute)


def fields_fit(c, gpus):
    """Return True if `config.check` accepts everything except schedule and chunks: it checks one micro-batch of 1f1b.

    A batch that grows (rampup_batch_size) or does not divide is checked as it is.
    """
    per_round = c.micro_batch_size * max(1, gpus // (c.tp * c.pp))
    if not c.rampup_batch_size and c.global_batch_size % per_round == 0:
        c = replace(c, schedule="1f1b", chunks=1, global_batch_size=per_round)
    try:
        configuration.check(c, gpus)
    except UserError:
        return False
    return True


def schedule_fits(c, dp):
    """Return True if the schedule exists. It builds a shorter one."""
    m = configuration.micro_batches(c, c.global_batch_size, dp)
    try:
        made = schedule(c.schedule, c.pp, min(m, c.pp + m % c.pp) if c.schedule in SHORT else m, c.chunks)
    except UserError:
        return False
    return c.num_layers >= max(made.parts) - 1


# --- one layout -------------------------------------------------------------------------------------------------------


def refuse(config, device):
    """Raise UserError if no layout of a Config can be predicted. Return the name of its dtype."""
    known = schedules.SCHEDULES.keys() - set(schedules.ASYNCHRONOUS)
    why = "plan.py predicts only schedules with one update a step: " + ", ".join(sorted(known))
    configuration.require(config, "schedule", config.schedule in known, why)
    dtype = device.dtype if config.dtype == "auto" else config.dtype
    device.peak(dtype)
    return dtype


def judge(c, gpus, device, code="ours", tokens=None, exact=True, say=lambda *line: None):
    """Return the facts of one layout as a dict with the keys of plan.py's --json. Sizes in bytes, times in seconds.

    exact: False is fast: it leaves out memory_by_rank, and takes 1F1B's bubble for a bubble without a closed form.
    say gets each line of the explanation: name, formula, value, unit.
    """
    dtype, dp, p, batch = refuse(c, device), gpus // (c.tp * c.pp), c.pp, c.global_batch_size
    m, known = configuration.micro_batches(c, batch, dp), model_of(c, dtype)
    layout = known.layout(dp, *(getattr(c, name) for name in FIELDS[:-1]))
    say("micro-batches m", "global_batch_size / (b dp)", m, "")
    step = Step(c, known, layout, device, m, code, exact, say)
    # The fullest rank is 0 (most micro-batches in flight), 1 (a block more), p/2 (Chimera) or p-1 (the logits).
    ranks = range(p) if exact else {0, min(1, p - 1), p // 2, p - 1}
    by_rank = {rank: known.on_gpu(c, layout, m, rank) for rank in ranks}
    fullest = max(by_rank, key=lambda rank: sum(by_rank[rank].values()))
    available = step.seconds * gpus * step.peak  # FLOPs
    facts = {
        "layout": {"dp": dp} | {name: getattr(c, name) for name in (*FIELDS, "offload")},
        "gpus": gpus,
        "device": device.name,
        "micro_batches": m,
        "step_seconds": step.seconds,
        "expected_error": ERROR,
        "step_parts": step.parts,
        "bubble": step.bubble,
        "exposed_seconds": {axis: step.parts[part] for axis, part in EXPOSED.items()},
        "fullest_rank": fullest,
        "memory_bytes": by_rank[fullest],
        "memory_by_rank": list(by_rank.values()),
        "fits": sum(by_rank[fullest].values()) <= device.memory_bytes,
        "capacity_bytes": device.memory_bytes,
        "mfu": model_flops(c, batch) / available,
        "hfu": hardware_flops(c, batch) / available,
        "tokens_per_second": batch * c.seq_length / step.seconds,
        "days": (tokens or 20 * known.parameters) / (batch * c.seq_length) * step.seconds / 86400,
    }
    return facts | {"binds": binds(facts, device)}


EXPOSED = {"tp": "tensor parallel", "pp": "pipeline messages", "dp": "data parallel"}  # axis: part of a step


def binds(facts, device):
    """Return a sentence: why the layout does not fit, or which part of the step costs most, except computation."""
    layout, parts, kept = facts["layout"], facts["step_parts"], facts["memory_bytes"]
    if not facts["fits"]:
        what, missing = max(kept, key=kept.get), sum(kept.values()) - facts["capacity_bytes"]
        largest = f"{what} {kept[what] / GB:.0f} GB on stage {facts['fullest_rank']}"
        return f"does not fit: {largest}; {missing / GB:.1f} GB are missing"
    name = max(parts.keys() - {"compute", "everything else"}, key=parts.get)
    share = parts[name] / facts["step_seconds"]
    if share < 0.05:
        return f"computation: {parts['compute'] / facts['step_seconds']:.0%} of the step; no other part costs 5%"
    beyond = name == "tensor parallel" and layout["tp"] > device.per_node
    return f"{name}: {share:.0%} of the step" + ", it leaves the node" * beyond


def order(facts):
    """Return the key by which layouts are sorted: first those that fit, the fastest first; then the smallest first."""
    return not facts["fits"], facts["step_seconds"] if facts["fits"] else sum(facts["memory_bytes"].values())


def rank_all(config, gpus, device, fixed, **options):
    """Return the facts of all candidates in their `order`, each with its Config."""
    refuse(config, device)
    gc.disable()  # else a third of the time: the collector visits all kept schedules and tables again and again
    found = candidates(config, gpus, device, fixed)
    judged = [judge(c, gpus, device, exact=False, **options) | {"config": c} for c in found]
    gc.enable()
    return sorted(judged, key=order)
