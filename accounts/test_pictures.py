"""Tests the pictures of plan.py: every mark has the place of its number (accounts/figures.py)."""

import itertools
import math
import re
from fractions import Fraction
from xml.etree import ElementTree

import pytest

from accounts import figures
from errors import UserError

GiB, TAG = 2**30, "{http://www.w3.org/2000/svg}"


def judged(pp=4, step=10.0, **fields):
    """Return a layout as `plan.py --json` prints it."""
    layout = dict(dp=2, tp=8, pp=pp, schedule="1f1b", chunks=1, zero=1, sequence_parallel=True, recompute="none")
    kept = [
        {"parameters": 4 * GiB, "a<b": 3 * GiB, "activations": Fraction((pp - rank) * GiB * 2)} for rank in range(pp)
    ]
    parts = {"compute": 0.6 * step, "bubble": 0.25 * step, "exposed dp": 0.15 * step}
    return dict(
        layout=layout | dict(micro_batch_size=4, offload=False) | fields,
        step_seconds=step,
        mfu=0.5,
        memory_by_rank=kept,
        capacity_bytes=12 * GiB,
        step_parts=parts,
    )


def drawn(tmp_path, *rows):
    figures.write(tmp_path / "x.svg", list(rows))
    return ElementTree.parse(tmp_path / "x.svg").getroot()


def texts(root):
    return [element.text for element in root.iter(f"{TAG}text")]


def boxes(root, pattern):
    """Return [(match of the hint, left, top, right, bottom, colour)] of the rectangles whose hint has the pattern."""
    found = []
    for rect in root.iter(f"{TAG}rect"):
        match = re.fullmatch(pattern, rect.findtext(f"{TAG}title") or "")
        if match:
            x, y, width, height = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
            found.append((match, x, y, x + width, y + height, rect.get("fill")))
    return found


def lines(root):
    """Return [(x1, y1, x2, y2, dashes)] of all straight lines."""
    paths = ((re.findall(r"-?[\d.]+", path.get("d")), path.get("stroke-dasharray")) for path in root.iter(f"{TAG}path"))
    return [(*map(float, numbers), dashes) for numbers, dashes in paths]


def legend(root):
    """Return {name: colour} of the legends: a rectangle without a hint, followed by its name."""
    pairs = itertools.pairwise(root.iter())
    return {b.text: a.get("fill") for a, b in pairs if a.tag == f"{TAG}rect" and b.tag == f"{TAG}text"}


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_memory_bars(tmp_path):
    """All bars have the same bytes per pixel, their parts are stacked, and the dashed line is the capacity."""
    root = drawn(tmp_path, judged(4), judged(8))
    found = boxes(root, r"rank (\d+), (.*): ([\d.]+) GiB")
    assert len(found) == 3 * (4 + 8)
    scale = {(bottom - top) / float(match[3]) for match, _, top, _, bottom, _ in found}
    assert max(scale) - min(scale) < 0.02
    pixels = sum(scale) / len(scale)
    capacity = {y for _, y, _, _, dashes in lines(root) if dashes}
    floor = max(bottom for *_, bottom, _ in found)
    assert len(capacity) == 1 and floor - capacity.pop() == pytest.approx(12 * pixels, abs=0.1)
    assert any("dashed: capacity, 12 GiB" in words for words in texts(root))
    for bar in (found[i : i + 3] for i in range(0, len(found), 3)):
        assert [match[2] for match, *_ in bar] == ["parameters", "a<b", "activations"]
        assert len({(left, right) for _, left, _, right, *_ in bar}) == 1 and bar[0][4] == floor
        assert all(low[2] == pytest.approx(high[4], abs=0.011) for low, high in itertools.pairwise(bar))
    sizes = [[float(match[3]) for match, *_ in found[i : i + 3]] for i in range(0, 12, 3)]
    assert sizes == [[4, 3, 8], [4, 3, 6], [4, 3, 4], [4, 3, 2]]


def test_bars_do_not_overlap(tmp_path):
    found = boxes(drawn(tmp_path, judged(64)), r"rank (\d+), parameters: .*")
    assert [int(match[1]) for match, *_ in found] == list(range(64))
    assert all(a[3] <= b[1] for a, b in itertools.pairwise(found))


def test_time_bars(tmp_path):
    """All bars and the axis have the same seconds per pixel. A part begins where the one before ends."""
    root = drawn(tmp_path, judged(step=10.0), judged(step=20.0))
    found = boxes(root, r"([a-z ]+): ([\d.]+) s")
    assert [(match[1], float(match[2])) for match, *_ in found] == [
        *(("compute", 6), ("bubble", 2.5), ("exposed dp", 1.5)),
        *(("compute", 12), ("bubble", 5), ("exposed dp", 3)),
    ]
    pixels = (found[3][3] - found[3][1]) / 12
    for match, left, _, right, *_ in found:
        assert (right - left) / float(match[2]) == pytest.approx(pixels, abs=0.02)
    for bar in (found[:3], found[3:]):
        assert all(a[3] == pytest.approx(b[1], abs=0.011) for a, b in itertools.pairwise(bar))
    ends = [found[2][3], found[5][3]]
    labels = [e for e in root.iter(f"{TAG}text") if e.text.endswith(" s, MFU 50.0%")]
    assert [e.text.split()[0] for e in labels] == ["10.00", "20.00"]
    assert [float(e.get("x")) for e in labels] == pytest.approx([end + 6 for end in ends], abs=0.1)
    axis = {e.text: float(e.get("x")) for e in root.iter(f"{TAG}text") if float(e.get("y")) > found[5][4]}
    assert axis["10"] == pytest.approx(ends[0], abs=0.1) and axis["20"] == pytest.approx(ends[1], abs=0.1)


