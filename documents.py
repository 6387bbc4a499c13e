"""Find the input files and read their documents in blocks. Each block can be encoded independently.

A document is one text file (.txt .md .py) or one line of a .jsonl (.json) file. A file may be compressed (.gz .bz2
.xz). Such a file is decompressed as a stream. A block contains several short documents or one piece of a long
document. A long document is cut only at the tokenizer's cut points (`tokenizer.cut_points`). So for any input, only a
few blocks are in memory.

If a document can't be read, a `BadInput` with file, line and reason takes its place in the block.
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
import stat
import sysconfig
import zlib
from typing import NamedTuple

from errors import UserError, parse_json
from tokenizer import first_cut, last_cut

KINDS = (".txt", ".md", ".py", ".jsonl")
NAMED = (*KINDS, ".json")  # .json is read as JSON lines, but not in a folder, where it is often another file
PACKINGS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
KNOWN = f"{' '.join(KINDS)}, also compressed as {' '.join(PACKINGS)}"  # for messages

PIECE = 512 << 10  # bytes of text that a worker encodes at a time
MAX_RUN = 1 << 20  # maximum bytes of a run (a text without a cut point); encoding a run takes superlinear time
MAX_LINE = 64 << 20  # maximum bytes of a JSON line, because a line is parsed as a whole


# --- what to read ---------------------------------------------------------------------------------------------------


class BadInput(Exception):
    """A document that can't be read: its file and line, the reason (errors are counted by reason), and a detail."""

    def __init__(self, where: str, reason: str, detail: str = ""):
        super().__init__(where, reason, detail)  # pickle needs the same three arguments
        self.reason = reason

    def __str__(self):
        where, reason, detail = self.args
        return f"{where}: {reason}" + (f" ({detail})" if detail else "")


def find_files(inputs: list[str]) -> list[str]:
    """Return the files of `inputs` in this order, each once. A folder's files come before its subfolders."""
    if not inputs:
        stdlib = sysconfig.get_paths()["stdlib"]
        return [path for path in walk(stdlib, leave_out=("site-packages", "dist-packages")) if path.endswith(".py")]
    found = {}
    for name in inputs:
        is_file = os.path.isfile(name)  # take a named file with any suffix; read_parts reports an unknown suffix
        here = []
        for match in [name] if is_file or os.path.isdir(name) else sorted(matches(name)):
            here += walk(match) if os.path.isdir(match) else [match] if is_file or is_text(match, NAMED) else []
        if not here and not glob.has_magic(name) and not os.path.exists(name):
            raise UserError(f"input {name}: no such file or folder")
        if not here:
            suffixes = f"{' '.join(KINDS)} (also with {' '.join(PACKINGS)})"
            raise UserError(f"input {name}: no file ends in {suffixes}")
        for path in here:
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def matches(pattern: str) -> list[str]:
    """Return the paths that match a glob. `**` is any number of folders; it does not follow links, which may be loops.

    glob.glob follows links: with two links to their own folder, it returns 2^40 paths.
    """
    before, both, after = pattern.partition("**")
    if not both or (before and not before.endswith(os.sep)) or after[:1] not in ("", os.sep):
        return glob.glob(pattern)
    tops = glob.glob(before) if before else [""]
    found = list(filter(None, tops)) if not after.strip(os.sep) else []  # `a/**` is also the folder a/
    for top in tops:
        for here, folders, _ in os.walk(top or os.curdir):
            folders[:] = sorted(f for f in folders if f[0] != ".")
            here = os.path.join(top, os.path.relpath(here, top or os.curdir)) if here != (top or os.curdir) else top
            found += matches(os.path.join(glob.escape(here), after.lstrip(os.sep) or "*"))
    return found


def walk(folder: str, leave_out=()):
    """Yield the text files below `folder`, sorted, except hidden files and folders, __pycache__ and `leave_out`."""

    def stop(error):
        raise UserError(f"input folder {error.filename}: {error.strerror}")

    for here, folders, names in os.walk(folder, onerror=stop):
        folders[:] = sorted(f for f in folders if f[0] != "." and f != "__pycache__" and f not in leave_out)
        yield from (os.path.join(here, name) for name in sorted(names) if name[0] != "." and is_text(name))


def split_suffixes(path: str) -> tuple[str, str, str]:
    """Split 'a/b.v2.jsonl.gz' into ('a/b.v2', '.jsonl', '.gz')."""
    packing = os.path.splitext(path)[1]
    if packing not in PACKINGS:
        packing = ""
    return *os.path.splitext(path.removesuffix(packing)), packing


def is_text(path: str, kinds=KINDS) -> bool:
    return split_suffixes(path)[1] in kinds


# --- files to blocks, bytes only ------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Some bytes of one file: a complete text, a piece of a long text, or several complete JSON lines."""

    path: str
    file: int  # index of the file in the input
    start: int = 1  # line where the (first) document starts; (file, start) is the document's position
    line: int = 1  # line where `data` starts
    data: bytes = b""
    json_lines: bool = False
    begins: bool = True  # False: the document began in an earlier part
    ends: bool = True  # False: the document continues in a later part
    problem: BadInput | None = None  # set instead of data if the document can't be read
    used: int = 0  # bytes that were read from the file for this part (before decompression)


def read_blocks(files: list[str], text_key: str, pattern: str):
    """Yield blocks (lists of Parts) in order: about PIECE bytes of short documents, or one piece of a long document."""
    block, size = [], 0
    for number, path in enumerate(files):
        for part in read_parts(path, number, text_key, pattern):
            takes = len(part.data) if part.begins and part.ends else PIECE + 1  # a piece gets its own block
            if block and size + takes > PIECE:
                yield block
                block, size = [], 0
            block.append(part)
            size += takes
    if block:
        yield block


