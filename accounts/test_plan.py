"""Test plan.py and accounts/: bytes and idle time against whole steps, published tables, layouts, the command line."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

import config as configuration
import plan
from accounts import layouts, ledger, memory, published, seconds
from accounts.devices import DEVICES
from accounts.published import TOKENS
from config import Config
from errors import UserError
from parallel import schedules
from parallel.layout import Layout

A100, V100 = DEVICES["a100-80g"], DEVICES["v100-16g"]
SMALL = Config(num_layers=13, hidden_size=64, num_attention_heads=8, seq_length=32, vocab_size=500, train_iters=1)
SYNCHRONOUS = [name for name in schedules.SCHEDULES if name not in schedules.ASYNCHRONOUS]


# --- short steps instead of long ones ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("p, m", [(1, 3), (2, 1), (2, 9), (4, 4), (4, 24), (6, 36)])
def test_bytes_of_a_long_step_from_a_short_one(name, p, m):
    """Sent and kept bytes equal ledger.predict and memory.predict of the whole step, in every row."""
    for chunks, dp, tp, zero, sp, recompute, b, dropout in [
        (1, 1, 1, 0, False, "none", 2, 0.1),
        (1, 3, 2, 3, True, "full", 1, 0.0),
        (2, 2, 2, 1, True, "none", 3, 0.0),
        (3, 2, 4, 2, False, "none", 1, 0.1),
        (1, 4, 2, 3, True, "full", 1, 0.0),
    ]:
        cp = 2 if dp == 4 else 1
        base = replace(SMALL, cp=cp, dropout=dropout, optimizer="lamb" if zero == 1 else "adamw")
        fields = dict(tp=tp, pp=p, schedule=name, chunks=chunks, zero=zero, sequence_parallel=sp, recompute=recompute)
        c = replace(base, **fields, micro_batch_size=b, global_batch_size=b * m * dp // cp)
        try:
            configuration.check(c, dp * tp * p)
        except UserError:
            continue
        known, made = layouts.model_of(base, "bf16"), schedules.build(name, p, m, chunks)
        layout, short = Layout(c, dp, known.table, made), known.layout(dp, *fields.values())
        for rank in range(p):
            sent, expected = known.sent(short, m, b, rank), ledger.predict(layout, made, rank, 0, 2, 4)
            assert sent.keys() == expected.keys()
            for key, (calls, size) in expected.items():
                assert sent[key][1] == size
                assert sent[key][0] == calls or key[1] == "cross-entropy rows"
            assert known.kept(short, m, b, rank) == memory.predict(layout, made, rank, memory.sizes(c, 2, 4, False))


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_idle_time_equals_the_simulation(name, p):
    """`idle` uses a closed form where its condition is met, and otherwise simulates. Both equal the simulation."""
    compared = 0
    durations = [(3, 3, 3), (3, 4, 2), (4, 4, 2), (2, 7, 5), (3, 5, 2)]
    for m, chunks, (F, I, W) in itertools.product((1, 3, 8, 16, 24), (1, 2, 3), durations):
        try:
            made = schedules.build(name, p, m, chunks)
        except UserError:
            continue
        v = len(made.parts) // p // len(schedules.pipelines(made))
        cost = {"F": F / v, "B": (I + W) / v, "I": I / v, "W": W / v}
        still, moving = (schedules.simulate(made, cost, comm).makespan for comm in (0, 0.01))
        waiting, _, messages = seconds.idle(name, p, m, chunks, F, I, W, 0.01)
        assert waiting == pytest.approx(still - m * (F + I + W), abs=1e-9)
        assert messages == pytest.approx(moving - still, abs=1e-9)
        compared += 1
    assert compared


def test_the_collectives_are_the_ledgers():
    for sp, recompute in itertools.product((False, True), ("none", "full")):
        known = layouts.model_of(SMALL, "bf16")
        table = known.sent(known.layout(1, 2, 1, "1f1b", 1, 0, sp, recompute), 1, 1, 0)
        _, in_F, *in_I = seconds.COLLECTIVES[sp]
        calls = sum(calls for (_, what, _), (calls, _) in table.items() if what == "activations")
        assert calls == SMALL.num_layers * (in_F * (1 + (recompute == "full")) + sum(in_I))


# --- published tables: identities -------------------------------------------------------------------------------------


FITTED, OTHERS = published.published()


@pytest.mark.parametrize("run", FITTED[:10], ids=lambda run: run.name)
def test_narayanan_parameters(run):
    assert run.name == f"{layouts.model_of(run.config, 'bf16').parameters / 1e9:.1f}B, 2021"


# Figure 1: GiB of a GPU for weights and optimizer, for activations with tp, and with sp and selective recomputation.
FIGURE_1 = [
    (45.5625, 59.25, 9.5625),
    (45.5625, 66.84375, 12.3515625),
    (31.640625, 114.0234375, 23.076171875),
    (32.958984375, 131.25, 26.5625),
]


@pytest.mark.parametrize("run, row", list(zip(OTHERS[:4], FIGURE_1, strict=True)), ids=lambda x: getattr(x, "name", ""))
def test_korthikanti_figure_1(run, row):
    """The paper keeps more than we do: two masks, and, if tp is used alone, the [s, s] matrices. We add them."""
    L, h, tp, pp, v = (getattr(run.config, name) for name in "num_layers hidden_size tp pp chunks".split())
    states, *expected = row
    weights = 12 * L * h**2 // (tp * pp)  # the figure leaves out biases, LayerNorms and embeddings
    assert sum(memory.model_states(weights, 1, 0).values()) == states * 2**30
    formula, bsh = schedules.FORMULAS[run.config.schedule].peak, run.config.micro_batch_size * TOKENS * h
    m = run.config.global_batch_size // run.config.micro_batch_size
    blocks = schedules.by_formula(formula, p=pp, m=m, v=v, r=0) * L / (pp * v)  # in flight on stage 0
    for sp, GiBs in zip((False, True), expected, strict=True):
        c = replace(run.config, sequence_parallel=sp)
        table = memory.block_activations(c, memory.sizes(c, 2, 4, False))
        ours = sum(size for what, size in table.items() if what not in ("LayerNorms' statistics", "log-sum-exp"))
        masks = 2 * bsh // (tp if sp else 1)
        matrices = 0 if sp else 5 * c.num_attention_heads * TOKENS * bsh // (h * tp)
        assert blocks * (ours + masks + matrices) == GiBs * 2**30


# --- published tables: time -------------------------------------------------------------------------------------------


def errors(runs):
    return [abs(published.predicted(run) / run.seconds - 1) for run in runs]


@pytest.mark.slow
def test_published_times():
    """The limits for Korthikanti's selective rows are the mean and largest error of Calculon, another predictor."""
    fitted, selective, every = errors(FITTED), errors(OTHERS[:4]), errors([*FITTED, *OTHERS])
    assert len(fitted) == 14 and sum(fitted) / 14 <= 0.05 and max(fitted) <= 0.13
    assert len(every) == 35 and sum(selective) / 4 <= 0.0365 and max(selective) <= 0.0887
    assert sum(error <= seconds.ERROR for error in every) >= 0.9 * len(every) and max(every) <= 0.13


