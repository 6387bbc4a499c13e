"""Tests of the configuration: its file, its command line, --help, and one line for every mistake."""

import dataclasses
import inspect
import random
import re
import sys

import pytest

import config as configuration
import flags
import generate
import prepare
from config import Config
from errors import UserError
from parallel import schedules
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
    "flag", [["--num-layers", "24"], ["--num_layers", "24"], ["--num-layers=24"], ["--num_layers=24"]]
)
def test_a_flag_has_four_forms_before_and_after_the_file(flag):
    for words in (
        ["configs/gpt2_124m.py", *flag],
        [*flag, "configs/gpt2_124m.py"],
        ["--tp", "2", *flag, "--seed", "7"],
    ):
        c = configuration.load(words)
        assert c.num_layers == 24 and c.hidden_size == (768 if "configs/gpt2_124m.py" in words else 128)


@pytest.mark.parametrize(
    "words, value",
    [
        (["--ledger"], True),
        (["--ledger", "--tp=2"], True),
        (["--ledger", "configs/gpt2_124m.py"], True),
        (["--ledger", "True"], True),
        (["--ledger", "true", "configs/gpt2_124m.py"], True),
        (["--ledger", "False", "configs/gpt2_124m.py"], False),
        (["configs/gpt2_124m.py", "--ledger", "0"], False),
        (["--ledger=False", "configs/gpt2_124m.py"], False),
    ],
)
def test_the_value_of_a_boolean_may_be_left_out(words, value):
    c = configuration.load(words)
    assert c.ledger is value and c.num_layers == (12 if "configs/gpt2_124m.py" in words else 4)


def test_negative_numbers_are_values():
    c = configuration.load(["--lr-warmup-iters", "-1", "--lr", "-1e-3", "--min_lr", "-.5", "--train_epochs", "-inf"])
    assert (c.lr_warmup_iters, c.lr, c.min_lr, c.train_epochs) == (-1, -1e-3, -0.5, float("-inf"))


