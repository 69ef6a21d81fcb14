"""Charts over time: who held which slot, what the KV memory held, who waited. One panel a contestant, one time axis for
all, so that they can be read across."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import svg
from .charts import HEIGHT, WIDTH, Panel, x_ticks
from .svg import Axis, Scale, colour, contestant_colour, text, text_width

WIDE = 980.0
TIME = Axis("seconds since the first request")


@dataclass(frozen=True, slots=True)
class Span:
    """A request in a slot. kind: prefill, decode, held (blocks, no row) or padding (a row of one that has ended)."""

    slot: int
    start: float
    end: float
    kind: str
    order: int                 # of the request's arrival


@dataclass(frozen=True, slots=True)
class Layer:
    """One of the areas that lie on each other. fill: a colour; opacity: how strong."""

    name: str
    fill: str
    opacity: float
    values: tuple[float, ...]


def gantt(title: str, place: int, spans: Sequence[Span], num_slots: int, seconds: float) -> Panel:
    """A strip a slot. Prefill is drawn dark, decode in two turns of the contestant's colour, so that one request can be
    told from the next; where nothing is drawn the slot was empty."""
    strip = 13.0 if num_slots <= 12 else max(4.0, 150.0 / num_slots)
    left, top = 10 + text_width("slot 1"), 8.0
    height = top + strip * num_slots + 38
    x = Scale(0.0, seconds, left, WIDE - 14)
    bottom = top + strip * num_slots + 1
    parts = [svg.rect(left, top, WIDE - 14 - left, strip * num_slots, fill=colour("grid"), fill_opacity=0.6)]
    shown = [slot for slot in range(num_slots) if strip >= 11 or slot in (0, num_slots - 1)]
    parts += [text(left - 6, top + strip * (slot + 0.5) + 4, "slot 1" if slot == 0 else str(slot + 1), anchor="end",
                   font_size=10.5) for slot in shown]
    gap = 1.0 if strip > 6 else 0.5
    for span in spans:
        start, end = x(span.start), x(span.end)
        fill, opacity = _look(span, place)
        parts.append(svg.rect(start, top + strip * span.slot + gap / 2, max(end - start - 0.25, 0.4), strip - gap,
                              fill=fill, fill_opacity=opacity))
    parts += x_ticks(x, TIME, bottom)
    busy = sum(span.end - span.start for span in spans if span.kind in ("prefill", "decode"))
    said = svg.percent(busy / (num_slots * seconds)) if num_slots and seconds else "0%"
    return Panel(title, f"{num_slots} slots over {svg.figure(seconds)} s, {said} of the slot time busy", "".join(parts),
                 WIDE, height)


def _look(span: Span, place: int) -> tuple[str, float]:
    if span.kind == "prefill":
        return colour("ink"), 0.78
    if span.kind == "padding":
        return colour("waste"), 0.75
    if span.kind == "held":
        return colour("held"), 1.0
    return contestant_colour(place), 0.85 if span.order % 2 else 0.6


def stacked(title: str, layers: Sequence[Layer], times: Sequence[float], seconds: float, y_axis: Axis) -> Panel:
    """Areas on each other over time; what is above them is free."""
    height = HEIGHT - 60
    left = 12 + text_width(y_axis.words(y_axis.high or 1.0))
    x, y = Scale(0.0, seconds, left, WIDTH - 12), y_axis.scale([], height - 38, 14)
    below = [0.0] * len(times)
    parts = []
    for layer in layers:
        above = [low + value for low, value in zip(below, layer.values, strict=True)]
        upper, lower = _staircase(times, above, x, y), _staircase(times, below, x, y)
        if upper:
            parts.append(svg.area([*upper, *reversed(lower)], fill=layer.fill, fill_opacity=layer.opacity))
        below = above
    parts = [*_frame(x, y, y_axis), *parts, *x_ticks(x, TIME, height - 38)]
    means = ", ".join(f"{layer.name} {y_axis.words(sum(layer.values) / len(layer.values))}" for layer in layers
                      if layer.values)
    return Panel(title, f"{y_axis.title} over time; means of the samples: {means}", "".join(parts), WIDTH, height)


def _frame(x: Scale, y: Scale, y_axis: Axis) -> list[str]:
    parts = []
    for value in y_axis.ticks or y.ticks(3):
        parts += [svg.line(x.start, y(value), x.end, y(value), "rule" if value == y.low else "grid"),
                  text(x.start - 6, y(value) + 4, y_axis.words(value), anchor="end", font_size=10.5)]
    return parts


def _staircase(times: Sequence[float], values: Sequence[float], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """A value holds until the next one. Moments at which nothing changes are left out, but for the last."""
    track: list[tuple[float, float]] = []
    for time, value in zip(times, values, strict=True):
        height = y(value)
        if track and track[-1][1] == height:
            continue
        if track:
            track.append((x(time), track[-1][1]))
        track.append((x(time), height))
    if track and x(times[-1]) > track[-1][0]:
        track.append((x(times[-1]), track[-1][1]))
    return track


def queue(title: str, place: int, samples: Sequence[tuple[float, float, float]], preempted_at: Sequence[float],
          extent: tuple[float, float]) -> Panel:
    """samples: (time, running, waiting). Waiting requests are a grey area, running ones a line in the contestant's
    colour; a preemption is a red tick at the top. extent: seconds and requests shown."""
    seconds, most = extent
    height = HEIGHT - 60
    y_axis = Axis("requests", high=svg.rounded_up(most, 3))
    left = 12 + text_width(y_axis.words(y_axis.high or 1.0))
    x, y = Scale(0.0, seconds, left, WIDTH - 12), y_axis.scale([], height - 38, 18)
    times = [time for time, _, _ in samples]
    parts = _frame(x, y, y_axis)
    waiting = _staircase(times, [waiting for _, _, waiting in samples], x, y)
    if waiting:
        base = y(0.0)
        parts.append(svg.area([(waiting[0][0], base), *waiting, (waiting[-1][0], base)], fill=colour("held"),
                              fill_opacity=0.9))
        parts.append(svg.path(_staircase(times, [running for _, running, _ in samples], x, y),
                              stroke=contestant_colour(place), width=1.6))
    parts += [svg.line(x(time), 6, x(time), 14, "alarm", stroke_width=1.2) for time in preempted_at]
    parts += x_ticks(x, TIME, height - 38)
    peak = max((waiting for _, _, waiting in samples), default=0)
    return Panel(title, f"Running and waiting requests over time; at most {svg.figure(peak)} waited; "
                        f"{len(preempted_at)} preemptions", "".join(parts), WIDTH, height)
