"""Tests of a reader's changes to the model, the loss and the loop: the rows of GUIDE.md's table.

A change is right on every layout: it trains what the same change trains on one process (`testing/tiny.py`).
"""

import contextlib
import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import train
from model import Block, LayerNorm
from parallel.tensor import ColumnParallelLinear, ParamSpec
from recovery import checkpoint
from testing import tiny
from testing.tiny import check_layout, configured, fails, first_step, one_process, tiny_config

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


CHANGES = {
    "qk_norm": lambda: another_block(functools.partial(normalize_queries, partial=True, decay=True)),
    "qk_norm without partial": lambda: another_block(normalize_queries),
    "gate": lambda: another_block(add_gate),
    "frozen": frozen,
}
