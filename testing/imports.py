"""Shows the imports between the project's files, and finds imports that break the rules.

    python -m testing.imports

prints each file (no test, no bench) with its level and its imports. A file of level 0 imports no other file of the
project. Any other file is one level above the highest file that it imports. Imports inside functions count, too.

These are the rules and their reasons. The command prints a line for each violation and exits with code 1 if any exists.

    no circle                                     the files of a circle cannot be read or tested one after another
    the program imports no bench, testing, test   the program must run without them
    only tests and bench import train.py          train.py joins all parts; a part must not depend on the whole.
                                                  accounts/dry_run.py may: it runs the whole
"""

import ast
import sys

from testing.count_lines import group_of, in_program, tracked


def module_of(path):
    """Return the module's name for imports: parallel.mesh for parallel/mesh.py."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(tree, modules):
    """Return the paths of the project's files that this tree imports. modules: {module's name: path}."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = set()
    for name in names:
        while name and name not in modules:  # in `from a.b import f`, f may be a function of a.b or a file a/b/f.py
            name = name.rpartition(".")[0]
        found |= {modules[name]} if name else set()
    return found


def graph():
    """Return {path: paths of the project's files that it imports} for every tracked Python file."""
    paths = tracked()
    modules = {module_of(path): path for path in paths}
    found = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            found[path] = imported(ast.parse(file.read()), modules) - {path}
    return found


def circles(imports):
    """Return import circles as lists of files: each file imports the next, the last one imports the first.

    If several circles share files, the result contains at least one of them.
    """
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
    """Return {path: level}, without files that lie in a circle or import such a file, directly or indirectly."""
    known, grown = {}, True
    while grown:
        ready = {path for path in imports if path not in known and all(other in known for other in imports[path])}
        known |= {path: max((known[other] + 1 for other in imports[path]), default=0) for path in ready}
        grown = bool(ready)
    return known


def findings(imports):
    """Return one line for each violation of a rule."""
    lines = ["circle: " + " -> ".join([*circle, circle[0]]) for circle in circles(imports)]
    for path in sorted(imports):
        for other in sorted(imports[path]):
            if in_program(path) and group_of(other) in ("tests", "bench", "testing"):
                lines.append(f"{path} belongs to the program and imports {other}")
            whole = group_of(path) in ("tests", "bench") or path == "accounts/dry_run.py"
            if other == "train.py" and not whole:
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
