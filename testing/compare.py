"""Compare a layout's run with a run on one process, and name the idea that a difference usually breaks.

The order is: initial parameters, gradients of the first step, loss, gradient norm, parameters. A message describes the
first of these that differs. The comparison is cheap while all numbers are equal. Only after a difference the first step
runs again, and its gradients are compared, parameter by parameter. Here `ours` is the layout's number and `theirs` the
number of one process. `gradient_idea` tries in this order:

    ratio          ours = r * theirs. For example, 8 = m * dp names a factor that is missing in the loss
    sums           ours, summed over an axis, is theirs: this sum is missing
    micro-batches  ours is a sum of the gradients of single micro-batches: a least squares fit finds the factors
    where          the first parameter, in the order of backward, that is wrong
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

TOLERANCE = 1e-10  # relative: float64 rounds at 1e-16, and eight steps add up
EPSILON = torch.finfo(torch.float64).eps
ROWS = 8  # of a table
COPIES = "Each copy must be made by the same sums in the same order, or come from one rank."
LATER = "Step 1 is right. Something of a step is left for the next one, or ranks draw their data unequally."


class Different(AssertionError):
    """A comparison failed. Its message is complete: no traceback is needed."""


class FirstStep(NamedTuple):
    """The first step of one rank."""

    loss: float
    norm: float
    gradients: dict  # parameter: (begin, end, values): the elements that this rank updates, of its part over tp
    after: dict  # parameter: this rank's part over tp, after the update


@dataclass
class Sizes:
    """The sizes of a layout, and the place of each rank in it (`mesh.py`)."""

    dp: int
    tp: int
    pp: int
    m: int

    @classmethod
    def of(cls, config, ranks):
        dp = ranks // (config.tp * config.pp)
        return cls(dp, config.tp, config.pp, config.global_batch_size // (config.micro_batch_size * dp))

    def place(self, rank):
        """Return (dp, tp, pp), the rank's number on each axis."""
        return rank // (self.tp * self.pp), rank % self.tp, rank // self.tp % self.pp

    def name(self, rank):
        parts = [f"{axis}={i}" for axis, i in zip(("dp", "tp", "pp"), self.place(rank), strict=True)]
        kept = [part for part, size in zip(parts, (self.dp, self.tp, self.pp), strict=True) if size > 1]
        return f"{rank} ({' '.join(kept)})" if kept else f"{rank}"

    def local(self, spec, whole, rank):
        """Return a rank's part, over tp, of a whole tensor."""
        return whole if spec.tp_dim is None else whole.chunk(self.tp, spec.tp_dim)[rank % self.tp]


# --- ratios -----------------------------------------------------------------------------------------------------------

LOSS_IDEAS = {  # ratio of all gradients (and, if it is in the loss already, of the loss) to the right ones
    "m": "the loss is not divided by the number of micro-batches",
    "dp": "the loss is not divided by the number of data ranks, or gradients are summed over dp twice",
    "tp": "gradients are summed over tp, although every tp rank already has the whole sum",
    "pp": "every pipeline stage adds the same gradient",
    "m * dp": "the loss is divided neither by the number of micro-batches nor by the number of data ranks",
    "1 / m": "the loss is divided by the number of micro-batches twice",
    "1 / dp": "gradients are averaged over dp, although the loss is already divided by the number of data ranks",
    "1 / tp": "gradients are divided by the number of tensor parallel ranks, but every tp rank sees every sample",
    "1 / pp": "the loss is divided by the number of pipeline stages, but every sample passes all stages",
    "0": "no gradient arrives: it is cleared, or never added",
    "2": "something is added twice",
}


def ratio(ours, theirs):
    """Return r with ours = r * theirs, or None if there is no such number."""
    square = (theirs * theirs).sum().item()
    if square == 0:
        return None
    r = (ours * theirs).sum().item() / square
    return r if (ours - r * theirs).abs().max() <= 1e-7 * max(abs(r), 1e-3) * theirs.abs().max() else None


