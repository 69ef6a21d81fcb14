"""What a packed form costs: a model as it would serve against the same weights in a reference form, on one text.

Both run the text through their executors, like any prompt, and every next-token distribution of the one is compared
with the other's. The text (quality.txt: English, program code, numbers, German, French) is cut into windows; a window
starts from nothing. Logits are asked for a few positions at a time, so that their memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvariantError
from ..request import SamplingParams
from ..sched.plan import SamplingRef, ScheduledRequest, SchedulerOutput
from .executor import ModelExecutor

TEXT_PATH = Path(__file__).with_name("quality.txt")
WINDOW_TOKENS = 512
LOGITS_BYTES = 32 << 20    # of one step, for one of the two models
GREEDY = SamplingRef(SamplingParams(max_tokens=1, temperature=0.0), prompt_index=0, choice_index=0)
DEFINITIONS = {
    "perplexity": "exp of the mean negative log-probability of the text's tokens, each given the tokens before it in "
                  "its window",
    "perplexity_change_percent": "how far the perplexity is above the reference's; then its standard error, from the "
                                 "paired differences of the tokens",
    "greedy_agreement": "share of positions where both have the same likeliest next token",
    "mean_kl_nats": "mean over positions of KL(reference || measured), the sum over the vocabulary of p log(p / q)",
}

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are run from an empty context. The first num_context of them are not predicted."""

    token_ids: tuple[int, ...]
    num_context: int


@dataclass(frozen=True, slots=True)
class PositionFacts:
    """Of some predicted tokens: negative log-probabilities (measured, reference), KL, and whether the argmax agrees."""

    loss: Floats
    reference_loss: Floats
    kl: Floats
    agrees: NDArray[np.bool_]


def windows(token_ids: Sequence[int], first_ids: Sequence[int], num_tokens: int) -> list[Window]:
    """The text in windows of num_tokens, each behind first_ids (a BOS). Without one a window's first token has nothing
    before it and is not predicted. A last window with nothing to predict is left out."""
    step = num_tokens - len(first_ids)
    num_context = max(1, len(first_ids))
    cut = [(*first_ids, *token_ids[start : start + step]) for start in range(0, len(token_ids), step)]
    return [Window(ids, num_context) for ids in cut if len(ids) > num_context]


def compare(text: Sequence[Window], measured: ModelExecutor, reference: ModelExecutor,
            progress: Callable[[int], Any] | None = None) -> dict[str, int | float]:
    """The figures, by the names of DEFINITIONS. Both executors must keep logits, have a pool that holds a window, and
    share a vocabulary. progress is told how many tokens each step has compared."""
    facts = []
    for window in text:
        for ids, logits, reference_logits in _both(window, measured, reference):
            facts.append(position_facts(ids, logits, reference_logits))
            if progress is not None:
                progress(len(logits))
    loss, reference_loss, kl, agrees = (
        np.concatenate([getattr(part, name) for part in facts]) for name in PositionFacts.__slots__)
    perplexity, reference_perplexity = np.exp(loss.mean()), np.exp(reference_loss.mean())
    difference = loss - reference_loss
    return {
        "windows": len(text), "window_tokens": max(len(window.token_ids) for window in text),
        "predicted_tokens": len(loss),
        "perplexity": float(perplexity), "reference_perplexity": float(reference_perplexity),
        "perplexity_change_percent": float(np.expm1(difference.mean()) * 100),
        "perplexity_change_standard_error": float(difference.std() / np.sqrt(len(loss)) * 100),
        "greedy_agreement": float(agrees.mean()), "mean_kl_nats": float(kl.mean()),
    }


def _both(window: Window, *executors: ModelExecutor) -> Iterator[
        tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]]:
    """Runs a window on both; yields the tokens predicted by each step, and the logits of their places [N, V]."""
    walks = [_logits(window, executor) for executor in executors]
    start = 0
    for logits, reference_logits in zip(*walks, strict=True):
        first = max(window.num_context - 1 - start, 0)    # the first place whose next token is predicted
        targets = np.array(window.token_ids[start + first + 1 : start + len(logits) + 1], np.int64)
        start += len(logits)
        yield targets, logits[first : first + len(targets)], reference_logits[first : first + len(targets)]


def _logits(window: Window, executor: ModelExecutor) -> Iterator[NDArray[np.float32]]:
    layout = executor.kv_layout()
    block_ids = (tuple(range(-(-len(window.token_ids) // layout.block_size))),) * layout.num_groups
    start, num_rows = 0, 1    # the first step shows how large the vocabulary is
    while start < len(window.token_ids):
        token_ids = window.token_ids[start : start + num_rows]
        row = ScheduledRequest("quality", start, token_ids, block_ids, tuple(range(len(token_ids))), GREEDY)
        executor.collect(executor.submit(SchedulerOutput(start, (row,))))
        if executor.last_logits is None:
            raise InvariantError("the executor keeps no logits")
        num_rows = max(1, LOGITS_BYTES // executor.last_logits[0].nbytes)
        start += len(token_ids)
        yield executor.last_logits


def position_facts(ids: NDArray[np.int64], logits: NDArray[np.float32],
                   reference_logits: NDArray[np.float32]) -> PositionFacts:
    """ids [N] are the tokens that came next, logits [N, V] what each model gave before them."""
    q, p = log_softmax(logits), log_softmax(reference_logits)
    rows = np.arange(len(ids))
    return PositionFacts(-q[rows, ids], -p[rows, ids], (np.exp(p) * (p - q)).sum(axis=1),
                         logits.argmax(axis=1) == reference_logits.argmax(axis=1))


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
