"""Compare a layout's run with a run on one process, and name the usual cause of a difference.

A message describes the first of these that differs: initial parameters, gradients of the first step, loss, gradient
norm, parameters. Only after a difference the first step runs again, for its gradients. `ours` is the layout's number,
`theirs` that of one process. `gradient_cause` tries, with others, in this order:

    ratio          ours = r * theirs. example: r = 8 = m * dp: the loss is not divided by m * dp
    sums           ours, summed over an axis, is theirs: this sum is missing
    micro-batches  ours is a weighted sum of single micro-batches' gradients; least squares finds the weights
    where          the first parameter, in the order of backward, that is wrong
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from parallel.mesh import grid
from parallel.optimizer import RULES

TOLERANCE = 1e-10  # relative: float64 rounds at 1e-16, and eight steps add up
ROWS = 8  # rows of a table
LATER = "Step 1 is right. Does a step leave something in a buffer? Do ranks draw different numbers of micro-batches?"
OTHER = (
    "With the tests' batches step 1 is right. Do data ranks read the same samples? Does an id change what a layer does?"
)

AXES = ("dp", "pp", "cp", "tp")  # of `mesh.grid`


class Different(AssertionError):
    """A comparison failed. The message needs no traceback."""


def same_rows(where, measured, expected):
    """Compare two tables {row: bytes} or {row: (calls, bytes)}."""

    def written(row):
        calls, count = row if isinstance(row, tuple) else (None, row)
        return f"{float(count):,.10g} bytes" + ("" if calls is None else f" in {float(calls):g} calls")

    lines = []
    for key in sorted(measured.keys() | expected.keys(), key=str):
        ours, theirs = (written(table.get(key, 0)) for table in (measured, expected))
        if measured.get(key) != expected.get(key):
            lines.append(f"    {key if isinstance(key, str) else ' '.join(key)}: {ours}; should be {theirs}")
    if lines:
        raise Different("\n".join([f"{where}: measured bytes are not those of the formula", *lines]))


class Case(NamedTuple):
    """A layout and, after a difference, its first step."""

    config: object
    specs: dict  # {parameter: ParamSpec}
    sizes: dict  # {"dp", "cp", "tp", "pp", "m": number}; dp: data ranks with samples of their own
    steps: list = ()  # [`record.Record` of each rank]
    one: object = None  # the Record of one process
    shares: dict | None = None  # {(data rank, micro-batch): {parameter: gradient}}, of one process
    dropout_only: bool = False  # with dropout = 0 the loss of the first step is right
    forward: str = ""  # where a forward differs first

    def place(self, rank):
        """Return the rank's index on each axis."""
        c = self.config
        ranks = grid(math.prod(self.sizes[axis] for axis in AXES), c.tp, c.pp, c.cp, c.order)
        return dict(zip(AXES, (int(i) for i in np.argwhere(ranks == rank)[0]), strict=True))

    def name(self, rank):
        """Return `3 (dp=1 tp=1)`."""
        parts = [f"{axis}={i}" for axis, i in self.place(rank).items() if self.sizes[axis] > 1]
        return f"{rank} ({' '.join(parts)})" if parts else f"{rank}"

    def neighbours(self, rank, axis):
        """Return the ranks of the axis's group."""
        return [r for r in range(len(self.steps)) if self.place(r) | {axis: 0} == self.place(rank) | {axis: 0}]

    def cut(self, name):
        return self.specs[name].tp_dim is not None and self.sizes["tp"] > 1

    def local(self, name, whole, rank):
        """Return a rank's tp slice of a whole parameter."""
        parts = whole.chunk(self.sizes["tp"], self.specs[name].tp_dim) if self.cut(name) else [whole]
        return parts[self.place(rank)["tp"] % len(parts)]

    def holders(self, name):
        """Return the stages that hold a parameter."""
        return {self.place(rank)["pp"] for rank, step in enumerate(self.steps) if name in step.gradients}

    def all_matrices(self, names):
        return all(self.specs[name].decay for name in names)  # weight decay applies to matrices only


# --- ratios -----------------------------------------------------------------------------------------------------------

