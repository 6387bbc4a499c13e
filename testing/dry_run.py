"""Run one training step of one rank without a GPU and without the other ranks, and compare it with the formulas.

    python -m testing.dry_run configs/tiny.py --ranks=8 --tp=2 --pp=2 --dtype=fp32

prints what rank 0 sends and keeps: measured, beside the formulas. It runs `train.build_run` and `train.train_step` on
tensors of the device "meta", which have a shape and a dtype but no memory, and in PyTorch's fake process group, whose
communication returns at once. The bytes that comm.py and meter.py count must equal the formulas of ledger.py and
memory.py.

Meta tensors have no numbers, so the dry run replaces four things:

    train.PendingStep    copies loss, norm and flags of a step to the host: nothing is copied
    Tensor.cpu, .item    copy numbers to the host: `cpu` returns ones, `item` returns 0
    adamw_               is a fused kernel that meta tensors do not have: nothing is updated
    attention            PyTorch's choice for meta tensors keeps [s, s] matrices: the fused one is taken

So LAMB, LARS, fp16's loss scale and float64 attention, which read numbers, have no dry run.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import config as configuration
import operations
import train
from accounts import meta, meter, report, traffic
from errors import exit_on_user_error
from parallel.mesh import Mesh


@contextmanager
def started(config, gpus, rank):
    """Context: yield the `train.Run` of `rank` of `gpus` pretended ranks, on meta tensors. dtype=auto becomes bf16."""
    config = replace(config, dtype="bf16" if config.dtype == "auto" else config.dtype)
    configuration.check(config, gpus)
    ops = SimpleNamespace(**vars(meta.OPS) | {"adamw_": lambda *_, **__: None})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=gpus)
    try:
        with (
            mock.patch("parallel.mesh._set_pg_timeout"),  # no rank waits
            mock.patch.object(operations, "choose", lambda *_: ops),
            mock.patch.object(train, "PendingStep", lambda *_: None),
            mock.patch.object(torch.Tensor, "cpu", lambda x: torch.ones(x.shape, dtype=x.dtype)),
            mock.patch.object(torch.Tensor, "item", lambda _: 0),
        ):
            yield train.build_run(config, Mesh.of(config), meta.META)
    finally:
        dist.destroy_process_group()


def step(run):
    """Make one training step of a dry Run. Return `report.measured`: tables of the bytes sent, and kept."""
    c = run.config
    tokens = torch.empty(c.micro_batch_size, c.seq_length + 1, dtype=torch.int64, device=meta.META)
    batch = tokens[:, :-1], tokens[:, 1:], torch.empty_like(tokens[:, 0])
    batches = (run.model.micro_batch(*batch) for _ in range(run.executor.training_schedule.microbatches))
    with meter.Activations(run.executor) as activations:
        train.train_step(run, batches)
    return report.measured(run, activations)


def main():
    """Print the groups and the tables of rank 0."""
    config, ranks = traffic.parsed("testing.dry_run")
    with started(config, ranks, 0) as run:
        (sent, bytes_kept), who, layout = step(run), "rank 0, measured", run.layout
        tables = report.sent_table(who, layout, sent), report.kept_table(who, layout, 0, bytes_kept)
        print(traffic.groups(layout), *tables, sep="\n\n")


if __name__ == "__main__":
    exit_on_user_error(main)
