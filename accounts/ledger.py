"""The bytes that one rank sends in a step over rings, computed from the configuration alone (slide "分散並列学習").

TABLE has the slide's columns: 通信内容 (what), 通信形式 (operation) and, as titles, 通信頻度 (how often). Its texts are
evaluated: `predict_sent`, the tables of --ledger and plan.py follow from them. `comm.Ledger` counts the same in a run.

Letters: b samples of a micro-batch, s tokens of a sample, h hidden size, t = tp, c = cp, n data ranks (dp cp),
m micro-batches, L layers of this pipeline rank; sp: sequence parallelism, zero: the ZeRO stage, lamb: LAMB
or LARS. Below each title:

    layer        any unit. rows, columns: elements of the outputs of its row parallel linears, and of the inputs of its
                 column parallel linears; exchanged: of attention's q, k, v and y; runs: forwards, 2 with full
                 recomputation
    micro-batch  embeddings, heads: forwards of them; bsh: elements of an activation, b s h / c; losses: times that the
                 head computes its losses, in `pieces` of `piece` tokens
    boundary     between two consecutive chunks on different ranks; down, up: messages to the next and to the previous
                 chunk; message: elements of one
    bucket       P: elements, with padding; part: those that this rank updates; partial, replicated: those that are
                 summed over tp; used: 1 if it has gradients; whole: 1 if Muon needs whole matrices; cut: elements of
                 those that tp cuts
    step         norms: two of each parameter

In GPT-2 a layer has two rows and two columns of bsh elements. So a rank sends 8 Lm bsh (t-1)/t elements of activations
over tp, with recomputation 12, with sequence parallelism 10, with both 14. The axes shards and copies exist only with
zero_copies; without it, shards is data.
"""

import math
import re
from collections import Counter, defaultdict
from fractions import Fraction
from types import CodeType
from typing import NamedTuple

from accounts.meta import UNKNOWN, work_of
from accounts.zero_states import shards_of
from parallel import schedules
from parallel.comm import sent_bytes
from parallel.layout import REPLICATED, replica_sums, rows_outside, tokens_of_rank
from parallel.mesh import grid
from parallel.optimizer import RULES
from parallel.tensor import ROWS

# axis, what, operation, condition, [elements of each call], bytes of an element (double: 8), note
TABLE = """
layer, micro-batch
    tp       activations                   all_reduce      not sp         runs*rows + columns       item    y in F, dx
    tp       activations                   reduce_scatter  sp             runs*rows + columns       item    y in F, dx
    tp       activations                   all_gather      sp             (runs+1)*columns + rows   item    x, dy
    cp       tokens for heads              all_to_all      True           (runs+1)*exchanged        item    q, k, v, y
micro-batch
    tp       embedding                     all_reduce      not sp         embeddings*[bsh]          item    y in F
    tp       embedding                     reduce_scatter  sp             embeddings*[bsh]          item    y in F
    tp       embedding                     all_gather      sp             embeddings*[bsh]          item    dy
    tp       head                          all_reduce      not sp         heads*[bsh]               item    dx
    tp       head                          reduce_scatter  sp             heads*[bsh]               item    dx
    tp       head                          all_gather      sp             losses*[bsh]              item    x
    tp       cross-entropy rows            all_reduce      True           pieces*[piece, 2*piece]   wide
boundary, micro-batch
    pp       activations                   send            True           down*[message]            item
    pp       gradients of activations      send            True           up*[message]              item
bucket, micro-batch
    shards   gradients                     reduce_scatter  zero >= 2      [P]                       wide
    shards   parameters                    all_gather      zero == 3      2*[P]                     item    in F, B
bucket, step
    shards   gradients                     all_reduce      zero == 0      used*[P]                  wide
    shards   gradients                     reduce_scatter  zero == 1      used*[P]                  wide
    shards   parameters                    all_gather      0 < zero < 3   [P]                       item
    copies   gradients                     all_reduce      True           [part]                    wide
    holders  twin gradients                all_reduce      True           [part]                    wide
    tp       partial gradients             all_reduce      True           partial                   wide
    tp       replicated gradients          all_reduce      True           replicated                wide    if n > 2
    shards   momentum                      all_gather      zero > 0       whole*[P]                 wide    of Muon
    tp       momentum                      all_gather      True           cut                       wide    of Muon
step
    tp       parameter norms               all_reduce      lamb           [norms]                   double
    shards   parameter norms               all_reduce      lamb and zero  [norms]                   double
    holders  parameter norms               all_reduce      lamb           [norms]                   double
    world    scalars                       all_reduce      True           [4]                       double
"""


