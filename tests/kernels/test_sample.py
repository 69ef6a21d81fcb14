"""Drawing a token: the kernel against the numpy reference, and both against what the rules promise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.ops import numpy_sampler as sampler
from paceline.ops.interface import SamplingBatch

Floats = NDArray[np.float32]


def batch(num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 7,
          positions: Sequence[int] | None = None) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(num_rows, temperature, np.float32),
        top_k=np.full(num_rows, top_k, np.int32),
        top_p=np.full(num_rows, top_p, np.float32),
        seed=np.full(num_rows, seed, np.uint64),
        prompt_index=np.zeros(num_rows, np.uint32),
        choice_index=np.zeros(num_rows, np.uint32),
        position=np.array(range(num_rows) if positions is None else positions, np.uint64),
        wants_logprob=np.ones(num_rows, np.uint8),
    )


COLUMNS = tuple(name for name in SamplingBatch.__slots__ if name != "extras")


def rows_of(sampling: SamplingBatch, rows: Sequence[int] | NDArray[np.intp]) -> SamplingBatch:
    return SamplingBatch(**{name: np.ascontiguousarray(getattr(sampling, name)[rows]) for name in COLUMNS})


def draw(kernels: ModuleType, path: str, logits: Floats, sampling: SamplingBatch) -> tuple[NDArray[np.int32], Floats]:
    return draw_all(kernels, path, logits, sampling)[:2]


def draw_all(kernels: ModuleType, path: str, logits: Floats, sampling: SamplingBatch) -> tuple[Any, ...]:
    arrays = [getattr(sampling, name) for name in COLUMNS]
    answer: tuple[Any, ...] = kernels.sample(path, np.ascontiguousarray(logits, np.float32), *arrays, sampling.extras)
    return answer


def language_like(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Floats:
    """A few likely tokens over a wide bell of unlikely ones."""
    logits = rng.normal(0.0, 2.0, (num_rows, vocab_size))
    logits[:, rng.integers(0, vocab_size, 20)] += rng.uniform(4.0, 12.0, 20)
    return logits.astype(np.float32)


def entry_of(sampling: SamplingBatch, row: int) -> int | None:
    rows = [] if sampling.extras is None else sampling.extras.rows.tolist()
    return rows.index(row) if row in rows else None


def could_be(logits: Floats, sampling: SamplingBatch, row: int, token: int, slack: float = 1e-6) -> bool:
    """True if the rules give `token` once every boundary may move by `slack` of the total."""
    extras, entry = sampling.extras, entry_of(sampling, row)
    min_p, typical_p = 0.0, 1.0
    if extras is not None and entry is not None:
        logits = sampler.changed_logits(logits, extras, entry)
        min_p, typical_p = float(extras.min_p[entry]), float(extras.typical_p[entry])
    scaled = logits / sampling.temperature[row]
    u = sampler.uniform(int(sampling.seed[row]), int(sampling.prompt_index[row]), int(sampling.choice_index[row]),
                        int(sampling.position[row]))
    top_k, top_p = int(sampling.top_k[row]), float(sampling.top_p[row])
    for factors in itertools.product((1 - slack, 1 + slack), repeat=3):
        wide = [limit if limit in (0.0, 1.0) else limit * factor
                for limit, factor in zip((top_p, min_p, typical_p), factors, strict=True)]
        kept = sampler.kept_ids(scaled, top_k, *wide)
        if token not in kept:
            continue
        cumulative = np.cumsum(sampler.weights(scaled)[kept])
        at = int(np.flatnonzero(kept == token)[0])
        low = cumulative[at - 1] if at else 0.0
        total = cumulative[-1]
        if low - slack * total <= u * total <= cumulative[at] + slack * total:
            return True
    return False


def assert_agree(logits: Floats, sampling: SamplingBatch, ids: NDArray[np.int32], logprobs: Floats) -> int:
    """Equal tokens, but where a draw lies on a boundary; returns how many rows were equal."""
    expected, expected_logprobs, *_ = sampler.sample_reference(logits, sampling)
    for row in np.flatnonzero(ids != expected):
        assert could_be(logits[row], sampling, row, int(ids[row])), (row, ids[row], expected[row])
    same = ids == expected
    np.testing.assert_allclose(logprobs[same], expected_logprobs[same], rtol=1e-6, atol=2e-6)
    return int(same.sum())


def test_philox_gives_the_published_answers() -> None:
    assert sampler.philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert sampler.philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_temperature_zero_takes_the_largest_and_of_equals_the_first(kernels: ModuleType, path: str) -> None:
    rng = np.random.default_rng(1)
    for vocab_size in (1, 15, 16, 17, 63, 64, 65, 1000, 49152):
        logits = rng.integers(-3, 4, (5, vocab_size)).astype(np.float32)
        ids, _ = draw(kernels, path, logits, batch(5, temperature=0.0))
        assert ids.tolist() == logits.argmax(axis=1).tolist()


def test_a_zero_and_a_minus_zero_are_equals(kernels: ModuleType, path: str) -> None:
    logits = np.full((1, 100), -1.0, np.float32)
    logits[0, [40, 70]] = -0.0, 0.0
    assert draw(kernels, path, logits, batch(1, temperature=0.0))[0][0] == 40
    assert draw(kernels, path, logits, batch(1, temperature=1.0, top_k=1))[0][0] == 40


@pytest.mark.parametrize("limits", [(0, 1.0), (40, 1.0), (0, 0.9), (50, 0.95), (1, 1.0), (0, 1e-9), (3000, 0.999),
                                    (0, 0.0)])
@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.7])
def test_the_kernel_draws_what_the_reference_draws(kernels: ModuleType, path: str, limits: tuple[int, float],
                                                   temperature: float) -> None:
    rng = np.random.default_rng(2)
    num_equal = num_rows = 0
    for vocab_size in (37, 1024, 5003):
        logits = language_like(rng, 12, vocab_size)
        sampling = batch(12, temperature, *limits)
        num_equal += assert_agree(logits, sampling, *draw(kernels, path, logits, sampling))
        num_rows += 12
    assert num_equal >= num_rows - 1


@pytest.mark.parametrize("limits", [(0, 1.0), (0, 0.9), (20000, 1.0), (20000, 0.5), (5, 0.999)])
def test_flat_distributions_cost_no_exactness(kernels: ModuleType, path: str, limits: tuple[int, float]) -> None:
    rng = np.random.default_rng(3)
    vocab_size = 49152
    logits = np.concatenate([np.zeros((2, vocab_size)), rng.normal(0, 1e-3, (2, vocab_size)),
                             rng.integers(0, 3, (2, vocab_size))]).astype(np.float32)
    sampling = batch(6, 1.0, *limits)
    # A draw here tells u to one part in 49152, so equal tokens mean equal u.
    assert assert_agree(logits, sampling, *draw(kernels, path, logits, sampling)) >= 5


def test_ties_at_the_kth_value_go_to_the_lowest_ids(kernels: ModuleType, path: str) -> None:
    logits = np.full((400, 300), -4.0, np.float32)
    logits[:, [250, 30, 100, 200]] = 2.0
    logits[:, 299] = 3.0
    ids, _ = draw(kernels, path, logits, batch(400, top_k=3))
    assert set(ids.tolist()) == {299, 30, 100}


def test_top_p_keeps_the_shortest_run_that_reaches_it(kernels: ModuleType, path: str) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))[None].repeat(500, 0)
    for top_p, kept in ((0.39, {1}), (0.41, {1, 2}), (0.69, {1, 2}), (0.71, {1, 2, 3}), (0.95, {0, 1, 2, 3})):
        ids, _ = draw(kernels, path, logits, batch(500, top_p=top_p))
        assert set(ids.tolist()) == kept


def test_top_p_is_a_share_of_what_top_k_left(kernels: ModuleType, path: str) -> None:
    logits = np.log(np.array([0.05, 0.3, 0.3, 0.35], np.float32))[None].repeat(500, 0)
    ids, _ = draw(kernels, path, logits, batch(500, top_k=2, top_p=0.5))    # 0.35 of 0.65 is more than half
    assert set(ids.tolist()) == {3}


def test_draws_follow_the_distribution(kernels: ModuleType, path: str) -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.125], np.float32)
    num_draws = 20000
    ids, _ = draw(kernels, path, np.log(probabilities)[None].repeat(num_draws, 0), batch(num_draws))
    shares = np.bincount(ids, minlength=4) / num_draws
    np.testing.assert_allclose(shares, probabilities, atol=4 * 0.5 / num_draws**0.5)


def test_a_row_does_not_see_its_batch_mates(kernels: ModuleType, path: str) -> None:
    rng = np.random.default_rng(4)
    logits = language_like(rng, 16, 3001)
    sampling = batch(16)
    sampling.temperature[:] = rng.choice([0.0, 0.5, 1.0, 1.5], 16)
    sampling.top_k[:] = rng.choice([0, 1, 40], 16)
    sampling.top_p[:] = rng.choice([1.0, 0.9, 0.5], 16)
    sampling.seed[:] = rng.integers(0, 2**63, 16)
    ids, logprobs = draw(kernels, path, logits, sampling)
    order = rng.permutation(16)
    shuffled_ids, shuffled_logprobs = draw(kernels, path, logits[order], rows_of(sampling, order))
    assert shuffled_ids.tolist() == ids[order].tolist()
    assert shuffled_logprobs.tobytes() == logprobs[order].tobytes()
    for row in range(16):
        alone = draw(kernels, path, logits[row : row + 1], rows_of(sampling, [row]))
        assert alone[0][0] == ids[row] and alone[1].tobytes() == logprobs[row : row + 1].tobytes()


def test_every_number_of_the_key_changes_the_draw(kernels: ModuleType, path: str) -> None:
    logits = np.zeros((1, 49152), np.float32)
    keys = [(1, 0, 0, 0), (1 << 40, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 1 << 40)]
    drawn = set()
    for seed, prompt_index, choice_index, position in keys:
        sampling = batch(1, seed=seed, positions=[position])
        sampling.prompt_index[:] = prompt_index
        sampling.choice_index[:] = choice_index
        token = draw(kernels, path, logits, sampling)[0][0]
        assert token == sampler.sample_reference(logits, sampling)[0][0]
        drawn.add(int(token))
    assert len(drawn) == len(keys)


def test_logits_that_are_not_finite_give_no_token(kernels: ModuleType, path: str) -> None:
    logits = np.zeros((5, 200), np.float32)
    logits[0, 199] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    logits[3, 5:] = -np.inf
    for temperature in (0.0, 1.0):
        sampling = batch(5, temperature, top_k=10, top_p=0.99)
        ids, logprobs = draw(kernels, path, logits, sampling)
        assert ids[:3].tolist() == [-1, -1, -1] and logprobs[:3].tolist() == [0, 0, 0]
        assert 0 <= ids[3] < 5 and ids[4] >= 0
        assert_agree(logits, sampling, ids, logprobs)


def test_a_temperature_too_small_to_divide_by_is_temperature_zero(kernels: ModuleType, path: str) -> None:
    logits = language_like(np.random.default_rng(5), 3, 500)
    ids, _ = draw(kernels, path, logits, batch(3, temperature=1e-38))
    assert ids.tolist() == logits.argmax(axis=1).tolist()


def test_a_wrong_array_is_named(kernels: ModuleType, path: str) -> None:
    sampling = batch(2)
    arrays = [getattr(sampling, name) for name in COLUMNS]
    with pytest.raises(ValueError, match="top_p: has 1 entries, needs 2"):
        kernels.sample(path, np.zeros((2, 8), np.float32), *arrays[:2], arrays[2][:1], *arrays[3:])
    with pytest.raises(ValueError, match="seed: needs a C-contiguous array of uint64"):
        kernels.sample(path, np.zeros((2, 8), np.float32), *arrays[:3], arrays[3].astype(np.int64), *arrays[4:])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    values=st.lists(st.integers(-6, 6), min_size=1, max_size=200),
    temperature=st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.0, 0.01, 0.3, 0.77, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**64 - 1),
)
def test_any_small_vocabulary_any_limits(kernels: ModuleType, path: str, values: list[int], temperature: float,
                                         top_k: int, top_p: float, seed: int, position: int) -> None:
    logits = np.array([values], np.float32) * np.float32(0.7)
    sampling = batch(1, temperature, top_k, top_p, seed, [position])
    ids, logprobs = draw(kernels, path, logits, sampling)
    assert 0 <= ids[0] < len(values)
    if temperature == 0 or top_k == 1:
        assert ids[0] == logits[0].argmax()
    elif ids[0] != sampler.sample_reference(logits, sampling)[0][0]:
        assert could_be(logits[0], sampling, 0, int(ids[0]))
    np.testing.assert_allclose(logprobs[0], sampler.log_probability(logits[0], int(ids[0])), rtol=1e-6, atol=2e-6)
