"""Test log.py, which prints 33 lines of Megatron-DeepSpeed's published log of GPT-2 345M, digit for digit."""

import io
import json
import math
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import log
import train
from accounts import devices, flops
from accounts.metrics import read_metrics
from bench.plain import Plain
from config import Config
from errors import UserError
from parallel.mesh import Mesh
from testing.tiny import AfterActions, built, tiny_batches, tiny_config

STEP = log.StepNumbers(1 / 3, 0.1, 1e-3, skipped=False, stop=False, apart=False, loss_scale=1.0, samples=50)


class Ready(log.PendingStep):
    """A `PendingStep` of given numbers."""

    def __init__(self, step):
        super().__init__(torch.tensor(step[:6], dtype=torch.float64), step.loss_scale, step.samples)


@pytest.fixture
def clock(monkeypatch):
    """The time is `now`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(log.time, "perf_counter", lambda: clock.now)
    return clock


def run_of(config=None, *, rank=0, world=1, iteration=10, consumed=100):
    """Return what log.py uses of a `train.Run`."""
    counters, cpu = SimpleNamespace(iteration=iteration, consumed_samples=consumed), torch.device("cpu")
    mesh = SimpleNamespace(rank=rank, world=SimpleNamespace(size=world))
    return SimpleNamespace(
        config=config or Config(), mesh=mesh, device=cpu, dtype="fp32", counters=counters, timers=log.Timers(cpu)
    )


# --- the published run: 1 GPU with batch 8, then 8 GPUs with batch 64; fp16 with --checkpoint-activations -------------

SHAPE = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024, "train_iters": 500000}
GPT2_345M = Config(**SHAPE, recompute="full")

COLUMNS = "gpus batch iteration ms lr loss scale norm skipped per_second tflops".split()
PUBLISHED = """
1  8  100 2994.9 3.984E-06 9.500946E+00 262144.0 3.752 15   2.671  8.56
1  8  200  834.6 8.672E-06 8.293657E+00 262144.0 5.126  0   9.585 30.70
1  8  300  646.3 1.336E-05 7.484882E+00 262144.0 3.398  0  12.378 39.64
8 64  100 9757.9 3.984E-06 9.441295E+00 262144.0 2.246 15   6.559  2.63
8 64  200 3343.0 8.672E-06 8.081694E+00 262144.0 2.010  0  19.145  7.66
8 64  300 2925.6 1.336E-05 7.159136E+00 262144.0 1.763  0  21.876  8.76
8 64  400 2044.4 1.805E-05 6.449404E+00 262144.0 2.043  0  31.305 12.53
8 64  500 1220.1 2.273E-05 6.104833E+00 262144.0 1.536  0  52.455 21.00
8 64  600  816.5 2.733E-05 5.855302E+00 65536.0 1.392  2  78.383 31.38
8 64  700  509.3 3.202E-05 5.717134E+00 65536.0 2.511  0 125.661 50.31
8 64  800  529.3 3.670E-05 5.591023E+00 65536.0 1.970  0 120.924 48.41
8 64  900  516.1 4.139E-05 5.464304E+00 65536.0 1.938  0 123.996 49.64
8 64 1000  579.0 4.608E-05 5.321861E+00 65536.0 1.470  0 110.540 44.25
8 64 1100  754.2 5.077E-05 5.193630E+00 65536.0 1.597  0  84.862 33.97
8 64 1200  334.4 5.545E-05 5.088095E+00 65536.0 1.167  0 191.388 76.62
8 64 1300  346.4 6.014E-05 4.980182E+00 65536.0 1.358  0 184.759 73.97
8 64 1400  352.6 6.483E-05 4.881152E+00 65536.0 1.069  0 181.490 72.66
8 64 1500  353.7 6.952E-05 4.802428E+00 65536.0 1.294  0 180.935 72.44
8 64 1600  357.1 7.420E-05 4.715454E+00 131072.0 2.074  0 179.205 71.74
8 64 1700  361.5 7.889E-05 4.630479E+00 131072.0 0.983  0 177.061 70.88
8 64 1800  368.2 8.358E-05 4.548766E+00 131072.0 1.155  0 173.812 69.58
8 64 1900  379.0 8.827E-05 4.505708E+00 131072.0 0.889  0 168.860 67.60
8 64 2000  377.0 9.295E-05 4.421601E+00 131072.0 0.896  0 169.781 67.97
8 64 2100  733.4 9.764E-05 4.357585E+00 131072.0 0.846  0  87.267 34.94
8 64 2200  342.8 1.023E-04 4.304667E+00 131072.0 0.864  0 186.711 74.75
8 64 2300  349.5 1.070E-04 4.261599E+00 131072.0 0.774  0 183.128 73.31
8 64 2400  362.9 1.117E-04 4.198406E+00 131072.0 0.845  0 176.374 70.61
8 64 2500  372.2 1.164E-04 4.160635E+00 131072.0 0.779  0 171.961 68.84
8 64 2600  358.7 1.211E-04 4.114688E+00 262144.0 0.682  0 178.423 71.43
8 64 2700  371.1 1.258E-04 4.082523E+00 262144.0 0.693  0 172.469 69.05
8 64 2800  356.5 1.304E-04 4.027845E+00 131072.0 0.726  2 179.508 71.86
8 64 2900  360.8 1.350E-04 3.999500E+00 131072.0 0.699  0 177.362 71.00
8 64 3000  392.6 1.397E-04 3.979980E+00 131072.0 0.663  0 163.034 65.27
"""
PUBLISHED = [dict(zip(COLUMNS, line.split(), strict=True)) for line in PUBLISHED.split("\n") if line]


def published_row(printed):
    """Return the row of 100 equal steps with the printed numbers. The first steps are marked as skipped.

    Many durations fit both the printed ms and the printed samples per second: the row has the middle one.
    """
    loss, norm, lr, scale, ms, per_second = (float(printed[k]) for k in "loss norm lr scale ms per_second".split())
    iteration, batch, gpus = int(printed["iteration"]), int(printed["batch"]), int(printed["gpus"])
    least = max(ms - 0.05, 1000 * batch / (per_second + 0.0005))
    most = min(ms + 0.05, 1000 * batch / (per_second - 0.0005))
    steps = [
        log.StepNumbers(loss, norm, lr, i < int(printed["skipped"]), False, False, scale, batch) for i in range(100)
    ]
    run = run_of(GPT2_345M, world=gpus, iteration=iteration, consumed=iteration * batch)
    return log.metrics_row(run, steps, 100, (least + most) / 2 / 10)


def line_as_printed(printed):
    """Return the published line. It is built from the printed strings: no number is formatted."""
    samples = int(printed["iteration"]) * int(printed["batch"])
    return (
        f" iteration {printed['iteration']:>8}/  500000 | consumed samples: {samples:>12} |"
        f" consumed tokens: {samples * 1024:>12} | elapsed time per iteration (ms): {printed['ms']} |"
        f" learning rate: {printed['lr']} | global batch size: {printed['batch']:>5} |"
        f" lm loss: {printed['loss']} | loss scale: {printed['scale']} | grad norm: {printed['norm']} |"
        f" actual seqlen:  1024 | number of skipped iterations: {printed['skipped']:>3} |"
        f" number of nan iterations:   0 | samples per second: {printed['per_second']} |"
        f" TFLOPs: {printed['tflops']} |"
    )


def test_the_log_prints_the_33_published_lines_byte_for_byte():
    assert len(PUBLISHED) == 33
    for printed in PUBLISHED:
        assert log.MEGATRONS_LINE.format(**published_row(printed)) == line_as_printed(printed)


def test_timers_and_validation_print_the_published_lines():
    timers = {"forward-compute": 94.4, "backward-compute": 217.97, "optimizer": 24.32}
    assert log.timers_line(timers) == (
        "time (ms) | forward-compute: 94.40 | backward-compute: 217.97 | optimizer: 24.32"
    )
    assert log.validation_lines(1000, {"validation_loss": math.log(2.002711e2)}) == (
        f"{'-' * 96}\n"
        " validation loss at iteration 1000 | lm loss value: 5.299672E+00 | lm loss PPL: 2.002711E+02 | \n"
        f"{'-' * 96}"
    )
    assert "PPL: 4.851652E+08" in log.validation_lines(1, {"validation_loss": 1e9})  # exp(20)
    assert (
        log.validation_lines(7, {"validation_loss": 2.0}, "test")
        .splitlines()[1]
        .startswith(" test loss at iteration 7 | ")
    )


# --- FLOPs and peaks --------------------------------------------------------------------------------------------------


def test_model_flops_count_every_product_of_the_blocks_and_the_head():
    """Forward and backward, in plain PyTorch."""
    config = tiny_config(1, num_layers=3, seq_length=24, vocab_size=128)
    plain, ids = Plain(config, Mesh().tp), torch.zeros(2, 24, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        plain(ids).sum().backward()
    ours, counted = flops.model_flops(config, batch=2), counter.get_total_flops()
    assert ours == pytest.approx(counted, rel=1e-12), f"model_flops is {ours / counted:.6g} of what PyTorch counts"


@pytest.mark.parametrize(
    "name, dtype, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA A100-PCIE-40GB", "fp64", 19.5),
        ("Tesla T4", "fp16", 65),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA H200 NVL", "fp16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
    ],
)
def test_a_device_has_its_peak_by_its_real_name(name, dtype, peak):
    assert devices.peak_tflops(name, dtype) == peak


# --- a row ------------------------------------------------------------------------------------------------------------


def test_a_row_has_the_speeds_that_no_published_line_has(monkeypatch):
    """Two iterations of 50 sequences of 256 tokens on two devices, in 4 seconds."""
    monkeypatch.setattr(log, "peak_tflops", lambda *_: 0.5)
    config = Config(recompute="full")
    row = log.metrics_row(run_of(config, world=2), [STEP, STEP], 2, 4.0)
    assert row["tokens_per_second"] == 25 * 256  # of all devices
    assert row["tflops"] == pytest.approx(flops.model_flops(config, 50) / 2 / 2 / 1e12, rel=1e-14)  # per device
    assert row["mfu"] == row["tflops"] / 0.5


def test_a_row_has_the_mean_of_the_finite_losses_and_the_last_step_s_other_numbers():
    """The loss is that of all steps with a finite loss, also of skipped ones: otherwise a line could hide them."""
    steps = [
        STEP._replace(loss=4.0, grad_norm=math.inf, skipped=True, loss_scale=8.0),
        STEP._replace(loss=2.0, grad_norm=3.0, lr=1e-4, loss_scale=4.0),
        STEP._replace(loss=1.5, grad_norm=2.0, lr=2e-4, loss_scale=2.0, samples=60),
    ]
    names = "lm_loss grad_norm lr loss_scale global_batch_size skipped_iterations nan_iterations mfu".split()
    row = log.metrics_row(run_of(), steps, 3, 1.0)
    assert [row[name] for name in names] == [2.5, 2.0, 2e-4, 2.0, 60, 1, 0, "unknown"]
    assert row["samples_per_second"] == 160  # the batch grows within the interval
    steps += [STEP._replace(loss=math.nan, skipped=True), STEP._replace(loss=math.inf)]
    row = log.metrics_row(run_of(), steps, 5, 1.0)
    assert (row["skipped_iterations"], row["nan_iterations"]) == (2, 2) and row["lm_loss"] == 2.5
    assert log.metrics_row(run_of(), steps[-1:], 1, 1.0)["lm_loss"] == math.inf  # no loss is finite


# --- steps and their history ------------------------------------------------------------------------------------------


def test_a_pending_step_has_the_numbers_of_the_step():
    step = STEP._replace(stop=True, apart=True, loss_scale=1024.0)
    found = Ready(step).read()
    assert found == step and type(found.skipped) is type(found.stop) is bool


@pytest.mark.cuda
def test_a_pending_step_waits_for_a_real_gpu():
    late, numbers = torch.ones(6, device="cuda").double(), torch.zeros(6, dtype=torch.float64, device="cuda")
    log.PendingStep(numbers, 1.0, 2).read()  # allocates pinned memory
    torch.cuda._sleep(10**8)
    numbers.copy_(late)
    assert log.PendingStep(numbers, 1.0, 2).read() == (1.0, 1.0, 1.0, True, True, True, 1.0, 2)


def test_the_speeds_of_a_line_leave_out_the_first_step_and_pauses(clock):
    """The first step takes 100 s, each later one 2 s, and a save between them 10 s."""
    run, said = run_of(), []
    history = log.Interval(run, said.append)

    def step(seconds):
        with run.timers.span("update"):
            clock.now += seconds
        history.add(Ready(STEP))

    step(100.0)
    step(2.0)
    with history.paused():
        clock.now += 10.0
    step(2.0)
    row = history.row()
    assert row["iteration_ms"] == 2000 and row["samples_per_second"] == 25
    assert row["timers_ms"] == {"optimizer": 2000.0} and row["lm_loss"] == 1 / 3
    step(4.0)
    row = history.row()
    assert row["iteration_ms"] == 4000
    assert len(said) == 1 and "100.0 s" in said[0]


def test_a_line_of_the_first_step_alone_has_its_speed(clock):
    history = log.Interval(run_of(), print)
    clock.now = 100.0
    history.add(Ready(STEP))
    assert history.row()["iteration_ms"] == 100_000


def test_a_step_on_a_gpu_is_judged_when_the_next_one_runs():
    """A stop is one step later. On the CPU it is at once."""
    history, stop = log.Interval(run_of(), print), Ready(STEP._replace(stop=True))
    history.add(Ready(STEP))
    stop.copied = mock.Mock()
    history.add(stop)
    assert not history.stop and not stop.copied.synchronize.called
    history.add(Ready(STEP))
    assert history.stop


NAN, SKIPPED = STEP._replace(loss=math.nan), STEP._replace(grad_norm=math.nan, skipped=True)


def ends(said):
    """Context: the run stops with this text. Without a text it goes on."""
    return pytest.raises(UserError, match=said) if said else nullcontext()


@pytest.mark.parametrize(
    "step, dtype, last, third",
    [
        (NAN, "fp32", "lm_loss: the last 2 are not finite", "lm_loss: the last 3 are not finite"),
        (SKIPPED, "fp32", "", "grad_norm: the last 3 are not finite, so these updates were skipped"),
        (SKIPPED._replace(loss_scale=2.0), "fp16", "", "grad_norm: the last 3 are not finite"),
        (SKIPPED._replace(loss_scale=4.0), "fp16", "", ""),
    ],
)
def test_bad_steps_stop_the_run_unless_a_smaller_loss_scale_can_cure_them(step, dtype, last, third, monkeypatch):
    """A good step between them begins the count anew. The last step of a run may be skipped."""
    monkeypatch.setattr(log, "PATIENCE", 3)
    run, bad = run_of(Config(min_loss_scale=2.0)), Ready(step)
    run.dtype = dtype
    interval = log.Interval(run, print)
    for pending in (bad, bad, Ready(STEP), bad, bad):
        interval.add(pending)
    assert interval.bad_losses == 2 * (step is NAN)
    assert interval.bad_gradients == 2 * third.startswith("grad_norm")
    with ends(last):
        interval.read(last=True)
    with ends(third):
        interval.add(bad)


# --- timers -----------------------------------------------------------------------------------------------------------


def test_timers_add_up_a_phase_and_divide_by_the_iterations(clock):
    timers = log.Timers("cpu")
    for _ in range(2):  # iterations
        with timers.span("update"):
            clock.now += 0.5
        for _ in range(3):  # micro-batches
            with timers.span("forward"):
                clock.now += 2.0
                with timers.span("batch"):
                    clock.now += 0.25
        clock.now += 100.0  # between phases
    expected = {"forward-compute": 6750.0, "optimizer": 500.0, "batch-generator": 750.0}
    assert list(timers.take(2).items()) == list(expected.items())  # the order of log.TIMED
    assert timers.take(1) == {}


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    (tmp_path / "tiny").mkdir()
    return Config(out_dir=str(tmp_path / "tiny"), train_iters=300)


def file_of(config):
    return Path(config.out_dir, "metrics.jsonl")


def row_of(iteration=10, loss=1 / 3, **changes):
    row = log.metrics_row(run_of(iteration=iteration), [STEP._replace(loss=loss)], 1, 2.0)
    return row | {"timers_ms": {"forward-compute": 100.0, "optimizer": 2 / 3}} | changes


def logged(config, *rows, path="", **run):
    """Write rows with a Logger, by default of a run that goes on. Return those of metrics.jsonl."""
    logger = log.Logger(run_of(config, **run), path or Path(config.out_dir, "step_1"))
    for row in rows:
        logger.log(dict(row))
    logger.close()
    return read_metrics(file_of(config))


def test_rows_come_back_at_full_precision_and_are_json(config):
    """Any JSON reader reads also numbers that are not finite."""
    rows = [row_of(1, math.pi), row_of(2, math.inf, grad_norm=math.nan, lr=-math.inf)]
    first, second = logged(config, *rows).values()
    assert first == rows[0] and repr(second) == repr(rows[1])
    text = file_of(config).read_text().splitlines()[1]
    assert json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))["grad_norm"] == "nan"


def test_a_resumed_run_leaves_one_row_of_an_iteration_in_the_file(config):
    """Any program that reads the lines has each iteration once."""
    logged(config, *(row_of(10 * i) for i in (1, 2, 3, 4)))
    rows = logged(config, row_of(20, 4.5), row_of(30), iteration=10)
    assert list(rows) == [10, 20, 30] and rows[20]["lm_loss"] == 4.5
    assert file_of(config).read_text().count("\n") == 3


def test_a_new_run_keeps_the_rows_of_an_older_one(config, monkeypatch, capsys):
    """They get the next free number, also if the new run begins with another folder's checkpoint."""
    begun = dict(iteration=0), dict(iteration=10, path="elsewhere/step_10"), dict(iteration=0)
    for number, run in enumerate(begun):
        assert list(logged(config, row_of(20 + number), **run)) == [20 + number]
    kept = [list(read_metrics(Path(config.out_dir, f"metrics.{k}.jsonl"))) for k in (1, 2)]
    assert kept == [[20], [21]] and "run before are in" in capsys.readouterr().out
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the same run, started again before its first checkpoint
    assert not logged(config, iteration=0) and len([*Path(config.out_dir).glob("metrics.*")]) == 3


