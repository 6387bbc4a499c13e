"""Test tokenizer.py: tokens equal those of tiktoken and of Hugging Face `tokenizers`, and a cut changes no token.

The vocabularies are made here: trained on a Japanese text (testing/japanese.txt), or GPT-2's.
"""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import tokenizers
import transformers
from tiktoken_ext import openai_public
from tokenizers import models, pre_tokenizers

import prepare
import tokenizer
from testing.tiny import refusal
from testing.vocabularies import END, JAPANESE, LLAMAS, llamas, text_of_atoms, trained, write_llamas
from tokenizer import COPY, copied, copy, last_cut, load_tokenizer

HERE = Path(__file__).parent
TEXTS = ["", " ", "\n", "a\0 \0\0b", JAPANESE, *(text_of_atoms(random.Random(i), 120) for i in range(60))]


def loaded(path):
    return load_tokenizer.__wrapped__(str(path))  # without the cache


def check_equal(ours, right):
    """Check the ids of TEXTS, and that decoding gives the text again. right: a function, text -> ids."""
    for text in TEXTS:
        ids = ours.encode_ordinary(text)
        assert ids == right(text), text
        assert "".join(ours.texts([], ids)) == text
        assert len(ours.encode_to_bytes(text)) == ours.width * len(ids)


def hugging_faces(inner):
    """Return the function text -> ids of a tokenizer of the package. The text of a special token is ordinary text."""
    inner.encode_special_tokens = True
    return lambda text: inner.encode(text).ids


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(gpt2, monkeypatch):
    """Replace the download of tiktoken's large encodings: their patterns and special tokens with GPT-2's vocabulary."""
    ranks = gpt2.encoding._mergeable_ranks | {b"no merge makes it": 50256}
    get_encoding = tiktoken.get_encoding

    def get(name):
        if name == "gpt2":
            return get_encoding(name)
        monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
        arguments = getattr(openai_public, name)()
        return tiktoken.Encoding(**arguments | {"special_tokens": {END: 70000}})

    monkeypatch.setattr(tiktoken, "get_encoding", get)


NAMES = [("gpt2", 50257, "uint16"), ("cl100k_base", 70001, "uint32"), ("o200k_base", 70001, "uint32")]


@pytest.mark.parametrize("name, n_vocab, dtype", [("bytes", 257, "uint16"), *NAMES])
def test_a_name_is_tiktokens_and_needs_no_copy(name, n_vocab, dtype, large, tmp_path):
    ours = loaded(name)
    assert (ours.name, ours.n_vocab, ours.eot_token, ours.dtype) == (name, n_vocab, n_vocab - 1, dtype)
    right = (lambda text: [*text.encode()]) if name == "bytes" else tiktoken.get_encoding(name).encode_ordinary
    check_equal(ours, right)
    copy(ours, tmp_path)
    assert not [*tmp_path.iterdir()] and copied(tmp_path, name) is None


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_a_name_comes_back_from_its_files(name, request, tmp_path):
    convert = pytest.importorskip("convert")  # not at the top: it imports torch
    ours = load_tokenizer(name) if name == "bytes" else request.getfixturevalue(name)
    convert.write_tokenizer(ours, tmp_path)
    again = copied(tmp_path, name)
    for field in ("name", "n_vocab", "eot_token", "begin", "dtype"):
        assert getattr(again, field) == getattr(ours, field)
    check_equal(again, ours.encode_ordinary)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    check_equal(ours, hugging_faces(theirs.backend_tokenizer))
    assert theirs.eos_token_id == ours.eot_token


@pytest.mark.parametrize("pattern", [None, r"'s| ?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+", r"\p{L}+|[0-9]"])
def test_a_trained_vocabulary_in_each_form_and_its_copy(pattern, tmp_path):
    theirs = trained(pattern=pattern)
    (tmp_path / "hf").mkdir()
    theirs.save(str(tmp_path / "hf" / COPY[0]))
    (tmp_path / "hf" / COPY[1]).write_text(json.dumps({"eos_token": {"content": END}}))
    sources = [tmp_path / "hf"]
    if pattern is None:  # GPT-2's release calls vocab.json encoder.json, and merges.txt vocab.bpe
        sources += [tmp_path / "pair/vocab.json", tmp_path / "openai"]
        for folder, names in {"pair": ("vocab.json", "merges.txt"), "openai": ("encoder.json", "vocab.bpe")}.items():
            (tmp_path / folder).mkdir()
            for file, name in zip(theirs.model.save(str(tmp_path / folder)), names, strict=True):
                Path(file).rename(tmp_path / folder / name)
    for i, source in enumerate(sources):
        (copies := tmp_path / f"copy{i}").mkdir()
        copy(ours := loaded(source), copies)
        for it in (ours, copied(copies, ours.name)):
            assert (it.n_vocab, it.end, it.eot_token, it.begin) == (600, END, 0, 0)
            assert it.name == loaded(sources[0]).name and it.name.startswith("bpe-600-")
            check_equal(it, hugging_faces(theirs))
        theirs_again = transformers.AutoTokenizer.from_pretrained(str(copies))
        check_equal(ours, hugging_faces(theirs_again.backend_tokenizer))
        assert theirs_again.eos_token == END


