"""The update rules, on flat buffers; the loss scale; the learning rate.

Slide "深層学習の用語説明" has SGD and Adam. Its Adam differs from Kingma and Ba's (arXiv 1412.6980) in three places:
they add the gradient to the moments, where the slide subtracts it; their epsilon stands outside the root; and where the
slide has a factor b^(t+1), they divide the moments by 1 - beta^t. AdamW is Loshchilov and Hutter's (arXiv 1711.05101),
where decay acts on the weight itself:

    m = b1 m + (1 - b1) g      w -= lr (decay w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
    v = b2 v + (1 - b2) g^2

Weights, moments and gradients take 16 bytes or more per parameter, and each line above, done on its own, would read and
write some of them again. AdamW is therefore one of the operations that are fused (`reference.adamw`, `kernels.adamw`),
and the only rule whose numbers stay on the device; the rules below are plain.

Weights, moments and gradients are in the master dtype: float32, or float64 in fp64 runs. All functions work in place on
any piece of a flat buffer: elementwise rules do not care where a piece begins.
"""

import math

import torch


def sgd(weight, gradient, moments, *, lr, decay, scale, **_):
    """W -= lr (scale dL/dW + decay W). Slide "SGD (確率的勾配降下法)"; `moments` is empty."""
    weight.mul_(1 - lr * decay).add_(gradient, alpha=-lr * scale)


# --- layer-wise rates, for large batches ------------------------------------------------------------------------------
#
# Slide "データ並列": a large global batch generalises worse; LARS and LAMB are one remedy. Both give every parameter
# tensor ("layer") a rate of its own, by which a step moves it in proportion to its norm. So a step has two halves: an
# elementwise one that leaves its result in the gradient's place; then, once the norms of whole tensors are known (they
# may be cut over tp and dp: `Zero.parameter_norms`), the update. Biases and LayerNorms, for which `layerwise` is False,
# keep the plain rate.


def lamb(weight, gradient, moments, *, decay, scale, update, beta1, beta2, eps, **_):
    """First half of LAMB (You et al., arXiv 1904.00962, Algorithm 2): AdamW's direction, decay included.

    scale multiplies the gradient (clipping, 1 / loss scale); update counts from 1.
    """
    m, v = moments
    m.mul_(beta1).add_(gradient, alpha=(1 - beta1) * scale)
    v.mul_(beta2).addcmul_(gradient, gradient, value=(1 - beta2) * scale * scale)
    root = v.sqrt().div_(math.sqrt(1 - beta2**update)).add_(eps)
    torch.div(m, root, out=gradient).div_(1 - beta1**update).add_(weight, alpha=decay)


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


RULES = {  # name: (rule, moments that it keeps, second half of a layer-wise rule)
    "sgd": (sgd, 0, None),
    "adamw": (None, 2, None),  # the fused one
    "lamb": (lamb, 2, apply_lamb),
    "lars": (lars, 1, apply_lars),
}


def learning_rate(c, update):
    """The rate of the `update`-th update (from 1; skipped steps do not count). `c`: the configuration.

    Linear warm-up to `lr`, then down to `min_lr` at `lr_decay_iters`; `min_lr` afterwards. A warm-up longer than the
    run, or than the decay, is allowed: the rate then just rises as far as it comes.
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
