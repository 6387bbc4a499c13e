"""Tests of Muon: its update is the paper's. The grid of `test_layouts.py` compares the layouts."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train
from parallel.mesh import Mesh
from parallel.muon import orthogonal
from testing.compare import same_tensor
from testing.tiny import built, tiny_batches, tiny_config


def by_singular_values(u):
    """Return O(u), [rows, columns], from the singular value decomposition."""
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan's
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return left @ torch.diag(s) @ right


@pytest.mark.parametrize("shape", [(4, 4), (4, 12), (12, 4), (1, 3)])
def test_newton_schulz_is_its_polynomial_of_the_singular_values(shape):
    u = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = orthogonal(u, u.dtype)
    for x, y in zip(u, found, strict=True):
        assert torch.allclose(y, by_singular_values(x), rtol=1e-12, atol=1e-12)
        s = torch.linalg.svdvals(y)
        assert 0.6 < s.min() and s.max() < 1.3
    assert not orthogonal(0 * u, u.dtype).any()  # no gradient


def test_a_block_takes_300_cubes_of_h():
    with FlopCounterMode(display=False) as counter:
        for k, rows, columns in [(3, 32, 32), (1, 32, 32), (1, 128, 32), (1, 32, 128)]:
            orthogonal(torch.ones(k, rows, columns), torch.float32)
    assert counter.get_total_flops() == 300 * 32**3


def matrices_of(spec, whole):
    """Return the matrices of a parameter, a list of views: q, k, v. Empty for AdamW's parameters."""
    muons = spec.bucket.startswith("block") and spec.name.endswith("weight") and len(spec.shape) > 1
    return [*whole.view(-1, *whole.shape[-2:])] if muons else []


def watched(config):
    """Yield (ParamSpec, weight before, gradient, weight after, learning rate) of four updates on one process."""
    run = built(config, Mesh())
    batches, update, seen = tiny_batches(run), run.zero.update, {}

    def weights():
        pieces = [(bucket, piece) for bucket in run.zero.buckets.values() for piece in bucket.pieces]
        return {piece.spec: piece.of(bucket.master).view(piece.spec.shape).clone() for bucket, piece in pieces}

    def watching(scalars):
        before = weights()
        seen.update({p.spec: (before[p.spec], p.grad * scalars.scale.to(p.grad.dtype)) for p in run.model.parameters()})
        update(scalars)

    run.zero.update = watching
    for _ in range(4):
        lr = train.train_step(run, batches).read().lr
        for spec, after in weights().items():
            yield spec, *seen[spec], after, lr


def papers(spec, before, g, state, c, lr):
    """Return a whole tensor after the update: matrices by singular values, everything else by torch.optim.AdamW."""
    decay = c.weight_decay * spec.decay
    if matrices := matrices_of(spec, before):
        m = state[spec] = c.adam_beta1 * state.get(spec, 0 * g) + (1 - c.adam_beta1) * g
        u = matrices_of(spec, c.adam_beta1 * m + (1 - c.adam_beta1) * g)
        pairs = zip(matrices, u, strict=True)
        new = [w - lr * (decay * w + 0.2 * math.sqrt(max(w.shape)) * by_singular_values(x)) for w, x in pairs]
        return torch.stack(new).view(before.shape)
    if spec not in state:
        options = dict(betas=(c.adam_beta1, c.adam_beta2), eps=c.adam_eps)
        state[spec] = torch.optim.AdamW([torch.nn.Parameter(before.clone())], **options)
    (group,) = state[spec].param_groups
    group.update(lr=lr, weight_decay=decay)
    group["params"][0].grad = g
    state[spec].step()
    return group["params"][0].detach().clone()


def test_the_update_is_the_papers():
    config, state = tiny_config(1, optimizer="muon"), {}
    for spec, before, g, after, lr in watched(config):
        right, what = papers(spec, before, g, state, config, lr), f"{spec.name} after an update"
        m = state[spec] if matrices_of(spec, g) else g
        plain = before * (1 - lr * config.weight_decay) - lr * (config.adam_beta1 * m + (1 - config.adam_beta1) * g)
        same_tensor(what, after, right, {"made without Newton-Schulz": plain}, tolerance=1e-10)
    assert sum(isinstance(of, torch.Tensor) for of in state.values()) == 2 * 4
