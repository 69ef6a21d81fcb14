"""Ratios of paired rounds, and the finding that is made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bench.comparison import Comparison, Load
from paceline.bench.findings import advantage, find, ranked
from paceline.bench.ratios import E2E_P50, LATENCIES, QUANTITIES, THROUGHPUT, paired_ratio, ratio, spread
from tests.bench.synthetic import NUM_REQUESTS, cell, clients, comparison, two

RATES = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=8)


@settings(deadline=None)
@given(RATES, st.floats(0.01, 100.0))
def test_a_constant_factor_is_told_exactly_and_without_doubt(rates: list[float], factor: float) -> None:
    found = paired_ratio([factor * rate for rate in rates], rates)
    assert found.value == pytest.approx(factor)
    if len(rates) > 1:
        assert (found.low, found.high) == (pytest.approx(factor), pytest.approx(factor))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 100.0), st.floats(0.1, 100.0)), min_size=2, max_size=8))
def test_an_interval_lies_within_the_rounds_and_around_the_ratio(rounds: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*rounds, strict=True)
    found = paired_ratio(ours, theirs)
    single = [one / other for one, other in rounds]
    assert found.low is not None and found.high is not None
    assert min(single) * (1 - 1e-9) <= found.low <= found.value * (1 + 1e-9)
    assert found.value * (1 - 1e-9) <= found.high <= max(single) * (1 + 1e-9)


def test_pairing_takes_out_what_changed_for_both() -> None:
    machine = np.array([1.0, 3.0, 0.5, 2.0, 1.2])    # a machine that is not steady
    found = paired_ratio(1.25 * machine, machine)
    assert found.low == pytest.approx(1.25) and found.is_told_apart


def test_one_round_has_no_interval_and_tells_nobody_apart() -> None:
    found = paired_ratio([2.0], [1.0])
    assert (found.value, found.low, found.high, found.is_told_apart) == (2.0, None, None, False)


def test_the_same_rounds_give_the_same_interval() -> None:
    assert paired_ratio([1.0, 2.0, 3.0], [2.0, 2.0, 2.5]) == paired_ratio([1.0, 2.0, 3.0], [2.0, 2.0, 2.5])


def test_rounds_that_only_one_has_do_not_count() -> None:
    both = two(rounds=2)
    lost = replace(both, cells=[one for one in both.cells if (one.contestant, one.round) != ("fast", 2)])
    found = ratio(lost, ("fast", "slow"), clients(4), THROUGHPUT)
    assert found is not None and found.count == 1


def test_a_round_that_ended_early_does_not_count() -> None:
    both = two(rounds=2)
    cells = [replace(one, trouble="interrupted") if one.round == 2 else one for one in both.cells]
    assert spread(replace(both, cells=cells), "fast", clients(4), THROUGHPUT).count == 1    # type: ignore[union-attr]


# --- the finding

def test_the_finding_names_the_leader_its_lead_and_its_weakest_condition() -> None:
    found = find(two(slow=2.0, fast=1.0))
    assert found.winner == "fast"
    assert found.lead.startswith("At 4 clients fast gave the most output tokens per second, 11: 2.00× slow's")
    assert found.weakest.startswith("Its weakest condition: ") and "its lead is least" in found.weakest


def test_the_numbers_of_the_finding_are_those_of_the_records() -> None:
    both = two(slow=3.0, fast=2.0)
    said = find(both).numbers
    cells = [one for one in both.cells if one.contestant == "fast" and one.load == clients(4)]
    tokens = [sum(record.output_tokens or 0 for record in one.records) for one in cells]
    seconds = [max(record.ended_at or 0.0 for record in one.records) - min(record.intended_at for record in one.records)
               for one in cells]
    assert said["value"] == pytest.approx(np.mean([count / time for count, time in zip(tokens, seconds, strict=True)]))
    assert said["leads"]["slow"]["ratio"] == pytest.approx(1.5)


def test_a_leader_that_is_worse_in_some_figure_says_so() -> None:
    """More throughput, but nobody waits as long for a first token."""
    late = {"token_times": tuple(0.9 + 0.01 * index for index in range(11)), "ended_at": 1.0}
    cells = [one for number in (1, 2) for one in (cell("steady", clients(2), number, 2.0), replace(
        cell("bursty", clients(2), number, 1.0), records=[
            replace(record, intended_at=-0.5, sent_at=-0.5, **late)
            for record in cell("bursty", clients(2), number, 1.0).records]))]
    found = find(comparison(cells))
    assert found.winner == "bursty"
    assert "TTFT" in found.weakest and "as long" in found.weakest


def test_an_open_loop_is_judged_by_latency() -> None:
    load = Load(value=2.0, unit="requests/s")
    cells = [cell(name, load, number, seconds) for number in (1, 2) for name, seconds in (("slow", 2.0), ("fast", 1.0))]
    found = find(comparison(cells))
    assert "median time to a whole answer, 1 s: 2.00× slow's" in found.lead.replace("shortest ", "")
    assert found.numbers["quantity"] == E2E_P50.key


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda one: one.key)
def test_an_advantage_above_one_is_better_whichever_way_the_quantity_counts(quantity: Any) -> None:
    both = two(slow=2.0, fast=1.0)
    found = advantage(both, ("fast", "slow"), clients(4), quantity)
    assert found is not None and found.value == pytest.approx(2.0)
    assert ranked(both, clients(4), quantity) == ["fast", "slow"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)), min_size=1, max_size=5))
def test_whoever_is_said_to_lead_leads_by_the_ratio_too(rounds: list[tuple[float, float]]) -> None:
    """Also where rounds differ so much that their plain means would say otherwise."""
    cells = [cell(name, clients(2), number, seconds) for number, both in enumerate(rounds, 1)
             for name, seconds in zip(("one", "other"), both, strict=True)]
    first, second = ranked(comparison(cells), clients(2), THROUGHPUT)
    lead = advantage(comparison(cells), (first, second), clients(2), THROUGHPUT)
    assert lead is not None and lead.value >= 1 - 1e-9


def test_nothing_measured_is_no_finding() -> None:
    bad = comparison([cell("one", clients(2), 1, 1.0, status="dropped", error="the connection broke")])
    assert find(bad).winner is None and "Nothing was measured" in find(bad).lead


# --- what is said beside it

def caveats(one: Comparison) -> str:
    return "\n".join(find(one).caveats)


def test_few_rounds_and_few_requests_are_told() -> None:
    assert "One round" in caveats(two(rounds=1))
    assert "no 95% intervals" in caveats(two(rounds=3))
    assert "rounds" not in caveats(two(rounds=5))
    assert f"{NUM_REQUESTS} requests a cell" in caveats(two())


def test_unequal_cache_hits_are_not_passed_over() -> None:
    cells = [cell("cold", clients(2), 1, 1.0), cell("warm", clients(2), 1, 1.0, cached_tokens=25)]
    assert "cached unequally, 0% (cold) to 50% (warm)" in caveats(comparison(cells))
    assert "cached" not in caveats(two())


def test_answers_of_other_lengths_are_told() -> None:
    cells = [cell("whole", clients(2), 1, 1.0), cell("short", clients(2), 1, 1.0, output_tokens=5)]
    assert "answers were not equally long, 5 tokens (short) to 11 (whole)" in caveats(comparison(cells))


def test_failures_come_with_the_first_error() -> None:
    cells = [cell("good", clients(2), 1, 1.0), cell("bad", clients(2), 1, 1.0)]
    bad = replace(cells[1].records[3], status="dropped", error="after 4 chunks: reset")
    cells[1] = replace(cells[1], records=[*cells[1].records[:3], bad, *cells[1].records[4:]])
    assert "bad at 2 clients in round 1: 1 dropped of 8 requests; the first: after 4 chunks: reset" in caveats(
        comparison(cells))


def test_a_client_that_was_the_bottleneck_makes_a_cell_invalid() -> None:
    late = cell("one", clients(2), 1, 1.0)
    late = replace(late, facts=replace(late.facts, loop_lags=[0.2] * 100))
    said = caveats(comparison([late]))
    assert "Do not quote one at 2 clients (1 of 1 rounds): INVALID: the client was a bottleneck" in said


def test_a_machine_that_changed_is_told() -> None:
    def calibrated(*rates: float) -> Comparison:
        rounds = [{"memory_gb_per_second": rate, "gflop_per_second": 50.0} for rate in rates]
        return two(setup={"calibration": {"rounds": rounds}})

    assert "calibration before the rounds read 20 to 37 GB/s of memory" in caveats(calibrated(20.0, 37.0))
    assert "calibration" not in caveats(calibrated(36.0, 37.0))


def test_other_kv_budgets_and_other_doors_are_told() -> None:
    both = two()
    sizes = zip(both.contestants, (4096, 1024), strict=True)
    big, small = (replace(one, facts={"kv_tokens": size}) for one, size in sizes)
    assert "KV memory differs: slow 4,096 tokens, fast 1,024 tokens" in caveats(replace(both, contestants=[big, small]))
    over_http = replace(both, contestants=[big, replace(small, kind="peer")])
    assert "ran in process, without HTTP and text" in caveats(over_http)


def test_an_early_end_is_told() -> None:
    assert "ended early: 4 of 8 cells" in caveats(replace(two(rounds=1), num_rounds_asked=2))


def test_no_latency_is_left_out_of_the_search_for_weakness() -> None:
    assert {one.key for one in LATENCIES} == {
        f"{name}_{figure}" for name in ("ttft", "tpot", "e2e") for figure in ("p50", "p99")}
