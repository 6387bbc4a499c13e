# GPT-2 7B, 6,658,498,560 parameters. Source: ds_gpt2_7b.sh and ds_config_gpt2_7b_4.json in the article
# "大規模言語モデル(LLM)の作り方 Megatron-DeepSpeed編 Part1" (2023). The script adds --dtype=fp16.
# adam_beta2 is Megatron's 0.999, not the JSON's 0.95: Megatron-DeepSpeed builds AdamW from the script's options, and
# DeepSpeed 0.9.5 uses it instead of the JSON's optimizer. Fairly sure: read in their code, not run, and the article's
# commit of Megatron-DeepSpeed is unknown.
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
initial_loss_scale = 65536  # DeepSpeed's default; only with fp16

zero = 1
recompute = "full"  # --checkpoint-activations

log_interval = 100
save_interval = 10000
eval_interval = 100
