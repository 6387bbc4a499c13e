"""Tests generate.py, and convert.py with the real transformers: logits, greedy text, files.

Random models with odd sizes have large weights, so that a wrong place of a tensor changes the logits. Other tests
compare gradients (test_layouts.py, finite differences) and updates (parallel/test_optimizer.py, formulas).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when it is imported
pytest.importorskip("transformers")

import config as configuration
import convert
import generate
import reference
import train
from errors import UserError, exit_on_user_error
from model import Block
from parallel.mesh import Mesh
from parallel.tensor import ColumnParallelLinear, ParamSpec
from testing.tiny import built, few, go, refusal, tiny_config
from tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("no_gpu")
transformers = convert.transformers()
CPU = torch.device("cpu")
KINDS = ["gpt2", "opt", "llama", "llama tied"]
SIZES = 2, 24, 3, 301, 17  # layers, width, heads, vocabulary, positions


@pytest.mark.slow
def test_kernels_py_is_not_taken_for_the_package_of_this_name():
    code = "import sys; sys.modules['triton'] = None; import convert; convert.transformers().GPT2LMHeadModel"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


def test_an_old_transformers_is_one_line(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(UserError, match=r"version 4\.57\.1 is too old; should be 5 or later"):
        convert.transformers()


def random_model(kind, sizes=SIZES, dtype=torch.float32):
    layers, width, heads, vocab_size, positions = sizes
    same = dict(vocab_size=vocab_size, bos_token_id=256, eos_token_id=256, pad_token_id=None)
    if kind == "gpt2":
        there = transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=positions, **same)
        model = transformers.GPT2LMHeadModel(there)
    elif kind.startswith("llama"):  # 3 and 5 heads of queries share one head of keys and values, of 4 heads two
        there = transformers.LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads % 2 or 2,
            intermediate_size=3 * width + 4, max_position_embeddings=positions, rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="default", rope_theta=777.0), **same,
            tie_word_embeddings=kind == "llama tied",
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(there)
    else:
        there = transformers.OPTConfig(
            num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, ffn_dim=4 * width,
            word_embed_proj_dim=width, max_position_embeddings=positions, **same,
        )  # fmt: skip
        model = transformers.OPTForCausalLM(there)
    model, generator = model.to(dtype).eval(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise * 0.3 + (p.ndim == 1 and p.mean() > 0.5))
    return model


def saved(folder, kind="gpt2", sizes=SIZES, dtype=torch.float32, **how):
    """Save a random model and the tokenizer `bytes` in `folder`. Return the model."""
    model = random_model(kind, sizes, dtype)
    model.save_pretrained(folder, **how)
    convert.write_tokenizer(load_tokenizer("bytes"), folder)
    return model


@pytest.fixture
def in_float64(monkeypatch):
    """transformers' Llama computes norms and positions in float32. Here they have the dtype of x."""
    from transformers.models.llama import modeling_llama

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def rotary(self, x, position_ids):
        even = torch.arange(0, self.config.head_dim, 2, dtype=x.dtype)
        angle = position_ids[..., None] * self.config.rope_parameters["rope_theta"] ** (-even / self.config.head_dim)
        angle = torch.cat([angle, angle], -1)
        return angle.cos(), angle.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)


def run_of(out, dtype):
    """Return the Run of `train.py out/config.py --dtype=dtype`."""
    run = train.build_run(configuration.load([f"{out}/config.py", f"--dtype={dtype}"]), Mesh(), CPU)
    train.restore(run, Path(out) / "step_0")
    return run


def imported(folder, out):
    convert.from_hf(folder, str(out))
    return out


def exported(out, folder):
    convert.to_hf(out, str(folder))
    return folder


# --- generate.py ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    run = train.build_run(tiny_config(1, init_method_std=0.3, max_position_embeddings=12), Mesh(), CPU)
    run.zero.initialize(1)
    return run.model


def greedy(model, ids, count):
    """Generate without a cache. Beyond 12 positions, keep the last 6 tokens."""
    ids, context = list(ids), list(ids)
    for _ in range(count):
        if len(context) > 12:
            context = context[-6:]
        with torch.no_grad():
            token = int(model(model.micro_batch(torch.tensor([context])))[-1].argmax())
        ids.append(token)
        context.append(token)
    return ids


@pytest.mark.parametrize("prompt", [[7], [1, 2, 3, 4], list(range(30))])
def test_text_with_the_cache_is_that_without_it(model, prompt):
    got = prompt + list(generate.generate(model, prompt, 25, temperature=0))
    if len(prompt) > 12:
        prompt, got = prompt[-6:], got[-31:]
    assert got == greedy(model, prompt, 25)


def drawn(top_k=0, top_p=1.0, temperature=1.0, count=400):
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    ids = [generate.draw_token(logits, temperature, top_k, top_p, generator) for _ in range(count)]
    return torch.bincount(torch.tensor(ids), minlength=4) / count


