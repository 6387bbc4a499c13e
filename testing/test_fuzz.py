"""Test the fuzzer, and run it: 300 cases of each command must end without a find."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from errors import UserError
from testing import fuzz
from testing.fuzz import Case, End

PLAIN = Case([], {}, {}, None, [])


def end_of(main, tmp_path, case=PLAIN, **limits):
    end = fuzz.run(main, case, tmp_path, **limits)
    return fuzz.wrong(case, end), end


def fails(text):
    def main():
        raise UserError(text)

    return main


def traceback():
    raise RuntimeError("a defect")


def lines():
    sys.stderr.write("one\ntwo\nthree\n")
    raise UserError("four")


def busy():
    while True:
        pass


@pytest.mark.parametrize(
    "main, why",
    [
        (traceback, "traceback"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "signal SIGSEGV"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: sys.exit(1), "exit code 1"),
        (lambda: None, "exit code 0 without a word"),
        (lambda: sys.exit(2), "exit code 2 without a line"),
        (lines, "4 lines of error"),
        (lambda: time.sleep(60), "silent"),
        (busy, "silent"),
        (lambda: print("work"), None),
        (fails("a mistake"), None),
    ],
)
def test_each_wrong_end_is_a_find(main, why, tmp_path):
    assert end_of(main, tmp_path, silent=2, silent_cpu=1)[0] == why


def forever():
    while True:
        print("work", flush=True)
        time.sleep(0.05)


def test_a_command_that_still_prints_is_no_find(tmp_path):
    why, end = end_of(forever, tmp_path, silent=5, longest=1)
    assert (why, end.ended) == (None, "long") and "work\n" in end.out


@pytest.mark.parametrize(
    "streams, code, err",
    [
        ({1: "closed"}, 1, "error: stdout: it is closed; the work is done, but its text is lost\n"),
        ({1: "full"}, 1, "error: stdout: No space left on device; the work is done, but its text is lost\n"),
        ({1: "broken"}, 141, ""),
        ({2: "closed"}, 0, ""),
        ({1: "closed", 2: "full"}, 1, ""),
        ({"encoding": "ascii"}, 0, ""),
    ],
)
def test_streams_of_a_case(streams, code, err, tmp_path):
    case = PLAIN._replace(streams=streams)
    why, end = end_of(lambda: print("\u00e9", flush=True), tmp_path, case)
    assert (why, end.code, end.err) == (None, code, err)


def test_a_full_disk_of_a_case(tmp_path):
    def main():
        Path("file").write_text("x" * 100)

    why, end = end_of(main, tmp_path, PLAIN._replace(full=10))
    assert (why, end.code) == (None, 2) and "File too large" in end.err


def test_progress_bars_are_no_errors():
    bar = "\r  0%|          | 0.00/2.00 [00:00<?, ?B/s]\r100%|####| 2.00/2.00 [00:07<?, ?B/s]\n0.00B [00:00, ?B/s]\n"
    assert fuzz.wrong(PLAIN, End(2, "", bar + "error: x\n")) is None
    assert fuzz.wrong(PLAIN, End(2, "", bar)) == "exit code 2 without a line"


def test_a_case_is_a_function_of_its_seed_and_index(tmp_path, monkeypatch, folder):
    cases = []
    for name, index in [("a", 5), ("b", 5), ("c", 6)]:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        cases.append(fuzz.make("curve", 1, index, folder))
    assert cases[0] == cases[1] != cases[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    fuzz.in_a_fork(fuzz.prepare_folder, path)
    return path


FINDS = [  # (command, words, variables, file that becomes a FIFO)
    ("curve", ["run"], {"COLUMNS": "9" * 30}, None),
    ("curve", ["run"], {}, "run/metrics.jsonl"),
    ("schedules", ["1f1b"], {"COLUMNS": "9" * 30}, None),
    ("schedules", ["1f1b", "--chunks=--"], {}, None),
    ("schedules", ["--trace=trace.json"], {}, "trace.json"),
    ("schedules", ["zb-h2", "--stages=1000"], {}, None),
    ("schedules", ["1f1b", "--svg=fifo"], {}, "fifo"),
    ("curve", ["run", "--svg=fifo"], {}, "fifo"),
    ("traffic", ["config.py", "--ranks=1", "--svg=fifo"], {}, "fifo"),
    ("train", ["config.py", "--trace=fifo"], {}, "fifo"),
    ("prepare", ["texts", "--tokenizer=bytes", "--split=--"], {}, None),
    ("prepare", ["texts", "--tokenizer=bytes", "--out=data"], {}, "data/meta.json"),
    ("generate", ["run", "--max_tokens=--"], {}, None),
    ("plan", ["config.py", "--gpus=1", "--device=cpu", "--rank=--", "--dry_run"], {}, None),
    ("plan", ["config.py", "--gpus=2", "--device=cpu"], {}, "accounts/cpu.json"),
    ("convert", ["from_hf", "model", "--out=new"], {}, "model/config.json"),
    ("convert", ["from_hf", "model", "--out=new"], {}, "model/tokenizer.json"),
]


@pytest.mark.parametrize("command, words, variables, fifo", FINDS)
def test_earlier_finds(command, words, variables, fifo, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "files")
    if fifo:
        (tmp_path / "files" / fifo).parent.mkdir(exist_ok=True)
        (tmp_path / "files" / fifo).unlink(missing_ok=True)
        os.mkfifo(tmp_path / "files" / fifo)
    case = Case(words, variables, {}, None, [])
    end = fuzz.run(fuzz.main_of(command), case, tmp_path / "files")
    assert fuzz.wrong(case, end) is None, end


@pytest.fixture(scope="module")
def runs():
    """Fuzz all commands, two of them at the same time. Return {command: future of its result}."""
    pool, runs = ThreadPoolExecutor(2), {}
    for command in fuzz.COMMANDS:
        words = [sys.executable, "-m", "testing.fuzz", command, "--cases=300"]
        root = Path(__file__).parent.parent
        runs[command] = pool.submit(subprocess.run, words, cwd=root, capture_output=True, text=True)
    yield runs
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("command", fuzz.COMMANDS)
def test_random_mistakes_end_as_they_should(command, runs):
    done = runs[command].result()
    assert done.returncode == 0 and "; 0 finds" in done.stdout, done.stdout + done.stderr
