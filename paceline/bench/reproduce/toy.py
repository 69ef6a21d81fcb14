"""Eight requests on four slots: "static 32 steps, 42.9 % idle; continuous 26 steps, 0 % idle".

The article gives no lengths. Its figures cannot all hold under one plain definition of a step, so each reading here
says what it counts, and which of the figures come out under it. Every run is the real scheduler's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .claims import Claim, Reproduction
from .lab import Cell, Lab, request
from .slot_chart import SlotChart

SLOTS = 4
PUBLISHED_STEPS = {"static": 32, "continuous": 26}
PUBLISHED_IDLE = {"static": 42.9, "continuous": 0.0}
PROMPT_TOKENS = 8    # of reading C, with a budget that lets one prompt run in a step
# A whole prompt stops the decodes in both regimes: then a prompt's pass is a step of its own.
KNOBS: dict[str, dict[str, Any]] = {
    "static": {"regime": "static", "max_num_seqs": SLOTS},
    "continuous": {"regime": "continuous", "max_num_seqs": SLOTS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """lists: lengths of eight requests in order of arrival; the first one is drawn. num_extra_steps: steps that both
    regimes are taken to spend without decoding, added to the scheduler's. idle: which slot-steps are counted."""

    name: str
    lists: Sequence[tuple[int, ...]]
    counts: str
    weakest: str
    has_prompt_passes: bool = False
    num_extra_steps: int = 0
    idle: str = "all"    # all, or "waiting": only while a request waits


READINGS = (
    Reading(
        name="A", lists=((7, 2, 12, 3, 2, 9, 8, 5), (3, 3, 4, 12, 4, 9, 8, 5), (4, 3, 12, 5, 9, 8, 4, 3)),
        counts="a step gives each request that runs one token; lengths 2 to 12; nothing else is a step",
        weakest="the step counts are not the published 32 and 26, which no list of these lengths gives without further "
                "steps"),
    Reading(
        name="B", lists=((2, 3, 8, 4, 6, 5, 2, 2), (8, 5, 2, 2, 2, 6, 4, 3), (3, 4, 2, 8, 6, 5, 2, 2)),
        num_extra_steps=18,
        counts="a step gives each request that runs one token; both regimes spend 18 more steps, in which no slot is "
               "counted",
        weakest="what the 18 steps would be is not known: they are solved for, not measured"),
    Reading(
        name="C", lists=((12, 6, 9, 9, 12, 9, 9, 6), (6, 12, 12, 6, 12, 12, 6, 6), (11, 12, 6, 8, 12, 10, 7, 6)),
        has_prompt_passes=True,
        counts="each request's prompt is a step of its own in which the others wait, then a step gives each request "
               "one token; idle slots are counted over the decode steps",
        weakest="the static idle share is 25 %, and no request may be shorter than 6"),
    Reading(
        name="D", lists=((15, 12, 17, 11, 15, 14, 11, 9), (13, 10, 10, 7, 19, 16, 16, 13)),
        counts="a step gives each request that runs one token; lengths 7 to 19; nothing else is a step",
        weakest="the static idle share is 18.75 %"),
    Reading(
        name="E", lists=((2, 4, 17, 6, 14, 7, 8, 15), (2, 8, 4, 14, 3, 7, 17, 18)), idle="waiting",
        counts="a step gives each request that runs one token; the continuous run's idle slots count only while a "
               "request waits",
        weakest="55 of 128 is 42.96875 %, which prints as 43.0 %; the two regimes are not counted alike"),
)
PROOF = (
    "idle slot-steps are whole numbers: over 4 slots and 32 steps a share moves by 1/128, the two next to 42.9 % being "
    "54/128 = 42.1875 % and 55/128 = 42.96875 %, printed 42.2 and 43.0; shares that print as 42.9 % over at most 150 "
    "slot-steps of 4 slots are all 3/7, that is 7, 14, 21, 28 or 35 steps")


