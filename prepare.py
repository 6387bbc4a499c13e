"""Text to tokens on disk: `DIR/{train,val,test}.bin` and `DIR/meta.json`.

    python prepare.py --tokenizer=bytes             # the standard library's sources -> data/stdlib_bytes
    python prepare.py corpus/ --tokenizer=gpt2      # a folder of text               -> data/corpus_gpt2
    python prepare.py 'shards/*.jsonl.gz' --out=data/web --text_key=content

A `.bin` file is nothing but uint16 numbers, little-endian, one per token, so that data.py can map it into memory.
A document is one text file or one JSON line. It is encoded as ordinary text (a literal "<|endoftext|>" in it is
thirteen characters like any others) and closed by the end-of-text token; an empty one is that token alone. Which split
it goes to is a hash of its position: the number of its file and the line on which it starts. A byte-order mark at the
start of a file is dropped, blank JSON lines are no documents, line ends stay as they are.

    this process                        one process per core              this process
    read, cut into blocks  --512 KiB--> decode, parse, encode --uint16--> append in the order of the input

Encoding is all the work: one core reads and cuts a gigabyte per second, and encodes ten megabytes. So the reader
touches bytes only, and at most a few blocks per worker are on their way at a time: memory does not depend on the size
of the input, and the output does not depend on the number of workers.

The one subtle thing is to cut a long document where the encoding does not notice; see `tokenizer.cut_points`. And the
one thing for a week-long run: after a crash the same command reads the blocks that were done once more, which is a
hundred times faster than encoding them, drops them, and goes on.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import unicodedata
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import tiktoken
from tqdm import tqdm

from documents import KNOWN, MAX_RUN, PIECE, BadInput, Part, document_text, find_files, read_blocks, split_suffixes
from errors import Parser, UserError, exit_on_user_error, locked
from tokenizer import load_tokenizer

SPLITS = ("train", "val", "test")
SAVE_EVERY = 5.0  # seconds of work that a crash may cost
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# fork starts at once and shares the vocabulary; it wants no threads here, so numpy is left to the workers. macOS can't.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


# --- encoding: blocks to tokens, in the workers ---------------------------------------------------------------------


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
    """What a worker does: a block's parts to tokens, each document in its split; bad ones counted and left out."""
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
            tokens[split].append(encode(encoding, text))
            if part.ends:
                tokens[split].append(endoftext)
                documents[split] += 1
    return Encoded([b"".join(pieces) for pieces in tokens], documents, skipped, examples)


def encode(encoding: tiktoken.Encoding, text: str) -> bytes:
    """encode_ordinary(text) as little-endian uint16, without making a Python integer of each id."""
    if encoding.name == "bytes":  # an id is a byte, and this is a byte with a zero after it
        return text.encode().decode("latin-1").encode("utf-16-le")
    return encoding.encode_to_numpy(text, disallowed_special=()).astype("<u2").tobytes()


def split_of(file: int, line: int, weights) -> int:
    """Which split (0 train, 1 val, 2 test) the document goes to that starts on this line of this file."""
    digest = hashlib.blake2b(f"{file}:{line}".encode(), digest_size=4).digest()
    point = int.from_bytes(digest, "little") / 2**32 * sum(weights)
    return 0 if point < weights[0] else 1 if point < weights[0] + weights[1] or not weights[2] else 2


def start_worker():
    """A worker leaves Ctrl-C to its parent, and dies with it, however the parent died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def follow():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def encoded_blocks(job: Job, blocks, workers: int):
    """Yields (block, Encoded) in the order of `blocks`; each of the `workers` processes has a few of them at hand."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(START_METHOD), initializer=start_worker)
    pending = deque()
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for the workers, until start_worker has set them right
        pool.submit(int)  # forks them
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for block in blocks:
            pending.append((block, pool.submit(encode_block, job, block)))
            if len(pending) > 4 * workers:
                block, future = pending.popleft()
                yield block, future.result()
        for block, future in pending:
            yield block, future.result()
    except BrokenProcessPool:
        remedy = f"the same command goes on where it was, a smaller --workers than {workers} needs less"
        raise UserError(f"a worker was killed, perhaps for lack of memory: {remedy}") from None
    finally:
        pool.shutdown(cancel_futures=True)


