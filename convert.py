"""Convert GPT-2, OPT and Llama between a folder of Hugging Face's transformers and a checkpoint.

    python convert.py from_hf FOLDER --out=out/NAME       writes out/NAME/step_0 and out/NAME/config.py
    python convert.py to_hf out/NAME --out=FOLDER         writes config, weights and tokenizer

The model of model.py is GPT-2, with ReLU it is OPT, and that of llama.py is Llama. So a conversion renames tensors and
changes their shapes. "Here" is this program and "there" is transformers (pip install transformers). The model must fit
into memory twice.

    tensor                    there                                   here
    GPT-2's linears           transposed (`Conv1D`)                   [out, in]
    OPT's position rows       two more, of padding (to_hf: zeros)     from_hf drops them
    Llama's q, k, v           three tensors                           one, group after group (`llama.py`)
    word table                vocab_size rows                         padded to a multiple of 128 rows, with zeros
    16-bit weights            as they are                             float32
    <|endoftext|> in a text   one token                               plain text

out/NAME/step_0 also keeps the files of `CARRIED`. to_hf gives them back if the run is in out/NAME, and no other file.
"""

from errors import UserError, exit_on_user_error, explained, fetched, losable, reading, shown  # isort: skip
from options import Parser  # isort: skip
import json
import os
import pickle
import re
import sys
from pathlib import Path
from shlex import quote

import torch

import config as configuration
from config import Config
from generate import compare_logits, load_model
from parallel.units import Model
from recovery import checkpoint
from reference import ACTIVATIONS
from tokenizer import COPY, PLAIN, SAME, FileTokenizer, copy, load_tokenizer

KINDS = GPT2, OPT, LLAMA = "gpt2", "opt", "llama"  # model_type there; each table has a column for each
PREFIX = ("transformer.", "model.decoder.", "model.")
QKV = " ".join(f"layers.#.self_attn.{x}_proj" for x in "qkv")
MODULES = {  # {module here: modules there}; # is the number of the block
    "word": ("wte", "embed_tokens", "embed_tokens"),
    "embedding.position": ("wpe", "embed_positions", None),
    "ln1": ("h.#.ln_1", "layers.#.self_attn_layer_norm", None),
    "norm1": (None, None, "layers.#.input_layernorm"),
    "qkv": ("h.#.attn.c_attn", QKV, QKV),
    "proj": ("h.#.attn.c_proj", "layers.#.self_attn.out_proj", "layers.#.self_attn.o_proj"),
    "ln2": ("h.#.ln_2", "layers.#.final_layer_norm", None),
    "norm2": (None, None, "layers.#.post_attention_layernorm"),
    "fc1": ("h.#.mlp.c_fc", "layers.#.fc1", "layers.#.mlp.gate_proj layers.#.mlp.up_proj"),
    "fc2": ("h.#.mlp.c_proj", "layers.#.fc2", "layers.#.mlp.down_proj"),
    "head.ln": ("ln_f", "final_layer_norm", None),
    "head.norm": (None, None, "norm"),
    "head": (None, None, "lm_head"),  # without the prefix
}
CONVERTED = {  # {field of Config: field there}
    "num_layers": ("n_layer", "num_hidden_layers", "num_hidden_layers"),
    "hidden_size": ("n_embd", "hidden_size", "hidden_size"),
    "num_attention_heads": ("n_head", "num_attention_heads", "num_attention_heads"),
    "num_query_groups": (None, None, "num_key_value_heads"),
    "ffn_hidden_size": (None, None, "intermediate_size"),
    "max_position_embeddings": ("n_positions", "max_position_embeddings", "max_position_embeddings"),
    "vocab_size": ("vocab_size", "vocab_size", "vocab_size"),
    "norm_epsilon": (None, None, "rms_norm_eps"),
    "dropout": ("resid_pdrop", "dropout", None),
    "init_method_std": ("initializer_range", "init_std", "initializer_range"),
}
MORE = "model activation rotary_base untie_embeddings_and_output_weights".split()  # these have other values there
FIXED = (  # {field there: the only value that the model here has}
    dict(
        layer_norm_epsilon=1e-5, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    ),
    dict(
        do_layer_norm_before=True, enable_bias=True, _remove_final_layer_norm=False,
        layer_norm_elementwise_affine=True,
    ),
    dict(hidden_act="silu", attention_bias=False, mlp_bias=False),
)  # fmt: skip
WEIGHTS = "model.safetensors model.safetensors.index.json pytorch_model.bin pytorch_model.bin.index.json".split()
CARRIED = "generation_config.json chat_template.jinja special_tokens_map.json".split()


