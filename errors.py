"""Mistakes of a user: one line with the field, its value and the remedy, and exit code 2. And the commands' options.

`with reading(file):` turns every error of a missing or damaged file into one line, so the code in it needs no checks.
"""

import argparse
import contextlib
import difflib
import json
import os
import re
import sys
import time

if sys.platform == "win32" or sys.version_info < (3, 11):  # the programs import this file before all others
    found = f"Python {sys.version.split()[0]} on {sys.platform}"
    print(f"error: {found}: should be 3.11 or later, on Linux, macOS or WSL (GUIDE.md, Machines)", file=sys.stderr)
    sys.exit(2)
import fcntl

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
    "type": "use --optimizer",
    "betas": "use --adam_beta1 and --adam_beta2",
    "gradient-clipping max-grad-norm": "use --clip_grad",
    "loss-scale": "not needed: 0 means dynamic, and fp16's always is (the first: --initial_loss_scale)",
    "wall-clock-breakdown": "not needed: the times are always printed",
    "zero-allow-untested-optimizer": "not needed: --zero works with each --optimizer",
}
WRONG = OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError


class UserError(Exception):
    """A mistake that the user can correct. Its message is one line."""


def agreed(text):
    """Return a UserError that every rank raises, so that one rank prints it."""
    error = UserError(text)
    error.agreed = True
    return error


# --- files ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(file, *more, wrong=WRONG):
    """Turn an error of the content of `file`, or one of the exceptions `more`, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (*wrong, *more) as error:
        said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{file}: {said}") from None


def explained(what):
    """Turn an OSError in the block into a UserError about `what`."""
    return reading(what, wrong=(OSError,))


@contextlib.contextmanager
def locked(path, message):
    """Hold the lock of the file `path` in the block. Raises UserError(message) if another process holds it."""
    with explained(path):
        file = open(path, "w")
    with file:
        try:
            # With flock, a forked worker would keep the lock longer than this process.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(message) from None
        except OSError:
            pass  # the file system has no locks
        yield


# --- the end of a command ---------------------------------------------------------------------------------------------


def cause(error):
    """Return a UserError for a mistake, an OSError or a lack of memory, otherwise None."""
    if isinstance(error, MemoryError) or re.search("can't allocate memory|out of memory", str(error)):
        return UserError(f"not enough memory: {error}")
    if isinstance(error, OSError) and error.strerror:
        return UserError(f"{error.filename or 'the system refused a call'}: {error.strerror}")
    return error if isinstance(error, UserError) else None


def report_error(error, late=0, code=2):
    """Print an error's line on stderr, and write it into torchrun's error file of this process. code: exit code.

    torchrun prints the error file with the smallest time as the "Root Cause". So a rank that only lost a peer reports
    with late=1 second.
    """
    line = " ".join(f"error: {error}".splitlines())
    print(line, file=sys.stderr, flush=True)
    write_error_file(line, late, code)


def write_error_file(text, late=0, code=2):
    """Write `text` as torch.distributed.elastic's ErrorHandler does."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()) + late)}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "errorCode": code, "extraInfo": extra}}, file)


def end_if_repeated():
    """End a process that torchrun starts again after a mistake. It reports the mistake of the start before again."""
    path, start = os.environ.get("TORCHELASTIC_ERROR_FILE", ""), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    before = path.replace(f"attempt_{start}", f"attempt_{start - 1}")
    with contextlib.suppress(OSError, ValueError, LookupError), open(before, encoding="utf-8") as file:
        if json.load(file)["message"]["errorCode"] == 2:
            os.rename(before, path)
            sys.exit(2)


end_if_repeated()  # before the import of torch, which takes seconds


def exit_on_user_error(main):
    """Call `main()`. An error with a `cause` ends the program with its line and exit code 2, Ctrl-C with 130."""
    sys.stdout.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` closes the pipe early
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the flush at exit fails
        sys.exit(141)
    except Exception as error:
        if (known := cause(error)) is None:
            raise
        report_error(known)
        sys.exit(2)


# --- options ----------------------------------------------------------------------------------------------------------


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
        near = difflib.get_close_matches("--" + name.replace("-", "_"), self._option_string_actions, n=1)
        return f"no such option; {f'the nearest is {near[0]}' if near else f'{self.prog} --help lists all'}"

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
