"""Save and load checkpoints. They contain whole tensors, so any layout can load the checkpoint of any other layout.

    out/tiny/step_300/
        index.json                        shapes, dtype, configuration, counters, sums of the other files, ...
        block0.qkv.weight                 the whole tensor, C order, master dtype, no header
        block0.qkv.weight.moment0  ...    AdamW's two moments
        tokenizer.json  ...               the data set's copy of a vocabulary in files

A rank's shard may begin and end in the middle of a parameter, and the parameter may be cut over tp. So a rank has
*runs* (consecutive elements) of the whole tensor. All ranks write their runs into the same file. The ranks of a later
layout read their own runs.

Every rank writes into the folder `step_N.writing` and flushes its files. Then rank 0 renames the folder to `step_N`, so
a `step_N` is always complete. No file is unpickled, so loading a checkpoint runs no code from it.

index.json has the CRC-32 of every other file, and at last that of its own bytes before this entry. In a save and in a
load, each rank sums a share of the files.
"""

import fcntl
import json
import math
import os
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from config import SECTIONS, of_checkpoint
from data import LONGEST_CYCLE, mixture
from errors import UserError, check_locks, explained, reading, regular, variable, whole_number
from parallel.comm import agree, gather_objects
from tokenizer import copied, copy

MAY_CHANGE = "max_position_embeddings dropout init_method_std".split()
# These must be equal in the run and in the checkpoint. convert.py leaves some out.
MUST_MATCH = [*(name for name in SECTIONS["model"] if name not in MAY_CHANGE), "seed", "optimizer", "tokenizer"]
KEYS = {  # of index.json, and of its tables
    "index.json": "dtype shapes config tokenizer data counters loss_scale files crc32".split(),
    "counters": ["iteration", "consumed_samples", "updates"],
    "loss_scale": ["dynamic", "scale", "clean", "patience"],
    "data": "tokenizer dtype made_from tokens crc32 name share".split(),
}
REMEDY = "use another checkpoint: remove this one, or set --resume"
PART = 1 << 24  # bytes of a file that are read at once
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
    """Yield (path, tp axis, Piece, its elements) of weights, moments and state in begin .. end of a bucket."""
    first = bucket.bounds[0]  # the first element that this rank keeps
    tensors = {"": bucket.master} | {f".moment{k}": x for k, x in enumerate([*bucket.moments, *bucket.state])}
    for piece in bucket.layout.pieces(begin, end):
        if piece.begin < piece.end:
            for kind, flat in tensors.items():
                elements = piece.of(flat[begin - first : end - first])
                yield folder / f"{piece.spec.name}{kind}", bucket.tp, piece, elements


def in_threads(function, jobs):
    """Return [function(*job), ...]."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda job: function(*job), jobs))


def transfer(file, move, elements, piece, tp):
    """Write or read (`move`) a Piece's runs."""
    for at, place, length in runs(piece.spec, piece.begin, piece.end, tp.rank, tp.size):
        file.seek(place * elements.itemsize)
        move(elements[at - piece.begin :][:length])


def crc(path):
    """Return the CRC-32 of a file."""
    total = 0
    with open(regular(path), "rb") as file:
        while part := file.read(PART):
            total = zlib.crc32(part, total)
    return f"{total:08x}"


def sums_of(folder, names):
    """Return {name: the file's `crc`}."""
    return dict(zip(names, in_threads(crc, [(folder / name,) for name in names]), strict=True))


# --- save -------------------------------------------------------------------------------------------------------------


def save_checkpoint(out_dir, step, zero, state, keep, data_dir):
    """Write `out_dir/step_N`. Every rank of the mesh calls this with the same `state` (entries of index.json).

    data_dir: its copy of a vocabulary comes along. Keeps the `keep` latest checkpoints (0: all) and step_0, which
    convert.py wrote. If one rank can't write, raises UserError on every rank.
    """
    mesh, first = zero.mesh, zero.mesh.rank == 0
    final = step_path(out_dir, step)
    writing = final.with_name(final.name + ".writing")

    def begin():
        check_locks()
        writing.mkdir()
        copy(copied(data_dir, state["tokenizer"]), writing)
        return os.listdir(writing)

    def publish():
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

    copies = on_all_ranks(begin, first) or []
    written = copies + on_all_ranks(lambda: write_arrays(writing, zero))
    names = sorted({name for each in gather_objects(written, mesh.world) for name in each})
    sums = on_all_ranks(lambda: sums_of(writing, names[mesh.world.rank :: mesh.world.size]))
    sums = {name: total for share in gather_objects(sums, mesh.world) for name, total in share.items()}
    on_all_ranks(publish, first)


