"""Save and load checkpoints. They contain whole tensors, so any layout can load the checkpoint of any other layout.

    out/tiny/step_300/
        index.json                        shapes, dtype, configuration, counters, sums of the other files, ...
        block0.qkv.weight                 the whole tensor, C order, master dtype, no header
        block0.qkv.weight.moment0  ...    AdamW's two moments
        tokenizer.json  ...               the data set's copy of the vocabulary (none for `bytes`)

A rank has a shard of each bucket. The shard may begin and end in the middle of a parameter, and the parameter may be
cut over tp. So a rank's elements are a list of *runs* (consecutive elements) in the whole tensor; the function `runs`
computes this list. All ranks write their runs into the same file. The ranks of a later layout read their own runs. No
conversion tool is necessary.

Every rank writes into the folder `step_N.writing` and flushes its files. Then rank 0 renames the folder to `step_N`, so
the latest checkpoint, the `step_N` with the largest N, is always complete. If a run is killed, or if its disk is full,
it leaves a `step_N.writing`, which the next start removes. No file is unpickled, so loading a checkpoint runs no code
from it.

Every byte that a rank uses is verified, in any layout. The checksum of an array reads the file as words w_0, w_1, ...
of 8 bytes:

    S = c_0 w_0 + c_1 w_1 + ...  mod 2^64        c_i = TABLE[i mod BLOCK] * G^(i div BLOCK), an odd number

Each rank computes the terms of its own runs, and the terms of all ranks are added. An odd c_i has an inverse mod 2^64,
so a change of one word always changes S. The c_i are pseudo-random, so S of several changed words stays equal only by
chance (multilinear hashing; Carter and Wegman, "Universal classes of hash functions", 1979). index.json has the sum of
every array and the CRC-32 of every other file. Its last entry is the CRC-32 of its own bytes before this entry.

Writing with shared memmaps would be wrong: on network file systems, two hosts that write to the same page lose updates.
"""

import json
import math
import os
import re
import shutil
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from data import mix
from errors import UserError, explained
from parallel.comm import agree, gather_objects

# These must be equal in the run and in the checkpoint. convert.py leaves some of them open.
MUST_MATCH = (
    "num_layers hidden_size num_attention_heads seq_length vocab_size activation experts seed optimizer tokenizer"
)
REMEDY = "use another checkpoint: remove this one, or set --resume"
THREADS = 4  # of a rank: a flush waits for the disk, so more threads than cores are useful
BLOCK = 1 << 17  # words in TABLE: 1 MiB, which stays in a core's cache
G = 0x9E3779B97F4A7C15
TABLE = mix(np.arange(1, BLOCK + 1, dtype=np.uint64)) | 1


# --- runs and sums ----------------------------------------------------------------------------------------------------


def runs(spec, begin, end, tp_rank, tp):
    """Yield the runs of a rank: the places of its elements [begin, end) in the whole tensor.

    begin and end count elements of the rank's flattened local tensor. Each run is (local offset, whole offset, length),
    in elements, in order. If the tensor is cut along `tp_dim`, its shape can be written as [outer, tp, inner]. Then a
    rank has `inner` consecutive elements of each of the `outer` rows.
    """
    if spec.tp_dim is None:
        yield begin, begin, end - begin
        return
    inner = math.prod(spec.local_shape(tp)[spec.tp_dim :])
    while begin < end:
        row, within = divmod(begin, inner)
        length = min(inner - within, end - begin)
        yield begin, (row * tp + tp_rank) * inner + within, length
        begin += length


def checksum(data, offset=0):
    """Return the part of a file's sum that comes from `data`, an int below 2^64.

    data: a contiguous array [n] of any dtype. offset: its place in the file, in bytes. If data begins or ends inside a
    word, the other bytes of the word count as 0.
    """
    lead, tail = offset % 8, -(offset + data.nbytes) % 8
    if lead or tail:
        data = np.pad(data.view(np.uint8), (lead, tail))
    words, at, total = data.view(np.uint64), (offset - lead) // 8, 0
    while len(words):
        row, column = divmod(at, BLOCK)
        block = words[: BLOCK - column]
        total += int(np.dot(block, TABLE[column : column + len(block)])) * pow(G, row, 1 << 64)
        at, words = at + len(block), words[len(block) :]
    return total % (1 << 64)


def crc(data):
    return f"{zlib.crc32(data):08x}"


def in_hex(total):
    """Return a sum, mod 2^64, as index.json has it."""
    return f"{total % (1 << 64):016x}"


def arrays(folder, bucket, begin, end):
    """Yield (path, Piece, elements) of each weight and moment in begin .. end of a bucket's flat buffer.

    A Piece is the part of one parameter in begin .. end. The elements are a view into `master` or a moment. These
    tensors begin at element owned[0] of the buffer: a rank keeps only the elements that it updates.
    """
    first = bucket.owned[0]
    tensors = {"": bucket.master} | {f".moment{k}": moment for k, moment in enumerate(bucket.moments)}
    for piece in bucket.layout.pieces(begin, end):
        if piece.begin < piece.end:
            for kind, flat in tensors.items():
                yield folder / f"{piece.spec.name}{kind}", piece, piece.of(flat[begin - first : end - first])


