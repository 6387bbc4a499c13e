"""Tests that any layout loads any other's checkpoint, that resuming changes no bit, and that damage is noticed."""

import itertools
import json
import os
import random
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import log
import train
from accounts.metrics import read_metrics
from config import Config, check
from data import Tokens
from errors import UserError
from parallel.comm import gather_objects
from parallel.mesh import Mesh
from recovery import checkpoint
from testing.tiny import CPU, configured, curve, fails, few, go, refusal, tensor_files, write_tokens
from testing.vocabularies import write_llamas
from tokenizer import COPY, load_tokenizer

# --- resuming -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tokens_dir, tmp_path_factory):
    """Return a function that trains ten steps on one process, once for equal fields, and returns the out_dir."""
    made = {}

    def run(data_dir=tokens_dir, **fields):
        key = data_dir, *fields.items()
        if key not in made:
            made[key] = tmp_path_factory.mktemp("straight")
            go(configured(made[key], data_dir, **fields))
        return made[key]

    return run


@pytest.fixture(scope="module")
def two_sets(tmp_path_factory):
    """Return the data_dir of a mixture."""
    folders = [write_tokens(tmp_path_factory.mktemp("set"), seed=k, val=106) for k in range(2)]
    return "2:{},1:{}".format(*folders)


@pytest.mark.parametrize(
    "ranks, fields",
    few(
        [
            (2, dict(tp=2, dtype="bf16")),
            (1, dict(dtype="fp64")),
            (2, dict(zero=2, dtype="bf16")),
            (4, dict(zero=3, dtype="fp16", initial_loss_scale=2.0**22, loss_scale_window=2, micro_batch_size=1)),
            (4, dict(tp=2, pp=2, schedule="zb-h1", sequence_parallel=True, dtype="fp32")),
            (2, dict(cp=2, dtype="fp64")),
        ]
    ),
    ids=str,
)
def test_a_run_is_repeated_bit_by_bit_also_with_stops(workers, tokens_dir, tmp_path, ranks, fields):
    """On CPUs: the numbers of each step, and index.json, which has the sums of all files."""
    found = []
    for stops in ((10,), (10,), (3, 6, 10)):
        for stop in stops:
            workers.run(ranks, go, configured(tmp_path / "out", tokens_dir, train_iters=stop, **fields))
        folder = (tmp_path / "out").rename(tmp_path / f"{len(found)}")
        found.append((repr(curve(folder)), (folder / "step_10/index.json").read_text()))
    assert found[0] == found[1] and found[0] == found[2]
    scales = [row[3] for row in curve(folder)]
    changes = [after - before for before, after in itertools.pairwise(scales)]
    assert len(scales) == 10 and (min(changes) < 0 < max(changes)) == (fields["dtype"] == "fp16")


@pytest.mark.parametrize(
    "before, after",
    few(
        [
            ((6, dict(tp=2, sequence_parallel=True, zero=2)), (3, dict(zero=3))),
            ((8, dict(pp=2, cp=2, zero=2, schedule="zb-h1")), (4, dict(cp=4))),
            ((4, dict(pp=2, zero=1)), (4, dict(pp=2, zero=1, order="pp-dp-tp"))),
            ((2, dict(zero=2, optimizer="muon")), (2, dict(tp=2, optimizer="muon"))),
            ((4, dict(zero=3, zero_copies=2, micro_batch_size=1)), (4, dict(cp=4, zero=1, zero_copies=2))),
            ((4, dict(zero=3, micro_batch_size=1)), (4, dict(pp=4, schedule="chimera"))),
            ((8, dict(pp=4, zero=3, schedule="chimera")), (4, dict(tp=2, zero=1))),
            ((4, dict(pp=2, schedule="interleaved", chunks=2, micro_batch_size=3)), (8, dict(tp=4, zero=2))),
        ]
    ),
    ids=str,
)
def test_any_layout_goes_on_from_any_other(workers, straight, two_sets, tmp_path, before, after):
    """A batch that grows, two data sets, and validations whose 13 samples leave some ranks without one at the end.

    Five steps in each of two layouts have the rows and the files of one process, to ten digits.
    """
    whole = dict(dtype="fp64", num_layers=3, optimizer=before[1].get("optimizer", "adamw"), data_dir=two_sets)
    whole |= dict(global_batch_size=24, rampup_batch_size="12,12,60", eval_interval=5)
    reference = straight(**whole)
    for (ranks, layout), stop in [(before, 5), (after, 10)]:
        config = configured(tmp_path, two_sets, train_iters=stop, **whole | layout)
        check(config, ranks)
        workers.run(ranks, go, config)
    many, one = (read_metrics(folder / "metrics.jsonl") for folder in (tmp_path, reference))
    assert [row["global_batch_size"] for row in one.values()] == [12] * 5 + [24] * 5
    for iteration, row in one.items():
        names = [key for key in row if key.startswith(("lm_loss", "grad_norm", "consumed", "epochs", "validation"))]
        assert len(names) == 8 + 3 * (iteration % 5 == 0)
        ours, theirs = ({name: each[name] for name in names} for each in (many[iteration], row))
        assert ours == pytest.approx(theirs, rel=1e-10)
    ours, theirs = tensor_files(tmp_path / "step_10"), tensor_files(reference / "step_10")
    assert ours.keys() == theirs.keys()
    for name in ours:
        a, b = np.frombuffer(ours[name]), np.frombuffer(theirs[name])
        assert np.abs(a - b).max() <= 1e-10 * max(1, np.abs(b).max()), name


