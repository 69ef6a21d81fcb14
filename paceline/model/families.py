"""Model families: how config.json and GGUF metadata become a ModelSpec and canonical weights (spec.py).

A family is a row of FAMILIES. Whatever a file asks for that the decoder does not compute is refused here, by the name
of its field: a wrong default would serve noise without a word. Weights are strict: a missing, surplus or wrongly
shaped tensor is named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..ops.interface import SourceTensor
from .fields import Fields
from .spec import ModelSpec
from .stored import StoredTensor

logger = logging.getLogger(__name__)

DEFAULT_ROPE_THETA = 10000.0    # what transformers and llama.cpp assume when a file does not say


@dataclass(frozen=True, slots=True)
class Family:
    """gguf_permutes_qk: GGUF converters reorder the rows of q and k in every head (pairs interleaved)."""

    name: str
    hf_architecture: str
    gguf_architecture: str
    has_qkv_bias: bool
    gguf_permutes_qk: bool


FAMILIES: dict[str, Family] = {family.name: family for family in (
    Family("llama", "LlamaForCausalLM", "llama", has_qkv_bias=False, gguf_permutes_qk=True),
    Family("qwen2", "Qwen2ForCausalLM", "qwen2", has_qkv_bias=True, gguf_permutes_qk=False),
)}

# Canonical name -> the file's name; {i} is the layer.
_HF_NAMES = {
    "embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight",
    "attn_norm": "model.layers.{i}.input_layernorm.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight", "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "k": "model.layers.{i}.self_attn.k_proj.weight", "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "v": "model.layers.{i}.self_attn.v_proj.weight", "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "o": "model.layers.{i}.self_attn.o_proj.weight", "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight", "down": "model.layers.{i}.mlp.down_proj.weight",
}
_GGUF_NAMES = {
    "embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight",
    "attn_norm": "blk.{i}.attn_norm.weight", "mlp_norm": "blk.{i}.ffn_norm.weight",
    "q": "blk.{i}.attn_q.weight", "q_bias": "blk.{i}.attn_q.bias",
    "k": "blk.{i}.attn_k.weight", "k_bias": "blk.{i}.attn_k.bias",
    "v": "blk.{i}.attn_v.weight", "v_bias": "blk.{i}.attn_v.bias",
    "o": "blk.{i}.attn_output.weight", "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight", "down": "blk.{i}.ffn_down.weight",
}
_HF_IGNORED_SUFFIX = ".rotary_emb.inv_freq"     # a buffer of old checkpoints; we compute it


def spec_from_config(config: Fields, tensor_names: Iterable[str]) -> ModelSpec:
    """The spec of a Hugging Face config.json. tensor_names decides a head whose tie flag is absent."""
    family = _hf_family(config)
    _refuse_config(config, family)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return ModelSpec(
        family=family.name,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim") if config.has("head_dim") else _divided(config, hidden_size, num_heads),
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position=config.integer("max_position_embeddings"),
        norm_eps=_positive(config, "rms_norm_eps", config.number("rms_norm_eps")),
        rope_theta=_rope_theta(config),
        has_tied_head=_has_tied_head(config, set(tensor_names)),
        has_qkv_bias=family.has_qkv_bias,
    )


def spec_from_gguf(metadata: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """The spec of GGUF metadata. The vocabulary is the embedding's rows; a missing output.weight means tied."""
    family = _gguf_family(metadata)
    prefix = family.gguf_architecture + "."
    _refuse_gguf(metadata, prefix)
    hidden_size = metadata.integer(f"{prefix}embedding_length")
    num_heads = metadata.integer(f"{prefix}attention.head_count")
    embed = tensors.get(_GGUF_NAMES["embed"])
    if embed is None:
        raise ModelError(f"{metadata.where}: tensor {_GGUF_NAMES['embed']} is missing")
    epsilon = f"{prefix}attention.layer_norm_rms_epsilon"
    spec = ModelSpec(
        family=family.name,
        num_layers=metadata.integer(f"{prefix}block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=metadata.integer(f"{prefix}attention.head_count_kv", num_heads),
        head_dim=_gguf_head_dim(metadata, prefix, hidden_size, num_heads),
        intermediate_size=metadata.integer(f"{prefix}feed_forward_length"),
        vocab_size=metadata.integer(f"{prefix}vocab_size", embed.shape[0]),
        max_position=metadata.integer(f"{prefix}context_length"),
        norm_eps=_positive(metadata, epsilon, metadata.number(epsilon)),
        rope_theta=_theta_or_default(metadata, f"{prefix}rope.freq_base"),
        has_tied_head=_GGUF_NAMES["head"] not in tensors,
        has_qkv_bias=family.has_qkv_bias,
    )
    rotated = metadata.integer(f"{prefix}rope.dimension_count", spec.head_dim)
    if rotated != spec.head_dim:
        raise metadata.refuse(f"{prefix}rope.dimension_count", f"partial rotation of head_dim {spec.head_dim}")
    return spec


def weights_from_config(spec: ModelSpec, tensors: Mapping[str, StoredTensor], where: str) -> dict[
        str, SourceTensor | NDArray[np.float32]]:
    """Canonical weights of a Hugging Face checkpoint. A tied head's own copy of the embedding is left alone."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(_HF_IGNORED_SUFFIX)}
    if spec.has_tied_head and kept.pop(_HF_NAMES["head"], None) is not None:
        logger.info("%s: %s is ignored: tie_word_embeddings is true", where, _HF_NAMES["head"])
    return _canonical(spec, kept, _HF_NAMES, where, is_permuted=False)


def weights_from_gguf(spec: ModelSpec, tensors: Mapping[str, StoredTensor], where: str) -> dict[
        str, SourceTensor | NDArray[np.float32]]:
    """Canonical weights of a GGUF file; where its family permutes q and k, row_order undoes that."""
    if "rope_freqs.weight" in tensors:
        raise ModelError(f"{where}: tensor rope_freqs.weight: scaled rotary frequencies are not supported")
    return _canonical(spec, tensors, _GGUF_NAMES, where, is_permuted=FAMILIES[spec.family].gguf_permutes_qk)


def unpermuted_rows(num_heads: int, head_dim: int) -> NDArray[np.int64]:
    """Row i of the checkpoint is row unpermuted_rows[i] of the GGUF file: there, row 2j + half of a head is the
    checkpoint's row half * head_dim / 2 + j."""
    rows = np.arange(num_heads * head_dim, dtype=np.int64).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


# ---- config.json

def _hf_family(config: Fields) -> Family:
    named = config.values.get("architectures")
    known = {family.hf_architecture: family for family in FAMILIES.values()}
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str) or named[0] not in known:
        raise config.refuse("architectures", f"must be one of {sorted(known)}")
    return known[named[0]]


