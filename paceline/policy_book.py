"""Policies and presets by name for an engine that is running: what it can be switched to, and what it schedules by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args, get_type_hints

from .config import CacheConfig, ModelConfig, SchedulerConfig, refuse_unread
from .engine.messages import KnobValue, PolicyState, SwitchPolicy
from .errors import ConfigError
from .presets import PRESETS, engine_config
from .sched.policies import Policies

SWITCHABLE = {declared.name for declared in fields(SchedulerConfig)}
FIXED = {declared.name for group in (CacheConfig, ModelConfig) for declared in fields(group)}
KINDS = {int: "a whole number", float: "a number", str: "a string", type(None): "null"}


@dataclass(frozen=True, slots=True)
class PolicyBook:
    """Of an engine with this cache, which stays as it is."""

    cache: CacheConfig
    build: Callable[[SchedulerConfig], Policies]
    reads_priority: Callable[[SchedulerConfig], bool]

    def resolve(self, asked: SwitchPolicy, current: SchedulerConfig) -> tuple[SchedulerConfig, Policies]:
        """The whole of what to switch to. Raises ConfigError, beginning with the field, where any of it cannot be."""
        config = self._config(asked.preset, dict(asked.knobs), current)
        return config, self.build(config)

    def _config(self, preset: str | None, knobs: dict[str, Any], current: SchedulerConfig) -> SchedulerConfig:
        if preset is None and not knobs:
            raise ConfigError(f"preset: nothing was asked for; give it, or some of {sorted(SWITCHABLE)}")
        for name in knobs:
            if name not in SWITCHABLE | FIXED:
                raise ConfigError(f"{name} is unknown; choose from {['preset', *sorted(SWITCHABLE)]}")
        knobs = {name: _typed(name, value) for name, value in knobs.items()}
        self._check_fixed(knobs, "it")
        scheduling = {name: value for name, value in knobs.items() if name in SWITCHABLE}
        if preset is None:
            config = replace(current, **scheduling)
            refuse_unread(config, scheduling)
            return config
        chosen = engine_config(preset, scheduling)
        self._check_fixed({**PRESETS[preset].cache, **knobs}, f"preset {preset}")
        return chosen.scheduler

    def _check_fixed(self, wanted: Mapping[str, Any], who: str) -> None:
        """The cache was built once. Its own values may be named, beside a preset that has others."""
        own = {name: getattr(self.cache, name, "another") for name in sorted(wanted) if name in FIXED}
        other = [name for name in own if wanted[name] != own[name]]
        if other:
            pairs = [f"{name}={wanted[name]!r} instead of {own[name]!r}" for name in other]
            raise ConfigError(f"{other[0]} cannot change on a running server; {who} wants {', '.join(pairs)}"
                              + (f"; to keep the server's, add {', '.join(other)} with its values"
                                 if set(other) <= set(asdict(self.cache)) else ""))

    def describe(self, config: SchedulerConfig) -> PolicyState:
        knobs: dict[str, KnobValue] = asdict(config) | {"prefix_cache": self.cache.prefix_cache}
        named = (name for name, preset in PRESETS.items() if engine_config(name, {}).scheduler == config
                 and all(getattr(self.cache, knob) == value for knob, value in preset.cache.items()))
        return PolicyState(preset=next(named, None), knobs=tuple(knobs.items()),
                           reads_priority=self.reads_priority(config))


def _typed(name: str, value: KnobValue) -> KnobValue:
    """The value as the knob declares it. A whole number is a number; nothing else is taken for another."""
    if name not in SWITCHABLE:
        return value
    declared = get_type_hints(SchedulerConfig)[name]
    kinds = get_args(declared) or (declared,)
    if type(value) is int and float in kinds and int not in kinds:
        return float(value)
    if type(value) not in kinds:
        raise ConfigError(f"{name} must be {' or '.join(KINDS[kind] for kind in kinds)}, got {value!r}")
    return value
