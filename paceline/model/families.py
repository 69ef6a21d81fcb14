"""How config.json and GGUF metadata become a ModelSpec, by the rows of family_table.py.

Whatever a file asks for that the decoder does not compute is refused here, by the name of its field: a wrong default
would serve noise without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ModelError
from .family_table import FAMILIES, GGUF_NAMES, HF_NAMES, Family
from .fields import Fields
from .rope import YarnScaling, rope_fields, scaling_from_config, scaling_from_gguf
from .spec import ModelSpec
from .stored import StoredTensor
from .weights import expected_shapes, unpermuted_rows, weights_from_config, weights_from_gguf
from .windows import windows_from_config, windows_from_gguf

__all__ = ["FAMILIES", "expected_shapes", "spec_from_config", "spec_from_gguf", "unpermuted_rows",
           "weights_from_config", "weights_from_gguf"]

logger = logging.getLogger(__name__)


def spec_from_config(config: Fields, tensor_names: Iterable[str]) -> ModelSpec:
    """The spec of a Hugging Face config.json. tensor_names decides a head whose tie flag is absent."""
    family = _hf_family(config)
    _refuse_config(config, family)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim") if config.has("head_dim") else _divided(config, hidden_size, num_heads)
    scaling = scaling_from_config(config)
    max_position = config.integer("max_position_embeddings")
    if scaling is not None and not family.has_final_max_position:
        max_position = scaling.max_position(max_position)
    features: dict[str, Any] = {
        "activation": _activation(config, family),
        "rotary_dim": _rotary_dim(config, family, head_dim),
        "windows": windows_from_config(config, family, max_position),
        **_biases(config, family), **family.traits, **family.reads(config, ""),
    }
    epsilon = "layer_norm_eps" if features.get("norm") == "layer" else "rms_norm_eps"
    return ModelSpec(
        family=family.name,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position=max_position,
        norm_eps=_positive(config, epsilon, config.number(epsilon)),
        rope_theta=_rope_theta(config, family),
        rope_scaling=scaling,
        has_tied_head=_has_tied_head(config, set(tensor_names)),
        **features,
    )


def spec_from_gguf(metadata: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """The spec of GGUF metadata. The vocabulary is the embedding's rows; a missing output.weight means tied."""
    family = _gguf_family(metadata)
    prefix = f"{family.gguf_architecture}."
    features = {**_gguf_biases(tensors), "windows": windows_from_gguf(metadata, family, prefix), **family.traits,
                **family.gguf_reads(metadata, prefix)}
    _refuse_gguf(metadata, family)
    hidden_size = metadata.integer(f"{prefix}embedding_length")
    num_heads = metadata.integer(f"{prefix}attention.head_count")
    embed = tensors.get(GGUF_NAMES["embed"])
    if embed is None:
        raise ModelError(f"{metadata.where}: tensor {GGUF_NAMES['embed']} is missing")
    epsilon = f"{prefix}attention.layer_norm_{'epsilon' if features.get('norm') == 'layer' else 'rms_epsilon'}"
    head_dim = _gguf_head_dim(metadata, prefix, hidden_size, num_heads)
    scaling = scaling_from_gguf(metadata, prefix, tensors)
    max_position = metadata.integer(f"{prefix}context_length")
    if isinstance(scaling, YarnScaling):
        max_position = scaling.max_position(max_position)
    return ModelSpec(
        family=family.name,
        num_layers=metadata.integer(f"{prefix}block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=metadata.integer(f"{prefix}attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=metadata.integer(f"{prefix}feed_forward_length"),
        vocab_size=metadata.integer(f"{prefix}vocab_size", embed.shape[0]),
        max_position=max_position,
        norm_eps=_positive(metadata, epsilon, metadata.number(epsilon)),
        rope_theta=_theta_or_default(metadata, f"{prefix}rope.freq_base", family),
        rope_scaling=scaling,
        has_rope_factors=GGUF_NAMES["rope_factors"] in tensors,
        rotary_dim=_gguf_rotary_dim(metadata, prefix, family, head_dim),
        has_tied_head=GGUF_NAMES["head"] not in tensors,
        **features,
    )


# ---- config.json

def _hf_family(config: Fields) -> Family:
    named = config.values.get("architectures")
    known = {family.hf_architecture: family for family in FAMILIES.values()}
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str) or named[0] not in known:
        raise config.refuse("architectures", f"must be one of {sorted(known)}")
    return known[named[0]]


def _refuse_config(config: Fields, family: Family) -> None:
    """Everything a config may ask for beyond the decoder, by field name."""
    if not family.takes_mlp_bias and config.flag("mlp_bias", False):
        raise config.refuse("mlp_bias", "biases in the MLP are not supported for this family")
    has_known_bias = family.takes_attention_bias or family.traits.get("has_qkv_bias", False)
    if not has_known_bias and config.flag("attention_bias", False):
        raise config.refuse("attention_bias", "biases in the attention are not supported for this family")


def _activation(config: Fields, family: Family) -> str:
    default = next(iter(family.activations))
    field = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    named = config.text(field, default)
    if named not in family.activations:
        raise config.refuse(field, f"only {' and '.join(map(repr, family.activations))} are supported")
    return family.activations[named]


