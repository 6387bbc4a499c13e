"""Train a GPT: the step, the loop, the run, the command line.

    torchrun --nproc_per_node=4 train.py configs/tiny.py --tp=2

Every process runs this file. Every random number is a function of the seed and of the place where it is used.
Therefore a checkpoint needs only the weights, the moments, the loss scale, and the counters in `Counters` and
`Zero.updates`.
"""

import contextlib
import math
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import config as configuration
import data
import operations
import reference
from accounts import memory, meter, report, trace
from errors import UserError, exit_on_user_error
from log import Interval, Logger, PendingStep, Timers, steps_from_json, steps_to_json, validation_lines
from model import GPT
from operations import DTYPES
from parallel import checkpoint, processes, replicas, schedules
from parallel.comm import agree, all_reduce
from parallel.layout import Layout
from parallel.mesh import Mesh, everyone
from parallel.optimizer import LossScale, learning_rate
from parallel.pipedream import PipeDream, train_call
from parallel.pipeline import Executor
from parallel.zero import Zero
from vocabulary import COPY

RATES = 4096  # learning rates in the table of `rate`

# --- the step -------------------------------------------------------------------------------------------------------


def train_step(run, batches, stop=False, orphaned=False):
    """Make one update with micro-batches from the iterator `batches`. Return a `PendingStep`.

    If the gradient of one rank has an inf or nan, the sum of the squared norms over all ranks is not finite, and every
    rank skips the update. A skipped update changes no weight, no moment and not `zero.updates`, on which the learning
    rate depends. Its samples still count as consumed. In fp16 a skipped update may halve the loss scale (`LossScale`).

    stop: this rank received a signal to stop. orphaned: its torchrun died (`processes.Signals`). All ranks learn both
    in the same step.
    """
    c, mesh, zero = run.config, run.mesh, run.zero
    samples = configuration.global_batch_size_at(c, run.counters.consumed_samples)
    m = configuration.micro_batches(c, samples, mesh.dp.size)
    share = 1 / (m * mesh.dp.size)  # the loss is the mean over m micro-batches and the data ranks
    scale = run.loss_scale.scale

    # Forward and backward of all micro-batches. Reductions of gradients over the data ranks start during backward.
    zero.zero_grad()
    loss = share * run.executor.run(batches, m, share * scale)
    with run.timers("grad-reduce"):
        zero.finish()

    with run.timers("optimizer"):
        # One all_reduce gives every rank the loss, the squared gradient norm, and whether to stop.
        mesh.ledger.phase = "step"
        loss = loss if mesh.tp.rank == 0 else 0 * loss  # the tp ranks have equal losses: count one
        flags = [loss.new_full((), float(flag)) for flag in (stop, orphaned)]
        sums = torch.stack([loss, zero.squared_norm(), *flags])
        loss, squared_norm, *flags = all_reduce(sums, mesh.world, "scalars").wait()

        # Skip, or clip and update. The host reads no result here, so that it can enqueue the next step meanwhile.
        norm = squared_norm.sqrt() / scale
        skip = ~norm.isfinite()
        clip = (c.clip_grad / (norm + 1e-6)).clamp(max=1.0) if c.clip_grad else torch.ones_like(norm)
        lr = rate(run)
        zero.update(reference.update_scalars(lr, clip / scale, zero.updates + 1, skip, c.adam_beta1, c.adam_beta2))
        zero.publish()
        done = PendingStep(torch.stack([loss, norm, lr, skip, *flags]), scale, samples)
        if run.loss_scale.dynamic:  # fp16 only: the next step's scale depends on this step's overflow
            run.loss_scale.update(done.read().skipped)

    run.steps[m] += 1
    run.counters.iteration += 1
    run.counters.consumed_samples += samples  # also those of a skipped step
    return done


