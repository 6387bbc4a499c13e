"""The update rules, on flat buffers; the loss scale; the learning rate.

Slide "深層学習の用語説明" has SGD and Adam. Its Adam differs from Kingma and Ba's (arXiv 1412.6980) in three places:
they add the gradient to the moments, where the slide subtracts it; their epsilon stands outside the root; and where the
slide has a factor b^(t+1), they divide the moments by 1 - beta^t.

A rule works in place on any range of a rank's flat buffers: it is elementwise, so it does not matter where a range
begins. All tensors have the master dtype, float32 (float64 in fp64 runs). Its keywords:

    lr       the learning rate          scale    multiplies the gradient: clipping (`Zero.squared_norm`), 1 / loss scale
    decay    weight decay, or 0         update   the number of this update, from 1
    beta1, beta2, eps                   as in the configuration (for a second half also lars_coefficient)

The functions below are the specification. If a rule names a *fused* operation, training runs that operation and not
the function: in `reference.py` PyTorch's kernel, in `kernels.py` Triton's. It makes the same update in one pass over
memory; the functions below take a pass per line. Its lr and scale stay on the device, so the host does not wait. A test
compares the two. To change such a rule, change the function, and drop `fused` from its row.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch


def sgd(weight, gradient, moments, *, lr, decay, scale, **_):
    """w -= lr (scale g + decay w). Slide "SGD (確率的勾配降下法)"; `moments` is empty."""
    weight.mul_(1 - lr * decay).add_(gradient, alpha=-lr * scale)


def adamw(weight, gradient, moments, *, lr, decay, scale, update, beta1, beta2, eps, **_):
    """AdamW: Adam whose decay acts on the weight itself. Loshchilov and Hutter (arXiv 1711.05101), Algorithm 2.

    (Training runs the fused `adamw_`, which makes the same update.)

    m = b1 m + (1 - b1) g      w -= lr (decay w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
    v = b2 v + (1 - b2) g^2    where g = scale * gradient
    """
    m, v = moments
    weight.mul_(1 - lr * decay).add_(adam_direction(gradient, m, v, scale, update, beta1, beta2, eps), alpha=-lr)


def adam_direction(gradient, m, v, scale, update, beta1, beta2, eps):
    """Update Adam's moments m and v; return (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)."""
    m.mul_(beta1).add_(gradient, alpha=(1 - beta1) * scale)
    v.mul_(beta2).addcmul_(gradient, gradient, value=(1 - beta2) * scale * scale)
    root = v.sqrt().div_(math.sqrt(1 - beta2**update)).add_(eps)
    return torch.div(m, root, out=root).div_(1 - beta1**update)


# --- layer-wise rates, for large batches ------------------------------------------------------------------------------
#
# Slide "データ並列": a large global batch generalises worse; LARS and LAMB are one remedy. Both give every parameter
# tensor ("layer") a rate of its own, so that a step moves it in proportion to its norm. Such an update has two halves.
# The first is elementwise and leaves a direction in the gradient's place. The second needs the norms of whole tensors,
# which may be cut over tp and dp (`Zero.tensor_norms`). Biases and LayerNorms, for which `layerwise` is False, keep the
# plain rate.


def lamb(weight, gradient, moments, *, decay, scale, update, beta1, beta2, eps, **_):
    """First half of LAMB (You et al., arXiv 1904.00962, Algorithm 2): AdamW's direction, decay included."""
    m, v = moments
    direction = adam_direction(gradient, m, v, scale, update, beta1, beta2, eps)
    torch.add(direction, weight, alpha=decay, out=gradient)


def apply_lamb(weight, direction, moments, weight_norm, norm, *, lr, layerwise, **_):
    """w -= lr (|w| / |direction|) direction."""
    ratio = weight_norm / norm if layerwise and weight_norm > 0 and norm > 0 else 1.0
    weight.add_(direction, alpha=-lr * ratio)


def lars(weight, gradient, moments, *, scale, **_):
    """First half of LARS (You et al., arXiv 1708.03888, Algorithm 1): the gradient itself."""
    gradient.mul_(scale)


def apply_lars(weight, gradient, moments, weight_norm, norm, *, lr, decay, layerwise, beta1, lars_coefficient, **_):
    """v = b1 v + lr c |w| / (|g| + decay |w|) (g + decay w);  w -= v."""
    ratio = 1.0
    if layerwise and weight_norm > 0 and norm > 0:
        ratio = lars_coefficient * weight_norm / (norm + decay * weight_norm)
    moments[0].mul_(beta1).add_(gradient.add_(weight, alpha=decay), alpha=lr * ratio)
    weight.sub_(moments[0])


class Rule(NamedTuple):
    """A row of RULES."""

    step: Callable  # on any range of the flat buffers
    moments: int  # buffers of the weight's size that it keeps
    layerwise: Callable | None = None  # the second half, tensor by tensor
    fused: str | None = None  # the operation that does the same as `step` in one pass


# Add your own: write a function like those above, and a row here. `train.py --optimizer=mine` runs it.
RULES = {
    "sgd": Rule(sgd, 0),
    "adamw": Rule(adamw, 2, fused="adamw_"),
    "lamb": Rule(lamb, 2, layerwise=apply_lamb),
    "lars": Rule(lars, 1, layerwise=apply_lars),
}


class Shard(NamedTuple):
    """The elements of one bucket that this rank updates: tensors of one length, of which `gradient` is used up."""

    weight: torch.Tensor  # master weights
    gradient: torch.Tensor
    moments: list
    ranges: list  # layout.Ranges that cover them
    pieces: list  # a layout.Piece for each parameter, `at` counted from the shard's begin
    cast: torch.Tensor | None  # the parameters, where they are not the master weights


def update(c, shards, scalars, ops, tensor_norms):
    """Update every shard; c: the configuration, scalars: `reference.UpdateScalars`.

    ops: the operations, for a fused rule; tensor_norms([(Shard, Piece)]): the norms of whole tensors, for a layer-wise
    one (`Zero.tensor_norms`). A rule that is not fused reads the scalars on the host, so the host waits for the device.
    """
    rule, constants = RULES[c.optimizer], dict(beta1=c.adam_beta1, beta2=c.adam_beta2, eps=c.adam_eps)
    if rule.fused:
        for s in shards:
            ranges = [(r.begin, r.end, r.decays) for r in s.ranges]
            fused = getattr(ops, rule.fused)
            fused(s.weight, s.gradient, s.moments, scalars, ranges, decay=c.weight_decay, out=s.cast, **constants)
        return
    if scalars.skip:
        return
    constants |= dict(lr=scalars.lr.item(), scale=scalars.scale.item(), update=scalars.update.item())
    for s in shards:
        for begin, end, _, decays in s.ranges:
            w, g, *moments = (x[begin:end] for x in (s.weight, s.gradient, *s.moments))
            rule.step(w, g, moments, decay=c.weight_decay * decays, **constants)
    if rule.layerwise:
        tensors = [(s, piece) for s in shards for piece in s.pieces]
        for (s, piece), (weight_norm, norm) in zip(tensors, tensor_norms(tensors).tolist(), strict=True):
            w, g, *moments = (piece.of(x) for x in (s.weight, s.gradient, *s.moments))
            constants |= dict(decay=c.weight_decay * piece.spec.decay, layerwise=piece.spec.decay)
            rule.layerwise(w, g, moments, weight_norm, norm, lars_coefficient=c.lars_coefficient, **constants)
    for s in shards:
        if s.cast is not None:
            s.cast.copy_(s.weight)


def learning_rate(c, update):
    """The rate of the `update`-th update (from 1; skipped steps do not count). `c`: the configuration.

    Linear warm-up to `lr`, then, except for `constant`, down to `min_lr` at `lr_decay_iters` and after it. A warm-up
    longer than the run, or than the decay, is allowed: the rate then rises as far as it comes.
    """
    end = c.lr_decay_iters or c.train_iters
    warmup = c.lr_warmup_iters if c.lr_warmup_iters >= 0 else c.lr_warmup_fraction * end
    if update <= warmup:
        return c.lr * update / warmup
    if c.lr_decay_style == "constant":
        return c.lr
    if update >= end:
        return c.min_lr
    if c.lr_decay_style == "wsd":  # warm-up, stable, decay (Hu et al., arXiv 2404.06395)
        left = min(1.0, (end - update) / c.lr_wsd_decay_iters)
    else:
        left = (end - update) / (end - warmup)
    if c.lr_decay_style == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return c.min_lr + (c.lr - c.min_lr) * left


class LossScale:
    """fp16's dynamic loss scale: as large as it can be without overflow, so that small gradients do not vanish.

    Micikevicius et al. (arXiv 1710.03740), section 3.2. Halved at an overflow once `hysteresis` of them have come;
    doubled, and the hysteresis refilled, after `window` clean steps. In other dtypes it stays 1.
    """

    def __init__(self, config, dtype_name):
        self.dynamic = dtype_name == "fp16"
        self.scale = config.initial_loss_scale if self.dynamic else 1.0
        self.minimum, self.window = config.min_loss_scale, config.loss_scale_window
        self.hysteresis = self.patience = config.hysteresis
        self.clean = 0

    def update(self, overflow):
        if not self.dynamic:
            return
        if overflow:
            self.clean = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale / 2, self.minimum)
        else:
            self.clean += 1
            if self.clean == self.window:
                self.clean, self.patience = 0, self.hysteresis
                self.scale *= 2

    def state(self):
        return {"dynamic": self.dynamic, "scale": self.scale, "clean": self.clean, "patience": self.patience}

    def restore(self, state):
        """Go on from a checkpoint's state; a run in another dtype than the checkpoint's starts afresh."""
        if self.dynamic and state["dynamic"]:
            self.scale, self.clean, self.patience = state["scale"], state["clean"], state["patience"]
