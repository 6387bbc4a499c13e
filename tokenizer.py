"""Load tokenizers, and find the cut points of a long text: a cut there does not change the tokens.

A tokenizer is a `tiktoken.Encoding`. A pattern splits the text into pre-tokens, roughly words. Inside each pre-token,
byte-pair encoding (BPE) merges bytes into longer and longer known pieces. `gpt2` is the tokenizer of GPT-2. `bytes` has
the 256 byte values and no merges, so it needs no download and gives a small vocabulary for a model on a laptop. Token
ids must fit in uint16.
"""

import difflib
import functools
import unicodedata

import tiktoken

from errors import UserError

ENDOFTEXT = "<|endoftext|>"
# A pre-token is up to 32 characters. Bytes never merge, so 32 only sets the speed (45 MB/s; with 1: 10 MB/s).
BYTES_PATTERN = r"[\s\S]{1,32}"
# GPT-2's pattern, as different versions of tiktoken write it. r50k_base and the p50k encodings have the same pattern.
GPT2_PATTERNS = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
TOO_LARGE = {"cl100k_base": 100277, "o200k_base": 200019, "o200k_harmony": 201088}  # known without a download


@functools.cache
def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the encoding `name`: `bytes`, or an encoding of tiktoken if its ids fit in uint16.

    Its end-of-text id is `.eot_token`. Raises UserError for an unknown name, for more than 65,536 ids, or if tiktoken
    can't download the vocabulary.
    """
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=BYTES_PATTERN, mergeable_ranks=ranks, special_tokens={ENDOFTEXT: 256})
    names = ["bytes", *tiktoken.list_encoding_names()]
    if name not in names:
        near = (difflib.get_close_matches(name, names, n=1, cutoff=0.4) or ["gpt2"])[0]
        raise UserError(f"tokenizer={name}: no such tokenizer; did you mean {near}? (bytes, gpt2, r50k_base ...)")
    try:
        vocab_size = TOO_LARGE.get(name) or (encoding := tiktoken.get_encoding(name)).n_vocab
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a broken download is a ValueError
        raise UserError(
            f"tokenizer={name}: tiktoken must download this vocabulary once and could not ({type(error).__name__}). "
            f"On a machine with a network, run TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; "
            f'tiktoken.get_encoding("{name}")\'. Then copy DIR here and set TIKTOKEN_CACHE_DIR to its path. '
            f"Or use tokenizer=bytes, which needs no download"
        ) from None
    if vocab_size > 65536:
        raise UserError(f"tokenizer={name}: {vocab_size:,} ids do not fit in uint16 (65,536); use gpt2 or bytes")
    if ENDOFTEXT not in encoding.special_tokens_set:
        raise UserError(f"tokenizer={name}: has no {ENDOFTEXT} for the end of a document; use gpt2 or bytes")
    return encoding


# --- cut points of a long document ------------------------------------------------------------------------------------

WHITE_SPACE = set("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


@functools.lru_cache(1 << 16)
def character_class(c: str) -> str | None:
    """Return the class of `c` in GPT-2's pattern ("space", "L" letter, "N" number, "other"), or None if uncertain.

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

    If the text is part of a longer text, these are also cut points of the longer text.

    BPE never merges across pre-tokens. So i can be a cut point only if a pre-token of the uncut text begins at i.
    GPT-2's pattern is

        's 't 're 've 'm 'll 'd | ?letters | ?numbers | ?others | whitespace before whitespace or end | whitespace

    where ? is one optional space. A pre-token certainly begins in two cases:
    1. i is between a non-space character and a character of another class. An apostrophe and a letter are an exception,
       because one pre-token can contain them.
    2. i is before the last of several whitespace characters, and a non-space character follows. This last one is either
       the optional space of the next pre-token or a pre-token of its own.
    The cut does not change the pre-tokens after i, because the pattern never looks back. It does not change
    the pre-tokens before i, because the pattern looks ahead only from whitespace, and only for more whitespace. In case
    1, i does not follow whitespace. In case 2 all whitespace before i is one pre-token, with or without the cut.
    """
    if pattern == BYTES_PATTERN:  # between any two complete characters
        yield from (i for i in range(1, len(text)) if not ("\udc80" <= text[i] <= "\udcff"))
    elif pattern in GPT2_PATTERNS:
        kinds = [*map(character_class, text), None]
        for i in range(1, len(text)):
            before, here, after = kinds[i - 1], kinds[i], kinds[i + 1]
            if before == here == "space" and after not in ("space", None):
                yield i
            elif before and here and before not in (here, "space") and not (text[i - 1] == "'" and here == "L"):
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
