"""Test checkpoints: any layout loads any other's, resuming changes no bit, an incomplete checkpoint is never used."""

import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import log
import train
from config import Config, check
from conftest import write_tokens
from errors import UserError
from generate import load_model
from parallel import checkpoint
from parallel.layout import Piece
from parallel.mesh import Mesh
from parallel.tensor import ParamSpec
from test_layouts import TINY, tiny_config

CPU = torch.device("cpu")


# --- the arithmetic of runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, tp_dim", [((3, 8, 4), 1), ((8, 4), 0), ((6, 8), 1), ((3, 8), 1), ((7,), None)])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("cuts", [1, 2, 3, 5])
def test_runs_say_where_every_element_of_a_part_of_a_part_lies(shape, tp_dim, tp, cuts):
    """Cut a tensor over tp, flatten each piece and cut it again at any element. Copying the `runs` must rebuild it."""
    spec = ParamSpec("u.w", shape, tp_dim)
    whole = torch.arange(np.prod(shape)).view(shape)
    rebuilt = torch.full((whole.numel(),), -1)
    for rank in range(tp if tp_dim is not None else 1):
        local = whole if tp_dim is None else whole.chunk(tp, tp_dim)[rank]
        local = local.flatten()
        edges = [len(local) * i // cuts for i in range(cuts + 1)]
        for begin, end in itertools.pairwise(edges):
            for at, offset, length in checkpoint.runs(spec, begin, end, rank, tp):
                assert begin <= at and at + length <= end and length > 0
                assert (rebuilt[offset : offset + length] == -1).all(), "written twice"
                rebuilt[offset : offset + length] = local[at : at + length]
    assert torch.equal(rebuilt, whole.flatten())


@pytest.mark.parametrize(
    "shape, tp_dim, tp", [((40, 64), 1, 4), ((3, 8, 4), 1, 2), ((7000, 3), 1, 3), ((9000, 70), 0, 2)]
)
@pytest.mark.parametrize("block", [4, 64, 1 << 17])
def test_groups_of_runs_have_every_byte_in_its_place(monkeypatch, shape, tp_dim, tp, block):
    """A group has many short runs, or a part of a long one. Its bytes are a view, so reading fills the tensor."""
    monkeypatch.setattr(checkpoint.checksum, "BLOCK", block)
    spec = ParamSpec("u.w", shape, tp_dim)
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    for rank in range(tp):
        local = np.ascontiguousarray(np.split(whole, tp, tp_dim)[rank]).ravel()
        for begin, end in [(0, len(local)), (len(local) // 3, len(local)), (5, len(local) - 1), (7, 7)]:
            piece, mine = Piece(spec, begin, end, 0), local[begin:end].copy()
            found, data = np.zeros(0, np.uint8), whole.view(np.uint8).ravel()
            for rows, offset, stride in checkpoint.groups(piece, mine, SimpleNamespace(rank=rank, size=tp)):
                assert rows.nbytes <= 8 * block and np.shares_memory(rows, mine)
                there = [data[offset + i * stride :][: rows.shape[1]] for i in range(len(rows))]
                assert (rows == np.stack(there)).all()
                found = np.append(found, rows)
            assert (found == mine.view(np.uint8)).all()


# --- resuming -------------------------------------------------------------------------------------------------------


def configured(out_dir, tokens_dir, **fields):
    fields = {"data_dir": tokens_dir, "out_dir": str(out_dir), "log_interval": 1, "eval_iters": 1} | fields
    return Config(**{**TINY, "micro_batch_size": 2, "dropout": 0.1, "lr_decay_iters": 10, "train_iters": 10} | fields)


def go(config):
    train.run_training(config, Mesh(config.tp, config.pp, timeout=60.0), CPU)


def curve(out_dir):
    rows = log.read_metrics(Path(out_dir) / "metrics.jsonl")
    fields = "lm_loss", "grad_norm", "lr", "loss_scale", "consumed_samples"
    return [[row[field] for field in fields] for row in rows.values()]


def arrays(folder):
    """Return {file: bytes} of a checkpoint's tensors."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "index.json"}


@pytest.fixture(scope="module")
def straight(workers, tokens_dir, tmp_path_factory):
    """Return a function that trains ten steps without a stop and returns the out_dir. Equal runs are made only once."""
    made = {}

    def run(ranks=1, **fields):
        key = ranks, tuple(fields.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("straight")
            workers.run(ranks, go, configured(made[key], tokens_dir, **fields))
        return made[key]

    return run


@pytest.mark.parametrize("dtype", ["fp64", "bf16", "fp16"])
@pytest.mark.parametrize("ranks, tp, parts", [(1, 1, (5, 10)), (1, 1, (3, 6, 10)), (4, 2, (3, 6, 10))])
def test_resuming_changes_no_bit(workers, straight, tokens_dir, tmp_path, ranks, tp, parts, dtype):
    """Train 10 steps, 5 + 5 steps and 3 + 3 + 4 steps. All weights, moments and logged numbers must be equal.

    fp16 starts with a loss scale that overflows a few times, and its window is short. So the scaler's counters change.
    """
    fields = dict(tp=tp, dtype=dtype)
    if dtype == "fp16":
        fields |= dict(initial_loss_scale=2.0**26, loss_scale_window=2, hysteresis=2)
    reference = straight(ranks, **fields)
    for stop in parts:
        workers.run(ranks, go, configured(tmp_path, tokens_dir, **fields, train_iters=stop))
    assert repr(curve(tmp_path)) == repr(curve(reference)) and len(curve(tmp_path)) == 10
    assert arrays(tmp_path / "step_10") == arrays(reference / "step_10")
    if dtype == "fp16":
        scales = [row[3] for row in curve(reference)]
        assert min(scales) < scales[0] and any(b > a for a, b in itertools.pairwise(scales))


@pytest.mark.parametrize(
    "before, after",
    [
        ((1, {}), (4, dict(tp=2, sequence_parallel=True))),
        ((4, dict(tp=2, sequence_parallel=True)), (3, dict(zero=3))),
        ((8, dict(tp=2, pp=2, zero=2, schedule="zb-h1")), (4, dict(zero=1))),
        ((4, dict(zero=3)), (4, dict(pp=4, schedule="chimera"))),
        ((8, dict(pp=4, zero=3, schedule="chimera")), (4, dict(pp=2, zero=2, schedule="interleaved", chunks=2))),
        ((4, dict(pp=2, schedule="interleaved", chunks=2, zero=1)), (8, dict(tp=4, zero=3))),
        ((4, dict(pp=2, tp=2, sequence_parallel=True)), (1, {})),
    ],
    ids=str,
)
def test_any_layout_goes_on_from_any_other(workers, straight, tokens_dir, tmp_path, before, after):
    """Train five steps in each of two layouts in float64. The curve must equal that of one process to ten digits."""
    reference = straight(1, dtype="fp64", num_layers=3)
    for (ranks, layout), stop in [(before, 5), (after, 10)]:
        config = configured(tmp_path, tokens_dir, train_iters=stop, num_layers=3, **layout)
        check(config, ranks)
        workers.run(ranks, go, config)
    for ours, theirs in zip(curve(tmp_path), curve(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    ours, theirs = arrays(tmp_path / "step_10"), arrays(reference / "step_10")
    assert ours.keys() == theirs.keys()
    for name in ours:
        a, b = np.frombuffer(ours[name]), np.frombuffer(theirs[name])
        assert np.abs(a - b).max() <= 1e-10 * max(1, np.abs(b).max()), name


def test_files_are_whole_tensors(straight):
    """Files have raw values in C order, and the index has the shapes, so any program can read them."""
    folder = straight(4, tp=2, dtype="bf16") / "step_10"
    index = json.loads((folder / "index.json").read_text())
    assert index["dtype"] == "float32"
    assert set(index["shapes"]) == set(tiny_specs())
    for name, shape in index["shapes"].items():
        for file in (name, f"{name}.moment0", f"{name}.moment1"):
            values = np.fromfile(folder / file, "<f4")
            assert values.size == np.prod(shape) and np.isfinite(values).all()
    ln = np.fromfile(folder / "block0.ln1.weight", "<f4")
    assert np.abs(ln - 1).max() < 0.5 and ln.std() > 0


def tiny_specs():
    from model import GPT

    return GPT(tiny_config(1), Mesh().tp).specs()


def test_what_contradicts_the_checkpoint_is_refused_by_name(straight, tokens_dir, tmp_path):
    out = shutil.copytree(straight(1, dtype="fp64"), tmp_path / "run")
    other = dict(num_layers=3, hidden_size=32, num_attention_heads=4, seq_length=4, vocab_size=51, seed=1)
    for name, value in (other | dict(optimizer="sgd", activation="relu")).items():
        with pytest.raises(UserError, match=rf"^{name}={value}: the checkpoint .*/step_10 has {name}="):
            go(configured(out, tokens_dir, train_iters=12, **{name: value}))
    other_tokens = write_tokens(tmp_path / "gpt2", tokenizer="gpt2")
    with pytest.raises(UserError, match=r"^data_dir=.*: its tokenizer is gpt2, but the checkpoint .* has bytes"):
        go(configured(out, other_tokens, train_iters=12))


def test_an_older_checkpoint_has_no_activation_and_was_gelu(straight, tokens_dir, tmp_path):
    out = shutil.copytree(straight(1, dtype="fp64"), tmp_path / "run")
    index = json.loads((out / "step_10" / "index.json").read_text())
    del index["config"]["activation"], index["sums"], index["crc32"]
    (out / "step_10" / "index.json").write_text(json.dumps(index))
    assert checkpoint.to_resume(configured(out, tokens_dir), "bytes") == out / "step_10"
    with pytest.raises(UserError, match=r"^activation=relu: the checkpoint .* has activation=gelu"):
        checkpoint.to_resume(configured(out, tokens_dir, activation="relu"), "bytes")


def test_where_to_resume_from(straight, tokens_dir, tmp_path, capsys):
    reference = straight(1, dtype="fp64")
    with pytest.raises(UserError, match=r"^resume=.*nowhere: there is no checkpoint in"):
        go(configured(tmp_path / "a", tokens_dir, resume=str(tmp_path / "nowhere")))
    go(configured(tmp_path / "a", tokens_dir, resume=str(reference / "step_10"), train_iters=11))
    assert checkpoint.all_steps(tmp_path / "a") == [11]
    with pytest.raises(UserError, match=r"^resume=none: .* contains step_11; remove it, or use another --out_dir"):
        go(configured(tmp_path / "a", tokens_dir, resume="none"))
    capsys.readouterr()
    go(configured(tmp_path / "a", tokens_dir, train_iters=11))
    assert "nothing to do" in capsys.readouterr().out


def test_what_is_later_than_the_resumed_step_is_not_left_for_the_next_run_to_find(tokens_dir, tmp_path):
    """To resume from step 2 while steps 4 and 6 exist is an error: the next run would resume from step 6."""
    go(configured(tmp_path, tokens_dir, save_interval=2, train_iters=6, keep=0))
    back = configured(tmp_path, tokens_dir, resume=str(tmp_path / "step_2"), train_iters=3, keep=2)
    with pytest.raises(UserError, match=r"^resume=.*step_2: .* contains the later step_6; remove the later check"):
        go(back)
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"step_{step}")
    go(back)
    assert checkpoint.all_steps(tmp_path) == [2, 3]


def test_an_imported_step_0_is_never_removed(tokens_dir, tmp_path):
    go(configured(tmp_path, tokens_dir, train_iters=1))
    (tmp_path / "step_1").rename(tmp_path / "step_0")  # as if convert.py had written it
    go(configured(tmp_path, tokens_dir, save_interval=2, keep=1, resume=str(tmp_path / "step_0")))
    assert checkpoint.all_steps(tmp_path) == [0, 10]


def test_keeps_the_latest(tokens_dir, tmp_path):
    go(configured(tmp_path, tokens_dir, save_interval=2, keep=2))
    assert checkpoint.all_steps(tmp_path) == [8, 10]
    assert checkpoint.find(tmp_path).name == "step_10"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "metrics.jsonl", "step_10", "step_8"]


def test_a_half_written_checkpoint_is_never_seen(tokens_dir, tmp_path, monkeypatch):
    """The disk is full in the middle of a save. The error is one line, and the incomplete checkpoint is removed."""
    real, written = checkpoint.os.pwrite, []

    def pwrite(fd, data, offset):
        written.append(len(data))
        if len(written) > 120:
            raise OSError(28, "No space left on device")
        return real(fd, data[: max(1, len(data) // 2)], offset)  # every call writes only half

    monkeypatch.setattr(checkpoint.os, "pwrite", pwrite)
    monkeypatch.setattr(checkpoint, "_write_arrays", lambda *a, f=checkpoint._write_arrays: (f(*a), written.clear())[0])
    with pytest.raises(UserError, match=r"out_dir=.*: can't write the checkpoint: .*No space left on device"):
        go(configured(tmp_path, tokens_dir, save_interval=5))
    assert not list(tmp_path.glob("*.writing")) and checkpoint.find(tmp_path) is None


def test_remains_of_a_crash_are_passed_over(straight, tokens_dir, tmp_path):
    out = shutil.copytree(straight(1, dtype="fp64"), tmp_path / "run")
    shutil.copytree(out / "step_10", out / "step_12.writing")
    shutil.copytree(out / "step_10", out / "step_11.writing")  # of a step that is not saved again
    shutil.copytree(out / "step_10", out / "step_8.removing")
    (out / "step_junk").mkdir()
    assert checkpoint.find(out).name == "step_10"
    go(configured(out, tokens_dir, train_iters=12))
    assert sorted(p.name for p in out.glob("step_*")) == ["step_10", "step_12", "step_junk"]


# --- the same run -----------------------------------------------------------------------------------------------------


def cut_short(config):
    """Train until just after the checkpoint of step 5, then stop as a killed run does."""
    save = checkpoint.save

    def killing(*arguments, **options):
        save(*arguments, **options)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "save", killing)
        go(config)


MEANS = "lm_loss grad_norm lr loss_scale skipped_iterations nan_iterations consumed_samples global_batch_size".split()


def means(out_dir):
    rows = log.read_metrics(Path(out_dir) / "metrics.jsonl")
    return {iteration: [repr(row[name]) for name in MEANS] for iteration, row in rows.items()}


@pytest.mark.parametrize("dtype", ["fp64", "fp16"])
def test_the_first_means_after_a_resume_are_those_of_an_undisturbed_run(tokens_dir, tmp_path, dtype):
    """A line covers 4 iterations. The run is killed after the save of step 5 or 6, or ends at 6 and is made longer.

    In fp16 the first updates overflow and are skipped, so the sums of skipped iterations are compared, too.
    """
    fields = dict(log_interval=4, dtype=dtype, initial_loss_scale=2.0**26, eval_interval=7)
    go(configured(tmp_path / "straight", tokens_dir, **fields))
    expected = means(tmp_path / "straight")
    assert list(expected) == [4, 7, 8, 10]
    cut_short(configured(tmp_path / "five", tokens_dir, save_interval=5, **fields))
    cut_short(configured(tmp_path / "six", tokens_dir, save_interval=6, **fields))
    go(configured(tmp_path / "longer", tokens_dir, **fields, train_iters=6))
    for name in ("five", "six", "longer"):
        go(configured(tmp_path / name, tokens_dir, **fields))
        found = means(tmp_path / name)
        assert found.pop(6, None) is None or name == "longer"
        assert found == expected


def test_a_second_resume_inside_one_interval(tokens_dir, tmp_path):
    fields = dict(log_interval=10, save_interval=3)
    go(configured(tmp_path / "straight", tokens_dir, **fields))
    cut_short(configured(tmp_path / "twice", tokens_dir, **fields))
    cut_short(configured(tmp_path / "twice", tokens_dir, **fields))
    assert len(checkpoint.read_index(tmp_path / "twice" / "step_6")["interval"]) == 6
    go(configured(tmp_path / "twice", tokens_dir, **fields))
    assert means(tmp_path / "twice") == means(tmp_path / "straight")


def test_other_data_is_refused_by_name_or_taken_with_a_flag(straight, tokens_dir, tmp_path, capsys):
    out = shutil.copytree(straight(1, dtype="fp64"), tmp_path / "run")
    longer = write_tokens(tmp_path / "longer", train=4001)
    for other, tokens in ((longer, 4001), (write_tokens(tmp_path / "seed", seed=1), 4000)):
        config = configured(out, other, dtype="fp64", train_iters=12)
        with pytest.raises(UserError) as error:
            go(config)
        start = (
            rf"data_dir={other}: not the training data of the checkpoint .*/step_10: {tokens} tokens of uint16 with "
        )
        assert re.match(start, str(error.value)) and "set --new_data=True" in str(error.value)
    capsys.readouterr()
    go(configured(out, longer, dtype="fp64", train_iters=11, new_data=True))
    assert f"new_data=True: the training data is not that of {out}/step_10: 4001 tokens" in capsys.readouterr().out
    go(configured(out, longer, dtype="fp64", train_iters=12))  # step_11 was trained on it
    assert "new_data" not in capsys.readouterr().out
    go(configured(out, tokens_dir, dtype="fp64", eval_only=True))  # another data set may be evaluated


def test_moved_data_is_the_same_data(straight, tokens_dir, tmp_path):
    out = shutil.copytree(straight(1, dtype="fp64"), tmp_path / "run")
    moved = shutil.copytree(tokens_dir, tmp_path / "moved")
    meta = json.loads((moved / "meta.json").read_text()) | {"made_from": {"input": {"files": 3}}}
    (moved / "meta.json").write_text(json.dumps(meta))
    go(configured(out, str(moved), dtype="fp64", train_iters=12))
    assert checkpoint.read_index(out / "step_12")["data"]["made_from"] == meta["made_from"]


@pytest.mark.parametrize("place", [0, 4094, 3904, 7998])
def test_the_identity_of_the_data_sees_its_first_and_last_page(tokens_dir, tmp_path, place):
    moved = shutil.copytree(tokens_dir, tmp_path / "moved")
    before = data.identity(data.Tokens(moved, "train", 8, 50))
    content = bytearray((moved / "train.bin").read_bytes())
    content[place] ^= 1
    (moved / "train.bin").write_bytes(content)
    after = data.identity(data.Tokens(moved, "train", 8, 65536))
    assert {name for name in before if before[name] != after[name]} == {"crc32"}


# --- a loss that stays not finite -------------------------------------------------------------------------------------


def go_with_nan(config, iteration):
    """Train. The weights of the head become nan before step `iteration`. Return the message."""
    step = train.train_step

    def breaking(run, *arguments):
        if run.counters.iteration + 1 == iteration:
            run.zero.buckets["head"].param.fill_(torch.nan)
        return step(run, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", breaking)
        return fails(config)


@pytest.mark.parametrize(
    "iteration, save_interval, keep, good, steps",
    [
        (7, 2, 1, 4, [4, 8]),  # no loss followed the checkpoint of step 6
        (8, 2, 2, 6, [6, 8]),
        (8, 3, 1, 6, [6, 9]),
        (5, 1, 1, 3, [3, 6]),
        (2, 5, 2, None, []),
    ],
)
def test_a_loss_that_stays_nan_stops_the_run_and_names_the_last_good_checkpoint(
    workers, tokens_dir, tmp_path, iteration, save_interval, keep, good, steps
):
    fields = dict(save_interval=save_interval, keep=keep, stop_after_nan=3, train_iters=30, dtype="fp64")
    for said in workers.run(2, go_with_nan, configured(tmp_path, tokens_dir, **fields), iteration):
        start = f"lm_loss is not finite since iteration {iteration} (3 iterations)"
        if good is None:
            assert said == f"{start}, and no loss after a checkpoint of this run was finite; use other values (--lr)"
        else:
            place = f"{tmp_path}/step_{good}"
            assert said.startswith(f"{start}. The last checkpoint with a finite loss after it is {place}; to resume")
    assert checkpoint.all_steps(tmp_path) == steps
    if good is not None:
        config = configured(tmp_path / "new", tokens_dir, resume=str(tmp_path / f"step_{good}"), dtype="fp64")
        assert fails(config) is None and all(np.isfinite(row[0]) for row in curve(tmp_path / "new"))


def test_a_nan_that_passes_and_a_limit_of_0_stop_nothing(tokens_dir, tmp_path):
    assert go_with_nan(configured(tmp_path / "a", tokens_dir, stop_after_nan=4), 8) is None  # 8, 9, 10
    assert go_with_nan(configured(tmp_path / "b", tokens_dir, stop_after_nan=0), 2) is None
    assert "at least" not in (go_with_nan(configured(tmp_path / "c", tokens_dir, stop_after_nan=3), 8) or "at least")


def test_the_last_good_checkpoint_is_known_after_a_resume(tokens_dir, tmp_path):
    """The checkpoints of steps 8 and 10 have nan weights. The resumed run keeps and names step 4."""
    fields = dict(save_interval=2, keep=1, stop_after_nan=5)
    assert go_with_nan(configured(tmp_path, tokens_dir, **fields), 7) is None
    assert checkpoint.all_steps(tmp_path) == [4, 10]
    said = fails(configured(tmp_path, tokens_dir, **fields, train_iters=30))
    assert "not finite since iteration 11 (5 iterations)" in said and f"after it is {tmp_path}/step_4;" in said
    assert 4 in checkpoint.all_steps(tmp_path)


# --- damage -----------------------------------------------------------------------------------------------------------


def fails(config):
    try:
        go(config)
    except UserError as error:
        assert error.agreed, "every rank would print the line"
        return str(error)


@pytest.mark.parametrize("layout", [dict(zero=1), dict(zero=2, tp=2)], ids=str)
def test_damage_that_one_rank_sees_stops_all(workers, straight, tokens_dir, tmp_path, layout):
    """A file lacks its last bytes. Only the rank that owns these bytes notices it. All ranks must stop."""
    out = shutil.copytree(straight(1, dtype="fp64"), tmp_path / "run")
    file = out / "step_10" / "block0.qkv.weight"
    file.write_bytes(file.read_bytes()[:-8])
    for said in workers.run(4, fails, configured(out, tokens_dir, train_iters=12, **layout)):
        assert said.endswith("block0.qkv.weight: 6136 bytes instead of 6144: damaged")


def test_a_damaged_checkpoint_is_named(straight, tokens_dir, tmp_path):
    out = shutil.copytree(straight(1, dtype="fp64"), tmp_path / "run")
    file = out / "step_10" / "block0.qkv.weight"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"block0.qkv.weight: 6136 bytes instead of 6144: damaged"):
        go(configured(out, tokens_dir, train_iters=12))
    file.unlink()
    with pytest.raises(UserError, match=r"block0.qkv.weight.*No such file"):
        go(configured(out, tokens_dir, train_iters=12))
    (out / "step_10" / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"step_10: not a checkpoint"):
        go(configured(out, tokens_dir, train_iters=12))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: {}, lambda index: [], lambda index: None, lambda index: index | {"dtype": "foo"},
        lambda index: index | {"dtype": []}, lambda index: {k: v for k, v in index.items() if k != "shapes"},
        lambda index: index | {"shapes": [1]}, lambda index: index | {"shapes": {"word.weight": None}},
        lambda index: index | {"shapes": {"word.weight": [-1, 16]}}, lambda index: index | {"shapes": {}},
        lambda index: index | {"counters": {}}, lambda index: index | {"counters": index["counters"] | {"more": 1}},
        lambda index: index | {"counters": index["counters"] | {"updates": 1e300}},
        lambda index: index | {"counters": index["counters"] | {"iteration": 10**30}},
        lambda index: index | {"loss_scale": 1.0}, lambda index: index | {"loss_scale": {"scale": "a"}},
        lambda index: index | {"config": 3}, lambda index: index | {"config": None},
        lambda index: index | {"tokenizer": 1}, lambda index: index | {"data": []},
        lambda index: index | {"interval": [[1]]}, lambda index: index | {"interval": 3},
        lambda index: index | {"config": index["config"] | {"num_layers": "two"}},
    ],
)  # fmt: skip
def test_json_that_is_no_index_is_one_line(straight, tokens_dir, tmp_path, change):
    """Without sums, as an older version wrote it. A file with sums would not pass its CRC-32."""
    out = shutil.copytree(straight(1, dtype="fp64"), tmp_path / "run")
    index = json.loads((out / "step_10" / "index.json").read_text())
    del index["sums"], index["copies"], index["crc32"]
    (out / "step_10" / "index.json").write_text(json.dumps(change(index)))
    for call in (lambda: go(configured(out, tokens_dir, train_iters=12)), lambda: load_model(out, CPU)):
        with pytest.raises(UserError) as error:
            call()
        assert re.search("step_10|the checkpoint's", str(error.value)) and "\n" not in str(error.value)
