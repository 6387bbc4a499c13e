"""The rules of the house: imports; with -m house: files at the top, length of functions, words."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import needs_git
from testing.count_lines import PROGRAM, group_of, lines_and_tokens, tracked, words, words_by_path
from testing.imports import broken_rules, graph, imported

ROOT = Path(__file__).parent.parent
LONGEST = 50  # lines of a function, including `def`: one page

pytestmark = needs_git


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_no_import_breaks_a_rule():
    assert broken_rules(graph()) == []


def test_kernels_and_reference_import_only_each_other_and_flash_attention():
    imports, together = graph(), {"kernels.py", "reference.py", "flash_attention.py"}
    assert imports["kernels.py"] | imports["reference.py"] <= together
    assert imports["flash_attention.py"] == set()


def test_schedules_can_be_read_without_torch():
    """Drawing or checking a schedule needs no PyTorch."""
    code = "import sys, parallel.schedules; assert 'torch' not in sys.modules, 'torch is imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.house
def test_few_files_stand_at_the_top():
    top = [path for path in tracked() if "/" not in path and path != "conftest.py"]
    tests = [path for path in top if path.startswith("test_")]
    assert len(tests) <= 10 and sum(group_of(path) in PROGRAM for path in top) <= 17, f"use a folder: {top}"


def functions(path):
    """Yield (name, number of lines) of a file's functions."""
    for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


NO_NOUNS = {*"again few found given here kept known made met more near own there".split()}


@pytest.mark.house
def test_a_name_of_the_core_is_a_noun():
    """A reader can guess `gradients`, and grep it; `kept` can be anything."""
    places = []
    for path in (path for path in tracked() if group_of(path) in ("core", "ladder") and path.endswith(".py")):
        for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))):
            names = {getattr(node, field, None) for field in ("id", "arg", "name", "attr")}
            places += [f"{path}:{node.lineno}: {name}" for name in names & NO_NOUNS]
    assert places == []


@pytest.mark.house
def test_no_function_is_longer_than_a_page():
    measured = [path for path in tracked() if group_of(path) in (*PROGRAM, "testing")]
    long = {f"{path} {name}": lines for path in measured for name, lines in functions(path) if lines > LONGEST}
    assert long == {}


@pytest.mark.parametrize(
    "path, other, wrong",
    [
        ("model.py", "reference.py", False),
        ("parallel/comm.py", "bench/kernels.py", True),
        ("model.py", "test_layouts.py", True),
        ("generate.py", "train.py", True),
        ("testing/dry_run.py", "train.py", False),
        ("parallel/pipeline.py", "accounts/meter.py", True),
        ("parallel/comm.py", "recovery/hang.py", True),
        ("recovery/hang.py", "parallel/comm.py", False),
        ("ladder/rung04_dp.py", "model.py", True),
        ("model.py", "ladder/gpt.py", True),
        ("errors.py", "config.py", True),
        ("accounts/meter.py", "log.py", True),
        ("log.py", "accounts/meter.py", False),
    ],
)
def test_a_rule_finds_a_wrong_import(path, other, wrong):
    assert len(broken_rules({path: {other}, other: set()})) == wrong


def test_imports_and_circles_are_found():
    modules = {"a": "a.py", "b": "b/__init__.py", "b.c": "b/c.py", "d": "d.py"}
    source = "import a\nfrom b import c\ndef f():\n    if 1:\n        from d import g, h\nimport json, torch.e\n"
    assert imported(ast.parse(source), modules) == {"a.py", "b/__init__.py", "b/c.py", "d.py"}
    assert broken_rules({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["a circle of imports: b c b"]


SAMPLE = '''"""A docstring
of two lines."""

import os  # a comment


def f(x):
    """Not code."""
    return """a string that is no docstring
    counts, all three lines

    """
'''


def test_lines_of_code_and_tokens():
    assert lines_and_tokens(SAMPLE) == (
        len(["import", "def", *"four"]),
        len("import os def f ( x ) : return STRING".split()),
    )
    assert lines_and_tokens("x = 1; y = 2\n") == (1, 7)
    assert words(SAMPLE) == len("A docstring of two lines. # a comment Not code.".split())


@pytest.mark.house
def test_no_file_has_many_more_words_than_before():
    """A tenth more than testing/words.txt is free."""
    rows = map(str.split, Path("testing/words.txt").read_text("utf-8").splitlines())
    numbers = {path: int(number) for number, path in rows}
    more = {path: found for path, found in words_by_path().items() if found > 1.1 * numbers.get(path, -1)}
    why = "shorten, or raise the numbers (git add, python -m testing.count_lines --save) and say why in the commit"
    assert not more, f"words of docstrings and comments: {more}, but testing/words.txt has fewer or none: {why}"
