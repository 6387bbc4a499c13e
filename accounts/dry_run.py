"""Run one training step of one rank without a GPU and without the other ranks, and compare it with the formulas.

    python plan.py configs/gpt3_175b.py --gpus=1024 --tp=8 --pp=16 --dry_run --rank=5

The dry run runs the program itself: `train.build` and `train.train_step` with the real model, buckets, schedule and
executor. Two replacements make it small:

    tensors on the device "meta"    have a shape and a dtype but no memory, so an operation computes no number
    PyTorch's fake process group    pretends that all ranks exist; a communication returns at once

So the run does everything except compute numbers. comm.py counts each byte that the rank sends, and meter.py counts
each byte that the rank keeps. Both counts must equal the formulas of ledger.py and memory.py. Only with dropout, the
peak may be a little lower (`shared_rows`).

Meta tensors have no numbers, so the dry run replaces four things (`blind`):

    train.PendingStep    copies loss, norm and flags of a step to the host. A dry run copies nothing
    Tensor.cpu, .item    copy numbers to the host. In a dry run `cpu` returns ones, and `item` returns 0
    adamw_               is a fused kernel that meta tensors do not have. `optimizer.adamw` makes the same update
    attention            PyTorch's form for meta tensors keeps [s, s] matrices. A dry run keeps fused attention's bytes

Other optimizers and fp16's loss scale read numbers, and offload keeps bytes on the CPU. A dry run refuses them.
"""

import itertools
import resource
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import config as configuration
import operations
import reference
import train
from accounts import ledger, memory, meter, report
from errors import UserError
from parallel import optimizer, schedules
from parallel.mesh import Mesh

META = torch.device("meta")
REFUSED = {  # field: (the values that a dry run cannot have, why)
    "optimizer": (("sgd", "lamb", "lars"), "its rule reads numbers, but a dry run has none; set adamw"),
    "dtype": (("fp16",), "its loss scale reads numbers, but a dry run has none; set bf16"),
    "offload": ((True,), "a dry run does not count the CPU's memory; set --offload=False"),
    "eval_only": ((True,), "a dry run makes a training step; set --eval_only=False"),
}


class Accounts(NamedTuple):
    """Bytes that one rank sends and keeps in a step, by the dry run and by the formulas."""

    sent: dict  # {(axis, what, operation): (calls, bytes)}
    sent_formula: dict
    kept: dict  # {part of the memory: bytes}
    kept_formula: dict
    shared: int  # bytes by which the dry run's peak may be below the formula: see `shared_rows`


def main(config, gpus, rank):
    """Make a dry run of one step of `rank`, and print its bytes beside the formulas. Exit with code 1 if they differ.

    config: a `config.Config`; gpus: the number of ranks. Raises UserError.
    """
    with started(config, gpus, rank) as run:
        accounts, c, mesh, pp, who = step(run), run.config, run.mesh, run.mesh.pp.rank, f"rank {rank}"
        often = ledger.how_often(run.layout, run.schedule, pp)
        print(
            f"Dry run of {who} of {gpus}: dp {mesh.dp.rank} of {mesh.dp.size}, pp {pp} of {c.pp}, tp {mesh.tp.rank} of "
            f"{c.tp}; {run.model.num_parameters():,} parameters in {c.dtype}; {c.schedule} with "
            f"{run.schedule.microbatches} micro-batches, zero={c.zero}. No number was computed.\n"
        )
        print(report.sent_table(who, accounts.sent_formula, often, accounts.sent), end="\n\n")
        stored, padding = run.layout.stored(pp), run.layout.padding(pp)
        print(report.kept_table(who, accounts.kept_formula, stored, padding, accounts.kept), end="\n\n")
    wrong = differences(accounts)
    print("\n".join(wrong) or "The dry run and the formulas agree.")
    print(f"This process has used at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB.")
    if wrong:
        sys.exit(1)


