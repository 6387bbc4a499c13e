"""Tests bench/: the command line, and the measurements on a CPU. A measurement has two paths: without and with a GPU.

On the GPU path the tests replace `Gpu` by `Cpu`, which uses the host's clock and compiles nothing. The last tests run
class `Gpu` itself with replaced functions of torch.cuda. No test checks a time.
"""

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to measure")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: run python -m bench instead", allow_module_level=True)

import config as configuration
import kernels
from accounts import devices, seconds
from bench import __main__ as command_line
from bench import kernels as bench_kernels
from bench import machine as bench_machine
from bench import model as bench_model
from bench import prepare as bench_prepare
from bench import train as bench_train
from bench.kernels import as_tuple
from bench.machine import Cpu
from config import Config
from errors import UserError
from log import model_flops
from model import GPT
from parallel.mesh import Mesh
from testing import sanitizer

SIZES = dict(n=16, h=64, s=16, v=200)
NAMES = [op.name for op in bench_kernels.operations(torch.device("cpu"), torch.float32, **SIZES)]


def run_python(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parent.parent)


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
    for name in ("prepare", "layouts", "kernels", "train", "model"):
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
            "layout is no measurement; the measurements are prepare, layouts, kernels, train, model",
        ),
        (
            ["train", "--step=1"],
            "--step=1: train has the options --configs, --micro_batch_sizes, --micro_batches, --steps, --repeats, "
            "--attention, --only",
        ),
        (["train", "--attention=flex"], "--attention=flex: should be own, cudnn or flash"),
        (
            ["model", "--device=cpu"],
            "--device=cpu: should be one of v100-16g, v100-32g, a100-40g, a100-80g, h100, h200",
        ),
        (["train", "--steps=few"], "--steps=few: should be like --steps=10"),
        (["layouts", "--repeats=0"], "--repeats=0: should be between 1 and 1,048,576"),
        (["layouts", "--vocab=257"], "--vocab=257: should be a multiple of 128; PyTorch's model has no padding"),
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


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_layouts_in_processes_of_their_own():
    """The table has the rows of dp=2. bench prints a row only if our losses equal PyTorch's."""
    sizes = "--repeats=1", "--layers=2", "--hidden=64", "--seq=32", "--vocab=256"
    rows = bench("layouts", *sizes, "--only=dp=2").splitlines()[3:]
    assert [row.split("  ")[0] for row in rows] == ["dp=2", "dp=2 zero=2", "dp=2 zero=3"]


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
        assert ("compiled: torch.compile does not change" in last) == (name == "adamw")
        assert "WRONG" not in last and len(failed) == ("attention" == name), last  # a CPU has no cudnn
    assert rows[-2].startswith("kernels=auto uses ") and rows[-1].startswith("the other choice is faster for: ")


def test_a_wrong_kernel_is_reported(small, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "gelu_", lambda y, bias: torch.nn.functional.gelu(1.1 * y + bias))
    right, rows = measured(capsys, only="gelu", dtype="fp32")
    assert not right and "WRONG" in rows[3]


def test_a_wrong_weight_gradient_is_reported(small, capsys, monkeypatch):
    monkeypatch.setattr(bench_kernels, "add_product", lambda w, dy, x: w.grad.copy_(dy.T @ x))  # forgets to add
    right, rows = measured(capsys, only="dW of fc1")
    assert not right and "WRONG" in rows[3] and rows[3].startswith("dW of fc1 ") and "TFLOP/s" in rows[3]


def test_the_name_of_one_operation_selects_it_alone(small, capsys):
    _, rows = measured(capsys, only="add")
    assert [row.split("  ")[0] for row in rows[3:5]] == ["add", "add"] and rows[5] == ""


def test_the_product_rate_is_that_of_a_second():
    """A stand-in for a GPU: one product takes 100 us, each of many 200 us."""

    class Slow(Cpu):
        sustained = 1000

        def timed(self, call):
            result = call()
            count = len(result) if isinstance(result, list) else 1
            return (100 if count == 1 else 200 * count), result

    flops = 2 * 64**3
    assert bench_machine.product_rate(Slow(), torch.float32) == pytest.approx((flops / 100e-6, flops / 200e-6))


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


def tiny(dtype, micro_batches=1):
    return Config(
        num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=128, train_iters=1000,
        lr_decay_style="constant", lr_warmup_iters=0, dtype=dtype, kernels="auto", micro_batch_size=1,
        global_batch_size=micro_batches,
    )  # fmt: skip


