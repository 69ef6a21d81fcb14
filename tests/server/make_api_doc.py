"""Writes the tables of docs/api.md from those of paceline/server/fields.py.

    python -m tests.server.make_api_doc

A test holds the committed tables true.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import orjson

from paceline.server import fields
from paceline.server.fields import Field

DOC_PATH = Path(__file__).parents[2] / "docs" / "api.md"
END = "<!-- end of table -->\n"


def served_table() -> str:
    """Fields of both routes, then those of one."""
    lines = ["| field | kind | range | default | meaning |", "|---|---|---|---|---|"]
    lines += [_row(name, field, "") for name, field in fields.COMMON.items()]
    lines += [_shaped_row(name, text, "") for name, text in fields.SHAPED.items()]
    for route, table, shaped in (("completions", fields.COMPLETION, fields.COMPLETION_SHAPED),
                                 ("chat", fields.CHAT, fields.CHAT_SHAPED)):
        lines += [_shaped_row(name, text, f"{route}: ") for name, text in shaped.items() if name not in fields.SHAPED]
        lines += [_row(name, field, f"{route}: ") for name, field in table.items() if name not in fields.COMMON]
    return "\n".join(lines) + "\n"


def refused_table() -> str:
    lines = ["| field | accepted, since it asks for nothing |", "|---|---|"]
    both = fields.NEUTRAL
    for route, table in (("", both), ("completions: ", _but(fields.COMPLETION_NEUTRAL, both)),
                         ("chat: ", _but(fields.CHAT_NEUTRAL, both))):
        for name, accepted in table.items():
            shown = ", ".join(["null", *(orjson.dumps(one).decode() for one in accepted)])
            lines.append(f"| {route}`{name}` | {shown} |")
    return "\n".join(lines) + "\n"


def _but(table: Mapping[str, tuple[Any, ...]], others: Collection[str]) -> dict[str, tuple[Any, ...]]:
    return {name: accepted for name, accepted in table.items() if name not in others}


def _row(name: str, field: Field, route: str) -> str:
    default = "" if field.default is None else orjson.dumps(field.default).decode()
    return f"| {route}`{name}` | {field.kind} | {_range(field)} | {default} | {field.note} |"


def _shaped_row(name: str, text: str, route: str) -> str:
    return f"| {route}`{name}` | {text} | | | |"


def _range(field: Field) -> str:
    if field.least is None:
        return ""
    least = f"above {field.least:g}" if field.is_open else _number(field.least)
    if field.most is None:
        return f"from {least}"
    unit = " characters" if field.kind == "string" else ""
    return f"{least} to {_number(field.most)}{unit}"


def _number(value: float) -> str:
    for power in (63, 31):
        if value == -(1 << power):
            return f"-2^{power}"
        if value == (1 << power) - 1:
            return f"2^{power} - 1"
    return f"{value:g}"


TABLES: dict[str, Callable[[], str]] = {
    "<!-- table of served fields: made by tests/server/make_api_doc.py -->\n": served_table,
    "<!-- table of refused fields: made by the same -->\n": refused_table,
}


def main() -> None:
    text = DOC_PATH.read_text(encoding="utf-8")
    for start, made in TABLES.items():
        before, _, rest = text.partition(start)
        text = before + start + made() + END + rest.partition(END)[2]
    DOC_PATH.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
