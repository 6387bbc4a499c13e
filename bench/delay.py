"""Measures the cost of old weights: the loss with 1F1B, PipeDream and PipeDream-2BW.

    python prepare.py --tokenizer=bytes
    python -m bench delay

One process computes all stages. It keeps old weights of each stage. The schedule says which version each micro-batch
uses. `test_pipedream.py` shows that a real pipeline trains the same model as one process.
"""

import math
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

import data
import reference
import train
from bench.tables import print_row, spread
from config import Config
from errors import UserError
from parallel import schedules
from parallel.layout import split
from parallel.mesh import Mesh
from parallel.schedules import simulate

MODEL = dict(
    num_layers=6, hidden_size=64, seq_length=64, vocab_size=257, micro_batch_size=4, global_batch_size=4,
    lr_decay_style="constant", weight_decay=0.1, adam_beta2=0.99, clip_grad=0.0, dtype="fp32", train_iters=1,
)  # fmt: skip
RATES = {"sgd": (0.01, 0.03, 0.1, 0.3, 1.0), "adamw": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)}
SCHEDULES = ("1f1b", *schedules.ASYNCHRONOUS)
HALVES = (1, 2)


@dataclass
class Curve:
    """The losses of one run."""

    losses: list  # mean training loss of each update
    samples: list  # consumed after each update
    times: list  # simulated end of each update; a stage's F of a micro-batch takes 1, its B takes 2

    def at(self, values, limit):
        """values: `samples` or `times`. Take the updates up to `limit`. Return the mean loss of their last tenth."""
        count = sum(value <= limit for value in values)
        last = self.losses[count - max(1, count // 10) : count]
        return sum(last) / len(last)


def measure(
    samples: int = 6400, stages: str = "4,8", seeds: int = 3, data_dir: str = "data/stdlib_bytes", processes: int = 2
):
    """Train a small GPT with 1F1B, pipedream and pipedream-2bw, under SGD and AdamW, and compare the losses.

    --samples    samples of a run; a micro-batch has 4 samples of 64 tokens
    --stages     pipeline stages p; 1F1B and 2BW have p micro-batches in an update, PipeDream has one
    --seeds      runs of each row, with other initial weights and another order of the data
    --data_dir   data of `prepare.py --tokenizer=bytes`
    --processes  number of runs at the same time

    The learning rate of a row is the best of five for seed 1. It is constant after a warm-up of a tenth of the run.
    """
    rows = [(o, p, name) for o in RATES for p in checked(samples, stages, data_dir, processes) for name in SCHEDULES]
    print(f"{samples} samples. A column takes the updates up to half (1/2) or all (2/2) of the samples or of the time,")
    print("and shows the mean training loss of their last tenth: median (smallest-largest) of the seeds")
    form = "{:6} {:>2} {:14} {:>6}" + " {:>19}" * 4
    points = [f"{h}/2 of {what}" for what in ("samples", "time") for h in HALVES]
    print_row(form, "rule", "p", "schedule", "rate", *points)
    with ProcessPoolExecutor(processes) as pool:
        tried = {row: [pool.submit(run, *row, rate, 1, samples, data_dir) for rate in RATES[row[0]]] for row in rows}
        for row, futures in tried.items():
            curves = [future.result() for future in futures]
            best = min(range(len(curves)), key=lambda i: curves[i].at(curves[i].samples, samples))
            rate = RATES[row[0]][best]
            more = [pool.submit(run, *row, rate, seed, samples, data_dir) for seed in range(2, seeds + 1)]
            curves = [curves[best], *(future.result() for future in more)]
            end = duration(row, samples)
            limits = [(c, c.samples, samples * h / 2) for h in HALVES for c in curves]
            limits += [(c, c.times, end * h / 2) for h in HALVES for c in curves]
            cells = [curve.at(values, limit) for curve, values, limit in limits]
            cells = [spread(cells[i : i + seeds], "{:.3f}") for i in range(0, len(cells), seeds)]
            print_row(form, row[0], row[1], row[2], f"{rate:g}", *cells)


def checked(samples, stages, data_dir, processes):
    """Return the numbers of stages, a list of int. Raises UserError if an option of `measure` is wrong."""
    units = MODEL["num_layers"] + 2
    if not all(re.fullmatch("[0-9]{1,3}", p) and 1 <= int(p) <= units for p in stages.split(",")):
        raise UserError(f"--stages={stages}: should be numbers from 1 to {units} with commas between them, like 4,8")
    numbers = [int(p) for p in stages.split(",")]
    if samples < 40 * max(numbers):
        raise UserError(f"--samples={samples}: should be at least {40 * max(numbers)}, 40 for each stage")
    if processes > os.cpu_count():
        raise UserError(f"--processes={processes}: should be at most {os.cpu_count()}, the number of cores")
    data.Tokens(data_dir, "train", MODEL["seq_length"], MODEL["vocab_size"])
    return numbers


def duration(row, samples):
    """Return the simulated time of an asynchronous pipeline for all samples. row: (optimizer, p, schedule)."""
    return 3 * (samples // MODEL["micro_batch_size"] + row[1] - 1)


def run(optimizer, p, name, rate, seed, samples, data_dir):
    """Train a model with the schedule `name` and p stages. Return its Curve."""
    torch.set_num_threads(1)
    config = Config(**MODEL, optimizer=optimizer, lr=rate, seed=seed)
    one = train.build(config, Mesh(), torch.device("cpu"))
    one.zero.initialize(seed)
    m = 1 if name == "pipedream" else p
    updates = samples // (config.micro_batch_size * m)
    schedule = schedules.build(name, p, m if name == "1f1b" else m * updates, 1, m)
    stages = {}  # {bucket: stage}; the tied word table has the versions of the first stage
    for stage, units in enumerate(split(one.layout.table, p)):
        stages = {spec.bucket: stage for unit in units for spec in unit} | stages
    tokens = data.Tokens(data_dir, "train", config.seq_length, config.vocab_size)
    numbers = data.training_samples(0, 0, 1, config.micro_batch_size)
    batches = (one.model.micro_batch(t[:, :-1], t[:, 1:], n) for t, n in read(tokens, numbers, seed))
    history, losses = [{name: bucket.param.clone() for name, bucket in one.zero.buckets.items()}], []
    for update in range(updates):
        one.zero.zero_grad()
        total = 0.0
        for j in range(update * m, update * m + m):
            for bucket_name, bucket in one.zero.buckets.items():
                version = schedule.versions[stages[bucket_name]][j] if schedule.versions else update
                bucket.param.copy_(history[version - update - 1][bucket_name])
            total += one.executor.run(batches, 1, 1 / m).item() / m
        for bucket_name, bucket in one.zero.buckets.items():
            bucket.param.copy_(history[-1][bucket_name])
        one.zero.update(scalars(config, rate * min(1, 10 * (update + 1) / updates), update + 1))
        history = [*history[-p:], {key: bucket.param.clone() for key, bucket in one.zero.buckets.items()}]
        losses.append(total if math.isfinite(total) else math.inf)
    consumed = [(update + 1) * m * config.micro_batch_size for update in range(updates)]
    return Curve(losses, consumed, ends(schedule, updates))


def read(tokens, numbers, seed):
    """Yield (tokens, sample numbers) of each micro-batch."""
    for n in numbers:
        yield tokens.batch(n, seed), torch.from_numpy(n)


def scalars(config, rate, update):
    """Return the `reference.UpdateScalars` of an update, without clipping and skipping."""
    lr, one = torch.tensor(rate, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    skip = torch.zeros((), dtype=torch.bool)
    return reference.update_scalars(lr, one, torch.tensor(update), skip, config.adam_beta1, config.adam_beta2)


def ends(schedule, updates):
    """Return the simulated end of each update, on the rank that ends it last."""
    line = simulate(schedule, {"F": 1, "B": 2})
    if not schedule.versions:
        return [line.makespan * (update + 1) for update in range(updates)]
    last = {}
    for event in line.events:
        if event.action.kind == "U":
            last[event.action.microbatch] = max(event.end, last.get(event.action.microbatch, 0))
    return [last[j] for j in sorted(last)]
