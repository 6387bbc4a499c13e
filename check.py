"""Check a changed model, loss, loop or scheme, without a GPU.

    python check.py configs/mine.py                  all checks: about a minute on two cores
    python check.py configs/mine.py --tp=2 --zero=3  only this layout, with dp=2 if zero is given

It checks gradients, each kind of layout, another device, bf16, a loss scale, a resume, the loop's first loss, frozen
weights, the fused update, kernels, generation, and the export. The model is that of the configuration, in float64, with
fewer layers, tokens and words (`small`). Each layout trains three iterations with `train.run_training`, as a user
would, and is compared with one process: metrics.jsonl, weights, copies. Communications come late
(testing/adversary.py). Exit code 1: a check is WRONG, or a layout refused.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from testing.judging import need_pytest  # isort: skip

need_pytest()

import testing.environment  # noqa: F401  # isort: skip: it sets variables that torch reads

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
from recovery.checkpoint import step_path
from testing import compare
from testing.record import different, first_step, one_process_config, one_step, record_loop
from testing.tiny import CHECKED, ROUNDED, built, stirred, tiny_batches, write_tokens, wrong_gradients
from testing.workers import Workers

TRAINING = dict(
    init_method_std=1.0,  # large enough to reach an edit's thresholds
    dropout=0.0, max_position_embeddings=0, micro_batch_size=1, train_iters=3, lr=1e-2, min_lr=0.0,
    lr_decay_style="constant", lr_warmup_iters=0, adam_eps=1e-6, dtype="fp64", kernels="torch",
    log_interval=1, eval_iters=2, save_interval=2,
)  # fmt: skip
OF_LAYOUT = "processes iteration_ms samples_per_second tokens_per_second tflops hardware_tflops mfu timers_ms".split()
ROOT = Path(__file__).parent
# files that the reader did not write; .venv may lie in the project's folder
OTHERS = r"/site-packages/|/testing/(adversary|record|tiny|workers)\.py|/check\.py|/errors\.py"
HALF = 4  # the first and the last lines of a cause that are printed
compare.ROWS = 3
RUNS = {}  # of one process
CAUSES = {}  # {cause: the check that has printed it}


def small(c):
    """Return this model with at most 3 layers, about 1,000 words and few tokens; its width is at most 1,024."""
    heads = c.num_attention_heads
    while c.head_size * heads > 1024 and heads % 2 == 0:
        heads //= 2
    width = c.head_size * heads
    tokens = min(c.seq_length, max(32, 2**16 // width // 16 * 16))
    words = c.vocab_size if c.vocab_size < 1024 else 896 + c.vocab_size % 128  # equal padding
    kept = {name: getattr(c, name) for part in ("model", "optimizer") for name in configuration.SECTIONS[part]}
    sizes = dict(
        num_layers=min(c.num_layers, 3 if width < 512 else 2), hidden_size=width, num_attention_heads=heads,
        seq_length=tokens, vocab_size=words, ffn_hidden_size=c.ffn_hidden_size * width // c.hidden_size,
        num_query_groups=c.num_query_groups and math.gcd(c.num_query_groups, heads),
        clip_grad=min(c.clip_grad, 0.1),  # clips each step
    )  # fmt: skip
    return configuration.Config(**kept | TRAINING | sizes)


# --- the checks: each returns "", or the cause ------------------------------------------------------------------------


def finite_differences(c):
    return wrong_gradients(stirred(c, num_layers=min(2, c.num_layers), seq_length=min(32, c.seq_length)))


def trained(workers, ranks, c):
    """Return (rows of metrics.jsonl, the `Record` of each rank)."""
    out_dir = tempfile.mkdtemp(dir=workers.folder)
    records = workers.run(ranks, record_loop, replace(c, out_dir=out_dir))
    return [*read_metrics(f"{out_dir}/metrics.jsonl").values()], records


def one_process(workers, c):
    """Return `trained` of one process. Layouts share it."""
    c = one_process_config(c)
    if str(c) not in RUNS:
        RUNS[str(c)] = trained(workers, 1, c)
    return RUNS[str(c)]


def layout(workers, c, ranks):
    """Compare a run of this layout with the run of one process."""
    configuration.check(c, ranks)
    Model(c, Mesh().tp)  # raises UserError
    theirs, (one,) = one_process(workers, c)
    rows, records = trained(workers, ranks, c)
    if message := compare.differences(records, one, partial(first_step, workers, ranks, c)):
        return message.partition("\n")[2]
    for row, right in zip(rows, theirs, strict=True):
        for key in sorted((right | row).keys() - OF_LAYOUT):
            if row.get(key) != pytest.approx(right.get(key), rel=1e-9, abs=0):
                at = f"iteration {row['iteration']}: {key} is {row.get(key)} instead of {right.get(key)}"
                return f"{at}; losses, norms and weights are right: look at the loop (`train`) and at log.py"
    copies = records[0].copies
    return f"copies differ: {copies[0]}" if copies else ""


# --- one process: another device, dtype, loss scale; a resume; the loss -----------------------------------------------


def device(c):
    """Run a step on tensors without values, of the device meta: to mix them with a CPU's is an error, as on a GPU."""
    run = stirred(c, torch.device("meta"), dropout=0.1, dtype="bf16")
    try:
        with mock.patch.object(run.zero, "update"), mock.patch.object(train, "PendingStep"):  # these read values
            train.train_step(run, tiny_batches(run))
    except RuntimeError as error:
        if "device" in str(error) and not isinstance(error, NotImplementedError):
            raise
        raise UserError(f"it ends where a value is needed, or at another mistake: {error}") from None


