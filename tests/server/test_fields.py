"""Every field: its range, its type, its default; what is refused by name; what is ignored and told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import RequestError, Unsupported
from paceline.server import fields

from .conftest import MODEL, RunningServer, StartServer
from .fake_engine import FakeModel

BAD_VALUES: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "at least 0"), ("temperature", 2.1, "at most 2"), ("temperature", 999999, "at most 2"),
    ("temperature", "1", "a number"), ("temperature", True, "a number"), ("temperature", [1], "a number"),
    ("top_p", -1, "at least 0"), ("top_p", 1.01, "at most 1"), ("top_p", False, "a number"),
    ("top_k", -2, "at least -1"), ("top_k", 1.5, "an integer"), ("top_k", "5", "an integer"),
    ("max_tokens", -1, "at least 0"), ("max_tokens", 1.5, "an integer"), ("max_tokens", True, "an integer"),
    ("max_tokens", "16", "an integer"), ("max_tokens", 1e300, "an integer"), ("max_completion_tokens", -1, "at least"),
    ("n", 0, "at least 1"), ("n", -1, "at least 1"), ("n", 129, "at most 128"), ("n", 5000000, "at most 128"),
    ("n", True, "an integer"), ("n", "2", "an integer"),
    ("seed", 2**63, "at most"), ("seed", -(2**63) - 1, "an integer"), ("seed", 2**70, "an integer"),
    ("seed", "1", "an integer"), ("seed", 0.5, "an integer"),
    ("stream", "true", "true or false"), ("stream", 1, "true or false"), ("ignore_eos", 0, "true or false"),
    ("stop", "", "1 to 1024 characters"), ("stop", ["", "a"], "1 to 1024 characters"), ("stop", 5, "a string"),
    ("stop", ["a"] * 5, "at most 4"), ("stop", [1], "a string"), ("stop", [None], "a string"),
    ("stop", "x" * 1025, "1 to 1024 characters"), ("stop", {"a": 1}, "a string"),
    ("stop_token_ids", [300], "not in the vocabulary"), ("stop_token_ids", [-1], "not in the vocabulary"),
    ("stop_token_ids", ["a"], "list of integers"), ("stop_token_ids", [True], "list of integers"),
    ("stop_token_ids", 5, "list of token ids"), ("stop_token_ids", [1] * 129, "at most 128"),
    ("user", 5, "a string"), ("user", "x" * 1025, "at most 1024"), ("priority", 2**31, "at most"),
    ("priority", "high", "an integer"), ("cache_salt", "", "at least 1"), ("cache_salt", 5, "a string"),
    ("model", 5, "a string"), ("model", "", "at least 1"), ("best_of", 0, "at least 1"),
    ("best_of", 129, "at most 128"), ("best_of", "2", "an integer"),
    *[(name, value, limit) for name in ("min_p", "typical_p")
      for value, limit in ((1.01, "at most 1"), (-0.1, "at least 0"), ("1", "a number"), (True, "a number"))],
    ("typical_p", 0, "above 0"), ("min_tokens", -1, "at least 0"), ("min_tokens", 17, "max_tokens"),
    ("min_tokens", 0.5, "an integer"),
    ("repetition_penalty", 0, "at least 0.01"), ("repetition_penalty", 100.5, "at most 100"),
    ("repetition_penalty", -1, "at least"), ("repetition_penalty", "x", "a number"),
    *[(name, value, limit) for name in ("presence_penalty", "frequency_penalty")
      for value, limit in ((-2.01, "at least -2"), (2.01, "at most 2"), (1e308, "at most"), (False, "a number"))],
    *[("logit_bias", value, limit) for value, limit in (
        ({"300": 1}, "below 300"), ({"-1": 1}, "below 300"), ({"x": 1}, "below 300"), ({"1.0": 1}, "below 300"),
        ({"": 1}, "below 300"), ({"²": 1}, "below 300"), ({"9" * 5000: 1}, "below 300"),
        ({"5": -100.5}, "from -100 to 100"), ({"5": 101}, "from -100 to 100"), ({"5": "1"}, "a number"),
        ({"5": None}, "a number"), ({"5": True}, "a number"),
        ([5], "an object"), ({str(i): 0 for i in range(1025)}, "at most 1024"))],
    *[("allowed_token_ids", value, limit) for value, limit in (
        ([], "1 to 16384"), ([300], "not in the vocabulary"), ([-1], "not in the vocabulary"),
        (["a"], "list of integers"), (5, "list of token ids"), ([1] * 16385, "1 to 16384"))],
    *[("bad_words", value, limit) for value, limit in (
        ([""], "1 to 256 characters"), (["x" * 257], "1 to 256 characters"), ([" "], "gives no tokens"),
        ("word", "a list"), ([1], "a list of strings"), (["w"] * 257, "at most 256"))],
    *[("skip_special_tokens", value, "true or false") for value in (0, "false")],
    ("include_stop_str_in_output", 1, "true or false"),
    *[("truncate_prompt_tokens", value, limit) for value, limit in (
        (0, "between 1 and 255"), (-2, "at least -1"), (256, "between 1 and 255"), ("5", "an integer"),
        (1.5, "an integer"))],
]
BAD_LOGPROBS: list[tuple[str, Any, str]] = [
    ("logprobs", 21, "at most 20"), ("logprobs", -1, "at least 0"), ("logprobs", True, "an integer"),
    ("logprobs", "5", "an integer"), ("logprobs", 10**9, "at most 20")]
BAD_CHAT_LOGPROBS: list[tuple[str, Any, str]] = [
    ("logprobs", 1, "true or false"), ("top_logprobs", 5, "logprobs: true"), ("top_logprobs", 21, "at most 20"),
    ("top_logprobs", 10**9, "at most 20"), ("top_logprobs", -1, "at least 0"), ("top_logprobs", True, "an integer")]


@pytest.mark.parametrize(("name", "value", "limit"), BAD_VALUES)
def test_a_bad_value_is_refused_with_field_and_limit(server: RunningServer, name: str, value: Any, limit: str) -> None:
    for answer in (server.completion, server.chat):
        response = answer(**{name: value})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == name and error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"{name}: ") and limit in error["message"]
    assert not server.engine.submitted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("is_chat", "name", "value", "limit"), [
    *[(False, *one) for one in BAD_LOGPROBS], *[(True, *one) for one in BAD_CHAT_LOGPROBS]])
def test_so_is_a_bad_number_of_log_probabilities(
    server: RunningServer, is_chat: bool, name: str, value: Any, limit: str, stream: bool
) -> None:
    response = (server.chat if is_chat else server.completion)(**{name: value, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name) and limit in error["message"]
    assert server.completion().status_code == 200


@pytest.mark.parametrize(("name", "value"), [
    ("min_p", 0), ("min_p", 1), ("typical_p", 1), ("typical_p", 0.001), ("repetition_penalty", 0.01),
    ("repetition_penalty", 100), ("presence_penalty", -2), ("frequency_penalty", 2.0), ("min_tokens", 1),
    ("logit_bias", {}), ("logit_bias", {"0": -100, "299": 100.0}), ("allowed_token_ids", [0, 299]), ("bad_words", []),
    ("bad_words", ["a", "bc"]), ("best_of", 1), ("skip_special_tokens", False), ("include_stop_str_in_output", True),
    ("truncate_prompt_tokens", 255), ("truncate_prompt_tokens", -1), ("logprobs", None)])
def test_the_edges_of_sampling_are_legal(server: RunningServer, name: str, value: Any) -> None:
    for answer in (server.completion, server.chat):
        response = answer(**{"max_tokens": 1, name: value})
        assert response.status_code == 200 and "x-paceline-ignored" not in response.headers


def test_what_was_asked_reaches_the_engine(server: RunningServer) -> None:
    asked = {"min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.5, "presence_penalty": -1,
             "frequency_penalty": 0.5, "min_tokens": 3, "include_stop_str_in_output": True,
             "skip_special_tokens": False, "ignore_eos": True}
    shaped = {"logit_bias": {"5": -100, "7": 2}, "allowed_token_ids": [9, 5, 9], "bad_words": ["ab"]}
    for answer in (server.completion, server.chat):
        assert answer(**asked, **shaped).status_code == 200
        sampling = server.engine.submitted[-1].sampling
        assert {name: getattr(sampling, name) for name in asked} == asked
        assert (sampling.logit_bias, sampling.allowed_token_ids) == (((5, -100.0), (7, 2.0)), (9, 5))
        assert sampling.bad_words == ((97, 98), (32, 97, 98))
        assert (sampling.logprobs, sampling.prompt_logprobs) == (None, None)


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", 0), ("temperature", 2), ("temperature", 2.0), ("top_p", 1), ("n", 128), ("seed", 2**63 - 1),
    ("seed", -(2**63)), ("max_tokens", 16.0), ("stop", []), ("stop", ["a", "b", "c", "d"]), ("stop_token_ids", []),
    ("stop_token_ids", [0, 299]), ("user", ""), ("priority", -5)])
def test_the_edges_are_legal(server: RunningServer, name: str, value: Any) -> None:
    assert server.completion(**{"max_tokens": 1, name: value}).status_code == 200


UNSUPPORTED: list[tuple[str, Any]] = [
    ("prompt_logprobs", 0), ("prompt_logprobs", -1), ("repeat_penalty", 1.1), ("repeat_penalty", 0),
    ("spaces_between_special_tokens", False), ("length_penalty", 2), ("mirostat", 1), ("tfs_z", 0.5),
    ("response_format", {"type": "json_object"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", "text"), ("structured_outputs", {"regex": "a"}), ("guided_json", {}), ("grammar", "root"),
    ("use_beam_search", True), ("token_ids_logprob", [10**9]), ("token_ids_logprob", [-1]), ("stop_regex", "a"),
    ("n_probs", 5), ("lora_path", "x"), ("dry_multiplier", 0.8), ("store", True), ("service_tier", "flex"),
]
UNSUPPORTED_CHAT: list[tuple[str, Any]] = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "auto"), ("tool_choice", "required"),
    ("parallel_tool_calls", False), ("functions", [{"name": "f"}]), ("echo", True), ("chat_template", "x"),
    ("modalities", ["audio"]), ("reasoning_effort", "low"),
]
NEUTRAL: list[tuple[str, Any]] = [
    ("logprobs", None), ("logprobs", False), ("top_logprobs", 0), ("presence_penalty", 0), ("frequency_penalty", 0.0),
    ("repetition_penalty", 1), ("repetition_penalty", 1.0), ("min_p", 0), ("min_tokens", 0), ("logit_bias", {}),
    ("response_format", {"type": "text"}), ("response_format", None), ("best_of", 1), ("bad_words", []),
    ("skip_special_tokens", True), ("store", False), ("service_tier", "auto"),
]
NEUTRAL_CHAT: list[tuple[str, Any]] = [
    ("tools", []), ("tool_choice", "none"), ("parallel_tool_calls", True), ("echo", False), ("modalities", ["text"])]


@pytest.mark.parametrize(("name", "value"), [*UNSUPPORTED, ("suffix", "end")])
def test_a_known_field_we_do_not_serve_is_refused_by_name(server: RunningServer, name: str, value: Any) -> None:
    error = server.completion(**{name: value}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED + UNSUPPORTED_CHAT)
def test_so_it_is_in_a_chat(server: RunningServer, name: str, value: Any) -> None:
    error = server.chat(**{name: value}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), [*NEUTRAL, ("suffix", ""), ("echo", False)])
def test_but_asking_for_nothing_is_fine(server: RunningServer, name: str, value: Any) -> None:
    response = server.completion(**{name: value})
    assert response.status_code == 200 and "x-paceline-ignored" not in response.headers


@pytest.mark.parametrize(("name", "value"), NEUTRAL + NEUTRAL_CHAT)
def test_and_in_a_chat(server: RunningServer, name: str, value: Any) -> None:
    response = server.chat(**{name: value})
    assert response.status_code == 200 and "x-paceline-ignored" not in response.headers


def test_best_of_may_not_undercut_n_nor_stream(server: RunningServer) -> None:
    assert server.completion(n=2, best_of=2, stream=True).status_code == 200
    for asked in ({"n": 2, "best_of": 1}, {"n": 1, "best_of": 2, "stream": True}):
        response = server.completion(**asked)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


def test_a_priority_that_nobody_looks_at_is_refused(start_server: StartServer) -> None:
    assert start_server().completion(priority=3).status_code == 200
    server = start_server(FakeModel(reads_priority=False))
    error = server.completion(priority=3).json()["error"]
    assert (error["param"], error["code"]) == ("priority", "unsupported_parameter") and "--ordering" in error["message"]
    assert server.completion(priority=0).status_code == server.chat(priority=None).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_told(server: RunningServer, stream: bool) -> None:
    options = {"stream_options": {"colour": 1}} if stream else {}
    response = server.completion(foo=1, prompt_cache_key="k", stream=stream, **options)
    expected = ["foo", "prompt_cache_key", *(["stream_options.colour"] if stream else [])]
    assert response.headers["x-paceline-ignored"].split(", ") == expected
    response = server.chat(messages=[{"role": "user", "content": "hi", "mood": "good"}])
    assert response.headers["x-paceline-ignored"] == "messages.mood"


def test_a_hostile_field_name_cannot_break_the_header(server: RunningServer) -> None:
    hostile: dict[str, Any] = {"a\r\nset-cookie: x=1": 1, "ü" * 300: 2, **{f"field{index}": 1 for index in range(100)}}
    response = server.completion(**hostile)
    assert response.status_code == 200 and "set-cookie" not in response.headers
    assert len(response.headers["x-paceline-ignored"]) < 2000


def test_a_strict_server_refuses_unknown_fields(start_server: StartServer) -> None:
    server = start_server(strict_fields=True)
    assert server.completion().status_code == 200
    assert server.completion(foo=1).json()["error"]["param"] == "foo"
    assert server.completion(stream=True, stream_options={"foo": 1}).status_code == 400
    assert server.chat(messages=[{"role": "user", "content": "hi", "mood": "good"}]).status_code == 400


def test_the_model_name_is_checked(start_server: StartServer) -> None:
    server = start_server(served_model_name="org/first, second")
    assert server.completion(model="second").json()["model"] == "second"
    assert server.completion(model=None).json()["model"] == "org/first"
    response = server.completion(model=MODEL)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "org/first" in error["message"]
    cards = server.get("/v1/models").json()
    assert cards["object"] == "list" and [card["id"] for card in cards["data"]] == ["org/first", "second"]
    card = server.get("/v1/models/org/first").json()
    assert card == cards["data"][0] == server.get("/v1/models/org%2Ffirst").json()
    assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "paceline", 256)
    assert server.get("/v1/models/nothing").json()["error"]["code"] == "model_not_found"
    assert server.openai().models.retrieve("org/first").id == "org/first"
    assert [one.id for one in server.openai().models.list()] == ["org/first", "second"]


TEXTS = st.text("aé\n", max_size=5)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(TEXTS, children, max_size=3),
    max_leaves=6)


@settings(derandomize=True, deadline=None)
@given(st.dictionaries(st.sampled_from([*fields.CHAT, *fields.CHAT_NEUTRAL, *fields.SHAPED]), JSON_VALUES))
def test_no_value_of_any_field_does_more_than_refuse(body: dict[str, Any]) -> None:
    try:
        values = fields.read_fields(body, fields.CHAT)
        fields.refuse_unsupported(body, fields.CHAT_NEUTRAL)
        fields.num_top_logprobs(values)
        fields.read_logit_bias(body.get("logit_bias"), 300)
        fields.read_allowed_token_ids(body.get("allowed_token_ids"), 300)
        fields.read_bad_words(body.get("bad_words"))
        fields.read_stop(body.get("stop"))
        fields.read_stop_token_ids(body.get("stop_token_ids"), 300)
        fields.read_stream_options(body, values["stream"])
    except RequestError as error:
        assert error.param is not None
        assert str(error).startswith(error.param) and len(str(error)) < 500


def test_known_fields_are_either_served_or_refused() -> None:
    for served, neutral in ((fields.COMPLETION, fields.COMPLETION_NEUTRAL), (fields.CHAT, fields.CHAT_NEUTRAL)):
        assert not set(served) & set(neutral)
    with pytest.raises(Unsupported):
        fields.refuse_unsupported({"tools": [1]}, fields.CHAT_NEUTRAL)
