"""Judges the exercises' answers: the project's code is green, an empty function red, a wrong answer names its idea."""

import functools
import importlib.util
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import exercise
from conftest import needs_git
from errors import UserError
from exercises import answers, formulas, show

pytestmark = needs_git
ANSWERS = [(number, answer) for number in exercise.numbers() for answer in exercise.exercise(number).get("answer", [])]
QUICK = (8,)  # blanked and judged in the default run


def required(number, text, limit=600):
    """Judge a file. Return ({idea: message} of the red lamps that are no bonus, number of such lamps)."""
    judged = [(lamp, message) for lamp, message in exercise.judge(number, text, limit)[0] if "bonus" not in lamp]
    return {lamp["idea"][0]: message for lamp, message in judged if message is not None}, len(judged)


def changed(number, edits):
    text = exercise.committed(exercise.exercise(number)["file"])
    for old, new in edits:
        assert text.count(old) == 1, f"exercise {number}: {old!r} is there {text.count(old)} times, not once"
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("number, answer", ANSWERS, ids=lambda x: x["name"] if isinstance(x, dict) else str(x))
def test_the_lines_of_an_answer_are_in_its_file(number, answer):
    e = exercise.exercise(number)
    assert changed(number, answer["edits"])
    assert answer.get("red", e["lamp"][0]["idea"][0]) in [lamp["idea"][0] for lamp in e["lamp"]]


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_student_s_endless_loop_ends_with_the_judge(number, tmp_path):
    loop = "open('pid', 'w').write(str(__import__('os').getpid())); exec('while True: pass')"
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # pytest may run under nohup
    code += f"from testing import judging; judging.run({str(tmp_path)!r}, ['-c', {loop!r}])"
    judge = subprocess.Popen([sys.executable, "-c", code], cwd=exercise.ROOT)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text())
    judge.send_signal(number)
    judge.wait(30)
    wait_until(lambda: not running(int(pid.read_text())))


def test_no_clone_and_no_pytest_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"requirements-dev\.txt"):
        exercise.main(["8"])
    monkeypatch.setattr(answers, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"git clone.*not a git repository"):
        exercise.committed("model.py")


WARMUP = "        warmup = stages - 1 - rank  #"
GPIPE = WARMUP.replace("stages - 1 - rank", "microbatches")


def test_only_functions_and_new_names_of_an_answer_count():
    """GPipe is no 1F1B, and an answer changes no constant of the file."""
    edits = [
        (WARMUP, GPIPE),
        ("SCHEDULES = {", "import os, this\nN: int = 3; max = min\nother['x'] = 0\nSCHEDULES = {'x': 0, "),
    ]
    project, names = exercise.committed("parallel/schedules.py"), ["one_f_one_b"]
    text, also = answers.merged(exercise.blank(8, project), changed(8, edits), names)
    assert also == ["max", "other['x'] = 0", "SCHEDULES"]
    parts = "import os", "N: int = 3", "SCHEDULES = {\n"
    assert GPIPE in text and all(part in text for part in parts)
    assert "min\n" not in text and answers.merged(text, text, names) == (text, [])
    assert "is yours to write" in answers.merged(exercise.blank(8, project), "x = 1", names)[0]
    kept = answers.merged(
        "class A:\n    def f(self):\n        pass\n",
        "class A:\n    g = 1\n\n    def f(self):\n        return 1\n",
        ["A.f"],
    )
    assert kept == ("class A:\n    g = 1\n    def f(self):\n        return 1\n", [])
    assert answers.same("def f(): pass\ndef f(): return 1", "def f(): return 1", ["f"])  # Python uses the last one


SUM = '            self.summing = all_reduce(self.grad.whole, self.copies, "gradients")'
SKIPPED = f"            if self.copies.rank > 0 and self.name == 'block1':\n                return\n{SUM}"


def first(*lines):
    return [(WARMUP, "".join(f"        {line}\n" for line in lines) + WARMUP)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, edits, words",
    [
        (8, first("while True:", "    pass"), "no answer in 30 s"),
        (8, first("import os", "os._exit(0)"), "exit code 0"),
        (8, first("import pytest", "pytest.skip()"), "skipped"),
        (8, first("if :"), r"py:\d+: SyntaxError: invalid syntax"),
        (8, [("def one_f_one_b(", "import nonexistent\n\n\ndef one_f_one_b(")], "No module named 'nonexistent'"),
        (4, [(SUM, SKIPPED)], r"rank 1 waited for ranks \[0\] in all_reduce"),
    ],
)
def test_an_answer_that_stops_the_test_is_red(number, edits, words):
    """Its cause is one line; if ranks lose one another, each rank's last communication."""
    red, _ = required(number, changed(number, edits), 30)
    assert any(re.search(words, message) for message in red.values()), red


