"""Save and load checkpoints. They contain whole tensors, so any layout can load the checkpoint of any other layout.

    out/tiny/step_300/
        index.json                        shapes, dtype, configuration, counters, sums of the other files, ...
        block0.qkv.weight                 the whole tensor, C order, master dtype, no header
        block0.qkv.weight.moment0  ...    AdamW's two moments
        tokenizer.json  ...               the data set's copy of the vocabulary (none for `bytes`)
        ...

A rank writes its shard of each bucket (`Bucket.shard`). The shard may begin and end in the middle of a parameter, and
the parameter may be cut over tp. So a rank's elements are a list of runs (consecutive elements) in the whole tensor.
The function `runs` computes this list. All ranks write their runs into the same file with `pwrite`. The ranks of a
later layout read their own runs with `preadv`. No conversion tool is necessary. THREADS threads of a rank work on
different files, so that one file is copied while another one is flushed.

Every rank writes into the folder `step_N.writing` and flushes its files. Then rank 0 renames the folder to `step_N`, so
a folder with the final name is always complete. The latest checkpoint is the `step_N` with the largest N. Before an old
checkpoint is removed, it is renamed to `step_N.removing`. No file is unpickled, so loading a checkpoint runs no code
from it.

A damaged file is never used. index.json has the sum of every array (`checksum.py`) and the CRC-32 of every other file.
Its last entry is the CRC-32 of its own bytes before this entry. A rank computes the sum of each run while the run is in
the processor's cache. The sums of the ranks that have one copy of an array together are added and compared with the
index. So every byte that any rank uses is verified, in any layout. A checkpoint without sums (an older version wrote
it) is loaded without verification, and the run prints a line.

Writing with shared memmaps would be wrong: on network file systems, two hosts that write to the same page lose updates.
"""

import contextlib
import json
import math
import os
import re
import shutil
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from errors import UserError, explained, parse_json, regular
from parallel import checksum
from parallel.comm import agree, all_reduce
from parallel.schedules import ASYNCHRONOUS

# Fields that must be equal in the configuration and in the checkpoint.
MUST_MATCH = (
    "num_layers hidden_size num_attention_heads seq_length max_position_embeddings vocab_size activation seed optimizer"
)

REMEDY = "; use another checkpoint: remove this one, or set --resume"
THREADS = 4  # of a rank: a flush waits for the disk, so more threads than cores are useful


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


def files(bucket, begin, end, empty=False):
    """Yield (file name, Piece, elements) of each weight and moment in begin .. end of a bucket's flat buffer.

    A Piece is the part of one parameter in begin .. end. The elements are a view into `master` or a moment. These
    tensors begin at element owned[0] of the buffer: a rank keeps only the elements that it updates (`Bucket.owned`).
    empty: also yield Pieces without elements.
    """
    first = bucket.owned[0]
    for piece in bucket.layout.pieces(begin, end):
        if piece.begin < piece.end or empty:
            yield piece.spec.name, piece, piece.of(bucket.master[begin - first : end - first])
            for k, moment in enumerate(bucket.moments):
                yield f"{piece.spec.name}.moment{k}", piece, piece.of(moment[begin - first : end - first])


def save(out_dir, step, zero, state, keep=0, copies=(), good=None):
    """Write `out_dir/step_N`. Every rank of the mesh calls this with the same `state` (entries of index.json).

    copies: files that are also copied into the checkpoint, if they exist. Keeps the `keep` latest checkpoints (0: all),
    step_0, which convert.py wrote, and the checkpoint of step `good`. Removes what a killed run left behind. If one
    rank can't write, raises UserError on every rank and removes the incomplete checkpoint.
    """
    final = step_path(out_dir, step)
    writing = final.with_name(final.name + ".writing")
    world, first = zero.mesh.world, zero.mesh.rank == 0

    def prepare():
        if first:
            for left in Path(out_dir).glob("step_*ing"):  # of a run that was killed: step_N.writing, step_N.removing
                shutil.rmtree(left, ignore_errors=True)
            writing.mkdir(parents=True)

    def publish(sums):
        if first:
            for path in filter(os.path.isfile, copies):
                shutil.copyfile(path, writing / path.name)
                _flush(writing / path.name)
            write_index(writing, zero.master_dtype, state, sums)
            writing.rename(final)
            _flush(out_dir)
            for old in all_steps(out_dir)[:-keep] if keep else []:
                if old not in (0, good):
                    _remove(step_path(out_dir, old))

    def attempt(action):
        """Turn an OSError (a full disk, a read-only folder) into a UserError."""
        try:
            return action()
        except OSError as error:
            raise UserError(f"out_dir={out_dir}: can't write the checkpoint: {error}") from error

    try:
        agree(world, UserError, partial(attempt, prepare))
        sums = agree(world, UserError, partial(attempt, partial(_write_arrays, writing, zero)))
        sums = _added_over_world(sums, array_names(state["shapes"], zero), zero)
        agree(world, UserError, partial(attempt, partial(publish, sums)))
    except UserError:
        if first:
            shutil.rmtree(writing, ignore_errors=True)
        raise


