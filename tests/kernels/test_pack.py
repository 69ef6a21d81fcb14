"""Packing keeps a file's values where its form can, rounds them to nearest where it cannot, and refuses the rest."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from paceline.errors import ModelError
from paceline.ops.interface import SourceTensor
from paceline.ops.numpy_pack import rounded_to_form
from tests.model import blocks

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

LOSSLESS = (("F32", "f32"), ("F16", "f32"), ("BF16", "f32"), ("Q8_0", "f32"), ("Q4_0", "f32"), ("Q4_1", "f32"),
            ("BF16", "bf16"), ("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4"))
FORMS = ("f32", "bf16", "int8", "int4")
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def bell(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def same_bits(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def written_as(source_type: str, weight: Floats) -> Bytes:
    """The bytes of a file that holds `weight` in `source_type`."""
    if source_type == "F32":
        return weight.view(np.uint8)
    if source_type == "F16":
        return weight.astype(np.float16).view(np.uint8)
    return np.ascontiguousarray(quants.quantize(weight, GGMLQuantizationType[source_type]).view(np.uint8))


def read_back(source_type: str, raw: Bytes) -> Floats:
    if source_type == "F32":
        return raw.view(np.float32)
    if source_type == "F16":
        return raw.view(np.float16).astype(np.float32)
    return quants.dequantize(raw, GGMLQuantizationType[source_type]).astype(np.float32)


@pytest.mark.parametrize(("source_type", "form"), LOSSLESS)
@pytest.mark.parametrize("num_outputs", (1, 16, 37))
def test_a_form_that_can_hold_the_values_holds_them_exactly(
    kernels: ModuleType, source_type: str, form: str, num_outputs: int
) -> None:
    raw = written_as(source_type, bell(1, num_outputs, 96))
    packed = kernels.pack(form, 96, [(source_type, raw, None)])
    assert (packed.form, packed.num_outputs, packed.num_inputs) == (form, num_outputs, 96)
    assert np.array_equal(kernels.unpack(packed), read_back(source_type, raw))


@pytest.mark.parametrize("source_type", sorted(BLOCK_BYTES))
@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_block_of_bytes_keeps_its_values(kernels: ModuleType, source_type: str, data: Any) -> None:
    """Not only blocks a quantiser would write: negative scales, -128, subnormals."""
    block_bytes = BLOCK_BYTES[source_type]
    raw = data.draw(hnp.arrays(np.uint8, (3, 2 * block_bytes)))
    blocks = raw.reshape(6, block_bytes)
    for offset in (0, 2) if source_type == "Q4_1" else (0,):
        blocks[:, offset + 1] &= 0xEF                    # an exponent below 8192: finite, and 8 d fits f16
    form = "int8" if source_type == "Q8_0" else "int4"
    unpacked = kernels.unpack(kernels.pack(form, 64, [(source_type, raw, None)]))
    assert np.array_equal(unpacked, read_back(source_type, raw))


@given(hnp.arrays(np.float32, (2, 64), elements=st.floats(-60000, 60000, width=32)))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_rounding_goes_to_the_nearest_value_of_the_form(kernels: ModuleType, weight: Floats) -> None:
    groups = weight.reshape(2, 2, 32).astype(np.float64)
    unpacked = {form: kernels.unpack(kernels.pack(form, 64, [("F32", weight.view(np.uint8), None)])) for form in FORMS}
    error = {form: np.abs(unpacked[form].reshape(2, 2, 32) - groups) for form in FORMS}
    amax = np.abs(groups).max(axis=2, keepdims=True)
    tiny = 2.0**-24
    assert (error["f32"] == 0).all()
    assert (error["bf16"] <= np.abs(groups) * 2.0**-8 + 2.0**-133).all()
    step = np.exp2(np.ceil(np.log2(np.maximum(amax / 127, tiny))))
    assert (error["int8"] <= step / 2).all()


def test_eight_bit_values_follow_the_stated_formula(kernels: ModuleType) -> None:
    weight = bell(2, 5, 64)
    groups = weight.reshape(5, 2, 32)
    d = np.exp2(np.ceil(np.log2(np.abs(groups).max(axis=2, keepdims=True) / np.float32(127))))
    int8 = (np.rint(groups / d).clip(-127, 127) * d).reshape(5, 64)
    raw = weight.view(np.uint8)
    assert np.array_equal(kernels.unpack(kernels.pack("int8", 64, [("F32", raw, None)])), int8)


def plain_int4(groups: Floats) -> Floats:
    """What the step (max - min) / 15 makes of groups [..., 32]."""
    low = groups.min(axis=-1, keepdims=True)
    d = ((groups.max(axis=-1, keepdims=True) - low) / np.float32(15)).astype(np.float16).astype(np.float32)
    m = low.astype(np.float16).astype(np.float32)
    quotient = np.divide(groups - m, d, out=np.zeros_like(groups), where=d != 0)
    return np.asarray(np.rint(quotient).clip(0, 15) * d + m)


def weighted_errors(groups: Floats, packed: Floats) -> NDArray[np.float64]:
    wide = groups.astype(np.float64)
    weight = np.abs(wide) + np.sqrt((wide**2).mean(axis=-1, keepdims=True))
    return np.asarray((weight * (packed - wide) ** 2).sum(axis=-1))


@given(hnp.arrays(np.float32, (2, 64), elements=st.floats(-60000, 60000, width=32)))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_search_for_a_4_bit_scale_never_makes_a_group_worse(kernels: ModuleType, weight: Floats) -> None:
    groups = weight.reshape(2, 2, 32)
    found = kernels.unpack(kernels.pack("int4", 64, [("F32", weight.view(np.uint8), None)])).reshape(2, 2, 32)
    plain = weighted_errors(groups, plain_int4(groups))
    assert (weighted_errors(groups, found) <= plain * (1 + 1e-4) + np.finfo(np.float32).tiny).all()


def test_the_search_gains_a_seventh_of_the_squared_error_of_bell_shaped_weights(kernels: ModuleType) -> None:
    weight = bell(2, 64, 512)
    found = kernels.unpack(kernels.pack("int4", 512, [("F32", weight.view(np.uint8), None)]))
    error, plain = (weighted_errors(weight.reshape(-1, 32), values.reshape(-1, 32)).sum()
                    for values in (found, plain_int4(weight.reshape(-1, 32))))
    assert error < plain * 6 / 7


def test_weights_on_a_4_bit_grid_keep_their_values(kernels: ModuleType) -> None:
    grid = np.random.default_rng(1).integers(0, 16, (4, 64)).astype(np.float32)
    grid[:, ::32], grid[:, 1::32] = 0, 15
    weight = grid * np.float32(0.25) - np.float32(1.5)
    assert same_bits(kernels.unpack(kernels.pack("int4", 64, [("F32", weight.view(np.uint8), None)])), weight)


def test_packed_values_depend_neither_on_threads_nor_on_the_path(kernels: ModuleType) -> None:
    source = [("F32", bell(4, 300, 256).view(np.uint8), None)]
    for form in FORMS:
        packed = [kernels.unpack(kernels.pack(form, 256, source, num_threads, path))
                  for path in ("auto", *kernels.paths()) for num_threads in (0, 1, 3)]
        assert all(same_bits(values, packed[0]) for values in packed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", (blocks.weight_blocks, blocks.any_blocks))
@pytest.mark.parametrize("source_type", sorted(blocks.HALVES))
def test_packed_values_are_the_references_to_the_bit(
    kernels: ModuleType, form: str, make: Callable[..., Bytes], source_type: str
) -> None:
    raw = make(source_type, 21, 512, seed=3)
    source, order = SourceTensor("w", 21, 512, source_type, raw), np.random.default_rng(6).permutation(21)
    try:
        expected = rounded_to_form(source, form)
    except ModelError:
        with pytest.raises(ValueError, match=r"too large|not finite"):
            kernels.pack(form, 512, [(source_type, raw, None)])
        return
    assert np.array_equal(kernels.unpack(kernels.pack(form, 512, [(source_type, raw, order)])), expected[order])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source_type", sorted(blocks.HALVES))
def test_scales_that_are_not_finite_are_refused(kernels: ModuleType, form: str, source_type: str) -> None:
    for offset in blocks.HALVES[source_type]:
        raw = blocks.any_blocks(source_type, 3, 256)
        raw[1, offset : offset + 2] = np.array([np.nan], np.float16).view(np.uint8)
        with pytest.raises(ValueError, match=r"^sources\[0\]: a weight is not finite"):
            kernels.pack(form, 256, [(source_type, raw, None)])
        with pytest.raises(ModelError, match="not finite"):
            rounded_to_form(SourceTensor("w", 3, 256, source_type, raw), form)


@pytest.mark.parametrize("form", FORMS)
def test_sources_stack_along_the_outputs_and_may_be_reordered(kernels: ModuleType, form: str) -> None:
    first, second, third = bell(3, 20, 64), bell(4, 9, 64), bell(5, 7, 64)
    order = np.random.default_rng(6).permutation(20).astype(np.int64)
    sources = [
        ("F32", first.view(np.uint8), order),
        ("Q8_0", written_as("Q8_0", second), None),
        ("F16", written_as("F16", third), None),
    ]
    whole = kernels.unpack(kernels.pack(form, 64, sources))
    assert same_bits(whole[:20], kernels.unpack(kernels.pack(form, 64, [("F32", first.view(np.uint8), None)]))[order])
    assert same_bits(whole[20:29], kernels.unpack(kernels.pack(form, 64, [sources[1]])))
    assert same_bits(whole[29:], kernels.unpack(kernels.pack(form, 64, [sources[2]])))


def test_a_view_of_a_larger_array_may_be_packed(kernels: ModuleType) -> None:
    weight = bell(7, 30, 64)
    every_second = kernels.pack("f32", 64, [("F32", weight.view(np.uint8)[::2], None)])
    assert same_bits(kernels.unpack(every_second), np.ascontiguousarray(weight[::2]))


@pytest.mark.parametrize("form", FORMS)
def test_a_constant_or_zero_group_is_exact(kernels: ModuleType, form: str) -> None:
    weight = np.zeros((2, 64), dtype=np.float32)
    weight[1, :32] = 0.5
    packed = kernels.pack(form, 64, [("F32", weight.view(np.uint8), None)])
    assert np.allclose(kernels.unpack(packed), weight, rtol=2.0**-10, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source_type", ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"))
def test_weights_that_are_not_finite_are_refused_by_their_source(
    kernels: ModuleType, form: str, source_type: str
) -> None:
    good = written_as(source_type, bell(8, 40, 64))
    for value in (np.nan, np.inf, -np.inf):
        bad = good.copy()
        wide = np.array([value], dtype=np.float32).view(np.uint8)
        half = np.array([value], dtype=np.float16).view(np.uint8)      # the types in blocks begin with an f16 scale
        poison = {"F32": wide, "BF16": wide[2:]}.get(source_type, half)
        bad[33, : len(poison)] = poison
        with pytest.raises(ValueError, match=r"^sources\[1\]: a weight is not finite"):
            kernels.pack(form, 64, [(source_type, good, None), (source_type, bad, None)])


def test_values_too_large_for_the_form_are_refused(kernels: ModuleType) -> None:
    large = np.full((1, 64), 1e38, dtype=np.float32)
    for form in ("int8", "int4"):
        with pytest.raises(ValueError, match=r"^sources\[0\]: a weight is too large"):
            kernels.pack(form, 64, [("F32", large.view(np.uint8), None)])
    largest = np.full((1, 64), np.finfo(np.float32).max, dtype=np.float32)
    with pytest.raises(ValueError, match=r"^sources\[0\]: a weight is too large"):
        kernels.pack("bf16", 64, [("F32", largest.view(np.uint8), None)])
    q4_0 = np.zeros((1, 18), dtype=np.uint8)
    q4_0[0, :2] = np.array([30000], dtype=np.float16).view(np.uint8)
    with pytest.raises(ValueError, match=r"^sources\[0\]: a weight is too large"):
        kernels.pack("int4", 32, [("Q4_0", q4_0, None)])


def test_what_cannot_be_packed_is_refused_with_its_reason(kernels: ModuleType) -> None:
    raw = bell(9, 4, 48).view(np.uint8)
    odd = np.ascontiguousarray(bell(9, 4, 47)).view(np.uint8)
    for arguments, message in (
        (("int8", 48, [("F32", raw, None)]), "num_inputs: form int8 needs a multiple of 32"),
        (("int4", 48, [("F32", raw, None)]), "num_inputs: form int4 needs a multiple of 32"),
        (("bf16", 47, [("F32", odd, None)]), "num_inputs: form bf16 needs a multiple of 2"),
        (("int3", 48, [("F32", raw, None)]), "form: int3"),
        (("f32", 48, []), "sources: nothing"),
        (("f32", 48, [("IQ4_XS", raw, None)]), "sources\\[0\\]: source type IQ4_XS"),
        (("f32", 32, [("F32", raw, None)]), "sources\\[0\\]: a row of 192 bytes"),
        (("f32", 48, [("Q8_0", raw, None)]), "sources\\[0\\]: a row of 192 bytes"),
        (("f32", 48, [("F32", raw.T, None)]), "sources\\[0\\]: raw must have contiguous rows"),
        (("f32", 48, [("F32", raw.astype(np.int32), None)]), "sources\\[0\\]: raw must be"),
        (("f32", 48, [("F32", raw, np.arange(3))]), "sources\\[0\\]: row_order must name every row"),
        (("f32", 48, [("F32", raw, np.arange(4) + 1)]), "sources\\[0\\]: row_order names row 4"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            kernels.pack(*arguments)


def test_padding_is_not_counted_as_outputs_but_as_bytes(kernels: ModuleType) -> None:
    raw = bell(10, 17, 64).view(np.uint8)
    sizes = {form: kernels.pack(form, 64, [("F32", raw, None)]).num_bytes for form in FORMS}
    assert sizes == {"f32": 2 * 64 * 64, "bf16": 2 * 64 * 32, "int8": 2 * 2 * 544, "int4": 2 * 2 * 320}
