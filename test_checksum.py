"""Test that no loader uses a checkpoint with a changed bit, in any kind of file. Test the sum itself.

`FLIPS=200 pytest test_checksum.py` flips 200 bits for each kind of file and layout instead of 12.
"""

import itertools
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import convert
import generate
import train
from config import check
from conftest import write_tokens
from errors import UserError
from parallel import checkpoint, checksum
from parallel.comm import gather_objects
from parallel.mesh import Mesh
from test_checkpoint import CPU, configured, go

FLIPS = int(os.environ.get("FLIPS", "12"))
BYTES = 8 * checksum.BLOCK


# --- the sum ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content():
    return np.frombuffer(random.Random(0).randbytes(2 * BYTES + 40), np.uint8)


def test_the_definition():
    words = np.array([3, 5], np.uint64)
    assert checksum.of_bytes(words) == (3 * int(checksum.TABLE[0]) + 5 * int(checksum.TABLE[1])) % 2**64
    later = checksum.of_bytes(words, BYTES)
    assert later == checksum.of_bytes(words) * checksum.G % 2**64
    assert (checksum.TABLE % 2 == 1).all() and len(set(checksum.TABLE.tolist())) == checksum.BLOCK


def test_pieces_add_up_to_the_whole(content):
    """A cut may lie at any byte: inside a word, at the end of a block, or beside another cut in the same word."""
    whole, dice = checksum.of_bytes(content), random.Random(1)
    for cuts in (1, 2, 30):
        edges = sorted([0, len(content), BYTES, BYTES + 3, *(dice.randrange(len(content)) for _ in range(cuts)), 5, 6])
        parts = [checksum.of_bytes(content[a:b], a) for a, b in itertools.pairwise(edges)]
        assert sum(parts) % 2**64 == whole


@pytest.mark.parametrize("stride", [8, 24, 1000, 1 << 14, BYTES - 8, BYTES, BYTES + 16, 20])
@pytest.mark.parametrize("offset", [0, 8 * 77, BYTES - 8, 4])
def test_rows_of_a_file_together_or_one_by_one(content, stride, offset):
    for n in (4, 8, min(stride, 48 << 10)):
        rows = content[: 40 * n].reshape(-1, n)
        one_by_one = sum(checksum.of_bytes(row, offset + i * stride) for i, row in enumerate(rows)) % 2**64
        assert checksum.of_rows(rows, offset, stride) == one_by_one


def test_a_gpus_operations_give_the_same_sum(content):
    words = torch.from_numpy(content.view(np.int64).copy())
    assert checksum.as_text(checksum.of_words(words)) == checksum.as_text(checksum.of_bytes(content))
    assert checksum.as_text(checksum.of_tensor(words)) == checksum.as_text(checksum.of_bytes(content))
    assert checksum.of_tensor(words[:0]) == 0


def test_any_change_of_one_word_changes_the_sum(content):
    words, dice = content.view(np.uint64).copy(), random.Random(2)
    whole = checksum.of_bytes(words)
    for place in (0, checksum.BLOCK - 1, checksum.BLOCK, len(words) - 1):
        for change in [*(1 << bit for bit in range(64)), *(dice.randrange(1, 1 << 64) for _ in range(20))]:
            words[place] ^= np.uint64(change)
            assert checksum.of_bytes(words[place : place + 1], 8 * place) != (
                checksum.of_bytes(content.view(np.uint64)[place : place + 1], 8 * place)
            )
            words[place] ^= np.uint64(change)
    assert checksum.of_bytes(words) == whole


