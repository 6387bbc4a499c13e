"""Tests of log.py.

log.py prints the 33 lines of Megatron-DeepSpeed's published log of GPT-2 345M, digit for digit.
"""

import io
import json
import math
import os
import sys
import time
import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import log
from config import Config
from errors import UserError

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

LINES = {  # three of these rows as printed, to check the spaces
    ("1", "100"): " iteration      100/  500000 | consumed samples:          800 | consumed tokens:       819200 | "
    "elapsed time per iteration (ms): 2994.9 | learning rate: 3.984E-06 | global batch size:     8 | "
    "lm loss: 9.500946E+00 | loss scale: 262144.0 | grad norm: 3.752 | actual seqlen:  1024 | "
    "number of skipped iterations:  15 | number of nan iterations:   0 | samples per second: 2.671 | TFLOPs: 8.56 |",
    ("8", "100"): " iteration      100/  500000 | consumed samples:         6400 | consumed tokens:      6553600 | "
    "elapsed time per iteration (ms): 9757.9 | learning rate: 3.984E-06 | global batch size:    64 | "
    "lm loss: 9.441295E+00 | loss scale: 262144.0 | grad norm: 2.246 | actual seqlen:  1024 | "
    "number of skipped iterations:  15 | number of nan iterations:   0 | samples per second: 6.559 | TFLOPs: 2.63 |",
    ("8", "3000"): " iteration     3000/  500000 | consumed samples:       192000 | consumed tokens:    196608000 | "
    "elapsed time per iteration (ms): 392.6 | learning rate: 1.397E-04 | global batch size:    64 | "
    "lm loss: 3.979980E+00 | loss scale: 131072.0 | grad norm: 0.663 | actual seqlen:  1024 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 163.034 | "
    "TFLOPs: 65.27 |",
}


def elapsed(printed):
    """Return the seconds of 100 iterations.

    Many durations fit both the printed ms and the printed samples per second: return the middle one.
    """
    batch, ms, per_second = int(printed["batch"]), float(printed["ms"]), float(printed["per_second"])
    least = max(ms - 0.05, 1000 * batch / (per_second + 0.0005))
    most = min(ms + 0.05, 1000 * batch / (per_second - 0.0005))
    assert least < most
    return (least + most) / 2 / 10


def published_steps(printed):
    """Return 100 equal steps with the printed loss, norm, rate and scale. The first steps are marked as skipped."""
    loss, norm, lr, scale = (float(printed[name]) for name in ("loss", "norm", "lr", "scale"))
    skipped, batch = int(printed["skipped"]), int(printed["batch"])
    return [log.Step(loss, norm, lr, i < skipped, False, False, scale, batch) for i in range(100)]


def published_row(printed, config=GPT2_345M):
    return log.metrics_row(
        config,
        world=int(printed["gpus"]),
        peak=312,
        iteration=int(printed["iteration"]),
        consumed_samples=int(printed["iteration"]) * int(printed["batch"]),
        steps=published_steps(printed),
        seconds=elapsed(printed),
        timers_ms={},
        data_wait_ms=0.0,
    )


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


def test_the_33_published_lines_byte_for_byte():
    assert len(PUBLISHED) == 33
    for printed in PUBLISHED:
        assert log.iteration_line(published_row(printed)) == line_as_printed(printed)
    seen = {(p["gpus"], p["iteration"]): log.iteration_line(published_row(p)) for p in PUBLISHED}
    assert {key: seen[key] for key in LINES} == LINES


def test_published_tflops_follow_from_the_printed_milliseconds_alone():
    for printed in PUBLISHED:
        ms, tflops = float(printed["ms"]), float(printed["tflops"])
        per_gpu = log.hardware_flops(GPT2_345M, int(printed["batch"])) / int(printed["gpus"]) / 1e9
        assert per_gpu / (ms + 0.05) <= tflops + 0.005
        assert per_gpu / (ms - 0.05) >= tflops - 0.005


