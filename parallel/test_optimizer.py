"""Tests of the update rules against PyTorch, the papers' formulas, and the log of a real run."""

import contextlib
import math
import os
from unittest import mock

import pytest
import torch

import reference
import train
from config import Config
from parallel import optimizer
from parallel.mesh import Mesh
from parallel.optimizer import LossScale, learning_rate
from reference import adamw_
from testing.compare import same_tensor
from testing.record import different, one_step, record
from testing.tiny import built, drawn, tiny_batches, tiny_config


def scalars(lr, scale, update, skip=False, beta1=0.9, beta2=0.999):
    kinds = torch.float64, torch.float64, torch.int64, torch.bool
    tensors = (torch.tensor(x, dtype=kind) for x, kind in zip((lr, scale, update, skip), kinds, strict=True))
    return reference.update_scalars(*tensors, beta1, beta2)


B1, B2, EPS, LR, DECAY, T = 0.8, 0.95, 0.1, 0.5, 0.2, 3
CONSTANTS = dict(lr=LR, decay=DECAY, scale=0.25, update=T, beta1=B1, beta2=B2, eps=EPS)


def buffers():
    """Return a weight, a gradient (4 times that of `adam`, for `scale`), and [m, v]."""
    return drawn(6), 4 * drawn(6, seed=1), [drawn(6, seed=2), 2 + drawn(6, seed=3) ** 2]


def adam(slide=1, inside=False, t=T, scaled=1):
    """Return (m, v, direction) of update `t`. slide=-1: the slide's signs. inside: epsilon inside the root.

    scaled: a factor on the gradient.
    """
    g, (_, _, (m, v)) = scaled * drawn(6, seed=1), buffers()
    m, v = B1 * m + slide * (1 - B1) * g, B2 * v + slide * (1 - B2) * g**2
    root = v / (1 - B2**t)
    return m, v, m / (1 - B1**t) / ((root + EPS).sqrt() if inside else root.sqrt() + EPS)


@pytest.mark.parametrize("name, decay", [("sgd", 0.0), ("sgd", DECAY), ("adamw", DECAY)])
def test_a_weight_moves_by_the_formula(name, decay):
    (w, g, moments), before = buffers(), drawn(6)
    getattr(optimizer, name)(w, g, moments, **CONSTANTS | dict(decay=decay))
    step, rest = LR * (drawn(6, seed=1) if name == "sgd" else adam()[2]), (1 - LR * decay) * before
    wrong = {
        "made without the weight decay": before - step,
        "made with the decay of the weight after the step": (before - step) * (1 - LR * decay),
        "moved along the gradient, not against it": rest + step,
        "made without `scale`": rest - 4 * step,
        "the old one: change `weight` in place": before,
    }
    same_tensor(f"the weight after {name} with decay={decay}", w, rest - step, wrong)


@pytest.mark.parametrize("what", ["m", "v", "direction"])
def test_adam_is_its_formula(what):
    _, g, (m, v) = buffers()
    direction = optimizer.adam_direction(g, m, v, CONSTANTS["scale"], T, B1, B2, EPS)
    i = ["m", "v", "direction"].index(what)
    wrong = {} if what == "direction" else {f"the old one: change `{what}` in place": buffers()[2][i]}
    wrong |= {
        "the slide's: it subtracts the gradient": adam(slide=-1)[i],
        "made with epsilon inside the root": adam(inside=True)[i],
        "made without the division by 1 - b^t": adam(t=1e9)[i],
        "made with b^(t+1)": adam(t=T + 1)[i],
        "made without `scale`": adam(scaled=4)[i],
    }
    same_tensor(f"{what} of Adam", (m, v, direction)[i], adam()[i], wrong)