def test_the_constants_are_those_of_the_fit():
    """A step of Gauss and Newton from the constants, which minimises the squares of the errors, stays there."""
    names = ("matrix", "wire", "wave")

    def errors(x):
        device = published.DEVICE._replace(**dict(zip(names, np.exp(x).tolist(), strict=True)))
        return np.log([published.predicted(run, device) / run.seconds for run in FITTED])

    x, shifts = np.log([getattr(A100, name) for name in names]), 1e-3 * np.eye(3)
    slopes = np.stack([errors(x + shift) - errors(x) for shift in shifts], axis=1) / 1e-3
    assert np.abs(np.linalg.lstsq(slopes, errors(x), rcond=None)[0]).max() < 0.02


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_the_candidates_are_what_config_check_accepts():
    base = replace(SMALL, num_layers=6, global_batch_size=24)
    accepted = refused = 0
    for tp, pp, b, name, chunks in itertools.product((1, 2, 3, 16), (1, 2, 3, 4, 8), (1, 4), SYNCHRONOUS, (1, 2, 3)):
        c = replace(base, tp=tp, pp=pp, micro_batch_size=b, schedule=name, chunks=chunks)
        try:
            configuration.check(c, 24)
            right = True
        except UserError:
            right = False
        assert layouts.fits(c, 24) == right, c
        accepted, refused = accepted + right, refused + (not right)
    assert accepted > 50 and refused > 50


FULLEST = [  # (rank, number of ranks, change)
    (0, 4, {}),  # most micro-batches in flight
    (1, 4, dict(num_layers=6, schedule="zb-h1")),  # a block more
    (3, 4, dict(vocab_size=90000, schedule="zb-h1")),  # the logits of a large vocabulary
    (3, 8, dict(num_layers=14, schedule="chimera", global_batch_size=32)),  # the middle of two pipelines
]


@pytest.mark.parametrize("rank, pp, change", FULLEST)
def test_the_fullest_rank_is_found_wherever_it_is(rank, pp, change):
    sizes = dict(num_layers=8, hidden_size=256, seq_length=512, pp=pp, micro_batch_size=1, global_batch_size=16)
    c = replace(SMALL, **sizes | change)
    model, facts = layouts.model_of(c, "bf16"), layouts.judge(c, pp, A100)
    layout = model.layout(1, *(getattr(c, name) for name in layouts.FIELDS[:-1]))
    sums = [sum(model.on_gpu(c, layout, facts["micro_batches"], stage).values()) for stage in range(pp)]
    assert sum(facts["memory_bytes"].values()) == sums[facts["fullest_rank"]] == sums[rank] == max(sums)


def test_parts_sum_to_the_step():
    """Seven blocks on four stages: the busiest stages have two blocks."""
    sizes = dict(num_layers=7, hidden_size=1024, seq_length=512, vocab_size=128, global_batch_size=64)
    c, values = replace(SMALL, **sizes, pp=4, micro_batch_size=1), {}
    facts = layouts.judge(c, 4, A100, say=lambda name, formula, value: values.update({name: value}))
    assert sum(facts["step_parts"].values()) == facts["step_seconds"] == values["step"] > 0
    assert facts["mfu"] <= facts["hfu"] < 1 and 0 <= facts["bubble"] < 1
    block = sum(values[f"{kind} of a block"] for kind in "FIW")
    assert 2 * 64 * block < facts["step_parts"]["compute"] < 2.2 * 64 * block


