"""Test the sweep over layouts (its layouts, runs, resume, table and picture) and the measurement of the CPU.

Each of these mistakes, put in by hand, makes a test fail. The first steps count. A finished layout runs again. A failed
run ends the sweep. A run that takes too long is not killed. Equal values get different ranks. A bar has the length of
the prediction. The sweep continues a sweep of another configuration.
"""

import json
import os
import signal
import statistics
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import config as configuration
from accounts import calibration, sweep, traffic
from config import Config
from errors import UserError

SMALL = dict(
    num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=50, global_batch_size=4,
    micro_batch_size=2, train_iters=100,
)  # fmt: skip


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_the_grid():
    """2 processes and 4 samples allow micro-batch sizes 1 and 2 with dp = 2, and 1, 2 and 4 with tp = 2 or pp = 2."""
    found = [sweep.key_of(c) for c in sweep.layouts(Config(**SMALL), 2)]
    assert found == [(1, 1, 1), (1, 1, 2), *[(1, 2, b) for b in (1, 2, 4)], *[(2, 1, b) for b in (1, 2, 4)]]
    assert [sweep.key_of(c) for c in sweep.layouts(Config(**SMALL), 2, ("pp", "micro_batch_size"))] == [
        (1, 1, 2),
        (2, 1, 2),
    ]


def test_every_layout_of_the_grid_is_accepted():
    for c in (found := sweep.layouts(Config(**SMALL | dict(num_layers=6, sequence_parallel=True)), 8)):
        assert configuration.check(c, 8) * c.tp * c.pp == 8
    # 2 heads: tp is 1 or 2. 4 samples: dp is at most 4.
    assert {(c.tp, c.pp) for c in found} == {(1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4)}


def test_no_layout_suits():
    with pytest.raises(UserError, match=r"--gpus=5: no layout suits this configuration; for example: .* multiple of"):
        sweep.layouts(Config(**SMALL), 5)


def test_memory(monkeypatch, capsys):
    c = Config(**SMALL, pp=2, tp=2)
    p = traffic.predict(c, 4)
    assert sweep.needed_memory(c, 4) == max(
        sum(traffic.memory.predict(p.layout, p.schedule, rank, p.sizes).values()) for rank in range(2)
    )
    chosen = sweep.layouts(Config(**SMALL), 2)
    needs = sorted(sweep.needed_memory(c, 2) for c in chosen)
    monkeypatch.setattr(sweep, "memory_of_a_process", lambda gpus: needs[2])
    few = sweep.layouts(Config(**SMALL), 2)
    assert sorted(sweep.needed_memory(c, 2) for c in few) == [need for need in needs if need <= needs[2]]
    assert f"{len(chosen) - len(few)} of 8 layouts do not fit" in capsys.readouterr().out and len(few) < 8
    monkeypatch.setattr(sweep, "memory_of_a_process", lambda gpus: needs[0] - 1)
    with pytest.raises(UserError, match="--gpus=2: no layout fits"):
        sweep.layouts(Config(**SMALL), 2)


# --- the runs ---------------------------------------------------------------------------------------------------------


def test_a_sweep_measures_survives_a_failure_and_resumes(tmp_path, capsys, monkeypatch):
    base = Config(**SMALL, out_dir=str(tmp_path / "a"))
    grid = sweep.layouts

    def with_a_failure(base, *rest):  # tp=3 cannot run on 2 processes
        chosen = grid(base, *rest)
        return [replace(chosen[0], tp=3), *chosen]

    monkeypatch.setattr(sweep, "layouts", with_a_failure)
    predict = dict(zip([(3, 1, 2), (1, 1, 2), (2, 1, 2)], [9.0, 0.5, 0.25], strict=True))
    arguments = base, 2, lambda c, gpus: predict[sweep.key_of(c)], ("pp", "micro_batch_size"), 3
    sweep.main(*arguments)
    out, folder = capsys.readouterr().out, tmp_path / "a_sweep2"
    assert "[1/3] tp=3 pp=1 micro-batch 2: num_attention_heads = 2 is not a multiple of tp = 3" in out
    assert "tp=3 pp=1 micro-batch 2: failed: num_attention_heads" in out and "over 2 layouts" in out
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [sweep.key_of(row) for row in rows] == [(3, 1, 2), (1, 1, 2), (2, 1, 2)]
    for row in rows[1:]:
        assert row["error"] is None and 0 < row["spread"][0] <= row["seconds"] <= row["spread"][1]
    assert not (folder / "run").exists() and (folder / "sweep.svg").read_text().startswith("<svg ")

    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text(lines[0] + lines[2])  # the layout of line 2 must run again
    runs = []
    monkeypatch.setattr(sweep, "run", lambda command, *_: runs.append(command) or "not started")
    sweep.main(*arguments)
    (command,) = runs
    assert command[-3:] == ["--tp=1", "--pp=1", "--micro_batch_size=2"]
    assert "failed: not started" in capsys.readouterr().out
    with pytest.raises(UserError, match="has a sweep of another configuration"):
        sweep.main(replace(base, hidden_size=32), *arguments[1:])


