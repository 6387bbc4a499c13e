"""Tests of the program as users run it: torchrun, signals, mistakes, and the files of a run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import config as configuration
import log
import train
from conftest import write_tokens
from errors import UserError
from parallel import checkpoint, processes
from parallel.comm import CommunicationError, Ledger, agree, lost_peer
from parallel.mesh import Axis, Mesh
from parallel.optimizer import learning_rate
from parallel.zero import Zero
from test_checkpoint import configured, curve, go
from test_config import held_elsewhere
from test_layouts import micro_batches

HERE = Path(__file__).parent
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def config_file(tokens_dir, tmp_path):
    """The configuration file of a tiny run in tmp_path/out."""
    file = tmp_path / "micro.py"
    file.write_text(
        f"data_dir = {tokens_dir!r}\nout_dir = {str(tmp_path / 'out')!r}\nvocab_size = 50\nnum_layers = 2\n"
        "hidden_size = 16\nnum_attention_heads = 2\nseq_length = 8\nmicro_batch_size = 2\nglobal_batch_size = 8\n"
        "train_iters = 6\nlog_interval = 2\nlr = 1e-2\ndtype = 'fp64'\n"
    )
    return str(file)


def torchrun(ranks, *arguments, program="train.py", **options):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=0"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", str(program), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE)}
    return subprocess.Popen(
        command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_torchrun_trains_and_reports(config_file, tmp_path):
    """The run prints log lines, memory, timers, validation and ledger, and writes metrics.jsonl and a checkpoint."""
    process = torchrun(2, config_file, "--tp=2", "--sequence_parallel", "--ledger", "--eval_iters=2")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (
        "8,768 parameters, 2 layers of 16; dp=1 tp=2 pp=1 zero=0 sequence_parallel=True recompute=none; fp64 on cpu"
        in out
    )
    assert len(re.findall(r"^ iteration +\d+/ +6 \| consumed samples: .* \| TFLOPs: [\d.]+ \|$", out, re.M)) == 3
    assert "[Rank 0] (after 2 iterations) memory (MB) | resident" in out
    phases = ["forward-compute", "backward-compute", "grad-reduce", "optimizer", "batch-generator"]
    assert re.search(r"time \(ms\) \| " + r" \| ".join(rf"{p}: [\d.]+" for p in phases), out)
    assert "validation loss at iteration 6 | lm loss value: " in out
    rows = [
        [cell.strip() for cell in line.split("|")] for line in out.splitlines() if line.startswith(("tp ", "world "))
    ]
    assert len(rows) == 9 and all(measured == formula for *_, measured, formula in rows)
    assert ["tp", "activations", "all_gather"] in [row[:3] for row in rows]
    metrics = log.read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert list(metrics) == [2, 4, 6] and metrics[6]["consumed_tokens"] == 6 * 8 * 8
    assert "validation_loss" in metrics[6] and "validation_loss" not in metrics[4]
    assert checkpoint.all_steps(tmp_path / "out") == [6]


def wait_for(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def workers_of(launcher):
    """The process ids of the train.py processes that a torchrun started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in children]


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


COUNTS_THREADS = """
import atexit, gc, glob, time, train

gc.disable()  # otherwise it may free the groups by chance

def threads():
    try:
        return sum("gloo" in open(name).read() for name in glob.glob("/proc/self/task/*/comm"))
    except (FileNotFoundError, ProcessLookupError):
        return threads()  # one has just ended

def show():
    deadline = time.monotonic() + 5  # a thread that was joined may be listed for a moment
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    print("threads of Gloo:", threads(), flush=True)

atexit.register(show)
train.exit_on_user_error(train.main)
"""


@linux
def test_no_thread_of_gloo_lives_when_python_exits(config_file, tmp_path):
    """Such a thread may free a tensor later. This aborts the process ("terminate called without an active exception").

    With 8 processes on 2 cores, 7 of 17 runs ended so.
    """
    program = tmp_path / "program.py"
    program.write_text(COUNTS_THREADS)
    options = "--tp=2", "--pp=2", "--eval_iters=0", f"--trace={tmp_path}/trace.json"
    process = torchrun(4, config_file, *options, program=program)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("threads of Gloo: 0\n") == 4


