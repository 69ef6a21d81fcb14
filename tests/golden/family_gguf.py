"""The golden checkpoints as GGUF, by gguf-py's own table of tensor names and the rules of llama.cpp's converters."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paceline.model.safetensors import read_directory
from paceline.model.stored import StoredTensor
from paceline.ops.dequantize import dequantize

from .family_cases import DIRECTORY

# Golden -> GGUF architecture; the converters of the first set write the rows of q and k in pairs.
PERMUTED = {"llama2": "llama", "llama3": "llama", "llama-biases": "llama", "llama-linear": "llama",
            "llama3.1": "llama", "llama-yarn": "llama", "mistral": "llama", "granite": "granite", "smollm3": "smollm3",
            "mixtral": "llama", "granitemoe": "granitemoe"}
PLAIN = {"qwen2": "qwen2", "qwen3": "qwen3", "olmo2": "olmo2", "phi3": "phi3", "phi4-partial": "phi3",
         "phi3-long": "phi3", "phi3-window": "phi3", "stablelm": "stablelm", "gemma": "gemma", "gemma2": "gemma2",
         "gemma3": "gemma3", "qwen3-moe": "qwen3moe", "qwen2-moe": "qwen2moe", "olmoe": "olmoe"}
GGUF_CASES = {**PERMUTED, **PLAIN}


def write_gguf(name: str, path: Path, expert_layout: str = "each weight", expert_type: str = "F32") -> Path:
    """expert_layout: what one tensor holds of a layer's experts: each weight of all, "gate and up" of all, or, as in
    files of 2023, "each expert"."""
    config = json.loads((DIRECTORY / name / "config.json").read_text())
    architecture = GGUF_CASES[name]
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config)
    kind = next(kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tensors = read_directory(DIRECTORY / name).tensors
    named: dict[str, np.ndarray] = {}
    arrays = {hf_name: array_of(tensor) for hf_name, tensor in tensors.items()}
    for hf_name, values in (arrays if expert_layout == "each expert" else merged_experts(arrays)).items():
        if name in PERMUTED and "q_proj" in hf_name:
            values = _permuted(values, config["num_attention_heads"])
        if name in PERMUTED and "k_proj" in hf_name:
            values = _permuted(values, config["num_key_value_heads"])
        if architecture.startswith("gemma") and hf_name.endswith("norm.weight"):
            values = values + 1
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if expert_layout == "each expert" and ".experts." in hf_name:
            gguf_name = _of_one_expert(hf_name)
        assert gguf_name is not None, hf_name
        named[gguf_name] = np.ascontiguousarray(values, np.float32)
    if expert_layout == "gate and up":
        for layer in range(config["num_hidden_layers"]):
            both = [named.pop(f"blk.{layer}.ffn_{kind}_exps.weight") for kind in ("gate", "up")]
            named[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    for gguf_name, values in named.items():
        kind = gguf.GGMLQuantizationType[expert_type if "_exps" in gguf_name else "F32"]
        writer.add_tensor(gguf_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for length in ("long", "short") if _rope(config)["rope_type"] == "longrope" else ():
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(_rope(config)[f"{length}_factor"], np.float32))
    if _rope(config)["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope, heads = _rope(config), config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        old = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(old)
        factor = config["max_position_embeddings"] / old
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(factor) / np.log(old)))
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_parallel_residual(config["use_parallel_residual"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        _add_window(writer, config)
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "attention_multiplier" in config:
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return rope.get("full_attention", rope)


def _add_window(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Gemma 2's pattern and Phi 3's are fixed in llama.cpp; one that is not the usual one goes into the file."""
    writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])


def array_of(tensor: StoredTensor) -> np.ndarray:
    if len(tensor.shape) == 1:
        return tensor.to_vector()
    rows = replace(tensor, shape=(math.prod(tensor.shape[:-1]), tensor.shape[-1]))
    return dequantize(rows.to_matrix()).reshape(tensor.shape)


_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(\w+)\.weight")


def merged_experts(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All experts of a layer in one tensor; Granite's gate and up, which its checkpoints hold in one, apart."""
    merged: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in arrays.items():
        if found := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{found[1]}.{found[3]}.weight", []).append(values)
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            at = name.removesuffix("input_linear.weight")
            merged[at + "experts.w1.weight"], merged[at + "experts.w3.weight"] = np.split(values, 2, axis=1)
        else:
            merged[name] = values
    return {**merged, **{name: np.stack(values) for name, values in stacks.items()}}


def _of_one_expert(hf_name: str) -> str:
    found = _EXPERT.fullmatch(hf_name)
    assert found is not None
    layer = found[1].split(".")[2]
    return f"blk.{layer}.ffn_{ {'w1': 'gate', 'w2': 'down', 'w3': 'up'}[found[3]]}.{found[2]}.weight"


def _permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    split = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _llama3_factors(config: dict[str, Any]) -> np.ndarray:
    rope = config["rope_parameters"]
    dim, old = config["hidden_size"] // config["num_attention_heads"], rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
