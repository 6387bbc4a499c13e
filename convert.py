"""Convert GPT-2 and OPT between a folder of Hugging Face's transformers and a checkpoint.

    python convert.py from_hf FOLDER --out=out/NAME       writes out/NAME/step_0 and out/NAME/config.py
    python convert.py to_hf out/NAME --out=FOLDER         writes config, weights and tokenizer

The model of model.py is GPT-2, and with ReLU it is OPT. So a conversion renames tensors and changes their shapes.
"Here" is the model of model.py and "there" is transformers (pip install transformers). The model must fit into memory
twice.

    tensor                    there                                   here
    GPT-2's linears           transposed (`Conv1D`)                   [out, in]
    OPT's position rows       two more, of padding (to_hf: zeros)     from_hf drops them
    word table                vocab_size rows                         padded to a multiple of 128 rows, with zeros
    16-bit weights            as they are                             float32
    <|endoftext|> in a text   one token                               plain text
"""

from errors import UserError, exit_on_user_error, explained, reading  # isort: skip
from options import Parser  # isort: skip
import os
import re
import sys
from pathlib import Path

import torch

import config as configuration
from config import Config
from generate import compare_logits, load_model
from model import GPT
from recovery import checkpoint
from reference import ACTIVATIONS
from tokenizer import copy, load_tokenizer

# Each table has a column for GPT-2 and one for OPT; `opt` chooses it.
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
    dict(layer_norm_epsilon=1e-5, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
    dict(do_layer_norm_before=True, enable_bias=True, _remove_final_layer_norm=False),
)


def transformers():
    """Import transformers. It must not take kernels.py for the package of this name."""
    kernels_module, sys.modules["kernels"] = sys.modules.get("kernels"), None
    try:
        with reading("convert.py needs transformers (pip install transformers)", ImportError):
            import transformers

            transformers.utils.is_kernels_available()  # transformers remembers this answer
    finally:
        del sys.modules["kernels"]
        if kernels_module is not None:
            sys.modules["kernels"] = kernels_module
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


# --- tensors ----------------------------------------------------------------------------------------------------------


def hf_names(opt, name):
    """Return the names there of a parameter: three for OPT's qkv, otherwise one."""
    block, module, suffix = re.fullmatch(r"(?:block(\d+)\.)?(.*?)\.?(weight|bias|)", name).groups()
    modules = MODULES[module][opt].replace("#", str(block)).split()
    return [f"{PREFIX[opt]}{module}.{suffix or 'weight'}" for module in modules]


def pairs(opt, spec, whole, tensors):
    """Yield pairs of views of (`whole`, `tensors` there) with the same elements, to copy in either direction."""
    hf_tensors = [tensors[name] for name in hf_names(opt, spec.name)]
    if not opt and re.fullmatch(r"block\d+\.(qkv|proj|fc1|fc2)\.weight", spec.name):
        hf_tensors = [tensor.T for tensor in hf_tensors]
    if opt and spec.name == "embedding.position":
        hf_tensors = [tensor[2:] for tensor in hf_tensors]
    whole = whole.flatten(0, 1) if ".qkv." in spec.name else whole
    whole = whole[: sum(map(len, hf_tensors))]  # the word table's padding has no counterpart
    return zip(whole.chunk(len(hf_tensors)), hf_tensors, strict=True)


# --- from_hf ----------------------------------------------------------------------------------------------------------


