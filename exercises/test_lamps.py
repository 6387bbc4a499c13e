"""Lamps that no other test shows alone.

PYTEST_DONT_REWRITE: the message of a failing `assert` is its sentence alone.
"""

from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import reference
import train
from accounts import bubbles
from accounts import flops as flops_of
from config import Config
from exercises.show import meshes
from parallel import optimizer, simulation, tensor, zero
from parallel.comm import Pending
from parallel.mesh import Mesh
from parallel.tensor import Linear
from testing import letters
from testing.compare import ratio, same_tensor
from testing.record import check_bytes, check_model, first_step, one_process, record
from testing.tiny import (
    AfterActions,
    built,
    stirred,
    storages,
    tiny_batches,
    tiny_config,
    waiting_in_block,
    wrong_gradients,
)

pytestmark = pytest.mark.slow  # other tests show the same


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_training(workers, config):
    """Fail unless two ranks train the model of one process. Other lamps compare bytes: an answer may keep fewer."""
    records, one = workers.run(2, record, config), one_process(workers, config)
    check_model(records, one, partial(first_step, workers, 2, config))


# --- 1: FLOPs ---------------------------------------------------------------------------------------------------------

L, H, S, V = 3, 64, 32, 128
PARTS = {
    "blocks": (6, "FLOPs for each weight of a block and each token: 2 in forward, 4 in backward"),
    "attention": (12, "L h s FLOPs for each token: q k^T and its product with v are 2 s h each in forward"),
    "head": (6, "FLOPs for each weight of the head and each token: 2 in forward, 4 in backward"),
}


def flops(function, **fields):
    """Return the FLOPs of a token in a batch of 2."""
    sizes = dict(num_layers=L, hidden_size=H, num_attention_heads=4, seq_length=S, vocab_size=V) | fields
    return function(Config(**sizes), batch=2) / (2 * sizes["seq_length"])


@pytest.mark.parametrize("part", PARTS)
def test_flops_of_a_part_are_the_formulas(part):
    whole, found = flops(flops_of.model_flops), {}
    found["attention"] = (flops(flops_of.model_flops, seq_length=2 * S) - whole) / (L * H * S)
    found["head"] = (flops(flops_of.model_flops, vocab_size=2 * V) - whole) / (V * H)
    found["blocks"] = (whole - found["attention"] * L * H * S - found["head"] * V * H) / (12 * L * H**2)
    right, why = PARTS[part]
    assert found[part] == pytest.approx(right), f"{part}: {found[part]:.6g} instead of {right} {why}"


def test_recomputation_costs_one_forward_of_the_blocks():
    for recompute, right in [("none", 0), ("full", 1)]:
        more = flops(flops_of.hardware_flops, recompute=recompute) - flops(flops_of.model_flops)
        found = more / (24 * L * H**2 + 4 * L * S * H)
        assert found == pytest.approx(right), (
            f"recompute={recompute} costs {found:.6g} forwards of the blocks more than model_flops, instead of {right}"
        )


# --- 2: the chain rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["dx", "dW", "db", "the sum of two micro-batches"])
def test_backward_of_a_linear_is_autograds(what):
    """y = x W^T + b, on one process, against torch.nn.functional.linear."""
    x, w, b, dy = (drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate([(8, 6), (4, 6), (4,), (8, 4)]))
    F.linear(x, w, b).backward(dy.detach())
    ours = [torch.nn.Parameter(tensor.detach().clone()) for tensor in (x, w, b)]
    for p in ours[1:]:
        p.grad, p.deferred = torch.zeros_like(p), None
    buffers = [p.grad for p in ours[1:]]
    for _ in range(1 + what.startswith("the sum")):
        ours[0].grad = None
        Linear.apply(*ours, "copy", None, Mesh().tp, reference).backward(dy.detach())
    if what.startswith("the sum"):
        for name, p, buffer, right in zip(["dW", "db"], ours[1:], buffers, [w.grad, b.grad], strict=True):
            assert p.grad is buffer, f"{name}: `.grad` is a new tensor; add in place, it is a view into a bucket"
            last = {"the last micro-batch's alone: `.grad` is overwritten, not added to": right}
            same_tensor(f"the sum of {name} over two micro-batches", p.grad, 2 * right, last)
    else:
        i = ["dx", "dW", "db"].index(what)
        same_tensor(f"{what} (compared with autograd's)", ours[i].grad, (x, w, b)[i].grad)


