"""Measures a training step on one GPU: ours and plain PyTorch's, eager and compiled.

    python -m bench train configs/gpt2_345m.py --micro_batch_size=32

Ours trains in bf16 with float32 master weights and gradients. Plain PyTorch has float32 weights
under torch.autocast(bf16), fused AdamW and the same clipping. Both have the same weights and ids,
no dropout and no recomputation. A step is one micro-batch. Losses and gradient norms of three steps
must nearly agree: in bf16 each side rounds in its own places, and plain PyTorch's softmax includes
the padding.

MFU counts the model's FLOPs; accounts/devices.py has the GPU's peak. All models stay in memory.
`train.py --profile=DIR` shows where the time goes. Without a GPU a small model runs on the CPU.
"""

import sys
from dataclasses import replace
from functools import partial

import torch

import config as configuration
from bench.compete import TITLES, train_beside
from bench.plain import STEADY, Plain, batches_of, loss_of, our_start, plain_step
from parallel.mesh import Mesh

SMALL = dict(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=128)
SMALL |= dict(max_position_embeddings=16, micro_batch_size=2)  # without a GPU
USUAL = ["configs/gpt2_345m.py", "--micro_batch_size=32"]
ROUNDS, STEPS = 5, 10  # turns of each contestant, and timed steps of a turn


def measure(*words):
    """Compare our step with plain PyTorch's (goal: ours / theirs at most 1). words: as those of train.py."""
    words = words or USUAL
    gpu, mesh = torch.cuda.get_device_name() if torch.cuda.is_available() else "", Mesh()
    c = configuration.load([*words, "--dtype=bf16", "--dropout=0", "--recompute=none"])
    c = replace(c, rampup_batch_size="", **STEADY | ({} if gpu else SMALL))
    c.global_batch_size = c.micro_batch_size
    configuration.check(c, 1)
    configuration.require(c, "model", c.model == "model", "should be model: the other side is GPT-2 in plain PyTorch")
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    name = gpu or "no GPU: a small model on the CPU, whose times say nothing"
    print(f"{name}; PyTorch {torch.__version__}, {' '.join(words)}, bf16, a constant learning rate")
    print(f"{c.micro_batch_size} x {c.seq_length} tokens; median of {ROUNDS} turns")
    print(TITLES, flush=True)
    batches = batches_of(c, mesh, device)
    contestants = {"ours": our_start(c, mesh, device, batches), **plain_starts(c, mesh, device, batches)}
    if not train_beside("", c, contestants, ROUNDS, STEPS, gpu):
        sys.exit(1)


def plain_starts(c, mesh, device, batches):
    """Return {name: start}, eager and compiled. Both train one model, because two need more memory."""
    model = Plain(c, mesh.tp).to(device)
    model.embedding.positions = model.embedding.positions.to(device)

    def loss(ids, targets):
        with torch.autocast(device.type, torch.bfloat16):
            return loss_of(model(ids), targets)

    def start(loss):
        model.load(c, mesh.tp)
        model.zero_grad()
        return plain_step(model, c, mesh, batches, loss=loss)

    backend = "inductor" if device.type == "cuda" else "aot_eager"  # inductor needs a C++ compiler
    compiled = torch.compile(loss, dynamic=False, backend=backend)
    return {"PyTorch": partial(start, loss), "PyTorch, compiled": partial(start, compiled)}
