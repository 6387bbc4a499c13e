# GPT-2 small with 16 experts in each block. It has 1 billion parameters, and a token uses 124 million of them. The data
# and all other values are those of configs/gpt2_124m.py.
# The experts are Switch Transformer's (Fedus et al. 2021): top_k, capacity_factor and balance are those of section 2.2.
from configs.gpt2_124m import *  # noqa: F403

experts = 16
