"""Read the vocabulary of a byte-level BPE from files, and write it as Hugging Face's `tokenizer.json`.

A vocabulary gives each token (a byte string) an id. A regular expression, the pattern, cuts a text into pre-tokens,
roughly words. A merge is a pair of tokens that may become one token. The merges are a list. Encoding a pre-token starts
from its single bytes. Of the merges that fit, the earliest in the list is applied first, and at its leftmost place.

    vocab.json, merges.txt    GPT-2, OPT, Megatron-LM's --vocab-file and --merge-file
    tokenizer.json            Hugging Face `tokenizers`: the same two, the pattern and the special tokens in one file
    NAME.tiktoken             tokens with ranks (see below); the pattern is in NAME.pattern, except for OpenAI's files

The JSON files write a byte as one printable character (`BYTE_OF`). U+2581 is not one of these characters.
SentencePiece files have it, and are refused.

tiktoken has no list of merges. It merges two neighbours if the result is a token, and the token's rank is its priority.
The two methods are equal if each token has exactly one merge that can happen. `ranked` makes sure of it:

    A merge (l, r) is alive if the earlier merges alone turn the bytes of l + r into l, r. Only live merges give ranks.

Proof: suppose that neighbours x, y appear while a text is encoded, and xy is a token with the live merge (l, r). No
merge has crossed the ends of xy. So all merges inside xy so far are the first merges of xy encoded alone. Encoded
alone, xy is in two pieces only before its last merge, and these are l, r. So x, y is l, r. A merge that is not alive
never meets its pair l, r. It produces no token, so it gives no rank.

Cost: 0.4 s for 50,000 merges, once. prepare.py's workers inherit the result.
"""

import base64
import binascii
import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from errors import UserError, parse_json, regular

FILE = "tokenizer.json"
COPY = (FILE, "tokenizer_config.json")  # files of the vocabulary's copy
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")  # ends of a document, if no file names one
# The tokenizer `bytes` has pre-tokens of up to 32 characters. It has no merges, so 32 only sets the speed (45 MB/s; 1
# gives 10 MB/s).
BYTES_PATTERN = r"[\s\S]{1,32}"
# Name: patterns with the same pre-tokens. The first is for tiktoken, the last for Hugging Face, whose regular
# expressions understand ++ and $ differently.
PATTERNS = {
    # r50k_base and the p50k encodings have GPT-2's pattern. Versions of tiktoken write it differently.
    "gpt2": (
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ),
    "cl100k_base": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
        r"\s+(?!\S)|\s",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]|"
        r"\s+(?!\S)|\s",
    ),
    # Older versions of tiktoken have this pattern as cl100k_base. It differs from the pattern above only in white space
    # at the end of a text.
    "llama3": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
        r"\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+",
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+",
    ),
    "o200k_base": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
NAME_OF = {regex: name for name, forms in PATTERNS.items() for regex in forms}
# GPT-2's letters for bytes: a printable Latin-1 byte is its own letter, the n-th other byte is the character 256 + n.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(b): b for b in PRINTABLE}
BYTE_OF |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in PRINTABLE)}
LETTER_OF = {b: c for c, b in BYTE_OF.items()}
SUPPORTED = "supported: byte-level BPE (tokenizer.json, vocab.json with merges.txt, .tiktoken)"
# sha256 of OpenAI's files, as in tiktoken: (encoding with the same pattern, id of <|endoftext|>)
OPENAI_FILES = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": ("gpt2", 50256),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": ("gpt2", 50256),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": ("cl100k_base", 100257),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": ("o200k_base", 199999),
}


