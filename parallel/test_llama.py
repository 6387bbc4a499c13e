"""Llama on one process. Its logits are those of transformers (test_convert.py), its gradients are finite differences
(test_layouts.py, which has it in its grid, too)."""

import contextlib
import re
import sys
from functools import partial
from pathlib import Path

import torch

import config as configuration
import reference
from check import generation
from parallel.mesh import Mesh
from parallel.units import Model
from testing.points import LLAMA
from testing.record import check_layout
from testing.tiny import drawn, tiny_config

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
    assert not generation(tiny_config(1, init_method_std=0.2, **UNTIED))


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
