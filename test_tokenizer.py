"""Test vocabularies from files: tokens equal those of Hugging Face `tokenizers`, and a wrong file gives an error of
one line.

The vocabularies are made here: trained on a Japanese text (testing/japanese.txt), random, or GPT-2's with other ids.
"""

import base64
import hashlib
import inspect
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken_ext.openai_public
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

import data
import documents
import prepare
import vocabulary
from errors import UserError
from test_prepare import ATOMS, error_of, meta_in, run, tokens_in, whole
from tokenizer import copied, copy, cut_points, load_tokenizer
from vocabulary import BYTE_OF, LETTER_OF, NAME_OF, PATTERNS, text_of

HERE = Path(__file__).parent
JAPANESE = (HERE / "testing/japanese.txt").read_text(encoding="utf-8")
END = "<|endoftext|>"
LETTERS = [
    *ATOMS,
    "\u017f",
    "'S",
    "/",
    "//",
    "\n/",
    "Éa",
    "é́",
    "ー",
    "々",
    "、",
    "「",
    "a'b",
    "ǅ",
    "ʰ",
    "日本語",
    "。\n",
]
SAMPLES = ["", " ", "\n", JAPANESE, *("".join(random.Random(i).choices(LETTERS, k=120)) for i in range(120))]
# Only one of Python and tiktoken may know a character that is new in Unicode.
NEW = regex.compile(r"[\U0001f6d8ꟊ]")
COMMON = [NEW.sub("", text) for text in SAMPLES]


def trained(size=600, pattern=None, text=JAPANESE):
    """Return a Hugging Face tokenizer: byte-level BPE with `size` ids. pattern: None is GPT-2's."""
    it = tokenizers.Tokenizer(models.BPE())
    it.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        it.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    it.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    it.train_from_iterator(
        text.splitlines(True),
        trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
    )
    return it


@pytest.fixture(scope="module")
def japanese():
    return trained()


@pytest.fixture(scope="module")
def gpt2():
    try:
        return load_tokenizer("gpt2")
    except UserError as error:
        pytest.skip(f"GPT-2's vocabulary is not available: {error}")


def write_pair(folder, vocab, merges, prefix=""):
    """Write vocab.json and merges.txt as GPT-2 has them. merges: pairs of texts."""
    folder.mkdir(exist_ok=True)
    (folder / f"{prefix}vocab.json").write_text(json.dumps(vocab))
    lines = "".join(" ".join(pair) + "\n" for pair in merges)
    (folder / f"{prefix}merges.txt").write_text("#version: 0.2\n" + lines, encoding="utf-8")
    return folder


def write_tiktoken(path, tokens, pattern=None):
    path.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)))
    if pattern:
        path.with_suffix(".pattern").write_text(pattern + "\n", encoding="utf-8")
    return path


def by_hugging_face(it, text):
    return it.encode(text, add_special_tokens=False).ids


def check_equal(ours, theirs, texts=COMMON):
    """Check the tokens of `texts` (without special tokens), and that decoding gives the text again."""
    for text in texts:
        text = text.replace(END, "")
        ids = ours.encode_ordinary(text)
        assert ids == by_hugging_face(theirs, text), text
        assert ours.encode(text).tolist() == ids and ours.encode(text).dtype == ours.dtype
        assert ours.decode(ids) == text


def loaded(path):
    return load_tokenizer.__wrapped__(str(path))  # without the cache


# --- tokens equal Hugging Face's --------------------------------------------------------------------------------------


