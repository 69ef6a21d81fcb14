"""Knobs: one declaration each, refused when out of range, bundled by presets, turned into flags."""

from __future__ import annotations

from dataclasses import fields

import pytest

from paceline.cli import _parser, configured
from paceline.config import READ_BY, CacheConfig, ModelConfig, SchedulerConfig, ServerConfig, is_read
from paceline.errors import ConfigError
from paceline.presets import PRESETS, engine_config, preset_named

GROUPS = (ModelConfig, CacheConfig, SchedulerConfig, ServerConfig)


def parsed(*argv: str):
    return configured(_parser().parse_args(argv))


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_knob_says_what_it_means(group) -> None:
    for declared in fields(group):
        assert declared.metadata["help"], declared.name


@pytest.mark.parametrize(("group", "values", "said"), [
    (SchedulerConfig, {"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1, got 0"),
    (SchedulerConfig, {"watermark": float("nan")}, "watermark must be at least 0.0, got nan"),
    (CacheConfig, {"block_size": 17}, "block_size=17 is unknown; choose from [16, 32, 64]"),
    (ModelConfig, {"kv_dtype": "int3"}, "kv_dtype='int3' is unknown; choose from ['f32', 'bf16']"),
    (ServerConfig, {"port": 70000}, "port must be at most 65535, got 70000"),
])
def test_a_value_out_of_range_is_refused_by_name_value_and_limit(group, values, said) -> None:
    with pytest.raises(ConfigError) as refused:
        group(**values)
    assert str(refused.value) == said


def test_a_flag_wins_over_the_preset_and_the_preset_over_the_default() -> None:
    assert parsed("serve", "smollm2", "--preset", "vllm").scheduler.max_num_batched_tokens == 2048
    chosen = parsed("serve", "smollm2", "--preset", "vllm", "--max-num-batched-tokens", "64").scheduler
    assert (chosen.max_num_batched_tokens, chosen.max_num_seqs) == (64, PRESETS["vllm"].scheduler["max_num_seqs"])


def test_the_default_preset_states_every_scheduler_knob_that_its_policies_read() -> None:
    stated = SchedulerConfig(**PRESETS["paceline"].scheduler)
    assert stated == SchedulerConfig()
    assert set(PRESETS["paceline"].scheduler) == {
        declared.name for declared in fields(SchedulerConfig) if is_read(stated, declared.name)}


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_states_a_knob_that_its_policies_do_not_read(name: str) -> None:
    stated = SchedulerConfig(**PRESETS[name].scheduler)
    assert [knob for knob in PRESETS[name].scheduler if not is_read(stated, knob)] == []


@pytest.mark.parametrize("knob", READ_BY)
def test_a_knob_without_effect_is_refused_and_where_it_is_read_it_is_taken(knob: str) -> None:
    concern, readers = READ_BY[knob]
    other = next(name for name in ("fcfs", "reserve", "none", "continuous", "recompute") if name not in readers)
    values = {knob: getattr(SchedulerConfig(), knob)}
    with pytest.raises(ConfigError, match=rf"{knob} has no effect with {concern}='{other}'; .* {readers[0]}"):
        engine_config("paceline", {concern: other, **values})
    for reader in readers:
        assert getattr(engine_config("paceline", {concern: reader, **values}).scheduler, concern) == reader


def test_a_knob_of_the_preset_that_another_policy_leaves_unread_is_no_mistake() -> None:
    config = engine_config("paceline", {"admission": "reserve"}).scheduler
    assert config.admission == "reserve" and not is_read(config, "watermark")


def test_tenant_weights_name_tenants() -> None:
    config = SchedulerConfig(ordering="fair", tenant_weights="a=2, b:x=0.5")
    assert [config.weight_of_tenant(tenant) for tenant in ("a", "b:x", "c")] == [2.0, 0.5, 1.0]
    for text in ("a", "a=", "=2", "a=b", "a=0", "a=-1", "a=nan", "a=2000"):
        with pytest.raises(ConfigError, match="tenant_weights"):
            SchedulerConfig(ordering="fair", tenant_weights=text)


def test_an_unknown_preset_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"preset='orca' is unknown; choose from \['dynamic', 'fastgen', .*'vllm'\]"):
        preset_named("orca")


def test_every_knob_has_a_flag_in_help(capsys) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["serve", "--help"])
    text = capsys.readouterr().out
    for group in GROUPS:
        for declared in fields(group):
            if declared.metadata["flag"]:
                assert "--" + declared.name.replace("_", "-") in text
