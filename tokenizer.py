"""Load tokenizers, and find the cut points of a long text: a cut there does not change the tokens.

A pattern splits the text into pre-tokens, roughly words. Inside each pre-token, byte-pair encoding (BPE) merges bytes
into longer and longer known pieces. tiktoken does both. `gpt2` is the tokenizer of GPT-2. `bytes` has the 256 byte
values and no merges, so it needs no download and gives a small vocabulary for a model on a laptop. Any byte-level BPE
can come from files (`vocabulary.py`).

tiktoken's ids are the ranks, the order of the merges. Some vocabularies have other ids: OPT sorts them by frequency.
Then a table maps rank to id: 2 ns per token, while tiktoken needs about 600 ns. Tokens are uint16 up to 65,536 ids,
otherwise uint32.

A data set and a checkpoint have a copy of the vocabulary in tokenizer.json, except for `bytes`. The tokenizer's name
identifies the vocabulary. It does not depend on the path of the files.
"""

import contextlib
import difflib
import functools
import os
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import tiktoken

import vocabulary
from errors import UserError, parse_json
from vocabulary import BYTES_PATTERN, NAME_OF, PATTERNS, Vocabulary

ENDOFTEXT = "<|endoftext|>"
GPT2_NAME = "bpe-50257-17721001"  # `Vocabulary.name` of GPT-2's vocabulary and of `bytes`
BYTES_NAME = "bpe-257-f8e6bff0"


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary and the tiktoken.Encoding that encodes with it."""

    name: str  # `bytes`, a name of tiktoken, or `Vocabulary.name`: in meta.json and in a checkpoint's index.json
    vocabulary: Vocabulary
    encoding: tiktoken.Encoding  # its ids are ranks
    table: tuple[int, ...] | None = None  # the id of each rank; None: they are equal

    @property
    def pattern(self) -> str:
        return self.encoding._pat_str

    @functools.cached_property
    def n_vocab(self) -> int:
        """The number of ids, special tokens included."""
        return len(self.vocabulary.ids) + len(self.vocabulary.special)

    @property
    def end(self) -> str:
        return self.vocabulary.end

    @property
    def eot_token(self) -> int:
        return self.vocabulary.special[self.vocabulary.end]

    @property
    def special(self) -> dict[str, int]:
        return self.vocabulary.special

    @property
    def dtype(self) -> str:
        return "uint16" if self.n_vocab <= 65536 else "uint32"

    @functools.cached_property
    def pieces(self) -> dict[int, bytes]:
        """The bytes of each id. A special token has the bytes of its name."""
        special = {i: text.encode("utf-8", "surrogatepass") for text, i in self.vocabulary.special.items()}
        return {i: token for token, i in self.vocabulary.ids.items()} | special

    @functools.cached_property
    def array(self):
        """`table` as a numpy array, [ranks] uint16 or uint32."""
        import numpy as np  # not at the top: see prepare.START_METHOD

        return np.array(self.table, self.dtype)

    def encode(self, text: str):
        """Return the ids of `text`, [n] uint16 or uint32, without a Python integer for each id.

        The text of a special token in `text` has no special meaning.
        """
        ranks = self.encoding.encode_to_numpy(text, disallowed_special=())
        return self.array[ranks] if self.table else ranks.astype(self.dtype)

    def encode_ordinary(self, text: str) -> list[int]:
        ranks = self.encoding.encode_ordinary(text)
        return [self.table[rank] for rank in ranks] if self.table else ranks

    def decode(self, ids) -> str:
        return b"".join(map(self.decode_single_token_bytes, ids)).decode("utf-8", "replace")

    def decode_single_token_bytes(self, i: int) -> bytes:
        return self.pieces[i]


@functools.cache
def load_tokenizer(source: str) -> Tokenizer:
    """Return the tokenizer `source`: `bytes`, a name of tiktoken, or a folder or file of a vocabulary.

    Raises UserError for an unknown name, for files that are missing, damaged or not supported, or if tiktoken can't
    download the vocabulary.
    """
    if source == "bytes":
        ids = {bytes([i]): i for i in range(256)}
        return build("bytes", Vocabulary(ids, ids, {ENDOFTEXT: 256}, ENDOFTEXT, BYTES_PATTERN))
    names = ["bytes", *tiktoken.list_encoding_names()]
    if source in names:
        return download(source)
    path = Path(source)
    if path.exists() or path.suffix in (".json", ".txt", ".tiktoken", ".bpe", ".model") or os.sep in source:
        return build_from_files(path)
    near = (difflib.get_close_matches(source, names, n=1, cutoff=0.4) or ["gpt2"])[0]
    raise UserError(
        f"tokenizer={source}: no such tokenizer and no such file; did you mean {near}? (bytes, gpt2, r50k_base ..., or "
        "a folder or file of a vocabulary)"
    )


def download(name: str) -> Tokenizer:
    """Return tiktoken's encoding `name`."""
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a broken download is a ValueError
        raise UserError(
            f"tokenizer={name}: tiktoken must download this vocabulary once and could not ({type(error).__name__}). "
            f"On a machine with a network, run TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; "
            f'tiktoken.get_encoding("{name}")\'. Then copy DIR here and set TIKTOKEN_CACHE_DIR to its path. '
            f"Or use tokenizer=bytes, which needs no download"
        ) from None
    special = encoding._special_tokens
    if ENDOFTEXT not in special:
        raise UserError(f"tokenizer={name}: has no {ENDOFTEXT} for the end of a document; use gpt2 or bytes")
    ids, pattern = encoding._mergeable_ranks, NAME_OF.get(encoding._pat_str, encoding._pat_str)
    special = special | vocabulary.unused(ids, special)
    return Tokenizer(name, Vocabulary(ids, ids, special, ENDOFTEXT, pattern), encoding)