def remove_unfinished(out_dir):
    """Remove each `step_N.writing`."""
    for folder in Path(out_dir).glob("step_*.writing"):
        shutil.rmtree(folder, ignore_errors=True)


def write_arrays(folder, zero):
    """Write what this rank keeps. Return the files' names."""
    jobs = []
    for bucket in zero.in_order:
        for path, tp, piece, flat in arrays(folder, bucket, *bucket.saved):
            if bucket.holders.rank == 0 and (piece.spec.tp_dim is not None or tp.rank == 0):
                jobs.append((path, tp, piece, flat))  # else another rank writes them
    in_threads(write_piece, jobs)
    return [path.name for path, *_ in jobs]


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
        transfer(file, file.write, flat.cpu().numpy(), piece, tp)
    flush(path)


def write_index(folder, dtype, state, sums):
    """Write index.json. sums: {other file: its `crc`}."""
    index = {"dtype": str(dtype).removeprefix("torch."), **state, "files": sums}
    text = json.dumps(index, indent=1).removesuffix("\n}")
    (folder / "index.json").write_text(f'{text},\n "crc32": "{zlib.crc32(text.encode()):08x}"\n}}')
    for name in (*other_files(index), "index.json", "."):
        flush(folder / name)


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


def nothing_in(path):
    """Return the message that there is no checkpoint in `path`. It names the latest one in the folder above."""
    latest = find(Path(path).parent)
    remedy = f"the latest is {latest}" if latest else "train one: torchrun train.py configs/tiny.py"
    return f"there is no checkpoint in {path}; {remedy}"


def verify(path, content, expected, what="its content does not match its checksum"):
    if content != expected:
        raise UserError(f"{path}: damaged: {what}; {REMEDY}")


def verify_files(folder, sums, names):
    """Raise UserError if one of these files is missing or damaged."""
    for name in names:
        with explained(folder / name):
            verify(folder / name, crc(folder / name), sums[name])


def read_index(path):
    """Return a checkpoint's index. Raises UserError if index.json or a copied file is damaged, or not of a run."""
    path = Path(path)
    file = path / "index.json"
    with explained(path):
        if not file.is_file():
            raise UserError(f"{path}: no complete checkpoint: it has no file index.json; {REMEDY}")
        data = file.read_bytes()
    text, _, end = data.rpartition(b',\n "crc32": ')
    verify(file, end, f'"{zlib.crc32(text):08x}"\n}}'.encode())
    with reading(f"{file}: wrong content"):
        index = json.loads(data)
        check_index(index)
    verify_files(path, index["files"], other_files(index))
    return index


def other_files(index):
    """Return the names of the files that are no weights or moments."""
    return [name for name in index["files"] if name.partition(".moment")[0] not in index["shapes"]]


def check_index(index):
    """Raise an error if index.json has other keys than `save` writes, or an entry has another type or range.

    A load compares the shapes with the model's, and the sums with those of the files.
    """

    def require(fits, name, value):
        if not fits:
            raise ValueError(f"{name} is {value!r:.40}")

    def check_keys(name, table):
        require(type(table) is dict, name, table)
        for key in {*KEYS[name]} ^ table.keys():
            has = "has" if key in table else "lacks"
            why = "written by another commit, or damaged (KEYS in recovery/checkpoint.py lists a run's)"
            raise ValueError(f"{name} {has} the key {key!r:.40}: {why}")

    check_keys("index.json", index)
    for name in ("config", "shapes", "files"):
        require(type(index[name]) is dict, name, index[name])
    whole_number(index["config"], "max_position_embeddings")
    require(type(index["data"]) is list, "data", index["data"])
    # numpy would make Python objects of the files' bytes if the dtype were `object`.
    require(index["dtype"] in ("float32", "float64"), "dtype", index["dtype"])
    require(type(index["tokenizer"]) is str, "tokenizer", index["tokenizer"])
    try:
        of_checkpoint(index)
    except UserError as error:
        raise ValueError(error) from None  # `reading` adds the file's name
    check_keys("counters", index["counters"])
    for name in KEYS["counters"]:
        whole_number(index["counters"], name)
    whole_number(index["counters"], "updates", most=index["counters"]["iteration"])
    for entry in index["data"]:
        check_keys("data", entry)
        whole_number(entry, "share", 1, LONGEST_CYCLE)
    check_keys("loss_scale", scale := index["loss_scale"])
    whole_number(scale, "clean")
    whole_number(scale, "patience", least=-(10**13))
    require(type(scale["dynamic"]) is bool, "dynamic", scale["dynamic"])
    require(type(scale["scale"]) is float and 0 < scale["scale"] < math.inf, "scale", scale["scale"])
    for name in index["files"]:
        require(Path(name).name == name and name.isprintable(), "the name of a file", name)


