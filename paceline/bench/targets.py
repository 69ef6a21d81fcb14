"""Where a load goes: a server by its URL, or an engine of this package without HTTP. Both are a Target.

A server is asked a few tiny requests first, which find out what it takes: token ids, fixed lengths, counts in the
stream. Each request has a connection of its own: some servers close theirs after a stream without saying so, and a
client that reuses one then fails or waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import orjson

from ..errors import ConfigError, EngineError
from .call import Call
from .dialects import COUNTS_IN_CHUNKS, DIALECTS, Dialect, form_of
from .event_stream import EventReader
from .records import Asked

REFUSALS = (429, 503)
DONE = b"[DONE]"
CLOSING_SECONDS = 1.0           # for a connection to end after its answer has
LOOK_SECONDS = 30.0             # for questions beside the load: models, metrics, the tiny requests
COUNTERS = {"prefix_cache_hits": re.compile(r"^vllm:prefix_cache_hits_total(?:\{[^}]*\})? (\S+)", re.M),
            "prefix_cache_queries": re.compile(r"^vllm:prefix_cache_queries_total(?:\{[^}]*\})? (\S+)", re.M),
            "num_preemptions": re.compile(r"^vllm:num_preemptions_total(?:\{[^}]*\})? (\S+)", re.M)}


class Target(Protocol):
    """Use as an async context manager."""

    name: str

    @property
    def max_context(self) -> int | None:
        """Tokens of prompt and output together; None: not known."""

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it; None: not known."""

    @property
    def forms(self) -> tuple[str, ...]:
        """Of prompts that it takes, the best first: ids, text, messages."""

    def about(self) -> dict[str, Any]:
        """What a reader of the figures should know of it."""

    def prepare(self, asked: Asked) -> Any:
        """The request as `send` takes it, made before the clock runs. Raises ConfigError for one it cannot take."""

    async def send(self, prepared: Any, call: Call) -> None:
        """Asks and reads the whole answer into `call`. Failures of the request are noted there, not raised."""

    async def counters(self) -> dict[str, int]:
        """The server's running counts, by the names of COUNTERS; what it does not tell is left out."""


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How to speak to a server."""

    protocol: str = "auto"             # auto | completions | chat | tgi
    model: str | None = None           # None: the first that the server lists
    api_key: str | None = None
    timeout_seconds: float = 600.0     # for a whole answer
    keep_alive: bool = False           # reuse connections
    counts: str = "end"                # of tokens: a usage at the answer's end, or in every chunk

    def __post_init__(self) -> None:
        if self.counts not in ("end", "chunk"):
            raise ConfigError(f"counts={self.counts!r} is unknown; choose from ['chunk', 'end']")
        if self.protocol not in ("auto", *DIALECTS):
            raise ConfigError(f"protocol={self.protocol!r} is unknown; choose from {['auto', *sorted(DIALECTS)]}")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be above 0, got {self.timeout_seconds}")


class HttpTarget:
    """`url` is a server (http://host:port, with or without /v1) or one of its streaming routes in full."""

    vocab_size: int | None = None    # no server tells it

    def __init__(self, url: str, options: HttpOptions) -> None:
        self._options = options
        self._root, self._api, path_protocol = split_url(url)
        if options.protocol not in ("auto", path_protocol or options.protocol):
            raise ConfigError(f"protocol={options.protocol!r} does not go with {url}, which is {path_protocol}'s route")
        self._protocol = path_protocol or options.protocol
        self.name = self._root
        self._model = options.model or ""
        self.max_context: int | None = None
        self._extensions: tuple[str, ...] = ()
        self._forms: tuple[str, ...] = ()
        self._session: aiohttp.ClientSession

    @property
    def forms(self) -> tuple[str, ...]:
        return self._forms

    @property
    def _dialect(self) -> Dialect:
        return DIALECTS[self._protocol]

    @property
    def url(self) -> str:
        return (self._api if self._dialect.ends_with_done else self._root) + self._dialect.path

    def about(self) -> dict[str, Any]:
        is_asked_less = self._options.counts == "end" and "include_usage" in self._extensions
        known = (*self._extensions, *(COUNTS_IN_CHUNKS if is_asked_less else ()))
        return {"url": self.url, "protocol": self._protocol, "model": self._model, "prompt_forms": list(self._forms),
                "takes": list(self._extensions),
                "does_not_take": [name for name in self._dialect.extensions if name not in known],
                "connections": "reused" if self._options.keep_alive else "one a request"}

    async def __aenter__(self) -> HttpTarget:
        """Finds out what the server is and takes. Raises EngineError, with the URL, where it cannot be used."""
        raise_file_limit()
        connector = aiohttp.TCPConnector(limit=0, force_close=not self._options.keep_alive)
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if self._options.api_key is not None:
            headers["authorization"] = f"Bearer {self._options.api_key}"
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=self._options.timeout_seconds))
        try:
            await self._meet()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    def prepare(self, asked: Asked) -> bytes:
        if form_of(asked) not in self._forms and not (form_of(asked) == "text" and self._protocol == "chat"):
            raise ConfigError(f"{asked.request_id} is given as {form_of(asked)}; {self.url} takes "
                              f"{', '.join(self._forms)}")
        return orjson.dumps(self._dialect.body(asked, self._model, self._extensions))

    async def send(self, prepared: bytes, call: Call) -> None:
        call.sent_at = call.clock()
        try:
            async with self._session.post(self.url, data=prepared) as response:
                call.http_status = response.status
                await self._read(response, call)
        except aiohttp.ClientConnectorError as error:
            call.fail("unreachable", f"{self.url}: cannot be reached: {_why(error)}")
        except TimeoutError:
            call.fail("timeout", f"no whole answer within {self._options.timeout_seconds:g} seconds")
        except (aiohttp.ClientError, OSError) as error:
            if call.ended_at is None:    # else the answer was whole, and only its connection ended badly
                call.fail("dropped", f"after {len(call.chunk_times)} chunks: {type(error).__name__}: {error}")
        finally:
            if call.ended_at is None:
                call.ended_at = call.clock()

    async def _read(self, response: aiohttp.ClientResponse, call: Call) -> None:
        if response.status != 200:
            words = (await response.text())[:500]
            status = "refused" if response.status in REFUSALS else "http_error"
            return call.fail(status, f"HTTP {response.status}: {_said(words)}")
        if response.content_type != "text/event-stream":
            return call.fail("http_error", f"no event stream but {response.content_type}: "
                                           f"{_said((await response.text())[:500])}")
        reader = EventReader()
        async for piece in response.content.iter_any():
            at = call.clock()
            for event in reader.feed(piece):
                self._note(event, call, at)
            if call.ended_at is not None:
                break
        for event in reader.finish():
            self._note(event, call, call.clock())
        with contextlib.suppress(TimeoutError):    # the answer is whole; a body left open holds nobody
            async with asyncio.timeout(CLOSING_SECONDS):
                await response.content.read()

    def _note(self, event: bytes, call: Call, at: float) -> None:
        if event == DONE:
            if call.ended_at is None:
                call.end(at)
            return
        try:
            told = orjson.loads(event)
            self._dialect.read(told, call, at)
        except (orjson.JSONDecodeError, AttributeError, TypeError) as error:
            call.fail("http_error", f"an event that cannot be read: {error}: {event[:100].decode(errors='replace')}")

    async def counters(self) -> dict[str, int]:
        try:
            status, text = await self._get(f"{self._root}/metrics")
        except EngineError:
            return {}
        return counters_in(text) if status == 200 else {}

    # --- finding out ----------------------------------------------------------------------------------------------

    async def _meet(self) -> None:
        if self._protocol == "auto":
            self._protocol = await self._find_protocol()
        if not self._model and self._protocol != "tgi":
            self._model = await self._first_model()
        words = ""
        for form in self._dialect.forms:
            taken, words = await self._find_extensions(form)
            if taken is not None:
                self._extensions = self._extensions if self._forms else taken    # those of the form that is used
                self._forms = (*self._forms, form)
        if not self._forms:
            raise EngineError(f"{self.url}: refuses even a plain request: {words}")

    async def _find_protocol(self) -> str:
        status, _ = await self._get(f"{self._api}/models")
        if status in (200, 401, 403):
            return "completions"
        status, _ = await self._get(f"{self._root}/info")
        if status == 200:
            return "tgi"
        raise EngineError(f"{self._root}: neither {self._api}/models (OpenAI) nor /info (TGI) answers; give the whole "
                          f"route, such as {self._api}/completions, or a protocol")

    async def _first_model(self) -> str:
        status, text = await self._get(f"{self._api}/models")
        try:
            model = orjson.loads(text)["data"][0]
            limit = model.get("max_model_len")
            self.max_context = limit if isinstance(limit, int) else None
            return str(model["id"])
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            raise EngineError(f"{self._api}/models: no list of models (HTTP {status}: {text[:100]}); "
                              "name the model") from None

    async def _get(self, url: str) -> tuple[int, str]:
        try:
            timeout = aiohttp.ClientTimeout(total=LOOK_SECONDS)
            async with self._session.get(url, timeout=timeout) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"{self._root}: cannot be reached: {_why(error)}") from error

    async def _find_extensions(self, form: str) -> tuple[tuple[str, ...] | None, str]:
        """The extensions that the server takes with a form of prompts; None, and what it said, if it takes not even a
        plain request."""
        names = self._dialect.extensions
        if self._options.counts == "end":
            taken, words = await self._find_among(form, tuple(name for name in names if name not in COUNTS_IN_CHUNKS))
            if taken is None or "include_usage" in taken:
                return taken, words
        taken, words = await self._find_among(form, names)
        if taken is None:
            return None, words
        if "return_token_ids" in taken:
            # Where each chunk has a usage, the ids are not needed: they would repeat the prompt in every answer.
            without = tuple(name for name in taken if name != "return_token_ids")
            if (await self._try(form, without)).counted_by == "usage":
                taken = without
        return taken, ""

    async def _find_among(self, form: str, names: tuple[str, ...]) -> tuple[tuple[str, ...] | None, str]:
        call = await self._try(form, names)
        if _is_taken(call):
            return names, ""
        taken: tuple[str, ...] = ()
        call = await self._try(form, taken)
        if not _is_taken(call):
            return None, call.error or ""
        for name in reversed(names):    # a usage in each chunk needs the usage at the end
            more = (name, *taken)
            taken = more if _is_taken(await self._try(form, more)) else taken
        return taken, ""

    async def _try(self, form: str, extensions: tuple[str, ...]) -> Call:
        call = Call(clock=time.perf_counter)
        await self.send(orjson.dumps(self._dialect.body(_TINY[form], self._model, extensions)), call)
        if call.status == "unreachable":
            raise EngineError(call.error or self.url)
        if call.status in ("timeout", "refused"):
            raise EngineError(f"{self.url}: {call.error}")
        return call


