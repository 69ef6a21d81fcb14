"""Every family against transformers: a tiny random checkpoint each, in f32, on the oracle and on every C++ path."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.build import load_model
from paceline.config import ModelConfig
from paceline.model.decoder import record_decoder
from paceline.model.families import (
    FAMILIES,
    spec_from_config,
    spec_from_gguf,
    weights_from_config,
    weights_from_gguf,
)
from paceline.model.fields import read_json_fields
from paceline.model.gguf import read_gguf
from paceline.model.loader import open_model
from paceline.model.safetensors import read_directory
from paceline.model.spec import ModelSpec, Weights
from paceline.model.stored import StoredTensor
from paceline.ops.dequantize import dequantize
from paceline.ops.interface import KVSpec, SourceTensor
from paceline.ops.numpy_ops import NumpyBackend
from tests.golden.family_cases import CASES, DIRECTORY, MAX_POSITION, NUM_GREEDY, TOKENS
from tests.golden.family_gguf import GGUF_CASES, write_gguf
from tests.runner.helpers import BACKENDS, Generation, generate, groups_of, kv_of, make_executor, one_row_batch

BLOCKS = (4, 1, 9, 2)


@cache
def opened(name: str) -> tuple[ModelSpec, Weights]:
    directory = DIRECTORY / name
    files = read_directory(directory)
    spec = spec_from_config(read_json_fields(directory / "config.json"), files.tensors)
    return spec, weights_from_config(spec, files.tensors, str(directory))


def pool_of(spec: ModelSpec, dtype: str = "f32") -> KVSpec:
    return kv_of(spec, 40 * len(groups_of(spec)), dtype=dtype)


@cache
def expected(name: str) -> tuple[np.ndarray, list[int]]:
    with np.load(DIRECTORY / name / "expected.npz") as file:
        return file["logits"], file["greedy"].tolist()


def test_every_family_has_a_golden() -> None:
    assert {opened(name)[0].family for name in CASES} == set(FAMILIES)


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, backend_name: str) -> None:
    spec, weights = opened(name)
    backend = BACKENDS[backend_name]()
    runner = backend.bind(record_decoder(spec, weights, backend, "f32", MAX_POSITION), pool_of(spec))
    logits = runner.step(one_row_batch(TOKENS, 0, BLOCKS, groups_of(spec)), wants_logits=True).logits
    runner.close()
    assert logits is not None
    assert np.abs(logits - expected(name)[0]).max() < 1e-4


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers_in_any_company(name: str, backend_name: str) -> None:
    """Alone and whole, then in chunks beside others: the same tokens, log-probabilities and logits, bit for bit."""
    spec, weights = opened(name)
    groups = groups_of(spec)
    alone = Generation("hero", list(TOKENS), BLOCKS, num_new=NUM_GREEDY, groups=groups)
    executor = make_executor(pool_of(spec), BACKENDS[backend_name](), spec, weights)
    generate(executor, [alone])
    assert alone.drawn == expected(name)[1]
    for chunk in (1, 7):
        hero = Generation("hero", list(TOKENS), (30, 31, 32, 33), num_new=NUM_GREEDY, groups=groups)
        mates = [Generation("mate", TOKENS[5:30], (0, 3, 5), groups=groups),
                 Generation("short", TOKENS[:1], (6, 7), num_new=9, groups=groups)]
        generate(executor, [mates[0], hero, mates[1]], chunk)
        assert hero.outcome == alone.outcome, chunk
    executor.close()


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", GGUF_CASES)
def test_the_same_checkpoint_as_gguf_gives_the_same_logits_and_tokens(
        name: str, backend_name: str, tmp_path: Path) -> None:
    file = read_gguf(write_gguf(name, tmp_path / "model.gguf"))
    spec = spec_from_gguf(file.fields, file.tensors)
    weights = weights_from_gguf(spec, file.tensors, "model.gguf")
    hero = Generation("hero", list(TOKENS), BLOCKS, num_new=NUM_GREEDY, groups=groups_of(spec))
    executor = make_executor(pool_of(spec), BACKENDS[backend_name](), spec, weights)
    generate(executor, [hero])
    executor.close()
    assert hero.drawn == expected(name)[1]
    assert np.abs(np.frombuffer(hero.logits[0], np.float32) - expected(name)[0][-1]).max() < 1e-4


def last_logits(spec: ModelSpec, weights: Weights) -> bytes:
    hero = Generation("hero", list(TOKENS), BLOCKS, num_new=1)
    generate(make_executor(kv_of(spec, dtype="f32"), NumpyBackend(), spec, weights), [hero])
    return hero.logits[0]


@pytest.mark.parametrize("layout", ["each expert", "gate and up"])
def test_experts_of_every_gguf_layout_are_the_same(layout: str, tmp_path: Path) -> None:
    file = read_gguf(write_gguf("mixtral", tmp_path / "model.gguf", layout))
    kind = "ffn_up.3.weight" if layout == "each expert" else "ffn_gate_up_exps.weight"
    assert f"blk.1.{kind}" in file.tensors and "blk.1.ffn_up_exps.weight" not in file.tensors
    spec = spec_from_gguf(file.fields, file.tensors)
    assert spec.family == "mixtral"
    logits = np.frombuffer(last_logits(spec, weights_from_gguf(spec, file.tensors, "model.gguf")), np.float32)
    assert np.abs(logits - expected("mixtral")[0][-1]).max() < 1e-4


def test_quantised_experts_in_one_tensor_are_each_its_own(tmp_path: Path) -> None:
    file = read_gguf(write_gguf("mixtral", tmp_path / "model.gguf", "gate and up", "Q8_0"))
    weights = weights_from_gguf(spec_from_gguf(file.fields, file.tensors), file.tensors, "model.gguf")
    names = [name for name in weights if ".experts." in name]
    assert len(names) == 2 * 4 * 3
    for name in names:
        found, original = weights[name], opened("mixtral")[1][name]
        assert isinstance(found, SourceTensor) and isinstance(original, SourceTensor) and found.source_type == "Q8_0"
        values = dequantize(original)
        np.testing.assert_allclose(dequantize(found), values, atol=np.abs(values).max() / 200)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_experts_under_the_names_of_memory_are_those_of_the_checkpoint(name: str) -> None:
    """transformers 5 holds a layer's experts in one tensor and writes them apart; some checkpoints are as in memory."""
    directory = DIRECTORY / name
    tensors = fused(read_directory(directory).tensors)
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"].shape[1:] == (64, 64)
    spec = spec_from_config(read_json_fields(directory / "config.json"), tensors)
    assert last_logits(spec, weights_from_config(spec, tensors, name)) == last_logits(*opened(name))