def kind_of(c):
    """Return the kind of a Config. Raises UserError if transformers has no such model."""
    configuration.require(c, "model", c.model in ("model", "llama"), "transformers has no such model")
    return LLAMA if c.model == "llama" else OPT if c.activation == "relu" else GPT2


def refuse_existing(out):
    if os.path.lexists(out):
        raise UserError(f"--out={out}: is there already; choose another folder")


def column(row, kind):
    return row[KINDS.index(kind)]


def transformers():
    """Import transformers. It must not take kernels.py for the package of this name."""
    kernels_module, sys.modules["kernels"] = sys.modules.get("kernels"), None
    try:
        with reading("convert.py needs transformers (pip install transformers)", ImportError):
            import transformers

            if int(transformers.__version__.partition(".")[0]) < 5:
                raise ImportError(f"version {transformers.__version__} is too old; should be 5 or later")
            transformers.utils.is_kernels_available()  # transformers remembers this answer
    finally:
        del sys.modules["kernels"]
        if kernels_module is not None:
            sys.modules["kernels"] = kernels_module
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


# --- tensors ----------------------------------------------------------------------------------------------------------


def hf_names(kind, name):
    """Return the names there of a parameter: several for OPT's and Llama's qkv and Llama's fc1, otherwise one."""
    block, module, suffix = re.fullmatch(r"(?:block(\d+)\.)?(.*?)\.?(weight|bias|)", name).groups()
    modules = column(MODULES.get(module, [None] * len(KINDS)), kind)
    if modules is None:
        raise UserError(f"{kind} of transformers has no counterpart of {name}")
    prefix = "" if module == "head" else column(PREFIX, kind)
    return [f"{prefix}{hf_module}.{suffix or 'weight'}" for hf_module in modules.replace("#", str(block)).split()]


def pairs(c, spec, whole, tensors):
    """Yield pairs of views of (`whole`, `tensors` there) with the same elements, to copy in either direction."""
    kind = kind_of(c)
    hf_tensors = [tensors[name] for name in hf_names(kind, spec.name)]
    if kind == LLAMA and ".qkv." in spec.name:
        groups = whole.view(c.query_groups, -1, c.head_size, c.hidden_size)  # [g, a/g + 2, d, h]
        parts = groups.split([groups.shape[1] - 2, 1, 1], 1)
        return [(part, tensor.view(part.shape)) for part, tensor in zip(parts, hf_tensors, strict=True)]
    if kind == GPT2 and re.fullmatch(r"block\d+\.(qkv|proj|fc1|fc2)\.weight", spec.name):
        hf_tensors = [tensor.T for tensor in hf_tensors]
    if kind == OPT and spec.name == "embedding.position":
        hf_tensors = [tensor[2:] for tensor in hf_tensors]
    whole = whole.flatten(0, 1) if ".qkv." in spec.name or len(hf_tensors) > 1 else whole
    whole = whole[: sum(map(len, hf_tensors))]  # the word table's padding has no counterpart
    return zip(whole.chunk(len(hf_tensors)), hf_tensors, strict=True)


# --- from_hf ----------------------------------------------------------------------------------------------------------


