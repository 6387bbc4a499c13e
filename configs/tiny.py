# A small GPT (4 blocks, h = 128, 4 heads: config.py's defaults) that trains in minutes on a laptop.
# python prepare.py --tokenizer=bytes
vocab_size = 257  # 256 bytes and <|endoftext|>

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
