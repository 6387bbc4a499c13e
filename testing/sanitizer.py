"""Runs Triton kernels on the CPU and reports mistakes that a GPU does not report. For tests only.

With TRITON_INTERPRET=1, Triton runs a kernel in numpy, one program after another, without a GPU. `install()` adds what
Triton's interpreter lacks:

    bfloat16        Triton computes with its bits as integers. Now conversions round to nearest even, and `tl.dot`
                    multiplies exactly and adds in float32. Other arithmetic on bfloat16 raises TypeError.
    out of bounds   OutOfBounds names argument, element and program. A pointer contains its argument's index in the 16
                    bits that addresses do not use, so an access to another tensor, or to a gap between a view's rows,
                    is an error.
    races           Race is raised if two programs of a launch access an element and one of them changes it, or if two
                    lanes (positions in the stored array) of one store write the same element.
    traffic         `with traffic() as t` counts the bytes that kernels load and store, which decide the speed of a
                    memory-bound kernel.

A launch raises the original exception, not InterpreterError. Integers wrap silently. Atomics are not checked.

    sanitizer.install()
    with sanitizer.traffic() as t:
        copy[grid](x, y, n, BLOCK=1024)
    assert t.loaded["x"] == t.stored["y"] == n * x.element_size()

The interpreter models no exchange of registers between threads, order of additions in `tl.dot` and `tl.sum`, tf32, or
speed.
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
    """An unmasked lane is outside of its pointer's tensor."""


class Race(RuntimeError):
    """An element depends on the order of programs or lanes."""


# --- traffic ----------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Work of the launches in a `with traffic()`. loaded, stored: {argument: bytes}."""

    flops: int = 0  # 2 m n k for each `tl.dot`
    loaded: Counter = field(default_factory=Counter)
    stored: Counter = field(default_factory=Counter)


_counting = []  # the Traffic of each open `with traffic()`
_launch = None  # the current Launch


@contextmanager
def traffic():
    _counting.append(Traffic())
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


# --- memory -----------------------------------------------------------------------------------------------------------

TAG = np.uint64(48)  # addresses have 47 bits; above is the argument's index, counted from 1
ADDRESS = np.uint64((1 << 48) - 1)
NOBODY, SEVERAL = -1, -2  # instead of a program's index


class Argument:
    """One tensor of a launch. It may share its storage, as q, k and v of one qkv.

    accesses: the program that loaded each element of the storage, and that stored it, int32 [2, elements].
    """

    def __init__(self, name, tensor, accesses):
        self.name, self.tensor, (self.loads, self.stores) = name, tensor, accesses
        self.item, self.first = tensor.element_size(), tensor.storage_offset()
        self.storage = tensor.data_ptr() - self.first * self.item  # address
        belongs = torch.zeros(len(self.loads), dtype=torch.bool)
        belongs.as_strided(tensor.shape, tensor.stride(), self.first).fill_(True)
        self.belongs = belongs.numpy()

    def elements(self, addresses):
        """Return the addressed elements' indices in the storage, and a mask of those outside of the tensor."""
        elements = (addresses.astype(np.int64) - self.storage) // self.item
        outside = (elements < 0) | (elements >= len(self.belongs))
        return elements, outside | ~self.belongs[elements.clip(0, len(self.belongs) - 1)]


class Launch:
    """One launch: its arguments, and the checks of every access."""

    def __init__(self):
        self.arguments = []
        self.patched = set()  # modules whose `tl` is the interpreter's

    def add_arguments(self, named):
        accesses = {}  # {storage's address: accesses}
        for name, tensor in named:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                nobody = np.full((2, storage.nbytes() // tensor.element_size()), NOBODY, np.int32)
                self.arguments.append(Argument(name, tensor, accesses.setdefault(storage.data_ptr(), nobody)))

    def tag(self, tensor):
        return np.uint64([a.tensor is tensor for a in self.arguments].index(True) + 1) << TAG

    def access(self, pointers, mask, does):
        """Check and count an access. Return the pointers as plain addresses. does: "loads" or "stores"."""
        tagged, mask = np.broadcast_arrays(pointers.data, np.asarray(mask.data))
        lanes = np.flatnonzero(mask)
        if len(lanes):
            tagged = tagged.reshape(-1)[lanes]
            tag = tagged[0] >> TAG  # an access has one argument
            self.check(self.arguments[int(tag) - 1], tagged - (tag << TAG), lanes, does)
        return TensorHandle(pointers.data & ADDRESS, pointers.dtype)

    def check(self, argument, addresses, lanes, does):
        """Raise OutOfBounds or Race, or note the access."""
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
            argument.stores[elements] = lanes  # the last lane of an element stays
            refuse(Race, argument.stores[elements] != lanes, "which another lane of this store also stores")
            argument.stores[elements] = program
        for total in _counting:
            moved = total.loaded if does == "loads" else total.stored
            moved[argument.name] += len(lanes) * argument.item


# --- installation -----------------------------------------------------------------------------------------------------


def replaces(owner, name):
    """Return a decorator: `owner.name(*arguments)` calls the decorated f(original, *arguments)."""

    def decorate(function):
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*arguments, **options):
            return function(original, *arguments, **options)

        setattr(owner, name, replacement)

    return decorate


@functools.cache
def install():
    """Change the interpreter of this process, once."""
    _install_launch()
    _install_memory()
    _install_bfloat16()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _install_launch():
    """Note a launch's tensors, and put the argument's index into each pointer."""

    @replaces(interpreter.GridExecutor, "__call__")
    def call(original, self, *arguments, **options):
        global _launch
        _launch = Launch()
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "All-NaN (slice|axis) encountered", RuntimeWarning)  # from tl.max
                original(self, *arguments, **options)
        except interpreter.InterpreterError as error:
            while error.__cause__ is not None:
                error = error.__cause__
            raise error from None
        finally:
            _launch = None

    @replaces(interpreter, "_patch_lang")
    def patch_once(original, function):
        """Once per launch: in every call it takes most of the time."""
        if function.__module__ not in _launch.patched:
            _launch.patched.add(function.__module__)
            return original(function)

    @replaces(interpreter.GridExecutor, "_init_args_hst")
    def arguments_on_host(original, self, positional, keywords):
        """Register the kernel's tensors."""
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
    """Convert bfloat16 bits (uint16), the upper half of a float32's, to float32."""
    if not is_bfloat16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)


def rounded(handle):
    """Round float32 to bfloat16 bits (uint16), to nearest even. NaN becomes 0x7FFF."""
    bits = handle.data.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    data = np.where(np.isnan(handle.data), np.uint16(0x7FFF), ((bits + half) >> np.uint32(16)).astype(np.uint16))
    return TensorHandle(data, tl.bfloat16)


def _install_bfloat16():
    """Convert and multiply bfloat16 in float32, and refuse its other arithmetic."""

    def refusing(original, self, *arguments):
        if np.where not in arguments and any(map(is_bfloat16, arguments)):  # `np.where` only chooses
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

    InterpreterBuilder.get_bf16 = lambda self, value: rounded(self.get_fp32(value))  # Triton 3.7 has none
