"""The mesh: the place of each process on the axes dp, pp and tp (slide "3-D Parallelism").

The tp index changes fastest, then pp, then dp:

    rank = (dp_rank * pp + pp_rank) * tp + tp_rank          dp = 2, pp = 1, tp = 4:   dp 0 | 0 1 2 3
                                                                                      dp 1 | 4 5 6 7
                                                                                             ------- tp

Ranks with neighbouring numbers are on one node. So tp, which communicates most, gets the fastest connections, the
pipeline those inside a rack, and data parallelism those between racks. With order=pp-dp-tp, as in Megatron-LM, dp lies
inside pp: rank = (pp_rank * dp + dp_rank) * tp + tp_rank. On many GPUs this is usually faster.

With context parallelism, cp ranks share each sample. They lie next to tp. They have equal parameters, so the axis dp
contains them.

A rank is in one process group per axis. Axes with the same ranks share a group. NCCL runs the collectives of a group,
and the messages between two ranks, one after another. So two axes have a second group: pp for messages to lower ranks
(`Mesh.back`), dp for the sums of gradients in ZeRO-3.
"""

import functools
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from parallel.comm import Ledger, group_options


@dataclass(frozen=True)
class Axis:
    """The ranks along one axis."""

    name: str  # dp, pp, cp, tp, world (all ranks), or holders (pipeline ranks with the same parameters)
    ranks: tuple  # the members, as ranks of torch.distributed
    rank: int  # this process's index in `ranks`
    ledger: Ledger
    group: object = None  # torch's process group, if the axis has several ranks

    @property
    def size(self):
        return len(self.ranks)

    @functools.cached_property
    def waited(self):
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
        return f"rank {self.ranks[self.rank]} waited for ranks {others}"


class Mesh:
    """The axes dp, pp, cp, tp and world of this process. timeout: in seconds; order: as in config.py.

    reader: (i, n): this rank reads every n-th micro-batch from number i on.
    All ranks of a group must make it at the same point of the program (in Mesh, `holders`, `second`).
    """

    def __init__(self, tp=1, pp=1, cp=1, timeout=600.0, order="dp-pp-tp"):
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        grid = np.arange(size).reshape(size // (pp * cp * tp), pp, cp, tp)
        if order == "pp-dp-tp":
            grid = np.arange(size).reshape(pp, -1, cp, tp).swapaxes(0, 1)
        group, pp_rank, cp_rank, tp_rank = (int(i) for i in np.argwhere(grid == rank)[0])
        self.reader = group, len(grid)
        self.rank = rank
        self.ledger, self.timeout, self._groups = Ledger(), timedelta(seconds=timeout), {}
        if size > 1:
            self._groups[tuple(range(size)), 0] = dist.group.WORLD
            if dist.get_backend() != "fake":  # a dry run, where no rank waits
                _set_pg_timeout(self.timeout, dist.group.WORLD)
        self.world = self._axis("world", range(size), rank)
        self.dp = self._axis("dp", grid[:, pp_rank, :, tp_rank].flatten(), group * cp + cp_rank)
        self.pp = self._axis("pp", grid[group, :, cp_rank, tp_rank], pp_rank)
        self.back = self.second(self.pp)
        self.cp = self._axis("cp", grid[group, pp_rank, :, tp_rank], cp_rank)
        self.tp = self._axis("tp", grid[group, pp_rank, cp_rank, :], tp_rank)

    @classmethod
    def of(cls, c):
        return cls(c.tp, c.pp, c.cp, c.comm_timeout, c.order)

    def holders(self, pp_ranks):
        """Return the axis of the pipeline ranks `pp_ranks` (ascending, with this rank), which keep the same bucket."""
        return self._axis("holders", [self.pp.ranks[i] for i in pp_ranks], pp_ranks.index(self.pp.rank))

    def second(self, axis):
        return self._axis(axis.name, axis.ranks, axis.rank, 1)

    def _axis(self, name, ranks, index, number=0):
        ranks = tuple(int(r) for r in ranks)
        if len(ranks) == 1:
            return Axis(name, ranks, index, self.ledger)
        options = group_options(dist.get_backend(), self.timeout)
        if (ranks, number) not in self._groups:
            # Only the members make a group. All must have made equally many before: the group's name has the number.
            more = dict(timeout=self.timeout, pg_options=options, use_local_synchronization=True)
            self._groups[ranks, number] = dist.new_group(ranks, **more)
        group = self._groups[ranks, number]
        if options and name != "pp":  # connects the ranks now, not in a step (pp: `pipeline.connect`)
            dist.barrier(group, device_ids=[torch.cuda.current_device()])
        return Axis(name, ranks, index, self.ledger, group)


def everyone():
    """Return the axis of all processes, before the mesh exists."""
    if not dist.is_initialized():
        return Axis("world", (0,), 0, Ledger())
    return Axis("world", tuple(range(dist.get_world_size())), dist.get_rank(), Ledger(), dist.group.WORLD)
