"""Greedy generation of the real model equals transformers on the dequantised weights, token for token."""

from __future__ import annotations

import pytest

from paceline.build import LLM
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
