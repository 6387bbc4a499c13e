"""The bytes that ledger.py predicts have the factors of the lecture and of the ZeRO paper. A prediction needs no run.

The grid (test_layouts.py) compares all rows with those of runs.
"""

import contextlib
import re
from fractions import Fraction
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import config as configuration
from accounts import ledger, memory, meta, traffic, zero_states
from config import Config
from parallel import simulation, tensor
from parallel.layout import Layout
from parallel.units import unit_specs
from testing.record import check_bytes, record
from testing.tiny import tiny_config


@pytest.mark.parametrize("order, first", [("dp-pp-tp", ["0", "2"]), ("pp-dp-tp", ["0", "4"])])
def test_a_predicted_table_names_the_stages_first_rank(order, first):
    config = tiny_config(2, pp=2, tp=2, micro_batch_size=2, order=order)
    tables = traffic.predicted_tables(traffic.predict_step(config, 8))
    assert re.findall(r"sent per step by rank (\d+), predicted", tables) == first


LECTURE = {  # factors of ledger.py's table, and the fields that they belong to
    "plain": (8, {}),
    "recompute": (12, {"recompute": "full"}),
    "sequence parallelism": (10, {"sequence_parallel": True}),
}


@pytest.mark.parametrize("name", LECTURE)
def test_the_formulas_are_the_lectures(workers, name):
    """The factor, and 2P (n-1)/n: computed by hand for 2 layers, h = 32, s = 8."""
    factor, fields = LECTURE[name]
    unit = Fraction(1, 2) * 4 * (4 * 8 * 32) * 3 * 2  # (t-1)/t, bytes of a number, bsh, m and L
    one = workers.run(4, record, tiny_config(2, 2, dtype="fp32", **fields))[0]
    measured, _ = one.sent
    sent = sum(count for (_, what, _), (_, count) in measured.items() if what == "activations")
    assert sent == factor * unit, f"a block sends {float(sent / unit):g} bsh (t-1)/t; should be {factor} bsh (t-1)/t"
    gradients, right = measured["data", "gradients", "all_reduce"], (5, one.kept[0]["gradients"])
    said = "a step has {} all_reduce of gradients, with {} bytes"
    assert gradients == right, f"{said.format(*gradients)}; should be {right}: 2 P (n-1)/n, one for each bucket"


@pytest.mark.parametrize("m, factors", [(1, (2, 2, 2, 3)), (3, (2, 2, 4, 9))])
def test_the_papers_2_2_2_3(workers, m, factors):
    """Section 7 of the ZeRO paper, in units of P (n-1)/n: 2, 2, 2, 3 for m = 1. For any m: 2, 2, m + 1, 3m."""
    configs = [tiny_config(2, zero=stage, dtype="fp32", micro_batch_size=12 // m) for stage in range(4)]
    records = [workers.run(2, record, config)[0] for config in configs]
    for stage, (measured, _) in enumerate(one.sent for one in records):
        sent = sum(count for (axis, *_), (_, count) in measured.items() if axis == "data")
        sent = float(sent / (records[0].kept[0]["gradients"] * Fraction(1, 2)))
        assert sent == factors[stage], f"stage {stage}, m={m}: {sent:g} P (n-1)/n are sent; should be {factors[stage]}"


@contextlib.contextmanager
def chunks_of_20():
    """The head works on 20, 20, 20 and 4 of the 64 tokens."""
    with mock.patch.object(tensor, "ROWS", 20), mock.patch.object(ledger, "ROWS", 20):
        yield


def test_the_ledger_of_a_head_in_chunks(workers):
    records = workers.run(2, record, tiny_config(1, 2), 2, chunks_of_20)
    check_bytes(records)
    assert records[0].sent[0]["tp", "cross-entropy rows", "all_reduce"][0] == 2 * 4 * 3


def test_the_columns_of_how_often_are_the_slides():
    """The slide's column 通信頻度, which for dp depends on the ZeRO stage."""
    step, each = ("bucket", "step"), ("bucket", "micro-batch")
    found = []
    for zero in range(4):
        layout = traffic.predict_step(tiny_config(2, zero=zero), 2).layout
        found.append({what: per for (axis, what, _), per in ledger.how_often(layout).items() if axis == "data"})
    assert [row["gradients"] for row in found] == [step, step, each, each]
    assert [row.get("parameters") for row in found] == [None, step, step, each]


# --- predictions without a run ----------------------------------------------------------------------------------------


class NoTensors(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} makes a tensor")


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_predictions_for_4096_ranks_need_no_process_and_no_tensor(schedule, chunks):
    """Formulas written by hand give the same bytes, for GPT-3 with 175B parameters in bf16."""
    t, pp, dp, m = 8, 16, 4096 // (8 * 16), 48
    L, h, s, b, v = 96, 12288, 2048, 1, 51200
    config = Config(
        num_layers=L, hidden_size=h, num_attention_heads=96, seq_length=s, vocab_size=v, micro_batch_size=b, tp=t,
        pp=pp, schedule=schedule, chunks=chunks, zero=1, sequence_parallel=True, global_batch_size=b * dp * m,
        train_iters=1,
    )  # fmt: skip
    meta.work_of(config, 2)  # kept: it runs one block on tensors without values
    with NoTensors():
        assert configuration.check(config, 4096) == dp
        plan = simulation.build(schedule, pp, m, chunks)
        layout = Layout(config, dp, unit_specs(config), plan)
        sizes = zero_states.sizes(config, item=2, wide=4, on_cpu=False)
        for rank in (0, 1, pp - 1):
            sent = ledger.predict_sent(layout, plan, rank, 0, 2, 4)
            kept = memory.predict_kept(layout, plan, rank, sizes)
            blocks = sum(name.startswith("block") for name in layout.buckets(rank))
            P, bsh = zero_states.stored(layout, rank), b * s * h
            both = sum(sent["tp", "activations", operation][1] for operation in ("all_gather", "reduce_scatter"))
            assert both == 10 * bsh * blocks * m * Fraction(t - 1, t) * 2
            assert sent["data", "gradients", "reduce_scatter"] == (
                len(layout.buckets(rank)),
                P * Fraction(dp - 1, dp) * 4,
            )
            messages = sum(sent[key][0] for key in sent if key[0] == "pp")
            assert messages == m * (2 * chunks if 0 < rank < pp - 1 else 2 * chunks - 1)
            assert sum(sent[key][1] for key in sent if key[0] == "pp") == messages * bsh // t * 2
            assert sum(kept[what] for what in kept if what != memory.PEAK) == 6 * P + Fraction(12 * P, dp)
            in_flight = {"1f1b": pp - rank, "zb-h1": pp}.get(schedule, pp * chunks + pp - 2 * rank - 1)
            # memory.py's table: a block keeps 16 bsh/t elements, and small terms
            assert kept[memory.PEAK] > in_flight * blocks // chunks * 16 * bsh // t * 2
    assert not torch.distributed.is_initialized()
