# GPT-2 small with 16 experts in each block: 1 billion parameters, of which a token uses 124 million. The experts are
# Switch Transformer's (Fedus et al. 2021, section 2.2: top_k, capacity_factor and balance).
from configs.gpt2_124m import *  # noqa: F403

experts = 16
