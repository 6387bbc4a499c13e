"""errors.py: what one process locks, others are refused, and a lock ends with the process that holds it."""

import contextlib
import errno
import subprocess
import sys
from pathlib import Path

import pytest

import errors
from errors import UserError, locked

# The holder forks a worker. Both wait for the end of their input.
HOLDER = """
import os, sys
from errors import locked
with locked(sys.argv[1], ""):
    if os.fork():
        print("locked", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held_elsewhere(path):
    """Another process, with a worker, that holds the lock of the file `path` while the block runs."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=Path(__file__).parent, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process


def test_a_lock_is_refused_while_another_process_holds_it(tmp_path):
    path = tmp_path / "lock"
    with held_elsewhere(path), pytest.raises(UserError, match="it is taken"), locked(path, "it is taken"):
        pass
    with locked(path, "it is taken"):
        assert path.exists()


def test_a_lock_ends_with_its_process_though_a_worker_lives_on(tmp_path):
    with held_elsewhere(tmp_path / "lock") as process:
        process.kill()
        process.wait()
        with locked(tmp_path / "lock", "it is taken"):
            pass


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^\S+/missing/lock: No such file or directory$"):
        with locked(tmp_path / "missing" / "lock", "it is taken"):
            pass


def test_a_file_system_without_locks_is_used_without_them(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(errors.fcntl, "lockf", lockf)
    with locked(tmp_path / "lock", "it is taken"):
        assert (tmp_path / "lock").exists()
