"""Drawing in SVG: elements, scales with their ticks, and the colours. Knows lines and labels, no benchmark.

Colours are CSS variables, so one drawing serves a light page, a dark one and paper; `resolved` puts the light ones in
for whoever knows no CSS. Contestants keep their colour and their marker through all drawings, so that a reader who does
not see the colours can still tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

LIGHT = {
    "paper": "#ffffff", "card": "#ffffff", "ink": "#1c2330", "soft": "#5b6473", "faint": "#8b93a1", "rule": "#d9dde4",
    "grid": "#eceef2", "alarm": "#c8321f", "waste": "#e4a33b", "held": "#c3c9d3",
    "c0": "#2f6bd8", "c1": "#d9711c", "c2": "#1f9669", "c3": "#8753cf", "c4": "#cc3b66", "c5": "#148a9c",
    "c6": "#9a7b06", "c7": "#6f6357",
}
DARK = {
    "paper": "#12161d", "card": "#181d26", "ink": "#e8ebf1", "soft": "#a9b1bf", "faint": "#7c8595", "rule": "#353d4a",
    "grid": "#262d38", "alarm": "#ff7a66", "waste": "#e0ab54", "held": "#4a5362",
    "c0": "#76a5ff", "c1": "#f5a15a", "c2": "#57cc9c", "c3": "#b893f7", "c4": "#f57d9f", "c5": "#4fc4d8",
    "c6": "#d6b545", "c7": "#b7a899",
}
NUM_COLOURS = 8
FONT = "Inter, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', system-ui, sans-serif"
TEXT_SIZE = 11.5

# Widths of a text face as shares of its size, on the wide side: what is laid out by them does not overlap in others.
_NARROW, _WIDE = set("iljtfr.,:;'|!()[] "), set("mwMW@%")
Attribute = str | float | None


def tag(name: str, /, *children: str, **attributes: Attribute) -> str:
    """An element. Children are markup already; `_` in an attribute's name stands for `-`, None leaves it out."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
                    for key, value in attributes.items() if value is not None)
    return f"<{name}{given}>{''.join(children)}</{name}>" if children else f"<{name}{given}/>"


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else number(value)


