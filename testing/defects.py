"""Plants defects that the tests must find: those of defects.txt, and each `.wait()` of the schemes left out.

    python -m testing.defects                      lists them
    python -m testing.defects no-1/m not-reduced   plants each in a copy of the tree, runs its test, prints the failure
    python -m testing.defects all

A defect changes some lines of one file. Its test must fail with the defect's words.
"""

import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from testing.judging import run_tests

ROOT = Path(__file__).parent.parent
LATE = "testing/test_adversary.py"  # here a result appears only at `wait`
WAITING = ["parallel/tensor.py", "parallel/zero.py", "parallel/context.py"]
WAITING += ["parallel/muon.py", "parallel/pipeline.py", "train.py"]


class Defect(NamedTuple):
    name: str
    file: str
    test: str  # argument of pytest
    words: str  # of the failure's message
    quick: bool  # planted in the default run, too
    edits: list  # [(old, new)]: each old text occurs once in the file


def listed():
    """Return the Defects of defects.txt."""
    found = []
    for part in (ROOT / "testing/defects.txt").read_text("utf-8").split("\n== ")[1:]:
        head, *lines = part.splitlines()
        name, file, test, words, *quick = head.split(" | ")
        edits = []
        for sign, group in itertools.groupby(lines, lambda line: line[0]):
            text = "\n".join(line[2:] for line in group)
            if sign == "-":
                edits.append((text, ""))
            else:
                edits[-1] = (edits[-1][0], text)
        found.append(Defect(name, file, test, words, bool(quick), edits))
    return found


def without_wait():
    """Return a Defect for each `.wait()` of the schemes."""
    found = []
    for file in WAITING:
        lines = (ROOT / file).read_text("utf-8").splitlines()
        for number, line in enumerate(lines):
            if ".wait()" in line:
                old = "\n".join(lines[number - 1 : number + 1])  # with the line before it, this occurs once
                new = f"{lines[number - 1]}\n{line.replace('.wait()', '.result')}"
                name = f"{Path(file).stem}:{number + 1}"
                found.append(Defect(name, file, LATE, "`wait`", False, [(old, new)]))
    return found


DEFECTS = [*listed(), *without_wait()]


def planted(defect, text=None):
    """Return a file's `text` (default: this tree's) with the defect. Raises ValueError if it does not fit."""
    text = text or (ROOT / defect.file).read_text("utf-8")
    for old, new in defect.edits:
        if text.count(old) != 1:
            raise ValueError(f"defect {defect.name}: `{old}` is in {defect.file} {text.count(old)} times, not once")
        whole = not new and f"\n{old}\n" in text  # whole lines leave no empty line
        text = text.replace(f"{old}\n" if whole else old, new)
    return text


def copy_tree(folder):
    """Copy the files that git tracks, as they are now, into `folder`."""
    paths = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in paths.split("\0")[:-1]:
        Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, Path(folder, path))


def failure(defect, folder):
    """Plant a defect in a copy of the tree in `folder`. Return the message of its failing test, or None."""
    copy_tree(folder)
    (folder / defect.file).write_text(planted(defect), "utf-8")
    messages = [message for _, message in run_tests(folder, [defect.test], "-x") if message is not None]
    return messages[0] if messages else None


def main():
    """List the defects, or plant the named ones."""
    names, by_name = sys.argv[1:], {defect.name: defect for defect in DEFECTS}
    if not names:
        print("\n".join(f"{d.name:<36} {d.file:<22} {d.test}" for d in DEFECTS))
    for name in by_name if names == ["all"] else names:
        with tempfile.TemporaryDirectory() as folder:
            print(f"--- {name}\n{failure(by_name[name], Path(folder))}\n", flush=True)


if __name__ == "__main__":
    main()