def test_the_axis_of_memory(tmp_path):
    root = drawn(tmp_path, judged(8))
    (_, _, top, _, bottom, _), *_ = boxes(root, "rank 0, parameters: .*")
    memory = [
        (float(e.text), float(e.get("y")) - 4)
        for e in root.iter(f"{TAG}text")
        if e.get("text-anchor") == "end" and re.fullmatch(r"\d+", e.text)
    ]
    (zero, ground), *_, (most, ceiling) = memory
    assert zero == 0 and ground == pytest.approx(bottom, abs=0.1)
    assert (ground - ceiling) / most == pytest.approx((bottom - top) / 4, abs=0.02)
    (capacity,) = [line for line in lines(root) if line[4]]
    for _, left, top, right, *_ in boxes(root, "rank .*"):
        assert capacity[0] <= left and right <= capacity[2] and ceiling <= top


def test_the_legends_name_the_colours(tmp_path):
    root = drawn(tmp_path, judged())
    names = legend(root)
    assert list(names) == ["parameters", "a<b", "activations", "compute", "bubble", "exposed dp"]
    for pattern in (r"rank \d+, (.*): .* GiB", r"([a-z ]+): [\d.]+ s"):
        for match, *_, colour in boxes(root, pattern):
            assert names[match[1]] == colour
    assert len({names[name] for name in ("parameters", "a<b", "activations")}) == 3


def test_a_layout_is_named_by_its_fields(tmp_path):
    words = " ".join(texts(drawn(tmp_path, judged(pp=2, schedule="interleaved", chunks=3, recompute="full"))))
    assert "dp=2 tp=8 pp=2 interleaved, 3 chunks, micro-batch 4, ZeRO 1, sequence parallel, recompute full" in words
    words = " ".join(texts(drawn(tmp_path, judged(zero=3, sequence_parallel=False, offload=True))))
    assert "dp=2 tp=8 pp=4 1f1b, micro-batch 4, ZeRO 3, offload" in words and "recompute" not in words


def test_long_names_and_many_parts_have_room(tmp_path):
    row = judged(schedule="interleaved", chunks=12, dp=1024, zero=2, recompute="full", offload=True)
    root = drawn(tmp_path, *[row | {"step_parts": {f"a part of the step {i}": 1.0 for i in range(10)}}] * 6)
    for e in root.iter(f"{TAG}text"):
        if e.get("text-anchor") == "start":  # a letter is about half as wide as the font is high
            right = float(e.get("x")) + 0.5 * float(e.get("font-size")) * len(e.text)
            others = [float(o.get("x")) for o in root.iter(f"{TAG}text") if o.get("y") == e.get("y")]
            assert right <= min((x for x in others if x > float(e.get("x"))), default=900), e.text


def test_only_the_best_six_are_drawn(tmp_path):
    root = drawn(tmp_path, *(judged(step=10.0 + i) for i in range(9)))
    assert [words.split()[0] for words in texts(root) if " s, MFU " in words] == [f"{10 + i}.00" for i in range(6)]
    assert len(boxes(root, r"rank 0, parameters: .*")) == 6
    bottom = float(root.get("viewBox").split()[3])
    assert all(0 <= float(e.get("y")) <= bottom and 0 <= float(e.get("x")) <= 900 for e in root.iter(f"{TAG}text"))


def test_an_unknown_mfu(tmp_path):
    assert "10.00 s, MFU unknown" in texts(drawn(tmp_path, judged() | {"mfu": None}))


def test_the_bytes_of_a_picture_repeat(tmp_path):
    for name in ("a.svg", "b.svg"):
        figures.write(tmp_path / name, [judged(), judged(8)])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match=r"^--svg=.*nowhere/x.svg: No such file or directory$"):
        figures.write(tmp_path / "nowhere" / "x.svg", [judged()])
    with pytest.raises(UserError, match=r"^--svg=x.svg: there is no layout to draw$"):
        figures.write("x.svg", [])


# --- predicted beside published ---------------------------------------------------------------------------------------

POINTS = [
    ("exact", "first", 1.0, 1.0),
    ("a<b", "second", 4.0, 4.4),
    ("low", "first", 20.0, 18.0),
    ("far", "second", 50.0, 100.0),
]


def scattered(tmp_path, points):
    figures.scatter(tmp_path / "x.svg", points)
    return ElementTree.parse(tmp_path / "x.svg").getroot()