def number(value: float) -> str:
    """A coordinate to a hundredth, as short as it can be written."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def colour(name: str) -> str:
    return f"var(--{name})"


def contestant_colour(place: int) -> str:
    return colour(f"c{place % NUM_COLOURS}")


def resolved(markup: str, colours: dict[str, str]) -> str:
    return re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], markup)


def variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def text_width(text: str, size: float = TEXT_SIZE, is_bold: bool = False) -> float:
    shares = sum(0.34 if one in _NARROW else 0.9 if one in _WIDE else 0.6 for one in text)
    return size * shares * (1.08 if is_bold else 1.0)


def text(x: float, y: float, words: str, *, anchor: str = "start", fill: str = "soft", **looks: Attribute) -> str:
    """fill: a colour of ours by name, or a CSS one. looks: font_size, font_weight."""
    return tag("text", escape(words), x=x, y=y, text_anchor=None if anchor == "start" else anchor,
               style=f"fill:{fill if fill.startswith('var(') else colour(fill)}", **{"font_size": TEXT_SIZE, **looks})


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = "grid", **looks: Attribute) -> str:
    """looks: stroke_width, stroke_dasharray."""
    shade = stroke if stroke.startswith("var(") else colour(stroke)
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, style=f"stroke:{shade}", **{"stroke_width": 1.0, **looks})


def path(points: Iterable[tuple[float, float]], *, stroke: str, width: float = 2.0) -> str:
    return tag("path", d=_track(points), fill="none", style=f"stroke:{stroke}", stroke_width=width,
               stroke_linejoin="round", stroke_linecap="round")


def area(points: Iterable[tuple[float, float]], fill: str, **looks: Attribute) -> str:
    """looks: fill_opacity."""
    return tag("path", d=_track(points) + "Z", style=f"fill:{fill}", **looks)


def _track(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def rect(x: float, y: float, width: float, height: float, fill: str, **looks: Attribute) -> str:
    """looks: fill_opacity, rx."""
    return tag("rect", x=x, y=y, width=max(width, 0), height=max(height, 0), style=f"fill:{fill}", **looks)


def marker(x: float, y: float, place: int, title: str | None = None, size: float = 3.6) -> str:
    """The contestant's own shape, ringed in the page's colour so that crossing lines do not hide it."""
    corners: dict[int, list[tuple[float, float]]] = {
        1: [(-1, -1), (1, -1), (1, 1), (-1, 1)], 2: [(0, -1.3), (1.2, 0.9), (-1.2, 0.9)],
        3: [(0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)], 4: [(0, 1.3), (1.2, -0.9), (-1.2, -0.9)],
        5: [(-1.4, -0.7), (1.4, -0.7), (1.4, 0.7), (-1.4, 0.7)],
        6: [(-0.7, -1.4), (0.7, -1.4), (0.7, 1.4), (-0.7, 1.4)]}
    inner = [] if title is None else [tag("title", escape(title))]
    style = f"fill:{contestant_colour(place)};stroke:{colour('card')}"
    if (shape := corners.get(place % NUM_COLOURS)) is None:
        return tag("circle", *inner, cx=x, cy=y, r=size, style=style, stroke_width=1.2)
    corner = [(x + size * dx, y + size * dy) for dx, dy in shape]
    return tag("path", *inner, d=_track(corner) + "Z", style=style, stroke_width=1.2)


# --- scales

@dataclass(frozen=True, slots=True)
class Scale:
    """Values to positions, straight or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = log10(low), log10(high), log10(max(value, self.low * 1e-9, 1e-300))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        return log_ticks(self.low, self.high, most) if self.is_log else linear_ticks(self.low, self.high, most)


def linear_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values from low to high: 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [round(index * step, 12) for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Powers of ten, with 2 and 5 (or 3) between where there is room."""
    if not high > low > 0:
        return [low]
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0 ** power for power in powers for step in steps if low <= step * 10.0 ** power <= high]
        if len(found) <= most:
            return found if len(found) > 1 else linear_ticks(low, high, most)    # less than a power of ten is shown
    return found[:: ceil(len(found) / most)]


def rounded_up(high: float, most: int = 5) -> float:
    """The end of a straight axis from 0: the first tick that is not below."""
    if not (isfinite(high) and high > 0):
        return 1.0
    step = linear_ticks(0.0, high, most)[1] if len(linear_ticks(0.0, high, most)) > 1 else high
    return ceil(high / step - 1e-9) * step


# --- words for values

def seconds(value: float) -> str:
    if value == 0:
        return "0"
    if value < 0.9995e-3:
        return f"{_three(value * 1e6)} µs"
    return f"{_three(value * 1e3)} ms" if value < 0.9995 else f"{_three(value)} s"


def figure(value: float) -> str:
    return "0" if value == 0 else _three(value)


def percent(value: float) -> str:
    return f"{figure(100 * value)}%"


def times(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def _three(value: float) -> str:
    """Three figures, or all of those before the point."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    digits = 2 - floor(log10(abs(value)))
    shown = f"{value:.{max(digits, 0)}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


Words = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows. ticks: where, if the scale's own are not wanted; low, high: its ends, if not the data's."""

    title: str
    words: Words = figure
    is_log: bool = False
    ticks: tuple[float, ...] | None = None
    low: float | None = None
    high: float | None = None

    def scale(self, values: Sequence[float], start: float, end: float) -> Scale:
        if self.is_log:
            positive = [value for value in values if value > 0] or [1.0]
            low = min(positive) / 1.06 if self.low is None else self.low
            high = max(positive) * 1.06 if self.high is None else self.high
            return Scale(low, high if high > low else low * 2, start, end, True)
        high = rounded_up(max(values, default=1.0)) if self.high is None else self.high
        return Scale(self.low or 0.0, high, start, end)
