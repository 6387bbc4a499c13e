"""Tokens on disk -> shuffled batches: a batch is a pure function of how many samples have been consumed.

`prepare.py` leaves one long row of uint16 tokens per split. A sample is a window of it, seq_length tokens of
input and the same shifted by one as targets. Neighbouring windows share one token, so that in an epoch every
token is a target once (but for the very first, and a tail that fills no window). Documents run on across
windows; an end-of-text token lies between them.

    tokens     t0 t1 t2 t3 t4 t5 t6 t7 t8 ..          seq_length = 4
    window 0   t0 t1 t2 t3 t4                         inputs t0..t3, targets t1..t4
    window 1               t4 t5 t6 t7 t8             inputs t4..t7, targets t5..t8

Samples are numbered from 0 through all epochs. Sample g lies in epoch g // num_samples, and its window is

    permute(g % num_samples, num_samples, shuffle_key(seed, epoch))

`permute` shuffles like a table of num_samples entries in random order, but computes any entry by itself: a
shuffle of 10^12 tokens needs no memory and no start-up, and nothing about the data has to be saved, for
`consumed_samples` alone says where to go on. A step takes the next samples and deals them out to the data
ranks, here two of them with two samples in a micro-batch:

    sample         g   g+1  g+2  g+3  |  g+4  g+5  g+6  g+7
    data rank      0    0    1    1   |   0    0    1    1
    micro-batch             0         |           1

The number of ranks decides who takes a sample, never which samples a step takes. All ranks of a tensor or
pipeline group have the same data rank, and so the same batch.

Cost: a batch reads b * (seq_length + 1) * 2 bytes, in a thread of its own while the model computes. The file
is mapped, not loaded: its pages show up in the process's resident set, but they are the kernel's, one copy
for all ranks of a host, dropped as soon as memory is wanted for something else.
"""

import itertools
import json
import math
import mmap
import queue
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import torch

from errors import UserError

# -- the shuffle

ROUNDS = 8
# A Feistel round adds to one half of a number a hash of its other half. Whatever the hash, that can be
# undone, so any number of rounds is a bijection; enough of them make it a good one. With 4, samples that are
# sqrt(n) apart stay related (chi-square, n = 10^6); from 5 on nothing shows at n = 1,000 and above. Tiny n
# want more: with 8, two samples' places over 40,000 keys are uniform, to a few percent where n is below 10.


def mix(x):
    """Scrambled 64-bit words: SplitMix64's output function (Steele et al. 2014). [b] uint64 -> [b] uint64"""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def shuffle_key(seed, epoch):
    """What tells one epoch's shuffle from another's: seed int, epoch [b] int64 -> [b] uint64."""
    return mix(mix(np.array([seed % 2**64], np.uint64)) + epoch.astype(np.uint64))


def permute(i, n, key):
    """Where a shuffle of range(n) puts each i: a bijection of range(n) for every key, without a table.

    i [b] int64, each in range(n); key [b] or [1] uint64. Returns [b] int64. It costs about 0.1 ms a batch and
    0.1 us a sample. (Every run's order hangs on it: change it, and no older run can be resumed exactly.)

    A number is split into two digits to the base `side`, the smallest whose square holds n, and the rounds
    permute range(side * side). What lands outside range(n), at most 2 in sqrt(n) of the numbers, goes
    through again until it is inside (cycle walking; Black and Rogaway 2002), which keeps it a bijection.
    """
    side = np.uint64(math.isqrt(n - 1) + 1)  # ceil(sqrt(n))

    def feistel(x, key):
        left, right = x // side, x % side
        for _ in range(ROUNDS):
            key = key + 0x9E3779B97F4A7C15  # another hash each round
            left, right = right, (left + (mix(key + right) >> 1)) % side  # >> 1: the sum stays below 2^64
        return left * side + right

    key = np.broadcast_to(key, i.shape)
    x = feistel(i.astype(np.uint64), key)
    while (outside := x >= n).any():
        x[outside] = feistel(x[outside], key[outside])
    return x.astype(np.int64)


# -- one split


