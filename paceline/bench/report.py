"""One HTML file that tells a comparison: the finding first, then the set-up, the tables, the charts. It needs no
network and no script; long parts fold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from . import svg
from .comparison import Cell, Comparison, Contestant, Load
from .figures import Figure
from .findings import Finding, ranked
from .journal_view import KV_DEFINITIONS
from .measures import OURS
from .metrics import PERCENTILES, CellFacts, summarise
from .ratios import RATIO_METHOD, Quantity, quantities, spread
from .svg import tag

STYLE = Path(__file__).with_name("data") / "report.css"
DEFINITIONS = {
    **{name.removesuffix("_seconds").replace("_", " "): measure.formula for name, measure in OURS.measures.items()},
    "where": "intended: when the load wanted the request sent; first, last: its first and last chunk with tokens; "
             "ended: the answer was complete; n: output tokens as the server counts",
    "throughput": f"requests that ended well, and their tokens, over the window {OURS.window}",
    "p50, p99": "percentiles of a cell's requests, linear between neighbours; in tables and charts, as all figures, "
                "the geometric mean over rounds (summary.json has each round's "
                f"{', '.join(f'p{q}' for q in PERCENTILES)})",
    "ratios": RATIO_METHOD,
    "cache hits": "prompt tokens taken from a prefix cache over prompt tokens, as the server tells",
    "valid": f"{summarise((), CellFacts(name='none'))['client']['definition']}; else the client was a bottleneck, and "
             "the cell is INVALID",
    **{f"KV memory: {name}": words for name, words in KV_DEFINITIONS.items()},
    "slots idle": "of the slots that were used at all: time in which no row of theirs was computed, from the first "
                  "row to the last",
}


def html(comparison: Comparison, finding: Finding, figures: Sequence[Figure], title: str) -> str:
    body = [_header(comparison, title), _finding(comparison, finding, figures), _setup(comparison), _table(comparison)]
    body += [_figure(figure) for figure in figures if figure.name != "ratios" and not _is_folded(figure, comparison)]
    folded = [figure for figure in figures if _is_folded(figure, comparison)]
    body += [_folded(load, [one for one in folded if one.load == load]) for load in reversed(comparison.loads[:-1])]
    body += [_every_cell(comparison), _definitions(), tag("footer", escape(_closing(comparison)))]
    head = (tag("meta", charset="utf-8") + tag("meta", name="viewport", content="width=device-width,initial-scale=1")
            + tag("title", escape(title)) + tag("style", style()))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(filter(None, body))}</body></html>\n'


def style() -> str:
    return (f":root{{color-scheme:light dark;{svg.variables(svg.LIGHT)}}}"
            f"@media screen and (prefers-color-scheme:dark){{:root{{{svg.variables(svg.DARK)}}}}}"
            f"html{{font-family:{svg.FONT}}}{STYLE.read_text(encoding='utf-8')}")


def _is_folded(figure: Figure, comparison: Comparison) -> bool:
    """Loads below the highest: there for whoever asks."""
    return figure.load is not None and figure.load != comparison.loads[-1]


def _header(comparison: Comparison, title: str) -> str:
    loads = ", ".join(load.name for load in comparison.loads)
    rounds = f"{comparison.num_rounds} round{'' if comparison.num_rounds == 1 else 's'}"
    when = comparison.setup.get("run", {}).get("started at", "")
    workload = comparison.setup.get("workload", {}).get("workload", "")
    said = " · ".join(filter(None, (f"workload {workload}" if workload else "", loads, rounds, str(when))))
    return tag("header", tag("h1", escape(title)), tag("p", escape(said)))


# --- the finding

def _finding(comparison: Comparison, finding: Finding, figures: Sequence[Figure]) -> str:
    edge = svg.colour("rule") if finding.winner is None else svg.contestant_colour(comparison.place(finding.winner))
    words = [tag("p", _named(comparison, finding.lead), class_="lead")]
    if finding.weakest:
        words.append(tag("p", _named(comparison, finding.weakest), class_="weakest"))
    notes = tag("ul", *(tag("li", escape(note)) for note in finding.caveats), class_="notes") if finding.caveats else ""
    ratios = "".join(_panels(figure) for figure in figures if figure.name == "ratios")
    return tag("section", tag("div", *words, notes, class_="finding", style=f"border-color:{edge}"), ratios,
               id="finding", class_="opening", aria_label="The finding")


def _named(comparison: Comparison, words: str) -> str:
    """Contestants in their colours."""
    said = escape(words)
    for place, one in enumerate(comparison.contestants):
        shade = svg.contestant_colour(place)
        said = said.replace(f" {escape(one.name)}", f' <b style="color:{shade}">{escape(one.name)}</b>')
    return said


# --- set-up

def _setup(comparison: Comparison) -> str:
    parts = [tag("div", tag("h3", escape(name.capitalize())), facts_list(facts))
             for name, facts in comparison.setup.items() if name != "calibration" and facts]
    calibration = comparison.setup.get("calibration", {})
    if calibration:
        parts.append(tag("div", tag("h3", "Calibration"), facts_list(
            {name: value for name, value in calibration.items() if name != "rounds"})))
    cards = tag("div", *parts, class_="setup")
    contestants = tag("details", tag("summary", "The contestants, and how each was set up"),
                      tag("div", *(_contestant(comparison, one) for one in comparison.contestants),
                          class_="contestants"))
    return tag("section", tag("h2", "Set-up"), cards, contestants, id="setup")


def facts_list(facts: Mapping[str, Any]) -> str:
    return tag("dl", *(tag("dt", escape(str(name).replace("_", " "))) + tag("dd", _fact(name, value))
                       for name, value in facts.items() if value is not None and value != ""))


def _fact(name: str, value: Any) -> str:
    if name in ("command", "commands"):
        return tag("code", escape(str(value)))
    if isinstance(value, float):
        return escape(svg.figure(value))
    if isinstance(value, Mapping):
        return escape(", ".join(f"{key} {one}" for key, one in value.items()))
    if isinstance(value, list | tuple):
        return escape(", ".join(map(str, value)))
    return escape(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def _contestant(comparison: Comparison, one: Contestant) -> str:
    dot = tag("span", "", class_="dot", style=f"background:{svg.contestant_colour(comparison.place(one.name))}")
    about = tag("p", escape(one.about), class_="caption")
    return tag("div", tag("h3", dot, escape(one.name)), about, facts_list(one.facts))


# --- tables

def _table(comparison: Comparison) -> str:
    columns = quantities(comparison)
    head = tag("tr", tag("th", "", scope="col"), *(tag("th", escape(one.title), scope="col") for one in columns),
               *(tag("th", words, scope="col") for words in ("cache hits", "failed", "valid")))
    rows = [row for load in reversed(comparison.loads) for row in _load_rows(comparison, load)]
    table = tag("table", tag("thead", head), tag("tbody", *rows))
    rounds = comparison.num_rounds
    said = "Geometric means over rounds, small: the least to the greatest. " if rounds > 1 else ""
    said += "Bold: the best of its load. Definitions stand at the end."
    return tag("section", tag("h2", "Figures"), tag("p", said, class_="caption"), tag("div", table, class_="scroll"),
               id="figures")


def _load_rows(comparison: Comparison, load: Load) -> Iterator[str]:
    columns = quantities(comparison)
    yield tag("tr", tag("th", escape(load.name), colspan=len(columns) + 4, scope="rowgroup"), class_="group")
    best = {quantity.key: order[0] for quantity in columns if (order := ranked(comparison, load, quantity))}
    for place, one in enumerate(comparison.contestants):
        cells = comparison.cells_of(one.name, load)
        dot = tag("span", "", class_="dot", style=f"background:{svg.contestant_colour(place)}")
        figures = [tag("td", _value(comparison, one.name, load, quantity, best.get(quantity.key) == one.name))
                   for quantity in columns]
        yield tag("tr", tag("th", dot, escape(one.name), scope="row"), *figures, *_health(cells))


def _value(comparison: Comparison, name: str, load: Load, quantity: Quantity, is_best: bool) -> str:
    found = spread(comparison, name, load, quantity)
    if found is None:
        return "–"
    said = escape(quantity.words(found.mean))
    around = ""
    if found.count > 1:
        around = tag("small", escape(f"{quantity.words(found.low)} – {quantity.words(found.high)}"))
    return (tag("b", said) if is_best else said) + around


def _health(cells: Sequence[Cell]) -> list[str]:
    hits = [cell.summary["cache_hit_rate"]["value"] for cell in cells]
    told = [value for value in hits if value is not None]
    failed = sum(cell.summary["requests"]["failed"] for cell in cells)
    invalid = sum(not cell.summary["client"]["is_valid"] for cell in cells)
    valid = tag("span", f"INVALID: {invalid} of {len(cells)}", class_="bad") if invalid else "yes" if cells else "–"
    return [tag("td", escape(svg.percent(sum(told) / len(told))) if told else "not told"),
            tag("td", tag("span", str(failed), class_="bad") if failed else "0"), tag("td", valid)]


def _every_cell(comparison: Comparison) -> str:
    """Each round by itself: what the means are made of."""
    columns = quantities(comparison)
    head = ["contestant", "load", "round", "requests", *(one.title for one in columns), "output tokens asked / got",
            "client"]
    rows = []
    for cell in comparison.cells:
        summary, lengths = cell.summary, cell.summary["lengths"]
        values = [quantity.of(summary) for quantity in columns]
        shown = [quantity.words(value) if value is not None else "–" for quantity, value in
                 zip(columns, values, strict=True)]
        asked = "–" if lengths["output_asked_mean"] is None else (
            f"{lengths['output_asked_mean']:.4g} / {lengths['output_achieved_mean']:.4g}")
        done = f"{summary['requests']['ok']} of {summary['requests']['measured']}"
        row = [cell.contestant, cell.load.name, str(cell.round), done, *shown, asked,
               "valid" if summary["client"]["is_valid"] else "INVALID"]
        rows.append(tag("tr", *(tag("td", escape(one)) for one in row)))
    table = tag("table", tag("thead", tag("tr", *(tag("th", escape(one), scope="col") for one in head))),
                tag("tbody", *rows))
    return tag("section", tag("details", tag("summary", f"Every cell by itself ({len(comparison.cells)})"),
                              tag("div", table, class_="scroll")), id="cells")


# --- figures

def _figure(figure: Figure) -> str:
    return tag("section", tag("h2", escape(figure.title)), tag("p", escape(figure.caption), class_="caption"),
               _panels(figure), id=figure.name)


def _panels(figure: Figure) -> str:
    legend = ""
    if figure.legend:
        legend = tag("ul", *(
            tag("li", tag("i", "", style=f"background:{shade};opacity:{svg.number(opacity)}"), escape(words))
            for shade, opacity, words in figure.legend), class_="legend")
    is_wide = len(figure.panels) == 1 or any(panel.width > 700 for panel in figure.panels)
    panels = [tag("div", tag("h3", escape(panel.title)), panel.markup(), class_="panel") for panel in figure.panels]
    return tag("figure", legend, tag("div", *panels, class_="panels wide" if is_wide else "panels"),
               aria_label=figure.title)


def _folded(load: Load, figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    return tag("details", tag("summary", escape(f"The same at {load.name}: histograms, slots, KV memory, queue")),
               *map(_figure, figures))


def _definitions() -> str:
    return tag("section", tag("h2", "Definitions"), tag("dl", *(
        tag("dt", escape(name)) + tag("dd", escape(words)) for name, words in DEFINITIONS.items())), id="definitions")


def _closing(comparison: Comparison) -> str:
    version = comparison.setup.get("run", {}).get("paceline", "")
    return (f"Made by paceline compare {version}. Beside this file: charts/ (PNG), records/ (a line a request), "
            "journals/, requests.jsonl, summary.json, summary.csv. `paceline compare --again FOLDER` makes it anew.")
