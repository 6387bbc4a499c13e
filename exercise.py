"""Exercises along the lecture: write a function of the project yourself, and see which ideas your answer has.

    python exercise.py                 list the exercises and how they stand
    python exercise.py start 8         show the task; make mine/8_schedules.py with an empty function, and mine/8.txt
    python exercise.py 8               judge mine/8_schedules.py, and your predictions in mine/8.txt
    python exercise.py 8 FOLDER        judge those in FOLDER/mine
    python exercise.py 8 run COMMAND   run a command in a copy of the project that has your answer
    python exercise.py hunt --seed=7   plant a defect into mine/hunt, and print a command that shows it
    python exercise.py hunt --done     judge mine/hunt; exit code 1: not yet
    python exercise.py grade 4 8 FOLDER FOLDER ...  judge exercises of many folders (for teachers)
    python exercise.py oral 8                       print questions to ask, and their answers (for teachers)
    options: --limit=120   seconds of CPU time that judging an exercise may need, or ten times as many on the clock
             --csv=FILE    where `grade` writes its table, too

Predict first: `start` asks for two or three numbers. The right numbers, tables and the lamps' ideas, which have the
formulas, are shown once you have answered all. Your file stands in for the project's in a copy of the last commit, and
each test there is a lamp with the idea that it stands for. A bonus lamp may stay red. What else of the file you changed
is listed.

A hunt: train in the project and in mine/hunt, see the symptom, find the defect, mend it. Train other layouts and one
process, too: change the fields of the command. Losses, norms, bytes beside their formulas, copies and errors are the
instruments. To compare the files of mine/hunt with the project's is no hunt. Every edit that makes the tests right is
accepted. The defects are the rows of testing/defects.txt with `hunt:`.

exercises/N.toml has the ideas in Japanese and English, the names of the functions to write, the lamps with their points
(a bonus has 0), and answers for our own tests.
"""

from errors import WRONG, UserError, exit_on_user_error, reading, shown  # isort: skip
from options import Parser, within  # isort: skip
import ast
import contextlib
import csv
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
import unicodedata
from pathlib import Path

from testing.defects import DEFECTS, planted
from testing.judging import LIMIT, ROOT, beginning, committed, contains, copied, run, run_tests

MINE = ROOT / "mine"
DATA = ROOT / "data/stdlib_bytes"
HUNTS = [defect for defect in DEFECTS if defect.hunt]
COLUMNS = ["student", "exercise", "points", "lamps", "predictions", "also changed", "note"]
EQUAL = "equal to the project's own answer"
CSV = ["student", "exercise", "points", "predictions", EQUAL, "note"]
NOTE = 70  # characters of a table's cell
LINES = 16  # of a red lamp's message
LONGEST = 10**5  # characters of an answer
PART = r"(?m)^(?=[^\s)\]}]|    (?:def |@))"  # the beginning of a class, a method, a function or another line
LEGEND = """todo: not judged yet; red: a lamp is red; green: all but bonus are green. A lamp is a test with one idea.
todo: まだ採点していません。red: 赤いランプがあります。green: ボーナス以外は緑です。ランプは1つの考え方のテストです。"""
# Files that tell a defect's place or judge it, and what a run reads and writes.
NOT_OF_A_HUNT = shutil.ignore_patterns("testing", "exercise*", "conftest.py", "test_*", "data", "out")
TRAIN = """torchrun --nproc_per_node={} train.py configs/short_run.py{}{} --dtype=fp64 --check_replicas=1 \
--comm_timeout=20 --out_dir=out/$RANDOM"""  # processes, a space, fields
HUNT = """hunt {}: mine/hunt has one defect. Train in both folders, edit the files in mine/hunt, then --done.
mine/hunt に不具合が1つあります。2つのフォルダで学習して比べ、mine/hunt のファイルを直し、--done で採点します。
the project:  {command}
the copy:     (cd mine/hunt && {command})"""
SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "^": "**", "%": "/100", "\u2212": "-"})  # times, by, minus
FORMAT = """# Write one number each, without a unit, such as 8,192 or 6e23 or 5/7 or 4*1024 or 2**20 (at most 1% off).
# 数だけを1つずつ、単位を付けずに書いてください。+ - * / ** の式でもかまいません。
"""


