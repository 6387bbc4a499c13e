"""Count the FLOPs of a training step.

The letters are those of Narayanan et al. (arXiv 2104.04473, appendix): L layers, hidden size h, padded vocabulary V,
and B sequences of s tokens in a step. Only matrix products count. For each token, each element of a weight costs one
multiplication and one addition, 2 FLOPs. The forward of one token costs:

    weights of a block    qkv 3h^2, projection h^2, MLP 4h^2 + 4h^2      12h^2 elements   24h^2 FLOPs
    attention of a block  q k^T, and its softmax times v: 2sh each       no elements       4sh
    head                  h by V (the embedding's look-up is free)       Vh elements       2Vh

The sum is 24Lh^2 + 4Lsh + 2Vh. Backward computes two products for each product of forward (gradient of the input,
gradient of the weight), so a step costs as much as three forwards of all B sequences:

    model FLOPs     72BsLh^2 (1 + s/6h + V/12Lh)  =  Bs (6N + 12Lhs)  with N = 12Lh^2 + Vh
    with recompute  96BsLh^2 (1 + s/6h + V/16Lh)     a second forward of the blocks, but not of the head

Like Megatron-LM we count all s by s products of attention, although the causal mask needs half of them. The slide
"Transformerのスケール則" counts 5.7 FLOPs per parameter and token; we count 6.

This is GPT-2. No code has these formulas: the products of any model's units are counted (`meta.py`).
"""

from dataclasses import replace


def model_flops(config, batch):
    """Return the FLOPs of a step of `batch` sequences; nan if they are not known."""
    return batch * sum(3 * forward_flops(work) for work in units(config))


def hardware_flops(config, batch):
    """Return `model_flops` plus the recomputation."""
    return batch * sum((2 + work.runs) * forward_flops(work) for work in units(config))


def forward_flops(work):
    """Return the FLOPs of one forward. work: a `meta.Work`."""
    return sum(2 * M * K * N for M, K, N in work.products) + 4 * work.attention


def units(config):
    """Return the `meta.Work` of each unit for one sequence, on one rank."""
    from accounts import meta  # a run needs it only here

    item = 2 if config.dtype in ("bf16", "fp16") else 4  # another one would be measured again
    one = replace(config, micro_batch_size=1, tp=1, cp=1, sequence_parallel=False)
    return meta.work_of(one, item, on_cpu=True) or [meta.UNKNOWN]
