"""Compare a layout's run with a run on one process, and name the usual cause of a difference.

The order is: initial parameters, gradients of the first step, loss, gradient norm, parameters. A message describes the
first of these that differs. The comparison is cheap while all numbers are equal. Only after a difference the first step
runs again, and its gradients are compared, parameter by parameter. Here `ours` is the layout's number and `theirs` the
number of one process. `gradient_cause` tries in this order:

    ratio          ours = r * theirs. example: r = 8 = m * dp: the loss is not divided by m * dp
    sums           ours, summed over an axis, is theirs: this sum is missing
    micro-batches  ours is a weighted sum of single micro-batches' gradients; least squares finds the weights
    where          the first parameter, in the order of backward, that is wrong
"""

import itertools
import math
from typing import NamedTuple

import torch

TOLERANCE = 1e-10  # relative: float64 rounds at 1e-16, and eight steps add up
EPSILON = torch.finfo(torch.float64).eps
ROWS = 8  # of a table
LATER = "Step 1 is right. Does a step leave something in a buffer? Do ranks draw different numbers of micro-batches?"


class Different(AssertionError):
    """A comparison failed. Its message is complete: no traceback is needed."""


class FirstStep(NamedTuple):
    """The first step of one rank."""

    loss: float
    norm: float
    gradients: dict  # {parameter: (begin, end, values)}: the elements of its slice over tp that this rank updates
    after: dict  # {parameter: this rank's slice over tp, after the update}


class Sizes(NamedTuple):
    """The sizes of a layout. The methods compute the place of a rank in it, as `mesh.py` does."""

    dp: int
    tp: int
    pp: int
    m: int

    def place(self, rank):
        """Return (dp, tp, pp), the rank's number on each axis."""
        return rank // (self.tp * self.pp), rank % self.tp, rank // self.tp % self.pp

    def name(self, rank):
        """Return the rank and its place on the axes with several ranks: `3 (dp=1 tp=1)`."""
        parts = [f"{axis}={i}" for axis, i, n in zip(self._fields, self.place(rank), self, strict=False) if n > 1]
        return f"{rank} ({' '.join(parts)})" if parts else f"{rank}"


class Case(NamedTuple):
    """A layout. After a difference also its first step, and the first step of one process."""

    config: object
    specs: dict  # {parameter: ParamSpec}
    sizes: Sizes
    steps: list = ()  # [FirstStep of each rank]
    one: FirstStep | None = None  # of one process
    shares: dict | None = None  # {(data rank, micro-batch): {parameter: gradient}}, computed by one process

    def local(self, name, whole, rank):
        """Return a rank's slice, over tp, of a whole parameter."""
        dim = self.specs[name].tp_dim
        return whole if dim is None else whole.chunk(self.sizes.tp, dim)[rank % self.sizes.tp]

    def cut(self, name):
        return self.specs[name].tp_dim is not None and self.sizes.tp > 1

    def holders(self, name):
        """Return the pipeline ranks that hold a parameter."""
        return {self.sizes.place(rank)[2] for rank, step in enumerate(self.steps) if name in step.gradients}

    def all_matrices(self, names):
        return all(self.specs[name].decay for name in names)  # weight decay applies to matrices only


# --- ratios -----------------------------------------------------------------------------------------------------------

LOSS_CAUSES = {  # {ratio of all gradients to the right ones: its cause}
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
}


def ratio(ours, theirs):
    """Return r with ours = r * theirs, or None if there is no such number."""
    square = (theirs * theirs).sum().item()
    if square == 0:
        return None
    r = (ours * theirs).sum().item() / square
    return r if (ours - r * theirs).abs().max() <= 1e-7 * max(abs(r), 1e-3) * theirs.abs().max() else None


