"""Check a schedule (`schedules.py`), run its actions in order, and order its messages, without processes."""

import itertools
from typing import NamedTuple

from errors import UserError
from parallel.schedules import SCHEDULES, Action, Schedule, downstream, pipelines, upstream

# --- checks ---------------------------------------------------------------------------------------


def routes(schedule):
    """Return {micro-batch: the chunks of its pipeline}. UserError if it has two."""
    pipeline_of = {chunk: pipeline for pipeline in pipelines(schedule) for chunk in pipeline}
    chunks_of = {}
    for actions in schedule.actions:
        for _, j, chunk in actions:
            if chunk not in chunks_of.setdefault(j, pipeline_of[chunk]):
                both = f"has actions in chunk {chunks_of[j][0]} and in chunk {chunk}"
                why = "which are in two pipelines; should be in only one"
                raise UserError(f"{schedule.name}: micro-batch {j} {both}, {why}")
    return chunks_of


def build(name, stages, microbatches, chunks=1):
    """Return the checked Schedule `name`."""
    if name not in SCHEDULES:
        raise UserError(f"schedule={name}: should be one of {', '.join(SCHEDULES)}")
    for field, value in [("stages", stages), ("microbatches", microbatches), ("chunks", chunks)]:
        if value < 1:
            raise UserError(f"{field}={value}: should be 1 or more")
    schedule = SCHEDULES[name](stages, microbatches, chunks)
    if not isinstance(schedule, Schedule):
        raise UserError(f"schedule={name}: returns {schedule!r:.40}; should return a Schedule")
    if len(schedule.actions) != stages:
        raise UserError(f"{name}: has lists of actions for {len(schedule.actions)} ranks; should be {stages}")
    check_schedule(schedule, microbatches)
    return schedule


# Assumed durations: a linear layer has one matrix product in F and two in B.
NOMINAL = {"F": 1, "B": 2, "I": 1, "W": 1}


def check_schedule(schedule, microbatches=None):
    """Refuse a schedule with a missing, repeated or misplaced action, or a deadlock."""
    check_actions(schedule, microbatches)
    run_in_order(schedule, NOMINAL, 0)