def narrow(c):
    """Compare a step's loss in bf16, a GPU's usual dtype, with that in float64."""
    loss, right = one_step(c, dtype="bf16").loss, one_step(c).loss
    return "" if math.isclose(loss, right, rel_tol=2**-5) else f"the loss is {loss:.6g}, in float64 {right:.6g}"


def loss_scale(c):
    """Compare a step whose gradients are 1024 times as large until the update, as in fp16."""
    one = one_step(c)
    if wrong := different(one_step(c), one):
        return f"other {', '.join(wrong[:4])} in a second equal step: are there random numbers?"
    wrong = different(one_step(c, 1024.0), one)
    factor = "has the factor `run.loss_scale.scale`, and a rule multiplies it by `scale`"
    return wrong and f"other {', '.join(wrong[:4])}: `bucket.scaled_gradient` {factor}"


def resumed(workers, c):
    """Compare a run that resumes at iteration 2 with the whole run."""
    _, (whole,) = one_process(workers, c)
    _, (part,) = trained(workers, 1, replace(whole.config, resume=str(step_path(whole.config.out_dir, 2))))
    wrong = different(part, whole, 2)
    return wrong and f"other {', '.join(wrong[:4])}: a number of the run is in no checkpoint (`save`, `restore`)"


def first_loss(workers, c):
    """Compare the loss of the loop's first batch with -log softmax of the logits at the next tokens of the file."""
    _, (record,) = one_process(workers, c)
    batch, model = record.batch, built(one_process_config(c)).model
    ids, targets = (x.view(batch.shape) for x in (batch.ids, batch.targets))
    tokens = torch.from_numpy(np.fromfile(f"{c.data_dir}/train.bin", "<u2").astype(np.int64))
    windows = tokens.unfold(0, c.seq_length + 1, 1)
    for row, target in zip(ids, targets, strict=True):
        right = windows[(windows[:, :-1] == row).all(1), 1:]  # none: the data were changed on purpose
        if len(right) and not ((target == right) | (target < 0)).all(1).any():
            i = int((target != right[0]).nonzero()[0])
            return f"target {i} of a sample is {target[i]}, but the file's next token {right[0, i]}"
    with torch.no_grad():
        losses, logits = model(model.micro_batch(ids, targets)), model(model.micro_batch(ids))
    wanted = batch.targets.where(batch.targets >= 0, -100)
    plain, later = (F.cross_entropy(logits, x, reduction="none") for x in (wanted, wanted.roll(-1)))
    if close(losses, plain, 1e-9):
        loss, right = record.loss, losses.mean().item()
        return "" if math.isclose(loss, right, rel_tol=1e-9) else f"it is {loss:.8g} instead of {right:.8g}"
    if torch.isclose(losses, later).double().mean() > 0.5:
        return "a token's loss is that of the token after the next one: targets are the next tokens already"
    raise UserError("the loss is another one than -log softmax(logits)[target]")


