"""Read shuffled batches of tokens from disk. The seed and the number of consumed samples determine a batch.

For each split, `prepare.py` writes one file with a long row of uint16 tokens, or uint32 for more than 65,536 ids.
A sample is a window of this row. Its inputs are seq_length tokens, and its targets are the inputs shifted by one
token. Neighbouring windows share one token, so every token is a target once in an epoch. Exceptions are the first
token of the row and the last tokens if they do not fill a window. A document may continue in the next window. An
end-of-text token separates two documents.

    tokens     t0 t1 t2 t3 t4 t5 t6 t7 t8 ..          seq_length = 4
    window 0   t0 t1 t2 t3 t4                         inputs t0..t3, targets t1..t4
    window 1               t4 t5 t6 t7 t8             inputs t4..t7, targets t5..t8

An epoch has num_samples windows. Samples are numbered from 0, and the numbers continue through all epochs.
Sample g belongs to epoch g // num_samples, and its window is

    permute(g % num_samples, num_samples, shuffle_key(seed, epoch))

`permute` shuffles like a random table of num_samples entries, but it computes each entry without the table.
So a shuffle of 10^12 tokens needs no memory and no start-up time. A checkpoint stores only `consumed_samples`
to resume the data. A step takes the next samples and distributes them over the data ranks. An example with two
data ranks and two samples in a micro-batch:

    sample         g   g+1  g+2  g+3  |  g+4  g+5  g+6  g+7
    data rank      0    0    1    1   |   0    0    1    1
    micro-batch             0         |           1

A step takes the same samples for any number of ranks. The number of ranks only decides which rank takes a sample. All
ranks of a tensor or pipeline group have the same data rank, so they read the same batch.

A micro-batch of b samples reads b * (seq_length + 1) * 2 bytes, twice as many with uint32. A separate thread reads
while the model computes. The file is mapped into memory, not loaded. Its pages count as resident memory of the
process, but they belong to the kernel's page cache. All ranks of a host share one copy, and the kernel drops this copy
when memory is short.
"""

import itertools
import json
import math
import mmap
import queue
import threading
import weakref
import zlib
from pathlib import Path

import numpy as np
import torch

from errors import UserError, reading

# -- the shuffle

ROUNDS = 8
# A Feistel round adds a hash of one half of a number to the other half. The round can be inverted for any hash,
# so any number of rounds is a bijection. More rounds shuffle better. Let n be the number of samples. With 4 rounds
# and n = 10^6, the positions of two samples i and i + sqrt(n) are still correlated (chi-square test). With 5 or more
# rounds, the test finds no correlation for n >= 1,000. Smaller n need more rounds. With 8 rounds and n >= 10, two
# samples take each pair of positions equally often (counted in 40,000 shuffles). For n < 10, the frequencies differ by
# a few percent.


def mix(x):
    """Hash 64-bit words with SplitMix64's output function (Steele et al. 2014). [b] uint64 -> [b] uint64"""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def shuffle_key(seed, epoch):
    """Return the key of each epoch's shuffle. seed int, epoch [b] int64 -> [b] uint64"""
    return mix(mix(np.array([seed % 2**64], np.uint64)) + epoch.astype(np.uint64))


def permute(i, n, key):
    """Return the position of each i in a shuffle of range(n), without a table. Each key gives a bijection of range(n).

    i [b] int64, each in range(n); key [b] or [1] uint64. Returns [b] int64. A call takes about 0.1 ms, and
    0.1 us more for each sample. Do not change this function, because an older run would resume with another data order.

    A number is split into two digits of base `side`, the smallest base with side * side >= n. The rounds permute
    range(side * side). Some results lie outside range(n), at most a share of 2 / sqrt(n). The rounds are repeated
    on these results until they lie inside (cycle walking; Black and Rogaway 2002). The result is still a bijection.
    """
    side = np.uint64(math.isqrt(n - 1) + 1)  # ceil(sqrt(n))

    def feistel(x, key):
        left, right = x // side, x % side
        for _ in range(ROUNDS):
            key = key + 0x9E3779B97F4A7C15  # a different hash in each round
            left, right = right, (left + (mix(key + right) >> 1)) % side  # >> 1: the sum stays below 2^64
        return left * side + right

    key = np.broadcast_to(key, i.shape)
    x = feistel(i.astype(np.uint64), key)
    while (outside := x >= n).any():
        x[outside] = feistel(x[outside], key[outside])
    return x.astype(np.int64)


