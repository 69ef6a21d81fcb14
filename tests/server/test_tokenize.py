"""/tokenize, /detokenize and /tokenizer_info, in both dialects."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.model.tokenizer import Tokenizer

from .conftest import RunningServer, StartServer

HELLO = "héllo <|end|> 🦀"


def tokenize(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.post("/tokenize", body)
    assert response.status_code == 200, response.text
    return response.json()


def tokenizer_of(server: RunningServer) -> Tokenizer:
    return server.engine.model.tokenizer


def test_a_prompt_gives_vllms_answer(server: RunningServer) -> None:
    ids = tokenizer_of(server).encode(HELLO)
    assert tokenize(server, prompt=HELLO) == {
        "count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    assert len(tokenize(server, prompt=HELLO, return_token_strs=True)["token_strs"]) == len(ids)
    assert tokenize(server, prompt=HELLO, add_special_tokens=False, model="fake-model")["tokens"]


def test_the_ids_are_those_a_completion_runs_on(server: RunningServer) -> None:
    for add_special_tokens in (True, False):
        server.completion(prompt=HELLO, add_special_tokens=add_special_tokens, max_tokens=1)
        expected = list(server.engine.submitted[-1].prompt_token_ids)
        assert tokenize(server, prompt=HELLO, add_special_tokens=add_special_tokens)["tokens"] == expected


@pytest.mark.parametrize("more", [
    {}, {"add_generation_prompt": False}, {"add_special_tokens": True},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
def test_the_ids_of_messages_are_those_a_chat_runs_on(server: RunningServer, more: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": HELLO}]} | more
    assert server.post("/v1/chat/completions", body | {"max_tokens": 1}).status_code == 200
    answer = tokenize(server, **body, return_token_strs=True)
    assert answer["tokens"] == list(server.engine.submitted[-1].prompt_token_ids)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert len(server.engine.submitted) == 1    # tokenising runs nothing


def test_content_gives_llama_cpps_answer(server: RunningServer) -> None:
    ids = tokenizer_of(server).encode(HELLO, add_special_tokens=False)
    assert tokenize(server, content=HELLO)["tokens"] == ids
    found = tokenize(server, content="a🦀", with_pieces=True)["tokens"]
    assert found[0] == {"id": ord("a"), "piece": "a"}
    assert bytes(byte for one in found[1:] for byte in one["piece"]) == "🦀".encode()    # parts of a character: bytes


def test_detokenizing_gives_the_text_back_under_both_names(server: RunningServer) -> None:
    for text in (HELLO, "", "plain"):
        ids = tokenize(server, content=text)["tokens"]
        assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": text, "content": text}


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": None}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"), ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
    ("/tokenize", {"prompt": "x" * ((1 << 20) + 1)}, "prompt"), ("/tokenize", {"content": 5}, "content"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ("/tokenize", {"content": "a", "with_pieces": "yes"}, "with_pieces"),
    ("/tokenize", {"messages": []}, "messages"), ("/tokenize", {"messages": "hi"}, "messages"),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [300]}, "tokens"), ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ("/detokenize", {"tokens": [True]}, "tokens")])
def test_what_is_wrong_is_named(server: RunningServer, path: str, body: dict[str, Any], param: str) -> None:
    response = server.post(path, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_unknown_models_and_fields_are_told(server: RunningServer, start_server: StartServer) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert server.post(path, body | {"model": "other"}).status_code == 404
        assert server.post(path, body | {"extra": 1}).headers["x-paceline-ignored"] == "extra"
    strict = start_server(strict_fields=True)
    assert strict.post("/tokenize", {"prompt": "a", "extra": 1}).status_code == 400
    assert strict.post("/tokenize", {"content": "a", "add_special_tokens": True}).status_code == 400


def test_a_text_longer_than_the_context_can_be_counted(server: RunningServer) -> None:
    assert tokenize(server, prompt="x" * 100_000)["count"] == 100_000


def test_the_tokenizer_tells_about_itself(server: RunningServer) -> None:
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|end|>" and info["bos_token"] is None
    assert "add_generation_prompt" in info["chat_template"] and info["model_max_length"] == 256


def test_while_the_engine_loads_there_is_no_tokenizer(start_server: StartServer) -> None:
    server = start_server(is_loaded=False)
    for response in (server.post("/tokenize", {"prompt": "a"}), server.get("/tokenizer_info")):
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
