"""Tests bench/: the command line, the measurements on `Cpu`, the commands of first_run.sh. No test checks a time."""

import dataclasses
import inspect
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from testing.interpreted import poisoned  # noqa: F401  (first: it skips this file without Triton)

# isort: split

import config as configuration
import kernels
from bench import __main__ as command_line
from bench import kernels as bench_kernels
from bench import layouts, machine
from bench import train as bench_train
from bench.machine import Cpu
from bench.plain import STEADY
from config import Config
from errors import UserError

OPERATIONS = bench_kernels.operations(torch.device("cpu"), **bench_kernels.SMALL)
SCRIPT = Path(__file__).parent / "first_run.sh"

pytestmark = pytest.mark.slow  # no part of the program

# --- the command line -------------------------------------------------------------------------------------------------


def bench(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    command_line.main()


def test_each_measurement_and_option_is_explained():
    for name in command_line.NAMES:
        measure, _ = command_line.measurement(name)
        assert f"python -m bench {name} " in command_line.__doc__
        for option in inspect.signature(measure).parameters:
            assert f"--{option} " in measure.__doc__ or f"--{option}," in measure.__doc__


def test_bench_layouts_prints_a_row_of_equal_losses(monkeypatch, capfd):
    sizes = "--repeats=1", "--layers=2", "--hidden=64", "--seq=32", "--vocab=256"
    bench(monkeypatch, "layouts", *sizes, "--only=2")
    rows = [line.split("  ")[0] for line in capfd.readouterr().out.splitlines()[3:]]
    assert rows == [name for name, *_ in layouts.LAYOUTS if "2" in name]


# --- kernels ----------------------------------------------------------------------------------------------------------


def measured(monkeypatch, capsys, only=""):
    """Return (whether all results of `bench kernels` are right, its rows)."""
    try:
        bench(monkeypatch, "kernels", f"--only={only}")
        right = True
    except SystemExit as error:
        right = not error.code
    return right, capsys.readouterr().out.splitlines()[4:]


def test_bench_kernels_finds_every_operation_right(monkeypatch, capsys):
    right, rows = measured(monkeypatch, capsys)
    rows = [row for row in rows if "cudnn" not in row]
    assert right and len(rows) == sum(len(op.floor) for op in OPERATIONS) - 2
    assert not any("failed" in row or "WRONG" in row for row in rows)


def exhausted(*_):
    raise torch.cuda.OutOfMemoryError("4 TiB")


def test_a_wrong_kernel_and_one_that_fails_are_reported(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "gelu_", lambda y, bias: torch.nn.functional.gelu(1.1 * y + bias))
    right, rows = measured(monkeypatch, capsys, "gelu")
    assert not right and "WRONG" in rows[0]
    monkeypatch.setattr(kernels, "relu_", exhausted)
    right, rows = measured(monkeypatch, capsys, "relu")
    assert not right and "out of memory" in rows[0]


# --- training ---------------------------------------------------------------------------------------------------------


TINY = Config(
    num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=128, dtype="bf16",
    micro_batch_size=2, global_batch_size=2, **STEADY,
)  # fmt: skip


def test_bench_train_runs_on_a_cpu(monkeypatch, capsys):
    bench(monkeypatch, "train", "--steps=1", "--repeats=1", "--micro_batches=2")
    out = capsys.readouterr().out
    assert "dropout=0.1 -> 0.0, recompute=full -> none" in out
    assert "micro-batch of 4 x 64 tokens, 2 in an update" in out and "failed" not in out
    for name in ("ours, kernels=auto", "plain PyTorch, eager", "plain PyTorch, compiled"):
        assert out.count(f"\n{name} ") == 2  # losses and table
    assert "FLOPs in a step" in out and "GFLOP/s" in out and "aten::addmm" in out and "the GPU" not in out


def test_out_of_memory_is_a_cell_and_not_the_end(capsys, monkeypatch):
    monkeypatch.setattr(bench_train.PlainModel, "step", exhausted)
    assert bench_train.compare(Cpu(), TINY, 1, 1)
    assert capsys.readouterr().out.count("out of memory") == 2 * 2  # losses and table of two
    monkeypatch.setattr(bench_train.train, "train_step", exhausted)
    assert not bench_train.compare(Cpu(), TINY, 1, 1, "eager")


def test_another_training_is_refused(monkeypatch):
    loss = bench_train.PlainModel.loss
    monkeypatch.setattr(bench_train.PlainModel, "loss", lambda *arguments: 1.1 * loss(*arguments))
    with pytest.raises(UserError, match="do not train the same"):
        bench_train.compare(Cpu(), TINY, 1, 1)


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch):
    """Return a `Gpu` and its recorded calls of torch.cuda."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def elapsed_time(self, stop):
            return 0.5  # ms

        record = synchronize = lambda self: None

    for name in ("_sleep", "empty_cache", "set_sync_debug_mode", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, lambda *a, name=name: calls.append((name, *a)) or "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(machine.Gpu, "synchronize", lambda self: None)
    gpu = machine.Gpu()
    gpu.device, gpu.compile, gpu.yardstick, gpu.profiled = torch.device("cpu"), lambda f: f, (1024, 16), Cpu.profiled
    gpu.cache = 1
    return gpu, calls


def test_a_gpu_is_timed_by_events_and_checked_for_waits(pretended, capsys):
    gpu, calls = pretended
    assert gpu.timed(lambda: 7) == (500, 7) and calls[-1] == ("_sleep", machine.HEAD_START)
    assert bench_kernels.compare(gpu, bench_kernels.SMALL, 1, ["gelu"])
    assert "250.0 (250.0-250.0)" in capsys.readouterr().out  # 500 us / 2 copies
    assert bench_train.compare(gpu, TINY, 1, 1, "eager")
    out = capsys.readouterr().out
    assert "MFU relative to 989 TFLOP/s" in out and "the host never waits" in out

    def wait():
        if calls[-1] == ("set_sync_debug_mode", "error"):
            raise RuntimeError("called a synchronizing CUDA operation\nand more")

    who = bench_train.contestants_of(TINY, gpu, bench_train.batches_of(TINY, gpu), "nothing")[0]
    who = dataclasses.replace(who, step=wait)
    assert bench_train.waits(gpu, who) == "the host waits for the GPU: called a synchronizing CUDA operation"
    assert calls[-1] == ("set_sync_debug_mode", "default")


# --- the first run ----------------------------------------------------------------------------------------------------


def first_run(*arguments, python=sys.executable):
    environment = os.environ | {"PYTHON": str(python)}
    return subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, env=environment)


def test_the_first_run_needs_a_gpu_and_a_part(tmp_path):
    for arguments in (["1", str(tmp_path)], [], ["15"], ["--dry_run"]):
        done = first_run(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_every_command_of_the_first_run_is_accepted():
    """Each line parses. Each operation of bench/kernels.py has one command."""
    operations = []
    lists = [first_run("--list", part).stdout for part in ("all", *map(str, range(9, 15)))]
    for line in "".join(lists).splitlines():
        (_, *words), ranks = shlex.split(line), 1
        if words[1] == "torch.distributed.run":
            words, ranks = words[3:], int(words[2].partition("=")[2])
        if words[:2] == ["-m", "bench"]:
            options = command_line.measurement(words[2])[1].parse_args(words[3:])
            if words[2] == "kernels":
                operations.append(options.only)
            elif words[2] == "train":
                assert bench_train.load(options.config, 32, 1)
        elif words[0] == "train.py":
            assert configuration.check(configuration.load(words[1:]), ranks) > 0
        else:
            assert words[0] == "prepare.py" or words[:2] == ["-m", "pytest"]
    assert sorted(operations) == sorted(op.name for op in OPERATIONS)


def test_same_names_the_first_difference(monkeypatch, tmp_path, capsys):
    for name, norm in [("one", 1.0), ("near", 1.00001), ("other", 1.001)]:
        rows = [{"iteration": step, "lm_loss": 2.0, "grad_norm": norm if step == 2 else 1.0} for step in (1, 2)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    bench(monkeypatch, "same", f"--one={tmp_path}/one", f"--other={tmp_path}/near")
    assert "2 steps" in capsys.readouterr().out
    with pytest.raises(UserError, match="iteration 2: grad_norm"):
        bench(monkeypatch, "same", f"--one={tmp_path}/one", f"--other={tmp_path}/other")


def test_the_first_run_goes_on_after_a_failure(tmp_path):
    """The second of five commands fails."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho did "$@"\ncase "$*" in *fc1*) exit 7 ;; esac\n')
    python.chmod(0o755)
    done = first_run("--dry_run", "1", str(tmp_path / "out"), python=python)
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert done.returncode == 1 and summary.count("\npassed  part 1 ") == 4
    assert "(exit code 7: did -m bench kernels --only=dW of fc1 --repeats=10)\n" in summary


def test_two_parts_of_the_first_run(tmp_path):
    for part in ("2", "8"):
        done = first_run("--dry_run", part, str(tmp_path))
        assert done.returncode == 0, done.stdout
    assert "8 in an update" in (tmp_path / "part8.log").read_text()
    assert (tmp_path / "gpt2_345m_fast.jsonl").stat().st_size
