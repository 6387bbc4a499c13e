"""Show what your functions compute, beside the slides and the usual mistakes.

python -m exercises.show flops      exercise 1: GPT-3's FLOPs
python -m exercises.show losses     exercise 3: your AdamW, beside the slide's Adam and epsilon inside the root
python -m exercises.show ratios     exercise 7: LAMB's trust ratio of each layer
python -m exercises.show groups     exercise 12: the groups of 8 ranks with tp=2, pp=2
"""

import sys
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import config as configuration
import train
from accounts.flops import hardware_flops, model_flops
from accounts.report import aligned
from errors import exit_on_user_error
from model import GPT
from parallel.mesh import Mesh
from parallel.optimizer import RULES
from test_layouts import built, micro_batches, tiny_config

TOKENS = 300e9  # of all sizes of GPT-3


def flops():
    """Print GPT-3's sizes: 5.7 N D (the slide), and the functions of accounts/flops.py."""
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
    curves = []
    for rule in (RULES["adamw"].step, slides_adam(-1), slides_adam(1)):
        with mock.patch.dict(RULES, adamw=RULES["adamw"]._replace(step=rule, fused=None)):
            run = built(tiny_config(1, optimizer="adamw", dtype="fp32", weight_decay=0.0, lr=5e-3, train_iters=steps))
            batches = micro_batches(run)
            curves.append([f"{train.train_step(run, batches).read().loss:.4f}" for _ in range(steps)])
    rows = [("step", "your AdamW", "the slide's Adam", "only epsilon inside the root")]
    print(aligned([*rows, *([str(i), *row] for i, row in enumerate(zip(*curves, strict=True)) if i % 4 == 0)], 0))


def ratios():
    """Print the trust ratio of each layer in the first step of LAMB."""
    rule, rows = RULES["lamb"], [("layer", "|w|", "|direction|", "|w| / |direction|", "yours")]

    def watched(w, direction, moments, weight_norm, norm, *, lr, **more):
        before, after = w.clone(), direction.norm().item()
        rule.layerwise(w, direction, moments, weight_norm, norm, lr=lr, **more)
        moved = (w - before).norm().item()
        rows.append((weight_norm, norm, weight_norm / norm, moved / lr / after))

    run = built(tiny_config(1, optimizer="lamb", num_layers=1))
    with mock.patch.dict(RULES, lamb=rule._replace(layerwise=watched)):
        train.train_step(run, micro_batches(run))
    names = [piece.spec.name for _, bucket in sorted(run.zero.buckets.items()) for piece in bucket.pieces]
    lines = [(name, *(f"{x:.4f}" for x in row)) for name, row in zip(names, rows[1:], strict=True)]
    print(aligned([rows[0], *lines], 1))


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
    """Print the groups of the axes."""
    for axis in ("tp", "pp", "dp", "world"):
        print(f"{axis:<5}", *sorted({getattr(mesh, axis).ranks for mesh in meshes()}))


if __name__ == "__main__":
    exit_on_user_error({"flops": flops, "losses": losses, "ratios": ratios, "groups": groups}[sys.argv[1]])
