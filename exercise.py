"""Exercises along the lecture: write a function of the project yourself, and see which ideas your answer has.

    python exercise.py                 list the exercises and how they stand
    python exercise.py start 8         empty the functions of exercise 8; make mine/8.txt for your predictions
    python exercise.py 8               judge your file
    python exercise.py 8 FOLDER        judge the file and the predictions in another copy of the project
    python exercise.py hunt --seed=7   find a planted defect (exercises/hunt.py)
    python exercise.py stop 8          put the project's functions back; mine/ keeps your file for the next start
    python exercise.py grade 8 FOLDER FOLDER ...    judge many folders (for teachers)
    python exercise.py oral 8                       print questions to ask, and their answers (for teachers)
    options: --limit=120   seconds that a test may need
             --json        print the grades as JSON

Predict first: `start` asks for two or three numbers. The right numbers are shown once you have answered all. Your
functions, with new names of your file, are judged in a copy of the last commit. What else you changed has no effect:
it is listed. Each test is a lamp with the idea that it stands for. A bonus lamp may stay red.

exercises/N.toml has the ideas in Japanese and English, the names of the functions to write, the lamps, and answers for
our own tests.
"""

from errors import UserError, exit_on_user_error, reading  # isort: skip
from options import Parser, boolean, within  # isort: skip
import contextlib
import importlib
import re
import sys
import tomllib
from datetime import datetime
from fractions import Fraction
from pathlib import Path

from exercises.answers import committed, copied_commit, git, merged, need_pytest, new_names, same, with_body
from exercises.grade import grade
from testing.judging import contains, run, run_tests

ROOT = Path(__file__).parent
LIMIT = 120  # seconds that a test may need
NOTE = 70  # characters of a table's note
LINES = 16  # of a red lamp's message
LEGEND = """todo: not judged yet; red: a lamp is red; green: all but bonus are green. A lamp is a test with one idea.
todo: まだ採点していません。red: 赤いランプがあります。green: ボーナス以外は緑です。ランプは1つの考え方のテストです。"""
FORMAT = "# Write one number each, such as 8,192 or 0.11 or 3/27 (at most 1% off). 数を1つずつ書いてください。\n"


def exercise(number):
    """Return exercises/`number`.toml. Raises UserError if there is none."""
    if str(number) not in map(str, numbers()):
        raise UserError(f"exercise {number}: should be one of {', '.join(map(str, numbers()))}")
    return tomllib.loads((ROOT / f"exercises/{number}.toml").read_text("utf-8"))


def numbers():
    return sorted(int(path.stem) for path in (ROOT / "exercises").glob("*.toml"))


# --- start and stop ---------------------------------------------------------------------------------------------------


def blank(number, text):
    """Return the text of the exercise's file with functions that raise UserError."""
    for name in exercise(number)["functions"]:
        indent = "    " * (1 + name.count("."))
        error = f'raise UserError("exercise {number}: {name} is yours to write")'
        text = with_body(text, name, [f"{indent}from errors import UserError\n", "\n", f"{indent}{error}\n"])
    return text


def hide(file, number=None):
    """Keep a file's lines out of `git diff`, which would show the solution, or (no number) show them again.

    This uses the clone's own attributes, which also say the exercise's number. After `update-index --skip-worktree`,
    pull, stash and restore fail.
    """
    path = ROOT / git("rev-parse", "--git-path", "info/attributes").decode().strip()
    text, line = path.read_text("utf-8") if path.exists() else "", f"**/{file} -diff exercise={number}\n"
    path.parent.mkdir(exist_ok=True)
    path.write_text(re.sub(rf"\*\*/{file} -diff.*\n", "", text) + line * bool(number), "utf-8")


def open_in(file, folder):
    """Return the number of the exercise that `start` has opened in `file`, or NUMBER."""
    paths = [path / ".git/info/attributes" for path in (folder.resolve(), *folder.resolve().parents)]
    texts = [path.read_text("utf-8") for path in paths if path.exists()]
    match = re.search(rf"{file} -diff exercise=(\d+)", "".join(texts[:1]))
    return match[1] if match else "NUMBER"


