"""Llama is the plain PyTorch of the papers. (test_layouts.py has it in its grid.)"""

import contextlib
import math
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import config as configuration
import reference
import train
from parallel.context import TokensForHeads
from parallel.mesh import Mesh
from parallel.units import Model
from testing.compare import same_tensor
from testing.points import LLAMA
from testing.record import check_layout
from testing.tiny import built, drawn, tiny_batches, tiny_config

UNTIED = LLAMA | dict(untie_embeddings_and_output_weights=True, rotary_base=77.0)

# --- one process ------------------------------------------------------------------------------------------------------


def plain_llama(run, ids, targets):
    """Return every token's loss in plain PyTorch, with the same weights. Every head of queries has its own k and v."""
    c, w = run.config, {p.spec.name: p for p in run.model.parameters()}
    a, g, d, (b, s) = c.num_attention_heads, c.query_groups, c.head_size, ids.shape

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], c.norm_epsilon)

    def turned(x):  # [b, heads, s, d]: both halves of a head are one complex number
        angle = torch.arange(s)[:, None] * c.rotary_base ** (-torch.arange(0, d, 2).double() / d)
        pair = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag], -1)

    x = F.embedding(ids, w["word.weight"])
    for i in range(c.num_layers):
        y = F.linear(norm(x, f"block{i}.norm1"), w[f"block{i}.qkv.weight"]).view(b, s, g, a // g + 2, d)
        q = turned(y[..., :-2, :].flatten(2, 3).transpose(1, 2))
        k, v = (y[..., j, :].repeat_interleave(a // g, 2).transpose(1, 2) for j in (-2, -1))
        scores = (q @ turned(k).mT / math.sqrt(d)).masked_fill(torch.ones(s, s).triu(1) > 0, -torch.inf)
        x = x + F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), w[f"block{i}.proj.weight"])
        gate, up = F.linear(norm(x, f"block{i}.norm2"), w[f"block{i}.fc1.weight"].flatten(0, 1)).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, w[f"block{i}.fc2.weight"])
    logits = F.linear(norm(x, "head.norm"), w["head.weight" if "head.weight" in w else "word.weight"])
    return F.cross_entropy(logits[..., : c.vocab_size].flatten(0, 1), targets.flatten(), reduction="none")


@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("fields", [LLAMA, UNTIED], ids=["tied", "untied"])
def test_losses_and_gradients_are_those_of_plain_pytorch(fields, groups):
    sizes = dict(hidden_size=24, num_attention_heads=6, num_query_groups=groups, ffn_hidden_size=20)
    run = built(tiny_config(1, init_method_std=0.2, **fields | sizes))
    tokens = torch.randint(0, 100, (3, run.config.seq_length + 1), generator=torch.Generator().manual_seed(9))
    batch = run.model.micro_batch(tokens[:, :-1], tokens[:, 1:])
    run.zero.zero_grad()
    loss = run.executor.run(iter([batch]), 1, 1.0)
    ours = {p.spec.name: p.grad.clone() for p in run.model.parameters()}
    for p in run.model.parameters():
        p.grad = None
    losses = plain_llama(run, tokens[:, :-1], tokens[:, 1:])
    losses.mean().backward()
    with torch.no_grad():
        assert torch.allclose(run.model(batch), losses, rtol=1e-12)
    assert torch.allclose(loss, losses.mean(), rtol=1e-12)
    for p in run.model.parameters():
        same_tensor(f"the gradient of {p.spec.name}", ours[p.spec.name], p.grad)


