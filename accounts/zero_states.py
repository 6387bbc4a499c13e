"""Predict the bytes of the model states on a rank: parameters, gradients, master weights, moments.

**Model states** (slide "ZeRO (FSDP)"; Rajbhandari et al., arXiv 1910.02054, Table 1). (2 + 4 + 4 + 8) are their bytes
per element, in this order. fp32 parameters are also the master weights, except with `offload` on a GPU.

    stage    the paper (2 + 2 + 12)     bf16 (2 + 4 + 4 + 8)     fp32 (4 + 4 + 0 + 8)
      0      16P                        18P                      16P                     nothing is sharded
      1       4P + 12P/n                 6P + 12P/n               8P +  8P/n             master weights, moments 1/n
      2       2P + 14P/n                 2P + 16P/n               4P + 12P/n             gradients too
      3            16P/n                      18P/n                    16P/n             parameters too
"""

from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from parallel.layout import rows_outside, tokens_of_rank
from parallel.optimizer import RULES


class Sizes(NamedTuple):
    """Bytes of one number, and rows (vectors of a token) of a micro-batch."""

    item: int  # a parameter, or an element of an activation
    wide: int  # gradients, master weights, moments, losses: 4, in fp64 8
    on_cpu: bool
    tokens: int  # bs/cp: rows between a column and a row parallel linear
    rows: int  # rows elsewhere: with sequence parallelism tokens/t
    has_masters: bool


def sizes(c, item, wide, on_cpu):
    has_masters = item != wide or (c.offload and not on_cpu)
    tokens = tokens_of_rank(c)
    return Sizes(item, wide, on_cpu, tokens, rows_outside(c), has_masters)


def stored(layout, rank):
    """Return P, the elements of a pipeline rank's buckets, with padding."""
    return sum(bucket.size for bucket in layout.buckets(rank).values())


def shards_of(layout, bucket):
    """Return the number of shards of a BucketLayout."""
    return min(layout.shards, bucket.data_ranks)


def rank_states(layout, rank, z):
    c, elements, total = layout.config, Counter(), Counter()  # elements: {number of shards: elements so cut}
    widths = z.item, z.wide, z.wide * z.has_masters, z.wide * RULES[c.optimizer].moments
    for bucket in layout.buckets(rank).values():
        elements[shards_of(layout, bucket)] += bucket.size
    for shards, size in elements.items():
        total.update(model_states(size, shards, c.zero, *widths))
    return dict(total)


def model_states(elements, n, zero, parameters=2, gradients=4, master=4, moments=8):
    """Return the first table above as {what: Fraction}. elements: P; the last four: bytes per element."""
    table = {  # bytes per element, and the first ZeRO stage that shards them
        "parameters": (parameters, 3),
        "gradients": (gradients, 2),
        "master weights": (master, 1),
        "moments": (moments, 1),
    }
    return {what: Fraction(elements * width, n if zero >= first else 1) for what, (width, first) in table.items()}
