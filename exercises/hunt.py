"""The hunt: one defect is planted into a copy of the project. See its symptom, find it, mend it.

    python exercise.py hunt --seed=7 --level=2          plant it into mine/hunt, and name a layout that shows it

    python exercise.py hunt --hint                      name the file of the defect
    python exercise.py hunt --done "dp=2 is right, so ..."   say which experiment excluded what, and be judged;
                                                        exit code 1: not yet

    python exercise.py grade hunt FOLDER FOLDER ...     for the teacher: judge the hunts in mine/ of these copies again

Train the layout in the project and in mine/hunt, then other layouts and one process: change the fields of the command.
Losses, norms, bytes beside their formulas, and copies are the instruments.
mine/hunt has a history of its own, so `git diff` shows your edits, not the defect. At level 1 a test names the cause.
At levels 2 and 3 the copy has no tests. To compare the files of the copy with the project's is no hunt. Every edit that
makes the tests right is accepted. mine/hunt.json records your edits, your sentence, minutes, hints and tries. When the
tests are right, it becomes mine/hunt-LEVEL-SEED.json.

hunts.txt says which defects of testing/defects.txt are hunted, in which layouts, and what they showed on one machine.
"""

import json
import random
import re
import shutil
import sys
import time

from errors import UserError, reading, regular
from options import Parser, within
from testing.defects import DEFECTS, planted
from testing.judging import LIMIT, ROOT, committed, copied, git, run_tests

MINE, DATA = ROOT / "mine", ROOT / "data/stdlib_bytes"
SPOILERS, TESTS = "exercise.py exercises testing/*defects*", " testing conftest.py *test_*.py"
TRAIN = "torchrun --nproc_per_node={} train.py configs/short_run.py --dtype=fp64 --check_replicas=1 --comm_timeout=20"
COLUMNS = ["right", "minutes", "hints", "tries"]
TEST = re.compile(r"testing/|conftest|(.*/)?test_")
TOLD = """hunt {seed}, level {level}: mine/hunt has one defect. Edit the files in mine/hunt, and say why with --done.
mine/hunt に不具合が1つあります。2つのフォルダで学習して比べ、直し、--done で理由を書きます (--hint: ファイル名)。
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
    """Make mine/hunt, without what tells the defect's place. Return the text to show."""
    copy, (defect, processes, fields) = MINE / "hunt", hunted(level, seed)
    if copy.exists():
        raise UserError("mine/hunt: a hunt is open; end it with --done, or remove the folder")
    if (over := kept(level, seed)).exists():
        raise UserError(f"mine/{over.name}: this hunt is over; remove it, or take another --seed")
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
    write(dict(level=level, seed=seed, began=time.time(), hints=0, tries=0))
    return told + test


def kept(level, seed):
    return MINE / f"hunt-{level}-{seed}.json"


def write(record):
    (MINE / "hunt.json").write_text(json.dumps(record, ensure_ascii=False), "utf-8")


# --- the end ----------------------------------------------------------------------------------------------------------


def tests_of(defect, files):
    """Return the defect's test, and all that find a defect of one of these files."""
    return [defect.test, *sorted({d.test for d in DEFECTS if d.file in files and "::" in d.test} - {defect.test})]


def judge(record, limit=LIMIT):
    """Judge a record's files {name: text} in a copy of the last commit. Return the messages of red tests."""
    (defect, _, _), program = hunted(record["level"], record["seed"]), git("ls-files", "*.py").decode().split()
    files = {name: record["files"][name] for name in {*program} & {*record["files"]} if not TEST.match(name)}
    tests = tests_of(defect, files)
    print(f"running: {len(tests)} tests ...", file=sys.stderr, flush=True)
    with copied(defective(defect) | files) as folder:
        return [message for _, message in run_tests(folder, tests, limit=limit) if message is not None]


def done(record, sentence, limit=LIMIT):
    """Judge mine/hunt, and keep the record. Return (text to show, whether it is right)."""
    copy, (defect, _, _) = MINE / "hunt", hunted(record["level"], record["seed"])
    names = git("diff", "--name-only", "hunt", folder=copy).decode().split()
    record |= {"files": {name: (copy / name).read_text("utf-8") for name in names}, "sentence": sentence}
    record |= {"minutes": round((time.time() - record["began"]) / 60), "tries": record["tries"] + 1}
    write(record)
    said = "{minutes} minutes, hints: {hints}, tries: {tries}".format(**record)
    if red := judge(record, limit):
        tells = record["level"] == 1 or re.search(r"no answer|exit code|(Syntax|Import|Name|Type)Error", red[0])
        return f"not yet まだです: {said}; red tests 失敗したテスト: {len(red)}\n{red[0] if tells else ''}", False
    over = kept(record["level"], record["seed"])
    (MINE / "hunt.json").rename(over)
    copy.rename(over.with_suffix(""))
    edits = [f"planted:\n{old}\n--->\n{new or 'nothing'}" for old, new in defect.edits]
    lines = [f"right 正解: {said}", *edits, defect.words, f"mine/hunt was moved to 移動先: mine/{over.stem}"]
    return "\n".join(lines), True


def graded(mine, limit):
    """Judge the hunts in a folder mine/. Return a row for `grade`."""
    records = [json.loads(regular(file).read_text("utf-8")) for file in sorted(mine.glob("hunt*.json"))]
    records = [record for record in records if record["tries"]]
    right = sum(not judge(record, limit) for record in records)
    row = {name: sum(record[name] for record in records) for name in COLUMNS[1:]}
    note = "; ".join(str(record["sentence"]) for record in records) or "todo"
    return row | {"right": f"{right} of {len(records)}", "note": note}


def main(words):
    """Run the command line. Exit with code 1 if mine/hunt is judged and not right. Raises UserError."""
    parser = Parser("python exercise.py hunt")
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="begin this hunt")
    parser.add_argument("--level", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--done", metavar="SENTENCE", help="judge mine/hunt; say which experiment excluded what")
    parser.add_argument("--hint", action="store_true", help="tell the file of the defect")
    parser.add_argument("--limit", type=within(1, 10**6), default=LIMIT, help="seconds that a test may need")
    options = parser.parse_args(words)
    if not (options.hint or options.done):
        return print(begin(options.seed, options.level))
    if not (MINE / "hunt").exists():
        raise UserError("mine/hunt: no hunt is open; python exercise.py hunt --seed=7 begins one")
    record = json.loads((MINE / "hunt.json").read_text("utf-8"))
    if options.hint:
        write(record | {"hints": 1})
        return print(f"file: {hunted(record['level'], record['seed'])[0].file}")
    text, right = done(record, options.done, options.limit)
    print(text)
    sys.exit(not right)
