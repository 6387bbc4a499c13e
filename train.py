"""Trains a GPT: configuration, loop, checkpoints, log.

    torchrun --nproc_per_node=4 train.py configs/tiny.py --tp=2

Every process runs this file. `main` joins the processes and reads the configuration; `build` makes the model and its
training state; `train_step` is one update:

    for each micro-batch: forward, backward            parallel/pipeline.py    gradients into flat buffers,
                                                                               their reduction started
    wait for the reduction                             parallel/zero.py
    one all_reduce of four numbers                     here                    loss, squared gradient norm, stop flags
    skip (overflow), or clip and update                parallel/zero.py

and `train` goes on with that until train_iters. Everything random is a function of (seed, position), so the state of
a run is its weights and moments and the few counters in `Counters`.
"""

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import config as configuration
import data
import reference
from errors import UserError, exit_on_user_error, locked
from log import Interval, Logger, PendingStep, Timers, validation_lines
from model import GPT
from parallel import checkpoint, ledger, memory, pipeline, schedules, trace
from parallel.comm import CommunicationError, agree, all_reduce, gather_objects
from parallel.mesh import Mesh, everyone
from parallel.optimizer import LossScale, learning_rate
from parallel.pipeline import Executor
from parallel.zero import Zero

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Counters:
    """Where a run is. (How many iterations were not skipped, the device knows: `Zero.updates`.)"""

    iteration: int = 0
    consumed_samples: int = 0


@dataclass
class Run:
    """What the functions below share."""

    config: configuration.Config
    mesh: Mesh
    device: torch.device
    dtype: str
    model: GPT
    zero: Zero
    loss_scale: LossScale
    timers: Timers
    executor: Executor
    rates: torch.Tensor  # the learning rate of each update, float64 on the device
    counters: Counters = field(default_factory=Counters)
    steps: Counter = field(default_factory=Counter)  # in this process, by their number of micro-batches


# --- build ----------------------------------------------------------------------------------------------------------


def resolved_dtype(config, device):
    """bf16 where the GPU has it, fp16 on older ones, fp32 on a CPU; or what the configuration says."""
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def operations(config, device, dtype):
    """The functions of `reference.py` or their fused forms, operation by operation, as --kernels says.

    auto: on a GPU, Triton's, but for attention, for which PyTorch has the better kernels. Raises UserError.
    """
    choice, gpu = config.kernels, device.type == "cuda"
    if choice == "torch" or (choice == "auto" and (not gpu or dtype == "fp64")):
        return reference
    try:
        import kernels
    except ImportError:
        if choice == "auto":
            return reference
        raise UserError("kernels=triton: triton is not installed; pip install triton, or say kernels=torch") from None
    if dtype == "fp64":
        raise UserError("kernels=triton: they compute in float32, dtype=fp64 does not; say kernels=torch")
    if not gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            "kernels=triton: there is no GPU here; say kernels=torch, or set TRITON_INTERPRET=1 for a trial"
        )
    ops = {name: getattr(kernels, name) for name in reference.OPERATIONS}
    if choice == "auto":
        ops["attention"] = reference.attention
    elif config.head_size > 128:
        raise UserError(f"kernels=triton: heads of {config.head_size} are too wide for its attention, at most 128")
    return SimpleNamespace(**ops)


def try_operations(config, device):
    """Run one of the `operations`: Triton needs a C compiler and Python's headers on every node. Raises UserError."""
    ops = operations(config, device, resolved_dtype(config, device))
    try:
        ops.squared_norms([torch.ones(16, device=device)])
    except Exception as error:  # whatever Triton's compiler, the one it calls, or the driver says
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"kernels={config.kernels}: they do not run here ({reason}); say kernels=torch") from error


def build(config, mesh, device):
    """Model, flat buffers and initial weights of this rank."""
    dtype = resolved_dtype(config, device)
    ops = operations(config, device, dtype)
    model = GPT(config, mesh.tp, ops)
    count = config.global_batch_size // (config.micro_batch_size * mesh.dp.size)
    plan = schedules.build(config.schedule, mesh.pp.size, count, config.chunks)
    held = pipeline.held_units(model, plan)  # by pipeline rank
    modules = list(held[mesh.pp.rank])

    def holders(name):
        return mesh.holders([rank for rank, units in enumerate(held) if name in pipeline.stored(units)])

    zero = Zero(modules, holders, config, mesh, DTYPES[dtype], device, ops, training=not config.eval_only)
    timers = Timers(device)
    executor = Executor(model, zero, config, mesh, plan, timers)
    if config.trace:
        executor.trace = trace.Trace(mesh, device)
    rates = [learning_rate(config, update) for update in range(1, config.train_iters + 1)]
    rates = torch.tensor(rates, dtype=torch.float64, device=device)
    return Run(config, mesh, device, dtype, model, zero, LossScale(config, dtype), timers, executor, rates)