def factors(sizes):
    """Return {expression: value} of factors that are often missing."""
    axes = {axis: getattr(sizes, axis) for axis in ("m", "dp", "tp", "pp") if getattr(sizes, axis) > 1}
    table = {}
    for count in (1, 2, 3):
        for chosen in itertools.combinations(axes, count):
            value = math.prod(axes[axis] for axis in chosen)
            table[" * ".join(chosen)] = value
            table["1 / " + (chosen[0] if count == 1 else f"({' * '.join(chosen)})")] = 1 / value
    for a, b in itertools.permutations(axes, 2):
        table[f"{a} / {b}"] = axes[a] / axes[b]
    return table | {"2": 2.0, "1 / 2": 0.5, "-1": -1.0}


def expressions(r, sizes):
    """Return the shortest expressions in m, dp, tp and pp whose value is r."""
    if abs(r) < 1e-9:
        return ["0"]
    found = [name for name, value in factors(sizes).items() if abs(r - value) < 1e-6 * abs(value)]
    named = [name for name in found if name not in ("2", "1 / 2")] or found
    return [name for name in named if len(name.split()) == min(len(other.split()) for other in named)]


def written(r, sizes):
    """Write a ratio with its expressions: `8 = m * dp`."""
    if r is None:
        return "not constant"
    names = [name for name in expressions(r, sizes) if name not in ("0", "2", "-1")]
    return " = ".join([f"{r:.6g}", *names])


def scale_idea(r, sizes):
    """Name the idea that this ratio of gradients usually breaks."""
    ideas = [f"{name}: {LOSS_IDEAS[name]}" for name in expressions(r, sizes) if name in LOSS_IDEAS]
    return "; or ".join(ideas) or "No product of m, dp, tp, pp: look where the loss and its gradient are scaled"


# --- differences of tensors -------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """A piece of a parameter that differs on one rank."""

    name: str
    rank: int
    begin: int
    end: int
    ours: torch.Tensor
    theirs: torch.Tensor
    relative: float  # the largest difference, in units of the parameter's largest element
    ratio: float | None


def finding(name, rank, begin, ours, theirs, size):
    """A Finding if two tensors differ, else None. size: the largest element of the whole parameter."""
    ours, theirs = ours.flatten(), theirs.flatten()
    distance = (ours - theirs).abs().max().item() if ours.numel() else 0.0
    if distance <= TOLERANCE * size:
        return None
    relative = distance / size if size else math.inf
    return Finding(name, rank, begin, begin + len(ours), ours, theirs, relative, ratio(ours, theirs))


