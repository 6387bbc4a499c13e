"""Tokenizers: text to ids and back.

    bytes        the 256 byte values and an end of text; needs no download
    gpt2 ...     the names that tiktoken knows; it downloads the vocabulary once
    PATH         a byte-level BPE in files: tokenizer.json (Hugging Face), or vocab.json with merges.txt (GPT-2, OPT),
                 which OpenAI calls encoder.json and vocab.bpe; any other tokenizer.json (SentencePiece, Llama) is read
                 by the package `tokenizers`

A vocabulary gives each token (a byte string) an id. A regular expression, the pattern, cuts a text into pre-tokens,
roughly words. A merge is a pair of tokens that may become one token. Byte-pair encoding (BPE) starts from the single
bytes of a pre-token. Of the merges that fit, the earliest in the list is applied first, at its leftmost place.

tiktoken has no list of merges: it merges two neighbours if the result is a token, and the token's rank is its priority.
Both methods are equal if only *live* merges give ranks (NOTES.md: definition, proof); `ranked` makes sure of it.

tiktoken's ids are the ranks. Vocabularies in files may have other ids, so a table maps ranks to ids.
"""

import array
import codecs
import contextlib
import functools
import hashlib
import itertools
import json
import math
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import tiktoken

from errors import UserError, explained, fetched, reading

COPY = ("tokenizer.json", "tokenizer_config.json")
LONGEST = 1 << 24  # characters of a document for `tokenizers`, which encodes it whole, with about 100 bytes for each
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")  # if no file names the end of a document
SAME = {"bpe-50257-17721001": "gpt2", "bpe-257-f8e6bff0": "bytes"}  # the names of these
# GPT-2's pattern. Hugging Face calls it ByteLevel.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# GPT-2's letters for bytes.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTER_OF = {b: chr(b) for b in PRINTABLE}
LETTER_OF |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in PRINTABLE)}
BYTE_OF = {c: b for b, c in LETTER_OF.items()}


