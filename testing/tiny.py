"""Train a tiny model on any layout, and compare it with one process."""

import contextlib
import functools
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from accounts.metrics import read_metrics
from config import Config, layout_of
from data import training_samples
from errors import UserError
from model import GPT
from parallel.comm import all_gather
from parallel.mesh import Mesh
from parallel.schedules import Action
from parallel.watch import Tool
from recovery import replicas
from testing.compare import FirstStep, differences

CPU = torch.device("cpu")
STEPS = 8
FEW = 2  # steps of most runs
TINY = dict(
    num_layers=2, hidden_size=32, num_attention_heads=8, seq_length=8, vocab_size=100, train_iters=STEPS,
    global_batch_size=24, lr=3e-2, min_lr=1e-3, lr_warmup_iters=2, weight_decay=0.1, adam_eps=1e-6, clip_grad=0.1,
    dtype="fp64",
)  # fmt: skip


# (dp, tp, sequence parallel): dp * tp = 2, 4 or 8; with dp=3 shards need padding
LAYOUTS = [
    (dp, tp, sp)
    for dp, tp in [(2, 1), (1, 2), (3, 1), (4, 1), (2, 2), (1, 4), (3, 2), (8, 1), (4, 2), (2, 4), (1, 8)]
    for sp in (False, True)
    if tp > 1 or not sp
]
CHECKED = [  # the layouts of check.py: each pair of schemes in one of them
    dict(dp=2, zero=3),
    dict(tp=2),
    dict(pp=2, schedule="zb-h1", recompute="full"),
    dict(cp=2),
    dict(cp=2, pp=2, schedule="interleaved", chunks=2, dropout=0.1),
    dict(dp=4, zero=2, zero_copies=2),
    dict(dp=2, tp=2, sequence_parallel=True, zero=3, recompute="full", dropout=0.1),
]
CURVES = {}  # of one process


def write_tokens(folder, train=4000, val=700, test=300, vocab_size=100, tokenizer="bytes", seed=0):
    """Write a data set of random tokens, which a model can learn: a token is often the previous one plus 1."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    counts = {"train": train, "val": val, "test": test}
    for split, count in counts.items():
        steps = random.choice([1, 1, 1, 2, 7], size=count)
        (steps.cumsum() % vocab_size).astype("<u2").tofile(folder / f"{split}.bin")
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eot_id": vocab_size - 1, "dtype": "uint16"}
    meta |= {"tokens": counts, "documents": dict.fromkeys(counts, 1)}
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


# --- one model, many layouts ------------------------------------------------------------------------------------------


def tiny_config(dp, tp=1, **fields):
    fields = {"micro_batch_size": 8 // dp, "tp": tp} | fields  # m = 3 (with dp=3: 4)
    return Config(**TINY | fields)


def tiny_batches(run, vocab_size=None, reader=None):
    """Yield this rank's micro-batches. Sample g depends on g alone. Most of its ids are the last one plus 1."""
    c = run.config
    vocab_size = vocab_size or c.vocab_size
    dice = torch.randint(0, vocab_size, (1000, c.seq_length + 1), generator=torch.Generator().manual_seed(5))
    table = (dice // 10 - 1).clamp(1).cumsum(1).add(dice[:, :1]) % vocab_size
    for numbers in training_samples(0, *(reader or run.mesh.reader), c.micro_batch_size):
        numbers = torch.from_numpy(numbers)
        tokens = table[numbers % len(table)]
        yield run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], numbers)


def parameters(run):
    """Return copies, {parameter: this rank's tp slice}."""
    return {p.spec.name: p.detach().clone() for p in run.zero.whole_parameters()}


def gradients(run):
    """Return copies, {parameter: (begin, end, values)}, of the elements that this rank updates."""
    pieces = [(bucket, piece) for bucket in run.zero.buckets.values() for piece in bucket.pieces]
    return {p.spec.name: (p.begin, p.end, p.of(bucket.grad.shard).clone()) for bucket, p in pieces}


def built(config, mesh=None):
    run = train.build_run(config, mesh or Mesh.of(config), torch.device("cpu"))
    run.zero.initialize(config.seed)
    return run


# --- one process ------------------------------------------------------------------------------------------------------

EPSILON = 1e-5  # of a finite difference


def stirred(config, **fields):
    """Return a run of one process with one sample. No parameter is 0, so every gradient matters."""
    run = built(replace(config, global_batch_size=1, micro_batch_size=1, **fields))
    dice = torch.Generator().manual_seed(1)
    for p in run.model.parameters():
        p.data.add_(0.02 * torch.randn(p.shape, generator=dice, dtype=p.dtype))
    return run