def table(findings, specs, sizes):
    """Write the worst Finding of each parameter, the largest difference first."""
    if not findings:
        return ""
    worst = {}
    for f in findings:
        if f.name not in worst or not f.relative <= worst[f.name].relative:
            worst[f.name] = f
    rows = [("parameter", "cut along", "rank", "elements", "relative", "ulps", "ratio to one process's")]
    ordered = sorted(worst.values(), key=lambda f: -f.relative if f.relative == f.relative else -math.inf)
    for f in ordered[:ROWS]:
        cut = "-" if specs[f.name].tp_dim is None or sizes.tp == 1 else f"dim {specs[f.name].tp_dim}"
        place = f"{f.begin}..{f.end}", f"{f.relative:.1e}", f"{f.relative / EPSILON:.0e}"
        rows.append((f.name, cut, sizes.name(f.rank), *place, written(f.ratio, sizes)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["    " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = [f"    and {len(ordered) - ROWS} more"] if len(ordered) > ROWS else []
    return "\n".join(lines + more)


# --- initial parameters -----------------------------------------------------------------------------------------------


def initial_difference(results, reference, config, specs, sizes):
    """Describe the first initial parameter that is not equal bit for bit; "" if all are equal."""
    before = reference[2]
    for rank, result in enumerate(results):
        for name, ours in result[2].items():
            if not torch.equal(ours, sizes.local(specs[name], before[name], rank)):
                it = what_it_is(name, rank, ours, before, config, specs, sizes)
                return f"The initial {name} of rank {sizes.name(rank)} differs: {it}."
    return ""


def what_it_is(name, rank, ours, before, config, specs, sizes):
    """Describe wrong initial values: another tensor's, or numbers drawn for a shard."""
    dim = specs[name].tp_dim
    for other, whole in before.items():
        parts = [whole] if specs[other].tp_dim is None else whole.chunk(sizes.tp, specs[other].tp_dim)
        for t, part in enumerate(parts):
            if whole.std() > 0 and torch.equal(ours, part):
                if other != name:
                    return f"it is {other}. The numbers must depend on the name in the whole model, not in one stage"
                return f"it is the shard of tp rank {t}. Each tp rank must keep its own part of the whole tensor"
    if dim is not None and sizes.tp > 1:
        return (
            "shards are drawn one by one, and perhaps initialised alike, from one seed. "
            "Draw the whole tensor from (seed, name), then cut it"
        )
    if config.zero and sizes.dp > 1:
        wrong = (ours.flatten() != sizes.local(specs[name], before[name], rank).flatten()).nonzero().flatten()
        if not ours.flatten()[wrong].any():
            return (
                f"it is 0 from element {int(wrong[0])} on. The shards of other data ranks are not gathered (`publish`)"
            )
        return (
            f"it is wrong from element {int(wrong[0])} on. The elements of a shard over dp are taken from a wrong place"
        )
    return "the numbers must be a function of (seed, name) and of nothing else"


# --- gradients --------------------------------------------------------------------------------------------------------


def gradient_findings(steps, one, specs, sizes):
    found = []
    for rank, step in enumerate(steps):
        for name, (begin, end, ours) in step.gradients.items():
            whole = one.gradients[name][2].view(specs[name].shape)
            theirs = sizes.local(specs[name], whole, rank).flatten()[begin:end]
            found.append(finding(name, rank, begin, ours, theirs, whole.abs().max().item()))
    return [f for f in found if f]


def gradient_idea(found, steps, shares, config, specs, sizes):
    """Name the idea behind these Findings. shares: {(data rank, micro-batch): {parameter: gradient}}."""
    wrong = {f.name for f in found}
    used = [name for name in specs if any(name in step.gradients for step in steps)]
    ratios = [f.ratio for f in found]
    constant = None not in ratios and max(ratios) - min(ratios) <= 1e-6 * max(map(abs, ratios), default=0) + 1e-12
    if constant and wrong == set(used):
        return f"All gradients have the ratio {ratios[0]:.6g} to the right ones. {scale_idea(ratios[0], sizes)}."
    for idea in (kinds_idea, added_shards_idea, missing_sum_idea, tied_idea, micro_batch_idea):
        text = idea(found, steps, shares, config, specs, sizes)
        if text:
            return text
    return where_idea(wrong, used, config)


def holders(steps, name):
    return [rank for rank, step in enumerate(steps) if name in step.gradients]


def kinds_idea(found, steps, shares, config, specs, sizes):
    """Find one ratio that only some parameters have."""
    wrong, ratios = {f.name for f in found}, {None if f.ratio is None else round(f.ratio, 6) for f in found}
    if len(ratios) != 1 or None in ratios:
        return ""
    r, replicated = ratios.pop(), {name for name, spec in specs.items() if spec.tp_dim is None}
    several = {n for n in specs if len({sizes.place(rank)[2] for rank in holders(steps, n)}) > 1}
    text = f"Only {kind_of(wrong, replicated, several, specs)} differ, by the ratio {written(r, sizes)}. "
    if wrong <= several and r > 1:
        return text + "Their gradient is summed over the holders twice: the tied table must be summed over them once."
    if wrong <= replicated and not config.sequence_parallel and sizes.tp > 1 and abs(r - sizes.tp) < 1e-6:
        return text + (
            "Replicated parameters are summed over tp. Without sequence parallelism each tp rank already has the whole "
            "gradient, so the sum counts it tp times."
        )
    if r == 0:
        return text + "Their gradient never arrives: it is dropped, or cleared before the reduction."
    return f"{text}{scale_idea(r, sizes)}."


def kind_of(wrong, replicated, several, specs):
    if wrong <= several:
        return "parameters that several pipeline ranks hold"
    if wrong <= replicated:
        return "parameters that are replicated over tp (LayerNorms, row-parallel biases, positions)"
    if all(len(specs[name].shape) > 1 for name in wrong):
        return "weight matrices"
    return f"{len(wrong)} of {len(specs)} parameters"


def missing_sum_idea(found, steps, shares, config, specs, sizes):
    """Find an axis over which the sum is the right gradient."""
    axes = {"tp": 1, "holders": 2}
    for axis, k in axes.items():
        fixed = [f for f in found if sum_is_right(f, steps, sizes, k)]
        if len(fixed) * 2 <= len(found):
            continue
        names = ", ".join(sorted({f.name for f in fixed})[:3])
        if axis == "tp" and config.sequence_parallel:
            return (
                f"Partial gradients of replicated parameters ({names} ...) are not summed over tp. Under sequence "
                "parallelism each tp rank sees its own tokens only, so each gradient is a part of the sum."
            )
        if axis == "tp":
            return f"The gradients of {names} are not summed over tp: the sum over the tp ranks would be right."
        return (
            f"The tied table ({names}) is not summed over its holders: the sum over the pipeline ranks would be right."
        )
    return ""


def added_shards_idea(found, steps, shares, config, specs, sizes):
    """Find shards over tp that were added to one another."""
    for f in found:
        dim = specs[f.name].tp_dim
        if dim is None or sizes.tp == 1 or f.end - f.begin != math.prod(specs[f.name].shape) // sizes.tp:
            continue
        parts = {g.rank: g.theirs for g in found if g.name == f.name}
        group = [rank for rank in parts if sizes.place(rank)[::2] == sizes.place(f.rank)[::2]]
        total = sum(parts[rank] for rank in group)
        if len(group) == sizes.tp and (f.ours - total).abs().max() <= 1e-8 * total.abs().max():
            return (
                f"The gradient of {f.name}, which is cut over tp, is summed over tp: shards of different elements are "
                "added. Only replicated parameters may be summed over tp."
            )
    return ""


def tied_idea(found, steps, shares, config, specs, sizes):
    """Recognise that only the word table is wrong: two units use it."""
    if {f.name.partition(".")[0] for f in found} != {"word"} or config.schedule.startswith("zb"):
        return ""
    return (
        "Only the word table differs. The head and the embedding both add to its gradient, which is complete after "
        "the embedding's backward. Its buffer is reduced before that, or changes while it is sent."
    )


def sum_is_right(f, steps, sizes, axis):
    """True if the sum over one axis, of the ranks with f's other numbers, is the right gradient."""
    here, total, count = sizes.place(f.rank), 0, 0
    for rank, step in enumerate(steps):
        place = sizes.place(rank)
        same = all(place[k] == here[k] for k in range(3) if k != axis)
        if same and f.name in step.gradients and step.gradients[f.name][:2] == (f.begin, f.end):
            total, count = total + step.gradients[f.name][2], count + 1
    return count > 1 and bool((total - f.theirs).abs().max() <= 1e-8 * f.theirs.abs().max())


def micro_batch_idea(found, steps, shares, config, specs, sizes):
    """Find how often each micro-batch counts in the gradient of the largest piece that differs."""
    f = max(found, key=lambda f: f.end - f.begin)
    if sizes.dp > 1 and torch.equal(shares[0, 0][f.name], shares[1, 0][f.name]):
        return "Data ranks 0 and 1 have the same gradient: every data rank reads the same samples."
    counts = times_counted(f, shares, specs, sizes)
    if counts is None:
        return ""
    matrices = all(len(specs[g.name].shape) > 1 for g in found) and config.schedule.startswith("zb")
    where = (
        " Only weight matrices differ, whose gradients W adds: a bucket must be reduced after its W."
        if matrices
        else ""
    )
    head = "    data rank \\ micro-batch" + "".join(f"{j:>7}" for j in range(sizes.m))
    rows = [f"{d:>27}" + "".join(f"{c:>7.3g}" for c in row) for d, row in enumerate(counts.tolist())]
    rows = "\n".join([head, *rows])
    text = f"How often each micro-batch counts in {f.name} of rank {sizes.name(f.rank)} (right: 1 each):\n{rows}\n"
    return text + pattern(counts, sizes.place(f.rank)[0]) + where


def times_counted(f, shares, specs, sizes):
    """Return [dp, m], rounded factors: f.ours is the sum of factor * micro-batch's gradient. None if it is not."""
    columns = []
    for share in shares.values():
        whole = share[f.name].view(specs[f.name].shape)
        columns.append(sizes.local(specs[f.name], whole, f.rank).flatten()[f.begin : f.end])
    columns = torch.stack(columns, 1)
    if len(columns) < 2 * len(shares) or not f.ours.isfinite().all():
        return None
    solved = torch.linalg.lstsq(columns, f.ours[:, None], driver="gelsd").solution
    if (columns @ solved - f.ours[:, None]).abs().max() > 1e-6 * f.ours.abs().max():
        return None
    counts = solved.view(sizes.dp, sizes.m).mul(1000).round().div(1000) + 0.0
    return None if not counts.any() or torch.equal(counts, torch.ones_like(counts)) else counts


def pattern(counts, mine):
    """Name the idea behind a matrix of factors. mine: the data rank whose gradient this is."""
    others = torch.cat([counts[:mine], counts[mine + 1 :]])
    last, several = counts[:, -1], counts.shape[1] > 1
    equal_rows = bool((counts == counts[0]).all())
    if len(others) and not others.any() and counts[mine].all():
        return "Only this rank's own micro-batches count: gradients are not reduced over the data ranks."
    if several and last.any() and not counts[:, :-1].any():
        return "Only the last micro-batch counts: gradients are overwritten instead of added."
    if not equal_rows and several and bool((others[:, 1:] == 0).all()) and bool((counts[:, 0] == 1).all()):
        return "Gradients are reduced after the first micro-batch: what comes later stays on its own data rank."
    if len(others) and not others.any():
        return "Micro-batches of the other data ranks are missing, and some of this rank's own."
    if several and equal_rows and counts[0, 0] > counts[0, -1] and counts.all():
        return "Earlier micro-batches count more: a sum over dp is reduced again with every micro-batch."
    if (counts > 1).any() and not (counts < 1).any():
        return "Some micro-batches count more than once: a gradient is reduced twice, or a buffer is not cleared."
    if not equal_rows and (counts[mine] == 1).all():
        return "Micro-batches of other data ranks are missing: the bucket is reduced before its gradient is complete."
    return "Some micro-batches are missing: a gradient is overwritten, dropped, or reduced before it is complete."


def where_idea(wrong, used, config):
    """Without a known pattern: name the first wrong gradient in the order of backward."""
    order = list(reversed(used))  # backward begins at the head; the word table comes last
    first = next(name for name in order if name in wrong)
    right = [name for name in order if name not in wrong]
    text = f"Backward runs from the head to the embedding. The first wrong gradient on this way is {first}'s"
    text += f"; {len(right)} of {len(order)} parameters are right, {right[0]} for one. " if right else ". "
    if config.recompute == "full" and config.dropout and not any(name.startswith("head") for name in wrong):
        return text + (
            "The head is right, so the first forward is right. With recomputation a block runs again before its "
            "backward: it must draw the same dropout masks, from the same rows and the same layer number."
        )
    if not right and config.pp > 1:
        return text + (
            "All differ, and there are pipeline stages. Is a message of another micro-batch received? Is a buffer "
            "freed or used again before its message has left? Does a stage count its layers from 0?"
        )
    return text + "Look at the layer there, and at the one after it, whose backward gives this one its gradient."


# --- loss, norm, update -----------------------------------------------------------------------------------------------


def scalar_difference(what, results, k, reference):
    """Describe the first loss or norm that differs; "" if all are equal."""
    for rank, result in enumerate(results):
        for step, (a, b) in enumerate(zip(result[k], reference[k], strict=True)):
            if not abs(a - b) <= TOLERANCE * abs(b):
                return f"the {what} of step {step + 1} on rank {rank} is {a:.12g} instead of {b:.12g}"
    return ""


def loss_idea(ours, theirs, sizes):
    r = ours / theirs
    names = expressions(r, sizes)
    ideas = {
        "tp": "Every tp rank has the same loss: only one of them may add it.",
        "m": "The logged loss is not divided by the number of micro-batches.",
        "dp": "The logged loss is not divided by the number of data ranks.",
        "m * dp": "The logged loss is divided neither by the number of micro-batches nor by the number of data ranks.",
        "1 / dp": "The logged loss is that of one data rank, or is divided by the number of data ranks twice.",
        "1 / pp": "The logged loss is divided by the number of stages, but only the last stage has one.",
        "0": "No rank adds its loss.",
    }
    found = [ideas[name] for name in names if name in ideas]
    return " Or: ".join(found) or "The gradients are right, so forward is: look at how the loss is summed for the log."


def norm_idea(steps, one, config, specs, sizes):
    """Compare the norm with the norms that usual mistakes give. The right gradients are known."""
    squares = {name: values.double().pow(2).sum().item() for name, (_, _, values) in one.gradients.items()}
    total = sum(squares.values())
    rep = sum(squares[name] for name, spec in specs.items() if spec.tp_dim is None)
    held = {name: len({sizes.place(rank)[2] for rank in holders(steps, name)}) for name in specs}
    twice = sum(squares[name] * (held[name] - 1) for name in specs)
    ideas = {
        "parameters that are replicated over tp count on every tp rank": total + (sizes.tp - 1) * rep,
        "each data rank counts all elements, which every data rank has": sizes.dp * total,
        "a bucket with several holders counts once per holder": total + twice,
        "elements that are cut over tp count on tp rank 0 only": rep + (total - rep) / sizes.tp,
        "every tp rank counts everything that it has": total + (sizes.tp - 1) * rep + twice,
    }
    for d in range(sizes.dp):
        for weight, kept in (("", [1, 1]), (" and every tp rank's copies", [1, sizes.tp])):
            mine = shard_squares(steps, specs, sizes, d, kept)
            ideas[f"only the shards of data rank {d}{weight} count"] = mine
    ours = steps[0].norm ** 2
    for idea, square in ideas.items():
        if abs(square - total) > 1e-9 * total and abs(ours - square) <= 1e-8 * square:
            return f"It is the norm if {idea}. Each element of the model must count once."
    return (
        f"Its ratio is {written(steps[0].norm / one.norm, sizes)}. Each element of the model must count once, "
        "even if tp, dp or several holders copy it, or cut it into shards."
    )


def shard_squares(steps, specs, sizes, data_rank, weights):
    """Return the squared norm of one data rank's elements. weights: of cut and of replicated parameters."""
    square = 0.0
    for rank, step in enumerate(steps):
        d, t, pp = sizes.place(rank)
        for name, (_, _, values) in step.gradients.items():
            first = pp == min(sizes.place(other)[2] for other in holders(steps, name))
            copy = specs[name].tp_dim is None
            if d == data_rank and first and not (copy and t):
                square += weights[copy] * values.double().pow(2).sum().item()
    return square


def update_idea(found, steps, reference_before, config, specs, sizes):
    """Name the idea if gradients and norm are right, but not the parameters after the update."""
    f = max(found, key=lambda f: f.relative)
    still = [g for g in found if unchanged(g, reference_before, specs, sizes)]
    if still:
        g = still[0]
        return (
            f"Elements of {g.name} on rank {sizes.name(g.rank)} still have their initial values. Another data rank "
            "owns and has updated them: new parameters are not gathered (ZeRO stages 1 and 2: `publish`)."
        )
    text = "The gradients and the norm are right, so the update itself is wrong. "
    if config.optimizer in ("lamb", "lars"):
        parts = ["of a shard over dp"] * (config.zero > 0) + ["of a part over tp"] * (sizes.tp > 1)
        return text + (
            f"{config.optimizer} needs the norms of whole tensors. "
            f"The norm {' or '.join(parts) or 'of another tensor'} gives {f.name} a wrong rate."
        )
    return (
        text + "Look at what is elementwise in it: learning rate, clipping, weight decay by ranges, moments of shards."
    )


def unchanged(f, before, specs, sizes):
    """True if elements of a wrong piece still have their initial values, but those of one process have changed."""
    old = sizes.local(specs[f.name], before[f.name], f.rank).flatten()
    return bool(((f.ours == old) & (f.theirs != old)).any())


def after_difference(results, reference, specs, sizes):
    """Return (Findings of the parameters after the run, a sentence about copies that differ or "")."""
    found, first, copies = [], {}, ""
    for rank, result in enumerate(results):
        for name, ours in result.items():
            size = max(1.0, reference[name].abs().max().item())
            found.append(finding(name, rank, 0, ours, sizes.local(specs[name], reference[name], rank), size))
            other, copy = first.setdefault(
                (name, None if specs[name].tp_dim is None else rank % sizes.tp), (rank, ours)
            )
            if not copies and not torch.equal(copy, ours):
                copies = f"Ranks {sizes.name(other)} and {sizes.name(rank)} have copies of {name} that are not equal."
    missing = [name for name in specs if not any(name in result for result in results)]
    return [f for f in found if f], f"No rank has {missing[0]}." if missing else copies


# --- all together -----------------------------------------------------------------------------------------------------


def differences(results, reference, config, specs, first_step=None):
    """Return a message if a layout's run is not that of one process, else "".

    results: of each rank (losses, gradient norms, initial parameters, parameters after); reference: of one process.
    first_step: a function that runs the first step again: ([FirstStep of each rank], that of one process, shares as in
    `gradient_idea`). It is called only after a difference.
    """
    sizes = Sizes.of(config, len(results))
    initial = initial_difference(results, reference, config, specs, sizes)
    loss = scalar_difference("loss", results, 0, reference)
    norm = scalar_difference("gradient norm", results, 1, reference)
    found, copies = after_difference([r[3] for r in results], reference[3], specs, sizes)
    if not (initial or loss or norm or found or copies):
        return ""
    lines = [title(config, sizes)]
    if initial:
        return "\n".join([*lines, "First difference: initial parameters.", initial])
    if first_step:
        lines += diagnosis(*first_step(), reference, config, specs, sizes)
    elif (loss or norm) and not any("step 1 " in text for text in (loss, norm)):
        lines.append(LATER)
    if not first_step or LATER in lines:
        lines += [f"In the whole run: {text}." for text in (loss, norm) if text]
        lines += ["Parameters after the run:", copies, table(found, specs, sizes)] if found or copies else []
    return "\n".join(filter(None, lines))


def title(config, sizes):
    extra = [name for name, on in [("sequence parallel", config.sequence_parallel), ("dropout", config.dropout)] if on]
    extra += [f"recompute={config.recompute}"] if config.recompute != "none" else []
    parts = (
        f"dp={sizes.dp} tp={sizes.tp} pp={sizes.pp} {config.schedule} m={sizes.m} zero={config.zero} {config.optimizer}"
    )
    return f"{', '.join([parts, *extra])}: this layout does not train the model of one process."


def diagnosis(steps, one, shares, reference, config, specs, sizes):
    """Return lines about the first difference in the first step."""
    loss = next((s.loss for s in steps if not abs(s.loss - one.loss) <= TOLERANCE * abs(one.loss)), None)
    also = "Initial parameters are equal."
    if loss is not None:
        also += (
            f" The loss of step 1 is {loss:.12g} instead of {one.loss:.12g}: ratio {written(loss / one.loss, sizes)}."
        )
    found = gradient_findings(steps, one, specs, sizes)
    if found:
        idea = gradient_idea(found, steps, shares, config, specs, sizes)
        count = len({f.name for f in found})
        head = f"First difference: gradients of step 1, in {count} of {len(specs)} parameters."
        forward = forward_idea(loss, one, found, config, sizes)
        return [head, also, table(found, specs, sizes), f"This usually means: {idea}", *forward]
    if loss is not None:
        return [f"First difference: the loss of step 1. Gradients are equal. {also}", loss_idea(loss, one.loss, sizes)]
    if any(not abs(step.norm - one.norm) <= TOLERANCE * one.norm for step in steps):
        text = f"First difference: the gradient norm of step 1, {steps[0].norm:.12g} instead of {one.norm:.12g}."
        return [f"{text} The gradients are equal.", norm_idea(steps, one, config, specs, sizes)]
    found, copies = after_difference([step.after for step in steps], one.after, specs, sizes)
    if found:
        text = "First difference: parameters after step 1. Gradients, loss and norm of step 1 are equal."
        return [text, table(found, specs, sizes), update_idea(found, steps, reference[2], config, specs, sizes)]
    if copies:
        return [f"First difference: copies of a parameter after step 1. {copies}", COPIES]
    return [LATER]


def forward_idea(loss, one, found, config, sizes):
    """Return one more line if the loss shows that forward is wrong already."""
    if loss is None or (expressions(loss / one.loss, sizes) and None not in {f.ratio for f in found}):
        return []
    parts = []
    if config.sequence_parallel:
        parts.append("each tp rank has its own rows (their positions, their dropout masks)")
    if config.tp > 1:
        parts.append("the vocabulary is cut over tp (targets, padding, the maximum and the sum of the softmax)")
    if config.pp > 1:
        parts.append(
            "messages of other micro-batches, buffers that change while they are sent, layers counted per stage"
        )
    return (
        [f"The loss of step 1 differs too, so forward is wrong already. Look at: {'; '.join(parts)}."] if parts else []
    )


# --- one tensor -------------------------------------------------------------------------------------------------------


def same_tensor(what, ours, theirs, instead=None, tolerance=1e-12):
    """Raise Different unless two tensors are equal, with what `ours` is instead, if that can be recognised.

    what: "dx of rank 0"; instead: {"its own share, not the sum over tp": the tensor that this would be}.
    """
    if ours.shape != theirs.shape:
        raise Different(f"{what} has shape {list(ours.shape)} instead of {list(theirs.shape)}")
    if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
        return
    for name, other in (instead or {}).items():
        if other.shape == ours.shape and torch.allclose(ours, other, rtol=1e-9, atol=1e-9):
            raise Different(f"{what} is {name}")
    if not ours.any():
        raise Different(f"{what} is 0 everywhere: nothing was added to it")
    distance = (ours - theirs).abs()
    r = ratio(ours.detach().double(), theirs.detach().double())
    if r is not None:
        raise Different(f"{what} is {r:.6g} times what it should be")
    at = [int(i) for i in torch.unravel_index(distance.argmax(), distance.shape)]
    wrong = int((distance > tolerance * (1 + theirs.abs())).sum())
    numbers = f"at {at} {ours[tuple(at)].item():.12g} instead of {theirs[tuple(at)].item():.12g}"
    raise Different(f"{what} is wrong in {wrong} of {ours.numel()} elements, most {numbers}")
