"""Runs Triton kernels on the CPU and reports mistakes that a GPU does not report. For tests only.

With TRITON_INTERPRET=1, Triton runs a kernel in numpy, one program after another. So a kernel can be tested without a
GPU. But Triton's own interpreter (versions 3.6.0 and 3.9.0) misses mistakes and computes bfloat16 wrongly. `install()`
changes this. Below, "Now" means after `install()`:

    bfloat16        Triton stores bfloat16 as bits in uint16, computes with these bits as integers, and truncates
                    float32 to bfloat16. Now: computes in float32 and rounds to nearest even. The result of one
                    operation is correctly rounded, because float32 has more than twice bfloat16's digits. float64 and
                    integers become float32 first. `tl.dot` multiplies exactly and adds in float32. Sums along an
                    axis and `tl.fma` of bfloat16 raise TypeError: their result on a GPU depends on the order of the
                    additions or on the architecture.
    out of bounds   Triton does not check addresses. Now: OutOfBounds names argument, element and program. A pointer
                    contains its argument's index in the 16 bits that addresses do not use. So an access outside of
                    this argument is an error even inside another tensor or in a gap between a view's rows.
    races           Programs that run in turn cannot race. Now: three cases raise Race. Two programs of one launch
                    access the same element and one of them changes it (unless both are atomic). Two lanes (positions
                    in the stored array) of one store write the same element. A lane reads or overwrites an element
                    that another lane of its program stored, without a `tl.debug_barrier()` in between.
    device_assert   Triton ignores it. Now: raises AssertionError.
    traffic         Triton does not count it. Now: `with traffic() as t` counts the bytes that kernels load and store.
                    The speed of a memory-bound kernel depends on these bytes, so a unit test can check it.

A launch raises the original exception instead of the interpreter's InterpreterError. Integers wrap silently, as in a
kernel that is compiled without debug=True.

    sanitizer.install()
    with sanitizer.traffic() as t:
        copy[grid](x, y, n, BLOCK=1024)
    assert t.loaded == t.stored == n * x.element_size() and t.by_argument["x"].stored == 0

The interpreter does not model the exchange of registers between threads, the hardware's order of additions in `tl.dot`
or `tl.sum`, tf32, or speed. (compiled.py examines the machine code.)
"""

import functools
import warnings
from collections import defaultdict
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
class Bytes:
    """Bytes moved through one argument. Masked lanes do not count; an atomic counts as a load and a store.

    loaded, stored: summed over the lanes of all accesses. *_unique: each element counts once per launch, as with a
    perfect cache.
    """

    loaded: int = 0
    stored: int = 0
    loaded_unique: int = 0
    stored_unique: int = 0


@dataclass
class Traffic:
    """Traffic of one launch (`last`) or of all launches in a `with traffic()`. by_argument: {argument: Bytes}."""

    launches: int = 0
    programs: int = 0
    flops: int = 0  # of `tl.dot`: 2 m n k each
    by_argument: dict = field(default_factory=lambda: defaultdict(Bytes))

    loaded = property(lambda self: sum(b.loaded for b in self.by_argument.values()))
    stored = property(lambda self: sum(b.stored for b in self.by_argument.values()))
    loaded_unique = property(lambda self: sum(b.loaded_unique for b in self.by_argument.values()))
    stored_unique = property(lambda self: sum(b.stored_unique for b in self.by_argument.values()))

    def add(self, other):
        self.launches += other.launches
        self.programs += other.programs
        self.flops += other.flops
        for name, moved in other.by_argument.items():
            total = self.by_argument[name]
            for kind, count in vars(moved).items():
                setattr(total, kind, getattr(total, kind) + count)


last = Traffic()  # of the latest launch; read it as `sanitizer.last`
_counting = []  # Traffic of each open `with traffic()`
_launch = None  # the current launch


@contextmanager
def traffic():
    """Yield a Traffic that sums over the launches in the `with` block. Each launch adds its counts at its end."""
    total = Traffic()
    _counting.append(total)
    try:
        yield total
    finally:
        _counting[:] = [t for t in _counting if t is not total]


# --- memory -----------------------------------------------------------------------------------------------------------

TAG = np.uint64(48)  # addresses have 47 bits; bits 48 and higher contain the argument's index, counted from 1
ADDRESS = np.uint64((1 << 48) - 1)
NOBODY, SEVERAL = -1, -2  # instead of a program's index