def test_training_without_a_gpu():
    out = bench("train", "--configs=gpt2_124m,gpt2_345m", "--steps=1", "--repeats=1", "--micro_batches=2")
    assert "dropout=0.1 -> 0.0, recompute=full -> none" in out  # changes of gpt2_345m.py
    assert "\nno GPU here: " in out and "failed" not in out and "compiled" not in out
    assert out.count("x 32 x 1024 tokens (computed)\n") == 2
    assert "micro-batch of 4 x 64 tokens, 2 in an update" in out
    for name in ("plain PyTorch, autocast, eager", "plain PyTorch, bf16 weights, eager"):
        assert out.count(name) == 4  # losses, two turns, the table


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_on_the_path_of_a_gpu(capsys, dtype):
    bench_train.on_gpu(Cpu(), tiny(dtype), [2, 3], 1, 2, ("auto", "torch"), 1e9)
    out = capsys.readouterr().out
    assert "failed" not in out and out.count("\nmicro-batch of ") == 2
    names = ["ours, kernels=auto", "ours, kernels=torch", "plain PyTorch, autocast, eager"]
    names += ["plain PyTorch, autocast, compiled"]
    numerics = [f"plain PyTorch, bf16 weights, {mode}" for mode in ("eager", "compiled")]
    for name in names + numerics * (dtype == "bf16"):
        assert out.count(name) >= 9  # in the losses, six turns, two tables
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


@pytest.mark.parametrize("which", ["ours", "autocast", "bf16 weights"])
def test_micro_batches_of_an_update_are_its_mean(which):
    """Two micro-batches of 2 samples make the update of one micro-batch of 4 samples."""
    found = []
    for m in (1, 2):  # AdamW's first update is about lr in each element, whatever the gradient's size
        c = tiny("bf16" if which == "bf16 weights" else "fp32", micro_batches=m)
        only = "nothing" if which == "ours" else f"{which}, eager"
        who = bench_train.contestants_of(c, Cpu(), ["torch"], only)[-1]
        assert ("ours" if which == "ours" else f"plain PyTorch, {only}") in who.name
        samples = bench_train.batches_of(tiny("fp32"), 4, Cpu())[0]
        who.model.restart()
        who.model.take([samples] if m == 1 else [[x[rows] for x in samples] for rows in (slice(2), slice(2, 4))])
        loss = bench_train.value(who.step())
        masters = [unit.master for unit in who.model.units] if which == "ours" else who.model.masters
        found.append((loss, torch.cat([x.detach().flatten() for x in masters])))
    (loss, weights), (other, others) = found
    assert loss == pytest.approx(other, rel=1e-3) and (weights - others).abs().mean() < 0.1 * c.lr


def test_bf16_weights_have_float32_gradients_and_masters(monkeypatch):
    (_, who) = bench_train.contestants_of(tiny("bf16"), Cpu(), ["torch"], "bf16 weights, eager")
    model = who.model
    who.model.restart()
    who.model.take(bench_train.batches_of(tiny("bf16"), 2, Cpu()))
    seen, step = [], model.optimizer.step
    monkeypatch.setattr(model.optimizer, "step", lambda: seen.extend(p.grad for p in model.masters) or step())
    who.step()
    assert {p.dtype for p in model.weights} == {torch.bfloat16} and {g.dtype for g in seen} == {torch.float32}
    assert len(seen) == len(model.weights) and all(p.grad is None for p in (*model.weights, *model.masters))
    for p, master, initial in zip(model.weights, model.masters, model.initial, strict=True):
        assert torch.equal(p, master.bfloat16()) and not torch.equal(master, initial)


def test_ids_follow_zipfs_law():
    ((ids, targets), *_) = bench_train.batches_of(Config(vocab_size=1000, seq_length=4096), 16, Cpu())
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    shares = torch.bincount(ids.flatten(), minlength=1000) / ids.numel()
    harmonic = sum(1 / i for i in range(1, 1001))
    for i in (0, 1, 9):
        assert shares[i].item() == pytest.approx(1 / (i + 1) / harmonic, rel=0.1)


def test_attention_of_the_others_is_forced(monkeypatch, capsys):
    allowed = [torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.flash_sdp_enabled]
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_train, "Gpu", Cpu)
    monkeypatch.setattr(bench_train, "load", lambda name, m: tiny("bf16"))
    monkeypatch.setattr(bench_train, "on_gpu", lambda *_: seen.append([f() for f in allowed]))
    for which in ("own", "cudnn", "flash"):
        bench_train.measure(configs="a", attention=which)
    assert seen == [[True, True], [True, False], [False, True]]
    chosen = re.findall("the others' attention is (.*)", capsys.readouterr().out)
    assert chosen[::2] == ["FLASH_ATTENTION"] * 2 and chosen[1].startswith("failed: ")  # a CPU has no cudnn


def test_a_failure_of_ours_is_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # AdamW asks; there may be no driver
    monkeypatch.setattr(bench_train, "Gpu", Cpu)
    monkeypatch.setattr(bench_train, "load", lambda name, m: tiny("fp32"))
    monkeypatch.setattr(bench_train.train, "train_step", lambda *_: 1 / 0)
    with pytest.raises(SystemExit) as error:
        bench_train.measure(
            configs="a", micro_batch_sizes="2", steps=1, repeats=1, only="plain PyTorch, autocast, eager"
        )
    assert error.value.code == 1 and "\nplain PyTorch, autocast, eager " in capsys.readouterr().out


