"""`paceline compare`: several schedules and servers under the same load, and one report."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config import CacheConfig, ModelConfig, SchedulerConfig
from ..errors import ConfigError, EngineError
from ..flags import ENGINE_GROUPS, add_knobs, given_knobs, plain_command, put
from ..presets import PRESETS, engine_config

if TYPE_CHECKING:
    from .comparison import Comparison, Load
    from .entrants import Entrant
    from .records import Asked
    from .workload import WorkloadSpec

DEFAULT_ROUNDS, DEFAULT_CONCURRENCY = 3, "4,16"
HELP = ("measure several schedules of ours, running servers, and servers it starts, under the same load, one after "
        "another in turns; leaves a report to read and all raw data")
# Flag, type, help: what goes to the workload under the same name.
WORKLOAD_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("prompt_tokens", str, "N or A..B: tokens of prompts, instead of the workload's own"),
    ("output_tokens", str, "N or A..B: tokens of answers, instead of the workload's own"),
    ("prefix_tokens", int, "tokens of the shared beginning, where the workload has one"),
    ("fan_out", int, "requests that share a beginning"),
    ("turns", str, "N or A..B: requests of a conversation or agent"),
    ("think_seconds", float, "mean time between an answer and the next turn"),
    ("trace", str, "file of recorded traffic"),
    ("length_scale", float, "factor on recorded lengths"),
    ("max_context", int, "tokens of prompt and answer; longer prompts are cut (default: what all presets take)"),
)


def add(commands: Any) -> None:
    compare = plain_command(commands, "compare", _compare, HELP)
    who = compare.add_argument_group("contestants")
    who.add_argument("--preset", metavar="A,B,...", help=f"schedules of ours, in process: {', '.join(PRESETS)}")
    who.add_argument("--url", action="append", default=[], metavar="NAME=URL",
                     help="a running server, OpenAI-compatible or TGI; may be repeated")
    who.add_argument("--peers", metavar="FILE", help="servers to start, from a YAML file (docs/compare.md)")
    who.add_argument("--baseline", metavar="NAME", help="whose figures are 1 in ratios (default: the first)")
    load = compare.add_argument_group("load")
    load.add_argument("--workload", default="uniform", metavar="NAME", help="lengths and order (default: uniform)")
    load.add_argument("--request-file", metavar="FILE", help="requests of your own, JSON lines, instead of a workload")
    load.add_argument("--requests", type=int, default=60, metavar="N", help="requests of a cell (default: 60)")
    load.add_argument("--concurrency", metavar="A,B,...", help="clients that ask, wait for the answer and ask again: "
                      f"a closed loop for each number (default: {DEFAULT_CONCURRENCY})")
    load.add_argument("--rate", metavar="A,B,...", help="requests a second that come by chance (Poisson), instead")
    load.add_argument("--cap", type=int, metavar="N", help="with --rate: requests under way at most")
    load.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, metavar="N",
                      help=f"times that everything is measured (default: {DEFAULT_ROUNDS})")
    load.add_argument("--seed", type=int, default=0, help="of lengths, arrivals and words (default: 0)")
    load.add_argument("--prompts", choices=("auto", "ids", "text", "messages"), default="auto",
                      help="how prompts are sent (default: auto, the best that all contestants take)")
    load.add_argument("--timeout-seconds", type=float, default=600.0, metavar="S",
                      help="for a whole answer of a server (default: 600)")
    for name, kind, text in WORKLOAD_FLAGS:
        load.add_argument("--" + name.replace("_", "-"), type=kind, metavar=name.split("_")[-1].upper(), help=text)
    out = compare.add_argument_group("result")
    out.add_argument("--output", metavar="DIR", help="a new folder for report.html, charts/ and all data "
                     "(default: bench-results/compare-TIME)")
    out.add_argument("--title", help="of the report")
    out.add_argument("--again", metavar="DIR", help="measure nothing: make the report of that folder anew")
    out.add_argument("--json", action="store_true", help="print one JSON object: the finding, ratios and all summaries")
    ours = compare.add_argument_group("the engines of --preset", "these go over each preset's own")
    ours.add_argument("--model", default="smollm2", metavar="MODEL",
                      help="as for serve; peers get it as {model} (default: smollm2)")
    for group in ENGINE_GROUPS:
        add_knobs(ours, group)    # type: ignore[arg-type]


def _compare(arguments: argparse.Namespace) -> int:
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ConfigError("paceline compare needs the package aiohttp: pip install 'paceline[bench]'") from error
    if arguments.again is not None:
        return _again(arguments)
    task = _Task(arguments)
    is_interrupted = asyncio.run(task.run())
    return 130 if is_interrupted else 0


def _again(arguments: argparse.Namespace) -> int:
    from .comparison import read_comparison

    folder = Path(arguments.again)
    _publish(folder, read_comparison(folder), arguments)
    return 0


def _publish(folder: Path, comparison: Comparison, arguments: argparse.Namespace) -> None:
    """Writes the report and prints the finding."""
    from .comparison_files import summary, write_report

    finding, missing = write_report(folder, comparison, arguments.title)
    if missing:
        print(f"paceline: {missing}", file=sys.stderr)
    if arguments.json:
        put(json.dumps({"folder": str(folder), **summary(comparison, finding)}))
        return
    notes = [f"- {note}" for note in finding.caveats]
    put("\n".join(filter(None, [finding.lead, finding.weakest, *notes, "", f"The report: {folder / 'report.html'}"])))


@dataclass(frozen=True, slots=True)
class _Met:
    """What the contestants take, found out before anything is measured."""

    form: str
    vocab_size: int | None
    max_context: int | None


class _Task:
    """One call of the command. What is wrong with it is told before a model is loaded or a server started."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from .peers import read_peers

        self.arguments = arguments
        self._presets = names_of(arguments.preset, "--preset")
        self._knobs = {name: value for group in (ModelConfig, CacheConfig, SchedulerConfig)
                       for name, value in given_knobs(arguments, group).items()}
        self._configs = {name: self._config(name) for name in self._presets}
        self._urls = dict(url_of(text) for text in arguments.url)
        self._peers = [] if arguments.peers is None else read_peers(arguments.peers)
        names = [*self._presets, *(url_of(text)[0] for text in arguments.url), *(peer.name for peer in self._peers)]
        if not names:
            raise ConfigError("compare needs contestants: --preset A,B, --url NAME=URL or --peers FILE")
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two contestants are called {doubled[0]!r}")
        if arguments.baseline is not None and arguments.baseline not in names:
            raise ConfigError(f"baseline={arguments.baseline!r} is no contestant; choose from {names}")
        if arguments.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, got {arguments.rounds}")
        self._names = names
        self._loads = loads_of(arguments)
        self._spec = self._workload_spec(_Met("ids", None, None)) if arguments.request_file is None else None
        self._folder = new_folder(arguments.output)

    def _config(self, preset: str) -> Any:
        try:
            return engine_config(preset, {**self._knobs, "model": self.arguments.model})
        except ConfigError as error:
            raise ConfigError(f"preset {preset}: {error}") from error

    async def run(self) -> bool:
        """Whether it was interrupted."""
        from .compare import Comparing, Plan
        from .comparison_files import write_page
        from .request_file import write_requests

        async with AsyncExitStack() as stack:
            entrants = await self._entrants(stack)
            met = await self._meet(entrants)
            requests = self._requests(met)
            plan = Plan(requests=requests, loads=self._loads, num_rounds=self.arguments.rounds,
                        seed=self.arguments.seed, baseline=self.arguments.baseline or self._names[0],
                        cap=self.arguments.cap, setup=self._setup(requests("0"), met))
            self._folder.mkdir(parents=True, exist_ok=True)
            write_requests(self._folder / "requests.jsonl", requests("0"))
            comparing = Comparing(entrants, plan, self._folder)

            def on_round() -> None:    # whoever waits can look already
                write_page(self._folder, comparing.comparison(), self.arguments.title)

            await comparing.run(on_round)
        if not comparing.has_measured:
            raise EngineError("interrupted before anything was measured")
        _publish(self._folder, comparing.comparison(), self.arguments)
        return comparing.is_interrupted

    async def _entrants(self, stack: AsyncExitStack) -> list[Entrant]:
        """In the order of the flags: presets, URLs, peers."""
        from .entrants import PeerEntrant, PresetEntrant, UrlEntrant
        from .targets import HttpOptions

        timeout = self.arguments.timeout_seconds
        entrants: list[Entrant] = []
        if self._presets:
            entrants += [PresetEntrant(name, config, self._engine_maker()) for name, config in self._configs.items()]
        options = HttpOptions(timeout_seconds=timeout)
        entrants += [UrlEntrant(name, url, options) for name, url in self._urls.items()]
        entrants += [PeerEntrant(server, timeout) for server in await self._start_peers(stack)]
        return entrants

    def _engine_maker(self) -> Any:
        """One packing of the weights for all presets."""
        from .. import build

        for config in self._configs.values():
            build.check_names(config)
        loaded = build.load_model(next(iter(self._configs.values())).model)
        return lambda config: build.async_engine_around(loaded, config)

    async def _start_peers(self, stack: AsyncExitStack) -> list[Any]:
        """One after another: starting takes all cores for a while."""
        from ..ops.machine import usable_cores
        from .peers import running

        servers = []
        for peer in self._peers:
            print(f"starting {peer.name}", file=sys.stderr, flush=True)
            log = self._folder / "logs" / f"{peer.name.replace('/', '_')}.log"
            server = await stack.enter_async_context(
                running(peer, model_file(self.arguments.model), usable_cores(), log))
            await server.ready()
            servers.append(server)
        return servers

    async def _meet(self, entrants: Sequence[Entrant]) -> _Met:
        """Looks at every contestant once, so that a wrong URL or knob is told before anything is measured."""
        forms = ["ids", "text", "messages"]
        limits: list[int] = []
        vocabularies: list[int] = []
        for entrant in entrants:
            async with entrant.target(None) as target:
                forms = [form for form in forms if form in target.forms]
                if (limit := getattr(target, "max_model_len", None)) is not None:
                    limits.append(limit)
                    vocabularies.append(target.vocab_size)    # type: ignore[attr-defined]
        wanted = self.arguments.prompts
        if not forms or wanted not in ("auto", *forms):
            raise ConfigError(f"prompts={wanted!r}: not all contestants take that; all take: {', '.join(forms) or '-'}")
        form = forms[0] if wanted == "auto" else wanted
        return _Met(form, min(vocabularies, default=None), min(limits, default=None))

    def _requests(self, met: _Met) -> Any:
        """A function of the salt."""
        from .request_file import read_requests, salted
        from .workload import requests_of

        first, end = token_range(met.vocab_size)
        if self.arguments.request_file is not None:
            asked = read_requests(self.arguments.request_file)[: self.arguments.requests]
            return lambda salt: salted(asked, salt, first, end)
        spec = self._workload_spec(met)
        return lambda salt: requests_of(spec, salt)

    def _workload_spec(self, met: _Met) -> WorkloadSpec:
        from .workload import WorkloadSpec

        given = {name: value for name, _, _ in WORKLOAD_FLAGS if (value := getattr(self.arguments, name)) is not None}
        if "max_context" not in given and met.max_context is not None:
            given["max_context"] = met.max_context
        first, end = token_range(met.vocab_size)
        return WorkloadSpec(name=self.arguments.workload, num_requests=self.arguments.requests, prompts=met.form,
                            seed=self.arguments.seed, first_token_id=first, end_token_id=end, **given)

    def _setup(self, requests: Sequence[Asked], met: _Met) -> dict[str, dict[str, Any]]:
        from .machine_facts import commit, machine_facts

        arguments = self.arguments
        unit = self._loads[0].unit
        arrivals = "closed loop: each client asks, waits for the whole answer and asks again"
        if unit != "clients":
            arrivals = f"open loop: Poisson at {', '.join(load.name for load in self._loads)}"
        return {
            "run": {"command": shlex.join(["paceline", *sys.argv[1:]]), "paceline": __version__, "commit": commit(),
                    "started at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")},
            "machine": machine_facts(),
            "workload": workload_facts(arguments, requests) | {"prompts sent as": met.form},
            "load": {"arrivals": arrivals, "rounds": arguments.rounds,
                     "order": "contestants one after another in each load, in reverse in every second round",
                     "warm-up": "up to 8 requests with short answers before each cell, not counted",
                     "words": "the same lengths in every cell; the same words for all contestants of a round and load, "
                              "new ones in every round and load, so that no cache knows them"},
            "model": {"model": arguments.model, "numeric form": arguments.dtype or "the file's own"} if self._presets
            else {},
        }


