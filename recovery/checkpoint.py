"""Save and load checkpoints. They contain whole tensors, so any layout can load the checkpoint of any other layout.

    out/tiny/step_300/
        index.json                        shapes, dtype, configuration, counters, sums of the other files, ...
        block0.qkv.weight                 the whole tensor, C order, master dtype, no header
        block0.qkv.weight.moment0  ...    AdamW's two moments
        tokenizer.json  ...               the data set's copy of the vocabulary (none for `bytes`)

A rank's shard may begin and end in the middle of a parameter, and the parameter may be cut over tp. So a rank has
*runs* (consecutive elements) of the whole tensor. All ranks write their runs into the same file. The ranks of a later
layout read their own runs.

Every rank writes into the folder `step_N.writing` and flushes its files. Then rank 0 renames the folder to `step_N`, so
a `step_N` is always complete. No file is unpickled, so loading a checkpoint runs no code from it.

Each rank verifies every byte that it uses. index.json has the `checksum` of every array, the CRC-32 of every other
file, and at last the CRC-32 of its own bytes before this entry.
"""

import fcntl
import json
import math
import os
import re
import shutil
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from config import SECTIONS, of_checkpoint
from data import LONGEST_CYCLE, mixture, splitmix64
from errors import UserError, explained, reading, regular, whole_number
from parallel.comm import agree, gather_objects

MAY_CHANGE = "max_position_embeddings dropout init_method_std".split()
# These must be equal in the run and in the checkpoint. convert.py leaves some out.
MUST_MATCH = [*(name for name in SECTIONS["model"] if name not in MAY_CHANGE), "seed", "optimizer", "tokenizer"]
COUNTERS = {"iteration", "consumed_samples", "updates"}
REMEDY = "use another checkpoint: remove this one, or set --resume"
THREADS = 4  # a flush waits for the disk, so more threads than cores are useful


# --- runs -------------------------------------------------------------------------------------------------------------


def runs(spec, begin, end, tp_rank, tp):
    """Yield the runs (local offset, whole offset, length) of the elements [begin, end) of a rank's flattened tensor.

    A tensor that is cut along `tp_dim` is [outer, tp, inner]: a rank has `inner` elements of each of the `outer` rows.
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


def arrays(folder, bucket, begin, end):
    """Yield (path, tp axis, Piece, its elements) of weights and moments in begin .. end of a bucket."""
    first = bucket.bounds[0]  # the first element that this rank keeps
    tensors = {"": bucket.master} | {f".moment{k}": moment for k, moment in enumerate(bucket.moments)}
    for piece in bucket.layout.pieces(begin, end):
        if piece.begin < piece.end:
            for kind, flat in tensors.items():
                elements = piece.of(flat[begin - first : end - first])
                yield folder / f"{piece.spec.name}{kind}", bucket.tp, piece, elements


def in_threads(transfer, jobs):
    """Return {file name: transfer(path, tp axis, piece, elements)}."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(pool.map(lambda job: (job[0].name, transfer(*job)), jobs))


def transferred(file, move, elements, piece, tp):
    """Write or read (`move`) a Piece's runs. Return their terms in the file's `checksum`."""
    terms = 0
    for at, place, length in runs(piece.spec, piece.begin, piece.end, tp.rank, tp.size):
        run = elements[at - piece.begin :][:length]
        offset = place * elements.itemsize
        file.seek(offset)
        move(run)
        terms += checksum(run, offset)
    return terms


def sum_over(terms, axis):
    """Return {file name: sum of the terms of all ranks}."""
    total = Counter()
    for terms_of_rank in gather_objects(terms, axis):
        total.update(terms_of_rank)
    return total


# --- save -------------------------------------------------------------------------------------------------------------


def save_checkpoint(out_dir, step, zero, state, keep, copies):
    """Write `out_dir/step_N`. Every rank of the mesh calls this with the same `state` (entries of index.json).

    copies: files that come along. Keeps the `keep` latest checkpoints (0: all) and step_0, which convert.py wrote. If
    one rank can't write, raises UserError on every rank.
    """
    mesh, first = zero.mesh, zero.mesh.rank == 0
    final = step_path(out_dir, step)
    writing = final.with_name(final.name + ".writing")

    def publish():
        for path in filter(os.path.isfile, copies):
            shutil.copyfile(path, writing / path.name)
        write_index(writing, zero.master_dtype, state, sums)
        writing.rename(final)
        flush(out_dir)
        old_steps = all_steps(out_dir)[:-keep] if keep else []
        for step in filter(None, old_steps):
            old = step_path(out_dir, step)
            shutil.rmtree(old.rename(f"{old}.writing"), ignore_errors=True)  # after a kill, the rest is no `step_N`

    def on_all_ranks(action, writes=True):
        attempt = explained(f"out_dir={out_dir}: can't write the checkpoint")(action)
        return agree(mesh.world, attempt if writes else lambda: None)

    on_all_ranks(writing.mkdir, first)
    sums = sum_over(on_all_ranks(lambda: write_arrays(writing, zero)), mesh.world)
    on_all_ranks(publish, first)