COMMAS = "a list needs commas: --rampup_batch_size=16,8,30000"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hiden_size=3"], "--hiden_size: no such field; the nearest is hidden_size"),
        (["--micro-batchsize=3"], "--micro-batchsize: no such field; the nearest is micro_batch_size"),
        (["--foo"], "--foo: no such field; python train.py --help lists all"),
        (["--", "--foo", "--bar"], "--: should be left out"),
        (["--foo", "3"], "--foo: no such field; python train.py --help lists all"),
        (["--lr=fast"], "--lr=fast: should be float"),
        (["--lr="], "--lr=: should be float"),
        (["--num_layers=2.5"], "--num_layers=2.5: should be int"),
        (["--ledger=yes"], "--ledger=yes: should be True or False"),
        (["--lr"], "--lr: the value is missing (default: 0.001)"),
        (["--lr", "--seed", "3"], "--lr: the value is missing (default: 0.001)"),
        (["--out-dir", "--lr=1"], "--out_dir: the value is missing (default: '')"),
        (["--lr", "configs/tiny.py"], "--lr=configs/tiny.py: should be float"),
        (["--rampup-batch-size", "16", "8", "300"], "8: a value without a field; " + COMMAS),
        (["configs/tiny.py", "0.1"], "0.1: a value without a field; " + COMMAS),
        (["configs/tiny.py", "-5"], "-5: a value without a field; " + COMMAS),
        (["a.py", "b.py"], "more than one configuration file: a.py b.py (fields are --field=value)"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    with pytest.raises(UserError) as error:
        configuration.load(arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("arguments", [["configs/none.py"], ["--ledger", "yes"], ["x" * 5000]])
def test_a_missing_file_is_answered_with_the_files_of_configs(arguments):
    with pytest.raises(UserError) as error:
        configuration.load(arguments)
    name = arguments[-1]
    assert str(error.value).startswith(
        f"no configuration file {name} (there are: configs/codeparrot_110m.py configs/gpt2"
    )
    assert str(error.value).endswith("configs/tiny_pipedream.py)")


# Flags of the scripts and launchers in how-tos of Megatron-LM and DeepSpeed, for example
# huggingface.co/blog/megatron-training.
HOW_TO_TRAIN = """
--adam-beta2 --bf16 --checkpoint-activations --clip-grad --data-impl --data-path --deepspeed
--deepspeed-activation-checkpointing --deepspeed_config --distributed-backend --eval-interval --eval-iters --fp16
--global-batch-size --hidden-size --load --local-rank --local_rank --log-interval --lr --lr-decay-iters --lr-decay-style
--lr-warmup-fraction --lr-warmup-iters --master_addr --master_port --max-position-embeddings --merge-file
--micro-batch-size --min-lr --nnodes --no-masked-softmax-fusion --node_rank --nproc_per_node --num-attention-heads
--num-layers --num_gpus --num_nodes --override-lr-scheduler --pipeline-model-parallel-size --save --save-interval
--seed --seq-length --split --tensor-model-parallel-size --tensorboard-dir --train-iters --vocab-file --weight-decay
--zero-stage
""".split()
HOW_TO_PREPARE = """
--append-eod --chunk-size --dataset-impl --input --json-keys --merge-file --output-prefix --tokenizer-type --vocab
--workers
""".split()
NOT_HERE = " (python train.py --help lists such flags)"


def test_every_flag_of_the_how_tos_is_a_field_or_is_answered():
    for command, known in (("train.py", HOW_TO_TRAIN), ("prepare.py", HOW_TO_PREPARE)):
        for flag in known:
            has, answer = flags.plain(flag) in flags.names(command), flags.answers(command).get(flags.plain(flag))
            assert has != bool(answer), f"{command} {flag}"


def test_a_pasted_command_is_answered_flag_by_flag():
    with pytest.raises(UserError) as refused:
        configuration.load("--num-layers 2 --save a --fp16 --lr 1e-4 --checkpoint-activations".split())
    starts = ["--save: use --out_dir", "error: --fp16: use --dtype=fp16", "error: --checkpoint-activations: use --rec"]
    lines = str(refused.value).splitlines()
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tensor-model-parallel-size", "2"], "--tensor-model-parallel-size: use --tp" + NOT_HERE),
        (["--pipeline_model_parallel_size=2"], "--pipeline_model_parallel_size: use --pp" + NOT_HERE),
        (["--zero-stage", "1"], "--zero-stage: use --zero" + NOT_HERE),
        (["--fp16"], "--fp16: use --dtype=fp16" + NOT_HERE),
        (["--fp16", "configs/tiny.py"], "--fp16: use --dtype=fp16" + NOT_HERE),
        (["--save", "out"], "--save: use --out_dir" + NOT_HERE),
        (["--checkpoint-activations"], "--checkpoint-activations: use --recompute=full" + NOT_HERE),
        (["--data-path", "x"], "--data-path: use --data_dir; prepare.py --megatron=PREFIX makes the folder" + NOT_HERE),
        (
            ["--vocab-file=x"],
            "--vocab-file: not needed: --data_dir has it (prepare.py --tokenizer=vocab.json)" + NOT_HERE,
        ),
        (["--num_gpus", "4"], "--num_gpus: use torchrun --nproc_per_node=N train.py ..." + NOT_HERE),
        (["--json-keys=x"], "--json-keys: belongs to prepare.py (use --text_key)"),
        (["--tokenizer=bytes"], "--tokenizer: belongs to prepare.py"),
        (["--top-k=3"], "--top-k: belongs to generate.py"),
    ],
)
def test_a_flag_with_another_name_here_is_answered(arguments, message):
    with pytest.raises(UserError) as error:
        configuration.load(arguments)
    assert str(error.value) == message


