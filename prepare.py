"""Text to tokens on disk: `DIR/{train,val,test}.bin` and `DIR/meta.json`.

    python prepare.py --tokenizer=bytes             # the standard library's sources -> data/stdlib_bytes
    python prepare.py corpus/ --tokenizer=gpt2      # a folder of text               -> data/corpus_gpt2
    python prepare.py 'shards/*.jsonl.gz' --out=data/web --text_key=content

A `.bin` file is nothing but uint16 numbers, little-endian, one per token, so that data.py can map it into memory.
A document is one text file or one JSON line. It is encoded as ordinary text (a literal "<|endoftext|>" in it is eleven
characters like any others) and closed by the end-of-text token; an empty one is that token alone. Which split it goes
to is a hash of its running number. A byte-order mark at the start of a file is dropped, blank JSON lines are no
documents, line ends stay as they are.

    this process                        one process per core              this process
    read, cut into blocks  --256 KiB--> decode, parse, encode --uint16--> append in the order of the input

Encoding is all the work: one core reads and cuts a gigabyte per second, and encodes ten megabytes. So the reader
touches bytes only, and at most a few blocks per worker are on their way at a time: memory does not depend on the size
of the input, and the output does not depend on the number of workers.

The one subtle thing is to cut a long document where the encoding does not notice; see `cut_points`. And the one thing
for a week-long run: after a crash the same command reads the blocks that were done once more, which is a hundred times
faster than encoding them, drops them, and goes on.
"""

import argparse
import bz2
import codecs
import contextlib
import difflib
import functools
import glob
import gzip
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
import unicodedata
import zlib
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import tiktoken
from tqdm import tqdm

from errors import UserError, exit_on_user_error

SPLITS = ("train", "val", "test")
KINDS = (".txt", ".md", ".py", ".jsonl")
PACKINGS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

PIECE = 256 << 10  # bytes of text that a worker encodes at a time
MAX_RUN = 1 << 20  # bytes without a boundary; the encoder needs more than linear time for such a run
MAX_LINE = 64 << 20  # bytes of one JSON line, which has to be parsed in one go


# ---- Tokenizers ------------------------------------------------------------------------------------------------

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
TOO_LARGE = {
    "cl100k_base": 100277,
    "o200k_base": 200019,
    "o200k_harmony": 201088,
}  # refused before any download


@functools.cache
def load_tokenizer(name: str) -> tiktoken.Encoding:
    """The encoding called `name`: `bytes`, or one of tiktoken's whose ids fit in uint16.

    Its end-of-text id is `.eot_token`. Raises UserError for an unknown name, a vocabulary over 65,536, and where
    tiktoken has to fetch the vocabulary and can't.
    """
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding(
            "bytes", pat_str=BYTES_PATTERN, mergeable_ranks=ranks, special_tokens={ENDOFTEXT: 256}
        )
    names = ["bytes", *tiktoken.list_encoding_names()]
    if name not in names:
        near = (difflib.get_close_matches(name, names, n=1, cutoff=0.4) or ["gpt2"])[0]
        raise UserError(
            f"--tokenizer={name}: no such tokenizer, did you mean {near}? (bytes, gpt2, r50k_base ...)"
        )
    try:
        vocab_size = TOO_LARGE.get(name) or (encoding := tiktoken.get_encoding(name)).n_vocab
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a broken download is a ValueError
        raise UserError(
            f"--tokenizer={name}: tiktoken has to fetch this vocabulary once and could not ({type(error).__name__}). "
            f"Where there is network, run TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; "
            f'tiktoken.get_encoding("{name}")\'; then copy DIR here and set TIKTOKEN_CACHE_DIR to it. '
            f"Or use --tokenizer=bytes, which needs no vocabulary"
        ) from None
    if vocab_size > 65536:
        raise UserError(
            f"--tokenizer={name}: {vocab_size:,} ids do not fit in uint16 (65,536): gpt2 or bytes would do"
        )
    if ENDOFTEXT not in encoding.special_tokens_set:
        raise UserError(
            f"--tokenizer={name}: has no {ENDOFTEXT} to close a document with: gpt2 or bytes would do"
        )
    return encoding


