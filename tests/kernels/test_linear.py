"""A linear's rows never know who shares their batch, and its numbers are those of the unpacked weights."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Floats = NDArray[np.float32]
FORMS = ("f32", "bf16", "int8", "int4")

# Relative to sum_k |w_k x_k|, the size of what is added up. f32: rounding of at most 200 additions. bf16 rounds each
# activation to 8 bits (2^-9 relative); int8 and int4 round it to a 254th of its group's largest, which on these
# bell-shaped rows comes to a few thousandths.
ORACLE_ERROR = {"f32": 1e-5, "bf16": 2.0**-9, "int8": 6e-3, "int4": 6e-3}


def bell(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def packed_from(kernels: ModuleType, form: str, weight: Floats) -> Any:
    return kernels.pack(form, weight.shape[1], [("F32", weight.view(np.uint8), None)])


def same_bits(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def as_the_kernel_sees(kernels: ModuleType, path: str, form: str, x: Floats) -> NDArray[np.float64]:
    """The input after the rounding the form prescribes, in plain numpy."""
    if form == "f32":
        return x.astype(np.float64)
    if form == "bf16":
        raw = x.view(np.uint32).astype(np.uint64)
        rounded = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16 << 16).astype(np.uint32)
        return rounded.view(np.float32).astype(np.float64)
    groups = x.reshape(len(x), -1, 32)
    scale = np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)
    q = np.rint(np.divide(groups, scale, out=np.zeros_like(groups), where=scale != 0))
    return (q.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(kernels: ModuleType, path: str, form: str) -> None:
    packed = packed_from(kernels, form, bell(1, 77, 96))
    bias = bell(2, 77)
    most = 2 * kernels.max_tile_rows(path) + 3
    x = bell(3, most, 96)
    alone = np.concatenate([kernels.linear(path, packed, x[i : i + 1], bias) for i in range(most)])
    for rows in range(1, most + 1):
        for threads in (1, 2, 3):
            assert same_bits(kernels.linear(path, packed, x[:rows], bias, threads), alone[:rows]), (rows, threads)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row_tile", (1, 2, 3, 5, 7))
def test_how_rows_are_cut_into_calls_changes_nothing(kernels: ModuleType, path: str, form: str, row_tile: int) -> None:
    packed = packed_from(kernels, form, bell(4, 50, 64))
    x = bell(5, 19, 64)
    assert same_bits(kernels.linear(path, packed, x, None, 2, row_tile), kernels.linear(path, packed, x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_outputs", (1, 15, 16, 17, 33, 48, 50, 96, 97))
@pytest.mark.parametrize("num_inputs", (32, 64, 192))
def test_outputs_are_those_of_the_unpacked_weights(
    kernels: ModuleType, path: str, form: str, num_outputs: int, num_inputs: int
) -> None:
    packed = packed_from(kernels, form, bell(6, num_outputs, num_inputs))
    weight = kernels.unpack(packed).astype(np.float64)
    x, bias = bell(7, 5, num_inputs), bell(8, num_outputs)
    got = kernels.linear(path, packed, x, bias)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(weight).T + np.abs(bias)
    exact = x.astype(np.float64) @ weight.T + bias
    assert np.all(np.abs(got - exact) <= ORACLE_ERROR[form] * magnitude + 1e-30)
    # With the input rounded as the kernel rounds it, only f32 addition is left.
    rounded = as_the_kernel_sees(kernels, path, form, x) @ weight.T + bias
    assert np.all(np.abs(got - rounded) <= 1e-5 * magnitude)


def test_odd_sizes_work_where_the_form_has_no_groups(kernels: ModuleType, path: str) -> None:
    for form, num_inputs in (("f32", 1), ("f32", 37), ("bf16", 2), ("bf16", 38)):
        weight, x = bell(9, 21, num_inputs), bell(10, 3, num_inputs)
        packed = packed_from(kernels, form, weight)
        seen = as_the_kernel_sees(kernels, path, form, x) @ kernels.unpack(packed).astype(np.float64).T
        assert np.allclose(kernels.linear(path, packed, x), seen, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_the_last_strip_writes_only_its_outputs(kernels: ModuleType, path: str, form: str) -> None:
    """The buffer is poisoned with NaN: every output is written, the floats after the last one are left alone."""
    packed = packed_from(kernels, form, bell(11, 35, 64))
    x = bell(12, 7, 64)
    memory = np.full(8 * 35, np.nan, dtype=np.float32)
    kernels.linear_into(path, packed, x, memory.reshape(8, 35))
    assert same_bits(memory[: 7 * 35].reshape(7, 35), kernels.linear(path, packed, x))
    assert np.isnan(memory[7 * 35 :]).all()


@pytest.mark.parametrize("form", ("int8", "int4"))
def test_extreme_products_do_not_saturate(kernels: ModuleType, path: str, form: str) -> None:
    """255 * 127 * 2 overflows 16 bits: the trap of vpmaddubsw."""
    for sign in (1.0, -1.0):
        weight = np.full((16, 64), sign, dtype=np.float32)
        weight[:, 0] = -sign
        packed = packed_from(kernels, form, weight)
        x = np.full((1, 64), 3.0, dtype=np.float32)
        exact = x.astype(np.float64) @ kernels.unpack(packed).astype(np.float64).T
        assert np.allclose(kernels.linear(path, packed, x), exact, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("poison", (np.nan, np.inf, -np.inf))
def test_a_poisoned_row_shows_and_stays_alone(kernels: ModuleType, path: str, form: str, poison: float) -> None:
    packed = packed_from(kernels, form, bell(13, 33, 64))
    x = bell(14, 4, 64)
    clean = kernels.linear(path, packed, x)
    x[2, 40] = poison
    got = kernels.linear(path, packed, x)
    assert not np.isfinite(got[2]).any()
    assert same_bits(got[[0, 1, 3]], clean[[0, 1, 3]])


def test_wrong_arguments_are_named(kernels: ModuleType, path: str) -> None:
    packed = packed_from(kernels, "f32", bell(15, 16, 32))
    x = bell(16, 2, 32)
    for arguments, name in (
        (("mmx", packed, x), "path"),
        ((path, packed, x[:, :16]), "x"),
        ((path, packed, x.astype(np.float64)), "x"),
        ((path, packed, np.asfortranarray(x)), "x"),
        ((path, packed, x, bell(17, 15)), "bias"),
        ((path, packed, x, None, 0), "num_threads"),
        ((path, packed, x, None, 1, 0), "row_tile_hint"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            kernels.linear(*arguments)


def test_paths_are_listed_best_first_and_end_with_the_portable_one(kernels: ModuleType) -> None:
    assert kernels.paths()[-1] == "portable"
    features = kernels.cpu_features()
    assert ("avx2" in kernels.paths()) == all(features.get(f, False) for f in ("avx2", "fma", "f16c"))