def prints_as(percent: str, num_slot_steps: int) -> list[int]:
    """Numbers of idle slot-steps whose share, with as many decimals, prints as this percentage."""
    decimals = len(percent.partition(".")[2])
    return [idle for idle in range(num_slot_steps + 1) if f"{100 * idle / num_slot_steps:.{decimals}f}" == percent]


def reproduce(lab: Lab) -> Reproduction:
    claims: list[Claim] = [Claim(
        what="ways to have 42.9 % idle over 4 slots x 32 steps", kind="S", published=None,
        ours=len(prints_as("42.9", SLOTS * PUBLISHED_STEPS["static"])), unit="", definition=PROOF,
        weakest="it takes the published share to be of all slots and all 32 steps")]
    runs: list[dict[str, Any]] = []
    charts: list[str] = []
    for reading in READINGS:
        for number, lengths in enumerate(reading.lists):
            for regime in KNOBS:
                run, chart = _run(lab, reading, number, lengths, regime)
                runs.append(run)
                if number == 0:
                    claims += _claims(reading, run)
                    charts.append(chart)
    return Reproduction(name="toy", claims=claims, runs=runs, text=charts)


def _run(lab: Lab, reading: Reading, number: int, lengths: Sequence[int], regime: str) -> tuple[dict[str, Any], str]:
    """The facts of one list under one regime, and its chart."""
    name = f"toy-{reading.name}{number + 1}-{regime}"
    chart = SlotChart(SLOTS)
    ran = lab.run(_cell(reading, name, lengths, regime), [chart])
    if reading.idle == "waiting" and regime == "continuous":
        num_idle = chart.num_idle_while_waiting
    else:
        num_idle = chart.num_idle_in_decode
    num_slot_steps = SLOTS * chart.num_decode_steps
    first, second = (" ".join(map(str, half)) for half in (lengths[:SLOTS], lengths[SLOTS:]))
    title = f"{reading.name}, {regime}: lengths {first} | {second}"
    picture = lab.write(f"{name}.svg", chart.svg(title))
    facts = {
        "reading": reading.name, "regime": regime, "lengths": list(lengths), "steps": ran.stats.num_steps,
        "extra_steps": reading.num_extra_steps, "all_steps": ran.stats.num_steps + reading.num_extra_steps,
        "decode_steps": chart.num_decode_steps, "slot_steps": num_slot_steps, "idle_slot_steps": num_idle,
        "idle_percent": 100 * num_idle / num_slot_steps, "journal": ran.journal, "picture": picture}
    return facts, chart.text(title)


def _cell(reading: Reading, name: str, lengths: Sequence[int], regime: str) -> Cell:
    if reading.has_prompt_passes:    # the pass gives a token too, so that one more is asked for
        requests = [request(number, length + 1, (2,) * PROMPT_TOKENS) for number, length in enumerate(lengths)]
        knobs = KNOBS[regime] | {"max_num_batched_tokens": PROMPT_TOKENS, "chunking": "whole"}
    else:
        requests = [request(number, length) for number, length in enumerate(lengths)]
        knobs = KNOBS[regime] | {"chunking": "fixed"}
    longest = max(lengths) + PROMPT_TOKENS + 1
    return Cell(name=name, preset="static", knobs=knobs, requests=requests, num_blocks=SLOTS, block_size=longest,
                max_model_len=longest)


def _claims(reading: Reading, run: Mapping[str, Any]) -> list[Claim]:
    regime = run["regime"]
    steps = Claim(
        what=f"{reading.name}: {regime}, steps", kind="S", published=PUBLISHED_STEPS[regime], ours=run["all_steps"],
        unit="steps", definition=reading.counts, weakest=reading.weakest)
    idle = Claim(
        what=f"{reading.name}: {regime}, idle", kind="S", published=PUBLISHED_IDLE[regime], ours=run["idle_percent"],
        unit="%", definition=reading.counts, weakest=reading.weakest)
    return [steps, idle]