def test_megatrons_split_is_explained():
    with pytest.raises(UserError) as error:
        configuration.check(configuration.load(["--split", "949,50,1"]), 1)
    more = "prepare.py --split=949,50,1 sets the shares"
    assert str(error.value) == f"split=949,50,1: should be one of train, val, test; {more}"


def test_answers_name_fields_that_exist():
    fields = {field.name for field in dataclasses.fields(Config)}
    others = {"nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "help", "tokenizer", "megatron"}
    for name, answer in flags.answers("train.py").items():
        assert name not in fields and set(re.findall(r"--(\w+)", answer)) <= fields | others, name
    for name, answer in [*flags.answers("prepare.py").items(), *flags.answers("generate.py").items()]:
        options = flags.names("prepare.py") + flags.names("generate.py")
        assert name not in options and set(re.findall(r"--(\w+)", answer)) <= set(options), name


def test_the_names_of_the_commands_are_those_of_their_parsers(monkeypatch, capsys):
    assert flags.names("train.py") == [field.name for field in dataclasses.fields(Config)]
    for command, parse in (("prepare.py", prepare.parse_arguments), ("generate.py", generate.arguments)):
        monkeypatch.setattr(sys, "argv", [command, "--help"])
        with pytest.raises(SystemExit):
            parse()
        text = capsys.readouterr().out
        options = re.findall(r"^  (?:-h, )?--(\w+)", text.partition("Megatron-LM")[0], re.M)
        assert options == ["help", *flags.names(command)]
        assert text.endswith(flags.TABLES[command]) and max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    "text, message",
    [
        ("hiden_size = 3", "hiden_size: no such field; the nearest is hidden_size"),
        ("num_layers = 2.0", "num_layers=2.0 should be int"),
        ("tp = True", "tp=True should be int"),
        ("lr = '1e-3'", "lr='1e-3' should be float"),
        ("tensor_model_parallel_size = 2", "tensor_model_parallel_size: use --tp" + NOT_HERE),
        ("lr = 10**400", "00 should be float"),
        ("raise SystemExit", ":1: SystemExit: "),
        ("raise ValueError('a\\nb')", ":1: ValueError: a b"),
        ("lr = \n", ":1: SyntaxError"),
        ("\n\nlr = x", ":3: NameError: name 'x' is not defined"),
    ],
)
def test_mistakes_in_a_file(tmp_path, text, message):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        configuration.load([str(file)])
    assert message in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "world, fields, message",
    [
        (1, dict(zero=4), "zero=4: should be one of 0, 1, 2, 3"),
        (3, dict(pp=2), "the number of processes = 3 is not a multiple of tp * pp = 2"),
        (1, dict(schedule="zb-h3"), "schedule=zb-h3: should be one of gpipe, 1f1b"),
        (1, dict(chunks=2), "chunks=2: 1f1b does not cut a rank's share into chunks; interleaved and zb-v do"),
        (2, dict(pp=2, chunks=2, schedule="interleaved", micro_batch_size=8), "microbatches=1"),
        (8, dict(pp=8), "num_layers=4: should be at least 6, because pp=8 and chunks=1 make 8 parts, and"),
        (1, dict(rampup_batch_size="8"), "rampup_batch_size=8: should be start,increment,samples (as in 16,8,30000)"),
        (1, dict(rampup_batch_size="16,8,100"), "rampup_batch_size=16,8,100: should be start,increment,samples"),
        (1, dict(rampup_batch_size="2,4,100"), "rampup_batch_size: global_batch_size - start = 6 is not a multiple"),
        (1, dict(rampup_batch_size="4,4,9"), "rampup_batch_size: batch size = 4 is not a multiple of micro_batch_size"),
        (1, dict(optimizer="adam2"), f"optimizer=adam2: should be one of {', '.join(RULES)}"),
        (1, dict(activation="swish"), "activation=swish: should be one of gelu, relu"),
        (1, dict(kernels="cuda"), "kernels=cuda: should be one of auto, triton, torch"),
        (1, dict(dtype="fp8"), "dtype=fp8: should be one of auto, fp64, fp32, bf16, fp16"),
        (1, dict(hidden_size=130), "hidden_size = 130 is not a multiple of num_attention_heads = 4"),
        (8, dict(tp=8), "num_attention_heads = 4 is not a multiple of tp = 8"),
        (3, dict(tp=2), "the number of processes = 3 is not a multiple of tp * pp = 2"),
        (1, dict(tp=2), "the number of processes = 1 is not a multiple of tp * pp = 2"),
        (4, dict(), "global_batch_size = 8 is not a multiple of micro_batch_size * dp = 32"),
        (2, dict(tp=2, sequence_parallel=True, seq_length=33), "seq_length = 33 is not a multiple of tp = 2"),
        (5, dict(tp=5, num_attention_heads=5, hidden_size=50), "padded vocab_size = 50304 is not a multiple of tp = 5"),
        (1, dict(train_epochs=1.0), "train_iters=10, train_epochs=1.0: set one of the two"),
        (1, dict(train_iters=0), "train_iters=0, train_epochs=0.0: set one of the two"),
        (1, dict(lr=-1.0), "lr=-1.0: should be zero or more"),
        (1, dict(lr=float("nan")), "lr=nan: should be zero or more"),
        (1, dict(num_layers=0), "num_layers=0: should be positive"),
        (1, dict(log_interval=0), "log_interval=0: should be positive"),
        (1, dict(dropout=1.0), "dropout=1.0: should be at least 0 and below 1"),
        (1, dict(min_lr=1.0), "min_lr=1.0: should be at most lr=0.001"),
        (1, dict(max_position_embeddings=100), "seq_length=256: should be at most max_position_embeddings=100"),
        (1, dict(lr_decay_style="wsd"), "lr_decay_style=wsd: set lr_wsd_decay_iters"),
        (1, dict(lr_warmup_fraction=2.0), "lr_warmup_fraction=2.0: a fraction of lr_decay_iters, at most 1"),
    ],
)
def test_what_cannot_work_is_refused_by_name(world, fields, message):
    with pytest.raises(UserError) as error:
        configuration.check(Config(**{"train_iters": 10} | fields), world)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_help_lists_every_field_with_default_and_meaning():
    text = configuration.help_text()
    entries = re.split(r"\n  (?=--)", text)
    entries = {entry[2:].split("=")[0]: " ".join(entry.split()) for entry in entries}
    for field in dataclasses.fields(Config):
        entry = entries[field.name]
        assert len(entry.split(maxsplit=1)[1]) > 5, field.name
        default = "2^32" if field.default == 2.0**32 else str(field.default)
        assert field.name != "optimizer" or all(name in entry for name in RULES)
        assert field.name != "schedule" or all(name in entry for name in SCHEDULES)
        assert default in entry or float(default) == float(entry.split("=")[1].split()[0])