@pytest.mark.parametrize("number", exercise.numbers())
def test_an_exercise_has_ten_points_and_five_questions(number):
    e = exercise.exercise(number)
    bonus = [points for lamp, points in zip(e["lamp"], e["points"], strict=True) if "bonus" in lamp]
    assert sum(e["points"]) == 10 and not any(bonus)
    assert len(e["oral"]) == 5 and all(len(row) == 4 for row in e["oral"]) and e["oral"][0][0] in exercise.oral(number)


def test_a_class_is_graded(tmp_path, monkeypatch, capsys):
    """Folders that are right, begun, broken, missing; the first complete answers count."""
    project = exercise.committed("parallel/schedules.py")
    folders = {"right": "", "begun": exercise.blank(8, project), "broken": "\udcff", "wrong": "if :"}
    for name, text in folders.items():
        (tmp_path / name / "parallel").mkdir(parents=True)
        (tmp_path / name / "mine").mkdir()
        (tmp_path / name / "parallel/schedules.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    (tmp_path / "right/parallel/schedules.py").write_text(
        changed(8, [(WARMUP, WARMUP.replace("1 - rank", "rank - 1"))])
    )
    (tmp_path / "right/mine/8.first").write_text("bubble = 3/11\nin_flight = 1,0\nin_flight_of_gpipe = 8\n")
    monkeypatch.setattr(exercise, "run_tests", lambda folder, tests, limit: [(test, None) for test in tests])
    exercise.main(["grade", "8", "--json", *(str(tmp_path / name) for name in (*folders, "missing"))])
    right, begun, broken, wrong, missing = json.loads(capsys.readouterr().out)
    assert (right["points"], right["lamps"], right["predictions"], right["red"]) == (10, [3, 3], [2, 3], {})
    assert begun["note"] == "todo" and "UnicodeDecodeError" in broken["note"] and missing["note"] == "no such folder"
    assert wrong["points"] == 0 and "SyntaxError" in wrong["note"]