# -- one split

DTYPES = {"uint16": "<u2", "uint32": "<u4"}  # meta.json's name: numpy's, little-endian


class Tokens:
    """One split of a data set. The constructor opens and checks its files.

    meta: the content of meta.json. num_samples: windows in an epoch. vocab_size: number of the model's ids.
    Raises UserError if the data is missing, damaged or not usable for this model.
    """

    def __init__(self, data_dir, split, seq_length, vocab_size):
        self.path, self.seq_length = Path(data_dir) / f"{split}.bin", seq_length
        tokenizer = "gpt2" if vocab_size >= 50257 else "bytes"
        command = f"python prepare.py --tokenizer={tokenizer} --out={data_dir}"
        with reading(f"data_dir={data_dir}: no data set of prepare.py; create it with: {command}"):
            self.meta = json.loads(Path(data_dir, "meta.json").read_text(encoding="utf-8"))
            said, ids, dtype = self.meta["tokens"][split], self.meta["vocab_size"], DTYPES[self.meta["dtype"]]
            self.tokens = map_tokens(self.path, dtype)
            if len(self.tokens) != said:
                raise ValueError(f"{self.path} has {len(self.tokens):,} tokens, but meta.json says {said:,}")
        if ids > vocab_size:
            why = f"the tokenizer of {data_dir}, {self.meta['tokenizer']}, has {ids} ids"
            raise UserError(f"vocab_size={vocab_size}: {why}; set this vocab_size, or use another tokenizer")
        self.num_samples = (said - 1) // seq_length
        if self.num_samples < 1:
            raise UserError(f"seq_length={seq_length}: {self.path} has {said} tokens, and a sample needs one more")
        self.check_ids(self.tokens[: 2**16])  # every rank finds most wrong files before training

    def windows(self, numbers, seed):
        """Return the index of each sample's window. numbers: sample numbers, [b] int64 -> [b] int64"""
        epoch, i = np.divmod(numbers, self.num_samples)
        return permute(i, self.num_samples, shuffle_key(seed, epoch))

    def batch(self, numbers, seed):
        """Return the tokens of samples. numbers [b] int64 -> [b, seq_length + 1] int64 tensor"""
        starts = self.windows(numbers, seed) * self.seq_length  # int64: a file may have more than 2^31 tokens
        rows = np.stack([self.tokens[start : start + self.seq_length + 1] for start in starts])
        self.check_ids(rows)
        return torch.from_numpy(rows.astype(np.int64))

    def check_ids(self, ids):
        """Raise UserError for an id that the tokenizer does not have. The id could lie beyond the embedding's last row.

        Each batch is checked when it is read, which takes microseconds. A check of the whole file would take minutes.
        """
        if ids.max() >= self.meta["vocab_size"]:
            raise UserError(f"{self.path}: the id {ids.max()} is not in the vocabulary; prepare the data again")


def map_tokens(path, dtype="<u2"):
    """Map the file as a read-only array of `dtype`, [num_tokens]. A page is read from disk at its first use.

    One mapping is used for the whole run. nanoGPT opens a new mapping for every batch to avoid a memory leak. But
    only the page cache grows, and the kernel frees the page cache when memory is short. If the file is truncated or
    the disk fails during the run, the process ends with the signal SIGBUS, not with an exception.
    """
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # No read-ahead: shuffled samples are not read in the order of the file. A test read 2,000 samples of 1,024 tokens
    # from a 1 GB file that was not in memory. With read-ahead, it read the whole file. Without read-ahead, it read only
    # 12 MB, in a third of the time.
    mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype)


PAGES = 64  # of 4096 bytes


def identity(tokens):
    """Return what a checkpoint says about the training data `tokens`, a `Tokens`: a dict that index.json can hold.

    crc32 is that of PAGES pages of the file, evenly spaced, with the first and the last page. To read the whole file
    would take minutes.
    """
    size = 4096 // tokens.tokens.itemsize
    starts = np.linspace(0, max(0, len(tokens.tokens) - size), PAGES).astype(np.int64)
    pages = b"".join(tokens.tokens[start : start + size].tobytes() for start in starts)
    number = {"tokens": len(tokens.tokens), "crc32": f"{zlib.crc32(pages):08x}"}
    return {name: tokens.meta.get(name) for name in ("tokenizer", "dtype", "made_from")} | number


