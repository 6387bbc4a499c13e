"""List defects that the tests must find. The failure's message must contain the defect's `words`.

    python -m testing.defects                      lists them
    python -m testing.defects no-1/m not-reduced   plants each in a copy of the tree, runs its test, prints the failure
    python -m testing.defects all                  all of them

A defect changes some lines of one file. Its test must fail, and the message must name the cause. Real codebases for
distributed training had most of these defects. `testing/test_defects.py` plants each of them alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Defect(NamedTuple):
    name: str
    file: str
    edits: tuple  # (old, new), (old, new) ...: each old text occurs once in the file
    test: str  # the argument of pytest
    words: str  # the failure's message must contain them
    quick: bool = False  # planted in the default run, too


# --- the tests --------------------------------------------------------------------------------------------------------


def layout(dp, tp, sequence_parallel=False):
    return f"test_layouts.py::test_every_layout_trains_the_same_model[{dp}-{tp}-{sequence_parallel}]"


def grid(dp, pp, schedule="1f1b", zero=0, m="stages", tp=1):
    return f"test_layouts.py::test_the_whole_grid[{dp}-{tp}-{pp}-{schedule}-{zero}-False-none-sgd-{m}]"


def one_process(mode):
    return f"test_layouts.py::test_micro_batches_and_recomputation_on_one_process[{mode}]"


def column(tp=2, enter="copy"):
    return f"test_tensor.py::test_column_parallel_linear[False-{enter}-{tp}]"


def row(tp=2, leave="all_reduce"):
    return f"test_tensor.py::test_row_parallel_linear[{leave}-{tp}]"


def embedding(tp=2, leave="all_reduce"):
    return f"test_tensor.py::test_vocab_parallel_embedding[{leave}-{tp}]"


def cross_entropy(tp=2):
    return f"test_tensor.py::test_linear_cross_entropy[1.0-64-copy-{tp}]"


def asynchronous(schedule, p):
    return f"test_pipedream.py::test_losses_and_parameters_are_those_of_the_sequential_program[{schedule}-{p}]"


def late(name):
    """Return a test in the mode of testing/adversary.py, in which a result appears only at `wait`."""
    return f"testing/test_adversary.py::test_an_operation[{name}]"


def late_layout(point):
    return f"testing/test_adversary.py::test_a_layout[{point}]"


# --- the defects ------------------------------------------------------------------------------------------------------

SHARE = "share = 1 / (m * mesh.dp.size)"
COUNTS = "return first_of_dp and bucket.holders.rank == 0 and (cut or self.mesh.tp.rank == 0)"
FIRST_OF_DP = "first_of_dp = bucket.stage >= 1 or bucket.dp.rank == 0"
TWINS = 'all_reduce(bucket.own_grad, bucket.holders, "twin gradients")'
REPLICATED = "for r in bucket.ranges if not r.cut]"
LATEST = """\
    def _backward(self, j, c, deferred):
        for weights in self.weights:
            weights.show(max(weights.flats))