RATIOS = {  # {ratio of all gradients to the right ones: its cause}
    "m": "the loss is not divided by the number of micro-batches",
    "dp": "the loss is not divided by the number of data ranks, or gradients are summed over dp twice",
    "cp": "the loss is not divided by the number of context parallel ranks, which share the tokens of a sample",
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
    """Return r with ours = r * theirs, or None."""
    square = (theirs * theirs).sum().item()
    if square == 0:
        return None
    r = (ours * theirs).sum().item() / square
    return r if (ours - r * theirs).abs().max() <= 1e-7 * max(abs(r), 1e-3) * theirs.abs().max() else None


def products(r, case):
    """Return the RATIOS whose value is r."""
    values = {name: eval(name, None, case.sizes) for name in RATIOS}
    found = [name for name, value in values.items() if math.isclose(r, value, rel_tol=1e-6, abs_tol=1e-9)]
    return [name for name in found if "*" not in name] or found


def written(r, case):
    """Return `8 = m * dp`."""
    return "not constant" if r is None else " = ".join([f"{r:.6g}", *products(r, case)])


def scale_cause(r, case):
    causes = [f"{name}: {RATIOS[name]}" for name in products(r, case)]
    return "; or ".join(causes) or "Look where the loss and its gradient are scaled"


# --- differences of tensors -------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """A piece of a parameter that differs on one rank."""

    name: str
    rank: int
    begin: int
    ours: torch.Tensor
    theirs: torch.Tensor
    relative: float  # largest difference / the parameter's largest element
    ratio: float | None


def finding(name, rank, begin, ours, theirs, size):
    """Return [Finding] if two tensors differ, otherwise []. size: the parameter's largest."""
    ours, theirs = ours.flatten(), theirs.flatten()
    distance = (ours - theirs).abs().max().item() if ours.numel() else 0.0
    if distance <= TOLERANCE * size:
        return []
    return [Finding(name, rank, begin, ours, theirs, distance / size if size else math.inf, ratio(ours, theirs))]


def table(findings, case):
    """Return a table of each parameter's worst Finding."""
    worst = {}
    for f in sorted(findings, key=lambda f: -math.inf if math.isnan(f.relative) else -f.relative):
        worst.setdefault(f.name, f)
    lines = ["    parameter            rank               relative  ratio to one process's"]
    for f in list(worst.values())[:ROWS]:
        lines.append(f"    {f.name:<20} {case.name(f.rank):<18} {f.relative:<9.1e} {written(f.ratio, case)}")
    return "\n".join(lines + [f"    and {len(worst) - ROWS} more"] * (len(worst) > ROWS))


# --- initial parameters -----------------------------------------------------------------------------------------------


def initial_difference(records, before, case):
    """Describe the first initial parameter that is not bit-equal to `before`."""
    for rank, record in enumerate(records):
        for name, ours in record.before.items():
            if not torch.equal(ours, case.local(name, before[name], rank)):
                cause = initial_cause(name, ours, case.local(name, before[name], rank), before[name], case)
                return f"The initial {name} of rank {case.name(rank)} differs: {cause}."
    missing = [name for name in case.specs if not any(name in record.before for record in records)]
    return f"No rank has {missing[0]}." if missing else ""


def initial_cause(name, ours, theirs, whole, case):
    """Return why a parameter's initial values differ. ours, theirs: a rank's slices of it."""
    for t in range(case.sizes["tp"] if case.cut(name) else 0):
        if torch.equal(ours, case.local(name, whole, t)):
            return f"it is the slice of tp rank {t}. Each tp rank must keep its own slice of the whole tensor"
    wrong = ours != theirs
    if case.config.zero and case.sizes["dp"] * case.sizes["cp"] > 1 and not wrong.all():
        if ours[wrong].any():
            return "The elements of a shard over dp are taken from a wrong place"
        return "some elements are 0. The shards of other data ranks are not gathered (`publish`)"
    if case.cut(name):
        return "is each slice over tp drawn separately? Draw the whole tensor from (seed, name), then cut it"
    return "the numbers must be a function of (seed, name) and of nothing else"


# --- gradients --------------------------------------------------------------------------------------------------------


def gradient_findings(case):
    found = []
    for rank, step in enumerate(case.steps):
        for name, (begin, end, ours) in step.gradients.items():
            whole = case.one.gradients[name][2].view(case.specs[name].shape)
            theirs = case.local(name, whole, rank).flatten()[begin:end]
            found += finding(name, rank, begin, ours, theirs, whole.abs().max().item())
    return found


def gradient_cause(found, case):
    """Return why gradients differ in the first step. found: [Finding]."""
    tried = (
        dropout_cause,
        ratio_cause,
        added_slices_cause,
        missing_sum_cause,
        tied_cause,
        micro_batch_cause,
        where_cause,
    )
    return next(filter(None, (cause(found, case) for cause in tried)))


def dropout_cause(found, case):
    """See if the loss is wrong only with dropout."""
    if not case.dropout_only or unequal([step.loss for step in case.steps], case.one.loss) is None:
        return ""
    text = "With dropout = 0 the loss is right, so the dropout masks differ. A mask is a function of (seed, site, row)."
    return f"{text} Look at `MicroBatch.rows` (sample number * seq_length + position) and at the layer's number."


def ratio_cause(found, case):
    """Find a ratio that all wrong gradients share."""
    wrong, ratios, tp = {f.name for f in found}, [f.ratio for f in found], case.sizes["tp"]
    if None in ratios or max(ratios) - min(ratios) > 1e-6 * max(map(abs, ratios)) + 1e-12:
        return ""
    r, replicated = ratios[0], not any(case.cut(name) for name in wrong)
    if wrong == set(case.specs):
        return f"All gradients have the ratio {r:.6g} to the right ones. {scale_cause(r, case)}."
    names = "weight matrices" if len(wrong) > 1 and case.all_matrices(wrong) else ", ".join(sorted(wrong))
    text = f"Only these parameters differ, by the ratio {r:.6g}: {names}. "
    if r > 1.5 and all(abs(r - len(case.holders(name))) < 1e-6 for name in wrong):
        return f"{text}Their gradient is summed over the holders twice."
    if replicated and not case.config.sequence_parallel and tp > 1 and abs(r - tp) < 1e-6:
        return f"{text}Replicated parameters are summed over tp, but each tp rank already has the whole gradient."
    if abs(r) < 1e-9:
        return f"{text}Their gradient never arrives: it is dropped, or cleared before the reduction."
    return f"{text}{scale_cause(r, case)}."


def added_slices_cause(found, case):
    """Find tp slices that are added up."""
    for f in found:
        group = case.neighbours(f.rank, "tp")
        parts = [g.theirs for g in found if (g.name, g.begin) == (f.name, f.begin) and g.rank in group]
        if case.cut(f.name) and len(parts) == len(group) and same(f.ours, sum(parts)):
            text = f"The gradient of {f.name}, which is cut over tp, is summed over tp: slices of different elements"
            return f"{text} are added. Only replicated parameters may be summed over tp."
    return ""


def same(ours, theirs):
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= 1e-8 * theirs.abs().max())


