"""Source types against the gguf package's own reading, and what packing to a form does to the values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from paceline.errors import ConfigError, ModelError
from paceline.ops.dequantize import DEQUANTIZERS, bf16_bits, dequantize, from_bf16_bits
from paceline.ops.interface import SourceTensor
from paceline.ops.numpy_ops import NumpyBackend
from paceline.ops.numpy_pack import rounded_to_form
from tests.model import blocks
from tests.runner.helpers import encoded

VALUES = np.random.default_rng(0).standard_normal((12, 96)).astype(np.float32)


@pytest.mark.parametrize("source_type", DEQUANTIZERS)
def test_values_are_the_files_own(source_type: str) -> None:
    source = blocks.source(source_type, 12, 256)
    expected = gguf.quants.dequantize(source.raw, gguf.GGMLQuantizationType[source_type])
    np.testing.assert_array_equal(dequantize(source), expected)


def test_row_order_names_the_source_row_of_each_packed_row() -> None:
    order = np.random.default_rng(1).permutation(12)
    plain = encoded("w", VALUES, "Q4_1")
    moved = SourceTensor("w", 12, 96, "Q4_1", plain.raw, order)
    np.testing.assert_array_equal(dequantize(moved), dequantize(plain)[order])


def test_unknown_types_and_wrong_sizes_are_named() -> None:
    good = encoded("blk.0.w", VALUES, "Q8_0")
    with pytest.raises(ModelError, match=r"blk\.0\.w.*IQ4_XS.*known"):
        dequantize(SourceTensor("blk.0.w", 12, 96, "IQ4_XS", good.raw))
    with pytest.raises(ModelError, match=r"blk\.0\.w"):
        dequantize(SourceTensor("blk.0.w", 12, 128, "Q8_0", good.raw))


@pytest.mark.parametrize(("source_type", "form"), [
    ("F32", "f32"), ("F16", "f32"), ("BF16", "f32"), ("Q4_1", "f32"), ("BF16", "bf16"), ("Q8_0", "int8"),
    ("Q4_0", "int4"), ("Q4_1", "int4"), ("Q5_0", "int8"), ("IQ4_NL", "int8"), ("MXFP4", "int8"), ("MXFP4", "bf16"),
    ("Q6_K", "f32"),
])
def test_a_form_that_can_hold_the_source_loses_nothing(source_type: str, form: str) -> None:
    source, backend = blocks.source(source_type, 12, 256), NumpyBackend()
    np.testing.assert_array_equal(backend.unpack(backend.pack([source], form)), dequantize(source))


@pytest.mark.parametrize(("form", "steps", "source_type"), [("bf16", 128, "F32"), ("int8", 127, "Q6_K")])
def test_other_sources_are_rounded_to_the_nearest_value_of_the_form(form: str, steps: int, source_type: str) -> None:
    source = encoded("w", VALUES, "F32") if source_type == "F32" else blocks.source(source_type, 12, 256)
    values = dequantize(source)
    errors = np.abs(rounded_to_form(source, form) - values).reshape(-1, 32)
    largest = np.abs(values).reshape(-1, 32).max(axis=1)
    assert (errors.max(axis=1) <= 0.52 * largest / steps + 0.001 * largest).all()
    assert errors.max() > 0


def test_int8_of_plain_values_takes_the_nearest_multiple_of_a_power_of_two() -> None:
    errors = np.abs(rounded_to_form(encoded("w", VALUES, "F32"), "int8") - VALUES).reshape(-1, 32)
    steps = np.exp2(np.ceil(np.log2(np.abs(VALUES).reshape(-1, 32).max(axis=1) / np.float32(127))))
    assert (errors.max(axis=1) <= steps / 2).all() and errors.max() > 0


def test_four_bits_lose_less_than_fifteen_even_steps_over_the_range_would() -> None:
    errors = (rounded_to_form(encoded("w", VALUES, "F32"), "int4") - VALUES).reshape(-1, 32)
    even_steps = np.ptp(VALUES.reshape(-1, 32), axis=1) / 15
    assert 0 < np.sqrt((errors**2).mean()) < np.sqrt((even_steps**2).mean() / 12)


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    exact = np.array([1.0, -2.5, 0.0, np.inf], np.float32)
    np.testing.assert_array_equal(from_bf16_bits(bf16_bits(exact)), exact)
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32).view(np.float32)
    assert bf16_bits(halfway).tolist() == [0x3F80, 0x3F82, 0x3F81]
    assert np.isnan(from_bf16_bits(bf16_bits(np.array([np.nan, -np.nan], np.float32)))).all()


def test_constant_groups_pack_exactly() -> None:
    zeros = encoded("w", np.zeros((2, 32)), "F32")
    halves = encoded("w", np.full((2, 32), 0.5), "F32")
    assert not rounded_to_form(zeros, "int8").any() and not rounded_to_form(zeros, "int4").any()
    np.testing.assert_array_equal(rounded_to_form(halves, "int4"), 0.5)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ModelError, match="multiple of 32"):
        rounded_to_form(encoded("w", np.ones((2, 48)), "F32"), "int8")
    with pytest.raises(ConfigError, match="int3"):
        rounded_to_form(encoded("w", VALUES, "F32"), "int3")
    for bad in (np.nan, 1e30):
        with pytest.raises(ModelError, match="not finite"):
            rounded_to_form(encoded("w", np.full((2, 32), bad), "F32"), "int8")
