# GPT-3 XL, 1.3B. Source: Brown et al. 2020, Table 2.1 (sizes, batch, lr, 300B tokens) and Appendix B (decay, warm-up,
# adam_beta2, weight_decay).
data_dir = "data/stdlib_gpt2"

num_layers = 24
hidden_size = 2048
num_attention_heads = 16  # Table 2.1 prints 24
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
