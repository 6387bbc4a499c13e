"""Test plan.py and accounts/: bytes and idle time against whole steps, published tables, layouts, the command line."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys

import pytest

import config as configuration
import plan
from accounts import devices, fit, layouts, ledger, memory, seconds, steady
from accounts.devices import DEVICES
from accounts.published import DATA_PARALLEL_530B, KORTHIKANTI, NARAYANAN, TOKENS, VOCABULARY
from config import Config
from errors import UserError
from log import hardware_flops, model_flops
from parallel import schedules
from parallel.layout import Layout

A100 = DEVICES["a100-80g"]
SMALL = Config(num_layers=13, hidden_size=64, num_attention_heads=8, seq_length=32, vocab_size=500, train_iters=1)


# --- short steps instead of long ones ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@pytest.mark.parametrize("p, m", [(1, 3), (2, 1), (2, 9), (4, 4), (4, 24), (6, 36)])
def test_bytes_of_a_long_step_from_short_ones(name, p, m):
    """Sent and kept bytes equal ledger.predict and memory.predict of the whole step, in every row."""
    for chunks, dp, tp, zero, sp, recompute, b, dropout in [
        (1, 1, 1, 0, False, "none", 2, 0.1),
        (1, 3, 2, 3, True, "full", 1, 0.0),
        (2, 2, 2, 1, True, "none", 3, 0.0),
        (3, 2, 4, 2, False, "none", 1, 0.1),
    ]:
        base = dataclasses.replace(SMALL, dropout=dropout, optimizer="lamb" if zero == 1 else "adamw")
        shape = steady.Shape(dp, tp, p, name, chunks, zero, sp, recompute)
        fields = dict(tp=tp, pp=p, schedule=name, chunks=chunks, zero=zero, sequence_parallel=sp, recompute=recompute)
        c = dataclasses.replace(base, **fields, micro_batch_size=b, global_batch_size=b * m * dp)
        try:
            configuration.check(c, dp * tp * p)
        except UserError:
            continue
        known, made = steady.Model(base, 2, 4), schedules.build(name, p, m, chunks)
        layout = Layout(c, dp, known.table, made)
        for rank in range(p):
            sent, expected = known.sent(shape, m, b, rank), ledger.predict(layout, made, rank, 0, 2, 4)
            assert sent.keys() == expected.keys()
            for key, (calls, size) in expected.items():
                assert sent[key][1] == size
                assert sent[key][0] == calls or key[1] == "cross-entropy rows"
            expected = memory.predict(layout, made, rank, memory.sizes(c, 2, 4, False))
            assert known.kept(shape, m, b, rank) == expected


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_idle_time_equals_the_simulation(name, p):
    """`idle` uses a closed form where its conditions are met, and otherwise simulates. Both equal the simulation."""
    compared = 0
    for m, chunks, (F, I, W) in itertools.product(
        (1, 3, 8, 16, 24), (1, 2, 3), [(3, 3, 3), (3, 4, 2), (4, 4, 2), (2, 7, 5), (3, 5, 2)]
    ):
        try:
            made = schedules.build(name, p, m, chunks)
        except UserError:
            continue
        v = len(made.parts) // p // len(schedules.pipelines(made))
        cost = {"F": F / v, "B": (I + W) / v, "I": I / v, "W": W / v}
        still, moving = (schedules.simulate(made, cost, comm).makespan for comm in (0, 0.01))
        waiting, messages = seconds.idle(name, p, m, chunks, F, I, W, 0.01)
        assert waiting == pytest.approx(still - m * (F + I + W), abs=1e-9)
        assert messages == pytest.approx(moving - still, abs=1e-9)
        compared += 1
    assert compared or p == 3  # chimera needs an even p


def test_the_collectives_are_the_ledgers():
    for sp, recompute in itertools.product((False, True), ("none", "full")):
        c = dataclasses.replace(SMALL, tp=2, sequence_parallel=sp, recompute=recompute)
        shape = steady.Shape(1, 2, 1, "1f1b", 1, 0, sp, recompute)
        table = steady.Model(c, 2, 4).sent(shape, 1, 1, 0)
        for (parallel, operation), phases in seconds.COLLECTIVES.items():
            if parallel == sp:
                forwards = 2 if recompute == "full" else 1
                assert table["tp", "activations", operation][0] == c.num_layers * (
                    forwards * sum(phases["F"]) + sum(phases["I"])
                )


# --- published tables: identities -------------------------------------------------------------------------------------


def narayanan(row):
    _, heads, hidden, layers, tp, pp, _, batch, *_ = row
    return fit.config(layers, hidden, heads, tp, pp, 1, batch, micro_batch_size=1, recompute="full")


@pytest.mark.parametrize("row", NARAYANAN, ids=lambda row: f"{row[0]}B")
def test_narayanan_parameters_and_aggregate_flops(row):
    billions, *_, gpus, _, tflops, percent, pflops = row
    count = layouts.parameters(layouts.model_of(narayanan(row), 2, 4))
    assert round(count / 1e9, 1) == billions
    assert tflops * gpus / 1000 == pytest.approx(pflops, rel=0.004)
    assert tflops / 312 * 100 == pytest.approx(percent, abs=0.51)


@pytest.mark.parametrize("row", KORTHIKANTI, ids=lambda row: row[0])
def test_korthikanti_utilisation(row):
    """Our FLOPs in their seconds give their MFU. Their HFU counts attention twice: 1 + s/3h instead of 1 + s/6h."""
    _, layers, hidden, heads, tp, pp, chunks, batch, b, gpus, _, selective, mfu, hfu = row
    c = fit.config(layers, hidden, heads, tp, pp, chunks, batch, micro_batch_size=b)
    model, again = model_flops(c, batch), 12 * batch * TOKENS * layers * TOKENS * hidden
    unit = selective * gpus * 312e12 / 100
    assert model / unit == pytest.approx(mfu, abs=0.2)
    assert (model + again) / unit == pytest.approx(hfu, abs=0.2)
    if row[0] == "530B":
        dp, more, slower, percent = DATA_PARALLEL_530B
        assert dp * model / (slower * more * 312e12 / 100) == pytest.approx(percent, abs=0.2)


FIGURE_1 = {  # GiB of a GPU: weights and optimizer, activations with tp, the same with sp and selective recomputation
    "22B": (45.5625, 59.25, 9.5625),
    "175B": (45.5625, 66.84375, 12.3515625),
    "530B": (31.640625, 114.0234375, 23.076171875),
    "1T": (32.958984375, 131.25, 26.5625),
}


@pytest.mark.parametrize("row", KORTHIKANTI, ids=lambda row: row[0])
def test_korthikanti_figure_1(row):
    """The paper keeps more than we do: two masks, and, if tp is used alone, the [s, s] matrices. We add them."""
    name, L, h, a, tp, pp, v, batch, b, *_ = row
    GiB, weights = 2**30, 12 * L * h**2 // (tp * pp)  # the figure leaves out biases, LayerNorms and embeddings
    assert sum(memory.model_states(weights, 1, 0).values()) == FIGURE_1[name][0] * GiB
    letters = dict(p=pp, m=batch // b, v=v, r=0)
    formula = schedules.FORMULAS["interleaved" if v > 1 else "1f1b"].peak
    blocks = schedules.by_formula(formula, **letters) * L / (pp * v)  # in flight on the first stage
    for sp, GiBs in zip((False, True), FIGURE_1[name][1:], strict=True):
        c = fit.config(L, h, a, tp, pp, v, batch, micro_batch_size=b, sequence_parallel=sp)
        table = memory.block_activations(c, memory.sizes(c, 2, 4, False))
        ours = sum(size for what, size in table.items() if what not in ("LayerNorms' statistics", "log-sum-exp"))
        bsh = b * TOKENS * h
        masks = 2 * bsh // (tp if sp else 1)
        matrices = 0 if sp else 5 * a * TOKENS * bsh // (h * tp)
        assert blocks * (ours + masks + matrices) == GiBs * GiB


ZERO = {  # dp: GB of a GPU for 7.5B and 1T parameters with ZeRO 1, 2, 3. The paper truncates some numbers.
    1: (120, 120, 120, 16000, 16000, 16000),
    4: (52.5, 41.3, 30, 7000, 5500, 4000),
    16: (35.6, 21.6, 7.5, 4750, 2875, 1000),
    64: (31.4, 16.6, 1.88, 4187, 2218, 250),
    256: (30.4, 15.4, 0.47, 4046, 2054, 62.5),
    1024: (30.1, 15.1, 0.12, 4011, 2013, 15.6),
}


@pytest.mark.parametrize("dp", ZERO)
def test_zero_table_1(dp):
    for cell, (P, stage) in zip(ZERO[dp], itertools.product((7.5e9, 1e12), (1, 2, 3)), strict=True):
        size = float(sum(memory.model_states(int(P), dp, stage, gradients=2).values())) / 1e9
        digits = len(str(cell).partition(".")[2]) if isinstance(cell, float) else 0
        scale = 10**digits
        assert cell in (math.floor(size * scale) / scale, round(size, digits), math.floor(size * scale + 0.5) / scale)


# --- published tables: time -------------------------------------------------------------------------------------------


def errors(rows):
    return {row[0]: fit.predicted(row, A100) / row[4] - 1 for row in rows}


def test_runs_that_no_fit_has_seen():
    """The limits for Korthikanti's four rows are the mean and largest error of Calculon, another predictor."""
    found = errors(fit.selective())
    alone = abs(found.pop("530B, selective, dp=8"))
    assert sum(map(abs, found.values())) / 4 <= 0.0365 and max(map(abs, found.values())) <= 0.0887, found
    assert alone <= 0.05