def test_help_has_an_example_and_the_table_in_120_columns():
    text = configuration.help_text()
    assert max(map(len, text.splitlines())) <= 120
    assert "\nexample: torchrun --nproc_per_node=4 train.py configs/gpt2_345m.py --tp=2 --zero=1 --lr=3e-4\n" in text
    assert "\nlayout (the data parallel size is dp = processes / (tp * pp))\n" in text
    assert flags.TABLES["train.py"].rstrip() in text


def test_megatrons_names_in_the_comments_are_in_the_table():
    found = re.findall(r"    (\w+): .*\((?:Megatron-LM|DeepSpeed): (.*)\)", inspect.getsource(Config))
    assert len(found) == 14
    for field, names in found:
        for name in names.split(", "):
            assert re.match(rf"use --{field}\b", flags.answers("train.py")[flags.plain(name)]), name


@pytest.mark.parametrize(
    "text, message",
    [
        ("data_dir = 'a\\0b'", "data_dir='a\\x00b': has a character that a file's name can't have"),
        ("out_dir = '\\ud800'", "out_dir='\\ud800': has a character that a file's name can't have"),
        ("seed = 10**30", f"seed={10**30}: should be between -2^63 and 2^63 - 1"),
        ("seed = 10**5000", "seed=(ValueError: int that can't be printed): should be between -2^63 and 2^63 - 1"),
        ("lr = 10**5000", "lr=(ValueError: int that can't be printed) should be float"),
        ("raise BaseException('x')", ":1: BaseException: x"),
        ("import sys; sys.exit(0)", ":1: SystemExit: 0"),
    ],
)
def test_values_that_python_can_hold_but_no_run_can_use(tmp_path, text, message):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        configuration.load([str(file)])
    assert message in str(error.value)


