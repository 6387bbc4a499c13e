"""Run a rung on a slow network: each AllReduce, ReduceScatter and AllGather takes some milliseconds more.

torchrun --nproc_per_node=2 ladder/delay.py 5 ladder/rung05_overlap.py      5 milliseconds

At the end rank 0 prints how long it waited for these in a step, with the one of `show`. Rung 5 waits less than rung 4:
its messages travel while backward computes. SendRecv and AllToAll are neither delayed nor counted.
"""

import runpy
import sys
import time

import torch.distributed as dist
from gpt import STEPS

waited = 0.0  # seconds


class Delayed:
    """A message that has started. It arrives at its own time, but at least `delay` seconds after its start."""

    def __init__(self, work, delay):
        self.work, self.arrival = work, time.monotonic() + delay

    def wait(self):
        global waited
        start = time.monotonic()
        self.work.wait()
        time.sleep(max(0.0, self.arrival - time.monotonic()))
        waited += time.monotonic() - start


def delayed(call, delay):
    """Return `call` of torch.distributed, with the delay."""

    def start(*arguments, async_op=False, **options):
        message = Delayed(call(*arguments, async_op=True, **options), delay)
        return message if async_op else message.wait()

    return start


if __name__ == "__main__":
    delay, rung = float(sys.argv[1]) / 1000, sys.argv[2]
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        setattr(dist, name, delayed(getattr(dist, name), delay))
    sys.argv = [rung]
    runpy.run_path(rung, run_name="__main__")
    if dist.is_initialized() and dist.get_rank() == 0:
        print(f"waited {1000 * waited / STEPS:.0f} ms in a step")
