"""Convert GPT-2 and OPT between a folder of Hugging Face's transformers and a checkpoint.

    python convert.py from_hf FOLDER --out=out/NAME       writes out/NAME/step_0 and out/NAME/config.py
    python convert.py to_hf out/NAME --out=FOLDER         writes config, weights and tokenizer

The model of model.py is GPT-2, and with ReLU it is OPT. So a conversion only renames tensors and changes their shapes.
In this file, "here" is the model of model.py and "there" is transformers:

    here                      GPT-2 (transformer.*)      OPT (model.decoder.*)
    word.weight               wte                        embed_tokens
    embedding.position        wpe                        embed_positions, with two rows more
    block0.ln1                h.0.ln_1                   layers.0.self_attn_layer_norm
    block0.qkv [3, h, h]      h.0.attn.c_attn [h, 3h]    layers.0.self_attn.q_proj, k_proj, v_proj [h, h]
    block0.proj [h, h]        h.0.attn.c_proj [h, h]     layers.0.self_attn.out_proj [h, h]
    block0.ln2                h.0.ln_2                   layers.0.final_layer_norm
    block0.fc1 [4h, h]        h.0.mlp.c_fc [h, 4h]       layers.0.fc1 [4h, h]
    block0.fc2 [h, 4h]        h.0.mlp.c_proj [4h, h]     layers.0.fc2 [h, 4h]
    head.ln                   ln_f                       final_layer_norm

GPT-2's linears are transposed (`Conv1D`). OPT's first two position rows belong to padding and are never used with text.
from_hf drops them and to_hf writes zeros. The word table has vocab_size rows there. Here it is padded to a multiple of
128 rows. to_hf cuts the padding off and from_hf fills it with zeros. The padding's ids have no probability and their
rows no gradient, so the values have no effect. Weight decay keeps them 0. All other weights, exported and imported
again, have the same bits. from_hf turns 16-bit weights into float32.

Cost: each tensor is read once and written once, one after the other. So the memory needed is about three times the
largest tensor, for a model of any size.
"""

import contextlib
import functools
import json
import math
import mmap
import os
import pickle
import re
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import config as configuration
from config import Config
from errors import Parser, UserError, exit_on_user_error, explained, parse_json, regular
from model import GPT
from parallel import checkpoint
from tokenizer import copied, copy, load_tokenizer

SHARD = 4 * 10**9  # limit of an exported file's weights in bytes; one parameter may be larger
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


# --- the two families -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A model of transformers: the names of its tensors and of the fields in its config.json."""

    name: str
    architecture: str
    prefix: str
    modules: dict  # {module here: modules there}
    transposed: bool  # True if the weights of linears are [in, out]
    offset: int  # number of position rows before position 0
    fields: dict  # {field of `Config`: field of config.json}
    fixed: dict  # {field of config.json: (value, reason)}: a folder with another value is refused

    def names(self, name):
        """Return the names there, without the prefix, of the parameter `name` here."""
        block, module, kind = re.fullmatch(r"(?:block(\d+)\.)?(.*?)\.?(weight|bias|)", name).groups()
        return [f"{there.format(block)}.{kind or 'weight'}" for there in self.modules[module].split()]

    def is_transposed(self, spec):
        return self.transposed and re.fullmatch(r"block\d+\.(qkv|proj|fc1|fc2)\.weight", spec.name) is not None

    def to_here(self, spec, tensors):
        """Return the whole tensor of a ParamSpec from transformers' tensors, in the order of `names`."""
        whole = torch.cat([t.T if self.is_transposed(spec) else t for t in tensors])
        if spec.name == "embedding.position":
            whole = whole[self.offset :]
        if spec.name == "word.weight":
            whole = F.pad(whole, (0, 0, 0, spec.shape[0] - len(whole)))
        return whole.reshape(spec.shape)

    def to_there(self, spec, whole, vocab_size):
        """Return transformers' tensors of a ParamSpec from its whole tensor. This is the inverse of `to_here`."""
        names = self.names(spec.name)
        if spec.name == "embedding.position":
            whole = F.pad(whole, (0, 0, self.offset, 0))
        if spec.name == "word.weight":
            whole = whole[:vocab_size]
        if ".qkv." in spec.name:
            whole = whole.flatten(0, 1)
        return [t.T if self.is_transposed(spec) else t for t in whole.chunk(len(names))]

    def shapes(self, config):
        """Return {ParamSpec: [(name there, shape there)]} of the model, in the model's order."""
        return {
            spec: [
                (name, tuple(t.shape))
                for name, t in zip(
                    self.names(spec.name),
                    self.to_there(spec, torch.empty(spec.shape, device="meta"), config.vocab_size),
                    strict=True,
                )
            ]
            for spec in GPT(config, tp=None).specs().values()
        }