@contextmanager
def started(config, gpus, rank):
    """Context: yield the `train.Run` of `rank` of `gpus` pretended ranks, on meta tensors. Raises UserError.

    The run has one step, or one call of PipeDream. dtype=auto becomes bf16, as on an A100 and later GPUs. The ramp-up
    of the batch and epochs are ignored.
    """
    if not 0 <= rank < gpus:
        raise UserError(f"--rank={rank}: should be 0 to {gpus - 1}, because --gpus={gpus}")
    for name, (values, why) in REFUSED.items():
        configuration.require(config, name, getattr(config, name) not in values, why)
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    config = replace(config, dtype=dtype, rampup_batch_size="", train_iters=config.updates_per_call, train_epochs=0.0)
    configuration.check(config, gpus)
    ops = SimpleNamespace(**vars(reference) | {"attention": lambda *qkv: Attention.apply(*qkv[:3]), "adamw_": adamw_})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=gpus)
    try:
        with (
            mock.patch.object(operations, "choose", lambda *_: ops),
            mock.patch.object(train, "PendingStep", lambda *_: None),
            mock.patch.object(torch.Tensor, "cpu", lambda x: torch.ones(x.shape, dtype=x.dtype)),
            mock.patch.object(torch.Tensor, "item", lambda _: 0),
        ):
            yield train.build(config, Mesh(config.tp, config.pp), META)
    finally:
        dist.destroy_process_group()


class Attention(torch.autograd.Function):
    """`reference.attention` of meta tensors. q, k, v [b, s, a, d] -> [b, s, a, d].

    Keeps what PyTorch's fused attention keeps: q, k, v, the output, and one number for each row of [s, s] matrices.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        sums = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        ctx.save_for_backward(q, k, v, y, sums)
        return y

    @staticmethod
    def backward(ctx, dy):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def adamw_(weight, gradient, moments, scalars, ranges, *, decay, out=None, **constants):
    """Run `optimizer.adamw` on every range. The values of lr, scale and update have no effect without numbers."""
    for begin, end, decays in ranges:
        w, g, *m = (x[begin:end] for x in (weight, gradient, *moments))
        optimizer.adamw(w, g, m, lr=1.0, scale=1.0, update=1, decay=decay * decays, **constants)
    if out is not None:
        out.copy_(weight)


def step(run):
    """Make one training step of a dry Run, inside `started`. Return its Accounts."""
    c, mesh, rank = run.config, run.mesh, run.mesh.pp.rank
    tokens = torch.empty(c.micro_batch_size, c.seq_length + 1, dtype=torch.int64, device=META)
    samples = torch.empty(c.micro_batch_size, dtype=torch.int64, device=META)
    count = run.schedule.microbatches
    batches = (run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], samples) for _ in range(count))
    with meter.Activations(run.executor) as activations:
        (train.train_call if run.schedule.versions else train.train_step)(run, batches)
    widths = run.zero.dtype.itemsize, run.zero.master_dtype.itemsize
    sizes = memory.sizes(c, *widths, on_cpu=False)
    return Accounts(
        mesh.ledger.per_step(schedules.updates(run.schedule)),
        ledger.predict(run.layout, run.schedule, rank, mesh.dp.rank, *widths),
        meter.model_states(run.zero, run.executor.flats) | activations.rows(),
        memory.predict(run.layout, run.schedule, rank, sizes),
        shared_rows(run.schedule.actions[rank], c, sizes.rows),
    )


def shared_rows(actions, c, rows):
    """Return the bytes by which a run's peak of activations may be below the formula (meter.py explains why).

    Only dropout keeps indices of rows (int64). The formula counts them for each micro-batch and chunk in flight. But
    a rank's chunks share them, and the action I may free them early. actions: the rank's; rows: of a micro-batch.
    """
    kinds, chunks = {action.kind for action in actions}, {action.chunk for action in actions}
    if not c.dropout or (len(chunks) == 1 and not (c.sequence_parallel and "I" in kinds)):
        return 0
    change = {"F": 1, "B": -1, "I": -1}  # other kinds change nothing
    return 8 * rows * max(itertools.accumulate(change.get(action.kind, 0) for action in actions))


def differences(a):
    """Return a line for each row of the Accounts in which the dry run and the formula differ."""
    pairs = [(" ".join(key), a.sent.get(key, 0), a.sent_formula.get(key, 0), 0) for key in a.sent | a.sent_formula]
    pairs += [(what, a.kept[what], size, a.shared * (what == memory.PEAK)) for what, size in a.kept_formula.items()]
    return [
        f"different: {what}: the dry run has {shown(found)}, the formula {shown(formula)}"
        for what, found, formula, most in pairs
        if found != formula and not (most and 0 <= formula - found <= most)
    ]


def shown(count):
    """Return bytes, or (calls, bytes), as text."""
    return f"{shown(count[0])} calls, {shown(count[1])}" if isinstance(count, tuple) else report.number(count)