def expressions(r, sizes):
    """Return the shortest expressions in m, dp, tp and pp whose value is r: factors that are missing, or extra."""
    if abs(r) < 1e-9:
        return ["0"]
    axes = {axis: getattr(sizes, axis) for axis in ("m", "dp", "tp", "pp") if getattr(sizes, axis) > 1}
    chosen = [axes_of for count in (1, 2, 3) for axes_of in itertools.combinations(axes, count)]
    values = {" * ".join(names): math.prod(axes[name] for name in names) for names in chosen}
    values |= {f"1 / ({name})" if "*" in name else f"1 / {name}": 1 / value for name, value in values.items()}
    values |= {f"{a} / {b}": axes[a] / axes[b] for a, b in itertools.permutations(axes, 2)}
    found = [name for name, value in values.items() if math.isclose(r, value, rel_tol=1e-6)]
    return [name for name in found if len(name.split()) == min(len(other.split()) for other in found)]


def written(r, sizes):
    """Return a ratio and its expressions as text: `8 = m * dp`."""
    if r is None:
        return "not constant"
    return " = ".join([f"{r:.6g}", *(name for name in expressions(r, sizes) if name != "0")])


def scale_cause(r, sizes):
    """Name the usual cause of this ratio of gradients."""
    causes = [f"{name}: {LOSS_CAUSES[name]}" for name in expressions(r, sizes) if name in LOSS_CAUSES]
    return "; or ".join(causes) or "Look where the loss and its gradient are scaled"


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
    """Return a Finding if two tensors differ, otherwise None. size: the largest element of the whole parameter."""
    ours, theirs = ours.flatten(), theirs.flatten()
    distance = (ours - theirs).abs().max().item() if ours.numel() else 0.0
    if distance <= TOLERANCE * size:
        return None
    relative = distance / size if size else math.inf
    return Finding(name, rank, begin, begin + len(ours), ours, theirs, relative, ratio(ours, theirs))


def table(findings, case):
    """Return a table of the worst Finding of each parameter, the largest difference first."""
    worst = {}
    for f in sorted(findings, key=lambda f: -math.inf if math.isnan(f.relative) else -f.relative):
        worst.setdefault(f.name, f)
    lines = [
        "    parameter            cut along  rank               elements    relative  ulps   ratio to one process's"
    ]
    for f in list(worst.values())[:ROWS]:
        cut = f"dim {case.specs[f.name].tp_dim}" if case.cut(f.name) else "-"
        line = f"    {f.name:<20} {cut:<10} {case.sizes.name(f.rank):<18} {f'{f.begin}..{f.end}':<11} "
        lines.append(f"{line}{f.relative:<9.1e} {f.relative / EPSILON:<6.0e} {written(f.ratio, case.sizes)}")
    more = [f"    and {len(worst) - ROWS} more"] if len(worst) > ROWS else []
    return "\n".join(lines + more) if worst else ""


# --- initial parameters -----------------------------------------------------------------------------------------------


def initial_difference(results, before, case):
    """Describe the first initial parameter that is not equal bit for bit to `before`; "" if all are equal."""
    for rank, result in enumerate(results):
        for name, ours in result[2].items():
            theirs = case.local(name, before[name], rank)
            if not torch.equal(ours, theirs):
                cause = initial_cause(name, ours, theirs, before[name], case)
                return f"The initial {name} of rank {case.sizes.name(rank)} differs: {cause}."
    missing = [name for name in case.specs if not any(name in result[2] for result in results)]
    return f"No rank has {missing[0]}." if missing else ""


def initial_cause(name, ours, theirs, whole, case):
    """Describe wrong initial values: of another slice, from a wrong place, or drawn slice by slice."""
    for t in range(case.sizes.tp if case.cut(name) else 0):
        if torch.equal(ours, case.local(name, whole, t)):
            return f"it is the slice of tp rank {t}. Each tp rank must keep its own slice of the whole tensor"
    wrong = (ours != theirs).flatten().nonzero().flatten()
    if case.config.zero and case.sizes.dp > 1 and len(wrong) < ours.numel():
        zeros = not ours.flatten()[wrong].any()
        kind = "0" if zeros else "wrong"
        first = f"{len(wrong)} of {ours.numel()} elements are {kind}, the first is element {int(wrong[0])}. "
        if zeros:
            return first + "The shards of other data ranks are not gathered (`publish`)"
        return first + "The elements of a shard over dp are taken from a wrong place"
    if case.cut(name):
        return "is each slice over tp drawn separately? Draw the whole tensor from (seed, name), then cut it"
    return "the numbers must be a function of (seed, name) and of nothing else"