TIED = {"tie_word_embeddings": (True, "the model here uses the word table as embedding and as head")}
GPT2 = Family(
    "gpt2", "GPT2LMHeadModel", "transformer.",
    {
        "word": "wte", "embedding.position": "wpe", "ln1": "h.{}.ln_1", "qkv": "h.{}.attn.c_attn",
        "proj": "h.{}.attn.c_proj", "ln2": "h.{}.ln_2", "fc1": "h.{}.mlp.c_fc", "fc2": "h.{}.mlp.c_proj",
        "head.ln": "ln_f",
    },
    transposed=True,
    offset=0,
    fields={
        "num_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions", "vocab_size": "vocab_size", "dropout": "resid_pdrop",
        "init_method_std": "initializer_range",
    },
    fixed=TIED | {
        "layer_norm_epsilon": (1e-5, "LayerNorm here adds 1e-5 to the variance"),
        "scale_attn_weights": (True, "attention here divides the scores by the root of the head size"),
        "scale_attn_by_inverse_layer_idx": (False, "attention here divides by the root of the head size alone"),
        "add_cross_attention": (False, "the model here has no cross-attention"),
    },
)  # fmt: skip
OPT = Family(
    "opt", "OPTForCausalLM", "model.decoder.",
    {
        "word": "embed_tokens", "embedding.position": "embed_positions", "ln1": "layers.{}.self_attn_layer_norm",
        "qkv": " ".join(f"layers.{{0}}.self_attn.{x}_proj" for x in "qkv"), "proj": "layers.{}.self_attn.out_proj",
        "ln2": "layers.{}.final_layer_norm", "fc1": "layers.{}.fc1", "fc2": "layers.{}.fc2",
        "head.ln": "final_layer_norm",
    },
    transposed=False,
    offset=2,
    fields={
        "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings", "vocab_size": "vocab_size", "dropout": "dropout",
        "init_method_std": "init_std",
    },
    fixed=TIED | {
        "do_layer_norm_before": (True, "LayerNorm here is before attention and MLP; OPT-350M has it after"),
        "enable_bias": (True, "every linear here has a bias"),
        "layer_norm_elementwise_affine": (True, "every LayerNorm here has a weight and a bias"),
        "_remove_final_layer_norm": (False, "the head here begins with a LayerNorm"),
    },
)  # fmt: skip
FAMILIES = {family.name: family for family in (GPT2, OPT)}
MODEL = "num_layers hidden_size num_attention_heads max_position_embeddings vocab_size activation".split()


# --- from_hf ----------------------------------------------------------------------------------------------------------


