"""Train a tiny model on a layout with all instruments on, and compare it with one process.

    records = workers.run(4, record, tiny_config(2, 2))    a `Record` of each rank
    check_layout(workers, 4, tiny_config(2, 2))            fails unless the layout trains the model of one process, its
                                                           bytes are those of the formulas, and no order can deadlock

With ADVERSARY=1 each rank runs under `testing/adversary.py`. A *change* is a context in which the model differs.
Two other programs run a layout in their own ways: `testing/dry_run.py` (one rank without its peers) and `bench/`
(without instruments).
"""

import contextlib
import io
import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train
from accounts import memory, meta, meter, report
from config import Config, layout_of, rampup
from parallel.comm import all_gather
from parallel.mesh import Mesh
from parallel.watch import Tool
from recovery import replicas
from testing import adversary
from testing.compare import Different, differences, same_rows
from testing.tiny import CPU, built, stirred, stirring, tiny_batches

STEPS = 2
UNCHANGED = contextlib.nullcontext
LEFT, GRAPHS = "kept after the last step", "sent tensors with a graph (`detach` before `send`), 1 each"


class Record(NamedTuple):
    """A run of one rank. A table is a pair ({row: number} as measured, the same by the formulas)."""

    config: Config
    specs: dict  # {parameter: ParamSpec} of the whole model
    losses: list  # of each step
    norms: list  # of the gradients of each step
    before: dict  # {parameter: this rank's tp slice}
    after: dict  # the same after the last step
    copies: list  # those that differ then (`replicas.differing_copies`)
    gradients: dict  # of step 1 (`gradients`)
    sent: tuple | None  # a table: {(axis, what, operation): (calls, bytes)} of a step; None: not asked for
    kept: tuple | None  # a table: {what: bytes} of the model states and of the activations; None: not asked for
    calls: list  # [Call], in their order
    outputs: dict | None  # of the modules in step 1 (`Outputs`); None: not asked for
    batches: list = ()  # MicroBatches of training, of `record_loop` on the first stage

    loss = property(lambda self: self.losses[0])
    norm = property(lambda self: self.norms[0])


class Call(NamedTuple):
    """A communication that this rank has started. All its ranks make an equal Call."""

    operation: str
    what: str
    group: str
    ranks: tuple  # of a message: (source, destination)
    elements: int
    dtype: torch.dtype


class Calls(Tool):
    """Lists this rank's communications, and counts sent tensors that keep the graph of their forward."""

    def __init__(self):
        self.made, self.graphs = [], 0

    def started(self, pending, phase, axis, what, operation, peer):
        ranks, x = axis.ranks, pending.result
        if peer is not None:
            ranks = (axis.ranks[axis.rank], peer) if operation == "send" else (peer, axis.ranks[axis.rank])
            self.graphs += operation == "send" and x.grad_fn is not None
            operation, what = "message", ""  # the receiver does not know what arrives
        self.made.append(Call(operation, what, axis.group.group_name, tuple(ranks), x.numel(), x.dtype))


class Outputs(Tool):
    """Keeps {(module, k): (its rows of the batch, its k-th output)} of the first micro-batch, in forward's order."""

    def __init__(self, run):
        self.run, self.found, self.rows = run, {}, []
        blocks = [f"block{i}" for i in range(run.config.num_layers)]
        for unit, name in zip(run.model.units, ["embedding", *blocks, "head"], strict=True):
            unit.register_forward_pre_hook(self.begin)
            for inner, module in unit.named_modules():
                module.register_forward_hook(partial(self.keep, f"{name}.{inner}".rstrip(".")))

    def begin(self, unit, arguments):
        rows, tp = arguments[1].rows, self.run.mesh.tp
        self.rows = [rows, all_gather(rows, tp, "rows").wait() if self.run.config.sequence_parallel else rows]
        self.found.setdefault(("the ids", 0), (self.rows[1], arguments[1].ids[:, None]))

    def keep(self, name, module, arguments, result):
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 3:  # a rank has its columns of q, of k and of v
            result = result.chunk(len(weight), 1)
        for k, x in enumerate(result if isinstance(result, tuple) else (result,)):
            rows = next((rows for rows in self.rows if len(rows) == len(x)), None)
            if rows is not None and x.dim() == 2:
                self.found.setdefault((name, k), (rows.clone(), x.detach().clone()))


