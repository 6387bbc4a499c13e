"""Compile the kernels of training steps for a GPU that is not here: python -m testing.compiled 80

The steps run on tensors without values (PyTorch's device "meta"). Each launch compiles its kernel, and starts nothing.
It prints {kernel: the bytes of a thread's stack}: there the compiler spills what does not fit into the registers.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

import flash_attention
import kernels
import operations
import train
from parallel.mesh import Mesh
from testing.tiny import tiny_config

WIDE = dict(num_layers=1, hidden_size=1024, num_attention_heads=16, seq_length=2048, micro_batch_size=1)
LLAMA = dict(model="llama", num_query_groups=4, ffn_hidden_size=2816)
STEPS = {}, dict(dropout=0.1), dict(activation="relu"), dict(num_attention_heads=8), LLAMA, LLAMA | dict(dropout=0.1)


def stack(cubin):
    """Return the bytes of stack of a thread of machine code."""
    tool = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def compiled(arch):
    """Return {kernel: the largest `stack`} of all launches of STEPS. arch: the compute capability, 80 for 8.0."""
    found, launch, choose, meta = {}, JITFunction.run, operations.choose, torch.device("meta")

    def compile_only(kernel, *arguments, **named):
        assert all(getattr(x, "is_meta", True) for x in arguments), f"{kernel.__name__}: a tensor is on the CPU"
        binary = launch(kernel, *arguments, **named | dict(warmup=True))
        found[kernel.__name__] = max(found.get(kernel.__name__, 0), stack(binary.asm["cubin"]))

    gpu = dict(current_device=0, current_stream=0, current_target=GPUTarget("cuda", arch, 32))
    driver.set_active(SimpleNamespace(**{f"get_{name}": lambda *_, x=x: x for name, x in gpu.items()}))
    JITFunction.run, torch.Tensor.is_cuda = compile_only, property(lambda x: x.is_meta)
    kernels.persistent = lambda x, each: each * 132
    flash_attention.capability = lambda device: divmod(arch, 10)
    operations.choose = lambda config, device, dtype: choose(config, torch.device("cuda"), dtype)
    train.PendingStep = mock.MagicMock()
    # Before 8.0 there is no bf16, and the attention of flash_attention.py does not fit.
    fields = WIDE | (dict(dtype="bf16", kernels="triton") if arch >= 80 else dict(dtype="fp16", kernels="auto"))
    ids, samples = torch.zeros(1, 2048, dtype=torch.int64, device=meta), torch.arange(1, device=meta)
    for more in STEPS:
        run = train.build_run(tiny_config(1, **fields | more), Mesh(), meta)
        micro_batches = [run.model.micro_batch(ids, ids, samples) for _ in range(8)]
        train.train_step(run, iter(micro_batches))
    return found


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]))))
