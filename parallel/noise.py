"""The noise of gradients: measured (`--noise_scale`) and penalised (`--penalty`). Slide "データ並列", on large batches.

**Noise scale**: about how many samples can a step use well? McCandlish et al. (arXiv 1812.06162), section 2.2 and
appendix A.1. G is the gradient over all data, and tr(Sigma) the sum of the variances of its elements over single
samples. The squared norm of the gradient of n samples is in the mean |G|^2 + tr(Sigma) / n. A step measures it for two
n: for its first micro-batch (b samples, the mean of the data ranks), and for the whole step (B samples). The two
equations give B_simple = tr(Sigma) / |G|^2. A batch far below B_simple is mostly noise, so a larger one saves steps. A
batch far above it wastes samples. Only the matrices of the blocks count: they are cut over tp and never partial. A
single step is very noisy, so numerator and denominator are averaged over the steps of a log line before the division.

**Penalty**: the loss has one more term, penalty / 2 times the variance of the gradient over the data ranks. With the
gradients g_r of the ranks and their mean g, it is the mean over r of |g_r - g|^2. The gradient of this term is penalty
times the mean of H_r (g_r - g), with the second derivatives H_r. A product H_r d needs no H_r: it is (g_r(w + e d) -
g_r(w)) / e for a small e. So each step runs forward and backward twice, and sums gradients twice.
"""

import math

import torch

from parallel.pipeline import Executor

RADIUS = 1e-5  # the length of e d, relative to that of w; on tiny models 0.1% to 0.6% off, in fp32 and fp64


class MeasuringExecutor(Executor):
    """An Executor that measures both squared norms of the noise scale."""

    def run(self, micro_batches, count, weight):
        self.first = {}  # {bucket name: squared norm of the matrices' gradient of this rank's first micro-batch}
        return super().run(micro_batches, count, weight)

    def _reduce(self, name):
        bucket = self.zero.buckets[name]
        if name.startswith("block") and name not in self.first:  # before a gradient is added or sent
            self.first[name] = self._squares(bucket.grad, bucket.layout.ranges)
        super()._reduce(name)

    def measured(self, scale):
        """Return this rank's shares of the squared norms of the step and of one micro-batch, two float64 tensors."""
        blocks = [bucket for name, bucket in self.zero.buckets.items() if name.startswith("block")]
        zero = self.total.new_zeros(())
        step = sum((self._squares(b.own_grad, b.ranges) for b in blocks if self.zero.counts(b, cut=True)), zero)
        first = sum(self.first.values(), zero) / self.mesh.dp.size
        return step / scale**2, first / self.weight**2

    def _squares(self, flat, ranges):
        matrices = [flat[r.begin : r.end] for r in ranges if r.cut and r.decays]
        return self.zero.ops.squared_norms(matrices or [flat[:0]]).sum()


def noise_scale(steps, b):
    """Return B_simple in samples, nan if it is unknown. steps: `log.Step`s; b: samples of a micro-batch."""
    trace = square = 0.0
    for step in steps:
        if step.samples > b and not step.skipped:
            large, small = step.measured
            trace += (small - large) / (1 / b - 1 / step.samples)
            square += (step.samples * large - b * small) / (step.samples - b)
    return trace / square if square > 0 else math.nan


class PenalisedExecutor(Executor):
    """An Executor whose `run` leaves the gradients of the loss with the penalty. It needs ZeRO stage 0."""

    def run(self, micro_batches, count, weight):
        batches, buckets = [next(micro_batches) for _ in range(count)], self.zero.buckets.values()
        self.own = {}  # {bucket name: this rank's share of the gradient}
        loss = super().run(iter(batches), count, weight)
        self.zero.finish()
        own = [self.own[b.name] for b in buckets]
        away = [self.mesh.dp.size * g - b.grad for b, g in zip(buckets, own, strict=True)]
        length = torch.nn.utils.get_total_norm
        e = RADIUS * length([b.param for b in buckets]) / length(away)
        weights = [b.param.clone() for b in buckets]
        for b, g, d in zip(buckets, own, away, strict=True):
            b.param += e * d
            b.grad.copy_((1 - self.config.penalty / e) * g)  # the second backward adds penalty / e times its gradient
        super().run(iter(batches), count, weight * (self.config.penalty / e).item())
        self.zero.finish()
        for b, w in zip(buckets, weights, strict=True):
            b.param.copy_(w)
        return loss

    def _reduce(self, name):
        if self.passes[name] == 1:
            self.own[name] = self.zero.buckets[name].grad.clone()
        super()._reduce(name)
