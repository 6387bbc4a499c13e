"""Measures a training step of every layout, ours and PyTorch's own: DDP, FSDP2, DTensor, torch.distributed.pipelining.

    python -m bench layouts --only=zero

Ours and PyTorch's ("theirs": `Plain` of plain.py) train the same GPT from the same weights on the same samples. They
take turns in the same processes (Gloo, one thread each). First, losses and gradient norms of three steps are compared
(to 1e-4). Theirs follows PyTorch's tutorials and uses every option that makes it faster: fused AdamW, gradients as
views into buckets, no unnecessary copies or messages.
"""

import contextlib
import gc
import itertools
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

import train
from bench.plain import STEADY, Plain, loss_of, make_optimizer, samples
from bench.tables import chosen, ratios, spread
from config import Config, check
from errors import UserError
from parallel.comm import all_reduce
from parallel.layout import split
from parallel.mesh import Mesh

ROW = "{:<26}{:>4}{:>18}{:>18}{:>18}{:>18}  {}"


def measure(layers: int = 4, hidden: int = 256, seq: int = 128, vocab: int = 2048, repeats: int = 15, only: str = ""):
    """Compare our step with PyTorch's: same model, samples, processes and threads (goal: ours / theirs at most 1).

    --layers, --hidden, --seq, --vocab   the model; a micro-batch is 4 samples
    --repeats                            timed steps of ours and of theirs
    --only                               only layouts whose name contains this text
    """
    names_chosen = chosen([row[0] for row in LAYOUTS], only)
    if vocab % 128:
        raise UserError(f"--vocab={vocab}: should be a multiple of 128; PyTorch's model has no padding")
    sizes = dict(num_layers=layers, hidden_size=hidden, seq_length=seq, vocab_size=vocab, num_attention_heads=8)
    fields = dict(micro_batch_size=4, dtype="fp32", **sizes, **STEADY)
    check(Config(**fields, global_batch_size=32), 1)
    print(
        f"PyTorch {torch.__version__}, Gloo, one thread per process; {layers} layers of {hidden}, {seq} tokens, "
        f"vocabulary {vocab}, fp32\nms per step of n processes; ratio: ours / PyTorch's; median (smallest-largest) of "
        f"{repeats}"
    )
    print(ROW.format("", "n", "ours, ms", "PyTorch's, ms", "ratio", "by CPU time", "against"))
    for processes in (1, 2, 4):
        names = [name for name, n, *_ in LAYOUTS if n == processes and name in names_chosen]
        if names:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(work, (f"{folder}/x", processes, names, fields, repeats), nprocs=processes)


# --- theirs -----------------------------------------------------------------------------------------------------------
#
# `one_process` to `pipelining` take (Config, mesh, [(ids [b, s], targets [b, s])] of this data rank's micro-batches).
# Each returns step() -> (mean loss, or 0 on a rank that computes none; gradient norm).