# --- 3: SGD, AdamW ----------------------------------------------------------------------------------------------------

B1, B2, EPS, LR, DECAY, T = 0.8, 0.95, 0.1, 0.5, 0.2, 3
CONSTANTS = dict(lr=LR, decay=DECAY, scale=1.0, update=T, beta1=B1, beta2=B2, eps=EPS)


def buffers():
    """Return a weight, a gradient, and [m, v]."""
    return drawn(6), drawn(6, seed=1), [drawn(6, seed=2), 2 + drawn(6, seed=3) ** 2]


def adam(slide=1, inside=False, t=T):
    """Return (m, v, direction) of update `t`. slide=-1: the slide's signs. inside: epsilon inside the root."""
    _, g, (m, v) = buffers()
    m, v = B1 * m + slide * (1 - B1) * g, B2 * v + slide * (1 - B2) * g**2
    root = v / (1 - B2**t)
    return m, v, m / (1 - B1**t) / ((root + EPS).sqrt() if inside else root.sqrt() + EPS)


@pytest.mark.parametrize("decay", [0.0, DECAY], ids=["step", "decay"])
def test_sgd_is_its_formula(decay):
    (w, g, _), before = buffers(), drawn(6)
    optimizer.sgd(w, 4 * g, [], **CONSTANTS | dict(decay=decay, scale=0.25))
    wrong = {
        "made without the weight decay": before - LR * g,
        "made with the decay of the weight after the step": (before - LR * g) * (1 - LR * decay),
        "moved along the gradient, not against it": before * (1 - LR * decay) + LR * g,
        "made without `scale`": before * (1 - LR * decay) - 4 * LR * g,
        "the old one: change `weight` in place": before,
    }
    wrong = wrong if decay else dict([*wrong.items()][2:])
    same_tensor(
        f"the weight after SGD with decay={decay}", w, drawn(6) - LR * (drawn(6, seed=1) + decay * drawn(6)), wrong
    )


@pytest.mark.parametrize("what", ["m", "v", "direction"])
def test_adam_is_its_formula(what):
    _, g, (m, v) = buffers()
    direction = optimizer.adam_direction(4 * g, m, v, 0.25, T, B1, B2, EPS)
    i = ["m", "v", "direction"].index(what)
    wrong = {} if what == "direction" else {f"the old one: change `{what}` in place": buffers()[2][i]}
    wrong |= {
        "the slide's: it subtracts the gradient": adam(slide=-1)[i],
        "made with epsilon inside the root": adam(inside=True)[i],
        "made without the division by 1 - b^t": adam(t=1e9)[i],
        "made with b^(t+1)": adam(t=T + 1)[i],
    }
    same_tensor(f"{what} of Adam", (m, v, direction)[i], adam()[i], wrong)


def test_adamw_decays_the_weight_itself():
    (w, g, moments), before, step = buffers(), drawn(6), LR * adam()[2]
    optimizer.adamw(w, g, moments, **CONSTANTS)
    wrong = {
        "made without the weight decay": before - step,
        "moved along the gradient, not against it": before + step,
        "the old one: change `weight` in place": before,
        "made with the decay of the weight after the step": (before - step) * (1 - LR * DECAY),
    }
    same_tensor("the weight after AdamW", w, before - step - LR * DECAY * before, wrong)


# --- 4: data parallel -------------------------------------------------------------------------------------------------


def test_a_step_sends_each_gradient_once(workers):
    tables = workers.run(2, record, tiny_config(2, dtype="fp32"))[0].sent
    (calls, sent), (buckets, copy) = (table.get(("data", "gradients", "all_reduce"), (0, 0)) for table in tables)
    said = f"2 P (n-1)/n = {float(copy):,.0f} bytes in {buckets} all_reduce, one for each bucket"
    assert (calls, sent) == (buckets, copy), f"a step sends {float(sent):,.0f} bytes in {calls} all_reduce, not {said}"


def test_sums_run_while_backward_continues(monkeypatch):
    calls = []

    class Watched(Pending):
        def wait(self):
            calls.append("wait")
            return super().wait()

    monkeypatch.setattr(zero, "all_reduce", lambda x, axis, what, **_: calls.append(what) or Watched(x))
    run = built(tiny_config(1))
    run.zero.zero_grad()
    run.executor.run(tiny_batches(run), 1, 1.0)
    assert "gradients" in calls, "no sum of gradients starts during backward"
    assert "wait" not in calls, "backward stands still: it waits for a sum of gradients before `Zero.finish`"


