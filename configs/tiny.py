# A small GPT for the source code of Python's standard library. It trains in minutes on a laptop.
# The values are this project's choice.
# python prepare.py --tokenizer=bytes
data_dir = "data/stdlib_bytes"
vocab_size = 257  # 256 bytes and <|endoftext|>

num_layers = 4
hidden_size = 128
num_attention_heads = 4
seq_length = 256

micro_batch_size = 4
global_batch_size = 16  # 16 * 256 = 4,096 tokens a step
train_iters = 600

lr = 2e-3
min_lr = 2e-4
lr_warmup_iters = 60
adam_beta2 = 0.99
weight_decay = 0.1

log_interval = 20
eval_interval = 200
