# GPT-3 XL, 1.3B (Brown et al. 2020, Table 2.1): batch 1M tokens, 300B tokens.
data_dir = "data/stdlib_gpt2"
vocab_size = 50257

num_layers = 24
hidden_size = 2048
num_attention_heads = 16  # the table's 24 heads of 128 do not make 2,048
seq_length = 2048

micro_batch_size = 4
global_batch_size = 512  # 512 * 2,048 = 1M tokens
train_iters = 286102

lr = 2e-4
min_lr = 2e-5
lr_decay_iters = 247955  # 260B tokens
lr_warmup_iters = 358  # 375M tokens
adam_beta2 = 0.95
weight_decay = 0.1

recompute = "full"
eval_interval = 1000
save_interval = 1000