def build_from_files(path: Path) -> Tokenizer:
    """Return the tokenizer of a folder or file. Its name is in the folder's meta.json or index.json, or is computed."""
    found = vocabulary.read(str(path))
    name = found.name()
    if name == BYTES_NAME:
        return load_tokenizer("bytes")
    for file in ("meta.json", "index.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = parse_json((path / file).read_text(encoding="utf-8"))["tokenizer"]
            if said.startswith("bpe-") and said != name:
                what = f"{file} names {said}, but {vocabulary.FILE} has {name}"
                raise UserError(f"tokenizer={path}: {what}; the file is replaced or damaged")
            return build(said, found, path)
    return build("gpt2" if name == GPT2_NAME else name, found, path)


def build(name: str, v: Vocabulary, path="") -> Tokenizer:
    """Return the tokenizer of a vocabulary. If the ids are in the order of the ranks, no table is needed."""
    order = sorted(v.ranks, key=v.ranks.get)
    ids = [v.ids[token] for token in order]
    long = [i for i, token in zip(ids, order, strict=True) if len(token) > 1]
    equal = long == sorted(long)
    ranks = {token: v.ids[token] if equal else rank for rank, token in enumerate(order)}
    regex = PATTERNS[v.pattern][0] if v.pattern in PATTERNS else v.pattern
    if v.pattern not in PATTERNS and v.pattern != BYTES_PATTERN:  # tiktoken drops text that the pattern does not match
        regex = rf"(?:{regex})|(?:(?!{regex})[\s\S])+"  # Hugging Face keeps such text as a piece of its own
    try:
        encoding = tiktoken.Encoding(name, pat_str=regex, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        raise UserError(f"tokenizer={path}: tiktoken can't use its pattern: {str(error).splitlines()[0]}") from None
    return Tokenizer(name, v, encoding, None if equal else tuple(ids))


def copy(tokenizer: Tokenizer, folder):
    """Write the vocabulary into `folder`, in Hugging Face's format: the files vocabulary.COPY."""
    vocabulary.write(tokenizer.vocabulary, folder)


def copied(folder, name: str) -> Tokenizer:
    """Return the tokenizer of a data set or checkpoint: its copy, or the tokenizer `name` if it has no copy."""
    return load_tokenizer(str(folder) if (Path(folder) / vocabulary.FILE).is_file() else name)


# --- cut points of a long document ------------------------------------------------------------------------------------

WHITE_SPACE = set("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


@functools.lru_cache(1 << 16)
def character_class(c: str) -> str | None:
    """Return the class of `c` in the patterns ("space", "L" letter, "N" number, "other"), or None if uncertain.

    Python and tiktoken may use different versions of Unicode. The class is certain if it is the same in Unicode 3.2 and
    in this Python's version. Bytes that are not UTF-8 give None (surrogates represent them in `c`).
    """
    if c in WHITE_SPACE:
        return "space"
    category = unicodedata.category(c)[0]
    if category in "CZ" or category != unicodedata.ucd_3_2_0.category(c)[0]:
        return None
    return category if category in "LN" else "other"


def cut_points(text: str, pattern: str):
    """Yield the cut points i of a text: encode(text) == encode(text[:i]) + encode(text[i:]).

    If the text is part of a longer text, these are also cut points of the longer text. A pattern that is not listed in
    vocabulary.PATTERNS has no cut points.

    BPE never merges across pre-tokens. So i is a cut point if no pre-token contains both neighbours of i, and if the
    cut changes no other pre-token. The pre-tokens after i do not change, because no pattern looks back.
    """
    kind = NAME_OF.get(pattern)
    if pattern == BYTES_PATTERN:  # between any two complete characters
        yield from (i for i in range(1, len(text)) if not ("\udc80" <= text[i] <= "\udcff"))
    elif kind == "gpt2":
        yield from cut_points_gpt2(text)
    elif kind:
        yield from cut_points_cl100k(text, kind == "o200k_base")


def cut_points_gpt2(text: str):
    """Yield the cut points of GPT-2's pattern

        's 't 're 've 'm 'll 'd | ?letters | ?numbers | ?others | whitespace before whitespace or end | whitespace

    where ? is one optional space. A pre-token certainly begins in two cases:
    1. i is between a non-space character and a character of another class. An apostrophe and a letter are an exception,
       because one pre-token can contain them.
    2. i is before the last of several whitespace characters, and a non-space character follows. This last whitespace
       is either the optional space of the next pre-token or a pre-token of its own.
    The cut does not change the pre-tokens before i, because the pattern looks ahead only from whitespace, and only for
    more whitespace. In case 1, i does not follow whitespace. In case 2 all whitespace before i is one pre-token, with
    or without the cut.
    """
    kinds = [*map(character_class, text), None]
    for i in range(1, len(text)):
        before, here, after = kinds[i - 1], kinds[i], kinds[i + 1]
        if before == here == "space" and after not in ("space", None):
            yield i
        elif before and here and before not in (here, "space") and not (text[i - 1] == "'" and here == "L"):
            yield i


def cut_points_cl100k(text: str, o200k: bool):
    r"""Yield the cut points of cl100k_base's pattern and its relatives (PATTERNS). Its pre-tokens are

        's 't 're 've 'm 'll 'd | ?letters | 1 to 3 numbers | ?others newlines | spaces newlines | whitespace

    where ?letters may begin with any character except a newline or a number, and ?others with a space. A pre-token
    certainly begins in three cases:
    1. i follows a letter or a number, and another class begins. In o200k_base, a letter before ' or before a
       mark (\p{M}) is an exception, because a word may contain ' and marks.
    2. i follows a character of the class "other", and a number or whitespace other than a newline begins.
    3. i follows a newline, and a non-space character begins. In o200k_base, / is an exception, because one pre-token
       can contain a newline and then /.
    The cut does not change the pre-tokens before i, because a pattern looks ahead only from whitespace. In case 3 the
    whitespace before i ends in a newline. With or without the cut, its first newlines may belong to ?others, and the
    rest is one pre-token.
    """
    kinds = [*map(character_class, text)]
    for i in range(1, len(text)):
        before, here, c = kinds[i - 1], kinds[i], text[i]
        if not before or not here or before == here:
            continue
        if before in "LN":
            if not (o200k and before == "L" and here == "other" and (c == "'" or unicodedata.category(c)[0] == "M")):
                yield i
        elif before == "other":
            if here == "N" or (here == "space" and c not in "\r\n"):
                yield i
        elif text[i - 1] in "\r\n" and not (o200k and c == "/"):
            yield i


def size(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def last_cut(data: bytes, pattern: str) -> int:
    """Return the last cut point of `data`, or 0. First try the last 64 bytes, which nearly always have one."""
    for window in (64, 4096, len(data)):
        start = max(0, len(data) - window)
        text = data[start:].decode("utf-8", "surrogateescape")
        if points := list(cut_points(text, pattern)):
            return start + size(text[: points[-1]])
    return 0


def first_cut(data: bytes, pattern: str) -> int:
    """Return the first cut point of `data`, or 0."""
    text = data.decode("utf-8", "surrogateescape")
    return size(text[: next(cut_points(text, pattern), 0)])
