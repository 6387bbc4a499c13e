"""GPT-2's formulas for activations and elementwise operations (`memory.py` has the table of Korthikanti et al.)."""

from reference import ACTIVATIONS


def parameters(c):
    """Return V h + s h + L (12 h^2 + 13 h) + 2 h."""
    h = c.hidden_size
    return (c.padded_vocab_size + c.positions + 2) * h + c.num_layers * (12 * h**2 + 13 * h)


def kept(c, z):
    """Return {unit: {what: bytes}} that a micro-batch keeps for backward. z: `memory.Sizes`.

    The input of a unit counts in a block, but not in the head.
    """
    outside, inside = z.item * z.rows * c.hidden_size, z.item * z.tokens * c.hidden_size // c.tp
    block = {
        "LayerNorm 1's input": outside,
        "qkv's input": outside,
        "q, k, v": 3 * inside,
        "attention's output": inside * (c.cp > 1),
        "proj's input": inside,
        "LayerNorm 2's input": outside,
        "fc1's input": outside,
        "gelu's input": 4 * inside * ACTIVATIONS[c.activation].keeps_input,
        "fc2's input": 4 * inside,
        "LayerNorms' statistics": 2 * 2 * z.statistic * z.rows,
        "log-sum-exp": z.wide * z.tokens * c.num_attention_heads // c.tp,
    }
    if c.recompute == "elementwise":
        for what in ("qkv's input", "fc1's input", "fc2's input" if c.activation == "gelu" else "gelu's input"):
            del block[what]
    embedding = {"ids": 8 * z.tokens, "positions": 8 * z.rows}
    head = {"LayerNorm's output": outside, "its statistics": 2 * z.statistic * z.rows, "losses": z.wide * z.tokens}
    return {"embedding": embedding, "block": block, "head": head}


def passes(c):
    """Return {action: (passes over [rows, h], passes over [n, h/t], operations)} of a block, without its products.

    A pass reads or writes a tensor once. [rows, h]: LayerNorms, additions, gradients of two biases. [n, h/t]: GELU
    4 + 4, its backward 3 * 4, gradient of qkv's bias 3. elementwise: LayerNorms and GELU once more, in I.
    """
    gelu = c.activation == "gelu"
    return {"F": (9, 8, 5), "I": (10, 15, 9), "elementwise": (4, 8 * gelu, 2 + gelu)}
