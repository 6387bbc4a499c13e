"""Compare copies: several ranks keep the same numbers, which must be equal bit for bit (--check_replicas=N).

A defective memory, a lost update or a wrong kernel can make copies differ. Without this comparison the run continues
with wrong weights, and prints no error. These copies exist:

    tensors                                                       copies on
    parameters, ZeRO stages 0 to 2                                dp ranks
    master weights and moments, stage 0                           dp ranks
    parameters, master weights, moments, and shards of these      holders of a bucket (the tied word table)
    all of them, if the parameter is replicated over tp           tp ranks

Each rank computes a sum S (`fingerprint`) of each parameter, master weight and moment. One all_reduce on each axis
gives max(S) and max(~S) = ~min(S). All copies are equal if max(S) = min(S). The all_reduce sends 16 bytes for each sum.
The ledger counts these bytes as "setup", because a comparison is not a part of a step.
"""

import math
from typing import NamedTuple

import torch

from errors import UserError
from parallel.comm import agree, all_reduce, gather_objects
from parallel.layout import ALIGN

BLOCK = 1 << 17  # words of 8 bytes that are multiplied at once


class Row(NamedTuple):
    """One tensor that this rank keeps: the part of a parameter, master weight or moment that it stores."""

    name: str  # in the message
    axes: list  # the axes on which all ranks have a copy
    flat: torch.Tensor  # [n], with the alignment padding


def rows(zero):
    """Return the Rows of this rank. Ranks with copies of a bucket have its Rows in the same order."""
    found, mesh = [], zero.mesh
    for _, bucket in sorted(zero.buckets.items()):  # holders need the same order
        whole, own = bucket.layout.pieces(0, bucket.size), bucket.pieces
        kinds = [("", bucket.param, whole, True) if bucket.stage < 3 else ("", bucket.own_param, own, False)]
        if bucket.own_param is not bucket.master:
            kinds.append((" (master weight)", bucket.master, own, bucket.stage == 0))
        kinds += [(f" (moment {k})", moment, own, bucket.stage == 0) for k, moment in enumerate(bucket.moments)]
        for kind, flat, pieces, on_dp in kinds:
            for piece in pieces:
                axes = [bucket.holders] + [mesh.dp] * on_dp + [mesh.tp] * (piece.spec.tp_dim is None)
                count = math.ceil((piece.end - piece.begin) / ALIGN) * ALIGN
                found.append(Row(piece.spec.name + kind, axes, flat[piece.at : piece.at + count]))
    return found


def fingerprint(flat):
    """Return the sum S of a tensor [n] (a multiple of 8 bytes), int64 [], computed on its device.

    S adds the words of 8 bytes mod 2^64, each multiplied by an odd number that depends on its place. A change of one
    word always changes S, because an odd number has an inverse mod 2^64.
    """
    odd = torch.arange(1, 2 * BLOCK, 2, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for row, words in enumerate(flat.view(torch.int64).split(BLOCK)):
        total += (2 * row + 1) * (words * odd[: len(words)]).sum()
    return total


def check(zero, iteration):
    """Raise UserError on all ranks if two copies differ. Every rank of the mesh calls this between two steps."""
    found = differences(zero)

    def refuse():
        if found:
            raise UserError(f"after iteration {iteration} copies differ: {found[0]}; nothing is saved")

    agree(zero.mesh.world, UserError, refuse)


@torch.no_grad()
def differences(zero):
    """Return a text for each tensor of this rank whose copies differ. Every rank of the mesh calls this."""
    found, texts = rows(zero), []
    zero.mesh.ledger.phase = "setup"
    zero.finish_gathers()
    sums = torch.stack([fingerprint(row.flat).to(zero.device) for row in found])
    axes = {axis.ranks: axis for row in found for axis in row.axes}
    for ranks, axis in sorted(axes.items()):  # the same order on all ranks; otherwise they would wait for ever
        numbers = [i for i, row in enumerate(found) if ranks in [axis.ranks for axis in row.axes]]
        texts += _compared(axis, numbers, found, sums)
    return texts


def _compared(axis, numbers, found, sums):
    """Return a text for each of the Rows `numbers` whose copies differ: "NAME: ranks [0, 1] and ranks [2]"."""
    mine = sums[numbers]
    high, low = all_reduce(torch.stack([mine, ~mine]), axis, "replicas", op="max").wait()
    texts = []
    for i in (high != ~low).nonzero().flatten().tolist():
        groups = {}
        for rank, total in zip(axis.ranks, gather_objects(mine[i].item(), axis), strict=True):
            groups.setdefault(total, []).append(rank)
        texts.append(f"{found[numbers[i]].name}: {' and '.join(f'ranks {ranks}' for ranks in groups.values())}")
    return texts
