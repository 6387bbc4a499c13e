"""Test several data sets by weight: shares, epochs and changes, counted from the raw files, and every layout."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import config as configuration
from accounts.metrics import read_metrics
from data import Mixture, Tokens, shares_of
from errors import UserError
from model import GPT
from recovery import checkpoint
from testing.tiny import configured, fails, few, go, write_tokens

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


# --- another mixture in the middle of a cycle -------------------------------------------------------------------------


def test_each_set_goes_on_at_its_own_next_window(three, tmp_path):
    """The weights change at sample 30, in a cycle of 8; a set is left out, and comes back at sample 62."""
    mixtures = [Mixture(three(*weights), "train", 8, 100) for weights in ((5, 2, 1), (3, 0, 1), (1, 1, 1))]
    places, begin, state = [], 0, None
    for k, end in enumerate((30, 62, 400)):
        if k:
            mixtures[k].resume({"data": state, "counters": {"consumed_samples": begin}})
        places += read(mixtures[k], tmp_path, begin, end, step=7)
        state, begin = json.loads(json.dumps(mixtures[k].state())), end
    check_epochs(places)
    again = Mixture(three(1, 1, 1), "train", 8, 100)
    again.resume({"data": state, "counters": {"consumed_samples": 400}})
    assert read(again, tmp_path, 62, 400) == places[62:], "a resume with equal weights changes the samples"
    for name in SIZES:  # one after the other, as if the set were alone
        alone = Tokens(tmp_path / name, "train", 8, 100)
        mine = [place for its, place in places if its == name]
        assert mine == alone.windows(np.arange(len(mine)), seed=3).tolist(), f"{name} does not go on where it was"


@pytest.mark.parametrize("begins, used", [(0, (0, 0, 0)), (13, (9, 3, 1))])
def test_a_checkpoint_without_offsets_goes_on_at_each_sets_next_window(three, tmp_path, monkeypatch, begins, used):
    """Commit 586328a wrote the sample `begins` of the last change of weights, and what each set had before."""
    mixture = Mixture(three(5, 2, 1), "train", 8, 100)
    sets = [entry | {"begins": begins, "used": n} for entry, n in zip(mixture.state(), used, strict=True)]
    for entry in sets:
        del entry["offset"]
    before = [n + more for n, more in zip(used, (6, 3, 1) if begins else (14, 6, 3), strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(Mixture, "state", lambda _: sets)
        go(configured(tmp_path / "out", three(5, 2, 1), train_iters=1))
    index = checkpoint.read_index(tmp_path / "out/step_1")
    mixture.resume(index | {"counters": {"consumed_samples": 23}})
    assert begins or mixture.offsets.tolist() == [0, 0, 0], "an unchanged mixture has other samples"
    places = read(mixture, tmp_path, 23, 63)
    for name, first in zip(SIZES, before, strict=True):
        mine = [place for its, place in places if its == name]
        alone = Tokens(tmp_path / name, "train", 8, 100)
        assert mine == alone.windows(np.arange(first, first + len(mine)), seed=3).tolist()


LAYOUTS = [
    (3, dict(zero=3), 2, dict(pp=2)),
    (2, dict(cp=2), 4, dict(zero=1, zero_copies=2, micro_batch_size=1)),
    (4, dict(pp=2, schedule="zb-h1", zero=2), 2, dict(tp=2, sequence_parallel=True)),
]


def train_and_note(config):
    """Train. Return {sample number: its tokens} of this rank."""
    rows, micro_batch = {}, GPT.micro_batch

    def noted(model, ids, targets=None, samples=None):
        if samples is not None and ids.any():  # not `meta.work_of`'s
            rows.update(zip(samples.tolist(), torch.cat([ids, targets[:, -1:]], 1).tolist(), strict=True))
        return micro_batch(model, ids, targets, *([] if samples is None else [samples]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT, "micro_batch", noted)
        go(config)
    return rows


@pytest.mark.parametrize("first, layout, second, other", few(LAYOUTS), ids=str)
def test_every_layout_trains_on_the_same_sets(workers, three, tmp_path, first, layout, second, other):
    """The weights change after five steps, in the middle of a cycle. All numbers are those of one process."""
    rows = {}
    for ranks, fields, *new in ((first, layout, 5, three(4, 2, 1), False), (second, other, 10, three(3, 0, 2), True)):
        train_iters, data_dir, new_data = new
        run = configured(
            tmp_path / "many", data_dir, train_iters=train_iters, new_data=new_data, num_layers=3, **fields
        )
        run = replace(run, eval_interval=5)
        for noted in workers.run(ranks, train_and_note, run):
            rows |= noted
        alone = dict(tp=1, pp=1, cp=1, zero=0, zero_copies=1, schedule="1f1b", sequence_parallel=False)
        go(replace(run, out_dir=str(tmp_path / "one"), **alone))
    where = windows_on_disk(tmp_path)
    places = [where[tuple(rows[sample])] for sample in range(120)]
    check_epochs(places)
    counts = [Counter(name for name, _ in part) for part in (places[:56], places[60:])]
    assert counts == [{"en": 32, "code": 16, "ja": 8}, {"en": 36, "ja": 24}]
    many, one = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("many", "one"))
    for iteration, row in one.items():
        names = [key for key in row if key.startswith(("lm_loss", "grad_norm", "consumed", "epochs", "validation"))]
        sets = 3 if iteration <= 5 else 2
        assert len(names) == 4 + 2 * sets + (1 + sets) * (iteration % 5 == 0)  # the last ones: of the validation
        assert [many[iteration][name] for name in names] == pytest.approx([row[name] for name in names], rel=1e-10)
    last = one[10]
    mean = (3 * last["validation_loss/en"] + 2 * last["validation_loss/ja"]) / 5
    assert last["validation_loss"] == pytest.approx(mean, rel=1e-15)
    entries = checkpoint.read_index(tmp_path / "many" / "step_10")["data"]
    total = Counter(name for name, _ in places)
    assert [(entry["name"], entry["share"]) for entry in entries] == [("en", 3), ("ja", 2), ("code", 0)]
    assert last["consumed_tokens/en"] == 8 * total["en"] and entries[2]["offset"] == total["code"]


def test_swallows_recipe_has_16_percent_of_code():
    shares = shares_of(configuration.load(["configs/swallow_8b.py"]).data_dir)
    assert len(shares) == 7 and shares["data/swallow_code"] / sum(shares.values()) == pytest.approx(0.16, abs=2e-4)


def test_other_weights_are_refused_without_new_data(three, tmp_path):
    out = tmp_path / "out"
    go(configured(out, three(6, 3, 1), train_iters=1))
    go(configured(out, three(60, 30, 10), train_iters=2))  # the same shares
    for other in (three(60, 30, 11), three(6, 3, 0), str(tmp_path / "en")):
        said = fails(configured(out, other, train_iters=3))
        assert said, "other weights of the data are not noticed"
        why = f"data_dir={other}: not the training data of the checkpoint {out}/step_2, 6:en,3:code,1:ja; "
        assert said.startswith(why) and "--new_data=True" in said


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


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_sets_that_do_not_fit_together_are_refused(three, tmp_path):
    meta = Path(tmp_path / "ja/meta.json")
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"eot_id": 3}))
    with pytest.raises(UserError, match=r"data_dir=.*ja/train.bin has eot_id=3, but \S*/en/train.bin has 99"):
        Mixture(three(1, 1, 1), "train", 8, 100)
    copy = written(tmp_path / "copy", 0, SIZES["en"])
    with pytest.raises(UserError, match=r"data_dir=.*: en and copy have the same content; leave one out"):
        Mixture(f"{three(1, 1, 0)},3:{copy}", "train", 8, 100)
