"""Test tokenizer.py: tokens equal those of tiktoken and of Hugging Face `tokenizers`, and a cut changes no token.

The vocabularies are made here: trained on a Japanese text (testing/japanese.txt), random, or GPT-2's with other ids.
"""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
import transformers
from tiktoken_ext import openai_public
from tokenizers import models, pre_tokenizers

import tokenizer
from errors import UserError
from testing.vocabularies import END, JAPANESE, LLAMAS, llamas, text_of_atoms, trained, write_llamas
from tokenizer import BYTE_OF, COPY, LETTER_OF, copied, copy, last_cut, load_tokenizer

HERE = Path(__file__).parent
TEXTS = ["", " ", "\n", "a\0 \0\0b", JAPANESE, *(text_of_atoms(random.Random(i), 120) for i in range(60))]


def write_pair(folder, vocab, merges, prefix=""):
    """Write vocab.json and merges.txt as GPT-2 has them. merges: pairs of texts."""
    folder.mkdir(exist_ok=True)
    (folder / f"{prefix}vocab.json").write_text(json.dumps(vocab))
    lines = "".join(" ".join(pair) + "\n" for pair in merges)
    (folder / f"{prefix}merges.txt").write_text("#version: 0.2\n" + lines, "utf-8")
    return folder


def loaded(path):
    return load_tokenizer.__wrapped__(str(path))  # without the cache


def check_equal(ours, theirs, texts=TEXTS):
    """Check the ids of `texts`, and that decoding gives the text again."""
    theirs.encode_special_tokens = True  # the text of a special token is ordinary text
    for text in texts:
        ids = ours.encode_ordinary(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert b"".join(map(ours.pieces.get, ids)) == text.encode()
        assert len(ours.encode_to_bytes(text)) == ours.width * len(ids)


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_bytes_has_256_bytes_and_an_end_of_text(tmp_path):
    ours = load_tokenizer("bytes")
    assert (ours.n_vocab, ours.eot_token, ours.dtype) == (257, 256, "uint16")
    assert all(ours.encode_ordinary(text) == list(text.encode()) for text in TEXTS)
    copy(ours, tmp_path)
    check_equal(ours, transformers.AutoTokenizer.from_pretrained(str(tmp_path)).backend_tokenizer)
    assert loaded(tmp_path).name == "bytes"


@pytest.mark.slow
def test_gpt2_is_tiktokens_and_hugging_faces_and_comes_back_from_its_files(gpt2, tmp_path):
    theirs = tiktoken.get_encoding("gpt2")
    assert all(gpt2.encode_ordinary(text) == theirs.encode_ordinary(text) for text in TEXTS)
    copy(gpt2, tmp_path)
    model = json.loads((tmp_path / COPY[0]).read_text("utf-8"))["model"]
    assert len(model["merges"]) == 50000 and model["merges"][0] == ["Ġ", "t"]
    pair = write_pair(tmp_path / "dataset", model["vocab"], model["merges"], "gpt2-")
    theirs = transformers.GPT2TokenizerFast.from_pretrained(str(tmp_path)).backend_tokenizer
    for source in (pair / "gpt2-vocab.json", tmp_path):
        ours = loaded(source)
        assert (ours.name, ours.n_vocab, ours.eot_token, ours.ids) == ("gpt2", 50257, 50256, gpt2.ids)
        check_equal(ours, theirs)


def test_random_merges(tmp_path):
    """A token of a useless merge must not get a rank, because tiktoken would merge any two parts of it.

    Ids in another order than the merges, as OPT has them, need a table.
    """
    rng, seen = random.Random(2), {"useless": 0, "table": 0, "refused": 0}
    for _ in range(40):
        base = [LETTER_OF[b] for c in rng.choice(["ab", "abc", "aé日"]) for b in c.encode()]
        tokens, merges = [*base], []
        for _ in range(rng.choice([5, 12, 30])):
            if (pair := [rng.choice(tokens), rng.choice(tokens)]) not in merges:
                merges.append(pair)
                tokens.append("".join(pair))
        texts = list(dict.fromkeys([*BYTE_OF, *map("".join, merges), END]))
        if rng.random() < 0.5:
            rng.shuffle(texts)
        vocab = {text: i for i, text in enumerate(texts)}
        try:
            ours = loaded(write_pair(tmp_path / "pair", vocab, merges))
        except UserError as error:
            assert "which only a later merge makes" in str(error)
            seen["refused"] += 1
            continue
        theirs = tokenizers.Tokenizer(models.BPE(vocab, [tuple(pair) for pair in merges]))
        theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        letters = bytes(BYTE_OF[c] for c in base).decode()
        samples = ["".join(rng.choices(letters, k=k)) for k in [*range(1, 40), 300]]
        check_equal(ours, theirs, samples)
        seen["useless"] += len(ours.ranks) < len(ours.ids)
        seen["table"] += texts[-1] != END
        copy(ours, tmp_path)
        assert loaded(tmp_path).name == ours.name
        check_equal(loaded(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / COPY[0])), samples)
    assert seen["useless"] > 9 and seen["table"] > 9 and seen["refused"] < 12, seen


