"""`paceline reproduce NAME`: published claims, taken apart. Each prints what was published beside what comes out here,
of which kind the figure is, how it is defined and where the comparison is weakest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import ConfigError
from ..flags import plain_command, put
from .traces import PACKAGED

if TYPE_CHECKING:
    from .reproduce.claims import Reproduction
    from .reproduce.lab import Lab
    from .reproduce.tgi_vs_vllm import OnServer

Run: TypeAlias = "Callable[[argparse.Namespace, Lab], Reproduction]"
AddFlags: TypeAlias = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One name: what it shows, how it runs, and the flags it has beside --json and, where it simulates, --output."""

    help: str
    run: Run
    add_flags: AddFlags = lambda command: None
    is_simulated: bool = True


def add(commands: Any) -> None:
    reproduce = plain_command(
        commands, "reproduce", _list, "take a published claim apart: what was published beside what comes out here, "
        "and what kind of figure it is. Without NAME: the list of names")
    names = reproduce.add_subparsers(title="names", metavar="NAME")
    for name, entry in ENTRIES.items():
        command = plain_command(names, name, _reproduce, entry.help)
        command.set_defaults(name=name)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        if entry.is_simulated:
            command.add_argument("--output", metavar="DIR", help="folder for journals of the runs in virtual time (see "
                                 "`paceline replay`) and pictures; made if it is not there (default: none are written)")
        entry.add_flags(command)


def _list(arguments: argparse.Namespace) -> int:
    width = max(map(len, ENTRIES))
    put("\n".join(f"{name:<{width}}  {entry.help}" for name, entry in ENTRIES.items()))
    return 0


def _reproduce(arguments: argparse.Namespace) -> int:
    from ..build import build_scheduler
    from .reproduce.lab import Lab, made_output

    lab = Lab(build_scheduler, made_output(getattr(arguments, "output", None)))
    found = ENTRIES[arguments.name].run(arguments, lab)
    put(json.dumps(found.as_dict()) if arguments.json else found.table())
    return 0


def _tell(line: str) -> None:
    print(f"paceline: {line}", file=sys.stderr, flush=True)


# --- names and their flags. What they need is loaded when they run: other commands do not wait for it.


def _toy(arguments: argparse.Namespace, lab: Lab) -> Reproduction:
    from .reproduce import toy

    return toy.reproduce(lab)


