"""Counts the lines of code of every tracked Python file, by group.

    python -m testing.count_lines

A line of code contains a token of Python. Blank lines, comments and the docstrings of modules, classes and functions do
not count. A statement of n lines counts n.
"""

import ast
import io
import subprocess
import tokenize

CORE = (
    "model.py parallel/tensor.py parallel/zero.py parallel/optimizer.py parallel/schedules.py parallel/pipeline.py "
    "parallel/comm.py parallel/mesh.py"
).split()
GROUPS = ["core", "rest of the program", "configs", "tests", "bench", "testing"]
NO_CODE = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENCODING ENDMARKER".split()}


def tracked():
    """Return the paths of all Python files tracked by git, relative to the current folder."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path]


def group_of(path):
    """Return one of GROUPS, or "exercises"."""
    folder, _, name = path.rpartition("/")
    if path in CORE:
        return "core"
    if name.startswith("test_") or name == "conftest.py":
        return "tests"
    if folder.split("/")[0] in ("bench", "testing", "exercises", "configs"):
        return folder.split("/")[0]
    return "rest of the program"


def in_program(path):
    return group_of(path) in ("core", "rest of the program")


def lines_of_code(source):
    """Return the number of lines of code in this source."""
    lines, docstrings = set(), docstrings_of(ast.parse(source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        within = (begin <= token.start and token.end <= end for begin, end in docstrings)
        if token.type not in NO_CODE and not (token.type == tokenize.STRING and any(within)):
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def docstrings_of(tree):
    """Return [((line, column) of the start, (line, column) of the end)] of all docstrings."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                text = node.body[0]
                found.append(((text.lineno, text.col_offset), (text.end_lineno, text.end_col_offset)))
    return found


def main():
    """Print the lines of code of every tracked file, by group, and their sums."""
    groups = {name: {} for name in GROUPS}
    for path in tracked():
        with open(path, encoding="utf-8") as file:
            groups.setdefault(group_of(path), {})[path] = lines_of_code(file.read())
    for name, files in groups.items():
        print(f"{sum(files.values()):7,}  {name}")
        for path, lines in sorted(files.items(), key=lambda item: -item[1]):
            print(f"{lines:15,}  {path}")
    program = sum(sum(groups[name].values()) for name in ("core", "rest of the program"))
    print(f"{program:7,}  the program: core and rest")
    print(f"{sum(sum(files.values()) for files in groups.values()):7,}  all")


if __name__ == "__main__":
    main()
