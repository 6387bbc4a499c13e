"""Convert text to tokens on disk: `DIR/{train,val,test}.bin` and `DIR/meta.json`.

    python prepare.py --tokenizer=bytes             # the standard library's sources -> data/stdlib_bytes
    python prepare.py corpus/ --tokenizer=gpt2      # a folder of text               -> data/corpus_gpt2
    python prepare.py 'shards/*.jsonl.gz' --out=data/web --text_key=content
    python prepare.py corpus/ --tokenizer=dataset/gpt2-vocab.json     # or another vocabulary (vocabulary.py)
    python prepare.py --megatron=PREFIX --out=data/web    # PREFIX.bin and .idx of Megatron-LM (indexed.py)

A `.bin` file contains only the token ids as little-endian uint16 (above 65,536 ids: uint32; meta.json has the dtype),
so data.py can map it into memory. DIR also gets a copy of the vocabulary, tokenizer.json, except for `bytes`.

A document is one text file or one JSON line. It is encoded as ordinary text: the characters "<|endoftext|>" in a
document have no special meaning. The end-of-text token follows each document; an empty document is only this token. A
hash of the document's position (index of its file, line of its start) selects its split. A byte-order mark at the start
of a file is removed, blank JSON lines are ignored, and line ends do not change.

    this process                        one process per core              this process
    read, cut into blocks  --512 KiB--> decode, parse, encode --tokens--> append in the order of the input

Encoding takes nearly all the time. One core reads and cuts 1 GB per second, but encodes only 10 MB per second. So the
main process handles only bytes. At most a few blocks per worker are in memory. The memory does not depend on the size
of the input, and the output does not depend on the number of workers.

A long document is cut only where the cut does not change its tokens (`tokenizer.cut_points`). After a crash, the same
command resumes: it reads the finished blocks again without encoding them, which is a hundred times faster, and
continues with the next block.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import unicodedata
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from tqdm import tqdm

from documents import KNOWN, MAX_RUN, PIECE, BadInput, Part, document_text, find_files, read_blocks, split_suffixes
from errors import Parser, UserError, exit_on_user_error, explained, locked, parse_json, regular
from tokenizer import Tokenizer, copy, load_tokenizer
from vocabulary import COPY

SPLITS = ("train", "val", "test")
WIDTH = {"uint16": 2, "uint32": 4}  # bytes of a token
SAVE_EVERY = 5.0  # seconds between two saves; a crash loses about this much work
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# fork is fast and shares the vocabulary, but it needs a parent without threads. Importing numpy may start threads, so
# only the workers import it. macOS needs spawn.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


# --- encoding: blocks to tokens, in the workers ---------------------------------------------------------------------


class Job(NamedTuple):
    """The options that a worker needs."""

    tokenizer: str
    text_key: str
    split: tuple[float, ...]


class Encoded(NamedTuple):
    """The result of a worker for one block. tokens and documents have one entry per split, in the order of SPLITS."""

    tokens: list[bytes]
    documents: list[int]
    skipped: Counter  # reason -> number of bad documents
    examples: list[str]  # messages of the first three bad documents


def encode_block(job: Job, block: list[Part]) -> Encoded:
    """Encode the documents of a block, each into its split. Count bad documents and leave them out."""
    tokenizer = load_tokenizer(job.tokenizer)
    endoftext = tokenizer.eot_token.to_bytes(WIDTH[tokenizer.dtype], "little")
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
            tokens[split].append(encode(tokenizer, text))
            if part.ends:
                tokens[split].append(endoftext)
                documents[split] += 1
    return Encoded([b"".join(pieces) for pieces in tokens], documents, skipped, examples)


def encode(tokenizer: Tokenizer, text: str) -> bytes:
    """Return the tokens of `text` as little-endian integers of the tokenizer's dtype."""
    if tokenizer.name == "bytes":  # the id is the byte; UTF-16 adds a zero byte. Workers then need no numpy
        return text.encode().decode("latin-1").encode("utf-16-le")
    return tokenizer.encode(text).astype(f"<u{WIDTH[tokenizer.dtype]}", copy=False).tobytes()


def split_of(file: int, line: int, weights) -> int:
    """Return the split (0 train, 1 val, 2 test) of the document that starts on `line` of the file with index `file`."""
    digest = hashlib.blake2b(f"{file}:{line}".encode(), digest_size=4).digest()
    point = int.from_bytes(digest, "little") / 2**32 * sum(weights)
    return 0 if point < weights[0] else 1 if point < weights[0] + weights[1] or not weights[2] else 2