def test_published_timers_memory_and_validation_lines():
    timers = {"forward-compute": 94.4, "backward-compute": 217.97, "optimizer": 24.32, "batch-generator": 0.73}
    assert log.timers_line(timers) == (
        "time (ms) | forward-compute: 94.40 | backward-compute: 217.97 | optimizer: 24.32 | batch-generator: 0.73"
    )
    memory = {"allocated": 6785.88818359375, "max allocated": 8857.02587890625}
    memory |= {"reserved": 10054.0, "max reserved": 10054.0}
    assert log.memory_line(100, memory) == (
        "[Rank 0] (after 100 iterations) memory (MB) | allocated: 6785.88818359375 |"
        " max allocated: 8857.02587890625 | reserved: 10054.0 | max reserved: 10054.0"
    )
    for iteration, loss, ppl in [
        (1000, "5.299672E+00", "2.002711E+02"),
        (2000, "4.409870E+00", "8.225874E+01"),
        (3000, "3.999852E+00", "5.459007E+01"),
    ]:
        assert log.validation_lines(iteration, math.log(float(ppl))) == (
            f"{'-' * 96}\n"
            f" validation loss at iteration {iteration} | lm loss value: {loss} | lm loss PPL: {ppl} | \n"
            f"{'-' * 96}"
        )
    assert "PPL: 4.851652E+08" in log.validation_lines(1, 1e9)  # exp(20) instead of an overflow
    assert "PPL: NAN" in log.validation_lines(1, math.nan)


@pytest.mark.parametrize("split, name", [("val", "validation"), ("test", "test"), ("train", "train")])
def test_validation_lines_name_the_split(split, name):
    dashes, line, end = log.validation_lines(7, 2.0, split).split("\n")
    assert line == f" {name} loss at iteration 7 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert dashes == end == "-" * (len(line) + 1)


# --- FLOPs, peaks, MFU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SHAPE, {"num_layers": 3, "hidden_size": 20, "seq_length": 7}])
def test_model_flops_are_6N_plus_12Lhs_per_token(shape):
    config = Config(**shape, vocab_size=300)
    L, h, s = config.num_layers, config.hidden_size, config.seq_length
    matrices = 12 * L * h**2 + 384 * h  # the head is padded from 300 to 384
    flops = 5 * s * (6 * matrices + 12 * L * h * s)
    assert log.model_flops(config, batch=5) == pytest.approx(flops, rel=1e-14)
    assert log.hardware_flops(config, batch=5) == log.model_flops(config, batch=5)


def test_model_flops_count_every_product_of_the_blocks_and_the_head():
    b, s, h, a, L, V = 2, 24, 32, 4, 3, 128

    def zeros(*shape):
        return torch.zeros(shape, requires_grad=True)

    qkv, projection, up, down, head = zeros(h, 3 * h), zeros(h, h), zeros(h, 4 * h), zeros(4 * h, h), zeros(h, V)
    with FlopCounterMode(display=False) as counter:
        x = zeros(b, s, h)
        for _ in range(L):
            q, k, v = (x @ qkv).view(b, s, 3, a, h // a).permute(2, 0, 3, 1, 4)  # [b, a, s, d] each
            x = ((q @ k.mT) @ v).transpose(1, 2).reshape(b, s, h) @ projection
            x = x @ up @ down
        (x @ head).sum().backward()
    config = Config(num_layers=L, hidden_size=h, num_attention_heads=a, seq_length=s, vocab_size=V)
    assert counter.get_total_flops() == log.model_flops(config, batch=b)


def test_recomputation_adds_one_forward_of_the_blocks():
    recompute, plain = GPT2_345M, Config(**SHAPE)
    head = 6 * 8 * 1024 * 1024 * 50304  # 3 forwards x 2 FLOPs x 8 x 1024 tokens x the head's elements
    blocks = log.model_flops(plain, 8) - head
    assert log.hardware_flops(recompute, 8) == pytest.approx(4 / 3 * blocks + head, rel=1e-14)
    assert log.model_flops(recompute, 8) == log.model_flops(plain, 8)


@pytest.mark.parametrize(
    "name, dtype, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "fp16", 989),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "fp64", 19.5),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp16", None),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA B200", "fp64", None),
        ("NVIDIA H20", "bf16", None),
        ("NVIDIA H200 NVL", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "int8", None),
        ("cpu", "fp32", None),
    ],
)
def test_peak_of_a_device_by_its_real_name(name, dtype, peak):
    assert log.peak_tflops(name, dtype) == peak


