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
a folder with the final name is always complete. The latest checkpoint is the `step_N` with the largest N. Before an old
checkpoint is removed, it is renamed to `step_N.removing`. No file is unpickled, so loading a checkpoint runs no code
from it.

Every byte that a rank uses is verified, in any layout. The checksum of an array reads the file as words w_0, w_1, ...
of 8 bytes:

    S = c_0 w_0 + c_1 w_1 + ...  mod 2^64        c_i = TABLE[i mod BLOCK] * G^(i div BLOCK), an odd number

Each rank computes the terms of its own runs, and one all_reduce adds them. An odd c_i has an inverse mod 2^64, so a
change of one word always changes S. The c_i are pseudo-random, so S of several changed words stays equal only by chance
(multilinear hashing; Carter and Wegman, "Universal classes of hash functions", 1979). index.json has the sum of every
array and the CRC-32 of every other file. Its last entry is the CRC-32 of its own bytes before this entry.

Writing with shared memmaps would be wrong: on network file systems, two hosts that write to the same page lose updates.
"""

import contextlib
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
from errors import UserError, explained, reading
from parallel.comm import agree, gather_objects
from parallel.schedules import ASYNCHRONOUS

# Fields that must be equal in the configuration and in the checkpoint.
MUST_MATCH = (
    "num_layers hidden_size num_attention_heads seq_length max_position_embeddings vocab_size activation seed optimizer"
)
REMEDY = "; use another checkpoint: remove this one, or set --resume"
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


def arrays(bucket, begin, end):
    """Yield (file name, Piece, elements) of each weight and moment in begin .. end of a bucket's flat buffer.

    A Piece is the part of one parameter in begin .. end; it may be empty. The elements are a view into `master` or a
    moment. These tensors begin at element owned[0] of the buffer: a rank keeps only the elements that it updates.
    """
    first = bucket.owned[0]
    for piece in bucket.layout.pieces(begin, end):
        yield piece.spec.name, piece, piece.of(bucket.master[begin - first : end - first])
        for k, moment in enumerate(bucket.moments):
            yield f"{piece.spec.name}.moment{k}", piece, piece.of(moment[begin - first : end - first])


def in_threads(transfer, jobs):
    """Call transfer(path, piece, elements) for each job that has elements. Return {file name: terms in its sum}."""
    jobs = [job for job in jobs if job[1].begin < job[1].end]
    with ThreadPoolExecutor(THREADS) as pool:
        terms = list(pool.map(lambda job: transfer(*job), jobs))
    return {path.name: term for (path, *_), term in zip(jobs, terms, strict=True)}


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
    and step_0, which convert.py wrote. Removes the remains of a killed run. If one rank can't write, removes the
    incomplete checkpoint and raises UserError on every rank.
    """
    final = step_path(out_dir, step)
    writing, first = final.with_name(final.name + ".writing"), zero.mesh.rank == 0

    def prepare():
        for left in Path(out_dir).glob("step_*ing"):  # step_N.writing, step_N.removing of a killed run
            shutil.rmtree(left, ignore_errors=True)
        writing.mkdir()  # not its parents: they have vanished if they are not there

    def publish(sums):
        for path in filter(os.path.isfile, copies):
            shutil.copyfile(path, writing / path.name)
            flush(writing / path.name)
        write_index(writing, zero.master_dtype, state, sums)
        writing.rename(final)
        flush(out_dir)
        remove_old(out_dir, keep)

    def together(action, *arguments, here=True):
        def attempt():
            with explained(f"out_dir={out_dir}: can't write the checkpoint"):
                return action(*arguments) if here else None

        return agree(zero.mesh.world, UserError, attempt)

    try:
        together(prepare, here=first)
        terms = together(write_arrays, writing, zero)
        together(publish, added(terms, zero.mesh.world), here=first)
    except UserError:
        if first:
            shutil.rmtree(writing, ignore_errors=True)
        raise


