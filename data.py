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

The ranks of a tensor or pipeline group read the same batch.

Several data sets have weights: `--data_dir=60:data/en,30:data/code,10:data/ja`. `places` gives each sample of the run
its set and its number in this set. These numbers count the samples and epochs of a set, as above.
"""

import functools
import itertools
import json
import math
import mmap
import os
import re
import resource
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from errors import UserError, reading, regular, whole_number

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


class NoSample(UserError):
    """A split has too few tokens for one sample."""


class Tokens:
    """One split of a data set. Raises UserError if its files are missing, damaged or not usable for this model.

    meta: the content of meta.json. num_samples: windows in an epoch.
    """

    def __init__(self, data_dir, split, seq_length, vocab_size):
        """Check the first ids only. `batch` checks the others when it reads them."""
        folder = Path(data_dir)
        self.path, self.seq_length = folder / f"{split}.bin", seq_length
        tokenizer = "gpt2" if vocab_size >= 50257 else "bytes"
        source = "" if folder.name.startswith("stdlib") else "FILE "
        source = f"--megatron={data_dir} " if Path(f"{data_dir}.idx").exists() else source
        command = f"python prepare.py {source}--tokenizer={tokenizer} --out={data_dir}"
        if not (folder / "meta.json").exists():
            raise UserError(f"data_dir={data_dir}: no data set of prepare.py; create it with: {command}")
        with reading(f"data_dir={data_dir}", damaged=f": damaged; create it again with: {command}"):
            self.meta = json.loads(regular(folder / "meta.json").read_text("utf-8"))
            num_tokens = whole_number(self.meta["tokens"], split)
            ids, tokenizer = whole_number(self.meta, "vocab_size", 1), self.meta["tokenizer"]
            whole_number(self.meta, "eot_id", most=ids - 1)
            if type(tokenizer) is not str:
                raise ValueError(f"tokenizer is {tokenizer!r:.40}")
            self.num_samples = (num_tokens - 1) // seq_length
            if self.num_samples < 1:
                size = f"{num_tokens} tokens; a sample needs {seq_length + 1}"
                raise NoSample(f"seq_length={seq_length}: {self.path}: {size}")
            self.tokens = np.frombuffer(map_file(self.path), TOKEN_DTYPES[self.meta["dtype"]])  # [num_tokens]
            if len(self.tokens) != num_tokens:
                raise ValueError(f"{self.path} has {len(self.tokens):,} tokens, but meta.json says {num_tokens:,}")
            if ids > vocab_size:
                why = f"the tokenizer of {data_dir}, {tokenizer}, has {ids} ids"
                raise UserError(f"vocab_size={vocab_size}: {why}; set this vocab_size, or use another tokenizer")
        self.check_ids(self.tokens[: 2**16])  # every rank finds most wrong files before training

    def windows(self, numbers, seed):
        """Return the index of each sample's window, [b] int64."""
        epoch, i = np.divmod(numbers, self.num_samples)
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


