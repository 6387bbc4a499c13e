"""Finds imports between the project's files that break the rules, and prints them: python -m testing.imports

Imports inside functions count, too. The rules:

    no circle                                     its files cannot be read one after another
    the program imports no bench, testing, test   it runs without them
    only tests, bench, exercises import train.py  a part must not depend on the whole
    no import goes up in LEVELS                   a scheme is read without the tools that measure it or keep it alive
    ladder/ imports only files of ladder/         a student reads it before the program, and runs it with torch alone
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from testing.count_lines import PROGRAM, group_of, tracked

# Files and folders of the program, from the ground up. The other files of the program are commands, above all of these.
LEVELS = (
    "errors.py",
    "options.py reference.py kernels.py flash_attention.py",
    "parallel/",
    "config.py operations.py model.py llama.py tokenizer.py data.py",
    "accounts/",
    "log.py recovery/",
)


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
    rooms = [room.split() for room in LEVELS]
    return next((i for i, room in enumerate(rooms) if path in room or f"{path.split('/')[0]}/" in room), len(rooms))


def broken_rules(imports):
    """Return a line for each import against the rules. imports: {file: files that it imports}."""
    lines = []
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        lines.append(f"a circle of imports: {' '.join(error.args[1])}")
    for path, other in sorted((file, other) for file in imports for other in imports[file]):
        program = group_of(path) in PROGRAM
        if program and group_of(other) not in (*PROGRAM, "configs"):
            lines.append(f"{path} belongs to the program and imports {other}")
        if other == "train.py" and program:
            lines.append(f"{path} imports train.py")
        if program and group_of(other) in PROGRAM and level(other) > level(path):
            lines.append(f"{path} is below {other} and imports it")
        if group_of(path) == "ladder":
            lines.append(f"{path} is in the ladder and imports {other}")
    return lines


if __name__ == "__main__":
    print("\n".join(broken_rules(graph())) or "no import breaks a rule")
