"""What `paceline journal` and `paceline replay` do: journals in, facts for people and for --json out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from .build import build_policies, build_scheduler
from .config import CacheConfig, EngineConfig, SchedulerConfig
from .engine import counterfactual
from .engine.journal_summary import Chart, Summary
from .engine.replay import Journaled, Replay, Replayed
from .presets import engine_config
from .sched.setup import SchedulerSetup


def summary(path: str, width: int, max_lanes: int) -> tuple[dict[str, dict[str, Any]], Chart]:
    """Facts by section, and the chart of requests over steps."""
    chart = Chart(width, max_lanes)
    return Summary(Journaled.read(path), chart).facts(), chart


def replayed(path: str) -> Replayed:
    return Replay(Journaled.read(path), build_scheduler, build_policies).run()


def replay_facts(seen: Replayed) -> dict[str, Any]:
    return {"is_identical": seen.difference is None, "steps": seen.num_steps, "requests": seen.num_requests,
            "difference": None if seen.difference is None else asdict(seen.difference)}


def rehearsed(path: str, preset: str | None, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The counterfactual: other policies, given by a preset, by knobs, or by both."""
    journaled = Journaled.read(path)
    other = other_setup(journaled.setup, preset, knobs)
    changed = {name: f"{old} -> {new}" for name, (old, new) in _changes(journaled.setup, other).items()}
    return {"is_counterfactual": True, "rule": counterfactual.RULE, "preset": preset, "changed": changed,
            "columns": counterfactual.compare(journaled, other, build_scheduler)}


def other_setup(setup: SchedulerSetup, preset: str | None, knobs: Mapping[str, Any]) -> SchedulerSetup:
    """The journal's memory under other policies: the preset's or else its own, with the knobs over them."""
    if preset is not None:
        chosen: EngineConfig = engine_config(preset, knobs)
        sched, prefix_cache = chosen.scheduler, chosen.cache.prefix_cache
    else:
        names = {declared.name for declared in fields(SchedulerConfig)}
        sched = replace(setup.scheduler, **{name: value for name, value in knobs.items() if name in names})
        prefix_cache = knobs.get("prefix_cache", setup.prefix_cache)
    num_blocks = CacheConfig(num_kv_blocks=knobs.get("num_kv_blocks")).num_kv_blocks or setup.num_blocks
    return replace(setup, scheduler=sched, prefix_cache=prefix_cache, num_blocks=num_blocks)


def _changes(old: SchedulerSetup, new: SchedulerSetup) -> dict[str, tuple[Any, Any]]:
    before = asdict(old.scheduler) | {"prefix_cache": old.prefix_cache, "num_kv_blocks": old.num_blocks}
    after = asdict(new.scheduler) | {"prefix_cache": new.prefix_cache, "num_kv_blocks": new.num_blocks}
    return {name: (before[name], after[name]) for name in after if before[name] != after[name]}


def table(facts: Mapping[str, Any]) -> str:
    """The counterfactual for people."""
    titles = {"journal": "journal", "own_by_rule": "its policies, by rule", "other_by_rule": "others, by rule"}
    columns = facts["columns"]
    names = list(columns["journal"])
    rows = [["", *titles.values()]]
    rows += [[name.replace("_", " "), *(_figure(columns[column][name]) for column in titles)] for name in names]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    changed = ", ".join(f"{name} {change}" for name, change in facts["changed"].items()) or "nothing"
    return "\n".join([
        f"COUNTERFACTUAL, not measured: {facts['rule']}.", f"changed: {changed}", "",
        *("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:],
          strict=True))]).rstrip() for row in rows)])


def _figure(value: Any) -> str:
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