def rate(run):
    """Return the learning rate of the next update, float64 on the device. The host does not wait for `zero.updates`.

    A table has the rates of the next RATES updates, because a run may have billions. In RATES iterations there are at
    most RATES updates, so a new table is needed only after so many iterations.
    """
    if run.counters.iteration >= run.rates_end:
        run.rates_begin = run.zero.updates.item()
        count = min(RATES, max(1, run.config.train_iters - run.rates_begin))
        rates = [learning_rate(run.config, run.rates_begin + i) for i in range(1, count + 1)]
        run.rates = torch.tensor(rates, dtype=torch.float64, device=run.device)
        run.rates_end = run.counters.iteration + RATES
    return run.rates.take((run.zero.updates - run.rates_begin).clamp(max=len(run.rates) - 1))


@torch.no_grad()
def evaluate(run, tokens):
    """Return the mean loss per token of at most the first eval_iters global batches of `tokens`."""
    c, mesh = run.config, run.mesh
    mesh.ledger.phase = "evaluate"
    total = torch.zeros(2, dtype=torch.float64, device=run.device)
    wanted = c.eval_iters * c.global_batch_size
    share = data.eval_batches(tokens, wanted, mesh.dp.rank, mesh.dp.size, c.micro_batch_size, c.seed, run.device)
    for ids, counts in share:
        losses = run.executor.evaluate(run.model.micro_batch(ids[:, :-1], ids[:, 1:]))
        if losses is not None and counts:
            total[0] += losses.sum(dtype=torch.float64)
            total[1] += losses.numel()
    if mesh.tp.rank != 0:
        total.zero_()
    loss, count = all_reduce(total, mesh.world, "evaluation").wait().tolist()
    return loss / count


# --- the loop -------------------------------------------------------------------------------------------------------


def train(run, tokens, validation, logger, signals):
    """Train until train_iters or a reason to stop. Return True if all train_iters are done.

    tokens: `data.Tokens` to train on. validation: `data.Tokens`, or None for no validation.
    """
    c, mesh, counters = run.config, run.mesh, run.counters

    def due(interval):  # True if one of the latest steps is a multiple of `interval`
        return interval and counters.iteration // interval > (counters.iteration - len(steps)) // interval

    numbers = data.training_samples(counters.consumed_samples, mesh.dp.rank, mesh.dp.size, c.micro_batch_size)
    with data.Loader(tokens, numbers, c.seed, run.device) as loader:
        batches, interval, steps = micro_batches(run, loader), Interval(run.unfinished), []
        while counters.iteration < c.train_iters:
            before, flags = steps[-1:], (signals.stop, signals.orphaned)
            steps = train_call(run, batches, *flags) if run.schedule.versions else [train_step(run, batches, *flags)]
            interval.steps += steps
            logger.advance(len(steps))
            last = counters.iteration == c.train_iters
            # Read the flags of the step before: its results are ready, and the device already works on this step.
            flagged = steps if run.schedule.versions else before  # a call has read its own results
            stop = any(step.read().stop for step in flagged)
            if any(step.read().orphaned for step in flagged):
                raise UserError("the torchrun of a process died; the steps after the last checkpoint are lost")
            check_loss(run, counters.iteration - (0 if run.schedule.versions else len(steps)), flagged)
            validate = validation and (due(c.eval_interval) or last)
            if due(c.log_interval) or validate or last or stop:
                wait = longest_data_wait(run, loader)
                row = interval.row(counters.iteration, counters.consumed_samples, run.timers, wait)
                if validate:
                    row["validation_loss"] = evaluate(run, validation)
                logger.log(**row)
                # A run that was not stopped here would log these steps in its next line.
                regular = due(c.log_interval) or (validation and due(c.eval_interval))
                interval = Interval(() if regular else interval.read())
            saving = due(c.save_interval) or last or stop
            if c.check_replicas and (due(c.check_replicas) or saving):
                replicas.check(run.zero, counters.iteration)
            if saving:
                check_loss(run, counters.iteration, steps)
                with interval.paused():
                    save(run, tokens, interval.read())
            if stop and not last:
                command = "the same command" + ("" if c.resume == "auto" else " without --resume")
                logger.say(f"stopped after iteration {counters.iteration}; {command} resumes the run")
                return False
    return True


