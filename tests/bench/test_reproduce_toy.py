"""Eight requests on four slots: which figures come out of the real scheduler under which reading."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.reproduce import toy
from paceline.bench.reproduce.claims import Reproduction
from paceline.bench.reproduce.lab import Lab
from paceline.build import build_policies, build_scheduler
from paceline.engine.replay import Journaled, Replay


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> Reproduction:
    return toy.reproduce(Lab(build_scheduler, tmp_path_factory.mktemp("toy")))


def runs(found: Reproduction, reading: str, regime: str) -> list[dict[str, Any]]:
    return [run for run in found.runs if (run["reading"], run["regime"]) == (reading, regime)]


def figures(found: Reproduction, reading: str, regime: str) -> set[tuple[int, int, int]]:
    """(all steps, idle slot-steps, slot-steps they are a share of) of every list."""
    return {(run["all_steps"], run["idle_slot_steps"], run["slot_steps"]) for run in runs(found, reading, regime)}


@pytest.mark.parametrize("reading, static, continuous", [
    ("A", (21, 36, 84), (12, 0, 48)),
    ("B", (14 + 18, 24, 56), (8 + 18, 0, 32)),
    ("C", (24 + 8, 24, 96), (18 + 8, 0, 72)),
    ("D", (32, 24, 128), (26, 0, 104)),
    ("E", (32, 55, 128), (26, 0, 104)),
])
def test_every_list_of_a_reading_gives_its_figures(
        found: Reproduction, reading: str, static: tuple[int, int, int], continuous: tuple[int, int, int]) -> None:
    assert figures(found, reading, "static") == {static}
    assert figures(found, reading, "continuous") == {continuous}


def test_the_static_idle_share_is_told_unrounded(found: Reproduction) -> None:
    (claim,) = (claim for claim in found.claims if claim.what == "A: static, idle")
    assert claim.ours == 100 * 36 / 84 == pytest.approx(42.857142857142854, abs=0)
    assert (claim.published, claim.kind, claim.unit) == (42.9, "S", "%")


def test_no_run_of_32_steps_on_4_slots_idles_42_9_percent() -> None:
    assert toy.prints_as("42.9", 4 * 32) == []
    assert toy.prints_as("43.0", 4 * 32) == [55] and toy.prints_as("42.2", 4 * 32) == [54]


def test_a_share_that_prints_as_42_9_percent_is_three_sevenths() -> None:
    for num_slot_steps in range(4, 151, 4):
        idle = toy.prints_as("42.9", num_slot_steps)
        assert idle == ([num_slot_steps * 3 // 7] if num_slot_steps % 28 == 0 else [])


def test_the_journal_of_every_run_replays(found: Reproduction) -> None:
    for run in found.runs:
        assert Replay(Journaled.read(run["journal"]), build_scheduler, build_policies).run().difference is None


def test_the_chart_shows_each_slot_at_each_step(found: Reproduction) -> None:
    static = found.text[0].splitlines()
    assert static == ["A, static: lengths 7 2 12 3 | 2 9 8 5 (21 steps)",
                      "  slot 1 |1111111.....55.......|",
                      "  slot 2 |22..........666666666|",
                      "  slot 3 |33333333333377777777.|",
                      "  slot 4 |444.........88888....|"]
    with_prompts = next(text for text in found.text if text.startswith("C, continuous"))
    assert with_prompts.count("#") == 8
    assert re.findall(r"\|(.*)\|", with_prompts)[0] == "#---111111-111--111#888888"


def test_the_picture_has_a_cell_for_each_slot_and_step(found: Reproduction) -> None:
    picture = ET.parse(Path(runs(found, "A", "static")[0]["picture"]))
    cells = picture.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(cells) == 4 * 21
    assert sum(cell.get("class") == "idle" for cell in cells) == 36