class Row(NamedTuple):
    """A line of TABLE."""

    per: tuple  # how often: its title, such as ("bucket", "step")
    axis: str
    what: str
    operation: str
    condition: CodeType  # True or False for a layout
    elements: CodeType  # of each call, a list
    width: str  # bytes of an element


def read(table):
    """Return the Rows of a text such as TABLE."""
    per, rows = (), []
    for line in table.strip().splitlines():
        if line.startswith(" "):
            axis, what, operation, condition, elements, width, *_ = re.split("  +", line.strip())
            formulas = (compile(text, f"TABLE: {line}", "eval") for text in (condition, elements))
            rows.append(Row(per, axis, what, operation, *formulas, width))
        else:
            per = tuple(line.split(", "))
    return rows


EVERY_ROW = read(TABLE)


def rows_of(layout):
    """Yield the Rows whose condition holds for a layout."""
    c = layout.config
    letters = dict(sp=c.sequence_parallel, zero=layout.zero_stage)
    letters["lamb"] = RULES[c.optimizer].layerwise
    name = {} if c.zero_copies > 1 else {"shards": "data"}
    for row in EVERY_ROW:
        if eval(row.condition, letters):
            yield row._replace(axis=name.get(row.axis, row.axis))


def how_often(layout):
    """Return the column 通信頻度 as {(axis, what, operation): `Row.per`}."""
    return {(row.axis, row.what, row.operation): row.per for row in rows_of(layout)}


def predict_sent(layout, schedule, pp_rank, data_rank, item, master_item, reads_losses=False):
    """Return TABLE as {(axis, what, operation): (calls, bytes)} for a step on one rank.

    item: bytes of an element of a parameter or an activation; master_item: of a gradient or a cross-entropy row.
    reads_losses: of the Model.
    """
    table = {}
    actions = schedule.actions[pp_rank]
    forwards = Counter(unit for kind, _, chunk in actions if kind == "F" for unit in layout.units[chunk])
    letters = letters_of_rank(layout, schedule, pp_rank, forwards, reads_losses)
    letters |= dict(item=item, wide=master_item, double=8)
    occasions = occasions_of(layout, schedule, pp_rank, data_rank, letters)
    occasions["layer", "micro-batch"] = layers_of(layout, forwards, letters)
    for row in rows_of(layout):
        key = row.axis, row.what, row.operation
        for times, ranks, letters in occasions[row.per]:
            n = ranks.get(row.axis, 1)
            if n > 1 and (elements := eval(row.elements, letters)) and times:
                calls, sent = table.get(key, (0, 0))
                sent += sent_bytes(row.operation, n, times * sum(elements) * letters[row.width])
                table[key] = calls + times * len(elements), sent
    return table


def ranks_of(layout):
    """Return the ranks as `mesh.grid` does."""
    c = layout.config
    return grid(axis_sizes(layout)["world"], c.tp, c.pp, c.cp, c.order)


def axis_sizes(layout):
    """Return {name of a `mesh.Axis`: its number of ranks}."""
    c = layout.config
    sizes = {"data": layout.data_ranks, "shards": layout.shards, "copies": c.zero_copies, "cp": c.cp, "tp": c.tp}
    return sizes | {"pp": c.pp, "world": layout.data_ranks * c.tp * c.pp}


