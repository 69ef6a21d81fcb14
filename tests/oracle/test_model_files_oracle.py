"""Tokenizer, chat templates and weights of the packaged model against transformers itself (make oracle)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from paceline.model.chat_template import ChatTemplate
from paceline.model.loader import ModelFiles, open_model
from paceline.model.tokenizer import tokenizer_from_directory
from paceline.ops.dequantize import dequantize
from paceline.ops.interface import SourceTensor
from tests.golden import make_chat_goldens as chat_maker
from tests.golden import make_gguf_tokenizer_goldens as gguf_maker
from tests.golden import make_tokenizer_goldens as maker
from tests.golden import nasty
from tests.model import tiny

pytestmark = pytest.mark.oracle
pytest.importorskip("transformers")

SMOLLM2 = open_model("smollm2")


@pytest.fixture(scope="module")
def reference_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def reference(reference_path: Path) -> Any:
    return maker.load_reference(reference_path)


def test_the_goldens_are_current(reference: Any) -> None:
    golden = json.loads(maker.GOLDEN_PATH.read_text())
    assert [entry["text"] for entry in golden["texts"]] == nasty.TEXTS
    assert [entry["ids"] for entry in golden["texts"]] == [reference.encode(text) for text in nasty.TEXTS]
    assert golden["chats"] == json.loads(json.dumps(maker.render_all(reference)))


def test_the_goldens_of_chat_templates_are_current() -> None:
    assert json.loads(json.dumps(chat_maker.made())) == json.loads(chat_maker.GOLDEN_PATH.read_text())["rows"]


def test_the_goldens_of_gguf_tokenizers_are_current() -> None:
    golden = json.loads(gguf_maker.GOLDEN_PATH.read_text())
    assert gguf_maker.made() == {name: value for name, value in golden.items() if name != "made_by"}


@settings(max_examples=1000, deadline=None)
@given(text=st.text(st.characters(codec="utf-8") | st.sampled_from("  \n\t0123456789abc'.<|>\u00bd\u4e00\U0001f600")))
def test_ids_and_text_equal_transformers(reference: Any, text: str) -> None:
    ids = reference.encode(text)
    assert SMOLLM2.tokenizer.encode(text) == ids
    for skips in (False, True):
        assert SMOLLM2.tokenizer.decode(ids, skips) == reference.decode(ids, skip_special_tokens=skips)


def test_a_directory_gives_the_same_ids(reference: Any, reference_path: Path) -> None:
    tokenizer = tokenizer_from_directory(reference_path)
    for text in nasty.TEXTS:
        assert tokenizer.encode(text) == reference.encode(text), text


def test_the_files_own_template_is_the_one_transformers_reads(reference: Any) -> None:
    ours = SMOLLM2.chat_template
    assert ours is not None and ours.sources == {"default": reference.chat_template}
    assert SMOLLM2.tokenizer.special_tokens == reference.special_tokens_map
    for chat in nasty.CONVERSATIONS:
        prompt = reference.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
        assert ours.render(chat["messages"], True, chat.get("tools")) == prompt
        ids = reference.apply_chat_template(chat["messages"], add_generation_prompt=True, return_dict=False)
        assert SMOLLM2.tokenizer.encode(prompt, add_special_tokens=False) == ids


@settings(max_examples=200, deadline=None)
@given(contents=st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=4),
       name=st.sampled_from(sorted(nasty.TEMPLATES)))
def test_any_content_renders_as_transformers_does(reference: Any, contents: list[str], name: str) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    template = nasty.TEMPLATES[name]
    expected = reference.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert ChatTemplate(template, reference.special_tokens_map).render(messages, False) == expected


@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_add_bos_token_means_what_transformers_makes_of_it(tmp_path: Path, flag: bool, has_bos: bool) -> None:
    from transformers import AutoTokenizer

    directory = tiny.write_hf(tmp_path / "bos")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {**config, "add_bos_token": flag, "tokenizer_class": "PreTrainedTokenizerFast"}))
    if has_bos:
        inner = tiny.build_tokenizer()
        inner.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
        inner.save(str(directory / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(directory)
    ours = tokenizer_from_directory(directory)
    assert ours.encode("hello w1") == theirs.encode("hello w1")
    assert ours.encode("hello", add_special_tokens=False) == theirs.encode("hello", add_special_tokens=False)


def test_spec_and_weights_equal_transformers_reading_of_the_gguf() -> None:
    pytest.importorskip("accelerate")       # transformers reads GGUF weights only with it
    import torch
    from transformers import AutoModelForCausalLM

    path = maker.packaged_gguf()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    state, config, spec = model.state_dict(), model.config, SMOLLM2.spec
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim, config.num_key_value_heads) == (
        spec.num_layers, spec.hidden_size, spec.head_dim, spec.num_kv_heads)
    assert config.rope_parameters["rope_theta"] == spec.rope_theta and config.tie_word_embeddings == spec.has_tied_head
    assert np.float32(config.rms_norm_eps) == np.float32(spec.norm_eps)
    for ours, theirs in (("embed", "model.embed_tokens"), ("layers.0.q", "model.layers.0.self_attn.q_proj"),
                         ("layers.29.k", "model.layers.29.self_attn.k_proj"),
                         ("layers.7.v", "model.layers.7.self_attn.v_proj"),
                         ("layers.3.down", "model.layers.3.mlp.down_proj"), ("final_norm", "model.norm")):
        assert np.array_equal(values(SMOLLM2, ours), state[f"{theirs}.weight"].numpy()), ours


def values(files: ModelFiles, name: str) -> np.ndarray:
    weight = files.weights[name]
    return dequantize(weight) if isinstance(weight, SourceTensor) else weight
