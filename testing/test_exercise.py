"""Tries the README's edits in copies of the project: the pasted code works, and the tests named there stay green."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
README = (HERE / "README.md").read_text(encoding="utf-8")


def function_in_readme(name):
    """The Python block of README.md that defines `name`."""
    return re.search(rf"```python\n(def {name}\(.*?)```", README, re.DOTALL)[1]


def paste(file, function, table, row):
    """Insert a function above the comment "Add your own", and its row at the end of the table."""
    text = file.read_text(encoding="utf-8")
    assert text.count("# Add your own:") == 1
    text = text.replace("# Add your own:", f"{function}\n\n# Add your own:")
    text, pasted = re.subn(rf"(?ms)^({table} = {{.*?)^}}", rf"\1    {row}\n}}", text, count=1)
    assert pasted == 1
    file.write_text(text, encoding="utf-8")


def edit(file, diff):
    """Replace each block of "-" lines by the "+" lines below it. New code goes above the class Branch."""
    text = file.read_text(encoding="utf-8")
    edits, new = diff.split("         # new, above Branch\n")
    for old, lines in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", edits, re.MULTILINE):
        for line in old.splitlines():
            assert text.count(f"{line[1:]}\n") == 1, line
        first, *others = [f"{line[1:]}\n" for line in old.splitlines()]
        text = text.replace(first, "".join(f"{line[1:]}\n" for line in lines.splitlines()))
        for other in others:
            text = text.replace(other, "")
    added = "".join(f"{line[1:]}\n" for line in new.splitlines())
    file.write_text(text.replace("class Branch(", f"{added}\n\nclass Branch("), encoding="utf-8")


def copy_of_the_tree(folder):
    ignored = shutil.ignore_patterns(".*", "__pycache__", "data", "out")
    return shutil.copytree(HERE, folder / "nanoparallel", ignore=ignored)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with the schedule and the optimizer of the README."""
    copy = copy_of_the_tree(tmp_path_factory.mktemp("tree"))
    paste(copy / "parallel/schedules.py", function_in_readme("half_warmup"), "SCHEDULES", '"half-warmup": half_warmup,')
    paste(copy / "parallel/optimizer.py", function_in_readme("momentum"), "RULES", '"momentum": Rule(momentum, 1),')
    return copy


def run(tree, *command):
    environment = os.environ | {"COLUMNS": "120"}
    return subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True)


def test_the_drawing_is_the_readmes(tree):
    """The numbers of 1f1b, with which the README compares, are right too."""
    drawn = run(tree, "-m", "accounts.draw", "half-warmup").stdout
    shown = re.search(r"```\n(half-warmup: 4 stages.*?)\n```", README, re.DOTALL)[1]
    assert shown in drawn
    assert "bubble 0.2727 of 33" in run(tree, "-m", "accounts.draw", "1f1b").stdout


def test_a_backward_before_its_forward_is_refused_in_the_readmes_words(tree, tmp_path):
    copy = shutil.copytree(tree, tmp_path / "wrong")
    file = copy / "parallel/schedules.py"
    before, after = file.read_text(encoding="utf-8").split("def half_warmup")
    wrong = after.replace("alternate(F[warmup:], B)", "alternate(B, F[warmup:])", 1)
    file.write_text(f"{before}def half_warmup{wrong}", encoding="utf-8")
    done = run(copy, "-m", "accounts.draw", "half-warmup")
    assert done.returncode == 2 and done.stderr.startswith("error: half-warmup: deadlock: ")
    assert " ".join(done.stderr.split()) in " ".join(README.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["test_schedules.py"],
        ["test_config.py"],
        ["test_layouts.py", "-k", "covered and (half-warmup or momentum)"],
        ["accounts/test_ledger.py", "-k", "half-warmup"],
    ],
    ids=" ".join,
)
def test_the_tests_stay_green(tree, arguments):
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


def test_help_and_mistakes_know_them(tree):
    text = run(tree, "train.py", "--help").stdout
    text = " ".join(text.split())  # long lines are wrapped
    assert re.search(r"--schedule=1f1b [^()]*\([^()]*half-warmup\)", text)
    assert re.search(r"--optimizer=adamw [^()]*\([^()]*momentum\)", text)
    done = run(tree, "train.py", "configs/tiny.py", "--optimizer=nonesuch")
    assert done.returncode == 2 and "momentum" in done.stderr


def test_a_changed_model_is_the_same_in_every_layout(tmp_path):
    """RoPE, RMSNorm and SwiGLU, as the README has them: layouts and generation with a cache need no other change."""
    copy = copy_of_the_tree(tmp_path)
    edit(copy / "model.py", re.search(r"```diff\n(.*?)```", README, re.DOTALL)[1])
    # test ids: dp-tp-sequence_parallel; "covered and zb-v" tests pipelines
    chosen = "trains_the_same and (2-1-False or 2-2-True or 1-4-False) or covered and zb-v"
    for arguments in (["test_layouts.py", "-k", chosen], ["test_generate.py", "-k", "cache"]):
        done = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
