"""Describe GPUs and the wires between them as data.

    data sheet   peak of matrix products, memory, memory rate, NVLink, network cards, PCIe
    shares       matrix     of the peak, in a large matrix product
                 attention  of the peak, in fused attention to 2,048 tokens
                 decline    to more tokens s: times (2048 / s)^decline
                 memory     of the memory rate, in an elementwise operation
                 wire       of NVLink's rate, in a collective
                 network    of a network card's rate, in a ring or a message
    times        wave       what each product loses, in elements of its result (`seconds.py`)
                 operation  seconds from the end of an operation to the start of the next one
                 latency    seconds of one hop of a message
                 hop        the same in a ring, inside a node

`matrix`, `wave` and `wire` of the A100 are fitted to 14 published steps of Megatron-LM with full recomputation
(Narayanan et al., arXiv 2104.04473, Table 1; Korthikanti et al., arXiv 2205.05198, Table 5), `decline` to half of LLM
Foundry's steps with 4,096 tokens or more. The others are usual values.
"""

import re
from typing import NamedTuple

from errors import UserError

GiB = 2**30
TILE = 128 * 256  # elements of one multiprocessor's tile of a product
PEAK_TFLOPS = {  # dense products in bf16, fp16, fp32, fp64; None: not possible, or not certain
    "T4": (None, 65, 8.1, None),
    "V100 SXM2": (None, 125, 15.7, 7.8),
    "RTX 4090": (165.2, 165.2, 82.6, None),
    "A100 PCIE": (312, 312, 19.5, 19.5),
    "A100 SXM4": (312, 312, 19.5, 19.5),
    "H100": (989, 989, 67, 67),  # SXM
    "H200": (989, 989, 67, 67),  # SXM
    "B200": (2250, 2250, None, None),
}


def peak_tflops(device_name, dtype):
    """Return the peak in TFLOP/s of a GPU with CUDA's name, such as "NVIDIA A100-SXM4-40GB", or None if it is unknown.

    "H200 NVL" is not an H200.
    """
    name = re.sub(r"NVIDIA|Tesla|GeForce|\b\d+GB\b|\bHBM3e?\b|-", " ", device_name)
    peaks = PEAK_TFLOPS.get(" ".join(name.upper().split()), (None,) * 4)
    return dict(zip(("bf16", "fp16", "fp32", "fp64"), peaks, strict=True)).get(dtype)


class Device(NamedTuple):
    """Rates are in bytes per second and one direction, times in seconds."""

    name: str
    chip: str  # its name in PEAK_TFLOPS
    memory_bytes: int
    memory_rate: float
    dtype: str = "bf16"  # what dtype=auto means
    per_node: int = 8
    wire_rate: float = 300e9  # to the other devices of a node
    cards: int = 8  # network cards of a node
    card_rate: float = 25e9
    host_rate: float = 32e9  # between a device and its host (PCIe)
    host_memory_rate: float = 25e9  # one device's share of the host's memory rate
    attention: float = 0.5  # Dao, arXiv 2307.08691, section 4.1: 0.5 to 0.6 of an A100's peak
    decline: float = 0.1
    matrix: float = 0.951
    wave: float = 3.45e6
    memory: float = 0.85
    wire: float = 0.49
    network: float = 0.86
    operation: float = 4e-6
    latency: float = 1e-5
    hop: float = 3.4e-6  # NVIDIA/nccl, src/graph/tuning.cc

    def peak(self, dtype):
        """Return FLOP/s of dense matrix products. Raises UserError."""
        peak = peak_tflops(self.chip, dtype)
        if not peak:
            raise UserError(f"dtype={dtype}: {self.name} has no known rate for it; use --dtype={self.dtype}")
        return peak * 1e12


# `attention` and `matrix` of these are estimates. wave: one tile on each multiprocessor.
VOLTA = dict(
    dtype="fp16", wire_rate=150e9, card_rate=12.5e9, host_rate=16e9, attention=0.3, matrix=0.85, wave=80 * TILE
)
HOPPER = dict(
    wire_rate=450e9,
    card_rate=50e9,
    host_rate=64e9,
    host_memory_rate=40e9,
    attention=0.4,
    decline=0.2,
    matrix=0.7,
    wave=132 * TILE,
)
LIST = [
    Device("v100-16g", "V100 SXM2", 16 * GiB, 900e9, per_node=4, cards=2, **VOLTA),
    Device("v100-32g", "V100 SXM2", 32 * GiB, 900e9, per_node=8, cards=4, **VOLTA),
    Device("a100-40g", "A100 SXM4", 40 * GiB, 1555e9),
    Device("a100-80g", "A100 SXM4", 80 * GiB, 2039e9),
    Device("h100", "H100", 80 * GiB, 3350e9, **HOPPER),
    Device("h200", "H100", 141 * 10**9, 4800e9, **HOPPER),
]
DEVICES = {device.name: device for device in LIST}
