"""Log-probabilities of prompt and output equal transformers within 1e-3, cached, cut, preempted or not."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.build import LLM
from tests.golden.prompts import PROMPTS

pytestmark = pytest.mark.oracle
ASKED = [*PROMPTS[:5], " ".join(PROMPTS[5:11])]    # the last one fills blocks that the cache can give again
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def expected():
    """Of each prompt: log-probabilities [tokens - 1, vocabulary] over the prompt and what it generates greedily."""
    from tests.oracle import transformers_model

    with LLM("smollm2", dtype="f32", kv_dtype="f32", max_model_len=512) as llm:
        encoded = {prompt: llm.model.tokenizer.encode(prompt, True) for prompt in ASKED}
    return {prompt: transformers_model.log_probabilities(
        token_ids + transformers_model.greedy(token_ids, NUM_TOKENS)[0]) for prompt, token_ids in encoded.items()}


SCHEDULES = {
    "roomy": {},
    "in small pieces": {"max_num_batched_tokens": 5},
    "short of blocks": {"num_kv_blocks": 10, "watermark": 0.0, "prefix_cache": "none"},
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_log_probabilities_equal_transformers(expected, schedule) -> None:
    with LLM("smollm2", dtype="f32", kv_dtype="f32", max_model_len=256, **schedule) as llm:
        for prompt_logprobs in (5, None):    # the second time a prefix is in the cache, where there is one
            done = llm.generate(ASKED, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=5,
                                prompt_logprobs=prompt_logprobs, show_progress=False)
            for prompt, one in zip(ASKED, done, strict=True):
                told = [(score.token_id, score.logprob, score.top) for score in one.prompt_logprobs or ()]
                told += zip(one.token_ids, one.logprobs, one.top_logprobs, strict=True)
                theirs = expected[prompt][-len(told):]
                for (token_id, logprob, top), row in zip(told, theirs, strict=True):
                    assert abs(logprob - row[token_id]) < 1e-3
                    np.testing.assert_allclose([value for _, value in top], np.sort(row)[::-1][:5], atol=1e-3)
            if "num_kv_blocks" in schedule:
                assert any(one.num_preemptions for one in done)
        assert "num_kv_blocks" in schedule or any(one.num_cached_tokens for one in done)
