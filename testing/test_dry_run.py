"""A dry run sends and keeps the bytes of the formulas, which test_ledger.py and test_memory.py compare with runs."""

import math
import subprocess
import sys
from functools import partial

import pytest
import torch.distributed as dist

import operations
import train
from accounts import ledger, memory
from accounts.metrics import max_resident
from config import Config
from errors import UserError
from parallel import schedules
from testing import dry_run
from testing.tiny import tiny_config


def dry(config, gpus, rank):
    with dry_run.started(config, gpus, rank) as run:
        return dry_run.step(run)


bf16 = partial(tiny_config, dtype="bf16")


def every_kind():
    """Return [(configuration, number of ranks, rank)] of each schedule with two ZeRO stages."""
    found = []
    for i, schedule in enumerate(schedules.SCHEDULES):
        chunks = schedules.usual_chunks(schedule)
        fields = dict(pp=2, schedule=schedule, chunks=chunks, num_layers=3, micro_batch_size=3, activation="relu")
        for zero in (i % 2, 2 + i % 2):
            dtype, sp = ("fp32", "bf16")[(i + zero // 2) % 2], (i + zero) % 2 == 0
            recompute, dropout = ("none", "full")[i % 2], 0.1 * (zero // 2 == i % 2)
            modes = dict(dtype=dtype, sequence_parallel=sp, recompute=recompute, dropout=dropout)
            rank = 6 if (i + zero) % 3 else 3  # dp, pp and tp ranks 110 or 011
            found.append((tiny_config(2, 2, zero=zero, **fields, **modes), 8, rank))
    found += [
        (bf16(1), 1, 0),
        (bf16(3, zero=3), 3, 1),
        (bf16(1, 8), 8, 6),
        (bf16(2, 2, cp=2, sequence_parallel=True), 8, 3),
    ]
    found += [
        (bf16(1, cp=4, zero=3, recompute="full"), 4, 2),
        (bf16(8, zero=3, zero_copies=2), 8, 5),
    ]
    return [*found, (bf16(2, pp=4, num_layers=6, dropout=0.1, recompute="full", micro_batch_size=4), 8, 3)]


@pytest.mark.parametrize("config, gpus, rank", every_kind(), ids=lambda x: getattr(x, "schedule", x))
def test_every_kind_of_layout_equals_the_formulas(config, gpus, rank):
    assert dry_run.differences(*dry(config, gpus, rank)) == []


# --- sizes that do not run here ---------------------------------------------------------------------------------------

TRILLION = dict(  # Narayanan et al. (arXiv 2104.04473), Table 1, last row: 1008 billion parameters on 3,072 GPUs
    num_layers=128, hidden_size=25600, num_attention_heads=160, seq_length=2048, vocab_size=51200, micro_batch_size=1,
    tp=8, pp=64, train_iters=1,
)  # fmt: skip


def one_rank_of_a_trillion():
    """Print whether one rank agrees with the formulas, its parameters, and this process's MiB."""
    sent, kept = dry(Config(**TRILLION, global_batch_size=6 * 64), 3072, 43)
    agrees, elements = not dry_run.differences(sent, kept), kept["bytes"]["parameters"] // 2
    print(agrees, elements, max_resident() // 2**20)


@pytest.mark.slow
def test_a_rank_of_a_trillion_parameters_fits_in_one_gibibyte():
    code = "from testing import test_dry_run; test_dry_run.one_rank_of_a_trillion()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    agrees, elements, mebibytes = done.stdout.split()
    # 2 blocks; tp cuts the matrices, 12 h^2, and the biases of qkv and fc1, 7 h, of 13 h
    h = TRILLION["hidden_size"]
    assert (agrees, int(elements)) == ("True", 2 * 96 * math.ceil((12 * h * h // 8 + 7 * h // 8 + 6 * h) / 96))
    assert int(mebibytes) < 1024


def test_zero_3_over_1024_ranks_equals_the_formulas():
    fields = dict(num_layers=6, hidden_size=12288, num_attention_heads=96, seq_length=2048, vocab_size=51200)
    config = Config(**fields, micro_batch_size=1, global_batch_size=1024, zero=3, train_iters=1)
    sent, kept = dry(config, 1024, 1000)
    assert dry_run.differences(sent, kept) == []
    assert kept["bytes"]["parameters"] < 2 * (6 * 12 * 12288**2 + 2 * 51200 * 12288) / 1024


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_makes_a_dry_run(capsys):
    words = "configs/tiny.py --gpus=4 --rank=3 --tp=2 --dtype=bf16 --micro_batch_size=1"
    dry_run.main(words.split())
    assert "rank 3 of 4: dp 1 of 2" in capsys.readouterr().out
    with pytest.raises(UserError, match="--gpus: 0: should be 1 to"):
        dry_run.main(["--gpus=0"])


def test_a_dry_run_prints_its_tables_and_that_they_agree(capsys):
    dry_run.show(bf16(2, 2, pp=2, zero=1), 8, 5)
    out = capsys.readouterr().out
    assert "rank 5 of 8: dp 1 of 2, pp 0 of 2, cp 0 of 1, tp 1 of 2" in out
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if line.count("|") == 6]
    assert len(rows) > 6 and all(row[5] == row[6] for row in rows[1:])
    assert "The dry run and the formulas agree." in out and "moments" in out


def test_auto_is_bf16_and_the_ramp_up_is_over():
    with dry_run.started(tiny_config(2, dtype="auto", rampup_batch_size="16,8,1000"), 2, 0) as run:
        dry_run.step(run)
        assert run.dtype == "bf16" and run.steps == {3: 1}


@pytest.mark.parametrize("file, row", [(ledger, ("world", "scalars", "all_reduce")), (memory, "moments")])
def test_a_difference_is_named_and_ends_with_code_1(monkeypatch, file, row):
    name, wrong = ("predict_sent", (2, 9)) if file is ledger else ("predict_kept", 1)
    formula = getattr(file, name)
    monkeypatch.setattr(file, name, lambda *a: formula(*a) | {row: wrong})
    with pytest.raises(SystemExit) as ended:
        dry_run.show(bf16(4), 4, 1)
    name = row if isinstance(row, str) else " ".join(row)
    assert ended.value.code == f"different: {name}"


def test_a_dry_run_leaves_nothing_behind():
    before = train.PendingStep, operations.choose
    with pytest.raises(RuntimeError), dry_run.started(bf16(2), 2, 1):
        assert dist.is_initialized() and train.PendingStep is not before[0]
        raise RuntimeError
    assert not dist.is_initialized() and (train.PendingStep, operations.choose) == before
