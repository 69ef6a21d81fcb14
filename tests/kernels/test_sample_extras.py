"""Masks, biases, penalties, min_p, typical_p and the best tokens: the kernel against the reference, on every path."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.ops import numpy_sampler as sampler
from paceline.ops.interface import SamplingBatch
from tests.ops.extras import make_extras

from .test_sample import assert_agree, batch, could_be, draw_all, language_like, rows_of

V = 61    # small, and no multiple of any vector
TOKENS = st.integers(0, V - 1)
ENTRY = st.fixed_dictionaries({}, optional={
    "min_p": st.sampled_from([0.05, 0.3, 1.0]),
    "typical_p": st.sampled_from([0.1, 0.5, 0.95]),
    "repetition_penalty": st.sampled_from([0.01, 0.7, 1.3, 100.0]),
    "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
    "num_top": st.integers(0, 20),
    "target": st.integers(-1, V - 1),
    "history": st.lists(TOKENS, max_size=12),
    "allowed": st.lists(TOKENS, max_size=9, unique=True),
    "banned": st.lists(TOKENS, max_size=70),
    "bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 3.0, 100.0]), max_size=5),
})
ROW = st.fixed_dictionaries({
    "logits": st.lists(st.integers(-6, 6), min_size=V, max_size=V),
    "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    "top_k": st.sampled_from([0, 1, 3, 40, V]),
    "top_p": st.sampled_from([0.2, 0.9, 1.0]),
    "entry": st.none() | ENTRY,
})


def batch_of(rows: list[dict[str, Any]]) -> tuple[Any, SamplingBatch]:
    sampling = batch(len(rows))
    for name in ("temperature", "top_k", "top_p"):
        getattr(sampling, name)[:] = [row[name] for row in rows]
    entries = {i: {**row["entry"], "num_prompt": len(row["entry"].get("history", ())) // 2}
               for i, row in enumerate(rows) if row["entry"] is not None}
    logits = np.array([row["logits"] for row in rows], np.float32) * np.float32(0.7)
    return logits, replace(sampling, extras=make_extras(entries) if entries else None)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(rows=st.lists(ROW, min_size=1, max_size=4))
def test_the_kernel_does_what_the_reference_does(kernels: ModuleType, path: str, rows: list[dict[str, Any]]) -> None:
    logits, sampling = batch_of(rows)
    ids, logprobs, top_ids, top_logprobs = draw_all(kernels, path, logits, sampling)
    assert_agree(logits, sampling, ids, logprobs)
    _, _, expected_ids, expected_logprobs = sampler.sample_reference(logits, sampling)
    if expected_ids is not None and expected_logprobs is not None:
        assert top_ids.tolist() == expected_ids.tolist()
        np.testing.assert_allclose(top_logprobs, expected_logprobs, rtol=1e-6, atol=2e-6)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows=st.lists(ROW, min_size=2, max_size=6), data=st.data())
def test_a_row_does_not_depend_on_its_batch_mates(kernels: ModuleType, path: str, rows: list[dict[str, Any]],
                                                  data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    logits, sampling = batch_of(rows)
    together = draw_all(kernels, path, logits, sampling)
    shuffled_logits, shuffled = batch_of([rows[i] for i in order])
    shuffled = replace(rows_of(sampling, list(order)), extras=shuffled.extras)
    again = draw_all(kernels, path, shuffled_logits, shuffled)
    assert again[0].tolist() == together[0][list(order)].tolist()
    assert again[1].tobytes() == together[1][list(order)].tobytes()
    alone_logits, alone = batch_of(rows[:1])
    alone = replace(rows_of(sampling, [0]), extras=alone.extras)
    solo = draw_all(kernels, path, alone_logits, alone)
    assert solo[0][0] == together[0][0] and solo[1].tobytes() == together[1][:1].tobytes()
    if alone.extras is not None:
        num_top = alone.extras.num_top[0]
        assert solo[2][0].tolist() == together[2][0][:num_top].tolist()
        assert solo[3][0].tobytes() == together[3][0][:num_top].tobytes()


@pytest.mark.parametrize("limits", [{"min_p": 0.02}, {"typical_p": 0.6}, {"min_p": 1e-6, "typical_p": 0.9}])
@pytest.mark.parametrize("top", [(0, 1.0), (50, 1.0), (0, 0.9), (40, 0.7)])
def test_a_large_vocabulary_is_cut_like_the_reference(kernels: ModuleType, path: str, limits: dict[str, float],
                                                      top: tuple[int, float]) -> None:
    logits = language_like(np.random.default_rng(6), 12, 5003)
    sampling = replace(batch(12, 1.3, *top), extras=make_extras(dict.fromkeys(range(12), limits)))
    ids, logprobs, *_ = draw_all(kernels, path, logits, sampling)
    assert assert_agree(logits, sampling, ids, logprobs) >= 11


def drawn(kernels: ModuleType, path: str, logits: Any, asked: dict[str, Any], temperature: float = 1.0,
          num_draws: int = 400) -> set[int]:
    rows = np.array([logits], np.float32).repeat(num_draws, 0)
    sampling = replace(batch(num_draws, temperature), extras=make_extras(dict.fromkeys(range(num_draws), asked)))
    return set(draw_all(kernels, path, rows, sampling)[0].tolist())


def test_min_p_is_a_share_of_the_largest_probability(kernels: ModuleType, path: str) -> None:
    logits = np.log([0.06, 0.5, 0.04, 0.4])
    assert drawn(kernels, path, logits, {"min_p": 0.1}) == {0, 1, 3}
    assert drawn(kernels, path, logits, {"min_p": 0.9}) == {1}
    assert drawn(kernels, path, [2.0, 2.0, 1.0], {"min_p": 1.0}) == {0, 1}


def test_typical_p_may_drop_the_likeliest(kernels: ModuleType, path: str) -> None:
    """One sure token among many: the mean surprise lies nearer to the many."""
    logits = np.log([0.3, *[0.07] * 10])
    kept = drawn(kernels, path, logits, {"typical_p": 0.5})
    assert 0 not in kept and kept == {1, 2, 3, 4, 5, 6, 7, 8}    # ties to the lowest ids; 8 * 0.07 reaches half
    assert drawn(kernels, path, [0.0, 5.0], {"typical_p": 1e-6}) == {1}


def test_greedy_honours_what_changes_logits(kernels: ModuleType, path: str) -> None:
    logits = [1.0, 3.0, 2.0, -1.0]
    assert drawn(kernels, path, logits, {"bias": {0: 100.0}}, temperature=0) == {0}
    assert drawn(kernels, path, logits, {"bias": {1: -100.0}}, temperature=0) == {2}
    assert drawn(kernels, path, logits, {"banned": [1, 2]}, temperature=0) == {0}
    assert drawn(kernels, path, logits, {"allowed": [3, 2]}, temperature=0) == {2}
    assert drawn(kernels, path, logits, {"history": [1], "repetition_penalty": 2.0}, temperature=0) == {2}
    assert drawn(kernels, path, logits, {"history": [1], "presence_penalty": 1.5}, temperature=0) == {2}


def test_repetition_sees_the_prompt_and_the_others_only_the_output(kernels: ModuleType, path: str) -> None:
    logits = [1.0, 3.0, 2.0]
    of_the_prompt = {"history": [1, 1, 1], "num_prompt": 3}
    assert drawn(kernels, path, logits, {**of_the_prompt, "repetition_penalty": 2.0}, temperature=0) == {2}
    assert drawn(kernels, path, logits, {**of_the_prompt, "presence_penalty": 2.0}, temperature=0) == {1}
    assert drawn(kernels, path, logits, {**of_the_prompt, "frequency_penalty": 2.0}, temperature=0) == {1}
    twice = {"history": [1, 1, 1], "num_prompt": 1, "frequency_penalty": 0.6}
    assert drawn(kernels, path, logits, twice, temperature=0) == {2}    # 3 - 2 * 0.6
    assert drawn(kernels, path, [-1.0, -1.1], {"history": [0], "repetition_penalty": 1.2}, temperature=0) == {1}


def test_bans_that_leave_nothing_are_not_applied(kernels: ModuleType, path: str) -> None:
    assert drawn(kernels, path, [1.0, 3.0, 2.0], {"banned": [0, 1, 2]}, temperature=0) == {1}
    assert drawn(kernels, path, [1.0, 3.0, 2.0], {"allowed": [0, 2], "banned": [0, 2]}, temperature=0) == {2}
    assert drawn(kernels, path, [1.0, 3.0, -np.inf], {"allowed": [2]}, temperature=0) == {1}


def test_log_probabilities_are_raw_whatever_is_changed(kernels: ModuleType, path: str) -> None:
    logits = language_like(np.random.default_rng(8), 1, 5003)
    plain = replace(batch(1, 0.0), extras=make_extras({0: {"num_top": 5}}))
    ids, logprobs, top_ids, top_logprobs = draw_all(kernels, path, logits, plain)
    assert (ids[0], logprobs[0]) == (top_ids[0, 0], top_logprobs[0, 0])
    likeliest = int(ids[0])
    changed = replace(batch(1, 0.7), extras=make_extras({0: {
        "num_top": 5, "bias": {likeliest: -100.0}, "min_p": 0.3, "history": [likeliest], "repetition_penalty": 2.0}}))
    ids, logprobs, again_ids, again_logprobs = draw_all(kernels, path, logits, changed)
    assert ids[0] != likeliest
    assert again_ids.tolist() == top_ids.tolist() and again_logprobs.tobytes() == top_logprobs.tobytes()
    assert logprobs[0] == pytest.approx(sampler.log_probability(logits[0], int(ids[0])), abs=2e-6)


def test_the_best_of_equals_are_the_lowest_ids(kernels: ModuleType, path: str) -> None:
    logits = np.zeros((1, 3000), np.float32)
    logits[0, [2900, 17, 400]] = 5.0
    _, _, top_ids, _ = draw_all(kernels, path, logits, replace(batch(1), extras=make_extras({0: {"num_top": 6}})))
    assert top_ids.tolist() == [[17, 400, 2900, 0, 1, 2]]


def test_a_target_is_scored_and_nothing_is_drawn(kernels: ModuleType, path: str) -> None:
    logits = language_like(np.random.default_rng(9), 2, 500)
    extras = make_extras({0: {"target": 77, "num_top": 2}, 1: {"num_top": 1}})
    ids, logprobs, top_ids, _ = draw_all(kernels, path, logits, replace(batch(2, 0.0), extras=extras))
    assert ids.tolist() == [77, logits[1].argmax()]
    assert logprobs[0] == pytest.approx(sampler.log_probability(logits[0], 77), abs=2e-6)
    assert top_ids[1].tolist() == [logits[1].argmax(), -1]


def test_logits_that_are_not_finite_score_nothing(kernels: ModuleType, path: str) -> None:
    logits = np.full((1, 40), np.nan, np.float32)
    extras = make_extras({0: {"target": 7, "num_top": 3, "bias": {1: 5.0}}})
    ids, logprobs, top_ids, top_logprobs = draw_all(kernels, path, logits, replace(batch(1), extras=extras))
    assert (ids[0], logprobs[0], top_ids.tolist(), top_logprobs.tolist()) == (-1, 0, [[-1] * 3], [[0] * 3])


@pytest.mark.parametrize(("asked", "message"), [
    ({"history": [V]}, "history: token id 61"), ({"allowed": [-1]}, "allowed: token id -1"),
    ({"banned": [99]}, "banned: token id 99"), ({"bias": {77: 1.0}}, "biased: token id 77"),
    ({"target": 61}, "target: token id 61"), ({"num_prompt": 1}, "num_prompt: must be at most")])
def test_an_id_outside_the_vocabulary_is_refused(kernels: ModuleType, path: str, asked: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_all(kernels, path, np.zeros((1, V), np.float32), replace(batch(1), extras=make_extras({0: asked})))


def test_the_slack_of_the_comparison_is_not_a_licence() -> None:
    """could_be, which excuses draws on a boundary, refuses what the rules rule out."""
    logits = np.log(np.array([0.3, *[0.07] * 10])).astype(np.float32)
    sampling = replace(batch(1), extras=make_extras({0: {"typical_p": 0.5}}))
    assert not could_be(logits, sampling, 0, 0)