def array_names(shapes, zero):
    """Return the names of all arrays in a checkpoint: the weights and their moments. shapes: {weight: shape}."""
    moments = len(next(iter(zero.buckets.values())).moments)
    return [file for name in shapes for file in (name, *(f"{name}.moment{k}" for k in range(moments)))]


def _write_arrays(folder, zero):
    """Write and flush this rank's elements of all arrays. Return {file name: their terms in the file's sum}."""
    tp, jobs = zero.mesh.tp, []
    for bucket in zero.buckets.values():
        for name, piece, flat in files(bucket, *bucket.shard):
            if bucket.holders.rank == 0 and (piece.spec.tp_dim is not None or tp.rank == 0):
                jobs.append((folder / name, piece, flat, tp))  # else another rank writes the same elements
    with ThreadPoolExecutor(THREADS) as pool:
        sums = list(pool.map(_write_array, *zip(*jobs, strict=True))) if jobs else []
    return {path.name: total for (path, *_), total in zip(jobs, sums, strict=True)}


def _write_array(path, piece, flat, tp):
    """Write and flush one piece of an array. Return its terms in the file's sum."""
    local, total = flat.cpu().numpy(), 0
    # open(path, "wb") would delete the elements that other ranks have written into the file.
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644), "wb") as file:
        for rows, offset, stride in groups(piece, local, tp):
            total += checksum.of_rows(rows, offset, stride)
            for i, row in enumerate(rows):
                at = offset + i * stride
                while len(row):  # one call may write only a part
                    written = os.pwrite(file.fileno(), row, at)
                    row, at = row[written:], at + written
        os.fsync(file.fileno())
    return total


def groups(piece, local, tp):
    """Yield (rows, offset, stride) for all bytes of a piece, in groups that fit into a core's cache.

    local: the piece's elements, a numpy array. rows: [k, n] uint8, a view into `local`; row i lies in the file from
    byte offset + i * stride on. Short runs of one length are the rows of a group; a long run is cut into groups.
    """
    size, width, data = 8 * checksum.BLOCK, local.itemsize, local.view(np.uint8)
    begin = count = n = offset = stride = 0  # the group so far: `count` rows of n bytes from data[begin] on
    for at, whole, length in runs(piece.spec, piece.begin, piece.end, tp.rank, tp.size):
        place = whole * width
        if length * width == n and (count + 1) * n <= size:  # runs of one length have the same distance
            count, stride = count + 1, (place - offset) // count
            continue
        yield from _cut(data[begin : begin + count * n].reshape(count, n), offset, stride, size)
        begin, count, n, offset = (at - piece.begin) * width, 1, length * width, place
    yield from _cut(data[begin : begin + count * n].reshape(count, n), offset, stride, size)


def _cut(rows, offset, stride, size):
    """Cut one long row where the blocks of a sum end. Several rows are short enough together."""
    if len(rows) > 1:
        yield rows, offset, stride
        return
    begin, end = 0, rows.shape[1]
    while begin < end:
        count = min(size - (offset + begin) % size, end - begin)
        yield rows[:, begin : begin + count], offset + begin, 0
        begin += count


def _added_over_world(sums, names, zero):
    """Return {file name: its sum} of all arrays. sums: {file name: the terms of this rank}."""
    zero.mesh.ledger.phase = "setup"
    terms = torch.tensor([checksum.signed(sums.get(name, 0)) for name in names], device=zero.device)
    return dict(zip(names, all_reduce(terms, zero.mesh.world, "checksums").wait().tolist(), strict=True))


