# The mixture of Swallow's code experiments: 50 billion tokens, 16% of them code, by continued training of Llama 3.1 8B.
# Source: Fujii et al. 2025 (arXiv 2505.02881) and the cards of its models, for example
# huggingface.co/tokyotech-llm/Llama-3.1-8B-code-ablation-exp2-LR2.5e-5-MINLR2.5E-6-WD0.1-iter0005000 (data, rates). The
# sizes are those of Llama 3 8B (arXiv 2407.21783, table 3), 8,030,261,248 parameters. Llama 3.1 scales its rotary
# positions; llama.py does not.
# python prepare.py FILES --tokenizer=FOLDER --out=data/swallow_code ..., a folder with Llama 3's tokenizer.json
# The weights are billions of tokens: 8 of code, 41.96 of text in Japanese and English.
data_dir = (
    "8:data/swallow_code,26.1:data/swallow_corpus_v2,0.84:data/wikipedia_ja,0.22:data/laboro_paracorpus,"
    "10:data/dclm,3.7:data/cosmopedia,1.1:data/wikipedia_en"
)

model = "llama"
num_layers = 32
hidden_size = 4096
num_attention_heads = 32
num_query_groups = 8
ffn_hidden_size = 14336
rotary_base = 500000.0
seq_length = 8192
vocab_size = 128256
untie_embeddings_and_output_weights = True

micro_batch_size = 1
global_batch_size = 512  # not in the source; 12,500 * 512 * 8,192 = 52 billion tokens
train_iters = 12500  # the last of the published checkpoints

lr = 2.5e-5
min_lr = 2.5e-6
weight_decay = 0.1
