"""What a running engine can be switched to: presets, single knobs, both; and what is refused, whole and by name."""

from __future__ import annotations

import pytest

from paceline.build import build_policies, reads_priority
from paceline.config import CacheConfig, SchedulerConfig
from paceline.engine.messages import SwitchPolicy
from paceline.errors import ConfigError, field_of
from paceline.policy_book import PolicyBook
from paceline.presets import PRESETS, engine_config
from paceline.sched.ordering import ORDERINGS

BOOK = PolicyBook(CacheConfig(), build_policies, reads_priority)
PACELINE = engine_config("paceline", {}).scheduler


def asked(preset: str | None = None, **knobs: object) -> SchedulerConfig:
    config, _ = BOOK.resolve(SwitchPolicy(preset, tuple(knobs.items())), PACELINE)    # type: ignore[arg-type]
    return config


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_schedule_is_taken_whole(name: str) -> None:
    preset = engine_config(name, {})
    book = PolicyBook(preset.cache, build_policies, reads_priority)
    config, _ = book.resolve(SwitchPolicy(name), PACELINE)
    assert config == preset.scheduler and book.describe(config).preset == name
    assert asked(name, prefix_cache="hash", block_size=16) == preset.scheduler    # on a server with another cache


def test_a_knob_alone_leaves_the_others_as_they_are() -> None:
    config, policies = BOOK.resolve(SwitchPolicy(None, (("ordering", "priority"), ("max_num_seqs", 3))), PACELINE)
    assert (config.ordering, config.max_num_seqs, config.victim) == ("priority", 3, PACELINE.victim)
    assert policies.ordering is ORDERINGS["priority"]
    assert BOOK.describe(config).preset is None and BOOK.describe(config).reads_priority


def test_a_knob_outranks_the_preset_beside_it() -> None:
    assert asked("vllm", max_num_seqs=5).max_num_seqs == 5
    assert asked("vllm", watermark=0).watermark == 0.0


@pytest.mark.parametrize(("preset", "knobs", "param", "reason"), [
    (None, {}, "preset", "nothing was asked for"),
    ("sglnag", {}, "preset", "'sglnag' is unknown; choose from"),
    (None, {"ordering": "lifo"}, "ordering", "'lifo' is unknown; choose from"),
    (None, {"max_num_seqs": 0}, "max_num_seqs", "at least 1, got 0"),
    (None, {"max_num_seqs": "8"}, "max_num_seqs", "must be a whole number, got '8'"),
    (None, {"max_num_seqs": True}, "max_num_seqs", "must be a whole number, got True"),
    (None, {"max_num_seqs": 2.5}, "max_num_seqs", "must be a whole number, got 2.5"),
    (None, {"watermark": "a lot"}, "watermark", "must be a number"),
    (None, {"ordering": None}, "ordering", "must be a string, got None"),
    (None, {"max_num_sequences": 3}, "max_num_sequences", "unknown; choose from"),
    (None, {"prefix_cache": "none"}, "prefix_cache", "cannot change on a running server"),
    ("vllm", {"num_kv_blocks": 900}, "num_kv_blocks", "cannot change on a running server"),
    (None, {"model": "other"}, "model", "cannot change on a running server"),
])
def test_what_cannot_be_is_refused_by_name(preset: str | None, knobs: dict, param: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        asked(preset, ordering="priority", **knobs) if knobs and "ordering" not in knobs else asked(preset, **knobs)
    assert field_of(refused.value) == param


def test_a_preset_with_another_cache_is_refused_unless_the_servers_own_is_named() -> None:
    book = PolicyBook(CacheConfig(prefix_cache="none"), build_policies, reads_priority)
    with pytest.raises(ConfigError, match="preset vllm wants prefix_cache='hash' instead of 'none'; to keep"):
        book.resolve(SwitchPolicy("vllm"), PACELINE)
    config, _ = book.resolve(SwitchPolicy("vllm", (("prefix_cache", "none"),)), PACELINE)
    assert book.describe(config).preset is None
