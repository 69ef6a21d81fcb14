"""Named bundles of policies. A preset is a set of values for SchedulerConfig and CacheConfig knobs, nothing else; a
knob given explicitly wins over the preset's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .config import CacheConfig, EngineConfig, JournalConfig, ModelConfig, SchedulerConfig
from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Preset:
    """values by knob name; source: where the imitated behaviour is described."""

    source: str
    scheduler: Mapping[str, Any]
    cache: Mapping[str, Any] = field(default_factory=dict)


PRESETS: dict[str, Preset] = {
    "paceline": Preset(
        source="our default: the best we know so far",
        scheduler={
            "regime": "continuous", "ordering": "fcfs", "admission": "watermark", "preemption": "recompute",
            "victim": "latest_arrival", "chunking": "fixed", "max_num_seqs": 64, "max_num_batched_tokens": 512,
            "watermark": 0.01,
        },
        cache={"prefix_cache": "hash"},
    ),
    "vllm": Preset(
        # max_num_seqs and the token budget are the defaults of its offline and serving entry points for small devices.
        source="vLLM documentation, 'Optimization and Tuning' (V1): chunked prefill, preemption by recompute, "
               "automatic prefix caching; defaults of SchedulerConfig",
        scheduler={
            "regime": "continuous", "ordering": "fcfs", "admission": "watermark", "preemption": "recompute",
            "victim": "latest_arrival", "chunking": "fixed", "max_num_seqs": 256, "max_num_batched_tokens": 2048,
            "watermark": 0.0,
        },
        cache={"prefix_cache": "hash"},
    ),
}


def preset_named(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(f"preset={name!r} is unknown; choose from {sorted(PRESETS)}")
    return PRESETS[name]


def engine_config(preset_name: str, knobs: Mapping[str, Any]) -> EngineConfig:
    """The preset's values with the given knobs over them. Raises ConfigError for a knob nobody declares."""
    preset = preset_named(preset_name)
    chosen = {**preset.scheduler, **preset.cache, **knobs}
    groups = (ModelConfig, CacheConfig, SchedulerConfig, JournalConfig)
    owned = [{declared.name for declared in fields(group)} for group in groups]
    if unknown := sorted(set(chosen).difference(*owned)):
        raise ConfigError(f"unknown knob {unknown[0]!r}; choose from {sorted(set().union(*owned))}")
    model, cache, scheduler, journal = ({name: chosen[name] for name in names & set(chosen)} for names in owned)
    return EngineConfig(model=ModelConfig(**model), cache=CacheConfig(**cache), scheduler=SchedulerConfig(**scheduler),
                        journal=JournalConfig(**journal))