def circles(root):
    """Return {name: (x, y, colour)} of the points."""
    found = {}
    for circle in root.iter(f"{TAG}circle"):
        name = re.fullmatch(r"\d+: (.*): published [\d.]+ s, predicted [\d.]+ s", circle.findtext(f"{TAG}title"))[1]
        found[name] = float(circle.get("cx")), float(circle.get("cy")), circle.get("fill")
    return found


def frame(root):
    rect = next(e for e in root.iter(f"{TAG}rect") if e.get("fill") == "none")
    left, top, width, height = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
    return left, top, left + width, top + height


def distance(x, y, line):
    """Return the distance of a point from a straight line, in pixels."""
    x1, y1, x2, y2, _ = line
    return abs((x2 - x1) * (y1 - y) - (x1 - x) * (y2 - y1)) / math.hypot(x2 - x1, y2 - y1)


def test_points_lie_where_their_times_are(tmp_path):
    """The exact point is on the solid line, errors of 10% are on the dashed lines, and the axes are logarithmic."""
    root = scattered(tmp_path, POINTS)
    left, top, right, bottom = frame(root)
    spots = circles(root)
    steep = [line for line in lines(root) if abs(line[2] - line[0]) > 300 and abs(line[3] - line[1]) > 300]
    (solid,) = [line for line in steep if not line[4]]
    dashed = [line for line in steep if line[4]]
    assert len(dashed) == 2 and solid[:4] == (left, bottom, right, top)
    assert distance(*spots["exact"][:2], solid) < 0.02
    for name, other in (("a<b", "low"), ("low", "a<b")):
        near = [line for line in dashed if distance(*spots[name][:2], line) < 0.02]
        assert len(near) == 1 and distance(*spots[other][:2], near[0]) > 5
    per_factor = (spots["far"][0] - spots["exact"][0]) / math.log(50)
    assert spots["low"][0] - spots["exact"][0] == pytest.approx(per_factor * math.log(20), abs=0.02)
    assert spots["exact"][1] - spots["far"][1] == pytest.approx(per_factor * math.log(100), abs=0.02)
    ticks = {e.text: float(e.get("x")) for e in root.iter(f"{TAG}text") if float(e.get("y")) == bottom + 16}
    assert ticks["1"] == pytest.approx(spots["exact"][0], abs=0.1)
    assert ticks["50"] == pytest.approx(spots["far"][0], abs=0.1)
    heights = {e.text: float(e.get("y")) - 4 for e in root.iter(f"{TAG}text") if float(e.get("x")) == left - 6}
    assert heights["100"] == pytest.approx(spots["far"][1], abs=0.1)


def test_all_points_are_listed_by_group(tmp_path):
    root = scattered(tmp_path, POINTS)
    words = texts(root)
    first = words.index("first")
    assert words[first:] == [
        *("first", "1.000", "1.000", "+0.0%", "1", "exact", "20.00", "18.00", "-10.0%", "2", "low"),
        *("second", "4.000", "4.400", "+10.0%", "3", "a<b", "50.00", "100.0", "+100.0%", "4", "far"),
    ]
    colours, groups = circles(root), legend(root)
    assert colours["exact"][2] == colours["low"][2] == groups["first"]
    assert colours["a<b"][2] == colours["far"][2] == groups["second"] != groups["first"]


@pytest.mark.parametrize("spread", [1.0, 1.02, 1.5])
def test_numbers_do_not_overlap(tmp_path, spread):
    """Forty points lie on or near the solid line, eight of them at one spot."""
    points = [(f"p{i}", "all", 10.0 * 1.12**i, 10.0 * 1.12**i * spread ** (-1) ** i) for i in range(32)]
    points += [(f"q{i}", "all", 10.0, 10.0) for i in range(8)]
    root = scattered(tmp_path, points)
    left, top, right, bottom = frame(root)
    numbers = {}
    for e in root.iter(f"{TAG}text"):
        if e.get("text-anchor") == "middle" and e.text.isdigit() and float(e.get("y")) < bottom:
            numbers[int(e.text)] = float(e.get("x")), float(e.get("y")) - 4
    assert sorted(numbers) == list(range(1, 41))
    assert all(left < x < right and top < y < bottom for x, y in numbers.values())
    for a, b in itertools.combinations(numbers.values(), 2):
        assert abs(a[0] - b[0]) > 12 or abs(a[1] - b[1]) > 9, (a, b)
    for x, y, _ in circles(root).values():
        assert all(abs(x - a) > 9 or abs(y - b) > 8 for a, b in numbers.values())
    ends = [line[:4] for line in lines(root) if line[:2] in {spot[:2] for spot in circles(root).values()}]
    for name, number in ((f"p{i}", i + 1) for i in range(32)):
        x, y, _ = circles(root)[name]
        nearest = [math.dist(end[2:], numbers[number]) for end in ends if math.dist(end[:2], (x, y)) < 0.02]
        assert min(nearest) < 9.1  # a line leads from each point to its number


def test_one_point_and_a_file_that_cannot_be_written(tmp_path):
    assert len(circles(scattered(tmp_path, POINTS[:1]))) == 1
    with pytest.raises(UserError, match="No such file"):
        figures.scatter(tmp_path / "nowhere" / "x.svg", POINTS)
