"""Tests the rules for imports and for the length of functions, and the tools in testing/ that measure them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from errors import parse_json
from testing.count_lines import group_of, in_program, lines_of_code, tracked
from testing.imports import circles, findings, graph, imported, levels, module_of

ROOT = Path(__file__).parent.parent
LONGEST = 50  # lines of a function, including `def`: one page
LONGER = {  # {"file function": reason}
}


pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git to list the project's files")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# --- imports ----------------------------------------------------------------------------------------------------------


def test_no_circle():
    assert circles(graph()) == []


def test_no_import_breaks_a_rule():
    assert [line for line in findings(graph()) if not line.startswith("circle")] == []


def test_kernels_and_reference_import_only_each_other_and_flash_attention():
    imports, together = graph(), {"kernels.py", "reference.py", "flash_attention.py"}
    assert imports["kernels.py"] | imports["reference.py"] <= together
    assert imports["flash_attention.py"] == set()


def test_schedules_can_be_read_without_torch():
    """A schedule is a pure function. Drawing or checking it needs neither a GPU nor PyTorch."""
    code = "import sys, parallel.schedules; assert 'torch' not in sys.modules, 'torch is imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_imports_are_found_wherever_they_stand():
    paths = ["a.py", "b/__init__.py", "b/c.py", "d.py", "e.py"]
    source = "import a.x\nfrom b import c\ndef f():\n    if 1:\n        from d import g, h\nimport json, torch.e\n"
    assert imported(ast.parse(source), {module_of(path): path for path in paths}) == {"a.py", "b/c.py", "d.py"}
    assert imported(ast.parse("import b"), {module_of(path): path for path in paths}) == {"b/__init__.py"}


def test_circles_and_levels():
    tree = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert circles(tree) == [] and levels(tree) == {"c": 0, "b": 1, "a": 2}
    knot = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert circles(knot) == [["b", "c"], ["e"]] and levels(knot) == {"d": 0}


@pytest.mark.parametrize(
    "path, other, wrong",
    [
        ("model.py", "reference.py", False),
        ("model.py", "testing/sanitizer.py", True),
        ("parallel/comm.py", "bench/kernels.py", True),
        ("model.py", "test_layouts.py", True),
        ("model.py", "conftest.py", True),
        ("generate.py", "train.py", True),
        ("testing/workers.py", "train.py", True),
        ("test_train.py", "train.py", False),
        ("accounts/dry_run.py", "train.py", False),
        ("accounts/sweep.py", "train.py", True),
        ("bench/step.py", "train.py", False),
    ],
)
def test_a_rule_sees(path, other, wrong):
    assert len(findings({path: {other}, other: set()})) == wrong


def test_the_command_shows_every_file_of_the_program():
    done = subprocess.run([sys.executable, "-m", "testing.imports"], capture_output=True, text=True)
    wrong = findings(graph())
    assert done.returncode == bool(wrong) and done.stderr == ""
    rows = done.stdout.splitlines()
    assert {row.split()[1] for row in rows[: len(rows) - len(wrong)]} == set(filter(in_program, tracked()))
    assert rows[len(rows) - len(wrong) :] == wrong


# --- lengths ----------------------------------------------------------------------------------------------------------


def functions(path):
    """Yield (name, number of lines) of every function of a file, nested functions included."""
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def test_no_function_is_longer_than_a_page():
    measured = [path for path in tracked() if in_program(path) or group_of(path) == "testing"]
    long = {f"{path} {name}": lines for path in measured for name, lines in functions(path) if lines > LONGEST}
    assert long.keys() - LONGER.keys() == set(), long
    assert LONGER.keys() - long.keys() == set(), "this function is short now: remove it from LONGER"


# --- the counter of lines ---------------------------------------------------------------------------------------------

SAMPLE = '''"""A docstring
of two lines."""

# a comment
import os  # counts


class A:
    """Not code."""

    def f(self, x):  # one

        """Not code
        either."""
        text = """a string that is no docstring
        counts, all four lines

        # this one, too"""
        return [  # counts three lines, with `x,` and `]`

            x,
        ]  # a blank line adds nothing
'''


def test_lines_of_code():
    assert lines_of_code(SAMPLE) == 1 + 1 + 1 + 4 + 3
    assert lines_of_code("") == lines_of_code('"""only a docstring"""\n# and a comment\n') == 0
    assert lines_of_code('x = 1; """no docstring"""\n') == 1
    assert lines_of_code('def f(): """A docstring beside code."""\n') == 1


@pytest.mark.parametrize(
    "path, group",
    [
        ("model.py", "core"),
        ("parallel/mesh.py", "core"),
        ("accounts/ledger.py", "rest of the program"),
        ("train.py", "rest of the program"),
        ("configs/tiny.py", "configs"),
        ("accounts/test_plan.py", "tests"),
        ("test_train.py", "tests"),
        ("conftest.py", "tests"),
        ("bench/train.py", "bench"),
        ("testing/workers.py", "testing"),
        ("exercises/pipeline/model.py", "exercises"),
    ],
)
def test_groups_of_files(path, group):
    assert group_of(path) == group


def test_json_is_read_by_one_function():
    """json.loads raises RecursionError for many nested brackets, which no caller expects."""
    texts = {path: Path(path).read_text(encoding="utf-8") for path in tracked() if in_program(path)}
    assert [path for path, text in texts.items() if re.search(r"json\.loads?\(", text)] == ["errors.py"]
    with pytest.raises(ValueError, match="too many nested brackets"):
        parse_json("[" * 100_000)


def test_the_counts_add_up():
    done = subprocess.run([sys.executable, "-m", "testing.count_lines"], capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    counted = {name: int(number.replace(",", "")) for number, name in rows}
    whole = sum(lines_of_code(Path(path).read_text(encoding="utf-8")) for path in tracked())
    assert counted["all"] == sum(counted[path] for path in tracked()) == whole > 0
    assert counted["the program: core and rest"] == sum(counted[path] for path in filter(in_program, tracked()))
