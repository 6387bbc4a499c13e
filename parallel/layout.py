"""The units, buckets and shards of each rank, computed from the configuration alone.

unit_specs[i]: the `tensor.ParamSpec`s that unit i uses.

    units       are cut into consecutive parts; a chunk of the schedule is one part, placed on one rank
    bucket      the parameters that are gathered, reduced and updated together: word table, position table, each block,
                the head. All units of a rank that use a bucket share one copy of it (the tied word table)
    holders     the pipeline ranks whose units use a bucket
    shard       one of the equal parts of a bucket, if ZeRO divides it over data ranks

The parameters of a bucket lie in its flat buffer in this order, each at a multiple of ALIGN elements. So gradient norm
and weight decay need only a few slices:

    | cut over tp, decays | cut over tp, no decay | replicated, decays | replicated, no decay | padding |
                                                  ^
    To the right of the mark only tp rank 0 counts in the norm, and with sequence parallelism gradients are partial
    (otherwise only those of `ParamSpec.partial`). Each of the four is in the order of `partial`, `matrix` and `frozen`.
"""

import itertools
import math
from collections import Counter
from typing import NamedTuple

from errors import UserError
from parallel.simulation import build

ALIGN = 16  # elements: every parameter and every shard is aligned to 32 bytes or more
REPLICATED = "replicated gradients"  # equal on all tp ranks


class Range(NamedTuple):
    """Consecutive elements of a flat buffer whose parameters are of one kind."""

    begin: int
    end: int
    cut: bool  # over tp
    decays: bool
    partial: bool  # these three: of ParamSpec
    matrix: bool
    frozen: bool


