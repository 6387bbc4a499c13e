"""Compares the losses and gradient norms of two runs: `python -m bench same --one=out/one --other=out/other`."""

import math
from pathlib import Path

from accounts.metrics import read_metrics
from errors import UserError, reading


def measure(one: str = "", other: str = "", digits: int = 4):
    """Compare each logged step of two runs. Exit code 2 if a loss or a gradient norm differs.

    --one, --other   the out_dirs
    --digits         relative difference: at most 10^-digits
    """
    with reading(f"--one={one} --other={other}"):
        rows, other_rows = (read_metrics(Path(folder, "metrics.jsonl")) for folder in (one, other))
    if rows.keys() != other_rows.keys() or not rows:
        raise UserError(f"--one={one} --other={other}: steps {[*rows]} and {[*other_rows]}; should be the same")
    for step, row in rows.items():
        for name in ("lm_loss", "grad_norm"):
            a, b = row[name], other_rows[step][name]
            if not math.isclose(a, b, rel_tol=10**-digits):
                raise UserError(f"iteration {step}: {name} {a} in {one}, {b} in {other}; should be equal")
    print(f"{other}: {len(rows)} steps as {one}")