class Vocabulary(NamedTuple):
    """A byte-level BPE. The ids are 0, 1, 2 ... Each is in `ids` or in `special`."""

    ids: dict[bytes, int]  # ordinary tokens, also those that encoding never produces
    ranks: dict[bytes, int]  # tokens that encoding can produce; the smallest rank is merged first
    special: dict[str, int]  # tokens that stand for no text; encoding never produces them
    end: str  # the special token at the end of a document
    pattern: str  # regular expression of pre-tokens, or the name of an encoding that has this pattern

    def name(self) -> str:
        """Return `bpe-IDS-HASH`: equal vocabularies have equal names, in whatever files they are."""
        order = [token for token in sorted(self.ranks, key=self.ranks.get) if cuts(token, self.ranks)]
        pattern = self.pattern if len(self.ranks) > 256 else ""  # without merges the pattern has no effect
        content = (sorted(self.ids.items()), order, sorted(self.special.items()), self.end, pattern)
        digest = hashlib.blake2b(repr(content).encode(), digest_size=4).hexdigest()
        return f"bpe-{len(self.ids) + len(self.special)}-{digest}"


# --- which files ------------------------------------------------------------------------------------------------------


def read(path: str) -> Vocabulary:
    """Return the vocabulary in the folder or file `path`. Raises UserError with the file and the reason."""
    files = find(Path(path))
    try:
        if files[0].suffix == ".tiktoken":
            return read_tiktoken(files[0])
        if len(files) == 2:
            return read_vocab_and_merges(*files)
        return read_tokenizer_json(files[0])
    except OSError as error:
        raise UserError(f"tokenizer={error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"tokenizer={files[0]}: not what it should be ({error!r}); the file is damaged") from None


def find(path: Path) -> list[Path]:
    """Return [tokenizer.json], [vocab.json, merges.txt] or [NAME.tiktoken] of a folder or of one of these files."""
    if not path.exists():
        raise UserError(f"tokenizer={path}: no such file or folder")
    name, folder = path.name, path if path.is_dir() else path.parent
    if path.is_file():
        if name.endswith(".tiktoken"):
            return [path]
        for one, other in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
            for have, lack in ((one, other), (other, one)):
                if name.endswith(have):  # gpt2-vocab.json belongs to gpt2-merges.txt
                    pair = {have: path, lack: path.with_name(name.removesuffix(have) + lack)}
                    if not pair[lack].is_file():
                        raise UserError(f"tokenizer={path}: needs the file {pair[lack].name} beside it")
                    return [pair[one], pair[other]]
        if path.suffix == ".json":
            return [path]
        raise UserError(f"tokenizer={path}: {unsupported(path)}; {SUPPORTED}")
    if (folder / FILE).is_file():
        return [folder / FILE]
    for pattern in ("*vocab.json", "encoder.json", "*merges.txt", "vocab.bpe", "*.tiktoken"):
        if found := sorted(folder.glob(pattern)):
            if len(found) > 1:
                raise UserError(f"tokenizer={path}: {found[0].name} or {found[1].name}? Name one of these files")
            return find(found[0])
    for pattern in ("*.model", "vocab.txt"):
        for file in sorted(folder.glob(pattern)):
            raise UserError(f"tokenizer={file}: {unsupported(file)}; {SUPPORTED}")
    raise UserError(f"tokenizer={path}: the folder has no vocabulary; {SUPPORTED}")


def unsupported(path: Path) -> str:
    kinds = {".model": "a SentencePiece model is not supported", ".txt": "a WordPiece vocabulary is not supported"}
    return kinds.get(path.suffix, "not a vocabulary")


def load_json(path: Path) -> dict:
    try:
        value = parse_json(regular(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"tokenizer={path}: not JSON ({error}); the file is damaged") from None
    if not isinstance(value, dict):
        raise UserError(f"tokenizer={path}: contains no JSON object; the file is damaged")
    return value


# --- the three kinds of files -----------------------------------------------------------------------------------------


def read_vocab_and_merges(vocab_path: Path, merges_path: Path) -> Vocabulary:
    """Read GPT-2's two files. A token is special if no merge makes it, for example <|endoftext|>, or <pad> of OPT."""
    vocab = check_ids(load_json(vocab_path), vocab_path)
    try:
        lines = regular(merges_path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"tokenizer={merges_path}: not UTF-8; the file is damaged") from None
    merges = []
    for number, line in enumerate(lines, 1):
        pair = line.rstrip("\r").split(" ")
        if pair == [""] or line.startswith("#version"):
            continue
        if len(pair) != 2 or not all(pair):
            raise UserError(f"tokenizer={merges_path}: line {number} is not a pair of tokens: {line[:40]!r}")
        merges.append(pair)
    made = {*BYTE_OF, *map("".join, merges)}
    special = {text: i for text, i in vocab.items() if text not in made}
    return assemble(vocab, merges, special, "gpt2", merges_path, vocab_path.parent)


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Read a file of Hugging Face `tokenizers`. Refuse all that does not encode plain bytes with BPE."""
    value = load_json(path)
    model = value.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise UserError(f"tokenizer={path}: not a tokenizer.json of Hugging Face (no model with a vocab); {SUPPORTED}")
    if model.get("type", "BPE") != "BPE":
        raise UserError(f"tokenizer={path}: its model is {model['type']}, which is not supported; {SUPPORTED}")
    if not isinstance(model.get("merges"), list):
        raise UserError(f"tokenizer={path}: its BPE has no merges; {SUPPORTED}")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise UserError(f"tokenizer={path}: {key}={model[key]!r} is not byte-level BPE; {SUPPORTED}")
    if normalizer := value.get("normalizer"):
        kind = normalizer.get("type", "?")
        raise UserError(f"tokenizer={path}: its normalizer ({kind}) would change the text")
    pattern = pattern_of(value.get("pre_tokenizer"), path)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    for number, pair in enumerate(merges, 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(part and isinstance(part, str) for part in pair):
            raise UserError(f"tokenizer={path}: merge {number} is not a pair of tokens; the file is damaged")
    special = {}
    for token in value.get("added_tokens") or []:
        text = token["content"]
        if not token.get("special") and not (text.startswith("<") and text.endswith(">")):
            raise UserError(f"tokenizer={path}: the added token {text!r} is not special: it would split ordinary text")
        special[text] = token["id"]
    vocab = check_ids({**model["vocab"], **special}, path)
    return assemble(vocab, merges, special, pattern, path, path.parent, model.get("ignore_merges", False))


def pattern_of(pre_tokenizer: dict | None, path: Path) -> str:
    """Return the pattern of a pre-tokenizer: ByteLevel, or a Split by a regular expression and then ByteLevel."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {"type": "no pre-tokenizer"}])
    kinds = [step.get("type") for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise UserError(f"tokenizer={path}: its pre-tokenizer ({', '.join(kinds)}) is not byte-level; {SUPPORTED}")
    if steps[-1].get("add_prefix_space"):
        raise UserError(f"tokenizer={path}: add_prefix_space=true would add a space to each text")
    if steps[-1].get("use_regex", True) != (kinds == ["ByteLevel"]):
        raise UserError(f"tokenizer={path}: its ByteLevel has use_regex={len(kinds) == 2}, which is not supported")
    if len(kinds) == 1:
        return "gpt2"
    regex, way = steps[0].get("pattern", {}).get("Regex"), (steps[0].get("behavior"), steps[0].get("invert", False))
    if not regex or way not in (("Isolated", False), ("Removed", True)):
        raise UserError(f"tokenizer={path}: its Split does not cut by a regular expression; {SUPPORTED}")
    if regex not in NAME_OF and way[1]:
        raise UserError(f"tokenizer={path}: its Split would remove text that does not match {regex}")
    return NAME_OF.get(regex, regex)


def read_tiktoken(path: Path) -> Vocabulary:
    """Read a .tiktoken file. Each line has a token in base64 and its rank, which is also its id.

    The file has neither a pattern nor special tokens. OpenAI's files are known by their sha256. For any other file,
    NAME.pattern beside it must have one line: gpt2, cl100k_base, o200k_base or a regular expression. <|endoftext|>
    gets the smallest free id.
    """
    data, ids = regular(path).read_bytes(), {}
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            if line.strip():
                token, rank = line.split()
                ids[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"tokenizer={path}: line {number} is not a token in base64 and its rank") from None
    pattern, end = OPENAI_FILES.get(hashlib.sha256(data).hexdigest(), (None, None))
    given = path.with_suffix(".pattern")
    if pattern is None and not given.is_file():
        known = "gpt2, cl100k_base, o200k_base or a regular expression"
        raise UserError(f"tokenizer={path}: has no pattern; write it into {given} as one line: {known}")
    if pattern is None:
        pattern, end = given.read_text(encoding="utf-8").rstrip("\r\n"), min({*range(len(ids) + 1)} - {*ids.values()})
        pattern = NAME_OF.get(pattern, pattern)
    texts = {text_of(token): i for token, i in ids.items()}
    special = {"<|endoftext|>": end}
    if OPENAI_FILES.get(hashlib.sha256(data).hexdigest()):
        special |= unused(ids, special)
    check_ids(texts | special, path)
    check_bytes(ids, path)
    return Vocabulary(ids, ids, special, "<|endoftext|>", pattern)


def unused(ids: dict[bytes, int], special: dict[str, int]) -> dict[str, int]:
    """Return a special token for each id that has no token: cl100k_base has 16 such ids."""
    used = {*ids.values(), *special.values()}
    return {f"<|unused_{i}|>": i for i in range(max(used)) if i not in used}


# --- checks -----------------------------------------------------------------------------------------------------------


def check_ids(vocab: dict[str, int], path: Path) -> dict[str, int]:
    """Return `vocab` if its ids are 0, 1, 2 ... without gaps and without repetition."""
    wrong = next((text for text, i in vocab.items() if type(i) is not int), None)
    if wrong is not None or not vocab:
        raise UserError(f"tokenizer={path}: the id of {wrong!r} is not an integer; the file is damaged")
    present = set(vocab.values())
    if present != set(range(len(vocab))):
        lack = next((i for i in range(len(vocab)) if i not in present), None)
        why = f"{len(vocab):,} tokens, but none has the id {lack}: ids have gaps or occur twice"
        raise UserError(f"tokenizer={path}: {why}")
    return vocab


def check_bytes(ids, path: Path):
    lack = [b for b in range(256) if bytes([b]) not in ids]
    if lack:
        why = f"{len(lack)} of the 256 single bytes have no token (the first is 0x{lack[0]:02x})"
        raise UserError(f"tokenizer={path}: {why}, so some texts can't be encoded; {SUPPORTED}")


def assemble(vocab, merges, special, pattern, path: Path, folder: Path, ignore_merges=False) -> Vocabulary:
    """Turn the texts of tokens into bytes and the merges into ranks. path: the file with the merges, for errors."""
    end = named_end(folder) or next((text for text in ENDS if text in special), None)
    special = special | ({end: vocab[end]} if end in vocab else {})
    ids = {bytes_of(text): i for text, i in vocab.items() if text not in special}
    if any("\u2581" in text for text in vocab if text not in special):
        raise UserError(f"tokenizer={path}: spaces are U+2581, as SentencePiece writes them; {SUPPORTED}")
    check_bytes(ids, path)
    if len(ids) + len(special) != len(vocab):
        raise UserError(f"tokenizer={path}: two tokens have the same bytes; the file is damaged")
    pairs = [(bytes_of(left), bytes_of(right)) for left, right in merges]
    for number, pair in enumerate(pairs, 1):
        if not {*pair, b"".join(pair)} <= ids.keys():
            raise UserError(f"tokenizer={path}: merge {number} {merges[number - 1]} has a token without an id")
    ranks = (ranked_whole if ignore_merges else ranked)(ids, pairs, path)
    if end not in special:
        named = f"{end!r}, the eos_token, has no id" if end else f"none of {' '.join(ENDS)}"
        raise UserError(f"tokenizer={path}: no token for the end of a document ({named})")
    return Vocabulary(ids, ranks, special, end, pattern)


def named_end(folder: Path) -> str | None:
    """Return the `eos_token` in Hugging Face's other files of the folder, or None."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            token = load_json(folder / name).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token:
                return token
    return None


def bytes_of(text: str) -> bytes:
    """Return the bytes of a token in GPT-2's letters. If `text` has other letters, return its UTF-8 bytes."""
    try:
        return bytes(BYTE_OF[c] for c in text)
    except KeyError:
        return text.encode("utf-8", "surrogatepass")


def text_of(token: bytes) -> str:
    return "".join(map(LETTER_OF.__getitem__, token))


# --- merges and ranks -------------------------------------------------------------------------------------------------


def cuts(token: bytes, known) -> list[tuple[bytes, bytes]]:
    """Return the ways to cut a token into two known tokens."""
    return [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in known and token[i:] in known]


def merged(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Encode the bytes of `token`, which has no rank itself, with BPE. Stop at two pieces."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(parts[i] + parts[i + 1], 1 << 40) for i in range(len(parts) - 1)]
        if (best := min(found)) == 1 << 40:
            break
        i = found.index(best)  # the leftmost
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def ranked(ids, merges: list[tuple[bytes, bytes]], path: Path) -> dict[bytes, int]:
    """Return the ranks of the tokens that a live merge makes (see above), after the 256 bytes."""
    ranks, missed = {bytes([b]): b for b in range(256)}, {}
    for number, (left, right) in enumerate(merges):
        if left not in ranks or right not in ranks:
            missed |= {part: number for part in (left, right) if part not in ranks}
        elif left + right not in ranks and merged(left + right, ranks) == [left, right]:
            ranks[left + right] = 256 + number
    if late := [(number, part) for part, number in missed.items() if part in ranks]:
        number, part = min(late)
        raise UserError(f"tokenizer={path}: merge {number + 1} needs {text_of(part)!r}, which only a later merge makes")
    return ranks


def ranked_whole(ids, merges, path: Path) -> dict[bytes, int]:
    """Return the ranks if ignore_merges is set: a pre-token that is a token needs no merges. tiktoken does the same.

    The merges must give tiktoken's tokens. For each token, its first merge must be alive, or its
    merges must be all its cuts into two tokens, adjacent in the list.
    """
    places = {}
    for number, (left, right) in enumerate(merges):
        places.setdefault(left + right, []).append(number)
    ranks = {bytes([b]): b for b in range(256)}
    for token in sorted((token for token in ids if len(token) > 1), key=lambda t: places.get(t, [len(merges)])):
        mine = places.get(token, [])
        alive = mine and merged(token, ranks) == [*merges[mine[0]]]
        whole = {merges[i] for i in mine} == {*cuts(token, ids)} and (not mine or mine[-1] - mine[0] + 1 == len(mine))
        if not alive and not whole:
            raise UserError(f"tokenizer={path}: tiktoken would make the token {text_of(token)!r} by other merges")
        ranks[token] = 256 + (mine[0] if mine else len(merges) + ids[token])
    return ranks


# --- the copy ---------------------------------------------------------------------------------------------------------


def merges_of(ranks: dict[bytes, int]) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Return merges that give these ranks, and True if some token needs Hugging Face's ignore_merges.

    Only tiktoken's vocabularies have such a token: the merges before it leave more than two pieces. Such a token gets a
    merge for each way to cut it into two tokens.
    """
    merges, lower, whole = [], {}, False
    for token in sorted(ranks, key=ranks.get):
        if len(token) > 1:
            parts = merged(token, lower)
            merges += cuts(token, ranks) if len(parts) > 2 else [tuple(parts)]
            whole |= len(parts) > 2
        lower[token] = ranks[token]
    return merges, whole


def to_json(v: Vocabulary) -> dict:
    """Return the content of a tokenizer.json with the same tokens."""
    merges, whole = merges_of(v.ranks)
    special = dict(sorted(v.special.items(), key=lambda item: item[1]))
    vocab = {text_of(token): i for token, i in v.ids.items()} | special
    unset = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    regex = PATTERNS[v.pattern][-1] if v.pattern in PATTERNS else v.pattern
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]}
    model = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": whole}
    model |= {"vocab": dict(sorted(vocab.items(), key=lambda item: item[1]))}
    model |= {"merges": [[text_of(left), text_of(right)] for left, right in merges]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **unset, "special": True} for text, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level if v.pattern in ("gpt2", BYTES_PATTERN) else pre_tokenizer,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", **model},
    }


def write(v: Vocabulary, folder: str):
    """Write the files COPY into `folder`. After a crash, each is complete or missing."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": v.end, "clean_up_tokenization_spaces": False}
    for name, value in zip(COPY, (to_json(v), config), strict=True):
        path = os.path.join(folder, name)
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".part", path)
