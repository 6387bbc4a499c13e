"""Update rules on flat buffers, the loss scale, and the learning rate.

Slide "深層学習の用語説明" has SGD and Adam. This file follows the Adam of Kingma and Ba (arXiv 1412.6980).
The slide subtracts the gradient from the moments m and v, has epsilon inside the root, and corrects
the bias by a factor b^(t+1) with an undefined b.

A rule changes one range of a rank's flat buffers in place, elementwise. Its keyword arguments:

    lr       the learning rate          scale    factor on the gradient: clipping * (1 / loss scale)
    decay    weight decay, or 0         update   the number of this update, from 1
    beta1, beta2, eps                   as in the configuration

If a rule names a *fused* operation, training runs this operation of `reference.py` or `kernels.py`
instead, in one pass over memory. To change such a rule, edit its function and remove its `fused` in
RULES.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

import reference
from parallel.comm import all_reduce
from parallel.muon import muon


def sgd(weight, gradient, moments, *, lr, decay, scale, **_):
    """SGD: w -= lr (scale g + decay w)."""
    weight.mul_(1 - lr * decay).add_(gradient, alpha=-lr * scale)


def adamw(weight, gradient, moments, *, lr, decay, scale, update, beta1, beta2, eps, **_):
    """AdamW: the decay acts on the weight itself. Loshchilov and Hutter (arXiv 1711.05101), Algorithm 2.

    m = b1 m + (1 - b1) g      w -= lr (decay w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
    v = b2 v + (1 - b2) g^2    where g = scale * gradient
    """
    m, v = moments
    direction = adam_direction(gradient, m, v, scale, update, beta1, beta2, eps)
    weight.mul_(1 - lr * decay).add_(direction, alpha=-lr)


def adam_direction(gradient, m, v, scale, update, beta1, beta2, eps):
    """Update m and v; return (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)."""
    m.mul_(beta1).add_(gradient, alpha=(1 - beta1) * scale)
    v.mul_(beta2).addcmul_(gradient, gradient, value=(1 - beta2) * scale * scale)
    root = v.sqrt().div_(math.sqrt(1 - beta2**update)).add_(eps)
    return torch.div(m, root, out=root).div_(1 - beta1**update)


# --- layer-wise rates, for large batches ----------------------------------------------------------
#
# Slide "データ並列": LARS and LAMB make the norm of a tensor's update proportional to the norm of the
# tensor. The first half of such a rule is elementwise and overwrites the gradient with a direction.
# The second needs norms of whole tensors. `layerwise` is False for biases and LayerNorms.


def lamb(weight, gradient, moments, *, decay, scale, update, beta1, beta2, eps, **_):
    """First half of LAMB (You et al., arXiv 1904.00962, Algorithm 2): AdamW's direction and decay."""
    m, v = moments
    direction = adam_direction(gradient, m, v, scale, update, beta1, beta2, eps)
    torch.add(direction, weight, alpha=decay, out=gradient)


def apply_lamb(weight, direction, moments, weight_norm, norm, *, lr, layerwise, **_):
    """Second half of LAMB: w -= lr (|w| / |direction|) direction."""
    ratio = weight_norm / norm if layerwise and weight_norm > 0 and norm > 0 else 1.0
    weight.add_(direction, alpha=-lr * ratio)


def lars(weight, gradient, moments, *, scale, **_):
    """First half of LARS (You et al., arXiv 1708.03888, Algorithm 1): the scaled gradient."""
    gradient.mul_(scale)


def apply_lars(weight, gradient, moments, weight_norm, norm, *, lr, decay, layerwise, beta1, lars_coefficient, **_):
    """Second half of LARS: v = b1 v + lr (c |w| / (|g| + decay |w|)) (g + decay w); w -= v; c is `lars_coefficient`."""
    ratio = 1.0
    if layerwise and weight_norm > 0 and norm > 0:
        ratio = lars_coefficient * weight_norm / (norm + decay * weight_norm)
    moments[0].mul_(beta1).add_(gradient.add_(weight, alpha=decay), alpha=lr * ratio)
    weight.sub_(moments[0])


class Rule(NamedTuple):
    step: Callable  # the update, or its first half
    moments: int  # moment buffers
    layerwise: Callable | None = None  # the second half, called for each tensor
    fused: str | None = None  # name of an operation
    whole: Callable | None = None  # updates whole matrices, returns the other ranges
    state: int = 0  # buffers that differ on copies (an error of compression); a checkpoint has their mean


# Add your own: write a function like those above, and add a row (GUIDE.md).
RULES = {
    "sgd": Rule(sgd, 0),
    "adamw": Rule(adamw, 2, fused="adamw_"),
    "lamb": Rule(lamb, 2, layerwise=apply_lamb),
    "lars": Rule(lars, 1, layerwise=apply_lars),
    "muon": Rule(adamw, 2, whole=muon),
}


def update(c, buckets, scalars, ops, device):
    """Update this rank's shard of every `zero.Bucket`. It may overwrite their `master_grad`.

    scalars: `reference.UpdateScalars`. device: where ranks communicate.
    """
    rule = RULES[c.optimizer]
    constants = dict(beta1=c.adam_beta1, beta2=c.adam_beta2, eps=c.adam_eps)
    if rule.fused:
        for b in buckets:
            ranges = [(r.begin, r.end, r.decays) for r in b.ranges if not r.frozen]
            fused = getattr(ops, rule.fused)
            fused(b.master, b.master_grad, b.moments, scalars, ranges, decay=c.weight_decay, **constants)
        return
    if scalars.skip:
        return
    lr, scale, update = (x.item() for x in (scalars.lr, scalars.scale, scalars.update))
    constants |= dict(lr=lr, scale=scale, update=update)
    for b in buckets:
        ranges = [r for r in b.ranges if not r.frozen]
        if rule.whole:
            ranges = rule.whole(b, ranges, device, decay=c.weight_decay, **constants)
        for r in ranges:
            w, g, *moments = (x[r.begin : r.end] for x in (b.master, b.master_grad, *b.moments))
            rule.step(w, g, moments, decay=c.weight_decay * r.decays, **constants)
    if rule.layerwise:
        tensors = [(b, piece) for b in buckets for piece in b.pieces]
        norms = tensor_norms(tensors, device).tolist()
        for (b, piece), (weight_norm, norm) in zip(tensors, norms, strict=True):
            if piece.spec.frozen:
                continue
            w, g, *moments = (piece.of(x) for x in (b.master, b.master_grad, *b.moments))
            constants |= dict(decay=c.weight_decay * piece.spec.decay, layerwise=piece.spec.decay)
            constants |= dict(lars_coefficient=c.lars_coefficient)
            rule.layerwise(w, g, moments, weight_norm, norm, **constants)


def tensor_norms(tensors, device):
    """Return the norms of each whole weight and of its gradient, float64 [number of tensors, 2].

    tensors: [(Bucket, Piece)]. All holders of a tensor take the sums of the first holder: their own
    may differ in the last digits.
    """
    squares = torch.zeros(len(tensors), 2, dtype=torch.float64, device=tensors[0][0].master.device)
    rows_of, cut_by = {}, {}  # {Axis of holders, Axis that cuts a tensor: its rows of `squares`}
    for i, (bucket, piece) in enumerate(tensors):
        rows_of.setdefault(bucket.holders, []).append(i)
        for axis in (bucket.shards, bucket.tp):
            cut_by.setdefault(axis, []).append(i)
        if piece.spec.tp_dim is not None or bucket.tp.rank == 0:
            for k, x in enumerate((bucket.master, bucket.master_grad)):
                squares[i, k] = reference.squared_norms([piece.of(x)]).sum()
    squares = squares.to(device)
    for axis, rows in cut_by.items():
        squares[rows] = all_reduce(squares[rows], axis, "parameter norms").wait()
    for holders, rows in sorted(rows_of.items(), key=lambda item: item[0].ranks):
        first = squares[rows] if holders.rank == 0 else torch.zeros_like(squares[rows])
        squares[rows] = all_reduce(first, holders, "parameter norms").wait()
    return squares.sqrt()


def learning_rate(c, update):
    """Return the learning rate, float64, of an update (or of a tensor of them), counted from 1.

    The style wsd (warm-up, stable, decay): Hu et al., arXiv 2404.06395.
    """
    end = c.lr_decay_iters or c.train_iters
    warmup = c.lr_warmup_iters if c.lr_warmup_iters >= 0 else c.lr_warmup_fraction * end
    update = torch.as_tensor(update, dtype=torch.float64)
    decay = c.lr_wsd_decay_iters if c.lr_decay_style == "wsd" else max(1, end - warmup)
    remaining = ((end - update) / decay).clamp(0, 1)
    if c.lr_decay_style == "cosine":
        remaining = 0.5 * (1 + torch.cos(math.pi * (1 - remaining)))
    low = c.lr if c.lr_decay_style == "constant" else c.min_lr
    rising = c.lr * update / max(1, warmup)
    return torch.where(update <= warmup, rising, low + (c.lr - low) * remaining)


class LossScale:
    """Dynamic loss scale of fp16: large, so that small gradients do not become 0, without overflow.

    Micikevicius et al. (arXiv 1710.03740), section 3.2. It starts too large on purpose.
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
            if self.clean >= self.window:  # a resume may set a smaller window
                self.clean, self.patience = 0, self.hysteresis
                self.scale *= 2

    def state(self):
        return {"dynamic": self.dynamic, "scale": self.scale, "clean": self.clean, "patience": self.patience}

    def restore(self, state):
        """Unless both are fp16, keep the initial state."""
        if self.dynamic and state["dynamic"]:
            self.scale, self.clean, self.patience = state["scale"], state["clean"], state["patience"]
