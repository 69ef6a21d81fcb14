"""Where keys come from, whose tenant they name, and what an admin key closes."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import ServerConfig
from paceline.errors import ConfigError
from paceline.server.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, read_keys

from .conftest import RunningServer, StartServer

FILE = """
# keys of the lab
alpha-key alpha
beta-key   beta
plain-key
"""


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def lab(start_server: StartServer, key_file: str) -> Iterator[RunningServer]:
    yield start_server(api_key="flag-key", api_key_file=key_file, admin_key="root-key")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_of_all_sources_open_the_server(key_file: str) -> None:
    config = ServerConfig(api_key="flag-key", api_key_file=key_file, admin_key="root-key")
    ring = read_keys(config, {API_KEY_VARIABLE: "variable-key", ADMIN_KEY_VARIABLE: "not this one: the flag wins"})
    for key in ("flag-key", "variable-key", "alpha-key", "beta-key", "plain-key", "root-key"):
        assert ring.find([b"wrong", key.encode()]) is not None, key
    for key in ("", "alpha", "alpha-key alpha", "# keys of the lab", "flag-ke", "flag-key ", "root"):
        assert ring.find([key.encode()]) is None, key
    assert ring.is_admin([b"root-key"]) and not ring.is_admin([b"flag-key"])
    assert read_keys(ServerConfig(), {ADMIN_KEY_VARIABLE: "root-key"}).is_admin([b"root-key"])
    assert not read_keys(ServerConfig(), {}).keys


def test_no_key_is_kept_or_shown(key_file: str) -> None:
    ring = read_keys(ServerConfig(api_key="flag-key", api_key_file=key_file), {})
    assert "flag-key" not in repr(ring) and "alpha-key" not in repr(ring)


def test_every_key_is_compared_with_in_constant_time(monkeypatch: pytest.MonkeyPatch, key_file: str) -> None:
    ring = read_keys(ServerConfig(api_key_file=key_file), {})
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda one, two: compared.append((one, two)) or real(one, two))
    for secret in (b"alpha-key", b"plain-key", b"wrong", b"", b"x" * 10_000):
        compared.clear()
        ring.find([secret, b"another"])
        assert len(compared) == 6    # every key with every secret, the right one first or not
        assert {len(one) for pair in compared for one in pair} == {32}    # lengths tell nothing either


@pytest.mark.parametrize(("lines", "told"), [
    ("", "holds no key"), ("# only a comment\n", "holds no key"), ("a b c\n", "line 1"), ("\na\nb c d\n", "line 3"),
    ("a\na\n", "twice"), ("a x\na y\n", "twice")])
def test_a_file_that_is_not_understood_is_refused_without_showing_keys(tmp_path: Path, lines: str, told: str) -> None:
    path = tmp_path / "keys"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=told):
        read_keys(ServerConfig(api_key_file=str(path)), {})


def test_mistakes_with_keys_are_config_errors(tmp_path: Path) -> None:
    for config, environment in (
        (ServerConfig(api_key_file=str(tmp_path / "none")), {}), (ServerConfig(api_key_file=str(tmp_path)), {}),
        (ServerConfig(), {API_KEY_VARIABLE: ""}), (ServerConfig(), {ADMIN_KEY_VARIABLE: " "}),
        (ServerConfig(api_key="same", admin_key="same"), {}),
        (ServerConfig(api_key="same"), {API_KEY_VARIABLE: "same"}),
    ):
        with pytest.raises(ConfigError):
            read_keys(config, environment)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_keys(ServerConfig(api_key_file=str(binary)), {})


def test_a_key_names_the_tenant_and_outranks_the_field_user(lab: RunningServer) -> None:
    for key, user, tenant in (("alpha-key", "somebody", "alpha"), ("beta-key", None, "beta"),
                              ("plain-key", "somebody", "somebody"), ("flag-key", None, "default")):
        body = {"prompt": "x"} | ({} if user is None else {"user": user})
        assert lab.post("/v1/completions", body, headers=bearer(key)).status_code == 200
        assert lab.engine.submitted[-1].tenant == tenant


def test_the_limits_of_a_tenant_are_those_of_its_key(start_server: StartServer, key_file: str) -> None:
    server = start_server(api_key_file=key_file, max_queue_tokens_per_tenant=5)
    fields = {"prompt": ["abc", "def"], "user": "one of many"}
    # Six tokens in two prompts would be two tenants' worth if the client could choose its tenant.
    assert server.post("/v1/completions", fields, headers=bearer("alpha-key")).status_code == 400


@pytest.mark.parametrize("path", ["/admin", "/admin/", "/admin/anything", "/%61dmin/x", "/admin/../v1/models"])
def test_admin_routes_are_closed_to_all_but_the_admin_key(lab: RunningServer, server: RunningServer, path: str) -> None:
    def ask(one: RunningServer, headers: dict[str, str]) -> int:
        return one.client.request("GET", one.url, headers=headers, extensions={"target": path.encode()}).status_code

    assert [ask(lab, headers) for headers in ({}, bearer("alpha-key"), bearer("root"))] == [401] * 3
    assert ask(lab, bearer("root-key")) == 404    # none exists yet
    assert ask(server, {}) == 403                 # closed where no admin key was set


def test_the_admin_key_opens_everything_else_too(lab: RunningServer) -> None:
    assert lab.get("/v1/models", headers=bearer("root-key")).status_code == 200
    assert lab.get("/v1/models", headers=bearer("wrong")).status_code == 401


def test_an_admin_key_alone_closes_only_admin(start_server: StartServer) -> None:
    server = start_server(admin_key="root-key")
    assert server.completion().status_code == 200
    assert server.get("/admin/x").status_code == 401


def test_metrics_are_open_only_by_flag(start_server: StartServer) -> None:
    server = start_server(api_key="k", open_metrics=True)
    assert server.get("/metrics").status_code == 200
    assert server.get("/v1/models").status_code == server.get("/metrics/").status_code == 401
