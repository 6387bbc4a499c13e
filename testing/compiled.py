"""Compiles a kernel without needing its GPU, and counts instructions in the machine code. For tests only.

The machine code shows whether a kernel spills registers to memory, loads 2 bytes instead of 16, or does not use the
tensor cores:

    r = compiled.report(copy, "*bf16 *bf16 i32", {"BLOCK": 1024}, 90, num_warps=4)
    assert r["spills"] == 0 and r["wide_loads"] == r["loads"]

A process can use Triton's compiler or its interpreter (sanitizer.py), not both. So `reports` compiles in another
process:

    [a, b] = compiled.reports([("copies:copy", "*bf16 *bf16 i32", {"BLOCK": 1024}, arch, {}) for arch in (80, 90)])
    assert a.spills == b.spills == 0

`Recorder` finds the types that a program uses. The counts differ a little between versions of Triton.
"""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

# Instructions of the machine code. One in a loop counts once.
INSTRUCTIONS = dict(
    spills=r"(STL|LDL)\b",  # stores to the stack and loads from it
    loads=r"LDG\b",  # from global memory to registers
    wide_loads=r"LDG\.\S*(128|256)\b",  # 16 bytes or more per thread
    async_copies=r"LDGSTS\b",  # from global to shared memory, beside arithmetic
    wide_async_copies=r"LDGSTS\.\S*128\b",
    hgmma=r"HGMMA\b",  # Hopper's tensor cores
    hmma=r"HMMA\b",  # Ampere's and older tensor cores
)
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
TYPES |= {torch.int64: "i64", torch.bool: "i1"}


# --- launches ---------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for `module.kernel`. A launch runs nothing and adds a job of `reports`, without arch, to `found`.

    All tensors must be on `device`.
    """

    def __init__(self, kernel, found, device):
        self.kernel, self.found, self.device = kernel, found, device

    def __getitem__(self, grid):
        return lambda *arguments, **named: self.found.append(self.job(arguments, named))

    def job(self, arguments, named):
        signature, jit_options = inspect.signature(self.kernel.fn), self.kernel.kwargs
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        types, constants = [], {}
        for name, value in signature.bind(*arguments, **named).arguments.items():
            device = getattr(value, "device", self.device)
            assert device == self.device, f"{self.kernel.fn.__name__}: {name} is on {device}"
            specialized = name not in (jit_options["do_not_specialize"] or ())
            is_one = specialized and type(value) is int and value == 1
            if value is None or is_one or "constexpr" in str(signature.parameters[name].annotation):
                constants[name] = value
            else:
                types.append(type_of(value, specialized))
        return f"{self.kernel.fn.__module__}:{self.kernel.fn.__name__}", " ".join(types), constants, options


def type_of(value, specialized):
    """Return the type of an argument, in the notation of `report`."""
    if isinstance(value, torch.Tensor):
        divisible = value.storage_offset() * value.element_size() % 16 == 0
        return f"*{TYPES[value.dtype]}" + ":1" * (not divisible)
    if isinstance(value, float):
        return "fp32"
    return ("i32" if -(2**31) <= value < 2**31 else "i64") + ":1" * (not specialized or value % 16 != 0)


# --- machine code -----------------------------------------------------------------------------------------------------


def report(kernel, types, constants, arch, **options):
    """Compile a `@triton.jit` function. Return {name: number}: INSTRUCTIONS, registers and stack (bytes) of a thread,
    shared memory (bytes) of a program.

    types: of the arguments not in `constants`, as "*bf16 *fp32 i32 fp32"; * is a pointer. Pointers and integers are
    divisible by 16, except "i32:1" and "*bf16:1". constants: {name: value} of each `tl.constexpr` and each None.
    arch: 80 (A100), 90 (H100, H200). options: num_warps, num_stages.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    runtime = [name for name in kernel.arg_names if name not in constants]
    written = dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(runtime, types.split(), strict=True))
    signature = {name: kind.removesuffix(":1") for name, kind in written.items()}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(written.values())
        if kind[0] in "*i" and not kind.endswith(":1")
    }
    source = ASTSource(kernel, signature, constants, divisible)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage = disassembled("cuobjdump", "-res-usage", binary.asm["cubin"])
    code = disassembled("nvdisasm", "-c", binary.asm["cubin"])
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    counts = {name: len(re.findall(rf"\b{pattern}", code)) for name, pattern in INSTRUCTIONS.items()}
    return dict(registers=registers, stack=stack, shared=binary.metadata.shared, **counts)


def disassembled(name, option, cubin):
    """Return what a tool in Triton's package prints."""
    tool = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def reports(jobs):
    """Return `report` of each job ("module:kernel", types, constants, arch, options), compiled in another process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command, root = [sys.executable, "-m", "testing.compiled"], Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, input=json.dumps(jobs), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compilation failed:\n{done.stderr}")
    return [SimpleNamespace(**r) for r in json.loads(done.stdout.splitlines()[-1])]


def main():
    results = []
    for kernel, types, constants, arch, options in json.load(sys.stdin):
        module, name = kernel.split(":")
        kernel = getattr(importlib.import_module(module), name)
        results.append(report(kernel, types, constants, arch, **options))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