@linux
def test_sigterm_on_one_rank_saves_the_same_step_everywhere(config_file, tmp_path):
    """Each process exits with 0, and the same command resumes the run."""
    metrics = tmp_path / "out" / "metrics.jsonl"
    process = torchrun(2, config_file, "--train_iters=100000", "--log_interval=1")
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
    os.kill(workers_of(process)[1], signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    (step,) = checkpoint.all_steps(tmp_path / "out")
    assert f"stopped after iteration {step}; the same command resumes the run" in out
    assert list(log.read_metrics(metrics))[-1] == step
    index = checkpoint.read_index(tmp_path / "out" / f"step_{step}")
    assert index["counters"] == {"iteration": step, "consumed_samples": 8 * step, "updates": step}


@linux
def test_a_killed_rank_stops_the_others_and_nobody_saves(config_file, tmp_path):
    metrics = tmp_path / "out" / "metrics.jsonl"
    process = torchrun(2, config_file, "--train_iters=100000", "--log_interval=1")
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
    os.kill(workers_of(process)[1], signal.SIGKILL)
    process.communicate(timeout=90)
    assert process.returncode != 0 and checkpoint.all_steps(tmp_path / "out") == []


@linux
@pytest.mark.parametrize("layout", [["--tp=2"], ["--pp=2", "--schedule=zb-h1"], ["--zero=3"]], ids=str)
def test_a_rank_that_hangs_is_named_by_those_who_wait(config_file, tmp_path, layout):
    """Within comm_timeout seconds, a line names the waiting rank and its peer. The run ends without a checkpoint."""
    metrics = tmp_path / "out" / "metrics.jsonl"
    options = ["--train_iters=100000", "--log_interval=1", "--comm_timeout=5", *layout]
    process = torchrun(2, config_file, *options)
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
    first, second = workers_of(process)
    os.kill(second, signal.SIGSTOP)
    began = time.monotonic()
    while alive(first) and time.monotonic() < began + 60:
        time.sleep(0.05)
    seconds = time.monotonic() - began
    os.kill(second, signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode != 0 and seconds < 50
    assert re.search(r"^error: rank 0 waited for rank(s \[1\]| 1) ", err, re.M), err
    assert checkpoint.all_steps(tmp_path / "out") == []


@linux
def test_workers_stop_when_their_launcher_dies(config_file, tmp_path):
    metrics = tmp_path / "out" / "metrics.jsonl"
    process = torchrun(2, config_file, "--train_iters=100000", "--log_interval=1")
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
    pids = workers_of(process)
    process.kill()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlives its launcher"
        time.sleep(0.1)
    process.communicate()
    assert checkpoint.all_steps(tmp_path / "out") == []


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_mistake_is_one_line_from_rank_0_and_exit_code_2(config_file):
    """torchrun's report ends with its root cause, which is the same line."""
    process = torchrun(2, config_file, "--tp=3")
    out, err = process.communicate(timeout=120)
    line = "error: num_attention_heads = 2 is not a multiple of tp = 3: a tensor parallel rank has whole heads"
    assert [text for text in err.splitlines() if text.startswith("error: ")] == [line]
    assert process.returncode != 0 and "exitcode  : 2" in err and "Traceback" not in out
    root = err.rpartition("Root Cause (first observed failure):\n")[2].splitlines()
    assert root[0] == "[0]:" and root[-2] == f"  traceback : {line}" and set(root[-1]) == {"="}


@pytest.mark.parametrize(
    "error, code", [(CommunicationError("x"), 1), (UserError("x"), 2), (MemoryError("x"), 2)], ids=repr
)
def test_a_rank_exits_at_once_with_its_code(monkeypatch, capsys, error, code):
    """A normal exit would wait for ranks that may be dead, and a lost rank must not end as a success."""

    class Exit(BaseException):
        pass

    def exit_at_once(code):
        raise Exit(code)

    def work():
        raise error

    monkeypatch.setattr(os, "_exit", exit_at_once)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    with pytest.raises(Exit) as stop:
        processes.together(Axis("world", (0, 1), 0, Ledger()), work)
    assert stop.value.args == (code,) and re.fullmatch("error: .*x\n", capsys.readouterr().err)


def test_a_traceback_is_torchruns_root_cause(monkeypatch, tmp_path):
    def work():
        raise RuntimeError("out of memory")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(RuntimeError, match="out of memory"):
        processes.together(Axis("world", (0,), 0, Ledger()), work)
    text = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert text.startswith("Traceback") and text.endswith("RuntimeError: out of memory\n")


def main(monkeypatch, capsys, *arguments):
    """Run train.py in this process. Return (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep pytest's handlers
    code = 0
    try:
        train.exit_on_user_error(train.main)
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_one_process_without_torchrun(config_file, monkeypatch, capsys, tmp_path):
    code, out, _ = main(monkeypatch, capsys, config_file)
    assert code == 0 and f"trained to iteration 6; python generate.py {tmp_path}/out" in out
    code, out, _ = main(monkeypatch, capsys, config_file)
    assert code == 0 and out.endswith(f"\nnothing to do: train_iters=6 are done ({tmp_path}/out/step_6)\n")
    assert "changed" not in out.lower()
    code, out, _ = main(monkeypatch, capsys, "--help")
    assert code == 0 and "--lr_warmup_fraction=0.0" in out


@pytest.mark.parametrize("table", [1, 4, 4096])
def test_learning_rates_come_from_small_tables(config_file, monkeypatch, capsys, tmp_path, table):
    """The rates are those of the formula, exactly, also where a table ends and after a resume."""
    monkeypatch.setattr(train, "RATES", table)
    fields = ["--lr_warmup_iters=3", "--lr_decay_iters=11", "--log_interval=1", "--eval_iters=0", "--min_lr=1e-3"]
    for iterations in (5, 11):
        assert main(monkeypatch, capsys, config_file, *fields, f"--train_iters={iterations}")[0] == 0
    c = configuration.load([config_file, *fields, "--train_iters=11"])
    rates = {i: row["lr"] for i, row in log.read_metrics(tmp_path / "out" / "metrics.jsonl").items()}
    assert rates == {i: learning_rate(c, i) for i in range(1, 12)}


def test_a_billion_iterations_need_no_list(monkeypatch, config_file):
    run, calls = train.build(configuration.load([config_file, f"--train_iters={10**9}"]), Mesh(), CPU), []
    monkeypatch.setattr(train, "learning_rate", lambda c, update: calls.append(update) or learning_rate(c, update))
    assert train.rate(run).item() == learning_rate(run.config, 1)
    assert calls == list(range(1, train.RATES + 1))


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--trace=/nowhere/x.json"], "error: trace=/nowhere/x.json: No such file or directory\n"),
        (["--hidden_size=10000000"], "error: num_layers=2, hidden_size=10000000, vocab_size=50, seq_length=8, micro_b"),
        ([f"--out_dir={'x' * 300}"], f"error: out_dir={'x' * 300}: File name too long\n"),
        ([f"--data_dir={'x' * 300}"], "error: "),
        ([f"--resume={'/'.join(['x' * 200] * 30)}"], "error: "),
        (["--comm_timeout=1e300"], "error: comm_timeout=1e+300: should be"),
        (["--vocab_size=99999999999"], "error: num_layers=2, hidden_size=16, vocab_size=99999999999, seq_length=8, "),
    ],
)
def test_mistakes_are_found_before_training(config_file, monkeypatch, capsys, arguments, line):
    monkeypatch.setattr(train, "train_step", None)
    code, _, err = main(monkeypatch, capsys, config_file, *arguments)
    assert code == 2 and err.startswith(line) and err.count("\n") == 1


def test_the_run_is_described_before_its_weights_are_drawn(config_file, monkeypatch, capsys):
    def initialize(*_):
        raise UserError("drawn")

    monkeypatch.setattr(Zero, "initialize", initialize)
    code, out, err = main(monkeypatch, capsys, config_file)
    assert (code, err) == (2, "error: drawn\n") and "parameters, 2 layers of 16" in out


ANEW = "To begin anew, set another --out_dir"


def test_a_second_run_names_the_fields_that_differ(config_file, monkeypatch, capsys, tmp_path):
    """The run uses the new values, except init_method_std. Fields without an effect on the weights are not named."""
    main(monkeypatch, capsys, config_file, "--train-iters", "4")
    changed = "lr=0.5 (the checkpoint: 0.01), zero=1 (the checkpoint: 0)"
    start = "init_method_std=0.5 (the checkpoint: 0.02, still used)"
    command = [config_file, "--lr", "0.5", "--init-method-std", "0.5", "--zero", "1", "--ledger", "--log_interval=1"]

    code, out, _ = main(monkeypatch, capsys, *command, "--train_iters=4")
    line = f"nothing to do: train_iters=4 are done ({tmp_path}/out/step_4). Changed without effect: "
    assert code == 0 and out.splitlines()[2:] == [f"{line}{start}, {changed}. {ANEW}"]

    code, out, _ = main(monkeypatch, capsys, *command)
    iters = "train_iters=6 (the checkpoint: 4)"
    line = f"changed since {tmp_path}/out/step_4: {start}, {iters}, {changed}. This run uses the new values. {ANEW}"
    assert code == 0 and out.splitlines()[2] == line
    rows = log.read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert rows[4]["lr"] < 0.01 and 0.01 < rows[5]["lr"] < 0.5

    resume = f"--resume={tmp_path}/out/step_6"
    code, out, _ = main(monkeypatch, capsys, *command, resume, "--lr=0.25")
    line = f"nothing to do: train_iters=6 are done ({tmp_path}/out/step_6). Changed without effect: "
    assert code == 0 and out.splitlines()[2] == f"{line}lr=0.25 (the checkpoint: 0.5). {ANEW} and no --resume"


def test_the_loss_scale_of_an_fp16_checkpoint_stays(config_file, monkeypatch, capsys):
    """A line also warns that fp16 on a CPU is slow."""
    code, out, _ = main(monkeypatch, capsys, config_file, "--dtype=fp16", "--train_iters=1", "--initial_loss_scale=16")
    warning = "dtype=fp16 on a CPU: a step takes about 9 times as long as with dtype=fp32"
    assert code == 0 and out.splitlines()[2] == warning
    code, out, _ = main(monkeypatch, capsys, config_file, "--dtype=fp16", "--train_iters=1", "--initial_loss_scale=8")
    assert "Changed without effect: initial_loss_scale=8.0 (the checkpoint: 16.0, still used). To begin" in out
    code, out, _ = main(monkeypatch, capsys, config_file, "--dtype=fp32", "--eval_only")
    assert code == 0 and "dtype=fp16" not in out and "hanged" not in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tp=2"], "the number of processes = 1 is not a multiple of tp * pp = 2"),
        (["--data_dir=nowhere"], "nowhere"),
        (["--vocab_size=49"], "vocab_size=49"),
        (["--seq_length=5000"], "seq_length=5000"),
        (["--resume=nowhere"], "resume=nowhere: there is no checkpoint in nowhere"),
        (["--eval_only"], "resume=auto: there is no checkpoint in"),
        (["--eval_only", "--eval_iters=0"], "eval_iters=0: eval_only averages over eval_iters global batches"),
        (["--zero-stage", "2"], "--zero-stage: use --zero"),
        (
            ["--split", "949,50,1"],
            "split=949,50,1: should be one of train, val, test; prepare.py --split sets",
        ),
        (["--out_dir=/dev/null/x"], "out_dir=/dev/null/x: Not a directory"),
        (["--tensorboard=x"], "tensorboard=x: tensorboard is not installed"),
    ],
)
def test_mistakes_stop_before_training(config_file, monkeypatch, capsys, arguments, message):
    if arguments == ["--tensorboard=x"]:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, out, err = main(monkeypatch, capsys, config_file, *arguments)
    assert code == 2 and message in err and err.startswith("error: ") and err.count("\n") == 1
    assert "iteration        " not in out


def test_a_log_that_cannot_be_written_is_one_line(config_file, monkeypatch, capsys, tmp_path):
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    code, _, err = main(monkeypatch, capsys, config_file)
    assert code == 2 and err.endswith("metrics.jsonl: Is a directory\n") and err.count("\n") == 1


def test_more_processes_than_gpus_is_one_line(config_file, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    code, _, err = main(monkeypatch, capsys, config_file)
    assert code == 2 and err.startswith(
        "error: nproc_per_node=4: each process needs a GPU, and there are 2; set at most 2"
    )


def test_operations_that_do_not_run_are_one_line(tokens_dir, tmp_path, monkeypatch):
    def broken(_):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable")

    monkeypatch.setattr(train.reference, "squared_norms", broken)
    with pytest.raises(UserError) as error:
        go(configured(tmp_path, tokens_dir))
    assert str(error.value) == "kernels=auto: cannot run here (Failed to find C compiler.); set --kernels=torch"


def test_who_waits_for_an_agreement_says_so(monkeypatch):
    def gone(*_, **__):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(torch.distributed, "all_gather_object", gone)
    axis = Axis("world", (0, 1), 0, Ledger())
    with pytest.raises(CommunicationError, match=r"^rank 0 waited for ranks \[1\] to send objects: connection closed"):
        agree(axis, UserError, lambda: None)


@pytest.mark.parametrize(
    "error, of_this_gpu",
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.distributed.DistBackendError("NCCL: Cuda failure 2 'out of memory'"), True),
        (torch.distributed.DistBackendError("NCCL: remote process exited"), False),
        (RuntimeError("Connection closed by peer"), False),
    ],
    ids=repr,
)
def test_an_error_of_this_gpu_is_no_lost_peer(error, of_this_gpu):
    with pytest.raises(type(error) if of_this_gpu else CommunicationError), lost_peer("rank 0 waited"):
        raise error


def test_a_second_run_in_the_same_folder_is_refused(config_file, tokens_dir, tmp_path):
    (tmp_path / "out").mkdir()
    with held_elsewhere(tmp_path / "out" / "lock"), pytest.raises(UserError, match="another run is training there"):
        go(configured(tmp_path / "out", tokens_dir))
    go(configured(tmp_path / "out", tokens_dir, train_iters=1))


def validation_losses(config):
    go(config)
    return list(log.read_metrics(Path(config.out_dir) / "metrics.jsonl").values())[-1]["validation_loss"]


@pytest.mark.parametrize("ranks, tp, size", [(3, 1, 1), (4, 2, 2), (1, 1, 5)])
def test_validation_is_over_all_ranks(workers, tokens_dir, tmp_path, ranks, tp, size):
    """The 87 validation samples are the same for every dp, tp and micro_batch_size."""
    fields = dict(train_iters=1, eval_iters=100, dtype="fp64", global_batch_size=60)
    expected = validation_losses(configured(tmp_path / "one", tokens_dir, micro_batch_size=30, **fields))
    config = configured(tmp_path / "many", tokens_dir, tp=tp, micro_batch_size=size, **fields)
    assert workers.run(ranks, validation_losses, config) == pytest.approx([expected] * ranks, rel=1e-12)


def test_eval_only_takes_a_checkpoints_loss_on_any_split(tokens_dir, tmp_path, capsys):
    """eval_only changes no file and takes no lock. Therefore it also works during a training."""
    config = configured(tmp_path, tokens_dir, train_iters=4, eval_iters=100)
    trained = validation_losses(config)
    said = {}
    with held_elsewhere(tmp_path / "lock"):
        before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
        for split in ("val", "test"):
            config = configured(tmp_path, tokens_dir, train_iters=0, eval_iters=100, eval_only=True, split=split)
            capsys.readouterr()
            go(config)
            said[split] = capsys.readouterr().out
    assert f"validation loss at iteration 4 | lm loss value: {trained:.6E}" in said["val"]
    assert " test loss at iteration 4 | lm loss value: " in said["test"] and "validation" not in said["test"]
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def test_epochs_stand_for_iterations(tokens_dir, tmp_path):
    """4,000 tokens make 499 samples of 8 tokens. A step has 24 samples, so half an epoch is 10 steps."""
    go(configured(tmp_path, tokens_dir, train_iters=0, train_epochs=0.5, lr_decay_iters=0))
    assert checkpoint.all_steps(tmp_path) == [10]


def test_the_logged_loss_is_the_mean_over_interval_micro_batches_and_ranks(workers, tokens_dir, tmp_path):
    go(configured(tmp_path / "each", tokens_dir, train_iters=4))
    workers.run(3, go, configured(tmp_path / "three", tokens_dir, train_iters=4, log_interval=4))
    losses = [row[0] for row in curve(tmp_path / "each")]
    assert curve(tmp_path / "three")[0][0] == pytest.approx(sum(losses) / 4, rel=1e-12)


def test_an_empty_validation_split_is_an_error_only_for_who_reads_it(tmp_path):
    data_dir = write_tokens(tmp_path / "tokens", val=0)
    with pytest.raises(UserError, match="val"):
        go(configured(tmp_path / "a", data_dir))
    go(configured(tmp_path / "b", data_dir, eval_iters=0, train_iters=1))


def test_a_nan_loss_is_counted_and_does_not_touch_the_weights(tokens_dir, tmp_path):
    run = train.build(configured(tmp_path, tokens_dir), Mesh(), CPU)
    run.zero.initialize(1)
    run.zero.buckets["head"].master.fill_(torch.nan)
    before = run.zero.buckets["block0"].param.clone()
    step = train.train_step(run, micro_batches(run))
    interval = log.Interval()
    interval.steps.append(step)
    row = log.metrics_row(run.config, 1, None, **interval.row(1, 8, run.timers, 0.0))
    assert step.read().skipped and (row["nan_iterations"], row["skipped_iterations"]) == (1, 1)
    assert torch.equal(before, run.zero.buckets["block0"].param)


def test_metrics_are_json_at_full_precision(tokens_dir, tmp_path):
    go(configured(tmp_path, tokens_dir, train_iters=2))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    promised = (
        "iteration consumed_samples consumed_tokens lm_loss grad_norm lr loss_scale global_batch_size "
        "skipped_iterations nan_iterations iteration_ms samples_per_second tokens_per_second tflops hardware_tflops "
        "mfu data_wait_ms"
    ).split()
    assert all(set(promised) <= set(row) for row in rows) and len(rows) == 2
    assert rows[0]["mfu"] == "unknown" and len(repr(rows[0]["lm_loss"])) > 12
