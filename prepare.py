"""Convert text to tokens on disk: `DIR/{train,val,test}.bin` and `DIR/meta.json`.

    python prepare.py --tokenizer=bytes             # the standard library's sources -> data/stdlib_bytes
    python prepare.py corpus/ --tokenizer=gpt2      # a folder of text               -> data/corpus_gpt2
    python prepare.py shards/*.jsonl.gz --out=data/web --text_key=content
    python prepare.py corpus/ --tokenizer=dataset/gpt2-vocab.json     # another vocabulary (tokenizer.py)
    python prepare.py --megatron=PREFIX --out=data/web                # PREFIX.bin and PREFIX.idx of Megatron-LM

A `.bin` file contains only the token ids as little-endian uint16 (above 65,536 ids: uint32; meta.json has the dtype),
so data.py can map it into memory. DIR also gets a copy of the vocabulary, tokenizer.json, except for `bytes`.

A document is one text file (.txt .md .py) or one line of a .jsonl (.json) file. A file may be compressed (.gz). A
document is encoded as ordinary text: the characters "<|endoftext|>" in it have no special meaning. The
end-of-text token follows each document; an empty document is only this token. A hash of the document's position (index
of its file, line of its start) selects its split. A byte-order mark at the start of a file is removed, blank JSON lines
are ignored, and line ends do not change.

    this process                        one process per core              this process
    read, cut into blocks  --512 Ki-->  parse, encode  --tokens-->        append in the order of the input

Encoding takes nearly all the time, so the main process only reads and writes. At most a few blocks per worker are in
memory. The memory does not depend on the size of the input, and the output does not depend on the number of workers.
A long text is cut only where the cut does not change its tokens (`tokenizer.last_cut`).

The files grow in DIR.part, which is renamed to DIR when they are complete. After a stop or a crash, the same command
resumes: it reads the finished blocks again without encoding them, and continues with the next block.
"""

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import struct
import sys
import sysconfig
import threading
import time
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from errors import Parser, UserError, exit_on_user_error, explained, locked, reading
from tokenizer import copy, last_cut, load_tokenizer

SPLITS = ("train", "val", "test")
KINDS = (".txt", ".md", ".py", ".jsonl")  # a .json file is read as JSON lines if it is named, but not in a folder
KNOWN = f"{' '.join(KINDS)}, also compressed as .gz"
PIECE = 512 << 10  # characters that a worker encodes at a time
LONGEST = 64 << 20  # characters of a JSON line
SAVE_EVERY = 5.0  # seconds between two saves; a crash loses about this much work
REASONS = {  # what is wrong with a document, by the error that it causes; skipped documents are counted by reason
    UnicodeEncodeError: "not UTF-8", json.JSONDecodeError: "not JSON", RecursionError: "not JSON",
    KeyError: "no such key; see --text_key", TypeError: "no string", AttributeError: "no string",
    OSError: "unreadable",
}  # fmt: skip
# fork is fast and shares the vocabulary, but it needs a parent without threads. Importing numpy may start threads, so
# only the workers import it. macOS needs spawn.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
DTYPES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron-LM's codes of integers in an .idx file


# --- read: files to blocks --------------------------------------------------------------------------------------------


def find_files(inputs):
    """Return the files of `inputs` in this order, each once. A folder's files come before its subfolders."""
    if not inputs:
        stdlib = sysconfig.get_paths()["stdlib"]
        return [path for path in walk(stdlib) if path.endswith(".py") and "-packages" not in path.removeprefix(stdlib)]
    found = {}
    for name in inputs:
        here = list(walk(name)) if os.path.isdir(name) else [name] * (kind_of(name) in (*KINDS, ".json"))
        if not here:
            raise UserError(f"input {name}: should be a file or folder of {KNOWN}")
        found |= {os.path.realpath(path): path for path in here}
    return list(found.values())


def walk(folder):
    """Yield the text files below `folder`, sorted, except hidden files and folders and __pycache__.

    Raises UserError if a folder can't be read: without its texts, the data set would lack them in silence.
    """

    def stop(error):
        raise UserError(f"input folder {error.filename}: {error.strerror}")

    for here, folders, names in os.walk(folder, onerror=stop):
        folders[:] = sorted(name for name in folders if name[0] != "." and name != "__pycache__")
        names = sorted(name for name in names if name[0] != "." and kind_of(name) in KINDS)
        yield from (os.path.join(here, name) for name in names)


