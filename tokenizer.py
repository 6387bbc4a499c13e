"""Tokenizers: text to ids and back.

    bytes        the 256 byte values and an end of text; needs no download
    gpt2 ...     the names that tiktoken knows; it downloads the vocabulary once
    PATH         a vocabulary in files, read by the package `tokenizers`: tokenizer.json (Hugging Face), or vocab.json
                 with merges.txt (GPT-2, OPT), which OpenAI calls encoder.json and vocab.bpe

A vocabulary gives each token (a byte string) an id. A regular expression, the pattern, cuts a text into pre-tokens,
roughly words. A merge is a pair of tokens that may become one token. Byte-pair encoding (BPE) starts from the single
bytes of a pre-token. Of the merges that fit, the earliest in the list is applied first, at its leftmost place.
"""

import array
import codecs
import contextlib
import functools
import hashlib
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import tiktoken

from errors import UserError, explained, fetched, reading

COPY = ("tokenizer.json", "tokenizer_config.json")
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
LONGEST = 1 << 24  # characters of a document for `tokenizers`, which encodes it whole, with about 100 bytes for each
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")  # if no file names the end of a document
SAME = {"bpe-50257-17721001": "gpt2", "bpe-257-f8e6bff0": "bytes"}
# GPT-2's pattern. Hugging Face calls it ByteLevel.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# GPT-2's letters: one for each byte.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(b): b for b in PRINTABLE}
BYTE_OF |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in PRINTABLE)}
# BPE never merges across pre-tokens, so a text may be cut between two. tiktoken's patterns look ahead only from white
# space, and never back. In GPT-2's pattern white space only begins a pre-token. In the others a newline may also follow
# punctuation, but no letter or digit.
GPT2_CUT = re.compile(r"(?s).*\S(?=[ \n])")  # up to the last space or newline that follows a non-space
OTHER_CUT = re.compile(r"(?s).*[a-zA-Z0-9](?=[ \n])")


@contextlib.contextmanager
def panics():
    """Turn a panic of a package in Rust, which is no Exception, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"a panic: {error}") from None


class Tokenizer:
    """A vocabulary of tiktoken. end: the special token after a document; begin: the id before it.

    name: in meta.json and in a checkpoint's index.json. cut: matches a text up to a place where a cut changes no token.
    unknown: how many tokens so far were the one for unknown characters, whose text is unk (None: the vocabulary writes
    every text). lossy: the vocabulary leaves out characters that it does not have. drops_space: white space or line
    ends, too.
    """

    unknown, unk, lossy, drops_space = 0, None, False, False

    def __init__(self, encoding):
        self.encoding, self.name, self.end = encoding, encoding.name, ENDS[1]
        self.cut = GPT2_CUT if encoding._pat_str == GPT2 else OTHER_CUT
        special = encoding._special_tokens
        self.pieces = {i: token for token, i in encoding._mergeable_ranks.items()}
        self.pieces |= {i: text.encode() for text, i in special.items()}
        self.set_ids(encoding.n_vocab, special[self.end])
        self.begin = self.eot_token

    def set_ids(self, n_vocab, eot_token):
        self.n_vocab, self.eot_token = n_vocab, eot_token
        self.dtype, self.width, self.code = ("uint16", 2, "H") if n_vocab <= 65536 else ("uint32", 4, "I")
        self.end_bytes = eot_token.to_bytes(self.width, "little")

    @panics()
    def encode_to_bytes(self, text):
        """Return ids as little-endian integers of `width` bytes. Raises ValueError for a lone surrogate."""
        if self.name == "bytes":  # the id is the byte, and UTF-16 adds a zero byte
            return text.encode().decode("latin-1").encode("utf-16-le")
        ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        return ids.astype(f"<u{self.width}").tobytes()

    def encode_ordinary(self, text):
        return array.array(self.code, self.encode_to_bytes(text)).tolist()

    def texts(self, prompt, ids):
        """Yield the text of each of `ids` as soon as its characters are whole. prompt: the ids before."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # one character may need several tokens
        yield from (decoder.decode(self.pieces.get(i, b"")) for i in ids)
        yield decoder.decode(b"", final=True)


