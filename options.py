"""The commands' options. An unknown option gets a remedy: ours, or that of another program's."""

import argparse
import contextlib
import difflib
import json
import re
import sys

from errors import UserError

# Options of Megatron-LM, DeepSpeed (also its JSON file's keys), torchtitan and their launchers, and the answers.
FOREIGN = {
    "vocab vocab-file merge-file tokenizer-type": "use prepare.py --tokenizer=vocab.json, with merges.txt beside it",
    "input": "use prepare.py FILE ... --out=FOLDER",
    "output-prefix": "use prepare.py --out=FOLDER",
    "json-keys": "use prepare.py --text_key=KEY",
    "data-impl dataset-impl": "not needed: tokens are always mapped into memory (mmap)",
    "chunk-size": "not needed: prepare.py chooses it",
    "append-eod": "not needed: prepare.py always ends a document with its token",
    "load": "not needed: a run resumes from --out_dir, if a checkpoint is there (another one: --resume)",
    "override-lr-scheduler": "not needed: a resumed run always uses the new --lr, --lr_decay_iters ...",
    "distributed-backend": "not needed: nccl on GPUs, gloo on CPUs",
    "local-rank": "not needed: start with torchrun --nproc_per_node=N instead of python -m torch.distributed.launch",
    "nproc-per-node nnodes node-rank master-addr master-port": "put it before train.py: torchrun {}=... train.py ...",
    "num-gpus": "use torchrun --nproc_per_node=N",
    "num-nodes hostfile": "use torchrun --nnodes=N on each host (GUIDE.md, Several hosts)",
    "fp16": "use --dtype=fp16",
    "bf16": "use --dtype=bf16",
    "checkpoint-activations deepspeed-activation-checkpointing recompute-activations recompute-granularity "
    "recompute-method recompute-num-layers recompute-modules activation-checkpoint.mode": "use --recompute=full",
    "no-masked-softmax-fusion": "use --kernels=torch",
    "deepspeed no-pipeline-parallel": "not needed: ZeRO is --zero, the pipeline is --pp",
    "deepspeed-config": "not needed: each key is a field, --zero, --clip_grad ... (GUIDE.md, From Megatron-DeepSpeed)",
    "train-batch-size training.global-batch-size": "use --global_batch_size",
    "train-micro-batch-size-per-gpu training.local-batch-size": "use --micro_batch_size",
    "gradient-accumulation-steps": "not needed: it is --global_batch_size / (--micro_batch_size * dp)",
    "steps-per-print": "use --log_interval",
    "zero-optimization stage data-parallel-sharding-strategy use-distributed-optimizer use-megatron-fsdp "
    "parallelism.data-parallel-shard-degree": "use --zero=1, 2 or 3",
    "offload-optimizer cpu-offload optimizer-cpu-offload": "use --offload=True",
    "parallelism.tensor-parallel-degree": "use --tp",
    "parallelism.pipeline-parallel-degree": "use --pp",
    "parallelism.context-parallel-degree": "use --cp",
    "num-layers-per-virtual-pipeline-stage": "use --chunks, the number of parts of a rank",
    "expert-model-parallel-size": "not needed: experts are cut over --tp",
    "training.steps train-samples": "use --train_iters",
    "training.seq-len": "use --seq_length",
    "lr-wsd-decay-style": "not needed: wsd falls linearly",
    "lr-decay-samples lr-scheduler.decay-ratio": "use --lr_decay_iters",
    "lr-warmup-samples lr-scheduler.warmup-steps": "use --lr_warmup_iters",
    "optimizer.lr": "use --lr",
    "checkpoint.interval": "use --save_interval",
    "data-path train-data-path data-args-path blend training.dataset": "use --data_dir=DIR, or 60:DIR,40:DIR by weight",
    "tokenizer-model": "use prepare.py --tokenizer=FILE",
    "pretrained-checkpoint no-load-optim": "use --initial_weights=PATH",
    "check-weight-hash-across-dp-replicas-interval": "use --check_replicas",
    "no-load-rng no-save-rng": "not needed: a checkpoint has no random state",
    "ckpt-format dist-ckpt-format use-dist-ckpt": "not needed: any layout reads the one format",
    "num-workers data-cache-path": "not needed: a thread reads ahead, and no index is built",
    "overlap-grad-reduce overlap-param-gather overlap-comm": "not needed: communication always overlaps computation",
    "valid-data-path test-data-path per-split-data-args-path": "not built: prepare.py --split divides each data set",
    "swiglu group-query-attention disable-bias-linear normalization position-embedding-type "
    "use-rotary-position-embeddings model.name": "use --model=llama",
    "qk-layernorm kv-channels rotary-percent": "not built: see GUIDE.md, Change the model",
    "attention-dropout": "not built: --dropout is that of the outputs",
    "reset-attention-mask reset-position-ids eod-mask-loss": "not built: documents in a sample see each other",
    "fp8-format fp8-hybrid fp8-recipe fp4-format": "not built: see --dtype",
    "type optimizer.name": "use --optimizer",
    "betas": "use --adam_beta1 and --adam_beta2",
    "gradient-clipping max-grad-norm": "use --clip_grad",
    "loss-scale": "not needed: 0 means dynamic, and fp16's always is (the first: --initial_loss_scale)",
    "wall-clock-breakdown": "not needed: the times are always printed",
    "zero-allow-untested-optimizer": "not needed: --zero works with each --optimizer",
}


class Parser(argparse.ArgumentParser):
    """argparse's parser. --num-layers is --num_layers, and --ledger is --ledger=True."""

    def parse_known_args(self, words=None, namespace=None):
        words = list(sys.argv[1:] if words is None else words)
        for i, word in enumerate(words):
            flag, equals, value = word.partition("=")
            name = "--" + flag[2:].replace("-", "_")
            if flag.startswith("--") and (option := self._option_string_actions.get(name)):
                words[i] = f"{name}=True" if option.type is boolean and not equals else name + equals + value
        return super().parse_known_args(words, namespace)

    def parse_args(self, words=None):
        options, unknown = self.parse_known_args(words)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("--")] or unknown[:1]
            raise UserError("; ".join(f"{flag}: {self.meaning(flag)}" for flag in flags))
        return options

    def meaning(self, flag):
        """Return a remedy for an unknown word."""
        name = flag.lstrip("-").replace("_", "-")
        for names, answer in FOREIGN.items():
            if name in names.split():
                return answer.format(flag)
        for option in self._actions:
            if f"--{name}" in re.findall(r"--[\w-]+", option.help or ""):
                return f"use {option.option_strings[-1]}"
        word = "--" + name.replace("-", "_")
        ours = [option for option in self._option_string_actions if may_mean(word, option)]
        matches = difflib.get_close_matches(word, ours, n=1, cutoff=0.85)
        remedy = f"the nearest is {matches[0]}" if matches else f"{self.prog} --help lists all"
        return f"no such option; {remedy}"

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help lists the options)")


def may_mean(typo, option):
    """Return whether words are alike. ffn_hidden_size has other words than hidden_size: it is no typo, but foreign."""
    parts = list(zip(typo.split("_"), option.split("_"), strict=False))
    alike = [difflib.SequenceMatcher(None, *pair).ratio() > 0.6 for pair in parts]
    return all(alike) and len(alike) > typo.count("_")


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
    return bool(json.loads(text.lower()))