def fused(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The bytes of every expert's gate and up, and of every down, one after the other."""
    parts: dict[str, list[StoredTensor]] = {}
    for name, tensor in sorted(tensors.items()):
        match = re.fullmatch(r"(model\.layers\.\d+)\.[\w.]+\.experts\.\d+\.(\w+)\.weight", name)
        new = name.replace("block_sparse_moe", "mlp")
        if match:    # by name, w1 comes before w3 as gate before up
            new = f"{match[1]}.mlp.experts." + ("down_proj" if match[2] in ("w2", "down_proj") else "gate_up_proj")
        parts.setdefault(new, []).append(tensor)
    joined = {}
    for name, several in parts.items():
        shape, each = several[0].shape, 2 if "gate_up" in name else 1
        if len(several) > 1:
            shape = (len(several) // each, each * shape[0], shape[1])
        joined[name] = replace(several[0], shape=shape, raw=np.concatenate([part.raw for part in several]))
    return joined


def test_every_family_that_reads_gguf_has_a_gguf_golden() -> None:
    architectures = {family.gguf_architecture for family in FAMILIES.values() if family.gguf_architecture}
    assert architectures == set(GGUF_CASES.values())


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_opened_as_any_directory_is(name: str) -> None:
    files = open_model(str(DIRECTORY / name))
    assert files.spec == opened(name)[0] and set(files.weights) == set(opened(name)[1])
    assert files.tokenizer.encode("Hi!") == list(b"Hi!") and files.eos_token_ids == {2}


def test_the_fingerprint_says_which_factors_longrope_took() -> None:
    prints = [load_model(ModelConfig(model=str(DIRECTORY / name), isa="numpy", max_model_len=length)).fingerprint
              for name, length in (("phi3-long", 33), ("phi3-long", 32), ("phi3", 32))]
    assert "-rope_long-" in prints[0] and "-rope_short-" in prints[1] and "rope" not in prints[2]


NEUTRAL: dict[str, Any] = {
    "activation": "silu", "qk_norm": "none", "has_qkv_bias": False, "has_o_bias": False, "has_mlp_bias": False,
    "rotary_dim": None, "rope_scaling": None, "unrotated_layers": (), "embedding_scale": 1.0, "residual_scale": 1.0,
    "attention_scale": None, "attention_softcap": None, "logit_scale": 1.0, "logit_softcap": None, "windows": (),
    "window_rope_theta": None, "has_renormalised_shares": False, "shared_intermediate_size": 0,
}


@pytest.mark.parametrize("name", CASES)
def test_the_goldens_would_notice_every_feature_that_is_left_out(name: str) -> None:
    spec, weights = opened(name)
    backend = NumpyBackend()
    told = [feature for feature, value in NEUTRAL.items() if getattr(spec, feature) != value]
    if not any(window is not None and window < len(TOKENS) for window in spec.windows):
        told = [feature for feature in told if feature != "windows"]    # nothing lies behind it
    if spec.attention_scale == spec.head_dim**-0.5:
        told.remove("attention_scale")
    for feature in told:
        without = replace(spec, **{feature: NEUTRAL[feature]})
        runner = backend.bind(record_decoder(without, weights, backend, "f32", MAX_POSITION), pool_of(without))
        logits = runner.step(one_row_batch(TOKENS, 0, BLOCKS, groups_of(without)), wants_logits=True).logits
        assert logits is not None and np.abs(logits - expected(name)[0]).max() > 0.01, feature


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", ["granite", "olmo2", "stablelm", "gemma2", "gemma3", "qwen2-moe"])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_rounded_weights_and_cache_are_exact_in_any_company_too(name: str, backend_name: str, dtype: str) -> None:
    spec, weights = opened(name)
    executor = make_executor(pool_of(spec, "bf16"), BACKENDS[backend_name](), spec, weights, dtype)
    groups = groups_of(spec)
    alone = Generation("hero", list(TOKENS), BLOCKS, groups=groups)
    generate(executor, [alone])
    hero = Generation("hero", list(TOKENS), (30, 31, 32), groups=groups)
    mate = Generation("mate", TOKENS[5:30], (0, 3, 5), groups=groups)
    generate(executor, [mate, hero], chunk=7)
    assert hero.outcome == alone.outcome
    executor.close()
