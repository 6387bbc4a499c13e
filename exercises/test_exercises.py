"""Judges the exercises' answers: right ones are green, an empty function is red, a wrong answer names its idea."""

import csv
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import config as configuration
import exercise
from conftest import needs_git
from errors import UserError
from exercises import formulas, show
from testing import judging
from testing.defects import planted
from testing.judging import committed, replaced
from testing.tiny import wait_until

pytestmark = needs_git
NUMBERS = exercise.numbers()
EXERCISES = {number: exercise.exercise(number) for number in NUMBERS}
FROM_THE_TEXT = {"name": "from the text", "edits": []}
ANSWERS = [(number, answer) for number, e in EXERCISES.items() for answer in (FROM_THE_TEXT, *e["answer"])]
QUICK = (8,)  # blanked and judged in the default run


def named(x):
    return x["name"] if isinstance(x, dict) else str(x)


def required(judged):
    """Return ({idea: message} of the red lamps that are no bonus, number of such lamps)."""
    judged = [(lamp["idea"][0], message) for lamp, message in judged if lamp["points"]]
    return {idea: message for idea, message in judged if message is not None}, len(judged)


def changed(number, edits):
    return replaced(committed(EXERCISES[number]["file"]), edits)


def answered(number, edits):
    """Return the file that `start` writes, with `whole` in its empty functions. edits: of `whole`."""
    bodies = iter(replaced("\0".join(EXERCISES[number]["whole"].values()), edits).split("\0"))
    empty = r'(?m)^( +)from errors import UserError\n\n.+ is yours to write"\)\n'
    return re.sub(empty, lambda found: textwrap.indent(next(bodies), found[1]), exercise.blank(number))


@pytest.mark.parametrize("number", NUMBERS)
def test_an_exercise_has_ten_points_and_five_questions(number):
    """The lines of its answers are in the file, and each wrong answer names the idea of a lamp."""
    e = EXERCISES[number]
    assert sum(lamp["points"] for lamp in e["lamp"]) == 10
    assert len(e["oral"]) == 5 and all(len(row) == 4 for row in e["oral"]) and e["oral"][0][0] in exercise.oral(number)
    ideas = {None, *(lamp["idea"][0] for lamp in e["lamp"])}
    assert all(answered(number, answer["edits"]) and answer.get("red") in ideas for answer in e["answer"])


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, answer",
    [pytest.param(*row, marks=pytest.mark.defects if "red" in row[1] else pytest.mark.slow) for row in ANSWERS],
    ids=named,
)
def test_a_right_answer_is_green_and_a_wrong_one_turns_the_lamp_of_its_idea_red(number, answer):
    red, _ = required(exercise.judge(number, answered(number, answer["edits"]), 600))
    assert answer.get("says", "") in red[answer["red"]] if "red" in answer else not red, red


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
    """A small Debian has no ps, macOS has no /proc."""
    state = subprocess.getoutput(f"(ps -o stat= -p {pid} || sed 's/.*) //' /proc/{pid}/stat) 2>/dev/null")
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


@pytest.mark.slow
def test_an_answer_that_prints_for_ever_ends(tmp_path, monkeypatch):
    """By the clock, or by its CPU time, even if the clock stands."""
    loop = "import time\nwhile True: print(1, flush=True)"
    assert judging.run(tmp_path, ["-c", f"{loop}; time.sleep(0.01)"], 0.4)[0] is None
    monkeypatch.setattr(time, "monotonic", float)
    assert judging.run(tmp_path, ["-c", loop], 0.4)[0] is None


