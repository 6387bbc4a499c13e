"""Convert text to tokens on disk: `DIR/{train,val,test}.bin` and `DIR/meta.json`.

    python prepare.py --tokenizer=bytes             # the standard library's sources -> data/stdlib_bytes
    python prepare.py corpus/ --tokenizer=gpt2      # a folder of text               -> data/corpus_gpt2
    python prepare.py shards/*.jsonl.gz --out=data/web --text_key=content
    python prepare.py corpus/ --tokenizer=dataset/gpt2-vocab.json     # another vocabulary (tokenizer.py)
    python prepare.py --megatron=PREFIX --out=data/web                # PREFIX.bin and PREFIX.idx of Megatron-LM

A `.bin` file contains only token ids, little-endian uint16 (above 65,536 ids: uint32). DIR also gets a copy of a
vocabulary in files.

A document is one text file (.txt .md .py), one line of a .jsonl (.json) file, or one row of a .parquet file. A file may
be compressed (.gz .zst). .parquet and .zst need `pip install pyarrow`. The characters "<|endoftext|>" in a document
have no special meaning. The end-of-text token follows each document. A hash of the document's position (index of its
file, line of its start) selects its split. A byte-order mark and blank JSON lines are ignored. Text files are UTF-8
without bytes 0.

    this process                        one process per core              this process
    read, cut into blocks  --blocks-->  parse, encode  --tokens-->        append in the order of the input

A long text is cut only where the cut does not change its tokens (`tokenizer.last_cut`), so the output does not depend
on the number of workers.

The files grow in DIR.part, which is renamed to DIR at the end. After a crash, the same command resumes: it reads the
finished blocks again, without encoding them.
"""

from errors import UserError, check_locks, exit_on_user_error, explained, locked, losable, reading, regular, shown  # isort: skip
from options import Parser, within  # isort: skip
import bisect
import codecs
import contextlib
import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from tokenizer import COPY, LONGEST, copy, last_cut, load_tokenizer

SPLITS = ("train", "val", "test")
PACKED = ("", ".gz", ".zst")
KINDS = (*(kind + packed for kind in (".txt", ".md", ".py", ".jsonl") for packed in PACKED), ".parquet")
JSON = tuple(kind + packed for kind in (".jsonl", ".json") for packed in PACKED)  # .json: not from a folder
PIECE = 512 << 10  # characters of a block
SAVE_EVERY = 5.0  # seconds; a crash loses this much
# fork shares the vocabulary, but needs a parent without threads. numpy and pyarrow may start threads, so they are
# imported only after the fork. macOS needs spawn.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
MEGATRON_DTYPES = {4: "<i4", 8: "<u2"}  # Megatron-LM's codes in an .idx file
# These are valid UTF-8, but signs of UTF-16 and ISO-2022-JP.
MARKS = "\0", "\x1b$", "\x1b("
ENCODINGS = "EUC-JP CP932 CP1252 ISO-2022-JP UTF-16LE UTF-16BE UTF-32LE UTF-32BE".split()  # CP932 is Shift_JIS


# --- read: files to blocks --------------------------------------------------------------------------------------------


def find_files(inputs):
    """Return the files of `inputs` in this order. Raises UserError."""
    if not inputs:
        stdlib = sysconfig.get_path("stdlib")
        return [path for path in walk(stdlib) if path.endswith(".py") and "-packages" not in path.removeprefix(stdlib)]
    files = []
    for name in inputs:
        named = [name] if name.endswith(KINDS + JSON) else []
        paths = list(walk(name, links=True)) if os.path.isdir(name) else named
        if not paths:
            raise UserError(f"input {name}: should be a file or folder of {' '.join(KINDS)}, or a .json file")
        files += paths
    packed = [path for path in files if path.endswith((".parquet", ".zst"))]
    if packed and not importlib.util.find_spec("pyarrow"):
        raise UserError(f"input {packed[0]}: needs a package: pip install pyarrow")
    return files