def write_arrays(folder, zero):
    """Write and flush this rank's elements of all arrays. Return {file name: their terms in the file's sum}."""
    tp, jobs = zero.mesh.tp, []
    for bucket in zero.buckets.values():
        for name, piece, flat in arrays(bucket, *bucket.shard):
            if bucket.holders.rank == 0 and (piece.spec.tp_dim is not None or tp.rank == 0):
                jobs.append((folder / name, piece, flat))  # else another rank writes the same elements
    return in_threads(partial(write, tp), jobs)


def write(tp, path, piece, flat):
    """Write and flush one piece of an array. Return its terms in the file's sum."""
    local, terms = flat.cpu().numpy(), 0
    # open(path, "wb") would delete the elements that other ranks have written into the file.
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644), "wb") as file:
        for at, place, length in runs(piece.spec, piece.begin, piece.end, tp.rank, tp.size):
            run, offset = local[at - piece.begin :][:length], place * local.itemsize
            file.seek(offset)
            file.write(run)
            terms += checksum(run, offset)
        file.flush()
        os.fsync(file.fileno())
    return terms


def write_index(folder, dtype, state, sums):
    """Write index.json and flush the folder.

    dtype: of the arrays. state: the other entries. sums: {name of an array's file: its sum}. Computes the CRC-32 of the
    other files in the folder and of index.json.
    """
    others = {path.name: crc(path.read_bytes()) for path in sorted(folder.iterdir()) if path.name not in sums}
    sums = {name: f"{total % (1 << 64):016x}" for name, total in sums.items()}
    index = {"dtype": str(dtype).removeprefix("torch."), **state, "sums": sums, "copies": others}
    text = json.dumps(index, indent=1).removesuffix("\n}")
    (folder / "index.json").write_text(f'{text},\n "crc32": "{crc(text.encode())}"\n}}')
    flush(folder / "index.json")
    flush(folder)


def crc(data):
    return f"{zlib.crc32(data):08x}"


def remove_old(out_dir, keep):
    """Remove all checkpoints except the `keep` latest and step 0. keep=0: remove none."""
    for step in filter(None, all_steps(out_dir)[:-keep] if keep else []):
        path = step_path(out_dir, step)
        gone = path.with_name(path.name + ".removing")  # if the run is killed now, this is no checkpoint's name
        with contextlib.suppress(OSError):  # the new checkpoint is complete, so the run continues
            path.rename(gone)
            shutil.rmtree(gone)


def flush(path):
    """Flush a file or a folder to disk. A file name is data of its folder, so fsync of the file is not enough."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


# --- find and check ---------------------------------------------------------------------------------------------------


def all_steps(out_dir):
    """Return the steps of the complete checkpoints in out_dir, ascending."""
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


@contextlib.contextmanager
def using(path):
    """Turn an error of reading a checkpoint's file, for example a missing one, into a UserError with the remedy."""
    try:
        with reading(path):
            yield
    except UserError as error:
        raise UserError(f"{error}{REMEDY}") from None


def damaged(path):
    return UserError(f"{path}: damaged: its content does not match its checksum{REMEDY}")


def read_index(path):
    """Return the content of index.json of the checkpoint `path`. Raises UserError if it or a copied file is damaged."""
    path = Path(path)
    with using(path / "index.json"):
        data = (path / "index.json").read_bytes()
    text, _, end = data.rpartition(b',\n "crc32": ')
    if end != f'"{crc(text)}"\n}}'.encode():
        raise damaged(path / "index.json")
    index = json.loads(data)
    for name, expected in index["copies"].items():
        with using(path / name):
            found = crc((path / name).read_bytes())
        if found != expected:
            raise damaged(path / name)
    return index


