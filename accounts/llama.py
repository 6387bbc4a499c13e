"""Llama's formulas, as gpt2.py has GPT-2's."""


def parameters(c):
    """Return V h (untied: 2 V h) + L (2 h^2 + 2 h^2 g/a + 3 h f + 2 h) + h."""
    h, tables = c.hidden_size, 1 + c.untie_embeddings_and_output_weights
    block = 2 * h * h + 2 * h * c.query_groups * c.head_size + 3 * h * c.ffn_size + 2 * h
    return tables * c.padded_vocab_size * h + c.num_layers * block + h


def kept(c, z):
    """Return what `gpt2.kept` returns: {unit: {what: bytes}} of a micro-batch. z: `memory.Sizes`."""
    outside, inside = z.item * z.rows * c.hidden_size, z.item * z.tokens * c.hidden_size // c.tp
    keys = inside if c.cp > 1 else inside * c.query_groups // c.num_attention_heads
    wide = z.item * z.tokens * c.ffn_size // c.tp
    block = {
        "norm 1's input": outside,
        "qkv's input": outside,
        "q, k, v": inside + 2 * keys,
        "attention's output": inside * (c.cp > 1),
        "proj's input": inside,
        "norm 2's input": outside,
        "fc1's input": outside,
        "gate and up": 2 * wide,
        "fc2's input": wide,
        "norms' factors": 2 * z.wide * z.rows,
        "log-sum-exp": z.wide * z.tokens * c.num_attention_heads // c.tp,
    }
    if c.recompute == "elementwise":
        for what in ("qkv's input", "fc1's input", "fc2's input"):
            del block[what]
    head = {"norm's output": outside, "its factor": z.wide * z.rows, "losses": z.wide * z.tokens}
    return {"embedding": {"ids": 8 * z.tokens}, "block": block, "head": head}


def passes(c):
    """Return what `gpt2.passes` returns, counted in kernels.py.

    [rows, h]: two norms (2 and 4, in I 4 each), an addition (3). [n, h/t]: rotations of queries and keys (2 each), a
    copy of values (2), in I their joined gradients (2 each); SwiGLU (F 3, I 5) has f instead of h.
    """
    keys, f = c.query_groups / c.num_attention_heads, c.ffn_size / c.hidden_size
    again = 4, 3 * f, 3  # norms and SwiGLU
    return {"F": (9, 2 + 4 * keys + 3 * f, 7), "I": (8, 4 + 6 * keys + 5 * f, 9), "elementwise": again}