def test_without_network_the_message_says_what_to_do(monkeypatch):
    def no_network(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    said = refusal(loaded, "gpt2")
    assert "TIKTOKEN_CACHE_DIR" in said and "tokenizer=bytes" in said


def test_bpe_dropout_is_off(tmp_path):
    (tmp_path / COPY[0]).write_text(trained().to_str().replace('"dropout":null', '"dropout":0.9'))
    check_equal(loaded(tmp_path), hugging_faces(trained()))


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bytes", "gpt2", "files", "cl100k_base", "o200k_base"])
def test_a_cut_changes_no_token(name, tmp_path, large):
    """Also if the text goes on after the part that `last_cut` sees."""
    if name == "files":
        trained().save(str(tmp_path / COPY[0]))
    ours = loaded(tmp_path if name == "files" else name)
    rng, cuts = random.Random(2), 0
    for _ in range(900):
        text, seen = text_of_atoms(rng, 24), 16
        ids = ours.encode_ordinary(text)
        while i := last_cut(text[:seen], ours):
            assert ours.encode_ordinary(text[:i]) + ours.encode_ordinary(text[i:]) == ids, (text, i)
            cuts, seen = cuts + 1, i if i < seen else i - 1
    assert cuts > 200


# --- special tokens and templates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LLAMAS)
def test_any_file_of_the_package_tokenizers(kind, tmp_path):
    ours, theirs = loaded(write_llamas(tmp_path / "hf", kind)), llamas(kind)
    theirs.encode_special_tokens = True
    assert (ours.end, ours.eot_token, ours.begin) == ("</s>", theirs.token_to_id("</s>"), theirs.token_to_id("<s>"))
    (tmp_path / "copy").mkdir()
    copy(ours, tmp_path / "copy")
    again = copied(tmp_path / "copy", ours.name)
    assert ours.name == again.name and ours.name.startswith(f"file-{ours.n_vocab}-") and last_cut("a b", ours) == 0
    for text in TEXTS:
        ids = ours.encode_ordinary(text)
        assert ids == again.encode_ordinary(text) == theirs.encode(text).ids and ids[0] == ours.begin
        assert ours.eot_token not in ids and len(ours.encode_to_bytes(text)) == 2 * len(ids)
        if kind == "merges":  # the others' first space does not come back
            assert "".join(ours.texts([], ids)) == text
    words = "春子さん は hello"
    ids = ours.encode_ordinary(words)
    assert words.endswith("".join(ours.texts(ids[:3], ids[3:]))) and "".join(ours.texts([], ids)).strip() == words
    with pytest.raises(ValueError):
        ours.encode_to_bytes("\ud800")


def test_a_document_that_begins_with_the_end_token(tmp_path):
    """OPT puts </s> before a document, too. Only the text must not have it."""
    theirs = tokenizers.Tokenizer.from_str(llamas("unigram").to_str())
    pair = [("</s>", theirs.token_to_id("</s>"))]
    theirs.post_processor = tokenizers.processors.TemplateProcessing("</s> $A", special_tokens=pair)
    theirs.save(str(tmp_path / COPY[0]))
    ours = loaded(tmp_path)
    for text in ("", "春子", "a b"):
        assert ours.encode_ordinary(text) == theirs.encode(text).ids
    assert ours.begin == ours.eot_token not in ours.encode_ordinary("</s>")[1:]


@pytest.mark.parametrize("kind", LLAMAS)
def test_the_text_of_a_special_token_is_never_that_token(kind, tmp_path):
    ours = loaded(write_llamas(tmp_path, kind))
    for text in ("a</s>b", "</s>", "a</s>", "<s>500</s>", "<unk>"):
        ids = ours.encode_ordinary(text)
        assert not {ours.eot_token, ours.begin, ours.unk_id} & {*ids[1:]}
        assert "".join(ours.texts(ids[:1], ids[1:])).strip() == text


def words(*words):
    """Return a tokenizer with an id for each of these words."""
    it = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    it.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    it.add_special_tokens(["</s>"])
    return it


def test_a_document_with_the_end_as_a_word_is_refused(tmp_path):
    words("<unk>", "</s>", "a").save(str(tmp_path / COPY[0]))
    ours = loaded(tmp_path)
    with pytest.raises(ValueError, match="its text contains </s>, which this vocabulary encodes as the end"):
        ours.encode_ordinary("a </s> a")


def test_a_document_that_tokenizers_can_not_encode_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "LONGEST", 99)
    ours = loaded(write_llamas(tmp_path, "bpe"))
    assert ours.encode_ordinary("a" * 99)
    with pytest.raises(ValueError, match="more than 99 characters in a document"):
        ours.encode_ordinary("a" * 100)


