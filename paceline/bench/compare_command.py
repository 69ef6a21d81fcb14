"""`paceline compare`: several schedules and servers under the same load, and one report."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config import CacheConfig, ModelConfig, SchedulerConfig
from ..errors import ConfigError, EngineError
from ..flags import ENGINE_GROUPS, add_knobs, given_knobs, plain_command, put
from ..presets import PRESETS, engine_config
from .bench_flags import LOAD_FLAGS, RUN_FLAGS, SLO_HELP, Flag

if TYPE_CHECKING:
    from .bench_options import Load
    from .bench_run import BenchPlan
    from .comparison import Comparison
    from .entrants import Entrant

DEFAULT_ROUNDS, DEFAULT_CONCURRENCY = 3, "4,16"
NOT_HERE = ("repeats", "definitions", "find_rate", "attainment", "rate_precision")    # bench's alone
HELP = ("measure several schedules of ours, running servers, and servers it starts, under the same load, one after "
        "another in turns; leaves a report to read and all raw data (docs/compare.md)")


def add(commands: Any) -> None:
    compare = plain_command(commands, "compare", _compare, HELP)
    who = compare.add_argument_group("contestants")
    who.add_argument("--preset", metavar="A,B,...", help=f"schedules of ours, in process: {', '.join(PRESETS)}")
    who.add_argument("--url", action="append", default=[], metavar="NAME=URL",
                     help="a running server, OpenAI-compatible or TGI; may be repeated")
    who.add_argument("--peers", metavar="FILE", help="servers to start, from a YAML file")
    who.add_argument("--baseline", metavar="NAME", help="whose figures are 1 in ratios (default: the first)")
    who.add_argument("--timeout-seconds", type=float, default=600.0, metavar="S",
                     help="for a whole answer of a server (default: 600)")
    _add(compare.add_argument_group("load"), LOAD_FLAGS)
    cells = compare.add_argument_group("cells")
    _add(cells, [flag for flag in RUN_FLAGS if flag[0] not in NOT_HERE])
    cells.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, metavar="N",
                       help=f"times that everything is measured, for intervals (default: {DEFAULT_ROUNDS})")
    cells.add_argument("--slo", action="append", metavar="LIMITS", help=SLO_HELP)
    compare.set_defaults(**dict.fromkeys(NOT_HERE))
    out = compare.add_argument_group("results")
    out.add_argument("--output", metavar="DIR", help="a new folder for report.html, charts/ and all data "
                     "(default: bench-results/compare-TIME)")
    out.add_argument("--title", help="of the report")
    out.add_argument("--again", metavar="DIR", help="measure nothing: make the report of that folder anew")
    out.add_argument("--json", action="store_true", help="print one JSON object: the finding, ratios and all summaries")
    ours: Any = compare.add_argument_group("the engines of --preset; these go over each preset's own")
    ours.add_argument("--model", default="smollm2", metavar="MODEL",
                      help="as for serve; peers get it as {model} (default: smollm2)")
    for group in ENGINE_GROUPS:
        add_knobs(ours, group)


def _add(group: Any, flags: Sequence[Flag]) -> None:
    for name, kind, metavar, text in flags:
        if name == "concurrency":
            text = text.partition("(default")[0] + f"(default: {DEFAULT_CONCURRENCY}), or with other arrivals a cap"
        settings: dict[str, Any] = {"action": "store_true", "default": None} if kind is None else {
            "type": kind, "metavar": metavar}
        group.add_argument("--" + name.replace("_", "-"), help=text.replace("%", "%%"), **settings)


def _compare(arguments: argparse.Namespace) -> int:
    if find_spec("aiohttp") is None:
        raise ConfigError("compare needs aiohttp: pip install 'paceline[bench]'")
    if arguments.again is not None:
        return _again(arguments)
    import uvloop

    task = _Task(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        is_interrupted = runner.run(task.run())
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
    notes = "\n".join(f"- {note}" for note in finding.caveats)
    parts = [f"{finding.lead} {finding.weakest}", notes, f"The report: {folder / 'report.html'}"]
    put("\n\n".join(filter(None, parts)))


@dataclass(frozen=True, slots=True)
class _Everyone:
    """What all contestants take, as one target: found out before anything is measured."""

    forms: tuple[str, ...]
    vocab_size: int | None
    max_context: int | None


class _Task:
    """One call of the command. What is wrong with it is told before a model is loaded or a server started."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from .bench_options import Load
        from .peers import read_peers

        self.arguments = arguments
        self._presets = names_of(arguments.preset, "--preset")
        self._configs = {name: self._config(name) for name in self._presets}
        self._urls = [url_of(text) for text in arguments.url]
        self._peers = [] if arguments.peers is None else read_peers(arguments.peers)
        self._names = self._checked(
            [*self._presets, *(name for name, _ in self._urls), *(peer.name for peer in self._peers)])
        if _is_all_default(arguments):
            arguments.concurrency = DEFAULT_CONCURRENCY
        arguments.salt = arguments.salt or datetime.now(UTC).isoformat()
        self._load = Load(arguments)
        in_order(self._load.plan())
        self._folder = new_folder(arguments.output)

    def _config(self, preset: str) -> Any:
        knobs = {name: value for group in (ModelConfig, CacheConfig, SchedulerConfig)
                 for name, value in given_knobs(self.arguments, group).items()}
        try:
            return engine_config(preset, {**knobs, "model": self.arguments.model})
        except ConfigError as error:
            raise ConfigError(f"preset {preset}: {error}") from error

    def _checked(self, names: list[str]) -> list[str]:
        baseline, rounds = self.arguments.baseline, self.arguments.rounds
        if not names:
            raise ConfigError("compare needs contestants: --preset A,B, --url NAME=URL or --peers FILE")
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two contestants are called {doubled[0]!r}")
        if baseline is not None and baseline not in names:
            raise ConfigError(f"baseline={baseline!r} is no contestant; choose from {names}")
        if rounds < 1:
            raise ConfigError(f"rounds must be at least 1, got {rounds}")
        return names

    async def run(self) -> bool:
        """Whether it was interrupted."""
        from .compare import Comparing, Plan
        from .comparison_files import write_page
        from .request_file import write_requests

        async with AsyncExitStack() as stack:
            entrants = await self._entrants(stack)
            self._load.fitted(await everyone(entrants, self.arguments.prompts))    # type: ignore[arg-type]
            plan = Plan(bench=in_order(self._load.plan()), num_rounds=self.arguments.rounds,
                        warm_up=self.arguments.warm_up, baseline=self.arguments.baseline or self._names[0],
                        setup=setup_of(self.arguments, self._load))
            comparing = Comparing(entrants, plan, self._folder)
            write_requests(self._folder / "requests.jsonl", plan.requests(plan.cells[0], 1))

            def on_round() -> None:    # whoever waits can look already
                write_page(self._folder, comparing.comparison(), self.arguments.title)

            await comparing.run(on_round)
        if not comparing.has_measured:
            raise EngineError("nothing was measured" + "".join(f"; {one}" for one in comparing.troubles))
        _publish(self._folder, comparing.comparison(), self.arguments)
        return comparing.is_interrupted

    async def _entrants(self, stack: AsyncExitStack) -> list[Entrant]:
        """In the order of the flags: presets, URLs, peers."""
        from .entrants import PeerEntrant, PresetEntrant, UrlEntrant
        from .targets import HttpOptions

        timeout = self.arguments.timeout_seconds
        options = HttpOptions(timeout_seconds=timeout)
        entrants: list[Entrant] = [UrlEntrant(name, url, options) for name, url in self._urls]
        if self._presets:
            make_engine = self._engine_maker()
            presets = [PresetEntrant(name, config, make_engine) for name, config in self._configs.items()]
            entrants = [*presets, *entrants]
        return [*entrants, *(PeerEntrant(server, timeout) for server in await self._start_peers(stack))]

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


