"""The configuration: one dataclass, a file of assignments, and the command line.

    torchrun --nproc_per_node=4 train.py configs/gpt2_345m.py --tp=2 --lr=3e-4

The file is plain Python. It may import another file's fields (`from configs.gpt2_124m import *`). The command line
replaces the file's values. `--help` prints the comment beside each field. A field of Megatron-LM has its name in snake
case, or the comment gives its name.
"""

import argparse
import ast
import functools
import inspect
import math
import re
import runpy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from errors import UserError, reading, regular
from options import Parser, boolean
from parallel import schedules, simulation
from parallel.layout import number_of_micro_batches
from parallel.optimizer import RULES
from parallel.tensor import padded
from reference import ACTIVATIONS


@dataclass
class Config:
    # -- model
    model: str = "model"  # its file: model.py is GPT-2 and OPT, llama.py Llama; or your own
    num_layers: int = 4  # transformer blocks
    hidden_size: int = 128  # width of the residual stream
    num_attention_heads: int = 4  # attention heads of a block
    seq_length: int = 256  # tokens of a sample
    max_position_embeddings: int = 0  # rows of the position table (0: seq_length)
    vocab_size: int = 50257  # number of token ids; the word table is padded to a multiple of 128
    activation: str = "gelu"  # gelu is GPT-2's (tanh), relu OPT's
    num_query_groups: int = 0  # llama: heads of keys and values (0: num_attention_heads)
    ffn_hidden_size: int = 0  # llama: width of the MLP (0: 4 hidden_size)
    rotary_base: float = 10000.0  # llama: base of the positions' frequencies
    norm_epsilon: float = 1e-5  # llama: added to RMSNorm's mean square
    untie_embeddings_and_output_weights: bool = False  # llama: the head has a table of its own
    own: str = ""  # fields that the model's file declares in FIELDS: name=value,name=value
    dropout: float = 0.0  # of embedding, attention and MLP outputs (Megatron-LM: --hidden-dropout)
    init_method_std: float = 0.02  # of initial weights (proj, fc2: divided by sqrt(2 num_layers))

    # -- data and batch
    data_dir: str = "data/stdlib_bytes"  # of prepare.py, or several by weight: 60:data/en,40:data/ja
    micro_batch_size: int = 8  # samples of one forward and backward
    global_batch_size: int = 8  # samples of an update, on all data ranks
    rampup_batch_size: str = ""  # start,increment,samples: the batch grows over so many samples
    train_iters: int = 0  # updates of the run
    train_epochs: float = 0.0  # times the samples of all data (0: use train_iters)
    seed: int = 1234  # of initial weights, data order and dropout

    # -- optimizer
    optimizer: str = "adamw"  # lamb, lars: for large batches; muon: orthogonal updates
    lr: float = 1e-3  # peak learning rate
    min_lr: float = 0.0  # learning rate after the decay
    lr_decay_style: str = "cosine"  # wsd: warm-up, stable, decay
    lr_decay_iters: int = 0  # update at which the decay ends (0: train_iters)
    lr_warmup_iters: int = -1  # updates of linear warm-up (-1: use lr_warmup_fraction)
    lr_warmup_fraction: float = 0.0  # warm-up as a fraction of lr_decay_iters
    lr_wsd_decay_iters: int = 0  # wsd: updates of the decay
    weight_decay: float = 0.01  # biases and LayerNorms have none
    adam_beta1: float = 0.9  # decay of the first moment
    adam_beta2: float = 0.999  # decay of the second moment
    adam_eps: float = 1e-8  # added to the second moment's root
    lars_coefficient: float = 1e-3  # lars: norm of a tensor's step / (lr x the tensor's norm)
    clip_grad: float = 1.0  # largest global gradient norm (0: no clipping)

    # -- numbers
    dtype: str = "auto"  # auto: bf16 or fp16 on a GPU, fp32 on a CPU (Megatron-LM: --fp16, --bf16)
    initial_loss_scale: float = 2.0**32  # fp16: first scale
    min_loss_scale: float = 1.0  # fp16: smallest scale
    loss_scale_window: int = 1000  # fp16: updates without overflow until the scale doubles
    hysteresis: int = 2  # fp16: overflows until the scale is halved
    kernels: str = "auto"  # triton is kernels.py, torch reference.py

    # -- layout (data parallel size: dp = processes / (tp * cp * pp))
    tp: int = 1  # tensor parallel ranks (Megatron-LM: --tensor-model-parallel-size)
    pp: int = 1  # pipeline stages (Megatron-LM: --pipeline-model-parallel-size)
    cp: int = 1  # ranks that share each sample's tokens (Megatron-LM: --context-parallel-size)
    order: str = "dp-pp-tp"  # axes of a rank's number, outermost first; pp-dp-tp is Megatron-LM's
    sequence_parallel: bool = False  # shard over tp the activations between tensor parallel layers
    zero: int = 0  # cut over data ranks: 1 optimizer state, 2 + gradients, 3 + parameters (DeepSpeed: --zero-stage)
    zero_copies: int = 1  # groups of data ranks with all shards (Megatron-LM: --num-distributed-optimizer-instances)
    schedule: str = "1f1b"  # order of the pipeline's work
    chunks: int = 1  # per rank; zb-v: 2, interleaved: 2 or more (Megatron-LM: --num-virtual-stages-per-pipeline-rank)
    offload: bool = False  # keep the optimizer state on the CPU (DeepSpeed: --cpu-optimizer)
    recompute: str = "none"  # full: keep only blocks' inputs, and compute blocks again

    # -- run
    out_dir: str = ""  # checkpoints and metrics.jsonl (default: out/CONFIGNAME) (Megatron-LM: --save)
    resume: str = "auto"  # auto: out_dir's latest checkpoint; none; or a checkpoint's path (Megatron-LM: --load)
    initial_weights: str = ""  # checkpoint whose weights begin a new run (Megatron-LM: --finetune)
    save_interval: int = 1000  # updates between checkpoints (0: at the end)
    keep: int = 2  # latest checkpoints to keep (0: all)
    log_interval: int = 10  # updates between log lines
    eval_interval: int = 1000  # updates between validations (0: at the end)
    eval_iters: int = 10  # global batches of a validation, of each data set (0: none)
    eval_only: bool = False  # print a checkpoint's loss
    split: str = "val"  # split of eval_only
    check_replicas: int = 0  # updates between comparisons of copies (always: after the first, and before a save)
    ledger: bool = False  # print traffic and memory, measured and predicted, and waits
    delay: float = 0.0  # ms that each communication takes longer, on a CPU
    trace: str = ""  # file for the last steps' actions, in Chrome's format
    profile: str = ""  # folder for each rank's steps 3 to 5 by torch.profiler, with the names of actions
    tensorboard: str = ""  # folder (Megatron-LM: --tensorboard-dir)
    wandb: str = ""  # project of Weights & Biases (Megatron-LM: --wandb-project)
    comm_timeout: float = 600.0  # seconds that a rank waits for another (Megatron-LM: --distributed-timeout-minutes)

    @property
    def head_size(self):
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self):
        return padded(self.vocab_size)

    @property
    def query_groups(self):
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self):
        return self.ffn_hidden_size or 4 * self.hidden_size

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
    "order": ("dp-pp-tp", "pp-dp-tp"),
    "split": ("train", "val", "test"),
    "zero": (0, 1, 2, 3),
    "schedule": tuple(schedules.SCHEDULES),
}
HINTS = {
    "split": "; prepare.py --split=949,50,1 divides the documents",
    "recompute": "; only full blocks are computed again (attention never keeps its s^2 matrix)",
    "schedule": "" if "pipedream" in schedules.SCHEDULES else "; pipedream: see ladder/rung14_pipedream.py",
}
POSITIVE = (  # the other numbers may be 0
    "num_layers hidden_size num_attention_heads seq_length vocab_size micro_batch_size global_batch_size tp pp cp "
    "zero_copies chunks log_interval loss_scale_window hysteresis initial_loss_scale min_loss_scale "
    "adam_eps comm_timeout init_method_std rotary_base norm_epsilon"
).split()
READ_BY = {  # fields that only this model reads
    "model": ["activation"],
    "llama": "num_query_groups ffn_hidden_size rotary_base norm_epsilon untie_embeddings_and_output_weights".split(),
}
BELOW = {"dropout": 1, "adam_beta1": 1, "adam_beta2": 1}
BELOW |= {"train_iters": 1e7}  # each update has a rate in a table
BELOW |= {"num_layers": 1e4, "chunks": 1e5, "pp": 1e5}  # each is an object
BELOW |= {"micro_batch_size": 1e6}  # `remedy` tries each smaller one
MOST_MICRO_BATCHES = 1e5  # of an update: each has an action in a schedule
NO_EFFECT = (  # on the weights of a resumed run
    "out_dir resume save_interval keep log_interval eval_interval eval_iters eval_only split ledger delay trace "
    "tensorboard wandb comm_timeout check_replicas init_method_std initial_loss_scale "
    "initial_weights profile"
).split()
# (section, field, default, comment) of each line of `Config`
LINES = re.findall(r"(?m)^    (?:# -- (.*)|(\w+): \w+ = (.*?)  # (.+))", inspect.getsource(Config))
assert [line[1] for line in LINES if line[1]] == [*vars(Config())], "each field of Config needs a comment, its help"
SECTIONS = {}  # {"model": its fields, ...}
for section, name, *_ in LINES:
    if section:
        fields = SECTIONS[section.split()[0]] = []
    else:
        fields.append(name)
