"""The units, buckets and shards of each rank, computed from the configuration alone.

A *table* describes the model: table[i] is the list of the `tensor.ParamSpec`s that unit i uses.

    units       are cut into consecutive parts; a chunk of the schedule is one part, placed on one rank
    bucket      the parameters that are gathered, reduced and updated together: word table, position table, each block,
                the head. All units of a rank that use a bucket share one copy of it (the tied word table)
    holders     the pipeline ranks whose units use a bucket
    shard       the 1/dp of a bucket that one data rank owns

The parameters of a bucket lie in its flat buffer in this order, each at a multiple of ALIGN elements. So gradient norm
and weight decay need only a few slices, even if a shard begins or ends inside a parameter:

    | cut over tp, decays | cut over tp, no decay | replicated, decays | replicated, no decay | padding |
                                                  ^
    To the right of the mark only tp rank 0 counts in the norm, and with sequence parallelism gradients are partial.
"""

import itertools
import math
from collections import Counter
from typing import NamedTuple

from parallel.schedules import updates
from parallel.simulation import build

ALIGN = 16  # elements: every parameter and every shard is aligned to 32 bytes or more


class Range(NamedTuple):
    """Consecutive elements of a flat buffer whose parameters are of one kind."""

    begin: int
    end: int
    cut: bool  # over tp
    decays: bool


def kind_of(spec):
    return spec.tp_dim is not None, spec.decay


class Piece(NamedTuple):
    """The elements of a parameter that lie in a slice of a flat buffer."""

    spec: object  # ParamSpec
    begin: int  # index into this rank's part of the parameter, flattened
    end: int
    at: int  # index of element `begin` in the slice

    def of(self, flat):
        return flat[self.at : self.at + self.end - self.begin]


class BucketLayout:
    """Positions of one bucket's parameters in the flat buffer.

    specs: ParamSpecs in the order of the buffer; specs[i] begins at offsets[i]. ranges: without the padding at the end.
    size: number of elements with padding, a multiple of dp.
    """

    def __init__(self, name, specs, tp, dp):
        self.name, self.tp, self.dp = name, tp, dp
        self.specs = sorted(specs, key=kind_of, reverse=True)  # parameters of one kind keep their order
        self.lengths, self.offsets, self.ranges, end = [], [], [], 0
        for kind, of_kind in itertools.groupby(self.specs, kind_of):
            begin = end
            for spec in of_kind:
                self.offsets.append(end)
                self.lengths.append(math.prod(spec.local_shape(tp)))
                end += math.ceil(self.lengths[-1] / ALIGN) * ALIGN
            self.ranges.append(Range(begin, end, *kind))
        self.size = math.ceil(end / (ALIGN * dp)) * ALIGN * dp

    def shard(self, dp_rank):
        length = self.size // self.dp
        return dp_rank * length, (dp_rank + 1) * length

    def owned(self, dp_rank, stage):
        """Return (begin, end) of the elements that a data rank updates."""
        return self.shard(dp_rank) if stage >= 1 else (0, self.size)

    def ranges_in(self, begin, end):
        """Return the overlaps of the Ranges with begin .. end, counted from `begin`."""
        met = (Range(max(r.begin, begin) - begin, min(r.end, end) - begin, r.cut, r.decays) for r in self.ranges)
        return [r for r in met if r.begin < r.end]

    def pieces(self, begin, end):
        """Yield a Piece for every parameter: its overlap with begin .. end."""
        for spec, offset, length in zip(self.specs, self.offsets, self.lengths, strict=True):
            low = min(max(begin - offset, 0), length)
            high = max(min(end - offset, length), low)
            yield Piece(spec, low, high, offset + low - begin)


