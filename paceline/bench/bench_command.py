"""`paceline bench TARGET`: a server or an engine under load; `paceline bench core`: what planning a step costs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

from .. import __version__
from ..clock import WallClock
from ..config import JournalConfig, ServerConfig
from ..errors import ConfigError
from ..flags import ENGINE_GROUPS, add_knobs, configured, given_knobs, plain_command, put
from ..presets import DEFAULT_PRESET, PRESETS, engine_config
from .bench_flags import HTTP_FLAGS, add_flags, given, refuse

SERVER_KNOBS = ("transport", "max_queue")
HELP = ("measure a server, an engine without HTTP, or what planning a step costs: throughput, latency and goodput of a "
        "load, each figure with its formula (docs/bench.md)")
TARGET_HELP = (
    "a server's URL (OpenAI-compatible or TGI; also one of its streaming routes in full); a MODEL to run here, whose "
    "engine flags are below; or core: processor time of a step without a model, by requests running and waiting")
Opened = Callable[[], AbstractAsyncContextManager[Any]]


def add(commands: Any) -> None:
    bench = plain_command(commands, "bench", _bench, HELP)
    bench.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    bench.add_argument("--json", action="store_true", default=None, help="print one JSON object")
    add_flags(bench)
    engine: Any = bench.add_argument_group("engine, where TARGET is a MODEL")
    engine.add_argument("--preset", metavar="NAME",
                        help=f"bundle of policies, one of: {', '.join(PRESETS)} (default: paceline)")
    for group in (*ENGINE_GROUPS, JournalConfig):
        add_knobs(engine, group)
    add_knobs(engine, ServerConfig, only=SERVER_KNOBS)


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.target == "core":
        return _core(arguments)
    if find_spec("aiohttp") is None:
        raise ConfigError("bench needs aiohttp: pip install aiohttp (or the extra: 'paceline[bench]')")
    from .bench_files import ResultFiles
    from .bench_options import Load

    load = Load(arguments)
    opened = _server(arguments) if "://" in arguments.target else _engine(arguments)
    files = None if arguments.output is None else ResultFiles(arguments.output)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        facts = runner.run(_measure(opened, load, arguments, files))
    facts = {"paceline": __version__, "started_at": started_at, "command": _command_line(arguments)} | facts
    if files is not None:
        files.finish(facts)
    return _tell(facts, arguments)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:    # Windows
        return None
    return uvloop.new_event_loop


def _core(arguments: argparse.Namespace) -> int:
    from ..build import build_policies, build_scheduler
    from . import core_steps

    told = {name: value for name, value in vars(arguments).items() if value is not None}
    refuse({name: told[name] for name in told if name not in ("target", "run", "json", "preset")}, "on bench core")
    preset = arguments.preset or DEFAULT_PRESET
    sched = engine_config(preset, {}).scheduler
    build_policies(sched)    # a wrong name is told before anything runs
    timings = [core_steps.measure(build_scheduler, sched, *size) for size in core_steps.SIZES]
    facts = core_steps.facts(timings, preset)
    put(json.dumps(facts) if arguments.json else core_steps.table(timings))
    return 0


def _server(arguments: argparse.Namespace) -> Opened:
    from .bench_options import http_options
    from .targets import HttpTarget

    own = {name: value for group in (*ENGINE_GROUPS, JournalConfig) for name, value in
           given_knobs(arguments, group).items()}
    own |= {name: value for name in ("preset", *SERVER_KNOBS) if (value := getattr(arguments, name)) is not None}
    refuse(own, "on a server that runs already; it is for a MODEL")
    target = HttpTarget(arguments.target, http_options(arguments, os.environ.get("PACELINE_API_KEY")))
    return lambda: target


def _engine(arguments: argparse.Namespace) -> Opened:
    from ..build import build_async_engine, check_names
    from .engine_target import EngineTarget

    refuse(given(arguments, HTTP_FLAGS), "on an engine without HTTP; it is for a URL")
    arguments.model = arguments.target
    config = configured(arguments)
    server = ServerConfig(**{"transport": "process"} | {
        name: value for name in SERVER_KNOBS if (value := getattr(arguments, name)) is not None})
    check_names(config)

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[EngineTarget]:
        engine = build_async_engine(config, server)
        await engine.start()
        try:
            await engine.ready()
            for text in engine.notices:
                print(f"paceline: {text}", file=sys.stderr)
            about = {"model": config.model.model, "preset": arguments.preset or DEFAULT_PRESET,
                     "fingerprint": engine.model.fingerprint, "transport": server.transport,
                     "config": asdict(config)}
            yield EngineTarget(engine, WallClock(), config.model.model, about)
        finally:
            await engine.stop()

    return opened


async def _measure(opened: Opened, load: Any, arguments: argparse.Namespace, files: Any) -> dict[str, Any]:
    from .bench_run import Bench, interruptible
    from .progress import Progress
    from .request_file import write_requests
    from .self_test import ceiling

    progress = Progress(sys.stderr)
    own = {"client_ceiling": await ceiling()} if arguments.self_test else {}
    async with opened() as target:
        load.fitted(target)
        plan = load.plan()
        if arguments.save_requests is not None:
            write_requests(arguments.save_requests, plan.asked_in(plan.place(plan.cells[0], 0)))

        def on_cell(result: Any, summary: dict[str, Any]) -> None:
            if files is not None:
                files.add(result)
            told = summary["requests"]
            progress.say(f"{summary['cell']}: {told['ok']} of {told['measured']} ended well in "
                         f"{summary['throughput']['window_seconds']:.1f} s; client {summary['client']['verdict']}")

        bench = Bench(target, plan, progress, on_cell)
        result = await interruptible(load.run(bench), bench)
        return {"target": {"name": target.name, **target.about()}, **load.about(), **own, **result.about()}


def _command_line(arguments: argparse.Namespace) -> list[str]:
    """As it was given, without the key."""
    return [argument.replace(arguments.api_key, "...") if arguments.api_key else argument for argument in sys.argv[1:]]


def _tell(facts: dict[str, Any], arguments: argparse.Namespace) -> int:
    from .bench_files import found_rate_text, headline, table

    if arguments.json:
        put(json.dumps(facts))
    else:
        put(headline(facts) + "\n\n" + table(facts["cells"]) + found_rate_text(facts["found_rate"]))
    if facts["is_interrupted"]:
        return 130
    return 0 if all(one["requests"]["ok"] for cell in facts["cells"] for one in cell["repeats"]) else 1