class Tokens:
    """One split of a data set, opened and checked: `meta` (of meta.json), `num_samples`.

    num_samples counts the windows of an epoch; vocab_size is the model's. Raises UserError where the data is
    missing, damaged or not for this model.
    """

    def __init__(self, data_dir, split, seq_length, vocab_size):
        self.path = Path(data_dir) / f"{split}.bin"
        self.seq_length = seq_length
        self.meta = read_meta(Path(data_dir), vocab_size)
        num_tokens = count_tokens(self.path, self.meta)
        self.num_samples = (num_tokens - 1) // seq_length
        if self.num_samples < 1:
            lack = f"a sample takes {seq_length + 1} tokens and {self.path} has {num_tokens}"
            raise UserError(f"seq_length={seq_length}: {lack}; use a smaller seq_length or prepare more text")
        self.tokens = map_tokens(self.path)
        self.check_ids(self.tokens[None, : 2**16], [0])  # all ranks find a wrong file before they start

    def windows(self, numbers, seed):
        """Which windows samples are: their numbers over all epochs, [b] int64 -> [b] int64."""
        epoch, i = np.divmod(numbers, self.num_samples)
        return permute(i, self.num_samples, shuffle_key(seed, epoch))

    def batch(self, numbers, seed):
        """The tokens of samples: numbers [b] int64 -> [b, seq_length + 1] int64 tensor."""
        starts = self.windows(numbers, seed) * self.seq_length  # int64: a file may hold more than 2^31 tokens
        rows = np.stack([self.tokens[start : start + self.seq_length + 1] for start in starts])
        self.check_ids(rows, starts)
        return torch.from_numpy(rows.astype(np.int64))

    def check_ids(self, rows, starts):
        """Refuse ids that the tokenizer does not have: they would read beside the embedding's rows.

        Batches are checked as they are used, in microseconds; the whole file at the start would take minutes.
        """
        ids = self.meta["vocab_size"]
        if rows.max() >= ids:
            row, column = np.argwhere(rows >= ids)[0]
            where = f"id {rows[row, column]} at token {starts[row] + column}, but meta.json says vocab_size={ids}"
            raise UserError(f"{self.path}: {where}: the file is damaged or another's; prepare the data again")


def read_meta(data_dir, vocab_size):
    """The content of meta.json, if a model with `vocab_size` ids can read what it describes."""
    path = data_dir / "meta.json"
    if not path.is_file():  # prepare.py writes it last
        what = "is unfinished or no data set (it has no meta.json)" if data_dir.is_dir() else "is not there"
        command = f"python prepare.py --tokenizer={'gpt2' if vocab_size >= 50257 else 'bytes'} --out={data_dir}"
        raise UserError(f"data_dir={data_dir}: {what}; to make it: {command}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        tokenizer, ids, dtype = meta["tokenizer"], meta["vocab_size"], meta["dtype"]
        if not all(type(count) is int for count in (ids, *meta["tokens"].values())):
            raise TypeError("counts should be whole numbers")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not as prepare.py writes it ({error!r}); prepare the data again") from None
    if dtype != "uint16":
        raise UserError(f"{path}: dtype={dtype!r}, but tokens are read as 'uint16'; prepare the data again")
    if ids > vocab_size:
        why = f"{data_dir} was tokenized with {tokenizer!r}, which has {ids} ids"
        what = f"set vocab_size={ids} or prepare the data with another tokenizer"
        raise UserError(f"vocab_size={vocab_size}: {why}; {what}")
    return meta


def count_tokens(path, meta):
    """The number of tokens in the file `path`, if that is what meta.json says."""
    said = meta["tokens"].get(path.stem)
    size = path.stat().st_size if path.is_file() else 0
    if said is None:
        raise UserError(f"{path}: meta.json knows no such split, only {', '.join(meta['tokens'])}")
    if size != 2 * said:
        what = ("truncated" if size else "missing or empty") if size < 2 * said else "too long"
        why = f"{size} bytes, but meta.json says {said} tokens, which are {2 * said} bytes"
        raise UserError(f"{path}: {what}: {why}; prepare the data again")
    return said


def map_tokens(path):
    """The file as a read-only array, [num_tokens] uint16, of which pages are read when they are touched.

    One mapping serves the whole run. (nanoGPT opens a new one for every batch, against a leak: what grew
    there is pages that the kernel takes back when it needs them, mapping or not.) A file that is cut short or
    a disk that fails under a mapping ends the process by a signal, SIGBUS, not by an exception.
    """
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # No read-ahead: after a shuffle, what lies next is not what is read next. With it, 2,000 samples of 1,024
    # tokens from a cold file of 1 GB read all of it; without, 12 MB, in a third of the time.
    mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, "<u2")


