"""Test the signs of life of a long step."""

import re
from datetime import timedelta
from types import SimpleNamespace

import pytest

import train
from recovery import signs
from testing.tiny import AfterActions, built, tiny_batches, tiny_config


def lines_of_a_step(config):
    """Return the lines after each action of a step. The two last actions follow a signal."""
    run, said, whole = built(config), [], []
    left = iter(range(len(run.schedule.actions[run.mesh.pp.rank]), 0, -1))

    def observe():
        run.signals.stop, turns = next(left) <= 2, iter([False, True])
        signs.observe(run, said.append, SimpleNamespace(wait=lambda _: next(turns)))
        whole.append(signs.how_far(run.executor, run.executor.work - 1).split()[-1])  # a unit of work takes a second

    run.mesh.watch.tools.append(AfterActions(observe))
    run.watchdog.progress("iteration 1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signs, "FIRST_LINE", 0)
        train.train_step(run, tiny_batches(run))
    return said, whole, str(timedelta(seconds=run.executor.work))


def test_a_long_step_says_how_far_it_is_and_a_signal_is_answered():
    said, *_ = lines_of_a_step(tiny_config(1))  # 3 micro-batches
    assert [re.search("micro-batch (. of 3)", line)[1][0] for line in said] == list("112233")
    assert ["second Ctrl-C" in line for line in said] == [False] * 4 + [True] * 2


def test_the_estimate_of_a_step_does_not_follow_a_hang(monkeypatch):
    run, said, now = built(tiny_config(1)), [], [0]
    monkeypatch.setattr(signs.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "1")

    def hang():
        run.mesh.watch.tools.pop()

        def wait(_):
            now[0] += 10
            run.signals.stop = now[0] > 140
            return now[0] > 150

        signs.observe(run, said.append, SimpleNamespace(wait=wait))

    run.mesh.watch.tools.append(AfterActions(hang))
    run.watchdog.progress("iteration 1")
    train.train_step(run, tiny_batches(run))
    *lines, signalled = said
    assert len({re.search(r"the step takes about (.*?)(;|$)", line)[1] for line in lines}) == 1
    assert [line.partition("no progress in the last ")[2] for line in lines] == ["", "0:00:30", "0:01:10"]
    assert "--shutdown-timeout (default: 30 s), Slurm (scancel, preemption) after KillWait" in signalled


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zb-v", 2), ("chimera", 1)])
def test_the_length_of_a_step_is_known_after_each_action(workers, schedule, chunks):
    config = tiny_config(1, pp=2, schedule=schedule, chunks=chunks, num_layers=3, micro_batch_size=6)
    for _, whole, work in workers.run(2, lines_of_a_step, config):
        assert {*whole} - {"0:00:00"} == {work}  # 0:00:00: not known yet