def exercise(number):
    """Return exercises/`number`.toml. Raises UserError if there is none."""
    if str(number) not in map(str, numbers()):
        raise UserError(f"exercise {number}: should be one of {', '.join(map(str, numbers()))}")
    return tomllib.loads((ROOT / f"exercises/{number}.toml").read_text("utf-8"))


def numbers():
    return sorted(int(path.stem) for path in (ROOT / "exercises").glob("*.toml"))


# --- start ------------------------------------------------------------------------------------------------------------


def node_of(tree, name):
    """Return the tree of "f" or "Class.f"."""
    for part in name.split("."):
        tree = next(child for child in tree.body if getattr(child, "name", None) == part)
    return tree


def blank(number):
    """Return the text of the exercise's file with functions that raise UserError."""
    text = committed(exercise(number)["file"])
    for name in exercise(number)["functions"]:
        lines, node = text.splitlines(keepends=True), node_of(ast.parse(text), name)
        begin = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
        indent = "    " * (1 + name.count("."))
        error = f'raise UserError("exercise {number}: {name} is yours to write")'
        body = f"{indent}from errors import UserError\n\n{indent}{error}\n"
        text = "".join([*lines[:begin], body, *lines[node.end_lineno :]])
    return text


def answer_path(number, mine):
    return mine / f"{number}_{Path(exercise(number)['file']).name}"


def start(number):
    """Write the file to answer in and the questions, unless they are there. Return the text to show."""
    e, file, questions = exercise(number), answer_path(number, MINE), MINE / f"{number}.txt"
    MINE.mkdir(exist_ok=True)
    if not file.exists():
        file.write_text(blank(number), "utf-8")
    if not questions.exists():
        lines = [FORMAT]
        for q in e["predict"]:
            lines += [*(f"# {text}" for text in q["ask"]), f"{q['name']} = ?\n"]
        questions.write_text("\n".join(lines), "utf-8")
    predict = f"predict first まず予想: mine/{questions.name}"
    write = f"write 書く関数: mine/{file.name} {', '.join(e['functions'])}"
    return "\n".join([title(number), *e["task"], predict, write, f"judge 採点: python exercise.py {number}"])


# --- judge ------------------------------------------------------------------------------------------------------------


def text_of(path):
    """Return the beginning of a student's file. Raises UserError, also if another folder has it."""
    if path.parent != MINE and not path.resolve().is_relative_to(path.parent.parent.resolve()):
        raise UserError(f"{path}: should be a file of this folder, not a link to another one")
    return beginning(path, LONGEST)


def tests(*numbers):
    """Return the tests of these exercises' lamps."""
    return list(dict.fromkeys(lamp["test"] for number in numbers for lamp in exercise(number)["lamp"]))


def judge(number, text, limit=LIMIT, commands=()):
    """Judge `text`, the exercise's whole file, in a copy of the last commit, and print what the commands print there.

    Return its `lamps`.
    """
    with copied({exercise(number)["file"]: text}) as folder:
        judged = lamps(number, run_tests(folder, tests(number), limit=limit))
        for command in commands:
            code, output, errors = run(folder, command.split(), limit)
            said = [*output.splitlines(), *errors.splitlines()[-1:]]
            said = said if code is not None else [f"no answer in {limit:g} s"]
            print(f"$ python {command}", *map(shown, said), sep="\n")
    return judged


def lamps(number, results):
    """Return [(lamp, None or the message of a failure)]. results: of `run_tests`.

    A frequent mistake (`mistake` in the exercise's file) has a sentence instead.
    """
    e, found = exercise(number), []
    for lamp in e["lamp"]:
        red = [message for test, message in results if message is not None and contains(lamp["test"], test)]
        says = ["\n".join(each["says"]) for each in e.get("mistake", []) if re.search(each["found"], "".join(red[:1]))]
        found.append((lamp, next(iter(says + red), None)))
    return found