# ---- Where a long document may be cut ----------------------------------------------------------------------------

WHITE_SPACE = set("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {
    chr(c) for c in range(0x2000, 0x200B)
}


@functools.cache
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

    where ? is one optional space. No pre-token holds a character that is no space followed by one of another class,
    but for the apostrophe and its letters. And of a run of whitespace before a word the last one starts afresh: it is
    the optional space, or a pre-token by itself. The pattern never looks back, so what follows i is not changed by
    the cut; it looks ahead only from whitespace, to see whether more follows, so what precedes i isn't either: it ends in
    no whitespace, or in a run of which all stays together with or without the cut.
    """
    if pattern == BYTES_PATTERN:  # anywhere between two whole characters
        yield from (i for i in range(1, len(text)) if not ("\udc80" <= text[i] <= "\udcff"))
    elif pattern in GPT2_PATTERNS:
        kinds = [character_class(c) for c in text]
        for i in range(1, len(text)):
            before, here = kinds[i - 1], kinds[i]
            if before == here == "space":
                if i + 1 < len(text) and kinds[i + 1] not in ("space", None):
                    yield i
            elif before and here and before != here and before != "space":
                if not (text[i - 1] == "'" and here == "L"):
                    yield i


def find_cut(data: bytes, pattern: str) -> int:
    """Where to cut `data`: at the last boundary of its first PIECE bytes, else at the first one up to MAX_RUN; or 0.

    A piece longer than PIECE is therefore one run and nothing else. (That matters: tiktoken panics on a million
    spaces *followed by a word*.)
    """

    def size(text):
        return len(text.encode("utf-8", "surrogateescape"))

    for window in (64, 4096, PIECE):
        start = max(0, PIECE - window)
        text = data[start:PIECE].decode("utf-8", "surrogateescape")
        if points := list(cut_points(text, pattern)):
            return start + size(text[: points[-1]])
    text = data[: MAX_RUN + 8].decode("utf-8", "surrogateescape")  # 8: two characters to look ahead at
    cut = size(text[: next(cut_points(text, pattern), 0)])
    return cut if cut <= MAX_RUN else 0


# ---- What to read ------------------------------------------------------------------------------------------------


class BadInput(Exception):
    """A document that can't be read: where it is, and the reason it is counted under."""

    def __init__(self, where: str, reason: str, detail: str = ""):
        super().__init__(f"{where}: {reason}{detail and f' ({detail})'}")
        self.reason = reason


def find_files(inputs: list[str]) -> list[str]:
    """The files that `inputs` name, each once: in the order given, a folder's in the order of their names."""
    if not inputs:
        stdlib = sysconfig.get_paths()["stdlib"]
        return [
            path
            for path in walk(stdlib, leave_out=("site-packages", "dist-packages"))
            if path.endswith(".py")
        ]
    found = {}
    for name in inputs:
        if os.path.isfile(name):
            here = [name]  # whatever its suffix: who names a file wants it read, or hears why it can't be
        else:
            here = []
            for match in [name] if os.path.isdir(name) else sorted(glob.glob(name, recursive=True)):
                here += walk(match) if os.path.isdir(match) else [match] if is_text(match) else []
        if not here and not glob.has_magic(name) and not os.path.exists(name):
            raise UserError(f"input {name}: no such file or folder")
        if not here:
            raise UserError(
                f"input {name}: no file there ends in {' '.join(KINDS)} (nor one of these and {' '.join(PACKINGS)})"
            )
        for path in here:
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def walk(folder: str, leave_out=()):
    """Yields the text files below `folder`, sorted; hidden ones and __pycache__ left out."""

    def stop(error):
        raise UserError(f"input folder {error.filename}: {error.strerror}")

    for here, folders, names in os.walk(folder, onerror=stop):
        folders[:] = sorted(f for f in folders if f[0] != "." and f != "__pycache__" and f not in leave_out)
        yield from (os.path.join(here, name) for name in sorted(names) if name[0] != "." and is_text(name))


