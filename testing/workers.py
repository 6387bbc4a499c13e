"""Processes that tests share: joined by Gloo, started once, used by many tests.

    def test_something(workers):
        results = workers.run(4, function, *arguments)      # by ranks 0 .. 3, results in their order

`function` is a module-level function of a test file. An exception in any rank fails the test with that rank's
traceback. A run in which some rank never answers is ended, and the next test starts new processes.
"""

import multiprocessing
import multiprocessing.connection
import time
import traceback

import pytest
import torch
import torch.distributed as dist

RANKS = 8
PATIENCE = 120  # seconds that any one call may take


def work(rank, pipe):
    """The loop of one process: answers the calls that come through `pipe` until the other end is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, ranks, rendezvous = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if ranks > 1:  # each call has a world of its own, as under torchrun
                dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
            answer = True, function(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(answer)


class Workers:
    """Up to RANKS processes. folder: for the files through which the ranks of a call find each other."""

    def __init__(self, folder):
        self.folder, self.calls, self.processes = folder, 0, []
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "train"])  # imported once, then forked

    def start(self):
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            here, there = self.context.Pipe()
            process = self.context.Process(target=work, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []

    def run(self, ranks, function, *arguments):
        """`function(*arguments)` on ranks 0 .. ranks-1: its results."""
        if not self.processes:
            self.start()
        self.calls += 1
        for pipe in self.pipes[:ranks]:
            pipe.send((function, arguments, ranks, self.folder / f"rendezvous{self.calls}"))
        results, deadline = {}, time.monotonic() + PATIENCE
        while len(results) < ranks:
            waiting = [self.pipes[r] for r in range(ranks) if r not in results]
            ready = multiprocessing.connection.wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                pytest.fail(f"{function.__name__}: no answer from ranks {sorted(set(range(ranks)) - set(results))}")
            for pipe in ready:
                try:
                    good, value = pipe.recv()
                except EOFError:
                    good, value = False, "the process died"
                results[self.pipes.index(pipe)] = value
                if not good:  # the others may wait for it for ever
                    self.stop()
                    pytest.fail(f"rank {self.pipes.index(pipe)} of {ranks}:\n{value}", pytrace=False)
        return [results[r] for r in range(ranks)]

    def check(self, ranks, function, *arguments):
        """For functions that assert on every rank by themselves."""
        assert self.run(ranks, function, *arguments) == [None] * ranks
