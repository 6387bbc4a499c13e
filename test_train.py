"""Tests of the program as users run it: torchrun, signals, mistakes, and the files of a run."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import log
import train
from accounts.metrics import read_metrics
from config import Config
from errors import LESS_MEMORY, UserError
from parallel.comm import CommunicationError, agree, lost_peer
from parallel.mesh import Axis, everyone
from parallel.watch import Watch
from parallel.zero import Zero
from recovery import checkpoint, processes, start
from testing.tiny import (
    configured,
    curve,
    fails,
    few,
    go,
    held_elsewhere,
    validation_losses,
    write_tokens,
)

pytestmark = pytest.mark.usefixtures("no_gpu")
HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE)}


@pytest.fixture
def config_file(tokens_dir, tmp_path):
    """A run's configuration file."""
    file = tmp_path / "micro.py"
    file.write_text(
        f"data_dir = {tokens_dir!r}\nout_dir = {str(tmp_path / 'out')!r}\nvocab_size = 100\nnum_layers = 2\n"
        "hidden_size = 16\nnum_attention_heads = 2\nseq_length = 8\nmicro_batch_size = 2\nglobal_batch_size = 8\n"
        "train_iters = 6\nlog_interval = 2\nlr = 1e-2\ndtype = 'fp64'\nsave_interval = 0\n"
    )
    return str(file)


# --- under torchrun ---------------------------------------------------------------------------------------------------


def launch(command, environment=ENVIRONMENT):
    """Start a command with its output in a file: a pipe that nobody reads yet would stop an endless run."""
    file, path = tempfile.mkstemp()
    os.unlink(path)  # a deleted file lives as long as a process has it open
    process = subprocess.Popen(command, cwd=HERE, env=environment, stdout=file, stderr=subprocess.STDOUT)
    process.file = file
    return process


def output_of(process):
    """Wait for the end. Return the text."""
    process.wait(120)
    return os.pread(process.file, os.fstat(process.file).st_size, 0).decode()


def torchrun(ranks, *arguments, flags=()):
    """Start train.py under torchrun. flags: of torchrun, instead of these."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command += ["--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local-addr=localhost"]
    return launch([*command, *flags, HERE / "train.py", *arguments])


def test_torchrun_trains_and_reports(config_file, tmp_path):
    process = torchrun(2, config_file, "--tp=2", "--sequence_parallel", "--ledger", "--eval_iters=2")
    out = output_of(process)
    assert process.returncode == 0, out
    what = "8,768 parameters, 2 layers of 16; dp=1 tp=2 cp=1 pp=1 zero=0 sequence_parallel=True recompute=none;"
    assert what in out
    assert len(re.findall(r"^ iteration +\d+/ +6 \| consumed samples: .* \| TFLOPs: [\d.]+ \|$", out, re.M)) == 3
    assert "[Rank 0] (after 2 iterations) memory (MB) | max resident" in out
    assert re.search(r"time \(ms\) \| " + r" \| ".join(rf"{phase}: [\d.]+" for phase in [*log.TIMED.values()][:5]), out)
    assert "validation loss at iteration 6 | lm loss value: " in out
    assert f"saved {tmp_path / 'out' / 'step_6'}" in out
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if re.match("tp |world ", line)]
    assert len(rows) == 9 and all(measured == formula for *_, measured, formula in rows)
    assert ["tp", "activations", "all_gather"] in [row[:3] for row in rows]
    metrics = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert list(metrics) == [2, 4, 6] and metrics[6]["consumed_tokens"] == 6 * 8 * 8
    assert "validation_loss" in metrics[6] and "validation_loss" not in metrics[4]
    assert checkpoint.all_steps(tmp_path / "out") == [6]


def wait_for(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()  # else `output_of` would wait for its end
            pytest.fail(output_of(process), pytrace=False)
        time.sleep(0.05)


def children(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_for_lines(folder, process):
    metrics = folder / "out" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)


def started(folder, *arguments, ranks=2):
    """Start an endless run, and wait for log lines. Return (torchrun, its pids)."""
    words = str(folder / "micro.py"), "--train_iters=100000", "--log_interval=1", *arguments
    process = torchrun(ranks, *words)
    wait_for_lines(folder, process)
    return process, children(process)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def linux(test):
    """Mark a test of torchrun that looks at /proc."""
    return pytest.mark.slow(pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")(test))


@linux
def test_a_signal_saves_the_same_step_everywhere_and_stops(config_file, tmp_path):
    """The SIGHUP of a closed terminal, which torchrun passes on."""
    process, _ = started(tmp_path)
    process.send_signal(signal.SIGHUP)
    out = output_of(process)
    (step,) = checkpoint.all_steps(tmp_path / "out")
    assert f"stopped after iteration {step}; the same command" in out
    assert list(read_metrics(tmp_path / "out" / "metrics.jsonl"))[-1] == step
    index = checkpoint.read_index(tmp_path / "out" / f"step_{step}")
    assert index["counters"] == {"iteration": step, "consumed_samples": 8 * step, "updates": step}


def stops(number, times=1):
    """Return whether this signal stops a run."""
    signals = processes.Signals()
    with contextlib.ExitStack() as stack:
        signals.watch(stack)
        for _ in range(times):
            os.kill(os.getpid(), number)
    return signals.stop


def test_sighup_stops_a_run_unless_it_was_ignored_at_the_start():
    """`nohup python train.py` goes on after the terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may run under nohup
    try:
        assert stops(signal.SIGTERM) and stops(signal.SIGINT) and stops(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stops(signal.SIGTERM) and not stops(signal.SIGHUP)
        with mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="1"):  # Slurm and torchrun both pass on a Ctrl-C
            assert stops(signal.SIGINT, 2)
        with pytest.raises(KeyboardInterrupt):  # without torchrun, a second Ctrl-C ends the run at once
            stops(signal.SIGINT, 2)
    finally:
        signal.signal(signal.SIGHUP, before)


