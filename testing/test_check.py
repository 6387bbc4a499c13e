"""check.py finds mistakes in a changed model, and says where. Each edit is made in a copy of the project."""

import os
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch

import check
import reference
import train
from conftest import needs_git
from model import GPT, Block, Head
from parallel import optimizer
from parallel.tensor import ParamSpec
from parallel.zero import Zero
from testing.defects import ROOT, copy_tree
from testing.tiny import tiny_config, write_tokens

pytestmark = needs_git

TINY = "num_layers = 2\nhidden_size = 32\nnum_attention_heads = 8\nseq_length = 8\nvocab_size = 100\n"


def checked(folder, *options, edits=()):
    """Run check.py in a copy with (file, old, new) edits. Return (exit code, its lines after the first)."""
    copy_tree(folder)
    (folder / "my_config.py").write_text(TINY)
    for file, old, new in edits:
        text = (folder / file).read_text("utf-8")
        assert text.count(old) == 1, (file, old, text.count(old))
        (folder / file).write_text(text.replace(old, new), "utf-8")
    command = [sys.executable, "check.py", "my_config.py", *options]
    environment = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()[1:]


@pytest.mark.slow
def test_the_unchanged_model_passes(tmp_path):
    code, lines = checked(tmp_path)
    count = sum(line.startswith("ok ") for line in lines)
    assert (code, count) == (0, len(lines)) and count == len(check.CHECKED) + 13, lines


@pytest.mark.slow
def test_options_choose_one_layout(tmp_path):
    code, lines = checked(tmp_path, "--tp=2", "--zero=1")
    assert code == 0 and [line.split(maxsplit=1) for line in lines] == [
        ["ok", "gradients of tp ranks, by types (testing/letters.py)"],
        ["ok", "gradients of one process: finite differences"],
        ["ok", "tp=2 zero=1"],
    ]
    code, lines = checked(tmp_path, "--tp=3")
    assert code == 1 and lines[2] == "refused tp=3" and "num_attention_heads" in lines[3], lines


def test_the_size_shrinks_and_the_rules_stay():
    """The width of a head and the padding of the vocabulary stay as they are."""
    c = check.small(tiny_config(1, hidden_size=12288, num_attention_heads=96, vocab_size=50257, seq_length=2048))
    padding = c.padded_vocab_size - c.vocab_size
    assert (c.hidden_size, c.head_size, c.seq_length, padding) == (768, 128, 80, 50304 - 50257)


def test_the_traceback_of_a_rank_is_one_line():
    """The lines of the reader's files stand in it, not those of the tools."""
    frames = [f'  File "{ROOT}/{file}", line 3, in name\n    x\n' for file in ("testing/workers.py", "model.py")]
    text = f"rank 1 of 2:\nTraceback (most recent call last):\n{''.join(frames)}ZeroDivisionError: division by zero\n"
    assert check.in_one_line(text).startswith("rank 1 of 2: ZeroDivisionError: division by zero (model.py:3: ")
    without = text.replace(": division by zero", "").replace("ZeroDivision", "Assertion")  # `assert x`
    assert check.in_one_line(without).startswith("rank 1 of 2: AssertionError (model.py:3: ")
    assert check.in_one_line("two lines\nof a cause") == "two lines\nof a cause"