@pytest.mark.parametrize("pattern", [None, r"'s| ?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+", r"\p{L}+|[0-9]"])
def test_a_trained_vocabulary_in_each_form_and_its_copy(pattern, tmp_path):
    theirs = trained(pattern=pattern)
    theirs.save(str(tmp_path / COPY[0]))
    (tmp_path / COPY[1]).write_text(json.dumps({"eos_token": {"content": END}}))
    ours = loaded(tmp_path)
    assert (ours.n_vocab, ours.end, ours.eot_token) == (600, END, 0) and ours.name.startswith("bpe-600-")
    check_equal(ours, theirs)
    if pattern is None:
        theirs.model.save(str(tmp_path))
        assert loaded(tmp_path / "vocab.json").name == ours.name
    copy(ours, tmp_path)
    assert copied(tmp_path, "x").name == ours.name
    check_equal(loaded(tmp_path), theirs)
    check_equal(ours, transformers.AutoTokenizer.from_pretrained(str(tmp_path)).backend_tokenizer)


def test_the_names_of_vocabularies_never_change(tmp_path):
    """An old data set must stay the data set of the same command."""
    write_pair(tmp_path, {text: i for i, text in enumerate([*BYTE_OF, "ab", END])}, [["a", "b"]])
    assert loaded(tmp_path).name == "bpe-258-849a23be"


def test_openais_names_of_the_files(tmp_path):
    """GPT-2's release calls vocab.json encoder.json, and merges.txt vocab.bpe."""
    write_pair(tmp_path, {text: i for i, text in enumerate([*BYTE_OF, "ab", END])}, [["a", "b"]])
    name = loaded(tmp_path).name
    (tmp_path / "vocab.json").rename(tmp_path / "encoder.json")
    with pytest.raises(UserError, match=r"needs .*/vocab\.bpe: No such file"):
        loaded(tmp_path)
    (tmp_path / "merges.txt").rename(tmp_path / "vocab.bpe")
    assert name == loaded(tmp_path).name == loaded(tmp_path / "encoder.json").name


@pytest.fixture
def large(gpt2, monkeypatch):
    """Replace the download of tiktoken's large encodings: their patterns and special tokens with GPT-2's vocabulary."""

    def get_encoding(name):
        monkeypatch.setattr(
            openai_public, "load_tiktoken_bpe", lambda *_, **__: gpt2.ids | {b"no merge makes it": 50256}
        )
        arguments = getattr(openai_public, name)()
        return tiktoken.Encoding(**arguments | {"special_tokens": {END: 70000}})

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)


@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base"])
def test_tiktokens_large_encodings(name, large, tmp_path, monkeypatch):
    ours, theirs = loaded(name), tiktoken.get_encoding(name)
    assert (ours.name, ours.n_vocab, ours.eot_token, ours.dtype) == (name, 70001, 70000, "uint32")
    assert all(ours.encode_ordinary(text) == theirs.encode_ordinary(text) for text in TEXTS)
    copy(ours, tmp_path)
    assert not (tmp_path / COPY[0]).exists()  # the name must do
    monkeypatch.setattr("tokenizer.load_tokenizer", lambda source: source)
    assert copied(tmp_path, name) == name