def write_index(folder, dtype, state, sums):
    """Write index.json and flush the folder.

    dtype: of the arrays; state: the other entries; sums: {name of an array's file: its sum}. The CRC-32 of the other
    files in the folder and of index.json are computed here.
    """
    others = {path.name: _crc(path.read_bytes()) for path in sorted(folder.iterdir()) if path.name not in sums}
    sums = {name: checksum.as_text(total) for name, total in sums.items()}
    index = {"dtype": str(dtype).removeprefix("torch."), **state, "sums": sums, "copies": others}
    text = json.dumps(index, indent=1).removesuffix("\n}")
    with open(folder / "index.json", "w") as file:
        file.write(f'{text},\n "crc32": "{_crc(text.encode())}"\n}}')
        file.flush()
        os.fsync(file.fileno())
    _flush(folder)


def _crc(data):
    return f"{zlib.crc32(data):08x}"


def _remove(path):
    """Remove a checkpoint. If the run is killed meanwhile, the remains have no checkpoint's name."""
    gone = path.with_name(path.name + ".removing")
    with contextlib.suppress(OSError):  # the new checkpoint is complete: the run continues
        path.rename(gone)
        shutil.rmtree(gone)


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
    """Return the content of index.json of the checkpoint `path`. Raises UserError if it or a copied file is damaged."""
    path = Path(path)
    try:
        data = regular(path / "index.json").read_bytes()
        end = re.fullmatch(rb'(.*),\n "crc32": "([0-9a-f]{8})"\n}', data, re.DOTALL)
        if (end and _crc(end[1]) != end[2].decode()) or (not end and b'"sums"' in data):
            raise UserError(f"{path}/index.json: damaged: its content does not match its CRC-32{REMEDY}")
        index = parse_json(data)
        _check_index(index)
        for name, crc in index.get("copies", {}).items():
            if _crc((path / name).read_bytes()) != crc:
                raise UserError(f"{path}/{name}: damaged: its content does not match its CRC-32{REMEDY}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a checkpoint: {type(error).__name__}: {error}") from None
    return index


def _check_index(index):
    """Raise ValueError, KeyError, TypeError or AttributeError if an entry of index.json is missing or of another type.

    index.json of an older version has no CRC-32, so a damaged entry must be found here.
    """
    integers = [*(n for shape in index["shapes"].values() for n in shape), *index["counters"].values()]
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in integers):
        raise ValueError("shapes and counters should be integers of 0 or more, below 2^63")
    if set(index["counters"]) != {"iteration", "consumed_samples", "updates"}:
        raise ValueError(f"counters are {list(index['counters'])}")
    if any(len([float(x) for x in step]) != 8 for step in index.get("interval", [])):
        raise ValueError("interval should have eight numbers for each step")
    if index["dtype"] not in ("float32", "float64"):
        raise ValueError(f"dtype is {index['dtype']}")
    kinds = [type(x) for x in (index["config"], index.get("data", {}), index["tokenizer"])]
    if kinds != [dict, dict, str]:
        raise TypeError("config and data should be objects and tokenizer a string")
    scale = index["loss_scale"]
    if not (type(scale["clean"]) is type(scale["patience"]) is int and 0 < scale["scale"] < math.inf):
        raise TypeError("loss_scale should have a positive scale and two integers")


