"""Check a changed model, loss, loop or scheme, without a GPU.

    python check.py configs/mine.py                  all checks: about a minute on two cores
    python check.py configs/mine.py --tp=2 --zero=3  only this layout, with dp=2 if zero is given

It checks gradients, each kind of layout, resumes, fp16, another device, bf16, a loss scale, the loop's first losses,
frozen weights, the fused update, kernels, generation, and the export. The model is that of the configuration, with
fewer layers, tokens and words (`small`), and large initial weights, in float64. Each layout trains three iterations
with `train.run_training`, as a user would, and is compared with one process: metrics.jsonl, weights, copies.
Communications come late (testing/adversary.py). Exit code 1: a check is WRONG, or a layout refused.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from testing.judging import need_pytest  # isort: skip

need_pytest()

import testing.environment  # noqa: F401  # isort: skip: it sets variables that torch reads

import bisect
import contextlib
import math
import re
import sys
import tempfile
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import config as configuration
import convert
import operations
import reference
import train
from accounts.metrics import read_metrics
from errors import UserError, exit_on_user_error
from parallel import optimizer
from parallel.mesh import Mesh
from parallel.units import Model
from recovery import checkpoint
from recovery.checkpoint import step_path
from testing import compare
from testing.record import different, first_step, one_process_config, one_step, record_loop
from testing.tiny import (
    CHECKED,
    ROUNDED,
    Changed,
    built,
    stirred,
    stirring,
    tiny_batches,
    write_tokens,
    wrong_gradients,
)
from testing.workers import Workers

# check.py sets these fields itself. All others are those of the reader's configuration, also new ones.
OWN = """data_dir micro_batch_size global_batch_size rampup_batch_size train_iters train_epochs seed dtype kernels
    initial_loss_scale min_loss_scale loss_scale_window hysteresis tp pp cp order zero zero_copies sequence_parallel
    schedule chunks offload recompute out_dir resume initial_weights save_interval keep log_interval eval_interval
    eval_iters eval_only split check_replicas comm_timeout ledger delay trace profile tensorboard wandb"""
# A batch that grows, a warm-up, a falling rate, and a validation after each iteration: an edit of one of them shows.
TRAINING = dict(
    dropout=0.0, max_position_embeddings=0, micro_batch_size=1, rampup_batch_size="4,4,4",
    train_iters=3, lr=1e-2, min_lr=0.0, lr_decay_style="cosine", lr_decay_iters=10, lr_warmup_iters=1, adam_eps=1e-6,
    dtype="fp64", kernels="torch", log_interval=1, eval_interval=1, eval_iters=2, save_interval=1, keep=0,
)  # fmt: skip
LEARNING_RATE = "lr min_lr lr_decay_style lr_decay_iters lr_warmup_iters lr_warmup_fraction lr_wsd_decay_iters".split()
USUAL = dict(init_method_std=0.02)  # for dtypes that round
# numbers of a row of metrics.jsonl that layouts may have different
OF_LAYOUT = "processes train_iters iteration_ms samples_per_second tokens_per_second tflops hardware_tflops mfu".split()
OF_LAYOUT += ["timers_ms"]
ROOT = Path(__file__).parent
# files that the reader did not write; .venv may lie in the project's folder
TOOLS = r"/site-packages/|/testing/(adversary|record|tiny|workers)\.py|/check\.py|/errors\.py"
OTHER_LOSS = "the loss is another one than -log softmax(logits)[target]"
HALF = 4  # so many first lines of a cause are printed, and so many last ones
compare.ROWS = 3
RUNS = {}  # of one process
CAUSES = {}  # {cause: the check that has printed it}


def small(c, given=()):
    """Return this model with at most 3 layers, about 1,000 words and few tokens; its width is at most 1,024.

    given: fields on the command line. They keep their values.
    """
    heads = c.num_attention_heads
    while c.head_size * heads > 1024 and heads % 2 == 0 and not {"hidden_size", "num_attention_heads"} & {*given}:
        heads //= 2
    width = c.head_size * heads
    tokens = min(c.seq_length, max(32, 2**16 // width // 16 * 16))
    words = c.vocab_size if c.vocab_size < 1024 else 896 + c.vocab_size % 128  # equal padding
    kept = {name: value for name, value in vars(c).items() if name not in OWN.split()}
    sizes = dict(
        num_layers=min(c.num_layers, 3 if width < 512 else 2), hidden_size=width, num_attention_heads=heads,
        seq_length=tokens, vocab_size=words, ffn_hidden_size=c.ffn_hidden_size * width // c.hidden_size,
        num_query_groups=c.num_query_groups and math.gcd(c.num_query_groups, heads),
        init_method_std=4 * width**-0.5,  # large: activations reach an edit's thresholds
    )  # fmt: skip
    cut = {name: value for name, value in sizes.items() if name not in given}
    return configuration.Config(**kept | TRAINING | cut | dict(clip_grad=min(c.clip_grad, 0.1)))  # clips each step


# --- the checks: each returns "", or the cause ------------------------------------------------------------------------


def finite_differences(c):
    """Compare the gradients with slopes of the loss. Without the reader's `detach` they may agree: `changed`."""
    run = stirred(c, num_layers=min(2, c.num_layers), seq_length=min(32, c.seq_length))
    if wrong := wrong_gradients(run):
        with without_detach(f"{c.model}.py") as places, contextlib.suppress(Changed):
            try:
                again = wrong_gradients(run)
            except RuntimeError:  # what is kept from an earlier micro-batch has a graph now
                return wrong
            if again or not places:
                return wrong
        why = f"the gradient is that of the loss without {min(places)}: right, if it stops a gradient on purpose"
        raise Changed(why)