async def everyone(entrants: Sequence[Entrant], form: str | None) -> _Everyone:
    """Looks at every contestant once, so that a wrong URL or knob is told before anything is measured."""
    forms = ["ids", "text", "messages"]
    contexts: list[int] = []
    vocabularies: list[int] = []
    for entrant in entrants:
        async with entrant.target(None) as target:
            forms = [one for one in forms if one in target.forms]
            contexts += [] if target.max_context is None else [target.max_context]
            vocabularies += [] if target.vocab_size is None else [target.vocab_size]
    if not forms or form not in (None, *forms):
        raise ConfigError(f"prompts={form!r}: not all contestants take that; all take: {', '.join(forms) or 'none'}")
    return _Everyone(tuple(forms), min(vocabularies, default=None), min(contexts, default=None))


# --- reading the flags

def _is_all_default(arguments: argparse.Namespace) -> bool:
    names = [name for name, *_ in RUN_FLAGS if name not in (*NOT_HERE, "warm_up")]
    is_recorded = arguments.requests_file is not None or arguments.trace is not None or (
        arguments.workload or "").startswith("azure")
    return not is_recorded and all(getattr(arguments, name) is None for name in names)


def in_order(plan: BenchPlan) -> BenchPlan:
    """Cells from the least load to the greatest. Raises ConfigError where they are not of one kind."""
    from .compare import load_of

    if len({load_of(cell).unit for cell in plan.cells}) > 1:
        raise ConfigError("compare takes one concurrency with other arrivals: a cap for all rates")
    return replace(plan, cells=sorted(plan.cells, key=lambda cell: load_of(cell).value))


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