# --- steps ------------------------------------------------------------------------------------------------------------

NUMBERS = torch.tensor([2.5, 0.75, 1e-3, 0.0, 1.0, 0.0], dtype=torch.float64)  # the first six fields of Step


def test_a_pending_step_is_read_once():
    numbers = NUMBERS.clone()
    pending = log.PendingStep(numbers, 1024.0, 48)
    step = pending.read()
    assert step == log.Step(2.5, 0.75, 1e-3, skipped=False, stop=True, orphaned=False, loss_scale=1024.0, samples=48)
    assert [type(flag) for flag in (step.skipped, step.stop, step.orphaned)] == [bool] * 3
    numbers.zero_()
    assert pending.read() is step


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pending_step_waits_for_a_real_gpu():
    late, numbers = NUMBERS.cuda(), torch.zeros(6, dtype=torch.float64, device="cuda")
    log.PendingStep(numbers, 1.0, 2).read()  # allocates pinned memory, and so may wait for the GPU
    torch.cuda._sleep(10**8)  # cycles: tens of milliseconds
    numbers.copy_(late)
    assert log.PendingStep(numbers, 1.0, 2).read() == (2.5, 0.75, 1e-3, False, True, False, 1.0, 2)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_an_interval_ends_when_its_last_step_is_done(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(log.time, "perf_counter", clock)

    class LatePendingStep(log.PendingStep):
        def read(self):
            clock.now += 2.0
            return super().read()

    timers, interval = log.Timers("cpu", clock), log.Interval()
    with timers("optimizer"):
        clock.now += 1.0
    interval.steps += [LatePendingStep(NUMBERS, 1.0, samples) for samples in (2, 6)]
    with interval.paused():
        clock.now += 100.0
    assert interval.row(7, 56, timers, data_wait_seconds=0.5) == {
        "iteration": 7,
        "consumed_samples": 56,
        "earlier": [],
        "steps": [step.read() for step in interval.steps],
        "seconds": 5.0,
        "timers_ms": {"optimizer": 500.0},
        "data_wait_ms": 250.0,
    }


# --- a row ------------------------------------------------------------------------------------------------------------

STEP = log.Step(1 / 3, 0.1, 1e-3, skipped=False, stop=False, orphaned=False, loss_scale=1.0, samples=50)


def interval(step=STEP, **changes):
    """Return arguments of `Logger.log`: iterations 9 and 10, each of 50 sequences of 256 tokens, in 4 seconds."""
    given = {
        "iteration": 10,
        "consumed_samples": 100,
        "steps": [step, step],
        "seconds": 4.0,
        "timers_ms": {"forward-compute": 100.0, "optimizer": 2 / 3},
        "data_wait_ms": 0.25,
    }
    return given | changes


def row_of(config=None, world=2, peak=None, **changes):
    return log.metrics_row(config or Config(), world, peak, **interval(**changes))


def test_steps_before_a_resume_count_in_means_and_not_in_speeds():
    """An interval of three steps. The first one, which was skipped with a nan loss, ran before the resume."""
    bad = STEP._replace(loss=float("nan"), skipped=True)
    row, without = row_of(earlier=[bad._replace(loss=1.0), bad]), row_of()
    assert math.isnan(row["lm_loss"]) and (row["skipped_iterations"], row["nan_iterations"]) == (2, 1)
    assert row_of(earlier=[STEP._replace(loss=2.0)])["lm_loss"] == sum([2.0, 1 / 3, 1 / 3]) / 3
    same = row.keys() - {"lm_loss", "skipped_iterations", "nan_iterations"}
    assert {name: row[name] for name in same} == {name: without[name] for name in same}


def test_steps_in_a_checkpoint_keep_every_bit():
    steps = [STEP, STEP._replace(loss=float("nan"), grad_norm=float("inf"), skipped=True), STEP._replace(samples=7)]
    text = json.dumps(log.steps_to_json(steps), allow_nan=False)
    assert repr(log.steps_from_json(json.loads(text))) == repr(steps)


def test_a_cut_line_on_a_full_disk_is_one_line(tmp_path, monkeypatch):
    """The line break after the cut line does not fit on the disk."""
    (tmp_path / "metrics.jsonl").write_text('{"iterat')

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log.os, "write", full)
    with pytest.raises(UserError, match=r"metrics.jsonl: No space left on device$"):
        log.open_lines(tmp_path / "metrics.jsonl")


