"""Test the sweep: its grid, a failing layout, a repeated sweep, the table."""

from dataclasses import replace

import pytest

from bench import sweep
from config import Config
from errors import UserError

SIZES = dict(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=50, global_batch_size=4)
SMALL = Config(**SIZES, train_iters=9, eval_iters=0, log_interval=1)

pytestmark = pytest.mark.slow  # no part of the program


def test_a_sweep_has_every_accepted_layout():
    """Micro-batches of 1 and 2 with dp = 2, and of 1, 2 and 4 with tp = 2 or pp = 2."""
    found = [(c.tp, c.pp, c.micro_batch_size) for c in sweep.accepted(SMALL, 2)]
    assert found == [(1, 1, 1), (1, 1, 2), *[(1, 2, b) for b in (1, 2, 4)], *[(2, 1, b) for b in (1, 2, 4)]]
    with pytest.raises(UserError, match="--processes=5: no layout suits this configuration; for example: "):
        sweep.accepted(SMALL, 5)


def test_a_sweep_survives_a_failure(tmp_path, capsys, monkeypatch):
    (tmp_path / "small.py").write_text("".join(f"{name} = {value}\n" for name, value in SIZES.items()))
    monkeypatch.chdir(tmp_path)
    grid = [replace(SMALL, tp=3), replace(SMALL, tp=2), replace(SMALL, pp=2)]  # 2 heads do not suit 3
    monkeypatch.setattr(sweep, "accepted", lambda base, _: [replace(base, tp=c.tp, pp=c.pp) for c in grid])
    sweep.measure("small.py", 2, steps=3, device="h100", only="tp=3")
    out = capsys.readouterr().out
    assert "tp=3 pp=1 micro_batch_size=8: failed: " in out and "num_attention_heads" in out

    def measured(name, *_):
        return "failed: no" if "tp=3" in name else [5.0, 4.0] if "tp=2" in name else [2.0, 1.0]

    monkeypatch.setattr(sweep, "run", measured)
    sweep.measure("small.py", 2, steps=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "|" in line][1:] == ["pp=2", "pp=1"]  # the fastest first


def test_a_run_has_the_times_of_its_steps(tmp_path):
    sweep.prepare(replace(SMALL, micro_batch_size=2, data_dir=str(tmp_path / "data")), tmp_path)
    row = sweep.run("tp=1 pp=2 micro_batch_size=2", 2, tmp_path)
    assert len(row) == SMALL.train_iters - sweep.WARMUP and min(row) > 0