def in_threads(transfer, jobs):
    """Call transfer(path, piece, elements) for each of the `arrays`. Return {file name: terms in its sum}."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(pool.map(lambda job: (job[0].name, transfer(*job)), jobs))


def transferred(file, move, elements, piece, tp):
    """Move the runs of a Piece. Return their terms in the file's sum. move: file.write or file.readinto.

    elements: an array [n] of the Piece's elements.
    """
    terms = 0
    for at, place, length in runs(piece.spec, piece.begin, piece.end, tp.rank, tp.size):
        run, offset = elements[at - piece.begin :][:length], place * elements.itemsize
        file.seek(offset)
        move(run)
        terms += checksum(run, offset)
    return terms


def added(terms, axis):
    """Return {file name: sum of the terms of all ranks of the axis}. Every rank of the axis calls this."""
    total = Counter()
    for theirs in gather_objects(terms, axis):
        total.update(theirs)
    return total


# --- save -------------------------------------------------------------------------------------------------------------


def save(out_dir, step, zero, state, keep=0, copies=()):
    """Write `out_dir/step_N`. Every rank of the mesh calls this with the same `state` (entries of index.json).

    copies: files that are also copied into the checkpoint, if they exist. Keeps the `keep` latest checkpoints (0: all)
    and step_0, which convert.py wrote. If one rank can't write, raises UserError on every rank.
    """
    final, mesh = step_path(out_dir, step), zero.mesh
    writing, first = final.with_name(final.name + ".writing"), mesh.rank == 0

    def publish():
        for path in filter(os.path.isfile, copies):
            shutil.copyfile(path, writing / path.name)
        write_index(writing, zero.master_dtype, state, sums)
        writing.rename(final)
        flush(out_dir)
        for old in filter(None, all_steps(out_dir)[:-keep] if keep else []):
            shutil.rmtree(step_path(out_dir, old), ignore_errors=True)  # the new one is complete: the run continues

    def together(action, here=True):
        attempt = explained(f"out_dir={out_dir}: can't write the checkpoint")(action)
        return agree(mesh.world, UserError, attempt if here else lambda: None)

    together(writing.mkdir, first)  # not its parents: they have vanished if they are not there
    sums = added(together(lambda: write_arrays(writing, zero)), mesh.world)
    together(publish, first)


def remove_unfinished(out_dir):
    """Remove what a killed run, or one with a full disk, left in out_dir. No other run may write there."""
    for left in Path(out_dir).glob("step_*.writing"):
        shutil.rmtree(left, ignore_errors=True)


def write_arrays(folder, zero):
    """Write and flush this rank's elements of all arrays. Return {file name: their terms in the file's sum}."""
    tp, jobs = zero.mesh.tp, []
    for bucket in zero.buckets.values():
        for path, piece, flat in arrays(folder, bucket, *bucket.shard):
            if bucket.holders.rank == 0 and (piece.spec.tp_dim is not None or tp.rank == 0):
                jobs.append((path, piece, flat))  # else another rank writes the same elements
    return in_threads(partial(write, tp), jobs)


def write(tp, path, piece, flat):
    """Write and flush one piece of an array. Return its terms in the file's sum."""
    path.touch()
    with open(path, "r+b") as file:  # "wb" would delete the elements that other ranks have written into the file
        terms = transferred(file, file.write, flat.cpu().numpy(), piece, tp)
    flush(path)
    return terms


def write_index(folder, dtype, state, sums):
    """Write index.json, and flush the folder.

    dtype: of the arrays. state: the other entries. sums: {name of an array's file: its sum}. Computes the CRC-32 of the
    other files in the folder and of index.json.
    """
    others = [path for path in sorted(folder.iterdir()) if path.name not in sums]
    index = {"dtype": str(dtype).removeprefix("torch."), **state}
    index["sums"] = {name: in_hex(total) for name, total in sums.items()}
    index["copies"] = {path.name: crc(path.read_bytes()) for path in others}
    text = json.dumps(index, indent=1).removesuffix("\n}")
    (folder / "index.json").write_text(f'{text},\n "crc32": "{crc(text.encode())}"\n}}')
    for path in (*others, folder / "index.json", folder):
        flush(path)


