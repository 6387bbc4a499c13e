"""Train a GPT: the step, the loop, the run, the command line.

    torchrun --nproc_per_node=4 train.py configs/tiny.py --tp=2

Every process runs this file. A random number depends only on the seed and on its use: for an
initial weight on the parameter's name, for dropout on sample, position and layer. So a checkpoint
needs no random state.
"""

from errors import exit_on_user_error  # isort: skip
import contextlib
import faulthandler
import itertools
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from shlex import quote

import torch

import config as configuration
import data
import operations
import reference
from log import InStep, Interval, Logger, PendingStep, Timers, validation_lines
from operations import DTYPES
from parallel.comm import agree, all_reduce
from parallel.layout import Layout, build_for, number_of_micro_batches
from parallel.mesh import Mesh, everyone
from parallel.optimizer import LossScale, learning_rate
from parallel.pipeline import Executor
from parallel.units import Model
from parallel.zero import Zero
from recovery import checkpoint, hang, processes, replicas
from recovery.start import compare_hosts, describe, load_config, open_files

# --- the step -------------------------------------------------------------------------------------


def train_step(run, batches):
    """Make one update with micro-batches from the iterator `batches`. Return a `log.PendingStep`.

    If the gradient of one rank has an inf or nan, the sum of the squared norms over all ranks is
    not finite, and every rank skips the update: it changes no weight, no moment and not
    `zero.updates`.
    """
    c, mesh, zero = run.config, run.mesh, run.zero
    samples = configuration.global_batch_size_at(c, run.counters.consumed_samples)
    m = number_of_micro_batches(c, samples, mesh.data.size)
    share = 1 / (m * mesh.data.size)  # the loss is the mean over m micro-batches and the data ranks
    scale = run.loss_scale.scale

    zero.zero_grad()
    loss = share * run.executor.run(batches, m, share * scale)
    with mesh.watch("finish"):
        zero.finish()

    with mesh.watch("update"):
        # One all_reduce gives every rank the loss, the squared norm, whether a rank shall stop, and the updates so far.
        if mesh.tp.rank > 0:
            loss = torch.zeros_like(loss)  # the tp ranks have equal losses: count one
        stop = loss.new_full((), float(run.signals.stop))
        sums = torch.stack([loss, zero.squared_norm(), stop, zero.updates])
        loss, squared_norm, stop, updates = all_reduce(sums, mesh.world, "scalars").wait()
        # Numbers that differ by 1 differ from their mean on every rank, so all ranks see it in the same step.
        apart = updates != mesh.world.size * zero.updates

        # With AdamW in bf16 or fp32 the CPU does not wait for the GPU.
        norm = squared_norm.sqrt() / scale
        skip = ~norm.isfinite()
        clip = (c.clip_grad / (norm + 1e-6)).clamp(max=1.0) if c.clip_grad else torch.ones_like(norm)
        lr = run.rates.take(zero.updates)  # unlike run.rates[...], it does not wait for the GPU
        zero.update(reference.update_scalars(lr, clip / scale, zero.updates + 1, skip, c.adam_beta1, c.adam_beta2))
        zero.publish()
        pending = PendingStep(torch.stack([loss, norm, lr, skip, stop, apart]), scale, samples)
        if run.loss_scale.dynamic:  # fp16: the next step's scale depends on this step's overflow
            run.loss_scale.update(pending.read().skipped)

    run.steps[m] += 1
    run.counters.iteration += 1
    run.counters.consumed_samples += samples  # also those of a skipped step
    return pending


@torch.no_grad()
def evaluate(run, tokens):
    """Return the mean loss per token of the first eval_iters global batches of `tokens`."""
    c, mesh = run.config, run.mesh
    total = torch.zeros(2, dtype=torch.float64, device=run.device)
    samples = c.eval_iters * c.global_batch_size
    share = data.eval_batches(tokens, samples, *mesh.reader, c.micro_batch_size, c.seed, run.device)
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
    with mesh.watch("evaluate"):
        loss, count = all_reduce(total, mesh.world, "evaluation").wait().tolist()
    return loss / count