class Memory:
    """The accesses of this launch to one storage.

    Here a *unit* is a cell of the storage, as wide as the narrowest dtype of the arguments in this storage. Arguments
    may overlap: views of one packed tensor, or the same tensor as input and output.
    """

    def __init__(self, arguments):
        self.start = min(a.address for a in arguments)
        self.unit = min(a.item for a in arguments)
        size = (max(a.address + a.count * a.item for a in arguments) - self.start) // self.unit
        # for each unit: the program that loaded, stored, atomically updated the unit
        self.loads, self.stores, self.atomics = (np.full(size, NOBODY, np.int32) for _ in range(3))
        self.lane = np.full(size, NOBODY, np.int32)  # the lane that stored it since its program's latest barrier

    def units(self, argument, elements):
        first = (argument.address - self.start + elements * argument.item) // self.unit
        per_element = argument.item // self.unit
        return (first[:, None] + np.arange(per_element)).reshape(-1)


class Argument:
    """One tensor of a launch, with the addresses that its pointers may access."""

    def __init__(self, name, tensor):
        self.name, self.address, self.item = name, tensor.data_ptr(), tensor.element_size()
        self.storage = tensor.untyped_storage().data_ptr()
        reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        self.count = reach if tensor.numel() else 0
        self.what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        self.belongs = None  # for a view with gaps: True for its elements, False for the gaps
        if self.count > tensor.numel():
            self.what += f", strides {list(tensor.stride())}"
            self.belongs = np.zeros(self.count, bool)
            self.belongs[torch.arange(self.count).as_strided(tensor.shape, tensor.stride()).reshape(-1).numpy()] = True
        self.moved = Bytes()
        self.loaded, self.stored = np.zeros(self.count, bool), np.zeros(self.count, bool)

    def elements(self, addresses, size):
        """Return the indices of the addressed elements [lanes], and a mask [lanes] of those outside of this tensor."""
        if size != self.item:
            raise TypeError(f"{self.name} ({self.what}) is accessed as elements of {size} bytes: not supported")
        elements, rest = np.divmod(addresses.astype(np.int64) - self.address, self.item)
        outside = (elements < 0) | (elements >= self.count) | (rest != 0)
        if self.belongs is not None:
            outside |= ~self.belongs[elements.clip(0, self.count - 1)]
        return elements, outside

    def count_bytes(self, elements, loads, stores):
        if loads:
            self.moved.loaded += elements.size * self.item
            self.loaded[elements] = True
        if stores:
            self.moved.stored += elements.size * self.item
            self.stored[elements] = True

    def bytes(self):
        self.moved.loaded_unique = int(self.loaded.sum()) * self.item
        self.moved.stored_unique = int(self.stored.sum()) * self.item
        return self.moved