def split_suffixes(path: str) -> tuple[str, str, str]:
    """'a/b.v2.jsonl.gz' -> ('a/b.v2', '.jsonl', '.gz')"""
    stem, packing = os.path.splitext(path)
    if packing not in PACKINGS:
        stem, packing = path, ""
    stem, kind = os.path.splitext(stem)
    return stem, kind, packing


def is_text(path: str) -> bool:
    return split_suffixes(path)[1] in KINDS


# ---- Reading: files to blocks, bytes only ------------------------------------------------------------------------


class Part(NamedTuple):
    """Some bytes of one file: a whole text, a piece of a long one, or some whole JSON lines."""

    path: str
    file: int  # number of the file
    start: int = 1  # line on which the (first) document starts: with `file`, its position
    line: int = 1  # line on which the data starts
    data: bytes = b""
    json_lines: bool = False
    begins: bool = True  # False: the document began in an earlier part
    ends: bool = True  # False: it goes on in a later one
    problem: BadInput | None = None  # in place of data
    used: int = 0  # bytes of the file (compressed, where it is) that were read for it


def read_blocks(files: list[str], text_key: str, pattern: str):
    """Yields lists of Parts, in order: short documents together, about PIECE bytes of them; pieces of a long one alone."""
    block, size = [], 0
    for number, path in enumerate(files):
        for part in read_parts(path, number, text_key, pattern):
            whole = part.begins and part.ends
            if block and (not whole or size + len(part.data) > PIECE):
                yield block
                block, size = [], 0
            block.append(part)
            size += len(part.data)
            if not whole:
                yield block
                block, size = [], 0
    if block:
        yield block


def read_parts(path: str, number: int, text_key: str, pattern: str):
    """Yields the Parts of one file. What can't be read is a Part too, so that it is reported in its turn."""
    part, used = None, 0
    try:
        _, kind, packing = split_suffixes(path)
        if kind not in KINDS:
            raise BadInput(
                path, "unknown kind of file", f"known: {' '.join(KINDS)}, each also {' '.join(PACKINGS)}"
            )
        with open(path, "rb") as raw, PACKINGS.get(packing, contextlib.nullcontext)(raw) as stream:
            if stream.peek(3).startswith(codecs.BOM_UTF8):
                stream.read(3)
            empty = Part(path, number)
            parts = (
                json_parts(stream, empty, text_key, pattern)
                if kind == ".jsonl"
                else text_parts(stream, empty, pattern)
            )
            for part in parts:
                yield part._replace(used=raw.tell() - used)
                used = raw.tell()
        return
    except BadInput as error:
        problem = error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        problem = BadInput(path, "unreadable", getattr(error, "strerror", None) or str(error))
    yield Part(path, number, begins=part is None or part.ends, problem=problem)


def text_parts(stream, part: Part, pattern: str):
    """Yields `part` with the bytes of `stream`, in pieces where they are many; holds little more than MAX_RUN at a time."""
    data = stream.read(MAX_RUN + 8)
    while len(data) > PIECE:
        cut = find_cut(data, pattern)
        if not cut and len(data) <= MAX_RUN:
            break  # the rest is one run
        if not cut:
            decode(
                data, part.path, part.line, final=False
            )  # perhaps nothing is a boundary because nothing is text
            raise BadInput(f"{part.path}:{part.line}", "more than 1 MiB without a boundary to cut at")
        yield part._replace(data=data[:cut], ends=False)
        part = part._replace(begins=False, line=part.line + data.count(b"\n", 0, cut))
        data = data[cut:] + stream.read(cut)
    yield part._replace(data=data)


