# OPT-125M, 125,262,336 parameters. Source: Zhang et al. 2022 (arXiv 2205.01068). Sizes, batch (0.5M tokens) and lr are
# in Table 1. Section 2.2 has seq_length, init_method_std, optimizer, schedule, dropout and clipping. The other values
# are this project's choice.
# python prepare.py --tokenizer=gpt2
#
# A hackathon team trained OPT-125M on BookCorpus, CC News and WikiText with DeepSpeed's ZeRO stage 3 and the paper's
# values, but 2 samples per GPU, as a GPU had only 16 GB. In 24 hours the loss fell to about 3. To use these
# values, for example on 4 GPUs: --zero=3 --micro_batch_size=2 --global_batch_size=8.
data_dir = "data/stdlib_gpt2"

activation = "relu"
num_layers = 12
hidden_size = 768
num_attention_heads = 12
seq_length = 2048
dropout = 0.1  # here also on the embedding; the paper has none there
init_method_std = 0.006

global_batch_size = 256  # 256 * 2,048 = 0.5M tokens
train_iters = 572204  # 300B tokens

lr = 6e-4
min_lr = 6e-5
lr_decay_style = "linear"
lr_warmup_iters = 715  # 375M tokens
adam_beta2 = 0.95
weight_decay = 0.1