def from_hf(folder, out):
    """Write the checkpoint out/step_0 and the configuration out/config.py from a folder of transformers."""
    refuse_existing(out)
    hf, options = transformers(), {"local_files_only": True, "trust_remote_code": False}
    carry(folder)
    vocabulary = str(Path(folder).resolve())
    with reading(f"{folder}: not a GPT-2, OPT or Llama as model.py and llama.py have it", Exception):
        hf_config = hf.AutoConfig.from_pretrained(folder, **options)
        config, tokenizer = config_from_hf(hf_config, out), load_tokenizer(vocabulary)
        if tokenizer.n_vocab > config.vocab_size:
            sizes = f"its tokenizer has {tokenizer.n_vocab:,} ids, its word table {config.vocab_size:,} rows"
            remedy = f"add rows: model.resize_token_embeddings({tokenizer.n_vocab})"
            raise UserError(f"{folder}: {sizes}; remove the added tokens, or {remedy}")
        check_weights(hf, folder)
        model, info = hf.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        info["nan or inf"] = [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]
        for what, names in info.items():
            if names := [str(name) for name in names if not str(name).endswith(".attn.masked_bias")]:  # of old files
                raise ValueError(f"{what.replace('_', ' ')}: {', '.join(sorted(names))}")
        tied = not config.untie_embeddings_and_output_weights
        if tied and not torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight):
            raise ValueError("lm_head.weight differs from the word table; the model here has one table for both")
    writing = Path(out, "step_0.writing")
    with explained(f"--out={out}"):
        Path(out).mkdir(parents=True)
        writing.mkdir()
        carry(folder, writing)
        write_checkpoint(writing, model, config, tokenizer)
        writing.rename(writing.with_suffix(""))
        changed = {field: value for field, value in vars(config).items() if value != getattr(Config, field)}
        # A string: Python obeys some comments ("coding: ..."), and a name may contain anything.
        lines = [repr(f"{folder}, by convert.py"), *(f"{field} = {value!r}" for field, value in changed.items())]
        Path(out, "config.py").write_text("\n".join(lines) + "\n", "utf-8")
    print(shown(f"{folder} -> {out}/step_0; to train it further:"))
    print(shown(f"python prepare.py FILES --tokenizer={quote(vocabulary)} --out={quote(config.data_dir)}"))
    print(shown(f"torchrun train.py {quote(out)}/config.py"))
    said = {name: value for name, value in vars(hf_config).items() if value is not None}
    theirs = vars(model.generation_config) | said
    ours = dict(
        attention_dropout=0.0, layerdrop=0.0, attn_pdrop=0.0, embd_pdrop=config.dropout,
        bos_token_id=tokenizer.begin, eos_token_id=tokenizer.eot_token,
    )  # fmt: skip
    for name, value in ours.items():
        hf_value = theirs.get(name, 0.0 if name == "embd_pdrop" else value)  # OPT's embedding has no dropout
        if hf_value != value:
            print(shown(f"{name}={hf_value} there is {value} here"))


def check_weights(hf, folder):
    """Raise UserError for a file of weights that can't be read, or has a tensor that is not floating-point."""
    paths = [path for name in WEIGHTS if (path := Path(folder, name)).exists()][:1]  # transformers' choice
    if paths and paths[0].suffix == ".json":
        paths, _ = hf.utils.hub.get_checkpoint_shard_files(folder, fetched(paths[0]))
    for path in paths:
        with reading(path, Exception):
            try:
                tensors = hf.modeling_utils.load_state_dict(fetched(path))
            except pickle.UnpicklingError:  # torch's text advises to run what is in it
                raise UserError(f"{path}: should be a file of tensors and nothing else") from None
            for name, tensor in tensors.items():
                if not (tensor.is_floating_point() or name.endswith(".attn.bias")):  # a mask of old files
                    raise UserError(f"{path}: {name} is {tensor.dtype}; should be floating-point")


def carry(source, folder=None):
    """Copy the files of CARRIED. Raises UserError for one that to_hf could not use. Without folder: only check them."""
    for path in (Path(source, name) for name in CARRIED):
        if path.exists():
            with reading(path):
                content = fetched(path).read_bytes()
                if path.suffix == ".json":
                    dict(**json.loads(content))
            if folder:
                Path(folder, path.name).write_bytes(content)


