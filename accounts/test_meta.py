"""Units on tensors without values need what a run needs, also those of a model of your own."""

import sys
from dataclasses import replace

import pytest
import torch

import config as configuration
import plan
from accounts import flops, limits, memory, meta, traffic
from errors import UserError
from testing.tiny import CPU, tiny_config

LLAMA = dict(model="llama", num_query_groups=4, ffn_hidden_size=24)


@pytest.mark.parametrize("fields", [{}, LLAMA], ids=str)
def test_the_products_are_those_of_the_weights(fields):
    """Two counts: the products that run, and the shapes of the parameters. 2 FLOPs for each element and token."""
    for t, sp in [(1, False), (2, True)]:
        c = tiny_config(1, t, sequence_parallel=sp, **fields)
        n, work = c.micro_batch_size * c.seq_length, meta.work_of(c, 4)
        found = [sum(2 * M * K * N for M, K, N in work[unit].products) for unit in ("block", "head")]
        assert found == [2 * n * weights // t for weights in flops.weights(c)]
        assert work["block"].attention == 4 * n * c.seq_length * c.hidden_size // t


def test_a_block_reads_and_writes_what_its_kernels_do():
    """By hand, in [n, h]: norm 1 three; q, k, v, y of attention; norm 2 four; GELU 4 + 4; the last sum three."""
    c = tiny_config(1)
    work = meta.work_of(c, 4)["block"]
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
    assert meta.work_of(c, item)["block"].saved == kept


def test_a_llamas_block_keeps_what_was_counted_by_hand():
    """x of two norms and the inputs of qkv and fc1; q and twice two thirds of k, v; proj's input; gate, up, product."""
    c = tiny_config(1, dtype="fp32", **LLAMA)
    n, h, f, groups = c.micro_batch_size * c.seq_length, c.hidden_size, c.ffn_size, c.query_groups
    vectors = 4 * h + h + 2 * h * groups // c.num_attention_heads + h + 3 * f
    small = 2 * n + n * c.num_attention_heads  # a number of each RMSNorm; log-sum-exp
    assert meta.work_of(c, 4)["block"].saved == 4 * (n * vectors + small)


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


def test_a_model_that_needs_values_is_measured_on_a_cpu_alone(mine):
    c, gpu = tiny_config(1, dtype="fp32", recompute="full", **mine(LOOKS)), torch.device("cuda")
    text = traffic.predicted_tables(p := traffic.predict_step(c, 1, gpu))
    assert text.count("not known") == 2 and "model states" in text
    states = [size for what, size in p.bytes_kept[0].items() if what not in (memory.PEAK, memory.RECOMPUTED)]
    assert limits.needed(c, 1, gpu) == sum(states) < limits.needed(c, 1, CPU)
    with pytest.raises(UserError, match="model=mine: its units do not run on tensors without values"):
        plan.main(["configs/llama_tiny.py", "--model=mine", "--gpus=8"])


def test_a_dtype_changes_no_bytes_that_follow_from_the_device():
    c = tiny_config(1, dtype="auto", offload=True)
    assert limits.needed(replace(c, dtype="fp32"), 1, CPU) == limits.needed(c, 1, CPU)


def test_published_models_run_without_values():
    for name in ("gpt2_124m", "opt_125m", "tinyllama_1b1"):
        assert meta.work_of(configuration.load([f"configs/{name}.py"]), 2), name