def walk(folder, links=False):
    """Yield the text files below `folder`, sorted, no hidden ones. links: follow those to folders. Raises OSError."""

    def stop(error):
        raise error

    real_paths = set()  # no folder is read twice
    for path, folders, names in os.walk(folder, onerror=stop, followlinks=links):
        if (real := os.path.realpath(path)) in real_paths:
            folders.clear()
            continue
        real_paths.add(real)
        folders[:] = sorted(name for name in folders if name[0] != "." and name != "__pycache__")
        yield from (os.path.join(path, name) for name in sorted(names) if name[0] != "." and name.endswith(KINDS))


class Part(NamedTuple):
    """A text, a piece of a long text, a JSON line, or the text of a row."""

    path: str
    file: int  # index of the file
    line: int = 1  # the document's start
    text: str = ""
    begins: bool = True  # the document begins here
    ends: bool = True  # the document ends here
    problem: str = ""  # why this text is missing


def read_blocks(files, first, tokenizer, text_key, unread):
    """Yield lists of Parts, about PIECE characters each.

    first: index of the first file. unread: gets files with a read error.
    """
    block, size = [], 0
    for number, path in enumerate(files, first):
        for part in read_parts(path, number, tokenizer, text_key, unread):
            if block and size + len(part.text) > PIECE:
                yield block
                block, size = [], 0
            block.append(part)
            size += len(part.text)
    if block:
        yield block


def read_parts(path, number, tokenizer, text_key, unread):
    """Yield the Parts of one file. A read error is a Part too."""
    part, line = Part(path, number), 1
    try:
        if path.endswith(".parquet"):
            for line, text in enumerate(read_column(path, text_key), 1):
                problem = f"{text_key} is {text!r:.20}; should be a text"
                yield part._replace(line=line, **{"text": text} if isinstance(text, str) else {"problem": problem})
            return
        # bad bytes become surrogates, which `encode_block` refuses
        with io.TextIOWrapper(opened(path), "utf-8-sig", "surrogateescape", "\n") as stream:
            if path.endswith(JSON):
                for line, text in enumerate(stream, 1):
                    if text.strip():
                        yield part._replace(line=line, text=text)
                return
            text = stream.read(PIECE)
            while next_text := stream.read(PIECE):
                if cut := last_cut(text, tokenizer):
                    yield part._replace(text=text[:cut], ends=False)
                    part = part._replace(begins=False)
                text = text[cut:] + next_text
                if tokenizer.cut is None and len(text) > LONGEST:
                    break  # `encode_to_bytes` refuses it
            yield part._replace(text=text)
    except UserError:
        raise
    except Exception as error:  # gzip raises many types
        unread.append(path)
        large = "too much memory" in str(error)  # zstd --long
        remedy = "decompress it first: zstd -d --memory=2048MB" if large else "repair it"
        yield part._replace(line=line, problem=f"{error}; the rest of this file is unreadable: {remedy}")


def opened(path):
    if path.endswith(".zst"):
        import pyarrow  # the package zstandard would not notice a file that is cut off

        return pyarrow.input_stream(path, compression="zstd")
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")


def read_column(path, name):
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    if name not in (columns := file.schema_arrow.names):
        raise UserError(f"--text_key={name}: {path} has the columns {' '.join(columns)}")
    for batch in file.iter_batches(64, columns=[name]):
        yield from batch.column(name).to_pylist()


# --- encode: blocks to tokens, in the workers -------------------------------------------------------------------------


