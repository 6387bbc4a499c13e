"""Which functions a run uses around its matrices: those of `reference.py` or their fused forms in `kernels.py`."""

import os
from types import SimpleNamespace

import torch

import reference
from errors import UserError

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolved_dtype(config, device):
    """bf16 where the GPU has it, fp16 on older ones, fp32 on a CPU; or what the configuration says."""
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def choose(config, device, dtype):
    """The operations as --kernels says, one by one. dtype: "bf16" ...

    auto: on a GPU, Triton's, except attention, for which PyTorch has the better kernels. Raises UserError.
    """
    choice, gpu = config.kernels, device.type == "cuda"
    if choice == "torch" or (choice == "auto" and (not gpu or dtype == "fp64")):
        return reference
    try:
        import kernels
    except ImportError:
        if choice == "auto":
            return reference
        raise UserError("kernels=triton: triton is not installed; pip install triton, or say kernels=torch") from None
    if dtype == "fp64":
        raise UserError("kernels=triton: they compute in float32, dtype=fp64 does not; say kernels=torch")
    if not gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            "kernels=triton: there is no GPU here; say kernels=torch, or set TRITON_INTERPRET=1 for a trial"
        )
    if choice == "triton" and config.head_size > 128:
        raise UserError(f"kernels=triton: heads of {config.head_size} are too wide for its attention, at most 128")
    fused = {name: getattr(kernels, name) for name in reference.OPERATIONS}
    if choice == "auto":
        fused["attention"] = reference.attention
    return SimpleNamespace(**vars(reference) | fused)  # an operation without a kernel stays the reference's


def trial(config, device):
    """Run one of the operations: Triton needs a C compiler and Python's headers on every node. Raises UserError."""
    ops = choose(config, device, resolved_dtype(config, device))
    try:
        ops.squared_norms([torch.ones(16, device=device)])
    except Exception as error:  # whatever Triton's compiler, the one it calls, or the driver says
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"kernels={config.kernels}: they do not run here ({reason}); say kernels=torch") from error
