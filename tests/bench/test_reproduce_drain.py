"""A batch that drains: what refilling its slots saves, by lengths and slots."""

from __future__ import annotations

import pytest

from paceline.bench.reproduce import drain, laws
from paceline.bench.reproduce.lab import Lab
from paceline.build import build_scheduler

LAB = Lab(build_scheduler)


def test_ten_slots_of_exponential_lengths_are_expected_to_give_2_93() -> None:
    assert drain.expected(10) == pytest.approx(2.9289682539682538, abs=0)


def test_the_scheduler_on_ten_slots_of_exponential_lengths() -> None:
    static, continuous = (drain.run(LAB, "exponential", 10, regime) for regime in ("static", "continuous"))
    lengths = laws.lengths("exponential", drain.MEAN, drain.NUM_REQUESTS, seed=10)
    assert static["steps"] == sum(max(lengths[at : at + 10]) for at in range(0, len(lengths), 10)) == 18_110
    assert static["output_tokens"] == sum(lengths) == continuous["output_tokens"] == 61_430
    assert static["slot_steps"] / static["output_tokens"] == 181_100 / 61_430    # 2.948
    assert static["steps"] / continuous["steps"] == 18_110 / 6_222               # 2.911


def test_padding_costs_rows_and_no_step() -> None:
    static, padded = (drain.run(LAB, "exponential", 10, regime, num_requests=160) for regime in ("static", "hf-like"))
    assert padded["steps"] == static["steps"]
    assert static["rows_computed"] == static["output_tokens"] < padded["rows_computed"] == padded["slot_steps"]


def test_uniform_lengths_never_save_half() -> None:
    static = drain.run(LAB, "uniform", 32, "static", num_requests=320)
    assert 1.9 < static["slot_steps"] / static["output_tokens"] < 2


def test_equal_lengths_save_nothing() -> None:
    assert drain.run(LAB, "fixed", 8, "static", num_requests=80)["idle_slot_steps"] == 0


def test_91_percent_idle_at_a_spread_of_700_is_one_slot_or_twelve() -> None:
    idle = {run["reading"]: (run["shortest"], run["longest"], round(run["idle_percent"], 1))
            for run in drain.idle_readings(LAB)}
    assert idle == {
        "the slot of the shorter of two": (69, 769, 91.0),
        "all slots, one of 8 long": (1, 701, 87.4),
        "all slots, one of 12 long": (5, 705, 91.0),
        "all slots, one of 16 long": (21, 721, 91.0),
        "all slots, one of 32 long": (45, 745, 91.0),
        "all slots, lengths spread evenly": (1, 701, 49.9),
    }


def test_what_the_schedule_leaves_of_3_86_is_no_claim_of_ours() -> None:
    assert drain.LEFT.kind == "K" and drain.LEFT.ours is None
    assert round(float(drain.LEFT.published or 0), 2) == 1.33


@pytest.mark.parametrize("law", sorted(laws.LAWS))
def test_a_law_has_its_mean_and_repeats(law: str) -> None:
    drawn = laws.drawn(law, 100.0, 2000)
    assert sum(drawn) / len(drawn) == pytest.approx(100.0, rel=0.02)
    assert drawn == laws.drawn(law, 100.0, 2000)
    assert law == "fixed" or drawn != sorted(drawn)
