"""Compare a layout's run with a run on one process, and name the usual cause of a difference.

A message describes the first of these that differs: initial parameters, gradients of the first step, loss, gradient
norm, parameters. Only after a difference the first step runs again, for its gradients. `ours` is the layout's number,
`theirs` that of one process. `Case` and the first lines of a function have the facts; a table {sentence: condition}
names the cause. Facts about gradients:

    ratio     ours = r * theirs. r = 8 = m * dp: the loss is not divided by m * dp
    sum       ours, summed over an axis, is theirs: this sum is missing
    counts    ours is a weighted sum of single micro-batches' gradients; least squares finds the weights
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from parallel.mesh import grid
from parallel.optimizer import RULES

TOLERANCE = 1e-10  # relative: float64 rounds at 1e-16, and eight steps add up
NOISE = 1e-12  # of the largest gradient: a smaller one is 0 except for rounding, like a key bias's
ROWS = 8  # rows of a table
# What a message begins with if the first step, run again with the tests' batches, is right.
LATER = "Step 1 is right. Does a step leave something in a buffer? Do ranks draw different numbers of micro-batches?"
OTHER = (
    "With the tests' batches step 1 is right. Do data ranks read the same samples? Does an id change what a layer does?"
)

AXES = ("dp", "pp", "cp", "tp")  # of `mesh.grid`


class Different(AssertionError):
    """A comparison failed. The message needs no traceback."""


def same_rows(where, measured, expected):
    """Compare two tables {row: bytes} or {row: (calls, bytes)}."""
    lines = []
    for key in sorted(measured.keys() | expected.keys(), key=str):
        ours, theirs = measured.get(key, 0), expected.get(key, 0)
        if ours != theirs:
            row = key if isinstance(key, str) else " ".join(key)
            lines.append(f"    {row}: {written(ours)}; should be {written(theirs)}")
    if lines:
        raise Different("\n".join([f"{where}: measured bytes are not those of the formula", *lines]))


def written(row):
    *calls, size = row if isinstance(row, tuple) else (row,)
    return f"{float(size):,.10g} bytes" + "".join(f" in {float(n):g} calls" for n in calls)


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
        return dict(zip(AXES, np.argwhere(ranks == rank)[0].tolist(), strict=True))

    def name(self, rank):
        """Return `3 (dp=1 tp=1)`."""
        parts = [f"{axis}={i}" for axis, i in self.place(rank).items() if self.sizes[axis] > 1]
        return f"{rank} ({' '.join(parts)})" if parts else f"{rank}"

    def cut(self, name):
        return self.specs[name].tp_dim is not None and self.sizes["tp"] > 1

    def local(self, name, whole, rank):
        """Return a rank's tp slice of a whole parameter."""
        spec, tp = self.specs[name], self.sizes["tp"]
        whole = whole.view(spec.shape)
        return whole.chunk(tp, spec.tp_dim)[self.place(rank)["tp"]] if self.cut(name) else whole

    def part(self, whole, f):
        """Return the elements of a Finding in the whole parameter."""
        return self.local(f.name, whole, f.rank).flatten()[f.begin : f.begin + len(f.ours)]

    def held(self, f, axis):
        """Return the gradients of a Finding's elements on the ranks of an axis."""
        here = self.place(f.rank)
        group = [step for rank, step in enumerate(self.steps) if self.place(rank) | {axis: 0} == here | {axis: 0}]
        held = [step.gradients[f.name][2] for step in group if f.name in step.gradients]
        return [values for values in held if len(values) == len(f.ours)]

    def holders(self, name):
        """Return the stages that hold a parameter."""
        return {self.place(rank)["pp"] for rank, step in enumerate(self.steps) if name in step.gradients}

    @property
    def loss(self):
        """The wrong loss of a rank, or None."""
        return unequal([step.loss for step in self.steps], self.one.loss)

    @property
    def cuts(self):
        """The cuts of a parameter that can make its update wrong."""
        sharded = self.config.zero and self.sizes["dp"] * self.sizes["cp"] > 1
        return ["a shard over dp"] * bool(sharded) + ["a slice over tp"] * (self.sizes["tp"] > 1)


# --- ratios -----------------------------------------------------------------------------------------------------------

