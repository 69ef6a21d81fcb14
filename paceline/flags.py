"""What the commands share: one flag a knob, how a mistake is told, how a result is printed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_args, get_type_hints

from .config import CacheConfig, EngineConfig, JournalConfig, ModelConfig, SchedulerConfig, ServerConfig
from .errors import EngineError
from .presets import DEFAULT_PRESET, engine_config

Group = (type[ModelConfig] | type[CacheConfig] | type[SchedulerConfig] | type[JournalConfig] | type[ServerConfig])
ENGINE_GROUPS: tuple[Group, ...] = (ModelConfig, CacheConfig, SchedulerConfig)


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, without forty lines of usage before it; takes no half-written flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def plain_command(commands: Any, name: str, run: Any, help: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    command.set_defaults(run=run)
    return command


def declared_knob(group: Group, name: str) -> Any:
    return next(field for field in fields(group) if field.name == name)


def add_knobs(command: argparse.ArgumentParser, group: Group, only: Collection[str] | None = None) -> None:
    """One flag a knob. The parser's default is None throughout: absent must differ from given, for presets."""
    types = get_type_hints(group)
    for declared in fields(group):
        if not declared.metadata.get("flag", False) or (only is not None and declared.name not in only):
            continue
        flag = "--" + declared.name.replace("_", "-")
        kind = next(iter(t for t in get_args(types[declared.name]) if t is not type(None)), types[declared.name])
        text = declared.metadata["help"].replace("%", "%%")
        if kind is bool:
            command.add_argument(flag, action="store_true", default=None, help=text)
            continue
        if declared.default is not None and declared.default is not MISSING:
            text += f" (default: {declared.default})"
        command.add_argument(flag, type=kind, default=None, help=text, metavar=_metavar(declared))


def _metavar(declared: Any) -> str:
    choices = declared.metadata["choices"]
    return "|".join(str(choice) for choice in choices) if choices else declared.name.split("_")[-1].upper()


def given_knobs(arguments: argparse.Namespace, group: Group) -> dict[str, Any]:
    names = [declared.name for declared in fields(group) if declared.metadata.get("flag", False)]
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def configured(arguments: argparse.Namespace) -> EngineConfig:
    """Preset first, explicit flags over it."""
    groups = (*ENGINE_GROUPS, JournalConfig)
    given = {name: value for group in groups for name, value in given_knobs(arguments, group).items()}
    if arguments.model is not None:
        given["model"] = arguments.model
    return engine_config(arguments.preset or DEFAULT_PRESET, given)


def ledger(facts: Mapping[str, Mapping[str, Any]]) -> str:
    width = max(len(name) for section in facts.values() for name in section)
    lines = []
    for title, section in facts.items():
        lines.append(title.replace("_", " "))
        lines += [f"  {name.replace('_', ' '):<{width}}  {_shown(name, value)}" for name, value in section.items()]
    return "\n".join(lines)


def put(text: str) -> None:
    """Prints the result. Where nobody takes it, one line says so."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())    # the interpreter flushes once more at exit
        raise EngineError(f"the result cannot be written: {error.strerror}") from error


def _shown(name: str, value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        show = _conversion if name == "conversions" else _layer_group
        return "; ".join(show(item) for item in value)
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "unknown", True: "yes", False: "no"}[value]
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value:,} ({value / 1e6:,.1f} MB)" if value >= 100_000 else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _layer_group(group: Mapping[str, Any]) -> str:
    reach = "see all before them" if group["window"] is None else f"see {group['window']:,} tokens back"
    return f"{group['layers']} layers that {reach}"


def _conversion(row: Mapping[str, Any]) -> str:
    error = row["relative_error"]
    loss = "loss not measured" if error is None else f"LOSES {error:.1e}" if error else "exact"
    return (f"{row['from']} to {row['to']}: {row['matrices']} matrices, {row['packed_bytes'] / 1e6:,.1f} MB, {loss}")
