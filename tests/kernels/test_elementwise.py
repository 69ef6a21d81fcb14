"""Row verbs against float64 numpy, and the promise that a row's bits do not depend on its neighbours."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

Floats = NDArray[np.float32]
WIDTHS = (1, 15, 16, 17, 64, 576)


def bell(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def same_bits(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


@pytest.mark.parametrize("form", ("f32", "bf16", "int8", "int4"))
def test_embed_returns_rows_of_the_unpacked_table(kernels: ModuleType, path: str, form: str) -> None:
    packed = kernels.pack(form, 96, [("F32", bell(1, 53, 96).view(np.uint8), None)])
    ids = np.array([0, 52, 7, 16, 15, 52, 31], dtype=np.int32)
    assert same_bits(kernels.embed(path, packed, ids), kernels.unpack(packed)[ids])
    for outside in (-1, 53):
        with pytest.raises(ValueError, match=r"^ids: "):
            kernels.embed(path, packed, np.array([outside], dtype=np.int32))


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(kernels: ModuleType, path: str, width: int) -> None:
    x, weight = bell(2, 7, width) * 3, bell(3, width)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    got = kernels.rms_norm(path, x, weight, 1e-5)
    assert np.allclose(got, exact, rtol=1e-6, atol=1e-7)
    assert same_bits(got, np.concatenate([kernels.rms_norm(path, x[i : i + 1], weight, 1e-5) for i in range(7)]))


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(kernels: ModuleType, path: str, width: int) -> None:
    gate_up = bell(4, 5, 2 * width) * 8
    gate, up = gate_up[:, :width].astype(np.float64), gate_up[:, width:]
    got = kernels.silu_mul(path, gate_up)
    assert np.allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)
    assert same_bits(got, np.concatenate([kernels.silu_mul(path, gate_up[i : i + 1]) for i in range(5)]))


@pytest.mark.parametrize("width", WIDTHS)
def test_add(kernels: ModuleType, path: str, width: int) -> None:
    x, y = bell(5, 3, width), bell(6, 3, width)
    assert same_bits(kernels.add(path, x, y), x + y)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(kernels: ModuleType, path: str, width: int, has_bias: bool) -> None:
    x, weight, bias = bell(10, 7, width) * 3 + 1, bell(11, width), bell(12, width) if has_bias else None
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    exact = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * weight + (bias if has_bias else 0)
    got = kernels.layer_norm(path, x, weight, bias, 1e-5)
    assert np.allclose(got, exact, rtol=1e-5, atol=4e-6)
    rows = [kernels.layer_norm(path, x[i : i + 1], weight, bias, 1e-5) for i in range(7)]
    assert same_bits(got, np.concatenate(rows))


@pytest.mark.parametrize("width", (*WIDTHS, 24))
def test_each_slice_is_an_rms_norm_of_its_own(kernels: ModuleType, path: str, width: int) -> None:
    x, weight = bell(13, 5, 3 + 4 * width), bell(14, width)
    got = kernels.rms_norm_slices(path, x, weight, 1e-5, 3, 3)
    outside = [*range(3), *range(3 + 3 * width, 3 + 4 * width)]
    assert same_bits(got[:, outside], x[:, outside])
    for first in range(3, 3 + 3 * width, width):
        alone = kernels.rms_norm(path, np.ascontiguousarray(x[:, first : first + width]), weight, 1e-5)
        assert same_bits(np.ascontiguousarray(got[:, first : first + width]), alone)
    rows = [kernels.rms_norm_slices(path, x[i : i + 1], weight, 1e-5, 3, 3) for i in range(5)]
    assert same_bits(got, np.concatenate(rows))


@pytest.mark.parametrize("width", WIDTHS)
def test_gelu_tanh_mul(kernels: ModuleType, path: str, width: int) -> None:
    gate_up = bell(15, 5, 2 * width) * 4
    gate, up = gate_up[:, :width].astype(np.float64), gate_up[:, width:]
    exact = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    got = kernels.gelu_tanh_mul(path, gate_up)
    assert np.allclose(got, exact, rtol=1e-5, atol=2e-7)
    assert same_bits(got, np.concatenate([kernels.gelu_tanh_mul(path, gate_up[i : i + 1]) for i in range(5)]))


def test_gelu_at_the_ends_of_the_number_line(kernels: ModuleType, path: str) -> None:
    gate = np.array([0.0, 200.0, -200.0, 3e38, -3e38, np.nan], dtype=np.float32)
    got = kernels.gelu_tanh_mul(path, np.stack([gate, np.ones_like(gate)], axis=1))[:, 0]
    assert list(got[:5]) == [0, 200, 0, gate[3], 0] and np.isnan(got[5])


@pytest.mark.parametrize("width", WIDTHS)
def test_scale_and_scaled_add_round_as_numpy_does(kernels: ModuleType, path: str, width: int) -> None:
    x, y, factor = bell(16, 3, width), bell(17, 3, width), np.float32(0.22)
    assert same_bits(kernels.scale(path, x, factor), x * factor)
    assert same_bits(kernels.add(path, x, y, factor), x + y * factor)


@pytest.mark.parametrize("width", WIDTHS)
def test_softcap(kernels: ModuleType, path: str, width: int) -> None:
    x = bell(18, 6, width) * np.logspace(-3, 3, 6, dtype=np.float32)[:, None]
    got = kernels.softcap(path, x, 30.0)
    assert np.allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), rtol=5e-7, atol=0)
    assert same_bits(got, np.concatenate([kernels.softcap(path, x[i : i + 1], 30.0) for i in range(6)]))


def test_softcap_of_what_is_not_ordinary(kernels: ModuleType, path: str) -> None:
    got = kernels.softcap(path, np.array([[np.inf, -np.inf, np.nan, 3e38, 0.0]], np.float32), 30.0)[0]
    assert list(got[[0, 1, 3, 4]]) == [30, -30, 30, 0] and np.isnan(got[2])


def silu_of(kernels: ModuleType, path: str, gate: Floats) -> Floats:
    return kernels.silu_mul(path, np.stack([gate, np.ones_like(gate)], axis=1))[:, 0]


def test_silu_at_the_ends_of_the_number_line(kernels: ModuleType, path: str) -> None:
    gate = np.array([0.0, -0.0, 200.0, -200.0, 3e38, -3e38, 88.9, -88.9, np.nan], dtype=np.float32)
    got = silu_of(kernels, path, gate)
    assert got[0] == 0 and got[1] == 0
    assert got[2] == 200 and got[3] == 0
    assert got[4] == gate[4] and got[5] == 0
    assert got[6] == gate[6] and abs(got[7]) < 1e-36
    assert np.isnan(got[8])


def test_exp_is_within_one_unit_in_the_last_place(kernels: ModuleType, path: str) -> None:
    x = np.concatenate([
        np.linspace(-87.33, 88.72, 200_003, dtype=np.float32),
        np.linspace(-1e-3, 1e-3, 10_001, dtype=np.float32),
        np.arange(-125, 128, dtype=np.float32) * np.float32(np.log(2)),
    ])
    exact = np.exp(x.astype(np.float64))
    error = np.abs(kernels.exp(path, x) - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() <= 1.0


def test_exp_of_what_is_not_ordinary(kernels: ModuleType, path: str) -> None:
    x = np.array([0.0, -0.0, -np.inf, np.inf, np.nan, -88.0, -1000.0, 89.0, 1000.0], dtype=np.float32)
    got = kernels.exp(path, x)
    assert got[0] == 1 and got[1] == 1 and got[2] == 0 and np.isposinf(got[3]) and np.isnan(got[4])
    assert (got[5:7] == 0).all() and np.isposinf(got[7:]).all()


def test_quantised_rows_are_those_of_the_definition(kernels: ModuleType, path: str) -> None:
    x = bell(7, 6, 96)
    x[1, 32:64] = 0.0                                   # a group of zeros
    x[2, :32] = np.linspace(-127, 127, 32) + 0.0        # scale 1
    x[3, :32] = np.tile(np.array([127, 0.5, 1.5, -2.5], dtype=np.float32), 8)     # ties go to even
    x[4, :32] = 190 * 2.0**-149                         # the scale itself is subnormal
    q, scale, total = kernels.quantize(path, x)
    groups = x.reshape(6, 3, 32)
    wanted_scale = np.abs(groups).max(axis=2) / np.float32(127)
    assert same_bits(scale, wanted_scale)
    spread = np.repeat(wanted_scale, 32, axis=1)
    wanted = np.rint(np.divide(x, spread, out=np.zeros_like(x), where=spread != 0)).clip(-127, 127)
    assert np.array_equal(q, wanted.astype(np.int8))
    assert np.array_equal(total, q.reshape(6, 3, 32).sum(axis=2, dtype=np.int32))
    assert list(q[3, :4]) == [127, 0, 2, -2]
    assert not q[1, 32:64].any() and scale[1, 1] == 0


def test_bf16_rows_round_to_nearest_even(kernels: ModuleType, path: str) -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x00000001, 0x00008000, 0x7F7FFFFF, 0x7F800000,
                     0xFF800000, 0x80000000, 0xBF80C000], dtype=np.uint32)
    wanted = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x0000, 0x0000, 0x7F80, 0x7F80, 0xFF80, 0x8000, 0xBF81]
    assert list(kernels.round_bf16(path, bits.view(np.float32)[None])[0]) == wanted
    nan = np.array([[0x7F800001, 0xFFFFFFFF]], dtype=np.uint32).view(np.float32)
    assert all((h & 0x7F80) == 0x7F80 and (h & 0x7F) for h in kernels.round_bf16(path, nan)[0])


def test_wrong_shapes_are_named(kernels: ModuleType, path: str) -> None:
    x = bell(8, 2, 32)
    for call, name in (
        (lambda: kernels.rms_norm(path, x, bell(9, 31), 1e-5), "weight"),
        (lambda: kernels.silu_mul(path, x[:, :31].copy()), "gate_up"),
        (lambda: kernels.add(path, x, x[:1]), "y"),
        (lambda: kernels.layer_norm(path, x, bell(9, 32), bell(9, 31), 1e-5), "bias"),
        (lambda: kernels.rms_norm_slices(path, x, bell(9, 16), 1e-5, 1, 2), "num_slices"),
        (lambda: kernels.quantize(path, x[:, :16].copy()), "x"),
        (lambda: kernels.embed(path, kernels.pack("f32", 32, [("F32", x.view(np.uint8), None)]), x[0]), "ids"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            call()
