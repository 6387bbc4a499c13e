"""check.py finds mistakes in a changed model, and says where. Each edit is made in a copy of the project."""

import contextlib
import runpy
from types import SimpleNamespace
from unittest import mock

import pytest

import check
import config
import reference
from conftest import needs_git
from model import Block, Head, LayerNorm
from testing.judging import ROOT, copied, replaced, run
from testing.tiny import refusal, stirred, tiny_config, write_tokens, wrong_gradients

TINY = "num_layers = 2\nhidden_size = 32\nnum_attention_heads = 8\nseq_length = 8\nvocab_size = 100\n"


def checked(*options, edits=()):
    """Run check.py in a copy with (file, old, new) edits. Return (exit code, its lines after the first)."""
    files = {"my_config.py": TINY}
    for file, old, new in edits:
        files[file] = replaced(files.get(file) or (ROOT / file).read_text("utf-8"), [(old, new)])
    with copied(files, changes=True) as folder:
        code, output, errors = run(folder, ["check.py", "my_config.py", *options])
    assert "Traceback" not in errors, errors
    return code, output.splitlines()[1:]


@needs_git
@pytest.mark.slow
def test_the_unchanged_model_passes():
    code, lines = checked()
    count = sum(line.startswith("ok ") for line in lines)
    assert (code, count) == (0, len(lines)) and count == len(check.CHECKED) + 14, lines


@needs_git
@pytest.mark.slow
def test_options_choose_one_layout():
    code, lines = checked("--tp=2", "--zero=1")
    assert code == 0 and [line.split(maxsplit=1) for line in lines] == [
        ["ok", "gradients of one process: finite differences"],
        ["ok", "tp=2 zero=1"],
        ["ok", "a resumed run, tp=2 zero=1"],
    ]
    code, lines = checked("--tp=3")
    assert code == 1 and lines[1] == "refused tp=3" and "num_attention_heads" in lines[2], lines


def test_the_size_shrinks_and_the_rules_stay():
    """The width of a head and the padding of the vocabulary stay as they are."""
    c = check.small(tiny_config(1, hidden_size=12288, num_attention_heads=96, vocab_size=50257, seq_length=2048))
    padding = c.padded_vocab_size - c.vocab_size
    assert (c.hidden_size, c.head_size, c.seq_length, padding) == (768, 128, 80, 50304 - 50257)
    llama = dict(model="llama", hidden_size=1536, num_attention_heads=12, ffn_hidden_size=48)
    c = check.small(tiny_config(1, num_layers=9, vocab_size=50257), ["num_layers", "vocab_size"])
    assert (c.num_layers, c.vocab_size) == (9, 50257), "the command line does not beat the cut"
    for groups, smaller in ((4, 2), (12, 6), (0, 0)):
        c = check.small(tiny_config(1, num_query_groups=groups, **llama))
        assert (c.num_attention_heads, c.num_query_groups) == (6, smaller)
        config.check(c, 1)


def test_every_field_but_check_pys_own_is_the_readers():
    """A field that a reader adds to Config is none of OWN."""
    assert {*check.OWN.split()} <= vars(config.Config()).keys()
    c = tiny_config(1, own="", adam_beta2=0.5, lr_decay_style="linear")
    c.z_loss = 0.5
    with mock.patch.object(config, "Config", SimpleNamespace):
        assert check.small(c).z_loss == check.small(c).adam_beta2 == 0.5


def test_the_traceback_of_a_rank_is_one_line():
    """The lines of the reader's files stand in it, not those of the tools."""
    frames = [f'  File "{ROOT}/{file}", line 3, in name\n    x\n' for file in ("testing/workers.py", "model.py")]
    text = f"rank 1 of 2:\nTraceback (most recent call last):\n{''.join(frames)}ZeroDivisionError: division by zero\n"
    assert check.in_one_line(text).startswith("rank 1 of 2: ZeroDivisionError: division by zero (model.py:3: ")
    without = text.replace(": division by zero", "").replace("ZeroDivision", "Assertion")  # `assert x`
    assert check.in_one_line(without).startswith("rank 1 of 2: AssertionError (model.py:3: ")
    assert check.in_one_line("two lines\nof a cause") == "two lines\nof a cause"


ATTENTION = next(line for line in (ROOT / "model.py").read_text("utf-8").splitlines(True) if "q, k, v = " in line)
NORM = "torch.stack([loss, norm, lr, skip, stop, apart])"
SUMS = "        self.sum_over_holders()\n        for bucket in self.in_order:\n"
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
    "a loop that logs another loss scale": (
        ["--zero=1"],
        [("log.py", '"loss_scale": last.loss_scale,', '"loss_scale": last.loss_scale / run.mesh.world.size,')],
        "look at the loop",
    ),
    "copies that drift apart": (
        ["--tp=2"],
        [("parallel/zero.py", SUMS, f"{SUMS}            bucket.grad.shard.mul_(1 + 1e-13 * self.mesh.rank)\n")],
        "WRONG tp=2 copies differ: ",
    ),
    "a gradient that is wrong everywhere": (
        ["--tp=2"],
        [("parallel/tensor.py", "dx = dy @ w", "dx = 1.01 * dy @ w")],
        "WRONG gradients of one process: finite differences wrong in",
    ),
}  # fmt: skip


@needs_git
@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found_and_named(name):
    options, edits, words = EDITS[name]
    code, lines = checked(*options, edits=edits)
    assert code == 1 and words in " ".join(" ".join(lines).split()), "\n".join(lines)