def refuse_contradictions(path, index, config, tokenizer, data=None):
    """Raise UserError if a field of MUST_MATCH, the tokenizer or the training data differs from the checkpoint's.

    Fields that convert.py leaves open are not in the checkpoint.
    """
    then, now, names = index["config"], vars(config), MUST_MATCH.split()
    if then.get("schedule") in ASYNCHRONOUS and config.schedule in ASYNCHRONOUS:
        names.append("updates_per_call")
    for name in names:
        if name in then and then[name] != now[name]:
            raise UserError(f"{name}={now[name]}: the checkpoint {path} has {name}={then[name]}")
    if index["tokenizer"] != tokenizer:
        there = f"the checkpoint {path} has {index['tokenizer']}"
        raise UserError(f"data_dir={config.data_dir}: its tokenizer is {tokenizer}, but {there}")
    there = index.get("data") or data
    if data and not config.new_data and any(there.get(name) != data[name] for name in ("dtype", "tokens", "crc32")):
        remedy = "use the same data, or set --new_data=True to continue with this data"
        raise UserError(f"data_dir={config.data_dir}: not the training data of the checkpoint {path}; {remedy}")


def to_resume(config, tokenizer, data=None):
    """Return the path of the checkpoint to resume from, or None. Raises UserError if it can't be used.

    tokenizer: its name; data: `data.identity` of the training data, or None.
    """
    place = config.out_dir if config.resume in ("auto", "none") else config.resume
    path = find(place)
    if path is None:
        if config.resume not in ("auto", "none") or config.eval_only:
            raise UserError(f"resume={config.resume}: there is no checkpoint in {place}")
        return None
    if config.resume == "none":
        raise UserError(f"resume=none: {config.out_dir} contains {path.name}; remove it, or use another --out_dir")
    index = read_index(path)
    refuse_contradictions(path, index, config, tokenizer, data)
    later = [step for step in all_steps(config.out_dir) if step > index["counters"]["iteration"]]
    if later and not config.eval_only:  # the next run would resume from the latest of these
        advice = "remove the later checkpoints, or use another --out_dir"
        raise UserError(f"resume={config.resume}: {config.out_dir} contains the later step_{later[-1]}; {advice}")
    return path


# --- load -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(path, zero):
    """Fill the buckets' master weights and moments from the checkpoint `path`, and verify them.

    Every rank of the mesh calls this. Each rank reads only its own elements. Afterwards, call
    `zero.parameters_from_master` to set the parameters. Raises the same UserError on all ranks if a file is missing or
    damaged.
    """
    folder, index, mesh = Path(path), read_index(path), zero.mesh
    mine = [array for bucket in zero.buckets.values() for array in arrays(bucket, *bucket.owned)]

    def read_all():
        jobs = [(folder / name, piece, flat) for name, piece, flat in mine]
        return in_threads(partial(read, mesh.tp, index["dtype"]), jobs)

    terms = agree(mesh.world, UserError, read_all)
    # Add the terms of the ranks that have read one copy of an array together: its shards over dp, its cuts over tp.
    # Every copy gets its own sum, so a rank that has read wrong bytes notices it even if other ranks read right ones.
    terms = added(terms, mesh.dp) if zero.config.zero >= 1 else terms
    cut = added(terms, mesh.tp)

    def verify_all():
        for name, piece, _ in mine:
            verify(folder, index, name, (terms if piece.spec.tp_dim is None else cut).get(name, 0))

    agree(mesh.world, UserError, verify_all)


def read(tp, dtype, path, piece, flat):
    """Read one piece of an array into `flat`. Return its terms in the file's sum."""
    local, terms = np.zeros(piece.end - piece.begin, dtype), 0
    with using(path), open(path, "rb") as file:
        for at, place, length in runs(piece.spec, piece.begin, piece.end, tp.rank, tp.size):
            run, offset = local[at - piece.begin :][:length], place * local.itemsize
            file.seek(offset)
            file.readinto(run)
            terms += checksum(run, offset)
    flat.copy_(torch.from_numpy(local))
    return terms


def verify(folder, index, name, total):
    """Raise UserError if `total`, mod 2^64, is not the sum of this array in the index."""
    if int(index["sums"][name], 16) != total % (1 << 64):
        raise damaged(folder / name)


def read_tensor(folder, index, spec):
    """Return a whole weight of a checkpoint, verified, as a numpy array of the ParamSpec's shape. Raises UserError."""
    with using(folder / spec.name):
        whole = np.fromfile(folder / spec.name, index["dtype"])
    verify(folder, index, spec.name, checksum(whole))
    return whole.reshape(spec.shape)
