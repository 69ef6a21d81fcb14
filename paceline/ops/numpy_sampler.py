"""How the next token is drawn, in numpy. Owns the rules; csrc/sample.cpp states them again and must agree.

Per row of raw logits (float32 throughout, but for probabilities):
  the token is -1 if a logit is NaN or the largest is not finite.
  Logits are changed, in this order, where the row asks for it:
    allowed       all other tokens go to -inf,
    banned        to -inf (what min_tokens and bad_words rule out for this draw),
    biased        logit += bias,
    penalties     of each token t of the history: logit / repetition if it is above 0, else logit * repetition;
                  then, of tokens in the output part alone, -= frequency * count(t), and then -= presence.
    If that leaves no finite maximum it is done again without the bans, and if that leaves none, the raw logits stay.
  temperature 0, or a largest logit / temperature that is not finite: the largest logit, ties to the lowest id;
  otherwise scaled = logit / temperature, weight = exp(scaled - largest scaled), then
    min_p drops weights below min_p (the largest weight is 1),
    top_k (0 = whole vocabulary) keeps the k largest, ties at the k-th to the lowest ids,
    top_p keeps, of those, the shortest run in the order (scaled descending, id ascending) whose share of the
      weight is at least top_p, and never fewer than one,
    typical_p keeps, of those that weigh anything, the shortest run in the order (distance ascending, id ascending)
      whose share of the weight is at least typical_p; distance = |surprise - mean surprise|, surprise = -log p
      (locally typical sampling: Meister, Pimentel, Wiher, Cotterell, TACL 2023),
    and of what is kept, in id order, the first whose cumulative weight exceeds u * total is drawn.
Log-probabilities are those under the raw logits; the best tokens are ordered (logit descending, id ascending). A row
with a target draws nothing: its token is the target.

vLLM has this order (allowed, bad words, min_tokens, bias, penalties, temperature, min_p, top_k, top_p), no typical_p.
transformers puts bias and repetition penalty first, then its bans, temperature, top_k, top_p, min_p, typical_p; the
results differ only where min_p meets top_p (there top_p sees the tail that min_p would drop).

u comes from a counter-based generator: no state, so a draw depends on nothing but its own four numbers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .interface import SamplingBatch, SamplingExtras

_MASK = 0xFFFFFFFF
LEAST_WEIGHT = 2.0**-126    # the kernels' exp has nothing below
MINUS_INF = np.float32(-np.inf)


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


def kept_ids(scaled: NDArray[np.float32], top_k: int, top_p: float, min_p: float = 0.0,
             typical_p: float = 1.0) -> NDArray[np.intp]:
    """The ids that min_p, top_k, top_p and typical_p leave, ascending."""
    weighed = weights(scaled)
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    if min_p > 0:
        order = order[: np.count_nonzero(weighed >= np.float32(min_p))]
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1.0:
        mass = np.cumsum(weighed[order])
        order = order[: 1 + int(np.searchsorted(mass, top_p * mass[-1], side="left"))]
    kept = np.sort(order)
    return kept if typical_p >= 1.0 else typical_ids(scaled, weighed, kept, typical_p)


def typical_ids(scaled: NDArray[np.float32], weighed: NDArray[np.float64], kept: NDArray[np.intp],
                typical_p: float) -> NDArray[np.intp]:
    kept = kept[weighed[kept] >= LEAST_WEIGHT]
    below = (scaled.max() - scaled[kept]).astype(np.float64)    # surprise, up to the log of the total
    mean = float((weighed[kept] * below).sum() / weighed[kept].sum())
    order = np.lexsort((kept, np.abs(below - mean).astype(np.float32)))
    mass = np.cumsum(weighed[kept][order])
    return np.sort(kept[order][: 1 + int(np.searchsorted(mass, typical_p * mass[-1], side="left"))])


def weights(scaled: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(over="ignore", under="ignore"):
        weighed: NDArray[np.float64] = np.exp((scaled - scaled.max()).astype(np.float64))
    return weighed


def sample_row(logits: NDArray[np.float32], sampling: SamplingBatch, row: int, entry: int | None = None) -> int:
    """The token of one row of raw logits; entry: its place in the extras, if it has one."""
    if not np.isfinite(logits.max()):    # a NaN is its own maximum
        return -1
    extras = sampling.extras if entry is not None else None
    min_p, typical_p = 0.0, 1.0
    if extras is not None and entry is not None:
        if extras.target[entry] >= 0:
            return int(extras.target[entry])
        logits = changed_logits(logits, extras, entry)
        min_p, typical_p = float(extras.min_p[entry]), float(extras.typical_p[entry])
    temperature = sampling.temperature[row]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = logits / np.float32(temperature)
    if not temperature > 0 or not np.isfinite(scaled.max()):
        return int(np.argmax(logits))
    kept = kept_ids(scaled, int(sampling.top_k[row]), float(sampling.top_p[row]), min_p, typical_p)
    cumulative = np.cumsum(weights(scaled)[kept])
    u = uniform(int(sampling.seed[row]), int(sampling.prompt_index[row]), int(sampling.choice_index[row]),
                int(sampling.position[row]))
    at = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(kept[min(at, len(kept) - 1)])


def changed_logits(logits: NDArray[np.float32], extras: SamplingExtras, entry: int) -> NDArray[np.float32]:
    """What is drawn from: masks, biases and penalties on the raw logits."""
    for banned in (extras.banned[entry], ()):
        changed = logits.copy()
        if len(allowed := extras.allowed[entry]):
            changed[:] = MINUS_INF
            changed[allowed] = logits[allowed]
        changed[list(banned)] = MINUS_INF
        changed[extras.biased[entry]] += extras.bias[extras.biased.starts[entry] : extras.biased.starts[entry + 1]]
        penalise(changed, extras, entry)
        if np.isfinite(changed.max()):
            return changed
    return logits


def penalise(logits: NDArray[np.float32], extras: SamplingExtras, entry: int) -> None:
    history, num_prompt = extras.history[entry], int(extras.num_prompt[entry])
    seen = np.unique(history)
    counts = np.array([np.count_nonzero(history[num_prompt:] == token) for token in seen], np.float32)
    repetition = extras.repetition_penalty[entry]
    x = logits[seen]
    x = np.where(x > 0, x / repetition, x * repetition) - extras.frequency_penalty[entry] * counts
    logits[seen] = np.where(counts > 0, x - extras.presence_penalty[entry], x)


def log_probability(logits: NDArray[np.float32], token_id: int) -> float:
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(shifted[token_id]) - math.log(float(np.exp(shifted).sum()))


def best_tokens(logits: NDArray[np.float32], num_top: int) -> list[int]:
    """The likeliest tokens under the raw logits, best first, ties to the lowest id."""
    order: list[int] = np.lexsort((np.arange(len(logits)), -logits))[:num_top].tolist()
    return order


def sample_reference(
    logits: NDArray[np.float32], sampling: SamplingBatch
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """Of logits [W, V]: token ids [W], raw log-probabilities [W] (0 where not asked for), and with extras the best
    tokens of each entry and their log-probabilities (see StepOutput)."""
    num_rows, extras = len(logits), sampling.extras
    token_ids = np.full(num_rows, -1, np.int32)
    logprobs = np.zeros(num_rows, np.float32)
    top_ids = top_logprobs = None
    entries: dict[int, int] = {}
    if extras is not None:
        entries = {row: entry for entry, row in enumerate(extras.rows.tolist())}
        top_ids = np.full((len(entries), extras.num_top.max(initial=0)), -1, np.int32)
        top_logprobs = np.zeros(top_ids.shape, np.float32)
    for row in range(num_rows):
        entry = entries.get(row)
        token_ids[row] = sample_row(logits[row], sampling, row, entry)
        if sampling.wants_logprob[row] and token_ids[row] >= 0:
            logprobs[row] = log_probability(logits[row], int(token_ids[row]))
        if extras is not None and entry is not None and top_ids is not None and top_logprobs is not None:
            num_top = extras.num_top[entry] if token_ids[row] >= 0 else 0
            for rank, token in enumerate(best_tokens(logits[row], num_top)):
                top_ids[entry, rank], top_logprobs[entry, rank] = token, log_probability(logits[row], token)
    return token_ids, logprobs, top_ids, top_logprobs