# --- 5, 6: ZeRO -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_the_same_model(workers, monkeypatch, stage):
    """In testing/adversary.py's mode a result is wrong until `wait`."""
    monkeypatch.setattr(workers, "adversary", True)
    check_training(workers, tiny_config(2, zero=stage))


def gradients_in_a_step(config):
    """Return the most buckets with a whole gradient {in a backward, after it}, and the most unfinished sums in one."""
    run, most, product = built(config), Counter(), tensor.add_product

    def count(when):
        whole = sum(bucket.grad.whole.untyped_storage().size() > 0 for bucket in run.zero.buckets.values())
        most[when] = max(most[when], whole)

    def watching(*arguments):
        count("in a backward")
        unfinished = sum(bucket.summing is not None and bucket.summing.work is not None for bucket in run.zero.in_order)
        most["unfinished"] = max(most["unfinished"], unfinished)
        product(*arguments)

    run.mesh.watch.tools.append(AfterActions(lambda: count("between two micro-batches")))
    with mock.patch.object(tensor, "add_product", watching):
        train.train_step(run, tiny_batches(run))
    return most


def test_stage_2_keeps_few_whole_gradients(workers):
    """In a backward: this block's, the tied table's, and two that are being summed. Then only the last two."""
    for most in workers.run(2, gradients_in_a_step, tiny_config(2, zero=2, num_layers=4)):
        for when, allowed in [("in a backward", 4), ("between two micro-batches", 2)]:
            whole = f"{most[when]} of 7 buckets have a whole gradient {when}; at most {allowed} should"
            assert most[when] <= allowed, whole


def test_gradients_are_summed_during_backward(workers):
    for most in workers.run(2, gradients_in_a_step, tiny_config(2, zero=2, num_layers=4)):
        assert most["unfinished"], "each sum has ended before the next block computes: nothing overlaps"


def test_stage_3_frees_a_bucket_that_does_not_compute(workers):
    for (whole, _), (left, _) in workers.run(2, storages, tiny_config(2, zero=3, num_layers=4)):
        more = sorted(whole - {"block1", "block2", "word"})
        assert not more, f"{more} are whole while block1 computes; only block1, the next one and the table should be"
        assert not left, f"{sorted(left)} are whole after the step; none should be"


def test_the_next_bucket_is_gathered_while_this_one_computes(workers):
    for _, unfinished in workers.run(2, waiting_in_block, tiny_config(2, zero=3, num_layers=4)):
        assert unfinished == ["block2"], f"while block1 computes, {unfinished} are being gathered; should be block2"


# --- 7: LAMB ----------------------------------------------------------------------------------------------------------

WHOLE, DIRECTION = 8.0, 2.0  # norms of a whole tensor and of its direction


def test_lambs_direction_is_adamws_with_decay():
    w, g, moments = buffers()
    optimizer.lamb(w, g, moments, **CONSTANTS)
    wrong = {"still the gradient: `gradient` must be overwritten": drawn(6, seed=1), "made without decay": adam()[2]}
    same_tensor("LAMB's direction", g, adam()[2] + DECAY * drawn(6), wrong)
    same_tensor("the weight after LAMB's first half, which must not change it,", w, drawn(6))


@pytest.mark.parametrize(
    "layerwise, norm, right",
    [(True, WHOLE, 4.0), (False, WHOLE, 1.0), (True, 0.0, 1.0)],
    ids=["matrix", "bias", "zero"],
)
def test_lambs_trust_ratio_is_the_formulas(layerwise, norm, right):
    """The update is lr * ratio * direction. The ratio is 1 for a bias, and where the weight or the direction is 0."""
    w, direction, _ = buffers()
    if norm == 0:
        optimizer.apply_lamb(w.clone(), 0 * direction, [], WHOLE, 0.0, lr=LR, decay=DECAY, layerwise=True)
    optimizer.apply_lamb(w, direction, [], norm, DIRECTION, lr=LR, decay=DECAY, layerwise=layerwise)
    before, direction, _ = buffers()
    found, part = ratio(before - w, LR * direction), (before.norm() / direction.norm()).item()
    names = {4.0: "|w| / |direction|", 1.0: "the rate is lr", 0.0: "no update", part: "with norms of this rank's part"}
    name = next((text for value, text in names.items() if found == pytest.approx(value)), "unknown")
    assert found == pytest.approx(right), f"the trust ratio is {found} ({name}) instead of {right} ({names[right]})"


