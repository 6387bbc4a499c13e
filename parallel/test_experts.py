"""Tests that a mixture of experts computes a loop over its experts. `test_layouts.py` has experts in its grid."""

import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import config as configuration
import log
import train
from errors import UserError
from model import GPT, unit_specs
from parallel import experts
from parallel.experts import dropped_if_uniform
from parallel.mesh import Mesh
from testing.compare import same_tensor
from testing.tiny import built, check_layout, gradients, tiny_batches, tiny_config

TOKENS = dict(experts=4, top_k=2, expert_group=4, capacity_factor=1.0, balance=0.3)  # 2 places for 8 choices of 4


def loop(x, router, fc1, fc2, c):
    """Return (output, balance term) of a mixture of experts. x [n, h]."""
    G, C, y, term = c.expert_group, math.ceil(c.capacity_factor * c.top_k * c.expert_group / c.experts), [], 0.0
    for group in x.split(G):
        p, taken = (group @ router.T).softmax(-1), [0] * c.experts
        for token, gates in zip(group, p, strict=True):
            out = torch.zeros_like(token)
            for e in gates.topk(c.top_k).indices.tolist():
                if taken[e] < C:
                    out = out + gates[e] * (fc2[e] @ F.gelu(fc1[e] @ token, approximate="tanh"))
                taken[e] += 1
            y.append(out)
        shares = torch.tensor(taken, dtype=torch.float64) / (G * c.top_k)
        term = term + c.balance * c.experts * (shares * p.mean(0)).sum() / (len(x) // G)
    return torch.stack(y), term


@pytest.mark.parametrize("group, places", [(4, 2), (8, 4)])
def test_a_loop_over_experts_computes_the_same(group, places):
    c = tiny_config(1, **TOKENS | dict(expert_group=group))
    run = built(c)
    batch, layer = next(tiny_batches(run)), run.model.units[1].mlp
    batch.factor = 0.7
    x = torch.randn(len(batch.ids), c.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theirs = [t.detach().clone().requires_grad_() for t in (x, layer.router, layer.fc1, layer.fc2)]
    right, term = loop(*theirs, c)
    assert 0 < (right == 0).all(1).sum() < len(x), "the test should drop some tokens"
    dy = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ((right * dy).sum() + batch.factor * term).backward()
    x.requires_grad_()
    y = layer(x, batch)
    y.backward(dy)
    fewer = loop(*theirs, replace(c, capacity_factor=(places - 1) / places))[0]
    same_tensor("y of the experts", y, right, {f"made with {places - 1} places in a group; should be {places}": fewer})
    for name, ours, t in zip("x router fc1 fc2".split(), (x, layer.router, layer.fc1, layer.fc2), theirs, strict=True):
        assert torch.allclose(ours.grad, t.grad, rtol=1e-10, atol=1e-12), f"the gradient of {name} differs"


def scaled_gradients(dtype, scale):
    run = built(tiny_config(1, dtype=dtype, **TOKENS))
    run.executor.run(tiny_batches(run), 3, scale)
    return {name: values / scale for name, (_, _, values) in gradients(run).items()}


@pytest.mark.parametrize("dtype, tolerance", [("fp64", 1e-12), ("fp16", 1e-2)])
def test_a_loss_scale_scales_the_balance_term(dtype, tolerance):
    """fp16 rounds numbers below 6e-5 to a multiple of 6e-8."""
    one, large = (scaled_gradients(dtype, 2.0**k) for k in (0, 8))
    for name, right in one.items():
        distance = (large[name] - right).norm() / (right.norm() + 1e-3)
        assert distance < tolerance, (
            f"{name}: not all of its gradient has the loss scale (the balance term: batch.factor)"
        )


def test_in_generation_no_token_is_dropped():
    run = built(tiny_config(1, **TOKENS))
    layer, x = run.model.units[1].mlp, torch.randn(7, 32, dtype=torch.float64)
    alone = functools.partial(loop, router=layer.router, fc1=layer.fc1, fc2=layer.fc2)
    right, _ = alone(x, c=tiny_config(1, **TOKENS | dict(expert_group=1)))
    with torch.no_grad():
        assert torch.allclose(layer(x, run.model.micro_batch(torch.zeros(1, 7, dtype=torch.int64))), right)


def test_the_share_of_dropped_tokens_if_the_loads_are_equal():
    """Switch's capacity: 9.6% in groups of 64. By hand, two tokens choose the same of two experts half of the time."""
    for E, k, group, capacity, share in ((16, 1, 64, 1.25, 0.0964), (2, 1, 2, 1.0, 0.25), (4, 4, 8, 1.0, 0.0)):
        c = tiny_config(1, experts=E, top_k=k, expert_group=group, capacity_factor=capacity)
        assert dropped_if_uniform(c) == pytest.approx(share, abs=1e-4)
    assert tiny_config(1, seq_length=1024).tokens_of_group == 256


def counted(config):
    """Return the two numbers of the log after two steps and a validation, and whether they are 0 again."""
    run = built(config)
    batches = tiny_batches(run)
    for _ in range(2):
        train.train_step(run, batches)
    with torch.no_grad():
        run.executor.evaluate([next(batches)])
    return log.experts_row(run), all(type(block.mlp.counts) is int for block in run.model.units[1:-1])


@pytest.mark.parametrize("layout", [dict(tp=2, sequence_parallel=True, pp=2), dict(dp=2, recompute="full")], ids=str)
def test_every_layout_counts_the_same_dropped_tokens(workers, monkeypatch, layout):
    """Recomputation and validation count nothing."""
    fields, taken, places = TOKENS | dict(seq_length=16), [], experts.places_of
    with monkeypatch.context() as patch:
        patch.setattr(experts, "places_of", lambda *a: taken.append(places(*a)) or taken[-1])
        expected, _ = counted(tiny_config(1, **fields))
    taken = taken[:-2]  # without the validation's two blocks
    dropped = sum((place == most).sum().item() for place, most in taken) / sum(len(place) for place, _ in taken)
    assert 0 < dropped == pytest.approx(expected["dropped_tokens"], rel=1e-12) and expected["largest_load"] > 1
    for found, empty in workers.run(4 if "pp" in layout else 2, counted, tiny_config(**{"dp": 1} | fields | layout)):
        assert found == pytest.approx(expected, rel=1e-12) and empty


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_groups_of_four_train_the_same_model(workers, tp):
    dp = max(1, 2 // tp)
    modes = [dict(optimizer="sgd", dropout=0.0), dict(optimizer="lamb", dropout=0.1, recompute="full")]
    fields = TOKENS | dict(seq_length=16, sequence_parallel=tp > 1, zero=3 * (dp > 1))
    check_layout([tiny_config(dp, tp, **mode, **fields) for mode in modes], functools.partial(workers.run, dp * tp))


@pytest.mark.parametrize(
    "world, fields, message",
    [
        (1, dict(top_k=5), "top_k=5: should be 1 to experts=4"),
        (2, dict(tp=2), "sequence_parallel=False: experts with tp > 1 need it"),
        (8, dict(tp=8, sequence_parallel=True), "experts = 4 is not a multiple of tp = 8"),
        (2, dict(cp=2, context="ring"), "seq_length = 8 is not a multiple of expert_group * parts = 16"),
        (1, dict(schedule="pipedream", clip_grad=0.0), "experts=4: should be one of 0, with schedule=pipedream"),
    ],
)
def test_a_layout_that_experts_cannot_have_is_refused_by_name(world, fields, message):
    with pytest.raises(UserError) as refused:
        configuration.check(tiny_config(1, **TOKENS | fields), world)
    assert str(refused.value).startswith(message)


def test_the_config_of_one_billion_has_the_parameters_counted_by_hand():
    """GPT-2 small has 124,475,904 parameters, an MLP 8 h^2 + 4 h without the output's bias."""
    c, h = configuration.load(["configs/experts_1b.py"]), 768
    model = GPT(c, Mesh().tp)
    assert model.num_parameters() == 124_475_904 + 12 * (15 * 8 * h**2 + 16 * h - 4 * h)
    assert model.num_parameters(active=True) == 124_475_904 + 12 * (16 * h - 4 * h)
    small = configuration.load(["configs/experts_1b.py", "--num_layers=1", "--hidden_size=48", "--seq_length=64"])
    assert [spec.shape for spec in unit_specs(small)[1] if "fc1" in spec.name] == [(16, 192, 48)]
