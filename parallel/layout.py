"""Who holds what: a layout's units, buckets and shards, from the configuration alone.

A *layout* says how a model is spread over dp * tp * pp ranks. Everything here is arithmetic: it needs no process and no
tensor, and serves a real run (`zero.py`, `pipeline.py`, `checkpoint.py`) and a prediction (`ledger.py`, `memory.py`)
alike. The model is given as a *table*: for each unit (embedding, blocks, head) the ParamSpecs that it uses
(`model.parameter_table`).

    units       cut into consecutive parts; a chunk of the schedule holds one part; a rank has the chunks placed on it
    bucket      the parameters that are gathered, reduced and updated together: word table, position table, each block,
                the head. All of a rank's units that use a bucket share it (the tied word table)
    holders     the pipeline ranks whose units use a bucket
    shard       one data rank's 1/n of a bucket

A bucket's flat buffer has its parameters in this order, each from a multiple of ALIGN elements on:

    | cut over tp, decays | cut over tp, no decay | replicated, decays | replicated, no decay | padding |
                                                  ^
    Parameters right of the mark are copied on every tp rank: only tp rank 0 counts it in the norm. Under sequence
    parallelism each copy's gradient is a partial sum.

So the global norm and weight decay are arithmetic on ranges, wherever a shard begins or ends.
"""

import math
from typing import NamedTuple

ALIGN = 16  # elements: every parameter and every shard begins at a multiple of 32 bytes or more


class Range(NamedTuple):
    """Consecutive elements of a flat buffer whose parameters are of one kind."""

    begin: int
    end: int
    cut: bool  # over tp
    decays: bool


class Piece(NamedTuple):
    """The common part of a parameter and a range of its bucket's flat buffer. It may be empty."""

    spec: object  # ParamSpec
    begin: int  # in elements of this rank's part of the parameter
    end: int
    at: int  # where `begin` lies, counted from the range's first element

    def of(self, flat):
        """This piece of `flat`, a tensor that has the range's elements."""
        return flat[self.at : self.at + self.end - self.begin]


class BucketLayout:
    """Where the parameters of one bucket lie on ranks of a (tp, dp) layout.

    specs: in the buffer's order, specs[i] from offsets[i] on; ranges: Ranges in order, without the padding at the end;
    size: elements, padding included; dp divides it.
    """

    def __init__(self, name, specs, tp, dp):
        self.name, self.tp, self.dp = name, tp, dp
        self.specs = sorted(specs, key=lambda spec: (spec.tp_dim is None, not spec.decay))
        self.lengths = [math.prod(spec.local_shape(tp)) for spec in self.specs]
        self.offsets, self.ranges, end = [], [], 0
        for spec, length in zip(self.specs, self.lengths, strict=True):
            self.offsets.append(end)
            begin, end = end, end + math.ceil(length / ALIGN) * ALIGN
            kind = (spec.tp_dim is not None, spec.decay)
            if self.ranges and self.ranges[-1][2:] == kind:
                begin = self.ranges.pop().begin  # the range goes on
            self.ranges.append(Range(begin, end, *kind))
        self.size = math.ceil(end / (ALIGN * dp)) * ALIGN * dp

    def shard(self, dp_rank):
        """(begin, end) of a data rank's shard."""
        length = self.size // self.dp
        return dp_rank * length, (dp_rank + 1) * length

    def owned(self, dp_rank, stage):
        """(begin, end) of the elements that a data rank updates: from stage 1 on its shard, else all."""
        return self.shard(dp_rank) if stage >= 1 else (0, self.size)

    def ranges_in(self, begin, end):
        """The Ranges as far as they lie in begin .. end, counted from `begin`."""
        met = (Range(max(r.begin, begin) - begin, min(r.end, end) - begin, r.cut, r.decays) for r in self.ranges)
        return [r for r in met if r.begin < r.end]

    def pieces(self, begin, end):
        """A Piece for every parameter: its common part with begin .. end."""
        for spec, offset, length in zip(self.specs, self.offsets, self.lengths, strict=True):
            low = min(max(begin - offset, 0), length)
            high = max(min(end - offset, length), low)
            yield Piece(spec, low, high, offset + low - begin)


def split(units, parts):
    """`units` (embedding, blocks, head) as `parts` consecutive lists, blocks spread evenly.

    Where the blocks do not divide, the parts in the middle take one more: the first and the last part have the
    embedding and the head besides.
    """
    blocks = len(units) - 2
    counts = [blocks // parts] * parts
    middle_first = sorted(range(parts), key=lambda i: (i in (0, parts - 1), i))
    for i in middle_first[: blocks % parts]:
        counts[i] += 1
    ends = [1 + sum(counts[: i + 1]) for i in range(parts)]
    begins = [0, *ends[:-1]]
    ends[-1] += 1
    return [list(units[begin:end]) for begin, end in zip(begins, ends, strict=True)]


class Layout:
    """The layout of `config` on `dp` data ranks. table: [ParamSpecs of each unit]; schedule: one of its Schedules.

    Only the schedule's chunks and their placement count here, which do not depend on the number of micro-batches.
    """

    def __init__(self, config, dp, table, schedule):
        self.config, self.dp, self.table = config, dp, table
        self.stage = config.zero if dp > 1 else 0  # one rank has nobody to share with
        parts = split(range(len(table)), max(schedule.parts) + 1)
        self.units = [parts[part] for part in schedule.parts]  # units[chunk]: numbers of the model's units
        self.placement = schedule.placement
        specs = {}  # bucket name: {parameter name: ParamSpec}, a tied one once
        for spec in (spec for unit in table for spec in unit):
            specs.setdefault(spec.bucket, {})[spec.name] = spec
        self.all_buckets = {name: BucketLayout(name, s.values(), config.tp, dp) for name, s in specs.items()}

    def chunks(self, rank):
        """The chunks on pipeline rank `rank`."""
        return [chunk for chunk, placed in enumerate(self.placement) if placed == rank]

    def names(self, units):
        """The names of the buckets that some units use, each once."""
        return list(dict.fromkeys(spec.bucket for unit in units for spec in self.table[unit]))

    def buckets(self, rank):
        """{name: BucketLayout} of pipeline rank `rank`."""
        held = self.names(unit for chunk in self.chunks(rank) for unit in self.units[chunk])
        return {name: self.all_buckets[name] for name in held}

    def holders(self, name):
        """The pipeline ranks that hold the bucket `name`, ascending."""
        chunks = [chunk for chunk, units in enumerate(self.units) if name in self.names(units)]
        return sorted({self.placement[chunk] for chunk in chunks})

    def stored(self, rank):
        """P: elements of the buckets of pipeline rank `rank`, padding included."""
        return sum(bucket.size for bucket in self.buckets(rank).values())

    def padding(self, rank):
        """Those of P that are no parameter's: they align parameters, and let dp divide every bucket."""
        return sum(bucket.size - sum(bucket.lengths) for bucket in self.buckets(rank).values())

    def passes(self, schedule, rank):
        """{bucket name: how many micro-batches of a step give it a gradient on pipeline rank `rank`}."""
        count = dict.fromkeys(self.buckets(rank), 0)
        for kind, _, chunk in schedule.actions[rank]:
            for name in self.names(self.units[chunk]) if kind == "F" else []:
                count[name] += 1
        return count


def rows_outside(c):
    """Rows of a micro-batch that a rank has outside the pairs of linears: bs; bs/t with sequence parallelism."""
    return c.micro_batch_size * c.seq_length // (c.tp if c.sequence_parallel else 1)
