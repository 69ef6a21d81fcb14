"""Every sampling parameter and log-probability on the real model through the official client: each does what it says,
alone and in a crowd."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any

import httpx
import openai
import pytest

from paceline.model.loader import open_model

from .conftest import Server, start_server

MODEL = "smollm2"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ANSWER = "The capital of France is Paris."
BANANAS = "BANANA" + " BANANA" * 7
TOKENIZER = open_model(MODEL).tokenizer
Complete = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start_server("--max-model-len", "512", "--num-kv-blocks", "120")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def complete(client: openai.OpenAI) -> Complete:
    """Completions.create, greedy unless told otherwise; what OpenAI does not know goes into extra_body."""
    known = {"prompt", "max_tokens", "temperature", "seed", "n", "best_of", "logprobs", "echo", "stop", "logit_bias",
             "presence_penalty", "frequency_penalty", "top_p"}

    def create(prompt: Any, **fields: Any) -> Any:
        fields = {"prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}
        extra = {name: fields.pop(name) for name in tuple(fields) if name not in known}
        return client.completions.create(model=MODEL, extra_body=extra, **fields)

    return create


@pytest.fixture(scope="module")
def answer(client: openai.OpenAI) -> Complete:
    def create(**fields: Any) -> Any:
        fields = {"temperature": 0, "max_tokens": 40, **fields}
        return client.chat.completions.create(model=MODEL, messages=QUESTION, **fields)

    return create


@pytest.mark.parametrize("fields", [
    {"extra_body": {"repetition_penalty": 3.0}}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_penalties_change_a_greedy_answer(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    def both(**more: Any) -> tuple[str, str | None]:
        plain = client.completions.create(model=MODEL, prompt=BANANAS, temperature=0, max_tokens=30, **more)
        messages: Any = [{"role": "user", "content": "Tell me a long story about the sea."}]
        chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=60, **more)
        return plain.choices[0].text, chat.choices[0].message.content

    without, with_it = both(), both(**fields)
    assert with_it[0] != without[0] and with_it[1] != without[1]


def test_the_scope_of_the_penalties(complete: Complete) -> None:
    """The prompt's tokens count for repetition alone; the first token drawn shows it."""
    first = complete(BANANAS, max_tokens=1).choices[0].text
    assert complete(BANANAS, max_tokens=1, repetition_penalty=10.0).choices[0].text != first
    assert complete(BANANAS, max_tokens=1, presence_penalty=2, frequency_penalty=2).choices[0].text == first


def test_a_bias_bans_or_forces_a_token(complete: Complete) -> None:
    [paris] = TOKENIZER.encode(" Paris", add_special_tokens=False)
    assert " Paris" in complete("The capital of France is").choices[0].text
    assert " Paris" not in complete("The capital of France is", logit_bias={paris: -100}).choices[0].text
    assert complete("One, two,", logit_bias={paris: 100}, max_tokens=3).choices[0].text == " Paris" * 3


def test_a_bad_word_does_not_appear_with_or_without_its_space(complete: Complete, answer: Complete) -> None:
    assert "Paris" in answer().choices[0].message.content
    for word in ("Paris", " Paris"):
        assert "Paris" not in answer(extra_body={"bad_words": [word]}).choices[0].message.content
        assert "Paris" not in complete("The capital of France is", bad_words=[word]).choices[0].text


def test_only_allowed_tokens_are_drawn(complete: Complete) -> None:
    yes, no = (TOKENIZER.encode(word, add_special_tokens=False)[0] for word in (" yes", " no"))
    text = complete("Is it so?", allowed_token_ids=[yes, no], temperature=1.5, max_tokens=20, seed=1).choices[0].text
    assert len(text.split()) == 20 and set(text.split()) <= {"yes", "no"}


def test_nothing_ends_before_min_tokens(answer: Complete) -> None:
    ended = answer()
    assert (ended.choices[0].finish_reason, ended.choices[0].message.content) == ("stop", ANSWER)
    num_tokens = ended.usage.completion_tokens
    longer = answer(extra_body={"min_tokens": num_tokens})
    assert longer.usage.completion_tokens > num_tokens
    assert longer.choices[0].message.content.startswith(ANSWER)
    assert answer(stop=["."], extra_body={"min_tokens": 2}).choices[0].message.content == ANSWER[:-1]
    assert "." in answer(stop=["."], extra_body={"min_tokens": num_tokens}).choices[0].message.content