def missing_sum_cause(found, case):
    """Find an axis over which the sum is the right gradient."""
    for axis, ranks in (("tp", "the tp ranks"), ("pp", "the holders")):
        fixed = [f for f in found if sum_is_right(f, case, axis)]
        if len(fixed) * 2 > len(found):
            names = sorted({f.name for f in fixed})
            return f"Partial gradients are not summed over {ranks}. The sum is right for {', '.join(names)}."
    return ""


def sum_is_right(f, case, axis):
    """Return whether the right gradient is the sum over the ranks of an axis."""
    held = [case.steps[rank].gradients.get(f.name) for rank in case.neighbours(f.rank, axis)]
    parts = [values for begin, end, values in filter(None, held) if (begin, end) == (f.begin, f.begin + len(f.ours))]
    return len(parts) > 1 and same(sum(parts), f.theirs)


def tied_cause(found, case):
    """See if only the word table is wrong, which embedding and head share."""
    if {f.name for f in found} != {"word.weight"} or case.config.schedule.startswith("zb"):
        return ""
    text = "Only the word table differs. The head and the embedding both add to its gradient, which is complete after"
    return f"{text} the embedding's backward. Its buffer is reduced before that, or changes while it is sent."


def micro_batch_cause(found, case):
    """Find how often each micro-batch counts in the largest piece."""
    f, shares = max(found, key=lambda f: len(f.ours)), case.shares
    if case.sizes["dp"] > 1 and torch.equal(shares[0, 0][f.name], shares[1, 0][f.name]):
        return "Data ranks 0 and 1 have the same gradient: they read the same samples."
    counts = times_counted(f, case)
    if counts is None:
        return ""
    rows = [f"    data rank {d}:" + "".join(f"{c:>7.3g}" for c in row) for d, row in enumerate(counts.tolist())]
    title = f"How often each micro-batch counts in {f.name} of rank {case.name(f.rank)} (right: 1 each):"
    text = "\n".join([title, *rows, pattern(counts, case.place(f.rank)["dp"])])
    if case.config.schedule.startswith("zb") and case.all_matrices({g.name for g in found}):
        text += " Only weight matrices differ. W adds their gradients, so a bucket must be reduced after its W."
    return text