class Tokenizer:
    """ids: {bytes of a token: id}. special: {text: id} of tokens that stand for no text. end: the special token after a
    document. pattern: a regular expression, or "gpt2". ranks: {bytes: rank} of the tokens that encoding can produce.
    name: in meta.json and in a checkpoint's index.json; None: computed from the vocabulary.
    """

    def __init__(self, ids, special, end, pattern, ranks, name=None):
        """Number the ranks from 0 without gaps: tiktoken needs it. `id_of_rank` maps them to `ids`."""
        self.ids, self.special, self.end, self.pattern = ids, special, end, pattern
        self.ranks = {token: rank for rank, token in enumerate(sorted(ranks, key=ranks.get))}
        self.n_vocab, self.eot_token = max(*ids.values(), *special.values()) + 1, special[end]
        self.set_width()
        self.begin = self.eot_token
        self.pieces = {i: token for token, i in ids.items()} | {i: text.encode() for text, i in special.items()}
        self.name = name or self.computed_name()
        self.id_of_rank = array.array(self.code, [ids[token] for token in self.ranks])
        # tiktoken would drop text that a pattern from a file does not match
        whole = pattern if name else rf"(?:{pattern})|(?:(?!{pattern})[\s\S])+"
        regex = GPT2 if pattern == "gpt2" else whole
        # encoding never makes the special token; without any, tiktoken searches for it at each character
        special = {end: len(self.ranks)}
        self.encoding = tiktoken.Encoding(self.name, pat_str=regex, mergeable_ranks=self.ranks, special_tokens=special)

    def set_width(self):
        self.dtype, self.width, self.code = ("uint16", 2, "H") if self.n_vocab <= 65536 else ("uint32", 4, "I")
        self.end_bytes = self.eot_token.to_bytes(self.width, "little")

    def computed_name(self):
        """Return `bpe-IDS-HASH`: equal vocabularies have equal names."""
        merged_tokens = [token for token in self.ranks if len(token) > 1]
        pattern = self.pattern if merged_tokens else ""  # without merges the pattern has no effect
        ids, special = sorted(self.ids.items()), sorted(self.special.items())
        content = (ids, merged_tokens, special, self.end, pattern)
        digest = hashlib.blake2b(repr(content).encode(), digest_size=4).hexdigest()
        return SAME.get(name := f"bpe-{self.n_vocab}-{digest}", name)

    def encode_to_bytes(self, text):
        """Return ids as little-endian integers of `width` bytes. Raises ValueError for a lone surrogate."""
        if self.name == "bytes":  # the id is the byte, and UTF-16 adds a zero byte
            return text.encode().decode("latin-1").encode("utf-16-le")
        import numpy as np  # not at the top: prepare.py forks, and numpy may start threads

        ranks = self.encoding.encode_to_numpy(text, disallowed_special=())
        return np.asarray(self.id_of_rank, f"<u{self.width}")[ranks].tobytes()

    def encode_ordinary(self, text):
        return array.array(self.code, self.encode_to_bytes(text)).tolist()

    def texts(self, prompt, ids):
        """Yield the text of each of `ids` as soon as its characters are whole. prompt: the ids before."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # one character may need several tokens
        yield from (decoder.decode(self.pieces.get(i, b"")) for i in ids)
        yield decoder.decode(b"", final=True)


class FileTokenizer(Tokenizer):
    """A tokenizer.json that tiktoken can't read. begin: the id that the file puts before a document (Llama: <s>).

    Raises ValueError for a document that tokenizers would encode with the end token: Unigram has its text as a piece.
    """

    pattern = None

    def __init__(self, path):
        import tokenizers  # not at the top: only these vocabularies need it

        self.path, self.inner = path, tokenizers.Tokenizer.from_file(str(path))
        self.inner.no_padding()
        self.inner.no_truncation()
        self.inner.encode_special_tokens = True  # their text in a document is ordinary text
        special = {token.content for token in self.inner.get_added_tokens_decoder().values()}
        self.end = end_of(path, special)
        self.n_vocab, self.eot_token = max(self.inner.get_vocab().values()) + 1, self.inner.token_to_id(self.end)
        self.set_width()
        self.has_end = self.inner.encode("a").ids[-1:] == [self.eot_token]
        template = self.inner.encode("").ids  # for example <s>, and </s> if the file has an end
        self.first_ids = template[: len(template) - self.has_end]
        self.begin = [*self.first_ids, self.eot_token][0]
        content = json.loads(path.read_text("utf-8")) | {"truncation": None, "padding": None}
        content = json.dumps([content, self.end], sort_keys=True)
        self.name = f"file-{self.n_vocab}-{hashlib.blake2b(content.encode(), digest_size=4).hexdigest()}"

    def encode_to_bytes(self, text):
        text.encode()  # raises ValueError for a lone surrogate
        if len(text) > LONGEST:
            raise ValueError(f"{len(text):,} characters in a document: at most {LONGEST:,} with this vocabulary")
        ids = self.inner.encode(text).ids
        ids = ids[: len(ids) - self.has_end]  # prepare.py adds the end
        if self.eot_token in ids[len(self.first_ids) :]:  # OPT's </s> also begins a document
            raise ValueError(f"its text contains {self.end}, which this vocabulary encodes as the end of a document")
        return array.array(self.code, ids).tobytes()

    def texts(self, prompt, ids):
        known, done = [*prompt], self.inner.decode(prompt)
        for i in ids:  # a space before a word depends on the ids before
            known.append(i)
            text = self.inner.decode(known)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(done) :]
                done = text
        yield self.inner.decode(known)[len(done) :]


@functools.cache
def load_tokenizer(source):
    """source: as in the table at the top. Raises UserError."""
    if source == "bytes":
        ids = {bytes([b]): b for b in range(256)}
        return Tokenizer(ids, {ENDS[1]: 256}, ENDS[1], "gpt2", ids, "bytes")
    names = tiktoken.list_encoding_names()
    if source in names:
        return download(source)
    if not Path(source).exists():
        raise UserError(f"tokenizer={source}: no such file or folder, and no name (bytes {' '.join(names)})")
    with reading(f"tokenizer={source}: not a byte-level BPE (tokenizer.json, or vocab.json with merges.txt)"):
        try:
            return read(path := Path(source))
        except Unsupported as error:
            reason = error
    remedy = "pip install tokenizers" if find_spec("tokenizers") is None else "the package tokenizers can't read it"
    with reading(f"tokenizer={source}: tiktoken can't read it ({reason}); {remedy}", Exception):
        return FileTokenizer(path / COPY[0] if path.is_dir() else path)


def download(name):
    with reading(
        f"tokenizer={name}: tiktoken must download this vocabulary once and could not. On a machine with a network, "
        f"run TIKTOKEN_CACHE_DIR=DIR python prepare.py --tokenizer={name}. Then copy DIR here and set "
        "TIKTOKEN_CACHE_DIR to its path. Or use tokenizer=bytes, which needs no download"
    ):
        encoding = tiktoken.get_encoding(name)
    ids, pattern = encoding._mergeable_ranks, encoding._pat_str
    return Tokenizer(ids, encoding._special_tokens, ENDS[1], "gpt2" if pattern == GPT2 else pattern, ids, name)


def copied(folder, name):
    """Return the copy in a data set or checkpoint, or the tokenizer `name` if there is none."""
    return load_tokenizer(str(folder) if Path(folder, COPY[0]).is_file() else name)


# --- vocabularies in files --------------------------------------------------------------------------------------------


class Unsupported(Exception):
    """tiktoken can't read this vocabulary."""


