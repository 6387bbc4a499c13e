"""Schedules have each action once in a possible order, and messages that never deadlock.

Lists with a mistake show that simulation.py refuses them (`test_the_wrong_action_is_named`).
"""

import itertools

import pytest

from accounts.bubbles import simulate
from accounts.draw import main
from parallel import schedules, simulation
from parallel.schedules import (
    SCHEDULES,
    Action,
    alternate,
    downstream,
    each,
    one_f_one_b,
    pipelines,
    straight,
    upstream,
    usual_chunks,
)
from parallel.simulation import build, check_schedule, messages, routes
from testing.points import COST, all_of_them
from testing.tiny import refusal


def test_every_size_that_a_schedule_can_have_is_accepted():
    """The other tests leave out the sizes that a schedule refuses."""
    accepted = set(all_of_them(range(1, 9), range(1, 13)))
    for p, m in itertools.product(range(1, 9), range(1, 13)):
        wanted = {(name, p, m, 1) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")} | {("zb-v", p, m, 2)}
        wanted |= {("chimera", p, m, 1)} if p % 2 == 0 or p == 1 else set()
        wanted |= {("interleaved", p, m, v) for v in (2, 3) if m % p == 0}
        assert wanted <= accepted


@pytest.fixture
def mixed(monkeypatch):
    """Add the schedule "mixed": 1F1B with every second B cut into I and W. Neighbouring chunks cut different ones."""

    def every_second_cut(stages, microbatches, chunks=1):
        flushed = one_f_one_b(stages, microbatches, chunks)
        lists = [[] for _ in flushed.actions]
        for a in itertools.chain(*flushed.actions):
            cut = a.kind == "B" and (a.microbatch + a.chunk) % 2
            lists[a.chunk] += [a._replace(kind=kind) for kind in ("IW" if cut else a.kind)]
        return flushed._replace(name="mixed", actions=lists)

    monkeypatch.setitem(SCHEDULES, "mixed", every_second_cut)


def backwards(schedule):
    """Return {(micro-batch, chunk): its B or I}. A schedule may cut some B into I and W, and others not."""
    return {(a.microbatch, a.chunk): a for a in itertools.chain(*schedule.actions) if a.kind in "BI"}


# --- what a schedule does ---------------------------------------------------------------------------------------------


def test_every_action_once_in_an_order_that_can_be(mixed):
    """For any m, also m < p and m = 1. `test_the_wrong_action_is_named` has actions before their inputs."""
    for sizes in all_of_them(range(1, 6), range(1, 12)):
        schedule = build(*sizes)
        name, p, m, _ = sizes
        assert schedule.name == name and len(schedule.actions) == p and schedule.microbatches == m
        back, taken = backwards(schedule), routes(schedule)
        places = [(j, chunk) for j in range(m) for chunk in taken[j]]
        wanted = {Action(kind, *place) for place in places for kind in ("FIW" if back[place].kind == "I" else "FB")}
        events = {event.action: event for event in simulate(schedule, COST).events}
        assert len(events) == sum(len(actions) for actions in schedule.actions) and events.keys() == wanted, sizes
        for (kind, _, chunk), event in events.items():
            assert event.rank == schedule.placement[chunk] and event.end - event.start == pytest.approx(COST[kind])
        for rank, actions in enumerate(schedule.actions):
            own = sorted((e for e in events.values() if e.rank == rank), key=lambda e: e.start)
            assert [e.action for e in own] == actions
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))


