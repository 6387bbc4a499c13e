"""Checkpoints: the disk holds logical tensors, so that what one layout saved any other layout loads.

    out/tiny/step_300/
        index.json                        shapes, dtype, configuration, counters: all that is not an array
        block0.qkv.weight                 the whole tensor, C order, master dtype, nothing else in the file
        block0.qkv.weight.moment0  ...    AdamW's two moments
        ...

A rank writes its data parallel shard of each bucket (`Bucket.shard`). The shard may begin and end in the middle of a
parameter, which is itself a tensor parallel part of the logical one. Both cuts together are a list of byte runs
(`runs`), written with `pwrite` into the one file that all ranks share. Whatever ranks a later layout has read their
own runs back from a memmap. There is no conversion tool because there is nothing to convert.

A checkpoint is written into `step_N.writing`, flushed by every rank, and renamed when all are done: under its final
name it is always whole. The latest one is found by looking. Nothing is ever unpickled.

(Positioned writes, not shared writable memmaps: on network file systems two hosts that write to one page lose updates.)
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

# What a checkpoint can't be continued without.
MUST_MATCH = "num_layers hidden_size num_attention_heads seq_length max_position_embeddings vocab_size seed optimizer"


def runs(spec, begin, end, tp_rank, tp):
    """How elements begin .. end of a rank's local tensor (flattened) lie in the whole one.

    Yields (local offset, whole offset, length), in elements, in order. Cut along `tp_dim`, the whole tensor is
    rows [outer, tp, inner]: a rank has, of each outer row, `inner` consecutive elements.
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
    """(file name, Piece, its elements) of every weight and moment that meets begin .. end of a bucket's flat buffer.

    The elements are a view into `master` or a moment, which have the bucket's elements from owned[0] on.
    """
    first = bucket.owned[0]
    for piece in bucket.layout.pieces(begin, end):
        if piece.begin < piece.end:
            yield piece.spec.name, piece, piece.of(bucket.master[begin - first : end - first])
            for k, moment in enumerate(bucket.moments):
                yield f"{piece.spec.name}.moment{k}", piece, piece.of(moment[begin - first : end - first])


def save(out_dir, step, zero, state, keep=0):
    """Write `out_dir/step_N`: called by every rank of the mesh, with the same `state`, the rest of index.json.

    Keeps the `keep` latest (0: all). Raises UserError on every rank if any can't write; nothing half-written stays.
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
            _write_index(writing, zero, state)
            writing.rename(final)
            _flush(out_dir)
            for old in all_steps(out_dir)[:-keep] if keep else []:
                shutil.rmtree(step_path(out_dir, old), ignore_errors=True)

    def attempt(action):
        """A full disk or a read-only folder becomes one line."""
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
                continue  # another rank has the same
            local = flat.cpu().numpy()
            # Not open(folder / name, "wb"): that would throw away what other ranks have written into the file.
            with open(os.open(folder / name, os.O_CREAT | os.O_WRONLY, 0o644), "wb") as file:
                for at, whole, length in runs(piece.spec, piece.begin, piece.end, tp.rank, tp.size):
                    begin, offset = at - piece.begin, whole * local.itemsize
                    part = memoryview(local[begin : begin + length]).cast("B")
                    while part:  # a write may stop half-way (2 GiB on Linux, a full disk)
                        written = os.pwrite(file.fileno(), part, offset)
                        part, offset = part[written:], offset + written
                os.fsync(file.fileno())


def _write_index(folder, zero, state):
    index = {"dtype": str(zero.master_dtype).removeprefix("torch."), **state}
    with open(folder / "index.json", "w") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _flush(folder)


def _flush(folder):
    """Names in a folder are data of the folder: they, too, must reach the disk."""
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def all_steps(out_dir):
    """The steps of the whole checkpoints in out_dir, ascending."""
    names = (re.fullmatch(r"step_(\d+)", path.name) for path in Path(out_dir).glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def step_path(out_dir, step):
    return Path(out_dir) / f"step_{step}"


def find(path):
    """The checkpoint at `path`: itself one, or a folder of which the latest is taken. None if there is none."""
    path = Path(path)
    if (path / "index.json").is_file():
        return path
    steps = all_steps(path)
    return step_path(path, steps[-1]) if steps else None


def read_index(path):
    """index.json of the checkpoint `path`. Raises UserError."""
    try:
        return json.loads((Path(path) / "index.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a checkpoint: {error}") from None


def refuse_contradictions(path, index, config, tokenizer):
    """What would silently train another model is an error. Raises UserError that names the field."""
    then, now = index["config"], vars(config)
    for name in MUST_MATCH.split():
        if then[name] != now[name]:
            raise UserError(f"{name}={now[name]}: the checkpoint {path} has {name}={then[name]}")
    if index["tokenizer"] != tokenizer:
        there = f"the checkpoint {path} has {index['tokenizer']}"
        raise UserError(f"data_dir={config.data_dir}: its tokenizer is {tokenizer}, but {there}")


def to_resume(config, tokenizer):
    """The path of the checkpoint to go on from, or None. Raises UserError if it contradicts the configuration."""
    place = config.out_dir if config.resume in ("auto", "none") else config.resume
    path = find(place)
    if path is None:
        if config.resume not in ("auto", "none") or config.eval_only:
            raise UserError(f"resume={config.resume}: there is no checkpoint in {place}")
        return None
    if config.resume == "none":
        raise UserError(f"resume=none: {config.out_dir} holds {path.name}; remove it, or say another --out_dir")
    index = read_index(path)
    refuse_contradictions(path, index, config, tokenizer)
    later = [step for step in all_steps(config.out_dir) if step > index["counters"]["iteration"]]
    if later and not config.eval_only:  # the next time, these would be taken for the latest of this run
        advice = "remove what is later, or say another --out_dir"
        raise UserError(f"resume={config.resume}: {config.out_dir} holds step_{later[-1]}, which is later; {advice}")
    return path


@torch.no_grad()
def load(path, zero):
    """Fill the buckets' master weights and moments from the checkpoint `path`. Raises UserError, on any rank by itself.

    Each rank reads its own parts only: of the files, whole or cut over tp; of the pages, those that it needs. Once all
    have theirs, `zero.parameters_from_master` makes the parameters of them.
    """
    index, tp = read_index(path), zero.mesh.tp
    dtype = np.dtype(index["dtype"])
    for bucket in zero.buckets.values():
        for name, (spec, begin, end, _), flat in files(bucket, *bucket.owned):
            if index["shapes"].get(spec.name) != list(spec.shape):
                there = index["shapes"].get(spec.name)
                raise UserError(f"{path}: {spec.name} is {there} there, {list(spec.shape)} here")
            whole = _open(Path(path) / name, dtype, math.prod(spec.shape))
            local = np.empty(end - begin, dtype)
            for at, offset, length in runs(spec, begin, end, tp.rank, tp.size):
                local[at - begin : at - begin + length] = whole[offset : offset + length]
            flat.copy_(torch.from_numpy(local))


def _open(path, dtype, elements):
    try:
        if path.stat().st_size != elements * dtype.itemsize:
            raise UserError(f"{path}: {path.stat().st_size} bytes instead of {elements * dtype.itemsize}: damaged")
        return np.memmap(path, dtype, "r")
    except OSError as error:
        raise UserError(f"{path}: {error}") from None
