"""Named bundles of policies. A preset is a set of values for SchedulerConfig and CacheConfig knobs, nothing else; a
knob given explicitly wins over the preset's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .config import CacheConfig, EngineConfig, JournalConfig, ModelConfig, SchedulerConfig, refuse_unread
from .errors import ConfigError

DEFAULT_PRESET = "paceline"
POLICY_NAMES = ("regime", "gate", "ordering", "admission", "preemption", "victim", "chunking", "prefix_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Values by knob name. source: where the imitated behaviour is described in public; signature: what its schedule
    shows; differs: where the imitation ends."""

    source: str
    signature: str
    differs: str
    scheduler: Mapping[str, Any]
    cache: Mapping[str, Any] = field(default_factory=dict)


NO_PREEMPTION = {"admission": "reserve", "preemption": "never"}
ON_DEMAND = {"admission": "watermark", "watermark": 0.0, "preemption": "recompute", "victim": "latest_arrival"}

PRESETS: dict[str, Preset] = {
    "paceline": Preset(
        source="our default; docs/policies.md tells how it was chosen",
        signature="prefill and decode share steps of at most 512 tokens; a prefix that many bring at once runs once",
        differs="nothing is imitated",
        scheduler={
            "regime": "continuous", "ordering": "fcfs", "admission": "watermark", "preemption": "recompute",
            "victim": "latest_arrival", "chunking": "fixed", "max_num_seqs": 64, "max_num_batched_tokens": 512,
            "watermark": 0.01, "gate": "none", "max_batch_prefill_tokens": None,
        },
        cache={"prefix_cache": "hash"},
    ),
    "static": Preset(
        # A row that has ended goes on with padding tokens until all rows have (GenerationMixin: unfinished_sequences).
        source="Hugging Face transformers, documentation of text generation: generate on a batch of prompts",
        signature="nobody joins a batch that runs; finished rows are computed until the longest has ended",
        differs="prompts are not padded to the longest one; the batch size, a caller's choice there, is 8",
        scheduler={
            "regime": "static_padded", "ordering": "fcfs", **NO_PREEMPTION, "chunking": "whole", "max_num_seqs": 8,
            "max_num_batched_tokens": 8192,
        },
        cache={"prefix_cache": "none"},
    ),
    "dynamic": Preset(
        # max_queue_delay_microseconds and preferred_batch_size of a model's dynamic_batching section.
        source="NVIDIA Triton Inference Server, user guide, 'Batchers': dynamic batcher",
        signature="a batch waits to be full or for its oldest member to be due, then runs to its end",
        differs="the delay, which each Triton model sets for itself, is 0.1 s; the batch size is 8",
        scheduler={
            "regime": "dynamic", "batch_timeout_seconds": 0.1, "ordering": "fcfs", **NO_PREEMPTION,
            "chunking": "whole", "max_num_seqs": 8, "max_num_batched_tokens": 8192,
        },
        cache={"prefix_cache": "none"},
    ),
    "tgi": Preset(
        # Defaults of max_concurrent_requests, waiting_served_ratio, max_waiting_tokens and max_batch_prefill_tokens.
        source="Hugging Face text-generation-inference 2.x, documentation: launcher arguments; its router's queue",
        signature="first in, first out; new prompts gather until enough wait, then stall decode; nobody is preempted",
        differs="version 3 also has prefix caching and chunking; a full queue answers 429 by --max-queue, not at 128",
        scheduler={
            "regime": "continuous", "gate": "waiting_served", "waiting_served_ratio": 0.3, "max_waiting_tokens": 20,
            "ordering": "fcfs", **NO_PREEMPTION, "chunking": "whole", "max_num_seqs": 128,
            "max_num_batched_tokens": 4096, "max_batch_prefill_tokens": 4096,
        },
        cache={"prefix_cache": "none"},
    ),
    "vllm": Preset(
        # max_num_seqs and the token budget are the defaults of its offline and serving entry points for small devices.
        source="vLLM documentation, 'Optimization and Tuning' (V1): chunked prefill, preemption by recompute, "
               "automatic prefix caching; defaults of SchedulerConfig",
        signature="steps of up to 2,048 tokens mix decodes and chunks; short of blocks, the latest starts over",
        differs="prompts that arrive together with one prefix compute it once here",
        scheduler={
            "regime": "continuous", "ordering": "fcfs", **ON_DEMAND, "chunking": "fixed", "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
        },
        cache={"prefix_cache": "hash", "block_size": 16},
    ),
    "trtllm-no-evict": Preset(
        # GUARANTEED_NO_EVICT, the default; max_batch_size 2048, max_num_tokens 8192, tokens_per_block 32.
        source="NVIDIA TensorRT-LLM documentation: executor API, capacity scheduler policy; tuning of max batch size "
               "and max num tokens",
        signature="a request starts only when the blocks to its end are free; decodes and chunks share a step",
        differs="its batches in flight over pipeline stages and its tuned shapes are not imitated",
        scheduler={
            "regime": "continuous", "ordering": "fcfs", **NO_PREEMPTION, "chunking": "fixed", "max_num_seqs": 2048,
            "max_num_batched_tokens": 8192,
        },
        cache={"prefix_cache": "hash", "block_size": 32},
    ),
    "trtllm-max-util": Preset(
        source="NVIDIA TensorRT-LLM documentation: executor API, capacity scheduler policy MAX_UTILIZATION",
        signature="starts whoever fits now, in steps of up to 8,192 tokens; the last started is paused and starts over",
        differs="as trtllm-no-evict",
        scheduler={
            "regime": "continuous", "ordering": "fcfs", **ON_DEMAND, "chunking": "fixed", "max_num_seqs": 2048,
            "max_num_batched_tokens": 8192,
        },
        cache={"prefix_cache": "hash", "block_size": 32},
    ),
    "sglang": Preset(
        # schedule-policy lpm; schedule-conservativeness; chunked-prefill-size 8192; enable-mixed-chunk off; decode
        # retracts those with the shortest outputs.
        source="Zheng et al., 'SGLang: Efficient Execution of Structured Language Model Programs', NeurIPS 2024; "
               "SGLang documentation: server arguments",
        signature="who has most of the prompt cached starts first, on the output length that is likely; prefill stalls "
                  "decode",
        differs="whole blocks are found by hash: the radix cache is not built yet; a prompt beyond 8,192 runs whole",
        scheduler={
            "regime": "continuous", "ordering": "longest_prefix", "admission": "overcommit", "preemption": "recompute",
            "victim": "most_remaining", "chunking": "whole", "max_num_seqs": 256, "max_num_batched_tokens": 8192,
        },
        cache={"prefix_cache": "hash"},
    ),
    "lmdeploy": Preset(
        # max_batch_size 128, cache_block_seq_len 64, max_prefill_token_num 8192, enable_prefix_caching off.
        source="LMDeploy documentation: TurboMind architecture, persistent batch; TurbomindEngineConfig",
        signature="a persistent batch of 128 slots takes prompts between decodes and recomputes those it evicted",
        differs="the least recently used sequence goes first there, the latest arrival here; no sessions are kept",
        scheduler={
            "regime": "continuous", "ordering": "fcfs", **ON_DEMAND, "chunking": "fixed", "max_num_seqs": 128,
            "max_num_batched_tokens": 8192,
        },
        cache={"prefix_cache": "none", "block_size": 64},
    ),
    "fastgen": Preset(
        # RaggedBatchConfig: max_ragged_batch_size 768, max_ragged_sequence_count 512; KV blocks of 64.
        source="Holmes et al., 'DeepSpeed-FastGen: High-throughput Text Generation for LLMs via MII and "
               "DeepSpeed-Inference', 2024: Dynamic SplitFuse; DeepSpeed's inference configuration",
        signature="long prompts are split and short ones fused until a step has its 768 tokens",
        differs="short of blocks one request starts over, where MII resets all when nothing can run",
        scheduler={
            "regime": "continuous", "ordering": "fcfs", **ON_DEMAND, "chunking": "fixed", "max_num_seqs": 512,
            "max_num_batched_tokens": 768,
        },
        cache={"prefix_cache": "none", "block_size": 64},
    ),
}


