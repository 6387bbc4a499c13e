"""Exercises along the lecture: write a function of the project yourself, and see which ideas your answer has.

    python exercise.py                 list the exercises and how they stand
    python exercise.py start 8         empty the functions of exercise 8; make mine/8.txt for your predictions
    python exercise.py 8               judge your file
    python exercise.py 8 FOLDER        judge the file and the predictions in another copy of the project
    python exercise.py stop 8          put the project's functions back; your file is kept in mine/
                       --limit=120     seconds that a test may need

Predict first: `start` asks for two or three numbers. The formulas' numbers are shown once you have answered all. Your
functions, with new names of your file, are judged in a copy of the last commit. What else you changed has no effect:
it is listed. This is no sandbox: a function can do what any program of yours can. Each test is a lamp with the idea
that it stands for. A bonus lamp may stay red.

exercises/N.toml has the ideas in Japanese and English, the names of the functions to write, the lamps, and answers for
our own tests (right in another way, or wrong as people are often wrong). The solution is in git.
"""

from errors import Parser, UserError, exit_on_user_error, reading, within  # isort: skip
import contextlib
import importlib.util
import re
import sys
import tomllib
from fractions import Fraction
from pathlib import Path

from exercises.answers import bodies, committed, copied_commit, merged, same, with_bodies
from testing.judging import contains, run, run_tests

ROOT = Path(__file__).parent
LIMIT = 120  # seconds that a test may need
LINES = 16  # of a red lamp's message
FORMAT = "# Write one number each, such as 8,192 or 0.11 or 3/27 (at most 1% off). 数を1つずつ書いてください。\n"


def exercise(number):
    """Return exercises/`number`.toml. Raises UserError if there is none."""
    if str(number) not in map(str, numbers()):
        raise UserError(f"exercise {number}: should be one of {', '.join(map(str, numbers()))}")
    return tomllib.loads((ROOT / f"exercises/{number}.toml").read_text(encoding="utf-8"))


def numbers():
    return sorted(int(path.stem) for path in (ROOT / "exercises").glob("*.toml"))


# --- start and stop ---------------------------------------------------------------------------------------------------


def blank(number, text):
    """Return the text of the exercise's file with functions that raise UserError."""
    new = {}
    for name in exercise(number)["functions"]:
        indent = "    " * (1 + name.count("."))
        error = f'raise UserError("exercise {number}: {name} is yours to write")'
        new[name] = [f"{indent}from errors import UserError\n", "\n", f"{indent}{error}\n"]
    return with_bodies(text, new)


def start(number):
    """Empty an exercise's functions, and write the questions to mine/`number`.txt. Return the text to show.

    Raises UserError if an exercise is open in the same file.
    """
    e = exercise(number)
    file, questions = ROOT / e["file"], ROOT / f"mine/{number}.txt"
    text, sharing = file.read_text(encoding="utf-8"), [x for x in map(exercise, numbers()) if x["file"] == e["file"]]
    names = [name for x in sharing for name in x["functions"]]
    if bodies(text, names) != bodies(committed(e["file"]), names):
        raise UserError(f"{e['file']}: an exercise is open in it; first: python exercise.py stop NUMBER")
    file.write_text(blank(number, text), encoding="utf-8")
    if not questions.exists():
        asked = ["\n".join([*(f"# {text}" for text in q["ask"]), f"{q['name']} = ?\n"]) for q in e["predict"]]
        questions.write_text("\n".join([FORMAT, *asked]), encoding="utf-8")
    todo = ", ".join(f"`{name}`" for name in e["functions"])
    return "\n".join([title(number), *e["task"], f"write: {e['file']} {todo}", f"predict first: mine/{number}.txt"])


def kept(number, folder=ROOT):
    """Return the path where `stop` keeps the answer."""
    return folder / f"mine/{number}_{Path(exercise(number)['file']).name}"


def stop(number):
    """Put the committed functions back, and keep the answer. Return the text to show. Raises UserError."""
    e = exercise(number)
    file, project = ROOT / e["file"], committed(e["file"])
    text = file.read_text(encoding="utf-8")
    if bodies(text, e["functions"]) == bodies(project, e["functions"]):
        raise UserError(f"exercise {number} is not open: {e['file']} has the project's functions")
    kept(number).write_text(text, encoding="utf-8")
    file.write_text(with_bodies(text, bodies(project, e["functions"])), encoding="utf-8")
    return f"{e['file']}: the project's functions again; your file is mine/{kept(number).name}"


# --- judge ------------------------------------------------------------------------------------------------------------


def answer_in(number, folder):
    """Return the path of the answer in `folder`, or None: the exercise's file, or the copy that `stop` has kept."""
    e = exercise(number)
    project = committed(e["file"])
    for path in (folder / e["file"], kept(number, folder)):
        if path.exists():
            with contextlib.suppress(SyntaxError):
                if same((path.read_text(encoding="utf-8"), project), e["functions"]):
                    continue
            return path


def judge(number, text, limit=LIMIT):
    """Judge the functions in `text`, a whole file, in a copy of the last commit.

    Return ([(lamp, None or the message of a failure)], other names that `text` changes, without effect).
    """
    e = exercise(number)
    try:
        text, changed = merged(blank(number, committed(e["file"])), text, e["functions"])
    except SyntaxError as error:
        return [(lamp, f"{e['file']}:{error.lineno}: SyntaxError: {error.msg}") for lamp in e["lamp"]], []
    with copied_commit() as folder:
        (folder / e["file"]).write_text(text, encoding="utf-8")
        results = run_tests(folder, [lamp["test"] for lamp in e["lamp"]], limit=limit)
    judged = []
    for lamp in e["lamp"]:
        messages = [message for test, message in results if contains(lamp["test"], test)]
        judged.append((lamp, next((message for message in messages if message is not None), None)))
    return judged, changed