def test_lamb_with_shards_trains_the_same_model(workers):
    check_training(workers, tiny_config(2, optimizer="lamb", zero=1))


# --- 8, 10: schedules ----------------------------------------------------------------------------------------------

SIZES = [(4, 8), *((p, m) for p in (3, 2, 6, 1) for m in (7, 4, 12, 2, 1)), (4, 3), (4, 1)]  # p = 4, m = 8 comes first
COST = {"F": 1, "B": 2, "I": 1, "W": 1}


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_schedule_can_run_in_every_size(name):
    for p, m in SIZES:
        made(name, p, m)


def made(name, p, m):
    """Return the schedule. An error names p and m, too."""
    try:
        return simulation.build(name, p, m)
    except Exception as error:
        text = f"p = {p} stages, m = {m} micro-batches: {type(error).__name__}: {error}"
    pytest.fail(text, pytrace=False)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_the_bubble_is_the_formulas(name):
    for p, m in SIZES:
        formula, letters = bubbles.FORMULAS[name], dict(p=p, m=m, **COST)
        if bubbles.by_formula(formula.where, **letters):
            bubble = bubbles.simulate(made(name, p, m), COST).bubble
            least = bubbles.by_formula(formula.bubble, **letters)
            where = f"{name}, p = {p}, m = {m}"
            assert bubble <= least + 1e-9, (
                f"{where}: the bubble is {bubble:.4f}; should be {formula.bubble} = {least:.4f}"
            )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_the_peak_is_the_formulas(name):
    for p, m in SIZES:
        peaks, formula = bubbles.simulate(made(name, p, m), COST).peak, bubbles.FORMULAS[name].peak
        for r, peak in enumerate(peaks):
            most = bubbles.by_formula(formula, p=p, m=m, r=r)
            where = f"{name}, p = {p}, m = {m}: {peak} are in flight on rank {r}"
            assert peak <= most, f"{where}; should be at most {formula} = {most}"


# --- 11: tensor parallelism -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel, factor", [(False, 8), (True, 10)])
def test_a_block_sends_8_bsh(workers, sequence_parallel, factor):
    c = tiny_config(1, 2, sequence_parallel=sequence_parallel)
    unit = c.num_layers * 3 * c.micro_batch_size * c.seq_length * c.hidden_size / 2 * 8  # m = 3, (t-1)/t, float64
    for measured, _ in (of_rank.sent for of_rank in workers.run(2, record, c)):
        sent = sum(count for (_, what, _), (_, count) in measured.items() if what == "activations")
        assert sent == factor * unit, (
            f"a block sends {float(sent) / unit:g} bsh (t-1)/t; should be {factor} bsh (t-1)/t"
        )


def test_tp_ranks_keep_the_bytes_of_the_formulas(workers):
    check_bytes(workers.run(2, record, tiny_config(1, 2)))
    x, w, saved = drawn(8, 6).requires_grad_(), torch.nn.Parameter(drawn(4, 6)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(kept) or kept, lambda kept: kept):
        Linear.apply(x, w, None, "copy", None, Mesh().tp, reference)
    kept = sum(tensor.nbytes for tensor in saved)
    assert kept == x.nbytes, f"a linear keeps {kept} bytes; should be those of its input x alone, {x.nbytes}"


# --- 12: the mesh -----------------------------------------------------------------------------------------------------

AXES = {  # axis: (its groups, why)
    "tp": ([(0, 1), (2, 3), (4, 5), (6, 7)], "tp sends most, so its ranks are neighbours, inside a node"),
    "pp": ([(0, 2), (1, 3), (4, 6), (5, 7)], "pp comes after tp: its ranks are inside a rack"),
    "data": ([(0, 4), (1, 5), (2, 6), (3, 7)], "data sends least often, so its ranks are farthest from one another"),
    "world": ([tuple(range(8))], "the world has all ranks"),
}
CONTEXT_AXES = {  # with tp=2, cp=2: the cp ranks are data ranks, too
    "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
    "cp": [(0, 2), (1, 3), (4, 6), (5, 7)],
    "data": [(0, 2, 4, 6), (1, 3, 5, 7)],
}


