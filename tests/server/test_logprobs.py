"""Log-probabilities over HTTP, in the shapes of completions and of chats; and the choices of best_of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.server.logprobs import CompletionLogprobs, Entry, chat_logprobs, token_name

from .conftest import MODEL, RunningServer
from .fake_engine import END_TOKEN_ID, best_tokens, logprob_of, saying
from .test_stream import events


def completion(server: RunningServer, **fields: Any) -> Any:
    response = server.completion(**fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_off_is_null(server: RunningServer) -> None:
    for fields in ({}, {"logprobs": None}, {"logprobs": False}):
        assert completion(server, **fields)["choices"][0]["logprobs"] is None
    assert server.chat().json()["choices"][0]["logprobs"] is None


def test_a_completion_has_one_entry_a_token(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("cab"))
    body = completion(server, logprobs=2, max_tokens=20)
    assert body["choices"][0]["text"] == "cab" and body["usage"]["completion_tokens"] == 4
    told = body["choices"][0]["logprobs"]
    assert told["tokens"][:3] == ["c", "a", "b"] and len(told["tokens"]) == 4    # the end token has an entry
    assert told["token_logprobs"][:3] == [-0.75, -0.25, -0.5]
    assert told["top_logprobs"][0] == {"a": -0.25, "`": -0.5, "c": -0.75}        # the token, where it is not among them
    assert told["top_logprobs"][1] == {"a": -0.25, "`": -0.5}
    assert told["text_offset"] == [0, 1, 2, 3]


def test_none_beside_is_the_token_alone(server: RunningServer) -> None:
    told = completion(server, logprobs=0, max_tokens=3)["choices"][0]["logprobs"]
    assert [list(one) for one in told["top_logprobs"]] == [[token] for token in told["tokens"]]


def test_an_echo_begins_with_the_prompts(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("ab", ends=False))
    body = completion(server, prompt="caba", echo=True, logprobs=1, max_tokens=2)
    told = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"] == "cabaab" == "".join(told["tokens"])
    assert told["token_logprobs"] == [None, *(logprob_of(ord(char)) for char in "abaab")]
    assert told["top_logprobs"][0] is None and told["top_logprobs"][1] == {"a": -0.25}
    assert told["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6,
                             "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("prompt", ["a", "caba", [99, 97]])
def test_an_echo_of_the_prompt_alone_generates_nothing_that_shows(server: RunningServer, prompt: Any) -> None:
    body = completion(server, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    [choice] = body["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) and choice["logprobs"]["token_logprobs"][0] is None
    assert (body["usage"]["completion_tokens"], body["usage"]["prompt_tokens"]) == (0, len(prompt))


def test_lm_eval_finds_what_it_reads(server: RunningServer) -> None:
    """It asks for one token, drops its entry, and reads those of the continuation; also of equal prompts, in order."""
    context, continuation = "the ", "quick"
    prompts = [context + continuation, "lazy dog", context + continuation]
    body = completion(server, prompt=prompts, temperature=0, max_tokens=1, logprobs=1, echo=True, seed=1234)
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(prompt) + 1
        read = told["token_logprobs"][len(context) : -1]
        assert read == [logprob_of(ord(char)) for char in prompt[len(context) :]]
        greedy = [max(top, key=top.get) for top in told["top_logprobs"][len(context) : -1]]
        assert set(greedy) == {"a"}


def test_every_choice_has_its_prompts(server: RunningServer) -> None:
    body = completion(server, prompt=["ab", "cde"], n=2, echo=True, logprobs=0, max_tokens=1)
    starts = [choice["logprobs"]["tokens"][:-1] for choice in body["choices"]]
    assert starts == [["a", "b"]] * 2 + [["c", "d", "e"]] * 2


def pieces_of(chunks: list[Any]) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    return joined


@pytest.mark.parametrize("fields", [{"max_tokens": 5}, {"max_tokens": 5, "echo": True}, {"max_tokens": 0, "echo": True},
                                    {"max_tokens": 40, "stop": "fox j"},
                                    {"prompt": "cab" * 60, "echo": True, "logprobs": 20}])    # so many: off the loop
def test_a_streams_pieces_join_to_the_whole(server: RunningServer, fields: dict[str, Any]) -> None:
    fields = {"prompt": "cab", "logprobs": 3, **fields}
    whole = completion(server, **fields)["choices"][0]
    chunks = events(server.completion(stream=True, **fields))
    assert pieces_of(chunks) == whole["logprobs"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == whole["finish_reason"]
    assert chunks[-1]["choices"][0]["logprobs"] is None


def test_a_chat_has_one_entry_a_token(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("cé", ends=False))
    [choice] = server.chat(logprobs=True, top_logprobs=2, max_tokens=3).json()["choices"]
    first, second, third = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "cé"
    assert first == {"token": "c", "logprob": -0.75, "bytes": [99], "top_logprobs": [
        {"token": "a", "logprob": -0.25, "bytes": [97]}, {"token": "`", "logprob": -0.5, "bytes": [96]}]}
    assert (second["token"], third["token"]) == ("bytes:\\xc3", "bytes:\\xa9")
    assert bytes(second["bytes"] + third["bytes"]).decode() == "é"


@pytest.mark.parametrize("num_top", [None, 0, 1, 20])
def test_a_chat_has_exactly_as_many_best_tokens_as_asked(server: RunningServer, num_top: int | None) -> None:
    fields = {"logprobs": True, "top_logprobs": num_top, "max_tokens": 4}
    content = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [num_top or 0] * 4
    chunks = events(server.chat(stream=True, **fields))
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    assert chunks[0]["choices"][0]["logprobs"] is None


def test_held_text_holds_no_entry_back(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("one STO", ends=False))
    chunks = events(server.chat(stream=True, stop="STOP", logprobs=True, max_tokens=7))
    per_chunk = [len((chunk["choices"][0]["logprobs"] or {"content": []})["content"]) for chunk in chunks]
    assert per_chunk == [0, 1, 1, 1, 1, 1, 1, 1, 0]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "one STO"


def test_the_openai_client_reads_both_shapes(server: RunningServer) -> None:
    client = server.openai()
    answer = client.completions.create(model=MODEL, prompt="hi", logprobs=3, max_tokens=4, temperature=0)
    told = answer.choices[0].logprobs
    assert told is not None and told.tokens is not None and "".join(told.tokens) == answer.choices[0].text
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, max_tokens=4,
        temperature=0)
    content = chat.choices[0].logprobs.content    # type: ignore[union-attr]
    assert content is not None and "".join(one.token for one in content) == chat.choices[0].message.content
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, max_tokens=4,
        temperature=0, stream=True)
    streamed = [one for chunk in stream for choice in chunk.choices if choice.logprobs is not None
                for one in choice.logprobs.content or ()]
    assert streamed == content


@pytest.mark.parametrize("fields", [
    {"presence_penalty": 1.0, "frequency_penalty": -0.5, "logit_bias": {"65": 5}, "seed": 3, "n": 2, "stop": ["x"]},
    {"extra_body": {"min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.2, "top_k": 5, "min_tokens": 2,
                    "bad_words": ["no"], "allowed_token_ids": [65, 66], "skip_special_tokens": False,
                    "include_stop_str_in_output": True, "truncate_prompt_tokens": 4, "ignore_eos": True}}])
def test_the_openai_client_may_ask_for_everything(server: RunningServer, fields: dict[str, Any]) -> None:
    client = server.openai()
    assert client.completions.create(model=MODEL, prompt="hi", **fields).choices[0].finish_reason == "length"
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=5, **fields)
    assert chat.choices[0].finish_reason == "length"


def test_of_equal_names_the_likelier_keeps_the_name_and_values_are_finite(server: RunningServer) -> None:
    tokenizer = server.engine.model.tokenizer
    entry = Entry(97, float("-inf"), ((98, -0.5), (98, -1e6)))    # a made-up case of two tokens with one text
    told = CompletionLogprobs(tokenizer, True).object_of([entry])
    assert told["top_logprobs"] == [{"b": -0.5, "token_id:98": -9999.0, "a": -9999.0}]
    assert told["token_logprobs"] == [-9999.0]
    json.dumps(chat_logprobs(tokenizer, [entry]), allow_nan=False)


def test_a_token_that_is_no_text_goes_by_its_bytes(server: RunningServer) -> None:
    tokenizer = server.engine.model.tokenizer
    assert token_name(tokenizer, 0xF0) == "bytes:\\xf0"
    assert token_name(tokenizer, END_TOKEN_ID) == tokenizer.token_text(END_TOKEN_ID) != ""


def test_best_of_answers_with_the_likeliest_per_token(server: RunningServer) -> None:
    said = ["zz", "aa", "bb", "zazaza"]
    server.on_loop(setattr, server.engine, "script",
                   lambda submit, choice, position: [*said[choice].encode(), END_TOKEN_ID][position])
    body = completion(server, n=2, best_of=4, max_tokens=20)
    assert [choice["text"] for choice in body["choices"]] == ["aa", "bb"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == sum(len(text) + 1 for text in said)
    told = completion(server, best_of=4, max_tokens=20, logprobs=1)["choices"][0]["logprobs"]
    assert told["tokens"][:2] == ["a", "a"] and told["top_logprobs"][0] == {"a": best_tokens(1)[0][1]}


def test_best_of_is_for_each_prompt(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script",
                   lambda submit, choice, position: [ord("c"), ord("a"), ord("b")][(choice + submit.prompt_index) % 3])
    body = completion(server, prompt=["x", "y"], best_of=3, max_tokens=1, echo=True)
    assert [choice["text"] for choice in body["choices"]] == ["xa", "ya"]


def test_a_prompt_may_be_cut_to_its_end(server: RunningServer) -> None:
    body = completion(server, prompt="x" * 1000 + "abc", truncate_prompt_tokens=3, echo=True, max_tokens=1)
    assert body["choices"][0]["text"].startswith("abc") and body["usage"]["prompt_tokens"] == 3
    body = completion(server, prompt=list(range(1, 256)) * 2, truncate_prompt_tokens=-1, max_tokens=56)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (200, 56)
    assert server.chat(truncate_prompt_tokens=5).json()["usage"]["prompt_tokens"] == 5
    assert server.completion(prompt=list(range(1, 256)) * 2).status_code == 400


@pytest.mark.parametrize(("kept", "text"), [(False, "one "), (True, "one STOP")])
def test_the_text_may_keep_what_stopped_it(server: RunningServer, kept: bool, text: str) -> None:
    server.on_loop(setattr, server.engine, "script", saying("one STOP two", ends=False))
    fields = {"stop": "STOP", "include_stop_str_in_output": kept, "max_tokens": 30}
    assert completion(server, **fields)["choices"][0]["text"] == text
    chunks = events(server.completion(stream=True, **fields))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