# --- reading the flags

def names_of(text: str | None, flag: str) -> list[str]:
    names = [] if text is None else [one.strip() for one in text.split(",")]
    if not all(names):
        raise ConfigError(f"{flag} {text!r}: expected names with commas between")
    return names


def url_of(text: str) -> tuple[str, str]:
    name, is_given, url = text.partition("=")
    if not is_given or not name or "/" in name:
        raise ConfigError(f"--url {text!r}: expected NAME=URL, such as mine=http://127.0.0.1:8000")
    return name, url


def loads_of(arguments: argparse.Namespace) -> list[Load]:
    from .comparison import Load

    if arguments.rate is not None and arguments.concurrency is not None:
        raise ConfigError("concurrency and rate exclude each other: a closed loop has clients, an open one a rate")
    if arguments.cap is not None and arguments.rate is None:
        raise ConfigError("cap has no effect without rate")
    is_open = arguments.rate is not None
    flag, text = ("rate", arguments.rate) if is_open else ("concurrency", arguments.concurrency or DEFAULT_CONCURRENCY)
    try:
        values = sorted({float(one) if is_open else int(one) for one in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: expected numbers with commas between") from error
    if not 0 < values[0] <= values[-1] < float("inf"):
        raise ConfigError(f"{flag} must be above 0, got {text}")
    return [Load(value=float(value), unit="requests/s" if is_open else "clients") for value in values]


def new_folder(path: str | None) -> Path:
    if path is None:
        return Path("bench-results") / datetime.now(UTC).strftime("compare-%Y%m%d-%H%M%S")
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"output {path}: is there already and not an empty folder")
    return folder


def token_range(vocab_size: int | None) -> tuple[int, int]:
    """Ids to draw prompts from: ordinary tokens, away from the special ones at either end."""
    return (1_000, 20_000) if vocab_size is None or vocab_size > 20_000 else (vocab_size // 4, vocab_size * 3 // 4)


def model_file(model: str) -> str:
    """What {model} stands for in a peer's command: the packaged model's file, else MODEL as given."""
    from ..model.loader import PACKAGED_MODELS, packaged_file

    return str(packaged_file(model)) if model in PACKAGED_MODELS else model


def workload_facts(arguments: argparse.Namespace, requests: Sequence[Asked]) -> dict[str, Any]:
    given: Mapping[str, Any] = {name.replace("_", " "): value for name, _, _ in WORKLOAD_FLAGS
                                if (value := getattr(arguments, name)) is not None}
    prompts = [asked.num_prompt_tokens for asked in requests if asked.num_prompt_tokens is not None]
    return {"workload": arguments.request_file or arguments.workload, **given, "requests": len(requests),
            "seed": arguments.seed, "prompt tokens": _range(prompts),
            "output tokens": _range([asked.num_output_tokens for asked in requests]) + ", asked for exactly, greedy"}


def _range(counts: Sequence[int]) -> str:
    if not counts:
        return "known to the servers only"
    return f"{min(counts):,} to {max(counts):,}, mean {sum(counts) / len(counts):,.0f}"
