"""Show what your functions compute, beside the slides and the usual mistakes.

python -m exercises.show flops      exercise 1: GPT-3's FLOPs
python -m exercises.show losses     exercise 3: your AdamW, beside the slide's Adam and epsilon inside the root
python -m exercises.show ratios     exercise 7: LAMB's trust ratio of each layer
python -m exercises.show leaderboard    exercise 8: all synchronous schedules
python -m exercises.show delay      exercise 10: 1F1B whose W follow their I at once; your zb-h1; the paper's
python -m exercises.show groups     exercise 12: the groups of 8 ranks with tp=2, pp=2
python -m exercises.show schemes    the slide's table: cut (分散) or whole (冗長) on 2 ranks; FLOPs; what is sent
python -m exercises.show batch      FLOP/s of a training step against the local batch
python -m exercises.show chain      the slide's chain rule (微分の連鎖則), factor by factor, beside PyTorch's
python -m exercises.show law        the slide's power laws (べき乗則): loss against data, and against parameters
"""

import importlib
import math
import sys
import time
from fractions import Fraction
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import config as configuration
import train
from accounts import bubbles, draw, scaling
from accounts.flops import hardware_flops, model_flops
from accounts.memory import rank_states
from accounts.report import aligned
from accounts.traffic import predict_step
from errors import UserError, exit_on_user_error
from exercises.formulas import tiny
from model import GPT
from parallel import schedules, simulation
from parallel.mesh import Mesh
from parallel.optimizer import RULES
from parallel.schedules import Action
from testing.judging import need_pytest

TOKENS = 300e9  # of all sizes of GPT-3
P, M, COST, COMM = 4, 8, {"F": 1, "B": 2, "I": 1, "W": 1}, 0.5
PLAIN = "F and B only, one chunk"
BEST = [(4, 0.4), (5, 0.3514), (6, 0.3333)]  # (peak, a plain schedule's smallest bubble)


def tests():
    """Return testing/tiny.py: a tiny model and its samples."""
    need_pytest()
    return importlib.import_module("testing.tiny")


def flops():
    """Print your FLOPs of three sizes of GPT-3, beside the slide's 5.7 N D and 6 N D."""
    rows = [("model", "N", "D", "slide: 5.7ND", "yours", "yours / ND: 6 + attention", "recompute=full / yours")]
    for name in ("gpt3_1b3", "gpt3_13b", "gpt3_175b"):
        c = configuration.load([f"configs/{name}.py", "--recompute=full"])
        n = GPT(c, None).num_parameters()
        yours = model_flops(c, TOKENS / c.seq_length)
        more = hardware_flops(c, TOKENS / c.seq_length) / yours
        numbers = n, TOKENS, 5.7 * n * TOKENS, yours, yours / n / TOKENS, more
        rows.append((name, *(f"{number:.4g}" for number in numbers)))
    print(aligned(rows, 1))


def slides_adam(sign):
    """Return Adam with the slide's `sign` of the gradient in m and v, and epsilon inside the root."""

    def rule(weight, gradient, moments, *, lr, scale, update, beta1, beta2, eps, **_):
        (m, v), g = moments, gradient * scale
        m.mul_(beta1).add_(g, alpha=sign * (1 - beta1))
        v.mul_(beta2).add_(g * g, alpha=sign * (1 - beta2))
        weight.sub_(lr * m / (1 - beta1**update) / (v / (1 - beta2**update) + eps).sqrt())

    return rule


def losses(steps=21):
    """Print the losses of a tiny model. "yours" runs your `adamw`, not the fused operation."""
    curves, t = [], tests()
    for rule in (RULES["adamw"].step, slides_adam(-1), slides_adam(1)):
        with mock.patch.dict(RULES, adamw=RULES["adamw"]._replace(step=rule, fused=None)):
            c = t.tiny_config(1, optimizer="adamw", dtype="fp32", weight_decay=0.0, lr=5e-3, train_iters=steps)
            batches = t.tiny_batches(run := t.built(c))
            curves.append([f"{train.train_step(run, batches).read().loss:.4f}" for _ in range(steps)])
    rows = [("step", "your AdamW", "the slide's Adam", "only epsilon inside the root")]
    print(aligned([*rows, *([str(i), *row] for i, row in enumerate(zip(*curves, strict=True)) if i % 4 == 0)], 0))