# --- on one rank ------------------------------------------------------------------------------------------------------


def parameters(run):
    """Return copies, {parameter: this rank's tp slice}."""
    return {p.spec.name: p.detach().clone() for p in run.zero.whole_parameters()}


def gradients(run):
    """Return copies, {parameter: (begin, end, values)}, of the elements that this rank updates."""
    pieces = [(bucket, piece) for bucket in run.zero.buckets.values() for piece in bucket.pieces]
    return {p.spec.name: (p.begin, p.end, p.of(bucket.grad.shard).clone()) for bucket, p in pieces}


def record(config, steps=STEPS, change=UNCHANGED, mesh=None, outputs=False):
    """Train on this rank within the context `change()`. Return its Record."""
    with change():
        if change is not UNCHANGED:
            meta.cached_work.cache_clear()  # it remembers the model without the change
        run = built(config, mesh)
        batches = tiny_batches(run)
        found = recorded(run, lambda: [train.train_step(run, batches) for _ in range(steps)], outputs)
    if change is not UNCHANGED:
        meta.cached_work.cache_clear()
    return found


def record_loop(config):
    """Return the Record of `train.run_training` on this rank, within `stirring`. Its model may have no formulas."""
    records, batches, loop = [], [], train.train

    def keep_batch(unit, arguments):
        if torch.is_grad_enabled():  # not in a validation
            batches.append(arguments[1])

    def recording(run, *rest):
        run.model.units[0].register_forward_pre_hook(keep_batch)
        record = recorded(run, lambda: loop(run, *rest), tables=False)
        records.append(record._replace(batches=batches))

    with (
        stirring(),
        mock.patch.object(train, "train", recording),
        mock.patch.object(replicas, "compare_copies", lambda *_: None),  # the Record has the copies
        contextlib.redirect_stdout(io.StringIO()),
    ):
        train.run_training(config, Mesh.of(config), CPU)
    return records[0]


def recorded(run, loop, outputs=False, tables=True):
    """Call `loop()`, which trains `run`. Return its Record."""
    steps, first, calls, before = [], {}, Calls(), parameters(run)
    update, step = run.zero.update, train.train_step
    modules = Outputs(run) if outputs else None
    run.mesh.watch.ledger.rows.clear()  # of an earlier run on this mesh

    def keep_step(*arguments):
        steps.append(step(*arguments))
        return steps[-1]

    def keep_gradients(scalars):
        first.update(first or gradients(run))
        update(scalars)

    run.mesh.watch.tools.append(calls)
    with (
        meter.Activations(run.executor) if tables else contextlib.nullcontext() as activations,
        mock.patch.object(run.zero, "update", keep_gradients),
        mock.patch.object(train, "train_step", keep_step),
    ):
        loop()
    run.mesh.watch.tools.remove(calls)
    steps = [pending.read() for pending in steps]
    losses, norms = [s.loss for s in steps], [s.grad_norm for s in steps]
    sent, kept = tables_of(run, activations, calls.graphs) if tables else (None, None)
    copies, after = replicas.differing_copies(run.zero), parameters(run)
    found = modules and modules.found
    model = run.config, run.model.specs()
    return Record(*model, losses, norms, before, after, copies, first, sent, kept, calls.made, found)


