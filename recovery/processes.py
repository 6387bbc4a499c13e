"""The start and the end of a run's processes."""

import atexit
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store as default_store

from errors import UserError, cause, explained, locked, report_error, variable, write_error_file
from parallel.comm import CommunicationError, group_options

# {number of processes of mpirun or srun: torchrun's variables}
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "OMP_NUM_THREADS=1 RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"
    " LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_NUM_TASKS": "OMP_NUM_THREADS=1 RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS"
    " LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((SLURM_STEP_NUM_TASKS/SLURM_STEP_NUM_NODES))",
}
JOIN = timedelta(minutes=10)  # the default of comm_timeout, which is not known yet
NO_GPU = "", "-1", "NoDevFiles"  # values of CUDA_VISIBLE_DEVICES; the last one is Slurm's
GPU, DRIVER = Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version")


def join_processes():
    """Return this process's device. Under torchrun, also connect the processes.

    Raises UserError if PyTorch or the GPU's driver is too old, if there are too few GPUs, or without torchrun's
    variables in several processes of srun or mpirun.
    """
    launcher = next((name for name in LAUNCHERS if os.environ.get(name, "1") != "1"), None)
    if launcher and "WORLD_SIZE" not in os.environ:
        why = f"{launcher}={os.environ[launcher]} without WORLD_SIZE: each process would train alone"
        shell = f"sh -c 'MASTER_ADDR=HOST0 MASTER_PORT=29500 {LAUNCHERS[launcher]} python {' '.join(sys.argv)}'"
        raise UserError(f"{why}; use torchrun (GUIDE.md, Several hosts), or the same launcher with: {shell}")
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise UserError(f"torch {torch.__version__} is too old; should be 2.11 or later, as in requirements.txt")
    device, backend = torch.device("cpu"), "gloo"
    processes = variable("LOCAL_WORLD_SIZE", 1)
    cpu = "set an empty CUDA_VISIBLE_DEVICES to train on the CPU"
    if torch.cuda.is_available():
        if processes > (gpus := torch.cuda.device_count()):
            raise UserError(
                f"nproc_per_node={processes}: there are only {gpus} GPU{'s' * (gpus > 1)}; set at most {gpus}, or {cpu}"
            )
        device, backend = torch.device("cuda", variable("LOCAL_RANK")), "nccl"
        torch.cuda.set_device(device)
    elif torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") not in NO_GPU and GPU.exists():
        driver = re.search(r"\d+\.[\d.]+", DRIVER.read_text())[0] if DRIVER.exists() else "unknown"
        why = f"PyTorch for CUDA {torch.version.cuda} can't use this machine's GPU with its driver {driver}"
        raise UserError(f"{why}; update the driver, install a PyTorch for an older CUDA, or {cpu}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=follow, args=[os.getppid()], daemon=True).start()
    if "WORLD_SIZE" in os.environ:
        if variable("WORLD_SIZE", 1) == processes:
            stay_on_this_host()
        connect(backend)
    return device


def connect(backend):
    """Make the group of all processes. Without an answer of the others within JOIN, end this process with a line."""
    # torchrun sets 1. Then NCCL ends its kernels after a failure, before the process, and a step reads wrong numbers.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=JOIN))
        store, options = part_of_this_start(store, rank, size), group_options(backend, JOIN)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=JOIN, pg_options=options)
    except ValueError as error:  # a variable is missing, or no number
        raise UserError(f"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: {error}") from None
    except RuntimeError as error:
        leave(f"rank {os.environ['RANK']} can't join the other ranks: {str(error).splitlines()[0]}", 1)


def part_of_this_start(store, rank, size):
    """Return a part of `store` that only the processes of this start use.

    torchrun may keep one store over all restarts, with addresses of dead processes, and its variables don't name a
    start. So rank 0 makes a name. It answers each process that waits in a queue, perhaps a dead one, until every other
    rank has shown it the name.
    """
    name = uuid.uuid4().hex
    if rank:
        store.queue_push("starts", name)
        name = store.get(name).decode()  # waits for the answer
        store.queue_push("starts", name)
    else:
        whole = store
        while isinstance(whole, dist.PrefixStore):
            whole = whole.underlying_store
        whole.delete_key("exception_dump")  # NCCL's order to end, of a failed start; it would end this one, too
        missing = size - 1
        while missing:
            word = store.queue_pop("starts").decode()  # waits
            if word == name:
                missing -= 1
            else:
                store.set(word, name)
    return dist.PrefixStore(name, store)


def stay_on_this_host():
    """Let Gloo connect over the loopback. Where the host's name has no address, a group would take 1.5 s."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def follow(launcher):
    """End this process when its torchrun `launcher` has died."""
    while os.getppid() == launcher:
        time.sleep(1)
    leave("the torchrun of this process died; the steps after the last checkpoint are lost", 2)


def together(world, work):
    """Call `work()`, and end the process.

    Without torchrun, the function returns, or raises the UserError.
    """
    try:
        work()
    except CommunicationError as error:
        with suppress(RuntimeError, ValueError):  # the store's process may be gone
            if default_store().check(["ended"]):
                error = f"a rank has ended the run alone, not by numbers that all ranks have; {error}"
        leave(error, 1)
    except Exception as error:
        user_error = cause(error)
        if user_error is None:
            write_error_file(traceback.format_exc(), code=1)  # a defect: torchrun's report shows the traceback
        if user_error is None or not dist.is_initialized():
            raise
        if user_error.agreed:
            if world.rank:
                write_error_file(f"error: {user_error}", shift=1)
            else:
                report_error(user_error)
            time.sleep(1)  # rank 0 reports first; then all torchruns see the end together
            os._exit(2)
        leave(user_error, 2)
    if dist.is_initialized():
        finish_process()


def finish_process():
    """End this process with exit code 0, after its exit hooks (of W&B, for example).

    Python's own exit would abort if a thread is in torch's code.
    """
    default_store().set("ended", "")
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()  # may raise BrokenPipeError, for `exit_on_user_error`
    os._exit(0)


def leave(error, code):
    """Exit at once: the normal exit would wait for peers that may be dead."""
    report_error(error, shift=int(code == 1), code=code)
    os._exit(code)


def lock(out_dir):
    """Make out_dir, and return a context that refuses a second run in it."""
    with explained(f"out_dir={out_dir}"):
        Path(out_dir).mkdir(parents=True, exist_ok=True)
    return locked(Path(out_dir) / "lock", f"out_dir={out_dir}: another run is training there; set another --out_dir")


class Signals:
    """Notes SIGTERM, SIGHUP and Ctrl-C, so that a run stops between two steps.

    A closed terminal sends SIGHUP. torchrun passes it to its processes, also under nohup. Without torchrun, a second
    Ctrl-C stops at once. With it, the second may be the same: Slurm signals torchrun and its processes.
    """

    stop = False

    def watch(self, stack):
        """Receive the signals until the ExitStack `stack` is closed."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup python train.py` ignores it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            stack.callback(signal.signal, number, signal.signal(number, self._received))

    def _received(self, number, _):
        self.stop = True
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(signal.SIGINT, signal.default_int_handler)