def _is_taken(call: Call) -> bool:
    """Whether the server went along; that the model had nothing to say is no refusal."""
    return call.http_status == 200 and call.status != "http_error"


_TINY = {
    "ids": Asked(request_id="probe", num_output_tokens=3, prompt_token_ids=(1000, 1001, 1002)),
    "text": Asked(request_id="probe", num_output_tokens=3, prompt="stone river"),
    "messages": Asked(request_id="probe", num_output_tokens=3, messages=({"role": "user", "content": "stone river"},)),
}


def _why(error: BaseException) -> str:
    """Without what aiohttp adds about encryption that is not there."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return str(error) or type(error).__name__


def raise_file_limit() -> None:
    """As many connections at once as the system allows this process; its first limit is often 1,024 files."""
    with contextlib.suppress(ImportError, ValueError, OSError):    # not on Windows; some systems refuse
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def split_url(url: str) -> tuple[str, str, str | None]:
    """The server's root, the root of its API (with the version), and the protocol where the URL is a route of one."""
    parts = urlsplit(url)
    try:
        is_fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_fine = False
    if not is_fine:
        raise ConfigError(f"{url!r} is no URL of a server: expected http://HOST:PORT")
    base = url.partition("?")[0].rstrip("/")
    protocol = None
    for name in ("tgi", "chat", "completions"):    # a chat's route ends like that of completions
        if protocol is None and base.endswith(DIALECTS[name].path):
            base, protocol = base.removesuffix(DIALECTS[name].path), name
    root = re.sub(r"/v\d+$", "", base)
    return root, base if base != root or protocol not in (None, "tgi") else f"{root}/v1", protocol


def counters_in(text: str) -> dict[str, int]:
    """Counters of a Prometheus page, summed over their labels."""
    found = {}
    for name, pattern in COUNTERS.items():
        if values := pattern.findall(text):
            found[name] = int(sum(map(float, values)))
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after if name in before}


def _said(text: str) -> str:
    """The message of an error's body, in the shapes that servers have."""
    try:
        told = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.strip() or "(no text)"
    error = told.get("error", told) if isinstance(told, dict) else told
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
