"""Exercises along the lecture: write a function of the project yourself, and see which ideas your answer has.

    python exercise.py                 list the exercises and how they stand
    python exercise.py start 8         empty the functions of exercise 8; make mine/8.txt for your predictions
    python exercise.py 8               judge your file
    python exercise.py 8 FOLDER        judge the file and the predictions in another copy of the project
    python exercise.py stop 8          put the project's functions back; your file is kept in mine/

Predict first: `start` asks for two or three numbers, and the numbers of the formulas are shown once you have answered
all questions. Your file is judged in a copy of the last commit. So functions that you add stay, and changed tests do
not count. Each test is a lamp with the idea that it stands for. A bonus lamp may stay red.

An exercise is a file exercises/N.toml: the ideas in Japanese and English, the functions to write, the lamps, and
answers for our own tests (right in another way, or wrong as people are often wrong). Nothing is stored about the
functions but their names: their lines are found in the file, and their solution is in git.
"""

import ast
import importlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from fractions import Fraction
from pathlib import Path

from errors import Parser, UserError, exit_on_user_error, reading
from testing.defects import run_tests

ROOT = Path(__file__).parent
LINES = 16  # of the message of a red lamp: a table of gradients and its cause


def exercise(number):
    """Return the table of exercises/`number`.toml. Raises UserError if there is none."""
    path = ROOT / f"exercises/{number}.toml"
    if not path.exists():
        raise UserError(f"exercise {number}: should be one of {', '.join(map(str, numbers()))}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def numbers():
    return sorted(int(path.stem) for path in (ROOT / "exercises").glob("*.toml"))


# --- function bodies --------------------------------------------------------------------------------------------------


def place(lines, name):
    """Return (begin, end) of the lines below the docstring of the function `name` ("f" or "Class.f")."""
    node = ast.parse("".join(lines))
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1, node.end_lineno


def with_bodies(text, new):
    """Return a file's text with other function bodies. new: {name of the function: lines}."""
    lines = text.splitlines(keepends=True)
    for name, body in new.items():
        begin, end = place(lines, name)
        lines[begin:end] = body
    return "".join(lines)


def blank(number, text):
    """Return the text of the exercise's file with empty functions. Whoever calls one gets one line and exit code 2."""
    new = {}
    for name in exercise(number)["functions"]:
        indent = "    " * (1 + name.count("."))
        error = f'raise UserError("exercise {number}: {name} is yours to write")'
        new[name] = [f"{indent}from errors import UserError\n", "\n", f"{indent}{error}\n"]
    return with_bodies(text, new)


def committed(file):
    """Return the text of a file of the last commit."""
    return git("show", f"HEAD:./{file}").decode()


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


def start(number):
    """Empty the functions of an exercise, and write the questions to mine/`number`.txt. Return the text to show."""
    e = exercise(number)
    file, questions = ROOT / e["file"], ROOT / f"mine/{number}.txt"
    file.write_text(blank(number, file.read_text(encoding="utf-8")), encoding="utf-8")
    if not questions.exists():
        asked = ["\n".join([*(f"# {text}" for text in q["ask"]), f"{q['name']} = ?\n"]) for q in e["predict"]]
        questions.write_text("\n".join(asked), encoding="utf-8")
    todo = ", ".join(f"`{name}`" for name in e["functions"])
    return "\n".join([title(number), *e["task"], f"write: {e['file']} {todo}", f"predict first: mine/{number}.txt"])


def stop(number):
    """Put the committed functions back, and keep the answer in mine/. Return the text to show."""
    e = exercise(number)
    file, kept = ROOT / e["file"], ROOT / f"mine/{number}_{Path(e['file']).name}"
    text, ours = file.read_text(encoding="utf-8"), committed(e["file"]).splitlines(keepends=True)
    kept.write_text(text, encoding="utf-8")
    bodies = {name: ours[slice(*place(ours, name))] for name in e["functions"]}
    file.write_text(with_bodies(text, bodies), encoding="utf-8")
    return f"{e['file']}: the project's functions again; your file is mine/{kept.name}"


# --- judge ------------------------------------------------------------------------------------------------------------


def judge(number, text):
    """Return ([(lamp, None or the message of a failure)], the output of the exercise's commands).

    text: the answer, a whole file. It is judged in a copy of the last commit.
    """
    e = exercise(number)
    with tempfile.TemporaryDirectory() as folder:
        tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))).extractall(folder, filter="data")
        (Path(folder) / e["file"]).write_text(text, encoding="utf-8")
        results = run_tests(folder, [lamp["test"] for lamp in e["lamp"]])
        shown = [run(folder, command) for command in e["show"]]
    judged = []
    for lamp in e["lamp"]:
        messages = [message for test, message in results if lamp["test"] in (test, test.partition("[")[0])]
        failed = [message for message in messages or ["the test did not run"] if message is not None]
        judged.append((lamp, failed[0] if failed else None))
    return judged, "\n".join(shown)