@contextlib.contextmanager
def without_detach(file):
    """Let detach, .data and no_grad do nothing in a file of the reader. Yield the set of places that call them."""
    places, base, enter = set(), torch._C.TensorBase, torch.no_grad.__enter__

    def here(what):
        frame = sys._getframe(2)
        found = Path(frame.f_code.co_filename) == ROOT / file
        places.update([f"{file}:{frame.f_lineno} ({what})"] * found)
        return found

    detach = lambda x: x if here("detach") else base.detach(x)  # noqa: E731
    data = property(lambda x: x if here(".data") else base.data.__get__(x), base.data.__set__)

    def enter_no_grad(self):
        self.prev = torch.is_grad_enabled()
        return None if here("no_grad") else enter(self)

    with (
        mock.patch.multiple(torch.Tensor, detach=detach, data=data),
        mock.patch.object(torch.no_grad, "__enter__", enter_no_grad),
    ):
        yield places


def trained(workers, ranks, c, *stops):
    """Train with files, also in several runs. Return (rows of metrics.jsonl, the `Record` of each rank in the last)."""
    c = replace(c, out_dir=tempfile.mkdtemp(dir=workers.folder))
    for train_iters in (*stops, c.train_iters):
        records = workers.run(ranks, record_loop, replace(c, train_iters=train_iters))
    return [*read_metrics(f"{c.out_dir}/metrics.jsonl").values()], records


def one_process(workers, c):
    """Return `trained` of one process. Layouts share it."""
    c = one_process_config(c)
    if str(c) not in RUNS:
        RUNS[str(c)] = trained(workers, 1, c)
    return RUNS[str(c)]


def other_number(rows, theirs):
    """Return the first number of metrics.jsonl that is another one, in words, or ""."""
    for row, right in zip(rows, theirs, strict=True):
        for key in sorted((right | row).keys() - OF_LAYOUT):
            if row.get(key) != pytest.approx(right.get(key), rel=1e-9, abs=0, nan_ok=True):
                return f"iteration {row['iteration']}: {key} is {row.get(key)} instead of {right.get(key)}"
    return ""


def layout(workers, c, ranks):
    """Compare a run of this layout with the run of one process."""
    configuration.check(c, ranks)
    Model(c, Mesh().tp)  # raises UserError
    theirs, (one,) = one_process(workers, c)
    rows, records = trained(workers, ranks, c)
    again = partial(first_step, workers, ranks, replace(c, rampup_batch_size=""), stirring)
    with stirring():
        if message := compare.differences(records, one, again):
            return message.partition("\n")[2]
    if wrong := other_number(rows, theirs):
        return f"{wrong}; losses, norms and weights are right: look at the loop (`train`) and at log.py"
    copies = records[0].copies
    return f"copies differ: {copies[0]}" if copies else ""


