"""Tests `testing/imports.py`, and that no import of the project breaks its rules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import needs_git
from testing.imports import broken_rules, graph, imported

pytestmark = needs_git


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)


def test_no_import_breaks_a_rule():
    assert broken_rules(graph()) == []


def test_kernels_and_reference_import_only_each_other_and_flash_attention():
    imports, together = graph(), {"kernels.py", "reference.py", "flash_attention.py"}
    assert imports["kernels.py"] | imports["reference.py"] <= together
    assert imports["flash_attention.py"] == set()


def test_schedules_can_be_read_without_torch():
    """Drawing or checking a schedule needs no PyTorch."""
    code = "import sys, parallel.schedules; assert 'torch' not in sys.modules, 'torch is imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path, other, wrong",
    [
        ("model.py", "reference.py", False),
        ("parallel/comm.py", "bench/kernels.py", True),
        ("model.py", "test_layouts.py", True),
        ("generate.py", "train.py", True),
        ("testing/dry_run.py", "train.py", False),
        ("parallel/pipeline.py", "accounts/meter.py", True),
        ("parallel/comm.py", "recovery/hang.py", True),
        ("recovery/hang.py", "parallel/comm.py", False),
        ("ladder/rung04_dp.py", "model.py", True),
        ("ladder/test_ladder.py", "testing/tiny.py", False),
        ("model.py", "ladder/gpt.py", True),
        ("errors.py", "config.py", True),
        ("accounts/meter.py", "log.py", True),
        ("log.py", "accounts/meter.py", False),
        ("exercises/formulas.py", "check.py", True),
        ("testing/tiny.py", "exercises/show.py", True),
        ("check.py", "conftest.py", True),
        ("check.py", "testing/compare.py", False),
    ],
)
def test_a_rule_finds_a_wrong_import(path, other, wrong):
    assert len(broken_rules({path: {other}, other: set()})) == wrong


def test_imports_and_circles_are_found():
    modules = {"a": "a.py", "b": "b/__init__.py", "b.c": "b/c.py", "d": "d.py"}
    source = "import a\nfrom b import c\ndef f():\n    if 1:\n        from d import g, h\nimport json, torch.e\n"
    assert imported(ast.parse(source), modules) == {"a.py", "b/__init__.py", "b/c.py", "d.py"}
    assert broken_rules({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["a circle of imports: b c b"]
