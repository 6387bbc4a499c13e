"""Tries the edits of GUIDE.md in copies of the project: the tests named there stay green."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent.parent
GUIDE = (HERE / "GUIDE.md").read_text("utf-8")


def paste(file, name, table, row):
    """Insert the guide's function above "Add your own", and its row at the table's start."""
    function = re.search(rf"```python\n(def {name}\(.*?)```", GUIDE, re.DOTALL)[1]
    text = file.read_text("utf-8")
    for place, new in (("# Add your own:", f"{function}\n\n# Add your own:"), (f"\n{table} = {{\n", None)):
        assert text.count(place) == 1, place
        text = text.replace(place, new or f"{place}    {row}\n")
    file.write_text(text, "utf-8")


def edit(file, diff):
    """Replace each block of "-" lines by "+" lines; new code goes above the class LayerNorm."""
    text = file.read_text("utf-8")
    edits, new = diff.split("         # new, above LayerNorm\n")
    for old, lines in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", edits, re.MULTILINE):
        removed = [f"{line[1:]}\n" for line in old.splitlines()]
        assert all(text.count(line) == 1 for line in removed), removed
        text = text.replace(removed[0], "".join(f"{line[1:]}\n" for line in lines.splitlines()))
        for line in removed[1:]:
            text = text.replace(line, "")
    added = "".join(f"{line[1:]}\n" for line in new.splitlines())
    file.write_text(text.replace("class LayerNorm(", f"{added}\n\nclass LayerNorm("), encoding="utf-8")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy with the guide's schedule and optimizer."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "data", "out")
    copy = shutil.copytree(HERE, tmp_path_factory.mktemp("tree") / "nanoparallel", ignore=ignored)
    paste(copy / "parallel/schedules.py", "two_waves", "SCHEDULES", '"two-waves": two_waves,')
    paste(copy / "parallel/optimizer.py", "momentum", "RULES", '"momentum": Rule(momentum, 1),')
    return copy


def run(tree, *command):
    environment = os.environ | {"COLUMNS": "120"}
    return subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True)


def test_the_drawing_is_the_guides(tree):
    """1f1b's numbers, too."""
    shown = re.search(r"```\n(two-waves: 4 stages.*?)\n```", GUIDE, re.DOTALL)[1]
    assert shown in run(tree, "-m", "accounts.draw", "two-waves").stdout
    drawn = run(tree, "-m", "accounts.draw", "1f1b").stdout
    assert "bubble 0.2727 of 33" in drawn and "peak   4 3 2 1" in drawn


def test_a_backward_before_its_forward_is_refused_in_the_guides_words(tree, tmp_path):
    copy = shutil.copytree(tree, tmp_path / "wrong")
    file = copy / "parallel/schedules.py"
    before, after = file.read_text("utf-8").split("def two_waves")
    wrong = after.replace("F[:half] + B[:half]", "B[:half] + F[:half]", 1)
    file.write_text(f"{before}def two_waves{wrong}", "utf-8")
    done = run(copy, "-m", "accounts.draw", "two-waves")
    assert done.returncode == 2 and " ".join(done.stderr.split()) in " ".join(GUIDE.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["parallel/test_schedules.py"],
        ["test_config.py"],
        ["test_layouts.py", "-k", "two-waves or momentum"],
    ],
    ids=" ".join,
)
def test_the_tests_stay_green_with_the_additions(tree, arguments):
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


def test_help_and_mistakes_know_the_added_schedule_and_optimizer(tree):
    text = " ".join(run(tree, "train.py", "--help").stdout.split())  # long lines are wrapped
    assert "two-waves" in text and "momentum" in text
    done = run(tree, "train.py", "configs/tiny.py", "--optimizer=nonesuch")
    assert done.returncode == 2 and "momentum" in done.stderr


def test_a_changed_model_is_the_same_in_every_layout(tree):
    """RoPE, RMSNorm and SwiGLU of the guide; also generation with a cache."""
    edit(tree / "model.py", re.search(r"```diff\n(.*?)```", GUIDE, re.DOTALL)[1])
    # test ids: dp-tp-sequence_parallel; "covered and zb-v" tests pipelines
    chosen = "trains_the_same and (2-1-False or 2-2-True or 1-4-False) or covered and zb-v"
    for arguments in (["test_layouts.py", "-k", chosen], ["test_convert.py", "-k", "cache and not mask"]):
        done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
