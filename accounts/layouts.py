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
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import product

import config as configuration
from accounts import ledger, memory
from accounts.seconds import ERROR, Step
from errors import UserError
from log import hardware_flops, model_flops
from model import parameter_table
from operations import DTYPES
from parallel import schedules
from parallel.layout import Layout
from parallel.tensor import ROWS

FIELDS = ("tp", "pp", "schedule", "chunks", "zero", "sequence_parallel", "recompute", "micro_batch_size")
LISTED = ("1f1b", "interleaved", "zb-h1", "zb-v")
RESERVED = 2 * 2**30  # bytes of a GPU that PyTorch cannot use
GB = 1e9


# --- bytes of a long step from short steps ----------------------------------------------------------------------------
#
# A step with hundreds of micro-batches repeats itself. Each further round of micro-batches (`round_of`) adds the same
# bytes sent. The peak of the bytes kept stays the same after ROUNDS times pp micro-batches (except in GPipe). So two
# short steps are enough. Bytes of activations are proportional to b, the samples of a micro-batch, so b = 1 is enough.
# A thousand layouts have few different schedules and tables, so caches keep each of them.

NOT_PER_SAMPLE = ("partial gradients", "replicated gradients", "parameter norms")  # rows of tp without a factor b
ROUNDS = {"1f1b": 1, "interleaved": 2, "zb-h1": 2}  # 3 for the others


@cache
def schedule(name, p, m, chunks):
    """Return the unchecked Schedule. Raises UserError if no such schedule exists."""
    return schedules.SCHEDULES[name](p, m, chunks)


@cache
def messages(*numbers):
    """Return [the messages of each rank] of the Schedule with these numbers: (name, p, m, chunks)."""
    made = schedule(*numbers)
    found = [[] for _ in made.actions]
    for message in schedules.messages(made):
        found[message.source].append(message)
        found[message.destination].append(message)
    return found


def round_of(c):
    """Return the number of micro-batches after which a schedule repeats itself, except at its begin and its end."""
    return {"interleaved": c.pp, "chimera": 2}.get(c.schedule, 1)


class Model:
    """The bytes of any layout of one model. config: a Config; item, wide: as in `memory.sizes`."""

    def __init__(self, config, item, wide):
        self.config, self.item, self.wide = config, item, wide
        self.table = parameter_table(config)
        shapes = {spec.name: spec.shape for unit in self.table for spec in unit}
        self.parameters = sum(math.prod(shape) for shape in shapes.values())
        for name in ("placed", "layout", "states", "sent_once", "activations"):
            setattr(self, name, cache(getattr(self, name)))

    def placed(self, dp, tp, pp, name, chunks):
        """Return a `layout.Layout` for any ZeRO stage."""
        c = replace(self.config, tp=tp, pp=pp, schedule=name, chunks=chunks)
        buckets = self.placed(dp, tp, 1, "1f1b", 1).all_buckets if pp > 1 else None
        made = Layout(c, dp, self.table, schedule(name, pp, pp, chunks), buckets)
        made.holders, made.stored = cache(made.holders), cache(made.stored)
        return made

    def layout(self, dp, *fields):
        """Return the `layout.Layout` of the values of FIELDS, except the last: a micro-batch has one sample."""
        made = copy(self.placed(dp, *fields[:4]))
        made.config = replace(self.config, **dict(zip(FIELDS, (*fields, 1), strict=True)))
        made.stage = made.config.zero if dp > 1 else 0
        return made

    def states(self, layout, rank):
        """Return {what: bytes} of the model states that a pipeline rank keeps (`memory.rank_states`)."""
        return memory.rank_states(layout, rank, memory.sizes(layout.config, self.item, self.wide, on_cpu=False))

    def sent_once(self, layout, m, rank):
        """Return the table of `ledger.predict` of a step with m micro-batches of one sample, on data rank 0."""
        c = layout.config
        return ledger.predict(layout, schedule(c.schedule, c.pp, m, c.chunks), rank, 0, self.item, self.wide)

    def sent(self, layout, m, b, rank):
        """Return {(axis, what, operation): (calls, bytes)} of a pipeline rank: the table of `ledger.predict`.

        The calls of the cross-entropy rows are those of b = 1.
        """
        length, result = round_of(layout.config), {}
        first = min(m, length + m % length)
        table, rounds = self.sent_once(layout, first, rank), (m - first) // length
        after = self.sent_once(layout, first + length, rank) if rounds else table
        for key, (calls, sent) in table.items():
            more_calls, more = after[key]
            samples = b if key[0] == "pp" or (key[0] == "tp" and key[1] not in NOT_PER_SAMPLE) else 1
            result[key] = calls + rounds * (more_calls - calls), samples * (sent + rounds * (more - sent))
        return result

    def activations(self, m, rank, *fields):
        """Return `memory.activations` with one sample in a micro-batch. fields: as in `layout`."""
        c = replace(self.config, **dict(zip(FIELDS, (*fields, 1), strict=True)))
        if c.schedule != "gpipe":
            last = {"interleaved": 0, "chimera": 2 + m % c.pp}.get(c.schedule, 2)
            m = min(m, ROUNDS.get(c.schedule, 3) * c.pp + last)
        numbers, sizes = (c.schedule, c.pp, m, c.chunks), memory.sizes(c, self.item, self.wide, on_cpu=False)
        return memory.activations(c, schedule(*numbers), rank, sizes, messages(*numbers)[rank])

    def kept(self, layout, m, b, rank):
        """Return {what: bytes} that a pipeline rank keeps: the table of `memory.predict`."""
        zero = {"zero": 0}  # the activations depend neither on ZeRO nor on dp
        fields = [zero.get(name, getattr(layout.config, name)) for name in FIELDS[:-1]]
        activations = self.activations(m, rank, *fields)
        return self.states(layout, rank) | {what: b * size for what, size in activations.items()}

    def on_gpu(self, c, layout, m, rank):
        """Return {part: bytes} on the GPU of a pipeline rank: `kept`, and what `memory.py` does not count."""
        kept = self.kept(layout, m, c.micro_batch_size, rank)
        in_host_memory = ("master weights", "moments") if c.offload else ()
        parts = {what.removesuffix(" at their peak"): int(n) for what, n in kept.items() if what not in in_host_memory}
        sizes = {name: bucket.size for name, bucket in layout.buckets(rank).items()}
        word, largest = sizes.pop("word", 0), sorted(sizes.values(), reverse=True)
        gradients = self.wide * (sum(largest[:3]) + word) if layout.stage >= 2 else 0
        parameters = self.item * (sum(largest[:2]) + word) if layout.stage == 3 else 0
        tokens = min(ROWS, c.micro_batch_size * c.seq_length) * (word > 0 and rank == layout.placement[-1])
        logits = tokens * c.padded_vocab_size // c.tp * self.item
        return parts | {"whole buckets": gradients + parameters, "logits": logits, "context": RESERVED}