def _biases(config: Fields, family: Family) -> dict[str, bool]:
    has_attention_bias = family.takes_attention_bias and config.flag("attention_bias", False)
    return {"has_qkv_bias": has_attention_bias, "has_o_bias": has_attention_bias,
            "has_mlp_bias": family.takes_mlp_bias and config.flag("mlp_bias", False)}


def _rotary_dim(config: Fields, family: Family, head_dim: int) -> int | None:
    name, rope = "partial_rotary_factor", rope_fields(config)
    place = rope if rope.has(name) else config
    share = place.number(name, family.default_rotary_share or 1.0)
    if share != 1.0 and family.default_rotary_share is None:
        raise place.refuse(name, "partial rotation is not supported for this family")
    if not 0 < share <= 1:
        raise place.refuse(name, "must be above 0 and at most 1")
    return None if share == 1.0 else int(head_dim * share)


def _rope_theta(config: Fields, family: Family) -> float:
    """From rope_theta (transformers 4) or rope_parameters (5); two different values are refused."""
    nested = rope_fields(config)
    if not nested.has("rope_theta"):
        return _theta_or_default(config, "rope_theta", family)
    theta = nested.number("rope_theta")
    if config.number("rope_theta", theta) != theta:
        raise config.refuse("rope_theta", f"contradicts rope_parameters.rope_theta={theta}")
    return _positive(nested, "rope_theta", theta)


def _has_tied_head(config: Fields, tensor_names: set[str]) -> bool:
    """The flag, here or in a nested text_config; absent, a missing head means tied."""
    has_head = HF_NAMES["head"] in tensor_names
    for place in (config, config.mapping("text_config")):
        if place.has("tie_word_embeddings"):
            is_tied = place.flag("tie_word_embeddings")
            if not is_tied and not has_head:
                raise ModelError(f"{config.where}: tie_word_embeddings is false, but the weights hold no "
                                 f"{HF_NAMES['head']}")
            return is_tied
    if not has_head:
        logger.info("%s: no tie_word_embeddings and no %s: the head is tied", config.where, HF_NAMES["head"])
    return not has_head


def _divided(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(f"{fields.where}: hidden_size {hidden_size} is not a multiple of the {num_heads} attention "
                         "heads, and no head_dim is given")
    return hidden_size // num_heads


def _theta_or_default(fields: Fields, name: str, family: Family) -> float:
    if not fields.has(name):
        logger.warning("%s: %s is absent; %s is assumed", fields.where, name, family.default_rope_theta)
    return _positive(fields, name, fields.number(name, family.default_rope_theta))


def _positive(fields: Fields, name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise fields.refuse(name, "must be positive and finite")
    return value


# ---- GGUF metadata

def _gguf_family(metadata: Fields) -> Family:
    known = {(family.gguf_architecture, family.has_experts): family for family in FAMILIES.values()
             if family.gguf_architecture}
    architecture, names = metadata.text("general.architecture"), {name for name, _ in known if name}
    if architecture not in names:
        raise metadata.refuse("general.architecture", f"must be one of {sorted(names)}")
    has_experts = metadata.integer(f"{architecture}.expert_count", 0) != 0
    if (architecture, has_experts) not in known:
        raise metadata.refuse(f"{architecture}.expert_count",
                              "is not supported for this architecture" if has_experts else "must be at least 1")
    if metadata.text("general.type", "model") != "model":
        raise metadata.refuse("general.type", "must be 'model'")
    return known[architecture, has_experts]


def _gguf_biases(tensors: Mapping[str, StoredTensor]) -> dict[str, bool]:
    """Metadata do not say; the first layer's tensors do."""
    first = {"has_qkv_bias": "attn_q", "has_o_bias": "attn_output", "has_mlp_bias": "ffn_gate"}
    return {feature: f"blk.0.{name}.bias" in tensors for feature, name in first.items()}


def _refuse_gguf(metadata: Fields, family: Family) -> None:
    prefix = f"{family.gguf_architecture}."
    for name in ("logit_scale", "embedding_scale", "residual_scale", "attention.scale", "attention.clamp_kqv"):
        if metadata.has(prefix + name) and name not in family.gguf_takes:
            raise metadata.refuse(prefix + name, "is not supported")


def _gguf_rotary_dim(metadata: Fields, prefix: str, family: Family, head_dim: int) -> int | None:
    rotated = metadata.integer(f"{prefix}rope.dimension_count", head_dim)
    if rotated != head_dim and family.default_rotary_share is None:
        raise metadata.refuse(f"{prefix}rope.dimension_count", f"partial rotation of head_dim {head_dim}")
    return None if rotated == head_dim else rotated


def _gguf_head_dim(metadata: Fields, prefix: str, hidden_size: int, num_heads: int) -> int:
    key_length = f"{prefix}attention.key_length"
    head_dim = metadata.integer(key_length) if metadata.has(key_length) else _divided(metadata, hidden_size, num_heads)
    if metadata.integer(f"{prefix}attention.value_length", head_dim) != head_dim:
        raise metadata.refuse(f"{prefix}attention.value_length", f"differs from the keys' {head_dim}")
    return head_dim
