# A small Llama (4 blocks, h = 128, 4 heads, 2 of keys and values) with the data and the batch of tiny.py.
# python prepare.py --tokenizer=bytes
from configs.tiny import *  # noqa: F403

model = "llama"
num_query_groups = 2
ffn_hidden_size = 352  # about 8/3 h: three matrices have as many weights as GPT-2's two
untie_embeddings_and_output_weights = True
