"""A hunt shows a symptom, hides its place, gives a hint, and accepts every mend. A class is graded."""

import functools
import json
import re
from pathlib import Path

import pytest

import config as configuration
import exercise
from conftest import needs_git
from errors import UserError
from exercises import hunt
from testing.judging import committed, copied, git, run

pytestmark = needs_git
A_FEW = "g-without-its-sum last-always W-in-forward's-order".split()
ROWS = [
    pytest.param(row, id=row[0].name, marks=pytest.mark.slow if row[0].name in A_FEW else pytest.mark.defects)
    for level in (1, 2, 3)
    for row in hunt.hunts(level)
]
SYMPTOMS = r"lm loss: \S+|grad norm: \S+|validation loss.*|error: .*|\w+Error: .*|SIG\w+|[\d,]+ +\| +[\d,]+"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, tokens_dir, monkeypatch):
    """The hunts of another student, with the tests' tokens."""
    monkeypatch.setattr(hunt, "MINE", tmp_path / "mine")
    monkeypatch.setattr(hunt, "DATA", Path(tokens_dir))


def seen(folder, processes, fields):
    """Return what a hunt's command prints in `folder`: losses, norms, errors, bytes beside their formulas."""
    more = [f"--data_dir={hunt.DATA}", f"--out_dir={folder}/out", "--seq_length=32"]
    words = ["-m", "torch.distributed.run", "--standalone", *hunt.training(processes, [*fields, *more]).split()[1:]]
    _, *texts = run(folder, words, 300, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return re.findall(SYMPTOMS, "".join(text.partition("waited per step")[0] for text in texts))


@functools.cache
def seen_in_the_project(*layout):
    with copied() as folder:
        return seen(folder, layout[0], layout[1:])


@pytest.mark.parametrize("row", ROWS)
def test_a_hunt_shows_a_symptom(row):
    defect, processes, fields = row
    with copied(hunt.defective(defect)) as folder:
        found = seen(folder, processes, fields)
    right = seen_in_the_project(processes, *fields)
    assert len(right) > 6 and found != right


def test_every_hunt_has_a_layout_that_runs_and_a_sentence():
    for defect, processes, fields in (row.values[0] for row in ROWS):
        configuration.check(configuration.load(["configs/short_run.py", *fields]), processes)
        assert defect.words[0].isupper() and defect.words[-1] == "."


@pytest.mark.parametrize("level", [1, 2])
def test_the_copy_does_not_tell(level, capsys):
    hunt.main(["--seed=3", f"--level={level}"])
    copy, (defect, processes, fields) = hunt.MINE / "hunt", hunt.hunted(level, 3)
    assert f"(cd mine/hunt && {hunt.training(processes, fields)}" in capsys.readouterr().out
    pages = [path.read_text("utf-8") for path in copy.rglob("*") if path.suffix in (".py", ".txt", ".md", ".toml")]
    assert not any(defect.name in page for page in pages) and not (copy / "exercises").exists()
    assert git("log", "--format=%s", folder=copy) == b"hunt\n" and not git("status", "--short", folder=copy)
    assert bool([*copy.glob("test_*.py")]) == (copy / "testing").exists() == (level == 1)
    with pytest.raises(UserError, match="a hunt is open"):
        hunt.main([])


def test_a_mend_may_break_nothing_else():
    """The tests are the defect's, and those of each file that the student has changed."""
    defect, *_ = hunt.hunts(1)[0]
    tests = hunt.tests_of(defect, ["parallel/zero.py"])
    assert tests[0] == defect.test and len(tests) == len({*tests}) > 10


def ended(sentence):
    """Judge the open hunt. Return the exit code."""
    with pytest.raises(SystemExit) as end:
        hunt.main(["--done", sentence, "--limit=200"])
    return end.value.code


@pytest.mark.slow
def test_a_mend_is_accepted_and_a_class_is_graded(capsys):
    hunt.main(["--seed=22"])
    defect, _, _ = hunt.hunted(1, 22)
    hunt.main(["--hint"])
    assert ended("nothing") == 1
    words = next(d.words for d in hunt.DEFECTS if d.name == defect.name)
    assert f"file: {defect.file}" in (said := capsys.readouterr().out) and words in said and "not yet" in said
    (hunt.MINE / "hunt" / defect.file).write_text(committed(defect.file), "utf-8")
    assert ended("one process\nis right\x1b[2J") == 0
    assert defect.words in (said := capsys.readouterr().out) and "tries: 2" in said and "mine/hunt-1-22" in said
    with pytest.raises(UserError, match="this hunt is over"):
        hunt.main(["--seed=22"])
    hunt.main(["--seed=23"])  # open, without an answer
    capsys.readouterr()
    exercise.main(["grade", "hunt", str(hunt.MINE.parent)])
    row = re.split("  +", capsys.readouterr().out.splitlines()[1])
    assert row[1] == "1 of 1" and row[3:] == ["1", "2", r"one process is right\x1b[2J"]
    file = hunt.MINE / "hunt-1-22.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"files": {}}), encoding="utf-8")
    assert hunt.graded(hunt.MINE, limit=100)["right"] == "0 of 1"