def encode_block(source, text_key, weights, block):
    """Encode the Parts of a block.

    Return ([(split, tokens, whether the document ends here)], a line for each bad Part, the number of unknown tokens).
    """
    tokenizer, encoded, problems = load_tokenizer(source), [], []
    tokenizer.unknown = 0
    for part in block:
        try:
            if part.problem:
                raise OSError(part.problem)
            if any(mark in part.text for mark in MARKS) and not part.path.endswith(".parquet"):
                raise ValueError
            # int() refuses more than 4,300 digits
            text = json.loads(part.text, parse_int=float)[text_key] if part.path.endswith(JSON) else part.text
            ids = tokenizer.encode_to_bytes(text)
        except Exception as error:
            problems.append(f"{part.path}:{part.line}: {explanation(part, text_key, error)}")
            if part.begins and part.ends:
                continue
            ids = b""
        split = split_of(part.file, part.line, weights)
        encoded.append((split, ids + tokenizer.end_bytes if part.ends else ids, part.ends))
    return encoded, problems, tokenizer.unknown


def explanation(part, text_key, error):
    """Return the cause and the remedy."""
    if bad := re.search("[\0\udc80-\udcff]|\x1b[$(]", part.text):
        data = part.text[: bad.end() + 999].encode("utf-8", "surrogateescape")
        name = min(ENCODINGS, key=lambda name: strange_characters(data, name))
        return f"not UTF-8: byte 0x{ord(bad[0][0]) & 255:02x}; convert it, for example: iconv -f {name} -t UTF-8"
    line = part.path.endswith(JSON) and not part.problem
    remedy = f"; each line should be a JSON object with a text under {text_key!r} (--text_key)" if line else ""
    return f"{type(error).__name__}: {error}{remedy}"


def strange_characters(data, encoding):
    """Count characters that no text has, except an incomplete last one."""
    text = codecs.getincrementaldecoder(encoding)("replace").decode(data)
    return sum(c == "\ufffd" or not (c.isprintable() or c.isspace()) for c in text)


def split_of(file, line, weights):
    """Return a document's split: 0 train, 1 val, 2 test."""
    digest = hashlib.blake2b(f"{file}:{line}".encode(), digest_size=4).digest()
    point = int.from_bytes(digest, "little") / 2**32 * sum(weights)
    return bisect.bisect([*itertools.accumulate(weights)], point)