def kind_of(path):
    """Return '.jsonl' for 'a/b.jsonl' and 'a/b.jsonl.gz'."""
    return os.path.splitext(path.removesuffix(".gz"))[1]


class Part(NamedTuple):
    """Some characters of one file: a text, a piece of a long text, or a JSON line."""

    path: str
    file: int  # index of the file in the input
    line: int = 1  # line where `text` starts
    text: str = ""
    is_json: bool = False
    begins: bool = True  # False: the document began in an earlier part
    ends: bool = True  # False: the document continues in a later part
    problem: str = ""  # why the file can't be read further


def read_blocks(files, tokenizer):
    """Yield blocks, lists of Parts of about PIECE characters together, in the order of the input."""
    block, size = [], 0
    for number, path in enumerate(files):
        for part in read_parts(path, number, tokenizer):
            if block and size + len(part.text) > PIECE:
                yield block
                block, size = [], 0
            block.append(part)
            size += len(part.text)
    if block:
        yield block


def read_parts(path, number, tokenizer):
    """Yield the Parts of one file. A read error is a Part too, so errors are reported in the order of the input."""
    part = Part(path, number, is_json=kind_of(path) not in KINDS[:3])
    try:
        if not os.path.isfile(path):  # a FIFO would wait for ever
            raise OSError("not a regular file")
        with open(path, "rb") as raw, (gzip.open if path.endswith(".gz") else contextlib.nullcontext)(raw) as unpacked:
            # bytes that are not UTF-8 become lone surrogates, which `encode_block` refuses
            stream = io.TextIOWrapper(unpacked, "utf-8-sig", "surrogateescape", newline="\n")
            parts = json_parts(stream, part) if part.is_json else text_parts(stream, part, tokenizer)
            for part in parts:
                yield part
    except (OSError, EOFError, zlib.error) as error:
        yield Part(path, number, begins=part.ends, problem=str(error))


def text_parts(stream, part, tokenizer):
    """Yield copies of `part` with the text of `stream`: one copy for a short text, otherwise several."""
    text = stream.read(PIECE)
    while more := stream.read(PIECE):
        if cut := last_cut(text, tokenizer):
            yield part._replace(text=text[:cut], ends=False)
            part = part._replace(begins=False, line=part.line + text.count("\n", 0, cut))
        text = text[cut:] + more
    yield part._replace(text=text)


def json_parts(stream, part):
    """Yield copies of `part`, each with one line of `stream`. A line over LONGEST is cut, so it is not JSON."""
    for line, text in enumerate(iter(lambda: stream.readline(LONGEST), ""), 1):
        if text.strip():
            yield part._replace(text=text, line=line)


# --- encode: blocks to tokens, in the workers -------------------------------------------------------------------------


def encode_block(source, text_key, weights, block):
    """Encode the documents of a block, each into its split. Of a bad long text, only the bad pieces are left out.

    Returns (tokens, documents, problems): bytes and number of documents of each split, in the order of SPLITS, and
    (reason, message) of each bad document.
    """
    tokenizer = load_tokenizer(source)
    endoftext = tokenizer.eot_token.to_bytes(tokenizer.width, "little")
    tokens, documents, problems = [[], [], []], [0, 0, 0], []
    for part in block:
        try:
            if part.problem:
                raise OSError(part.problem)
            ids = tokenizer.encode_to_bytes(json.loads(part.text)[text_key] if part.is_json else part.text)
        except Exception as error:
            reason = REASONS.get(type(error), type(error).__name__)
            line = part.line + part.text.count("\n", 0, getattr(error, "start", 0))  # UnicodeEncodeError.start
            problems.append((reason, f"{part.path}:{line}: {reason} ({error})"))
            if part.begins and part.ends:
                continue
            ids = b""
        split = split_of(part.file, part.line if part.is_json else 1, weights)
        tokens[split] += [ids, endoftext] if part.ends else [ids]
        documents[split] += part.ends
    return [b"".join(pieces) for pieces in tokens], documents, problems


