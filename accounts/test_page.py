"""The page in a real browser: page.html computes what the project's functions compute. Skipped without Chromium."""

import html
import itertools
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import config
import plan
from accounts import bubbles, draw, page, search, traffic
from accounts.devices import DEVICES
from errors import UserError
from parallel import schedules, simulation

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CACHED = Path.home().glob(".cache/ms-playwright/chromium*/*/*shell")  # playwright install chromium
BROWSER = next((path for path in [*map(shutil.which, NAMES), *CACHED] if path), None)
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs Chromium (apt install chromium-headless-shell)")
# F, I, W, time of a message
COSTS = [(1, 1, 1, 0), (1, 1.5, 0.5, 0), (2, 1, 1, 0.25), (0.75, 1, 1.25, 1), (1, 1, 1.25, 0), (0.5, 0.75, 0.25, 0)]
FIELDS = "dp tp pp zero sp recompute mb schedule micro copies".split()
LAYOUTS = """
1 1 1 0 0 none 1 1f1b 4 1
4 2 2 1 1 none 2 zb-h1 8 1
4 2 4 3 0 full 8 gpipe 8 1
16 2 4 2 1 elementwise 1 zb-v 8 1
16 1 4 3 0 none 8 interleaved 8 1
4 1 1 2 0 full 1 1f1b 8 1
4 1 4 1 0 none 1 interleaved 6 1
1 2 4 0 1 full 2 zb-h2 4 1
4 1 4 1 0 none 1 chimera 8 1
16 2 2 2 0 none 2 two-waves 8 1
16 1 1 3 0 none 1 1f1b 8 4
16 2 2 2 0 none 2 zb-h1 8 2
4 1 1 1 0 none 1 1f1b 4 2
4 1 1 3 0 full 1 1f1b 4 4
4 1 1 0 0 none 1 1f1b 4 2
1 2 1 3 0 none 1 1f1b 4 1
""".strip().splitlines()
SCRIPT = """
addEventListener("error", event => document.body.textContent = event.message);
addEventListener("load", () => setTimeout(() => {
  const {state, schedule, memory, simulate, kept, bars} = page, answers = {schedules: [], layouts: []};
  const all = selector => [...document.querySelectorAll(selector)].map(e => e.textContent);
  const ask = (selector, event) => document.querySelector(selector).dispatchEvent(event);
  for (const [name, p, m, v, F, I, W, comm] of SETTINGS) {
    Object.assign(state, {a: name, b: "", p, m, v, F, I, W, comm});
    schedule();
    const {bubble, whole, makespan, span, peak, error} = simulate(name), [command] = all("#schedule .command");
    const shown = {bubble: all(".bubble")[0], formula: all(".formula b"), wrong: all("#pictures .wrong")[0]};
    answers.schedules.push({command, bubble, whole, makespan, span, peak, error, shown});
  }
  for (const layout of LAYOUTS) {
    Object.assign(state, layout, {vary: "zero"});
    memory();
    const bar = bars()[state.zero], ranks = Array.from({length: bar.error ? 0 : state.pp}, (_, r) => kept(state, r));
    answers.layouts.push({ranks, ...bar, wrong: all(".bad")[0], command: all("#memory .command")[0]});
  }
  Object.assign(state, {a: "1f1b", b: "zb-h1", p: 4, m: 4, F: 1, I: 1, W: 1, comm: 0, lang: "en"});
  page.build();
  const slider = document.querySelector("input[data-id=m]");
  slider.value = slider.max;
  ask("input[data-id=m]", new Event("input", {bubbles: true}));
  ask('[data-action="a 9"]', new MouseEvent("click", {bubbles: true}));
  ask("#pictures", new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
  const part = document.querySelector("[data-part$=activations]");
  part.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true}));
  answers.moved = {...state, details: all(".detail"), address: location.hash, heads: all("h2")};
  ask("#language", new MouseEvent("click", {bubbles: true}));
  answers.japanese = all("h2");
  document.body.textContent = "ANSWER" + JSON.stringify(answers) + "END";
}, 500));
"""


def two_waves(stages, microbatches, chunks=1):
    """A student's schedule has no formula."""
    half, actions = microbatches // 2, []
    for rank in range(stages):
        F, B = schedules.each("F", microbatches, rank), schedules.each("B", microbatches, rank)
        actions.append(F[:half] + B[:half] + F[half:] + B[half:])
    return schedules.straight("two-waves", chunks, actions)


