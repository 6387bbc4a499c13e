# GPT-3 13B. Source: Brown et al. 2020, Table 2.1 (sizes, batch, lr, 300B tokens) and Appendix B (decay, warm-up,
# adam_beta2, weight_decay).
data_dir = "data/stdlib_gpt2"

num_layers = 40
hidden_size = 5120  # 40 heads of 128; Table 2.1 prints 5140
num_attention_heads = 40
seq_length = 2048

micro_batch_size = 2
global_batch_size = 1024  # 1,024 * 2,048 = 2M tokens
train_iters = 143051

lr = 1e-4
min_lr = 1e-5
lr_decay_iters = 123978  # 260B tokens
lr_warmup_iters = 179  # 375M tokens
adam_beta2 = 0.95
weight_decay = 0.1

tp = 8
recompute = "full"