CHECKS = "resumed overflow first_losses device narrow loss_scale frozen update_rule kernels".split()


@pytest.mark.parametrize("name", CHECKS)
def test_one_process_passes(tmp_path, name):
    """testing/defects.txt plants mistakes that these checks find."""
    c = check.small(tiny_config(1))
    c.data_dir = write_tokens(tmp_path / "data", val=12 * c.seq_length + 1)
    here = SimpleNamespace(folder=tmp_path, run=lambda ranks, function, *arguments: [function(*arguments)])
    check.RUNS.clear()
    arguments = dict(resumed=(here, c, 1), overflow=(here, c), first_losses=(here, c), kernels=(c, "auto"))
    cause = getattr(check, name)(*arguments.get(name, [c]))
    assert not cause, cause


def test_a_weight_that_forward_does_not_use_is_named(monkeypatch):
    """A RowParallelLinear whose bias is added nowhere. A frozen weight has no gradient either, on purpose."""
    norm = LayerNorm.forward
    without = lambda self, x, y=None, bias=None, drop=None: norm(self, x, y, None, drop)  # noqa: E731
    monkeypatch.setattr(LayerNorm, "forward", without)
    c = check.small(tiny_config(1))
    assert "block0.proj.bias, block1.proj.bias: no gradient: does forward" in refusal(check.frozen, c)
    build = Block.__init__

    def freezes(self, *arguments):
        build(self, *arguments)
        self.proj.bias.frozen = True

    monkeypatch.setattr(Block, "__init__", freezes)
    assert not check.frozen(c)


def test_a_value_that_forward_keeps_is_named(monkeypatch):
    """Without its detach, the kept value has a graph that the second backward can't use."""
    forward, stops = Head.forward, [True]

    def keeps(self, x, batch):
        self.kept = 0.9 * getattr(self, "kept", 0.0) + (x.detach() if stops else x).square()
        return forward(self, x + self.kept, batch)

    @contextlib.contextmanager
    def without_detach(file):
        stops.clear()
        yield {"a place"}

    monkeypatch.setattr(Head, "forward", keeps)
    monkeypatch.setattr(check, "without_detach", without_detach)
    assert "or a value that forward keeps?" in check.finite_differences(check.small(tiny_config(1)))


def test_an_older_triton_is_skipped(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", "3.6.0")
    with pytest.raises(pytest.skip.Exception, match=r"required is: '3\.7'"):
        runpy.run_path(ROOT / "testing/interpreted.py")
    assert not check.show("kernels", check.kernels, None, "auto")


def test_generation_with_a_part_in_float32_is_skipped(monkeypatch):
    attention = reference.attention
    in_float32 = lambda q, k, v, cache=None: attention(q.float(), k.float(), v.float(), cache).type_as(q)  # noqa: E731
    monkeypatch.setattr(reference, "attention", in_float32)
    assert "wide_dtype" in refusal(check.generation, check.small(tiny_config(1)))


def test_a_gradient_that_is_slightly_wrong_is_not_called_rounded(monkeypatch):
    gelu_ = reference.gelu_
    monkeypatch.setattr(reference, "gelu_", lambda y, bias: 1.003 * (out := gelu_(y, bias)) - 0.003 * out.detach())
    assert wrong_gradients(stirred(check.small(tiny_config(1)))).startswith("wrong in ")


PROJ = "        self.proj = Row"
RIGHT = [  # keys of their own, whose bias has no gradient; a norm of each query, in float32; a scalar as a weight
    (
        "model.py",
        PROJ,
        '        self.key = ColumnParallelLinear(f"{name}.key", (h, h), std, c, tp)\n'
        '        self.scale = ParamSpec(f"{name}.scale", (), mean=0.5)\n' + PROJ,
    ),
    (
        "model.py",
        ATTENTION,
        ATTENTION
        + "        q, k = q.float(), self.key(x).view(k.shape)\n"
        + "        q = (q / (q.pow(2).mean(3, keepdim=True) + 1e-5).sqrt()).type_as(k)\n",
    ),
    ("model.py", "y = self.attention(y, batch)\n", "y = self.attention(y, batch) * self.scale\n"),
]


LOSSES = [("reads_losses = False", "reads_losses = True"), ("return losses(x", "y = losses(x")]
ON_PURPOSE = {  # last lines of `Head.forward`: the word and the reason
    "(1 - (-y).exp()).square().detach() * y": "that of the loss without model.py:",
    "y + 0.1 * y.square() if torch.is_grad_enabled() else y": "in training, and",
}


@needs_git
@pytest.mark.slow
@pytest.mark.parametrize("line", ON_PURPOSE)
def test_what_may_be_on_purpose_is_changed(line):
    """A stopped gradient, and a term of the training alone."""
    place = "self.reads_losses)\n"
    edits = *LOSSES, (place, f"{place}        return {line}\n")
    code, lines = checked("--tp=2", edits=[("model.py", *edit) for edit in edits])
    assert code == 0 and lines[0].startswith("changed gradients") and ON_PURPOSE[line] in lines[1], "\n".join(lines)


@needs_git
@pytest.mark.slow
def test_right_edits_pass_on_every_layout():
    """There is no export any more: Hugging Face's GPT-2 is another model. Finite differences need float64."""
    code, lines = checked(edits=RIGHT)
    others = [line for line in lines if not line.startswith(("ok ", "   "))]
    assert code == 0 and [line.split()[0] for line in others] == ["skipped", "changed"], "\n".join(lines)
    assert "wide_dtype" in " ".join(lines)
