"""The configuration: one dataclass, a file of assignments, and the command line over it.

    torchrun --nproc_per_node=4 train.py configs/gpt2_345m.py --tp=2 --lr=3e-4
                                         |                    |
                                         plain Python that    fields, one by one; the
                                         assigns fields       last word wins

A field's meaning is the comment beside it: `--help` prints those comments. Where Megatron-LM has a name, it is
that one in snake case, so that its shell scripts can be read off. A name that does not exist or a value of
the wrong type is an error that names the nearest one; a layout that does not divide, or a choice that does
not exist, is refused by `check` before anything is allocated.
"""

import difflib
import inspect
import re
import runpy
import traceback
from dataclasses import dataclass, fields
from pathlib import Path

from errors import UserError
from parallel import schedules
from parallel.optimizer import RULES


@dataclass
class Config:
    # -- model
    num_layers: int = 4  # transformer blocks
    hidden_size: int = 128  # width h of the residual stream; the MLP is 4h wide
    num_attention_heads: int = 4  # heads; each is hidden_size / num_attention_heads wide
    seq_length: int = 256  # tokens in a training sample
    max_position_embeddings: int = 0  # rows of the position embedding (0: seq_length)
    vocab_size: int = 50257  # token ids the model knows; stored padded to a multiple of 128
    dropout: float = 0.0  # on the embedding and on what each block adds (not on attention probabilities)
    init_method_std: float = 0.02  # of initial weights; those that feed the residual: over sqrt(2 num_layers)

    # -- data and batch
    data_dir: str = "data/stdlib_bytes"  # folder that prepare.py wrote
    micro_batch_size: int = 8  # samples that one forward and backward takes at once, on one data rank
    global_batch_size: int = 8  # samples of one update, over all micro-batches and data ranks
    rampup_batch_size: str = ""  # start,increment,samples: grow the global batch to its size over so many samples
    train_iters: int = 0  # updates to train for (or say train_epochs)
    train_epochs: float = 0.0  # passes over the training tokens; stands for train_iters
    seed: int = 1234  # of initial weights, data order and dropout

    # -- optimizer
    optimizer: str = "adamw"  # update rule; lamb and lars have a rate for each tensor, for large batches
    lr: float = 1e-3  # peak learning rate
    min_lr: float = 0.0  # learning rate at the end of the decay
    lr_decay_style: str = "cosine"  # how the rate falls; wsd: warm-up, stable, decay
    lr_decay_iters: int = 0  # updates over which the rate decays, warm-up included (0: train_iters)
    lr_warmup_iters: int = -1  # updates of linear warm-up (-1: see lr_warmup_fraction)
    lr_warmup_fraction: float = 0.0  # warm-up as a fraction of lr_decay_iters
    lr_wsd_decay_iters: int = 0  # wsd: the last updates of lr_decay_iters, in which the rate falls linearly
    weight_decay: float = 0.01  # decoupled; not on biases and LayerNorms
    adam_beta1: float = 0.9  # decay of the first moment
    adam_beta2: float = 0.999  # decay of the second moment
    adam_eps: float = 1e-8  # added to the root of the second moment
    lars_coefficient: float = 1e-3  # lars: how far a step may move a tensor, relative to its norm
    clip_grad: float = 1.0  # largest global gradient norm (0: no clipping)

    # -- numbers
    dtype: str = "auto"  # of parameters and activations; auto: bf16 or fp16 on a GPU, fp32 on a CPU
    initial_loss_scale: float = 2.0**32  # fp16: loss scale to start from
    min_loss_scale: float = 1.0  # fp16: never below
    loss_scale_window: int = 1000  # fp16: clean updates until the scale doubles
    hysteresis: int = 2  # fp16: overflows until the scale is halved
    kernels: str = "auto"  # the operations around the matrices: triton is kernels.py, torch is reference.py

    # -- layout (data parallel is what remains of the processes)
    tp: int = 1  # tensor parallel ranks
    pp: int = 1  # pipeline stages
    sequence_parallel: bool = False  # shard over tp also what lies between the tensor parallel layers
    zero: int = 0  # shard over dp: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too
    schedule: str = "1f1b"  # order of work in the pipeline
    chunks: int = 1  # parts of the model that each pipeline rank holds: 2 with zb-v, 2 or more with interleaved
    offload: bool = False  # optimizer state, and its update, in the CPU's memory
    recompute: str = "none"  # full: keep a block's input only, and run it again in backward

    # -- run
    out_dir: str = ""  # checkpoints and metrics.jsonl (default: out/CONFIGNAME)
    resume: str = "auto"  # auto: go on from out_dir's latest checkpoint; none; or a checkpoint's path
    save_interval: int = 0  # updates between checkpoints (0: at the end only)
    keep: int = 2  # latest checkpoints to keep (0: all)
    log_interval: int = 10  # updates between log lines
    eval_interval: int = 0  # updates between validations (0: at the end only)
    eval_iters: int = 10  # global batches in a validation (0: none is taken)
    eval_only: bool = False  # take the loss of a checkpoint, do not train
    split: str = "val"  # eval_only: whose tokens
    ledger: bool = False  # print what was sent and what was kept, beside the formulas, at the end
    trace: str = ""  # file for a record of every action and message of the last steps, in Chrome's trace format
    tensorboard: str = ""  # folder for TensorBoard logs
    wandb: str = ""  # Weights & Biases project
    comm_timeout: float = 600.0  # seconds that a rank waits for another

    @property
    def head_size(self):
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self):
        """A multiple of 128 (tensor cores like it), whatever tp is, so that the parameters do not depend on it."""
        return -(-self.vocab_size // 128) * 128

    @property
    def positions(self):
        return self.max_position_embeddings or self.seq_length


CHOICES = {
    "optimizer": tuple(RULES),
    "lr_decay_style": ("cosine", "linear", "constant", "wsd"),
    "dtype": ("auto", "fp64", "fp32", "bf16", "fp16"),
    "kernels": ("auto", "triton", "torch"),
    "recompute": ("none", "full"),
    "split": ("train", "val", "test"),
    "zero": (0, 1, 2, 3),
    "schedule": tuple(schedules.SCHEDULES),
}
POSITIVE = (
    "num_layers hidden_size num_attention_heads seq_length vocab_size micro_batch_size global_batch_size tp pp chunks "
    "log_interval loss_scale_window hysteresis initial_loss_scale min_loss_scale adam_eps comm_timeout init_method_std"
).split()
NOT_NEGATIVE = (
    "max_position_embeddings train_iters train_epochs lr min_lr lr_decay_iters lr_warmup_fraction "
    "lr_wsd_decay_iters weight_decay clip_grad save_interval keep eval_interval eval_iters"
).split()


def load(arguments, default="configs/tiny.py"):
    """`[FILE] [--field=value ...]` -> Config. Without a file, `default`. Raises UserError."""
    files = [a for a in arguments if not a.startswith("-")]
    if len(files) > 1:
        raise UserError(f"one configuration file, please, not {' and '.join(files)} (fields are --field=value)")
    path = Path(files[0] if files else default)
    values, given = from_file(path), {}
    for option in [a for a in arguments if a.startswith("-")]:
        name, equals, text = option.lstrip("-").partition("=")
        field = field_named(name, f"--{name}")
        if not equals and field.type is not bool:
            raise UserError(f"--{name} wants a value: --{name}={field.default or field.type.__name__}")
        given[name] = from_text(field, text if equals else "True")
    if "train_iters" in given or "train_epochs" in given:  # one said here stands for the file's
        values |= {"train_iters": 0, "train_epochs": 0.0}
    config = Config(**values | given)
    config.out_dir = config.out_dir or f"out/{path.stem}"
    return config


def from_file(path):
    """The fields that the Python file `path` assigns, by name. Raises UserError."""
    if not path.is_file():
        known = " ".join(sorted(str(p) for p in path.parent.glob("*.py"))) or "none there"
        raise UserError(f"no configuration file {path} (there are: {known})")
    try:
        names = runpy.run_path(str(path))
    except Exception as error:  # whatever the user's file raises is the user's to mend
        at = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        at = at[-1] if at else getattr(error, "lineno", "?")
        raise UserError(f"{path}:{at}: {type(error).__name__}: {error}") from None
    values = {}
    for name, value in names.items():
        if name.startswith("_") or inspect.ismodule(value) or callable(value):
            continue
        field = field_named(name, f"{path}: {name}")
        if field.type is float and type(value) is int:
            value = float(value)
        if type(value) is not field.type:
            raise UserError(f"{path}: {name}={value!r} should be {field.type.__name__}")
        values[name] = value
    return values


def field_named(name, where):
    known = {f.name: f for f in fields(Config)}
    if name not in known:
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.0)
        raise UserError(f"{where}: there is no such field; the nearest is {near[0]}")
    return known[name]


