"""Plant each defect alone in a copy of the tree. A test must fail, and its message must name the cause.

The defects, their tests and the words are in `testing/defects.py`. The default run plants a few of them;
`pytest -m defects` plants all.
"""

import pytest
import torch

from testing.compare import Sizes, pattern, written
from testing.defects import DEFECTS, ROOT, Defect, message_of, planted, said

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only git knows which files are the project's")


def check(defect, folder):
    message = message_of(defect, folder)
    assert message is not None, f"{defect.name}: the test {defect.test} does not fail"
    words = " ".join(message.split())
    assert defect.words in words, f"{defect.name}: the failure does not contain `{defect.words}`:\n{message}"


@pytest.mark.parametrize("defect", [d for d in DEFECTS if d.quick], ids=lambda d: d.name)
def test_a_few_defects_are_found_and_named(defect, tmp_path):
    check(defect, tmp_path)


@pytest.mark.defects
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_every_defect_is_found_and_named(defect, tmp_path):
    check(defect, tmp_path)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_the_line_of_a_defect_is_in_its_file(defect):
    planted((ROOT / defect.file).read_text(encoding="utf-8"), defect)


def test_a_defect_whose_line_has_gone_is_named():
    defect = Defect("gone", "model.py", (("x = 1", "x = 2"),), "test_model.py", "")
    for text, times in [("y = 1\n", 0), ("x = 1\nx = 1\n", 2)]:
        with pytest.raises(ValueError, match=f"defect gone: the line `x = 1` is in model.py {times} times, not once"):
            planted(text, defect)
    assert planted("x = 1\n", defect) == "x = 2\n"


def test_the_source_of_a_test_is_not_its_message():
    short = "a.py:3: in test_a\n    assert f(x) == 2, 'source'\nE   AssertionError: words\nE   assert 1 == 2\nE    + 1"
    assert said(short) == "words"
    assert said("    assert 'words' == 2\nE   assert 1 == 2") == ""
    rank = 'rank 1 of 2:\nTraceback (most recent call last):\n  File "a.py"\n    assert f(words)\nValueError: no'
    assert "f(words)" not in said(rank) and "ValueError: no" in said(rank)
    assert said("dx of rank 0 is wrong") == "dx of rank 0 is wrong"


def test_a_ratio_is_written_in_the_sizes_of_the_layout():
    sizes = Sizes(dp=2, tp=4, pp=1, m=3)
    ratios = [6.0, 2.0, 1 / 3, 0.75, 1.1, None]
    words = ["6 = m * dp", "2 = dp", "0.333333 = 1 / m", "0.75 = m / tp", "1.1", "not constant"]
    assert [written(r, sizes) for r in ratios] == words
    assert written(3.0, Sizes(dp=3, tp=1, pp=1, m=3)) == "3 = m = dp"  # both are possible


@pytest.mark.parametrize(
    "counts, words",
    [
        ([[1, 1, 1], [0, 0, 0]], "Only this rank's own micro-batches"),
        ([[0, 0, 1], [0, 0, 1]], "Only the last micro-batch counts"),
        ([[1, 1, 1], [1, 0, 0]], "after the first micro-batch"),
        ([[4, 2, 1], [4, 2, 1]], "reduced again with every micro-batch"),
        ([[1, 1, 1], [1, 1, 0]], "before its gradient is complete"),
        ([[1, 2, 1], [1, 2, 1]], "count more than once"),
    ],
)
def test_the_pattern_of_counts_is_recognised(counts, words):
    assert words in pattern(torch.tensor(counts, dtype=torch.float64), mine=0)
