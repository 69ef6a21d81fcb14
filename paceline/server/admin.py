"""What an operator may ask of a running server; `access.py` lets nobody else in.

    GET  /admin/policy                                  the policy in force
    POST /admin/policy  {"preset": name, knob: value}   schedule by this from the next step on
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..config import ServerConfig
from ..engine.messages import AskPolicy, PolicyState, Switched, SwitchPolicy
from ..errors import RequestError
from .engine_port import Engine
from .limits import read_object
from .metrics import Metrics
from .replies import json_response, shown

LOGGER = logging.getLogger("paceline.server")


class AdminRoutes:
    """The routes under /admin."""

    def __init__(self, engine: Engine, config: ServerConfig, metrics: Metrics) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics

    def routes(self) -> list[Route]:
        return [
            Route("/admin/policy", self.policy, methods=["GET"]),
            Route("/admin/policy", self.switch, methods=["POST"]),
        ]

    async def policy(self, request: Request) -> Response:
        state = await self.engine.ask(AskPolicy())
        assert isinstance(state, PolicyState)
        return json_response(_shown(state))

    async def switch(self, request: Request) -> Response:
        body = await read_object(request, self.config.max_body_bytes, self.config.max_json_depth)
        switched = await self.engine.ask(_asked(body))
        assert isinstance(switched, Switched)
        old, new = dict(switched.old.knobs), dict(switched.new.knobs)
        changed = {name: [old[name], new[name]] for name in new if old[name] != new[name]}
        self.metrics.switched(switched.new.preset)
        told = {name: f"{before} -> {after}" for name, (before, after) in changed.items()}
        LOGGER.info("policy switched", extra={"fields": {"preset": switched.new.preset or "none"} | told})
        return json_response({"old": _shown(switched.old), "new": _shown(switched.new), "changed": changed})


def _asked(body: dict[str, Any]) -> SwitchPolicy:
    preset = body.pop("preset", None)
    if not isinstance(preset, str | None):
        raise RequestError(f"preset: a string is needed, got {shown(preset)}", "preset")
    for name, value in body.items():
        if not isinstance(value, int | float | str | None):
            raise RequestError(f"{name[:80]}: a single value is needed, got {shown(value)}", name[:80])
    return SwitchPolicy(preset, tuple(body.items()))


def _shown(state: PolicyState) -> dict[str, Any]:
    return {"preset": state.preset, "policy": dict(state.knobs)}
