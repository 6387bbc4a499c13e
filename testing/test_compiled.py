"""testing/compiled.py recognizes bad machine code, without a GPU."""

import importlib.util

import pytest

from testing import compiled

pytestmark = pytest.mark.slow

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
for tool in ("cuobjdump", "nvdisasm"):
    if not compiled.tool(tool).exists():
        pytest.skip(f"this version of Triton has no {tool}", allow_module_level=True)

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def scale(x, y, bias, a, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n).to(tl.float32) * a
    if bias is not None:
        value += tl.load(bias)
    tl.store(y + i, value, mask=i < n)

@triton.jit
def multiply(a, b, c, k, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    total = tl.zeros([N, N], tl.float32)
    for step in range(k):
        total = tl.dot(tl.load(a + at + step * N * N), tl.load(b + at + step * N * N), total)
    tl.store(c + at, total)
"""


@pytest.fixture
def reports(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "planted_kernels.py").write_text(KERNELS)
    return lambda jobs: compiled.reports([(f"planted_kernels:{name}", *job) for name, *job in jobs], [tmp_path])


def test_a_report_tells_wide_loads_from_narrow_ones(reports):
    """If the mask's limit n may be odd, a thread loads 2 bytes at a time."""
    constants = {"bias": None, "BLOCK": 1024}
    jobs = [("scale", f"*bf16 *bf16 fp32 {n}", constants, arch) for n in ("i32", "i32:1") for arch in (80, 90)]
    *fine, careless_a100, careless_h100 = reports(jobs)
    for r in fine:
        assert r.spills == r.stack == r.shared == 0 and 0 < r.registers <= 32
        assert r.loads == r.wide_loads == 1  # 8 elements in each of 128 threads
    for r in (careless_a100, careless_h100):
        assert r.loads == 8 and r.wide_loads == 0


def test_a_report_counts_tensor_cores_and_spills(reports):
    """Ampere, Hopper, and a tile too large for one warp's registers."""
    types = "*bf16 *bf16 *fp32 i32"
    jobs = [("multiply", types, {"N": 64}, arch, {"num_warps": 4}) for arch in (80, 90)]
    a100, h100, crowded = reports([*jobs, ("multiply", types, {"N": 128}, 80, {"num_warps": 1})])
    assert a100.hmma and not a100.hgmma and h100.hgmma and not h100.hmma
    for r in (a100, h100):
        assert r.async_copies and r.shared and not r.spills and not r.loads
    assert crowded.spills and crowded.stack and crowded.registers >= 254
