"""Shows which of our files imports which, and finds imports that break the rules.

    python -m testing.imports

prints each file of the program with its level and its imports. A file of level 0 imports nothing of ours; any other
file is one level above the highest file that it imports. Imports inside of functions count as well.

The rules, each with one line for every finding, and exit code 1 if there is any:

    no circle                                     else no file of the circle can be read, or tested, first
    the program imports no bench, testing, test   it must run without them
    only tests and bench import train.py          train.py puts the parts together; a part does not know the whole
"""

import ast
import sys

from testing.count_lines import group_of, in_program, tracked


def module_of(path):
    """The name under which other files import this one: parallel/mesh.py is parallel.mesh."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(tree, modules):
    """The paths of our files that this tree imports. modules: {module's name: path}."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = set()
    for name in names:
        while name and name not in modules:  # `from a.b import f` may name a function of a.b, or a file a/b/f.py
            name = name.rpartition(".")[0]
        found |= {modules[name]} if name else set()
    return found


def graph():
    """{path: the paths of our files that it imports} of every tracked Python file."""
    paths = tracked()
    modules = {module_of(path): path for path in paths}
    found = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            found[path] = imported(ast.parse(file.read()), modules) - {path}
    return found


def circles(imports):
    """Lists of files, each of which imports the next one, and the last one the first. At least one of each knot."""
    found, done = [], set()

    def visit(path, above):
        if path in above:
            found.append(above[above.index(path) :])
        elif path not in done:
            for other in sorted(imports[path]):
                visit(other, [*above, path])
            done.add(path)

    for path in sorted(imports):
        visit(path, [])
    return found


def levels(imports):
    """{path: its level}; a file of a circle, or above one, has none."""
    known, grown = {}, True
    while grown:
        ready = {path for path in imports if path not in known and all(other in known for other in imports[path])}
        known |= {path: max((known[other] + 1 for other in imports[path]), default=0) for path in ready}
        grown = bool(ready)
    return known


def findings(imports):
    """One line for each import that breaks a rule."""
    lines = ["circle: " + " -> ".join([*circle, circle[0]]) for circle in circles(imports)]
    for path in sorted(imports):
        for other in sorted(imports[path]):
            if in_program(path) and group_of(other) in ("tests", "bench", "testing"):
                lines.append(f"{path}, of the program, imports {other}")
            if other == "train.py" and group_of(path) not in ("tests", "bench"):
                lines.append(f"{path} imports train.py")
    return lines


def main():
    imports = graph()
    level = levels(imports)
    for path in sorted(filter(in_program, imports), key=lambda path: (level.get(path, len(imports)), path)):
        print(f"{level.get(path, '-'):>2}  {path:<24} {' '.join(sorted(imports[path]))}".rstrip())
    wrong = findings(imports)
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