def occasions_of(layout, schedule, pp_rank, data_rank, letters):
    """Return {Row.per: [(times in a step, {axis: ranks}, letters)]} of a rank. letters: those of all its rows."""
    ranks, passes, buckets, norms = axis_sizes(layout), layout.passes(schedule, pp_rank), [], Counter()
    for name, bucket in layout.buckets(pp_rank).items():
        holders, used = tuple(layout.holders(name)), passes[name] > 0
        more = letters_of_bucket(layout, bucket, data_rank) | {"used": used}
        axes = {"holders": len(holders), "tp": bucket.tp, "data": bucket.data_ranks}
        axes |= {"shards": shards_of(layout, bucket), "copies": min(ranks["copies"], bucket.data_ranks)}
        buckets.append((passes[name], ranks | axes, letters | more))
        norms[holders] += 2 * len(bucket.specs)
    once = 1, ranks, letters | {"norms": norms.total()}
    return {
        ("micro-batch",): [once],
        ("boundary", "micro-batch"): [once],
        ("bucket", "micro-batch"): buckets,
        ("bucket", "step"): [(1, *rest) for _, *rest in buckets],
        ("step",): [once, *((1, {"holders": len(group)}, letters | {"norms": n}) for group, n in norms.items())],
    }


def layers_of(layout, forwards, letters):
    """Return [(times in a step, {axis: ranks}, letters)] of the units of a rank. forwards: {unit: number in a step}."""
    times = Counter()
    works = work_of(layout.config, letters["item"], on_cpu=True) or [UNKNOWN] * len(layout.unit_specs)
    for unit, count in forwards.items():
        times[works[unit].first] += count  # units with the same work
    return [(count, axis_sizes(layout), letters | works[unit]._asdict()) for unit, count in times.items()]


def letters_of_rank(layout, schedule, rank, forwards, reads_losses):
    """Return the letters of a micro-batch and of a boundary. forwards: {unit: number in a step}."""
    c, tokens = layout.config, tokens_of_rank(layout.config)
    embeddings, heads, pieces = forwards[0], forwards[len(layout.unit_specs) - 1], math.ceil(tokens / ROWS)
    losses = heads * (1 + reads_losses)
    return dict(
        embeddings=embeddings,
        heads=heads,
        losses=losses,
        bsh=tokens * c.hidden_size,
        pieces=losses * pieces,
        piece=Fraction(tokens, pieces),
        down=number_of_messages(schedule, rank, "F", schedules.downstream),
        up=number_of_messages(schedule, rank, "BI", schedules.upstream),
        message=rows_outside(c) * c.hidden_size,
    )


def number_of_messages(schedule, rank, kinds, neighbour):
    """Return how many messages a rank's actions of these kinds send to other ranks."""
    chunks = [neighbour(schedule, chunk) for kind, _, chunk in schedule.actions[rank] if kind in kinds]
    return sum(chunk is not None and schedule.placement[chunk] != rank for chunk in chunks)


def letters_of_bucket(layout, bucket, data_rank):
    """Return the letters of a bucket that no schedule changes."""
    c, lengths = layout.config, defaultdict(list)
    begin, end = bucket.part(data_rank % layout.shards, layout.shards)
    for r in bucket.ranges_in(begin, end):
        lengths[replica_sums(c, layout.data_ranks, r)].append(r.end - r.begin)
    matrices = [spec for spec in bucket.specs if spec.matrix and not spec.frozen] if c.optimizer == "muon" else []
    return dict(
        P=bucket.size,
        part=end - begin,
        partial=lengths["partial gradients"],
        replicated=lengths[REPLICATED],
        whole=len(matrices) > 0,
        cut=[math.prod(spec.shape) for spec in matrices if spec.tp_dim is not None],
    )


def average(tables):
    """Return the mean of [(table, number of steps)]."""
    mean, steps = {}, sum(count for _, count in tables)
    for table, count in tables:
        for key, row in table.items():
            before = mean.get(key, (0, 0))
            mean[key] = tuple(x + Fraction(y * count, steps) for x, y in zip(before, row, strict=True))
    return mean
