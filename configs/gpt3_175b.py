# GPT-3 175B. Source: Brown et al. 2020, Table 2.1 (sizes, batch, lr, 300B tokens) and Appendix B (decay, warm-up,
# adam_beta2, weight_decay).
data_dir = "data/stdlib_gpt2"

num_layers = 96
hidden_size = 12288
num_attention_heads = 96
seq_length = 2048

micro_batch_size = 1
global_batch_size = 1536  # 1,536 * 2,048 = 3.1M tokens
train_iters = 95367

lr = 0.6e-4
min_lr = 0.6e-5
lr_decay_iters = 82652  # 260B tokens
lr_warmup_iters = 119  # 375M tokens
adam_beta2 = 0.95
weight_decay = 0.1

tp = 8
pp = 8
sequence_parallel = True
