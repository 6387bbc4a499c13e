"""The central promise: every layout trains the same model.

In float64, a layout's losses and gradient norms must equal those of one process, its initial parameters bit for bit,
and its parameters after eight steps to ten digits. Clipping acts in every step, there are at least three
micro-batches, and each layout runs under SGD (where a wrong gradient scale shows at once) and AdamW, with and without
dropout, with and without recomputation.

Red when (each was put in by hand once): shards are initialised alike; the loss is not divided by micro-batches or data
ranks, or by the stages too; gradients are reduced with every micro-batch (stage 0) or with the first (1), only the
last one's count (2), what is on its way is added to; weight gradients count for the last micro-batch only, or are
reduced before W; parameters are not gathered (1); under sequence parallelism partial gradients are not summed, or as
if the unit were whole, and without it whole ones are; the norm counts twice what is replicated over tp or dp or has
two holders, or one data rank's shards only; LAMB takes the norms of shards, or of tensor parallel parts; a tied table
is not summed over its holders, or twice; targets are not counted from the shard's first column, padding is in the
softmax, the maximum is the shard's only; an output is freed while it is sent, a message goes to another micro-batch;
recomputation draws another mask, a stage counts its layers from 0.
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

import train
from config import Config, check
from data import training_samples
from errors import UserError
from model import GPT
from parallel.mesh import Mesh
from parallel.optimizer import RULES
from parallel.schedules import SCHEDULES, usual_chunks

STEPS = 8
TINY = dict(
    num_layers=2, hidden_size=16, num_attention_heads=8, seq_length=8, vocab_size=50, train_iters=STEPS,
    global_batch_size=24, lr=3e-2, min_lr=1e-3, lr_warmup_iters=2, weight_decay=0.1, adam_eps=1e-6, clip_grad=0.1,
    dtype="fp64",
)  # fmt: skip

# (dp, tp, sequence parallel): every factorisation of 1, 2, 4, 8, and 3 and 6, which divide no power of two
LAYOUTS = [
    (dp, tp, sp)
    for dp, tp in [(2, 1), (1, 2), (3, 1), (4, 1), (2, 2), (1, 4), (3, 2), (8, 1), (4, 2), (2, 4), (1, 8)]
    for sp in (False, True)
    if tp > 1 or not sp
]
ALL_MODES = list(itertools.product(["sgd", "adamw"], [0.0, 0.1], ["none", "full"]))
MODES = [ALL_MODES[i] for i in (0, 3, 5, 6)]  # every value, and every pair of values of two of them
FEWER_MODES = [ALL_MODES[i] for i in (0, 7)]  # every value: for eight processes, which two cores take long to run


def tiny_config(dp, tp=1, **fields):
    fields = {"micro_batch_size": 8 // dp, "tp": tp} | fields  # m = 3 (with dp=3: 4)
    return Config(**TINY | fields)


def micro_batches(run, vocab_size=50):
    """The data of every layout: sample g is a function of g, and worth learning (most ids are the last one plus 1)."""
    c, dp = run.config, run.mesh.dp
    dice = torch.randint(0, vocab_size, (1000, c.seq_length + 1), generator=torch.Generator().manual_seed(5))
    table = (dice // 10 - 1).clamp(1).cumsum(1).add(dice[:, :1]) % vocab_size
    for numbers in training_samples(0, dp.rank, dp.size, c.micro_batch_size):
        numbers = torch.from_numpy(numbers)
        tokens = table[numbers % len(table)]
        yield run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], numbers)


def parameters(run):
    """{name: this rank's part over tp}, copied."""
    parts = {}
    for name, bucket in run.zero.buckets.items():
        run.zero.gather(name)
        parts |= {p.spec.name: p.detach().clone() for p in bucket.params}
        run.zero.release(name)
    return parts


def train_tiny(config, steps=STEPS, mesh=None):
    """On one rank: (losses, gradient norms, parameters before, parameters after)."""
    run = train.build(config, mesh or Mesh(config.tp, config.pp), torch.device("cpu"))
    run.zero.initialize(config.seed)
    before, batches = parameters(run), micro_batches(run)
    done = [train.train_step(run, batches).read() for _ in range(steps)]
    assert all(step.grad_norm > config.clip_grad for step in done), "the clip must act"
    return [s.loss for s in done], [s.grad_norm for s in done], before, parameters(run)


@functools.cache
def one_process(optimizer, dropout, steps=STEPS, **fields):
    return train_tiny(tiny_config(1, optimizer=optimizer, dropout=dropout, **fields), steps)


def gathered(parts, config, specs):
    """Whole tensors from the parts of all ranks. Copies must be equal bit for bit: on all data ranks, on all pipeline
    ranks that hold a name (a tied table, Chimera's twins), and on all tensor ranks where it is not cut."""
    whole = {}
    for name, spec in specs.items():
        by_tp_rank = [[part[name] for part in parts[t :: config.tp] if name in part] for t in range(config.tp)]
        for copies in by_tp_rank:
            assert copies and all(torch.equal(copy, copies[0]) for copy in copies), f"copies of {name} differ"
        pieces = [copies[0] for copies in by_tp_rank]
        if spec.tp_dim is None:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"tensor ranks differ in {name}"
        whole[name] = pieces[0] if spec.tp_dim is None else torch.cat(pieces, spec.tp_dim)
    return whole


def assert_same_model(results, reference, config, specs):
    losses, norms, before, after = reference
    for rank, result in enumerate(results):
        for what, ours, theirs in [("loss", result[0], losses), ("gradient norm", result[1], norms)]:
            for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert abs(a - b) <= 1e-10 * abs(b), f"{what} of step {step + 1} on rank {rank}: {a} instead of {b}"
    for name, whole in gathered([r[2] for r in results], config, specs).items():
        assert torch.equal(whole, before[name]), f"initial {name}"
    for name, whole in gathered([r[3] for r in results], config, specs).items():
        distance = (whole - after[name]).abs().max()
        assert distance <= 1e-10 * max(1, after[name].abs().max()), f"{name} is off by {distance:.1e}"


def specs(num_layers=2):
    return GPT(tiny_config(1, num_layers=num_layers), Mesh().tp).specs()


@pytest.mark.parametrize("dp, tp, sp", LAYOUTS, ids=lambda x: str(x))
def test_every_layout_trains_the_same_model(workers, dp, tp, sp):
    for optimizer, dropout, recompute in MODES if dp * tp < 8 else FEWER_MODES:
        config = tiny_config(dp, tp, sequence_parallel=sp, optimizer=optimizer, dropout=dropout, recompute=recompute)
        results = workers.run(dp * tp, train_tiny, config)
        assert_same_model(results, one_process(optimizer, dropout), config, specs())


@pytest.mark.parametrize("optimizer, dropout, recompute", ALL_MODES)
def test_micro_batches_and_recomputation_on_one_process(optimizer, dropout, recompute):
    """m micro-batches give the gradient of one big batch; recomputation gives the bits of none."""
    reference = one_process(optimizer, dropout)
    for size in (1, 24):
        config = tiny_config(1, micro_batch_size=size, optimizer=optimizer, dropout=dropout, recompute=recompute)
        assert_same_model([train_tiny(config)], reference, config, specs())


# --- the grid -------------------------------------------------------------------------------------------------------

AXES = {
    "dp": [1, 2, 4, 8],
    "tp": [1, 2, 4, 8],
    "pp": [1, 2, 4, 8],
    "schedule": list(SCHEDULES),  # a new schedule or optimizer is in the grid by its name
    "zero": [0, 1, 2, 3],
    "sequence_parallel": [False, True],
    "recompute": ["none", "full"],
    "optimizer": list(RULES),
    "micro_batches": ["one", "fewer than stages", "stages", "not a multiple", "twice"],
}


def number_of_micro_batches(word, pp):
    return {"one": 1, "fewer than stages": pp - 1, "stages": pp, "not a multiple": pp + 1, "twice": 2 * pp}[word]


def fitted(dp, tp, pp, schedule, micro_batches, **fields):
    """(configuration, processes) of a point of the grid; None if it does not fit, or is another one by another name."""
    m = number_of_micro_batches(micro_batches, pp)
    redundant = (
        not 2 <= dp * tp * pp <= 8
        or (pp == 1 and (schedule != "1f1b" or micro_batches in ("fewer than stages", "stages")))
        or (pp == 2 and micro_batches == "fewer than stages")
        or (dp == 1 and fields["zero"])
        or (tp == 1 and fields["sequence_parallel"])
    )
    if redundant:
        return None
    chunks = usual_chunks(schedule)
    layers = max(3, pp * chunks - 1)  # three, which two stages do not divide; or stages of one block, and one of none
    config = tiny_config(
        dp, tp, pp=pp, schedule=schedule, chunks=chunks, num_layers=layers, micro_batch_size=2,
        global_batch_size=2 * dp * m, lr=5e-3, dropout=0.1, **fields,
    )  # fmt: skip
    try:
        check(config, dp * tp * pp)
    except UserError:  # a schedule that wants another number of micro-batches or stages
        return None
    return config, dp * tp * pp


def points():
    for values in itertools.product(*AXES.values()):
        point = dict(zip(AXES, values, strict=True))
        if fitted(**point):
            yield point


def covering(points):
    """Points chosen one after another for how many new pairs of values they bring, until every pair is in."""
    pairs = {i: set(itertools.combinations(point.items(), 2)) for i, point in enumerate(points)}
    left, chosen = set().union(*pairs.values()), []
    while left:
        best = max(pairs, key=lambda i: len(pairs[i] & left))
        left -= pairs[best]
        chosen.append(points[best])
    return chosen


def train_with_each(optimizers, config, steps):
    """train_tiny with each of the optimizers, in the same process groups."""
    mesh = Mesh(config.tp, config.pp)
    return [train_tiny(replace(config, optimizer=optimizer), steps, mesh) for optimizer in optimizers]


def check_point(workers, point, optimizers, steps):
    config, ranks = fitted(**point)
    same = dict(
        num_layers=config.num_layers, global_batch_size=config.global_batch_size, micro_batch_size=2, lr=config.lr
    )
    by_rank = workers.run(ranks, train_with_each, optimizers, config, steps)
    for optimizer, results in zip(optimizers, zip(*by_rank, strict=True), strict=True):
        reference = one_process(optimizer, config.dropout, steps, **same)
        assert_same_model(results, reference, replace(config, optimizer=optimizer), specs(config.num_layers))


def name(point):
    return "-".join(map(str, point.values())).replace(" ", "_")


ALL_POINTS = list(points())


@pytest.mark.parametrize("point", covering(ALL_POINTS), ids=name)
def test_the_grid_covered(workers, point):
    check_point(workers, point, [point["optimizer"]], steps=6)


@pytest.mark.grid
@pytest.mark.parametrize("point", [p for p in ALL_POINTS if p["optimizer"] == next(iter(RULES))], ids=name)
def test_the_whole_grid(workers, point):
    """Every point, the optimizers of one layout one after another; the id names the first."""
    check_point(workers, point, list(RULES), steps=3)
