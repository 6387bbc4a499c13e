"""Tests of a reader's changes to the model, the loss and the loop: the rows of GUIDE.md's table.

A change is right on every layout: it trains what the same change trains on one process (`testing/tiny.py`).
"""

import contextlib
import functools
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import train
from accounts.test_ledger import counted
from errors import UserError
from model import GPT, Block, Head, LayerNorm
from parallel.tensor import ColumnParallelLinear, ParamSpec
from recovery import checkpoint
from test_model import plain_gpt
from testing import tiny
from testing.compare import same_tensor
from testing.tiny import built, check_layout, configured, fails, first_step, one_process, tiny_batches, tiny_config

LAYOUTS = [  # (processes, fields)
    (2, dict(tp=2)),
    (2, dict(tp=2, sequence_parallel=True, recompute="full")),
    (2, dict(zero=1)),
    (2, dict(zero=3)),
    (2, dict(pp=2, schedule="zb-h1")),
    (2, dict(cp=2, context="ring")),
    (2, dict(cp=2, context="ulysses")),
    (6, dict(tp=2, zero=2)),
]


def changed(change, function, *arguments):
    """Call a function on a rank, with a change of CHANGES."""
    with CHANGES[change](), mock.patch.object(tiny, "CURVES", {}):
        return function(*arguments)