def wrong_gradients(run):
    """Compare the gradient along a random direction of each parameter with (loss(w + e v) - loss(w - e v)) / 2e.

    Return "", or the difference. Layouts that share a mistake are equal, so only this sees it.
    """
    batch, wrong = next(tiny_batches(run)), []
    trained, repeated = (run.executor.run(iter([batch]), 1, 1.0).item() for _ in range(2))
    loss = lambda: run.executor.evaluate([batch])[0].mean().item()  # noqa: E731
    if trained != repeated:
        return f"a micro-batch has two losses, {trained:.8g} and {repeated:.8g}: random numbers? `ops.dropout` is right"
    if not math.isclose(trained, plain := loss(), rel_tol=1e-9):
        return f"the loss is {trained:.8g} in training, and {plain:.8g} without gradients (validation)"
    params = [p for p in dict.fromkeys(run.model.parameters()) if p.requires_grad]
    for p in params:
        direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(2), dtype=p.dtype)
        losses = []
        for step in (EPSILON, -2 * EPSILON, EPSILON):
            p.data.add_(direction, alpha=step)
            losses.append(loss())
        ours = (p.grad * direction).sum().item() / 2  # of two backwards
        theirs = (losses[0] - losses[1]) / (2 * EPSILON)
        if not abs(ours - theirs) <= 1e-4 * max(1e-2, abs(theirs)):
            wrong.append(f"{p.spec.name} {ours:.6g} instead of {theirs:.6g}")
    return f"wrong in {len(wrong)} of {len(params)} parameters: {'; '.join(wrong[:3])}" if wrong else ""


# --- a layout ---------------------------------------------------------------------------------------------------------


def train_tiny(config, steps=STEPS, mesh=None):
    """Train on this rank. Return (losses, gradient norms, parameters before, parameters after)."""
    return trained(config, steps, mesh)[:4]


def trained(config, steps=STEPS, mesh=None):
    """Return what `train_tiny` returns, then the copies that differ (`replicas.differing_copies`)."""
    run = built(config, mesh)
    before, batches = parameters(run), tiny_batches(run)
    done = [train.train_step(run, batches).read() for _ in range(steps)]
    copies = replicas.differing_copies(run.zero)
    return [s.loss for s in done], [s.grad_norm for s in done], before, parameters(run), copies


def train_each(configs, steps=FEW):
    """Call `trained` with each configuration, on one mesh."""
    mesh = Mesh.of(configs[0])
    return [trained(config, steps, mesh) for config in configs]


def one_process_config(config):
    """Return the same training on one process, with one micro-batch a step."""
    return replace(config, micro_batch_size=config.global_batch_size, **layout_of(Config()))


def one_process(config, steps=FEW):
    """Return `train_tiny` of `one_process_config`."""
    one = one_process_config(config)
    key = steps, *vars(one).values()
    if key not in CURVES:
        CURVES[key] = train_tiny(one, steps)
    return CURVES[key]


def assert_same_model(results, reference, config, specs, first_step=None):
    """Fail unless every rank's run is that of one process. Arguments: `testing.compare.differences`."""
    assert all(norm > config.clip_grad for norm in reference[1]), "clipping must change every step"
    message = differences(results, reference, config, specs, first_step)
    if message:
        pytest.fail(message, pytrace=False)
    assert not any(result[4:] != ([],) for result in results), (
        f"copies differ, a sum or its `wait` is missing: {[result[4:] for result in results]}"
    )


def check_layout(configs, on_ranks, steps=FEW):
    """Train with each configuration, on one mesh. Compare each run with one process.

    on_ranks(function, *arguments) returns the function's results of all ranks.
    """
    by_rank = on_ranks(train_each, configs, steps)
    for config, results in zip(configs, zip(*by_rank, strict=True), strict=True):
        again = functools.partial(first_steps, on_ranks, config)
        assert_same_model(results, one_process(config, steps), config, specs(config), again)


def specs(config):
    return GPT(config, Mesh().tp).specs()


class AfterActions(Tool):
    """Calls a function after each action."""

    def __init__(self, function):
        self.function = function

    @contextlib.contextmanager
    def span(self, phase, subject):
        yield
        if isinstance(subject, Action):
            self.function()


# --- after a failure: the first step, with its gradients --------------------------------------------------------------


def first_step(config):
    """Run the first step on this rank, and copy its gradients before the update."""
    run, found = built(config), {}
    update = run.zero.update

    def keep_gradients(scalars):
        found.update(gradients(run))
        update(scalars)

    run.zero.update = keep_gradients
    step = train.train_step(run, tiny_batches(run)).read()
    return FirstStep(step.loss, step.grad_norm, found, parameters(run))


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


