"""Save and load checkpoints. They contain whole tensors, so any layout can load the checkpoint of any other layout.

    out/tiny/step_300/
        index.json                        shapes, dtype, configuration, counters, ...
        block0.qkv.weight                 the whole tensor, C order, master dtype, no header
        block0.qkv.weight.moment0  ...    AdamW's two moments
        tokenizer.json  ...               the data set's copy of the vocabulary (none for `bytes`)
        ...

A rank writes its shard of each bucket (`Bucket.shard`). The shard may begin and end in the middle of a parameter, and
the parameter may be cut over tp. So a rank's elements are a list of runs (consecutive elements) in the whole tensor.
The function `runs` computes this list. All ranks write their runs into the same file with `pwrite`. The ranks of a
later layout read their own runs with a memmap. No conversion tool is necessary.

Every rank writes into the folder `step_N.writing` and flushes its files. Then rank 0 renames the folder to `step_N`, so
a folder with the final name is always complete. The latest checkpoint is the `step_N` with the largest N. No file is
unpickled, so loading a checkpoint runs no code from it.

Writing with shared memmaps would be wrong: on network file systems, two hosts that write to the same page lose updates.
"""

import json
import math
import os
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import torch

from errors import UserError
from parallel.comm import agree
from parallel.schedules import ASYNCHRONOUS

# Fields that must be equal in the configuration and in the checkpoint.
MUST_MATCH = (
    "num_layers hidden_size num_attention_heads seq_length max_position_embeddings vocab_size activation seed optimizer"
)


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


def files(bucket, begin, end):
    """Yield (file name, Piece, elements) of each weight and moment in begin .. end of a bucket's flat buffer.

    A Piece is the part of one parameter in begin .. end. The elements are a view into `master` or a moment. These
    tensors begin at element owned[0] of the buffer: a rank keeps only the elements that it updates (`Bucket.owned`).
    """
    first = bucket.owned[0]
    for piece in bucket.layout.pieces(begin, end):
        if piece.begin < piece.end:
            yield piece.spec.name, piece, piece.of(bucket.master[begin - first : end - first])
            for k, moment in enumerate(bucket.moments):
                yield f"{piece.spec.name}.moment{k}", piece, piece.of(moment[begin - first : end - first])


def save(out_dir, step, zero, state, keep=0, copies=()):
    """Write `out_dir/step_N`. Every rank of the mesh calls this with the same `state` (entries of index.json).

    copies: files that are also copied into the checkpoint, if they exist. Keeps the `keep` latest checkpoints (0: all).
    If one rank can't write, raises UserError on every rank and removes the incomplete checkpoint.
    """
    final = step_path(out_dir, step)
    writing = final.with_name(final.name + ".writing")
    world, first = zero.mesh.world, zero.mesh.rank == 0

    def prepare():
        if first:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)

    def publish():
        if first:
            for path in filter(os.path.isfile, copies):
                shutil.copyfile(path, writing / path.name)
                _flush(writing / path.name)
            write_index(writing, zero.master_dtype, state)
            writing.rename(final)
            _flush(out_dir)
            for old in all_steps(out_dir)[:-keep] if keep else []:
                shutil.rmtree(step_path(out_dir, old), ignore_errors=True)

    def attempt(action):
        """Turn an OSError (a full disk, a read-only folder) into a UserError."""
        try:
            action()
        except OSError as error:
            raise UserError(f"out_dir={out_dir}: can't write the checkpoint: {error}") from error

    try:
        for action in (prepare, partial(_write_arrays, writing, zero), publish):
            agree(world, UserError, partial(attempt, action))
    except UserError:
        if first:
            shutil.rmtree(writing, ignore_errors=True)
        raise


def _write_arrays(folder, zero):
    tp = zero.mesh.tp
    for bucket in zero.buckets.values():
        for name, piece, flat in files(bucket, *bucket.shard):
            if bucket.holders.rank != 0 or (piece.spec.tp_dim is None and tp.rank != 0):
                continue  # another rank writes the same elements
            local = flat.cpu().numpy()
            # open(folder / name, "wb") would delete the elements that other ranks have written into the file.
            with open(os.open(folder / name, os.O_CREAT | os.O_WRONLY, 0o644), "wb") as file:
                for at, whole, length in runs(piece.spec, piece.begin, piece.end, tp.rank, tp.size):
                    begin, offset = at - piece.begin, whole * local.itemsize
                    part = memoryview(local[begin : begin + length]).cast("B")
                    while part:  # one call may write only a part (on Linux at most 2 GiB)
                        written = os.pwrite(file.fileno(), part, offset)
                        part, offset = part[written:], offset + written
                os.fsync(file.fileno())