def check_change(workers, change, ranks, **fields):
    """Compare a layout with one process, both with the change."""
    data_ranks = ranks // fields.get("tp", 1) // fields.get("pp", 1)
    config = tiny_config(data_ranks // fields.get("cp", 1), **fields)

    def on_ranks(function, *arguments):
        return workers.run(ranks, changed, change, function, *arguments)

    changed(change, check_layout, [config], on_ranks)


# --- the model --------------------------------------------------------------------------------------------------------


class NormalizedQueries(ColumnParallelLinear):
    """qkv with an RMSNorm of each head of q. All heads have one weight, and a tp rank sees only its own heads."""

    def __init__(self, qkv, c, **fields):
        super().__init__(qkv.weight.name.removesuffix(".weight"), qkv.weight.shape, qkv.weight.std, qkv.tp, False)
        self.enter, self.ops = qkv.enter, qkv.ops
        self.norm = ParamSpec(f"{self.weight.bucket}.q_norm", (c.head_size,), mean=1.0, **fields)

    def forward(self, x):
        q, k, v = super().forward(x)
        heads = q.view(len(q), -1, *self.norm.shape)
        return F.rms_norm(heads, heads.shape[-1:], self.norm, 1e-5).view_as(q), k, v


@contextlib.contextmanager
def another_block(change):
    """change(block, configuration): the last lines of `Block.__init__`."""
    build = Block.__init__

    def changed_init(self, c, *rest):
        build(self, c, *rest)
        change(self, c)

    with mock.patch.object(Block, "__init__", changed_init):
        yield


def normalize_queries(block, c, **fields):
    block.qkv = NormalizedQueries(block.qkv, c, **fields)


@pytest.mark.parametrize("ranks, fields", LAYOUTS, ids=str)
def test_a_replicated_weight_inside_a_pair_has_partial_gradients(workers, ranks, fields):
    check_change(workers, "qk_norm", ranks, optimizer="adamw", **fields)


def test_without_partial_a_run_ends_after_its_first_update(workers, tokens_dir, tmp_path):
    config = configured(tmp_path, tokens_dir, tp=2)
    for said in workers.run(2, changed, "qk_norm without partial", fails, config):
        assert said.startswith("after iteration 1 copies differ: block0.q_norm: ranks [0] and ranks [1] (is it used")
        assert "Then ParamSpec(partial=True)" in said and "\n" not in said
    assert not checkpoint.all_steps(tmp_path)


class GatedLayerNorm(LayerNorm):
    """LayerNorm, times a sigmoid of a matrix product: a matrix that is replicated over tp and does not decay."""

    def forward(self, *arguments):
        z, y = super().forward(*arguments)
        return z, y * (y @ self.gate.T).sigmoid()


def add_gate(block, c):
    """Add the gate, and let the biases of qkv decay."""
    block.ln1 = GatedLayerNorm(f"block{block.index}.ln1", c.hidden_size, block.ops)
    block.ln1.gate = ParamSpec(f"block{block.index}.gate", (c.hidden_size,) * 2, std=0.02, matrix=True)
    block.qkv.bias = replace(block.qkv.bias, decay=True)


@pytest.mark.parametrize("ranks, fields", LAYOUTS, ids=str)
def test_muon_updates_what_a_paramspec_calls_a_matrix(workers, ranks, fields):
    check_change(workers, "gate", ranks, optimizer="muon", **fields)


def test_muons_update_of_a_new_matrix_is_orthogonal():
    config = tiny_config(1, optimizer="muon", lr=1.0, lr_warmup_iters=0, lr_decay_style="constant")
    _, _, before, after = changed("gate", one_process, config, 1)
    step = (after["block0.gate"] - before["block0.gate"]) / (0.2 * config.hidden_size**0.5)
    assert torch.linalg.svdvals(step)[-2] > 0.6  # LayerNorm's y has no mean: one value is 0
    assert (after["block0.qkv.bias"] - before["block0.qkv.bias"]).abs().max() <= 1, "the update is not AdamW's"


# --- freeze -----------------------------------------------------------------------------------------------------------


def frozen_names(name):
    return name.startswith(("word", "embedding", "block0", "block1.qkv", "block1.ln2"))


@contextlib.contextmanager
def frozen():
    """The last lines of `train.build`."""
    build = train.build

    def built(*arguments):
        run = build(*arguments)
        for p in run.model.parameters():
            p.requires_grad_(not frozen_names(p.spec.name))
        return run

    with mock.patch.object(train, "build", built):
        yield


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb", "lars", "muon"])
def test_a_frozen_weight_keeps_its_value_and_is_not_in_the_norm(optimizer):
    config = tiny_config(1, optimizer=optimizer, dtype="fp32")
    whole, part = first_step(config), changed("frozen", first_step, config)
    squares = sum((g**2).sum() for name, (_, _, g) in whole.gradients.items() if not frozen_names(name))
    assert part.norm == pytest.approx(squares.sqrt().item(), rel=1e-5)
    _, _, before, after = changed("frozen", one_process, config, 3)
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == frozen_names(name), name


@pytest.mark.parametrize("ranks, fields", LAYOUTS, ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "lars"])
def test_a_frozen_weight_is_frozen_on_every_layout(workers, ranks, fields, optimizer):
    check_change(workers, "frozen", ranks, optimizer=optimizer, **fields)


# --- the loss ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def squared_losses():
    """A term beside the loss: the last line of `Head.forward`."""
    forward = Head.forward

    def changed_forward(self, x, batch):
        y = forward(self, x, batch)
        return y if batch.targets is None else y + 0.1 * y.square()

    with mock.patch.object(Head, "forward", changed_forward):
        yield


@contextlib.contextmanager
def left_out():
    """No loss for the words below 25: a micro-batch, a data rank, a cp rank have few or many of them."""
    micro_batch = GPT.micro_batch

    def changed_micro_batch(self, ids, targets, *rest):
        return micro_batch(self, ids, targets.where(targets >= 25, -100), *rest)

    with mock.patch.object(GPT, "micro_batch", changed_micro_batch):
        yield


