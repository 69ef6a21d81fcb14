"""Rotary positions: the frequencies of each scaling a file may name, and the table of cosines and sines.

Frequencies never depend on a sequence's length (DESIGN C1h): "dynamic" is refused, and longrope picks its factors once,
by the length the model is loaded for. Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from .fields import Fields
from .stored import StoredTensor

F64 = NDArray[np.float64]

_TABLE_ROWS = 1 << 14


class RopeScaling(Protocol):
    """frequencies: unscaled, one a pair of dims. Returns the scaled ones and what multiplies cosines and sines."""

    def scaled(self, frequencies: F64, theta: float, num_positions: int) -> tuple[F64, float]: ...

    def max_position(self, max_position: int) -> int:
        """Tokens the model is good for, given what its config says without scaling."""
        ...


def rope_choice(scaling: RopeScaling | None, num_positions: int) -> str | None:
    """Names what the length a model is loaded for decided about its numbers; None where it decides nothing."""
    if not isinstance(scaling, LongRopeScaling):
        return None
    return "rope_long" if scaling.uses_long_factors(num_positions) else "rope_short"


@dataclass(frozen=True)
class LinearScaling:
    factor: float

    def scaled(self, frequencies: F64, theta: float, num_positions: int) -> tuple[F64, float]:
        return frequencies / self.factor, 1.0

    def max_position(self, max_position: int) -> int:
        return int(max_position * self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def scaled(self, frequencies: F64, theta: float, num_positions: int) -> tuple[F64, float]:
        turns = self.original_max_position * frequencies / (2 * math.pi)    # over the original context
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return (1 - kept) * frequencies / self.factor + kept * frequencies, 1.0

    def max_position(self, max_position: int) -> int:
        return max_position


@dataclass(frozen=True)
class YarnScaling:
    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncates: bool

    def scaled(self, frequencies: F64, theta: float, num_positions: int) -> tuple[F64, float]:
        low, high = self._dim_of_turns(self.beta_fast, frequencies, theta), self._dim_of_turns(
            self.beta_slow, frequencies, theta)
        if self.truncates:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        ramp = np.clip((np.arange(len(frequencies)) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp), self.attention_factor

    def _dim_of_turns(self, turns: float, frequencies: F64, theta: float) -> float:
        """The frequency that makes so many turns over the original context, as a fractional index."""
        if theta <= 1:
            raise ModelError(f"yarn: rope_theta={theta} must be above 1")
        return len(frequencies) * math.log(self.original_max_position / (turns * 2 * math.pi)) / math.log(theta)

    def max_position(self, max_position: int) -> int:
        return max(max_position, int(self.original_max_position * self.factor))


@dataclass(frozen=True)
class LongRopeScaling:
    """One factor a frequency; the short ones when the model is loaded for no more than the original length."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float

    def scaled(self, frequencies: F64, theta: float, num_positions: int) -> tuple[F64, float]:
        factors = self.long_factors if self.uses_long_factors(num_positions) else self.short_factors
        if len(factors) != len(frequencies):
            raise ModelError(f"longrope: {len(factors)} factors for {len(frequencies)} frequencies")
        return frequencies / np.array(factors), self.attention_factor

    def uses_long_factors(self, num_positions: int) -> bool:
        return num_positions > self.original_max_position

    def max_position(self, max_position: int) -> int:
        return max_position


def rope_table(num_positions: int, rotary_dim: int, theta: float, scaling: RopeScaling | None = None,
               factors: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """[num_positions, rotary_dim]: cosines of the rotary_dim / 2 angles, then their sines. factors, if a file has them,
    divide the frequencies."""
    frequencies = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    magnitude = 1.0
    if scaling is not None:
        frequencies, magnitude = scaling.scaled(frequencies, theta, num_positions)
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    table = np.empty((num_positions, rotary_dim), np.float32)
    for first in range(0, num_positions, _TABLE_ROWS):      # float64 in pieces: a long one takes gigabytes
        angles = np.arange(first, min(first + _TABLE_ROWS, num_positions), dtype=np.float64)[:, None] * frequencies
        table[first : first + _TABLE_ROWS] = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * magnitude
    return table


# ---- config.json. A reader takes the scaling's own fields and the whole config.

def _linear(rope: Fields, config: Fields) -> LinearScaling:
    return LinearScaling(_at_least_one(rope, "factor"))


def _llama3(rope: Fields, config: Fields) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not 0 < low < high < float("inf"):
        raise rope.refuse("high_freq_factor", f"must be greater than low_freq_factor={low}, and that positive")
    return Llama3Scaling(_at_least_one(rope, "factor"), low, high, _original_max_position(rope, config))


def _yarn(rope: Fields, config: Fields) -> YarnScaling:
    factor = _at_least_one(rope, "factor")
    mscales = [rope.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    default = _mscale(factor, mscales[0]) / _mscale(factor, mscales[1]) if all(mscales) else _mscale(factor, 1.0)
    return YarnScaling(factor, _original_max_position(rope, config), _positive(rope, "beta_fast", 32.0),
                       _positive(rope, "beta_slow", 1.0), _positive(rope, "attention_factor", default),
                       rope.flag("truncate", True))


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: Fields, config: Fields) -> LongRopeScaling:
    original = _original_max_position(rope, config)
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return LongRopeScaling(_factors(rope, "short_factor"), _factors(rope, "long_factor"), original,
                           _positive(rope, "attention_factor", default))


def _factors(rope: Fields, name: str) -> tuple[float, ...]:
    factors = rope.numbers(name)
    if not factors or not all(0 < factor < float("inf") for factor in factors):
        raise rope.refuse(name, "must be a list of positive numbers")
    return factors


def _original_max_position(rope: Fields, config: Fields) -> int:
    name = "original_max_position_embeddings"
    value = rope.integer(name, config.integer(name, config.integer("max_position_embeddings")))
    if value < 1:
        raise rope.refuse(name, "must be positive")
    return value


def _positive(rope: Fields, name: str, default: float) -> float:
    value = rope.number(name, default)
    if not 0 < value < float("inf"):
        raise rope.refuse(name, "must be positive and finite")
    return value


def _at_least_one(rope: Fields, name: str) -> float:
    value = rope.number(name)
    if not 1 <= value <= 1e6:
        raise rope.refuse(name, "must be from 1 to a million")
    return value


_COMMON_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ORIGINAL = "original_max_position_embeddings"
_LONGROPE = (_longrope, frozenset({"factor", "short_factor", "long_factor", "attention_factor", _ORIGINAL}))
SCALINGS: dict[str, tuple[Callable[[Fields, Fields], RopeScaling | None], frozenset[str]]] = {
    "default": (lambda rope, config: None, frozenset()),
    "linear": (_linear, frozenset({"factor"})),
    "llama3": (_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL})),
    "yarn": (_yarn, frozenset({"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
                               "truncate", _ORIGINAL})),
    "longrope": _LONGROPE,
    "su": _LONGROPE,        # its first name
}


