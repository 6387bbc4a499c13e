"""Take an answer out of a file: the functions of an exercise and new names, and nothing else of the file.

This is no sandbox: a function of the answer can do whatever a program of this user can do.
"""

import ast
import builtins
import contextlib
import copy
import importlib.util
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from errors import UserError, explained

ROOT = Path(__file__).parent.parent


def git(*words):
    """Return git's output, as bytes. Raises UserError."""
    with explained("exercises need git"):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise UserError(f"exercises need a clone, made by git clone; git says: {done.stderr.decode()}")
    return done.stdout


def need_pytest():
    if not importlib.util.find_spec("pytest"):
        raise UserError("this needs pytest: pip install -r requirements-dev.txt")


def committed(file):
    """Return a file's committed text."""
    return git("show", f"HEAD:./{file}").decode()


@contextlib.contextmanager
def copied_commit(files=None):
    """Yield a temporary folder with the files of the last commit, and with these {path: text} instead of theirs."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 and older have none
        archive.extractall(folder)
        for path, text in (files or {}).items():
            Path(folder, path).write_text(text, "utf-8")
        yield Path(folder)


# --- functions --------------------------------------------------------------------------------------------------------


def node_of(tree, name):
    """Return the tree of the last "f" or "Class.f", or None."""
    for part in name.split("."):
        tree = next((child for child in getattr(tree, "body", [])[::-1] if getattr(child, "name", None) == part), None)
    return tree


def same(text, other, names):
    """Return whether the functions `names` are equal in both texts, but for comments."""
    with contextlib.suppress(SyntaxError):
        trees = [[node_of(ast.parse(one), name) for name in names] for one in (text, other)]
        return None not in trees[0] and [*map(ast.dump, trees[0])] == [*map(ast.dump, trees[1])]


def with_body(text, name, body):
    """Return a file's text with other lines below the docstring of the function `name`."""
    lines, node = text.splitlines(keepends=True), node_of(ast.parse(text), name)
    begin = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
    return "".join([*lines[:begin], *body, *lines[node.end_lineno :]])


# --- an answer --------------------------------------------------------------------------------------------------------


def merged(base, answer, functions):
    """Return (`base` with the `functions` and the new names of `answer`, names of `answer` that differ otherwise).

    Raises SyntaxError.
    """
    edits, changed = {}, []
    merge(ast.parse(base).body, ast.parse(answer).body, answer.splitlines(), functions, "", edits, changed)
    lines = base.splitlines()
    for (begin, end), new in sorted(edits.items(), reverse=True):
        lines[begin:end] = new
    return "\n".join(lines) + "\n", list(dict.fromkeys(changed))


def merge(base, answer, lines, functions, prefix, edits, changed):
    """Add {(begin, end): new lines} to `edits`, and names to `changed`. base, answer: bodies of a file or a class."""
    old, found = {}, set()
    for names, node in named(base):
        old |= {name: [*old.get(name, []), node] for name in names}
    first = base[1] if is_docstring(base[0]) else base[0]
    end = begin_of(first)  # new statements follow the statement that stands before them in the answer
    for names, node in named(answer):
        found |= set(names)
        known = [node for name in names for node in old.get(name, [])]
        end = max([end, *(node.end_lineno for node in known)])
        full = prefix + names[0]
        if known and full in functions and isinstance(node, ast.FunctionDef):
            edits[begin_of(known[-1]), known[-1].end_lineno] = lines[begin_of(node) : node.end_lineno]
        elif known and isinstance(node, ast.ClassDef) and any(name.startswith(f"{full}.") for name in functions):
            merge(known[-1].body, node.body, lines, functions, f"{full}.", edits, changed)
        elif known and ast.dump(node) not in map(ast.dump, known):
            changed.append(full)
        elif not known and not all(map(may_be_new, names)):
            changed.append(full)
        elif not known:
            new = ["    " * prefix.count(".") + line for line in ast.unparse(node).splitlines()]
            edits[end, end] = [*edits.get((end, end), []), *new]
    changed += [prefix + name for name in old if name not in found]


def named(body):
    """Yield (names, statement) of a body. An import has one name; what binds no plain name has its first line."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                one = copy.copy(node)
                one.names = [alias]
                yield [alias.asname or alias.name], one
        elif not is_docstring(node):
            targets = getattr(node, "targets", [getattr(node, "target", node)])
            targets = [node] if isinstance(node, ast.For | ast.Delete) else targets
            parts = [part for target in targets for part in getattr(target, "elts", [target])]
            names = [getattr(part, "name", getattr(part, "id", None)) for part in parts]
            yield (names if all(names) else [ast.unparse(node).splitlines()[0]]), node


def new_names(text, base):
    """Return the names at the top of `text` that `base` lacks."""
    ours, theirs = ({name for names, _ in named(ast.parse(one).body) for name in names} for one in (text, base))
    return ours - theirs


def may_be_new(name):
    return name.replace(".", "").isidentifier() and not name.startswith("__") and name not in dir(builtins)


def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def begin_of(node):
    """Return the index of a statement's first line, or of its first decorator's."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]) - 1