# -- samples of a data rank


def training_samples(consumed_samples, dp_rank, dp, micro_batch_size):
    """Yield a data rank's sample numbers, [b] int64, for each micro-batch after `consumed_samples`, without end.

    The function does not need the size of a step, because every step has whole micro-batches on every rank, and the
    next step continues the numbers. So a global batch size that grows during a run (rampup_batch_size) changes nothing
    here.
    """
    for first in itertools.count(consumed_samples + dp_rank * micro_batch_size, dp * micro_batch_size):
        yield np.arange(first, first + micro_batch_size, dtype=np.int64)


def eval_batches(tokens, samples_wanted, dp_rank, dp, micro_batch_size, seed, device="cpu"):
    """Yield (tokens [b, seq_length + 1] on `device`, is_real) for each micro-batch of a data rank in a validation.

    All ranks together take the first min(samples_wanted, num_samples) samples once. So every validation uses the same
    windows, for any dp and micro_batch_size. The last micro-batch may be smaller. The caller therefore sums losses and
    token counts over the ranks and divides at the end. If a rank has no samples in the last micro-batch, it gets one
    sample with is_real = False, and the caller ignores the loss of this sample. All ranks must run the model equally
    often, because ZeRO-3 gathers the parameters on all of them together.
    """
    samples = min(samples_wanted, tokens.num_samples)
    micro_batches = -(-samples // (micro_batch_size * dp))
    rounds = itertools.islice(training_samples(0, dp_rank, dp, micro_batch_size), micro_batches)
    shares = [numbers[numbers < samples] for numbers in rounds]
    stand_in = np.zeros(1, np.int64)
    with Loader(tokens, [share if len(share) else stand_in for share in shares], seed, device) as batches:
        for (batch, _), share in zip(batches, shares, strict=True):
            yield batch, len(share) > 0


# -- batches read ahead


class Loader:
    """Yield (tokens [b, seq_length + 1], numbers [b]), int64 on `device`, for each array in `numbers`.

    A thread keeps up to `depth` micro-batches ready, in pinned memory if the device is a GPU. An exception in the
    thread is raised by `next`.
    """

    def __init__(self, tokens, numbers, seed, device="cpu", depth=4):
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"; the thread needs the 0
        self.ready, self.room = queue.SimpleQueue(), threading.Semaphore(depth)
        source, closed = read(tokens, numbers, seed, self.device), threading.Event()
        # The thread has no reference to the loader. So an unused loader is garbage-collected, and `finalize` then ends
        # the thread. `finalize` also runs at exit, because Python must not exit while a thread runs torch code.
        thread = threading.Thread(target=fill, args=(source, self.ready, self.room, closed), name="loader", daemon=True)
        self.close = weakref.finalize(self, end, thread, self.room, closed)
        thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        item = self.ready.get()
        if isinstance(item, BaseException):
            self.ready.put(item)  # the next call raises the exception again
            raise item
        self.room.release()
        # The copy runs on the stream of the computation, so no synchronization between streams is necessary. A copy of
        # about 100 KB takes only microseconds. Torch keeps the pinned memory until the copy is done.
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in item)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read(tokens, numbers, seed, device):
    """Yield the (tokens, numbers) of the Loader in CPU memory. The thread runs this generator."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)  # a thread starts on GPU 0; pinning would use GPU memory there
    for n in numbers:
        pair = tokens.batch(n, seed), torch.from_numpy(n)
        yield tuple(tensor.pin_memory() for tensor in pair) if gpu else pair


def fill(source, ready, room, closed):
    """Put the items of `source` into `ready` while it has room. The last item is an exception. The thread runs this."""
    try:
        while room.acquire() and not closed.is_set():
            ready.put(next(source))
        ready.put(StopIteration())
    except BaseException as error:  # StopIteration is the normal end
        ready.put(error)


def end(thread, room, closed):
    """End the thread, even if it waits for room. If a disk hangs, continue after 10 s.

    Then Python can exit, because the thread is a daemon and waits for the disk, outside of torch code.
    """
    closed.set()
    room.release()
    thread.join(timeout=10)
