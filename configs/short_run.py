# Three steps of configs/tiny.py, to look at one scheme. They end with the bytes that a step sends and keeps.
# torchrun --nproc_per_node=2 train.py configs/short_run.py --zero=1 --out_dir=out/zero1
vocab_size = 257  # 256 bytes and <|endoftext|>

micro_batch_size = 4
global_batch_size = 16
train_iters = 3
log_interval = 1
eval_iters = 0

lr = 2e-3
adam_beta2 = 0.99
weight_decay = 0.1
ledger = True
