"""`testing/letters.py` accepts our models, and names the line of an edit that is wrong for tp > 1."""

import contextlib
import linecache
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

import model
import reference
from errors import UserError
from testing import letters
from testing.judging import replaced
from testing.points import LLAMA
from testing.tiny import tiny_config

PROJ, OVER = "        self.proj = Row", "        if self.cp:  # q"
OUT, LAST = (
    "        return self.proj(y.reshape(len(batch.ids), -1))",
    "        return self.ops.add_(y, x, self.mlp.bias, drop2)",
)
Q_NORM = (PROJ, "        self.norm = ParamSpec(f'{name}.norm', (c.head_size,), mean=1.0)\n" + PROJ)
RMS_NORM = (OVER, "        q = nn.functional.rms_norm(q, (self.head_size,), self.norm)\n" + OVER)
SUMMED = "        object.__setattr__(self.norm, 'partial', True)\n"
EDITS = {  # name: (line of the code that is named, words of the message, [(old, new)])
    "a replicated weight inside a pair": (
        "q = nn.functional.rms_norm(q", "rms_norm of V [2, 8, 8, 4] and I [4]: each rank has only", [Q_NORM, RMS_NORM]
    ),
    "x used inside a pair": (
        "(x @ self.gate.T)", "matmul of I [16, 32] and V [32, 32]", [
            (PROJ, "        self.gate = ParamSpec(f'{name}.gate', (h, h), 0, std=std)\n" + PROJ),
            (OUT, "        y = y.reshape(len(batch.ids), -1) * (x @ self.gate.T)\n        return self.proj(y)"),
        ],
    ),
    "x added to the inputs of proj": (
        "y = y + x.mean()", "add of V [2, 8, 8, 4] and I []", [(OUT, "        y = y + x.mean()\n" + OUT)]
    ),
    "random numbers": (
        "nn.functional.dropout(y)", "dropout of V", [(OUT, "        y = nn.functional.dropout(y)\n" + OUT)]
    ),
    "a mean over a rank's heads": (
        "y = y - y.mean(2, keepdim=True)", "mean of V [2, 8, 4, 4]", [
            (OUT, "        y = y - y.mean(2, keepdim=True)\n" + OUT)
        ],
    ),
    "a softmax over a rank's heads": (
        "y = y.softmax(2)", "softmax of V [2, 8, 4, 4]", [(OUT, "        y = y.softmax(2)\n" + OUT)]
    ),
    "a norm over all heads of a rank": (
        "rms_norm(y, y.shape[-2:])", "rms_norm of V", [
            (OUT, "        y = nn.functional.rms_norm(y, y.shape[-2:])\n" + OUT)
        ],
    ),
    "dropout of cut columns": (
        "Dropout.apply(x, *drop)", "Dropout of V [16, 16]", [
            (OUT, "        y = self.ops.dropout(y.reshape(len(batch.ids), -1), batch.drop(1, 9))\n" + OUT)
        ],
    ),
    "a weight of another unit": (
        "x + self.others[0].weight", "add of I [16, 32] and I [32]: a weight of another unit", [
            ("        _, x = self.norm(x)", "        _, x = self.norm(x)\n        x = x + self.others[0].weight"),
            ("    return [Embedding(", "    head.others = (blocks[0].ln1,)\n    return [Embedding("),
        ],
    ),
    "a head's number": (
        "y * torch.arange(", "mul of V [2, 8, 4, 4]", [
            (OUT, "        y = y * torch.arange(1, 1 + y.shape[2])[:, None]\n" + OUT),
        ],
    ),
}  # fmt: skip
RIGHT = {
    "a partial gradient": [(PROJ, Q_NORM[1].replace(PROJ, SUMMED + PROJ)), RMS_NORM],
    "a norm of each head": [(OUT, "        y = nn.functional.rms_norm(y, y.shape[-1:])\n" + OUT)],
    "a norm between the pairs": [(LAST, "        x = nn.functional.rms_norm(x, x.shape[-1:])\n" + LAST)],
    "a scale of the residual stream": [
        (PROJ, "        self.scale = ParamSpec(f'{name}.scale', (h,), mean=1.0)\n" + PROJ),
        (LAST, "        x = x * self.scale\n" + LAST),
    ],
    "a scalar": [
        (PROJ, "        self.scale = ParamSpec(f'{name}.scale', (), mean=1.0)\n" + PROJ),
        (LAST, "        y = y * self.scale\n" + LAST),
    ],
    "dropout": [(LAST, "        y = self.ops.dropout(y, batch.drop(1, 9))\n" + LAST)],
}


@contextlib.contextmanager
def edited(edits):
    """Make an edited model.py, for --model=edited."""
    text, name = replaced(Path(model.__file__).read_text("utf-8"), edits), str(letters.ROOT / "edited.py")
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    module = ModuleType("edited")
    with mock.patch.dict("sys.modules", edited=module):
        exec(compile(text, name, "exec"), vars(module))
        yield tiny_config(1, model="edited")


FIELDS = [{}, dict(dropout=0.1), dict(activation="relu"), LLAMA, LLAMA | dict(untie_embeddings_and_output_weights=True)]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_our_model_is_right(fields):
    assert letters.findings(tiny_config(1, **fields)) == []


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_edit_is_right(name):
    with edited(RIGHT[name]) as config:
        assert letters.findings(config) == []


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_edit_is_named_with_its_line(name):
    code, words, edits = EDITS[name]
    with edited(edits) as config:
        found = letters.findings(config)
    assert found and code in found[0] and words in found[0] and found[0].startswith("edited.py:"), found


def test_a_loss_of_a_ranks_own_columns_is_wrong():
    losses = reference.cross_entropy_

    def smoothed(logits, *rest):
        mean = logits.mean(1)
        return losses(logits, *rest) - 0.1 * mean

    with mock.patch.object(reference, "cross_entropy_", smoothed):
        (found,) = letters.findings(tiny_config(1))
    assert "losses differ between the tp ranks" in found and "losses(logits, *rest) - 0.1 * mean" in found


@pytest.mark.parametrize(
    "what, fields",
    [
        ("num_attention_heads = 3", dict(num_attention_heads=3, hidden_size=12)),
        ("num_query_groups = 1", LLAMA | dict(num_query_groups=1)),
    ],
)
def test_heads_that_two_ranks_cannot_share_are_refused(what, fields):
    with pytest.raises(UserError, match=f"{what} is not a multiple of tp = 2"):
        letters.findings(tiny_config(1, **fields))
