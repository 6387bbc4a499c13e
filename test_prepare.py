"""Test prepare.py: the files equal the encoding of each whole document, also after crashes and with any settings.

Most tests call the command without workers and with small pieces, so short texts are cut many times.
"""

import contextlib
import gzip
import itertools
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import prepare
from errors import UserError
from testing.tiny import held_elsewhere, refusal
from testing.vocabularies import END, JAPANESE, text_of_atoms, trained
from tokenizer import load_tokenizer

HERE = Path(__file__).parent
BYTES = load_tokenizer("bytes")


@pytest.fixture
def here(monkeypatch):
    """Encode in this process, in small pieces."""

    def serial(blocks, workers, *job):
        return (prepare.encode_block(*job, block) for block in blocks)

    monkeypatch.setattr(prepare, "encoded_blocks", serial)
    monkeypatch.setattr(prepare, "PIECE", 64)


def run(*words):
    """Run the command in this process, with `words` and its output folder. Return ({split: ids}, meta)."""
    *words, out = map(str, words)
    sys.argv = ["prepare.py", "--tokenizer=bytes", "--split=1,0,0", f"--out={out}", *words]
    prepare.main()
    return data_set(out)


def data_set(out):
    meta = json.loads(Path(out, "meta.json").read_text())
    return {s: np.fromfile(f"{out}/{s}.bin", meta["dtype"]).tolist() for s in prepare.SPLITS}, meta


def whole(tokenizer, documents):
    """Return the expected ids: each document encoded as a whole, then end-of-text."""
    return [i for text in documents for i in [*tokenizer.encode_ordinary(text), tokenizer.eot_token]]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8", newline="")
    return path


@pytest.fixture(autouse=True)
def restored_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)


# --- the tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("name", ["bytes", "gpt2", "files", "unknown pattern"])
def test_long_documents_equal_whole_ones(name, kind, here, tmp_path, monkeypatch, request):
    source = request.getfixturevalue("gpt2").name if name == "gpt2" else name
    rng, parts = random.Random(4), []
    if name in ("files", "unknown pattern"):
        source = str(tmp_path / "tokenizer.json")
        trained(500, None if name == "files" else r"\p{L}+|[0-9]").save(source)
    texts = [JAPANESE, *(text_of_atoms(rng, rng.choice([0, 1, 8, 30, 100, 3000])) for _ in range(40))]
    texts += ["x " * 500 + " " * 99, "x" * 1000, "line\r\n" * 300]
    (tmp_path / "in").mkdir()
    for i, text in enumerate(texts if kind == "txt" else []):
        (tmp_path / f"in/{i:02}.txt").write_bytes(text.encode())
    if kind == "jsonl":
        write_lines(tmp_path / "in/a.jsonl", texts)
    blocks = prepare.read_blocks
    monkeypatch.setattr(prepare, "read_blocks", lambda *a: (b for b in blocks(*a) if not parts.extend(b)))
    tokens, meta = run(tmp_path / "in", f"--tokenizer={source}", tmp_path / "out")
    assert tokens["train"] == whole(load_tokenizer(source), texts) and meta["documents"]["train"] == len(texts)
    assert kind == "jsonl" or name == "unknown pattern" or sum(not part.ends for part in parts) > 200


ARROW = [kind for kind in prepare.KINDS if kind.endswith((".zst", ".parquet"))]


def arrow():
    pytest.importorskip("pyarrow.parquet", reason="prepare.py needs pyarrow for .zst and .parquet")
    return sys.modules["pyarrow"]


def write_rows(path, texts):
    arrow().parquet.write_table(arrow().table({"id": [*range(len(texts))], "text": texts}), path, row_group_size=30)
    return path


def packed(kind, data):
    if kind.endswith(".zst"):  # two frames
        return b"".join(arrow().compress(part, "zstd", asbytes=True) for part in (data[:9], data[9:]))
    return gzip.compress(data) if kind.endswith(".gz") else data