def remove_unfinished(out_dir):
    """Remove each `step_N.writing`."""
    for folder in Path(out_dir).glob("step_*.writing"):
        shutil.rmtree(folder, ignore_errors=True)


def write_arrays(folder, zero):
    """Write what this rank keeps. Return {file name: terms in its sum}."""
    jobs = []
    for bucket in zero.in_order:
        for path, tp, piece, flat in arrays(folder, bucket, *bucket.saved):
            if bucket.holders.rank == 0 and (piece.spec.tp_dim is not None or tp.rank == 0):
                jobs.append((path, tp, piece, flat))  # else another rank writes them
    return in_threads(write_piece, jobs)


def write_piece(path, tp, piece, flat):
    """Write this rank's elements of a parameter into its file. flat: a shard. tp: the Axis."""
    path.touch()
    places = [*runs(piece.spec, piece.begin, piece.end, tp.rank, tp.size)]
    (_, begin, _), (_, last, length) = places[0], places[-1]
    size = last + length - begin
    with open(path, "r+b") as file:  # "wb" would delete what other ranks wrote
        # Without any lock, NFS writes whole pages, with another host's old bytes. A shared one never waits.
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_SH, size * flat.itemsize, begin * flat.itemsize)
        terms = transferred(file, file.write, flat.cpu().numpy(), piece, tp)
    flush(path)
    return terms


def write_index(folder, dtype, state, sums):
    """Write index.json. sums: {array: checksum}."""
    others = [path for path in sorted(folder.iterdir()) if path.name not in sums]
    index = {"dtype": str(dtype).removeprefix("torch."), **state}
    index["sums"] = {name: in_hex(total) for name, total in sums.items()}
    index["copies"] = {path.name: crc(path.read_bytes()) for path in others}
    text = json.dumps(index, indent=1).removesuffix("\n}")
    (folder / "index.json").write_text(f'{text},\n "crc32": "{crc(text.encode())}"\n}}')
    for path in (*others, folder / "index.json", folder):
        flush(path)


def flush(path):
    """Flush a file, or a folder: it contains the names of new files."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


# --- find and check ---------------------------------------------------------------------------------------------------


def all_steps(out_dir):
    """Return the steps of the checkpoints in out_dir, ascending."""
    names = (re.fullmatch(r"step_(0|[1-9]\d*)", path.name) for path in Path(out_dir).glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def step_path(out_dir, step):
    return Path(out_dir) / f"step_{step}"


def find(path):
    """Return the checkpoint `path`, or the latest in the folder `path`, or None."""
    path = Path(path)
    if (path / "index.json").is_file():
        return path
    steps = all_steps(path)
    return step_path(path, steps[-1]) if steps else None


def verify(path, content, expected, what="its content does not match its checksum"):
    if content != expected:
        raise UserError(f"{path}: damaged: {what}; {REMEDY}")


def read_index(path):
    """Return a checkpoint's index. Raises UserError if index.json or a copied file is damaged, or not of a run."""
    path = Path(path)
    file = path / "index.json"
    with explained(path):
        if not file.is_file():
            raise UserError(f"{path}: no complete checkpoint: it has no file index.json; {REMEDY}")
        data = file.read_bytes()
    text, _, end = data.rpartition(b',\n "crc32": ')
    verify(file, end, f'"{crc(text)}"\n}}'.encode())
    with reading(f"{file}: wrong content"):
        index = json.loads(data)
        if isinstance(index.get("data"), dict):  # written before there were several sets
            index["data"] = [{"share": 1, "begins": 0, "used": 0} | index["data"]]
        check_index(index)
    for name, expected in index["copies"].items():
        with explained(path / name):
            verify(path / name, crc(regular(path / name).read_bytes()), expected)
    return index


