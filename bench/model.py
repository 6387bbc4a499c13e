"""A paper model of a training step on one GPU: FLOPs, bytes and time of each part. No number of it is measured.

    python -m bench model --config=gpt2_345m_fast --micro_batch_size=32 --device=h200

accounts/seconds.py counts matrix products, attention and the embedding. Its functions return seconds. With a rate of
one FLOP per second, these seconds are the number of FLOPs. With a rate of one byte per second, they are the number of
bytes. `own_floors` counts the bytes of our kernels, like bench/kernels.py. testing/test_host.py counts the launches.

    floor      for each kernel the larger of FLOPs / peak and bytes / memory rate, at the rates of the data sheet. A
               step with these kernels cannot be faster
    reachable  the same with the shares of these rates in accounts/devices.py, and a gap after each launch. For Hopper
               these shares are estimates

`plan.py` predicts a longer step. It adds the time of a product's bytes to the time of its FLOPs, and the time of one
wave of tiles (`wave` in accounts/seconds.py).
The row of attention counts the lower triangle, and five products in backward, because one is a recomputation. MFU
counts the model FLOPs of log.py: the whole [s, s] matrix, and four products in backward.
"""

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import config as configuration
from accounts import devices, seconds
from bench.plain import STEADY
from bench.tables import print_table
from errors import UserError
from log import model_flops
from model import GPT
from operations import DTYPES
from parallel.mesh import Mesh
from parallel.tensor import ROWS

NONE = seconds.Rates(*[float("inf")] * 3, 0.0, 0.0, "ours")  # nothing takes time
FLOPS, BYTES = NONE._replace(matrix=1, attention=1), NONE._replace(memory=1)
# Tested in testing/test_host.py. block: per block and micro-batch; ends: per micro-batch; chunk: per micro-batch, for
# each ROWS tokens of the head except the first ones; update: per block; step: once.
LAUNCHES = {"block": 9 + 29, "ends": 12 + 17, "chunk": 6, "update": 3, "step": 42}


def measure(config: str = "gpt2_345m_fast", micro_batch_size: int = 32, micro_batches: int = 1, device: str = "h200"):
    """Print FLOPs, bytes and least time of each part of a step, computed from the model's shape, not measured.

    --config            a file of configs/, without .py
    --micro_batch_size  samples of a micro-batch
    --micro_batches     micro-batches between two updates
    --device            a GPU of accounts/devices.py
    """
    if device not in devices.DEVICES:
        raise UserError(f"--device={device}: should be one of {', '.join(devices.DEVICES)}")
    print_model(config, load(config, micro_batches), micro_batch_size, device)


def load(name, micro_batches=1):
    """Return configs/NAME.py in bf16, without the features that bench/plain.py does not have. Print the changes.

    An update of the result has `micro_batches` micro-batches of 1 sample.
    """
    asked = configuration.load([str(Path(__file__).parents[1] / f"configs/{name}.py")])
    sizes = dict(micro_batch_size=1, global_batch_size=micro_batches)
    changes = dict(dtype="bf16", dropout=0.0, recompute="none", rampup_batch_size="")
    changed = [f", {k}={getattr(asked, k)} -> {v}" for k, v in changes.items() if getattr(asked, k) != v]
    print(f"configs/{name}.py, changed: a constant learning rate{''.join(changed)}")
    return dataclasses.replace(asked, **changes, **sizes, **STEADY, lr_warmup_fraction=0.0)


def per_update(c):
    return c.global_batch_size // c.micro_batch_size


def own_floors(c, tokens):
    """Return {our kernel: bytes that it must move in a step}. kernels.py and flash_attention.py derive the numbers."""
    h, L, item = c.hidden_size, c.num_layers, DTYPES[c.dtype].itemsize
    x = tokens * h * item  # bytes of an activation [tokens, h]
    parameters = GPT(c, Mesh().tp).num_parameters()
    return {
        "residual_forward": x * (L * (2 + 4 + 3) + 2),  # passes over x: norm 2, add and norm 4, add 3; head: norm 2
        "residual_backward": x * (L * (4 + 4 + 1) + 3),
        "join_part": x * L * 3 * 2,
        "activation_forward": x * L * 4 * 2,
        "activation_backward": x * L * 4 * 3,
        "attention_forward": x * L * 4,
        "attention_delta": x * L * 2,
        "attention_backward_keys": x * L * 6,
        "attention_backward_queries": x * L * 5,
        "cross_entropy_whole": tokens * c.padded_vocab_size * 2 * item,
        "adamw_flat": parameters * (28 + (item if c.dtype != "fp32" else 0)),
        "squared_norm": parameters * 4,
    }