def test_a_row_has_every_number_with_its_unit():
    config = Config(recompute="full")
    row = row_of(config, peak=0.5)
    assert row["iteration_ms"] == 2000
    assert row["samples_per_second"] == 25 and row["tokens_per_second"] == 25 * 256  # of all devices
    assert row["consumed_tokens"] == 100 * 256
    assert row["tflops"] == pytest.approx(log.model_flops(config, 50) / 2 / 2 / 1e12, rel=1e-14)  # per device
    assert row["hardware_tflops"] == pytest.approx(log.hardware_flops(config, 50) / 2 / 2 / 1e12, rel=1e-14)
    assert row["mfu"] == row["tflops"] / 0.5
    wanted = """iteration consumed_samples consumed_tokens lm_loss grad_norm lr loss_scale global_batch_size
        skipped_iterations nan_iterations iteration_ms samples_per_second tokens_per_second tflops
        hardware_tflops mfu timers_ms data_wait_ms"""
    assert set(wanted.split()) <= set(row)
    assert "validation_loss" not in row
    assert row_of(validation_loss=2.5)["validation_loss"] == 2.5


def test_a_row_has_the_mean_loss_and_the_last_step_s_other_numbers():
    steps = [
        STEP._replace(loss=4.0, grad_norm=math.inf, skipped=True, loss_scale=8.0),
        STEP._replace(loss=2.0, grad_norm=3.0, lr=1e-4, loss_scale=4.0),
        STEP._replace(loss=1.5, grad_norm=2.0, lr=2e-4, loss_scale=2.0, samples=60),
    ]
    names = "lm_loss grad_norm lr loss_scale global_batch_size skipped_iterations nan_iterations".split()
    row = row_of(steps=steps)
    assert [row[name] for name in names] == [2.5, 2.0, 2e-4, 2.0, 60, 1, 0]
    row = row_of(steps=[*steps, STEP._replace(loss=math.nan, skipped=True), STEP._replace(loss=math.inf)])
    assert (row["skipped_iterations"], row["nan_iterations"]) == (2, 2) and math.isnan(row["lm_loss"])


def test_rates_count_the_samples_of_each_step():
    """The batch grows from 10 to 50 within the interval."""
    row = row_of(Config(), steps=[STEP._replace(samples=10), STEP], peak=0.5)
    assert row["samples_per_second"] == 15 and row["tokens_per_second"] == 15 * 256
    assert row["tflops"] == pytest.approx(0.6 * row_of(Config())["tflops"], rel=1e-14)


def test_mfu_is_unknown_where_the_peak_is():
    assert row_of(peak=None)["mfu"] == "unknown"


def test_mfu_counts_no_recomputation():
    printed = PUBLISHED[-1]
    full, none = published_row(printed), published_row(printed, Config(**SHAPE))
    assert full["mfu"] == none["mfu"] == none["hardware_tflops"] / 312
    assert full["hardware_tflops"] == pytest.approx(65.27, abs=0.005)


# --- timers -----------------------------------------------------------------------------------------------------------