def read(path):
    """Return the Tokenizer of a folder or file. Raises Unsupported."""
    if path.is_dir():
        files = [*path.glob(COPY[0]), *sorted(path.glob("*vocab.json")), *path.glob("encoder.json")]
        if not files and [*path.glob("tokenizer.model")]:
            remedy = "transformers writes it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            raise UserError(f"tokenizer={path}: has only tokenizer.model, without tokenizer.json; {remedy}")
        if not files:
            raise UserError(f"tokenizer={path}: a folder without tokenizer.json, vocab.json or encoder.json")
        path = files[0]
    value = json.loads(fetched(path).read_text("utf-8"))
    if path.name.endswith(("vocab.json", "encoder.json")):  # gpt2-vocab.json belongs to gpt2-merges.txt
        merges = path.name.replace("vocab.json", "merges.txt").replace("encoder.json", "vocab.bpe")
        merges = path.with_name(merges)
        with explained(f"tokenizer={path}: needs {merges}"):
            text = fetched(merges).read_text("utf-8")
        merges = [line.split(" ") for line in text.splitlines() if line and not line.startswith("#version")]
        vocab, pattern = value, "gpt2"
        merged_tokens = {*BYTE_OF, *map("".join, merges)}
        special = {text: i for text, i in vocab.items() if text not in merged_tokens}
    else:
        if (kind := value["model"].get("type", "BPE")) != "BPE":
            raise Unsupported(f"its model is {kind}")
        model, pattern = value["model"], pattern_of(value["pre_tokenizer"])
        added_tokens, post = value.get("added_tokens") or [], value.get("post_processor") or {}
        if post.get("type", "ByteLevel") != "ByteLevel" and post.get("special_tokens") != {}:
            raise Unsupported("its special tokens around a document")
        ordinary = any(not token["special"] for token in added_tokens)  # these would split ordinary text
        other = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
        if value.get("normalizer") or any(map(model.get, other)) or ordinary:
            raise Unsupported(f"a normalizer, {', '.join(other)}, or added tokens that are not special")
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        special = {token["content"]: token["id"] for token in added_tokens}
        vocab = model["vocab"] | special
    end = end_of(path, special)
    special = special | {end: vocab[end]}
    ids = {bytes_of(text): i for text, i in vocab.items() if text not in special}
    ranks = ranked([(bytes_of(first), bytes_of(second)) for first, second in merges])
    return Tokenizer(ids, special, end, pattern, ranks)


def pattern_of(pre_tokenizer):
    """pre_tokenizer: ByteLevel (GPT-2's), or a Split and then ByteLevel."""
    if pre_tokenizer is None:
        raise Unsupported("no pre-tokenizer")
    *split, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [(step["type"], step.get("behavior")) for step in (*split, last)]
    wrong = kinds not in ([("ByteLevel", None)], [("Split", "Isolated"), ("ByteLevel", None)])
    if wrong or last.get("add_prefix_space") or last.get("use_regex", True) == bool(split):
        raise Unsupported("its pre-tokenizer")
    return split[0]["pattern"]["Regex"] if split else "gpt2"


