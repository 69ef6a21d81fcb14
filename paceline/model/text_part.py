"""The language model inside a checkpoint that also sees: its config and its tensors, under the names it has alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError
from .fields import Fields
from .stored import StoredTensor


@dataclass(frozen=True, slots=True)
class Whole:
    """hf_architecture is the language model's own; defaults stand for what published text_configs leave out."""

    hf_architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}
WHOLES = {
    "Gemma3ForConditionalGeneration": Whole("Gemma3ForCausalLM", _GEMMA3_DEFAULTS),
    "Mistral3ForConditionalGeneration": Whole("MistralForCausalLM"),
}
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
PREFIXES = {    # transformers has written them in three orders
    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model.",
}


def text_part(config: Fields, tensors: Mapping[str, StoredTensor]) -> tuple[Fields, Mapping[str, StoredTensor]]:
    """Both as they are, unless the config names a known whole. Images are then nothing the model can be shown."""
    named = config.values.get("architectures")
    whole = WHOLES.get(named[0]) if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) else None
    if whole is None:
        return config, tensors
    if not config.has("text_config"):
        raise ModelError(f"{config.where}: text_config is missing")
    text = config.mapping("text_config")
    outer = {name: config.values[name] for name in ("quantization_config", "tie_word_embeddings") if config.has(name)}
    values = {**whole.defaults, **outer, **text.values, "architectures": [whole.hf_architecture]}
    kept = {_own_name(name): tensor for name, tensor in tensors.items() if not name.startswith(OTHER_PARTS)}
    return Fields(values, text.where), kept


def _own_name(name: str) -> str:
    for prefix, own in PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
