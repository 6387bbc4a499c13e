"""The commands' options. An unknown option gets a remedy: ours, or that of another program's."""

import argparse
import contextlib
import difflib
import os
import re
import sys

from errors import UserError

# What other programs call an option: patterns of Megatron-LM, DeepSpeed (also keys of its JSON file), torchtitan, NeMo,
# nanotron and their launchers, then our answer.
FOREIGN = """
vocab vocab-file merge-file tokenizer-type: use prepare.py --tokenizer=vocab.json, with merges.txt beside it
tokenizer-model .*tokenizer-path: use prepare.py --tokenizer=FILE
input: use prepare.py FILE ... --out=FOLDER
output-prefix: use prepare.py --out=FOLDER
json-keys: use prepare.py --text_key=KEY
data-impl dataset-impl: not needed: tokens are always mapped into memory (mmap)
chunk-size: not needed: prepare.py chooses it
append-eod: not needed: prepare.py always ends a document with its token
(train-)?data-path data-args-path blend training.dataset .*data-prefix: use --data_dir=DIR, or 60:DIR,40:DIR by weight
valid-data-path test-data-path per-split-data-args-path: not built: prepare.py --split divides each data set
num-workers data-cache-path: not needed: a thread reads ahead, and no index is built
load: not needed: a run resumes from --out_dir, if a checkpoint is there (another one: --resume)
pretrained-checkpoint no-load-optim: use --initial_weights=PATH
no-load-rng no-save-rng: not needed: a checkpoint has no random state
ckpt-format dist-ckpt-format use-dist-ckpt: not needed: any layout reads the one format
checkpoint.interval .*checkpoint-interval: use --save_interval
override-lr-scheduler: not needed: a resumed run always uses the new --lr, --lr_decay_iters ...
distributed-backend: not needed: nccl on GPUs, gloo on CPUs
local-rank: not needed: start with torchrun --nproc_per_node=N instead of python -m torch.distributed.launch
nproc-per-node nnodes node-rank master-addr master-port: put it before train.py: torchrun {}=... train.py ...
num-gpus trainer.devices: use torchrun --nproc_per_node=N
(trainer.)?num-nodes hostfile: use torchrun --nnodes=N on each host (GUIDE.md, Several hosts)
deepspeed no-pipeline-parallel: not needed: ZeRO is --zero, the pipeline is --pp
deepspeed-config: not needed: each key is a field, --zero, --clip_grad ... (GUIDE.md, From Megatron-DeepSpeed)
fp16: use --dtype=fp16
bf16: use --dtype=bf16
trainer.precision training.mixed-precision-param: use --dtype
fp[48]-.* float8.*: not built: see --dtype
recompute-(granularity|activations): use --recompute=full for full; selective is usual: attention keeps no s^2 matrix
recompute-.* (deepspeed-)?activations?-checkpoint.* checkpoint-activations: use --recompute=full
no-masked-softmax-fusion no-.*-fusion: use --kernels=torch
train-batch-size: use --global_batch_size
train-micro-batch-size-per-gpu training.local-batch-size batch-size: use --micro_batch_size
gradient-accumulation-steps .*batch-accumulation.*: not needed: it is --global_batch_size / (--micro_batch_size * dp)
steps-per-print .*log-every-n-steps metrics.log-freq: use --log_interval
wall-clock-breakdown log-throughput timing-log-level: not needed: the times are always printed
log-.*-to-tensorboard: not needed: --tensorboard=DIR gets all numbers
profile-.* profiling.*: use --profile=DIR
zero-optimization stage data-parallel-sharding-strategy use-distributed-optimizer: use --zero=1, 2 or 3
use-megatron-fsdp .*data-parallel-shard-degree: use --zero=1, 2 or 3
.*data-parallel-replicate-degree: use --zero_copies
zero-allow-untested-optimizer: not needed: --zero works with each --optimizer
offload-optimizer cpu-offload optimizer-cpu-offload: use --offload=True
(tp-comm-)?overlap.*: not needed: communication overlaps computation where it can
no-async-tensor-model-parallel-allreduce: not needed: backward always computes dW meanwhile
DDP-impl use-torch-fsdp2: use --zero (0: as DDP, 3: as FSDP)
use-flash-attn.* attention-backend: not needed: on a GPU PyTorch chooses a fused attention; --kernels=triton has our own
attention-softmax-in-fp32: not needed: softmax is always computed in float32
accumulate-allreduce-grads-in-fp32: not needed: gradients are always summed in float32
use-cpu-initialization: not needed: initial weights are always computed on the CPU
transformer-impl use-mcore-models: not needed: there is one implementation
.*bucket-size stage3-max-.*: not needed: a bucket is a unit of the model
.*tensor-parallel-degree: use --tp
.*pipeline-parallel-degree: use --pp
.*context-parallel-degree: use --cp
num-layers-per-virtual-pipeline-stage: use --chunks, the number of parts of a rank
(num-)?experts top-k moe-.* expert-.*-parallel-size .*expert-parallel-degree: not built: see ladder/rung20_experts.py
context cp-comm-type .*ring-attention.*: not built: see ladder/rung21_ring_attention.py
penalty: not built: see ladder/rung22_gradient_variance.py
pipedream updates-per-call: not built: see ladder/rung14_pipedream.py
(training.|tokens.train-|max-)steps trainer.max-steps max-iters train-samples: use --train_iters
.*seq-len .*sequence-length model.encoder-seq-length block-size: use --seq_length
learning-rate: use --lr
scheduler .*decay-type: use --lr_decay_style
eps adam-epsilon optimizer.eps: use --adam_eps
n-layer: use --num_layers
n-head: use --num_attention_heads
n-embd: use --hidden_size
lr-wsd-decay-style: not built: wsd falls linearly
lr-decay-samples lr-scheduler.decay-ratio: use --lr_decay_iters
lr-warmup-samples .*warmup-steps: use --lr_warmup_iters
type optimizer.name model.optim.name: use --optimizer
betas: use --adam_beta1 and --adam_beta2
skip-norm grad-norm-skip-threshold: not built: see --clip_grad
stop-after-nan: not needed: it is always 20
gradient-clipping max-grad-norm training.max-norm trainer.gradient-clip-val: use --clip_grad
loss-scale: not needed: 0 means dynamic, and fp16's always is (the first: --initial_loss_scale)
check-weight-hash-across-dp-replicas-interval: use --check_replicas
swiglu group-query-attention disable-bias-linear normalization position-embedding-type model.name: use --model=llama
use-rotary-position-embeddings: use --model=llama
qk-layernorm kv-channels rotary-percent use-rope-scaling: not built: see GUIDE.md, Change the model
attention-dropout: not built: --dropout is that of the outputs
reset-attention-mask reset-position-ids eod-mask-loss: not built: documents in a sample see each other
"""


