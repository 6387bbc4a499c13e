"""Measure the speed of this machine's CPU for the device "cpu" of devices.py, in less than a minute.

    python plan.py --calibrate

Processes on one machine share its cores and its memory. So the measurement runs four times, with 1, 2, 4 and 8
processes at the same time, one thread each. If there are more processes than cores, they take turns, and each process
reaches only cores / processes of its rates. The medians over the processes are written to PATH as JSON:

    {"cores": 2, "memory_bytes": ..., "torch": "2.13.0", "processes": {"1": numbers, "2": numbers, ...}}

The numbers are in seconds, bytes per second and FLOP/s. Most of them are fields of `devices.Device`:

    peak              {dtype: rate of a large matrix product}
    matrix            1: the peak is measured, not taken from a data sheet
    memory_rate       bytes read and written by a copy of a large tensor
    memory            share of memory_rate that LayerNorm, GELU and addition reach with their backward (at most 1).
                      A CPU computes GELU slower than it reads memory, so this share is small
    attention         share of the fp32 peak that causal attention reaches with its backward
    operation         seconds of a block of a tiny model, forward and backward, divided by its OPERATIONS
    wire_rate         bytes that a rank sends, divided by the time of a large all_reduce (Gloo)
    wire              1
    latency           time that a small all_reduce adds to a computation, minus its bytes / wire_rate, divided by
                      ceil(log2 n) hops. Processes that share cores wait for their turns in each step of the ring,
                      so this time is much longer than without the computation

With one process nothing is sent: wire_rate, wire and latency are None.
"""

import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import reference
from accounts.sweep import run
from config import Config
from errors import UserError, explained, parse_json
from model import GPT
from operations import DTYPES
from parallel import schedules
from parallel.layout import Layout
from parallel.mesh import Mesh
from parallel.pipeline import Executor, Unwatched
from parallel.zero import Zero

PATH = Path("accounts/cpu.json")
PROCESSES = (1, 2, 4, 8)
OPERATIONS = 12 + 14  # of a block, forward and backward: matrix products, and others (GAPS in seconds.py)
LARGE = (1024, 1024, 1024)  # the matrix product whose rate counts as the peak
PATIENCE = 300  # seconds until the measurement is given up


def main(path=PATH, processes=PROCESSES):
    """Measure this machine, write the numbers to `path`, and print them. Raises UserError."""
    path = Path(path).resolve()
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={max(processes)}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, "-m", "accounts.calibration", str(path), ",".join(map(str, processes))]
        if error := run(command, Path(folder, "log"), PATIENCE):
            raise UserError(f"--calibrate: {error}")
    print(text(parse_json(path.read_text())))
    print(f"written to {path}")


def text(found):
    """Return the numbers of a calibration as lines of text."""
    lines = [f"{found['cores']} cores, one thread per process"]
    for count, x in found["processes"].items():
        line = (
            f"{count} processes: {x['peak']['fp32'] / 1e9:.1f} GFLOP/s, memory {x['memory_rate'] / 1e9:.1f} GB/s, "
            f"elementwise {x['memory'] * x['memory_rate'] / 1e9:.2f} GB/s, operation {x['operation'] * 1e6:.1f} us"
        )
        if x["wire_rate"]:
            line += f", wire {x['wire_rate'] / 1e9:.2f} GB/s and {x['latency'] * 1e6:.0f} us"
        lines.append(line)
    return "\n".join(lines)


# --- on every process -------------------------------------------------------------------------------------------------


def work(path, counts):
    """Measure with each number of processes; rank 0 writes the file. torchrun runs this function on each process."""
    torch.set_num_threads(1)
    blocks = [tiny_model(4), tiny_model(12)]
    dist.init_process_group("gloo")
    rank, cores, found = dist.get_rank(), len(os.sched_getaffinity(0)), {}
    for count in counts:
        group = dist.new_group(list(range(count)))
        if rank < count:
            mine = slowed(rates(blocks), min(1.0, cores / count)) | (
                wires(group, count) if count > 1 else dict.fromkeys(WIRES)
            )
            everyone = [None] * count
            dist.all_gather_object(everyone, mine, group=group)
            found[count] = median_of(everyone)
        dist.barrier()  # the other processes wait without work
    if rank == 0:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        about = {"cores": cores, "memory_bytes": memory, "torch": torch.__version__}
        Path(path).write_text(json.dumps(about | {"processes": found}, indent=1) + "\n")
    dist.destroy_process_group()


