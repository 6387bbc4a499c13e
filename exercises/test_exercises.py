"""Judges the exercises' answers: right ones are green, an empty function is red, a wrong answer names its idea."""

import importlib.util
import itertools
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import config as configuration
import exercise
from conftest import needs_git
from errors import UserError
from exercises import formulas, show
from testing import judging
from testing.defects import planted
from testing.judging import committed, copied, replaced, run_tests
from testing.tiny import wait_until

pytestmark = needs_git
NUMBERS = exercise.numbers()
EXERCISES = {number: exercise.exercise(number) for number in NUMBERS}
ANSWERS = [(number, answer) for number, e in EXERCISES.items() for answer in e["answer"]]
QUICK = (8,)  # blanked and judged in the default run
TOGETHER = [(1, 2, 3, 4, 8), (5, 7, 10, 11, 12), (6,)]  # right answers in other files share a copy


def named(x):
    return x["name"] if isinstance(x, dict) else str(x)


def required(judged):
    """Return ({idea: message} of the red lamps that are no bonus, number of such lamps)."""
    judged = [(lamp["idea"][0], message) for lamp, message in judged if lamp["points"]]
    return {idea: message for idea, message in judged if message is not None}, len(judged)


def changed(number, edits):
    return replaced(committed(EXERCISES[number]["file"]), edits)


@pytest.mark.parametrize("number", NUMBERS)
def test_an_exercise_has_ten_points_and_five_questions(number):
    """The lines of its answers are in the file, and each wrong answer names the idea of a lamp."""
    e = EXERCISES[number]
    assert sum(lamp["points"] for lamp in e["lamp"]) == 10
    assert len(e["oral"]) == 5 and all(len(row) == 4 for row in e["oral"]) and e["oral"][0][0] in exercise.oral(number)
    ideas = {None, *(lamp["idea"][0] for lamp in e["lamp"])}
    assert all(changed(number, answer["edits"]) and answer.get("red") in ideas for answer in e["answer"])


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("numbers", TOGETHER, ids=str)
def test_another_right_answer_is_green(numbers):
    assert sorted(itertools.chain(*TOGETHER)) == NUMBERS
    right = [[answer for answer in EXERCISES[number]["answer"] if "red" not in answer] for number in numbers]
    for answers in zip(*right, strict=True):
        of_each = [*zip(numbers, answers, strict=True)]
        files = {EXERCISES[number]["file"]: changed(number, answer["edits"]) for number, answer in of_each}
        with copied(files) as folder:
            results = run_tests(folder, exercise.tests(*numbers), limit=600)
        red = {number: required(exercise.lamps(number, results))[0] for number in numbers}
        assert not any(red.values()), red


@pytest.mark.defects
@pytest.mark.parametrize("number, answer", [row for row in ANSWERS if "red" in row[1]], ids=named)
def test_a_wrong_answer_turns_the_lamp_of_its_idea_red(number, answer):
    red, _ = required(exercise.judge(number, changed(number, answer["edits"]), 600))
    assert answer.get("says", "") in red[answer["red"]], red


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.defects] * (n not in QUICK)) for n in NUMBERS])
def test_an_empty_exercise_is_red(number):
    """Each lamp is red, and one says which function is missing."""
    red, lamps = required(exercise.judge(number, exercise.blank(number), 600))
    assert len(red) == lamps and any("is yours to write" in message for message in red.values()), red


WARMUP = "        warmup = stages - 1 - rank  #"
SUM = '            self.summing = all_reduce(self.grad.whole, self.copies, "gradients")'
SKIPPED = f"            if self.copies.rank > 0 and self.name == 'block1':\n                return\n{SUM}"


def first(*lines):
    return [(WARMUP, "".join(f"        {line}\n" for line in lines) + WARMUP)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, edits, words",
    [
        (8, first("while True:", "    pass"), "no answer in 10 s"),
        (8, first("many = []", "while True:", "    many.append(bytes(10**8))"), "MemoryError"),
        (8, first("import os", "os._exit(0)"), "exit code 0"),
        (8, first("import pytest", "pytest.skip()"), "skipped"),
        (8, first("if :"), r'"parallel/schedules.py", line \d+\n.*\n.*\nSyntaxError: invalid syntax'),
        (8, [("def one_f_one_b(", "import nonexistent\n\n\ndef one_f_one_b(")], "No module named 'nonexistent'"),
        (4, [(SUM, SKIPPED)], r"rank 1 waited for ranks \[0\] in all_reduce"),
    ],
)
def test_an_answer_that_stops_the_test_is_red(number, edits, words):
    """Its cause is one line; if ranks lose one another, each rank's last communication."""
    limit = 10 if "10 s" in words else 60
    red, _ = required(exercise.judge(number, changed(number, edits), limit))
    assert any(re.search(words, message) for message in red.values()), red


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


