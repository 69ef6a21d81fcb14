"""Greedy generation of the real model equals transformers on the dequantised weights, token for token."""

from __future__ import annotations

import pytest

from paceline.build import LLM
from paceline.model.loader import open_model
from tests.golden.prompts import PROMPTS

pytestmark = pytest.mark.oracle
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def ours():
    with LLM("smollm2", dtype="f32", kv_dtype="f32", max_model_len=512) as llm:
        done = llm.generate(PROMPTS, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, show_progress=False)
        yield {prompt: (llm.model.tokenizer.encode(prompt, True), list(one.token_ids))
               for prompt, one in zip(PROMPTS, done, strict=True)}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_transformers(ours, prompt) -> None:
    from tests.oracle import transformers_model

    prompt_token_ids, tokens = ours[prompt]
    expected, margins = transformers_model.greedy(prompt_token_ids, NUM_TOKENS)
    differing = [i for i, (ours_, theirs) in enumerate(zip(tokens, expected, strict=True)) if ours_ != theirs]
    assert not differing, f"first at {differing[0]}, where the two best logits are {margins[differing[0]]} apart"


def test_a_hugging_face_directory_of_the_same_weights_gives_the_same_tokens(ours, tmp_path) -> None:
    from tests.oracle import transformers_model

    transformers_model.save_directory(tmp_path)
    open_model("smollm2").tokenizer.inner.save(str(tmp_path / "tokenizer.json"))
    with LLM(str(tmp_path), dtype="f32", kv_dtype="f32", max_model_len=512) as llm:
        done = llm.generate(PROMPTS[:6], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, show_progress=False)
    assert [list(one.token_ids) for one in done] == [ours[prompt][1] for prompt in PROMPTS[:6]]