def json_parts(stream, part: Part, text_key: str, pattern: str):
    """Yields whole JSON lines, about PIECE bytes of them at a time; a longer line is parsed here, its text cut in pieces."""
    while data := stream.read(PIECE):
        if not data.endswith(b"\n"):
            data += stream.readline(MAX_LINE + 2)
        last = data.rfind(b"\n", 0, len(data) - 1) + 1  # where the last line starts
        if len(data) - last <= PIECE:
            last = len(data)
        if last:
            part = part._replace(data=data[:last], json_lines=True)
            yield part
            line = part.start + data.count(b"\n", 0, last)
            part = part._replace(start=line, line=line, data=b"", json_lines=False)
        if last < len(data):
            data = data[last:]
            yield from long_line_parts(data, part, text_key, pattern)
            while data and not data.endswith(b"\n"):  # a line over MAX_LINE: to its end
                data = stream.readline(PIECE)
            part = part._replace(start=part.start + 1, line=part.start + 1)


def long_line_parts(data: bytes, part: Part, text_key: str, pattern: str):
    """Yields the text of one JSON line in pieces, or the problem that it has."""
    where, piece = f"{part.path}:{part.start}", None
    try:
        if len(data.rstrip(b"\r\n")) > MAX_LINE:
            raise BadInput(where, "a JSON line over 64 MiB")
        text = json_text(data, where, text_key).encode()
        for piece in text_parts(io.BytesIO(text), part, pattern):
            yield piece
    except BadInput as error:
        yield part._replace(begins=piece is None or piece.ends, problem=BadInput(where, error.reason))


# ---- Encoding: blocks to tokens, in the workers ------------------------------------------------------------------


class Job(NamedTuple):
    """What a worker has to know."""

    tokenizer: str
    text_key: str
    split: tuple[float, ...]


class Encoded(NamedTuple):
    """What a worker makes of a block; lists of three go by SPLITS."""

    tokens: list[bytes]
    documents: list[int]
    skipped: Counter  # reason -> count
    examples: list[str]  # the first of these in words


def encode_block(job: Job, block: list[Part]) -> Encoded:
    encoding = load_tokenizer(job.tokenizer)
    endoftext = encoding.eot_token.to_bytes(2, "little")
    tokens, documents, skipped, examples = [[], [], []], [0, 0, 0], Counter(), []
    for part in block:
        for i, data in enumerate(part.data.split(b"\n") if part.json_lines else [part.data]):
            if part.json_lines and not data.strip():
                continue
            try:
                text = document_text(part, part.line + i, data, job.text_key)
            except BadInput as problem:
                skipped[problem.reason] += 1
                examples += [str(problem)] if len(examples) < 3 else []
                continue
            split = split_of(part.file, part.start + i, job.split)
            # The same ids as encode_ordinary's, without a Python integer for each. No text is special: disallowed=().
            tokens[split].append(
                encoding.encode_to_numpy(text, disallowed_special=()).astype("<u2").tobytes()
            )
            if part.ends:
                tokens[split].append(endoftext)
                documents[split] += 1
    return Encoded([b"".join(pieces) for pieces in tokens], documents, skipped, examples)


def document_text(part: Part, line: int, data: bytes, text_key: str) -> str:
    if part.problem:
        raise part.problem
    if part.json_lines:
        return json_text(data, f"{part.path}:{line}", text_key)
    return decode(data, part.path, line)