RATIOS = {  # {ratio of all gradients to the right ones: its cause}
    "m": "the loss is not divided by the number of micro-batches",
    "dp": "the loss is not divided by the number of data ranks, or gradients are summed over dp twice",
    "cp": "the loss is not divided by the number of context parallel ranks, which share the tokens of a sample",
    "tp": "Replicated parameters are summed over tp, but each tp rank already has the whole gradient",
    "pp": "every pipeline stage adds the same gradient",
    "m * dp": "the loss is divided neither by the number of micro-batches nor by the number of data ranks",
    "1 / m": "the loss is divided by the number of micro-batches twice",
    "1 / dp": "gradients are averaged over dp, although the loss is already divided by the number of data ranks",
    "1 / tp": "gradients are divided by the number of tensor parallel ranks, but every tp rank sees every sample",
    "1 / pp": "the loss is divided by the number of pipeline stages, but every sample passes all stages",
}


def ratio(ours, theirs):
    """Return r with ours = r * theirs, or nan."""
    r = ((ours * theirs).sum() / (theirs * theirs).sum()).item()
    return r if (ours - r * theirs).abs().max() <= 1e-7 * max(abs(r), 1e-3) * theirs.abs().max() else math.nan


def is_number(x):
    """Return whether several elements are one number."""
    return len(x) > 1 and (x.max() - x.min() <= 1e-6 * x.abs().max()).item()


def scale_cause(r, case):
    """Return the causes of RATIOS whose value is r."""
    values = {name: eval(name, None, case.sizes) for name in RATIOS}
    found = [name for name, value in values.items() if math.isclose(r, value, rel_tol=1e-6)]
    found = [name for name in found if "*" not in name] or found
    return "; or ".join(f"{name}: {RATIOS[name]}" for name in found) or "Where are the loss and its gradient scaled?"


# --- differences of tensors -------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """A piece of a parameter that differs on one rank."""

    name: str
    rank: int
    begin: int
    ours: torch.Tensor
    theirs: torch.Tensor
    relative: float  # largest difference / the parameter's largest element
    ratio: float  # nan: not constant


def findings(case, pieces, whole, least=0.0):
    """Return the Findings of [{parameter: (begin, end, this rank's elements)} of each rank]. whole: the right ones.

    least: of a parameter's size. If it is set, the key bias is left out, on which no other number depends: its gradient
    is 0 except for rounding, and a rule may take its sign. Such a gradient (NOISE) has no size of its own.
    """
    found, sizes = [], {name: x.abs().max().item() for name, x in whole.items()}
    largest = max(sizes.values())
    for rank, of_rank in enumerate(pieces):
        for name, (begin, end, ours) in of_rank.items():
            theirs = case.local(name, whole[name], rank)
            if least and name.endswith("qkv.bias"):  # q, k, v
                theirs, ours = theirs[::2], ours[::2]
            theirs, ours = theirs.flatten()[begin:end], ours.flatten()
            size = max(least, sizes[name] if sizes[name] > NOISE * largest else 1e-4 * largest)
            distance = (ours - theirs).abs().max().item() if len(ours) else 0.0
            if not distance <= TOLERANCE * size:
                relative = distance / size if distance < math.inf and size else math.inf
                found.append(Finding(name, rank, begin, ours, theirs, relative, ratio(ours, theirs)))
    return found


def weight_findings(case, records, one):
    """Return the Findings of the weights after a run."""
    pieces = [{name: (0, None, x) for name, x in record.after.items()} for record in records]
    return findings(case, pieces, one.after, least=1.0)


def table(found, case):
    """Return a table of each parameter's worst Finding."""
    worst = {}
    for f in sorted(found, key=lambda f: -f.relative):
        worst.setdefault(f.name, f)
    lines = ["    parameter            rank               relative  ratio to one process's (nan: several)"]
    for f in list(worst.values())[:ROWS]:
        lines.append(f"    {f.name:<20} {case.name(f.rank):<18} {f.relative:<9.1e} {f.ratio:.6g}")
    return "\n".join(lines + [f"    and {len(worst) - ROWS} more"] * (len(worst) > ROWS))


# --- initial parameters -----------------------------------------------------------------------------------------------