"""
RECEIVE = "return self.mail.receive((kind, j, c))"

INITIAL = [
    Defect(
        "slices-alike",
        "parallel/tensor.py",
        (("whole.chunk(axis.size, self.tp_dim)[axis.rank]", "whole.chunk(axis.size, self.tp_dim)[0]"),),
        layout(1, 2),
        "of rank 1 (tp=1) differs: it is the slice of tp rank 0",
    ),
    Defect(
        "drawn-for-the-slice",
        "parallel/zero.py",
        (
            (
                "piece.spec.local_part(piece.spec.initial(seed), self.mesh.tp).flatten()",
                'type(piece.spec)(**vars(piece.spec) | {"shape": piece.spec.local_shape(self.mesh.tp.size)})'
                ".initial(seed).flatten()",
            ),
        ),
        layout(1, 2),
        "is each slice over tp drawn separately?",
    ),
    Defect(
        "shard-from-a-wrong-element",
        "parallel/zero.py",
        (("local[piece.begin : piece.end]", "local[: piece.end - piece.begin]"),),
        grid(2, 1, zero=1, m="one"),
        "The elements of a shard over dp are taken from a wrong place",
    ),
]

SCALE = [
    Defect(
        "no-1/m",
        "train.py",
        ((SHARE, "share = 1 / mesh.dp.size"),),
        layout(2, 1),
        "3 to the right ones. m: the loss is not divided by the number of micro-batches",
        quick=True,
    ),
    Defect(
        "no-1/dp",
        "train.py",
        ((SHARE, "share = 1 / m"),),
        layout(2, 1),
        "2 to the right ones. dp: the loss is not divided by the number of data ranks",
    ),
    Defect(
        "no-1/(m*dp)",
        "train.py",
        ((SHARE, "share = 1"),),
        layout(2, 1),
        "6 to the right ones. m * dp: the loss is divided neither by the number of micro-batches nor",
    ),
    Defect(
        "1/pp-too",
        "train.py",
        ((SHARE, "share = 1 / (m * mesh.dp.size * mesh.pp.size)"),),
        grid(1, 2, m="not_a_multiple"),
        "1 / pp: the loss is divided by the number of pipeline stages",
    ),
    Defect(
        "weight-not-used",
        "parallel/pipeline.py",
        (("torch.full_like(y, self.weight / len(y))", "torch.full_like(y, 1 / len(y))"),),
        one_process("sgd-0.0-none"),
        "24 to the right ones. m: the loss is not divided by the number of micro-batches",
    ),
    Defect(
        "loss-of-every-tp-rank",
        "train.py",
        (("loss = loss if mesh.tp.rank == 0 else 0 * loss", "loss = 1 * loss"),),
        layout(1, 2),
        "Every tp rank has the same loss: only one of them may add it",
    ),
    Defect(
        "cross-entropy-doubled",
        "reference.py",
        (("p *= (weights / total)[:, None]", "weights = 2 * weights\n        p *= (weights / total)[:, None]"),),
        cross_entropy(1),
        "dx of rank 0 is 2 times what it should be",
    ),
]

REDUCTION = [
    Defect(
        "reduced-with-every-micro-batch",
        "parallel/zero.py",
        (("        elif not last:\n            return\n", ""),),
        layout(2, 1),
        "a sum over dp is reduced again with every micro-batch",
    ),
    Defect(
        "last-always",
        "parallel/pipeline.py",
        (("last=self.passes[name] == 0", "last=True"),),
        layout(2, 1),
        "a sum over dp is reduced again with every micro-batch",
    ),
    Defect(
        "reduced-with-the-first-micro-batch",
        "parallel/zero.py",
        (("        elif not last:\n", "        elif last == (bucket.stage == 1):\n"),),
        grid(2, 1, zero=1, m="twice"),
        "Gradients are reduced after the first micro-batch",
    ),
    Defect(
        "not-reduced",
        "parallel/zero.py",
        (('self.summing[bucket] = all_reduce(bucket.grad, bucket.dp, "gradients")', "pass"),),
        layout(2, 1),
        "gradients are not reduced over the data ranks",
    ),
    Defect(
        "only-the-last-counts",
        "parallel/zero.py",
        (("bucket.own_grad.add_(shard)", "bucket.own_grad.copy_(shard)"),),
        grid(2, 1, zero=2, m="twice"),
        "Only the last micro-batch counts: gradients are overwritten instead of added",
        quick=True,
    ),
    Defect(
        "added-to-while-it-travels",
        "parallel/zero.py",
        (("while bucket in self.summing:", "while bucket in self.summing and bucket.stage < 2:"),),
        grid(2, 1, zero=2, m="twice"),
        "Its buffer is reduced before that, or changes while it is sent",
    ),
    Defect(
        "weights-overwritten",
        "reference.py",
        (("gradient.addmm_(a, b)\n", "gradient.copy_(a @ b)\n"),),
        one_process("sgd-0.0-none"),
        "Only the last micro-batch counts: gradients are overwritten instead of added",
    ),
    Defect(
        "reduced-before-W",
        "parallel/pipeline.py",
        (
            (
                "            while products and products[0].w.spec.bucket == name:\n",
                "            self._reduce(name)\n"
                "            [pending.wait() for pending in self.zero.summing.values()]\n"
                "            while products and products[0].w.spec.bucket == name:\n",
            ),
            ("            self._reduce(name)\n        assert not products", "        assert not products"),
        ),
        grid(2, 2, "zb-h1", m="not_a_multiple"),
        "the bucket is reduced before its gradient is complete. Only weight matrices differ. W adds their gradients",
    ),
    Defect(
        "W-drops-products",
        "parallel/pipeline.py",
        (("products.popleft().add()", "products.popleft()"),),
        grid(1, 2, "zb-h1"),
        "by the ratio 0: weight matrices. Their gradient never arrives",
    ),
    Defect(
        "word-table-reduced-after-the-head",
        "parallel/pipeline.py",
        (("[name for name in names if name not in seen]", "list(names)"),),
        layout(2, 1),
        "Only the word table differs",
    ),
    Defect(
        "not-gathered",
        "parallel/zero.py",
        (("if bucket.stage in (1, 2)", "if bucket.stage == 2"),),
        grid(2, 1, zero=1, m="one"),
        "The shards of other data ranks are not gathered",
    ),
    Defect(
        "not-gathered-after-the-update",
        "train.py",
        (("        zero.publish()\n", ""),),
        grid(2, 1, zero=1, m="one"),
        "still have their initial values. Another data rank owns and has updated them: new parameters are not gathered",
        quick=True,
    ),
    Defect(
        "same-samples-on-every-data-rank",
        "data.py",
        (
            (
                "yield micro_batch_samples(consumed_samples, micro_batch, dp_rank,",
                "yield micro_batch_samples(consumed_samples, micro_batch, 0,",
            ),
        ),
        layout(2, 1),
        "they read the same samples",
    ),
]

TENSOR_PARALLEL = [
    Defect(
        "partial-gradients-not-summed",
        "parallel/zero.py",
        (("if what := replica_sums(self.config, self.mesh.dp.size):", "if False:"),),
        layout(1, 2, True),
        "Partial gradients are not summed over the tp ranks",
    ),
    Defect(
        "cut-instead-of-replicated",
        "parallel/zero.py",
        ((REPLICATED, "for r in bucket.ranges if r.cut]"),),
        layout(1, 2, True),
        "Only replicated parameters may be summed over tp",
    ),
    Defect(
        "all-gradients-summed-over-tp",
        "parallel/zero.py",
        ((REPLICATED, "for r in bucket.ranges]"),),
        layout(1, 2, True),
        "Only replicated parameters may be summed over tp",
    ),
    Defect(
        "whole-gradients-summed",
        "parallel/zero.py",
        (
            (
                "                    part.mul_(0)  # keeps a nan, so that all ranks skip the step\n",
                "                    pass\n",
            ),
        ),
        layout(3, 2),
        "Replicated parameters are summed over tp",
    ),
    Defect(
        "f-without-its-sum",
        "parallel/tensor.py",
        (('"copy": "all_reduce",', '"copy": None,'),),
        column(),
        "is its own share, not the sum over tp",
        quick=True,
    ),
    Defect(
        "g-without-its-sum",
        "parallel/tensor.py",
        (('        y = start(leave, y, tp, "activations").wait()\n', ""),),
        row(),
        "is its own share, not the sum over tp",
    ),
    Defect(
        "sum-in-g's-backward",
        "parallel/tensor.py",
        (
            (
                "        dx = dy @ w.flatten(0, -2)\n",
                "        dx = dy @ w.flatten(0, -2)\n"
                '        if ctx.leave == "all_reduce":\n            dx = dx * tp.size\n',
            ),
        ),
        row(),
        "is t times too large: every rank has the same dy",
    ),
    Defect(
        "positions-of-rank-0",
        "model.py",
        (("row = row.chunk(self.tp.size)[self.tp.rank]", "row = row.chunk(self.tp.size)[0]"),),
        layout(1, 2, True),
        "the rows of each tp rank (their positions, their dropout masks)",
    ),
]

NORM = [
    Defect(
        "norm-twice-over-tp",
        "parallel/zero.py",
        ((COUNTS, "return first_of_dp and bucket.holders.rank == 0"),),
        layout(1, 2),
        "the norm if parameters that are replicated over tp count on every tp rank",
    ),
    Defect(
        "norm-twice-over-dp",
        "parallel/zero.py",
        ((FIRST_OF_DP, "first_of_dp = True"),),
        layout(2, 1),
        "the norm if each data rank counts all elements",
    ),
    Defect(
        "norm-twice-over-holders",
        "parallel/zero.py",
        ((COUNTS, "return first_of_dp and (cut or self.mesh.tp.rank == 0)"),),
        grid(1, 2),
        "the norm if a bucket with several holders counts once per holder",
    ),
    Defect(
        "norm-of-one-data-rank",
        "parallel/zero.py",
        ((FIRST_OF_DP, "first_of_dp = bucket.dp.rank == 0"),),
        grid(2, 1, zero=1, m="one"),
        "the norm if only the shards of data rank 0 count",
    ),
    Defect(
        "lamb-norms-of-shards",
        "parallel/optimizer.py",
        (("    if sharded:\n", "    if False:\n"),),
        grid(2, 1, zero=1, m="one"),
        "computed from the norm of a shard over dp?",
    ),
    Defect(
        "lamb-norms-of-slices",
        "parallel/optimizer.py",
        (('    squares = all_reduce(squares, mesh.tp, "parameter norms").wait()\n', ""),),
        grid(1, 1, tp=2, m="one"),
        "computed from the norm of a slice over tp?",
    ),
]

TIED = [
    Defect(
        "tied-not-summed",
        "parallel/zero.py",
        ((f"wait_for([{TWINS} for bucket in by_name])", "pass"),),
        grid(1, 2),
        "Partial gradients are not summed over the holders",
    ),
    Defect(
        "tied-summed-twice",
        "parallel/zero.py",
        ((TWINS, 'all_reduce(all_reduce(bucket.own_grad, bucket.holders, "x").wait(), bucket.holders, "x")'),),
        grid(1, 2),
        "Their gradient is summed over the holders twice",
    ),
]

VOCABULARY = [
    Defect(
        "targets-of-the-whole",
        "parallel/tensor.py",
        (("ops.cross_entropy_(z, targets - start, columns", "ops.cross_entropy_(z, targets, columns"),),
        cross_entropy(),
        "is made with targets that are not counted from the slice's first column",
    ),
    Defect(
        "padding-in-the-softmax",
        "parallel/tensor.py",
        (("columns = min(max(vocab_size - start, 0), len(w))", "columns = len(w)"),),
        cross_entropy(1),
        "the loss of rank 0 is made with the padding in the softmax",
    ),
    Defect(
        "maximum-of-the-slice",
        "reference.py",
        (('        top = reduce(top, "max")\n', "        pass\n"),),
        cross_entropy(),
        "is made with the maximum of each slice",
    ),
    Defect(
        "losses-not-filled",
        "parallel/tensor.py",
        (("ctx.losses[rows] = cross_entropy_(z, w,", "cross_entropy_(z, w,"),),
        cross_entropy(1),
        "the loss of rank 0 is nan: backward has not filled it in",
    ),
    Defect(
        "ids-of-other-ranks",
        "parallel/tensor.py",
        (("local.where(mine, 0)).mul_(mine[:, None])", "local.where(mine, 0))"),),
        embedding(),
        "is not 0 for ids of other ranks before the sum",
    ),
    Defect(
        "gradient-of-ids-of-other-ranks",
        "reference.py",
        (("(rows * mine[:, None]).to(", "rows.to("),),
        embedding(),
        "is the gradient of all tokens, also of those with ids of other ranks",
    ),
]

PIPELINE = [
    Defect(
        "used-again-before-it-is-sent",
        "parallel/pipeline.py",
        (
            (
                "        self.leaving.append((send(values,",
                "        values.data.zero_()\n        self.leaving.append((send(values,",
            ),
        ),
        grid(1, 2),
        "freed or used again before its message has left",
    ),
    Defect(
        "message-of-another-micro-batch",
        "parallel/pipeline.py",
        ((RECEIVE, 'return self.mail.receive((kind, j ^ 1 if kind == "activation" else j, c))'),),
        grid(1, 2, "gpipe"),
        "Is a message of another micro-batch received?",
    ),
    Defect(
        "warm-up-of-the-wrong-end",
        "parallel/schedules.py",
        (("        warmup = stages - 1 - rank", "        warmup = rank"),),
        "test_schedules.py::test_every_action_once_in_an_order_that_can_be",
        "1f1b: deadlock",
    ),
    Defect(
        "W-in-forward's-order",
        "parallel/pipeline.py",
        (
            (
                "for names in reversed(self.chunks[c].reduce_after) for name in names",
                "for names in self.chunks[c].reduce_after for name in names",
            ),
        ),
        grid(1, 2, "zb-h1"),
        "a weight gradient of a bucket that this chunk does not use",
    ),
    Defect(
        "micro-batches-not-all-drawn",
        "parallel/pipeline.py",
        (("        self.batch(count - 1)", "        # self.batch(count - 1)"),),
        "test_pipeline.py::test_a_schedule_whose_ranks_hold_different_buckets_with_different_ranks[sgd]",
        "Step 1 is right. Does a step leave something in a buffer? Do ranks draw different numbers of micro-batches?",
    ),
    Defect(
        "another-mask-in-recomputation",
        "parallel/pipeline.py",
        (
            (
                "y = chunk.units[i](x, batch)",
                "y = chunk.units[i](x, type(batch)(**vars(batch) | {'rows': batch.rows + 1}))",
            ),
        ),
        one_process("sgd-0.1-full"),
        "it must draw the same dropout masks",
        quick=True,
    ),
    Defect(
        "layers-counted-from-0",
        "parallel/pipeline.py",
        (
            (
                "            self.chunks[chunk] = Chunk(",
                "            for i, number in enumerate(numbers):\n"
                "                model.units[number].index = i\n"
                "            self.chunks[chunk] = Chunk(",
            ),
        ),
        grid(1, 2),
        "layers counted per stage",
    ),
]

OPERATIONS = [
    Defect(
        "attention-sees-later-tokens",
        "reference.py",
        (("is_causal=q.shape[2] == k.shape[2]", "is_causal=False"),),
        "test_tensor.py::test_attention_is_causal_softmax",
        "attention is that of all tokens, later ones too",
    ),
    Defect(
        "attention-without-its-scale",
        "reference.py",
        (("is_causal=q.shape[2] == k.shape[2])", "is_causal=q.shape[2] == k.shape[2], scale=1.0)"),),
        "test_tensor.py::test_attention_is_causal_softmax",
        "attention is made without the factor 1 / sqrt(d)",
    ),
    Defect(
        "mask-of-the-row-in-the-slice",
        "reference.py",
        (("key = mix(drop.rows + mix(", "key = mix(torch.arange(len(drop.rows)) + mix("),),
        "test_tensor.py::test_dropout_masks_are_functions_of_seed_site_row_and_column",
        "the mask of some rows depends on other rows",
    ),
    Defect(
        "dropout-not-scaled-in-backward",
        "reference.py",
        (("return Dropout.masked(dy, Drop(", "return (1 - ctx.rate) * Dropout.masked(dy, Drop("),),
        "test_tensor.py::test_dropout_scales_and_its_backward_uses_the_same_mask",
        "the gradient of dropout is 0.75 times what it should be",
    ),
]

ASYNCHRONOUS = [
    Defect(
        "no-weight-stashing",
        "parallel/pipedream.py",
        (("    def _backward(self, j, c, deferred):\n        self._show(j)\n", LATEST),),
        asynchronous("pipedream", 4),
        "The loss is right: a backward does not use the weights of its forward",
    ),
    Defect(
        "one-version-too-old",
        "parallel/schedules.py",
        (("[max(j - (stages - 1 - rank), 0)", "[max(j - (stages - rank), 0)"),),
        asynchronous("pipedream", 3),
        "a forward uses a wrong version of the weights",
    ),
    Defect(
        "2bw-without-a-delay",
        "parallel/schedules.py",
        (("[max(j // m - 1, 0)", "[max((j - stages + 1) // m, 0)"),),
        asynchronous("pipedream-2bw", 2),
        "a forward uses a wrong version of the weights",
    ),
    Defect(
        "tied-sums-in-the-wrong-order",
        "parallel/pipedream.py",
        (("self.sums.popleft()", "self.sums.pop()"),),
        asynchronous("pipedream", 2),
        "or an update before was wrong",
    ),
]

COLUMN, COLUMN_SP = late("check_column_parallel-copy"), late("check_column_parallel-all_gather")
ROW, ROW_SP = late("check_row_parallel-all_reduce"), late("check_row_parallel-reduce_scatter")
WORDS, WORDS_SP = late("check_embedding-all_reduce"), late("check_embedding-reduce_scatter")
HEAD, HEAD_SP = late("check_linear_cross_entropy-copy"), late("check_linear_cross_entropy-all_gather")
ZERO = [
    late_layout("2-1-1-1f1b-0-False-none-sgd-twice"),
    late_layout("2-1-1-1f1b-1-False-none-adamw-twice"),
    late_layout("2-1-1-1f1b-2-False-none-sgd-twice"),
    late_layout("2-1-1-1f1b-3-False-full-adamw-twice"),
]
LAMB, LARS = (
    late_layout("2-2-1-1f1b-1-True-full-lamb-twice"),
    late_layout("1-2-2-1f1b-0-False-none-lars-not_a_multiple"),
)
GPIPE = late_layout("1-1-2-gpipe-0-False-none-sgd-twice")
PIPEDREAM = "testing/test_adversary.py::test_an_asynchronous_layout[pipedream-1-1-4-0-False-full-0.1-5+7-sgd]"

WAITS = {  # {file: [(data, line with `wait`, test, call)]}
    "parallel/tensor.py": [
        ("x", 'start(enter, x, tp, "activations").wait()', COLUMN_SP, "all_gather of activations over tp"),
        ("y", 'start(leave, y, tp, "activations").wait()', ROW, "all_reduce of activations over tp"),
        ("rows-of-y", 'start(leave, y, tp, "activations").wait()', ROW_SP, "reduce_scatter of activations over tp"),
        ("dy", 'dy, tp, "activations").wait()', ROW_SP, "all_gather of activations over tp"),
        ("x-in-backward", "gathering.wait()", COLUMN_SP, "all_gather of activations over tp"),
        ("dx", "sending.wait()", COLUMN, "all_reduce of activations over tp"),
        ("rows-of-dx", "sending.wait()", COLUMN_SP, "reduce_scatter of activations over tp"),
        ("words", 'start(leave, y, tp, "embedding").wait()', WORDS, "all_reduce of embedding over tp"),
        ("rows-of-words", 'start(leave, y, tp, "embedding").wait()', WORDS_SP, "reduce_scatter of embedding over tp"),
        ("dy-of-words", 'dy, ctx.tp, "embedding").wait()', WORDS_SP, "all_gather of embedding over tp"),
        ("x-of-the-head", '"head").wait()\n        dx = torch', HEAD_SP, "all_gather of head over tp"),
        ("x-of-a-validation", '"head").wait()\n    return torch', HEAD_SP, "all_gather of head over tp"),
        ("dx-of-the-head", 'dx, tp, "head").wait()', HEAD, "all_reduce of head over tp"),
        ("the-softmax", '"cross-entropy rows", op).wait()', HEAD, "all_reduce of cross-entropy rows over tp"),
    ],
    "parallel/zero.py": [
        ("parameters", "self.gathering[name].wait()", ZERO[3], "all_gather of parameters over dp"),
        ("gradients", "self.summing.pop(bucket).wait()", ZERO[0], "all_reduce of gradients over dp"),
        ("shards-of-gradients", "self.summing.pop(bucket).wait()", ZERO[2], "reduce_scatter of gradients over dp"),
        ("twins", "        pending.wait()", GPIPE, "all_reduce of twin gradients over holders"),
        ("partial-sums", "        pending.wait()", LAMB, "all_reduce of partial gradients over tp"),
    ],
    "parallel/optimizer.py": [
        ("norms-of-shards", 'mesh.dp, "parameter norms").wait()', LAMB, "all_reduce of parameter norms over dp"),
        ("norms-of-slices", 'mesh.tp, "parameter norms").wait()', LAMB, "all_reduce of parameter norms over tp"),
        ("equal-norms", 'holders, "parameter norms").wait()', LARS, "all_reduce of parameter norms over holders"),
    ],
    "parallel/pipeline.py": [("a-message", "self.arriving.pop(key).wait()", GPIPE, "receive of a message over pp")],
    "parallel/pipedream.py": [
        ("tied-sums", "self.sums.popleft().wait()", PIPEDREAM, "all_reduce of twin gradients over holders"),
    ],
    "train.py": [("the-norm", 'mesh.world, "scalars").wait()', ZERO[0], "all_reduce of scalars over world")],
}  # fmt: skip
WITHOUT_WAIT = [
    Defect(f"no-wait-for-{data}", file, ((line, line.replace(".wait()", ".result")),), test, f"without `wait`: {call}")
    for file, rows in WAITS.items()
    for data, line, test, call in rows
]

BUFFERS = [
    Defect(
        "new-parameters-read-before-wait",
        "parallel/zero.py",
        (("self.gathering[name].wait()", "self.gathering[name].result"),),
        ZERO[1],
        "read before `wait`: the result of all_gather of parameters over dp",
    ),
    Defect(
        "freed-before-it-is-sent",
        "parallel/pipeline.py",
        (
            ("        pending.wait()\n", ""),
            ("            self.meter.forget(x)\n", "            self.meter.forget(x)\n        pending.wait()\n"),
        ),
        GPIPE,
        "freed before `wait`: a buffer of send of activations over pp",
        quick=True,
    ),
    Defect(
        "overwritten-before-it-is-sent",
        "parallel/pipeline.py",
        (("        self.meter.hold(values)\n", "        self.meter.hold(values)\n        values.data.zero_()\n"),),
        GPIPE,
        "elements of a buffer of send of activations over pp",
    ),
    Defect(
        "gradient-used-again-while-it-is-reduced",
        "parallel/zero.py",
        (("while bucket in self.summing:", "while False:"),),
        ZERO[2],
        "elements of a buffer of reduce_scatter of gradients over dp",
    ),
    Defect(
        "gradient-freed-while-it-is-reduced",
        "parallel/zero.py",
        (
            (
                "        shard = self.summing.pop(bucket).wait()\n",
                "        free(bucket.grad)\n        shard = self.summing.pop(bucket).wait()\n",
            ),
        ),
        ZERO[2],
        "freed before `wait`: a buffer of reduce_scatter of gradients over dp",
    ),
    Defect(
        "parameters-freed-while-they-are-gathered",
        "parallel/zero.py",
        (
            (
                "            self.gathering[name].wait()\n",
                "            free(self.buckets[name].param)\n            self.gathering[name].wait()\n",
            ),
        ),
        ZERO[3],
        "freed before `wait`: a buffer of all_gather of parameters over dp",
    ),
    Defect(
        "tied-sums-in-one-buffer",
        "parallel/pipedream.py",
        (("flat = self.spare_sums.pop()", "flat = self.spare_sums[-1]"),),
        PIPEDREAM,
        "elements of a buffer of all_reduce of twin gradients over holders",
    ),
    Defect(
        "received-in-another-order",
        "parallel/pipeline.py",
        (
            (
                "        self.arriving = {}",
                "        if rank:\n            self.queue.insert(1, self.queue.popleft())\n        self.arriving = {}",
            ),
        ),
        GPIPE,
        "in another order",
    ),
]

GROUPS = [INITIAL, SCALE, REDUCTION, TENSOR_PARALLEL, NORM, TIED, VOCABULARY, PIPELINE, OPERATIONS, ASYNCHRONOUS]
GROUPS += [WITHOUT_WAIT, BUFFERS]
DEFECTS = [defect for group in GROUPS for defect in group]


# --- planting ---------------------------------------------------------------------------------------------------------


def planted(text, defect):
    """Return the file's text with the defect in it. Raises ValueError unless each old text occurs exactly once."""
    for old, new in defect.edits:
        if text.count(old) != 1:
            line = old.strip().splitlines()[0]
            raise ValueError(
                f"defect {defect.name}: the line `{line}` is in {defect.file} {text.count(old)} times, not once"
            )
        text = text.replace(old, new)
    return text


