"""Test prepare.py: the files equal the encoding of each whole document, also after crashes and with any settings.

Most tests run the command in its own process with small limits (`PIECE=64` instead of half a megabyte), so short texts
are cut many times. To simulate a crash or a full disk, a test inserts a line of code before the command.
"""

import bz2
import contextlib
import fcntl
import glob
import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import regex  # installed, because tiktoken needs it

import documents
import prepare
import tokenizer
import vocabulary
from errors import UserError

HERE = Path(__file__).parent
BYTES = tokenizer.load_tokenizer("bytes")
SMALL = "documents.PIECE, documents.MAX_RUN = 64, 512"
# All classes of GPT-2's pattern: letters, numbers, apostrophes, contractions, all kinds of spaces, separators, marks.
# Also characters that Python and tiktoken may classify differently, for example emoji newer than Unicode 3.2, and the
# text of an end-of-text token.
ATOMS = [
    *"aZé中한ж9٣½'\u2019!.\u0301_-<|>", *" \n\r\t\xa0\u2028\u3000\x1c\x1f\x85\u200b\x00\u180e", *" \n" * 6, *"'ts" * 3,
    "'s", "'ll", "'re", "n't", "  ", "\r\n", "😀", "\U0001f6d8", "ꟊ", "<|endoftext|>", "hello", "12345", "!!!", "。",
]  # fmt: skip


@pytest.fixture(scope="session")
def gpt2():
    try:
        return tokenizer.load_tokenizer("gpt2")
    except UserError as error:
        pytest.skip(f"GPT-2's vocabulary is not available: {error}")


def random_text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(ATOMS, k=length))


def run(*arguments, before="", code=0, **keywords):
    """Run the line of code `before` and then the command. Check the exit code and return the output."""
    program = f"import os, signal, documents, prepare, tokenizer\n{before}\nprepare.exit_on_user_error(prepare.main)"
    command = [sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, start_new_session=True, **keywords)
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def error_of(*arguments, **keywords) -> str:
    """Run a command that must fail. Return its error, the last line of the output."""
    last = run(*arguments, code=2, **keywords).splitlines()[-1]
    assert last.startswith("error: ")
    return last


def tokens_in(folder) -> dict[str, list[int]]:
    return {split: np.fromfile(Path(folder, f"{split}.bin"), dtype="<u2").tolist() for split in prepare.SPLITS}


def meta_in(folder) -> dict:
    return json.loads(Path(folder, "meta.json").read_text())