def ratios():
    """Print the trust ratio of each layer in LAMB's first step, beside the ratio of your update."""
    t, rule, rows = tests(), RULES["lamb"], [("layer", "|w|", "|direction|", "|w| / |direction|", "yours")]

    def watched(w, direction, moments, weight_norm, norm, *, lr, **more):
        before, after = w.clone(), direction.norm().item()
        rule.layerwise(w, direction, moments, weight_norm, norm, lr=lr, **more)
        moved = (w - before).norm().item()
        rows.append((weight_norm, norm, weight_norm / norm, moved / lr / after))

    run = t.built(t.tiny_config(1, optimizer="lamb", num_layers=1))
    with mock.patch.dict(RULES, lamb=rule._replace(layerwise=watched)):
        train.train_step(run, t.tiny_batches(run))
    names = [piece.spec.name for _, bucket in sorted(run.zero.buckets.items()) for piece in bucket.pieces]
    lines = [(name, *(f"{x:.4f}" for x in row)) for name, row in zip(names, rows[1:], strict=True)]
    print(aligned([rows[0], *lines], 1))


def leaderboard():
    """Print all synchronous schedules, in two classes, the smallest peak first."""
    rows = [(PLAIN, peak, bubble, bubble, "the best possible") for peak, bubble in BEST]
    for name in schedules.SCHEDULES:
        schedule = simulation.build(name, P, M, schedules.usual_chunks(name))
        kinds, v = {action.kind for actions in schedule.actions for action in actions}, draw.chunks_per_rank(schedule)
        plain = len(schedule.parts) == P and kinds == {"F", "B"}
        line = bubbles.simulate(schedule, {kind: duration / v for kind, duration in COST.items()}, COMM)
        peak = max(line.peak) / v  # in whole stages
        rows.append((PLAIN if plain else "others", peak, line.bubble, line.step_bubble, name))
    texts = [(what, name, f"{peak:g}", *(f"{x:.4f}" for x in bubbles)) for what, peak, *bubbles, name in sorted(rows)]
    print(f"{P} stages, {M} micro-batches, F = I = W = 1, B = 2, a message takes {COMM}")
    print(aligned([("class", "schedule", "peak", "bubble", "of the step"), *texts], 2))


def delay():
    """Print 1F1B whose W follow their I at once; this tree's zb-h1; the paper's."""
    at_once = []
    for actions in simulation.build("1f1b", P, M).actions:
        halves = [[Action(k, a.microbatch, a.chunk) for k in ("F" if a.kind == "F" else "IW")] for a in actions]
        at_once.append([action for part in halves for action in part])
    yours, formula = simulation.build("zb-h1", P, M), bubbles.FORMULAS["zb-h1"]
    rows = [("delay of W", "bubble", "in flight")]
    for name, schedule in [("0: W follows I", schedules.straight("", 1, at_once)), ("yours", yours)]:
        line = bubbles.simulate(schedule, COST)
        rows.append((name, f"{line.bubble:.4f}", " ".join(map(str, line.peak))))
    bubble, peak = (bubbles.by_formula(text, p=P, m=M, **COST) for text in (formula.bubble, formula.peak))
    print(aligned([*rows, ("the paper's", f"{bubble:.4f}", " ".join([str(peak)] * P))], 1))


def meshes(ranks=8, tp=2, pp=2, cp=1, order="dp-pp-tp"):
    """Return the Mesh of each rank, in torch's fake process group: no process starts."""
    found = []
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            found.append(Mesh(tp, pp, cp, order=order))
        finally:
            dist.destroy_process_group()
    return found


def groups():
    for axis in ("tp", "pp", "data", "world"):
        print(f"{axis:<5}", *sorted({getattr(mesh, axis).ranks for mesh in meshes()}))


def schemes():
    """Print the slide's table: what a scheme cuts on 2 ranks, the FLOPs of rank 0 (演算), and what it sends."""
    rows = [("2 ranks", "data", "FLOPs", "weights", "gradients", "m, v", "rank 0 sends in a step")]
    one = predict_step(tiny(), 1)
    whole = rank_states(one.layout, 0, one.sizes)
    for name, fields in [
        ("DP", {}),
        *((f"ZeRO-{z}", {"zero": z}) for z in (1, 2, 3)),
        ("PP", {"pp": 2}),
        ("TP", {"tp": 2}),
    ]:
        p, c = predict_step(tiny(**fields), 2), tiny(**fields)
        kept = rank_states(p.layout, 0, p.sizes)
        states = [kept[what] / whole[what] for what in ("parameters", "gradients", "moments")]
        sent = [f"{calls} {how} of {what}" for (axis, what, how), (calls, _) in p.sent[0].items() if axis != "world"]
        parts = Fraction(c.tp * c.pp, 2), flops_of_rank_0(p.layout), *states
        cells = [f"cut {float(part):.0%}" if part < 1 else "whole" for part in parts]
        rows.append((name, *cells, ", ".join(sent[:2])))
    print(aligned(rows, 1))


