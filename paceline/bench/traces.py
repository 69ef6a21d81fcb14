"""Recorded traffic: when requests came and how long they were. Reads the Azure 2023 pair, which ships with the package
(bench/data/NOTICE.txt), and files of the same form or of Mooncake's. No text is in any of them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError

DATA = Path(__file__).with_name("data")
PACKAGED = {"azure-conv-2023": DATA / "azure_conv_2023.csv.gz", "azure-code-2023": DATA / "azure_code_2023.csv.gz"}
ATTRIBUTION = (
    "Contains data from the Azure LLM inference trace 2023 (Microsoft Azure, github.com/Azure/AzurePublicDataset), "
    "licensed CC BY 4.0; paper: Splitwise, ISCA 2024")
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOONCAKE_BLOCK_TOKENS = 512    # prompt tokens that one hash id stands for; the last one may stand for fewer
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. Equal hash_ids at the head of two rows: their prompts share so many blocks; empty: not recorded."""

    arrival_seconds: float     # after the trace's first request
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


# A row as its line has it: arrival in whole ticks of the trace's own clock, so that differences are exact.
Parsed: TypeAlias = tuple[int, int, int, tuple[int, ...]]


def read_trace(name_or_path: str | Path) -> tuple[TraceRow, ...]:
    """The rows of a packaged trace by name, or of a file: Azure's CSV (2023 or 2024) or Mooncake's JSON lines, either
    of them gzipped or not. Raises ConfigError, naming file and line, for whatever is not such a row."""
    path = PACKAGED.get(str(name_or_path)) or Path(name_or_path)
    lines = _lines(path)
    is_azure = bool(lines) and lines[0].strip() == AZURE_HEADER
    parse, ticks_a_second = (_azure, 10**7) if is_azure else (_mooncake, 10**3)
    rows = list(_rows(path, lines, parse, first=1 if is_azure else 0))
    if not rows:
        raise ConfigError(f"{path}: a trace without requests")
    start = rows[0][0]
    return tuple(TraceRow((row[0] - start) / ticks_a_second, row[1], row[2], row[3]) for row in rows)


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content).decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        known = ", ".join(PACKAGED)
        raise ConfigError(f"{path}: cannot be read as a trace: {error} (in the package: {known})") from error


def _rows(path: Path, lines: list[str], parse: Callable[[str], Parsed], first: int) -> Iterator[Parsed]:
    latest: int | None = None
    for number, line in enumerate(lines[first:], first + 1):
        if not line.strip():
            continue
        try:
            row = parse(line)
            if latest is not None and row[0] < latest:
                raise ValueError("arrives before the request above it")
            if min(row[1:3]) < 1:
                raise ValueError("a request has at least one token of prompt and one of output")
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}: {line[:120]}") from error
        latest = row[0]
        yield row


def _azure(line: str) -> Parsed:
    cells = line.split(",")
    if len(cells) != 3:
        raise ValueError(f"expected {AZURE_HEADER}")
    moment, _, fraction = cells[0].partition(".")
    fraction = fraction.partition("+")[0]    # traces of 2024 name the zone, always UTC
    if not fraction.isdigit():
        fraction, moment = "0", cells[0].partition("+")[0]
    since = datetime.fromisoformat(moment) - datetime(2023, 1, 1)
    ticks = (since.days * 86_400 + since.seconds) * 10**7 + int(fraction[:7].ljust(7, "0"))
    return ticks, int(cells[1]), int(cells[2]), ()


def _mooncake(line: str) -> Parsed:
    fields = json.loads(line)
    if not isinstance(fields, Mapping):
        raise ValueError("expected an object")
    hash_ids = fields.get("hash_ids")
    if not isinstance(hash_ids, list):
        raise ValueError("hash_ids: expected a list of whole numbers")
    return (_whole(fields, "timestamp"), _whole(fields, "input_length"), _whole(fields, "output_length"),
            tuple(_whole({"hash_ids": one}, "hash_ids") for one in hash_ids))


def _whole(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int:
        raise ValueError(f"{name}: expected a whole number, got {value!r}")
    return value
