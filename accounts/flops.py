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
"""


def model_flops(config, batch, block_forwards=3):
    """Return the FLOPs of a step of `batch` sequences. block_forwards: the cost of the blocks, in forwards."""
    L, h, s, V = config.num_layers, config.hidden_size, config.seq_length, config.padded_vocab_size
    experts = L * expert_flops(config)
    return batch * s * (block_forwards * (24 * L * h**2 + 4 * L * s * h + experts) + 3 * 2 * V * h)


def expert_flops(c):
    """Return the FLOPs that a mixture of experts adds to a block's forward of a token: k MLPs for one, and the router.

    Empty places count nothing, and dropped tokens count as if they were computed.
    """
    return 16 * (c.top_k - 1) * c.hidden_size**2 + 2 * c.experts * c.hidden_size if c.experts else 0


def hardware_flops(config, batch):
    """Return `model_flops` plus the recomputation."""
    return model_flops(config, batch, block_forwards=4 if config.recompute == "full" else 3)