def check_index(index):
    """Raise an error if an entry of index.json is missing, or has another type or range than `save` writes."""

    def require(fits, name, value):
        if not fits:
            raise ValueError(f"{name} is {value!r:.40}")

    for name in ("config", "counters", "loss_scale", "shapes", "sums", "copies"):
        require(type(index[name]) is dict, name, index[name])
    # numpy would make Python objects of the files' bytes if the dtype were `object`.
    require(index["dtype"] in ("float32", "float64"), "dtype", index["dtype"])
    require(type(index["tokenizer"]) is str, "tokenizer", index["tokenizer"])
    try:
        of_checkpoint(index)
    except UserError as error:
        raise ValueError(error) from None  # `reading` adds the file's name
    require(index["counters"].keys() == COUNTERS, "counters", index["counters"])
    for name in COUNTERS:
        whole_number(index["counters"], name)
    sets = index.get("data") or []
    for entry in sets:
        whole_number(entry, "share", most=LONGEST_CYCLE)
        for name in ("begins", "used"):
            whole_number(entry, name)
    require(not sets or any(entry["share"] for entry in sets), "each share", 0)
    scale = index["loss_scale"]
    whole_number(scale, "clean")
    whole_number(scale, "patience", least=-(10**13))
    require(type(scale["dynamic"]) is bool, "dynamic", scale["dynamic"])
    require(type(scale["scale"]) is float and 0 < scale["scale"] < math.inf, "scale", scale["scale"])
    for name, shape in index["shapes"].items():
        require(type(shape) is list and all(type(n) is int and n > 0 for n in shape), f"the shape of {name}", shape)
    for name, total in (index["sums"] | index["copies"]).items():
        require(type(total) is str, f"the sum of {name}", total)
        require(Path(name).name == name, "the name of a file", name)


def to_resume(config, tokenizer, data):
    """Return the path of the checkpoint to resume from, or None. Raises UserError if it can't be used.

    tokenizer: its name. data: `data.Mixture.state`.
    """
    chosen = config.resume not in ("auto", "none") and Path(config.resume) != Path(config.out_dir)
    place = config.resume if chosen else config.out_dir
    path = find(place)
    if path is None:
        if chosen or config.eval_only:
            raise UserError(f"resume={config.resume}: there is no checkpoint in {place}")
        return None
    if config.resume == "none" and not restarted():
        raise UserError(f"resume=none: {config.out_dir} contains {path.name}; use another --out_dir")
    index = read_index(path)
    refuse_other_model(config, tokenizer, path, index, MUST_MATCH)
    iteration = index["counters"]["iteration"]
    if chosen and 0 < config.train_iters <= iteration and not config.eval_only:
        why = f"the checkpoint {path} has {iteration} updates already; set more"
        raise UserError(f"train_iters={config.train_iters}: {why}")
    sets = index.get("data") or data  # convert.py writes none
    if data and mixture(sets) != mixture(data) and not config.new_data:
        shares = ",".join(f"{entry['share']}:{entry.get('name', 'one set')}" for entry in sets if entry["share"])
        remedy = "use the same data, or set --new_data=True to continue with this data"
        why = f"not the training data of the checkpoint {path}, {shares}"
        raise UserError(f"data_dir={config.data_dir}: {why}; {remedy}")
    later = [step for step in all_steps(config.out_dir) if step > iteration]
    if later and restarted():
        return to_resume(replace(config, resume="auto"), tokenizer, data)
    if later and not config.eval_only:  # the next run would resume from the latest one
        why = f"{config.out_dir} contains the later step_{later[-1]}"
        raise UserError(f"resume={config.resume}: {why}; use another --out_dir")
    return path


def refuse_other_model(config, tokenizer, path, index, names):
    """Raise UserError if a checkpoint has other values of the fields `names`, or another number of positions."""
    saved = index["config"] | {"tokenizer": index["tokenizer"]}
    values = vars(config) | {"tokenizer": tokenizer}
    for name in names:
        if saved.get(name, values[name]) != values[name]:
            raise UserError(f"{name}={values[name]}: the checkpoint {path} has {name}={saved[name]}")
    positions = saved["max_position_embeddings"] or saved["seq_length"]
    if positions != config.positions and config.model != "llama":  # which has no table of positions
        fields = f"seq_length={config.seq_length}, max_position_embeddings={config.max_position_embeddings}"
        remedy = f"set --max_position_embeddings={positions}"
        raise UserError(f"{fields}: the checkpoint {path} has {positions} positions; {remedy}")


