"""The flags of the command lines: how words become flags and values, and answers to flags that a command lacks.

`-` and `_` are equal in a name: --num-layers is --num_layers. Many flags of Megatron-LM have the same name here. The
tables list flags of Megatron-LM, DeepSpeed and their launchers that have another name here, or none. A command answers
such a flag with the text beside it, and --help prints the command's table. This file imports no other file of the
project, because `errors` imports it and most files import `errors`.
"""

import difflib
import re
import textwrap
from pathlib import Path

WIDTH = 120  # columns of --help

# A row: flags, two or more spaces, and the answer to these flags.
TABLES = {
    "train.py": """
  --tensor-model-parallel-size --model-parallel-size   use --tp
  --pipeline-model-parallel-size                       use --pp
  --num-virtual-stages-per-pipeline-rank               use --chunks with --schedule=interleaved
  --num-layers-per-virtual-pipeline-stage              use --schedule=interleaved --chunks=num_layers/(pp * THE VALUE)
  --context-parallel-size                              not available: the axes are dp, tp and pp
  --expert-model-parallel-size --num-experts           not available: the model has no experts
  --zero-stage                                         use --zero
  --use-distributed-optimizer                          use --zero=1
  --use-torch-fsdp2                                    use --zero=3
  --cpu-optimizer --optimizer-cpu-offload              use --offload
  --overlap-grad-reduce                                not needed: always on
  --zero-reduce-scatter --zero-contigious-gradients    not needed: always on
  --zero-reduce-bucket-size                            not needed: each block of the model is one bucket
  --zero-allgather-bucket-size                         not needed: each block of the model is one bucket
  --checkpoint-activations --recompute-activations     use --recompute=full
  --deepspeed-activation-checkpointing                 use --recompute=full
  --recompute-granularity                              use --recompute=full; selective is not available
  --recompute-method --recompute-num-layers            not needed: --recompute=full recomputes every block
  --checkpoint-num-layers                              not needed: --recompute=full recomputes every block
  --partition-activations                              use --sequence_parallel: it cuts the blocks' saved inputs over tp
  --checkpoint-in-cpu                                  not available: the saved inputs stay on their rank's GPU
  --fp16                                               use --dtype=fp16
  --bf16                                               use --dtype=bf16
  --loss-scale                                         not available: always dynamic; see --initial_loss_scale
  --batch-size                                         use --micro_batch_size
  --hidden-dropout                                     use --dropout
  --attention-dropout                                  not available: attention probabilities have no dropout
  --ffn-hidden-size --kv-channels                      not available: the widths follow from --hidden_size
  --swiglu --normalization --position-embedding-type   not available: the model is GPT-2
  --group-query-attention --disable-bias-linear        not available: the model is GPT-2
  --untie-embeddings-and-output-weights                not available: the model is GPT-2
  --make-vocab-size-divisible-by                       not needed: the multiple is always 128
  --train-samples                                      use --train_iters or --train_epochs
  --lr-decay-samples                                   use --lr_decay_iters
  --lr-warmup-samples                                  use --lr_warmup_iters
  --warmup                                             use --lr_warmup_fraction
  --override-lr-scheduler                              not needed: a resumed run uses the values of its command
  --override-opt-param-scheduler                       not needed: a resumed run uses the values of its command
  --data-path --train-data-path                        use --data_dir; prepare.py --megatron=PREFIX makes the folder
  --valid-data-path --test-data-path                   not needed: --data_dir has the three splits
  --data-impl --num-workers --dataloader-type          not needed: the tokens are mapped into memory
  --vocab-file --merge-file                            not needed: --data_dir has it (prepare.py --tokenizer=vocab.json)
  --tokenizer-type --tokenizer-model                   not needed: --data_dir has it (prepare.py --tokenizer=vocab.json)
  --save                                               use --out_dir
  --load                                               use --resume; without it, a run resumes from --out_dir
  --no-load-optim --no-load-rng --finetune             not available: a run resumes everything in its checkpoint
  --exit-interval --exit-duration-in-mins              not available: SIGTERM or Ctrl-C saves and stops
  --exit-signal-handler                                not needed: SIGTERM or Ctrl-C saves and stops
  --tensorboard-dir                                    use --tensorboard
  --wandb-project                                      use --wandb
  --wandb-exp-name                                     not needed: the name comes from --out_dir
  --log-throughput                                     not needed: always on
  --no-masked-softmax-fusion --no-bias-gelu-fusion     use --kernels=torch, plain PyTorch
  --no-bias-dropout-fusion                             use --kernels=torch, plain PyTorch
  --use-flash-attn --attention-backend                 not needed: PyTorch chooses; see also --kernels=triton
  --transformer-impl --use-mcore-models                not needed: the model has one implementation
  --distributed-backend                                not needed: NCCL on GPUs, Gloo on CPUs
  --distributed-timeout-minutes                        use --comm_timeout, in seconds
  --deepspeed --no-pipeline-parallel                   not needed: ZeRO is --zero, the pipeline is --pp
  --deepspeed-config                                   use the fields of train.py --help
  --nproc-per-node --num-gpus                          use torchrun --nproc_per_node=N train.py ...
  --nnodes --num-nodes                                 on node R: torchrun --nnodes=N --node_rank=R --master_addr=A ...
  --node-rank                                          on node R: torchrun --nnodes=N --node_rank=R --master_addr=A ...
  --master-addr                                        use torchrun --master_addr=A ..., where A is node 0's address
  --master-port                                        use torchrun --master_port=P ..., with the same P on all nodes
  --hostfile                                           not available: start torchrun on each node
  --include --exclude                                  not available: set CUDA_VISIBLE_DEVICES for torchrun on each node
  --local-rank                                         not needed: start with torchrun, which sets LOCAL_RANK
""",
    "prepare.py": """
  --input                                  name the files without a flag: python prepare.py FILE ...
  --output-prefix                          use --out, a folder
  --json-keys                              use --text_key
  --tokenizer-type --tokenizer-model       use --tokenizer: gpt2, or a folder or file of a byte-level BPE
  --vocab --vocab-file                     use --tokenizer=vocab.json; merges.txt must lie beside it
  --merge-file                             use --tokenizer=vocab.json; merges.txt must lie beside it
  --append-eod                             not needed: every document ends with the end-of-text token
  --data-path                              use --megatron, the path without .bin or .idx
  --dataset-impl --data-impl --chunk-size  not needed: the output is a plain file of tokens
  --split-sentences --keep-newlines        not needed: a document is encoded as it is
  --log-interval                           not needed: a bar shows the progress
""",
    "generate.py": """
  --load                                   name the folder without a flag: python generate.py out/tiny
  --vocab-file --merge-file                not needed: the checkpoint has a copy of the vocabulary
  --tokenizer-type --tokenizer-model       not needed: the checkpoint has a copy of the vocabulary
  --out-seq-length                         use --max_tokens
  --greedy                                 use --temperature=0
""",
}
OPTIONS = {  # of the other commands; the fields of train.py are in config.py
    "prepare.py": "out tokenizer split workers text_key megatron on_error".split(),
    "generate.py": "prompt max_tokens num_samples temperature top_k top_p seed".split(),
}
FIELD = re.compile(r"    (\w+): \w+ = (.*?)  # (.*)")  # a line of `config.Config`
NUMBER = re.compile(r"-?(\.?\d[\d.,]*(e[-+]?\d+)?|inf|nan)", re.I)  # a word that is a value, never a flag or a file
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def plain(name):
    """A flag's name as a Python name: --num-layers is num_layers."""
    return name.lstrip("-").replace("-", "_")


