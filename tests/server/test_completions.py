"""POST /v1/completions, one answer in one piece."""

from __future__ import annotations

import pytest

from .conftest import MODEL, RunningServer, StartServer
from .fake_engine import END_TOKEN_ID, FakeModel, saying


def test_the_envelope_is_openais(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("hello"))
    body = server.completion(max_tokens=20).json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "system_fingerprint": "fake-f32",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,      # the end token counts
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_the_openai_client_reads_it(server: RunningServer) -> None:
    answer = server.openai().completions.create(model=MODEL, prompt="hi", max_tokens=4, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].text) == 4
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_sixteen_tokens_by_default_and_null_is_absent(server: RunningServer) -> None:
    for fields in ({}, {"max_tokens": None, "temperature": None, "stop": None, "n": None, "seed": None}):
        assert server.completion(**fields).json()["usage"]["completion_tokens"] == 16


def test_the_newer_token_limit_wins(server: RunningServer) -> None:
    body = server.completion(max_tokens=3, max_completion_tokens=5).json()
    assert body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("abc", [3]),
        (["abc", "defgh"], [3, 5]),
        ([1, 2, 3, 4], [4]),
        ([[1, 2], [3, 4, 5]], [2, 3]),
        (["abc", [1, 2]], [3, 2]),
        (["same", "same"], [4, 4]),
    ],
)
def test_every_shape_of_prompt(server: RunningServer, prompt: object, lengths: list[int]) -> None:
    body = server.completion(prompt=prompt, max_tokens=2).json()
    assert [len(one.prompt_token_ids) for one in server.engine.submitted] == lengths
    assert [one.prompt_index for one in server.engine.submitted] == list(range(len(lengths)))
    assert len({one.request_id for one in server.engine.submitted}) == len(lengths)
    assert [choice["index"] for choice in body["choices"]] == list(range(len(lengths)))
    assert body["usage"]["prompt_tokens"] == sum(lengths)
    assert body["usage"]["completion_tokens"] == 2 * len(lengths)


def test_choices_come_in_prompt_order(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script",
                   lambda submit, choice, position: ord("A") + submit.prompt_index * 3 + choice)
    body = server.completion(prompt=["a", "b"], n=3, max_tokens=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["AA", "BB", "CC", "DD", "EE", "FF"]


def test_a_seed_repeats_and_choices_differ(server: RunningServer) -> None:
    def texts(**fields: object) -> list[str]:
        body = server.completion(temperature=1, max_tokens=12, **fields).json()
        return [choice["text"] for choice in body["choices"]]

    assert texts(n=3, seed=42) == texts(n=3, seed=42)
    assert len(set(texts(n=3, seed=42))) == 3
    assert texts(seed=1) != texts(seed=2)


def test_a_missing_seed_is_drawn_and_recorded(server: RunningServer) -> None:
    for _ in range(2):
        server.completion()
    first, second = (one.sampling.seed for one in server.engine.submitted)
    assert second == first + 1    # the injected source counts


def test_sampling_fields_arrive(server: RunningServer) -> None:
    server.completion(temperature=0.5, top_p=0.9, top_k=7, seed=-3, stop=["x", "yz"], stop_token_ids=[9, 10],
                      ignore_eos=True, user="ann", priority=-2, cache_salt="s", max_tokens=5)
    [submit] = server.engine.submitted
    params = submit.sampling
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, -3)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("x", "yz"), (9, 10), True)
    assert (submit.tenant, submit.priority, submit.cache_extras) == ("ann", -2, ("salt:s",))
    assert submit.request_id.startswith("cmpl-")


@pytest.mark.parametrize(("sent", "top_k", "top_p"), [
    ({"top_k": -1}, None, 1.0), ({"top_k": 0}, None, 1.0), ({"top_k": 10**9}, 300, 1.0), ({"top_p": 0}, 1, 1.0)])
def test_the_edges_of_top_k_and_top_p(server: RunningServer, sent: dict[str, float], top_k: int, top_p: float) -> None:
    assert server.completion(**sent).status_code == 200
    params = server.engine.submitted[0].sampling
    assert (params.top_k, params.top_p) == (top_k, top_p)


def test_a_stop_string_is_cut_from_the_text(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("one two three", ends=False))
    [choice] = server.completion(stop=" thr", max_tokens=50).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")


def test_text_held_back_for_a_stop_string_is_not_lost(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("abc"))
    assert server.completion(stop="abcdef").json()["choices"][0]["text"] == "abc"


def test_a_stop_token_is_counted_but_not_shown(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("ab!cd"))
    body = server.completion(stop_token_ids=[ord("!")]).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["usage"]["completion_tokens"] == 3


def test_ignore_eos_goes_on(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("ab"))
    body = server.completion(ignore_eos=True, max_tokens=6).json()
    assert body["choices"][0] == {"index": 0, "text": "abab", "logprobs": None, "finish_reason": "length"}


