"""Tests bench/: the command line, and the measurements on a CPU. A measurement has two paths: without and with a GPU.

On the GPU path the tests replace `Gpu` by `Cpu`, which uses the host's clock and compiles nothing. The last tests run
class `Gpu` itself with replaced functions of torch.cuda. No test checks a time.
"""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to measure")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: run python -m bench instead", allow_module_level=True)

import kernels
from bench import __main__ as command_line
from bench import kernels as bench_kernels
from bench import machine as bench_machine
from bench import prepare as bench_prepare
from bench import train as bench_train
from bench.kernels import as_tuple
from bench.machine import Cpu
from config import Config
from errors import UserError
from testing import sanitizer

SIZES = dict(n=16, h=64, s=16, v=200)
NAMES = [op.name for op in bench_kernels.operations(torch.device("cpu"), torch.float32, **SIZES)]


def run_python(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parent)


def bench(*arguments):
    done = run_python("-m", "bench", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bench_without_a_gpu(name):
    out = bench(name)
    assert out.startswith("no GPU here: ")
    return out


# --- the command line -------------------------------------------------------------------------------------------------


def test_without_a_name_it_lists_the_measurements():
    out = bench()
    for name in ("prepare", "layouts", "checkpoint", "delay", "kernels", "train"):
        measure = command_line.measurement(name)
        (line,) = (line for line in out.splitlines() if line.startswith(f"python -m bench {name} "))
        for option, parameter in inspect.signature(measure).parameters.items():
            assert f" --{option}={parameter.default}" in line and f"--{option}" in measure.__doc__
        assert measure.__doc__ in out
    assert bench("--help") == out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["layout"],
            "layout is no measurement; the measurements are prepare, layouts, checkpoint, delay, kernels, train",
        ),
        (["train", "--step=1"], "--step=1: train has the options --configs, --micro_batch_sizes, --steps, --repeats"),
        (["train", "--steps=few"], "--steps=few: should be like --steps=10"),
        (["layouts", "--repeats=0"], "--repeats=0: should be between 1 and 1,048,576"),
        (["layouts", "--layers=-1"], "--layers=-1: should be between 1 and 1,048,576"),
        (["layouts", "--hidden=100"], "hidden_size = 100 is not a multiple of num_attention_heads = 8"),
        (["kernels", "--tokens=99999999"], "--tokens=99999999: should be between 1 and 1,048,576"),
        (["train", "--micro_batch_sizes=8,0"], "--micro_batch_sizes=8,0: should be like 8,16,32"),
        (["prepare", "--parts=size"], "--parts=size: should be speed, memory or speed,memory"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(UserError) as error:
        command_line.main()
    assert str(error.value) == message


@pytest.mark.parametrize("name, first", [("layouts", "one process, dp=2, "), ("kernels", "layer_norm, add, ")])
def test_a_measurement_of_nothing_is_refused(monkeypatch, name, first):
    monkeypatch.setattr(sys, "argv", ["bench", name, "--only=nomatch"])
    with pytest.raises(UserError, match=f"^--only=nomatch: no .* has this text in its name; the names are {first}"):
        command_line.main()


def test_a_layout_that_needs_more_than_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "layouts", "--hidden=1000000", "--only=one process"])
    with pytest.raises(UserError, match=r"hidden_size=1000000, .*: needs at least [\d,.]+ GB of memory; this rank has"):
        command_line.main()


def test_prepare_needs_only_the_tokenizers_that_it_measures(monkeypatch):
    loaded = []
    monkeypatch.setattr(bench_prepare, "load_tokenizer", lambda name: loaded.append(name))
    monkeypatch.setattr(
        bench_prepare, "run_prepare", lambda *a, **_: loaded.append(a[2]) or (1.0, {"Rss": 1, "Pss": 1})
    )
    monkeypatch.setattr(bench_prepare, "MEMORY_CASES", {"a": lambda file, size: file.write(b"x")})
    bench_prepare.measure(tokenizers="bytes", parts="memory", line_mb=1)
    assert loaded == ["bytes", "bytes"]