def validate(run, mixture):
    """Return {"validation_loss": mean by weight, "validation_loss/NAME": of a set, if several}."""
    losses = {name: evaluate(run, tokens) for name, tokens in mixture.sets.items()}
    each = {f"validation_loss/{name}": loss for name, loss in losses.items()}
    return {"validation_loss": mixture.mean(losses)} | (each if len(each) > 1 else {})


# --- the loop -------------------------------------------------------------------------------------


def train(run, tokens, validation, logger):
    """Train until train_iters, or until a signal to stop. tokens, validation (or None): `data.Mixture`."""
    c, counters, interval = run.config, run.counters, Interval(run, logger.say)
    samples = data.training_samples(counters.consumed_samples, *run.mesh.reader, c.micro_batch_size)
    with contextlib.closing(data.loaded(tokens, samples, c.seed, run.device)) as loader:
        batches, last = training_batches(run, loader), counters.iteration >= c.train_iters
        first = True  # no copies are compared yet
        while not last:
            run.watchdog.progress(f"iteration {counters.iteration + 1}")
            interval.add(train_step(run, batches))
            last = counters.iteration >= c.train_iters or interval.stop

            def due(every, now=counters.iteration, last=last):
                return last or (every > 0 and now % every == 0)

            validates = validation and due(c.eval_interval) and not interval.stop
            if due(c.log_interval) or validates:
                row = interval.row() | tokens.progress(counters.consumed_samples)
                with interval.paused():
                    logger.log(row | (validate(run, validation) if validates else {}))
            if due(c.save_interval):
                interval.read(last)  # so that it knows whether the newest step was bad
            # Skipped updates change no weight, but the weights before them may be the cause: saves between them would
            # soon replace all good checkpoints.
            saving = due(c.save_interval) and not interval.bad_losses and (last or not interval.bad_gradients)
            if due(c.check_replicas) or saving or (first and interval.updated):
                with interval.paused():
                    replicas.compare_copies(run.zero, counters.iteration)
                first = False
            if saving:
                run.watchdog.progress("save")
                with interval.paused():
                    logger.say(f"saved {save(run, tokens, keep=0 if interval.bad_gradients else c.keep)}")
    if counters.iteration < c.train_iters:
        again = f"the same command{' (without --resume=none)' * (c.resume == 'none')} resumes the run"
        logger.say(f"stopped after iteration {counters.iteration}; {again}")
    else:
        logger.say(f"trained to iteration {counters.iteration}; python generate.py {quote(c.out_dir)}")


def training_batches(run, loader):
    while True:
        with run.mesh.watch("batch"):
            tokens, samples = next(loader)  # [b, s + 1], [b]
            batch = run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], samples)
        yield batch


# --- a run ----------------------------------------------------------------------------------------


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
    model: Model
    layout: Layout
    zero: Zero
    loss_scale: LossScale
    timers: Timers
    executor: Executor
    rates: torch.Tensor  # float64 [train_iters] on the device: the learning rate of each update
    counters: Counters = field(default_factory=Counters)
    signals: processes.Signals = field(default_factory=processes.Signals)
    watchdog: hang.Watchdog = field(default_factory=hang.Watchdog)
    steps: Counter = field(default_factory=Counter)  # {m: number of steps with m micro-batches}


def build_run(config, mesh, device):
    """Return the Run of this rank. Its weights are 0 until `Zero.initialize` or `restore`."""
    dtype = operations.resolved_dtype(config, device)
    ops = operations.choose(config, device, dtype)
    model = Model(config, mesh.tp, ops, mesh.cp)
    m = number_of_micro_batches(config, config.global_batch_size, mesh.data.size)
    schedule = build_for(config, m)
    layout = Layout(config, mesh.data.size, model.unit_specs, schedule)
    zero = Zero(model, layout, config, mesh, DTYPES[dtype], device, ops, training=not config.eval_only)
    timers = Timers(device)
    mesh.watch.tools = [timers]
    executor = Executor(model, zero, config, mesh, layout, schedule)
    scale = LossScale(config, dtype)
    rates = learning_rate(config, torch.arange(1, config.train_iters + 1)).to(device)
    return Run(config, mesh, device, dtype, model, layout, zero, scale, timers, executor, rates)