def check_loss(run, iteration, steps):
    """Raise UserError on all ranks if the loss was not finite in the last `stop_after_nan` iterations.

    steps: consecutive `PendingStep`s, the last one of `iteration`. Their losses are the same on all ranks.
    """
    c, watch = run.config, run.watch
    for i, step in enumerate(steps):
        watch.see(iteration - len(steps) + 1 + i, step.read().loss)

    def refuse():
        since = f"lm_loss is not finite since iteration {iteration - watch.bad + 1} ({watch.bad} iterations)"
        good = checkpoint.step_path(c.out_dir, watch.good)
        if watch.good is None:
            raise UserError(f"{since}, and no loss after a checkpoint of this run was finite; use other values (--lr)")
        remedy = f"to resume from it with other values (--lr), set --resume={good} and another --out_dir"
        raise UserError(f"{since}. The last checkpoint with a finite loss after it is {good}; {remedy}")

    if c.stop_after_nan and watch.bad >= c.stop_after_nan:
        agree(run.mesh.world, UserError, refuse)


def micro_batches(run, loader):
    """Yield the loader's samples as MicroBatches of the model."""
    while True:
        with run.timers("batch-generator"):
            tokens, samples = next(loader)  # [b, s + 1], [b]
            batch = run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], samples)
        yield batch


def longest_data_wait(run, loader):
    """Return the longest time, in seconds, that a rank waited for data since the last call. Every rank must call."""
    run.mesh.ledger.phase = "setup"
    seconds = torch.tensor(loader.wait_seconds, dtype=torch.float64, device=run.device)
    loader.wait_seconds = 0.0
    return all_reduce(seconds, run.mesh.world, "data wait", op="max").wait().item()


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass
class Counters:
    """The progress of a run. `Zero.updates`, on the device, counts the updates that were not skipped."""

    iteration: int = 0
    consumed_samples: int = 0


@dataclass
class Watch:
    """Counts the iterations in a row without a finite loss, and knows the last good checkpoint.

    A checkpoint is good if a later loss was finite. Its own step's loss says little: the update after it may have made
    weights so large that every later loss is nan.
    """

    seen: int = 0  # the last iteration that was counted
    bad: int = 0  # iterations in a row without a finite loss
    saved: int | None = None  # step of the latest checkpoint in out_dir
    good: int | None = None  # step of the last good checkpoint

    def see(self, iteration, loss):
        if iteration > self.seen:
            self.seen, self.bad = iteration, 0 if math.isfinite(loss) else self.bad + 1
            if not self.bad:
                self.good = self.saved  # of an earlier iteration: a step's loss is seen before its checkpoint is saved


@dataclass
class Run:
    """The objects of a training run on this rank, and the run's progress."""

    config: configuration.Config
    mesh: Mesh
    device: torch.device
    dtype: str
    model: GPT
    layout: Layout
    schedule: schedules.Schedule  # of a step with global_batch_size samples, as after a ramp-up
    zero: Zero
    loss_scale: LossScale
    timers: Timers
    executor: Executor
    counters: Counters = field(default_factory=Counters)
    watch: Watch = field(default_factory=Watch)
    unfinished: list = field(default_factory=list)  # `Step`s since the last regular log line, of the checkpoint
    rates: torch.Tensor | None = None  # float64 on the device: see `rate`
    rates_begin: int = 0  # the number of updates before the table
    rates_end: int = 0  # the iteration that needs a new table
    steps: Counter = field(default_factory=Counter)  # {m: number of steps with m micro-batches in this process}


def build(config, mesh, device):
    """Return the Run of this rank. Its weights are 0 until `Zero.initialize` or `restore`."""
    dtype = operations.resolved_dtype(config, device)
    ops = operations.choose(config, device, dtype)
    model = GPT(config, mesh.tp, ops)
    if dtype == "fp16":
        configuration.refuse_fp16(config)
    m = configuration.micro_batches(config, config.global_batch_size, mesh.dp.size)
    schedule = schedules.build_for(config, mesh.dp.size, m * config.updates_per_call)
    layout = Layout(config, mesh.dp.size, model.table, schedule)
    zero = Zero(model, layout, config, mesh, DTYPES[dtype], device, ops, training=not config.eval_only)
    timers = Timers(device)
    kind = PipeDream if schedule.versions and not config.eval_only else Executor
    executor = kind(model, zero, config, mesh, layout, schedule, timers)
    scale = LossScale(config, dtype)
    return Run(config, mesh, device, dtype, model, layout, schedule, zero, scale, timers, executor)


