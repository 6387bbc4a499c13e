"""Tests bench/: the loop, the command line, each measurement on a CPU, first_run.sh. No test checks a time."""

import functools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import testing.interpreted  # noqa: F401  (first: it skips this file without Triton)

# isort: split

import kernels
from bench import __main__ as command_line
from bench import kernels as bench_kernels
from bench import layouts
from bench.compete import compete, train_beside
from config import Config
from errors import UserError

pytestmark = pytest.mark.slow  # no part of the program

# --- the loop and the command line --------------------------------------------------------------------


def exhausted(*_):
    raise torch.cuda.OutOfMemoryError("4 TiB")


def test_contestants_take_turns_and_one_that_fails_leaves(capsys):
    order = []
    contestants = {name: functools.partial(lambda name: order.append(name) or len(order), name) for name in "ab"}
    assert compete(contestants | {"c": exhausted}, 3) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert "".join(order) == "abbaab"
    assert capsys.readouterr().out == "c failed: OutOfMemoryError: 4 TiB\n"


def steps_of(*numbers):
    """Return a contestant's start(): its steps have these (loss, gradient norm)."""
    return lambda: functools.partial(next, iter([lambda pair=pair: pair for pair in numbers * 9]))


def test_a_row_has_times_and_ratios_and_another_training_is_refused(capsys):
    c, same = Config(dtype="fp32", num_layers=1, hidden_size=8), steps_of((2.0, 1.0))
    contestants = {"ours": same, "theirs": steps_of((2.0001, 1.0))}
    assert train_beside("dp=1", replace(c, dtype="bf16"), contestants, 2, 1, "NVIDIA H100 80GB HBM3")
    *figures, ours, theirs = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in figures] == ["ours", "theirs"]
    assert ours.startswith("dp=1 ") and ours.count("(") == 1 and theirs.count("(") == 2
    assert ours.endswith("%") and theirs.endswith("%")  # MFU
    assert not train_beside("dp=1", c, {"ours": exhausted, "theirs": same}, 2, 1)
    for what, pair in (("loss", (2.001, 1.0)), ("gradient norm", (2.0, 1.001))):
        with pytest.raises(UserError, match=f"dp=1: the {what} of step 2 differs: ours .*, theirs"):
            train_beside("dp=1", c, {"ours": same, "theirs": steps_of((2.0, 1.0), pair)}, 2, 1)


def bench(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    command_line.main()


# --- the measurements -----------------------------------------------------------------------------------


def test_layouts_train_as_pytorchs(monkeypatch, capfd):
    """Each of PyTorch's programs for two processes, and each of its schedules."""
    monkeypatch.setattr(layouts, "MODEL", dict(layouts.MODEL, num_layers=2, hidden_size=16, vocab_size=128))
    monkeypatch.setattr(layouts, "LAYOUTS", [layout for layout in layouts.LAYOUTS if layout[1] == 2])
    monkeypatch.setattr(layouts, "ROUNDS", 1)
    bench(monkeypatch, "layouts")
    rows = [line[:26].strip() for line in capfd.readouterr().out.splitlines()[2:]]
    assert rows == [layout[0] for layout in layouts.LAYOUTS for _ in range(2)]


def test_a_wrong_kernel_and_one_that_fails_are_reported(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "gelu_", lambda y, bias: torch.nn.functional.gelu(1.1 * y + bias))
    monkeypatch.setattr(kernels, "relu_", exhausted)
    for name, words in (("gelu", "WRONG"), ("relu", "relu failed: OutOfMemoryError")):
        with pytest.raises(SystemExit) as ended:
            bench(monkeypatch, "kernels", name)
        assert ended.value.code == 1 and words in capsys.readouterr().out


def test_the_times_of_a_kernel(monkeypatch, capsys):
    """As on a GPU, with another clock and without a compiler."""

    def microseconds(call):
        call()
        return 4.0

    monkeypatch.setattr(bench_kernels, "microseconds", microseconds)
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    operation = bench_kernels.operations(torch.device("cpu"), **bench_kernels.SMALL)["add, layer norm"]
    assert bench_kernels.check("add, layer norm", *operation, 2)
    forward, backward = capsys.readouterr().out.splitlines()
    rate = 4 * 2 * 16 * 64 / 4e3  # passes, bytes of bf16, n, h; bytes in 4 us as GB/s
    for line, direction in ((forward, "forward"), (backward, "backward")):
        assert direction in line and f" {rate:.0f} " in line
        assert "Triton 4.0 (4.0-4.0); reference.py 4.0 (4.0-4.0); compiled 4.0 (4.0-4.0)" in line
        assert line.endswith("Triton / reference.py 1.00 (1.00-1.00); Triton / compiled 1.00 (1.00-1.00)")


# --- the first run --------------------------------------------------------------------------------------


def first_run(folder, python=sys.executable):
    environment = os.environ | {"PYTHON": str(python)}
    return subprocess.run(["bash", "bench/first_run.sh", folder], capture_output=True, text=True, env=environment)


def test_the_first_run_on_a_cpu(tmp_path):
    """Every operation is right. Ours, plain PyTorch and its compiled form train alike."""
    done = first_run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "summary.txt").read_text().count("\npassed  ") == 3
    assert "6 skipped" in (tmp_path / "tests.log").read_text()
    rows = (tmp_path / "kernels.log").read_text().splitlines()[2:]
    names = [row[:26].rstrip() for row in rows]
    assert names == [*bench_kernels.operations(torch.device("cpu"), **bench_kernels.SMALL)]
    rows = (tmp_path / "train.log").read_text().splitlines()[3:]
    assert [row[26:48].strip() for row in rows] == ["ours", "PyTorch", "PyTorch, compiled"]


def test_the_first_run_goes_on_after_a_failure_and_without_pytest(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho did "$@"\ncase "$*" in *pytest* | *kernels*) exit 7 ;; esac\n')
    python.chmod(0o755)
    done = first_run(tmp_path / "out", python)
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert done.returncode == 1 and "\nskipped the tests: pytest is not installed\n" in summary
    assert (
        "  -m bench kernels  (exit code 7: did -m bench kernels)\n" in summary
        and "\npassed  0 s  -m bench train" in summary
    )