def test_the_fused_adamw_is_adamw():
    """One range decays, one does not. A skipped update changes nothing."""
    ours, moments = drawn(48), [0 * drawn(48), 0 * drawn(48)]
    plain, plain_moments, constants = ours.clone(), [m.clone() for m in moments], dict(beta1=B1, beta2=B2, eps=EPS)
    for t in range(1, 6):
        g = drawn(48, seed=t)
        for skip in (True, False):
            before, ranges = ours.clone(), [(0, 32, True), (32, 48, False)]
            adamw_(ours, 4 * g, moments, scalars(LR, 0.25, t, skip, B1, B2), ranges, decay=DECAY, **constants)
            assert not skip or torch.equal(ours, before)
        for part, decay in [(slice(0, 32), DECAY), (slice(32, 48), 0.0)]:
            buffers = plain[part], 4 * g[part], [x[part] for x in plain_moments]
            optimizer.adamw(*buffers, lr=LR, decay=decay, scale=0.25, update=t, **constants)
        for what, a, b in zip(["the weight", "m", "v"], [ours, *moments], [plain, *plain_moments], strict=True):
            same_tensor(f"{what} after update {t} by the fused adamw_", a, b)


WHOLE, DIRECTION = 8.0, 2.0  # norms of a whole tensor and of its direction


def test_lambs_direction_is_adamws_with_decay():
    w, g, moments = buffers()
    optimizer.lamb(w, g, moments, **CONSTANTS)
    wrong = {"still the gradient: `gradient` must be overwritten": buffers()[1], "made without decay": adam()[2]}
    same_tensor("LAMB's direction", g, adam()[2] + DECAY * drawn(6), wrong)
    same_tensor("the weight after LAMB's first half, which must not change it,", w, drawn(6))


@pytest.mark.parametrize(
    "layerwise, norm, right",
    [(True, WHOLE, 4.0), (False, WHOLE, 1.0), (True, 0.0, 1.0)],
    ids=["matrix", "bias", "zero"],
)
def test_lambs_trust_ratio_is_the_formulas(layerwise, norm, right):
    """The update is lr * ratio * direction. The ratio is 1 for a bias, and where the weight or the direction is 0."""
    w, direction, _ = buffers()
    if norm == 0:
        optimizer.apply_lamb(w.clone(), 0 * direction, [], WHOLE, 0.0, lr=LR, decay=DECAY, layerwise=True)
    optimizer.apply_lamb(w, direction, [], norm, DIRECTION, lr=LR, decay=DECAY, layerwise=layerwise)
    before, direction, _ = buffers()
    ratios = {
        "|w| / |direction|": WHOLE / DIRECTION,
        "1 (the rate is lr)": 1.0,
        "0 (no update)": 0.0,
        "the norms of this rank's part": before.norm() / direction.norm(),
    }
    wrong = {f"that with the trust ratio {name}": before - LR * ratio * direction for name, ratio in ratios.items()}
    same_tensor(f"the weight with the trust ratio {right:g}", w, before - LR * right * direction, wrong)


def step_of(dtype="fp64", **fields):
    run = built(tiny_config(1, dtype=dtype, **fields), Mesh())
    return run, tiny_batches(run)


def weights(run):
    return {p.spec.name: p.detach().clone() for p in run.model.parameters()}


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_larss_rates_are_the_papers(weight_decay):
    """LAMB gets the norms of whole tensors in the same way, and is told which ones are biases or LayerNorms."""
    (run, batches), gradients, velocity = step_of(optimizer="lars", lr=0.5, weight_decay=weight_decay), {}, {}
    whole, update, c = weights(run), run.zero.update, run.config

    def watching(scalars):
        gradients.update({p.spec.name: p.grad * scalars.scale for p in run.model.parameters()})
        update(scalars)

    run.zero.update = watching
    for count in range(1, 5):
        lr = train.train_step(run, batches).read().lr
        for p in run.model.parameters():
            n, decay = p.spec.name, weight_decay * p.spec.decay
            words = slice(c.vocab_size if n == "word.weight" else None)  # the paper's table has no other rows
            w, g, ours = whole[n][words], gradients[n][words], p.detach()[words]
            ratio = c.lars_coefficient * w.norm() / (g.norm() + decay * w.norm()) if p.spec.decay else 1.0
            velocity[n] = c.adam_beta1 * velocity.get(n, 0) + lr * ratio * (g + decay * w)
            whole[n] = w - velocity[n]
            same, norms = torch.allclose(ours, whole[n], rtol=1e-10, atol=1e-13), (ours.norm(), whole[n].norm())
            assert same, f"{n} after update {count}: |w| is {norms[0]:.8g}, and {norms[1]:.8g} by the paper's formula"