# --- gradients --------------------------------------------------------------------------------------------------------


def gradient_findings(case):
    """Return the Findings of all gradients that differ from those of one process."""
    found = []
    for rank, step in enumerate(case.steps):
        for name, (begin, end, ours) in step.gradients.items():
            whole = case.one.gradients[name][2].view(case.specs[name].shape)
            theirs = case.local(name, whole, rank).flatten()[begin:end]
            found.append(finding(name, rank, begin, ours, theirs, whole.abs().max().item()))
    return [f for f in found if f]


def gradient_cause(found, case):
    """Name the usual cause of these Findings."""
    tried = ratio_cause, added_slices_cause, missing_sum_cause, tied_cause, micro_batch_cause, where_cause
    return next(filter(None, (cause(found, case) for cause in tried)))


def shown(names):
    """Return text: three names at most, and how many more follow."""
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def ratio_cause(found, case):
    """Find a ratio that all wrong gradients share."""
    wrong, ratios, sizes = {f.name for f in found}, [f.ratio for f in found], case.sizes
    if None in ratios or max(ratios) - min(ratios) > 1e-6 * max(map(abs, ratios)) + 1e-12:
        return ""
    r = ratios[0]
    if wrong == set(case.specs):
        return f"All gradients have the ratio {r:.6g} to the right ones. {scale_cause(r, sizes)}."
    names = "weight matrices" if len(wrong) > 1 and case.all_matrices(wrong) else shown(wrong)
    text = f"Only these parameters differ, by the ratio {written(r, sizes)}: {names}. "
    if r > 1.5 and all(abs(r - len(case.holders(name))) < 1e-6 for name in wrong):
        return text + "Their gradient is summed over the holders twice."
    replicated = not any(case.cut(name) for name in wrong)
    if replicated and not case.config.sequence_parallel and sizes.tp > 1 and abs(r - sizes.tp) < 1e-6:
        return text + (
            "Replicated parameters are summed over tp. Without sequence parallelism each tp rank already has the whole "
            "gradient, so the sum counts it tp times."
        )
    if abs(r) < 1e-9:
        return text + "Their gradient never arrives: it is dropped, or cleared before the reduction."
    return f"{text}{scale_cause(r, sizes)}."


def missing_sum_cause(found, case):
    """Find an axis over which the sum is the right gradient."""
    for axis, ranks in ((1, "the tp ranks"), (2, "the holders")):
        fixed = [f for f in found if sum_is_right(f, case, axis)]
        if len(fixed) * 2 > len(found):
            names = shown({f.name for f in fixed})
            text = f"Partial gradients are not summed over {ranks}. The sum is right for {names}."
            own = " Under sequence parallelism each tp rank has its own tokens only."
            return text + own * (axis == 1 and case.config.sequence_parallel)
    return ""


def neighbours(rank, case, axis):
    """Return the ranks that differ from `rank` in one axis of `Sizes.place` only, with the rank itself."""
    places = [list(case.sizes.place(other)) for other in range(len(case.steps))]
    for place in places:
        del place[axis]
    return [other for other, place in enumerate(places) if place == places[rank]]


def sum_is_right(f, case, axis):
    """True if the right gradient is the sum over the ranks of an axis."""
    held = [case.steps[rank].gradients.get(f.name) for rank in neighbours(f.rank, case, axis)]
    parts = [values for begin, end, values in filter(None, held) if (begin, end) == (f.begin, f.end)]
    return len(parts) > 1 and bool((sum(parts) - f.theirs).abs().max() <= 1e-8 * f.theirs.abs().max())


