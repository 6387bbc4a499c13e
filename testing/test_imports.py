"""No import between the project's files may break a rule. (defects.txt has wrong imports.)

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
    """{path: paths that it imports} of every Python file, without a student's answers in mine/."""
    files = [file for file in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py")) if file.parent.name != "mine"]
    paths = [file.relative_to(ROOT).as_posix() for file in files]
    modules = {path[:-3].removesuffix("/__init__").replace("/", "."): path for path in paths}
    return {path: imported(ast.parse((ROOT / path).read_text("utf-8")), modules) - {path} for path in modules.values()}


def test_no_import_breaks_a_rule(imports):
    TopologicalSorter(imports).prepare()  # raises an error with the files of a circle
    assert [(path, other) for path in imports for other in imports[path] if is_wrong(path, other)] == []


def test_kernels_and_reference_import_only_each_other_and_flash_attention(imports):
    together = {"kernels.py", "reference.py", "flash_attention.py"}
    assert imports["kernels.py"] | imports["reference.py"] <= together
    assert imports["flash_attention.py"] == set()


def test_schedules_can_be_read_without_torch():
    """Drawing or checking a schedule needs no PyTorch."""
    code = "import sys, parallel.schedules; assert 'torch' not in sys.modules, 'torch is imported'"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