def rope_fields(config: Fields) -> Fields:
    """rope_scaling (transformers 4) and rope_parameters (5) as one; a field on which they differ is refused. If kinds
    of layers have parameters of their own, those of the layers that see all."""
    old, new = config.mapping("rope_scaling"), config.mapping("rope_parameters")
    if new.has("full_attention"):
        new = new.mapping("full_attention")
    for name in old.values.keys() & new.values.keys():
        if old.values[name] != new.values[name]:
            raise old.refuse(name, f"contradicts rope_parameters.{name}={new.values[name]!r}")
    return Fields({**old.values, **new.values}, new.where if new.values else old.where)


def scaling_from_config(config: Fields) -> RopeScaling | None:
    """None without scaling. An unknown type, or a field its type does not have, is refused by name."""
    rope = rope_fields(config)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in SCALINGS:
        raise ModelError(f"{rope.where}: rope_type {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    read, known = SCALINGS[kind]
    surplus = set(rope.values) - _COMMON_FIELDS - known
    if surplus:
        raise rope.refuse(min(surplus), f"is not a field of rope_type {kind!r}")
    return read(rope, config)


# ---- GGUF metadata. Llama 3.1 files carry their divisors as a tensor instead: ModelSpec.has_rope_factors.

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def scaling_from_gguf(metadata: Fields, prefix: str, tensors: Mapping[str, StoredTensor]) -> RopeScaling | None:
    """Linear, yarn, or longrope by its two tensors of factors; other types are refused by name."""
    scaling = f"{prefix}rope.scaling."
    kind = metadata.text(scaling + "type", "none")
    if LONG_FACTORS in tensors or SHORT_FACTORS in tensors:
        return _longrope_from_gguf(metadata, prefix, tensors)
    if kind not in ("none", "linear", "yarn"):
        raise metadata.refuse(scaling + "type", "only none, linear and yarn are supported")
    factor_name = f"{prefix}rope.scale_linear" if kind == "none" else scaling + "factor"    # none: the key of old files
    factor = metadata.number(factor_name, 1.0)
    if not 1 <= factor <= 1e6:
        raise metadata.refuse(factor_name, "must be from 1 to a million")
    if kind == "yarn":
        attention_factor = _positive(metadata, scaling + "attn_factor", 1.0) * _mscale(factor, 1.0)
        return YarnScaling(factor, _gguf_original_length(metadata, prefix),
                           _positive(metadata, scaling + "yarn_beta_fast", 32.0),
                           _positive(metadata, scaling + "yarn_beta_slow", 1.0), attention_factor, truncates=True)
    return None if factor == 1.0 else LinearScaling(factor)


def _longrope_from_gguf(metadata: Fields, prefix: str, tensors: Mapping[str, StoredTensor]) -> LongRopeScaling:
    factors: list[tuple[float, ...]] = []
    for name in (SHORT_FACTORS, LONG_FACTORS):
        values = tensors[name].to_vector() if name in tensors and len(tensors[name].shape) == 1 else np.zeros(1)
        if not (np.isfinite(values) & (values > 0)).all():
            raise ModelError(f"{metadata.where}: tensor {name} must be a vector of positive numbers")
        factors.append(tuple(values.tolist()))
    return LongRopeScaling(factors[0], factors[1], _gguf_original_length(metadata, prefix),
                           _positive(metadata, f"{prefix}rope.scaling.attn_factor", 1.0))


def _gguf_original_length(metadata: Fields, prefix: str) -> int:
    name = f"{prefix}rope.scaling.original_context_length"
    value = metadata.integer(name, metadata.integer(f"{prefix}context_length"))
    if value < 1:
        raise metadata.refuse(name, "must be positive")
    return value