def test_a_line_that_no_run_has_written_is_left_out(config):
    good = log.to_json(row_of(10))
    bad = (
        '{"iteration": 11, "timers_ms": {"a": Infinity}}',
        '{"iteration": 12, "timers_ms": {"a": 1e999}}',
        "[" * 100_000,
    )
    file_of(config).write_text("\n".join([good, *bad, ""]))
    assert list(logged(config, row_of(20), iteration=15)) == [10, 20]


@pytest.mark.parametrize("kept", [1, 17, -2, -1])
def test_a_torn_last_line_is_passed_over_and_does_not_spoil_the_next(config, kept):
    logged(config, row_of(10), row_of(20))
    first, second = file_of(config).read_text().splitlines(keepends=True)
    file_of(config).write_text(first + second[:kept])
    whole = [10, 20] if kept == -1 else [10]  # -1: only the newline is missing
    assert list(logged(config, iteration=20)) == whole
    assert list(logged(config, row_of(30), iteration=20)) == [*whole, 30]


def test_a_folder_that_vanishes_during_a_run_is_noticed_at_the_next_line(config):
    logger = log.Logger(run_of(config), None)
    logger.log(row_of(10))
    shutil.rmtree(config.out_dir)
    with pytest.raises(UserError, match=r"metrics\.jsonl: No such file or directory"):
        logger.log(row_of(20))
    logger.close()


