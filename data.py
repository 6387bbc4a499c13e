"""Read shuffled batches of tokens from disk. The seed and the number of consumed samples determine a batch.

For each split, `prepare.py` writes one file with a long row of uint16 tokens (uint32 above 65,536 ids). A sample is a
window of this row. Neighbouring windows share one token, so every token is a target once in an epoch (but the first
one, and the last ones if they fill no window).

    tokens     t0 t1 t2 t3 t4 t5 t6 t7 t8 ..          seq_length = 4
    window 0   t0 t1 t2 t3 t4                         inputs t0..t3, targets t1..t4
    window 1               t4 t5 t6 t7 t8             inputs t4..t7, targets t5..t8

Samples are numbered from 0 through all epochs. Sample g belongs to epoch g // num_samples, and its window is

    permute(g % num_samples, num_samples, shuffle_key(seed, epoch))

`permute` computes each entry of a random table without the table. So a shuffle needs no memory and no time at the
start. A step distributes the next samples over the data ranks. Two data ranks, two samples in a micro-batch:

    sample         g   g+1  g+2  g+3  |  g+4  g+5  g+6  g+7
    data rank      0    0    1    1   |   0    0    1    1
    micro-batch             0         |           1

The ranks of a tensor or pipeline group read the same batch. The file is mapped into memory, so the ranks of a host
share its pages.

Each epoch has each sample once, and the order does not depend on train_iters, which may change on a resume.
"""

import itertools
import json
import math
import mmap
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch

from errors import UserError, reading

# -- the shuffle

ROUNDS = 8
# A Feistel round adds a hash of one half of a number to the other half. It can be inverted for any hash, so it is a
# bijection. More rounds shuffle better (NOTES.md: why 8).


def splitmix64(x):
    """Hash 64-bit words with SplitMix64's output function (Steele et al. 2014). [b] uint64 -> [b] uint64"""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def shuffle_key(seed, epoch):
    """Return the key of each epoch's shuffle. seed int, epoch [b] int64 -> [b] uint64"""
    return splitmix64(splitmix64(np.array([seed % 2**64], np.uint64)) + epoch.astype(np.uint64))


def permute(i, n, key):
    """Return the position of each i in a shuffle of range(n).

    i [b] int64, each in range(n); key [b] or [1] uint64 -> [b] int64. Never change it: runs resume with its order.

    A number is split into two digits of base `side`, and the rounds permute range(side * side). They are repeated on
    results outside range(n) until these lie inside (cycle walking; Black and Rogaway 2002): still a bijection.
    """
    side = np.uint64(math.isqrt(n - 1) + 1)  # ceil(sqrt(n))

    def feistel(x, key):
        high, low = x // side, x % side  # the two digits
        for _ in range(ROUNDS):
            key = key + 0x9E3779B97F4A7C15  # a different hash in each round
            hashed = splitmix64(key + low) >> 1  # >> 1: the sum below stays below 2^64
            high, low = low, (high + hashed) % side
        return high * side + low

    key = np.broadcast_to(key, i.shape)
    x = feistel(i.astype(np.uint64), key)
    while (outside := x >= n).any():
        x[outside] = feistel(x[outside], key[outside])
    return x.astype(np.int64)


# -- one split

TOKEN_DTYPES = {"uint16": "<u2", "uint32": "<u4"}  # meta.json's name: numpy's, little-endian


class Tokens:
    """One split of a data set. Raises UserError if its files are missing, damaged or not usable for this model.

    meta: the content of meta.json. num_samples: windows in an epoch. begins: the number of the first sample, 0
    without --new_data.
    """

    begins = 0

    def __init__(self, data_dir, split, seq_length, vocab_size):
        """Check the first ids only. `batch` checks the others when it reads them."""
        self.path, self.seq_length = Path(data_dir) / f"{split}.bin", seq_length
        tokenizer = "gpt2" if vocab_size >= 50257 else "bytes"
        source = "" if Path(data_dir).name.startswith("stdlib") else "FILE "
        source = f"--megatron={data_dir} " if Path(f"{data_dir}.idx").exists() else source
        command = f"python prepare.py {source}--tokenizer={tokenizer} --out={data_dir}"
        missing = f"data_dir={data_dir}: no data set of prepare.py; create it with: {command}"
        if not Path(data_dir, "meta.json").exists():
            raise UserError(missing)
        with reading(missing):
            self.meta = json.loads(Path(data_dir, "meta.json").read_text(encoding="utf-8"))
            num_tokens, ids = self.meta["tokens"][split], self.meta["vocab_size"]
            self.num_samples = (num_tokens - 1) // seq_length
            if self.num_samples < 1:
                size = f"{num_tokens} tokens; a sample needs {seq_length + 1}"
                raise UserError(f"seq_length={seq_length}: {self.path}: {size}")
            self.tokens = map_tokens(self.path, TOKEN_DTYPES[self.meta["dtype"]])
            if len(self.tokens) != num_tokens:
                raise ValueError(f"{self.path} has {len(self.tokens):,} tokens, but meta.json says {num_tokens:,}")
        if ids > vocab_size:
            why = f"the tokenizer of {data_dir}, {self.meta['tokenizer']}, has {ids} ids"
            raise UserError(f"vocab_size={vocab_size}: {why}; set this vocab_size, or use another tokenizer")
        self.check_ids(self.tokens[: 2**16])  # every rank finds most wrong files before training

    def windows(self, numbers, seed):
        """Return the index of each sample's window, [b] int64."""
        epoch, i = np.divmod(numbers - self.begins, self.num_samples)
        return permute(i, self.num_samples, shuffle_key(seed, epoch))

    def batch(self, numbers, seed):
        """Return the tokens of samples. numbers [b] int64 -> [b, seq_length + 1] int64 tensor"""
        starts = self.windows(numbers, seed) * self.seq_length  # int64: a file may have more than 2^31 tokens
        rows = np.stack([self.tokens[start : start + self.seq_length + 1] for start in starts])
        self.check_ids(rows)
        return torch.from_numpy(rows.astype(np.int64))

    def check_ids(self, ids):
        if ids.max() >= self.meta["vocab_size"]:
            raise UserError(f"{self.path}: the id {ids.max()} is not in the vocabulary; prepare the data again")


