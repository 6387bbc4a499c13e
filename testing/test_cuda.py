"""Test training on a GPU, whose kernels Triton has compiled: `pytest -m cuda`. Skipped without one.

test_log.py and test_data.py have two more tests with this mark.
"""

import itertools

import pytest
import torch

import reference
import train
from testing.tiny import built, tiny_batches, tiny_config

pytestmark = pytest.mark.cuda

LLAMA = dict(model="llama", num_query_groups=2, ffn_hidden_size=48)


def trained(device, mode, **fields):
    """Return (loss, gradient norm) of three steps. mode: of waiting for the GPU, after the first one."""
    run = built(tiny_config(1, dtype="fp32", **fields), device=torch.device(device))
    batches = iter([*itertools.islice(tiny_batches(run), 9)])
    pending = [train.train_step(run, batches)]  # compiles
    torch.cuda.set_sync_debug_mode(mode)
    pending += [train.train_step(run, batches) for _ in range(2)]
    torch.cuda.set_sync_debug_mode("default")
    return [step.read()[:2] for step in pending]


@pytest.mark.parametrize(
    "fields",
    [dict(dropout=0.1), dict(kernels="triton"), LLAMA | dict(recompute="full")],
    ids=["dropout", "triton", "llama"],
)
def test_a_gpu_trains_as_the_cpu_and_the_host_never_waits(fields):
    """A host that waits for a number queues no work, and the GPU idles."""
    gpu = trained("cuda:0", "error", **fields)
    for ours, right in zip(gpu, trained("cpu", "default", **fields | dict(kernels="torch")), strict=True):
        assert ours == pytest.approx(right, rel=1e-3)


def test_a_product_of_bf16_is_added_to_float32_in_one_pass():
    assert reference.mixed_product("cuda", torch.bfloat16) is reference.MIXED[0]
