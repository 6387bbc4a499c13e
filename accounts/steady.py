"""Compute the bytes sent and kept in a long step from short steps.

A step with hundreds of micro-batches repeats itself. Each further round of micro-batches (`round_of`) adds the same
bytes sent. The peak of the bytes kept stays the same (except in GPipe). The functions here call `ledger.py` and
`memory.py` for short steps and extend the result. Bytes of activations are proportional to b, the samples of a
micro-batch, so b = 1 is enough. The tests show that the results equal those of the long step.

A thousand layouts have few different schedules, tables of parameters and tables of bytes. Caches keep each of them.
"""

import copy
import dataclasses
import functools
from typing import NamedTuple

from accounts import ledger, memory
from model import parameter_table
from parallel import schedules
from parallel.layout import Layout

# Rows of axis tp whose bytes do not depend on b.
NOT_PER_SAMPLE = ("partial gradients", "replicated gradients", "parameter norms")


class Shape(NamedTuple):
    """The fields of a layout, except the micro-batch's size. Names as in `config.Config`."""

    dp: int
    tp: int
    pp: int
    schedule: str
    chunks: int
    zero: int
    sequence_parallel: bool
    recompute: str


@functools.cache
def schedule(name, p, m, chunks):
    """Return the unchecked Schedule. Raises UserError if no such schedule exists."""
    return schedules.SCHEDULES[name](p, m, chunks)


@functools.cache
def messages(*numbers):
    """Return [the messages of each rank] of the Schedule with these numbers: (name, p, m, chunks)."""
    made = schedule(*numbers)
    found = [[] for _ in made.actions]
    for message in schedules.messages(made):
        found[message.source].append(message)
        found[message.destination].append(message)
    return found


ROUNDS = {"1f1b": 1, "interleaved": 2, "zb-h1": 2}  # times p micro-batches, after which no rank keeps more. Others: 3


def round_of(name, p):
    """Return the number of micro-batches after which a schedule repeats itself, except at its begin and its end."""
    return {"interleaved": p, "chimera": 2}.get(name, 1)


def short_sent(name, p, m):
    """Return the micro-batches of the shortest step from which `Model.sent` extends to m micro-batches."""
    length = round_of(name, p)
    return min(m, length + m % length)


def short_kept(name, p, m):
    """Return the micro-batches of a short step whose ranks keep as many bytes as with m. GPipe needs all m."""
    if name == "gpipe":
        return m
    return min(m, ROUNDS.get(name, 3) * p + 2 * (name != "interleaved") + (m % p if name == "chimera" else 0))


class Model:
    """The bytes of any layout of one model. config: a Config; item, wide, on_cpu: as in `memory.sizes`."""

    def __init__(self, config, item, wide, on_cpu=False):
        self.config, self.item, self.wide, self.on_cpu = config, item, wide, on_cpu
        self.table = parameter_table(config)
        for name in "of sizes states buckets layout _sent _peak".split():  # a cache for each method
            setattr(self, name, functools.cache(getattr(self, name)))

    def of(self, shape):
        """Return the Config of a Shape, with one sample in a micro-batch."""
        fields = shape._asdict()
        del fields["dp"]
        return dataclasses.replace(self.config, **fields, micro_batch_size=1)

    def buckets(self, dp, tp, pp, name, chunks):
        """Return a `layout.Layout` for any ZeRO stage."""
        config = dataclasses.replace(self.config, tp=tp, pp=pp, schedule=name, chunks=chunks)
        made = Layout(config, dp, self.table, schedule(name, pp, pp, chunks))
        made.holders, made.stored = functools.cache(made.holders), functools.cache(made.stored)
        names = functools.cache(made.names)
        made.names = lambda units: names(tuple(units))
        return made

    def layout(self, shape):
        """Return the `layout.Layout` of a Shape."""
        made = copy.copy(self.buckets(*shape[:5]))
        made.config, made.stage = self.of(shape), shape.zero if shape.dp > 1 else 0
        return made

    def _sent(self, shape, m, rank):
        """Return the table of `ledger.predict` for a step with m micro-batches of one sample, on data rank 0."""
        made = schedule(shape.schedule, shape.pp, m, shape.chunks)
        return ledger.predict(self.layout(shape), made, rank, 0, self.item, self.wide)

    def sent(self, shape, m, b, rank):
        """Return {(axis, what, operation): (calls, bytes)} of pipeline rank `rank`: the table of `ledger.predict`.

        The calls of the cross-entropy rows are those of b = 1.
        """
        length, first = round_of(shape.schedule, shape.pp), short_sent(shape.schedule, shape.pp, m)
        table, rounds = self._sent(shape, first, rank), (m - first) // length
        after = self._sent(shape, first + length, rank) if rounds else table
        result = {}
        for key, (calls, sent) in table.items():
            more_calls, more = after[key]
            samples = b if key[0] == "pp" or (key[0] == "tp" and key[1] not in NOT_PER_SAMPLE) else 1
            result[key] = calls + rounds * (more_calls - calls), samples * (sent + rounds * (more - sent))
        return result

    def _peak(self, shape, m, rank):
        """Return `memory.activations` with one sample in a micro-batch. ZeRO does not change them."""
        numbers = shape.schedule, shape.pp, m, shape.chunks
        order = schedule(*numbers), rank, self.sizes(shape), messages(*numbers)[rank]
        return memory.activations(self.of(shape), *order)

    def sizes(self, shape):
        """Return the `memory.Sizes` of a micro-batch with one sample."""
        return memory.sizes(self.of(shape), self.item, self.wide, self.on_cpu)

    def states(self, shape, rank):
        """Return {what: bytes} of the model states that pipeline rank `rank` keeps (`memory.rank_states`)."""
        return memory.rank_states(self.layout(shape), rank, self.sizes(shape))

    def kept(self, shape, m, b, rank):
        """Return {what: bytes} that pipeline rank `rank` keeps: the table of `memory.predict`."""
        numbers = short_kept(shape.schedule, shape.pp, m), rank
        peaks = self._peak(shape._replace(dp=1, zero=0), *numbers)
        return self.states(shape, rank) | {what: b * count for what, count in peaks.items()}
