"""Keys, routes, methods, request ids, CORS, and the limits of the connection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.config import ServerConfig
from paceline.errors import ConfigError
from paceline.server import protocol
from paceline.server.app import make_app, served_names

from .conftest import RunningServer
from .raw import connect, exchange, head, read_all, read_answer

KEY = "s3cret-ü"
ROUTES = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/x"),
    ("GET", "/metrics"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info"),
]
TRICKS = [
    "//v1/models", "/V1/models", "/v1/models/", "/v1//models", "/v1/./models", "/v1/x/../models", "/%761/models",
    "/v1/models%2f", "/health/", "//health", "/HEALTH", "/health/../v1/models", "/health%2f..%2fv1%2fmodels",
    "/version/x", "/docs", "/openapi.json", "/", "/unknown", "/health;x", "/ping/",
]
SPELLINGS = ("/%761/models", "/v1/models%2f", "/v1/models/")    # percent-coded or open-ended, but known routes


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    server = RunningServer(ServerConfig(port=0, grace_seconds=0.0, api_key=KEY))
    yield server
    server.stop()


WRONG_KEYS: list[dict[str, Any]] = [
    {}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}, {"authorization": KEY.encode()},
    {"authorization": b"Basic " + KEY.encode()}, {"x-api-key": "wrong"}, {"x-api-key": ""},
    {"authorization": b"Bearer " + KEY.encode()[:-1]}, {"authorization": b"Bearer " + KEY.encode() + b"x"}]


@pytest.mark.parametrize(("method", "path"), ROUTES + [(method, path) for path in TRICKS for method in ("GET", "POST")])
def test_without_the_key_nothing_opens(guarded: RunningServer, method: str, path: str) -> None:
    for headers in WRONG_KEYS:
        response = guarded.client.request(method, guarded.url, headers=headers, extensions={"target": path.encode()})
        assert response.status_code == 401, (path, headers)
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [
    {"authorization": b"Bearer " + KEY.encode()}, {"authorization": b"bearer  " + KEY.encode()},
    {"x-api-key": KEY.encode()}, {"x-api-key": KEY.encode(), "authorization": "Bearer wrong"}])
def test_with_the_key_everything_does(guarded: RunningServer, headers: dict[str, Any]) -> None:
    assert guarded.get("/v1/models", headers=headers).status_code == 200
    assert guarded.get("/metrics", headers=headers).status_code == 200
    assert guarded.post("/v1/completions", {"prompt": "x"}, headers=headers).status_code == 200


def test_health_ping_and_version_are_open(guarded: RunningServer) -> None:
    assert guarded.get("/health").json() == {"status": "ok"}
    assert guarded.get("/ping").status_code == guarded.client.post(guarded.url + "/ping").status_code == 200
    assert list(guarded.get("/version").json()) == ["version"]


def test_the_refusal_comes_before_the_body_is_read(guarded: RunningServer) -> None:
    request = head("/v1/completions", {"content-type": "application/json", "content-length": 10 << 20})
    assert exchange(guarded.port, request)[0] == 401


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_no_key(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        make_app(None, ServerConfig(api_key=key), "m", lambda: 0, None)  # type: ignore[arg-type]


def test_served_names_need_a_name() -> None:
    assert served_names(ServerConfig(served_model_name=" a, b,"), "m") == ("a", "b")
    with pytest.raises(ConfigError):
        served_names(ServerConfig(served_model_name=","), "m")


@pytest.mark.parametrize("path", [path for path in TRICKS if path not in SPELLINGS])
def test_unknown_paths_are_404_in_json(server: RunningServer, path: str) -> None:
    response = server.client.request("GET", server.url, extensions={"target": path.encode()})
    assert response.status_code == 404
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == "route_not_found"


def test_a_trailing_slash_names_no_model(server: RunningServer) -> None:
    assert server.get("/v1/models/").json()["error"]["code"] == "model_not_found"
    response = server.client.post(server.url + "/v1/completions/", json={"prompt": "x"})
    assert response.status_code == 404


@pytest.mark.parametrize(("method", "path"), [
    ("GET", "/v1/completions"), ("PUT", "/v1/completions"), ("DELETE", "/v1/chat/completions"),
    ("GET", "/v1/chat/completions"), ("POST", "/v1/models"), ("DELETE", "/v1/models/x"), ("POST", "/health"),
    ("POST", "/metrics"), ("OPTIONS", "/v1/completions"), ("PATCH", "/version")])
def test_the_wrong_method_is_405_in_json(server: RunningServer, method: str, path: str) -> None:
    response = server.client.request(method, server.url + path)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert response.headers["allow"]


def test_request_ids_are_echoed_or_made(server: RunningServer) -> None:
    assert server.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {server.get("/health", headers=headers).headers["x-request-id"]
            for headers in ({}, {"x-request-id": ""}, {"x-request-id": "a b"}, {"x-request-id": "x" * 129})}
    assert len(made) == 4 and all(len(one) == 32 for one in made)
    for response in (server.completion(stream=True), server.completion(n=0), server.get("/nothing")):
        assert len(response.headers["x-request-id"]) == 32


def test_a_reused_request_id_does_not_mix_requests(server: RunningServer) -> None:
    answers = [server.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "same"}) for _ in range(2)]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    assert len({one.request_id for one in server.engine.submitted}) == 2


def test_preflights_are_answered_without_a_key(guarded: RunningServer) -> None:
    headers = {"origin": "http://page", "access-control-request-method": "POST",
               "access-control-request-headers": "authorization"}
    response = guarded.client.options(guarded.url + "/v1/chat/completions", headers=headers)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"]


def test_a_browser_may_read_answers_and_failures(server: RunningServer) -> None:
    for response in (server.get("/health", headers={"origin": "http://page"}),
                     server.get("/nothing", headers={"origin": "http://page"})):
        assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in server.get("/health").headers


@pytest.mark.parametrize("request_bytes", [
    b"nonsense\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"\x16\x03\x01\x02\x00\x01" * 10,
    b"GET /\xff HTTP/1.1\r\n\r\n", b"CONNECT host:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n"])
def test_bytes_that_are_no_request_get_an_answer_and_a_close(server: RunningServer, request_bytes: bytes) -> None:
    with connect(server.port) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(1)
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 4") or received == b""
    assert server.get("/health").status_code == 200


def test_an_endless_head_is_cut(server: RunningServer) -> None:
    with connect(server.port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"x" * 4096)
    with connect(server.port) as connection:
        connection.sendall(head("/health", {"x": "y" * (protocol.MAX_HEAD_BYTES + 1)}, "GET"))
        assert read_answer(connection)[0] == 431


def test_a_head_that_never_ends_is_given_up(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.05)
    for beginning in (b"", b"GET /health HT", head("/health", {}, "GET") + b"GET /hea"):
        with connect(server.port) as connection:
            connection.sendall(beginning)
            assert read_all(connection).count(b"HTTP/1.1") == beginning.count(b"\r\n\r\n")
