"""The results of `paceline bench` as files and as a table. Records are written cell by cell, so that what was measured
stays whatever comes after."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from ..errors import ConfigError, EngineError
from .load_generator import CellResult
from .records import RequestRecord

RECORDS, SUMMARY, TABLE = "records.jsonl", "summary.json", "summary.csv"


class ResultFiles:
    """A directory of results. Raises ConfigError where it has some already, EngineError where it cannot be written."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / RECORDS).open("xb").close()
        except FileExistsError as error:
            raise ConfigError(f"output: {error.filename} is there already; results are not mixed") from error
        except OSError as error:
            raise EngineError(f"{directory}: cannot be written: {error.strerror}") from error

    def add(self, result: CellResult) -> None:
        with (self._directory / RECORDS).open("ab") as file:
            for record in result.records:
                file.write(orjson.dumps(asdict(record)) + b"\n")

    def finish(self, facts: Mapping[str, Any]) -> None:
        (self._directory / SUMMARY).write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2) + b"\n")
        (self._directory / TABLE).write_text(csv_of(facts["cells"]))


def read_records(path: str | Path) -> list[RequestRecord]:
    """Raw records back, for computing any figure again."""
    with Path(path).open("rb") as file:
        lines = [orjson.loads(line) for line in file if line.strip()]
    return [RequestRecord(**line | {"token_times": tuple(line["token_times"]),
                                    "token_counts": tuple(line["token_counts"])}) for line in lines]


def flat(summary: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """One level, names joined by dots; definitions and lists are left to the JSON."""
    found: dict[str, Any] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list) and "definition" not in name:
            found[prefix + name] = value
    return found