def from_hf(folder, out):
    """Write the checkpoint out/step_0 and the configuration out/config.py from a folder of transformers."""
    if steps := checkpoint.all_steps(out):
        raise UserError(f"out={out}: contains step_{steps[-1]}; use another --out")
    family, config = read_config(folder, out)
    tokenizer = load_tokenizer(str(folder))
    if tokenizer.n_vocab > config.vocab_size:
        raise UserError(f"{folder}: its tokenizer has {tokenizer.n_vocab} ids, but its model has {config.vocab_size}")
    stored, shapes = Stored(folder, family.prefix), family.shapes(config)
    dtype = stored.check(dict(pair for pairs in shapes.values() for pair in pairs))
    final, sums = checkpoint.step_path(out, 0), {}
    with complete(final) as writing, progress(shapes, dtype) as bar:
        for spec, pairs in shapes.items():
            whole = family.to_here(spec, [stored.read(name).to(dtype) for name, _ in pairs])
            whole = whole.contiguous()
            write_file(writing / spec.name, [whole])
            sums[spec.name] = checkpoint.checksum(whole.flatten().numpy())
            for k in (0, 1):  # AdamW's moments are 0 at first: sparse files, which use no disk space
                with open(writing / f"{spec.name}.moment{k}", "wb") as file:
                    file.truncate(whole.nbytes)
                sums[f"{spec.name}.moment{k}"] = 0  # the sum of zeros
            bar.update(whole.nbytes)
        if tokenizer.name != "bytes":
            copy(tokenizer, writing)
        checkpoint.write_index(writing, dtype, first_index(config, shapes, tokenizer), sums)
    (Path(out) / "config.py").write_text(config_text(config, family, folder, tokenizer), encoding="utf-8")
    print(
        f"{folder} -> {final}, the vocabulary is {tokenizer.name}\n"
        f"text:  python generate.py {out}\n"
        f"train: {prepare_command(config, tokenizer)}\n"
        f"       torchrun --nproc_per_node=N train.py {out}/config.py"
    )


def read_config(folder, out):
    """Return (Family, Config) of the config.json in `folder`. Raises UserError if the model here differs."""
    path = Path(folder) / "config.json"
    there = read_json(path)
    family = FAMILIES.get(str(there.get("model_type")))
    if family is None:
        raise UserError(f"{path}: model_type={there.get('model_type')}: should be one of {', '.join(FAMILIES)}")
    if there.get("quantization_config"):
        raise UserError(f"{path}: quantization_config: the weights are quantized; the model here needs 16 bits or more")
    values = {}
    for here, name in family.fields.items():
        kind = type(getattr(Config, here))
        value = there.get(name, 0.0 if kind is float else None)
        if type(value) not in (kind, int):
            raise UserError(f"{path}: {name}={value!r}: should be {kind.__name__}")
        values[here] = kind(value)
    refuse_differences(path, family, there, values["hidden_size"])
    activation = there.get("activation_function", "gelu_new" if family is GPT2 else "relu")
    if str(activation) not in ACTIVATIONS:
        why = "; gelu there is the exact one, here it is the approximation with tanh" if activation == "gelu" else ""
        raise UserError(f"{path}: activation_function={activation}: should be one of {', '.join(ACTIVATIONS)}{why}")
    values |= {"seq_length": values["max_position_embeddings"], "activation": ACTIVATIONS[activation]}
    values["init_method_std"] = values["init_method_std"] or Config.init_method_std
    places = dict(out_dir=str(out), data_dir=f"data/{Path(out).name}")
    config = Config(**values, **places, train_iters=1000, lr=3e-5, lr_decay_style="constant")
    try:
        configuration.check(config, world=1)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return family, config


def refuse_differences(path, family, there, h):
    """Raise UserError if a field of config.json describes a model that differs from the model here."""
    inner, narrow = "n_inner" if family is GPT2 else "ffn_dim", "word_embed_proj_dim"
    widths = {inner: (4 * h, f"the MLP here has 4 * {h} = {4 * h} columns")}
    if family is OPT:
        widths[narrow] = h, f"the word table here has hidden_size={h} columns (OPT-350M has 512)"
    for name, (value, why) in (family.fixed | widths).items():
        if there.get(name) is not None and there[name] != value:
            raise UserError(f"{path}: {name}={there[name]}: {why}")


def first_index(config, shapes, tokenizer):
    """Return the entries of index.json. Its `config` lacks the fields that a run may choose freely."""
    return {
        "shapes": {spec.name: list(spec.shape) for spec in shapes},
        "config": {name: getattr(config, name) for name in [*MODEL, "dropout", "init_method_std"]},
        "tokenizer": tokenizer.name,
        "counters": {"iteration": 0, "consumed_samples": 0, "updates": 0},
        "loss_scale": {"dynamic": False, "scale": 1.0, "clean": 0, "patience": 0},
    }