@pytest.mark.parametrize("fields", [{"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999, "typical_p": 0.5}])
def test_the_tightest_limit_is_greedy(complete: Complete, fields: dict[str, Any]) -> None:
    greedy = complete("The sea").choices[0].text
    assert complete("The sea", temperature=2, seed=4, **fields).choices[0].text == greedy
    assert complete("The sea", temperature=2, seed=4).choices[0].text != greedy


def test_log_probabilities_are_raw_at_any_temperature(complete: Complete) -> None:
    fields: list[dict[str, Any]] = [{"temperature": t} for t in (0, 0.5, 1, 2)]
    fields += [{"top_k": 1}, {"presence_penalty": 2}, {"min_p": 0.5, "temperature": 1}, {"min_tokens": 1}]
    seen = [complete("The capital of France is", logprobs=5, max_tokens=1, seed=3, **one).choices[0].logprobs
            for one in fields]
    best = [dict(list(told.top_logprobs[0].items())[:5]) for told in seen]
    assert all(one == best[0] for one in best) and len(best[0]) == 5
    assert sum(2.718281828459045**value for value in best[0].values()) <= 1


def test_banned_tokens_among_the_best_stay_finite(server: Server) -> None:
    [paris] = TOKENIZER.encode(" Paris", add_special_tokens=False)
    body = {"prompt": "The capital of France is", "temperature": 0, "logprobs": 5, "max_tokens": 2,
            "logit_bias": {str(paris): -100}, "allowed_token_ids": [paris, 198, 28]}
    text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
    told = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the reply"))["choices"][0]["logprobs"]
    assert " Paris" in told["top_logprobs"][0] and told["tokens"][0] != " Paris"
    assert all(-9999 <= value <= 0 for top in told["top_logprobs"] for value in top.values())


def test_a_chats_entries_join_to_its_content(answer: Complete) -> None:
    whole = answer(logprobs=True, top_logprobs=20, max_tokens=6)
    content = whole.choices[0].logprobs.content
    assert "".join(one.token for one in content) == whole.choices[0].message.content
    assert all(len(one.top_logprobs) == 20 and one.token == one.top_logprobs[0].token for one in content)
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content)
    streamed = [one for chunk in answer(logprobs=True, top_logprobs=20, max_tokens=6, stream=True)
                for choice in chunk.choices if choice.logprobs is not None for one in choice.logprobs.content]
    assert streamed == content


def test_a_prompts_log_probabilities_are_the_same_cached_or_not_and_what_generation_gave(complete: Complete) -> None:
    drawn = complete("The capital of France is", max_tokens=40, logprobs=2, ignore_eos=True)
    text = "The capital of France is" + drawn.choices[0].text
    first, again = (complete(text, echo=True, max_tokens=0, logprobs=2) for _ in range(2))
    assert again.usage.prompt_tokens_details.cached_tokens == 0 and first.choices == again.choices
    told, expected = first.choices[0].logprobs, drawn.choices[0].logprobs
    assert told.token_logprobs[-40:] == expected.token_logprobs and told.tokens[-40:] == expected.tokens
    assert told.top_logprobs[-40:] == expected.top_logprobs
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(len(told.tokens))]
    assert first.usage.completion_tokens == 0


def test_the_best_of_several_has_the_highest_mean(complete: Complete) -> None:
    fields = {"temperature": 1.5, "seed": 5, "max_tokens": 12}
    every = complete("The sea", n=6, logprobs=0, **fields).choices
    best = complete("The sea", best_of=6, n=2, **fields)
    ranked = sorted(every, key=lambda choice: -fmean(choice.logprobs.token_logprobs))
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in every)


def test_a_crowd_of_all_kinds_changes_nobody(complete: Complete) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0, "repetition_penalty": 1.5, "logprobs": 3},
        {"temperature": 1, "seed": 42, "min_p": 0.05, "typical_p": 0.9},
        {"temperature": 1, "seed": 42, "frequency_penalty": 1, "bad_words": ["the", "sea"]},
        {"temperature": 0, "logit_bias": {28: -100}, "min_tokens": 10, "stop": ["."]},
        {"temperature": 1.2, "seed": 7, "n": 2, "logprobs": 1, "echo": True},
        {"temperature": 0},
    ]
    alone = [complete("The sea", **fields).choices for fields in asked]
    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(lambda fields: complete("The sea", **fields).choices, asked * 3))
    assert crowd == alone * 3


def test_lm_evals_request_scores_a_continuation(complete: Complete) -> None:
    context, right, wrong = "The capital of France is", " Paris", " Berlin"
    body = complete([context + right, context + wrong, context + right], max_tokens=1, logprobs=1, echo=True, seed=1234)
    length = len(TOKENIZER.encode(context))
    scores = [sum(choice.logprobs.token_logprobs[length:-1]) for choice in body.choices]
    assert scores[0] == scores[2] > scores[1]
    is_greedy = [choice.logprobs.tokens[length] == max(top, key=top.get)
                 for choice in body.choices for top in [choice.logprobs.top_logprobs[length]]]
    assert is_greedy == [True, False, True]