def brute_force(c, samples):
    count = consumed = 0
    while (consumed := consumed + configuration.global_batch_size_at(c, consumed)) <= samples:
        count += 1
    return max(1, count)


def test_iterations_are_counted_by_batch_sizes():
    rng = random.Random(0)
    for _ in range(500):
        start, increment, levels = rng.randint(1, 9), rng.randint(1, 9), rng.randint(0, 9)
        ramp = f"{start},{increment},{rng.randint(1, 300)}" if rng.random() < 0.9 else ""
        c = Config(global_batch_size=start + increment * levels, rampup_batch_size=ramp)
        samples = 500 * rng.random()
        assert configuration.iterations(c, samples) == brute_force(c, samples), (c, samples)


@pytest.fixture
def built(monkeypatch):
    """The list of the numbers of micro-batches for which a schedule is built."""
    numbers, build = [], schedules.build
    monkeypatch.setattr(schedules, "build", lambda name, p, m, v=1: numbers.append(m) or build(name, p, m, v))
    return numbers


@pytest.mark.parametrize(
    "fields",
    [
        dict(rampup_batch_size="1,1,5", global_batch_size=8192, pp=8, num_layers=6),
        dict(rampup_batch_size="16,16,5000000", global_batch_size=8000, pp=8, num_layers=6),
        dict(global_batch_size=8192),
    ],
)
def test_the_check_does_not_grow_with_the_batch(built, fields):
    configuration.check(Config(train_iters=1, micro_batch_size=1, **fields), fields.get("pp", 1))
    assert len(built) <= 80 and max(built) <= 80


def test_a_large_batch_has_the_remainders_of_a_small_one():
    """interleaved needs multiples of pp=4. The sizes 4, 8, ... 8000 have them; with 8002 or steps of 2 they do not."""
    fields = dict(train_iters=1, micro_batch_size=1, pp=4, schedule="interleaved", chunks=2, num_layers=6)
    configuration.check(Config(global_batch_size=8000, rampup_batch_size="4,4,9", **fields), 4)
    for more in (dict(global_batch_size=8002), dict(global_batch_size=8000, rampup_batch_size="4,2,9")):
        with pytest.raises(UserError, match="interleaved needs a multiple of stages=4"):
            configuration.check(Config(**fields, **more), 4)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_layers=99999999999), "num_layers=99999999999: should be at most 1,000"),
        (dict(comm_timeout=1e300), "comm_timeout=1e+300: should be at most 1,000,000"),
        (dict(train_iters=0, train_epochs=1e308), "train_epochs=1e+308: should be at most 1,000,000,000"),
        (
            dict(global_batch_size=2_000_000, micro_batch_size=1),
            "global_batch_size=2000000: makes 2,000,000 micro-batches on each data rank, at most 8,192; use a larger",
        ),
        (
            dict(rampup_batch_size="1,1,5", global_batch_size=2_000_000, micro_batch_size=1),
            "global_batch_size=2000000: makes 2,000,000 micro-batches",
        ),
    ],
)
def test_numbers_that_are_too_large(built, fields, message):
    with pytest.raises(UserError) as error:
        configuration.check(Config(**{"train_iters": 1} | fields), 1)
    assert str(error.value).startswith(message) and sum(built) < 1000
