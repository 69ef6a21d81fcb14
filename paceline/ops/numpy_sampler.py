"""How the next token is drawn, in numpy. Owns the rules; csrc/sample.cpp states them again and must agree.

Per row of logits:
  the token is -1 if a logit is NaN or the largest is not finite;
  temperature 0, or a largest logit / temperature that is not finite: the largest logit, ties to the lowest id;
  otherwise scaled = logit / temperature (float32), then
    top_k (0 = whole vocabulary) keeps the k largest, ties at the k-th to the lowest ids,
    top_p keeps, of those, the shortest run in the order (scaled descending, id ascending) whose share of the
      probability is at least top_p, and never fewer than one,
    and of what is kept, in id order, the first whose cumulative weight exceeds u * total is drawn,
      weights being exp(scaled - largest scaled).
The log-probability is that of the token under the raw logits: neither temperature nor limits enter it.

u comes from a counter-based generator: no state, so a draw depends on nothing but its own four numbers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .interface import SamplingBatch

_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        a = 0xD2511F53 * x0
        b = 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & _MASK, (a >> 32) ^ x3 ^ k1, a & _MASK
        k0 = (k0 + 0x9E3779B9) & _MASK
        k1 = (k1 + 0xBB67AE85) & _MASK
    return x0, x1, x2, x3


def uniform(seed: int, prompt_index: int, choice_index: int, position: int) -> float:
    """The draw in [0, 1), 53 bits, of the token at `position` of one choice of one prompt."""
    counter = (position & _MASK, position >> 32, prompt_index, choice_index)
    x0, x1, _, _ = philox4x32(counter, (seed & _MASK, seed >> 32))
    return ((x0 << 21) ^ (x1 >> 11)) * 2.0**-53


def kept_ids(scaled: NDArray[np.float32], top_k: int, top_p: float) -> NDArray[np.intp]:
    """The ids that top_k and then top_p leave, ascending."""
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    if 0 < top_k < len(scaled):
        order = order[:top_k]
    if top_p < 1.0:
        mass = np.cumsum(weights(scaled)[order])
        order = order[: 1 + int(np.searchsorted(mass, top_p * mass[-1], side="left"))]
    return np.sort(order)


def weights(scaled: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(over="ignore", under="ignore"):
        weighed: NDArray[np.float64] = np.exp((scaled - scaled.max()).astype(np.float64))
    return weighed


def sample_row(logits: NDArray[np.float32], temperature: np.float32, top_k: int, top_p: float, u: float) -> int:
    largest = logits.max()
    if not np.isfinite(largest):    # a NaN is its own maximum
        return -1
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = logits / np.float32(temperature)
    if not temperature > 0 or not np.isfinite(scaled.max()):
        return int(np.argmax(logits))
    kept = kept_ids(scaled, top_k, top_p)
    cumulative = np.cumsum(weights(scaled)[kept])
    at = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(kept[min(at, len(kept) - 1)])


def log_probability(logits: NDArray[np.float32], token_id: int) -> float:
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(shifted[token_id]) - math.log(float(np.exp(shifted).sum()))


def sample_reference(
    logits: NDArray[np.float32], sampling: SamplingBatch
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Token ids [W] and raw log-probabilities [W] (0 where not asked for) of logits [W, V]."""
    num_rows = len(logits)
    token_ids = np.full(num_rows, -1, np.int32)
    logprobs = np.zeros(num_rows, np.float32)
    for row in range(num_rows):
        u = uniform(int(sampling.seed[row]), int(sampling.prompt_index[row]), int(sampling.choice_index[row]),
                    int(sampling.position[row]))
        token_ids[row] = sample_row(logits[row], sampling.temperature[row], int(sampling.top_k[row]),
                                    float(sampling.top_p[row]), u)
        if sampling.wants_logprob[row] and token_ids[row] >= 0:
            logprobs[row] = log_probability(logits[row], int(token_ids[row]))
    return token_ids, logprobs