def test_runs_of_the_fit():
    found = errors(fit.full(A100))
    assert len(found) == 14
    assert sum(map(abs, found.values())) / 14 <= 0.05 and max(map(abs, found.values())) <= 0.13, found


def test_the_constants_are_those_of_the_fit():
    rows = fit.full(A100)
    again = fit.fit(rows, A100, rounds=1)
    for name in fit.FITTED:
        assert getattr(again, name) == pytest.approx(getattr(A100, name), rel=0.02)


def test_a_published_time_does_not_enter_its_prediction():
    row = fit.selective()[0]
    assert fit.predicted((*row[:4], 1e9), A100) == fit.predicted(row, A100)


# --- layouts ----------------------------------------------------------------------------------------------------------


def small(gpus=8):
    return dataclasses.replace(SMALL, num_layers=8, global_batch_size=16)


def test_the_candidates_are_what_config_check_accepts():
    base = dataclasses.replace(SMALL, num_layers=6, global_batch_size=24, vocab_size=500)
    accepted = refused = 0
    for tp, pp, b, name, chunks in itertools.product(
        (1, 2, 3, 16), (1, 2, 3, 4, 8), (1, 2, 4), schedules.SCHEDULES, (1, 2, 3)
    ):
        shape = dict(tp=tp, pp=pp, micro_batch_size=b, schedule=name, chunks=chunks)
        try:
            configuration.check(dataclasses.replace(base, **shape), 24)
            right = True
        except UserError:
            right = False
        assert layouts.accepts(base, 24, **shape) == right, shape
        accepted, refused = accepted + right, refused + (not right)
    assert accepted > 50 and refused > 50


