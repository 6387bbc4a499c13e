"""Exercises along the lecture: write a function of the project yourself, and see which ideas your answer has.

    python exercise.py                 list the exercises and how they stand
    python exercise.py start 8         empty the functions of exercise 8; make mine/8.txt for your predictions
    python exercise.py 8               judge your file
    python exercise.py 8 FOLDER        judge the file and the predictions in another copy of the project
    python exercise.py stop 8          put the project's functions back; your file is kept in mine/

Predict first: `start` asks for two or three numbers. The formulas' numbers are shown once you have answered all. Your
file is judged in a copy of the last commit, so changed tests do not count. Each test is a lamp with the idea that it
stands for. A bonus lamp may stay red.

exercises/N.toml has the ideas in Japanese and English, the names of the functions to write, the lamps, and answers for
our own tests (right in another way, or wrong as people are often wrong). The solution is in git.
"""

from errors import Parser, UserError, exit_on_user_error, explained, reading  # isort: skip
import ast
import importlib.util
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from fractions import Fraction
from pathlib import Path

from testing.defects import run_tests

ROOT = Path(__file__).parent
LINES = 16  # of a red lamp's message
FORMAT = "# Write one number each, such as 8,192 or 0.11 or 3/27 (at most 1% off). 数を1つずつ書いてください。\n"


def exercise(number):
    """Return exercises/`number`.toml. Raises UserError if there is none."""
    if str(number) not in map(str, numbers()):
        raise UserError(f"exercise {number}: should be one of {', '.join(map(str, numbers()))}")
    return tomllib.loads((ROOT / f"exercises/{number}.toml").read_text(encoding="utf-8"))


def numbers():
    return sorted(int(path.stem) for path in (ROOT / "exercises").glob("*.toml"))


# --- function bodies --------------------------------------------------------------------------------------------------


def place(lines, name):
    """Return (begin, end) of the lines below the docstring of "f" or "Class.f"."""
    node = ast.parse("".join(lines))
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1, node.end_lineno


def with_bodies(text, new):
    """Return a file's text with other bodies. new: {function's name: lines}."""
    lines = text.splitlines(keepends=True)
    for name, body in new.items():
        begin, end = place(lines, name)
        lines[begin:end] = body
    return "".join(lines)


def bodies(text, names):
    lines = text.splitlines(keepends=True)
    return {name: lines[slice(*place(lines, name))] for name in names}


def blank(number, text):
    """Return the text of the exercise's file with functions that raise UserError."""
    new = {}
    for name in exercise(number)["functions"]:
        indent = "    " * (1 + name.count("."))
        error = f'raise UserError("exercise {number}: {name} is yours to write")'
        new[name] = [f"{indent}from errors import UserError\n", "\n", f"{indent}{error}\n"]
    return with_bodies(text, new)


def committed(file):
    """Return a file's committed text."""
    return git("show", f"HEAD:./{file}").decode()


def git(*words):
    """Return git's output, as bytes. Raises UserError."""
    with explained("exercises need git"):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise UserError(f"exercises need a clone, made by git clone; git says: {done.stderr.decode()}")
    return done.stdout


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


def stop(number):
    """Put the committed functions back, and keep the answer. Return the text to show."""
    e = exercise(number)
    file, kept = ROOT / e["file"], ROOT / f"mine/{number}_{Path(e['file']).name}"
    text = file.read_text(encoding="utf-8")
    kept.write_text(text, encoding="utf-8")
    file.write_text(with_bodies(text, bodies(committed(e["file"]), e["functions"])), encoding="utf-8")
    return f"{e['file']}: the project's functions again; your file is mine/{kept.name}"


# --- judge ------------------------------------------------------------------------------------------------------------


def judge(number, text):
    """Judge `text`, a whole file, in a copy of the last commit.

    Return ([(lamp, None or the message of a failure)], the formulas' numbers, the output of the commands to show).
    """
    e = exercise(number)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 and older have none
            archive.extractall(folder)
        printed = run(folder, ["-m", "exercises.formulas", *(q["formula"] for q in e["predict"])])
        with reading(f"the last commit should have the project's functions, but its predictions print {printed!r}"):
            numbers = [*map(float, printed.split())]
        (Path(folder) / e["file"]).write_text(text, encoding="utf-8")
        results = run_tests(folder, [lamp["test"] for lamp in e["lamp"]])
        shown = [f"$ python {command}\n{run(folder, command.split())}" for command in e["show"]]
    judged = []
    for lamp in e["lamp"]:
        messages = [message for test, message in results if lamp["test"] in (test, test.partition("[")[0])]
        failed = [message for message in messages or ["the test did not run"] if message is not None]
        judged.append((lamp, failed[0] if failed else None))
    return judged, numbers, "\n".join(shown)


def run(folder, words):
    """Return a command's output in `folder`."""
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
    return done.stdout + "".join(done.stderr.splitlines(keepends=True)[-1:])  # without a traceback


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


def judge_files(number, folder):
    """Judge the file and predictions in `folder`. Return True if all lamps but bonus are green."""
    e, asked = exercise(number), folder / f"mine/{number}.txt"
    mine = predictions(number, asked.read_text("utf-8") if asked.exists() else "")
    text = (folder / e["file"]).read_text(encoding="utf-8")
    with reading(e["file"], SyntaxError):
        ast.parse(text)
    judged, numbers, shown = judge(number, text)
    print(shown, title(number), sep="\n")
    for (name, answer), right in zip(mine, numbers, strict=False):
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
    parser = Parser("python exercise.py", usage="python exercise.py [[start | stop] NUMBER [FOLDER]]")
    parser.add_argument("words", nargs="*")
    words = parser.parse_args(arguments).words
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
        green = judge_files(number, folder)
        if folder == ROOT:
            (ROOT / f"mine/{number}.state").write_text("green" if green else "red", encoding="utf-8")
        sys.exit(not green)
    with reading(exercise(number)["file"], SyntaxError, StopIteration):  # StopIteration: a function is missing
        print(start(number) if command == "start" else stop(number))


if __name__ == "__main__":
    exit_on_user_error(main)
