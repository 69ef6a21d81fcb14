"""Policies switched on a real server under load: nothing is lost, every answer is that of the request alone, /metrics
and the journal tell each switch, and the journal replays to the same plans."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from paceline.build import LLM
from paceline.cli import main
from paceline.server.schedule_metrics import POLICIES

from .test_server_under_load import BLOCK_SIZE, crowd, num_blocks_together

ADMIN = {"x-api-key": "root-key"}
OWN_CACHE = {"prefix_cache": "hash", "block_size": BLOCK_SIZE}    # which stays, whatever the preset has
PRESETS = [{"preset": name} | OWN_CACHE for name in ("tgi", "static", "paceline", "fastgen", "lmdeploy", "vllm")]
KNOBS = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "ordering": "priority", "victim": "lowest_priority",
         "chunking": "itl_bounded", "itl_target_ms": 20.0}
SWITCHES: list[dict] = [*PRESETS[:3], KNOBS, *PRESETS[3:]]
NUM_CLIENTS, NUM_REQUESTS = 32, 110

Tokens = tuple[int, ...]


@dataclass
class Load:
    """Clients that stream one request after another, and an operator who switches as they go."""

    url: str
    session: aiohttp.ClientSession
    bodies: list[dict[str, object]]
    tokens: dict[int, Tokens] = field(default_factory=dict)    # of streams that have ended, by number of the body
    num_open: int = 0
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def client(self, numbers: list[int]) -> None:
        while numbers:
            number = numbers.pop(0)
            self.num_open += 1
            self.tokens[number] = await self._stream(self.bodies[number])
            self.num_open -= 1
            self.has_ended.set()

    async def _stream(self, body: dict[str, object]) -> Tokens:
        """All ids that came; the stream must tell its own end."""
        tokens: list[int] = []
        events: list[bytes] = []
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                events += [line] if line.startswith(b"data: ") else []
                if line.startswith(b"data: {"):
                    tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []
        assert events[-1] == b"data: [DONE]\n"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        return tuple(tokens)

    async def until_ended(self, num_ended: int) -> None:
        while len(self.tokens) < num_ended:
            self.has_ended.clear()
            await self.has_ended.wait()

    async def switch(self, asked: dict) -> dict[str, Any]:
        """While at least 24 requests run or wait. What was told, with the policies that /metrics shows from then on."""
        assert self.num_open >= 24
        async with self.session.post(f"{self.url}/admin/policy", json=asked, headers=ADMIN) as response:
            assert response.status == 200, await response.text()
            told = await response.json()
        async with self.session.get(f"{self.url}/metrics") as response:
            (line,) = re.findall(r"^paceline:policy_info\{.*", await response.text(), re.MULTILINE)
        assert self.num_open >= 24
        labels = dict(re.findall(r'(\w+)="(.*?)"', line))
        return told | {"shown": {name: labels[name] for name in ("preset", *POLICIES)}}


async def switch_while_they_run(url: str, bodies: list[dict[str, object]]) -> tuple[list[Tokens], list[dict]]:
    """Of each body its tokens, and of each switch what was told: one each time some more requests have ended."""
    timeout = aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        load, numbers, told = Load(url, session, bodies), list(range(len(bodies))), []
        clients = asyncio.gather(*(load.client(numbers) for _ in range(NUM_CLIENTS)))
        for count, asked in enumerate(SWITCHES, 1):
            await load.until_ended(count * (NUM_REQUESTS - NUM_CLIENTS) // len(SWITCHES))
            told.append(await load.switch(asked))
        await clients
        return [load.tokens[number] for number in range(len(bodies))], told


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, object]]:
    return [body | {"stream": True, "return_token_ids": True} for body in crowd()[:NUM_REQUESTS]]


@pytest.fixture(scope="module")
def alone(bodies: list[dict[str, object]]) -> list[Tokens]:
    """Each request in an engine that holds nothing else and never reuses anything."""
    names = ("max_tokens", "ignore_eos", "temperature", "seed")
    with LLM("smollm2", prefix_cache="none", max_model_len=1024, num_kv_blocks=64) as llm:
        return [tuple(llm.generate([body["prompt"]], show_progress=False, **{name: body[name] for name in names})[0]
                      .token_ids) for body in bodies]


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_policies_are_switched_under_load_and_the_journal_replays(
        serve, tmp_path: Path, bodies, alone, transport: str, capsys) -> None:
    journal, num_kv_blocks = str(tmp_path / "journal"), num_blocks_together(bodies) * 8 // 100
    server = serve("--num-kv-blocks", str(num_kv_blocks), "--block-size", str(BLOCK_SIZE), "--preset", "vllm",
                   "--transport", transport, "--journal", journal, "--admin-key", "root-key")
    tokens, told = asyncio.run(switch_while_they_run(server.url, bodies))
    assert {one["new"]["policy"]["regime"] for one in told} == {"static_padded", "continuous"}
    assert all(later["old"] == earlier["new"] for earlier, later in pairwise(told))
    for one in told:
        in_force = one["new"]["policy"] | {"preset": one["new"]["preset"] or "none"}
        assert one["shown"] == {name: in_force[name] for name in ("preset", *POLICIES)}
    assert server.metric("paceline:policy_switches_total") == len(told) == len(SWITCHES)
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.stop() == 0
    assert sum("policy switched" in line for line in server.log) == len(told)
    assert tokens == alone
    check_journal(journal, told, capsys)


def check_journal(journal: str, told: Sequence[dict[str, Any]], capsys) -> None:
    """It tells every switch with what changed, all requests ended, and it replays."""
    assert main(("journal", journal, "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["requests"]["ended_by_length"] == facts["requests"]["choices"] == NUM_REQUESTS
    switches = list(facts["switches"].values())
    assert len(switches) == facts["journal"]["policy_switches"] == len(told)
    for line, one in zip(switches, told, strict=True):
        changes = [f"{name} {old} -> {new}" for name, (old, new) in one["changed"].items()]
        assert sorted(line.partition(": ")[2].split(", ")) == sorted(changes)
    assert main(("replay", journal)) == 0
    assert capsys.readouterr().out.startswith("identical: ")