@pytest.mark.parametrize("kinds", [[kind for kind in prepare.KINDS if kind not in ARROW], ARROW], ids=" ".join)
def test_every_kind_and_packing_is_read_in_order(kinds, here, tmp_path):
    texts, names = [], ["b", "c/d", "e"]
    for i, kind in enumerate(kinds):
        texts.append(f"text {i}\r\nwith two lines \u2028 and é\n")
        data = json.dumps({"text": texts[-1]}, ensure_ascii=False) if "json" in kind else texts[-1]
        data = data.encode("utf-8-sig" if i % 2 else "utf-8")
        if kind == ".parquet":
            write_rows(tmp_path / f"a{i:02}{kind}", [texts[-1]])
        else:
            (tmp_path / f"a{i:02}{kind}").write_bytes(packed(kind, data))
    for name in (".hidden/x.txt", ".x.txt", "__pycache__/x.py", "x.csv", "x.json", *(f"{name}.txt" for name in names)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    tokens, meta = run(tmp_path, tmp_path / "out")
    texts += ["b.txt", "e.txt", "c/d.txt"]  # a folder's files come before its subfolders
    assert tokens["train"] == whole(BYTES, texts) and meta["documents"]["train"] == 3 + len(kinds)
    assert (tmp_path / "out/train.bin").read_bytes()[:4] == b"t\0e\0"


def test_blank_lines_no_last_newline_empty_text_and_a_json_file(here, tmp_path):
    lines = ['{"text": "one\\u2028\\u0000"}', "", '  {"text": "", "id": 2}\r', "   ", '{"text": "<|endoftext|>"}']
    (tmp_path / "a.json").write_bytes("\n".join(lines).encode())
    (tmp_path / "b.txt").write_bytes(b"")
    tokens, _ = run(tmp_path / "a.json", tmp_path / "b.txt", tmp_path / "out")
    assert tokens["train"] == whole(BYTES, ["one\u2028\0", "", "<|endoftext|>", ""])
    (tmp_path / "c.jsonl").write_text('{"text": 5, "content": "right", "n": ' + "9" * 5000 + "}\n")
    assert run(tmp_path / "c.jsonl", "--text_key=content", tmp_path / "c")[0]["train"] == whole(BYTES, ["right"])


def test_the_standard_library_is_the_default(here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "PIECE", 1 << 19)
    (tmp_path / "lib/site-packages").mkdir(parents=True)
    for name, text in {"a.py": b"a", "site-packages/b.py": b"b", "c.txt": b"c", "d.py": b"\xff"}.items():
        (tmp_path / "lib" / name).write_bytes(text)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.chdir(tmp_path)
    sys.argv = ["prepare.py", "--tokenizer=bytes"]
    prepare.main()
    tokens, meta = data_set("data/stdlib_bytes")
    assert [*itertools.chain(*tokens.values())] == whole(BYTES, ["a"]) and meta["skipped"] == 1
    assert "iconv" not in capsys.readouterr().out


# --- splits -----------------------------------------------------------------------------------------------------------


def test_documents_go_to_splits_by_a_hash_of_their_position(here, tmp_path):
    texts = [f"{i}" for i in range(2000)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    path.write_text(path.read_text().replace('{"text": "50"}', "{nothing}"))  # a skipped document moves no other one
    tokens, meta = run(path, "--on_error=skip", "--split=80,15,5", tmp_path / "out")
    for i, split in enumerate(prepare.SPLITS):
        mine = [t for n, t in enumerate(texts) if n != 50 and prepare.split_of(0, n + 1, (80, 15, 5)) == i]
        assert tokens[split] == whole(BYTES, mine) and meta["documents"][split] == len(mine)
        assert abs(len(mine) / 2000 - (0.8, 0.15, 0.05)[i]) < 0.03 and meta["tokens"][split] == len(tokens[split])
    # with another hash, old validation texts would be new training texts
    assert [prepare.split_of(0, line, (1, 1, 1)) for line in range(1, 13)] == [0, 2, 1, 0, 0, 2, 1, 1, 1, 1, 2, 0]


def wide(path):
    """Write a vocabulary of 70,000 words, whose tokens are uint32. Return the path."""
    it = tokenizers.Tokenizer(models.WordLevel({str(i): i for i in range(70_000)}, unk_token="0"))
    it.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    it.add_special_tokens([END])
    it.save(str(path))
    return path


@pytest.mark.parametrize(
    "dtype, split, sizes", [("uint16", "90,10,0", (900, 100, 0)), ("uint32", "2,0,98", (20, 0, 980))]
)
def test_one_big_file_fills_every_split(dtype, split, sizes, here, tmp_path, capsys):
    text, name = "".join(chr(33 + i % 90) for i in range(999)), "bytes"
    if dtype == "uint32":
        text, name = " ".join(str(69_000 + i) for i in range(999)), wide(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text(text)
    tokens, meta = run(tmp_path / "a.txt", f"--tokenizer={name}", f"--split={split}", tmp_path / "out")
    right = whole(load_tokenizer(str(name)), [text])
    assert meta["dtype"] == dtype and tuple(meta["tokens"].values()) == tuple(map(len, tokens.values())) == sizes
    assert sorted([*itertools.chain(*tokens.values())]) == sorted(right)
    assert tokens["train"] == right[: sizes[0]] or not sizes[1]  # the others get the end of train
    assert capsys.readouterr().out.count(" 0 documents (from the end of") == 1


# --- workers, crashes and signals -------------------------------------------------------------------------------------

PROGRAM = """
import os, prepare
prepare.PIECE, prepare.SAVE_EVERY, write = 64, 0, prepare.Output.write
def die(*_): os.killpg(0, 9)
{}
prepare.exit_on_user_error(prepare.main)
"""


def start(words, before=""):
    """Start the command in a process group of its own."""
    words = [sys.executable, "-c", PROGRAM.format(before), *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    return subprocess.Popen(words, env=environment, stdout=-1, stderr=-2, text=True, start_new_session=True)


def command(words, before=""):
    """Return (exit code, text), once no process has the pipe open: no worker outlives its parent."""
    with start(words, before) as process:
        text = process.communicate(timeout=120)[0]
    return process.returncode, text


def files_in(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A command with a long text and JSON lines, and its output files."""
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(5)
    (folder / "in").mkdir()
    (folder / "in/long.txt").write_bytes(text_of_atoms(rng, 6000).encode())
    write_lines(folder / "in/lines.jsonl", [text_of_atoms(rng, rng.choice([5, 20, 400])) for _ in range(100)])
    words = [folder / "in", "--tokenizer=bytes", "--split=60,39,1"]  # test gets its tokens from the end of train
    code, text = command([*words, f"--out={folder}/out", "--workers=1"], "prepare.PIECE = 1 << 19")
    assert code == 0 and "block" not in text, text  # a bar is for terminals
    return words, files_in(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "prepare.START_METHOD = 'spawn'"])
def test_the_output_does_not_depend_on_workers_nor_on_pieces(before, corpus, tmp_path):
    words, expected = corpus
    late = "encode = prepare.encode_block\ndef slow(*job):\n    import time; time.sleep(0.1 * (job[-1][0].line == 1))\n"
    late += "    return encode(*job)\nprepare.encode_block = slow" if not before else ""  # the first block comes last
    code, text = command([*words, f"--out={tmp_path}/out", "--workers=3"], before or late)
    assert code == 0 and files_in(tmp_path / "out") == expected, text


CRASHES = {  # the code before the command, and whether the next run resumes
    "in a block": ("prepare.Output.write = lambda s, *a: die() if s.progress['blocks'] > 40 else write(s, *a)", True),
    "in the middle of a block": ("""
def half(self):
    self.progress['blocks'] < 40 or (self.files[0].write(b'half'), self.files[0].flush(), die())
    save(self)
save, prepare.Output.save = prepare.Output.save, half""", True),
    "while it saves": ("prepare.Path.replace = die", False),
    "while it fills the empty splits": ("""
truncate = prepare.Output.truncate
prepare.Output.truncate = lambda self: die() if self.progress['blocks'] else truncate(self)""", True),
    "before the rename": ("prepare.Path.rename = die", True),
    "after the rename": ("prepare.Path.unlink = die", False),
    "the parent only": ("prepare.Output.write = lambda *_: os.kill(os.getpid(), 9)", False),
    "a worker": ("def dead(*_): os.kill(os.getpid(), 9)\nprepare.encode_block = dead", False),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("crash", CRASHES)
def test_after_a_crash_the_same_command_ends_in_the_same_bytes(crash, corpus, tmp_path):
    (words, expected), (before, resumes) = corpus, CRASHES[crash]
    words, done = [*words, f"--out={tmp_path}/out"], crash == "after the rename"
    written = crash in ("while it fills the empty splits", "before the rename")
    code, text = command(words, before)
    assert code in (-9, 2) and ("a worker was killed" in text) == (crash == "a worker"), text
    assert (tmp_path / "out").exists() == done
    code, text = command([*words, "--workers=3"], "prepare.Output.write = die" * written)  # no block is written again
    assert code == 0 and ("resuming after" in text) == resumes and ("already finished" in text) == done, text
    found = files_in(tmp_path / "out")
    assert {name: found[name] for name in expected} == expected and (done or found.keys() == expected.keys())


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_signals_at_random_moments_lose_nothing_and_leave_no_worker(number, code, corpus, tmp_path):
    """Each run is ended after it has saved a block."""
    (words, expected), dice, kept = corpus, random.Random(7), 0
    words = [*words, f"--out={tmp_path}/out"]

    def blocks():
        with contextlib.suppress(FileNotFoundError):
            return json.loads((tmp_path / "out.part/progress.json").read_text())["blocks"]
        return 0

    for _ in range(6):
        with start(words, "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)") as process:
            while blocks() in (0, kept) and process.poll() is None:
                time.sleep(0.001)
            time.sleep(0.2 * dice.random())
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            text = process.communicate(timeout=120)[0]
        codes = {0, code}
        if "skipped documents" in text:  # complete; the exit handles no signals
            codes.add(-number)
        assert process.returncode in codes and "Traceback" not in text, text
        assert blocks() >= kept or (tmp_path / "out").exists()
        kept = blocks()
    code, text = command(words)
    found = files_in(tmp_path / "out")
    assert code == 0 and {name: found[name] for name in expected} == expected, text


def test_a_full_disk_is_one_line_and_no_loss(corpus, tmp_path):
    words, expected = corpus
    words = [*words, f"--out={tmp_path}/out"]
    code, text = command(words, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))")
    assert code == 2 and text.splitlines()[-1].startswith(f"error: --out={tmp_path}/out: File too large"), text
    code, text = command(words)
    assert code == 0 and "resuming after" in text and files_in(tmp_path / "out") == expected


# --- the output folder ------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_read_is_not_left_out():
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(prepare.walk("nowhere"))


def test_linked_folders_are_read_once(tmp_path):
    for folder in ("corpus", "far"):
        (tmp_path / folder).mkdir()
    (tmp_path / "far/a.txt").touch()
    for link, folder in (("0", "far"), ("1", "."), ("2", "far")):
        (tmp_path / "corpus" / link).symlink_to(tmp_path / folder)
    assert [*prepare.walk(tmp_path / "corpus", links=True)] == [str(tmp_path / "corpus/0/a.txt")]


def test_a_finished_folder_is_left_alone(here, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    first = run(tmp_path / "a.txt", tmp_path / "out")
    assert run(tmp_path / "a.txt", "--workers=1", tmp_path / "out") == first
    assert "is already finished" in capsys.readouterr().out
    assert "contains another data set" in refusal(run, tmp_path / "a.txt", "--split=1,1,1", tmp_path / "out")
    (tmp_path / "a.txt").write_text("other")
    assert "contains another data set" in refusal(run, tmp_path / "a.txt", tmp_path / "out")
    assert data_set(tmp_path / "out") == first
    run(tmp_path / "a.txt", tmp_path / "cut")
    os.truncate(tmp_path / "cut/train.bin", 2)
    assert "train.bin should have 6 tokens" in refusal(run, tmp_path / "a.txt", tmp_path / "cut")


def test_a_command_forgets_the_progress_that_it_overwrites(tmp_path, capsys):
    (tmp_path / "tokenizer.json").touch()
    for made_from in ("this", "another", "this"):
        with contextlib.closing(prepare.Output(tmp_path, 2)) as output:
            output.resume(made_from)
            assert output.progress["blocks"] == 0
            if made_from == "this":
                output.write([(0, b"12", True)], [], 0)
                output.save()
    said = f"{tmp_path}: begins again, without the 1 tokens of another command or of other files\n"
    assert capsys.readouterr().out == said and not (tmp_path / "tokenizer.json").exists()
    os.truncate(tmp_path / "train.bin", 0)
    with contextlib.closing(prepare.Output(tmp_path, 2)) as output:
        assert "train.bin should have 1 tokens" in refusal(output.resume, "this")


def test_rows_of_a_parquet_file_become_the_tokens_of_json_lines(here, tmp_path):
    """Also after a crash. No thread of pyarrow runs when the workers are forked."""
    texts = [text_of_atoms(random.Random(i), 50) for i in range(100)] + ["\0 \x1b$B"]
    expected, _ = run(write_lines(tmp_path / "a.jsonl", texts), tmp_path / "lines")
    rows = write_rows(tmp_path / "a.parquet", texts)
    words = [rows, "--tokenizer=bytes", "--split=1,0,0", f"--out={tmp_path}/rows", "--workers=2"]
    assert command(words, CRASHES["in a block"][0])[0] == -9
    watch = "import sys\nos.register_at_fork(before=lambda: 'pyarrow' in sys.modules and os._exit(9))"
    code, text = command(words, watch)
    assert code == 0 and "resuming after" in text, text
    assert data_set(tmp_path / "rows")[0] == expected


def test_damaged_rows_and_a_missing_package_are_one_line(here, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.parquet", ["one", None, "two"])
    assert f"{path}:2: OSError: text is None; should be a text" in refusal(run, path, tmp_path / "out")
    said = refusal(run, path, "--text_key=x", "--on_error=skip", tmp_path / "out")
    assert said == f"--text_key=x: {path} has the columns id text"
    assert run(path, "--on_error=skip", tmp_path / "out")[0]["train"] == whole(BYTES, ["one", "two"])
    (tmp_path / "a.jsonl.zst").write_bytes(packed(".zst", GOOD * 1000)[:-9])
    assert ":1: OSError: Truncated" in refusal(run, tmp_path / "a.jsonl.zst", tmp_path / "cut")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "a.parquet: needs a package: pip install pyarrow" in refusal(run, path, tmp_path / "none")


def test_two_runs_for_one_folder_are_refused(here, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out.part").mkdir()
    with held_elsewhere(tmp_path / "out.part/prepare.lock"):
        assert "another prepare.py is writing this data set" in refusal(run, tmp_path / "a.txt", tmp_path / "out")


# --- parts of a data set, by jobs/prepare.sh --------------------------------------------------------------------------


def job(*words, task=""):
    """Run jobs/prepare.sh, as a task of Slurm's array or to join. Return (exit code, output)."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "SLURM_ARRAY_TASK_ID": str(task)}
    words = [HERE / "jobs/prepare.sh", *map(str, words)]
    done = subprocess.run(words, cwd=HERE, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_parts_of_an_array_are_the_files_of_one_command(tmp_path):
    """A part without a validation document leaves its split empty."""
    (tmp_path / "in").mkdir()
    for i in range(7):  # 2, 2 and 3 files
        write_lines(tmp_path / f"in/{i}.jsonl", [f"document {i} {j}" for j in range(2 if i < 2 else 20)])
    trained(300).save(str(tmp_path / "tokenizer.json"))
    words = [tmp_path / "in", f"--tokenizer={tmp_path}/tokenizer.json", "--split=80,15,5"]
    n, out = 3, tmp_path / "a set"
    assert [job(n, out, *words, task=task)[0] for task in (1, 0, 3)] == [0, 0, 2]
    assert job(n, out) == (2, f"error: {out}.2 is not finished; submit the array again\n")
    assert job(1, out) == (2, f"error: {out}.1 is there, so the array had more than 1 parts\n")
    assert job(n, out, *words, task=2)[0] == 0
    assert "nothing to do" in job(n, out, *words, task=1)[1]
    code, said = job(n, out)
    assert code == 0 and "joined 3 parts" in said, said
    assert data_set(f"{out}.0")[1]["tokens"]["val"] == 0, "no part tests an empty split"
    assert command([*words, f"--out={tmp_path}/whole"])[0] == 0
    files = [files_in(folder) for folder in (tmp_path / "whole", out)]
    metas = [json.loads(each.pop("meta.json")) for each in files]
    made_from = [meta.pop("made_from")["input"] for meta in metas]
    assert files[0] == files[1] and "tokenizer.json" in files[0] and metas[0] == metas[1]
    assert made_from[1] == {"files": 7, "bytes": made_from[0]["bytes"], "parts": 3}
    assert job(n, out) == (2, f"error: {out} is there already; remove it, or name another folder\n")


@pytest.mark.parametrize("text", ["some text", ""])
def test_a_part_without_text_is_joined_but_not_parts_that_all_have_none(text, here, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("")
    for i in range(2):
        run(tmp_path / "a.txt", tmp_path / "b.txt", f"--part={i}/2", tmp_path / f"out.{i}")
    code, said = job(2, tmp_path / "out")
    assert (code, "have no text" in said) == ((0, False) if text else (2, True)), said


# --- bad input --------------------------------------------------------------------------------------------------------

GOOD = b'{"text": "good"}\n'
# case: (file, its content, place and cause, documents that are left of it)
BAD = {
    "not JSON": ("a.jsonl", GOOD + b'{"text": "x"\n' + GOOD, ":2: JSONDecodeError", ["good"] * 2),
    "text not UTF-8": ("a.txt", b"one\ntwo \xe9 x\n", ":1: not UTF-8: byte 0xe9; convert it, for example: iconv", []),
    "a piece not UTF-8": ("a.txt", b"x " * 50 + b"\n\xff" + b" y" * 300000, ":1: not UTF-8: byte 0xff", None),
    "a lone surrogate": ("a.jsonl", b'{"text": "\\udc93"}\n' + GOOD, ":1: UnicodeEncodeError", ["good"]),
    "half a .gz": ("a.txt.gz", gzip.compress(b"x y " * 200000)[:-9], ":1: OSError: Compressed file ended", []),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_stops_with_its_place_or_is_skipped_and_counted(case, here, tmp_path, monkeypatch):
    file, data, why, left = BAD[case]
    (tmp_path / "0.txt").write_text("before")
    (tmp_path / "z.txt").write_text("after")
    (tmp_path / file).write_bytes(data)
    monkeypatch.setattr(prepare, "PIECE", 1 << 19)
    words = [tmp_path / "0.txt", tmp_path / file, tmp_path / "z.txt"]
    assert refusal(run, *words, tmp_path / "out").startswith(f"{tmp_path}/{file}{why}")
    tokens, meta = run(*words, "--on_error=skip", tmp_path / "out")
    assert meta["skipped"] == 1 and meta["documents"]["train"] == (3 if left is None else 2 + len(left))
    if left is not None:
        assert tokens["train"] == whole(BYTES, ["before", *left, "after"])
    else:  # only the bad piece is left out
        assert tokens["train"].count(256) == 3 and len(tokens["train"]) > 30_000


TEXT = "これは「日本語」の、表。\nabc\n"  # 表 has a backslash in Shift_JIS


@pytest.mark.parametrize("encoding", "cp932 euc_jp iso2022_jp cp1252 utf_16 utf_16_le utf_16_be utf_32_be".split())
@pytest.mark.parametrize("kind", [".txt", ".jsonl.gz"])
def test_a_file_in_another_encoding_names_a_byte_and_a_command_that_helps(encoding, kind, here, tmp_path):
    text = {"cp1252": "naïve", "euc_jp": "カナ"}.get(encoding, TEXT)
    text = json.dumps({"text": text}, ensure_ascii=False) + "\n"
    (path := tmp_path / f"a{kind}").write_bytes(packed(kind, text.encode(encoding)))
    line = rf"^{path}:1: not UTF-8: byte 0x..; convert it, for example: iconv -f (\S+) -t UTF-8; or go on without it"
    helps = re.match(line, refusal(run, path, tmp_path / "out"))[1]
    assert text.encode(encoding).decode(helps).removeprefix("\ufeff") == text


def with_long_window(data):
    """Return a frame of zstd --long=31."""
    return b"\x28\xb5\x2f\xfd\0\xa8" + (len(data) << 3 | 1).to_bytes(3, "little") + data


@pytest.mark.parametrize(
    "kind, damage, message",
    [
        (".gz", lambda a, b: gzip.compress(a + b)[:-3000], "Compressed file ended .*: repair it"),
        (".gz", lambda a, b: gzip.compress(a) + gzip.compress(b)[20:], "Not a gzip.*: repair it"),
        (".zst", lambda a, b: packed(".zst", a) + with_long_window(b), ".*zstd -d --memory=2048MB"),
    ],
)
def test_the_rest_of_an_unreadable_file_is_no_skipped_document(kind, damage, message, here, tmp_path, capsys):
    texts = [f"{random.Random(i).random()}" for i in range(4000)]
    parts = (write_lines(tmp_path / "part", part).read_bytes() for part in (texts[:3000], texts[3000:]))
    (path := tmp_path / f"a.jsonl{kind}").write_bytes(damage(*parts))
    line = rf"^{path}:(\d+): OSError: (?=.*; the rest of this file is unreadable: ){message}; or go on"
    last = int(re.match(line, refusal(run, path, tmp_path / "out"))[1])
    tokens, _ = run(path, "--on_error=skip", tmp_path / "out")
    assert last > 1000 and tokens["train"] == whole(BYTES, texts[:last])
    assert capsys.readouterr().out.endswith(f"skipped documents: 1, and the rest of {path}\n")


NOTHING = {  # file: its content
    "a.jsonl": b"",
    "b.jsonl": b"\n \n",
    "a.jsonl.gz": gzip.compress(b"") * 2,
    "a.jsonl.zst": with_long_window(GOOD),
    "a.txt": b"",
    "empty.jsonl": b'{"text": "", "content": "good"}\n' * 3,
    "another key.jsonl": b'{"content": "good"}\n' * 3,
    "Shift_JIS.txt": TEXT.encode("cp932") * 9,  # longer than a piece
}


@pytest.mark.parametrize("file", NOTHING)
def test_input_without_text_is_refused_and_does_not_block_its_folder(file, here, tmp_path, monkeypatch):
    arrow() if file.endswith(".zst") else None
    (tmp_path / file).write_bytes(NOTHING[file])
    (tmp_path / "good.txt").write_text("good")
    monkeypatch.setattr(prepare, "SAVE_EVERY", 0)
    for _ in range(2):
        said = refusal(run, tmp_path / file, "--on_error=skip", tmp_path / "out")
        assert re.match(r"the input has no text \(files: 1, .*\); correct it, or --text_key=", said)
        assert not (tmp_path / "out").exists()
    words = ["--text_key=content"] if b"content" in NOTHING[file] else [tmp_path / "good.txt"]
    tokens, _ = run(tmp_path / file, *words, "--on_error=skip", tmp_path / "out")
    assert tokens["train"][-5:] == whole(BYTES, ["good"])


def test_after_input_without_text_the_same_command_reads_the_files_again(here, tmp_path, monkeypatch):
    """After chmod, for example."""
    (tmp_path / "a.txt").write_text("good")
    monkeypatch.setattr(prepare, "SAVE_EVERY", 0)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="no text"):
        patch.setattr(prepare, "opened", lambda path: open("/nowhere"))
        run(tmp_path / "a.txt", "--on_error=skip", tmp_path / "out")
    assert run(tmp_path / "a.txt", "--on_error=skip", tmp_path / "out")[0]["train"] == whole(BYTES, ["good"])


def test_the_name_of_a_bad_file_does_not_reach_the_terminal_raw(here, tmp_path, capsys):
    file = tmp_path / "\x1b[2Ja\n.jsonl"
    file.write_text('{"text": "good"}\n{}\n')
    run(file, "--on_error=skip", tmp_path / "out")
    assert "\x1b" not in (out := capsys.readouterr().out) and r"\x1b[2Ja\n.jsonl:2: KeyError" in out


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_memory_does_not_grow_with_the_input(name, tmp_path):
    """For 48 MB of input, the parent needs at most 12 MB more than for 3 MB."""
    # VmHWM, because ru_maxrss also counts the memory of pytest, which started the parent
    report = "import atexit; parent = os.getpid(); prepare.PIECE = 1 << 19\n"
    report += "atexit.register(lambda: os.getpid() != parent or print('peak', "
    report += "open('/proc/self/status').read().split('VmHWM:')[1].split()[0]))"
    peaks, line = [], "some words to encode, " * 40
    for lines in (3_400, 54_500):
        if name == "a.txt":
            (tmp_path / name).write_text(line * lines)
        else:
            write_lines(tmp_path / name, [line] * lines)
        text = command([tmp_path / name, f"--out={tmp_path}/{lines}", "--tokenizer=bytes", "--workers=2"], report)[1]
        peaks.append(int(text.split("peak ")[1].split()[0]))
    assert peaks[1] - peaks[0] < 12_000, peaks


def test_importing_prepare_loads_neither_torch_nor_numpy():
    """No import may start threads before the workers are forked."""
    code = "import sys, prepare; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=HERE, text=True).split() == ["False", "False"]


# --- Megatron-LM's files ----------------------------------------------------------------------------------------------

CODES = {"i4": 4, "u2": 8}


def write_megatron(prefix, documents, dtype="u2"):
    """Write documents, lists of sequences of ids, as Megatron-LM's IndexedDatasetBuilder."""
    sequences = [np.array(s, f"<{dtype}") for document in documents for s in document]
    sizes, bounds = [len(s) for s in sequences], np.cumsum([0, *map(len, documents)])
    pointers = np.cumsum([0, *sizes])[:-1] * np.dtype(dtype).itemsize
    data = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sizes), len(bounds))
    data += np.array(sizes, "<i4").tobytes() + pointers.astype("<i8").tobytes() + bounds.astype("<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(data)
    Path(f"{prefix}.bin").write_bytes(b"".join(s.tobytes() for s in sequences))


@pytest.mark.parametrize("eod", [True, False])
@pytest.mark.parametrize("dtype", CODES)
def test_megatrons_files_give_the_data_set_of_the_same_texts(dtype, eod, here, tmp_path):
    """With and without --append-eod; documents have several sequences or none."""
    rng, eot = random.Random(dtype), [256] if eod else []
    texts = ["", *("".join(rng.choices("abc d\n", k=rng.choice([0, 1, 30, 300]))) for _ in range(1500)), "", "end"]
    documents = []
    for text in texts:
        ids, at = [*text.encode(), *eot], rng.randrange(len(text) + 1)
        documents.append([ids[:at], ids[at:]] if ids else [])
    write_megatron(tmp_path / "m", documents, dtype)
    words = [write_lines(tmp_path / "a.jsonl", texts), "--split=2,1,1"]
    expected, meta = run(*words, tmp_path / "a")
    found, other = run(f"--megatron={tmp_path}/m", "--split=2,1,1", tmp_path / "b")
    assert found == expected and other | {"made_from": 0} == meta | {"made_from": 0}


DAMAGED = "damaged, or not encoded with --tokenizer=bytes"
SOME = [[[1, 2], [3]], [[4, 5, 6]]]


@pytest.mark.parametrize(
    "documents, file, more, message",
    [
        (SOME, "m.bin", -12, DAMAGED),
        (SOME, "m.idx", -44, DAMAGED),
        ([[[1, 999]]], "m.bin", 0, DAMAGED),
        ([[[1, -1]]], "m.bin", 0, DAMAGED),
        ([], "m.bin", 0, "an empty file"),
        ([[[256]], [], [[], [256]]], "m.bin", 0, "the input has no text"),
        ([[[1, 2]] * 8], "m.idx", 8, "its .idx has modes: images cannot be converted, only text"),
    ],
)
def test_megatrons_files_that_are_refused(documents, file, more, message, here, tmp_path):
    """Damaged, with another vocabulary, without text, with images: `file` has `more` bytes."""
    write_megatron(tmp_path / "m", documents, "i4")
    os.truncate(tmp_path / file, (tmp_path / file).stat().st_size + more)
    assert message in refusal(run, f"--megatron={tmp_path}/m", tmp_path / "b")


@pytest.mark.parametrize("sizes, bounds", [([3, -1, 4], [0, 2, 3]), ([2, 1, 3], [1, 2, 3]), ([2, 1, 3], [0, -3, -1])])
def test_megatrons_documents_ascend_from_0(sizes, bounds, here, tmp_path):
    write_megatron(tmp_path / "m", SOME)
    index = np.fromfile(tmp_path / "m.idx", "u1")
    index[34:46].view("<i4")[:], index[-24:].view("<i8")[:] = sizes, bounds
    index.tofile(tmp_path / "m.idx")
    assert DAMAGED in refusal(run, f"--megatron={tmp_path}/m", tmp_path / "b")