class Parser(argparse.ArgumentParser):
    """argparse's parser. --num-layers is --num_layers, and --ledger is --ledger=True."""

    def parse_known_args(self, words=None, namespace=None):
        self.register("type", None, os.path.expanduser)  # of paths: bash leaves the ~ of --out=~/x as it is
        words = list(sys.argv[1:] if words is None else words)
        for i, word in enumerate(words):
            flag, equals, value = word.partition("=")
            name = "--" + flag[2:].replace("-", "_")
            if flag.startswith("--") and (option := self._option_string_actions.get(name)):
                words[i] = f"{name}=True" if option.type is boolean and not equals else name + equals + value
        return super().parse_known_args(words, namespace)

    def parse_args(self, words=None):
        return self.known(*self.parse_known_args(words))

    def known(self, options, unknown):
        """Return `options`. Raises UserError with a remedy for each of the `unknown` words."""
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("--")] or unknown[:1]
            raise UserError("; ".join(f"{flag}: {self.meaning(flag)}" for flag in flags))
        return options

    def meaning(self, flag):
        """Return a remedy for an unknown word."""
        name = flag.lstrip("-").replace("_", "-")
        last = name.rpartition(".")[2]  # torchtitan has --training.seed, NeMo model.optim.lr
        if (ours := "--" + last.replace("-", "_")) in self._option_string_actions:
            return f"use {ours}"
        for names, _, answer in (row.partition(": ") for row in FOREIGN.splitlines()):
            if any(re.fullmatch(pattern, name) for pattern in names.split()):
                return answer.format(flag)
        for option in self._actions:
            if f"--{last}" in re.findall(r"--[\w-]+", option.help or ""):
                return f"use {option.option_strings[-1]}"
        word = "--" + name.replace("-", "_")
        # 0.88: ffn_hidden_width is no typo of hidden_size, but another program's option.
        matches = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.88)
        remedy = f"the nearest is {matches[0]}" if matches else f"{self.prog} --help lists all"
        return f"no such option; {remedy}"

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help lists the options)")


def within(least, most, kind=int):
    """Return the type of an option with a number from `least` to `most`."""

    def number(text):
        with contextlib.suppress(ValueError, OverflowError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text}: should be {least:,} to {most:,}")

    return number


def boolean(text):
    """Return the value of True, 1, False or 0."""
    return ("false", "true", "0", "1").index(text.lower()) % 2 == 1
