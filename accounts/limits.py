"""Refuse a model that does not fit into memory, before it is built."""

import contextlib
import itertools
import os
from dataclasses import replace

import torch

import config as configuration
from accounts.traffic import predict_step
from errors import UserError


def needed(c, ranks, device):
    """Return the bytes that the fullest rank needs at least on its device. What has no formula counts nothing."""
    dp = configuration.check(c, ranks)
    if c.schedule not in ("gpipe", "chimera"):  # in the others more micro-batches need no more memory
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
        raise UserError(f"{what}: {sizes}; {smallest_change(c, ranks, device, have)}; python plan.py lists what fits")


def smallest_change(c, ranks, device, have):
    """Return the smallest change that suffices, as text."""
    better = dict(zero=range(c.zero + 1, 4), recompute=["elementwise", "full"], tp=[2, 4, 8])
    if device.type == "cuda":
        better["offload"] = [True]
    for names in (names for n in range(1, 5) for names in itertools.combinations(better, n)):
        for values in itertools.product(*map(better.get, names)):
            fields = dict(zip(names, values, strict=True))
            with contextlib.suppress(UserError):  # this layout is impossible
                if needed(replace(c, **fields), ranks, device) <= 0.9 * have:  # the rest is for what is not predicted
                    return f"set {' '.join(f'--{name}={value}' for name, value in fields.items())}"
    return "--zero, --recompute, --tp and --offload do not suffice: use more or larger devices, or --pp"