def save(run, tokenizer):
    state = {
        "shapes": {name: list(spec.shape) for name, spec in run.model.specs().items()},
        "config": asdict(run.config),
        "tokenizer": tokenizer,
        "counters": asdict(run.counters) | {"updates": run.zero.updates.item()},
        "loss_scale": run.loss_scale.state(),
    }
    checkpoint.save(run.config.out_dir, run.counters.iteration, run.zero, state, run.config.keep)


def restore(run, path):
    """Weights, moments and counters from the checkpoint `path`, whatever layout wrote it."""
    index = checkpoint.read_index(path)
    agree(run.mesh.world, UserError, lambda: checkpoint.load(path, run.zero))
    run.zero.parameters_from_master()
    counters = index["counters"]
    run.zero.updates.fill_(counters.pop("updates"))
    run.counters = Counters(**counters)
    run.loss_scale.restore(index["loss_scale"])


def checkpoint_to_resume(config, tokenizer):
    """The path of the checkpoint to go on from, or None. Raises UserError if it contradicts the configuration."""
    place = config.out_dir if config.resume in ("auto", "none") else config.resume
    path = checkpoint.find(place)
    if path is None:
        if config.resume not in ("auto", "none") or config.eval_only:
            raise UserError(f"resume={config.resume}: there is no checkpoint in {place}")
        return None
    if config.resume == "none":
        raise UserError(f"resume=none: {config.out_dir} holds {path.name}; remove it, or say another --out_dir")
    index = checkpoint.read_index(path)
    checkpoint.refuse_contradictions(path, index, config, tokenizer)
    later = [step for step in checkpoint.all_steps(config.out_dir) if step > index["counters"]["iteration"]]
    if later and not config.eval_only:  # the next time, these would be taken for the latest of this run
        raise UserError(
            f"resume={config.resume}: {config.out_dir} holds step_{later[-1]}, which is later; "
            "remove what is later, or say another --out_dir"
        )
    return path


# --- the step -------------------------------------------------------------------------------------------------------


def micro_batches(run, loader):
    """The loader's samples as the model's MicroBatch."""
    while True:
        with run.timers("batch-generator"):
            tokens, samples = next(loader)  # [b, s + 1], [b]
            batch = run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], samples)
        yield batch


def train_step(run, batches, stop=False, orphaned=False):
    """Make one update from the iterator `batches`: a `PendingStep`. An overflow on any rank skips it on all ranks."""
    c, mesh, zero = run.config, run.mesh, run.zero
    samples = configuration.global_batch_size_at(c, run.counters.consumed_samples)
    count = samples // (c.micro_batch_size * mesh.dp.size)
    scale = run.loss_scale.scale
    zero.zero_grad()
    loss = run.executor.run(batches, count, scale)
    with run.timers("grad-reduce"):
        zero.finish_reduction()

    with run.timers("optimizer"):
        mesh.ledger.phase = "step"
        # What is the same on several ranks counts on one: the loss on the first of each tp group.
        loss = loss if mesh.tp.rank == 0 else 0 * loss
        flags = [loss.new_full((), float(flag)) for flag in (stop, orphaned)]
        sums = torch.stack([loss, zero.local_squared_norm(), *flags])
        loss, squared_norm, *flags = all_reduce(sums, mesh.world, "scalars").wait()
        # From here on nobody looks at a number: the device goes on with it, the host with the next step.
        norm = squared_norm.sqrt() / scale
        skip = ~norm.isfinite()
        clip = (c.clip_grad / (norm + 1e-6)).clamp(max=1.0) if c.clip_grad else torch.ones_like(norm)
        lr = run.rates.take(zero.updates.clamp(max=len(run.rates) - 1))
        zero.update(reference.numbers(lr, clip / scale, zero.updates + 1, skip, c.adam_beta1, c.adam_beta2))
        done = PendingStep(torch.stack([loss, norm, lr, skip, *flags]), scale, samples)
        if run.loss_scale.dynamic:  # but in fp16: the next step's scale depends on this step's overflow
            run.loss_scale.update(done.read().skipped)

    run.steps[count] += 1
    run.counters.iteration += 1
    run.counters.consumed_samples += samples  # a skipped step's data is gone; its learning rate is not
    return done


