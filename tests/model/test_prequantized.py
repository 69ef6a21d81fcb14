"""AWQ, GPTQ and FP8 checkpoints: their own values, and by name whatever cannot be read."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ModelError
from paceline.model.decoder import record_decoder
from paceline.model.fields import Fields
from paceline.model.loader import open_model
from paceline.model.prequantized import FP8_VALUES, ConvertedTensor, plain_checkpoint
from paceline.model.stored import StoredTensor
from paceline.ops.dequantize import bf16_bits, dequantize, from_bf16_bits
from paceline.ops.interface import PackedLinear, SourceTensor
from paceline.ops.machine import usable_cores
from paceline.ops.numpy_ops import NumpyBackend
from tests.runner.helpers import BACKENDS, kv_of, one_row_batch

from . import quantized, tiny

KINDS = {"float16": "F16", "float32": "F32", "int32": "I32", "uint8": "F8_E4M3"}


def stored(arrays: quantized.Arrays) -> dict[str, StoredTensor]:
    return {name: StoredTensor(name, array.shape, KINDS[array.dtype.name], array.reshape(-1).view(np.uint8))
            for name, array in arrays.items()}


def converted(settings: dict[str, Any], arrays: quantized.Arrays, name: str = "a.weight") -> SourceTensor:
    config, tensors = plain_checkpoint(Fields({"quantization_config": settings, "x": 1}, "config.json"), stored(arrays))
    assert config.values == {"x": 1} and set(tensors) == {name} and isinstance(tensors[name], ConvertedTensor)
    return tensors[name].to_matrix()


def weight(num_outputs: int, num_inputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.003, 0.02, (num_outputs, num_inputs)).astype(np.float32)


@pytest.mark.parametrize("is_symmetric", (True, False))
@pytest.mark.parametrize("group_size", (32, 64, 128, -1))
@pytest.mark.parametrize("layout", ("awq", "gptq", "gptq_v2"))
def test_four_bit_values_are_the_checkpoints(layout: str, group_size: int, is_symmetric: bool) -> None:
    linear = quantized.quantized(weight(24, 256), 256 if group_size == -1 else group_size, is_symmetric)
    arrays = quantized.awq_arrays("a", linear) if layout == "awq" else (
        quantized.gptq_arrays("a", linear, is_v2=layout == "gptq_v2"))
    settings = {"quant_method": layout.removesuffix("_v2"), "bits": 4, "group_size": group_size, "desc_act": False}
    if layout == "gptq_v2":
        settings["checkpoint_format"] = "gptq_v2"
    source = converted(settings, arrays)
    assert (source.source_type, source.num_outputs, source.num_inputs) == ("Q4_1", 24, 256)
    error = np.abs(dequantize(source) - linear.values)
    if is_symmetric:
        assert not error.any()
    # What rounding s z to half precision can lose: half a unit in the last place of 11 bits.
    bound = np.repeat(linear.scales.astype(np.float64) * linear.zeros * 2.0**-11, 256 // linear.scales.shape[1], axis=1)
    assert (error <= bound + 1e-9).all()


@pytest.mark.parametrize("method", ("awq", "gptq"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quantised_checkpoint_is_packed_as_int4(tmp_path: Path, method: str, backend: str) -> None:
    config, arrays, values = quantized.four_bit_checkpoint(method)
    files = open_model(str(tiny.write_hf(tmp_path / method, config, arrays)))
    assert "Q4_1" in files.source
    packs = BACKENDS[backend]()
    program = record_decoder(files.spec, files.weights, packs, "auto", 64)
    down = program.weights["layers.1.down"]
    assert isinstance(down, PackedLinear) and down.form == "int4"
    expected = values["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_allclose(packs.unpack(down), expected, atol=np.abs(expected).max() * 2.0**-10)


@pytest.mark.parametrize("method", ("awq", "gptq"))
def test_quantised_experts_that_are_all_the_same_are_the_plain_mlp(tmp_path: Path, method: str) -> None:
    config, plain, _ = quantized.four_bit_checkpoint(method)
    routed = {f"model.layers.{layer}.block_sparse_moe.gate.weight": weight(3, tiny.HIDDEN) for layer in (0, 1)}
    for name, array in plain.items():
        for expert in range(3):
            at = name.replace("mlp.", f"block_sparse_moe.experts.{expert}.")
            for which, number in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                at = at.replace(which, number)
            routed[at] = array
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
    logits = []
    for changes, tensors in (({}, plain), (experts, routed)):
        files = open_model(str(tiny.write_hf(tmp_path / str(len(changes)), {**config, **changes}, tensors)))
        packs = NumpyBackend()
        runner = packs.bind(record_decoder(files.spec, files.weights, packs, "auto", 64), kv_of(files.spec))
        logits.append(runner.step(one_row_batch([5, 6, 7], 0, [0]), wants_logits=True).logits)
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_nothing_is_converted_before_it_is_asked_for() -> None:
    calls = []
    tensor = ConvertedTensor("w", (2, 32), "Q4_1", np.empty(0, np.uint8), "AWQ",
                             lambda first, last: calls.append((first, last)) or np.zeros((2, 20), np.uint8))
    source = tensor.to_matrix(np.array([1, 0]))
    assert not calls and source.row_order is not None
    assert not dequantize(source).any() and calls == [(0, 2)]


LARGE = (1208, 512)    # more than one slab, the last one short


@pytest.mark.parametrize("method", ("awq", "gptq", "fp8"))
def test_a_weight_made_in_slabs_is_the_same_whole_or_in_part(method: str) -> None:
    """Parts are asked for where q, k and v, or gate and up, share one tensor."""
    linear = quantized.quantized(weight(*LARGE), 128, is_symmetric=False)
    arrays = {"awq": lambda: quantized.awq_arrays("a", linear), "gptq": lambda: quantized.gptq_arrays("a", linear),
              "fp8": lambda: fp8_arrays(*LARGE, (10, 4), "weight_scale_inv")}[method]()
    settings = {"quant_method": method, "bits": 4, "group_size": 128}
    _, tensors = plain_checkpoint(Fields({"quantization_config": settings}, "config.json"), stored(arrays))
    tensor = tensors["a.weight"]
    assert isinstance(tensor, ConvertedTensor) and tensor.shape[0] * tensor.shape[1] > 2 * (1 << 18)
    whole = tensor.to_matrix().raw
    assert np.array_equal(whole, np.concatenate([tensor.make(row, row + 8) for row in range(0, LARGE[0], 8)]))
    for first, last in ((0, 5), (3, 700), (605, 1208)):
        part = tensor.rows_to_matrix(first, last)
        assert (part.num_outputs, part.origin) == (last - first, tensor.origin)
        assert np.array_equal(part.raw, whole[first:last])


def test_what_a_slab_raises_is_raised() -> None:
    def fail(first: int, last: int) -> Any:
        raise ModelError(f"outputs {first} to {last}")

    with pytest.raises(ModelError, match="outputs 0 to 2"):
        ConvertedTensor("w", (2, 32), "Q4_1", np.empty(0, np.uint8), "AWQ", fail).to_matrix().raw.sum()


@pytest.mark.parametrize("method", ("awq", "gptq", "fp8"))
def test_making_a_weight_takes_little_memory_beside_it(method: str) -> None:
    shape = (4096, 1024)
    linear = quantized.quantized(weight(*shape), 128, is_symmetric=False)
    arrays = {"awq": lambda: quantized.awq_arrays("a", linear), "gptq": lambda: quantized.gptq_arrays("a", linear),
              "fp8": lambda: fp8_arrays(*shape, (32, 8), "weight_scale_inv")}[method]()
    settings = {"quant_method": method, "bits": 4, "group_size": 128}
    _, tensors = plain_checkpoint(Fields({"quantization_config": settings}, "config.json"), stored(arrays))
    source = tensors["a.weight"].to_matrix()
    tracemalloc.start()
    made = source.raw
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    slabs_at_once = usable_cores() + 1
    assert peak <= made.nbytes + slabs_at_once * 24 * (1 << 18)


@pytest.mark.parametrize(("method", "changes", "message"), [
    ("awq", {"bits": 8}, "bits=8: only 4"), ("awq", {"version": "gemv"}, "version='gemv'"),
    ("awq", {"zero_point": False}, "zero_point=False"),
    ("awq", {"group_size": 48}, "group_size=48: must be a multiple"),
    ("gptq", {"bits": 3}, "bits=3"), ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    ("awq", {"group_size": 0}, "group_size=0"), ("bitsandbytes", {}, "supported: awq, gptq, fp8"),
])
def test_settings_we_cannot_follow_are_named(tmp_path: Path, method: str, changes: dict[str, Any],
                                             message: str) -> None:
    config, arrays, _ = quantized.four_bit_checkpoint(method)
    config["quantization_config"] |= changes
    with pytest.raises(ModelError, match=message):
        open_model(str(tiny.write_hf(tmp_path / "bad", config, arrays)))


def test_act_order_is_refused_by_name_unless_it_changes_nothing(tmp_path: Path) -> None:
    config, arrays, _ = quantized.four_bit_checkpoint("gptq", desc_act=True)
    open_model(str(tiny.write_hf(tmp_path / "sorted", config, arrays)))
    name = "model.layers.0.mlp.up_proj.g_idx"
    arrays[name] = arrays[name][::-1].copy()
    with pytest.raises(ModelError, match=rf"desc_act=True: act-order.*{name}"):
        open_model(str(tiny.write_hf(tmp_path / "act_order", config, arrays)))
    bare = {name: array for name, array in arrays.items() if not name.endswith("g_idx")}
    with pytest.raises(ModelError, match=r"desc_act=True: .*missing"):
        open_model(str(tiny.write_hf(tmp_path / "bare", config, bare)))


@pytest.mark.parametrize(("kind", "message"), [("qzeros", "up_proj.qzeros is missing"), ("scales", "up_proj.scales"),
                                               ("qweight", "up_proj.weight")])
def test_parts_that_are_missing_or_misshapen_are_named(tmp_path: Path, kind: str, message: str) -> None:
    config, arrays, _ = quantized.four_bit_checkpoint("awq")
    name = f"model.layers.0.mlp.up_proj.{kind}"
    cut = {**arrays, name: np.ascontiguousarray(arrays[name][:-1])}
    with pytest.raises(ModelError, match="up_proj"):
        open_model(str(tiny.write_hf(tmp_path / "cut", config, cut)))
    del arrays[name]
    with pytest.raises(ModelError, match=message):
        open_model(str(tiny.write_hf(tmp_path / "missing", config, arrays)))


# ---- FP8

def fp8_arrays(num_rows: int, num_columns: int, scale_shape: tuple[int, ...], suffix: str) -> quantized.Arrays:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (num_rows, num_columns)).astype(np.uint8)
    codes[(codes & 127) == 127] = 0
    return {"a.weight": codes, f"a.{suffix}": rng.uniform(1e-4, 3e-3, scale_shape).astype(np.float32)}


@pytest.mark.parametrize(("shape", "suffix"), [((), "weight_scale"), ((1,), "weight_scale"), ((72, 1), "weight_scale"),
                                               ((72,), "weight_scale"), ((3, 2), "weight_scale_inv")])
def test_fp8_times_its_scale_becomes_bf16(shape: tuple[int, ...], suffix: str) -> None:
    arrays = fp8_arrays(72, 96, shape, suffix)
    settings = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    extra = {**arrays, "a.input_scale": np.ones((), np.float32)}
    source = converted(settings, extra)
    scale = arrays[f"a.{suffix}"]
    if shape == (3, 2):
        factors = np.repeat(np.repeat(scale, 32, axis=0), 64, axis=1)[:72, :96]
    else:
        factors = np.broadcast_to(scale.reshape(-1, 1), (72, 96))
    expected = from_bf16_bits(bf16_bits(FP8_VALUES[arrays["a.weight"]] * factors))
    assert source.source_type == "BF16" and np.array_equal(dequantize(source), expected)


def test_eight_bit_floats_are_what_the_format_says() -> None:
    for code, value in ((0, 0), (1, 2.0**-9), (7, 7 * 2.0**-9), (8, 2.0**-6), (0x38, 1), (0x3C, 1.5), (0x7E, 448),
                        (0xB8, -1)):
        assert FP8_VALUES[code] == value
    assert np.isnan(FP8_VALUES[[0x7F, 0xFF]]).all() and np.isfinite(FP8_VALUES).sum() == 254


def test_an_fp8_directory_opens_and_its_faults_are_named(tmp_path: Path) -> None:
    arrays: quantized.Arrays = {}
    for name, array in tiny.hf_arrays().items():
        if name.endswith("_proj.weight"):
            at = name.removesuffix(".weight")
            parts = fp8_arrays(*array.shape, (1, 1), "weight_scale_inv")
            arrays |= {name: parts["a.weight"], f"{at}.weight_scale_inv": parts["a.weight_scale_inv"]}
        else:
            arrays[name] = array
    config = tiny.hf_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    directory = tiny.write_hf(tmp_path / "fp8", config)
    weights = directory / "model.safetensors"
    tiny.write_safetensors(weights, stored(arrays))
    files = open_model(str(directory))
    assert "14 BF16" in files.source
    record_decoder(files.spec, files.weights, BACKENDS["numpy"](), "auto", 64)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tiny.write_safetensors(weights, stored({**arrays, name: np.ones((2, 5), np.float32)}))
    with pytest.raises(ModelError, match=rf"{name}: F32 of shape \[2, 5\] fits no scaling"):
        open_model(str(directory))
    tiny.write_safetensors(weights, stored({n: array for n, array in arrays.items() if n != name}))
    with pytest.raises(ModelError, match=r"up_proj\.weight: F8_E4M3 needs .* a weight_scale"):
        open_model(str(directory))
    (directory / "config.json").write_text(json.dumps(tiny.hf_config()))
    tiny.write_safetensors(weights, {name: t for name, t in stored(arrays).items() if not name.endswith("scale_inv")})
    bare = open_model(str(directory))
    with pytest.raises(ModelError, match="F8_E4M3"):
        record_decoder(bare.spec, bare.weights, BACKENDS["numpy"](), "auto", 64)
