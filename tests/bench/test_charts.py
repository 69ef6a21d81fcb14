"""Charts are drawings that hold together: well-formed, inside their frame, their words apart."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bench import charts, svg, timeline_charts
from paceline.bench.charts import Panel, Point, Series, spread_out
from paceline.bench.figures import figures
from paceline.bench.png import sheet, wrapped, write_pngs
from paceline.bench.svg import Axis, Scale
from paceline.bench.timeline_charts import Layer, Span
from tests.bench.synthetic import two

SVG = "{http://www.w3.org/2000/svg}"
VALUES = st.lists(st.floats(1e-6, 1e6), max_size=30)
LOG = Axis("seconds", svg.seconds, True)
PLAIN = Axis("tokens/s")
CLIENTS = Axis("clients", is_log=True, ticks=(4.0, 16.0))


def drawn(panel: Panel) -> ElementTree.Element:
    """Parsed, which fails on what is no XML; every colour known, every number finite."""
    markup = panel.markup()
    assert "nan" not in markup.lower() and "inf" not in re.sub(r"<title>.*?</title>", "", markup)
    root = ElementTree.fromstring(svg.resolved(markup, svg.DARK))
    assert "var(" not in ElementTree.tostring(root, encoding="unicode")
    return root


def words(root: ElementTree.Element) -> list[tuple[float, float, float, str]]:
    """Left, right and base line of each text, by the widths that the layout counts on."""
    found = []
    for one in root.iter(f"{SVG}text"):
        said, x = one.text or "", float(one.get("x", "nan"))
        width = svg.text_width(said, float(one.get("font-size", "nan")))
        left = {None: x, "middle": x - width / 2, "end": x - width}[one.get("text-anchor")]
        found.append((left, left + width, float(one.get("y", "nan")), said))
    return found


def assert_words_keep_apart(panel: Panel) -> None:
    placed = words(drawn(panel))
    for index, (left, right, base, said) in enumerate(placed):
        assert left >= -1 and right <= panel.width + 1 and 0 <= base <= panel.height, f"{said!r} leaves the panel"
        for other_left, other_right, other_base, other in placed[index + 1:]:
            is_apart = right <= other_left + 0.5 or other_right <= left + 0.5 or abs(base - other_base) >= 9
            assert is_apart, f"{said!r} and {other!r} touch"


def several(values: list[float] | tuple[float, ...]) -> list[Series]:
    return [Series(name, place, (Point(4.0, *values[:1] or (1.0,)), Point(16.0, *values[-1:] or (2.0,))), tuple(values))
            for place, name in enumerate(("static", "dynamic", "tgi", "vllm", "paceline"))]


# --- scales

@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e6), st.booleans())
def test_ticks_are_round_rising_and_inside(low: float, factor: float, is_log: bool) -> None:
    scale = Scale(low, low * factor, 0.0, 100.0, is_log)
    ticks = scale.ticks()
    assert ticks and all(one < other for one, other in pairwise(ticks))
    assert all(low * (1 - 1e-9) <= tick <= low * factor * (1 + 1e-9) for tick in ticks)


@settings(deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, unique=True), st.booleans())
def test_more_is_further_along_the_axis(values: list[float], is_log: bool) -> None:
    scale = Scale(min(values), max(values), 0.0, 100.0, is_log)
    placed = [scale(value) for value in sorted(values)]
    assert all(one <= other for one, other in pairwise(placed)) and placed[0] == 0.0 and placed[-1] == 100.0


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 200.0), max_size=10))
def test_labels_are_moved_apart_and_keep_their_order(wanted: list[float]) -> None:
    placed = spread_out(wanted, 14.0, 0.0, 200.0)
    for (_, one), (_, other) in pairwise(sorted(zip(wanted, placed, strict=True))):
        assert other - one >= 14.0 - 1e-9


@pytest.mark.parametrize(("value", "said"), [
    (0.0, "0"), (12e-6, "12 µs"), (0.00123, "1.23 ms"), (0.9996, "1 s"), (0.0421, "42.1 ms"), (75.0, "75 s"),
    (1234.5, "1,234 s")])
def test_seconds_are_said_with_three_figures(value: float, said: str) -> None:
    assert svg.seconds(value) == said


# --- every chart with whatever values there are

@settings(deadline=None)
@given(VALUES)
def test_distributions_of_any_values_can_be_drawn(values: list[float]) -> None:
    drawn(charts.cumulative("title", several(values), LOG))
    assert_words_keep_apart(charts.ridges("title", several(values), LOG))


@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_figures_against_load_can_be_drawn_whatever_they_are(low: float, high: float) -> None:
    for axis in (LOG, PLAIN):
        assert_words_keep_apart(charts.lines("title", several((low, high)), CLIENTS, axis))
    assert_words_keep_apart(charts.bars("title", several((low, high)), PLAIN))


@settings(deadline=None)
@given(st.floats(0.05, 50.0), st.floats(1.0, 3.0))
def test_ratios_stand_beside_their_intervals(ratio: float, width: float) -> None:
    one = Series("paceline", 4, (Point(0.0, ratio, ratio / width, ratio * width),))
    groups = [("16 clients", [one]), ("4 clients", [Series("none", 0)])]
    panel = charts.ratios("title", groups, Axis("multiple", svg.times))
    assert_words_keep_apart(panel)
    assert f"{svg.times(ratio)}  ({svg.times(ratio / width)} to {svg.times(ratio * width)})" in panel.inner
    assert "not measured" in panel.inner


def test_the_strip_of_a_slot_is_as_long_as_the_request_held_it() -> None:
    spans = [Span(0, 0.0, 1.0, "prefill", 0), Span(0, 1.0, 4.0, "decode", 0), Span(1, 2.0, 4.0, "decode", 1)]
    root = drawn(timeline_charts.gantt("title", 0, spans, 2, 8.0))
    _, prefill, decode, other = [float(one.get("width", "nan")) for one in root.iter(f"{SVG}rect")]
    assert decode / prefill == pytest.approx(3, rel=0.02) and decode / other == pytest.approx(1.5, rel=0.02)
    assert "37.5% of the slot time busy" in root[0].text    # type: ignore[operator]


def test_layers_of_memory_lie_on_each_other() -> None:
    layers = [Layer("tokens", "#000", 1.0, (0.25, 0.5)), Layer("empty", "#111", 1.0, (0.25, 0.5))]
    root = drawn(timeline_charts.stacked("title", layers, (0.0, 1.0), 2.0, Axis("share", svg.percent, high=1.0)))
    lower, upper = [one.get("d", "") for one in root.iter(f"{SVG}path")]
    top_of_lower = re.findall(r"([\d.]+) ([\d.]+)", lower)[0]
    assert top_of_lower in re.findall(r"([\d.]+) ([\d.]+)", upper), "the second begins where the first ends"


def test_contestants_differ_in_colour_and_in_marker() -> None:
    assert len({svg.contestant_colour(place) for place in range(svg.NUM_COLOURS)}) == svg.NUM_COLOURS
    shapes = {re.sub(r'style="[^"]*"', "", svg.marker(0, 0, place)) for place in range(svg.NUM_COLOURS - 1)}
    assert len(shapes) == svg.NUM_COLOURS - 1
    assert svg.LIGHT.keys() == svg.DARK.keys()


@pytest.mark.parametrize("palette", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_words_stand_out_from_the_card(palette: dict[str, str]) -> None:
    """The contrast that WCAG asks of large text and of graphics, 3; of running text, 4.5."""
    for name, least in {"ink": 4.5, "soft": 4.5, "faint": 3.0, "alarm": 3.0,
                        **{f"c{place}": 3.0 for place in range(svg.NUM_COLOURS)}}.items():
        assert contrast(palette[name], palette["card"]) >= least, name


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[place:place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# --- figures, and pictures of them

def test_every_figure_becomes_one_sheet() -> None:
    drawn_figures = list(figures(two()))
    names = {figure.name for figure in drawn_figures}
    assert names >= {"ratios", "throughput", "latency_against_load", "latency_cumulative"}
    for figure in drawn_figures:
        root = ElementTree.fromstring(svg.resolved(sheet(figure), svg.LIGHT))
        assert figure.caption and figure.title in [one.text for one in root.iter(f"{SVG}text")]


def test_pictures_are_pngs_with_words(tmp_path) -> None:
    resvg = pytest.importorskip("resvg_py", reason="resvg-py draws the pictures")
    (figure, *_) = figures(two())
    assert write_pngs([figure], tmp_path) is None
    picture = (tmp_path / "ratios.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    silent = re.sub(r"<text.*?</text>", "", svg.resolved(sheet(figure), svg.LIGHT))
    assert len(picture) > 1.2 * len(resvg.svg_to_bytes(svg_string=silent, zoom=2.0, background="#ffffff"))


def test_without_a_renderer_the_command_that_brings_it_is_told(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    told = write_pngs(list(figures(two())), tmp_path / "charts")
    assert told is not None and "pip install 'paceline[bench]'" in told and not (tmp_path / "charts").exists()


@settings(deadline=None)
@given(st.text("ab ", max_size=200), st.floats(30.0, 300.0))
def test_wrapped_lines_lose_no_word(said: str, width: float) -> None:
    assert " ".join(wrapped(said, width, 11.5)).split() == said.split()
