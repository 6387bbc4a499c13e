# GPT-2 small with 16 experts in each block: 1 billion parameters, of which a token uses 124 million.
# The experts are Switch Transformer's (Fedus et al. 2021): top_k, capacity_factor and balance are those of section 2.2.
# The other values are those of configs/gpt2_124m.py.
# python prepare.py --tokenizer=gpt2
data_dir = "data/stdlib_gpt2"

num_layers = 12
hidden_size = 768
num_attention_heads = 12
seq_length = 1024
experts = 16

global_batch_size = 480
train_iters = 20000

lr = 6e-4
min_lr = 6e-5
lr_warmup_iters = 700
adam_beta2 = 0.95
weight_decay = 0.1