def initial_difference(records, before, case):
    """Describe the first initial parameter that is not bit-equal to `before`."""
    pieces = [(rank, name, ours) for rank, record in enumerate(records) for name, ours in record.before.items()]
    for rank, name, ours in pieces:
        wrong = ours != case.local(name, before[name], rank)
        if wrong.any():
            of_shard = "a shard over dp" in case.cuts and not wrong.all()
            others = range(len(records)) if case.cut(name) else ()
            alike = [r for r in others if torch.equal(ours, case.local(name, before[name], r))]
            causes = {
                f"it is the slice of ranks {alike}. Each tp rank must keep its own slice of the whole tensor": alike,
                "The elements of a shard over dp are taken from a wrong place": of_shard and ours[wrong].any(),
                "some elements are 0. The shards of other data ranks are not gathered (`publish`)": of_shard,
                "is each slice over tp drawn separately? Draw the whole tensor from (seed, name), then cut it": others,
                "the numbers must be a function of (seed, name) and of nothing else": True,
            }
            return f"The initial {name} of rank {case.name(rank)} differs: {first_true(causes)}."
    missing = sorted({*case.specs} - {name for _, name, _ in pieces})
    return f"No rank has {missing[0]}." if missing else ""


# --- gradients --------------------------------------------------------------------------------------------------------


def same(ours, theirs, tolerance=1e-8):
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


def first_true(causes):
    """Return the first sentence of a table {sentence: condition} whose condition holds."""
    return next(sentence for sentence, holds in causes.items() if holds)


def gradient_cause(found, case):
    """Return why gradients differ in the first step. found: [Finding]."""
    c, specs, rule, wrong = case.config, case.specs, RULES[case.config.optimizer], {f.name for f in found}
    everywhere, worst = wrong == set(specs), max(f.relative for f in found)
    names = "All gradients" if everywhere else ", ".join(sorted(wrong)[:ROWS])
    first = next(name for name in reversed(specs) if name in wrong)  # in the order of backward
    ratios = np.array([f.ratio for f in found])
    r = ratios[0] if np.ptp(ratios) <= 1e-6 * abs(ratios[0]) + 1e-12 else math.nan
    ratio = f"{names} have the ratio {r:.6g} to the right ones. "
    twice = r > 1.5 and all(abs(r - len(case.holders(name))) < 1e-6 for name in wrong)
    of_tp, of_pp = (
        [f.name for f in found if len(parts := case.held(f, axis)) > 1 and same(sum(parts), f.theirs)]
        for axis in ("tp", "pp")
    )
    right = "The sum is right for " + ", ".join(sorted({*of_tp, *of_pp}))
    slices = [f.name for f in found if case.cut(f.name) and all(same(x, f.ours) for x in case.held(f, "tp"))]
    apart = [f.name for f in found if not (case.cut(f.name) or all(same(x, f.ours) for x in case.held(f, "tp")))]
    near = max(of_tp or apart, key=[*specs].index, default="")  # the nearest to the head: backward begins there
    f, (one, other) = max(found, key=lambda f: len(f.ours)), (case.shares.get((d, 0)) for d in (0, 1))
    counts, d = times_counted(f, case), case.place(f.rank)["dp"]
    mine, others = counts[d], torch.cat([counts[:d], counts[d + 1 :]])
    rows = [f"    data rank {d}:" + "".join(f"{c:>7.3g}" for c in row) for d, row in enumerate(counts.tolist())]
    title = f"How often each micro-batch counts in {f.name} of rank {case.name(f.rank)} (right: 1 each):"
    counted, none = "\n".join([title, *rows, ""]), [d for d, row in enumerate(counts.tolist()) if not any(row)]
    causes = {
        "With dropout = 0 the loss is right, so the dropout masks differ. A mask is a function of (seed, site, row). "
        "Look at `MicroBatch.rows` (sample number * seq_length + position) and at the layer's number.": (
            case.dropout_only and case.loss is not None
        ),
        f"{ratio}Their gradient is summed over the holders twice.": twice and not everywhere,
        f"{ratio}Their gradient never arrives: it is dropped, or cleared before the reduction.": abs(r) < 1e-9,
        f"{ratio}{scale_cause(r, case)}.": r == r,
        f"All differences are at most {worst:.0e} of the largest element: rounded to 16 bits?": (
            2**-18 < worst < 2**-7 and case.loss is None
        ),
        f"All tp ranks have the same gradient of {''.join(slices[:1])}, which is cut over tp: is it summed over tp? "
        "Only replicated parameters may be summed over tp.": slices,
        f"Partial gradients are not summed over the tp ranks. {right}. Is it used inside a pair of linears? Then "
        "ParamSpec(partial=True).": 2 * len(of_tp) > len(found),
        "Each of these gradients is the right one times a factor of its own: does a rank compute a factor from its own "
        "shard or slice (a norm)?": not np.isnan(ratios).any(),
        "Each of these gradients is the right one plus a number of its own: does a rank compute a number from its own "
        "shard or slice (a mean)?": all(is_number(f.ours - f.theirs) for f in found),
        f"Partial gradients are not summed over the holders. {right}.": 2 * len(of_pp) > len(found),
        "Only the word table differs. The head and the embedding both add to its gradient, which is complete after "
        "the embedding's backward. Its buffer is reduced before that, or changes while it is sent.": (
            wrong == {"word.weight"} and not c.schedule.startswith("zb")
        ),
        f"The tp ranks have different gradients of {near}: is x used inside a pair of linears? Then each "
        "rank has only its part of the gradient, and nobody sums the parts. Or is a sum over tp missing?": apart,
        "Data ranks 0 and 1 have the same gradient: they read the same samples.": (
            other and torch.equal(one[f.name], other[f.name])
        ),
        f"{counted}Only this rank's own micro-batches count: gradients are not reduced over the data ranks.": (
            len(others) and mine.all() and not others.any()
        ),
        f"{counted}Only the last micro-batch counts: gradients are overwritten instead of added.": (
            len(mine) > 1 and not counts[:, :-1].any()
        ),
        f"{counted}Gradients are reduced after the first micro-batch: later ones stay on their own data rank.": (
            len(others) and len(mine) > 1 and (counts[:, 0] == 1).all() and not others[:, 1:].any()
        ),
        f"{counted}Earlier micro-batches count more: a sum over dp is reduced again with every micro-batch.": (
            len(others) and counts.all() and counts[0, 0] > counts[0, -1]
        ),
        f"{counted}Nothing of the data ranks {none} counts: a sum is made over a part of the data ranks.": none,
        f"{counted}A gradient is reduced twice, overwritten or dropped, a buffer is not cleared, or the bucket is "
        "reduced before its gradient is complete (zb: before W, which adds that of a weight matrix).": (
            counts != 1
        ).any(),
        "Only the matrices differ that need a whole update: is it made once per micro-batch, before the sums?": (
            rule.whole and all(specs[name].matrix for name in wrong)
        ),
        "The gradient is the sum of those of each micro-batch alone, but the samples of one process have another one: "
        "do the ranks read other samples (`data.py`)? Or does a token's loss depend on the other tokens of its "
        "micro-batch (a mean, a count)?": all(
            same(sum(case.part(share[f.name], f) for share in case.shares.values()), f.ours) for f in found
        ),
        "The loss differs, too, and the outputs of the first micro-batch are right. Look at the targets, at the loss, "
        "at later micro-batches, at messages, and at buffers that are used again before they are sent.": (
            case.loss is not None
        ),
        f"Backward runs from the head to the embedding. The first wrong gradient on this way is {first}'s. Look at "
        "this layer, and at the next one in forward: its backward gives this layer's dy.": first[:4] != "head",
        "The loss is right. Look at the head's backward, and where gradients are changed and summed.": True,
    }
    return first_true(causes)


