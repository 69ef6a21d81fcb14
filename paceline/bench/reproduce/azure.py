"""What static batching idles, and what refilling slots saves, on recorded traffic: the Azure 2023 traces.

A property of the trace's lengths and of the two rules, so it must come out the same on any hardware, and from the real
scheduler as from two lines of arithmetic. Cells run side by side, one a process.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from ..traces import ATTRIBUTION, PACKAGED, read_trace
from .claims import Claim, Reproduction
from .lab import Cell, Lab, request

SLOTS = (4, 8, 16, 32)
# (static idle in percent, continuous over static) as printed, by slots.
PUBLISHED: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "azure-conv-2023": {4: (42.9, 1.75), 8: (51.7, 2.07), 16: (57.2, 2.33), 32: (61.6, 2.59)},
    "azure-code-2023": {4: (59.0, 2.44), 8: (73.2, 3.70), 16: (82.2, 5.44), 32: (87.9, 7.59)},
}
PUBLISHED_SLOT_STEPS: Mapping[tuple[str, int], tuple[int, int]] = {("azure-conv-2023", 4): (4_088_048, 7_162_904)}
# Without the rows that run on when their request has ended: they change no step, and there are millions.
REGIMES: Mapping[str, Mapping[str, Any]] = {
    "static": {"preset": "static", "regime": "static"}, "continuous": {"preset": "paceline", "prefix_cache": "none"}}
DEFINITION = (
    "a step gives each running request one token; requests in the trace's order, all there from the start; static: "
    "groups of as many as there are slots, each until its longest ends; continuous: a free slot takes the next request "
    "at the next step; idle: slot-steps of the static run without a row; speed-up: static steps over continuous ones; "
    "the last group is left out where it is not full")
WEAKEST = (
    "arrival times and prompts are left out: the queue is never empty, which is where continuous batching gains most, "
    "and a step is taken to cost the same whatever runs in it")
Told = Callable[[str], None]


def reproduce(lab: Lab, traces: Sequence[str] = tuple(PACKAGED), slots: Sequence[int] = SLOTS,
              num_requests: int | None = None, tell: Told = lambda line: None) -> Reproduction:
    """num_requests: the first so many of each trace; None: all. tell: told a line as each run ends."""
    keys = [(trace, num_slots, regime) for trace in traces for num_slots in slots for regime in REGIMES]
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    num_workers = min(os.cpu_count() or 1, len(keys))
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run, lab, *key, num_requests): key for key in keys}
        for future in as_completed(futures):
            facts = found[futures[future]] = future.result()
            tell("{}, {} slots, {}: ".format(*futures[future]) + f"{facts['steps']:,} steps")
    claims = [claim for trace in traces for num_slots in slots
              for claim in claims_of(trace, num_slots, *(found[trace, num_slots, regime] for regime in REGIMES))]
    return Reproduction(name="azure", claims=claims, runs=[found[key] for key in keys], text=[ATTRIBUTION])


def lengths_of(trace: str, num_slots: int, num_requests: int | None) -> list[int]:
    """Output tokens, in whole groups."""
    rows = read_trace(trace)[:num_requests]
    return [row.num_output_tokens for row in rows[: len(rows) // num_slots * num_slots]]


def run(lab: Lab, trace: str, num_slots: int, regime: str, num_requests: int | None = None) -> dict[str, Any]:
    """One regime on one trace, by the scheduler and by arithmetic."""
    lengths = lengths_of(trace, num_slots, num_requests)
    longest = max(lengths, default=0) + 1
    # A block holds the longest request, and there are twice as many as slots: KV memory decides nothing here, so it
    # shall cost little time.
    knobs = dict(REGIMES[regime]) | {"max_num_seqs": num_slots}
    ran = lab.run(Cell(
        name=f"{trace}-{num_slots}-{regime}", preset=knobs.pop("preset"), knobs=knobs, num_blocks=2 * num_slots,
        requests=[request(number, length) for number, length in enumerate(lengths)], block_size=longest,
        max_model_len=longest))
    by_formula = (static_steps if regime == "static" else continuous_steps)(lengths, num_slots)
    return {"trace": trace, **ran.facts(), "requests": len(lengths), "idle_percent": 100 * ran.idle_share,
            "steps_by_formula": by_formula}


def static_steps(lengths: Sequence[int], num_slots: int) -> int:
    """The longest of each group, added up."""
    return sum(max(lengths[start : start + num_slots]) for start in range(0, len(lengths), num_slots))


def continuous_steps(lengths: Sequence[int], num_slots: int) -> int:
    """When the last slot is free, if each request goes to the slot that is free first."""
    free_at = [0] * num_slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


def claims_of(trace: str, num_slots: int, static: Mapping[str, Any], continuous: Mapping[str, Any]) -> list[Claim]:
    idle, speed_up = PUBLISHED.get(trace, {}).get(num_slots, (None, None))
    useful, slot_steps = PUBLISHED_SLOT_STEPS.get((trace, num_slots), (None, None))
    where = f"{trace}, {num_slots} slots"
    found = [
        (f"{where}: static idle", idle, static["idle_percent"], "%"),
        (f"{where}: speed-up", speed_up, static["steps"] / continuous["steps"], "x"),
        (f"{where}: static, slot-steps with a row", useful, static["output_tokens"], "slot-steps"),
        (f"{where}: static, all slot-steps", slot_steps, static["slot_steps"], "slot-steps")]
    return [Claim(what=what, kind="S", published=published, ours=ours, unit=unit, definition=DEFINITION,
                  weakest=WEAKEST)
            for what, published, ours, unit in found]