def parts_of(text, functions):
    """Return [(name, text)] of a file's classes, methods, functions and other lines, without those in `functions`.

    Comments are left out. A student's text is not parsed: it may be anything.
    """
    found, scope, own = [], "", [*functions]
    lines = filter(str.strip, re.sub(" *#.*", "", text).splitlines())
    for part in re.split(PART, "".join(f"{line}\n" for line in lines)):
        indent, kind, name = re.match(r"( *)(?:(def|class) (\w+))?", part).groups()
        if not indent:
            scope = f"{name}." * (kind == "class")
        name = scope * bool(indent) + (name or part.split("\n")[0])
        if name in own:
            own.remove(name)
        else:
            found.append((name, part))
    return found


def also_changed(number, text, own=False):
    """Return what the answer changes beside its functions: names of functions, and lines at the top of the file.

    own: also those of its functions that are not the project's.
    """
    e = exercise(number)
    functions = [] if own else e["functions"]
    project, answer = (parts_of(each, functions) for each in (committed(e["file"]), text))
    changed = [part for part in project + answer if not (part in project and part in answer)]
    return list(dict.fromkeys(name for name, _ in changed))


def number_of(text):
    """Return the value of a text such as 8,192 or 5/7 or 4*1024 or 2^20 or 25%, or None if it is no number."""
    plain = re.sub(r",(?=\d{3}\b)| ", "", text).translate(SIGNS)
    with contextlib.suppress(SyntaxError, NameError, MemoryError, *WRONG):
        if re.fullmatch(r"[\d.eE+*/()-]+", plain):  # no names
            tree = ast.parse(plain, mode="eval")
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant):
                    node.value = float(node.value)  # 9**9**9 is an error then, not a long number
            return float(eval(compile(tree, "", "eval")))


def right_number(question):
    """Return the right answer: a derivation's last term. The tests compare it with the formula."""
    return number_of(question["derivation"].rpartition("=")[2])


def compared(number, mine):
    """Return [(question, answer, right answer, whether it is at most 1% off, or None: no number)].

    The answers are the first complete ones in a folder mine/, if there are any. Those of the student are kept.
    """
    first = mine / f"{number}.first"
    for path in (first, mine / f"{number}.txt"):
        text, rows = text_of(path) if path.exists() else "", []
        answers = dict(re.findall(r"(?m)^ *(\w+) *= *([^\s#].*?)\s*?(?:#|$)", unicodedata.normalize("NFKC", text)))
        for q in exercise(number)["predict"]:
            answer, right = answers.get(q["name"], "?"), right_number(q)
            value = number_of(answer)
            rows.append((q, answer, right, value if value is None else abs(value - right) <= 0.01 * right))
        if None not in [good for *_, good in rows]:
            if mine == MINE:
                first.write_text(text, "utf-8")
            break
    return rows


# --- grade ------------------------------------------------------------------------------------------------------------


def grade(chosen, folders, limit, path):
    """Print a table that grows, and write it into the file `path`. A damaged folder has only a note."""
    widths = {name: max(7, len(name)) for name in COLUMNS} | {"student": max(7, *map(len, folders)), "note": 0}

    def print_row(row):
        cells = [f"{row.get(name, ''):<{width}.{max(NOTE, width)}}" for name, width in widths.items()]
        print("  ".join(cells).rstrip(), flush=True)

    with open(path, "w", 1, "utf-8") as file:
        writer = csv.DictWriter(file, CSV, extrasaction="ignore")
        writer.writeheader()
        print_row({name: name for name in COLUMNS})
        for folder, number in itertools.product(folders, chosen):
            row = {"student": folder, "exercise": number, EQUAL: "no"}
            try:
                with reading(folder, MemoryError):
                    row |= graded(number, Path(folder, "mine"), limit)
            except UserError as error:
                row["note"] = error
            row = {name: shown(" ".join(str(cell).split())) for name, cell in row.items()}
            print_row(row)
            writer.writerow(row)