def from_hf(folder, out):
    """Write the checkpoint out/step_0 and the configuration out/config.py from a folder of transformers."""
    hf, options, vocabulary = transformers(), {"local_files_only": True}, str(Path(folder).resolve())
    with reading(f"{folder}: not a GPT-2 or OPT as model.py has it", Exception):
        hf_config = hf.AutoConfig.from_pretrained(folder, **options)
        config, tokenizer = config_from_hf(hf_config, out), load_tokenizer(vocabulary)
        if tokenizer.n_vocab > config.vocab_size:
            sizes = f"its tokenizer has {tokenizer.n_vocab:,} ids, its word table {config.vocab_size:,} rows"
            remedy = f"add rows: model.resize_token_embeddings({tokenizer.n_vocab})"
            raise UserError(f"{folder}: {sizes}; remove the added tokens, or {remedy}")
        model, info = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
        for what, names in info.items():
            if names := [str(name) for name in names if not str(name).endswith(".attn.masked_bias")]:  # of old files
                raise ValueError(f"{what.replace('_', ' ')}: {', '.join(sorted(names))}")
        if not torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight):
            raise ValueError("lm_head.weight differs from the word table; the model here has one table for both")
    final = checkpoint.step_path(out, 0)
    with explained(f"out={out}"):
        final.parent.mkdir(parents=True)  # it must not exist
        final.mkdir()
        write_checkpoint(final, hf_config.model_type == "opt", model, config, tokenizer)
        changed = {field: value for field, value in vars(config).items() if value != getattr(Config, field)}
        lines = [f"# {folder}, written by convert.py", *(f"{field} = {value!r}" for field, value in changed.items())]
        Path(out, "config.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{folder} -> {final}; to train it further:")
    print(f"python prepare.py FILES --tokenizer={vocabulary} --out={config.data_dir}")
    print(f"torchrun train.py {out}/config.py")
    dropouts = dict(attention_dropout=0.0, layerdrop=0.0, attn_pdrop=0.0, embd_pdrop=config.dropout)
    for name, rate in dropouts.items():
        hf_rate = getattr(hf_config, name, 0.0 if name == "embd_pdrop" else rate)  # OPT's embedding has no dropout
        if hf_rate != rate:
            print(f"{name}={hf_rate} there is {rate} here")


def config_from_hf(hf_config, out):
    """Return the Config of transformers' configuration `hf_config`."""
    opt = {"gpt2": False, "opt": True}[hf_config.model_type]
    activation = {hf_name: name for name, row in ACTIVATIONS.items() for hf_name in row.hugging_face}
    for name, value in (fixed(opt, hf_config.hidden_size) | {"quantization_config": None}).items():
        hf_value = getattr(hf_config, name, None)
        if hf_value not in (None, value):
            raise ValueError(f"{name}={hf_value}: the model here has {name}={value}")
    values = {field: getattr(hf_config, hf_fields[opt]) for field, hf_fields in FIELDS.items()}
    values["activation"] = activation[hf_config.activation_function]
    values["seq_length"] = values["max_position_embeddings"]
    values |= dict(out_dir=str(out), data_dir=f"data/{Path(out).name}", micro_batch_size=1, global_batch_size=32)
    config = Config(**values, train_iters=1000, lr=3e-5, lr_decay_style="constant")
    configuration.check(config, world=1)
    return config


def fixed(opt, h):
    """Return the fields there that have only one value here."""
    sizes = {"ffn_dim": 4 * h, "word_embed_proj_dim": h} if opt else {"n_inner": 4 * h}
    return FIXED[opt] | sizes | {"tie_word_embeddings": True}


def write_checkpoint(folder, opt, model, config, tokenizer):
    """Write the checkpoint of step 0: the weights, moments of 0, and index.json."""
    tensors, sums, dtype = model.state_dict(), {}, torch.promote_types(model.dtype, torch.float32)
    specs = GPT(config, tp=None).specs()
    for name, spec in specs.items():
        whole = torch.zeros(spec.shape, dtype=dtype)
        for part, hf_part in pairs(opt, spec, whole, tensors):
            part.copy_(hf_part)
        (folder / name).write_bytes(whole.numpy())
        sums[name] = checkpoint.checksum(whole.flatten().numpy())
        for moment in (f"{name}.moment0", f"{name}.moment1"):  # sparse files
            (folder / moment).touch()
            os.truncate(folder / moment, whole.nbytes)
            sums[moment] = 0
    if tokenizer.name != "bytes":
        copy(tokenizer, folder)
    state = {
        "shapes": {name: list(spec.shape) for name, spec in specs.items()},
        "config": {name: getattr(config, name) for name in [*FIELDS, "activation", "experts"]},  # a run sets the others
        "tokenizer": tokenizer.name,
        "counters": {"iteration": 0, "consumed_samples": 0, "updates": 0},
        "loss_scale": {"dynamic": False, "scale": 1.0, "clean": 0, "patience": 0},
    }
    checkpoint.write_index(folder, dtype, state, sums)


