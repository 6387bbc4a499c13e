"""Prepares test files that run Triton kernels on the CPU, in sanitizer.py's interpreter.

The import, before `import kernels`, skips the test file if Triton is missing or old, or there is a GPU:

    from testing.interpreted import DTYPES, poisoned  # noqa: F401
"""

import pytest
import torch

pytest.importorskip("triton", minversion="3.7")  # in an older interpreter most kernels fail: it reads [1] as a number
if torch.cuda.is_available():
    pytest.skip("there is a GPU: Triton compiles its kernels (bench/ checks them)", allow_module_level=True)

from testing import sanitizer

sanitizer.install()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill new memory with nan: so tests find elements that a kernel does not write."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, real=real, **k: poison(real(*a, **k)))


def poison(x):
    return x.fill_(torch.nan) if x.is_floating_point() and not x.is_meta else x