def test_warm_up_steps_do_not_count(tmp_path, monkeypatch):
    times = [9000, 8000, 3, 1, 7]

    def run(command, *_):
        (tmp_path / "run").mkdir()
        text = [json.dumps({"iteration": i, "iteration_ms": t}) + "\n" for i, t in enumerate(times, start=1)]
        (tmp_path / "run" / "metrics.jsonl").write_text("".join(text))

    monkeypatch.setattr(sweep, "run", run)
    fields = dict(tp=1, pp=1, micro_batch_size=1)
    row = sweep.measure(fields, 1, tmp_path, 5, 1)
    assert row == {"seconds": 0.003, "spread": [0.001, 0.007], "error": None}
    assert sweep.measure(fields, 1, tmp_path, 6, 1)["error"] == "5 of 6 steps are logged"


SLEEPER = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_run_that_shall_stop_is_ended(tmp_path, interrupted):
    command = [sys.executable, "-c", SLEEPER, str(tmp_path / "pid")]

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        if interrupted:
            signal.setitimer(signal.ITIMER_REAL, 3)
            with pytest.raises(KeyboardInterrupt):
                sweep.run(command, tmp_path / "log", 600)
        else:
            assert sweep.run(command, tmp_path / "log", 3) == "not finished after 3 s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_reason_of_a_failure(tmp_path):
    assert sweep.run([sys.executable, "-c", "print('error: tp=3: no'); raise SystemExit(2)"], tmp_path / "log", 60) == (
        "tp=3: no"
    )
    assert sweep.run([sys.executable, "-c", "pass"], tmp_path / "log", 60) is None
    assert sweep.reason("x\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried\nlast") == (
        "OutOfMemoryError: CUDA out of memory. Tried"
    )
    assert (
        sweep.reason("a\n traceback : Signal 9 (SIGKILL) received by PID 7\n") == "Signal 9 (SIGKILL) received by PID 7"
    )
    assert sweep.reason("a\nb\n\n") == "b" and sweep.reason("\n") == "failed without a message"


@pytest.mark.parametrize("line", ["{", "[1]", '{"tp": 1, "pp": 1, "micro_batch_size": 1}', "7"])
def test_a_damaged_line_of_results(tmp_path, line):
    good = dict(tp=1, pp=1, micro_batch_size=1, seconds=1.0, spread=[1.0, 1.0], error=None)
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"results.jsonl:2: not a row of a sweep"):
        sweep.read_results(path)


# --- the table and the picture ----------------------------------------------------------------------------------------


def test_rank_correlation():
    """By hand: the ranks of 30, 10, 20, 20 are 4, 1, 2.5, 2.5. Without ties: 1 - 6 sum d^2 / (n (n^2 - 1))."""
    assert sweep.ranks_of([30, 10, 20, 20]) == [4, 1, 2.5, 2.5]
    assert sweep.rank_correlation([1, 2, 3, 4], [10, 100, 1000, 10000]) == pytest.approx(1)
    assert sweep.rank_correlation([1, 2, 3], [9, 5, 2]) == pytest.approx(-1)
    a, b = [1, 2, 3, 4, 5], [5, 6, 7, 8, 7.5]  # ranks of b: 1 2 3 5 4
    assert sweep.rank_correlation(a, b) == pytest.approx(1 - 6 * 2 / (5 * 24))
    assert sweep.rank_correlation([1, 1], [1, 2]) is None


def row_of(tp, seconds, predicted, error=None):
    spread = None if seconds is None else [seconds / 2, 2 * seconds]
    grid = dict(tp=tp, pp=1, micro_batch_size=2)
    return grid | dict(seconds=seconds, spread=spread, error=error, predicted=predicted)


