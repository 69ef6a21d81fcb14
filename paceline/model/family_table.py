"""The families: one row each. What sets a family apart is declared here, as features of ModelSpec and as names of
tensors; no other file asks which family it has.

A reader takes the features whose values stand in the file (`reads`); traits hold for every model of the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .expert_fields import (
    GGUF_EXPERTS,
    GGUF_SHARED,
    HF_EXPERTS,
    HF_GRANITE_EXPERTS,
    HF_MIXTRAL_EXPERTS,
    HF_SHARED,
    Name,
    Reader,
    experts_gguf,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen2_moe_gguf,
    qwen3_moe,
)
from .fields import Fields

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}     # hidden_act -> ModelSpec.activation

Slides = Callable[[Fields, int], tuple[bool, ...]]    # config.json's fields (none for GGUF) and the number of layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    title: str                                # for people: what a reader of the README looks for
    hf_architecture: str
    traits: Mapping[str, Any] = field(default_factory=dict)
    reads: Reader = lambda config, prefix: {}
    hf_names: Mapping[str, Name] = field(default_factory=dict)      # beyond HF_NAMES, or in place of them
    has_offset_norms: bool = False            # config.json: a norm's weight is stored less 1
    has_experts: bool = False                 # its MLPs are routed to: what tells two families of one GGUF name apart
    takes_attention_bias: bool = False        # attention_bias means biases on q, k, v and o
    takes_mlp_bias: bool = False
    default_rotary_share: float | None = None    # of a head's dims, where the config does not say; None: always all
    slides: Slides | None = None              # which layers have a window, unless the file lists them; None: none
    default_window: int | None = None         # sliding_window of a config that does not name it
    needs_window_flag: bool = False           # a config's sliding_window counts only beside use_sliding_window: true
    has_final_max_position: bool = False      # max_position_embeddings holds with linear rope scaling in it already
    default_rope_theta: float = 10000.0       # what transformers and llama.cpp assume when a file does not say
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    gguf_architecture: str | None = None      # None: it has none of its own
    gguf_written_as: str | None = None        # the architecture that converters call it by instead
    gguf_permutes_qk: bool = False            # converters reorder the rows of q and k in every head (pairs interleaved)
    gguf_names: Mapping[str, Name] = field(default_factory=dict)
    gguf_reads: Reader = lambda metadata, prefix: {}
    gguf_takes: frozenset[str] = frozenset()  # fields that only some families have, and that gguf_reads reads


# Canonical name -> the file's name; {i} is the layer, {e} the expert. A bias's name ends in .bias where its weight's
# ends in .weight. Where several canonical names share one tensor, its rows hold them one after the other; experts that
# do make it three-dimensional, [experts, rows of one, inputs].
HF_NAMES: dict[str, str] = {
    "embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight",
    "attn_norm": "model.layers.{i}.input_layernorm.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight", "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight", "o": "model.layers.{i}.self_attn.o_proj.weight",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight", "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight", "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
    "attn_post_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
GGUF_NAMES: dict[str, str] = {
    "embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight",
    "rope_factors": "rope_freqs.weight",
    "attn_norm": "blk.{i}.attn_norm.weight", "mlp_norm": "blk.{i}.ffn_norm.weight",
    "q": "blk.{i}.attn_q.weight", "k": "blk.{i}.attn_k.weight", "v": "blk.{i}.attn_v.weight",
    "q_norm": "blk.{i}.attn_q_norm.weight", "k_norm": "blk.{i}.attn_k_norm.weight",
    "o": "blk.{i}.attn_output.weight", "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight", "down": "blk.{i}.ffn_down.weight",
    "attn_post_norm": "blk.{i}.post_attention_norm.weight", "mlp_post_norm": "blk.{i}.post_ffw_norm.weight",
}
_GELU_ONLY = {"gelu": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}    # Gemma's "gelu" always meant the tanh one
_QKV = "model.layers.{i}.self_attn.qkv_proj.weight"
_GGUF_QKV = "blk.{i}.attn_qkv.weight"
_GEMMA2_NAMES = {"mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight"}
_GATE_UP = "model.layers.{i}.mlp.gate_up_proj.weight"


# ---- readers

def _smollm3(config: Fields, prefix: str) -> dict[str, Any]:
    num_layers = config.integer("num_hidden_layers")
    is_rotated = config.integers("no_rope_layers")    # 1 where positions are rotated, whatever the name says
    interval = config.integer("no_rope_layer_interval", 4)
    if is_rotated and len(is_rotated) != num_layers:
        raise config.refuse("no_rope_layers", f"must have one entry for each of the {num_layers} layers")
    if interval < 1:
        raise config.refuse("no_rope_layer_interval", "must be at least 1")
    if is_rotated:
        return {"unrotated_layers": tuple(i for i, flag in enumerate(is_rotated) if not flag)}
    return {"unrotated_layers": every_nth(num_layers, interval)}


def every_nth(num_layers: int, interval: int) -> tuple[int, ...]:
    if num_layers > 10**5:      # a claim, not a model; its tensors will be counted
        return ()
    return tuple(range(interval - 1, num_layers, interval))


def _smollm3_gguf(metadata: Fields, prefix: str) -> dict[str, Any]:
    return {"unrotated_layers": every_nth(metadata.integer(f"{prefix}block_count"), 4)}    # as llama.cpp fixes it


def _granite(config: Fields, prefix: str) -> dict[str, Any]:
    return {
        "embedding_scale": _positive(config, "embedding_multiplier", 1.0),
        "residual_scale": _positive(config, "residual_multiplier", 1.0),
        "attention_scale": _positive(config, "attention_multiplier", 1.0),
        "logit_scale": 1.0 / _positive(config, "logits_scaling", 1.0),
    }


def _granite_gguf(metadata: Fields, prefix: str) -> dict[str, Any]:
    has_scale = metadata.has(f"{prefix}attention.scale")
    return {
        "embedding_scale": _positive(metadata, f"{prefix}embedding_scale", 1.0),
        "residual_scale": _positive(metadata, f"{prefix}residual_scale", 1.0),
        "attention_scale": _positive(metadata, f"{prefix}attention.scale", 1.0) if has_scale else None,
        "logit_scale": 1.0 / _positive(metadata, f"{prefix}logit_scale", 1.0),
    }


def _all_slide(config: Fields, num_layers: int) -> tuple[bool, ...]:
    return (True,) * num_layers


def _upper_layers_slide(config: Fields, num_layers: int) -> tuple[bool, ...]:
    first = config.integer("max_window_layers", 28)
    return tuple(layer >= first for layer in range(num_layers))


def _every_other_lower_layer_slides(config: Fields, num_layers: int) -> tuple[bool, ...]:
    last = config.integer("max_window_layers", 28)
    return tuple(layer % 2 == 0 and layer < last for layer in range(num_layers))


def _all_but_every(default_interval: int, name: str | None = None) -> Slides:
    def slides(config: Fields, num_layers: int) -> tuple[bool, ...]:
        interval = default_interval if name is None else config.integer(name, default_interval)
        if interval < 1:
            raise config.refuse(str(name), "must be at least 1")
        full = set(every_nth(num_layers, interval))
        return tuple(layer not in full for layer in range(num_layers))

    return slides


def _granitemoe(config: Fields, prefix: str) -> dict[str, Any]:
    return {**_granite(config, prefix), **mixtral(config, prefix)}


def _granitemoe_gguf(metadata: Fields, prefix: str) -> dict[str, Any]:
    return {**_granite_gguf(metadata, prefix), **experts_gguf(True)(metadata, prefix)}


def _stablelm_gguf(metadata: Fields, prefix: str) -> dict[str, Any]:
    if metadata.flag(f"{prefix}use_parallel_residual", False):
        raise metadata.refuse(f"{prefix}use_parallel_residual", "is not supported")
    return {}


def _stablelm(config: Fields, prefix: str) -> dict[str, Any]:
    for name in ("qk_layernorm", "use_parallel_residual"):
        if config.flag(name, False):
            raise config.refuse(name, "is not supported")
    return {"has_qkv_bias": config.flag("use_qkv_bias", False)}


def _gemma(config: Fields, prefix: str) -> dict[str, Any]:
    if config.flag("use_bidirectional_attention", False):
        raise config.refuse("use_bidirectional_attention", "is not supported")
    return {"embedding_scale": config.integer("hidden_size") ** 0.5}


def _gemma_gguf(metadata: Fields, prefix: str) -> dict[str, Any]:
    return {"activation": "gelu_tanh", "embedding_scale": metadata.integer(f"{prefix}embedding_length") ** 0.5}


def _gemma2(config: Fields, prefix: str) -> dict[str, Any]:
    return {
        **_gemma(config, prefix),
        "attention_scale": _positive(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": _cap(config, "attn_logit_softcapping", 50.0),
        "logit_softcap": _cap(config, "final_logit_softcapping", 30.0),
    }


def _gemma2_gguf(metadata: Fields, prefix: str) -> dict[str, Any]:
    return {
        **_gemma_gguf(metadata, prefix), **_gemma_scale_gguf(metadata, prefix, largest=46),
        "attention_softcap": _positive(metadata, f"{prefix}attn_logit_softcapping", 50.0),
        "logit_softcap": _positive(metadata, f"{prefix}final_logit_softcapping", 30.0),
    }


def _gemma_scale_gguf(metadata: Fields, prefix: str, largest: int) -> dict[str, Any]:
    """Files do not say it: the 27B models, known by their number of layers, scale by the width a head would have if
    all heads made up the hidden size."""
    if metadata.integer(f"{prefix}block_count") != largest:
        return {}
    return {"attention_scale": (metadata.integer(f"{prefix}embedding_length")
                                / metadata.integer(f"{prefix}attention.head_count")) ** -0.5}


def _gemma3(config: Fields, prefix: str) -> dict[str, Any]:
    local = config.mapping("rope_parameters").mapping("sliding_attention")
    theta = (local, "rope_theta") if local.has("rope_theta") else (config, "rope_local_base_freq")
    if local.text("rope_type", "default") != "default":
        raise local.refuse("rope_type", "only 'default' is supported for layers with a window")
    return {
        **_gemma2(config, prefix),
        "attention_softcap": _cap(config, "attn_logit_softcapping", None),
        "logit_softcap": _cap(config, "final_logit_softcapping", None),
        "window_rope_theta": _positive(*theta, 10000.0),
    }


def _gemma3_gguf(metadata: Fields, prefix: str) -> dict[str, Any]:
    return {**_gemma_gguf(metadata, prefix), **_gemma_scale_gguf(metadata, prefix, largest=62),
            "window_rope_theta": _positive(metadata, f"{prefix}rope.freq_base_swa", 10000.0)}


def _cap(config: Fields, name: str, default: float | None) -> float | None:
    """null means none, an absent field the default."""
    if default is None and name not in config.values:
        return None
    if name in config.values and config.values[name] is None:
        return None
    return _positive(config, name, default or 1.0)


def _positive(config: Fields, name: str, default: float) -> float:
    value = config.number(name, default)
    if not 0 < value < float("inf"):
        raise config.refuse(name, "must be positive and finite")
    return value


# ---- the table

FAMILIES: dict[str, Family] = {family.name: family for family in (
    Family(name="llama", title="Llama 2, 3, 3.1, 3.2; SmolLM2", hf_architecture="LlamaForCausalLM",
           takes_attention_bias=True, takes_mlp_bias=True, gguf_architecture="llama", gguf_permutes_qk=True),
    Family(name="smollm3", title="SmolLM3", hf_architecture="SmolLM3ForCausalLM", reads=_smollm3,
           takes_attention_bias=True, takes_mlp_bias=True, default_rope_theta=2000000.0,
           gguf_architecture="smollm3", gguf_permutes_qk=True, gguf_reads=_smollm3_gguf),
    Family(name="mistral", title="Mistral; Mistral Small 3 (text part)", hf_architecture="MistralForCausalLM",
           slides=_all_slide, default_window=4096, gguf_written_as="llama"),
    Family(name="qwen2", title="Qwen 2, 2.5", hf_architecture="Qwen2ForCausalLM", traits={"has_qkv_bias": True},
           slides=_upper_layers_slide, default_window=4096, needs_window_flag=True, gguf_architecture="qwen2"),
    Family(name="qwen3", title="Qwen 3", hf_architecture="Qwen3ForCausalLM", traits={"qk_norm": "head"},
           slides=_upper_layers_slide, default_window=4096, needs_window_flag=True, takes_attention_bias=True,
           gguf_architecture="qwen3"),
    Family(name="granite", title="Granite 3", hf_architecture="GraniteForCausalLM", reads=_granite,
           takes_attention_bias=True, takes_mlp_bias=True, gguf_architecture="granite", gguf_permutes_qk=True,
           gguf_reads=_granite_gguf,
           gguf_takes=frozenset({"logit_scale", "embedding_scale", "residual_scale", "attention.scale"})),
    Family(name="olmo2", title="OLMo 2", hf_architecture="Olmo2ForCausalLM",
           traits={"norm_placement": "after", "qk_norm": "width"}, takes_attention_bias=True,
           gguf_architecture="olmo2"),
    Family(name="phi3", title="Phi 3, Phi 4", hf_architecture="Phi3ForCausalLM", default_rotary_share=1.0,
           slides=_all_slide,
           hf_names={"q": _QKV, "k": _QKV, "v": _QKV, "gate": _GATE_UP, "up": _GATE_UP}, gguf_architecture="phi3",
           gguf_names={"q": _GGUF_QKV, "k": _GGUF_QKV, "v": _GGUF_QKV, "gate": GGUF_NAMES["up"]}),
    Family(name="mixtral", title="Mixtral", hf_architecture="MixtralForCausalLM", has_experts=True, reads=mixtral,
           slides=_all_slide, default_rope_theta=1000000.0, hf_names=HF_MIXTRAL_EXPERTS,
           gguf_architecture="llama", gguf_permutes_qk=True,
           gguf_names=GGUF_EXPERTS, gguf_reads=experts_gguf(True)),
    Family(name="qwen2moe", title="Qwen 1.5 MoE, Qwen 2 MoE", hf_architecture="Qwen2MoeForCausalLM", has_experts=True,
           reads=qwen2_moe, slides=_every_other_lower_layer_slides, default_window=4096,
           needs_window_flag=True, traits={"has_qkv_bias": True}, hf_names={**HF_EXPERTS, **HF_SHARED},
           gguf_architecture="qwen2moe", gguf_names={**GGUF_EXPERTS, **GGUF_SHARED}, gguf_reads=qwen2_moe_gguf),
    Family(name="qwen3moe", title="Qwen 3 MoE", hf_architecture="Qwen3MoeForCausalLM", has_experts=True,
           slides=_all_slide, default_window=4096, needs_window_flag=True, traits={"qk_norm": "head"},
           reads=qwen3_moe, takes_attention_bias=True, hf_names=HF_EXPERTS,
           gguf_architecture="qwen3moe", gguf_names=GGUF_EXPERTS, gguf_reads=experts_gguf(True)),
    Family(name="olmoe", title="OLMoE", hf_architecture="OlmoeForCausalLM", has_experts=True,
           traits={"qk_norm": "width"}, reads=olmoe, takes_attention_bias=True, hf_names=HF_EXPERTS,
           gguf_architecture="olmoe", gguf_names=GGUF_EXPERTS, gguf_reads=experts_gguf(False)),
    Family(name="granitemoe", title="Granite 3 MoE", hf_architecture="GraniteMoeForCausalLM", has_experts=True,
           reads=_granitemoe, takes_attention_bias=True, hf_names=HF_GRANITE_EXPERTS, gguf_architecture="granitemoe",
           gguf_permutes_qk=True, gguf_names=GGUF_EXPERTS, gguf_reads=_granitemoe_gguf,
           gguf_takes=frozenset({"logit_scale", "embedding_scale", "residual_scale", "attention.scale"})),
    Family(name="stablelm", title="StableLM", hf_architecture="StableLmForCausalLM", traits={"norm": "layer"},
           reads=_stablelm, default_rotary_share=0.25, gguf_architecture="stablelm", gguf_reads=_stablelm_gguf),
    Family(name="gemma", title="Gemma 1", hf_architecture="GemmaForCausalLM", reads=_gemma, has_offset_norms=True,
           takes_attention_bias=True, activations=_GELU_ONLY, gguf_architecture="gemma", gguf_reads=_gemma_gguf),
    Family(name="gemma2", title="Gemma 2", hf_architecture="Gemma2ForCausalLM",
           traits={"norm_placement": "both"}, reads=_gemma2, has_offset_norms=True, takes_attention_bias=True,
           slides=_all_but_every(2), default_window=4096, activations=_GELU_ONLY, hf_names=_GEMMA2_NAMES,
           gguf_architecture="gemma2", gguf_reads=_gemma2_gguf),
    Family(name="gemma3", title="Gemma 3 (of those that see, the text part)", hf_architecture="Gemma3ForCausalLM",
           traits={"norm_placement": "both", "qk_norm": "head"}, reads=_gemma3, has_offset_norms=True,
           takes_attention_bias=True, slides=_all_but_every(6, "sliding_window_pattern"), default_window=4096,
           default_rope_theta=1000000.0, has_final_max_position=True, activations=_GELU_ONLY, hf_names=_GEMMA2_NAMES,
           gguf_architecture="gemma3", gguf_reads=_gemma3_gguf),
)}


def families_markdown() -> str:
    """The table in README.md."""
    lines = ["| family | models | config.json | GGUF |", "|---|---|---|---|"]
    for family in FAMILIES.values():
        known_as = family.gguf_architecture or family.gguf_written_as
        gguf = f"`{known_as}`" if known_as else "not yet"
        lines.append(f"| {family.name} | {family.title} | `{family.hf_architecture}` | {gguf} |")
    return "\n".join(lines) + "\n"
