"""The hunt: one defect is planted into a copy of the project. See its symptom, find it, mend it.

    python exercise.py hunt --seed=7 --level=2          plant it into mine/hunt, and name a layout that shows it

    python exercise.py hunt --hint                      the file, then the function, then the defect; each costs points
    python exercise.py hunt --done "dp=2 is right, so ..."   say which experiment excluded what, and be judged;
                                                        exit code 1: not yet

    python exercise.py grade hunt FOLDER FOLDER ...     for the teacher: judge the hunts in mine/ of these copies again

Train the layout in the project and in mine/hunt, then other layouts and one process: change the fields of the command.
Losses, norms, bytes beside their formulas, and copies are the instruments.
mine/hunt has a history of its own, so `git diff` shows your edits, not the defect. At level 1 a test names the cause.
At levels 2 and 3 the copy has no tests. To compare the files of the copy with the project's is no hunt. Every edit that
makes the tests right is accepted. It gives 10 points for each level; a hint costs 2 for each level, each further try 1.

hunts.txt says which defects of testing/defects.txt are hunted, in which layouts, and what they showed on one machine.
"""

import ast
import json
import os
import random
import re
import shutil
import sys
import time

from errors import UserError, reading, regular
from options import Parser
from testing.defects import DEFECTS, planted
from testing.judging import ROOT, committed, copied, git, need_pytest, run_tests

MINE, DATA = ROOT / "mine", ROOT / "data/stdlib_bytes"
SPOILERS, TESTS = "exercise.py exercises testing/*defects*", " testing conftest.py *test_*.py"
TRAIN = "torchrun --nproc_per_node={} train.py configs/short_run.py --dtype=fp64 --check_replicas=1 --comm_timeout=20"
KEPT = "seed level minutes hints tries sentence".split()  # of a record, for the teacher
COLUMNS = ["right", "minutes", "hints", "points"]
TEST = re.compile(r"testing/|conftest|(.*/)?test_")
TOLD = """hunt {seed}, level {level}: mine/hunt has one defect. Edit the files in mine/hunt, and say why with --done.
mine/hunt に不具合が1つあります。2つのフォルダで学習して比べ、直し、--done で理由を書きます。--hint は減点です。
the project:  {command}
the copy:     (cd mine/hunt && {command})"""


def hunts(level):
    """Return [(Defect, processes, fields)] of a level. The defect's words are those of hunts.txt."""
    by_name = {d.name: d for d in DEFECTS}
    rows = [row.split(" | ") for row in (ROOT / "exercises/hunts.txt").read_text("utf-8").splitlines()[1:]]
    found = [(by_name[name]._replace(words=why), layout.split()) for n, name, layout, _, why in rows if int(n) == level]
    return [(defect, int(processes), fields) for defect, (processes, *fields) in found]


def hunted(level, seed):
    """Return the row of `hunts`. Neighbouring seeds are other rows."""
    return random.Random(level).sample(rows := hunts(level), len(rows))[seed % len(rows)]


def defective(defect):
    """Return {file: text} of the last commit with the defect. Raises UserError if it does not fit."""
    with reading("hunts need the project's own lines in the last commit"):
        return {defect.file: planted(defect, committed(defect.file))}


def training(processes, fields):
    """Return the command that trains a layout; it prints what a hunt is about."""
    return " ".join([TRAIN.format(processes), *fields])


def begin(seed, level):
    """Make mine/hunt, without what tells the defect's place. Return the hunt's state and the text to show."""
    copy, (defect, processes, fields) = MINE / "hunt", hunted(level, seed)
    if copy.exists():
        raise UserError("mine/hunt: a hunt is open; end it with --done, or remove the folder")
    if not DATA.exists():
        raise UserError("data/stdlib_bytes: hunts train on it; make it with: python prepare.py --tokenizer=bytes")
    with copied(defective(defect)) as folder:
        shutil.copytree(folder, copy)
    (copy / "data").symlink_to(DATA.parent)
    spoilers = SPOILERS + TESTS * (level > 1)
    commit = "-c user.name=hunt -c user.email=hunt commit -qm hunt --no-gpg-sign"
    for words in ("init -q", "add -A", f"rm -rqf {spoilers}", commit, "tag hunt"):
        git(*words.split(), folder=copy)
    told = TOLD.format(seed=seed, level=level, command=training(processes, [*fields, "--out_dir=out/$RANDOM"]))
    test = f"\na red test:   (cd mine/hunt && pytest -m '' '{defect.test}')" if level == 1 else ""
    return dict(level=level, seed=seed, began=time.time(), hints=0, tries=0), told + test


