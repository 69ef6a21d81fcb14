"""The flags of `paceline bench`. Each is None where it was not given, so that one without effect can be refused."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .arrivals import PROCESSES
from .dialects import DIALECTS
from .measures import DEFINITIONS
from .slo import LIMITED
from .workload import WORKLOADS

DEFAULT_CONCURRENCY = 4
Flag = tuple[str, type | None, str, str]    # name, type (None: a switch), metavar, help

LOAD_FLAGS: tuple[Flag, ...] = (
    ("workload", str, "NAME", "; ".join(f"{name}: {one.about}" for name, one in WORKLOADS.items())),
    ("requests", int, "N", "requests of a cell (default: 100; of a file: all)"),
    ("seed", int, "N", "of lengths and arrivals (default: 0)"),
    ("salt", str, "TEXT", "of the words (default: a fresh one, so that no prompt has been seen before); that of an "
                          "earlier run makes its prompts again, which a prefix cache may hold"),
    ("prompts", str, "FORM", "ids, text or messages (default: the best that the target takes)"),
    ("token_range", str, "A..B", "ids of prompts come from here (default: 1000..19999, or a smaller vocabulary's)"),
    ("prompt_tokens", str, "N|A..B", "length of prompts, or of their own part; a mean for exponential and geometric"),
    ("output_tokens", str, "N|A..B", "length of answers; a mean for exponential and geometric"),
    ("prefix_tokens", int, "N", "length of the beginning that prompts share"),
    ("fan_out", int, "N", "requests that share one beginning"),
    ("turns", str, "N|A..B", "requests of a conversation or an agent"),
    ("think_seconds", float, "S", "mean time between an answer and the next turn"),
    ("trace", str, "FILE", "recorded traffic for the workload mooncake"),
    ("length_scale", float, "F", "on recorded lengths (default: 1)"),
    ("max_context", int, "N", "tokens of prompt and output together: longer prompts are cut to it (default: what "
                              "the target tells of itself); how many were is told"),
    ("requests_file", str, "FILE", "JSON lines to ask instead of a workload: a prompt (prompt, prompt_token_ids or "
                                   "messages) and num_output_tokens; also arrival_seconds, after, think_seconds, slo"),
    ("no_salt", None, "", "send a file's prompts as they are, though an earlier cell may have left them in a cache"),
)
RUN_FLAGS: tuple[Flag, ...] = (
    ("concurrency", str, "N,N,...", f"a cell each: clients of a closed loop (default: {DEFAULT_CONCURRENCY}), or with "
                                    "other arrivals a cap on requests under way"),
    ("arrivals", str, "KIND", f"{', '.join(PROCESSES)} (default: poisson with a rate, trace for recorded traffic, else "
                              "closed)"),
    ("rate", str, "R,R,...", "a cell each: requests a second, for poisson, gamma and constant"),
    ("burstiness", float, "K", "shape of gamma gaps: 1 is Poisson, smaller is burstier (variation 1/sqrt(K))"),
    ("steps", str, "R:S,R:S,...", "rates and how many seconds each lasts, for steps"),
    ("ramp", str, "R:R:S", "rate at first, at last, and the seconds between, for ramp"),
    ("time_scale", float, "F", "on recorded arrival times; 0.5 is twice as fast"),
    ("ramp_in", float, "S", "seconds within which the clients of a closed loop start (default: 1 ms a client)"),
    ("repeats", int, "N", "rounds over all cells, for intervals (default: 1)"),
    ("warm_up", int, "N", "requests before each cell that enter no figure (default: as many as run at once)"),
    ("definitions", str, "NAME,...", "tell the figures in another tool's words beside ours: "
                                     f"{', '.join(name for name in DEFINITIONS if name != 'ours')}"),
    ("find_rate", float, "R", "find the greatest rate that keeps --slo by bisection, from this first guess"),
    ("attainment", float, "F", "with --find-rate: share of requests that must keep their limits (default: 0.9)"),
    ("rate_precision", float, "F", "with --find-rate: stop when the rate is known to this share (default: 0.05)"),
)
HTTP_FLAGS: tuple[Flag, ...] = (
    ("protocol", str, "NAME", f"auto, {', '.join(DIALECTS)} (default: auto)"),
    ("model_name", str, "NAME", "model to ask a server for (default: the first that it lists)"),
    ("api_key", str, "KEY", "key for the server"),
    ("timeout_seconds", float, "S", "for a whole answer (default: 600)"),
    ("keep_alive", None, "", "reuse connections; some servers close theirs unsaid, and requests then fail"),
    ("counts", str, "WHERE", "whence a server tells its counts of tokens: end, in a usage behind the answer (default), "
     "or chunk, in every chunk: surer where chunks hold several tokens, but more work for the server"),
    ("self_test", None, "", "first measure what this client can read here, from a server that answers at once"),
)
OUTPUT_FLAGS: tuple[Flag, ...] = (
    ("save_requests", str, "FILE", "write the first cell's requests, for asking other targets the same"),
    ("output", str, "DIR", "write records.jsonl (every token's time), summary.json and summary.csv there"),
)
SLO_HELP = (f"limits that goodput asks for, all of them: WORD=SECONDS,... of {', '.join(LIMITED)} (or 500ms; itl "
            "is a request's greatest gap); CLASS:WORD=... for the requests of a class; may be repeated")


def add_flags(command: argparse.ArgumentParser) -> None:
    for title, flags in (
            ("load", LOAD_FLAGS), ("cells", RUN_FLAGS), ("servers", HTTP_FLAGS), ("results", OUTPUT_FLAGS)):
        group = command.add_argument_group(title)
        for name, kind, metavar, text in flags:
            flag, text = "--" + name.replace("_", "-"), text.replace("%", "%%")
            if kind is None:
                group.add_argument(flag, action="store_true", default=None, help=text)
            else:
                group.add_argument(flag, type=kind, metavar=metavar, help=text)
        if flags is RUN_FLAGS:
            group.add_argument("--slo", action="append", metavar="LIMITS", help=SLO_HELP)


def given(arguments: argparse.Namespace, flags: tuple[Flag, ...]) -> dict[str, Any]:
    return {name: value for name, *_ in flags if (value := getattr(arguments, name)) is not None}


def refuse(names: Mapping[str, Any], why: str) -> None:
    """Raises ConfigError if there are any."""
    for name in names:
        raise ConfigError(f"{name} has no effect {why}")
