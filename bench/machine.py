"""The devices of the measurements: `Gpu`, and `Cpu` with the host's clock, small sizes and no compiler."""

import contextlib
import functools
import gc
import statistics
import time

import torch
from torch.profiler import ProfilerActivity

NO_GPU = "no GPU here: "
VERSIONS = f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"

HEAD_START = 4_000_000  # clock cycles, about 2 ms, in which the host queues the work


class Gpu:
    profiled = ProfilerActivity.CUDA, "cuda"  # the activity to record, its name in the table
    synchronize = staticmethod(torch.cuda.synchronize)
    sustained = 1e6  # microseconds of `product_rate`
    cache = 200 << 20  # bytes; more than the L2 cache

    def __init__(self):
        self.device, self.name = torch.device("cuda"), torch.cuda.get_device_name()
        self.compile = functools.partial(torch.compile, dynamic=False)
        self.yardstick = 1 << 29, 8192  # bytes of a copy; rows of a matrix product
        torch._dynamo.config.recompile_limit = 64  # sizes; beyond, code is eager

    def timed(self, call):
        """Return (microseconds of GPU time, result) of `call()`."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        start.record()
        result = call()
        stop.record()
        stop.synchronize()
        return 1000 * start.elapsed_time(stop), result

    @contextlib.contextmanager
    def no_waiting(self):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def give_back(self):
        """Return unused memory, for blocks of other sizes."""
        gc.collect()
        torch.cuda.empty_cache()


class Cpu:
    profiled = ProfilerActivity.CPU, "cpu"
    no_waiting = staticmethod(contextlib.nullcontext)
    synchronize = staticmethod(torch.cpu.synchronize)
    give_back = staticmethod(gc.collect)
    sustained = 1e3
    cache = 1

    def __init__(self):
        self.device, self.name = torch.device("cpu"), "CPU"
        self.compile = lambda function: function
        self.yardstick = 1 << 20, 64

    def timed(self, call):
        start = time.perf_counter()
        result = call()
        return 1e6 * (time.perf_counter() - start), result


def copy_rate(machine):
    """Return a plain copy's bytes read and written per second."""
    size, _ = machine.yardstick
    pairs = [[torch.ones(size, dtype=torch.uint8, device=machine.device) for _ in range(2)] for _ in range(2)]
    runs = [machine.timed(lambda: [to.copy_(source) for to, source in pairs])[0] for _ in range(10)]
    return 2 * 2 * size / (statistics.median(runs) * 1e-6)


def product_rate(machine, dtype):
    """Return FLOP/s of large matrix products in one second: a busy GPU lowers its clock rate."""
    _, n = machine.yardstick
    a, b = (torch.randn(n, n, device=machine.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    one = statistics.median(machine.timed(lambda: torch.mm(a, b, out=out))[0] for _ in range(10))
    count = max(1, int(machine.sustained / one))
    microseconds, _ = machine.timed(lambda: [torch.mm(a, b, out=out) for _ in range(count)])
    return 2 * n**3 * count / (microseconds * 1e-6)


def what_went_wrong(error):
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