@linux
@pytest.mark.parametrize("killed", ["rank", "launcher"])
def test_after_a_kill_all_stop_and_nobody_saves(config_file, tmp_path, killed):
    process, pids = started(tmp_path)
    os.kill(pids[1] if killed == "rank" else process.pid, signal.SIGKILL)
    assert process.wait(timeout=90) != 0
    wait_until_gone(pids)
    assert checkpoint.all_steps(tmp_path / "out") == []


@linux
@pytest.mark.parametrize("ranks, layout", [(2, ["--tp=2"]), (4, ["--tp=2", "--pp=2"]), (2, ["--zero=3"])], ids=str)
def test_a_rank_that_hangs_is_named_by_those_who_wait(config_file, tmp_path, ranks, layout):
    """The run ends without a checkpoint."""
    process, pids = started(tmp_path, "--comm_timeout=10", *layout, ranks=ranks)
    os.kill(pids[-1], signal.SIGSTOP)
    wait_for(lambda: not alive(pids[-2]), process)
    os.kill(pids[-1], signal.SIGKILL)
    err = output_of(process)
    assert process.returncode != 0
    assert re.search(r"^error: rank \d waited for rank(s \[.*\]| \d) ", err, re.M), err
    assert "no progress for 8 s:" in err and f"ranks [{ranks - 1}]: no answer" in err, err
    rows = re.findall(r"(?m)^rank (\d): iteration \d+: waits for (.*)", err)
    assert [int(rank) for rank, _ in rows] == list(range(ranks - 1)), err
    assert any(f"rank {ranks - 1} " in row or f"{ranks - 1}]" in row for _, row in rows), rows
    assert checkpoint.all_steps(tmp_path / "out") == []


def free_port():
    with socket.socket() as place:
        place.bind(("localhost", 0))
        return place.getsockname()[1]


def listens(port):
    with socket.socket() as place:
        return place.connect_ex(("localhost", port)) == 0