def flops_of_rank_0(layout):
    """Return rank 0's share of the FLOPs of a step."""
    c = layout.config
    head = model_flops(c, 1, block_forwards=0)
    flops = [0, *[(model_flops(c, 1) - head) / c.num_layers] * c.num_layers, head]  # embedding, blocks, head
    units = [unit for chunk in layout.chunks(0) for unit in layout.units[chunk]]
    return sum(flops[unit] for unit in units) / sum(flops) / layout.data_ranks / c.tp


def batch(steps=3):
    """Print the time and the FLOP/s of a step with local batches from 1 to 32 samples of 32 tokens."""
    t, rows = tests(), [("local batch", "ms", "GFLOP/s")]
    for samples in (1, 2, 4, 8, 16, 32):
        c = tiny(seq_length=32, micro_batch_size=samples, global_batch_size=samples)
        run, seconds = t.built(c), []
        batches = t.tiny_batches(run)
        for _ in range(1 + steps):
            start = time.perf_counter()
            train.train_step(run, batches).read()
            seconds.append(time.perf_counter() - start)
        rows.append((str(samples), f"{1000 * min(seconds):.1f}", f"{model_flops(c, samples) / min(seconds) / 1e9:.1f}"))
    print(aligned(rows, 0))


def chain():
    """Print each factor of dL/dW0 and dL/dW1 of the slide's two layers, with f = ReLU and one sample of class 0."""
    generator = torch.Generator().manual_seed(0)
    x0, W0, W1 = (torch.randn(shape, generator=generator, requires_grad=True) for shape in ((2,), (3, 2), (2, 3)))
    z0 = W0 @ x0
    x1 = z0.relu()
    z1 = W1 @ x1
    p = z1.softmax(0)
    for tensor in (z0, x1, z1, p):
        tensor.retain_grad()
    loss = -p[0].log()
    loss.backward()
    with torch.no_grad():
        dp = torch.tensor([-1 / p[0], 0])
        dz1 = (p.diag() - p.outer(p)) @ dp
        dx1 = W1.T @ dz1
        dz0 = (z0 > 0) * dx1
        forward = {"z0 = W0 x0": z0, "x1 = f(z0)": x1, "z1 = W1 x1": z1, "p = g(z1)": p, "L = -log p[0]": loss}
        backward = {  # formula: (value, PyTorch's)
            "dL/dp = -1/p of the class": (dp, p.grad),
            "dL/dz1 = dp/dz1 dL/dp": (dz1, z1.grad),
            "dL/dW1 = dL/dz1 x1^T": (dz1.outer(x1), W1.grad),
            "dL/dx1 = W1^T dL/dz1": (dx1, x1.grad),
            "dL/dz0 = f'(z0) dL/dx1": (dz0, z0.grad),
            "dL/dW0 = dL/dz0 x0^T": (dz0.outer(x0), W0.grad),
        }
        rows = [("", "slide", "value", "PyTorch's gradient")]
        rows += [("F", formula, numbers(value), "") for formula, value in forward.items()]
        rows += [("B", formula, numbers(ours), numbers(theirs)) for formula, (ours, theirs) in backward.items()]
    print(aligned(rows, 4))
    print("dL/dW1 and dL/dW0 need x1 and x0. So these activations (活性) are kept from forward to backward.")


def numbers(tensor):
    return " ".join(f"{round(x, 4) + 0.0:.4f}" for x in tensor.flatten().tolist())


def law():
    """Print the loss of the two power laws. The bars have logarithmic length, so their ends lie on a line."""
    fit = scaling.BESIROGLU  # loss = E + A / N^a + B / D^b
    laws = {
        "D tokens, enough parameters": (fit.b, lambda size: scaling.loss(fit, math.inf, size)),
        "N parameters, enough tokens": (fit.a, lambda size: scaling.loss(fit, size, math.inf)),
    }
    for what, (exponent, loss_of) in laws.items():
        rows = [(what, "loss", f"loss - {fit.E}", "log(loss - E)")]
        for size in (10.0**k for k in range(7, 14)):
            rest = loss_of(size) - fit.E
            bar = "#" * round(12 * math.log10(500 * rest))
            rows.append((f"{size:.0e}", f"{rest + fit.E:.3f}", f"{rest:.4f}", f"{bar:<42}"))
        print(aligned(rows, 1))
        print(f"With 10 times as many, loss - E is 10^{exponent} = {10**exponent:.2f} times smaller.\n")


def main():
    shown = {f.__name__: f for f in (flops, losses, ratios, leaderboard, delay, groups, schemes, batch, chain, law)}
    if sys.argv[1:2] not in ([name] for name in shown):
        raise UserError(f"python -m exercises.show: should be followed by one of {', '.join(shown)}")
    shown[sys.argv[1]]()


if __name__ == "__main__":
    exit_on_user_error(main)