def from_text(field, text):
    try:
        if field.type is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return field.type(text)
    except (ValueError, KeyError):
        wanted = "True or False" if field.type is bool else field.type.__name__
        raise UserError(f"--{field.name}={text}: should be {wanted}") from None


def require(c, name, fits, why):
    """Refuse the value of the field `name` unless it `fits`. Raises UserError, which says why."""
    if not fits:
        raise UserError(f"{name}={getattr(c, name)}: {why}")


def rampup(c):
    """(start, increment, samples) of `rampup_batch_size`; without one, of a batch that has its size."""
    if not c.rampup_batch_size:
        return c.global_batch_size, c.global_batch_size, 1
    numbers = re.fullmatch(r"(\d+),(\d+),(\d+)", c.rampup_batch_size.replace(" ", ""))
    start, increment, samples = map(int, numbers.groups()) if numbers else (0, 0, 0)
    fits = 0 < start <= c.global_batch_size and increment > 0 and samples > 0
    limit = f"with a start of at most global_batch_size={c.global_batch_size}"
    require(c, "rampup_batch_size", fits, f"should be start,increment,samples, as 16,8,30000, {limit}")
    return start, increment, samples


def global_batch_size_at(c, consumed_samples):
    """The global batch of the step after so many samples. Slide "データ並列": 途中からbatch sizeを上げる."""
    start, increment, samples = rampup(c)
    steps = (c.global_batch_size - start) // increment  # of growth, spread evenly over `samples`
    return start + increment * min(steps, consumed_samples * steps // samples)


def micro_batches(c, samples, dp):
    """m, the micro-batches of a step of `samples` samples on each of `dp` data ranks."""
    return samples // (c.micro_batch_size * dp)


def iterations(config, samples):
    """How many updates take at most `samples` samples; at least one."""
    count = consumed = 0
    while (consumed := consumed + global_batch_size_at(config, consumed)) <= samples:
        count += 1
    return max(1, count)


def help_text():
    """Every field with its default and the comment beside it, as they stand in `Config`."""
    lines = ["python train.py [CONFIG.py] [--field=value ...]     (the default is configs/tiny.py)"]
    for line in inspect.getsource(Config).splitlines():
        if section := re.match(r"    # -- (.*)", line):
            lines.append(f"\n{section[1]}")
        elif row := re.match(r"    (\w+): (\w+) = (.*?)  # (.*)", line):
            default = row[3].strip('"').replace("2.0**32", "2^32")
            choices = f" ({', '.join(map(str, CHOICES[row[1]]))})" if row[1] in CHOICES else ""
            lines.append(f"  --{row[1] + '=' + default:<34} {row[4]}{choices}")
    return "\n".join(lines)


def check(c, world):
    """Refuse, by name, what cannot work on `world` processes. Raises UserError; returns the data parallel size."""
    for name, choices in CHOICES.items():
        require(c, name, getattr(c, name) in choices, f"should be one of {', '.join(map(str, choices))}")
    for name in POSITIVE:
        require(c, name, 0 < getattr(c, name) < float("inf"), "should be positive")
    for name in NOT_NEGATIVE:
        require(c, name, 0 <= getattr(c, name) < float("inf"), "should be zero or more")
    for name in ("dropout", "adam_beta1", "adam_beta2"):
        require(c, name, 0 <= getattr(c, name) < 1, "should be at least 0 and below 1")
    require(c, "lr_warmup_fraction", c.lr_warmup_fraction <= 1, "a fraction of lr_decay_iters, at most 1")
    falls = c.lr_decay_style != "wsd" or c.lr_wsd_decay_iters > 0
    require(c, "lr_decay_style", falls, "say lr_wsd_decay_iters, the updates in which the rate falls")
    require(c, "min_lr", c.min_lr <= c.lr, f"should be at most lr={c.lr}")
    if not c.eval_only and (c.train_iters > 0) == (c.train_epochs > 0):
        raise UserError(f"train_iters={c.train_iters}, train_epochs={c.train_epochs}: say one of the two")
    enough = c.eval_iters > 0 or not c.eval_only
    require(c, "eval_iters", enough, "eval_only takes a loss over so many global batches; should be 1 or more")
    limit = f"should be at most max_position_embeddings={c.max_position_embeddings}"
    require(c, "seq_length", c.seq_length <= c.positions, limit)
    return check_layout(c, world)


def check_layout(c, world):
    """What has to divide what. Raises UserError; returns the data parallel size."""

    def divides(small, divisor, big, value, why=""):
        if value % divisor:
            raise UserError(f"{big}={value} is not a multiple of {small}={divisor}{why}")

    divides("num_attention_heads", c.num_attention_heads, "hidden_size", c.hidden_size)
    divides("tp", c.tp, "num_attention_heads", c.num_attention_heads, ": a tensor parallel rank has whole heads")
    divides("tp", c.tp, "padded vocab_size", c.padded_vocab_size)
    if c.sequence_parallel:
        divides("tp", c.tp, "seq_length", c.seq_length, ": sequence_parallel shards the tokens")
    divides("tp * pp", c.tp * c.pp, "the number of processes", world)
    dp = world // (c.tp * c.pp)
    start, increment, _ = rampup(c)
    growth = c.global_batch_size - start
    divides("the increment of rampup_batch_size", increment, "the growth of global_batch_size", growth)
    for size in range(start, c.global_batch_size + 1, increment):
        divides("micro_batch_size * dp", c.micro_batch_size * dp, "global_batch_size", size)
        schedule = schedules.build(c.schedule, c.pp, micro_batches(c, size, dp), c.chunks)
    parts = max(schedule.parts) + 1
    why = f"too few for the {parts} parts of pp={c.pp}, chunks={c.chunks}; should be at least {parts - 2}"
    require(c, "num_layers", c.num_layers >= parts - 2, why)
    return dp
