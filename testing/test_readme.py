"""Tests of README.md and MEASURED.md: names exist, commands run, pictures and transcripts are made again.

Times differ from run to run, so a mask replaces them before two texts are compared.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import config
from testing.count_lines import tracked
from testing.defects import DEFECTS

HERE = Path(__file__).parent.parent
README = (HERE / "README.md").read_text(encoding="utf-8")
MEASURED = (HERE / "MEASURED.md").read_text(encoding="utf-8")
PICTURES = {  # file: the command that draws it
    "pipelines.svg": "-m accounts.draw gpipe 1f1b interleaved chimera zb-h1 zb-h2 zb-v --stages=4 --microbatches=8",
    "who_sends_what.svg": "-m accounts.traffic configs/tiny.py --ranks=8 --tp=2 --pp=2 --zero=2 --schedule=zb-h1",
    "pipedream.svg": "-m accounts.draw pipedream --without_stashing",
    "published.svg": "-m accounts.fit",
    "loss.svg": "-m accounts.curve pictures/tiny.jsonl pictures/tiny_2x2.jsonl",
}
TIME = re.compile(r"(elapsed time per iteration \(ms\): |: )\d+\.\d\d?\b|\d[\d,]* tokens/s|in \d+\.\d s")


def run(*command, cwd=HERE, **fields):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **fields)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def section(title):
    return re.search(rf"(?ms)^## {title}\n(.*?)(?=^## |\Z)", README)[1]


# --- names ------------------------------------------------------------------------------------------------------------


def test_lines_are_short():
    assert [line for line in README.splitlines() if len(line) > 120] == []


def test_every_file_and_picture_exists():
    """The list of files names every file of the program, and every path in the text exists."""
    names = set(re.findall(r"\w+\.py", section("The files, in reading order")))
    program = [p for p in tracked() if "/" not in p or p.startswith("parallel/")]
    program = {Path(p).name for p in program if p.endswith(".py") and not p.startswith(("test_", "conftest", "bench"))}
    assert program - names == set()
    paths = re.findall(r"`((?:parallel/|testing/|bench/|configs/)?\w+\.(?:py|md))`", README + MEASURED)
    paths += re.findall(r"\]\(([\w/.]+)\)", README + MEASURED)
    missing = [path for path in paths if not any((HERE / folder / path).exists() for folder in (".", "parallel"))]
    assert missing == []


ENTRIES = re.findall(r"(?m)^\*\*(.+?)\*\*.*\n(?:.+\n)*?- run: `(.+)`\n- code: (.+)\n- test: (.+)", README)


def names_in(path):
    """The functions, classes and methods (`Class.method`) that a file defines."""
    names = set()
    for node in ast.parse((HERE / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{n.name}" for n in getattr(node, "body", []) if isinstance(n, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("slide, command, code, test", ENTRIES, ids=[entry[0] for entry in ENTRIES])
def test_the_map_from_the_slides(slide, command, code, test):
    """Each name exists in the file named before it; the command is accepted."""
    path, found = None, 0
    for word in re.findall(r"`(.+?)`", f"{code} {test}"):
        if word.endswith(".py"):
            path = word
        else:
            assert word in names_in(path), f"{path} has no {word}"
            found += 1
    assert found >= 1
    program, *arguments = shlex.split(command)
    if program == "torchrun":
        ranks = int(arguments.pop(0).partition("=")[2]) if arguments[0].startswith("--nproc") else 1
        assert arguments[0] == "train.py"
        config.check(config.load(arguments[1:]), ranks)
    elif program == "pytest":
        assert all((HERE / file).exists() for file in arguments)
    elif arguments[:2] != ["-m", "bench"]:
        assert program == "python" and run(sys.executable, *arguments)


def test_the_map_has_every_slide():
    assert len(ENTRIES) == README.count("\n- run: `") >= 16


def test_every_test_file_is_in_the_table_of_tests():
    table = section("Tests")
    assert [p for p in tracked() if re.match(r"test_\w+\.py$", p) and f"`{p}`" not in table] == []


def test_every_known_mistake_is_in_the_table():
    rows = [f"| `{defect.name}` | `{defect.file}` | {defect.words} |" for defect in DEFECTS]
    assert re.findall(r"(?m)^\| `.+` \| `\w+[/.].+` \| .+ \|$", MEASURED) == rows
    assert f"puts {len(DEFECTS)} mistakes" in " ".join(README.split())


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_what_its_command_draws(picture, tmp_path):
    run(sys.executable, *shlex.split(PICTURES[picture]), f"--svg={tmp_path / picture}")
    drawn, shown = ((folder / picture).read_text(encoding="utf-8") for folder in (tmp_path, HERE / "pictures"))
    assert drawn == shown, f"pictures/{picture} is old: python {PICTURES[picture]} --svg=pictures/{picture}"
    assert f"(pictures/{picture})" in README


# --- transcripts ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Run the README's two commands in a new folder. Return (output, text of the model, rows of metrics.jsonl)."""
    folder = tmp_path_factory.mktemp("first_run")
    tests_only = ("OMP_NUM_THREADS", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in tests_only}
    environment["OMP_WAIT_POLICY"] = "passive"  # a waiting thread leaves its core to the tests that run beside this one
    place = dict(cwd=folder, env=environment)  # like a user: uses all cores
    text = run(sys.executable, HERE / "prepare.py", "--tokenizer=bytes", **place)
    text += run("torchrun", HERE / "train.py", HERE / "configs/tiny.py", **place)
    written = run(sys.executable, HERE / "generate.py", "out/tiny", "--prompt", "def hello_world():", **place)
    return text, written, rows_of(folder / "out/tiny/metrics.jsonl")


