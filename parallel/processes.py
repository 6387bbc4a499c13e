"""Start and end of the processes of a run: join the others, lock out_dir, stop on a signal, leave after an error."""

import gc
import os
import signal
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from errors import UserError, cause, explained, locked, report, write_error_file
from parallel.comm import CommunicationError, group_options


def join():
    """Return this process's device. Under torchrun, also connect the processes (NCCL on GPUs, otherwise Gloo)."""
    # The number of CUDA streams that never wait for one another (CUDA's default: 8). A pipeline has two streams of
    # messages for each neighbour, and a receive occupies its stream until the message arrives.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # CUDA reads this when it starts
    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        if here > (gpus := torch.cuda.device_count()):
            if local:  # local rank 0 reports the error
                time.sleep(1)
                os._exit(2)
            raise UserError(
                f"nproc_per_node={here}: each process needs a GPU, and there are {gpus}; set at most {gpus}, "
                "or an empty CUDA_VISIBLE_DEVICES to train on the CPU"
            )
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, pg_options=group_options(backend))
    return device


def together(world, work):
    """Call `work()` on every rank of the axis `world`. After an error, end the process with one line on stderr.

    Exit code 2 means a mistake of the user, 1 a lost peer. Without torchrun, the UserError is raised to the caller.
    """
    try:
        work()
    except UserError as error:
        if not dist.is_initialized():
            raise
        if world.rank == 0 or not getattr(error, "agreed", False):
            leave(error, 2)
        time.sleep(1)  # rank 0 reports the error first, then torchrun ends the other ranks
        write_error_file(f"error: {error}", late=1)  # torchrun on another node reads this
        os._exit(2)
    except CommunicationError as error:
        leave(error, 1)
    except Exception as error:
        if (explained := cause(error)) and dist.is_initialized():
            leave(explained, 2)
        write_error_file(traceback.format_exc())  # a defect: torchrun's report shows the traceback
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
        # A group ends its threads when no object refers to it any more. Cycles of objects still do. If a Gloo thread
        # frees its last tensors while the interpreter exits, the process is aborted.
        gc.collect()


def leave(error, code):
    """Report the error and exit at once, because the normal exit would wait for peers that may be dead."""
    report(error, late=int(code == 1))
    os._exit(code)


def lock(out_dir):
    """Make out_dir, and return a context that refuses a second run in it. Raises UserError."""
    with explained(f"out_dir={out_dir}"):
        Path(out_dir).mkdir(parents=True, exist_ok=True)
    return locked(Path(out_dir) / "lock", f"out_dir={out_dir}: another run is training there; set another --out_dir")


class Signals:
    """Reasons to stop between two steps: SIGTERM, Ctrl-C, a dead torchrun. A second Ctrl-C stops at once."""

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
