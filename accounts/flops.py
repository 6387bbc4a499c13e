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

This is GPT-2. Other models have other weights (`weights` reads them from the model), and the same attention.
"""

from accounts.matrices import shapes


def model_flops(config, batch, block_forwards=3):
    """Return the FLOPs of a step of `batch` sequences. block_forwards: the cost of the blocks, in forwards."""
    L, h, s, (block, head) = config.num_layers, config.hidden_size, config.seq_length, weights(config)
    return batch * s * (block_forwards * (2 * L * block + 4 * L * s * h) + 3 * 2 * head)


def weights(config):
    """Return how many weights a token meets: (in a block, in the head). In GPT-2: 12 h^2 and V h."""
    block, head = shapes(config)
    return sum(m.elements for m in block), head


def hardware_flops(config, batch):
    """Return `model_flops` plus the recomputation."""
    return model_flops(config, batch, block_forwards=4 if config.recompute == "full" else 3)