def plant(defect, folder):
    """Copy the files that git knows to a new folder, and plant the defect there."""
    text = planted((ROOT / defect.file).read_text(encoding="utf-8"), defect)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for path in filter(None, listed.stdout.split("\0")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
    (folder / defect.file).write_text(text, encoding="utf-8")


def failure(folder, test):
    """Run a test in a folder. Return the message of its failure, or None if it passes."""
    report = folder / "report.xml"
    options = "-q -x -p no:cacheprovider --tb=short".split()
    command = [sys.executable, "-m", "pytest", *options, "-m", "", f"--junitxml={report}", test]  # -m "": also the grid
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise ValueError(f"pytest cannot run {test}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = [node for kind in ("failure", "error") for node in ElementTree.parse(report).iter(kind)]
    return said(found[0].text) if found else None


def said(report):
    """Return a failure's message without the source lines that pytest prints with it.

    pytest marks a message by `E` and repeats the expression of an assert after it. A message without a traceback
    (`pytest.fail(..., pytrace=False)`) has no marks. The source lines of a rank's traceback are indented.
    """
    marked = [line[1:].strip() for line in report.splitlines() if line.startswith("E ")]
    text = "\n" + ("\n".join(marked) or report)
    text = text.partition("\nassert ")[0].strip()
    if "Traceback (most recent call last)" in text:
        text = "\n".join(line for line in text.splitlines() if not line.startswith("  "))
    return text.removeprefix("Failed: ").removeprefix("AssertionError: ")


def message_of(defect, folder):
    plant(defect, folder)
    return failure(folder, defect.test)


def main():
    """Print the list of the mistakes, or put the named ones in and print the messages of their tests."""
    names = sys.argv[1:]
    by_name = {defect.name: defect for defect in DEFECTS}
    wrong = [name for name in names if name not in by_name and names != ["all"]]
    if wrong:
        sys.exit(f"error: there is no defect {wrong[0]}; python -m testing.defects lists them")
    if not names:
        for defect in DEFECTS:
            print(f"{defect.name:<36} {defect.file:<22} {defect.test}")
    for name in by_name if names == ["all"] else names:
        defect = by_name[name]
        with tempfile.TemporaryDirectory() as folder:
            print(f"--- {name}, in {defect.file}: {defect.test}\n{message_of(defect, Path(folder))}\n", flush=True)


if __name__ == "__main__":
    main()
