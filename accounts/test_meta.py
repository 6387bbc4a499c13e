"""Units on tensors without values keep the bytes of the formulas. A model without formulas is measured."""

import itertools
import sys
from dataclasses import replace

import pytest

import config as configuration
import plan
import train
from accounts import flops, gpt2, limits, llama, memory, meta, meter, report, traffic
from accounts.matrices import matrices_of
from errors import UserError
from testing.dry_run import show
from testing.tiny import CPU, built, tiny_batches, tiny_config

LLAMA = dict(model="llama", num_query_groups=4, ffn_hidden_size=24)
MODELS = [
    (gpt2, dict()),
    (gpt2, dict(activation="relu")),
    (llama, LLAMA),
    (llama, LLAMA | dict(num_query_groups=0, untie_embeddings_and_output_weights=True)),
]
LAYOUTS = [(1, False, 1), (2, False, 1), (2, True, 2)]
WIDTHS = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (2, 4)}


@pytest.mark.parametrize("formulas, fields", MODELS, ids=str)
def test_units_without_values_keep_what_the_formulas_say(formulas, fields):
    recomputes = "none", "elementwise"
    for (tp, sp, cp), dropout, dtype, r in itertools.product(LAYOUTS, (0.0, 0.1), WIDTHS, recomputes):
        layout = dict(sequence_parallel=sp, cp=cp, recompute=r)
        c = tiny_config(1, tp, dropout=dropout, dtype=dtype, **layout, **fields)
        z = memory.sizes(c, *WIDTHS[dtype], on_cpu=False)
        expected = {unit: sum(table.values()) for unit, table in formulas.kept(c, z).items()}
        assert meta.measured(c, z.item) == expected, (layout, dropout, dtype)


@pytest.mark.parametrize("formulas, fields", MODELS, ids=str)
def test_the_number_of_parameters_is_the_formula(formulas, fields):
    assert matrices_of(tiny_config(1, **fields)).formulas is formulas


# --- a model without formulas -----------------------------------------------------------------------------------------


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
    for cached in (meta._kept, matrices_of.__globals__["_matrices"]):
        cached.cache_clear()


def test_a_file_of_your_own_is_measured(mine):
    """Only its elementwise work is unknown. All other numbers are those of the same model with formulas."""
    c = tiny_config(1, recompute="full", dropout=0.1, **mine("from llama import units\n"))
    same = replace(c, model="llama")
    configuration.check(c, 1)
    assert matrices_of(c).formulas is None
    assert flops.model_flops(c, 24) == flops.model_flops(same, 24)
    p, q = traffic.predict_step(c, 1), traffic.predict_step(same, 1)
    assert p.bytes_kept == q.bytes_kept and p.sent == q.sent
    assert limits.needed(c, 1, CPU) == limits.needed(same, 1, CPU)
    run = built(c)
    batches = tiny_batches(run)
    with meter.Activations(run.executor) as account:
        train.train_step(run, batches)
    lines = report.measured_tables(run, account).splitlines()
    for what, size in ((memory.PEAK, account.peak), (memory.RECOMPUTED, account.recomputed)):
        (line,) = [line for line in lines if line.startswith(what)]
        assert [cell.strip() for cell in line.split(" | ")[1:3]] == [f"{size:,}"] * 2
    with pytest.raises(UserError, match=r"model=mine: its elementwise operations have no formula; plan.py needs"):
        plan.main(["configs/llama_tiny.py", "--model=mine", "--gpus=8"])


def test_a_dry_run_needs_no_formula(mine, capsys):
    show(tiny_config(4, 2, zero=2, **mine("from llama import units\n") | dict(dtype="bf16", optimizer="adamw")), 8, 3)
    assert "no formula" not in capsys.readouterr().out


def test_a_parameter_of_two_units_is_measured(mine):
    shared = "from llama import *\nimport llama\n\ndef units(*all):\n    first, *blocks, head = llama.units(*all)\n"
    shared += "    blocks[1].norm2.weight = blocks[0].norm1.weight\n    return [first, *blocks, head]\n"
    text = traffic.predicted_tables(traffic.predict_step(tiny_config(1, **mine(shared)), 1))
    assert "no formula" not in text


def test_a_dtype_changes_no_bytes_that_follow_from_the_device():
    c = tiny_config(1, dtype="auto", offload=True)
    assert limits.needed(replace(c, dtype="fp32"), 1, CPU) == limits.needed(c, 1, CPU)


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


def test_a_model_that_needs_values_has_no_formula(mine):
    c = tiny_config(1, recompute="full", **mine(LOOKS))
    text = traffic.predicted_tables(p := traffic.predict_step(c, 1))
    assert text.count("no formula") == 2 and "model states" in text
    states = [size for what, size in p.bytes_kept[0].items() if what not in (memory.PEAK, memory.RECOMPUTED)]
    assert limits.needed(c, 1, CPU) == sum(states)


def test_a_changed_llama_is_measured(monkeypatch):
    """One more vector in a block: the formulas are another model's."""
    import llama as model

    init = model.Block.__init__

    def longer(self, c, index, *rest):
        init(self, c, index, *rest)
        self.more = model.RMSNorm(f"block{index}.more", c, self.ops)

    monkeypatch.setattr(model.Block, "__init__", longer)
    c = tiny_config(1, hidden_size=32, **LLAMA)  # its matrices are not in the cache
    assert matrices_of(c).formulas is None
    with pytest.raises(UserError, match="model=llama: its elementwise operations have no formula"):
        plan.main(["configs/llama_tiny.py", "--gpus=8", "--hidden_size=256"])
    matrices_of.__globals__["_matrices"].cache_clear()