@torch.no_grad()
def evaluate(run, tokens):
    """Mean loss per token over the first eval_iters global batches of `tokens`, over all ranks."""
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


class Signals:
    """Reasons to stop between two steps: SIGTERM or Ctrl-C (a second Ctrl-C stops at once); a launcher that died."""

    def __enter__(self):
        self.stop = False
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.before = [(number, signal.signal(number, self._received)) for number in (signal.SIGTERM, signal.SIGINT)]
        return self

    def __exit__(self, *_):
        for number, handler in self.before:
            signal.signal(number, handler)

    def _received(self, number, _):
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def orphaned(self):
        return self.launcher is not None and os.getppid() != self.launcher


def longest_data_wait(run, loader):
    """Seconds that a host waited for batches since the last call, the most of all ranks. Every rank calls it."""
    run.mesh.ledger.phase = "setup"
    seconds = torch.tensor(loader.wait_seconds, dtype=torch.float64, device=run.device)
    loader.wait_seconds = 0.0
    return all_reduce(seconds, run.mesh.world, "data wait", op="max").wait().item()


def train(run, tokens, validation, logger, signals):
    """Steps until train_iters or a reason to stop. Returns True if all of train_iters are done.

    tokens, validation: `data.Tokens`; validation may be None.
    """
    c, mesh, counters = run.config, run.mesh, run.counters

    def due(interval):
        return interval and counters.iteration % interval == 0

    numbers = data.training_samples(counters.consumed_samples, mesh.dp.rank, mesh.dp.size, c.micro_batch_size)
    with data.Loader(tokens, numbers, c.seed, run.device) as loader:
        batches, interval, step = micro_batches(run, loader), Interval(), None
        while counters.iteration < c.train_iters:
            before, step = step, train_step(run, batches, signals.stop, signals.orphaned)
            interval.steps.append(step)
            logger.advance()
            last = counters.iteration == c.train_iters
            # Flags are read a step late: by then they are there, and the device has work meanwhile.
            stop = before is not None and before.read().stop
            if before is not None and before.read().orphaned:
                raise UserError("the launcher of this or another process has died; nothing was saved")
            validate = validation and (due(c.eval_interval) or last)
            if due(c.log_interval) or validate or last or stop:
                wait = longest_data_wait(run, loader)
                row = interval.row(counters.iteration, counters.consumed_samples, run.timers, wait)
                if validate:
                    row["validation_loss"] = evaluate(run, validation)
                logger.log(**row)
                interval = Interval()
            if due(c.save_interval) or last or stop:
                with interval.paused():
                    save(run, tokens.meta["tokenizer"])
            if stop and not last:
                command = "the same command" + ("" if c.resume == "auto" else " without --resume")
                logger.say(f"stopped after iteration {counters.iteration}; {command} goes on from there")
                return False
    return True


def lock(out_dir):
    """Make out_dir, and a context that keeps a second run out of it. Raises UserError."""
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out_dir={out_dir}: {error.strerror}") from None
    message = f"out_dir={out_dir}: another run is training there; say another --out_dir"
    return locked(Path(out_dir) / "lock", message)


def run_training(config, mesh, device):
    """What `main` does once the processes stand: open, build, resume, train, save. Raises UserError on every rank."""
    with contextlib.ExitStack() as stack:

        def open_files():
            if mesh.rank == 0 and not config.eval_only:
                stack.enter_context(lock(config.out_dir))
            splits = [config.split] if config.eval_only else ["train", "val"][: 1 + (config.eval_iters > 0)]
            tokens = {s: data.Tokens(config.data_dir, s, config.seq_length, config.vocab_size) for s in splits}
            return tokens, checkpoint_to_resume(config, tokens[splits[0]].meta["tokenizer"])

        tokens, path = agree(mesh.world, UserError, open_files)
        if config.train_epochs and not config.eval_only:
            config.train_iters = iterations(config, config.train_epochs * tokens["train"].num_samples)
        # What one node may lack is found out before the ranks build their groups together.
        agree(mesh.world, UserError, lambda: try_operations(config, device))
        run = build(config, mesh, device)
        if path:
            restore(run, path)
        else:
            run.zero.initialize(config.seed)
        describe(run, path)
        if config.eval_only:
            loss = evaluate(run, tokens[config.split])
            if mesh.rank == 0:
                print(validation_lines(run.counters.iteration, loss), flush=True)
            return

        def open_log():
            size, iteration = mesh.world.size, run.counters.iteration
            return Logger(
                config,
                device,
                size,
                rank=mesh.rank,
                dtype=run.dtype,
                train_iters=config.train_iters,
                iteration=iteration,
            )

        logger = agree(mesh.world, UserError, open_log)
        stack.callback(logger.close)
        if config.ledger:
            meter = stack.enter_context(memory.Activations(run.executor))
        if run.counters.iteration >= config.train_iters:
            logger.say(f"nothing to do: {path} is at iteration {run.counters.iteration} of {config.train_iters}")
        elif train(run, tokens["train"], tokens.get("val"), logger, stack.enter_context(Signals())):
            logger.say(f"trained to iteration {run.counters.iteration}; python generate.py {config.out_dir}")
        if config.ledger and run.steps:
            accounts = ledger_tables(run), memory_tables(run, meter.peak)  # every rank has a part in them
            logger.say("\n\n".join(accounts))
        if config.trace and run.steps:
            agree(mesh.world, UserError, lambda: trace.write(config, run.executor.trace, mesh))