def refuse_contradictions(path, index, config, tokenizer, data=None):
    """Raise UserError if a field of MUST_MATCH, the tokenizer or the training data differs from the checkpoint's.

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
    if not config.new_data and (text := other_data(index, data)):
        remedy = "use the same data, or set --new_data=True to continue with this data"
        raise UserError(f"data_dir={config.data_dir}: not the training data of the checkpoint {path}: {text}; {remedy}")


def other_data(index, data):
    """Return how `data`, a `data.identity`, differs from the data of a checkpoint's index, or "".

    `made_from` is only printed: it has absolute paths and times, which differ after the data was moved.
    """
    there = index.get("data")
    if not there or not data or all(there.get(name) == data[name] for name in ("dtype", "tokens", "crc32")):
        return ""
    texts = []
    for x in (data, there):
        source = f", made from {json.dumps(x['made_from'])}" if x.get("made_from") else ""
        texts.append(f"{x.get('tokens')} tokens of {x.get('dtype')} with the CRC-32 {x.get('crc32')}{source}")
    return f"{texts[0]}, the checkpoint's has {texts[1]}"


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


@torch.no_grad()
def load(path, zero):
    """Fill the buckets' master weights and moments from the checkpoint `path`, and verify them.

    Every rank of the mesh calls this. Each rank reads only its own elements. Afterwards, call
    `zero.parameters_from_master` to set the parameters. Raises the same UserError on all ranks if a file is missing,
    damaged, or of another shape.
    """
    index, world = read_index(path), zero.mesh.world
    sums = agree(world, UserError, partial(_read_arrays, Path(path), index, zero))
    sums = _added_over_copies(sums, zero)
    agree(world, UserError, partial(_compare, path, index, sums))
    if "sums" not in index and world.rank == 0:
        print(f"{path} has no checksums, because an older version saved it: it is not verified", file=sys.stderr)


def _read_arrays(folder, index, zero):
    """Read this rank's elements of all arrays. Return {file name: their terms in the file's sum}."""
    jobs = []
    for bucket in zero.buckets.values():
        for name, piece, flat in files(bucket, *bucket.owned):
            jobs.append((check_array(folder, index, name, piece.spec), piece, flat, zero.mesh.tp))
    read = partial(_read_array, dtype=np.dtype(index["dtype"]))
    with ThreadPoolExecutor(THREADS) as pool:
        sums = list(pool.map(read, *zip(*jobs, strict=True))) if jobs else []
    return {path.name: total for (path, *_), total in zip(jobs, sums, strict=True)}


def _read_array(path, piece, flat, tp, dtype):
    """Read one piece of an array into `flat`. Return its terms in the file's sum."""
    direct = flat.device.type == "cpu" and flat.numpy().dtype == dtype
    local, total = flat.numpy() if direct else np.empty(piece.end - piece.begin, dtype), 0
    with explained(path), open(path, "rb", buffering=0) as file:
        for rows, offset, stride in groups(piece, local, tp):
            for i, row in enumerate(rows):
                at = offset + i * stride
                while len(row):  # one call may read only a part
                    count = os.preadv(file.fileno(), [row], at)
                    if not count:
                        raise UserError(f"{path}: became shorter while it was read")
                    row, at = row[count:], at + count
            total += checksum.of_rows(rows, offset, stride)
    if not direct:
        flat.copy_(torch.from_numpy(local))
    return total


def check_array(folder, index, name, spec):
    """Return the path of an array's file. Raises UserError if it has not the shape of the ParamSpec `spec`."""
    path, shape = folder / name, index["shapes"].get(spec.name)
    if shape != list(spec.shape):
        raise UserError(f"{folder}: {spec.name} has the shape {shape}, the model needs {list(spec.shape)}")
    size = math.prod(shape) * np.dtype(index["dtype"]).itemsize
    with explained(path):
        if path.stat().st_size != size:
            raise UserError(f"{path}: {path.stat().st_size} bytes instead of {size}: damaged")
    return path


def _added_over_copies(sums, zero):
    """Add the terms of the ranks that have read one copy of an array together: its shards over dp, its cuts over tp.

    Every copy gets its own sum, so a rank that has read wrong bytes notices this even if other ranks read right ones.
    """
    zero.mesh.ledger.phase = "setup"
    pieces = {name: (b, p) for b in zero.buckets.values() for name, p, _ in files(b, *b.owned, empty=True)}
    terms = torch.tensor([checksum.signed(sums.get(name, 0)) for name in pieces], device=zero.device)
    if any(bucket.stage >= 1 for bucket, _ in pieces.values()):
        terms = all_reduce(terms, zero.mesh.dp, "checksums").wait()
    cut = torch.tensor([piece.spec.tp_dim is not None for _, piece in pieces.values()], device=zero.device)
    over_tp = all_reduce(terms * cut, zero.mesh.tp, "checksums").wait()
    return dict(zip(pieces, torch.where(cut, over_tp, terms).tolist(), strict=True))


def _compare(path, index, sums):
    """Raise UserError if a sum differs from the index. sums: {file name: sum of its content}."""
    for name, total in sums.items():
        if "sums" in index and index["sums"].get(name) != checksum.as_text(total):
            raise UserError(f"{path}/{name}: damaged: its content does not match its checksum{REMEDY}")


def read_tensor(folder, index, spec):
    """Return a whole weight of a checkpoint, verified, as a numpy array of the ParamSpec's shape. Raises UserError."""
    path = check_array(folder, index, spec.name, spec)
    with explained(path):
        whole = np.fromfile(path, index["dtype"])
    _compare(folder, index, {spec.name: checksum.of_bytes(whole)})
    return whole.reshape(spec.shape)
