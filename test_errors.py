"""Tests of errors.py: one line for a mistake, also for torchrun; options of the commands; the lock of a folder."""

import contextlib
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import errors
from errors import Parser, UserError, locked

# The holder takes the lock and forks a worker. Both processes then wait until their stdin is closed.
HOLDER = """
import os, sys
from errors import locked
with locked(sys.argv[1], ""):
    if os.fork():
        print("locked", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held_elsewhere(path):
    """Start a process that holds the lock of the file `path` while the block runs. The process has a worker."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=Path(__file__).parent, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process


def test_a_lock_is_refused_while_another_process_holds_it(tmp_path):
    path = tmp_path / "lock"
    with held_elsewhere(path), pytest.raises(UserError, match="it is taken"), locked(path, "it is taken"):
        pass
    with locked(path, "it is taken"):
        assert path.exists()


def test_a_lock_ends_with_its_process_though_a_worker_lives_on(tmp_path):
    with held_elsewhere(tmp_path / "lock") as process:
        process.kill()
        process.wait()
        with locked(tmp_path / "lock", "it is taken"):
            pass


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^\S+/missing/lock: No such file or directory$"):
        with locked(tmp_path / "missing" / "lock", "it is taken"):
            pass


def test_a_file_system_without_locks_is_used_without_them(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(errors.fcntl, "lockf", lockf)
    with locked(tmp_path / "lock", "it is taken"):
        assert (tmp_path / "lock").exists()


# --- reports ----------------------------------------------------------------------------------------------------------


def mistake():
    raise UserError("lr=-1: should be zero or more")


def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(SystemExit) as stop:
        errors.exit_on_user_error(mistake)
    assert stop.value.code == 2 and capsys.readouterr() == ("", "error: lr=-1: should be zero or more\n")
    assert list(tmp_path.iterdir()) == []


def test_torchrun_reads_the_line_as_its_root_cause(monkeypatch, tmp_path):
    """A lost peer is reported one second late, so that the peer's own mistake is the root cause."""
    reports = {0: ("rank 0 waited for ranks [1]", 1), 1: ("out_dir=x: No space left on device", 0)}
    for rank, (text, late) in reports.items():
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        errors.report(UserError(text), late)
    failures = {rank: ProcessFailure(rank, 1000 + rank, 2, str(tmp_path / f"{rank}.json")) for rank in reports}
    assert [f.timestamp - int(time.time()) for f in failures.values()] in ([1, 0], [0, -1])
    lines = ChildFailedError("train.py", failures).format_msg().splitlines()
    assert lines[-2] == "  traceback : error: out_dir=x: No space left on device"


def test_an_error_file_that_cannot_be_written_changes_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    with pytest.raises(SystemExit) as stop:
        errors.exit_on_user_error(mistake)
    assert stop.value.code == 2 and capsys.readouterr().err == "error: lr=-1: should be zero or more\n"


# --- lost text, refused calls, lack of memory -------------------------------------------------------------------------

# The program prints "é", writes a file, and may fail.
PROGRAM = """
import sys, errors
def main():
    print("work \u00e9")
    with open("result", "w") as file:
        file.write("done")
    {}
errors.exit_on_user_error(main)
"""
NO_SPACE = "error: stdout: No space left on device; the work is done, but its text is lost\n"
IS_CLOSED = "error: stdout: it is closed; the work is done, but its text is lost\n"


def end_of(tmp_path, redirection, line="pass", encoding="utf-8"):
    """Run PROGRAM with `line` by a shell with `redirection`. Return (exit code, stdout, stderr, its file)."""
    (tmp_path / "program.py").write_text(PROGRAM.format(line), encoding="utf-8")
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(Path(__file__).parent)}
    command = f"{sys.executable} program.py {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True)
    return done.returncode, done.stdout, done.stderr.decode(), (tmp_path / "result").read_text()


@pytest.mark.parametrize(
    "redirection, code, out, err",
    [
        ("", 0, "work é\n", ""),
        (">/dev/full", 1, "", NO_SPACE),
        (">&-", 1, "", IS_CLOSED),
        ("2>&-", 0, "work é\n", ""),
        ("2>/dev/full", 0, "work é\n", ""),
        (">&- 2>&-", 1, "", ""),
        (">/dev/full 2>&1", 1, "", ""),
        ("<&- >&-", 1, "", IS_CLOSED),
    ],
)
def test_lost_text_does_not_stop_the_work(tmp_path, redirection, code, out, err):
    assert end_of(tmp_path, redirection) == (code, out.encode(), err, "done")


