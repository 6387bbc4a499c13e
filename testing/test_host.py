"""Count the host's work in a training step. A test fails if a count exceeds its budget.

A GPU runs what the host launches, and must not wait for the host. A launch takes the host a few microseconds, so small
models are limited by their number. While the host waits for a number from the GPU, it launches nothing.

    launch       a Triton kernel, or an operation of PyTorch that is no view
    allocation   a new tensor with storage of its own
    wait         the host reads a number of a tensor (`.item()`, `.tolist()`, `if tensor:`)

The counts are those of a GPU, but none is needed: the fused kernels are counted and do not run.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import reference
import train
from config import Config
from parallel import tensor
from parallel.mesh import Mesh

kernels = pytest.importorskip("kernels", reason="Triton is not installed")
import flash_attention  # noqa: E402

if torch.cuda.is_available():
    pytest.skip("there is a GPU: kernels run on it alone, and this test counts on the CPU", allow_module_level=True)

FIELDS = dict(
    hidden_size=32, num_attention_heads=2, seq_length=8, vocab_size=64, micro_batch_size=2, train_iters=9,
    kernels="triton",
)  # fmt: skip
NO_LAUNCH = {"_unsafe_view", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided", "promote_types"}
IN_ACTIONS = ("forward", "backward", "recompute", "reduce")  # phases
WAITS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}  # as in test_model.py


class Host(TorchDispatchMode):
    """Count by (phase, kind). phase: a function that returns the current phase."""

    def __init__(self, phase):
        super().__init__()
        self.phase, self.counts = phase, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out, name = function(*args, **kwargs or {}), function.__name__.partition(".")[0]
        if name in WAITS:
            self.count("waits")
        elif not function.is_view and name not in NO_LAUNCH:
            self.count("launches")
        before = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        for x in tensors(out):
            if x.untyped_storage()._cdata not in before:
                self.count("allocations")
        return out

    def count(self, kind):
        self.counts[self.phase(), kind] += 1


def tensors(tree):
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


class Launcher:
    """Stands in for a Triton kernel: counts its launches."""

    count = None  # a function (kind)

    def __getitem__(self, grid):
        return lambda *arguments, **constants: Launcher.count("launches")


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    for module in (kernels, flash_attention):
        for name, value in list(vars(module).items()):
            if type(value).__name__ in ("JITFunction", "InterpretedFunction"):
                monkeypatch.setattr(module, name, Launcher())


def counts_of_a_step(num_layers, **fields):
    """Return {(phase, kind): count} of the second step."""
    c = Config(**FIELDS | fields, num_layers=num_layers, global_batch_size=2, dtype="fp32")
    run = train.build_run(c, Mesh(), torch.device("cpu"))
    run.zero.ops.attention = reference.attention  # as kernels=auto chooses on a GPU
    run.zero.initialize(c.seed)
    ids, samples = torch.zeros(2, c.seq_length, dtype=torch.int64), torch.arange(2)
    micro_batch = run.model.micro_batch(ids, ids, samples)
    forever = iter(lambda: micro_batch, None)

    def phase():
        """Return "step" for what is no part of an action."""
        return run.mesh.watch.phase if run.mesh.watch.phase in IN_ACTIONS else "step"

    with Host(phase) as host:
        Launcher.count = host.count
        train.train_step(run, forever)
        host.counts.clear()
        train.train_step(run, forever)
    return host.counts


def per_block(**fields):
    """Return {(phase, kind): count} of a block and micro-batch: three blocks minus two."""
    two, three = (counts_of_a_step(layers, **fields) for layers in (2, 3))
    return {key: three[key] - two[key] for key in three if key[1] != "waits"}


BUDGET = {  # of a block for one micro-batch, and of its update
    ("forward", "launches"): 9,  # 4 products, attention, 3 times LayerNorm or addition, GELU
    ("forward", "allocations"): 13,
    # 8 products, attention, 3 LayerNorm or addition, GELU, 3 to join dq, dk, dv, 5 sums over programs, 8 vectors
    ("backward", "launches"): 29,
    ("backward", "allocations"): 21,
    ("step", "launches"): 5,  # zero_grad, norm, AdamW of three ranges
    ("step", "allocations"): 1,  # the norm
}


REST = {"forward": 6, "backward": 19, "step": 42}  # launches of embedding, head, and a step's end


def test_each_further_chunk_of_the_head_has_six_launches(monkeypatch):
    one = counts_of_a_step(2)
    monkeypatch.setattr(tensor, "ROWS", 6)  # the 16 tokens are three chunks
    three = counts_of_a_step(2)
    assert three["backward", "launches"] - one["backward", "launches"] == 2 * 6


@pytest.mark.parametrize("fields", [{}, dict(activation="relu"), dict(dropout=0.1), dict(recompute="full")])
def test_a_block_stays_in_its_budget(fields):
    budget = dict(BUDGET)
    if "dropout" in fields:
        budget["backward", "allocations"] += 2  # dropout: dy of each branch is a tensor
    if "recompute" in fields:
        budget |= {("recompute", kind): budget["forward", kind] for kind in ("launches", "allocations")}
    found = {key: count for key, count in per_block(**fields).items() if count}
    assert found.keys() <= budget.keys() and all(found[key] <= budget[key] for key in found), found


def test_the_rest_of_a_step_stays_in_its_budget():
    whole, block = counts_of_a_step(2), per_block()
    rest = {key: whole[key] - 2 * block.get(key, 0) for key in whole}
    assert {phase for phase, _ in rest} <= REST.keys()
    assert all(rest.get((phase, "launches"), 0) <= most for phase, most in REST.items()), rest


@pytest.mark.parametrize(
    "fields, waits", [({}, 0), (dict(dropout=0.1), 0), (dict(optimizer="sgd", kernels="torch"), 4)]
)
def test_the_host_waits_for_no_number(fields, waits):
    """SGD has no fused kernel, and reads four scalars on the host."""
    assert sum(count for (_, kind), count in counts_of_a_step(2, **fields).items() if kind == "waits") == waits
