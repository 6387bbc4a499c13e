# OPT-125M, 125,262,336 parameters. Source: Zhang et al. 2022 (arXiv 2205.01068), Table 1 (sizes, batch, lr) and section
# 2.2 (the rest).
# python prepare.py --tokenizer=gpt2
# A hackathon team with 16 GB per GPU used ZeRO stage 3; on 4 GPUs: --zero=3 --micro_batch_size=2 --global_batch_size=8
data_dir = "data/stdlib_gpt2"

activation = "relu"
num_layers = 12
hidden_size = 768
num_attention_heads = 12
seq_length = 2048
dropout = 0.1  # the paper has none on the embedding
init_method_std = 0.006

global_batch_size = 256  # 256 * 2,048 = 0.5M tokens
train_iters = 572204  # 300B tokens

lr = 6e-4
min_lr = 6e-5
lr_decay_style = "linear"
lr_warmup_iters = 715  # 375M tokens
adam_beta2 = 0.95
weight_decay = 0.1
