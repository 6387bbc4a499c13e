"""Measures prepare.py: its throughput compared with one thread of the tokenizer, and the memory of its processes.

    python -m bench prepare --mb=200

The text consists of the standard library's sources, in the same order every time.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import prepare
from bench.tables import print_table, ratios, spread
from documents import find_files
from errors import UserError
from tokenizer import load_tokenizer


def measure(
    mb: int = 200, line_mb: int = 200, repeats: int = 5, tokenizers: str = "gpt2,bytes", parts: str = "speed,memory"
):
    """Compare prepare.py's throughput with one thread of the tokenizer (goal: 0.85 x cores), and measure its memory.

    --mb          for the throughput: size of the text, in MiB; the time includes start-up
    --line_mb     memory only: MiB of the file with one line; the file with many lines is made twice as large
    --repeats     number of throughput measurements; prepare.py and the tokenizer take turns
    --tokenizers  tokenizers for the throughput; the memory is measured with the first
    --parts       speed, memory or both
    """
    if not {"speed", "memory"} >= set(parts.split(",")):
        raise UserError(f"--parts={parts}: should be speed, memory or speed,memory")
    for tokenizer in tokenizers.split(","):
        load_tokenizer(tokenizer)  # raises its errors before any work
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        if "speed" in parts:
            throughput(Path(folder), mb, repeats, tokenizers.split(","))
        if "memory" in parts:
            memory(Path(folder), line_mb, tokenizers.split(",")[0])


def throughput(folder: Path, mb: int, repeats: int, tokenizers: list[str]):
    """Print a table: text and JSON lines with each tokenizer, on all cores. The time includes start-up.

    The last column is bytes per CPU second of all prepare.py processes, divided by those of encode_ordinary. This
    ratio does not depend on how busy the cores are with other work.
    """
    cores = prepare.parse_workers(None)
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
            per_core = [ratio / cores for ratio in ratios(many, one)]
            rows.append(
                [f"{tokenizer}, {name}", spread(one, "{:.1f}"), spread(many, "{:.1f}"), spread(per_core), spread(cpu)]
            )
    print(
        f"{size:.0f} MB of text, {cores} cores; MB/s: median (smallest-largest) of {repeats}; goal of the ratio: 0.85"
    )
    print_table(
        ["", "encode_ordinary, 1 thread", f"prepare.py, {cores} workers", "ratio per core", "by CPU time"], rows
    )


def cpu_of_children() -> float:
    """Return the CPU seconds of all finished child processes and their descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory(folder: Path, line_mb: int, tokenizer: str):
    """Print a table: peak memory of parent and workers together, for inputs that need much memory."""
    rows = []
    for name, write in MEMORY_CASES.items():
        path = folder / f"case{'.jsonl' if 'JSON' in name else '.txt'}"
        with open(path, "wb") as file:
            write(file, line_mb << 20)
        seconds, peak = run_prepare(path, folder / "out", tokenizer, "--workers=2", sample_memory=True)
        numbers = path.stat().st_size / 1e6, peak["Rss"] / 2**20, peak["Pss"] / 2**20, seconds
        rows.append([name, *(f"{number:.0f}" for number in numbers)])
        path.unlink()
    print("\npeak memory of all processes together; goal: 1536 MiB")
    print_table([f"2 workers, {tokenizer}", "input, MB", "RSS, MiB", "PSS, MiB", "seconds"], rows)


def words(size: int) -> bytes:
    """Return at least `size` bytes of text without line ends and without characters that JSON escapes."""
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
    """Yield about `size` bytes of the standard library's sources, repeated in random orders from a fixed seed."""
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
    """Clear `out`, then let prepare.py write there. Return the seconds, and with sample_memory the peak memory."""
    for file in out.glob("*"):
        file.unlink()
    command = [sys.executable, prepare.__file__, path, f"--out={out}", f"--tokenizer={tokenizer}", *options]
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
    """Return bytes of resident memory of a process and its descendants. Rss counts a shared page once per
    process, Pss only once.
    """
    parent_of, total = {}, {"Rss": 0, "Pss": 0}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit():
                parent_of[int(entry)] = int(Path("/proc", entry, "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            pass  # the process has just ended
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