def json_text(data: bytes, where: str, text_key: str) -> str:
    """The text that a JSON line holds under `text_key`."""
    try:
        value = json.loads(decode(data, *where.rsplit(":", 1)))
    except json.JSONDecodeError as error:
        raise BadInput(where, "not JSON", f"{error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits, 5,000 brackets
        raise BadInput(where, "not JSON that Python reads", str(error)) from None
    if not isinstance(value, dict):
        raise BadInput(where, "not a JSON object", f"but {type(value).__name__}")
    if text_key not in value:
        raise BadInput(
            where, f"no key '{text_key}'", f"it has {', '.join(value)[:80] or 'none'}; see --text_key"
        )
    text = value[text_key]
    if not isinstance(text, str):
        raise BadInput(where, f"'{text_key}' is no string", f"but {type(text).__name__}")
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is no character
        raise BadInput(where, "not Unicode", f"a lone surrogate at character {error.start + 1}") from None
    return text


def decode(data: bytes, path: str, line: int | str, final: bool = True) -> str:
    """Strict UTF-8. The error counts lines from `line`; final=False forgives a character that is cut off at the end."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final)
    except UnicodeDecodeError as error:
        line = int(line) + data.count(b"\n", 0, error.start)
        raise BadInput(
            f"{path}:{line}", "not UTF-8", f"byte 0x{data[error.start]:02x}: {error.reason}"
        ) from None


def split_of(file: int, line: int, weights) -> int:
    """Which split (0 train, 1 val, 2 test) the document goes to that starts on this line of this file."""
    digest = hashlib.blake2b(f"{file}:{line}".encode(), digest_size=8).digest()
    point = int.from_bytes(digest, "little") / 2**64 * sum(weights)
    return 0 if point < weights[0] else 1 if point < weights[0] + weights[1] or not weights[2] else 2


def start_worker():
    """A worker leaves signals to the parent, and dies with it, however the parent died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def follow():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def encoded_blocks(job: Job, blocks, workers: int):
    """Yields (block, Encoded) in the order of `blocks`, encoded by `workers` processes with a few blocks each at hand."""
    # fork shares the vocabulary and starts at once (this process has no threads yet); macOS needs spawn
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=start_worker)
    pending = deque()
    try:
        for block in blocks:
            pending.append((block, pool.submit(encode_block, job, block)))
            if len(pending) > 4 * workers:
                block, future = pending.popleft()
                yield block, future.result()
        for block, future in pending:
            yield block, future.result()
    except BrokenProcessPool:
        raise UserError(
            f"a worker was killed, perhaps for lack of memory: the same command goes on where it was, "
            f"a smaller --workers than {workers} needs less"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


# ---- Writing: in order, and nothing half-written under a final name ------------------------------------------------


@dataclass
class Progress:
    """How far the .part files are whole. Saved every few seconds, so that a run that was killed can go on."""

    made_from: dict  # what the output depends on; another command must not go on with these files
    blocks: int = 0  # done
    tokens: list[int] = field(default_factory=lambda: [0, 0, 0])
    documents: list[int] = field(default_factory=lambda: [0, 0, 0])
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    whole: list[int] = field(
        default_factory=lambda: [0, 0, 0]
    )  # tokens before the long document that is being written
    dropping: bool = False  # that document turned out bad: the rest of it is left out


class Output:
    """The three files that grow in `folder`, and the Progress beside them."""

    def __init__(self, folder: str, made_from: dict):
        self.folder = folder
        self.progress = self.load_progress(made_from)
        self.files = [open(path + ".part", "ab", buffering=0) for path in self.paths()]  # noqa: SIM115
        self.truncate(self.progress.tokens)
        self.saved_at = time.monotonic()

    def paths(self):
        return [os.path.join(self.folder, f"{split}.bin") for split in SPLITS]

    def load_progress(self, made_from: dict) -> Progress:
        """What an earlier run of the same command has done; nothing where there was none or its files are not whole."""
        try:
            with open(self.journal(), encoding="utf-8") as file:
                progress = Progress(**json.load(file))
        except (OSError, ValueError, TypeError):
            return Progress(made_from)
        for path in self.paths():  # killed between the renames of finish(): take them back
            if os.path.exists(path) and not os.path.exists(path + ".part"):
                os.rename(path, path + ".part")
        sizes = [
            os.path.getsize(path + ".part") if os.path.exists(path + ".part") else 0 for path in self.paths()
        ]
        if progress.made_from != made_from or any(
            s < 2 * n for s, n in zip(sizes, progress.tokens, strict=True)
        ):
            print(f"{self.folder}: what an earlier run left unfinished does not fit, starting over")
            return Progress(made_from)
        if progress.blocks:
            print(f"{self.folder}: going on after {sum(progress.tokens):,} tokens")
        return progress

    def journal(self):
        return os.path.join(self.folder, "progress.json")
