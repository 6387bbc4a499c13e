"""Tests of testing/adversary.py: it catches bugs that Gloo hides, and the program has none of them.

`ADVERSARY=1 pytest test_layouts.py parallel recovery/test_replicas.py` runs all layouts in this mode. The layouts
of this file call every communication of the program.
"""

import contextlib
import re
from datetime import timedelta
from unittest import mock

import pytest
import torch

import testing.adversary
from parallel import comm
from parallel.comm import all_gather, all_reduce, receive, send
from parallel.mesh import Mesh
from testing import points
from testing.adversary import Caught, adversary
from testing.record import check_layout
from testing.test_changes import CHANGES
from testing.tiny import configured, few, tiny_config, validation_losses

# --- programs with a bug, on two ranks --------------------------------------------------------------------------------


def read_before_wait(axis):
    x = torch.ones(4)
    pending = all_reduce(x, axis, "first")
    y = (x * 3 + 1).exp().sum()
    pending.wait()
    all_reduce(y, axis, "second").wait()


def no_wait(axis):
    all_reduce(torch.ones(4), axis, "first")
    all_reduce(torch.ones(4), axis, "second").wait()


def input_changed(axis):
    x = torch.ones(4)
    pending = all_gather(x, axis, "first")
    x[2] = 5
    pending.wait()


def freed(axis):
    x = torch.ones(4)
    pending = all_gather(x, axis, "first")
    x.untyped_storage().resize_(0)
    pending.wait()


def used_before_it_is_written(axis):
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    all_reduce(x, axis, "first").wait()


def both_send_first(axis):
    sending = send(torch.ones(4), axis, 1 - axis.rank, "first", tag=axis.rank)
    receive((4,), torch.ones(4), axis, 1 - axis.rank, tag=1 - axis.rank).wait()
    sending.wait()


def no_wait_in_a_new_function(axis):
    """In comm.py, the outer function does not know its axis, and the inner one calls it `node`."""
    text = "lambda *chain: (lambda x, node, what: all_reduce(x, node, what))(*chain)"
    eval(compile(text, comm.__file__, "eval"), vars(comm))(torch.ones(4), axis, "first")
    all_reduce(torch.ones(4), axis, "second").wait()


PROGRAMS = {  # {program: the error of rank 0, a regular expression}
    read_before_wait: r"read before `wait`: the result of all_reduce of first over data \(rank 0, test_adversary.py "
    r"line \d+\)\. Its poison is sent by all_reduce of second over data",
    no_wait: "without `wait`: all_reduce of first over data",
    no_wait_in_a_new_function: "without `wait`: <lambda> of first over data",
    input_changed: "changed before `wait`: 1 of 4 elements of a buffer of all_gather of first over data",
    freed: "freed before `wait`: a buffer of all_gather of first over data",
    used_before_it_is_written: "nan is sent by all_reduce of first over data .* or memory before it was written",
    both_send_first: "not joined by all ranks, or messages in another order: .* over data",
}


def outcome(program, mode):
    """Return a program's error on this rank, or None."""
    axis = Mesh(timeout=30).data
    try:
        with (
            mock.patch.object(testing.adversary, "PATIENCE", timedelta(seconds=3)),
            adversary() if mode else contextlib.nullcontext(),
        ):
            program(axis)
    except Caught as error:
        return str(error)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gloo_hides_a_bug_and_the_adversary_names_it(workers, program):
    if program is not freed:  # Gloo crashes
        assert workers.run(2, outcome, program, False) == [None, None]
    message = workers.run(2, outcome, program, True)[0]
    assert message and re.match(PROGRAMS[program], message), message


# --- the program ------------------------------------------------------------------------------------------------------


@pytest.fixture
def late(workers):
    """The workers, in this mode."""
    before, workers.adversary = workers.adversary, True
    yield workers
    workers.adversary = before


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_losses_in_forward_wait_for_each_result(late, sequence_parallel):
    check_layout(late, 2, tiny_config(1, 2, sequence_parallel=sequence_parallel), change=CHANGES["squared_losses"])


# as in the grid: all schedules, ZeRO stages with and without a pipeline, optimizers, cp, copies
KEYS = "dp tp pp schedule zero sequence_parallel recompute optimizer micro_batches cp zero_copies".split()
LAYOUTS = [
    (2, 1, 1, "1f1b", 0, False, "none", "sgd", "twice"),
    (2, 1, 1, "1f1b", 1, False, "none", "adamw", "twice"),
    (2, 1, 1, "1f1b", 2, False, "none", "sgd", "twice"),
    (2, 1, 1, "1f1b", 3, False, "full", "adamw", "twice"),
    (2, 2, 1, "1f1b", 1, True, "full", "lamb", "twice"),
    (1, 2, 2, "1f1b", 0, False, "none", "lars", "not a multiple"),
    (2, 2, 1, "1f1b", 1, True, "none", "muon", "twice"),
    (1, 1, 2, "gpipe", 0, False, "none", "sgd", "twice"),
    (2, 1, 2, "interleaved", 1, False, "none", "sgd", "twice"),
    (2, 1, 2, "chimera", 2, False, "none", "sgd", "twice"),
    (2, 1, 2, "chimera", 1, False, "none", "sgd", "one"),  # its second pipeline uses no parameter
    (2, 1, 2, "zb-h1", 3, False, "full", "sgd", "twice"),
    (1, 1, 4, "zb-h2", 0, False, "none", "sgd", "twice"),
    (1, 2, 2, "zb-v", 0, True, "none", "adamw", "twice"),
    (2, 2, 2, "1f1b", 3, True, "full", "lamb", "stages"),
    (1, 1, 1, "1f1b", 2, False, "full", "sgd", "twice", 4),
    (1, 2, 1, "1f1b", 1, True, "none", "adamw", "twice", 2),
    (4, 1, 1, "1f1b", 2, False, "none", "sgd", "twice", 1, 2),
]


@pytest.mark.parametrize(
    "point",
    few([dict(zip(KEYS, values, strict=False)) for values in LAYOUTS], 5),
    ids=lambda point: "-".join(map(str, point.values())),
)
def test_a_layout_waits_for_each_result(late, point):
    check_layout(late, *points.fitted(**{"cp": 1} | point))


def test_a_validation_waits_for_each_result(late, tokens_dir, tmp_path):
    fields = dict(train_iters=1, dtype="fp64", comm_timeout=20.0)
    one = validation_losses(configured(tmp_path / "one", tokens_dir, **fields))
    many = late.run(2, validation_losses, configured(tmp_path / "many", tokens_dir, zero=3, **fields))
    assert many == pytest.approx([one] * 2, rel=1e-12), "a `wait` is missing"