@pytest.mark.parametrize("apply", [optimizer.apply_lamb, optimizer.apply_lars])
@pytest.mark.parametrize("weight, gradient, after", [(2.0, 0.5, 0.0), (2.0, 0.0, 2.0), (0.0, 2.0, -2.0)])
def test_without_one_of_the_norms_the_rate_is_the_usual_one(apply, weight, gradient, after):
    w, g, m = (torch.tensor([value]) for value in (weight, gradient, 0.0))
    apply(w, g, [m], weight, gradient, lr=1.0, decay=0.0, layerwise=True, beta1=0.9, lars_coefficient=1.0)
    assert w == after


UNTIED = dict(model="llama", untie_embeddings_and_output_weights=True)


@pytest.mark.parametrize("name", optimizer.RULES)
@pytest.mark.parametrize("model, tables", [({}, ["word.weight"]), (UNTIED, ["word.weight", "head.weight"])])
def test_rows_without_a_word_stay_zero(name, model, tables):
    run, batches = step_of(optimizer=name, weight_decay=0.5, **model)
    for _ in range(2):
        train.train_step(run, batches)
    found = {p.spec.name: p for p in run.model.parameters() if p.spec.padding}
    assert [*found] == tables and run.config.vocab_size == 100
    for p in found.values():
        assert len(p) == 128 and p[:100].all() and not p[100:].any(), p.spec.name


# --- learning rate --------------------------------------------------------------------------------------------------


WSD = dict(lr_warmup_iters=10, lr_decay_style="wsd", lr_wsd_decay_iters=20)


@pytest.mark.parametrize(
    "updates, expected, fields",
    [
        ([1, 5, 10, 55, 100, 1000], [0.1, 0.5, 1.0, 0.55, 0.1, 0.1], dict(lr_warmup_iters=10)),
        ([32], [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 22 / 90))], dict(lr_warmup_iters=10)),
        ([5, 10, 55, 100], [0.5, 1, 0.55, 0.1], dict(lr_warmup_iters=10, lr_decay_style="linear")),
        ([5, 10, 55, 500], [0.5, 1, 1, 1], dict(lr_warmup_iters=10, lr_decay_style="constant")),
        ([5, 10, 50, 80, 90, 100], [0.5, 1, 1, 1, 0.55, 0.1], WSD),
        ([10], [0.5], dict(lr_warmup_fraction=0.5, lr_decay_iters=40)),
        ([1], [0.5], dict(lr_warmup_iters=2, lr_warmup_fraction=0.5)),  # the number wins over the fraction
        ([1], [1], dict(lr_warmup_iters=0, lr_warmup_fraction=0.5, lr_decay_style="constant")),
        ([1, 100, 200, 201], [0.005, 0.5, 1.0, 0.1], dict(lr_warmup_iters=200)),  # longer than the run
    ],
)
def test_the_learning_rate_follows_its_curve(updates, expected, fields):
    c = Config(**{"lr": 1.0, "min_lr": 0.1, "train_iters": 100} | fields)
    assert [learning_rate(c, update) for update in updates] == pytest.approx(expected)


def test_learning_rates_of_a_real_log():
    """Megatron-DeepSpeed's 345M: (iteration, skipped so far, learning rate)."""
    c = Config(lr=0.00015, min_lr=1e-5, lr_decay_iters=320000, lr_warmup_fraction=0.01, train_iters=500000)
    rows = [(100, 15, "3.984E-06"), (200, 15, "8.672E-06"), (600, 17, "2.733E-05"), (3000, 19, "1.397E-04")]
    assert [f"{learning_rate(c, i - skipped):.3E}" for i, skipped, _ in rows] == [rate for *_, rate in rows]


# --- loss scale -----------------------------------------------------------------------------------------------------


def scales(overflows, scale=None, **fields):
    loss_scale = scale or LossScale(Config(**fields), "fp16")
    path = []
    for overflow in overflows:
        loss_scale.update(overflow)
        path.append(loss_scale.scale)
    return path


