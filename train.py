"""Train a GPT: the step, the loop, the run, the command line.

    torchrun --nproc_per_node=4 train.py configs/tiny.py --tp=2

Every process runs this file. A random number depends only on the seed and on its use: for an initial weight on the
parameter's name, for dropout on sample, position and layer. So a checkpoint needs no random state.
"""

from errors import UserError, exit_on_user_error, explained  # isort: skip
import contextlib
import itertools
import socket
import sys
import tempfile
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

import config as configuration
import data
import operations
import reference
from accounts import report, traffic
from log import Interval, Logger, PendingStep, Timers, signs_of_life, validation_lines
from model import GPT
from operations import DTYPES
from parallel import schedules
from parallel.comm import agree, all_reduce, gather_objects
from parallel.experts import dropped_if_uniform
from parallel.layout import Layout
from parallel.mesh import Mesh, everyone
from parallel.optimizer import LossScale, learning_rate
from parallel.penalty import PenalisedExecutor
from parallel.pipedream import PipeDream, train_call
from parallel.pipeline import Executor
from parallel.zero import Zero
from recovery import checkpoint, hang, processes, replicas
from tokenizer import COPY

PROGRAM = *hang.PROGRAM, hang.ROOT / "accounts"  # folders of files that must be equal on all hosts
COMPARED_BY_CONTENT = "out_dir", "data_dir", "resume"  # hosts may have other paths to the same files (`compare_hosts`)

# --- the step -------------------------------------------------------------------------------------------------------


def train_step(run, batches):
    """Make one update with micro-batches from the iterator `batches`. Return a `log.PendingStep`.

    If the gradient of one rank has an inf or nan, the sum of the squared norms over all ranks is not finite, and every
    rank skips the update: it changes no weight, no moment and not `zero.updates`.
    """
    c, mesh, zero = run.config, run.mesh, run.zero
    samples = configuration.global_batch_size_at(c, run.counters.consumed_samples)
    m = schedules.micro_batches(c, samples, mesh.dp.size)
    share = 1 / (m * mesh.dp.size)  # the loss is the mean over m micro-batches and the data ranks
    scale = run.loss_scale.scale

    zero.zero_grad()
    loss = share * run.executor.run(batches, m, share * scale)
    with run.timers("grad-reduce"):
        zero.finish()

    with run.timers("optimizer"):
        # One all_reduce gives every rank the loss, the squared gradient norm, and whether a rank shall stop.
        mesh.ledger.phase = "step"
        loss = loss if mesh.tp.rank == 0 else 0 * loss  # the tp ranks have equal losses: count one
        stop = loss.new_full((), float(run.signals.stop))
        sums = torch.stack([loss, zero.squared_norm(), stop])
        loss, squared_norm, stop = all_reduce(sums, mesh.world, "scalars").wait()

        # With AdamW in bf16 or fp32 the CPU does not wait for the GPU.
        norm = squared_norm.sqrt() / scale
        skip = ~norm.isfinite()
        clip = (c.clip_grad / (norm + 1e-6)).clamp(max=1.0) if c.clip_grad else torch.ones_like(norm)
        lr = run.rates.take(zero.updates)  # unlike run.rates[...], it does not wait for the GPU
        zero.update(reference.update_scalars(lr, clip / scale, zero.updates + 1, skip, c.adam_beta1, c.adam_beta2))
        zero.publish()
        done = PendingStep(torch.stack([loss, norm, lr, skip, stop]), scale, samples)
        if run.loss_scale.dynamic:  # fp16: the next step's scale depends on this step's overflow
            run.loss_scale.update(done.read().skipped)

    run.steps[m] += 1
    run.counters.iteration += 1
    run.counters.consumed_samples += samples  # also those of a skipped step
    return done


@torch.no_grad()
def evaluate(run, tokens):
    """Return the mean loss per token of the first eval_iters global batches of `tokens`."""
    c, mesh = run.config, run.mesh
    mesh.ledger.phase = "evaluate"
    total = torch.zeros(2, dtype=torch.float64, device=run.device)
    wanted = c.eval_iters * c.global_batch_size
    share = data.eval_batches(tokens, wanted, *mesh.reader, c.micro_batch_size, c.seed, run.device)
    # Many micro-batches together: a pipeline fills and empties once for each list.
    while part := list(itertools.islice(share, 4 * c.pp)):
        run.watchdog.progress("validation")
        batches = [run.model.micro_batch(ids[:, :-1], ids[:, 1:]) for ids, _ in part]
        for j, losses in run.executor.evaluate(batches).items():
            if part[j][1]:  # real samples, not a stand-in (`data.eval_batches`)
                total[0] += losses.sum(dtype=torch.float64)
                total[1] += losses.numel()
    if mesh.tp.rank != 0:
        total.zero_()
    loss, count = all_reduce(total, mesh.world, "evaluation").wait().tolist()
    return loss / count