def _refuse_config(config: Fields, family: Family) -> None:
    """Everything a config may ask for beyond the decoder, by field name."""
    if config.text("hidden_act", "silu") != "silu":
        raise config.refuse("hidden_act", "only 'silu' is supported")
    if config.has("quantization_config"):
        raise config.refuse("quantization_config", "pre-quantised checkpoints are not supported")
    if config.flag("mlp_bias", False):
        raise config.refuse("mlp_bias", "biases in the MLP are not supported")
    if not family.has_qkv_bias and config.flag("attention_bias", False):
        raise config.refuse("attention_bias", "biases in the attention are not supported for this family")
    if config.flag("use_sliding_window", config.has("sliding_window")):     # the flag false: the size has no effect
        raise config.refuse("sliding_window", "sliding windows are not supported")
    layer_types = config.values.get("layer_types") or ["full_attention"]
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise config.refuse("layer_types", "only full_attention layers are supported")
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.refuse("partial_rotary_factor", "partial rotation is not supported")


def _rope_theta(config: Fields) -> float:
    """From rope_theta (transformers 4) or rope_parameters (5); two different values are refused."""
    for name in ("rope_scaling", "rope_parameters"):
        _refuse_scaling(config, name)
    nested = config.mapping("rope_parameters")
    if not nested.has("rope_theta"):
        return _theta_or_default(config, "rope_theta")
    theta = nested.number("rope_theta")
    if config.number("rope_theta", theta) != theta:
        raise config.refuse("rope_theta", f"contradicts rope_parameters.rope_theta={theta}")
    return _positive(nested, "rope_theta", theta)


def _refuse_scaling(config: Fields, name: str) -> None:
    scaling = config.mapping(name)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind != "default":
        raise config.refuse(name, f"rope_type {kind!r} is not supported; supported: 'default'")
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.refuse(name, "partial rotation is not supported")
    surplus = set(scaling.values) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if surplus:
        raise config.refuse(name, f"field {min(surplus)!r} is not supported")


def _has_tied_head(config: Fields, tensor_names: set[str]) -> bool:
    """The flag, here or in a nested text_config; absent, a missing head means tied."""
    has_head = _HF_NAMES["head"] in tensor_names
    for place in (config, config.mapping("text_config")):
        if place.has("tie_word_embeddings"):
            is_tied = place.flag("tie_word_embeddings")
            if not is_tied and not has_head:
                raise ModelError(f"{config.where}: tie_word_embeddings is false, but the weights hold no "
                                 f"{_HF_NAMES['head']}")
            return is_tied
    if not has_head:
        logger.info("%s: no tie_word_embeddings and no %s: the head is tied", config.where, _HF_NAMES["head"])
    return not has_head


