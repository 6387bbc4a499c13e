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

import contextlib
import itertools
import resource
import sys
import time
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

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
    start = time.perf_counter()
    with started(config, gpus, rank) as run:
        accounts = step(run)
        print(tables(run, accounts))
    wrong = differences(accounts)
    below = accounts.kept_formula[memory.PEAK] - accounts.kept[memory.PEAK]
    if below and not wrong:
        print(f"The peak of activations is {report.number(below)} bytes below the formula: see accounts/meter.py.")
    print("\n".join(wrong) if wrong else "The dry run and the formulas agree.")
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{time.perf_counter() - start:.1f} s; this process has used at most {kilobytes / 1024:.0f} MiB")
    if wrong:
        sys.exit(1)


@contextlib.contextmanager
def started(config, gpus, rank):
    """Context: yield the `train.Run` of `rank` of `gpus` pretended ranks, on meta tensors. Raises UserError."""
    config = checked(config, gpus, rank)
    if dist.is_initialized():
        raise UserError("a dry run pretends all ranks in one process; start it without torchrun")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=gpus)
    try:
        with blind():
            yield train.build(config, Mesh(config.tp, config.pp), META)
    finally:
        dist.destroy_process_group()


def checked(config, gpus, rank):
    """Return the configuration of the dry run: one step, or one call of PipeDream. Raises UserError.

    dtype=auto becomes bf16, as on an A100 and later GPUs. The ramp-up of the batch and epochs are ignored.
    """
    if not 0 <= rank < gpus:
        raise UserError(f"--rank={rank}: should be 0 to {gpus - 1}, because --gpus={gpus}")
    reasons = {
        "optimizer": (config.optimizer != "adamw", "its rule reads numbers, but a dry run has none; set adamw"),
        "dtype": (config.dtype == "fp16", "its loss scale reads numbers, but a dry run has none; set bf16"),
        "offload": (config.offload, "a dry run does not count the CPU's memory; set --offload=False"),
        "eval_only": (config.eval_only, "a dry run makes a training step; set --eval_only=False"),
    }
    for name, (refused, why) in reasons.items():
        configuration.require(config, name, not refused, why)
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    config = replace(config, dtype=dtype, rampup_batch_size="", train_iters=config.updates_per_call, train_epochs=0.0)
    configuration.check(config, gpus)
    return config


@contextlib.contextmanager
def blind():
    """Context: the program uses operations for meta tensors, and copies no number of a step to the host."""
    ops = SimpleNamespace(**vars(reference) | {"attention": lambda *qkv: Attention.apply(*qkv[:3]), "adamw_": adamw_})
    before = operations.choose, train.PendingStep, torch.Tensor.cpu, torch.Tensor.item
    operations.choose, train.PendingStep = (lambda *_: ops), (lambda *_: None)
    torch.Tensor.cpu = lambda numbers: torch.ones(numbers.shape, dtype=numbers.dtype)
    torch.Tensor.item = lambda number: 0
    try:
        yield
    finally:
        operations.choose, train.PendingStep, torch.Tensor.cpu, torch.Tensor.item = before


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
    c, mesh = run.config, run.mesh
    tokens = torch.empty(c.micro_batch_size, c.seq_length + 1, dtype=torch.int64, device=META)
    samples = torch.empty(c.micro_batch_size, dtype=torch.int64, device=META)
    count = run.schedule.microbatches
    batches = (run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], samples) for _ in range(count))
    with meter.Activations(run.executor) as activations:
        (train.train_call if run.schedule.versions else train.train_step)(run, batches)
    rank, widths = mesh.pp.rank, (run.zero.dtype.itemsize, run.zero.master_dtype.itemsize)
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
    lines = []
    for key in sorted(a.sent.keys() | a.sent_formula.keys()):
        found, formula = (table.get(key, (0, 0)) for table in (a.sent, a.sent_formula))
        if found != formula:
            (calls, count), (formula_calls, formula_count) = found, formula
            lines.append(
                f"{' '.join(key)}: the dry run sends {report.number(count)} bytes in {calls} calls, "
                f"the formula has {report.number(formula_count)} bytes in {formula_calls} calls"
            )
    for what, formula in a.kept_formula.items():
        if not 0 <= formula - a.kept[what] <= (a.shared if what == memory.PEAK else 0):
            lines.append(
                f"{what}: the dry run keeps {report.number(a.kept[what])} bytes, "
                f"the formula has {report.number(formula)} bytes"
            )
    return [f"different: {line}" for line in lines]


def tables(run, a):
    """Return a dry Run's Accounts as tables (text). Column "bytes" is the dry run, column "formula" the prediction."""
    c, mesh, rank = run.config, run.mesh, run.mesh.pp.rank
    m = Fraction(run.schedule.microbatches, schedules.updates(run.schedule))
    widths = (run.zero.dtype.itemsize, run.zero.master_dtype.itemsize)
    often = ledger.how_often(run.layout, run.schedule, rank)
    who = f"rank {mesh.rank}"
    return (
        "\n\n".join(
            [
                f"Dry run of {who} of {mesh.world.size}: dp {mesh.dp.rank} of {mesh.dp.size}, pp {rank} of {c.pp}, "
                f"tp {mesh.tp.rank} of {c.tp}; {run.model.num_parameters():,} parameters in {c.dtype}; "
                f"{c.schedule} with {run.schedule.microbatches} micro-batches, zero={c.zero}. No number was computed.",
                report.sent_table(who, a.sent_formula, often, a.sent)
                + "\n"
                + report.zeros_line(a.sent, run.layout, rank, *widths, m),
                report.kept_table(who, a.kept_formula, run.layout.stored(rank), run.layout.padding(rank), a.kept),
            ]
        )
        + "\n"
    )