# -- who takes which samples


def micro_batch_samples(consumed_samples, micro_batch, dp_rank, dp, micro_batch_size):
    """The numbers of the samples that data rank `dp_rank` takes for a micro-batch of a step: [b] int64."""
    first = consumed_samples + (micro_batch * dp + dp_rank) * micro_batch_size
    return np.arange(first, first + micro_batch_size, dtype=np.int64)


def training_samples(consumed_samples, dp_rank, dp, micro_batch_size):
    """A data rank's sample numbers, [b] int64 for every micro-batch from `consumed_samples` on, without end.

    It need not know where steps end: a step is a whole number of micro-batches on every rank, and so ends where
    the next begins, whatever its size. A global batch that grows changes nothing here.
    """
    for micro_batch in itertools.count():
        yield micro_batch_samples(consumed_samples, micro_batch, dp_rank, dp, micro_batch_size)


def eval_batches(tokens, samples_wanted, dp_rank, dp, micro_batch_size, seed, device="cpu"):
    """A data rank's share of a validation: yields (tokens [b, seq_length + 1] on `device`, whether they count).

    All ranks together take the first min(samples_wanted, num_samples) samples, each once: the same windows at
    every validation, whatever dp and micro_batch_size. The last micro-batch may be short: sum losses and counts over
    the ranks, and divide at the end. A rank that has nothing left in the last round gets a stand-in that does not
    count: all ranks must run the model equally often, for they may have to gather its parameters together.
    """
    samples = min(samples_wanted, tokens.num_samples)
    micro_batches = -(-samples // (micro_batch_size * dp))
    rounds = itertools.islice(training_samples(0, dp_rank, dp, micro_batch_size), micro_batches)
    shares = [numbers[numbers < samples] for numbers in rounds]
    stand_in = np.zeros(1, np.int64)
    with Loader(tokens, [share if len(share) else stand_in for share in shares], seed, device) as batches:
        for (batch, _), share in zip(batches, shares, strict=True):
            yield batch, len(share) > 0


# -- batches ahead of time


class Loader:
    """Yields (tokens [b, seq_length + 1], numbers [b]), int64 on `device`, for each array in `numbers`.

    A thread keeps `depth` micro-batches ready, in pinned memory if the device is a GPU. What goes wrong in it
    is raised here. `wait_seconds` sums up how long the caller has waited for data; set it to 0 when you like.
    """

    def __init__(self, tokens, numbers, seed, device="cpu", depth=4):
        self.device = torch.empty(0, device=device).device  # "cuda" with its number, for the thread
        self.wait_seconds = 0.0
        self.ready, self.room = queue.SimpleQueue(), threading.Semaphore(depth)
        source, closed = read(tokens, numbers, seed, self.device), threading.Event()
        # The thread knows nothing of the loader, so that a loader that is dropped is collected, and closed by
        # it; at the latest at exit, for Python must not end in the middle of what a thread does inside torch.
        thread = threading.Thread(target=fill, args=(source, self.ready, self.room, closed), name="loader", daemon=True)
        self.close = weakref.finalize(self, end, thread, self.room, closed)
        thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        start = time.perf_counter()
        item = self.ready.get()
        self.wait_seconds += time.perf_counter() - start
        if isinstance(item, BaseException):
            self.ready.put(item)  # for whoever asks again
            raise item
        self.room.release()
        # Queued on the stream that computes, so that nothing has to wait for another stream: the copy, of 100
        # KB or so, takes microseconds of it. Torch keeps the pinned memory until the copy is done.
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in item)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read(tokens, numbers, seed, device):
    """The loader without the thread: the same pairs, still in the CPU's memory."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)  # a thread starts on GPU 0, and would take memory there to pin ours
    for n in numbers:
        pair = tokens.batch(n, seed), torch.from_numpy(n)
        yield tuple(tensor.pin_memory() for tensor in pair) if gpu else pair


def fill(source, ready, room, closed):
    """The thread: puts what `source` yields into `ready` while there is room, and at last how it ended."""
    try:
        while room.acquire() and not closed.is_set():
            ready.put(next(source))
        ready.put(StopIteration())
    except BaseException as error:  # StopIteration too
        ready.put(error)


def end(thread, room, closed):
    """Ends the thread, also while it waits for room. (A disk that hangs must not hang us: it is a daemon.)"""
    closed.set()
    room.release()
    thread.join(timeout=10)
