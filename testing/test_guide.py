"""Tries the edits of GUIDE.md in copies of the project: the tests named there stay green."""

import re

import pytest

from conftest import needs_git
from parallel.test_llama import guides_model
from testing.judging import ROOT, copied, replaced, run, run_tests

pytestmark = [pytest.mark.slow, needs_git]

GUIDE = (ROOT / "GUIDE.md").read_text("utf-8")


def pasted(file, name, table, row):
    """Return a file's text with the guide's function above "Add your own", and its row at the table's start."""
    function = re.search(rf"```python\n(def {name}\(.*?)```", GUIDE, re.DOTALL)[1]
    place, start = "# Add your own:", f"\n{table} = {{\n"
    edits = [(place, f"{function}\n\n{place}"), (start, f"{start}    {row}\n")]
    return replaced((ROOT / file).read_text("utf-8"), edits)


SCHEDULES = pasted("parallel/schedules.py", "two_waves", "SCHEDULES", '"two-waves": two_waves,')
OPTIMIZER = pasted("parallel/optimizer.py", "momentum", "RULES", '"momentum": Rule(momentum, 1),')
FILES = {"parallel/schedules.py": SCHEDULES, "parallel/optimizer.py": OPTIMIZER}


@pytest.fixture(scope="module")
def tree():
    """A copy with the guide's schedule and optimizer."""
    with copied(FILES, changes=True) as folder:
        yield folder


def said(tree, *words):
    """Return (exit code, output, errors) of a program of the copy, each on one line."""
    code, *texts = run(tree, words, COLUMNS="120")
    return code, *(" ".join(text.split()) for text in texts)


def test_the_drawing_is_the_guides(tree):
    """1f1b's numbers, too."""
    shown = re.search(r"```\n(two-waves: 4 stages.*?)\n```", GUIDE, re.DOTALL)[1]
    assert shown in run(tree, ["-m", "accounts.draw", "two-waves"], COLUMNS="120")[1]
    _, drawn, _ = said(tree, "-m", "accounts.draw", "1f1b")
    assert "bubble 0.2727 of 33" in drawn and "peak 4 3 2 1" in drawn


def test_a_backward_before_its_forward_is_refused_in_the_guides_words():
    before, after = SCHEDULES.split("def two_waves")
    wrong = after.replace("F[:half] + B[:half]", "B[:half] + F[:half]", 1)
    with copied({"parallel/schedules.py": f"{before}def two_waves{wrong}"}, changes=True) as folder:
        code, _, errors = said(folder, "-m", "accounts.draw", "two-waves")
    assert code == 2 and errors in " ".join(GUIDE.split())


def check(tree, files, chosen):
    """Run the chosen tests of these files, of each at least one. None may fail."""
    results = run_tests(tree, files, "-m", "not slow and not grid and not defects", "-k", chosen)
    wrong = {test: message for test, message in results if message is not None}
    assert not wrong and {test.partition("::")[0] for test, _ in results} == {*files}, wrong


def test_the_tests_stay_green_with_the_additions(tree):
    """Of test_config.py those run that read the names; of the layouts a part that has every axis."""
    files = ["parallel/test_schedules.py", "test_config.py", "test_layouts.py"]
    layouts = "two-waves and (momentum or adamw) or momentum and 1f1b and none"
    check(tree, files, f"test_schedules or help or typo or another_program or {layouts}")


def test_help_and_mistakes_know_the_added_schedule_and_optimizer(tree):
    _, text, _ = said(tree, "train.py", "--help")
    assert "two-waves" in text and "momentum" in text
    code, _, errors = said(tree, "train.py", "configs/tiny.py", "--optimizer=nonesuch")
    assert code == 2 and "momentum" in errors


def test_a_changed_model_is_the_same_in_every_layout():
    """RoPE, RMSNorm and SwiGLU of the guide; also generation with a cache."""
    # test ids: dp-tp-sequence_parallel; "covered and zb-v" tests pipelines
    chosen = "trains_the_same and (2-1-False or 2-2-True or 1-4-False) or covered and zb-v or cache and not mask"
    with copied({"model.py": guides_model()}, changes=True) as folder:
        check(folder, ["test_layouts.py", "test_convert.py"], chosen)