def write_index(folder, dtype, state):
    """Write index.json and flush the folder. dtype: of the arrays; state: the other entries."""
    index = {"dtype": str(dtype).removeprefix("torch."), **state}
    with open(folder / "index.json", "w") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _flush(folder)


def _flush(path):
    """Flush a file or a folder to disk. A file name is data of its folder, so fsync of the file is not enough."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


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


def read_index(path):
    """Return the content of index.json of the checkpoint `path`. Raises UserError."""
    try:
        return json.loads((Path(path) / "index.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a checkpoint: {error}") from None


def refuse_contradictions(path, index, config, tokenizer):
    """Raise UserError if a field of MUST_MATCH or the tokenizer differs from the checkpoint's.

    Fields that convert.py leaves open are not in the checkpoint. Older checkpoints have no `activation`: it was gelu.
    """
    then, now = {"activation": "gelu"} | index["config"], vars(config)
    for name in MUST_MATCH.split():
        if name in then and then[name] != now[name]:
            raise UserError(f"{name}={now[name]}: the checkpoint {path} has {name}={then[name]}")
    calls, fields = "updates_per_call", (then.get("schedule"), config.schedule)
    if then.get(calls) != now[calls] and all(schedule in ASYNCHRONOUS for schedule in fields):
        raise UserError(f"{calls}={now[calls]}: the checkpoint {path} has {calls}={then.get(calls)}")
    if index["tokenizer"] != tokenizer:
        there = f"the checkpoint {path} has {index['tokenizer']}"
        raise UserError(f"data_dir={config.data_dir}: its tokenizer is {tokenizer}, but {there}")


def to_resume(config, tokenizer):
    """Return the path of the checkpoint to resume from, or None. Raises UserError if it can't be used."""
    place = config.out_dir if config.resume in ("auto", "none") else config.resume
    path = find(place)
    if path is None:
        if config.resume not in ("auto", "none") or config.eval_only:
            raise UserError(f"resume={config.resume}: there is no checkpoint in {place}")
        return None
    if config.resume == "none":
        raise UserError(f"resume=none: {config.out_dir} contains {path.name}; remove it, or use another --out_dir")
    index = read_index(path)
    refuse_contradictions(path, index, config, tokenizer)
    later = [step for step in all_steps(config.out_dir) if step > index["counters"]["iteration"]]
    if later and not config.eval_only:  # the next run would resume from the latest of these
        advice = "remove the later checkpoints, or use another --out_dir"
        raise UserError(f"resume={config.resume}: {config.out_dir} contains the later step_{later[-1]}; {advice}")
    return path


@torch.no_grad()
def load(path, zero):
    """Fill the buckets' master weights and moments from the checkpoint `path`. May raise UserError on some ranks only.

    Each rank reads only its own elements. A memmap reads only the pages that contain them. When all ranks have loaded,
    call `zero.parameters_from_master` to set the parameters.
    """
    index, tp = read_index(path), zero.mesh.tp
    dtype = np.dtype(index["dtype"])
    for bucket in zero.buckets.values():
        for name, (spec, begin, end, _), flat in files(bucket, *bucket.owned):
            if index["shapes"].get(spec.name) != list(spec.shape):
                there = index["shapes"].get(spec.name)
                raise UserError(f"{path}: {spec.name} has the shape {there}, the model needs {list(spec.shape)}")
            whole = map_file(Path(path) / name, dtype, math.prod(spec.shape))
            local = np.empty(end - begin, dtype)
            for at, offset, length in runs(spec, begin, end, tp.rank, tp.size):
                local[at - begin : at - begin + length] = whole[offset : offset + length]
            flat.copy_(torch.from_numpy(local))


def map_file(path, dtype, elements, mode="r"):
    """Return a memmap of a checkpoint's array, [elements]. Raises UserError if the file has another size."""
    try:
        if path.stat().st_size != elements * dtype.itemsize:
            raise UserError(f"{path}: {path.stat().st_size} bytes instead of {elements * dtype.itemsize}: damaged")
        return np.memmap(path, dtype, mode)
    except OSError as error:
        raise UserError(f"{path}: {error}") from None