# --- physics ----------------------------------------------------------------------------------------------------------


def step(c, gpus, device, **fields):
    return layouts.judge(replace(c, **fields), gpus, device)["step_seconds"]


def test_what_the_hackathon_found():
    """tp needs large micro-batches, pp small ones. ZeRO-1 needs less memory. 4 GPUs are less than 4 times as fast."""
    c = configuration.load(["configs/gpt3_1b3.py", "--recompute=full", "--global_batch_size=64"])
    tensor = [step(c, 4, V100, tp=4, micro_batch_size=b) for b in (1, 2, 4)]
    assert tensor == sorted(tensor, reverse=True)
    assert step(c, 8, V100, pp=8, micro_batch_size=4) < step(c, 8, V100, pp=8, micro_batch_size=16)
    c = configuration.load(["configs/gpt3_13b.py", "--pp=2"])
    plain, sharded = (layouts.judge(replace(c, zero=zero), 64, V100)["memory_bytes"] for zero in (0, 1))
    assert sum(sharded.values()) < sum(plain.values())
    c = configuration.load(["configs/opt_125m.py", "--micro_batch_size=2", "--global_batch_size=8", "--zero=3"])
    assert step(c, 4, V100) > step(c, 1, V100) / 4


def test_tensor_parallelism_that_leaves_the_node_is_slow():
    c = configuration.load(["configs/gpt3_175b.py", "--pp=4", "--sequence_parallel=True", "--micro_batch_size=4"])
    inside, beyond = (layouts.judge(replace(c, tp=tp), 1024, A100)["step_parts"]["tensor parallel"] for tp in (8, 16))
    assert inside * 2 < beyond


def test_a_collective_uses_all_network_cards_of_a_node():
    """ZeRO-3 on 8 nodes: with one card instead of eight, gathers and reductions take eight times as long."""
    assert seconds.wire(A100, 1, 8) == pytest.approx(A100.card_rate * A100.network)  # a group has one GPU in each node
    assert seconds.wire(A100, 8, 64) == A100.wire_rate * A100.wire  # eight cards are faster than NVLink
    assert seconds.wire(A100._replace(rings=1), 8, 64) == pytest.approx(A100.card_rate * A100.network)


# --- the command line -------------------------------------------------------------------------------------------------

COMMON = ["configs/gpt3_13b.py", "--gpus=16", "--device=a100-80g"]


def test_the_table_and_json(capsys):
    plan.main([*COMMON, "--pp=1", "--top=3"])
    text = capsys.readouterr().out
    assert "does not fit" in text and f"{seconds.ERROR:.0%}" in text
    plan.main([*COMMON, "--pp=1", "--top=4", "--json"])
    found = json.loads(capsys.readouterr().out)
    fast = [facts["step_seconds"] for facts in found if facts["fits"]]
    assert fast == sorted(fast) and len(fast) == 4
    plan.main([*COMMON, "--tp=8", "--pp=2", "--json", "--tokens=3e11"])
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["layout"]["tp"], one["layout"]["dp"], one["gpus"]) == (8, 1, 16)
    assert one["days"] == pytest.approx(3e11 / one["tokens_per_second"] / 86400)


def test_explain_reproduces_its_numbers(capsys):
    plan.main([*COMMON, "--tp=8", "--pp=2", "--recompute=full", "--explain"])
    text, _, _ = capsys.readouterr().out.partition(plan.TITLES)
    value = {line[:37].strip(): float(line[-12:]) for line in reversed(text.splitlines()) if line}
    work = sum(value[kind] for kind in "FIW") - value["recomputation"] - value["collectives"]
    assert value["compute"] == pytest.approx(value["micro-batches m"] * work, rel=1e-3)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpus=0"], "--gpus: 0: should be 1 to"),
        (["--gpus=1e30"], "--gpus: 1e30: should be 1 to"),
        (["--device=b300"], "--device: invalid"),
        (["--tp=3", "--pp=1"], "is not a multiple of tp"),
        (["--tp=8", "--pp=4"], "not a multiple of tp"),
        (["--gpus=7", "--pp=1"], "global_batch_size = .* is not a multiple of"),
        (["--foo=1"], "--foo: no such "),
        (["--dtype=bf16", "--device=v100-16g"], "dtype=bf16: v100-16g has no known rate"),
        (["--tokens=-1"], "--tokens: -1: should be 1 to"),
        (["--flops=nan"], "--flops: nan: should be 1 to"),
        (["--flops=1e299"], "--flops: 1e299: should be 1 to"),
        (["--schedule=1_000"], "schedule=1_000: "),
        (["--schedule=pipedream"], "schedule=pipedream: plan.py predicts only schedules with one update a step"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(UserError, match=message):
        plan.main([*COMMON, *words])
