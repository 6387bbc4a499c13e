"""Convert GPT-2 and OPT between a folder of Hugging Face's transformers and a checkpoint.

    python convert.py from_hf FOLDER --out=out/NAME       writes out/NAME/step_0 and out/NAME/config.py
    python convert.py to_hf out/NAME --out=FOLDER         writes config, weights and tokenizer

The model of model.py is GPT-2, and with ReLU it is OPT. So a conversion renames tensors (MODULES) and changes their
shapes. In this file, "here" is the model of model.py and "there" is transformers, which reads and writes the folders
(pip install transformers). The model must fit into memory twice.

GPT-2's linears are transposed (`Conv1D`). OPT's first two position rows belong to padding and are never used with text.
from_hf drops them and to_hf writes zeros. The word table has vocab_size rows there. Here it is padded to a multiple of
128 rows. to_hf cuts the padding off and from_hf fills it with zeros. The padding's ids have no probability and their
rows no gradient, so the values have no effect. All other weights, exported and imported again, have the same bits.
from_hf turns 16-bit weights into float32. <|endoftext|> in a text is one token there and plain text here.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F

import config as configuration
from config import Config
from errors import Parser, UserError, exit_on_user_error, explained, reading
from model import GPT
from parallel import checkpoint
from reference import ACTIVATIONS
from tokenizer import copied, copy, load_tokenizer

# Each table has a column for GPT-2 and one for OPT. `opt`, True for OPT, chooses the column.
KINDS = ("gpt2", "opt")
PREFIX = ("transformer.", "model.decoder.")
MODULES = {  # {module here: modules there}; # is the number of the block
    "word": ("wte", "embed_tokens"),
    "embedding.position": ("wpe", "embed_positions"),
    "ln1": ("h.#.ln_1", "layers.#.self_attn_layer_norm"),
    "qkv": ("h.#.attn.c_attn", " ".join(f"layers.#.self_attn.{x}_proj" for x in "qkv")),
    "proj": ("h.#.attn.c_proj", "layers.#.self_attn.out_proj"),
    "ln2": ("h.#.ln_2", "layers.#.final_layer_norm"),
    "fc1": ("h.#.mlp.c_fc", "layers.#.fc1"),
    "fc2": ("h.#.mlp.c_proj", "layers.#.fc2"),
    "head.ln": ("ln_f", "final_layer_norm"),
}
FIELDS = {  # {field of Config: field there}
    "num_layers": ("n_layer", "num_hidden_layers"),
    "hidden_size": ("n_embd", "hidden_size"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
    "vocab_size": ("vocab_size", "vocab_size"),
    "dropout": ("resid_pdrop", "dropout"),
    "init_method_std": ("initializer_range", "init_std"),
}
FIXED = (  # {field there: the only value that the model here has}
    dict(
        tie_word_embeddings=True, layer_norm_epsilon=1e-5, scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
    ),
    dict(tie_word_embeddings=True, do_layer_norm_before=True, enable_bias=True, _remove_final_layer_norm=False),
)  # fmt: skip
NO_DROPOUT = (["attn_pdrop"], ["attention_dropout", "layerdrop"])  # dropouts there that are 0 here


def transformers():
    """Import and return transformers, without its warnings."""
    with reading("convert.py needs transformers (pip install transformers)", ImportError):
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        return transformers


# --- tensors ----------------------------------------------------------------------------------------------------------


def names_there(opt, name):
    """Return the names there of the parameter `name` here: three for OPT's qkv, otherwise one."""
    block, module, suffix = re.fullmatch(r"(?:block(\d+)\.)?(.*?)\.?(weight|bias|)", name).groups()
    modules = MODULES[module][opt].replace("#", str(block)).split()
    return [f"{PREFIX[opt]}{there}.{suffix or 'weight'}" for there in modules]


def turned(opt, spec, tensor):
    """Return GPT-2's linear weight transposed, and any other tensor as it is."""
    linear = not opt and re.fullmatch(r"block\d+\.(qkv|proj|fc1|fc2)\.weight", spec.name)
    return tensor.T if linear else tensor


def to_here(opt, spec, tensors):
    """Return the whole tensor of a ParamSpec from transformers' tensors, in the order of `names_there`."""
    whole = torch.cat([turned(opt, spec, tensor) for tensor in tensors])
    if opt and spec.name == "embedding.position":
        whole = whole[2:]
    if spec.name == "word.weight":
        whole = F.pad(whole, (0, 0, 0, spec.shape[0] - len(whole)))
    return whole.reshape(spec.shape).contiguous()


