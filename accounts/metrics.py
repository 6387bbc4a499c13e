"""metrics.jsonl: one line of JSON for each logged iteration."""

import itertools
import json
import math
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path


def to_json(row):
    """JSON has no nan or infinity: they become the strings "nan", "inf" and "-inf"."""
    strange = {name: repr(v) for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps(row | strange, allow_nan=False)


def read_metrics(path):
    """Return {iteration: row} of a metrics.jsonl. A line that a crash cut off, or that is no row, is skipped."""
    rows = {}
    for line in Path(path).read_bytes().splitlines():
        with suppress(ValueError, RecursionError):
            row = json.loads(line, parse_constant=not_json)
            if isinstance(row, dict) and isinstance(row.get("iteration"), int):
                to_json(row)  # 1e999 is inf
                row |= {name: float(v) for name, v in row.items() if v in ("nan", "inf", "-inf")}
                rows[row["iteration"]] = row
    return rows


def not_json(constant):
    raise ValueError(f"{constant} is no JSON")


def set_aside(path):
    """Rename a metrics.jsonl with rows to metrics.1.jsonl, or the next free number. Return the new path, or None."""
    if path.exists() and read_metrics(path):
        names = (path.with_name(f"metrics.{number}.jsonl") for number in itertools.count(1))
        return path.rename(next(name for name in names if not name.exists()))


def keep_rows(path, iteration):
    """Leave only the rows up to `iteration`: a run that resumes there repeats the others."""
    path.touch()
    lines = "".join(f"{to_json(row)}\n" for i, row in read_metrics(path).items() if i <= iteration)
    new = path.with_suffix(".new")
    with open(new, "w") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power loss may leave an empty file
    new.replace(path)


def max_resident():
    """Return the most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)
