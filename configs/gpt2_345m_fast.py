# GPT-2 medium for speed. Three values differ from gpt2_345m.py, which has the values of Megatron-DeepSpeed's script:
#   dropout           0 instead of 0.1        a run that sees each token once needs none
#   micro_batch_size  32 instead of 8         larger matrix products, fewer launches for each token
#   recompute         none instead of full    no second forward: a quarter less work
# The activations need 26 GB instead of 0.7 GB (52 GB with 64 samples), as `train.py CONFIG --plan` computes.
# python prepare.py --tokenizer=gpt2        (add --split=949,50,1 for the split of the script)
data_dir = "data/stdlib_gpt2"
vocab_size = 50257

num_layers = 24
hidden_size = 1024
num_attention_heads = 16
seq_length = 1024
max_position_embeddings = 1024
dropout = 0.0

micro_batch_size = 32  # at most global_batch_size / data ranks
global_batch_size = 64
train_iters = 500000

lr = 0.00015
min_lr = 1.0e-5
lr_decay_style = "cosine"
lr_decay_iters = 320000
lr_warmup_fraction = 0.01
weight_decay = 1e-2
clip_grad = 1.0

recompute = "none"
dtype = "auto"  # bf16 if the GPU has it

log_interval = 100
save_interval = 10000
eval_interval = 1000
eval_iters = 10