def test_timers_add_up_a_phase_and_divide_by_the_iterations():
    clock = Clock()
    timers = log.Timers("cpu", clock)
    for _ in range(2):  # iterations
        with timers("optimizer"):
            clock.now += 0.5
        for _ in range(3):  # micro-batches
            with timers("forward-compute"):
                clock.now += 2.0
                with timers("batch-generator"):
                    clock.now += 0.25
        clock.now += 100.0  # between phases: no phase includes this time
    assert timers.take(2) == {"forward-compute": 6750.0, "optimizer": 500.0, "batch-generator": 750.0}
    with timers("optimizer"):
        clock.now += 1.0
    assert list(timers.take(4).items()) == [("optimizer", 250.0)]  # begins at 0 again, without unused phases
    assert timers.take(1) == {}


def test_timers_keep_the_order_of_the_phases():
    clock = Clock()
    timers = log.Timers("cpu", clock)
    for phase in reversed(log.PHASES):
        with timers(phase):
            clock.now += 1.0
    assert tuple(timers.take(1)) == log.PHASES


def test_a_phase_that_does_not_exist_is_an_error():
    with pytest.raises(KeyError, match="optimiser"), log.Timers("cpu")("optimiser"):
        pass


def fake_gpu(monkeypatch, depth):
    """Replace CUDA events. The simulated GPU is `depth` commands behind the host; command i runs for i seconds."""
    gpu = types.SimpleNamespace(queued=0, passed=0, events=0, waits=0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            gpu.events += 1

        def record(self):
            gpu.queued += 1
            self.at = gpu.queued
            gpu.passed = max(gpu.passed, gpu.queued - depth)

        def query(self):
            return self.at <= gpu.passed

        def elapsed_time(self, stop):
            assert stop.query() and self.at < stop.at  # CUDA refuses events that have not passed
            return 1000.0 * sum(range(self.at + 1, stop.at + 1))

    def synchronize():
        gpu.waits += 1
        gpu.passed = gpu.queued

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return gpu


@pytest.mark.parametrize("depth", [0, 1, 7, 100])
def test_gpu_timers_use_events_again_and_wait_only_in_take(monkeypatch, depth):
    gpu = fake_gpu(monkeypatch, depth)
    timers = log.Timers("cuda")
    for _ in range(1000):
        with timers("forward-compute"):
            pass
        with timers("backward-compute"):
            pass
    assert gpu.waits == 0
    assert gpu.events <= depth + 4
    forward = sum(1000.0 * (4 * i + 2) for i in range(1000))
    assert timers.take(10) == {"forward-compute": forward / 10, "backward-compute": forward / 10 + 2e5}
    assert gpu.waits <= 1
    assert timers.take(1) == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_timers_on_a_real_gpu():
    timers, x = log.Timers("cuda"), torch.randn(4096, 4096, device="cuda")
    x @ x  # the first product loads the library
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        with timers("forward-compute"):
            y = x @ x
        with timers("optimizer"):
            y.add_(1)
    queued = time.perf_counter() - start
    taken = timers.take(1)
    whole = time.perf_counter() - start
    assert 1000 * queued < sum(taken.values()) < 1000 * whole
    assert taken["forward-compute"] > 5 * taken["optimizer"]
    assert list(log.memory_in_use("cuda")) == ["allocated", "max allocated", "reserved", "max reserved"]
    assert log.memory_in_use("cuda")["max allocated"] >= 3 * 64  # x, the old y and the new y, 64 MB each


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    (tmp_path / "tiny").mkdir()
    return Config(out_dir=str(tmp_path / "tiny"), train_iters=300)


def written(config):
    return os.path.join(config.out_dir, "metrics.jsonl")


def logger_of(config, rank=0, **changes):
    return log.Logger(config, "cpu", 2, rank=rank, dtype="fp32", **changes)


def test_rows_come_back_at_full_precision(config):
    logger = logger_of(config)
    rows = [
        logger.log(**interval(STEP._replace(loss=math.pi / i), iteration=i, validation_loss=math.e / i))
        for i in (1, 2, 3)
    ]
    logger.close()
    assert list(log.read_metrics(written(config)).values()) == rows
    assert rows[2]["lm_loss"] == math.pi / 3 and rows[2]["train_iters"] == 300


def test_the_terminal_line_can_be_made_again_from_the_file(config, capsys):
    logger = logger_of(config)
    logger.log(**interval(STEP._replace(grad_norm=math.inf)))
    logger.close()
    row = log.read_metrics(written(config))[10]
    assert capsys.readouterr().out.splitlines()[0] == log.iteration_line(row)


def test_any_json_reader_reads_numbers_that_are_not(config):
    logger = logger_of(config)
    strange = STEP._replace(grad_norm=math.nan, loss=math.inf, lr=-math.inf)
    logger.log(**interval(strange, iteration=1))
    logger.close()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    with open(written(config)) as lines:
        plain = json.loads(lines.read(), parse_constant=refuse)
    assert (plain["grad_norm"], plain["lm_loss"], plain["lr"], plain["mfu"]) == ("nan", "inf", "-inf", "unknown")
    row = log.read_metrics(written(config))[1]
    assert math.isnan(row["grad_norm"]) and row["lm_loss"] == math.inf and row["lr"] == -math.inf
    assert row["mfu"] == "unknown"


def test_a_repeated_iteration_replaces_the_first_and_what_followed_it(config):
    for iteration, losses in [(0, {10: 5.0, 20: 4.0, 30: 3.0, 40: 2.0}), (10, {20: 4.5}), (20, {30: 3.5})]:
        logger = logger_of(config, iteration=iteration)
        for i, loss in losses.items():
            logger.log(**interval(STEP._replace(loss=loss), iteration=i))
        logger.close()
    rows = log.read_metrics(written(config))
    assert [(i, row["lm_loss"]) for i, row in rows.items()] == [(10, 5.0), (20, 4.5), (30, 3.5)]


@pytest.mark.parametrize("kept", [1, 17, -2, -1])
def test_a_torn_last_line_is_passed_over_and_does_not_spoil_the_next(config, kept):
    logger = logger_of(config)
    for i in (10, 20):
        logger.log(**interval(iteration=i))
    logger.close()
    with open(written(config), "rb+") as file:
        first, second = file.read().splitlines(keepends=True)
        file.truncate(len(first) + len(second[:kept]))
    whole = [10, 20] if kept == -1 else [10]  # -1: only the newline is missing, the row is whole
    assert list(log.read_metrics(written(config))) == whole
    logger = logger_of(config, iteration=20)
    logger.log(**interval(iteration=30))
    logger.close()
    assert list(log.read_metrics(written(config))) == [*whole, 30]


def test_a_row_is_one_write(config, monkeypatch):
    logger, write, seen = logger_of(config), os.write, []
    monkeypatch.setattr(os, "write", lambda file, data: seen.append(data) or write(file, data))
    logger.log(**interval())
    assert len(seen) == 1 and seen[0].endswith(b"}\n") and seen[0].count(b"\n") == 1
    logger.close()


def test_a_row_that_the_system_takes_in_parts_is_whole(config, monkeypatch):
    logger, write = logger_of(config), os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:100]))
    row = logger.log(**interval())
    logger.close()
    assert log.read_metrics(written(config)) == {10: row}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(config):
    logger = logger_of(config)
    os.close(logger.file)
    logger.file = os.open("/dev/full", os.O_WRONLY)
    remedy = "the same command resumes from the latest checkpoint, if there is one"  # a new run has none
    with pytest.raises(UserError, match=rf"metrics\.jsonl: No space left on device; {remedy}$"):
        logger.log(**interval())
    logger.close()


