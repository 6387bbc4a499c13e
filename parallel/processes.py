"""The plumbing of processes: how they join, how a run is asked to stop, how a process leaves after an error."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from errors import UserError
from parallel.comm import CommunicationError


def join():
    """This process's device; under torchrun, connected to the others (NCCL between GPUs, else Gloo)."""
    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        if here > (gpus := torch.cuda.device_count()):
            raise UserError(
                f"nproc_per_node={here}: there are {gpus} GPUs, one for each process; say at most {gpus}, "
                "or CUDA_VISIBLE_DEVICES= (nothing) to train on the CPU"
            )
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def together(world, work):
    """Call `work()` on every rank of the axis `world`, and end the process with one line if it cannot go on.

    Exit code 2: a mistake of the user's; 1: a peer is gone. One process raises its UserError instead.
    """
    try:
        work()
    except UserError as error:
        if not dist.is_initialized():
            raise
        if world.rank == 0 or not getattr(error, "agreed", False):
            leave(error, 2)
        time.sleep(1)  # rank 0 says it; torchrun ends all as soon as one exits
        os._exit(2)
    except CommunicationError as error:
        leave(error, 1)
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(error, code):
    """Say what is wrong and exit at once: the usual exit would wait for peers that may not answer."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(code)


class Signals:
    """Reasons to stop between two steps: SIGTERM, Ctrl-C (once more: stops at once), a launcher that died."""

    def __enter__(self):
        self.stop = False
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.before = [(number, signal.signal(number, self._received)) for number in (signal.SIGTERM, signal.SIGINT)]
        return self

    def __exit__(self, *_):
        for number, handler in self.before:
            signal.signal(number, handler)

    def _received(self, number, _):
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def orphaned(self):
        return self.launcher is not None and os.getppid() != self.launcher