def test_a_file_that_cannot_be_cut_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "LONGEST", 3000)
    monkeypatch.setattr(prepare, "PIECE", 1000)
    (tmp_path / "a.txt").write_text("a b\n" * 10**5)
    ours = loaded(write_llamas(tmp_path, "bpe"))
    (part,) = prepare.read_parts(str(tmp_path / "a.txt"), 0, ours, "text", [])
    assert ours.cut is None and part.ends and 3000 < len(part.text) < 4001


def command(folder, name, *words):
    """Run a program of the project in `folder`. Return (exit code, what it printed)."""
    words = [sys.executable, HERE / name, *map(str, words)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def prepared(it, folder, text):
    """Run prepare.py on a file, with the tokenizer `it`. Return (exit code, what it printed)."""
    it.save(str(folder / COPY[0]))
    (folder / "a.txt").write_text(text)
    options = "--tokenizer=. --out=data --split=1,0,0 --workers=2".split()
    return command(folder, "prepare.py", "a.txt", *options)


def test_a_file_without_text_is_refused(tmp_path):
    code, said = prepared(llamas("unigram"), tmp_path, "")  # its document is <s></s>
    assert code == 2 and "the input has no text (files: 1, empty documents: 1" in said


# --- the end of a document ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files, end",
    [
        ({}, END),
        ({"special_tokens_map": "<s>"}, "<s>"),
        ({"special_tokens_map": {"content": "<s>"}, "tokenizer_config": None}, "<s>"),
        ({"special_tokens_map": "<s>", "tokenizer_config": "</s>"}, "</s>"),
    ],
)
def test_the_end_is_that_of_hugging_faces_files(files, end, tmp_path):
    it = trained(300)
    it.add_special_tokens(["<s>"])
    it.add_tokens(["</s>"])
    it.save(str(tmp_path / COPY[0]))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token": value}))
    (tmp_path / "copy").mkdir()
    copy(loaded(tmp_path), tmp_path / "copy")
    for source in (tmp_path, tmp_path / "copy"):
        assert loaded(source).end == end and loaded(source).eot_token == it.token_to_id(end)
        assert len(files) != 1 or transformers.AutoTokenizer.from_pretrained(str(source)).eos_token == end


# --- characters that a vocabulary lacks -------------------------------------------------------------------------------


def lossy(**options):
    """Return a BPE of a few letters. options: of models.BPE."""
    vocab = {text: i for i, text in enumerate(["</s>", "<unk>", "▁", "a", "b"])}
    it = tokenizers.Tokenizer(models.BPE(vocab, [], **options))
    it.pre_tokenizer = pre_tokenizers.Metaspace()
    it.add_special_tokens(["</s>"])
    return it


def without_a_byte():
    it = json.loads(trained(300).to_str())
    del it["model"]["vocab"]["ĉ"]
    return tokenizers.Tokenizer.from_str(json.dumps(it))


@pytest.mark.parametrize("it", [lossy(), lossy(byte_fallback=True), without_a_byte()], ids=["no", "bytes", "letter"])
def test_a_vocabulary_that_would_leave_out_characters_is_refused(it, tmp_path):
    code, said = prepared(it, tmp_path, "a 春子")
    assert code == 2 and "--tokenizer=.: this vocabulary would leave out characters that it does not have" in said
    assert not (tmp_path / "data").exists()
    assert "".join(loaded(tmp_path).texts([], [3]))  # an old checkpoint still writes text


