"""The grid of layouts: its points, and the few of them that stand for the others.

A point is a layout, {axis: value} of SIZES, OTHERS, LATER and "extra". `fitted` makes a configuration of it.
"""

import contextlib
import functools
import itertools
import math
import zlib

import numpy as np

import config as configuration
from config import CHOICES
from errors import UserError
from parallel import schedules, simulation
from parallel.optimizer import RULES
from testing.tiny import tiny_config

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "chimera"]
OPTIMIZERS = ["sgd", "adamw", "lamb", "lars", "muon"]  # each point has one; a rule of yours has points of its own
SIZES = {"dp": [1, 2, 4, 8, 3, 6], "tp": [1, 2, 4, 8], "pp": [1, 2, 4, 8], "cp": [1, 2, 4]}
OTHERS = {
    "schedule": list(schedules.SCHEDULES),
    "zero": [0, 1, 2, 3],
    "sequence_parallel": [False, True],
    "recompute": ["none", "full"],
    "optimizer": OPTIMIZERS,
    "micro_batches": ["one", "fewer than stages", "stages", "not a multiple", "twice"],
}
# A new axis comes here, with its usual value first: then the names of old points stay (`name`, `with_optimizer`).
LATER = {"order": CHOICES["order"], "zero_copies": [1, 2, 3, 4], "extra": [""]}
LLAMA = dict(model="llama", num_query_groups=4, ffn_hidden_size=24, norm_epsilon=1e-3)
EXTRAS = {  # each point comes twice: without any of these, and with one of them
    "llama": LLAMA,
    "groups of 4": LLAMA | dict(num_query_groups=2),
    "untied": LLAMA | dict(num_query_groups=0, untie_embeddings_and_output_weights=True, rotary_base=77.0),
    "relu": dict(activation="relu"),
    "offload": dict(offload=True),
    "no dropout": dict(dropout=0.0),
}


def number_of_micro_batches(word, pp):
    return {"one": 1, "fewer than stages": pp - 1, "stages": pp, "not a multiple": pp + 1, "twice": 2 * pp}[word]


@functools.cache
def can_run(schedule, stages, m):
    try:
        return bool(simulation.build(schedule, stages, m, schedules.usual_chunks(schedule)))
    except UserError as error:  # "stages=3: ...": the schedule needs another number
        return "=" not in str(error).partition(":")[0]
    except Exception:  # a defect, whatever it raises: the point stays, and its test fails
        return True


def fits(dp, tp, pp, cp, schedule, zero, zero_copies, sequence_parallel, micro_batches, order, **_):
    """Return False if the values do not go together, or a simpler point is the same layout."""
    redundant = (
        (pp == 1 and (schedule != "1f1b" or micro_batches in ("fewer than stages", "stages")))
        or (pp == 2 and micro_batches == "fewer than stages")
        or (dp * cp == 1 and zero)
        or (zero_copies > 1 and (not zero or dp * cp <= zero_copies or dp * cp % zero_copies))
        or (tp == 1 and sequence_parallel)
        or (1 in (dp, pp) and order != "dp-pp-tp")
    )
    return not redundant and can_run(schedule, pp, number_of_micro_batches(micro_batches, pp))


def ranks(dp, tp, pp, cp, **_):
    return dp * tp * pp * cp


@functools.cache
def points():
    """Return all points: each layout on 2 to 8 ranks, with one optimizer, without and with one of EXTRAS."""
    others = OTHERS | LATER | {"optimizer": OPTIMIZERS[:1]}
    sizes = [values for values in itertools.product(*SIZES.values()) if 2 <= math.prod(values) <= 8]
    found = (dict(zip(SIZES | others, a + b, strict=True)) for a in sizes for b in itertools.product(*others.values()))
    plain = [point for point in found if fits(**point)]
    yours = [point | dict(optimizer=rule) for point in plain for rule in RULES if rule not in OPTIMIZERS]
    return [*map(with_optimizer, plain), *map(with_optimizer, map(with_extra, plain)), *yours]


def with_extra(point):
    """Choose one of EXTRAS from a point's values."""
    fit = [extra for extra, fields in EXTRAS.items() if not (fields.get("num_query_groups") or 8) % point["tp"]]
    return point | dict(extra=fit[zlib.crc32(str(point).encode()) % len(fit)])


def with_optimizer(point):
    """Choose a point's optimizer from its values that are not the first ones, so a new axis does not change it.

    An optimizer sees the mesh and the pieces of ZeRO, so it meets all of these. The other settings change gradients.
    """
    usual = {axis: values[0] for axis, values in (SIZES | OTHERS | LATER).items()}
    others = [f"{axis}{value}" for axis, value in point.items() if axis != "optimizer" and value != usual[axis]]
    number = sum(zlib.crc32(text.encode()) for text in others)
    return point | dict(optimizer=OPTIMIZERS[number % len(OPTIMIZERS)])