ROWS = [row_of(4, 0.2, 0.3), row_of(1, 0.1, 0.4), row_of(2, None, 1.6, "out of memory"), row_of(8, 0.4, 0.5)]


def test_the_table():
    lines = sweep.table(ROWS, 8, 16).splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    # dp = 8 / tp; m = 16 samples / dp / 2
    assert cells[1] == ["tp=1 pp=1 micro-batch 2", "8", "1", "100.0 ms", "50.0 ms", "200.0 ms", "400.0 ms", "4.00"]
    assert [row[:3] for row in cells[2:]] == [
        ["tp=4 pp=1 micro-batch 2", "2", "4"],
        ["tp=8 pp=1 micro-batch 2", "1", "8"],
    ]
    text = "\n".join(lines)
    assert "tp=2 pp=1 micro-batch 2: failed: out of memory" in text
    assert "The slowest layout takes 4.00 times as long as the fastest." in text
    # Errors: 3, 0.5, 0.25. Ranks of the predictions: 2, 1, 3. tp=4 has the smallest prediction.
    assert f"mean error {statistics.fmean([3, 0.5, 0.25]):.1%}, largest 300.0%" in text
    assert "rank correlation 0.50 over 3 layouts" in text and "takes 2.00 times as long as the fastest." in text
    plain = sweep.table([row | {"predicted": None} for row in ROWS], 8, 16)
    assert "Prediction" not in plain and "failed: out of memory" in plain


def test_the_picture():
    picture = ElementTree.fromstring(sweep.svg(ROWS, 8, "tiny"))
    space = "{http://www.w3.org/2000/svg}"
    bars = [float(x.get("width")) for x in picture.iter(space + "rect")][1:]  # the first is the legend's
    assert bars == pytest.approx([bars[0], 2 * bars[0], 4 * bars[0]], abs=0.2)  # 100, 200, 400 ms
    marks = [path for path in picture.iter(space + "path") if path.get("stroke") == sweep.PREDICTED][1:]
    at = [float(path.get("d")[1:].split()[0]) - sweep.LEFT for path in marks]
    assert at == pytest.approx([n * bars[0] for n in (4, 3, 5, 16)], abs=0.5)
    texts = [x.text for x in picture.iter(space + "text")]
    assert "failed: out of memory" in texts and "tp=8 pp=1 micro-batch 2" in texts and "milliseconds" in texts


# --- the measurement of the CPU ---------------------------------------------------------------------------------------


def test_a_calibration(tmp_path, capsys):
    path = tmp_path / "new" / "cpu.json"
    calibration.main(path, (1, 2))
    found = json.loads(path.read_text())
    one, two = found["processes"]["1"], found["processes"]["2"]
    assert one.keys() == two.keys() and all(one[name] is None for name in calibration.WIRES)
    for numbers in (one, two):
        rates = [numbers[name] for name in ("memory_rate", "operation", *(calibration.WIRES if numbers is two else ()))]
        rates += [*numbers["peak"].values()]
        assert all(0 < x < 1e15 for x in rates) and len(rates) >= 5
        assert 0 < numbers["memory"] <= 1 and 0 < numbers["attention"] < 2
    assert two["operation"] > 1e-6 and two["latency"] > 1e-6
    out = capsys.readouterr().out
    assert "2 processes:" in out and "wire" in out and str(path) in out


def test_processes_that_take_turns_on_a_core_are_slower():
    numbers = dict(peak={"fp32": 8.0}, memory_rate=6.0, operation=5.0, memory=0.5)
    half = calibration.slowed(numbers, 0.5)
    assert half == dict(peak={"fp32": 4.0}, memory_rate=3.0, operation=10.0, memory=0.5)
    assert calibration.slowed(numbers, 1.0) == numbers


def test_medians():
    values = [
        {"a": 1, "b": [[1, 5.0]], "c": None},
        {"a": 9, "b": [[1, 7.0]], "c": None},
        {"a": 2, "b": [[1, 6.0]], "c": None},
    ]
    assert calibration.median_of(values) == {"a": 2, "b": [[1, 6.0]], "c": None}


def test_a_calibration_that_fails_ends_with_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "run", lambda *_: "not finished after 300 s")
    with pytest.raises(UserError, match="--calibrate: not finished after 300 s"):
        calibration.main(tmp_path / "cpu.json", (1,))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file: File exists"):
        calibration.main(tmp_path / "file" / "cpu.json", (1,))