def times_counted(f, case):
    """Fit a Finding by a sum of factor * gradient over the micro-batches. Return the factors, [dp, m].

    They are all 1 if none fit, or if all are 0.
    """
    columns = torch.stack([case.part(share[f.name], f) for share in case.shares.values()], 1)
    ones = torch.ones(case.sizes["dp"], case.sizes["m"], dtype=columns.dtype)
    if len(columns) < 2 * ones.numel() or not f.ours.isfinite().all():
        return ones
    solved = torch.linalg.lstsq(columns, f.ours[:, None], driver="gelsd").solution
    fits = (columns @ solved - f.ours[:, None]).abs().max() <= 1e-6 * f.ours.abs().max()
    return solved.view_as(ones).round(decimals=3) + 0.0 if fits and solved.any() else ones


# --- loss, norm, update -----------------------------------------------------------------------------------------------


def unequal(ours, theirs):
    return next((x for x in ours if not abs(x - theirs) <= TOLERANCE * abs(theirs)), None)


def norm_cause(norm, case):
    """Return why the first gradient norm differs though the gradients are right."""
    r, ranks = norm / case.one.norm, case.sizes["dp"] * case.sizes["cp"]
    times = {
        "parameters that are replicated over tp count on every tp rank": (
            lambda name: 1 if case.cut(name) else case.sizes["tp"]
        ),
        "each data rank counts all elements": lambda name: ranks,
        "a bucket with several holders counts once per holder": lambda name: len(case.holders(name)),
    }
    for why, count in times.items():
        squares = [count(name) * values.square().sum().item() for name, (_, _, values) in case.one.gradients.items()]
        if math.isclose(norm**2, sum(squares), rel_tol=1e-8):
            return f"It is the norm if {why}. Each element of the model must count once."
    part = "only a part of it counts" if r < 1 else "a part of it counts twice"
    return f"Its ratio is {r:.6g}: {part}, or it is read before a `wait`? Each element of the model must count once."