def map_tokens(path, dtype="<u2"):
    """Map the file as a read-only array of `dtype`, [num_tokens]."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # No read-ahead: shuffled samples are not read in the order of the file (2,000 samples: 12 MB instead of 1 GB).
    mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype)


PAGES = 64  # of 4096 bytes


def identity(tokens):
    """Return what a checkpoint's index.json says about the training data. crc32: of PAGES pages, evenly spaced."""
    size = 4096 // tokens.tokens.itemsize
    starts = np.linspace(0, max(0, len(tokens.tokens) - size), PAGES).astype(np.int64)
    pages = b"".join(tokens.tokens[start : start + size].tobytes() for start in starts)
    number = {"tokens": len(tokens.tokens), "crc32": f"{zlib.crc32(pages):08x}"}
    return {name: tokens.meta.get(name) for name in ("tokenizer", "dtype", "made_from")} | number


# -- samples of a data rank


def training_samples(consumed_samples, data_rank, dp, micro_batch_size):
    """Yield a data rank's sample numbers, [b] int64, for each micro-batch after `consumed_samples`, without end."""
    for first in itertools.count(consumed_samples + data_rank * micro_batch_size, dp * micro_batch_size):
        yield np.arange(first, first + micro_batch_size, dtype=np.int64)


def eval_batches(tokens, samples_wanted, data_rank, dp, micro_batch_size, seed, device="cpu"):
    """Yield (tokens [b, seq_length + 1] on `device`, is_real) for each micro-batch of a data rank in a validation.

    All ranks together take the first min(samples_wanted, num_samples) samples once. A rank without samples in
    the last micro-batch runs a stand-in, is_real = False, because all ranks must run the model equally often: ZeRO-3
    gathers parameters on all of them together.
    """
    samples = min(samples_wanted, tokens.num_samples)
    m = -(-samples // (micro_batch_size * dp))
    rounds = itertools.islice(training_samples(0, data_rank, dp, micro_batch_size), m)
    shares = [numbers[numbers < samples] for numbers in rounds]
    stand_in = np.zeros(1, np.int64)
    numbers = [share if len(share) else stand_in for share in shares]
    with closing(loaded(tokens, numbers, seed, device)) as batches:
        for (batch, _), share in zip(batches, shares, strict=True):
            yield batch, len(share) > 0


# -- batches read ahead


def loaded(tokens, numbers, seed, device="cpu", depth=4):
    """Yield (tokens [b, seq_length + 1], numbers [b]), int64 on `device`, for each array in `numbers`.

    A thread keeps up to `depth` micro-batches ready. To end it, close the generator.
    """
    device, numbers = torch.empty(0, device=device).device, iter(numbers)  # "cuda" becomes "cuda:0"
    gpu = device.type == "cuda"

    def read(n):
        pair = tokens.batch(n, seed), torch.from_numpy(n)
        return tuple(x.pin_memory() for x in pair) if gpu else pair

    begin = partial(torch.cuda.set_device, device) if gpu else None  # otherwise the thread pins memory for GPU 0
    thread = ThreadPoolExecutor(1, "loader", begin)
    try:
        ready = deque(thread.submit(read, n) for n in itertools.islice(numbers, depth))
        while ready:
            pair = ready.popleft().result()
            ready.extend(thread.submit(read, n) for n in itertools.islice(numbers, 1))
            yield tuple(x.to(device, non_blocking=True) for x in pair)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)  # a disk that hangs must not delay the end of the process
