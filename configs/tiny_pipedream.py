# configs/tiny.py as an asynchronous pipeline of two stages: an update after every micro-batch.
# The model and data_dir are the defaults of config.py.
# python prepare.py --tokenizer=bytes && torchrun --nproc_per_node=2 train.py configs/tiny_pipedream.py
vocab_size = 257  # 256 bytes and <|endoftext|>

pp = 2
schedule = "pipedream"
updates_per_call = 50  # the pipeline is empty after every 50 updates
clip_grad = 0.0  # no rank knows the global gradient norm

micro_batch_size = 4
global_batch_size = 4
train_iters = 2400  # as many samples as configs/tiny.py

min_lr = 1e-4
lr_warmup_iters = 240
adam_beta2 = 0.99
weight_decay = 0.1

log_interval = 100
eval_interval = 800