def split(words, booleans):
    """Split a command line into ([words without a flag], [(flag, value)]). A missing value is None.

    `--flag=value` and `--flag value` are the same. booleans: names of flags whose value may be left out. A word after
    such a flag is its value only if the word is in BOOLEANS.
    """
    alone, pairs, words = [], [], list(words)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag.startswith("-") or NUMBER.fullmatch(flag):
            alone.append(flag + equals + value)
            continue
        if not equals:
            value, following = None, words[0] if words else "-"
            if plain(flag) in booleans:
                value = words.pop(0) if following.lower() in BOOLEANS else "True"
            elif not following.startswith("-") or NUMBER.fullmatch(following):
                value = words.pop(0)
        pairs.append((flag, value))
    return alone, pairs


def rows(command):
    """Yield (flags, answer) of a command's table."""
    for line in TABLES.get(command, "").strip().splitlines():
        names, answer = re.split(r"  +", line.strip(), maxsplit=1)
        yield names.split(), answer


def answers(command):
    """{name: answer} of a command's table."""
    return {plain(name): answer for names, answer in rows(command) for name in names}


def names(command):
    """The flags that a command has. For train.py, read the text of config.py, because its import would load torch."""
    if command in OPTIONS:
        return OPTIONS[command]
    source = Path(__file__).with_name("config.py").read_text(encoding="utf-8")
    return [line[1] for line in map(FIELD.match, source.splitlines()) if line]