@pytest.mark.parametrize("size", [8, 512, 4096])
def test_moved_and_lost_content_changes_the_sum(size):
    """Weights of 1.0 and 0.0 have few different bits. A move or a loss of a piece still changes the sum."""
    values = np.zeros(3 * BYTES // 4, np.float32)
    values[: size // 4] = 1.0
    moved = np.roll(values, BYTES // 4)
    sums = {checksum.of_bytes(x) for x in (values, moved, np.roll(values, size // 4), np.zeros_like(values))}
    assert len(sums) == 4


# --- flipped bits in files --------------------------------------------------------------------------------------------


def flip(path, place, bit):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An out_dir after three steps, and its data set. Both have tokenizer files, made up here."""
    data_dir = write_tokens(tmp_path_factory.mktemp("data"))
    for name in train.COPY:
        Path(data_dir, name).write_text(json.dumps({name: list(range(50))}))
    out = tmp_path_factory.mktemp("trained")
    go(configured(out, data_dir, train_iters=3, num_layers=3))
    return out, data_dir


KINDS = {
    "weights": lambda name: "moment" not in name and not name.endswith(".json"),
    "first moments": lambda name: name.endswith(".moment0"),
    "second moments": lambda name: name.endswith(".moment1"),
    "index": lambda name: name == "index.json",
    "tokenizer": lambda name: name in train.COPY,
}


def places(folder, kind, count):
    """Return `count` places [(file, byte, bit)]: first and last bytes, bytes beside cuts, and random ones."""
    dice, files = random.Random(kind), sorted(p for p in folder.iterdir() if KINDS[kind](p.name))
    found = []
    for i in range(count):
        path = files[i % len(files)] if i < len(files) else dice.choice(files)
        size = path.stat().st_size
        edges = [0, size - 1, size // 2, size // 2 - 1, size // 4, size // 3, dice.randrange(size)]
        found.append((path.name, edges[i % len(edges)], dice.randrange(8)))
    return found


def load_each(config, flips):
    """For each of `flips`, flip this bit, load the checkpoint on each rank, and flip it back. Return the messages."""
    run = train.build(config, Mesh(config.tp, config.pp), CPU)
    said, folder = [], checkpoint.find(config.out_dir)
    for name, place, bit in flips:
        if run.mesh.rank == 0:
            flip(folder / name, place, bit)
        gather_objects(None, run.mesh.world)
        try:
            train.restore(run, folder)
            said.append(None)
        except UserError as error:
            said.append(str(error))
        gather_objects(None, run.mesh.world)
        if run.mesh.rank == 0:
            flip(folder / name, place, bit)
        gather_objects(None, run.mesh.world)
    train.restore(run, folder)  # undamaged again
    return said


LAYOUTS = [
    (1, {}), (4, dict(tp=2, zero=1)), (4, dict(zero=3)), (4, dict(tp=4, sequence_parallel=True)),
    (4, dict(pp=2, zero=2)), (2, {}), (4, dict(pp=4, schedule="chimera")),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks, layout", LAYOUTS, ids=str)
def test_one_flipped_bit_anywhere_is_named_on_every_rank(workers, trained, tmp_path, ranks, layout, kind):
    out, data_dir = trained
    shutil.copytree(out, tmp_path / "run")
    config = configured(tmp_path / "run", data_dir, num_layers=3, **layout)
    check(config, ranks)
    flips = places(tmp_path / "run" / "step_3", kind, FLIPS)
    for said in workers.run(ranks, load_each, config, flips):
        for text, (name, *_) in zip(said, flips, strict=True):
            assert text and text.startswith(f"{tmp_path}/run/step_3/{name}: damaged") and "\n" not in text, (text, name)


def test_nothing_is_trained_on_a_damaged_checkpoint(trained, tmp_path):
    out, data_dir = trained
    shutil.copytree(out, tmp_path / "run")
    flip(tmp_path / "run/step_3/block0.qkv.weight.moment1", 9, 0)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"step_3/block0.qkv.weight.moment1: damaged: .*; use another checkpoint"):
        go(configured(tmp_path / "run", data_dir, num_layers=3))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    assert checkpoint.all_steps(tmp_path / "run") == [3]


def test_every_bit_of_the_index(trained, tmp_path):
    folder = shutil.copytree(trained[0] / "step_3", tmp_path / "step_3")
    data = (folder / "index.json").read_bytes()
    good = checkpoint.read_index(folder)
    for place in range(len(data)):
        bit = place % 8
        (folder / "index.json").write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        with pytest.raises(UserError, match=r"index.json: damaged"):
            checkpoint.read_index(folder)
    (folder / "index.json").write_bytes(data)
    assert checkpoint.read_index(folder) == good


@pytest.mark.parametrize("name", ["block1.fc1.weight", "index.json", "tokenizer.json"])
def test_generate_and_convert_use_no_damaged_file(trained, tokens_dir, tmp_path, name):
    if name.endswith("weight"):  # a run whose data set has no tokenizer files
        go(configured(tmp_path, tokens_dir, train_iters=3))
        folder = tmp_path / "step_3"
    else:
        folder = shutil.copytree(trained[0] / "step_3", tmp_path / "step_3")
    flip(folder / name, 40, 5)
    with pytest.raises(UserError, match=rf"step_3/{name}: damaged"):
        generate.load_model(folder, CPU)
    with pytest.raises(UserError, match=rf"step_3/{name}: damaged"):
        convert.to_hf(folder, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_copied_file_that_is_missing_or_longer(trained, tmp_path):
    folder = shutil.copytree(trained[0] / "step_3", tmp_path / "step_3")
    with open(folder / "tokenizer.json", "ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match=r"tokenizer.json: damaged"):
        checkpoint.read_index(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"No such file or directory: .*tokenizer.json"):
        checkpoint.read_index(folder)


def without_sums(folder):
    """Turn index.json into that of an older version, which had no sums."""
    index = json.loads((folder / "index.json").read_text())
    for name in ("sums", "copies", "crc32", "data", "interval", "last_good"):
        del index[name]
    (folder / "index.json").write_text(json.dumps(index, indent=1))


def test_an_older_checkpoint_is_loaded_and_one_line_says_so(trained, tmp_path, capsys):
    out, data_dir = trained
    shutil.copytree(out, tmp_path / "run")
    without_sums(tmp_path / "run/step_3")
    go(configured(tmp_path / "run", data_dir, num_layers=3, train_iters=4))
    line = f"{tmp_path}/run/step_3 has no checksums, because an older version saved it: it is not verified\n"
    assert capsys.readouterr().err == line
    assert "sums" in checkpoint.read_index(tmp_path / "run/step_4")