def graded(number, mine, limit):
    """Return a row for `grade`, {column: value}, without the bonus lamps."""
    if not mine.parent.is_dir():
        return {"note": "no such folder"}
    path, good = answer_path(number, mine), [good for *_, good in compared(number, mine)]
    row = {"predictions": f"{good.count(True)} of {len(good)}"}
    if not path.exists() or (text := text_of(path)) == blank(number):
        return row | {"note": "todo"}
    judged = judge(number, text, limit)
    messages = [message for lamp, message in judged if lamp["points"]]
    functions = {*exercise(number)["functions"]}
    return row | {
        "points": f"{sum(lamp['points'] for lamp, message in judged if message is None):g}",
        "lamps": f"{messages.count(None)} of {len(messages)}",
        "also changed": ", ".join(also_changed(number, text)),
        EQUAL: "yes" if functions.isdisjoint(also_changed(number, text, own=True)) else "no",
        "note": next(filter(None, messages), ""),
    }


# --- the hunt ---------------------------------------------------------------------------------------------------------


def hunted(seed):
    """Return (Defect, a copy of the last commit with it). Neighbouring seeds are other defects.

    Raises UserError if the defect does not fit.
    """
    defect = HUNTS[seed % len(HUNTS)]
    with reading("hunts need the project's own lines in the last commit"):
        return defect, copied({defect.file: planted(defect, committed(defect.file))})


def begin_hunt(seed, folder):
    """Make the folder, and print the command to run."""
    if not DATA.exists():
        raise UserError("data/stdlib_bytes: hunts train on it; make it with: python prepare.py --tokenizer=bytes")
    defect, copy = hunted(seed)
    with copy as project:
        shutil.copytree(project, folder, ignore=NOT_OF_A_HUNT)
    (folder / "seed").write_text(str(seed))
    (folder / "data").symlink_to(DATA.parent)
    print(HUNT.format(seed, command=TRAIN.format(*defect.hunt.partition(" "))))


def judge_hunt(folder):
    """Judge the folder with the tests of all HUNTS: a mend may break nothing else. Exit with code 1 if it is red."""
    defect, copy = hunted(int((folder / "seed").read_text()))
    print("judging, about 20 seconds 採点中 (約20秒) ...", flush=True)
    with copy as project:
        shutil.copytree(folder, project, ignore=NOT_OF_A_HUNT, dirs_exist_ok=True)
        results = run_tests(project, sorted({hunt.test for hunt in HUNTS}), limit=LIMIT)
    if any(message for _, message in results):
        sys.exit("not yet まだです")
    print("right 正解", defect.name, defect.file, defect.words, *map("\n--->\n".join, defect.edits), sep="\n")


def hunt(words):
    """Run the command line of a hunt. Raises UserError."""
    parser, folder = Parser("python exercise.py hunt"), MINE / "hunt"
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--seed", type=int, default=random.randrange(1000), help="begin this hunt")
    either.add_argument("--done", action="store_true", help="judge mine/hunt")
    options = parser.parse_args(words)
    if folder.exists() != options.done:
        raise UserError("mine/hunt: --done needs this folder; to begin another hunt, remove it")
    if options.done:
        judge_hunt(folder)
    else:
        begin_hunt(options.seed, folder)


# --- the command line -------------------------------------------------------------------------------------------------


def mark(good, bad="red"):
    return f"{'green' if good else bad:<5}"


def title(number):
    e = exercise(number)
    return f"exercise {number}: {e['idea'][0]}\n    {e['idea'][1]}\n    slide {e['slide']}"


def oral(number):
    rows = enumerate(exercise(number)["oral"], start=1)
    return "\n".join(f"{i}. {q}\n   {q_ja}\n   -> {answer}\n      {ja}" for i, (q, q_ja, answer, ja) in rows)


def answer_of(number, mine):
    """Return the text of the answer in a folder mine/. Raises UserError if there is none."""
    if not (path := answer_path(number, mine)).exists():
        raise UserError(f"{path}: is missing; first: python exercise.py start {number}")
    return text_of(path)


