"""The golden checkpoints as GGUF, by gguf-py's own table of tensor names and the rules of llama.cpp's converters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paceline.model.safetensors import read_directory
from paceline.ops.dequantize import dequantize

from .family_cases import DIRECTORY

# Golden -> GGUF architecture; the converters of the first set write the rows of q and k in pairs.
PERMUTED = {"llama2": "llama", "llama3": "llama", "llama-biases": "llama", "llama-linear": "llama",
            "llama3.1": "llama", "llama-yarn": "llama", "mistral": "llama", "granite": "granite", "smollm3": "smollm3"}
PLAIN = {"qwen2": "qwen2", "qwen3": "qwen3", "olmo2": "olmo2", "phi3": "phi3", "phi4-partial": "phi3",
         "phi3-long": "phi3", "stablelm": "stablelm", "gemma": "gemma", "gemma2": "gemma2",
         "gemma3": "gemma3", "phi3-window": "phi3"}
GGUF_CASES = {**PERMUTED, **PLAIN}


def write_gguf(name: str, path: Path) -> Path:
    config = json.loads((DIRECTORY / name / "config.json").read_text())
    architecture = GGUF_CASES[name]
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config)
    kind = next(kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for hf_name, tensor in read_directory(DIRECTORY / name).tensors.items():
        values = tensor.to_vector() if len(tensor.shape) == 1 else dequantize(tensor.to_matrix())
        if name in PERMUTED and "q_proj" in hf_name:
            values = _permuted(values, config["num_attention_heads"])
        if name in PERMUTED and "k_proj" in hf_name:
            values = _permuted(values, config["num_key_value_heads"])
        if architecture.startswith("gemma") and hf_name.endswith("norm.weight"):
            values = values + 1
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        writer.add_tensor(gguf_name, np.ascontiguousarray(values, np.float32))
    for name in ("long", "short") if _rope(config)["rope_type"] == "longrope" else ():
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(_rope(config)[f"{name}_factor"], np.float32))
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