def split_of(file, line, weights):
    """Return the split (0 train, 1 val, 2 test) of the document that starts on `line` of the file with index `file`."""
    digest = hashlib.blake2b(f"{file}:{line}".encode(), digest_size=4).digest()
    point = int.from_bytes(digest, "little") / 2**32 * sum(weights)
    return 0 if point < weights[0] else 1 if point < weights[0] + weights[1] or not weights[2] else 2


def start_worker():
    """Set up a worker: it ignores Ctrl-C, and it exits when its parent process ends for any reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def encoded_blocks(blocks, workers, *job):
    """Yield the results of `encode_block` in the order of `blocks`. job: the first arguments of `encode_block`."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(START_METHOD), start_worker)
    submitted = (pool.submit(encode_block, *job, block) for block in blocks)
    try:
        pending = deque(itertools.islice(submitted, 4 * workers))  # this many blocks wait in the pool
        while pending:
            yield pending.popleft().result()
            pending.extend(itertools.islice(submitted, 1))
    except BrokenProcessPool:
        remedy = f"run the same command again to resume; fewer --workers than {workers} need less memory"
        raise UserError(f"a worker was killed, perhaps for lack of memory: {remedy}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def megatron_blocks(prefix, tokenizer, weights):
    """Yield results, as `encoded_blocks` does, of PREFIX.bin. A document that lacks its end-of-text gets it.

    Megatron-LM encodes text with tools/preprocess_data.py --dataset-impl=mmap. PREFIX.bin has only token ids.
    PREFIX.idx contains, little-endian (megatron/core/datasets/indexed_dataset.py), for S sequences (parts of documents)
    and D documents:

        magic, 9 bytes | version, 8 | code of the dtype, 1 | S, 8 | D + 1, 8 | number of tokens of each sequence, 4 S |
        first byte of each sequence in the .bin, 8 S | first sequence of each document, and S, 8 (D + 1)

    It does not name the vocabulary, so the ids are compared with the size of `tokenizer`. Document d takes the place of
    line d + 1 of a .jsonl file. Each document is a block.
    """
    import numpy as np  # not at the top: see START_METHOD

    kind = f"not data of --dataset-impl=mmap that --tokenizer={tokenizer.name} encoded, or damaged"
    with reading(f"--megatron={prefix}: {kind}", struct.error):
        index = np.fromfile(f"{prefix}.idx", np.uint8)
        _, _, code, sequences, bounds = struct.unpack("<9sQBQQ", index[:34].tobytes())
        sizes, _, first = np.split(index[34:], [4 * sequences, 12 * sequences])
        ids = np.memmap(f"{prefix}.bin", DTYPES[code], "r")
        ends = np.append(0, np.cumsum(sizes.view("<i4"), dtype=np.int64))[first.view("<i8")]
        fits = (len(first), ends[0], ends[-1]) == (8 * bounds, 0, len(ids))
        if not fits or not 0 <= ids.min() <= ids.max() < tokenizer.n_vocab:
            raise ValueError(f"{ends[-1]:,} tokens in the .idx, {len(ids):,} in the .bin, ids up to {ids.max()}")
    endoftext = tokenizer.eot_token.to_bytes(tokenizer.width, "little")
    for line, (begin, end) in enumerate(itertools.pairwise(ends.tolist()), 1):
        data = ids[begin:end].astype(f"<u{tokenizer.width}").tobytes()
        tokens, documents, split = [b"", b"", b""], [0, 0, 0], split_of(0, line, weights)
        tokens[split] = data if data.endswith(endoftext) else data + endoftext
        documents[split] = 1
        yield tokens, documents, []


# --- write: in the order of the input ---------------------------------------------------------------------------------


class Output:
    """The folder DIR.part of an unfinished data set. progress.json says how much of its files counts."""

    def __init__(self, folder, made_from, width):
        self.folder, self.width, self.saved_at = folder, width, time.monotonic()
        self.files = [open(folder / f"{split}.bin", "ab") for split in SPLITS]
        counts = {"blocks": 0, "tokens": [0, 0, 0], "documents": [0, 0, 0], "skipped": {}}
        self.progress = {"made_from": made_from, **counts}
        with contextlib.suppress(OSError, ValueError):
            saved = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
            if saved["made_from"] == made_from:
                self.progress = saved
                print(f"{folder}: resuming after {sum(saved['tokens']):,} tokens")
        self.truncate()

    def truncate(self):
        for file, n in zip(self.files, self.progress["tokens"], strict=True):
            file.truncate(self.width * n)

    def write(self, tokens, documents, problems):
        """Append the tokens of a block. Count its documents and problems."""
        p = self.progress
        p["blocks"] += 1
        for i, file in enumerate(self.files):
            file.write(tokens[i])
            p["tokens"][i] += len(tokens[i]) // self.width
            p["documents"][i] += documents[i]
        for reason, message in problems:
            p["skipped"][reason] = p["skipped"].get(reason, 0) + 1
            tqdm.write(message)
        if time.monotonic() - self.saved_at > SAVE_EVERY:
            self.save()

    def save(self):
        """Save all tokens so far and the progress. Both survive a crash, even of the machine (fsync)."""
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
        write_whole(self.folder / "progress.json", self.progress)
        self.saved_at = time.monotonic()

    def fill_empty_splits(self, weights):
        """Fill each empty split with its share (--split) of the tokens of the largest split, taken from its end.

        Example: one big text file is one document, so all its tokens go to one split.
        """
        tokens = list(self.progress["tokens"])
        total = end = max(tokens)
        giver = tokens.index(total)
        self.save()
        for i in (2, 1, 0):
            share = round(total * weights[i] / sum(weights))
            if share and not tokens[i]:
                tokens[i], end = share, end - share
                with open(self.files[giver].name, "rb") as source:
                    source.seek(self.width * end)
                    shutil.copyfileobj(source, self.files[i])  # `truncate` cuts off the splits after this one
                print(f"{SPLITS[i]} had no document, so it gets the last {share:,} tokens of {SPLITS[giver]}")
        tokens[giver] = end
        self.progress["tokens"] = tokens
        self.save()  # before the giver becomes shorter: a killed run must never have fewer tokens than its progress
        self.truncate()

    def finish(self, folder, meta):
        """Rename the folder: a data set under its final name is complete."""
        write_whole(self.folder / "meta.json", meta)
        os.rename(self.folder, folder)
        os.remove(folder / "progress.json")
        os.remove(folder / "prepare.lock")

    def close(self):
        for file in self.files:
            file.close()


def write_whole(path, value):
    """Write `value` as JSON. After a crash, `path` is either the complete old or the complete new file."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


# --- the command ------------------------------------------------------------------------------------------------------


def parse_arguments():
    """Return the parsed command line. Raises UserError."""
    parser = Parser("python prepare.py", allow_abbrev=False)
    parser.description = "Text to tokens on disk: DIR/{train,val,test}.bin, DIR/meta.json and a copy of the vocabulary."
    parser.epilog = "After a stop or a crash, run the same command again to resume. It does not change a finished DIR."
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help=f"files or folders of {KNOWN} (default: Python's own)")
    add("--out", metavar="DIR", help="output folder (default: data/SOURCE_TOKENIZER, for example data/stdlib_gpt2)")
    add("--tokenizer", default="gpt2", help="gpt2 (default), bytes ..., tokenizer.json, or vocab.json with merges.txt")
    add("--split", default="969,30,1", help="relative sizes of train,val,test (default: 969,30,1)")
    add("--workers", type=int, default=cores, metavar="N", help="processes that encode (default: one per core)")
    add("--text_key", default="text", metavar="KEY", help="key of the text in a JSON line (default: text)")
    add("--megatron", metavar="PREFIX", help="instead of text, convert encoded tokens: PREFIX.bin and PREFIX.idx")
    choices = ("stop", "skip")
    add("--on_error", choices=choices, default="stop", help="at a bad document (stop; the standard library: skip)")
    return parser.parse_args()


def prepare(args):
    """Check the options and make the data set."""
    with reading(f"--split={args.split}: should be three shares, the first above 0, like 969,30,1"):
        weights = train, val, test = [float(share) for share in args.split.split(",")]
        if not (train > 0 <= min(val, test)):
            raise ValueError("out of range")
    if args.workers < 1:
        raise UserError(f"--workers={args.workers}: should be a positive integer")
    if args.megatron and args.inputs:
        raise UserError(f"--megatron={args.megatron}: converts one data set; leave out the inputs {args.inputs}")
    tokenizer = load_tokenizer(args.tokenizer)  # raises its errors before any work
    files = [f"{args.megatron}.bin", f"{args.megatron}.idx"] if args.megatron else find_files(args.inputs)
    source = args.megatron or (args.inputs or ["stdlib"])[0]
    out = args.out or f"data/{Path(source).resolve().name.split('.')[0]}_{tokenizer.name}"
    made_from = {"tokenizer": tokenizer.name, "split": args.split, "text_key": args.text_key, "input": describe(files)}
    with explained(f"--out={out}"):
        folder = Path(os.path.realpath(out))
        if is_finished(folder, made_from):
            print(f"{out} is already finished: nothing to do")
        else:
            part = Path(f"{folder}.part")
            part.mkdir(parents=True, exist_ok=True)
            with locked(part / "prepare.lock", f"--out={out}: another prepare.py is writing this data set"):
                with contextlib.closing(Output(part, made_from, tokenizer.width)) as output:
                    make(args, tokenizer, files, weights, output, folder)
    config = "tiny" if tokenizer.name == "bytes" else "gpt2_124m"
    print(f"next: torchrun train.py configs/{config}.py --data_dir={out}")


def describe(files):
    """Identify the input: number of files, bytes, and a hash of the files' paths, sizes and modification times."""
    stats = [(os.path.abspath(path), os.stat(path)) for path in files]
    text = "".join(f"{path!r} {stat.st_size} {stat.st_mtime_ns}\n" for path, stat in stats)
    digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16)
    return {"files": len(files), "bytes": sum(stat.st_size for _, stat in stats), "hash": digest.hexdigest()}