def config_from_hf(hf_config, out):
    """Return the Config of transformers' configuration `hf_config`."""
    if (kind := hf_config.model_type) not in KINDS:
        raise ValueError(f"model_type={kind}: should be {', '.join(KINDS)}")
    for name, value in (fixed(kind, hf_config) | {"quantization_config": None, "transformers_weights": None}).items():
        hf_value = getattr(hf_config, name, None)
        if hf_value not in (None, value):
            raise ValueError(f"{name}={hf_value}: the model here has {name}={value}")
    names = {field: column(hf_fields, kind) for field, hf_fields in CONVERTED.items()}
    values = {field: getattr(hf_config, name) for field, name in names.items() if name}
    if kind == LLAMA:
        rope = hf_config.rope_parameters
        if rope["rope_type"] != "default":
            raise ValueError(f"rope_type={rope['rope_type']}: the model here has rope_type=default")
        values |= dict(model="llama", rotary_base=rope["rope_theta"])
        values["untie_embeddings_and_output_weights"] = not hf_config.tie_word_embeddings
    else:
        activation = {hf_name: name for name, hf_names in ACTIVATIONS.items() for hf_name in hf_names}
        values["activation"] = activation[hf_config.activation_function]
    values["seq_length"] = values["max_position_embeddings"]
    values |= dict(out_dir=str(out), data_dir=f"data/{Path(out).name}", micro_batch_size=1, global_batch_size=32)
    values["initial_weights"] = f"{out}/step_0"  # of a run with another out_dir
    config = Config(**values, train_iters=1000, lr=3e-5, lr_decay_style="constant")
    if kind_of(config) != kind:
        raise ValueError(f"activation_function={hf_config.activation_function}: here that is no {kind}")
    configuration.check(config, world=1)
    return config


