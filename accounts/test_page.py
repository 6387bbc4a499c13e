"""The page in a real browser shows the numbers of the project's functions. Skipped without Chromium."""

import html
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import config
import plan
from accounts import draw, ledger, page, search, traffic
from accounts.devices import DEVICES
from errors import UserError

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CACHED = Path.home().glob(".cache/ms-playwright/chromium*/*/*shell")  # playwright install chromium
BROWSER = next((path for path in [*map(shutil.which, NAMES), *CACHED] if path), None)
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs Chromium (apt install chromium-headless-shell)")
FEW = dict(stages=(2, 4), microbatches=(3, 4, 8), chunks=(2, 3), cost=("1,1,1", "2,1,1"), dp=(1, 4), tp=(1, 2))
FEW |= dict(model=("gpt3_1b3", "gpt3_13b"), pp=(1, 2, 4), m=(6, 8, 32), micro_batch_size=(1, 2))
ADDRESSES = [  # of the first view
    f"lang=en&a={name}&b=&stages={p}&microbatches={m}&chunks={v}&cost={cost}&comm={comm}"
    for name in page.NAMES
    for p, m, v, cost, comm in [(2, 4, 2, "1,1,1", 0), (4, 3, 3, "2,1,1", 0.5), (4, 8, 3, "1,1,1", 0)]
]
LAYOUTS = [  # of the second view
    "dp=4&tp=2&pp=2&zero=1&sequence_parallel=true&micro_batch_size=2&schedule=zb-h1&vary=m",
    "dp=4&tp=2&pp=4&zero=3&recompute=full&micro_batch_size=2&schedule=gpipe&vary=tp",
    "dp=4&pp=4&zero=2&schedule=zb-v&vary=schedule",
    "dp=4&pp=4&zero=1&schedule=chimera&model=gpt3_1b3&m=32&vary=micro_batch_size",
    "dp=1&pp=4&zero=3&schedule=interleaved&vary=recompute",
    "dp=4&pp=4&schedule=interleaved&m=6&vary=dp",  # refused
]
SCRIPT = """
addEventListener("load", () => setTimeout(async () => {
  const answers = [], moment = () => new Promise(done => setTimeout(done, 0));
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  let overlaps = 0;  // of labels
  const count = rects => rects.filter((a, i) => rects.some((b, j) => j < i && a.left < b.right && b.left < a.right &&
    a.top < b.bottom && b.top < a.bottom)).length;
  const columns = ([titles = [], ...rows]) => Object.fromEntries(titles.map((title, i) => [title,
    rows.filter(row => row[i] != "-").map(row => [...row.slice(0, 4), row[i]].join("; "))]));  // of each bar
  const shown = view => (overlaps += count(all("svg text").map(e => e.getBoundingClientRect())), {
    command: document.querySelector(`#${view} .command`).textContent,
    wrong: all(`#${view} .wrong`).map(e => e.textContent),
    rows: all(`#${view} svg > *`).map(e => e.tagName == "text" ? e.textContent : e.dataset.about ?? ""),
    notes: all(`#${view} .pictures code`).map(e => e.textContent),
    sent: columns(all(`#${view} tr`).map(tr => [...tr.children].map(e => e.textContent))),
  });
  for (const [view, address] of ADDRESSES) {
    location.hash = address;
    dispatchEvent(new Event("hashchange"));
    answers.push(shown(view));
  }
  const ask = (selector, event) => document.querySelector(selector).dispatchEvent(event);
  const click = selector => ask(selector, new MouseEvent("click", {bubbles: true}));
  location.hash = "lang=en&b=&microbatches=4&dp=4";
  dispatchEvent(new Event("hashchange"));
  const slider = document.querySelector("input[data-id=microbatches]");
  slider.value = 0;
  ask("input[data-id=microbatches]", new Event("input", {bubbles: true}));
  const moved = {schedules: shown("schedules"), address: location.hash};
  const grey = all("[data-id]:disabled").map(e => e.dataset.id);
  click('[data-try="memory 4"]');
  click("#schedules .box");
  const picked = shown("memory");
  ask("#memory .box", new KeyboardEvent("keydown", {key: "Enter", bubbles: true}));
  const details = all(".detail").map(e => e.textContent), heads = all("h2").map(e => e.textContent);
  click("#language");
  const japanese = all("h2, .detail, .legend").map(e => e.textContent);
  document.body.textContent = "ANSWER" + JSON.stringify({
    answers, overlaps, grey, moved, picked, details, heads, japanese}) + "END";
}, 1000));
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a page with fewer choices than usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "CHOICES", page.CHOICES | FEW)
        patch.setattr("sys.stderr", said := io.StringIO())
        page.main([f"--out={(path := tmp_path_factory.mktemp('page') / 'page.html')}"])
        assert said.getvalue() == "This takes about a minute.\n"  # and no bar
        return path.read_text("utf-8")


def shown(text, folder):
    """Return what the browser shows."""
    addresses = [("schedules", a) for a in ADDRESSES] + [("memory", f"lang=en&{a}") for a in LAYOUTS]
    script = SCRIPT.replace("of ADDRESSES", f"of {json.dumps(addresses)}")
    (folder / "page.html").write_text(text.replace("</html>", f"<script>{script}</script>"), "utf-8")
    options = "--headless --no-sandbox --disable-gpu --virtual-time-budget=20000 --dump-dom".split()
    command = [BROWSER, *options, "--window-size=390,800", f"file://{folder}/page.html"]
    browser = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search("ANSWER(.*)END", browser.stdout, re.DOTALL)
    assert found, browser.stdout[-2000:] + browser.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


def check_pictures(answer):
    """Compare a view of schedules with `python -m accounts.draw`: the command below it."""
    options = draw.parse_arguments(shlex.split(answer["command"])[3:])
    try:
        (picture,) = draw.pictures_of(options)
    except UserError as error:
        assert answer["wrong"] == [str(error)]
        return False
    assert answer["notes"] == picture.notes
    expected = []
    for label, boxes, _ in picture.rows:
        about = [f"{label}: {box.text}, {box.start:.4f} - {box.end:.4f}" for box in boxes]
        expected += [label, "", *[re.sub(r"\.?0+(?= |$)", "", words) for words in about]]
    assert answer["rows"] == expected
    return True


def check_bars(answer, address):
    """Compare the bar of the layout with `python plan.py`: the command below it."""
    vary = address.rpartition("=")[2]
    options, c, _ = plan.parse(shlex.split(answer["command"])[2:])
    try:
        config.check(c, options.gpus)
        facts = search.facts_of(c, options.gpus, DEVICES[options.device], exact=False)
    except UserError as error:
        assert str(error) in answer["wrong"]
        return False
    values = vars(c) | dict(dp=facts["layout"]["dp"], m=facts["micro_batches"])
    stage = f": stage {facts['fullest_rank']}" * (c.pp > 1)
    first = answer["rows"].index(f"{vary} {values[vary]}{stage}") + 2
    expected = []
    for part in page.KINDS:
        if size := facts["memory_bytes"].get(part, 0):
            expected.append(f"{page.KINDS[part][0]}, stage {facts['fullest_rank']}: {size:,} bytes")
    assert answer["rows"][first : first + len(expected)] == expected
    assert f"{sum(facts['memory_bytes'].values()) / 1e9:.1f}" in answer["rows"][first - 1]
    layout, _, sent, _ = traffic.predict_step(c, options.gpus)
    per, sent = ledger.how_often(layout), sent[facts["fullest_rank"]].items()
    expected = {"; ".join([*row, ", ".join(per[row]), f"{int(n):,}"]) for row, (_, n) in sent}
    assert {*answer["sent"][answer["rows"][first - 2]]} == expected
    return True


@needs_browser
def test_the_numbers_are_the_projects(text, tmp_path):
    found = shown(text, tmp_path)
    pictures, bars = found["answers"][: len(ADDRESSES)], found["answers"][len(ADDRESSES) :]
    assert {check_pictures(answer) for answer in pictures} == {True, False}
    assert [check_bars(*pair) for pair in zip(bars, LAYOUTS, strict=True)] == [True] * 5 + [False]
    assert "microbatches=3" in found["moved"]["address"] and check_pictures(found["moved"]["schedules"])
    assert check_bars(found["picked"], "vary=recompute")
    assert found["overlaps"] == 0 and found["grey"] == ["chunks", "zero", "sequence_parallel"]
    first_box = next(row for row in found["picked"]["rows"] if "bytes" in row)
    assert found["details"] == ["rank 0: F0, 0 - 1", first_box]
    assert not re.search("[ぁ-ん]", "".join(found["heads"])) and re.search("[ぁ-ん]", "".join(found["japanese"]))


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    "right, wrong",
    [("i * choices[n].length", "i"), ("at += n, GB(n)", "at + n, GB(n)"), ("Math.max(...totals)", "totals[0]")],
)
def test_a_wrong_page_is_found(text, tmp_path, right, wrong):
    assert right in text
    with pytest.raises((AssertionError, ValueError)):
        test_the_numbers_are_the_projects(text.replace(right, wrong), tmp_path)


def test_the_file_is_short_and_needs_no_network():
    written = Path(page.__file__).with_suffix(".html").read_text("utf-8")
    assert len(written.encode()) <= 16_000
    assert not re.search(r"(src|href)=\"?(https?:|//)|@import|fetch\(|url\(\"?http", written)
