"""Start and end of the processes of a run: join the others, lock out_dir, stop on a signal, leave after an error."""

import gc
import os
import re
import signal
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from errors import UserError, cause, explained, locked, report, write_error_file
from parallel.comm import CommunicationError, group_options

GPU, DRIVER = Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version")


def join():
    """Return this process's device. Under torchrun, also connect the processes (NCCL on GPUs, otherwise Gloo)."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if torch.cuda.is_available():
        refuse_too_few_gpus(torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        refuse_old_driver()
        device = torch.device("cpu")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        follow_launcher()
    if "WORLD_SIZE" in os.environ:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, pg_options=group_options(backend))
    return device


def refuse_too_few_gpus(gpus):
    if (here := int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > gpus:
        remedy = f"set at most {gpus}, or an empty CUDA_VISIBLE_DEVICES to train on the CPU"
        refuse(f"nproc_per_node={here}: each process needs a GPU, and there are {gpus}; {remedy}")


def refuse_old_driver():
    """Raise UserError if this PyTorch could use an NVIDIA GPU, and the GPU is there, but its driver is too old."""
    wanted = torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if wanted and GPU.exists() and DRIVER.exists():
        version = re.search(r"[\d.]{5,}", DRIVER.read_text())
        why = f"its driver {version and version[0]} does not work with this PyTorch for CUDA {torch.version.cuda}"
        remedy = "update the driver, install a PyTorch for an older CUDA, or train on the CPU: CUDA_VISIBLE_DEVICES="
        refuse(f"this machine has an NVIDIA GPU, but {why}; {remedy}")


def refuse(text):
    """Raise UserError on local rank 0. End the other processes of this machine a moment later, without a message."""
    if int(os.environ.get("LOCAL_RANK", 0)):
        time.sleep(1)
        os._exit(2)
    raise UserError(text)


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


def mark(out_dir, stack):
    """Write a file of a new name into out_dir, and return its name. `stack` removes it. Raises UserError.

    The name was never looked up before: no host remembers, as network file systems do, that there is no such file.
    """
    with explained(f"out_dir={out_dir}"):
        file = stack.enter_context(tempfile.NamedTemporaryFile(dir=out_dir, prefix="mark."))
        file.write(bytes(4096))  # a full disk takes a name, but no bytes
        file.flush()
    return Path(file.name).name


def follow_launcher():
    """End this process when its torchrun has died. Nobody saves: the other processes may be lost, too."""
    launcher = os.getppid()

    def watch():
        while os.getppid() == launcher:
            time.sleep(1)
        leave("the torchrun of this process died; the steps after the last checkpoint are lost", 2)

    threading.Thread(target=watch, daemon=True).start()


class Signals:
    """Notes SIGTERM and Ctrl-C, so that a run stops between two steps. A second Ctrl-C stops at once."""

    stop = False  # True after a signal

    def __enter__(self):
        self.before = [(number, signal.signal(number, self._received)) for number in (signal.SIGTERM, signal.SIGINT)]
        return self

    def __exit__(self, *_):
        for number, handler in self.before:
            signal.signal(number, handler)

    def _received(self, number, _):
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