def to_there(opt, spec, whole, vocab_size):
    """Return {name: tensor} there from the whole tensor of a ParamSpec. This is the inverse of `to_here`."""
    names = names_there(opt, spec.name)
    if opt and spec.name == "embedding.position":
        whole = F.pad(whole, (0, 0, 2, 0))
    if spec.name == "word.weight":
        whole = whole[:vocab_size]
    if ".qkv." in spec.name:
        whole = whole.flatten(0, 1)
    parts = [turned(opt, spec, part).contiguous() for part in whole.chunk(len(names))]
    return dict(zip(names, parts, strict=True))


# --- from_hf ----------------------------------------------------------------------------------------------------------


def from_hf(folder, out):
    """Write the checkpoint out/step_0 and the configuration out/config.py from a folder of transformers."""
    if steps := checkpoint.all_steps(out):
        raise UserError(f"out={out}: contains step_{steps[-1]}; use another --out")
    hf, options = transformers(), {"local_files_only": True}
    with reading(folder, Exception):
        there = hf.AutoConfig.from_pretrained(folder, **options)
        config, tokenizer = config_here(there, folder, out), load_tokenizer(str(folder))
        if tokenizer.n_vocab > config.vocab_size:
            raise ValueError(f"its tokenizer has {tokenizer.n_vocab} ids, but its model has {config.vocab_size}")
        model, info = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
        check_weights(model, info)
    opt, final = there.model_type == "opt", checkpoint.step_path(out, 0)
    with complete(final) as writing:
        write_checkpoint(writing, opt, model, config, tokenizer)
    changed = {field: value for field, value in vars(config).items() if value != getattr(Config, field)}
    lines = [f"# {folder}, written by convert.py", *(f"{field} = {value!r}" for field, value in changed.items()), ""]
    Path(out, "config.py").write_text("\n".join(lines), encoding="utf-8")
    print(
        f"{folder} -> {final}, the vocabulary is {tokenizer.name}\n"
        f"text:  python generate.py {out}\n"
        f"train: python prepare.py FILES --tokenizer={folder} --out={config.data_dir}\n"
        f"       torchrun --nproc_per_node=N train.py {out}/config.py"
    )
    for name, here in (dict.fromkeys(NO_DROPOUT[opt], 0.0) | {"embd_pdrop": config.dropout}).items():
        if getattr(there, name, here) != here:
            print(f"{name}={getattr(there, name)} there is {here} here")


def config_here(there, folder, out):
    """Return the Config of transformers' configuration `there`. Raises UserError if the model here differs."""

    def need(name, fits, why):
        if not fits:
            raise UserError(f"{folder}/config.json: {name}={getattr(there, name)}: {why}")

    need("model_type", there.model_type in KINDS, f"should be one of {', '.join(KINDS)}")
    opt = there.model_type == "opt"
    known = {name: here for here, row in ACTIVATIONS.items() for name in row.hugging_face}
    for name, value in (fixed(opt, there.hidden_size) | {"quantization_config": None}).items():
        need(name, getattr(there, name, None) in (None, value), f"the model here has {name}={value}")
    need("activation_function", there.activation_function in known, f"should be one of {', '.join(known)}")
    values = {here: getattr(there, names[opt]) for here, names in FIELDS.items()}
    values |= {"activation": known[there.activation_function], "seq_length": values["max_position_embeddings"]}
    values |= dict(out_dir=str(out), data_dir=f"data/{Path(out).name}", micro_batch_size=1, global_batch_size=32)
    config = Config(**values, train_iters=1000, lr=3e-5, lr_decay_style="constant")
    configuration.check(config, world=1)
    return config


def fixed(opt, h):
    """Return the fields there that have only one value here. h: the hidden size."""
    return FIXED[opt] | ({"ffn_dim": 4 * h, "word_embed_proj_dim": h} if opt else {"n_inner": 4 * h})


def check_weights(model, info):
    """Raise ValueError unless the files have the model's tensors, and the head is the word table."""
    for what, names in info.items():
        names = [str(name) for name in names if not str(name).endswith(".attn.masked_bias")]  # masks of old files
        if names:
            raise ValueError(f"{what.replace('_', ' ')}: {', '.join(sorted(names))}")
    if not torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight):
        raise ValueError("lm_head.weight differs from the word table; the model here has one table for both")


