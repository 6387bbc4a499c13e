"""Counts the lines of code and the tokens of every tracked Python file, by group.

    python -m testing.count_lines

A line of code contains a token of Python. Blank lines, comments and the docstrings of modules, classes and functions do
not count. A statement of n lines counts n. Tokens per line show whether lines were only packed.
"""

import ast
import io
import subprocess
import tokenize

CORE = (
    "model.py parallel/tensor.py parallel/zero.py parallel/optimizer.py parallel/schedules.py parallel/pipeline.py "
    "parallel/comm.py parallel/mesh.py"
).split()
PROGRAM = ("core", "rest of the program")
NO_CODE = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENCODING ENDMARKER".split()}


def tracked():
    """Return the paths of all Python files tracked by git, relative to the current folder."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path]


def group_of(path):
    """Return one of PROGRAM, "tests", or the name of a folder that is not of the program."""
    folder, _, name = path.rpartition("/")
    if path in CORE:
        return "core"
    if path == "exercise.py":
        return "exercises"
    if name.startswith("test_") or name == "conftest.py":
        return "tests"
    top = folder.split("/")[0]
    return top if top in ("bench", "testing", "exercises", "configs", "ladder") else "rest of the program"


def lines_and_tokens(source):
    """Return (lines of code, tokens) of this source."""
    lines, tokens, docstrings = set(), 0, docstrings_of(ast.parse(source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE and token.start not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
            tokens += 1
    return len(lines), tokens


def docstrings_of(tree):
    """Return the places (line, column) of all docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None]
    return {(node.body[0].lineno, node.body[0].col_offset) for node in nodes}


def main():
    """Print the lines of code, tokens and tokens per line of every tracked file, by group, and their sums."""
    groups = {}
    for path in tracked():
        with open(path, encoding="utf-8") as file:
            groups.setdefault(group_of(path), {})[path] = lines_and_tokens(file.read())
    sums = {group: [sum(column) for column in zip(*files.values(), strict=True)] for group, files in groups.items()}
    for group, files in groups.items():
        show(*sums[group], group)
        for path, (lines, tokens) in sorted(files.items(), key=lambda item: -item[1][0]):
            show(lines, tokens, f"    {path}")
    show(*(sum(column) for column in zip(*(sums[group] for group in PROGRAM), strict=True)), "the program")


def show(lines, tokens, name):
    print(f"{lines:7,} lines {tokens:8,} tokens {tokens / max(1, lines):5.1f}  {name}")


if __name__ == "__main__":
    main()