@pytest.mark.parametrize("change", ["squared_losses", "left_out"])
def test_the_changed_loss_and_its_gradients_are_those_of_plain_pytorch(change):
    with CHANGES[change]():
        run = built(tiny_config(1, init_method_std=0.2))
        batches = [*itertools.islice(tiny_batches(run), 3)]
        for _ in range(2):  # the first time, the executor learns that the head computes with its losses
            run.zero.zero_grad()
            loss = run.executor.run(iter(batches), 3, 1 / 3) / 3
        ours = {p.spec.name: p.grad.clone() for p in run.model.parameters()}
        validated = run.executor.evaluate(batches)
    for p in run.model.parameters():
        p.grad = None
    plain = torch.cat([plain_gpt(run, b.ids.view(b.shape), b.targets.view(b.shape)) for b in batches])
    plain = plain + 0.1 * plain.square() if change == "squared_losses" else plain
    assert torch.allclose(torch.cat([*validated.values()]), plain, rtol=1e-12)
    assert (plain == 0).any() == (change == "left_out")
    plain.mean().backward()
    assert torch.allclose(loss, plain.detach().mean(), rtol=1e-12)
    for p in run.model.parameters():
        same_tensor(f"the gradient of {p.spec.name}", ours[p.spec.name], p.grad)


@pytest.mark.parametrize("ranks, fields", LAYOUTS, ids=str)
@pytest.mark.parametrize("change", ["squared_losses", "left_out"])
def test_a_changed_loss_is_right_on_every_layout(workers, ranks, fields, change):
    check_change(workers, change, ranks, **fields)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_ledger_knows_that_forward_computes_the_losses(workers, sequence_parallel):
    config = tiny_config(1, 2, sequence_parallel=sequence_parallel)
    plain, twice = (workers.run(2, changed, change, counted, [config])[0][0] for change in ("none", "squared_losses"))
    assert twice[0] == twice[1], "the formula differs from the bytes"
    rows = "tp", "cross-entropy rows", "all_reduce"
    assert twice[0][rows][0] == 2 * plain[0][rows][0], "another head computes its losses twice, too"


# --- the loop ---------------------------------------------------------------------------------------------------------

READS = {
    "a parameter": lambda p: p.norm(),
    "several parameters": lambda p: torch.stack([p, p]),
    "p.data": lambda p: p.data,
    "p.mT": lambda p: p.mT,
    "p.grad": lambda p: p.grad.norm(),
    "p.grad.data": lambda p: p.grad.data,
}


def read_in_the_loop(config):
    """Read weights and gradients between two steps. Return (what could be read, norms of the whole weights)."""
    run = built(config)
    batches, norms = tiny_batches(run), []
    for _ in range(3):
        train.train_step(run, batches)
        on_the_way = [bucket.gathering for bucket in run.zero.in_order if bucket.gathering and bucket.gathering.work]
        assert bool(on_the_way) == (config.zero in (1, 2)), "publish has lost its overlap"
        found = []
        for name, read in READS.items():
            p = run.model.units[1].qkv.weight
            try:
                read(p)
                found.append(name)
            except UserError as error:
                assert str(error).startswith("block0.qkv.weight"), error
                assert "run.zero.whole_parameters()" in str(error) and "\n" not in str(error)
        assert p.requires_grad and p.shape == (3, 16, 16) and p.numel() == 768, "its size can be read"
        norms.append({p.spec.name: p.norm().item() for p in run.zero.whole_parameters()})
        next(run.zero.whole_parameters())  # a reader who breaks off
    return found, norms


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_loop_reads_whole_weights_or_is_told_how(workers, zero):
    _, right = read_in_the_loop(tiny_config(1))
    for found, norms in workers.run(2, read_in_the_loop, tiny_config(2, zero=zero)):
        assert found == ([] if zero else [*READS])
        for ours, one in zip(norms, right, strict=True):
            assert ours == pytest.approx(one, rel=1e-10)


CHANGES = {
    "none": contextlib.nullcontext,
    "squared_losses": squared_losses,
    "left_out": left_out,
    "qk_norm": lambda: another_block(functools.partial(normalize_queries, partial=True, decay=True)),
    "qk_norm without partial": lambda: another_block(normalize_queries),
    "gate": lambda: another_block(add_gate),
    "frozen": frozen,
}