def times_counted(f, case):
    """Fit f.ours by a sum of factor * gradient over the micro-batches. Return the factors, [dp, m].

    Return None if none fit, or if all are 0 or all are 1.
    """
    wholes = [share[f.name].view(case.specs[f.name].shape) for share in case.shares.values()]
    rows = slice(f.begin, f.begin + len(f.ours))
    columns = torch.stack([case.local(f.name, whole, f.rank).flatten()[rows] for whole in wholes], 1)
    if len(columns) < 2 * len(wholes) or not f.ours.isfinite().all():
        return None
    solved = torch.linalg.lstsq(columns, f.ours[:, None], driver="gelsd").solution
    if (columns @ solved - f.ours[:, None]).abs().max() > 1e-6 * f.ours.abs().max():
        return None
    counts = solved.view(case.sizes["dp"], case.sizes["m"]).mul(1000).round().div(1000) + 0.0
    return None if not counts.any() or torch.equal(counts, torch.ones_like(counts)) else counts


def pattern(counts, mine):
    """Name the usual cause of factors. mine: the gradient's data rank."""
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
    if missing := [d for d, row in enumerate(counts.tolist()) if not any(row)]:
        return f"Nothing of the data ranks {missing} counts: a sum is made over a part of the data ranks."
    if (counts[mine] == 1).all():
        return "Only other data ranks' micro-batches are wrong: the bucket is reduced before its gradient is complete."
    return "Some micro-batches count too little: a gradient is overwritten, dropped, or reduced before it is complete."


def where_cause(found, case):
    """Name the first wrong gradient in the order of backward."""
    wrong, order = {f.name for f in found}, list(reversed(case.specs))  # backward ends at the word table
    if RULES[case.config.optimizer].whole and all(case.specs[name].matrix for name in wrong):
        return "Only the matrices differ that need a whole update: is it made once per micro-batch, before the sums?"
    text = "Backward runs from the head to the embedding. The first wrong gradient on this way is "
    text += f"{next(name for name in order if name in wrong)}'s. "
    if case.config.recompute == "full" and case.config.dropout and not any(name.startswith("head") for name in wrong):
        text += "The head is right, so the first forward is right. With recomputation a block runs again before its "
        return text + "backward: it must draw the same dropout masks, from the same rows and the same layer number."
    if len(wrong) == len(order) and case.sizes["pp"] > 1:
        text += "All differ, and there are pipeline stages. Is a message of another micro-batch received? Is a buffer "
        return text + "freed or used again before its message has left? Does a stage count its layers from 0?"
    return text + "Look at this layer, and at the next one in forward: its backward gives this layer's dy."


def forward_cause(case):
    c, look = case.config, ["the samples that each rank draws"]
    look += ["the tokens of each cp rank (their targets, their positions, their dropout masks)"] * (c.cp > 1)
    look += ["the rows of each tp rank (their positions, their dropout masks)"] * c.sequence_parallel
    look += ["the vocabulary cut over tp (targets, padding, the maximum and the sum of the softmax)"] * (c.tp > 1)
    look += ["messages of other micro-batches; buffers that change while they are sent"] * (c.pp > 1)
    look += ["layers counted per stage"] * (c.pp > 1)
    return f"The loss of step 1 differs too, so the data or the forward pass is wrong. Look at: {'; '.join(look)}."


# --- loss, norm, update -----------------------------------------------------------------------------------------------


def unequal(ours, theirs):
    return next((x for x in ours if not abs(x - theirs) <= TOLERANCE * abs(theirs)), None)


def loss_cause(r, case):
    if "tp" in products(r, case):
        return "Every tp rank has the same loss: only one of them may add it."
    text = "The gradients are right: look at how the loss is summed for the log"
    return f"{text}, and at a term of the loss that has no gradient (`cross_entropy_`)."