# --- to_hf ------------------------------------------------------------------------------------------------------------


def to_hf(path, out):
    """Write a folder of transformers from the checkpoint `path`, or from the latest one in it."""
    hf, (model, tokenizer) = transformers(), load_model(path, torch.device("cpu"))
    hf_model = exported(hf, model, tokenizer)
    hf_model.generation_config.pad_token_id = tokenizer.eot_token
    without_text = list(range(tokenizer.n_vocab, model.config.vocab_size))  # generate.py never draws these ids
    hf_model.generation_config.suppress_tokens = without_text or None
    with explained(f"out={out}"):
        Path(out).mkdir(parents=True)
        hf_model.save_pretrained(out)
        copy(tokenizer, out)
    print(f"{path} -> {out}, {type(hf_model).__name__}")
    if not Path(out, "tokenizer.json").exists():
        print(f"without a tokenizer: Hugging Face's format does not hold {tokenizer.name}'s")


@torch.no_grad()
def exported(hf, model, tokenizer):
    """Return transformers' model with the weights of `model`. Raises UserError if it has no place for them, or if its
    logits of 16 tokens differ.
    """
    config, opt = model.config, model.config.activation == "relu"
    with torch.device("meta"):
        hf_model = hf.AutoModelForCausalLM.from_config(config_to_hf(hf, opt, config, tokenizer))
    tensors = {name: torch.zeros(tensor.shape) for name, tensor in hf_model.state_dict().items()}
    changed = f"model.py is changed: it is no {type(hf_model).__name__} of Hugging Face"
    with reading(changed, RuntimeError):
        for p in model.parameters():
            for part, hf_part in pairs(opt, p.spec, p.detach(), tensors):
                hf_part.copy_(part)
    hf_model.load_state_dict(tensors, assign=True)
    hf_model.tie_weights()  # the head
    ids = torch.arange(min(16, config.positions))[None] % tokenizer.n_vocab
    theirs = hf_model.eval()(ids).logits[0, :, : tokenizer.n_vocab]
    compare_logits(model(model.micro_batch(ids)), theirs, changed)
    return hf_model


def config_to_hf(hf, opt, c, tokenizer):
    """Return transformers' configuration of this Config."""
    names, end = ACTIVATIONS[c.activation].hugging_face, tokenizer.eot_token
    configuration.require(c, "activation", names, "transformers has no name for it")
    configuration.require(c, "experts", not c.experts, "GPT-2 and OPT have no experts in transformers")
    values = {hf_fields[opt]: getattr(c, field) for field, hf_fields in FIELDS.items()}
    values |= fixed(opt, c.hidden_size)
    values |= {FIELDS["max_position_embeddings"][opt]: c.positions, "activation_function": names[0]}
    # attention's probabilities have no dropout here
    values |= {"attention_dropout": 0.0} if opt else {"attn_pdrop": 0.0, "embd_pdrop": c.dropout}
    # OPT's default pad_token_id, 1, would stop the gradient of row 1 of the word table
    kind = "opt" if opt else "gpt2"
    return hf.AutoConfig.for_model(kind, **values, bos_token_id=end, eos_token_id=end, pad_token_id=None)


# --- the command line -------------------------------------------------------------------------------------------------


def main():
    parser = Parser(prog="python convert.py", description="Converts GPT-2 and OPT.", allow_abbrev=False)
    parser.add_argument("direction", choices=("from_hf", "to_hf"), help="from or to Hugging Face's transformers")
    parser.add_argument("source", help="from_hf: the model's folder; to_hf: out_dir of a run, or a step_N folder")
    parser.add_argument("--out", required=True, help="from_hf: an out_dir; to_hf: a new folder")
    a = parser.parse_args()
    (from_hf if a.direction == "from_hf" else to_hf)(a.source, a.out)


if __name__ == "__main__":
    exit_on_user_error(main)
