"""Compiles a kernel without needing its GPU, and counts instructions in the machine code. For tests only.

`report` compiles ahead of time and reads the machine code with Triton's disassemblers. The machine code shows whether a
kernel spills registers to memory, loads 2 bytes instead of 16, or does not use the tensor cores:

    r = compiled.report(copy, "*bf16 *bf16 i32", {"BLOCK": 1024}, 90, num_warps=4)
    assert r.spills == 0 and r.wide_loads == r.loads

A process can use Triton's compiler or its interpreter (TRITON_INTERPRET=1, sanitizer.py), not both. The other tests on
a CPU need the interpreter. So `reports` compiles a list of kernels in a separate process:

    [a, b] = compiled.reports([("copies:copy", "*bf16 *bf16 i32", {"BLOCK": 1024}, arch) for arch in (80, 90)])

An elementwise kernel takes 0.1 to 0.3 seconds, attention up to 3, and `import triton` up to 3 more. The counts differ a
little between versions of Triton.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class Report(NamedTuple):
    """registers: per thread, at most 255. stack: bytes per thread. shared: bytes per program. The other fields count
    instructions in the machine code. An instruction in a loop counts once."""

    registers: int
    stack: int
    shared: int
    spills: int  # stores to and loads from the stack (STL, LDL), because there are too few registers
    loads: int  # from global memory to registers (LDG)
    wide_loads: int  # 16 bytes or more per thread, for the full bandwidth
    narrow_loads: int  # 1 or 2 bytes per thread
    stores: int  # to global memory (STG)
    wide_stores: int
    narrow_stores: int
    async_copies: int  # from global to shared memory, in parallel with arithmetic (LDGSTS)
    wide_async_copies: int  # 16 bytes per thread
    hgmma: int  # Hopper's tensor cores (HGMMA)
    hmma: int  # the tensor cores of Ampere and before (HMMA)
    barriers: int  # all warps of a program wait for each other (BAR)

    def programs(self, num_warps, arch):
        """Return the number of programs that fit on a multiprocessor at once (arch 80 or 90): its *occupancy*.

        A multiprocessor has 64 warps and 65536 registers, a quarter of both in each of 4 parts. A warp's registers are
        allocated in groups of 256. Each program has 1 KB of shared memory more than it asks for. (CUDA C++ Programming
        Guide, tables of compute capabilities)
        """
        warps = min(65536 // 4 // (-(-self.registers // 8) * 8 * 32), 16) * 4
        return min(warps // num_warps, {80: 164, 90: 228}[arch] * 1024 // (self.shared + 1024), 32)


def report(kernel, types, constants, arch, **options):
    """Compile a `@triton.jit` function and return its Report.

    types: types of the arguments that are not in `constants`, in order, as in "*bf16 *fp32 i32 fp32"; * is a pointer.
    Pointers and integers are assumed to be divisible by 16, except "i32:1" and "*bf16:1". At a real launch, Triton
    checks the divisibility. constants: {name: value} of each `tl.constexpr` and of each argument that is None.
    arch: 80 (A100), 90 (H100, H200), ... options: num_warps, num_stages, ...
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(kernel, triton.JITFunction):
        raise TypeError(f"{kernel!r} cannot be compiled: it has no @triton.jit, or TRITON_INTERPRET is set")
    runtime = [name for name in kernel.arg_names if name not in constants]
    written = dict(zip(runtime, types.split(), strict=True))
    signature = {name: written.get(name, "constexpr").removesuffix(":1") for name in kernel.arg_names}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if re.fullmatch(r"(\*.*|[iu]\d+)(?<!:1)", written.get(name, ""))
    }
    source = ASTSource(kernel, signature, constants, divisible)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage = disassembled("cuobjdump", "-res-usage", binary.asm["cubin"])
    code = disassembled("nvdisasm", "-c", binary.asm["cubin"])

    def count(instruction):
        return len(re.findall(rf"\b{instruction}", code))

    return Report(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        shared=binary.metadata.shared,
        spills=count(r"(STL|LDL)\b"),
        loads=count(r"LDG\b"),
        wide_loads=count(r"LDG\.\S*(128|256)\b"),
        narrow_loads=count(r"LDG\.\S*[US](8|16)\b"),
        stores=count(r"STG\b"),
        wide_stores=count(r"STG\.\S*(128|256)\b"),
        narrow_stores=count(r"STG\.\S*[US](8|16)\b"),
        async_copies=count(r"LDGSTS\b"),
        wide_async_copies=count(r"LDGSTS\.\S*128\b"),
        hgmma=count(r"HGMMA\b"),
        hmma=count(r"HMMA\b"),
        barriers=count(r"BAR\b"),
    )


def tool(name):
    """Return the path of a disassembler in Triton's package, without importing Triton."""
    package = Path(importlib.util.find_spec("triton").origin).parent
    return package / "backends/nvidia/bin" / name


def disassembled(name, option, cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool(name), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def reports(jobs, path=()):
    """Return a Report of each job ("module:kernel", types, constants, arch[, options]), compiled in another process.

    The values of constants and options must be JSON values. path: folders that are searched first for modules.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(Path(__file__).parent.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "testing.compiled"],
        input=json.dumps(jobs),
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"compilation failed:\n{done.stderr}")
    return [Report(*r) for r in json.loads(done.stdout.splitlines()[-1])]


def main():
    results = []
    for kernel, types, constants, arch, *options in json.load(sys.stdin):
        module, name = kernel.split(":")
        kernel = getattr(importlib.import_module(module), name)
        results.append(report(kernel, types, constants, arch, **(options[0] if options else {})))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