def start_worker():
    """Ignore Ctrl-C, and exit when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def encoded_blocks(blocks, workers, *job):
    """Yield the results of `encode_block`, in order. job: its first arguments."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(START_METHOD), start_worker)
    pending = deque()
    try:
        pool.submit(int)  # forks all workers
        for block in blocks:
            pending.append(pool.submit(encode_block, *job, block))
            if len(pending) == 4 * workers:
                yield pending.popleft().result()
        yield from (future.result() for future in pending)
    except BrokenProcessPool:
        remedy = "run the same command again to resume; fewer --workers need less memory"
        raise UserError(f"a worker was killed, perhaps for lack of memory: {remedy}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def megatron_blocks(prefix, tokenizer, weights):
    """Yield what `encoded_blocks` yields, for PREFIX.bin. Each document is a block.

    Megatron-LM's preprocess_data.py writes PREFIX.bin and PREFIX.idx (megatron/core/datasets/indexed_dataset.py).
    NOTES.md has the format. No file names the vocabulary, so the ids are compared with its size.
    """
    import numpy as np  # not at the top: see START_METHOD

    with reading(f"--megatron={prefix}", damaged=f": damaged, or not encoded with --tokenizer={tokenizer.name}"):
        index = np.fromfile(f"{prefix}.idx", np.uint8)
        sequences, documents = index[18:34].view("<i8").tolist()
        cuts = np.cumsum([4 * sequences, 8 * sequences, 8 * documents])
        sizes, _, first, modes = np.split(index[34:], cuts)
        if len(modes):
            raise UserError(f"--megatron={prefix}: its .idx has modes: images cannot be converted, only text")
        ids = np.memmap(f"{prefix}.bin", MEGATRON_DTYPES[index[17]], "r")
        first = first.view("<i8")
        ends = np.append(0, np.cumsum(sizes.view("<u4"), dtype=np.int64))[first]  # u4: a negative size is too large
        ordered = first[0] == 0 and (np.diff(first) >= 0).all()
        if not ordered or ends[-1] != len(ids) or not 0 <= ids.min() <= ids.max() < tokenizer.n_vocab:
            raise ValueError(
                f"{ends[-1]:,} tokens in the .idx, {len(ids):,} in the .bin, ids up to {ids.max()}, documents {first}"
            )
    for line, (begin, end) in enumerate(itertools.pairwise(ends.tolist()), 1):
        data = ids[begin:end].astype(f"<u{tokenizer.width}").tobytes()
        if not data.endswith(tokenizer.end_bytes):
            data += tokenizer.end_bytes
        yield [(split_of(0, line, weights), data, True)], [], 0


# --- write: in the order of the input ---------------------------------------------------------------------------------


def write_json(path, value):
    """Write a file. Return when it is on the disk."""
    with open(path, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


class Output:
    """The folder DIR.part. Its progress.json says how much of each file is valid."""

    def __init__(self, folder, width):
        self.folder, self.width, self.saved_at = folder, width, time.monotonic()
        self.files = [open(folder / f"{split}.bin", "ab") for split in SPLITS]

    def resume(self, made_from):
        """Go on after the progress of the same command. Raises UserError if a file lacks a part of it."""
        folder = self.folder
        self.progress = dict(made_from=made_from, blocks=0, tokens=[0, 0, 0], documents=[0, 0, 0], skipped=0, unknown=0)
        with reading(folder, damaged=": damaged; remove it to begin again"):
            with contextlib.suppress(FileNotFoundError):
                saved = json.loads((folder / "progress.json").read_text())
                if saved["made_from"] == made_from:
                    self.progress |= saved
                    print(f"{folder}: resuming after {sum(saved['tokens']):,} tokens")
                else:
                    tokens = f"{sum(saved['tokens']):,} tokens of another command or of other files"
                    print(f"{folder}: begins again, without the {tokens}")
                    for name in (*COPY, "progress.json"):  # the other command would miss the tokens that are cut off
                        (folder / name).unlink(missing_ok=True)
            self.truncate()

    def truncate(self):
        """Cut off what the progress does not count. Raises ValueError if a file is shorter: it would get zeros."""
        for file, n in zip(self.files, self.progress["tokens"], strict=True):
            if os.path.getsize(file.name) < self.width * n:
                raise ValueError(f"{file.name} should have {n:,} tokens")
            file.truncate(self.width * n)

    def write(self, encoded, problems, unknown):
        p = self.progress
        p["blocks"] += 1
        p["skipped"] += len(problems)
        p["unknown"] += unknown
        for split, ids, ends in encoded:
            self.files[split].write(ids)
            p["tokens"][split] += len(ids) // self.width
            p["documents"][split] += ends
        if time.monotonic() - self.saved_at > SAVE_EVERY:
            self.save()

    def save(self):
        """Save the tokens before the progress, so that a crash leaves a valid one."""
        check_locks()
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
        new = self.folder / "progress.new"
        write_json(new, self.progress)
        new.replace(self.folder / "progress.json")
        self.saved_at = time.monotonic()

    def fill_empty_splits(self, weights):
        """Fill each empty split from the end of the largest."""
        tokens = list(self.progress["tokens"])
        total = max(tokens)
        giver = tokens.index(total)
        for i in (2, 1, 0):
            share = round(total * weights[i] / sum(weights))
            if share and not tokens[i]:
                tokens[i], tokens[giver] = share, tokens[giver] - share
                with open(self.files[giver].name, "rb") as source:
                    source.seek(self.width * tokens[giver])
                    shutil.copyfileobj(source, self.files[i])  # `truncate` cuts off the rest
        self.progress["tokens"] = tokens
        self.save()  # before tokens are cut off
        self.truncate()

    def finish(self, folder, meta):
        write_json(self.folder / "meta.json", meta)
        self.folder.rename(folder)
        (folder / "progress.json").unlink()
        (folder / "prepare.lock").unlink()

    def close(self):
        for file in self.files:
            file.close()


# --- the command ------------------------------------------------------------------------------------------------------


def main():
    """Run the command line. A lock in DIR.part refuses a second command with the same DIR."""
    losable(sys.stdout)
    about = "Text to tokens on disk: DIR/{train,val,test}.bin. After a stop, the same command resumes."
    parser = Parser("python prepare.py", description=about, allow_abbrev=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help=f"files, also .json, or folders of {' '.join(KINDS)} (Python's own)")
    add("--out", metavar="DIR", help="output folder (default: data/SOURCE_TOKENIZER, for example data/stdlib_gpt2)")
    add("--tokenizer", default="gpt2", help="gpt2 (default), bytes ..., tokenizer.json, or vocab.json with merges.txt")
    add("--split", default="969,30,1", help="relative sizes of train,val,test (default: 969,30,1)")
    add("--workers", type=within(1, 1024), default=cores, metavar="N", help="processes that encode (one per core)")
    add("--text_key", default="text", metavar="KEY", help="key of a JSON line, or column of a .parquet (text)")
    add("--part", default="0/1", metavar="I/N", help="encode share I of N of the files (jobs/prepare.sh joins shares)")
    add("--megatron", metavar="PREFIX", help="instead of text, convert encoded tokens: PREFIX.bin and PREFIX.idx")
    add("--on_error", choices=("stop", "skip"), default="stop", help="at a bad document (stop; Python's own: skip)")
    args = parser.parse_args()
    with reading(f"--split={args.split}: should be three shares like 969,30,1"):
        weights = _, _, _ = [float(share) for share in args.split.split(",")]
        if not (min(weights) >= 0 < sum(weights) < math.inf):
            raise ValueError("a share is negative or not finite, or all are 0")
    if args.megatron and (args.inputs or args.part != "0/1"):
        raise UserError(f"--megatron={args.megatron}: converts one whole data set; leave out the inputs and --part")
    tokenizer = load_tokenizer(args.tokenizer)
    if tokenizer.lossy and not args.megatron:
        why = "this vocabulary would leave out characters that it does not have"
        raise UserError(f"--tokenizer={args.tokenizer}: {why}; train it with unk_token, byte_fallback or all 256 bytes")
    if tokenizer.drops_space:
        print(f"warning: --tokenizer={args.tokenizer}: this vocabulary drops white space or ends of lines")
    files = [f"{args.megatron}.bin", f"{args.megatron}.idx"] if args.megatron else find_files(args.inputs)
    most = f"N at most {len(files)}, the number of files"
    with reading(f"--part={args.part}: should be I/N, as in 0/8 to 7/8, and {most}"):
        index, count = map(int, args.part.split("/"))
        if not 0 <= index < count <= len(files):
            raise ValueError("out of range")
    first, end = len(files) * index // count, len(files) * (index + 1) // count
    files = files[first:end]
    source = args.megatron or (args.inputs or ["stdlib"])[0]
    out = args.out or f"data/{Path(source).resolve().name.split('.')[0]}_{tokenizer.name}"
    made_from = {"tokenizer": tokenizer.name, "split": args.split, "text_key": args.text_key, "input": describe(files)}
    with explained(f"--out={out}"):
        folder = Path(os.path.realpath(out))
        part = Path(f"{folder}.part")
        if is_finished(folder, made_from, tokenizer.width):
            print(f"{out} is already finished: nothing to do")
            return
        part.mkdir(parents=True, exist_ok=True)
        with locked(part / "prepare.lock", f"--out={out}: another prepare.py is writing this data set"):
            with contextlib.closing(Output(part, tokenizer.width)) as output:
                output.resume(made_from)
                make(args, tokenizer, files, first, weights, output, folder)


def describe(files):
    """Return the number of files, their bytes, and a hash of their paths, sizes and modification times."""
    stats = [(os.path.abspath(path), os.stat(regular(path))) for path in files]
    text = "".join(f"{path!r} {stat.st_size} {stat.st_mtime_ns}\n" for path, stat in stats)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return {"files": len(files), "bytes": sum(stat.st_size for _, stat in stats), "hash": digest}


def is_finished(folder, made_from, width):
    """Return whether `folder` has this data set. Remove an empty one. Raises UserError or OSError for any other."""
    if not (folder / "meta.json").exists():
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()  # only if empty
        return False
    with reading(f"--out={folder}", damaged=": no whole data set of prepare.py; choose another --out, or remove it"):
        meta = json.loads((folder / "meta.json").read_text())
        if meta["made_from"] != made_from:
            other = f"another data set, made from {meta['made_from']}"
            raise UserError(f"--out={folder}: contains {other}; choose another --out")
        for split, n in meta["tokens"].items():
            if os.path.getsize(folder / f"{split}.bin") != width * n:
                raise ValueError(f"{split}.bin should have {n:,} tokens")
    return True


def make(args, tokenizer, files, first, weights, output, folder):
    """Write all documents into `output`, and give it its final name, `folder`."""
    p = output.progress
    megatron = args.megatron and megatron_blocks(args.megatron, tokenizer, weights)
    unread = []
    blocks = megatron or read_blocks(files, first, tokenizer, args.text_key, unread)
    rest = (block for block in itertools.islice(blocks, p["blocks"], None))
    results = rest if megatron else encoded_blocks(rest, args.workers, args.tokenizer, args.text_key, weights)
    tqdm.monitor_interval = 0  # without tqdm's thread: see START_METHOD
    about = p["made_from"]["input"]["bytes"] // PIECE
    bar = tqdm(results, total=about, initial=p["blocks"], unit="block", disable=None)
    with contextlib.closing(results), bar:
        for encoded, problems, unknown in bar:
            if problems and args.inputs and args.on_error == "stop":
                output.save()
                raise UserError(f"{problems[0]}; or go on without it: --on_error=skip")
            output.write(encoded, problems, unknown)
            for problem in problems if args.inputs else ():  # Python's own tests have wrong files on purpose
                tqdm.write(shown(problem))
    skipped = ", and the rest of ".join([f"skipped documents: {p['skipped']}", *unread])
    output.save()
    if args.part == "0/1":  # another part may have text
        refuse_empty(output, tokenizer, args.text_key, skipped)
        output.fill_empty_splits(weights)
    copy(tokenizer, output.folder)
    meta = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.n_vocab, "eot_id": tokenizer.eot_token}
    meta |= {name: dict(zip(SPLITS, p[name], strict=True)) for name in ("tokens", "documents")}
    meta |= {name: p[name] for name in ("skipped", "unknown", "made_from")}
    output.finish(folder, meta | {"dtype": tokenizer.dtype})
    for split, tokens, documents in zip(SPLITS, p["tokens"], p["documents"], strict=True):
        part = " (from the end of the largest split)" if tokens and not documents else ""
        print(f"{split:<5} {tokens:>16,} tokens {documents:>12,} documents{part}")
    if tokenizer.unk:
        total, why = sum(p["tokens"]), "the vocabulary does not have these characters"
        print(shown(f"unknown tokens: {p['unknown']:,} of {total:,} ({tokenizer.unk}: {why})"))
    print(skipped)


def refuse_empty(output, tokenizer, text_key, skipped):
    """Raise UserError if `output` has only empty documents."""
    p, empty = output.progress, tokenizer.encode_to_bytes("") + tokenizer.end_bytes
    if tokenizer.width * sum(p["tokens"]) == len(empty) * sum(p["documents"]):
        (output.folder / "progress.json").unlink(missing_ok=True)  # the next run reads all files again
        counts = f"files: {p['made_from']['input']['files']}, empty documents: {sum(p['documents'])}, {skipped}"
        raise UserError(f"the input has no text ({counts}); correct it, or --text_key={text_key}")


if __name__ == "__main__":
    exit_on_user_error(main)
