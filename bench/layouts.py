"""Measures a training step of each layout: ours, and PyTorch's DDP, FSDP2, DTensor or pipelining.

    python -m bench layouts zero

Both train the same GPT (MODEL) from the same weights on the same samples, in the same processes:
Gloo, one thread each, no GPU. First, losses and gradient norms of three steps are compared.
"""

import contextlib
import gc
import tempfile
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from bench.compete import TITLES, chosen, train_beside
from bench.plain import STEADY, Plain, batches_of, loss_of, make_optimizer, our_start, plain_step, whole
from config import Config
from parallel.layout import split
from parallel.mesh import Mesh

MODEL = dict(num_layers=4, hidden_size=256, seq_length=128, vocab_size=2048, num_attention_heads=8)
CPU = torch.device("cpu")
ROUNDS, STEPS = 9, 2  # turns of ours and of theirs, and timed steps of a turn


def measure(*words):
    """Compare our step with PyTorch's (goal: ours / theirs at most 1), on the layouts whose names contain `words`."""
    names = chosen([layout[0] for layout in LAYOUTS], words)
    print(f"PyTorch {torch.__version__}, Gloo, fp32, {MODEL}; median (smallest-largest) of {ROUNDS} turns")
    print(TITLES, flush=True)
    for processes in (1, 2):
        some = [layout for layout in LAYOUTS if layout[1] == processes and layout[0] in names]
        if some:
            with tempfile.TemporaryDirectory() as folder:
                arguments = f"{folder}/x", processes, some, MODEL, ROUNDS, STEPS
                torch.multiprocessing.spawn(work, arguments, nprocs=processes)


def work(rank, rendezvous, processes, some, model, rounds, steps):
    """One of `processes` processes: measure the layouts `some`. rendezvous: path of a file that does not exist."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=processes)
    for title, _, fields, micro_batches, theirs in some:
        c = Config(dtype="fp32", micro_batch_size=4, **STEADY, **model, **fields)
        mesh = Mesh.of(c)
        c.global_batch_size = 4 * micro_batches * mesh.data.size
        batches = batches_of(c, mesh, CPU)
        contestants = {"ours": our_start(c, mesh, CPU, batches), theirs.__name__: partial(theirs, c, mesh, batches)}
        train_beside(title, c, contestants, rounds, steps)
    dist.destroy_process_group()
    gc.collect()  # a group ends its threads when no object refers to it


# --- PyTorch's ------------------------------------------------------------------------------------
#
# `one_process` to `pipelining` take (Config, mesh, batches of this data rank). Each returns step(),
# as `compete.train_beside` needs it.


def one_process(c, mesh, batches):
    return plain_step(Plain(c, mesh.tp), c, mesh, batches)


def ddp(c, mesh, batches):
    options = dict(process_group=mesh.data.group, gradient_as_bucket_view=True)
    model = nn.parallel.DistributedDataParallel(Plain(c, mesh.tp), **options)
    around = lambda last: contextlib.nullcontext() if last else model.no_sync()  # noqa: E731
    return plain_step(model, c, mesh, batches, around=around)


def fsdp(c, mesh, batches):
    """Apply `fully_shard` to every block and to the rest. ZeRO-3 frees parameters after forward."""
    from torch.distributed.fsdp import fully_shard

    model, axis = Plain(c, mesh.tp), dist.init_device_mesh("cpu", (mesh.data.size,))
    free_after_forward = c.zero == 3
    for part in [*[*model][1:-1], model]:
        fully_shard(part, mesh=axis, reshard_after_forward=free_after_forward)

    def around(last):
        model.set_reshard_after_backward(free_after_forward or last)
        return contextlib.nullcontext()

    return plain_step(model, c, mesh, batches, around=around)


def dtensor(c, mesh, batches):
    """Cut the linears and the tied table over tp. `loss_parallel` keeps the logits cut, as our head does."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    model, axis = Plain(c, mesh.tp), dist.init_device_mesh("cpu", (mesh.tp.size,))
    tokens = Shard(1) if c.sequence_parallel else Replicate()
    column = styles.ColwiseParallel(input_layouts=tokens)
    row = styles.RowwiseParallel(output_layouts=tokens)
    plan = {
        "embedding.word": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "head.word": styles.ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
        "block*.qkv": column,
        "block*.fc1": column,
        "block*.proj": row,
        "block*.fc2": row,
    }
    if c.sequence_parallel:
        plan |= {name: styles.SequenceParallel() for name in ("block*.ln1", "block*.ln2", "head.ln")}
        plan["embedding.position"] = styles.SequenceParallel(sequence_dim=0, use_local_output=True)
        model.embedding.positions = model.embedding.positions.chunk(mesh.tp.size)[mesh.tp.rank]
    styles.parallelize_module(model, axis, plan)
    model.tie()
    return plain_step(model, c, mesh, batches, around=lambda last: styles.loss_parallel())


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
    n, rank, vee = mesh.pp.size, mesh.pp.rank, "ZBV" in schedule
    model, count = Plain(c, mesh.tp, tied=False), n * chunks
    parts = split([*model], count)
    stage_numbers = [rank, 2 * n - 1 - rank] if vee else list(range(rank, count, n))
    modules = {i: nn.Sequential(*parts[i]) for i in stage_numbers}
    stages = [pp.PipelineStage(module, i, count, CPU, group=mesh.pp.group) for i, module in modules.items()]
    runner = getattr(pp, schedule)(
        stages if chunks > 1 else stages[0],
        len(batches),
        loss_fn=lambda logits, targets: loss_of(logits, targets) / len(batches),
        scale_grads=False,
    )
    optimizer = make_optimizer(nn.ModuleList(modules.values()), c)
    first, last = 0 in modules, count - 1 in modules
    tables = [model.embedding.word.weight] * first + [model.head.word.weight] * last
    if first != last:
        twins = mesh.holders([0, n - 1])
    ids, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def step():
        """Both copies of the tied table have its whole gradient, so the norm leaves one of them out."""
        losses = []
        runner.step(*[ids][:first], target=targets if last else None, losses=losses, return_outputs=False)
        if first and last:
            tables[0].grad += tables[1].grad
            tables[1].grad = tables[0].grad.clone()
        elif first or last:
            dist.all_reduce(tables[0].grad, group=twins.group)
        twice = torch.linalg.vector_norm(tables[-1].grad) ** 2 if last else 0.0
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in params], foreach=True) ** 2 - twice
        dist.all_reduce(norm, group=mesh.pp.group)
        norm = norm.sqrt()
        nn.utils.clip_grads_with_norm_(params, c.clip_grad, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return partial(whole, mesh, sum(loss.detach() for loss in losses), norm)

    return step


LAYOUTS = [  # title, processes, our fields, micro-batches of a step, PyTorch's program
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
]