def start(number):
    """Empty an exercise's functions, or put the kept answer back. Write the questions to mine/`number`.txt.

    Return the text to show. Raises UserError if an exercise is open in the same file.
    """
    e = exercise(number)
    file, questions = ROOT / e["file"], ROOT / f"mine/{number}.txt"
    text, sharing = file.read_text("utf-8"), [x for x in map(exercise, numbers()) if x["file"] == e["file"]]
    if not same(text, committed(e["file"]), [name for x in sharing for name in x["functions"]]):
        first = f"python exercise.py stop {open_in(e['file'], ROOT)}"
        raise UserError(f"{e['file']}: an exercise is open in it; first: {first}")
    text, (path, written) = blank(number, text), answer_in(number, ROOT)
    if written:
        answer = path.read_text("utf-8")
        text, _ = merged(text, answer, [*e["functions"], *new_names(answer, committed(e["file"]))])
    file.write_text(text, "utf-8")
    hide(e["file"], number)
    if not questions.exists():
        lines = [FORMAT]
        for q in e["predict"]:
            lines += [*(f"# {text}" for text in q["ask"]), f"{q['name']} = ?\n"]
        questions.write_text("\n".join(lines), "utf-8")
    name = answer_path(number, ROOT).name
    back = [f"mine/{name}: your answer is back in the file. 前の答えを戻しました。"] * written
    lines = f"predict first まず予想: mine/{number}.txt", f"write 書く関数: {e['file']} {', '.join(e['functions'])}"
    then = f"`python exercise.py {number}` judges 採点します; `python exercise.py stop {number}` puts back 元に戻します"
    return "\n".join([title(number), *e["task"], *back, *lines, then])


def answer_path(number, folder):
    """Return the path where `stop` keeps the answer."""
    return folder / f"mine/{number}_{Path(exercise(number)['file']).name}"


def stop(number):
    """Put the committed functions back, and keep the answer. Return the text to show. Raises UserError."""
    e = exercise(number)
    file, project = ROOT / e["file"], committed(e["file"])
    text = file.read_text("utf-8")
    if same(text, project, e["functions"]) or open_in(e["file"], ROOT) not in (str(number), "NUMBER"):
        raise UserError(f"{e['file']}: exercise {number} is not open in it")
    path, restored = answer_path(number, ROOT), merged(text, project, e["functions"])[0]
    if not path.exists() or not same(text, blank(number, project), e["functions"]):
        path.write_text(text, "utf-8")
    file.write_text(restored, "utf-8")
    hide(e["file"])
    english = f"{e['file']} has the project's functions again. Your file is kept: mine/{path.name}"
    return f"{english}\n{e['file']} を元の関数に戻しました。書いたファイルは mine/{path.name} に残っています。"


# --- judge ------------------------------------------------------------------------------------------------------------


def answer_in(number, folder):
    """Return (path, whether it is written) of the answer: the exercise's file, or the copy that `stop` has kept.

    The path is None if both have the project's functions. A file in which another exercise is open is no answer.
    """
    e = exercise(number)
    project, is_open = committed(e["file"]), open_in(e["file"], folder) in (str(number), "NUMBER")
    paths = [folder / e["file"]] * is_open + [answer_path(number, folder)]
    paths = [path for path in paths if path.exists()]
    with reading(e["file"]):
        texts = {path: path.read_text("utf-8") for path in paths}
    changed = [path for path in paths if not same(texts[path], project, e["functions"])]
    written = [path for path in changed if not same(texts[path], blank(number, project), e["functions"])]
    return (written or changed or [None])[0], bool(written)


def judge(number, text, limit=LIMIT):
    """Judge the functions in `text`, a whole file, in a copy of the last commit.

    Return ([(lamp, None or the message of a failure)], other names that `text` changes, without effect).
    """
    e = exercise(number)
    try:
        text, changed = merged(blank(number, committed(e["file"])), text, e["functions"])
    except SyntaxError as error:
        return [(lamp, f"{e['file']}:{error.lineno or 1}: SyntaxError: {error.msg}") for lamp in e["lamp"]], []
    with copied_commit({e["file"]: text}) as folder:
        results = run_tests(folder, [lamp["test"] for lamp in e["lamp"]], limit=limit)
    red = [(test, explained(e, message)) for test, message in results if message is not None]
    first = [next((message for test, message in red if contains(lamp["test"], test)), None) for lamp in e["lamp"]]
    return [*zip(e["lamp"], first, strict=True)], changed


