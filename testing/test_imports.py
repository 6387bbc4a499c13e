"""No import between the project's files may break a rule.

Imports inside functions count, too. The rules:

    no circle                              its files cannot be read one after another
    no import goes up in LEVELS            a scheme is read without the tools that measure it or keep it alive
    ladder/ imports only files of ladder/  a student reads it before the program, and runs it with torch alone
"""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from conftest import needs_git

ROOT = Path(__file__).parents[1]
# Files and folders from the ground up. Tests and conftest.py are above all of these.
LEVELS = (
    "errors.py configs/",
    "options.py reference.py kernels.py flash_attention.py",
    "parallel/",
    "config.py operations.py model.py llama.py tokenizer.py data.py",
    "accounts/",
    "log.py recovery/",
    "convert.py generate.py plan.py prepare.py",
    "train.py",
    "ladder/ testing/",
    "bench/ exercises/",
    "check.py exercise.py",
)
ABOVE = len(LEVELS)


def level(path):
    folder, _, name = path.rpartition("/")
    rooms = [] if name.startswith("test_") else LEVELS
    return next((i for i, room in enumerate(rooms) if {path, f"{folder}/"} & {*room.split()}), ABOVE)


def is_wrong(path, other):
    """Return whether the file `path` may not import the file `other`."""
    leaves_ladder = path.startswith("ladder/") and not other.startswith("ladder/")
    return level(other) > level(path) or (leaves_ladder and level(path) < ABOVE)


def imported(tree, modules):
    """Return the paths that this tree imports. modules: {module's name: path}."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # in `from a.b import f`, f may be a function or a file
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {modules[name] for name in names & {*modules}}


@pytest.fixture(scope="module")
def imports():
    """{path: paths that it imports} of every tracked Python file."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = {path[:-3].removesuffix("/__init__").replace("/", "."): path for path in listed.stdout.split()}
    return {path: imported(ast.parse((ROOT / path).read_text("utf-8")), modules) - {path} for path in modules.values()}


@needs_git
def test_no_import_breaks_a_rule(imports):
    TopologicalSorter(imports).prepare()  # raises an error with the files of a circle
    assert [(path, other) for path in imports for other in imports[path] if is_wrong(path, other)] == []


@needs_git
def test_kernels_and_reference_import_only_each_other_and_flash_attention(imports):
    together = {"kernels.py", "reference.py", "flash_attention.py"}
    assert imports["kernels.py"] | imports["reference.py"] <= together
    assert imports["flash_attention.py"] == set()


def test_schedules_can_be_read_without_torch():
    """Drawing or checking a schedule needs no PyTorch."""
    code = "import sys, parallel.schedules; assert 'torch' not in sys.modules, 'torch is imported'"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


RULES = """
model.py may import reference.py
testing/dry_run.py may import train.py
recovery/hang.py may import parallel/comm.py
ladder/test_ladder.py may import testing/tiny.py
log.py may import accounts/meter.py
check.py may import testing/compare.py
parallel/comm.py may not import bench/kernels.py
model.py may not import test_layouts.py
generate.py may not import train.py
parallel/pipeline.py may not import accounts/meter.py
parallel/comm.py may not import recovery/hang.py
ladder/rung04_dp.py may not import model.py
model.py may not import ladder/gpt.py
errors.py may not import config.py
accounts/meter.py may not import log.py
exercises/formulas.py may not import check.py
testing/tiny.py may not import exercises/show.py
check.py may not import conftest.py
"""


@pytest.mark.parametrize("rule", RULES.strip().splitlines())
def test_a_wrong_import_is_found(rule):
    path, *words, other = rule.split()
    assert is_wrong(path, other) == ("not" in words)


def test_imports_are_found():
    modules = {"a": "a.py", "b": "b/__init__.py", "b.c": "b/c.py", "d": "d.py"}
    source = "import a\nfrom b import c\ndef f():\n    if 1:\n        from d import g, h\nimport json, torch.e\n"
    assert imported(ast.parse(source), modules) == {"a.py", "b/__init__.py", "b/c.py", "d.py"}