def split(units, parts):
    """Cut `units` (embedding, blocks, head) into `parts` consecutive lists. The numbers of blocks differ by at most 1.

    If blocks are left over, middle parts get one first: the outer parts also have embedding or head.
    """
    blocks = len(units) - 2
    counts = [blocks // parts] * parts
    middle_first = sorted(range(parts), key=lambda i: (i in (0, parts - 1), i))
    for i in middle_first[: blocks % parts]:
        counts[i] += 1
    counts[0] += 1  # the embedding
    counts[-1] += 1  # the head
    left = iter(units)
    return [list(itertools.islice(left, count)) for count in counts]


def all_buckets(table, tp, dp):
    """Return {name: BucketLayout} of all buckets."""
    specs = {}  # bucket name: {parameter name: ParamSpec}, a tied parameter once
    for spec in (spec for unit in table for spec in unit):
        specs.setdefault(spec.bucket, {})[spec.name] = spec
    return {name: BucketLayout(name, s.values(), tp, dp) for name, s in specs.items()}


class Layout:
    """The layout of `config` on `dp` data ranks. schedule: a Schedule for any number of micro-batches.

    buckets: `all_buckets` of another Layout with the same table, tp and dp.
    """

    def __init__(self, config, dp, table, schedule, buckets=None):
        self.config, self.dp, self.table = config, dp, table
        self.stage = config.zero if dp > 1 else 0  # one data rank shards nothing
        parts = split(range(len(table)), max(schedule.parts) + 1)
        self.units = [parts[part] for part in schedule.parts]  # units[chunk]: indices
        self.placement = schedule.placement
        self.names_of = [list(dict.fromkeys(spec.bucket for spec in unit)) for unit in table]  # buckets of each unit
        self.all_buckets = buckets or all_buckets(table, config.tp, dp)
        self.holders_of = {name: set() for name in self.all_buckets}
        for chunk, units in enumerate(self.units):
            for name in self.names(units):
                self.holders_of[name].add(self.placement[chunk])

    def chunks(self, rank):
        return [chunk for chunk, placed in enumerate(self.placement) if placed == rank]

    def names(self, units):
        """Return the buckets' names, each once."""
        return list(dict.fromkeys(name for unit in units for name in self.names_of[unit]))

    def buckets(self, rank):
        held = self.names(unit for chunk in self.chunks(rank) for unit in self.units[chunk])
        return {name: self.all_buckets[name] for name in held}

    def holders(self, name):
        return sorted(self.holders_of[name])

    def stored(self, rank):
        """Return P, the elements of a pipeline rank's buckets, with padding."""
        return sum(bucket.size for bucket in self.buckets(rank).values())

    def padding(self, rank):
        return sum(bucket.size - sum(bucket.lengths) for bucket in self.buckets(rank).values())

    def passes(self, schedule, rank):
        """Return {bucket name: gradients for an update}: one for each micro-batch and chunk that uses the bucket."""
        forwards = [self.names(self.units[chunk]) for kind, _, chunk in schedule.actions[rank] if kind == "F"]
        count = Counter(itertools.chain(*forwards))
        return {name: count[name] // updates(schedule) for name in self.buckets(rank)}


def replica_sums(c, dp):
    """Return the name in the ledger if gradients of replicated parameters must be summed over tp, otherwise None.

    With sequence parallelism each tp rank has summed its own tokens. Without it the gradients are equal, but NCCL may
    add in another order in each dp group. With more than two dp ranks the last digits then differ, and the copies of a
    parameter would drift apart.
    """
    if c.sequence_parallel:
        return "partial gradients"
    return "replicated gradients" if c.tp > 1 and dp > 2 else None


def rows_outside(c):
    """Return the number of rows of x between two units."""
    return tokens_of_rank(c) // (c.tp if c.sequence_parallel else 1)


def tokens_of_rank(c):
    """Return the number of tokens of a micro-batch on a rank."""
    return c.micro_batch_size * c.seq_length // c.cp


def build_for(c, dp, microbatches):
    """Return the checked Schedule of a configuration. microbatches: of each data rank."""
    return build(c.schedule, c.pp, microbatches, c.chunks, number_of_micro_batches(c, c.global_batch_size, dp))


def number_of_micro_batches(c, samples, dp):
    """Return m of a data rank in a step of `samples`. dp contains the cp ranks, which share a micro-batch."""
    return samples * c.cp // (c.micro_batch_size * dp)