def start_worker():
    """Set up a worker: it ignores Ctrl-C, and it exits when its parent process ends for any reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def follow():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def encoded_blocks(job: Job, blocks, workers: int):
    """Yield (block, Encoded) in the order of `blocks`. Up to 4 blocks per worker wait in the pool."""
    with explained("/dev/shm, the shared memory that the workers need"):
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context(START_METHOD), initializer=start_worker)
    pending = deque()
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # also blocked in the workers, until start_worker
        with explained(f"--workers={workers}"):
            pool.submit(int)  # starts the workers
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for block in blocks:
            pending.append((block, pool.submit(encode_block, job, block)))
            if len(pending) > 4 * workers:
                block, future = pending.popleft()
                yield block, future.result()
        for block, future in pending:
            yield block, future.result()
    except BrokenProcessPool:
        remedy = f"run the same command again to resume; fewer --workers than {workers} need less memory"
        raise UserError(f"a worker was killed, perhaps for lack of memory: {remedy}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def converted_blocks(job: Job, blocks, data):
    """Yield (block, Encoded) for the blocks of `data`, an `indexed.Indexed`. Its documents are already encoded."""
    tokenizer = load_tokenizer(job.tokenizer)
    dtype = f"<u{WIDTH[tokenizer.dtype]}"
    for block in blocks:
        # document d has the position of line d + 1 of the input
        converted = data.convert(block[0], tokenizer, job.tokenizer, lambda d: split_of(0, d + 1, job.split), dtype)
        yield block, Encoded(*converted, Counter(), [])


# ---- Writing: in the order of the input; a file gets its final name when it is complete ----------------------------


@dataclass
class Progress:
    """Counts of the tokens and documents in the unfinished .bin files (`train.bin.part` ...), and of skipped documents.

    Progress is saved every few seconds, so a killed run can be resumed.
    """

    made_from: dict  # options and inputs; a command with other options or inputs must not resume
    cut: str  # settings that cut the blocks; a run with other settings must not resume
    blocks: int = 0  # finished blocks
    tokens: list[int] = field(default_factory=lambda: [0, 0, 0])
    documents: list[int] = field(default_factory=lambda: [0, 0, 0])
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    whole: list[int] = field(default_factory=lambda: [0, 0, 0])  # tokens before the current long document
    dropping: bool = False  # the current long document is bad: leave out its other pieces


class Output:
    """The three .part files in `folder`, and the Progress file progress.json. width: bytes of a token."""

    def __init__(self, folder: str, made_from: dict, width: int = 2):
        self.folder, self.journal, self.width = folder, os.path.join(folder, "progress.json"), width
        for path in bin_paths(folder):  # if a run was killed in finish(), undo its renames
            if os.path.exists(path) and not os.path.exists(path + ".part"):
                os.rename(path, path + ".part")
        self.files = [open(path + ".part", "ab", buffering=0) for path in bin_paths(folder)]
        self.progress = self.load_progress(made_from)
        self.truncate()
        self.saved_at = time.monotonic()

    def load_progress(self, made_from: dict) -> Progress:
        """Return the Progress of an earlier run of the same command, or a new one if its files are unusable."""

        def count(n):
            return type(n) is int and n >= 0

        fresh = Progress(made_from, cut_settings())
        try:
            progress = Progress(**parse_json(regular(self.journal).read_text(encoding="utf-8")))
            lists = [progress.tokens, progress.documents, progress.whole]
            same = (progress.made_from, progress.cut) == (fresh.made_from, fresh.cut)
            same &= all(len(counts) == 3 and all(map(count, counts)) for counts in lists) and count(progress.blocks)
            same &= all(map(count, progress.skipped.values())) and all(type(text) is str for text in progress.examples)
            # tell() is the file's size, because append mode starts at the end
            same &= all(file.tell() >= self.width * n for file, n in zip(self.files, progress.tokens, strict=True))
        except FileNotFoundError:
            return fresh
        except (OSError, ValueError, TypeError, AttributeError):
            same = False
        if not same:
            print(f"{self.folder}: its unfinished files are damaged or from another command; starting over")
            return fresh
        if progress.blocks:
            print(f"{self.folder}: resuming after {sum(progress.tokens):,} tokens")
        return progress

    def write(self, block: list[Part], encoded: Encoded):
        """Append the tokens of a block. If a piece of a long document is bad, remove the whole document."""
        p = self.progress
        p.blocks += 1
        if block[0].begins:
            p.whole, p.dropping = list(p.tokens), False
        if p.dropping:
            return
        p.skipped = dict(Counter(p.skipped) + encoded.skipped)
        p.examples = (p.examples + encoded.examples)[:3]
        if encoded.skipped and not (block[0].begins and block[-1].ends):
            p.tokens, p.dropping = list(p.whole), True
            self.truncate()
            return
        for i, file in enumerate(self.files):
            append(file, encoded.tokens[i])
            p.tokens[i] += len(encoded.tokens[i]) // self.width
            p.documents[i] += encoded.documents[i]
        if time.monotonic() - self.saved_at > SAVE_EVERY:
            self.save()

    def save(self):
        """Save all tokens so far and the Progress. Both survive a crash, even of the machine (fsync)."""
        for file in self.files:
            os.fsync(file.fileno())
        write_whole(self.journal, asdict(self.progress))
        self.saved_at = time.monotonic()

    def truncate(self):
        for file, n in zip(self.files, self.progress.tokens, strict=True):
            os.ftruncate(file.fileno(), self.width * n)

    def fill_empty_splits(self, weights):
        """Fill each empty split with its share (--split) of train's tokens, taken from the end of train.

        Example: one big text file is one document, so all its tokens go to one split. If train is empty, the tokens
        come from the larger of the other two splits.
        """
        tokens = list(self.progress.tokens)
        giver = 0 if tokens[0] else max(1, 2, key=lambda i: tokens[i])
        total = end = tokens[giver]
        for i in (2, 1, 0):
            share = round(total * weights[i] / sum(weights))
            if share and not tokens[i]:
                tokens[i], end = share, end - share
                with open(self.files[giver].name, "rb") as source:
                    source.seek(self.width * end)
                    for at in range(0, self.width * share, 1 << 20):
                        append(self.files[i], source.read(min(1 << 20, self.width * share - at)))
                print(f"{SPLITS[i]} had no document, so it gets the last {share:,} tokens of {SPLITS[giver]}")
        tokens[giver] = end
        self.progress.tokens = tokens
        self.save()  # before the giver becomes shorter: a killed run must never have fewer tokens than its Progress
        self.truncate()

    def finish(self, meta: dict):
        """Rename the files to their final names and write meta.json last. A folder with meta.json is complete."""
        for file, path in zip(self.files, bin_paths(self.folder), strict=True):
            os.fsync(file.fileno())
            os.rename(file.name, path)
        write_whole(os.path.join(self.folder, "meta.json"), meta)
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.journal)

    def discard(self):
        for path in [self.journal, *(file.name for file in self.files)]:
            os.remove(path)

    def close(self):
        for file in self.files:
            file.close()


def bin_paths(folder: str) -> list[str]:
    return [os.path.join(folder, f"{split}.bin") for split in SPLITS]


def cut_settings() -> str:
    """Return the settings that cut the input into blocks."""
    return f"PIECE {PIECE}, MAX_RUN {MAX_RUN}, Unicode {unicodedata.unidata_version}"


def append(file, data: bytes):
    """Write all of `data`: one call of `write` may write less. Without a buffer, a full disk raises an error here."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def write_whole(path: str, value: dict):
    """Write `value` as JSON. After a crash, `path` is either the complete old or the complete new file."""
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


