"""Test data.py: shuffle, samples of each rank, resuming, large files, errors, and the thread."""

import errno
import gc
import itertools
import json
import math
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from data import Tokens, eval_batches, identity, loaded, permute, shuffle_key, training_samples
from errors import UserError
from testing.tiny import refusal, wait_until

LAYOUTS = [(dp, b) for dp in (1, 2, 3, 4, 8) for b in (1, 2, 3, 5)]  # data ranks, micro_batch_size


def write(folder, row, /, **changes):
    """Write files as prepare.py does. All splits have the tokens `row`. changes: of meta.json."""
    for split in ("train", "val", "test"):
        np.asarray(row, "<u2").tofile(folder / f"{split}.bin")
    counts = dict.fromkeys(("train", "val", "test"), len(row))
    meta = {"tokenizer": "bytes", "vocab_size": 257, "eot_id": 256, "dtype": "uint16", "tokens": counts}
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    return folder


@pytest.fixture
def counted(tmp_path):
    """53 windows of 7 targets, and 5 more tokens. A token's id is its position."""
    return Tokens(write(tmp_path, range(53 * 7 + 1 + 5), vocab_size=1000), "train", 7, 1000)


def keys(seed, epochs):
    return shuffle_key(seed, np.arange(epochs))


def chi_square(counts, expected):
    """Return (chi-square - its mean) / its standard deviation."""
    degrees = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


def take(loader, count):
    """Return the next `count` items, at most. A wait of 20 seconds is a failure."""
    results = queue.SimpleQueue()

    def work():
        try:
            results.put(list(itertools.islice(loader, count)))
        except Exception as error:
            results.put(error)

    threading.Thread(target=work, daemon=True).start()
    items = results.get(timeout=20)
    if isinstance(items, Exception):
        raise items
    return items


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("loader")]


# -- the shuffle


def test_permute_is_a_bijection_for_every_n_and_key():
    for n in range(1, 201):
        for key in keys(seed=n, epochs=3):
            assert sorted(permute(np.arange(n), n, key)) == list(range(n))


