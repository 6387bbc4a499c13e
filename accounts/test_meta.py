"""Units on tensors without values need what a run needs, also those of a model of your own."""

import math
import sys
from dataclasses import replace

import pytest
import torch

import config as configuration
import plan
from accounts import flops, limits, memory, meta, traffic
from errors import UserError
from parallel.units import unit_specs
from testing.record import check_bytes, record
from testing.tiny import CPU, tiny_config

LLAMA = dict(model="llama", num_query_groups=4, ffn_hidden_size=24)


@pytest.mark.parametrize("fields", [{}, LLAMA], ids=str)
def test_the_products_are_those_of_the_weights(fields):
    """Two counts: the products that run, and the shapes of the parameters. 2 FLOPs for each element and token."""
    for t, sp in [(1, False), (2, True)]:
        c = tiny_config(1, t, sequence_parallel=sp, **fields)
        n, (_, *blocks, head) = c.micro_batch_size * c.seq_length, meta.work_of(c, 4)
        matrices = [spec for spec in unit_specs(c)[1] if spec.matrix]
        weights = sum(math.prod(spec.shape) for spec in matrices), c.padded_vocab_size * c.hidden_size
        found = [flops.forward_flops(work._replace(attention=0)) for work in (blocks[0], head)]
        assert found == [2 * n * elements // t for elements in weights]
        assert blocks[0].attention == n * c.seq_length * c.hidden_size // t


def test_a_block_reads_and_writes_what_its_kernels_do():
    """By hand, in [n, h]: norm 1 three; q, k, v, y of attention; norm 2 four; GELU 4 + 4; the last sum three."""
    c = tiny_config(1)
    work = meta.work_of(c, 4)[1]
    assert (work.moved, work.operations) == ((3 + 4 + 4 + 8 + 3) * 4 * 64 * 32, 5)


# By hand, from the papers, in elements of a token's vector h: what a block keeps for backward with t ranks.
# outside: x of both norms and the inputs of the column parallel linears; inside: the others, which tp cuts.
BY_HAND = [  # (fields, outside, inside, vectors of norms' statistics, heads with a log-sum-exp)
    (dict(), 4, 3 + 1 + 4 + 4, 4),  # GPT-2: q, k, v; proj's input; GELU's input; fc2's input. Two norms, two numbers
    (dict(activation="relu"), 4, 3 + 1 + 4, 4),  # ReLU's input is not needed: its result is fc2's input
]


@pytest.mark.parametrize("fields, outside, inside, statistics", BY_HAND, ids=str)
@pytest.mark.parametrize("dtype, item", [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("t, sp", [(1, False), (2, False), (2, True)])
def test_a_block_keeps_what_was_counted_by_hand(fields, outside, inside, statistics, dtype, item, t, sp):
    c = tiny_config(1, t, sequence_parallel=sp, dtype=dtype, **fields)
    tokens, h, a = c.micro_batch_size * c.seq_length, c.hidden_size, c.num_attention_heads
    rows = tokens // t if sp else tokens
    kept = item * h * (outside * rows + inside * tokens // t) + 4 * statistics * rows + 4 * a * tokens // t
    assert sum(meta.work_of(c, item)[1].saved.values()) == kept


def test_a_llamas_block_keeps_what_was_counted_by_hand():
    """x of two norms and the inputs of qkv and fc1; q and twice two thirds of k, v; proj's input; gate, up, product."""
    c = tiny_config(1, dtype="fp32", **LLAMA)
    n, h, f, groups = c.micro_batch_size * c.seq_length, c.hidden_size, c.ffn_size, c.query_groups
    vectors = 4 * h + h + 2 * h * groups // c.num_attention_heads + h + 3 * f
    small = 2 * n + n * c.num_attention_heads  # a number of each RMSNorm; log-sum-exp
    assert sum(meta.work_of(c, 4)[1].saved.values()) == 4 * (n * vectors + small)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a function that writes mine.py. It returns the fields of a Config."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def write(text):
        (tmp_path / "mine.py").write_text(text)
        return LLAMA | dict(model="mine")

    yield write
    sys.modules.pop("mine", None)
    meta.cached_work.cache_clear()


def test_a_file_of_your_own_is_planned_and_predicted(mine, capsys):
    c = tiny_config(1, recompute="full", dropout=0.1, **mine("from llama import units\n"))
    p, q = (traffic.predict_step(replace(c, model=name), 1) for name in ("mine", "llama"))
    assert p.bytes_kept == q.bytes_kept and p.sent == q.sent
    assert limits.needed(c, 1, CPU) == limits.needed(replace(c, model="llama"), 1, CPU)
    tables = []
    for name in ("mine", "llama"):
        plan.main(["configs/llama_tiny.py", f"--model={name}", "--gpus=8", "--tp=1", "--pp=1", "--micro_batch_size=2"])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


def test_a_parameter_of_two_units_is_measured(mine):
    shared = "from llama import *\nimport llama\n\ndef units(*all):\n    first, *blocks, head = llama.units(*all)\n"
    shared += "    blocks[1].norm2.weight = blocks[0].norm1.weight\n    return [first, *blocks, head]\n"
    text = traffic.predicted_tables(traffic.predict_step(tiny_config(1, **mine(shared)), 1))
    assert "not known" not in text


# Each second block has an MLP of 8h. All blocks share a constant, each has one of its own, and tanh keeps its result.
ALTERNATING = """from model import *
import functools
import model

@functools.cache
def constant(rows, dtype, device, owner):
    return torch.full((rows, 1), 0.9, dtype=dtype, device=device)

class Changed(model.Block):
    def forward(self, x, batch):
        for owner in ("all", self.index):
            x = x * constant(len(x), x.dtype, x.device, owner)
        return torch.tanh(super().forward(x, batch))

def units(c, tp, ops, cp):
    first, *blocks, head = model.units(c, tp, ops, cp)
    for i, block in enumerate(blocks):
        block.__class__ = Changed
        if i % 2:
            h = c.hidden_size
            block.mlp.fc1 = ColumnParallelLinear(f"block{i}.fc1", (8 * h, h), 0.02, c, tp, adds_bias=False)
            block.mlp.fc2 = RowParallelLinear(f"block{i}.fc2", (h, 8 * h), 0.02, c, tp)
    return [first, *blocks, head]
"""
# Attention and MLP are units of their own. The head has an MLP, too.
HALVES = """from model import *
import model

class Attention(nn.Module):
    recomputable = True
    attention = model.Block.attention

    def __init__(self, block):
        super().__init__()
        self.ln1, self.qkv, self.proj, self.index = block.ln1, block.qkv, block.proj, block.index
        self.head_size, self.ops, self.cp = block.head_size, block.ops, block.cp

    def forward(self, x, batch):
        x, y = self.ln1(x)
        return self.ops.add_(self.attention(y, batch), x, self.proj.bias)

class Half(nn.Module):
    recomputable = True

    def __init__(self, block):
        super().__init__()
        self.ln2, self.mlp, self.ops = block.ln2, block.mlp, block.ops

    def forward(self, x, batch):
        x, y = self.ln2(x)
        return self.ops.add_(self.mlp(y, batch), x, self.mlp.bias)

class Long(model.Head):
    def forward(self, x, batch):
        return super().forward(x + self.mlp(x, batch), batch)

def units(c, tp, ops, cp):
    first, *blocks, head = model.units(c, tp, ops, cp)
    head.__class__, head.mlp = Long, model.MLP(c, "head", 0.02, 0.02, tp, ops)
    return [first, *(half(block) for block in blocks for half in (Attention, Half)), head]
"""


UNLIKE = [(ALTERNATING, 2 * 12 + 2 * 20, 0), (HALVES, 4 * 12 + 8, 10)]


@pytest.mark.parametrize("text, elements, head", UNLIKE, ids=["alternating", "halves"])
@pytest.mark.parametrize("schedule, recompute", [("gpipe", "none"), ("zb-h1", "full")])
def test_all_units_count(mine, text, elements, head, schedule, recompute):
    """FLOPs by hand, and the bytes of a run. elements: of weights, except the word table's, in h^2.

    head: vectors of a token that W needs: x and dy of the head's linears.
    """
    c = tiny_config(1, num_layers=4, schedule=schedule, recompute=recompute, **mine(text))
    h, s = c.hidden_size, c.seq_length
    forward = 2 * s * (elements * h**2 + c.padded_vocab_size * h + 4 * 2 * s * h)
    assert flops.model_flops(c, 5) == 5 * 3 * forward
    assert meta.work_of(c, 8, on_cpu=True)[-1].operands == 8 * 8 * s * head * h, "operands of the head"
    check_bytes([record(c)])


def test_a_field_of_the_layout_may_change_a_unit(mine, monkeypatch):
    monkeypatch.setitem(configuration.SECTIONS, "layout", [*configuration.SECTIONS["layout"], "keep"])
    fields = mine("import llama\n\ndef units(c, *rest):\n    return [x for x in llama.units(c, *rest)][: c.keep]\n")
    assert [len(meta.work_of(tiny_config(1, keep=keep, **fields), 4)) for keep in (2, 3)] == [2, 3]


LOOKS = """from llama import *
import llama

class Looks(llama.Block):
    def forward(self, x, batch):
        x.sum().item()
        return super().forward(x, batch)

def units(*arguments):
    llama_block, llama.Block = llama.Block, Looks
    try:
        return llama.units(*arguments)
    finally:
        llama.Block = llama_block
"""


def test_a_model_that_needs_values_is_measured_on_a_cpu_alone(mine, monkeypatch):
    c, gpu = tiny_config(1, dtype="fp32", recompute="full", **mine(LOOKS)), torch.device("cuda")
    text = traffic.predicted_tables(p := traffic.predict_step(c, 1, gpu))
    assert text.count("not known") == 2 and "model states" in text
    states = [size for what, size in p.bytes_kept[0].items() if what not in (memory.PEAK, memory.RECOMPUTED)]
    assert limits.needed(c, 1, gpu) == sum(states) < limits.needed(c, 1, CPU)
    monkeypatch.setattr(meta, "SMALL", 0)
    assert math.isnan(flops.model_flops(c, 1))
    text = traffic.predicted_tables(traffic.predict_step(replace(c, tp=2), 2, gpu))
    assert "not known" in next(line for line in text.splitlines() if line.startswith("tp"))
    with pytest.raises(UserError, match="model=mine: its units do not run on tensors without values"):
        plan.main(["configs/llama_tiny.py", "--model=mine", "--gpus=8"])


def test_a_dtype_changes_no_bytes_that_follow_from_the_device():
    c = tiny_config(1, dtype="auto", offload=True)
    assert limits.needed(replace(c, dtype="fp32"), 1, CPU) == limits.needed(c, 1, CPU)


def test_published_models_run_without_values():
    for name in ("gpt2_124m", "opt_125m", "tinyllama_1b1"):
        assert meta.work_of(configuration.load([f"configs/{name}.py"]), 2), name