def config_text(config, family, folder, tokenizer):
    """Return the text of out/config.py, a configuration that continues the training of the model."""
    lines = "".join(f"{name} = {getattr(config, name)!r}\n" for name in MODEL)
    return f"""\
# {family.architecture} of {folder}, written by convert.py. Source of lr and its schedule: nanoGPT's
# config/finetune_shakespeare.py. seq_length and dropout are the model's.
# The batch sizes and train_iters are this project's choice.
# {prepare_command(config, tokenizer)}
{lines}
data_dir = {config.data_dir!r}
out_dir = {config.out_dir!r}
seq_length = {config.seq_length}
dropout = {config.dropout}
micro_batch_size = 1
global_batch_size = 32
train_iters = {config.train_iters}
lr = {config.lr}
lr_decay_style = {config.lr_decay_style!r}
"""


def prepare_command(config, tokenizer):
    """Return the command that writes the configuration's data set with the model's tokenizer."""
    own = tokenizer.name.startswith("bpe-")  # prepare.py can't find this name, but can read the checkpoint's copy
    name = checkpoint.step_path(config.out_dir, 0) if own else tokenizer.name
    return f"python prepare.py FILES --tokenizer={name} --out={config.data_dir}"


class Stored:
    """The tensors in a folder of transformers: safetensors or pytorch_model.bin, in one file or in several.

    A file is mapped into memory for one tensor at a time. If it stayed mapped, its pages would count as memory.
    """

    def __init__(self, folder, prefix):
        self.places = {}  # {name without prefix: (path, name)}
        names = "model.safetensors", "pytorch_model.bin"
        for self.found in (Path(folder) / f"{name}{index}" for name in names for index in ("", ".index.json")):
            if self.found.is_file():
                self._find(self.found, prefix)
                return
        raise UserError(f"{folder}: no model.safetensors and no pytorch_model.bin, in one file or with an index.json")

    def _find(self, path, prefix):
        if path.suffix == ".json":
            files = read_json(path).get("weight_map")
            if not isinstance(files, dict) or not all(Path(str(file)).name == file for file in files.values()):
                raise UserError(f"{path}: its weight_map should name a file of this folder for each tensor")
            files = {name: path.with_name(file) for name, file in files.items()}
        else:
            with opened(path) as (names, _):
                files = dict.fromkeys(names, path)
        for name, file in files.items():
            self.places[name.removeprefix(prefix).removeprefix("decoder.")] = file, name

    def read(self, name):
        """Return the tensor `name`. Its elements are read from the mapped file when they are used."""
        path, full = self.places[name]
        with opened(path) as (_, get):
            return get(full)

    def check(self, shapes):
        """Return the dtype of the checkpoint. Raises UserError unless the tensors are those of `shapes`, {name: shape}.

        Two kinds of tensors are ignored: the head, which is the word table, and GPT-2's causal masks.
        """
        dtypes = set()
        for name, shape in shapes.items():
            if name not in self.places:
                raise UserError(f"{self.found}: the tensor {name} is missing")
            tensor, path = self.read(name), self.places[name][0]
            if tuple(tensor.shape) != shape:
                raise UserError(f"{path}: {name} has the shape {list(tensor.shape)}, the model needs {list(shape)}")
            if tensor.dtype not in DTYPES:
                raise UserError(f"{path}: {name} has the dtype {tensor.dtype}, should be a float of 16 bits or more")
            dtypes.add(tensor.dtype)
        for name, (path, full) in self.places.items():
            if name not in shapes and not re.fullmatch(r"lm_head\.weight|h\.\d+\.attn\.(masked_)?bias", name):
                raise UserError(f"{path}: the model here has no place for the tensor {full}")
        return torch.float64 if torch.float64 in dtypes else torch.float32


@contextlib.contextmanager
def opened(path):
    """Yield (names, get) of a file of tensors: get(name) returns a tensor. Raises UserError.

    pytorch_model.bin is a pickle. weights_only=True runs no code from it. Linux refuses a private mapping that is
    larger than memory, so the mapping is shared. PyTorch opens a shared mapping only if the file may be written.
    Otherwise the mapping is private.
    """
    failures = OSError, pickle.UnpicklingError, RuntimeError, ValueError, KeyError, TypeError, AttributeError
    try:
        if path.suffix == ".safetensors":
            start, header = read_safetensors_header(path)
            yield list(header), functools.partial(map_tensor, path, start, header)
        else:
            kind = mmap.MAP_SHARED if os.access(path, os.W_OK) else mmap.MAP_PRIVATE
            with torch.serialization.set_default_mmap_options(kind):
                tensors = torch.load(path, "cpu", weights_only=True, mmap=True)
            if not all(isinstance(x, torch.Tensor) for x in tensors.values()):
                raise ValueError("not a state_dict: {name: tensor}")
            yield list(tensors), tensors.__getitem__
    except failures as error:
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: can't be read: {reason}") from None


