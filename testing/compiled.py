"""Compile the kernels of training steps for a GPU that is not here, and print their names.

    python -m testing.compiled 80                 for the compute capability 8.0

The steps run on tensors without values (PyTorch's device "meta"). Each launch compiles its kernel, and starts nothing.
A kernel whose numbers do not fit into the registers spills them to a stack in memory: an error.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

import flash_attention
import kernels
import operations
import train
from parallel.mesh import Mesh
from testing.tiny import tiny_config

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
LLAMA = dict(model="llama", num_query_groups=4, ffn_hidden_size=2816)
STEPS = {}, dict(dropout=0.1, activation="relu"), dict(num_attention_heads=8), LLAMA, LLAMA | dict(dropout=0.1)


def compile_steps(arch):
    """arch: the compute capability, 80 for 8.0."""
    launch, choose, meta = triton.JITFunction.run, operations.choose, torch.device("meta")

    def compile_only(kernel, *arguments, **named):
        assert all(getattr(x, "is_meta", True) for x in arguments), f"{kernel.__name__}: a tensor is on the CPU"
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(launch(kernel, *arguments, **named | dict(warmup=True)).asm["cubin"])
            usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        assert "STACK:0 " in usage, f"{kernel.__name__} spills: {usage}"
        print(kernel.__name__)

    gpu = dict(current_device=0, current_stream=0, current_target=GPUTarget("cuda", arch, 32))
    driver = SimpleNamespace(**{f"get_{name}": lambda *_, x=x: x for name, x in gpu.items()})
    triton.runtime.driver.set_active(driver)
    triton.JITFunction.run, torch.Tensor.is_cuda = compile_only, property(lambda x: x.is_meta)
    kernels.persistent = lambda x, each: each * 132
    flash_attention.capability = lambda device: divmod(arch, 10)
    operations.choose = lambda config, device, dtype: choose(config, torch.device("cuda"), dtype)
    train.PendingStep = mock.MagicMock()
    # Before 8.0 there is no bf16, and the attention of flash_attention.py does not fit.
    fields = dict(dtype="bf16", kernels="triton") if arch >= 80 else dict(dtype="fp16", kernels="auto")
    fields |= dict(num_layers=1, hidden_size=1024, num_attention_heads=16, seq_length=2048)
    ids, samples = torch.zeros(1, 2048, dtype=torch.int64, device=meta), torch.arange(1, device=meta)
    for more in STEPS:
        run = train.build_run(tiny_config(1, **fields | more, micro_batch_size=1, global_batch_size=1), Mesh(), meta)
        train.train_step(run, iter([run.model.micro_batch(ids, ids, samples)]))


if __name__ == "__main__":
    compile_steps(int(sys.argv[1]))