def test_a_reader_that_closes_the_pipe_early_is_no_error(tmp_path):
    line = "[print('x' * 1000) for _ in range(1000)]"
    assert end_of(tmp_path, "| head -c 3; exit ${PIPESTATUS[0]}", line) == (141, b"wor", "", "done")


def test_a_character_that_stdout_lacks_is_an_escape(tmp_path):
    assert end_of(tmp_path, "", encoding="ascii") == (0, b"work \\xe9\n", "", "done")


@pytest.mark.parametrize(
    "line, err",
    [
        ("open('missing/file')", "error: missing/file: No such file or directory\n"),
        ("raise MemoryError", "error: not enough memory: Python needs more\n"),
        ('raise RuntimeError("can\'t allocate memory: 9 bytes")', "error: not enough memory: can't alloc"),
        ("raise errors.UserError('a\\nb\\x1b[31m')", "error: a\\nb\\x1b[31m\n"),
        ("raise errors.UserError('x' * 5000)", f"error: {'x' * 500} ... {'x' * 400}\n"),
        ("raise errors.UserError('a\\nerror: b')", "error: a\nerror: b\n"),
    ],
)
def test_what_the_surroundings_cause_is_one_line(tmp_path, line, err):
    code, out, found, _ = end_of(tmp_path, "", line)
    assert (code, out) == (2, "work é\n".encode()) and found.startswith(err)


def test_a_defect_of_the_program_keeps_its_traceback(tmp_path):
    code, _, err, _ = end_of(tmp_path, "", "raise RuntimeError('a defect')")
    assert code == 1 and "Traceback" in err and "a defect" in err


# --- options ----------------------------------------------------------------------------------------------------------


def parse(prog, *words):
    """The values of a parser with the options --text_key and --workers and with INPUTs."""
    parser = Parser(prog, allow_abbrev=False)
    parser.add_argument("inputs", nargs="*")
    parser.add_argument("--text_key")
    parser.add_argument("--workers", type=int)
    return vars(parser.parse_args(words))


def test_dashes_and_underscores_are_equal_in_an_option():
    expected = {"inputs": ["a-b"], "text_key": "c-d", "workers": 2}
    for words in (["--text-key=c-d", "a-b", "--workers=2"], ["--text_key", "c-d", "--workers", "2", "a-b"]):
        assert parse("python prepare.py", *words) == expected
    assert parse("python prepare.py", "--", "--text-key")["inputs"] == ["--text-key"]


TABLE = "(python prepare.py --help lists such flags)"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--input", "a.jsonl"], f"--input: name the files without a flag: python prepare.py FILE ... {TABLE}"),
        (["--output-prefix=x"], f"--output-prefix: use --out, a folder {TABLE}"),
        (["--append_eod"], f"--append_eod: not needed: every document ends with the end-of-text token {TABLE}"),
        (["--num-layers", "24"], "--num-layers: belongs to train.py"),
        (["--zero-stage=1"], "--zero-stage: belongs to train.py (use --zero)"),
        (["--text-keys=a"], "--text-keys: no such option; the nearest is text_key"),
        (["--foo"], "--foo: no such option; python prepare.py --help lists all"),
        (["--text_key=--"], "--text_key=--: should be a value"),
        (["--workers"], "argument --workers: expected one argument (python prepare.py --help lists the options)"),
        (["--workers=x"], "argument --workers: invalid int value: 'x' (python prepare.py --help lists the options)"),
    ],
)
def test_mistakes_in_options(words, message):
    with pytest.raises(UserError) as error:
        parse("python prepare.py", *words)
    assert str(error.value) == message


def test_generates_table():
    with pytest.raises(UserError) as error:
        parse("python generate.py", "--load", "out/tiny")
    answer = "name the folder without a flag: python generate.py out/tiny (python generate.py --help lists such flags)"
    assert str(error.value) == f"--load: {answer}"
