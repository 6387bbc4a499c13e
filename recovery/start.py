"""The start of a run: files, locks, and what all hosts must have in common."""

import contextlib
import socket
import sys
import tempfile
import zlib
from importlib.util import find_spec
from pathlib import Path

import config as configuration
import data
import operations
from accounts import limits
from errors import UserError, explained, losable
from parallel.comm import agree, gather_objects
from recovery import checkpoint, hang, processes
from tokenizer import copied

PROGRAM = *hang.PROGRAM, hang.ROOT / "accounts"  # folders of files that must be equal on all hosts
# Hosts may have other paths to the same files (`compare_hosts`).
COMPARED_BY_CONTENT = "out_dir", "data_dir", "resume", "initial_weights"


def describe(run, path):
    """Return what rank 0 prints at the start, as text. path: the checkpoint, or None."""
    c, names = run.config, "tp cp pp zero sequence_parallel recompute".split()
    if c.pp > 1:
        names.append("schedule")
    layout = " ".join(f"{name}={getattr(c, name)}" for name in names)
    text = f"{run.model.num_parameters():,} parameters, {c.num_layers} layer{'s' * (c.num_layers > 1)} "
    text += f"of {c.hidden_size}; dp={run.mesh.data.size // c.cp} {layout}; {run.dtype} on {run.device.type}\n"
    text += f"{c.data_dir} -> {c.out_dir}, from {path or c.initial_weights or 'initial weights'}"
    if run.device.type == "cuda":
        ops = run.zero.ops
        text += f"\noperations of {ops.add_rows_.__module__}.py, attention of {ops.attention.__module__}.py"
    if path and (changed := configuration.differences(c, checkpoint.read_index(path))):
        text += f"\nchanged since {path}: {changed}; to begin anew, set another --out_dir"
    return text


def open_files(config, mesh, device, stack):
    """Lock out_dir. Return ({split: Mixture}, path of the checkpoint to resume from or None).

    Raises UserError, also if Triton lacks a compiler, or if the model does not fit into memory: in `build_run` the
    ranks wait for each other, so an error of one rank must be found before.
    """
    if mesh.rank == 0 and not config.eval_only:
        losable(sys.stdout)
        for name in filter(vars(config).get, ("tensorboard", "wandb")):
            configuration.require(config, name, find_spec(name), f"needs a package: pip install {name}")
        stack.enter_context(processes.lock(config.out_dir))
        checkpoint.remove_unfinished(config.out_dir)
    splits = [config.split] if config.eval_only else ["train", "val"][: 1 + (config.eval_iters > 0)]
    tokens = {s: data.Mixture(config.data_dir, s, config.seq_length, config.vocab_size) for s in splits}
    state = None if config.eval_only else tokens["train"].state()
    tokenizer = tokens[splits[0]].first.meta["tokenizer"]
    if state and mesh.rank == 0:
        copied(tokens["train"].first.path.parent, tokenizer)  # each save copies it
    path = checkpoint.to_resume(config, tokenizer, state)
    if config.initial_weights and not path:
        checkpoint.check_weights(config, tokenizer)
    operations.trial(config, device)
    limits.refuse_too_large(config, mesh.world.size, device)
    return tokens, path


def compare_hosts(c, mesh, tokens, path):
    """Raise UserError on all ranks if a rank sees another out_dir, data, checkpoint or program than rank 0."""
    with contextlib.ExitStack() as stack:
        writes, weights = mesh.rank == 0 and not c.eval_only, "" if path else c.initial_weights
        name = agree(mesh.world, lambda: stack.enter_context(new_file(c.out_dir)) if writes else "")
        name = gather_objects(name, mesh.world)[0]
        view = {
            "out_dir": not name or Path(c.out_dir, name).exists(),
            "data_dir": [data.mixture(split.state()) for split in tokens.values()],
            "resume": path and checkpoint.read_index(path)["crc32"],
            "initial_weights": weights and checkpoint.read_index(checkpoint.find(weights))["crc32"],
        }
        why = "sees other files there than rank 0; all hosts need one shared out_dir and equal data"
        # Afterwards rank 0 removes the file.
        compare_with_rank_0(view, mesh.world, lambda name, who, _: f"{name}={getattr(c, name)}: {who} {why}")
    why = "runs another file than rank 0; all hosts need the same program"
    compare_with_rank_0(program(), mesh.world, lambda name, who, _: f"{name}: {who} {why}")


def compare_with_rank_0(values, world, line):
    """Raise UserError on all ranks if a rank has another value than rank 0. values: {name: value}.

    line(name, who, rank 0's value): of the error. What rank 0 lacks is not compared.
    """
    first = gather_objects(values, world)[0]

    def compare():
        who = f"rank {world.rank} (on {socket.gethostname()})"
        for name, value in values.items():
            if value != first.get(name, value):
                raise UserError(line(name, who, first[name]))

    agree(world, compare)


def program():
    """Return {path: crc32} of this project's files that the process has imported, without configurations."""
    files = {Path(getattr(module, "__file__", None) or "").absolute() for module in [*sys.modules.values()]}
    # Some modules have no file.
    paths = sorted(path for path in files if path.parent in PROGRAM and path.is_file())
    return {str(path.relative_to(hang.ROOT)): zlib.crc32(path.read_bytes()) for path in paths}


@contextlib.contextmanager
def new_file(out_dir):
    """Context: make a file in out_dir. Yield its name, a new one: a network file system may remember that an old name
    did not exist.
    """
    with explained(f"out_dir={out_dir}"), tempfile.NamedTemporaryFile(dir=out_dir, buffering=0) as file:
        file.write(bytes(4096))  # a full disk may take a name, but no bytes
        yield Path(file.name).name


def load_config(words, world):
    """Return the Config of the command line `words`. All ranks raise the same UserError, also if the hosts differ."""
    config = agree(world, lambda: configuration.load(words))
    agree(world, lambda: configuration.check(config, world.size))  # first, because nan differs from nan
    config.own = configuration.own_text(config)
    fields = {name: value for name, value in vars(config).items() if name not in COMPARED_BY_CONTENT}

    def line(name, who, first):
        why = f"has this value, and rank 0 has {name}={first}; start all hosts with equal fields"
        return f"{name}={fields[name]}: {who} {why}"

    compare_with_rank_0(fields, world, line)
    return config