def map_file(path):
    """Map a file, read-only."""
    with open(regular(path), "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # No read-ahead: shuffled samples are not read in the order of the file (2,000 samples: 12 MB instead of 1 GB).
    mapped.madvise(mmap.MADV_RANDOM)
    return mapped


PAGES = 64  # of 4096 bytes


def identity(tokens):
    """Return what a checkpoint's index.json says about the training data. crc32: of PAGES pages, evenly spaced."""
    row = tokens.tokens
    size = 4096 // row.itemsize
    starts = np.linspace(0, max(0, len(row) - size), PAGES, dtype=np.int64)
    pages = b"".join(row[start : start + size].tobytes() for start in starts)
    number = {"tokens": len(row), "crc32": f"{zlib.crc32(pages):08x}"}
    return {name: tokens.meta.get(name) for name in ("tokenizer", "dtype", "made_from")} | number


# -- several data sets

LONGEST_CYCLE = 10**6  # samples


def shares_of(data_dir):
    """Return {folder: its samples in a cycle} of "60:data/en,40:data/ja", or of one folder. Raises UserError.

    The shares are the smallest whole numbers with the proportions of the weights.
    """
    if not re.search("[:,]", data_dir) or os.path.isdir(data_dir):
        return {data_dir: 1}
    weights, wrong = {}, f"data_dir={data_dir}: "
    for word in data_dir.split(","):
        match = re.fullmatch(r"\s*(?=\.?\d)(\d{0,40}\.?\d{0,40})\s*:\s*(.*\S)\s*", word)
        if not match or not Fraction(match[1]):
            raise UserError(f"{wrong}'{word}' should be WEIGHT:FOLDER, a weight above 0, as in 60:data/en,40:data/ja")
        folder = os.path.expanduser(match[2])
        if folder in weights:
            raise UserError(f"{wrong}{folder} is there twice")
        weights[folder] = Fraction(match[1])
    scale = math.lcm(*(weight.denominator for weight in weights.values()))
    divisor = math.gcd(*(int(weight * scale) for weight in weights.values()))
    shares = {folder: int(weight * scale) // divisor for folder, weight in weights.items()}
    if sum(shares.values()) > LONGEST_CYCLE:
        raise UserError(f"{wrong}the weights should have fewer digits; a cycle has at most {LONGEST_CYCLE:,} samples")
    return shares


@functools.cache
def cycle(shares):
    """Return the sets of a cycle's samples, and how often the set of each sample comes before it in the cycle.

    The samples of a set are spread evenly: number k of n stands at (k + 1/2) / n of the cycle.
    """
    sets = np.repeat(np.arange(len(shares)), shares)
    earlier = np.concatenate([np.arange(n) for n in shares])
    order = np.argsort((earlier + 0.5) / np.repeat(shares, shares), kind="stable")
    return sets[order], earlier[order]


def places(numbers, shares):
    """Return the set of each sample, and its number in this set. numbers [b] int64 -> [b] int64, [b] int64

    Each cycle of sum(shares) samples has shares[k] samples of set k, in the same order. With the shares (3, 2, 1):

        sample              0 1 2 3 4 5   6 7 8 9 10 11
        set                 0 1 0 2 1 0   0 1 0 2  1  0
        number in the set   0 0 1 0 1 2   3 2 4 1  3  5

    So the samples before any sample have the first numbers of each set, without a gap, also in the middle of a cycle.
    """
    sets, earlier = cycle(shares)
    cycles, i = np.divmod(numbers, len(sets))
    return sets[i], cycles * np.take(shares, sets[i]) + earlier[i]


def counts(number, shares):
    """Return how many of the samples before sample `number` each set has, [sets] int64. The inverse of `places`."""
    sets, _ = cycle(shares)
    cycles, i = divmod(number, len(sets))
    return cycles * np.array(shares) + np.bincount(sets[:i], minlength=len(shares))


class Mixture:
    """One split of the data sets in `data_dir`. Raises UserError.

    sets: {name: Tokens}, with `shares`. missing: a line about each set without a sample of the split (not train).
    """

    def __init__(self, data_dir, split, seq_length, vocab_size):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # each file of tokens stays open
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10240)), hard))  # 10240: macOS refuses more
        found = shares_of(data_dir)
        names = [Path(folder).absolute().name for folder in found]
        names = names if len({*names}) == len(names) else [*found]
        self.sets, shares, self.missing = {}, [], []
        for name, (folder, share) in zip(names, found.items(), strict=True):
            try:
                self.sets[name] = Tokens(folder, split, seq_length, vocab_size)
                shares.append(share)
            except NoSample as error:
                if split == "train" or len(found) == 1:
                    raise
                self.missing.append(f"no {split} loss of {name}: {error}")
        if not self.sets:
            raise UserError(self.missing[0])
        self.shares = tuple(shares)
        self.seq_length, self.num_samples = seq_length, sum(tokens.num_samples for tokens in self.sets.values())
        self.first, *others = self.sets.values()
        for tokens in others:
            for key in ("tokenizer", "vocab_size", "eot_id"):
                here, there = tokens.meta.get(key), self.first.meta.get(key)
                if here != there:
                    why = f"{tokens.path} has {key}={here}, but {self.first.path} has {there}"
                    raise UserError(f"data_dir={data_dir}: {why}")
        contents = [content(entry) for entry in self.state()]
        for k, same in enumerate(map(contents.index, contents)):
            if same < k and split == "train":
                why = f"{names[same]} and {names[k]} have the same content; leave one out"
                raise UserError(f"data_dir={data_dir}: {why}")

    def batch(self, numbers, seed):
        """Return the tokens of samples. numbers [b] int64 -> [b, seq_length + 1] int64 tensor"""
        which, inside = places(numbers, self.shares)
        rows = torch.empty(len(numbers), self.seq_length + 1, dtype=torch.int64)
        for k, tokens in enumerate(self.sets.values()):
            if (mine := which == k).any():
                rows[torch.from_numpy(mine)] = tokens.batch(inside[mine], seed)
        return rows

    def progress(self, consumed_samples):
        """Return the entries of a row of metrics.jsonl: tokens and epochs of each of several sets."""
        row, samples = {}, counts(consumed_samples, self.shares)
        for (name, tokens), count in zip(self.sets.items(), samples.tolist(), strict=True):
            row[f"consumed_tokens/{name}"] = count * self.seq_length
            row[f"epochs/{name}"] = count / tokens.num_samples
        return row if len(self.sets) > 1 else {}

    def mean(self, losses):
        """Return the mean of {name: loss} by weight."""
        return sum(share * losses[name] for name, share in zip(self.sets, self.shares, strict=True)) / sum(self.shares)

    def state(self):
        """Return what a checkpoint says about the training data: an entry for each set."""
        rows = zip(self.sets.items(), self.shares, strict=True)
        return [identity(t) | dict(name=name, share=share) for (name, t), share in rows]