def added_slices_cause(found, case):
    """Find slices over tp that are added to one another."""
    for f in found:
        if not case.cut(f.name) or f.end - f.begin != math.prod(case.specs[f.name].shape) // case.sizes.tp:
            continue
        group = neighbours(f.rank, case, 1)
        parts = [g.theirs for g in found if g.name == f.name and g.rank in group]
        if len(parts) == len(group) and (f.ours - sum(parts)).abs().max() <= 1e-8 * sum(parts).abs().max():
            return (
                f"The gradient of {f.name}, which is cut over tp, is summed over tp: slices of different elements are "
                "added. Only replicated parameters may be summed over tp."
            )
    return ""


def tied_cause(found, case):
    """See if only the word table is wrong. The embedding and the head both use it."""
    if {f.name.partition(".")[0] for f in found} != {"word"} or case.config.schedule.startswith("zb"):
        return ""
    return (
        "Only the word table differs. The head and the embedding both add to its gradient, which is complete after "
        "the embedding's backward. Its buffer is reduced before that, or changes while it is sent."
    )


def micro_batch_cause(found, case):
    """Find how often each micro-batch counts in the gradient of the largest piece that differs."""
    f, shares = max(found, key=lambda f: f.end - f.begin), case.shares
    if case.sizes.dp > 1 and torch.equal(shares[0, 0][f.name], shares[1, 0][f.name]):
        return "Data ranks 0 and 1 have the same gradient: they read the same samples."
    counts = times_counted(f, case)
    if counts is None:
        return ""
    head = "    data rank \\ micro-batch" + "".join(f"{j:>7}" for j in range(case.sizes.m))
    rows = [f"{d:>27}" + "".join(f"{c:>7.3g}" for c in row) for d, row in enumerate(counts.tolist())]
    title = f"How often each micro-batch counts in {f.name} of rank {case.sizes.name(f.rank)} (right: 1 each):"
    text = "\n".join([title, head, *rows, pattern(counts, case.sizes.place(f.rank)[0])])
    if case.config.schedule.startswith("zb") and case.all_matrices({g.name for g in found}):
        text += " Only weight matrices differ. W adds their gradients, so a bucket must be reduced after its W."
    return text


def times_counted(f, case):
    """Fit f.ours by a sum of factor * gradient over the micro-batches. Return the rounded factors, [dp, m].

    Return None if no factors fit, or if all are 0 or all are 1.
    """
    wholes = [share[f.name].view(case.specs[f.name].shape) for share in case.shares.values()]
    columns = torch.stack([case.local(f.name, whole, f.rank).flatten()[f.begin : f.end] for whole in wholes], 1)
    if len(columns) < 2 * len(wholes) or not f.ours.isfinite().all():
        return None
    solved = torch.linalg.lstsq(columns, f.ours[:, None], driver="gelsd").solution
    if (columns @ solved - f.ours[:, None]).abs().max() > 1e-6 * f.ours.abs().max():
        return None
    counts = solved.view(case.sizes.dp, case.sizes.m).mul(1000).round().div(1000) + 0.0
    return None if not counts.any() or torch.equal(counts, torch.ones_like(counts)) else counts


def pattern(counts, mine):
    """Name the usual cause of a matrix of factors. mine: the data rank whose gradient this is."""
    others = torch.cat([counts[:mine], counts[mine + 1 :]])
    equal_rows = bool((counts == counts[0]).all())
    if len(others) and not others.any() and counts[mine].all():
        return "Only this rank's own micro-batches count: gradients are not reduced over the data ranks."
    if counts.shape[1] > 1 and not counts[:, :-1].any():
        return "Only the last micro-batch counts: gradients are overwritten instead of added."
    if not equal_rows and not others[:, 1:].any() and (counts[:, 0] == 1).all():
        return "Gradients are reduced after the first micro-batch: later ones stay on their own data rank."
    if len(others) and equal_rows and counts[0, 0] > counts[0, -1] and counts.all():
        return "Earlier micro-batches count more: a sum over dp is reduced again with every micro-batch."
    if not (counts < 1).any():
        return "Some micro-batches count more than once: a gradient is reduced twice, or a buffer is not cleared."
    if (counts[mine] == 1).all():
        return "Only other data ranks' micro-batches are wrong: the bucket is reduced before its gradient is complete."
    return "Some micro-batches count too little: a gradient is overwritten, dropped, or reduced before it is complete."


