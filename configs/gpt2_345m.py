# GPT-2 medium, 354,871,296 parameters.
# Source of all values: Megatron-DeepSpeed's script examples/pretrain_gpt_distributed.sh.
# gpt2_345m_fast.py is the same model for speed. It differs in dropout, micro_batch_size and recompute.
# python prepare.py --tokenizer=gpt2        (add --split=949,50,1 for the split of the script)
data_dir = "data/stdlib_gpt2"
vocab_size = 50257

num_layers = 24
hidden_size = 1024
num_attention_heads = 16
seq_length = 1024
max_position_embeddings = 1024
dropout = 0.1  # Megatron-LM's default; the script does not set it

micro_batch_size = 8
global_batch_size = 64
train_iters = 500000

lr = 0.00015
min_lr = 1.0e-5
lr_decay_style = "cosine"
lr_decay_iters = 320000
lr_warmup_fraction = 0.01
weight_decay = 1e-2
clip_grad = 1.0

recompute = "full"  # --checkpoint-activations
dtype = "auto"  # the script sets --fp16; auto uses bf16 if the GPU has it

log_interval = 100
save_interval = 10000
eval_interval = 1000
eval_iters = 10
