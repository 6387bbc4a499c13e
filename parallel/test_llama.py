"""Llama on one process. Its logits are those of transformers (test_convert.py), its gradients are finite differences
(test_layouts.py, which has it in its grid, too)."""

import contextlib
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import config as configuration
import reference
import train
from parallel.mesh import Mesh
from parallel.units import Model
from testing.compare import same_tensor
from testing.points import LLAMA
from testing.record import check_layout
from testing.tiny import built, drawn, tiny_batches, tiny_config

UNTIED = LLAMA | dict(untie_embeddings_and_output_weights=True, rotary_base=77.0)

# --- one process ------------------------------------------------------------------------------------------------------


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
