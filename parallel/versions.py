"""Count the versions of the weights that an asynchronous schedule keeps (`pipedream.py`).

schedule.versions[rank][j] is the number of updates in the weights that micro-batch j uses on a rank.
"""

from collections import Counter

from parallel.schedules import updates


def shared_versions(schedule, holders):
    """Return the version that each micro-batch uses of a bucket: the oldest of its holders."""
    return [min(versions) for versions in zip(*(schedule.versions[rank] for rank in holders), strict=True)]


def published(schedule, holders):
    """Return how many new versions of a bucket's parameters the micro-batches use, or the next call."""
    used = set(shared_versions(schedule, holders)) if schedule.versions else set()
    return len((used | {updates(schedule)}) - {0})


def kept_versions(schedule, rank, holders):
    """Return (versions, sums) of a bucket: how many `rank` keeps at most. holders: pipeline ranks that hold the bucket.

    sums: gradients that wait for other holders. A bucket of one rank is updated in U. One of several ranks is updated
    in the F that needs the new version, or in a U after which no F follows.
    """
    versions, alone = shared_versions(schedule, holders), len(holders) == 1
    users, forwards = Counter(versions), len(versions)  # users: micro-batches that still need a version
    versions_kept, latest, waiting, most, most_sums = {0}, 0, 0, 1, 0
    for kind, j, _ in schedule.actions[rank]:
        target = latest
        if kind == "F":
            forwards, target = forwards - 1, max(latest, versions[j])
        elif kind == "B":
            users[versions[j]] -= 1
        else:
            waiting += 1  # gradients that are not yet in the weights
            target = latest + waiting if alone or not forwards else latest
        most_sums = max(most_sums, waiting)
        versions_kept = {version for version in (*versions_kept, *range(latest + 1, target + 1)) if users[version]}
        waiting, latest, most = waiting - (target - latest), target, max(most, len(versions_kept))
    return most, 0 if alone else most_sums
