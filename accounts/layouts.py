"""Judge layouts: which fit, how long a step takes, and what limits its speed.

`candidates` lists the layouts of a model on a cluster. `judge` returns the facts of one layout as a dict, which
`plan.py` prints, ranks and writes as JSON. The memory is that of the fullest pipeline rank. It has the parts of
`memory.py` and three parts that `memory.py` does not count:

    whole buckets        ZeRO-2 and 3: gradients of three buckets and the word table; ZeRO-3: parameters of two buckets
                         and the word table (`memory.py`, "Not counted")
    logits               of `tensor.ROWS` tokens at a time
    context              CUDA's and NCCL's own memory, RESERVED bytes

The list leaves out layouts if another listed layout is better. Set their fields on the command line to judge them:

    gpipe, chimera, zb-h2    1f1b has gpipe's bubble with less memory; chimera has all parameters twice; zb-h2 keeps
                             twice the activations of zb-h1 and saves nothing if all ranks wait for the gradient norm
    ZeRO-2 and 3 with pp > 1 they reduce gradients, or gather parameters, with every micro-batch
    tp without sp            tp > 1 without sequence parallelism needs more memory and time
"""

import dataclasses
import functools
import gc
import math

import config as configuration
from accounts import seconds, steady
from errors import UserError
from log import hardware_flops, model_flops
from operations import DTYPES
from parallel import schedules
from parallel.tensor import ROWS

FIELDS = ("tp", "pp", "schedule", "chunks", "zero", "sequence_parallel", "recompute", "micro_batch_size")
LISTED = ("1f1b", "interleaved", "zb-h1", "zb-v")
RESERVED = 2 * 2**30  # bytes of a GPU that PyTorch cannot use
GB = 1e9


def cluster(config, device):
    """Return (dtype, its bytes, bytes of a master weight) of a run on `device`. Raises UserError."""
    synchronous = config.schedule not in schedules.ASYNCHRONOUS
    configuration.require(config, "schedule", synchronous, "plan.py predicts only schedules with one update a step")
    dtype = device.dtype if config.dtype == "auto" else config.dtype
    device.peak(dtype)
    item = DTYPES[dtype].itemsize
    return dtype, item, max(item, 4)


# --- which layouts ----------------------------------------------------------------------------------------------------