def test_options_are_parsed_as_their_defaults(monkeypatch):
    taken = {}
    monkeypatch.setattr(bench_train, "measure", lambda steps=10, configs="tiny": taken.update(s=steps, c=configs))
    monkeypatch.setattr(sys, "argv", ["bench", "train", "--steps=3", "--configs=a=b"])
    command_line.main()
    assert taken == {"s": 3, "c": "a=b"}


def test_the_old_command_names_the_new_one():
    done = run_python("bench.py", "layouts", "--x=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: python bench.py is now: python -m bench layouts --x=1\n"
    assert Path(command_line.__file__).parent.name == "bench"  # `import bench` finds bench/, not bench.py


# --- checkpoint -------------------------------------------------------------------------------------------------------


def test_checkpoint_beside_pytorchs_two():
    out = bench("checkpoint", "--layers=1", "--hidden=64", "--repeats=1").splitlines()
    assert out[0] == "0.04 GB in 48 tensors; GB/s: median (smallest-largest) of 1 turns"
    kinds = ["nanoparallel", "nanoparallel, unverified", "torch.save", "torch.save and flush", "DCP"]
    assert [line.split("|")[0].strip() for line in out[3:8]] == kinds
    assert all(float(cell.split("(")[0]) > 0 for line in out[3:] for cell in line.split("|")[1:])


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_layouts_in_processes_of_their_own():
    """The table has the rows of dp=2. bench prints a row only if our losses equal PyTorch's."""
    sizes = "--repeats=1", "--layers=2", "--hidden=64", "--seq=32", "--vocab=256"
    rows = bench("layouts", *sizes, "--only=dp=2").splitlines()[3:]
    assert [row.split("  ")[0] for row in rows] == ["dp=2", "dp=2 zero=2", "dp=2 zero=3"]
    assert [row.split("  ")[-1] for row in rows] == [
        "DistributedDataParallel",
        "fully_shard, ZeRO-2",
        "fully_shard, ZeRO-3",
    ]


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_kernels_without_a_gpu():
    rows = bench_without_a_gpu("kernels").splitlines()
    assert "WRONG" not in str(rows)
    for name in NAMES:
        assert any(row.startswith(name) for row in rows)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench_kernels, "L2", 1)
    sanitizer.install()


def measured(capsys, only="", dtype="bf16", repeats=1):
    """Run the GPU path on the CPU. Return (whether all results are right, the printed rows)."""
    right = bench_kernels.on_gpu(Cpu(), SIZES, dtype, repeats, only)
    return right, capsys.readouterr().out.splitlines()


def test_kernels_on_the_path_of_a_gpu(small, capsys):
    right, rows = measured(capsys)
    assert right
    for name in NAMES:
        (*_, last) = (row for row in rows if row.startswith(name))
        failed = [part for part in last.split(";") if "failed" in part]
        assert "WRONG" not in last and len(failed) == ("attention" == name), last  # a CPU has no cudnn
    assert rows[-2].startswith("kernels=auto uses ") and rows[-1].startswith("the other choice is faster for: ")


def test_a_wrong_kernel_is_reported(small, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "gelu_", lambda y, bias: torch.nn.functional.gelu(1.1 * y + bias))
    right, rows = measured(capsys, only="gelu", dtype="fp32")
    assert not right and "WRONG" in rows[3]


def test_what_fails_is_a_cell(small, capsys, monkeypatch):
    def exhausted(*_):
        raise torch.cuda.OutOfMemoryError("4 TiB")

    machine = Cpu()
    (gelu,) = (op for op in bench_kernels.operations(machine.device, torch.float32, **SIZES) if op.name == "gelu")
    gelu.own["broken"] = exhausted
    variants = bench_kernels.variants_of(gelu, kernels, machine)
    found = bench_kernels.examine(machine, gelu, variants, 2)
    assert found["broken"].cell(0) == "out of memory" and found["Triton"].right
    assert [len(found[name].times) for name in ("Triton", "reference.py", "compiled", "broken")] == [2, 2, 2, 0]
    bench_kernels.print_row(bench_kernels.ROW, *bench_kernels.cells(gelu, 1, "backward", found, 1e9))
    assert "broken out of memory" in capsys.readouterr().out


