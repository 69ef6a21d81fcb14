"""The figures of a comparison: which charts are drawn of what, with their captions. report.py sets them on a page,
png.py makes pictures of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from . import charts, svg, timeline_charts
from .charts import Panel, Point, Series
from .comparison import Cell, Comparison, Load, plain_name
from .findings import advantage, headline, uneven
from .journal_view import KV_DEFINITIONS, JournalView
from .measures import OURS
from .ratios import BY_LOAD, GOODPUT, RATES, Quantity, quantities, spread
from .svg import Axis

TIMED = (("ttft_seconds", "TTFT"), ("tpot_seconds", "TPOT"), ("e2e_seconds", "E2E"))
WHOLE = {"ttft_seconds": "time to the first token", "tpot_seconds": "time per output token after the first",
         "e2e_seconds": "time to the whole answer"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One or more panels that belong together. name: of its file. caption: what is drawn, with its definition.
    legend: (colour, opacity, words) where labels do not stand at the lines. load: whose panels a fold-out may hide."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    legend: tuple[tuple[str, float, str], ...] = ()
    load: Load | None = None


def figures(comparison: Comparison) -> Iterator[Figure]:
    if len(comparison.contestants) > 1:
        yield ratio_figure(comparison)
    yield load_figure(comparison, "throughput", "Throughput", RATES)
    if GOODPUT in quantities(comparison):
        yield load_figure(comparison, "goodput", "Goodput", (GOODPUT,))
    yield load_figure(comparison, "latency_against_load", "Latency against load", BY_LOAD)
    yield cumulative_figure(comparison)
    for load in reversed(comparison.loads):
        yield histogram_figure(comparison, load)
    for load in reversed(comparison.loads):
        yield from time_figures(comparison, load)
    if any(cell.view is not None for cell in comparison.cells):
        yield cost_figure(comparison)


def load_axis(comparison: Comparison) -> Axis:
    unit = comparison.loads[0].unit
    title = "clients, each with one request under way" if unit == "clients" else f"{unit} asked for"
    return Axis(title, svg.figure, True, tuple(load.value for load in comparison.loads))


def contestants_legend(comparison: Comparison) -> tuple[tuple[str, float, str], ...]:
    return tuple((svg.contestant_colour(place), 1.0, one.name) for place, one in enumerate(comparison.contestants))


# --- figures of rounds

def ratio_figure(comparison: Comparison) -> Figure:
    quantity = headline(comparison)
    others = [one.name for one in comparison.contestants if one.name != comparison.baseline]
    groups = []
    for load in reversed(comparison.loads):
        rows = [Series(name, comparison.place(name), _ratio_points(comparison, name, load)) for name in others]
        doubt = " (not the same work: see the notes)" if any(uneven(comparison, load)) else ""
        groups.append((load.name + doubt, rows))
    title = f"{quantity.title} as a multiple of {comparison.baseline}'s"
    if not quantity.is_high_good:
        title = f"how many times shorter than {comparison.baseline}'s: {quantity.title}"
    panel = charts.ratios("Ratios", groups, Axis(f"{title}; right of the line is better", svg.times, True))
    return Figure("ratios", f"Against {comparison.baseline}", f"{title[0].upper()}{title[1:]}. Whiskers: the interval.",
                  (panel,))


def _ratio_points(comparison: Comparison, name: str, load: Load) -> tuple[Point, ...]:
    found = advantage(comparison, (name, comparison.baseline), load, headline(comparison))
    return () if found is None else (Point(0.0, found.value, found.low, found.high),)


def load_figure(comparison: Comparison, name: str, title: str, quantities: Sequence[Quantity]) -> Figure:
    """Figures against load; bars where there is one load only."""
    panels = []
    for quantity in quantities:
        series = [Series(one.name, place, tuple(
            Point(load.value, found.mean, *((found.low, found.high) if found.count > 1 else ()))
            for load in comparison.loads if (found := spread(comparison, one.name, load, quantity)) is not None))
            for place, one in enumerate(comparison.contestants)]
        if len(comparison.loads) > 1:
            axis = Axis(quantity.title, quantity.words, not quantity.is_high_good)
            panels.append(charts.lines(quantity.title, series, load_axis(comparison), axis))
        else:
            axis = Axis(f"{quantity.title} at {comparison.loads[0].name}", quantity.words)
            panels.append(charts.bars(quantity.title, series, axis))
    sections = dict.fromkeys(quantity.section for quantity in quantities)
    band = " Bands and whiskers: least to greatest round; lines: geometric mean." if comparison.num_rounds > 1 else ""
    said = "; ".join(_definition(comparison, section) for section in sections)
    return Figure(name, title, f"{said}.{band}", tuple(panels))


def _limits_words(comparison: Comparison) -> str:
    """Those asked for, by class where there are classes."""
    slos = next((cell.facts.slos for cell in comparison.cells if cell.facts.slos), {})
    return "; ".join(f"{name}: {slo.text()}" if name else slo.text() for name, slo in slos.items())


def _definition(comparison: Comparison, section: str) -> str:
    if section == "throughput":
        return f"Requests that ended well, and their output tokens, over the window {OURS.window}"
    if section == "goodput":
        return f"Requests a second that kept every limit: {_limits_words(comparison)}"
    return f"{section.removesuffix('_seconds').upper()}: {OURS.measures[section].formula}"


# --- distributions

def values_of(cells: Sequence[Cell], section: str) -> tuple[float, ...]:
    """Of all rounds together; one value a request that ended well."""
    return tuple(value for cell in cells for record in cell.records if record.status == "ok" and not record.is_warm_up
                 for value in OURS.measures[section].values(record))


def cumulative_figure(comparison: Comparison) -> Figure:
    panels = []
    for load in reversed(comparison.loads):
        for section, short in TIMED:
            every = [value for value in values_of(comparison.cells, section) if value > 0]
            low, high = min(every, default=1.0), max(every, default=1.0)
            axis = Axis(WHOLE[section], svg.seconds, True, low=low / 1.1, high=high * 1.1)    # one for all loads
            series = [Series(one.name, place, values=values_of(comparison.cells_of(one.name, load), section))
                      for place, one in enumerate(comparison.contestants)]
            panels.append(charts.cumulative(f"{short} at {load.name}", series, axis))
    said = "; ".join(_definition(comparison, section) for section, _ in TIMED)
    return Figure("latency_cumulative", "How long requests took",
                  f"The share of requests that took at most so long, of all rounds; further left is better. {said}.",
                  tuple(panels), contestants_legend(comparison))


def histogram_figure(comparison: Comparison, load: Load) -> Figure:
    panels = []
    for section, short in TIMED:
        series = [Series(one.name, place, values=values_of(comparison.cells_of(one.name, load), section))
                  for place, one in enumerate(comparison.contestants)]
        panels.append(charts.ridges(f"{short} at {load.name}", series, Axis(WHOLE[section], svg.seconds, True)))
    return Figure(f"latency_histograms_{slug(load)}", f"Latency histograms at {load.name}",
                  "Requests of all rounds in bins that are equal on the scale shown; each row is as high as its "
                  "fullest bin. Marked: median and 99th percentile.", tuple(panels), load=load)


# --- over time

def slug(load: Load) -> str:
    return plain_name(load.name).replace(".", "_")


def time_figures(comparison: Comparison, load: Load) -> Iterator[Figure]:
    """Of the first round. One time axis for all contestants."""
    cells = [cells[0] for one in comparison.contestants if (cells := comparison.cells_of(one.name, load))]
    views = {cell.contestant: cell.view for cell in cells}
    seen = [(cell, view) for cell in cells if (view := views[cell.contestant]) is not None]
    samples = {cell.contestant: cell.samples if view is None else view.queue
               for cell in cells for view in (views[cell.contestant],)}
    seconds = max([one.at for found in samples.values() for one in found], default=0.0)
    if not seconds:
        return
    if seen:
        yield _slots_figure(comparison, load, seen, seconds)
    sampled = [cell for cell in cells if cell.samples]
    if seen or sampled:
        yield _memory_figure(comparison, load, seen, sampled, seconds)
        yield _queue_figure(comparison, load, cells, seconds)


def _slots_figure(comparison: Comparison, load: Load, seen: Sequence[tuple[Cell, JournalView]],
                  seconds: float) -> Figure:
    panels = []
    for cell, view in seen:
        idle = _idle_share(view)
        title = f"{cell.contestant}{'' if idle is None else f': {svg.percent(idle)} of the slots idle'}"
        place = comparison.place(cell.contestant)
        panels.append(timeline_charts.gantt(title, place, view.spans, view.num_slots, seconds))
    legend = ((svg.colour("ink"), 0.78, "prefill"), (svg.colour("soft"), 0.7, "decode, a request after another in two "
              "tones"), (svg.colour("held"), 1.0, "holds memory, no row in the step"),
              (svg.colour("waste"), 0.75, "padding: computed for a request that has ended"))
    return Figure(f"slots_{slug(load)}", f"Who held which slot at {load.name}",
                  "A strip a slot; a request takes the lowest free one. From the journal of the first round. Idle: "
                  "time of the slots shown in which no row of theirs was computed.", tuple(panels), legend, load)


def _idle_share(view: JournalView) -> float | None:
    """Of the strips drawn, from the first row to the last: time without prefill or decode."""
    if not view.spans or not view.num_slots:
        return None
    begin, end = min(one.start for one in view.spans), max(one.end for one in view.spans)
    busy = sum(one.end - one.start for one in view.spans if one.kind in ("prefill", "decode"))
    return max(0.0, 1 - busy / (view.num_slots * (end - begin)))


def _memory_figure(comparison: Comparison, load: Load, seen: Sequence[tuple[Cell, JournalView]],
                   sampled: Sequence[Cell], seconds: float) -> Figure:
    axis = Axis("share of KV memory", svg.percent, ticks=(0.0, 0.5, 1.0), high=1.0)
    panels = []
    for cell, view in seen:
        place = comparison.place(cell.contestant)
        looks = {"tokens": (svg.contestant_colour(place), 0.85), "empty": (svg.colour("waste"), 0.9),
                 "promised": (svg.colour("waste"), 0.4), "cached": (svg.colour("held"), 0.8)}
        layers = [timeline_charts.Layer(name, *looks[name], tuple(one.kv[name] for one in view.memory))
                  for name in KV_DEFINITIONS]
        title = f"{cell.contestant}: {_waste_words(view)}"
        panels.append(timeline_charts.stacked(title, layers, [one.at for one in view.memory], seconds, axis))
    for cell in sampled:
        layer = timeline_charts.Layer("in use", svg.contestant_colour(comparison.place(cell.contestant)), 0.85,
                                      tuple(one.kv.get("used", 0.0) for one in cell.samples))
        panels.append(timeline_charts.stacked(f"{cell.contestant}: in use, as its /metrics tell", [layer],
                                              [one.at for one in cell.samples], seconds, axis))
    legend = ((svg.colour("soft"), 0.85, "tokens of running requests"),
              (svg.colour("waste"), 0.9, "empty room in their blocks"),
              (svg.colour("waste"), 0.4, "promised to them up to max_tokens"),
              (svg.colour("held"), 0.8, "cached prefixes"))
    return Figure(f"kv_memory_{slug(load)}", f"KV memory: use and waste at {load.name}",
                  "Shares of the pool after steps of the first round. Waste is room that running requests hold or were "
                  "promised and have not filled, as a share of that and their tokens; means over the samples.",
                  tuple(panels), legend, load)


def waste_share(view: JournalView) -> float | None:
    """Room held or promised and not filled, over that and the tokens held; of the samples' means."""
    means = view.counts["kv_means"]
    taken = sum(means.get(name, 0.0) for name in ("tokens", "empty", "promised"))
    return (means["empty"] + means["promised"]) / taken if taken else None


