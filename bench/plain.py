"""The same GPT in plain PyTorch, with our initial weights, and a training step of each of the two.

PyTorch's follows its tutorials and uses every option that makes it faster: fused AdamW, gradients
as views into buckets, no unnecessary copies or messages.
"""

import contextlib
import itertools
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import train
from parallel.comm import all_reduce
from parallel.layout import number_of_micro_batches
from parallel.units import Model
from testing.cases import word_ids

ACTIVATIONS = {"gelu": partial(F.gelu, approximate="tanh"), "relu": F.relu}
OURS = {  # PyTorch's name: ours
    "embedding.word.weight": "word.weight",
    "embedding.position.weight": "embedding.position",
    "head.word.weight": "word.weight",
}
STEADY = dict(train_iters=10**5, lr_decay_style="constant", lr_warmup_iters=0, lr_warmup_fraction=0.0)


class PlainEmbedding(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word = nn.Embedding(c.padded_vocab_size, c.hidden_size)
        self.position = nn.Embedding(c.positions, c.hidden_size)
        self.positions = torch.arange(c.seq_length)

    def forward(self, ids):  # [b, s] -> [b, s, h]
        return self.word(ids) + self.position(self.positions)


class PlainBlock(nn.Module):
    """One block. The outputs of qkv are [a, 3, d], so that DTensor can cut them between heads."""

    def __init__(self, c):
        super().__init__()
        h, self.head_size, self.activation = c.hidden_size, c.head_size, ACTIVATIONS[c.activation]
        self.ln1, self.qkv, self.proj = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.ln2, self.fc1, self.fc2 = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):  # [b, s, h]
        qkv = self.qkv(self.ln1(x)).unflatten(-1, (-1, 3, self.head_size))  # [b, s, a, 3, d]
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(self.activation(self.fc1(self.ln2(x))))


class PlainHead(nn.Sequential):  # [b, s, h] -> [b, s, v]
    def __init__(self, c):
        super().__init__()
        self.ln = nn.LayerNorm(c.hidden_size)
        self.word = nn.Linear(c.hidden_size, c.padded_vocab_size, bias=False)


class Plain(nn.Sequential):
    """The units one after another. Their parameters have our names, but for those in OURS."""

    def __init__(self, c, tp, tied=True):
        super().__init__()
        self.embedding = PlainEmbedding(c)
        for i in range(c.num_layers):
            self.add_module(f"block{i}", PlainBlock(c))
        self.head = PlainHead(c)
        self.load(c, tp)
        if tied:
            self.tie()

    def tie(self):
        self.head.word.weight = self.embedding.word.weight

    @torch.no_grad()
    def load(self, c, tp):
        """Copy the initial values of model.py's ParamSpecs, so that the losses can be compared."""
        specs = Model(c, tp).specs()
        for name, p in self.named_parameters():
            weight = specs[OURS.get(name, name)].initial(c.seed)
            if ".qkv." in name:  # ours is [3, a d, ...]
                weight = weight.unflatten(1, (-1, c.head_size)).transpose(0, 1).flatten(0, 2)
            p.copy_(weight)

    def losses(self, ids, targets, vocab_size):
        """Return every token's loss, without the padding of the vocabulary."""
        return F.cross_entropy(self(ids)[..., :vocab_size].flatten(0, 1), targets.flatten(), reduction="none")

    def gradients(self):
        """Return {our name: gradient}, in our shapes."""
        found = {OURS.get(name, name): p.grad for name, p in self.named_parameters()}
        for name in found:
            if ".qkv." in name:
                parts = found[name].unflatten(0, (-1, 3, self.block0.head_size))
                found[name] = parts.transpose(0, 1).flatten(1, 2)
        return found


# --- a training step ------------------------------------------------------------------------------


def batches_of(c, mesh, device):
    """Return [(ids [b, s], targets [b, s])]: the micro-batches of this data rank's step."""
    count = number_of_micro_batches(c, c.global_batch_size, mesh.data.size)
    shape = count, mesh.data.size, c.micro_batch_size, c.seq_length + 1
    ids = word_ids(shape, c.vocab_size, c.seed)[:, mesh.data.rank].to(device)
    return [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in ids]


def our_start(c, mesh, device, batches):
    """Return start() of `compete.train_beside`: train.py's step on `batches`."""

    def start():
        run = train.build_run(c, mesh, device)
        run.zero.initialize(c.seed)
        over_and_over = (run.model.micro_batch(*batch) for batch in itertools.cycle(batches))
        return lambda: train.train_step(run, over_and_over).read

    return start


def loss_of(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_optimizer(model, c):
    """Return fused AdamW. DTensors get groups of their own: the fused kernel refuses mixed lists."""
    groups = {}
    for p in dict.fromkeys(model.parameters()):
        groups.setdefault((p.ndim > 1, type(p)), []).append(p)
    groups = [dict(params=ps, weight_decay=c.weight_decay * decays) for (decays, _), ps in groups.items()]
    return torch.optim.AdamW(groups, c.lr, (c.adam_beta1, c.adam_beta2), c.adam_eps, fused=True)


def clip(optimizer, c):
    """Clip the gradients. Return their norm. A group has only DTensors, or none."""
    groups = [[p.grad for p in group["params"]] for group in optimizer.param_groups]
    norms = [nn.utils.get_total_norm(group, foreach=True) for group in groups]
    norms = [norm.full_tensor() if isinstance(norm, dist.tensor.DTensor) else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in optimizer.param_groups:
        nn.utils.clip_grads_with_norm_(group["params"], c.clip_grad, norm, foreach=True)
    return norm


def plain_step(model, c, mesh, batches, loss=None, around=lambda last: contextlib.nullcontext()):
    """Return step() of a model without pipeline stages.

    loss(ids, targets): a micro-batch's. around(last): the context of its forward and backward.
    """
    optimizer = make_optimizer(model, c)
    loss = loss or (lambda ids, targets: loss_of(model(ids), targets))

    def step():
        total = 0.0
        for j, batch in enumerate(batches):
            with around(j == len(batches) - 1):
                part = loss(*batch) / len(batches)
                part.backward()
            total += part.detach()
        norm = clip(optimizer, c)
        optimizer.step()
        optimizer.zero_grad()
        return partial(whole, mesh, total, norm)

    return step


def whole(mesh, loss, norm):
    """Return (mean loss over the data ranks, gradient norm), as numbers. All ranks must call this.

    loss: this rank's, or 0 if it computes none.
    """
    loss = loss.full_tensor() if isinstance(loss, dist.tensor.DTensor) else torch.as_tensor(loss)
    share = loss.double() / (mesh.data.size * mesh.tp.size)
    return all_reduce(share, mesh.world, "loss").wait().item(), norm.item()
