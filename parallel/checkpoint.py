"""Checkpoints: the disk holds logical tensors, so that what one layout saved any other layout loads.

    out/tiny/step_300/
        index.json                        shapes, dtype, configuration, counters: all that is not an array
        block0.qkv.weight                 the whole tensor, C order, master dtype, nothing else in the file
        block0.qkv.weight.moment0  ...    AdamW's two moments
        ...

A rank has, of each unit's flat buffers, one piece to write: its data parallel shard (`Unit.shard`), which may begin
and end in the middle of a parameter that is itself a tensor parallel part of the logical one. Both cuts together are
a list of byte runs (`runs`), written with `pwrite` into the one file that all ranks share, and read back by the same
runs from a memmap by whatever ranks a later layout has. There is no conversion tool because there is nothing to
convert.

A checkpoint is written into `step_N.writing`, flushed by every rank, and renamed when all are done: under its final
name it is always whole. The latest one is found by looking. Nothing is ever unpickled.

(Positioned writes, not shared writable memmaps: on network file systems two hosts that write to one page lose updates.)
"""

import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import torch

from errors import UserError
from parallel.comm import agree

MUST_MATCH = (  # what a checkpoint can't be continued without
    "num_layers hidden_size num_attention_heads seq_length max_position_embeddings vocab_size seed optimizer"
).split()


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


def pieces(zero, begin_end):
    """(unit, parameter index, spec, begin, end) of every parameter that meets `begin_end(unit)` in the unit's buffer.

    begin, end: in elements of the local parameter.
    """
    for unit in zero.units.values():
        low, high = begin_end(unit)
        for i, p in enumerate(unit.params):
            begin, end = max(low - unit.offsets[i], 0), min(high - unit.offsets[i], p.numel())
            if begin < end:
                yield unit, i, p.spec, begin, end


def files(unit, spec):
    """(file name, this rank's piece of the flat buffer, from unit.owned[0] on) of a parameter's weight and moments."""
    yield spec.name, unit.master
    for k, moment in enumerate(unit.moments):
        yield f"{spec.name}.moment{k}", moment


def save(out_dir, step, zero, state, keep=0):
    """Write `out_dir/step_N`: called by every rank of the mesh, with the same `state`, the rest of index.json.

    Keeps the `keep` latest (0: all). Raises UserError on every rank if any can't write; nothing half-written stays.
    """
    final = Path(out_dir) / f"step_{step}"
    writing = final.with_name(final.name + ".writing")
    world, first = zero.mesh.world, zero.mesh.rank == 0

    def prepare():
        with _writing_to(out_dir):
            if first:
                shutil.rmtree(writing, ignore_errors=True)
                writing.mkdir(parents=True)

    def write():
        with _writing_to(out_dir):
            _write_arrays(writing, zero)

    def publish():
        with _writing_to(out_dir):
            if first:
                _write_index(writing, zero, state)
                writing.rename(final)
                _flush(out_dir)
                for old in all_steps(out_dir)[:-keep] if keep else []:
                    shutil.rmtree(step_path(out_dir, old), ignore_errors=True)

    try:
        for action in (prepare, write, publish):
            agree(world, UserError, action)
    except UserError:
        if first:
            shutil.rmtree(writing, ignore_errors=True)
        raise


class _writing_to:
    """Turns a full disk or a read-only folder into one line."""

    def __init__(self, out_dir):
        self.out_dir = out_dir

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, OSError):
            raise UserError(f"out_dir={self.out_dir}: can't write the checkpoint: {error}") from error


def _write_arrays(folder, zero):
    mesh = zero.mesh
    for unit, i, spec, begin, end in pieces(zero, lambda unit: unit.shard):
        if unit.holders.rank != 0 or (spec.tp_dim is None and mesh.tp.rank != 0):
            continue  # another rank has the same
        for name, flat in files(unit, spec):
            first = unit.offsets[i] - unit.owned[0]
            local = flat[first + begin : first + end].cpu().numpy()
            bytes_ = memoryview(local).cast("B")
            size = local.itemsize
            fd = os.open(folder / name, os.O_CREAT | os.O_WRONLY, 0o644)
            try:
                for at, whole, length in runs(spec, begin, end, mesh.tp.rank, mesh.tp.size):
                    part = bytes_[(at - begin) * size : (at - begin + length) * size]
                    offset = whole * size
                    while part:  # a write may stop half-way (2 GiB on Linux, a full disk)
                        written = os.pwrite(fd, part, offset)
                        part, offset = part[written:], offset + written
                os.fsync(fd)
            finally:
                os.close(fd)


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
    for name in MUST_MATCH:
        if then[name] != now[name]:
            raise UserError(f"{name}={now[name]}: the checkpoint {path} has {name}={then[name]}")
    if index["tokenizer"] != tokenizer:
        raise UserError(
            f"data_dir={config.data_dir}: its tokenizer is {tokenizer}, "
            f"but the checkpoint {path} has {index['tokenizer']}"
        )


@torch.no_grad()
def load(path, zero):
    """Fill the units' master weights and moments from the checkpoint `path`. Raises UserError, on any rank by itself.

    Each rank reads its own parts only: of the files, whole or cut over tp; of the pages, those that it needs. Once all
    have theirs, `zero.parameters_from_master` makes the parameters of them.
    """
    index, mesh = read_index(path), zero.mesh
    dtype = np.dtype(index["dtype"])
    for unit, i, spec, begin, end in pieces(zero, lambda unit: unit.owned):
        if index["shapes"].get(spec.name) != list(spec.shape):
            raise UserError(f"{path}: {spec.name} is {index['shapes'].get(spec.name)} there, {list(spec.shape)} here")
        for name, flat in files(unit, spec):
            whole = _open(Path(path) / name, dtype, math.prod(spec.shape))
            local = np.empty(end - begin, dtype)
            for at, offset, length in runs(spec, begin, end, mesh.tp.rank, mesh.tp.size):
                local[at - begin : at - begin + length] = whole[offset : offset + length]
            first = unit.offsets[i] - unit.owned[0]
            flat[first + begin : first + end].copy_(torch.from_numpy(local))


def _open(path, dtype, elements):
    try:
        if path.stat().st_size != elements * dtype.itemsize:
            raise UserError(f"{path}: {path.stat().st_size} bytes instead of {elements * dtype.itemsize}: damaged")
        return np.memmap(path, dtype, "r")
    except OSError as error:
        raise UserError(f"{path}: {error}") from None