@pytest.mark.parametrize(
    "it, unknown",
    [(lossy(unk_token="<unk>"), 2), (words("<unk>", "a"), 2), *((llamas(kind), 0) for kind in LLAMAS)],
    ids=["bpe", "words", *(f"all of {kind}" for kind in LLAMAS)],
)
def test_documents_of_any_file_and_their_unknown_tokens(it, unknown, tmp_path):
    """The file has <s> before the documents of Llama's vocabularies, and the end after each document."""
    code, said = prepared(it, tmp_path, "a 春 子")
    ours, meta = loaded(tmp_path / "data"), json.loads((tmp_path / "data/meta.json").read_text())
    ids = [*ours.encode_ordinary("a 春 子"), ours.eot_token]
    assert code == 0 and np.fromfile(tmp_path / "data/train.bin", "<u2").tolist() == ids
    assert (meta["tokenizer"], meta["eot_id"], meta["unknown"]) == (ours.name, ours.eot_token, unknown)
    counted = f"unknown tokens: {unknown} of {meta['tokens']['train']} (<unk>: the vocabulary does not have"
    assert (counted in said) == bool(ours.unk)
    assert ("drops white space" in said) == ("WhitespaceSplit" in ours.content)


# --- text of ids, one after another -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LLAMAS)
def test_decoding_costs_the_same_for_each_token(kind, tmp_path, monkeypatch):
    ours = loaded(write_llamas(tmp_path, kind))
    ids, seen, inner = ours.encode_ordinary(JAPANESE), [], ours.inner
    monkeypatch.setattr(ours, "inner", SimpleNamespace(decode=lambda ids: seen.append(len(ids)) or inner.decode(ids)))
    assert "".join(ours.texts(ids[:1], ids[1:])).strip() == JAPANESE.strip()
    assert max(seen) < 12 and len(seen) < 3 * len(ids)


# --- wrong vocabularies -----------------------------------------------------------------------------------------------


@pytest.fixture
def without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    load_tokenizer.cache_clear()
    yield
    load_tokenizer.cache_clear()


def test_without_the_package_tokenizers(tmp_path, without_the_package):
    (tmp_path / COPY[0]).write_text("{}")
    for load in (loaded, lambda folder: copied(folder, "bpe-600-01234567")):  # of prepare.py, and of generate.py
        assert refusal(load, tmp_path) == f"tokenizer={tmp_path}: needs a package: pip install tokenizers"


# Its template names a token that is not in its table.
PANIC = """{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "post_processor": {"type":
"TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}], "pair": [], "special_tokens": {}}}"""


def test_a_panic_in_a_file_is_one_line(tmp_path):
    (tmp_path / COPY[0]).write_text(PANIC)
    (tmp_path / COPY[1]).write_text('{"eos_token": "a"}')
    assert refusal(loaded, tmp_path).startswith(f"tokenizer={tmp_path}: ValueError: a panic: no entry found for key")


def test_a_panic_in_a_document_is_an_error_of_this_document(tmp_path):
    ours = loaded(write_llamas(tmp_path, "bpe"))

    def panic(_):
        raise type("PanicException", (BaseException,), {})("index out of bounds")

    ours.inner = SimpleNamespace(encode_batch_fast=panic)
    with pytest.raises(ValueError, match="a panic: index out of bounds"):
        ours.encode_to_bytes("a")


# --- the way of a vocabulary ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_japanese_from_text_to_text(tmp_path):
    """Prepare, train, delete all but the checkpoint, and generate text."""

    def run(*words):
        code, said = command(tmp_path, *words)
        assert code == 0, said
        return said

    trained().save(str(tmp_path / COPY[0]))
    (tmp_path / "text.txt").write_text(JAPANESE * 3, "utf-8")
    run("prepare.py", "text.txt", f"--tokenizer={COPY[0]}", "--out=data", "--split=9,1,0")
    sizes = "num_layers=2 hidden_size=64 num_attention_heads=2 seq_length=32 vocab_size=600 dtype=fp32 kernels=torch"
    steps = "train_iters=60 global_batch_size=16 micro_batch_size=16 lr=1e-2 lr_decay_iters=60 save_interval=40"
    flags = [f"--{field}" for field in f"{sizes} {steps} data_dir=data out_dir=out".split()]
    run("train.py", HERE / "configs/tiny.py", *flags)
    assert (tmp_path / "out/step_60" / COPY[0]).read_bytes() == (tmp_path / "data" / COPY[0]).read_bytes()
    shutil.move(tmp_path / "out/step_60", tmp_path / "moved")
    for folder in ("data", "out"):
        shutil.rmtree(tmp_path / folder)
    text = run("generate.py", "moved", "--prompt", "春子さんは", "--temperature=0", "--max_tokens=40")
    text = text[text.index("春子さんは") :]
    words = [text[i : i + 4] for i in range(5, 35)]
    assert sum(word in JAPANESE for word in words) > 15, text
    run("prepare.py", "text.txt", "--tokenizer=moved", "--out=more")  # more data for the same model
    assert json.loads((tmp_path / "more/meta.json").read_text())["tokenizer"].startswith("bpe-600-")
