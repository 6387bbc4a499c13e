"""Measurements beside what people would use instead: each prints a table as the README has it.

    python bench.py                   lists them
    python bench.py prepare --mb=200  throughput and memory of prepare.py
    python bench.py layouts           a step of every layout beside PyTorch's own (bench_layouts.py)
    python bench.py kernels           every operation on its own, right and how fast, on a GPU (bench_kernels.py)
    python bench.py train             a whole step beside plain PyTorch, and its profile, on a GPU (bench_train.py)

A measurement is a function below whose keyword arguments are its options; its docstring is its help. Machines are
shared and their clocks move, so what is compared runs in turns, several times, and the table shows the median of the
ratios with the smallest and the largest.
"""

import inspect
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from errors import UserError, exit_on_user_error

HERE = Path(__file__).parent


def print_table(head: list[str], rows: list[list]):
    """Columns as wide as they need to be; the first one left-aligned."""
    rows = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells), flush=True)


def spread(values, form="{:.2f}") -> str:
    """'1.02 (0.97-1.05)': the median, the smallest and the largest."""
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low}-{high})"


# ---- prepare -----------------------------------------------------------------------------------------------------


def prepare(
    mb: int = 200, line_mb: int = 200, repeats: int = 5, tokenizers: str = "gpt2,bytes", parts: str = "speed,memory"
):
    """prepare.py: throughput against one thread of encode_ordinary (goal: 0.85 x cores), peak memory of its processes.

    --mb        size of the text whose throughput is measured, start-up included
    --line_mb   size of the text file that is a single line; the large text file has twice that
    --repeats   how often the two are measured, in turns
    """
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        if "speed" in parts:
            prepare_throughput(Path(folder), mb, repeats, tokenizers.split(","))
        if "memory" in parts:
            prepare_memory(Path(folder), line_mb)


def prepare_throughput(folder: Path, mb: int, repeats: int, tokenizers: list[str]):
    """One table: text and JSON lines with each tokenizer, all cores and start-up included.

    The last column is what is left of the other when somebody else keeps the cores busy: bytes per CPU second, of
    prepare.py with all its processes and of encode_ordinary.
    """
    import prepare as prepare_py
    from tokenizer import load_tokenizer

    cores = prepare_py.parse_workers(None)
    documents = list(sample_documents(mb << 20))
    inputs = {"one text file": folder / "text.txt", "JSON lines": folder / "lines.jsonl"}
    inputs["one text file"].write_bytes(b"".join(d.encode() for d in documents))
    inputs["JSON lines"].write_text("".join(json.dumps({"text": d}) + "\n" for d in documents), encoding="utf-8")
    size = sum(len(d.encode()) for d in documents) / 1e6
    rows = []
    for tokenizer in tokenizers:
        encoding = load_tokenizer(tokenizer)
        for name, path in inputs.items():
            one, many, cpu = [], [], []
            for _ in range(repeats):
                start, start_cpu = time.perf_counter(), time.process_time()
                for document in documents:
                    encoding.encode_ordinary(document)
                one.append(size / (time.perf_counter() - start))
                one_cpu, start_cpu = time.process_time() - start_cpu, cpu_of_children()
                seconds, _ = run_prepare(path, folder / "out", tokenizer)
                many.append(size / seconds)
                cpu.append(one_cpu / (cpu_of_children() - start_cpu))
            ratio = [m / (o * cores) for m, o in zip(many, one, strict=True)]
            rows.append(
                [f"{tokenizer}, {name}", spread(one, "{:.1f}"), spread(many, "{:.1f}"), spread(ratio), spread(cpu)]
            )
    print(
        f"{size:.0f} MB of text, {cores} cores; MB/s, median (smallest-largest) of {repeats}; goal of the ratio: 0.85"
    )
    print_table(
        ["", "encode_ordinary, 1 thread", f"prepare.py, {cores} workers", "ratio per core", "by CPU time"], rows
    )


def cpu_of_children() -> float:
    """CPU seconds of all processes that this one, or one of them, started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepare_memory(folder: Path, line_mb: int):
    """One table: peak memory of parent and workers together, for the inputs that are hard on memory."""
    rows = []
    for name, write in MEMORY_CASES.items():
        path = folder / f"case{'.jsonl' if 'JSON' in name else '.txt'}"
        with open(path, "wb") as file:
            write(file, line_mb << 20)
        seconds, peak = run_prepare(path, folder / "out", "gpt2", "--workers=2", sample_memory=True)
        numbers = path.stat().st_size / 1e6, peak["Rss"] / 2**20, peak["Pss"] / 2**20, seconds
        rows.append([name, *(f"{number:.0f}" for number in numbers)])
        path.unlink()
    print("\npeak memory of all processes together; goal: 1536 MiB")
    print_table(["2 workers, gpt2", "input, MB", "RSS, MiB", "PSS, MiB", "seconds"], rows)


def words(size: int) -> bytes:
    """About `size` bytes of text without a line end, nor anything that JSON would have to escape."""
    block = " ".join(sample_text(1 << 20).split()).encode("ascii", "ignore") + b" "
    block = block.translate(None, bytes(range(32)) + b'\\"\x7f')
    return block * (size // len(block) + 1)


def write_lines(file, size):
    for _ in range(2 * size // (1 << 20)):
        file.write(sample_text(1 << 20).encode())


def write_json_lines(last: str):
    def write(file, size):
        for _ in range(3):
            file.write(b'{"text": "' + words(64 << 20)[: (64 << 20) - 20] + last.encode() + b'"}\n')

    return write


MEMORY_CASES = {
    "a large text file": write_lines,
    "a single line": lambda file, size: file.write(words(size)),
    "JSON lines of 64 MiB": write_json_lines(""),
    "JSON lines of 64 MiB with an emoji": write_json_lines("\N{GRINNING FACE}"),
}


def sample_documents(size: int):
    """Yields the standard library's sources in random orders, over and over, the same ones every time, `size` bytes."""
    from documents import find_files

    paths = find_files([])
    order = random.Random(0)
    while size > 0:
        for path in order.sample(paths, len(paths)):
            try:
                text = Path(path).read_bytes().decode()
            except UnicodeDecodeError:
                continue
            yield text
            size -= len(text.encode())
            if size <= 0:
                return


