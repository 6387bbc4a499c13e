"""Tests of a reader's changes to the model, the loss and the loop: the rows of GUIDE.md's table.

A change is right on every layout: it trains what the same change trains on one process (`testing/record.py`).
"""

import contextlib
import itertools
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import model
import reference
import train
from bench.plain import Plain
from errors import UserError
from model import MLP, Block, Head, LayerNorm
from operations import choose
from parallel.optimizer import RULES, Rule
from parallel.tensor import ColumnParallelLinear, ParamSpec, enter_pair, leave_pair
from parallel.units import Model, check_losses, freeze
from recovery import checkpoint
from testing.compare import same_tensor
from testing.record import check_layout, one_step, record
from testing.tiny import built, configured, fails, few, refusal, tiny_batches, tiny_config

LAYOUTS = [  # (processes, fields)
    (2, dict(tp=2)),
    (2, dict(tp=2, sequence_parallel=True, recompute="full")),
    (2, dict(zero=1)),
    (2, dict(zero=3)),
    (2, dict(pp=2, schedule="zb-h1")),
    (2, dict(cp=2)),
    (6, dict(tp=2, zero=2)),
]


def check_change(workers, change, ranks, **fields):
    """Compare a layout with one process, both with the change."""
    data_ranks = ranks // fields.get("tp", 1) // fields.get("pp", 1)
    config = tiny_config(data_ranks // fields.get("cp", 1), **fields)
    check_layout(workers, ranks, config, change=CHANGES[change])


EVERYWHERE = [  # (of CHANGES, fields)
    ("qk_norm", dict(optimizer="adamw")),  # a replicated weight inside a pair has partial gradients
    ("gate", dict(optimizer="muon")),  # Muon updates what a ParamSpec calls a matrix
    ("experts", {}),  # cut over tp without a linear
    ("window", {}),  # all kinds of attention share one mask
    ("dropout", dict(dropout=0.2)),  # equal masks at a new site
    ("frozen", dict(optimizer="adamw")),
    ("frozen", dict(optimizer="lars")),
    *((loss, {}) for loss in ("squared_losses", "left_out", "smoothing")),
]


@pytest.mark.parametrize("ranks, fields", few(LAYOUTS, 2), ids=str)
@pytest.mark.parametrize("change, more", EVERYWHERE, ids=str)
def test_a_change_is_right_on_every_layout(workers, change, more, ranks, fields):
    check_change(workers, change, ranks, **more, **fields)


# --- the model --------------------------------------------------------------------------------------------------------


class NormalizedQueries(ColumnParallelLinear):
    """qkv with an RMSNorm of each head of q. All heads have one weight, and a tp rank sees only its own heads."""

    def __init__(self, qkv, c, **fields):
        super().__init__(qkv.weight.name.removesuffix(".weight"), qkv.weight.shape, qkv.weight.std, c, qkv.tp)
        self.norm = ParamSpec(f"{self.weight.bucket}.q_norm", (c.head_size,), mean=1.0, **fields)

    def forward(self, x):
        q, k, v = super().forward(x).chunk(3, 1)
        heads = q.view(len(q), -1, *self.norm.shape)
        return torch.cat([F.rms_norm(heads, heads.shape[-1:], self.norm, 1e-5).flatten(1), k, v], 1)


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


ENDS = {
    2: "after iteration 1 copies differ: block0.q_norm: ranks [0] and ranks [1] (is it used",
    6: "up to iteration 1 gradients of block0 that should be equal on all tp ranks differ (is it used",
}


@pytest.mark.parametrize("ranks", ENDS)
def test_without_partial_a_run_ends_after_its_first_update(workers, tokens_dir, tmp_path, ranks):
    """With more than two data ranks, all tp ranks take the first one's gradient: their copies are equal, and wrong."""
    config = configured(tmp_path, tokens_dir, tp=2)
    for said in workers.run(ranks, fails, config, CHANGES["qk_norm without partial"]):
        assert said.startswith(ENDS[ranks])
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


def test_muons_update_of_a_new_matrix_is_orthogonal():
    config = tiny_config(1, optimizer="muon", lr=1.0, lr_warmup_iters=0, lr_decay_style="constant")
    one = record(config, 1, CHANGES["gate"])
    step = (one.after["block0.gate"] - one.before["block0.gate"]) / (0.2 * config.hidden_size**0.5)
    assert torch.linalg.svdvals(step)[-2] > 0.6  # LayerNorm's y has no mean: one value is 0
    assert (one.after["block0.qkv.bias"] - one.before["block0.qkv.bias"]).abs().max() <= 1, "the update is not AdamW's"


class Experts(nn.Module):
    """Eight experts, cut over tp, in the place of the MLP: a pair without linears. Each has a sigmoid as its gate."""

    bias = None

    def __init__(self, c, name, tp):
        super().__init__()
        matrices = (8, c.hidden_size, c.hidden_size), 0, True, 0.1
        self.up, self.down = ParamSpec(f"{name}.up", *matrices), ParamSpec(f"{name}.down", *matrices)
        self.gate = ParamSpec(f"{name}.gate", (8, c.hidden_size), 0, std=0.1)
        self.c, self.tp = c, tp

    def forward(self, x, batch):
        x = enter_pair(x, self.c, self.tp)
        y = torch.einsum("nh,efh->nef", x, self.up).relu() * (x @ self.gate.T).sigmoid()[:, :, None]
        return leave_pair(torch.einsum("nef,ehf->nh", y, self.down), self.c, self.tp)


def add_experts(block, c):
    block.mlp = Experts(c, f"block{block.index}", block.qkv.tp)


@contextlib.contextmanager
def bounded():
    """A block ends in tanh, whose backward reads its result."""
    forward = Block.forward
    with mock.patch.object(Block, "forward", lambda block, x, batch: forward(block, x, batch).tanh()):
        yield


def test_a_sent_result_stays_if_the_last_operation_keeps_it(workers):
    check_change(workers, "bounded", 2, pp=2, schedule="gpipe")


@contextlib.contextmanager
def window():
    """A query sees 3 keys."""
    with mock.patch.object(reference, "visible", lambda i, j: (j <= i) & (j > i - 3)):
        reference.is_causal.cache_clear()
        yield
    reference.is_causal.cache_clear()


def test_a_window_is_that_of_a_written_out_softmax():
    q, k, v = torch.randn(3, 2, 8, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = torch.einsum("biad,bjad->baij", q, k) / 5**0.5
    seen = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)
    right = torch.einsum("baij,bjad->biad", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    with window():
        assert torch.allclose(reference.attention(q, k, v), right, rtol=1e-12)
        cache, parts = [], [x.split(1, 1) for x in (q, k, v)]
        steps = [reference.attention(*one, cache) for one in zip(*parts, strict=True)]
        assert torch.allclose(torch.cat(steps, 1), right, rtol=1e-12), "the cache ignores the window"


def test_a_window_is_not_given_to_the_causal_kernel():
    pytest.importorskip("triton")
    config = tiny_config(1, kernels="triton", dtype="fp32")
    with mock.patch.dict("os.environ", TRITON_INTERPRET="1"):
        assert choose(config, torch.device("cpu"), "fp32").attention is not reference.attention
        with window():
            assert choose(config, torch.device("cpu"), "fp32").attention is reference.attention


@pytest.mark.parametrize("keys", [128, 90_000, None])
def test_a_window_in_a_long_sample_is_a_mask(monkeypatch, keys):
    """The answer needs no memory of s^2: 131,072 tokens would take 17 GB."""
    window = (lambda i, j: (j <= i) & (j > i - keys)) if keys else reference.visible
    monkeypatch.setattr(reference, "visible", window)
    assert reference.is_causal.__wrapped__(1 << 17) == (keys is None)


@contextlib.contextmanager
def dropout():
    """Dropout at the end of the MLP."""
    forward = MLP.forward

    def changed_forward(self, x, batch):
        y = forward(self, x, batch)
        return reference.dropout(y, batch.drop(1, site=1000))

    with mock.patch.object(MLP, "forward", changed_forward):
        yield


# --- freeze -----------------------------------------------------------------------------------------------------------


def frozen_names(name):
    return name.startswith(("word", "embedding", "block0", "block1.qkv", "block1.ln2"))


@contextlib.contextmanager
def frozen():
    """The last lines of `units`."""
    build = model.units

    def changed_units(*arguments):
        units = build(*arguments)
        embedding, first, second = units[:3]
        for part in (embedding, first, second.qkv, second.ln2):
            freeze(part)
        return units

    with mock.patch.object(model, "units", changed_units):
        yield


def test_a_table_that_is_tied_by_its_paramspec_is_frozen_in_both_places():
    embedding, *_, head = Model(tiny_config(1), tp=None).units
    head.table = embedding.word.weight
    freeze(embedding)
    assert head.table.frozen and embedding.position.frozen and not head.norm.weight.frozen


def test_a_weight_that_is_frozen_too_late_is_refused():
    run = built(tiny_config(1))
    run.model.units[1].qkv.weight.requires_grad_(False)
    said = refusal(train.train_step, run, tiny_batches(run))
    assert said == "block0.qkv.weight: freeze it in `units`, by `units.freeze`, not by requires_grad_"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb", "lars", "muon"])
def test_a_frozen_weight_keeps_its_value_and_is_not_in_the_norm(optimizer):
    config = tiny_config(1, optimizer=optimizer, dtype="fp32")
    whole, part = record(config), record(config, 3, frozen)
    squares = sum((g**2).sum() for name, (_, _, g) in whole.gradients.items() if not frozen_names(name))
    assert part.norm == pytest.approx(squares.sqrt().item(), rel=1e-5)
    for name, weight in part.after.items():
        assert torch.equal(weight, part.before[name]) == frozen_names(name), name


@contextlib.contextmanager
def own_heads():
    """A rank takes the mean over its own heads away from the output of attention."""
    attention = reference.attention

    def changed_attention(*arguments):
        y = attention(*arguments)
        return y - y.mean(2, keepdim=True)

    with mock.patch.object(reference, "attention", changed_attention):
        yield


def test_a_wrong_forward_is_named_with_its_place(workers):
    """Outputs of a row parallel linear are compared, and a rank's columns of a column parallel linear."""
    with pytest.raises(
        pytest.fail.Exception, match=r"right up to block0\.qkv, and first differs in block0\.proj \(rank 0"
    ):
        check_change(workers, "own_heads", 2, tp=2)


# --- the loss ---------------------------------------------------------------------------------------------------------


def squared(losses):
    return losses + 0.1 * losses.square()


def doubled(losses):
    return losses.mul_(2)


TERMS = {"squared_losses": squared, "doubled_in_place": doubled}


@contextlib.contextmanager
def computed_with(term):
    """term(losses): in the last line of `Head.forward`."""
    forward = Head.forward

    def changed_forward(self, x, batch):
        y = forward(self, x, batch)
        return y if batch.targets is None else term(y)

    with mock.patch.multiple(Head, forward=changed_forward, reads_losses=True):
        yield


def test_a_head_that_computes_with_its_losses_must_say_so():
    with computed_with(squared), mock.patch.object(Head, "reads_losses", False):
        said = refusal(one_step, tiny_config(1))
    assert said.endswith("set reads_losses = True in the head's class: then forward computes them")
    y = torch.ones(2, requires_grad=True) + 1
    assert refusal(check_losses, None, y, mock.Mock(targets=y)) == said, "a class without the attribute"


def test_a_head_may_return_a_view_of_its_losses():
    with computed_with(lambda losses: losses.view(2, -1).flatten()), mock.patch.object(Head, "reads_losses", False):
        assert math.isfinite(one_step(tiny_config(1)).loss)


def test_losses_without_a_gradient_are_refused():
    with computed_with(torch.detach):
        said = refusal(one_step, tiny_config(1))
    assert said == "the head's losses have no gradient: does it use detach, .data or torch.no_grad?"


def smoothed_cross_entropy_(logits, targets, columns, weights=None, reduce=None):
    """Label smoothing: 0.9 of the target's loss, and 0.1 of the mean over the losses of all words."""
    reduce = reduce or (lambda x, op: x)
    real = torch.arange(logits.shape[1]) < columns
    z = logits.where(real, -torch.inf)
    top = reduce(z.amax(1), "max")
    totals = torch.stack([(z - top[:, None]).exp().sum(1), logits.where(real, 0.0).sum(1), real.sum().expand(len(z))])
    total, all_logits, words = reduce(totals, "sum")
    log_total = total.log() + top
    losses = reference.cross_entropy_(logits, targets, columns, weights, reduce)
    losses = 0.9 * losses + 0.1 * (log_total - all_logits / words)
    if weights is not None:
        softmax = (z - log_total[:, None]).exp()
        logits.mul_(0.9).add_((0.1 * weights)[:, None] * (softmax - 1 / words[:, None]).where(real, 0.0))
    return losses


def smoothing():
    """The guide's way: the model gets operations with another loss."""
    units = model.units

    def with_smoothing(c, tp, ops, cp):
        return units(c, tp, SimpleNamespace(**{**vars(ops), "cross_entropy_": smoothed_cross_entropy_}), cp)

    return mock.patch.object(model, "units", with_smoothing)


@contextlib.contextmanager
def left_out():
    """No loss for the words below 50: a micro-batch, a data rank, a cp rank have few or many of them."""
    micro_batch = Model.micro_batch

    def changed_micro_batch(self, ids, targets, *rest):
        return micro_batch(self, ids, targets.where(targets >= 50, -100), *rest)

    with mock.patch.object(Model, "micro_batch", changed_micro_batch):
        yield


@pytest.mark.parametrize("change", [*TERMS, "left_out"])
def test_the_changed_loss_and_its_gradients_are_those_of_plain_pytorch(change):
    with CHANGES[change]():
        run = built(tiny_config(1, init_method_std=0.2))
        batches = [*itertools.islice(tiny_batches(run), 3)]
        losses = []
        for _ in range(2):
            run.zero.zero_grad()
            losses.append(run.executor.run(iter(batches), 3, 1 / 3).item() / 3)
        validated = run.executor.evaluate(batches)
    model = Plain(run.config, run.mesh.tp).double()
    plain = torch.cat([model.losses(b.ids.view(b.shape), b.targets.view(b.shape), 100) for b in batches])
    plain = TERMS.get(change, torch.clone)(plain)
    assert torch.allclose(torch.cat([*validated.values()]), plain, rtol=1e-12)
    assert (plain == 0).any() == (change == "left_out")
    plain.mean().backward()
    assert losses == pytest.approx([plain.mean().item()] * 2, rel=1e-12), f"the losses of two runs are {losses}"
    right = model.gradients()
    for p in run.model.parameters():
        same_tensor(f"the gradient of {p.spec.name}", p.grad, right[p.spec.name])


def test_a_head_that_returns_a_mean_is_refused(monkeypatch):
    forward = Head.forward
    monkeypatch.setattr(Head, "forward", lambda *arguments: forward(*arguments).mean())
    said = refusal(one_step, tiny_config(1))
    assert said.startswith("the head returns a tensor []; should be the loss of each token, [8];")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_ledger_knows_that_forward_computes_the_losses(workers, sequence_parallel):
    config = tiny_config(1, 2, sequence_parallel=sequence_parallel)
    changes = contextlib.nullcontext, CHANGES["squared_losses"]
    plain, twice = (workers.run(2, record, config, 2, change) for change in changes)
    assert twice[0].sent[0] == twice[0].sent[1], "the formula differs from the bytes"
    rows = "tp", "cross-entropy rows", "all_reduce"
    assert twice[0].sent[0][rows][0] == 2 * plain[0].sent[0][rows][0], "another head computes its losses twice, too"


# --- the loop ---------------------------------------------------------------------------------------------------------

READS = {
    "p": lambda p: p.norm(),
    "several parameters": lambda p: torch.stack([p, p]),
    "p by keyword": lambda p: torch.sum(input=p),
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
                assert str(error).startswith("block0.qkv.weight" if name[0] == "p" else "a parameter"), error
                assert "run.zero.whole_parameters()" in str(error) and "\n" not in str(error)
        assert p.requires_grad and p.shape == (3, 32, 32) and p.numel() == 3072, "its size can be read"
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


def averaging_sgd(weight, gradient, moments, *, lr, scale, **_):
    """SGD, and an average of the weights as a moment."""
    weight.add_(gradient, alpha=-lr * scale)
    moments[0].lerp_(weight, 0.1)


def averages(config):
    """Return ({parameter: (begin, end, values)} of the averages of this rank, norms of the whole weights)."""
    with mock.patch.dict(RULES, sgd=Rule(averaging_sgd, 1)):
        run = built(config)
        batches = tiny_batches(run)
        for _ in range(3):
            train.train_step(run, batches)
        pieces = [(bucket, piece) for bucket in run.zero.in_order for piece in bucket.pieces]
        return {p.spec.name: (p.begin, p.end, p.of(bucket.moments[0]).clone()) for bucket, p in pieces}


@pytest.mark.parametrize("zero", [0, 3])
def test_an_average_of_the_weights_is_a_moment(workers, zero):
    right = averages(tiny_config(1, optimizer="sgd"))
    for found in workers.run(2, averages, tiny_config(2, optimizer="sgd", zero=zero)):
        for name, (begin, end, values) in found.items():
            same_tensor(f"the average of {name}", values, right[name][2][begin:end])


CHANGES = {
    **{name: partial(computed_with, term) for name, term in TERMS.items()},
    "left_out": left_out,
    "qk_norm": partial(another_block, partial(normalize_queries, partial=True, decay=True)),
    "qk_norm without partial": partial(another_block, normalize_queries),
    "experts": partial(another_block, add_experts),
    "bounded": bounded,
    "window": window,
    "dropout": dropout,
    "smoothing": smoothing,
    "gate": partial(another_block, add_gate),
    "frozen": frozen,
    "own_heads": own_heads,
}