def csv_of(cells: Sequence[Mapping[str, Any]]) -> str:
    """A row for each repeat of each cell."""
    rows = [{"cell": cell["cell"], "repeat": number} | {key: value for key, value in flat(one).items() if key != "cell"}
            for cell in cells for number, one in enumerate(cell["repeats"], 1)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


COLUMNS = ("cell", "ok", "failed", "req/s", "out tok/s", "TTFT ms", "p99", "TPOT ms", "p99", "ITL p99", "E2E s", "p99",
           "good", "cache", "client")


SHAPE = ("prompts", "prompt_tokens", "output_tokens", "prefix_tokens", "fan_out", "turns", "think_seconds", "trace")


def headline(facts: Mapping[str, Any]) -> str:
    """Whom the figures are about, and what was asked."""
    target, load = facts["target"], facts["load"]
    named = " ".join(str(target[name]) for name in ("model", "preset", "protocol", "fingerprint") if target.get(name))
    lines = [f"target: {target.get('url', target['name'])} ({named})"]
    if "requests_file" in load:
        lines.append(f"load: {load['num_requests']} requests of {load['requests_file']}, salt {load['salt']}")
    else:
        told = [f"{name} {load[name]}" for name in SHAPE if load[name] is not None]
        told += [f"lengths x {load['length_scale']:g}"] if load["length_scale"] != 1 else []
        lines.append(f"load: {load['name']} ({load['about']}), {load['num_requests']} requests, seed {load['seed']}, "
                     f"salt {load['salt']}, {', '.join(told)}")
    if cut := load["prompts_cut_to_context"]:
        lines.append(f"  {cut} prompts were cut to a context of {load['max_context']} tokens")
    if (limit := facts.get("client_ceiling")) is not None:
        lines.append(f"client: reads at least {limit['output_tokens_per_second']:.0f} tokens/s here, with "
                     f"{limit['core_share']:.0%} of a core: {limit['definition']}")
    lines += [load["attribution"]] if "attribution" in load else []
    return "\n".join(lines)


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """A line for each cell (of repeats their mean, +- half of the 95% interval), then what the figures mean and what
    a reader must know before believing them."""
    rows = [COLUMNS, *(_row(cell) for cell in cells)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(text.ljust(width) if not column else text.rjust(width)
                       for column, (text, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]
    return "\n".join([*lines, "", *_meanings(cells), *_warnings(cells)])


def found_rate_text(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    tried = ", ".join(f"{one['rate']:.3g}/s {one['share']:.0%}" for one in found["probes"] if one["share"] is not None)
    rate = "none was sustained" if found["rate"] is None else f"{found['rate']:.3g} requests/s"
    limit = "" if found["fails_at"] is None else f"; fails at {found['fails_at']:.3g}/s"
    doubt = "" if found["is_valid"] else " (INVALID: the client was a bottleneck in a probe)"
    return f"\n\nhighest sustained rate: {rate}{limit}{doubt}\n  tried: {tried}\n  {found['definition']}"


def _row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    repeats = cell["repeats"]

    def mean(section: str, key: str, scale: float = 1.0, digits: int = 1) -> str:
        seen = cell["over_repeats"].get(f"{section}.{key}")
        if seen is None:
            return "-"
        half = seen["half_width_95"]
        return f"{scale * seen['mean']:.{digits}f}" + ("" if half is None else f" ±{scale * half:.{digits}f}")

    itl = next((name for name in ("itl_pooled_seconds", "itl_seconds", "icl_seconds") if name in repeats[0]), "")
    return (
        cell["cell"], str(sum(one["requests"]["ok"] for one in repeats)),
        str(sum(one["requests"]["failed"] for one in repeats)),
        mean("throughput", "requests_per_second", 1, 2), mean("throughput", "output_tokens_per_second"),
        mean("ttft_seconds", "p50", 1e3), mean("ttft_seconds", "p99", 1e3), mean("tpot_seconds", "p50", 1e3, 2),
        mean("tpot_seconds", "p99", 1e3, 2), mean(itl, "p99", 1e3), mean("e2e_seconds", "p50", 1, 2),
        mean("e2e_seconds", "p99", 1, 2), mean("goodput", "share", 100, 0) + "%" * (repeats[0]["goodput"] is not None),
        mean("cache_hit_rate", "value", 100, 1) + "%" * (repeats[0]["cache_hit_rate"]["value"] is not None),
        "ok" if all(one["client"]["is_valid"] for one in repeats) else "INVALID")


def _meanings(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    if not cells:
        return ["nothing was measured"]
    first = cells[0]["repeats"][0]
    lines = ["p50 and p99 are over requests that ended well"]
    if len(cells[0]["repeats"]) > 1:
        lines[0] += "; of repeats the mean ± half of Student's 95% interval"
    names = [name for name in first if name.endswith("_seconds") and not name.startswith("service_")]
    lines += [f"  {name.removesuffix('_seconds')}: {first[name]['definition']}" for name in names]
    lines += [f"  throughput: {first['throughput']['definition']}", f"  cache: {first['cache_hit_rate']['definition']}",
              f"  client: {first['client']['definition']}"]
    if first["goodput"] is not None:
        limits = "; ".join(f"{name}: {text}" for name, text in first["goodput"]["limits"].items())
        lines.append(f"  good: share of requests that keep {limits}; {first['goodput']['definition']}")
    lines += _others(cells)
    lines.append(f"  warm-up: {first['requests']['warm_up_excluded']} requests before each cell, in no figure")
    return lines


def _others(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same requests in other tools' words, and these words' meanings."""
    lines: list[str] = []
    for name, meanings in cells[0]["repeats"][0]["in_words_of"].items():
        words = [word for word in meanings if word != "throughput"]
        for one in (one for cell in cells for one in cell["repeats"]):
            told = one["in_words_of"][name]
            shown = [f"{_short(word)} {_ms(told[word]['p50'])} / {_ms(told[word]['p99'])}" for word in words]
            rate = told["throughput"]["output_tokens_per_second"]
            shown.append("no throughput" if rate is None else f"{rate:.1f} output tokens/s")
            lines.append(f"  in {name}'s words, {one['cell']}: ms p50 / p99: {', '.join(shown)}")
        lines += [f"    {_short(word)}: {meanings[word]['definition']}" for word in words]
        lines.append(f"    throughput: {meanings['throughput']['definition']}")
    return lines


def _short(word: str) -> str:
    return word.removesuffix("_seconds").upper()


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def _warnings(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for cell in cells:
        for one in cell["repeats"]:
            if not one["client"]["is_valid"]:
                lines.append(f"{one['cell']}: {one['client']['verdict']}")
            elif (lag := one["client"]["loop_lag_seconds"]["p99"] or 0.0) > one["client"]["bound_seconds"]:
                lines.append(f"{one['cell']}: the client read up to {1e3 * lag:.1f} ms late (p99): single times, "
                             "such as ITL p99, are as uncertain")
            for kind, seen in one["requests"]["errors"].items():
                lines.append(f"{one['cell']}: {seen['count']} {kind}, the first: {seen['first']}")
            if other := one["lengths"]["output_other_than_asked"]:
                lines.append(f"{one['cell']}: {other} answers were not as long as asked: asked "
                             f"{one['lengths']['output_asked_mean']:.1f} tokens on average, got "
                             f"{one['lengths']['output_achieved_mean']:.1f}")
            counted_by = one["lengths"]["tokens_counted_by"]
            if guessed := counted_by.get("spread", 0) + counted_by.get("guess", 0):
                lines.append(f"{one['cell']}: {guessed} answers came in chunks of unknown size: ITL is that of chunks")
            if "guess" in counted_by:
                lines.append(f"{one['cell']}: the server tells no usage: output tokens are a guess, one a chunk")
            if one["is_stopped"]:
                lines.append(f"{one['cell']}: stopped, since too many had missed their limits; {one['not_sent']} "
                             "requests were not sent")
            if one["is_interrupted"]:
                lines.append(f"{one['cell']}: interrupted; {one['not_sent']} requests were not sent")
    rates = [one["cache_hit_rate"]["value"] for cell in cells for one in cell["repeats"]]
    known = [rate for rate in rates if rate is not None]
    if known and max(known) - min(known) > 0.01:
        lines.append(f"cache hit rates differ, {min(known):.1%} to {max(known):.1%}: the work was not the same")
    fewest = min((one["requests"]["ok"] for cell in cells for one in cell["repeats"]), default=0)
    if cells and fewest < 100:
        lines.append(f"p99 of {fewest} requests lies between their two greatest values: 100 or more are wanted for it")
    return [f"NOTE {line}" for line in lines]
