"""Charts of distributions and of figures against load: lines with bands, cumulative curves, ridges, bars, ratios.

Each makes a Panel: one drawing of a fixed size in SVG that a page scales, with words for those who cannot see it.
Labels stand at what they name; nothing here knows what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10

import numpy as np

from . import svg
from .svg import Axis, Scale, contestant_colour, tag, text, text_width

WIDTH, HEIGHT = 380.0, 250.0
TOP, BOTTOM = 14.0, 38.0


@dataclass(frozen=True, slots=True)
class Panel:
    """inner: SVG without its outer element. description: the chart in a sentence, for readers of screens."""

    title: str
    description: str
    inner: str
    width: float = WIDTH
    height: float = HEIGHT

    def markup(self, **attributes: str | float | None) -> str:
        size = {"viewBox": f"0 0 {svg.number(self.width)} {svg.number(self.height)}", "font_family": svg.FONT}
        return tag("svg", tag("title", svg.escape(f"{self.title}. {self.description}")), self.inner,
                   xmlns="http://www.w3.org/2000/svg", role="img", **(size | attributes))


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    low: float | None = None     # the interval's ends, where there is one
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """One contestant in one chart."""

    label: str
    place: int                   # its colour and marker
    points: tuple[Point, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """The plotted area of a panel and the scales of its sides."""

    x: Scale
    y: Scale

    def grid(self, x_axis: Axis, y_axis: Axis) -> str:
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        parts = []
        for value in y_axis.ticks or self.y.ticks():
            y = self.y(value)
            parts += [svg.line(left, y, right, y, "rule" if y == bottom else "grid"),
                      text(left - 7, y + 4, y_axis.words(value), anchor="end")]
        parts.append(svg.line(left, bottom, right, bottom, "rule"))
        parts += x_ticks(self.x, x_axis, bottom, top)
        return "".join(parts)


def x_ticks(scale: Scale, axis: Axis, bottom: float, top: float | None = None) -> list[str]:
    """Ticks with their words, left out where they would touch or leave the panel, and the axis's title under them."""
    parts: list[str] = []
    free_from = -1e9
    most = max(2, int((scale.end - scale.start) / 52))
    for value in axis.ticks or scale.ticks(most):
        x, words = scale(value), axis.words(value)
        half = text_width(words) / 2
        if x - half < free_from or x + half > scale.end + 14:
            continue
        free_from = x + half + 6
        parts += [svg.line(x, bottom if top is None else top, x, bottom + 4, "rule" if top is None else "grid"),
                  text(x, bottom + 17, words, anchor="middle")]
    parts.append(text((scale.start + scale.end) / 2, bottom + 33, axis.title, anchor="middle", fill="faint"))
    return parts


def left_margin(axis: Axis, scale: Scale) -> float:
    return 10 + max(text_width(axis.words(value)) for value in axis.ticks or scale.ticks())


def _widest_label(series: Sequence[Series]) -> float:
    return max((text_width(one.label, is_bold=True) for one in series), default=0)


# --- figures against load