def content(entry):
    return tuple(entry.get(name) for name in ("dtype", "tokens", "crc32"))


def mixture(entries):
    """Return the content and share of each set, in order: a run and its checkpoint must have the same."""
    return [(content(entry), entry["share"]) for entry in entries]


# -- samples of a data rank


def training_samples(consumed_samples, dp_rank, dp, micro_batch_size):
    """Yield a data rank's sample numbers, [b] int64, for each micro-batch after `consumed_samples`, without end."""
    for first in itertools.count(consumed_samples + dp_rank * micro_batch_size, dp * micro_batch_size):
        yield np.arange(first, first + micro_batch_size, dtype=np.int64)


def eval_batches(tokens, samples_wanted, dp_rank, dp, micro_batch_size, seed, device="cpu"):
    """Yield (tokens [b, seq_length + 1] on `device`, is_real) for each micro-batch of a data rank in a validation.

    All ranks together take the first min(samples_wanted, num_samples) samples once. A rank without samples in
    the last micro-batch runs a stand-in, is_real = False, because all ranks must run the model equally often: ZeRO-3
    gathers parameters on all of them together.
    """
    samples = min(samples_wanted, tokens.num_samples)
    m = -(-samples // (micro_batch_size * dp))
    rounds = itertools.islice(training_samples(0, dp_rank, dp, micro_batch_size), m)
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

    # Without it the thread pins memory for GPU 0.
    begin = functools.partial(torch.cuda.set_device, device) if gpu else None
    thread = ThreadPoolExecutor(1, "loader", begin)
    try:
        ready = deque(thread.submit(read, n) for n in itertools.islice(numbers, depth))
        while ready:
            pair = ready.popleft().result()
            ready.extend(thread.submit(read, n) for n in itertools.islice(numbers, 1))
            yield tuple(x.to(device, non_blocking=True) for x in pair)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)  # under torchrun, a disk that hangs does not delay the end