def test_without_network_the_message_says_what_to_do(tmp_path, monkeypatch):
    def no_network(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    with pytest.raises(UserError) as error:
        loaded("gpt2")
    assert "TIKTOKEN_CACHE_DIR" in str(error.value) and "tokenizer=bytes" in str(error.value)


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bytes", "gpt2", "files", "cl100k_base", "o200k_base"])
def test_a_cut_changes_no_token(name, tmp_path, gpt2, large):
    """Also if the text goes on after the part that `last_cut` sees."""
    if name == "files":
        trained().save(str(tmp_path / COPY[0]))
    ours = gpt2 if name == "gpt2" else loaded(tmp_path if name == "files" else name)
    rng, cuts = random.Random(2), 0
    for _ in range(900):
        text, seen = text_of_atoms(rng, 24), 16
        ids = ours.encode_ordinary(text)
        while i := last_cut(text[:seen], ours):
            assert ours.encode_ordinary(text[:i]) + ours.encode_ordinary(text[i:]) == ids, (text, i)
            cuts, seen = cuts + 1, i if i < seen else i - 1
    assert cuts > 200


# --- the package `tokenizers` -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LLAMAS)
def test_any_file_of_the_package_tokenizers(kind, tmp_path):
    ours, theirs = loaded(write_llamas(tmp_path / "hf", kind)), llamas(kind)
    theirs.encode_special_tokens = True
    assert (ours.end, ours.eot_token, ours.begin) == ("</s>", theirs.token_to_id("</s>"), theirs.token_to_id("<s>"))
    (tmp_path / "copy").mkdir()
    copy(ours, tmp_path / "copy")
    again = copied(tmp_path / "copy", "x")
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
    with pytest.raises(ValueError, match="its text contains </s>"):
        ours.encode_ordinary("</s>")


def test_byte_level_files_that_tiktoken_would_read_wrongly(tmp_path):
    """A token before each document, and an end of each word: the package `tokenizers` encodes."""
    value = json.loads(trained().to_str())
    begin = tokenizers.processors.TemplateProcessing(f"{END} $A", special_tokens=[(END, 0)])
    begun = trained()
    begun.post_processor = begin
    value["model"]["end_of_word_suffix"] = "</w>"
    for name, theirs in (("begin", begun), ("suffix", tokenizers.Tokenizer.from_str(json.dumps(value)))):
        (tmp_path / name).mkdir()
        theirs.save(str(tmp_path / name / COPY[0]))
        ours, theirs.encode_special_tokens = loaded(tmp_path / name), True
        for text in TEXTS:
            assert ours.encode_ordinary(text) == theirs.encode(text).ids, (name, text)


@pytest.mark.parametrize("kind", LLAMAS)
def test_the_text_of_the_end_is_never_the_end(kind, tmp_path):
    ours = loaded(write_llamas(tmp_path, kind))
    for text in ("a</s>b", "</s>", "a</s>"):
        if kind == "unigram":
            with pytest.raises(ValueError, match="its text contains </s>, which this vocabulary encodes as the end"):
                ours.encode_ordinary(text)
        else:
            assert ours.eot_token not in ours.encode_ordinary(text)


def test_a_document_that_tokenizers_can_not_encode_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "LONGEST", 99)
    ours = loaded(write_llamas(tmp_path, "bpe"))
    assert ours.encode_ordinary("a" * 99)
    with pytest.raises(ValueError, match="100 characters in a document: at most 99 with this vocabulary"):
        ours.encode_ordinary("a" * 100)


