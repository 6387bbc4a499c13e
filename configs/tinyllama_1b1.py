# TinyLlama 1.1B, 1,100,048,384 parameters. Source: Zhang et al. 2024 (arXiv 2401.02385), tables 1 and 2.
# python prepare.py FILES --tokenizer=FOLDER --out=data/tinyllama, a folder with Llama 2's tokenizer.json
data_dir = "data/tinyllama"

model = "llama"
num_layers = 22
hidden_size = 2048
num_attention_heads = 32
num_query_groups = 4
ffn_hidden_size = 5632
seq_length = 2048
vocab_size = 32000
untie_embeddings_and_output_weights = True

micro_batch_size = 8
global_batch_size = 1024  # 1,024 * 2,048 = 2M tokens
train_iters = 1430511  # 3 trillion tokens

lr = 4e-4
min_lr = 4e-5
lr_warmup_iters = 2000
adam_beta2 = 0.95
weight_decay = 0.1