# --- the kernels, generation, export ----------------------------------------------------------------------------------


def kernels(c, choice):
    """Compare the loss and the gradients of one block with a GPU's operations, in float32, with reference.py's."""
    results, exact = [], stirred(c, num_layers=1, seq_length=min(64, c.seq_length))
    exact.executor.run(tiny_batches(exact), 1, 1.0)
    largest = max(p.grad.abs().max() for p in exact.model.parameters())
    # In float32 a gradient that is 0, like a key bias's, has only rounding, which differs.
    zero = {p.spec.name for p in exact.model.parameters() if p.grad.abs().max() <= compare.NOISE * largest}
    for gpu in (reference, operations.choose(replace(c, kernels=choice), torch.device("cuda"), "fp32")):
        with mock.patch.object(operations, "choose", return_value=gpu):
            run = stirred(c, dtype="fp32", num_layers=1, seq_length=min(64, c.seq_length))
        loss = run.executor.run(tiny_batches(run), 1, 1.0).float()
        results.append({"loss": loss} | {p.spec.name: p.grad for p in run.model.parameters()})
    sizes = {name: largest if name in zero else right.abs().max() for name, right in results[0].items()}
    differences = {name: (results[1][name] - right).abs().max() for name, right in results[0].items()}
    wrong = [name for name, difference in differences.items() if not difference <= 1e-5 * sizes[name]]
    return wrong and f"other {', '.join(wrong[:4])}: reference.py and kernels.py must change together (`OPERATIONS`)"


def close(ours, theirs, tolerance):
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


def update_rule(c):
    """Compare the fused update with the function of parallel/optimizer.py."""
    rule = optimizer.RULES[c.optimizer]
    if not rule.fused:
        raise UserError(f"{c.optimizer} has no fused kernel")
    gpu = operations.choose(replace(c, kernels="triton"), torch.device("cuda"), "fp32")
    plain = updated(c, reference, rule._replace(fused=None))
    for name, ops in (("reference.py", reference), ("kernels.py", gpu)):
        if not all(close(*pair, 1e-5) for pair in zip(updated(c, ops, rule), plain, strict=True)):
            return f"`{rule.fused}` of {name} is not `{c.optimizer}` of parallel/optimizer.py (fused=None uses that)"
    return ""


def updated(c, ops, rule):
    """Return the weights after two updates by `rule`. Gradients are random numbers."""
    run, dice = stirred(c, dtype="fp32", num_layers=1), torch.Generator().manual_seed(3)
    run.zero.ops = ops
    for step in (1, 2):
        for bucket in run.zero.in_order:
            bucket.grad.shard.normal_(generator=dice)
        numbers = map(torch.tensor, (0.01, 0.5, step, False))  # rate, scale, update, skip
        with mock.patch.dict(optimizer.RULES, {c.optimizer: rule}):
            run.zero.update(reference.update_scalars(*numbers, c.adam_beta1, c.adam_beta2))
    return [bucket.master for bucket in run.zero.in_order]