def fixed(kind, c):
    """Return the fields there that have only one value here. c: a Config, or transformers' configuration."""
    h, values = c.hidden_size, column(FIXED, kind)
    if kind == LLAMA:
        return values | {"head_dim": h // c.num_attention_heads}
    sizes = {"ffn_dim": 4 * h, "word_embed_proj_dim": h} if kind == OPT else {"n_inner": 4 * h}
    return values | sizes | {"tie_word_embeddings": True}


def write_checkpoint(folder, model, config, tokenizer):
    """Write the checkpoint of step 0: the weights, moments of 0, and index.json."""
    tensors, dtype = model.state_dict(), torch.promote_types(model.dtype, torch.float32)
    specs = Model(config, tp=None).specs()
    for name, spec in specs.items():
        whole = torch.zeros(spec.shape, dtype=dtype)
        for part, hf_part in pairs(config, spec, whole, tensors):
            part.copy_(hf_part)
        (folder / name).write_bytes(whole.numpy())
        for moment in (f"{name}.moment0", f"{name}.moment1"):  # sparse files
            (folder / moment).touch()
            os.truncate(folder / moment, whole.nbytes)
    copy(tokenizer, folder)
    state = {
        "shapes": {name: list(spec.shape) for name, spec in specs.items()},
        "config": {name: getattr(config, name) for name in [*CONVERTED, *MORE]},  # a run sets the others
        "tokenizer": tokenizer.name,
        "data": [],
        "counters": {"iteration": 0, "consumed_samples": 0, "updates": 0},
        "loss_scale": {"dynamic": False, "scale": 1.0, "clean": 0, "patience": 0},
    }
    names = sorted(path.name for path in folder.iterdir())
    checkpoint.write_index(folder, dtype, state, checkpoint.sums_of(folder, names))


# --- to_hf ------------------------------------------------------------------------------------------------------------


def to_hf(path, out):
    """Write a folder of transformers from the checkpoint `path`, or from the latest one in it."""
    refuse_existing(out)
    hf, (model, tokenizer) = transformers(), load_model(path, torch.device("cpu"))
    hf_model = exported(hf, model, tokenizer)
    with explained(f"--out={out}"):
        Path(out).mkdir(parents=True)
        hf_model.save_pretrained(out)
        write_tokenizer(tokenizer, out)
        carry(checkpoint.find(path).resolve().with_name("step_0"), out)
        generation = hf.GenerationConfig.from_pretrained(out)
        if generation.pad_token_id is None:
            generation.pad_token_id = tokenizer.eot_token
        without_text = list(range(tokenizer.n_vocab, model.config.vocab_size))  # generate.py never draws these ids
        generation.suppress_tokens = without_text or None
        generation.to_json_file(Path(out, "generation_config.json"))
    print(shown(f"{path} -> {out}, {type(hf_model).__name__}"))
    if not Path(out, "tokenizer.json").exists():
        print(f"without a tokenizer: Hugging Face's format does not hold {tokenizer.name}'s")


def write_tokenizer(tokenizer, out):
    """Write the files of a vocabulary, also of tiktoken's gpt2 and of bytes."""
    copy(tokenizer, out)
    if tokenizer.name in SAME.values() and not isinstance(tokenizer, FileTokenizer):
        from tokenizers.pre_tokenizers import ByteLevel
        from transformers.convert_slow_tokenizer import TikTokenConverter

        converter = TikTokenConverter(extra_special_tokens=[tokenizer.end])
        converter.load_tiktoken_bpe = lambda _: tokenizer.encoding._mergeable_ranks
        inner = converter.converted()
        inner.model.ignore_merges = False
        inner.pre_tokenizer = ByteLevel(add_prefix_space=False)  # GPT-2's pattern
        inner.save(f"{out}/{COPY[0]}")
        Path(out, COPY[1]).write_text(json.dumps(PLAIN | {"eos_token": tokenizer.end}))


@torch.no_grad()
def exported(hf, model, tokenizer):
    """Return transformers' model with the weights of `model`. Raises UserError if it has no place for them, or if its
    logits of 16 tokens differ.
    """
    config = model.config
    with torch.device("meta"):
        hf_model = hf.AutoModelForCausalLM.from_config(config_to_hf(hf, config, tokenizer))
    tensors = {name: torch.zeros(tensor.shape) for name, tensor in hf_model.state_dict().items()}
    changed = f"{config.model}.py is changed: it is no {type(hf_model).__name__} of Hugging Face"
    with reading(changed, RuntimeError):
        for p in model.parameters():
            for part, hf_part in pairs(config, p.spec, p.detach(), tensors):
                hf_part.copy_(part)
    hf_model.load_state_dict(tensors, assign=True)
    hf_model.tie_weights()
    if kind_of(config) == LLAMA:  # a state dict does not have its buffer
        hf_model.model.rotary_emb = type(hf_model.model.rotary_emb)(hf_model.config)
        hf_model.config.rope_theta = config.rotary_base  # for transformers 4
    ids = torch.arange(min(16, config.positions))[None] % tokenizer.n_vocab
    theirs = hf_model.eval()(ids).logits[0, :, : tokenizer.n_vocab]
    compare_logits(model(model.micro_batch(ids)), theirs, changed)
    return hf_model


def config_to_hf(hf, c, tokenizer):
    """Return transformers' configuration of this Config."""
    kind, activations, end = kind_of(c), ACTIVATIONS[c.activation], tokenizer.eot_token
    configuration.require(c, "activation", activations, "transformers has no name for it")
    names = {field: column(hf_fields, kind) for field, hf_fields in CONVERTED.items()}
    values = {name: getattr(c, field) for field, name in names.items() if name} | fixed(kind, c)
    values[names["max_position_embeddings"]] = c.positions
    if kind == LLAMA:
        configuration.require(c, "dropout", not c.dropout, "a Llama of transformers has none; set it to 0 to export")
        values |= dict(num_key_value_heads=c.query_groups, intermediate_size=c.ffn_size)
        values |= dict(tie_word_embeddings=not c.untie_embeddings_and_output_weights)
        values |= dict(rope_parameters={"rope_type": "default", "rope_theta": c.rotary_base})
    else:
        values["activation_function"] = activations[0]
        # attention's probabilities have no dropout here
        values |= {"attention_dropout": 0.0} if kind == OPT else {"attn_pdrop": 0.0, "embd_pdrop": c.dropout}
    # OPT's default pad_token_id, 1, would stop the gradient of row 1 of the word table
    return hf.AutoConfig.for_model(kind, **values, bos_token_id=tokenizer.begin, eos_token_id=end, pad_token_id=None)


# --- the command line -------------------------------------------------------------------------------------------------


def main():
    losable(sys.stdout)
    parser = Parser(prog="python convert.py", description="Converts GPT-2, OPT and Llama.", allow_abbrev=False)
    parser.add_argument("direction", choices=("from_hf", "to_hf"), help="from or to Hugging Face's transformers")
    parser.add_argument("source", help="from_hf: the model's folder; to_hf: out_dir of a run, or a step_N folder")
    parser.add_argument("--out", required=True, help="from_hf: an out_dir; to_hf: a new folder")
    a = parser.parse_args()
    (from_hf if a.direction == "from_hf" else to_hf)(a.source, a.out)


if __name__ == "__main__":
    exit_on_user_error(main)