def _divided(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(f"{fields.where}: hidden_size {hidden_size} is not a multiple of the {num_heads} attention "
                         "heads, and no head_dim is given")
    return hidden_size // num_heads


def _theta_or_default(fields: Fields, name: str) -> float:
    if not fields.has(name):
        logger.warning("%s: %s is absent; %s is assumed", fields.where, name, DEFAULT_ROPE_THETA)
    return _positive(fields, name, fields.number(name, DEFAULT_ROPE_THETA))


def _positive(fields: Fields, name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise fields.refuse(name, "must be positive and finite")
    return value


# ---- GGUF metadata

def _gguf_family(metadata: Fields) -> Family:
    known = {family.gguf_architecture: family for family in FAMILIES.values()}
    if metadata.text("general.architecture") not in known:
        raise metadata.refuse("general.architecture", f"must be one of {sorted(known)}")
    if metadata.text("general.type", "model") != "model":
        raise metadata.refuse("general.type", "must be 'model'")
    if metadata.integer("split.count", 1) > 1:
        raise metadata.refuse("split.count", "split files are not supported; merge them with llama-gguf-split")
    return known[metadata.text("general.architecture")]


def _refuse_gguf(metadata: Fields, prefix: str) -> None:
    if metadata.text(f"{prefix}rope.scaling.type", "none") != "none":
        raise metadata.refuse(f"{prefix}rope.scaling.type", "scaled rotary positions are not supported")
    if metadata.number(f"{prefix}rope.scale_linear", 1.0) != 1.0:
        raise metadata.refuse(f"{prefix}rope.scale_linear", "scaled rotary positions are not supported")
    for name in ("expert_count", "attention.sliding_window"):
        if metadata.integer(prefix + name, 0):
            raise metadata.refuse(prefix + name, "is not supported")
    for name in ("logit_scale", "embedding_scale", "residual_scale", "attention.scale", "attention.clamp_kqv"):
        if metadata.has(prefix + name):
            raise metadata.refuse(prefix + name, "is not supported")


def _gguf_head_dim(metadata: Fields, prefix: str, hidden_size: int, num_heads: int) -> int:
    key_length = f"{prefix}attention.key_length"
    head_dim = metadata.integer(key_length) if metadata.has(key_length) else _divided(metadata, hidden_size, num_heads)
    if metadata.integer(f"{prefix}attention.value_length", head_dim) != head_dim:
        raise metadata.refuse(f"{prefix}attention.value_length", f"differs from the keys' {head_dim}")
    return head_dim


# ---- weights

def expected_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical name and shape of every weight of the spec, in the order of the forward pass."""
    num_q, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "embed", (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        yield prefix + "attn_norm", (spec.hidden_size,)
        for name, num_outputs in (("q", num_q), ("k", num_kv), ("v", num_kv)):
            yield prefix + name, (num_outputs, spec.hidden_size)
            if spec.has_qkv_bias:
                yield f"{prefix}{name}_bias", (num_outputs,)
        yield prefix + "o", (spec.hidden_size, num_q)
        yield prefix + "mlp_norm", (spec.hidden_size,)
        yield prefix + "gate", (spec.intermediate_size, spec.hidden_size)
        yield prefix + "up", (spec.intermediate_size, spec.hidden_size)
        yield prefix + "down", (spec.hidden_size, spec.intermediate_size)
    yield "final_norm", (spec.hidden_size,)
    if not spec.has_tied_head:
        yield "head", (spec.vocab_size, spec.hidden_size)


def _canonical(spec: ModelSpec, tensors: Mapping[str, StoredTensor], names: Mapping[str, str], where: str,
               is_permuted: bool) -> dict[str, SourceTensor | NDArray[np.float32]]:
    if spec.num_layers > len(tensors):      # before any loop over a number the file merely claims
        raise ModelError(f"{where}: {spec.num_layers} layers are declared, the weights hold {len(tensors)} tensors")
    if spec.head_dim % 2:
        raise ModelError(f"{where}: head_dim {spec.head_dim} is odd; rotary positions need pairs")
    expected = {name: (_file_name(name, names), shape) for name, shape in expected_shapes(spec)}
    _refuse_mismatch(expected, tensors, where)
    row_orders = {}
    if is_permuted:
        row_orders = {"q": unpermuted_rows(spec.num_heads, spec.head_dim),
                      "k": unpermuted_rows(spec.num_kv_heads, spec.head_dim)}
    weights: dict[str, SourceTensor | NDArray[np.float32]] = {}
    for name, (file_name, shape) in expected.items():
        row_order = row_orders.get(name.rpartition(".")[2].removesuffix("_bias"))
        tensor = tensors[file_name]
        weights[name] = tensor.to_vector(row_order) if len(shape) == 1 else tensor.to_matrix(row_order)
    return weights


def _file_name(canonical: str, names: Mapping[str, str]) -> str:
    if not canonical.startswith("layers."):
        return names[canonical]
    _, layer, name = canonical.split(".")
    return names[name].format(i=layer)


def _refuse_mismatch(expected: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Mapping[str, StoredTensor],
                     where: str) -> None:
    file_names = {file_name for file_name, _ in expected.values()}
    missing = [name for name in file_names if name not in tensors]
    surplus = [name for name in tensors if name not in file_names]
    if missing or surplus:
        raise ModelError(f"{where}: tensors missing: {_listed(missing)}; not used by this family: {_listed(surplus)}")
    for canonical, (file_name, shape) in expected.items():
        found = tensors[file_name].shape
        if found != shape:
            field = " (vocab_size against the embedding's rows)" if canonical in ("embed", "head") else ""
            raise ModelError(f"{where}: tensor {file_name}: shape {list(found)}, the config says {list(shape)}{field}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