def tables_of(run, activations, graphs):
    """Return the tables `sent` and `kept` of a Record."""
    sent, kept = report.measured(run, activations)
    kept["bytes"] |= {LEFT: len(activations.saved) + len(list(meter.kept_by(run.executor))), GRAPHS: graphs}
    kept["formula"] |= {LEFT: 0, GRAPHS: 0}
    # The adversary decides at random when a message has left.
    unknown = kept["formula"][memory.PEAK] is None or dist.isend is not adversary.isend
    left_out = {memory.PEAK, memory.RECOMPUTED} if unknown else ()
    tables = [{what: n for what, n in table.items() if what not in left_out} for table in kept.values()]
    return tuple(sent.values()), tuple(tables)


# --- one process ------------------------------------------------------------------------------------------------------


def one_step(c, scale=1.0, skips=0, **fields):
    """Return the Record of a step of one process, after some steps that overflow, and so change nothing."""
    run = stirred(c, **fields)
    for _ in range(skips):
        run.loss_scale.scale = math.inf
        train.train_step(run, tiny_batches(run))
    run.loss_scale.scale, batches = scale, tiny_batches(run)
    return recorded(run, lambda: train.train_step(run, batches), tables=False)


def different(ours, right):
    """Return the names of what differs between two Records."""
    pairs = {"loss": (ours.losses, right.losses), "gradient norm": (ours.norms, right.norms)}
    pairs |= {name: (ours.after[name], after) for name, after in right.after.items()}
    return [name for name, pair in pairs.items() if not np.allclose(*pair, rtol=1e-10, atol=1e-12)]


# --- on all ranks -----------------------------------------------------------------------------------------------------

OF_ONE = {}  # {(steps, change, configuration): the Record of one process}


def one_process_config(config):
    """Return the same training on one process, with one micro-batch in the first step."""
    return replace(config, micro_batch_size=rampup(config)[0], **layout_of(Config()))


def one_process(workers, config, steps=STEPS, change=UNCHANGED):
    """Return the Record of `one_process_config`. Layouts share it."""
    one = one_process_config(config)
    key = steps, change, *vars(one).values()
    if key not in OF_ONE:
        (OF_ONE[key],) = workers.run(1, record, one, steps, change)
    return OF_ONE[key]


def record_each(configs, steps, change):
    """Return [(a Record, one of a step in bf16)] of this rank, on one mesh. In float64 all numbers have one width."""
    mesh, found = Mesh.of(configs[0]), []
    for config in configs:
        wide = record(config, steps, change, mesh)  # first: only its nan can name its call (testing/adversary.py)
        narrow = record(replace(config, dtype="bf16"), 1, mesh=mesh) if change is UNCHANGED else None
        found.append((wide, narrow))
    return found


def check_layout(workers, ranks, *configs, change=UNCHANGED, steps=STEPS):
    """Train each configuration on `ranks` processes, and fail unless all that this file's first lines name is right.

    Within a change the bytes are not compared: the formulas are those of the model without it.
    """
    of_ranks = workers.run(ranks, record_each, configs, steps, change)
    for config, pairs in zip(configs, zip(*of_ranks, strict=True), strict=True):
        records, narrow = zip(*pairs, strict=True)
        with change():
            again = partial(first_step, workers, ranks, config, change)
            check_model(records, one_process(workers, config, steps, change), again)
        check_order(records)
        if change is UNCHANGED:
            check_bytes(records)
            check_bytes(narrow)


def check_model(records, one, again=None):
    """Fail unless the records of all ranks train the model of one process. again: see `compare.differences`."""
    assert all(norm > one.config.clip_grad for norm in one.norms), "clipping must change every step"
    if message := differences(records, one, again):
        pytest.fail(message, pytrace=False)
    copies = [record.copies for record in records]
    assert not any(copies), f"copies differ, a sum or its `wait` is missing: {copies}"


def named(config):
    """Return the fields that differ from the usual ones, as `tp=2 zero=3`."""
    usual = vars(Config())
    return " ".join(f"{name}={value}" for name, value in vars(config).items() if value != usual[name])