def new_folder(path: str | None) -> Path:
    if path is None:
        return Path("bench-results") / datetime.now(UTC).strftime("compare-%Y%m%d-%H%M%S")
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"output {path}: is there already and not an empty folder")
    return folder


def model_file(model: str) -> str:
    """What {model} stands for in a peer's command: the packaged model's file, else MODEL as given."""
    from ..model.loader import PACKAGED_MODELS, packaged_file

    return str(packaged_file(model)) if model in PACKAGED_MODELS else model


def setup_of(arguments: argparse.Namespace, load: Load) -> dict[str, dict[str, Any]]:
    """What the report tells of the run before its figures."""
    from .machine_facts import commit, machine_facts

    plan = load.plan()
    requests = plan.asked_in("set-up")
    prompts = [asked.num_prompt_tokens for asked in requests if asked.num_prompt_tokens is not None]
    told = {name: value for name, *_ in LOAD_FLAGS if (value := getattr(arguments, name)) is not None}
    given = {name.replace("_", " "): value for name, value in told.items()
             if name not in ("workload", "requests", "seed", "salt", "prompt_tokens", "output_tokens")}
    return {
        "run": {"command": shlex.join(["paceline", *sys.argv[1:]]), "paceline": __version__, "commit": commit(),
                "started at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")},
        "machine": machine_facts(),
        "workload": {
            "workload": arguments.requests_file or load.spec.name, **given, "requests": len(requests),
            "seed": load.spec.seed, "salt": load.salt,
            "prompt tokens": span(prompts), "prompts cut to context": load.num_cut(),
            "output tokens": span([asked.num_output_tokens for asked in requests]) + ", asked for exactly, greedy"},
        "load": {
            "arrivals": "; ".join(dict.fromkeys(cell.arrivals.text() for cell in plan.cells)),
            "rounds": arguments.rounds,
            "order": "contestants one after another in each load, in reverse in every second round",
            "warm-up": "requests with answers of at most 8 tokens before each cell, not counted",
            "words": "the same lengths in every cell; the same words for all contestants of a round and load, new ones "
                     "in every round and load, so that no cache knows them"},
        "model": {"model": arguments.model, "numeric form": arguments.dtype or "the file's own"},
    }


def span(counts: Sequence[int]) -> str:
    if not counts:
        return "known to the servers only"
    return f"{min(counts):,} to {max(counts):,}, mean {sum(counts) / len(counts):,.0f}"