def resumed(workers, c, ranks):
    """Compare a run that stops after two iterations, and goes on, with the whole run of one process."""
    theirs, _ = one_process(workers, c)
    rows, _ = trained(workers, ranks, c, 2)
    if wrong := other_number(rows, theirs):
        if different(one_step(c), one_step(c)):
            return f"{wrong}: two equal steps differ: are there random numbers?"
        if other_number(rows[:2], theirs[:2]):
            return f"{wrong}, before it resumes: look at the loop (`train`) and at log.py"
        return f"{wrong}: a number of the run is in no checkpoint (`save`, `restore`)"


def overflow(workers, c):
    """Compare a run in fp16 whose first steps overflow, and that resumes after them, with the whole run."""
    half = replace(one_process_config(c), dtype="fp16", hysteresis=1, train_iters=4, **USUAL)

    def fits(power):
        run = built(replace(half, initial_loss_scale=2.0**power))
        return not train.train_step(run, tiny_batches(run)).read().skipped

    # The first scale is four times too large: two steps overflow.
    half.initial_loss_scale = 2.0 ** (1 + bisect.bisect_left(range(50), True, key=lambda power: not fits(power)))
    (wide, _), (theirs, _) = one_process(workers, c), trained(workers, 1, half)
    if len({row["skipped_iterations"] for row in theirs}) < 2:
        raise UserError("no step of it overflows, or each")
    if any(row["consumed_samples"] != right["consumed_samples"] for row, right in zip(theirs, wide, strict=False)):
        return "a step that overflows should count its samples as consumed, too"
    rows, _ = trained(workers, 1, half, 2)
    wrong = other_number(rows, theirs)
    return wrong and f"{wrong}: the loss scale, or a number of skipped steps, is in no checkpoint"


# --- one process: another device, dtype, loss scale; a resume; the loss -----------------------------------------------


def device(c):
    """Run a step on tensors without values, of the device meta: to mix them with a CPU's is an error, as on a GPU."""
    run = stirred(c, torch.device("meta"), dropout=0.1, dtype="bf16")
    try:
        with mock.patch.object(run.zero, "update"), mock.patch.object(train, "PendingStep"):  # these read values
            train.train_step(run, tiny_batches(run))
    except RuntimeError as error:
        if "device" in re.sub("^META device type", "", str(error)) and not isinstance(error, NotImplementedError):
            raise
        raise UserError(f"it ends where a value is needed, or at another mistake: {error}") from None


def narrow(c):
    """Compare a step's loss in bf16, a GPU's usual dtype, with that in float64."""
    loss, right = one_step(c, dtype="bf16", **USUAL).loss, one_step(c, **USUAL).loss
    return "" if math.isclose(loss, right, rel_tol=2**-8) else f"the loss is {loss:.6g}, in float64 {right:.6g}"


def loss_scale(c):
    """Compare a step whose gradients are 1024 times as large until the update, as in fp16."""
    one = one_step(c)
    if wrong := different(one_step(c), one):
        return f"other {', '.join(wrong[:4])} in a second equal step: are there random numbers?"
    wrong = different(one_step(c, 1024.0), one)
    factor = "has the factor `run.loss_scale.scale`, and a rule multiplies it by `scale`"
    if wrong:
        return f"other {', '.join(wrong[:4])}: `bucket.scaled_gradient` {factor}"
    wrong = different(one_step(c, skips=1), one)
    return wrong and f"other {', '.join(wrong[:4])} after a step that overflows: updates count (`zero.updates`)"


