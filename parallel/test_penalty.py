"""The penalty's gradient is compared with plain PyTorch's second derivative."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import config as configuration
import operations
import train
from accounts.trace import Trace
from bench.plain import Plain, loss_of
from errors import UserError
from testing.tiny import built, first_step, tiny_batches, tiny_config


def test_the_penaltys_gradient_is_that_of_double_backward(workers):
    """A finite difference is close to it, too."""
    config = tiny_config(2, penalty=3.0)
    one, losses = built(tiny_config(1, micro_batch_size=12)), []
    plain = Plain(one.config, one.mesh.tp).double()
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        for d in range(2):
            rounds = tiny_batches(built(tiny_config(1, micro_batch_size=4)), reader=(d, 2))
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


def step_with_equal_samples(config):
    run = built(config)
    return train.train_step(run, tiny_batches(run, reader=(0, 2))).read()[:2]


def test_ranks_with_equal_gradients_have_no_penalty(workers):
    steps = [workers.run(2, step_with_equal_samples, tiny_config(2, penalty=penalty)) for penalty in (0.1, 0.0)]
    assert steps[0] == [pytest.approx(step) for step in steps[1]]


def traced(config):
    run = built(config)
    trace, batches = Trace(run.mesh, run.device, 0), tiny_batches(run)
    run.mesh.watch.tools.append(trace)
    for _ in range(2):
        train.train_step(run, batches)
    return trace.step


def test_a_trace_counts_a_step_once(workers):
    assert workers.run(2, traced, tiny_config(2, penalty=3.0)) == [2, 2]


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(penalty=0.1, zero=1), "penalty=0.1: needs two or more data ranks"),
        (dict(penalty=0.1, dtype="bf16"), "penalty=0.1: needs two or more data ranks"),
    ],
)
def test_what_cannot_work_is_refused_by_name(fields, message):
    with pytest.raises(UserError) as refused:
        configuration.check(tiny_config(1, **{"micro_batch_size": 4} | fields), fields.get("cp", 1) * 2)
    assert str(refused.value).startswith(message)


def test_dtype_auto_is_judged_by_the_device(monkeypatch):
    """On a CPU it is fp32."""
    config = tiny_config(2, penalty=0.1, dtype="auto", global_batch_size=8)
    assert configuration.check(config, 2) == 2
    monkeypatch.setattr(operations, "resolved_dtype", lambda *_: "bf16")
    with pytest.raises(UserError, match=r"^penalty=0\.1: needs --dtype=fp32"):
        train.build(config, None, None)