def name(point):
    left_out = ["cp"] * (point["cp"] == 1)
    left_out += [axis for axis, (usual, *_) in LATER.items() if point[axis] == usual]
    values = [value for axis, value in point.items() if axis not in left_out]
    return "-".join(map(str, values)).replace(" ", "_")


def fitted(dp, tp, pp, cp, schedule, micro_batches, extra="", **fields):
    """Return (number of processes, configuration) of a point. Raises UserError if users are refused this layout."""
    chunks = schedules.usual_chunks(schedule)
    layers = max(3, pp * chunks - 1)  # 2 parts: 2 blocks and 1 block; more parts: one has no block
    fields |= dict(schedule=schedule, chunks=chunks, num_layers=layers, micro_batch_size=2, lr=5e-3, dropout=0.1)
    batch = 2 * dp * number_of_micro_batches(micro_batches, pp)
    config = tiny_config(dp, tp, pp=pp, cp=cp, global_batch_size=batch, **fields | EXTRAS.get(extra, {}))
    configuration.check(config, dp * tp * pp * cp)
    return dp * tp * pp * cp, config


# --- the points that stand for the others -----------------------------------------------------------------------------

# The points of the mistakes in defects.txt.
NAMED = """
    1-1-1-2-1f1b-0-False-none-lamb-one-llama 1-1-1-2-1f1b-0-False-none-sgd-twice 1-1-2-1f1b-0-False-none-lars-stages
    1-1-2-1f1b-0-False-none-muon-not_a_multiple 1-1-2-gpipe-0-False-none-adamw-stages
    1-1-2-zb-h1-0-False-none-sgd-stages 1-1-4-chimera-0-False-full-lamb-one-relu
    1-2-1-1f1b-0-False-full-lamb-one 1-2-1-1f1b-0-False-none-muon-one
    1-2-1-2-1f1b-3-True-none-lamb-not_a_multiple-groups_of_4
    2-1-1-1f1b-1-False-full-muon-twice 2-1-1-1f1b-1-False-none-adamw-twice 2-1-1-1f1b-1-False-none-lamb-one
    2-1-1-1f1b-2-False-none-sgd-twice 2-1-1-1f1b-3-False-none-muon-twice 2-1-1-2-1f1b-0-False-none-muon-twice
    2-1-2-zb-h1-0-False-none-sgd-not_a_multiple 4-1-1-1f1b-2-False-none-lamb-twice-2
"""
QUICK = 26  # so many points of every run are the first ones of a cover of all pairs


def listed(slow):
    """Return (the points of every run, those that only a slow run adds; these take seconds to choose).

    Every run: the points that a planted mistake names, then small ones with many pairs of values. A schedule or a rule
    of yours adds points with each pair of values. A slow run has each pair of all values.
    """
    small = [point for point in points() if ranks(**point) <= 4]
    yours = [point for point in small if not {point["schedule"], point["optimizer"]} <= {*SCHEDULES, *OPTIMIZERS}]
    ours = [point for point in small if point not in yours]
    named = [point for point in ours if name(point) in NAMED.split()]
    quick = cover(ours, 1, cover(ours, 2, named)[:QUICK]) + (cover(yours, 2) if yours else [])
    return quick, cover(points(), 2, quick)[len(quick) :] if slow else []


def cover(points, size, chosen=()):
    """Return `chosen` and further points, until these contain each set of `size` values that the points contain."""
    values = dict.fromkeys(value for point in points for value in point.items())
    has = np.array([[point[axis] == value for axis, value in values] for point in points])
    sets = np.stack([has[:, some].all(1) for some in itertools.combinations(range(len(values)), size)], 1)
    rows = [points.index(point) for point in chosen]
    left = sets.any(0) & ~sets[rows].any(0)
    while left.any():
        rows.append(int(sets[:, left].sum(1).argmax()))
        left &= ~sets[rows[-1]]
    return [points[row] for row in rows]


# --- schedules alone --------------------------------------------------------------------------------------------------

COST = {"F": 1.0, "B": 2.1, "I": 1.2, "W": 0.9}


def all_of_them(stages, microbatches):
    """Yield (name, p, m, chunks) for each schedule and each of these sizes that the schedule accepts."""
    for name, p, m in itertools.product(schedules.SCHEDULES, stages, microbatches):
        for chunks in (2, 3) if name == "interleaved" else [schedules.usual_chunks(name)]:
            with contextlib.suppress(UserError):
                schedules.SCHEDULES[name](p, m, chunks)
                yield name, p, m, chunks