def frozen(c):
    """Check that weights without a gradient stay as they are, and the others do not."""
    step = one_step(c)
    if all(torch.equal(step.before[name], after) for name, after in step.after.items()):
        return "the update moves no weight: a rule writes into `weight`, in place"
    still = [name for name, (_, _, values) in step.gradients.items() if not values.any()]
    moved = [name for name in still if not torch.equal(step.before[name], step.after[name])]
    return moved and f"{', '.join(moved[:4])}: no gradient, but the update moves it. To freeze: units.freeze"


@torch.no_grad()
def generation(c):
    """Compare the logits of one token after another, with kept keys and values, with those of all tokens together."""
    model, caches = stirred(c).model, [[] for _ in range(c.num_layers)]
    ids = torch.randint(0, c.vocab_size, (1, c.seq_length), generator=torch.Generator().manual_seed(1))
    for i, right in enumerate(model(model.micro_batch(ids))):
        (logits,) = model(model.micro_batch(ids[:, i : i + 1], start=i, caches=caches))
        if not close(logits, right, 1e-8):
            if close(logits, right, 1e-5):
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
    except UserError as error:
        cause = str(error)
        changed = re.search("is changed: it is no|no counterpart", cause)  # `convert.exported`
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
    frames = [f for f in stack if Path(f.filename).is_relative_to(ROOT) and not re.search(OTHERS, f.filename)]
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
    return f"{rank}{error} ({places(frames)})"


def cuts(c, given):
    """Return the first line: what was cut."""
    names = "num_layers hidden_size num_attention_heads seq_length vocab_size".split()
    pairs = [(name, getattr(c, name), getattr(given, name)) for name in names]
    sizes = ", ".join(f"{name}={ours}" + f" (yours: {theirs})" * (ours != theirs) for name, ours, theirs in pairs)
    return f"checked with {sizes}; {c.optimizer}, fp64 on the CPU"


def main():
    """Run the checks. Exit with code 1 if one is wrong. Raises UserError."""
    given, layout_fields = configuration.load(sys.argv[1:]), configuration.SECTIONS["layout"]
    c, options = small(given), vars(configuration.parser().parse_args())
    chosen = {name: value for name, value in options.items() if name in layout_fields}
    print(cuts(c, given))
    Model(c, Mesh().tp).specs()  # raises UserError for a model that no layout accepts
    if chosen:
        c.dropout = given.dropout
    checks = [
        ("gradients of one process: finite differences", finite_differences, c),
    ]
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(Path(folder))
        workers.adversary = True  # a result that is read before its `wait` is wrong
        val = 12 * c.seq_length + 1  # 1.5 global batches: one process has a smaller micro-batch than the others
        c.data_dir = write_tokens(workers.folder / "data", vocab_size=c.vocab_size, train=60000, val=val)
        for fields in [chosen] if chosen else CHECKED:
            name = " ".join(f"{key}={value}" for key, value in fields.items())
            one = replace(c, **{key: value for key, value in fields.items() if key != "dp"})
            dp = fields.get("dp", 2 * one.zero_copies if one.zero else 1)
            one.num_layers = max(c.num_layers, one.pp * one.chunks - 2)
            checks.append((name, layout, workers, one, dp * one.tp * one.pp * one.cp))
        if not chosen:
            checks += [
                ("another device", device, c),
                ("a step in bf16", narrow, c),
                ("a step with a loss scale", loss_scale, c),
                ("a resumed run", resumed, workers, c),
                ("the loop's first loss", first_loss, workers, c),
                ("frozen weights", frozen, c),
                ("update: the fused operation", update_rule, c),
                *((f"kernels={choice} on a GPU", kernels, c, choice) for choice in ("auto", "triton")),
                ("generation", generation, c),
                ("export to Hugging Face", export, c),
            ]
        failed = [show(*check) for check in checks]
        workers.stop()
    sys.exit(any(failed))


if __name__ == "__main__":
    exit_on_user_error(main)