# ---- The command -------------------------------------------------------------------------------------------------


def parse_arguments():
    """Return the parsed command line. Raises UserError."""
    parser = Parser("python prepare.py", allow_abbrev=False)
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=120)
    parser.description = "Text to tokens on disk: DIR/{train,val,test}.bin, DIR/meta.json and a copy of the vocabulary."
    parser.epilog = "After a stop or a crash, run the same command again to resume. It does not change a finished DIR."
    add = parser.add_argument
    sources = f"files, 'globs' or folders of {KNOWN}"
    skips = "skip for the standard library, where some test files are invalid on purpose"
    add("inputs", nargs="*", metavar="INPUT", help=f"{sources} (default: the standard library)")
    add("--out", metavar="DIR", help="output folder (default: data/SOURCE_TOKENIZER, for example data/stdlib_gpt2)")
    kinds = "gpt2, bytes, r50k_base ..., or a folder or file: vocab.json with merges.txt, tokenizer.json, NAME.tiktoken"
    add("--tokenizer", default="gpt2", help=f"{kinds} (default: gpt2; bytes needs no download)")
    add("--split", default="969,30,1", help="relative sizes of train,val,test (default: 969,30,1)")
    add("--workers", metavar="N", help="number of processes that encode (default: one per core)")
    add("--text_key", default="text", metavar="KEY", help="key of the text in a JSON line (default: text)")
    add("--megatron", metavar="PREFIX", help="instead of text, convert encoded tokens: PREFIX.bin and PREFIX.idx")
    add("--on_error", metavar="stop|skip", help=f"stop at a bad document, or skip it (default: stop; {skips})")
    return parser.parse_args()


