"""Runs Triton kernels on the CPU and reports mistakes that a GPU does not report. For tests only.

With TRITON_INTERPRET=1, Triton runs a kernel in numpy, one program after another. So a kernel can be tested without a
GPU. But Triton's own interpreter misses mistakes and computes bfloat16 wrongly. `install()` changes this. Below, "Now"
means after `install()`:

    bfloat16        Triton stores bfloat16 as bits in uint16, computes with these bits as integers, and truncates
                    float32 to bfloat16. Now: conversions round to nearest even, and `tl.dot` multiplies exactly and
                    adds in float32. Other arithmetic on bfloat16 raises TypeError: convert to float32 first.
    out of bounds   Triton does not check addresses. Now: OutOfBounds names argument, element and program. A pointer
                    contains its argument's index in the 16 bits that addresses do not use. So an access outside of
                    this argument is an error even inside another tensor or in a gap between a view's rows.
    races           Programs that run in turn cannot race. Now: two cases raise Race. Two programs of one launch access
                    the same element and one of them changes it. Two lanes (positions in the stored array) of one store
                    write the same element. (Not checked: a lane that reads what another lane of its program stored.)
    traffic         Triton does not count it. Now: `with traffic() as t` counts the bytes that kernels load and store.
                    The speed of a memory-bound kernel depends on these bytes, so a unit test can check it.

A launch raises the original exception instead of the interpreter's InterpreterError. Integers wrap silently, as in a
kernel that is compiled without debug=True. Atomics are not checked, because no kernel of this project needs them.

    sanitizer.install()
    with sanitizer.traffic() as t:
        copy[grid](x, y, n, BLOCK=1024)
    assert t.loaded["x"] == t.stored["y"] == n * x.element_size()

The interpreter does not model the exchange of registers between threads, the hardware's order of additions in `tl.dot`
or `tl.sum`, tf32, or speed. (compiled.py examines the machine code.)
"""

import functools
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

if not isinstance(tl.sum, interpreter.InterpretedFunction):
    raise ImportError("sanitizer: set the environment variable TRITON_INTERPRET=1 before the first `import triton`")


class OutOfBounds(IndexError):
    """An unmasked lane reads or writes outside of its pointer's tensor."""


class Race(RuntimeError):
    """The value of an element depends on the order of programs or of lanes."""


# --- traffic ----------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Work of the launches in a `with traffic()`. loaded, stored: {argument: bytes}; masked lanes do not count."""

    flops: int = 0  # 2 m n k for each `tl.dot`
    loaded: Counter = field(default_factory=Counter)
    stored: Counter = field(default_factory=Counter)


_counting = []  # the Traffic of each open `with traffic()`
_launch = None  # the current Launch


@contextmanager
def traffic():
    """Yield a Traffic, which counts all launches in the `with` block."""
    _counting.append(Traffic())
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


# --- memory -----------------------------------------------------------------------------------------------------------

TAG = np.uint64(48)  # Addresses have 47 bits. The higher bits contain the argument's index, counted from 1.
ADDRESS = np.uint64((1 << 48) - 1)
NOBODY, SEVERAL = -1, -2  # They stand for the index of a program.


class Argument:
    """One tensor of a launch: the elements of its storage that belong to it, and the accesses to them.

    accesses: the program that loaded each element of the storage, and the program that stored it, int32 [2, elements].
    Arguments may share a storage, such as q, k and v of one qkv.
    """

    def __init__(self, name, tensor, accesses):
        self.name, self.tensor, (self.loads, self.stores) = name, tensor, accesses
        self.item, self.first = tensor.element_size(), tensor.storage_offset()
        self.storage = tensor.data_ptr() - self.first * self.item  # address of the storage
        belongs = torch.zeros(len(self.loads), dtype=torch.bool)
        belongs.as_strided(tensor.shape, tensor.stride(), self.first).fill_(True)
        self.belongs = belongs.numpy()

    def elements(self, addresses):
        """Return the indices of the addressed elements in the storage, and a mask of those outside of the tensor."""
        elements = (addresses.astype(np.int64) - self.storage) // self.item
        outside = (elements < 0) | (elements >= len(self.belongs))
        return elements, outside | ~self.belongs[elements.clip(0, len(self.belongs) - 1)]


