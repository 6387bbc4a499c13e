"""What the comparison of Records leaves out. (defects.txt has mistakes of order and of bytes.)"""

from types import SimpleNamespace

import torch

from testing.compare import findings


def test_the_noise_of_a_key_bias_is_no_finding():
    """The bias of a key linear has the gradient 0, up to rounding. Any size of its own would be noise."""
    whole = {name: torch.tensor([x], dtype=torch.float64) for name, x in (("key.bias", 1e-17), ("fc1.bias", 1.0))}
    case = SimpleNamespace(local=lambda name, x, rank: x)
    for change, names in ((1e-17, []), (1e-9, [*whole])):
        pieces = [{name: (0, None, x + change) for name, x in whole.items()}]
        assert [f.name for f in findings(case, pieces, whole)] == names
