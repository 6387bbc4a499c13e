# GPT-2 small, 124,475,904 parameters (vocabulary padded to 50,304). Sources: nanoGPT's config/train_gpt2.py (batch,
# rates, adam_beta2, weight_decay) and llm.c's scripts/run_gpt2_124M.sh (warm-up, tokens).
# python prepare.py --tokenizer=gpt2
data_dir = "data/stdlib_gpt2"

num_layers = 12
hidden_size = 768
num_attention_heads = 12
seq_length = 1024

global_batch_size = 480  # 480 * 1,024 = 491,520 tokens a step
train_iters = 20000  # about 10 billion tokens

lr = 6e-4
min_lr = 6e-5
lr_warmup_iters = 700
adam_beta2 = 0.95
weight_decay = 0.1
