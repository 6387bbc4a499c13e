"""The pictures show the numbers: a test compares the texts in a file."""

import itertools
import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import config as configuration
from accounts import curve, draw, traffic, zero_states
from accounts.metrics import to_json
from errors import UserError
from parallel import schedules
from parallel.units import unit_specs
from testing.tiny import tiny_config


def texts(path):
    """Return all texts of an SVG."""
    return [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


# --- curves -----------------------------------------------------------------------------------------------------------

PICTURES = Path(__file__).parent.parent / "pictures"
RUNS = [str(PICTURES / f"{name}.jsonl") for name in ("tiny", "tiny_2x2")]


def test_two_layouts_have_equal_curves(tmp_path):
    """The page shows that the two runs are equal."""
    one, four = map(curve.read_curve, RUNS)
    assert len(one.training) == 30 and len(one.validation) == 3
    assert four.training == [pytest.approx(point, abs=3e-4) for point in one.training]
    assert four.validation == [pytest.approx(point, abs=3e-4) for point in one.validation]
    curve.main([*RUNS, f"--svg={tmp_path}/loss.svg"])
    assert {"tiny", "tiny_2x2", "iterations"} <= set(texts(tmp_path / "loss.svg"))


def test_a_curve_may_end_in_nan_and_in_a_cut_row(tmp_path):
    rows = ({"iteration": i, "lm_loss": loss} for i, loss in {20: 4.5, 40: math.nan, 60: math.inf}.items())
    (tmp_path / "metrics.jsonl").write_text("".join(f"{to_json(row)}\n" for row in rows) + '{"iteration": 120, "cons')
    curve.main([str(tmp_path), f"--svg={tmp_path}/loss.svg"])
    assert tmp_path.name in texts(tmp_path / "loss.svg")


# --- schedules --------------------------------------------------------------------------------------------------------


def test_a_drawing_has_the_bubble_and_the_activations_in_flight(tmp_path):
    draw.main(["1f1b", "interleaved", "--stages=2", "--microbatches=4", f"--svg={tmp_path}/x.svg"])
    words = texts(tmp_path / "x.svg")
    assert any(word.startswith("bubble 0.2000 of 15") for word in words)
    assert {"1f1b: 2 stages, 4 micro-batches", "forward", "rank 0"} <= set(words) and "update" not in words


def test_a_defect_of_a_schedule_is_no_mistake_of_the_options(monkeypatch):
    monkeypatch.setitem(schedules.SCHEDULES, "yours", lambda stages, microbatches, chunks=1: [][stages])
    with pytest.raises(IndexError):
        draw.main(["yours"])


def test_a_backward_with_other_weights_is_marked(tmp_path):
    for marked, more in enumerate(([], ["--without_stashing"])):
        draw.main(["pipedream", "--stages=2", "--microbatches=4", f"--svg={tmp_path}/x.svg", *more])
        assert (draw.KINDS["!"][0] in texts(tmp_path / "x.svg")) == marked


def test_pipedream_pays_its_bubble_once_and_1f1b_in_each_step(tmp_path, capsys):
    draw.main(["1f1b", "pipedream", "--microbatches=4", "--steps=2", f"--svg={tmp_path}/x.svg"])
    words = " ".join(texts(tmp_path / "x.svg"))
    assert "1f1b: 4 stages, 4 micro-batches, 2 steps bubble 0.4286 of 42 " in words
    assert "pipedream: 4 stages, 8 micro-batches, 8 updates bubble 0.2727 of 33 " in words
    draw.main(["zb-h2", "--steps=2"])
    assert "bubble 0.0588 of 51 | whole step: 0.1111 of 54\n" in capsys.readouterr().out, "a formula is of one step"
    options = draw.parse_arguments(["1f1b", "interleaved", "pipedream", "--steps=3"])
    for picture in draw.pictures_of(options):
        for _, boxes, between in picture.rows:
            if between == ".":
                assert {int(box.text[1:]) for box in boxes} == set(range(24))
                assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(boxes)), "two at once"


def test_the_bars_of_zero_are_the_model_states(tmp_path):
    draw.main(["--zero=16", f"--svg={tmp_path}/x.svg"])
    words = set(texts(tmp_path / "x.svg"))
    for stage in range(4):
        states = zero_states.model_states(draw.PARAMETERS, 16, stage)
        wide = {f"{what} {float(size) / 1e9:.1f}" for what, size in states.items() if size > 20e9}
        assert wide | {*states} <= words, stage


def test_the_size_of_gpt3_13b():
    c = configuration.load(["configs/gpt3_13b.py"])
    specs = {spec.name: spec for unit in unit_specs(c) for spec in unit}
    assert draw.PARAMETERS == sum(math.prod(spec.shape) for spec in specs.values())


# --- traffic ----------------------------------------------------------------------------------------------------------


def test_the_groups_and_the_numbers_of_the_ledger():
    p = traffic.predict_step(tiny_config(2, 2, pp=2, zero=2, schedule="zb-h1"), 8)
    assert traffic.groups(p.layout).splitlines()[0] == "dp: ranks 0 4 | 1 5 | 2 6 | 3 7"
    c = tiny_config(4, pp=2, cp=2, zero=3, zero_copies=2, micro_batch_size=1)
    assert traffic.groups(traffic.predict_step(c, 16).layout).splitlines() == [
        "dp: ranks 0 4 8 12 | 1 5 9 13 | 2 6 10 14 | 3 7 11 15",
        "pp: ranks 0 2 | 1 3 | 4 6 | 5 7 | 8 10 | 9 11 | 12 14 | 13 15",
        "cp: ranks 0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15",
        "data: ranks 0 1 4 5 8 9 12 13 | 2 3 6 7 10 11 14 15",
        "shards: ranks 0 1 4 5 | 2 3 6 7 | 8 9 12 13 | 10 11 14 15",
        "copies: ranks 0 8 | 1 9 | 2 10 | 3 11 | 4 12 | 5 13 | 6 14 | 7 15",
    ]
    tables = traffic.predicted_tables(p)
    assert all(f"{float(size):,.0f}" in tables for sent in p.sent for _, size in sent.values())


# --- all pictures -----------------------------------------------------------------------------------------------------


def test_a_missing_matplotlib_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"^--svg=x.svg: .*pip install matplotlib$"):
        curve.draw("x.svg", [curve.read_curve(RUNS[0])])