def write_checkpoint(folder, opt, model, config, tokenizer):
    """Write step 0 of a run into `folder`: the weights, moments of 0, and index.json."""
    tensors, sums, dtype = model.state_dict(), {}, torch.promote_types(model.dtype, torch.float32)
    specs = GPT(config, tp=None).specs()
    for name, spec in specs.items():
        whole = to_here(opt, spec, [tensors[there].to(dtype) for there in names_there(opt, name)])
        (folder / name).write_bytes(memoryview(whole.numpy()).cast("B"))
        sums[name] = checkpoint.checksum(whole.flatten().numpy())
        for moment in (f"{name}.moment0", f"{name}.moment1"):  # AdamW's: sparse files, which use no disk space
            (folder / moment).touch()
            os.truncate(folder / moment, whole.nbytes)
            sums[moment] = 0  # the sum of zeros
        checkpoint.flush(folder / name)
    if tokenizer.name != "bytes":
        copy(tokenizer, folder)
    state = {
        "shapes": {name: list(spec.shape) for name, spec in specs.items()},
        "config": {name: getattr(config, name) for name in [*FIELDS, "activation"]},  # a run may choose other fields
        "tokenizer": tokenizer.name,
        "counters": {"iteration": 0, "consumed_samples": 0, "updates": 0},
        "loss_scale": {"dynamic": False, "scale": 1.0, "clean": 0, "patience": 0},
    }
    checkpoint.write_index(folder, dtype, state, sums)


# --- to_hf ------------------------------------------------------------------------------------------------------------


def to_hf(path, out):
    """Write a folder of transformers from the checkpoint `path`, or from the latest one in the folder `path`."""
    found, hf = checkpoint.find(path), transformers()
    if found is None:
        raise UserError(f"{path}: there is no checkpoint")
    index = checkpoint.read_index(found)
    config, tokenizer = configuration.of_checkpoint(index), copied(found, index["tokenizer"])
    opt = config.activation == "relu"
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config_there(hf, opt, config, tokenizer))
    tensors = {}
    for spec in GPT(config, tp=None).specs().values():
        whole = torch.from_numpy(checkpoint.read_tensor(found, index, spec))
        tensors |= to_there(opt, spec, whole, config.vocab_size)
    model.to(getattr(torch, index["dtype"])).load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()  # the head
    model.generation_config.pad_token_id = tokenizer.eot_token
    without_text = list(range(tokenizer.n_vocab, config.vocab_size))  # generate.py never draws these ids
    model.generation_config.suppress_tokens = without_text or None
    with complete(Path(out)) as writing:
        model.save_pretrained(writing)
        copy(tokenizer, writing)
    print(f"{found} -> {out}, {type(model).__name__}")


def config_there(hf, opt, c, tokenizer):
    """Return transformers' configuration of the model of the Config `c`."""
    names, end = ACTIVATIONS[c.activation].hugging_face, tokenizer.eot_token
    configuration.require(c, "activation", names, "transformers has no name for it")
    values = {there[opt]: getattr(c, here) for here, there in FIELDS.items()}
    values |= fixed(opt, c.hidden_size) | dict.fromkeys(NO_DROPOUT[opt], 0.0)
    values |= {} if opt else {"embd_pdrop": c.dropout}
    values |= {FIELDS["max_position_embeddings"][opt]: c.positions, "activation_function": names[0]}
    # OPT's default pad_token_id, 1, would stop the gradient of row 1 of the word table
    return hf.AutoConfig.for_model(KINDS[opt], **values, bos_token_id=end, eos_token_id=end, pad_token_id=None)


# --- the command line -------------------------------------------------------------------------------------------------


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
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def main():
    parser = Parser(prog="python convert.py", description="Converts GPT-2 and OPT.", allow_abbrev=False)
    parser.add_argument("direction", choices=("from_hf", "to_hf"), help="from or to Hugging Face's transformers")
    parser.add_argument("source", help="from_hf: the model's folder; to_hf: out_dir of a run, or a step_N folder")
    parser.add_argument("--out", required=True, help="from_hf: an out_dir; to_hf: a new folder")
    a = parser.parse_args()
    (from_hf if a.direction == "from_hf" else to_hf)(a.source, a.out)


if __name__ == "__main__":
    exit_on_user_error(main)
