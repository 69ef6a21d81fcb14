"""A batch that drains: "HF-like, then static, then continuous batching: 2.91x and 3.86x", and "91 % idle at a spread of
700 tokens".

A static batch takes as long as its longest member, so what refilling slots can save is E[longest of B] / E[length]: a
property of the lengths and of B. What is left of 3.86x once that is taken out is no matter of the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from . import laws
from .claims import Claim, Reproduction
from .lab import Cell, Lab, Ran, request

SLOTS = (4, 8, 10, 16, 32)
NUM_REQUESTS, MEAN = 960, 64    # 960 fill each of these numbers of slots without rest
PUBLISHED_STATIC, PUBLISHED_ALL = 2.91, 3.86
PUBLISHED_IDLE, SPREAD = 91, 700
REGIMES: Mapping[str, Mapping[str, Any]] = {
    "hf-like": {"preset": "static"},                          # rows that have ended are computed on
    "static": {"preset": "static", "regime": "static"},
    "continuous": {"preset": "paceline", "prefix_cache": "none"},
}
LAW_WORDS = {"fixed": "equal lengths", "uniform": "lengths uniform from 0 to twice the mean",
             "exponential": "exponential lengths", "lognormal": "lognormal lengths of sigma 1"}
DEFINITION = (
    f"slots x static steps over tokens: what refilling saves if the queue never ends. Requests of mean {MEAN} tokens "
    "in groups of as many as there are slots; a step gives each that runs one token")
WITH_TAIL = (
    "static steps over continuous ones, the last requests' ride in a batch that empties included: requests of mean "
    f"{MEAN} tokens, a step gives each that runs one token")
WEAKEST = "the lengths of the published runs are not known; a step is taken to cost the same whatever runs in it"

LEFT = Claim(
    what="HF-like over continuous, what the schedule leaves", kind="K", published=PUBLISHED_ALL / PUBLISHED_STATIC,
    ours=None, unit="x", definition="3.86 over 2.91: kernels, padded prompts and the loop around them, which no "
    "schedule reproduces", weakest="that the 2.91x is all schedule is itself a reading")


def reproduce(lab: Lab, slots: Sequence[int] = SLOTS, num_requests: int = NUM_REQUESTS) -> Reproduction:
    runs: list[dict[str, Any]] = []
    claims: list[Claim] = []
    for law in laws.LAWS:
        for num_slots in slots:
            found = {regime: run(lab, law, num_slots, regime, num_requests) for regime in REGIMES
                     if regime != "hf-like" or law == "exponential"}
            runs += found.values()
            claims += _law_claims(law, num_slots, found)
    claims.append(LEFT)
    for facts in idle_readings(lab):
        runs.append(facts)
        claims.append(_idle_claim(facts))
    return Reproduction(name="drain", claims=claims, runs=runs)


def run(lab: Lab, law: str, num_slots: int, regime: str, num_requests: int = NUM_REQUESTS) -> dict[str, Any]:
    lengths = laws.lengths(law, MEAN, num_requests // num_slots * num_slots, seed=num_slots)
    ran = _ran(lab, f"drain-{law}-{num_slots}-{regime}", lengths, num_slots, regime)
    return {"law": law, **ran.facts(), "regime": regime, "requests": len(lengths), "longest": max(lengths),
            "rows_computed": ran.stats.num_generation_tokens + ran.stats.num_padding_rows,
            "idle_percent": 100 * ran.idle_share}


def _ran(lab: Lab, name: str, lengths: Sequence[int], num_slots: int, regime: str) -> Ran:
    longest = max(lengths) + 1
    knobs = dict(REGIMES[regime]) | {"max_num_seqs": num_slots}
    return lab.run(Cell(
        name=name, preset=knobs.pop("preset"), knobs=knobs, num_blocks=2 * num_slots, block_size=longest,
        requests=[request(number, length) for number, length in enumerate(lengths)], max_model_len=longest))


def expected(num_slots: int) -> float:
    """E[longest of B] / E[length] of exponential lengths: the harmonic number of B."""
    return sum(1 / rank for rank in range(1, num_slots + 1))


def _law_claims(law: str, num_slots: int, found: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    static, continuous = found["static"], found["continuous"]
    where = f"{LAW_WORDS[law]}, {num_slots} slots"
    asked: list[tuple[str, float | None, float, str]] = [
        ("refilling", PUBLISHED_STATIC, static["slot_steps"] / static["output_tokens"], DEFINITION),
        ("refilling, with the tail", PUBLISHED_STATIC, static["steps"] / continuous["steps"], WITH_TAIL)]
    if "hf-like" in found:
        padded = found["hf-like"]
        asked.append(("HF-like over static, steps", None, padded["steps"] / static["steps"],
                      "a batch is formed, padded and run to the end of its longest: its steps over static ones"))
        asked.append(("HF-like over static, rows computed", None, padded["rows_computed"] / static["rows_computed"],
                      "the same with every row counted that is computed, those of requests that have ended too: time "
                      "only where a row costs any, which is not where memory is the limit"))
        asked.append(("expected", PUBLISHED_STATIC, expected(num_slots),
                      "harmonic number of the slots: the longest of B exponential lengths over their mean"))
    return [Claim(what=f"{where}: {what}", kind="S", published=published, ours=ours, unit="x", definition=definition,
                  weakest=WEAKEST) for what, published, ours, definition in asked]


# --- 91 % idle at a spread of 700 -------------------------------------------------------------------------------------


def idle_readings(lab: Lab) -> list[dict[str, Any]]:
    """Batches whose longest member is 700 tokens longer than their shortest, and what idles in each."""
    shortest = round(SPREAD * (100 - PUBLISHED_IDLE) / PUBLISHED_IDLE)
    found = [_idle(lab, "the slot of the shorter of two", [shortest, shortest + SPREAD], slot_of_shortest=True)]
    for num_slots in (8, least_slots(PUBLISHED_IDLE), 16, 32):
        lengths = one_long(num_slots)
        found.append(_idle(lab, f"all slots, one of {num_slots} long", lengths))
    found.append(_idle(lab, "all slots, lengths spread evenly", [1 + round(SPREAD * step / 31) for step in range(32)]))
    return found


def least_slots(idle_percent: float) -> int:
    """A batch idles less than 1 - 1/B, however long its longest member is."""
    return ceil(100 / (100 - idle_percent))


def one_long(num_slots: int) -> list[int]:
    """All but one of the length at which the batch idles 91 %; 1 where even the shortest do not idle as much."""
    busy = 1 - PUBLISHED_IDLE / 100
    short = max(round(SPREAD * (num_slots * busy - 1) / (num_slots * (1 - busy))), 1)
    return [short] * (num_slots - 1) + [short + SPREAD]


def _idle(lab: Lab, reading: str, lengths: Sequence[int], slot_of_shortest: bool = False) -> dict[str, Any]:
    ran = _ran(lab, f"drain-idle-{'-'.join(reading.replace(',', '').split())}", lengths, len(lengths), "static")
    share = 1 - min(lengths) / ran.stats.num_steps if slot_of_shortest else ran.idle_share
    return {"reading": reading, **ran.facts(), "shortest": min(lengths), "longest": max(lengths),
            "idle_percent": 100 * share}


def _idle_claim(facts: Mapping[str, Any]) -> Claim:
    return Claim(
        what=f"idle of {facts['reading']}: {facts['shortest']} and {facts['longest']} tokens", kind="S",
        published=PUBLISHED_IDLE, ours=facts["idle_percent"], unit="%",
        definition="slot-steps without a row in one static batch whose longest member has 700 tokens more than its "
        f"shortest; all slots of B idle less than 1 - 1/B, so 91 % takes at least {least_slots(PUBLISHED_IDLE)} slots, "
        "and evenly spread lengths idle less than half",
        weakest="what the 91 % is a share of is not said there: a slot or a batch")
