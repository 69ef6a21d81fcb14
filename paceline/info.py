"""What `paceline info` tells: the memory ledger, what fits, the numeric path, and what packing the weights costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from . import build
from .bench import step_profile
from .bench.kernels import BenchModel
from .build import LoadedModel, assemble, chat_template, check_names, kv_groups, max_step_tokens, notice
from .config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from .errors import ConfigError
from .kv.groups import KVBudget
from .model.decoder import estimated_weights_bytes, num_active_weights, num_matrix_weights, weights_bytes
from .model.spec import ModelSpec
from .ops.cpu import CpuBackend, available_paths, cpu_features
from .ops.interface import Backend
from .ops.machine import available_memory_bytes
from .runner import quality
from .runner.executor import ModelExecutor
from .runner.kv_tensors import kv_bytes, kv_spec

MEMORY_RESERVE = 256 << 20    # beside the reference's weights: its tables and buffers, and two steps' logits


def parameter_counts(spec: ModelSpec) -> dict[str, int]:
    """Weights of matrices; where there are experts, also those that one token meets."""
    counts = {"parameters": num_matrix_weights(spec)}
    if spec.num_experts:
        counts |= {"active_parameters": num_active_weights(spec), "experts": spec.num_experts,
                   "experts_per_token": spec.experts_per_token}
    return counts


def describe(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """What `paceline info` tells: the memory ledger, what fits, and the numeric path chosen."""
    check_names(config)
    template = chat_template(config.model)
    loaded = build.load_model(config.model)
    spec, groups = loaded.files.spec, kv_groups(loaded)
    kv = kv_spec(spec, loaded.groups, config.cache, config.model.kv_dtype)
    budget = KVBudget(kv.num_blocks, kv.block_size, groups,
                      max_step_tokens(config.scheduler, loaded.max_model_len))
    reach = budget.num_tokens_that_fit(loaded.max_model_len)
    available = available_memory_bytes()    # with the weights loaded
    return {
        "model": {
            "source": loaded.files.source, "family": spec.family, "layers": spec.num_layers,
            "hidden_size": spec.hidden_size, "query_heads": spec.num_heads, "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim, "vocabulary": spec.vocab_size, "model_max_tokens": spec.max_position,
            **parameter_counts(spec),
            "chat_template": config.model.chat_template or ("none" if template is None else "the model's own"),
            "system_fingerprint": loaded.fingerprint,
        },
        "memory": {
            **{f"{form}_weights_bytes": size for form, size in sorted(loaded.weight_forms.items())},
            "tables_bytes": weights_bytes(loaded.program) - sum(loaded.weight_forms.values()),
            "kv_pool_bytes": kv.num_blocks * kv.bytes_per_block, "kv_blocks": kv.num_blocks,
            "kv_block_tokens": kv.block_size, "kv_per_token_bytes": kv.bytes_per_token * len(groups),
            "kv_layer_groups": [{"window": group.window, "layers": len(group.layers)} for group in loaded.groups],
            "kv_tokens_that_fit": kv.num_blocks // len(groups) * kv.block_size, "longest_request_tokens": reach,
            "full_length_requests_that_fit": kv.num_blocks // budget.blocks_needed(reach) if reach else 0,
            "kv_pages": kv.pages, "memory_available_bytes": available,
            "largest_pool_blocks": None if available is None else available // kv.bytes_per_block,
            "pool_fits_memory": available is None or kv_bytes(kv) <= available,
        },
        "packing": {"conversions": loaded.conversions},
        "processor": _processor(loaded.backend),
        "schedule": {name: getattr(config.scheduler, name) for name in config.scheduler.__dataclass_fields__}
        | {"prefix_cache": config.cache.prefix_cache},
    }


def _processor(backend: Backend) -> dict[str, Any]:
    return {
        "path": backend.path_name, "paths_that_run_here": [*available_paths(), "numpy"],
        "threads": getattr(backend, "num_threads", 1), "features": cpu_features(),
        "run_ahead": "on" if getattr(backend, "runs_ahead", False) else "off",
    }


def describe_quality(config: ModelConfig) -> dict[str, dict[str, Any]]:
    """The sections of `info --quality`: the model as `config` would serve it against its own source's values."""
    loaded = build.load_model(config)
    reference_dtype = _reference_dtype(loaded)
    reference = build.load_model(replace(config, dtype=reference_dtype, kv_dtype="f32"))
    tokenizer, size = loaded.files.tokenizer, min(quality.WINDOW_TOKENS, loaded.max_model_len)
    text = tokenizer.encode(quality.TEXT_PATH.read_text(encoding="utf-8"), add_special_tokens=False)
    windows = quality.windows(text, tokenizer.encode("", add_special_tokens=True)[:1], size)
    with tqdm(total=sum(len(window.token_ids) for window in windows), unit="token", disable=None) as bar:
        facts = quality.compare(windows, _executor(loaded, size), _executor(reference, size), bar.update)
    return {
        "quality": {
            "measured": f"weights {', '.join(sorted(loaded.weight_forms))}; KV {config.kv_dtype}",
            "reference": f"weights {reference_dtype}, of the dequantised source; KV f32", **facts,
        },
        "quality_definitions": dict(quality.DEFINITIONS),
    }


def describe_profile(config: ModelConfig) -> dict[str, Any]:
    """The sections of `info --profile`: where the time of a step goes."""
    steps = step_profile.profile(bench_model(build.load_model(config)))
    return {"profile": steps, "profile_definition": step_profile.DEFINITION}


def profile_table(profile: Mapping[str, Any]) -> list[str]:
    """For a person: nothing where nothing was profiled."""
    return [step_profile.table(profile["profile"])] if profile else []


def bench_model(loaded: LoadedModel) -> BenchModel:
    """What the timers of the step runner are read from. Raises ConfigError where the path has none."""
    if not isinstance(loaded.backend, CpuBackend):
        raise ConfigError(f"the timers are the compiled kernels'; isa={loaded.backend.path_name!r} has none")
    kv = kv_spec(loaded.files.spec, loaded.groups, CacheConfig(num_kv_blocks=1), loaded.config.kv_dtype)
    # The same step again and again is never the one that follows: begun ahead, it would only be in the way.
    backend = CpuBackend(loaded.config.isa, loaded.config.num_threads, runs_ahead=False)
    return BenchModel(loaded.program, kv, loaded.max_model_len, backend.bind)


def _reference_dtype(loaded: LoadedModel) -> str:
    """f32, or where the machine has no room for it beside the model: bf16."""
    needed = estimated_weights_bytes(loaded.files.spec, loaded.files.weights, "f32") + MEMORY_RESERVE
    available = available_memory_bytes()
    if available is None or needed <= available:
        return "f32"
    notice(f"the reference is bf16: f32 needs {needed} bytes, {available} are available")
    return "bf16"


def _executor(loaded: LoadedModel, num_tokens: int) -> ModelExecutor:
    cache = CacheConfig()
    cache = replace(cache, num_kv_blocks=-(-num_tokens // cache.block_size))
    return assemble(loaded, cache, SchedulerConfig(), keep_logits=True).executor
