"""Search for layouts: which ones fit, how long a step takes, and what limits its speed.

The memory is that of the fullest pipeline rank, with four parts beside `memory.py`'s:

    whole parameters     ZeRO-3: those of two buckets and the word table
    logits               of `tensor.ROWS` tokens at a time
    whole matrices       of Muon's update, beyond the activations
    context              CUDA's and NCCL's own memory, RESERVED bytes

These layouts are not listed, because another one is better. Set their fields to judge them:

    gpipe, chimera, zb-h2    1f1b has gpipe's bubble with less memory; chimera has all parameters twice; zb-h2 keeps
                             twice the activations of zb-h1 and saves nothing if all ranks wait for the gradient norm
    ZeRO-2 and 3 with pp > 1 they reduce gradients, or gather parameters, with every micro-batch
    tp without sp            without sequence parallelism tp needs more memory and time
"""

import gc
import math
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product

from tqdm import tqdm

import config as configuration
from accounts import ledger, memory, zero_states
from accounts.bubbles import FORMULAS
from accounts.flops import hardware_flops
from accounts.meta import work_of
from accounts.seconds import Step, schedule
from errors import UserError
from operations import DTYPES
from parallel import schedules, simulation
from parallel.layout import Layout, all_buckets, number_of_micro_batches, tokens_of_rank
from parallel.tensor import ROWS
from parallel.units import unit_specs

SEARCHED = ("tp", "pp", "schedule", "chunks", "zero", "sequence_parallel", "recompute", "micro_batch_size")
LISTED = ("1f1b", "interleaved", "zb-h1", "zb-v")
CHUNKS = (1, 2, 3, 4, 6, 8, 12)  # of a rank; those that are tried
RESERVED = 2 * 2**30  # bytes of a GPU that PyTorch cannot use
GB = 1e9
PLAIN = dict(zip(SEARCHED, (1, 1, "1f1b", 1, 0, False, "none", 1), strict=True))


# --- bytes of a long step from a short step ---------------------------------------------------------------------------
#
# A row of the ledger is proportional to the number of micro-batches, or constant. The peak of the bytes kept stays
# the same after some rounds of pp micro-batches. Bytes of activations are proportional to b, the samples of a
# micro-batch. So a short step with b = 1 is enough. Of a reader's schedule the whole step is computed.

# {schedule: (rounds, more)}: the peak is reached after rounds * pp + more micro-batches; in others at the end.
SHORT = {"1f1b": (1, 2), "interleaved": (2, 0), "zb-h1": (2, 2), "zb-h2": (3, 2), "zb-v": (3, 2)}


@cache
def messages_of(*numbers):
    """Return the messages of the Schedule (name, p, m, chunks)."""
    return simulation.messages(schedule(*numbers))


