"""GPT-2's formulas for activations and elementwise operations (`memory.py` has the table of Korthikanti et al.)."""

from parallel.experts import places_of_expert
from parallel.layout import rows_outside
from reference import ACTIVATIONS


def parameters(c):
    """Return V h + s h + L (12 h^2 + 13 h) + 2 h. Experts: E MLPs, a router, one bias."""
    h, E = c.hidden_size, c.experts
    mlp = 8 * E * h**2 + E * h + h if E else 8 * h**2 + 5 * h
    return (c.padded_vocab_size + c.positions + 2) * h + c.num_layers * (4 * h**2 + 8 * h + mlp)


def kept(c, z):
    """Return {unit: {what: bytes}} that a micro-batch keeps for backward. z: `memory.Sizes`.

    The input of a unit counts in a block, but not in the head.
    """
    outside, inside = z.item * z.rows * c.hidden_size, z.item * z.tokens * c.hidden_size // c.tp
    block = {
        "LayerNorm 1's input": outside,
        "qkv's input": outside,
        "q, k, v": 3 * inside,
        "attention's output": inside * (c.cp > 1 and c.context == "ulysses"),
        "proj's input": inside,
        "LayerNorm 2's input": outside,
        "fc1's input": outside,  # with experts the router's
        "gelu's input": 4 * inside * ACTIVATIONS[c.activation].keeps_input,
        "fc2's input": 4 * inside,
        "LayerNorms' statistics": 2 * 2 * z.statistic * z.rows,
        "log-sum-exp": z.wide * z.tokens * c.num_attention_heads // c.tp,
    }
    if c.recompute == "elementwise":
        for what in ("qkv's input", "fc1's input", "fc2's input" if c.activation == "gelu" else "gelu's input"):
            del block[what]
    if c.experts:
        places, chosen = expert_places(c), z.rows * c.top_k
        inputs = z.item * places * c.hidden_size
        block |= {
            "probabilities": z.wide * z.rows * c.experts,
            "chosen experts, their places, tokens of the places": 8 * (2 * chosen + places + 1),
            "dropped or not": chosen,
            "fc1's input of the experts": inputs,
            "gelu's input": 4 * inputs * ACTIVATIONS[c.activation].keeps_input,
            "fc2's input": 4 * inputs,
            "outputs of the experts, probabilities": z.item * chosen * (c.hidden_size + 1),
        }
    embedding = {"ids": 8 * z.tokens, "positions": 8 * z.rows}
    head = {"LayerNorm's output": outside, "its statistics": 2 * z.statistic * z.rows, "losses": z.wide * z.tokens}
    return {"embedding": embedding, "block": block, "head": head}


def expert_places(c):
    """Return the number of places for tokens that a rank's experts have (`parallel/experts.py`)."""
    return rows_outside(c) // c.tokens_of_group * places_of_expert(c, c.tokens_of_group) * c.experts


def passes(c):
    """Return {action: (passes over [rows, h], passes over [n, h/t], operations)} of a block, without its products.

    A pass reads or writes a tensor once. [rows, h]: LayerNorms, additions, gradients of two biases. [n, h/t]: GELU
    4 + 4, its backward 3 * 4, gradient of qkv's bias 3. elementwise: LayerNorms and GELU once more, in I.
    """
    gelu = c.activation == "gelu"
    return {"F": (9, 8, 5), "I": (10, 15, 9), "elementwise": (4, 8 * gelu, 2 + gelu)}