@pytest.mark.parametrize("kind", ["unigram", "merges"])
def test_prepare_writes_documents_of_any_file(kind, tmp_path):
    """Two workers; each document begins with <s> and ends with </s>."""
    write_llamas(tmp_path / "hf", kind)
    documents = [JAPANESE[i : i + 300] for i in range(0, 3000, 300)]
    lines = [json.dumps({"text": text}) for text in documents]
    (tmp_path / "text.jsonl").write_text("\n".join(lines), "utf-8")
    words = ["text.jsonl", "--tokenizer=hf", "--out=data", "--split=1,0,0", "--workers=2"]
    done = subprocess.run([sys.executable, HERE / "prepare.py", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours = loaded(tmp_path / "data")
    expected = [i for text in documents for i in [*ours.encode_ordinary(text), ours.eot_token]]
    assert np.fromfile(tmp_path / "data/train.bin", "<u2").tolist() == expected
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    assert (meta["tokenizer"], meta["eot_id"], meta["documents"]["train"]) == (ours.name, ours.eot_token, 10)
    (tmp_path / "empty.txt").write_text("")  # its document is <s></s>
    words = ["empty.txt", "--tokenizer=hf", "--out=none"]
    done = subprocess.run([sys.executable, HERE / "prepare.py", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "the input has no text (files: 1, empty documents: 1" in done.stderr


def test_without_the_package_tokenizers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setattr(tokenizer, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tiktoken can't read it \(its model is Unigram\); pip install tokenizers"):
        loaded(write_llamas(tmp_path, "unigram"))


def test_a_folder_with_only_sentencepieces_file(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"has only tokenizer\.model, without tokenizer\.json; transformers writes it"):
        loaded(tmp_path)


# --- wrong vocabularies -----------------------------------------------------------------------------------------------

SPLIT = {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Removed", "invert": True}
BARE = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def with_model(**changes):
    return lambda it: it | {"model": it["model"] | changes}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda it: "{", "JSON"),
        (
            lambda it: it | {"normalizer": {"type": "no"}},
            "(a normalizer, ignore_merges, continuing_subword_prefix, end_of_word_suffix, or added tokens that are not",
        ),
        (lambda it: it | {"pre_tokenizer": {"pretokenizers": [SPLIT, BARE]}}, "can't read it (its pre-tokenizer)"),
        (lambda it: it | {"added_tokens": []}, "it names no end of a document; set eos_token in tokenizer_config.json"),
        (with_model(merges=[["a"]]), "ValueError"),
        (with_model(merges=[["a", "Ā"]]), "KeyError"),  # its token has no id
        (lambda it: it | {"model": {"type": "Unigram", "vocab": 3}}, "can't read it (its model is Unigram)"),
    ],
)
def test_a_wrong_file_is_one_line(change, message, tmp_path):
    value = change(json.loads(trained(300).to_str()))
    (tmp_path / COPY[0]).write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(UserError) as error:
        loaded(tmp_path)
    assert str(error.value).startswith(f"tokenizer={tmp_path}: ")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_vocabulary_without_its_merges_and_a_wrong_name(tmp_path):
    with pytest.raises(UserError, match=r"a folder without tokenizer\.json, vocab\.json or"):
        loaded(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=r"needs .*/merges.txt: No such file"):
        loaded(tmp_path)
    for name in ("gpt-2", "other/vocab.json"):
        with pytest.raises(UserError, match=f"tokenizer={name}: no such file .*bytes gpt2"):
            loaded(name)


# --- the way of a vocabulary ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_japanese_from_text_to_text(tmp_path):
    """Prepare, train, delete all but the checkpoint, and generate text."""

    def command(name, *words):
        words = [sys.executable, HERE / name, *map(str, words)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    trained().save(str(tmp_path / COPY[0]))
    (tmp_path / "text.txt").write_text(JAPANESE * 3, "utf-8")
    command("prepare.py", "text.txt", f"--tokenizer={COPY[0]}", "--out=data", "--split=9,1,0")
    sizes = "num_layers=2 hidden_size=64 num_attention_heads=2 seq_length=32 vocab_size=600 dtype=fp32 kernels=torch"
    steps = "train_iters=60 global_batch_size=16 micro_batch_size=16 lr=1e-2 lr_decay_iters=60 save_interval=40"
    flags = [f"--{field}" for field in f"{sizes} {steps} data_dir=data out_dir=out".split()]
    command("train.py", HERE / "configs/tiny.py", *flags)
    assert (tmp_path / "out/step_60" / COPY[0]).read_bytes() == (tmp_path / "data" / COPY[0]).read_bytes()
    shutil.move(tmp_path / "out/step_60", tmp_path / "moved")
    for folder in ("data", "out"):
        shutil.rmtree(tmp_path / folder)
    text = command("generate.py", "moved", "--prompt", "春子さんは", "--temperature=0", "--max_tokens=40")
    words = [text[i : i + 4] for i in range(5, 35)]
    assert text.startswith("春子さんは") and sum(word in JAPANESE for word in words) > 15, text
    command("prepare.py", "text.txt", "--tokenizer=moved", "--out=more")  # more data for the same model
    assert json.loads((tmp_path / "more/meta.json").read_text())["tokenizer"].startswith("bpe-600-")
