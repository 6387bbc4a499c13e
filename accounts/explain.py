"""Explain the prediction of one layout: each line has a name, a formula, a number and a unit (`plan.py --explain`)."""

import config as configuration
from accounts import layouts, seconds
from log import hardware_flops, model_flops
from parallel import schedules

GB = 1e9


def line(name, formula, value, unit):
    """Return one aligned line of the explanation."""
    return f"{name:<37} {formula:<51} {value:>15} {unit}"


def text(config, gpus, device, facts, code):
    """Return the explanation of a layout as text. facts: the result of `layouts.judge` for the other arguments."""
    dtype, item, wide = layouts.cluster(config, device)
    B = config.global_batch_size
    c, known, shape = config, layouts.model_of(config, item, wide), layouts.shape_of(config, gpus)
    layout, rate = known.layout(shape), seconds.rates(device, dtype, code)
    m = configuration.micro_batches(c, c.global_batch_size, shape.dp)
    formulas = FORMULAS | {"bubble": bubble_formula(c, device.share)}
    return "\n".join(
        [
            f"{gpus} x {device.name}, {dtype}, {code}",
            " ".join(f"{k}={v}" for k, v in facts["layout"].items()),
            "",
            "The batch and the model",
            line("data ranks dp", "GPUs / (tp pp)", shape.dp, ""),
            line("micro-batches m", "global_batch_size / (b dp)", m, ""),
            line("parameters", "all units; a tied table counts once", f"{layouts.parameters(known):,}", ""),
            line(
                "model FLOPs",
                "72 B s L h^2 (1 + s/6h + V/12Lh), log.model_flops",
                f"{model_flops(c, c.global_batch_size):.4g}",
                "FLOP",
            ),
            line("with recomputation", "log.hardware_flops", f"{hardware_flops(c, B):.4g}", "FLOP"),
            "",
            *rate_lines(c, device, dtype, rate),
            "",
            *stage_lines(c, layout, device, known, shape, m, rate, item, wide),
            "",
            "A step (accounts/seconds.py)",
            *(line(name, formulas[name], f"{value:.5g}", "s") for name, value in facts["step_parts"].items()),
            line("step", "sum", f"{facts['step_seconds']:.5g}", "s"),
            line("MFU", "model FLOPs / (step GPUs peak)", f"{facts['mfu']:.2%}", ""),
            line("tokens per second", "B s / step", f"{facts['tokens_per_second']:,.0f}", ""),
            "",
            f"Memory of stage {facts['fullest_rank']}, the fullest (accounts/memory.py)",
            *(
                line(what, MEMORY.get(what, ""), f"{size / GB:.3f}", "GB")
                for what, size in facts["memory_bytes"].items()
            ),
            line("sum", "", f"{sum(facts['memory_bytes'].values()) / GB:.3f}", "GB"),
            line("capacity", device.name, f"{device.memory_bytes / GB:.3f}", "GB"),
            "",
            facts["binds"],
        ]
    )


FORMULAS = {
    "compute": "m (F + I + W) of the busiest stage",
    "recomputation": "m F of its blocks",
    "tensor parallel": "m times the collectives of its blocks",
    "pipeline messages": "waits for messages on their way",
    "data parallel": "communication that no backward hides; sums",
    "update": "bytes of the optimizer's state / memory rate",
}


def bubble_formula(c, share):
    """Return the formula of the seconds in which a rank waits. share: of a core, as in `devices.Device`."""
    text, formula = "schedules.simulate", schedules.FORMULAS.get(c.schedule)
    if c.schedule in seconds.MESSAGES:
        text = seconds.IDLE.get(c.schedule) or f"m (F+I+W) x / (1-x), x = {formula.bubble}"
        text += f" if {formula.where}, else simulate" if formula.where != "True" else ""
    return text if share == 1 else f"max(0, (work + bubble) {share:g} - work)"


MEMORY = {
    "parameters": "P, ZeRO-3: P/dp",
    "gradients": "P, ZeRO-2 and 3: P/dp",
    "master weights": "P, from ZeRO-1 on: P/dp",
    "moments": "2P, from ZeRO-1 on: 2P/dp",
    "activations": "peak over the schedule",
    "whole buckets": "ZeRO-2 and 3: buckets in use",
    "logits": "of 4,096 tokens",
    "context": "CUDA and NCCL",
}


def rate_lines(c, device, dtype, rate):
    """Return the lines with the rates of a Device. rate: its `seconds.Rates`."""
    wires = [("tp", 1, c.tp), ("dp", c.tp * c.pp, 0)]
    lines = [
        "Rates: data sheet * fitted share (accounts/devices.py)",
        line(
            "matrix products",
            f"{device.peak(dtype) / 1e12:.4g} TFLOP/s * {device.matrix}",
            f"{rate.matrix / 1e12:.4g}",
            "TFLOP/s",
        ),
        line("memory", f"{device.memory_rate / GB:.4g} GB/s * {device.memory}", f"{rate.memory / GB:.4g}", "GB/s"),
        line("gap between operations", "", f"{rate.gap * 1e6:.3g}", "us"),
    ]
    for axis, stride, n in wires:
        speed, inside = seconds.wire(device, stride, n or 2 * device.per_node * device.per_node)
        place = "inside the node" if inside else f"between nodes of {device.per_node}"
        lines.append(line(f"ring of {axis}", place, f"{speed / GB:.4g}", "GB/s"))
    return lines


def stage_lines(c, layout, device, known, shape, m, rate, item, wide):
    """Return the lines with a block's seconds, the stages' seconds, and the bytes that a stage sends."""
    parts = seconds.block(c, rate, item, wide)
    rank = min(1, c.pp - 1)
    sent = known.sent(shape, m, c.micro_batch_size, rank)
    found = seconds.stages(c, layout, device, rate, sent, item, wide)
    n = c.micro_batch_size * c.seq_length
    lines = [f"A block, one micro-batch of n = b s = {n:,} tokens"]
    for i, o in seconds.linears(c):
        name = f"product [{n}, {i}] x [{i}, {o}]"
        lines.append(
            line(
                name,
                "2 K (M N + wave) / rate + bytes / memory rate + gap",
                f"{seconds.product(rate, n, o, i, item, item) * 1e3:.4g}",
                "ms",
            )
        )
    lines += [
        line(f"{kind} of a block", "4 products, attention, passes over memory", f"{parts[kind] * 1e3:.4g}", "ms")
        for kind in "FIW"
    ]
    lines += ["", "Stages, one micro-batch"]
    for i, stage in enumerate(found):
        if i in (0, rank, c.pp - 1):
            times = " ".join(f"{kind}={getattr(stage, kind) * 1e3:.4g}" for kind in "FIW")
            lines.append(
                line(
                    f"stage {i}, {stage.units} units",
                    f"{times}; tensor parallel part",
                    f"{stage.tensor * 1e3:.4g}",
                    "ms",
                )
            )
    lines += ["", f"Sent by stage {rank} in a step (accounts/ledger.py)"]
    for (axis, what, operation), (calls, size) in sent.items():
        lines.append(line(f"{axis}: {what}", f"{operation}, {calls:,} calls", f"{float(size) / GB:.4g}", "GB"))
    return lines