def judge_mine(number, mine, limit):
    """Judge the answer and the predictions in a folder mine/, and print all. Return whether the exercise is green."""
    e, text, answers = exercise(number), answer_of(number, mine), compared(number, mine)
    todo = ", ".join(f"{q['name']} = {shown(answer[:NOTE])}" for q, answer, _, good in answers if good is None)
    hidden = todo and mine == MINE
    print("judging, about 10 seconds 採点中 (約10秒) ...", flush=True)
    judged = judge(number, text, limit, () if hidden else e["show"])
    print(title(number), f"your file あなたのファイル: {answer_path(number, mine)}", sep="\n")
    if changed := also_changed(number, text):
        print(f"also changed ほかの変更: {shown(', '.join(changed))}")
    if hidden:
        print(f"mine/{number}.txt: all is shown once these are numbers 全問に数で答えると、すべて表示されます: {todo}")
        answers = []
    for q, answer, right, good in answers:
        why = "" if good else f": {q['derivation']}"
        said = f"{q['name']}: you あなた {shown(answer[:NOTE])}, the formula 正解 {right:,.10g}{why}"
        print(mark(good), said, sep="  ")
    for i, (lamp, message) in enumerate(judged, 1):
        bad, idea = "red" if lamp["points"] else "bonus", [f"lamp ランプ {i}"] if hidden else lamp["idea"]
        print(mark(message is None, bad), "\n       ".join(idea), sep="  ")
        reason = message or ""
        lines = [line for line in reason.splitlines() if line.strip(" ^~") and "-v to get" not in line]
        lines = lines[-6:] if "Traceback" in reason else lines[:LINES]
        print("".join(f"       | {shown(line)}\n" for line in lines), end="")
    return all(message is None or not lamp["points"] for lamp, message in judged)


def run_command(number, words):
    """Run a command in a copy with the answer, on this tree's data. Return its exit code."""
    if not words:
        raise UserError("run: should be followed by a command, as in: run python -m accounts.draw 1f1b")
    with copied({exercise(number)["file"]: answer_of(number, MINE)}) as folder:
        if (ROOT / "data").exists():
            (folder / "data").symlink_to(ROOT / "data")
        program = {"python": sys.executable}.get(words[0], words[0])
        environment = os.environ | {"PYTHONPATH": str(folder)}
        return subprocess.run([program, *words[1:]], cwd=folder, env=environment).returncode


def main(arguments=None):
    """Run the command line. Exit with code 1 if a lamp that is no bonus is red."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["hunt"]:
        return hunt(arguments[1:])
    if arguments[1:2] == ["run"]:
        sys.exit(run_command(arguments[0], arguments[2:]))
    usage = """python exercise.py [hunt ... | [start | oral] N | N [FOLDER | run COMMAND] | grade N ... FOLDER ...]
                          [--limit=N] [--csv=FILE]"""
    parser = Parser("python exercise.py", usage=usage)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--limit", type=within(1, 10**6), default=LIMIT)
    parser.add_argument("--csv", default=os.devnull)
    options = parser.known(*parser.parse_known_intermixed_args(arguments))
    words, limit = options.words, options.limit
    command = words.pop(0) if words and words[0] in ("start", "oral", "grade") else ""
    number, *folders = words or [""]
    chosen = [*itertools.takewhile(str.isdigit, words)]
    if not (command or words):
        for each in numbers():
            (english, japanese), judged = exercise(each)["idea"], MINE / f"{each}.state"
            state = judged.read_text("utf-8") if judged.exists() else "todo"
            print(f"{each:>2} {state:<6} {english}\n          {japanese}")
        print(LEGEND)
    elif command in ("start", "oral") and len(words) == 1:
        print({"start": start, "oral": oral}[command](number))
    elif command == "grade" and words[len(chosen) :]:
        for each in chosen or words:
            exercise(each)  # an unknown number ends the command, before any folder
        grade(chosen, words[len(chosen) :], limit, options.csv)
    elif not command and len(folders) < 2:
        mine = Path(folders[0], "mine") if folders else MINE
        green = judge_mine(number, mine, limit)
        if mine == MINE:
            (MINE / f"{number}.state").write_text("green" if green else "red", "utf-8")
        sys.exit(not green)
    else:
        parser.error("start and oral take one number, judging also a folder, grade numbers and folders")


if __name__ == "__main__":
    exit_on_user_error(main)