def end_of(path, special):
    """Return the token after a document: `eos_token` of Hugging Face's other file, or one of `special`."""
    with contextlib.suppress(FileNotFoundError, LookupError):
        if end := json.loads(fetched(path.with_name(COPY[1])).read_text("utf-8"))["eos_token"]:
            return end["content"] if isinstance(end, dict) else end
    if found := [end for end in ENDS if end in special]:
        return found[0]
    raise ValueError(f"it names no end of a document; set eos_token in {COPY[1]} beside it")


def bytes_of(text):
    """Return the bytes of a token in GPT-2's letters. If `text` has other letters, return its UTF-8 bytes."""
    return bytes(map(BYTE_OF.get, text)) if BYTE_OF.keys() >= {*text} else text.encode()


def text_of(token):
    return "".join(map(LETTER_OF.get, token))


def merged(token, ranks):
    """Encode the bytes of `token` with the merges before its own. Return the pieces, at least two."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks.get(token, math.inf)
    while len(parts) > 2:
        pair_ranks = [ranks.get(first + second, limit) for first, second in itertools.pairwise(parts)]
        if min(pair_ranks) >= limit:
            break
        i = pair_ranks.index(min(pair_ranks))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def ranked(merges):
    """Return the ranks of the tokens that a live merge makes, after the 256 bytes. Raises Unsupported."""
    ranks, missed = {bytes([b]): b for b in range(256)}, set()
    for rank, (first, second) in enumerate(merges, 256):
        missed |= {part for part in (first, second) if part not in ranks}
        if first + second not in ranks and merged(first + second, ranks) == [first, second]:
            ranks[first + second] = rank
    if later_tokens := missed & ranks.keys():
        raise Unsupported(f"a merge needs {text_of(min(later_tokens))!r}, which only a later merge makes")
    return ranks


def copy(tokenizer, folder):
    """Write the vocabulary into `folder` in Hugging Face's format.

    tiktoken's vocabularies except GPT-2's are not written: some have tokens that no merge makes.
    """
    if tokenizer.name.startswith("file-"):
        for name, path in zip(COPY, (tokenizer.path, tokenizer.path.with_name(COPY[1])), strict=True):
            if path.is_file():
                shutil.copyfile(path, Path(folder, name))
    if not tokenizer.name.startswith(("bpe-", "bytes", "gpt2")):
        return
    merges = [merged(token, tokenizer.ranks) for token in tokenizer.ranks if len(token) > 1]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    vocab = {text_of(token): i for token, i in tokenizer.ids.items()} | tokenizer.special
    content = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, **plain} for text, i in tokenizer.special.items()],
        "pre_tokenizer": byte_level if tokenizer.pattern == "gpt2" else steps,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [[*map(text_of, parts)] for parts in merges]},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for file, value in zip(COPY, (content, config | {"eos_token": tokenizer.end}), strict=True):
        Path(folder, file).write_text(json.dumps(value, ensure_ascii=False, indent=1), "utf-8")


# --- cut points of a long document ------------------------------------------------------------------------------------

# BPE never merges across pre-tokens, so a text may be cut between two. tiktoken's patterns look ahead only from white
# space, and never back. In GPT-2's pattern white space only begins a pre-token. In the others a newline may also follow
# punctuation, but no letter or digit.
GPT2_CUT = re.compile(r"(?s).*\S(?=[ \n])")  # up to the last space or newline that follows a non-space
OTHER_CUT = re.compile(r"(?s).*[a-zA-Z0-9](?=[ \n])")


def last_cut(text, tokenizer):
    """Return the last i with encode(text) == encode(text[:i]) + encode(text[i:]) that is easy to see, or 0."""
    if tokenizer.name == "bytes":
        return len(text)
    if tokenizer.pattern != "gpt2" and tokenizer.name.startswith(("bpe-", "file-")):
        return 0
    match = (GPT2_CUT if tokenizer.pattern == "gpt2" else OTHER_CUT).match(text)
    return match.end() if match else 0
