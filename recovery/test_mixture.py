"""Test several data sets by weight: shares, epochs and changes, counted from the raw files, and every layout."""

import resource
from collections import Counter

import numpy as np
import pytest
import torch

import config as configuration
from accounts.metrics import read_metrics
from data import Mixture, Tokens, shares_of
from testing.tiny import configured, fails, go, write_tokens

SIZES = {"en": 1000, "code": 370, "ja": 250}  # tokens: 124, 46 and 31 windows of 8


def written(folder, seed, train, val=90):
    """Write a data set of random tokens, so that each window occurs once. Return its path."""
    write_tokens(folder, train, val)
    for split, count in (("train", train), ("val", val)):
        np.random.default_rng(seed).integers(0, 100, count).astype("<u2").tofile(folder / f"{split}.bin")
    return str(folder)


@pytest.fixture
def three(tmp_path):
    """Return a function: three weights -> data_dir. A weight of 0 leaves a set out."""
    folders = [written(tmp_path / name, k, size) for k, (name, size) in enumerate(SIZES.items())]
    return lambda *weights: ",".join(f"{w}:{f}" for w, f in zip(weights, folders, strict=True) if w)


def windows_on_disk(tmp_path):
    """Return {tokens of a window: (set, its place in the file)}, read without data.py."""
    found = {}
    for name in SIZES:
        row = np.fromfile(tmp_path / name / "train.bin", "<u2").tolist()
        found |= {tuple(row[i : i + 9]): (name, i // 8) for i in range(0, len(row) - 8, 8)}
    assert len(found) == 124 + 46 + 31
    return found


def check_epochs(places):
    """Check that each set's windows come once in each of its epochs. places: [(set, place)] in the run's order."""
    for name, size in SIZES.items():
        row, windows = [place for its, place in places if its == name], (size - 1) // 8
        for begin in range(0, len(row), windows):
            epoch = row[begin : begin + windows]
            assert len(set(epoch)) == len(epoch), f"an epoch of {name} repeats a window"


def read(mixture, tmp_path, begin, end, step=5):
    """Return the (set, place) of the samples begin .. end - 1, read `step` at a time."""
    numbers = np.arange(begin, end)
    parts = [mixture.batch(numbers[i : i + step], seed=3) for i in range(0, len(numbers), step)]
    where = windows_on_disk(tmp_path)
    return [where[tuple(row)] for row in torch.cat(parts).tolist()]


# --- shares -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights, shares",
    [
        ((60, 30, 10), (6, 3, 1)),
        ((1, 0.5, 0.25), (4, 2, 1)),
        ((7, 11, 13), (7, 11, 13)),
        ((0.1, 0.2, 99.7), (1, 2, 997)),
        ((" 26100000000 ", "8000000000", "2000000000."), (261, 80, 20)),
    ],
)
def test_each_cycle_has_the_shares_and_each_epoch_each_window_once(three, tmp_path, weights, shares):
    size = sum(shares)
    mixture, n = Mixture(three(*weights), "train", 8, 100), max(2 * size, 700) // size * size
    assert mixture.shares == shares
    places = read(mixture, tmp_path, 0, n, step=37)
    for begin in range(0, n, size):
        counts = Counter(name for name, _ in places[begin : begin + size])
        assert tuple(counts[name] for name in SIZES) == shares
    check_epochs(places)
    for end in (1, size // 2, size + 3, n - 1):  # evenly spread: each share is exact to one sample at any time
        counts = Counter(name for name, _ in places[:end])
        assert all(abs(counts[name] - end * share / size) <= 1 for name, share in zip(SIZES, shares, strict=True))
        progress = mixture.progress(end)
        assert [progress[f"consumed_tokens/{name}"] for name in SIZES] == [8 * counts[name] for name in SIZES]
        assert [progress[f"epochs/{name}"] for name in SIZES] == [
            counts[name] / ((tokens - 1) // 8) for name, tokens in SIZES.items()
        ]


def test_a_sample_does_not_depend_on_how_it_is_read(three):
    mixture = Mixture(three(5, 2, 1), "train", 8, 100)
    whole = mixture.batch(np.arange(301), seed=3)
    dice = np.random.default_rng(0).permutation(301)
    assert torch.equal(mixture.batch(dice, seed=3), whole[torch.from_numpy(dice)])


def test_one_folder_has_the_order_that_it_always_had(three, tmp_path):
    folder = tmp_path / "ja"
    alone, numbers = Tokens(folder, "train", 8, 100).batch(np.arange(100), seed=3), np.arange(100)
    for data_dir in (str(folder), f"0.3:{folder}"):
        assert torch.equal(Mixture(data_dir, "train", 8, 100).batch(numbers, seed=3), alone)


def test_many_sets_may_be_open(three):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (99, hard))
    Mixture(three(5, 2, 1), "train", 8, 100)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 10240), hard)


# --- another mixture in the middle of a cycle -------------------------------------------------------------------------


def test_swallows_recipe_has_16_percent_of_code():
    shares = shares_of(configuration.load(["configs/swallow_8b.py"]).data_dir)
    assert len(shares) == 7 and shares["data/swallow_code"] / sum(shares.values()) == pytest.approx(0.16, abs=2e-4)


def test_other_weights_are_refused(three, tmp_path):
    out = tmp_path / "out"
    go(configured(out, three(6, 3, 1), train_iters=1))
    go(configured(out, three(60, 30, 10), train_iters=2))  # the same shares
    for other in (three(60, 30, 11), three(6, 3, 0), str(tmp_path / "en")):
        said = fails(configured(out, other, train_iters=3))
        assert said, "other weights of the data are not noticed"
        why = f"data_dir={other}: not the training data of the checkpoint {out}/step_2, 6:en,3:code,1:ja; "
        assert said.startswith(why) and "--initial_weights" in said


# --- validation -------------------------------------------------------------------------------------------------------


def test_a_set_without_validation_tokens_is_said(three, tmp_path, capsys):
    written(tmp_path / "code", 1, SIZES["code"], val=5)
    go(configured(tmp_path / "out", three(6, 3, 1), train_iters=1))
    out, row = capsys.readouterr().out, read_metrics(tmp_path / "out/metrics.jsonl")[1]
    assert f"no val loss of code: seq_length=8: {tmp_path}/code/val.bin: 5 tokens; a sample needs 9" in out
    assert " validation loss of ja at iteration 1 | " in out
    mean = (6 * row["validation_loss/en"] + row["validation_loss/ja"]) / 7
    assert row["validation_loss"] == pytest.approx(mean, rel=1e-15) and "validation_loss/code" not in row
    for name in ("en", "ja"):
        written(tmp_path / name, 9, SIZES[name], val=0)
    assert fails(configured(tmp_path / "b", three(6, 3, 1))).startswith("no val loss of en: seq_length=8: ")


def test_two_sets_may_have_the_same_validation_text(three, tmp_path):
    """Training would repeat samples, and is refused."""
    copy = written(tmp_path / "copy", 0, SIZES["en"])
    Mixture(f"{three(1, 1, 0)},3:{copy}", "val", 8, 100)
