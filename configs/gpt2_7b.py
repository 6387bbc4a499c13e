# The GPT-2 7B of the Megatron-DeepSpeed how-to: 6,658,498,560 parameters.
data_dir = "data/stdlib_gpt2"
vocab_size = 50257

num_layers = 32
hidden_size = 4096
num_attention_heads = 32
seq_length = 2024  # sic
max_position_embeddings = 2024
dropout = 0.1  # the script's silence means Megatron's default

micro_batch_size = 4
global_batch_size = 16  # 4 GPUs
train_iters = 500000

lr = 0.00015
min_lr = 1.0e-5
lr_decay_style = "cosine"
lr_decay_iters = 320000
lr_warmup_iters = 32000
weight_decay = 1e-2
adam_beta2 = 0.95
clip_grad = 1.0

recompute = "full"  # --checkpoint-activations

log_interval = 100
save_interval = 10000
eval_interval = 100
eval_iters = 10
