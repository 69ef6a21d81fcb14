"""Figures as pictures: the panels of one laid out on a sheet, with title, legend and caption, drawn by resvg."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from . import svg
from .figures import Figure
from .svg import rect, tag, text, text_width

EDGE, GAP, ZOOM = 24.0, 16.0, 2.0
LINE = 16.0
HOW_TO_GET = "pip install 'paceline[bench]'"


def renderer() -> ModuleType | None:
    """resvg, where it is installed."""
    try:
        return importlib.import_module("resvg_py")
    except ImportError:
        return None


def write_png(figure: Figure, path: Path, resvg: ModuleType) -> None:
    markup = svg.resolved(sheet(figure), svg.LIGHT)
    path.write_bytes(resvg.svg_to_bytes(svg_string=markup, zoom=ZOOM, background=svg.LIGHT["paper"],
                                        font_files=font_files(), font_family="Roboto", sans_serif_family="Roboto"))


def font_files() -> list[str]:
    """Roboto of the package font-roboto, so that pictures have their words on machines without fonts."""
    try:
        folder = Path(str(importlib.import_module("font_roboto").__file__)).parent / "files"
    except ImportError:
        return []
    return sorted(str(path) for path in folder.glob("Roboto-*.ttf"))


def sheet(figure: Figure) -> str:
    """The figure as one SVG."""
    columns = 1 if any(panel.width > 500 for panel in figure.panels) else 3 if len(figure.panels) in (3, 6, 9) else 2
    columns = min(columns, len(figure.panels))
    width = max(2 * EDGE + max(panel.width for panel in figure.panels) * columns + GAP * (columns - 1), 560)
    parts = [text(EDGE, EDGE + 12, figure.title, fill="ink", font_size=17, font_weight=700)]
    at = EDGE + 32
    for words in wrapped(figure.caption, width - 2 * EDGE, 11.5):
        parts.append(text(EDGE, at, words))
        at += LINE
    legend, at = _legend(figure, width, at + 4)
    parts.append(legend)
    for first in range(0, len(figure.panels), columns):
        row = figure.panels[first : first + columns]
        for index, panel in enumerate(row):
            left = EDGE + index * (row[0].width + GAP)
            parts.append(text(left + 4, at + 14, panel.title, fill="ink", font_size=12.5, font_weight=600))
            parts.append(tag("svg", panel.inner, x=left, y=at + 22, width=panel.width, height=panel.height,
                             viewBox=f"0 0 {svg.number(panel.width)} {svg.number(panel.height)}"))
        at += max(panel.height for panel in row) + 22 + GAP
    height = at + EDGE - GAP
    return tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", width=width, height=height, font_family=svg.FONT,
               viewBox=f"0 0 {svg.number(width)} {svg.number(height)}")


def _legend(figure: Figure, width: float, at: float) -> tuple[str, float]:
    """Swatches with their words, and where the next thing may begin."""
    parts, left = [], EDGE
    for shade, opacity, words in figure.legend:
        needed = 18 + text_width(words) + 18
        if left + needed > width - EDGE and left > EDGE:
            left, at = EDGE, at + LINE + 2
        parts += [rect(left, at, 12, 12, fill=shade, fill_opacity=opacity, rx=2), text(left + 18, at + 10, words)]
        left += needed
    return "".join(parts), at + (LINE + 8 if figure.legend else 0)


def wrapped(words: str, width: float, size: float) -> list[str]:
    lines: list[str] = []
    for word in words.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def write_pngs(figures: Sequence[Figure], folder: Path) -> str | None:
    """A PNG a figure. What is missing, with the command that brings it, where there are none."""
    resvg = renderer()
    if resvg is None:
        return f"no PNGs: the package resvg-py is not installed; {HOW_TO_GET}"
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        write_png(figure, folder / f"{figure.name}.png", resvg)
    return None