def test_each_rank_holds_its_parts():
    down, vee = [0, 1, 2, 3], [0, 1, 2, 3, 3, 2, 1, 0]
    for name, parts, placement in [
        *((name, down, down) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")),
        ("interleaved", list(range(8)), down * 2),
        ("zb-v", list(range(8)), vee),
        ("chimera", down * 2, vee),
    ]:
        schedule = build(name, 4, 8, usual_chunks(name))
        assert (schedule.parts, schedule.placement) == (parts, placement)
    assert pipelines(schedule) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [upstream(schedule, c) for c in range(8)] == [None, 0, 1, 2, None, 4, 5, 6]
    assert [downstream(schedule, c) for c in range(8)] == [1, 2, 3, None, 5, 6, 7, None]


def short(actions):
    return " ".join(f"{kind}{j}" for kind, j, _ in actions)


def test_the_papers_pictures():
    """The first and the last of four ranks are as in the zero-bubble paper, figures 2 and 3."""
    lists = {name: [short(actions) for actions in build(name, 4, 8).actions] for name in ("1f1b", "zb-h1", "zb-h2")}
    assert lists["1f1b"][0] == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert lists["1f1b"][3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    assert lists["zb-h1"][0] == "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
    assert lists["zb-h1"][3] == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"
    assert lists["zb-h2"][0] == "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7"
    assert lists["zb-h2"][3] == "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7"
    assert short(build("chimera", 4, 4).actions[0]) == "F0 F2 F1 B1 F3 B3 B0 B2"  # its paper, section 3
    first = build("interleaved", 2, 4, 2).actions[0]  # rank 0 has chunks 0 and 2
    assert " ".join(f"{kind}{j}.{chunk}" for kind, j, chunk in first) == (
        "F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0"
    )


def test_the_vees_picture():
    """The first and the last of four ranks of ZB-V are as in its paper. Small letters are chunks on the way up."""
    lists = [
        " ".join(f"{kind.lower() if chunk > 3 else kind}{j}" for kind, j, chunk in actions)
        for actions in build("zb-v", 4, 8, 2).actions
    ]
    assert lists[0] == (
        "F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 F7 I0 W0 f4 i4 w4 I1 W1 f5 i5 w5 I2 W2 f6 i6 w6 "
        "I3 W3 f7 i7 w7 I4 W4 I5 W5 I6 W6 I7 W7"
    )
    assert lists[3] == (
        "F0 f0 F1 f1 F2 f2 F3 f3 i0 w0 F4 I0 W0 f4 i1 w1 F5 I1 W1 f5 i2 w2 F6 I2 W2 f6 i3 w3 F7 I3 W3 f7 i4 w4 "
        "I4 i5 I5 i6 I6 i7 I7 w5 w6 w7 W4 W5 W6 W7"
    )


# --- messages ---------------------------------------------------------------------------------------------------------


def unfinished(schedule, order, per_pair=False):
    """Run a schedule whose ranks start messages in `order`. Return the actions that never run.

    Each rank has one queue for all messages that it sends or receives. It starts them from the front of the queue, up
    to the first send whose tensor is not yet computed. With per_pair, it has one queue per other rank. It starts a
    receive only if the next action or a send needs it. A message runs when it is at the front of its queue at both
    ends and both ends have started it. An action runs when its message has arrived. No step makes another step
    impossible. So the result depends neither on the order of the tries nor on the speed of ranks and messages.
    """
    queues, position = {}, [0] * len(schedule.actions)
    for message in order:
        for rank, other in (message[:2], message[1::-1]):
            queues.setdefault((rank, other if per_pair else None), []).append(message)
    posted, done = dict.fromkeys(queues, 0), dict.fromkeys(queues, 0)
    awaited, ran, arrived = {message.consumer: message for message in order}, set(), set()

    def ready(rank, i, queue):
        """Return True if a rank whose next action is i starts the next message of this queue."""
        if not queue or queue[0].source == rank:
            return bool(queue) and queue[0].producer in ran
        if not per_pair:
            return True
        wanted = awaited.get(schedule.actions[rank][i]) if i < len(schedule.actions[rank]) else None
        return wanted in queue or any(m.source == rank and m.producer in ran for m in queue)

    def ends(message):
        a, b = message[:2]
        return (a, b if per_pair else None), (b, a if per_pair else None)

    moved = True
    while moved:
        moved = False
        for (rank, lane), queue in queues.items():
            here = rank, lane
            while ready(rank, position[rank], queue[posted[here] :]):
                posted[here], moved = posted[here] + 1, True
            while done[here] < posted[here]:
                message = queue[done[here]]
                if not all(done[end] < posted[end] and queues[end][done[end]] is message for end in ends(message)):
                    break
                for end in ends(message):
                    done[end], moved = done[end] + 1, True
                arrived.add(message)
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if action in awaited and awaited[action] not in arrived:
                    break
                ran.add(action)
                position[rank], moved = position[rank] + 1, True
    return [action for actions in schedule.actions for action in actions if action not in ran]


def test_messages_in_their_order_never_deadlock(mixed):
    for sizes in all_of_them(range(2, 6), range(1, 11)):
        schedule = build(*sizes)
        order = messages(schedule)
        assert unfinished(schedule, order) == [], sizes
        assert unfinished(schedule, order, per_pair=True) == [], sizes
        assert len(order) == len(set(order))


def test_a_validation_fills_the_pipeline_once():
    """It has each forward once. Beside v forwards for each micro-batch, a rank waits at most v (p-1) forwards long."""
    for name, p, m, v in all_of_them((1, 2, 4, 8), (8,)):
        schedule = schedules.forward_only(build(name, p, m, v), 4 * p)
        chunks, order = pipelines(schedule)[0], messages(schedule)
        assert sorted(itertools.chain(*schedule.actions)) == [("F", j, chunk) for j in range(4 * p) for chunk in chunks]
        assert unfinished(schedule, order) == [] == unfinished(schedule, order, per_pair=True)
        end = max(event.end for event in simulation.run_in_order(schedule, {"F": 1}, 0))
        assert end <= v * (4 * p + p - 1), f"{name}, p={p}: the forwards take {end}; does a rank wait for each?"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "chimera", "mixed"])
