"""What the Azure traces give: from the scheduler as from arithmetic, and from arithmetic as published."""

from __future__ import annotations

import pytest

from paceline.bench.reproduce import azure
from paceline.bench.reproduce.lab import Lab
from paceline.build import build_scheduler

LAB = Lab(build_scheduler)
CELLS = [(trace, num_slots) for trace, by_slots in azure.PUBLISHED.items() for num_slots in by_slots]


@pytest.mark.parametrize("trace, num_slots", CELLS)
def test_the_arithmetic_prints_what_was_published(trace: str, num_slots: int) -> None:
    lengths = azure.lengths_of(trace, num_slots, None)
    static, continuous = azure.static_steps(lengths, num_slots), azure.continuous_steps(lengths, num_slots)
    idle, speed_up = azure.PUBLISHED[trace][num_slots]
    assert round(100 * (1 - sum(lengths) / (num_slots * static)), 1) == idle
    assert round(static / continuous, 2) == speed_up


def test_the_conversations_on_four_slots_are_told_to_the_slot_step() -> None:
    lengths = azure.lengths_of("azure-conv-2023", 4, None)
    assert (sum(lengths), 4 * azure.static_steps(lengths, 4)) == (4_088_048, 7_162_904)


@pytest.mark.parametrize("trace, num_slots, num_requests", [
    ("azure-conv-2023", 4, 100), ("azure-conv-2023", 32, 160), ("azure-code-2023", 16, 800)])
@pytest.mark.parametrize("regime", list(azure.REGIMES))
def test_the_scheduler_takes_the_steps_that_the_arithmetic_says(
        trace: str, num_slots: int, num_requests: int, regime: str) -> None:
    run = azure.run(LAB, trace, num_slots, regime, num_requests)
    assert run["steps"] == run["steps_by_formula"]
    assert run["output_tokens"] == sum(azure.lengths_of(trace, num_slots, num_requests))


def test_the_whole_code_trace_on_32_slots_by_the_scheduler() -> None:
    run = azure.run(LAB, "azure-code-2023", 32, "continuous")
    assert (run["steps"], run["output_tokens"], run["requests"]) == (8_328, 245_291, 8_800)
    static_steps = azure.static_steps(azure.lengths_of("azure-code-2023", 32, None), 32)
    assert round(static_steps / run["steps"], 2) == 7.59


def test_cells_run_in_processes_of_their_own_and_claims_come_in_order() -> None:
    told: list[str] = []
    found = azure.reproduce(LAB, ["azure-code-2023"], [4, 8], 16, told.append)
    assert [claim.published for claim in found.claims] == [59.0, 2.44, None, None, 73.2, 3.7, None, None]
    assert [(run["slots"], run["steps"] == run["steps_by_formula"]) for run in found.runs] == [
        (4, True), (4, True), (8, True), (8, True)]
    assert len(told) == 4 and found.text == [azure.ATTRIBUTION]
