# GPT-2 medium, 354,871,296 parameters. Source: Megatron-DeepSpeed's examples/pretrain_gpt_distributed.sh, which sets
# --fp16 too. Faster on a GPU with 80 GB: --recompute=none --dropout=0 --micro_batch_size=32
# python prepare.py --tokenizer=gpt2        (the script's split: --split=949,50,1)
data_dir = "data/stdlib_gpt2"

num_layers = 24
hidden_size = 1024
num_attention_heads = 16
seq_length = 1024
dropout = 0.1  # Megatron-LM's default

global_batch_size = 64
train_iters = 500000

lr = 0.00015
min_lr = 1.0e-5
lr_decay_iters = 320000
lr_warmup_fraction = 0.01

recompute = "full"  # --checkpoint-activations

log_interval = 100
save_interval = 10000
