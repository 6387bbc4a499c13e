"""Describe GPUs and the wires between them (NVLink, network, PCIe) as data.

    data sheet   peak of matrix products (`log.PEAK_TFLOPS`), memory, memory rate, NVLink, network cards, PCIe
    constants    matrix     share of the peak that a large matrix product reaches
                 wave       time that each product loses, in elements of its result (`seconds.py`)
                 memory     share of the memory rate that an elementwise operation reaches
                 wire       share of NVLink's rate that a collective reaches
                 network    share of a network card's rate that a ring or a message reaches
                 operation  seconds from the end of an operation to the start of the next one
                 latency    seconds of one hop of a message
                 attention  share of the peak that fused attention reaches

Three constants of the A100 are fitted to published runs: `matrix`, `wave` and `wire` (`python -m accounts.fit` prints
the fit, its errors and the fits without one row). The others are usual values, not fitted. We have no table of runs for
the V100 and the Hopper GPUs. They get the A100's constants, except those in VOLTA and HOPPER.

Between nodes a ring uses one network card. --rings=N sets N cards. One card gives the rate of ZeRO-3 in Narayanan et
al., arXiv 2104.04473, Table 2. NCCL can use all cards at once if the network connects each card with all others.

The device "cpu" is this machine. `plan.py --calibrate` measures it and writes CALIBRATION.
"""

import math
from pathlib import Path
from typing import NamedTuple

from errors import UserError, explained, parse_json, regular
from log import PEAK_TFLOPS

CALIBRATION = Path("accounts/cpu.json")
GiB = 2**30
TILE = 128 * 256  # elements of a product's result that one multiprocessor computes at a time


class Device(NamedTuple):
    """A device and its place in a cluster. Rates are in bytes per second and one direction, times in seconds."""

    name: str
    peaks: dict  # {dtype: FLOP/s of dense matrix products, or None}
    dtype: str  # the dtype that dtype=auto means
    memory_bytes: int
    memory_rate: float
    per_node: int  # devices of a node
    wire_rate: float  # from a device to the other devices of its node
    cards: int  # network cards of a node
    card_rate: float  # of one network card
    host_rate: float  # between a device and its host (PCIe)
    host_memory_rate: float  # one device's share of the host's memory rate: for the update with --offload
    attention: float
    matrix: float
    wave: float
    memory: float
    wire: float
    network: float
    operation: float
    latency: float
    rings: int = 1  # rings that one collective opens between nodes, each through a card of its own
    share: float = 1.0  # of a core that a process has while all processes compute; 1 for GPUs

    def peak(self, dtype):
        """Return FLOP/s of dense matrix products. Raises UserError if the device cannot compute in `dtype`."""
        if not self.peaks.get(dtype):
            raise UserError(f"dtype={dtype}: {self.name} has no known rate for it; use --dtype={self.dtype}")
        return self.peaks[dtype]


def sheet(name):
    """Return {dtype: FLOP/s} of a device in `log.PEAK_TFLOPS`."""
    rates = zip(("bf16", "fp16", "fp32", "fp64"), PEAK_TFLOPS[name], strict=True)
    return {dtype: rate and rate * 1e12 for dtype, rate in rates}


# attention: Dao, arXiv 2307.08691, section 4.1, reports 0.5 to 0.6 of an A100's peak. For the V100 and Hopper,
# `attention` and `matrix` are estimates. wave: one tile on each multiprocessor (80 or 132); the A100's is fitted.
AMPERE = dict(
    peaks=sheet("A100 SXM4"), dtype="bf16", per_node=8, wire_rate=300e9, cards=8, card_rate=25e9, host_rate=32e9,
    host_memory_rate=25e9, attention=0.5, matrix=0.951, wave=3.45e6, memory=0.85, wire=0.49, network=0.86,
    operation=4e-6, latency=1e-5,
)  # fmt: skip
VOLTA = AMPERE | dict(
    peaks=sheet("V100 SXM2"), dtype="fp16", memory_rate=900e9, wire_rate=150e9, card_rate=12.5e9, host_rate=16e9,
    attention=0.3, matrix=0.85, wave=80 * TILE,
)  # fmt: skip
HOPPER = AMPERE | dict(
    peaks=sheet("H100"), wire_rate=450e9, card_rate=50e9, host_rate=64e9, host_memory_rate=40e9, attention=0.4,
    matrix=0.7, wave=132 * TILE,
)  # fmt: skip
DEVICES = {
    name: Device(name, **family | own)
    for name, family, own in (
        ("v100-16g", VOLTA, dict(memory_bytes=16 * GiB, per_node=4, cards=2)),
        ("v100-32g", VOLTA, dict(memory_bytes=32 * GiB, per_node=8, cards=4)),
        ("a100-40g", AMPERE, dict(memory_bytes=40 * GiB, memory_rate=1555e9)),
        ("a100-80g", AMPERE, dict(memory_bytes=80 * GiB, memory_rate=2039e9)),
        ("h100", HOPPER, dict(memory_bytes=80 * GiB, memory_rate=3350e9)),
        ("h200", HOPPER, dict(memory_bytes=141 * 10**9, memory_rate=4800e9)),
    )
}


def device(name, processes=1):
    """Return the Device `name`. "cpu" is one of `processes` processes that share this machine. Raises UserError."""
    if name == "cpu":
        return measured(processes)
    if name not in DEVICES:
        raise UserError(f"--device={name}: should be one of {', '.join([*DEVICES, 'cpu'])}")
    return DEVICES[name]


def positive(number):
    """Return a number of CALIBRATION as a float. Raises TypeError or ValueError for anything else."""
    if not 0 < float(number) < math.inf:
        raise ValueError(f"{number} should be a positive number")
    return float(number)


def measured(processes):
    """Return the Device "cpu" from the nearest measurement in CALIBRATION with at least `processes`, or the largest."""
    if not CALIBRATION.exists():
        raise UserError("--device=cpu: not measured yet; python plan.py --calibrate measures this machine")
    try:
        with explained(CALIBRATION):
            found = parse_json(regular(CALIBRATION).read_text(encoding="utf-8"))
        counts = sorted(map(int, found["processes"]))
        count = next((n for n in counts if n >= processes), counts[-1])
        numbers, two = found["processes"][str(count)], found["processes"][str(max(2, count))]
        names = ("memory_rate", "attention", "matrix", "memory", "operation")
        same = {name: positive(numbers[name]) for name in names}
        wires = {name: positive(two[name]) for name in ("wire_rate", "wire", "latency")}
        peaks = {name: positive(rate) for name, rate in numbers["peak"].items()}
        memory_bytes, share = found["memory_bytes"] // processes, min(1.0, found["cores"] / count)
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, IndexError) as error:
        raise UserError(f"{CALIBRATION}: damaged ({error!r}); python plan.py --calibrate writes it again") from None
    speed = dict(card_rate=wires["wire_rate"], host_rate=same["memory_rate"], host_memory_rate=same["memory_rate"])
    place = dict(per_node=max(8, processes), cards=1, network=1.0, wave=0.0, memory_bytes=memory_bytes, share=share)
    return Device("cpu", peaks=peaks, dtype="fp32", **same, **wires, **speed, **place)
