"""Start processes once for many tests. Each `run` connects them by Gloo.

    def test_something(workers):
        results = workers.run(4, function, *arguments)      # on ranks 0 .. 3; their results in this order

`function` is a module-level function of a test file. An exception in any rank fails the test with that rank's
traceback, or only the message of `compare.Different`. Ranks that neither answer nor use CPU time wait for each other:
they are ended, and the next test starts new ones. A busy machine makes a test slow, not red.
"""

import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import resource
import subprocess
import threading
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tqdm import tqdm

from errors import UserError
from parallel import comm
from recovery.processes import stay_on_this_host
from testing import adversary
from testing.compare import Different

RANKS = 8
PATIENCE = float(os.environ.get("PATIENCE", "60"))  # seconds without progress until a call fails


def work(rank, pipe, last):
    """Answer the calls that arrive by `pipe`, until it closes. last: the name of this rank's last communication."""
    torch.set_num_threads(1)
    stay_on_this_host()
    tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore, which a killed process would leave behind
    comm.lost_peer = noting(comm.lost_peer, last)
    while True:
        try:
            function, arguments, ranks, rendezvous = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if ranks > 1:
                dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
                dist.barrier()  # no rank may close its connections while others still connect
            answer = True, function(*arguments)
        except (Different, UserError) as error:
            answer = False, str(error)
        except BaseException:  # a test's skip, too: the caller must not wait
            answer = False, traceback.format_exc()
        data = io.BytesIO()
        torch.save(answer, data)  # pipe.send would open a file for each tensor
        pipe.send_bytes(data.getbuffer())
        if not answer[0]:
            pipe.poll(None)  # the caller ends all ranks; a connection closed before would be another rank's error
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()  # a mesh is in a cycle of references: only this ends its groups and their threads
            gc.freeze()  # the next `gc.collect` leaves out what imports and caches keep


def noting(lost_peer, last):
    """Return comm.lost_peer, which also writes the communication's name into `last`, memory of the caller, too."""

    def noted(name):
        last.value = name.encode()[: len(last) - 1]
        return lost_peer(name)

    return noted


def cpu_seconds(processes):
    """Return the CPU time that the processes have used, together."""
    seconds = 0.0
    for process in processes:
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:  # macOS: ps prints minutes:seconds
            said = subprocess.run(["ps", "-o", "cputime=", "-p", str(process.pid)], capture_output=True, text=True)
            seconds += sum(float(part) * 60**i for i, part in enumerate(said.stdout.split(":")[::-1]) if part.strip())
    return seconds


class Workers:
    """Up to RANKS processes, which connect through a file in `folder`."""

    def __init__(self, folder):
        self.folder, self.calls, self.pipes, self.processes, self.last = folder, 0, [], [], []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))  # macOS allows 256 open files
        self.adversary = "ADVERSARY" in os.environ  # calls run in testing/adversary.py's mode
        self.context = multiprocessing.get_context(os.environ.get("WORKERS", "forkserver"))
        # Imported once, then forked. Without the last one each process imports sympy, 1.3 s, in its first backward.
        multiprocessing.set_forkserver_preload(["torch", "train", "torch.fx.experimental.symbolic_shapes"])

    def start(self, ranks):
        """Start processes until `ranks` of them run."""
        for rank in range(len(self.processes), ranks):
            here, there = self.context.Pipe()
            self.last.append(self.context.Array("c", 300, lock=False))
            process = self.context.Process(target=work, args=(rank, there, self.last[rank]), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes, self.last = [], [], []

    def fail(self, text, ranks, lost=True):
        """End all ranks and the test. lost: they lost one another, so say the last communication of each rank."""
        rows = [last.value.decode() or f"rank {rank}: no communication" for rank, last in enumerate(self.last[:ranks])]
        self.stop()
        pytest.fail("\n".join([text, *["the last communication of each rank:", *rows] * lost]), pytrace=False)

    def run(self, ranks, function, *arguments):
        """Return function(*arguments) of the ranks 0 .. ranks - 1, a list."""
        if ranks > RANKS:
            raise UserError(f"{ranks} processes: should be at most {RANKS} here")
        self.start(ranks)
        self.calls += 1
        call = (adversary.run, (function, *arguments)) if self.adversary else (function, arguments)
        for pipe, last in zip(self.pipes[:ranks], self.last, strict=False):
            last.value = b""
            pipe.send((*call, ranks, self.folder / f"rendezvous{self.calls}"))
        results, used = {}, cpu_seconds(self.processes[:ranks])
        while len(results) < ranks:
            waiting = [self.pipes[r] for r in range(ranks) if r not in results]
            ready = multiprocessing.connection.wait(waiting, PATIENCE)
            if not ready:
                before, used = used, cpu_seconds(self.processes[:ranks])
                if used < before + 0.5:
                    silent = sorted(set(range(ranks)) - set(results))
                    self.fail(f"{function.__name__}: no answer from ranks {silent}", ranks)
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    answer = io.BytesIO(pipe.recv_bytes())
                    good, results[rank] = torch.load(answer, weights_only=False)
                except EOFError:
                    good, results[rank] = False, "CommunicationError: the process ended"
                if not good:  # others may wait for this rank
                    lost = "CommunicationError: " in results[rank]
                    self.fail(f"rank {rank} of {ranks}:\n{results[rank]}", ranks, lost)
        return [results[r] for r in range(ranks)]

    def check(self, ranks, function, *arguments):
        """On each rank, call a function that checks and returns None."""
        assert self.run(ranks, function, *arguments) == [None] * ranks
