"""The reference sampler: its order of operations, its ties, its randomness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.ops.numpy_sampler import kept_ids, philox4x32, sample_reference, uniform
from tests.runner.helpers import sampling_rows


def draw(logits: Any, **columns: Any) -> int:
    token_ids, *_ = sample_reference(np.array([logits], np.float32), sampling_rows(1, **columns))
    return int(token_ids[0])


def kept(logits: Any, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    return kept_ids(np.array(logits, np.float32), top_k, top_p).tolist()


@pytest.mark.parametrize(("counter", "key", "expected"), [    # the authors' known answers
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_known_answers(counter: Any, key: Any, expected: Any) -> None:
    assert philox4x32(counter, key) == expected


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert draw([0, 3, 1, 3, 3]) == 1


def test_top_k_keeps_the_lowest_ids_of_equals() -> None:
    assert kept([1, 2, 2, 2, 0], top_k=2) == [1, 2]
    assert kept([1, 2, 2, 2, 0], top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_counts_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(logits, top_p=0.71) == [0, 1, 2]
    assert kept(logits, top_k=2, top_p=0.5) == [0]       # 0.4 of 0.7 reaches half
    assert kept(logits, top_p=1e-9) == [0]
    assert kept([5, 5, 5, 5], top_p=0.5) == [0, 1]


def test_min_p_comes_before_top_p() -> None:
    """What min_p drops is not there when top_p adds up shares; transformers does it the other way round."""
    logits = np.log(np.array([0.4, 0.35, 0.05, 0.1, 0.1], np.float32))
    assert kept_ids(logits, 0, 0.74).tolist() == [0, 1]
    assert kept_ids(logits, 0, 0.53, min_p=0.5).tolist() == [0]        # 0.4 of 0.75
    assert kept_ids(logits, 0, 0.53).tolist() == [0, 1]
    assert kept_ids(logits, 1, 1.0, min_p=0.5).tolist() == [0]


def test_typical_p_takes_the_most_typical_first() -> None:
    logits = np.log(np.array([0.3, *[0.07] * 10], np.float32))
    assert kept_ids(logits, 0, 1.0, typical_p=0.5).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert kept_ids(logits, 0, 1.0, typical_p=0.01).tolist() == [1]
    assert kept_ids(logits, 3, 1.0, typical_p=0.01).tolist() == [0]    # of what top_k left


def test_draws_follow_the_distribution() -> None:
    shares = np.array([0.1, 0.5, 0.15, 0.25])
    num_draws = 4000
    logits = np.tile(np.log(shares).astype(np.float32), (num_draws, 1))
    ids, *_ = sample_reference(logits, sampling_rows(num_draws, temperature=1.0, position=np.arange(num_draws)))
    np.testing.assert_allclose(np.bincount(ids, minlength=4) / num_draws, shares, atol=0.03)
    cold, *_ = sample_reference(logits, sampling_rows(num_draws, temperature=0.5, position=np.arange(num_draws)))
    np.testing.assert_allclose(np.bincount(cold, minlength=4) / num_draws, shares**2 / (shares**2).sum(), atol=0.03)


def test_every_part_of_the_key_changes_the_draw() -> None:
    def at(**columns: int) -> float:
        return uniform(**{"seed": 0, "prompt_index": 0, "choice_index": 0, "position": 0, **columns})
    variants = [at(), at(seed=1), at(seed=1 << 63), at(position=1), at(position=1 << 40), at(prompt_index=1),
                at(choice_index=1)]
    assert len(set(variants)) == len(variants)
    assert all(0 <= u < 1 for u in variants)
    assert at(seed=5, position=7) == at(seed=5, position=7)


def test_logprobs_are_raw() -> None:
    logits = np.log(np.array([[0.1, 0.6, 0.3]], np.float32))
    ids, logprobs, *_ = sample_reference(logits, sampling_rows(1, temperature=0.01, top_k=1))
    assert ids.tolist() == [1] and logprobs[0] == pytest.approx(np.log(0.6), abs=1e-6)
    assert sample_reference(logits, sampling_rows(1, wants_logprob=0))[1].tolist() == [0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_draw_nothing(temperature: float) -> None:
    for bad in (np.nan, -np.nan, np.inf):
        assert draw([0, bad, 1], temperature=temperature) == -1
    assert draw([-np.inf] * 3, temperature=temperature) == -1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_ruled_out_is_never_drawn(temperature: float) -> None:
    drawn = {draw([-np.inf, 0, -np.inf, 0.1], temperature=temperature, position=i) for i in range(60)}
    assert drawn == ({3} if temperature == 0 else {1, 3})


def test_a_vanishing_temperature_is_greedy() -> None:
    assert draw([0, 3, 3.0001, 1], temperature=1e-38) == 2