def clip(optimizer, c):
    """Clip the gradients. Return their norm. A group has only DTensors, or none."""
    norms = [nn.utils.get_total_norm([p.grad for p in g["params"]], foreach=True) for g in optimizer.param_groups]
    norms = [norm.full_tensor() if isinstance(norm, dist.tensor.DTensor) else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in optimizer.param_groups:
        nn.utils.clip_grads_with_norm_(group["params"], c.clip_grad, norm, foreach=True)
    return norm


def accumulated(model, c, batches, before_backward=lambda last: contextlib.nullcontext(), context=None):
    """Return the step of a model without pipeline stages."""
    optimizer = make_optimizer(model, c)

    def step():
        total = 0.0
        for j, (ids, targets) in enumerate(batches):
            with before_backward(last=j == len(batches) - 1), context() if context else contextlib.nullcontext():
                loss = loss_of(model(ids), targets) / len(batches)
                loss.backward()
            total += loss.detach()
        norm = clip(optimizer, c)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return step


def one_process(c, mesh, batches):
    return accumulated(Plain(c, mesh.tp), c, batches)


def ddp(c, mesh, batches):
    model = nn.parallel.DistributedDataParallel(
        Plain(c, mesh.tp), process_group=mesh.data.group, gradient_as_bucket_view=True
    )
    return accumulated(model, c, batches, lambda last: contextlib.nullcontext() if last else model.no_sync())


def fsdp(c, mesh, batches):
    """Apply `fully_shard` to every block and to the rest. With ZeRO-3, parameters are freed after forward."""
    from torch.distributed.fsdp import fully_shard

    model, axis, free_after_forward = Plain(c, mesh.tp), dist.init_device_mesh("cpu", (mesh.data.size,)), c.zero == 3
    for block in model.units[1:-1]:
        fully_shard(block, mesh=axis, reshard_after_forward=free_after_forward)
    fully_shard(model, mesh=axis, reshard_after_forward=free_after_forward)

    def before_backward(last):
        model.set_reshard_after_backward(free_after_forward or last)
        return contextlib.nullcontext()

    return accumulated(model, c, batches, before_backward)


def dtensor(c, mesh, batches):
    """Cut the linears and the tied table over tp. `loss_parallel` keeps the logits cut, as our head does."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    model, axis = Plain(c, mesh.tp), dist.init_device_mesh("cpu", (mesh.tp.size,))
    tokens = Shard(1) if c.sequence_parallel else Replicate()
    column = styles.ColwiseParallel(input_layouts=tokens)
    row = styles.RowwiseParallel(output_layouts=tokens)
    plan = {
        "units.0.word": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        f"units.{c.num_layers + 1}.word": styles.ColwiseParallel(
            input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(1, c.num_layers + 1):
        plan |= {f"units.{i}.{name}": column for name in ("qkv", "fc1")}
        plan |= {f"units.{i}.{name}": row for name in ("proj", "fc2")}
        if c.sequence_parallel:
            plan |= {f"units.{i}.{name}": styles.SequenceParallel() for name in ("ln1", "ln2")}
    if c.sequence_parallel:
        plan[f"units.{c.num_layers + 1}.ln"] = styles.SequenceParallel()
        plan["units.0.position"] = styles.SequenceParallel(sequence_dim=0, use_local_output=True)
        model.units[0].positions = model.units[0].positions.chunk(mesh.tp.size)[mesh.tp.rank]
    styles.parallelize_module(model, axis, plan)
    model.tie()
    return accumulated(model, c, batches, context=styles.loss_parallel)


THEIR_SCHEDULES = {  # {our schedule: (PyTorch's nearest class, chunks of a rank)}
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zb-h1": ("ScheduleInterleavedZeroBubble", 2),
    "zb-h2": ("ScheduleZBVZeroBubble", 2),
    "zb-v": ("ScheduleZBVZeroBubble", 2),
}


def pipelining(c, mesh, batches):
    """Use `torch.distributed.pipelining`. It lacks tied weights, so the step adds the gradients of the two word tables.

    In a V (zb-v) the first rank has both tables.
    """
    from torch.distributed import pipelining as pp

    schedule, chunks = THEIR_SCHEDULES[c.schedule]
    n, rank, device, vee = mesh.pp.size, mesh.pp.rank, torch.device("cpu"), "ZBV" in schedule
    model = Plain(c, mesh.tp, tied=False)
    parts = split(model.units, n * chunks)
    stage_numbers = [rank, 2 * n - 1 - rank] if vee else list(range(rank, n * chunks, n))
    modules = {i: nn.Sequential(*parts[i]) for i in stage_numbers}
    stages = [pp.PipelineStage(module, i, n * chunks, device, group=mesh.pp.group) for i, module in modules.items()]
    runner = getattr(pp, schedule)(
        stages if chunks > 1 else stages[0],
        len(batches),
        loss_fn=lambda logits, targets: loss_of(logits, targets) / len(batches),
        scale_grads=False,
    )
    optimizer = make_optimizer(nn.ModuleList(modules.values()), c)
    tables = [unit.word.weight for unit in (model.units[0], model.units[-1])]
    tables = [table for table, i in zip(tables, (0, n * chunks - 1), strict=True) if i in modules]
    first, last = 0 in modules, n * chunks - 1 in modules
    if first != last:
        twins = mesh.holders([0, n - 1])
    ids, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def step():
        """Both copies of the tied table have its whole gradient, so the norm leaves one of them out."""
        losses = []
        runner.step(*[ids][:first], target=targets if last else None, losses=losses, return_outputs=False)
        twice = torch.zeros(())  # the tied gradient's squared norm counts twice
        if first and last:
            tables[0].grad += tables[1].grad
            tables[1].grad = tables[0].grad.clone()
        elif first or last:
            dist.all_reduce(tables[0].grad, group=twins.group)
        if last:
            twice = torch.linalg.vector_norm(tables[-1].grad) ** 2
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in params], foreach=True) ** 2 - twice
        dist.all_reduce(norm, group=mesh.pp.group)
        norm = norm.sqrt()
        nn.utils.clip_grads_with_norm_(params, c.clip_grad, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.detach() for loss in losses), norm

    return step


LAYOUTS = [  # name, processes, our fields, micro-batches, PyTorch's variant
    ("one process", 1, {}, 2, one_process),
    ("dp=2", 2, {}, 2, ddp),
    ("dp=2 zero=2", 2, {"zero": 2}, 2, fsdp),
    ("dp=2 zero=3", 2, {"zero": 3}, 2, fsdp),
    ("tp=2", 2, {"tp": 2}, 2, dtensor),
    ("tp=2 sequence_parallel", 2, {"tp": 2, "sequence_parallel": True}, 2, dtensor),
    ("pp=2 gpipe", 2, {"pp": 2, "schedule": "gpipe"}, 4, pipelining),
    ("pp=2 1f1b", 2, {"pp": 2}, 4, pipelining),
    ("pp=2 interleaved chunks=2", 2, {"pp": 2, "schedule": "interleaved", "chunks": 2}, 4, pipelining),
    ("pp=2 zb-h1", 2, {"pp": 2, "schedule": "zb-h1"}, 4, pipelining),
    ("pp=2 zb-h2", 2, {"pp": 2, "schedule": "zb-h2"}, 4, pipelining),
    ("pp=2 zb-v chunks=2", 2, {"pp": 2, "schedule": "zb-v", "chunks": 2}, 4, pipelining),
    ("dp=4", 4, {}, 2, ddp),
    ("dp=4 zero=3", 4, {"zero": 3}, 2, fsdp),
    ("tp=4", 4, {"tp": 4}, 2, dtensor),
    ("pp=4 1f1b", 4, {"pp": 4}, 8, pipelining),
]


# --- the timing -------------------------------------------------------------------------------------------------------


def measured(name, processes, our_fields, count, their_variant, fields, repeats):
    """Return the table's cells of a row of LAYOUTS. Raises UserError if ours and theirs train differently."""
    mesh = Mesh(our_fields.get("tp", 1), our_fields.get("pp", 1))
    c = Config(**fields, **our_fields, global_batch_size=4 * count * mesh.data.size)
    generator = torch.Generator().manual_seed(c.seed)
    tokens = torch.randint(c.vocab_size, (count, mesh.data.size, 4, c.seq_length + 1), generator=generator)
    batches = samples(tokens[:, mesh.data.rank])
    steps = [our_step(c, mesh, batches), their_variant(c, mesh, batches)]
    for i in range(3):
        ours_did, (loss, norm) = (step() for step in steps)
        check_same(name, i + 1, ours_did, (whole_loss(mesh, loss), norm.item()))
    times = [[], []], [[], []]  # wall clock, CPU time; each of ours, theirs
    for i in range(2 * repeats):
        which = (0, 1, 1, 0)[i % 4]
        for kind, value in zip(times, timed(steps[which]), strict=True):
            kind[which].append(value)
    milliseconds = [spread(values, "{:.0f}") for values in times[0]]
    return [name, processes, *milliseconds, *(spread(ratios(*kind)) for kind in times), their_variant.__name__]


def our_step(c, mesh, batches):
    """Return train.py's step() -> (loss, gradient norm) on this data rank's micro-batches."""
    run = train.build_run(c, mesh, torch.device("cpu"))
    run.zero.initialize(c.seed)
    over_and_over = (run.model.micro_batch(*batch) for batch in itertools.cycle(batches))

    def step():
        numbers = train.train_step(run, over_and_over).read()
        return numbers.loss, numbers.grad_norm

    return step


def whole_loss(mesh, loss):
    loss = loss.full_tensor() if isinstance(loss, dist.tensor.DTensor) else torch.as_tensor(loss)
    share = loss.double() / (mesh.data.size * mesh.tp.size)
    return all_reduce(share, mesh.world, "loss").wait().item()


def check_same(name, step, our_numbers, their_numbers):
    """Raise UserError if (loss, gradient norm) differ by more than 1e-4 of theirs."""
    for what, a, b in zip(("loss", "gradient norm"), our_numbers, their_numbers, strict=True):
        if not abs(a - b) <= 1e-4 * abs(b):
            raise UserError(f"{name}: the {what} of step {step} differs: ours {a}, PyTorch's {b}")


def timed(step):
    """Return a step's (ms of wall clock, CPU ms of all ranks)."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    step()
    cpu = torch.tensor(time.process_time() - cpu)
    dist.all_reduce(cpu)
    return 1000 * (time.perf_counter() - start), 1000 * cpu.item()


def work(rank, rendezvous, processes, names, fields, repeats):
    """One of `processes` processes: measure the layouts `names`. rendezvous: a file that does not exist yet."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=processes)
    for row in LAYOUTS:
        if row[0] in names:
            cells = measured(*row, fields, repeats)
            if rank == 0:
                print(ROW.format(*cells), flush=True)
    dist.destroy_process_group()
    gc.collect()  # a group ends its threads when no object refers to it
