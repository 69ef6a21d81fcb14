"""The reference sampler: one token from one row of logits, in the order every path must follow.

  1. A row with a NaN, or whose largest logit is not finite, draws -1. (-inf below the largest is a token ruled out.)
  2. temperature 0, or so low that the largest logit over it overflows: the largest logit, ties to the lowest id.
  3. scaled = logit / temperature in float32; a token weighs e^(scaled - largest) in float32, sums are in float64.
  4. top_k keeps the k largest, ties to the lowest ids.
  5. top_p keeps, of what top_k left, the shortest prefix in (logit descending, id ascending) order whose mass reaches
     top_p of theirs; at least one.
  6. The draw walks the kept tokens in id order and takes the first at which the running mass exceeds u times the total.

u is a counter-based uniform: Philox4x32-10 keyed by the seed, counted by (position, prompt index, choice index). It
depends on nothing else, so a draw can be repeated anywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .interface import SamplingBatch

MASK32 = 0xFFFFFFFF


def sample_batch(logits: NDArray[np.float32], sampling: SamplingBatch) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Token ids [W] and raw log-probabilities [W] (0 where not asked for) of logits [W, V]."""
    token_ids = np.zeros(len(logits), dtype=np.int32)
    logprobs = np.zeros(len(logits), dtype=np.float32)
    for i, row in enumerate(logits):
        token_ids[i] = sample_reference(row, sampling, i)
        if sampling.wants_logprob[i] and token_ids[i] >= 0:
            logprobs[i] = raw_logprob(row, int(token_ids[i]))
    return token_ids, logprobs


def sample_reference(logits: NDArray[np.float32], sampling: SamplingBatch, index: int) -> int:
    """Draws the token of row `index`."""
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return -1
    temperature = np.float32(sampling.temperature[index])
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = logits / temperature
    if temperature <= 0 or not np.isfinite(scaled.max()):
        return int(np.argmax(logits))
    mass = np.exp(scaled - scaled.max()).astype(np.float64)
    kept = keep_top(scaled, mass, int(sampling.top_k[index]), float(sampling.top_p[index]))
    kept = kept[mass[kept] > 0]
    running = np.cumsum(mass[kept])
    drawn = int(np.searchsorted(running, uniform(sampling, index) * running[-1], side="right"))
    return int(kept[min(drawn, len(kept) - 1)])    # rounding may leave u times the total at the total


def keep_top(scaled: NDArray[np.float32], mass: NDArray[np.float64], top_k: int, top_p: float) -> NDArray[np.int64]:
    """Ids that top_k and then top_p leave, ascending."""
    order = np.argsort(-scaled, kind="stable")    # stable: among equals the lowest id comes first
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1:
        running = np.cumsum(mass[order])
        order = order[: int(np.searchsorted(running, top_p * running[-1], side="left")) + 1]
    return np.sort(order)


def raw_logprob(logits: NDArray[np.float32], token_id: int) -> float:
    """Log-probability before temperature and truncation."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(shifted[token_id] - np.log(np.exp(shifted).sum()))


def uniform(sampling: SamplingBatch, index: int) -> float:
    """In [0, 1), 53 bits."""
    seed, position = int(sampling.seed[index]), int(sampling.position[index])
    counter = (position & MASK32, position >> 32, int(sampling.prompt_index[index]), int(sampling.choice_index[index]))
    x0, x1, _, _ = philox4x32(counter, (seed & MASK32, seed >> 32))
    return ((x0 << 21) ^ (x1 >> 11)) * 2.0**-53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds (Salmon et al. 2011)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (q >> 32) ^ c1 ^ k0, q & MASK32, (p >> 32) ^ c3 ^ k1, p & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3
