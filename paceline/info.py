"""What `paceline info` tells beyond the ledger of build.py: what packing did to the weights, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tqdm import tqdm

from .build import LoadedModel, assemble, load_model, notice
from .config import CacheConfig, ModelConfig, SchedulerConfig
from .model.decoder import estimated_weights_bytes
from .ops.machine import available_memory_bytes
from .runner import quality
from .runner.executor import ModelExecutor

MEMORY_RESERVE = 256 << 20    # beside the reference's weights: its tables and buffers, and two steps' logits


def describe_quality(config: ModelConfig) -> dict[str, dict[str, Any]]:
    """The sections of `info --quality`: the model as `config` would serve it against its own source's values."""
    loaded = load_model(config)
    reference_dtype = _reference_dtype(loaded)
    reference = load_model(replace(config, dtype=reference_dtype, kv_dtype="f32"))
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