def hints(defect):
    """Return the hints, the weakest first."""
    text = committed(defect.file)
    line = text[: text.index(defect.edits[-1][0])].count("\n") + 1
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names = [node.name for node in nodes if node.lineno <= line <= node.end_lineno]
    return [f"file: {defect.file}", f"function: {'.'.join(names) or 'none'}", f"the defect: {defect.words}"]


# --- the end ----------------------------------------------------------------------------------------------------------


def tests_of(defect, files):
    """Return the defect's test, and all that find a defect of one of these files."""
    return [defect.test, *sorted({d.test for d in DEFECTS if d.file in files and "::" in d.test} - {defect.test})]


def judge(record, limit=120):
    """Judge a record's files {name: text} in a copy of the last commit. Return (the grade, messages of red tests)."""
    (defect, _, _), program = hunted(record["level"], record["seed"]), git("ls-files", "*.py").decode().split()
    files = {name: record["files"][name] for name in {*program} & {*record["files"]} if not TEST.match(name)}
    tests = tests_of(defect, files)
    print(f"running: {len(tests)} tests ...", file=sys.stderr, flush=True)
    with copied(defective(defect) | files) as folder:
        red = [message for _, message in run_tests(folder, tests, limit=limit) if message is not None]
    points = 0 if red else max(1, record["level"] * (10 - 2 * record["hints"]) - record["tries"] + 1)
    return {key: record[key] for key in KEPT} | {"right": not red, "points": points}, red


def done(state, sentence):
    """Judge mine/hunt, and keep the record in mine/hunt-LEVEL-SEED.json. Return (text to show, whether it is right)."""
    copy, (defect, _, _) = MINE / "hunt", hunted(state["level"], state["seed"])
    names = git("diff", "--name-only", "hunt", folder=copy).decode().split()
    state |= {"files": {name: (copy / name).read_text("utf-8") for name in names}, "sentence": sentence}
    state |= {"minutes": round((time.time() - state["began"]) / 60, 1), "tries": state["tries"] + 1}
    (grade, red), kept = judge(state), MINE / f"hunt-{state['level']}-{state['seed']}.json"
    if not (kept.exists() and json.loads(kept.read_text("utf-8"))["right"]):  # the first right mend counts
        kept.write_text(json.dumps(state | {"right": grade["right"]}, ensure_ascii=False), "utf-8")
    said = "{points} points, {minutes} minutes, hints: {hints}, tries: {tries}".format(**grade)
    if red:
        tells = state["level"] == 1 or re.search(r"no answer|exit code|(Syntax|Import|Name|Type)Error", red[0])
        return f"not yet まだです: {said}; red tests 失敗したテスト: {len(red)}\n{red[0] if tells else ''}", False
    shutil.rmtree(kept.with_suffix(""), ignore_errors=True)  # of the same hunt, played before
    moved = os.path.relpath(shutil.move(copy, kept.with_suffix("")), MINE.parent)
    edits = [f"planted:\n{old}\n--->\n{new or 'nothing'}" for old, new in defect.edits]
    lines = [f"right 正解: {said}", *edits, defect.words, f"mine/hunt was moved to 移動先: {moved}"]
    return "\n".join(lines), True


def graded(mine, limit):
    """Judge the hunts in a folder mine/. Return a row for `grade`."""
    records = [json.loads(regular(file).read_text("utf-8")) for file in sorted(mine.glob("hunt-*.json"))]
    found = [judge(record, limit)[0] for record in records]
    row = {name: round(sum(each[name] for each in found), 1) for name in COLUMNS}
    note = "; ".join(str(each["sentence"]) for each in found) or "todo"
    return row | {"right": f"{row['right']} of {len(found)}", "note": note}


def main(words):
    """Run the command line. Exit with code 1 if mine/hunt is judged and not right. Raises UserError."""
    parser = Parser("python exercise.py hunt")
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="begin this hunt")
    parser.add_argument("--level", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--done", metavar="SENTENCE", help="judge mine/hunt; say which experiment excluded what")
    parser.add_argument("--hint", action="store_true", help="costs points")
    options = parser.parse_args(words)
    need_pytest()
    file, right = MINE / "hunt.json", True
    if not (options.hint or options.done):
        state, text = begin(options.seed, options.level)
    elif (MINE / "hunt").exists():
        state = json.loads(file.read_text("utf-8"))
    else:
        raise UserError("mine/hunt: no hunt is open; python exercise.py hunt --seed=7 begins one")
    defect, _, _ = hunted(state["level"], state["seed"])
    if options.hint:
        state["hints"] = min(state["hints"] + 1, len(hints(defect)))
        text = "\n".join(hints(defect)[: state["hints"]])
    elif options.done:
        text, right = done(state, options.done)
    file.write_text(json.dumps(state), "utf-8")
    print(text)
    if not right:
        sys.exit(1)
