"""Muon: the update of a matrix is an orthogonal matrix, so a rank needs whole matrices.

Jordan et al. (kellerjordan.github.io/posts/muon, 2024); Liu et al., Moonlight (arXiv 2502.16982), section 2.2:

    m = b1 m + (1 - b1) g      u = b1 m + (1 - b1) g      w -= lr (decay w + 0.2 sqrt(larger side) O(u))

If u = U S V^T is the singular value decomposition, O(u) is about U V^T: every direction gets an equally large update.
The factor makes it as large as AdamW's, so lr and decay serve both (MEASURED.md: a small model trains best with a
larger lr). b1 is adam_beta1 (usual: 0.95). The matrices are q, k, v, proj, fc1, fc2 of each block:
ParamSpec(matrix=True). Other parameters get AdamW. Matrices keep AdamW's second moment, which stays 0, because buffers,
checkpoints and `memory.py` have one form for all rules.

**Over ranks.** tp cuts a matrix by rows or columns, ZeRO anywhere. Each rank gathers u in the master dtype, over the
shards (stages 1 to 3), then over tp, computes O of whole matrices, and keeps its part.

**FLOPs.** A matrix with sides r <= c takes 20 r^2 c + 10 r^3, a block 300 h^3, which is 4.2 h/T of a step of T tokens.
All dp tp ranks repeat it: with GPT-2 345M and T = 0.5M that is 6.5% of the blocks' FLOPs on dp=8, and 52% on dp=64.
Then one rank should compute each matrix (not built).
"""

import math

import torch

from parallel.comm import all_gather

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a, b, c: after 5 iterations 0.7 < S < 1.2


def orthogonal(u, dtype):
    """Return O of k matrices [k, rows, columns], by Newton-Schulz: x = U S V^T -> U (a S + b S^3 + c S^5) V^T."""
    if u.shape[1] > u.shape[2]:
        return orthogonal(u.mT, dtype).mT
    a, b, c = COEFFICIENTS
    x = (u / torch.linalg.vector_norm(u, dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)  # S <= 1
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.to(u.dtype)


def muon(bucket, ranges, device, *, lr, decay, scale, beta1, **_):
    """Update the matrices of a `zero.Bucket` in these Ranges. Return the other Ranges."""
    whole = zip(bucket.layout.pieces(0, bucket.size), bucket.pieces, strict=True)
    matrices = [(matrix, piece) for matrix, piece in whole if piece.spec.matrix and not piece.spec.frozen]
    for r in ranges:
        if r.matrix:
            w, g, m = (x[r.begin : r.end] for x in (bucket.master, bucket.master_grad, bucket.moments[0]))
            m.mul_(beta1).add_(g, alpha=(1 - beta1) * scale)
            g.mul_((1 - beta1) * scale).add_(m, alpha=beta1)
            w.mul_(1 - lr * decay * r.decays)
    if matrices:
        u = all_gather(bucket.master_grad.to(device), bucket.shards, "momentum").wait()
        dtype = bucket.param.whole.dtype
        dtype = u.dtype if dtype == torch.float16 else dtype  # fp16 would lose small elements
        for matrix, piece in matrices:
            local = matrix.of(u).view(matrix.spec.local_shape(bucket.tp.size))
            part = direction(local, matrix.spec, bucket.tp, dtype).flatten()[piece.begin : piece.end]
            piece.of(bucket.master).sub_(part.to(bucket.master.device), alpha=lr)
    return [r for r in ranges if not r.matrix]


def direction(u, spec, tp, dtype):
    """Return this tp rank's part of 0.2 sqrt(larger side) O(u)."""
    cut, dim = spec.tp_dim is not None, (spec.tp_dim or 0) - len(spec.shape)  # dim -1: columns, -2: rows
    if cut:
        u = torch.cat([*all_gather(u[None].contiguous(), tp, "momentum").wait()], dim)
    whole = orthogonal(u.view(-1, *u.shape[-2:]), dtype).view(u.shape) * (0.2 * math.sqrt(max(u.shape[-2:])))
    return whole.chunk(tp.size, dim)[tp.rank] if cut else whole
