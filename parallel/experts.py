"""Mixture of experts: a block has E MLPs, the experts, and each token uses k of them.

Lepikhin et al., GShard (arXiv 2006.16668); Fedus et al., Switch Transformer (arXiv 2101.03961). A router computes
p = softmax(R x) for each token x. The token goes to the k experts with the largest p. Its output is the sum of their
outputs, each times its p. So the model has many parameters, but a token costs as much as in a small model.

**Over ranks.** Each of the t tensor parallel ranks has E/t experts: one parameter [E, out, in], which is cut along E.
Sequence parallelism gives each rank n/t tokens. An all_to_all sends each token to the ranks of its experts, and a
second one sends the outputs back:

    x [n/t, h]  --places-->  [E, groups, C, h]  --all_to_all-->  [E/t, t groups C, h]  -->  fc1, activation, fc2
                                                                                                     |
    sum over k, times p  <--places--  [E, groups, C, h]  <--all_to_all--  [E/t, t groups C, h]  <----+

**Every layout drops the same tokens.** Tokens compete for places in a *group* of G consecutive tokens of one sample,
which one rank has. In each group an expert takes its first C = ceil(capacity_factor k G / E) tokens, and the others get
nothing from it. So buffers and messages have a fixed size. In generation each token is its own group, so none is
dropped. A larger group drops fewer tokens, but tp cp groups (with the ring 2 tp cp) must fit into a sample. The default
is G = s/4. A router that chooses by chance drops with capacity_factor 1.25:

    G                 64      128     256     512     1024    2048
    8 experts, k=1    4.5%    1.9%    0.5%    0.1%    0.0%    0.0%       also 16 experts, k=2
    16 experts, k=1   9.6%    4.9%    2.1%    0.6%    0.1%    0.0%
    64 experts, k=1   10.1%   10.7%   10.1%   5.2%    2.2%    0.7%

**Balance.** Without help the router sends most tokens to few experts. So the loss of each group (not the printed loss)
has one more term, a E sum_e f_e P_e, with a = `balance` (Switch, section 2.2). f_e is the share of the group's choices
that are expert e, and P_e the mean of p_e. The term is smallest if all experts get equally many tokens.

Left out: experts over data ranks, experts that drop no token, shared experts.
"""

import math

import torch
from torch import nn

import reference
from parallel.comm import all_to_all
from parallel.tensor import ParamSpec, WeightGradient