def unknown(name, known, prog):
    """Return a one-line answer to a `name` that is not among the `known` names of the command `prog`."""
    key, command = plain(name), prog.split()[-1]
    if answer := answers(command).get(key):
        return f"{answer} ({prog} --help lists such flags)"
    for other in TABLES:
        if other != command and (key in names(other) or key in answers(other)):
            answer = answers(other).get(key)
            return f"belongs to {other}" + (f" ({answer})" if answer else "")
    near = difflib.get_close_matches(key, known, n=1)  # a similarity of at least 0.6, difflib's default
    kind = "field" if command == "train.py" else "option"
    return f"no such {kind}; " + (f"the nearest is {near[0]}" if near else f"{prog} --help lists all")


def refusal(flags, known, prog):
    """Return a line for each of the unknown `flags`, so that a pasted command is answered at once."""
    return "\nerror: ".join(f"{flag}: {unknown(flag, known, prog)}" for flag in flags)


def table_text(prog):
    """The table of a command as a section of its --help. prog: "python prepare.py"."""
    command = prog.split()[-1]
    title = "flags of Megatron-LM, DeepSpeed and their launchers that have another name here, or none:"
    return f"\n{title}{TABLES[command]}" if command in TABLES else ""


HELP = """\
python train.py [CONFIG.py] [--field=value ...]                              one process
torchrun --nproc_per_node=N train.py [CONFIG.py] [--field=value ...]         N processes

example: torchrun --nproc_per_node=4 train.py configs/gpt2_345m.py --tp=2 --zero=1 --lr=3e-4

CONFIG.py is a Python file that assigns fields (default: configs/tiny.py). The command line replaces its values.
--num_layers=24, --num_layers 24 and --num-layers 24 are the same. True may be left out: --ledger is --ledger=True."""


def help_text(source, choices):
    """Every field of `source`, the text of `Config`, with its default and comment. choices: {field: its values}."""
    lines = [HELP]
    for line in source.splitlines():
        if section := re.match(r"    # -- (.*)", line):
            lines.append(f"\n{section[1]}")
        elif row := FIELD.match(line):
            name, default, text = row.groups()
            default = default.strip('"').replace("2.0**32", "2^32")
            text += f" ({', '.join(map(str, choices[name]))})" if name in choices else ""
            left = f"  --{name + '=' + default:<34} "
            lines += textwrap.wrap(left + text, WIDTH, subsequent_indent=" " * 39, break_on_hyphens=False)
    return "\n".join([*lines, table_text("python train.py").rstrip("\n")])
