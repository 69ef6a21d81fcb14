"""Where a request is, and why: /v1/requests/{id}, the headers of whole answers, and the ledger on /metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SchedulerConfig, ServerConfig

from .real_core import RealCoreServer
from .test_metrics import samples

KEYS = "key-a1 team-a\nkey-a2 team-a\nkey-b team-b\nkey-c\n"


@pytest.fixture
def narrow() -> Iterator[RealCoreServer]:
    """One request at a time."""
    server = RealCoreServer(ServerConfig(port=0, grace_seconds=0.0), SchedulerConfig(max_num_seqs=1))
    yield server
    server.executor.gate.release(1 << 20)
    server.stop()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RealCoreServer]:
    (tmp_path / "keys").write_text(KEYS)
    config = ServerConfig(port=0, grace_seconds=0.0, api_key_file=str(tmp_path / "keys"), admin_key="root-key")
    server = RealCoreServer(config)
    yield server
    server.stop()


def close_gate(server: RealCoreServer) -> None:
    while server.executor.gate.acquire(blocking=False):
        pass


class Asking(threading.Thread):
    """A completion that is under way."""

    def __init__(self, server: RealCoreServer, name: str, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.server, self.request_id, self.fields = server, name, fields
        self.start()

    def run(self) -> None:
        body = {"model": "fake-model", "prompt": "hello", "ignore_eos": True} | self.fields
        self.response = self.server.post("/v1/completions", body, headers={"x-request-id": self.request_id})


def look(server: RealCoreServer, name: str, *statuses: str) -> dict[str, Any]:
    """The report of the request's first choice once it says one of these. Steps run one by one meanwhile: the engine
    answers between two."""
    with ThreadPoolExecutor(1) as pool:
        for _ in range(100):
            asked = pool.submit(server.get, f"/v1/requests/{name}")
            while not wait([asked], 0.01).done:
                server.executor.gate.release()
            response = asked.result()
            if response.status_code == 200 and (choice := response.json()["choices"][0])["status"] in statuses:
                return choice
    raise AssertionError(f"{name} was never {statuses}: {response.text}")


def test_a_call_is_found_under_both_its_names(narrow: RealCoreServer) -> None:
    answer = narrow.post("/v1/completions", {"model": "fake-model", "prompt": ["hello", "you"], "n": 2, "max_tokens": 3,
                                             "ignore_eos": True}, headers={"x-request-id": "mine/1"})
    call_id = answer.json()["id"]
    told = narrow.get(f"/v1/requests/{call_id}").json()
    assert told == narrow.get("/v1/requests/mine/1").json()
    assert (told["id"], told["x_request_id"], len(told["choices"])) == (call_id, "mine/1", 4)
    first = told["choices"][0]
    assert (first["status"], first["finish_reason"], first["num_output_tokens"]) == ("finished", "length", 3)
    assert (first["num_prompt_tokens"], first["num_blocks"], first["hold"]) == (5, 0, None)


def test_a_request_that_waits_is_told_what_for(narrow: RealCoreServer) -> None:
    close_gate(narrow)
    first = Asking(narrow, "first", max_tokens=150)
    look(narrow, "first", "running")
    second = Asking(narrow, "second", max_tokens=3)
    waiting = look(narrow, "second", "waiting")
    while waiting["hold"]["cause"] == "step":    # it came while a step ran
        waiting = look(narrow, "second", "waiting")
    assert (waiting["hold"]["cause"], waiting["hold"]["position"]) == ("max_num_seqs", 0)
    assert waiting["hold"]["head_id"] == waiting["request_id"] and waiting["prefill_seconds"] is None
    narrow.executor.gate.release(1 << 20)
    for asking in (first, second):
        asking.join(20)
        assert asking.response.status_code == 200
    assert look(narrow, "second", "finished")["queue_seconds"] >= waiting["queue_seconds"]
    found = samples(narrow.get("/metrics").text)
    assert found["paceline:queue_seconds_total", "max_num_seqs,default"] > 0
    assert found["paceline:block_seconds_total", "decode,default"] > 0
    assert found["paceline:idle_slot_steps_total", ""] == 0


def test_a_call_that_was_turned_away_is_no_request() -> None:
    server = RealCoreServer(ServerConfig(port=0, grace_seconds=0.0, max_queue=1))
    close_gate(server)
    first = Asking(server, "first", max_tokens=150)
    look(server, "first", "running")
    headers = {"x-request-id": "second"}
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, headers=headers).status_code == 429
    server.executor.gate.release(1 << 20)
    first.join(20)
    assert server.get("/v1/requests/second").json()["error"]["code"] == "request_not_found"
    server.stop()


def test_whole_answers_carry_their_phases(narrow: RealCoreServer) -> None:
    answer = narrow.completion(max_tokens=4, ignore_eos=True)
    named = {name: float(answer.headers[f"x-paceline-{name}"]) for name in
             ("queue-seconds", "prefill-seconds", "decode-seconds", "preemptions")}
    assert min(named.values()) >= 0 and named["preemptions"] == 0
    told = narrow.get(f"/v1/requests/{answer.json()['id']}").json()["choices"][0]
    assert round(told["decode_seconds"], 4) == named["decode-seconds"]


def test_a_stream_finds_its_phases_afterwards(narrow: RealCoreServer) -> None:
    streamed = narrow.completion(max_tokens=4, ignore_eos=True, stream=True)
    assert "x-paceline-queue-seconds" not in streamed.headers
    told = narrow.get(f"/v1/requests/{streamed.headers['x-request-id']}").json()["choices"][0]
    assert told["status"] == "finished" and told["decode_seconds"] >= 0


@pytest.mark.parametrize("key", ["key-a1", "key-a2", "root-key"])
def test_a_tenants_keys_and_the_admins_see_its_requests(lab: RealCoreServer, key: str) -> None:
    lab.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, headers={"x-api-key": "key-a1", "x-request-id": "r1"})
    assert lab.get("/v1/requests/r1", headers={"x-api-key": key}).json()["x_request_id"] == "r1"


@pytest.mark.parametrize("key", ["key-b", "key-c"])
def test_nobody_else_learns_that_there_are_any(lab: RealCoreServer, key: str) -> None:
    answer = lab.post("/v1/completions", {"prompt": "x", "max_tokens": 2},
                      headers={"x-api-key": "key-a1", "x-request-id": "r1"})
    for name in ("r1", answer.json()["id"]):
        refused = lab.get(f"/v1/requests/{name}", headers={"x-api-key": key})
        unknown = lab.get(f"/v1/requests/{'z' * len(name)}", headers={"x-api-key": key})
        assert (refused.status_code, unknown.status_code) == (404, 404)
        assert refused.text.replace(name, "") == unknown.text.replace("z" * len(name), "")
    assert lab.get("/v1/requests/r1").status_code == 401


def test_an_x_request_id_used_by_two_tenants_means_each_ones_own(lab: RealCoreServer) -> None:
    ids = {}
    for key in ("key-a1", "key-b"):
        headers = {"x-api-key": key, "x-request-id": "same"}
        ids[key] = lab.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, headers=headers).json()["id"]
    for key, call_id in ids.items():
        assert lab.get("/v1/requests/same", headers={"x-api-key": key}).json()["id"] == call_id


def test_tenants_of_keys_are_told_by_name_and_users_are_not(lab: RealCoreServer) -> None:
    lab.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, headers={"x-api-key": "key-b"})
    lab.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "user": "ada@example.org"},
             headers={"x-api-key": "key-c"})
    text = lab.get("/metrics", headers={"x-api-key": "key-b"}).text
    assert 'tenant="team-b"' in text and 'tenant="user:' in text and "ada@" not in text