class ByteTable:
    """The bytes of any layout of one model."""

    def __init__(self, config):
        self.config, self.unit_specs, self.item = config, unit_specs(config), DTYPES[config.dtype].itemsize
        self.wide = max(4, self.item)
        self.buckets = cache(lambda tp, dp: all_buckets(self.unit_specs, tp, dp))
        self.layout, self.rows, self.activations = map(cache, (self.layout, self.rows, self.activations))
        self.flops = cache(lambda recompute: hardware_flops(replace(config, recompute=recompute), 1))
        self.sizes = cache(lambda layout: zero_states.sizes(layout.config, self.item, self.wide, on_cpu=False))

    def layout(self, dp, *fields):
        """Return the `layout.Layout` with these SEARCHED and b = 1, which keeps its buckets."""
        c = replace(self.config, **dict(zip(SEARCHED, (*fields, 1), strict=True)))
        # A layout is the same for each m. A reader's schedule may need an even one.
        layout = Layout(c, dp, self.unit_specs, schedule(c.schedule, c.pp, 2 * c.pp, c.chunks), self.buckets(c.tp, dp))
        layout.buckets = cache(layout.buckets)
        return layout

    def rows(self, layout, m, rank):
        """Return [(row's key, what it grows with, calls, bytes)]."""
        c, per = layout.config, ledger.how_often(layout)
        numbers = schedule(c.schedule, c.pp, m, c.chunks), rank, 0, self.item, self.wide
        return [(key, per[key], *row) for key, row in ledger.predict_sent(layout, *numbers).items()]

    def sent(self, layout, m, b, rank):
        """Return the table of `ledger.predict_sent`. The calls of the cross-entropy rows are those of b = 1."""
        c, result = layout.config, {}
        short = {"interleaved": c.pp, "chimera": m}.get(c.schedule, 1 if c.schedule in FORMULAS else m)
        for key, per, calls, sent in self.rows(layout, short, rank):
            times = m // short if "micro-batch" in per else 1
            samples = b if "micro-batch" in per and "bucket" not in per else 1
            result[key] = calls * times, sent * times * samples
        return result

    def activations(self, layout, m, rank):
        c = layout.config
        numbers = c.schedule, c.pp, m, c.chunks
        return memory.activations(c, schedule(*numbers), rank, self.sizes(layout), messages_of(*numbers))

    def bytes_kept(self, layout, m, b, rank):
        """Return the table of `memory.predict_kept`."""
        c = layout.config
        rounds, extra = SHORT.get(c.schedule, (m, 0))
        fields = c.tp, c.pp, c.schedule, c.chunks, 0, c.sequence_parallel, c.recompute  # ZeRO shards no activations
        short = min(m, rounds * c.pp + extra)
        activations = self.activations(self.layout(layout.data_ranks, *fields), short, rank)
        whole = memory.whole_gradients(layout, schedule(c.schedule, c.pp, short, c.chunks), rank, self.sizes(layout))
        states = zero_states.rank_states(layout, rank, self.sizes(layout))
        return states | whole | {what: b * size for what, size in activations.items()}

    def on_gpu(self, c, layout, m, rank):
        """Return {part: bytes} on the GPU of a pipeline rank."""
        sizes_kept = self.bytes_kept(layout, m, c.micro_batch_size, rank)
        if c.offload:
            del sizes_kept["master weights"], sizes_kept["moments"]
        parts = {what.removesuffix(" at their peak"): int(size) for what, size in sizes_kept.items()}
        sizes = {name: bucket.size for name, bucket in layout.buckets(rank).items()}
        word, largest = sizes.pop("word", 0), sorted(sizes.values(), reverse=True)
        parameters = self.item * (sum(largest[:2]) + word) if layout.zero_stage == 3 else 0
        has_head = any(len(layout.unit_specs) - 1 in layout.units[chunk] for chunk in layout.chunks(rank))
        tokens = min(ROWS, tokens_of_rank(c)) * has_head
        logits = tokens * c.padded_vocab_size // c.tp * self.item
        momentum = 0
        if c.optimizer == "muon" and largest:  # a block's momentum, three tensors like its largest parameter
            specs = [spec for bucket in layout.buckets(rank).values() for spec in bucket.specs]
            elements = max((math.prod(spec.shape) for spec in specs if spec.matrix), default=0)
            momentum = self.wide * (3 * elements + largest[0] * (layout.zero_stage > 0))
        update = max(0, momentum - parts["activations"])
        return parts | {"whole parameters": parameters, "logits": logits, "whole matrices": update, "context": RESERVED}


@cache
def _table(**fields):
    return ByteTable(configuration.Config(**fields))


def table_of(config):
    """Return the ByteTable that all layouts of a Config share."""
    return _table(**vars(config) | PLAIN)


# --- which layouts ----------------------------------------------------------------------------------------------------


def candidates(config, gpus, device, fixed):
    """Yield the Configs that `config.check_layout` accepts, smaller micro-batches of a layout before larger ones.

    fixed: names of fields that keep their values.
    """
    tps = [2**i for i in range(20) if gpus % 2**i == 0 and 2**i <= 2 * device.per_node]  # also beyond the node
    pps = [n for n in range(1, config.num_layers + 1) if gpus % n == 0]
    samples = {n for n in range(1, 65) if config.global_batch_size % n == 0} | {config.micro_batch_size}
    choices = tps, pps, LISTED, CHUNKS, range(4), (False, True), configuration.CHOICES["recompute"], sorted(samples)
    choices = [[getattr(config, f)] if f in fixed else values for f, values in zip(SEARCHED, choices, strict=True)]

    checked = [name for name in SEARCHED if name != "recompute"]  # which does not matter to the check

    @cache
    def accepted(*fields):
        with suppress(UserError):
            return configuration.check_layout(replace(config, **dict(zip(checked, fields, strict=True))), gpus)

    usual = {name: schedules.usual_chunks(name) for name in choices[SEARCHED.index("schedule")]}
    for fields in product(*choices):
        tp, pp, name, chunks, zero, sequence_parallel, *_ = fields
        even = chunks > 1 and config.num_layers % (pp * chunks) == 0 and (pp > 1 or chunks == 2)
        cut = config.seq_length % (tp * config.cp) == 0  # sequence parallelism can cut the tokens
        listed = {
            "schedule": pp > 1 or name == "1f1b",
            "chunks": even if name == "interleaved" else chunks == usual[name],
            "zero": zero <= (0 if tp * pp == gpus else 1 if pp > 1 else 3),
            "sequence_parallel": sequence_parallel == (tp > 1 and cut),
        }
        if all(listed[f] for f in listed.keys() - fixed):
            c = replace(config, **dict(zip(SEARCHED, fields, strict=True)))
            if accepted(*(getattr(c, name) for name in checked)):
                yield c