# --- the terminal -----------------------------------------------------------------------------------------------------


def test_the_lines_on_the_terminal(config, capsys):
    logger = logger_of(config)
    rows = [
        logger.log(**interval(iteration=10)),
        logger.log(**interval(iteration=20, validation_loss=2.0)),
        logger.log(**interval(iteration=30, timers_ms={})),
    ]
    logger.say("saved")
    logger.close()
    out, err = capsys.readouterr()
    time_line = "time (ms) | forward-compute: 100.00 | optimizer: 0.67"
    memory = out.splitlines()[1]
    assert memory.startswith("[Rank 0] (after 10 iterations) memory (MB) | ") and "resident: " in memory
    assert out.splitlines() == [
        log.iteration_line(rows[0]),
        memory,  # only after the first interval
        time_line,
        log.iteration_line(rows[1]),
        time_line,
        *log.validation_lines(20, 2.0).splitlines(),
        log.iteration_line(rows[2]),
        "saved",
    ]
    assert err == ""  # no bar where stderr is not a terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_and_clean_lines_in_a_file(config, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    logger = logger_of(config, iteration=100)
    for _ in range(10):
        logger.advance()
    row = logger.log(**interval(iteration=110, timers_ms={}))
    bar = sys.stderr.getvalue()
    logger.close()
    assert "110/300" in bar and "loss 0.333, 6,400 tokens/s" in bar
    out = capsys.readouterr().out.splitlines()
    assert out[0] == log.iteration_line(row) and len(out) == 2 and "\r" not in "".join(out)


