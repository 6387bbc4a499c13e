"""Counts lines of code, tokens, and words for the reader, of every tracked Python file, by group; and words of pages.

    python -m testing.count_lines
    python -m testing.count_lines --save      writes the words into testing/words.txt, the table of test_house.py;
                                              run `git add` first, because only tracked files are counted

A line of code contains a token of Python. Blank lines, comments and docstrings do not count. A statement of n lines
counts n. Tokens per line show whether lines were only packed. Words are those of docstrings and comments, or of a page.
"""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

CORE = (
    "model.py parallel/tensor.py parallel/zero.py parallel/optimizer.py parallel/schedules.py parallel/pipeline.py "
    "parallel/simulation.py parallel/comm.py parallel/watch.py parallel/mesh.py"
).split()
PROGRAM = ("core", "rest of the program")
PAGES = ("README.md", "SLIDES.md", "GUIDE.md", "MEASURED.md", "NOTES.md")
NO_CODE = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENCODING ENDMARKER".split()}


def tracked(*others):
    """Return the paths of all Python files tracked by git, relative to the current folder, or of `others` (options)."""
    listed = subprocess.run(["git", "ls-files", "-z", *others, "*.py"], capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path]


def group_of(path):
    """Return one of PROGRAM, "tests", or the name of a folder that is not of the program."""
    folder, _, name = path.rpartition("/")
    if path in CORE:
        return "core"
    if path == "exercise.py":
        return "exercises"
    if path == "check.py":
        return "testing"
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
    """Return {place (line, column): docstring}."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None]
    return {(node.body[0].lineno, node.body[0].col_offset): ast.get_docstring(node) for node in nodes}


def words(source):
    """Return the number of words, between spaces, in the docstrings and comments of this source."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return sum(len(text.split()) for text in [*docstrings_of(ast.parse(source)).values(), *comments])


def words_by_path():
    """Return {path: words} of all tracked Python files and of PAGES."""
    found = {path: words(Path(path).read_text("utf-8")) for path in tracked()}
    return found | {page: len(Path(page).read_text("utf-8").split()) for page in PAGES}


def main():
    """Print the numbers of every tracked file, by group, and their sums."""
    reading, groups = words_by_path(), {}
    if sys.argv[1:] == ["--save"]:
        if new := tracked("--others", "--exclude-standard"):
            print(f"not counted, because git does not track them: {' '.join(new)}; run `git add` first")
        rows = "".join(f"{number} {path}\n" for path, number in sorted(reading.items()))
        return Path("testing/words.txt").write_text(rows, "utf-8")
    for path in tracked():
        numbers = lines_and_tokens(Path(path).read_text("utf-8"))
        groups.setdefault(group_of(path), {})[path] = (*numbers, reading[path])
    sums = {group: [sum(column) for column in zip(*files.values(), strict=True)] for group, files in groups.items()}
    for group, files in groups.items():
        show(*sums[group], group)
        for path, numbers in sorted(files.items(), key=lambda item: -item[1][0]):
            show(*numbers, f"    {path}")
    show(*(sum(column) for column in zip(*(sums[group] for group in PROGRAM), strict=True)), "the program")
    for page in PAGES:
        show(0, 0, reading[page], page)


def show(lines, tokens, count, name):
    print(f"{lines:7,} lines {tokens:8,} tokens {tokens / max(1, lines):5.1f} {count:7,} words  {name}")


if __name__ == "__main__":
    main()
