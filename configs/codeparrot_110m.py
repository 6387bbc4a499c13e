# CodeParrot small. Source: the script of huggingface.co/blog/megatron-training (about 12 hours on 8 GPUs), which sets
# --fp16 too. CodeParrot's vocabulary has 32,768 ids: 110M parameters. With GPT-2's there are 124,475,904.
# python prepare.py codeparrot_data.json --text_key=content --out=data/codeparrot
data_dir = "data/codeparrot"

num_layers = 12
hidden_size = 768
num_attention_heads = 12
seq_length = 1024
dropout = 0.1  # Megatron-LM's default

micro_batch_size = 12
global_batch_size = 192
train_iters = 150000

lr = 0.0005
lr_warmup_iters = 2000
weight_decay = 0.1

save_interval = 2000
eval_interval = 200