def first_losses(workers, c):
    """Compare three losses of the loop with the model's: of the first batch, of the next one, which has grown, and of
    the validation after the first. A target should be the file's next token, a loss -log softmax(logits)[target].
    """
    rows, (record,) = one_process(workers, c)
    with stirring():
        run, is_plain = built(one_process_config(c)), True
    tokens, val = (torch.from_numpy(np.fromfile(f"{c.data_dir}/{x}.bin", "<u2").astype(int)) for x in ("train", "val"))
    windows = tokens.unfold(0, c.seq_length + 1, 1)
    for step, batches in enumerate((record.batches[:1], record.batches[1:3])):
        if step:
            checkpoint.load_checkpoint(step_path(record.config.out_dir, step), run.model, run.zero)
            run.zero.parameters_from_master()
        for batch in batches:
            kind = wrong_target(batch, windows) or unlike_softmax(run.model, batch)
            if kind not in ("", OTHER_LOSS):
                return kind
            is_plain &= kind == ""
        run.zero.zero_grad()
        loss, right = record.losses[step], run.executor.run(iter(batches), len(batches), 1.0).item() / len(batches)
        if not math.isclose(loss, right, rel_tol=1e-9):
            return f"in iteration {step + 1} it is {loss:.8g} instead of {right:.8g}"
    windows, loss = val.unfold(0, c.seq_length + 1, c.seq_length), rows[0]["validation_loss"]
    with torch.no_grad():
        right = run.model(run.model.micro_batch(windows[:, :-1], windows[:, 1:])).mean().item()
    if not math.isclose(loss, right, rel_tol=1e-9):
        return f"the validation's is {loss:.8g}, that of all samples in val.bin {right:.8g}"
    if not is_plain:
        raise Changed(OTHER_LOSS)


def wrong_target(batch, windows):
    for row, target in zip(*(x.view(batch.shape) for x in (batch.ids, batch.targets)), strict=True):
        right = windows[(windows[:, :-1] == row).all(1), 1:]  # none: the data were changed on purpose
        if len(right) and not ((target == right) | (target < 0)).all(1).any():
            i = int((target != right[0]).nonzero()[0])
            return f"target {i} of a sample is {target[i]}, but the file's next token {right[0, i]}"


@torch.no_grad()
def unlike_softmax(model, batch):
    ids, targets = (x.view(batch.shape) for x in (batch.ids, batch.targets))
    losses, logits = model(model.micro_batch(ids, targets)), model(model.micro_batch(ids))
    wanted = batch.targets.where(batch.targets >= 0, -100)
    plain, later = (F.cross_entropy(logits, x, reduction="none") for x in (wanted, wanted.roll(-1)))
    if torch.isclose(losses, later).double().mean() > 0.5:
        return "a token's loss is that of the token after the next one: targets are the next tokens already"
    return "" if compare.same(losses, plain, 1e-9) else OTHER_LOSS


# --- the kernels, generation, export ----------------------------------------------------------------------------------


def kernels(c, choice):
    """Compare the loss and the gradients with a GPU's operations, in float32, with those of reference.py."""
    pytest.importorskip("triton", minversion="3.7")  # as testing/interpreted.py
    sizes = dict(num_layers=min(2, c.num_layers), seq_length=min(64, c.seq_length), **USUAL)
    results, exact = [], stirred(c, **sizes)
    exact.executor.run(tiny_batches(exact), 1, 1.0)
    largest = max(p.grad.abs().max() for p in exact.model.parameters())
    # In float32 a gradient that is 0, like a key bias's, has only rounding, which differs.
    zero = {p.spec.name for p in exact.model.parameters() if p.grad.abs().max() <= compare.NOISE * largest}
    for gpu in (reference, operations.choose(replace(c, kernels=choice), torch.device("cuda"), "fp32")):
        with mock.patch.object(operations, "choose", return_value=gpu):
            run = stirred(c, dtype="fp32", **sizes)
        loss = run.executor.run(tiny_batches(run), 1, 1.0).float()
        results.append({"loss": loss} | {p.spec.name: p.grad for p in run.model.parameters()})
    sizes = {name: largest if name in zero else right.abs().max() for name, right in results[0].items()}
    differences = {name: (results[1][name] - right).abs().max() for name, right in results[0].items()}
    wrong = [name for name, difference in differences.items() if not difference <= 1e-5 * sizes[name]]
    return wrong and f"other {', '.join(wrong[:4])}: reference.py and kernels.py must change together (`OPERATIONS`)"


def update_rule(c):
    """Compare the fused update with the function of parallel/optimizer.py."""
    rule = optimizer.RULES[c.optimizer]
    if not rule.fused:
        raise UserError(f"{c.optimizer} has no fused kernel")
    gpu = operations.choose(replace(c, kernels="triton"), torch.device("cuda"), "fp32")
    plain = updated(c, reference, rule._replace(fused=None))
    for name, ops in (("reference.py", reference), ("kernels.py", gpu)):
        if not all(compare.same(*pair, 1e-5) for pair in zip(updated(c, ops, rule), plain, strict=True)):
            return f"`{rule.fused}` of {name} is not `{c.optimizer}` of parallel/optimizer.py (fused=None uses that)"
    return ""