class Part(NamedTuple):
    """A row of the table, for a whole step."""

    name: str
    flops: float
    bytes: float
    floor: float  # seconds
    reachable: float


def parts(c, size, device):
    """Return the Parts of a step of one GPU. c: from `load`; size: samples of a micro-batch; device: a Device."""
    item, wide, m = DTYPES[c.dtype].itemsize, 4, per_update(c)
    c = dataclasses.replace(c, micro_batch_size=size, global_batch_size=m * size)
    n, h, blocks = size * c.seq_length, c.hidden_size, m * c.num_layers
    rate, peak = seconds.rates(device, c.dtype, "ours"), device.peak(c.dtype)

    def part(name, calls, time):
        """time(rates): returns a list with the seconds of each kernel of one call."""

        def least(matrix, attention, memory):
            both = time(NONE._replace(matrix=matrix, attention=attention)), time(NONE._replace(memory=memory))
            return calls * sum(max(pair) for pair in zip(*both, strict=True))

        counts = [calls * sum(time(rates)) for rates in (FLOPS, BYTES)]
        return Part(
            name, *counts, least(peak, peak, device.memory_rate), least(rate.matrix, rate.attention, rate.memory)
        )

    def passes(name, moved):
        return part(name, 1, lambda rates: [moved / rates.memory])

    def linear(name, calls, i, o):
        shapes = (n, o, i, item, item), (n, i, o, item, item), (o, i, n, item, 2 * wide)  # forward, dx, dW
        return part(f"{name}: y, dx, dW", calls, lambda rates: [seconds.product(rates, *shape) for shape in shapes])

    floors = own_floors(c, m * n)
    small = [passes(kernel, moved) for kernel, moved in floors.items() if not kernel.startswith("attention")]
    ends = LAUNCHES["ends"] + LAUNCHES["chunk"] * (math.ceil(n / ROWS) - 1)
    launches = blocks * LAUNCHES["block"] + m * ends + c.num_layers * LAUNCHES["update"] + LAUNCHES["step"]
    return [
        *(
            linear(name, blocks, *io)
            for name, io in zip(("qkv", "proj", "fc1", "fc2"), seconds.linears(c), strict=True)
        ),
        linear("head", m, h, c.padded_vocab_size),
        part("attention", blocks, lambda rates: seconds.attention(c, rates, item).values()),
        *small,
        passes("zero_grad", floors["squared_norm"]),
        part("embedding", m, lambda rates: [seconds.ends(c, rates, item, wide)[0]]),
        Part(f"{launches:,.0f} launches", 0, 0, 0, launches * rate.gap),
    ]


def print_model(name, c, size, device):
    """Print FLOPs, bytes and times of one step. size: samples of a micro-batch; device: see accounts/devices.py."""
    device = devices.device(device)
    found, tokens, peak = parts(c, size, device), size * per_update(c) * c.seq_length, device.peak(c.dtype)
    rows = [[p.name, *cells(p)] for p in found]
    total = Part("sum", *(sum(column) for column in zip(*(p[1:] for p in found), strict=True)))
    rows.append([total.name, *cells(total)])
    times, used = total[3:], model_flops(c, size * per_update(c)) / peak
    rows += [
        ["tokens/s", "", "", *(f"{tokens / x:,.0f}" for x in times)],
        ["MFU", "", "", *(f"{used / x:.1%}" for x in times)],
    ]
    print(
        f"{name} on one {device.name}, {c.dtype}, step of {per_update(c)} x {size} x {c.seq_length} tokens (computed)"
        f"\nfloor: {peak / 1e12:.0f} TFLOP/s, {device.memory_rate / 1e12:.2f} TB/s; reachable: "
        f"{device.matrix:.0%} of the first ({device.attention:.0%} in attention), {device.memory:.0%} of the second"
    )
    print_table(["part", "TFLOP", "GB", "floor, ms", "reachable, ms"], rows)


def cells(part):
    return [f"{x / unit:.2f}" if x else "" for x, unit in zip(part[1:], (1e12, 1e9, 1e-3, 1e-3), strict=True)]
