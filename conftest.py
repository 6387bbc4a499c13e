"""What the tests share: eight processes joined by Gloo, started once, and a tiny data set.

    def test_something(workers):
        results = workers.run(4, function, *arguments)      # by ranks 0 .. 3, results in their order

`function` is a module-level function of a test file; an exception in any rank fails the test with that rank's
traceback. A run in which some rank never answers is ended, and the processes are started anew for the next test.
"""

import json
import multiprocessing
import os
import time
import traceback
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # eight processes on a laptop's cores
vocabulary = Path(__file__).parent / "../shared/tiktoken"
if vocabulary.is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(vocabulary.resolve()))

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if not torch.cuda.is_available():  # before anything imports Triton, which looks once; the workers inherit it
    os.environ.setdefault("TRITON_INTERPRET", "1")

RANKS = 8
PATIENCE = 120  # seconds that any one call may take


def _work(rank, pipe):
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, ranks, rendezvous = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if ranks > 1:  # as torchrun would have it: a world of its own for every call
                dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
            answer = True, function(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(answer)


class Workers:
    def __init__(self, folder):
        self.folder, self.calls, self.processes = folder, 0, []
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "train"])  # imported once, then forked

    def start(self):
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            here, there = self.context.Pipe()
            process = self.context.Process(target=_work, args=(rank, there), daemon=True)
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


@pytest.fixture(scope="session")
def workers(tmp_path_factory):
    pool = Workers(tmp_path_factory.mktemp("workers"))
    yield pool
    pool.stop()


def write_tokens(folder, train=4000, val=700, test=300, vocab_size=50, tokenizer="bytes", seed=0):
    """A data set of random tokens that are worth learning: each is likely to follow from the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    counts = {"train": train, "val": val, "test": test}
    for split, count in counts.items():
        steps = random.choice([1, 1, 1, 2, 7], size=count)
        (steps.cumsum() % vocab_size).astype("<u2").tofile(folder / f"{split}.bin")
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eot_id": vocab_size - 1, "dtype": "uint16"}
    meta |= {"tokens": counts, "documents": dict.fromkeys(counts, 1)}
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


@pytest.fixture(scope="session")
def tokens_dir(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))
