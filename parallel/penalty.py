"""A penalty on the variance of the gradient over the data ranks (`--penalty`). Slide "データ並列": 勾配分散.

The loss has one more term, penalty / 2 times the variance. With the gradients g_r of the data ranks and their mean g,
the variance is the mean over r of |g_r - g|^2. The gradient of this term is penalty times the mean of H_r (g_r - g),
with the second derivatives H_r. A product H_r d needs no H_r: it is (g_r(w + e d) - g_r(w)) / e for a small e. So each
step runs forward, backward and the sums of gradients twice.
"""

import torch

from parallel.pipeline import Executor

RADIUS = 1e-5  # the length of e d, relative to that of w; on tiny models 0.1% to 0.6% off, in fp32 and fp64


class PenalisedExecutor(Executor):
    """An Executor whose `run` leaves the gradients of the loss with the penalty. It needs ZeRO stage 0."""

    def run(self, batches, count, factor):
        """Run the step at w, then at w + e d with d = g_r - g. The gradients of both are added with their factors."""
        batches, buckets = [next(batches) for _ in range(count)], self.zero.in_order
        self.shares = {}  # {bucket's name: this rank's share of the gradient}
        loss = super().run(iter(batches), count, factor)
        with self.watch("finish"):
            self.zero.finish()
        params, grads = [b.param.whole for b in buckets], [b.grad.whole for b in buckets]
        shares = [self.shares[b.name] for b in buckets]
        distances = [self.mesh.data.size * g - total for g, total in zip(shares, grads, strict=True)]  # g_r - g
        length = torch.nn.utils.get_total_norm
        e = RADIUS * length(params) / length(distances).clamp(min=1e-30)  # the length is 0 if all g_r are equal
        weights = [w.clone() for w in params]
        for param, grad, g, d in zip(params, grads, shares, distances, strict=True):
            param += e * d
            grad.copy_((1 - self.config.penalty / e) * g)  # the second backward adds penalty / e times its gradient
        with self.watch("penalty"):
            super().run(iter(batches), count, factor * (self.config.penalty / e).item())
            self.zero.finish()
        for param, w in zip(params, weights, strict=True):
            param.copy_(w)
        return loss

    def _reduce(self, bucket):
        if self.passes[bucket.name] == 1:
            self.shares[bucket.name] = bucket.grad.whole.clone()
        super()._reduce(bucket)
