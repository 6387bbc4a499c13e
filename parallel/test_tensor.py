"""Compare tensor.py, and the model's operations in reference.py, with torch.nn.functional or formulas, in float64.

Each rank must have its slices of the uncut layer's outputs and gradients, to 1e-12. A failure names the tensor, the
rank, and the tensor that the rank has instead, if it is known.
"""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import reference
from parallel import tensor
from parallel.comm import Pending
from parallel.mesh import Mesh, everyone
from parallel.tensor import Communicate, EmbeddingLookup, Linear, LinearCrossEntropy, ParamSpec, next_token_losses
from parallel.units import Model
from reference import Drop
from testing.compare import Different, same_tensor
from testing.tiny import drawn, tiny_config


def with_buffer(p):
    """Return a parameter with a buffer for its gradient."""
    p = torch.nn.Parameter(p.clone())
    p.grad, p.deferred = torch.zeros_like(p), None
    return p


def all_ranks_as_tp():
    return Mesh(tp=everyone().size).tp


def close_on(tp, what, ours, theirs, instead=None):
    """Compare a tensor of this rank. instead: {usual mistake: the tensor that it gives}."""
    same_tensor(f"{what} of rank {tp.rank}", ours, theirs, instead)


def rows_of(tp, n, cut):
    """Return the rows of [n, ...] that this rank has."""
    return slice(n // tp.size * tp.rank, n // tp.size * (tp.rank + 1)) if cut else slice(None)


def other_slices(tp, whole, dim=0):
    return {f"the slice of rank {t}": part for t, part in enumerate(whole.chunk(tp.size, dim)) if t != tp.rank}


# --- linear ---------------------------------------------------------------------------------------------------------


def whole_linear(n, i, o):
    """Return x, w, bias, dy, and the results of F.linear: y, dx, dw, db."""
    x, w, bias, dy = drawn(n, i).requires_grad_(), drawn(o, i, seed=1), drawn(o, seed=2), drawn(n, o, seed=3)
    w, bias = w.requires_grad_(), bias.requires_grad_()
    y = F.linear(x, w, bias)
    y.backward(dy)
    return x.detach(), w.detach(), bias.detach(), dy, y.detach(), x.grad, w.grad, bias.grad


def check_column_parallel(enter, packed, only=("y", "dx", "dw", "db"), before=1.0):
    """Compare these tensors. before: what an earlier micro-batch has left in the gradients of the parameters."""
    tp = all_ranks_as_tp()
    x, w, bias, dy, y, dx, dw, db = whole_linear(8, 6, 24)

    def mine(t, dim):
        """Return this rank's slice. A packed tensor has three parts, each with a slice of this rank."""
        if not packed:
            return t.chunk(tp.size, dim)[tp.rank]
        t = t.unflatten(dim, (3, -1))
        return t.chunk(tp.size, dim + 1)[tp.rank].flatten(dim, dim + 1)

    rows = rows_of(tp, 8, cut=enter == "all_gather")
    whole_x, x = x, x[rows].clone().requires_grad_()
    shape = (3, -1) if packed else (-1,)
    our_w, our_bias = (with_buffer(mine(part, 0).unflatten(0, shape)) for part in (w, bias))
    buffers = [p.grad.fill_(before) for p in (our_w, our_bias)]
    out = Linear.apply(x, our_w, our_bias, enter, None, tp)
    out.backward(mine(dy, 1))
    share, own_rows = mine(dy, 1) @ mine(w, 0), mine(dy, 1)[rows].T @ whole_x[rows]
    dw, db, grads = mine(dw, 0), mine(db, 0), buffers if before else [our_w.grad, our_bias.grad]
    last = "the last micro-batch's alone: `.grad` is overwritten, not added to"
    same = "what it was before: add in place, `.grad` is a view into a bucket"
    gathered = "made of its own rows of x only, not of the gathered x"
    for what, ours, right, instead in [
        ("y", out.detach(), mine(y, 1), {"the product without the bias": whole_x @ mine(w, 0).T}),
        ("dx", x.grad, dx[rows], {"its own share, not the sum over tp": share[rows]}),
        ("dw", grads[0].flatten(0, -2), dw, {gathered: before + own_rows, last: dw, same: before + 0 * dw}),
        ("db", grads[1].flatten(), db, {last: db, same: before + 0 * db}),
    ]:
        if what in only:
            close_on(tp, what, ours, right + before * (what in ("dw", "db")), instead)


def check_row_parallel(leave):
    tp = all_ranks_as_tp()
    x, w, bias, dy, y, dx, dw, _ = whole_linear(8, 24, 6)
    rows = rows_of(tp, 8, cut=leave == "reduce_scatter")
    x = x.chunk(tp.size, 1)[tp.rank].clone().requires_grad_()
    our_w = with_buffer(w.chunk(tp.size, 1)[tp.rank])
    our_w.deferred = products = []
    out = Linear.apply(x, our_w, None, None, leave, tp)
    share = (x @ our_w.T).detach()
    close_on(tp, "y", out.detach(), (y - bias)[rows], {"its own share, not the sum over tp": share[rows]})
    out.backward(dy[rows])
    our_dx = dx.chunk(tp.size, 1)[tp.rank]
    summed = {"t times too large: every rank has the same dy, so no sum over tp is needed": our_dx * tp.size}
    close_on(tp, "dx", x.grad, our_dx, other_slices(tp, dx, 1) | summed)
    assert len(products) == 1 and not our_w.grad.any(), "action I: `w.deferred` gets the product, and `w.grad` nothing"
    products[0].add()
    own_rows = {"made of its own rows of dy only, not of the gathered dy": dy[rows].T @ x.detach()[rows]}
    close_on(tp, "dw", our_w.grad, dw.chunk(tp.size, 1)[tp.rank], own_rows)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("enter", ["copy", "all_gather"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_column_parallel_linear_is_the_whole_one(workers, tp, enter, packed):
    workers.check(tp, check_column_parallel, enter, packed)


@pytest.mark.parametrize(
    "only, before",
    [(["dx"], 0.0), (["dw"], 0.0), (["db"], 0.0), (["dw", "db"], 1.0)],
    ids=["dx", "dw", "db", "the sum of two micro-batches"],
)
def test_backward_of_a_linear_is_autograds(only, before):
    check_column_parallel("copy", False, only, before)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("leave", ["all_reduce", "reduce_scatter"])
def test_a_row_parallel_linear_is_the_whole_one(workers, tp, leave):
    workers.check(tp, check_row_parallel, leave)


class Watched(Pending):
    """A communication that notes in `calls` when it starts and when `wait` is called."""

    def __init__(self, x, name, calls):
        super().__init__(x)
        self.name, self.calls = name, calls
        calls.append(f"start {name}")

    def wait(self):
        self.calls.append(f"wait for {self.name}")
        return self.result


ORDER = {  # {enter: what happens in backward}
    "copy": ["start all_reduce", "dW", "wait for all_reduce"],
    "all_gather": ["start all_gather", "start reduce_scatter", "wait for all_gather", "dW", "wait for reduce_scatter"],
}


@pytest.mark.parametrize("enter", ORDER)
def test_dw_is_computed_while_dx_is_sent(monkeypatch, enter):
    calls = []
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        monkeypatch.setitem(tensor.COLLECTIVES, name, lambda x, tp, what, name=name: Watched(x, name, calls))
    monkeypatch.setattr(tensor.WeightGradient, "add", lambda _: calls.append("dW"))
    out = Linear.apply(drawn(8, 6).requires_grad_(), with_buffer(drawn(4, 6)), None, enter, None, Mesh().tp)
    calls.clear()
    out.backward(drawn(8, 4))
    assert calls == ORDER[enter], f"backward makes: {', '.join(calls)}; should be: {', '.join(ORDER[enter])}"


SMALL = 2.0**-12  # neither bf16 nor fp16 can represent 1 + SMALL


def of_16_bits(*values):
    """Return a parameter [n, 1] with a float32 gradient, as zero.py makes it."""
    p = torch.nn.Parameter(torch.tensor(values, dtype=torch.bfloat16)[:, None])
    p.grad_dtype = torch.float32
    p.grad, p.deferred = torch.zeros(p.shape), None
    return p


def test_gradients_accumulate_in_float32_under_bf16():
    w, bias, table = of_16_bits(1.0), of_16_bits(0.0), of_16_bits(1.0, 1.0)
    for tokens in ([1.0, SMALL], [SMALL]):
        dy = torch.tensor(tokens, dtype=torch.bfloat16)[:, None]
        x = torch.ones_like(dy).requires_grad_()
        Linear.apply(x, w, bias, "copy", None, Mesh().tp).backward(dy)
        ids = torch.ones(len(dy), dtype=torch.int64)
        EmbeddingLookup.apply(ids, table, None, reference).backward(dy)
    assert w.grad.item() == bias.grad.item() == table.grad[1].item() == 1 + 2 * SMALL and table.grad[0] == 0


def refused(*_, **__):
    raise RuntimeError("self and mat2 must have the same dtype")


@pytest.mark.parametrize("mm, chosen", [(lambda a, b, out_dtype: (a @ b).float(), 2), (refused, 2), (None, 1)])
def test_the_product_is_chosen_by_a_check(monkeypatch, mm, chosen):
    """PyTorch may refuse or round a product of 16-bit factors with a float32 sum."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "addmm", refused)
        patch.setattr(torch, "mm", mm or (lambda a, b, out_dtype: a.float() @ b.float()))
        reference.mixed_product.cache_clear()
        assert reference.mixed_product("cpu", torch.bfloat16) is reference.MIXED[chosen]
    reference.mixed_product.cache_clear()


# --- vocabulary -----------------------------------------------------------------------------------------------------

V, REAL = 16, 11  # of 4 ranks with 4 rows each, rank 2 has three real ids, rank 3 none
EDGES = [0, 1, 3, 4, 6, 7, 8, 10]  # with the first and the last id of every slice


def check_embedding(leave):
    tp = all_ranks_as_tp()
    table, ids = drawn(V, 6), torch.tensor([*EDGES, 3, 3, 0, 10])
    dy = drawn(len(ids), 6, seed=1)
    whole = table.clone().requires_grad_()
    y = F.embedding(ids, whole)
    y.backward(dy)
    rows = rows_of(tp, len(ids), cut=leave == "reduce_scatter")
    ours = with_buffer(table.chunk(tp.size)[tp.rank])
    out = Communicate.apply(EmbeddingLookup.apply(ids, ours, tp, reference), leave, tp, "embedding")
    per_rank = V // tp.size
    mine = ids // per_rank == tp.rank
    instead = {
        "its own share (0 for ids of other ranks), not the sum over tp": (y.detach() * mine[:, None])[rows],
        "not 0 for ids of other ranks before the sum": sum_of_unmasked(table, ids, tp)[rows],
    }
    close_on(tp, "y", out.detach(), y.detach()[rows], instead)
    out.backward(dy[rows])
    unmasked = torch.zeros_like(table).index_add_(0, ids.where(mine, tp.rank * per_rank), dy)
    instead = {"the gradient of all tokens, also of those with ids of other ranks": unmasked.chunk(tp.size)[tp.rank]}
    close_on(tp, "dw", ours.grad, whole.grad.chunk(tp.size)[tp.rank], instead | other_slices(tp, whole.grad))


def sum_of_unmasked(table, ids, tp):
    """Return the sum over tp if each rank gives its row 0 for ids that it lacks."""
    per_rank = V // tp.size
    return sum(table[ids.where(ids // per_rank == t, t * per_rank)] for t in range(tp.size))


def with_rows(rows, check, *arguments):
    """Call `check` with logits of `rows` tokens at a time."""
    with mock.patch.object(tensor, "ROWS", rows):
        check(*arguments)


def check_two_readers():
    tp, x = Mesh(tp=2).tp, torch.ones(2, requires_grad=True)
    y = Communicate.apply(x, "copy", tp, "t") + Communicate.apply(x, "copy", tp, "t")
    y.backward(torch.ones(2))  # autograd gives both the same tensor
    assert x.grad.tolist() == [4, 4], "the sum over tp has changed a gradient that another operation reads"


def test_a_sum_over_tp_leaves_the_gradient_of_others(workers):
    workers.check(2, check_two_readers)


def check_linear_cross_entropy(enter, scale):
    """x is the identity matrix, so the logits are the table's columns: random, times `scale`, some +-1e4."""
    tp, n = all_ranks_as_tp(), len(EDGES) + 4
    weights = torch.linspace(0.1, 2, n, dtype=torch.float64)  # the gradient that arrives at each token's loss
    table, targets = drawn(V, n) * scale, torch.tensor([*EDGES, 3, 3, 0, 10])
    table[REAL:] = 1e6  # padding must get no probability
    table[:REAL, 0] = -1e4
    table[5, 1] = 1e4
    x = torch.eye(n, dtype=torch.float64)
    whole, w = x.clone().requires_grad_(), table[:REAL].clone().requires_grad_()
    losses = F.cross_entropy(whole @ w.T, targets, reduction="none")
    losses.backward(weights)
    rows = rows_of(tp, n, cut=enter == "all_gather")
    ours, our_w = x[rows].clone().requires_grad_(), with_buffer(table.chunk(tp.size)[tp.rank])
    our_w.grad += 1  # backward must add to this
    out = LinearCrossEntropy.apply(ours, our_w, targets, REAL, enter, tp, reference)
    assert out.isnan().all()
    out.backward(weights)
    padding = F.pad(w.grad, (0, 0, 0, V - REAL))
    close_losses(tp, out.detach(), losses.detach(), table, targets)
    close_on(tp, "dx", ours.grad / 1e4, whole.grad[rows] / 1e4)  # up to 1e4 large
    close_on(tp, "dw", our_w.grad - 1, padding.chunk(tp.size)[tp.rank], other_slices(tp, padding))
    with torch.no_grad():
        losses_only = next_token_losses(ours, our_w, targets, REAL, enter, tp, reference)
        close_losses(tp, losses_only, losses.detach(), table, targets)


def close_losses(tp, ours, theirs, table, targets):
    """Compare the losses of all tokens, with the columns of `table` as logits."""
    if ours.isnan().all():
        raise Different(f"the loss of rank {tp.rank} is nan: backward has not filled it in")
    close_on(tp, "the loss", ours, theirs, mistaken_losses(table.T, targets, tp))


def mistaken_losses(z, targets, tp):
    """Return {usual mistake: its losses} for logits z [n, V]."""
    top, total = z[:, :REAL].amax(1), z[:, :REAL].logsumexp(1)
    found, shard_total, shard_target = 0, 0, 0
    for start in range(0, REAL, V // tp.size):
        shard = z[:, start : min(start + V // tp.size, REAL)]

        def logits(local, shard=shard):
            mine = (local >= 0) & (local < shard.shape[1])
            return mine, shard.gather(1, local.where(mine, 0)[:, None])[:, 0]

        mine, logit = logits(targets)
        found = found + (logit - top).where(mine, 0.0)
        mine, logit = logits(targets - start)
        shard_target = shard_target + (logit - shard.amax(1)).where(mine, 0.0)
        shard_total = shard_total + (shard - shard.amax(1, keepdim=True)).exp().sum(1)
    return {
        "made with the padding in the softmax": z.logsumexp(1) - z.gather(1, targets[:, None])[:, 0],
        "made with targets that are not counted from the slice's first column": total - top - found,
        "made with the maximum of each slice, not of the whole row": shard_total.log() - shard_target,
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("leave", ["all_reduce", "reduce_scatter"])
def test_a_vocab_parallel_embedding_is_the_whole_one(workers, tp, leave):
    workers.check(tp, check_embedding, leave)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("enter", ["copy", "all_gather"])
@pytest.mark.parametrize("scale, rows", [(1.0, 64), (1e4, 5)])
def test_linear_cross_entropy_is_the_whole_one(workers, tp, enter, scale, rows):
    workers.check(tp, with_rows, rows, check_linear_cross_entropy, enter, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_computes_in_float32(dtype):
    logits, targets = (drawn(4, 50000) * 3).to(dtype), torch.arange(4)
    losses = reference.cross_entropy_(logits.clone(), targets, 50000)
    exact = F.cross_entropy(logits.double(), targets, reduction="none")
    assert losses.dtype == torch.float32 and torch.allclose(losses.double(), exact, rtol=1e-6)


# --- reference.py ---------------------------------------------------------------------------------------------------


def test_attention_is_causal_softmax():
    b, s, heads, d = 2, 5, 3, 4
    qkv = drawn(b, s, 3, heads, d)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    products, later = q @ k.transpose(2, 3), torch.ones(s, s).triu(1).bool()

    def attended(scores):
        return (scores.softmax(-1) @ v).transpose(1, 2)

    masked = (products / d**0.5).masked_fill(later, -torch.inf)
    instead = {
        "that of all tokens, later ones too": attended(products / d**0.5),
        "made without the factor 1 / sqrt(d)": attended(products.masked_fill(later, -torch.inf)),
    }
    same_tensor("attention", reference.attention(*qkv.unbind(2)), attended(masked), instead)


def mask(rows, columns=64, rate=0.25, seed=1, site=0):
    return reference.dropout_mask(columns, Drop(torch.as_tensor(rows), rate, seed, site))


GOLDEN = ["1010001100011000", "1101100000100001", "1000001100101101"]  # a resumed run must draw the same masks


def test_dropout_masks_are_functions_of_seed_site_row_and_column():
    rows = torch.arange(100) + 2**40  # a row's number may exceed 32 bits
    whole = mask(rows)
    assert torch.equal(whole[40:60], mask(rows[40:60])), "the mask of some rows depends on other rows"
    for other in [mask(rows, seed=2), mask(rows, site=1), mask(rows + 100), mask(rows + 2**32)]:
        # independent masks agree with probability 0.75^2 + 0.25^2
        assert abs((whole == other).double().mean() - 0.625) < 0.03
    bits = mask(torch.tensor([0, 1, 10**12]), columns=16, rate=0.5, seed=1234, site=3).int()
    assert ["".join(map(str, row)) for row in bits.tolist()] == GOLDEN


def test_dropout_scales_and_its_backward_uses_the_same_mask():
    x, rows = drawn(6, 8).requires_grad_(), torch.arange(6)
    drop = Drop(rows, 0.25, seed=1, site=2)
    y = reference.dropout(x, drop)
    same_tensor("dropout", y.detach(), x.detach() * mask(rows, 8, site=2).double() / 0.75)
    y.sum().backward()
    same_tensor("the gradient of dropout", x.grad, mask(rows, 8, site=2).double() / 0.75)
    assert torch.autograd.gradcheck(lambda x: reference.dropout(x, drop), x)
    assert reference.dropout(x) is x
    x = x.detach()
    same_tensor("add_ with dropout", reference.add_(x.clone(), x, x[0], drop), x + reference.dropout(x + x[0], drop))


# --- logical parameters ---------------------------------------------------------------------------------------------


def test_initial_weights_depend_on_seed_and_name_only():
    a, b = (ParamSpec(f"block{i}.fc1.weight", (64, 16), 0, True, 0.02) for i in (0, 1))
    assert torch.equal(a.initial(1), a.initial(1)) and a.initial(1).dtype == torch.float32
    assert not torch.equal(a.initial(1), a.initial(2)) and not torch.equal(a.initial(1), b.initial(1))
    assert abs(a.initial(1).std() - 0.02) < 0.002
    never_changes = ParamSpec("word.weight", (4,), 0, True, 1.0).initial(1234)
    assert never_changes.tolist() == pytest.approx([0.053421, 1.114251, 1.515838, 0.976252], abs=1e-6)


def test_only_matrices_decay_and_proj_and_fc2_start_smaller():
    """Weight decay applies to matrices only. The std of proj and fc2 is smaller."""
    config = tiny_config(1)
    specs = Model(config, Mesh().tp).specs()
    assert len(specs) == 2 + 12 * config.num_layers + 2
    for name, spec in specs.items():
        assert spec.decay == (len(spec.shape) > 1 and not name.endswith("bias")), name
        residual = "proj.weight" in name or "fc2.weight" in name
        std = 0.02 / 2 if residual else 0.02  # sqrt(2 * 2 layers) = 2
        assert spec.std == (pytest.approx(std) if spec.decay else 0.0), name
        assert spec.mean == (1.0 if ".ln" in name and name.endswith("weight") else 0.0), name
    for name, shape in [("block1.qkv.weight", (3, 32, 32)), ("block1.qkv.bias", (3, 32))]:
        assert specs[name].shape == shape and specs[name].tp_dim == 1