@pytest.fixture(scope="module")
def text():
    """Return a page with fewer choices than usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(schedules.SCHEDULES, "two-waves", two_waves)
        patch.setitem(config.CHOICES, "schedule", (*schedules.SCHEDULES,))
        few = dict(p=(2, 3, 4), m=(1, 3, 4, 8), v=(2, 3), model=("gpt3_13b",), tp=(1, 2), pp=(1, 2, 4), dp=(1, 4, 16))
        more = {axis: [*page.AXES[axis], "two-waves"] for axis in ("name", "schedule")} | dict(micro=(4, 6, 8))
        patch.setattr(page, "AXES", page.AXES | few | more)
        yield page.page()


def answers(text, folder):
    """Return what the browser computes."""
    names = [*schedules.SCHEDULES]
    places = itertools.product(names, (2, 3, 4), (1, 3, 4, 8), (2, 3))
    several = [place for place in places if place[3] == 2 or schedules.usual_chunks(place[0]) > 1]
    settings = [[*place, *cost] for place in several for cost in COSTS]
    values = ([int(word) if word.isdigit() else word for word in row.split()] for row in LAYOUTS)
    chosen = [dict(zip(FIELDS, row, strict=True), model="gpt3_13b") for row in values]
    script = SCRIPT.replace("SETTINGS", json.dumps(settings)).replace("of LAYOUTS", f"of {json.dumps(chosen)}")
    (folder / "page.html").write_text(text.replace("</html>", f"<script>{script}</script>"), "utf-8")
    options = "--headless --no-sandbox --disable-gpu --virtual-time-budget=20000 --dump-dom".split()
    shown = subprocess.run(
        [BROWSER, *options, f"file://{folder}/page.html"], capture_output=True, text=True, timeout=300
    )
    found = re.search("ANSWER(.*)END", shown.stdout, re.DOTALL)
    assert found, shown.stdout[-2000:] + shown.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


def timeline_of(options):
    (name,), (F, I, W) = options.names, map(float, options.cost.split(","))
    chunks = options.chunks if schedules.usual_chunks(name) > 1 else 1
    schedule = simulation.build(name, options.stages, options.microbatches, chunks)
    cost = {"F": F, "B": I + W, "I": I, "W": W}
    v = draw.chunks_per_rank(schedule)
    return bubbles.simulate(schedule, {kind: time / v for kind, time in cost.items()}, options.comm)


def check_schedules(found):
    """Compare with `python -m accounts.draw`: the command below the picture."""
    errors = formulas = 0
    for answer in found["schedules"]:
        words, shown = shlex.split(answer["command"])[3:], answer["shown"]
        try:
            (picture,) = draw.pictures_of(draw.parse_arguments(words))
        except UserError as error:
            assert shown["wrong"] == answer["error"] == str(error)
            errors += 1
            continue
        line, numbers = timeline_of(draw.parse_arguments(words)), ("bubble", "makespan", "span", "peak")
        for name, value in [*((name, getattr(line, name)) for name in numbers), ("whole", line.step_bubble)]:
            assert answer[name] == pytest.approx(value, abs=1e-10), (words, name)
        assert float(shown["bubble"].removesuffix(" %")) == pytest.approx(100 * line.bubble, abs=0.0501)
        published = [note.rpartition(" = ")[2] for note in picture.notes if " = " in note]
        assert shown["formula"] == published, words
        formulas += len(published) == 2
    assert len(found["schedules"]) > 500 and errors > 50 and formulas > 100, (errors, formulas)


def check_layouts(found):
    """Compare each rank with `python -m accounts.traffic`, and the fullest with `python plan.py`, the command below."""
    for layout, answer in zip(LAYOUTS, found["layouts"], strict=True):
        options, c, _ = plan.parse(shlex.split(answer["command"])[2:])
        try:
            predicted = traffic.predict_step(c, options.gpus)
        except UserError as error:
            assert answer["wrong"] == answer["error"] == str(error)
            continue
        for rank, (shown, kept) in enumerate(zip(answer["ranks"], predicted.bytes_kept, strict=True)):
            kept = {what.removesuffix(" at their peak"): float(size) for what, size in kept.items()}
            assert {what: shown[what] for what in kept} == kept, (layout, rank)
        facts = search.facts_of(c, options.gpus, DEVICES[options.device], exact=False)
        expected = {what: size for what, size in facts["memory_bytes"].items() if size}
        assert {what: size for what, size in answer["parts"].items() if size} == expected, layout
        assert answer["rank"] == facts["fullest_rank"], layout
    assert sum("error" in answer for answer in found["layouts"]) == 3


@needs_browser
def test_the_numbers_are_the_projects(text, tmp_path):
    found = answers(text, tmp_path)
    check_schedules(found)
    check_layouts(found)
    moved = found["moved"]
    assert (moved["m"], moved["action"]) == (8, "a 10") and "action=a+10" in moved["address"]
    assert "Waits for" in moved["details"][0] and "A block keeps" in moved["details"][1]
    assert re.search("[ぁ-ん]", "".join(found["japanese"])) and not re.search("[ぁ-ん]", "".join(moved["heads"]))


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    "right, wrong, check",
    [
        ("Math.max(before, ...arrivals)", "Math.max(before, ...arrivals.slice(1))", check_schedules),
        ("comm * (e.rank != rank)", "comm", check_schedules),
        ("[e.end, -1]", "[e.end, 0]", check_schedules),
        ("c.zero >= D.states[part][1]", "c.zero > D.states[part][1]", check_layouts),
        ("c.mb * peak", "peak", check_layouts),
        ('look("shards", c) : 1', "c.dp : 1", check_layouts),
        ("stage = shards > 1 ? c.zero : 0", "stage = c.zero", check_layouts),
    ],
)
def test_a_wrong_page_is_found(text, tmp_path, right, wrong, check):
    assert right in text
    with pytest.raises(AssertionError):
        check(answers(text.replace(right, wrong), tmp_path))


def test_the_file_is_short_and_needs_no_network():
    lines = Path(page.__file__).with_suffix(".html").read_text("utf-8").splitlines()
    assert sum(map(bool, lines)) <= 470 and max(map(len, lines)) <= 120
    assert not re.search(r"(src|href)=\"?(https?:|//)|@import|fetch\(|url\(\"?http", "\n".join(lines))