class Experts(nn.Module):
    """x [n/t, h] -> [n/t, h]. The next operation adds the bias."""

    def __init__(self, c, name, std, residual_std, tp, ops):
        super().__init__()
        E, h = c.experts, c.hidden_size
        self.router = ParamSpec(f"{name}.router", (E, h), None, True, std)
        self.fc1 = ParamSpec(f"{name}.fc1.weight", (E, 4 * h, h), 0, True, std, matrix=True)
        self.fc2 = ParamSpec(f"{name}.fc2.weight", (E, h, 4 * h), 0, True, residual_std, matrix=True)
        self.bias = ParamSpec(f"{name}.fc2.bias", (h,))
        self.counts = 0  # [2, E]: all and dropped choices since the last log line
        self.c, self.tp, self.activation_ = c, tp, getattr(ops, f"{c.activation}_")

    def forward(self, x, batch):
        """Send this rank's x [n, h] to the experts' ranks and back. A dropped choice adds nothing."""
        c, t, (n, h) = self.c, self.tp.size, x.shape
        G = c.tokens_of_group if batch.targets is not None else 1
        p = (x @ self.router.T).to(reference.wide_dtype(x)).softmax(-1)  # [n, E]
        chosen = p.detach().topk(c.top_k).indices  # [n, k]
        p = Balance.apply(p, chosen, self, G, batch)
        place, places = places_of(chosen, c, G)  # [n k]
        token = place.new_full((places + 1,), n)  # n: an empty place
        token[place] = torch.arange(n * c.top_k, device=x.device) // c.top_k
        inputs = torch.cat([x, x.new_zeros(1, h)])[token[:-1]].view(t, c.experts // t, -1, h)
        inputs = TokensForExperts.apply(inputs, self.tp)  # [t, E/t, groups C, h]
        y = ExpertLinear.apply(inputs.transpose(0, 1).flatten(1, 2), self.fc1)  # [E/t, t groups C, 4h]
        y = self.activation_(y.flatten(0, 1), None).view(y.shape)
        y = ExpertLinear.apply(y, self.fc2).view(c.experts // t, t, -1, h)
        y = TokensForExperts.apply(y.transpose(0, 1), self.tp).flatten(0, 2)  # [places, h]
        dropped = place == places
        y = y[place.where(~dropped, 0)].view(n, c.top_k, h)
        gates = p.gather(1, chosen).masked_fill(dropped.view(n, c.top_k), 0.0)
        return (y * gates[..., None].to(y.dtype)).sum(1)


def places_of_expert(c, G):
    """Return C for a group of G tokens."""
    return math.ceil(c.capacity_factor * c.top_k * G / c.experts)


def places_of(chosen, c, G):
    """Return (the place of each choice [n k], number of places). The places are [E, groups, C].

    chosen: [n, k]. A dropped choice has the place after the last one.
    """
    E, C, expert = c.experts, places_of_expert(c, G), chosen.view(-1, G * c.top_k)  # [groups, G k], in order of tokens
    groups = len(expert)
    is_expert = expert[..., None] == torch.arange(E, device=chosen.device)
    earlier = (is_expert.cumsum(1) * is_expert).sum(-1) - 1  # choices of the same expert
    group = torch.arange(groups, device=chosen.device)[:, None]
    place = (expert * groups + group) * C + earlier
    return place.where(earlier < C, E * groups * C).flatten(), E * groups * C


def dropped_if_uniform(c):
    """Return the share of choices that a router drops if it chooses by chance."""
    G, p, lgamma = c.tokens_of_group, min(c.top_k / c.experts, 1 - 1e-12), math.lgamma  # log(1 - p) must exist
    C, share = places_of_expert(c, G), 0.0
    for n in range(C + 1, G + 1):
        subsets = lgamma(G + 1) - lgamma(n + 1) - lgamma(G - n + 1)  # the logarithm of their number
        share += (n - C) * math.exp(subsets + n * math.log(p) + (G - n) * math.log1p(-p)) / (G * p)
    return share


class ExpertLinear(torch.autograd.Function):
    """y[e] = x[e] w[e]^T. x [E/t, m, in]; w [E/t, out, in]. Backward adds to `w.grad`, as `tensor.Linear` does."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        ctx.w = w
        return x @ w.mT

    @staticmethod
    def backward(ctx, dy):
        (x,), w = ctx.saved_tensors, ctx.w
        product = ExpertGradient(w, dy, x.detach())
        if w.deferred is None:
            product.add()
        else:
            w.deferred.append(product)
        return dy @ w, None


class ExpertGradient(WeightGradient):
    """The factors of dW of all experts of a rank."""

    def add(self):
        if self.w.requires_grad:
            for gradient, dy, x in zip(self.w.grad, self.dy, self.x, strict=True):
                reference.add_product_(gradient, dy.T, x)


class TokensForExperts(torch.autograd.Function):
    """x [t, ...]: send x[i] to tp rank i."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return all_to_all(x.contiguous(), tp, "tokens for experts").wait()

    @staticmethod
    def backward(ctx, dy):
        return TokensForExperts.forward(ctx, dy, ctx.tp), None


class Balance(torch.autograd.Function):
    """Return p. Backward adds the balance term's gradient, and counts choices (recomputation repeats only forward)."""

    @staticmethod
    def forward(ctx, p, chosen, experts, G, batch):
        ctx.save_for_backward(chosen)
        ctx.arguments = experts, G, batch
        return p.view_as(p)

    @staticmethod
    def backward(ctx, dp):
        (chosen,), (experts, G, batch), c = ctx.saved_tensors, ctx.arguments, ctx.arguments[0].c
        is_expert = chosen.view(-1, G * c.top_k, 1) == torch.arange(c.experts, device=dp.device)
        counts = is_expert.sum(1)  # [groups, E]
        dropped = (counts - places_of_expert(c, G)).clamp(min=0)
        experts.counts = experts.counts + torch.stack([counts, dropped]).sum(1)
        f = counts.to(dp.dtype) / (G * c.top_k)
        weight = batch.factor * c.balance * c.experts / len(batch.ids)  # 1 / (groups of all tp ranks * G)
        return dp + (weight * f).repeat_interleave(G, 0), None, None, None, None
