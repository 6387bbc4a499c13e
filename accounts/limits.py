"""Refuse a model that does not fit into memory, before it is built."""

import os
from dataclasses import replace

import torch

import config as configuration
from accounts import zero_states
from errors import LESS_MEMORY, UserError, variable
from operations import DTYPES, resolved_dtype
from parallel.layout import Layout, build_for, number_of_micro_batches
from parallel.units import unit_specs


def needed(c, ranks, device):
    """Return the bytes that the fullest rank needs at least on its device.

    On a GPU these are its model states: the first step shows whether activations fit. On a CPU they count, too, because
    Linux kills a process that needs too much, without a word. What is not known counts nothing.
    """
    dp = configuration.check(c, ranks)
    if device.type == "cpu":
        from accounts.traffic import predict_step

        if c.schedule in ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"):  # more micro-batches need no more memory
            samples = min(c.global_batch_size, 5 * c.pp * c.micro_batch_size * dp // c.cp)
            c = replace(c, global_batch_size=samples, rampup_batch_size="")
        tables = predict_step(c, ranks, device).bytes_kept
    else:
        layout = Layout(c, dp, unit_specs(c), build_for(c, number_of_micro_batches(c, c.global_batch_size, dp)))
        item = DTYPES[resolved_dtype(c, device)].itemsize
        sizes = zero_states.sizes(c, item, max(item, 4), on_cpu=False)
        tables = [zero_states.rank_states(layout, rank, sizes) for rank in range(c.pp)]
    if c.eval_only:
        return max(table["parameters"] for table in tables)
    on_host = ("master weights", "moments") if c.offload and device.type == "cuda" else ()
    return max(sum(size or 0 for what, size in table.items() if what not in on_host) for table in tables)


def refuse_too_large(c, ranks, device):
    """Raise UserError if this rank has too little memory for the fullest rank."""
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // variable("LOCAL_WORLD_SIZE", 1)
    remedy = LESS_MEMORY
    if device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory
        remedy = "set --zero, --tp or --offload; python plan.py lists what fits"
    if (need := needed(c, ranks, device)) > have:
        what = f"num_layers={c.num_layers}, hidden_size={c.hidden_size}, micro_batch_size={c.micro_batch_size}"
        sizes = f"needs at least {need / 1e9:,.1f} GB of memory; this rank has {have / 1e9:,.1f} GB"
        raise UserError(f"{what}: {sizes}; {remedy}")
