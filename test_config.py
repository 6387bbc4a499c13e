"""The configuration: files, command line, and one clear line for every mistake."""

import dataclasses

import pytest

import config as configuration
from config import Config
from errors import UserError
from parallel.optimizer import RULES
from parallel.schedules import SCHEDULES


def test_a_file_assigns_fields_and_the_command_line_has_the_last_word(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import math\nhidden_size = 32 * 2\nlr = 1  # an int is a fine float\n_private = object()\n")
    c = configuration.load([str(file), "--lr=0.5", "--lr=0.25", "--sequence_parallel=True", "--ledger", "--seed=7"])
    assert (c.hidden_size, c.lr, c.sequence_parallel, c.ledger, c.seed) == (64, 0.25, True, True, 7)
    assert c.out_dir == "out/mine" and configuration.load([str(file), "--out_dir=x"]).out_dir == "x"


def test_without_a_file_it_is_tiny():
    assert configuration.load([]).out_dir == "out/tiny" and configuration.load(["--tp=2"]).tp == 2


def test_epochs_on_the_command_line_stand_for_the_files_iterations():
    c = configuration.load(["--train_epochs=2"])
    assert (c.train_iters, c.train_epochs) == (0, 2.0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hiden_size=3"], "--hiden_size: there is no such field; the nearest is hidden_size"),
        (["--micro-batch-size=3"], "--micro-batch-size: there is no such field; the nearest is micro_batch_size"),
        (["--lr=fast"], "--lr=fast: should be float"),
        (["--num_layers=2.5"], "--num_layers=2.5: should be int"),
        (["--ledger=yes"], "--ledger=yes: should be True or False"),
        (["--lr"], "--lr wants a value: --lr=0.001"),
        (["configs/none.py"], "no configuration file configs/none.py (there are: configs/codeparrot_110m.py"),
        (["configs/tiny.py", "configs/gpt2_124m.py"], "one configuration file, please"),
        (["--lr", "0.1"], "no configuration file 0.1"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    with pytest.raises(UserError) as error:
        configuration.load(arguments)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("hiden_size = 3", "hiden_size: there is no such field; the nearest is hidden_size"),
        ("num_layers = 2.0", "num_layers=2.0 should be int"),
        ("tp = True", "tp=True should be int"),
        ("lr = '1e-3'", "lr='1e-3' should be float"),
        ("lr = \n", ":1: SyntaxError"),
        ("\n\nlr = x", ":3: NameError: name 'x' is not defined"),
    ],
)
def test_mistakes_in_a_file(tmp_path, text, message):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        configuration.load([str(file)])
    assert message in str(error.value) and str(file) in str(error.value)


@pytest.mark.parametrize(
    "world, fields, message",
    [
        (1, dict(zero=4), "zero=4: should be one of 0, 1, 2, 3"),
        (3, dict(pp=2), "the number of processes=3 is not a multiple of tp * pp=2"),
        (1, dict(schedule="zb-h3"), "schedule=zb-h3: should be one of gpipe, 1f1b"),
        (1, dict(chunks=2), "chunks=2: 1f1b does not cut a rank's share into chunks; interleaved and zb-v do"),
        (2, dict(pp=2, chunks=2, schedule="interleaved", micro_batch_size=8), "microbatches=1"),
        (8, dict(pp=8), "num_layers=4: too few for the 8 parts of pp=8, chunks=1; should be at least 6"),
        (1, dict(rampup_batch_size="8"), "rampup_batch_size=8: should be start,increment,samples, as 16,8,30000"),
        (1, dict(rampup_batch_size="16,8,100"), "rampup_batch_size=16,8,100: should be start,increment,samples"),
        (1, dict(rampup_batch_size="2,4,100"), "the growth of global_batch_size=6 is not a multiple of the increment"),
        (1, dict(rampup_batch_size="4,4,100"), "global_batch_size=4 is not a multiple of micro_batch_size * dp=8"),
        (1, dict(optimizer="adam2"), f"optimizer=adam2: should be one of {', '.join(RULES)}"),
        (1, dict(kernels="cuda"), "kernels=cuda: should be one of auto, triton, torch"),
        (1, dict(dtype="fp8"), "dtype=fp8: should be one of auto, fp64, fp32, bf16, fp16"),
        (1, dict(hidden_size=130), "hidden_size=130 is not a multiple of num_attention_heads=4"),
        (8, dict(tp=8), "num_attention_heads=4 is not a multiple of tp=8"),
        (3, dict(tp=2), "the number of processes=3 is not a multiple of tp * pp=2"),
        (1, dict(tp=2), "the number of processes=1 is not a multiple of tp * pp=2"),
        (4, dict(), "global_batch_size=8 is not a multiple of micro_batch_size * dp=32"),
        (2, dict(tp=2, sequence_parallel=True, seq_length=33), "seq_length=33 is not a multiple of tp=2"),
        (5, dict(tp=5, num_attention_heads=5, hidden_size=100), "padded vocab_size=50304 is not a multiple of tp=5"),
        (1, dict(train_epochs=1.0), "train_iters=10, train_epochs=1.0: say one of the two"),
        (1, dict(train_iters=0), "train_iters=0, train_epochs=0.0: say one of the two"),
        (1, dict(lr=-1.0), "lr=-1.0: should be zero or more"),
        (1, dict(lr=float("nan")), "lr=nan: should be zero or more"),
        (1, dict(num_layers=0), "num_layers=0: should be positive"),
        (1, dict(log_interval=0), "log_interval=0: should be positive"),
        (1, dict(dropout=1.0), "dropout=1.0: should be at least 0 and below 1"),
        (1, dict(min_lr=1.0), "min_lr=1.0: should be at most lr=0.001"),
        (1, dict(max_position_embeddings=100), "seq_length=256: should be at most max_position_embeddings=100"),
        (1, dict(lr_decay_style="wsd"), "lr_decay_style=wsd: say lr_wsd_decay_iters"),
        (1, dict(lr_warmup_fraction=2.0), "lr_warmup_fraction=2.0: a fraction of lr_decay_iters, at most 1"),
    ],
)
def test_what_cannot_work_is_refused_by_name(world, fields, message):
    with pytest.raises(UserError) as error:
        configuration.check(Config(**{"train_iters": 10} | fields), world)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_help_lists_every_field_with_default_and_meaning():
    lines = {line.split("=")[0].strip(): line for line in configuration.help_text().splitlines()}
    for field in dataclasses.fields(Config):
        line = lines[f"--{field.name}"]
        assert len(line.split(maxsplit=1)[1]) > 5, field.name
        default = "2^32" if field.default == 2.0**32 else str(field.default)
        assert field.name != "optimizer" or all(name in line for name in RULES)
        assert field.name != "schedule" or all(name in line for name in SCHEDULES)
        assert default in line or float(default) == float(line.split("=")[1].split()[0])