# --- the terminal -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_terminal_has_a_line_of_each_interval(config, capsys, monkeypatch):
    """The memory is shown once. The bar goes to stderr."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    logger, rows = log.Logger(run_of(config, iteration=0), None), [row_of(10), row_of(20), row_of(30)]
    validation = {"validation_loss": 2.0, "validation_loss/en": 1.0, "validation_loss/ja": 4.0}
    rows[1] |= validation
    rows[2] |= {"consumed_tokens/en": 2000, "epochs/en": 0.5, "consumed_tokens/ja": 9, "epochs/ja": 2.0}
    for row in rows:
        logger.log(row)
    logger.say("saved")
    assert "30/300" in sys.stderr.getvalue()
    logger.close()
    (a, b, c), times = [log.MEGATRONS_LINE.format(**row) for row in rows], log.timers_line(rows[0]["timers_ms"])
    out = [line for line in capsys.readouterr().out.splitlines() if line]
    memory = out.pop(1)
    assert memory.startswith("[Rank 0] (after 10 iterations) memory (MB) | ") and "max resident: " in memory
    lines = log.validation_lines(20, validation).splitlines()
    assert lines[3].startswith(" validation loss of ja at iteration 20 | lm loss value: 4.0") and len(lines) == 5
    progress = "en: 2,000 tokens, 0.500 epochs | ja: 9 tokens, 2.000 epochs"
    assert out == [a, times, b, times, *lines, c, times, progress, "saved"]


def test_a_long_step_has_a_bar_and_answers_a_signal_once(monkeypatch):
    run, said, shown = built(tiny_config(1)), [], []
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(log.InStep, "LONG", 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")

    def see():
        shown.append(tool.bar.n)
        run.signals.stop = tool.bar.n >= 3

    run.mesh.watch.tools += [tool := log.InStep(run, said.append), AfterActions(see)]
    train.train_step(run, tiny_batches(run))
    assert shown == [0, 1, 2, 3, 4, 5] and tool.bar.n == 6  # F and B of 3 micro-batches. `see` comes before the bar
    assert "0/6" in sys.stderr.getvalue()
    assert said == [
        "a signal: the run stops and saves after this step; torchrun ends it, unsaved, after "
        "--shutdown-timeout (default: 30 s)"
    ]


def test_the_memory_of_a_gpu_has_megatrons_four_numbers(monkeypatch):
    for name, MiB in dict(memory_allocated=1, max_memory_allocated=2, memory_reserved=3, max_memory_reserved=4).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, MiB=MiB: MiB * 2**20)
    line = "[Rank 0] (after 100 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 | reserved: 3.0 |"
    assert log.memory_line(100, torch.device("cuda")) == f"{line} max reserved: 4.0"


# --- TensorBoard and Weights & Biases (neither needs to be installed) -------------------------------------------------


def test_tensorboard_gets_the_numbers_of_each_row(config, monkeypatch):
    tensorboard = mock.Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    config.tensorboard = f"{config.out_dir}/runs"
    logged(config, row_of(10), iteration=5)
    assert tensorboard.SummaryWriter.call_args == mock.call(config.tensorboard, purge_step=6)
    *scalars, last = tensorboard.SummaryWriter.return_value.mock_calls
    assert mock.call.add_scalar("lm_loss", 1 / 3, 10) in scalars and last == mock.call.flush()
    assert "mfu" not in {call.args[0] for call in scalars}
    tensorboard.SummaryWriter.side_effect = FileExistsError("runs")
    with pytest.raises(UserError, match=f"^tensorboard={config.tensorboard}: "):
        log.Logger(run_of(config), None)


def test_wandb_gets_the_configuration_and_each_row(config, monkeypatch):
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config.wandb = "lecture"
    logged(config, row_of(10))
    settings = wandb.init.call_args.kwargs
    assert [settings[key] for key in ("project", "name", "dir")] == ["lecture", "tiny", config.out_dir]
    assert settings["config"]["hidden_size"] == 128
    (row,), step = wandb.init.return_value.log.call_args
    assert row["lm_loss"] == 1 / 3 and step == {"step": 10}
    wandb.init.side_effect = RuntimeError("No API key configured")
    with pytest.raises(UserError, match=r"^wandb=lecture: .*No API key configured"):
        log.Logger(run_of(config), None)
