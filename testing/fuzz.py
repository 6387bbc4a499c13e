"""Run a command with random mistakes. A *find* is a case that ends in a wrong way: `wrong` defines the wrong ends.

    python -m testing.fuzz train --cases=2000 --seed=1        run all cases, and print the finds
    python -m testing.fuzz train --seed=1 --index=17          run one case, and print it

A case is a function of (command, seed, index). It has a folder with small files, a command line and an environment. In
half of the cases one file is damaged. Some words of the command line are odd. The environment sets the encoding of
stdout, closed or full streams, or a full disk. torch is imported once. Each case is a fork of this process.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from errors import UserError, exit_on_user_error

SILENT_CPU, SILENT = 5, 30  # seconds without output that end a case: CPU time (other programs do not count), real time
LONGEST = 15  # seconds that end a case which still prints, for example generate.py --max_tokens=1000000
MEMORY = 12 << 30  # bytes of address space of a case
LINES = 3  # largest number of lines of an error
BAR = re.compile(r"^.*\r|.*\d+(%|B|it|\.\d+\w?B)\s?[|\[].*")  # a progress bar of tqdm

LONG, PATH, DIGITS = "x" * 300, "/".join(["x" * 200] * 30), "9" * 5000
NUMBERS = f"""
0 1 2 3 7 8 -1 -7 1000000 99999999999 {2**31} {2**63} {-(2**63) - 1} 1{30 * "0"} {DIGITS} 0.5 -0.5 1e-40 1e-320 1e308
-1e308 1e400 nan inf -inf 1e3 0x10 1_000 \u0663 True False None x
""".split()
TEXTS = ["", " ", "x", "-", "--", "=", ",", "\u00e9", "\u65e5\u672c", "\udcff", "a\nb", "\x1b[31m", "%s", "{}", LONG]
PATHS = f"""
. .. / /dev/null /dev/full /dev/zero /proc/self/mem /proc/x /sys/x {LONG} {PATH} missing missing/x folder file.txt
fifo.txt socket.txt loop loop.txt dangling.txt loops/**/* fifos *.txt ** [ ~ empty.txt file.txt/x odd
""".split()
JSON = [None, True, 0, -1, 2, 1e308, 10**30, float("nan"), "", "x", "\ud800", LONG, [], {}, [1], {"x": 1}, [[[]]]]
SETTINGS = [  # lines of a configuration file
    "raise SystemExit", "import sys; sys.exit(0)", "lr = 10**400", "lr = 10**5000", "seed = 10**5000", "lr = None",
    "out_dir = 'a\\0b'", "data_dir = 'a\\0b'", "out_dir = '\\ud800'", "def f(): f()\nf()", "raise BaseException", "1/0",
    "lr = [1] * 10**6", "import none", "x = 1", "tp = 1.0", "ledger = 1", "lr = '1'", "if", "\x00", "\t\tlr = 1",
    "class A:\n    __repr__ = None\nlr = A()", "print('hello')", "import math", "trace = 'x' * 10000", "lr = 1",
    "lr = float('nan')", "num_layers = True", "out_dir = ''", "optimizer = 'lion'", "rampup_batch_size = '1,1,5'",
]  # fmt: skip


class Case(NamedTuple):
    """A case: the words after the command, environment variables, streams, and the damage to files."""

    words: list
    variables: dict
    streams: dict  # {0, 1 or 2: "closed", "full" or "broken"}, otherwise pipes; "encoding": of stdout and stderr
    full: int | None  # bytes of a file after which a write fails, as on a full disk
    spoiled: list  # texts that describe the damage


class End(NamedTuple):
    """The end of a case. code: negative for a signal. ended: why `run` ended the case ("silent", "long"), or None."""

    code: int
    out: str
    err: str
    ended: str | None = None


# --- the files --------------------------------------------------------------------------------------------------------

SMALL = {
    "data_dir": "data", "out_dir": "run", "train_iters": 3, "num_layers": 1, "hidden_size": 16, "vocab_size": 257,
    "num_attention_heads": 2, "seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "eval_iters": 1,
    "log_interval": 1,
}  # fmt: skip


def prepare_folder(folder):
    """Write small files for all cases into `folder`: texts, a data set, a run with a checkpoint, a model, a trace."""
    os.chdir(folder)
    Path("texts/deep").mkdir(parents=True)
    Path("texts/a.txt").write_text("some words " * 40)
    Path("texts/deep/b.md").write_text("other words\n" * 30)
    Path("texts/c.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(30)))
    Path("config.py").write_text("".join(f"{name} = {value!r}\n" for name, value in SMALL.items()))
    speeds = dict(peak={"fp32": 1e11}, matrix=1, attention=0.5, memory=0.5, memory_rate=1e10, operation=1e-5)
    speeds |= dict(wire=1, wire_rate=1e9, latency=1e-4)
    Path("cpu.json").write_text(
        json.dumps({"cores": 2, "memory_bytes": 10**10, "processes": {"1": speeds, "8": speeds}})
    )
    for command, *words in (
        ("prepare", "texts", "--out=data", "--tokenizer=bytes", "--split=8,1,1"),
        ("train", "config.py", "--train_iters=2", "--trace=trace.json"),
        ("convert", "to_hf", "run", "--out=model"),
    ):
        end = run(main_of(command), Case(words, {}, {}, None, []), folder)
        if end.code:
            raise RuntimeError(f"{command} {words}: {end}")


def odd_files():
    """Make odd files in the current folder: FIFOs, a socket, links, loops of links, odd names."""
    for name in ("folder", "loops", "fifos"):
        os.mkdir(name)
    for name in ("fifo.txt", "fifos/a.txt", "odd"):
        os.mkfifo(name)
    links = {"loop": "loop", "loop.txt": "loop.txt", "dangling.txt": "missing", "z.txt": "/dev/zero"}
    for name, target in links.items():
        os.symlink(target, name)
    for name in ("loops/a", "loops/b"):
        os.symlink(os.path.abspath("loops"), name)
    for name, data in (("file.txt", b"a file"), ("empty.txt", b""), (b"\xff.txt", b"name"), ("a\nb.txt", b"name")):
        Path(os.fsdecode(name)).write_bytes(data)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as s:  # a path may be too long for a socket
        s.bind("socket.txt")


def spoil(rng, path):
    """Damage the file `path`. Return a text that describes the damage."""
    how = rng.choice("json json json cut byte bytes empty removed folder fifo link odd".split())
    data = path.read_bytes()
    if how == "json":
        try:
            value = json.loads(data)
        except ValueError:
            how = "byte"
        else:
            text, value = spoil_json(rng, value)
            path.write_text(json.dumps(value))
            return f"{path}: {text}"
    at = rng.randrange(len(data) + 1)
    if how == "cut":
        path.write_bytes(data[:at])
    elif how == "byte":
        path.write_bytes(data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :])
    elif how == "bytes":
        path.write_bytes(rng.randbytes(rng.choice([1, 9, 1000])))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "odd":
        deep, zeros, digits = b"[" * 100_000, b"\0" * len(data), b"9" * 9999
        path.write_bytes(rng.choice([deep, zeros, digits, b"\xff\xfe", b"null", b"{", b'{"a": 1}']))
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "fifo":
            os.mkfifo(path)
        elif how == "link":
            path.symlink_to(rng.choice(["missing", path.name, "/dev/zero", "/dev/full", "/proc/self/mem"]))
    return f"{path}: {how} {at}"


def spoil_json(rng, value):
    """Replace or remove one value inside a JSON value. Return (text that describes it, the new value)."""
    places, found = [(None, None)], [value]
    for at in found:
        pairs = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        for key, below in pairs:
            places.append((at, key))
            found.append(below)
    # Most values of a file lie deep inside. So half of the cases choose one of the first 12, which are outer values.
    parent, key = places[rng.randrange(min(len(places), rng.choice([12, 10**9])))]
    new = rng.choice(JSON)
    if parent is None:
        return f"is {new!r}", new
    if rng.random() < 0.3:
        old = parent.pop(key)
        return f"{key!r} removed, was {str(old)[:40]}", value
    text, parent[key] = f"{key!r}: {str(parent[key])[:40]} -> {new!r}", new
    return text, value


# --- the commands -----------------------------------------------------------------------------------------------------
# NAME_case(rng) prepares the case's folder and returns (words of a command line, files). The case may damage one of
# these files.


def option(rng, names):
    """Return the words of an option with an odd value."""
    name, value = rng.choice(names), rng.choice(rng.choice([NUMBERS, TEXTS, PATHS]))
    return rng.choice([[f"--{name}={value}"], [f"--{name}={value}"], [f"--{name}", value], [f"--{name}"]])


def some(rng, names):
    """Return the words of 0 to 2 options with odd values."""
    return [word for _ in range(rng.choice([0, 0, 1, 1, 2])) for word in option(rng, names)]


def shuffled(rng, words, extra):
    """Return `words` and `extra`. In one case of ten, a word is odd or missing."""
    words = [*words, *extra]
    if words and rng.random() < 0.1:
        at = rng.randrange(len(words))
        words[at : at + 1] = rng.choice([[], [rng.choice(PATHS + TEXTS)], ["--foo=1"], ["--num-layers", "x"], ["-5"]])
    return words


def prepare_case(rng):
    """A data set from the texts, in a new folder, or in the folder of a finished or of an unfinished one."""
    import prepare

    names = "out tokenizer split workers text_key megatron on_error".split()
    inputs = rng.choice(["texts", "texts/a.txt", "texts/c.jsonl", "texts/**", rng.choice(PATHS), "texts *.txt"]).split()
    out = rng.choice("new new data half".split())
    words = [*inputs, "--tokenizer=bytes", f"--workers={rng.choice('12')}", f"--out={out}"]
    extra = some(rng, names) + rng.choice([[], ["--on_error=skip"]])
    shutil.copytree("data", "half.part")  # an unfinished data set
    meta = json.loads(Path("half.part/meta.json").read_text())
    made_from = meta["made_from"] | {"split": "969,30,1"}
    with contextlib.suppress(UserError):
        made_from["input"] = prepare.describe(prepare.find_files(inputs[:1]))
    state = {"made_from": made_from, "piece": rng.choice([prepare.PIECE, 64]), "blocks": 1}
    state |= {"skipped": {}, "examples": []}
    state |= {name: list(meta[name].values()) for name in ("tokens", "documents")}
    Path("half.part/progress.json").write_text(json.dumps(state))
    files = "texts/a.txt texts/c.jsonl data/meta.json half.part/progress.json half.part/progress.json data/val.bin"
    return shuffled(rng, words, extra), files.split()


def train_case(rng):
    """Training, evaluation or a resume, with up to two other fields and sometimes an odd line in the config file."""
    from config import CHOICES, Config

    names = list(vars(Config()))
    words, extra = ["config.py", *rng.choice([[], ["--out_dir=new"], ["--eval_only"], ["--resume=run/step_2"]])], []
    for _ in range(rng.choice([0, 1, 1, 2])):
        name = rng.choice(names)
        value = rng.choice(CHOICES[name]) if name in CHOICES and rng.random() < 0.7 else None
        extra += option(rng, [name]) if value is None else [f"--{name}={value}"]
    if rng.random() < 0.15:
        with open("config.py", "a", encoding="utf-8", errors="surrogatepass") as file:
            file.write(rng.choice(SETTINGS) + "\n")
    files = "config.py data/meta.json data/train.bin run/step_2/index.json run/metrics.jsonl run/step_2/head.ln.weight"
    return shuffled(rng, words, extra), [*files.split(), "run/step_2/index.json"]


def generate_case(rng):
    names = "prompt max_tokens num_samples temperature top_k top_p seed".split()
    place = rng.choice(["run", "run", "run/step_2", "run/step_2", rng.choice(PATHS)])
    files = "run/step_2/index.json run/step_2/index.json run/step_2/head.ln.bias"
    return shuffled(rng, [place, "--max_tokens=3"], some(rng, names)), files.split()


def convert_case(rng):
    words = rng.choice([["to_hf", "run"], ["from_hf", "model"], [rng.choice(["to_hf", "from_hf"]), rng.choice(PATHS)]])
    files = "model/config.json model/config.json model/model.safetensors model/tokenizer.json"
    if words[1] == "run":
        files = "run/step_2/index.json run/step_2/head.ln.bias"
    return shuffled(rng, [*words, f"--out={rng.choice(['new', 'new', 'run', rng.choice(PATHS)])}"], []), files.split()


def schedules_case(rng):
    from parallel.schedules import SCHEDULES

    names = "stages microbatches chunks cost comm trace svg".split()
    words = rng.choice([["--trace=trace.json"], rng.sample(list(SCHEDULES), rng.choice([1, 2]))])
    odd = ["F:1", "F:0", "F:nan", "B:1e6,F:1e-6", "F:1e308,B:1e308", "X:1", "F", ":", "F:1,", "I:1e-320,W:3"]
    extra = some(rng, names) + rng.choice([[], [f"--cost={rng.choice(odd)}"], [f"--comm={rng.choice(NUMBERS)}"]])
    return shuffled(rng, words, extra), ["trace.json"]


def traffic_case(rng):
    from config import CHOICES, Config

    names = [*vars(Config()), "ranks", "svg"]
    words = ["config.py", f"--ranks={rng.choice('1248')}", rng.choice(["--svg=a.svg", "--global_batch_size=64"])]
    chosen = [f"--{name}={rng.choice(CHOICES[name])}" for name in rng.sample(list(CHOICES), 1)]
    return shuffled(rng, words, rng.choice([some(rng, names), chosen])), ["config.py"]


def plan_case(rng):
    """A ranking, a dry run or an explanation of a layout, on a device of the table or the calibrated CPU."""
    from accounts.devices import DEVICES
    from config import Config

    names = [*vars(Config()), *"gpus device gpus_per_node rings tokens top code rank flops mfu svg".split()]
    words = ["config.py", f"--gpus={rng.choice('1248')}", f"--device={rng.choice([*DEVICES, 'cpu'])}"]
    words += rng.choice([[], [], ["--tp=1", "--pp=1"], ["--as_is"], ["--flops=1e20"], ["--dry_run"]])
    Path("accounts").mkdir()
    shutil.copy("cpu.json", "accounts/cpu.json")
    extra = some(rng, names) + rng.choice([[], [], ["--explain"], ["--json"], ["--svg=a.svg"]])
    return shuffled(rng, words, extra), ["config.py", "accounts/cpu.json"]


def curve_case(rng):
    words = rng.choice([["run"], ["run", "run"], ["run/metrics.jsonl"], [rng.choice(PATHS)]])
    extra = rng.choice([[], ["--tokens"], ["--svg=a.svg"], some(rng, ["svg"])])
    return shuffled(rng, words, extra), ["run/metrics.jsonl"]


def bench_case(rng):
    """Return (words, []). Each command line has a mistake, because a measurement takes too long."""
    numbers = {
        "layouts": "layers hidden seq vocab repeats",
        "kernels": "repeats hidden tokens seq vocab",
        "checkpoint": "layers hidden repeats",
        "delay": "samples seeds processes",
        "train": "steps repeats",
        "model": "micro_batch_size micro_batches",
    }
    texts = {
        "layouts": "only",
        "kernels": "only dtype",
        "delay": "stages data_dir",
        "train": "configs",
        "model": "config device",
    }
    name = rng.choice([*numbers, rng.choice(TEXTS + PATHS)])
    bad = rng.choice([n for n in NUMBERS if not re.fullmatch("[1-9][0-9]{,6}|1_000|\u0663", n)])
    mistakes = [f"--foo={bad}", "--", "x"]
    if name in numbers:
        odd = rng.choice([*TEXTS, *PATHS, *NUMBERS])
        mistakes += [f"--{key}={bad}" for key in numbers[name].split()]
        mistakes += [f"--{key}=*{odd}" for key in texts.get(name, "").split()]
    return [name, rng.choice(mistakes)], []


COMMANDS = {  # name: (module, function that returns (words, files to spoil), folders and files that it needs)
    "prepare": ("prepare", prepare_case, "texts data"),
    "train": ("train", train_case, "data run config.py"),
    "generate": ("generate", generate_case, "run"),
    "convert": ("convert", convert_case, "run model"),
    "schedules": ("accounts.draw", schedules_case, "trace.json"),
    "traffic": ("accounts.traffic", traffic_case, "config.py"),
    "plan": ("plan", plan_case, "config.py cpu.json"),
    "curve": ("accounts.curve", curve_case, "run"),
    "bench": ("bench.__main__", bench_case, ""),
}


PRELOADED = {"bench": [f"bench.{name}" for name in "layouts checkpoint delay kernels train model".split()]}


def main_of(command):
    """Import a command. Return its `main`."""
    return importlib.import_module(COMMANDS[command][0]).main


def make(command, seed, index, template):
    """Make the files of a case in the current folder, which is empty. Return the Case."""
    rng = random.Random(f"{command} {seed} {index}")
    _, words_of, needs = COMMANDS[command]
    for name in needs.split():
        source = Path(template, name)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, name)
    odd_files()
    words, files = words_of(rng)
    spoiled = [spoil(rng, Path(rng.choice(files)))] if files and rng.random() < 0.5 else []
    streams = {rng.choice([0, 1, 1, 2, 2]): rng.choice(["closed", "full", "broken"])} if rng.random() < 0.2 else {}
    streams["encoding"] = rng.choice(["utf-8"] * 4 + ["ascii", "latin-1"])
    variables = {"COLUMNS": rng.choice(["", "0", "1", "x", "80", "9" * 30])} if rng.random() < 0.2 else {}
    full = rng.choice([0, 10, 100, 3000]) if rng.random() < 0.1 else None
    return Case(words, variables, streams, full, spoiled)


# --- one case ---------------------------------------------------------------------------------------------------------


def child(main, case, pipes):
    """Set the streams, limits and variables of a case, call `main`, and exit as Python would. Call this in a fork."""
    os.setsid()
    for number in (0, 1, 2):
        how = case.streams.get(number)
        if how == "full":
            os.dup2(os.open("/dev/full", os.O_RDWR), number)
        elif how == "broken" and number:
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, number)
        else:
            os.dup2(os.open(os.devnull, os.O_RDWR) if number == 0 else pipes[number - 1], number)
    os.closerange(3, 1000)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        closed = case.streams.get(number) == "closed"
        if closed:
            os.close(number)
        encoding = case.streams.get("encoding", "utf-8")
        errors = "backslashreplace" if number == 2 else "strict"
        stream = None if closed else open(number, mode, encoding=encoding, errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for name in list(os.environ):
        if name in ("COLUMNS", "LINES", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"):
            del os.environ[name]
    os.environ |= case.variables
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if case.full is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write to a full disk raises OSError
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.full, case.full))
    sys.argv = ["command", *case.words]
    code = 0
    try:
        exit_on_user_error(main)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # Python's own end of an uncaught error; the fork must not return into the parent's code
        code = 1
        with contextlib.suppress(Exception):
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except Exception:
            code = code or 120  # as Python does
    os._exit(code)


def run(main, case, folder, silent=SILENT, silent_cpu=SILENT_CPU, longest=LONGEST):
    """Run a case in a fork of this process, in `folder`. Return its End."""
    readers, writers = zip(os.pipe(), os.pipe(), strict=True)
    sys.stdout.flush()
    if not (pid := os.fork()):
        try:
            os.chdir(folder)
            child(main, case, writers)
        finally:
            os._exit(99)
    for writer in writers:
        os.close(writer)
    texts, began = {reader: b"" for reader in readers}, time.monotonic()
    open_pipes, process = set(readers), os.pidfd_open(pid)
    heard, heard_cpu, ended = began, 0.0, None
    while True:
        ready, _, _ = select.select([*open_pipes, process], [], [], 0.25)
        for reader in open_pipes & set(ready):
            data = os.read(reader, 1 << 16)
            texts[reader] += data if len(texts[reader]) < 1 << 20 else b""
            heard, heard_cpu = time.monotonic(), cpu_seconds(pid)
            if not data:
                open_pipes.remove(reader)
        if process in ready and not open_pipes & set(ready):
            break
        now = time.monotonic()
        if now - heard > silent or cpu_seconds(pid) - heard_cpu > silent_cpu:
            ended = "silent"
        elif now - began > longest and now - heard < 1:
            ended = "long"
        if ended:
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also workers of the case
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for number in (*readers, process):
        os.close(number)
    return End(code, *(texts[reader].decode("utf-8", "replace") for reader in readers), ended)


def cpu_seconds(pid):
    """Return the CPU seconds of a process and its ended children. 0 if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def wrong(case, end):
    """Return why the end of a case is a find, or None.

    These exit codes are right. 0: done. 2: a mistake. 1: stdout is closed or full. 141: the reader of stdout has gone.
    stderr has at most LINES lines, and the lines of a progress bar do not count.
    """
    if end.ended == "silent":
        return "silent"
    if "Traceback (most recent call last)" in end.out + end.err:
        return "traceback"
    if end.ended == "long":
        return None
    if end.code < 0:
        return f"signal {signal.Signals(-end.code).name}"
    lines = [line for line in end.err.splitlines() if line.strip() and not BAR.match(line)]
    if len(lines) > LINES:
        return f"{len(lines)} lines of error"
    mute = case.streams.get(2) is not None
    allowed = {0, 2}
    if case.streams.get(1) in ("closed", "full"):
        allowed.add(1)
    if case.streams.get(1) == "broken":
        allowed.add(141)
    if end.code not in allowed:
        return f"exit code {end.code}"
    if end.code in (1, 2) and not mute and not any(line.startswith("error: ") for line in lines):
        return f"exit code {end.code} without a line"
    if end.code == 0 and not end.out and case.streams.get(1) is None:
        return "exit code 0 without a word"
    return None


# --- all cases --------------------------------------------------------------------------------------------------------


def one(command, seed, index, template):
    """Make and run a case. Return (Case, End)."""
    with tempfile.TemporaryDirectory(prefix="fuzz", ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        case = make(command, seed, index, template)
        end = run(main_of(command), case, folder)
        os.chdir("/")
    return case, end


def in_a_fork(function, *arguments):
    """Call `function(*arguments)` in a fork of this process. Raises RuntimeError if it fails."""
    if not (pid := os.fork()):
        code = 1
        try:
            function(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"{function.__name__} failed: its error is printed above")


def describe(command, seed, index, case, end, why):
    """Print a case, its end, and the command that repeats it."""
    words = " ".join(word if len(word) < 100 else f"{word[:40]}...({len(word)})" for word in map(ascii, case.words))
    print(f"{why}: python -m testing.fuzz {command} --seed={seed} --index={index}")
    print(f"    words {words}")
    print(f"    {case._replace(words=[])}")
    print(f"    {end._replace(out=end.out[-300:], err=end.err[-1500:])}", flush=True)


def main(arguments=None):
    """Run the cases. Exit with code 1 if there is a find."""
    parser = argparse.ArgumentParser("python -m testing.fuzz", description="Run a command with random mistakes.")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--index", type=int, help="run only this case, and print it")
    options = parser.parse_args(arguments)
    os.environ["TIKTOKEN_CACHE_DIR"] = "/nowhere"  # no case may need the network
    counts, finds = {}, 0
    with tempfile.TemporaryDirectory(prefix="fuzz") as template:
        in_a_fork(prepare_folder, template)  # its imports stay in the fork, because a small process forks faster
        for name in PRELOADED.get(options.command, ()):
            importlib.import_module(name)
        main_of(options.command)
        indices = range(options.cases) if options.index is None else [options.index]
        for index in indices:
            case, end = one(options.command, options.seed, index, template)
            why = wrong(case, end)
            finds += why is not None
            counts[end.code] = counts.get(end.code, 0) + 1
            if index % 100 == 99:
                print(f"{index + 1} cases, {finds} finds", file=sys.stderr, flush=True)
            if why or options.index is not None:
                describe(options.command, options.seed, index, case, end, why or "as it should be")
    codes = ", ".join(f"{n} with exit code {code}" for code, n in sorted(counts.items()))
    print(f"{options.command}: {len(indices)} cases, {codes}; {finds} finds")
    sys.exit(finds > 0)


if __name__ == "__main__":
    main()
