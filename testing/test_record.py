"""A Record's rules find what they should: the order of calls. (defects.txt has mistakes of bytes.)"""

import random
from types import SimpleNamespace

import torch

from testing.compare import findings
from testing.record import record, waiting
from testing.tiny import tiny_config


def test_the_rule_finds_a_wrong_order(workers):
    """Swap two neighbouring calls of one rank: mostly the ranks then wait for ever."""
    calls = [found.calls for found in workers.run(4, record, tiny_config(1, 2, pp=2), 1)]
    assert waiting(calls) == {} and min(map(len, calls)) > 10
    dice, stuck = random.Random(0), 0
    for _ in range(40):
        rank = dice.randrange(4)
        i, changed = dice.randrange(len(calls[rank]) - 1), [list(one) for one in calls]
        changed[rank][i : i + 2] = reversed(changed[rank][i : i + 2])
        stuck += bool(waiting(changed))
    assert stuck > 10


def test_the_noise_of_a_key_bias_is_no_finding():
    """The bias of a key linear has the gradient 0, up to rounding. Any size of its own would be noise."""
    whole = {name: torch.tensor([x], dtype=torch.float64) for name, x in (("key.bias", 1e-17), ("fc1.bias", 1.0))}
    case = SimpleNamespace(local=lambda name, x, rank: x)
    for change, names in ((1e-17, []), (1e-9, [*whole])):
        pieces = [{name: (0, None, x + change) for name, x in whole.items()}]
        assert [f.name for f in findings(case, pieces, whole)] == names