def test_there_is_one_message_per_boundary_and_direction(name, mixed):
    schedule = build(name, 4, 8, usual_chunks(name))
    back, wanted = backwards(schedule), set()
    for j, chunk in ((j, chunk) for j, pipeline in routes(schedule).items() for chunk in pipeline[:-1]):
        a, b = schedule.placement[chunk], schedule.placement[chunk + 1]
        wanted.add((a, b, "activation", j, Action("F", j, chunk), Action("F", j, chunk + 1)))
        wanted.add((b, a, "gradient", j, back[j, chunk + 1], back[j, chunk]))
    assert set(messages(schedule)) == wanted


def test_messages_in_another_order_do_deadlock():
    """Sorted by chunk or by kind, a receive is queued before a send that must come first."""
    schedule = build("1f1b", 4, 8)
    order = messages(schedule)
    for key in (lambda message: message.producer.chunk, lambda message: message.kind):
        assert unfinished(schedule, sorted(order, key=key))


# --- what is wrong with a schedule ------------------------------------------------------------------------------------


def test_a_deadlock_is_explained():
    """Rank 1 runs all its forwards first, but rank 0 needs rank 1's first backward before its last forward."""
    schedule = build("1f1b", 2, 3)
    schedule.actions[1][:] = each("F", 3, 1) + each("B", 3, 1)
    for refuse in (check_schedule, messages, lambda schedule: simulate(schedule, COST)):
        assert refusal(refuse, schedule) == (
            "1f1b: deadlock: rank 0, action 2 (B of micro-batch 0, chunk 0) waits for B of micro-batch 0, chunk 1, "
            "which is rank 1's action 3; rank 1, action 2 (F of micro-batch 2, chunk 1) waits for F of micro-batch 2, "
            "chunk 0, which is rank 0's action 3"
        )