def run(folder, command):
    """Return what a command of the project prints in `folder`, with the command."""
    done = subprocess.run([sys.executable, *command.split()], cwd=folder, capture_output=True, text=True)
    return f"$ python {command}\n{done.stdout}{done.stderr}"


def predictions(number, text):
    """Return lines that compare the answers in `text` (mine/`number`.txt) with the formulas.

    Nothing is revealed before all questions have an answer.
    """
    questions = exercise(number)["predict"]
    said = dict(re.findall(r"(?m)^(\w+) *= *(.*?) *$", text))
    if any(said.get(q["name"], "?") == "?" for q in questions):
        return [f"mine/{number}.txt: answer all questions, then the right numbers are shown"]
    lines = []
    for q in questions:
        with reading(f"mine/{number}.txt: {q['name']} = {said[q['name']]}"):
            mine = float(Fraction(said[q["name"]].replace(",", "")))
        right = float(formula(q["formula"]))
        good = abs(mine - right) <= 0.01 * abs(right)
        lines.append(f"{mark(good)}  {q['name']}: you {mine:g}, the formula {right:g}")
    return lines


def formula(text):
    """Return the value of a formula of a TOML file. It uses the project's prediction functions."""
    return eval(text, vars(importlib.import_module("exercises.formulas")))


# --- the command line -------------------------------------------------------------------------------------------------


def mark(good, bonus=False):
    word, color = ("green", 32) if good else ("bonus", 33) if bonus else ("red", 31)
    return f"\033[{color}m{word:<5}\033[0m" if sys.stdout.isatty() else f"{word:<5}"


def title(number):
    e = exercise(number)
    return f"exercise {number}: {e['idea'][0]}\n    {e['idea'][1]}\n    slide {e['slide']}"


def state(number):
    """Return todo, red or green: how the exercise stood when it was judged last."""
    judged = ROOT / f"mine/{number}.state"
    return judged.read_text(encoding="utf-8") if judged.exists() else "todo"


def report(number, folder):
    """Judge and print the file and predictions in `folder`. Return True if all lamps are green (bonus may be red)."""
    e, asked = exercise(number), folder / f"mine/{number}.txt"
    judged, shown = judge(number, (folder / e["file"]).read_text(encoding="utf-8"))
    print(title(number), *predictions(number, asked.read_text("utf-8") if asked.exists() else ""), sep="\n")
    for lamp, message in judged:
        print(mark(message is None, "bonus" in lamp), f"{lamp['idea'][0]}\n       {lamp['idea'][1]}", sep="  ")
        if message is not None:
            lines = [line for line in message.splitlines() if line.strip(" ^~")]
            lines = lines[-6:] if "Traceback" in message else lines[:LINES]  # its last line says what happened
            print(*(f"       | {line}" for line in lines), sep="\n")
    print(shown)
    return all(message is None or "bonus" in lamp for lamp, message in judged)


def main(arguments=None):
    parser = Parser("python exercise.py", usage="python exercise.py [[start | stop] NUMBER [FOLDER]]")
    parser.add_argument("words", nargs="*")
    words = parser.parse_args(arguments).words
    command = words.pop(0) if words[:1] in (["start"], ["stop"]) else "judge"
    if not words:
        for number in numbers():
            english, japanese = exercise(number)["idea"]
            print(f"{number:>2} {state(number):<6} {english}\n          {japanese}")
        return
    number, folder = words[0], Path(words[1]) if len(words) > 1 else ROOT
    (ROOT / "mine").mkdir(exist_ok=True)
    if command == "judge":
        green = report(number, folder)
        if folder == ROOT:
            (ROOT / f"mine/{number}.state").write_text("green" if green else "red", encoding="utf-8")
        sys.exit(not green)
    print(start(number) if command == "start" else stop(number))


if __name__ == "__main__":
    exit_on_user_error(main)
