"""The commands' options. An unknown option gets a remedy: ours, or that of another program's."""

import argparse
import contextlib
import difflib
import json
import re
import sys

from errors import UserError

# Options of Megatron-LM, DeepSpeed (also its JSON file's keys) and their launchers, and the answers.
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
    "checkpoint-activations deepspeed-activation-checkpointing": "use --recompute=full",
    "no-masked-softmax-fusion": "use --kernels=torch",
    "deepspeed no-pipeline-parallel": "not needed: ZeRO is --zero, the pipeline is --pp",
    "deepspeed-config": "not needed: each key is a field, --zero, --clip_grad ... (GUIDE.md, From Megatron-DeepSpeed)",
    "train-batch-size": "use --global_batch_size",
    "gradient-accumulation-steps": "not needed: it is --global_batch_size / (--micro_batch_size * dp)",
    "steps-per-print": "use --log_interval",
    "zero-optimization stage": "use --zero",
    "swiglu group-query-attention disable-bias-linear normalization position-embedding-type": "use --model=llama",
    "type": "use --optimizer",
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
        matches = difflib.get_close_matches(word, self._option_string_actions, n=1)
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
    return bool(json.loads(text.lower()))