class Launch:
    """One launch: its arguments, their memory, and the checks of every access."""

    def __init__(self):
        self.arguments, self.tags, self.memories = [], {}, {}
        self.program, self.flops = None, 0
        self.unordered = []  # (memory, units) that this program stored since its latest barrier

    def add_arguments(self, named):
        """Register the tensors of [(name, value)], also tensors in tuples and in descriptors."""
        for name, value in named:
            value = getattr(value, "base", value)  # a TensorDescriptor or triton.reinterpret(tensor, dtype) has a base
            if isinstance(value, tuple):
                self.add_arguments((f"{name}[{i}]", part) for i, part in enumerate(value))
            elif isinstance(value, torch.Tensor):
                self.arguments.append(Argument(name, value))
                self.tags[id(value)] = len(self.arguments)  # the tensor lives during the launch, so its id is unique
        for storage in {a.storage for a in self.arguments}:
            self.memories[storage] = Memory([a for a in self.arguments if a.storage == storage])

    def where(self, program=None):
        """Return "program (x, y, z)" of the current program, or of the program with this index."""
        _, y, z = interpreter.interpreter_builder.grid_dim
        program = self.program if program is None else int(program)
        return f"program ({program // (y * z)}, {program // z % y}, {program % z})"

    def access(self, pointers, mask, loads=False, stores=False):
        """Check and count one access. Return the pointers as plain addresses, without the argument's index.

        pointers, mask: TensorHandles whose shapes broadcast. An atomic both loads and stores.
        """
        x, y, z = interpreter.interpreter_builder.grid_idx
        _, height, depth = interpreter.interpreter_builder.grid_dim
        program = (x * height + y) * depth + z
        if program != self.program:
            self.program, self.unordered = program, []
        tagged, mask = np.broadcast_arrays(pointers.data, np.asarray(mask.data))
        lanes = np.flatnonzero(mask)
        tagged = tagged.reshape(-1)[lanes]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        tags = tagged >> TAG
        for tag in np.unique(tags):
            chosen = tags == tag
            self.check(int(tag), tagged[chosen] & ADDRESS, size, lanes[chosen], loads, stores)
        return TensorHandle(pointers.data & ADDRESS, pointers.dtype)

    def check(self, tag, addresses, size, lanes, loads, stores):
        does = "atomically updates" if loads and stores else "loads" if loads else "stores"
        if not 1 <= tag <= len(self.arguments):
            raise OutOfBounds(f"{self.where()} {does} at address {addresses[0]:#x}, far from every tensor argument")
        argument = self.arguments[tag - 1]
        elements, outside = argument.elements(addresses, size)
        if outside.any():
            element = elements[outside][0]
            raise OutOfBounds(
                f"{self.where()}, lane {lanes[outside][0]}, {does} {argument.name}[{element}]: {argument.name} is "
                f"{argument.what}, elements 0 to {argument.count - 1}" + (" with gaps" * (argument.belongs is not None))
            )
        argument.count_bytes(elements, loads, stores)
        memory = self.memories[argument.storage]
        units = memory.units(argument, elements)
        lanes = np.repeat(lanes, len(units) // len(elements))

        def named(wrong):
            element = (int(units[wrong][0]) * memory.unit + memory.start - argument.address) // argument.item
            return f"{argument.name}[{element}]"

        def refuse_if_others(by, did):
            wrong = (by[units] != NOBODY) & (by[units] != self.program)
            if wrong.any():
                other = by[units][wrong][0]
                who = "several other programs" if other == SEVERAL else self.where(other)
                raise Race(f"{self.where()} {does} {named(wrong)}, which {who} {did} in the same launch")

        atomic = loads and stores
        refuse_if_others(memory.stores, "stored")
        if not atomic:
            refuse_if_others(memory.atomics, "updated atomically")
        if stores:
            refuse_if_others(memory.loads, "loaded")
        before = memory.lane[units]
        wrong = (before != NOBODY) & (before != lanes)
        if wrong.any():
            raise Race(
                f"{self.where()}, lane {lanes[wrong][0]}, {does} {named(wrong)}, which its lane {before[wrong][0]} "
                "stored: tl.debug_barrier() is missing in between"
            )
        if stores and not atomic:
            memory.lane[units] = lanes
            wrong = memory.lane[units] != lanes
            if wrong.any():
                both = lanes[wrong][0], memory.lane[units][wrong][0]
                raise Race(f"lanes {both[0]} and {both[1]} of one store by {self.where()} hit {named(wrong)}")
            self.unordered.append((memory, units))
        by = memory.atomics if atomic else memory.loads if loads else memory.stores
        by[units] = np.where((by[units] == NOBODY) | (by[units] == self.program), self.program, SEVERAL)

    def barrier(self):
        for memory, units in self.unordered:
            memory.lane[units] = NOBODY
        self.unordered = []

    def traffic(self):
        """Return the Traffic of this launch so far."""
        programs = int(np.prod(getattr(interpreter.interpreter_builder, "grid_dim", 0)))
        launch = Traffic(1, programs, self.flops)
        for argument in self.arguments:
            launch.by_argument[argument.name] = argument.bytes()
        return launch


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def to_float32(bits):
    """Convert bfloat16 bits (uint16) to float32. The upper half of a float32's bits is a bfloat16."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values):
    """Round float32 to bfloat16 bits (uint16), to nearest even. NaN becomes 0x7FFF, as on a GPU."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(values), np.uint16(0x7FFF), ((bits + half) >> np.uint32(16)).astype(np.uint16))


def is_bfloat16(handle):
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def widened(handle):
    return TensorHandle(to_float32(handle.data), tl.float32) if is_bfloat16(handle) else handle


def rounded(handle):
    """Round float32 to bfloat16. Return other dtypes (a comparison's result) unchanged."""
    return TensorHandle(to_bfloat16(handle.data), tl.bfloat16) if handle.data.dtype == np.float32 else handle


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
    _install_bfloat16_casts()
    # sanitize_overflow would raise when hashes wrap on purpose
    options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options

    @replaces(interpreter, "_patch_lang_tensor")
    def patch_tensor(original, tensor, scope):
        """Make `range(runtime value)` work: Triton 3.6 converts an array [1] to int, numpy 2.4 does not allow it."""
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _install_launch():
    @replaces(interpreter.GridExecutor, "__call__")
    def call(original, self, *arguments, **options):
        global _launch, last
        _launch = Launch()
        try:
            # A GPU computes inf and NaN, and wraps integers, without a warning. Only these warnings of numpy are
            # switched off, and only during a launch.
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "All-NaN (slice|axis) encountered", RuntimeWarning)  # from tl.max
                original(self, *arguments, **options)
        except interpreter.InterpreterError as error:
            while error.__cause__ is not None:  # the launch and each called function wrap the error once
                error = error.__cause__
            raise error from None
        finally:
            last, _launch = _launch.traffic(), None
            for total in _counting:
                total.add(last)

    @replaces(interpreter.GridExecutor, "_init_args_hst")
    def arguments_on_host(original, self, positional, keywords):
        """Register the tensors whose addresses the kernel gets: copies, if the arguments are on a GPU."""
        on_host = original(self, positional, keywords)
        _launch.add_arguments([*zip(self.arg_names, on_host[0], strict=False), *on_host[1].items()])
        return on_host

    @replaces(interpreter, "_implicit_cvt")
    def convert(original, value):
        """Convert a tensor to a pointer, and add its argument's index."""
        result = original(value)
        tag = _launch.tags.get(id(getattr(value, "base", value))) if hasattr(value, "data_ptr") else None
        if tag is not None:
            result.handle.data = result.handle.data | (np.uint64(tag) << TAG)
        return result


