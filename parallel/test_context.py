"""Context parallelism: attention over several ranks is plain attention. (test_layouts.py has it in its grid.)"""

import math

import pytest
import torch

import operations
import reference
from parallel.context import attend
from parallel.mesh import Mesh
from testing.record import check_layout
from testing.tiny import few, tiny_config


def plain(q, k, v):
    """Causal attention with every step written out. q, k, v [b, s, a, d] -> [b, s, a, d]."""
    scores = torch.einsum("biad,bjad->baij", q, k) / math.sqrt(q.shape[-1])
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return torch.einsum("baij,bjad->biad", scores.masked_fill(future, -math.inf).softmax(-1), v)


def differences(n, dtype, shift):
    """Return this rank's largest differences of y, dq, dk, dv from `plain`. shift: added to all keys."""
    cp, generator = Mesh(cp=n).cp, torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 24, 12, 4, dtype=torch.float64, generator=generator).to(dtype) for _ in range(4)]
    q, k, v, dy = (x.double() for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k + shift, v))
    y = plain(q, k, v)
    right = [x.chunk(n, 1)[cp.rank] for x in (y, *torch.autograd.grad(y, (q, k, v), dy))]
    ours = [x.detach().to(dtype).chunk(n, 1)[cp.rank].requires_grad_() for x in (q, k, v)]
    y = attend(*ours, cp, reference)
    found = [y, *torch.autograd.grad(y, ours, dy.to(dtype).chunk(n, 1)[cp.rank])]
    return [((x - theirs).abs().max() / theirs.abs().max()).item() for x, theirs in zip(found, right, strict=True)]


@pytest.mark.parametrize("dtype, shift, bound", [("fp64", 0, 1e-12), ("fp64", 2e3, 1e-8), ("bf16", 0, 2e-2)])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_attention_over_ranks_is_plain_attention(workers, n, dtype, shift, bound):
    """A shift of all keys changes no probability, but exp(score) would overflow."""
    for rank, found in enumerate(workers.run(n, differences, n, operations.DTYPES[dtype], shift)):
        wrong = {name: x for name, x in zip(("y", "dq", "dk", "dv"), found, strict=True) if not x <= bound}
        assert not wrong, f"rank {rank}: {wrong} of the largest value differ from attention on one process"


THREE = dict(cp=3, hidden_size=24, num_attention_heads=6, seq_length=12)  # the grid has cp = 2 and 4


@pytest.mark.parametrize(
    "dp, tp, fields",
    few(
        [
            (1, 1, dict(recompute="full")),
            (2, 1, dict(zero=3)),
            (1, 2, dict(sequence_parallel=True)),
            (1, 1, dict(pp=2, schedule="chimera", zero=2)),
        ]
    ),
    ids=str,
)
def test_three_ranks_train_the_same_model(workers, dp, tp, fields):
    modes = [dict(optimizer="sgd", dropout=0.0), dict(optimizer="adamw", dropout=0.1)]
    configs = [tiny_config(dp, tp, **mode, **fields, **THREE) for mode in modes]
    check_layout(workers, 3 * dp * tp * configs[0].pp, *configs)
