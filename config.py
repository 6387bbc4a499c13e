"""The configuration: one dataclass, a file of assignments, and the command line.

    torchrun --nproc_per_node=4 train.py configs/gpt2_345m.py --tp=2 --lr=3e-4

The file is plain Python that assigns fields. A field on the command line replaces the file's value. `--help` prints the
comment beside each field. Most fields have Megatron-LM's names, in snake case; a comment gives Megatron-LM's name where
it differs. `load` refuses an unknown name and a value of a wrong type. `check` refuses unknown choices and sizes that
are not divisible, before anything is allocated.
"""

import inspect
import os
import re
import runpy
import traceback
from dataclasses import dataclass, fields
from pathlib import Path

import flags
from errors import UserError
from parallel import schedules
from parallel.optimizer import RULES
from reference import ACTIVATIONS


@dataclass
class Config:
    # -- model
    num_layers: int = 4  # transformer blocks
    hidden_size: int = 128  # width h of the residual stream; the MLP has 4h
    num_attention_heads: int = 4  # each head has hidden_size / num_attention_heads columns
    seq_length: int = 256  # tokens in a training sample
    max_position_embeddings: int = 0  # rows of the position embedding (0: seq_length)
    vocab_size: int = 50257  # number of token ids; the word table is padded to a multiple of 128 rows
    activation: str = "gelu"  # of the MLP: gelu is GPT-2's (with tanh), relu is OPT's
    dropout: float = 0.0  # on embedding, attention and MLP outputs (Megatron-LM: --hidden-dropout)
    init_method_std: float = 0.02  # standard deviation of initial weights (proj, fc2: divided by sqrt(2 num_layers))

    # -- data and batch
    data_dir: str = "data/stdlib_bytes"  # folder that prepare.py wrote (Megatron-LM: --data-path)
    micro_batch_size: int = 8  # samples of one forward and backward on one data rank
    global_batch_size: int = 8  # samples of one update: all micro-batches of all data ranks
    rampup_batch_size: str = ""  # start,increment,samples: the batch grows to global_batch_size over so many samples
    train_iters: int = 0  # updates of the run (or set train_epochs)
    train_epochs: float = 0.0  # passes over the training tokens, instead of train_iters
    seed: int = 1234  # determines initial weights, data order and dropout

    # -- optimizer
    optimizer: str = "adamw"  # update rule; lamb and lars scale the rate of each tensor, for large batches
    lr: float = 1e-3  # peak learning rate
    min_lr: float = 0.0  # learning rate at the end of the decay
    lr_decay_style: str = "cosine"  # curve of the learning rate; wsd is warm-up, stable, decay
    lr_decay_iters: int = 0  # updates until the end of the decay, warm-up included (0: train_iters)
    lr_warmup_iters: int = -1  # updates of linear warm-up (-1: use lr_warmup_fraction)
    lr_warmup_fraction: float = 0.0  # warm-up as a fraction of lr_decay_iters
    lr_wsd_decay_iters: int = 0  # wsd: updates of the linear decay, which ends at lr_decay_iters
    weight_decay: float = 0.01  # factor of the weight decay; biases and LayerNorms have none
    adam_beta1: float = 0.9  # decay of the first moment
    adam_beta2: float = 0.999  # decay of the second moment
    adam_eps: float = 1e-8  # added to the root of the second moment
    lars_coefficient: float = 1e-3  # lars: norm of a tensor's step / (lr x the tensor's norm)
    clip_grad: float = 1.0  # largest global gradient norm (0: no clipping)

    # -- numbers
    dtype: str = "auto"  # auto: bf16 on a GPU that has it, fp16 on others, fp32 on a CPU (Megatron-LM: --fp16, --bf16)
    initial_loss_scale: float = 2.0**32  # fp16: first loss scale
    min_loss_scale: float = 1.0  # fp16: smallest loss scale
    loss_scale_window: int = 1000  # fp16: updates without overflow until the loss scale doubles
    hysteresis: int = 2  # fp16: overflows until the loss scale is halved
    kernels: str = "auto"  # operations between the matrix products: triton is kernels.py, torch is reference.py

    # -- layout (the data parallel size is dp = processes / (tp * pp))
    tp: int = 1  # tensor parallel ranks (Megatron-LM: --tensor-model-parallel-size)
    pp: int = 1  # pipeline stages (Megatron-LM: --pipeline-model-parallel-size)
    sequence_parallel: bool = False  # also shard over tp the activations between the tensor parallel layers
    zero: int = 0  # shard over dp: 1 optimizer state, 2 also gradients, 3 also parameters (DeepSpeed: --zero-stage)
    schedule: str = "1f1b"  # order of the work in the pipeline
    updates_per_call: int = 1  # pipedream, pipedream-2bw: updates from an empty pipeline to the next empty pipeline
    chunks: int = 1  # per rank; zb-v: 2, interleaved: 2 or more (Megatron-LM: --num-virtual-stages-per-pipeline-rank)
    offload: bool = False  # keep the optimizer state in CPU memory and update there (DeepSpeed: --cpu-optimizer)
    recompute: str = "none"  # full: keep each block's input, repeat its forward (Megatron-LM: --checkpoint-activations)

    # -- run
    out_dir: str = ""  # folder of checkpoints and metrics.jsonl (default: out/CONFIGNAME) (Megatron-LM: --save)
    resume: str = "auto"  # auto: from out_dir's latest checkpoint; none; or a checkpoint's path (Megatron-LM: --load)
    new_data: bool = False  # resume although the training tokens are not those of the checkpoint
    save_interval: int = 0  # updates between checkpoints (0: at the end only)
    keep: int = 2  # latest checkpoints to keep (0: all); the last one that a finite loss followed stays, too
    log_interval: int = 10  # updates between log lines
    eval_interval: int = 0  # updates between validations (0: at the end only)
    eval_iters: int = 10  # global batches of a validation (0: no validation)
    eval_only: bool = False  # only print the loss of a checkpoint
    split: str = "val"  # eval_only: the split to evaluate
    stop_after_nan: int = 20  # stop after so many iterations in a row without a finite loss (0: never)
    check_replicas: int = 0  # updates between comparisons of all copies of weights and moments (0: never)
    ledger: bool = False  # at the end, print traffic and memory in bytes, measured and predicted
    trace: str = ""  # file with every action and message of the last steps, in Chrome's trace format
    tensorboard: str = ""  # folder for TensorBoard logs (Megatron-LM: --tensorboard-dir)
    wandb: str = ""  # Weights & Biases project (Megatron-LM: --wandb-project)
    comm_timeout: float = 600.0  # seconds that a rank waits for another (Megatron-LM: --distributed-timeout-minutes)

    @property
    def head_size(self):
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self):
        """vocab_size rounded up to a multiple of 128, which is fast on tensor cores. It does not depend on tp."""
        return -(-self.vocab_size // 128) * 128

    @property
    def positions(self):
        return self.max_position_embeddings or self.seq_length


CHOICES = {
    "activation": tuple(ACTIVATIONS),
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
    "updates_per_call log_interval loss_scale_window hysteresis initial_loss_scale min_loss_scale adam_eps "
    "comm_timeout init_method_std"
).split()
NOT_NEGATIVE = (
    "max_position_embeddings train_iters train_epochs lr min_lr lr_decay_iters lr_warmup_fraction lr_wsd_decay_iters "
    "weight_decay clip_grad save_interval keep eval_interval eval_iters stop_after_nan check_replicas"
).split()
MOST = {"num_layers": 1000, "train_epochs": 1e9, "comm_timeout": 1e6}
MICRO_BATCHES = 2**13  # the most of one step on one data rank, because a schedule is a list of actions
NO_EFFECT = (  # on the weights of a run
    "out_dir resume save_interval keep log_interval eval_interval eval_iters eval_only split ledger trace tensorboard "
    "wandb comm_timeout new_data stop_after_nan check_replicas"
).split()


def load(arguments, default="configs/tiny.py"):
    """Read the words `[FILE] [--field=value | --field value ...]`. Without FILE, read `default`. Raises UserError."""
    files, pairs = flags.split(arguments, {f.name for f in fields(Config) if f.type is bool})
    known = {f.name: f for f in fields(Config)}
    if "--" in dict(pairs):
        raise UserError("--: should be left out")
    if wrong := [flag for flag, _ in pairs if flags.plain(flag) not in known]:
        raise UserError(flags.refusal(wrong, known, "python train.py"))
    given = {flags.plain(flag): from_text(known[flags.plain(flag)], text) for flag, text in pairs}
    if numbers := list(filter(flags.NUMBER.fullmatch, files)):
        raise UserError(f"{numbers[0]}: a value without a field; a list needs commas: --rampup_batch_size=16,8,30000")
    if len(files) > 1:
        raise UserError(f"more than one configuration file: {' '.join(files)} (fields are --field=value)")
    path = Path(files[0] if files else default)
    values = from_file(path)
    if "train_iters" in given or "train_epochs" in given:  # the file's two values are ignored
        values |= {"train_iters": 0, "train_epochs": 0.0}
    config = Config(**values | given)
    refuse_unusable(config)
    config.out_dir = config.out_dir or f"out/{path.stem}"
    return config


def from_file(path):
    """Return {field: value} of the assignments in the Python file `path`. Raises UserError."""
    if not os.path.isfile(path):  # False also for a name that is too long
        known = " ".join(sorted(str(p) for p in Path("configs").glob("*.py"))) or "none there"
        raise UserError(f"no configuration file {path} (there are: {known})")
    try:
        names = runpy.run_path(str(path))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit
        at = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        at = at[-1] if at else getattr(error, "lineno", "?")
        raise UserError(f"{path}:{at}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    values, known = {}, {f.name: f for f in fields(Config)}
    for name, value in names.items():
        if name.startswith("_") or inspect.ismodule(value) or callable(value):
            continue
        if name not in known:
            raise UserError(f"{path}: {flags.refusal([name], known, 'python train.py')}")
        field = known[name]
        if field.type is float and type(value) is int and abs(value) < 2**1023:  # float's range
            value = float(value)
        if type(value) is not field.type:
            raise UserError(f"{path}: {name}={shown(value)} should be {field.type.__name__}")
        values[name] = value
    return values


def shown(value):
    """Return `value` as text. Python refuses to print an integer of more than 4,300 digits."""
    try:
        return repr(value)
    except Exception as error:
        return f"({type(error).__name__}: {type(value).__name__} that can't be printed)"


def refuse_unusable(c):
    """Raise UserError for an integer that does not fit into 64 bits, and for a text that can't be a file's name."""
    for name, value in vars(c).items():
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise UserError(f"{name}={shown(value)}: should be between -2^63 and 2^63 - 1")
        if type(value) is str:
            try:
                wrong = "\0" in os.fsencode(value).decode("latin-1")
            except UnicodeEncodeError:
                wrong = True
            if wrong:
                raise UserError(f"{name}={value!r}: has a character that a file's name can't have")


def from_text(field, text):
    """Convert `text` to the type of `field`; None is a missing value. Raises UserError."""
    if text is None:
        raise UserError(f"--{field.name}: the value is missing (default: {field.default!r})")
    try:
        return flags.BOOLEANS[text.lower()] if field.type is bool else field.type(text)
    except (ValueError, KeyError):
        kind = "True or False" if field.type is bool else field.type.__name__
        raise UserError(f"--{field.name}={text}: should be {kind}") from None


def require(c, name, fits, why):
    """Raise UserError with the reason `why`, unless the value of the field `name` fits."""
    if not fits:
        raise UserError(f"{name}={getattr(c, name)}: {why}")


def rampup(c):
    """Return (start, increment, samples) of `rampup_batch_size`. If the field is empty, start is global_batch_size."""
    if not c.rampup_batch_size:
        return c.global_batch_size, c.global_batch_size, 1
    numbers = re.fullmatch(r"(\d+),(\d+),(\d+)", c.rampup_batch_size.replace(" ", ""))
    start, increment, samples = map(int, numbers.groups()) if numbers else (0, 0, 0)
    fits = 0 < start <= c.global_batch_size and increment > 0 and samples > 0
    limit = f"start is at most global_batch_size={c.global_batch_size}"
    require(c, "rampup_batch_size", fits, f"should be start,increment,samples (as in 16,8,30000); {limit}")
    return start, increment, samples


def global_batch_size_at(c, consumed_samples):
    """The global batch size of the step after `consumed_samples` (slide "データ並列": 途中からbatch sizeを上げる)."""
    start, increment, samples = rampup(c)
    steps = (c.global_batch_size - start) // increment  # increments, spread evenly over `samples`
    return start + increment * min(steps, consumed_samples * steps // samples)


def micro_batches(c, samples, dp):
    """Return m, the number of micro-batches on each of `dp` data ranks in a step of `samples` samples."""
    return samples // (c.micro_batch_size * dp)


def iterations(config, samples):
    """The number of updates that use at most `samples` samples, but at least 1 (with updates_per_call, 1 call)."""
    n = config.updates_per_call
    return max(1, updates_of(config, samples) // n) * n


def updates_of(config, samples):
    """Return the number of updates that use at most `samples` samples."""
    start, increment, span = rampup(config)
    levels = (config.global_batch_size - start) // increment
    count, consumed, samples = 0, 0, int(samples)
    while True:  # once for each size of the batch
        size = global_batch_size_at(config, consumed)
        fit = max(0, samples - consumed) // size
        if size == config.global_batch_size:
            return count + fit
        grows_at = -(-span * ((size - start) // increment + 1) // levels)  # consumed samples
        steps = -(-(grows_at - consumed) // size)
        if fit < steps:
            return count + fit
        count, consumed = count + steps, consumed + steps * size


def of_checkpoint(index):
    """Return the Config of a checkpoint's index. A field that the checkpoint lacks has its default."""
    known = {field.name for field in fields(Config)}
    values = {name: value for name, value in index["config"].items() if name in known}
    for field in fields(Config):
        if type(value := values.get(field.name, field.default)) is not field.type:
            raise UserError(f"the checkpoint's {field.name}={value!r}: should be {field.type.__name__}")
    return Config(**values)


def differences(c, index):
    """Return "lr=0.002 (the checkpoint: 0.001), ...": values of `c` that differ from those in a checkpoint's index."""
    saved, texts = index["config"], []
    for name, value in vars(c).items():
        if name not in NO_EFFECT and name in saved and saved[name] != value:
            first = name == "init_method_std" or (name == "initial_loss_scale" and index["loss_scale"]["dynamic"])
            texts.append(f"{name}={value} (the checkpoint: {saved[name]}{', still used' if first else ''})")
    return ", ".join(texts)


def help_text():
    """The text of --help: every field of `Config` with its default and its comment, then the flags of Megatron-LM and
    DeepSpeed.
    """
    return flags.help_text(inspect.getsource(Config), CHOICES)


def check(c, world):
    """Raise UserError if a run with `c` cannot work on `world` processes. Return dp, the data parallel size."""
    for name, choices in CHOICES.items():
        more = "; prepare.py --split=949,50,1 sets the shares" if name == "split" and "," in c.split else ""
        require(c, name, getattr(c, name) in choices, f"should be one of {', '.join(map(str, choices))}{more}")
    for name in POSITIVE:
        require(c, name, 0 < getattr(c, name) < float("inf"), "should be positive")
    for name in NOT_NEGATIVE:
        require(c, name, 0 <= getattr(c, name) < float("inf"), "should be zero or more")
    for name, most in MOST.items():
        require(c, name, getattr(c, name) <= most, f"should be at most {most:,.0f}")
    for name in ("dropout", "adam_beta1", "adam_beta2"):
        require(c, name, 0 <= getattr(c, name) < 1, "should be at least 0 and below 1")
    require(c, "lr_warmup_fraction", c.lr_warmup_fraction <= 1, "a fraction of lr_decay_iters, at most 1")
    falls = c.lr_decay_style != "wsd" or c.lr_wsd_decay_iters > 0
    require(c, "lr_decay_style", falls, "set lr_wsd_decay_iters, the updates in which the rate falls")
    require(c, "min_lr", c.min_lr <= c.lr, f"should be at most lr={c.lr}")
    if not c.eval_only and (c.train_iters > 0) == (c.train_epochs > 0):
        raise UserError(f"train_iters={c.train_iters}, train_epochs={c.train_epochs}: set one of the two")
    enough = c.eval_iters > 0 or not c.eval_only
    require(c, "eval_iters", enough, "eval_only averages over eval_iters global batches; should be 1 or more")
    require(c, "seq_length", c.seq_length <= c.positions, f"should be at most max_position_embeddings={c.positions}")
    check_asynchronous(c)
    return check_layout(c, world)


def check_asynchronous(c):
    """Raise UserError if a field does not go together with the schedule's updates, or with their absence."""
    if c.schedule not in schedules.ASYNCHRONOUS:
        why = f"schedule={c.schedule} is empty after every update; only {' and '.join(schedules.ASYNCHRONOUS)} need it"
        require(c, "updates_per_call", c.updates_per_call == 1, why)
        return
    early = f"{c.schedule} updates a stage before the other stages have their gradients"
    require(c, "clip_grad", c.clip_grad == 0, f"{early}, so no rank knows the global norm; set --clip_grad=0")
    alone = f"{early}, so it can't sum norms over all ranks; set --optimizer=adamw or sgd"
    require(c, "optimizer", not RULES[c.optimizer].layerwise, alone)
    if c.dtype == "fp16":
        refuse_fp16(c)
    require(c, "zero", c.zero <= 1, f"{c.schedule} keeps whole parameters and gradients of a stage; set --zero=1 or 0")
    require(c, "rampup_batch_size", not c.rampup_batch_size, f"{c.schedule} has a constant batch; leave it out")
    n = c.updates_per_call
    whole = c.train_iters % n == 0
    near = f"{c.train_iters // n * n or n} or {(c.train_iters // n + 1) * n}"
    require(c, "train_iters", whole, f"{c.schedule} needs a multiple of updates_per_call={n}, such as {near}")


def check_update(c, m):
    """Raise UserError if an asynchronous schedule does not allow m micro-batches in an update."""
    each = c.global_batch_size // m  # samples of one micro-batch on all data ranks
    if c.schedule == "pipedream":
        require(c, "global_batch_size", m == 1, f"pipedream updates after every micro-batch; set {each}")
    if c.schedule == "pipedream-2bw":
        why = f"pipedream-2bw needs at least pp={c.pp} micro-batches in an update; set {each * c.pp} or more"
        require(c, "global_batch_size", m >= c.pp, why)


def refuse_fp16(c):
    """Raise UserError if the schedule is asynchronous. dtype=auto may mean fp16, which only `train.build` knows."""
    alone = "can't skip an update on all stages, as fp16 needs it; set --dtype=bf16 or fp32"
    require(c, "dtype", c.schedule not in schedules.ASYNCHRONOUS, f"{c.schedule} {alone}")


def check_schedules(c, first, step, last):
    """Raise UserError if the schedule refuses first, first + step, ..., last micro-batches. Return a Schedule.

    The order of a schedule repeats after a multiple of pp micro-batches. So a small number with the same remainder is
    checked instead of a large one, and the remainders repeat after at most pp batch sizes.
    """
    if c.schedule in schedules.ASYNCHRONOUS:
        return schedules.build(c.schedule, c.pp, last, c.chunks, last)
    few = max(64 // c.pp, 2) * c.pp
    numbers = {min(m, few + m % c.pp): m for m in [*range(first, last, step)[: few + c.pp], last]}
    for small, m in numbers.items():
        try:
            schedule = schedules.build(c.schedule, c.pp, small, c.chunks)
        except UserError as error:
            raise error if m == small else UserError(f"{m:,} micro-batches, checked with {small}: {error}") from None
    return schedule


def check_layout(c, world):
    """Raise UserError if a size is not divisible as the layout needs. Return dp."""

    def divides(small, divisor, big, value, why=""):
        if value % divisor:
            raise UserError(f"{big} = {value} is not a multiple of {small} = {divisor}{why}")

    divides("num_attention_heads", c.num_attention_heads, "hidden_size", c.hidden_size)
    divides("tp", c.tp, "num_attention_heads", c.num_attention_heads, ": a tensor parallel rank has whole heads")
    divides("tp", c.tp, "padded vocab_size", c.padded_vocab_size)
    if c.sequence_parallel:
        divides("tp", c.tp, "seq_length", c.seq_length, ": sequence_parallel shards the tokens")
    divides("tp * pp", c.tp * c.pp, "the number of processes", world)
    dp = world // (c.tp * c.pp)
    start, increment, _ = rampup(c)
    growth = c.global_batch_size - start
    divides("increment", increment, "rampup_batch_size: global_batch_size - start", growth)
    for size in sorted({start, min(start + increment, c.global_batch_size), c.global_batch_size}):
        name = "global_batch_size" if size == c.global_batch_size else "rampup_batch_size: batch size"
        divides("micro_batch_size * dp", c.micro_batch_size * dp, name, size)
        check_update(c, micro_batches(c, size, dp))
    many = micro_batches(c, c.global_batch_size, dp)
    why = f"makes {many:,} micro-batches on each data rank, at most {MICRO_BATCHES:,}; use a larger micro_batch_size"
    require(c, "global_batch_size", many <= MICRO_BATCHES, why)
    most = MICRO_BATCHES // many
    why = f"with {many:,} micro-batches in an update, should be at most {most:,}"
    require(c, "updates_per_call", c.updates_per_call <= most, why)
    schedule = check_schedules(c, micro_batches(c, start, dp), micro_batches(c, increment, dp), many)
    parts = max(schedule.parts) + 1
    why = (
        f"should be at least {parts - 2}, because pp={c.pp} and chunks={c.chunks} make {parts} parts, "
        "and each part needs a block, the embedding or the head"
    )
    require(c, "num_layers", c.num_layers >= parts - 2, why)
    return dp
