"""Show what your functions compute, beside the slides and the usual mistakes.

python -m exercises.show flops      exercise 1: GPT-3's FLOPs
python -m exercises.show losses     exercise 3: your AdamW, beside the slide's Adam and epsilon inside the root
python -m exercises.show norms      exercise 7: the norms of each layer and of LAMB's update of it
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
from functools import partial
from unittest import mock

import torch

import config as configuration
import train
from accounts import scaling
from accounts.flops import forward_flops, hardware_flops, model_flops, units
from accounts.report import aligned
from accounts.traffic import predict_step
from accounts.zero_states import rank_states
from errors import UserError, exit_on_user_error
from parallel.optimizer import RULES, Rule
from parallel.units import Model
from testing.judging import need_pytest

TOKENS = 300e9  # of all sizes of GPT-3
SCHEMES = {
    "DP": {},
    "ZeRO-1": {"zero": 1},
    "ZeRO-2": {"zero": 2},
    "ZeRO-3": {"zero": 3},
    "PP": {"pp": 2},
    "TP": {"tp": 2},
}


def tests():
    """Return testing/tiny.py: a tiny model and its samples."""
    need_pytest()
    return importlib.import_module("testing.tiny")


def tiny(**fields):
    """Return configs/tiny.py's Config with other fields."""
    return configuration.load(["configs/tiny.py", *(f"--{name}={value}" for name, value in fields.items())])


def flops():
    """Print your FLOPs of three sizes of GPT-3, beside the slide's 5.7 N D and 6 N D."""
    rows = [("model", "N", "D", "slide: 5.7ND", "yours", "yours / ND: 6 + attention", "recompute=full / yours")]
    for name in ("gpt3_1b3", "gpt3_13b", "gpt3_175b"):
        c = configuration.load([f"configs/{name}.py", "--recompute=full"])
        n, sequences = Model(c, None).num_parameters(), TOKENS / c.seq_length
        yours, more = model_flops(c, sequences), hardware_flops(c, sequences)
        numbers = n, TOKENS, 5.7 * n * TOKENS, yours, yours / n / TOKENS, more / yours
        rows.append((name, *(f"{number:.4g}" for number in numbers)))
    print(aligned(rows, 1))


def slides_adam(weight, gradient, moments, *, lr, scale, update, beta1, beta2, eps, sign=-1, **_):
    """Make an update of Adam with epsilon inside the root. sign: the slide's, of the gradient in m and v."""
    (m, v), g = moments, gradient * scale
    m.mul_(beta1).add_(g, alpha=sign * (1 - beta1))
    v.mul_(beta2).add_(g * g, alpha=sign * (1 - beta2))
    weight.sub_(lr * m / (1 - beta1**update) / (v / (1 - beta2**update) + eps).sqrt())


def losses(steps=21):
    """Print the losses of a tiny model. "your AdamW" runs your `adamw`, not the fused operation."""
    t, curves = tests(), []
    rules = {"your AdamW": RULES["adamw"].step, "the slide's Adam": slides_adam}
    rules["only epsilon inside the root"] = partial(slides_adam, sign=1)
    for rule in rules.values():
        with mock.patch.dict(RULES, adamw=Rule(rule, 2)):
            c = t.tiny_config(1, optimizer="adamw", dtype="fp32", weight_decay=0.0, lr=5e-3, train_iters=steps)
            batches = t.tiny_batches(run := t.built(c))
            curves.append([f"{train.train_step(run, batches).read().loss:.4f}" for _ in range(steps)])
    rows = [(f"{i}", *row) for i, row in enumerate(zip(*curves, strict=True))]
    print(aligned([("step", *rules), *rows[::4]], 0))


def norms():
    """Print the norm of each layer and of LAMB's first update: |update| = lr |w| where the trust ratio acts."""
    t = tests()
    run = t.built(t.tiny_config(1, optimizer="lamb", num_layers=1, lr_warmup_iters=0, lr_decay_style="constant"))
    before = {p.spec.name: p.detach().clone() for p in run.model.parameters()}
    train.train_step(run, t.tiny_batches(run))
    rows = [("layer", "|w|", "|update| / lr")]
    for p in run.model.parameters():
        w = before[p.spec.name]
        rows.append((p.spec.name, f"{w.norm():.4f}", f"{(p - w).norm() / run.config.lr:.4f}"))
    print(aligned(rows, 1))


