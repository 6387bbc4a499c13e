"""Choose the operations around the matrix products: from `reference.py`, or their fused forms from `kernels.py`."""

import os
from types import SimpleNamespace

import torch

import reference
from errors import UserError, reading

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolved_dtype(config, device):
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def choose(config, device, dtype):
    """Return the operations that --kernels selects. Raises UserError.

    auto, on a GPU: the Triton kernels, but PyTorch's attention, which should be faster (not measured yet). Its backward
    may give other last bits in each run.
    """
    choice, gpu = config.kernels, device.type == "cuda"
    if choice == "torch" or (choice == "auto" and (not gpu or dtype == "fp64")):
        return reference
    try:
        import kernels
    except ImportError:
        if choice == "auto":
            return reference
        raise UserError("kernels=triton: triton is not installed; pip install triton, or set --kernels=torch") from None
    if dtype == "fp64":
        raise UserError("kernels=triton: the kernels compute in float32, not in float64; set --kernels=torch")
    if not gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError("kernels=triton: there is no GPU here; set --kernels=torch (TRITON_INTERPRET=1: a slow test)")
    if choice == "triton" and config.head_size > 128:
        raise UserError(f"kernels=triton: heads of {config.head_size} are too wide for attention: at most 128")
    fused = {name: getattr(kernels, name) for name in reference.OPERATIONS}
    if choice == "auto" or not reference.is_causal(config.seq_length):  # flash_attention.py is causal
        fused["attention"] = reference.attention
    return SimpleNamespace(**vars(reference) | fused)


def trial(config, device):
    """Check that an operation runs: Triton needs a C compiler and Python's headers on every node. Raises UserError.

    Also choose the function for products of 16-bit factors, which waits for the GPU, so that no step waits.
    """
    dtype = resolved_dtype(config, device)
    if DTYPES[dtype].itemsize == 2:
        reference.mixed_product(device.type, DTYPES[dtype])
    ops = choose(config, device, dtype)
    # The error may come from Triton, from the C compiler or from the driver.
    with reading(f"kernels={config.kernels} does not run here, --kernels=torch does", Exception):
        ones = torch.ones(16, 16, device=device)
        ops.add_rows_(torch.zeros_like(ones), torch.arange(16, device=device), ones)