USAGE = "torchrun --nproc_per_node=N train.py [CONFIG.py] [--field=value ...] (--ledger is --ledger=True)"


def parser():
    """Return the Parser of train.py: an option for each field of Config."""
    parser = Parser("python train.py", usage=USAGE, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("file", nargs="?", metavar="CONFIG.py", help="default: configs/tiny.py")
    group = parser
    for section, name, default, text in LINES:
        if section:
            group = parser.add_argument_group(section)
            continue
        if name in CHOICES:
            text += f" ({', '.join(map(str, CHOICES[name]))})"
        kind = Config.__annotations__[name]
        kind = {bool: boolean, str: None}.get(kind, kind)  # None: may be a path (`Parser`)
        group.add_argument(f"--{name}", metavar=default, help=text, type=kind)
    return parser


def load(words):
    """Return the Config of `[FILE] [--field=value ...]`."""
    fields = vars(parser().parse_args(words))
    path = Path(fields.pop("file", "configs/tiny.py"))
    config = Config(**from_file(path) | fields)
    config.out_dir = config.out_dir or f"out/{path.stem}"
    return config


def from_file(path):
    with reading(path, Exception):
        names = runpy.run_path(str(regular(path))).items()
        fields = {k: v for k, v in names if not (k.startswith("_") or inspect.ismodule(v) or callable(v))}
        words = [f"--{k}={v}" for k, v in fields.items()]
    try:
        return vars(parser().parse_args(words))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


# --- batches ----------------------------------------------------------------------------------------------------------


def rampup(c):
    """Return (start, increment, samples) of `rampup_batch_size`."""
    if not c.rampup_batch_size:
        return c.global_batch_size, c.global_batch_size, 1
    why = "should be start,increment,samples, as in 16,8,30000, with start up to global_batch_size"
    require(c, "rampup_batch_size", re.fullmatch(r"[1-9]\d{0,12}([, ]+[1-9]\d{0,12}){2}", c.rampup_batch_size), why)
    start, increment, samples = map(int, re.split("[, ]+", c.rampup_batch_size))
    require(c, "rampup_batch_size", start <= c.global_batch_size, why)
    return start, increment, samples


def global_batch_size_at(c, consumed_samples):
    """Return the batch size after `consumed_samples` (slide "データ並列": 途中からbatch sizeを上げる)."""
    start, increment, samples = rampup(c)
    steps = (c.global_batch_size - start) // increment  # spread evenly over `samples`
    return start + increment * min(steps, consumed_samples * steps // samples)


def iterations(c, samples, count=0, consumed=0):
    """Return how many updates fit into `samples`, at least one. The first `count` of them took `consumed` samples."""
    while (size := global_batch_size_at(c, consumed)) < c.global_batch_size and consumed + size <= samples:
        count, consumed = count + 1, consumed + size
    count += max(0, int(samples) - consumed) // c.global_batch_size
    return max(1, count)


def own_fields(c):
    """Return {name: value} of the fields that the model's file declares: its defaults with the values of `c.own`.

    With FIELDS = {"window": 128} in mine.py and --own=window=64 it is {"window": 64}. `units` may ask for them.
    """
    fields = getattr(import_module(c.model), "FIELDS", {})
    if not isinstance(fields, dict) or not {*map(type, fields.values())} <= {bool, int, float, str, tuple, list}:
        right = "a dict of names and numbers, booleans, texts or lists"
        raise UserError(f"{c.model}.py: FIELDS = {fields} should be {right}")
    fields = dict(fields)
    for name, _, text in (word.partition("=") for word in re.split(r",(?=\w+=)", c.own) if word):
        if name not in fields:
            raise UserError(f"own={c.own}: {c.model}.py has no field {name} in FIELDS = {fields}")
        kind = type(fields[name])
        try:
            value = text if kind is str else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = None
        if type(value) not in ({kind, int} if kind is float else {kind}):
            raise UserError(f"own={c.own}: {name} should be like {fields[name]!r}")
        fields[name] = kind(value)
    return fields


def own_text(c):
    """Return `c.own` with the values of all FIELDS, also those that were not given."""
    return ",".join(f"{name}={value}" for name, value in own_fields(c).items())


def layout_of(c):
    """Return {field: value} of the section "layout". They do not change the losses."""
    return {name: getattr(c, name) for name in SECTIONS["layout"]}


# --- a checkpoint's configuration -------------------------------------------------------------------------------------


def of_checkpoint(index):
    """Return a checkpoint's Config. A field that it lacks has its default.

    Raises UserError for an impossible value, and for an unknown field with a value other than 0, False, None or "".
    """
    saved, fields = index["config"], vars(Config())
    for name, value in saved.items():
        kind = type(fields.get(name))
        if name not in fields and value:
            raise UserError(f"{name}={value!r:.40}: the checkpoint uses this field, which this program does not have")
        if name in fields and type(value) not in ({kind, int} if kind is float else {kind}):
            raise UserError(f"{name}={value!r:.40}: should be like {fields[name]!r}")
    config = Config(**fields | {name: saved[name] for name in fields if name in saved})
    check_values(config)
    check_sizes(config)
    return config


def differences(c, index):
    """Return "lr=0.002 (the checkpoint: 0.001), ...": values that differ from a checkpoint's."""
    saved = index["config"]
    changed = [name for name, value in vars(c).items() if name not in NO_EFFECT and saved.get(name, value) != value]
    return ", ".join(f"{name}={getattr(c, name)} (the checkpoint: {saved[name]})" for name in changed)


# --- checks -----------------------------------------------------------------------------------------------------------


def require(c, name, fits, why):
    if not fits:
        raise UserError(f"{name}={getattr(c, name)}: {why}")


def check_values(c):
    """Raise UserError if a field has an impossible value, whatever the others are."""
    for name, choices in CHOICES.items():
        right = f"should be one of {', '.join(map(str, choices))}{HINTS.get(name, '')}"
        require(c, name, getattr(c, name) in choices, right)
    for name, value in vars(c).items():
        if type(value) in (int, float):
            least, most = -1 if name == "lr_warmup_iters" else 0, BELOW.get(name, 1e13)
            fits = (value > 0 or name not in POSITIVE) and least <= value < most
            words = "above 0" if name in POSITIVE else f"{least} or more"
            require(c, name, fits, f"should be {words} and below {most:g}")
    exists = c.model.isidentifier() and not c.model.startswith("__") and find_spec(c.model)
    require(c, "model", exists, f"there is no file {c.model}.py beside train.py")
    units = hasattr(import_module(c.model), "units")
    require(c, "model", units, f"{c.model}.py has no function units(c, tp, ops, cp)")
    own_fields(c)
    for model, names in READ_BY.items():
        for name in names if c.model in READ_BY and c.model != model else ():
            usual = getattr(c, name) == getattr(Config, name)
            require(c, name, usual, f"only {model}.py reads it; set --model={model}")


def check(c, world):
    """Raise UserError if `c` cannot run on `world` processes. Return the number of data ranks, dp * cp."""
    check_values(c)
    falls = c.lr_decay_style != "wsd" or c.lr_wsd_decay_iters > 0
    require(c, "lr_decay_style", falls, "set lr_wsd_decay_iters, the updates in which the rate falls")
    require(c, "min_lr", c.min_lr <= c.lr, f"should be at most lr={c.lr}")
    require(c, "train_iters", c.train_iters or c.train_epochs or c.eval_only, "should be above 0")
    lower = c.min_loss_scale <= c.initial_loss_scale
    require(c, "min_loss_scale", lower, f"should be at most initial_loss_scale={c.initial_loss_scale}")
    enough = c.eval_iters > 0 or not c.eval_only
    require(c, "eval_iters", enough, "eval_only averages over eval_iters global batches; should be 1 or more")
    require(c, "split", c.split == "val" or c.eval_only, "only --eval_only reads it; should be val in training")
    require(c, "seq_length", c.seq_length <= c.positions, f"should be at most max_position_embeddings={c.positions}")
    return check_layout(c, world)


def divides(small, divisor, big, value, why=""):
    """Raise UserError unless `value` is a multiple of `divisor`. small, big: their names."""
    if value % divisor:
        raise UserError(f"{big} = {value} is not a multiple of {small} = {divisor}{why}")


def check_sizes(c):
    """Raise UserError if the model's sizes, or its parts on tp ranks, are not whole numbers."""
    divides("num_attention_heads", c.num_attention_heads, "hidden_size", c.hidden_size)
    divides("tp", c.tp, "num_attention_heads", c.num_attention_heads, ": a tensor parallel rank has whole heads")
    divides("tp", c.tp, "padded vocab_size", c.padded_vocab_size)
    divides("num_query_groups", c.query_groups, "num_attention_heads", c.num_attention_heads)
    divides("tp", c.tp, "num_query_groups", c.query_groups, ": a tensor parallel rank has whole groups")
    divides("tp", c.tp, "ffn_hidden_size", c.ffn_size)
    if c.model == "llama":
        even = f"heads of size {c.head_size}; should be even, because positions rotate pairs of elements"
        require(c, "num_attention_heads", c.head_size % 2 == 0, even)


def check_layout(c, world):
    """Raise UserError if a size is not divisible. Return the number of data ranks, dp * cp."""
    check_sizes(c)
    if c.sequence_parallel:
        divides("tp * cp", c.tp * c.cp, "seq_length", c.seq_length, ": sequence_parallel shards the tokens")
    divides("cp", c.cp, "seq_length", c.seq_length)
    divides("tp * cp", c.tp * c.cp, "num_attention_heads", c.num_attention_heads, ": a rank has whole heads")
    divides("tp * cp * pp", c.tp * c.cp * c.pp, "the number of processes", world)
    data_ranks = world // (c.tp * c.pp)
    shards, rest = divmod(data_ranks, c.zero_copies)
    fits = c.zero_copies == 1 or (c.zero and shards > 1 and not rest)
    why = f"needs zero=1, 2 or 3, and should cut the {data_ranks} data ranks (dp * cp) into equal groups of 2 or more"
    require(c, "zero_copies", fits, why)
    start, increment, _ = rampup(c)
    divides("increment", increment, "rampup_batch_size: global_batch_size - start", c.global_batch_size - start)
    batch = math.gcd(start, increment, c.global_batch_size)  # divides all sizes of a growing batch
    name = "rampup_batch_size: common divisor" if c.rampup_batch_size else "global_batch_size"
    dp = data_ranks // c.cp
    divides("micro_batch_size * dp", c.micro_batch_size * dp, name, batch, remedy(c, batch, dp))
    most = number_of_micro_batches(c, c.global_batch_size, data_ranks)
    why = f"makes {most:,} micro-batches in an update; should be at most {MOST_MICRO_BATCHES:,.0f}"
    require(c, "global_batch_size", most <= MOST_MICRO_BATCHES, why)
    m = number_of_micro_batches(c, batch, data_ranks)
    require(c, "chunks", c.chunks <= c.num_layers + 2, f"should be at most num_layers + 2 = {c.num_layers + 2}")
    try:  # usually the remainder decides whether a schedule suits m
        parts = parts_of(c.schedule, c.pp, min(m, c.pp + m % c.pp), c.chunks)
    except UserError:
        parts = parts_of(c.schedule, c.pp, m, c.chunks)
    why = f"should be at least {parts - 2}, because pp={c.pp} and chunks={c.chunks} make {parts} parts of the model"
    require(c, "num_layers", c.num_layers >= parts - 2, why)
    return data_ranks


@functools.cache
def parts_of(schedule, stages, microbatches, chunks):
    """Return into how many parts a schedule cuts the model. Raises UserError."""
    return max(simulation.build(schedule, stages, microbatches, chunks).parts) + 1


def remedy(c, batch, dp):
    """Name the largest micro_batch_size with which `dp` ranks share `batch` samples evenly, if there is one."""
    fitting = [size for size in range(1, c.micro_batch_size + 1) if batch % (size * dp) == 0]
    return f"; set --micro_batch_size={fitting[-1]}" if fitting else f"; it should be a multiple of dp = {dp}"