def schemes():
    """Print the slide's table: what a scheme cuts on 2 ranks, the FLOPs of rank 0 (演算), and what it sends."""
    rows = [("2 ranks", "data", "FLOPs", "weights", "gradients", "m, v", "rank 0 sends in a step")]
    one = predict_step(tiny(), 1)
    whole = rank_states(one.layout, 0, one.sizes)
    for name, fields in SCHEMES.items():
        p = predict_step(tiny(**fields), 2)
        kept, c = rank_states(p.layout, 0, p.sizes), p.layout.config
        states = [kept[what] / whole[what] for what in ("parameters", "gradients", "moments")]
        sent = [f"{calls} {how} of {what}" for (axis, what, how), (calls, _) in p.sent[0].items() if axis != "world"]
        parts = Fraction(c.tp * c.pp, 2), flops_of_rank_0(p.layout), *states
        cells = [f"cut to {float(part):.0%}" if part < 1 else "whole" for part in parts]
        rows.append((name, *cells, ", ".join(sent[:2])))
    print(aligned(rows, 1))


def flops_of_rank_0(layout):
    """Return rank 0's share of the FLOPs of a step. The embedding costs none."""
    c, counts = layout.config, [forward_flops(work) for work in units(layout.config)]
    mine = sum(counts[unit] for chunk in layout.chunks(0) for unit in layout.units[chunk])
    return mine / sum(counts) / layout.data_ranks / c.tp


def batch(steps=3):
    """Print the time and the FLOP/s of a step with local batches from 1 to 32 samples of 32 tokens."""
    t, rows = tests(), [("local batch", "ms", "GFLOP/s")]
    for samples in (1, 2, 4, 8, 16, 32):
        c = tiny(seq_length=32, micro_batch_size=samples, global_batch_size=samples)
        batches, seconds = t.tiny_batches(run := t.built(c)), []
        for _ in range(1 + steps):
            start = time.perf_counter()
            train.train_step(run, batches).read()
            seconds.append(time.perf_counter() - start)
        best = min(seconds)
        rows.append((f"{samples}", f"{1000 * best:.1f}", f"{model_flops(c, samples) / best / 1e9:.1f}"))
    print(aligned(rows, 0))


def chain():
    """Print each factor of dL/dW0 and dL/dW1 of the slide's two layers, with f = ReLU and one sample of class 0."""
    torch.manual_seed(0)
    x0, W0, W1 = (torch.randn(shape, requires_grad=True) for shape in ((2,), (3, 2), (2, 3)))
    z0 = W0 @ x0
    x1 = z0.relu()
    z1 = W1 @ x1
    p = z1.softmax(0)
    loss = -p[0].log()
    theirs = torch.autograd.grad(loss, [p, z1, W1, x1, z0, W0])
    with torch.no_grad():
        dp = torch.tensor([-1 / p[0], 0])
        dz1 = (p.diag() - p.outer(p)) @ dp
        dx1 = W1.T @ dz1
        dz0 = (z0 > 0) * dx1
    forward = {"z0 = W0 x0": z0, "x1 = f(z0)": x1, "z1 = W1 x1": z1, "p = g(z1)": p, "L = -log p[0]": loss}
    backward = {
        "dL/dp = -1/p of the class": dp,
        "dL/dz1 = dp/dz1 dL/dp": dz1,
        "dL/dW1 = dL/dz1 x1^T": dz1.outer(x1),
        "dL/dx1 = W1^T dL/dz1": dx1,
        "dL/dz0 = f'(z0) dL/dx1": dz0,
        "dL/dW0 = dL/dz0 x0^T": dz0.outer(x0),
    }
    rows = [("", "slide", "value", "PyTorch's gradient")]
    rows += [("F", formula, numbers(value), "") for formula, value in forward.items()]
    for (formula, ours), gradient in zip(backward.items(), theirs, strict=True):
        rows.append(("B", formula, numbers(ours), numbers(gradient)))
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
    shown = {f.__name__: f for f in (flops, losses, norms, schemes, batch, chain, law)}
    if sys.argv[1:2] not in ([name] for name in shown):
        raise UserError(f"python -m exercises.show: should be followed by one of {', '.join(shown)}")
    shown[sys.argv[1]]()


if __name__ == "__main__":
    exit_on_user_error(main)
