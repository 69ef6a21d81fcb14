"""Rounds weights to the values a packed form can hold: what the compiled kernels compute with, kept as float32.

A source that the form holds without loss is left alone. Two keep their own quants, with scales (and minima) rounded to
f16, which loses far less than quantising anew: Q4_K in int4, and MXFP4 in int8 (exact for scales of 2^-24 to 2^15).
Otherwise values are rounded to nearest even:
  bf16   each value
  int8   groups of 32 inputs: d = the least power of two >= max|w| / 127 (and >= 2^-24), q = round(w / d) in
         [-127, 127], w' = d q. A d of any value is closer, by a quarter in the divergence of a real model
         (docs/log.md), but costs one of ten multiplications of a linear with many rows: the block types that auto
         packs as int8 (ANY_STEP) get d = f16(max|w| / 127), the others come to int8 only when asked for by name
  int4   groups of 32 inputs: q = round((w - m) / d) in [0, 15], w' = d q + m. d = f16((max - min) / 15), m = f16(min),
         or what a search around them finds to be closer, in the sense of the sum of (|w| + rms) (w' - w)^2
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, ModelError
from .dequantize import BLOCKS, bf16_bits, dequantize, from_bf16_bits, mxfp4_parts, q4_k_parts
from .interface import SourceTensor

F32 = NDArray[np.float32]
GROUP = 32
INT4_STEPS = np.linspace(-1, 1, 9, dtype=np.float32)
INT4_SLAB = 1 << 14     # groups that are searched at once: bounds the memory
INPUTS_MULTIPLE = {"f32": 1, "bf16": 2, "int8": GROUP, "int4": GROUP}
ANY_STEP = {"Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K"}
LOSSLESS = {"f32": set(BLOCKS), "bf16": {"BF16", "MXFP4"}, "int8": {"Q8_0", "Q5_0", "IQ4_NL"}, "int4": {"Q4_0", "Q4_1"}}


def rounded_to_form(source: SourceTensor, form: str) -> F32:
    """The values of a weight in a packed form, float32 [num_outputs, num_inputs]."""
    if form not in ROUNDERS:
        raise ConfigError(f"dtype={form!r} is unknown; choose from {list(ROUNDERS)}")
    if source.num_inputs % INPUTS_MULTIPLE[form]:
        raise ModelError(f"{source.name}: dtype {form} needs a multiple of {INPUTS_MULTIPLE[form]} inputs, "
                         f"got {source.num_inputs}")
    values = dequantize(source)
    with np.errstate(over="ignore", invalid="ignore"):    # refused below
        if (source.source_type, form) in KEEPS_QUANTS:
            raw = source.raw if source.row_order is None else source.raw[source.row_order]
            values = KEEPS_QUANTS[source.source_type, form](np.ascontiguousarray(raw)).reshape(values.shape)
        elif form == "int8" and source.source_type in ANY_STEP:
            values = _to_int8_of_any_step(values)
        elif source.source_type not in LOSSLESS[form]:
            values = ROUNDERS[form](values)
    if not np.isfinite(values).all():
        raise ModelError(f"{source.name}: holds values that are not finite, or too large for dtype {form}")
    return values


def _to_f32(values: F32) -> F32:
    return values


def to_bf16(values: F32) -> F32:
    return from_bf16_bits(bf16_bits(values))


def to_int8(values: F32) -> F32:
    return _int8_groups(values, _power_of_two_from)


def _to_int8_of_any_step(values: F32) -> F32:
    return _int8_groups(values, lambda steps: steps)


def _int8_groups(values: F32, to_step: Callable[[F32], F32]) -> F32:
    groups = values.reshape(-1, GROUP)
    d = _f16(to_step(np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)))
    return (d * _quants(groups, d, -127, 127)).reshape(values.shape)


def _power_of_two_from(values: F32) -> F32:
    """The least not below each, 2^-24 at least: the smallest that f16 has."""
    mantissas, exponents = np.frexp(values)
    return np.maximum(np.ldexp(np.float32(1), exponents - (mantissas == 0.5)), np.float32(2**-24))


def to_int4(values: F32) -> F32:
    groups = values.reshape(-1, GROUP)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):    # of groups that keep the plain step
        parts = [_int4_groups(groups[start : start + INT4_SLAB]) for start in range(0, len(groups), INT4_SLAB)]
    return np.concatenate(parts).reshape(values.shape)


def _int4_groups(x: F32) -> F32:
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    weight = np.abs(x) + np.sqrt(_sum(x * x) / np.float32(GROUP))
    plain_d, plain_m = _f16((high - low) / np.float32(15)), _f16(low)
    plain = plain_d * _quants(x - plain_m, plain_d, 0, 15) + plain_m
    d, m = _int4_line(x, weight, low, high)
    half_d, half_m = _f16(d), _f16(m)
    found = half_d * _quants(x - half_m, half_d, 0, 15) + half_m
    is_better = (plain_d > 0) & (half_d > 0) & np.isfinite(half_d) & np.isfinite(half_m)
    is_better &= _sum(weight * (found - x) * (found - x)) < _sum(weight * (plain - x) * (plain - x))
    return np.where(is_better, found, plain)


def _int4_line(x: F32, weight: F32, low: F32, high: F32) -> tuple[F32, F32]:
    """For some steps around (high - low) / 15 the quants are taken as given and the line d q + m through the values is
    fitted by least squares, as llama.cpp's quantisers do it; d and m of the closest. csrc/quantize.cpp is the same to
    the bit. docs/log.md says what the weights, |x| + rms, gain."""
    above, zero = x - low, np.zeros_like(low)
    sum_w, sum_x = _sum(weight), _sum(weight * above)
    best_d, best_m, least = zero, zero, np.full_like(low, 3.0e38)
    for step in INT4_STEPS:
        q = np.rint(np.clip(above * ((np.float32(15) + step) / (high - low)), 0, 15))
        sum_q, sum_qq, sum_qx = _sum(weight * q), _sum(weight * q * q), _sum(weight * q * above)
        spread = sum_w * sum_qq - sum_q * sum_q
        d = (sum_w * sum_qx - sum_q * sum_x) / spread
        m = (sum_x - d * sum_q) / sum_w
        off = d * q + m - above
        error = _sum(weight * off * off)
        is_better = (spread > 0) & (error < least)
        best_d, best_m, least = (np.where(is_better, new, old)
                                 for new, old in ((d, best_d), (m + low, best_m), (error, least)))
    return best_d, best_m


def _sum(terms: F32) -> F32:
    """Sums of rows, one term after the other, as the compiled packer adds them."""
    total = terms[:, :1]
    for i in range(1, terms.shape[1]):
        total = total + terms[:, i : i + 1]
    return total


def _q4_k_to_int4(raw: NDArray[np.uint8]) -> F32:
    d, quants, minimum = q4_k_parts(raw)
    return _f16(d) * quants + _f16(-minimum)


def _mxfp4_to_int8(raw: NDArray[np.uint8]) -> F32:
    d, quants = mxfp4_parts(raw)
    return _f16(d) * quants


def _f16(values: F32) -> F32:
    return values.astype(np.float16).astype(np.float32)


def _quants(values: F32, d: F32, least: int, most: int) -> F32:
    quotient = np.divide(values, d, out=np.zeros_like(values), where=d != 0)
    return np.clip(np.rint(quotient), least, most)


KEEPS_QUANTS: dict[tuple[str, str], Callable[[NDArray[np.uint8]], F32]] = {
    ("Q4_K", "int4"): _q4_k_to_int4, ("MXFP4", "int8"): _mxfp4_to_int8,
}
ROUNDERS: dict[str, Callable[[F32], F32]] = {"f32": _to_f32, "bf16": to_bf16, "int8": to_int8, "int4": to_int4}