def updated(c, ops, rule):
    """Return the weights after two updates by `rule`. Gradients are random numbers."""
    run, dice = stirred(c, dtype="fp32", num_layers=min(2, c.num_layers)), torch.Generator().manual_seed(3)
    run.zero.ops = ops
    for step in (1, 2):
        for bucket in run.zero.in_order:
            bucket.grad.shard.normal_(generator=dice)
        numbers = map(torch.tensor, (0.01, 0.5, step, False))  # rate, scale, update, skip
        with mock.patch.dict(optimizer.RULES, {c.optimizer: rule}):
            run.zero.update(reference.update_scalars(*numbers, c.adam_beta1, c.adam_beta2))
    return [bucket.master for bucket in run.zero.in_order]


def frozen(c):
    """Check that weights without a gradient stay as they are, and the others do not. Name those not frozen."""
    step = one_step(c)
    if all(torch.equal(step.before[name], after) for name, after in step.after.items()):
        return "the update moves no weight: a rule writes into `weight`, in place"
    still = [name for name, (_, _, values) in step.gradients.items() if not values.any()]
    moved = [name for name in still if not torch.equal(step.before[name], step.after[name])]
    if moved:
        return f"{', '.join(moved[:4])}: no gradient, but the update moves it. To freeze: units.freeze"
    specs = Model(c, Mesh().tp).specs()
    if unused := [name for name in still if not specs[name].frozen]:
        why = "no gradient: does forward use it? (RowParallelLinear leaves its bias to the next operation)"
        raise Changed(f"{', '.join(unused[:4])}: {why}")


@torch.no_grad()
def generation(c):
    """Compare the logits of one token after another, with kept keys and values, with those of all tokens together."""
    model, caches = stirred(c).model, [[] for _ in range(c.num_layers)]
    ids = torch.randint(0, c.vocab_size, (1, c.seq_length), generator=torch.Generator().manual_seed(1))
    for i, right in enumerate(model(model.micro_batch(ids))):
        (logits,) = model(model.micro_batch(ids[:, i : i + 1], start=i, caches=caches))
        if not compare.same(logits, right):
            if compare.same(logits, right, 1e-5):
                raise UserError(ROUNDED)
            return f"the logits of token {i} differ from those of a pass over all tokens (look at `caches`)"


def export(c):
    """Compare with the logits of Hugging Face's model."""
    text = SimpleNamespace(begin=c.vocab_size - 1, eot_token=c.vocab_size - 1, n_vocab=c.vocab_size)
    convert.exported(convert.transformers(), stirred(c, dtype="fp32").model, text)


# --- the command line -------------------------------------------------------------------------------------------------


def show(name, check, *arguments):
    """Print a check's line. Return True if it failed."""
    try:
        cause = check(*arguments) or ""
        word = "WRONG" if cause else "ok"
    except (UserError, pytest.skip.Exception) as error:
        cause = str(error)
        changed = isinstance(error, Changed) or re.search("is changed: it is no|no counterpart", cause)  # `convert`
        word = "refused" if check is layout else "changed" if changed else "skipped"
    except pytest.fail.Exception as error:
        word, cause = "WRONG", in_one_line(str(error))
    except Exception:  # the reader's code may raise anything
        word, cause = "WRONG", in_one_line(traceback.format_exc())
    lines = cause.splitlines()
    if word == "WRONG":
        usual = [line for line in lines if line.startswith(("Forward is", "This usually"))]
        key = re.sub(r"rank \d+ of \d+: |\(rank .*", "", [*usual, *lines][0])
        if (before := CAUSES.setdefault(key, name)) != name:
            lines = [f"as {before}: {lines[0]}"]
    print(f"{word:<8}{name}", *lines[:HALF], *lines[HALF:][-HALF:], sep="\n        ", flush=True)
    return word in ("WRONG", "refused")