def parse_split(value: str) -> list[float]:
    try:
        weights = [float(share) for share in value.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or not all(0 <= w < 1e100 for w in weights) or not weights[0]:
        raise UserError(f"--split={value}: should be three shares, the first above zero, like 969,30,1")
    return weights


def parse_workers(value: str | None) -> int:
    if value is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not re.fullmatch(r"0*[1-9]\d{0,2}", value, re.ASCII):  # a thousand processes may fill the memory
        raise UserError(f"--workers={value}: should be a positive integer below 1,000")
    return int(value)


def open_megatron(args):
    """Return the checked `indexed.Indexed` of --megatron. Raise UserError for an option that is only for text."""
    from indexed import Indexed  # not at the top, because it imports numpy: see START_METHOD

    for option in ("inputs", "workers", "text_key", "on_error"):
        if getattr(args, option) not in ([], None, "text"):
            name = f"input {args.inputs[0]}" if option == "inputs" else f"--{option}={getattr(args, option)}"
            raise UserError(f"{name}: is for text, but --megatron={args.megatron} is already encoded; leave one out")
    data = Indexed(args.megatron)
    data.check()
    return data


def default_out(inputs: list[str], files: list[str], tokenizer: str) -> str:
    """Return data/SOURCE_TOKENIZER. SOURCE: "stdlib", or the name of the folder or first file ("b", "b_and_2_more")."""
    if not inputs:
        source = "stdlib"
    elif len(inputs) == 1 and os.path.isdir(inputs[0]):
        source = os.path.basename(os.path.abspath(inputs[0]))
    else:
        source = os.path.basename(split_suffixes(files[0])[0])
        source += f"_and_{len(files) - 1}_more" if len(files) > 1 else ""
    return os.path.join("data", f"{source}_{tokenizer}")


def describe(files: list[str]) -> dict:
    """Identify the input: number of files, bytes, and a hash of the files' paths, sizes and modification times."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    for path in files:
        with contextlib.suppress(OSError):  # a broken link is reported later, when it is read
            stat = os.stat(path)
            digest.update(f"{os.path.abspath(path)!r} {stat.st_size} {stat.st_mtime_ns}\n".encode())
            size += stat.st_size
    return {"files": len(files), "bytes": size, "hash": digest.hexdigest()}


def is_finished(out: str, made_from: dict) -> bool:
    """Return True if `out` has the complete data set of this command. Raise UserError if it has another one."""
    remedy = "remove it, or choose another --out"
    try:
        meta = parse_json(regular(os.path.join(out, "meta.json")).read_text(encoding="utf-8"))
        there, width = dict(meta["made_from"]), WIDTH[meta["dtype"]]
        sizes = [width * int(meta["tokens"][split]) for split in SPLITS]
    except FileNotFoundError:
        ours = [*map(os.path.basename, bin_paths(out)), *COPY]
        strangers = [name for name in ours if os.path.exists(os.path.join(out, name))]
        if strangers and not os.path.exists(os.path.join(out, "progress.json")):
            raise UserError(f"--out={out}: contains a {strangers[0]} but no meta.json; {remedy}") from None
        return False
    except (ValueError, KeyError, TypeError, OverflowError):
        raise UserError(f"--out={out}: its meta.json was not written by prepare.py; {remedy}") from None
    for split, path, size in zip(SPLITS, bin_paths(out), sizes, strict=True):
        if not os.path.exists(path) or os.path.getsize(path) != size:
            raise UserError(f"--out={out}: {split}.bin does not match meta.json; remove the folder and run again")
    for key, value in made_from.items():
        if there.get(key) != value:
            change = f"made with --{key}={there.get(key)}, not {value}"
            if key == "input":
                change = "made from other files or from earlier versions of these files"
            raise UserError(f"--out={out}: contains another data set, {change}; {remedy}")
    with contextlib.suppress(OSError):
        os.remove(os.path.join(out, "progress.json"))  # from a run that was killed after it wrote meta.json
    return True


def prepare(args):
    """Check the options and make the data set."""
    weights, workers = parse_split(args.split), parse_workers(args.workers)
    on_error = args.on_error or ("stop" if args.inputs else "skip")
    if on_error not in ("stop", "skip"):
        raise UserError(f"--on_error={on_error}: should be stop or skip")
    tokenizer = load_tokenizer(args.tokenizer)  # raises its errors before any work
    data = None
    if args.megatron is None:
        files = find_files(args.inputs)
        out = args.out or default_out(args.inputs, files, tokenizer.name)
    else:
        data = open_megatron(args)
        files = [data.bin, data.idx]
        out = args.out or default_out([data.bin], [data.bin], tokenizer.name)
    split = ",".join(f"{weight:.12g}" for weight in weights)
    made_from = {"tokenizer": tokenizer.name, "split": split, "text_key": args.text_key, "input": describe(files)}
    try:
        if is_finished(out, made_from):
            print(f"{out} is already finished: nothing to do")
            return
        os.makedirs(out, exist_ok=True)
        lock = os.path.join(out, "prepare.lock")
        with locked(lock, f"--out={out}: another prepare.py is writing to this folder"):
            if not is_finished(out, made_from):  # another run may have finished before this run got the lock
                with contextlib.closing(Output(out, made_from, WIDTH[tokenizer.dtype])) as output:
                    make(files, Job(args.tokenizer, args.text_key, weights), output, workers, on_error, data)
            os.remove(lock)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"--out={out}: {why}; the files are kept; run the same command again to resume") from None
    named = args.out or args.inputs or data or tokenizer.name not in ("bytes", "gpt2")
    print(next_command(tokenizer, out if named else None))


def next_command(tokenizer: Tokenizer, out: str | None) -> str:
    config = "tiny" if tokenizer.name == "bytes" else "gpt2_124m"
    sizes = f" --vocab_size={tokenizer.n_vocab}" if tokenizer.n_vocab not in (257, 50257) else ""
    return f"next: torchrun train.py configs/{config}.py" + (f" --data_dir={out}" if out else "") + sizes


def make(files: list[str], job: Job, output: "Output", workers: int, on_error: str, data=None):
    """Read, encode and write all documents into `output`. data: an `indexed.Indexed` instead of text."""
    tokenizer, progress = load_tokenizer(job.tokenizer), output.progress
    blocks = data.blocks() if data else read_blocks(files, job.text_key, tokenizer.pattern)
    began, before = time.monotonic(), sum(progress.tokens)
    tqdm.monitor_interval = 0  # without tqdm's thread: see START_METHOD
    bar = tqdm(total=progress.made_from["input"]["bytes"], unit="B", unit_scale=True, smoothing=0.05)
    work = converted_blocks(job, blocks, data) if data else encoded_blocks(job, blocks, workers)
    with bar, contextlib.closing(work) as results:
        for block in itertools.islice(blocks, progress.blocks):  # finished by an earlier run
            bar.update(sum(part.used for part in block))
        for block, encoded in results:
            if encoded.examples and on_error == "stop":
                output.save()
                raise UserError(f"{encoded.examples[0]}; correct it, or skip bad documents with --on_error=skip")
            output.write(block, encoded)
            bar.update(sum(part.used for part in block))
    output.save()
    skipped = sum(progress.skipped.values())
    if sum(progress.tokens) == sum(progress.documents):
        output.discard()
        first = f"; skipped {skipped:,}, the first: {progress.examples[0]}" if skipped else ""
        raise UserError(f"the input is empty: no text in {len(files):,} files{first}")
    if data and (lacking := sum(progress.tokens) - data.num_tokens):
        lacks = f"{lacking:,} of {data.num_documents:,} documents did not end with the end-of-text token"
        print(f"{lacks} (Megatron-LM's --append-eod); it was appended to them")
    output.fill_empty_splits(job.split)
    meta = {
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.n_vocab,
        "eot_id": tokenizer.eot_token,
        "dtype": tokenizer.dtype,
        "tokens": dict(zip(SPLITS, progress.tokens, strict=True)),
        "documents": dict(zip(SPLITS, progress.documents, strict=True)),
        "skipped": progress.skipped,
        "made_from": progress.made_from,
    }
    if tokenizer.name != "bytes":
        copy(tokenizer, output.folder)
    output.finish(meta)
    for split, tokens, documents in zip(SPLITS, progress.tokens, progress.documents, strict=True):
        print(f"{split:<5} {tokens:>16,} tokens {documents:>12,} documents")
    if skipped:
        print(f"skipped {skipped:,}:", ", ".join(f"{n:,} {reason}" for reason, n in progress.skipped.items()))
        print(*progress.examples, sep="\n")
    seconds = time.monotonic() - began
    print(f"{output.folder}: complete in {seconds:.1f} s, {(sum(progress.tokens) - before) / seconds:,.0f} tokens/s")


def main():
    # Exit at once, without a traceback. A job scheduler may send SIGTERM to the workers too. The exit of Python would
    # then wait for ever for blocks on their way to them.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    prepare(parse_arguments())


if __name__ == "__main__":
    exit_on_user_error(main)
