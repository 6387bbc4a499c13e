"""A dry run sends and keeps the bytes of the formulas, which test_ledger.py and test_memory.py compare with runs."""

import math
import subprocess
import sys

import pytest

from accounts.metrics import max_resident
from config import Config
from testing import dry_run
from testing.compare import same_rows


def dry(config, gpus, rank):
    """Return the bytes that a rank of a dry run keeps. Raises Different unless all bytes are those of the formulas."""
    with dry_run.started(config, gpus, rank) as run:
        sent, kept = dry_run.step(run)
    for table in (sent, kept):
        same_rows(f"rank {rank} of {gpus}", table["bytes"], table["formula"])
    return kept["bytes"]


TRILLION = dict(  # Narayanan et al. (arXiv 2104.04473), Table 1, last row: 1008 billion parameters on 3,072 GPUs
    num_layers=128, hidden_size=25600, num_attention_heads=160, seq_length=2048, vocab_size=51200, micro_batch_size=1,
    tp=8, pp=64, train_iters=1,
)  # fmt: skip


def one_rank_of_a_trillion():
    """Print a rank's parameters, and this process's MiB."""
    kept = dry(Config(**TRILLION, global_batch_size=6 * 64), 3072, 43)
    print(kept["parameters"] // 2, max_resident() // 2**20)


@pytest.mark.slow
def test_a_rank_of_a_trillion_parameters_fits_in_one_gibibyte():
    code = "from testing import test_dry_run; test_dry_run.one_rank_of_a_trillion()"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    elements, mebibytes = map(int, done.stdout.split())
    # 2 blocks; tp cuts the matrices, 12 h^2, and the biases of qkv and fc1, 7 h, of 13 h
    h = TRILLION["hidden_size"]
    assert elements == 2 * 96 * math.ceil((12 * h * h // 8 + 7 * h // 8 + 6 * h) / 96)
    assert mebibytes < 1024


def test_zero_3_over_1024_ranks_equals_the_formulas():
    fields = dict(num_layers=6, hidden_size=12288, num_attention_heads=96, seq_length=2048, vocab_size=51200)
    config = Config(**fields, micro_batch_size=1, global_batch_size=1024, zero=3, train_iters=1)
    assert dry(config, 1024, 1000)["parameters"] < 2 * (6 * 12 * 12288**2 + 2 * 51200 * 12288) / 1024
