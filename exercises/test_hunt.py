"""A hunt shows a symptom, hides its place, gives hints, and accepts every mend. A class is graded."""

import json
from pathlib import Path

import pytest

import config as configuration
from conftest import needs_git
from errors import UserError
from exercises import hunt

pytestmark = needs_git
A_FEW = "no-1/m g-without-its-sum norm-twice-over-dp last-always cp-share scalars-not-waited-for".split()
A_FEW += ["warm-up-of-the-wrong-end"]
CLEAN, clean_run = {}, hunt.clean_run  # CLEAN: {layout: its clean runs}
ROWS = [
    pytest.param(level, row, id=row[0].name, marks=pytest.mark.slow if row[0].name in A_FEW else pytest.mark.defects)
    for level in (1, 2, 3)
    for row in hunt.hunts(level)
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, tokens_dir, monkeypatch):
    """The hunts of another student, with the tests' tokens. No hunt is shown. A layout's clean run is made once."""
    monkeypatch.setattr(hunt, "clean_run", lambda *layout: clean_run(*layout[:2], CLEAN))
    monkeypatch.setattr(hunt, "MINE", tmp_path / "mine")
    monkeypatch.setattr(hunt, "DATA", Path(tokens_dir))
    monkeypatch.setattr(hunt, "look", lambda *_: ("", ["loss 1"]))


@pytest.mark.parametrize("level, row", ROWS)
def test_a_hunt_shows_a_symptom(level, row):
    found = next(hunt.check(level, [row]))
    assert "| none" not in found
    assert "deadlock:" not in found or found.count("waits for") == found.count(", which is rank ") > 1  # a whole circle


def test_every_hunt_has_a_layout_that_runs_and_hints():
    for _, (defect, processes, fields) in (row.values for row in ROWS):
        configuration.check(configuration.load(["configs/short_run.py", *fields]), processes)
        assert len(hunt.hints(defect)) == 3 and defect.words[0].isupper() and defect.words[-1] == "."


@pytest.mark.parametrize(
    "words, processes, fields",
    [
        ("", 2, "--zero=1"),
        ("--micro_batch_size=8 --zero=0", 2, "--zero=0 --micro_batch_size=8"),
        ("--dp=2 --tp=2", 4, "--tp=2"),
        ("--dp=1", 1, ""),
    ],
)
def test_a_look_changes_the_layout_of_the_hunt(words, processes, fields, monkeypatch):
    looks = []
    monkeypatch.setattr(hunt, "hunted", lambda *_: (hunt.DEFECTS[0], 2, ["--zero=1"]))
    hunt.main(["--seed=3"])
    monkeypatch.setattr(hunt, "look", lambda _, *given, more: (looks.append((given[0], " ".join(given[1]))), []))
    hunt.main(["--compare", *words.split()])
    assert looks == [(processes, fields)]
    for wrong in ("2", "--nproc_per_node=2", "--"):
        with pytest.raises(UserError, match=f"^{wrong}.*--dp=2"):
            hunt.main(["--compare", wrong, "--zero=0"])


@pytest.mark.parametrize("level", [1, 2])
def test_the_copy_does_not_tell(level):
    hunt.main(["--seed=3", f"--level={level}"])
    copy, (defect, _, _) = hunt.MINE / "hunt", hunt.hunted(level, 3)
    pages = [path.read_text("utf-8") for path in copy.rglob("*") if path.suffix in (".py", ".txt", ".md", ".toml")]
    assert not any(defect.name in page for page in pages) and not (copy / "exercises").exists()
    assert hunt.git("-C", copy, "log", "--format=%s") == b"hunt\n" and not hunt.git("-C", copy, "status", "--short")
    assert bool([*copy.glob("test_*.py")]) == (copy / "testing").exists() == (level == 1)
    with pytest.raises(UserError, match="a hunt is open"):
        hunt.main([])


@pytest.mark.slow
def test_a_mend_is_accepted_and_a_class_is_graded(capsys):
    hunt.main(["--seed=3"])
    defect, _, _ = hunt.hunted(1, 3)
    hunt.main(["--hint"])
    with pytest.raises(SystemExit) as ended:
        hunt.main(["--done", "nothing"])
    assert ended.value.code == 1
    words = next(d.words for d in hunt.DEFECTS if d.name == defect.name)
    assert defect.file in (said := capsys.readouterr().out) and words in said and "not yet" in said
    (hunt.MINE / "hunt" / defect.file).write_text(hunt.committed(defect.file), "utf-8")
    hunt.main(["--done", "one process is right"])
    assert defect.words in (said := capsys.readouterr().out) and "7 points" in said and "mine/hunt-1-3" in said
    hunt.main(["--seed=3"])
    with pytest.raises(SystemExit):
        hunt.main(["--done", "again, for a friend"])
    row = hunt.grading(limit=100)[1](hunt.MINE.parent)
    assert row["right"] == (1, 1) and row["hints"] == 1 and row["points"] == 7 and row["note"] == "one process is right"
    kept = hunt.MINE / "hunt-1-3.json"
    kept.write_text(json.dumps(json.loads(kept.read_text("utf-8")) | {"files": {}}), encoding="utf-8")
    assert hunt.grading(limit=100)[1](hunt.MINE.parent)["points"] == 0