def where_cause(found, case):
    """Name the first wrong gradient in the order of backward. This is the last cause tried."""
    wrong, order = {f.name for f in found}, list(reversed(case.specs))  # backward ends at the word table
    first = next(name for name in order if name in wrong)
    right = [name for name in order if name not in wrong]
    text = f"Backward runs from the head to the embedding. The first wrong gradient on this way is {first}'s. "
    text += f"{len(right)} of {len(order)} parameters are right, for example {right[0]}. " if right else ""
    if case.config.recompute == "full" and case.config.dropout and not any(name.startswith("head") for name in wrong):
        return text + (
            "The head is right, so the first forward is right. With recomputation a block runs again before its "
            "backward: it must draw the same dropout masks, from the same rows and the same layer number."
        )
    if not right and case.config.pp > 1:
        return text + (
            "All differ, and there are pipeline stages. Is a message of another micro-batch received? Is a buffer "
            "freed or used again before its message has left? Does a stage count its layers from 0?"
        )
    return text + "Look at this layer, and at the next one in forward: its backward gives this layer's dy."


def forward_cause(loss, found, config):
    """Return one more line if the loss shows that the data or the forward pass is wrong."""
    if loss is None or None not in {f.ratio for f in found}:  # all have a ratio: only scales differ
        return []
    places = [
        (True, "the samples that each rank draws"),
        (config.sequence_parallel, "the rows of each tp rank (their positions, their dropout masks)"),
        (config.tp > 1, "the vocabulary cut over tp (targets, padding, the maximum and the sum of the softmax)"),
        (config.pp > 1, "messages of other micro-batches, buffers that change while they are sent"),
        (config.pp > 1, "layers counted per stage"),
    ]
    look = "; ".join(text for there, text in places if there)
    return [f"The loss of step 1 differs too, so the data or the forward pass is wrong. Look at: {look}."]


# --- loss, norm, update -----------------------------------------------------------------------------------------------


def unequal(ours, theirs):
    """Return the first of the numbers `ours` that is not `theirs`, or None."""
    return next((x for x in ours if not abs(x - theirs) <= TOLERANCE * abs(theirs)), None)


def scalar_difference(what, results, k, reference):
    """Describe the first loss or norm that differs; "" if all are equal."""
    for rank, result in enumerate(results):
        for step, (a, b) in enumerate(zip(result[k], reference[k], strict=True)):
            if unequal([a], b) is not None:
                return f"the {what} of step {step + 1} on rank {rank} is {a:.12g} instead of {b:.12g}"
    return ""


def loss_cause(r, sizes):
    """Name the usual cause of a ratio of logged losses. The gradients are right."""
    if expressions(r, sizes) == ["tp"]:
        return "Every tp rank has the same loss: only one of them may add it."
    return "The gradients are right, so the forward pass is right too. Look at how the loss is summed for the log."


