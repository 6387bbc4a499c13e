"""Published runs: sizes, layouts and speeds from two papers. `fit.py` and tests use them.

NARAYANAN: Narayanan et al., arXiv 2104.04473, Table 1. KORTHIKANTI: Korthikanti et al., arXiv 2205.05198, Table 5. Both
papers trained GPT with a vocabulary of 51,200 and 2,048 tokens in a sample, on nodes of eight A100 with 80 GB.

Their programs differ from this project. These settings of `plan.py` predict their features:

    their program                                     setting
    attention's matrix, messages, reductions          code="megatron-2021", "megatron-2022" (`seconds.py`)
    selective recomputation                           recompute=none
    dropout on attention                              code="megatron-2021", "megatron-2022" count it
    gradients of 2 bytes (Narayanan et al.)           none: we count 4 bytes
"""

VOCABULARY, TOKENS = 51200, 2048

# (billions of parameters, heads, h, L, tp, pp, GPUs, global batch, TFLOP/s of a GPU with recomputation, % of the peak,
# PFLOP/s of all)
NARAYANAN = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 44, 4.4),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 44, 8.8),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 46, 18.2),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 43, 34.6),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 44, 70.8),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 45, 143.8),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 47, 227.1),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 50, 297.4),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 52, 410.2),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 52, 502.0),
]

# (model, L, h, heads, tp, pp, chunks, global batch, micro-batch, GPUs, seconds with full recomputation, seconds with
# selective recomputation and sequence parallelism, % MFU and % HFU with selective recomputation)
KORTHIKANTI = [
    ("22B", 48, 6144, 64, 8, 1, 1, 4, 4, 8, 1.42, 1.10, 41.5, 43.7),
    ("175B", 96, 12288, 96, 8, 8, 3, 64, 1, 64, 18.13, 13.75, 51.4, 52.8),
    ("530B", 105, 20480, 128, 8, 35, 3, 280, 1, 280, 49.05, 37.83, 56.0, 57.0),
    ("1T", 128, 25600, 160, 8, 64, 1, 512, 1, 512, 94.42, 71.49, 56.3, 57.0),
]
DATA_PARALLEL_530B = 8, 2240, 39.15, 54.2  # dp, GPUs, seconds, % MFU of the 530B model with dp times its batch