@pytest.mark.slow
def test_an_answer_that_makes_the_report_a_pipe_is_one_line():
    code = first(
        "import os", "os.path.isfile('report.jsonl') and (os.remove('report.jsonl'), os.mkfifo('report.jsonl'))"
    )
    with pytest.raises(UserError, match=r"report\.jsonl: should be a file, not a folder, a pipe"):
        exercise.judge(8, changed(8, code), 60)


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
    """Each folder has a row for each exercise. A damaged folder does not stop the table."""
    texts = {
        "right": changed(8, [(WARMUP, WARMUP.replace("1 - rank", "rank - 1"))]),
        "other": changed(8, [("def gpipe(stages", "def gpipe(ranks"), (WARMUP, f"{WARMUP} copied: ")]),
        "begun": exercise.blank(8),
        "broken": "\udcff",
        "forged": "x\x1b[2J = 1\n",
        "piped": "",
    }
    for name, text in texts.items():
        (tmp_path / name / "mine").mkdir(parents=True)
        (tmp_path / name / "mine/8_schedules.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/mine").symlink_to("../right/mine")
    (tmp_path / "right/mine/8.first").write_text("bubble = 0.275\nin_flight = 4.05\nin_flight_of_gpipe = 8\n")
    (tmp_path / "other/mine/8.txt").write_text("bubble = 1e999999999\nin_flight = 1/0\nin_flight_of_gpipe = nan\n")
    os.mkfifo(tmp_path / "piped/mine/8.first")
    monkeypatch.chdir(tmp_path)

    def judge(number, text, limit):
        assert limit == 60
        message = "no\nright  10\x1b[1m" + 99 * "!" if "\x1b" in text else None
        return [(lamp, message) for lamp in EXERCISES[int(number)]["lamp"]]

    monkeypatch.setattr(exercise, "judge", judge)
    exercise.main(["grade", "10", "8", "--limit", "60", "--csv=all.csv", *texts, "linked", "missing"])
    table = [re.split("  +", row) for row in capsys.readouterr().out.splitlines()]
    header, *rows = csv.reader(Path("all.csv").read_text("utf-8").splitlines())
    assert header == exercise.CSV and len(table) == 1 + len(rows)
    right, other, begun, broken, forged, piped, linked, missing = (row[2:] for row in rows if row[1] == "8")
    assert right == ["10", "2 of 3", "no", ""] and other == ["10", "0 of 3", "yes", ""]
    assert table[4] == ["other", "8", "10", "3 of 3", "0 of 3", "gpipe"]
    assert begun == ["", "0 of 3", "no", "todo"] and missing == ["", "", "no", "no such folder"]
    assert "UnicodeDecodeError" in broken[-1] and "not a link" in linked[-1] and "a pipe or a device" in piped[-1]
    assert forged[0] == "0" and forged[-1] == r"no right 10\x1b[1m" + 99 * "!" and len(table[10][-1]) == 70


def test_the_first_complete_predictions_are_kept(mine, monkeypatch, capsys):
    """Until then a lamp's idea and the tables, which tell the right numbers, are not shown."""
    (mine / "8_schedules.py").touch()
    lamps = [({"points": 1, "idea": ["the formula", ""]}, "no")]
    monkeypatch.setattr(exercise, "judge", lambda *given: print(*given) or lamps)
    for answer, complete in [("?", False), ("8\u500b", False), ("\uff13/11", True), ("1", True)]:
        (mine / "8.txt").write_text(f" bubble \uff1d {answer}\u3000# a\nin_flight = 2**2\nin_flight_of_gpipe=8\n")
        exercise.judge_mine(8, mine, 60)
        out = capsys.readouterr().out
        shown = "you あなた 3/11, the formula 正解 0.2727", "the formula\n", EXERCISES[8]["show"][0]
        assert {text in out for text in shown} == {complete} == {f": bubble = {answer}\n" not in out}


def test_a_bonus_may_stay_red(mine, monkeypatch):
    (mine / "8_schedules.py").touch()
    lamp = {"points": 0, "idea": []}
    monkeypatch.setattr(exercise, "judge", lambda *_: [(lamp, "no")])
    assert exercise.judge_mine(8, mine, 60)
    lamp["points"] = 1
    assert not exercise.judge_mine(8, mine, 60)