def test_tokens_are_drawn_with_their_probabilities():
    p = torch.softmax(torch.tensor([0.0, 2.0, 1.0, -1.0]), 0)  # 0.087, 0.644, 0.237, 0.032
    assert torch.allclose(drawn(count=4000), p, atol=0.03)
    assert drawn(top_k=2)[[0, 3]].sum() == 0 and drawn(top_k=2)[2] > 0.15
    assert drawn(top_p=0.6).tolist() == [0, 1, 0, 0]
    assert drawn(top_p=0.7)[[0, 3]].sum() == 0 and drawn(top_p=0.7)[2] > 0.15
    assert drawn(temperature=0).tolist() == [0, 1, 0, 0] and drawn(temperature=0.1)[1] > 0.99
    assert drawn(temperature=100.0).min() > 0.15
    assert drawn(temperature=1e-30)[1] == drawn(temperature=1e-320)[1] == 1


def written(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
    generate.main()
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """An out_dir with a random model of 301 ids and the tokenizer `bytes`."""
    folder = tmp_path_factory.mktemp("model")
    saved(folder / "hf", "gpt2", (2, 24, 3, 301, 40))
    return imported(folder / "hf", folder / "out")


def test_a_seed_gives_one_text(out, capsys, monkeypatch):
    words = [out, "--temperature=3", "--max_tokens=40"]
    first = written(capsys, monkeypatch, *words)
    assert first == written(capsys, monkeypatch, *words) != written(capsys, monkeypatch, *words, "--seed=5")


def test_text_ends_at_the_end_of_text_token_and_has_whole_characters(out, capsys, monkeypatch):
    ids = [*"é".encode(), *"日".encode(), 0xE6, ord("x"), load_tokenizer("bytes").eot_token, ord("b")]
    monkeypatch.setattr(generate, "generate", lambda *_: iter(ids))
    assert written(capsys, monkeypatch, out) == "é日\N{REPLACEMENT CHARACTER}x\n"


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_model_is_one_line(value, temperature):
    with pytest.raises(UserError, match="the model's logits are not finite"):
        generate.draw_token(torch.tensor([0.0, value]), temperature, 0, 1.0, torch.Generator())


# --- the same numbers -------------------------------------------------------------------------------------------------


CASES = [  # layers, width, heads, vocabulary, positions; dtypes there and here; the largest error
    (SIZES, torch.float32, "fp32", 1e-5),
    ((1, 20, 5, 257, 40), torch.float64, "fp64", 1e-10),
    ((3, 64, 4, 384, 32), torch.bfloat16, "fp32", 1e-5),
    (SIZES, torch.float16, "fp32", 1e-5),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes, dtype, name, tolerance", CASES)
def test_logits_are_those_of_transformers(tmp_path, request, kind, sizes, dtype, name, tolerance):
    """The weights are in several files. 16-bit weights become float32."""
    if name == "fp64":
        request.getfixturevalue("in_float64")
    model = saved(tmp_path / "hf", kind, sizes, dtype, max_shard_size="10kB")
    assert len([*(tmp_path / "hf").glob("*.safetensors")]) > 2
    run = run_of(imported(tmp_path / "hf", tmp_path / "out"), name)
    model = type(model).from_pretrained(tmp_path / "hf", dtype=train.DTYPES[name])
    ids = torch.randint(0, sizes[3], (2, sizes[4]), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = run.model(run.model.micro_batch(ids)), model(ids).logits.flatten(0, 1)
    assert ours.dtype == theirs.dtype and theirs.std() > 0.5
    assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", few(KINDS))
def test_greedy_text_is_that_of_generate(tmp_path, kind):
    """The model has 301 ids, the tokenizer 257. Neither program draws an id that has no text."""
    saved(tmp_path / "hf", kind, (2, 24, 3, 301, 40))
    out = imported(tmp_path / "hf", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported(out, tmp_path / "again"))
    model, tokenizer = generate.load_model(out, CPU)
    free = 0
    for start in range(20):
        prompt = [*tokenizer.encode_ordinary("Hello!")[start % 6 :], start * 11]
        ours = list(generate.generate(model, prompt, 20, temperature=0))
        ours = ours[: ours.index(256) + 1] if 256 in ours else ours
        written = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0].tolist()
        assert written == prompt + ours
        logits = theirs(torch.tensor([prompt])).logits[0, -1]
        free += int(logits.argmax()) >= 257
    assert free, "an id without text must be the likeliest once"


def test_a_pipeline_of_transformers_writes_our_text(out, tmp_path, capsys, monkeypatch):
    ours = written(capsys, monkeypatch, out, "--prompt=cde", "--temperature=0", "--max_tokens=12")
    folder = exported(out, tmp_path / "hf")
    pipe = transformers.pipeline("text-generation", model=str(folder))
    (text,) = pipe("cde", max_new_tokens=12, do_sample=False)
    assert text["generated_text"] + "\n" == ours and len(ours) > 8
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a<|endoftext|>").input_ids == [97, 256] and tokenizer.eos_token_id == 256


def opts_tokenizer(folder):
    """Write a vocabulary in OPT's files: few merges, and ids that are not the order of the merges."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    words = ["<s>", "<pad>", "</s>", "<unk>", "Ġhello", "llo", *letters, "he", "ll", "Ġhe"]
    merges = ["h e", "l l", "ll o", "Ġ he", "Ġhe llo"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    return {"\t hello hello": [words.index("ĉ"), 4, 4], " he": [words.index("Ġhe")], "llo": [5]}


def test_another_vocabulary_stays_with_the_checkpoint(tmp_path):
    """OPT's tokens are GPT-2's with other ids. prepare.py, generate.py and the export need only the checkpoint."""
    random_model("opt", (1, 16, 2, 300, 32)).save_pretrained(tmp_path / "hf")
    expected = opts_tokenizer(tmp_path / "hf")
    others = {"chat_template.jinja": {}, "generation_config.json": {"eos_token_id": [2, 5], "temperature": 0.5}}
    for name, value in others.items():
        (tmp_path / "hf" / name).write_text(json.dumps(value))
    out = imported(tmp_path / "hf", tmp_path / "out")
    shutil.rmtree(tmp_path / "hf")
    (tmp_path / "text.txt").write_text("\t hello hello" * 200)
    words = [str(tmp_path / "text.txt"), f"--tokenizer={out}/step_0", f"--out={tmp_path}/data", "--split=50,50,0"]
    subprocess.run([sys.executable, "prepare.py", *words], check=True, cwd=Path(__file__).parent, capture_output=True)
    flags = f"--train_iters=1 --seq_length=8 --seed=7 --global_batch_size=2 --eval_iters=0 --data_dir={tmp_path}/data"
    go(configuration.load([f"{out}/config.py", *flags.split()]))
    _, ours = generate.load_model(out, CPU)  # of step_1
    theirs = transformers.AutoTokenizer.from_pretrained(exported(out, tmp_path / "again"))
    for text, ids in expected.items():
        assert list(ours.encode_ordinary(text)) == theirs(text).input_ids == ids
    assert ours.eot_token == theirs.eos_token_id == 2 and theirs.eos_token == "</s>"
    for name, value in others.items():
        again = json.loads((tmp_path / "again" / name).read_text())
        assert again == again | value


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_export_of_import_is_the_identity(tmp_path, kind):
    model = saved(tmp_path / "hf", kind)
    folder = exported(imported(tmp_path / "hf", tmp_path / "out"), tmp_path / "again")
    again, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert again.config.pad_token_id is None  # a padding id's row would get no gradient from the embedding
    for name, tensor in model.state_dict().items():
        other = again.state_dict()[name]
        if name.endswith("embed_positions.weight"):
            assert not other[:2].any() and tensor[:2].any()
            tensor, other = tensor[2:], other[2:]
        assert torch.equal(tensor, other), name
    theirs, ours = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "hf", folder))
    if "llama" in kind:
        assert ours.pop("rope_theta") == 777.0  # transformers 4 reads it, 5 writes another field
    free = {"pad_token_id", "attn_pdrop", "attention_dropout", "n_inner", "transformers_version"}
    assert {k: v for k, v in ours.items() if k not in free} == {k: theirs[k] for k in ours if k not in free}


# --- a changed model --------------------------------------------------------------------------------------------------

attention, block = reference.attention, Block.__init__


def twice(q, k, v, cache=None):
    return 2 * attention(q, k, v, cache)


def with_gate(self, c, index, *rest):
    block(self, c, index, *rest)
    self.gate = ParamSpec(f"block{index}.gate", (4, 4), std=0.02)


def with_other_sizes(self, c, index, tp, ops, cp):
    block(self, c, index, tp, ops, cp)
    self.mlp.fc1 = ColumnParallelLinear(f"block{index}.fc1", (48, c.hidden_size), 0.02, c, tp, adds_bias=False)


NO_GPT2 = "model.py is changed: it is no GPT2LMHeadModel of Hugging Face"
CHANGED = [
    ((reference, "attention", twice), rf"{NO_GPT2}: the logits differ by \d"),
    ((Block, "__init__", with_gate), "gpt2 of transformers has no counterpart of block0.gate"),
    ((Block, "__init__", with_other_sizes), f"{NO_GPT2}: RuntimeError: The size of tensor"),
]


@pytest.mark.parametrize("change, found", CHANGED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_changed_model_is_not_exported(monkeypatch, change, found):
    monkeypatch.setattr(*change)
    model, text = built(tiny_config(1, dtype="fp32")).model, SimpleNamespace(begin=0, eot_token=0, n_vocab=100)
    with pytest.raises(UserError, match=found):
        convert.exported(transformers, model, text)


@pytest.mark.parametrize("keys", [2, 5])
def test_generation_notices_a_cache_that_ignores_a_mask(monkeypatch, model, keys):
    """The text must be longer than the mask: the comparison after 4 new tokens finds 5 keys."""

    def windowed(q, k, v, cache=None):
        if cache is not None:
            return attention(q, k, v, cache)
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril().triu(1 - keys)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)

    monkeypatch.setattr(reference, "attention", windowed)
    text = []
    with pytest.raises(UserError, match="attention's cache does not follow a change of the model: the logits differ"):
        for token in generate.generate(model, [1, 2], 40, temperature=0):
            text.append(token)
    assert len(text) == {2: 1, 5: 4}[keys]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(model="llama", dropout=0.1), "dropout=0.1: a Llama of transformers has none; set it to 0"),
        (dict(model="mine"), "model=mine: transformers has no such model"),
    ],
)
def test_what_transformers_lacks_is_not_exported(fields, message):
    with pytest.raises(UserError, match=message):
        convert.config_to_hf(transformers, tiny_config(1, **fields), load_tokenizer("bytes"))


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_folder_of_hugging_faces_cache_is_read(tmp_path):
    """Its files are links."""
    folder = tmp_path / "model/snapshots/1"
    folder.mkdir(parents=True)
    saved(tmp_path / "model/blobs")
    for path in [*(tmp_path / "model/blobs").iterdir()]:
        (folder / path.name).symlink_to(path.rename(f"{path}.blob"))
    imported(folder, tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_with_more_ids_than_the_word_table_has_rows_is_refused(tmp_path, kind):
    """A pad token that was added without rows: train.py would take neither 257 nor 258 as vocab_size."""
    model = saved(tmp_path / "hf", kind, (2, 24, 3, 257, 17))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "hf")
    said = refusal(imported, tmp_path / "hf", tmp_path / "out")
    assert "hf: its tokenizer has 258 ids, its word table 257 rows; remove the added tokens" in said
    assert not (tmp_path / "out").exists()
    exec(said.split("add rows: ")[1])  # the remedy
    model.save_pretrained(tmp_path / "hf")
    imported(tmp_path / "hf", tmp_path / "out")


def test_a_stopped_conversion_leaves_no_checkpoint(tmp_path, monkeypatch):
    saved(tmp_path / "hf")
    monkeypatch.delattr(convert.checkpoint, "write_index")
    with pytest.raises(AttributeError):
        imported(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out/step_0").exists()


@pytest.mark.parametrize("name", ["\nraise Exit\n#", "coding=utf-7 +AAo-raise Exit+AAo-", "\x1b[2J\x9b\u202e"])
def test_a_name_is_no_code_and_moves_no_cursor(tmp_path, capsys, name):
    saved(folder := tmp_path / name)
    exported(out := imported(folder, folder / "out"), folder / "again")
    assert configuration.load([f"{out}/config.py"]).out_dir == str(out)
    with pytest.raises(SystemExit):
        exit_on_user_error(lambda: imported(folder, out))
    lines = "".join(capsys.readouterr()).splitlines()
    assert len(lines) == 6 and "".join(lines).isprintable() and lines[-1].endswith("choose another folder")


@pytest.mark.parametrize(
    "kind, fields, lines",
    [
        ("gpt2", dict(embd_pdrop=0.2, resid_pdrop=0.1, attn_pdrop=0.3), ["embd_pdrop=0.2 there is 0.1 here"]),
        ("gpt2", dict(attn_pdrop=0.3), ["attn_pdrop=0.3 there is 0.0 here"]),
        ("opt", dict(layerdrop=0.2), ["layerdrop=0.2 there is 0.0 here", "embd_pdrop=0.0 there is 0.1 here"]),
        ("gpt2", dict(embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.0), []),
        ("llama", dict(eos_token_id=[256, 7]), ["eos_token_id=[256, 7] there is 256 here"]),
        ("llama", dict(eos_token_id=7), ["eos_token_id=7 there is 256 here"]),  # generation_config.json says 256
    ],
)
def test_values_that_change_are_named(tmp_path, capsys, kind, fields, lines):
    saved(tmp_path / "hf", kind)
    change_config(tmp_path / "hf", **fields)
    if fields != dict(eos_token_id=7):
        (tmp_path / "hf/generation_config.json").unlink()
    imported(tmp_path / "hf", tmp_path / "out")
    said = capsys.readouterr().out
    assert all(line in said for line in lines) and (lines or " there is " not in said)
