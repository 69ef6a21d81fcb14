"""How far back each layer looks, as config.json or GGUF metadata say it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .family_table import Family, every_nth
from .fields import Fields

Windows = tuple[int | None, ...]    # one per layer; () where all layers see all
KINDS = {"full_attention": False, "sliding_attention": True}


def windows_from_config(config: Fields, family: Family, max_position: int) -> Windows:
    """layer_types says which layers have the window; without it, the family's own pattern."""
    num_layers = config.integer("num_hidden_layers")
    window = _window_of_config(config, family)
    if window is not None and window < 1:
        raise config.refuse("sliding_window", "must be at least 1")
    slides = _listed_layers(config, num_layers) if config.has("layer_types") else None
    if slides is None:
        slides = family.slides(config, num_layers) if window is not None and family.slides is not None else ()
        if window is not None and window < max_position and family.slides is None:
            shown = Fields({"sliding_window": window}, config.where)
            raise shown.refuse("sliding_window", "windows are not supported for this family")
    elif any(slides) and window is None:
        raise config.refuse("layer_types", "names sliding_attention, but there is no sliding_window")
    return tuple(window if is_sliding else None for is_sliding in slides) if any(slides) else ()


def _window_of_config(config: Fields, family: Family) -> int | None:
    default = None if "sliding_window" in config.values else family.default_window
    window = config.integer("sliding_window", default)
    return window if config.flag("use_sliding_window", not family.needs_window_flag) else None


def _listed_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    kinds: Any = config.values["layer_types"]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in KINDS for kind in kinds):
        raise config.refuse("layer_types", f"must be a list of {' and '.join(KINDS)}")
    if len(kinds) != num_layers:
        raise config.refuse("layer_types", f"must have one entry for each of the {num_layers} layers")
    return tuple(KINDS[kind] for kind in kinds)


def windows_from_gguf(metadata: Fields, family: Family, prefix: str) -> Windows:
    """sliding_window_pattern where a file has it (which layers slide, or that every n-th does not); else the pattern
    that llama.cpp fixes for the architecture."""
    num_layers = metadata.integer(f"{prefix}block_count")
    name, pattern = f"{prefix}attention.sliding_window", f"{prefix}attention.sliding_window_pattern"
    window = metadata.integer(name, 0)
    if window < 0:
        raise metadata.refuse(name, "must be positive")
    if window == 0 or num_layers > 10**5:    # a claim, not a model; its tensors will be counted
        return ()
    if metadata.has(pattern):
        slides = _pattern_layers(metadata, pattern, num_layers)
    elif family.slides is not None:
        slides = family.slides(Fields({}, metadata.where), num_layers)
    elif window < metadata.integer(f"{prefix}context_length"):
        raise metadata.refuse(name, "windows are not supported for this family")
    else:
        slides = ()
    return tuple(window if is_sliding else None for is_sliding in slides) if any(slides) else ()


def _pattern_layers(metadata: Fields, name: str, num_layers: int) -> tuple[bool, ...]:
    value = metadata.values[name]
    if isinstance(value, np.ndarray):
        if value.shape != (num_layers,):
            raise metadata.refuse(name, f"must have one entry for each of the {num_layers} layers")
        return tuple(bool(flag) for flag in value)
    interval = metadata.integer(name)
    if interval < 0:
        raise metadata.refuse(name, "must not be negative")
    full = set(every_nth(num_layers, interval)) if interval else set(range(num_layers))
    return tuple(layer not in full for layer in range(num_layers))
