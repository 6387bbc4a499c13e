# OPT-350M with LayerNorm before attention and MLP, 355,919,872 parameters. The released OPT-350M has LayerNorm after
# them and an embedding of 512 columns. Source: Zhang et al. 2022 (arXiv 2205.01068). Sizes, batch (0.5M tokens) and lr
# are in Table 1. Section 2.2 has seq_length, init_method_std, optimizer, schedule, dropout and clipping. The other
# values are this project's choice.
# python prepare.py --tokenizer=gpt2
#
# A hackathon team trained OPT-350M on BookCorpus. With lr = 3e-4 on 2 nodes of 4 GPUs the loss stayed at about 7. With
# lr = 3e-6 on 16 nodes, and so a larger batch, the loss fell to about 4. For this lr: --lr=3e-6 --min_lr=3e-7 --zero=3.
data_dir = "data/stdlib_gpt2"

activation = "relu"
num_layers = 24
hidden_size = 1024
num_attention_heads = 16
seq_length = 2048
dropout = 0.1  # here also on the embedding; the paper has none there
init_method_std = 0.006

micro_batch_size = 4
global_batch_size = 256  # 256 * 2,048 = 0.5M tokens
train_iters = 572204  # 300B tokens

lr = 3e-4
min_lr = 3e-5
lr_decay_style = "linear"
lr_warmup_iters = 715  # 375M tokens
adam_beta2 = 0.95
weight_decay = 0.1
