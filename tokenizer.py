"""The tokenizers, and where a long text may be cut so that they do not notice.

A tokenizer is a `tiktoken.Encoding`: a pattern cuts the text into pre-tokens (words, roughly), and within each
byte-pair encoding merges bytes into ever longer known pieces. `gpt2` is GPT-2's; `bytes` has the 256 byte values and
no merges, so that there is nothing to download and a laptop's model has a small vocabulary. Token ids must fit in
uint16.
"""

import difflib
import functools
import unicodedata

import tiktoken

from errors import UserError

ENDOFTEXT = "<|endoftext|>"
# Any 32 characters make a pre-token: no two bytes ever merge, so the length only sets the speed (1: 10 MB/s, 32: 45).
BYTES_PATTERN = r"[\s\S]{1,32}"
# GPT-2's pattern as tiktoken has spelled it over the years; r50k_base and the p50k family share it.
GPT2_PATTERNS = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
TOO_LARGE = {"cl100k_base": 100277, "o200k_base": 200019, "o200k_harmony": 201088}  # no need to fetch them to know


@functools.cache
def load_tokenizer(name: str) -> tiktoken.Encoding:
    """The encoding called `name`: `bytes`, or one of tiktoken's whose ids fit in uint16.

    Its end-of-text id is `.eot_token`. Raises UserError for an unknown name, a vocabulary over 65,536, and where
    tiktoken has to fetch the vocabulary and can't.
    """
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=BYTES_PATTERN, mergeable_ranks=ranks, special_tokens={ENDOFTEXT: 256})
    names = ["bytes", *tiktoken.list_encoding_names()]
    if name not in names:
        near = (difflib.get_close_matches(name, names, n=1, cutoff=0.4) or ["gpt2"])[0]
        raise UserError(f"tokenizer={name}: no such tokenizer, did you mean {near}? (bytes, gpt2, r50k_base ...)")
    try:
        vocab_size = TOO_LARGE.get(name) or (encoding := tiktoken.get_encoding(name)).n_vocab
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a broken download is a ValueError
        raise UserError(
            f"tokenizer={name}: tiktoken has to fetch this vocabulary once and could not ({type(error).__name__}). "
            f"Where there is network, run TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; "
            f'tiktoken.get_encoding("{name}")\'; then copy DIR here and set TIKTOKEN_CACHE_DIR to it. '
            f"Or use tokenizer=bytes, which needs no vocabulary"
        ) from None
    if vocab_size > 65536:
        raise UserError(f"tokenizer={name}: {vocab_size:,} ids do not fit in uint16 (65,536): gpt2 or bytes would do")
    if ENDOFTEXT not in encoding.special_tokens_set:
        raise UserError(f"tokenizer={name}: has no {ENDOFTEXT} to close a document with: gpt2 or bytes would do")
    return encoding


# --- where a long document may be cut ---------------------------------------------------------------------------------

WHITE_SPACE = set("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


@functools.lru_cache(1 << 16)
def character_class(c: str) -> str | None:
    """What GPT-2's pattern takes `c` for: "space", "L"etter, "N"umber or "other"; None where it is better not to know.

    Python and tiktoken may hold different Unicode versions, so only what has been the same from version 3.2 to this
    Python's counts (and no bytes that are not UTF-8, which arrive here as surrogates).
    """
    if c in WHITE_SPACE:
        return "space"
    category = unicodedata.category(c)[0]
    if category in "CZ" or category != unicodedata.ucd_3_2_0.category(c)[0]:
        return None
    return category if category in "LN" else "other"


def cut_points(text: str, pattern: str):
    """Yields the i at which encode(text) == encode(text[:i]) + encode(text[i:]), whatever comes before and after text.

    BPE never merges across pre-tokens, so i must be where the pre-tokenizer cuts anyway. GPT-2's pattern is

        's 't 're 've 'm 'll 'd | ?letters | ?numbers | ?others | whitespace before whitespace | whitespace

    where ? is one optional space. Two places are sure:
    1. Between a character that is no space and one of another class: no pre-token holds the two, but for an apostrophe
       and its letters.
    2. Before the last of several spaces that a word follows: it starts afresh, as the word's optional space or alone.
    What follows i is unchanged by the cut, for the pattern never looks back. What precedes i is unchanged, for the
    pattern looks ahead only from spaces, for more of them: before 1 there are none, and before 2 all stay together.
    """
    if pattern == BYTES_PATTERN:  # anywhere between two whole characters
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
    """The last place where `data` may be cut, 0 if there is none. Nearly always the last few characters show one."""
    for window in (64, 4096, len(data)):
        start = max(0, len(data) - window)
        text = data[start:].decode("utf-8", "surrogateescape")
        if points := list(cut_points(text, pattern)):
            return start + size(text[: points[-1]])
    return 0


def first_cut(data: bytes, pattern: str) -> int:
    text = data.decode("utf-8", "surrogateescape")
    return size(text[: next(cut_points(text, pattern), 0)])