def _waste_words(view: JournalView) -> str:
    share = waste_share(view)
    return "nothing held" if share is None else f"{svg.percent(share)} waste"


def _queue_figure(comparison: Comparison, load: Load, cells: Sequence[Cell], seconds: float) -> Figure:
    known = [(cell, cell.samples if cell.view is None else cell.view.queue) for cell in cells]
    most = max([max(one.running, one.waiting) for _, samples in known for one in samples], default=1)
    panels = []
    for cell, samples in known:
        if not samples:
            continue
        preempted = () if cell.view is None else cell.view.preempted_at
        count = cell.summary["preemptions"]["value"] if cell.view is None else len(preempted)
        title = f"{cell.contestant}: {'preemptions not told' if count is None else _counted(count, 'preemption')}"
        panels.append(timeline_charts.queue(title, comparison.place(cell.contestant), [
            (one.at, one.running, one.waiting) for one in samples], preempted, (seconds, most)))
    legend = ((svg.colour("soft"), 1.0, "line: running"), (svg.colour("held"), 0.9, "area: waiting"),
              (svg.colour("alarm"), 1.0, "tick: a preemption"))
    return Figure(f"queue_{slug(load)}", f"Queue and preemptions at {load.name}",
                  "Requests that run and that wait, after each step of the first round, or as polled from /metrics.",
                  tuple(panels), legend, load)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def cost_figure(comparison: Comparison) -> Figure:
    """What the schedule cost, at the highest load."""
    load = comparison.loads[-1]
    panels = []
    for title, measure, words in COSTS:
        series = []
        for place, one in enumerate(comparison.contestants):
            found = [measure(cell.view) for cell in comparison.cells_of(one.name, load) if cell.view is not None]
            values = [value for value in found if value is not None]
            if found:
                mean = sum(values) / len(values) if values else 0.0
                series.append(Series(one.name, place, (Point(0.0, mean, *((min(values), max(values)) if len(values) > 1
                                                                          else ())),)))
        panels.append(charts.bars(title, series, Axis(title, words)))
    return Figure("schedule_cost", f"What the schedule cost at {load.name}",
                  "From the journals; mean over rounds, whiskers from the least to the greatest. Tokens computed again "
                  "are those of preempted requests. Steps held: in which the head of the queue was refused by a limit.",
                  tuple(panels))


def _counter(name: str) -> Callable[[JournalView], float | None]:
    return lambda view: float(view.counts.get(name, 0))


COSTS: tuple[tuple[str, Callable[[JournalView], float | None], Callable[[float], str]], ...] = (
    ("slots idle", _idle_share, svg.percent), ("KV memory wasted", waste_share, svg.percent),
    ("preemptions", lambda view: float(len(view.preempted_at)), svg.figure),
    ("engine steps", _counter("num_steps"), svg.figure),
    ("tokens computed again", _counter("num_recomputed_tokens"), svg.figure),
    ("steps held", _counter("steps_refused"), svg.figure))