def sample_text(size: int) -> str:
    return "".join(sample_documents(size))


def run_prepare(path: Path, out: Path, tokenizer: str, *options, sample_memory=False):
    """Runs prepare.py into a fresh `out`; returns the seconds it took, and its processes' peak memory if asked."""
    for file in out.glob("*"):
        file.unlink()
    command = [sys.executable, HERE / "prepare.py", path, f"--out={out}", f"--tokenizer={tokenizer}", *options]
    start, peak = time.perf_counter(), {"Rss": 0, "Pss": 0}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while sample_memory and process.poll() is None:
            now = memory_of_tree(process.pid)
            peak = {key: max(peak[key], now[key]) for key in peak}
            time.sleep(0.02)
        output = process.communicate()[0]
    if process.returncode:
        raise UserError(f"prepare.py failed: {output.splitlines()[-1]}")
    return time.perf_counter() - start, peak


def memory_of_tree(root: int) -> dict[str, int]:
    """Bytes of resident memory of a process and its descendants: Rss counts shared pages once each, Pss once in all."""
    parent_of, total = {}, {"Rss": 0, "Pss": 0}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit():
                parent_of[int(entry)] = int(Path("/proc", entry, "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has just ended
    family = [root]
    for pid in family:
        family += [child for child, parent in parent_of.items() if parent == pid]
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                key, _, value = line.partition(":")
                if key in total:
                    total[key] += int(value.split()[0]) * 1024
        except (FileNotFoundError, ProcessLookupError):
            pass
    return total


# ---- layouts -----------------------------------------------------------------------------------------------------


def layouts(layers: int = 4, hidden: int = 256, seq: int = 128, vocab: int = 2048, repeats: int = 15, only: str = ""):
    """A step of ours beside PyTorch's own, same model, samples, processes and threads (goal: a ratio of at most 1).

    --layers, --hidden, --seq, --vocab   the model; a micro-batch is 4 samples
    --repeats                            how often each of the two makes a step, in turns
    --only                               part of a layout's name: measure only those
    """
    from bench_layouts import compare

    compare(layers, hidden, seq, vocab, repeats, only)


# ---- kernels and training on a GPU ---------------------------------------------------------------------------------


def kernels(
    only: str = "",
    repeats: int = 20,
    dtype: str = "bf16",
    hidden: int = 1024,
    tokens: int = 32768,
    seq: int = 1024,
    vocab: int = 50257,
):
    """Every operation on its own: right or not, its time beside PyTorch's, its share of what the GPU can do.

    --only                      part of an operation's name: measure only those
    --repeats                   how often each variant is measured, in turns
    --dtype                     of the activations: bf16, fp16, fp32
    --hidden, --tokens, --seq, --vocab   the model's width; tokens of a micro-batch, of a sample; words
    """
    from bench_kernels import compare

    compare(only, repeats, dtype, hidden, tokens, seq, vocab)


def training(
    configs: str = "gpt2_124m,gpt2_345m", micro_batch_sizes: str = "8,16,32", steps: int = 10, repeats: int = 3
):
    """Tokens per second of a whole step beside plain PyTorch and Hugging Face, and its profile, kernel by kernel.

    --configs             files of configs/, without .py
    --micro_batch_sizes   samples of a step
    --steps               in a turn
    --repeats             turns of each, in turn
    """
    from bench_train import compare

    compare(configs, micro_batch_sizes, steps, repeats)


# ---- the command line ----------------------------------------------------------------------------------------------

MEASUREMENTS = {"prepare": prepare, "layouts": layouts, "kernels": kernels, "train": training}


def main():
    """The command line: a measurement and its options; without one, the list. Raises UserError."""
    if len(sys.argv) < 2 or sys.argv[1] not in MEASUREMENTS:
        for name, measurement in MEASUREMENTS.items():
            options = " ".join(f"--{p.name}={p.default}" for p in inspect.signature(measurement).parameters.values())
            print(f"python bench.py {name} {options}\n    {measurement.__doc__}")
        if len(sys.argv) > 1 and sys.argv[1] not in ("-h", "--help"):
            raise UserError(f"no measurement {sys.argv[1]}; there are: {', '.join(MEASUREMENTS)}")
        return
    measurement = MEASUREMENTS[sys.argv[1]]
    options = {}
    parameters = inspect.signature(measurement).parameters
    for argument in sys.argv[2:]:
        key, _, value = argument.removeprefix("--").partition("=")
        if key not in parameters:
            raise UserError(
                f"{argument}: {sys.argv[1]} has the options {', '.join('--' + name for name in parameters)}"
            )
        try:
            options[key] = type(parameters[key].default)(value)
        except ValueError:
            raise UserError(f"{argument}: should be like --{key}={parameters[key].default}") from None
    measurement(**options)


if __name__ == "__main__":
    exit_on_user_error(main)