def test_a_number_may_be_computed():
    right = {"8,192": 8192, "6.02e23": 6.02e23, "2^20": 2**20, "-(2 + 3)*4/8-1": -3.5, "27%": 0.27}
    right |= {"5 \u00d7 2^\u22121": 2.5, "1\u00f78": 0.125}
    wrong = "9**9**9;8\u500b;7 MB;x;e;1/0;?;();5(5);__import__('os');" + 10**5 * "9" + ";" + 10**5 * "-"
    for text in [*right, *wrong.split(";")]:
        assert exercise.number_of(text) == right.get(text), text


# --- the hunt ---------------------------------------------------------------------------------------------------------


def test_the_command_of_every_hunt_is_accepted():
    for defect in exercise.HUNTS:
        processes, *fields = defect.hunt.split()
        configuration.check(configuration.load(["configs/short_run.py", *fields]), int(processes))


@pytest.mark.slow
def test_a_hunt_hides_its_defect_and_accepts_a_mend_that_breaks_nothing_else(mine, monkeypatch, capsys):
    quick = "warm-up-of-the-wrong-end", "attention-sees-later-tokens"
    defect, other = hunts = [hunt for hunt in exercise.HUNTS if hunt.name in quick]
    monkeypatch.setattr(exercise, "HUNTS", hunts)
    monkeypatch.setattr(exercise, "DATA", mine)
    with pytest.raises(UserError, match="--done needs"):
        exercise.main(["hunt", "--done"])
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
    text = capsys.readouterr().out
    bars = list(map(len, re.findall("#+", text)))
    steps = {a - b for a, b in itertools.pairwise(bars[:7])} | {a - b for a, b in itertools.pairwise(bars[7:])}
    assert len(bars) == 14 and steps <= {4, 5}
    rests = [float(rest) for rest in re.findall(r"(?m)\| +([\d.]+) \| #", text)]
    said = re.findall(r"= ([\d.]+) times smaller", text)
    assert said == [f"{rests[i] / rests[i + 1]:.2f}" for i in (0, 7)]


def test_the_norm_of_lambs_update_is_that_of_the_weight(capsys):
    show.norms()
    rows = re.findall(r"(?m)^block\S+(?:qkv|proj|fc1|fc2)\.weight +\| +(\S+) \| +(\S+)$", capsys.readouterr().out)
    assert len(rows) == 4 and all(weight == update for weight, update in rows)


def test_the_slides_flops_stand_beside_yours(capsys):
    show.flops()
    rows = re.findall(r"(?m)^gpt3\S+ +\| +(\S+) \| +(\S+) \| +(\S+) ", capsys.readouterr().out)
    assert len(rows) == 3 and all(float(c) == pytest.approx(5.7 * float(n) * float(d), rel=1e-3) for n, d, c in rows)


def test_each_scheme_halves_the_flops_of_a_rank(capsys):
    """For a token a block takes 524,288 in forward, the head 98,304. PP's rank 0 has two of four blocks: 48%."""
    show.schemes()
    shares = re.findall(r"(?m)^\S+ +\|[^|]+\| cut to (\d+%)", capsys.readouterr().out)
    assert shares == ["50%"] * 4 + ["48%", "50%"]


# --- mistakes of a user -----------------------------------------------------------------------------------------------


def test_no_clone_and_no_pytest_are_one_line(monkeypatch, tmp_path):
    code = "import sys; sys.modules['pytest'] = None; from exercises import show; show.law(); show.tests()"
    done = subprocess.run([sys.executable, "-c", code], cwd=exercise.ROOT, capture_output=True, text=True)
    assert "With 10 times" in done.stdout and "UserError: this needs pytest: pip install" in done.stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install pytest$"):
        exercise.judge(8, "")
    monkeypatch.setattr(judging, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"git clone.*not a git repository"):
        committed("model.py")
