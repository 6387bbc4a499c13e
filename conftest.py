"""Define the tests' fixtures: processes connected by Gloo (`testing/workers.py`), and a tiny data set.

Importing torch and Triton reads the environment variables.
"""

import json
import os
import subprocess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # up to eight processes share the cores
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # Gloo connects only ranks that send: a seventh of a test's time
vocabulary = Path(__file__).parent / "../shared/tiktoken"
if vocabulary.is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(vocabulary.resolve()))

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():  # the workers inherit the environment
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.register_assert_rewrite("testing")  # its asserts print the compared values
from testing.workers import Workers  # noqa: E402

GIT = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(__file__).parent, capture_output=True).returncode == 0
needs_git = pytest.mark.skipif(not GIT, reason="needs git, and the project as a clone of this user")


@pytest.fixture(scope="session")
def workers(tmp_path_factory):
    pool = Workers(tmp_path_factory.mktemp("workers"))
    yield pool
    pool.stop()


def write_tokens(folder, train=4000, val=700, test=300, vocab_size=100, tokenizer="bytes", seed=0):
    """Write a data set of random tokens, which a model can learn: a token is often the previous one plus 1."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    counts = {"train": train, "val": val, "test": test}
    for split, count in counts.items():
        steps = random.choice([1, 1, 1, 2, 7], size=count)
        (steps.cumsum() % vocab_size).astype("<u2").tofile(folder / f"{split}.bin")
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eot_id": vocab_size - 1, "dtype": "uint16"}
    meta |= {"tokens": counts, "documents": dict.fromkeys(counts, 1)}
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


@pytest.fixture(scope="session")
def tokens_dir(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))