def norm_cause(norm, case):
    """Return why the first gradient norm differs though the gradients are right."""
    squares = {name: values.square().sum().item() for name, (_, _, values) in case.one.gradients.items()}
    total, dp = sum(squares.values()), case.sizes["dp"] * case.sizes["cp"]
    replicated = sum(square for name, square in squares.items() if case.specs[name].tp_dim is None)
    of_holders = sum(square * len(case.holders(name)) for name, square in squares.items())
    causes = {
        "parameters that are replicated over tp count on every tp rank": total + (case.sizes["tp"] - 1) * replicated,
        "each data rank counts all elements": dp * total,
        "a bucket with several holders counts once per holder": of_holders,
    }
    causes |= {f"only the shards of data rank {d} count": shard_squares(case, d) for d in range(dp)}
    for cause, square in causes.items():
        if math.isclose(norm**2, square, rel_tol=1e-8):
            return f"It is the norm if {cause}. Each element of the model must count once."
    return f"Its ratio is {norm / case.one.norm:.6g}. Each element of the model must count once, whoever has copies."


def shard_squares(case, data_rank):
    """Return the squared norm of what one data rank updates."""
    square = 0.0
    for rank, step in enumerate(case.steps):
        place = case.place(rank)
        for name, (_, _, values) in step.gradients.items():
            first = place["pp"] == min(case.holders(name)) and (place["tp"] == 0 or case.cut(name))
            mine = place["dp"] * case.sizes["cp"] + place["cp"] == data_rank
            square += values.square().sum().item() if first and mine else 0.0
    return square


def update_cause(found, before, case):
    """Return why weights differ after an update of right gradients. before: {name: the weight}."""
    c, sharded = case.config, case.config.zero and case.sizes["dp"] * case.sizes["cp"] > 1
    for f in found if sharded else []:
        if ((f.ours == case.local(f.name, before[f.name], f.rank).flatten()) & (f.ours != f.theirs)).any():
            text = f"Elements of {f.name} on rank {case.name(f.rank)} still have their initial values. Another data"
            why = "`release`: a bucket that stays whole is not gathered again" if c.zero == 3 else "`publish`"
            return f"{text} rank owns and has updated them: new parameters are not gathered ({why})."
    text = "The gradients and the norm are right, so the update itself is wrong. "
    parts = ["a shard over dp"] * bool(sharded) + ["a slice over tp"] * (case.sizes["tp"] > 1)
    if RULES[c.optimizer].whole and parts:
        return f"{text}Is the update of a matrix computed from {' or '.join(parts)} of it, or before a sum?"
    if c.optimizer in ("lamb", "lars") and parts:
        text += f"{c.optimizer} needs the norms of whole tensors. "
        return f"{text}Is a rate computed from the norm of {' or of '.join(parts)}?"
    return text + "Look at the learning rate, clipping, the ranges of weight decay, and the moments of shards."


def parameter_findings(results, reference, case):
    """Return the Findings of the parameters {name: slice}."""
    found = []
    smooth = continuous(RULES[case.config.optimizer])
    for rank, result in enumerate(results):
        for name, ours in result.items():
            size = max(1.0, reference[name].abs().max().item())
            theirs = case.local(name, reference[name], rank)
            if name.endswith("qkv.bias") and not smooth:
                ours, theirs = ours[[0, 2]], theirs[[0, 2]]
            found += finding(name, rank, 0, ours, theirs, size)
    return found


def continuous(rule):
    """Return False if a tiny change of the gradient changes the update, as with Lion's sign.

    Then the key bias, on which no other number depends, may differ: its gradient is 0 except for rounding.
    """
    constants = dict(lr=1.0, decay=0.0, scale=1.0, update=1, beta1=0.9, beta2=0.99, eps=1e-6)
    updates = []
    for tiny in (1e-20, -1e-20):
        weight, gradient, *moments = torch.full((2 + rule.moments, 1), 0.0, dtype=torch.float64)
        rule.step(weight, gradient.fill_(tiny), moments, **constants)
        updates.append(torch.cat([weight, gradient]))
    return torch.allclose(*updates, rtol=0, atol=1e-6)


# --- all together -----------------------------------------------------------------------------------------------------