def save(run, tokens, unfinished):
    """Save a checkpoint. tokens: of the split train; unfinished: the `Step`s since the last regular log line."""
    watch, iteration = run.watch, run.counters.iteration
    state = {
        "shapes": {name: list(spec.shape) for name, spec in run.model.specs().items()},
        "config": asdict(run.config),
        "tokenizer": tokens.meta["tokenizer"],
        "data": data.identity(tokens),
        "counters": asdict(run.counters) | {"updates": run.zero.updates.item()},
        "loss_scale": run.loss_scale.state(),
        "interval": steps_to_json(unfinished),
        "last_good": watch.good,
    }
    copies = [Path(run.config.data_dir, name) for name in COPY]
    good = None if iteration == run.config.train_iters and not watch.bad else watch.good
    checkpoint.save(run.config.out_dir, iteration, run.zero, state, run.config.keep, copies, good)
    watch.saved = iteration


def restore(run, path):
    """Load weights, moments and counters from the checkpoint `path`, which may be of any layout."""
    index = checkpoint.read_index(path)
    checkpoint.load(path, run.zero)
    run.zero.parameters_from_master()
    counters = index["counters"]
    run.zero.updates.fill_(counters.pop("updates"))
    run.counters = Counters(**counters)
    run.loss_scale.restore(index["loss_scale"])
    run.unfinished = steps_from_json(index.get("interval", []))
    if checkpoint.step_path(run.config.out_dir, run.counters.iteration) == Path(path):
        run.watch = Watch(saved=run.counters.iteration, good=index.get("last_good"))


# CPU time of a configs/tiny.py step, fp16 divided by fp32 (8 steps of each, one thread): median 9.1.
FP16_ON_CPU = "dtype=fp16 on a CPU: a step takes about 9 times as long as with dtype=fp32"


def describe(run, path):
    """Print the model, the layout and the folders of this run. On a GPU name the attention; on a CPU warn of fp16."""
    c, m = run.config, run.mesh
    schedule = f" {c.schedule}" if m.pp.size > 1 else ""
    print(
        f"{run.model.num_parameters():,} parameters, {c.num_layers} layers of {c.hidden_size}; "
        f"dp={m.dp.size} tp={m.tp.size} pp={m.pp.size}{schedule} zero={c.zero} "
        f"sequence_parallel={c.sequence_parallel} recompute={c.recompute}; {run.dtype} on {run.device.type}\n"
        f"{c.data_dir} -> {c.out_dir}, from {path or 'initial weights'}",
        flush=True,
    )
    if run.device.type == "cuda":
        print(f"attention: {operations.attention_name(c, run.device, run.dtype, run.zero.ops)}", flush=True)
    if run.dtype == "fp16" and run.device.type == "cpu":
        print(FP16_ON_CPU, flush=True)


# --- the command line -------------------------------------------------------------------------------------------------


def run_training(config, mesh, device):
    """Open the files, build the Run, resume, and train or evaluate. A UserError of one rank is raised on all ranks."""
    with contextlib.ExitStack() as stack:
        tokens, path = agree(mesh.world, UserError, lambda: open_files(config, mesh, stack))
        if config.train_epochs and not config.eval_only:
            config.train_iters = configuration.iterations(config, config.train_epochs * tokens["train"].num_samples)
        # Triton may lack a compiler on one node. Find out before `build`, in which ranks wait for each other.
        agree(mesh.world, UserError, lambda: operations.trial(config, device))
        agree(mesh.world, UserError, lambda: refuse_too_large(config, mesh.dp.size, device))
        run = build(config, mesh, device)
        if mesh.rank == 0:
            describe(run, path)  # before the weights, which may take minutes
        if path:
            restore(run, path)
        else:
            run.zero.initialize(config.seed)
        if config.eval_only:
            loss = evaluate(run, tokens[config.split])
            if mesh.rank == 0:
                print(validation_lines(run.counters.iteration, loss, config.split), flush=True)
        else:
            train_and_report(run, tokens, path, stack)