# --- one layout -------------------------------------------------------------------------------------------------------


def check_search(c, has_days):
    """Raise UserError if a field has an impossible value, or one that can't be predicted."""
    configuration.check_values(c)
    days = has_days or not c.train_epochs
    configuration.require(c, "train_epochs", days, "plan.py does not know the data; set --tokens, for the days")
    runs = work_of(replace(c, **PLAIN, cp=1), 2)
    configuration.require(c, "model", runs, "its units do not run on tensors without values")


def facts_of(c, gpus, device, tokens=None, exact=True):
    """Return {name: value} of one layout, in bytes and seconds.

    exact=False is fast: it guesses the bubble.
    """
    c = replace(c, dtype=device.dtype if c.dtype == "auto" else c.dtype)
    table, p, batch, dp = table_of(c), c.pp, c.global_batch_size, gpus // (c.tp * c.pp)
    m, layout = number_of_micro_batches(c, batch, dp), table.layout(dp, *(getattr(c, name) for name in SEARCHED[:-1]))
    # The fullest rank: 0 (most in flight), the first or last with a block more, p-1 (logits), or Chimera's p/2.
    blocks = len(table.unit_specs) - 2
    ranks = {0, min(1, p - 1), blocks % p, max(0, p - 2), p - 1, p // 2 if c.schedule == "chimera" else 0}
    if len({work.first for work in work_of(layout.config, table.item)}) > 3:  # the blocks are not alike
        ranks = {*range(p)}
    rows = {rank: table.sent(layout, m, c.micro_batch_size, rank) for rank in {0, min(1, p - 1), p - 1}}
    step = Step(c, layout, table.sizes(layout), rows, device, m, exact)
    bytes_of = {rank: table.on_gpu(c, layout, m, rank) for rank in ranks}
    fullest = max(bytes_of, key=lambda rank: sum(bytes_of[rank].values()))
    available = step.seconds * gpus * device.peak(c.dtype)  # FLOPs
    facts = {
        "layout": {"dp": dp // c.cp} | {name: getattr(c, name) for name in ("cp", *SEARCHED)},
        "micro_batches": m,
        "step_seconds": step.seconds,
        "step_parts": step.parts,
        "bubble": step.bubble,
        "fullest_rank": fullest,
        "memory_bytes": bytes_of[fullest],
        "fits": sum(bytes_of[fullest].values()) <= device.memory_bytes,
        "capacity_bytes": device.memory_bytes,
        "mfu": batch * table.flops("none") / available,
        "hfu": batch * table.flops(c.recompute) / available,
        "tokens_per_second": batch * c.seq_length / step.seconds,
        "days": (tokens / (batch * c.seq_length) if tokens else c.train_iters) * step.seconds / 86400,
        "arithmetic": [*step.block, *step.lines],
    }
    return facts | {"binds": binds(facts)}


def binds(facts):
    """Return why the layout does not fit, or which part of the step, except computation, costs most."""
    parts, memory_bytes = facts["step_parts"], facts["memory_bytes"]
    if not facts["fits"]:
        what, missing = max(memory_bytes, key=memory_bytes.get), sum(memory_bytes.values()) - facts["capacity_bytes"]
        return f"does not fit: {what} {memory_bytes[what] / GB:.0f} GB; {missing / GB:.2g} GB are missing"
    name = max(parts.keys() - {"compute", "everything else"}, key=parts.get)
    return f"{name}: {parts[name] / facts['step_seconds']:.0%} of the step"


def sort_key(facts):
    """Return a key: first layouts that fit, by time; then the others, by memory."""
    return not facts["fits"], facts["step_seconds"] if facts["fits"] else sum(facts["memory_bytes"].values())


def rank_all(config, gpus, device, fixed):
    """Return the sorted facts of the candidates, each with its Config.

    If a layout does not fit, it is not tried with larger micro-batches, except with p micro-batches or fewer in a step:
    there fewer of them may need less.
    """
    found, too_large = [], None
    gc.disable()  # saves a third of the time: the collector would visit all caches
    try:
        for c in tqdm([*candidates(config, gpus, device, fixed)], unit=" layouts", delay=2, leave=False, disable=None):
            layout = replace(c, micro_batch_size=1)
            if layout != too_large:
                found.append(facts_of(c, gpus, device, exact=False) | {"config": c})
                too_large = layout if not found[-1]["fits"] and found[-1]["micro_batches"] > c.pp else None
    finally:
        gc.enable()
    return sorted(found, key=sort_key)