def test_repeated_keys_and_values_are_those_of_the_groups(monkeypatch):
    """On some GPUs PyTorch's attention takes no groups."""
    shapes, found = [(2, 8, 4, 6), (2, 8, 2, 6), (2, 8, 2, 6)], []
    for takes_groups in (True, False):
        monkeypatch.setattr(reference, "takes_groups", lambda *_, takes_groups=takes_groups: takes_groups)
        inputs = [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        y = reference.attention(*inputs)
        y.square().sum().backward()
        found.append([y, *(x.grad for x in inputs)])
    assert all(torch.allclose(ours, theirs, rtol=1e-12) for ours, theirs in zip(*found, strict=True))


def test_derivatives_of_the_operations():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.linspace(0.5, 2, 6, dtype=torch.float64).requires_grad_()
    q = torch.randn(2, 3, 2, 4, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda x, weight: reference.RMSNorm.apply(x, weight, 0.1), (x, weight))
    assert torch.autograd.gradcheck(reference.swiglu, x)
    assert torch.autograd.gradcheck(lambda q: reference.rotate(q, torch.arange(3, 6), 50.0), q.requires_grad_())
    assert torch.autograd.gradcheck(lambda q: TokensForHeads.apply(q, 2, 1, Mesh().cp), q)


def test_generation_with_a_cache_has_the_logits_of_the_whole_text():
    run, ids = built(tiny_config(1, init_method_std=0.2, **UNTIED)), torch.arange(8)[None]
    caches = [[] for _ in range(run.config.num_layers)]
    with torch.no_grad():
        whole = run.model(run.model.micro_batch(ids))
        parts = [run.model(run.model.micro_batch(ids[:, :3], caches=caches))]
        for i in range(3, 8):
            parts.append(run.model(run.model.micro_batch(ids[:, i : i + 1], start=i, caches=caches)))
    same_tensor("logits", torch.cat(parts), whole)


def test_a_step_with_triton_is_a_step_with_pytorch():
    """On the CPU in Triton's interpreter. Heads of queries share keys and values."""
    pytest.importorskip("triton")
    sizes = dict(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, seq_length=16)
    fields = UNTIED | sizes | dict(dropout=0.1, global_batch_size=2, micro_batch_size=2, dtype="fp32")
    steps = []
    for kernels in ("torch", "triton"):
        run = built(tiny_config(1, kernels=kernels, **fields))
        steps.append(train.train_step(run, tiny_batches(run)).read())
    assert steps[1].loss == pytest.approx(steps[0].loss, rel=1e-6)
    assert steps[1].grad_norm == pytest.approx(steps[0].grad_norm, rel=1e-5)


# --- a file of one's own ----------------------------------------------------------------------------------------------


def guides_model():
    """Return model.py with the edits of GUIDE.md: - lines become + lines, + lines alone come above LayerNorm."""
    root = Path(__file__).parent.parent
    diff = re.search(r"(?s)## Change the model.*?```diff\n(.*?)```", (root / "GUIDE.md").read_text("utf-8"))[1]
    source = (root / "model.py").read_text("utf-8")
    for old, new in re.findall(r"(?m)(^-.*\n)?((?:^\+.*\n)*)", diff):
        old, new = (re.sub("(?m)^[-+]", "", lines) for lines in (old, new))
        if not old + new:
            continue
        place = old or "class LayerNorm"
        assert source.count(place) == 1, place
        source = source.replace(place, new + ("" if old else f"\n\n{place}"))
    return source


@contextlib.contextmanager
def with_mine(folder):
    """mine.py can be imported from the folder."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.modules.pop("mine", None)


def test_the_guides_model_trains_in_layouts(workers, tmp_path, monkeypatch):
    """The edits of GUIDE.md fit to model.py, and the losses are those of one process."""
    (tmp_path / "mine.py").write_text(guides_model(), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    fields = dict(model="mine", optimizer="adamw", dropout=0.1)
    layouts = [dict(tp=2, sequence_parallel=True, zero=3), dict(cp=2, zero=2), dict(pp=2, schedule="zb-h1", zero=1)]
    for layout in layouts:
        config = tiny_config(2, **fields | layout)
        configuration.check(config, 4)
        check_layout(workers, 4, config, change=partial(with_mine, str(tmp_path)))
    names = Model(config, Mesh().tp).specs()
    assert "embedding.position" not in names and "head.ln.bias" not in names
    sys.modules.pop("mine", None)