# --- the loop -------------------------------------------------------------------------------------------------------


def train(run, tokens, validation, logger):
    """Train until train_iters, or until a signal to stop. tokens, validation: `data.Tokens`; validation may be None."""
    c, counters, interval = run.config, run.counters, Interval(run, logger.say)
    samples = data.training_samples(counters.consumed_samples, *run.mesh.reader, c.micro_batch_size)
    with contextlib.closing(data.loaded(tokens, samples, c.seed, run.device)) as loader:
        batches, last = micro_batches(run, loader), counters.iteration >= c.train_iters
        while not last:
            before = counters.iteration
            run.watchdog.progress(f"iteration {before + 1}")
            steps = train_call(run, batches) if run.schedule.versions else [train_step(run, batches)]
            interval.add(steps)
            last = counters.iteration >= c.train_iters or interval.stop
            due = partial(crossed, before, counters.iteration, last)
            validate = validation and due(c.eval_interval) and not interval.stop
            if due(c.log_interval) or validate:
                row = interval.row()
                with interval.paused():
                    logger.log(row, evaluate(run, validation) if validate else None)
            if due(c.save_interval):
                interval.read(last)  # so that it knows whether the newest step was bad
            # A checkpoint of nan would be useless. Skipped updates change no weight, but the weights before them may
            # be the cause: saves between them would soon replace all good checkpoints.
            saving = due(c.save_interval) and not interval.bad_losses and (last or not interval.bad_gradients)
            if c.check_replicas and (due(c.check_replicas) or saving):
                replicas.compare_copies(run.zero, counters.iteration)
            if saving:
                run.watchdog.progress("save")
                with interval.paused():
                    logger.say(f"saved {save(run, tokens, keep=0 if interval.bad_gradients else c.keep)}")
    if counters.iteration < c.train_iters:
        logger.say(f"stopped after iteration {counters.iteration}; the same command (without --resume) resumes the run")
    else:
        logger.say(f"trained to iteration {counters.iteration}; python generate.py {c.out_dir}")


def crossed(before, now, last, every):
    """Return True in the last iteration, or if a multiple of `every` (not 0) lies in before + 1 .. now.

    A call of PipeDream makes several updates, so now may be larger than before + 1.
    """
    return last or (every > 0 and now // every > before // every)


def micro_batches(run, loader):
    while True:
        with run.timers("batch-generator"):
            tokens, samples = next(loader)  # [b, s + 1], [b]
            batch = run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], samples)
        yield batch


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass
class Counters:
    """The progress of a run. `Zero.updates` counts the updates that were not skipped."""

    iteration: int = 0
    consumed_samples: int = 0


@dataclass
class Run:
    config: configuration.Config
    mesh: Mesh
    device: torch.device
    dtype: str
    model: GPT
    layout: Layout
    schedule: schedules.Schedule  # for global_batch_size samples; during a ramp-up, steps have fewer micro-batches
    zero: Zero
    loss_scale: LossScale
    timers: Timers
    executor: Executor
    rates: torch.Tensor  # float64 [train_iters] on the device: the learning rate of each update
    counters: Counters = field(default_factory=Counters)
    signals: processes.Signals = field(default_factory=processes.Signals)
    watchdog: hang.Watchdog = field(default_factory=hang.Watchdog)
    steps: Counter = field(default_factory=Counter)  # {m: number of steps with m micro-batches}