def iterations(config, samples):
    """How many updates take at most `samples` samples; at least one."""
    count = consumed = 0
    while (consumed := consumed + configuration.global_batch_size_at(config, consumed)) <= samples:
        count += 1
    return max(1, count)


def ledger_tables(run):
    """The ledger of rank 0, and of the other pipeline ranks beside it, as text. Every rank calls it."""
    tables = [(ledger.formulas(run.config, run.mesh, run.executor, run.zero, m), k) for m, k in run.steps.items()]
    measured = run.mesh.ledger.per_step(run.steps.total())
    text = ledger.report(measured, ledger.average(tables), f"rank {run.mesh.rank}")
    text += "\n" + ledger.lecture(measured, run.zero, sum(m * k for m, k in run.steps.items()) / run.steps.total())
    return "\n\n".join(gather_objects(text, run.mesh.pp))


def memory_tables(run, peak):
    """What rank 0 keeps, and the other pipeline ranks beside it, as text. peak: bytes of activations. All call it."""
    expected, measured = memory.formulas(run.executor), memory.measured(run.executor, peak)
    stored, padding = memory.stored(run.zero), memory.padding(run.zero)
    text = memory.report(measured, expected, stored, padding, f"rank {run.mesh.rank}")
    return "\n\n".join(gather_objects(text, run.mesh.pp))


def describe(run, path):
    """What is about to run, in two lines."""
    if run.mesh.rank == 0:
        c, m = run.config, run.mesh
        print(
            f"{run.model.num_parameters():,} parameters, {c.num_layers} layers of {c.hidden_size}; "
            f"dp={m.dp.size} tp={m.tp.size} pp={m.pp.size}"
            + (f" {c.schedule}" if m.pp.size > 1 else "")
            + f" zero={c.zero} "
            f"sequence_parallel={c.sequence_parallel} recompute={c.recompute}; {run.dtype} on {run.device.type}\n"
            f"{c.data_dir} -> {c.out_dir}, " + (f"from {path}" if path else "from initial weights"),
            flush=True,
        )


# --- processes ------------------------------------------------------------------------------------------------------


def join_processes():
    """This process's device; with torchrun, connected to the others (NCCL between GPUs, else Gloo)."""
    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        if here > (gpus := torch.cuda.device_count()):
            raise UserError(
                f"nproc_per_node={here}: there are {gpus} GPUs, one for each process; say at most {gpus}, "
                "or CUDA_VISIBLE_DEVICES= (nothing) to train on the CPU"
            )
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def leave(error, code):
    """Say what is wrong and be gone: a tidy farewell would wait for peers that may not answer."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(code)


def main():
    """The command line. Exit code 0: done, or stopped and saved; 2: a mistake of the user's; 1: a peer is gone."""
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        print(configuration.help_text())
        return
    device = join_processes()
    world = everyone()

    def read_configuration():
        config = configuration.load(arguments)
        configuration.check(config, world.size)
        return config

    try:
        config = agree(world, UserError, read_configuration)
        run_training(config, Mesh(config.tp, config.pp, timeout=config.comm_timeout), device)
    except UserError as error:
        if not dist.is_initialized():
            raise
        if world.rank == 0 or not getattr(error, "agreed", False):
            leave(error, 2)
        time.sleep(1)  # rank 0 says it; torchrun ends all as soon as one exits
        os._exit(2)
    except CommunicationError as error:
        leave(error, 1)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    exit_on_user_error(main)
