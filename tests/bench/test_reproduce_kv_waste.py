"""KV memory that reservations waste: exact figures of a small load, and an allocator that is used by the lab alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.bench.reproduce import kv_waste
from paceline.bench.reproduce.lab import Lab
from paceline.build import build_policies, build_scheduler
from paceline.engine.replay import Journaled, Replay

NUM_REQUESTS, KV_TOKENS = 20, 4096

# (allocator, in one piece): steps of the burst, preemptions.
STEPS = {
    ("blocks of 16", False): (1248, 14),
    ("max", False): (3368, 0),
    ("pow2", False): (2149, 0),
    ("oracle", False): (1786, 0),
    ("max", True): (3368, 0),
    ("pow2", True): (2776, 0),
    ("oracle", True): (2174, 0),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> dict[tuple[str, bool], dict[str, Any]]:
    found = kv_waste.reproduce(Lab(build_scheduler, tmp_path_factory.mktemp("kv")), NUM_REQUESTS, KV_TOKENS)
    return {(run["allocator"], run["in_one_piece"]): run for run in found.runs}


def test_the_allocators_come_in_their_order(runs: dict[tuple[str, bool], dict[str, Any]]) -> None:
    use = {key: run["use_of_budget_percent"] for key, run in runs.items()}
    for piece in (False, True):
        assert use["max", piece] < use["pow2", piece] < use["oracle", piece] < use["blocks of 16", False]
    assert use["oracle", True] < use["oracle", False]    # free in pieces too small


def test_every_request_ends_after_its_true_length(runs: dict[tuple[str, bool], dict[str, Any]]) -> None:
    num_tokens = sum(one.num_output_tokens for one in kv_waste.asked_of(NUM_REQUESTS))
    assert {run["output_tokens"] for run in runs.values()} == {num_tokens}
    assert {run["requests"] for run in runs.values()} == {NUM_REQUESTS}


def test_a_reservation_is_the_longest_the_next_power_of_two_or_the_truth() -> None:
    asked = kv_waste.Asked(num_prompt_tokens=100, num_output_tokens=300)
    assert [asked.reserved(rule) for rule in ("max", "pow2", "oracle")] == [1948, 512, 300]
    assert kv_waste.Asked(1900, 140).reserved("pow2") == 148    # never beyond what a request may be


def test_with_max_as_many_run_as_whole_requests_fit(runs: dict[tuple[str, bool], dict[str, Any]]) -> None:
    assert runs["max", False]["mean_batch"] == KV_TOKENS // kv_waste.MAX_MODEL_LEN == 2


def test_the_figures_of_this_load_are_exact(runs: dict[tuple[str, bool], dict[str, Any]]) -> None:
    assert {key: (run["steps"], run["preemptions"]) for key, run in runs.items()} == STEPS


def test_journals_replay_but_for_the_allocator_that_no_configuration_names(
        runs: dict[tuple[str, bool], dict[str, Any]]) -> None:
    for key in (("blocks of 16", False), ("pow2", False), ("pow2", True)):
        for journal in (runs[key]["journal"], runs[key]["journal_at_rate"]):
            seen = Replay(Journaled.read(journal), build_scheduler, build_policies).run()
            assert (seen.difference is None) == (not key[1])
            assert Path(journal).name.endswith("one-piece.jsonl.gz") == key[1]
