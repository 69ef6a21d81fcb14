"""Other people's servers, started from a YAML file, waited for, and surely stopped. docs/compare.md describes the file.

A peer runs in a process group of its own, so that whatever it starts is stopped with it. Its output goes to a log file;
an error tells the peer's name and the log's last lines.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shlex
import signal
import socket
import string
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from ..errors import ConfigError, EngineError
from .call import Call
from .dialects import DIALECTS
from .records import Asked
from .targets import HttpOptions, HttpTarget

LOOK_SECONDS = 0.2
KILL_SECONDS = 5.0    # for killed processes to be gone
TAIL_LINES = 12
PLACES = ("port", "model", "cores", "log")
APIS = {"openai": "auto", "auto": "auto", **{name: name for name in DIALECTS}}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One entry of a peers file. command and environment may hold {port}, {model}, {cores}."""

    name: str
    command: str
    health: str = "/health"                # a path, or a whole URL with {port}: answers 200 when the server is ready
    environment: Mapping[str, str] = field(default_factory=dict)
    api: str = "openai"                    # openai | completions | chat | tgi
    model: str | None = None               # the name to ask for; default: the first that the server lists
    body: Mapping[str, Any] = field(default_factory=dict)    # fields added to every request
    start_seconds: float = 300.0           # to become healthy
    stop_seconds: float = 20.0             # to end after SIGTERM, before SIGKILL
    about: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "command", "health", "api"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"peer {self.name!r}: {name}: expected a text, got {getattr(self, name)!r}")
        for name in ("environment", "body"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise ConfigError(f"peer {self.name!r}: {name}: expected names with values, got {value!r}")
        if self.api not in APIS:
            raise ConfigError(f"peer {self.name!r}: api={self.api!r} is unknown; choose from {sorted(APIS)}")
        for name in ("start_seconds", "stop_seconds"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ConfigError(f"peer {self.name!r}: {name} must be above 0 seconds, got {value!r}")
        for text in (self.command, *map(str, self.environment.values())):
            for _, place, _, _ in string.Formatter().parse(text):
                if place is not None and place not in PLACES:
                    raise ConfigError(f"peer {self.name!r}: {{{place}}} is no placeholder; there are "
                                      f"{', '.join(f'{{{one}}}' for one in PLACES)}")


def read_peers(path: str | Path) -> list[Peer]:
    """Raises ConfigError naming the file and what is wrong in it; EngineError where PyYAML is missing."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError("--peers needs the package PyYAML: pip install 'paceline[bench]'") from error
    try:
        told = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: no YAML: {' '.join(str(error).split())}") from error
    entries = told.get("peers") if isinstance(told, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected `peers:` with a list of at least one")
    peers = [_peer(path, number, entry) for number, entry in enumerate(entries, 1)]
    if doubled := sorted({one.name for one in peers if sum(other.name == one.name for other in peers) > 1}):
        raise ConfigError(f"{path}: two peers are called {doubled[0]!r}")
    return peers


def _peer(path: str | Path, number: int, entry: Any) -> Peer:
    names = [one.name for one in fields(Peer)]
    if not isinstance(entry, dict):
        raise ConfigError(f"{path}: peer {number}: expected fields, got {entry!r}")
    if unknown := sorted(set(map(str, entry)) - set(names)):
        raise ConfigError(f"{path}: peer {number}: {unknown[0]}: no such field; there are {', '.join(names)}")
    for name in ("name", "command"):
        if name not in entry:
            raise ConfigError(f"{path}: peer {number}: {name}: missing")
    try:
        return Peer(**entry)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


class PeerServer:
    """A peer that runs."""

    def __init__(self, peer: Peer, port: int, command: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.peer = peer
        self.url = f"http://127.0.0.1:{port}"
        self.command = command
        self.log = log
        self.start_seconds = 0.0
        self._process = process

    def trouble(self) -> str | None:
        """What has become of it, where it no longer runs."""
        status = self._process.returncode
        if status is None:
            return None
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"peer {self.peer.name} {how}; the last lines of {self.log}:\n{tail(self.log)}"

    async def ready(self) -> None:
        """Raises EngineError where it ends, or is not healthy in time."""
        started_at = time.monotonic()
        health = self.peer.health if "://" in self.peer.health else self.url + self.peer.health
        health = health.replace("{port}", self.url.rpartition(":")[2])
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            while not await _is_healthy(session, health):
                if (trouble := self.trouble()) is not None:
                    raise EngineError(trouble)
                if time.monotonic() - started_at > self.peer.start_seconds:
                    raise EngineError(
                        f"peer {self.peer.name}: {health} did not answer 200 in {self.peer.start_seconds:g} seconds; "
                        f"the last lines of {self.log}:\n{tail(self.log)}")
                await asyncio.sleep(LOOK_SECONDS)
        self.start_seconds = time.monotonic() - started_at

    def pause(self) -> None:
        """Holds the whole group until resume(): a server that has nothing to do may still take a core, spinning."""
        self._tell(signal.SIGSTOP)

    def resume(self) -> None:
        """Harmless for one that runs."""
        self._tell(signal.SIGCONT)

    def _tell(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def stop(self) -> None:
        """The whole group, with SIGTERM first; whoever is left after stop_seconds gets SIGKILL."""
        group = self._process.pid
        self._tell(signal.SIGTERM)
        self.resume()    # one that is held learns of SIGTERM only then
        await self._until_empty(group, self.peer.stop_seconds)
        self._tell(signal.SIGKILL)
        await self._process.wait()
        await self._until_empty(group, KILL_SECONDS)

    async def _until_empty(self, group: int, seconds: float) -> None:
        """Waits so long at most."""
        deadline = time.monotonic() + seconds
        while _has_members(group) and time.monotonic() < deadline:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), LOOK_SECONDS)
            await asyncio.sleep(0.02)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=5.0)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


@asynccontextmanager
async def running(peer: Peer, model: str, cores: int, log: Path) -> AsyncIterator[PeerServer]:
    """Starts the peer and stops it in any case. It is not ready yet."""
    port = free_port()
    places = {"port": str(port), "model": model, "cores": str(cores), "log": str(log)}
    command = filled(peer.command, places)
    environment = os.environ | {name: filled(str(value), places) for name, value in peer.environment.items()}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(command), stdin=asyncio.subprocess.DEVNULL, stdout=output,
                stderr=asyncio.subprocess.STDOUT, env=environment, start_new_session=True)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise EngineError(f"peer {peer.name}: cannot be started: {reason}: {command}") from error
    server = PeerServer(peer, port, command, log, process)
    try:
        yield server
    finally:
        await asyncio.shield(server.stop())


def filled(text: str, places: Mapping[str, str]) -> str:
    return text.format_map(places)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (it wrote nothing)"


class PeerTarget(HttpTarget):
    """A peer as a target: its own fields go into every request, and its end is told as such."""

    def __init__(self, server: PeerServer, timeout_seconds: float) -> None:
        peer = server.peer
        super().__init__(server.url, HttpOptions(protocol=APIS[peer.api], model=peer.model,
                                                 timeout_seconds=timeout_seconds))
        self._server = server

    def prepare(self, asked: Asked) -> bytes:
        body = super().prepare(asked)
        return orjson.dumps(orjson.loads(body) | dict(self._server.peer.body)) if self._server.peer.body else body

    async def send(self, prepared: bytes, call: Call) -> None:
        await super().send(prepared, call)
        if call.status in ("dropped", "unreachable") and (trouble := self._server.trouble()) is not None:
            call.error = trouble.partition(";")[0]
