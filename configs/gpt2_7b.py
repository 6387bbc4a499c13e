# GPT-2 7B, 6,658,498,560 parameters. Source: ds_gpt2_7b.sh and ds_config_gpt2_7b_4.json in the article
# "大規模言語モデル(LLM)の作り方 Megatron-DeepSpeed編 Part1" (2023). The script adds --dtype=fp16.
data_dir = "data/stdlib_gpt2"

num_layers = 32
hidden_size = 4096
num_attention_heads = 32
seq_length = 2024  # the script's; perhaps 2048 was meant
dropout = 0.1  # Megatron-LM's default

micro_batch_size = 4
global_batch_size = 16  # the script has 4 GPUs
train_iters = 500000

lr = 0.00015
min_lr = 1.0e-5
lr_decay_iters = 320000
lr_warmup_iters = 32000
adam_beta2 = 0.95

zero = 1
recompute = "full"  # --checkpoint-activations

log_interval = 100
save_interval = 10000
eval_interval = 100
