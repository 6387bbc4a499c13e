"""The common beginning of test files that run Triton's kernels on the CPU, in the sanitized interpreter.

    from testing.interpreted import DTYPES, poisoned, random  # noqa: F401

skips the importing test file where its kernels cannot be interpreted. So it stands before `import kernels`.
"""

import pytest
import torch

pytest.importorskip("triton", reason="no Triton on this machine: reference.py serves alone")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: Triton is itself here, not interpreted (bench/ checks it)", allow_module_level=True)

from testing import sanitizer

sanitizer.install()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fills the memory that a kernel is given to write with nan: an element that the kernel leaves out shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, real=real, **k: poison(real(*a, **k)))


def poison(x):
    return x.fill_(torch.nan) if x.is_floating_point() and not x.is_meta else x


def random(*shape, dtype=torch.float32, seed=0, size=1.0):
    """Normal random numbers of standard deviation `size`; the same for the same seed."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)
