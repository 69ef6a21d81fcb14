"""The golden checkpoints by name: the class transformers makes them with, and its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

DIRECTORY = Path(__file__).parent / "families"
VOCAB, NUM_GREEDY, MAX_POSITION = 256, 12, 128
TOKENS: list[int] = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()

_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": MAX_POSITION,
    "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}


def _case(class_name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return class_name, {**_SHAPE, **changes}


def _rope(kind: str, theta: float = 10000.0, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **fields}


_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
         "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
         "original_max_position_embeddings": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": _case("LlamaForCausalLM", tie_word_embeddings=False, num_key_value_heads=4, rms_norm_eps=1e-5),
    "llama3": _case("LlamaForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "llama-biases": _case("LlamaForCausalLM", attention_bias=True, mlp_bias=True),
    "llama-linear": _case("LlamaForCausalLM", rope_parameters=_rope("linear", factor=4.0)),
    "llama3.1": _case("LlamaForCausalLM", rope_parameters=_rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn": _case("LlamaForCausalLM", rope_parameters=_rope(
        "yarn", factor=4.0, original_max_position_embeddings=32)),
    "smollm3": _case("SmolLM3ForCausalLM", num_hidden_layers=4, intermediate_size=64),    # the fourth is not rotated
    "smollm3-listed": _case("SmolLM3ForCausalLM", no_rope_layers=[0, 1]),
    "mistral": _case("MistralForCausalLM", sliding_window=None, tie_word_embeddings=False),
    "mistral-wide-window": _case("MistralForCausalLM", sliding_window=4096, head_dim=32),
    "mistral-window": _case("MistralForCausalLM", sliding_window=10),
    "qwen2": _case("Qwen2ForCausalLM", rms_norm_eps=1e-6),
    "qwen2-window": _case("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=13, max_window_layers=1),
    "qwen3": _case("Qwen3ForCausalLM", head_dim=32, num_attention_heads=3, num_key_value_heads=1),
    "granite": _case("GraniteForCausalLM", embedding_multiplier=3.0, attention_multiplier=0.2, logits_scaling=2.0,
                     residual_multiplier=0.6),
    "olmo2": _case("Olmo2ForCausalLM", tie_word_embeddings=False),
    "phi3": _case("Phi3ForCausalLM", tie_word_embeddings=False),
    "phi3-window": _case("Phi3ForCausalLM", sliding_window=17),
    "phi4-partial": _case("Phi3ForCausalLM", rope_parameters=_rope("default", partial_rotary_factor=0.5)),
    "phi3-long": _case("Phi3ForCausalLM", rope_parameters=_rope("longrope", **_LONG),
                       original_max_position_embeddings=32),
    "mixtral": _case("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, intermediate_size=32,
                     tie_word_embeddings=False),
    "qwen3-moe": _case("Qwen3MoeForCausalLM", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32,
                       norm_topk_prob=True, head_dim=32, num_attention_heads=2, num_key_value_heads=1),
    "qwen3-moe-sparse": _case("Qwen3MoeForCausalLM", num_hidden_layers=3, num_experts=5, num_experts_per_tok=2,
                              moe_intermediate_size=32, intermediate_size=64, head_dim=16,
                              decoder_sparse_step=2),    # layer 1 alone has experts
    "qwen2-moe": _case("Qwen2MoeForCausalLM", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32,
                       shared_expert_intermediate_size=32),
    "olmoe": _case("OlmoeForCausalLM", num_experts=5, num_experts_per_tok=2, intermediate_size=32),
    "granitemoe": _case("GraniteMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2, intermediate_size=32,
                        embedding_multiplier=3.0, attention_multiplier=0.2, logits_scaling=2.0,
                        residual_multiplier=0.6),
    "stablelm": _case("StableLmForCausalLM", use_qkv_bias=True, rope_parameters=_rope(
        "default", partial_rotary_factor=0.25), tie_word_embeddings=False),
    "gemma": _case("GemmaForCausalLM", head_dim=32, num_key_value_heads=1, hidden_act="gelu_pytorch_tanh"),
    "gemma2-wide-window": _case("Gemma2ForCausalLM", head_dim=32, sliding_window=4096, query_pre_attn_scalar=24,
                                attn_logit_softcapping=5.0, final_logit_softcapping=8.0),
    "gemma2": _case("Gemma2ForCausalLM", head_dim=32, sliding_window=9, query_pre_attn_scalar=32,
                    attn_logit_softcapping=5.0, final_logit_softcapping=8.0),
    "gemma3": _case("Gemma3ForCausalLM", head_dim=16, sliding_window=12, query_pre_attn_scalar=16, num_hidden_layers=4,
                    intermediate_size=64, num_key_value_heads=1,
                    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                    rope_parameters={"sliding_attention": _rope("default", theta=100.0),
                                     "full_attention": _rope("linear", factor=4.0)}),
}