def test_other_ranks_are_silent(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    logger = logger_of(Config(out_dir=str(tmp_path)), rank=1)
    logger.advance()
    logger.say("hello")
    assert logger.log(**interval()) is None
    logger.close()
    assert capsys.readouterr().out == "" and sys.stderr.getvalue() == "" and list(tmp_path.iterdir()) == []


def test_memory_of_this_process_is_near_what_it_holds():
    held = torch.ones(2**24)  # 64 MB
    used = log.memory_in_use("cpu")
    assert set(used) <= {"resident", "max resident"}  # some systems have only one of them
    assert 64 < max(used.values()) < 2**20 and held[0] == 1


# --- TensorBoard and Weights & Biases (neither needs to be installed) -------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_package_that_is_not_installed_is_one_sentence_on_every_rank(tmp_path, monkeypatch, package, rank):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    config = Config(out_dir=str(tmp_path), **{package: "mine"})
    message = rf"^{package}=mine: {package} is not installed \(pip install {package}\)$"
    with pytest.raises(UserError, match=message):
        logger_of(config, rank=rank)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_imported_that_was_not_asked_for(config, monkeypatch):
    for package in ("tensorboard", "torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    logger_of(config).close()


def test_tensorboard_gets_the_numbers_of_each_row(config, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, log_dir, purge_step):
            calls.append((log_dir, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    fake = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    config.tensorboard = "runs"
    logger = logger_of(config, iteration=5)
    logger.log(**interval())
    logger.close()
    assert calls[0] == ("runs", 6) and calls[-1] == "closed"
    assert ("lm_loss", 1 / 3, 10) in calls and ("timers_ms/optimizer", 2 / 3, 10) in calls
    assert "mfu" not in {call[0] for call in calls}  # "unknown" is not a number


def test_wandb_gets_the_configuration_and_each_row(config, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda row, step: calls.append((row, step)), finish=lambda: calls.append("finished")
    )
    fake = types.SimpleNamespace(init=lambda **settings: calls.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config.wandb = "lecture"
    logger = logger_of(config)
    row = logger.log(**interval(validation_loss=2.0))
    logger.close()
    assert (calls[0]["project"], calls[0]["name"], calls[0]["dir"]) == ("lecture", "tiny", config.out_dir)
    assert calls[0]["config"]["hidden_size"] == 128
    assert calls[1] == (log.scalars(row), 10) and calls[1][0]["validation_loss"] == 2.0
    assert calls[2] == "finished"


def test_wandb_s_refusal_is_one_sentence(config, monkeypatch):
    class UsageError(Exception):
        pass

    def init(**settings):
        raise UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Error=UsageError))
    config.wandb = "lecture"
    with pytest.raises(UserError, match=r"^wandb=lecture: No API key configured\. Use `wandb login` to log in\.$"):
        logger_of(config)