def save(run, tokens, keep):
    """Write a checkpoint. tokens: `data.Mixture`; keep: of `checkpoint.save_checkpoint`. Return its path."""
    state = {
        "shapes": {name: list(spec.shape) for name, spec in run.model.specs().items()},
        "config": asdict(run.config),
        "tokenizer": tokens.first.meta["tokenizer"],
        "data": tokens.state(),
        "counters": asdict(run.counters) | {"updates": run.zero.updates.item()},
        "loss_scale": run.loss_scale.state(),
    }
    c, step = run.config, run.counters.iteration
    checkpoint.save_checkpoint(c.out_dir, step, run.zero, state, keep, tokens.first.path.parent)
    return checkpoint.step_path(c.out_dir, step)


def restore(run, path):
    """Load weights, moments and counters from the checkpoint `path`, which may be of any layout."""
    index = checkpoint.load_checkpoint(path, run.model, run.zero, moments=not run.config.eval_only)
    run.zero.parameters_from_master()
    counters = index["counters"]
    run.zero.updates.fill_(counters.pop("updates"))
    run.counters = Counters(**counters)
    run.loss_scale.restore(index["loss_scale"])


# --- the command line -----------------------------------------------------------------------------


def run_training(config, mesh, device):
    """A UserError of one rank is raised on all ranks."""
    with contextlib.ExitStack() as stack:
        tokens, path = agree(mesh.world, lambda: open_files(config, mesh, device, stack))
        compare_hosts(config, mesh, tokens, path)
        if config.train_epochs and not config.eval_only:
            samples = config.train_epochs * tokens["train"].num_samples
            done = checkpoint.read_index(path)["counters"] if path else vars(Counters())
            begun = done["iteration"], done["consumed_samples"]
            config.train_iters = configuration.iterations(config, samples, *begun)
            agree(mesh.world, lambda: configuration.check(config, mesh.world.size))
        watchdog = hang.Watchdog()
        if mesh.world.size > 1 and not config.eval_only:
            watchdog.watch(mesh, config.out_dir, 0.8 * config.comm_timeout)
        run = agree(mesh.world, lambda: build_run(config, mesh, device))
        run.watchdog = watchdog
        if mesh.rank == 0:
            # This is printed first, because setting the weights may take minutes.
            missing = [line for mixture in tokens.values() for line in mixture.missing]
            print("\n".join([describe(run, path), *missing]), flush=True)
        if path:
            restore(run, path)
        elif config.initial_weights:
            checkpoint.load_checkpoint(checkpoint.find(config.initial_weights), run.model, run.zero, moments=False)
            run.zero.parameters_from_master()
        else:
            run.zero.initialize(config.seed)
        if config.eval_only:
            losses = validate(run, tokens[config.split])
            if mesh.rank == 0:
                print(validation_lines(run.counters.iteration, losses, config.split), flush=True)
            return
        logger = agree(mesh.world, lambda: Logger(run, path))
        stack.callback(logger.close)
        if config.ledger or config.trace or config.profile or config.delay:
            from accounts.report import watching  # only these runs need the instruments

            stack.enter_context(watching(run, logger.say))
        run.signals.watch(stack)
        if mesh.rank == 0:
            mesh.watch.tools.append(InStep(run, logger.say))
        train(run, tokens["train"], tokens.get("val"), logger)


def main():
    """Exit codes: 0 if the run is done, or was saved and stopped; 1 if another process was lost; 2 after a mistake of
    the user, or if torchrun died.
    """
    # After SIGBUS (a data file became shorter), show where each thread was.
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    device = processes.join_processes()
    world = everyone()

    def work():
        config = load_config(sys.argv[1:], world)
        run_training(config, Mesh.of(config), device)

    processes.together(world, work)


if __name__ == "__main__":
    exit_on_user_error(main)