def build(config, mesh, device):
    """Return the Run of this rank. Its weights are 0 until `Zero.initialize` or `restore`."""
    dtype = operations.resolved_dtype(config, device)
    exact = not config.penalty or dtype in ("fp32", "fp64")
    configuration.require(config, "penalty", exact, f"needs --dtype=fp32 or fp64; dtype=auto is {dtype} here")
    ops = operations.choose(config, device, dtype)
    model = GPT(config, mesh.tp, ops, mesh.cp)
    m = schedules.micro_batches(config, config.global_batch_size, mesh.dp.size)
    schedule = schedules.build_for(config, mesh.dp.size, m * config.updates_per_call)
    layout = Layout(config, mesh.dp.size, model.table, schedule)
    zero = Zero(model, layout, config, mesh, DTYPES[dtype], device, ops, training=not config.eval_only)
    timers = Timers(device)
    kind = PenalisedExecutor if config.penalty else Executor
    if schedule.versions and not config.eval_only:
        kind = PipeDream
    executor = kind(model, zero, config, mesh, layout, schedule, timers)
    scale = LossScale(config, dtype)
    rates = learning_rate(config, torch.arange(1, config.train_iters + 1)).to(device)
    return Run(config, mesh, device, dtype, model, layout, schedule, zero, scale, timers, executor, rates)


def save(run, tokens, keep):
    state = {
        "shapes": {name: list(spec.shape) for name, spec in run.model.specs().items()},
        "config": asdict(run.config),
        "tokenizer": tokens.meta["tokenizer"],
        "data": data.identity(tokens) | {"begins": tokens.begins},
        "counters": asdict(run.counters) | {"updates": run.zero.updates.item()},
        "loss_scale": run.loss_scale.state(),
    }
    copies = [Path(run.config.data_dir, name) for name in COPY]
    c, step = run.config, run.counters.iteration
    checkpoint.save_checkpoint(c.out_dir, step, run.zero, state, keep, copies)
    return checkpoint.step_path(c.out_dir, step)


def restore(run, path):
    """Load weights, moments and counters from the checkpoint `path`, which may be of any layout."""
    index = checkpoint.read_index(path)
    checkpoint.load_checkpoint(path, run.model, run.zero)
    run.zero.parameters_from_master()
    counters = index["counters"]
    run.zero.updates.fill_(counters.pop("updates"))
    run.counters = Counters(**counters)
    run.loss_scale.restore(index["loss_scale"])


# --- the command line -------------------------------------------------------------------------------------------------


def describe(run, path):
    """Return what rank 0 prints at the start, as text. path: the checkpoint, or None."""
    c, names = run.config, "tp cp pp zero sequence_parallel recompute".split()
    layout = " ".join(f"{name}={getattr(c, name)}" for name in names + ["schedule"] * (c.pp > 1))
    text = f"{run.model.num_parameters():,} parameters"
    if c.experts:
        text += f" ({run.model.num_parameters(active=True):,} of them for a token)"
    text += f", {c.num_layers} layers of {c.hidden_size}; "
    text += f"dp={run.mesh.dp.size // c.cp} {layout}; {run.dtype} on {run.device.type}\n"
    text += f"{c.data_dir} -> {c.out_dir}, from {path or 'initial weights'}"
    if c.experts:
        text += f"\nexperts: groups of {c.tokens_of_group} tokens; a uniform router drops {dropped_if_uniform(c):.1%}"
    if run.device.type == "cuda":
        text += f"\nattention: {operations.attention_name(c, run.device, run.dtype, run.zero.ops)}"
    if path and (changed := configuration.differences(c, checkpoint.read_index(path))):
        text += f"\nchanged since {path}: {changed}; to begin anew, set another --out_dir"
    return text


def run_training(config, mesh, device):
    """A UserError of one rank is raised on all ranks."""
    with contextlib.ExitStack() as stack:
        tokens, path = agree(mesh.world, lambda: open_files(config, mesh, device, stack))
        compare_hosts(config, mesh, tokens, path)
        if config.train_epochs and not config.eval_only:
            samples = tokens["train"].begins + config.train_epochs * tokens["train"].num_samples
            config.train_iters = configuration.iterations(config, samples)
            agree(mesh.world, lambda: configuration.check(config, mesh.world.size))
        watchdog = hang.Watchdog()
        if mesh.world.size > 1 and not config.eval_only:
            watchdog.watch(mesh, config.out_dir, 0.8 * config.comm_timeout)
        run = agree(mesh.world, lambda: build(config, mesh, device))
        run.watchdog = watchdog
        if mesh.rank == 0:
            print(describe(run, path), flush=True)  # printed first, because setting the weights may take minutes
        if path:
            restore(run, path)
        else:
            run.zero.initialize(config.seed)
        if config.eval_only:
            loss = evaluate(run, tokens[config.split])
            if mesh.rank == 0:
                print(validation_lines(run.counters.iteration, loss, config.split), flush=True)
            return
        logger = agree(mesh.world, lambda: Logger(run))
        stack.callback(logger.close)
        stack.enter_context(report.watching(run, logger.say))
        run.signals.watch(stack)
        if mesh.rank == 0:
            stack.enter_context(signs_of_life(run, logger.say))
        train(run, tokens["train"], tokens.get("val"), logger)