@pytest.mark.parametrize("axis", AXES)
def test_each_axis_has_its_groups(axis):
    groups, why = AXES[axis]
    found = sorted({getattr(mesh, axis).ranks for mesh in meshes()})
    assert found == groups, f"{why}. On 8 ranks with tp=2, pp=2, the groups of {axis} are {found}, not {groups}"


def test_each_rank_is_in_its_groups_at_its_index():
    for rank, mesh in enumerate(meshes()):
        for axis in (mesh.world, mesh.data, mesh.pp, mesh.tp, mesh.pp_to_lower):
            text = f"rank {rank}: its index on {axis.name} is {axis.rank}, and the ranks there are {axis.ranks}"
            assert mesh.rank == rank == axis.ranks[axis.rank], text


@pytest.mark.parametrize("axis", CONTEXT_AXES)
def test_groups_with_context_parallelism(axis):
    groups, found = CONTEXT_AXES[axis], meshes(tp=2, pp=1, cp=2)
    sets = sorted({getattr(mesh, axis).ranks for mesh in found})
    assert sets == groups, f"on 8 ranks with tp=2, cp=2, the groups of {axis} are {sets}, not {groups}"
    for rank, mesh in enumerate(found):
        reader = (rank // 4, 2)  # ranks 0 to 3 read the same samples
        assert mesh.reader == reader, f"rank {rank} reads {mesh.reader}, not {reader}"
        index = getattr(mesh, axis).rank
        assert getattr(mesh, axis).ranks[index] == rank, f"rank {rank}: its index on {axis} is {index}"


def test_groups_with_pp_outermost():
    """Megatron-LM's order. All ranks with one dp rank read the same samples."""
    for rank, mesh in enumerate(meshes(order="pp-dp-tp")):
        dp, pp, tp = rank // 2 % 2, rank // 4, rank % 2
        data, even = 4 * pp + tp, rank - tp
        axes = {"data": (data, data + 2), "pp": (rank % 4, rank % 4 + 4), "tp": (even, even + 1)}
        for axis, ranks in (axes | {"world": tuple(range(8))}).items():
            text = f"with order=pp-dp-tp, tp=2, pp=2, the group {axis} of rank {rank} is {ranks}"
            assert getattr(mesh, axis).ranks == ranks and ranks[getattr(mesh, axis).rank] == rank, text
        assert mesh.reader == (dp, 2), f"with order=pp-dp-tp, rank {rank} reads {mesh.reader}, not {(dp, 2)}"


def test_messages_to_lower_ranks_have_a_group_of_their_own():
    for mesh in meshes():
        assert mesh.pp_to_lower.ranks == mesh.pp.ranks and mesh.pp_to_lower.group is not mesh.pp.group, (
            "`pp_to_lower` needs the ranks of pp and a second group (`second`)"
        )


# --- 13: a mistake that only tensor parallelism sees ------------------------------------------------------------------

WITHOUT_TP = {
    "zero": dict(zero=3),
    "pp": dict(pp=2),
    "ulysses": dict(cp=2),
}


def test_one_process_sees_no_mistake():
    found = wrong_gradients(stirred(tiny_config(1)))
    assert not found, found


@pytest.mark.parametrize("name", WITHOUT_TP)
def test_a_layout_without_tp_sees_no_mistake(workers, name):
    fields = WITHOUT_TP[name]
    check_training(workers, tiny_config(2 if "zero" in fields else 1, **fields))


needs_mistake = pytest.mark.skipif(
    "not config.pluginmanager.has_plugin('testing.judging')",
    reason="needs an answer of exercise 13, which is a mistake",
)


@needs_mistake
def test_tp_sees_the_mistake(workers):
    for sequence_parallel in (False, True):
        config = tiny_config(1, 2, sequence_parallel=sequence_parallel)
        ours, one = workers.run(2, record, config)[0], one_process(workers, config)
        same = ours.losses == pytest.approx(one.losses, rel=1e-9) and ours.norms == pytest.approx(one.norms, rel=1e-9)
        assert not same, f"with sequence_parallel={sequence_parallel} tp=2 trains the model of one process"


@needs_mistake
def test_the_types_name_the_line_of_the_mistake():
    found = letters.findings(tiny_config(1))
    assert found, "the types find no mistake"
    assert "model.py" in found[0] and "WrongStep" in found[0], found[0]
