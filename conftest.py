"""Define the tests' fixtures: processes connected by Gloo (`testing/workers.py`), and a tiny data set."""

import testing.environment  # noqa: F401  # isort: skip: it sets variables that torch reads
import subprocess
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("testing")  # its asserts print the compared values
from errors import UserError  # noqa: E402
from testing.tiny import write_tokens  # noqa: E402
from testing.workers import Workers  # noqa: E402
from tokenizer import load_tokenizer  # noqa: E402

GIT = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(__file__).parent, capture_output=True).returncode == 0
needs_git = pytest.mark.skipif(not GIT, reason="needs git, and the project as a clone of this user")


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def workers(tmp_path_factory):
    pool = Workers(tmp_path_factory.mktemp("workers"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def tokens_dir(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="session")
def gpt2():
    """GPT-2's Tokenizer. Without its files and the network, a test that needs it is skipped."""
    try:
        return load_tokenizer("gpt2")
    except UserError as error:
        pytest.skip(f"GPT-2's vocabulary is not available: {error}")


@pytest.fixture
def no_gpu(monkeypatch):
    """The program sees no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