def lines(title: str, series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> Panel:
    """A line a contestant, its interval a band, its name at its end."""
    points = [point for one in series for point in one.points]
    ys = [y for point in points for y in (point.y, point.low, point.high) if y is not None]
    bottom = HEIGHT - BOTTOM
    y = y_axis.scale(ys, bottom, TOP + 14)
    right = WIDTH - 14 - _widest_label(series)
    x = x_axis.scale([point.x for point in points], left_margin(y_axis, y), right)
    frame = Frame(Scale(x.low, x.high, x.start + 8, x.end - 8, x.is_log), y)
    parts = [text(4, TOP - 2, "logarithmic scale", fill="faint")] if y_axis.is_log else []
    parts.append(Frame(x, y).grid(_on(x_axis, frame.x, x), y_axis))
    parts += [_band(one, frame) for one in series]
    parts += [svg.path([(frame.x(p.x), frame.y(p.y)) for p in one.points], stroke=contestant_colour(one.place))
              for one in series if len(one.points) > 1]
    parts += [_whiskers(one, frame) for one in series]
    parts += [svg.marker(frame.x(p.x), frame.y(p.y), one.place,
                         f"{one.label}: {y_axis.words(p.y)} at {x_axis.words(p.x)}")
              for one in series for p in one.points]
    parts.append(_end_labels(series, frame, bottom))
    return Panel(title, f"{y_axis.title} against {x_axis.title}; {_ends_in_words(series, x_axis, y_axis)}",
                 "".join(parts))


def _on(axis: Axis, inner: Scale, outer: Scale) -> Axis:
    """The axis with its ticks where the inner scale has them: points keep off the frame's sides."""
    shown = axis.ticks or tuple(inner.ticks())
    span = outer.end - outer.start
    shares = [(inner(value) - outer.start) / span for value in shown]
    if outer.is_log:
        low, high = log10(outer.low), log10(outer.high)
        moved = tuple(10 ** (low + share * (high - low)) for share in shares)
    else:
        moved = tuple(outer.low + share * (outer.high - outer.low) for share in shares)
    words = dict(zip(moved, (axis.words(value) for value in shown), strict=True))
    return Axis(axis.title, lambda value: words[value], axis.is_log, moved)


def _band(one: Series, frame: Frame) -> str:
    known = [p for p in one.points if p.low is not None and p.high is not None]
    if len(known) < 2:
        return ""
    upper = [(frame.x(p.x), frame.y(p.high)) for p in known if p.high is not None]
    lower = [(frame.x(p.x), frame.y(p.low)) for p in reversed(known) if p.low is not None]
    return svg.area(upper + lower, fill=contestant_colour(one.place), fill_opacity=0.1)


def _whiskers(one: Series, frame: Frame) -> str:
    shade = contestant_colour(one.place)
    return "".join(svg.line(frame.x(p.x), frame.y(p.low), frame.x(p.x), frame.y(p.high), shade, stroke_width=1.4)
                   for p in one.points if p.low is not None and p.high is not None)


def _end_labels(series: Sequence[Series], frame: Frame, bottom: float) -> str:
    """Names at the lines' right ends, moved apart where they would touch, with a leader where one had to move."""
    ends = [(frame.y(one.points[-1].y), one) for one in series if one.points]
    places = spread_out([y for y, _ in ends], 14.0, TOP + 10, bottom)
    parts = []
    for (y, one), place in zip(ends, places, strict=True):
        x = frame.x(one.points[-1].x)
        if abs(place - y) > 3:
            parts.append(svg.line(x + 6, y, frame.x.end + 13, place, contestant_colour(one.place), stroke_width=0.8))
        parts.append(text(frame.x.end + 16, place + 4, one.label, fill=contestant_colour(one.place), font_weight=600))
    return "".join(parts)


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least gap apart, between low and high where they fit."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed: list[float] = []
    for index in order:
        placed.append(max(wanted[index], placed[-1] + gap if placed else low))
    for back in range(len(placed) - 1, -1, -1):
        limit = high if back == len(placed) - 1 else placed[back + 1] - gap
        placed[back] = min(placed[back], limit)
    found = dict(zip(order, placed, strict=True))
    return [found[index] for index in range(len(wanted))]


def _ends_in_words(series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    return ", ".join(f"{one.label} {y_axis.words(one.points[-1].y)} at {x_axis.words(one.points[-1].x)}"
                     for one in series if one.points)


# --- distributions

def cumulative(title: str, series: Sequence[Series], x_axis: Axis) -> Panel:
    """The share of requests that took at most so long. A curve a contestant; names come with the figure's legend."""
    y_axis = Axis("share of requests", svg.percent, ticks=(0, 0.25, 0.5, 0.75, 1.0), high=1.0)
    frame = _plain_frame(series, x_axis, y_axis)
    parts = [text(4, TOP - 2, "share of requests at or below", fill="faint"), frame.grid(x_axis, y_axis)]
    for one in series:
        ordered = sorted(one.values)
        track: list[tuple[float, float]] = []
        for index, value in enumerate(ordered):
            x = frame.x(value)
            track += [(x, frame.y(index / len(ordered))), (x, frame.y((index + 1) / len(ordered)))]
        if track:
            track.append((frame.x.end, frame.y(1.0)))
            parts.append(svg.path(track, stroke=contestant_colour(one.place), width=1.8))
    medians = ", ".join(f"{one.label} {x_axis.words(float(np.median(one.values)))}" for one in series if one.values)
    return Panel(title, f"Cumulative share of requests by {x_axis.title}; medians: {medians}", "".join(parts))


def _plain_frame(series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> Frame:
    y = y_axis.scale([1.0], HEIGHT - BOTTOM, TOP + 14)
    values = [value for one in series for value in one.values]
    return Frame(x_axis.scale(values, left_margin(y_axis, y), WIDTH - 16), y)


def ridges(title: str, series: Sequence[Series], x_axis: Axis, num_bins: int = 40) -> Panel:
    """A histogram a contestant on one axis, its median and 99th percentile marked. Bins are equal on the axis shown."""
    row = 50.0
    height = 18 + row * len(series) + BOTTOM
    left = 14 + _widest_label(series)
    x = x_axis.scale([value for one in series for value in one.values], left, WIDTH - 16)
    bottom = height - BOTTOM
    parts = x_ticks(x, x_axis, bottom, 16)
    for index, one in enumerate(series):
        parts.append(_ridge(one, x, 18 + row * (index + 1) - 4, row - 20, (num_bins, x_axis.words)))
    said = "; ".join(f"{one.label}: median {x_axis.words(float(np.median(one.values)))}, 99th percentile "
                     f"{x_axis.words(float(np.percentile(one.values, 99)))}" for one in series if one.values)
    return Panel(title, f"Histograms of {x_axis.title}. {said}", "".join(parts), WIDTH, height)


def _ridge(one: Series, x: Scale, base: float, height: float, shown: tuple[int, Callable[[float], str]]) -> str:
    num_bins, words = shown
    shade = contestant_colour(one.place)
    parts = [svg.line(x.start, base, x.end, base, "rule"),
             text(x.start - 8, base - 3, one.label, anchor="end", fill=shade, font_weight=600)]
    if not one.values:
        return "".join([*parts, text(x.start + 6, base - 5, "nothing measured", fill="faint")])
    counts, edges = np.histogram([x(value) for value in one.values], bins=num_bins, range=(x.start, x.end))
    most = max(int(counts.max()), 1)
    for count, edge in zip(counts.tolist(), edges.tolist(), strict=False):
        if count:
            tall = height * count / most
            parts.append(svg.rect(edge + 0.4, base - tall, (x.end - x.start) / num_bins - 0.8, tall, fill=shade,
                                  fill_opacity=0.45))
    marks = [(f"p{percent} {words(value)}", x(value)) for percent in (50, 99)
             for value in (float(np.percentile(one.values, percent)),)]
    parts += [svg.line(at, base - height - 3, at, base, shade, stroke_width=1.4) for _, at in marks]
    parts += [text(start, base - height - 5, said, font_size=10) for start, (said, _) in
              zip(_mark_starts(marks, x), marks, strict=True)]
    return "".join(parts)


def _mark_starts(marks: Sequence[tuple[str, float]], x: Scale) -> tuple[float, float]:
    """Where the words of two marks begin: the lower's to its left, the higher's to its right, where there is room."""
    (low_words, low_at), (high_words, high_at) = marks
    low_width, high_width = text_width(low_words, 10), text_width(high_words, 10)
    low = low_at - 2 - low_width if low_at - 2 - low_width >= x.start else low_at + 3
    high = high_at - 2 if high_at - 2 + high_width <= x.end else x.end - high_width
    if low + low_width + 6 > high:
        high = min(max(high, low + low_width + 6), x.end - high_width)
        low = min(low, high - 6 - low_width)
    return low, high


# --- bars and ratios

def bars(title: str, series: Sequence[Series], axis: Axis) -> Panel:
    """One figure a contestant, its interval a whisker; the figure stands behind the bar."""
    row, left = 26.0, 14 + _widest_label(series)
    height = TOP + row * len(series) + BOTTOM - 6
    points = [one.points[0] for one in series if one.points]
    most = max((value for point in points for value in (point.y, point.high or 0.0)), default=1.0)
    room = max((text_width(axis.words(point.y)) for point in points), default=0) + 14
    x = axis.scale([most], left, WIDTH - room)
    parts = x_ticks(x, axis, height - BOTTOM, TOP - 4)
    for index, one in enumerate(series):
        middle, shade = TOP + row * (index + 0.5) - 3, contestant_colour(one.place)
        parts.append(text(left - 8, middle + 4, one.label, anchor="end", fill=shade, font_weight=600))
        if not one.points:
            parts.append(text(left + 6, middle + 4, "not measured", fill="faint"))
            continue
        point = one.points[0]
        parts.append(svg.rect(left, middle - 7, max(x(point.y) - left, 0.8), 14, fill=shade, fill_opacity=0.75,
                              rx=1.5))
        parts.append(_whisker(x, middle, point))
        parts.append(text(x(max(point.y, point.high or 0)) + 7, middle + 4, axis.words(point.y), fill="ink"))
    parts.append(svg.line(left, TOP - 4, left, height - BOTTOM, "rule"))
    said = ", ".join(f"{one.label} {axis.words(one.points[0].y)}" for one in series if one.points)
    return Panel(title, f"{axis.title}: {said}", "".join(parts), WIDTH, height)


def _whisker(x: Scale, middle: float, point: Point, shade: str = "ink") -> str:
    if point.low is None or point.high is None:
        return ""
    return (svg.line(x(point.low), middle, x(point.high), middle, shade, stroke_width=1.4)
            + svg.line(x(point.low), middle - 3.5, x(point.low), middle + 3.5, shade, stroke_width=1.4)
            + svg.line(x(point.high), middle - 3.5, x(point.high), middle + 3.5, shade, stroke_width=1.4))


def ratios(title: str, groups: Sequence[tuple[str, Sequence[Series]]], axis: Axis) -> Panel:
    """Ratios to a baseline, which is the line at 1, with their intervals; a block of rows a group. points[0].y is the
    ratio. Behind each stands its figure."""
    width, row, head = 640.0, 23.0, 25.0
    series = [one for _, group in groups for one in group]
    left = 18 + _widest_label(series)
    height = 10 + sum(head + row * len(group) for _, group in groups) + BOTTOM
    values = [v for one in series for p in one.points for v in (p.y, p.low, p.high) if v is not None]
    x = Axis(axis.title, axis.words, True, low=min([*values, 1.0]) / 1.12, high=max([*values, 1.0]) * 1.12).scale(
        values, left, width - 170)
    parts = [svg.line(x(1), 6, x(1), height - BOTTOM, "faint", stroke_width=1.2, stroke_dasharray="2 3")]
    parts += x_ticks(x, Axis(axis.title, axis.words, True, _ratio_ticks(x)), height - BOTTOM, 6)
    at = 10.0
    for name, group in groups:
        parts.append(text(4, at + 14, name, fill="ink", font_weight=600))
        at += head
        for one in group:
            parts.append(_ratio_row(one, x, at + row / 2 - 2, axis))
            at += row
    said = "; ".join(f"{name}: " + ", ".join(f"{one.label} {axis.words(one.points[0].y)}" for one in group
                                             if one.points) for name, group in groups)
    return Panel(title, f"{axis.title}. {said}", "".join(parts), width, height)


def _ratio_ticks(x: Scale) -> tuple[float, ...]:
    for nice in ((0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5), (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0),
                 (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)):
        if x.low >= nice[0] * 0.7 and x.high <= nice[-1] * 1.4:
            break
    return tuple(value for value in nice if x.low <= value <= x.high)


def _ratio_row(one: Series, x: Scale, middle: float, axis: Axis) -> str:
    shade = contestant_colour(one.place)
    label = text(x.start - 10, middle + 4, one.label, anchor="end", fill=shade, font_weight=600)
    if not one.points:
        return label + text(x.start + 6, middle + 4, "not measured", fill="faint")
    point = one.points[0]
    said = axis.words(point.y)
    if point.low is not None and point.high is not None:
        said += f"  ({axis.words(point.low)} to {axis.words(point.high)})"
    return (svg.line(x.start, middle, x.end, middle, "grid") + label + _whisker(x, middle, point, shade)
            + svg.marker(x(point.y), middle, one.place, f"{one.label}: {said}", 4.4)
            + text(x.end + 12, middle + 4, said, fill="ink"))
