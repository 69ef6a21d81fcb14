"""Service level objectives: what a request must keep to count in goodput. All of them, by its class."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from . import measures
from .records import RequestRecord

# What can be limited. A request to which a word does not apply (TPOT of one token) keeps that limit.
LIMITED: dict[str, Callable[[RequestRecord], Sequence[float]]] = {
    "ttft": measures.ttft_from_intended,
    "tpot": measures.tpot,
    "itl": measures.greatest_gap,
    "e2e": measures.e2e_from_intended,
    "normalised": measures.normalised_from_intended,
}
MEANING = {
    "ttft": "TTFT from the intended send time", "tpot": "TPOT", "itl": "the request's greatest ITL",
    "e2e": "E2E from the intended send time", "normalised": "E2E over output tokens"}
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3}
_LIMIT = re.compile(r"(\w+)=(\d+(?:\.\d+)?|\.\d+)(s|ms|)")


@dataclass(frozen=True, slots=True)
class Slo:
    """One class of service. `name` is None for the requests that name no class."""

    name: str | None
    limits: Mapping[str, float]    # seconds, by a word of LIMITED

    def is_met_by(self, record: RequestRecord) -> bool:
        """A request that failed has met nothing."""
        return record.status == "ok" and all(
            value <= limit for word, limit in self.limits.items() for value in LIMITED[word](record))

    def text(self) -> str:
        return " and ".join(f"{MEANING[word]} <= {limit:g} s" for word, limit in self.limits.items())


def parse_slo(text: str) -> Slo:
    """`ttft=0.5,tpot=50ms` for all requests, or `chat:ttft=0.5` for those of a class. Raises ConfigError."""
    name, has_name, limits = text.rpartition(":")
    found: dict[str, float] = {}
    for part in limits.split(","):
        match = _LIMIT.fullmatch(part.strip())
        if match is None or match[1] not in LIMITED:
            raise ConfigError(f"slo: {part!r} is not WORD=SECONDS (or WORD=500ms) with one of {sorted(LIMITED)}")
        if match[1] in found:
            raise ConfigError(f"slo: {match[1]} is limited twice in {text!r}")
        found[match[1]] = float(match[2]) * _UNITS[match[3]]
    return Slo(name if has_name else None, found)


def slo_table(texts: Sequence[str]) -> dict[str | None, Slo]:
    """By class. Raises ConfigError where a class comes twice."""
    table: dict[str | None, Slo] = {}
    for slo in map(parse_slo, texts):
        if slo.name in table:
            raise ConfigError(f"slo: class {slo.name or 'of unnamed requests'} is given twice")
        table[slo.name] = slo
    return table


def slo_of(record: RequestRecord, table: Mapping[str | None, Slo]) -> Slo | None:
    """The limits of a request's class; those without a class name where its class has none."""
    return table.get(record.slo, table.get(None))
