"""Every served field through the clients people have: it is taken, nothing is ignored, and the answer shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient

from paceline.model.loader import open_model
from paceline.server.fields import CHAT, CHAT_SHAPED, COMPLETION, COMPLETION_SHAPED

from .conftest import Server, start_server

TOKENIZER = open_model("smollm2").tokenizer
PROMPT = "The capital of France is"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PARIS = TOKENIZER.encode(" Paris", False)[0]
Shows = Callable[[Any], bool]    # the first choice of a greedy answer

# Field -> what to send, and what the answer then shows.
COMPLETIONS: dict[str, tuple[dict[str, Any], Shows]] = {
    "prompt": ({"prompt": TOKENIZER.encode(PROMPT, True)}, lambda done: done.choices[0].text.startswith(" Paris")),
    "model": ({"model": "smollm2"}, lambda done: done.model == "smollm2"),
    "max_tokens": ({"max_tokens": 3}, lambda done: done.usage.completion_tokens == 3),
    "max_completion_tokens": ({"max_completion_tokens": 3}, lambda done: done.usage.completion_tokens == 3),
    "min_tokens": ({"min_tokens": 6, "stop": "."}, lambda done: done.usage.completion_tokens >= 6),
    "n": ({"n": 2, "temperature": 1, "seed": 1}, lambda done: len(done.choices) == 2),
    "best_of": ({"best_of": 3, "temperature": 1}, lambda done: done.usage.completion_tokens > 8),
    "temperature": ({"temperature": 2, "seed": 4}, lambda done: not done.choices[0].text.startswith(" Paris.\n")),
    "top_p": ({"temperature": 2, "top_p": 1e-6}, lambda done: done.choices[0].text.startswith(" Paris")),
    "top_k": ({"temperature": 2, "top_k": 1}, lambda done: done.choices[0].text.startswith(" Paris")),
    "min_p": ({"temperature": 2, "min_p": 1.0}, lambda done: done.choices[0].text.startswith(" Paris")),
    "typical_p": ({"temperature": 1, "typical_p": 0.9}, lambda done: bool(done.choices[0].text)),
    "repetition_penalty": ({"prompt": "na na na na na", "repetition_penalty": 50.0},
                           lambda done: " na" not in done.choices[0].text),
    "presence_penalty": ({"presence_penalty": 2.0}, lambda done: bool(done.choices[0].text)),
    "frequency_penalty": ({"prompt": "na na na na na na", "frequency_penalty": 2.0, "max_tokens": 30},
                          lambda done: done.choices[0].text.count(" na") < 25),
    "seed": ({"temperature": 1, "seed": -5}, lambda done: bool(done.choices[0].text)),
    "ignore_eos": ({"ignore_eos": True, "max_tokens": 60}, lambda done: done.usage.completion_tokens == 60),
    "skip_special_tokens": ({"skip_special_tokens": False, "logit_bias": {"2": 100}, "ignore_eos": True},
                            lambda done: "<|im_end|>" in done.choices[0].text),
    "include_stop_str_in_output": ({"stop": "Paris", "include_stop_str_in_output": True},
                                   lambda done: done.choices[0].text == " Paris"),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 2}, lambda done: done.usage.prompt_tokens == 2),
    "user": ({"user": "alice"}, lambda done: bool(done.choices)),
    "cache_salt": ({"cache_salt": "mine"}, lambda done: bool(done.choices)),
    "timeout": ({"timeout": 60}, lambda done: done.choices[0].finish_reason == "length"),
    "return_token_ids": ({"return_token_ids": True}, lambda done: done.choices[0].token_ids[0] == PARIS),
    "stop": ({"stop": ["Paris"]}, lambda done: done.choices[0].text == " "),
    "stop_token_ids": ({"stop_token_ids": [PARIS]}, lambda done: done.choices[0].finish_reason == "stop"),
    "logit_bias": ({"logit_bias": {str(PARIS): -100}}, lambda done: "Paris" not in done.choices[0].text[:6]),
    "bad_words": ({"bad_words": ["Paris"]}, lambda done: "Paris" not in done.choices[0].text),
    "allowed_token_ids": ({"allowed_token_ids": [PARIS], "max_tokens": 2},
                          lambda done: done.choices[0].text == " Paris Paris"),
    "echo": ({"echo": True}, lambda done: done.choices[0].text.startswith(PROMPT)),
    "logprobs": ({"logprobs": 2}, lambda done: len(done.choices[0].logprobs.top_logprobs[0]) == 2),
    "add_special_tokens": ({"add_special_tokens": False}, lambda done: bool(done.choices[0].text)),
}
CHATS: dict[str, tuple[dict[str, Any], Shows]] = {
    "messages": ({}, lambda done: "Paris" in done.choices[0].message.content),
    "logprobs": ({"logprobs": True}, lambda done: done.choices[0].logprobs.content[0].logprob <= 0),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 3},
                     lambda done: len(done.choices[0].logprobs.content[0].top_logprobs) == 3),
    "add_generation_prompt": ({"add_generation_prompt": True}, lambda done: "Paris" in done.choices[0].message.content),
    "continue_final_message": (
        {"messages": [*QUESTION, {"role": "assistant", "content": "The capital of France"}],
         "continue_final_message": True, "add_generation_prompt": False},
        lambda done: done.choices[0].message.content.lstrip().startswith("is")),
    "add_special_tokens": ({"add_special_tokens": True}, lambda done: bool(done.choices[0].message.content)),
    "chat_template": ({"chat_template": PROMPT}, lambda done: "Paris" in done.choices[0].message.content),
    "chat_template_kwargs": ({"chat_template": "{{ city }}", "chat_template_kwargs": {"city": PROMPT}},
                             lambda done: "Paris" in done.choices[0].message.content),
    **{name: row for name, row in COMPLETIONS.items() if name in (
        "model", "min_tokens", "n", "top_k", "min_p", "typical_p", "seed", "user", "cache_salt", "bad_words")
       and row[1].__code__.co_names.count("text") == 0},
}
STREAMED = {"stream", "stream_options"}
NEEDS_A_POLICY = {"priority"}    # refused unless the schedule reads it


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start_server("--max-model-len", "512", "--num-kv-blocks", "200", "--trust-request-chat-template",
                           "--ordering", "priority", "--strict-fields")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_no_served_field_is_left_out_here() -> None:
    assert set(COMPLETIONS) | STREAMED | NEEDS_A_POLICY == set(COMPLETION) | set(COMPLETION_SHAPED)
    assert set(CHATS) | set(COMPLETIONS) | STREAMED | NEEDS_A_POLICY == (
        set(CHAT) | set(CHAT_SHAPED) | set(COMPLETION) | set(COMPLETION_SHAPED))


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_shows_the_field(client: openai.OpenAI, name: str) -> None:
    fields, shows = COMPLETIONS[name]
    body = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
    if "max_completion_tokens" in fields:
        del body["max_tokens"]
    done = client.completions.create(model=body.pop("model"), prompt=body.pop("prompt"), extra_body=body)
    assert shows(done), done


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_shows_the_field(client: openai.OpenAI, name: str) -> None:
    fields, shows = CHATS[name]
    body = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 20, **fields}
    done = client.chat.completions.create(model=body.pop("model"), messages=body.pop("messages"), extra_body=body)
    assert shows(done), done


def test_streams_and_their_options(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="smollm2", prompt=PROMPT, temperature=0, max_tokens=5, stream=True,
                                            stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices).startswith(" Paris")
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5


def test_a_priority_is_taken_where_the_schedule_reads_it(client: openai.OpenAI) -> None:
    done = client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=2, extra_body={"priority": -3})
    assert done.choices[0].text


NAMED: Any = {"model": "smollm2"}    # its default, "dummy", is for servers that take any name

# What huggingface_hub's chat_completion sends by name.
HUB: dict[str, tuple[Any, Shows]] = {
    "frequency_penalty": (1.0, lambda done: bool(done.choices[0].message.content)),
    "presence_penalty": (1.0, lambda done: bool(done.choices[0].message.content)),
    "logprobs": (True, lambda done: done.choices[0].logprobs.content[0].logprob <= 0),
    "max_tokens": (3, lambda done: done.usage.completion_tokens == 3),
    "n": (2, lambda done: len(done.choices) == 2),
    "seed": (7, lambda done: bool(done.choices[0].message.content)),
    "stop": (["Paris"], lambda done: "Paris" not in done.choices[0].message.content),
    "temperature": (0.0, lambda done: "Paris" in done.choices[0].message.content),
    "top_p": (1e-6, lambda done: "Paris" in done.choices[0].message.content),
    "extra_body": ({"top_k": 1}, lambda done: "Paris" in done.choices[0].message.content),
}


@pytest.mark.parametrize("name", HUB)
def test_huggingface_hubs_client_reads_the_answer(server: Server, name: str) -> None:
    value, shows = HUB[name]
    done = InferenceClient(base_url=server.url).chat_completion(QUESTION, **{**NAMED, "max_tokens": 20, name: value})
    assert shows(done), done


def test_huggingface_hubs_client_reads_top_logprobs_and_streams(server: Server) -> None:
    hub = InferenceClient(base_url=server.url)
    done = hub.chat_completion(QUESTION, **NAMED, logprobs=True, top_logprobs=2, max_tokens=2, temperature=0.0)
    assert len(done.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(hub.chat_completion(QUESTION, **NAMED, stream=True, temperature=0.0, max_tokens=20,
                                      stream_options={"include_usage": True}))    # type: ignore[arg-type]
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