def places(stack):
    """Return the lines of a stack that are in this project, outermost first, and the code of the last one."""
    frames = [f for f in stack if Path(f.filename).is_relative_to(ROOT) and not re.search(TOOLS, f.filename)]
    lines = [f"{Path(f.filename).relative_to(ROOT)}:{f.lineno}" for f in frames]
    return f"{' > '.join(lines[-4:])}: {frames[-1].line}" if frames else ""


def in_one_line(text):
    """Return a rank's traceback as its error and the lines that led to it."""
    rank, _, stack = text.replace(":\n", ": ", 1).partition("Traceback")
    if not stack:
        return rank
    pairs = re.findall('File "(.*)", line ([0-9]+)', stack)
    frames = [traceback.FrameSummary(file, int(line), "") for file, line in pairs]
    (error, *_) = re.findall(r"(?m)^[\w.]+(?:: .*)?$", stack)  # `assert x` has no message
    if error.endswith("'NoneType' object has no attribute 'flatten'"):
        error += ": the matrix of a linear, or the head's table, is no parameter, so its gradient has no place"
    return f"{rank}{error} ({places(frames)})"


def cuts(c, given):
    """Return the first line: what was cut."""
    names = "num_layers hidden_size num_attention_heads seq_length vocab_size".split()
    pairs = [(name, getattr(c, name), getattr(given, name)) for name in names]
    sizes = ", ".join(f"{name}={ours}" + f" (yours: {theirs})" * (ours != theirs) for name, ours, theirs in pairs)
    fit = "; numbers in your edit (ids, a window, layers) must fit into these" * ("yours" in sizes)
    return f"checked with {sizes}; {c.optimizer}, fp64 on the CPU{fit}"


def main():
    """Run the checks. Exit with code 1 if one is wrong. Raises UserError."""
    given, layout_fields = configuration.load(sys.argv[1:]), configuration.SECTIONS["layout"]
    options = vars(configuration.parser().parse_args())
    c = small(given, options)
    chosen = {name: value for name, value in options.items() if name in layout_fields}
    print(cuts(c, given))
    Model(c, Mesh().tp).specs()  # raises UserError for a model that no layout accepts
    if chosen:
        c.dropout, c.rampup_batch_size = given.dropout, ""
    checks = [("gradients of one process: finite differences", finite_differences, c)]
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(Path(folder))
        workers.adversary = True  # a result that is read before its `wait` is wrong
        val = 12 * c.seq_length + 1  # 1.5 global batches: one process has a smaller micro-batch than the others
        c.data_dir = write_tokens(workers.folder / "data", vocab_size=c.vocab_size, train=60000, val=val)
        for fields in [chosen] if chosen else CHECKED:
            name = " ".join(f"{key}={value}" for key, value in fields.items())
            one = replace(c, **{key: value for key, value in fields.items() if key != "dp"})
            ranks = fields.get("dp", 2 * one.zero_copies if one.zero else 1) * one.tp * one.pp * one.cp
            one.num_layers = max(c.num_layers, one.pp * one.chunks - 2)
            if "dropout" in fields:  # these layouts have the reader's own learning rates
                one = replace(one, **{name: getattr(given, name) for name in LEARNING_RATE})
            checks.append((name, layout, workers, one, ranks))
        if not chosen:
            checks += [
                ("a resumed run", resumed, workers, c, 1),
                ("a resumed run, dp=2 zero=1", resumed, workers, replace(c, zero=1), 2),
                ("fp16: overflows, and a resumed run", overflow, workers, c),
                ("another device", device, c),
                ("a step in bf16", narrow, c),
                ("a step with a loss scale", loss_scale, c),
                ("the loop's first losses", first_losses, workers, c),
                ("frozen weights", frozen, c),
                ("update: the fused operation", update_rule, c),
                *((f"kernels={choice} on a GPU", kernels, c, choice) for choice in ("auto", "triton")),
                ("generation", generation, c),
                ("export to Hugging Face", export, c),
            ]
        failed = [show(*check) for check in checks]
        if chosen and not any(failed):
            failed.append(show(f"a resumed run, {name}", resumed, workers, one, ranks))
        workers.stop()
    sys.exit(any(failed))


if __name__ == "__main__":
    exit_on_user_error(main)
