"""Context parallelism: attention over several ranks is plain attention. (test_layouts.py has it in its grid.)"""

import functools
import math

import pytest
import torch

import operations
import reference
from accounts import draw
from config import CHOICES
from errors import UserError
from parallel.context import WAYS, own_positions
from parallel.mesh import Mesh
from testing.tiny import check_layout, tiny_config


def plain(q, k, v):
    """Causal attention with every step written out. q, k, v [b, s, a, d] -> [b, s, a, d]."""
    scores = torch.einsum("biad,bjad->baij", q, k) / math.sqrt(q.shape[-1])
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return torch.einsum("baij,bjad->biad", scores.masked_fill(future, -math.inf).softmax(-1), v)


def differences(way, n, dtype, shift):
    """Return this rank's largest differences of y, dq, dk, dv from `plain`. shift: added to all keys."""
    cp, generator = Mesh(cp=n).cp, torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 24, 12, 4, dtype=torch.float64, generator=generator).to(dtype) for _ in range(4)]
    q, k, v, dy = (x.double() for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k + shift, v))
    y = plain(q, k, v)
    right = [x[:, own_positions(24, cp, way)] for x in (y, *torch.autograd.grad(y, (q, k, v), dy))]
    ours = [x.detach().to(dtype)[:, own_positions(24, cp, way)].requires_grad_() for x in (q, k, v)]
    y = WAYS[way](*ours, cp, reference)
    found = [y, *torch.autograd.grad(y, ours, dy.to(dtype)[:, own_positions(24, cp, way)])]
    return [((x - theirs).abs().max() / theirs.abs().max()).item() for x, theirs in zip(found, right, strict=True)]


@pytest.mark.parametrize("dtype, shift, bound", [("fp64", 0, 1e-12), ("fp64", 2e3, 1e-8), ("bf16", 0, 2e-2)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_attention_over_ranks_is_plain_attention(workers, way, n, dtype, shift, bound):
    """A shift of all keys changes no probability, but exp(score) would overflow."""
    for rank, found in enumerate(workers.run(n, differences, way, n, operations.DTYPES[dtype], shift)):
        wrong = {name: x for name, x in zip(("y", "dq", "dk", "dv"), found, strict=True) if not x <= bound}
        assert not wrong, f"rank {rank}: {wrong} of the largest value differ from attention on one process"


def test_the_zigzag_gives_equal_work(capsys):
    """64 queries see 2,080 keys: 520 on each of 4 ranks."""
    draw.main(["--cp=4"])
    seen = [int(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("rank")]
    assert dict(zip(WAYS, (seen[:4], seen[4:]), strict=True)) == {"ring": [520] * 4, "ulysses": [136, 392, 648, 904]}


THREE = dict(cp=3, hidden_size=24, num_attention_heads=6, seq_length=12)  # the grid has cp = 2 and 4


@pytest.mark.parametrize("context", CHOICES["context"])
@pytest.mark.parametrize(
    "dp, tp, fields",
    [
        (1, 1, dict(recompute="full")),
        (2, 1, dict(zero=3)),
        pytest.param(1, 2, dict(sequence_parallel=True), marks=pytest.mark.slow),
        pytest.param(1, 1, dict(pp=2, schedule="chimera", zero=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_ranks_train_the_same_model(workers, context, dp, tp, fields):
    modes = [dict(optimizer="sgd", dropout=0.0), dict(optimizer="adamw", dropout=0.1)]
    configs = [tiny_config(dp, tp, context=context, **mode, **fields, **THREE) for mode in modes]
    check_layout(configs, functools.partial(workers.run, 3 * dp * tp * configs[0].pp))


def test_the_ring_has_no_kernel_yet():
    with pytest.raises(UserError, match="context=ring: no kernel"):
        operations.choose(tiny_config(1, cp=2, context="ring", dtype="bf16"), torch.device("cuda"), "bf16")