def test_variants_of_an_operation_do_the_same():
    """PyTorch's own variants, except cudnn and those in `another` (which compute something else), equal reference.py
    on float64 inputs.
    """
    for op in bench_kernels.operations(torch.device("cpu"), torch.float64, **SIZES):
        plain = as_tuple(op.run(bench_kernels.reference, *op.draw(0)))
        for name, own in op.own.items():
            if name not in (*op.another, "cudnn"):
                for a, b in zip(as_tuple(own(*op.draw(0))), plain, strict=True):
                    assert torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6), (op.name, name)


# --- training ---------------------------------------------------------------------------------------------------------


def tiny(dtype):
    return Config(
        num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=128, train_iters=1000,
        lr_decay_style="constant", lr_warmup_iters=0, dtype=dtype, kernels="auto",
    )  # fmt: skip


def test_training_without_a_gpu():
    out = bench_without_a_gpu("train")
    assert out.count("gpt2_124m") == out.count("gpt2_345m") == 2
    assert "plain PyTorch, eager " in out and "failed" not in out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_on_the_path_of_a_gpu(capsys, dtype):
    bench_train.on_gpu(Cpu(), tiny(dtype), [2, 3], 1, 2, ("auto", "torch"), 1e9)
    out = capsys.readouterr().out
    assert "failed" not in out and out.count("\nmicro-batch of ") == 2
    for name in ("ours, kernels=auto", "ours, kernels=torch", "plain PyTorch, eager", "plain PyTorch, compiled"):
        assert out.count(name) >= 3  # in the losses and in two tables
    assert "a step of ours, kernels=auto, micro-batch 3: the host never waits" in out
    assert "\naten::" in out and "\nother (" in out and "the GPU works " in out


def test_out_of_memory_is_a_cell_and_not_the_end(capsys, monkeypatch):
    step, train_step = bench_train.Theirs.step, bench_train.train.train_step

    def exhausted(self, loss):
        if len(self.sample[0]) == 3:
            raise torch.cuda.OutOfMemoryError("4 TiB")
        return step(self, loss)

    def take(self, batches):
        self.sample, self.batches = batches[0], bench_train.itertools.cycle(batches)

    def ours(run, batches):
        if run.config.micro_batch_size == 3:
            raise ValueError("too much")
        return train_step(run, batches)

    monkeypatch.setattr(bench_train.Theirs, "step", exhausted)
    monkeypatch.setattr(bench_train.Theirs, "take", take)
    monkeypatch.setattr(bench_train.train, "train_step", ours)
    bench_train.on_gpu(Cpu(), tiny("fp32"), [2, 3], 1, 1, ("torch",), 1e9)
    out = capsys.readouterr().out
    theirs = 2 + (importlib.util.find_spec("transformers") is not None)  # eager, compiled, Hugging Face's
    assert out.count("out of memory") == theirs and "ours, kernels=torch failed: ValueError: too much" in out
    assert "no profile of ours, kernels=torch, micro-batch 3" in out
    assert "a step of ours, kernels=torch, micro-batch 2: " in out


def test_another_training_is_refused(monkeypatch):
    restart = bench_train.Theirs.restart
    monkeypatch.setattr(bench_train.Theirs, "restart", lambda self: changed(self, restart))
    with pytest.raises(UserError, match="do not train the same"):
        bench_train.on_gpu(Cpu(), tiny("fp32"), [2], 1, 1, ("torch",), 1e9)


