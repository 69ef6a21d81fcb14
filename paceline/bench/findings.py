"""The finding of a comparison in words, computed from its records: who leads by how much, where that is weakest, and
what would make the figures mean less than they seem to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import svg
from .comparison import Cell, Comparison, Load
from .ratios import E2E_P50, LATENCIES, THROUGHPUT, Quantity, Ratio, ratio, spread

CACHE_TOLERANCE = 0.02       # of cache-hit rates within one load
LENGTH_TOLERANCE = 0.02      # of mean output lengths within one load
STEADY_TOLERANCE = 0.10      # of the machine's calibration between rounds
FEW_FOR_P99 = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """lead, weakest: sentences. caveats: what to know before quoting them, the gravest first. numbers: the figures
    said, for --json and for whoever checks them."""

    winner: str | None
    lead: str
    weakest: str
    caveats: tuple[str, ...]
    numbers: dict[str, Any]


def headline(comparison: Comparison) -> Quantity:
    """In a closed loop how much got done; in an open one, where the load sets that, how long it took."""
    return THROUGHPUT if comparison.loads[0].unit == "clients" else E2E_P50


def find(comparison: Comparison) -> Finding:
    quantity, load = headline(comparison), comparison.loads[-1]
    order = ranked(comparison, load, quantity)
    caveats = tuple(_caveats(comparison))
    if not order:
        return Finding(None, "Nothing was measured: no request ended well at the highest load.", "", caveats, {})
    winner = order[0]
    numbers: dict[str, Any] = {"quantity": quantity.key, "load": load.name, "winner": winner}
    sentences = [_lead(comparison, quantity, load, order, numbers)]
    sentences += [_other_load(comparison, quantity, other, winner, numbers) for other in comparison.loads[:-1]]
    return Finding(winner, " ".join(filter(None, sentences)), _weakest(comparison, winner, numbers), caveats, numbers)


def ranked(comparison: Comparison, load: Load, quantity: Quantity) -> list[str]:
    """Contestants that have the figure, the best first."""
    found = {one.name: value.mean for one in comparison.contestants
             if (value := spread(comparison, one.name, load, quantity)) is not None and value.mean > 0}
    return sorted(found, key=lambda name: -found[name] if quantity.is_high_good else found[name])


def advantage(comparison: Comparison, names: tuple[str, str], load: Load, quantity: Quantity) -> Ratio | None:
    """How many times better the first is: above 1 it leads, whichever way the quantity counts."""
    return ratio(comparison, names if quantity.is_high_good else (names[1], names[0]), load, quantity)


def _lead(comparison: Comparison, quantity: Quantity, load: Load, order: list[str], numbers: dict[str, Any]) -> str:
    winner = order[0]
    best = spread(comparison, winner, load, quantity)
    assert best is not None
    numbers["value"] = best.mean
    what = "most output tokens per second" if quantity.is_high_good else "shortest median time to a whole answer"
    said = f"At {load.name} {winner} gave the {what}, {quantity.words(best.mean)}"
    others = dict.fromkeys(([comparison.baseline] if comparison.baseline in order[1:] else []) + order[1:2])
    parts = []
    for other in others:
        lead = advantage(comparison, (winner, other), load, quantity)
        if lead is not None:
            numbers.setdefault("leads", {})[other] = {"ratio": lead.value, "low": lead.low, "high": lead.high}
            parts.append(f"{svg.times(lead.value)} {other}'s{_next_best(other, order)}{interval_words(lead)}")
    return said + (": " + ", and ".join(parts) if parts else "") + "."


def _next_best(other: str, order: list[str]) -> str:
    return ", the next best" if other == order[1] and len(order) > 2 else ""


def interval_words(one: Ratio) -> str:
    if one.low is None or one.high is None:
        return ""
    told = "" if one.is_told_apart else ": not told apart"
    return f" ({svg.times(one.low)} to {svg.times(one.high)} over {one.count} rounds{told})"


def _other_load(comparison: Comparison, quantity: Quantity, load: Load, winner: str, numbers: dict[str, Any]) -> str:
    order = ranked(comparison, load, quantity)
    if not order or len(order) < 2:
        return ""
    best, against = order[0], order[1] if order[0] == winner else winner
    lead = advantage(comparison, (best, against), load, quantity)
    if lead is None:
        return f"At {load.name} {best} led; {winner} has no figure there."
    numbers.setdefault("other_loads", {})[load.name] = {"leader": best, "over": against, "ratio": lead.value}
    return f"At {load.name} {best} led with {svg.times(lead.value)} {against}'s{interval_words(lead)}."


def _weakest(comparison: Comparison, winner: str, numbers: dict[str, Any]) -> str:
    """The load and quantity in which the winner stands worst against the best of the others."""
    found: list[tuple[float, Load, Quantity, str]] = []
    for load in comparison.loads:
        for quantity in (headline(comparison), *LATENCIES):
            rivals = [name for name in ranked(comparison, load, quantity) if name != winner]
            lead = advantage(comparison, (winner, rivals[0]), load, quantity) if rivals else None
            if lead is not None:
                found.append((lead.value, load, quantity, rivals[0]))
    if not found:
        return ""
    least, load, quantity, rival = min(found, key=lambda one: one[0])
    ours, theirs = (spread(comparison, name, load, quantity) for name in (winner, rival))
    assert ours is not None and theirs is not None
    numbers["weakest"] = {"load": load.name, "quantity": quantity.key, "rival": rival, "ratio": least,
                          "ours": ours.mean, "theirs": theirs.mean}
    figures = f"{quantity.words(ours.mean)} against {rival}'s {quantity.words(theirs.mean)}"
    if least < 1:
        return (f"Its weakest condition: {quantity.title} at {load.name}, {figures}: "
                f"{svg.times(1 / least)} {'less' if quantity.is_high_good else 'as long'}.")
    return f"Its weakest condition: {quantity.title} at {load.name}, where its lead is least: {figures}."


# --- what makes figures mean less than they seem to

def _caveats(comparison: Comparison) -> Iterator[str]:
    yield from _unfinished(comparison)
    yield from _invalid(comparison)
    for cell in comparison.cells:
        if cell.summary["requests"]["failed"]:
            kinds = ", ".join(f"{facts['count']} {kind}" for kind, facts in cell.summary["requests"]["errors"].items())
            first = next(iter(cell.summary["requests"]["errors"].values()))["first"]
            yield f"{_name(cell)}: {kinds} of {cell.summary['requests']['measured']} requests; the first: {first}"
    for load in comparison.loads:
        yield from uneven(comparison, load)
    yield from _doors(comparison)
    yield from _budgets(comparison)
    yield from _machine(comparison)
    yield from _rounds(comparison)


def _name(cell: Cell) -> str:
    return f"{cell.contestant} at {cell.load.name} in round {cell.round}"


def _unfinished(comparison: Comparison) -> Iterator[str]:
    wanted = len(comparison.contestants) * len(comparison.loads) * comparison.num_rounds_asked
    done = sum(cell.trouble is None for cell in comparison.cells)
    if done < wanted:
        yield f"The comparison ended early: {done} of {wanted} cells are whole."
    for cell in comparison.cells:
        if cell.trouble is not None:
            yield f"{_name(cell)} ended early: {cell.trouble}"


def uneven(comparison: Comparison, load: Load) -> Iterator[str]:
    """Contestants that did not meet the same work under this load: other cache hits, other output lengths."""
    cells = [cell for cell in comparison.cells if cell.load == load]
    hits = [(cell.summary["cache_hit_rate"]["value"], cell.contestant) for cell in cells]
    told = [(value, name) for value, name in hits if value is not None]
    if told and max(told)[0] - min(told)[0] > CACHE_TOLERANCE:
        yield (f"At {load.name} prompts were cached unequally, {svg.percent(min(told)[0])} ({min(told)[1]}) to "
               f"{svg.percent(max(told)[0])} ({max(told)[1]}): part of a difference there is the cache's.")
    lengths = [(cell.summary["lengths"]["output_achieved_mean"], cell.contestant) for cell in cells
               if cell.summary["lengths"]["output_achieved_mean"]]
    if lengths and max(lengths)[0] > min(lengths)[0] * (1 + LENGTH_TOLERANCE):
        yield (f"At {load.name} answers were not equally long, {min(lengths)[0]:.0f} tokens ({min(lengths)[1]}) to "
               f"{max(lengths)[0]:.0f} ({max(lengths)[1]}) on average.")


def _invalid(comparison: Comparison) -> Iterator[str]:
    """One line for all of them."""
    places, verdict = [], ""
    for load in comparison.loads:
        for one in comparison.contestants:
            cells = comparison.cells_of(one.name, load)
            bad = [cell for cell in cells if not cell.summary["client"]["is_valid"]]
            if bad:
                places.append(f"{one.name} at {load.name} ({len(bad)} of {len(cells)} rounds)")
                verdict = verdict or bad[0].summary["client"]["verdict"]
    if places:
        yield f"Do not quote {', '.join(places)}: {verdict}."


def _doors(comparison: Comparison) -> Iterator[str]:
    inside = [one.name for one in comparison.contestants if one.kind == "preset"]
    outside = [one.name for one in comparison.contestants if one.kind != "preset"]
    if inside and outside:
        yield (f"{', '.join(inside)} ran in process, without HTTP and text; {', '.join(outside)} were asked over HTTP. "
               "A server of ours as a --url or a peer is compared on equal terms.")


def _budgets(comparison: Comparison) -> Iterator[str]:
    budgets = {one.name: one.facts["kv_tokens"] for one in comparison.contestants if one.facts.get("kv_tokens")}
    if len(set(budgets.values())) > 1:
        yield "KV memory differs: " + ", ".join(f"{name} {tokens:,} tokens" for name, tokens in budgets.items()) + "."


def _machine(comparison: Comparison) -> Iterator[str]:
    lines: list[dict[str, float]] = list(comparison.setup.get("calibration", {}).get("rounds", []))
    for name, unit in (("memory_gb_per_second", "GB/s of memory"), ("gflop_per_second", "GFLOP/s")):
        values = [line[name] for line in lines if name in line]
        if values and max(values) > min(values) * (1 + STEADY_TOLERANCE):
            yield (f"The machine was not steady: calibration before the rounds read {min(values):.3g} to "
                   f"{max(values):.3g} {unit}.")


def _rounds(comparison: Comparison) -> Iterator[str]:
    if comparison.num_rounds < 2:
        yield "One round: nothing tells how much of a difference is chance. --rounds 5 gives intervals."
    elif comparison.num_rounds < 5:
        yield (f"{comparison.num_rounds} rounds: intervals span about the least to the greatest round; they are no 95% "
               "intervals. --rounds 5 gives such.")
    least = min((cell.summary["requests"]["ok"] for cell in comparison.cells), default=0)
    if 0 < least < FEW_FOR_P99:
        yield f"{least} requests a cell: a p99 is nearly the slowest single request of each round."
    if comparison.loads[0].unit == "clients":
        yield ("A closed loop: a slow contestant is asked less often, which hides the queue that open traffic would "
               "build. --rate R asks at a fixed rate.")