def update_cause(found, case):
    """Return why weights differ after an update of right gradients."""
    rule, cuts, c = RULES[case.config.optimizer], " or of ".join(case.cuts), case.config
    old = [
        f
        for f in found
        if "dp" in cuts and ((f.ours == case.part(case.one.before[f.name], f)) & (f.ours != f.theirs)).any()
    ]
    where = old and f"{old[0].name} on rank {case.name(old[0].rank)}"
    text = "The gradients and the norm are right, so the update itself is wrong."
    causes = {
        f"Elements of {where} still have their initial values. Another data rank owns and has updated them: new "
        "parameters are not gathered (`publish`; with zero=3 `release`: a bucket that stays whole is not gathered "
        "again).": old,
        f"{text} Is the update of a matrix computed from {cuts} of it, or before a sum?": cuts and rule.whole,
        f"{text} {c.optimizer} needs the norms of whole tensors. Is a rate computed from the norm of {cuts}?": (
            cuts and rule.layerwise
        ),
        f"{text} Look at the learning rate, clipping, the ranges of weight decay, and the moments of shards.": True,
    }
    return first_true(causes)


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
    found, run = weight_findings(case, records, one), []
    for what, field in {"loss": "losses", "gradient norm": "norms"}.items():
        for step, right in enumerate(getattr(one, field)):
            ours = unequal([getattr(record, field)[step] for record in records], right)
            if ours is not None:
                run.append(f"In the whole run: the {what} of step {step + 1} is {ours:.12g} instead of {right:.12g}.")
    lines = ["Parameters after the run:", table(found, case)] if found else []
    if not lines + run:
        return ""
    lines = [OTHER if " of step 1 " in "".join(run) else LATER, *run, *lines]
    if first_step:
        case = Case(c, one.specs, case.sizes, *first_step())
        lines = diagnosis(case) or lines
    return "\n".join(filter(None, [title(case), case.forward, *lines]))


def title(case):
    names = "schedule zero optimizer sequence_parallel dropout recompute".split()
    values = case.sizes | {name: getattr(case.config, name) for name in names}
    text = " ".join(f"{name}={value}" for name, value in values.items())
    return f"{text}: this layout does not train the model of one process."


def diagnosis(case):
    """Return lines about the first difference of the first step."""
    one, steps, loss, first = case.one, case.steps, case.loss, "First difference:"
    norm = unequal([s.norm for s in steps], one.norm)
    also = f"The loss of step 1 is {loss:.12g} instead of {one.loss:.12g}." if loss is not None else ""
    whole = {name: values for name, (_, _, values) in one.gradients.items()}
    if found := findings(case, [step.gradients for step in steps], whole):
        head = f"{first} gradients of step 1, in {len({f.name for f in found})} of {len(case.specs)} parameters."
        lines = [head, also, table(found, case)]
        if also and case.forward and not case.dropout_only:
            return lines  # the place of the forward says more
        return [*lines, f"This usually means: {gradient_cause(found, case)}"]
    if also:
        cause = "Look at how the loss is summed for the log, and at a term of it without a gradient (`cross_entropy_`)."
        if math.isclose(loss / one.loss, case.sizes["tp"]):
            cause = "Every tp rank has the same loss: only one of them may add it."
        return [f"{first} the loss of step 1. Gradients are equal. {also}", cause]
    if norm is not None:
        text = f"{first} the gradient norm of step 1, {norm:.12g} instead of {one.norm:.12g}."
        return [f"{text} The gradients are equal.", norm_cause(norm, case)]
    if found := weight_findings(case, steps, one):
        text = f"{first} parameters after step 1. Gradients, loss and norm of step 1 are equal."
        return [text, table(found, case), update_cause(found, case)]
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
    if not math.isnan(r := ratio(ours.detach().double(), theirs.detach().double())):
        raise Different(f"{what} is {r:.6g} times what it should be")
    at = (ours - theirs).abs().argmax()
    numbers = f"worst {ours.flatten()[at].item():.12g} instead of {theirs.flatten()[at].item():.12g}"
    raise Different(f"{what} differs, {numbers} (element {int(at)} of {ours.numel()})")