def changed(theirs, restart):
    restart(theirs)
    with torch.no_grad():
        theirs.model.units[-1].word.weight *= 20


def test_busy_time_counts_what_overlaps_once(capsys):
    steps = bench_train.PROFILED
    kernels = [("a", 0, 1000), ("void at::native::b<int>", 500, 2000), ("c", 3000, 4000)]
    assert bench_train.busy_and_span(kernels) == (3000, 4000)
    bench_train.print_profile(kernels * steps, {"a": 500_000}, 1e9, 5e-3)
    out = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in out[2:4]]
    assert cells == [["b<int>", "1", "1.500", "42.9%", "", ""], ["a", "1", "1.000", "28.6%", "0.500", "50%"]]


def test_floors_are_those_of_the_operations():
    """The floors of a step (bytes that it must move) are the sums of the operations' floors in bench/kernels.py."""
    c = tiny("bf16")
    c.hidden_size, c.seq_length, c.vocab_size = 64, 16, 200
    ops = {op.name: op.floor for op in bench_kernels.operations(torch.device("cpu"), torch.bfloat16, **SIZES)}
    floors, L = bench_train.own_floors(c, SIZES["n"]), c.num_layers
    for i, kernel in enumerate(("residual_forward", "residual_backward")):
        block = sum(ops[name][i] for name in ("add_layer_norm, nothing added", "add_layer_norm", "add"))
        assert floors[kernel] == L * block + ops["layer_norm"][i]
    assert (floors["activation_forward"], floors["activation_backward"]) == tuple(L * x for x in ops["gelu"])
    assert floors["cross_entropy_whole"] == ops["cross_entropy_"][0]


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch):
    """Return a `Gpu` and the list of its calls of torch.cuda. These calls are only recorded."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def elapsed_time(self, stop):
            return 0.5  # ms

        record = synchronize = lambda self: None

    def pretend(name, answer=None):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: calls.append((name, *arguments)) or answer)

    for name in ("_sleep", "empty_cache", "reset_peak_memory_stats", "set_sync_debug_mode", "synchronize"):
        pretend(name)
    for name, answer in (("memory_allocated", 100), ("max_memory_allocated", 400), ("get_device_name", "NVIDIA H200")):
        pretend(name, answer)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(bench_machine.Gpu, "synchronize", lambda self: None)
    machine = bench_machine.Gpu()
    machine.device, machine.compile, machine.yardstick = torch.device("cpu"), lambda f: f, (1024, 16)
    machine.profiled = Cpu.profiled
    return machine, calls


def test_what_is_asked_of_a_gpu(pretended, small, capsys):
    machine, calls = pretended
    assert machine.timed(lambda: 7) == (500, 7) and calls[-1] == ("_sleep", bench_machine.HEAD_START)
    assert machine.peak(lambda: None) == 300
    assert bench_kernels.on_gpu(machine, SIZES, "bf16", 1, "gelu")
    bench_train.on_gpu(machine, tiny("bf16"), [2], 1, 1, ("torch",), bench_machine.copy_rate(machine))
    out = capsys.readouterr().out
    assert "500.0 (500.0-500.0)" not in out and "250.0 (250.0-250.0)" in out  # 500 us / 2 copies of the inputs
    assert "MFU relative to 989 TFLOP/s" in out and "the host never waits" in out
    assert calls.index(("set_sync_debug_mode", "error")) < calls.index(("set_sync_debug_mode", "default"))


def test_a_step_that_waits_is_reported(pretended, capsys, monkeypatch):
    machine, calls = pretended

    def step():
        if calls[-1] == ("set_sync_debug_mode", "error"):
            raise RuntimeError("called a synchronizing CUDA operation\nand more")

    (who,) = bench_train.Ours(tiny("fp32"), machine).contestants(["torch"])
    who.step = step
    assert bench_train.waits(machine, who).endswith("for the GPU: called a synchronizing CUDA operation")
    assert calls[-1] == ("set_sync_debug_mode", "default")