def check_bytes(records):
    """Fail unless the bytes sent and kept by each rank are those of the formulas."""
    for rank, record in enumerate(records):
        measured, formulas = (sent | kept for sent, kept in zip(record.sent, record.kept, strict=True))
        same_rows(f"rank {rank}, {named(record.config)}", measured, formulas)


def check_order(records):
    """Fail unless the ranks pass all their calls if each call blocks a rank until its peers come."""
    if stuck := waiting([record.calls for record in records]):
        text = "if each call blocks its rank until its peers come, ranks wait for ever"
        raise Different(f"{named(records[0].config)}: {text}: {stuck}")


def waiting(calls):
    """Let every rank run, where each call blocks it until its peers come. Return {rank: the Call that never ends}.

    NCCL may block the host so in the first step: a kernel's first launch may wait for all work of the GPU.
    """
    left, moved = [of_rank[::-1] for of_rank in calls], True
    while moved:
        moved = False
        for mine in left:
            while mine and all(left[rank][-1:] == mine[-1:] for rank in mine[-1].ranks):
                for rank in mine[-1].ranks:
                    left[rank].pop()
                moved = True
    return {rank: mine[-1] for rank, mine in enumerate(left) if mine}


# --- after a failure: the first step again ----------------------------------------------------------------------------


def first_step(workers, ranks, config, change=UNCHANGED):
    """Run the first step again, for the fields of `compare.Case`: on the ranks, on one process, each micro-batch alone,
    without dropout, and for the place where a forward differs. The caller is within the change.
    """
    records, (one,) = (
        workers.run(n, record, c, 1, change, None, True) for n, c in ((ranks, config), (1, one_process_config(config)))
    )
    dropout_only, whole = False, replace(config, dropout=0.0)
    if config.dropout:
        right = one_process(workers, whole, 1, change)
        right = pytest.approx((right.loss, right.norm), rel=1e-10)
        dropout_only = all((r.loss, r.norm) == right for r in workers.run(ranks, record, whole, 1, change))
    shares = gradient_of_each_micro_batch(one.config, config, ranks // (config.tp * config.cp * config.pp))
    return records, one, shares, dropout_only, place(records, one, config.tp)


def gradient_of_each_micro_batch(one, config, dp):
    """Return {(data rank, micro-batch): {parameter: gradient}}, whose sum is the step's gradient."""
    m, size = config.global_batch_size // (config.micro_batch_size * dp), config.micro_batch_size
    run, shares = built(replace(one, micro_batch_size=size, global_batch_size=size)), {}
    for d in range(dp):
        batches = tiny_batches(run, reader=(d, dp))
        for j in range(m):
            run.zero.zero_grad()
            run.executor.run(batches, 1, 1 / (m * dp))
            shares[d, j] = {name: values for name, (_, _, values) in gradients(run).items()}
    return shares


def place(records, one, tp):
    """Return a line: the first module whose output differs from one process's."""
    right = "the ids"
    for key, (rows, whole) in one.outputs.items():
        for rank, (mine, x) in ((rank, r.outputs[key]) for rank, r in enumerate(records) if key in r.outputs):
            if not torch.isin(mine, rows).all():
                return ""  # this rank reads other samples
            theirs = whole[torch.searchsorted(rows, mine)]
            theirs = theirs.chunk(tp, 1)[rank % tp] if x.shape[1] < theirs.shape[1] else theirs
            if key[0] == "the ids" and not torch.equal(x, theirs):
                return f"The ids of rank {rank} and their `rows` do not belong together: look at the positions."
            if x.shape == theirs.shape and not torch.allclose(x, theirs, rtol=1e-9, atol=1e-11):
                worst = (x - theirs).abs().max() / theirs.abs().max()
                return f"Forward is right up to {right}, and first differs in {key[0]} (rank {rank}: by {worst:.0e})."
        right = key[0]
    return ""
