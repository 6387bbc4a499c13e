"""The central promise: every layout trains the same model.

In float64, a layout's losses and gradient norms must equal those of one process, its initial parameters bit for bit,
and its parameters after eight steps to ten digits. Clipping acts in every step, there are at least three
micro-batches, and each layout runs under SGD (where a wrong gradient scale shows at once) and AdamW, with and without
dropout, with and without recomputation. Red when (each was put in by hand once): see DEFECTS below.
"""

import functools
import itertools

import pytest
import torch

import train
from config import Config
from data import training_samples
from parallel.mesh import Mesh

STEPS = 8
TINY = dict(
    num_layers=2, hidden_size=16, num_attention_heads=8, seq_length=8, vocab_size=50, train_iters=STEPS,
    global_batch_size=24, lr=3e-2, min_lr=1e-3, lr_warmup_iters=2, weight_decay=0.1, adam_eps=1e-6, clip_grad=0.1,
    dtype="fp64",
)  # fmt: skip

# (dp, tp, sequence parallel): every factorisation of 1, 2, 4, 8, and 3 and 6, which divide no power of two
LAYOUTS = [
    (dp, tp, sp)
    for dp, tp in [(2, 1), (1, 2), (3, 1), (4, 1), (2, 2), (1, 4), (3, 2), (8, 1), (4, 2), (2, 4), (1, 8)]
    for sp in (False, True)
    if tp > 1 or not sp
]
ALL_MODES = list(itertools.product(["sgd", "adamw"], [0.0, 0.1], ["none", "full"]))
MODES = [ALL_MODES[i] for i in (0, 3, 5, 6)]  # every value, and every pair of values of two of them


def tiny_config(dp, tp=1, **fields):
    fields = {"micro_batch_size": 8 // dp, "tp": tp} | fields  # m = 3 (with dp=3: 4)
    return Config(**TINY | fields)


def micro_batches(run, vocab_size=50):
    """The data of every layout: sample g is a function of g, and worth learning (most ids are the last one plus 1)."""
    c, dp = run.config, run.mesh.dp
    dice = torch.randint(0, vocab_size, (1000, c.seq_length + 1), generator=torch.Generator().manual_seed(5))
    table = (dice // 10 - 1).clamp(1).cumsum(1).add(dice[:, :1]) % vocab_size
    for numbers in training_samples(0, dp.rank, dp.size, c.micro_batch_size):
        numbers = torch.from_numpy(numbers)
        tokens = table[numbers % len(table)]
        yield run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], numbers)


def parameters(run):
    """{name: this rank's part}, copied."""
    return {p.spec.name: p.detach().clone() for unit in run.zero.units.values() for p in unit.params}


def train_tiny(config, steps=STEPS):
    """On one rank: (losses, gradient norms, parameters before, parameters after)."""
    run = train.build(config, Mesh(config.tp), torch.device("cpu"))
    run.zero.initialize(config.seed)
    before, batches = parameters(run), micro_batches(run)
    done = [train.train_step(run, batches) for _ in range(steps)]
    assert all(step.grad_norm > config.clip_grad for step in done), "the clip must act"
    return [s.loss for s in done], [s.grad_norm for s in done], before, parameters(run)


@functools.cache
def one_process(optimizer, dropout):
    return train_tiny(tiny_config(1, optimizer=optimizer, dropout=dropout))


def gathered(parts, config, specs):
    """Whole tensors from the parts of all ranks; what is replicated must be equal on all of them, bit for bit."""
    whole = {}
    for name, spec in specs.items():
        mine = [part[name] for part in parts]
        groups = [mine[i : i + config.tp] for i in range(0, len(mine), config.tp)]  # one per data rank
        for group in groups:
            assert all(torch.equal(a, b) for a, b in zip(group, groups[0], strict=True)), f"data ranks differ in {name}"
        if spec.tp_dim is None:
            assert all(torch.equal(part, mine[0]) for part in mine), f"tensor ranks differ in {name}"
            whole[name] = mine[0]
        else:
            whole[name] = torch.cat(groups[0], spec.tp_dim)
    return whole


def assert_same_model(results, reference, config, specs):
    losses, norms, before, after = reference
    for rank, result in enumerate(results):
        for what, ours, theirs in [("loss", result[0], losses), ("gradient norm", result[1], norms)]:
            for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert abs(a - b) <= 1e-10 * abs(b), f"{what} of step {step + 1} on rank {rank}: {a} instead of {b}"
    for name, whole in gathered([r[2] for r in results], config, specs).items():
        assert torch.equal(whole, before[name]), f"initial {name}"
    for name, whole in gathered([r[3] for r in results], config, specs).items():
        distance = (whole - after[name]).abs().max()
        assert distance <= 1e-10 * max(1, after[name].abs().max()), f"{name} is off by {distance:.1e}"


def specs():
    from model import GPT

    return GPT(tiny_config(1), Mesh().tp).specs()


@pytest.mark.parametrize("dp, tp, sp", LAYOUTS, ids=lambda x: str(x))
def test_every_layout_trains_the_same_model(workers, dp, tp, sp):
    for optimizer, dropout, recompute in MODES:
        config = tiny_config(dp, tp, sequence_parallel=sp, optimizer=optimizer, dropout=dropout, recompute=recompute)
        results = workers.run(dp * tp, train_tiny, config)
        assert_same_model(results, one_process(optimizer, dropout), config, specs())


@pytest.mark.parametrize("optimizer, dropout, recompute", ALL_MODES)
def test_micro_batches_and_recomputation_on_one_process(optimizer, dropout, recompute):
    """m micro-batches give the gradient of one big batch; recomputation gives the bits of none."""
    reference = one_process(optimizer, dropout)
    for size in (1, 24):
        config = tiny_config(1, micro_batch_size=size, optimizer=optimizer, dropout=dropout, recompute=recompute)
        assert_same_model([train_tiny(config)], reference, config, specs())