class Launch:
    """One launch: its arguments, and the checks of every access."""

    def __init__(self):
        self.arguments = []
        self.patched = set()  # the Python modules whose `tl` is replaced by the interpreter's

    def add_arguments(self, named):
        """Register the tensors of [(name, value)]."""
        accesses = {}  # to each storage
        for name, tensor in named:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                nobody = np.full((2, storage.nbytes() // tensor.element_size()), NOBODY, np.int32)
                self.arguments.append(Argument(name, tensor, accesses.setdefault(storage.data_ptr(), nobody)))

    def tag(self, tensor):
        return np.uint64([a.tensor is tensor for a in self.arguments].index(True) + 1) << TAG

    def access(self, pointers, mask, does):
        """Check and count one access. Return the pointers as plain addresses, without the argument's index.

        pointers, mask: TensorHandles whose shapes broadcast. does: "loads" or "stores".
        """
        tagged, mask = np.broadcast_arrays(pointers.data, np.asarray(mask.data))
        lanes = np.flatnonzero(mask)
        if len(lanes):
            tagged = tagged.reshape(-1)[lanes]
            tag = tagged[0] >> TAG  # All pointers of an access are those of one argument.
            self.check(self.arguments[int(tag) - 1], tagged - (tag << TAG), lanes, does)
        return TensorHandle(pointers.data & ADDRESS, pointers.dtype)

    def check(self, argument, addresses, lanes, does):
        """Raise OutOfBounds or Race, or note the access of these lanes."""
        grid = interpreter.interpreter_builder
        program = np.ravel_multi_index(grid.grid_idx, grid.grid_dim)
        elements, outside = argument.elements(addresses)

        def refuse(error, wrong, why):
            if wrong.any():
                i = wrong.argmax()
                place = f"{argument.name}[{elements[i] - argument.first}]"
                raise error(f"program {grid.grid_idx}, lane {lanes[i]}, {does} {place}, {why}")

        def by_others(programs):
            return (programs[elements] != NOBODY) & (programs[elements] != program)

        refuse(OutOfBounds, outside, f"which is outside of the argument's shape {list(argument.tensor.shape)}")
        refuse(Race, by_others(argument.stores), "which another program of this launch stored")
        if does == "loads":
            argument.loads[elements] = np.where(by_others(argument.loads), SEVERAL, program)
        else:
            refuse(Race, by_others(argument.loads), "which another program of this launch loaded")
            argument.stores[elements] = lanes  # only the last lane of an element stays
            refuse(Race, argument.stores[elements] != lanes, "which another lane of this store also stores")
            argument.stores[elements] = program
        for total in _counting:
            moved = total.loaded if does == "loads" else total.stored
            moved[argument.name] += len(lanes) * argument.item


# --- installation -----------------------------------------------------------------------------------------------------


def replaces(owner, name):
    """Return a decorator that makes `owner.name(*arguments)` call the decorated f(original, *arguments)."""

    def decorate(function):
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*arguments, **options):
            return function(original, *arguments, **options)

        setattr(owner, name, replacement)

    return decorate


@functools.cache
def install():
    """Change the interpreter of this process as described above. A second call does nothing."""
    _install_launch()
    _install_memory()
    _install_bfloat16()
    # With sanitize_overflow, hashes that wrap on purpose would raise.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _install_launch():
    @replaces(interpreter.GridExecutor, "__call__")
    def call(original, self, *arguments, **options):
        global _launch
        _launch = Launch()
        try:
            # A GPU computes inf and NaN, and wraps integers, without a warning. Only these warnings of numpy are
            # switched off, and only during a launch.
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "All-NaN (slice|axis) encountered", RuntimeWarning)  # from tl.max
                original(self, *arguments, **options)
        except interpreter.InterpreterError as error:
            while error.__cause__ is not None:  # The launch and each called function wrap the error once.
                error = error.__cause__
            raise error from None
        finally:
            _launch = None

    @replaces(interpreter, "_patch_lang")
    def patch_once(original, function):
        """Do it once per launch. Triton does it in every call of a function, which takes most of the time."""
        if function.__module__ not in _launch.patched:
            _launch.patched.add(function.__module__)
            return original(function)

    @replaces(interpreter.GridExecutor, "_init_args_hst")
    def arguments_on_host(original, self, positional, keywords):
        """Register the tensors whose addresses the kernel gets."""
        on_host = original(self, positional, keywords)
        _launch.add_arguments([*zip(self.arg_names, on_host[0], strict=False), *on_host[1].items()])
        return on_host

    @replaces(interpreter, "_implicit_cvt")
    def convert(original, value):
        """Convert a tensor to a pointer, and add its argument's index."""
        result = original(value)
        if isinstance(value, torch.Tensor):
            result.handle.data = result.handle.data | _launch.tag(value)
        return result


def _install_memory():
    @replaces(InterpreterBuilder, "create_masked_load")
    def load(original, self, pointers, mask, *rest, **options):
        return original(self, _launch.access(pointers, mask, "loads"), mask, *rest, **options)

    @replaces(InterpreterBuilder, "create_masked_store")
    def store(original, self, pointers, value, mask, *rest, **options):
        return original(self, _launch.access(pointers, mask, "stores"), value, mask, *rest, **options)


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def is_bfloat16(handle):
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def widened(handle):
    """Convert bfloat16 bits (uint16) to float32: the upper half of a float32's bits is a bfloat16."""
    if not is_bfloat16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)


def rounded(handle):
    """Round float32 to bfloat16 bits (uint16), to nearest even. NaN becomes 0x7FFF, as on a GPU."""
    bits = handle.data.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    data = np.where(np.isnan(handle.data), np.uint16(0x7FFF), ((bits + half) >> np.uint32(16)).astype(np.uint16))
    return TensorHandle(data, tl.bfloat16)


def _install_bfloat16():
    def refusing(original, self, *arguments):
        if np.where not in arguments and any(map(is_bfloat16, arguments)):  # `np.where` only chooses bits.
            raise TypeError("this operation on bfloat16 is not supported: convert to float32 first")
        return original(self, *arguments)

    for name in ("unary_op", "binary_op", "ternary_op"):
        replaces(InterpreterBuilder, name)(refusing)

    @replaces(InterpreterBuilder, "create_dot")
    def dot(original, self, left, right, *rest):
        for total in _counting:
            total.flops += 2 * left.data.size * right.data.shape[-1]
        return original(self, widened(left), widened(right), *rest)

    @replaces(InterpreterBuilder, "cast_impl")
    def cast(original, self, value, to):
        if to.scalar == tl.bfloat16 and not is_bfloat16(value):
            return rounded(original(self, value, tl.float32))
        return original(self, widened(value) if to.scalar != tl.bfloat16 else value, to)

    InterpreterBuilder.get_bf16 = lambda self, value: rounded(self.get_fp32(value))  # Triton 3.7 has none.
