"""The hunt: one defect is planted into a copy of the project. See its symptom, find it, mend it.

    python exercise.py hunt --seed=7 --level=2          plant it into mine/hunt, and show its symptom (level 1 to 3)

    python exercise.py hunt --compare                   the same layout again, with the bytes' tables
    python exercise.py hunt --compare --dp=2 --zero=1   another layout: fields of train.py; dp=N for the processes
    python exercise.py hunt --compare --micro_batch_size=8   the same layout with this change (without dp, tp, pp, cp)
    (cd mine/hunt && python -m accounts.draw 1f1b --stages=4 --microbatches=8)   draw a schedule of the copy
    python exercise.py hunt --hint                      the file, then the function, then the defect; each costs points
    python exercise.py hunt --done "dp=2 is right, so ..."   say which experiment excluded what, and be judged;
                                                        exit code 1: not yet

    python exercise.py grade hunt FOLDER FOLDER ...     for the teacher: judge the hunts in mine/ of these copies again
    python exercise.py hunt --check --level=3           for the teacher: run all hunts of a level here

mine/hunt has a history of its own, so `git diff` shows your edits, not the defect. At level 1 a test names the cause.
At levels 2 and 3 the copy has no tests: losses, norms, bytes and copies are the instruments. To compare the copy with
the project is no hunt. Every edit that makes the tests right is accepted. It gives 10 points for each level; a hint
costs 2 for each level, each further try 1.

hunts.txt says which defects of testing/defects.txt are hunted, in which layouts, and what they showed on one machine.
"""

import ast
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

import config as configuration
from accounts.report import aligned
from errors import UserError, reading
from exercises.answers import committed, copied_commit, git, need_pytest
from options import Parser
from testing import judging
from testing.defects import DEFECTS, ROOT, planted

MINE, DATA = ROOT / "mine", ROOT / "data/stdlib_bytes"
SPOILERS, TESTS = "exercise.py exercises testing/*defects*", " testing conftest.py *test_*.py"
SHOWN = ("loss", "lm_loss"), ("norm", "grad_norm"), ("validation", "validation_loss")
TRAIN, PROJECT = "train.py configs/short_run.py --dtype=fp64 --check_replicas=1", "the project, this layout"
KEPT = "seed level minutes hints tries sentence".split()  # of a record, for the teacher
TEST = re.compile(r"testing/|conftest|(.*/)?test_")
PATIENCE = 180  # seconds without a new step of a run
TOLD = """hunt {seed}, level {level}: mine/hunt has one defect. Edit the files in mine/hunt, and say why with --done.
mine/hunt に不具合が1つあります。--compare で別のレイアウトと比べ、直し、--done で理由を書きます。--hint は減点です。"""


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


def begin(seed, level):
    """Make mine/hunt, without what tells the defect's place. Return the hunt's state and the text to show."""
    copy, (defect, processes, fields) = MINE / "hunt", hunted(level, seed)
    state = dict(level=level, seed=seed, began=time.time(), hints=0, tries=0, known={})
    if copy.exists():
        raise UserError("mine/hunt: a hunt is open; end it with --done, or remove the folder")
    if not DATA.exists():
        raise UserError("data/stdlib_bytes: hunts train on it; make it with: python prepare.py --tokenizer=bytes")
    with copied_commit(defective(defect)) as folder:
        text, symptom = look(folder, processes, fields, state["known"])
        if not symptom:
            raise UserError(f"seed={seed}: this hunt shows nothing on this machine; take another seed")
        shutil.copytree(folder, copy)
    (copy / "data").symlink_to(DATA.parent)
    spoilers = SPOILERS + TESTS * (level > 1)
    commit = "-c user.name=hunt -c user.email=hunt commit -qm hunt --no-gpg-sign"
    for words in ("init -q", "add -A", f"rm -rqf {spoilers}", commit, "tag hunt"):
        git("-C", copy, *words.split())
    test = f"a red test: (cd mine/hunt && pytest -m '' '{defect.test}')\n" if level == 1 else ""
    return state, "\n".join([TOLD.format(**state), test + text, "", __doc__.split("\n\n")[2]])


# --- the symptom ------------------------------------------------------------------------------------------------------