@linux
def test_a_run_goes_on_with_the_hosts_that_are_there(config_file, monkeypatch, tmp_path):
    """Two torchruns of one process, as on two hosts. One is killed, and comes back. The batches stay the same."""
    fields = "--save_interval=10 --log_interval=1 --micro_batch_size=1 --zero=1 --lr_decay_iters=1000".split()
    metrics, out, port = tmp_path / "out" / "metrics.jsonl", tmp_path / "out", free_port()
    flags = ["--nnodes=1:2", "--rdzv-id=elastic", "--rdzv-conf=last_call_timeout=8", "--max_restarts=3"]
    flags.append(f"--rdzv_endpoint=localhost:{port}")
    hosts, pids = [], []
    monkeypatch.setitem(ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # else torchrun can't take a host in

    def rows(processes):
        found = read_metrics(metrics) if metrics.exists() else {}
        return [i for i, row in found.items() if row["processes"] == processes]

    try:
        for _ in range(2):
            hosts.append(torchrun(1, config_file, *fields, "--train_iters=100000", flags=flags))
            wait_for(lambda: listens(port), hosts[0])  # so the first host, which stays, has the table of the hosts
        first, second = hosts
        wait_for(lambda: {*rows(2)} & {*checkpoint.all_steps(out)}, second, 180)
        pids += children(first) + children(second)
        for pid in [*children(second), second.pid]:
            os.kill(pid, signal.SIGKILL)
        second.wait()
        last = rows(2)[-1]
        wait_for(lambda: max(rows(1), default=0) > last + 10, first, 180)
        hosts.append(torchrun(1, config_file, *fields, "--train_iters=100000", flags=flags))
        wait_for(lambda: rows(2)[-1] > rows(1)[-1], first, 180)
        first.send_signal(signal.SIGTERM)
        said = output_of(first) + output_of(second)
    finally:
        for host in hosts:
            pids += children(host) if host.poll() is None else []
            host.kill()
            host.wait()
    wait_until_gone(pids)
    assert "dp=2 tp=1" in said and re.search(r"dp=1 tp=1[^\n]*\n[^\n]*, from \S*/step_\d+\n", said), said
    ours = read_metrics(metrics)
    quiet = torchrun(1, config_file, *fields, f"--train_iters={max(ours)}", f"--out_dir={tmp_path}/quiet")
    assert quiet.wait(timeout=240) == 0
    theirs = read_metrics(tmp_path / "quiet" / "metrics.jsonl")
    assert {row["processes"] for row in ours.values()} == {1, 2}
    for name in ("lm_loss", "grad_norm", "consumed_samples", "global_batch_size"):
        values = [[rows[i][name] for i in range(1, max(ours) + 1)] for rows in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-10), name


def wait_until_gone(pids):
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlives its launcher"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_mistake_is_one_line_from_rank_0_and_exit_code_2(config_file):
    """torchrun's root cause is the same line. A restart does not repeat it."""
    process = torchrun(2, config_file, "--tp=3", flags=["--max_restarts=3"])
    out = output_of(process)
    line = "error: num_attention_heads = 2 is not a multiple of tp = 3: a tensor parallel rank has whole heads"
    assert [text for text in out.splitlines() if text.startswith("error: ")] == [line]
    assert process.returncode != 0 and "exitcode  : 2" in out and "UserError" not in out
    root = out.rpartition("Root Cause (first observed failure):\n")[2].splitlines()
    assert root[0] == "[0]:" and root[-2] == f"  traceback : {line}" and set(root[-1]) == {"="}


@pytest.mark.parametrize(
    "error, code, line",
    [
        (CommunicationError("x"), 1, "a rank has ended the run alone, not by numbers that all ranks have; x"),
        (UserError("x"), 2, "x"),
        (MemoryError("x"), 2, f"not enough memory: x; in training, {LESS_MEMORY}"),
    ],
)
def test_a_rank_exits_at_once_with_its_code(monkeypatch, capsys, error, code, line):
    """A normal exit waits for ranks that may be dead. Here another rank has left the loop before."""
    store, works = torch.distributed.HashStore(), [mock.Mock(), mock.Mock(side_effect=error)]
    monkeypatch.setattr(processes, "default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: None)
    with mock.patch.object(os, "_exit", side_effect=KeyboardInterrupt) as end:
        for work in works:
            with pytest.raises(KeyboardInterrupt):
                processes.together(Axis("world", (0, 1), 0, Watch()), work)
    assert end.call_args == mock.call(code) and capsys.readouterr().err == f"error: {line}\n"


ENDS = """
import atexit, threading, torch
from parallel import mesh
from recovery import processes

def work():
    x = torch.ones(2**18)
    threading.Thread(target=lambda: [x.add_(1) for _ in iter(int, 1)], daemon=True).start()
    atexit.register(print, "a hook")
    print("done")

processes.join_processes()
processes.together(mesh.everyone(), work)
"""


@pytest.mark.slow
def test_a_finished_run_exits_with_0_although_a_thread_is_in_torchs_code():
    """Python's own exit would abort it."""
    alone = ENVIRONMENT | dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=HERE, env=alone, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\na hook\n"), done.stderr


def test_a_traceback_is_torchruns_root_cause(monkeypatch, tmp_path):
    work = mock.Mock(side_effect=RuntimeError("a defect"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(RuntimeError, match="a defect"):
        processes.together(Axis("world", (0,), 0, Watch()), work)
    text = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert text.startswith("Traceback") and text.endswith("RuntimeError: a defect\n")


def signal_to_rank_1(config):
    """Train. Rank 1 gets a signal in iteration 3."""
    step = train.train_step

    def signalled(run, batches):
        run.signals.stop |= run.mesh.rank == 1 and run.counters.iteration == 2
        return step(run, batches)

    with mock.patch.object(train, "train_step", signalled):
        go(config)


def test_a_signal_on_one_rank_stops_all_after_the_same_step(workers, tokens_dir, tmp_path):
    workers.run(2, signal_to_rank_1, configured(tmp_path, tokens_dir, log_interval=100))
    assert checkpoint.all_steps(tmp_path) == [3] and len(curve(tmp_path)) == 1


# --- a profile --------------------------------------------------------------------------------------------------------


def test_a_profile_names_actions_and_communications(workers, tokens_dir, tmp_path):
    fields = dict(pp=2, train_iters=6, micro_batch_size=6, profile=str(tmp_path / "profile"))
    workers.run(2, go, configured(tmp_path / "out", tokens_dir, **fields))
    for rank, kind in enumerate(["gradient", "activation"]):
        events = json.loads((tmp_path / "profile" / f"rank{rank}.json").read_text())["traceEvents"]
        names = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
        scalars = [f"{verb} all_reduce of scalars over world" for verb in ("start", "wait for")]
        for name in (f"F0 of chunk {rank}", f"B1 of chunk {rank}", f"wait for {kind} 1", "update", *scalars):
            assert names[name] == 3, (name, names)  # one in each of the steps 3 to 5


def test_a_run_too_short_for_a_profile_says_so(tokens_dir, tmp_path, capsys):
    for iterations in (2, 4):
        config = configured(tmp_path / f"{iterations}", tokens_dir, train_iters=iterations, profile=str(tmp_path))
        go(config)
        assert ("no file is written" in capsys.readouterr().out) == (iterations == 2)
        assert (tmp_path / "rank0.json").exists() == (iterations == 4)


# --- hosts that differ ------------------------------------------------------------------------------------------------


def refused_config(words):
    """Load this rank's words. Return the message, or None."""
    world = everyone()
    try:
        start.load_config(words[world.rank].split(), world)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    "words, line",
    [
        (["", "--lr=0.02"], r"lr=0.02: rank 1 \(on .*\) has this value, and rank 0 has lr=[\d.]+; .*"),
        (["", "--tp=2"], r"tp=2: rank 1 \(on .*\) has this value, and rank 0 has tp=1; .*"),
        (["--lr=nan", "--lr=nan"], r"lr=nan: should be 0 or more and below 1e\+13"),
        (["--data_dir=a --out_dir=b --resume=c", ""], "None"),
    ],
)
def test_hosts_with_other_fields_stop_before_they_wait_for_each_other(workers, words, line):
    for said in workers.run(2, refused_config, words):
        assert re.fullmatch(line, str(said))


def go_at_home(config, homes, eval_only):
    """Train in a folder of this rank's own. Return the message."""
    before, rank = os.getcwd(), torch.distributed.get_rank()
    os.chdir(homes[rank])
    try:
        return fails(replace(config, eval_only=eval_only))
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "different, field", [("out", "out_dir=out"), ("data", "data_dir=data"), ("resume", "resume=out/step_1")]
)
def test_ranks_that_see_different_files_stop_before_the_first_step(workers, tmp_path, different, field):
    """Equal copies of the data are no mistake."""
    homes = [tmp_path / "a", tmp_path / "b"]
    for i, home in enumerate(homes):
        write_tokens(home / "data", seed=i * (different == "data"))
        (home / "out").mkdir()
    eval_only = different != "out"
    if eval_only:
        for home, lr in zip(homes, (0.1, 0.1 + 0.1 * (different == "resume")), strict=True):
            go(configured(home / "out", str(home / "data"), train_iters=1, lr=lr))
    config = configured("out", "data", train_iters=2, resume="out/step_1" if eval_only else "auto")
    for said in workers.run(2, go_at_home, config, homes, eval_only):
        assert said.startswith(f"{field}: rank 1 (on ") and "\n" not in said
    assert different != "out" or not [*tmp_path.rglob("step_*")]


def go_with_another_file(config, name):
    """Train. On rank 1 the file `name` has one more byte. Return the message, or None."""
    content = Path.read_bytes
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr(Path, "read_bytes", lambda path: content(path) + b"#" * (path == HERE / name))
        return fails(config)


@pytest.mark.parametrize("name", ["model.py", "parallel/zero.py", "exercise.py"])
def test_hosts_with_another_program_stop_before_the_first_step(workers, tokens_dir, tmp_path, name):
    """Files that a run does not import may differ."""
    line = rf"{name}: rank 1 \(on .*\) runs another file than rank 0;" if name != "exercise.py" else "None"
    for said in workers.run(2, go_with_another_file, configured(tmp_path, tokens_dir, train_iters=1), name):
        assert re.match(line, str(said))


def refused_action(hosts, sick, word):
    """Return the message of an action that fails on the ranks `sick`. hosts: each rank's."""
    world = everyone()

    def action():
        if world.rank in sick:
            raise UserError(word.format(rank=world.rank))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: hosts[world.rank])
        with pytest.raises(UserError) as error:
            agree(world, action)
    return str(error.value)


@pytest.mark.parametrize(
    "hosts, sick, word, line",
    [
        ("aabb", [3], "train.bin: damaged", "train.bin: damaged (on b)"),
        ("aabb", [1, 3], "rank {rank}", "rank 1 (on a)"),
        ("aabb", [0, 1, 2, 3], "lr=no", "lr=no"),
        ("aaaa", [3], "train.bin: damaged", "train.bin: damaged"),
        ("aabb", [3], "rank 3 (on b) sees other files", "rank 3 (on b) sees other files"),
    ],
)
def test_an_error_of_one_host_names_it(workers, hosts, sick, word, line):
    assert workers.run(4, refused_action, hosts, sick, word) == [line] * 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root to make two network namespaces")
def test_two_hosts_train(config_file):
    """Run GUIDE's command in two network namespaces."""
    guide = (HERE / "GUIDE.md").read_text("utf-8")
    words = re.search(r"```\n(torchrun --nnodes.*?)\n```", guide, re.DOTALL)[1]
    for old, new in {
        "HOST0": "host1",
        "--nproc_per_node=8": "--nproc_per_node=2",
        "train.py configs/gpt2_345m.py": f"{HERE}/train.py {config_file} --pp=2",
        "torchrun": f"{sys.executable} -m torch.distributed.run",
    }.items():
        assert old in words
        words = words.replace(old, new)
    make = ["ip netns add nano1", "ip netns add nano2", "ip link add v1 netns nano1 type veth peer name v2 netns nano2"]
    hosts, folders = [], {i: Path(f"/etc/netns/nano{i}") for i in "12"}
    for i, folder in folders.items():
        up = f"ip link set lo up && ip addr add 10.77.0.{i}/24 dev v{i} && ip link set v{i} up"
        make.append(f"ip netns exec nano{i} sh -c '{up}'")
        names = r"127.0.0.1 localhost\n10.77.0.1 host1\n10.77.0.2 host2\n"
        make.append(f"mkdir -p {folder} && printf '{names}' > {folder}/hosts")
    try:
        for command in make:
            if subprocess.run(command, shell=True, capture_output=True).returncode:
                pytest.skip(f"this machine can't: {command}")
        for i in folders:
            inside = f"hostname host{i} && export GLOO_SOCKET_IFNAME=v{i} && {words}"
            hosts.append(launch(["ip", "netns", "exec", f"nano{i}", "unshare", "--uts", "sh", "-c", inside]))
        said = [output_of(host) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
        for i, folder in folders.items():
            subprocess.run(["ip", "netns", "del", f"nano{i}"], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)
    assert "trained to iteration 6" in "".join(said) and all(host.returncode == 0 for host in hosts), said


def job_of_slurm(folder, *words, torchrun, **slurm):
    """Start jobs/slurm.sh with stand-ins for Slurm's commands."""
    step, said = folder / "step", folder / "said"
    for name, text in {
        "srun": f"""echo "srun $*" >> {said}; while [ "${{1#-}}" != "$1" ]; do shift; done
                "$@" & echo $! > {step}; trap "kill -KILL $!" TERM; wait $!""",
        "scancel": f'echo "scancel $*" >> {said}; kill -TERM $(cat /proc/$(cat {step})/task/*/children {step})',
        "scontrol": f'[ "$1" = show ] && echo localhost || echo "scontrol $*" >> {said}',
        "squeue": f"cat {folder}/minutes",
        "torchrun": torchrun,
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "minutes").write_text("1:00\n")
    slurm = dict(SLURM_JOB_ID="4711", SLURM_JOB_NODELIST="localhost", SLURM_NNODES="1", SLURM_GPUS_ON_NODE="2") | slurm
    environment = ENVIRONMENT | slurm | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return launch([HERE / "jobs/slurm.sh", *words], environment)


@linux
def test_a_job_of_slurm_saves_and_is_queued_again(config_file, tmp_path):
    """USR1 to the shell saves; the next start resumes."""

    def job(iterations):
        words = [config_file, "--log_interval=1", f"--train_iters={iterations}"]
        return job_of_slurm(tmp_path, *words, torchrun=f'exec {sys.executable} -m torch.distributed.run "$@"')

    process = job(100000)
    wait_for_lines(tmp_path, process)
    process.send_signal(signal.SIGUSR1)
    said = output_of(process)
    (step,) = checkpoint.all_steps(tmp_path / "out")
    assert f"stopped after iteration {step}" in said, said
    assert (tmp_path / "said").read_text().endswith("scancel --signal=TERM 4711\nscontrol requeue 4711\n")
    process = job(step + 2)
    said = output_of(process)
    assert process.returncode == 0 and f"from {tmp_path}/out/step_{step}" in said, said
    assert (tmp_path / "said").read_text().count("requeue") == 1


in_the_shell = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@pytest.mark.slow
@in_the_shell
@pytest.mark.parametrize("minutes, stopped", few([("0:11", False), ("0:59", False), ("10:11", True)]))
def test_a_job_of_slurm_stops_its_own_task_and_not_at_the_start(tmp_path, minutes, stopped):
    """With --time close to --signal, USR1 comes in the first minute."""
    names = dict(SLURM_ARRAY_JOB_ID="47", SLURM_ARRAY_TASK_ID="1")
    process = job_of_slurm(tmp_path, torchrun="sleep 2", **names)
    wait_for((tmp_path / "said").exists, process)
    (tmp_path / "minutes").write_text(minutes)
    process.send_signal(signal.SIGUSR1)
    said = output_of(process)
    assert said.count("error: --time ") == said.count("error") == (not stopped)
    assert said.count("before the time limit: the run saves, and the job is queued again\n") == stopped
    commands = (tmp_path / "said").read_text().splitlines()[1:]
    assert commands == (["scancel --signal=TERM 47_1", "scontrol requeue 47_1"] if stopped else [])


@in_the_shell
def test_a_job_of_slurm_starts_one_torchrun_on_each_node(tmp_path):
    """The port lies below those of outgoing connections."""
    for identity, port in {"4711": 14711, "25000": 15000, "99999": 29999}.items():
        process = job_of_slurm(tmp_path, "a b", torchrun='echo "$@"', SLURM_NNODES="2", SLURM_JOB_ID=identity)
        words = output_of(process)
        assert "--nproc-per-node=2 --nnodes=2 --max-restarts=3" in words and f"localhost:{port} train.py a b" in words
    srun = (tmp_path / "said").read_text().split()
    assert {"--wait=60", "--ntasks=2", "--ntasks-per-node=1"} <= {*srun[: srun.index("sh")]}
    (tmp_path / "other").mkdir()
    process = job_of_slurm(tmp_path / "other", torchrun="", SLURM_GPUS_ON_NODE="")
    line = output_of(process)
    assert process.returncode == 2 and line == "error: the job has no GPUs; add sbatch --gpus-per-node=N\n"


@in_the_shell
@pytest.mark.parametrize("node, last", [("0", 'error: x \\" y\n'), ("1", "")])
def test_the_log_of_a_job_of_slurm_ends_with_the_first_nodes_mistake(tmp_path, node, last):
    """Another node writes no file."""
    mistake = f'{sys.executable} -c \'import errors; errors.report_error(errors.UserError("x \\" y"))\''
    process = job_of_slurm(tmp_path, torchrun=f"{mistake}; echo noise; exit 1", SLURM_PROCID=node)
    assert output_of(process) == f'error: x " y\nnoise\n{last}' and process.returncode == 1


@pytest.mark.slow
@in_the_shell
def test_a_job_of_slurm_that_is_ended_leaves_no_file(tmp_path):
    """torchrun writes its report first."""
    report = 'sleep 1; echo > "$TORCHELASTIC_ERROR_FILE" && echo saved'
    process = job_of_slurm(tmp_path, torchrun=report, TMPDIR=str(tmp_path))
    wait_for((tmp_path / "said").exists, process)
    process.terminate()
    assert output_of(process) == "saved\n" and not list(tmp_path.glob("tmp*"))


# --- in this process --------------------------------------------------------------------------------------------------


def main(monkeypatch, capsys, *arguments):
    """Return train.py's (exit code, stdout, stderr)."""
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
    before = sorted((tmp_path / "out").rglob("*"))
    code, out, _ = main(monkeypatch, capsys, config_file)
    assert code == 0 and f"from {tmp_path}/out/step_6\n" in out and "iteration        6/" not in out
    assert sorted((tmp_path / "out").rglob("*")) == before and "changed" not in out
    code, out, _ = main(monkeypatch, capsys, "--help")
    assert code == 0 and "--lr_warmup_fraction" in out


def test_skipped_updates_stop_the_run_and_replace_no_good_checkpoint(config_file, monkeypatch, capsys, tmp_path):
    """All losses are finite."""
    words = [config_file, "--save_interval=2", "--keep=1"]
    monkeypatch.setattr(log, "PATIENCE", 8)
    assert main(monkeypatch, capsys, *words, "--train_iters=4")[0] == 0
    monkeypatch.setattr(Zero, "squared_norm", lambda zero: torch.full((), math.nan, dtype=torch.float64))
    code, _, err = main(monkeypatch, capsys, *words, "--train_iters=40")
    assert code == 2 and "grad_norm: the last 8 are not finite, so these updates were skipped" in err
    assert checkpoint.all_steps(tmp_path / "out") == [4]
    assert main(monkeypatch, capsys, *words, "--train_iters=10")[0] == 0
    assert checkpoint.all_steps(tmp_path / "out") == [4, 10], "a last checkpoint after skipped updates removes no other"


@pytest.mark.parametrize(
    "launcher, variables",
    [
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_STEP_NUM_NODES=2"),
        (
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
        ),
    ],
)
def test_processes_that_would_train_alone_are_refused_with_the_line_that_works(monkeypatch, launcher, variables):
    monkeypatch.setattr(sys, "argv", ["train.py", "--tp=2"])
    ones = [f"{name}=1" for name in processes.LAUNCHERS]  # one launcher may start the other
    # SLURM_NTASKS is also in the batch shell.
    for variable in [*variables.split(), *ones, "SLURM_NTASKS=4", "OMP_NUM_THREADS=2"]:
        monkeypatch.setenv(*variable.split("="))
    assert processes.join_processes().type == "cpu"
    monkeypatch.setenv(launcher, "4")
    with pytest.raises(UserError, match=f"^{launcher}=4 without WORLD_SIZE: each process would train alone") as error:
        processes.join_processes()
    command = str(error.value).rpartition(" with: ")[2].replace("python train.py --tp=2", "env")
    joined = subprocess.check_output(command, shell=True, text=True).split()
    expected = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_PORT=29500 OMP_NUM_THREADS=1"
    assert {*expected.split()} <= {*joined}


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"])
def test_a_launchers_variable_that_is_no_number_is_one_line(monkeypatch, name):
    monkeypatch.setenv(name, "x")
    with pytest.raises(UserError, match=f"^{name}: should be a whole number: ValueError: .*'x'"):
        checkpoint.restarted() or processes.join_processes()


@pytest.mark.parametrize("world, loopback", [("2", True), ("4", False)])
def test_processes_of_one_host_connect_over_its_loopback(world, loopback):
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2", WORLD_SIZE=world):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        with mock.patch.object(processes, "connect"):
            processes.join_processes()
        assert os.environ.get("GLOO_SOCKET_IFNAME", "").startswith("lo") == loopback


def test_a_process_that_cannot_join_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr(processes, "JOIN", timedelta(seconds=1))
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="2"), mock.patch.object(processes, "leave") as leave:
        with pytest.raises(UserError, match="environment variable MASTER_ADDR"):
            processes.connect("gloo")
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
        processes.connect("gloo")
    assert re.fullmatch(r"call\(.rank 0 can't join the other ranks: .*, 1\)", str(leave.call_args))


def test_each_start_uses_its_own_part_of_a_kept_store():
    """A dead process waits in the queue."""
    kept = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def of_torchrun():
        return torch.distributed.PrefixStore("run", kept.clone())

    for _ in range(2):
        of_torchrun().queue_push("starts", "dead")
        kept.set("exception_dump", "0")  # by NCCL
        with ThreadPoolExecutor() as threads:
            parts = threads.map(lambda rank: processes.part_of_this_start(of_torchrun(), rank, 3), range(3))
        assert [part.add("ranks", 1) for part in parts] == [1, 2, 3] and not kept.check(["exception_dump"])


def test_the_first_line_counts_data_ranks_that_read_other_samples():
    """With cp=2, four data ranks are two pairs, which share their samples."""
    mesh, model = SimpleNamespace(data=SimpleNamespace(size=4)), SimpleNamespace(num_parameters=lambda: 0)
    run = SimpleNamespace(config=Config(cp=2), mesh=mesh, model=model, dtype="fp32", device=torch.device("cpu"))
    assert "; dp=2 tp=1 cp=2 " in start.describe(run, None)


def test_a_second_run_names_the_fields_that_differ(config_file, monkeypatch, capsys, tmp_path):
    """Fields without an effect on a resumed run are not named."""
    main(monkeypatch, capsys, config_file, "--train_iters=4")
    command = [config_file, "--lr=0.5", "--init_method_std=0.5", "--zero=1", "--ledger", "--log_interval=1"]
    code, out, _ = main(monkeypatch, capsys, *command)
    changes = "train_iters=6 (the checkpoint: 4), lr=0.5 (the checkpoint: 0.01), zero=1 (the checkpoint: 0)"
    assert code == 0 and out.splitlines()[2].startswith(
        f"changed since {tmp_path}/out/step_4: {changes}; to begin anew"
    )
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert rows[4]["lr"] < 0.01 and 0.01 < rows[5]["lr"] < 0.5


NO_COMPILER = mock.Mock(side_effect=RuntimeError("Failed to find C compiler.\nPlease specify via CC"))
FULL_DISK = mock.Mock(side_effect=OSError(28, "No space left on device"))
OLD_TORCH = SimpleNamespace(Tensor=object, __version__="2.9.1")
NO_PACKAGE = {"recovery.start.find_spec": lambda name: None}
TWO_GPUS = {"torch.cuda.is_available": lambda: True, "torch.cuda.device_count": lambda: 2}


@pytest.mark.parametrize(
    "machine, word, line",
    [
        (TWO_GPUS, "--seed=1", "nproc_per_node=4: there are only 2 GPUs; set at most 2, .*"),
        ({"recovery.processes.torch": OLD_TORCH}, "--seed=1", "torch 2.9.1 is too old; should be 2.11 .*"),
        ({"reference.add_rows_": NO_COMPILER}, "--seed=1", ".*--kernels=torch does: RuntimeError: Failed to find C .*"),
        ({"tempfile.NamedTemporaryFile": FULL_DISK}, "--seed=1", "out_dir=.*: No space left on device"),
        (NO_PACKAGE, "--tensorboard=x", "tensorboard=x: .*pip install tensorboard"),
        (NO_PACKAGE, "--wandb=x", "wandb=x: .*pip install wandb"),
    ],
)
def test_what_a_machine_lacks_is_one_line_before_the_model_is_built(
    config_file, monkeypatch, capsys, machine, word, line
):
    """mistakes.txt has the lines that need no other machine."""
    monkeypatch.setattr(train, "build_run", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for name, value in machine.items():
        monkeypatch.setattr(name, value)
    code, _, err = main(monkeypatch, capsys, config_file, word)
    assert code == 2 and re.fullmatch(f"error: {line}\n", err)


@pytest.mark.parametrize("visible, code", [(None, 2), ("0", 2), ("", 0), ("-1", 0)])
def test_a_gpu_that_pytorch_cannot_use_is_no_silent_cpu(config_file, monkeypatch, capsys, tmp_path, visible, code):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13\n")
    monkeypatch.setattr(processes, "GPU", tmp_path)
    monkeypatch.setattr(processes, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, _, err = main(monkeypatch, capsys, config_file, "--train_iters=1")
    assert found == code and err.count("\n") == (code == 2) == ("470.57.02" in err)


def test_an_error_of_this_gpu_is_no_lost_peer():
    for error in (torch.AcceleratorError("CUDA error"), torch.distributed.DistBackendError("NCCL: out of memory")):
        with pytest.raises(type(error)), lost_peer("rank 0 waited"):
            raise error
    with pytest.raises(CommunicationError), lost_peer("rank 0 waited"):
        raise torch.distributed.DistBackendError("NCCL: remote process exited")


def test_a_second_run_in_the_same_folder_is_refused(tokens_dir, tmp_path):
    (tmp_path / "out").mkdir()
    with held_elsewhere(tmp_path / "out" / "lock"), pytest.raises(UserError, match="another run is training there"):
        go(configured(tmp_path / "out", tokens_dir))


@pytest.mark.parametrize("log_interval", [1, 100])
def test_a_run_ends_before_a_row_or_a_save_if_its_folder_was_made_again(
    tokens_dir, tmp_path, monkeypatch, log_interval
):
    """Another run may have begun there."""
    step, out = train.train_step, tmp_path / "out"

    def made_again(run, batches):
        out.rename(tmp_path / f"old{run.counters.iteration}")
        out.mkdir()
        (out / "lock").touch()
        return step(run, batches)

    monkeypatch.setattr(train, "train_step", made_again)
    said = fails(configured(out, tokens_dir, log_interval=log_interval, save_interval=1))
    assert said.startswith(f"{out}/lock: was removed, so another process may write") and [*out.iterdir()] == [
        out / "lock"
    ]


def test_eval_only_takes_a_checkpoints_loss_on_any_split_in_any_dtype(tokens_dir, tmp_path, capsys):
    """It changes no file and takes no lock."""
    config = configured(tmp_path, tokens_dir, train_iters=4, eval_iters=100, dtype="fp32")
    trained = validation_losses(config)
    with held_elsewhere(tmp_path / "lock"):
        before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
        for split, dtype in (("val", "fp32"), ("val", "fp64"), ("val", "bf16"), ("test", "fp32")):
            capsys.readouterr()
            go(replace(config, train_iters=0, eval_only=True, split=split, dtype=dtype))
            name, out = "validation" if split == "val" else "test", capsys.readouterr().out
            said = float(re.search(rf" {name} loss at iteration 4 \| lm loss value: (\S+)", out)[1])
            assert split == "test" or said == pytest.approx(trained, rel=1e-2 if dtype == "bf16" else 1e-6)
        go(replace(config, out_dir=str(tmp_path / "new"), initial_weights=str(tmp_path), eval_only=True))
        said = re.search(r" validation loss at iteration 0 \| lm loss value: (\S+)", capsys.readouterr().out)[1]
        assert float(said) == pytest.approx(trained, rel=1e-6)
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def test_metrics_have_every_promised_field(tokens_dir, tmp_path):
    go(configured(tmp_path, tokens_dir, train_iters=2, micro_batch_size=4))
    first, second = read_metrics(tmp_path / "metrics.jsonl").values()
    promised = (
        "iteration train_iters processes consumed_samples consumed_tokens lm_loss grad_norm lr loss_scale "
        "global_batch_size seq_length skipped_iterations nan_iterations iteration_ms samples_per_second "
        "tokens_per_second tflops hardware_tflops mfu timers_ms"
    ).split()
    assert {*first} == {*promised} == {*second} - {"validation_loss"}


@pytest.mark.slow
def test_train_epochs_sets_the_number_of_iterations(tokens_dir, tmp_path):
    """4,000 tokens make 499 samples; with 12 samples a step, half an epoch is 20 steps."""
    go(configured(tmp_path, tokens_dir, train_iters=0, train_epochs=0.5, lr_decay_iters=0))
    assert checkpoint.all_steps(tmp_path) == [20]
    go(configured(tmp_path, tokens_dir, train_iters=0, train_epochs=1, lr_decay_iters=0, global_batch_size=24))
    assert checkpoint.all_steps(tmp_path) == [20, 30]  # 240 samples are done, 259 are left