@cache
def model(fields, item, wide):
    return Model(configuration.Config(**dict(fields)), item, wide)


def model_of(config, item, wide):
    """Return the Model of a Config, the same for all its layouts."""
    plain = {name: getattr(configuration.Config(), name) for name in FIELDS}
    return model(tuple(sorted((vars(config) | plain).items())), item, wide)


# --- which layouts ----------------------------------------------------------------------------------------------------


def candidates(config, gpus, device, fixed):
    """Yield the Configs of all layouts that `config.check` accepts. fixed: names of fields that keep their values."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    choices = {
        "tp": [n for n in divisors if n & (n - 1) == 0 and n <= 2 * device.per_node],  # also beyond the node
        "pp": [n for n in divisors if n <= config.num_layers],
        "micro_batch_size": [1, 2, 4, 8],
        "recompute": ["none", "full"],
    }
    choices |= {name: [getattr(config, name)] for name in choices if name in fixed}
    for tp, pp, b in product(*(choices[name] for name in ("tp", "pp", "micro_batch_size"))):
        sequence_parallel = config.sequence_parallel if "sequence_parallel" in fixed else tp > 1
        plain = replace(config, tp=tp, pp=pp, micro_batch_size=b, sequence_parallel=sequence_parallel)
        dp = gpus // (tp * pp)
        if gpus % (tp * pp) or not fields_fit(plain, gpus):
            continue
        zeros = [config.zero] if "zero" in fixed else [0] if dp == 1 else [0, 1] if pp > 1 else [0, 1, 2, 3]
        for name, chunks in orders(config, pp, fixed):
            made = replace(plain, schedule=name, chunks=chunks)
            if schedule_fits(made, dp):
                for zero, recompute in product(zeros, choices["recompute"]):
                    yield replace(made, zero=zero, recompute=recompute)


def orders(config, pp, fixed):
    """Yield (schedule, chunks) of a pipeline of pp stages."""
    for name in [config.schedule] if "schedule" in fixed else LISTED if pp > 1 else ["1f1b"]:
        usual = {"interleaved": [v for v in (2, 3, 4) if config.num_layers % (pp * v) == 0], "zb-v": [2]}
        for chunks in [config.chunks] if "chunks" in fixed else usual.get(name, [1]):
            yield name, chunks


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
    m, length = configuration.micro_batches(c, c.global_batch_size, dp), round_of(c)
    try:
        made = schedule(c.schedule, c.pp, min(m, length + m % length), c.chunks)
    except (UserError, KeyError):  # KeyError: no schedule has this name
        return False
    return c.num_layers >= max(made.parts) - 1


# --- one layout -------------------------------------------------------------------------------------------------------


def refuse(config, device):
    """Raise UserError if no layout of a Config can be predicted. Return the name of its dtype."""
    synchronous = config.schedule not in schedules.ASYNCHRONOUS
    configuration.require(config, "schedule", synchronous, "plan.py predicts only schedules with one update a step")
    dtype = device.dtype if config.dtype == "auto" else config.dtype
    device.peak(dtype)
    return dtype


def judge(c, gpus, device, code="ours", tokens=None, exact=True, say=lambda line: None):
    """Return the facts of one layout as a dict with the keys of plan.py's --json. Sizes in bytes, times in seconds.

    exact: False is fast: it leaves out memory_by_rank, and returns None for a layout whose bubble has no closed form.
    say gets each line of the explanation: (name, formula, value, unit), or a title.
    """
    dtype, dp, p, batch = refuse(c, device), gpus // (c.tp * c.pp), c.pp, c.global_batch_size
    item, m = DTYPES[dtype].itemsize, configuration.micro_batches(c, batch, dp)
    known = model_of(c, item, max(item, 4))
    layout = known.layout(dp, *(getattr(c, name) for name in FIELDS[:-1]))
    say("The batch and the model")
    say(("data ranks dp", "GPUs / (tp pp)", dp, ""))
    say(("micro-batches m", "global_batch_size / (b dp)", m, ""))
    say(("parameters", "all units; a tied table counts once", known.parameters, ""))
    ranks = sorted({0, min(1, p - 1), p - 1})
    sent = {rank: known.sent(layout, m, c.micro_batch_size, rank) for rank in ranks}
    states = {rank: known.states(layout, rank) for rank in ranks}
    step = Step(c, layout, device, dtype, item, max(item, 4), m, sent, states, code, exact, say)
    if not step.parts:
        return None
    # The fullest rank is 0 (most micro-batches in flight), 1 (a block more), p/2 (Chimera) or p-1 (the logits).
    by_rank = {rank: known.on_gpu(c, layout, m, rank) for rank in (range(p) if exact else {*ranks, p // 2})}
    fullest = max(by_rank, key=lambda rank: sum(by_rank[rank].values()))
    seconds, flops, hardware = step.seconds, model_flops(c, batch) / gpus, hardware_flops(c, batch) / gpus
    facts = {
        "layout": {"dp": dp} | {name: getattr(c, name) for name in (*FIELDS, "offload")},
        "gpus": gpus,
        "device": device.name,
        "micro_batches": m,
        "step_seconds": seconds,
        "expected_error": ERROR,
        "step_parts": step.parts,
        "bubble": step.bubble,
        "exposed_seconds": {axis: step.parts[part] for axis, part in EXPOSED.items()},
        "fullest_rank": fullest,
        "memory_bytes": by_rank[fullest],
        "memory_by_rank": list(by_rank.values()),
        "fits": sum(by_rank[fullest].values()) <= device.memory_bytes,
        "capacity_bytes": device.memory_bytes,
        "model_tflops": flops / seconds / 1e12,
        "hardware_tflops": hardware / seconds / 1e12,
        "mfu": flops / seconds / device.peak(dtype),
        "hfu": hardware / seconds / device.peak(dtype),
        "tokens_per_second": batch * c.seq_length / seconds,
        "days": (tokens or 20 * known.parameters) / (batch * c.seq_length) * seconds / 86400,
    }
    say(f"Sent by stage {min(1, p - 1)} in a step (accounts/ledger.py)")
    for (axis, what, operation), (calls, size) in sent[min(1, p - 1)].items():
        say((f"{axis}: {what}", f"{operation}, {calls:,} calls", float(size) / GB, "GB"))
    return facts | {"binds": binds(facts, device)}


EXPOSED = {"tp": "tensor parallel", "pp": "pipeline messages", "dp": "data parallel"}  # axis: part of a step


def binds(facts, device):
    """Return a sentence: why the layout does not fit, or which part of the step costs most, except computation."""
    layout, parts, kept = facts["layout"], facts["step_parts"], facts["memory_bytes"]
    if not facts["fits"]:
        what, missing = max(kept, key=kept.get), (sum(kept.values()) - facts["capacity_bytes"]) / GB
        stage = facts["fullest_rank"]
        return f"does not fit: {what} {kept[what] / GB:.0f} GB on stage {stage}; {missing:.1f} GB are missing"
    name = max(parts.keys() - {"compute", "everything else"}, key=parts.get)
    share, computation = (parts[part] / facts["step_seconds"] for part in (name, "compute"))
    if share < 0.05:
        return f"computation: {computation:.0%} of the step; no other part costs 5%"
    reasons = {
        "bubble": f", {facts['micro_batches']} micro-batches for {layout['pp']} stages",
        "tensor parallel": ", it leaves the node" if layout["tp"] > device.per_node else "",
        "data parallel": f", gradients or parameters of {layout['dp']} ranks",
    }
    return f"{name}: {share:.0%} of the step{reasons.get(name, '')}"


def rank_all(config, gpus, device, fixed, **options):
    """Return the facts of all candidates: those that fit, the fastest first; then the others, the smallest first."""
    refuse(config, device)
    judged = []
    gc.disable()  # else a third of the time: the collector visits all kept schedules and tables again and again
    for c in candidates(config, gpus, device, fixed):
        if facts := judge(c, gpus, device, exact=False, **options):
            judged.append(facts | {"config": c})
    gc.enable()
    return sorted(
        judged, key=lambda f: (not f["fits"], f["step_seconds"] if f["fits"] else sum(f["memory_bytes"].values()))
    )