# --- files of mine/ ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The folder mine/ of another student. Exercises are those of this tree."""
    monkeypatch.setattr(exercise, "MINE", tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def test_start_writes_an_empty_function_once(mine, capsys):
    exercise.main(["start", "8"])
    file = mine / "8_schedules.py"
    assert "one_f_one_b is yours to write" in file.read_text() and "\nbubble = ?" in (mine / "8.txt").read_text()
    file.write_text("x = 1")
    exercise.main(["start", "8"])
    assert file.read_text() == "x = 1" and "mine/8_schedules.py one_f_one_b" in capsys.readouterr().out


def test_a_command_runs_in_a_copy_with_the_answer(mine, capfd):
    """The code of the answer runs, in another folder, with this tree's data. The command's exit code is kept."""
    (mine / "8_schedules.py").write_text("import os, sys\nprint(os.listdir('data'), os.getcwd())\nsys.exit(3)\n")
    code = "import os; os.makedirs('data', exist_ok=True); import parallel.schedules"
    with pytest.raises(SystemExit) as ended:
        exercise.main(["8", "run", "python", "-c", code])
    said = capfd.readouterr().out
    assert ended.value.code == 3 and said.startswith("[") and str(exercise.ROOT) not in said
    (mine / "8_schedules.py").unlink()
    with pytest.raises(UserError, match=r"8_schedules\.py: is missing"):
        exercise.main(["8", "run", "python", "-c", code])


def test_what_an_answer_changes_elsewhere_is_listed():
    """Other functions, constants, and methods of the same class are. The functions of the exercise are not."""
    edits = [
        (WARMUP, WARMUP.replace("stages", "2 * stages")),
        ("def gpipe(stages, ", "def gpipe(ranks, "),
        ("SCHEDULES = {\n", "def helper():\n    return 1\n\n\nSCHEDULES = {\n"),
    ]
    assert exercise.also_changed(8, changed(8, edits)) == ["gpipe", "helper"]
    zero = [("    def settle(self):", "    def settle(self, more=0):"), ("    def release(self", "    def let_go(self")]
    assert exercise.also_changed(5, changed(5, zero)) == ["Bucket.release", "Bucket.let_go"]
    twice = changed(8, []) + "def one_f_one_b():\n    pass\n"  # Python uses the last one
    assert exercise.also_changed(8, twice) == ["one_f_one_b"]
    for number in NUMBERS:
        assert exercise.also_changed(number, exercise.blank(number).rstrip()) == []


def test_a_class_is_graded(tmp_path, monkeypatch, capsys):
    """Each folder has a row. A damaged folder does not stop the table."""
    texts = {
        "right": changed(8, [(WARMUP, WARMUP.replace("1 - rank", "rank - 1"))]),
        "other": changed(8, [("def gpipe(stages", "def gpipe(ranks")]),
        "begun": exercise.blank(8),
        "broken": "\udcff",
        "forged": "x\x1b[2J = 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name / "mine").mkdir(parents=True)
        (tmp_path / name / "mine/8_schedules.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "right/mine/8.first").write_text("bubble = 3/11\nin_flight = 1,0\nin_flight_of_gpipe = 8\n")
    (tmp_path / "other/mine/8.txt").write_text("bubble = 1e999999999\nin_flight = 1/0\nin_flight_of_gpipe = nan\n")
    monkeypatch.chdir(tmp_path)

    def judge(number, text, limit):
        assert limit == 60
        message = "no\nright  10\x1b[1m" if "\x1b" in text else None
        return [(lamp, message) for lamp in EXERCISES[int(number)]["lamp"]]

    monkeypatch.setattr(exercise, "judge", judge)
    exercise.main(["grade", "8", "--limit", "60", *texts, "empty", "missing"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "folder" and [row.split()[0] for row in rows] == [*texts, "empty", "missing"]
    right, other, begun, broken, forged, empty, missing = (re.split("  +", row)[1:] for row in rows)
    assert right == ["10", "3 of 3", "2 of 3"] and other == ["10", "3 of 3", "0 of 3", "gpipe"]
    assert begun == empty == ["0 of 3", "todo"] and "UnicodeDecodeError" in broken[0] and missing == ["no such folder"]
    assert forged[0] == "0" and forged[-1] == r"no right 10\x1b[1m"


def test_the_first_complete_predictions_are_kept(mine, monkeypatch):
    monkeypatch.setattr(exercise, "exercise", lambda number: {"predict": [{"name": "a"}, {"name": "b"}]})
    found = {"a": "x", "b": "1,024"}
    for a, b, right in [("1", "?", {}), ("", "2", {}), ("x", "1,024", found), ("2", "3", found)]:
        (mine / "8.txt").write_text(f"# a\na = {a}\n\nb = {b}\n")
        assert exercise.predictions(8, mine) == right


# --- the hunt ---------------------------------------------------------------------------------------------------------


def test_the_command_of_every_hunt_is_accepted():
    for defect in exercise.HUNTS:
        processes, *fields = defect.hunt.split()
        configuration.check(configuration.load(["configs/short_run.py", *fields]), int(processes))


def test_a_hunt_hides_its_defect_and_accepts_a_mend_that_breaks_nothing_else(mine, monkeypatch, capsys):
    quick = "warm-up-of-the-wrong-end", "attention-sees-later-tokens"
    defect, other = hunts = [hunt for hunt in exercise.HUNTS if hunt.name in quick]
    monkeypatch.setattr(exercise, "HUNTS", hunts)
    monkeypatch.setattr(exercise, "DATA", mine)
    exercise.main(["hunt", "--seed=2"])
    folder, names = mine / "hunt", {path.name for path in mine.rglob("*")}
    assert not names & {".git", "testing", "exercises", "exercise.py", "conftest.py", "test_schedules.py"}
    assert (folder / defect.file).read_text() == planted(defect) and exercise.hunted(3)[0] == other
    with pytest.raises(SystemExit, match="not yet"):
        exercise.judge_hunt(folder)
    (folder / "conftest.py").write_text("a test of the copy does not count")
    (folder / defect.file).write_text(committed(defect.file))
    (folder / other.file).write_text(planted(other))
    with pytest.raises(SystemExit, match="not yet"):
        exercise.judge_hunt(folder)
    (folder / other.file).write_text(committed(other.file))
    exercise.main(["hunt", "--done"])
    assert defect.words in capsys.readouterr().out


# --- what an exercise shows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in NUMBERS])
def test_what_an_exercise_shows(number):
    """Its commands run, and each prediction has a right number."""
    for command in EXERCISES[number]["show"]:
        subprocess.run([sys.executable, *command.split()], cwd=exercise.ROOT, check=True, capture_output=True)
    right = [eval(q["formula"], vars(formulas)) for q in EXERCISES[number]["predict"]]
    derived = [exercise.right_number(q) for q in EXERCISES[number]["predict"]]
    assert derived == pytest.approx(right) and min(derived) >= 0


def test_the_chain_rule_equals_pytorchs_gradients(capsys):
    show.chain()
    backward = re.findall(r"(?m)^B \|[^|]+\| +(.+?) +\| +(.+?) *$", capsys.readouterr().out)
    assert len(backward) == 6 and all(ours == theirs for ours, theirs in backward)


def test_a_power_law_is_a_line_in_the_logarithm(capsys):
    show.law()
    bars = list(map(len, re.findall("#+", capsys.readouterr().out)))
    steps = {a - b for a, b in itertools.pairwise(bars[:7])} | {a - b for a, b in itertools.pairwise(bars[7:])}
    assert len(bars) == 14 and steps <= {4, 5}


def test_each_scheme_halves_the_flops_of_a_rank(capsys):
    """For a token a block takes 524,288 in forward, the head 98,304. PP's rank 0 has two of four blocks: 48%."""
    show.schemes()
    shares = re.findall(r"(?m)^\S+ +\|[^|]+\| cut to (\d+%)", capsys.readouterr().out)
    assert shares == ["50%"] * 4 + ["48%", "50%"]


# --- mistakes of a user -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", "99;start 99;start 3 4;3 folder 4;grade 3;99 run python;8 run;hunt --done".split(";"))
def test_a_mistake_on_the_command_line_changes_nothing(words, mine, monkeypatch):
    monkeypatch.setattr(Path, "write_text", None)
    message = r"exercise (99|grade): should be one of 1, .*, \d+$|take one number|followed by a command|--done needs"
    with pytest.raises(UserError, match=message):
        exercise.main(words.split())


def test_no_clone_and_no_pytest_are_one_line(monkeypatch, tmp_path):
    code = "import sys; sys.modules['pytest'] = None; from exercises import show; show.law(); show.tests()"
    done = subprocess.run([sys.executable, "-c", code], cwd=exercise.ROOT, capture_output=True, text=True)
    assert "With 10 times" in done.stdout and "UserError: this needs pytest: pip install" in done.stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"requirements-dev\.txt"):
        exercise.judge(8, "")
    monkeypatch.setattr(judging, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"git clone.*not a git repository"):
        committed("model.py")
