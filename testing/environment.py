"""Sets environment variables that torch, Triton and tiktoken read at their import. Import this file first."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # up to eight processes share the cores
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # Gloo connects only ranks that send: a seventh of a test's time
vocabulary = Path(__file__).parent / "../../shared/tiktoken"
if vocabulary.is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(vocabulary.resolve()))

import torch  # noqa: E402

if not torch.cuda.is_available():  # the workers inherit the environment
    os.environ.setdefault("TRITON_INTERPRET", "1")