def norm_cause(norm, case):
    """Compare a wrong norm with the norms that usual mistakes give. The gradients are right."""
    squares, sizes = (
        {name: values.square().sum().item() for name, (_, _, values) in case.one.gradients.items()},
        case.sizes,
    )
    total = sum(squares.values())
    replicated = sum(square for name, square in squares.items() if case.specs[name].tp_dim is None)
    causes = {
        "parameters that are replicated over tp count on every tp rank": total + (sizes.tp - 1) * replicated,
        "each data rank counts all elements": sizes.dp * total,
        "a bucket with several holders counts once per holder": sum(
            square * len(case.holders(name)) for name, square in squares.items()
        ),
    }
    causes |= {f"only the shards of data rank {d} count": shard_squares(case, d) for d in range(sizes.dp)}
    for cause, square in causes.items():
        if abs(square - total) > 1e-9 * total and abs(norm**2 - square) <= 1e-8 * square:
            return f"It is the norm if {cause}. Each element of the model must count once."
    return (
        f"Its ratio is {written(norm / case.one.norm, sizes)}. Each element of the model must count once, "
        "even if tp, dp or several holders copy it, or cut it into shards."
    )


def shard_squares(case, data_rank):
    """Return the squared norm of the elements that one data rank updates. Each element counts once."""
    square = 0.0
    for rank, step in enumerate(case.steps):
        d, t, pp = case.sizes.place(rank)
        for name, (_, _, values) in step.gradients.items():
            if d == data_rank and pp == min(case.holders(name)) and (t == 0 or case.cut(name)):
                square += values.square().sum().item()
    return square


def update_cause(found, before, case):
    """Name the usual cause if gradients and norm are right, but not the parameters after the update."""
    for f in found if case.config.zero and case.sizes.dp > 1 else []:
        old = case.local(f.name, before[f.name], f.rank).flatten()
        if ((f.ours == old) & (f.theirs != old)).any():
            return (
                f"Elements of {f.name} on rank {case.sizes.name(f.rank)} still have their initial values. Another data "
                "rank owns and has updated them: new parameters are not gathered (ZeRO stages 1 and 2: `publish`)."
            )
    text = "The gradients and the norm are right, so the update itself is wrong. "
    parts = ["a shard over dp"] * (case.config.zero > 0) + ["a slice over tp"] * (case.sizes.tp > 1)
    if case.config.optimizer in ("lamb", "lars") and parts:
        return text + (
            f"{case.config.optimizer} needs the norms of whole tensors. "
            f"Is a rate computed from the norm of {' or of '.join(parts)}?"
        )
    return text + "Look at the learning rate, clipping, the ranges of weight decay, and the moments of shards."


def after_difference(results, reference, case):
    """Return (Findings of the parameters after the run, a sentence about unequal copies or "")."""
    found, first, copies = [], {}, ""
    for rank, result in enumerate(results):
        for name, ours in result.items():
            size = max(1.0, reference[name].abs().max().item())
            found.append(finding(name, rank, 0, ours, case.local(name, reference[name], rank), size))
            other, copy = first.setdefault((name, case.cut(name) and rank % case.sizes.tp), (rank, ours))
            if not copies and not torch.equal(copy, ours):
                names = f"{case.sizes.name(other)} and {case.sizes.name(rank)}"
                copies = f"Ranks {names} have copies of {name} that are not equal."
    return [f for f in found if f], copies


# --- all together -----------------------------------------------------------------------------------------------------