class FileTokenizer(Tokenizer):
    """A vocabulary in files. begin: the id that they put before a document (Llama: <s>).

    Raises ValueError for a document that `tokenizers` would encode with the end token.
    """

    def __init__(self, path):
        """Read the files. Replace the pieces of Unigram that a document must not have."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # prepare.py has a process for each core
        import tokenizers  # not at the top: only these vocabularies need it

        self.content, self.config = read(path)
        self.inner = inner = tokenizers.Tokenizer.from_str(self.content)
        vocab = inner.get_vocab()
        if (largest := max(vocab.values())) >= 1 << 24:  # `to_str` would count up to it
            raise ValueError(f"it has the id {largest:,}; should be below 2^24")
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True  # their text in a document is ordinary text
        value = json.loads(inner.to_str())
        model, special = value["model"], {token["content"] for token in value["added_tokens"] if token["special"]}
        self.end = end_of(self.config, special)
        if self.end not in vocab:
            raise ValueError(f"its eos_token {self.end} is not in the vocabulary")
        self.set_ids(largest + 1, vocab[self.end])
        self.unk = model.get("unk_token")
        if model.get("unk_id") is not None:
            self.unk, _ = model["vocab"][model["unk_id"]]
        self.unk_id = vocab.get(self.unk)
        self.lossy = may_lose(value)
        pattern = pattern_of(value)
        self.cut = GPT2_CUT if pattern == "gpt2" else None
        self.name = self.computed_name(value, pattern)
        if pattern:  # a file that someone trained may lack it
            inner.decoder = tokenizers.decoders.ByteLevel()
        if model["type"] == "BPE":
            inner.model.dropout = None  # otherwise a text has other tokens each time
        if model["type"] == "Unigram":  # it would find the texts of special tokens in a document
            rows = [("" if text in {*special, self.end, self.unk} else text, score) for text, score in model["vocab"]]
            inner.model = tokenizers.models.Unigram(rows, model["unk_id"], model["byte_fallback"])
        self.has_end = inner.encode("a").ids[-1:] == [self.eot_token]
        self.drops_space = len({str(inner.encode(f"a{space}b").ids) for space in ("", " ", "  ", "\n")}) < 4
        template = inner.encode("").ids  # for example <s>, and </s> if the file has an end
        self.first_ids = template[: len(template) - self.has_end]
        self.begin = [*self.first_ids, self.eot_token][0]

    def computed_name(self, value, pattern):
        """Return `bpe-IDS-HASH` of a byte-level BPE, else `file-IDS-HASH`.

        Equal vocabularies have equal names. Never change it: data sets and checkpoints have these names.
        """
        if pattern:
            model, special = value["model"], {token["content"]: token["id"] for token in value["added_tokens"]}
            special[self.end] = self.eot_token
            ids = sorted((bytes_of(text), i) for text, i in model["vocab"].items() if text not in special)
            merged_tokens = [bytes_of(text) for text in dict.fromkeys(map("".join, model["merges"]))]
            # without merges the pattern has no effect
            content = repr((ids, merged_tokens, sorted(special.items()), self.end, pattern if merged_tokens else ""))
        else:
            content = json.loads(self.content) | {"truncation": None, "padding": None}
            content = json.dumps([content, self.end], sort_keys=True)
        digest = hashlib.blake2b(content.encode(), digest_size=4).hexdigest()
        name = f"{'bpe' if pattern else 'file'}-{self.n_vocab}-{digest}"
        return SAME.get(name, name)

    @panics()
    def encode_to_bytes(self, text):
        text.encode()  # raises ValueError for a lone surrogate
        if len(text) > LONGEST:
            remedy = "divide it, for example into JSON lines"
            raise ValueError(f"more than {LONGEST:,} characters in a document with this vocabulary; {remedy}")
        (encoded,) = self.inner.encode_batch_fast([text])
        ids = encoded.ids
        ids = ids[: len(ids) - self.has_end]  # prepare.py adds the end
        if self.eot_token in ids[len(self.first_ids) :]:  # OPT's </s> also begins a document
            raise ValueError(f"its text contains {self.end}, which this vocabulary encodes as the end of a document")
        self.unknown += ids.count(self.unk_id)
        return array.array(self.code, ids).tobytes()

    def texts(self, prompt, ids):
        before, new = [*prompt], []  # a space before a word depends on the ids before
        for i in ids:
            new.append(i)
            done, text = self.inner.decode(before), self.inner.decode(before + new)
            if len(text) > len(done) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(done) :]
                before, new = new, []
        yield self.inner.decode(before + new)[len(self.inner.decode(before)) :]


@functools.cache
def load_tokenizer(source):
    """source: as in the table at the top. Raises UserError."""
    if source == "bytes":
        ids = {bytes([b]): b for b in range(256)}
        return Tokenizer(tiktoken.Encoding(source, pat_str=GPT2, mergeable_ranks=ids, special_tokens={ENDS[1]: 256}))
    names = tiktoken.list_encoding_names()
    if source in names:
        with reading(
            f"tokenizer={source}: tiktoken must download this vocabulary once and could not. On a machine with a "
            f"network, run TIKTOKEN_CACHE_DIR=DIR python prepare.py --tokenizer={source}. Then copy DIR here and set "
            "TIKTOKEN_CACHE_DIR to its path. Or use tokenizer=bytes, which needs no download"
        ):
            return Tokenizer(tiktoken.get_encoding(source))
    if not Path(source).exists():
        raise UserError(f"tokenizer={source}: no such file or folder, and no name (bytes {' '.join(names)})")
    if find_spec("tokenizers") is None:
        raise UserError(f"tokenizer={source}: needs a package: pip install tokenizers")
    with reading(f"tokenizer={source}", Exception), panics():
        return FileTokenizer(Path(source))


def last_cut(text, tokenizer):
    """Return the last i with encode(text) == encode(text[:i]) + encode(text[i:]) that is easy to see, or 0."""
    if tokenizer.name == "bytes":
        return len(text)
    match = tokenizer.cut and tokenizer.cut.match(text)
    return match.end() if match else 0


# --- vocabularies in files --------------------------------------------------------------------------------------------


def copy(tokenizer, folder):
    """Write a vocabulary of files into `folder` in Hugging Face's format. A name needs no copy."""
    if isinstance(tokenizer, FileTokenizer):
        config = json.dumps(tokenizer.config | {"eos_token": tokenizer.end}, ensure_ascii=False, indent=1)
        for name, text in zip(COPY, (tokenizer.content, config), strict=True):
            Path(folder, name).write_text(text, "utf-8", newline="")