def preset_named(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(f"preset={name!r} is unknown; choose from {sorted(PRESETS)}")
    return PRESETS[name]


def engine_config(preset_name: str, knobs: Mapping[str, Any]) -> EngineConfig:
    """The preset's values with the given knobs over them.

    Raises ConfigError for a knob that nobody declares, and for one given that has no effect under the policies chosen;
    a preset's own is then not read, and that is all.
    """
    preset = preset_named(preset_name)
    chosen = {**preset.scheduler, **preset.cache, **knobs}
    groups = (ModelConfig, CacheConfig, SchedulerConfig, JournalConfig)
    owned = [{declared.name for declared in fields(group)} for group in groups]
    if unknown := sorted(set(chosen).difference(*owned)):
        raise ConfigError(f"unknown knob {unknown[0]!r}; choose from {sorted(set().union(*owned))}")
    model, cache, scheduler, journal = ({name: chosen[name] for name in names & set(chosen)} for names in owned)
    config = EngineConfig(
        model=ModelConfig(**model), cache=CacheConfig(**cache), scheduler=SchedulerConfig(**scheduler),
        journal=JournalConfig(**journal))
    refuse_unread(config.scheduler, knobs)
    return config


def describe_preset(name: str, config: EngineConfig) -> dict[str, dict[str, Any]]:
    """What `paceline info --preset NAME` tells: the source, what to expect, and the rows as `config` has them."""
    preset = preset_named(name)
    rows = [(group, row) for group in (config.scheduler, config.cache) for row in group.__dataclass_fields__]
    stated = {row: getattr(group, row) for group, row in rows
              if row in {**preset.scheduler, **preset.cache} or row in POLICY_NAMES}
    return {"preset": {"name": name, "source": preset.source, "signature": preset.signature, "differs": preset.differs},
            "rows": stated}