def _add_azure(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trace", choices=tuple(PACKAGED), help="only this one (default: both)")
    command.add_argument("--slots", type=_counts, default=(4, 8, 16, 32), metavar="N,N",
                         help="numbers of slots (default: 4,8,16,32, some minutes in all on two cores)")
    command.add_argument("--requests", type=_count, metavar="N",
                         help="only the first N of each trace: other figures, sooner (default: all)")


def _azure(arguments: argparse.Namespace, lab: Lab) -> Reproduction:
    from .reproduce import azure

    traces = tuple(PACKAGED) if arguments.trace is None else (arguments.trace,)
    _check_fills(arguments.requests, arguments.slots)
    return azure.reproduce(lab, traces, arguments.slots, arguments.requests, _tell)


def _add_kv_waste(command: argparse.ArgumentParser) -> None:
    command.add_argument("--requests", type=_count, default=400, metavar="N",
                         help="requests of the load (default: 400)")
    command.add_argument("--kv-tokens", type=_count, metavar="N",
                         help="the KV budget in tokens, rounded down to blocks of 16, at least 2048 (default: 15712)")


def _kv_waste(arguments: argparse.Namespace, lab: Lab) -> Reproduction:
    from .reproduce import kv_waste

    kv_tokens = arguments.kv_tokens or kv_waste.KV_TOKENS
    if kv_tokens < kv_waste.MAX_MODEL_LEN:
        raise ConfigError(f"kv_tokens={kv_tokens} do not hold one request of {kv_waste.MAX_MODEL_LEN} tokens")
    return kv_waste.reproduce(lab, arguments.requests, kv_tokens)


def _add_drain(command: argparse.ArgumentParser) -> None:
    command.add_argument("--slots", type=_counts, default=(4, 8, 10, 16, 32), metavar="N,N",
                         help="numbers of slots (default: 4,8,10,16,32)")
    command.add_argument("--requests", type=_count, default=960, metavar="N",
                         help="requests of each run, in whole groups of as many as there are slots (default: 960)")


def _drain(arguments: argparse.Namespace, lab: Lab) -> Reproduction:
    from .reproduce import drain

    _check_fills(arguments.requests, arguments.slots)
    return drain.reproduce(lab, arguments.slots, arguments.requests)


def _add_flat_decode(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    command.add_argument("--batches", type=_counts, default=(1, 2, 4, 8, 12, 16, 24, 32, 48, 64), metavar="N,N",
                         help="batch sizes, 1 among them (default: 1,2,4,8,12,16,24,32,48,64)")
    command.add_argument("--steps", type=_count, default=32, metavar="N",
                         help="decode steps measured at each batch size (default: 32)")


def _flat_decode(arguments: argparse.Namespace, lab: Lab) -> Reproduction:
    from ..build import build_llm
    from .reproduce import flat_decode

    return flat_decode.reproduce(build_llm, arguments.model, arguments.batches, arguments.steps, _tell)


def _add_tgi_vs_vllm(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    command.add_argument("--requests", type=_count, default=60, metavar="N",
                         help="requests of each run (default: 60; published: 1000, hours on two cores)")
    command.add_argument("--concurrency", type=_counts, default=(1, 4, 8, 16), metavar="N,N",
                         help="numbers of clients (default: 1,4,8,16)")
    command.add_argument("--num-kv-blocks", type=_count, default=384, metavar="N",
                         help="KV blocks of 16 tokens, small enough to matter, at least 160 (default: 384)")
    command.add_argument("--simulate", action="store_true", help="only the runs in virtual time, which need no model")
    command.add_argument("--servers", type=lambda text: tuple(text.split(",")), default=(), metavar="URL,URL",
                         help="also run against these; the others are held to the first")


def _tgi_vs_vllm(arguments: argparse.Namespace, lab: Lab) -> Reproduction:
    from ..build import build_llm
    from .reproduce import tgi_vs_vllm

    if 16 * arguments.num_kv_blocks < tgi_vs_vllm.MAX_MODEL_LEN:
        raise ConfigError(f"num_kv_blocks={arguments.num_kv_blocks} of 16 tokens do not hold one request of "
                          f"{tgi_vs_vllm.MAX_MODEL_LEN} tokens")
    plan = tgi_vs_vllm.Plan(
        num_requests=arguments.requests, concurrency=arguments.concurrency, num_kv_blocks=arguments.num_kv_blocks,
        model=None if arguments.simulate else arguments.model, servers=arguments.servers)
    return tgi_vs_vllm.reproduce(lab, build_llm, plan, _tell, _on_server() if plan.servers else None)


def _on_server() -> OnServer:
    try:
        from .reproduce import on_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"servers: {error.name} is needed: pip install 'paceline[bench]'") from error
    return on_server.measure


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="smollm2",
                         help="the model, as `paceline serve` takes it (default: smollm2)")


def _check_fills(num_requests: int | None, slots: Sequence[int]) -> None:
    if num_requests is not None and num_requests < max(slots):
        raise ConfigError(f"requests={num_requests} do not fill {max(slots)} slots once")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1 is needed, got {text}")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


ENTRIES: dict[str, Entry] = {
    "toy": Entry("eight requests on four slots, 32 steps against 26: under which readings", _toy),
    "azure": Entry("static idle and the gain of refilling slots, on the Azure 2023 traces", _azure, _add_azure),
    "drain": Entry("2.91x and 3.86x by refilling slots, 91 % idle: which lengths and slots give them", _drain,
                   _add_drain),
    "flat-decode": Entry("step time against batch on a real model, where it stops being flat", _flat_decode,
                         _add_flat_decode, is_simulated=False),
    "kv-waste": Entry("what reserved KV memory wastes, against blocks of 16", _kv_waste, _add_kv_waste),
    "tgi-vs-vllm": Entry("two regimes on one load and a small KV budget: requests a second and latency", _tgi_vs_vllm,
                         _add_tgi_vs_vllm),
}
