"""SamplingExtras for tests: say what differs from asking for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.ops.interface import Ragged, SamplingExtras

NUMBERS = {"min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
COUNTS = {"num_prompt": 0, "num_top": 0, "target": -1}


def ragged(lists: Sequence[Sequence[int]]) -> Ragged:
    return Ragged(np.cumsum([0, *map(len, lists)]).astype(np.int32),
                  np.array([token for one in lists for token in one], np.int32))


def make_extras(entries: Mapping[int, Mapping[str, Any]]) -> SamplingExtras:
    """entries: row -> what it asks for, e.g. {3: {"min_p": 0.1, "bias": {7: -100.0}, "history": [1, 2]}}."""
    rows = sorted(entries)
    asked = [entries[row] for row in rows]
    columns: dict[str, Any] = {name: np.array([one.get(name, neutral) for one in asked], np.float32)
                               for name, neutral in NUMBERS.items()}
    columns |= {name: np.array([one.get(name, neutral) for one in asked], np.int32) for name, neutral in COUNTS.items()}
    biases = [dict(one.get("bias", {})) for one in asked]
    return SamplingExtras(
        rows=np.array(rows, np.int32), **columns,
        **{name: ragged([one.get(name, ()) for one in asked]) for name in ("history", "allowed", "banned")},
        biased=ragged([list(bias) for bias in biases]),
        bias=np.array([value for bias in biases for value in bias.values()], np.float32))