def median_of(values):
    """Return the median of numbers, of lists of numbers, or of the values of dicts. None stays None."""
    first = values[0]
    if isinstance(first, dict):
        return {key: median_of([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [median_of(list(column)) for column in zip(*values, strict=True)]
    return None if first is None else statistics.median(values)


def seconds_of(action, budget=0.05):
    """Return the CPU seconds of a call of `action()`: the mean over about `budget` seconds, after one call to warm up.

    CPU seconds leave out the time in which other processes use this core. `slowed` adds the time of our processes.
    """
    action()
    calls, start = 0, time.thread_time()
    while (elapsed := time.thread_time() - start) < budget or not calls:
        action()
        calls += 1
    return elapsed / calls


def slowed(numbers, share):
    """Return the `numbers` of a process that runs only this share (0 to 1) of the time, because it shares a core."""
    peak = {dtype: rate * share for dtype, rate in numbers["peak"].items()}
    rates = dict(peak=peak, memory_rate=numbers["memory_rate"] * share)
    return numbers | rates | dict(operation=numbers["operation"] / share)


def rates(blocks):
    """Return the numbers of one process, except the fields WIRES. blocks: as in `operation_seconds`."""
    peak = {name: product_rate(*LARGE, dtype) for name, dtype in DTYPES.items() if name != "fp16"}
    x, y = torch.ones(2**24), torch.empty(2**24)  # 64 MB each: larger than the caches
    memory_rate = 2 * x.nbytes / seconds_of(lambda: y.copy_(x))
    return {
        "peak": peak,
        "matrix": 1.0,
        "memory_rate": memory_rate,
        "memory": min(1.0, elementwise_rate() / memory_rate),
        "attention": attention_rate() / peak["fp32"],
        "operation": operation_seconds(blocks),
    }


def product_rate(n, k, m, dtype):
    """Return FLOP/s of the product [n, k] x [k, m]."""
    x, w = torch.ones(n, k, dtype=dtype), torch.ones(m, k, dtype=dtype)
    return 2 * n * k * m / seconds_of(lambda: x @ w.T)


def elementwise_rate(n=1024, h=128):
    """Return bytes per second of a block's elementwise operations with their backward.

    As in seconds.py, a pass reads or writes a tensor once. Passes of [n, h] in forward + backward: GELU 8 + 12,
    LayerNorm with addition 5 + 5.
    """
    x, y, wide = (torch.randn(n, width, requires_grad=True) for width in (h, h, 4 * h))
    weight, bias, wide_bias = (torch.ones(width, requires_grad=True) for width in (h, h, 4 * h))
    dz, dwide = torch.ones(n, h), torch.ones(n, 4 * h)

    def action():
        z, normed = reference.add_layer_norm_(y * 1, x, bias, weight, bias)  # a copy, because y is used up
        torch.autograd.backward([z, normed], [dz, dz])
        torch.autograd.backward(reference.gelu_(wide * 1, wide_bias), dwide)

    return (8 + 12 + 5 + 5) * x.nbytes / seconds_of(action)


def attention_rate(s=256, heads=4, d=32):
    """Return FLOP/s of causal attention: 2 products of half an [s, s] matrix in forward, 5 in backward."""
    qkv = torch.randn(3, 4, s, heads, d, requires_grad=True)
    dy = torch.ones(4, s, heads, d)
    return 4 * 7 * s * s * heads * d / seconds_of(lambda: reference.attention(*qkv).backward(dy))


def tiny_model(num_layers):
    """Return a function that runs forward and backward of a tiny model: their time is spent to start operations.

    Call this function before the processes are connected, because the model runs in this process alone.
    """
    fields = dict(hidden_size=8, num_attention_heads=1, seq_length=4, vocab_size=128, micro_batch_size=1)
    c = Config(num_layers=num_layers, global_batch_size=1, train_iters=1, dtype="fp32", **fields)
    mesh, schedule = Mesh(), schedules.build(c.schedule, 1, 1, 1)
    model = GPT(c, mesh.tp)
    layout = Layout(c, 1, model.table, schedule)
    zero = Zero(model, layout, c, mesh, torch.float32, torch.device("cpu"))
    executor = Executor(model, zero, c, mesh, layout, schedule, Unwatched())
    batch = model.micro_batch(*torch.zeros(2, 1, c.seq_length, dtype=torch.int64))
    return lambda: executor.run(iter([batch]), 1, 1.0)


def operation_seconds(blocks):
    """Return the seconds of one operation of a tiny block. blocks: `tiny_model(4)` and `tiny_model(12)`."""
    few, many = (seconds_of(action, 0.1) for action in blocks)
    return (many - few) / (12 - 4) / OPERATIONS


WIRES = ("wire_rate", "wire", "latency")


def wires(group, count):
    """Return the fields WIRES: the speed of Gloo between `count` processes. All of them must call this function."""
    large, small, x = torch.zeros(2**21), torch.zeros(2**15), torch.ones(256, 256)  # 8 MB, 128 KB, 0.5 ms a product
    sent = 2 * (count - 1) / count * large.nbytes
    rate = sent / collective_seconds(lambda: dist.all_reduce(large, group=group), group, 10)
    alone = collective_seconds(lambda: x @ x, group, 100)
    both = collective_seconds(lambda: (x @ x, dist.all_reduce(small, group=group)), group, 100)
    added = both - alone - sent * small.nbytes / large.nbytes / rate
    return dict(zip(WIRES, (rate, 1.0, max(1e-6, added) / math.ceil(math.log2(count))), strict=True))


def collective_seconds(action, group, calls):
    """Return the seconds of a call of `action`, in which all processes of the group take part."""
    action()
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        work(sys.argv[1], [int(count) for count in sys.argv[2].split(",")])