def check_actions(schedule, microbatches=None):
    """Refuse a schedule unless every micro-batch has F and B (or F, I, W) once, on its chunk's rank."""
    name, parts, placement, lists = schedule
    length = max(parts, default=-1) + 1
    if not parts or list(parts) != list(range(length)) * (len(parts) // length):
        raise UserError(f"{name}: parts={parts}: each pipeline should have the parts 0, 1, 2 ...")
    ranks = set(range(len(lists)))
    if len(parts) != len(placement) or set(placement) != ranks or not any(lists):
        should = f"should have {len(parts)} numbers, with each of {len(lists)} ranks, and these need actions"
        raise UserError(f"{name}: placement={placement}: {should}")
    m, index_of = microbatches or schedule.microbatches, {}
    for rank, actions in enumerate(lists):
        kinds, chunks = ", ".join(NOMINAL), [c for c, r in enumerate(placement) if r == rank]
        for i, action in enumerate(actions):
            if not isinstance(action, Action):
                raise UserError(f"{name}: rank {rank}: {action!r} should be an Action(kind, microbatch, chunk)")
            kind, j, chunk = action
            why = None
            if kind not in NOMINAL or not 0 <= j < m or chunk not in chunks:
                why = f"should have a kind of {kinds}, a micro-batch below {m}, and a chunk of {chunks}"
            elif action in index_of:
                why = f"runs a second time; the first was action {index_of[action]}"
            if why:
                raise UserError(f"{name}: {where(schedule, rank, i)}: {why}")
            index_of[action] = i
    chunks_of, first = routes(schedule), pipelines(schedule)[0]
    for j in range(m):
        for chunk in chunks_of.get(j, first):
            kinds = [kind for kind in "FBIW" if (kind, j, chunk) in index_of]
            if kinds != ["F", "B"] and kinds != ["F", "I", "W"]:
                present = " and ".join(kinds) or "no action"
                place = f"rank {placement[chunk]} has {present} of micro-batch {j}, chunk {chunk}"
                raise UserError(f"{name}: {place}; should have F and B, or F, I and W")


def prerequisites(schedule):
    """Return {action: [actions that must end before it can start]}."""
    every = itertools.chain(*schedule.actions)
    backward = {(a.microbatch, a.chunk): a for a in every if a.kind in "BI"}
    needs = {}
    for action in itertools.chain(*schedule.actions):
        kind, j, chunk = action
        if kind == "F":
            before = upstream(schedule, chunk)
            needs[action] = [] if before is None else [Action("F", j, before)]
        elif kind == "W":
            needs[action] = [Action("I", j, chunk)]
        else:
            after = downstream(schedule, chunk)
            needs[action] = [Action("F", j, chunk)]
            if after is not None:
                needs[action].append(backward[j, after])
    return needs


def where(schedule, rank, i):
    return f"rank {rank}, action {i} ({schedule.actions[rank][i]})"


def deadlock(schedule, needs, position, finished):
    """Return the error text of a deadlock: a circle of ranks, each waiting for an action of the next.

    position[rank]: the index of the action that waits; finished: the actions that have run.
    """
    lists = schedule.actions
    place = {action: (rank, i) for rank, of in enumerate(lists) for i, action in enumerate(of)}

    def awaited(rank):
        return next(a for a in needs[lists[rank][position[rank]]] if a not in finished)

    circle = [next(rank for rank, of in enumerate(lists) if position[rank] < len(of))]
    while (following := place[awaited(circle[-1])][0]) not in circle:
        circle.append(following)
    sentences = []
    for rank in circle[circle.index(following) :]:
        other, i = place[awaited(rank)]
        whose = "its own" if other == rank else f"rank {other}'s"
        stands = where(schedule, rank, position[rank])
        sentences.append(f"{stands} waits for {awaited(rank)}, which is {whose} action {i}")
    return f"{schedule.name}: deadlock: " + "; ".join(sentences)


# --- order of the actions -------------------------------------------------------------------------


class Event(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


def run_in_order(schedule, cost, comm):
    """Return the Events, or raise UserError if the ranks deadlock. cost: {kind: duration}; comm: of a message."""
    needs, ends, events = prerequisites(schedule), {}, []
    position, free = [0] * len(schedule.actions), [0] * len(schedule.actions)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if not all(need in ends for need in needs[action]):
                    break
                start = free[rank]
                for need in needs[action]:
                    start = max(start, ends[need] + comm * (schedule.placement[need.chunk] != rank))
                ends[action] = free[rank] = start + cost[action.kind]
                events.append(Event(rank, action, start, free[rank]))
                position[rank] += 1
                progress = True
    if len(events) < len(needs):
        raise UserError(deadlock(schedule, needs, position, ends))
    return events


# --- messages -------------------------------------------------------------------------------------


class Message(NamedTuple):
    source: int
    destination: int
    kind: str  # "activation" or "gradient"
    microbatch: int
    producer: Action
    consumer: Action


def messages(schedule):
    """Return all messages of a checked schedule in one order, which never deadlocks (proof: NOTES.md).

    NCCL runs the messages between two ranks in the order in which each rank posts (starts) them. So
    all ranks need one order: that in which the messages become ready in a simulation.
    `pipeline.Mailbox` has a queue:

        before the first action and after each: post from the front of the queue, up to the first
            send whose tensor is not yet computed (isend and irecv do not wait)
        before an action: wait for the message that this action consumes

    Messages to higher ranks and to lower ranks have a process group each (`pipeline.axis_to`). With
    one group, a send that is ready would wait for receives that are not.
    """
    consumers = {}  # {producer: its only consumer on another rank}
    for action, needs in prerequisites(schedule).items():
        for producer in needs:
            if schedule.placement[producer.chunk] != schedule.placement[action.chunk]:
                consumers[producer] = action
    ordered = []
    for event in sorted(run_in_order(schedule, NOMINAL, 0), key=lambda e: (e.end, e.rank)):
        producer, consumer = event.action, consumers.get(event.action)
        if consumer:
            kind = "activation" if producer.kind == "F" else "gradient"
            to, j = schedule.placement[consumer.chunk], producer.microbatch
            ordered.append(Message(event.rank, to, kind, j, producer, consumer))
    return ordered