def run(folder, processes, fields):
    """Train in `folder`. Return {"numbers": {"loss 1": ...}, "wrong": [other findings], "tables": of the ledger}."""
    with tempfile.TemporaryDirectory() as out:
        start = f"-m torch.distributed.run --standalone --nproc_per_node={processes} --tee=3 --log_dir={out}/said"
        words = start.split() * (processes > 1) + TRAIN.split()
        words += [*fields, f"--data_dir={DATA}", f"--out_dir={out}", "--comm_timeout=20"]
        (file := Path(out, "metrics.jsonl")).touch()
        code, said = judging.run(folder, words, PATIENCE, file, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        files = sorted(Path(out).glob("said/*/*/*/stderr.log"))
        errors = ("".join(path.read_text("utf-8", "replace") for path in files) or said).replace(out, "OUT")
        steps = [*enumerate(map(json.loads, file.read_text("utf-8").splitlines()[:3]), 1)]
    numbers = {f"{name} {i}": float(step[key]) for name, key in SHOWN for i, step in steps if key in step}
    died = f"no answer in {PATIENCE} s" if code is None else "a process died without a word (a segmentation fault?)"
    line = r"(?m)((?:^error|^rank \d+|\w+Error): .*?)(?:: \[/.*)?$"  # without Gloo's own text, which has a path
    wrong = re.findall(line, errors) or [died] if code != 0 else []
    tables = re.sub(r"(?m)^\[default0\]: ?", "", said[said.find("sent per step by") :]) if code == 0 else ""
    for cells in ([cell.strip() for cell in line.split("|")] for line in tables.splitlines()):
        name, sizes = {7: (cells[:3], cells[5:]), 4: (cells[:1], cells[1:3])}.get(len(cells), ((), ("", "")))
        if sizes[0] != sizes[1] != "formula":
            wrong.append(f"{' '.join(name)}: {sizes[0]} bytes, the formula says {sizes[1]}")
    return {"numbers": numbers, "wrong": list(dict.fromkeys(wrong)), "tables": tables}


def difference(right, ours):
    """Return [a text for each number and finding of the run `ours` that the clean run `right` does not have]."""
    lines = {}
    for name, number in right["numbers"].items():
        if not math.isclose(ours["numbers"].get(name, math.nan), number, rel_tol=1e-7):
            lines.setdefault(name.split()[0], f"{name} is {number_of(ours, name)}, not {number:.7g}")
    return [*lines.values(), *(text for text in ours["wrong"] if text not in right["wrong"])]


def number_of(found, name):
    return f"{found['numbers'][name]:.7g}" if name in found["numbers"] else "none"


def clean_run(processes, fields, known):
    """Return `run` of the last commit. known: {layout: earlier runs}. Raises UserError if it does not train."""
    if (layout := f"{processes} {' '.join(fields)}") not in known:
        with copied_commit() as folder:
            found = run(folder, processes, fields)
        if not found["numbers"]:
            raise UserError(f"the project itself does not train here: {found['wrong'][0]}")
        known[layout] = found
    return known[layout]


def look(copy, processes, fields, known, more=False):
    """Compare a layout of the copy with the project's. Return (the rows as text, the symptom: [texts]).

    known: the project's runs, to which this function adds. more: show also the copy's bytes.
    """
    configuration.check(c := configuration.load(["configs/short_run.py", *fields]), processes)
    layout = [*configuration.layout_of(c), "micro_batch_size"]
    one = [f for f in fields if f.partition("=")[0][2:] not in layout] + [f"--micro_batch_size={c.global_batch_size}"]
    calls = {PROJECT: (clean_run, processes, fields, known), "mine/hunt, this layout": (run, copy, processes, fields)}
    calls["mine/hunt, one process"] = run, copy, 1, one
    runs = {title: call[0](*call[1:]) for title, call in tqdm(calls.items(), "training runs")}
    right, (_, here, *_) = runs[PROJECT], runs.values()
    names = dict.fromkeys(sorted(name for each in runs.values() for name in each["numbers"]))
    rows = [[title, *(number_of(each, name) for name in names)] for title, each in runs.items()]
    lines = [f"$ torchrun --nproc_per_node={processes} {TRAIN} {' '.join(fields)}", aligned([["", *names], *rows], 1)]
    for title, each in list(runs.items())[1:]:
        lines += [f"{title}: {text}" for text in difference(right, each)] or [f"{title}: as the project"]
    if more and here["tables"]:
        names = [text.partition(":")[0] for text in here["wrong"] if "bytes, the formula says" in text]
        lines += [here["tables"].rstrip(), f"bytes that differ from the formulas: {', '.join(names) or 'none'}"]
    return "\n".join(lines), difference(right, here)


# --- hints, the end, the command line ---------------------------------------------------------------------------------


def hints(defect):
    """Return the hints, the weakest first."""
    text = committed(defect.file)
    line = text[: text.index(defect.edits[-1][0])].count("\n") + 1
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names = [node.name for node in nodes if node.lineno <= line <= node.end_lineno]
    return [f"file: {defect.file}", f"function: {'.'.join(names) or 'none'}", f"the defect: {defect.words}"]


def judge(record, limit=120):
    """Judge a record's files {name: text} in a copy of the last commit. Return (the grade, messages of red tests).

    The tests are the defect's, and all that find a defect of one of these files.
    """
    need_pytest()
    (defect, _, _), program = hunted(record["level"], record["seed"]), git("ls-files", "*.py").decode().split()
    files = {name: record["files"][name] for name in {*program} & {*record["files"]} if not TEST.match(name)}
    tests = [defect.test, *sorted({d.test for d in DEFECTS if d.file in files and "::" in d.test} - {defect.test})]
    with copied_commit(defective(defect) | files) as folder:
        print(f"running: {len(tests)} tests ...", file=sys.stderr, flush=True)
        red = [message for _, message in judging.run_tests(folder, tests, limit=limit) if message is not None]
    points = 0 if red else max(1, record["level"] * (10 - 2 * record["hints"]) - record["tries"] + 1)
    return {key: record[key] for key in KEPT} | {"right": not red, "points": points}, red


def done(state, sentence):
    """Judge mine/hunt, and keep the record in mine/hunt-LEVEL-SEED.json. Return (text to show, whether it is right)."""
    copy, (defect, _, _) = MINE / "hunt", hunted(state["level"], state["seed"])
    names = git("-C", copy, "diff", "--name-only", "hunt").decode().split()
    state |= {"files": {name: (copy / name).read_text("utf-8") for name in names}, "sentence": sentence}
    state |= {"minutes": round((time.time() - state["began"]) / 60, 1), "tries": state["tries"] + 1}
    (grade, red), kept = judge(state), MINE / f"hunt-{state['level']}-{state['seed']}.json"
    if not (kept.exists() and json.loads(kept.read_text("utf-8"))["right"]):  # the first right mend counts
        record = state | {"known": {}, "right": grade["right"]}
        kept.write_text(json.dumps(record, ensure_ascii=False), "utf-8")
    said = "{points} points, {minutes} minutes, hints: {hints}, tries: {tries}".format(**grade)
    if red:
        tells = state["level"] == 1 or re.search(r"no answer|exit code|(Syntax|Import|Name|Type)Error", red[0])
        return f"not yet まだです: {said}; red tests 失敗したテスト: {len(red)}\n{red[0] if tells else ''}", False
    shutil.rmtree(kept.with_suffix(""), ignore_errors=True)  # of the same hunt, played before
    moved = os.path.relpath(shutil.move(copy, kept.with_suffix("")), MINE.parent)
    edits = [f"planted:\n{old}\n--->\n{new or 'nothing'}" for old, new in defect.edits]
    lines = [f"right 正解: {said}", *edits, defect.words, f"mine/hunt was moved to 移動先: {moved}"]
    return "\n".join(lines), True


def grading(limit):
    """Return (the columns, the function that judges a folder's hunts) for `grade`."""

    def one(folder):
        files = sorted((folder / "mine").glob("hunt-*.json"))
        found = [judge(json.loads(file.read_text("utf-8")), limit)[0] for file in files]
        row = {name: round(sum(each[name] for each in found), 1) for name in ("right", "minutes", "hints", "points")}
        note = "; ".join(each["sentence"] for each in found) or "todo"
        return row | {"right": (row["right"], len(found)), "hunts done": found, "note": note}

    return ["right", "minutes", "hints", "points"], one


def check(level, rows):
    """Yield rows of hunts.txt, with the symptom on this machine. rows: of `hunts(level)`."""
    known = {}
    for d, n, fields in rows:
        with copied_commit(defective(d)) as folder:
            symptom = difference(clean_run(n, fields, known), run(folder, n, fields))
        yield f"{level} | {d.name} | {' '.join([str(n), *fields])} | {'; '.join(symptom) or 'none'} | {d.words}"


def main(words):
    """Run the command line. Exit with code 1 if mine/hunt is judged and not right. Raises UserError."""
    parser = Parser("python exercise.py hunt")
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="begin this hunt")
    parser.add_argument("--level", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--done", metavar="SENTENCE", help="judge mine/hunt; say which experiment excluded what")
    for name, use in ("compare", "run a layout: --dp=2 --zero=1"), ("hint", "costs points"), ("check", "run a level"):
        parser.add_argument(f"--{name}", action="store_true", help=use)
    options, fields = parser.parse_known_args(words) if "--compare" in words else (parser.parse_args(words), [])
    if options.check:
        return [print(row, flush=True) for row in check(options.level, hunts(options.level))]
    file, copy, goes_on = MINE / "hunt.json", MINE / "hunt", options.compare or options.hint or options.done
    if goes_on and not copy.exists():
        raise UserError("mine/hunt: no hunt is open; python exercise.py hunt --seed=7 begins one")
    state, text = (json.loads(file.read_text("utf-8")), "") if goes_on else begin(options.seed, options.level)
    right = True
    defect, processes, layout = hunted(state["level"], state["seed"])
    if options.hint:
        state["hints"] = min(state["hints"] + 1, len(hints(defect)))
        text = "\n".join(hints(defect)[: state["hints"]])
    elif options.done:
        text, right = done(state, options.done)
    elif options.compare:
        if wrong := [word for word in fields if not re.match(r"--(?!nproc)\w", word)]:
            raise UserError(f"{wrong[0]}: should be a field of train.py, as in --compare --dp=2 (dp: processes)")
        if sizes := re.findall(r"--[dtpc]p=([1-9]\d*)", " ".join(fields)):
            processes, layout = math.prod(map(int, sizes)), []
        layout = {f.partition("=")[0]: f for f in [*layout, *fields] if not re.match("--dp=[1-9]", f)}.values()
        text, _ = look(copy, processes, layout, state["known"], more=True)
    file.write_text(json.dumps(state), "utf-8")
    print(text)
    if not right:
        sys.exit(1)