def to_resume(config, tokenizer, data):
    """Return the path of the checkpoint to resume from, or None. Raises UserError if it can't be used.

    A run that began with --resume=PATH goes on from its own latest checkpoint. tokenizer: its name. data:
    `data.Mixture.state`.
    """
    chosen = config.resume not in ("auto", "none") and Path(config.resume) != Path(config.out_dir)
    latest = find(config.out_dir) if chosen and not config.eval_only else None
    if latest and read_index(latest)["config"].get("resume") == config.resume:
        chosen = False
    place = config.resume if chosen else config.out_dir
    path = find(place)
    if path is None:
        if chosen or (config.eval_only and not config.initial_weights):
            raise UserError(f"resume={config.resume}: {nothing_in(place)}")
        return None
    if config.resume == "none" and not restarted():
        raise UserError(f"resume=none: {config.out_dir} contains {path.name}; use another --out_dir")
    index = read_index(path)
    refuse_other_model(config, tokenizer, path, index, MUST_MATCH)
    iteration = index["counters"]["iteration"]
    by_updates = config.train_iters > 0 and not config.train_epochs
    if chosen and by_updates and config.train_iters <= iteration and not config.eval_only:
        why = f"the checkpoint {path} has {iteration} update{'s' * (iteration != 1)} already; set more"
        raise UserError(f"train_iters={config.train_iters}: {why}")
    sets = index["data"] or data  # convert.py writes none
    if data and mixture(sets) != mixture(data):
        shares = ",".join(f"{entry['share']}:{entry['name']}" for entry in sets)
        remedy = "use the same data, or begin a new run with --initial_weights"
        why = f"not the training data of the checkpoint {path}, {shares}"
        raise UserError(f"data_dir={config.data_dir}: {why}; {remedy}")
    later = [step for step in all_steps(config.out_dir) if step > iteration]
    if later and not config.eval_only:  # the next run would resume from the latest one
        why = f"{config.out_dir} contains the later step_{later[-1]}"
        raise UserError(f"resume={config.resume}: {why}; leave out --resume to go on there, or use another --out_dir")
    return path


def refuse_other_model(config, tokenizer, path, index, names):
    """Raise UserError if a checkpoint has other values of the fields `names`, or another number of positions."""
    saved = index["config"] | {"tokenizer": index["tokenizer"]}
    values = vars(config) | {"tokenizer": tokenizer}
    for name in names:
        if saved.get(name, values[name]) != values[name]:
            raise UserError(f"{name}={values[name]}: the checkpoint {path} has {name}={saved[name]}")
    positions = saved["max_position_embeddings"] or saved.get("seq_length")
    if positions != config.positions and "embedding.position" in index["shapes"]:  # a table of positions
        fields = f"seq_length={config.seq_length}, max_position_embeddings={config.max_position_embeddings}"
        remedy = f"set --max_position_embeddings={positions}"
        raise UserError(f"{fields}: the checkpoint {path} has {positions} positions; {remedy}")


def check_weights(config, tokenizer):
    """Raise UserError if `initial_weights` is no checkpoint of this model."""
    path = find(config.initial_weights)
    if path is None:
        raise UserError(f"initial_weights={config.initial_weights}: {nothing_in(config.initial_weights)}")
    # A longer seq_length, and with it another rotary_base, is a usual way to go on.
    names = [name for name in MUST_MATCH if name not in ("seed", "optimizer", "seq_length", "rotary_base")]
    refuse_other_model(config, tokenizer, path, read_index(path), names)


def restarted():
    """Return whether torchrun or Slurm started this command again."""
    return any(variable(f"{name}_RESTART_COUNT") for name in ("TORCHELASTIC", "SLURM"))


# --- load -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_checkpoint(path, model, zero, moments=True):
    """Fill this rank's master weights and, if wanted, moments. Every rank calls this, then `parameters_from_master`.

    Return the checkpoint's index.

    Raises the same UserError on all ranks if the model is another one, or if a file is missing or damaged.
    """
    folder, mesh = Path(path), zero.mesh
    index = agree(mesh.world, lambda: read_index(path))
    jobs = [job for bucket in zero.in_order for job in arrays(folder, bucket, *bucket.bounds)]
    jobs = [job for job in jobs if moments or ".moment" not in job[0].name]
    agree(mesh.world, lambda: compare_shapes(folder, index, model))
    agree(mesh.world, lambda: in_threads(partial(read_piece, index["dtype"]), jobs))
    used = [name for name in index["files"] if moments or ".moment" not in name]
    share = used[mesh.world.rank :: mesh.world.size]
    agree(mesh.world, lambda: verify_files(folder, index["files"], share))
    return index


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
        transfer(file, file.readinto, local, piece, tp)
    flat.copy_(torch.from_numpy(local))