def check_weights(config, tokenizer):
    """Raise UserError if `initial_weights` is no checkpoint of this model."""
    path = find(config.initial_weights)
    if path is None:
        raise UserError(f"initial_weights={config.initial_weights}: there is no checkpoint")
    # A longer seq_length, and with it another rotary_base, is a usual way to go on.
    names = [name for name in MUST_MATCH if name not in ("seed", "optimizer", "seq_length", "rotary_base")]
    refuse_other_model(config, tokenizer, path, read_index(path), names)


def restarted():
    """Return whether torchrun or Slurm started this command again."""
    return any(int(os.environ.get(f"{name}_RESTART_COUNT", 0)) for name in ("TORCHELASTIC", "SLURM"))


# --- load -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_checkpoint(path, model, zero, moments=True):
    """Fill this rank's master weights and, if wanted, moments. Every rank calls this, then `parameters_from_master`.

    Raises the same UserError on all ranks if the model is another one, or if a file is missing or damaged.
    """
    folder, index, mesh = Path(path), read_index(path), zero.mesh
    jobs = [job for bucket in zero.in_order for job in arrays(folder, bucket, *bucket.bounds)]
    jobs = [job for job in jobs if moments or ".moment" not in job[0].name]
    agree(mesh.world, lambda: compare_shapes(folder, index, model))
    terms = agree(mesh.world, lambda: in_threads(partial(read_piece, index["dtype"]), jobs))
    # The ranks of a bucket's shards, and of its tp, have read one copy of an array together.
    whole, cut = {}, {}
    for shards, tp in dict.fromkeys((bucket.shards, bucket.tp) for bucket in zero.in_order):
        of_shards = sum_over({path.name: terms[path.name] for path, axis, *_ in jobs if axis is tp}, shards)
        whole |= of_shards
        cut |= sum_over(of_shards, tp)

    def verify_all():
        for path, _, piece, _ in jobs:
            total = (whole if piece.spec.tp_dim is None else cut)[path.name]
            verify(path, in_hex(total), index["sums"][path.name])

    agree(mesh.world, verify_all)


def compare_shapes(folder, index, model):
    """Raise UserError if an array has another shape in the model than in the checkpoint."""
    shapes = {name: list(spec.shape) for name, spec in model.specs().items()}
    for name in shapes | index["shapes"]:
        shape, saved_shape = (table.get(name, "absent") for table in (shapes, index["shapes"]))
        if shape != saved_shape:
            raise UserError(f"{folder}: {name} is {saved_shape} in the checkpoint and {shape} in the model")


def read_piece(dtype, path, tp, piece, flat):
    local = np.zeros(piece.end - piece.begin, dtype)
    right = math.prod(piece.spec.shape) * local.itemsize
    with explained(path), open(regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        verify(path, size, right, f"it has {size:,} bytes instead of {right:,}")
        terms = transferred(file, file.readinto, local, piece, tp)
    flat.copy_(torch.from_numpy(local))
    return terms


# --- checksums --------------------------------------------------------------------------------------------------------

# Carter and Wegman, "Universal classes of hash functions", 1979. A file has the words w_0, w_1, ... of 8 bytes.
#
#     S = c_0 w_0 + c_1 w_1 + ...  mod 2^64        c_i = TABLE[i mod n] * G^(i div n), an odd number, n = TABLE_WORDS
#
# An odd number has an inverse mod 2^64, so a change of one word always changes S.
TABLE_WORDS = 1 << 17  # words in TABLE: 1 MiB, which stays in a core's cache
G = 0x9E3779B97F4A7C15
TABLE = splitmix64(np.arange(1, TABLE_WORDS + 1, dtype=np.uint64)) | 1


def checksum(data, offset=0):
    """Return the terms of an array at byte `offset` of a file."""
    lead, tail = offset % 8, -(offset + data.nbytes) % 8
    if lead or tail:
        data = np.pad(data.view(np.uint8), (lead, tail))
    words, total = data.view(np.uint64), 0
    at = (offset - lead) // 8
    while len(words):
        row, column = divmod(at, TABLE_WORDS)
        block = words[: TABLE_WORDS - column]
        total += int(np.dot(block, TABLE[column : column + len(block)])) * pow(G, row, 1 << 64)
        at, words = at + len(block), words[len(block) :]
    return total % (1 << 64)


def crc(data):
    return f"{zlib.crc32(data):08x}"


def in_hex(total):
    return f"{total % (1 << 64):016x}"