def test_gpt2s_own_files_are_gpt2(gpt2, tmp_path):
    copy(gpt2, tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    assert len(model["merges"]) == 50000 and model["merges"][0] == ["Ġ", "t"] and not model["ignore_merges"]
    pair = write_pair(tmp_path / "dataset", model["vocab"], model["merges"], "gpt2-")
    for source in (pair, pair / "gpt2-vocab.json", pair / "gpt2-merges.txt", tmp_path):
        ours = loaded(source)
        assert (ours.name, ours.n_vocab, ours.eot_token, ours.table) == ("gpt2", 50257, 50256, None)
        assert ours.vocabulary.ids == gpt2.vocabulary.ids
    theirs = transformers.GPT2TokenizerFast(str(pair / "gpt2-vocab.json"), str(pair / "gpt2-merges.txt"))
    check_equal(ours, theirs.backend_tokenizer)
    check_equal(gpt2, theirs.backend_tokenizer)


def test_ids_in_another_order_than_the_merges(gpt2, tmp_path):
    """OPT sorts GPT-2's tokens by frequency, and its first ids are special tokens. The end of a document is </s>."""
    copy(gpt2, tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    random.Random(1).shuffle(tokens)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *tokens, "madeupword0000", "<mask>"]
    vocab = {text: i for i, text in enumerate(tokens)}
    pair = write_pair(tmp_path / "opt", vocab, model["merges"])
    ours = loaded(pair)
    assert (ours.n_vocab, ours.eot_token, ours.end) == (50263, 2, "</s>") and ours.name.startswith("bpe-50263-")
    theirs = transformers.GPT2TokenizerFast(str(pair / "vocab.json"), str(pair / "merges.txt"))
    check_equal(ours, theirs.backend_tokenizer)
    assert ours.decode_single_token_bytes(2) == b"</s>" and ours.encode_ordinary("</s>") != [2]


def test_a_trained_vocabulary_in_both_forms(japanese, tmp_path):
    japanese.save(str(tmp_path / "tokenizer.json"))
    japanese.model.save(str(tmp_path))
    one, other = loaded(tmp_path / "tokenizer.json"), loaded(tmp_path / "vocab.json")
    assert one.name == other.name and one.n_vocab == 600 and one.eot_token == 0
    check_equal(one, japanese)
    check_equal(other, japanese)


@pytest.mark.parametrize("name", PATTERNS)
def test_each_known_pattern(name, tmp_path):
    """The three ways that a pattern comes: Hugging Face's file, a .tiktoken file, and our copy."""
    theirs = trained(500, PATTERNS[name][-1], JAPANESE + "34 34 34 45 45 12\n" * 9)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = loaded(tmp_path)
    assert ours.vocabulary.pattern == name and ours.pattern == PATTERNS[name][0]
    check_equal(ours, theirs)
    ranks = sorted(ours.vocabulary.ranks, key=ours.vocabulary.ranks.get)
    by_name = loaded(write_tiktoken(tmp_path / "a.tiktoken", ranks, name if name == "gpt2" else PATTERNS[name][-1]))
    assert by_name.vocabulary.pattern == name and by_name.eot_token == 499
    copy(by_name, tmp_path)
    again = loaded(tmp_path)
    assert again.name == by_name.name
    check_equal(by_name, tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")))


def test_an_unknown_pattern_keeps_all_text_and_is_never_cut(tmp_path):
    theirs = trained(400, r"\p{L}+|[0-9]")  # white space and the rest match nothing
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = loaded(tmp_path)
    check_equal(ours, theirs)
    assert list(cut_points(JAPANESE, ours.pattern)) == []


def random_merges(rng):
    """Return merges of a few letters. Many are useless: another merge takes their parts, or makes the same token."""
    base = [LETTER_OF[b] for c in rng.choice(["ab", "abc", "aé日"]) for b in c.encode()]
    tokens, merges = [*base], []
    for _ in range(rng.choice([5, 12, 30])):
        pair = [rng.choice(tokens), rng.choice(tokens)]
        if pair not in merges:
            merges.append(pair)
            tokens.append("".join(pair))
    return base, merges


def test_random_merges(tmp_path):
    """A token of a useless merge must not get a rank, because tiktoken would merge any two parts of it."""
    rng, seen = random.Random(2), {"useless": 0, "table": 0, "refused": 0}
    for _ in range(150):
        base, merges = random_merges(rng)
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
        samples = ["".join(rng.choices(letters, k=k)) for k in [*range(1, 40), 700]]
        check_equal(ours, theirs, samples)
        seen["useless"] += len(ours.vocabulary.ranks) < len(ours.vocabulary.ids)
        seen["table"] += ours.table is not None
        copy(ours, tmp_path)
        assert loaded(tmp_path).name == ours.name
        check_equal(ours, tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), samples)
    assert seen["useless"] > 40 and seen["table"] > 40 and seen["refused"] < 30, seen


def test_tokens_that_no_merge_makes(tmp_path):
    """tiktoken finds a whole pre-token without merges. Hugging Face calls this ignore_merges."""
    tokens = [*(bytes([b]) for b in range(256)), b"ab", b"cd", b"xyz", b"bcx", b"abcx"]  # no pair makes xyz
    ours = loaded(write_tiktoken(tmp_path / "a.tiktoken", tokens, "gpt2"))
    assert ours.encode_ordinary("xyz xyz") == [258, 32, *b"xyz"] and ours.encode_ordinary("abcx") == [260]
    copy(ours, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdxyz ", k=12)) for _ in range(500)]
    check_equal(ours, theirs, texts)
    again = loaded(tmp_path)
    assert again.name == ours.name
    check_equal(again, theirs, texts)


def test_the_copy_of_bytes_has_the_same_ids(tmp_path):
    copy(load_tokenizer("bytes"), tmp_path)
    it = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert it.eos_token_id == 256 and it.decode([*"日本".encode()]) == "日本"
    check_equal(load_tokenizer("bytes"), it.backend_tokenizer)
    assert loaded(tmp_path).name == "bytes"


@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base"])
def test_tiktokens_large_encodings(name, tmp_path, monkeypatch):
    """A stand-in for the download: OpenAI's pattern, special tokens and ids that are not used."""
    special = {END: 100257, "<|endofprompt|>": 100276}
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    ranks = {
        token: i for i, token in enumerate([*(bytes([b]) for b in range(256)), *pairs, *(b"zz" + p for p in pairs)])
    }
    ranks = {token: i for token, i in ranks.items() if i < 100256}
    fake = tiktoken.Encoding(name, pat_str=PATTERNS[name][0], mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr("tiktoken.get_encoding", {name: fake}.__getitem__)
    ours = loaded(name)
    assert (ours.name, ours.n_vocab, ours.eot_token, ours.dtype) == (name, 100277, 100257, "uint32")
    assert ours.encode(JAPANESE).tolist() == fake.encode_ordinary(JAPANESE)
    copy(ours, tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"tokenizer": name}))
    again = loaded(tmp_path)
    assert again.name == name and again.vocabulary.special == ours.vocabulary.special
    assert again.encode(JAPANESE).tolist() == fake.encode_ordinary(JAPANESE)


def test_openais_files_are_known_without_a_pattern(tmp_path, monkeypatch):
    path = write_tiktoken(tmp_path / "a.tiktoken", [bytes([b]) for b in range(256)])
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(vocabulary.OPENAI_FILES, sha256, ("cl100k_base", 257))
    ours = loaded(path)
    assert (ours.vocabulary.pattern, ours.eot_token, ours.special["<|unused_256|>"]) == ("cl100k_base", 257, 256)
    monkeypatch.undo()
    source = inspect.getsource(tiktoken_ext.openai_public)
    for sha256, (name, end) in vocabulary.OPENAI_FILES.items():
        below = source.split(sha256)[1]  # the rest of tiktoken's function
        assert regex.search(r"ENDOFTEXT: (\d+)", below)[1] == str(end)
        assert name in ("gpt2", "cl100k_base", "o200k_base")


def test_the_end_of_a_document_that_the_configuration_names(japanese, tmp_path):
    (tmp_path / "tokenizer.json").write_text(change(japanese, added_tokens=[]), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    ours = loaded(tmp_path)
    assert (ours.end, ours.eot_token, ours.special) == (END, 0, {END: 0})
    check_equal(ours, japanese)


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", NAME_OF)
def test_the_pre_tokenizer_cuts_at_every_cut_point_anyway(pattern):
    compiled, rng, points = regex.compile(pattern.replace(r"\z", r"\Z")), random.Random(2), 0

    def pieces(text):
        return [found.group() for found in compiled.finditer(text)]

    for _ in range(1500):
        text = "".join(rng.choices(LETTERS, k=24))
        points_here = list(cut_points(text, pattern))
        points += len(points_here)
        for i in points_here:
            assert pieces(text[:i]) + pieces(text[i:]) == pieces(text), (text, i)
        assert {i + 7 for i in cut_points(text[7:-7], pattern)} <= {*points_here}  # only neighbours matter
    assert points > 9000


@pytest.mark.parametrize("name", PATTERNS)
def test_forms_of_a_pattern_give_the_same_pre_tokens(name):
    forms, rng = [regex.compile(form.replace(r"\z", r"\Z")) for form in PATTERNS[name]], random.Random(4)
    for _ in range(1500):
        text = "".join(rng.choices(LETTERS, k=12))
        first, *others = ([found.group() for found in form.finditer(text)] for form in forms)
        assert all(other == first for other in others) and "".join(first) == text


@pytest.mark.parametrize("name", PATTERNS)
def test_long_documents_equal_whole_ones(name, tmp_path, monkeypatch):
    source = tmp_path / "a.tiktoken"
    ranks = trained(500, PATTERNS[name][-1]).get_vocab()
    tokens = [vocabulary.bytes_of(text) for text in sorted(ranks, key=ranks.get) if text != END]
    ours = load_tokenizer(str(write_tiktoken(source, tokens, name)))
    monkeypatch.setattr(documents, "PIECE", 40)
    monkeypatch.setattr(documents, "MAX_RUN", 300)
    rng = random.Random(5)
    texts = [JAPANESE, *("".join(rng.choices(LETTERS, k=rng.choice([30, 3000]))) for _ in range(20))]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_bytes(text.encode())
    paths = [str(tmp_path / f"{i:02}.txt") for i in range(len(texts))]
    blocks = list(documents.read_blocks(paths, "text", ours.pattern))
    encoded = [prepare.encode_block(prepare.Job(str(source), "text", (1, 0, 0)), block) for block in blocks]
    assert not any(e.skipped for e in encoded)
    assert np.frombuffer(b"".join(e.tokens[0] for e in encoded), "<u2").tolist() == whole(ours, texts)
    assert sum(not part.begins for block in blocks for part in block) > 500


# --- wrong vocabularies -----------------------------------------------------------------------------------------------


def change(japanese, **changes):
    """Return the tokenizer.json with other values. A name like model__dropout is a path."""
    value = json.loads(japanese.to_str())
    for path, new in changes.items():
        *folders, name = path.split("__")
        place = value
        for folder in folders:
            place = place[folder]
        place[name] = new(place[name]) if callable(new) else new
    return json.dumps(value)


SPLIT = {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated", "invert": False}
BARE = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
ADDED = {"id": 600, "content": "  ", "special": False}
CHANGES = {
    "not JSON": (lambda it: "{", "tokenizer.json: not JSON (Expecting property name"),
    "no object": (lambda it: "[]", "tokenizer.json: contains no JSON object"),
    "no model": (lambda it: "{}", "tokenizer.json: not a tokenizer.json of Hugging Face"),
    "Unigram": (lambda it: change(it, model={"type": "Unigram", "vocab": []}), ": its model is Unigram, which is not"),
    "WordPiece": (lambda it: change(it, model__type="WordPiece"), ": its model is WordPiece, which is not supported"),
    "dropout": (lambda it: change(it, model__dropout=0.1), ": dropout=0.1 is not byte-level BPE"),
    "byte_fallback": (lambda it: change(it, model__byte_fallback=True), ": byte_fallback=True is not byte-level BPE"),
    "normalizer": (lambda it: change(it, normalizer={"type": "NFC"}), ": its normalizer (NFC) would change the text"),
    "pre-tokenizer": (
        lambda it: change(it, pre_tokenizer={"type": "Whitespace"}),
        ": its pre-tokenizer (Whitespace) is not byte-level",
    ),
    "no pre-tokenizer": (lambda it: change(it, pre_tokenizer=None), "(no pre-tokenizer) is not byte-level"),
    "prefix space": (lambda it: change(it, pre_tokenizer__add_prefix_space=True), ": add_prefix_space=true would add"),
    "no pattern": (lambda it: change(it, pre_tokenizer=BARE), ": its ByteLevel has use_regex=False, which is not"),
    "removing": (
        lambda it: change(
            it,
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [SPLIT | {"behavior": "Removed", "invert": True}, BARE],
            },
        ),
        r": its Split would remove text that does not match \w+",
    ),
    "bad pattern": (
        lambda it: change(
            it,
            pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT | {"pattern": {"Regex": "(a"}}, BARE]},
        ),
        ": tiktoken can't use its pattern: ",
    ),
    "added token": (lambda it: change(it, added_tokens=lambda old: [*old, ADDED]), ": the added token '  ' is not"),
    "ids with gaps": (
        lambda it: change(it, added_tokens=lambda old: [*old, ADDED | {"id": 700, "special": True}]),
        ": 601 tokens, but none has the id 600: ids have gaps or occur twice",
    ),
    "an id twice": (
        lambda it: change(it, model__vocab=lambda old: old | {"!": 2}),
        ": 600 tokens, but none has the id 1: ids have gaps",
    ),
    "an id is a text": (lambda it: change(it, model__vocab=lambda old: old | {"!": "1"}), "the id of '!' is not an"),
    "a byte is missing": (
        lambda it: change(it, model__vocab=lambda old: {"new" if text == "!" else text: i for text, i in old.items()}),
        ": 1 of the 256 single bytes have no token (the first is 0x21)",
    ),
    "SentencePiece BPE": (
        lambda it: change(
            it, model__vocab=lambda old: {"\u2581a" if text == "!" else text: i for text, i in old.items()}
        ),
        ": spaces are U+2581, as SentencePiece writes them",
    ),
    "merge without a token": (
        lambda it: change(it, model__merges=lambda old: [*old, ["!", "!"]]),
        "['!', '!'] has a token without an id",
    ),
    "merges of one": (lambda it: change(it, model__merges=lambda old: [*old, ["!"]]), "is not a pair of tokens"),
    "no merges": (lambda it: change(it, model__merges=None), ": its BPE has no merges"),
    "no end": (
        lambda it: change(it, added_tokens=[]),
        ": no token for the end of a document (none of </s> <|endoftext|> <|end_of_text|> <eos>)",
    ),
    "damaged": (
        lambda it: change(it, added_tokens=[{}]),
        "tokenizer.json: not what it should be (KeyError('content'))",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_wrong_tokenizer_json_is_one_line(case, japanese, tmp_path):
    content, message = CHANGES[case]
    (tmp_path / "tokenizer.json").write_text(content(japanese), encoding="utf-8")
    with pytest.raises(UserError) as error:
        loaded(tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"tokenizer={tmp_path}")


GOOD = {"vocab.json": json.dumps({text: i for i, text in enumerate([*BYTE_OF, "ab", END])}), "merges.txt": "a b\n"}
RANKS = "".join(f"{base64.b64encode(bytes([b])).decode()} {b}\n" for b in range(256))
FILES = {
    "nothing": ({}, "{}: the folder has no vocabulary; supported: byte-level BPE"),
    "no merges": ({"vocab.json": "{}"}, "{}/vocab.json: needs the file merges.txt beside it"),
    "no vocabulary": ({"x-merges.txt": ""}, "{}/x-merges.txt: needs the file x-vocab.json beside it"),
    "SentencePiece": ({"spm.model": "\0"}, "{}/spm.model: a SentencePiece model is not supported"),
    "WordPiece": ({"vocab.txt": "[UNK]"}, "{}/vocab.txt: a WordPiece vocabulary is not supported"),
    "two": ({**GOOD, "b-vocab.json": ""}, "{}: b-vocab.json or vocab.json? Name one of these files"),
    "three in a line": (
        GOOD | {"merges.txt": "a b\na b c\n"},
        "{}/merges.txt: line 2 is not a pair of tokens: 'a b c'",
    ),
    "not UTF-8": (GOOD | {"merges.txt": b"\xff"}, "{}/merges.txt: not UTF-8"),
    "cut off": (GOOD | {"vocab.json": GOOD["vocab.json"][:-9]}, "{}/vocab.json: not JSON"),
    "empty": (GOOD | {"vocab.json": "{}"}, "{}/vocab.json: "),
    "other merges": (GOOD | {"merges.txt": "a c\n"}, "{}/merges.txt: merge 1 ['a', 'c'] has a token without an id"),
    "unknown end": (
        GOOD | {"tokenizer_config.json": '{"eos_token": {"content": "<end>"}}'},
        "{}/merges.txt: no token for the end of a document ('<end>', the eos_token, has no id)",
    ),
    "no pattern": (
        {"a.tiktoken": RANKS},
        "{}/a.tiktoken: has no pattern; write it into {}/a.pattern as one line: gpt2",
    ),
    "no base64": ({"a.tiktoken": "!!!! 1\n"}, "{}/a.tiktoken: line 1 is not a token in base64 and its rank"),
    "no rank": ({"a.tiktoken": RANKS + "YWI=\n"}, "{}/a.tiktoken: line 257 is not a token"),
    "gap": (
        {"a.tiktoken": RANKS + "YWI= 300\n", "a.pattern": "gpt2"},
        "{}/a.tiktoken: 258 tokens, but none has the id 257",
    ),
    "few bytes": ({"a.tiktoken": "YQ== 0\n", "a.pattern": "gpt2"}, "{}/a.tiktoken: 255 of the 256 single bytes"),
}


@pytest.mark.parametrize("case", FILES)
def test_wrong_files_are_one_line(case, tmp_path):
    files, message = FILES[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        loaded(tmp_path)
    assert str(error.value).startswith("tokenizer=" + message.replace("{}", str(tmp_path)).replace(f"={tmp_path}", "="))
    assert "\n" not in str(error.value)


def test_good_files_are_read(tmp_path):
    """The cases above change these files. Unchanged, they must be right."""
    for name, content in GOOD.items():
        (tmp_path / name).write_text(content)
    assert loaded(tmp_path).encode_ordinary("abb") == [256, [*BYTE_OF].index("b")]
    assert loaded(write_tiktoken(tmp_path / "a.tiktoken", [bytes([b]) for b in range(256)], "gpt2")).name == "bytes"


# --- data sets --------------------------------------------------------------------------------------------------------


def large(folder, count):
    """Write a .tiktoken file with `count` ids: single bytes, pairs of bytes, then longer tokens, and the end."""
    tokens = [bytes([b]) for b in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    return write_tiktoken(
        folder / "large.tiktoken", [*tokens, *(b"zz" + token for token in tokens)][: count - 1], "gpt2"
    )


@pytest.mark.parametrize("count, dtype", [(65536, "uint16"), (65537, "uint32"), (100000, "uint32")])
def test_above_65536_ids_tokens_are_uint32(count, dtype, tmp_path):
    source, texts = large(tmp_path, count), [JAPANESE, "\U0010ffff zz zzab"]
    ours = load_tokenizer(str(source))
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    words = [tmp_path / "a.txt", tmp_path / "b.txt", f"--out={tmp_path}/out", f"--tokenizer={source}", "--split=1,0,0"]
    assert f"--vocab_size={count}" in run(*words)
    meta, path, expected = meta_in(tmp_path / "out"), tmp_path / "out/train.bin", whole(ours, texts)
    assert (meta["dtype"], meta["vocab_size"], meta["eot_id"]) == (dtype, count, count - 1)
    assert meta["tokens"] == {"train": len(expected), "val": 0, "test": 0}
    assert np.fromfile(path, {"uint16": "<u2", "uint32": "<u4"}[dtype]).tolist() == expected
    tokens = data.Tokens(tmp_path / "out", "train", 1, count)
    rows = tokens.batch(np.arange(tokens.num_samples), 0).tolist()
    assert sorted(rows) == sorted(map(list, itertools.pairwise(expected)))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match="truncated"):
        data.Tokens(tmp_path / "out", "train", 1, count)
    assert "does not match meta.json" in error_of(*words)


def test_a_crash_and_empty_splits_with_uint32(tmp_path):
    source, text = large(tmp_path, 70000), "ab cd\n" * 3000
    (tmp_path / "a.txt").write_text(text)
    command = [tmp_path / "a.txt", f"--tokenizer={source}", "--split=8,1,1", "--workers=1", f"--out={tmp_path}/out"]
    kill = "documents.PIECE, prepare.SAVE_EVERY = 64, 0\nappend = prepare.append\n"
    kill += "prepare.append = lambda file, data: (append(file, data), file.tell() > 9000 and os.kill(os.getpid(), 9))"
    run(*command, before=kill, code=-9)
    assert "resuming after" in run(*command, before="documents.PIECE = 64")
    rows = [np.fromfile(tmp_path / f"out/{split}.bin", "<u4").tolist() for split in prepare.SPLITS]
    expected = whole(load_tokenizer(str(source)), [text])
    assert [token for row in rows for token in row] == expected
    assert len(rows[1]) == len(rows[2]) == round(len(expected) / 10)


def test_a_strangers_vocabulary_is_never_overwritten(japanese, tmp_path):
    japanese.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("text")
    command = [tmp_path / "a.txt", f"--out={tmp_path}", f"--tokenizer={tmp_path}"]
    assert "contains a tokenizer.json but no meta.json" in error_of(*command)


def test_a_replaced_copy_is_refused(japanese, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    japanese.save(str(tmp_path / "tokenizer.json"))
    run(tmp_path / "a.txt", f"--out={tmp_path}/out", f"--tokenizer={tmp_path}/tokenizer.json")
    name = meta_in(tmp_path / "out")["tokenizer"]
    assert copied(tmp_path / "out", name).name == name
    trained(500).save(str(tmp_path / "out" / "tokenizer.json"))
    with pytest.raises(UserError, match=f"meta.json names {name}, but tokenizer.json has bpe-500-"):
        loaded(tmp_path / "out")


def command(*words, cwd, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_japanese_from_text_to_text(japanese, tmp_path):
    """Prepare, train, delete all but the checkpoint, and generate text."""
    japanese.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(JAPANESE * 3, encoding="utf-8")
    (tmp_path / "data").mkdir()
    options = [f"--tokenizer={tmp_path}/tokenizer.json", f"--out={tmp_path}/data/set", "--split=9,1,0"]
    command(HERE / "prepare.py", tmp_path / "text.txt", *options, cwd=tmp_path)
    ours = load_tokenizer(str(tmp_path / "data/set"))
    rows = tokens_in(tmp_path / "data/set")
    assert ours.decode(rows["train"] + rows["val"]) == JAPANESE * 3 + END
    sizes = "num_layers=2 hidden_size=64 num_attention_heads=2 seq_length=32 vocab_size=600 dtype=fp32 kernels=torch"
    steps = "train_iters=60 global_batch_size=16 micro_batch_size=16 lr=1e-2 lr_decay_iters=60 save_interval=40"
    flags = [f"--{field}" for field in f"{sizes} {steps}".split()]
    command(
        HERE / "train.py",
        HERE / "configs/tiny.py",
        *flags,
        f"--data_dir={tmp_path}/data/set",
        f"--out_dir={tmp_path}/out",
        cwd=tmp_path,
    )
    for step in (40, 60):
        kept = (tmp_path / f"out/step_{step}/tokenizer.json").read_bytes()
        assert kept == (tmp_path / "data/set/tokenizer.json").read_bytes()
    shutil.move(tmp_path / "out/step_60", tmp_path / "moved")
    for folder in ("data", "out"):
        shutil.rmtree(tmp_path / folder)
    (tmp_path / "tokenizer.json").unlink()
    generated = command(
        HERE / "generate.py", tmp_path / "moved", "--prompt", "春子さんは", "--temperature=0", "--max_tokens=40",
        cwd=tmp_path, TIKTOKEN_CACHE_DIR=str(tmp_path / "none"),
    )  # fmt: skip
    assert generated.startswith("春子さんは") and len(generated) > 40
    words = [generated[i : i + 4] for i in range(5, 35)]
    assert sum(word in JAPANESE for word in words) > 15, generated  # it has learned pieces of this text
    # the checkpoint's vocabulary prepares more data for the same model
    (tmp_path / "more.txt").write_text(JAPANESE, encoding="utf-8")
    run(tmp_path / "more.txt", f"--tokenizer={tmp_path}/moved", f"--out={tmp_path}/more")
    assert meta_in(tmp_path / "more")["tokenizer"] == ours.name


def test_texts_of_all_bytes():
    assert [text_of(bytes([b])) for b in (0, 32, 33, 173)] == ["Ā", "Ġ", "!", "Ń"]
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert {*BYTE_OF} == {*pre_tokenizers.ByteLevel.alphabet()}


def test_the_readmes_characters_per_token(gpt2, tmp_path):
    trained(1000).save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer("bytes"), gpt2, load_tokenizer(str(tmp_path / "tokenizer.json"))
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    for tokenizer in ours:
        row = f"| {tokenizer.n_vocab:,} | {len(JAPANESE) / len(tokenizer.encode_ordinary(JAPANESE)):.2f} |"
        assert row in readme