def explained(e, message):
    """Return the sentence of a frequent mistake (`mistake` in the exercise's file), or else the message itself."""
    said = (mistake["says"] for mistake in e.get("mistake", []) if re.search(mistake["found"], message))
    return "\n".join(next(said, [message]))


def right_numbers(number):
    """Return the right numbers of the predictions: a derivation's last term. The tests compare it with the formula."""
    return [float(eval(q["derivation"].rpartition("=")[2])) for q in exercise(number)["predict"]]


def outputs_of_commands(number, text, limit):
    """Return the output of the exercise's commands with the whole file `text`."""
    e, lines = exercise(number), []
    with copied_commit({e["file"]: text}) as folder:
        for command in e["show"]:
            code, printed = run(folder, command.split(), limit)
            lines += [f"$ python {command}", printed if code is not None else f"no answer in {limit:g} s"]
    return "\n".join(lines)


def predictions(number, folder):
    """Return {question: (answer, its number or None)} of the first complete answers in `folder`, or {}.

    In this copy of the project, keep the first complete answers with their time.
    """
    questions, first = (folder / f"mine/{number}.{kind}" for kind in ("txt", "first"))
    path = first if first.exists() else questions
    with reading(path):
        text = path.read_text("utf-8") if path.exists() else ""
    texts = dict(re.findall(r"(?m)^(\w+) *= *(.*?) *$", text))
    answers = {q["name"]: texts.get(q["name"]) or "?" for q in exercise(number)["predict"]}
    if "?" in answers.values():
        return {}
    if folder == ROOT and path == questions:
        lines = [f"# answered: {datetime.now():%Y-%m-%d %H:%M:%S}", *(f"{name} = {x}" for name, x in answers.items())]
        first.write_text("\n".join(lines) + "\n", "utf-8")
    return {name: (answer, number_in(answer)) for name, answer in answers.items()}


def number_in(answer):
    with contextlib.suppress(ValueError, ArithmeticError):
        return float(Fraction(re.sub(r",(?=\d{3}\b)| ", "", answer)))


def is_right(answer, right):
    return answer is not None and abs(answer - right) <= 0.01 * abs(right)


# --- grade ------------------------------------------------------------------------------------------------------------


def grading(number, limit):
    """Return (the columns, the function that judges a folder) for `grade`."""
    e, right = exercise(number), right_numbers(number)

    def judge_folder(folder):
        """Return a row of the table. Only red lamps without bonus give a note."""
        path, written = answer_in(number, folder)
        answers = predictions(number, folder)
        good = [is_right(x, y) for (_, x), y in zip(answers.values(), right, strict=False)]
        row = {"predictions": (sum(good), len(right)), "note": "todo"}
        if not written:
            return row
        judged, changed = judge(number, path.read_text("utf-8"), limit)
        for kind in ("lamps", "bonus"):
            messages = [message for lamp, message in judged if ("bonus" in lamp) == (kind == "bonus")]
            row[kind] = messages.count(None), len(messages)
        red = {lamp["idea"][0]: message for lamp, message in judged if message is not None}
        row["points"] = sum(x for x, (_, message) in zip(e["points"], judged, strict=True) if message is None)
        note = next((message for lamp, message in judged if message is not None and "bonus" not in lamp), "")
        return row | {"also changed": changed, "note": " ".join(note.split())[:NOTE], "red": red}

    bonus = ["bonus"] * any("bonus" in lamp for lamp in e["lamp"])
    return ["points", "lamps", *bonus, "predictions", "also changed"], judge_folder


# --- the command line -------------------------------------------------------------------------------------------------


def mark(good, bonus=False):
    word, color = ("green", 32) if good else ("bonus", 33) if bonus else ("red", 31)
    return f"\033[{color}m{word:<5}\033[0m" if sys.stdout.isatty() else f"{word:<5}"


def title(number):
    e = exercise(number)
    return f"exercise {number}: {e['idea'][0]}\n    {e['idea'][1]}\n    slide {e['slide']}"


