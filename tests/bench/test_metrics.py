"""Every figure of a cell against arithmetic done by hand. Times are sums of powers of two, so equality is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import metrics
from paceline.bench.metrics import CellFacts, interval, over_repeats, summarise
from paceline.bench.records import RequestRecord
from paceline.bench.slo import slo_table
from paceline.errors import ConfigError


def record(number: int = 0, **fields: Any) -> RequestRecord:
    """Wanted at 1, sent at 1.5, tokens at 2, 2.25 and 3, over at 3.25."""
    told: dict[str, Any] = {
        "request_id": f"r{number}", "cell": "c", "status": "ok", "intended_at": 1.0, "released_at": 1.5, "sent_at": 1.5,
        "token_times": (2.0, 2.25, 3.0), "token_counts": (1, 1, 1), "ended_at": 3.25, "asked_output_tokens": 3,
        "output_tokens": 3, "asked_prompt_tokens": 10, "prompt_tokens": 12, "finish_reason": "length"}
    return RequestRecord(**told | fields)


def cell(**fields: Any) -> CellFacts:
    return CellFacts(name="c", **fields)


def only(facts: dict[str, Any], name: str) -> float:
    """The value of a statistic over one."""
    assert facts[name]["n"] == 1 and facts[name]["p50"] == facts[name]["max"] == facts[name]["mean"]
    return float(facts[name]["p50"])


def test_our_clock_starts_when_the_request_was_wanted_and_service_time_when_it_was_sent() -> None:
    facts = summarise([record()], cell())
    assert only(facts, "ttft_seconds") == 1.0 and only(facts, "service_ttft_seconds") == 0.5
    assert only(facts, "e2e_seconds") == 2.25 and only(facts, "service_e2e_seconds") == 1.75
    assert only(facts, "tpot_seconds") == 0.5 and only(facts, "normalised_latency_seconds") == 0.75
    assert only(facts, "itl_mean_per_request_seconds") == 0.5 and only(facts, "itl_max_per_request_seconds") == 0.75
    assert facts["itl_pooled_seconds"]["n"] == 2 and facts["itl_pooled_seconds"]["p50"] == 0.5


def test_the_same_request_in_the_words_of_other_tools() -> None:
    vllm = summarise([record()], cell(definitions="vllm"))
    assert [only(vllm, name) for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds")] == [0.5, 0.5, 1.5]
    assert vllm["itl_seconds"]["n"] == 2 and vllm["throughput"]["window_seconds"] == 1.75
    guide = summarise([record()], cell(definitions="guidellm"))
    assert [only(guide, name) for name in ("ttft_seconds", "tpot_seconds", "itl_seconds")] == [0.5, 0.5, 0.5]
    assert guide["tpot_seconds"]["p50"] == (3.0 - 1.5) / 3
    aiperf = summarise([record()], cell(definitions="aiperf"))
    assert only(aiperf, "itl_seconds") == 0.5 and aiperf["icl_seconds"]["n"] == 2 and "tpot_seconds" not in aiperf


@pytest.mark.parametrize("name", sorted(metrics.DEFINITIONS))
def test_every_figure_carries_its_formula(name: str) -> None:
    facts = summarise([record()], cell(definitions=name, slos=slo_table(["ttft=1"])))
    for section in (*(key for key in facts if key.endswith("_seconds")), "throughput", "goodput", "lengths",
                    "cache_hit_rate", "preemptions", "client"):
        assert facts[section]["definition"], section


def test_pooling_lets_long_answers_weigh_more_and_one_value_a_request_does_not() -> None:
    long = record(1, token_times=tuple(2.0 + 0.25 * i for i in range(9)), token_counts=(1,) * 9, output_tokens=9)
    facts = summarise([record(0, token_times=(2.0, 3.0), token_counts=(1, 1), output_tokens=2), long], cell())
    assert facts["itl_pooled_seconds"]["p50"] == 0.25 and facts["itl_mean_per_request_seconds"]["p50"] == 0.625
    assert "POOLED" in facts["itl_pooled_seconds"]["definition"]


def test_a_chunk_is_not_a_token() -> None:
    chunked = record(token_times=(2.0, 3.0), token_counts=(4, 5), output_tokens=9, asked_output_tokens=9)
    facts = summarise([chunked], cell())
    assert only(facts, "tpot_seconds") == 1.0 / 8 and facts["lengths"]["tokens_per_chunk"] == 4.5
    assert facts["throughput"]["output_tokens_per_second"] == 9 / 2.25


def test_throughput_counts_from_the_first_wish_to_the_last_answer_and_steady_only_while_the_load_was_whole() -> None:
    second = record(1, intended_at=2.0, released_at=2.0, sent_at=2.5, token_times=(4.0, 4.25, 5.0), ended_at=5.0)
    facts = summarise([record(), second], cell())["throughput"]
    assert facts["window_seconds"] == 4.0 and facts["requests_per_second"] == 0.5
    assert (facts["output_tokens_per_second"], facts["total_tokens_per_second"]) == (6 / 4, 30 / 4)
    assert facts["steady_output_tokens_per_second"] == 2 / 1.0    # at 2.0 and 2.25, of the sends at 1.5 and 2.5
    assert summarise([record()], cell())["throughput"]["steady_output_tokens_per_second"] is None


def test_goodput_asks_for_all_limits_of_a_requests_class_and_counts_failures_as_missed() -> None:
    slos = slo_table(["ttft=1s,tpot=500ms", "batch:e2e=10"])
    slow = record(1, token_times=(2.25, 2.5, 3.0))
    records = [record(), slow, record(2, status="dropped", token_times=()), record(3, slo="batch", intended_at=-5.0)]
    facts = summarise(records, cell(slos=slos))["goodput"]
    assert (facts["met"], facts["asked"], facts["share"]) == (2, 4, 0.5)
    assert facts["requests_per_second"] == 2 / 8.25
    assert facts["by_class"] == {"all": {"met": 1, "asked": 3}, "batch": {"met": 1, "asked": 1}}
    assert facts["missed_by"] == {"failed": 1, "ttft": 1}


def test_one_token_has_no_tpot_and_keeps_its_limit() -> None:
    short = record(token_times=(2.0,), token_counts=(1,), output_tokens=1)
    facts = summarise([short], cell(slos=slo_table(["tpot=0.001"])))
    assert facts["tpot_seconds"]["n"] == 0 and facts["tpot_seconds"]["p50"] is None
    assert facts["goodput"]["met"] == 1


def test_failures_are_counted_by_kind_with_the_first_one_s_words_and_have_no_latency() -> None:
    refused = record(1, status="refused", error="queue is full", token_times=(), ended_at=1.6)
    cut = record(2, status="dropped", error="after 1 of 3 tokens")
    facts = summarise([record(), refused, cut, record(3, is_warm_up=True)], cell())
    assert facts["requests"]["errors"] == {"dropped": {"count": 1, "first": "after 1 of 3 tokens"},
                                           "refused": {"count": 1, "first": "queue is full"}}
    assert (facts["requests"]["measured"], facts["requests"]["ok"], facts["requests"]["warm_up_excluded"]) == (3, 1, 1)
    assert facts["ttft_seconds"]["n"] == 1


def test_lengths_are_told_as_asked_and_as_achieved() -> None:
    stopped = record(1, output_tokens=1, asked_output_tokens=5, token_times=(2.0,), token_counts=(1,))
    facts = summarise([record(), stopped], cell())["lengths"]
    assert (facts["prompt_asked_mean"], facts["prompt_achieved_mean"]) == (10, 12)
    assert (facts["output_asked_mean"], facts["output_achieved_mean"], facts["output_other_than_asked"]) == (4, 2, 1)


def test_the_hit_rate_is_that_of_the_answers_else_of_the_server_s_counters_else_unknown() -> None:
    told = summarise([record(cached_tokens=6), record(1, cached_tokens=0)], cell(server_cache=(1, 1)))
    assert told["cache_hit_rate"]["value"] == 0.25
    assert summarise([record()], cell(server_cache=(3, 12)))["cache_hit_rate"]["value"] == 0.25
    assert summarise([record()], cell())["cache_hit_rate"]["value"] is None


@pytest.mark.parametrize(("delay", "lags", "share", "fault"), [
    (0.005, [0.005], 0.9, None), (0.0051, [0.0], 0.1, "schedule delay"), (0.0, [0.0051], 0.1, "event loop lag"),
    (0.0, [0.0, 0.001, 0.5], 0.1, None), (0.0, [0.0], 0.91, "a core")])
def test_a_client_that_was_late_or_busy_makes_the_cell_invalid_and_the_verdict_says_by_which_bound(
        delay: float, lags: list[float], share: float, fault: str | None) -> None:
    late = record(intended_at=0.0, released_at=0.0, sent_at=delay, token_times=(delay + 0.25,), token_counts=(1,))
    facts = summarise([late], cell(loop_lags=lags, loop_core_share=share))["client"]
    assert facts["is_valid"] is (fault is None) and facts["bound_seconds"] == 0.005
    assert (fault or "valid") in facts["verdict"] and facts["loop_lag_seconds"]["max"] == max(lags)


def test_with_slow_answers_the_bound_is_one_percent_of_their_ttft() -> None:
    late = record(intended_at=0.0, released_at=None, sent_at=0.0625, token_times=(8.0625,), token_counts=(1,))
    facts = summarise([late], cell())["client"]
    assert facts["is_valid"] and facts["bound_seconds"] == 0.08


def test_waiting_for_the_cap_is_the_load_s_doing_and_not_the_client_s() -> None:
    facts = summarise([record(intended_at=0.0, released_at=1.5)], cell())["client"]
    assert facts["schedule_delay_seconds"]["max"] == 0.0 and facts["is_valid"]


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=200))
def test_percentiles_are_those_of_numpy_and_say_when_they_rest_on_too_few(values: list[float]) -> None:
    facts = metrics.statistics(values, "x")
    assert facts["p95"] == float(np.percentile(values, 95)) and facts["std"] == float(np.std(values))
    assert ("p99" in facts["weak"]) == (len(values) < 100) and ("p50" in facts["weak"]) == (len(values) < 2)


def test_repeats_become_a_mean_with_its_interval() -> None:
    facts = interval([1.0, 2.0, 3.0])
    assert facts["mean"] == 2.0 and facts["half_width_95"] == pytest.approx(4.303 / 3**0.5, rel=1e-12)
    assert interval([1.0])["half_width_95"] is None
    summaries = [summarise([record(ended_at=end)], cell()) for end in (3.25, 4.25)]
    assert over_repeats(summaries)["e2e_seconds.p50"]["mean"] == 2.75
    assert "goodput.share" not in over_repeats(summaries)


def test_a_cell_in_which_nothing_went_well_still_has_its_figures() -> None:
    facts = summarise([record(status="unreachable", sent_at=None, token_times=(), ended_at=None)], cell())
    assert facts["requests"]["failed"] == 1 and facts["throughput"]["requests_per_second"] is None


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "speed=1", "ttft=1,ttft=2", "ttft=-1", "a:b=1"])
def test_a_limit_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="slo"):
        slo_table([text])


def test_a_class_has_one_set_of_limits() -> None:
    with pytest.raises(ConfigError, match="chat is given twice"):
        slo_table(["chat:ttft=1", "chat:ttft=2"])