def test_the_first_complete_predictions_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    monkeypatch.setattr(exercise, "exercise", lambda number: {"predict": [{"name": "a"}, {"name": "b"}]})
    (tmp_path / "mine").mkdir()
    first = {"a": ("x", None), "b": ("1,024", 1024)}
    for a, b, found in [("1", "?", {}), ("", "2", {}), ("x", "1,024", first), ("2", "3", first)]:
        (tmp_path / "mine/8.txt").write_text(f"# a\na = {a}\n\nb = {b}\n")
        assert exercise.predictions(8, tmp_path) == found
    assert "answered: 20" in (tmp_path / "mine/8.first").read_text()


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Exercise in a clone in tmp_path. Return the function that calls git there."""
    call = functools.partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True, text=True)
    call(["git", "clone", "-q", str(exercise.ROOT), "."])
    for module in (exercise, answers):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return call


def test_start_hides_the_solution_and_stop_keeps_the_answer(tmp_path, git):
    file, project = tmp_path / "parallel/schedules.py", exercise.committed("parallel/schedules.py")
    exercise.main(["start", "8"])
    assert "yours to write" in file.read_text() and "warmup" not in git(["git", "diff"]).stdout
    with pytest.raises(UserError, match="stop 8"):
        exercise.main(["start", "10"])
    exercise.main(["stop", "8"])
    assert file.read_text() == project and "yours to write" in exercise.answer_path(8, tmp_path).read_text()
    with pytest.raises(UserError, match="is not open"):
        exercise.main(["stop", "8"])
    assert not (tmp_path / ".git/info/attributes").read_text()


def test_start_puts_the_kept_answer_back_and_an_empty_function_never_replaces_it(tmp_path, git, capsys):
    """Exercises 2 and 11 share a function."""
    file, names = tmp_path / "parallel/tensor.py", ["Linear.backward"]
    project = file.read_text()
    exercise.main(["start", "2"])
    empty = file.read_text()
    written = answers.with_body(empty, names[0], ["        return helper(ctx)\n"]) + "def helper(ctx):\n    return 1\n"
    file.write_text(written)
    with pytest.raises(UserError, match="not open"):
        exercise.main(["stop", "11"])
    exercise.main(["stop", "2"])
    file.write_text(project)  # git checkout
    for again in (None, empty):
        capsys.readouterr()
        exercise.main(["start", "2"])
        assert "mine/2_tensor.py: your answer is back" in capsys.readouterr().out
        assert "return helper(ctx)" in file.read_text() and "def helper" in file.read_text()
        file.write_text(again or file.read_text())
        exercise.main(["stop", "2"])
        assert answers.same(exercise.answer_path(2, tmp_path).read_text(), written, names)
    exercise.main(["start", "11"])
    assert "your answer is back" not in capsys.readouterr().out and "is yours to write" in file.read_text()
    with pytest.raises(UserError, match="stop 11"):
        exercise.main(["start", "2"])
    # It is not the file, where 11 is open.
    assert exercise.answer_in(2, tmp_path) == (exercise.answer_path(2, tmp_path), True)


def test_an_answer_gets_its_own_helper_back(tmp_path, git):
    file, name = tmp_path / "parallel/schedules.py", {8: "one_f_one_b", 10: "zero_bubble"}
    for number in (8, 10):
        exercise.main(["start", str(number)])
        text = answers.with_body(file.read_text(), name[number], ["    return helper()\n"])
        file.write_text(text.split("def helper")[0] + f"def helper():\n    return {number}\n")
        exercise.main(["stop", str(number)])
    exercise.main(["start", "8"])
    assert file.read_text().endswith("def helper():\n    return 8\n")


def test_an_untouched_exercise_is_not_judged(git, capsys):
    exercise.main(["start", "8"])
    with pytest.raises(SystemExit) as ended:
        exercise.main(["8"])
    shown = capsys.readouterr().out
    assert ended.value.code and shown.count("not written yet") == 1 and "\nred" not in shown and "one_f_one_b" in shown
    assert exercise.state(8) == "todo"


def slow(number):
    return pytest.param(number, marks=[pytest.mark.slow] * (number not in QUICK))


def planted_unless_quick(number):
    return pytest.param(number, marks=[pytest.mark.defects] * (number not in QUICK))


@pytest.mark.parametrize("number", [*map(planted_unless_quick, exercise.numbers())])
def test_an_empty_exercise_is_red(number):
    """Each lamp is red, and one says which function is missing."""
    text = exercise.committed(exercise.exercise(number)["file"])
    red, lamps = required(number, exercise.blank(number, text))
    assert len(red) == lamps and any("is yours to write" in message for message in red.values()), red


@pytest.mark.parametrize("number", [*map(slow, exercise.numbers())])
def test_what_an_exercise_shows(number):
    """Its commands run, and each prediction has a right number."""
    e = exercise.exercise(number)
    for command in e["show"]:
        subprocess.run([sys.executable, *command.split()], cwd=exercise.ROOT, check=True, capture_output=True)
    right, derived = [eval(q["formula"], vars(formulas)) for q in e["predict"]], exercise.right_numbers(number)
    assert derived == pytest.approx(right) and min(derived) >= 0


def test_the_chain_rule_equals_pytorchs_gradients(capsys):
    show.chain()
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines() if "|" in line]
    backward = [(ours, theirs) for kind, _, ours, theirs in rows if kind == "B"]
    assert len(backward) == 6 and all(ours == theirs for ours, theirs in backward)


def test_a_power_law_is_a_line_in_the_logarithm(capsys):
    show.law()
    bars = [line.count("#") for line in capsys.readouterr().out.splitlines() if "#" in line]
    steps = {a - b for a, b in itertools.pairwise(bars[:7])} | {a - b for a, b in itertools.pairwise(bars[7:])}
    assert len(bars) == 14 and steps <= {4, 5}


def test_each_scheme_halves_the_flops_of_a_rank(capsys):
    """For a token a block takes 524,288 in forward, the head 98,304. PP's rank 0 has two of four blocks: 48%."""
    show.schemes()
    shares = re.findall(r"(?m)^\S+ +\|[^|]+\| cut (\d+%)", capsys.readouterr().out)
    assert shares == ["50%"] * 4 + ["48%", "50%"]


@pytest.mark.slow
def test_a_solved_exercise_is_green():
    """Every lamp is a test of the project. These are green, but for two of exercise 13, which need a mistake."""
    lamps = {lamp["test"] for number in exercise.numbers() for lamp in exercise.exercise(number)["lamp"]}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *sorted(lamps)]
    assert subprocess.run(command, cwd=exercise.ROOT, capture_output=True).returncode == 0


def slow_or_defect(number, answer):
    return pytest.param(number, answer, marks=pytest.mark.defects if "red" in answer else pytest.mark.slow)


@pytest.mark.parametrize(
    "number, answer",
    [slow_or_defect(*row) for row in ANSWERS],
    ids=lambda x: x["name"] if isinstance(x, dict) else str(x),
)
def test_an_answer_is_judged_by_its_idea(number, answer):
    """A right answer that differs from the project's is green. A wrong one turns the lamp of its idea red."""
    red, _ = required(number, changed(number, answer["edits"]))
    assert answer.get("says", "") in red[answer["red"]] if "red" in answer else red == {}, red


@pytest.mark.parametrize("words", ["99", "start 99", "start 3 4", "stop 3 4", "3 folder 4"])
def test_a_mistake_on_the_command_line_changes_nothing(words, monkeypatch):
    monkeypatch.setattr(Path, "write_text", None)
    with pytest.raises(UserError, match=r"exercise 99: should be one of 1, .*, \d+$|take one number"):
        exercise.main(words.split())