def test_a_limit_inside_a_character_is_valid_utf8(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("🙂"))
    body = server.completion(max_tokens=3).json()
    assert body["choices"][0] == {"index": 0, "text": "\ufffd", "logprobs": None, "finish_reason": "length"}
    assert body["usage"]["completion_tokens"] == 3


def test_echo_puts_the_prompt_first(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("!"))
    body = server.completion(prompt=["ab", [ord("c"), ord("d")]], echo=True, n=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["ab!", "ab!", "cd!", "cd!"]


def test_echo_of_nothing_more_gives_the_prompt_back(server: RunningServer) -> None:
    body = server.completion(prompt=["ab", "c"], echo=True, max_tokens=0, n=1).json()
    assert [(one["text"], one["finish_reason"]) for one in body["choices"]] == [("ab", "length"), ("c", "length")]
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens"] == 3
    assert not server.engine.submitted


def test_no_tokens_without_echo_is_refused(server: RunningServer) -> None:
    error = server.completion(max_tokens=0).json()["error"]
    assert error["param"] == "max_tokens" and "at least 1" in error["message"]


def test_max_tokens_beyond_the_context_is_lowered(server: RunningServer) -> None:
    body = server.completion(prompt="x" * 250, max_tokens=10**9).json()
    assert body["usage"]["completion_tokens"] == 6
    assert body["choices"][0]["finish_reason"] == "length"


def test_or_refused_by_a_strict_server(start_server: StartServer) -> None:
    server = start_server(strict_max_tokens=True)
    error = server.completion(prompt="x" * 250, max_tokens=7).json()["error"]
    assert error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("7", "250", "256"))
    assert server.completion(prompt="x" * 250, max_tokens=6).status_code == 200
    assert server.completion(prompt="x" * 250).json()["usage"]["completion_tokens"] == 6    # the default is no wish


@pytest.mark.parametrize("prompt", ["x" * 256, "x" * 257, [1] * 256, ["ok", "x" * 300]])
def test_a_prompt_that_leaves_no_room_is_refused(server: RunningServer, prompt: object) -> None:
    response = server.completion(prompt=prompt)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "256" in error["message"]
    assert server.completion(prompt="x" * 255).json()["usage"]["completion_tokens"] == 1
    assert len(server.engine.submitted) == 1


def test_text_that_can_never_fit_is_not_tokenised(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.engine.model.tokenizer
    monkeypatch.setattr(tokenizer, "encode", lambda *args: pytest.fail("tokenised"))
    error = server.completion(prompt="x" * 1_000_000).json()["error"]
    assert error["code"] == "context_length_exceeded" and "1000000 characters" in error["message"]


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []]])
def test_an_empty_prompt_is_refused_without_a_bos(server: RunningServer, prompt: object) -> None:
    response = server.completion(prompt=prompt)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
    assert not server.engine.submitted


def test_an_empty_prompt_with_a_bos_is_one_token(start_server: StartServer) -> None:
    from tokenizers.processors import TemplateProcessing

    model = FakeModel()
    end = model.tokenizer.inner.id_to_token(END_TOKEN_ID)
    model.tokenizer.inner.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, END_TOKEN_ID)])
    server = start_server(model)
    assert server.completion(prompt="").json()["usage"]["prompt_tokens"] == 1
    assert server.completion(prompt="", add_special_tokens=False).status_code == 400


@pytest.mark.parametrize("prompt", [
    None, 5, True, {"a": 1}, [1, "a"], ["a", 1], [None], [1.5], [True], [-1], [300], [[1, 300]], [["a"]], [{"a": 1}]])
def test_what_is_no_prompt_is_refused(server: RunningServer, prompt: object) -> None:
    response = server.completion(prompt=prompt)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "prompt"


def test_cached_tokens_are_told_and_counted_once_a_prompt(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "num_cached_tokens", 1)
    usage = server.completion(prompt=["ab", "cd"], n=3).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_more_prompts_than_the_queue_holds_are_refused_for_good(start_server: StartServer) -> None:
    server = start_server(max_queue=4)
    response = server.completion(prompt=["a"] * 3, n=2)
    assert response.status_code == 400 and "at most 2 prompts" in response.json()["error"]["message"]
    assert server.completion(n=5).json()["error"]["param"] == "n"
    assert server.completion(prompt=["a", "b"], n=2).status_code == 200


def test_a_stop_string_that_spells_a_special_token_ends_the_text(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("bye"))
    spelling = server.engine.model.tokenizer.token_text(END_TOKEN_ID)
    body = server.completion(stop=[spelling], ignore_eos=True, max_tokens=20).json()
    assert body["choices"][0]["text"] == "bye" and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 4
