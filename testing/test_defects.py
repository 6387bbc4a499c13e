"""Plants each defect of testing/defects.txt alone in a copy of the tree. A test must fail and name the cause."""

import subprocess
import sys

import pytest

import exercise
from conftest import needs_git
from testing.defects import DEFECTS, ROOT, failure, planted

pytestmark = needs_git


def check(defect):
    message = failure(defect)
    assert message is not None, f"{defect.name}: the test {defect.test} does not fail"
    assert defect.words in " ".join(message.split()), f"{defect.name}: without `{defect.words}`:\n{message}"


@pytest.mark.slow
@pytest.mark.parametrize("defect", [d for d in DEFECTS if d.quick], ids=lambda d: d.name)
def test_a_few_defects_are_found_and_named(defect):
    check(defect)


@pytest.mark.defects
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_every_defect_is_found_and_named(defect):
    check(defect)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_the_lines_of_a_defect_are_in_its_file(defect):
    planted(defect)


@pytest.mark.slow
def test_the_test_of_each_defect_and_lamp_exists():
    """The grid chooses its layouts, so a layout of defects.txt can leave it. Lamps are those of the exercises."""
    tests = sorted({defect.test for defect in DEFECTS} | {*exercise.tests(*exercise.numbers())})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "", *tests]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