def copied(folder, name):
    """Return the copy in a data set or checkpoint, or None. Raises UserError if it is not the vocabulary `name`."""
    if Path(folder, COPY[0]).is_file():
        tokenizer = load_tokenizer(str(folder))
        if tokenizer.name != name:
            raise UserError(f"{folder}/{COPY[0]}: is the vocabulary {tokenizer.name}; should be {name}")
        return tokenizer


def read(path):
    """Return the content of tokenizer.json, and the values in tokenizer_config.json and special_tokens_map.json."""
    if path.is_dir():
        files = [*path.glob(COPY[0]), *sorted(path.glob("*vocab.json")), *path.glob("encoder.json")]
        if not files:
            remedy = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
            why = f"a folder without {COPY[0]}, vocab.json or encoder.json"
            raise UserError(f"tokenizer={path}: {why} (from a tokenizer.model, {remedy} writes it)")
        path = files[0]
    content, config = fetched(path).read_text("utf-8-sig"), {**PLAIN}
    for name in ("special_tokens_map.json", COPY[1]):
        with contextlib.suppress(FileNotFoundError):
            found = json.loads(fetched(path.with_name(name)).read_text("utf-8-sig"))
            config |= {key: value for key, value in found.items() if value is not None}
    if path.name.endswith(("vocab.json", "encoder.json")):
        content = joined(path, json.loads(content))
        config |= PLAIN
    return content, config


def joined(path, vocab):
    """Return a tokenizer.json with GPT-2's pattern, the vocabulary of `path`, and the merges in the file beside it."""
    import tokenizers

    # gpt2-vocab.json belongs to gpt2-merges.txt
    merges = path.with_name(path.name.replace("vocab.json", "merges.txt").replace("encoder.json", "vocab.bpe"))
    with explained(f"tokenizer={path}: needs {merges}"):
        lines = fetched(merges).read_text("utf-8-sig").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    ordinary = {*BYTE_OF, *map("".join, merges)}
    inner.add_special_tokens([text for text in vocab if text not in ordinary])
    return inner.to_str()


def end_of(config, special):
    """Return the token after a document: `eos_token` of Hugging Face's other files, or one of `special`."""
    if end := config.get("eos_token"):
        return end["content"] if isinstance(end, dict) else end
    if found := [end for end in ENDS if end in special]:
        return found[0]
    raise ValueError(f"it names no end of a document; set eos_token in {COPY[1]} beside it")


def pattern_of(value):
    """Return the pattern ("gpt2": GPT-2's) of a tokenizer.json that is a byte-level BPE and no more, otherwise None."""
    model, post = value["model"], value["post_processor"] or BYTE_LEVEL
    other = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    more = value["normalizer"] or any(map(model.get, other)) or not all(t["special"] for t in value["added_tokens"])
    if model["type"] != "BPE" or more or (post["type"] != "ByteLevel" and post.get("special_tokens") != {}):
        return None
    steps = value["pre_tokenizer"] or {}
    steps = [step | {"trim_offsets": True} for step in steps.get("pretokenizers", [steps])]
    if steps == [BYTE_LEVEL]:
        return "gpt2"
    if steps[1:] == [BYTE_LEVEL | {"use_regex": False}] and steps[0].get("behavior") == "Isolated":
        return steps[0].get("pattern", {}).get("Regex")
    return None


def may_lose(value):
    """Return whether the BPE of a tokenizer.json leaves out characters that it does not have."""
    model = value["model"]
    if model["type"] != "BPE" or model["unk_token"]:  # others need a token for unknown characters
        return False
    letters = BYTE_OF if "'ByteLevel'" in f"{value['pre_tokenizer']} {value['normalizer']}" else {}
    letters = letters or {f"<0x{b:02X}>" for b in range(256 if model["byte_fallback"] else 0)}
    around = model["continuing_subword_prefix"] or model["end_of_word_suffix"]
    return not letters or around or not {*letters} <= model["vocab"].keys()


def bytes_of(text):
    """Return the bytes of a token in GPT-2's letters. If `text` has other letters, return its UTF-8 bytes."""
    return bytes(map(BYTE_OF.get, text)) if BYTE_OF.keys() >= {*text} else text.encode()