def oral(number):
    rows = enumerate(exercise(number)["oral"], start=1)
    return "\n".join(f"{i}. {q}\n   {q_ja}\n   -> {answer}\n      {ja}" for i, (q, q_ja, answer, ja) in rows)


def state(number):
    """Return todo, red or green: how the exercise was judged last."""
    judged = ROOT / f"mine/{number}.state"
    return judged.read_text("utf-8") if judged.exists() else "todo"


def judge_files(number, folder, limit):
    """Judge the file and predictions in `folder`. Return whether all lamps but bonus are green, None if unwritten."""
    e, (path, written) = exercise(number), answer_in(number, folder)
    if path is None:
        raise UserError(f"{folder}: has no answer to exercise {number}; first: python exercise.py start {number}")
    answers, text = predictions(number, folder), path.read_text("utf-8")
    print("judging, about 10 seconds 採点中 (約10秒) ...", flush=True)
    judged, changed = judge(number, text, limit) if written else ([], [])
    outputs = outputs_of_commands(number, text, limit) if written else ""
    print(outputs, title(number), f"your file あなたのファイル: {path}", sep="\n")
    if changed:
        print(f"also changed, without effect: {', '.join(changed)}")
    for q, (answer, x), right in zip(e["predict"], answers.values(), right_numbers(number), strict=False):
        good = is_right(x, right)
        why = "" if good else f": {q['derivation']}"
        print(mark(good), f"{q['name']}: you あなた {answer}, the formula 正解 {right:,.10g}{why}", sep="  ")
    if not answers:
        print(f"mine/{number}.txt: answer all questions to see the right numbers すべて答えると正解が出ます")
    if not written:
        return print(f"not written yet まだ書いていません: {', '.join(e['functions'])}")
    for lamp, message in judged:
        print(mark(message is None, "bonus" in lamp), f"{lamp['idea'][0]}\n       {lamp['idea'][1]}", sep="  ")
        if message is not None:
            lines = [line for line in message.splitlines() if line.strip(" ^~") and "-v to get" not in line]
            lines = lines[-6:] if "Traceback" in message else lines[:LINES]
            print(*(f"       | {line}" for line in lines), sep="\n")
    return all(message is None or "bonus" in lamp for lamp, message in judged)


def main(arguments=None):
    """Run the command line. Exit with code 1 if a lamp that is no bonus is red."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["hunt"]:
        return importlib.import_module("exercises.hunt").main(arguments[1:])
    usage = (
        "python exercise.py [hunt ... | [start | stop | oral] N | N [FOLDER] | grade N FOLDER ...] [--limit=N --json]"
    )
    parser = Parser("python exercise.py", usage=usage)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--limit", type=within(1, 10**6), default=LIMIT)
    parser.add_argument("--json", type=boolean, default=False)
    arguments = sorted(arguments, key=lambda word: word.startswith("--"))  # options come last
    options = parser.parse_args(arguments)
    words = options.words
    command = words.pop(0) if words and words[0] in ("start", "stop", "oral", "grade") else "judge"
    if not words:
        for number in numbers():
            english, japanese = exercise(number)["idea"]
            print(f"{number:>2} {state(number):<6} {english}\n          {japanese}")
        return print(LEGEND)
    most = {"judge": 2, "grade": len(words)}.get(command, 1)
    if len(words) > most or (command == "grade" and most < 2):
        parser.error(f"{words[-1]}: start, stop and oral take one number, judging also a folder, grade folders")
    number, folder = words[0], Path(words[1]) if len(words) > 1 else ROOT
    (ROOT / "mine").mkdir(exist_ok=True)
    if command in ("judge", "grade"):
        need_pytest()
    if command == "grade":
        hunting = number == "hunt" and importlib.import_module("exercises.hunt").grading(options.limit)
        return grade(*(hunting or grading(number, options.limit)), words[1:], options.json)
    if command == "judge":
        green = judge_files(number, folder, options.limit)
        if folder == ROOT and green is not None:
            (ROOT / f"mine/{number}.state").write_text("green" if green else "red", "utf-8")
        sys.exit(not green)
    with reading(exercise(number)["file"], SyntaxError):
        print({"start": start, "stop": stop, "oral": oral}[command](number))


if __name__ == "__main__":
    exit_on_user_error(main)
