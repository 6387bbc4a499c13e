"""A wait that is not hidden moves its row of the table. Waits are compared with each other, not with a limit."""

import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import train
from accounts import clock, report
from errors import UserError
from parallel.comm import Pending, all_reduce, receive, send
from parallel.mesh import Mesh
from parallel.zero import Bucket
from testing.tiny import built, tiny_batches, tiny_config

FB = ("forward", "backward")
D = 40  # milliseconds of a communication: long beside the work of a tiny model


def watched(mesh, device="cpu"):
    config = SimpleNamespace(delay=D, trace="")
    return SimpleNamespace(mesh=mesh, config=config, counters=SimpleNamespace(iteration=0), device=torch.device(device))


def repeated(pp, hidden):
    """Exchange a tensor, and compute for `hidden` ms meanwhile. pp=2: rank 1 computes before it sends a message."""
    mesh, x = Mesh(pp=pp), torch.ones(4)
    run, late = watched(mesh), pp == 2 and mesh.rank == 1
    times = clock.Clock(run)
    with mesh.watch("forward"):
        for run.counters.iteration in range(6):
            pending = None if late else receive((4,), x, mesh.pp, 1) if pp == 2 else all_reduce(x, mesh.data, "data")
            time.sleep(hidden / 1000 * (late or pp == 1))
            (pending or send(x, mesh.pp, 0, "data")).wait()
    ((row, numbers),) = times.table(mesh).items()
    return row, *numbers


@pytest.mark.slow
def test_what_is_computed_meanwhile_is_no_wait_and_a_bubble_no_wire(workers):
    alone, hidden, bubble = (workers.run(2, repeated, *more)[0] for more in ((1, 0), (1, 4 * D), (2, 4 * D)))
    assert alone[:2] == hidden[:2] == (("forward", "data", "data", "all_reduce"), 1) and alone[3] > 2 * hidden[3]
    assert bubble[:2] == (("forward", "pp", "data", "receive"), 1) and bubble[2] > 2 * bubble[3] > 0


def test_a_send_that_has_left_holds_nobody_up_before_it_is_due():
    late = clock.DelayedWork(SimpleNamespace(wait=lambda: None), 60)
    late.thread.join()
    assert not late.is_completed()
    late.due = 0.0
    assert late.is_completed()


def waiting_at_once(bucket, start=Bucket.start_gather):
    start(bucket)
    if bucket.gathering:
        bucket.gathering.wait()


def table(config, planted=False):
    """Return (`Clock.table`, calls of a step in the ledger, receives of this rank in four steps).

    planted: each gather of ZeRO-3 is waited for at once.
    """
    run = built(config)
    batches, ledger = tiny_batches(run), run.mesh.watch.ledger
    times = clock.Clock(run)
    with mock.patch.object(Bucket, "start_gather", [Bucket.start_gather, waiting_at_once][planted]):
        for _ in range(4):
            train.train_step(run, batches)
    found = times.table(run.mesh)
    assert "of it wire" in report.waited_table(ledger, 4, found)
    received = sum(call.row[3] == "receive" for call in times.ended())
    return found, {row: calls / 4 for row, (calls, _) in ledger.rows.items() if row[0] != "setup"}, received


@pytest.mark.slow
def test_a_planted_wait_moves_the_column(workers):
    """Each gather runs beside that of the unit before, so a step waits for half of them."""
    config, rows = tiny_config(2, zero=3, num_layers=4, delay=D), [(p, "data", "parameters", "all_gather") for p in FB]
    tables = [workers.run(2, table, config, planted)[0][0] for planted in (False, True)]
    usual, planted = ([t[row] for row in rows] for t in tables)
    assert [calls for calls, *_ in usual] == [21, 21]  # three micro-batches, seven buckets
    assert all(more[2] > 1.4 * few[2] > 0 for more, few in zip(planted, usual, strict=True))


def test_the_clock_has_the_ledgers_rows_and_receives(workers):
    ranks = workers.run(8, table, tiny_config(2, 2, pp=2, zero=1, micro_batch_size=2))
    (times, counted, _), receives = ranks[0], {("backward", "pp", "gradients of activations", "receive"): 6}
    assert {received for *_, received in ranks} == {4 * 6}
    assert {row: calls for row, (calls, *_) in times.items()} == counted | receives


def test_on_a_gpu_no_step_waits_for_the_marks(monkeypatch):
    """Marks are events. The host waits before it reads them."""
    ticks, synchronize, work, mesh = iter(range(100)), mock.Mock(), mock.Mock(), Mesh()

    class Event:
        def __init__(self, enable_timing):
            self.record = lambda: setattr(self, "time", next(ticks))

        def elapsed_time(self, other):
            return other.time - self.time

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    run, axis = watched(mesh, "cuda"), SimpleNamespace(name="data", ranks=(0, 1))
    with pytest.raises(UserError, match="delay"), report.watching(run, print):
        pass
    run.config.delay = 0
    times = clock.Clock(run)
    with mesh.watch("reduce"):
        for run.counters.iteration in range(3):
            mesh.watch.started(Pending(None, work), axis, "gradients", "all_reduce").wait()
    assert synchronize.call_count == 0 and work.wait.call_count == 3
    row = "reduce", "data", "gradients", "all_reduce"
    assert times.table(mesh) == {row: [1, 1, 1]}

    def with_a_late_rank(calls, world):
        return [calls, [(*call, ended, ended) for *call, _, ended in calls]]  # it does not wait

    monkeypatch.setattr(clock, "gather_objects", with_a_late_rank)
    assert times.table(mesh) == {row: [1, 1, 0]}, "rank 0 waits for rank 1, and not for the wire"
