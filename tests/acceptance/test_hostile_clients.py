"""The real server and clients that send what they should not, or more than fits: each gets the answer that is written
down, and after each the server serves the next request with all of its blocks free."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from .conftest import Server, start_server

CONTEXT = 256
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ANSWER = "The capital of France is Paris."
STORY = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
JSON_TYPE = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    running = start_server("--max-model-len", str(CONTEXT), "--num-kv-blocks", "40")
    yield running
    assert running.stop() == 0


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """Whatever a test does to it, the server goes on."""
    yield shared_server
    shared_server.until_idle()
    assert shared_server.metric("vllm:kv_cache_usage_perc") == 0
    answer = chat(shared_server, messages=QUESTION, temperature=0)
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER


def post(server: Server, path: str, **request: Any) -> httpx.Response:
    return httpx.post(server.url + path, timeout=60, **request)


def complete(server: Server, **body: Any) -> httpx.Response:
    return post(server, "/v1/completions", json=body)


def chat(server: Server, **body: Any) -> httpx.Response:
    return post(server, "/v1/chat/completions", json=body)


def events_of(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """A stream's events; it must end with [DONE]."""
    lines = post(server, path, json=body | {"stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- bodies

def test_a_body_of_100_megabytes_is_413(server: Server) -> None:
    part = b"x" * (1 << 20)
    for headers in (JSON_TYPE | {"content-length": str(100 << 20)}, JSON_TYPE):    # announced, then chunked
        try:
            answer = post(server, "/v1/completions", content=(part for _ in range(100)), headers=headers)
        except httpx.WriteError:
            continue    # a client that writes on is cut off after some seconds
        assert error_of(answer, 413)["code"] == "request_too_large"


BODIES = [
    (b'{"prompt": ' + b"[" * 4999 + b"]" * 4999 + b"}", None, "5000 levels"),
    (b'{"prompt": "\\ud83d"}', "prompt", "surrogate"),
    (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages", "surrogate"),
    (b'{"prompt": "hi", "temperature": NaN}', "temperature", "JSON"),
    (b'{"prompt": "hi", "temperature": 1e999}', "temperature", "infinity"),
    (b'{"prompt": "hi", "max_tokens": 1e999}', "max_tokens", "infinity"),
    (b"", None, "empty"),
    (b"[1]", None, "object"),
]


@pytest.mark.parametrize(("body", "param", "word"), BODIES)
def test_what_is_no_strict_json_object_is_400(server: Server, body: bytes, param: str | None, word: str) -> None:
    path = "/v1/chat/completions" if b"messages" in body else "/v1/completions"
    error = error_of(post(server, path, content=body, headers=JSON_TYPE), 400)
    assert error["param"] == param and word in error["message"]


# ---- lengths

def test_a_prompt_of_one_less_than_the_limit_gets_its_one_token(server: Server) -> None:
    for max_tokens in (1, 10, None):
        answer = complete(server, prompt=[100] * (CONTEXT - 1), max_tokens=max_tokens, ignore_eos=True).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 1 and answer["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("num_tokens", [CONTEXT, CONTEXT + 1, 100_000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_leaves_no_room_is_400_with_both_numbers(server: Server, num_tokens: int, stream: bool) -> None:
    error = error_of(complete(server, prompt=[100] * num_tokens, stream=stream), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert str(num_tokens) in error["message"] and str(CONTEXT) in error["message"]


def test_a_conversation_that_leaves_no_room_is_400(server: Server) -> None:
    error = error_of(chat(server, messages=[{"role": "user", "content": "word " * CONTEXT}]), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"


def test_max_tokens_of_0_null_and_huge(server: Server) -> None:
    assert error_of(complete(server, prompt="hi", max_tokens=0), 400)["param"] == "max_tokens"
    assert error_of(chat(server, messages=QUESTION, max_tokens=0), 400)["param"] == "max_tokens"
    assert error_of(complete(server, prompt="hi", max_tokens=-1), 400)["param"] == "max_tokens"
    default = complete(server, prompt="hi", max_tokens=None, ignore_eos=True).json()
    assert default["usage"]["completion_tokens"] == 16 and default["choices"][0]["finish_reason"] == "length"
    for huge in (10_000, (1 << 63) - 1):
        lowered = complete(server, prompt="hi", max_tokens=huge, ignore_eos=True).json()
        assert lowered["usage"]["total_tokens"] == CONTEXT and lowered["choices"][0]["finish_reason"] == "length"
    rest = chat(server, messages=QUESTION, max_tokens=None, ignore_eos=True).json()
    assert rest["usage"]["total_tokens"] == CONTEXT and rest["choices"][0]["finish_reason"] == "length"


def test_an_echo_alone_generates_nothing(server: Server) -> None:
    answer = complete(server, prompt="hello there", max_tokens=0, echo=True).json()
    assert answer["choices"][0]["text"] == "hello there" and answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None])
def test_an_empty_prompt_is_400(server: Server, prompt: Any) -> None:
    assert error_of(complete(server, prompt=prompt), 400)["param"] == "prompt"


# ---- text, usage, choices

def test_a_stream_is_the_whole_answer_in_pieces(server: Server) -> None:
    whole = complete(server, **STORY).json()
    *chunks, usage = events_of(server, "/v1/completions", **STORY, stream_options={"include_usage": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 40
    assert usage["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert "usage" not in events_of(server, "/v1/completions", **STORY)[0]


def test_the_openai_client_reads_a_stream(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, stream=True,    # type: ignore[arg-type]
        stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    # One token more than the text has: the one that ends the turn.
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == chat(
        server, messages=QUESTION, temperature=0).json()["usage"]["completion_tokens"]


def test_usage_is_exact_for_every_prompt_of_a_call(server: Server) -> None:
    prompts = [[100] * 3, [200] * 30]
    counted_before = server.metric("vllm:prompt_tokens_total")
    answer = complete(server, prompt=prompts, n=2, max_tokens=5, ignore_eos=True, seed=1).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (33, 20, 53)
    assert server.metric("vllm:prompt_tokens_total") - counted_before == 33


def test_three_choices_of_a_seed_differ_and_come_again(server: Server) -> None:
    body = STORY | {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 12}
    first = [choice["text"] for choice in complete(server, **body).json()["choices"]]
    assert len(set(first)) == 3
    assert [choice["text"] for choice in complete(server, **body).json()["choices"]] == first
    texts = ["", "", ""]
    for event in events_of(server, "/v1/completions", **body):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == first
    other = complete(server, **body | {"seed": 8}).json()["choices"]
    assert [choice["text"] for choice in other] != first


def test_a_stop_string_is_found_wherever_tokens_cut_it(server: Server) -> None:
    text = complete(server, **STORY).json()["choices"][0]["text"]
    usage = []
    for start in range(8, 20, 3):
        for length in (1, 4, 9):
            stop = text[start : start + length]
            expected = text[: text.index(stop)]
            whole = complete(server, **STORY, stop=stop).json()
            chunks = events_of(server, "/v1/completions", **STORY, stop=[stop])
            assert whole["choices"][0]["text"] == expected, stop
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected, stop
            assert whole["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "stop"
            usage.append(whole["usage"]["completion_tokens"])
    assert max(usage) < 40, "no token past a stop may be counted"


def test_text_held_back_for_a_stop_string_comes_with_the_end(server: Server) -> None:
    text = complete(server, **STORY).json()["choices"][0]["text"]
    chunks = events_of(server, "/v1/completions", **STORY, stop=text[-3:] + "and then never")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_a_repeated_prompt_is_reported_as_cached_unless_salted(server: Server) -> None:
    prompt = list(range(1000, 1100))

    def num_cached(**more: Any) -> int:
        usage = complete(server, prompt=prompt, max_tokens=2, temperature=0, **more).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert num_cached(cache_salt="a") == 0
    assert num_cached(cache_salt="b") == 0
    assert num_cached(cache_salt="a") == 96    # whole blocks, and the last token is always computed
    hits_before = server.metric("vllm:prefix_cache_hits_total")
    assert num_cached(cache_salt="b") == 96
    assert server.metric("vllm:prefix_cache_hits_total") - hits_before == 96


def test_a_character_cut_by_the_limit_is_the_same_in_both_transports(server: Server) -> None:
    prompt = list("🦀🐙".encode())    # bytes as ids are as good as any: a prompt that starts mid-air
    for max_tokens in range(1, 6):
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 2, "seed": 3, "ignore_eos": True}
        whole = complete(server, **body).json()
        chunks = events_of(server, "/v1/completions", **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
        assert whole["usage"]["completion_tokens"] == max_tokens


# ---- too many, and the end

def test_beyond_the_queue_limit_clients_are_told_when_to_come_again(serve) -> None:
    server = serve("--max-queue", "4", "--num-kv-blocks", "64", "--max-model-len", "256")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: complete(server, **STORY | {"max_tokens": 120}), range(16)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 4 <= len(answers) - len(refused) < 16
    for answer in refused:
        assert error_of(answer, 429)["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
    server.until_idle()
    assert complete(server, **STORY).status_code == 200
    # A call that alone exceeds the limit will never fit: no invitation to come again.
    assert error_of(complete(server, **STORY, n=5), 400)["param"] == "n"
    assert server.stop() == 0


def read_to_end(url: str, has_begun: threading.Semaphore) -> str:
    with httpx.stream("POST", f"{url}/v1/completions", json=STORY | {"stream": True, "max_tokens": 60},
                      timeout=60) as response:
        lines = response.iter_lines()
        received = next(lines)
        has_begun.release()
        return received + "\n".join(lines)


def test_sigterm_lets_open_streams_end(serve) -> None:
    server = serve("--max-model-len", "256", "--num-kv-blocks", "40")    # too few for ten: some wait, some yield
    has_begun = threading.Semaphore(0)
    with ThreadPoolExecutor(10) as pool:
        streams = [pool.submit(read_to_end, server.url, has_begun) for _ in range(10)]
        for _ in streams:
            has_begun.acquire()
        assert server.stop() == 0
        for stream in streams:
            assert stream.result().rstrip().endswith("data: [DONE]")


def test_streams_beyond_the_grace_are_told(serve) -> None:
    server = serve("--max-model-len", "8192", "--grace-seconds", "0.2")
    body = STORY | {"stream": True, "max_tokens": 8000}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.stop() == 0
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "service_unavailable"
