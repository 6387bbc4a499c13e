"""Finds imports between the project's files that break the rules, and prints them: python -m testing.imports

Imports inside functions count, too. The rules:

    no circle                              its files cannot be read one after another
    no import goes up in LEVELS            a scheme is read without the tools that measure it or keep it alive
    ladder/ imports only files of ladder/  a student reads it before the program, and runs it with torch alone
"""

import ast
import subprocess
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

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


def tracked():
    """Return the paths of all Python files tracked by git, relative to the current folder."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path]


def imported(tree, modules):
    """Return the paths that this tree imports. modules: {module's name: path}."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    # in `from a.b import f`, f may be a function or a file
    return {modules[n] for name in names for n in (name, name.rpartition(".")[0]) if n in modules}


def graph():
    """Return {path: paths that it imports} of every tracked Python file."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in tracked()}
    return {path: imported(ast.parse(Path(path).read_text("utf-8")), modules) - {path} for path in modules.values()}


def level(path):
    folder, name = path.split("/")[0], path.split("/")[-1]
    if name == "conftest.py" or name.startswith("test_"):
        return len(LEVELS)
    rooms = [room.split() for room in LEVELS]
    return next((i for i, room in enumerate(rooms) if path in room or f"{folder}/" in room), len(LEVELS))


def broken_rules(imports):
    """Return a line for each import against the rules. imports: {file: files that it imports}."""
    lines = []
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        lines.append(f"a circle of imports: {' '.join(error.args[1])}")
    for path, other in sorted((file, other) for file in imports for other in imports[file]):
        if level(other) > level(path):
            lines.append(f"{path} is below {other} and imports it")
        elif path.startswith("ladder/") and level(path) < len(LEVELS) and not other.startswith("ladder/"):
            lines.append(f"{path} is in the ladder and imports {other}")
    return lines


if __name__ == "__main__":
    print("\n".join(broken_rules(graph())) or "no import breaks a rule")