def kind_of(spec):
    return spec.tp_dim is not None, spec.decay, spec.partial, spec.matrix, spec.frozen


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
    size: number of elements with padding. It has `data_ranks` equal aligned parts. tp: the number of tp ranks.
    """

    def __init__(self, name, specs, tp, data_ranks):
        self.name, self.tp, self.data_ranks = name, tp, data_ranks
        self.specs = sorted(specs, key=kind_of, reverse=True)  # parameters of one kind keep their order
        self.lengths, self.offsets, self.ranges, end = [], [], [], 0
        for kind, of_kind in itertools.groupby(self.specs, kind_of):
            begin = end
            for spec in of_kind:
                self.offsets.append(end)
                self.lengths.append(math.prod(spec.local_shape(tp)))
                end += math.ceil(self.lengths[-1] / ALIGN) * ALIGN
            self.ranges.append(Range(begin, end, *kind))
        self.size = math.ceil(end / (ALIGN * data_ranks)) * ALIGN * data_ranks

    def part(self, index, count):
        """Return (begin, end) of one of `count` equal parts. count divides the number of data ranks."""
        length = self.size // count
        return index * length, (index + 1) * length

    def ranges_in(self, begin, end):
        """Return the overlaps of the Ranges with begin .. end, counted from `begin`."""
        overlaps = (r._replace(begin=max(r.begin, begin) - begin, end=min(r.end, end) - begin) for r in self.ranges)
        return [overlap for overlap in overlaps if overlap.begin < overlap.end]

    def pieces(self, begin, end):
        """Yield a Piece for every parameter: its overlap with begin .. end."""
        for spec, offset, length in zip(self.specs, self.offsets, self.lengths, strict=True):
            low = min(max(begin - offset, 0), length)
            high = max(min(end - offset, length), low)
            yield Piece(spec, low, high, offset + low - begin)


def split(units, parts):
    """Cut `units` (embedding, blocks, head) into `parts` consecutive lists.

    If blocks are left over, middle parts get one first: the outer parts also have embedding or head.
    """
    blocks = len(units) - 2
    counts = [blocks // parts] * parts
    middle_first = sorted(range(parts), key=lambda i: (i in (0, parts - 1), i))
    for i in middle_first[: blocks % parts]:
        counts[i] += 1
    counts[0] += 1  # the embedding
    counts[-1] += 1  # the head
    remaining = iter(units)
    return [list(itertools.islice(remaining, count)) for count in counts]


def all_buckets(unit_specs, tp, data_ranks):
    """Return {name: BucketLayout} of all buckets."""
    specs = {}  # bucket name: {parameter name: ParamSpec}, a tied parameter once
    for spec in (spec for unit in unit_specs for spec in unit):
        specs.setdefault(spec.bucket, {})[spec.name] = spec
    return {name: BucketLayout(name, s.values(), tp, data_ranks) for name, s in specs.items()}


class Layout:
    """The layout of `config` on `data_ranks` ranks that share parameters (dp cp).

    schedule: with any number of micro-batches. shards: the number of shards of a bucket (ZeRO stage 0: 1). buckets:
    `all_buckets` of another Layout with the same unit_specs, tp and data_ranks.
    """

    def __init__(self, config, data_ranks, unit_specs, schedule, buckets=None):
        self.config, self.data_ranks, self.unit_specs = config, data_ranks, unit_specs
        self.shards = data_ranks // config.zero_copies if config.zero else 1
        self.zero_stage = config.zero if self.shards > 1 else 0  # one data rank shards nothing
        parts = split(range(len(unit_specs)), max(schedule.parts) + 1)
        self.units = [parts[part] for part in schedule.parts]  # units[chunk]: indices
        self.placement = schedule.placement
        self.names_of = [list(dict.fromkeys(spec.bucket for spec in unit)) for unit in unit_specs]
        self.all_buckets = buckets or all_buckets(unit_specs, config.tp, data_ranks)
        self.holders_of = {name: set() for name in self.all_buckets}
        for chunk, units in enumerate(self.units):
            for name in self.names(units):
                self.holders_of[name].add(self.placement[chunk])

    def check_holders(self):
        """Raise UserError if the ranks of a group of holders would not find each other.

        torch computes the group's name from its ranks, and from how many groups the process made before. So all its
        ranks must have made equally many.
        """
        made, first = Counter(), {}  # first: {holders: a bucket}
        for name in sorted(self.holders_of):
            if len(holders := self.holders(name)) < self.config.pp:  # all pipeline ranks have a group already
                first.setdefault(tuple(holders), name)
        for ranks, name in first.items():
            if len({made[rank] for rank in ranks}) > 1:
                why = f"pipeline ranks {list(ranks)} share {name}, and some of them share more with others"
                raise UserError(f"pp={self.config.pp}: {why}; share inside a stage, or set pp=2")
            if len(ranks) > 1:
                made.update(ranks)

    def chunks(self, rank):
        return [chunk for chunk, placed in enumerate(self.placement) if placed == rank]

    def names(self, units):
        """Return the buckets' names, each once."""
        return list(dict.fromkeys(name for unit in units for name in self.names_of[unit]))

    def buckets(self, rank):
        """Return {name: BucketLayout} of the buckets that a pipeline rank keeps."""
        names = self.names(unit for chunk in self.chunks(rank) for unit in self.units[chunk])
        return {name: self.all_buckets[name] for name in names}

    def holders(self, name):
        return sorted(self.holders_of[name])

    def passes(self, schedule, rank):
        """Return {bucket name: number of its gradients in a step}."""
        forwards = [self.names(self.units[chunk]) for kind, _, chunk in schedule.actions[rank] if kind == "F"]
        count = Counter(itertools.chain(*forwards))
        return {name: count[name] for name in self.buckets(rank)}


def replica_sums(c, data_ranks, r):
    """Return the name in the ledger if the gradients of a Range must be summed over tp, otherwise None.

    Partial gradients (`tensor.py`): each tp rank has summed its own tokens, heads or columns. Other gradients are
    equal, but NCCL may add in another order for each tp rank. With more than two data ranks the last digits then
    differ, and the copies of a parameter would drift apart.
    """
    if r.cut or r.frozen:
        return None
    if c.sequence_parallel or r.partial:
        return "partial gradients"
    return REPLICATED if c.tp > 1 and data_ranks > 2 else None


def rows_outside(c):
    """Return the number of rows of x between two units."""
    return tokens_of_rank(c) // (c.tp if c.sequence_parallel else 1)


def tokens_of_rank(c):
    """Return the number of tokens of a micro-batch on a rank."""
    return c.micro_batch_size * c.seq_length // c.cp


def build_for(c, microbatches):
    """Return the checked Schedule of a configuration."""
    return build(c.schedule, c.pp, microbatches, c.chunks)


def number_of_micro_batches(c, samples, data_ranks):
    """Return m of a data rank in a step of `samples`. The cp ranks share a micro-batch."""
    return samples * c.cp // (c.micro_batch_size * data_ranks)
