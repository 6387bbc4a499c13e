"""The noise of gradients: every layout measures the same noise scale, and the penalty's gradient is a derivative."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import config as configuration
import train
from bench.plain import Plain, loss_of
from errors import UserError
from parallel.noise import noise_scale
from test_layouts import built, first_step, gradient_of_each_micro_batch, micro_batches, one_process_config, tiny_config

LAYOUTS = [
    {},
    dict(zero=1, dropout=0.1, recompute="full"),
    dict(zero=3),
    dict(tp=2),
    dict(tp=2, sequence_parallel=True, zero=2),
    dict(tp=2, sequence_parallel=True, experts=4, expert_group=4),
    dict(pp=2, schedule="zb-h1", zero=3),
    dict(pp=2, schedule="zb-v", chunks=2),
]


def measured(config):
    run = built(config)
    return train.train_step(run, micro_batches(run)).read().measured


@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_every_layout_measures_the_norms_of_single_samples(workers, fields):
    """Two data ranks have three micro-batches of two samples. One process has the gradient of each sample alone."""
    config = tiny_config(2, noise_scale=True, micro_batch_size=2, global_batch_size=12, num_layers=4, **fields)
    alone = gradient_of_each_micro_batch(one_process_config(config), replace(config, micro_batch_size=1), 1)
    matrices = [name for name in alone[0, 0] if "block" in name and "weight" in name and ".ln" not in name]
    samples = torch.stack([12 * torch.cat([g[name] for name in matrices]) for g in alone.values()])
    first = samples[:2].mean(0), samples[2:4].mean(0)  # of data rank 0, of data rank 1
    right = [samples.mean(0).square().sum().item(), sum(g.square().sum().item() for g in first) / 2]
    for rank, found in enumerate(workers.run(2 * config.tp * config.pp, measured, config)):
        assert list(found) == pytest.approx(right, rel=1e-12), (
            f"rank {rank}: squared norms of the step and of one micro-batch"
        )


def test_a_loss_scale_changes_no_noise_scale(workers):
    half, single = (
        tiny_config(2, dtype=dtype, noise_scale=True, initial_loss_scale=1024.0) for dtype in ("fp16", "fp32")
    )
    assert workers.run(2, measured, half)[0] == pytest.approx(workers.run(2, measured, single)[0], rel=0.02)


def test_two_norms_give_the_noise_scale():
    """With |G|^2 = 4 and tr(Sigma) = 10: 10 / 4. A skipped step does not count."""
    steps = [SimpleNamespace(measured=[4 + 10 / n, 4 + 10 / 2], samples=n, skipped=False) for n in (8, 16)]
    assert noise_scale([*steps, SimpleNamespace(skipped=True, samples=8)], 2) == pytest.approx(2.5, rel=1e-12)


def test_the_penaltys_gradient_is_that_of_double_backward(workers):
    """Plain PyTorch differentiates the variance of two data ranks' gradients. A finite difference is close to it."""
    config = tiny_config(2, penalty=3.0)
    one, losses = built(tiny_config(1, micro_batch_size=12)), []
    plain = Plain(one.config, one.mesh.tp).double()
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        for d in range(2):
            rounds = micro_batches(built(tiny_config(1, micro_batch_size=4)), reader=(d, 2))
            batches = [next(rounds) for _ in range(3)]
            logits = [plain(batch.ids.view(batch.shape))[..., : one.config.vocab_size] for batch in batches]
            losses.append(sum(loss_of(x, batch.targets) for x, batch in zip(logits, batches, strict=True)) / 3)
        weights = list(plain.parameters())
        own = [torch.cat([g.flatten() for g in torch.autograd.grad(x, weights, create_graph=True)]) for x in losses]
        variance = sum((g - sum(own) / 2).square().sum() for g in own) / 2
        (sum(losses) / 2 + 3.0 / 2 * variance).backward()
    steps = workers.run(2, first_step, config)
    for name, weight in steps[0].after.items():
        assert torch.equal(weight, steps[1].after[name]), f"{name}: after the step the copies differ"
    for step in steps:
        ours = {name: values for name, (_, _, values) in step.gradients.items()}
        for name, right in (("block0.fc1.weight", plain.units[1].fc1), ("block1.fc2.weight", plain.units[2].fc2)):
            off = (ours[name] - right.weight.grad.flatten()).norm() / (right.weight.grad.norm())
            assert off < 5e-3, f"{name}: off by {off:.1e} of its norm"


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(noise_scale=True, cp=2), "noise_scale=True: needs several micro-batches"),
        (dict(noise_scale=True, micro_batch_size=24), "noise_scale=True: needs several micro-batches"),
        (dict(penalty=0.1, zero=1), "penalty=0.1: needs two or more data ranks"),
        (dict(penalty=0.1, dtype="bf16"), "penalty=0.1: needs two or more data ranks"),
    ],
)
def test_what_cannot_work_is_refused_by_name(fields, message):
    with pytest.raises(UserError) as refused:
        configuration.check(tiny_config(1, **{"micro_batch_size": 4} | fields), fields.get("cp", 1) * 2)
    assert str(refused.value).startswith(message)
