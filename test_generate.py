"""Test generate.py: the cache does not change the text, sampling is correct, and a checkpoint of tp=2 can be used."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import generate
import tokenizer
import train
from errors import UserError
from parallel.mesh import Mesh
from test_checkpoint import configured
from test_layouts import tiny_config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def model():
    run = train.build(tiny_config(1, init_method_std=0.3, max_position_embeddings=12), Mesh(), CPU)
    run.zero.initialize(1)
    return run.model


def greedy(model, ids, count):
    """Generate without a cache: run the whole text for each token. Beyond 12 positions, keep the last 6 tokens."""
    ids, context = list(ids), list(ids)
    for _ in range(count):
        if len(context) > 12:
            context = context[-6:]
        with torch.no_grad():
            token = int(model(model.micro_batch(torch.tensor([context])))[-1].argmax())
        ids.append(token)
        context.append(token)
    return ids


@pytest.mark.parametrize("prompt", [[7], [1, 2, 3, 4], list(range(30))])
def test_the_cache_changes_nothing(model, prompt):
    """Test also texts beyond the model's last position, and a prompt that is longer than the positions."""
    got = prompt + list(generate.generate(model, prompt, 25, temperature=0))
    if len(prompt) > 12:
        prompt, got = prompt[-6:], got[-31:]
    assert got == greedy(model, prompt, 25)


def drawn(top_k=0, top_p=1.0, temperature=1.0, count=400):
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    ids = [generate.draw(logits, temperature, top_k, top_p, generator) for _ in range(count)]
    return torch.bincount(torch.tensor(ids), minlength=4) / count


def test_sampling():
    p = torch.softmax(torch.tensor([0.0, 2.0, 1.0, -1.0]), 0)  # 0.087, 0.644, 0.237, 0.032
    assert torch.allclose(drawn(count=4000), p, atol=0.03)
    assert drawn(top_k=2)[[0, 3]].sum() == 0 and drawn(top_k=2)[2] > 0.15
    assert drawn(top_p=0.6).tolist() == [0, 1, 0, 0]
    assert drawn(top_p=0.7)[[0, 3]].sum() == 0 and drawn(top_p=0.7)[2] > 0.15
    assert drawn(temperature=0).tolist() == [0, 1, 0, 0] and drawn(temperature=0.1)[1] > 0.99
    assert drawn(temperature=100.0).min() > 0.15
    assert all(drawn(temperature=tiny)[1] == 1 for tiny in (1e-6, 1e-40, 5e-324))


@pytest.fixture(scope="module")
def trained(workers, tmp_path_factory):
    """Train a model of bytes for 100 steps on two processes, on a text that repeats itself."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("abcdefg" * 2000)
    command = [sys.executable, "prepare.py", str(folder / "text.txt"), "--tokenizer=bytes", f"--out={folder}/tokens"]
    subprocess.run(command, check=True, cwd=Path(__file__).parent, capture_output=True)
    config = configured(
        folder / "out", f"{folder}/tokens", vocab_size=257, train_iters=100, lr_decay_iters=100, lr=1e-2,
        clip_grad=1.0, tp=2, sequence_parallel=True, dropout=0.0, seq_length=16, dtype="fp32",
        global_batch_size=16, hidden_size=32,
    )  # fmt: skip
    workers.run(2, train_it, config)
    return folder / "out"


def train_it(config):
    train.run_training(config, Mesh(config.tp), CPU)


def written(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
    generate.main()
    return capsys.readouterr().out


def test_it_goes_on_as_it_was_taught(trained, capsys, monkeypatch):
    out = written(capsys, monkeypatch, trained, "--prompt", "cde", "--temperature=0", "--max_tokens=30")
    assert out == "cdefg" + "abcdefg" * 4 + "\n"


def test_seeds_and_samples(trained, capsys, monkeypatch):
    many = [trained, "--temperature=3", "--max_tokens=40", "--num_samples=2"]
    first = written(capsys, monkeypatch, *many)
    assert first == written(capsys, monkeypatch, *many) != written(capsys, monkeypatch, *many, "--seed=5")
    one, two = first.split("--- sample 2 of 2\n")
    assert one.startswith("--- sample 1 of 2\n") and one.removeprefix("--- sample 1 of 2\n") != two


def test_ids_that_are_no_text_are_never_drawn(tokens_dir, tmp_path):
    """The model has 300 ids, but the tokenizer `bytes` has 257. An untrained model gives all ids some probability."""
    train_it(configured(tmp_path, tokens_dir, vocab_size=300, train_iters=1, eval_iters=0))
    model, config, _ = generate.load_model(tmp_path, CPU)
    ids = list(generate.generate(model, [0], 1000, temperature=1000.0, generator=torch.Generator().manual_seed(0)))
    assert config.vocab_size == 300 and 250 < max(ids) < 257


def test_text_ends_at_its_end_and_has_whole_characters(trained, capsys, monkeypatch):
    ids = [*"é".encode(), *"日".encode(), 0xE6, ord("x"), tokenizer.load_tokenizer("bytes").eot_token, ord("b")]
    monkeypatch.setattr(generate, "generate", lambda *_: iter(ids))
    assert written(capsys, monkeypatch, trained) == "é日\N{REPLACEMENT CHARACTER}x\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "nowhere: there is no checkpoint"),
        (["x", "--temperature=-1"], "--temperature=-1.0: should be"),
        (["x", "--top_p=0"], "--top_p=0.0: should be"),
        (["x", "--max_tokens=0"], "--max_tokens=0: should be"),
        (["x", "--top_k=-1"], "--top_k=-1: should be"),
        (["x", f"--seed={2**63}"], f"--seed={2**63}: should be"),
        (["x", "--temperature=nan"], "--temperature=nan: should be"),
        (["x", "--topk=1"], "--topk: no such option; the nearest is --top_k"),
    ],
)
def test_mistakes(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    with pytest.raises(UserError) as error:
        generate.main()
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_model_is_one_line(value, temperature):
    with pytest.raises(UserError, match="the model's logits are not finite"):
        generate.draw(torch.tensor([0.0, value]), temperature, 0, 1.0, torch.Generator())