def is_finished(folder, made_from):
    """Return True if `folder` has the data set of this command. Raises UserError or OSError if it has anything else."""
    if not (folder / "meta.json").exists():
        if folder.exists():
            folder.rmdir()  # an empty folder; DIR.part gets its name
        return False
    with reading(f"--out={folder}: its meta.json is not prepare.py's; choose another --out"):
        there = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["made_from"]
    if there != made_from:
        raise UserError(f"--out={folder}: contains another data set, made from {there}; choose another --out")
    return True


def make(args, tokenizer, files, weights, output, folder):
    """Read, encode and write all documents into `output`, and give it its final name."""
    progress, stop = output.progress, args.inputs and args.on_error == "stop"
    if args.megatron:
        results = blocks = megatron_blocks(args.megatron, tokenizer, weights)
    else:
        blocks = read_blocks(files, tokenizer)
        results = encoded_blocks(blocks, args.workers, args.tokenizer, args.text_key, weights)
    tqdm.monitor_interval = 0  # without tqdm's thread: see START_METHOD
    about = progress["made_from"]["input"]["bytes"] // PIECE  # blocks, if a character is a byte
    with contextlib.closing(results), tqdm(results, total=about, initial=progress["blocks"], unit="block") as bar:
        deque(itertools.islice(blocks, progress["blocks"]), maxlen=0)  # an earlier run finished these
        for tokens, documents, problems in bar:
            if problems and stop:
                output.save()
                raise UserError(f"{problems[0][1]}; correct it, or skip bad documents with --on_error=skip")
            output.write(tokens, documents, problems)
    if sum(progress["tokens"]) == sum(progress["documents"]):
        raise UserError(f"the input is empty: no text in {len(files):,} files; skipped {progress['skipped']}")
    output.fill_empty_splits(weights)
    if tokenizer.name != "bytes":
        copy(tokenizer, output.folder)
    tokens, documents = (dict(zip(SPLITS, progress[name], strict=True)) for name in ("tokens", "documents"))
    meta = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.n_vocab, "eot_id": tokenizer.eot_token}
    meta |= {"dtype": tokenizer.dtype, "tokens": tokens, "documents": documents}
    output.finish(folder, meta | {"skipped": progress["skipped"], "made_from": progress["made_from"]})
    for split in SPLITS:
        print(f"{split:<5} {tokens[split]:>16,} tokens {documents[split]:>12,} documents")
    print(f"skipped documents: {progress['skipped'] or 'none'}")


def main():
    # Exit at once, without a traceback. A job scheduler may send SIGTERM to the workers too. The exit of Python would
    # then wait for ever for blocks on their way to them.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    prepare(parse_arguments())


if __name__ == "__main__":
    exit_on_user_error(main)