def flush(path):
    """Flush a file or a folder to disk. A file name is data of its folder, so fsync of the file is not enough."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


# --- find and check ---------------------------------------------------------------------------------------------------


def all_steps(out_dir):
    """Return the steps of the checkpoints in out_dir, ascending."""
    names = (re.fullmatch(r"step_(\d+)", path.name) for path in Path(out_dir).glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def step_path(out_dir, step):
    return Path(out_dir) / f"step_{step}"


def find(path):
    """Return the checkpoint `path`, or the latest checkpoint in the folder `path`, or None."""
    path = Path(path)
    if (path / "index.json").is_file():
        return path
    steps = all_steps(path)
    return step_path(path, steps[-1]) if steps else None


def verify(path, found, expected, what="its content does not match its checksum"):
    """Raise UserError unless the sum or size `found` of a file is the `expected` one."""
    if found != expected:
        raise UserError(f"{path}: damaged: {what}; {REMEDY}")


def read_index(path):
    """Return the content of index.json of the checkpoint `path`. Raises UserError if it or a copied file is damaged."""
    path = Path(path)
    with explained(path / "index.json"):
        data = (path / "index.json").read_bytes()
    text, _, end = data.rpartition(b',\n "crc32": ')
    verify(path / "index.json", end, f'"{crc(text)}"\n}}'.encode())
    index = json.loads(data)
    for name, expected in index["copies"].items():
        with explained(path / name):
            verify(path / name, crc((path / name).read_bytes()), expected)
    return index


def to_resume(config, tokenizer, data=None):
    """Return the path of the checkpoint to resume from, or None. Raises UserError if it can't be used.

    tokenizer: its name; data: `data.identity` of the training data, or None.
    """
    chosen = config.resume not in ("auto", "none")
    place = config.resume if chosen else config.out_dir
    path = find(place)
    if path is None:
        if chosen or config.eval_only:
            raise UserError(f"resume={config.resume}: there is no checkpoint in {place}")
        return None
    if config.resume == "none":
        raise UserError(f"resume=none: {config.out_dir} contains {path.name}; use another --out_dir")
    index = read_index(path)
    then, now = index["config"] | {"tokenizer": index["tokenizer"]}, vars(config) | {"tokenizer": tokenizer}
    for name in MUST_MATCH.split():
        if then.get(name, now[name]) != now[name]:
            raise UserError(f"{name}={now[name]}: the checkpoint {path} has {name}={then[name]}")
    positions = then["max_position_embeddings"] or then["seq_length"]
    if positions != config.positions:
        given = f"seq_length={config.seq_length}, max_position_embeddings={config.max_position_embeddings}"
        remedy = f"set --max_position_embeddings={positions}"
        raise UserError(f"{given}: the checkpoint {path} has {positions} positions; {remedy}")
    there = index.get("data") or data
    if data and not config.new_data and any(there.get(name) != data[name] for name in ("dtype", "tokens", "crc32")):
        remedy = "use the same data, or set --new_data=True to continue with this data"
        raise UserError(f"data_dir={config.data_dir}: not the training data of the checkpoint {path}; {remedy}")
    later = [step for step in all_steps(config.out_dir) if step > index["counters"]["iteration"]]
    if later and not config.eval_only:  # the next run would resume from the latest of these
        there = f"{config.out_dir} contains the later step_{later[-1]}"
        raise UserError(f"resume={config.resume}: {there}; use another --out_dir")
    return path


# --- load -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(path, model, zero):
    """Fill the buckets' master weights and moments from the checkpoint `path`, and verify them.

    Every rank of the mesh calls this. Each rank reads only its own elements. Afterwards, call
    `zero.parameters_from_master` to set the parameters. Raises the same UserError on all ranks if the model is
    another one, or if a file is missing or damaged.
    """
    folder, index, mesh = Path(path), read_index(path), zero.mesh
    jobs = [job for bucket in zero.buckets.values() for job in arrays(folder, bucket, *bucket.owned)]
    agree(mesh.world, UserError, lambda: compare(folder, index, model))
    terms = agree(mesh.world, UserError, lambda: in_threads(partial(read, mesh.tp, index["dtype"]), jobs))
    # Add the terms of the ranks that have read one copy of an array together: its shards over dp, its cuts over tp.
    # Every copy gets its own sum, so a rank that has read wrong bytes notices it even if other ranks read right ones.
    terms = added(terms, mesh.dp) if zero.config.zero >= 1 else terms
    cut = added(terms, mesh.tp)

    def verify_all():
        for path, piece, _ in jobs:
            total = (terms if piece.spec.tp_dim is None else cut)[path.name]
            verify(path, in_hex(total), index["sums"][path.name])

    agree(mesh.world, UserError, verify_all)


def compare(folder, index, model):
    """Raise UserError if an array has another shape in the model than in the checkpoint."""
    shapes = {name: list(spec.shape) for name, spec in model.specs().items()}
    for name in shapes | index["shapes"]:
        here, there = (table.get(name, "absent") for table in (shapes, index["shapes"]))
        if here != there:
            raise UserError(f"{folder}: {name} is {there} in the checkpoint and {here} in the model")


def read(tp, dtype, path, piece, flat):
    """Read one piece of an array into `flat`. Return its terms in the file's sum."""
    local = np.zeros(piece.end - piece.begin, dtype)
    right = math.prod(piece.spec.shape) * local.itemsize
    with explained(path), open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        verify(path, found, right, f"it has {found:,} bytes instead of {right:,}")
        terms = transferred(file, file.readinto, local, piece, tp)
    flat.copy_(torch.from_numpy(local))
    return terms