def read_parts(path: str, number: int, text_key: str, pattern: str):
    """Yield the Parts of one file. A read error is a Part too, so errors are reported in the order of the input."""
    part, used = None, 0
    try:
        _, kind, packing = split_suffixes(path)
        if kind not in NAMED:
            raise BadInput(path, "unknown kind of file", f"known: {KNOWN}")
        if not stat.S_ISREG(os.stat(path).st_mode):  # a FIFO would wait for ever, a device may have no end
            raise BadInput(path, "unreadable", "not a regular file")
        with open(path, "rb") as raw, PACKINGS.get(packing, contextlib.nullcontext)(raw) as stream:
            if stream.peek(3).startswith(codecs.BOM_UTF8):
                stream.read(3)
            empty = Part(path, number)
            lines = kind in (".jsonl", ".json")
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
    """Yield copies of `part` with the bytes of `stream`: one copy for up to PIECE bytes, otherwise several.

    A piece over PIECE bytes is exactly one run. tiktoken can encode a million spaces alone, but it crashes if a word
    follows them.
    """
    ahead = 8  # bytes of two characters: a cut point depends on the two characters after it
    at, data = 0, stream.read(PIECE + ahead)
    while len(data) > PIECE:
        cut = last_cut(data[:PIECE], pattern)
        if not cut:
            data += stream.read(max(0, MAX_RUN + ahead - len(data)))
            cut = first_cut(data, pattern)
            if not cut and len(data) <= MAX_RUN:
                break  # the rest of the document is one run
            if not 0 < cut <= MAX_RUN:
                decode(data, part.path, part.line, final=False)  # if the data is not text, raises a clearer error
                where = f"{part.path}:{part.line}"
                raise BadInput(where, "more than 1 MiB without a word boundary", f"from byte {at:,} of the text")
        yield part._replace(data=data[:cut], ends=False)
        part = part._replace(begins=False, line=part.line + data.count(b"\n", 0, cut))
        at += cut
        data = data[cut:]
        data += stream.read(max(0, PIECE + ahead - len(data)))
    yield part._replace(data=data)


def json_parts(stream, part: Part, text_key: str, pattern: str):
    """Yield complete JSON lines, about PIECE bytes per Part. A longer line is parsed here, and its text is cut."""
    line = 1
    while data := stream.read(PIECE):
        if not data.endswith(b"\n"):
            data += stream.readline(MAX_LINE + 2)
        last = data.rfind(b"\n", 0, len(data) - 1) + 1  # start of the last line
        if len(data) - last <= PIECE:
            last = len(data)
        if last:
            yield part._replace(start=line, line=line, data=data[:last], json_lines=True)
            line += data.count(b"\n", 0, last)
        if last < len(data):
            data = data[last:]
            yield from long_line_parts(data, part._replace(start=line, line=line), text_key, pattern)
            while data and not data.endswith(b"\n"):  # skip the rest of a line over MAX_LINE
                data = stream.readline(PIECE)
            line += 1


def long_line_parts(data: bytes, part: Part, text_key: str, pattern: str):
    """Yield the text of one JSON line in pieces, or a Part with a problem."""
    where, piece = f"{part.path}:{part.start}", None
    try:
        if len(data) > MAX_LINE + 2:  # 2 bytes for the line end
            raise BadInput(where, "a JSON line over 64 MiB")
        text = json_text(data, where, text_key).encode()
        for piece in text_parts(io.BytesIO(text), part, pattern):
            yield piece
    except BadInput as error:
        yield part._replace(begins=piece is None, problem=BadInput(where, *error.args[1:]))


# --- the text of a document -----------------------------------------------------------------------------------------


def document_text(part: Part, line: int, data: bytes, text_key: str) -> str:
    """Return the text of one document of a Part (`data` begins on `line`), or raise BadInput."""
    if part.problem:
        raise part.problem
    if part.json_lines:
        return json_text(data, f"{part.path}:{line}", text_key)
    return decode(data, part.path, line)


def json_text(data: bytes, where: str, text_key: str) -> str:
    """Return the text under the key `text_key` of a JSON line."""
    try:
        value = parse_json(decode(data, *where.rsplit(":", 1)))
    except json.JSONDecodeError as error:
        raise BadInput(where, "not JSON", f"{error.msg} at character {error.pos + 1}") from None
    except ValueError as error:  # for example an integer of 5,000 digits, or 5,000 nested brackets
        raise BadInput(where, "JSON that Python can't read", str(error)) from None
    if not isinstance(value, dict):
        raise BadInput(where, "not a JSON object", f"but a {type(value).__name__}")
    if text_key not in value:
        keys = ", ".join(map(repr, value))[:80] or "none"
        raise BadInput(where, f"no key '{text_key}'", f"it has {keys}; see --text_key")
    text = value[text_key]
    if not isinstance(text, str):
        raise BadInput(where, f"'{text_key}' is not a string", f"but a {type(text).__name__}")
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair, which is not a character
        raise BadInput(where, "not Unicode", f"a lone surrogate at character {error.start + 1}") from None
    return text


def decode(data: bytes, path: str, line: int | str, final: bool = True) -> str:
    """Decode strict UTF-8. `data` begins on `line` (for errors). final=False allows an incomplete last character."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final)
    except UnicodeDecodeError as error:
        line = int(line) + data.count(b"\n", 0, error.start)
        raise BadInput(f"{path}:{line}", "not UTF-8", f"byte 0x{data[error.start]:02x}: {error.reason}") from None
