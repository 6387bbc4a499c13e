"""A mistake ends a command with one line and code 2. A damaged file does, or is no obstacle."""

import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from errors import exit_on_user_error
from recovery import checkpoint
from testing.tiny import write_index
from tokenizer import load_tokenizer

HERE = Path(__file__).parent

SIZES = "num_layers=1 hidden_size=16 vocab_size=257 num_attention_heads=2 seq_length=16 micro_batch_size=2"
RUN = "global_batch_size=4 eval_iters=1 log_interval=1 train_iters=2 data_dir='data' out_dir='run'"
COMMANDS = [  # (module, words, files that it reads)
    ("prepare", "texts --tokenizer=bytes --out=new --text_key=text", "texts/a.txt texts/c.jsonl"),
    ("prepare", "texts --tokenizer=bytes --out=data --text_key=text", "data/meta.json"),
    ("train", "config.py --train_iters=3", "config.py data/meta.json data/train.bin run/step_2/index.json"),
    ("train", "config.py --train_iters=3", "run/step_2/head.ln.weight run/metrics.jsonl"),
    ("generate", "run --max_tokens=2", "run/step_2/index.json run/step_2/head.ln.bias"),
    ("convert", "to_hf run --out=new", "run/step_2/index.json run/step_2/head.ln.bias"),
    ("plan", "config.py --gpus=2 --device=a100-80g", "config.py"),
    ("accounts.traffic", "config.py --ranks=2", "config.py"),
    ("accounts.draw", "--trace=trace.json", "trace.json"),
    ("accounts.curve", "run", "run/metrics.jsonl"),
]
DAMAGE = {
    "removed": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one byte": lambda path: path.write_bytes(b"\x9c" + path.read_bytes()[1:]),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "a list": lambda path: path.write_bytes(b"[]"),
    "null": lambda path: path.write_bytes(b"null"),
    "another object": lambda path: path.write_bytes(b'{"a": {"b": 1}}'),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Texts, a data set, a configuration, a run with a checkpoint and a trace, and its model for transformers."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("template")
    (folder / "texts").mkdir()
    (folder / "texts/a.txt").write_text("some words " * 40)
    (folder / "texts/c.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(30)))
    shutil.copytree(HERE.parent / "configs", folder / "configs")
    (folder / "config.py").write_text(f"{SIZES} {RUN}".replace(" ", "\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for module, words in (
            ("prepare", "texts --out=data --tokenizer=bytes --split=8,1,1"),
            ("train", "config.py --trace=trace.json"),
            ("convert", "to_hf run --out=there"),
        ):
            patch.setattr(sys, "argv", [module, *words.split()])
            importlib.import_module(module).main()
    return folder


def end_well(template, tmp_path, monkeypatch, capfd, module, words, damage=lambda: None):
    """Run a command in a copy of the template. Return the line of its mistake, or ""."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *words])
    damage()
    load_tokenizer.cache_clear()
    capfd.readouterr()
    try:
        exit_on_user_error(importlib.import_module(module).main)
    except SystemExit as stop:
        errors = [line for line in capfd.readouterr().err.splitlines() if line and "/s]" not in line]  # no bars
        assert stop.code == 2 and len(errors) == 1 and errors[0].startswith("error: "), errors
        return errors[0].removeprefix("error: ")
    return ""


FILES = [(module, words.split(), file) for module, words, files in COMMANDS for file in files.split()]


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("module, words, file", FILES, ids=[f"{m}-{f}" for m, _, f in FILES])
def test_a_damaged_file_is_one_line_or_no_obstacle(template, tmp_path, monkeypatch, capfd, module, words, file, how):
    end_well(template, tmp_path, monkeypatch, capfd, module, words, lambda: DAMAGE[how](Path(file)))


@pytest.mark.parametrize("wrong", ["--foo=1", "--seed", "--gpus=0", "missing", "-5", "--num-layers=x", "--", "\udcff"])
@pytest.mark.parametrize("module, words", [row[:2] for row in COMMANDS])
def test_a_wrong_word_is_one_line_or_no_obstacle(template, tmp_path, monkeypatch, capfd, module, words, wrong):
    end_well(template, tmp_path, monkeypatch, capfd, module, [*words.split(), wrong])
    end_well(template, tmp_path, monkeypatch, capfd, module, [wrong, *words.split()[1:]])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="macOS has no /dev/full")
@pytest.mark.parametrize("module, words", [COMMANDS[i][:2] for i in (0, 2, 5)])
def test_a_full_disk_under_stdout_costs_no_product(template, tmp_path, monkeypatch, capfd, module, words):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert not end_well(template, tmp_path, monkeypatch, capfd, module, words.split())


# --- mistakes.txt -----------------------------------------------------------------------------------------------------


def put_in_place(deeds):
    """Do what the second column of mistakes.txt says."""
    for verb, _, words in (deed.partition(" ") for deed in filter(None, deeds.split(" ; "))):
        path, _, text = words.partition(" ")
        Path(path).parent.mkdir(exist_ok=True)
        if verb == "rm":
            (shutil.rmtree if Path(path).is_dir() else os.unlink)(path)
        elif verb == "copy":
            shutil.copytree(path, text)
        elif verb == "cut":
            os.truncate(path, int(text))
        elif verb == "write":
            Path(path).write_text(text + "\n")
        elif verb == "edit":
            before, (old, new) = Path(path).read_text(), text.split(" -> ")
            assert old in before, before
            Path(path).write_text(before.replace(old, new))
        elif verb == "index":  # a changed index has its right sum
            keys, value = words.split(" = ")
            *outer, last = (int(key) if key.isdigit() else json.loads(f'"{key}"') for key in keys.split(" "))
            index = table = checkpoint.read_index("run/step_2")
            for key in outer:
                table = table[key]
            table[last] = json.loads(value)
            write_index(Path("run/step_2"), index)
        elif verb == "weights":  # with pickle, which writes also what is no tensor
            t = load_file(f"{path}/model.safetensors")
            exec(text, {"t": t, "torch": torch})
            torch.save(t, f"{path}/pytorch_model.bin")
            os.unlink(f"{path}/model.safetensors")
        else:
            {"pipe": os.mkfifo, "mkdir": os.mkdir}[verb](path)


ROW = re.compile(r"(\w\S*) (.*?) \| ?(.*?) ?\| (.+)")
MISTAKES = [*map(ROW.fullmatch, (HERE / "mistakes.txt").read_text("utf-8").splitlines())]


@pytest.mark.parametrize("row", [row.groups() for row in MISTAKES if row], ids=" ".join)
def test_a_mistake_is_this_line(template, tmp_path, monkeypatch, capfd, row):
    module, words, deeds, line = row
    monkeypatch.setattr("train.train_step", None)  # nothing is trained before it
    module = "bench.__main__" if module == "bench" else module
    said = end_well(template, tmp_path, monkeypatch, capfd, module, words.split(), lambda: put_in_place(deeds))
    assert re.fullmatch(re.escape(line).replace(r"\.\.\.", ".*"), said), said
    assert module == "train" or not Path("new").exists(), "a refused command has written something"
