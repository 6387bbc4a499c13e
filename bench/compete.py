"""The loop of all measurements: contestants take turns, and a row of a table has each one's times.

Other programs and clock rates disturb a measurement. So a printed ratio is the median of the ratios
of two turns in the same round.
"""

import statistics
import time
from functools import partial

import torch
import torch.distributed as dist

from accounts.devices import peak_tflops
from accounts.flops import model_flops
from errors import UserError

CHECKED = 3  # steps whose losses and gradient norms are compared
TOLERANCE = {"fp32": (1e-4, 1e-4), "bf16": (0.01, 0.05)}  # relative, of a loss and a gradient norm
ROW = "{:<26}{:<22}{:>22}{:>18}{:>12}{:>8}"
TITLES = ROW.format("", "", "ms of a step", "ours / theirs", "tokens/s", "MFU")


def compete(contestants, rounds):
    """Return {name: the results of its turns}. contestants: {name: function without arguments}.

    Every second round goes backwards. A contestant that fails leaves, and the others go on.
    """
    results = {name: [] for name in contestants}
    for i in range(rounds):
        for name in [*results][:: -1 if i % 2 else 1]:
            try:
                results[name].append(contestants[name]())
            except Exception as error:
                if dist.is_initialized():  # the other processes wait for this one
                    raise
                del results[name]
                words = " ".join(str(error).split())[:200]
                print(f"{name} failed: {type(error).__name__}: {words}", flush=True)
    return results


def train_beside(title, c, contestants, rounds, steps, gpu=""):
    """Check that contestants train one model, and print a row of times for each. Return whether ours has a row.

    contestants: {name: start}, ours first. start() sets the initial weights and returns step(). step() returns read(),
    so that a timed step does not wait: read()[:2] are loss and gradient norm. gpu: its name, or "". On a GPU a first
    figure of each is printed at once.
    """
    stepping, ours = {}, next(iter(contestants))

    def first_steps(name):
        step = stepping[name] = contestants[name]()
        numbers = [step()()[:2] for _ in range(CHECKED)]
        if gpu:
            print(f"{name}: {1000 * turn(step, steps):.1f} ms; {numbers}", flush=True)
        return numbers

    firsts = compete({name: partial(first_steps, name) for name in contestants}, 1)
    check_same(title, c.dtype, {name: numbers for name, (numbers,) in firsts.items()})
    turns = {name: partial(turn, stepping[name], steps) for name in firsts}
    seconds = compete(turns, rounds)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for name in seconds:
            print(row(title, c, name, seconds, ours, gpu), flush=True)
    return ours in seconds


def check_same(title, dtype, numbers):
    """Raise UserError if the losses or the gradient norms of two contestants differ."""
    ours, *others = numbers or [""]
    for theirs in others:
        for i, (a, b) in enumerate(zip(numbers[ours], numbers[theirs], strict=True)):
            for what, x, y, e in zip(("loss", "gradient norm"), a, b, TOLERANCE[dtype], strict=True):
                if not abs(x - y) <= e * abs(y):
                    raise UserError(f"{title}: the {what} of step {i + 1} differs: {ours} {x}, {theirs} {y}")


def turn(step, steps):
    """Return the mean seconds of a step. The first one allocates memory and is not timed."""
    torch.cuda.empty_cache()  # the others' blocks; without a GPU it does nothing
    step()
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - start) / steps


def wait():
    """Wait for the GPU, and for the other processes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def row(title, c, name, seconds, ours, gpu):
    """Return a contestant's row. tokens/s are those of all processes together."""
    median, peak = statistics.median(seconds[name]), peak_tflops(gpu, c.dtype)
    mfu = f"{model_flops(c, c.global_batch_size) / median / (peak * 1e12):.1%}" if peak else ""
    against = "" if name == ours or ours not in seconds else spread(ratios(seconds[ours], seconds[name]))
    milliseconds = spread([1000 * x for x in seconds[name]], "{:.1f}")
    return ROW.format(title, name, milliseconds, against, f"{c.global_batch_size * c.seq_length / median:,.0f}", mfu)


# --- names and numbers --------------------------------------------------------------------------


def chosen(names, words):
    """Return the names that contain these words of the command line. Raises UserError if there are none."""
    text = " ".join(words)
    if not (found := [name for name in names if text in name]):
        raise UserError(f"{text}: no name contains this text; the names are {', '.join(names)}")
    return found


def spread(values, form="{:.2f}"):
    """Return the median, smallest and largest value: '1.02 (0.97-1.05)'."""
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low}-{high})"


def ratios(values, others):
    """Return the ratio of the two values of each round."""
    return [a / b for a, b in zip(values, others, strict=True)]
