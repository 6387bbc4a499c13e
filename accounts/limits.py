"""Refuse a model that does not fit into memory, before it is built."""

import os
from dataclasses import replace

import torch

import config as configuration
from accounts.traffic import predict_step
from errors import UserError


def needed(c, ranks, device):
    """Return the bytes that the fullest rank needs at least on its device. What is not known counts nothing."""
    dp = configuration.check(c, ranks)
    if c.schedule in ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"):  # more micro-batches need no more memory
        samples = min(c.global_batch_size, 5 * c.pp * c.micro_batch_size * dp // c.cp)
        c = replace(c, global_batch_size=samples, rampup_batch_size="")
    tables = predict_step(c, ranks, device).bytes_kept
    if c.eval_only:
        return max(table["parameters"] for table in tables)
    on_host = ("master weights", "moments") if c.offload and device.type == "cuda" else ()
    return max(sum(size or 0 for what, size in table.items() if what not in on_host) for table in tables)


def refuse_too_large(c, ranks, device):
    """Raise UserError if this rank has too little memory for the fullest rank."""
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory
    if (need := needed(c, ranks, device)) > have:
        what = f"num_layers={c.num_layers}, hidden_size={c.hidden_size}, micro_batch_size={c.micro_batch_size}"
        sizes = f"needs at least {need / 1e9:,.1f} GB of memory; this rank has {have / 1e9:,.1f} GB"
        remedy = "set --zero, --recompute, --tp or, on a GPU, --offload"
        raise UserError(f"{what}: {sizes}; {remedy}: python plan.py lists what fits")