def files_in(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def whole(encoding, documents) -> list[int]:
    """Return the expected tokens: each document encoded as a whole, and an end-of-text token after each."""
    return [token for text in documents for token in [*encoding.encode_ordinary(text), encoding.eot_token]]


def write_json_lines(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8", newline="")
    return path


# ---- Tokenizers ------------------------------------------------------------------------------------------------------


def test_bytes_has_256_bytes_and_an_end_of_text():
    assert (BYTES.n_vocab, BYTES.eot_token, BYTES.dtype) == (257, 256, "uint16")
    text = random_text(random.Random(0), 5000)
    assert BYTES.encode_ordinary(text) == list(text.encode())
    assert BYTES.decode(BYTES.encode_ordinary(text)) == text


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_encode_is_tiktokens_encode_ordinary(name, request):
    encoding = BYTES if name == "bytes" else request.getfixturevalue(name)
    rng = random.Random(1)
    for text in ["", *(random_text(rng, 300) for _ in range(50))]:
        expected = encoding.encoding.encode_ordinary(text)
        assert encoding.encode_ordinary(text) == expected
        assert np.frombuffer(prepare.encode(encoding, text), "<u2").tolist() == expected


@pytest.mark.parametrize(
    "name, expected",
    [
        ("gpt-2", "did you mean gpt2?"),
        ("byte", "did you mean bytes?"),
        ("a/b", "tokenizer=a/b: no such file or folder"),
    ],
)
def test_an_unknown_tokenizer_is_refused_by_name(name, expected):
    with pytest.raises(UserError, match=regex.escape(f"tokenizer={name}: ")) as error:
        tokenizer.load_tokenizer(name)
    assert expected in str(error.value)


def test_without_network_the_message_explains_what_to_do(tmp_path, monkeypatch):
    def no_network(*_):
        raise OSError("Name or service not known")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.load.read_file", no_network)
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    with pytest.raises(UserError) as error:
        tokenizer.load_tokenizer.__wrapped__("gpt2")
    assert "TIKTOKEN_CACHE_DIR" in str(error.value) and "use tokenizer=bytes" in str(error.value)
    assert "\n" not in str(error.value)


# ---- Cutting long documents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", vocabulary.PATTERNS["gpt2"])
def test_the_pre_tokenizer_cuts_at_every_cut_point_anyway(pattern):
    compiled, rng, points = regex.compile(pattern), random.Random(2), 0
    for _ in range(1500):
        text = random_text(rng, 24)
        pieces = compiled.findall(text)
        for i in tokenizer.cut_points(text, pattern):
            assert compiled.findall(text[:i]) + compiled.findall(text[i:]) == pieces, (text, i)
            points += 1
    assert points > 5000


def test_cut_points_depend_on_their_neighbours_only():
    pattern, rng = vocabulary.PATTERNS["gpt2"][0], random.Random(3)
    for _ in range(300):
        text = random_text(rng, 24)
        points = set(tokenizer.cut_points(text, pattern))
        assert {i + 7 for i in tokenizer.cut_points(text[7:-7], pattern)} <= points


def test_no_cut_in_an_unknown_pattern():
    assert not list(tokenizer.cut_points("some words", r"\w+|\W+"))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_long_documents_equal_whole_ones(name, kind, request, tmp_path, monkeypatch):
    """Cut random texts hundreds of times. Their tokens must equal the encoding of each whole text."""
    encoding = BYTES if name == "bytes" else request.getfixturevalue(name)
    monkeypatch.setattr(documents, "PIECE", 40)
    monkeypatch.setattr(documents, "MAX_RUN", 300)
    rng = random.Random(4)
    texts = [random_text(rng, rng.choice([0, 1, 8, 30, 100, 3000])) for _ in range(40)] + ["x " * 500, " " * 200 + "x"]
    if kind == "txt":
        paths = [tmp_path / f"{i:02}.txt" for i in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text.encode())
    else:
        paths = [write_json_lines(tmp_path / "all.jsonl", texts)]
    blocks = list(documents.read_blocks(list(map(str, paths)), "text", encoding.pattern))
    encoded = [prepare.encode_block(prepare.Job(name, "text", (1, 0, 0)), block) for block in blocks]
    assert not any(e.skipped for e in encoded)
    assert np.frombuffer(b"".join(e.tokens[0] for e in encoded), "<u2").tolist() == whole(encoding, texts)
    assert sum(e.documents[0] for e in encoded) == len(texts)
    assert sum(not part.begins for block in blocks for part in block) > 500  # the texts are really cut, and often


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("character", ["x", " ", "é", "!"])
def test_a_run_may_have_max_run_bytes_and_no_more(character, more, monkeypatch, tmp_path):
    monkeypatch.setattr(documents, "PIECE", 40)
    monkeypatch.setattr(documents, "MAX_RUN", 300)
    (tmp_path / "run.txt").write_text("one 2" + character * (300 // len(character.encode()) + more) + "\nend ")
    *parts, last = documents.read_parts(str(tmp_path / "run.txt"), 0, "text", vocabulary.PATTERNS["gpt2"][0])
    assert (last.problem is not None) == bool(more)
    assert max(len(part.data) for part in parts) == (40 if more else 300) or more


# ---- Inputs ----------------------------------------------------------------------------------------------------------


def test_a_json_file_is_json_lines_if_it_is_named(tmp_path):
    """Megatron-LM's how-tos write JSON lines to a .json file. A folder's .json files are not read."""
    (tmp_path / "a.json").write_text('{"content": "x"}\n')
    (tmp_path / "b.txt").write_text("y")
    assert documents.find_files([str(tmp_path)]) == [str(tmp_path / "b.txt")]
    for name in ("a.json", "*.json"):
        (block,) = documents.read_blocks(documents.find_files([str(tmp_path / name)]), "content", "")
        assert [documents.document_text(part, part.line, part.data, "content") for part in block] == ["x"]


def test_every_kind_and_packing_is_read(tmp_path):
    texts = {}
    for i, kind in enumerate(documents.KINDS):
        for j, (packing, pack) in enumerate(
            {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.items()
        ):
            text = f"text {i} {j}\r\nwith two lines \u2028 and é\n"
            data = json.dumps({"text": text}, ensure_ascii=False) if kind == ".jsonl" else text
            path = tmp_path / f"{i}{j}{kind}{packing}"
            path.write_bytes(pack(data.encode()))
            texts[path.name] = text
    run(tmp_path, f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,0,0")
    assert tokens_in(tmp_path / "out")["train"] == whole(BYTES, [texts[name] for name in sorted(texts)])
    assert meta_in(tmp_path / "out")["documents"]["train"] == 16


@pytest.mark.parametrize("name", ["folder", "folder/a.txt", "folder/*.txt"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_regular_file_is_not_waited_for(name, kind, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.txt").write_text("text")
    if kind == "fifo":
        os.mkfifo(tmp_path / "folder" / "a.txt")
    else:
        (tmp_path / "folder" / "a.txt").symlink_to("/dev/zero")
    command = [name, "--out=out", "--tokenizer=bytes", "--split=1,0,0"]
    assert "folder/a.txt: unreadable (not a regular file)" in error_of(*command, cwd=tmp_path, timeout=60)


def test_two_stars_do_not_follow_links(tmp_path, monkeypatch):
    """glob.glob follows links: with two links to their own folder, it returns 2^40 paths."""
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/c.txt", "a/d.txt", "e.txt", "a/.hidden/f.txt", "a/b/g.csv", "a/b/[x]/h.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    patterns = f"** **/* **/*.txt a/** a/**/*.txt ./a/**/b/**/* **/b/* {tmp_path}/**/*.txt".split()
    found = {}
    for pattern in patterns:
        found[pattern] = documents.find_files([pattern])
        with monkeypatch.context() as patch:
            patch.setattr(documents, "matches", lambda pattern: glob.glob(pattern, recursive=True))
            assert documents.find_files([pattern]) == found[pattern] != [], pattern
    for name in ("a/l", "a/m"):
        os.symlink(tmp_path / "a", name)
    assert all(set(documents.find_files([pattern])) == set(found[pattern]) for pattern in patterns)


def test_shared_memory_is_blamed_if_it_is_full(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    full = "import errno\ndef pool(*_, **__): raise OSError(errno.ENOSPC, 'No space left on device')\n"
    full += "prepare.ProcessPoolExecutor = pool"
    error = error_of(tmp_path / "a.txt", f"--out={tmp_path}/out", "--tokenizer=bytes", before=full)
    assert error == "error: /dev/shm, the shared memory that the workers need: No space left on device"


def test_order_duplicates_and_what_is_left_out(tmp_path):
    for name in [
        "b/z.txt",
        "b/a.md",
        "b/.hidden/x.txt",
        "b/.x.txt",
        "b/__pycache__/x.py",
        "b/c/d.py",
        "a.txt",
        "b/x.csv",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    run("b", "*.txt", "a.txt", "b/z.txt", "--out=out", "--tokenizer=bytes", "--split=1,0,0", cwd=tmp_path)
    assert tokens_in(tmp_path / "out")["train"] == whole(BYTES, ["b/a.md", "b/z.txt", "b/c/d.py", "a.txt"])


def test_blank_lines_no_last_newline_byte_order_mark_and_empty_text(tmp_path):
    lines = ['{"text": "one\\u2028"}', "", '  {"text": "", "id": 2}\r', "   ", '{"text": "<|endoftext|>"}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    (tmp_path / "b.txt").write_bytes("\ufeff\r\nend\ufeff".encode())
    (tmp_path / "c.txt").write_bytes(b"")
    run(tmp_path, f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,0,0")
    documents = ["one\u2028", "", "<|endoftext|>", "\r\nend\ufeff", ""]
    assert tokens_in(tmp_path / "out")["train"] == whole(BYTES, documents)
    assert meta_in(tmp_path / "out")["documents"] == {"train": 5, "val": 0, "test": 0}


def test_text_key(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 5, "content": "right"}\n')
    run(tmp_path, f"--out={tmp_path}/out", "--tokenizer=bytes", "--text_key", "content", "--split", "1,0,0")
    assert tokens_in(tmp_path / "out")["train"] == whole(BYTES, ["right"])


def test_the_standard_library_is_the_default(tmp_path):
    output = run("--tokenizer=bytes", cwd=tmp_path)
    meta = meta_in(tmp_path / "data" / "stdlib_bytes")
    assert "next: torchrun train.py configs/tiny.py\n" in output
    assert meta["documents"]["train"] > 500 and meta["tokens"]["val"] > 10_000
    assert sum(meta["documents"].values()) + sum(meta["skipped"].values()) == meta["made_from"]["input"]["files"]
    assert (tmp_path / "data/stdlib_bytes/train.bin").stat().st_size == 2 * meta["tokens"]["train"]


@pytest.mark.parametrize(
    "inputs, files, expected",
    [
        ([], ["x/os.py"], "data/stdlib_gpt2"),
        (["a/b.v2.jsonl.gz"], ["a/b.v2.jsonl.gz"], "data/b.v2_gpt2"),
        (["a/b", "c"], ["a/b.txt", "a/c.txt", "d.txt"], "data/b_and_2_more_gpt2"),
        (["a/*.txt"], ["a/x.txt", "a/y.txt"], "data/x_and_1_more_gpt2"),
    ],
)
def test_default_output(inputs, files, expected):
    assert prepare.default_out(inputs, files, "gpt2") == expected


def test_the_default_output_of_a_folder_has_its_name(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("text")
    run("corpus/", "--tokenizer=bytes", cwd=tmp_path)
    assert set(files_in(tmp_path / "data" / "corpus_bytes")) == {"train.bin", "val.bin", "test.bin", "meta.json"}


# ---- Splits ----------------------------------------------------------------------------------------------------------


def test_documents_go_to_splits_by_a_hash_of_their_position(tmp_path):
    texts = [f"{i}" for i in range(4000)]
    run(write_json_lines(tmp_path / "a.jsonl", texts), f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=80,15,5")
    meta, tokens = meta_in(tmp_path / "out"), tokens_in(tmp_path / "out")
    assert sum(meta["documents"].values()) == 4000
    for split, share in zip(prepare.SPLITS, (0.8, 0.15, 0.05), strict=True):
        assert abs(meta["documents"][split] / 4000 - share) < 0.02
        assert meta["tokens"][split] == len(tokens[split])
        expected = [t for i, t in enumerate(texts) if prepare.SPLITS[prepare.split_of(0, i + 1, (80, 15, 5))] == split]
        assert tokens[split] == whole(BYTES, expected)
    # the hash must never change: validation texts of an old data set would be training texts of a new one
    assert [prepare.split_of(0, line, (1, 1, 1)) for line in range(1, 13)] == [0, 2, 1, 0, 0, 2, 1, 1, 1, 1, 2, 0]


def test_skipping_a_document_moves_no_other_one(tmp_path):
    texts = [f"document {i}" for i in range(200)]
    path = write_json_lines(tmp_path / "a.jsonl", texts)
    path.write_text(path.read_text().replace('{"text": "document 50"}', "{nothing}"))
    run(path, f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,1,1", "--on_error=skip")
    for i, split in enumerate(prepare.SPLITS):
        expected = [t for n, t in enumerate(texts) if n != 50 and prepare.split_of(0, n + 1, (1, 1, 1)) == i]
        assert tokens_in(tmp_path / "out")[split] == whole(BYTES, expected)


def test_a_split_that_would_be_empty_gets_its_share_of_trains_last_tokens(tmp_path):
    text = "".join(chr(33 + i % 90) for i in range(999))
    (tmp_path / "a.txt").write_text(text)
    output = run(tmp_path / "a.txt", f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=90,10,0")
    tokens = tokens_in(tmp_path / "out")
    assert (len(tokens["train"]), len(tokens["val"]), len(tokens["test"])) == (900, 100, 0)
    assert tokens["train"] + tokens["val"] == whole(BYTES, [text])
    assert "val had no document, so it gets the last 100 tokens of train" in output
    assert meta_in(tmp_path / "out")["tokens"] == {"train": 900, "val": 100, "test": 0}


def test_train_is_never_the_empty_one(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 999)
    run(tmp_path / "a.txt", f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,999998,1000001")
    assert {split: len(t) for split, t in tokens_in(tmp_path / "out").items()}["val"] > 400
    weights = (2, 0, 98)
    assert prepare.split_of(0, 1, weights) == 2
    run(tmp_path / "a.txt", f"--out={tmp_path}/two", "--tokenizer=bytes", "--split=2,0,98")
    assert {split: len(t) for split, t in tokens_in(tmp_path / "two").items()} == {"train": 20, "val": 0, "test": 980}


# ---- Workers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A command with a long text, short texts and JSON lines as input, and the output files of its first run."""
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(5)
    (folder / "in").mkdir()
    (folder / "in" / "long.txt").write_bytes(random_text(rng, 9000).encode())
    for i in range(60):
        (folder / "in" / f"short{i:02}.txt").write_bytes(random_text(rng, rng.randrange(30)).encode())
    write_json_lines(folder / "in" / "lines.jsonl", [random_text(rng, rng.choice([5, 20, 400])) for _ in range(200)])
    command = [folder / "in", "--tokenizer=bytes", "--split=6,3,1"]
    run(*command, f"--out={folder}/out", before=SMALL)
    return command, files_in(folder / "out")


@pytest.mark.parametrize("workers, before", [(1, SMALL), (3, SMALL), (2, ""), (2, "prepare.START_METHOD = 'spawn'")])
def test_the_output_does_not_depend_on_workers_nor_on_pieces(corpus, tmp_path, workers, before):
    command, expected = corpus
    run(*command, f"--out={tmp_path}/out", f"--workers={workers}", before=before)
    assert files_in(tmp_path / "out") == expected


def test_the_order_is_the_inputs_whoever_is_first(corpus, tmp_path):
    """Delay the first block, so it is finished last."""
    slow = "import time; encode = prepare.encode"
    slow += "\nprepare.encode = lambda e, text: (time.sleep(0.2 if text.startswith('late') else 0), encode(e, text))[1]"
    texts = ["late" + "x" * 80, *(f"{i:080}" for i in range(30))]
    path = write_json_lines(tmp_path / "a.jsonl", texts)
    run(path, f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,0,0", "--workers=2", before=f"{SMALL}\n{slow}")
    assert tokens_in(tmp_path / "out")["train"] == whole(BYTES, texts)


def test_a_killed_worker_is_one_clear_error_and_no_loss(corpus, tmp_path):
    command, expected = corpus
    kill = (
        "encode = prepare.encode\nprepare.encode = lambda e, t: os.kill(os.getpid(), 9) if 'ж' in t else encode(e, t)"
    )
    assert "a worker was killed" in error_of(*command, f"--out={tmp_path}/out", before=f"{SMALL}\n{kill}")
    run(*command, f"--out={tmp_path}/out", before=SMALL)
    assert files_in(tmp_path / "out") == expected


# ---- Crashes ---------------------------------------------------------------------------------------------------------

KILL = """
prepare.SAVE_EVERY = 0
save, append, rename, write_whole = prepare.Output.save, prepare.append, os.rename, prepare.write_whole
def die(*_): os.killpg(0, signal.SIGKILL)
"""
CRASHES = {
    "after a saved state": """
def save_and_die(self):
    save(self)
    self.progress.blocks > 90 and die()
prepare.Output.save = save_and_die""",
    "in the middle of a block": """
def append_half(file, data):
    append(file, data[:101])
    file.tell() > 9000 and len(data) > 101 and die()
    append(file, data[101:])
prepare.append = append_half""",
    "while the state is saved": "os.replace = die",
    "before the first rename": "os.rename = die",
    "between the renames": "os.rename = lambda old, new: die() if 'val' in new else rename(old, new)",
    "after the empty splits are filled": """
fill = prepare.Output.fill_empty_splits
prepare.Output.fill_empty_splits = lambda self, weights: (fill(self, weights), die())""",
    "while the empty splits are filled": """
truncate = prepare.Output.truncate
prepare.Output.truncate = lambda self: die() if self.progress.blocks > 99 else truncate(self)""",
    "after meta.json": "prepare.os.remove = lambda path: die()",
    "before meta.json": "prepare.write_whole = lambda path, x: die() if 'meta' in path else write_whole(path, x)",
}


@pytest.mark.parametrize("crash", CRASHES)
def test_after_kill_9_the_same_command_ends_in_the_same_bytes(corpus, tmp_path, crash):
    command, expected = corpus
    run(*command, f"--out={tmp_path}/out", before=SMALL + KILL + CRASHES[crash], code=-signal.SIGKILL)
    assert ("meta.json" in files_in(tmp_path / "out")) == (crash == "after meta.json")
    output = run(*command, f"--out={tmp_path}/out", "--workers=3", before=SMALL)
    found = files_in(tmp_path / "out")
    found.pop("prepare.lock", None)  # of the killed run, if its folder was already complete
    assert found == expected
    assert ("resuming after" in output) == (crash not in ("while the state is saved", "after meta.json"))


ENCODES_NOTHING = "prepare.Output.write = lambda *_: os._exit(9)"  # no block may be encoded again


@pytest.mark.parametrize("crash", ["after the empty splits are filled", "before the first rename", "before meta.json"])
def test_a_kill_at_the_end_keeps_the_finished_work(crash, tmp_path):
    """One big file is one document, so val and test get their tokens from the end of train."""
    (tmp_path / "big.txt").write_text("some words " * 2000)
    command = [tmp_path / "big.txt", "--tokenizer=bytes", "--workers=1"]
    run(*command, f"--out={tmp_path}/expected")
    run(*command, f"--out={tmp_path}/out", before=SMALL + KILL + CRASHES[crash], code=-signal.SIGKILL)
    output = run(*command, f"--out={tmp_path}/out", before=f"{SMALL}\n{ENCODES_NOTHING}")
    assert "resuming after 22,001 tokens" in output
    assert files_in(tmp_path / "out") == files_in(tmp_path / "expected")


KILLS = int(os.environ.get("KILLS", "6"))


def saved_blocks(folder) -> int:
    """Return the finished blocks of an unfinished run, or 0."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(Path(folder, "progress.json").read_text())["blocks"]
    return 0


@pytest.mark.parametrize(
    "number, send",
    [(signal.SIGKILL, os.killpg), (signal.SIGTERM, os.killpg), (signal.SIGTERM, os.kill)],
    ids=["SIGKILL to all", "SIGTERM to all", "SIGTERM to the command"],
)
def test_signals_at_random_moments_lose_nothing_and_leave_no_worker(corpus, tmp_path, number, send):
    """End KILLS runs. Each run begins where the last one stopped, and is ended after it has saved a block."""
    command, expected = corpus
    dice, kept, output = random.Random(7), 0, ""
    program = f"import prepare, documents\n{SMALL}\nprepare.SAVE_EVERY = 0\nprepare.exit_on_user_error(prepare.main)"
    words = [sys.executable, "-c", program, *map(str, command), f"--out={tmp_path}/out"]
    for _ in range(KILLS):
        with subprocess.Popen(words, cwd=HERE, stdout=-1, stderr=-2, text=True, start_new_session=True) as process:
            while (first := saved_blocks(tmp_path / "out")) in (0, kept) and process.poll() is None:
                time.sleep(0.001)
            time.sleep(0.2 * dice.random())
            with contextlib.suppress(ProcessLookupError):
                send(process.pid, number)
            try:
                output = process.communicate(timeout=60)[0]  # until no process has the pipe open
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode in (0, 143 if number == signal.SIGTERM else -9) and "Traceback" not in output, output
        assert first >= kept or not first  # a run that starts over saves block 1
        kept = saved_blocks(tmp_path / "out") or kept
    assert kept
    run(*command, f"--out={tmp_path}/out", before=SMALL)
    found = files_in(tmp_path / "out")
    found.pop("prepare.lock", None)
    assert found == expected


@pytest.mark.parametrize(
    "change",
    [
        dict(tokens=2), dict(tokens=[1, 1]), dict(tokens=["1", 0, 0]), dict(tokens=[-1, 0, 0]),
        dict(tokens=[True, 0, 0]), dict(tokens=[10**9, 0, 0]), dict(blocks=-1), dict(blocks="1"), dict(blocks=None),
        dict(documents=None), dict(skipped=[]), dict(skipped={"x": "1"}), dict(examples=[1]), dict(whole={}),
        dict(made_from=None), dict(cut=[]), dict(x=1),
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_state_starts_over(change, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    command = [tmp_path / "a.txt", f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,0,0"]
    run(*command, before=KILL + CRASHES["before the first rename"], code=-signal.SIGKILL)
    path = tmp_path / "out" / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "starting over" in run(*command)
    assert tokens_in(tmp_path / "out")["train"] == whole(BYTES, ["text"])


@pytest.mark.parametrize("text", ["[", "null", "[]", "[[]]", "9", "[" * 99999, '{"made_from": 1}', "\0"])
def test_a_state_or_meta_json_that_is_something_else(text, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    command = [tmp_path / "a.txt", f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,0,0"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "progress.json").write_text(text)
    run(*command)
    assert tokens_in(tmp_path / "out")["train"] == whole(BYTES, ["text"])
    (tmp_path / "out" / "meta.json").write_text(text)
    assert "its meta.json was not written by prepare.py" in error_of(*command)


@pytest.mark.parametrize(
    "change", [dict(tokens=[1]), dict(tokens={}), dict(made_from=[]), dict(dtype="int8"), dict(dtype=[])]
)
def test_a_damaged_meta_json_is_one_line(change, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    command = [tmp_path / "a.txt", f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,0,0"]
    run(*command)
    path = tmp_path / "out" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert f"--out={tmp_path}/out: " in error_of(*command)


def test_nothing_is_under_a_final_name_before_it_is_whole(corpus, tmp_path):
    command, _ = corpus
    # at each rename: the file is not empty, and neither its final name nor meta.json exists
    # after each write: no file has a final name
    check = (
        "rename = os.rename\ndef check(a, b):\n    names = os.listdir(os.path.dirname(b))\n"
        "    assert os.path.getsize(a) > 0 and 'meta.json' not in names and os.path.basename(b) not in names\n"
        "    rename(a, b)\nos.rename = check\nwrite = prepare.Output.write\ndef look(self, *args):\n"
        "    write(self, *args)\n    assert not [n for n in os.listdir(self.folder) if n.endswith('.bin')]\n"
        "prepare.Output.write = look"
    )
    run(*command, f"--out={tmp_path}/out", before=f"{SMALL}\n{check}")


def test_workers_die_with_their_parent(corpus, tmp_path):
    command, _ = corpus
    die = "prepare.Output.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"  # kill only the parent
    # run() returns only when no process has the output pipe open, so every worker has ended
    run(*command, f"--out={tmp_path}/out", before=f"{SMALL}\n{die}", code=-signal.SIGKILL, timeout=60)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_quietly_and_it_goes_on(corpus, tmp_path, number, code):
    command, expected = corpus
    send = "write = prepare.Output.write\nprepare.Output.write = lambda self, *a: "
    send += f"(write(self, *a), self.progress.blocks == 100 and os.killpg(0, {int(number)}))"
    before = f"{SMALL}\nprepare.SAVE_EVERY = 0\n"
    before += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs of a shell ignore SIGINT
    run(*command, f"--out={tmp_path}/out", before=before + send, code=code)
    assert "resuming after" in run(*command, f"--out={tmp_path}/out", before=before)
    assert files_in(tmp_path / "out") == expected


def test_a_full_disk_is_one_clear_error_and_no_loss(corpus, tmp_path):
    command, expected = corpus
    limit = (
        f"{SMALL}\nprepare.SAVE_EVERY = 0\nimport resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))"
    )
    assert f"--out={tmp_path}/out: File too large" in error_of(*command, f"--out={tmp_path}/out", before=limit)
    output = run(*command, f"--out={tmp_path}/out", before=SMALL)
    assert "resuming after" in output
    assert files_in(tmp_path / "out") == expected


# ---- The output folder ----------------------------------------------------------------------------------------------


def test_a_finished_folder_is_left_alone(corpus, tmp_path):
    command, expected = corpus
    out = f"--out={tmp_path}/out"
    run(*command, out)
    assert "is already finished" in run(*command, out, "--workers=1")
    assert "made with --split=6,3,1, not 1,1,1;" in error_of(*command, out, "--split=1,1,1")
    assert "made from other files" in error_of(command[0] / "long.txt", *command[1:], out)
    assert files_in(tmp_path / "out") == expected
    (tmp_path / "out" / "val.bin").write_bytes(b"")
    assert "val.bin does not match meta.json" in error_of(*command, out)


def test_a_strangers_files_are_never_overwritten(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "train.bin").write_bytes(b"precious")
    assert "contains a train.bin but no meta.json" in error_of(
        tmp_path / "a.txt", f"--out={tmp_path}", "--tokenizer=bytes"
    )
    (tmp_path / "meta.json").write_text("{}")
    assert "its meta.json was not written by" in error_of(tmp_path / "a.txt", f"--out={tmp_path}", "--tokenizer=bytes")
    assert (tmp_path / "train.bin").read_bytes() == b"precious"


def test_another_command_does_not_go_on_with_an_unfinished_folder(corpus, tmp_path):
    command, _ = corpus
    run(*command, f"--out={tmp_path}/out", before=SMALL + KILL + CRASHES["after a saved state"], code=-signal.SIGKILL)
    (tmp_path / "b.txt").write_text("other")
    assert "starting over" in run(tmp_path / "b.txt", f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,0,0")
    assert tokens_in(tmp_path / "out")["train"] == whole(BYTES, ["other"])


def test_two_runs_in_one_folder_are_refused(corpus, tmp_path):
    command, _ = corpus
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / "prepare.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        assert "another prepare.py is writing to this folder" in error_of(*command, f"--out={tmp_path}/out")


# ---- Bad input -------------------------------------------------------------------------------------------------------

GOOD = b'{"text": "good"}\n'
LONG = b"one two\n" * 999
# case: (bad JSON line, message). The line is put between two good lines of a.jsonl.
BAD_LINES = {
    "not JSON": (b'{"text": "x"', "not JSON ("),
    "a JSON list": (b'["x"]', "not a JSON object (but a list)"),
    "a missing key": (b'{"texts": "x"}', "no key 'text' (it has 'texts'; see --text_key)"),
    "no string": (b'{"text": null}', "'text' is not a string (but a NoneType)"),
    "a lone surrogate": (b'{"text": "x\\ud800"}', "not Unicode (a lone surrogate at character 2)"),
    "deep JSON": (b"[" * 99999, "JSON that Python can't read"),
    "a long integer": (b'{"text": ' + b"1" * 9999 + b"}", "JSON that Python can't read"),
    "JSON not UTF-8": (b'{"text": "\xff"}', "not UTF-8 (byte 0xff"),
    "a surrogate in UTF-8": (b'{"text": "\xed\xa0\x80"}', "not UTF-8 (byte 0xed"),
    "a long run in JSON": (b'{"text": "1 2\\n3 %s"}' % (b"x" * 9999), "more than 1 MiB without a word boundary"),
    "a long JSON line": (b'{"text": "%s"}' % (b"x " * 99999), "a JSON line over 64 MiB"),
}
# case: (file name, content, message)
BAD = {
    **{case: ("a.jsonl", GOOD + line + b"\n" + GOOD, f":2: {message}") for case, (line, message) in BAD_LINES.items()},
    "text not UTF-8": ("a.txt", b"one\ntwo \xe9 x\n", ":2: not UTF-8 (byte 0xe9"),
    "long text not UTF-8": ("a.txt", LONG + b"\xe9\n" + LONG, ":1000: not UTF-8"),
    "long text cut off": ("a.txt", LONG + b"\xe9", ":1000: not UTF-8 (byte 0xe9: unexpected end of data)"),
    "no text at all": ("a.txt", b"\n" + b"\x80" * 9999, ":2: not UTF-8 (byte 0x80"),
    "a long run": (
        "a.txt",
        LONG + b"x" * 9999 + b"\n" + LONG,
        ":999: more than 1 MiB without a word boundary (from byte 7,991",
    ),
    "half a .gz": (
        "a.txt.gz",
        gzip.compress(random.Random(6).randbytes(30000).hex().encode())[:-9000],
        ": unreadable (",
    ),
    "no .gz": ("a.txt.gz", b"plain text", ": unreadable (Not a gzipped file"),
    "no .bz2": ("a.txt.bz2", b"plain text", ": unreadable (Invalid data stream"),
    "no .xz": ("a.txt.xz", b"plain text", ": unreadable (Input format not supported"),
    "an unknown kind": ("a.csv", b"a,b", ": unknown kind of file (known: .txt"),
}
LIMITS = f"{SMALL}; documents.MAX_LINE = 150000"


@pytest.mark.parametrize("case", BAD)
def test_bad_input_stops_with_its_place_or_is_skipped_and_counted(case, tmp_path):
    name, data, message = BAD[case]
    message = f"{tmp_path}/{name}{message}"
    (tmp_path / "0.txt").write_text("before")
    (tmp_path / name).write_bytes(data)
    (tmp_path / "z.txt").write_text("after")
    command = [tmp_path / "0.txt", tmp_path / name, tmp_path / "z.txt", "--tokenizer=bytes", "--split=1,0,0"]
    limits = LIMITS
    if "run" in case:  # the tokenizer `bytes` can cut anywhere, so use GPT-2's cut points
        limits += "; cut, gpt2 = tokenizer.cut_points, tokenizer.PATTERNS['gpt2'][0]"
        limits += "; tokenizer.cut_points = lambda text, _: cut(text, gpt2)"
    error = error_of(*command, f"--out={tmp_path}/out", before=limits)
    assert f"error: {message}" in error and "--on_error=skip" in error
    assert not {"train.bin", "meta.json"} & set(os.listdir(tmp_path / "out"))

    output = run(*command, f"--out={tmp_path}/out", "--on_error=skip", before=limits)
    documents = ["before", *(["good"] * 2 if name == "a.jsonl" else []), "after"]
    assert tokens_in(tmp_path / "out")["train"] == whole(BYTES, documents)
    assert list(meta_in(tmp_path / "out")["skipped"].values()) == [1]
    assert meta_in(tmp_path / "out")["documents"]["train"] == len(documents)
    assert "skipped 1: 1 " in output and message in output


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to("nowhere")
    (tmp_path / "b.md").symlink_to("/proc/self/mem")  # can be opened, but not read, not even by root
    command = [tmp_path, f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,0,0"]
    assert f"{tmp_path}/b.md: unreadable (Input/output error)" in error_of(*command)
    run(*command, "--on_error=skip")
    assert tokens_in(tmp_path / "out")["train"] == whole(BYTES, ["text"])
    assert meta_in(tmp_path / "out")["skipped"] == {"unreadable": 2}


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["nothing.txt"], "input nothing.txt: no such file or folder"),
        (["*.json"], "input *.json: no file ends in .txt .md .py .jsonl"),
        (["empty"], "input empty: no file ends in"),
        (["empty.txt"], "the input is empty: no text in 1 files"),
        (
            ["bad.jsonl", "--on_error=skip"],
            "no text in 1 files; skipped 2, the first: bad.jsonl:1: not JSON",
        ),
        (["a.txt", "--split=1,2"], "--split=1,2: should be three shares"),
        (["a.txt", "--split=0,1,1"], "--split=0,1,1: should be three shares, the first above zero"),
        (["a.txt", "--split=1,nan,1"], "should be three shares"),
        (["a.txt", "--workers=0"], "--workers=0: should be a positive integer"),
        (["a.txt", "--workers=all"], "--workers=all: should be a positive integer"),
        (["a.txt", "--workers=100000"], "--workers=100000: should be a positive integer below 1,000"),
        (["a.txt", f"--workers={'9' * 5000}"], "999: should be a positive integer below 1,000"),
        (["a.txt", "--workers=\u0663"], "--workers=\u0663: should be a positive integer"),
        (["a.txt", "--split=1e308,1e308,1e308"], "--split=1e308,1e308,1e308: should be three shares"),
        (["x" * 300], "xxx: no such file or folder"),
        (["a.txt", f"--out={'x' * 300}"], "xxx: File name too long"),
        (["a.txt", f"--tokenizer=/{'x' * 300}"], "xxx: File name too long"),
        (["a.txt", "--on_error=ignore"], "--on_error=ignore: should be stop or skip"),
        (["a.txt", "--worker=2"], "--worker: no such option; the nearest is workers"),
        (["a.txt", "--out=a.txt"], "--out=a.txt: "),
    ],
)
def test_mistakes_in_the_command_are_one_line(arguments, expected, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bad.jsonl").write_text("{\n}\n")
    assert expected in error_of("--tokenizer=bytes", *arguments, cwd=tmp_path)


# ---- Memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_memory_does_not_grow_with_the_input(kind, tmp_path):
    """For 48 MB of input, the parent and the largest worker need at most 12 MB more than for 3 MB."""
    # Only the parent prints. It reads its peak memory from /proc (VmHWM), because ru_maxrss would also count the
    # memory of pytest, which started it.
    report = "import atexit, resource; parent = os.getpid(); "
    report += "atexit.register(lambda: os.getpid() != parent or print('peak', "
    report += "open('/proc/self/status').read().split('VmHWM:')[1].split()[0], "
    report += "resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))"
    peaks = []
    for megabytes in (3, 48):
        line = b"some words to encode, " * 4
        data = line * (megabytes * 1_000_000 // len(line))  # a single line
        if kind == "a.jsonl":
            data = b'{"text": "%s"}\n' % (line * 100) * (len(data) // (100 * len(line)))
        path = tmp_path / f"{megabytes}{kind}"
        path.write_bytes(gzip.compress(data, 1) if kind.endswith(".gz") else data)
        output = run(path, f"--out={tmp_path}/{megabytes}", "--tokenizer=bytes", "--workers=2", before=report)
        peaks.append([int(n) for n in regex.search(r"peak (\d+) (\d+)", output).groups()])
    assert all(large - small < 12_000 for small, large in zip(*peaks, strict=True)), peaks


def test_importing_it_is_light():
    """The command starts fast, and no import starts threads before the workers are forked."""
    code = "import sys, prepare; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=HERE, text=True).split() == ["False", "False"]


def test_files_are_little_endian_uint16_on_disk(tmp_path):
    (tmp_path / "a.txt").write_text("AB")
    run(tmp_path / "a.txt", f"--out={tmp_path}/out", "--tokenizer=bytes", "--split=1,0,0")
    assert (tmp_path / "out" / "train.bin").read_bytes() == b"\x41\x00\x42\x00\x00\x01"
    meta = meta_in(tmp_path / "out")
    assert [meta[key] for key in ("tokenizer", "vocab_size", "eot_id", "dtype")] == ["bytes", 257, 256, "uint16"]
    assert meta["tokens"] == {"train": 3, "val": 0, "test": 0}