# ---- Writing: in order, and nothing half-written under a final name ------------------------------------------------


@dataclass
class Progress:
    """How far the .part files are whole. Saved every few seconds, so that a run that was killed can go on."""

    made_from: dict  # what the output depends on; another command must not go on with these files
    cut: str  # what the blocks depend on
    blocks: int = 0  # done
    tokens: list[int] = field(default_factory=lambda: [0, 0, 0])
    documents: list[int] = field(default_factory=lambda: [0, 0, 0])
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    whole: list[int] = field(default_factory=lambda: [0, 0, 0])  # tokens before the long document that is being written
    dropping: bool = False  # that document turned out bad: the rest of it is left out


class Output:
    """The three files that grow in `folder`, and the Progress beside them."""

    def __init__(self, folder: str, made_from: dict):
        self.folder, self.journal = folder, os.path.join(folder, "progress.json")
        for path in bin_paths(folder):  # killed between the renames of finish(): take them back
            if os.path.exists(path) and not os.path.exists(path + ".part"):
                os.rename(path, path + ".part")
        self.files = [open(path + ".part", "ab", buffering=0) for path in bin_paths(folder)]
        self.progress = self.load_progress(made_from)
        self.truncate()
        self.saved_at = time.monotonic()

    def load_progress(self, made_from: dict) -> Progress:
        """What an earlier run of the same command has done; nothing where there was none or its files are not whole."""
        fresh = Progress(made_from, cut=f"PIECE {PIECE}, MAX_RUN {MAX_RUN}, Unicode {unicodedata.unidata_version}")
        try:
            progress = Progress(**json.loads(Path(self.journal).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return fresh
        # a file that is opened to append is at its end, so tell() is its size
        same = (progress.made_from, progress.cut) == (fresh.made_from, fresh.cut)
        if not same or any(file.tell() < 2 * n for file, n in zip(self.files, progress.tokens, strict=True)):
            print(f"{self.folder}: what is unfinished there is another command's or damaged, starting over")
            return fresh
        if progress.blocks:
            print(f"{self.folder}: going on after {sum(progress.tokens):,} tokens")
        return progress

    def write(self, block: list[Part], encoded: Encoded):
        """Appends what a block became. A long document that turns out bad is taken back from its beginning on."""
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
            p.tokens[i] += len(encoded.tokens[i]) // 2
            p.documents[i] += encoded.documents[i]
        if time.monotonic() - self.saved_at > SAVE_EVERY:
            self.save()

    def save(self):
        """Everything up to here survives a crash, even of the machine."""
        for file in self.files:
            os.fsync(file.fileno())
        write_whole(self.journal, asdict(self.progress))
        self.saved_at = time.monotonic()

    def truncate(self):
        for file, n in zip(self.files, self.progress.tokens, strict=True):
            os.ftruncate(file.fileno(), 2 * n)

    def fill_empty_splits(self, weights):
        """A split that should have something and has nothing gets its share of train's last tokens.

        (One big text file is one document, and goes to one split; should that not be train, its tokens are shared out.)
        """
        tokens = self.progress.tokens
        giver = 0 if tokens[0] else max(1, 2, key=lambda i: tokens[i])
        total = end = tokens[giver]
        for i in (2, 1, 0):
            share = round(total * weights[i] / sum(weights))
            if share and not tokens[i]:
                tokens[i], end = share, end - share
                with open(self.files[giver].name, "rb") as source:
                    source.seek(2 * end)
                    for at in range(0, 2 * share, 1 << 20):
                        append(self.files[i], source.read(min(1 << 20, 2 * share - at)))
                print(f"{SPLITS[i]} had no document: it gets the last {share:,} tokens of {SPLITS[giver]}")
        tokens[giver] = end
        self.truncate()

    def finish(self, meta: dict):
        """Gives the files their names, meta.json last: where it is, everything is."""
        for file, path in zip(self.files, bin_paths(self.folder), strict=True):
            os.fsync(file.fileno())
            os.rename(file.name, path)
        write_whole(os.path.join(self.folder, "meta.json"), meta)
        os.remove(self.journal)

    def discard(self):
        for path in [self.journal, *(file.name for file in self.files)]:
            os.remove(path)

    def close(self):
        for file in self.files:
            file.close()


def bin_paths(folder: str) -> list[str]:
    return [os.path.join(folder, f"{split}.bin") for split in SPLITS]


def append(file, data: bytes):
    """Unbuffered files may take less than they are given; what they can't take raises here, not at some later flush."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def write_whole(path: str, value: dict):
    """`value` as JSON; at every moment `path` holds the old file or the new one."""
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


# ---- The command -------------------------------------------------------------------------------------------------


def parse_arguments():
    """The command line. Raises UserError."""
    parser = Parser("python prepare.py", allow_abbrev=False)
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=120)
    parser.description = "Text to tokens on disk: DIR/{train,val,test}.bin (uint16) and DIR/meta.json."
    parser.epilog = "The same command again goes on where it was stopped or killed; on a finished DIR it does nothing."
    add = parser.add_argument
    sources = f"files, 'globs' or folders of {KNOWN}"
    skips = "skip for the standard library, where some files are bad on purpose"
    add("inputs", nargs="*", metavar="INPUT", help=f"{sources} (default: the standard library)")
    add("--out", metavar="DIR", help="where to write (default: data/SOURCE_TOKENIZER, as in data/stdlib_gpt2)")
    add("--tokenizer", default="gpt2", help="gpt2, bytes, r50k_base ... (default: gpt2; bytes needs no download)")
    add("--split", default="969,30,1", help="shares of train,val,test (default: 969,30,1)")
    add("--workers", metavar="N", help="processes that encode (default: one per core)")
    add("--text_key", default="text", metavar="KEY", help="where a JSON line has its text (default: text)")
    add("--on_error", metavar="stop|skip", help=f"what to do about a bad document (default: stop; {skips})")
    return parser.parse_args()


def parse_split(value: str) -> list[float]:
    try:
        weights = [float(share) for share in value.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or not all(0 <= w < float("inf") for w in weights) or not weights[0]:
        raise UserError(f"--split={value}: should be three shares, train's not zero, like 969,30,1")
    return weights


def parse_workers(value: str | None) -> int:
    if value is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not value.isdecimal() or not int(value):
        raise UserError(f"--workers={value}: should be a whole number from 1 on")
    return int(value)


def default_out(inputs: list[str], files: list[str], tokenizer: str) -> str:
    """data/SOURCE_TOKENIZER: the standard library is "stdlib", a/b.jsonl.gz is "b", it and two more "b_and_2_more"."""
    if not inputs:
        source = "stdlib"
    elif len(inputs) == 1 and os.path.isdir(inputs[0]):
        source = os.path.basename(os.path.abspath(inputs[0]))
    else:
        source = os.path.basename(split_suffixes(files[0])[0])
        source += f"_and_{len(files) - 1}_more" if len(files) > 1 else ""
    return os.path.join("data", f"{source}_{tokenizer}")


def describe(files: list[str]) -> dict:
    """What tells one input from another: number of files, bytes, and a hash of names, sizes and times."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    for path in files:
        with contextlib.suppress(OSError):  # a link to nowhere is reported when it is read
            stat = os.stat(path)
            digest.update(f"{os.path.abspath(path)!r} {stat.st_size} {stat.st_mtime_ns}\n".encode())
            size += stat.st_size
    return {"files": len(files), "bytes": size, "hash": digest.hexdigest()}


def is_finished(out: str, made_from: dict) -> bool:
    """Whether `out` holds what this command would make. Anything else that is there is refused, never overwritten."""
    remedy = "remove it, or choose another --out"
    try:
        meta = json.loads(Path(out, "meta.json").read_text(encoding="utf-8"))
        there, tokens = meta["made_from"], meta["tokens"]
    except FileNotFoundError:
        strangers = [os.path.basename(path) for path in bin_paths(out) if os.path.exists(path)]
        if strangers and not os.path.exists(os.path.join(out, "progress.json")):
            raise UserError(f"--out={out}: holds a {strangers[0]} but no meta.json; {remedy}") from None
        return False
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--out={out}: its meta.json is not prepare.py's; {remedy}") from None
    for split, path in zip(SPLITS, bin_paths(out), strict=True):
        if not os.path.exists(path) or os.path.getsize(path) != 2 * tokens[split]:
            raise UserError(f"--out={out}: {split}.bin is not as meta.json says; remove the folder to make it again")
    for key, value in made_from.items():
        if there.get(key) != value:
            change = f"made with --{key}={there.get(key)}, not {value}"
            if key == "input":
                change = "made from other files, or earlier versions of them"
            raise UserError(f"--out={out}: holds another data set, {change}; {remedy}")
    return True


def prepare(args):
    """Checks the options, makes the data set, says what came out."""
    weights, workers = parse_split(args.split), parse_workers(args.workers)
    on_error = args.on_error or ("stop" if args.inputs else "skip")
    if on_error not in ("stop", "skip"):
        raise UserError(f"--on_error={on_error}: should be stop or skip")
    load_tokenizer(args.tokenizer)  # before anything is read or written
    files = find_files(args.inputs)
    out = args.out or default_out(args.inputs, files, args.tokenizer)
    split = ",".join(f"{weight:.12g}" for weight in weights)
    made_from = {"tokenizer": args.tokenizer, "split": split, "text_key": args.text_key, "input": describe(files)}
    try:
        if is_finished(out, made_from):
            print(f"{out} is finished already: nothing to do")
            return
        os.makedirs(out, exist_ok=True)
        lock = os.path.join(out, "prepare.lock")
        with locked(lock, f"--out={out}: another prepare.py is writing there"):
            if not is_finished(out, made_from):  # by another, just now
                with contextlib.closing(Output(out, made_from)) as output:
                    make(files, Job(args.tokenizer, args.text_key, weights), output, workers, on_error)
            os.remove(lock)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"--out={out}: {why}; what is written is kept, the same command goes on with it") from None
    config = "tiny" if args.tokenizer == "bytes" else "gpt2_124m"
    print(f"next: torchrun train.py configs/{config}.py" + (f" --data_dir={out}" if args.out or args.inputs else ""))


def make(files: list[str], job: Job, output: "Output", workers: int, on_error: str):
    """Reads, encodes and writes everything into `output`."""
    encoding, progress = load_tokenizer(job.tokenizer), output.progress
    blocks = read_blocks(files, job.text_key, encoding._pat_str)
    began, before = time.monotonic(), sum(progress.tokens)
    tqdm.monitor_interval = 0  # its thread would be there before the workers are forked
    bar = tqdm(total=progress.made_from["input"]["bytes"], unit="B", unit_scale=True, smoothing=0.05)
    with bar, contextlib.closing(encoded_blocks(job, blocks, workers)) as results:
        for block in itertools.islice(blocks, progress.blocks):  # done by an earlier run
            bar.update(sum(part.used for part in block))
        for block, encoded in results:
            if encoded.examples and on_error == "stop":
                output.save()
                raise UserError(f"{encoded.examples[0]}; mend it, or leave such documents out with --on_error=skip")
            output.write(block, encoded)
            bar.update(sum(part.used for part in block))
    output.save()
    skipped = sum(progress.skipped.values())
    if sum(progress.tokens) == sum(progress.documents):
        output.discard()
        first = f", the first of {skipped:,} that were skipped: {progress.examples[0]}" if skipped else ""
        raise UserError(f"the input is empty: no text in {len(files):,} files{first}")
    output.fill_empty_splits(job.split)
    meta = {
        "tokenizer": job.tokenizer,
        "vocab_size": encoding.n_vocab,
        "eot_id": encoding.eot_token,
        "dtype": "uint16",
        "tokens": dict(zip(SPLITS, progress.tokens, strict=True)),
        "documents": dict(zip(SPLITS, progress.documents, strict=True)),
        "skipped": progress.skipped,
        "made_from": progress.made_from,
    }
    output.finish(meta)
    for split, tokens, documents in zip(SPLITS, progress.tokens, progress.documents, strict=True):
        print(f"{split:<5} {tokens:>16,} tokens {documents:>12,} documents")
    if skipped:
        print(f"skipped {skipped:,}:", ", ".join(f"{n:,} {reason}" for reason, n in progress.skipped.items()))
        print(*progress.examples, sep="\n", file=sys.stderr)  # which prints any file name there can be
    seconds = time.monotonic() - began
    print(f"{output.folder}: whole, in {seconds:.1f} s, {(sum(progress.tokens) - before) / seconds:,.0f} tokens/s")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does it: quietly, and to go on with
    prepare(parse_arguments())


if __name__ == "__main__":
    exit_on_user_error(main)
