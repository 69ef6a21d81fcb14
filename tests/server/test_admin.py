"""/admin/policy on a server around the real core: switched while requests run, refused whole, open to one key only."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from paceline.config import ServerConfig

from .conftest import RunningServer
from .real_core import RealCoreServer
from .test_metrics import samples

KEY = {"x-api-key": "root-key"}


@pytest.fixture(scope="module")
def lab() -> Iterator[RunningServer]:
    server = RealCoreServer(ServerConfig(port=0, grace_seconds=0.0, admin_key="root-key"))
    yield server
    server.stop()


def test_the_policy_in_force_is_told(lab: RunningServer) -> None:
    told = lab.get("/admin/policy", headers=KEY).json()
    assert told["preset"] == "paceline"
    assert (told["policy"]["ordering"], told["policy"]["prefix_cache"]) == ("fcfs", "hash")


def test_a_switch_tells_what_it_changed_and_leaves_a_mark(lab: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline.server"):
        switched = lab.post("/admin/policy", {"preset": "vllm"}, headers=KEY).json()
    assert (switched["old"]["preset"], switched["new"]["preset"]) == ("paceline", "vllm")
    assert switched["changed"]["max_num_seqs"] == [64, 256] and "ordering" not in switched["changed"]
    assert lab.get("/admin/policy", headers=KEY).json() == switched["new"]
    (record,) = [record for record in caplog.records if record.message == "policy switched"]
    assert record.fields["max_num_seqs"] == "64 -> 256"    # type: ignore[attr-defined]
    assert samples(lab.get("/metrics").text)["paceline:policy_switches_total", "vllm"] == 1
    assert {"vllm", "continuous", "latest_arrival", "fixed"} <= policy_shown(lab)
    back = lab.post("/admin/policy", {"preset": "paceline"}, headers=KEY).json()
    assert back["new"] == switched["old"]
    assert "paceline" in policy_shown(lab)


def policy_shown(lab: RunningServer) -> set[str]:
    """The labels of the one policy that /metrics shows."""
    (labels,) = [labels for name, labels in samples(lab.get("/metrics").text) if name == "paceline:policy_info"]
    return set(labels.split(","))


@pytest.mark.parametrize(("body", "param"), [
    ({}, "preset"), ({"preset": "nobody"}, "preset"), ({"preset": 7}, "preset"), ({"ordering": ["fcfs"]}, "ordering"),
    ({"ordering": "priority", "max_num_seqs": 0}, "max_num_seqs"), ({"ordering": "priority", "victim": "me"}, "victim"),
    ({"ordering": "priority", "prefix_cache": "none"}, "prefix_cache"), ({"preset": "vllm", "order": 1}, "order"),
])
def test_an_impossible_switch_changes_nothing_and_names_the_field(lab: RunningServer, body: dict, param: str) -> None:
    before = lab.get("/admin/policy", headers=KEY).json()
    response = lab.post("/admin/policy", body, headers=KEY)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param and param in response.json()["error"]["message"]
    assert lab.get("/admin/policy", headers=KEY).json() == before


def test_a_priority_counts_from_the_switch_on(lab: RunningServer) -> None:
    assert lab.completion(prompt="a", priority=1, max_tokens=2).json()["error"]["param"] == "priority"
    lab.post("/admin/policy", {"ordering": "priority"}, headers=KEY)
    assert lab.completion(prompt="a", priority=1, max_tokens=2).status_code == 200
    lab.post("/admin/policy", {"preset": "paceline"}, headers=KEY)


def test_only_the_admin_key_opens_it(lab: RunningServer, server: RunningServer) -> None:
    assert lab.get("/admin/policy").status_code == 401
    assert lab.post("/admin/policy", {"preset": "vllm"}, headers={"x-api-key": "wrong"}).status_code == 401
    assert server.post("/admin/policy", {"preset": "vllm"}).status_code == 403    # it has no admin key