def open_files(config, mesh, device, stack):
    """Lock out_dir. Return ({split: Tokens}, path of the checkpoint to resume from or None).

    Raises UserError, also if Triton lacks a compiler, or if the model does not fit into memory: in `build` the ranks
    wait for each other, so an error of one rank must be found before.
    """
    if mesh.rank == 0 and not config.eval_only:
        for name in filter(vars(config).get, ("tensorboard", "wandb")):
            configuration.require(config, name, find_spec(name), f"needs a package: pip install {name}")
        stack.enter_context(processes.lock(config.out_dir))
        checkpoint.remove_unfinished(config.out_dir)
    splits = [config.split] if config.eval_only else ["train", "val"][: 1 + (config.eval_iters > 0)]
    tokens = {s: data.Tokens(config.data_dir, s, config.seq_length, config.vocab_size) for s in splits}
    identity = None if config.eval_only else data.identity(tokens["train"])
    path = checkpoint.to_resume(config, tokens[splits[0]].meta["tokenizer"], identity)
    if path and identity:
        tokens["train"].begins = checkpoint.first_sample(path, identity)
    operations.trial(config, device)
    traffic.refuse_too_large(config, mesh.world.size, device)
    return tokens, path


def compare_hosts(c, mesh, tokens, path):
    """Raise UserError on all ranks if a rank sees another out_dir, data, checkpoint or program than rank 0."""
    with contextlib.ExitStack() as stack:
        writes = mesh.rank == 0 and not c.eval_only
        name = agree(mesh.world, lambda: stack.enter_context(new_file(c.out_dir)) if writes else "")
        name = gather_objects(name, mesh.world)[0]
        seen = {
            "out_dir": not name or Path(c.out_dir, name).exists(),
            "data_dir": [data.identity(split)["crc32"] for split in tokens.values()],
            "resume": path and checkpoint.read_index(path)["crc32"],
        }
        first = gather_objects(seen, mesh.world)[0]  # afterwards rank 0 removes the file

    field = next((name for name in seen if seen[name] != first[name]), "out_dir")
    who = f"rank {mesh.rank} (on {socket.gethostname()})"
    why = f"{who} sees other files there than rank 0; all hosts need one shared out_dir and equal data"
    agree(mesh.world, lambda: configuration.require(c, field, seen == first, why))
    ours = program()
    theirs = gather_objects(ours, mesh.world)[0]

    def compare():
        for name in ours:
            if ours[name] != theirs.get(name, ours[name]):
                raise UserError(f"{name}: {who} runs another file than rank 0; all hosts need the same program")

    agree(mesh.world, compare)


def program():
    """Return {path: crc32} of this project's files that the process has imported, without configurations."""
    files = {Path(getattr(module, "__file__", None) or "").absolute() for module in [*sys.modules.values()]}
    ours = sorted(path for path in files if path.parent in PROGRAM and path.is_file())  # some modules have no file
    return {str(path.relative_to(hang.ROOT)): zlib.crc32(path.read_bytes()) for path in ours}


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
    first = gather_objects(config, world)[0]

    def check():
        for name, value in vars(first).items():
            why = f"rank {world.rank} (on {socket.gethostname()}) has this value, and rank 0 has {name}={value}"
            same = name in COMPARED_BY_CONTENT or getattr(config, name) == value
            configuration.require(config, name, same, f"{why}; start all hosts with equal fields")

    agree(world, lambda: configuration.check(config, world.size))  # first, because nan differs from nan
    agree(world, check)
    return config


def main():
    """Exit codes: 0 if the run is done, or was saved and stopped; 1 if another process was lost; 2 after a mistake of
    the user, or if torchrun died.
    """
    device = processes.join_processes()
    world = everyone()

    def work():
        config = load_config(sys.argv[1:], world)
        run_training(config, Mesh.of(config), device)

    processes.together(world, work)


if __name__ == "__main__":
    exit_on_user_error(main)
