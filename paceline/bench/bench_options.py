"""What the flags of `paceline bench` come to: the load, the cells, the limits. A flag without effect is refused."""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ..errors import ConfigError
from .arrivals import NEED_RATE, Arrivals, parse_ramp, parse_steps
from .bench_flags import DEFAULT_CONCURRENCY, HTTP_FLAGS, LOAD_FLAGS, RUN_FLAGS, given, refuse
from .bench_run import Bench, BenchPlan, BenchResult, Cell
from .load_generator import CellPlan
from .measures import definitions_named
from .records import Asked
from .request_file import read_requests
from .slo import slo_table
from .targets import HttpOptions, Target
from .traces import ATTRIBUTION
from .workload import WORKLOADS, WorkloadSpec, draft


def http_options(arguments: argparse.Namespace, api_key: str | None) -> HttpOptions:
    told = given(arguments, HTTP_FLAGS)
    told.pop("self_test", None)
    if "model_name" in told:
        told["model"] = told.pop("model_name")
    return HttpOptions(**{"api_key": api_key} | told)


class Load:
    """What is to be asked, before it is known of whom. Raises ConfigError for whatever means nothing: names, limits,
    lengths, a file with a bad line."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        told = given(arguments, LOAD_FLAGS)
        self._told_range = told.pop("token_range", None)
        self._has_form = "prompts" in told
        self.salt = told.pop("salt", None) or secrets.token_hex(8)
        self.requests: list[Asked] | None = None
        self._file: str | None = None
        if (path := told.pop("requests_file", None)) is not None:
            refuse({name: told[name] for name in told if name not in ("requests", "seed", "no_salt")},
                   "on a file of requests")
            self._file = path
            self.requests = read_requests(path)[: told.get("requests")]
        elif told.get("no_salt"):
            raise ConfigError("no_salt goes with requests_file")
        self._is_salted = not told.pop("no_salt", False)
        renames = {"workload": "name", "requests": "num_requests"}
        self.spec = WorkloadSpec(**{renames.get(name, name): value for name, value in told.items()})
        if self._told_range is not None:
            first, end = _token_range(self._told_range)
            self.spec = replace(self.spec, first_token_id=first, end_token_id=end)
        drafts = draft(self.spec) if self.requests is None else self.requests
        has_recorded_times = all(one.arrival_seconds is not None for one in drafts if not one.after)
        self._run = _RunOptions(arguments, has_recorded_times)
        self._run.check(drafts)
        self.plan()    # a mistake is told before anybody is asked

    def fitted(self, target: Target) -> None:
        """Prompts of a form and of tokens that the target takes, within its context."""
        if self.requests is None and not self._has_form:
            self.spec = replace(self.spec, prompts=target.forms[0])
        if self.requests is None and self.spec.max_context is None:
            self.spec = replace(self.spec, max_context=target.max_context)
        if (vocab_size := target.vocab_size) is not None and self._told_range is None:
            self.spec = replace(self.spec, first_token_id=min(self.spec.first_token_id, vocab_size // 2),
                                end_token_id=min(self.spec.end_token_id, vocab_size))

    async def run(self, bench: Bench) -> BenchResult:
        run = self._run
        if run.find_rate is None:
            return await bench.run()
        return await bench.find_rate(run.find_rate, run.attainment, run.precision)

    def about(self) -> dict[str, Any]:
        """For the result: everything that the load depends on."""
        source: dict[str, Any] = {"requests_file": self._file, "num_requests": len(self.requests or ())}
        if self.requests is None:
            source = asdict(self.spec) | {"about": WORKLOADS[self.spec.name].about}
        if self.requests is None and self.spec.name.startswith("azure-"):
            source["attribution"] = ATTRIBUTION
        return {"load": source | {"salt": self.salt, "prompts_cut_to_context": self.num_cut()}}

    def plan(self) -> BenchPlan:
        run = self._run
        return BenchPlan(workload=self.spec, requests=self.requests, is_salted=self._is_salted, cells=run.cells,
                         repeats=run.repeats, warm_up=run.warm_up,
                         ramp_in_seconds=run.ramp_in_seconds, slos=run.slos, beside=run.beside,
                         salt=self.salt)

    def num_cut(self) -> int:
        """Prompts that were shortened to the context."""
        if self.requests is not None or self.spec.max_context is None:
            return 0
        whole, cut = draft(replace(self.spec, max_context=None)), draft(self.spec)
        return sum(one != other for one, other in zip(whole, cut, strict=True))


class _RunOptions:
    """Cells, limits and words."""

    def __init__(self, arguments: argparse.Namespace, has_recorded_times: bool) -> None:
        told = given(arguments, RUN_FLAGS)
        self.find_rate: float | None = told.get("find_rate")
        self.attainment: float = told.get("attainment", 0.9)
        self.precision: float = told.get("rate_precision", 0.05)
        self.repeats: int = told.get("repeats", 1)
        self.warm_up: int | None = told.get("warm_up")
        self.ramp_in_seconds: float | None = told.get("ramp_in")
        self.beside = tuple(name for name in told.get("definitions", "ours").split(",") if name != "ours")
        for name in self.beside:
            definitions_named(name)
        self.slos = slo_table(arguments.slo or ())
        self._check_search(told)
        self.cells = self._cells(told, has_recorded_times)

    def _check_search(self, told: Mapping[str, Any]) -> None:
        if self.find_rate is None:
            return refuse({name: told[name] for name in ("attainment", "rate_precision") if name in told},
                          "without find_rate")
        if not self.slos:
            raise ConfigError("find_rate needs slo: the limits that a rate must keep")
        if "rate" in told or self.repeats > 1:
            raise ConfigError("find_rate chooses the rates itself, one round each: leave rate and repeats out")
        for name, value, most in (("find_rate", self.find_rate, 1e6), ("attainment", self.attainment, 1.0),
                                  ("rate_precision", self.precision, 1.0)):
            if not 0 < value <= most:
                raise ConfigError(f"{name} must be above 0 and at most {most:g}, got {value}")

    def _cells(self, told: Mapping[str, Any], has_recorded_times: bool) -> list[Cell]:
        rates = _numbers(told["rate"], "rate", float) if "rate" in told else [None]
        if self.find_rate is not None:
            rates = [self.find_rate]
        kind = told.get("arrivals") or ("poisson" if rates != [None] else "steps" if "steps" in told else
                                        "ramp" if "ramp" in told else "trace" if has_recorded_times else "closed")
        if kind not in NEED_RATE and self.find_rate is not None:
            raise ConfigError(f"find_rate goes with arrivals {', '.join(NEED_RATE)}, not with {kind}")
        caps = _numbers(told["concurrency"], "concurrency", int) if "concurrency" in told else [
            DEFAULT_CONCURRENCY if kind == "closed" else None]
        if self.find_rate is not None and len(caps) > 1:
            raise ConfigError("find_rate takes one concurrency, a cap")
        shape = {name: told[name] for name in ("burstiness", "time_scale") if name in told}
        shape |= {"steps": parse_steps(told["steps"])} if "steps" in told else {}
        shape |= {"ramp": parse_ramp(told["ramp"])} if "ramp" in told else {}
        return [Cell(arrivals=Arrivals(kind=kind, rate=rate, **shape), concurrency=cap)
                for rate in rates for cap in caps]

    def check(self, drafts: Any) -> None:
        for cell in self.cells:
            CellPlan(name="", arrivals=cell.arrivals, concurrency=cell.concurrency,
                     ramp_in_seconds=self.ramp_in_seconds)
        if any(cell.arrivals.kind == "trace" for cell in self.cells):
            self.cells[0].arrivals.times([one.arrival_seconds for one in drafts if not one.after], 0)


def _numbers(text: str, knob: str, kind: type) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < 1e9 for value in values) or len(set(values)) < len(values):
        raise ConfigError(f"{knob}={text!r}: expected different numbers above 0, with commas between them")
    return values


def _token_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match is None or int(match[2]) < int(match[1]):
        raise ConfigError(f"token_range={text!r}: expected FIRST..LAST")
    return int(match[1]), int(match[2]) + 1
