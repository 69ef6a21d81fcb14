"""What files say about experts: the names of their tensors, and the fields that count them. family_table.py takes its
rows' names and readers from here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .fields import Fields

Reader = Callable[[Fields, str], dict[str, Any]]    # the file's fields, and what their names start with
Name = str | tuple[str, ...]                        # a tensor's, or several of which a file has one

# ---- names

# Checkpoints hold each expert by itself; transformers, since version 5, all of a layer in one tensor while in memory.
_FUSED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
_FUSED_NAMES = {name: "model.layers.{i}.mlp.experts." + fused for name, fused in _FUSED.items()}

HF_EXPERTS: dict[str, Name] = {
    "router": "model.layers.{i}.mlp.gate.weight",
    **{"expert_" + name: (f"model.layers.{{i}}.mlp.experts.{{e}}.{name}_proj.weight", fused)
       for name, fused in _FUSED_NAMES.items()},
}
HF_MIXTRAL_EXPERTS: dict[str, Name] = {
    "router": ("model.layers.{i}.block_sparse_moe.gate.weight", "model.layers.{i}.mlp.gate.weight"),
    **{"expert_" + name: (f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{old}.weight", _FUSED_NAMES[name])
       for name, old in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
}
HF_GRANITE_EXPERTS: dict[str, Name] = {
    "router": "model.layers.{i}.block_sparse_moe.router.layer.weight",
    "expert_gate": "model.layers.{i}.block_sparse_moe.input_linear.weight",
    "expert_up": "model.layers.{i}.block_sparse_moe.input_linear.weight",
    "expert_down": "model.layers.{i}.block_sparse_moe.output_linear.weight",
}
HF_SHARED: dict[str, Name] = {
    "shared_router": "model.layers.{i}.mlp.shared_expert_gate.weight",
    **{"shared_" + name: f"model.layers.{{i}}.mlp.shared_expert.{name}_proj.weight" for name in _FUSED},
}
# All experts of a layer in one tensor, or even gate and up; before April 2024 each of Mixtral's by itself.
GGUF_EXPERTS: dict[str, Name] = {
    "router": "blk.{i}.ffn_gate_inp.weight",
    **{"expert_" + name: (f"blk.{{i}}.ffn_{name}_exps.weight", f"blk.{{i}}.ffn_{fused}_exps.weight",
                          f"blk.{{i}}.ffn_{name}.{{e}}.weight")
       for name, fused in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down"))},
}
GGUF_SHARED: dict[str, Name] = {
    "shared_router": "blk.{i}.ffn_gate_inp_shexp.weight",
    **{"shared_" + name: f"blk.{{i}}.ffn_{name}_shexp.weight" for name in _FUSED},
}


# ---- config.json

def mixtral(config: Fields, prefix: str) -> dict[str, Any]:
    return _experts(config, "intermediate_size", is_renormalised=True)


def olmoe(config: Fields, prefix: str) -> dict[str, Any]:
    if config.has("clip_qkv"):
        raise config.refuse("clip_qkv", "is not supported")
    return _experts(config, "intermediate_size", is_renormalised=False)


def qwen3_moe(config: Fields, prefix: str) -> dict[str, Any]:
    return {**_experts(config, "moe_intermediate_size", is_renormalised=False), "dense_layers": _dense_layers(config)}


def qwen2_moe(config: Fields, prefix: str) -> dict[str, Any]:
    return {**qwen3_moe(config, prefix), "has_qkv_bias": config.flag("qkv_bias", True),
            "shared_intermediate_size": _at_least_one(config, "shared_expert_intermediate_size")}


def _experts(config: Fields, size: str, is_renormalised: bool) -> dict[str, Any]:
    """Transformers 5 writes num_local_experts where its own name is num_experts, and reads both."""
    if config.number("routed_scaling_factor", 1.0) != 1.0:
        raise config.refuse("routed_scaling_factor", "is not supported")
    count = "num_experts" if config.has("num_experts") else "num_local_experts"
    return {**_counts(config, count, "num_experts_per_tok", size),
            "has_renormalised_shares": config.flag("norm_topk_prob", is_renormalised)}


def _dense_layers(config: Fields) -> tuple[int, ...]:
    """Layers with a plain MLP: the listed ones, and of every decoder_sparse_step layers all but the last."""
    num_layers, listed = config.integer("num_hidden_layers"), config.integers("mlp_only_layers")
    step = _at_least_one(config, "decoder_sparse_step", 1)
    if any(not 0 <= layer < num_layers for layer in listed):
        raise config.refuse("mlp_only_layers", f"must be among the {num_layers} layers, counted from 0")
    if num_layers > 10**5:      # a claim, not a model; its tensors will be counted
        return ()
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


# ---- GGUF metadata

def experts_gguf(is_renormalised: bool) -> Reader:
    """is_renormalised: what the architecture does where the file does not say."""
    def read(metadata: Fields, prefix: str) -> dict[str, Any]:
        for name, harmless in (("expert_gating_func", (1,)), ("expert_group_count", (0, 1)),
                               ("leading_dense_block_count", (0,)), ("expert_weights_scale", (0, 1))):
            if metadata.has(prefix + name) and metadata.number(prefix + name) not in harmless:
                raise metadata.refuse(prefix + name, "is not supported")
        sizes = (f"{prefix}expert_feed_forward_length", f"{prefix}feed_forward_length")
        size = sizes[0] if metadata.has(sizes[0]) else sizes[1]
        return {**_counts(metadata, f"{prefix}expert_count", f"{prefix}expert_used_count", size),
                "has_renormalised_shares": metadata.flag(f"{prefix}expert_weights_norm", is_renormalised)}
    return read


def qwen2_moe_gguf(metadata: Fields, prefix: str) -> dict[str, Any]:
    return {**experts_gguf(is_renormalised=False)(metadata, prefix),
            "shared_intermediate_size": _at_least_one(metadata, f"{prefix}expert_shared_feed_forward_length")}


# ---- both

def _counts(fields: Fields, count: str, per_token: str, size: str) -> dict[str, int]:
    num_experts, experts_per_token = _at_least_one(fields, count), fields.integer(per_token)
    if not 1 <= experts_per_token <= num_experts:
        raise fields.refuse(per_token, f"must be from 1 to {count}={num_experts}")
    return {"num_experts": num_experts, "experts_per_token": experts_per_token,
            "expert_intermediate_size": _at_least_one(fields, size)}


def _at_least_one(fields: Fields, name: str, default: int | None = None) -> int:
    value = fields.integer(name) if default is None else fields.integer(name, default)
    if value < 1:
        raise fields.refuse(name, "must be at least 1")
    return value