def refuse_too_large(c, dp, device):
    """Raise UserError if the memory of a rank is too small, before the model is built. dp: the number of data ranks."""
    item = DTYPES[operations.resolved_dtype(c, device)].itemsize
    need = memory.least(c, dp, memory.sizes(c, item, max(item, 4), device.type == "cpu"))
    if device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory
    else:  # the processes of a machine share its memory
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if need > have:
        names = "num_layers", "hidden_size", "vocab_size", "seq_length", "micro_batch_size"
        sizes = ", ".join(f"{name}={getattr(c, name)}" for name in names)
        raise UserError(f"{sizes}: needs at least {need / 1e9:,.1f} GB of memory; this rank has {have / 1e9:,.1f} GB")


def open_files(config, mesh, stack):
    """Lock out_dir. Return ({split: Tokens}, path of the checkpoint to resume from or None). Raises UserError."""
    if mesh.rank == 0 and not config.eval_only:
        stack.enter_context(processes.lock(config.out_dir))
        trace.check(config)
    splits = [config.split] if config.eval_only else ["train", "val"][: 1 + (config.eval_iters > 0)]
    tokens = {s: data.Tokens(config.data_dir, s, config.seq_length, config.vocab_size) for s in splits}
    identity = None if config.eval_only else data.identity(tokens["train"])
    return tokens, checkpoint.to_resume(config, tokens[splits[0]].meta["tokenizer"], identity)


def train_and_report(run, tokens, path, stack):
    """Train and log. With --ledger, print traffic and memory. tokens, path: from `open_files`."""
    config, mesh = run.config, run.mesh
    place = dict(rank=mesh.rank, dtype=run.dtype, iteration=run.counters.iteration)
    logger = agree(mesh.world, UserError, lambda: Logger(config, run.device, mesh.world.size, **place))
    stack.callback(logger.close)
    if config.ledger:
        activations = stack.enter_context(meter.Activations(run.executor))
    if config.trace:
        run.executor.trace = trace.Trace(mesh, run.device, run.counters.iteration)
    index = checkpoint.read_index(path) if path else {}
    changed = configuration.differences(config, index) if path else ""
    if other := checkpoint.other_data(index, data.identity(tokens["train"])):
        logger.say(f"new_data=True: the training data is not that of {path}: {other}")
    anew = ". To begin anew, set another --out_dir" + (" and no --resume" if config.resume != "auto" else "")
    if done := run.counters.iteration >= config.train_iters:
        changed = changed and f". Changed without effect: {changed}{anew}"
        logger.say(f"nothing to do: train_iters={config.train_iters} are done ({path}){changed}")
    elif changed:
        logger.say(f"changed since {path}: {changed}. This run uses the new values{anew}")
    if not done and train(run, tokens["train"], tokens.get("val"), logger, stack.enter_context(processes.Signals())):
        logger.say(f"trained to iteration {run.counters.iteration}; python generate.py {config.out_dir}")
    if config.ledger and run.steps:
        tables = report.sent_by_ranks(run), report.kept_by_ranks(run, activations.rows())  # every rank must call both
        logger.say("\n\n".join(tables))
    if config.trace and run.steps:
        agree(mesh.world, UserError, lambda: trace.write(config, run.executor.trace, mesh))


def main():
    """Run the command line. Exit codes: 0 done, or saved and stopped; 1 a lost peer; 2 a mistake or a dead torchrun."""
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        print(configuration.help_text())
        return
    if "--plan" in arguments:  # judges this configuration on --world=N --device=D, and starts nothing
        words = [word.replace("--world=", "--gpus=", 1) for word in arguments if word != "--plan"]
        plan = Path(__file__).with_name("plan.py")
        os.execv(sys.executable, [sys.executable, str(plan), "--as_is", *words])
    device = processes.join()
    world = everyone()

    def read_configuration():
        config = configuration.load(arguments)
        configuration.check(config, world.size)
        return config

    def work():
        config = agree(world, UserError, read_configuration)
        run_training(config, Mesh(config.tp, config.pp, timeout=config.comm_timeout), device)

    processes.together(world, work)


if __name__ == "__main__":
    exit_on_user_error(main)