def formulas(number):
    """Return the right numbers of the predictions."""
    with copied_commit() as folder:
        _, printed = run(folder, ["-m", "exercises.formulas", *(q["formula"] for q in exercise(number)["predict"])])
    with reading(f"the last commit should have the project's functions, but its predictions print {printed!r}"):
        return [*map(float, printed.split())]


def shown(number, text, limit):
    """Return the output of the exercise's commands with the whole file `text`."""
    e, lines = exercise(number), []
    with copied_commit() as folder:
        (folder / e["file"]).write_text(text, encoding="utf-8")
        for command in e["show"]:
            code, printed = run(folder, command.split(), limit)
            lines += [f"$ python {command}", printed if code is not None else f"no answer in {limit:g} s"]
    return "\n".join(lines)


def predictions(number, text):
    """Return [(name, number)] of the answers in `text`, or [] until all have one. Raises UserError for no number."""
    said = dict(re.findall(r"(?m)^(\w+) *= *(.*?) *$", text))
    answers = [(q["name"], said.get(q["name"], "?")) for q in exercise(number)["predict"]]
    if "?" in (answer for _, answer in answers):
        return []
    with reading(f"mine/{number}.txt: an answer should be one number such as 8,192 or 3/27"):
        return [(name, float(Fraction(re.sub(r",(?=\d{3}\b)", "", answer)))) for name, answer in answers]


# --- the command line -------------------------------------------------------------------------------------------------


def mark(good, bonus=False):
    word, color = ("green", 32) if good else ("bonus", 33) if bonus else ("red", 31)
    return f"\033[{color}m{word:<5}\033[0m" if sys.stdout.isatty() else f"{word:<5}"


def title(number):
    e = exercise(number)
    return f"exercise {number}: {e['idea'][0]}\n    {e['idea'][1]}\n    slide {e['slide']}"


def state(number):
    """Return todo, red or green: how the exercise was judged last."""
    judged = ROOT / f"mine/{number}.state"
    return judged.read_text(encoding="utf-8") if judged.exists() else "todo"


def judge_files(number, folder, limit):
    """Judge the file and predictions in `folder`. Return True if all lamps but bonus are green."""
    asked, answer = folder / f"mine/{number}.txt", answer_in(number, folder)
    if answer is None:
        raise UserError(f"{folder}: has no answer to exercise {number}; first: python exercise.py start {number}")
    mine = predictions(number, asked.read_text("utf-8") if asked.exists() else "")
    text = answer.read_text(encoding="utf-8")
    judged, changed = judge(number, text, limit)
    print(shown(number, text, limit), title(number), f"judged: {answer}", sep="\n")
    if changed:
        print(f"also changed, without effect: {', '.join(changed)}")
    for (name, answer), right in zip(mine, formulas(number), strict=False):
        good = abs(answer - right) <= 0.01 * abs(right)
        print(mark(good), f"{name}: you {answer:,.10g}, the formula {right:,.10g}", sep="  ")
    if not mine:
        print(f"mine/{number}.txt: answer all questions, then the right numbers are shown")
    for lamp, message in judged:
        print(mark(message is None, "bonus" in lamp), f"{lamp['idea'][0]}\n       {lamp['idea'][1]}", sep="  ")
        if message is not None:
            lines = [line for line in message.splitlines() if line.strip(" ^~") and "-v to get" not in line]
            lines = lines[-6:] if "Traceback" in message else lines[:LINES]
            print(*(f"       | {line}" for line in lines), sep="\n")
    return all(message is None or "bonus" in lamp for lamp, message in judged)


def main(arguments=None):
    """Run the command line. Exit with code 1 if a lamp that is no bonus is red."""
    parser = Parser("python exercise.py", usage="python exercise.py [[start | stop] NUMBER [FOLDER]] [--limit=N]")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--limit", type=within(1, 10**6), default=LIMIT)
    options = parser.parse_args(arguments)
    words = options.words
    command = words.pop(0) if words[:1] in (["start"], ["stop"]) else "judge"
    if not words:
        for number in numbers():
            english, japanese = exercise(number)["idea"]
            print(f"{number:>2} {state(number):<6} {english}\n          {japanese}")
        return
    if len(words) > 1 + (command == "judge"):
        parser.error(f"{words[-1]}: start and stop take one number, and judging one number and one folder")
    number, folder = words[0], Path(words[1]) if len(words) > 1 else ROOT
    (ROOT / "mine").mkdir(exist_ok=True)
    if command == "judge":
        if not importlib.util.find_spec("pytest"):
            raise UserError("judging needs pytest: pip install -r requirements-dev.txt")
        green = judge_files(number, folder, options.limit)
        if folder == ROOT:
            (ROOT / f"mine/{number}.state").write_text("green" if green else "red", encoding="utf-8")
        sys.exit(not green)
    with reading(exercise(number)["file"], SyntaxError):
        print(start(number) if command == "start" else stop(number))


if __name__ == "__main__":
    exit_on_user_error(main)