def differences(results, reference, config, specs, first_step=None):
    """Return a message if a layout's run is not that of one process, otherwise "".

    results: (losses, gradient norms, initial parameters, parameters after) of each rank. reference: the same of one
    process. first_step: a function that runs the first step again. It is called only after a difference, and returns
    ([FirstStep of each rank], the FirstStep of one process, shares as in `Case`).
    """
    dp = len(results) // (config.tp * config.pp)
    sizes = Sizes(dp, config.tp, config.pp, config.global_batch_size // (config.micro_batch_size * dp))
    case = Case(config, specs, sizes)
    initial = initial_difference(results, reference[2], case)
    whole_run = (
        scalar_difference("loss", results, 0, reference),
        scalar_difference("gradient norm", results, 1, reference),
    )
    found, copies = after_difference([r[3] for r in results], reference[3], case)
    if not (initial or any(whole_run) or found or copies):
        return ""
    if initial:
        return "\n".join([title(case), "First difference: initial parameters.", initial])
    lines = [title(case)]
    if first_step:
        lines += diagnosis(reference[2], Case(config, specs, sizes, *first_step()))
    elif any(whole_run) and not any("step 1 " in text for text in whole_run):
        lines.append(LATER)
    if not first_step or LATER in lines:
        lines += [f"In the whole run: {text}." for text in whole_run if text]
        lines += ["Parameters after the run:", copies, table(found, case)] if found or copies else []
    return "\n".join(filter(None, lines))


def title(case):
    c, sizes = case.config, case.sizes
    parts = [f"dp={sizes.dp} tp={sizes.tp} pp={sizes.pp} {c.schedule} m={sizes.m} zero={c.zero} {c.optimizer}"]
    parts += [name for name, on in [("sequence parallel", c.sequence_parallel), ("dropout", c.dropout)] if on]
    parts += [f"recompute={c.recompute}"] if c.recompute != "none" else []
    return f"{', '.join(parts)}: this layout does not train the model of one process."


def diagnosis(before, case):
    """Return lines about the first difference in the first step. before: the initial parameters of one process."""
    one, sizes = case.one, case.sizes
    loss, norm = unequal([s.loss for s in case.steps], one.loss), unequal([s.norm for s in case.steps], one.norm)
    also = "Initial parameters are equal."
    if loss is not None:
        ratio_of_losses = written(loss / one.loss, sizes)
        also += f" The loss of step 1 is {loss:.12g} instead of {one.loss:.12g}: ratio {ratio_of_losses}."
    if found := gradient_findings(case):
        count = len({f.name for f in found})
        head = f"First difference: gradients of step 1, in {count} of {len(case.specs)} parameters."
        lines = [head, also, table(found, case), f"This usually means: {gradient_cause(found, case)}"]
        return lines + forward_cause(loss, found, case.config)
    if loss is not None:
        text = f"First difference: the loss of step 1. Gradients are equal. {also}"
        return [text, loss_cause(loss / one.loss, sizes)]
    if norm is not None:
        text = f"First difference: the gradient norm of step 1, {norm:.12g} instead of {one.norm:.12g}."
        return [f"{text} The gradients are equal.", norm_cause(norm, case)]
    found, copies = after_difference([step.after for step in case.steps], one.after, case)
    if found:
        text = "First difference: parameters after step 1. Gradients, loss and norm of step 1 are equal."
        return [text, table(found, case), update_cause(found, before, case)]
    if copies:
        text = "Each copy must be made by the same sums in the same order, or come from one rank."
        return [f"First difference: copies of a parameter after step 1. {copies}", text]
    return [LATER]


# --- one tensor -------------------------------------------------------------------------------------------------------


def same_tensor(what, ours, theirs, instead=None, tolerance=1e-12):
    """Raise Different unless two tensors are equal. Its message says what `ours` is instead, if it is recognised.

    what: "dx of rank 0"; instead: {"its own share, not the sum over tp": the tensor that `ours` would be}.
    """
    if ours.shape != theirs.shape:
        raise Different(f"{what} has shape {list(ours.shape)} instead of {list(theirs.shape)}")
    if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
        return
    for name, other in (instead or {}).items():
        if other.shape == ours.shape and torch.allclose(ours, other, rtol=1e-9, atol=1e-9):
            raise Different(f"{what} is {name}")
    r = ratio(ours.detach().double(), theirs.detach().double())
    if r is not None:
        raise Different(f"{what} is {r:.6g} times what it should be")
    distance = (ours - theirs).abs()
    at = [int(i) for i in torch.unravel_index(distance.argmax(), distance.shape)]
    wrong = int((distance > tolerance * (1 + theirs.abs())).sum())
    numbers = f"at {at} {ours[tuple(at)].item():.12g} instead of {theirs[tuple(at)].item():.12g}"
    raise Different(f"{what} differs in {wrong} of {ours.numel()} elements, worst {numbers}")