def differences(records, one, first_step=None):
    """Return a message if a layout's run is not that of one process, otherwise "".

    records: the `record.Record` of each rank; one: of one process. first_step: called after a difference, returns the
    fields of `Case` from `steps` on.
    """
    c = records[0].config
    dp = len(records) // (c.tp * c.cp * c.pp)
    m = c.global_batch_size // (c.micro_batch_size * dp)
    case = Case(c, one.specs, {"dp": dp, "cp": c.cp, "tp": c.tp, "pp": c.pp, "m": m})
    if initial := initial_difference(records, one.before, case):
        return f"{title(case)}\nFirst difference: initial parameters.\n{initial}"
    run = []
    for field, what in (("losses", "loss"), ("norms", "gradient norm")):
        for step, numbers in enumerate(zip(*(getattr(record, field) for record in (one, *records)), strict=True), 1):
            if (ours := unequal(numbers[1:], numbers[0])) is not None:
                run.append(f"In the whole run: the {what} of step {step} is {ours:.12g} instead of {numbers[0]:.12g}.")
    if found := parameter_findings([record.after for record in records], one.after, case):
        run += ["Parameters after the run:", table(found, case)]
    if not run:
        return ""
    wrong_at_once = any(" of step 1 " in line for line in run)
    if first_step:
        case = Case(c, one.specs, case.sizes, *first_step())
        run = diagnosis(one.before, case) or [OTHER if wrong_at_once else LATER, *run]
    elif not wrong_at_once:
        run = [LATER, *run]
    return "\n".join(filter(None, [title(case), case.forward, *run]))


def title(case):
    names = "schedule zero optimizer sequence_parallel dropout recompute".split()
    values = case.sizes | {name: getattr(case.config, name) for name in names}
    text = " ".join(f"{name}={value}" for name, value in values.items())
    return f"{text}: this layout does not train the model of one process."


def diagnosis(before, case):
    """Return lines about the first difference of the first step. before: the initial parameters."""
    one, steps = case.one, case.steps
    loss, norm = unequal([s.loss for s in steps], one.loss), unequal([s.norm for s in steps], one.norm)
    also = f"The loss of step 1 is {loss:.12g} instead of {one.loss:.12g}." if loss is not None else ""
    if found := gradient_findings(case):
        count = len({f.name for f in found})
        head = f"First difference: gradients of step 1, in {count} of {len(case.specs)} parameters."
        lines = [head, also, table(found, case), f"This usually means: {gradient_cause(found, case)}"]
        forward = loss is not None and None in {f.ratio for f in found}  # otherwise only scales differ
        return lines + [forward_cause(case)] * forward
    if loss is not None:
        return [f"First difference: the loss of step 1. Gradients are equal. {also}", loss_cause(loss / one.loss, case)]
    if norm is not None:
        text = f"First difference: the gradient norm of step 1, {norm:.12g} instead of {one.norm:.12g}."
        return [f"{text} The gradients are equal.", norm_cause(norm, case)]
    if found := parameter_findings([step.after for step in steps], one.after, case):
        text = "First difference: parameters after step 1. Gradients, loss and norm of step 1 are equal."
        return [text, table(found, case), update_cause(found, before, case)]
    return []


# --- one tensor -------------------------------------------------------------------------------------------------------


def same_tensor(what, ours, theirs, instead=None, tolerance=1e-12):
    """Raise Different unless two tensors are equal.

    what: "dx of rank 0"; instead: {"its own share, not the sum over tp": the tensor that `ours` would be}.
    """
    if ours.shape != theirs.shape:
        raise Different(f"{what} has shape {list(ours.shape)} instead of {list(theirs.shape)}")
    if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
        return
    for name, other in (instead or {}).items():
        if other.shape == ours.shape and torch.allclose(ours, other, rtol=1e-9, atol=1e-9):
            raise Different(f"{what} is {name}")
    if (r := ratio(ours.detach().double(), theirs.detach().double())) is not None:
        raise Different(f"{what} is {r:.6g} times what it should be")
    at = (ours - theirs).abs().argmax()
    numbers = f"worst {ours.flatten()[at].item():.12g} instead of {theirs.flatten()[at].item():.12g}"
    raise Different(f"{what} differs, {numbers} (element {int(at)} of {ours.numel()})")
