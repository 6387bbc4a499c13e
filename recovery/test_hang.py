"""A rank that waits too long writes what it waits for. A long validation is no hang."""

import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from parallel.comm import all_reduce
from parallel.mesh import Mesh
from recovery import hang


def asleep(folder, sleeper):
    """Rank `sleeper` sleeps for a while, and the others wait for it in the second all_reduce.

    Return the ranks of each table that this rank prints.
    """
    mesh, dog, tables = Mesh(), hang.Watchdog(), []
    table = mock.patch.object(hang, "hang_table", lambda rows, *_: tables.append(sorted(rows)))
    with table, mock.patch.object(hang.time, "time", lambda: 0):  # a clock far from the file system's
        dog.watch(mesh, folder, 1.5)
        all_reduce(torch.ones(1), mesh.world, "numbers").wait()
        dog.progress("iteration 2")
        if mesh.rank == sleeper:
            earlier = Path(folder, "hang/-1")  # a row of a table before
            earlier.parent.mkdir()
            earlier.touch()
            os.utime(earlier, (0, 0))
            time.sleep(3.5)
        all_reduce(torch.ones(1), mesh.world, "numbers").wait()
    return tables


def busy(folder):
    dog = hang.Watchdog()
    dog.watch(Mesh(), folder, 1.0)
    for _ in range(10):
        dog.progress("validation")
        time.sleep(0.3)


def test_a_long_validation_is_no_hang(workers, tmp_path):
    workers.run(2, busy, str(tmp_path))
    assert not (tmp_path / "hang").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sleeper", [0, 2])
def test_each_rank_writes_the_communication_that_it_waits_for(workers, tmp_path, sleeper):
    tables = [table for tables in workers.run(3, asleep, str(tmp_path), sleeper) for table in tables]
    assert tables and not any(-1 in table for table in tables)
    (tmp_path / "hang/-1").unlink()
    rows = {int(path.name): path.read_text() for path in (tmp_path / "hang").iterdir()}
    assert rows.keys() == {0, 1, 2}
    for rank, row in rows.items():
        others = [other for other in range(3) if other != rank]
        waits = f"waits for ranks {others} in all_reduce 2 of numbers over world"
        assert row.startswith(f"iteration 2: {'waits for no communication' if rank == sleeper else waits}")
        assert rank == sleeper or "(comm.py:" in row, "the row names no function of the program"
