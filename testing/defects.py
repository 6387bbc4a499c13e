"""Plants defects that the tests must find: those of defects.txt, and each `.wait()` of the schemes left out.

    python -m testing.defects                      lists them
    python -m testing.defects no-1/m not-reduced   plants each in a copy of the tree, runs its test, prints the failure
    python -m testing.defects all

A defect changes some lines of one file. Its test must fail with the defect's words.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

from errors import UserError, exit_on_user_error, reading
from testing.judging import ROOT, copied, replaced, run_tests

LATE = "testing/test_adversary.py"  # here a result appears only at `wait`
WAITING = ["parallel/tensor.py", "parallel/zero.py", "parallel/context.py"]
WAITING += ["parallel/muon.py", "parallel/pipeline.py", "train.py"]


class Defect(NamedTuple):
    name: str
    file: str
    test: str  # argument of pytest
    words: str  # of the failure's message
    quick: bool  # planted in the slow run, too
    hunt: str  # processes and fields of `train.py configs/short_run.py` that show it, or none
    edits: list  # [(old, new)]: each old text occurs once in the file


def listed():
    """Return the Defects of defects.txt."""
    found = []
    for part in (ROOT / "testing/defects.txt").read_text("utf-8").split("\n== ")[1:]:
        head, _, body = f"{part}\n".partition("\n")
        name, file, test, words, *more = head.split(" | ")
        blocks = re.findall(r"(?m)((?:^-.*\n)+)((?:^\+.*\n)*)", body)
        edits = [tuple("\n".join(line[2:] for line in block.splitlines()) for block in pair) for pair in blocks]
        hunt = " ".join({*more} - {"quick"}).removeprefix("hunt: ")
        found.append(Defect(name, file, test, words, "quick" in more, hunt, edits))
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
                found.append(Defect(name, file, LATE, "`wait`", False, "", [(old, new)]))
    return found


DEFECTS = [*listed(), *without_wait()]


def planted(defect, text=None):
    """Return a file's `text` (default: this tree's) with the defect. Raises ValueError if it does not fit."""
    text, edits = text or (ROOT / defect.file).read_text("utf-8"), []
    for old, new in defect.edits:
        whole = "\n" if not new and f"\n{old}\n" in text else ""  # whole lines leave no empty line
        edits.append((old + whole, new))
    return replaced(text, edits)


def failure(defect):
    """Plant a defect in a copy of the tree. Return the message of its failing test, or None."""
    with copied({defect.file: planted(defect)}, changes=True) as folder:
        messages = [message for _, message in run_tests(folder, [defect.test], "-x") if message is not None]
    return messages[0] if messages else None


def main():
    """List the defects, or plant the named ones. Raises UserError."""
    names, by_name = sys.argv[1:], {defect.name: defect for defect in DEFECTS}
    if not names:
        print("\n".join(f"{d.name:<36} {d.file:<22} {d.test}" for d in DEFECTS))
    names = [*by_name] if names == ["all"] else names
    if unknown := [name for name in names if name not in by_name]:
        raise UserError(f"{unknown[0]}: no such defect; python -m testing.defects lists all")
    for name in names:
        with reading(by_name[name].file):  # of a reader: it may lack the lines
            print(f"--- {name}\n{failure(by_name[name])}\n", flush=True)


if __name__ == "__main__":
    exit_on_user_error(main)