@pytest.mark.parametrize("n", [2**31 - 1, 2**31 + 1, 2**33 + 1, 2**40, 2**40 + 12345])
def test_permute_is_a_bijection_for_large_n(n):
    i = np.unique(
        np.concatenate([np.arange(50_000), np.arange(n - 50_000, n), np.linspace(0, n - 1, 50_000, dtype=int)])
    )
    places = permute(i, n, keys(seed=1, epochs=1))
    assert places.dtype == np.int64 and len(np.unique(places)) == len(i)
    assert places.min() >= 0 and places.max() < n
    assert chi_square(np.bincount(places * 64 // n, minlength=64), len(i) / 64) < 5


def test_the_order_of_samples_never_changes(tmp_path):
    # an older run must resume with this order
    assert permute(np.arange(10), 10, keys(1234, 1)).tolist() == [2, 8, 5, 3, 6, 1, 9, 0, 7, 4]
    assert permute(np.arange(5), 10**6, keys(1234, 1)).tolist() == [546811, 587208, 919336, 345507, 342174]
    assert permute(np.array([0, 2**33]), 2**33 + 1, keys(-1, 5)[4:]).tolist() == [1419077843, 3495266281]
    data = Tokens(write(tmp_path, range(9999), vocab_size=9999), "train", 7, 9999)
    assert identity(data)["crc32"] == "958d2b99", "a checkpoint has this number of its data"


def test_epochs_and_seeds_have_their_own_order():
    n = 1000
    orders = [permute(np.arange(n), n, key) for seed in (0, 1, 2, 1234, -1) for key in keys(seed, 4)]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 12  # 1 on average


@pytest.mark.parametrize("n", [10_007, 2**18, 2**18 + 1])
def test_large_shuffles_look_random(n):
    i, side = np.arange(n), math.isqrt(n - 1) + 1
    for key in keys(seed=5, epochs=4):
        places = permute(i, n, key)
        assert abs(np.abs(places - i).mean() / n - 1 / 3) < 1.5 / math.sqrt(n)  # mean displacement n/3
        assert (places == i).sum() < 10  # fixed points: 1 on average
        assert (np.abs(np.diff(places)) == 1).sum() < 16  # neighbours: 2 on average
        for apart in (1, 2, side - 1, side, side + 1, 2 * side):
            distance = (np.roll(places, -apart) - places) % n
            assert chi_square(np.bincount(distance * 64 // n, minlength=64), n / 64) < 6


@pytest.mark.parametrize("n", [2, 3, 5, 10, 17, 30])
def test_small_shuffles_put_every_sample_everywhere_equally_often(n):
    epochs = 4000
    for i in range(n):
        places = permute(np.full(epochs, i), n, keys(seed=6, epochs=epochs))
        assert chi_square(np.bincount(places, minlength=n), epochs / n) < 6


# -- windows


def test_windows_overlap_by_one_token_and_every_token_is_a_target_once(counted):
    assert counted.num_samples == 53
    rows = counted.batch(np.arange(53), seed=0)
    assert rows.dtype == torch.int64 and rows.shape == (53, 8)
    assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)
    rows = rows[rows[:, 0].argsort()]
    assert torch.equal(rows[1:, 0], rows[:-1, -1])
    assert rows[:, 1:].flatten().tolist() == list(range(1, 53 * 7 + 1))


@pytest.mark.parametrize("tokens, samples", [(8, 1), (14, 1), (15, 2), (16, 2)])
def test_a_window_is_counted_only_if_its_last_target_is_there(tmp_path, tokens, samples):
    data = Tokens(write(tmp_path, range(tokens)), "val", 7, 257)
    assert data.num_samples == samples
    assert data.batch(np.arange(samples), seed=0).max() == samples * 7


def test_a_window_beyond_2_to_the_31_tokens_is_read(tmp_path):
    size, seq_length = 2**31 + 2**20, 256
    write(tmp_path, [], tokens={"train": size})
    path = tmp_path / "train.bin"
    with open(path, "wb") as file:
        file.truncate(2 * size)  # 4 GiB, sparse
    data = Tokens(tmp_path, "train", seq_length, 257)
    windows = data.windows(np.arange(20_000), seed=0)
    numbers = np.flatnonzero(windows * seq_length > 2**31)
    assert 0 < len(numbers) < 100
    expected = np.random.default_rng(0).integers(1, 257, (len(numbers), seq_length + 1))
    with open(path, "r+b") as file:
        for window, row in zip(windows[numbers].tolist(), expected, strict=True):
            file.seek(2 * window * seq_length)
            file.write(row.astype("<u2").tobytes())
    assert torch.equal(data.batch(numbers, seed=0), torch.from_numpy(expected))


# -- samples of a data rank


@pytest.mark.parametrize("dp, b", LAYOUTS)
def test_an_epoch_has_every_window_exactly_once(counted, dp, b):
    ranks = [training_samples(0, r, dp, b) for r in range(dp)]
    taken = np.concatenate([next(rank) for _ in range(400) for rank in ranks])
    for epoch in range(3):
        assert 53 * (epoch + 1) < len(taken)
        windows = counted.windows(np.sort(taken)[53 * epoch : 53 * (epoch + 1)], seed=0)
        assert sorted(windows) == list(range(53))


def test_a_batch_is_a_pure_function_of_consumed_samples(counted):
    def batches(consumed, steps):
        with closing(loaded(counted, training_samples(consumed, 1, 2, 3), seed=0)) as loader:
            return take(loader, 2 * steps)  # two micro-batches in each step

    whole, resumed = batches(0, 10), batches(12 * 4, 6)  # an epoch ends inside the 5th step
    for (tokens, numbers), (tokens_again, numbers_again) in zip(whole[8:], resumed, strict=True):
        assert torch.equal(tokens, tokens_again) and torch.equal(numbers, numbers_again)
        assert torch.equal(tokens, counted.batch(numbers.numpy(), seed=0))
        assert numbers.dtype == torch.int64


# -- validation


@pytest.mark.parametrize("dp, b", LAYOUTS)
@pytest.mark.parametrize("wanted", [1, 24, 1000])
def test_validation_shares_out_the_same_windows_in_every_layout(counted, wanted, dp, b):
    ranks = [take(eval_batches(counted, wanted, r, dp, b, seed=0), 1000) for r in range(dp)]
    rows = [tuple(row.tolist()) for rank in ranks for tokens, counts in rank if counts for row in tokens]
    first = counted.batch(np.arange(min(wanted, 53)), seed=0)
    assert Counter(rows) == Counter(tuple(row.tolist()) for row in first)
    assert all(1 <= len(tokens) <= b for rank in ranks for tokens, _ in rank)
    assert len(set(map(len, ranks))) == 1  # all ranks run the model equally often


def test_a_validation_that_is_left_early_leaves_no_thread(counted):
    for _ in eval_batches(counted, 50, 0, 1, 2, seed=0):
        break
    gc.collect()
    wait_until(lambda: not loader_threads())


# -- errors


def test_an_id_beyond_the_vocabulary_deep_in_the_file_is_found_in_its_batch(tmp_path):
    tokens = np.zeros(2**17, int)
    tokens[100_000] = 300
    data = Tokens(write(tmp_path, tokens), "train", 7, 257)
    with closing(loaded(data, training_samples(0, 0, 1, 64), seed=0)) as loader:
        with pytest.raises(UserError, match=r"train.bin: the id 300 is not in the vocabulary"):
            for _ in range(data.num_samples // 64 + 1):
                next(loader)
    assert "the id 300" in refusal(Tokens, write(tmp_path, tokens[90_000:]), "train", 7, 257)  # before training


def test_a_file_that_can_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("data.map_file", refuse)
    folder = write(tmp_path, range(99))
    assert refusal(Tokens, folder, "train", 7, 257) == f"data_dir={folder}: Too many open files"


# -- the thread


class Source:
    """Stands in for Tokens. Batch number `fails` raises an error."""

    def __init__(self, seconds=0.0, fails=None):
        self.seconds, self.fails, self.count = seconds, fails, 0

    def batch(self, numbers, seed):
        self.count += 1
        time.sleep(self.seconds)
        if self.count == self.fails:
            raise OSError("the disk is gone")
        return torch.zeros(len(numbers), 9, dtype=torch.int64)


def endless():
    return training_samples(0, 0, 1, 2)


def test_an_exception_in_the_thread_is_raised_in_the_caller():
    with closing(loaded(Source(fails=3), endless(), seed=0)) as loader:
        assert len(take(loader, 2)) == 2  # batches read before the error are delivered
        with pytest.raises(OSError, match="the disk is gone"):
            take(loader, 1)
    wait_until(lambda: not loader_threads())


def test_the_end_of_the_numbers_is_the_end_of_the_loader():
    numbers = [np.arange(2), np.arange(2, 3)]
    with closing(loaded(Source(), numbers, seed=0)) as loader:
        assert [n.tolist() for _, n in take(loader, 9)] == [[0, 1], [2]]
        assert take(loader, 1) == []


def test_a_loader_reads_ahead_as_far_as_asked_and_closes_while_full():
    source = Source()
    loader = loaded(source, endless(), seed=0, depth=3)
    take(loader, 1)
    wait_until(lambda: source.count == 4)
    take(loader, 9)
    wait_until(lambda: source.count == 13)
    time.sleep(0.02)
    assert source.count == 13 and len(loader_threads()) == 1
    loader.close()
    loader.close()
    wait_until(lambda: not loader_threads())


@pytest.mark.slow
def test_a_loader_that_is_never_closed_does_not_keep_the_process():
    code = """if True:
        import test_data
        loader = test_data.loaded(test_data.Source(), test_data.endless(), seed=0)
        next(loader)
        raise SystemExit(7)
    """
    root = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.cuda
def test_batches_arrive_whole_on_the_gpu(counted):
    numbers = list(itertools.islice(training_samples(0, 0, 1, 4), 200))
    with closing(loaded(counted, numbers, seed=0, device="cuda", depth=2)) as loader:
        kept = [(tokens, n) for tokens, n in loader]
    for (tokens, n), expected in zip(kept, numbers, strict=True):
        assert tokens.is_cuda and n.tolist() == expected.tolist()
        assert torch.equal(tokens.cpu(), counted.batch(expected, seed=0))