def outputs(config):
    """Run a step on this rank. Return {(module, k): (its rows of the batch, its k-th output)}, in the order of forward.

    Only the first micro-batch counts.
    """
    run, found, current = built(config), {}, []

    def begin(unit, arguments):
        rows = arguments[1].rows
        current[:] = rows, all_gather(rows, run.mesh.tp, "rows").wait() if config.sequence_parallel else rows

    def keep(name, result):
        for k, x in enumerate(result if isinstance(result, tuple) else (result,)):
            rows = next((rows for rows in current if len(rows) == len(x)), None)
            if rows is not None and x.dim() == 2:
                found.setdefault((name, k), (rows.clone(), x.detach().clone()))

    names = ["embedding", *(f"block{i}" for i in range(config.num_layers)), "head"]
    for unit, name in zip(run.model.units, names, strict=True):
        unit.register_forward_pre_hook(begin)
        for inner, module in unit.named_modules():
            full = f"{name}.{inner}".rstrip(".")
            module.register_forward_hook(lambda _, __, result, full=full: keep(full, result))
    train.train_step(run, tiny_batches(run)).read()
    return found


def place(ranks, one, tp):
    """Return a line: the first module whose output differs from one process's. ranks, one: results of `outputs`."""
    right = "the ids"
    for key, (rows, whole) in one.items():
        for rank, (mine, x) in ((rank, found[key]) for rank, found in enumerate(ranks) if key in found):
            theirs = whole[torch.searchsorted(rows, mine)]
            theirs = theirs.chunk(tp, 1)[rank % tp] if x.shape[1] < theirs.shape[1] else theirs
            if x.shape == theirs.shape and not torch.allclose(x, theirs, rtol=1e-9, atol=1e-11):
                worst = (x - theirs).abs().max() / theirs.abs().max()
                return f"Forward is right up to {right}, and first differs in {key[0]} (rank {rank}: by {worst:.0e})."
        right = key[0]
    return ""


def first_steps(on_ranks, config):
    """Run the first step again, for the fields of `compare.Case`: on the ranks, on one process, each micro-batch alone,
    without dropout, and for the place where a forward differs.
    """
    steps, one = on_ranks(first_step, config), one_process_config(config)
    dp, whole = len(steps) // (config.tp * config.cp * config.pp), replace(config, dropout=0.0)
    losses = [step.loss for step in on_ranks(first_step, whole)] if config.dropout else [math.nan]
    dropout_only = losses == pytest.approx([first_step(one_process_config(whole)).loss] * len(losses), rel=1e-10)
    where = place(on_ranks(outputs, config), outputs(one), config.tp)
    return steps, first_step(one), gradient_of_each_micro_batch(one, config, dp), dropout_only, where


# --- points of a grid -------------------------------------------------------------------------------------------------


def covering(points, chosen=()):
    """Choose points until these and `chosen` contain every pair of values."""
    table = pairs_of([*chosen, *points])
    left, table, more = ~table[: len(chosen)].any(0), table[len(chosen) :], []
    while left.any():
        best = table[:, left].sum(1).argmax()
        left &= ~table[best]
        more.append(points[best])
    return more


def pairs_of(points):
    """Return which pairs of values the points contain, bool [points, pairs]."""
    codes = [np.unique([str(point[axis]) for point in points], return_inverse=True)[1] for axis in points[0]]
    numbers = [a * (b.max() + 1) + b for a, b in itertools.combinations(codes, 2)]
    return np.concatenate([number[:, None] == np.unique(number) for number in numbers], 1)


# --- whole runs, with files -------------------------------------------------------------------------------------------


def configured(out_dir, tokens_dir, **fields):
    """Return the Config of a whole run of ten updates, with dropout, that logs each of them."""
    usual = dict(micro_batch_size=2, global_batch_size=12, dropout=0.1, lr_decay_iters=10, train_iters=10)
    usual |= dict(data_dir=tokens_dir, out_dir=str(out_dir), log_interval=1, eval_iters=1)
    return Config(**TINY | usual | fields)


def go(config):
    train.run_training(config, Mesh.of(config), CPU)


def curve(out_dir):
    rows = read_metrics(Path(out_dir) / "metrics.jsonl")
    fields = "lm_loss", "grad_norm", "lr", "loss_scale", "consumed_samples"
    return [[row[field] for field in fields] for row in rows.values()]


def tensor_files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "index.json"}


def fails(config):
    try:
        go(config)
    except UserError as error:
        assert error.agreed, "every rank would print the line"
        return str(error)


def validation_losses(config):
    go(config)
    return list(read_metrics(Path(config.out_dir) / "metrics.jsonl").values())[-1]["validation_loss"]