def test_a_judged_layout_keeps_what_memory_predicts():
    """Each rank keeps the predicted bytes. The fullest rank is among the `suspects`."""
    for name, chunks, pp in [("1f1b", 1, 4), ("interleaved", 2, 4), ("zb-v", 2, 4), ("chimera", 1, 4), ("zb-h1", 1, 5)]:
        c = dataclasses.replace(SMALL, num_layers=13, pp=pp, schedule=name, chunks=chunks, micro_batch_size=1)
        c = dataclasses.replace(c, global_batch_size=4 * pp)
        facts = layouts.judge(c, pp, A100)
        made = schedules.build(name, pp, 4 * pp, chunks)
        layout = Layout(c, 1, layouts.model_of(c, 2, 4).table, made)
        for rank, parts in enumerate(facts["memory_by_rank"]):
            expected = memory.predict(layout, made, rank, memory.sizes(c, 2, 4, False))
            assert sum(expected.values()) == sum(
                size for part, size in parts.items() if part not in ("whole buckets", "logits", "context")
            )
        sums = [sum(parts.values()) for parts in facts["memory_by_rank"]]
        assert sums[facts["fullest_rank"]] == max(sums)
        assert sum(layouts.judge(c, pp, A100, all_ranks=False)["memory_bytes"].values()) == max(sums)


@pytest.mark.parametrize(
    "rank, change", [(0, {}), (1, dict(num_layers=6)), (3, dict(vocab_size=90000, schedule="zb-h1"))]
)
def test_the_fullest_rank_is_found_wherever_it_is(rank, change):
    """Rank 0 has most micro-batches in flight, rank 1 has one block more, rank 3 the logits of a large vocabulary."""
    blocks = dict(num_layers=8, hidden_size=256, seq_length=512, pp=4, micro_batch_size=1, global_batch_size=16)
    c = dataclasses.replace(SMALL, **blocks | change)
    if rank == 1:
        c = dataclasses.replace(c, recompute="none", micro_batch_size=1, schedule="zb-h1")
    assert layouts.judge(c, 4, A100)["fullest_rank"] == rank


