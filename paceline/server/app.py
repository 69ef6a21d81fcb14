"""The HTTP application: which path does what. Knows no tokens and no sockets; works while the engine still loads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..clock import Clock
from ..config import ServerConfig
from ..engine.messages import AskRequests, RequestReports
from ..errors import ConfigError, EngineError, Overloaded, RequestError
from .access import Access
from .admin import AdminRoutes
from .engine_port import Engine, EngineInfo, SeedSource
from .keys import read_keys
from .limits import read_object
from .metrics import Metrics
from .openai import Call, CallReader
from .recent_calls import RecentCalls, not_found, told
from .replies import HttpError, as_http_error, json_response
from .reply import LiveReplies, Reply
from .request_log import NOTE
from .tokenize import TokenizeRoutes

# Loading ends soon, and behind a load balancer another server may be there at once.
COME_AGAIN = {"loading": {"Retry-After": "1"}, "draining": {"Retry-After": "1", "Connection": "close"}}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(
    engine: Engine,
    config: ServerConfig,
    model_name: str,
    seed_source: SeedSource,
    clock: Clock,
    engine_info: EngineInfo | None = None,
) -> Starlette:
    """The app. Replies that are still being written are in `app.state.live_replies`."""
    keys = read_keys(config, os.environ)
    names = served_names(config, model_name)
    metrics = Metrics(names[0], clock, engine_info or {}, keys.tenants)
    engine.add_listener(metrics.on_outputs)
    door = Door(engine, config, CallReader(engine, config, names, seed_source, clock), metrics)
    app = Starlette(
        routes=door.routes(),
        middleware=[Middleware(Access, keys=keys, has_open_metrics=config.open_metrics)],
        exception_handlers={
            HTTPException: _routing_failure,
            Overloaded: door.refuse,
            EngineError: _failure,
            ClientDisconnect: _nobody_listens,
        },
    )
    app.router.redirect_slashes = False    # a path is what it says, or it is unknown
    app.state.live_replies = door.live
    return app


def served_names(config: ServerConfig, model_name: str) -> Sequence[str]:
    """The name answers carry, then its aliases."""
    if config.served_model_name is None:
        return (model_name,)
    names = tuple(name.strip() for name in config.served_model_name.split(",") if name.strip())
    if not names:
        raise ConfigError(f"served_model_name={config.served_model_name!r} has no name in it")
    return names


class Door:
    """The endpoints."""

    def __init__(self, engine: Engine, config: ServerConfig, reader: CallReader, metrics: Metrics) -> None:
        self.engine = engine
        self.config = config
        self.reader = reader
        self.metrics = metrics
        self.live = LiveReplies()
        self.calls = RecentCalls()
        self.started = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
            Route("/v1/requests/{request_id:path}", self.request, methods=["GET"]),
            *TokenizeRoutes(self.engine, self.config, self.reader).routes(),
            *AdminRoutes(self.engine, self.config, self.metrics).routes(),
        ]

    async def completions(self, request: Request) -> Reply:
        self._check_open()
        body = await read_object(request, self.config.max_body_bytes, self.config.max_json_depth)
        self._check_open()    # the body may have taken its time
        return self._reply(request, await self.reader.completion(body))

    async def chat(self, request: Request) -> Reply:
        self._check_open()
        body = await read_object(request, self.config.max_body_bytes, self.config.max_json_depth)
        self._check_open()
        return self._reply(request, await self.reader.chat(body))

    def _reply(self, request: Request, call: Call) -> Reply:
        most, num_tokens = self.config.max_call_tokens, sum(len(one.prompt_token_ids) for one in call.submits)
        if most is not None and num_tokens > most:    # never accepted: no invitation to come again
            field = "messages" if call.is_chat else "prompt"
            raise RequestError(f"{field}: {num_tokens} tokens; at most {most} fit the queue here", field)
        if (tenant := request.scope[NOTE].tenant) is not None:    # what a key says outranks the field `user`
            call = replace(call, submits=tuple(replace(submit, tenant=tenant) for submit in call.submits))
        self.calls.add(call, request.scope[NOTE])
        return Reply(self.engine, call, self.live)

    async def request(self, request: Request) -> Response:
        """Where a request is, and why: by the id of its answer, or by its x-request-id."""
        name = request.path_params["request_id"]
        record = self.calls.find(name, request.scope[NOTE])
        answer = await self.engine.ask(AskRequests(record.choice_ids))
        assert isinstance(answer, RequestReports)
        if not answer.reports:    # it was turned away by a full queue, or is forgotten
            raise not_found(name)
        return json_response(told(record, answer.reports))

    def _check_open(self) -> None:
        """Refuses work that could not be done, before it costs anything."""
        state = self.engine.state
        if state != "ready":
            self.metrics.refused(state)
            raise HttpError(503, f"the engine is {state}", f"engine_{state}", headers=COME_AGAIN.get(state))
        self.engine.check_room()

    async def refuse(self, request: Request, error: Exception) -> Response:
        """The answer to who came when the queue was full."""
        assert isinstance(error, Overloaded)
        self.metrics.refused(error.limit)
        headers = {"Retry-After": str(error.retry_after_seconds)}
        return HttpError(self.config.overload_status, str(error), "overloaded", headers=headers).response()

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self.reader.model_names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model_id"]
        self.reader.check_name(name)
        return json_response(self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        card = {"id": name, "object": "model", "created": self.started, "owned_by": "paceline",
                "root": self.reader.model_names[0], "parent": None}
        # Not known while the model loads.
        return card if self.engine.state == "loading" else card | {"max_model_len": self.engine.model.max_model_len}

    async def health(self, request: Request) -> Response:
        status = self.engine.state
        if status == "ready" and self.engine.is_stalled(self.config.stall_seconds):
            status = "stalled"
        if status == "ready":
            return json_response({"status": "ok"})
        error = HttpError(503, f"the engine is {status}", f"engine_{status}")
        return json_response({"status": status} | error.body(), 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": package_version()})

    async def show_metrics(self, request: Request) -> Response:
        text = self.metrics.text(len(self.live), len(asyncio.all_tasks()), self.engine.policy)
        return Response(text, media_type=METRICS_TYPE)


@cache
def package_version() -> str:
    from importlib import metadata  # slow to import, seldom asked for

    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "0+unknown"


async def _failure(request: Request, error: Exception) -> Response:
    return as_http_error(error).response()


async def _routing_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        return HttpError(405, f"{place}: this method is not allowed here", "method_not_allowed",
                         headers=error.headers).response()
    return HttpError(error.status_code, f"{place}: no such route", "route_not_found", headers=error.headers).response()


class Nothing(Response):
    """No answer at all: the client has hung up."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return None


async def _nobody_listens(request: Request, error: Exception) -> Response:
    return Nothing()
