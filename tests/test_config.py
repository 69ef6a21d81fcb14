"""Knobs: one declaration each, refused when out of range, bundled by presets, turned into flags."""

from __future__ import annotations

from dataclasses import fields

import pytest

from paceline.cli import _parser, configured
from paceline.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from paceline.errors import ConfigError
from paceline.presets import PRESETS, preset_named

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


def test_the_default_preset_states_every_scheduler_knob() -> None:
    assert set(PRESETS["paceline"].scheduler) == {declared.name for declared in fields(SchedulerConfig)}
    assert SchedulerConfig(**PRESETS["paceline"].scheduler) == SchedulerConfig()


def test_an_unknown_preset_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"preset='orca' is unknown; choose from \['paceline', 'vllm'\]"):
        preset_named("orca")


def test_every_knob_has_a_flag_in_help(capsys) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["serve", "--help"])
    text = capsys.readouterr().out
    for group in GROUPS:
        for declared in fields(group):
            if declared.metadata["flag"]:
                assert "--" + declared.name.replace("_", "-") in text