def changed(schedule, change):
    """change: a function that changes the lists of actions, or a dict of other fields."""
    if isinstance(change, dict):
        return schedule._replace(**change)
    change(schedule.actions)
    return schedule


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("1f1b", lambda lists: lists[2].remove(Action("B", 7, 2)), "rank 2 has F of micro-batch 7, chunk 2"),
        ("zb-h1", lambda lists: lists[0].remove(Action("W", 3, 0)), "rank 0 has F and I of micro-batch 3, chunk 0"),
        ("1f1b", lambda lists: lists[2].append(Action("W", 7, 2)), "rank 2 has F and B and W of micro-batch 7"),
        ("1f1b", lambda lists: lists[3].append(Action("F", 2, 3)), "rank 3, action 16 (F of micro-batch 2, chunk 3)"),
        ("1f1b", lambda lists: lists[1].append(Action("G", 0, 1)), "rank 1, action 16 (G of micro-batch 0, chunk 1)"),
        ("1f1b", lambda lists: lists[1].append(lists[2].pop()), "rank 1, action 16 (B of micro-batch 7, chunk 2)"),
        ("zb-h1", lambda lists: lists[0].insert(4, lists[0].pop(5)), "deadlock: rank 0, action 4 (W of micro-batch 0"),
        ("1f1b", lambda lists: lists[3].insert(0, lists[3].pop(1)), "deadlock: rank 3, action 0 (B of micro-batch 0"),
        ("chimera", lambda lists: lists[1].insert(0, Action("F", 0, 6)), "micro-batch 0 has actions in chunk 0 and in"),
        ("1f1b", dict(parts=[]), "parts=[]"),
        ("1f1b", dict(parts=[0, 1, 3, 2]), "parts=[0, 1, 3, 2]"),
        ("1f1b", dict(placement=[0, 1, 2, 4]), "placement=[0, 1, 2, 4]"),
        ("1f1b", dict(placement=[0, 1, 2, 2]), "placement=[0, 1, 2, 2]"),
        ("1f1b", lambda lists: lists[1].append(("F", 0, 1)), "rank 1: ('F', 0, 1) should be an Action"),
    ],
)
def test_the_wrong_action_is_named(name, change, words):
    assert refusal(check_schedule, changed(build(name, 4, 8), change), 8).startswith(f"{name}: {words}")


def test_your_own_schedule(monkeypatch, capsys):
    """1F1B with about half the warm-up is accepted, keeps fewer activations and has a larger bubble."""

    def mine(stages, microbatches, chunks=1):
        actions = []
        for rank in range(stages):
            F, B = each("F", microbatches, rank), each("B", microbatches, rank)
            warmup = (stages - rank) // 2
            actions.append(F[:warmup] + alternate(F[warmup:], B))
        return straight("mine", chunks, actions)

    monkeypatch.setitem(SCHEDULES, "mine", mine)
    main(["mine", "1f1b"])
    text = capsys.readouterr().out
    assert "bubble 0.5294 of 51\npeak   3 2 2 1 in flight\n" in text and "bubble 0.2727 of 33 " in text
    monkeypatch.setitem(SCHEDULES, "mine", lambda stages, microbatches, chunks=1: None)
    assert "schedule=mine: returns None" in refusal(build, "mine", 2, 2)
    monkeypatch.setitem(SCHEDULES, "mine", lambda stages, *rest: mine(stages + 1, *rest))
    assert refusal(build, "mine", 2, 2) == "mine: has lists of actions for 3 ranks; should be 2"
    monkeypatch.setitem(SCHEDULES, "mine", lambda stages, *rest: mine(stages, 1))
    assert "has no action of micro-batch 1" in refusal(build, "mine", 2, 2)
    for wrong in (lambda stages, microbatches: None, lambda stages, microbatches, chunks: None):
        monkeypatch.setitem(SCHEDULES, "mine", wrong)
        assert "should take (stages, microbatches, chunks=1)" in refusal(usual_chunks, "mine")


# --- the drawing ------------------------------------------------------------------------------------------------------


def test_the_docstrings_picture_is_drawn(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    main(["1f1b", "--stages=3", "--microbatches=5"])
    picture = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.startswith("rank ")]
    assert "\n".join(f"    {line}" for line in picture) in schedules.__doc__