ATTENTION = next(line for line in (ROOT / "model.py").read_text("utf-8").splitlines(True) if "q, k, v = (" in line)
NORM = "torch.stack([loss, norm, lr, skip, stop, apart])"
EDITS = {  # name: (options, edits, words of the output)
    "a mean over a rank's own heads": (
        ["--tp=2"],
        [("model.py", ATTENTION, ATTENTION + "        q = q - q.mean(2, keepdim=True)\n")],
        "WRONG tp=2 Forward is right up to block0.qkv, and first differs in block0.proj",
    ),
    "random numbers that are not counter-based": (
        ["--tp=2"],
        [("model.py", ATTENTION, ATTENTION + "        q = nn.functional.dropout(q, 0.1)\n")],
        "WRONG gradients of one process: finite differences a micro-batch has two losses",
    ),
    "a logged norm that is a rank's part": (
        ["--zero=1"],
        [("train.py", NORM, NORM.replace("norm", "zero.squared_norm()"))],
        "WRONG zero=1 First difference: the gradient norm of step 1",
    ),
    "a forgotten wait": (
        ["--zero=3"],
        [("parallel/zero.py", "        if self.gathering:\n            self.gathering.wait()\n", "")],
        "WRONG zero=3",
    ),
    "a schedule with an action in a wrong place": (
        ["--pp=2"],
        [("parallel/schedules.py", "warmup = stages - 1 - rank", "warmup = rank")],
        "refused pp=2 1f1b: deadlock",
    ),
    "a loop that counts its own samples": (
        ["--zero=1"],
        [("log.py", '"loss_scale": last.loss_scale,', '"loss_scale": last.loss_scale / run.mesh.world.size,')],
        "look at the loop",
    ),
    "a gradient that is missing everywhere": (
        ["--tp=2"],
        [("model.py", ATTENTION, ATTENTION + "        v = v + (v - v.detach()) * 0.5\n")],
        "WRONG gradients of one process: finite differences wrong in",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found_and_named(tmp_path, name):
    options, edits, words = EDITS[name]
    code, lines = checked(tmp_path, *options, edits=edits)
    assert code == 1 and words in " ".join(" ".join(lines).split()), "\n".join(lines)


class Here:
    """One process: this one. It stands in for `testing/workers.py`."""

    def __init__(self, folder):
        self.folder = folder

    def run(self, ranks, function, *arguments):
        return [function(*arguments)]


def clamped(zero, finish=Zero.finish):
    finish(zero)
    for bucket in zero.in_order:
        bucket.grad.shard.clamp_(-1e-3, 1e-3)


def clipped_by_the_mean(run, batches, step=train.train_step):
    """A limit from the earlier norms, which a checkpoint does not have."""
    norms = vars(run).setdefault("norms", [1e-3])
    with mock.patch.object(run.config, "clip_grad", sum(norms) / len(norms)):
        pending = step(run, batches)
    norms.append(pending.read().grad_norm)
    return pending


def shifted(gpt, ids, targets=None, *rest, micro_batch=GPT.micro_batch, **fields):
    return micro_batch(gpt, ids, None if targets is None else targets.roll(-1, 1), *rest, **fields)


def shifted_in_the_head(head, x, batch, forward=Head.forward):
    return forward(head, x, batch if batch.targets is None else replace(batch, targets=batch.targets.roll(-1)))


def with_an_unused_weight(block, c, index, *rest, init=Block.__init__):
    init(block, c, index, *rest)
    block.unused = ParamSpec(f"block{index}.unused", (8, 8), std=0.02, decay=True)


def without_decay(weight, *rest, decay, **fields):
    optimizer.adamw(weight, *rest, decay=0.0, **fields)


def z_loss(logits, *rest, losses=reference.cross_entropy_):
    return 1e-4 * logits.logsumexp(1).square() + losses(logits, *rest)


PATCHES = {  # name: (check, what is patched, words of its line); a check of one process
    "a table on the CPU": (
        check.device,
        mock.patch.object(reference, "gelu", lambda x: x * torch.ones(len(x), 1)),
        "RuntimeError: Tensor on device cpu is not on the expected device meta",
    ),
    "a float64 factor": (
        check.narrow,
        mock.patch.object(reference, "gelu", lambda x: x * torch.ones(1, dtype=torch.float64)),
        "RuntimeError: expected m1 and m2 to have the same dtype",
    ),
    "a clip by value": (check.loss_scale, mock.patch.object(Zero, "finish", clamped), "times the gradient"),
    "a list in the run": (
        check.resumed,
        mock.patch.object(train, "train_step", clipped_by_the_mean),
        "a number of the run is in no checkpoint",
    ),
    "targets shifted twice": (
        check.first_loss,
        mock.patch.object(GPT, "micro_batch", shifted),
        "the file's next tokens",
    ),
    "targets shifted in the head": (
        check.first_loss,
        mock.patch.object(Head, "forward", shifted_in_the_head),
        "the token after the next one",
    ),
    "a weight that the loss does not read": (
        check.frozen,
        mock.patch.object(Block, "__init__", with_an_unused_weight),
        "block0.unused, block1.unused: no gradient, but the update moves it",
    ),
    "a rule that the fused kernel ignores": (
        check.update_rule,
        mock.patch.dict(optimizer.RULES, adamw=optimizer.RULES["adamw"]._replace(step=without_decay)),
        "`adamw_` of reference.py is not `adamw`",
    ),
    "a z-loss that the kernel does not have": (
        lambda c: check.kernels(c, "auto"),
        mock.patch.object(reference, "cross_entropy_", z_loss),
        "other loss",
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_change_on_one_process_is_found_and_named(tmp_path, capsys, monkeypatch, name):
    function, patch, words = PATCHES[name]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(check, "RUNS", {})
    c = check.small(tiny_config(1, vocab_size=100, clip_grad=0.0))
    c.data_dir = write_tokens(tmp_path / "data", val=20 * c.seq_length)
    given = [c] if function not in (check.resumed, check.first_loss) else [Here(tmp_path), c]
    check.show("before", function, *given)
    check.RUNS.clear()
    with patch:
        check.show("after", function, *given)
    before, _, after = capsys.readouterr().out.partition("WRONG   after")
    assert before == "ok      before\n" and words in " ".join(after.split()), before + after


RIGHT = [  # another activation; a norm of each head without a weight; a scaled residual
    (
        "model.py",
        ATTENTION,
        ATTENTION
        + "        v = v * nn.functional.silu(v)\n"
        + "        q, k = (x / (x.pow(2).mean(3, keepdim=True) + 1e-5).sqrt() for x in (q, k))\n",
    ),
    ("model.py", "y = self.attention(y, batch)\n", "y = self.attention(y, batch) * 0.5\n"),
]


@pytest.mark.slow
def test_right_edits_pass_on_every_layout(tmp_path):
    """There is no export any more: Hugging Face's GPT-2 is another model."""
    code, lines = checked(tmp_path, edits=RIGHT)
    assert code == 0 and "changed export to Hugging Face" in lines, "\n".join(lines)