# --- to_hf ------------------------------------------------------------------------------------------------------------


def to_hf(path, out):
    """Write a folder of transformers from the checkpoint `path`, or from the latest one in the folder `path`."""
    found = checkpoint.find(path)
    if found is None:
        raise UserError(f"{path}: there is no checkpoint")
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise UserError(f"out={out}: exists and is not an empty folder; use another --out")
    index = checkpoint.read_index(found)
    config, tokenizer = configuration.of_checkpoint(index), copied(found, index["tokenizer"])
    family = OPT if config.activation == "relu" else GPT2
    dtype, shapes = getattr(torch, index["dtype"]), family.shapes(config)
    with complete(Path(out)) as writing, progress(shapes, dtype) as bar:
        write_weights(
            writing, family, shapes, dtype, functools.partial(read_whole, found, index, bar), config.vocab_size
        )
        copy(tokenizer, writing)
        for name, values in descriptions(config, family, tokenizer).items():
            (writing / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    pieces = len(tokenizer.encode_ordinary(tokenizer.end))
    print(
        f"{found} -> {out}, {family.architecture}\n"
        f"{tokenizer.end} in a text is one token in transformers and ends the document; "
        f"it is {pieces} tokens here, plain text"
    )


def descriptions(config, family, tokenizer):
    """Return {file name: content} of the files that describe the model and its tokenizer to transformers."""
    end, h = tokenizer.eot_token, config.hidden_size
    special = {"bos_token_id": end, "eos_token_id": end}
    there = {"model_type": family.name, "architectures": [family.architecture]} | special
    there |= {"pad_token_id": None}  # OPT's default, 1, would stop the gradient of row 1 of the word table
    there |= {name: getattr(config, here) for here, name in family.fields.items()}
    there |= {name: value for name, (value, _) in family.fixed.items()}
    there["max_position_embeddings" if family is OPT else "n_positions"] = config.positions
    there["activation_function"] = {"gelu": "gelu_new", "relu": "relu"}[config.activation]
    there |= {"ffn_dim": 4 * h, "word_embed_proj_dim": h} if family is OPT else {"n_inner": 4 * h}
    there |= {"attention_dropout" if family is OPT else "attn_pdrop": 0.0}  # attention here has no dropout
    there |= {} if family is OPT else {"embd_pdrop": config.dropout}
    generation = special | {"pad_token_id": end}
    if without_text := list(range(tokenizer.n_vocab, config.vocab_size)):
        generation["suppress_tokens"] = without_text  # as in generate.py
    words = {"bos_token": tokenizer.end, "eos_token": tokenizer.end, "model_max_length": config.positions}
    words |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {"config.json": there, "generation_config.json": generation, "tokenizer_config.json": words}


def read_whole(folder, index, bar, spec):
    """Return the whole tensor of a ParamSpec, read from the checkpoint's file and verified."""
    whole = checkpoint.read_tensor(folder, index, spec)
    bar.update(whole.nbytes)
    return torch.from_numpy(whole)


def write_weights(folder, family, shapes, dtype, read, vocab_size):
    """Write model.safetensors, or model-0000I-of-0000N.safetensors and their index. read(spec): the whole tensor."""
    width, files = dtype.itemsize, [{}]  # each of `files`: {ParamSpec: [(name, shape)]}
    for spec, pairs in shapes.items():
        if files[-1] and size_of({**files[-1], spec: pairs}, width) > SHARD:
            files.append({})
        files[-1][spec] = pairs
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    names = names if len(files) > 1 else ["model.safetensors"]
    for name, part in zip(names, files, strict=True):
        tensors = (t for spec in part for t in family.to_there(spec, read(spec), vocab_size))
        write_file(folder / name, tensors, safetensors_header(part, family.prefix, dtype))
    if len(files) > 1:
        places = {
            family.prefix + n: name
            for name, part in zip(names, files, strict=True)
            for ps in part.values()
            for n, _ in ps
        }
        index = {"metadata": {"total_size": size_of(shapes, width)}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


# --- safetensors ------------------------------------------------------------------------------------------------------
#
#     n, 8 bytes | header, n bytes of JSON: {name: {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}} | data
#
# The offsets count bytes from the end of the header. github.com/huggingface/safetensors describes the format. The
# package maps a whole file privately, and Linux refuses this for a file larger than memory. So these functions map one
# tensor at a time.


def safetensors_header(part, prefix, dtype):
    """Return the bytes before the tensors of {ParamSpec: [(name, shape)]}, padded to a multiple of 8 bytes."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in (pair for pairs in part.values() for pair in pairs):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[prefix + name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_safetensors_header(path):
    """Return (where the data begins, {name: its entry}). Raises ValueError."""
    with open(path, "rb") as file:
        size, first = path.stat().st_size, file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > size - 8:
            raise ValueError("not a safetensors file, or truncated")
        header = parse_json(file.read(length))
    header.pop("__metadata__", None)
    if max(entry["data_offsets"][1] for entry in header.values()) > size - 8 - length:
        raise ValueError("truncated")
    return 8 + length, header


def map_tensor(path, start, header, name):
    """Return a tensor that is mapped from a safetensors file. Raises ValueError."""
    dtypes, entry = {text: dtype for dtype, text in DTYPES.items()}, header[name]
    if entry["dtype"] not in dtypes:
        raise ValueError(f"{name} has the dtype {entry['dtype']}, should be one of {', '.join(dtypes)}")
    dtype, (begin, end) = dtypes[entry["dtype"]], entry["data_offsets"]
    if begin < 0 or end - begin != math.prod(entry["shape"]) * dtype.itemsize:
        raise ValueError(f"{name} has {end - begin} bytes, which do not fit its shape {entry['shape']}")
    return torch.from_numpy(np.memmap(path, np.uint8, "c", start + begin, end - begin)).view(dtype).view(entry["shape"])


# --- files ------------------------------------------------------------------------------------------------------------


def size_of(shapes, width):
    """Return the bytes of {ParamSpec: [(name, shape)]}. width: bytes of an element."""
    return width * sum(math.prod(shape) for pairs in shapes.values() for _, shape in pairs)


def progress(shapes, dtype):
    total = sum(math.prod(spec.shape) for spec in shapes) * dtype.itemsize
    return tqdm(total=total, unit="B", unit_scale=True, smoothing=0.05)


def read_json(path):
    """Return the object in a JSON file. Raises UserError."""
    try:
        found = parse_json(regular(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None


def write_file(path, tensors, header=b""):
    """Write a header and tensors, in C order, and flush the file to disk."""
    with open(path, "wb") as file:
        file.write(header)
        for tensor in tensors:
            file.write(memoryview(tensor.contiguous().numpy()).cast("B"))
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def complete(folder):
    """Yield the folder `FOLDER.writing`. At the end, rename it: a folder with the final name is always complete.

    After an error, remove it. An OSError, for example a full disk, becomes a UserError.
    """
    writing = folder.with_name(folder.name + ".writing")
    try:
        with explained(f"out={folder}"):
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            yield writing
            writing.rename(folder)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


# --- the command line -------------------------------------------------------------------------------------------------


def arguments():
    """Return the parsed command line. Raises UserError."""
    parser = Parser(prog="python convert.py", description="Converts GPT-2 and OPT.", allow_abbrev=False)
    parser.add_argument("direction", choices=("from_hf", "to_hf"), help="from or to Hugging Face's transformers")
    parser.add_argument("source", help="from_hf: the model's folder; to_hf: out_dir of a run, or a step_N folder")
    parser.add_argument("--out", required=True, help="from_hf: an out_dir; to_hf: a new folder")
    return parser.parse_args()


def main():
    a = arguments()
    (from_hf if a.direction == "from_hf" else to_hf)(Path(a.source), a.out)


if __name__ == "__main__":
    exit_on_user_error(main)
