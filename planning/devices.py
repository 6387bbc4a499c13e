"""Devices and their wires, as data: the numbers of the makers' data sheets, and six fitted constants for each family.

    data sheet   peak of matrix products (`log.PEAK_TFLOPS`), memory, memory rate, devices of a node, NVLink, network
                 cards of a node, PCIe
    fitted       matrix     share of the peak that a large matrix product reaches
                 memory     share of the memory rate that an elementwise operation reaches
                 wire       share of NVLink's rate that a collective reaches
                 network    share of a network card's rate that a ring or a message reaches
                 operation  seconds from the end of an operation to the start of the next one
                 latency    seconds of one hop of a message

The A100's constants are fitted to published runs with full recomputation (`published.py`; `python -m planning.fit`
prints the fit, its residuals and the fit without each row). No table of such runs is at hand for the other families.
The V100 and the Hopper GPUs have the A100's shares, except `matrix` and `attention`. The comments name their sources.

The family "cpu" is the machine at hand. `plan.py --calibrate` measures it and writes CALIBRATION.
"""

import json
from pathlib import Path
from typing import NamedTuple

from errors import UserError
from log import PEAK_TFLOPS

CALIBRATION = Path("planning/cpu.json")
GiB = 2**30


class Device(NamedTuple):
    """A device and its place in a cluster. Rates are in bytes per second and one direction, FLOP/s or seconds."""

    name: str
    sheet: str  # name in `log.PEAK_TFLOPS`
    dtype: str  # of dtype=auto
    memory_bytes: int
    memory_rate: float
    per_node: int  # devices of a node
    wire_rate: float  # of a device to the other devices of its node
    cards: int  # network cards of a node
    card_rate: float  # of one card
    host_rate: float  # between a device and its host (PCIe)
    host_memory_rate: float  # of the host's memory, for one device: the update with --offload
    attention: float  # share of the peak that fused attention reaches
    matrix: float
    memory: float
    wire: float
    network: float
    operation: float
    latency: float
    rings: int = 1  # rings that one collective opens between nodes, each through a card of its own

    def peak(self, dtype):
        """Return FLOP/s of dense matrix products, or raise UserError if the device cannot compute in `dtype`."""
        peaks = dict(zip(("bf16", "fp16", "fp32", "fp64"), PEAK_TFLOPS[self.sheet], strict=True))
        if not peaks.get(dtype):
            raise UserError(f"dtype={dtype}: {self.name} has no known rate for it; use --dtype={self.dtype}")
        return peaks[dtype] * 1e12


# Fitted: matrix, memory, wire, network, operation, latency.
A100 = dict(matrix=0.85, memory=0.85, wire=0.8, network=0.85, operation=4e-6, latency=1e-5)
# attention: FlashAttention-2 (Dao, arXiv 2307.08691, section 4.1) reaches 0.5 to 0.6 of an A100's peak.
AMPERE = dict(sheet="A100 SXM4", dtype="bf16", per_node=8, wire_rate=300e9, cards=8, card_rate=25e9, host_rate=32e9,
              host_memory_rate=25e9, attention=0.5) | A100
VOLTA = A100 | dict(sheet="V100 SXM2", dtype="fp16", memory_rate=900e9, wire_rate=150e9, card_rate=12.5e9,
              host_rate=16e9, host_memory_rate=25e9, attention=0.3, matrix=0.75)
HOPPER = A100 | dict(dtype="bf16", per_node=8, wire_rate=450e9, cards=8, card_rate=50e9, host_rate=64e9,
              host_memory_rate=40e9, attention=0.4, matrix=0.68)
DEVICES = {
    d.name: d
    for d in (
        Device("v100-16g", memory_bytes=16 * GiB, per_node=4, cards=2, **VOLTA),
        Device("v100-32g", memory_bytes=32 * GiB, per_node=8, cards=4, **VOLTA),
        Device("a100-40g", memory_bytes=40 * GiB, memory_rate=1555e9, **AMPERE),
        Device("a100-80g", memory_bytes=80 * GiB, memory_rate=2039e9, **AMPERE),
        Device("h100", sheet="H100", memory_bytes=80 * GiB, memory_rate=3350e9, **HOPPER),
        Device("h200", sheet="H200", memory_bytes=141 * 10**9, memory_rate=4800e9, **HOPPER),
    )
}
