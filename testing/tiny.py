"""A tiny model, its configurations and its data. `record.py` trains it on any layout."""

import contextlib
import json
import math
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import train
from accounts.metrics import read_metrics
from config import Config
from data import training_samples
from errors import UserError
from parallel.mesh import Mesh
from parallel.schedules import Action
from parallel.tensor import ParamSpec
from parallel.watch import Tool

CPU = torch.device("cpu")
STEPS = 8
TINY = dict(
    num_layers=2, hidden_size=32, num_attention_heads=8, seq_length=8, vocab_size=100, train_iters=STEPS,
    global_batch_size=24, lr=3e-2, min_lr=1e-3, lr_warmup_iters=2, weight_decay=0.1, adam_eps=1e-6, clip_grad=0.1,
    dtype="fp64",
)  # fmt: skip


CHECKED = [  # the layouts of check.py: each pair of schemes in one of them
    dict(dp=2, zero=3),
    dict(tp=2),
    dict(pp=2, schedule="zb-h1", recompute="full"),
    dict(cp=2),
    dict(cp=2, pp=2, schedule="interleaved", chunks=2, dropout=0.1),
    dict(dp=4, zero=2, zero_copies=2),
    dict(dp=2, tp=2, sequence_parallel=True, zero=3, recompute="full", dropout=0.1),
]


def slow(value):
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)


def few(values, n=1):
    """Return the values of a test. All but the first n are slow."""
    return [value if i < n else slow(value) for i, value in enumerate(values)]


def write_tokens(folder, train=4000, val=700, vocab_size=100, seed=0):
    """Write a data set of random tokens, which a model can learn: a token is often the previous one plus 1."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    counts = {"train": train, "val": val, "test": 300}
    for split, count in counts.items():
        steps = random.choice([1, 1, 1, 2, 7], size=count)
        (steps.cumsum() % vocab_size).astype("<u2").tofile(folder / f"{split}.bin")
    meta = {"tokenizer": "bytes", "vocab_size": vocab_size, "eot_id": vocab_size - 1, "dtype": "uint16"}
    meta |= {"tokens": counts, "documents": dict.fromkeys(counts, 1)}
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


def wait_until(condition):
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "no success within 30 seconds"
        time.sleep(0.001)


# --- one model, many layouts ------------------------------------------------------------------------------------------


def tiny_config(dp, tp=1, **fields):
    fields = {"micro_batch_size": 8 // dp, "tp": tp} | fields  # m = 3 (with dp=3: 4)
    return Config(**TINY | fields)


SAMPLES = 1009  # a prime: samples at any two offsets differ


def tiny_batches(run, reader=None):
    """Yield this rank's micro-batches. Sample g depends on g alone. Most of its ids are the last one plus 1."""
    c = run.config
    dice = torch.randint(0, c.vocab_size, (SAMPLES, c.seq_length + 1), generator=torch.Generator().manual_seed(5))
    table = (dice // 10 - 1).clamp(1).cumsum(1).add(dice[:, :1]) % c.vocab_size
    for numbers in training_samples(0, *(reader or run.mesh.reader), c.micro_batch_size):
        numbers = torch.from_numpy(numbers)
        tokens, numbers = table[numbers % SAMPLES].to(run.device), numbers.to(run.device)
        yield run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], numbers)


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def built(config, mesh=None, device=CPU):
    run = train.build_run(config, mesh or Mesh.of(config), device)
    run.zero.initialize(config.seed)
    return run


# --- one process ------------------------------------------------------------------------------------------------------

EPSILON = 1e-5  # of a finite difference
ROUNDED = "a part is rounded; with `x.to(reference.wide_dtype(x))` instead of `x.float()` it can be compared"


class Changed(UserError):
    """What a reader may have changed on purpose."""


@contextlib.contextmanager
def stirring():
    """Within it no initial weight is 0, so every parameter matters in the first step."""
    initial = ParamSpec.initial
    with mock.patch.object(ParamSpec, "initial", lambda spec, seed: initial(replace(spec, std=spec.std or 0.02), seed)):
        yield


def stirred(config, device=CPU, **fields):
    """Return a run of one process with one sample, whose weights are those of `stirring`."""
    with stirring():
        one = dict(global_batch_size=1, micro_batch_size=1, rampup_batch_size="")
        return built(replace(config, **one | fields), device=device)


