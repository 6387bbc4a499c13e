"""The mesh: the coordinates of each process on the axes dp, pp and tp (slide "3-D Parallelism").

The tp index changes fastest, then pp, then dp:

    rank = (dp_rank * pp + pp_rank) * tp + tp_rank            dp = 2, pp = 1, tp = 4:   dp 0 | 0 1 2 3
                                                                                      dp 1 | 4 5 6 7
                                                                                             ------- tp

Ranks with neighbouring numbers are on one node. So tp, which communicates most, gets the fastest
connections, the pipeline those inside a rack, and data parallelism those between racks. With
order=pp-dp-tp, as in Megatron-LM, dp lies inside pp.

With context parallelism, cp ranks (next to tp) share each sample. Their parameters are equal, as
over dp. So the *data ranks*, which sum gradients, are the dp cp ranks of the axis `data`.

NCCL runs the communications of a process group one after another. So some axes have a group of
their own, though another axis has the same ranks: messages to lower ranks (`Mesh.pp_to_lower`), sums
of ZeRO-3 (`Zero.shards_for_sums`), and cp, because attention waits for it.
"""

import functools
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from parallel.comm import group_options
from parallel.watch import Watch


@dataclass(frozen=True)
class Axis:
    """The ranks along one axis."""

    name: str  # data, shards, copies, pp, cp, tp, world, or holders (pipeline ranks with equal weights)
    ranks: tuple  # the members, as ranks of torch.distributed
    rank: int  # this process's index in `ranks`
    watch: Watch
    group: object = None  # torch's process group, if the axis has several ranks

    @property
    def size(self):
        return len(self.ranks)

    @functools.cached_property
    def waited(self):
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
        return f"rank {self.ranks[self.rank]} waited for ranks {others}"


def grid(world, tp, pp, cp, order):
    """Return all ranks in an array [dp, pp, cp, tp]: a rank's coordinates are its indices."""
    ranks = np.arange(world)
    if order == "pp-dp-tp":
        return ranks.reshape(pp, -1, cp, tp).swapaxes(0, 1)
    return ranks.reshape(-1, pp, cp, tp)


class Mesh:
    """The axes of this process. timeout: seconds. reader: (i, n): this rank reads every n-th micro-batch from i on.

    Mesh, `holders`, `cut_data` and `second` make groups: all their ranks must call these at the same
    point of the program.
    """

    def __init__(self, tp=1, pp=1, cp=1, timeout=600.0, order="dp-pp-tp"):
        """Make the process groups of this rank."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        ranks = grid(size, tp, pp, cp, order)
        dp_rank, pp_rank, cp_rank, tp_rank = (int(i) for i in np.argwhere(ranks == rank)[0])
        self.reader = dp_rank, len(ranks)
        self.rank = rank
        self.watch, self.timeout, self._groups = Watch(), timedelta(seconds=timeout), {}
        if size > 1:
            self._groups[tuple(range(size)), 0] = dist.group.WORLD
            _set_pg_timeout(self.timeout, dist.group.WORLD)
        self.world = self._axis("world", range(size), rank)
        self.data = self._axis("data", ranks[:, pp_rank, :, tp_rank].flatten(), dp_rank * cp + cp_rank)
        self.pp = self._axis("pp", ranks[dp_rank, :, cp_rank, tp_rank], pp_rank)
        self.pp_to_lower = self.second(self.pp)
        self.cp = self._axis("cp", ranks[dp_rank, pp_rank, :, tp_rank], cp_rank, 2)  # `second` makes number 1
        self.tp = self._axis("tp", ranks[dp_rank, pp_rank, cp_rank, :], tp_rank)

    @classmethod
    def of(cls, c):
        return cls(c.tp, c.pp, c.cp, c.comm_timeout, c.order)

    def holders(self, pp_ranks):
        """Return the axis of the pipeline ranks `pp_ranks` (ascending)."""
        ranks = [self.pp.ranks[i] for i in pp_ranks]
        return self._axis("holders", ranks, pp_ranks.index(self.pp.rank))

    def cut_data(self, shards):
        """Cut the data ranks into groups of `shards` consecutive ranks. Return two axes of this rank.

        The first is this rank's group. The second has one rank of each group: that with this rank's index.
        """
        groups = np.array(self.data.ranks).reshape(-1, shards)
        group, index = divmod(self.data.rank, shards)
        names = ("data", "data") if 1 in groups.shape else ("shards", "copies")
        return self._axis(names[0], groups[group], index), self._axis(names[1], groups[:, index], group)

    def second(self, axis):
        """Return an axis with the same ranks and a process group of its own."""
        return self._axis(axis.name, axis.ranks, axis.rank, 1)

    def _axis(self, name, ranks, index, number=0):
        """Return an Axis. Two axes with the same ranks and number share a process group."""
        ranks = tuple(int(r) for r in ranks)
        if len(ranks) == 1:
            return Axis(name, ranks, index, self.watch)
        options = group_options(dist.get_backend(), self.timeout)
        if (ranks, number) not in self._groups:
            # Only the members make a group, after equally many others: the number is in its name.
            self._groups[ranks, number] = dist.new_group(
                ranks, timeout=self.timeout, pg_options=options, use_local_synchronization=True
            )
        group = self._groups[ranks, number]
        if options and name != "pp":  # connect the ranks now (pp: `pipeline.connect`)
            dist.barrier(group, device_ids=[torch.cuda.current_device()])
        return Axis(name, ranks, index, self.watch, group)


def everyone():
    """Return the axis of all processes, before the mesh exists."""
    if not dist.is_initialized():
        return Axis("world", (0,), 0, Watch())
    ranks = tuple(range(dist.get_world_size()))
    return Axis("world", ranks, dist.get_rank(), Watch(), dist.group.WORLD)