def test_uneven_stages_count_their_own_layers():
    """Seven blocks on four stages: the busiest stages have two. A step takes more than m times their work."""
    c = dataclasses.replace(SMALL, num_layers=7, hidden_size=1024, seq_length=512, pp=4, global_batch_size=64)
    c = dataclasses.replace(c, micro_batch_size=1, vocab_size=128)
    known = layouts.model_of(c, 2, 4)
    shape = layouts.shape_of(c, 4)
    rate = seconds.rates(A100, "bf16", "ours")
    found = seconds.stages(c, known.layout(shape), A100, rate, known.sent(shape, 64, 1, 1), 2, 4)
    block = sum(seconds.block(c, rate, 2, 4)[kind] for kind in "FIW")
    works = [stage.F + stage.I + stage.W for stage in found]
    assert works[1] == works[2] == pytest.approx(2 * block)
    facts = layouts.judge(c, 4, A100)
    assert facts["compute_seconds"] == pytest.approx(64 * max(works)) and facts["step_seconds"] > 64 * max(works)
    counts = [stage["parameters"] for stage in facts["memory_by_rank"]]
    assert counts[1] == counts[2] and sum(counts) > 4 * min(counts)


def test_parts_sum_to_the_step():
    for c in layouts.candidates(small(), 8, A100, set())[::7]:
        facts = layouts.judge(c, 8, A100)
        assert sum(facts["step_parts"].values()) == facts["step_seconds"] > 0
        assert facts["mfu"] <= facts["hfu"] < 1 and 0 <= facts["bubble"] < 1
        assert facts["hardware_tflops"] * 8e12 * facts["step_seconds"] == pytest.approx(hardware_flops(c, 16))
        assert all(0 <= share <= 1 for share in facts["hidden"].values())


# --- physics ----------------------------------------------------------------------------------------------------------


def step(c, gpus, device=A100, **more):
    return layouts.judge(c, gpus, device, **more)["step_seconds"]


def test_processes_that_share_cores_use_the_time_in_which_others_wait():
    """With half a core per process, a step takes half of work + bubble, but at least work. The bubble is the rest."""
    for m in (1, 8):
        c = dataclasses.replace(SMALL, pp=4, num_layers=4, global_batch_size=4 * m, micro_batch_size=4)
        alone, shared = (layouts.judge(c, 4, A100._replace(share=share))["step_parts"] for share in (1, 0.5))
        bubble, work = alone.pop("bubble"), sum(alone[part] for part in ("compute", "recomputation", "tensor parallel"))
        assert shared.pop("bubble") == pytest.approx(max(0.0, (work + bubble) / 2 - work), abs=1e-12)
        assert shared == alone


def test_what_the_hackathon_found():
    """tp needs large micro-batches, pp small ones. ZeRO-1 needs less memory. 4 GPUs are less than 4 times as fast."""
    V100 = DEVICES["v100-16g"]
    c = configuration.load(["configs/gpt3_1b3.py", "--recompute=full", "--global_batch_size=64"])
    tensor = [step(dataclasses.replace(c, tp=4, micro_batch_size=b), 4, V100) for b in (1, 2, 4)]
    assert tensor == sorted(tensor, reverse=True)
    for b, tokens in ((1, "56,667"), (8, "73,531")):  # as in the README, on 16 GPUs with 512 samples a step
        of_readme = dataclasses.replace(c, tp=4, micro_batch_size=b, global_batch_size=512)
        assert f"{512 * c.seq_length / step(of_readme, 16, V100):,.0f}" == tokens
    pipeline = [step(dataclasses.replace(c, pp=8, micro_batch_size=b), 8, V100) for b in (4, 16)]
    assert pipeline[0] < pipeline[1]
    c = configuration.load(["configs/gpt3_13b.py", "--pp=2"])
    plain, sharded = (layouts.judge(dataclasses.replace(c, zero=zero), 64, V100) for zero in (0, 1))
    assert sum(sharded["memory_bytes"].values()) < sum(plain["memory_bytes"].values())
    c = configuration.load(["configs/opt_125m.py", "--micro_batch_size=2", "--global_batch_size=8", "--zero=3"])
    assert step(c, 4, V100) > step(c, 1, V100) / 4


def test_tensor_parallelism_that_leaves_the_node_is_slow():
    c = configuration.load(["configs/gpt3_175b.py", "--pp=4", "--sequence_parallel=True", "--micro_batch_size=4"])
    inside, beyond = (layouts.judge(dataclasses.replace(c, tp=tp), 1024, A100) for tp in (8, 16))
    assert inside["exposed_seconds"]["tp"] * 2 < beyond["exposed_seconds"]["tp"]
    assert beyond["binds"].startswith(("tensor parallelism leaves the node", "does not fit"))


