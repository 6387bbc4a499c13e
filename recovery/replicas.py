"""Compares copies: several ranks keep the same numbers, which must be equal bit for bit.

A run compares after its first update and before each save, and with --check_replicas=N every N
updates. A changed model, a defective memory, a lost update or a wrong kernel can make these copies differ:

    tensors                                                       copies on
    parameters, ZeRO stages 0 to 2                                data ranks
    master weights and moments, stage 0                           data ranks
    ... and all of them with zero_copies=k                        the k data ranks with equal shards
    parameters, master weights, moments, and shards of these      holders of a bucket (the tied word table)
    all of them, if the parameter is replicated over tp           tp ranks
"""

import math

import torch

from errors import agreed
from parallel.comm import all_reduce, gather_objects
from parallel.layout import ALIGN

WORDS_AT_ONCE = 1 << 17  # words that are multiplied at once
ROUNDING = 1e-4  # of a gradient's norm
PARTIAL = (
    " (is it used between the two linears of a pair? Then ParamSpec(partial=True): GUIDE.md, Change the model;"
    " or a sum over tp is missing)"
)
APART = "the ranks have made different numbers of updates: a rank has decided alone, not by numbers that all have"


def fingerprint(flat):
    """Return a sum of a tensor [n] (a multiple of 8 bytes), int64 [].

    Each word of 8 bytes has an odd factor, and an odd number has an inverse mod 2^64. So a change of one word
    changes the sum.
    """
    words = flat.view(torch.int64)
    odd = 2 * torch.arange(min(WORDS_AT_ONCE, len(words)), device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for row, some in enumerate(words.split(WORDS_AT_ONCE)):
        total += (2 * row + 1) * (some * odd[: len(some)]).sum()
    return total


@torch.no_grad()
def fingerprints(zero):
    """Return {(tensor, shard, tp rank, number of copies): sum} of this rank's tensors. Copies have equal keys.

    A rank is None if all ranks of its axis have copies.
    """
    sums = {}
    zero.finish_gathers()
    for bucket in zero.in_order:
        flats = {"": bucket.param.shard if bucket.param.sharded else bucket.param.whole}
        if bucket.param.shard is not bucket.master:
            flats[" (master weight)"] = bucket.master
        flats |= {f" (moment {k})": moment for k, moment in enumerate(bucket.moments)}
        for kind, flat in flats.items():
            sharded = len(flat) < bucket.size
            shard, of_shard = (bucket.shards.rank, 1) if sharded else (None, bucket.shards.size)
            pieces = bucket.pieces if sharded else bucket.layout.pieces(0, bucket.size)
            for piece in (piece for piece in pieces if piece.begin < piece.end):
                tp, of_tp = (None, bucket.tp.size) if piece.spec.tp_dim is None else (bucket.tp.rank, 1)
                copies = bucket.holders.size * bucket.copies.size * of_shard * of_tp
                count = math.ceil((piece.end - piece.begin) / ALIGN) * ALIGN  # with the alignment padding
                sums[piece.spec.name + kind, shard, tp, copies] = fingerprint(flat[piece.at : piece.at + count])
    values = torch.stack([total.to(zero.device) for total in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))


def share_state(zero):
    """Give all copies the mean of each `state`, so that a checkpoint has one value."""
    for bucket in zero.in_order:
        for x in bucket.state:
            all_reduce(x, bucket.copies, "state").wait().div_(bucket.copies.size)


def differing_copies(zero):
    """Return a line for each tensor whose copies differ ("NAME: ranks [0, 1] and ranks [2]") or were not all compared.

    Every rank calls this.
    """
    groups = {}  # {key of `fingerprints`: {sum: ranks}}
    for rank, sums in enumerate(gather_objects(fingerprints(zero), zero.mesh.world)):
        for key, total in sums.items():
            groups.setdefault(key, {}).setdefault(total, []).append(rank)
    lines = []
    for (name, _, tp, copies), ranks in groups.items():
        compared = sum(map(len, ranks.values()))
        if compared != copies:
            lines.append(f"{name}: {compared} copies are compared, but the layout has {copies}")
        elif len(ranks) > 1:
            inside_pair = PARTIAL if tp is None and zero.mesh.tp.size > 1 else ""
            lines.append(f"{name}: {' and '.join(f'ranks {equal}' for equal in ranks.values())}{inside_pair}")
    return lines


def compare_copies(zero, iteration):
    """Raise UserError if copies, or the ranks' numbers of updates, differ. Every rank calls this between two steps.

    First `share_state`.
    """
    share_state(zero)
    if len({*gather_objects(zero.updates.item(), zero.mesh.world)}) > 1:
        raise agreed(f"up to iteration {iteration} {APART}; nothing is saved")
    for names in gather_objects([name for name, distance in zero.unequal if distance > ROUNDING], zero.mesh.world):
        if names:
            text = f"up to iteration {iteration} gradients of {names[0]} that should be equal on all tp ranks differ"
            raise agreed(f"{text}{PARTIAL}; nothing is saved")
    if differing := differing_copies(zero):
        raise agreed(f"after iteration {iteration} copies differ: {differing[0]}; nothing is saved")