def rows_of(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_first_run_logs_these_losses(first_run):
    """Digits depend on the processor and on the version of Python, whose library is the data."""
    for ours, theirs in zip(first_run[2], rows_of(HERE / "pictures/tiny.jsonl"), strict=True):
        assert ours["iteration"] == theirs["iteration"]
        assert abs(ours["lm_loss"] - theirs["lm_loss"]) < 0.05 * theirs["lm_loss"]


def test_the_first_transcript(first_run):
    """Every line that the README shows is printed, except for times."""
    text, written, rows = first_run
    shown = re.findall(r"```\n(.*?)\n```", section("What it looks like"), re.DOTALL)
    same = rows[-1]["lm_loss"] == rows_of(HERE / "pictures/tiny.jsonl")[-1]["lm_loss"]
    print("the digits are those of the README's machine" if same else "another processor or Python: digits masked")

    def masked(text):
        text = " ".join(TIME.sub("TIME", text).split())
        return text if same else re.sub(r"\d[\d.,E+-]*", "#", text)

    printed = list(map(masked, text.splitlines()))
    for line in shown[0].splitlines():
        parts = ".*".join(re.escape(masked(part)) for part in line.split("..."))
        assert any(re.fullmatch(parts, other) for other in printed), f"no such line is printed: {line}"
    if same:
        assert written.startswith(shown[1].split("\n", 1)[1])


def test_the_tables_of_eight_processes(tmp_path):
    """The command in MEASURED.md prints its two tables, digit for digit: bytes do not depend on the machine."""
    command = re.search(r"```\n(torchrun --nproc_per_node=8 .*?)\n```", MEASURED, re.DOTALL)[1].replace("\\\n", " ")
    run(sys.executable, HERE / "prepare.py", "--tokenizer=bytes", cwd=tmp_path)
    words = [str(HERE / word) if word.endswith(".py") else word for word in shlex.split(command)]
    printed = run(*words, cwd=tmp_path)
    shown = re.search(r"(sent per step by rank 0.*?)\n\n(kept by rank 0.*?)\n```", MEASURED, re.DOTALL)
    assert shown[1] in printed and shown[2] in printed