def wrong_gradients(run):
    """Compare the gradient along a random direction of each parameter with (loss(w + e v) - loss(w - e v)) / 2e.

    Return "", or the difference. Layouts that share a mistake are equal, so only this sees it. Raises UserError if the
    loss is rounded (small e do not agree with each other, and a larger e agrees with the gradient), and Changed if only
    the loss of a validation is another one.
    """
    batch, wrong = next(tiny_batches(run)), []
    run.zero.zero_grad()
    train = lambda: run.executor.run(iter([batch]), 1, 1.0).item()  # noqa: E731
    trained, repeated, plain = train(), train(), run.executor.evaluate([batch])[0].mean().item()
    if trained != repeated:
        two = f"a micro-batch has two losses, {trained:.8g} and {repeated:.8g}"
        return f"{two}: random numbers (`ops.dropout` is right), or a value that forward keeps?"
    loss, is_plain = train, math.isclose(trained, plain, rel_tol=1e-9)
    if is_plain:  # faster, because it has no backward
        loss = lambda: run.executor.evaluate([batch])[0].mean().item()  # noqa: E731
    params, rounded = [p for p in dict.fromkeys(run.model.parameters()) if p.requires_grad], True
    gradients = [p.grad.clone() / 2 for p in params]  # of two backwards
    for p, gradient in zip(params, gradients, strict=True):
        direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(2), dtype=p.dtype)
        ours = (gradient * direction).sum().item()
        theirs = slope(loss, p, direction, EPSILON)
        bound = 1e-4 * max(1e-2, abs(theirs))
        # A step's error falls with its square. If a smaller step agrees, the loss is strongly curved, and all is right.
        if abs(ours - theirs) <= bound or abs(ours - slope(loss, p, direction, EPSILON / 10)) <= bound:
            continue
        wrong.append(f"{p.spec.name} {ours:.6g} instead of {theirs:.6g}")
        near, far = (
            [slope(loss, p, direction, times * EPSILON) for times in several]
            for several in ((0.25, 0.5, 2), (10, 100, 1000))
        )
        agree = max(abs(theirs - x) for x in near) <= 0.1 * abs(ours - theirs)
        rounded &= not agree and min(abs(ours - x) for x in far) <= 1e-2 * max(2e-3, abs(ours))
    if wrong and rounded:
        raise UserError(ROUNDED)
    if wrong:
        return f"wrong in {len(wrong)} of {len(params)} parameters: {'; '.join(wrong[:3])}"
    if not is_plain:
        raise Changed(f"the loss is {trained:.8g} in training, and {plain:.8g} without gradients (validation)")
    return ""


def slope(loss, p, direction, step):
    """Return (loss(p + step direction) - loss(p - step direction)) / 2 step."""
    losses = []
    for alpha in (step, -2 * step, step):
        p.data.add_(direction, alpha=alpha)
        losses.append(loss())
    return (losses[0] - losses[1]) / (2 * step)


class AfterActions(Tool):
    """Calls a function after each action."""

    def __init__(self, function):
        self.function = function

    @contextlib.contextmanager
    def span(self, phase, subject):
        yield
        if isinstance(subject, Action):
            self.function()


# --- what a step keeps ------------------------------------------------------------------------------------------------


def seen_in_block(run, batches, look):
    """Make a step. Return what `look()` finds in block1's first F."""
    seen, block = [], run.model.units[2]
    block.register_forward_pre_hook(lambda *_: seen.append(look()))
    train.train_step(run, batches)
    return seen[0]


def storages(config):
    """Return which (parameters, gradients) are whole in block1's F and after a step."""
    run = built(config)

    def whole(kind):
        return {name for name, b in run.zero.buckets.items() if getattr(b, kind).whole.untyped_storage().size()}

    def look():
        return whole("param"), whole("grad")

    return seen_in_block(run, tiny_batches(run), look), look()


def waiting_in_block(config):
    """Return the buckets whose gathers run after a step, and in the next step's F of block1."""
    run = built(config)
    batches = tiny_batches(run)
    train.train_step(run, batches)

    def look():
        return [bucket.name for bucket in run.zero.in_order if bucket.gathering and bucket.gathering.work]

    return look(), seen_in_block(run, batches, look)


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


def write_index(folder, index):
    """Write a changed index with its right sum."""
    del index["crc32"]
    text = json.dumps(index, indent=1).removesuffix("\n}")
    (folder / "index.json").write_text(f'{text},\n "crc32": "{zlib.crc32(text.encode()):08x}"\n}}')


def fails(config, change=contextlib.nullcontext):
    """Return the message of a run's UserError, within a change."""
    try:
        with change():
            go(config)
    except UserError as error:
        assert error.agreed, "every rank would print the line"
        return str(error)


def validation_losses(config):
    go(config)
    return list(read_metrics(Path(config.out_dir) / "metrics.jsonl").values())[-1]["validation_loss"]


def refusal(function, *arguments):
    """Return the one line of the UserError that a call raises."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# takes the lock, forks a worker, and waits until stdin is closed
HOLDER = """
import os, sys
from errors import locked
with locked(sys.argv[1], ""):
    if os.fork():
        print("locked", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held_elsewhere(path):
    """A process with a worker holds the lock of the file `path` while the block runs."""
    command, pipes = [sys.executable, "-c", HOLDER, str(path)], dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent, **pipes) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
