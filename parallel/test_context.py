"""Context parallelism on three ranks. (test_layouts.py has two and four in its grid.)"""

import pytest

from testing.record import check_layout
from testing.tiny import few, tiny_config

THREE = dict(cp=3, hidden_size=24, num_attention_heads=6, seq_length=12)


@pytest.mark.parametrize(
    "dp, tp, fields",
    few(
        [
            (1, 1, dict(recompute="full")),
            (2, 1, dict(zero=3)),
            (1, 2, dict(sequence_parallel=True)),
            (1, 1, dict(pp=2, schedule="chimera", zero=2)),
        ]
    ),
    ids=str,
)
def test_three_ranks_train_the_same_model(workers, dp, tp, fields):
    modes = [dict(optimizer="sgd", dropout=0.0), dict(optimizer="adamw", dropout=0.1)]
    configs = [tiny_config(dp, tp, **mode, **fields, **THREE) for mode in modes]
    check_layout(workers, 3 * dp * tp * configs[0].pp, *configs)