def test_loss_scale_of_a_real_log():
    """With hysteresis=2, the scale starts at 2^32, and the second overflow and later ones halve it.

    It is 2^18 after 15 overflows, 2^16 after 2 more, 2^17 after 1,000 steps without overflow (the count of overflows is
    0 again), 2^18 after 1,000 more, and 2^17 after 2 overflows.
    """
    scale = LossScale(Config(), "fp16")
    assert scales([True] * 15, scale)[-1] == 2**18
    assert scales([False] * 485 + [True] * 2, scale)[-1] == 2**16
    assert scales([False] * 999, scale)[-1] == 2**16 and scales([False], scale) == [2**17]
    assert scales([False] * 1000, scale)[-1] == 2**18
    assert scales([True, True], scale) == [2**18, 2**17]


def test_loss_scale_has_a_floor_and_a_clean_count_starts_over():
    assert scales([True] * 5, initial_loss_scale=4.0, hysteresis=1)[-1] == 1.0
    path = scales([False, False, True, False, False, False], initial_loss_scale=8.0, loss_scale_window=3)
    assert path == [8, 8, 8, 8, 8, 16]
    resumed = LossScale(Config(loss_scale_window=3), "fp16")
    resumed.restore({"dynamic": True, "scale": 8.0, "clean": 900, "patience": 2})  # with a larger window
    assert scales([False], resumed) == [16]
    assert scales([True] * 9, LossScale(Config(), "bf16")) == [1.0] * 9


# --- the end of a step ----------------------------------------------------------------------------------------------


def test_weight_decay_spares_biases_and_layer_norms():
    """With gradient 0, only what decays changes."""
    run, _ = step_of(optimizer="sgd", weight_decay=0.5)
    before = weights(run)
    run.zero.update(scalars(lr=0.1, scale=1.0, update=1))
    for p in run.model.parameters():
        expected = before[p.spec.name] * (0.95 if p.spec.decay else 1.0)
        assert torch.allclose(p.detach(), expected), p.spec.name


def test_the_norm_of_a_long_buffer_keeps_its_digits():
    """A CPU's `vector_norm` of these numbers has an error of 2e-4."""
    x = drawn(6_400_000, seed=1).float()
    assert math.isclose(reference.squared_norms([x]).sum(), x.double().square().sum(), rel_tol=1e-6)