def test_reductions_hide_behind_backward():
    c = dataclasses.replace(fit.config(24, 2048, 16, 1, 1, 1, 64, micro_batch_size=2))
    facts = layouts.judge(c, 8, A100)
    assert facts["hidden"]["dp"] > 0.5
    assert layouts.judge(c, 8, A100, code="megatron-2022")["exposed_seconds"]["dp"] > facts["exposed_seconds"]["dp"]


# --- the command line -------------------------------------------------------------------------------------------------

COMMON = ["configs/gpt3_13b.py", "--gpus=16", "--device=a100-80g"]


def test_the_table(capsys):
    plan.main([*COMMON, "--pp=1", "--top=3"])
    text = capsys.readouterr().out
    assert "layouts," in text and "nearly fit:" in text and "does not fit" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_json_of_a_ranking_and_of_one_layout(capsys):
    plan.main([*COMMON, "--pp=1", "--top=4", "--json"])
    found = json.loads(capsys.readouterr().out)
    fast = [facts["step_seconds"] for facts in found if facts["fits"]]
    assert fast == sorted(fast) and len(fast) == 4
    plan.main([*COMMON, "--tp=8", "--pp=2", "--json", "--tokens=3e11"])
    one = json.loads(capsys.readouterr().out)
    assert one["layout"]["tp"] == 8 and one["layout"]["dp"] == 1 and one["gpus"] == 16
    assert one["days"] == pytest.approx(3e11 / one["tokens_per_second"] / 86400)
    assert {"exposed_seconds", "memory_bytes", "hardware_tflops", "binds", "capacity_bytes"} <= one.keys()


@pytest.mark.parametrize(
    "schedule, formula",
    [
        ("1f1b", "m (F+I+W) x / (1-x), x = (p-1) / (m+p-1)"),
        ("zb-h1", "(p-1)*(F+I-W) if m >= p"),
        ("chimera", "simulate"),
    ],
)
def test_explain(schedule, formula, capsys):
    plan.main([*COMMON, "--tp=8", "--pp=2", "--explain", f"--schedule={schedule}"])
    text = capsys.readouterr().out
    assert "matrix products" in text and formula in text and "capacity" in text
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpus=0"], "--gpus"),
        (["--device=b300"], "--device=b300: should be one of v100-16g"),
        (["--tp=3", "--pp=1"], "is not a multiple of tp"),
        (["--tp=8", "--pp=4"], "not a multiple of tp * pp = 32"),
        (["--foo=1"], "no such field"),
        (["--gpus=12", "--tp=8"], "not a multiple of tp * pp"),
        (["--dtype=bf16", "--device=v100-16g"], "dtype=bf16: v100-16g has no known rate"),
        (["--tokens=-1"], "--tokens=-1.0: should be positive"),
        (["--schedule=1_000"], "schedule=1_000: should be one of"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        plan.main([*COMMON, *words])


@pytest.mark.parametrize("value", [[], {}, "x", None, 0, -1, 1e999])
def test_a_damaged_calibration_is_one_line(value, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "CALIBRATION", tmp_path / "cpu.json")
    names = "attention matrix memory memory_rate operation wire wire_rate latency".split()
    for damaged in names:
        numbers = {"peak": {"fp32": 1e11}} | dict.fromkeys(names, 1.0) | {damaged: value}
        found = {"cores": 2, "memory_bytes": 10**10, "processes": {"2": numbers}}
        devices.CALIBRATION.write_text(json.dumps(found))
        with pytest.raises(UserError, match=r"cpu\.json: damaged .*--calibrate writes it again"):
            devices.device("cpu", 2)


def test_a_mistake_is_one_line_and_exit_code_2():
    done = subprocess.run([sys.executable, "plan.py", "--gpus=8"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_a_contradictory_table_is_noticed():
    """The number of GPUs must be a multiple of tp * pp. The published rows pass, a changed row is refused."""
    for *_, layers, tp, pp, gpus, _, _, _, _ in [row for row in NARAYANAN]:
        assert gpus % (tp * pp) == 0 and layers >= pp
    c = fit.config(48, 6144, 64, 8, 3, 1, 4, micro_batch_size=1)
    with pytest.raises(UserError, match="not a multiple of tp"):
        configuration.check(c, 32)
    assert VOCABULARY % 128 == 0