@pytest.mark.parametrize("resume", ["none", "first"])
def test_a_command_that_is_started_again_goes_on_with_its_own_checkpoint(
    straight, tokens_dir, tmp_path, monkeypatch, resume
):
    """torchrun and Slurm give it the same arguments. Meanwhile another run's `keep` may have removed the first one."""
    first, out = tmp_path / "first/step_10", tmp_path / "out"
    shutil.copytree(straight(dtype="fp64") / "step_10", first)
    fields = dict(resume=resume if resume == "none" else str(first))
    for n, iterations in enumerate((11, 12)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(n * (resume == "none")))
        go(configured(out, tokens_dir, train_iters=iterations, **fields))
        shutil.rmtree(first, ignore_errors=True)
    assert checkpoint.all_steps(out) == [11, 12]
    earlier = configured(out, tokens_dir, resume=f"{out}/step_11", eval_only=True)  # in training it is refused
    assert checkpoint.to_resume(earlier, "bytes", None).name == "step_11"
    shutil.copytree(straight(dtype="fp64") / "step_10", first)  # an evaluation takes what it is told
    assert checkpoint.to_resume(configured(out, tokens_dir, resume=str(first), eval_only=True), "bytes", None) == first


def test_a_run_keeps_the_latest_checkpoints_and_an_imported_step_0(tokens_dir, tmp_path):
    # resume may name the new out_dir, as Megatron-LM's --save X --load X
    go(configured(tmp_path, tokens_dir, train_iters=1, resume=f"{tmp_path}/"))
    (tmp_path / "step_1").rename(tmp_path / "step_0")  # as if convert.py had written it
    imported = dict(resume=str(tmp_path / "step_0"), max_position_embeddings=8)  # as many as without this field
    go(configured(tmp_path, tokens_dir, save_interval=2, keep=2, **imported))
    assert checkpoint.find(tmp_path).name == "step_10"
    names = ["lock", "metrics.jsonl", "step_0", "step_10", "step_8"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_a_half_written_checkpoint_is_never_seen(tokens_dir, tmp_path, monkeypatch):
    """The disk is full in the middle of a save."""
    flushed, real = [], checkpoint.os.fsync

    def fsync(file):
        flushed.append(file)
        if len(flushed) > 20:
            raise OSError(28, "No space left on device")
        real(file)

    monkeypatch.setattr(checkpoint.os, "fsync", fsync)
    said = fails(configured(tmp_path, tokens_dir, save_interval=5))
    assert f"out_dir={tmp_path}: can't write the checkpoint: " in said and "No space left on device" in said
    assert checkpoint.find(tmp_path) is None
    monkeypatch.undo()
    shutil.copytree(tmp_path / "step_5.writing", tmp_path / "step_3.writing")  # this step is not saved again
    (tmp_path / "step_junk").mkdir()
    assert fails(configured(tmp_path, "nowhere")).startswith("data_dir=nowhere: ")
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_junk"], "the disk stays full"
    names, flush = [], checkpoint.flush
    monkeypatch.setattr(checkpoint, "flush", lambda path: (names.append(Path(path).name), flush(path)))
    go(configured(tmp_path, tokens_dir, train_iters=5))
    saved = {path.name for path in (tmp_path / "step_5").iterdir()}
    assert {*names} == saved | {"step_5.writing", tmp_path.name}, "after a power failure a file may be empty"
    assert names[-1] == tmp_path.name, "the new name must be on the disk"
    files = os.listdir("/dev/fd")
    flush(tmp_path)
    assert os.listdir("/dev/fd") == files, "a flushed file stays open"
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_5", "step_junk"]


# --- the same data --------------------------------------------------------------------------------------------------


def test_other_data_is_refused(straight, tokens_dir, tmp_path):
    out = shutil.copytree(straight(dtype="fp64"), tmp_path / "run")
    longer = write_tokens(tmp_path / "longer", train=4001)
    for other in (longer, write_tokens(tmp_path / "seed", seed=1)):
        with pytest.raises(
            UserError, match=f"^data_dir={other}: not the training data of .*new run with --initial_weights"
        ):
            go(configured(out, other, dtype="fp64", train_iters=12))
    moved = shutil.copytree(tokens_dir, tmp_path / "moved")
    go(configured(out, str(moved), dtype="fp64", train_iters=11))
    go(configured(out, longer, dtype="fp64", eval_only=True))  # another data set may be evaluated


# --- a loss that stays not finite -------------------------------------------------------------------------------------


def go_with_nan(config, iteration, patience):
    """Train. The weights of the head become nan before step `iteration`. Return the message."""
    step = train.train_step

    def breaking(run, batches):
        if run.counters.iteration + 1 == iteration:
            run.zero.buckets["head"].param.whole.fill_(torch.nan)
        return step(run, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", breaking)
        patch.setattr(log, "PATIENCE", patience)
        return fails(config)


@pytest.mark.parametrize(
    "iteration, save_interval, patience, steps",
    few(
        [
            (7, 2, 3, [4, 6]),
            (8, 3, 9, [3, 6]),  # at the end of the run
            (2, 5, 3, []),
        ]
    ),
)
def test_a_loss_that_stays_nan_stops_the_run_and_is_never_saved(
    workers, tokens_dir, tmp_path, iteration, save_interval, patience, steps
):
    config = configured(tmp_path, tokens_dir, save_interval=save_interval, dtype="fp64")
    for message in workers.run(2, go_with_nan, config, iteration, patience):
        assert "the last 3 are not finite" in message and str(tmp_path) in message
    assert checkpoint.all_steps(tmp_path) == steps
    if steps:
        assert fails(config) is None and all(np.isfinite(row[0]) for row in curve(tmp_path))


# --- a new run from weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, layout", few([(1, {}), (4, dict(tp=2, zero=2)), (3, dict(zero=3, optimizer="sgd"))]))
def test_weights_begin_a_new_run(workers, straight, tokens_dir, tmp_path, ranks, layout):
    """Its first loss is that of the weights. Counters, moments, seed and optimizer are new. It resumes as usual."""
    old, new = straight(dtype="fp64"), tmp_path / "new"
    fields = dict(dtype="fp64", dropout=0.0, seed=5) | layout
    workers.run(ranks, go, configured(new, tokens_dir, train_iters=2, initial_weights=str(old), **fields))
    gone = str(tmp_path / "removed")  # the old weights are not needed any more
    workers.run(ranks, go, configured(new, tokens_dir, train_iters=4, initial_weights=gone, **fields))
    index = checkpoint.read_index(new / "step_4")
    assert index["counters"] == {"iteration": 4, "consumed_samples": 48, "updates": 4}
    run = train.build_run(configured(tmp_path, tokens_dir, dtype="fp64"), Mesh(), CPU)
    checkpoint.load_checkpoint(old / "step_10", run.model, run.zero, moments=False)
    run.zero.parameters_from_master()
    assert all(not moment.any() for b in run.zero.in_order for moment in b.moments), "the moments come along"
    ids = Tokens(tokens_dir, "train", 8, 100).batch(np.arange(12), seed=5)
    losses = torch.cat([*run.executor.evaluate([run.model.micro_batch(ids[:, :-1], ids[:, 1:])]).values()])
    assert curve(new)[0][0] == pytest.approx(losses.mean().item(), rel=1e-10)


def test_a_run_by_epochs_may_go_on_from_any_checkpoint(straight, tokens_dir, tmp_path):
    """Then train_iters follows from the data, after `to_resume`."""
    fields = dict(resume=str(straight(dtype="fp64") / "step_10"), train_iters=3, train_epochs=5.0)
    assert checkpoint.to_resume(configured(tmp_path, tokens_dir, dtype="fp64", **fields), "bytes", None)


def test_only_a_table_of_positions_limits_the_samples(straight, tokens_dir, tmp_path):
    index = checkpoint.read_index(straight(dtype="fp64") / "step_10")
    del index["shapes"]["embedding.position"]
    checkpoint.refuse_other_model(configured(tmp_path, tokens_dir, seq_length=16), "bytes", "step_10", index, [])


@pytest.mark.parametrize("name, value", [("norm_epsilon", 1e-6), ("rotary_base", 5e5)])
def test_a_run_resumes_with_the_numbers_of_its_layers(name, value):
    index = {"config": vars(Config(model="llama")), "tokenizer": "bytes", "shapes": {}}
    other, names = Config(**{"model": "llama", name: value}), checkpoint.MUST_MATCH
    assert f"{name}={value}: " in refusal(checkpoint.refuse_other_model, other, "bytes", "step_10", index, names)


@pytest.mark.slow
def test_llamas_weights_can_get_longer_samples_and_another_rotary_base(straight, tokens_dir, tmp_path):
    old = str(straight(dtype="fp64", model="llama"))
    fields = dict(model="llama", initial_weights=old, seq_length=16, rotary_base=500000.0, train_iters=1)
    go(configured(tmp_path, tokens_dir, **fields))
    assert len(curve(tmp_path)) == 1


# --- damage -----------------------------------------------------------------------------------------------------------


def flipped(content, place, bit):
    damaged = bytearray(content)
    damaged[place] ^= 1 << bit
    return bytes(damaged)


def flip(path, place, bit):
    path.write_bytes(flipped(path.read_bytes(), place, bit))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An out_dir after three steps, and its data set. Both have a vocabulary in files."""
    data_dir = write_tokens(tmp_path_factory.mktemp("data"))
    meta = write_llamas(Path(data_dir), "merges") / "meta.json"
    meta.write_text(meta.read_text().replace("bytes", load_tokenizer(data_dir).name))
    out = tmp_path_factory.mktemp("trained")
    go(configured(out, data_dir, train_iters=3, num_layers=3))
    return out, data_dir


def load_each(config, damages):
    """Return the messages of loading a checkpoint with one damaged file each time.

    damages: [(name, content)]; None removes the file.
    """
    run = train.build_run(config, Mesh.of(config), CPU)
    said, folder = [], checkpoint.find(config.out_dir)

    def write(name, content):
        gather_objects(None, run.mesh.world)
        if run.mesh.rank == 0 and content is None:
            (folder / name).unlink()
        elif run.mesh.rank == 0:
            (folder / name).write_bytes(content)
        gather_objects(None, run.mesh.world)

    for name, damaged in damages:
        right = (folder / name).read_bytes()
        write(name, damaged)
        try:
            train.restore(run, folder)
            said.append(None)
        except UserError as error:
            said.append(str(error))
        write(name, right)
    train.restore(run, folder)  # undamaged again
    return said


@pytest.mark.parametrize(
    "ranks, layout", few([(4, dict(tp=2, zero=1)), (1, {}), (2, dict(zero=3)), (4, dict(pp=2, zero=2))]), ids=str
)
def test_a_flipped_bit_another_size_or_a_missing_file_is_named_on_every_rank(workers, trained, tmp_path, ranks, layout):
    folder = shutil.copytree(trained[0], tmp_path / "run") / "step_3"
    config = configured(tmp_path / "run", trained[1], num_layers=3, **layout)
    check(config, ranks)
    dice, damages = random.Random(str(layout)), []
    files = json.loads((folder / "index.json").read_text())["files"].keys()
    assert {*files, "index.json"} == {path.name for path in folder.iterdir()}
    for name in ["index.json", COPY[0], *dice.sample(sorted(files - {*COPY}), 8)]:
        content = (folder / name).read_bytes()
        places = 0, dice.randrange(len(content)), len(content) - 1
        damages += [(name, flipped(content, place, dice.randrange(8))) for place in places]
    damages += [(COPY[0], None), (name, None), (name, content[:-8]), (name, content + bytes(8))]
    sizes = [f"it has {len(content) + more:,} bytes instead of {len(content):,}; " for more in (-8, 8)]
    for said in workers.run(ranks, load_each, config, damages):
        for text, (damaged, content) in zip(said, damages, strict=True):
            why = "No such file or directory" if content is None else "damaged"
            assert text and text.startswith(f"{folder}/{damaged}: {why}"), (text, damaged)
        assert all(size in text for size, text in zip(sizes, said[-2:], strict=True)), said[-2:]


def test_the_sum_of_a_long_file_is_that_of_all_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PART", 100)
    content = random.Random(0).randbytes(250)
    (tmp_path / "long").write_bytes(content)
    assert checkpoint.sums_of(tmp_path, ["long"]) == {"long": f"{zlib.crc32(content):08x}"}