def test_the_clip_scales_the_update_and_the_log_has_the_norm_before_it():
    free, batches = step_of(optimizer="sgd", clip_grad=0.0, weight_decay=0.0)
    clipped, same_batches = step_of(optimizer="sgd", clip_grad=0.01, weight_decay=0.0)
    start = weights(free)
    a, b = train.train_step(free, batches).read(), train.train_step(clipped, same_batches).read()
    assert a.grad_norm == b.grad_norm > 0.01
    moved, less = weights(free), weights(clipped)
    for name, w in start.items():
        expected = (moved[name] - w) * (0.01 / (a.grad_norm + 1e-6))
        assert torch.allclose(less[name] - w, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("dtype, distance", [("fp32", 1e-4), ("bf16", 0.03), ("fp16", 0.01)])
def test_lower_precision_trains_close_to_float64(dtype, distance):
    """distance: the largest of 8 losses from float64's. No fp16 step overflows."""
    exact, batches = step_of()
    exact = [train.train_step(exact, batches).read().loss for _ in range(8)]
    run, batches = step_of(dtype, initial_loss_scale=2.0**10)
    steps = [train.train_step(run, batches).read() for _ in range(8)]
    assert not any(step.skipped for step in steps)
    assert max(abs(s.loss - e) / e for s, e in zip(steps, exact, strict=True)) < distance
    assert exact[-1] < exact[0] - 0.1 and run.zero.buckets["block0"].master.dtype == torch.float32
    if dtype != "fp32":  # 2 + 4 + 4 + 8 bytes a parameter
        assert run.zero.buckets["block0"].param.whole.dtype == train.DTYPES[dtype]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_with_one_micro_batch_every_stage_gives_the_same_bits(workers, dtype):
    """A sum over two ranks has one result, because a + b is b + a."""
    fields = dict(dtype=dtype, global_batch_size=8, micro_batch_size=4, clip_grad=0.0)  # norms differ by rounding
    whole, _ = workers.run(2, record, tiny_config(2, **fields), 4)
    for zero in (1, 2, 3):
        for ours in workers.run(2, record, tiny_config(2, zero=zero, **fields), 4):
            assert ours.losses == whole.losses and ours.norms == pytest.approx(whole.norms, rel=1e-6)
            assert all(torch.equal(ours.after[name], weight) for name, weight in whole.after.items())


@contextlib.contextmanager
def poison(run, value):
    """Put `value` into a gradient of the head before it is reduced."""
    head = run.zero.buckets["head"]
    reduce = head.reduce

    def reduce_poison(last):
        head.grad.whole[3] = value
        reduce(last)

    with mock.patch.object(head, "reduce", reduce_poison):
        yield


def poisoned_step(config, victim, value):
    """Run three steps, the second with a poisoned gradient on rank `victim`."""
    run = built(config)
    batches, steps, block = tiny_batches(run), [], list(run.zero.buckets.values())[-2]
    for i in range(3):
        before = block.master.clone()
        with poison(run, value) if i == 1 and run.mesh.rank == victim else contextlib.nullcontext():
            step = train.train_step(run, batches).read()
        steps.append((step.skipped, not torch.equal(before, block.master), step.lr, step.loss_scale))
    return steps, vars(run.counters), run.zero.updates.item(), run.loss_scale.scale


@pytest.mark.parametrize(
    "value, layout",
    [
        (math.inf, dict(dp=2)),
        (math.nan, dict(dp=1, tp=2, sequence_parallel=True)),
        (math.nan, dict(dp=3, tp=2, global_batch_size=12)),  # the copy of tp rank 0 replaces the others
        (math.inf, dict(dp=2, zero=3)),
        (math.nan, dict(dp=1, pp=2, schedule="zb-h1")),
        (math.inf, dict(dp=2, pp=2, zero=2, schedule="chimera")),
    ],
    ids=str,
)
@pytest.mark.skipif("ADVERSARY" in os.environ, reason="it sends nan, which that mode refuses")
def test_an_overflow_on_one_rank_makes_every_rank_skip(workers, layout, value):
    """The data advance, the learning rate does not. The loss scale falls on all ranks."""
    fields = dict(dtype="fp16", initial_loss_scale=2.0**8, hysteresis=1, global_batch_size=8, micro_batch_size=2)
    config = tiny_config(**fields | layout)
    ranks = layout["dp"] * config.tp * config.pp
    results = workers.run(ranks, poisoned_step, config, ranks - 1, value)
    assert all(result == results[0] for result in results)
    steps, counters, updates, scale = results[0]
    assert [(skipped, moved) for skipped, moved, *_ in steps] == [(False, True), (True, False), (False, True)]
    assert steps[1][2] == steps[2][2] == learning_rate(config, 2)
    assert (steps[1][3], steps[2][3], scale) == (2.0**8, 2.0**7, 2.0**7)
    assert counters == {"iteration": 3, "consumed_samples": 3 * config.global_batch_size} and updates == 2


@pytest.mark.parametrize("name", optimizer.RULES)
def test_an_update_moves_the_weights_and_divides_by_the_loss_scale(name):
    config = tiny_config(1, optimizer=name)
    one = one_step(config)
    assert any(not torch.equal(one.before[name], after) for name, after in one.after.items())
    assert different(one_step(config, 1024.0), one) == []


@pytest.mark.parametrize("name", optimizer.RULES)
def test_a_skipped_step_is_as_if_its_data_had_not_been(name):
    """It changes no moment, no bias correction and no rate."""
    (run, batches), (other, rest) = step_of("fp32", optimizer=name), step_of("fp32", optimizer=name)
    train.train_step(run, batches)
    train.train_step(other, rest)
    with poison(run, math.nan):
        assert train.train_step(run, batches).read().skipped
    for _ in range(run.config.global_batch_size // run.config.micro_batch_size):
        next(rest)
    other.counters.consumed_samples += run.config.global_batch_size
    assert train.train_step(run, batches).read().lr == train.train_step(other, rest).read().lr
    for name, bucket in run.zero.buckets.items():
        assert torch.equal(bucket.master, other.zero.buckets[name].master)
