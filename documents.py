"""Documents on disk: which files there are, and their bytes in blocks that can be encoded one by one.

A document is one text file (.txt .md .py) or one line of a .jsonl file; each file may be packed (.gz .bz2 .xz) and is
then streamed, never unpacked whole. A block is some short documents together, or one piece of a long one, cut where
the tokenizer does not notice (`tokenizer.cut_points`). So whatever the input, only some blocks are in memory at a
time.

What can't be read is a `BadInput` with file, line and reason, in the place where the document would have been.
"""

import bz2
import codecs
import contextlib
import glob
import gzip
import io
import json
import lzma
import os
import sysconfig
import zlib
from typing import NamedTuple

from errors import UserError
from tokenizer import first_cut, last_cut

KINDS = (".txt", ".md", ".py", ".jsonl")
PACKINGS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
KNOWN = f"{' '.join(KINDS)}, each also {' '.join(PACKINGS)}"  # in words

PIECE = 512 << 10  # bytes of text that a worker encodes at a time
MAX_RUN = 1 << 20  # bytes without a boundary; the encoder needs more than linear time for such a run
MAX_LINE = 64 << 20  # bytes of one JSON line, which has to be parsed in one go


# --- what to read ---------------------------------------------------------------------------------------------------


class BadInput(Exception):
    """A document that can't be read: where it is, and the reason it is counted under."""

    def __init__(self, where: str, reason: str, detail: str = ""):
        super().__init__(where, reason, detail)  # as they came, so that it can be pickled
        self.reason = reason

    def __str__(self):
        where, reason, detail = self.args
        return f"{where}: {reason}" + (f" ({detail})" if detail else "")


def find_files(inputs: list[str]) -> list[str]:
    """The files that `inputs` name, each once: in the order given, a folder's in the order of their names."""
    if not inputs:
        stdlib = sysconfig.get_paths()["stdlib"]
        return [path for path in walk(stdlib, leave_out=("site-packages", "dist-packages")) if path.endswith(".py")]
    found = {}
    for name in inputs:
        is_file = os.path.isfile(name)  # whatever its suffix: who names it wants it read, or hears why it can't be
        here = []
        for match in [name] if is_file or os.path.isdir(name) else sorted(glob.glob(name, recursive=True)):
            here += walk(match) if os.path.isdir(match) else [match] if is_file or is_text(match) else []
        if not here and not glob.has_magic(name) and not os.path.exists(name):
            raise UserError(f"input {name}: no such file or folder")
        if not here:
            suffixes = f"{' '.join(KINDS)} (nor one of these and {' '.join(PACKINGS)})"
            raise UserError(f"input {name}: no file there ends in {suffixes}")
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
    packing = os.path.splitext(path)[1]
    if packing not in PACKINGS:
        packing = ""
    return *os.path.splitext(path.removesuffix(packing)), packing


def is_text(path: str) -> bool:
    return split_suffixes(path)[1] in KINDS


# --- files to blocks, bytes only ------------------------------------------------------------------------------------


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
    """Yields lists of Parts, in order: short documents together, PIECE bytes or less; pieces of a long one alone."""
    block, size = [], 0
    for number, path in enumerate(files):
        for part in read_parts(path, number, text_key, pattern):
            takes = len(part.data) if part.begins and part.ends else PIECE + 1  # a piece fills a block
            if block and size + takes > PIECE:
                yield block
                block, size = [], 0
            block.append(part)
            size += takes
    if block:
        yield block


def read_parts(path: str, number: int, text_key: str, pattern: str):
    """Yields the Parts of one file. What can't be read is a Part too, so that it is reported in its turn."""
    part, used = None, 0
    try:
        _, kind, packing = split_suffixes(path)
        if kind not in KINDS:
            raise BadInput(path, "unknown kind of file", f"known: {KNOWN}")
        with open(path, "rb") as raw, PACKINGS.get(packing, contextlib.nullcontext)(raw) as stream:
            if stream.peek(3).startswith(codecs.BOM_UTF8):
                stream.read(3)
            empty = Part(path, number)
            lines = kind == ".jsonl"
            for part in json_parts(stream, empty, text_key, pattern) if lines else text_parts(stream, empty, pattern):
                yield part._replace(used=raw.tell() - used)
                used = raw.tell()
        return
    except BadInput as error:
        problem = error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        problem = BadInput(path, "unreadable", getattr(error, "strerror", None) or str(error))
    yield Part(path, number, begins=part is None or part.ends, problem=problem)


def text_parts(stream, part: Part, pattern: str):
    """Yields `part` with the bytes of `stream`, in pieces where they are many.

    A piece over PIECE is one run and nothing else. (That matters: tiktoken panics on a million spaces *and a word*.)
    """
    ahead = 8  # bytes, two characters: cut_points looks at what follows
    at, data = 0, stream.read(PIECE + ahead)
    while len(data) > PIECE:
        cut = last_cut(data[:PIECE], pattern)
        if not cut:
            data += stream.read(max(0, MAX_RUN + ahead - len(data)))
            cut = first_cut(data, pattern)
            if not cut and len(data) <= MAX_RUN:
                break  # the rest of the document is one run
            if not 0 < cut <= MAX_RUN:
                decode(data, part.path, part.line, final=False)  # perhaps it is no text at all
                where = f"{part.path}:{part.line}"
                raise BadInput(where, "more than 1 MiB without a boundary", f"from byte {at:,} of the text on")
        yield part._replace(data=data[:cut], ends=False)
        part = part._replace(begins=False, line=part.line + data.count(b"\n", 0, cut))
        at += cut
        data = data[cut:]
        data += stream.read(max(0, PIECE + ahead - len(data)))
    yield part._replace(data=data)


def json_parts(stream, part: Part, text_key: str, pattern: str):
    """Yields whole JSON lines, about PIECE bytes at a time. A longer line is parsed here and its text cut in pieces."""
    line = 1
    while data := stream.read(PIECE):
        if not data.endswith(b"\n"):
            data += stream.readline(MAX_LINE + 2)
        last = data.rfind(b"\n", 0, len(data) - 1) + 1  # where the last line starts
        if len(data) - last <= PIECE:
            last = len(data)
        if last:
            yield part._replace(start=line, line=line, data=data[:last], json_lines=True)
            line += data.count(b"\n", 0, last)
        if last < len(data):
            data = data[last:]
            yield from long_line_parts(data, part._replace(start=line, line=line), text_key, pattern)
            while data and not data.endswith(b"\n"):  # a line over MAX_LINE: to its end
                data = stream.readline(PIECE)
            line += 1


def long_line_parts(data: bytes, part: Part, text_key: str, pattern: str):
    """Yields the text of one JSON line in pieces, or the problem that it has."""
    where, piece = f"{part.path}:{part.start}", None
    try:
        if len(data) > MAX_LINE + 2:  # 2: its line end
            raise BadInput(where, "a JSON line over 64 MiB")
        text = json_text(data, where, text_key).encode()
        for piece in text_parts(io.BytesIO(text), part, pattern):
            yield piece
    except BadInput as error:
        yield part._replace(begins=piece is None, problem=BadInput(where, *error.args[1:]))


# --- the text of a document -----------------------------------------------------------------------------------------


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
        keys = ", ".join(map(repr, value))[:80] or "none"
        raise BadInput(where, f"no key '{text_key}'", f"it has {keys}; see --text_key")
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
        raise BadInput(f"{path}:{line}", "not UTF-8", f"byte 0x{data[error.start]:02x}: {error.reason}") from None