def candidates(config, gpus, device, fixed):
    """Return the Configs of all layouts that `config.check` accepts. fixed: names of fields that keep their values."""
    found = []

    def choices(name, values):
        return [getattr(config, name)] if name in fixed else values

    widest = 2 * device.per_node  # to show what happens when tensor parallelism leaves the node
    for tp in choices("tp", [2**i for i in range(10) if 2**i <= widest]):
        for pp in choices("pp", divisors(gpus // tp, config.num_layers)):
            dp = gpus // (tp * pp)
            if dp * tp * pp != gpus:
                continue
            ways = list(orders(config, pp, fixed))
            zeros = choices("zero", [0] if dp == 1 else [0, 1] if pp > 1 else [0, 1, 2, 3])
            for b in choices("micro_batch_size", [1, 2, 4, 8]):
                sequence_parallel = choices("sequence_parallel", [tp > 1])[0]
                plain = dict(tp=tp, pp=pp, micro_batch_size=b, sequence_parallel=sequence_parallel)
                plain = dataclasses.replace(config, **plain)
                if not fields_fit(plain, gpus):
                    continue
                for schedule, chunks in ways:
                    made = dataclasses.replace(plain, schedule=schedule, chunks=chunks)
                    if not schedule_fits(made, gpus):
                        continue
                    for zero in zeros:
                        for recompute in choices("recompute", ["none", "full"]):
                            found.append(dataclasses.replace(made, zero=zero, recompute=recompute))
    return found


def divisors(number, most):
    """Return the divisors of `number` that are at most `most`."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def orders(config, pp, fixed):
    """Yield (schedule, chunks) of a pipeline of pp stages."""
    listed = {config.schedule} & schedules.SCHEDULES.keys() if "schedule" in fixed else LISTED if pp > 1 else ["1f1b"]
    for name in listed:
        usual = {"interleaved": [v for v in (2, 3, 4) if config.num_layers % (pp * v) == 0], "zb-v": [2]}
        for chunks in [config.chunks] if "chunks" in fixed else usual.get(name, [1]):
            yield name, chunks


def accepts(config, gpus, **shape):
    """Return True if `config.check` accepts the Config with the fields of `shape`. It builds no long schedule."""
    c = dataclasses.replace(config, **shape)
    if c.schedule in schedules.ASYNCHRONOUS:  # `cluster` refuses them
        return False
    return fields_fit(c, gpus) and schedule_fits(c, gpus)


def fields_fit(c, gpus):
    """Return True if `config.check` accepts everything except schedule and chunks: it checks one micro-batch of 1f1b.

    A batch that grows (rampup_batch_size) or does not divide is checked as it is.
    """
    per_round = c.micro_batch_size * max(1, gpus // (c.tp * c.pp))
    if not c.rampup_batch_size and c.global_batch_size % per_round == 0:
        c = dataclasses.replace(c, schedule="1f1b", chunks=1, global_batch_size=per_round)
    try:
        configuration.check(c, gpus)
    except UserError:
        return False
    return True


def schedule_fits(c, gpus):
    """Return True if the schedule exists. It builds a shorter one, of `steady.short_sent` micro-batches."""
    m = configuration.micro_batches(c, c.global_batch_size, gpus // (c.tp * c.pp))
    try:
        made = steady.schedule(c.schedule, c.pp, steady.short_sent(c.schedule, c.pp, m), c.chunks)
    except UserError:
        return False
    return c.num_layers >= max(made.parts) - 1


# --- one layout -------------------------------------------------------------------------------------------------------


@functools.cache
def model(key, item, wide, on_cpu):
    return steady.Model(configuration.Config(**dict(key)), item, wide, on_cpu)


def model_of(config, item, wide, on_cpu=False):
    """Return the `steady.Model` of a Config, the same for all its layouts."""
    plain = {name: getattr(configuration.Config(), name) for name in FIELDS}
    return model(tuple(sorted((vars(config) | plain).items())), item, wide, on_cpu)


def shape_of(config, gpus):
    """Return the `steady.Shape` of a Config."""
    fields = {name: getattr(config, name) for name in FIELDS[:-1]}
    return steady.Shape(dp=gpus // (config.tp * config.pp), **fields)


def briefly(config, layout, rank, known):
    """Return {part: bytes} that `memory.py` does not count: whole buckets, logits and the context."""
    item, wide = known.item, known.wide
    sizes = {name: bucket.size for name, bucket in layout.buckets(rank).items()}
    word = sizes.pop("word", 0)
    largest = sorted(sizes.values(), reverse=True)
    whole = 0
    if layout.stage >= 2:
        whole += wide * (sum(largest[:3]) + word)
    if layout.stage == 3:
        whole += item * (sum(largest[:2]) + word)
    tokens = min(ROWS, config.micro_batch_size * config.seq_length)
    logits = tokens * config.padded_vocab_size // config.tp * item if word and rank == layout.placement[-1] else 0
    return {"whole buckets": whole, "logits": logits, "context": 0 if known.on_cpu else RESERVED}


def memory_of(config, shape, m, rank, known):
    """Return {part: bytes} on the device of a pipeline rank. known: the `steady.Model`."""
    kept = known.kept(shape, m, config.micro_batch_size, rank)
    if config.offload and not known.on_cpu:  # these lie in the host's memory
        kept = {what: size for what, size in kept.items() if what not in ("master weights", "moments")}
    parts = {what.removesuffix(" at their peak"): int(size) for what, size in kept.items()}
    return parts | briefly(config, known.layout(shape), rank, known)


@functools.cache
def suspects(layout):
    """Return a few pipeline ranks. One of them is the fullest.

    Ranks of one kind have equal numbers of blocks, embeddings and heads. Among them, memory falls or grows along the
    pipeline, or is largest in the middle (Chimera). So the first, the middle and the last rank of each kind suffice.
    """
    kinds, last, ranks = {}, len(layout.table) - 1, len(set(layout.placement))
    for rank in range(ranks):
        units = [unit for chunk in layout.chunks(rank) for unit in layout.units[chunk]]
        kinds.setdefault((len(units), 0 in units, last in units), []).append(rank)
    return sorted({rank for found in kinds.values() for rank in (found[0], found[-1], found[len(found) // 2])})


def judge(config, gpus, device, code="ours", tokens=None, all_ranks=True, simulate=True):
    """Return the facts of one layout as a dict with the keys of plan.py's --json. Sizes in bytes, times in seconds.

    all_ranks: False leaves out memory_by_rank, which is slow for long pipelines. simulate: False returns None for a
    layout whose bubble has no closed form.
    """
    dtype, item, wide = cluster(config, device)
    known, shape, b = (
        model_of(config, item, wide, device.name == "cpu"),
        shape_of(config, gpus),
        config.micro_batch_size,
    )
    layout, m = known.layout(shape), configuration.micro_batches(config, config.global_batch_size, shape.dp)
    tables = {
        rank: (known.sent(shape, m, b, rank), known.states(shape, rank))
        for rank in sorted({0, min(1, config.pp - 1), config.pp - 1})
    }
    parts = seconds.step(config, layout, device, tables, m, item, wide, dtype, code, simulate)
    if not parts:
        return None
    ranks = range(config.pp) if all_ranks else suspects(layout)
    by_rank = {rank: memory_of(config, shape, m, rank, known) for rank in ranks}
    fullest = max(by_rank, key=lambda rank: sum(by_rank[rank].values()))
    step, (total, exposed) = sum(parts.values()), seconds.wires(config, layout, device, tables, parts)
    facts = {
        "layout": {"dp": shape.dp} | {name: getattr(config, name) for name in (*FIELDS, "offload")},
        "gpus": gpus,
        "device": device.name,
        "micro_batches": m,
        "step_seconds": step,
        "compute_seconds": parts["compute"] + parts["recomputation"],
        "bubble": parts["bubble"] / (step - parts["data parallel"] - parts["update"]),
        "exposed_seconds": exposed,
        "hidden": {axis: 1 - exposed[axis] / total[axis] if total[axis] else 0.0 for axis in exposed},
        "sent_bytes": seconds.sent_bytes(tables),
        "step_parts": parts,
        "fullest_rank": fullest,
        "memory_bytes": by_rank[fullest],
        "fits": sum(by_rank[fullest].values()) <= device.memory_bytes,
        "capacity_bytes": device.memory_bytes,
    }
    facts |= speeds(config, gpus, device.peak(dtype), step)
    facts["days"] = (tokens or 20 * parameters(known)) / facts["tokens_per_second"] / 86400
    facts["binds"] = binds(facts, device)
    if all_ranks:
        facts["memory_by_rank"] = [by_rank[rank] for rank in ranks]
    return facts


def speeds(config, gpus, peak, step):
    """Return {name: speed} of a step of `step` seconds. peak: FLOP/s of one GPU."""
    model = model_flops(config, config.global_batch_size) / step / gpus
    hardware = hardware_flops(config, config.global_batch_size) / step / gpus
    return {
        "model_tflops": model / 1e12,
        "hardware_tflops": hardware / 1e12,
        "mfu": model / peak,
        "hfu": hardware / peak,
        "tokens_per_second": config.global_batch_size * config.seq_length / step,
    }


@functools.cache
def parameters(known):
    """Return the number of parameters of a `steady.Model`."""
    return sum(math.prod(shape) for shape in {s.name: s.shape for unit in known.table for s in unit}.values())


def binds(facts, device):
    """Return a sentence: why the layout does not fit, or which part of the step costs most, except computation."""
    layout, parts, step = facts["layout"], facts["step_parts"], facts["step_seconds"]
    if not facts["fits"]:
        what, most = max(facts["memory_bytes"].items(), key=lambda item: item[1])
        missing = (sum(facts["memory_bytes"].values()) - facts["capacity_bytes"]) / GB
        return f"does not fit: {what} {most / GB:.0f} GB on stage {facts['fullest_rank']}; {missing:.1f} GB are missing"
    name = max((part for part in parts if part != "compute"), key=parts.get)
    share = f"{parts[name] / step:.0%} of the step"
    if parts[name] < 0.05 * step:
        return f"computation: {parts['compute'] / step:.0%} of the step; no other part costs 5%"
    if name == "bubble":
        return f"the bubble: {facts['micro_batches']} micro-batches for {layout['pp']} stages, {share}"
    if name == "tensor parallel":
        if layout["tp"] > device.per_node:
            return f"tensor parallelism leaves the node: {share}"
        return f"tensor parallelism: its sums cost {share}"
    if name == "data parallel":
        return f"data parallelism: {share} waits for gradients or parameters of {layout['dp']} ranks"
    if name == "update":
        return f"the update of the weights: {share}" + (", on the hosts" if layout["offload"] else "")
    return f"{name}: {share}"


def rank_all(config, gpus, device, fixed, **options):
    """Return the facts of all candidates: those that fit, the fastest first; then the others, the smallest first."""
    judged = []
    gc.disable()  # else a third of the time: the collector visits all kept schedules and tables again and again
    for c in candidates(config, gpus, device, fixed):
        if facts := judge(c, gpus, device, all_ranks=False, simulate=False, **options):
            judged.append(facts | {"config": c})
    gc.enable()
    return sorted(
        judged, key=lambda f: (not f["fits"], f["step_seconds"] if f["fits"] else sum(f["memory_bytes"].values()))
    )
