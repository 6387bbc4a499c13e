"""Shows the imports between the project's files, and finds imports that break the rules.

    python -m testing.imports

prints each file of the program with its level and its imports. A file of level 0 imports no other file of the project.
Any other file is one level above the highest file that it imports. Imports inside functions count, too. The command
then prints a line for each broken rule, and exits with code 1 if there is one. The rules and their reasons:

    no circle                                     the files of a circle cannot be read or tested one after another
    the program imports no bench, testing, test   the program must run without them
    only tests, bench and accounts/dry_run.py     train.py joins all parts; a part must not depend on the whole (the dry
    import train.py                               run runs the whole)
    parallel/ imports no accounts/                a scheme can be read without the tools that predict and measure it
    errors.py imports nothing                     every file may use it
"""

import ast
import sys
from pathlib import Path

from testing.count_lines import PROGRAM, group_of, tracked


def imported(tree, modules):
    """Return the paths of the project's files that this tree imports. modules: {module's name: path}."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    # In `from a.b import f`, f may be a function of a.b or a file a/b/f.py.
    return {modules[n] for name in names for n in (name, name.rpartition(".")[0]) if n in modules}


def graph():
    """Return {path: paths of the project's files that it imports} for every tracked Python file."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in tracked()}
    return {path: imported(ast.parse(Path(path).read_text("utf-8")), modules) - {path} for path in modules.values()}


def levels(imports):
    """Return {path: level}. It lacks the files of a circle, and the files that import such a file, also indirectly."""
    known, ready = {}, {path for path in imports if not imports[path]}
    while ready:
        known |= {path: max((known[other] + 1 for other in imports[path]), default=0) for path in ready}
        ready = {path for path in imports if path not in known and imports[path] <= known.keys()}
    return known


def broken_rules(imports):
    """Return one line for each violation of a rule."""
    known = levels(imports)
    lines = [f"{path} is in a circle of imports, or imports one" for path in sorted(imports) if path not in known]
    for path, other in sorted((file, other) for file in imports for other in imports[file]):
        program = group_of(path) in PROGRAM
        if program and group_of(other) not in (*PROGRAM, "configs"):
            lines.append(f"{path} belongs to the program and imports {other}")
        if other == "train.py" and group_of(path) not in ("tests", "bench") and path != "accounts/dry_run.py":
            lines.append(f"{path} imports train.py")
        if path.startswith("parallel/") and other.startswith("accounts/"):
            lines.append(f"{path} is a scheme and imports {other}")
        if path == "errors.py":
            lines.append(f"errors.py imports {other}")
    return lines


def main():
    imports = graph()
    known = levels(imports)
    program = [path for path in imports if group_of(path) in PROGRAM]
    for path in sorted(program, key=lambda path: (known.get(path, len(imports)), path)):
        print(f"{known.get(path, '-'):>2}  {path:<24} {' '.join(sorted(imports[path]))}".rstrip())
    wrong = broken_rules(imports)
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
