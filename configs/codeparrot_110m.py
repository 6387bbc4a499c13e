# CodeParrot small (110M). Source of all values: the script in "How to train a Language Model with Megatron-LM",
# huggingface.co/blog/megatron-training, which needs about 12 hours on 8 GPUs. Rename the blog's file to .jsonl:
# mv codeparrot_data.json codeparrot_data.jsonl
# The script sets --fp16. dtype=auto, the default, uses bf16 if the GPU has it.
# python prepare.py codeparrot_data.jsonl --text_key=content --out=data/codeparrot_gpt2
data_dir = "data/codeparrot_gpt2"

num_layers = 12
hidden_size = 768
num_attention_heads = 12
seq_length = 1024
dropout = 0.1  # Megatron-LM's default; the script does not set it

micro_batch_size = 12
global_batch_size = 192
train_iters = 150000

lr = 0.0005
lr_warmup_iters = 2000
weight_decay = 0.1

save_interval = 2000
eval_interval = 200