# --- the paper model --------------------------------------------------------------------------------------------------


def test_the_model_is_the_sum_of_what_others_count():
    """FLOPs as log.py, bytes of the update as accounts/seconds.py; MEASURED.md shows the command's output."""
    c = bench_model.load("gpt2_345m", 2)
    found = {part.name: part for part in bench_model.parts(c, 8, devices.DEVICES["h200"])}
    L, h, s = c.num_layers, c.hidden_size, c.seq_length
    whole_squares = 12 * L * h * s * 16 * s  # log.py counts them; of 4 products in forwards, ours needs half of 3.5
    assert found["attention"].flops == pytest.approx(whole_squares / 3 * 3.5 / 2)
    products = sum(part.flops for name, part in found.items() if name.endswith("dW"))
    assert products == pytest.approx(model_flops(c, 16) - whole_squares)
    layout = SimpleNamespace(stage=0, dp=1, stored=lambda rank: P)
    P = GPT(c, Mesh().tp).num_parameters()
    states = {"gradients": 4 * P, "master weights": 4 * P, "moments": 8 * P}
    update = seconds.update(c, layout, None, bench_model.BYTES, 0, states, 2, 4)
    assert sum(found[name].bytes for name in ("adamw_flat", "squared_norm", "zero_grad")) == update
    for part in found.values():
        assert part.reachable >= part.floor >= max(part.flops / 989e12, part.bytes / 4.8e12) * (1 - 1e-9)
    measured = (Path(__file__).parent.parent / "MEASURED.md").read_text(encoding="utf-8")
    assert bench("model") in measured


def test_gpt2_345m_fast_differs_as_its_comment_says():
    asked, fast = (configuration.load([f"configs/{name}.py"]) for name in ("gpt2_345m", "gpt2_345m_fast"))
    different = {f.name for f in fields(asked) if getattr(asked, f.name) != getattr(fast, f.name)} - {"out_dir"}
    assert different == {"dropout", "micro_batch_size", "recompute"}
    for name in different:
        assert all(name in Path(f"configs/{file}.py").read_text() for file in ("gpt2_345m", "gpt2_345m_fast"))


# --- the first run ----------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parent.parent / "bench" / "first_run.sh"


def first_run(*arguments, **environment):
    environment = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, timeout=200, env=environment)


def test_the_first_run_needs_a_gpu_and_a_part(tmp_path):
    done = first_run("1", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: first_run.sh: PyTorch finds no GPU here") and done.stderr.count("\n") == 1
    for arguments in ([], ["9"], ["--dry_run"]):
        done = first_run(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_every_command_of_the_first_run_is_accepted():
    """Each command line parses. Each operation of bench/kernels.py has exactly one command."""
    operations, trained = [], []
    for line in first_run("--list", "all").stdout.splitlines():
        _, *words = shlex.split(line)
        if words[:2] == ["-m", "bench"]:
            parameters = inspect.signature(command_line.measurement(words[2])).parameters
            options = command_line.parse_options(words[2], words[3:], parameters)
            if words[2] == "kernels":
                operations.append(options["only"])
            else:
                trained.append(options)
        elif words[0] == "train.py":
            c = configuration.load(words[1:])
            assert configuration.check(c, 1) == 1 and c.train_iters == 40
        else:
            assert words[0] == "prepare.py" or words[:2] == ["-m", "pytest"]
    assert sorted(operations) == sorted(NAMES)
    assert [options["micro_batch_sizes"] for options in trained[:3]] == ["32", "64", "32"]
    assert [options["configs"] for options in trained[:3]] == ["gpt2_345m_fast", "gpt2_345m_fast", "gpt2_124m"]


def test_the_first_run_goes_on_after_a_failure(tmp_path):
    """A stand-in for Python: the second of six commands fails."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho did "$@"\ncase "$*" in *fc1*) exit 7 ;; esac\n')
    python.chmod(0o755)
    done = first_run("--dry_run", "1", str(tmp_path / "out"), PYTHON=str(python))
    summary = (tmp_path / "out" / "summary.txt").read_text()
    log = (tmp_path / "out" / "part1.log").read_text()
    assert done.returncode == 1 and summary.count("\npassed  part 1 ") == 5 and log.count("\ndid -m bench") == 6
    assert "--repeats=10  (exit code 7: did -m bench kernels --only=dW of fc1 --repeats=10)\n" in summary


def test_a_part_of_the_first_run(tmp_path):
    done = first_run("--dry_run", "8", str(tmp_path))
    assert done.returncode == 0, done.stdout
    log = (tmp_path / "part8.log").read_text()
    assert "micro-batch of 4 x 64 tokens, 8 in an update" in log and "bf16 weights" in log
    assert re.search(r"\npassed  part 8 \d+ s  .* --steps=1 ", (tmp_path / "summary.txt").read_text())
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["part8.log", "summary.txt"]


# --- the profile ------------------------------------------------------------------------------------------------------


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
    assert floors["join_part"] == L * ops["join"][0]
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