def _install_memory():
    @replaces(InterpreterBuilder, "create_masked_load")
    def load(original, self, pointers, mask, *rest, **options):
        return original(self, _launch.access(pointers, mask, loads=True), mask, *rest, **options)

    @replaces(InterpreterBuilder, "create_masked_store")
    def store(original, self, pointers, value, mask, *rest, **options):
        return original(self, _launch.access(pointers, mask, stores=True), value, mask, *rest, **options)

    @replaces(InterpreterBuilder, "create_atomic_rmw")
    def update(original, self, operation, pointers, value, mask, *rest):
        if is_bfloat16(value):
            raise TypeError("the interpreter has no atomics on bfloat16")
        pointers = _launch.access(pointers, mask, loads=True, stores=True)
        return original(self, operation, pointers, value, mask, *rest)

    @replaces(InterpreterBuilder, "create_atomic_cas")
    def compare_and_swap(original, self, pointers, *rest):
        everywhere = TensorHandle(np.ones(pointers.data.shape, bool), tl.int1)
        return original(self, _launch.access(pointers, everywhere, loads=True, stores=True), *rest)

    @replaces(InterpreterBuilder, "create_barrier")
    def barrier(original, self):
        _launch.barrier()
        return original(self)


def _install_bfloat16():
    @replaces(InterpreterBuilder, "binary_op")
    def binary(original, self, left, right, operation):
        if not (is_bfloat16(left) or is_bfloat16(right)):
            return original(self, left, right, operation)
        return rounded(original(self, widened(left), widened(right), operation))

    @replaces(InterpreterBuilder, "unary_op")
    def unary(original, self, value, operation):
        result = original(self, widened(value), operation)
        return rounded(result) if is_bfloat16(value) else result

    @replaces(InterpreterBuilder, "ternary_op")
    def ternary(original, self, first, second, third, operation):
        if operation is np.where or not is_bfloat16(third):  # np.where does not round
            return original(self, first, second, third, operation)
        return rounded(original(self, *map(widened, (first, second, third)), operation))

    @replaces(InterpreterBuilder, "create_fma")
    def fma(original, self, *factors):
        if any(map(is_bfloat16, factors)):
            raise TypeError("tl.fma of bfloat16: convert to float32 first")
        if factors[0].data.dtype != np.float32:
            return original(self, *factors)
        x, y, z = (factor.data.astype(np.float64) for factor in factors)  # Triton 3.6 would round twice
        return TensorHandle((x * y + z).astype(np.float32), factors[0].dtype)

    @replaces(InterpreterBuilder, "create_dot")
    def dot(original, self, left, right, *rest):
        _launch.flops += 2 * left.data.size * right.data.shape[-1]
        return original(self, widened(left), widened(right), *rest)

    @replaces(interpreter.ReduceScanOpInterface, "apply")
    def reduce(original, self, value):
        if any(part.dtype.scalar == tl.bfloat16 for part in (value if isinstance(value, tuple) else (value,))):
            raise TypeError("a reduction or scan of bfloat16 rounds at every step, in an unknown order: use float32")
        return original(self, value)


def _install_bfloat16_casts():
    @replaces(InterpreterBuilder, "cast_impl")
    def cast(original, self, value, to):
        if to.scalar == tl.bfloat16 and not is_bfloat16(value):
            return rounded(original(self, value, tl.float32))
        if is_bfloat16(value) and to.scalar != tl.bfloat16:
            return original(self, widened(value), to)
        return original(self, value, to)

    @replaces(InterpreterBuilder, "create_fp_to_fp")
    def cast_rounding(original, self, value, to, rounding):
        from_or_to_bfloat16 = is_bfloat16(value) or to.scalar == tl.bfloat16
        if from_or_to_bfloat16 and to.scalar.primitive_bitwidth >= 16 and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
            return self.cast_impl(value, to)
        return original(self, value, to, rounding)

    def constant(self, value):
        return rounded(self.get_fp32(value))

    InterpreterBuilder.get_bf16 = constant  # Triton 3.6 has no get_bf16
